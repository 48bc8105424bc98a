"""Data that stay on the host, which gathers the
windows of the updates to come while the devices work.

They are those that the program would draw itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist.hosts import arrays
from jaxrl_dist.memory import records, ring
from jaxrl_dist.plans.job import WINDOWS, Job
from jaxrl_dist.rng import Stream


class Feed:
    """The windows of the next updates of a run, up to ``job.updates_ahead`` of them."""

    def __init__(self, job: Job, iteration: int) -> None:
        """``iteration``: the number of the first update."""
        assert job.data is not None
        self._job = job
        self._first = iteration
        self._source = job.data
        ((_, learner),) = job.learner.parts
        starts = records.Records._make([(), self._source.starts, self._source.sizes])
        self._records = meshes.put(starts, job.mesh, meshes.BATCH)
        self._key = job.key(Stream.LEARN)

        def indices(first: jax.Array, key: jax.Array, data: records.Records) -> ring.Index:
            assert learner.indices is not None
            index = learner.indices
            return jax.vmap(lambda after: index(first + after, key, data))(
                jnp.arange(job.updates_ahead)
            )

        specs = (meshes.REPLICATED, meshes.REPLICATED, meshes.BATCH)
        out = PartitionSpec(None, meshes.DATA)
        self.program = meshes.Program(indices, job.mesh, specs, out, mapped=meshes.acting)
        self._index = self._drawn()
        self.gather()

    def ahead(self, count: int) -> None:
        """Draws where the windows lie that follow the next ``count`` updates:
        before these keep the devices busy.
        """
        self._first += count
        self._index = self._drawn()

    def gather(self) -> None:
        """Gathers these windows as ``windows``: each process those of its devices."""
        mesh, source = self._job.mesh, self._source
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
