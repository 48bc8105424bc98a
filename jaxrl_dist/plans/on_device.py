"""Environment, acting and learning in one compiled program over the whole mesh.

This is Anakin of the Podracer architectures (Hessel et al. 2021, https://arxiv.org/abs/2104.06272): nothing goes
through the host between two reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors import device
from jaxrl_dist.actors.common import Share
from jaxrl_dist.plans.common import Clock, Job, mean, report
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import EpisodeStats, Report, TrainState


def on_device(job: Job) -> Iterator[Report]:
    """Runs ``job`` on gymnax environments, several iterations a dispatch."""
    clock = Clock()
    program = _program(job)
    env = job.source.device()
    start = jax.jit(lambda key: device.init(job.algorithm, env, Share(0, job.num_envs, job.num_envs), key))
    actor = meshes.place(start(job.key(Stream.ENV)), job.mesh, meshes.BATCH)
    state = job.initial_state()
    keys = tuple(job.key(stream) for stream in (Stream.ACT, Stream.ENV, Stream.LEARN))
    clock.ready(program)
    env_steps = 0
    while env_steps < job.total_env_steps:
        budget = np.int32(min(job.total_env_steps - env_steps, 2**30))
        state, actor, steps, sums, learned, episodes = program(state, actor, keys, budget)
        env_steps += int(steps)
        yield report(state, env_steps, clock, mean(sums, learned), episodes)


def _program(job: Job) -> meshes.Program:
    """``(state, actor, keys, budget) -> (state, actor, steps, sums, learned, episodes)``.

    Iterates until a report is due or ``budget`` env steps are done, so the last dispatch needs no other program. The
    metrics are summed over the ``learned`` iterations that made updates: a replay memory may still be filling.
    """
    rollout = device.make_rollout(job.algorithm, job.source.device(), job.rollout_length)

    def iterate(
        state: TrainState, actor: device.ActorState, keys: tuple[jax.Array, ...]
    ) -> tuple[TrainState, device.ActorState, jax.Array, Any, EpisodeStats]:
        act_key, env_key, learn_key = keys
        actor, experience, episodes = rollout(state.variables, actor, act_key, env_key, state.iteration, state.env_step)
        state, metrics = job.learner.update(state, experience, learn_key)
        steps = meshes.global_sum(jnp.sum(experience.valid, dtype=jnp.int32))
        return state, actor, steps, metrics, episodes

    def run(
        state: TrainState, actor: device.ActorState, keys: tuple[jax.Array, ...], budget: jax.Array
    ) -> tuple[TrainState, device.ActorState, jax.Array, Any, jax.Array, EpisodeStats]:
        def more(carry: Any) -> jax.Array:
            count, _, _, steps, *_ = carry
            return (count < job.iterations_per_report) & (steps < budget)

        def body(carry: Any) -> Any:
            count, state, actor, steps, sums, learned, total = carry
            updates = state.updates
            state, actor, new_steps, metrics, episodes = iterate(state, actor, keys)
            grew = state.updates > updates
            sums = jax.tree.map(lambda s, x: s + jnp.where(grew, x, 0), sums, metrics)
            total = jax.tree.map(lambda *x: jnp.stack(x), total, episodes).merge()
            return count + 1, state, actor, steps + new_steps, sums, learned + grew, meshes.vary(total)

        shapes = jax.eval_shape(iterate, state, actor, keys)
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[3])
        zero = jnp.zeros((), jnp.float32)
        none = meshes.vary(EpisodeStats(zero, zero, zero, zero + jnp.inf, zero - jnp.inf))
        start = jnp.zeros((), jnp.int32)
        carry = (start, state, actor, start, sums, start, none)
        _, state, actor, steps, sums, learned, total = jax.lax.while_loop(more, body, carry)
        return state, actor, steps, sums, learned, meshes.global_episodes(total)

    everywhere, batch = meshes.REPLICATED, meshes.BATCH
    in_specs = (meshes.STATE, batch, everywhere, everywhere)
    out_specs = (meshes.STATE, batch, *[everywhere] * 4)
    return meshes.Program(run, job.mesh, in_specs, out_specs, donate=(0, 1))
