"""Replayed sequences in place of single observations, for networks with a recurrent core."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist.types import PyTree


class View(NamedTuple):
    """Some steps of ``N`` sequences: a network with a core reads it where others read observations ``[N * L, ...]``."""

    now: PyTree  # [N * L, ...]  the observations of these steps
    obs: PyTree  # [T, N, ...]  those of the whole sequences
    valid: jax.Array  # [T, N] bool
    core_inputs: jax.Array | None  # [T, N, I] float32
    core: dict[str, PyTree]  # [N, ...]  each network's state before step 0
    rows: jax.Array  # [N, L] int32  the steps


def now(obs: PyTree) -> PyTree:
    """Returns the observations ``[N, ...]`` of a view's steps; other observations unchanged."""
    return obs.now if isinstance(obs, View) else obs


def unroll_late(
    network: Any,
    params: PyTree,
    obs: PyTree,
    core: PyTree,
    valid: jax.Array,
    core_inputs: jax.Array | None,
    burn_in: int,
) -> tuple[Any, ...]:
    """Unrolls a ``RecurrentNetwork`` over ``T`` steps; the first ``burn_in`` only update the core, without a gradient.

    Returns what ``network.unroll`` does for the other ``T - burn_in``. Source: Kapturowski et al. (2019), section 3.
    """
    if burn_in:
        early, read = jax.tree.map(lambda x: x[:burn_in], (obs, core_inputs))
        *_, core = network.unroll(params, early, core, valid[:burn_in], core_inputs=read)
    late, read = jax.tree.map(lambda x: x[burn_in:], (obs, core_inputs))
    return tuple(network.unroll(params, late, jax.lax.stop_gradient(core), valid[burn_in:], core_inputs=read))


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Takes steps ``rows [N, L]`` of ``x [T, N, ...]``, as ``[N * L, ...]``."""
    taken = x[rows, jnp.arange(len(rows))[:, None]]
    return taken.reshape(-1, *x.shape[2:])
