"""A pool of past versions, and Elo's ratings."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_dist.learners import league
from jaxrl_dist.mesh import by_hand
from jaxrl_dist.types import Algorithm, Context, Rollout, Variables

SIZE, STEPS, ENVS = 3, 7, 4


def rollout(
    reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, version: np.ndarray
) -> Rollout:
    extras = {"version": jnp.asarray(version)}
    parts = map(jnp.asarray, (reward, terminated, truncated))
    return Rollout((), (), *parts, jnp.ones(reward.shape, bool), extras, (), ())


@pytest.mark.parametrize("agents", [pytest.param((1, 1), marks=pytest.mark.case), (2, 3)])
def test_ratings_are_those_of_a_loop_over_games(agents: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    shapes = [(STEPS, ENVS, rows) for rows in agents]
    reward, other = (rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes)
    version = rng.integers(0, SIZE - 1, shapes[1])  # the last version plays no game
    ends = rng.random(shapes[1]) < 0.4
    cut = ends & (rng.random(shapes[1]) < 0.5)
    ratings, mine = rng.normal(1500, 200, SIZE).astype(np.float32), np.float32(1600)

    scores: list[list[float]] = [[] for _ in range(SIZE)]
    for t, env, agent in np.argwhere(ends):
        ours, theirs = reward[t, env].mean(), other[t, env, agent]
        scores[version[t, env, agent]].append(
            1.0 if ours > theirs else 0.5 if ours == theirs else 0.0
        )
    assert {0.0, 1.0} < {score for each in scores for score in each} and not scores[-1]
    met = [at for at in range(SIZE) if scores[at]]
    wanted, rating = ratings.astype(np.float64), float(mine)
    for at in met:
        expected = 1 / (1 + 10 ** ((float(ratings[at]) - float(mine)) / 400))
        change = 32 / len(met) * (np.mean(scores[at]) - expected)
        rating += change
        wanted[at] -= change

    flat = (x.reshape(STEPS, -1) for x in (other, ends & ~cut, cut, version))
    blank = np.zeros((STEPS, ENVS * agents[0]), bool)
    rollouts = rollout(reward.reshape(STEPS, -1), blank, blank, blank), rollout(*flat)
    pool = league.Pool(jnp.asarray(ratings), jnp.asarray(mine), jnp.int32(0), ())
    found = by_hand(lambda pool, *rollouts: league.update_ratings(pool, *rollouts, agents))(
        pool, *rollouts
    )
    np.testing.assert_allclose(found.ratings, wanted, rtol=1e-6)
    assert float(found.rating) == pytest.approx(rating, rel=1e-6)
    assert float(found.rating + found.ratings.sum()) == pytest.approx(
        float(mine + ratings.sum()), rel=1e-6
    )


def test_a_rating_predicts_the_score() -> None:
    """Who scores three quarters of the points stands some 191 points above."""
    pool = league.init_pool(Variables({}, ()), 2).stats
    games = np.ones((4, 1), bool)
    reward = np.array([[1.0], [1.0], [1.0], [-1.0]], np.float32)
    rollouts = rollout(reward, ~games, ~games, games), rollout(-reward, games, ~games, 0 * games)
    step = jax.jit(by_hand(lambda pool: league.update_ratings(pool, *rollouts, (1, 1))))
    for _ in range(300):
        pool = step(pool)
    assert float(pool.rating - pool.ratings[0]) == pytest.approx(400 * np.log10(3), abs=0.01)
    assert pool.ratings[1] == league.START


def test_the_oldest_version_is_replaced() -> None:
    pool = league.init_pool(Variables(jnp.float32(0), jnp.float32(0)), SIZE)
    for update, versions in [(1, [0, 1, 0]), (2, [0, 1, 2]), (3, [3, 1, 2]), (4, [3, 4, 2])]:
        pool = pool._replace(stats=pool.stats._replace(rating=jnp.float32(update + 100)))
        new = Variables(jnp.float32(update), jnp.float32(10 * update))
        same = league.replace_oldest(pool, new, jnp.array(False))
        jax.tree.map(np.testing.assert_array_equal, same, pool)
        pool = league.replace_oldest(pool, new, jnp.array(True))
        np.testing.assert_array_equal(pool.params, versions)
        np.testing.assert_array_equal(pool.stats.stats, 10 * np.array(versions))
        assert (
            pool.params[pool.stats.newest] == update
            and pool.stats.ratings[pool.stats.newest] == update + 100
        )


def counting() -> Algorithm:
    """Acts with its only parameter, and counts the steps of an episode."""

    def policy(variables: Variables, obs: Any, core: Any, context: Context) -> Any:
        return jnp.broadcast_to(variables.params, core.shape) + core, core + 1, {}

    def init(key: jax.Array) -> Variables:
        return Variables(jnp.int32(0), ())

    none: Any = None
    return Algorithm(init, policy, none, none, none, initial_core=lambda rows: jnp.zeros(rows, int))


def test_a_version_is_drawn_for_each_episode() -> None:
    algorithm, rows = league.drawn(counting(), SIZE), 3000
    variables = jax.jit(algorithm.init)(jax.random.key(0))._replace(params=jnp.array([0, 100, 200]))
    core = algorithm.initial_core(rows)
    seen = []
    for step in range(2):
        keys = jax.random.split(jax.random.key(step), rows)
        action, core, extras = jax.jit(algorithm.policy)(
            variables, jnp.zeros(rows), core, Context(keys)
        )
        np.testing.assert_array_equal(action, 100 * extras["version"] + step)
        seen.append(extras["version"])
    np.testing.assert_array_equal(*seen)
    np.testing.assert_allclose(np.bincount(seen[0]), rows / SIZE, rtol=0.1)
    newest = variables._replace(stats=variables.stats._replace(newest=jnp.int32(2)))
    action, _, _ = jax.jit(algorithm.policy)(
        newest, jnp.zeros(rows), algorithm.initial_core(rows), Context()
    )
    np.testing.assert_array_equal(action, 200)


def test_which_version_is_drawn_says_nothing_about_its_action() -> None:
    """Though each version draws from a row's key, as does the choice of one."""

    def policy(variables: Variables, obs: Any, core: Any, context: Context) -> Any:
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, SIZE))(context.keys), core, {}

    algorithm, rows = league.drawn(dataclasses.replace(counting(), policy=policy), SIZE), 3000
    keys = jax.random.split(jax.random.key(0), rows)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    action, _, extras = jax.jit(algorithm.policy)(
        variables, jnp.zeros(rows), algorithm.initial_core(rows), Context(keys)
    )
    together = np.bincount(SIZE * extras["version"] + action, minlength=SIZE**2)
    np.testing.assert_allclose(together, rows / SIZE**2, rtol=0.2)
