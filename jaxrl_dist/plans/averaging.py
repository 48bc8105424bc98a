"""Local SGD: members of a population learn separately for some iterations,
and then take the mean of their networks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_dist.types import PyTree, TrainState


def averaging(state: TrainState, running: jax.Array, every: int | None) -> TrainState:
    """Returns the state after an iteration, ``averaged`` if that is due.

    Args:
      running: ``[M]`` bool, the members that are not done.
      every: iterations after which the networks of all members become their mean; None: never.
    """
    if every is None or running.size == 1:
        return state
    due = jnp.max(jnp.where(running, state.iteration, 0)) % every == 0
    learned = state.variables, state.target, state.opt_state
    learned = jax.lax.cond(due, lambda *x: averaged(x, running), lambda *x: x, *learned)
    return state._replace(**dict(zip(("variables", "target", "opt_state"), learned, strict=True)))


def averaged(learned: PyTree, running: jax.Array) -> PyTree:
    """Replaces arrays ``[M, ...]`` of the members that are ``running [M]`` by their mean;
    integers stay.

    For networks and optimiser states, this is local SGD (Stich 2019,
    https://arxiv.org/abs/1805.09767, algorithm 1).
    """
    weights = running / jnp.maximum(running.sum(), 1)

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        chosen = running.reshape(-1, *[1] * (x.ndim - 1))
        # Zero weights would not hide NaN or infinity in a member that has ended.
        total = jnp.tensordot(
            weights.astype(x.dtype), jnp.where(chosen, x, 0), axes=1, precision="highest"
        )
        return jnp.where(chosen, total, x)

    return jax.tree.map(mean, learned)
