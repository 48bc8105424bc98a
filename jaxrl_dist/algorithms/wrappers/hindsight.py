"""Goals that an episode reached by chance, learnt from as if they had been meant."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jax, jnp
from jaxrl_dist.types import Algorithm, Aux, Context, EnvSpec, Goals, PyTree, Rollout, Variables

ACHIEVED = "achieved_goal"
DESIRED = "desired_goal"
"""Parts of an observation, with the names of Gymnasium-Robotics."""
REWARD_ERROR = "goal/reward_error"
"""Metric: how far the reward of ``Goals`` is from the environment's own, where the goal was not
replaced; as a share of the reward where that is above 1. An end of the episode that only one of
them sees counts as 1."""

DRAW = 7
"""Number of the draws of goals, apart from an algorithm's own draws with the same key."""


def hindsight(
    algorithm: Algorithm, spec: EnvSpec, share: float, horizon: int, goals: Goals | None
) -> Algorithm:
    """Replaces the goal of a ``share`` of the replayed steps by what the episode achieved in a
    later step, uniformly drawn from the next ``horizon`` ones. Reward and end are the new goal's.

    It must be the outermost wrapper: the others then see the new goals and rewards, and ``goals``
    the environment's own units. Windows of the memory become as long as the horizon. A window that
    an episode ends within offers the steps until there.

    Source: Andrychowicz et al. (2017), https://arxiv.org/abs/1707.01495, section 4.5, "future".

    Raises:
      ConfigError: observations have no goals, ``goals`` is None, or the algorithm does not replay
        transitions.
    """
    parts = spec.observation if isinstance(spec.observation, dict) else {}
    missing = [name for name in (ACHIEVED, DESIRED) if name not in parts]
    if missing:
        raise ConfigError(
            f"--her needs observations with the parts {ACHIEVED} and {DESIRED}, but {spec.id} has "
            f"no {missing[0]}; remove --her"
        )
    if goals is None:
        raise ConfigError(
            f"--her needs to know what reaching a goal pays in {spec.id}; say it with --goal-reward "
            "near:DISTANCE or within:DISTANCE, or give the environment a function goals"
        )
    if spec.frame_stack > 1:
        raise ConfigError("--her does not work with stacked frames; use --frame-stack 1")
    replay = algorithm.replay
    if replay is None or algorithm.window is None or algorithm.whole_windows:
        raise ConfigError(
            "--her needs an algorithm that learns from replayed transitions, without --core; use "
            "dqn, sac or td3"
        )
    if replay.return_discount is not None:
        raise ConfigError(
            "--her does not work with returns of recorded episodes, which belong to their goals; "
            "remove --cql-floor"
        )
    wrapper = _Hindsight(algorithm, share, goals)
    return dataclasses.replace(
        algorithm,
        postprocess=wrapper.postprocess,
        loss=wrapper.loss,
        window=max(algorithm.window, horizon),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Hindsight:
    """The functions of an algorithm with replaced goals."""

    algorithm: Algorithm
    share: float
    goals: Goals

    def postprocess(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        """Returns the algorithm's own batch, and the error of ``goals``, ``[N]``."""
        keys = jax.vmap(lambda key: jax.random.fold_in(key, DRAW))(context.keys)
        chance, place = jnp.moveaxis(
            jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys), 1, 0
        )
        left = _steps_left(rollout)
        later = 1 + jnp.minimum((place * left).astype(jnp.int32), left - 1)
        replaced = (chance < self.share) & rollout.valid[0]
        goal = jax.tree.map(lambda x: x[later, jnp.arange(len(later))], rollout.obs[ACHIEVED])

        window = self.algorithm.window
        assert window is not None
        steps: Rollout = jax.tree.map(lambda x: x[:window], rollout._replace(obs=()))
        obs = jax.tree.map(lambda x: x[: window + 1], rollout.obs)
        own_reward, own_end = self._outcome(obs)

        def aimed(new: jax.Array, old: jax.Array) -> jax.Array:
            rows = replaced.reshape(1, -1, *(1,) * (new.ndim - 1))
            return jnp.where(rows, jnp.broadcast_to(new[None], old.shape), old)

        obs = {**obs, DESIRED: jax.tree.map(aimed, goal, obs[DESIRED])}
        reward, end = self._outcome(obs)
        here = jnp.broadcast_to(replaced[None], steps.valid.shape) & steps.valid
        # An episode may also end for another reason than its goal, such as a fall.
        terminated = end | (steps.terminated & ~own_end)
        # The environment has ended the episode there, so a step that does not reach its new
        # goal bootstraps as at a time limit.
        truncated = (steps.truncated | steps.terminated) & ~terminated
        relabelled = steps._replace(
            obs=obs,
            reward=jnp.where(here, reward, steps.reward),
            terminated=jnp.where(here, terminated, steps.terminated),
            truncated=jnp.where(here, truncated, steps.truncated),
            core=rollout.core,
            final_core=rollout.final_core,
        )
        difference = jnp.abs(own_reward[0] - steps.reward[0])
        difference /= jnp.maximum(jnp.abs(steps.reward[0]), 1.0)
        unseen = own_end[0] & ~steps.terminated[0]
        error = jnp.where(steps.valid[0], jnp.where(unseen, 1.0, difference), 0.0)
        batch = self.algorithm.postprocess(variables, relabelled, context)
        return {"batch": batch, "error": error}

    def loss(
        self, variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        losses, mask, aux = self.algorithm.loss(variables, batch["batch"], context)
        metrics = {**aux.metrics, REWARD_ERROR: batch["error"]}
        return losses, mask, aux._replace(metrics=metrics)

    def _outcome(self, obs: PyTree) -> tuple[jax.Array, jax.Array]:
        """Returns reward and end ``[T, N]`` of the steps between observations ``[T + 1, N]``."""
        achieved = jax.tree.map(lambda x: x[1:], obs[ACHIEVED])
        desired = jax.tree.map(lambda x: x[1:], obs[DESIRED])
        reward, end = jax.vmap(jax.vmap(self.goals))(achieved, desired)
        return reward.astype(jnp.float32), end.astype(bool)


def _steps_left(rollout: Rollout) -> jax.Array:
    """Returns how many steps ``[N]`` of a window belong to the episode of its first one, at
    least 1.
    """
    _, terminated, truncated, valid = rollout.outcomes
    # an environment that is made again does not end its episode
    lost = jnp.concatenate([~valid[1:], jnp.zeros_like(valid[:1])])
    over = terminated | truncated | lost
    ends_before = jnp.cumsum(over, axis=0) - over
    return jnp.maximum(jnp.sum((ends_before == 0) & valid, axis=0), 1)
