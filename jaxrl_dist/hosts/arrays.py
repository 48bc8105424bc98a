"""Arrays on a mesh that spans the processes of a run: from the host, to the host,
and each process's part of them.

Where all devices of a mesh belong to this process, each function is JAX's own call,
or returns its argument.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxrl_dist.errors import ConfigError, ProcessError
from jaxrl_dist.hosts import peers

PyTree = Any
"""A nest of arrays."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of an array that this process keeps, on the host;
    the other processes keep the others.
    """

    shape: tuple[int, ...]
    """Of the whole array."""
    dtype: np.dtype
    by_bounds: Mapping[tuple[tuple[int, int], ...], np.ndarray]
    """Each piece by its bounds in the whole array, which are a start and a stop for each axis."""


def connect() -> None:
    """Connects the devices of all processes by a sum over them,
    before any process waits for another.

    Raises:
      ProcessError: they do not reach each other; gloo's own time limit is 30 s,
        which a busy machine may exceed.
    """
    mesh = Mesh(np.asarray(jax.devices()), ("all",))
    try:
        ones = put(np.ones(mesh.size, np.float32), NamedSharding(mesh, PartitionSpec("all")))
        add = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
        add(ones).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        line = " ".join(str(error).split())[:200]
        raise ProcessError(
            "the devices of the processes did not reach each other; start all processes again "
            f"when the machine is less busy ({line})"
        ) from None


def check_equal(tree: PyTree, about: str) -> None:
    """Checks that all processes have read equal numpy arrays of ``tree``.

    Raises:
      ConfigError: they differ.
    """
    digest = hashlib.sha256()
    if peers.world() is not None:
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, np.ndarray | np.generic):
                digest.update(np.ascontiguousarray(leaf).data)
    for process, theirs in enumerate(peers.all_gather(digest.hexdigest(), about)):
        if theirs != digest.hexdigest():
            raise ConfigError(
                f"process {process} read other values of {about} than process {peers.index()}; "
                "give all processes the same files, on a file system that all hosts share and no "
                "other run changes"
            )


def own_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns the devices that belong to this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def spans(mesh: Mesh) -> bool:
    """Returns whether a mesh holds devices of other processes."""
    return peers.world() is not None and bool(mesh.is_multi_process)


def own_part(mesh: Mesh) -> Mesh:
    """Returns the part of a mesh with one row that belongs to this process."""
    if not spans(mesh):
        return mesh
    return Mesh(np.asarray(own_devices(list(mesh.devices.flat))).reshape(1, -1), mesh.axis_names)


def put(tree: PyTree, shardings: PyTree) -> PyTree:
    """Puts every array of ``tree`` on devices.

    Args:
      tree: values that are equal in all processes.
      shardings: one sharding, or a tree of shardings that is a prefix of ``tree``.
    """
    leaves = jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, Sharding))
    if all(sharding.is_fully_addressable for sharding in leaves):
        return jax.device_put(tree, shardings)
    full = jax.tree.broadcast(shardings, tree, is_leaf=lambda x: isinstance(x, Sharding))
    return jax.tree.map(_put, tree, full)


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array):
        if not x.is_fully_addressable:
            if x.sharding.is_equivalent_to(sharding, x.ndim):
                return x
            return jax.device_put(x, sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    value = np.asarray(x)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def from_rows(
    shape: tuple[int, ...], rows: Callable[[slice], np.ndarray], *, sharding: NamedSharding
) -> jax.Array:
    """Makes an array whose first axis is divided,
    of the rows that the devices of this process hold.

    Args:
      rows: makes the rows of a slice; called once for each slice, however many devices hold it.
    """
    by_start = dict[int | None, np.ndarray]()

    def part(index: Any) -> np.ndarray:
        if (start := index[0].start) not in by_start:
            by_start[start] = rows(index[0])
        return by_start[start]

    return jax.make_array_from_callback(shape, sharding, part)


def fetch(tree: PyTree) -> PyTree:
    """Copies every array of ``tree`` to the host;
    all processes must call it if each holds parts of the arrays.
    """
    return jax.device_get(whole(tree))


def whole(tree: PyTree) -> PyTree:
    """Replicates the arrays of ``tree`` that other processes hold parts of;
    all processes must call it.
    """
    leaves, structure = jax.tree.flatten(tree)
    parted = [at for at, x in enumerate(leaves) if not is_here(x)]
    if not parted:
        return tree
    replicated = NamedSharding(leaves[parted[0]].sharding.mesh, PartitionSpec())
    copies = jax.jit(_identity, out_shardings=replicated)([leaves[at] for at in parted])
    for at, x in zip(parted, copies, strict=True):
        leaves[at] = x
    return jax.tree.unflatten(structure, leaves)


def copied(tree: PyTree) -> PyTree:
    """Copies every array of ``tree`` to the host, so that no donation overwrites it;
    otherwise as ``fetch``.
    """
    return jax.tree.map(np.array, whole(tree))


def _identity(tree: PyTree) -> PyTree:
    return tree


def is_here(x: object) -> bool:
    """Returns whether this process can read all of a value."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def pieces(tree: PyTree) -> PyTree:
    """Copies every array of ``tree`` to the host: whole or, if other processes hold parts of it,
    as ``Pieces``.

    Each element of an array is in exactly one piece of one process.
    """
    return jax.tree.map(_pieces, tree)


def _pieces(x: Any) -> np.ndarray | Pieces:
    if isinstance(x, Pieces):
        return x
    if is_here(x):
        return np.array(x)
    by_bounds = {}
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            bounds = [
                part.indices(size)[:2] for part, size in zip(shard.index, x.shape, strict=True)
            ]
            by_bounds[tuple(bounds)] = np.array(shard.data)
    return Pieces(x.shape, x.dtype, by_bounds)


def as_local(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns this process's part of arrays on ``mesh``, as arrays on ``own_part(mesh)``,
    without copying.
    """
    if not spans(mesh):
        return tree
    part = own_part(mesh)
    return jax.tree.map(lambda x: _view(x, part, x.sharding.spec, mesh.size, part.size), tree)


def as_global(tree: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
    """Joins the parts of all processes into arrays on ``mesh``, without copying;
    the inverse of ``as_local``.

    Args:
      specs: a tree of partition specs that is a prefix of ``tree``.
    """
    if not spans(mesh):
        return tree
    part = own_part(mesh)
    full = jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.tree.map(lambda x, spec: _view(x, mesh, spec, part.size, mesh.size), tree, full)


def _view(x: jax.Array, on: Mesh, spec: PartitionSpec, before: int, after: int) -> jax.Array:
    shape = [*x.shape]
    for axis, name in enumerate(spec):
        if name is not None:
            shape[axis] = shape[axis] * after // before
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(on, spec), shards)
