"""Heads turn the features of torso and core into a network's outputs.

Last layers and outputs are float32, for any dtype of the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.nn.layers import dense
from jaxrl_dist.nn.torsos import make_mlp
from jaxrl_dist.nn.values import middles
from jaxrl_dist.types import PyTree


class Heads(NamedTuple):
    """The layers behind torso and core; their parameters are entries of the network's dict."""

    num_keys: int
    """Number of keys that ``init`` takes."""
    init: Callable[[jax.Array, PyTree], dict[str, PyTree]]
    """``(keys [num_keys], features [1, D]) -> params``, float32;
    ``features`` matter only by their shape and dtype."""
    apply: Callable[..., tuple[jax.Array, ...]]
    """``(params, features [..., D], *inputs) -> outputs``,
    a tuple of float32 arrays with the same leading axes."""


class NoisyDense(nn.Module):
    """A dense layer with learned, factorised Gaussian noise on its weights:
    ``[N, D]`` to ``[N, features]``.

    Fortunato et al. 2018 (arXiv:1706.10295), section 3:
    ``W = mu + sigma * (f(eps_out) f(eps_in)^T)`` with ``f(x) = sign(x) sqrt(|x|)``. Each example
    draws separate noise. Since the noise is a product of two vectors, this costs a second matmul,
    but no matrix for each example.
    """

    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """``keys [N]`` draw the noise; None: no noise, and any leading axes."""
        fan_in = x.shape[-1]
        bound = 1 / math.sqrt(fan_in)

        def uniform(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        sigma_init = nn.initializers.constant(0.5 * bound)
        kernel = self.param("kernel", uniform, (fan_in, self.features), jnp.float32)
        bias = self.param("bias", uniform, (self.features,), jnp.float32)
        kernel_sigma = self.param("kernel_sigma", sigma_init, (fan_in, self.features), jnp.float32)
        bias_sigma = self.param("bias_sigma", sigma_init, (self.features,), jnp.float32)
        y = x @ kernel.astype(self.dtype)
        y = y + jnp.broadcast_to(bias, y.shape).astype(self.dtype)
        if keys is None:
            return y
        noise = jax.vmap(lambda key: jax.random.normal(key, (fan_in + self.features,)))(keys)
        noise = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
        into = noise[:, :fan_in].astype(self.dtype)
        out = noise[:, fan_in:].astype(self.dtype)
        kernel_noise = (x * into) @ kernel_sigma.astype(self.dtype)
        return y + out * (kernel_noise + bias_sigma.astype(self.dtype).reshape(1, -1))


COSINES = 64
"""Cosines of a fraction that implicit quantiles read (Dabney et al. 2018, equation 4)."""
FRACTIONS = 32
"""The value of an action is the mean of the quantiles at so many fractions (section 3)."""


def q_heads(
    num_actions: int, *, num_atoms: int, dueling: bool, noisy: bool, implicit: bool = False
) -> Heads:
    """The values of actions, output ``[..., num_actions, num_atoms]``; see ``networks.q_network``.

    Input of noisy heads: ``keys [N]``, which draw the noise for features ``[N, D]``; None:
    no noise. Implicit heads also take ``fractions [N, F]``, by default ``FRACTIONS`` equal steps,
    and put out ``[..., num_actions, 2 F]``, as ``values.implicit`` reads them.
    """
    sizes = [num_actions * num_atoms]
    if dueling:
        sizes.append(num_atoms)
    layers: list[Any]
    if noisy:
        layers = [NoisyDense(size) for size in sizes]
    else:
        layers = [dense(size, scale=1.0) for size in sizes]

    def init(keys: jax.Array, features: jax.Array) -> dict[str, PyTree]:
        params: dict[str, PyTree] = {
            "heads": [
                layer.init(key, features)
                for layer, key in zip(layers, keys[: len(layers)], strict=True)
            ]
        }
        if implicit:
            waves = jnp.zeros((1, COSINES))
            params["fractions"] = dense(features.shape[-1]).init(keys[-1], waves)
        return params

    def apply(
        params: PyTree,
        features: jax.Array,
        keys: jax.Array | None = None,
        fractions: jax.Array | None = None,
    ) -> tuple[jax.Array]:
        # once, so that the gradients of both heads are summed in float32
        features = features.astype(jnp.float32)
        if not implicit:
            return (of_features(params, features, keys),)
        if fractions is None:
            fractions = jnp.broadcast_to(middles(FRACTIONS), (*features.shape[:-1], FRACTIONS))
        mixed = features[..., None, :] * _embedded(params["fractions"], fractions)
        every = jax.vmap(lambda one: of_features(params, one, keys)[..., 0], -2, -1)
        quantiles = every(mixed)
        read = jnp.broadcast_to(fractions[..., None, :], quantiles.shape)
        return (jnp.concatenate([quantiles, read], axis=-1),)

    def of_features(params: PyTree, features: jax.Array, keys: jax.Array | None) -> jax.Array:
        outputs = []
        for index, (layer, weights) in enumerate(zip(layers, params["heads"], strict=True)):
            inputs = [features]
            if noisy and keys is not None:
                inputs.append(jax.vmap(jax.random.fold_in, (0, None))(keys, index))
            output = layer.apply(weights, *inputs)
            outputs.append(output.reshape(*features.shape[:-1], -1, num_atoms))
        if not dueling:
            return outputs[0]
        advantage, value = outputs
        mean = advantage.mean(axis=-2, keepdims=True)
        return jnp.broadcast_to(value, advantage.shape) + advantage - mean

    return Heads(len(sizes) + implicit, init, apply)


def _embedded(params: PyTree, fractions: jax.Array) -> jax.Array:
    """Returns factors ``[..., F, D]`` of features for fractions ``[..., F]``: Dabney et al. 2018
    (https://arxiv.org/abs/1806.06923), equation 4.
    """
    numbers = jnp.arange(COSINES).reshape(*(1,) * fractions.ndim, -1)
    waves = jnp.cos(math.pi * numbers * fractions[..., None])
    layer: Any = dense(params["params"]["bias"].size)
    return nn.relu(layer.apply(params, waves))


def linear_head(num_outputs: int, scale: float) -> Heads:
    """One linear layer with output ``[..., num_outputs]``;
    ``scale`` is the gain of its orthogonal initial weights.

    It uses the last of its keys.
    """
    layer: Any = dense(num_outputs, scale=scale)
    return Heads(
        num_keys=1,
        init=lambda keys, features: {"head": layer.init(keys[-1], features)},
        apply=lambda params, features: (layer.apply(params["head"], features),),
    )


def action_value_head(config: TorsoConfig, action_size: int, num_outputs: int = 1) -> Heads:
    """The value ``[..., num_outputs]`` of an input ``action [..., action_size]``:
    an MLP reads features and action side by side.
    """
    dtype = jnp.dtype(config.precision)
    mlp: Any = make_mlp(config, 1, dtype)
    layer: Any = dense(num_outputs, scale=1.0)

    def init(keys: jax.Array, features: jax.Array) -> dict[str, PyTree]:
        x = jnp.concatenate([features, jnp.zeros((1, action_size), dtype)], axis=-1)
        hidden, params = mlp.init_with_output(keys[0], x)
        return {"mlp": params, "head": layer.init(keys[1], hidden)}

    def apply(params: PyTree, features: jax.Array, action: jax.Array) -> tuple[jax.Array]:
        x = jnp.concatenate([features, action.astype(dtype)], axis=-1)
        return (layer.apply(params["head"], mlp.apply(params["mlp"], x)),)

    return Heads(2, init, apply)


def actor_critic_heads(num_outputs: int, log_std: int, initial_std: float) -> Heads:
    """Outputs ``[..., num_outputs + log_std]`` of the policy and the value ``[...]``,
    from one or two features.

    The policy's weights start at scale 0.01, the value's at 1. The policy's last ``log_std``
    outputs are a trained vector, the same for all observations, which starts at
    ``log(initial_std)``.
    """
    policy: Any = dense(num_outputs, scale=0.01)
    value: Any = dense(1, scale=1.0)

    def split(features: PyTree) -> tuple[jax.Array, jax.Array]:
        return features if isinstance(features, tuple) else (features, features)

    def init(keys: jax.Array, features: PyTree) -> dict[str, PyTree]:
        for_policy, for_value = split(features)
        params = {
            "policy": policy.init(keys[0], for_policy),
            "value": value.init(keys[1], for_value),
        }
        if log_std:
            params["log_std"] = jnp.full((log_std,), jnp.log(initial_std), jnp.float32)
        return params

    def apply(params: PyTree, features: PyTree) -> tuple[jax.Array, jax.Array]:
        for_policy, for_value = split(features)
        outputs = policy.apply(params["policy"], for_policy)
        if log_std:
            scale = jnp.broadcast_to(params["log_std"], (*outputs.shape[:-1], log_std))
            outputs = jnp.concatenate([outputs, scale], axis=-1)
        return outputs, value.apply(params["value"], for_value)[..., 0]

    return Heads(2, init, apply)
