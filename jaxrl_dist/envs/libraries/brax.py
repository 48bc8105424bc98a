"""Brax: physics (Freeman et al. 2021, https://arxiv.org/abs/2106.13281)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from brax import envs
from gymnasium import spaces

from jaxrl_dist.envs.base import parse_options
from jaxrl_dist.envs.libraries import Adapted, Step
from jaxrl_dist.types import PyTree

EPISODE_LENGTH = 1000
"""Brax's environments have no limit; its own training sets this one."""


def ids() -> list[str]:
    return sorted(envs._envs)


def make(env_id: str, options: Mapping[str, str]) -> Adapted:
    """Options are the constructor's arguments, such as ``backend``, and ``episode_length``."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(envs._envs[env_id]).parameters.items()
        if isinstance(parameter.default, bool | int | float | str)
    }
    values = parse_options(f"brax:{env_id}", options, {**defaults, "episode_length": EPISODE_LENGTH})
    limit = values.pop("episode_length", EPISODE_LENGTH)
    env = envs.get_environment(env_id, **values)

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        state = env.reset(key)
        return state.obs, state

    def step(key: jax.Array, state: Any, action: Any) -> Step:
        state = env.step(state, action)
        # Its info may say "time_out" where the task has ended: only the limit here is one.
        return Step(state.obs, state, state.reward, state.done, info=state.metrics)

    return Adapted(reset, step, _space(env.observation_size), _box(env.action_size, 1.0), "brax", limit)


def _space(size: Any) -> spaces.Space[Any]:
    if isinstance(size, Mapping):
        return spaces.Dict({name: _box(shape, np.inf) for name, shape in size.items()})
    return _box(size, np.inf)


def _box(shape: Any, bound: float) -> spaces.Box:
    return spaces.Box(-bound, bound, tuple(np.atleast_1d(shape)), np.float32)
