"""Acting and learning in turn: environments on the host, learning on the mesh, no policy lag."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial

import jax

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.host import HostActor, compile_acting
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import Clock, HostInterval, of_all, report
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Report


def synchronous(job: Job) -> Iterator[Report]:
    """Runs ``job`` with one batch of host environments; experience always comes from the newest policy."""
    clock, interval = Clock(job.resumed, job.away), HostInterval(job, job.iterations_per_report)
    update = job.once("update", lambda job: compile_update(job.learner, job.mesh))
    here, share = arrays.own_part(job.mesh), job.share
    act_key = meshes.put(rng.stream(job.seed, Stream.ACT), here, meshes.REPLICATED)
    with contextlib.closing(job.source.host(share, job.session_seed)) as env:
        length, act = job.rollout_length, ("act", job.seed)
        programs = job.once(act, lambda job: compile_acting(job.algorithm, here, length, act_key))
        actor = HostActor(job.algorithm, env, here, job.rollout_length, programs, share)
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
            acting = arrays.as_local((state.variables, state.iteration, state.env_step), job.mesh)
            rollout, episodes, steps = peers.attempt(partial(actor.rollout, *acting), "the environments")
            began = time.perf_counter()
            state, metrics = update(state, arrays.as_global(rollout, job.mesh, meshes.ROLLOUT), learn_key)
            jax.block_until_ready(state)
            update_seconds += time.perf_counter() - began
            interval.iterations += 1
            for count, ended in of_all(steps, episodes):
                env_steps += count
                interval.ended(ended)
            interval.learned(metrics, counts=int(state.updates) > updates)
            done = interval.ends(env_steps)
            if not done and interval.due:
                yield now()
                interval.restart()
        yield now()
