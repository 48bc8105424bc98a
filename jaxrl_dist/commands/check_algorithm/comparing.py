"""Compares arrays, programs and parameters of a trial."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.typing import ArrayLike

from jaxrl_dist.types import PyTree, Variables

TOLERANCE = 2e-3
"""By how much equal numbers may differ, relative to the largest of an array."""


def close(x: ArrayLike, y: ArrayLike) -> bool:
    """Returns whether two arrays are equal but for rounding."""
    if not np.issubdtype(np.asarray(x).dtype, np.floating):
        return np.array_equal(x, y)
    scale = np.max(np.abs(x), initial=0.0)
    return bool(np.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * scale + 1e-5, equal_nan=True))


def equal(x: PyTree, y: PyTree) -> bool:
    """Returns whether two trees are equal but for rounding."""
    return all(map(close, jax.tree.leaves(x), jax.tree.leaves(y)))


def turned(tree: PyTree, size: int) -> PyTree:
    """Returns the rows of all arrays moved by ``size``, the last ones to the front."""
    return jax.tree.map(lambda x: jnp.roll(x, size, axis=0), tree)


def noisy(variables: Variables, scale: float) -> Variables:
    """Returns variables whose parameters have noise of this standard deviation;
    integers are one more.
    """
    leaves, tree = jax.tree.flatten(variables.params)
    keys = jax.random.split(jax.random.key(2), len(leaves))

    def changed(x: jax.Array, key: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x + scale * jax.random.normal(key, x.shape, x.dtype)
        return x + np.ones_like(x)

    return variables._replace(params=jax.tree.unflatten(tree, list(map(changed, leaves, keys))))


def operations(function: Callable[..., PyTree], *args: PyTree) -> set[str]:
    """Returns the names of all operations of a function's program;
    none if a second trace gives another program.
    """

    def trace() -> tuple[ClosedJaxpr, str, list[bytes]]:
        # a function of its own is traced again
        program = jax.make_jaxpr(lambda *args: function(*args))(*args)
        arrays = [x for x in program.consts if isinstance(x, jax.Array | np.ndarray)]
        printed = re.sub(r"0x[0-9a-f]+|id=\d+", "", str(program))
        return program, printed, [np.asarray(x).tobytes() for x in arrays]

    program, *first = trace()
    _, *second = trace()
    return named(program) if first == second else set()


def named(program: ClosedJaxpr | Jaxpr) -> set[str]:
    """Returns the names of a program's operations, and of those that they call."""
    names = set[str]()
    for equation in program.eqns:
        names.add(equation.primitive.name)
        for parameter in jax.tree.leaves(equation.params):
            if isinstance(parameter, ClosedJaxpr | Jaxpr):
                names |= named(parameter)
    return names
