"""Recorded experience on the devices: the windows of a data set, each drawn equally often.

It lies beside a replay memory in the layout of ``memory.ring`` and is never written. Windows start
with the recorded steps. Where every step of a window is learnt from, they start at every slot, from
``window - 1`` before the record on, so that each recorded step is at each place of a window equally
often. The record is cut into ``ROWS`` pieces with equally many windows, which are divided over the
devices, so a draw is the same on 1, 2, 4 and 8 of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh
from jaxrl_dist.memory import ring
from jaxrl_dist.types import Array, Rollout

ROWS = 8
"""Pieces of a record; as many more as there are devices, if these do not divide them."""


class Records(NamedTuple):
    """A data set. Every leaf is ``[R, ...]``, divided over the devices by row."""

    steps: Rollout
    """[R, C, ...]; its core fields are ()."""
    starts: Array
    """[R, S] int32, the slots at which a window may start."""
    sizes: Array
    """[R] int32, how many of them each row has; rows differ by one at most."""


class Windows(NamedTuple):
    """The windows of some updates to come, which the host has gathered;
    its rows are divided over the devices.
    """

    steps: Rollout
    """[K * N, window + 1, ...], those of a device's first update first; its core fields are ()."""
    number: Array
    """[] int32, the iteration of the first update; in an update, which of them it is."""


class HostRecords(NamedTuple):
    """A record on the host, where it may lie in mapped files,
    and how it is cut into the rows of ``Records``.
    """

    record: Rollout
    """[L, ...] numpy arrays; an episode's last observation lies on an invalid step."""
    begin: np.ndarray
    """[R] int64, the first step of each row; negative: the row begins before the record."""
    length: int
    """C."""
    starts: np.ndarray
    """[R, S] int32."""
    sizes: np.ndarray
    """[R] int32."""
    window: int
    reward_scale: float = 1.0
    """Factor of the rewards, which the record holds already."""

    def windows(self, row: np.ndarray, slot: np.ndarray) -> Rollout:
        """Returns the windows ``[N, window + 1, ...]`` that
        start in these slots ``[N]`` of these rows.
        """
        size = len(self.record.reward)
        at = (self.begin[row] + slot)[:, None] + np.arange(self.window + 1)
        beyond = (at < 0) | (at >= size)
        at = np.clip(at, 0, size - 1)

        def read(x: np.ndarray) -> np.ndarray:
            values = x[at]
            values[beyond] = 0
            return values

        steps: Rollout = jax.tree.map(read, self.record)
        return steps

    @property
    def shapes(self) -> Records:
        """The shapes and dtypes of what ``rows`` returns."""

        def shape(x: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((len(self.begin), self.length, *x.shape[1:]), x.dtype)

        sizes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self.starts, self.sizes)
        )
        return Records(jax.tree.map(shape, self.record), *sizes)

    def rows(
        self, make: Callable[[tuple[int, ...], Callable[[slice], np.ndarray]], Any]
    ) -> Records:
        """Returns the rows.

        Args:
          make: makes an array from its shape and a function that returns a slice of its rows.
            Arrays are made one after the other, so that the host holds one at a time, and of it the
            rows that are asked for.
        """

        def cut(x: np.ndarray) -> Any:
            def part(rows: slice) -> np.ndarray:
                begin = self.begin[rows]
                pieces = np.zeros((len(begin), self.length, *x.shape[1:]), x.dtype)
                for piece, at in zip(pieces, begin, strict=True):
                    before = max(0, -at)
                    steps = x[at + before : at + self.length]
                    piece[before : before + len(steps)] = steps
                return pieces

            return make((len(self.begin), self.length, *x.shape[1:]), part)

        def of_rows(x: np.ndarray) -> Any:
            return make(x.shape, lambda rows: x[rows])

        return Records(jax.tree.map(cut, self.record), of_rows(self.starts), of_rows(self.sizes))


def divide(
    record: Rollout, window: int, num_devices: int, *, whole_windows: bool = False
) -> HostRecords:
    """Cuts a record into rows with equally many windows; copies nothing.

    Args:
      record: as in ``HostRecords``.
      window: steps of a window.
      num_devices: devices over which the rows are divided.
      whole_windows: see ``Algorithm.whole_windows``.
    """
    slots = np.flatnonzero(record.valid)
    if whole_windows and window > 1:
        slots = np.arange(1 - window, slots[-1] + 1)
    rows = math.lcm(ROWS, num_devices)
    count = np.diff(np.arange(rows + 1, dtype=np.int64) * len(slots) // rows).astype(np.int32)
    first = np.cumsum(count) - count
    begin = slots[np.minimum(first, len(slots) - 1)]
    end = slots[np.maximum(first + count - 1, 0)] + window + 1
    length = int(np.max(np.where(count > 0, end - begin, 1)))
    starts = np.zeros((rows, count.max()), np.int32)
    for row, (at, number) in enumerate(zip(first, count, strict=True)):
        starts[row, :number] = slots[at : at + number] - begin[row]
    return HostRecords(record, begin, length, starts, count, window)


def draw(records: Records | Windows, key: jax.Array, batch_size: int) -> ring.Index:
    """Draws this device's ``batch_size`` windows, each of the record's equally likely.

    Each row gives an equal share of the windows;
    the global index of an example determines its row and its key.
    """
    if isinstance(records, Windows):  # drawn by the host, with the same key
        return ring.Index(
            records.number * batch_size + jnp.arange(batch_size), jnp.zeros(batch_size, jnp.int32)
        )
    rows, most = records.starts.shape
    row, number = ring.stratified(key, batch_size, rows, lambda row: records.sizes[row], most)
    return ring.Index(row, records.starts[row, number])


def once(records: Records, like: Rollout) -> Rollout:
    """Returns all steps of this device's rows as a rollout ``[C - 1, R, ...]``;
    a step of two rows is valid in one.

    Args:
      like: a rollout whose ``core`` and ``extras`` have the structure that the algorithm expects.
    """
    rows, slots = records.steps.reward.shape
    last = jnp.where(records.sizes > 0, records.starts[jnp.arange(rows), records.sizes - 1], -1)
    first_of_next = jnp.arange(slots)[None] > last[:, None]
    steps = records.steps._replace(valid=records.steps.valid & ~first_of_next)
    steps = jax.tree.map(lambda x: x.swapaxes(0, 1), steps)
    before = jax.tree.map(lambda x: x[:-1], steps._replace(obs=()))
    blank_row = blank(like, rows)
    return before._replace(obs=steps.obs, core=blank_row.core, final_core=blank_row.final_core)


def blank(like: Rollout, rows: int = 1) -> Rollout:
    """Returns a rollout ``[1, rows, ...]`` of one invalid step on each device."""

    def zeros(x: jax.ShapeDtypeStruct, *leading: int) -> jax.Array:
        return mesh.vary(jnp.zeros((*leading, *x.shape[len(leading) :]), x.dtype))

    obs = jax.tree.map(lambda x: zeros(x, 2, rows), like.obs)
    cores = jax.tree.map(lambda x: zeros(x, rows), (like.core, like.final_core))
    rest = jax.tree.map(lambda x: zeros(x, 1, rows), like._replace(obs=(), core=(), final_core=()))
    return rest._replace(obs=obs, core=cores[0], final_core=cores[1])
