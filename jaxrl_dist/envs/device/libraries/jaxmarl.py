"""JaxMARL: games of several agents (Rutherford et al. 2024, https://arxiv.org/abs/2311.10090)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jaxmarl
from jaxmarl.environments.smax import smax_env

from jaxrl_dist.checks import shown
from jaxrl_dist.envs.agents.groups import Team
from jaxrl_dist.envs.base import parse_options
from jaxrl_dist.envs.device.libraries import settable
from jaxrl_dist.errors import ConfigError


class Battle:
    """SMAX, with ``won`` in its info: whether the allies have beaten the enemies, and one of them lives."""

    def __init__(self, env: Any) -> None:
        self._smax = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._smax, name)

    def step_env(self, key: Any, state: Any, actions: Any) -> Any:
        obs, state, rewards, dones, info = self._smax.step_env(key, state, actions)
        alive = getattr(state, "state", state).unit_alive  # the state of SMAX is within that of heuristic enemies
        won = alive[: self.num_allies].any() & ~alive[self.num_allies :].any()
        return obs, state, rewards, dones, {**info, "won": won}


CLOCKS: Mapping[str, Mapping[str, Any]] = {"max_steps": {}, "episode_length": {"auto_reset": False}}
"""Arguments that set a time limit, with those that go with them: MABrax would replace an episode's last observation."""
ROUNDS = "num_inner_steps", "num_outer_steps"
"""Arguments whose product is a time limit: so many rounds, of so many steps each (coin_game)."""


def ids() -> list[str]:
    return list(jaxmarl.registered_envs)


def make(env_id: str, options: Mapping[str, str]) -> Team:
    """Options are the constructor's arguments that are numbers or texts, such as ``num_agents`` and ``max_steps``.

    Two others are ``state``, whether observations have a part ``state``, the state of the whole environment; and for
    SMAX ``scenario``, the name of a map, such as ``3m``.
    """
    env = jaxmarl.make(env_id)
    parameters = _parameters(env)
    defaults = settable(parameters)
    maps = {"scenario": ""} if "scenario" in parameters else {}
    clock = next(({clock: int(getattr(env, clock))} for clock in CLOCKS if getattr(env, clock, None) is not None), {})
    name = f"jaxmarl:{env_id}"
    values: dict[str, Any] = parse_options(name, options, {**defaults, **maps, **clock, "state": False})
    shows_state = values.pop("state", False)
    if "scenario" in values:
        values["scenario"] = _scenario(name, values["scenario"])
    limit = None
    if clock:
        ((argument, default),) = clock.items()
        limit = values.pop(argument, default)
        # The library would report its time limit as the end of the task, so its limit is one step above the one here.
        clock = {argument: limit + 1, **CLOCKS[argument]}
    elif all(name in defaults for name in ROUNDS):
        steps, rounds = (values.get(name, defaults[name]) for name in ROUNDS)
        limit, values[ROUNDS[1]] = steps * rounds, rounds + 1
    try:
        env = jaxmarl.make(env_id, **values, **clock)
    except TypeError:  # a few have a limit that no argument sets
        env = jaxmarl.make(env_id, **values)
    return Team(Battle(env) if hasattr(env, "num_allies") else env, "jaxmarl", limit, shows_state)


def _parameters(env: Any) -> dict[str, Any]:
    """Returns the defaults of the constructor's arguments, and of those that it passes on to another environment's."""
    parameters = inspect.signature(type(env)).parameters.values()
    inner = env._env if any(x.kind is x.VAR_KEYWORD for x in parameters) and "_env" in vars(env) else None
    passed_on = {} if inner is None else _parameters(inner)
    return {**passed_on, **{x.name: x.default for x in parameters}}


def _scenario(name: str, map_name: str) -> Any:
    """Returns the library's description of a map.

    Raises:
      ConfigError: there is none.
    """
    maps = smax_env.MAP_NAME_TO_SCENARIO
    if map_name not in maps:
        raise ConfigError(f"{name} has no scenario {shown(map_name)}; it has: {', '.join(maps)}")
    return maps[map_name]
