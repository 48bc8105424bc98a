"""Prints the best rates of this machine as one line of JSON; a part of ``scripts/benchmark.py``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

MATMULS = (
    (4, 64, 64),
    (128, 64, 64),
    (256, 256, 256),
    (4096, 64, 64),
    (16384, 256, 256),
    (2048, 2048, 2048),
)
"""Rows, inputs and outputs of dense layers, from a small policy to a large minibatch."""


def fastest(function: Callable[[], jax.Array], rounds: int = 30) -> float:
    """Returns the least seconds of ``rounds`` calls, after one that compiles."""
    function().block_until_ready()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        function().block_until_ready()
        taken.append(time.perf_counter() - began)
    return min(taken)


def main() -> None:
    """Measures matrix products, memory and the start of a program."""
    product, double, add = jax.jit(jnp.matmul), jax.jit(lambda x: 2 * x), jax.jit(lambda x: x + 1)
    found: dict[str, tuple[float, str]] = {}
    for rows, inputs, outputs in MATMULS:
        x, w = jnp.ones((rows, inputs), jnp.float32), jnp.ones((inputs, outputs), jnp.float32)
        flops = 2 * rows * inputs * outputs / fastest(lambda x=x, w=w: product(x, w))  # type: ignore[misc]
        found[f"float32 product {rows} x {inputs} x {outputs}"] = flops / 1e9, "GFLOP/s"
    large = jnp.ones(2**26, jnp.float32)
    found["reading and writing memory"] = (
        2 * large.nbytes / fastest(lambda: double(large)) / 1e9,
        "GB/s",
    )
    found["starting a program"] = fastest(lambda: add(jnp.float32(0)), 300) * 1e6, "us"
    print(json.dumps({"ceilings": found}))


if __name__ == "__main__":
    main()
