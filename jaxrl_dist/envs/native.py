"""Finds, makes and describes the user's environments.

This module imports neither JAX nor the rest of the package, because worker processes import it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

MASKS = (
    *("action_mask", "action_masks", "legal_actions", "legal_action_mask", "avail_actions"),
    *("get_action_mask", "get_legal_actions", "get_avail_actions"),
)
"""Names under which environments offer action masks: keys of infos, methods, or fields of states."""


MASKS_IGNORED = "it says which actions are legal, and action masks are not supported yet: illegal ones will be tried"


def creator(env: str) -> tuple[Any, str]:
    """Imports the module of ``MODULE:NAME`` and returns its attribute ``NAME``, and ``NAME``.

    The attribute is None for an ``ID``, and for an id that the module may have registered on import.
    """
    module, _, name = env.rpartition(":")
    return (getattr(importlib.import_module(module), name, None) if module else None), name


def construct(env: str, options: Mapping[str, Any]) -> Any:
    """Makes the environment of this name, of any kind.

    Raises:
      Exception: any error that the environment raises.
    """
    import gymnasium

    function, name = creator(env)
    if callable(function):
        return function(**options)
    # This package checks at every step what Gymnasium's checker would warn about.
    return gymnasium.make(name, **{"disable_env_checker": True, **options})


class PlainSpace(NamedTuple):
    """A Gymnasium or gymnax space, in types that JSON can store once arrays are lists."""

    kind: str
    """The name of its class."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    low: Any = None
    """Bounds of a ``Box``."""
    high: Any = None
    sizes: Any = None
    """Number of values of each component of a discrete space."""


def plain(space: Any) -> PlainSpace:
    """Converts a space; of kinds that no policy supports, keeps only the name."""
    kind = type(space).__name__
    if kind == "Box":
        return PlainSpace(kind, tuple(space.shape), np.dtype(space.dtype).name, space.low, space.high)
    if kind == "Discrete":
        return PlainSpace(kind, sizes=[int(space.n)])
    if kind == "MultiDiscrete":
        return PlainSpace(kind, sizes=[int(n) for n in space.nvec.flat])
    if kind == "MultiBinary":
        return PlainSpace(kind, sizes=[2] * math.prod(space.shape))
    return PlainSpace(kind)


class Description(NamedTuple):
    """The properties of an environment, in types that JSON can store once arrays are lists."""

    kind: str
    """The name of its class."""
    gymnasium: bool
    """Whether it is a ``gymnasium.Env``; if not, the fields after ``gymnax`` are unset."""
    gymnax: bool
    """Whether it is a gymnax-style environment, or a pair ``(env, params)``."""
    observation: PlainSpace = PlainSpace("")
    action: PlainSpace = PlainSpace("")
    family: str = ""
    time_limit: int | None = None
    """In the environment's unrepeated steps."""
    masked: bool = False
    """Whether it has a method for action masks."""


def describe(made: Any) -> Description:
    """Describes the object that an environment's constructor returned."""
    import gymnasium

    kind = type(made).__name__
    if not isinstance(made, gymnasium.Env):
        return Description(kind, gymnasium=False, gymnax=is_gymnax(made))
    observation, action = (plain(getattr(made, name, None)) for name in ("observation_space", "action_space"))
    limit = made.get_wrapper_attr("_max_episode_steps") if made.has_wrapper_attr("_max_episode_steps") else None
    masked = any(made.has_wrapper_attr(name) for name in MASKS)
    return Description(kind, True, False, observation, action, _family(made), limit, masked)


def is_gymnax(made: Any) -> bool:
    """Returns True if an object is a gymnax-style environment, or a pair ``(env, params)``."""
    env = made[0] if isinstance(made, tuple) and len(made) == 2 else made
    return not isinstance(env, type) and hasattr(env, "reset_env") and hasattr(env, "step_env")


def _family(env: Any) -> str:
    for kind in type(env.unwrapped).__mro__:  # the user's class may extend one of Gymnasium's
        match kind.__module__.split("."):
            case ["gymnasium", "envs", family, _, *_]:
                return family
            case ["ale_py", *_]:
                return "atari"
    return "gymnasium"
