"""Maps of values and visits of environments whose states lie on a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import PyTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cells(obs: PyTree, grid: tuple[int, ...] | None = None) -> np.ndarray:
    """Returns the row and the column ``[S, 2]`` that observations ``[S, ...]`` show.

    Categories count cells row by row, vectors of integers begin with row and column, and an image
    has one cell that is not 0.

    Args:
      grid: rows and columns of categories; None: as many rows as columns.

    Raises:
      ConfigError: the observations show no cells, or ``grid`` has too few cells or is given for
        observations that are not categories.
    """
    if isinstance(obs, dict):
        obs = obs.get("observation", obs)
    seen = np.asarray(jax.tree.leaves(obs)[0])
    integers = np.issubdtype(seen.dtype, np.integer)
    if integers and seen.ndim == 1:
        return _cells_of_categories(seen, grid)
    if grid:
        raise ConfigError(
            "--grid needs observations that are categories, but these show rows and columns; "
            "remove it"
        )
    if integers and seen.ndim == 2 and seen.shape[1] > 1:
        return seen[:, :2].astype(np.int64)
    if seen.ndim > 2:
        sizes = np.abs(seen.reshape(*seen.shape[:3], -1).astype(np.float64)).sum(axis=3)
        flat = sizes.reshape(len(seen), -1)
        if (np.count_nonzero(flat, axis=1) == 1).all():
            return np.stack(np.divmod(flat.argmax(axis=1), seen.shape[2]), axis=1)
    raise ConfigError(
        "no map: the observations are not categories, vectors of row and column, or one-hot images"
    )


def _cells_of_categories(categories: np.ndarray, grid: tuple[int, ...] | None) -> np.ndarray:
    largest = int(categories.max())
    if grid and largest >= math.prod(grid):
        raise ConfigError(
            f"--grid {grid[0]} {grid[1]} has {math.prod(grid)} cells, but the states reach cell "
            f"{largest}; use a larger grid"
        )
    columns = grid[1] if grid else math.isqrt(largest) + 1
    return np.stack(np.divmod(categories, columns), axis=1)


def figure(maps: Mapping[str, tuple[np.ndarray, bool]], where: np.ndarray) -> Figure:
    """Draws maps side by side.

    Args:
      maps: by title the numbers ``[S]`` of states, and whether the numbers of a cell are added up
        (else averaged).
      where: as ``cells`` returns it.
    """
    from matplotlib.figure import Figure

    height, width = where.max(axis=0) + 1
    cell = where[:, 0] * width + where[:, 1]
    count = height * width
    figure = Figure(
        figsize=(1 + 3.2 * len(maps) * max(1.0, width / height / 2), 3.4), layout="constrained"
    )
    for at, (title, (numbers, add)) in enumerate(maps.items()):
        here = np.bincount(cell, minlength=count)
        total = np.bincount(cell, numbers, count) / (1 if add else np.maximum(here, 1))
        axes = figure.add_subplot(1, len(maps), 1 + at)
        shown = axes.imshow(np.where(here > 0, total, np.nan).reshape(height, width))
        axes.set(title=title, xticks=[], yticks=[])
        figure.colorbar(shown, ax=axes)
    return figure
