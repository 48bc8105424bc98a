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

    Categories count cells row by row, vectors of integers begin with row and column,
    and in an image one cell is not 0.

    Args:
      grid: rows and columns of categories; None: as many of both.

    Raises:
      ConfigError: they show none of these, or ``grid`` is not of categories,
        or has too few cells for them.
    """
    seen = np.asarray(
        jax.tree.leaves(obs.get("observation", obs) if isinstance(obs, dict) else obs)[0]
    )
    if seen.ndim == 1 and np.issubdtype(seen.dtype, np.integer):
        if grid and seen.max() >= math.prod(grid):
            raise ConfigError(
                f"--grid {grid[0]} {grid[1]} has {math.prod(grid)} cells, and there is a cell {seen.max()}"
            )
        return np.stack(
            np.divmod(seen, grid[1] if grid else math.isqrt(int(seen.max())) + 1), axis=1
        )
    if grid:
        raise ConfigError(
            "--grid is of observations that are categories, and these show their rows and columns"
        )
    if seen.ndim == 2 and np.issubdtype(seen.dtype, np.integer) and seen.shape[1] > 1:
        return seen[:, :2].astype(np.int64)
    if seen.ndim > 2:
        flat = (
            np.abs(seen.reshape(*seen.shape[:3], -1).astype(np.float64))
            .sum(axis=3)
            .reshape(len(seen), -1)
        )
        if (np.count_nonzero(flat, axis=1) == 1).all():
            return np.stack(np.divmod(flat.argmax(axis=1), seen.shape[2]), axis=1)
    raise ConfigError(
        "no map: the observations are not categories, vectors of row and column, or one-hot images"
    )


def figure(maps: Mapping[str, tuple[np.ndarray, bool]], where: np.ndarray) -> Figure:
    """Draws maps side by side.

    Args:
      maps: by title the numbers ``[S]`` of states, and whether those of a cell are added up,
        or else averaged.
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
