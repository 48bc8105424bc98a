"""The matrix product of dense layers: value and gradients of autodiff,
with a stored transpose only on CPUs.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_dist.mesh import over_members
from jaxrl_dist.nn.layers import MAX_WIDTH, MIN_ROWS, dot_general


def gradients(width: int, matmul: Any, dtype: Any = jnp.float32, rows: int = MIN_ROWS) -> Any:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, rows // 2, width)) / rows, dtype)
    layer = nn.Dense(3, dtype=dtype, dot_general=matmul)
    kernel = jnp.asarray(rng.normal(size=(width, 3)), jnp.float32) / width

    def loss(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = layer.apply({"params": {"kernel": kernel, "bias": jnp.ones(3)}}, x)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, kernel)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 3e-2)])
@pytest.mark.parametrize("width", [1, 7, MAX_WIDTH, MAX_WIDTH + 1])
def test_value_and_gradients_are_those_of_autodiff(
    width: int, dtype: Any, tolerance: float
) -> None:
    ours, plain = gradients(width, dot_general, dtype), gradients(width, None, dtype)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), tolerance, tolerance
        )


@pytest.mark.parametrize(
    "platform, rows, width, members, stored",
    [
        ("cpu", MIN_ROWS, 7, 1, 1),
        ("cpu", MIN_ROWS - 1, 7, 1, 0),
        ("cpu", MIN_ROWS, MAX_WIDTH + 1, 1, 0),
        ("cpu", MIN_ROWS, 7, 2, 0),
        ("cuda", MIN_ROWS, 7, 1, 0),
        ("tpu", MIN_ROWS, 7, 1, 0),
    ],
)
def test_the_transpose_is_stored_only_on_cpus(
    platform: str, rows: int, width: int, members: int, stored: int
) -> None:
    """And only for a large batch of one member: with several that learn together,
    XLA would store it twice.
    """
    x, kernel = jnp.ones((rows, width)), jnp.ones((members, width, 3))
    gradient = jax.grad(
        lambda kernel: jnp.sum(jnp.sin(dot_general(x, kernel, (((1,), (0,)), ((), ())))))
    )
    text = jax.export.export(jax.jit(over_members(gradient)), platforms=[platform])(
        kernel
    ).mlir_module()
    assert text.count("stablehlo.optimization_barrier") == stored
