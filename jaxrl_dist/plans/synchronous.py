"""Act, update, act, update: environments on the host, learning on the mesh, the policy never behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.host import HostActor, stack_episodes
from jaxrl_dist.plans.common import Clock, Job, mean, report
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import EpisodeStats, Report


def synchronous(job: Job) -> Iterator[Report]:
    """Runs ``job`` with one batch of host environments; experience is always of the newest policy."""
    clock = Clock()
    everywhere = meshes.REPLICATED
    in_specs = (everywhere, meshes.ROLLOUT, everywhere)
    update = meshes.Program(job.learner.update, job.mesh, in_specs, everywhere, donate=(0,))
    with contextlib.closing(job.source.host(job.num_envs, job.seed)) as env:
        actor = HostActor(job.algorithm, env, job.mesh, job.rollout_length, job.key(Stream.ACT))
        state, learn_key = job.initial_state(), job.key(Stream.LEARN)
        clock.ready(update, *actor.programs)
        env_steps = 0
        while env_steps < job.total_env_steps:
            learning: list[Any] = []
            episodes: list[EpisodeStats] = []
            while len(learning) < job.iterations_per_report and env_steps < job.total_env_steps:
                rollout, ended, steps = actor.rollout(state.variables, state.iteration, state.env_step)
                state, metrics = update(state, rollout, learn_key)
                env_steps += steps
                learning.append(metrics)
                episodes.append(ended)
            yield report(state, env_steps, clock, mean(learning), stack_episodes(episodes).merge(), **actor.seconds)
