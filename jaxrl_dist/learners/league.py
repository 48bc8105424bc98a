"""A league: a policy that acts with past versions of another, and the ratings of both.

Ratings are after Elo (1978), "The Rating of Chessplayers, Past and Present". A version enters
the pool with the rating that the policy has at that time.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist import mesh
from jaxrl_dist.types import Acted, Algorithm, Context, PyTree, Rollout, Timestep, Variables

START = 1500.0
"""Initial rating; only differences between ratings mean something."""
GAIN = 32.0
"""Elo's K: the change of a rating by one game that was won against all odds."""


class Copies(NamedTuple):
    """How a policy copies another."""

    source: str
    """The policy that is copied."""
    every: int
    """Updates of the source between two copies."""
    size: int = 1
    """Versions in the pool."""
    agents: tuple[int, int] = (1, 1)
    """Rows of the batch in each environment: of the source, and of the copy."""


class Pool(NamedTuple):
    """The running statistics of a policy that acts with ``P`` versions of another;
    its parameters are ``[P, ...]``.
    """

    ratings: jax.Array
    """[P] float32."""
    rating: jax.Array
    """Float32 scalar, of the policy that is copied."""
    newest: jax.Array
    """Int32 scalar, the index of the version that was copied last."""
    stats: PyTree
    """[P, ...], the versions' own."""


def init_pool(variables: Variables, size: int) -> Variables:
    """Returns a pool of ``size`` equal versions."""
    params, stats = jax.tree.map(lambda x: jnp.repeat(x[None], size, axis=0), tuple(variables))
    return Variables(params, Pool(jnp.full(size, START), jnp.float32(START), jnp.int32(0), stats))


def replace_oldest(pool: Variables, variables: Variables, due: jax.Array) -> Variables:
    """Replaces the oldest version by ``variables`` where ``due``, a bool scalar, is True."""
    ratings, rating, newest, stats = pool.stats
    oldest = (newest + 1) % len(ratings)

    def replaced(versions: jax.Array, new: jax.Array) -> jax.Array:
        return versions.at[oldest].set(jnp.where(due, new, versions[oldest]))

    before = Variables(pool.params, stats), ratings
    (params, stats), ratings = jax.tree.map(replaced, before, (variables, rating))
    return Variables(params, Pool(ratings, rating, jnp.where(due, oldest, newest), stats))


def expected(rating: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the expected score, between 0 and 1, against another rating: Elo (1978),
    logistic form.
    """
    return 1 / (1 + 10 ** ((other - rating) / 400))


def update_ratings(pool: Pool, mine: Rollout, theirs: Rollout, agents: tuple[int, int]) -> Pool:
    """Returns the pool with the ratings after a rollout's games, of all devices.

    A game ends with an episode of a copy. The side with the larger reward in the last step wins,
    and equal rewards are a draw; if the policy that is copied has several agents, their mean reward
    counts. Elo's (1978) rating after a game is ``R + K * (score - expected)``. Here all games of a
    rollout count as one, shared equally by the ``n`` versions that finished any:
    ``R += K / n * sum(score - expected)`` over these versions, with the mean score against each.
    Each version loses what the policy gains from it.

    Args:
      mine: of the policy that is copied, ``[T, B * agents[0]]``.
      theirs: of its copies, ``[T, B * agents[1]]``.
    """
    steps = len(mine.reward)
    reward = mine.reward.reshape(steps, -1, agents[0]).mean(axis=-1, keepdims=True)
    other = theirs.reward.reshape(steps, -1, agents[1])
    score = (0.5 * (1 + jnp.sign(reward - other))).reshape(-1)
    over = (theirs.terminated | theirs.truncated).reshape(-1)
    played = theirs.extras["version"].reshape(-1)[:, None] == jnp.arange(len(pool.ratings))[None]
    played = (played & over[:, None]).astype(jnp.float32)
    games, points = mesh.global_sum((played.sum(axis=0), (played * score[:, None]).sum(axis=0)))
    rating = jnp.broadcast_to(pool.rating, pool.ratings.shape)
    surprise = jnp.where(
        games > 0, points / jnp.maximum(games, 1) - expected(rating, pool.ratings), 0.0
    )
    change = GAIN * surprise / jnp.maximum((games > 0).sum(), 1)
    return pool._replace(rating=pool.rating + change.sum(), ratings=pool.ratings - change)


def drawn(algorithm: Algorithm, size: int) -> Algorithm:
    """Returns an algorithm that acts with a pool of versions:
    each agent draws one for each episode.

    All versions choose an action, and that of the drawn version is taken. Without keys, the newest
    version acts. The policy state is ``(version [B], the version's state)``; version -1 is still to
    be drawn.

    Args:
      algorithm: of one version; it does not learn.
    """

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        pool: Pool = variables.stats
        version, inner = core
        if context.keys is None:
            choice = jnp.broadcast_to(pool.newest, version.shape)
        else:
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(context.keys, 1)
            choice = jax.vmap(lambda key: jax.random.randint(key, (), 0, size))(keys)
        version = jnp.where(version < 0, choice, version)
        versions = Variables(variables.params, pool.stats)
        acted = jax.vmap(algorithm.policy, in_axes=(0, None, None, None))(
            versions, obs, inner, context
        )[:2]
        action, inner = jax.tree.map(lambda x: x[version, jnp.arange(len(version))], acted)
        return action, (version, inner), {"version": version}

    def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        return core[0], algorithm.feedback(core[1], action, step)

    def initial_core(num_envs: int) -> PyTree:
        return jnp.full(num_envs, -1, jnp.int32), algorithm.initial_core(num_envs)

    return dataclasses.replace(
        algorithm,
        init=lambda key: init_pool(algorithm.init(key), size),
        policy=policy,
        feedback=feedback,
        initial_core=initial_core,
    )
