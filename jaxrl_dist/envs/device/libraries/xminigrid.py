"""XLand-MiniGrid (Nikulin et al. 2024, https://arxiv.org/abs/2312.12044)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import xminigrid
from gymnasium import spaces
from xminigrid.core.constants import NUM_COLORS, NUM_TILES

from jaxrl_dist.envs.device.libraries import Adapted, Step, bool_space, fields_of, one_hot
from jaxrl_dist.envs.env_options import parse_options
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import PyTree

SIZES = (NUM_TILES, NUM_COLORS)


def ids() -> list[str]:
    return sorted(xminigrid.registered_environments())


def make(env_id: str, options: Mapping[str, str]) -> Adapted:
    """Options are the fields of the parameters that are numbers;
    tiles and colours become images, see ``one_hot``.

    Raises:
      ConfigError: an unknown option, or an environment
        whose task is a ruleset that a program chooses.
    """
    if env_id.startswith("XLand-"):
        raise ConfigError(
            f"xminigrid:{env_id} has no task without a ruleset, and no option chooses one; "
            "those named MiniGrid-... have tasks"
        )
    env, params = xminigrid.make(env_id)
    numbers = {name: value for name, value in fields_of(params).items() if isinstance(value, int)}
    params = params.replace(**parse_options(f"xminigrid:{env_id}", options, numbers))

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        timestep = env.reset(params, key)
        return one_hot(timestep.observation, SIZES), timestep

    def step(key: jax.Array, timestep: PyTree, action: jax.Array) -> Step:
        timestep = env.step(params, timestep, action)
        obs = one_hot(timestep.observation, SIZES)
        over = timestep.last()
        terminated = timestep.discount == 0
        return Step(obs, timestep, timestep.reward, over & terminated, over & ~terminated)

    observations = bool_space((params.view_size, params.view_size, sum(SIZES)))
    return Adapted(
        reset,
        step,
        observations,
        spaces.Discrete(env.num_actions(params)),
        "grid",
        params.max_steps,
    )
