"""Rewards divided by the deviation of returns, and action values in raw rewards again."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms.wrappers.extending import extended, restricted, simulating
from jaxrl_dist.algorithms.wrappers.statistics import CLIP, RunningStats
from jaxrl_dist.lazy import jax, jnp, packing
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Array,
    Context,
    PyTree,
    Rollout,
    Timestep,
    Variables,
)


def scale_rewards(algorithm: Algorithm, discount: float | jax.Array) -> Algorithm:
    """Divides rewards by the running standard deviation of the discounted return,
    which keeps value losses near 1.

    Each environment's core holds the return ``R_t = discount R_{t-1} + r_t``, which restarts at 0
    with each episode, as in OpenAI baselines' ``VecNormalize``. Reported returns stay in the
    environment's units.
    """
    inner = extended(
        algorithm, lambda params: RunningStats.zeros(()), lambda num_envs: jnp.zeros((num_envs,))
    )
    wrapper = _Scaled(inner, discount)
    wrapped = dataclasses.replace(
        inner,
        policy=wrapper.policy,
        action_values=wrapper.action_values,
        feedback=wrapper.feedback,
        postprocess=wrapper.postprocess,
        update_stats=wrapper.update_stats,
    )
    return restricted(wrapped, algorithm)


@dataclasses.dataclass(frozen=True, eq=False)
class _Scaled:
    """The functions of an algorithm with scaled rewards."""

    inner: Algorithm
    """With the statistics and each environment's return in front."""
    discount: float | jax.Array

    def policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        context = simulating(
            context, lambda then: then._replace(reward=_scaled(variables, then.reward))
        )
        return self.inner.policy(variables, obs, core, context)

    def action_values(self, variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert self.inner.action_values is not None
        q, temperature = self.inner.action_values(variables, obs)
        std = variables.stats[0].std()
        return std * q, std * temperature

    def feedback(self, core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        total, rest = self.inner.feedback(core, action, step)
        return self.discount * total + step.reward, rest

    def postprocess(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        rollout = rollout._replace(reward=_scaled(variables, rollout.reward))
        return self.inner.postprocess(variables, rollout, context)

    def update_stats(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        def step(
            total: jax.Array, outcome: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            reward, valid = outcome
            total = jnp.where(valid, self.discount * total + reward, 0.0)
            return total, total

        _, returns = packing.recursion(step, rollout.core[0], (rollout.reward, rollout.valid))
        stats, rest = self.inner.updated_stats(variables, rollout, context)
        return stats.merge(returns, rollout.valid), rest


def _scaled(variables: Variables, reward: jax.Array) -> jax.Array:
    return jnp.clip(reward / variables.stats[0].std(), -CLIP, CLIP)


def scaled_records(algorithm: Algorithm, factor: float) -> Algorithm:
    """Divides action values by the factor of the rewards in a data set,
    so that they are of raw rewards.

    The statistics hold the factor: the data may be gone when the policy is loaded.
    """
    inner = extended(algorithm, lambda params: jnp.asarray(factor, jnp.float32))

    def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert inner.action_values is not None
        q, temperature = inner.action_values(variables, obs)
        return q / variables.stats[0], temperature / variables.stats[0]

    update_stats = None if algorithm.update_stats is None else inner.update_stats
    wrapped = dataclasses.replace(inner, action_values=action_values, update_stats=update_stats)
    return restricted(wrapped, algorithm)
