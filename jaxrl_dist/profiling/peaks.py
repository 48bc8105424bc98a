"""What a device reaches at best, measured."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import jax
import jax.numpy as jnp


def matmul_ceiling() -> float:
    """Returns the floating-point operations per second of a
    float32 product of square matrices on the first device.
    """
    x = jnp.ones((2048, 2048), jnp.float32)
    return 2 * len(x) ** 3 / _fastest(lambda x: x @ x, x)


def memory_ceiling() -> float:
    """Returns the bytes per second that doubling a large
    float32 array reads and writes on the first device.
    """
    x = jnp.ones(2**26, jnp.float32)
    return 2 * x.nbytes / _fastest(lambda x: 2 * x, x)


def _fastest(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Returns the least seconds of some calls of a compiled function."""
    program = jax.jit(function)
    program(x).block_until_ready()
    return min(timeit.repeat(lambda: program(x).block_until_ready(), number=1, repeat=7))
