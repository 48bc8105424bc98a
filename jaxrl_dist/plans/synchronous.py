"""Act, update, act, update: environments on the host, learning on the mesh, the policy never behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from jaxrl_dist.actors.host import HostActor, compile_acting, stack_episodes
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.plans.common import Clock, Job, mean, report
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import EpisodeStats, Report


def synchronous(job: Job) -> Iterator[Report]:
    """Runs ``job`` with one batch of host environments; experience is always of the newest policy."""
    clock = Clock()
    update = compile_update(job.learner, job.mesh)
    with contextlib.closing(job.source.host(job.num_envs, job.seed)) as env:
        programs = compile_acting(job.algorithm, job.mesh, job.rollout_length, job.key(Stream.ACT))
        actor = HostActor(job.algorithm, env, job.mesh, job.rollout_length, programs)
        state, learn_key = job.initial_state(), job.key(Stream.LEARN)
        clock.ready(update, *programs)
        env_steps, update_seconds = 0, 0.0
        while env_steps < job.total_env_steps:
            learned: list[Mapping[str, jax.Array]] = []
            episodes: list[EpisodeStats] = []
            while len(episodes) < job.iterations_per_report and env_steps < job.total_env_steps:
                updates = int(state.updates)
                rollout, ended, steps = actor.rollout(state.variables, state.iteration, state.env_step)
                began = time.perf_counter()
                state, metrics = jax.block_until_ready(update(state, rollout, learn_key))
                update_seconds += time.perf_counter() - began
                env_steps += steps
                if int(state.updates) > updates:  # a replay memory may still be filling
                    learned.append(metrics)
                episodes.append(ended)
            seconds = {
                "time/update_s": update_seconds - update.compile_seconds,
                "time/acting_s": actor.stages.seconds["acting"] - programs.act.compile_seconds,
                "time/env_s": actor.stages.seconds["env"],
            }
            sums = {name: sum((each[name] for each in learned), start=jnp.zeros(())) for name in metrics}
            means = mean(sums, len(learned))
            yield report(state, env_steps, clock, means, stack_episodes(episodes).merge(), seconds)
