"""Jumanji: combinatorial problems and games (Bonnet et al. 2024,
https://arxiv.org/abs/2306.09884).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
from gymnasium import spaces
from jumanji import specs
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
            f"jumanji:{env_id} has a reward for each of {env.reward_spec.shape[0]} agents; only a "
            "single reward works"
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
            f"jumanji:{env_id} has a mask of 2 x 2, which can mean 4 combinations of actions or 2 "
            "actions for each of 2 agents; masks of other sizes work"
        )

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        state, timestep = env.reset(key)
        return _observation(timestep.observation), state

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> Step:
        if joint:
            action = jnp.stack(jnp.unravel_index(action, shape))
        state, timestep = env.step(state, action)
        over = timestep.last()
        return Step(
            _observation(timestep.observation),
            state,
            timestep.reward,
            terminated=over & (timestep.discount == 0),
            truncated=over & (timestep.discount != 0),
            info=timestep.extras or {},
        )

    if joint:
        actions = spaces.Discrete(int(np.prod(shape)))
    return Adapted(reset, step, _space(observations), actions, "jumanji", limit)


def _without_limit(
    env_id: str, options: Mapping[str, str]
) -> tuple[jumanji.Environment, int | None]:
    """Makes the library's environment so that it does not reach its time limit, which is
    returned.
    """
    registered = _REGISTRY[env_id]
    defaults = defaults_of(load(registered.entry_point)) | registered.kwargs
    limited = "time_limit" in defaults
    if limited and defaults["time_limit"] is None:
        defaults["time_limit"] = 1000  # only its type matters: the constructor computes it
    values = parse_options(f"jumanji:{env_id}", options, settable(defaults))
    env = jumanji.make(env_id, **values)
    if not limited:
        return env, None
    limit = int(env.time_limit)
    # The library would report its time limit as a terminal state,
    # so its limit is one step above the one here.
    return jumanji.make(env_id, **values | {"time_limit": limit + 1}), limit


def _action_space(spec: specs.Spec) -> spaces.Space:
    space = jumanji_specs_to_gym_spaces(spec)
    if (
        isinstance(space, spaces.Box)
        and np.issubdtype(space.dtype, np.integer)
        and not np.any(space.low)
    ):
        return spaces.MultiDiscrete(space.high.ravel() + 1)
    return space


def _observation(obs: PyTree) -> PyTree:
    """Returns an observation's parts as ``_space`` names them."""
    if hasattr(obs, "_asdict"):
        fields = obs._asdict()
    elif dataclasses.is_dataclass(obs):
        fields = vars(obs)
    else:
        return jnp.asarray(obs)
    parts = {name: _observation(part) for name, part in fields.items() if name != MASK}
    if MASK in fields:
        parts["mask"] = fields[MASK].reshape(-1)
    return _without_clock(parts)


def _space(space: spaces.Space) -> spaces.Space:
    if not isinstance(space, spaces.Dict):
        return space
    parts = {name: _space(part) for name, part in space.items() if name != MASK}
    if MASK in space.spaces:
        parts["mask"] = bool_space((int(np.prod(space[MASK].shape or ())),))
    observed = _without_clock(parts)
    return spaces.Dict(observed) if isinstance(observed, dict) else observed


def _without_clock(parts: Mapping[str, PyTree]) -> PyTree:
    """Leaves out the clock; a single part is the whole observation."""
    observed = {name: part for name, part in parts.items() if name != CLOCK}
    return observed if len(observed) > 1 else next(iter(observed.values()))
