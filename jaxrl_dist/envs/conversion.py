"""Spaces of environments in the form that policies see."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_dist.checks import MAX_SIZE
from jaxrl_dist.envs.native import PlainSpace, check_counted, named, plain
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space
from jaxrl_dist.types import PyTree

KINDS = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Dict", "Tuple")
"""Kinds of spaces that policies support."""


def space_of(space: PlainSpace, name: str, role: str, kinds: Sequence[str] = KINDS) -> Space:
    """Converts a space to the form that policies see; 64-bit numbers become 32-bit.

    A Tuple becomes a dict with the names "0", "1" and so on.

    Args:
      name: the environment's name, with its backend.
      role: ``observations`` or ``actions``.
      kinds: kinds of spaces that the backend's adapter supports.

    Raises:
      ConfigError: the space is of another kind,
        or has more values than a network can have inputs, one for each.
    """
    if space.kind not in kinds or space.parts == {}:
        raise ConfigError(
            f"{name} has {_has(space, role)}; {', '.join(kinds[:-1])} and {kinds[-1]} work{_advice(kinds, role)}"
        )
    if space.parts:
        parts = sorted(space.parts.items())
        return {
            part: space_of(inner, name, f"a part {part!r} of its {role} that is", kinds)
            for part, inner in parts
        }
    if space.num_choices > MAX_SIZE:
        raise ConfigError(
            f"{name} has {_has(space, role)} with {space.num_choices} values; up to {MAX_SIZE} work, "
            "and a Box has no such limit"
        )
    if space.kind == "Box":
        return _box(space)
    if space.kind == "Discrete":
        return Discrete(space.sizes[0], space.start)
    sizes = tuple(space.sizes or [2] * math.prod(space.shape))
    return MultiDiscrete(sizes, tuple(space.start or ()), space.shape, space.kind == "MultiBinary")


def _has(space: PlainSpace, role: str) -> str:
    words = f"{role} {space.kind}" if role.endswith(" is") else f"{space.kind} {role}"
    return f"{words} without parts" if space.parts == {} else words


def _advice(kinds: Sequence[str], role: str) -> str:
    """Says what helps with a space that no policy supports; empty: nothing."""
    if "MultiBinary" not in kinds:
        return ""
    if "actions" in role:
        return ", and a gymnasium.ActionWrapper can offer one of these instead"
    return ", and wrappers such as FlattenObservation make a Box of others"


def _box(space: PlainSpace) -> Box:
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.dtype(space.dtype)))
    low = np.broadcast_to(np.asarray(space.low), space.shape)
    high = np.broadcast_to(np.asarray(space.high), space.shape)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        low = np.clip(low, limits.min, limits.max)
        high = np.clip(high, limits.min, limits.max)
    with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
        return Box(tuple(space.shape), dtype, low.astype(dtype), high.astype(dtype))


def policy_space(native: object, name: str, role: str, value: PyTree = None) -> Space:
    """Converts a space of a JAX environment, as ``space_of``;
    dtypes and shapes of ``value`` override its own.
    """
    space = check_counted(plain(native), name, role)
    if value is not None:
        space = _overridden(space, named(native, value))
    return space_of(space, name, role)


def _overridden(space: PlainSpace, value: PyTree) -> PlainSpace:
    """Returns a space whose boxes have the dtypes and shapes of ``value``."""
    if space.parts is not None:
        parts = {name: _overridden(part, value[name]) for name, part in space.parts.items()}
        return space._replace(parts=parts)
    if space.kind != "Box":
        return space
    return space._replace(shape=tuple(value.shape), dtype=np.dtype(value.dtype).name)
