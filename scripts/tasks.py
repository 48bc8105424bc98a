"""Tasks for ``learning.py`` that no library has, written as in a user's module."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gymnax.environments import spaces

SYMBOLS = 2
STEPS = 100


class State(NamedTuple):
    """The symbols that were shown, ``[delay + 1]`` with the newest one first, and the steps so
    far.
    """

    shown: jax.Array
    time: jax.Array


class RepeatAfterMe:
    """RLlib's task of this name: each action should repeat the symbol of ``delay`` steps ago.

    A right action pays 1 and a wrong one -1. In the first ``delay`` steps, 0 is right.
    The best return is 100.
    """

    default_params = STEPS

    def __init__(self, delay: int = 2) -> None:
        self.delay = delay

    def reset_env(self, key: jax.Array, params: int) -> tuple[jax.Array, State]:
        state = self._after(key, State(jnp.zeros(self.delay + 1, jnp.int32), jnp.int32(-1)))
        return state.shown[0], state

    def step_env(self, key: jax.Array, state: State, action: jax.Array, params: int) -> Any:
        reward = jnp.where(action == state.shown[-1], 1.0, -1.0)
        state = self._after(key, state)
        return state.shown[0], state, reward, state.time >= params, {}

    def _after(self, key: jax.Array, state: State) -> State:
        symbol = jax.random.randint(key, (1,), 0, SYMBOLS)
        return State(jnp.concatenate([symbol, state.shown[:-1]]), state.time + 1)

    def is_truncated(self, state: State, params: int) -> Any:
        return False

    def observation_space(self, params: int) -> spaces.Discrete:
        return spaces.Discrete(SYMBOLS)

    def action_space(self, params: int) -> spaces.Discrete:
        return spaces.Discrete(SYMBOLS)
