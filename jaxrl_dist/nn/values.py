"""Value heads say what a value network's outputs mean: an expected return,
or a distribution of returns.

Each kind of head reads its outputs as *particles*, returns with probabilities. So an algorithm has
one target for all kinds: it moves the next value's particles by Bellman's equation, and the head
fits its outputs to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_dist import returns
from jaxrl_dist.nn.config import DistributionConfig


class Particles(NamedTuple):
    """A distribution of returns; both arrays have one shape."""

    returns: jax.Array
    """[..., K]."""
    probabilities: jax.Array
    """[..., K]; their sum over ``K`` is 1."""

    def mean(self) -> jax.Array:
        """Returns the expected return ``[...]``."""
        return jnp.sum(self.returns * self.probabilities, axis=-1)


class ValueHead(NamedTuple):
    """How to read ``size`` outputs of a network as a return."""

    size: int
    mean: Callable[[jax.Array], jax.Array]
    """``(outputs [..., size]) -> [...]``: the expected return."""
    particles: Callable[[jax.Array], Particles]
    """``(outputs [..., size]) -> [..., size]``."""
    loss: Callable[[jax.Array, Particles], tuple[jax.Array, jax.Array]]
    """``(outputs [..., size], particles [..., K]) -> (losses [...], priorities [...])``: how far
    the outputs are from the particles, which count as constants."""
    quantiles: bool = False
    """Whether the particles are equally likely ones, which may be pooled and cut."""


ErrorLoss = Callable[[jax.Array], jax.Array]
"""The loss of each error of an expected return."""


def make_head(config: DistributionConfig, error_loss: ErrorLoss) -> ValueHead:
    """Returns the head that a config selects; ``error_loss`` is for ``expected``."""
    if config.num_atoms == 1:
        return expected(error_loss)
    if config.quantiles == "none":
        return categorical(config.value_min, config.value_max, config.num_atoms)
    if config.quantiles == "fixed":
        return quantile(config.num_atoms, config.quantile_huber)
    return implicit(config.quantile_huber)


def expected(error_loss: ErrorLoss) -> ValueHead:
    """One output, the expected return."""

    def mean(outputs: jax.Array) -> jax.Array:
        return outputs[..., 0]

    def particles(outputs: jax.Array) -> Particles:
        return Particles(outputs, jnp.ones_like(outputs))

    def loss(outputs: jax.Array, target: Particles) -> tuple[jax.Array, jax.Array]:
        error = mean(outputs) - returns.constant(target.mean())
        return error_loss(error), jnp.abs(error)

    return ValueHead(1, mean, particles, loss)


def categorical(low: float | jax.Array, high: float | jax.Array, size: int) -> ValueHead:
    """Logits of ``size`` fixed returns from ``low`` to ``high``.

    Bellemare et al. 2017, "A Distributional Perspective on Reinforcement Learning"
    (https://arxiv.org/abs/1707.06887). The priority is the KL divergence, which is 0 where the
    prediction equals the target (Hessel et al. 2018, section 4).
    """
    atoms = jnp.linspace(low, high, size)

    def mean(outputs: jax.Array) -> jax.Array:
        shape = (1,) * (outputs.ndim - 1)
        return jnp.sum(jax.nn.softmax(outputs) * atoms.reshape(*shape, -1), axis=-1)

    def particles(outputs: jax.Array) -> Particles:
        return Particles(jnp.broadcast_to(atoms, outputs.shape), jax.nn.softmax(outputs))

    def loss(outputs: jax.Array, target: Particles) -> tuple[jax.Array, jax.Array]:
        support, shares = (x.reshape(-1, x.shape[-1]) for x in target)
        projected = jax.vmap(returns.project, (0, 0, None))(support, shares, atoms)
        projected = returns.constant(projected.reshape(*target.returns.shape[:-1], size))
        losses = optax.losses.softmax_cross_entropy(outputs, projected)
        entropy = jnp.sum(jax.scipy.special.entr(projected), axis=-1)
        return losses, jnp.maximum(losses - entropy, 0.0)

    return ValueHead(size, mean, particles, loss)


def quantile(size: int, kappa: float | jax.Array = 1.0) -> ValueHead:
    """Returns at the fractions ``(i + 0.5) / size`` of the distribution.

    Dabney et al. 2018, "Distributional Reinforcement Learning with Quantile Regression"
    (https://arxiv.org/abs/1710.10044); see ``quantile_loss``.
    """

    def loss(outputs: jax.Array, target: Particles) -> tuple[jax.Array, jax.Array]:
        fractions = jnp.broadcast_to(middles(size), outputs.shape)
        return quantile_loss(outputs, fractions, target, kappa)

    return ValueHead(size, _mean, _equally_likely, loss, quantiles=True)


def implicit(kappa: float | jax.Array = 1.0) -> ValueHead:
    """Returns at fractions that the network reads.

    Dabney et al. 2018, "Implicit Quantile Networks" (https://arxiv.org/abs/1806.06923). Unlike
    ``size``, the outputs are ``[..., 2 F]``: the returns at ``F`` fractions, then the fractions
    (see ``networks.q_network``).
    """

    def at_fractions(outputs: jax.Array) -> jax.Array:
        return jnp.split(outputs, 2, axis=-1)[0]

    def loss(outputs: jax.Array, target: Particles) -> tuple[jax.Array, jax.Array]:
        quantiles, fractions = jnp.split(outputs, 2, axis=-1)
        return quantile_loss(quantiles, fractions, target, kappa)

    return ValueHead(
        size=1,
        mean=lambda outputs: _mean(at_fractions(outputs)),
        particles=lambda outputs: _equally_likely(at_fractions(outputs)),
        loss=loss,
        quantiles=True,
    )


def middles(size: int) -> jax.Array:
    """Returns the middles ``[size]`` of equal parts of 0 .. 1."""
    return (jnp.arange(size) + 0.5) / size


def _mean(quantiles: jax.Array) -> jax.Array:
    return jnp.mean(quantiles, axis=-1)


def _equally_likely(quantiles: jax.Array) -> Particles:
    return Particles(quantiles, jnp.full_like(quantiles, 1.0 / quantiles.shape[-1]))


def quantile_loss(
    quantiles: jax.Array, fractions: jax.Array, target: Particles, kappa: float | jax.Array = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Returns losses and priorities ``[...]`` of quantiles ``[..., F]`` at ``fractions [..., F]``.

    The loss is equation 10 of Dabney et al. (2018), but a mean over the quantiles in place of the
    sum, so that gradients do not grow with their number. The priority is the error of the mean,
    which falls to 0; the mean error of pairs does not.

    Args:
      kappa: errors up to it have a squared loss, and larger ones a linear loss.
    """
    error = returns.constant(target.returns[..., None, :] - quantiles[..., None])  # [..., F, K]
    below = fractions[..., None]
    weight = jnp.where(error < 0, 1.0 - below, below) * target.probabilities[..., None, :]
    slope = jnp.clip(error / kappa, -1.0, 1.0)
    # The gradient of the Huber loss is its slope. Written out, it takes one pass over the pairs.
    pulls = returns.constant(jnp.sum(weight * slope, axis=-1))
    losses = returns.constant(jnp.sum(weight * slope * (error - 0.5 * kappa * slope), axis=-1))
    losses -= pulls * (quantiles - returns.constant(quantiles))
    return losses.mean(axis=-1), jnp.abs(target.mean() - _mean(quantiles))


def fit(head: ValueHead, outputs: jax.Array, target: Particles) -> tuple[jax.Array, jax.Array]:
    """Returns the summed losses and the mean priorities, ``[N]``, of several critics' outputs
    ``[C, N, size]``, each of which fits particles ``[N, K]``.
    """
    for_all = jax.tree.map(lambda x: x[None], returns.constant(target))
    losses, priorities = head.loss(outputs, for_all)
    return jnp.sum(losses, axis=0), returns.constant(priorities.mean(axis=0))


def mixed(particles: Particles, weights: jax.Array) -> Particles:
    """Returns the distribution ``[N, A K]`` of a random action's return, or its mean ``[N, 1]``
    where ``K`` is 1.

    Args:
      particles: ``[N, A, K]``, of each action.
      weights: ``[N, A]``, the actions' probabilities; where it is 0, returns may be infinite.
    """
    shares = particles.probabilities * weights[..., None]
    values = jnp.where(shares > 0, particles.returns, 0.0)
    if values.shape[-1] == 1:
        mean = jnp.sum(shares * values, axis=-2)
        return Particles(mean, jnp.ones_like(mean))
    return Particles(values.reshape(len(values), -1), shares.reshape(len(shares), -1))


def pessimistic(head: ValueHead, outputs: jax.Array, dropped: int = 0) -> Particles:
    """Returns the least particles ``[..., K]`` of several critics' outputs ``[C, ..., size]``.

    These are of the critic with the least mean; or all quantiles, without the ``C * dropped``
    largest: Kuznetsov et al. 2020, "Controlling Overestimation Bias with Truncated Mixture of
    Continuous Distributional Quantile Critics" (https://arxiv.org/abs/2005.04269), equation 5.
    """
    if head.size == 1:
        return head.particles(outputs.min(axis=0))
    if not head.quantiles:
        least = jnp.argmin(head.mean(outputs), axis=0)
        return head.particles(jnp.take_along_axis(outputs, least[None, ..., None], axis=0)[0])
    pooled = jnp.moveaxis(outputs, 0, -1).reshape(*outputs.shape[1:-1], -1)
    number = pooled.shape[-1]
    largest = jax.lax.top_k(pooled, len(outputs) * dropped)[1]
    chosen = jax.nn.one_hot(largest, number, dtype=bool).any(axis=-2)
    return Particles(pooled, jnp.where(chosen, 0.0, 1.0 / (number - largest.shape[-1])))
