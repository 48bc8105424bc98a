"""Torsos read preprocessed observations."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_dist import spaces
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.nn.layers import Conv, LayerNorm, dense, max_pool
from jaxrl_dist.nn.observations import flatten, rank, side_by_side
from jaxrl_dist.protocols import TorsoLike
from jaxrl_dist.spaces import Space, channels_first, is_image
from jaxrl_dist.types import PyTree

# --- Torsos: preprocessed observations [..., *shape] to features [..., width] ---------------------


class MLP(nn.Module):
    """Flattens the last ``axes`` axes; then dense layers, each followed by ``activation``."""

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
    """Espeholt et al. 2018 (arXiv:1802.01561), figure 3 right, without the LSTM:
    15 convolutions, relu.

    Unlike theirs, convolutions start with a gain of 1, not sqrt(2),
    so that residual blocks do not inflate features.
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


# (shortest side of an image in pixels, torso)
_CNNS: dict[str, tuple[int, Callable[..., nn.Module]]] = {
    "minatar": (3, MinAtarCNN),
    "nature": (36, NatureCNN),
    "impala": (1, ImpalaResNet),
}


def choose_torso(torso: str | TorsoLike, observation: Space) -> str:
    """Resolves ``TorsoConfig.torso`` for a space: ``mlp``, ``minatar``, ``nature``,
    ``impala``, ``parts`` or ``own``.

    ``parts`` reads named parts, at least one of which is an image for a CNN;
    the others form one long vector.

    Raises:
      ConfigError: if the name is unknown, or names a CNN and observations are not images,
        or too small for it.
    """
    if not isinstance(torso, str):
        return "own"
    if torso not in ("auto", "mlp", *_CNNS):
        raise ConfigError(
            f"unknown --torso {torso!r}; these work: {', '.join(['auto', 'mlp', *_CNNS])}"
        )
    chosen = {_of_part(torso, part) for part in spaces.leaves(observation).values()}
    if torso not in ("auto", "mlp", *chosen):
        raise _misfit(torso, observation)
    if isinstance(observation, dict) and chosen != {"mlp"}:
        return "parts"
    return chosen.pop()


def _misfit(torso: str, observation: Space) -> ConfigError:
    """Returns the error that says why a CNN cannot read observations, and which torsos can."""
    images = f"--torso {torso} reads images of {_CNNS[torso][0]} or more pixels a side"
    if isinstance(observation, dict):
        return ConfigError(
            f"{images}, but no part of the observations {spaces.describe(observation)} is one; use "
            "--torso auto or mlp"
        )
    fits = _fitting(observation)
    channels = ""
    if isinstance(observation, spaces.Box) and len(observation.shape) == 2 and not fits:
        channels = ", without an axis for the channels"
    return ConfigError(
        f"{images}, but observations have shape {observation.shape}{channels}; use --torso "
        f"{' or '.join(['auto', 'mlp', *fits])}"
    )


def _fitting(observation: spaces.Part) -> list[str]:
    """Returns the CNNs that can read an observation."""
    if not is_image(observation):
        return []
    shape = observation.shape
    side = min(shape[1:] if channels_first(shape) else shape[:2])
    return [cnn for cnn, (shortest, _) in _CNNS.items() if side >= shortest]


def _of_part(torso: str, part: spaces.Part) -> str:
    """Chooses the torso of a part: the one that the user names, if it can read the part."""
    fits = _fitting(part)
    if torso in ("mlp", *fits):
        return torso
    return next((cnn for cnn in ("nature", "minatar") if cnn in fits), "mlp")


def make_mlp(config: TorsoConfig, axes: int, dtype: DTypeLike) -> MLP:
    """An MLP of the config's sizes, for inputs of rank ``axes``."""
    return MLP(config.hidden_sizes, getattr(nn, config.activation), axes, config.layer_norm, dtype)


def make_torso(config: TorsoConfig, observation: Space, dtype: DTypeLike) -> Any:
    """The torso for an observation space, a flax module or an object with the same methods.

    It has ``init(key, x) -> params`` and ``apply(params, x) -> features`` for preprocessed
    observations ``x [..., *shape]``, or a dict of them, and features ``[..., D]``.

    Raises:
      ConfigError: if ``config.torso`` cannot read the observations.
    """
    name = choose_torso(config.torso, observation)
    if name == "own":
        return _OwnTorso(config.torso, observation)
    if isinstance(observation, dict):
        return _Parts(config, observation, dtype)
    if name == "mlp":
        return make_mlp(config, rank(observation), dtype)
    return _CNNS[name][1](layer_norm=config.layer_norm, dtype=dtype)


def _unused(name: str, images: Collection[str]) -> str:
    """Returns the name of a layer in the parameters that no image of the environment has."""
    if name in images:
        return _unused(f"{name}_", images)
    return name


class _Parts:
    """Reads named parts: each image by a CNN, all others side by side by an MLP;
    one more dense layer joins these.

    Without that layer, linear heads could not combine several parts.
    It has the methods of a flax module.
    """

    def __init__(self, config: TorsoConfig, space: Space, dtype: DTypeLike) -> None:
        assert isinstance(config.torso, str), "your own torso reads all parts"
        self._space = spaces.leaves(space)
        chosen = {path: _of_part(config.torso, part) for path, part in self._space.items()}
        self._flat = [path for path, name in chosen.items() if name == "mlp"]
        self._torsos: dict[str, Any] = {
            path: _CNNS[name][1](layer_norm=config.layer_norm, dtype=dtype)
            for path, name in chosen.items()
            if name != "mlp"
        }
        self._mlp = _unused("mlp", self._torsos)
        self._joint = _unused("join", self._torsos)
        if self._flat:
            self._torsos[self._mlp] = make_mlp(config, 1, dtype)
        self._join: Any = None
        if len(self._torsos) > 1:
            last_layer = dataclasses.replace(config, hidden_sizes=config.hidden_sizes[-1:])
            self._join = make_mlp(last_layer, 1, dtype)

    def _inputs(self, x: PyTree) -> dict[str, jax.Array]:
        parts = spaces.leaves(x)
        if not self._flat:
            return parts
        flat = {path: parts[path] for path in self._flat}
        kinds = {path: self._space[path] for path in self._flat}
        return {**parts, self._mlp: side_by_side(flat, kinds)}

    def init(self, key: jax.Array, x: PyTree) -> PyTree:
        inputs = self._inputs(x)
        keys = jax.random.split(key, len(self._torsos) + 1)
        params = {}
        features = []
        for (name, torso), torso_key in zip(self._torsos.items(), keys[1:], strict=True):
            output, params[name] = torso.init_with_output(torso_key, inputs[name])
            features.append(output)
        if self._join is not None:
            params[self._joint] = self._join.init(keys[0], jnp.concatenate(features, -1))
        return params

    def apply(self, params: PyTree, x: PyTree) -> jax.Array:
        inputs = self._inputs(x)
        features = [torso.apply(params[name], inputs[name]) for name, torso in self._torsos.items()]
        if self._join is None:
            return features[0]
        return self._join.apply(params[self._joint], jnp.concatenate(features, -1))


class _OwnTorso:
    """Gives the user's pair ``(init, apply)`` the methods of a flax module, for any leading axes.

    The pair reads preprocessed observations, or a dict of them: ``init(key, x [1, ...]) -> params``
    and ``apply(params, x [N, ...]) -> features [N, width]``.
    """

    def __init__(self, pair: Any, space: Space) -> None:
        """Checks the pair; ``space``: the observations'.

        Raises:
          ConfigError: if ``pair`` is not such a pair.
        """
        if isinstance(pair, type):
            raise ConfigError(
                f"torso must be an instance, such as {pair.__name__}(), "
                f"not the class {pair.__name__}"
            )
        if hasattr(pair, "init") and hasattr(pair, "apply"):  # such as flax modules
            pair = (pair.init, pair.apply)
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(callable, pair))):
            raise ConfigError(
                f"torso must be a name, or a pair of functions (init, apply), not {pair!r}"
            )
        self.init, self._apply = pair
        self._rank = rank(next(iter(spaces.leaves(space).values())))

    def apply(self, params: PyTree, x: PyTree) -> jax.Array:
        first = next(iter(spaces.leaves(x).values()))
        batch = first.shape[: first.ndim - self._rank]
        size = math.prod(batch)
        rows = jax.tree.map(lambda part: part.reshape(size, *part.shape[len(batch) :]), x)
        features = self._apply(params, rows)
        if jnp.ndim(features) != 2 or len(features) != size:
            shapes = jax.tree.map(jnp.shape, rows)
            raise ConfigError(
                f"the torso's apply returned {jnp.shape(features)} for observations {shapes}; "
                f"it must return ({size}, width)"
            )
        return features.reshape(*batch, features.shape[-1])
