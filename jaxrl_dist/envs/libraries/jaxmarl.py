"""JaxMARL: games of several agents (Rutherford et al. 2024, https://arxiv.org/abs/2311.10090)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jaxmarl

from jaxrl_dist.envs.base import parse_options
from jaxrl_dist.envs.groups import Team

CLOCK = "max_steps"


def ids() -> list[str]:
    return list(jaxmarl.registered_envs)


def make(env_id: str, options: Mapping[str, str]) -> Team:
    """Options are the constructor's arguments that are numbers or texts, such as ``num_agents`` and ``max_steps``.

    Another option is ``state``: whether observations have a part ``state``, the state of the whole environment.
    """
    env = jaxmarl.make(env_id)
    parameters = inspect.signature(type(env)).parameters.values()
    defaults = {x.name: x.default for x in parameters if isinstance(x.default, bool | int | float | str)}
    limit = getattr(env, CLOCK, None)
    clock = {} if limit is None else {CLOCK: int(limit)}
    values: dict[str, Any] = parse_options(f"jaxmarl:{env_id}", options, {**defaults, **clock, "state": False})
    shows_state = values.pop("state", False)
    if limit is not None:
        limit = values.pop(CLOCK, int(limit))
        # The library would report its time limit as the end of the task, so its limit is one step above the one here.
        clock = {CLOCK: limit + 1}
    try:
        env = jaxmarl.make(env_id, **values, **clock)
    except TypeError:  # a few have a limit that no argument sets
        env = jaxmarl.make(env_id, **values)
    return Team(env, "jaxmarl", limit, shows_state)
