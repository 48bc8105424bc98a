"""The device mesh: its axes, what lies where on it, and sums over it.

Programs run under ``jax.shard_map`` over a mesh with two axes: ``agent`` (independent learners; 1 unless a population
is trained) and ``data`` (shards of environments and examples). Sums and means run over ``data`` only. One device is a
mesh of one, so there is no second code path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import EpisodeStats, Rollout, TrainState

AGENT = "agent"
DATA = "data"

REPLICATED = PartitionSpec()
BATCH = PartitionSpec(DATA)
"""Leading axis (environments, examples) divided over the devices."""
TIME_BATCH = PartitionSpec(None, DATA)
"""As ``[T, B, ...]``: the second axis divided over the devices."""
ROLLOUT: Any = Rollout._make([TIME_BATCH] * 7 + [BATCH] * 2)
"""Where the fields of a rollout lie."""
STATE: Any = TrainState._make([REPLICATED] * 7 + [BATCH])
"""Where the fields of a train state lie."""


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of the given devices along ``data``, and one along ``agent``."""
    return Mesh(np.asarray(devices).reshape(1, -1), (AGENT, DATA))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The shardings that a tree of partition specs means on a mesh."""
    return jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def place(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Puts every array of ``tree`` on the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, spec))


class Program:
    """A function over shards, compiled for a mesh by its first call, and only then.

    Later calls run the same executable; arguments of other shapes, dtypes or placement are an error, so nothing is
    ever traced twice. Threads may share it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> None:
        """``function`` sees its device's shard of each argument; arguments named by ``donate`` are used up.

        Arguments may be numpy arrays, which are sent where ``in_specs`` says. ``check_vma`` proves while tracing that
        what ``out_specs`` calls replicated is equal on all devices.
        """
        self._mapped = partial(jax.shard_map, function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        self._num_devices = mesh.size
        mapped = self._mapped(check_vma=True)
        self._jitted = jax.jit(mapped, in_shardings=shardings(mesh, in_specs), donate_argnums=donate)
        self._compiled: Any = None
        self._compiling = threading.Lock()
        self.compile_seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        if jax.config.jax_disable_jit:
            return self._step_by_step(*args)
        if self._compiled is None:
            with self._compiling:
                if self._compiled is None:
                    began = time.perf_counter()
                    self._compiled = self._jitted.lower(*args).compile()
                    self.compile_seconds = time.perf_counter() - began
        return self._compiled(*args)

    def _step_by_step(self, *args: Any) -> Any:
        """Runs it without compiling, as ``jax.disable_jit`` asks for: ``print`` shows numbers, errors name their line.

        ``check_vma`` refuses much of this, and without it JAX does not sum gradients over the devices.

        Raises:
          ConfigError: there are several devices.
        """
        if self._num_devices > 1:
            raise ConfigError(f"jax.disable_jit works on one device, not on {self._num_devices}: --num-devices 1")
        return self._mapped(check_vma=False)(*args)


# --- Inside a sharded program ---------------------------------------------------------------------------


def global_sum(tree: Any) -> Any:
    """Sums each array over the devices; the result is equal on all of them."""
    return jax.lax.psum(tree, DATA)


def global_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of ``x`` where ``mask`` holds, over all devices; 0 where the mask is empty.

    The sums are divided once: a mean over devices of local masked means would be another number.
    """
    total, count = global_sum((jnp.sum(jnp.where(mask, x, 0.0)), jnp.sum(mask, dtype=jnp.float32)))
    return total / jnp.maximum(count, 1.0)


def global_episodes(episodes: EpisodeStats) -> EpisodeStats:
    """The statistics of all devices together."""
    count, return_sum, length_sum = global_sum((episodes.episodes, episodes.return_sum, episodes.length_sum))
    least, most = jax.lax.pmin(episodes.return_min, DATA), jax.lax.pmax(episodes.return_max, DATA)
    return EpisodeStats(count, return_sum, length_sum, least, most)


def global_index(local_size: int) -> jax.Array:
    """The global indices, int32 ``[local_size]``, of this device's shard of an axis."""
    return jax.lax.axis_index(DATA) * local_size + jnp.arange(local_size, dtype=jnp.int32)


def vary(tree: Any) -> Any:
    """Marks arrays as different on each device, which loop carries must agree on from the start."""

    def mark(x: jax.Array) -> jax.Array:
        return x if DATA in jax.typeof(x).mat.varying else jax.lax.pcast(x, DATA, to="varying")

    return jax.tree.map(mark, tree)


def vary_as(tree: Any, like: jax.Array) -> Any:
    """Marks arrays as different on devices, over the mesh axes for which ``like`` is."""
    axes = jax.typeof(like).mat.varying
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes - jax.typeof(x).mat.varying), to="varying"), tree)
