"""Distributions over actions: small records with ``sample``, ``log_prob``,
``entropy`` and ``mode``.

Parameters have a batch shape ``[...]`` (mostly ``[B]``) before the named axes. ``sample`` takes one
typed key for each element of the batch; an element's action depends only on that key and that
element's parameters, never on the size of the batch (with JAX's default generator, threefry).
Discrete actions are int32, continuous ones float32.

Distributions with normal components take ``noise``, standard normal numbers that they use instead
of drawing, so that a caller may correlate the noise of consecutive actions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import packing, spaces
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn.observations import masked
from jaxrl_dist.types import PyTree


class Distribution(Protocol):
    """A distribution over actions for each element of a batch ``[...]``;
    ``A`` is the shape of one action.

    Actions of named parts are dicts of such arrays.
    """

    def sample(self, keys: jax.Array, noise: jax.Array | None = None) -> PyTree:
        """Draws actions ``[..., *A]`` from one key each: ``keys [...]``;
        normal components take ``noise [..., n]``.
        """

    def log_prob(self, action: PyTree) -> jax.Array:
        """Log probability (density, if continuous) ``[...]`` of ``action [..., *A]``."""

    def entropy(self) -> jax.Array:
        """Entropy ``[...]`` in nats."""

    def mode(self) -> PyTree:
        """The greedy action ``[..., *A]``."""


class Categorical(NamedTuple):
    """Integers ``0 .. n - 1`` with probabilities softmax(logits);
    an action with logit -inf is never drawn.
    """

    logits: jax.Array
    """[..., n] float32."""

    def sample(self, keys: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        return _per_key(jax.random.categorical, keys, self.logits).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(self.logits)
        return packing.take_along_last(log_probs, action)

    def entropy(self) -> jax.Array:
        log_probs = jax.nn.log_softmax(self.logits)
        probs = jnp.exp(log_probs)
        # 0 log 0 = 0. A where around the product would leave 0 * -inf in the gradient.
        return -jnp.sum(probs * jnp.where(probs > 0.0, log_probs, 0.0), axis=-1)

    def mode(self) -> jax.Array:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)


class MultiCategorical(NamedTuple):
    """Vectors of ``k`` independent integers;
    log probability and entropy belong to the whole vector.
    """

    logits: tuple[jax.Array, ...]
    """K of [..., n_i] float32."""

    def sample(self, keys: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        def draw(key: jax.Array, *logits: jax.Array) -> jax.Array:
            integers = [
                jax.random.categorical(jax.random.fold_in(key, index), part)
                for index, part in enumerate(logits)
            ]
            return jnp.stack(integers)

        return _per_key(draw, keys, *self.logits).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> jax.Array:
        log_probs = [part.log_prob(action[..., i]) for i, part in enumerate(self._parts())]
        return jnp.stack(log_probs).sum(axis=0)

    def entropy(self) -> jax.Array:
        return jnp.stack([part.entropy() for part in self._parts()]).sum(axis=0)

    def mode(self) -> jax.Array:
        return jnp.stack([part.mode() for part in self._parts()], axis=-1)

    def _parts(self) -> list[Categorical]:
        return [Categorical(logits) for logits in self.logits]


class Joint(NamedTuple):
    """Dicts of independent parts; log probability and entropy belong to the whole dict."""

    parts: Mapping[str, Any]
    """``Distribution`` of each part: probabilities of discrete parts, densities of others."""

    def sample(self, keys: jax.Array, noise: jax.Array | None = None) -> dict[str, PyTree]:
        """As ``Distribution.sample``; ``noise`` has the numbers of all normal parts side by
        side.
        """
        fold: Callable[[jax.Array, int], jax.Array] = jax.random.fold_in
        for _ in keys.shape:
            fold = jax.vmap(fold, (0, None))
        actions = {}
        start = 0
        for index, (name, part) in enumerate(self.parts.items()):
            end = start + _normal_components(part)
            part_noise = None if noise is None else noise[..., start:end]
            actions[name] = part.sample(fold(keys, index), part_noise)
            start = end
        return actions

    def log_prob(self, action: Mapping[str, PyTree]) -> jax.Array:
        log_probs = [part.log_prob(action[name]) for name, part in self.parts.items()]
        return jnp.stack(log_probs).sum(axis=0)

    def entropy(self) -> jax.Array:
        return jnp.stack([part.entropy() for part in self.parts.values()]).sum(axis=0)

    def mode(self) -> dict[str, PyTree]:
        return {name: part.mode() for name, part in self.parts.items()}


class Normal(NamedTuple):
    """Real vectors with independent normal components;
    log density and entropy belong to the whole vector.
    """

    mean: jax.Array
    """[..., A] float32."""
    log_std: jax.Array
    """[..., A] float32."""

    def sample(self, keys: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        if noise is None:
            noise = _per_key(
                lambda key, mean: jax.random.normal(key, mean.shape, mean.dtype), keys, self.mean
            )
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, action: jax.Array) -> jax.Array:
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> jax.Array:
        return jnp.sum(self.log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def mode(self) -> jax.Array:
        return self.mean


class TanhNormal(NamedTuple):
    """A ``Normal`` squashed by tanh to -1 .. 1; its entropy has no closed form.

    Haarnoja et al. 2018, "Soft Actor-Critic: Off-Policy Maximum Entropy Deep Reinforcement Learning
    with a Stochastic Actor", appendix C (https://arxiv.org/abs/1801.01290).
    """

    mean: jax.Array
    """[..., A] float32  before squashing."""
    log_std: jax.Array
    """[..., A] float32  before squashing."""

    def sample(self, keys: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        return jnp.tanh(self._normal().sample(keys, noise))

    def sample_and_log_prob(self, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draws actions ``[..., A]`` and their log density ``[...]``,
        exact even if an action rounds to a bound.

        Both are differentiable by ``mean`` and ``log_std`` (the reparameterisation trick).
        """
        pre_tanh = self._normal().sample(keys)
        return jnp.tanh(pre_tanh), self._log_prob(pre_tanh)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log density ``[...]``; an action on a bound counts as the nearest float32 inside it."""
        largest = 1.0 - float(np.finfo(np.float32).epsneg)  # arctanh(1) is infinite
        return self._log_prob(jnp.arctanh(jnp.clip(action, -largest, largest)))

    def mode(self) -> jax.Array:
        """The squashed mean, SAC's greedy action; strictly, this is the median."""
        return jnp.tanh(self.mean)

    def _normal(self) -> Normal:
        return Normal(self.mean, self.log_std)

    def _log_prob(self, pre_tanh: jax.Array) -> jax.Array:
        # log(1 - tanh(u)^2), written so that nothing cancels for large |u|.
        log_slope = 2.0 * (math.log(2.0) - pre_tanh - jax.nn.softplus(-2.0 * pre_tanh))
        return self._normal().log_prob(pre_tanh) - jnp.sum(log_slope, axis=-1)


class EpsilonGreedy(NamedTuple):
    """The action of largest value (the first of equals); with probability epsilon,
    a uniformly random action.
    """

    q: jax.Array
    """[..., n] float32."""
    epsilon: jax.Array | float
    """Scalar or [...], in 0 .. 1."""
    legal: jax.Array | None = None
    """[..., n] bool, with a True in every row; None: all actions are legal."""

    def sample(self, keys: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        return self._categorical().sample(keys)

    def log_prob(self, action: jax.Array) -> jax.Array:
        return self._categorical().log_prob(action)

    def entropy(self) -> jax.Array:
        return self._categorical().entropy()

    def mode(self) -> jax.Array:
        return jnp.argmax(masked(self.q, self.legal), axis=-1).astype(jnp.int32)

    def _categorical(self) -> Categorical:
        num_actions = self.q.shape[-1]
        epsilon = jnp.broadcast_to(self.epsilon, self.q.shape[:-1])[..., None]
        greedy = jax.nn.one_hot(self.mode(), num_actions, dtype=self.q.dtype)
        if self.legal is None:
            return Categorical(jnp.log(epsilon / num_actions + (1.0 - epsilon) * greedy))
        count = jnp.sum(self.legal, axis=-1, keepdims=True, dtype=self.q.dtype)
        return Categorical(masked(jnp.log(epsilon / count + (1.0 - epsilon) * greedy), self.legal))


class PolicyHead(NamedTuple):
    """The outputs that a policy network needs for an action space,
    and the distribution that they parametrise.
    """

    num_outputs: int
    """Number of logits or means."""
    log_std_size: int
    """Number of log standard deviations, which do not depend on the observation;
    0 for discrete actions."""
    distribution: Callable[..., Distribution]
    """``(outputs [..., num_outputs + log_std_size], legal = None) -> distribution``; the log
    standard deviations come last. ``legal [..., num_outputs]`` says which discrete actions may be
    drawn; see ``observations.legal``."""


def policy_head(action_space: spaces.Space) -> PolicyHead:
    """Discrete -> ``Categorical``, MultiDiscrete -> ``MultiCategorical``, Box of one axis ->
    ``Normal``, and a dict -> ``Joint``.

    If a component of a Box has two finite bounds, the outputs are in units in which these bounds
    are -1 and 1, and the ``Normal`` is in the environment's units, as with RLlib's
    ``normalize_actions``. It is not truncated: the environment clips an action beyond its bounds,
    and the log density belongs to the action before clipping, as in OpenAI baselines' PPO (Dhariwal
    et al. 2017).

    Raises:
      ConfigError: for any other action space.
    """
    if isinstance(action_space, dict):
        return _joint_head({name: policy_head(part) for name, part in action_space.items()})
    if isinstance(action_space, spaces.Discrete):
        return PolicyHead(action_space.n, 0, _categorical)
    if isinstance(action_space, spaces.MultiDiscrete):
        return _multi_categorical_head(action_space)
    return _normal_head(action_space)


def _categorical(outputs: jax.Array, legal: jax.Array | None = None) -> Categorical:
    return Categorical(masked(outputs.astype(jnp.float32), legal))


def _multi_categorical_head(action_space: spaces.MultiDiscrete) -> PolicyHead:
    ends = list(itertools.accumulate(action_space.nvec))

    def multi_categorical(outputs: jax.Array, legal: jax.Array | None = None) -> MultiCategorical:
        logits = masked(outputs.astype(jnp.float32), legal)
        return MultiCategorical(tuple(jnp.split(logits, ends[:-1], axis=-1)))

    return PolicyHead(ends[-1], 0, multi_categorical)


def _normal_head(action_space: spaces.Box) -> PolicyHead:
    if len(action_space.shape) != 1 or not np.issubdtype(action_space.dtype, np.floating):
        raise ConfigError(
            f"a Box action space must be a vector of floats, not shape {action_space.shape} of "
            f"{action_space.dtype}; convert it with gymnasium.wrappers.TransformAction"
        )
    # bounds near float32's largest number do not count
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.asarray(action_space.low, np.float32)
        high = np.asarray(action_space.high, np.float32)
        half = 0.5 * (high - low)
    bounded = np.isfinite(half) & (half > 0)
    half = np.where(bounded, half, np.float32(1.0))
    centre = np.where(bounded, low, -half) + half

    def normal(outputs: jax.Array, legal: None = None) -> Normal:
        del legal
        mean, log_std = jnp.split(outputs.astype(jnp.float32), 2, axis=-1)
        shift = jnp.broadcast_to(centre, mean.shape)
        scale = jnp.broadcast_to(half, mean.shape)
        log_scale = jnp.broadcast_to(np.log(half), mean.shape)
        return Normal(shift + scale * mean, log_std + log_scale)

    (size,) = action_space.shape
    return PolicyHead(size, size, normal)


def _joint_head(heads: Mapping[str, PolicyHead]) -> PolicyHead:
    """Puts the heads of a dict's parts side by side: first all outputs,
    then all log standard deviations.
    """
    outputs_end = list(itertools.accumulate(head.num_outputs for head in heads.values()))
    stds_end = list(itertools.accumulate(head.log_std_size for head in heads.values()))
    num_outputs = outputs_end[-1]

    def joint(outputs: jax.Array, legal: None = None) -> Joint:
        del legal
        means = jnp.split(outputs[..., :num_outputs], outputs_end[:-1], axis=-1)
        stds = jnp.split(outputs[..., num_outputs:], stds_end[:-1], axis=-1)
        parts = {}
        for (name, head), mean, std in zip(heads.items(), means, stds, strict=True):
            parts[name] = head.distribution(jnp.concatenate([mean, std], axis=-1))
        return Joint(parts)

    return PolicyHead(num_outputs, stds_end[-1], joint)


def _normal_components(distribution: Any) -> int:
    """Returns how many numbers of ``noise`` a part takes, the parts within it included."""
    if isinstance(distribution, Joint):
        return sum(map(_normal_components, distribution.parts.values()))
    if isinstance(distribution, Normal):
        return distribution.mean.shape[-1]
    return 0


def _per_key(draw: Callable[..., jax.Array], keys: jax.Array, *params: jax.Array) -> jax.Array:
    """Maps ``draw(key, *vectors)`` over the batch of ``keys [...]`` and ``params [..., n]``."""
    for param in params:
        chex.assert_shape(keys, param.shape[:-1])
    for _ in keys.shape:
        draw = jax.vmap(draw)
    return draw(keys, *params)
