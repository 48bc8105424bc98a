"""Data that stay on the host, which gathers the windows of the updates to come
while the devices work.

They are the windows that the program would draw itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist.hosts import arrays
from jaxrl_dist.memory import records, ring
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.session import Session
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import PyTree

MOST_UPDATES = 256
MOST_BYTES = 2**27
"""Updates whose windows the host gathers at a time, at most, and their bytes."""
WINDOWS: Any = records.Windows._make([meshes.BATCH, meshes.REPLICATED])
"""Sharding of these windows."""


def data_shapes(job: Job) -> PyTree:
    """Returns the shapes and dtypes of a program's data: of ``job.put_data``, or of ``Feed``."""
    if job.data is None:
        return ()
    if not job.streams:
        return job.data.shapes
    size = updates_ahead(job) * _batch_size(job), job.data.window + 1
    shape = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*size, *x.shape[1:]), x.dtype), job.data.record
    )
    return records.Windows(shape, jax.ShapeDtypeStruct((), jnp.int32))


def data_spec(job: Job) -> Any:
    """Returns the sharding of ``data_shapes``."""
    return WINDOWS if job.streams else meshes.BATCH


def updates_ahead(job: Job) -> int:
    """Returns the number of updates whose windows the host gathers at a time."""
    assert job.data is not None
    row = sum(x.nbytes // len(x) for x in jax.tree.leaves(job.data.record))
    update = row * (job.data.window + 1) * _batch_size(job)
    return max(1, min(MOST_UPDATES, MOST_BYTES // update))


def _batch_size(job: Job) -> int:
    """Returns the windows of an update of the only policy, which replays."""
    (algorithm,) = job.algorithm.values()
    assert algorithm.replay is not None
    return algorithm.replay.batch_size


class Feed:
    """The windows of the next updates of a run, up to ``updates_ahead`` of them."""

    def __init__(self, session: Session, iteration: int) -> None:
        """``iteration``: the number of the first update."""
        job = session.job
        assert job.data is not None
        self._mesh = job.mesh
        self._first = iteration
        self._source = job.data
        ((_, learner),) = job.learner.parts
        starts = records.Records._make([(), self._source.starts, self._source.sizes])
        self._records = meshes.put(starts, job.mesh, meshes.BATCH)
        self._key = session.key(Stream.LEARN)
        count = updates_ahead(job)

        def indices(first: jax.Array, key: jax.Array, data: records.Records) -> ring.Index:
            assert learner.indices is not None
            index = learner.indices
            return jax.vmap(lambda after: index(first + after, key, data))(jnp.arange(count))

        specs = (meshes.REPLICATED, meshes.REPLICATED, meshes.BATCH)
        out = PartitionSpec(None, meshes.DATA)
        self.program = meshes.Program(indices, job.mesh, specs, out, mapped=meshes.acting)
        self._index = self._drawn()
        self.gather()

    def ahead(self, count: int) -> None:
        """Draws where the windows lie that follow the next ``count`` updates,
        before these keep the devices busy.
        """
        self._first += count
        self._index = self._drawn()

    def gather(self) -> None:
        """Gathers these windows as ``windows``: each process the windows of its devices."""
        mesh = self._mesh
        source = self._source
        here = arrays.own_part(mesh)
        rows = len(source.begin) // mesh.size
        # [K, N] to the rows of each device, one after the other.
        index = jax.device_get(arrays.as_local(self._index, mesh))
        row, slot = (x.reshape(len(x), here.size, -1).swapaxes(0, 1) for x in index)
        first = list(mesh.devices.flat).index(here.devices.flat[0])
        row = row + rows * (first + np.arange(here.size))[:, None, None]  # it counts from 0
        windows = records.Windows(
            source.windows(row.reshape(-1), slot.reshape(-1)), np.int32(self._first)
        )
        placed = map(jax.device_put, windows, meshes.shardings(here, WINDOWS))
        self.windows = arrays.as_global(records.Windows._make(placed), mesh, WINDOWS)

    def _drawn(self) -> ring.Index:
        drawn: ring.Index = self.program(np.int32(self._first), self._key, self._records)
        return drawn
