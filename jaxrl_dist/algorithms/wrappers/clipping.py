"""Rewards clipped for learning."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms.wrappers.extending import restricted, simulating
from jaxrl_dist.lazy import jax, jnp
from jaxrl_dist.types import Acted, Algorithm, Context, PyTree, Rollout, Timestep, Variables


def clip_rewards(algorithm: Algorithm, low: float, high: float) -> Algorithm:
    """Clips only the rewards used for learning; memory and reported returns keep the
    environment's rewards.

    Source: Mnih et al. (2015), Methods, to -1 .. 1.
    """
    wrapper = _Clipped(algorithm, low, high)
    wrapped = dataclasses.replace(
        algorithm,
        policy=wrapper.policy,
        action_values=None,  # they are of clipped rewards
        add_extras=wrapper.add_extras,
        feedback=wrapper.feedback,
        postprocess=wrapper.postprocess,
        update_stats=None if algorithm.update_stats is None else wrapper.update_stats,
    )
    return restricted(wrapped, algorithm)


@dataclasses.dataclass(frozen=True, eq=False)
class _Clipped:
    """The functions of an algorithm with clipped rewards."""

    algorithm: Algorithm
    low: float
    high: float

    def policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        context = simulating(context, lambda then: then._replace(reward=self._clip(then.reward)))
        return self.algorithm.policy(variables, obs, core, context)

    def add_extras(self, windows: Rollout) -> Rollout:
        assert self.algorithm.add_extras is not None
        return windows._replace(extras=self.algorithm.add_extras(self._clipped(windows)).extras)

    def feedback(self, core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        reward = jnp.where(step.valid, self._clip(step.reward), 0.0)
        return self.algorithm.feedback(core, action, step._replace(reward=reward))

    def postprocess(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return self.algorithm.postprocess(variables, self._clipped(rollout), context)

    def update_stats(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return self.algorithm.updated_stats(variables, self._clipped(rollout), context)

    def _clip(self, reward: jax.Array) -> jax.Array:
        return jnp.clip(reward, self.low, self.high)

    def _clipped(self, rollout: Rollout) -> Rollout:
        # Bounds that exclude 0 would give invalid steps a reward.
        reward = jnp.where(rollout.valid, self._clip(rollout.reward), 0.0)
        return rollout._replace(reward=reward)
