"""Layers of flax that torsos, blocks and heads are made of.

Weights start orthogonal (Saxe et al. 2014, arXiv:1312.6120) and biases zero. Layers compute in
``dtype`` and keep their parameters in float32. Their products have gradients of their own on the
CPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jaxrl_dist.mesh import among_members, vary_as

MAX_WIDTH = 256
"""Widest input whose transpose is stored: beyond it,
storing takes as long as it saves (docs/speed.md)."""
MIN_ROWS = 512
"""Fewest rows of an input whose transpose is stored:
XLA multiplies the transpose of fewer as fast as any matrix."""
# keeps the second moment of activations from layer to layer (He et al. 2015, eq. 10)
_RELU_GAIN = math.sqrt(2)


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
    """A dense layer: ``[..., D]`` to ``[..., features]``;
    ``scale`` is the gain of the orthogonal initial weights.
    """
    init = nn.initializers.orthogonal(scale)
    return nn.Dense(features, dtype=dtype, kernel_init=init, dot_general=dot_general)


class LayerNorm(nn.Module):
    """Normalises the last ``axes`` axes of each example to mean 0 and variance 1,
    then scales and shifts (trained).

    Ba et al. 2016 (arXiv:1607.06450), section 3. An image is normalised as a whole, as in CleanRL's
    pqn_atari_envpool; the code of Gallici et al. 2024 (arXiv:2407.04811) normalises each pixel over
    its channels. Mean and variance are float32 for every ``dtype``.
    """

    axes: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        over = tuple(range(-self.axes, 0))
        # Scale and shift have one axis, the last,
        # because flax applies parameters of several axes by rank promotion.
        norm = nn.LayerNorm(dtype=self.dtype, reduction_axes=over, feature_axes=-1)
        return norm(x)


# --- Convolution and max-pooling whose gradients are fast inside ``lax.scan`` on the CPU ----------


def conv2d(x: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    """Convolves images ``[N, H, W, C]`` with a kernel ``[k, k, C, F]`` to ``[N, H', W', F]``.

    ``padding`` is VALID or SAME; the result has the dtype of the inputs. On the CPU a hand-written
    gradient replaces XLA's, which runs some 20 times slower inside ``lax.scan``, where training
    runs, than outside. It has no forward-mode derivative.
    """
    # custom_vjp needs gradients that vary as the inputs do
    images = vary_as(x, kernel)
    kernel = vary_as(kernel, x)
    cpu = functools.partial(_conv2d_of_cpu, stride, padding)
    default = functools.partial(_conv2d, stride, padding)
    return jax.lax.platform_dependent(images, kernel, cpu=cpu, default=default)


# The only layout that XLA convolves fast in every program on the CPU.
_convolve = functools.partial(
    jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC")
)


def _conv2d(stride: int, padding: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _convolve(x, kernel, (stride, stride), padding)


PATCH = 100
"""Most numbers that an output pixel sees for which a product with all patches is faster on the CPU
than XLA's convolution (docs/speed.md)."""
IMAGES = 512
"""Images whose patches are stored at a time."""


def _conv2d_or_product(stride: int, padding: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    size, _, channels, features = kernel.shape
    number = x.shape[0]  # no int in a program for any number of images, which an export is
    if size * size * channels > PATCH or not isinstance(number, int):
        return _conv2d(stride, padding, x, kernel)
    pads = jax.lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), padding)
    rests = [n + low + high - size for n, (low, high) in zip(x.shape[1:3], pads, strict=True)]
    spans = [max(0, rest // stride * stride + 1) for rest in rests]

    def product(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), *pads, (0, 0)])
        seen = [
            x[:, i : i + spans[0] : stride, j : j + spans[1] : stride]
            for i in range(size)
            for j in range(size)
        ]
        patches = jnp.concatenate(seen, axis=-1)
        outputs = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, features)
        return outputs.reshape(*patches.shape[:-1], features)

    if number <= IMAGES:
        return product(x)
    outputs = jax.lax.map(product, _parts(x, IMAGES))
    return outputs.reshape(-1, *outputs.shape[2:])[:number]


_conv2d_of_cpu = jax.custom_vjp(_conv2d_or_product, nondiff_argnums=(0, 1))


def _conv2d_forward(
    stride: int, padding: str, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _conv2d_or_product(stride, padding, x, kernel), (x, kernel)


def _conv2d_backward(
    stride: int, padding: str, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Both gradients are convolutions with ``gradient``,
    whose pixels are ``stride`` apart in the image.
    """
    x, kernel = residuals
    size = len(kernel)
    apart = (stride, stride)
    shape = x.shape[1:3]
    before = [low for low, _ in jax.lax.padtype_to_pads(shape, (size, size), apart, padding)]
    spans = [(n - 1) * stride + 1 for n in gradient.shape[1:3]]
    pads_of_x = [
        (size - 1 - low, n - span + low) for n, span, low in zip(shape, spans, before, strict=True)
    ]
    pads_of_kernel = [
        (low, span + size - 1 - n - low) for n, span, low in zip(shape, spans, before, strict=True)
    ]

    def of_x(gradient: jax.Array) -> jax.Array:
        """A pixel of x enters every output whose window holds it:
        convolve with the kernel rotated by 180 degrees.
        """
        rotated = kernel[::-1, ::-1].swapaxes(2, 3)
        return _convolve(gradient, rotated, (1, 1), pads_of_x, lhs_dilation=apart)

    def of_kernel(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        """A kernel entry enters every output of every image: channels become the batch,
        and images are summed.
        """
        x = part[0].transpose(3, 1, 2, 0)
        gradient = part[1].transpose(1, 2, 0, 3)
        return _convolve(x, gradient, (1, 1), pads_of_kernel, rhs_dilation=apart).transpose(
            1, 2, 0, 3
        )

    # Large batches are split, because they take several times longer per image. Each gradient has
    # its own loop, so that XLA can drop an unused one.
    parts = _parts(x)
    gradients = _parts(gradient)
    grad_x = jax.lax.map(of_x, gradients).reshape(-1, *x.shape[1:])[: len(x)]
    return grad_x, jax.lax.map(of_kernel, (parts, gradients)).sum(axis=0)


def _parts(x: jax.Array, limit: int = 64) -> jax.Array:
    """Splits ``[N, ...]`` into ``[parts, n, ...]`` with ``n <= limit``; zeros fill the last one."""
    count = max(1, -(-len(x) // limit))
    size = -(-len(x) // count)
    padded = jnp.pad(x, [(0, count * size - len(x))] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(count, size, *x.shape[1:])


_conv2d_of_cpu.defvjp(_conv2d_forward, _conv2d_backward)


def max_pool(x: jax.Array, size: int, stride: int) -> jax.Array:
    """Max-pools images ``[..., H, W, C]`` with SAME padding.

    It takes the maximum of slices, because the gradient of XLA's pooling is slow on the CPU.
    """
    for axis in (-2, -3):
        (pads,) = jax.lax.padtype_to_pads((x.shape[axis],), (size,), (stride,), "SAME")
        widths = [(0, 0)] * x.ndim
        widths[axis] = pads
        x = jnp.pad(x, widths, constant_values=-math.inf)
        span = (x.shape[axis] - size) // stride * stride + 1
        windows = [jax.lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size)]
        x = functools.reduce(jnp.maximum, windows)
    return x


# --- Matrix multiplication whose gradient is fast on the CPU --------------------------------------


def dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any, precision: Any = None
) -> jax.Array:
    """``multiply``, for ``flax.linen.Dense``."""
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), (
        "flax's Dense contracts the last axis with the first"
    )
    return multiply(x, kernel)


def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies ``x [..., D]`` by ``kernel [D, F]``.

    On the CPU, XLA multiplies a transposed matrix more slowly than others, and the gradient of the
    kernel is such a product: there the transpose is stored first.
    """
    # custom_vjp needs gradients that vary as the inputs do
    rows = vary_as(x, kernel).reshape(-1, x.shape[-1])
    kernel = vary_as(kernel, x)
    number = rows.shape[0]  # no int in a program for any number of rows, which an export is
    pays = isinstance(number, int) and number >= MIN_ROWS and len(kernel) <= MAX_WIDTH
    if pays and not among_members():  # among members, XLA would store it twice
        product = jax.lax.platform_dependent(rows, kernel, cpu=_matmul_of_cpu, default=_matmul)
    else:
        product = _matmul(rows, kernel)
    return product.reshape(*x.shape[:-1], -1)


def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel


_matmul_of_cpu = jax.custom_jvp(_matmul)


def _derivative(
    primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    x, kernel = primals
    of_x, of_kernel = tangents
    parts = []
    if not isinstance(of_x, SymbolicZero):
        parts.append(of_x @ kernel)
    if not isinstance(of_kernel, SymbolicZero):
        # The barrier keeps XLA from merging the transpose into the product of the gradient.
        parts.append(jax.lax.optimization_barrier(x.T).T @ of_kernel)
    product = x @ kernel
    return product, sum(parts) if parts else jnp.zeros_like(product)


_matmul_of_cpu.defjvp(_derivative, symbolic_zeros=True)
