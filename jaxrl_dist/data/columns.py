"""The columns of data sets: arrays ``[L, ...]``, or dicts of them, each with a space."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxrl_dist import spaces
from jaxrl_dist.checks import MAX_SIZE
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Part, Space
from jaxrl_dist.types import PyTree

FLAGS = ("terminated", "truncated", "valid")
_DTYPES = {"reward": np.float32, "log_prob": np.float32, **dict.fromkeys(FLAGS, np.bool_)}
ROWS = {name: Box((), np.dtype(dtype), np.array(0), np.array(0)) for name, dtype in _DTYPES.items()}
"""The spaces of the columns that are alike in all data sets."""
COARSE = 64
"""Least number of float32 values between the least and the largest number of a column."""
_MAX_STEPS = 2**31 - 1
_BLOCK = 2**24  # bytes of an array that are checked at a time


def problem(columns: Mapping[str, PyTree], kinds: Mapping[str, Space]) -> str | None:
    """Says which column does not hold what its space says or what a data set needs; None: all do.

    Args:
      columns: one for each space, in which episodes lie one after the other.
    """
    size = len(columns["reward"])
    if not 0 < size <= _MAX_STEPS:
        return f"it has {size} steps; 1 to {_MAX_STEPS} work"
    for name, column in columns.items():
        arrays = spaces.leaves(column)
        for path, part in spaces.leaves(kinds[name]).items():
            if (fault := _problem_of(arrays[path], size, part)) is not None:
                label = f"{name} {path}".strip()
                return f"{label} {fault}"
    return _problem_of_ends(*(columns[name] for name in FLAGS))


def _problem_of_ends(
    terminated: np.ndarray, truncated: np.ndarray, valid: np.ndarray
) -> str | None:
    over = terminated | truncated
    if (terminated & truncated).any() or (over & ~valid).any():
        return "a step both terminates and is truncated, or an invalid step ends an episode"
    if valid[-1] or not np.array_equal(np.flatnonzero(~valid), np.flatnonzero(over) + 1):
        return "its invalid steps are not those after the ends of its episodes"
    return None


def _problem_of(column: np.ndarray, size: int, part: Part) -> str | None:
    if column.shape != (size, *part.shape) or column.dtype != part.dtype:
        return f"is {column.dtype}{list(column.shape)}, not {part.dtype}{[size, *part.shape]}"
    # The array may be larger than the memory.
    rows = max(1, _BLOCK * size // max(1, column.nbytes))
    blocks = (column[first : first + rows] for first in range(0, size, rows))
    return next(filter(None, (_problem_in(block, part) for block in blocks)), None)


def _problem_in(block: np.ndarray, part: Part) -> str | None:
    if np.issubdtype(block.dtype, np.floating) and not np.isfinite(block).all():
        return "has a NaN or an infinity"
    if block.dtype == np.bool_ and (block.view(np.uint8) > 1).any():
        return "has a value that is neither True nor False"
    if isinstance(part, Box):
        return None
    most = np.max(part.n if isinstance(part, Discrete) else part.nvec)
    if most > MAX_SIZE:
        return f"has integers up to {most - 1}, too many for categories; give it as floats"
    if spaces.holds(part, block):
        return None
    return f"has a value that {spaces.describe(part, starts=True)} does not have"


def returns_to_go(
    reward: np.ndarray, ends: np.ndarray, terminated: np.ndarray, discount: float
) -> np.ndarray:
    """Returns the discounted sum of an episode's rewards from each step on, ``[L]`` float32.

    After a time limit, the episode's mean reward continues for ever, as in AntMaze's unsuccessful
    episodes in the code of Nakamoto et al. (2023). Without a discount that sum is unknown, and
    counts as -infinity.

    Args:
      reward: ``[L]``, as the other columns.
      ends: the last steps of the episodes.
    """
    returns = np.zeros(len(reward), np.float32)
    for begin, end in zip(np.append(0, ends[:-1] + 2), ends, strict=True):
        mean = reward[begin : end + 1].mean(dtype=np.float64)
        if terminated[end]:
            rest = 0.0
        elif discount < 1:
            rest = mean / (1.0 - discount)
        else:
            rest = -math.inf
        for step in range(end, begin - 1, -1):
            rest = float(reward[step]) + discount * rest
            returns[step] = rest
    return returns


def arrays(tree: PyTree) -> PyTree:
    """Returns a tree of numpy arrays; anything but a dict becomes one.

    Raises:
      ConfigError: it has parts that are not arrays of numbers.
    """
    if isinstance(tree, dict):
        if not all(isinstance(name, str) for name in tree):
            raise ConfigError("the keys of a dict of arrays must be text")
        return {name: arrays(part) for name, part in tree.items()}
    try:
        array = np.asarray(tree)
    except ValueError:  # as of lists of several lengths
        array = np.array(None)
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise ConfigError(
            "make a data set from arrays of numbers with one entry for each step, or from dicts of "
            "such arrays"
        )
    return array


def flags(values: ArrayLike, name: str) -> np.ndarray:
    """Returns an array of flags, bool.

    Raises:
      ConfigError: it has other values than True and False, or 1 and 0.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
        raise ConfigError(f"{name} must contain True and False, or 1 and 0")
    return array.astype(bool)


def equal_rows(first: PyTree, second: PyTree) -> np.ndarray:
    """Returns for each row of arrays ``[L, ...]`` whether a data set would hold it alike, ``[L]``.

    Floats are compared as float32: the observations and the successors of one file may have two
    precisions.
    """
    others = spaces.leaves(second)
    equal = [_equal(part, others[path]) for path, part in spaces.leaves(first).items()]
    return np.logical_and.reduce(equal)


def _equal(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if "f" in (x.dtype.kind, y.dtype.kind):
        with np.errstate(over="ignore"):  # a number beyond float32 is refused later
            x = x.astype(np.float32)
            y = y.astype(np.float32)
    return (x == y).reshape(len(x), -1).all(axis=1)


def sliced(tree: PyTree, begin: int, end: int | None = None) -> PyTree:
    """Returns the rows ``begin:end`` of arrays ``[L, ...]``."""
    return jax.tree.map(lambda x: x[begin:end], tree)


def entries(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the entries of arrays ``[L, ...]``, by their paths."""
    return {path: part.shape[1:] for path, part in spaces.leaves(tree).items()}


def space_of(tree: PyTree, *, actions: bool = False) -> Space:
    """Returns the space of arrays ``[L, ...]``: integers count from 0, and the bounds of numbers
    are the data's.

    Bytes are integers as ``actions``; as observations they are parts of images, whose bounds are 0
    and 255.

    Raises:
      ConfigError: integers may mean several things.
    """
    if isinstance(tree, dict):
        return {name: space_of(part, actions=actions) for name, part in tree.items()}
    values = np.asarray(tree)
    is_integer = np.issubdtype(values.dtype, np.integer)
    if actions and (values.dtype == np.bool_ or (is_integer and values.ndim > 2)):
        raise ConfigError(
            f"actions {values.dtype}{list(values.shape)} may be MultiBinary or MultiDiscrete; "
            "give the space as action_space="
        )
    if is_integer and values.ndim <= 2 and (actions or values.dtype != np.uint8):
        return _categories(values, actions=actions)
    return _numbers(values)


def _categories(values: np.ndarray, *, actions: bool) -> Discrete | MultiDiscrete:
    """Returns the space of integers ``[L]`` or ``[L, N]`` that count from 0."""
    if values.min() < 0:
        raise ConfigError(
            "integers are categories and count from 0, but some are negative; give numbers as "
            "floats, or give the environment's space as action_space= or observation_space="
        )
    if values.ndim == 1:
        return Discrete(int(values.max()) + 1)
    if actions and values.shape[1] == 1:
        raise ConfigError(
            "integer actions [N, 1] may be Discrete or a MultiDiscrete of one; give action[:, 0] "
            "for Discrete, or the space as action_space="
        )
    return MultiDiscrete(tuple(int(most) + 1 for most in values.max(axis=0)))


def _numbers(values: np.ndarray) -> Box:
    """Returns the space of numbers or pixels ``[L, ...]``."""
    shape = values.shape[1:]
    # an image, whose brightest pixels the data may lack
    if values.dtype == np.uint8 and values.ndim > 2 and values.max() > 127:
        return Box(shape, values.dtype, np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8))
    low = values.min(axis=0)
    high = values.max(axis=0)
    if values.dtype in (np.uint8, np.bool_, np.float32):
        return Box(shape, values.dtype, low, high)
    _warn_of_coarse(low, high)
    return Box(shape, np.dtype(np.float32), low.astype(np.float32), high.astype(np.float32))


def _warn_of_coarse(low: np.ndarray, high: np.ndarray) -> None:
    """Warns of numbers between bounds within which float32 has few values."""
    with np.errstate(over="ignore", invalid="ignore"):
        step = np.spacing(np.maximum(np.abs(low), np.abs(high)).astype(np.float32))
        coarse = (high > low) & (step > (high - low) / COARSE)
    if coarse.any():
        warnings.warn(
            "some numbers of the data set differ by less than float32 can show at their size; "
            "subtract a constant from them",
            ConfigWarning,
            stacklevel=7,
        )


def cast(tree: PyTree, space: Space, name: str) -> PyTree:
    """Returns arrays of a space in its dtypes.

    Raises:
      ConfigError: the arrays have other parts, or an integer would have another value.
    """
    if isinstance(space, dict):
        if not isinstance(tree, dict) or tree.keys() != space.keys():
            raise ConfigError(f"{name} needs the parts of {spaces.describe(space)}")
        return {part: cast(tree[part], space[part], f"{name} {part}") for part in space}
    given = np.asarray(tree)
    with np.errstate(invalid="ignore"):  # of a NaN
        held = given.astype(space.dtype)
    if not np.issubdtype(space.dtype, np.floating) and not np.array_equal(held, given):
        raise ConfigError(
            f"{name} has values that {spaces.describe(space)} cannot hold, "
            f"such as {given[held != given][0]}"
        )
    return held


def hull(*alike: Any) -> Space:
    """Returns the space of the values of all these spaces, which differ in the bounds of numbers
    alone.
    """
    space = alike[0]
    if isinstance(space, dict):
        return {name: hull(*(other[name] for other in alike)) for name in space}
    if not isinstance(space, Box):
        return space
    low = np.stack([box.low for box in alike]).min(axis=0)
    high = np.stack([box.high for box in alike]).max(axis=0)
    return Box(space.shape, space.dtype, low, high)
