"""What reads observations: their preprocessing, layers, and the torsos that are made of them, in flax.

Weights start orthogonal (Saxe et al. 2014) and biases zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import vary_as
from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space, channels_first
from jaxrl_dist.types import PyTree

_RELU_GAIN = math.sqrt(2)  # keeps the second moment of activations from layer to layer (He et al. 2015, eq. 10)


# --- Observations -------------------------------------------------------------------------------------


def preprocess(obs: ArrayLike, space: Space, dtype: DTypeLike) -> jax.Array:
    """What a torso reads, as ``dtype``, of observations ``[..., *space.shape]``.

    Discrete: ``[..., n]`` one-hot. MultiDiscrete: ``[..., sum(nvec)]``, the one-hots side by side. Box: the same
    shape, divided by 255 if the space is uint8, and with the channels of an image (rank 3) moved last.
    """
    if isinstance(space, Discrete):
        return jax.nn.one_hot(jnp.asarray(obs, jnp.int32), space.n, dtype=dtype)
    if isinstance(space, MultiDiscrete):
        digits = jnp.asarray(obs, jnp.int32)
        return jnp.concatenate([jax.nn.one_hot(digits[..., i], n, dtype=dtype) for i, n in enumerate(space.nvec)], -1)
    x = jnp.asarray(obs, dtype)
    if space.dtype == np.uint8:
        x = x / 255
    return jnp.moveaxis(x, -3, -1) if channels_first(space.shape) else x


# --- Layers -------------------------------------------------------------------------------------------


def conv2d(x: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    """Convolves images ``[N, H, W, C]`` with a square kernel ``[k, k, C, F]``, padding VALID or SAME.

    On the CPU the gradient is written out, and has no forward-mode derivative: that which XLA derives is some 20 times
    slower inside ``lax.scan``, where training runs, than outside.
    """
    x, kernel = vary_as(x, kernel), vary_as(kernel, x)  # as those that write gradients out must
    cpu = functools.partial(_conv2d_of_cpu, stride, padding)
    return jax.lax.platform_dependent(x, kernel, cpu=cpu, default=functools.partial(_conv2d, stride, padding))


# The only layout for which XLA has a fast loop in every program on the CPU.
_convolve = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _conv2d(stride: int, padding: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _convolve(x, kernel, (stride, stride), padding)


_conv2d_of_cpu = jax.custom_vjp(_conv2d, nondiff_argnums=(0, 1))


def _conv2d_forward(
    stride: int, padding: str, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _conv2d(stride, padding, x, kernel), (x, kernel)


def _conv2d_backward(
    stride: int, padding: str, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Both as convolutions with ``gradient``, whose pixels lie ``stride`` apart in the image."""
    x, kernel = residuals
    size, apart, shape = len(kernel), (stride, stride), x.shape[1:3]
    before = [low for low, _ in jax.lax.padtype_to_pads(shape, (size, size), apart, padding)]
    spans = [(n - 1) * stride + 1 for n in gradient.shape[1:3]]
    pads_of_x = [(size - 1 - low, n - span + low) for n, span, low in zip(shape, spans, before, strict=True)]
    pads_of_kernel = [(low, span + size - 1 - n - low) for n, span, low in zip(shape, spans, before, strict=True)]

    def of_x(gradient: jax.Array) -> jax.Array:
        """A pixel of x takes part in the outputs whose windows hold it: the same convolution, the kernel turned."""
        turned = kernel[::-1, ::-1].swapaxes(2, 3)
        return _convolve(gradient, turned, (1, 1), pads_of_x, lhs_dilation=apart)

    def of_kernel(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        """An entry meets x in all outputs of all images: channels are the batch, and images are summed over."""
        x, gradient = part[0].transpose(3, 1, 2, 0), part[1].transpose(1, 2, 0, 3)
        return _convolve(x, gradient, (1, 1), pads_of_kernel, rhs_dilation=apart).transpose(1, 2, 0, 3)

    # In parts, as large batches take several times longer an image. A loop of its own for each, so that XLA drops the
    # one whose result is not needed.
    parts, gradients = _parts(x), _parts(gradient)
    grad_x = jax.lax.map(of_x, gradients).reshape(-1, *x.shape[1:])[: len(x)]
    return grad_x, jax.lax.map(of_kernel, (parts, gradients)).sum(axis=0)


def _parts(x: jax.Array, most: int = 64) -> jax.Array:
    """``[N, ...]`` as ``[parts, n, ...]`` with ``n`` at most ``most``; zeros fill the last part."""
    count = max(1, -(-len(x) // most))
    each = -(-len(x) // count)
    padded = jnp.pad(x, [(0, count * each - len(x))] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(count, each, *x.shape[1:])


_conv2d_of_cpu.defvjp(_conv2d_forward, _conv2d_backward)


def max_pool(x: jax.Array, size: int, stride: int) -> jax.Array:
    """SAME max-pooling of images ``[..., H, W, C]``; of slices, as the gradient of XLA's is slow on the CPU."""
    for axis in (-2, -3):
        (pads,) = jax.lax.padtype_to_pads((x.shape[axis],), (size,), (stride,), "SAME")
        x = jnp.pad(x, [pads if i == axis else (0, 0) for i in range(-x.ndim, 0)], constant_values=-math.inf)
        span = (x.shape[axis] - size) // stride * stride + 1
        windows = [jax.lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size)]
        x = functools.reduce(jnp.maximum, windows)
    return x


class Conv(nn.Module):
    """``conv2d`` plus a bias: ``[..., H, W, C]`` to ``[..., H', W', features]``."""

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
    """A dense layer whose bias starts at zero."""
    return nn.Dense(features, dtype=dtype, kernel_init=nn.initializers.orthogonal(scale))


def flatten(x: jax.Array, axes: int) -> jax.Array:
    """Merges the last ``axes`` axes into one; no axes become one of length 1."""
    batch = x.shape[: x.ndim - axes]
    return x.reshape(*batch, math.prod(x.shape[len(batch) :]))


class LayerNorm(nn.Module):
    """Mean 0 and variance 1 over the last ``axes`` axes of each example, then a trained scale and shift.

    Ba et al. 2016 (arXiv:1607.06450), section 3; over a whole image, and not each pixel's channels alone, as in
    Gallici et al. 2024. The statistics are float32 whatever the arithmetic.
    """

    axes: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        over = tuple(range(-self.axes, 0))
        # Arrays of a scale's own shape would be promoted in rank, so flax sees them as one axis.
        norm = nn.LayerNorm(dtype=self.dtype, reduction_axes=over, feature_axes=-1)
        return norm(x)


# --- Torsos: preprocessed observations [..., *shape] to features [..., width] ---------------------------


class MLP(nn.Module):
    """Dense layers on the last ``axes`` axes, flattened; each is followed by ``activation``."""

    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: Callable[[jax.Array], jax.Array] = nn.tanh
    axes: int = 1
    layer_norm: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = flatten(x, self.axes)
        for width in self.hidden_sizes:
            x = dense(width, dtype=self.dtype)(x)
            x = self.activation(LayerNorm(1, self.dtype)(x) if self.layer_norm else x)
        return x


class PlainCNN(nn.Module):
    """Convolutions ``(features, size, stride)`` and a dense layer, each followed by relu."""

    convs: tuple[tuple[int, int, int], ...]
    width: int
    layer_norm: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, size, stride in self.convs:
            x = Conv(features, size, stride, dtype=self.dtype)(x)
            x = nn.relu(LayerNorm(3, self.dtype)(x) if self.layer_norm else x)
        x = dense(self.width, dtype=self.dtype)(flatten(x, 3))
        return nn.relu(LayerNorm(1, self.dtype)(x) if self.layer_norm else x)


MinAtarCNN = functools.partial(PlainCNN, ((16, 3, 1),), 128)
"""Young & Tian 2019 (arXiv:1903.03176), section 3."""

NatureCNN = functools.partial(PlainCNN, ((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512)
"""Mnih et al. 2015 (Nature 518), Methods."""


class ImpalaResNet(nn.Module):
    """Espeholt et al. 2018 (arXiv:1802.01561), figure 3 right, without the LSTM: 15 convolutions, relu.

    Their gain of 1 instead of sqrt(2) is ours: with it the residual blocks do not inflate the features.
    """

    layer_norm: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (16, 32, 32):
            conv = functools.partial(Conv, features, 3, padding="SAME", scale=1.0, dtype=self.dtype)
            x = max_pool(conv()(x), 3, 2)
            for _ in range(2):
                y = conv()(nn.relu(x))
                x = x + conv()(nn.relu(y))
            x = LayerNorm(3, self.dtype)(x) if self.layer_norm else x
        x = dense(256, dtype=self.dtype)(flatten(nn.relu(x), 3))
        return nn.relu(LayerNorm(1, self.dtype)(x) if self.layer_norm else x)


_CNNS: dict[str, tuple[int, Callable[..., nn.Module]]] = {  # with the shortest side, in pixels, that each can read
    "minatar": (3, MinAtarCNN),
    "nature": (36, NatureCNN),
    "impala": (1, ImpalaResNet),
}


def choose_torso(torso: Any, observation: Space) -> str:
    """``mlp``, ``minatar``, ``nature``, ``impala`` or ``own``: what ``NetworkConfig.torso`` means for a space.

    Raises:
      ConfigError: if there is none of that name, or a CNN is asked for and observations are no images, or images that
        are too small for it.
    """
    if not isinstance(torso, str):
        return "own"
    if torso not in ("auto", "mlp", *_CNNS):
        raise ConfigError(f"unknown --torso {torso!r}; these work: {', '.join(['auto', 'mlp', *_CNNS])}")
    shape = observation.shape
    side = 0
    if isinstance(observation, Box) and len(shape) == 3:
        side = min(shape[1:] if channels_first(shape) else shape[:2])
    fits = [cnn for cnn, (shortest, _) in _CNNS.items() if side >= shortest]
    if torso == "auto":
        return next((cnn for cnn in ("nature", "minatar") if cnn in fits), "mlp")
    if torso not in ("mlp", *fits):
        raise ConfigError(
            f"--torso {torso} reads images of {_CNNS[torso][0]} or more pixels a side, but observations have shape "
            f"{shape}; --torso {' or '.join(['auto', 'mlp', *fits])} can read them"
        )
    return torso


def make_mlp(config: TorsoConfig, axes: int, dtype: DTypeLike) -> MLP:
    """An MLP of a config's sizes, for inputs of rank ``axes``."""
    return MLP(config.hidden_sizes, getattr(nn, config.activation), axes, config.layer_norm, dtype)


def make_torso(config: TorsoConfig, observation: Space, dtype: DTypeLike) -> Any:
    """The torso that a config means for an observation space."""
    name = choose_torso(config.torso, observation)
    axes = len(observation.shape) if isinstance(observation, Box) else 1
    if name == "own":
        return _OwnTorso(config.torso, axes)
    if name == "mlp":
        return make_mlp(config, axes, dtype)
    return _CNNS[name][1](layer_norm=config.layer_norm, dtype=dtype)


class _OwnTorso:
    """A torso that is the user's pair ``(init, apply)``, with what a flax module offers, for any leading axes.

    The pair sees preprocessed observations, ``init(key, x [1, ...]) -> params`` and ``apply(params, x [N, ...]) ->
    features [N, width]``.
    """

    def __init__(self, pair: Any, axes: int) -> None:
        """``axes`` is the rank of one preprocessed observation.

        Raises:
          ConfigError: it is no pair.
        """
        if isinstance(pair, type):
            raise ConfigError(f"torso must be an instance, such as {pair.__name__}(), not the class {pair.__name__}")
        if hasattr(pair, "init") and hasattr(pair, "apply"):  # as flax modules and the like have them
            pair = pair.init, pair.apply
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(callable, pair))):
            raise ConfigError(f"torso must be a name, or a pair of functions (init, apply), not {pair!r}")
        self.init, self._apply = pair
        self._axes = axes

    def apply(self, params: PyTree, x: jax.Array) -> jax.Array:
        batch = x.shape[: x.ndim - self._axes]
        x = x.reshape(math.prod(batch), *x.shape[len(batch) :])
        features = self._apply(params, x)
        if jnp.ndim(features) != 2 or len(features) != len(x):
            raise ConfigError(
                f"the torso's apply has made {jnp.shape(features)} of observations {x.shape}; ({len(x)}, width) works"
            )
        return features.reshape(*batch, features.shape[-1])

    def init_with_output(self, key: jax.Array, x: jax.Array) -> tuple[jax.Array, PyTree]:
        params = self.init(key, x)
        return self.apply(params, x), params
