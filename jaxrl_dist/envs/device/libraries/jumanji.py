"""Jumanji: combinatorial problems and games (Bonnet et al. 2024,
https://arxiv.org/abs/2306.09884).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
from gymnasium import spaces
from jumanji.registration import _REGISTRY, load
from jumanji.specs import jumanji_specs_to_gym_spaces

from jaxrl_dist.envs.device.libraries import Adapted, Step, bool_space, defaults_of, settable
from jaxrl_dist.envs.env_options import parse_options
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import PyTree

CLOCK = "step_count"
"""A part of observations that only counts steps. Learning bootstraps where the time limit cuts an
episode, so the time is not part of the task (Pardo et al. 2018, https://arxiv.org/abs/1712.00378,
section 3.2)."""
MASK = "action_mask"


def ids() -> list[str]:
    return sorted(jumanji.registered_environments())


def make(env_id: str, options: Mapping[str, str]) -> Adapted:
    """Options are the constructor's arguments that are numbers, such as ``time_limit``.

    If the mask covers combinations of an action's components,
    each combination is a value of one discrete action.

    Raises:
      ConfigError: the environment has a reward for each of several agents,
        or a mask that can be read in two ways.
    """
    env, limit = _without_limit(env_id, options)
    if env.reward_spec.shape:
        raise ConfigError(
            f"jumanji:{env_id} has a reward for each of {env.reward_spec.shape[0]} agents; one works"
        )
    actions = _action_space(env.action_spec)
    observations = jumanji_specs_to_gym_spaces(env.observation_spec)
    masked = isinstance(observations, spaces.Dict) and MASK in observations.spaces
    if isinstance(actions, spaces.MultiDiscrete):
        shape = tuple(int(n) for n in actions.nvec)
    else:
        shape = ()
    joint = masked and observations[MASK].shape == shape
    # the only shape of combinations that is also one of k components of n values each
    if joint and shape == (2, 2):
        raise ConfigError(
            f"jumanji:{env_id} has a mask of 2 x 2, of 4 combinations of actions or of 2 actions each for 2 agents; "
            "masks of other sizes work"
        )

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        state, timestep = env.reset(key)
        return _observation(timestep.observation), state

    def step(key: jax.Array, state: Any, action: Any) -> Step:
        if joint:
            action = jnp.stack(jnp.unravel_index(action, shape))
        state, timestep = env.step(state, action)
        over = timestep.last()
        ends = over & (timestep.discount == 0), over & (timestep.discount != 0)
        return Step(
            _observation(timestep.observation), state, timestep.reward, *ends, timestep.extras or {}
        )

    if joint:
        actions = spaces.Discrete(int(np.prod(shape)))
    return Adapted(reset, step, _space(observations), actions, "jumanji", limit)


def _without_limit(env_id: str, options: Mapping[str, str]) -> tuple[Any, int | None]:
    """Makes the library's environment so that it does not reach its time limit, which is
    returned.
    """
    registered = _REGISTRY[env_id]
    defaults = defaults_of(load(registered.entry_point)) | registered.kwargs
    limited = "time_limit" in defaults
    if limited and defaults["time_limit"] is None:
        defaults["time_limit"] = 1000  # only its type matters: the constructor computes it
    values = parse_options(f"jumanji:{env_id}", options, settable(defaults))
    env: Any = jumanji.make(env_id, **values)
    if not limited:
        return env, None
    # The library would report its time limit as a terminal state,
    # so its limit is one step above the one here.
    return jumanji.make(env_id, **values | {"time_limit": int(env.time_limit) + 1}), int(
        env.time_limit
    )


def _action_space(spec: Any) -> spaces.Space[Any]:
    space = jumanji_specs_to_gym_spaces(spec)
    if (
        isinstance(space, spaces.Box)
        and np.issubdtype(space.dtype, np.integer)
        and not np.any(space.low)
    ):
        return spaces.MultiDiscrete(space.high.ravel() + 1)
    return space


def _observation(obs: Any) -> PyTree:
    """Returns an observation's parts as ``_space`` names them."""
    if not hasattr(obs, "_asdict") and not dataclasses.is_dataclass(obs):
        return jnp.asarray(obs)
    if hasattr(obs, "_asdict"):
        fields = obs._asdict()
    else:
        fields = vars(obs)
    return _parts(
        {
            name: part.reshape(-1) if name == MASK else _observation(part)
            for name, part in fields.items()
        }
    )


def _space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    if not isinstance(space, spaces.Dict):
        return space
    flat = {
        name: bool_space((int(np.prod(part.shape or ())),))
        for name, part in space.items()
        if name == MASK
    }
    parts = _parts({name: _space(part) for name, part in space.items()} | flat)
    if isinstance(parts, dict):
        return spaces.Dict(parts)
    return parts


def _parts(parts: Mapping[str, Any]) -> Any:
    """Leaves out the clock, and names the mask ``mask``; a single part is the whole observation."""
    named = {
        "mask" if name == MASK else name: part for name, part in parts.items() if name != CLOCK
    }
    if len(named) > 1:
        return named
    return next(iter(named.values()))
