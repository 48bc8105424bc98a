"""Noise on a network's parameters, drawn again from its key wherever it is needed."""

from __future__ import annotations

import math

import jax

from jaxrl_dist.types import PyTree

MAX_BYTES = 2**28
"""Bytes that perturbed copies of the parameters may take up on a device,
unless a single one takes more."""


def noise(params: PyTree, key: jax.Array) -> PyTree:
    """Draws standard normal noise for all parameters, with their shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(params)
    keys = (jax.random.fold_in(key, index) for index in range(len(leaves)))
    drawn = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


def perturbed(params: PyTree, key: jax.Array, scale: jax.Array | float) -> PyTree:
    """Returns ``params + scale * noise(params, key)``."""
    return jax.tree.map(lambda x, eps: x + scale * eps, params, noise(params, key))


def num_parts(params: PyTree, copies: int) -> int:
    """Returns the smallest number of equal parts of ``copies`` that fit into ``MAX_BYTES``."""
    most = copies_at_once(params)
    return next(parts for parts in range(-(-copies // most), copies + 1) if copies % parts == 0)


def copies_at_once(params: PyTree) -> int:
    """Returns how many copies of the parameters fit into ``MAX_BYTES``, at least 1."""
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))
    return max(1, MAX_BYTES // max(size, 1))
