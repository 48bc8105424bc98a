"""Environments whose state has observation, reward, end and metrics: those of Brax and of MuJoCo Playground."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from gymnasium import spaces

from jaxrl_dist.envs.device.libraries import Adapted, Step
from jaxrl_dist.types import PyTree


def adapted(env: Any, family: str, limit: int) -> Adapted:
    """Adapts such an environment.

    Args:
      env: has ``reset(key)``, ``step(state, action)``, ``observation_size`` and ``action_size``; actions are -1 .. 1.
      family: as ``EnvSpec.family``.
      limit: steps after which an episode is truncated. A ``time_out`` in the state's info may mean the end of the task.
    """

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        state = env.reset(key)
        return state.obs, state

    def step(key: jax.Array, state: Any, action: Any) -> Step:
        state = env.step(state, action)
        return Step(state.obs, state, state.reward, state.done, info=state.metrics)

    return Adapted(reset, step, _space(env.observation_size), _box(env.action_size, 1.0), family, limit)


def _space(size: Any) -> spaces.Space[Any]:
    if isinstance(size, Mapping):
        return spaces.Dict({name: _box(shape, np.inf) for name, shape in size.items()})
    return _box(size, np.inf)


def _box(shape: Any, bound: float) -> spaces.Box:
    return spaces.Box(-bound, bound, tuple(np.atleast_1d(shape)), np.float32)
