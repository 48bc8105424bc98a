"""Fewer kernels: loops whose state is one long array or that take one kernel, and sums,
norms and lookups that do.

A GPU starts a kernel for each array that a pass of a loop makes, and starting one takes longer than
computing a small one. XLA computes all parts of a concatenation by one kernel. The host also reads
one array faster than many.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_dist.types import PyTree

LARGEST = 2**20
"""Arrays of more bytes are not packed: their kernels run for longer than they take to start."""
LARGEST_KERNEL = 128
"""Steps of a recursion that one kernel computes: XLA takes long to compile kernels of many more."""


def starts_kernel_per_array(device: jax.Device) -> bool:
    """Returns whether a device starts a kernel for each array: GPUs do."""
    return bool(device.platform == "gpu")


class Packing(NamedTuple):
    """How the leaves of a tree lie in fewer arrays: those that are small and have 32 bits,
    or are bools, in one.
    """

    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    groups: tuple[tuple[int, ...], ...]
    """Indices of the leaves in each array; a single leaf stays as it is."""

    @staticmethod
    def of(tree: PyTree) -> Packing:
        leaves, treedef = jax.tree.flatten(tree)
        groups: dict[Any, list[int]] = {}
        for number, leaf in enumerate(leaves):
            small = (
                leaf.dtype in (np.bool_, np.int32, np.uint32, np.float32)
                and 4 * leaf.size <= LARGEST
            )
            # Arrays that are equal on all devices must not be mixed with others.
            groups.setdefault(jax.typeof(leaf).mat.varying if small else number, []).append(number)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return Packing(treedef, shapes, tuple(map(tuple, groups.values())))

    def pack(self, tree: PyTree) -> list[jax.Array]:
        leaves = self.treedef.flatten_up_to(tree)
        arrays = []
        for group in self.groups:
            if len(group) == 1:
                arrays.append(leaves[group[0]])
            else:
                arrays.append(jnp.concatenate([_bits(leaves[number]) for number in group]))
        return arrays

    def unpack(self, arrays: Sequence[jax.Array | np.ndarray], leading: int = 0) -> PyTree:
        """Returns the tree of arrays, which have ``leading`` more axes in front;
        numpy arrays of numpy arrays.
        """
        leaves: list[Any] = [None] * len(self.leaves)
        for group, array in zip(self.groups, arrays, strict=True):
            if len(group) == 1:
                leaves[group[0]] = array
                continue
            ends = list(itertools.accumulate(self.leaves[number].size for number in group))
            if isinstance(array, np.ndarray):
                parts: Any = [
                    array[..., start:end] for start, end in zip([0, *ends], ends, strict=False)
                ]
            else:
                parts = jnp.split(array, ends[:-1], axis=leading)
            for number, part in zip(group, parts, strict=True):
                leaves[number] = _of_bits(part, self.leaves[number], array.shape[:leading])
        return self.treedef.unflatten(leaves)


def _bits(x: jax.Array) -> jax.Array:
    """Returns the 32 bits of each element, uint32 ``[size]``; a bool is 0 or 1."""
    x = x.reshape(-1)
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _of_bits(bits: Any, like: jax.ShapeDtypeStruct, leading: tuple[int, ...]) -> Any:
    x = bits != 0 if like.dtype == bool else bits.view(like.dtype)
    return x.reshape(*leading, *like.shape)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: PyTree, xs: PyTree, *, packed: bool
) -> tuple[PyTree, PyTree]:
    """Does what ``jax.lax.scan`` does; if ``packed``, with small arrays of 32 bits packed into one.

    The numbers are equal, except for the rounding of sums that XLA forms in another order.
    """
    if not packed:
        return jax.lax.scan(body, carry, xs)
    state = Packing.of(carry)
    outputs = None

    def packed_body(arrays: list[jax.Array], x: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        nonlocal outputs
        carry, y = body(state.unpack(arrays), x)
        outputs = Packing.of(y)
        return state.pack(carry), outputs.pack(y)

    arrays, ys = jax.lax.scan(packed_body, state.pack(carry), xs)
    assert outputs is not None, "scan has traced the body"
    return state.unpack(arrays), outputs.unpack(ys, leading=1)


def recursion(
    step: Callable[[Any, Any], tuple[Any, Any]], carry: PyTree, xs: PyTree, *, reverse: bool = False
) -> tuple[PyTree, PyTree]:
    """Does what ``jax.lax.scan`` does, for steps that treat all elements alike:
    a GPU computes many at once.
    """
    scan = partial(jax.lax.scan, step, reverse=reverse)
    unroll = min(len(jax.tree.leaves(xs)[0]), LARGEST_KERNEL)
    return jax.lax.platform_dependent(carry, xs, cuda=partial(scan, unroll=unroll), default=scan)


def as_one(function: Callable[[jax.Array], jax.Array], tree: PyTree, leading: int = 0) -> PyTree:
    """Applies a function that treats all elements alike to all leaves of a dtype at once,
    as one vector.

    The leaves' first ``leading`` axes are the first of the function's argument,
    and missing in its result.
    """
    leaves, treedef = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, jax.typeof(leaf).mat.varying), []).append(number)
    for group in groups.values():
        parts = [leaves[number].reshape(*leaves[number].shape[:leading], -1) for number in group]
        vector = function(jnp.concatenate(parts, axis=-1))
        ends = np.cumsum([part.shape[-1] for part in parts])
        for number, part in zip(group, jnp.split(vector, ends[:-1]), strict=True):
            leaves[number] = part.reshape(leaves[number].shape[leading:])
    return jax.tree.unflatten(treedef, leaves)


def sums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sum of each array, on a GPU by one kernel for all; they have one shape and
    dtype.
    """

    def together(*arrays: jax.Array) -> list[jax.Array]:
        return list(jnp.sum(jnp.stack([x.reshape(-1) for x in arrays]), axis=1))

    return jax.lax.platform_dependent(
        *arrays, cuda=together, default=lambda *arrays: [jnp.sum(x) for x in arrays]
    )


def take_along_last(values: jax.Array, index: jax.Array) -> jax.Array:
    """Returns ``values[..., index]``, the element of each row ``[A]`` that ``index [...]`` names,
    as ``take_rows`` does.
    """
    return take_rows(values[..., None], index)[..., 0]


def take_rows(values: jax.Array, index: jax.Array) -> jax.Array:
    """Returns ``values[..., index, :]``, the row of each matrix ``[A, K]`` that ``index [...]``
    names.

    On a GPU it is a sum with zeros, whose gradient needs no scatter.
    """

    def add(values: jax.Array, index: jax.Array) -> jax.Array:
        numbers = jax.lax.broadcasted_iota(index.dtype, values.shape, values.ndim - 2)
        chosen = numbers == index[..., None, None]
        return jnp.sum(jnp.where(chosen, values, 0), axis=-2, dtype=values.dtype)

    def take(values: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, index[..., None, None], axis=-2)[..., 0, :]

    return jax.lax.platform_dependent(values, index, cuda=add, default=take)


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the Euclidean norm of all numbers of a tree of floats, on a GPU by one sum."""

    def together(tree: PyTree) -> jax.Array:
        return jnp.sqrt(
            jnp.sum(jnp.square(jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(tree)])))
        )

    return jax.lax.platform_dependent(tree, cuda=together, default=optax.tree.norm)


def clip_by_global_norm(most: float | jax.Array) -> optax.GradientTransformation:
    """Scales gradients down to a ``global_norm`` of ``most``,
    as ``optax.clip_by_global_norm`` does.

    Source: Pascanu et al. (2012), https://arxiv.org/abs/1211.5063, algorithm 1.
    """

    def update(
        grads: PyTree, state: optax.EmptyState, params: PyTree = None
    ) -> tuple[PyTree, optax.EmptyState]:
        del params
        norm = global_norm(grads)
        return jax.tree.map(lambda x: jnp.where(norm < most, x, x / norm * most), grads), state

    return optax.GradientTransformation(optax.init_empty_state, update)
