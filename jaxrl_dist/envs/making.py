"""Finds and makes the user's environments, and describes what was made.

This module imports no JAX, because worker processes import it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium

from jaxrl_dist.envs.agents.pettingzoo import Parallel, is_parallel
from jaxrl_dist.envs.masks import of_gymnasium
from jaxrl_dist.envs.native import Description, family_of, inside, is_gymnax, plain, render_fps


def creator(env: str) -> tuple[Any, str]:
    """Imports the module of ``MODULE:NAME`` and returns its attribute ``NAME``, and ``NAME``.

    The attribute is None for an ``ID``, and for an id that the module may have registered on
    import. PettingZoo's games in turns have ``env`` in place of ``parallel_env``.
    """
    module, _, name = env.rpartition(":")
    if not module:
        return None, name
    made = importlib.import_module(module)
    if module.startswith("pettingzoo.") and name == "parallel_env":
        in_turns = "env"
    else:
        in_turns = name
    return getattr(made, name, getattr(made, in_turns, None)), name


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """Returns the parameters of a function; any keyword, if it has no signature,
    as some written in C.
    """
    try:
        return [*inspect.signature(function).parameters.values()]
    except ValueError:
        return [inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)]


def construct(env: str, options: Mapping[str, Any]) -> Any:
    """Makes the environment of this name, of any kind.

    Raises:
      Exception: any error that the environment raises.
    """
    function, name = creator(env)
    if callable(function):
        made = function(**options)
        if is_parallel(made):
            return Parallel(made)
        return made
    # This package checks at every step what Gymnasium's checker would warn about.
    return gymnasium.make(name, **{"disable_env_checker": True, **options})


def describe(made: Any) -> Description:
    """Describes the object that an environment's constructor returned; may reset it once,
    to find its action mask.
    """
    kind = type(made).__name__
    if not isinstance(made, gymnasium.Env):
        return Description(kind, gymnasium=False, gymnax=is_gymnax(made))
    if isinstance(made, Parallel):
        return made.description()
    observation = plain(getattr(made, "observation_space", None))
    action = plain(getattr(made, "action_space", None))
    limit = None
    if made.has_wrapper_attr("_max_episode_steps"):
        limit = made.get_wrapper_attr("_max_episode_steps")
    mask = of_gymnasium(made, observation, action)
    family = family_of(made.unwrapped, "gymnasium")
    fps = render_fps(made)
    return Description(
        kind, True, False, observation, action, family, limit, mask, fps=fps, inside=inside(made)
    )
