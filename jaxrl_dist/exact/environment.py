"""Tables as compiled environments, on which any algorithm for discrete actions trains."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jaxrl_dist.exact.table import Table
from jaxrl_dist.types import PyTree


class State(NamedTuple):
    """The state of a ``TableEnv``."""

    number: jax.Array
    """Int32 scalar."""
    steps: jax.Array
    """Int32 scalar."""


class Params(NamedTuple):
    """The parameters of a ``TableEnv``, named as in gymnax."""

    max_steps_in_episode: int


class TableEnv:
    """A table as an environment in the style of gymnax; it names its outcomes and its first states.

    Observations are the table's, or else the numbers of the states.
    Rewards are the means of the table.
    """

    def __init__(self, table: Table, time_limit: int = 1000) -> None:
        """``time_limit``: steps after which an episode is truncated.

        Raises:
          ValueError: the other side of a game moves in it, or some actions are not legal.
        """
        if (table.going < 0).any() or not table.legal.all():
            raise ValueError(
                "a table of a game, or with illegal actions, cannot be an environment of one agent"
            )
        self.table = table
        self.default_params = Params(time_limit)
        self._next = jnp.asarray(table.next, jnp.int32)
        self._start = jnp.log(jnp.asarray(table.start, jnp.float32))
        ends = table.probability * (1 - table.going)
        self._branches = jnp.asarray(
            np.concatenate([table.probability * table.going, ends], axis=2), jnp.float32
        )
        self._reward = jnp.asarray(table.reward, jnp.float32)
        if table.obs is None:
            obs = np.arange(table.shape[0], dtype=np.int32)
        else:
            obs = np.asarray(table.obs)
        self._obs = jnp.asarray(obs)
        self._space: spaces.Space[Any] = spaces.Box(
            obs.min(), obs.max(), obs.shape[1:], obs.dtype.type
        )
        if obs.ndim == 1 and np.issubdtype(obs.dtype, np.integer):
            self._space = spaces.Discrete(int(obs.max()) + 1)

    def observation_space(self, params: Params) -> spaces.Space[Any]:
        return self._space

    def action_space(self, params: Params) -> spaces.Space[Any]:
        return spaces.Discrete(self.table.shape[1])

    def reset_env(self, key: jax.Array, params: Params) -> tuple[PyTree, State]:
        number = jax.random.categorical(key, self._start).astype(jnp.int32)
        return self._obs[number], State(number, jnp.int32(0))

    def step_env(
        self, key: jax.Array, state: State, action: Any, params: Params
    ) -> tuple[Any, ...]:
        probability, *outcomes = self.outcomes(state, action, params)
        chosen = jax.random.categorical(key, jnp.log(probability))
        obs, new, reward, terminated = jax.tree.map(lambda x: x[chosen], tuple(outcomes))
        return obs, new, reward, terminated, {}

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        return state.steps >= params.max_steps_in_episode

    def outcomes(self, state: State, action: Any, params: Params) -> tuple[Any, ...]:
        """Returns ``(probability [K], obs [K, ...], state
        [K], reward [K], terminated [K])`` of a step.
        """
        probability = self._branches[state.number, action]
        number = jnp.tile(self._next[state.number, action], 2)
        count = len(number)
        steps = jnp.full(count, state.steps + 1)
        reward = jnp.full(count, self._reward[state.number, action])
        return (
            probability,
            self._obs[number],
            State(number, steps),
            reward,
            jnp.arange(count) >= count // 2,
        )

    def starts(self, params: Params) -> tuple[Any, ...]:
        """Returns ``(probability [N], obs [N, ...], state [N])`` of the first states."""
        number = jnp.asarray(np.flatnonzero(self.table.start), jnp.int32)
        return (
            jnp.exp(self._start[number]),
            self._obs[number],
            State(number, jnp.zeros_like(number)),
        )
