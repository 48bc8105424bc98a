"""The device mesh: its axes, the sharding of arrays, and sums over devices.

Functions of one device's shards are mapped over a mesh with two axes: ``agent`` (members of a
population; 1 unless a population is trained) and ``data`` (shards of environments and examples).
Acting and learning are mapped separately (``acting``, ``learning``); code that joins them, such as
a loop over both, sees whole arrays. Sums and means run over ``data`` only. A single device is a
mesh of one, so it needs no second code path; a single run is a population of one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_dist import packing
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.types import Rollout, TrainState

AGENT = "agent"
DATA = "data"
MEMBER = "member"
"""Axis name of the members that share a device, within ``over_members``."""

LIGHT = 2**20
"""Elements in a member's arrays up to which members are computed in groups."""

REPLICATED = PartitionSpec()
BATCH = PartitionSpec(DATA)
"""The leading axis (environments, examples) is sharded."""
TIME_BATCH = PartitionSpec(None, DATA)
"""The second axis is sharded, as in ``[T, B, ...]``."""
ROLLOUT: Any = Rollout._make([TIME_BATCH] * 7 + [BATCH] * 2)
"""Sharding of the fields of a rollout."""
STATE: Any = TrainState._make([REPLICATED] * 7 + [BATCH])
"""Sharding of the fields of a train state."""


def make_mesh(devices: Sequence[jax.Device], rows: int = 1) -> Mesh:
    """Returns a mesh of the devices, with ``rows`` along ``agent`` and the rest along ``data``."""
    return Mesh(np.asarray(devices).reshape(rows, -1), (AGENT, DATA))


def rows_of(members: int, num_devices: int) -> int:
    """Returns the rows of a mesh for a population: each device has whole members,
    or each member a row of devices.

    Raises:
      ConfigError: neither number divides the other; the message names the nearest that work.
    """
    if members % num_devices and num_devices % members:
        works = [
            n for n in range(1, members + num_devices) if not (n % num_devices and num_devices % n)
        ]
        fewer = max(n for n in works if n < members)
        more = min(n for n in works if n > members)
        raise ConfigError(
            f"{members} members do not divide over {num_devices} devices; nearest that work: "
            f"{fewer} or {more} members, or --num-devices {math.gcd(members, num_devices)}"
        )
    return min(members, num_devices)


def of_members(specs: Any) -> Any:
    """Adds a leading axis of members to a tree of partition specs."""
    return jax.tree.map(
        lambda spec: PartitionSpec(AGENT, *spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Converts a tree of partition specs to shardings on a mesh."""
    return jax.tree.map(
        partial(NamedSharding, mesh), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def put(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Puts every array of ``tree`` on the mesh."""
    return arrays.put(tree, NamedSharding(mesh, spec))


def rows(tree: Any, index: np.ndarray) -> Any:
    """Returns rows of arrays, placed as the arrays are."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.jit(_rows, out_shardings=shardings)(tree, index)


def _rows(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def jit_disabled() -> bool:
    """Returns whether this thread runs without compiling."""
    config: Any = jax.config  # the types of jax.config lack this option
    return bool(config.jax_disable_jit)


def learning(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Maps a function of shards that computes gradients or sums over devices.

    ``check_vma`` proves while tracing that replicated outputs are equal on all devices, and makes
    the gradient of a global mean correct. With one device along ``data`` it has nothing to prove
    and is off.
    """
    check_vma = mesh.shape[DATA] > 1
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


def acting(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Maps a function of shards that computes neither gradients nor sums over devices.

    It needs no ``check_vma``, so environments may be written for one device: loops may start from
    constants, and branches may return them.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def over_members(function: Callable[..., Any], most: int | None = None) -> Callable[..., Any]:
    """Maps a function of one member over the leading axis of all arrays that it takes and returns.

    If a device has one member, the function runs as it would for a single run.

    Args:
      most: the maximum number of members that a device computes together, in equal groups one after
        the other; None: all. Groups copy their arrays, so members with more than ``LIGHT``
        elements, such as replay memories, form none.
    """

    def together(*args: Any) -> Any:
        return jax.vmap(function, axis_name=MEMBER)(*args)

    def mapped(*args: Any) -> Any:
        count = len(jax.tree.leaves(args)[0])
        if count == 1:
            return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))
        size = max(n for n in range(1, min(count, most or count) + 1) if count % n == 0)
        if size in (1, count) or sum(x.size for x in jax.tree.leaves(args)) > count * LIGHT:
            return together(*args)
        groups = jax.tree.map(lambda x: x.reshape(count // size, size, *x.shape[1:]), args)
        outputs = jax.lax.map(lambda group: together(*group), groups)
        return jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), outputs)

    return mapped


def over_policies(function: Callable[..., Any], outputs: int = 1) -> Callable[..., Any]:
    """Maps a function of one policy over dicts keyed by policy, in the order of the first one.

    With several ``outputs`` the function returns a tuple, and the mapped one a tuple of dicts.
    """

    def mapped(first: Mapping[str, Any], *others: Mapping[str, Any]) -> Any:
        results = {
            name: function(part, *(other[name] for other in others)) for name, part in first.items()
        }
        if outputs == 1:
            return results
        return tuple({name: result[i] for name, result in results.items()} for i in range(outputs))

    return mapped


def flat(policies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the policies' dicts into one, with names like ``prey/loss/q``, or ``loss/q`` for the
    policy ``""``.
    """
    joined: dict[str, Any] = {}
    for policy, values in policies.items():
        prefix = f"{policy}/" if policy else ""
        joined |= {prefix + name: value for name, value in values.items()}
    return joined


def rollout_specs(policies: Iterable[str]) -> dict[str, Any]:
    """Returns the sharding of the rollouts of these policies."""
    return dict.fromkeys(policies, ROLLOUT)


def any_member(condition: jax.Array) -> jax.Array:
    """Returns whether ``condition``, a bool scalar, holds for any member that shares the device.

    The members share the result, so a ``lax.cond`` on it stays a branch; otherwise ``vmap`` would
    compute both branches.
    """
    if among_members():
        return jax.lax.pmax(condition.astype(jnp.int32), MEMBER) > 0
    return condition


def among_members() -> bool:
    """Returns whether the code being traced runs for several members together."""
    try:
        jax.lax.axis_size(MEMBER)
    except NameError:
        return False
    return True


def whole(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns the function, which takes whole arrays and maps its parts over the mesh itself."""
    del mesh, in_specs, out_specs
    return function


class Program:
    """A function that its first call compiles for a mesh.

    Later calls run the same executable; arguments of other shapes, dtypes or placement are an
    error, so nothing is traced twice. Threads may share a program.
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
        """``mapped`` (``learning``, ``acting`` or ``whole``) maps ``function`` over the mesh.

        Arguments may be numpy arrays, which are placed according to ``in_specs``.
        Arguments in ``donate`` are donated.
        """
        self._map = partial(mapped, function, mesh, in_specs, out_specs)
        self._num_devices = mesh.size
        self._spans = arrays.spans(mesh)
        self._in_shardings = shardings(mesh, in_specs)
        self._jitted = jax.jit(
            self._map(),
            in_shardings=self._in_shardings,
            out_shardings=shardings(mesh, out_specs),
            donate_argnums=donate,
        )
        self._compiled: Any = None
        self._compiling = threading.Lock()
        self.compile_seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        """Raises ``ConfigError`` under ``jax.disable_jit`` if the mesh has several devices."""
        if jit_disabled():  # runs uncompiled: ``print`` shows numbers, and errors name their line
            if self._num_devices > 1:
                raise ConfigError(
                    f"jax.disable_jit works on one device, not on {self._num_devices}; use "
                    "--num-devices 1"
                )
            return self._map()(*args)
        if self._spans:  # JAX itself places values only where all devices belong to this process
            args = arrays.put(args, self._in_shardings)
        if self._compiled is None:
            with self._compiling:
                if self._compiled is None:
                    began = time.perf_counter()
                    self._compiled = self.lower(*args).compile()
                    # other processes may compile for longer than its collectives would wait
                    if self._spans:
                        peers.all_gather(None, "a compiled program")
                    self.compile_seconds = time.perf_counter() - began
        return self._compiled(*args)

    def lower(self, *args: Any) -> Any:
        """Returns a ``jax.stages.Lowered`` for arguments of these shapes and dtypes."""
        if peers.world() is not None and not self._spans:  # then JAX does not divide values itself
            args = arrays.put(args, self._in_shardings)
        return self._jitted.lower(*args)


# --- Inside a sharded program ---------------------------------------------------------------------


def global_sum(tree: Any) -> Any:
    """Sums each array over the devices; the result is equal on all. GPUs exchange one array."""
    if jax.lax.axis_size(DATA) == 1:
        return tree
    add = partial(jax.lax.psum, axis_name=DATA)
    return jax.lax.platform_dependent(tree, cuda=partial(packing.as_one, add), default=add)


def global_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean of ``x`` where ``mask`` holds, over all devices; 0 if the mask is empty.

    Divides global sums, because a mean over devices of local masked means would differ.

    Raises:
      ValueError: ``x`` and ``mask`` differ in shape.
    """
    if jnp.shape(x) != jnp.shape(mask):
        raise ValueError(
            f"mesh.global_mean needs one number for each entry of its mask {jnp.shape(mask)}, not "
            f"{jnp.shape(x)}; join several with jnp.mean(x, axis=-1)"
        )
    total, count = global_sum((jnp.sum(jnp.where(mask, x, 0.0)), jnp.sum(mask, dtype=jnp.float32)))
    return total / jnp.maximum(count, 1.0)


def gathered(x: jax.Array) -> jax.Array:
    """Returns the rows of ``x [N, ...]`` of all devices, in the order of their global indices."""
    if jax.lax.axis_size(DATA) > 1:
        return jax.lax.all_gather(x, DATA, tiled=True)
    return x


def batch_key(keys: jax.Array) -> jax.Array:
    """Returns a key that all devices share, for one draw for a whole batch.

    It derives from the key of the first example of all devices, so it does not depend on their
    number.

    Args:
      keys: of the examples, ``[N]``.
    """
    first = gathered(jax.random.key_data(keys[:1]))[0]
    return jax.random.fold_in(jax.random.wrap_key_data(first), SHARED)


SHARED = 2**32 - 1
"""The number that ``batch_key`` folds in; no example has this index."""


def by_hand(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function that sums over devices run on one device outside a program.

    ``by_hand(algorithm.postprocess)(variables, rollout, context)`` has all environments in one
    shard.
    """
    mesh = make_mesh(jax.local_devices()[:1])
    return jax.shard_map(
        function, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False
    )


def global_index(local_size: int) -> jax.Array:
    """Returns the global indices, int32 ``[local_size]``, of this device's shard of an axis."""
    return jax.lax.axis_index(DATA) * local_size + jnp.arange(local_size, dtype=jnp.int32)


def vary(tree: Any) -> Any:
    """Marks arrays as varying over devices, so that a gradient with respect to them covers one
    device's examples.
    """
    if jax.lax.axis_size(DATA) == 1:
        return tree

    def marked(x: jax.Array) -> jax.Array:
        if DATA in jax.typeof(x).mat.varying:
            return x
        return jax.lax.pcast(x, DATA, to="varying")

    return jax.tree.map(marked, tree)


def vary_as(tree: Any, like: Any) -> Any:
    """Marks arrays as varying over the mesh axes over which some array of ``like`` varies."""
    axes = frozenset[Any]().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(like)))
    return jax.tree.map(
        lambda x: jax.lax.pcast(x, tuple(axes - jax.typeof(x).mat.varying), to="varying"), tree
    )
