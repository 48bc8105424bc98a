"""Layers of flax that torsos, blocks and heads are made of.

Weights start orthogonal (Saxe et al. 2014, arXiv:1312.6120) and biases zero. Layers compute in ``dtype`` and keep
their parameters in float32.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_dist.nn.fast_on_cpu import conv2d, dot_general

_RELU_GAIN = math.sqrt(2)  # keeps the second moment of activations from layer to layer (He et al. 2015, eq. 10)


class Conv(nn.Module):
    """``conv2d`` and a bias: ``[..., H, W, C]`` to ``[..., H', W', features]``.

    ``size`` and ``stride`` are in pixels; ``scale`` is the gain of the orthogonal initial weights.
    """

    features: int
    size: int
    stride: int = 1
    padding: str = "VALID"
    scale: float = _RELU_GAIN
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(self.scale), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        images = x.reshape(-1, *x.shape[-3:]).astype(self.dtype)
        y = conv2d(images, kernel.astype(self.dtype), self.stride, self.padding)
        y = y + jnp.broadcast_to(bias.astype(self.dtype), y.shape)
        return y.reshape(*x.shape[:-3], *y.shape[1:])


def dense(features: int, scale: float = _RELU_GAIN, dtype: DTypeLike = jnp.float32) -> nn.Dense:
    """A dense layer: ``[..., D]`` to ``[..., features]``. ``scale`` is the gain of the orthogonal initial weights."""
    return nn.Dense(features, dtype=dtype, kernel_init=nn.initializers.orthogonal(scale), dot_general=dot_general)


class LayerNorm(nn.Module):
    """Normalises the last ``axes`` axes of each example to mean 0 and variance 1, then scales and shifts (trained).

    Ba et al. 2016 (arXiv:1607.06450), section 3. An image is normalised as a whole, as in CleanRL's pqn_atari_envpool;
    the code of Gallici et al. 2024 (arXiv:2407.04811) normalises each pixel over its channels. Mean and variance are
    float32 for every ``dtype``.
    """

    axes: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        over = tuple(range(-self.axes, 0))
        # Scale and shift have one axis, the last, because flax applies parameters of several axes by rank promotion.
        norm = nn.LayerNorm(dtype=self.dtype, reduction_axes=over, feature_axes=-1)
        return norm(x)
