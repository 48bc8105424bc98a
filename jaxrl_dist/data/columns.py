"""The columns of data sets: arrays ``[L, ...]``, or dicts of them, each with a space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space
from jaxrl_dist.types import PyTree

FLAGS = ("terminated", "truncated", "valid")
_DTYPES = {"reward": np.float32, "log_prob": np.float32, **dict.fromkeys(FLAGS, np.bool_)}
ROWS = {name: Box((), np.dtype(dtype), np.array(0), np.array(0)) for name, dtype in _DTYPES.items()}
"""The spaces of the columns that are alike in all data sets."""
_MAX_STEPS, _BLOCK = 2**31 - 1, 2**24  # bytes of an array that are checked at a time


def problem(columns: Mapping[str, PyTree], kinds: Mapping[str, Space]) -> str | None:
    """Says which column does not hold what its space says, or what a record needs; None: all do.

    Args:
      columns: one for each space, in which episodes lie one after the other.
    """
    size = len(columns["reward"])
    if not 0 < size <= _MAX_STEPS:
        return f"it has {size} steps; 1 to {_MAX_STEPS} work"
    for name, column in columns.items():
        arrays = spaces.leaves(column)
        for path, part in spaces.leaves(kinds[name]).items():
            if (text := _problem_of(arrays[path], size, part)) is not None:
                return f"{f'{name} {path}'.strip()} {text}"
    terminated, truncated, valid = (columns[name] for name in FLAGS)
    over = terminated | truncated
    if (terminated & truncated).any() or (over & ~valid).any():
        return "a step both terminates and is truncated, or an invalid step ends an episode"
    if valid[-1] or not np.array_equal(np.flatnonzero(~valid), np.flatnonzero(over) + 1):
        return "its invalid steps are not those after the ends of its episodes"
    return None


def _problem_of(x: np.ndarray, size: int, part: Any) -> str | None:
    if x.shape != (size, *part.shape) or x.dtype != part.dtype:
        return f"is {x.dtype}{list(x.shape)}, not {part.dtype}{[size, *part.shape]}"
    step = max(1, _BLOCK * size // max(1, x.nbytes))  # rows; the array may be larger than the memory
    problems = (_problem_in(x[first : first + step], part) for first in range(0, size, step))
    return next(filter(None, problems), None)


def _problem_in(x: np.ndarray, part: Any) -> str | None:
    if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
        return "has a NaN or an infinity"
    if x.dtype == np.bool_ and (x.view(np.uint8) > 1).any():
        return "has a value that is neither True nor False"
    if isinstance(part, Box):
        return None
    most = part.n if isinstance(part, Discrete) else np.asarray(part.nvec)
    return f"has a value that {spaces.describe(part)} has not" if (x < 0).any() or (x >= most).any() else None


def space_of(tree: PyTree) -> Space:
    """Returns the space of arrays ``[L, ...]``: integers count from 0, and the bounds of numbers are the data's."""
    if isinstance(tree, dict):
        return {name: space_of(part) for name, part in tree.items()}
    x = np.asarray(tree)
    if np.issubdtype(x.dtype, np.integer) and x.dtype != np.uint8 and x.ndim <= 2:
        if x.ndim == 1:
            return Discrete(int(x.max()) + 1)
        return MultiDiscrete(tuple(int(most) + 1 for most in x.max(axis=0)))
    dtype = x.dtype if x.dtype in (np.uint8, np.bool_) else np.dtype(np.float32)
    return Box(x.shape[1:], np.dtype(dtype), x.min(axis=0).astype(dtype), x.max(axis=0).astype(dtype))


def cast(tree: PyTree, space: Space) -> PyTree:
    """Returns arrays of a space in its dtypes."""
    if isinstance(space, dict):
        return {name: cast(tree[name], part) for name, part in space.items()}
    return np.asarray(tree).astype(space.dtype)
