"""Shared by acting on devices and on the host."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from jaxrl_dist.types import Algorithm, Context, PyTree, Rollout, Timestep, Variables, reset_core


def after_step(algorithm: Algorithm, core: PyTree, initial_core: PyTree, action: PyTree, step: Timestep) -> PyTree:
    """The policy state for the next observation, reset where a new episode begins."""
    return reset_core(algorithm.feedback(core, action, step), initial_core, step.valid)


class Stages:
    """Divides a thread's time into stages, which sum to the whole."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        """Adds the time since the last mark to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def merge(self, stage: str) -> None:
        """Adds all time so far to one stage."""
        self.seconds = {stage: sum(self.seconds.values())}


def blank_rollout(
    algorithm: Algorithm, variables: Variables, obs: PyTree, core: PyTree, rollout_length: int
) -> Rollout:
    """A rollout of zeros, with the shapes and dtypes that acting on ``obs [B, ...]`` will fill."""
    num_envs = obs.shape[0]
    keys = jax.random.split(jax.random.key(0), num_envs)
    action, _, extras = jax.eval_shape(algorithm.policy, variables, obs, core, Context(keys, jnp.zeros(())))
    flags = jnp.zeros((rollout_length, num_envs), bool)

    def blank(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((rollout_length, *x.shape), x.dtype)

    return Rollout(
        obs=jnp.zeros((rollout_length + 1, *obs.shape), obs.dtype),
        action=jax.tree.map(blank, action),
        reward=flags.astype(jnp.float32),
        terminated=flags,
        truncated=flags,
        valid=flags,
        extras=jax.tree.map(blank, extras),
        core=core,
        final_core=core,
    )


def step_numbers(iteration: jax.Array, rollout_length: int) -> jax.Array:
    """The numbers ``[T]``, from the start of training, of one rollout's steps; they wrap after 2^32."""
    return iteration.astype(jnp.uint32) * jnp.uint32(rollout_length) + jnp.arange(rollout_length, dtype=jnp.uint32)
