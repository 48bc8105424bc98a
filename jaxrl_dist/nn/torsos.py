"""Torsos read observations: preprocessing, flax layers, and the torsos made of them.

Weights start orthogonal (Saxe et al. 2014, arXiv:1312.6120) and biases zero. Layers compute in ``dtype`` and keep
their parameters in float32.
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
from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.nn.convolution import conv2d, max_pool
from jaxrl_dist.nn.matmul import dot_general
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space, channels_first
from jaxrl_dist.types import PyTree

_RELU_GAIN = math.sqrt(2)  # keeps the second moment of activations from layer to layer (He et al. 2015, eq. 10)


# --- Observations -------------------------------------------------------------------------------------


def preprocess(obs: ArrayLike, space: Space, dtype: DTypeLike) -> jax.Array:
    """Turns observations ``[..., *space.shape]`` into the input of a torso, as ``dtype``.

    Discrete: one-hot ``[..., n]``. MultiDiscrete: one-hots side by side, ``[..., sum(nvec)]``. Box: the same shape,
    divided by 255 if the space is uint8; channels of an image (rank 3) move to the last axis.
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


def observation_rank(space: Space) -> int:
    """Returns the rank of one preprocessed observation."""
    return len(space.shape) if isinstance(space, Box) else 1


# --- Layers -------------------------------------------------------------------------------------------


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


def flatten(x: jax.Array, axes: int) -> jax.Array:
    """Merges the last ``axes`` axes into one; with ``axes`` 0, adds one of length 1."""
    batch = x.shape[: x.ndim - axes]
    return x.reshape(*batch, math.prod(x.shape[len(batch) :]))


class LayerNorm(nn.Module):
    """Normalises the last ``axes`` axes of each example to mean 0 and variance 1, then scales and shifts (trained).

    Ba et al. 2016 (arXiv:1607.06450), section 3. An image is normalised as a whole, as in Gallici et al. 2024
    (arXiv:2407.04811), not each pixel over its channels. Mean and variance are float32 for every ``dtype``.
    """

    axes: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        over = tuple(range(-self.axes, 0))
        # Scale and shift have one axis, the last, because flax applies parameters of several axes by rank promotion.
        norm = nn.LayerNorm(dtype=self.dtype, reduction_axes=over, feature_axes=-1)
        return norm(x)


# --- Torsos: preprocessed observations [..., *shape] to features [..., width] ---------------------------


class MLP(nn.Module):
    """Flattens the last ``axes`` axes, then applies dense layers, each followed by ``activation``."""

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

    Unlike theirs, convolutions start with a gain of 1, not sqrt(2), so that residual blocks do not inflate features.
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


_CNNS: dict[str, tuple[int, Callable[..., nn.Module]]] = {  # (shortest side of an image in pixels, torso)
    "minatar": (3, MinAtarCNN),
    "nature": (36, NatureCNN),
    "impala": (1, ImpalaResNet),
}


def choose_torso(torso: Any, observation: Space) -> str:
    """Resolves ``TorsoConfig.torso`` for a space: ``mlp``, ``minatar``, ``nature``, ``impala`` or ``own``.

    Raises:
      ConfigError: if the name is unknown, or names a CNN and observations are not images, or too small for it.
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
    """An MLP of the config's sizes, for inputs of rank ``axes``."""
    return MLP(config.hidden_sizes, getattr(nn, config.activation), axes, config.layer_norm, dtype)


def make_torso(config: TorsoConfig, observation: Space, dtype: DTypeLike) -> Any:
    """The torso for an observation space, a flax module or an object with the same methods.

    It has ``init(key, x) -> params``, ``apply(params, x) -> features`` and ``init_with_output(key, x) -> (features,
    params)`` for preprocessed observations ``x [..., *shape]`` and features ``[..., D]``.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    name = choose_torso(config.torso, observation)
    axes = observation_rank(observation)
    if name == "own":
        return _OwnTorso(config.torso, axes)
    if name == "mlp":
        return make_mlp(config, axes, dtype)
    return _CNNS[name][1](layer_norm=config.layer_norm, dtype=dtype)


class _OwnTorso:
    """Gives the user's pair ``(init, apply)`` the methods of a flax module, for any leading axes.

    The pair reads preprocessed observations: ``init(key, x [1, ...]) -> params`` and ``apply(params, x [N, ...]) ->
    features [N, width]``.
    """

    def __init__(self, pair: Any, axes: int) -> None:
        """``axes`` is the rank of one preprocessed observation.

        Raises:
          ConfigError: if ``pair`` is not such a pair.
        """
        if isinstance(pair, type):
            raise ConfigError(f"torso must be an instance, such as {pair.__name__}(), not the class {pair.__name__}")
        if hasattr(pair, "init") and hasattr(pair, "apply"):  # such as flax modules
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
