"""Observations as networks read them, and the actions that they allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_dist import spaces
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Discrete, MultiDiscrete, Part, Space, channels_first
from jaxrl_dist.types import EnvSpec, PyTree

ILLEGAL = -1e30
"""Logit or value of an illegal action: its probability is exactly 0,
and unlike -inf it never makes a NaN."""


# --- What networks read ---------------------------------------------------------------------------


def input_space(spec: EnvSpec, hidden: Sequence[str] = ()) -> Space:
    """Returns the space of the observations that a network reads:
    without the mask and the ``hidden`` parts.

    Raises:
      ConfigError: a hidden part does not exist, or no part is left.
    """
    space = spec.observation
    parts = {}
    if isinstance(space, dict):
        parts = {name: part for name, part in space.items() if name != spec.mask}
    for name in hidden:
        if name not in parts:
            raise _no_such_part(spec, name, list(parts))
    visible = {name: part for name, part in parts.items() if name not in hidden}
    if parts and not visible:
        raise ConfigError(
            f"--critic-sees {','.join(hidden)} leaves the policy of {spec.id} nothing to observe"
        )
    return visible or space


def _no_such_part(spec: EnvSpec, name: str, parts: Sequence[str]) -> ConfigError:
    names = f"its parts are {', '.join(parts)}" if parts else "its observation has no parts"
    remedy = ""
    may_have_state = spec.family == "jaxmarl" or (spec.backend == "pgx" and spec.num_agents > 1)
    if name == "state" and may_have_state:
        remedy = "; add one with --env-options state=true"
    return ConfigError(
        f"--critic-sees {name}: {spec.id} has no such part to observe; {names}{remedy}"
    )


def preprocess(obs: PyTree, space: Space, dtype: DTypeLike) -> PyTree:
    """Turns observations ``[..., *space.shape]`` into the input of a torso, as ``dtype``.

    Discrete: one-hot ``[..., n]``. MultiDiscrete: one-hots side by side, ``[..., sum(nvec)]``. Box:
    the same shape, divided by the largest upper bound if it is uint8; channels of an image move to
    the last axis, and a grey image gets one. Named parts: a dict of the parts that ``space`` has.
    """
    if isinstance(space, dict):
        return {name: preprocess(obs[name], part, dtype) for name, part in space.items()}
    if isinstance(space, Discrete):
        return jax.nn.one_hot(jnp.asarray(obs, jnp.int32), space.n, dtype=dtype)
    if isinstance(space, MultiDiscrete):
        digits = jnp.asarray(obs, jnp.int32)
        one_hots = [
            jax.nn.one_hot(digits[..., index], size, dtype=dtype)
            for index, size in enumerate(space.nvec)
        ]
        return jnp.concatenate(one_hots, -1)
    x = jnp.asarray(obs, dtype)
    if space.dtype == np.uint8:
        x = x / max(int(space.high.max()), 1)
    if spaces.is_grey(space):
        return x[..., None]
    if channels_first(space.shape):
        return jnp.moveaxis(x, -3, -1)
    return x


def rank(space: Part) -> int:
    """Returns the rank of one preprocessed observation."""
    if spaces.is_grey(space):
        return 3
    if isinstance(space, spaces.Box):
        return len(space.shape)
    return 1


def flatten(x: jax.Array, axes: int) -> jax.Array:
    """Merges the last ``axes`` axes into one; with ``axes`` 0, adds one of length 1."""
    batch = x.shape[: x.ndim - axes]
    return x.reshape(*batch, math.prod(x.shape[len(batch) :]))


def side_by_side(x: PyTree, space: Space) -> jax.Array:
    """Flattens preprocessed observations and joins their parts, ``[..., D]``."""
    parts = spaces.leaves(space)
    return jnp.concatenate(
        [flatten(leaf, rank(parts[path])) for path, leaf in spaces.leaves(x).items()], axis=-1
    )


# --- Sequences in place of single observations, for networks with a recurrent core ----------------


class View(NamedTuple):
    """Some steps of ``N`` sequences, which a network with a core reads in place of observations
    ``[N * L, ...]``.
    """

    now: PyTree
    """[N * L, ...]  the observations of these steps."""
    obs: PyTree
    """[T, N, ...]  the observations of the whole sequences."""
    valid: jax.Array
    """[T, N] bool."""
    core_inputs: jax.Array | None
    """[T, N, I] float32."""
    core: dict[str, PyTree]
    """[N, ...]  each network's state before step 0."""
    rows: jax.Array
    """[N, L] int32  the steps."""


def now(obs: PyTree) -> PyTree:
    """Returns the observations ``[N, ...]`` of a view's steps; other observations unchanged."""
    if isinstance(obs, View):
        return obs.now
    return obs


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Takes steps ``rows [N, L]`` of ``x [T, N, ...]``, as ``[N * L, ...]``."""
    steps = x[rows, jnp.arange(len(rows))[:, None]]
    return steps.reshape(-1, *x.shape[2:])


# --- Legal actions --------------------------------------------------------------------------------


def legal(spec: EnvSpec, obs: PyTree) -> jax.Array | None:
    """Returns which actions are legal, bool: ``[..., n]``,
    or ``[..., sum(nvec)]`` for several components.

    None: all are. If a mask allows nothing, as some environments report after an episode's end,
    all actions count as legal; for ``MultiDiscrete`` this holds for each component.

    Args:
      obs: ``[..., *shape]``.
    """
    if spec.mask is None:
        return None
    sizes = spaces.num_choices(spec.action)
    # the newest of a stack comes last
    mask = jnp.asarray(now(obs)[spec.mask], bool)[..., -sum(sizes) :]
    parts = jnp.split(mask, list(itertools.accumulate(sizes))[:-1], axis=-1)
    allowed = [part | ~jnp.any(part, axis=-1, keepdims=True) for part in parts]
    return jnp.concatenate(allowed, axis=-1)


def masked(values: jax.Array, legal: jax.Array | None) -> jax.Array:
    """Returns logits or action values ``[..., n]`` with
    ``ILLEGAL`` where ``legal [..., n]`` is False.
    """
    if legal is None:
        return values
    return jnp.where(legal, values, ILLEGAL)
