"""Acting and learning in turn: environments on the host, learning on the mesh, no policy lag."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import jax

from jaxrl_dist.actors.host import HostActor, compile_acting
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import Clock, HostInterval, report
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Report


def synchronous(job: Job) -> Iterator[Report]:
    """Runs ``job`` with one batch of host environments; experience always comes from the newest policy."""
    clock, interval = Clock(job.resumed, job.away), HostInterval(job, job.iterations_per_report)
    update = compile_update(job.learner, job.mesh)
    with contextlib.closing(job.source.host(job.num_envs, job.session_seed)) as env:
        programs = compile_acting(job.algorithm, job.mesh, job.rollout_length, job.key(Stream.ACT))
        actor = HostActor(job.algorithm, env, job.mesh, job.rollout_length, programs)
        state, learn_key = job.initial_state(), job.key(Stream.LEARN)
        clock.ready(update, *programs)
        env_steps, update_seconds = job.env_steps, 0.0

        def now() -> Report:
            seconds = {
                "time/update_s": update_seconds - update.compile_seconds,
                "time/acting_s": actor.stages.seconds.get("acting", 0.0) - programs.act.compile_seconds,
                "time/env_s": actor.stages.seconds.get("env", 0.0),
            }
            numbers = job, state, env_steps, clock, interval.since()
            return report(*numbers, due=interval.due, score=interval.score, extra_metrics=seconds)

        job.offer(now)
        done = job.ended_by(env_steps, interval.score) is not None
        while not done:
            updates = int(state.updates)
            rollout, ended, steps = actor.rollout(state.variables, state.iteration, state.env_step)
            began = time.perf_counter()
            state, metrics = update(state, rollout, learn_key)
            jax.block_until_ready(state)
            update_seconds += time.perf_counter() - began
            env_steps += steps
            interval.iterations += 1
            interval.ended(ended)
            interval.learned(metrics, counts=int(state.updates) > updates)
            done = interval.ends(env_steps)
            if not done and interval.due:
                yield now()
                interval.restart()
        yield now()
