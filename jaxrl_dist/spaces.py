"""Spaces of observations and actions."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Integers ``0 .. n - 1``, as int32 scalars."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """One integer ``0 .. nvec[i] - 1`` for each ``i``, as an int32 vector."""

    nvec: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Arrays of one shape and dtype between ``low`` and ``high`` (arrays of that shape; may be infinite)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    low: np.ndarray
    high: np.ndarray


Space = Discrete | MultiDiscrete | Box


def describe(space: Space) -> str:
    """Returns a space in a word, without its bounds: ``float32[4]``, ``Discrete(2)`` or ``MultiDiscrete(3, 2)``."""
    if isinstance(space, Box):
        return f"{space.dtype}{list(space.shape)}"
    return f"Discrete({space.n})" if isinstance(space, Discrete) else f"MultiDiscrete{tuple(space.nvec)}"


def channels_first(shape: tuple[int, ...]) -> bool:
    """Returns True for an image shape such as EnvPool's Atari (4, 84, 84), not gymnax's MinAtar (10, 10, 4).

    A square image has two equal sides; any other image has fewer channels than rows or columns.
    """
    if len(shape) != 3 or 1 < shape[0] == shape[1]:
        return False
    return 1 < shape[1] == shape[2] or shape[0] < shape[2]
