"""The device mesh: its axes, what lies where on it, and sums over it.

Functions of one device's shards are mapped over a mesh with two axes: ``agent`` (independent learners; 1 unless a
population is trained) and ``data`` (shards of environments and examples). Acting and learning are mapped apart
(``acting``, ``learning``); whatever joins them, such as a loop over both, stands outside and sees whole arrays. Sums
and means run over ``data`` only. One device is a mesh of one, so there is no second code path.
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
from jaxrl_dist.types import Rollout, TrainState

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


def put(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Puts every array of ``tree`` on the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, spec))


def _jit_disabled() -> bool:
    config: Any = jax.config  # whose types lack it
    return bool(config.jax_disable_jit)


def learning(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Maps a function of shards that takes gradients or sums over devices.

    ``check_vma`` proves while tracing that what ``out_specs`` calls replicated is equal on all devices; under it the
    gradient of a global mean is right as it stands. With ``jax.disable_jit``, which ``check_vma`` hardly allows and
    ``Program`` allows on one device only, there is nothing to prove.
    """
    check_vma = not _jit_disabled()
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def acting(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Maps a function of shards that takes no gradient and sums nothing over devices.

    It needs no proof as ``learning`` does, so environments may be written as if there were one device: loops may start
    from constants, and branches may return them.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def whole(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """The function itself: it takes and returns whole arrays, and maps its parts over the mesh."""
    del mesh, in_specs, out_specs
    return function


class Program:
    """A function compiled for a mesh by its first call, and only then.

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
        mapped: Callable[..., Callable[..., Any]] = learning,
    ) -> None:
        """``mapped`` (``learning``, ``acting`` or ``whole``) says how ``function`` sees the mesh.

        Arguments may be numpy arrays, which are sent where ``in_specs`` says; those named by ``donate`` are used up.
        """
        self._map = partial(mapped, function, mesh, in_specs, out_specs)
        self._num_devices = mesh.size
        where = shardings(mesh, in_specs), shardings(mesh, out_specs)
        self._jitted = jax.jit(self._map(), in_shardings=where[0], out_shardings=where[1], donate_argnums=donate)
        self._compiled: Any = None
        self._compiling = threading.Lock()
        self.compile_seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        if _jit_disabled():
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

        Raises:
          ConfigError: there are several devices.
        """
        if self._num_devices > 1:
            raise ConfigError(f"jax.disable_jit works on one device, not on {self._num_devices}: --num-devices 1")
        return self._map()(*args)


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


def by_hand(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on one device and outside a program, to try what sums over devices, as postprocessors may.

    ``by_hand(algorithm.postprocess)(variables, rollout, context)`` has all environments in its one shard.
    """
    mesh = make_mesh(jax.local_devices()[:1])
    return jax.shard_map(function, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)


def global_index(local_size: int) -> jax.Array:
    """The global indices, int32 ``[local_size]``, of this device's shard of an axis."""
    return jax.lax.axis_index(DATA) * local_size + jnp.arange(local_size, dtype=jnp.int32)


def vary_as(tree: Any, like: jax.Array) -> Any:
    """Marks arrays as different on devices, over the mesh axes for which ``like`` is."""
    axes = jax.typeof(like).mat.varying
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes - jax.typeof(x).mat.varying), to="varying"), tree)
