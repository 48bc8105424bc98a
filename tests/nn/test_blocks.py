"""Blocks that read a sequence at once, against loops over its steps."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_dist.nn import blocks
from jaxrl_dist.nn.cores import gru, reset_core

SIZE, BATCH = 6, 4


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def loop_of_cells(
    params: Any, features: jax.Array, core: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    outputs = []
    for x, there in zip(features, valid, strict=True):
        core, output = nn.GRUCell(SIZE).apply(params["gru"], core, x)
        core = reset_core(core, jnp.zeros_like(core), there)
        outputs.append(output)
    return jnp.stack(outputs), core


def test_the_gru_and_its_derivatives_equal_a_loop_of_cells() -> None:
    steps = 5
    core = gru(SIZE, jnp.float32)
    params, _ = core.init(jax.random.key(0), jnp.zeros((1, 3)))
    params = jax.tree.map(lambda x: x + 0.3 * normal(x.size, *x.shape), params)
    args = params, normal(1, steps, BATCH, 3), normal(2, BATCH, SIZE)
    tangents = jax.tree.map(lambda x: normal(3, *x.shape), args)
    valid = jax.random.bernoulli(jax.random.key(4), 0.7, (steps, BATCH))
    weights = normal(5, steps, BATCH, SIZE), normal(6, BATCH, SIZE)

    def results(unroll: Any) -> Any:
        def loss(*args: Any) -> jax.Array:
            made = unroll(*args, valid)
            return sum((jnp.vdot(x, y) for x, y in zip(made, weights, strict=True)), jnp.float32(0))

        both = jax.jvp(lambda *args: unroll(*args, valid), args, tangents)
        return both, jax.grad(loss, (0, 1, 2))(*args), jax.jvp(jax.grad(loss), args, tangents)

    for one, other in zip(
        *(jax.tree.leaves(jax.jit(lambda u=u: results(u))()) for u in (core.unroll, loop_of_cells)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("steps, window", [(1, 5), (3, 5), (5, 5), (7, 5), (10, 5), (4, 1)])
def test_attention_is_a_loop_over_what_each_step_sees(steps: int, window: int) -> None:
    heads, depth = 2, 3
    lengths = steps, window + steps, window + steps
    query, key, value = (normal(i, length, BATCH, heads, depth) for i, length in enumerate(lengths))
    position = normal(3, window + 1, heads, depth)
    episode = np.cumsum(
        np.asarray(jax.random.bernoulli(jax.random.key(4), 0.3, (window + steps, BATCH))), axis=0
    )
    made = jax.jit(blocks._attended)(query, key, value, position, episode)
    q, k, v, p = (np.asarray(x, np.float64) for x in (query, key, value, position))
    for t in range(steps):
        for b in range(BATCH):
            seen = [w for w in range(window + 1) if episode[t + w, b] == episode[t + window, b]]
            for h in range(heads):
                scores = np.array(
                    [q[t, b, h] @ (k[t + w, b, h] + p[w, h]) for w in seen]
                ) / np.sqrt(depth)
                weights = np.exp(scores) / np.exp(scores).sum()
                expected = weights @ np.array([v[t + w, b, h] for w in seen])
                np.testing.assert_allclose(made[t, b, h], expected, atol=2e-6)


@pytest.mark.parametrize("steps", [1, 9])
def test_a_linear_recurrence_is_equal_in_steps_and_in_parallel(steps: int) -> None:
    factor, driven = (
        jax.lax.complex(normal(i, steps, BATCH, 3), normal(i + 1, steps, BATCH, 3)) for i in (0, 2)
    )
    x, expected = np.zeros((BATCH, 3), np.complex128), []
    for a, b in zip(np.asarray(factor), np.asarray(driven), strict=True):
        x = a * x + b
        expected.append(x)
    for recurrence in (blocks._step_by_step, blocks._in_parallel):
        np.testing.assert_allclose(
            recurrence(factor, driven), np.array(expected), rtol=2e-5, atol=2e-5
        )
