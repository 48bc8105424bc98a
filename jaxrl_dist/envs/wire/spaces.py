"""Spaces as JSON, for data sets and for programs outside this package.

Others may have written what is read, so nothing in it names code.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np

from jaxrl_dist.checks import MAX_SIZE
from jaxrl_dist.spaces import Box, Discrete, Interface, MultiDiscrete, Space

Json: TypeAlias = Any
"""A value in JSON, which others may have written."""
DTYPES = {np.dtype(code).name for code in "?bBhHiIqQefd"}
MAX_NUMBERS = 2**24
"""Numbers in an observation or action, at most; a message holds no more."""
MAX_AXES = 32
"""Axes of an array of numpy; further ones are not read, so that the array has another shape."""


def interface_to_json(interface: Interface) -> dict[str, Json]:
    """Returns an interface as the index of a data set holds it."""
    return {
        "observation": space_to_json(interface.observation),
        "action": space_to_json(interface.action),
        "mask": interface.mask,
        "both_sides": interface.both_sides,
        "tuples": list(interface.tuples),
    }


def interface_from_json(stored: Json) -> Interface:
    """The inverse of ``interface_to_json``.

    Raises:
      ValueError, TypeError, LookupError, AttributeError, OverflowError: somebody else has written
        it.
    """
    observation = space_from_json(stored["observation"])
    action = space_from_json(stored["action"])
    mask = stored["mask"]
    both_sides = stored["both_sides"]
    tuples = stored["tuples"]
    if not isinstance(mask, str | None) or not isinstance(both_sides, bool):
        raise TypeError("not the name of a mask, or not a flag")
    dicts = _dicts({"observation": observation, "action": action})
    for path in tuples:
        if dicts[path].keys() != set(map(str, range(len(dicts[path])))):
            raise ValueError("not the parts of a tuple")
    interface = Interface(observation, action, mask, both_sides, tuple(tuples))
    if interface.problem() is not None:
        raise ValueError("not a mask")
    return interface


def _dicts(parts: dict[str, Space], above: str = "") -> dict[str, dict[str, Space]]:
    """Returns the spaces of the parts that have parts themselves, by path."""
    dicts: dict[str, dict[str, Space]] = {}
    for name, space in parts.items():
        if isinstance(space, dict):
            dicts |= {above + name: space, **_dicts(space, f"{above}{name}/")}
    return dicts


def space_to_json(space: Space) -> Json:
    """Returns a space as an interface in JSON holds it."""
    if isinstance(space, dict):
        return {"parts": {name: space_to_json(part) for name, part in space.items()}}
    if isinstance(space, Discrete):
        return {"n": space.n, "start": space.start}
    if isinstance(space, MultiDiscrete):
        native = {"start": list(space.start), "axes": list(space.axes), "binary": space.binary}
        return {"nvec": list(space.nvec), **native}
    bounds = {"low": _bound_to_json(space.low), "high": _bound_to_json(space.high)}
    return {"shape": list(space.shape), "dtype": space.dtype.name, **bounds}


def _bound_to_json(bound: np.ndarray) -> Json:
    """Returns a bound as numbers or, for infinity, texts; equal numbers are one number."""
    numbers = np.asarray(bound).reshape(-1)
    if numbers.size and (numbers == numbers[0]).all():
        return _finite_or_text(numbers[0].item())
    return [_finite_or_text(number) for number in numbers.tolist()]


def _finite_or_text(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def space_from_json(stored: Json) -> Space:
    """The inverse of ``space_to_json``. Raises as ``interface_from_json``."""
    if "parts" in stored:
        _check_names(stored["parts"].keys())
        return {name: space_from_json(part) for name, part in stored["parts"].items()}
    if "n" in stored:
        size = _count(stored["n"])
        return Discrete(size, _start(stored["start"]))
    if "nvec" in stored:
        sizes = tuple(map(_count, stored["nvec"][:] or [0]))
        start = tuple(map(_start, stored["start"]))
        axes = tuple(map(_count, stored["axes"][:MAX_AXES]))
        binary = stored["binary"]
        if len(start) not in (0, len(sizes)) or not isinstance(binary, bool):
            raise ValueError("not the starts of these sizes, or not a flag")
        if axes and math.prod(axes) != len(sizes):
            raise ValueError("not the axes of so many values")
        return MultiDiscrete(sizes, start, axes, binary)
    return _box_from_json(stored)


def _box_from_json(stored: Json) -> Box:
    shape = tuple(map(_count, stored["shape"][:MAX_AXES]))
    name = stored["dtype"]
    if name not in DTYPES or math.prod(shape) > MAX_NUMBERS:
        raise ValueError("not a dtype or shape of observations")
    low = _bound_from_json(stored["low"], shape, name)
    high = _bound_from_json(stored["high"], shape, name)
    if not np.all(low <= high):
        raise ValueError("not bounds")
    return Box(shape, np.dtype(name), np.broadcast_to(low, shape), np.broadcast_to(high, shape))


def _check_names(names: Collection[str]) -> None:
    # "a/b" beside "a" could also name the part "b" of "a".
    clash = any(
        name[:at] in names for name in names for at, letter in enumerate(name) if letter == "/"
    )
    if not names or clash or not all(name and name.isprintable() for name in names):
        raise ValueError("no parts, or names that parts cannot have")


def _bound_from_json(value: Json, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns a bound that can be broadcast to ``shape``, which may be larger than what announces
    it.
    """
    if isinstance(value, list):
        bound = np.array([float(number) for number in value]).reshape(shape)
    else:
        bound = np.array(float(value))
    with np.errstate(over="ignore", invalid="ignore"):
        cast = bound.astype(dtype)
    if cast.dtype.kind in "iu":
        limits = np.iinfo(cast.dtype)
        lowest = np.isneginf(bound) | (bound == limits.min)
        highest = np.isposinf(bound) | (bound == limits.max)
        if np.any((cast != bound) & ~lowest & ~highest):
            raise ValueError("not bounds of this dtype")
        cast[lowest] = limits.min
        cast[highest] = limits.max
    return cast


def _start(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**30) <= value <= 2**30:
        raise ValueError("not a start")
    return value


def _count(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_SIZE:
        raise ValueError("not a size")
    return value
