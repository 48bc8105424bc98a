"""Gradients and updates: only this module differentiates losses and averages over examples."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import global_sum
from jaxrl_dist.types import Algorithm, PyTree, TrainState

MAX_SKIPPED = 10
"""Number of consecutive non-finite gradients after which training has diverged and the run ends."""


def init(algorithm: Algorithm, key: jax.Array) -> TrainState:
    """Returns the state before the first update."""
    variables = algorithm.init(key)
    return TrainState(
        variables=variables,
        target=algorithm.initial_target(variables.params),
        opt_state=algorithm.optimizer.init(variables.params),
        updates=jnp.zeros((), jnp.int32),
        iteration=jnp.zeros((), jnp.int32),
        env_step=jnp.zeros((), jnp.float32),
        skipped=jnp.zeros((), jnp.int32),
    )


def gradient(
    algorithm: Algorithm, state: TrainState, batch: PyTree, keys: jax.Array, weight: jax.Array | None = None
) -> tuple[PyTree, Mapping[str, jax.Array], jax.Array | None]:
    """Differentiates the mean loss over the examples of all devices.

    The mean is ``psum(sum(weight * losses * mask)) / psum(sum(mask))`` and is differentiated whole, collectives
    included. Averaging per-device gradients instead would weigh devices, not examples, whenever masks differ.

    Args:
      batch: this device's examples, leading axis ``N``.
      keys: ``[N]``, one for each example.
      weight: ``[N]``, importance weights of the losses; None: all 1. Metrics are not weighted.

    Returns:
      The gradient with respect to ``params``; the means of the loss and of its metrics, and the gradient's norm; the
      priorities ``[N]``, or None if the loss has none. Gradient and metrics are equal on all devices.

    Raises:
      ConfigError: losses or mask do not have an entry for each example.
    """

    def mean_loss(params: PyTree) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array | None]]:
        losses, mask, aux = algorithm.loss(state.variables._replace(params=params), batch, state.context(keys))
        if not losses.shape == mask.shape or losses.shape[:1] != (len(keys),):
            raise ConfigError(
                f"the algorithm's loss has returned losses {losses.shape} with a mask {mask.shape}; both need an entry "
                f"for each of {len(keys)} examples, and no mean"
            )
        weighted = losses if weight is None else losses * weight.reshape(-1, *(1,) * (losses.ndim - 1))
        per_example = {"loss/total": weighted, **aux.metrics}
        sums = jnp.stack([jnp.sum(jnp.where(mask, x, 0.0)) for x in per_example.values()])
        total, count = global_sum((sums, jnp.sum(mask, dtype=jnp.float32)))
        means = dict(zip(per_example, total / jnp.maximum(count, 1.0), strict=True))
        return means["loss/total"], (means, aux.priority)

    grads, (metrics, priority) = jax.grad(mean_loss, has_aux=True)(state.variables.params)
    norm = optax.tree.norm(grads)
    metrics |= {"gradient/norm": norm, "gradient/skipped": 1.0 - jnp.isfinite(norm)}
    return grads, metrics, priority


def apply(algorithm: Algorithm, state: TrainState, grads: PyTree) -> TrainState:
    """Makes one update: a step of the optimiser, then of the target.

    A non-finite gradient changes only the counts. After ``MAX_SKIPPED`` in a row, every gradient does.
    """
    finite = jnp.isfinite(optax.tree.norm(grads)) & (state.skipped < MAX_SKIPPED)
    old = state.variables.params, state.opt_state, state.target
    updates, opt_state = algorithm.optimizer.update(grads, state.opt_state, state.variables.params)
    params = optax.apply_updates(state.variables.params, updates)
    count = state.updates + 1
    new = params, opt_state, algorithm.target(params, state.target, count)
    params, opt_state, target = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
    return state._replace(
        variables=state.variables._replace(params=params),
        target=target,
        opt_state=opt_state,
        updates=count,
        skipped=jnp.where(finite, 0, state.skipped + 1),
    )


def nominal_env_step(state: TrainState, steps: int) -> jax.Array:
    """Returns the nominal count of env steps, float32, after one more iteration of ``steps`` env steps.

    Multiplies, because a float32 sum would stop growing at ``2^24 * steps``.
    """
    return (state.iteration + 1).astype(jnp.float32) * steps
