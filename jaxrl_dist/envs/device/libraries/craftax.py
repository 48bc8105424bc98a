"""Craftax: open-ended survival (Matthews et al. 2024, https://arxiv.org/abs/2402.16801)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from craftax.craftax_env import make_craftax_env_from_name
from gymnasium import spaces

from jaxrl_dist.envs.device.libraries import Adapted, Step, fields_of
from jaxrl_dist.envs.env_options import parse_options
from jaxrl_dist.types import PyTree


def ids() -> list[str]:
    return [
        f"Craftax-{kind}-v1"
        for kind in ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels")
    ]


def make(env_id: str, options: Mapping[str, str]) -> Adapted:
    """Options are fields of the environment's parameters, such as ``max_timesteps``."""
    env = make_craftax_env_from_name(env_id, auto_reset=False)
    params = env.default_params
    params = params.replace(**parse_options(f"craftax:{env_id}", options, fields_of(params)))
    limit = int(params.max_timesteps)
    # The library would report its time limit as a terminal state,
    # so its limit is one step above the one here.
    params = params.replace(max_timesteps=limit + 1)

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> Step:
        obs, state, reward, terminated, info = env.step_env(key, state, action, params)
        return Step(obs, state, reward, terminated, info=info)

    native = env.observation_space(params)
    observations = spaces.Box(native.low, native.high, tuple(native.shape), native.dtype)
    actions: Any = spaces.Discrete(int(env.num_actions))
    return Adapted(
        lambda key: env.reset_env(key, params), step, observations, actions, "craftax", limit
    )
