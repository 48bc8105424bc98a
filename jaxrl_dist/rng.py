"""Random keys as a function of their purpose, never of where they are used.

A key is derived from the seed, a stream, a step and the *global* index of an environment or example
by ``jax.random.fold_in``. Nothing is stored or split along the way, so a result does not depend on
the number of devices, on the plan or on where a run was interrupted.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
import numpy as np

RESET = 2**32 - 1
"""The step whose keys make the first observations: training does not reach it."""


def rollout_step(iteration: jax.Array | int) -> jax.Array:
    """The step, uint32, whose keys start rollout ``iteration``; ``RESET`` for the first rollout.

    These numbers count down, while the numbers of training's steps count up.
    """
    return jnp.uint32(RESET) - jnp.asarray(iteration, jnp.uint32)


class Stream(enum.IntEnum):
    """The purpose of a key; streams share no random numbers."""

    INIT = 0
    ACT = 1
    ENV = 2
    LEARN = 3
    EVALUATE = 4
    PRIORITIZE = 5
    LEARN_MORE = 6
    CONFIRM = 7


def stream(seed: int | jax.Array, name: Stream) -> jax.Array:
    """The key, a scalar, of one stream of the run that
    ``seed`` (an integer, or a key itself) names.
    """
    if isinstance(seed, int):
        key = jax.random.key(seed)
    else:
        key = seed
    return jax.random.fold_in(key, int(name))


def of_policy(key: jax.Array, index: int) -> jax.Array:
    """The key of a stream for policy ``index`` of several in one environment;
    for the first it is ``key`` itself.

    No iteration and no step of an environment reaches ``2^31``,
    so nothing else derives from the intermediate key.
    """
    if index == 0:
        return key
    return jax.random.fold_in(jax.random.fold_in(key, np.uint32(2**31)), index)


def raw(key: jax.Array) -> jax.Array:
    """A key as uint32 ``[2]``, for libraries that keep keys in states, which are saved."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key)
    return key


def host_seed(seed: int, number: int) -> int:
    """The seed, below ``2^31``, of the environments on
    the host that are made after a run's first ones.
    """
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) & 0x7FFFFFFF


def per_index(key: jax.Array, index: jax.Array) -> jax.Array:
    """One key for each integer of ``index``, of any shape."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index.reshape(-1))
    return keys.reshape(index.shape)


def per_step(key: jax.Array, step: jax.Array, index: jax.Array) -> jax.Array:
    """Keys ``[T, B]`` for the steps ``[T]``, counted from the start of training,
    of the environments ``[B]``.
    """
    return jax.vmap(per_index, (0, None))(per_index(key, step), index)
