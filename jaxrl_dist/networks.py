"""Policy and value networks as records of pure functions; the only file that imports flax.

A network is a *torso* that reads observations, perhaps a recurrent *core*, and linear *heads*. Weights start
orthogonal (Saxe et al. 2014) and biases zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxrl_dist.config import ConfigError, NetworkConfig, TorsoConfig
from jaxrl_dist.types import Box, Discrete, MultiDiscrete, PyTree, Space, channels_first

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
    x, kernel = _equally_varying(x, kernel)  # as those that write gradients out must
    cpu = functools.partial(_conv2d_of_cpu, stride, padding)
    return jax.lax.platform_dependent(x, kernel, cpu=cpu, default=functools.partial(_conv2d, stride, padding))


def _equally_varying(*arrays: jax.Array) -> list[jax.Array]:
    """Marks each as different on devices, within ``jax.shard_map``, where another is."""
    varying = [jax.typeof(x).mat.varying for x in arrays]
    missing = [tuple(frozenset().union(*varying) - own) for own in varying]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


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


def _dense(features: int, scale: float = _RELU_GAIN, dtype: DTypeLike = jnp.float32) -> nn.Dense:
    return nn.Dense(features, dtype=dtype, kernel_init=nn.initializers.orthogonal(scale))


def _flatten(x: jax.Array, axes: int) -> jax.Array:
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
        x = _flatten(x, self.axes)
        for width in self.hidden_sizes:
            x = _dense(width, dtype=self.dtype)(x)
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
        x = _dense(self.width, dtype=self.dtype)(_flatten(x, 3))
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
        x = _dense(256, dtype=self.dtype)(_flatten(nn.relu(x), 3))
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


def _make_mlp(config: TorsoConfig, axes: int, dtype: DTypeLike) -> MLP:
    return MLP(config.hidden_sizes, getattr(nn, config.activation), axes, config.layer_norm, dtype)


def _make_torso(config: TorsoConfig, observation: Space, dtype: DTypeLike) -> Any:
    """The torso that a config means for an observation space."""
    name = choose_torso(config.torso, observation)
    axes = len(observation.shape) if isinstance(observation, Box) else 1
    if name == "own":
        return _OwnTorso(config.torso, axes)
    if name == "mlp":
        return _make_mlp(config, axes, dtype)
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


# --- Recurrent core -----------------------------------------------------------------------------------


def reset_core(core: PyTree, initial: PyTree, valid: jax.Array) -> PyTree:
    """``core`` ``[B, ...]`` where ``valid`` ``[B]``, elsewhere ``initial``.

    Environments reset on the step after an episode's end, which has ``valid`` False and reads the old episode's last
    observation: the core that comes out of that step has to be forgotten.
    """
    return jax.tree.map(
        lambda x, start: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, x.ndim))), x, start), core, initial
    )


def _vary_as(tree: PyTree, like: jax.Array) -> PyTree:
    """Marks arrays as different on the devices of ``jax.shard_map``, over the mesh axes for which ``like`` is."""
    axes = jax.typeof(like).mat.varying
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes - jax.typeof(x).mat.varying), to="varying"), tree)


def _unroll_gru(
    gru: nn.GRUCell, params: PyTree, features: jax.Array, core: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs a GRU over ``features [T, B, D]`` from ``core [B, H]``, with ``reset_core`` after each step.

    Returns:
      Its outputs ``[T, B, H]`` and the core ``[B, H]`` after step ``T - 1``.
    """
    # Marked before the scan, its gradients are summed over the devices once, not at every step.
    cell, core = _vary_as((params, core), features)

    def advance(core: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, _ = gru.apply(cell, core, step[0])
        return reset_core(out, jnp.zeros_like(out), step[1]), out

    core, out = jax.lax.scan(advance, core, (features, valid))
    return out, core


# --- Value of actions ---------------------------------------------------------------------------------


class NoisyDense(nn.Module):
    """A dense layer whose weights carry learned, factorised Gaussian noise: ``[N, D]`` to ``[N, features]``.

    Fortunato et al. 2018 (arXiv:1706.10295), section 3: ``W = mu + sigma * (f(eps_out) f(eps_in)^T)`` with
    ``f(x) = sign(x) sqrt(|x|)``. Each example has noise of its own; because the noise is a product, that costs one
    more matmul and not a matrix an example.
    """

    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """``keys`` ``[N]`` draw the noise; None: none."""
        fan_in = x.shape[-1]
        bound = 1 / math.sqrt(fan_in)

        def uniform(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        sigma_init = nn.initializers.constant(0.5 * bound)
        kernel = self.param("kernel", uniform, (fan_in, self.features), jnp.float32)
        bias = self.param("bias", uniform, (self.features,), jnp.float32)
        kernel_sigma = self.param("kernel_sigma", sigma_init, (fan_in, self.features), jnp.float32)
        bias_sigma = self.param("bias_sigma", sigma_init, (self.features,), jnp.float32)
        y = x @ kernel.astype(self.dtype) + jnp.broadcast_to(bias, (*x.shape[:-1], self.features)).astype(self.dtype)
        if keys is None:
            return y
        noise = jax.vmap(lambda key: jax.random.normal(key, (fan_in + self.features,)))(keys)
        noise = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
        into, out = noise[:, :fan_in].astype(self.dtype), noise[:, fan_in:].astype(self.dtype)
        return y + out * ((x * into) @ kernel_sigma.astype(self.dtype) + bias_sigma.astype(self.dtype).reshape(1, -1))


class _QHeads(NamedTuple):
    """What turns features into the values of actions; ``keys`` draw the noise of noisy heads."""

    init: Callable[[Sequence[jax.Array], jax.Array], PyTree]
    """``(keys, features) -> params``, of one key for each head: two if dueling, else one."""
    apply: Callable[[PyTree, jax.Array, jax.Array | None], jax.Array]
    """``(params, features [..., D], keys [N] or None) -> [..., num_actions, num_atoms] float32``; with noise [N, D]."""


def _q_heads(num_actions: int, *, num_atoms: int, dueling: bool, noisy: bool) -> _QHeads:
    sizes = [num_actions * num_atoms, num_atoms] if dueling else [num_actions * num_atoms]
    heads: list[Any] = [NoisyDense(size) if noisy else _dense(size, scale=1.0) for size in sizes]

    def init(keys: Sequence[jax.Array], features: jax.Array) -> PyTree:
        return [head.init(key, features) for head, key in zip(heads, keys, strict=True)]

    def apply(params: PyTree, features: jax.Array, keys: jax.Array | None) -> jax.Array:
        features = features.astype(jnp.float32)
        outputs = []
        for index, (head, weights) in enumerate(zip(heads, params, strict=True)):
            head_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, index)
            y = head.apply(weights, features, head_keys) if noisy else head.apply(weights, features)
            outputs.append(y.reshape(*features.shape[:-1], -1, num_atoms))
        if not dueling:
            return outputs[0]
        advantage, value = outputs
        return jnp.broadcast_to(value, advantage.shape) + advantage - advantage.mean(axis=-2, keepdims=True)

    return _QHeads(init, apply)


class QNetwork(NamedTuple):
    """The values of all actions, or the logits of their distributions over ``num_atoms`` atoms."""

    init: Callable[[jax.Array], PyTree]
    """``(key) -> params``, float32."""
    apply: Callable[[PyTree, jax.Array, jax.Array | None], jax.Array]
    """``(params, obs [N, ...], keys [N] or None) -> [N, num_actions, num_atoms] float32``; keys draw the noise."""


def q_network(
    config: TorsoConfig, observation: Space, num_actions: int, *, num_atoms: int, dueling: bool, noisy: bool
) -> QNetwork:
    """Builds the network of a value-based method.

    Args:
      num_atoms: 1 for plain values.
      dueling: separate heads for the state's value and the actions' advantages (Wang et al. 2016, equation 9).
      noisy: ``NoisyDense`` heads, which explore by themselves.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    torso = _make_torso(config, observation, dtype)
    heads = _q_heads(num_actions, num_atoms=num_atoms, dueling=dueling, noisy=noisy)

    def init(key: jax.Array) -> PyTree:
        torso_key, *head_keys = jax.random.split(key, 2 + dueling)
        x = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype)
        features, params = torso.init_with_output(torso_key, x)
        return {"torso": params, "heads": heads.init(head_keys, features)}

    def apply(params: PyTree, obs: jax.Array, keys: jax.Array | None) -> jax.Array:
        features = torso.apply(params["torso"], preprocess(obs, observation, dtype))
        return heads.apply(params["heads"], features, keys)

    return QNetwork(init, apply)


class RecurrentQNetwork(NamedTuple):
    """The values of all actions, which depend on what was observed before in the episode."""

    init: Callable[[jax.Array], PyTree]
    """``(key) -> params``, float32."""
    step: Callable[[PyTree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    """``(params, obs [B, ...], core [B, H]) -> (q [B, num_actions], core [B, H])``, all float32; who steps the
    environment applies ``reset_core`` once it knows ``valid``."""
    unroll: Callable[[PyTree, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    """``(params, obs [T, B, ...], core [B, H], valid [T, B]) -> (q [T, B, num_actions], core [B, H])``: ``T`` steps,
    with ``reset_core`` after each; the core returned is the one after step ``T - 1``."""
    initial_core: Callable[[int], jax.Array]
    """``(num_envs) -> core [num_envs, H]`` at the start of an episode."""


def recurrent_q_network(
    config: TorsoConfig, observation: Space, num_actions: int, *, core_size: int, dueling: bool
) -> RecurrentQNetwork:
    """Builds a torso, a GRU of ``core_size`` and the heads that ``q_network`` has.

    ``config.precision`` is that of torso and GRU; parameters, the core's state and the heads stay float32.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    torso = _make_torso(config, observation, dtype)
    gru: Any = nn.GRUCell(core_size, dtype=dtype)
    heads = _q_heads(num_actions, num_atoms=1, dueling=dueling, noisy=False)

    def initial_core(num_envs: int) -> jax.Array:
        return jnp.zeros((num_envs, core_size), jnp.float32)

    def init(key: jax.Array) -> PyTree:
        torso_key, gru_key, *head_keys = jax.random.split(key, 3 + dueling)
        x = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype)
        features, params = torso.init_with_output(torso_key, x)
        (out, _), cell = gru.init_with_output(gru_key, initial_core(1), features)
        return {"torso": params, "gru": cell, "heads": heads.init(head_keys, out)}

    def encode(params: PyTree, obs: jax.Array) -> jax.Array:
        return torso.apply(params["torso"], preprocess(obs, observation, dtype))

    def decode(params: PyTree, out: jax.Array) -> jax.Array:
        return heads.apply(params["heads"], out, None)[..., 0]

    def step(params: PyTree, obs: jax.Array, core: jax.Array) -> tuple[jax.Array, jax.Array]:
        core, _ = gru.apply(params["gru"], core, encode(params, obs))
        return decode(params, core), core

    def unroll(params: PyTree, obs: jax.Array, core: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, core = _unroll_gru(gru, params["gru"], encode(params, obs), core, valid)
        return decode(params, out), core

    return RecurrentQNetwork(init, step, unroll, initial_core)


# --- Actor and critics apart, for off-policy learning -----------------------------------------------------


class Network(NamedTuple):
    """A function of observations and perhaps actions."""

    init: Callable[[jax.Array], PyTree]
    """``(key) -> params``, float32."""
    apply: Callable[..., jax.Array]
    """``(params, obs [N, ...]) -> [N, outputs] float32``; a critic's as ``critic_network`` says."""


def policy_network(config: TorsoConfig, observation: Space, num_outputs: int) -> Network:
    """A torso and a head, whose weights start at scale 0.01.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    torso = _make_torso(config, observation, dtype)
    head: Any = _dense(num_outputs, scale=0.01)

    def init(key: jax.Array) -> PyTree:
        torso_key, head_key = jax.random.split(key)
        x = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype)
        features, params = torso.init_with_output(torso_key, x)
        return {"torso": params, "head": head.init(head_key, features.astype(jnp.float32))}

    def apply(params: PyTree, obs: jax.Array) -> jax.Array:
        features = torso.apply(params["torso"], preprocess(obs, observation, dtype))
        return head.apply(params["head"], features.astype(jnp.float32))

    return Network(init, apply)


def critic_network(
    config: TorsoConfig, observation: Space, num_critics: int, *, action_size: int = 0, num_actions: int = 1
) -> Network:
    """Several critics of one form, each with parameters of its own.

    ``apply`` is ``(params, obs [N, ...], action [N, action_size]) -> [num_critics, N] float32``, or with
    ``num_actions``, for discrete ones, ``(params, obs) -> [num_critics, N, num_actions]``.

    Vectors meet the action in the first layer; the features of an image meet it in an MLP behind the CNN.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    image = choose_torso(config.torso, observation) != "mlp"
    torso = _make_torso(config, observation, dtype)
    mlp: Any = _make_mlp(config, 1, dtype)
    head: Any = _dense(num_actions, scale=1.0)
    axes = len(observation.shape) if isinstance(observation, Box) else 1

    def one(params: PyTree, obs: jax.Array, action: jax.Array | None) -> jax.Array:
        x = preprocess(obs, observation, dtype)
        x = torso.apply(params["torso"], x) if image or action is None else _flatten(x, axes)
        if action is not None:
            x = mlp.apply(params["mlp"], jnp.concatenate([x, action.astype(dtype)], axis=-1))
        q = head.apply(params["head"], x.astype(jnp.float32))
        return q[..., 0] if action is not None else q

    def init_one(key: jax.Array) -> PyTree:
        torso_key, mlp_key, head_key = jax.random.split(key, 3)
        x, params = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype), {}
        if image or not action_size:
            x, params["torso"] = torso.init_with_output(torso_key, x)
        if action_size:
            x = jnp.concatenate([x if image else _flatten(x, axes), jnp.zeros((1, action_size), dtype)], axis=-1)
            x, params["mlp"] = mlp.init_with_output(mlp_key, x)
        return params | {"head": head.init(head_key, x.astype(jnp.float32))}

    def init(key: jax.Array) -> PyTree:
        return [init_one(key) for key in jax.random.split(key, num_critics)]

    def apply(params: PyTree, obs: jax.Array, action: jax.Array | None = None) -> jax.Array:
        return jnp.stack([one(each, obs, action) for each in params])

    return Network(init, apply)


# --- Actor and critic ---------------------------------------------------------------------------------


class ActorCritic(NamedTuple):
    """A policy and a value function; ``P`` numbers parametrise the distribution of an action."""

    init: Callable[[jax.Array], PyTree]
    """``(key) -> params``, float32."""
    step: Callable[[PyTree, jax.Array, PyTree], tuple[jax.Array, jax.Array, PyTree]]
    """``(params, obs [B, ...], core [B, ...]) -> (outputs [B, P], value [B], core [B, ...])``, all float32; who steps
    the environment applies ``reset_core`` once it knows ``valid``."""
    unroll: Callable[[PyTree, jax.Array, PyTree, jax.Array], tuple[jax.Array, jax.Array, PyTree]]
    """``(params, obs [T, B, ...], core [B, ...], valid [T, B]) -> (outputs [T, B, P], values [T, B], core [B, ...])``:
    ``T`` steps, with ``reset_core`` after each; the core returned is the one after step ``T - 1``."""
    initial_core: Callable[[int], PyTree]
    """``(num_envs) -> core [num_envs, ...]`` at the start of an episode; ``()`` if there is no recurrent core."""


def actor_critic(
    config: NetworkConfig, observation: Space, num_outputs: int, shared_torso: bool, log_std: int = 0
) -> ActorCritic:
    """Builds the network of a policy gradient method.

    Args:
      config: ``hidden_sizes`` and ``activation`` are the MLP torso's; CNNs have their papers' widths and relu.
        ``precision`` is that of torso and core; parameters, the core's state and the heads stay float32.
      observation: the observation space; see ``preprocess`` and ``choose_torso``.
      num_outputs: size of the policy head, whose weights start at scale 0.01 (the value head's at 1).
      shared_torso: one torso for policy and value, else one for each; a recurrent core always has one.
      log_std: if ``A > 0``, ``P = num_outputs + A``: the outputs end with a trained vector ``[A]`` that starts at
        zero and does not depend on the observation, the logarithm of a standard deviation.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    dtype = jnp.dtype(config.precision)
    torso = _make_torso(config, observation, dtype)
    gru: Any = nn.GRUCell(config.core_size, dtype=dtype)
    policy: Any = _dense(num_outputs, scale=0.01)
    value: Any = _dense(1, scale=1.0)
    recurrent = config.core == "gru"
    torsos = ("torso",) if shared_torso or recurrent else ("policy_torso", "value_torso")

    def initial_core(num_envs: int) -> PyTree:
        return jnp.zeros((num_envs, config.core_size), jnp.float32) if recurrent else ()

    def init(key: jax.Array) -> PyTree:
        keys = iter(jax.random.split(key, 5))
        x = preprocess(np.zeros((1, *observation.shape), observation.dtype), observation, dtype)
        params = {name: torso.init(next(keys), x) for name in torsos}
        features = torso.apply(params[torsos[0]], x)
        if recurrent:
            (features, _), params["gru"] = gru.init_with_output(next(keys), initial_core(1), features)
        if log_std:
            params["log_std"] = jnp.zeros((log_std,), jnp.float32)
        return params | {"policy": policy.init(next(keys), features), "value": value.init(next(keys), features)}

    def encode(params: PyTree, obs: jax.Array) -> list[jax.Array]:
        """Features ``[..., width]`` for both heads, or for each."""
        x = preprocess(obs, observation, dtype)
        return [torso.apply(params[name], x) for name in torsos]

    def decode(params: PyTree, features: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs = policy.apply(params["policy"], features[0])
        if log_std:
            scale = jnp.broadcast_to(params["log_std"], (*outputs.shape[:-1], log_std))
            outputs = jnp.concatenate([outputs, scale], axis=-1)
        return outputs, value.apply(params["value"], features[-1])[..., 0]

    def step(params: PyTree, obs: jax.Array, core: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        features = encode(params, obs)
        if recurrent:
            core, _ = gru.apply(params["gru"], core, features[0])
            features = [core]
        return *decode(params, features), core

    def unroll(params: PyTree, obs: jax.Array, core: PyTree, valid: jax.Array) -> tuple[jax.Array, jax.Array, PyTree]:
        features = encode(params, obs)
        if recurrent:
            out, core = _unroll_gru(gru, params["gru"], features[0], core, valid)
            features = [out]
        return *decode(params, features), core

    return ActorCritic(init, step, unroll, initial_core)
