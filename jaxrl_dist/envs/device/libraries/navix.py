"""NAVIX: MiniGrid's tasks (Pignatelli et al. 2024, https://arxiv.org/abs/2407.19396)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import navix
from gymnasium import spaces
from navix.entities import EntityIds

from jaxrl_dist.envs.device.libraries import Adapted, Step, bool_space, one_hot
from jaxrl_dist.envs.env_options import parse_options
from jaxrl_dist.types import PyTree

CATEGORIES = 1 + max(int(value) for value in vars(EntityIds).values() if hasattr(value, "dtype"))
"""Categories in each channel of a grid: kinds of entities; colours and states have fewer. Spaces of
NAVIX 0.7 leave out the last two."""


def ids() -> list[str]:
    return sorted(navix.registry())


def make(env_id: str, options: Mapping[str, str]) -> Adapted:
    """The option is ``max_steps``; grids of categories become images, see ``one_hot``."""
    values = parse_options(f"navix:{env_id}", options, {"max_steps": navix.make(env_id).max_steps})
    env = navix.make(env_id, **values)
    *grid, channels = env.observation_space.shape
    sizes = (CATEGORIES,) * channels

    # Kilobytes of pictures for rendering, which need not be part of each environment's state.
    pictures = env.reset(jax.random.PRNGKey(0)).state.cache

    def showing(timestep: PyTree, cache: PyTree) -> PyTree:
        return timestep.replace(state=timestep.state.replace(cache=cache))

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        timestep = showing(env.reset(key), None)
        return one_hot(timestep.observation, sizes), timestep

    def step(key: jax.Array, timestep: PyTree, action: jax.Array) -> Step:
        # `step` also resets
        timestep = showing(env._step(showing(timestep, pictures), action), None)
        obs = one_hot(timestep.observation, sizes)
        terminated = timestep.is_termination()
        return Step(obs, timestep, timestep.reward, terminated, timestep.is_truncation())

    observations = bool_space((*grid, sum(sizes)))
    actions: Any = spaces.Discrete(int(env.action_space.maximum) + 1)
    return Adapted(reset, step, observations, actions, "grid", env.max_steps)
