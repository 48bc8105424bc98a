"""Matrix multiplication whose gradient is fast on the CPU."""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_dist.mesh import among_members, vary_as

MAX_WIDTH = 256
"""Widest input whose transpose is stored: beyond it, storing takes as long as it saves (docs/speed.md)."""
MIN_ROWS = 512
"""Fewest rows of an input whose transpose is stored: XLA multiplies the transpose of fewer as fast as any matrix."""


def dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers: Any, precision: Any = None) -> jax.Array:
    """Multiplies ``x [..., D]`` by ``kernel [D, F]``, for ``flax.linen.Dense``.

    On the CPU, XLA multiplies a transposed matrix more slowly than others, and the gradient of the kernel is such a
    product: there the transpose is stored first. It then has no forward-mode derivative.
    """
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), "flax's Dense contracts the last axis with the first"
    x, kernel = vary_as(x, kernel), vary_as(kernel, x)  # custom_vjp needs gradients that vary as the inputs do
    rows = x.reshape(-1, x.shape[-1])
    number = rows.shape[0]  # no int in a program for any number of rows, which an export is
    pays = isinstance(number, int) and number >= MIN_ROWS and len(kernel) <= MAX_WIDTH
    if pays and not among_members():  # among members, XLA would store it twice
        product = jax.lax.platform_dependent(rows, kernel, cpu=_matmul_of_cpu, default=_matmul)
    else:
        product = _matmul(rows, kernel)
    return product.reshape(*x.shape[:-1], -1)


def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel


_matmul_of_cpu = jax.custom_vjp(_matmul)


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ kernel, (x, kernel)


def _backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    # The barrier keeps XLA from merging the transpose into the product.
    return gradient @ kernel.T, jax.lax.optimization_barrier(x.T) @ gradient


_matmul_of_cpu.defvjp(_forward, _backward)
