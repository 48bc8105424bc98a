"""Running statistics against numpy over the whole stream, and what they do to an algorithm."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import box, make_mesh, random_rollout, spec

from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.step import after_step
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.algorithms.pg import PG
from jaxrl_dist.algorithms.wrappers import RunningStats
from jaxrl_dist.spaces import MultiDiscrete
from jaxrl_dist.types import Algorithm, Context, Rollout, Timestep, Variables

DISCOUNT = 0.9
NUM_STEPS, NUM_ENVS = 12, 16
ENV = spec()
PLAIN = PG(hidden_sizes=(4,), discount=DISCOUNT).make(ENV)


@functools.cache
def merger(num_devices: int) -> meshes.Program:
    """``(stats, x [T, B, ...], mask [T, B]) -> stats``."""
    specs = (meshes.REPLICATED, meshes.TIME_BATCH, meshes.TIME_BATCH)
    return meshes.Program(RunningStats.merge, make_mesh(num_devices), specs, meshes.REPLICATED)


def merged(x: np.ndarray, mask: np.ndarray, num_devices: int) -> RunningStats:
    """The statistics of ``x [R, T, B, ...]``, taken in ``R`` times."""
    mesh = make_mesh(num_devices)
    stats = meshes.put(RunningStats.zeros(x.shape[3:]), mesh, meshes.REPLICATED)
    for values, keep in zip(x.astype(np.float32), mask, strict=True):
        stats = merger(num_devices)(stats, *meshes.put((values, keep), mesh, meshes.TIME_BATCH))
    return jax.device_get(stats)


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize(
    "offset, scale", [(0.0, 1.0), (1e4, 1.0), (-3e3, 0.5), (0.0, 1e-3), (1e6, 1e4)]
)
def test_statistics_of_a_stream(offset: float, scale: float, num_devices: int) -> None:
    rng = np.random.default_rng(0)
    shape = (6, NUM_STEPS, NUM_ENVS)
    drift = np.linspace(-2, 2, 6)[:, None, None, None]
    x = (offset + scale * (rng.normal(size=(*shape, 3)) + drift)).astype(np.float32)
    mask = rng.random(shape) < np.linspace(0, 1, NUM_ENVS)  # whole devices may have nothing
    mask[2] = False  # and a whole rollout
    stats = merged(np.where(mask[..., None], x, np.nan), mask, num_devices)
    kept = x[mask].astype(np.float64)
    assert stats.count == len(kept)
    np.testing.assert_allclose(stats.mean, kept.mean(0), rtol=1e-6, atol=1e-5 * scale)
    np.testing.assert_allclose(
        stats.std(), np.sqrt(kept.var(0) + 1e-8), rtol=1e-3 if offset else 1e-5
    )


def test_first_values_far_from_zero() -> None:
    """The first batch is not centred on anything yet."""
    x = 1e4 + np.random.default_rng(0).normal(size=(1, NUM_STEPS, NUM_ENVS, 3)).astype(np.float32)
    stats = merged(x, np.ones(x.shape[:3], bool), 8)
    np.testing.assert_allclose(stats.std(), x.astype(np.float64).std(axis=(0, 1, 2)), rtol=1e-3)


def test_nothing_seen_is_identity() -> None:
    stats = RunningStats.zeros((3,))
    np.testing.assert_array_equal(stats.std(), [1, 1, 1])
    again = merged(
        np.zeros((1, NUM_STEPS, NUM_ENVS, 3)), np.zeros((1, NUM_STEPS, NUM_ENVS), bool), 1
    )
    jax.tree.map(np.testing.assert_array_equal, again, jax.device_get(stats))


def test_deviation_is_right_beyond_float32_counts() -> None:
    """At 2^24 batches a sum of counts stops growing; the variance must not grow in its place."""
    x = np.random.default_rng(0).normal(size=(64, 1, 8)).astype(np.float32)
    merge = merger.__wrapped__(1)  # compiled for these shapes
    full = wrappers.RunningStats(jnp.float32(2**24 * 8), jnp.float32(0), jnp.float32(2**24 * 8))
    mesh = make_mesh(1)
    stats = meshes.put(full, mesh, meshes.REPLICATED)
    for values in x:
        stats = merge(stats, *meshes.put((values, np.ones((1, 8), bool)), mesh, meshes.TIME_BATCH))
    assert stats.count < full.count
    np.testing.assert_allclose(stats.std(), 1, rtol=1e-4)


# --- Observations ---------------------------------------------------------------------------------


def spying(seen: list[Any]) -> Algorithm:
    """An algorithm that notes what it is given."""

    def policy(variables: Variables, obs: Any, core: Any, context: Context) -> Any:
        assert variables.stats == ()
        seen.append(obs)
        return (), core, {}

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> Any:
        assert variables.stats == ()
        seen.append(rollout)
        return ()

    return dataclasses.replace(PLAIN, policy=policy, postprocess=postprocess)


def test_observations_are_scaled_and_clipped() -> None:
    seen: list[Any] = []
    algorithm = wrappers.normalize_observations(spying(seen), ENV)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    obs = np.array([[3.0, -20.0, 1e6], [0.5, 8.0, -11.0]], np.float32)
    algorithm.policy(variables, obs, (), Context())
    np.testing.assert_array_equal(seen[-1], np.clip(obs, -10, 10))  # nothing seen yet: only clipped
    stats = RunningStats(
        jnp.float32(4), jnp.array([1.0, 0.0, 1e6]), jnp.array([4 * 4.0, 4 * 9.0, 4 * 1.0])
    )
    variables = variables._replace(stats=(stats, ()))
    algorithm.policy(variables, obs, (), Context())
    expected = [[1.0, -20 / 3, 0.0], [-0.25, 8 / 3, -10]]
    np.testing.assert_allclose(seen[-1], expected, rtol=1e-5)
    rollout = random_rollout(PLAIN, ENV, 3, 2)
    algorithm.postprocess(variables, rollout._replace(obs=np.stack([obs] * 4)), Context())
    np.testing.assert_allclose(seen[-1].obs, [expected] * 4, rtol=1e-5)


def test_observations_are_counted_once() -> None:
    """Those that a step was taken from: the last one is the first of the next rollout,
    and a reset step takes none.
    """
    algorithm = wrappers.normalize_observations(PLAIN, ENV)
    rollouts = [random_rollout(PLAIN, ENV, NUM_STEPS, NUM_ENVS, seed) for seed in range(3)]
    stats = updated_stats(algorithm, rollouts, 8)[0]
    kept = np.concatenate([rollout.obs[:-1][rollout.valid] for rollout in rollouts]).astype(
        np.float64
    )
    assert stats.count == len(kept)
    np.testing.assert_allclose(stats.mean, kept.mean(0), atol=1e-5)
    np.testing.assert_allclose(stats.std(), kept.std(0), rtol=1e-5)


def test_shared_agents_share_statistics_but_not_ids() -> None:
    """They share a network, to which agents that see the same differ only by their ids."""
    own: Any = {"observation": box(2, 3), "agent": box(2, 2)}
    env = spec({"agents": own, "state": box(6)}, MultiDiscrete((3, 3)))
    seen: list[Any] = []
    algorithm = wrappers.normalize_observations(spying(seen), env)
    rollout = random_rollout(PLAIN, ENV, NUM_STEPS, NUM_ENVS)
    x = np.stack([rollout.obs + 2, rollout.obs - 5], axis=2)  # [T + 1, B, 2, 3]
    ids = np.broadcast_to(np.eye(2, dtype=np.float32), (*x.shape[:2], 2, 2))
    obs = {"agents": {"observation": x, "agent": ids}, "state": x.reshape(*x.shape[:2], 6)}
    stats = updated_stats(algorithm, [rollout._replace(obs=obs)] * 2, 8)
    assert list(stats[0]) == ["agents/observation", "state"]
    kept = np.concatenate([x[:-1][rollout.valid].reshape(-1, 3)] * 2).astype(np.float64)
    shared = stats[0]["agents/observation"]
    assert shared.count == len(kept)
    np.testing.assert_allclose(shared.mean, kept.mean(0), rtol=1e-5)
    np.testing.assert_allclose(shared.std(), kept.std(0), rtol=1e-5)

    same = jax.tree.map(
        lambda x: x[0], {**obs, "agents": {"observation": np.ones_like(x), "agent": ids}}
    )
    algorithm.policy(Variables((), stats), same, (), Context())
    read = seen[-1]["agents"]
    np.testing.assert_array_equal(read["agent"], ids[0])
    expected = (1 - kept.mean(0)) / kept.std(0)
    np.testing.assert_allclose(
        read["observation"], np.broadcast_to(expected, x.shape[1:]), rtol=1e-4
    )


def observing(algorithm: Algorithm, num_devices: int) -> meshes.Program:
    """``(stats, rollout) -> stats``."""

    def update_stats(stats: Any, rollout: Rollout) -> Any:
        return algorithm.updated_stats(Variables((), stats), rollout, Context())

    specs = (meshes.REPLICATED, meshes.ROLLOUT)
    return meshes.Program(update_stats, make_mesh(num_devices), specs, meshes.REPLICATED)


def updated_stats(algorithm: Algorithm, rollouts: list[Rollout], num_devices: int) -> Any:
    """The statistics after consecutive rollouts."""
    mesh = make_mesh(num_devices)
    program = observing(algorithm, num_devices)
    stats = meshes.put(jax.jit(algorithm.init)(jax.random.key(0)).stats, mesh, meshes.REPLICATED)
    for rollout in rollouts:
        placed = [
            meshes.put(x, mesh, where) for x, where in zip(rollout, meshes.ROLLOUT, strict=True)
        ]
        stats = program(stats, Rollout(*placed))
    return jax.device_get(stats)


# --- Rewards --------------------------------------------------------------------------------------


def naive_returns(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """``VecNormalize``'s discounted returns ``[steps, B]`` in float64,
    one environment and one step at a time.
    """
    returns = np.zeros(rewards.shape)
    for b in range(rewards.shape[1]):
        total = 0.0
        for t in range(len(rewards)):
            total = DISCOUNT * total + float(rewards[t, b]) if valid[t, b] else 0.0
            returns[t, b] = total
    return returns


@pytest.mark.parametrize("num_devices", [1, 8])
def test_rewards_are_scaled_by_the_return(num_devices: int) -> None:
    """Over several rollouts, with resets in them and at their seams;
    the return travels in the policy state.
    """
    seen: list[Any] = []
    algorithm = wrappers.scale_rewards(spying(seen), DISCOUNT)
    whole = random_rollout(PLAIN, ENV, 4 * NUM_STEPS, NUM_ENVS)
    returns = naive_returns(whole.reward, whole.valid)
    core = jax.device_get(algorithm.initial_core(NUM_ENVS))
    stats = meshes.put(
        jax.jit(algorithm.init)(jax.random.key(0)).stats, make_mesh(num_devices), meshes.REPLICATED
    )
    program = observing(algorithm, num_devices)
    start = core
    advance = jax.jit(lambda core, step: after_step(algorithm, core, start, (), step))
    for n in range(4):
        rows = slice(n * NUM_STEPS, (n + 1) * NUM_STEPS)
        part: Rollout = jax.tree.map(lambda x: x[rows], whole)._replace(core=core)
        for t in range(NUM_STEPS):
            step = Timestep(
                part.obs[t], part.reward[t], part.terminated[t], part.truncated[t], part.valid[t]
            )
            core = jax.device_get(advance(core, step))
            np.testing.assert_allclose(core[0], returns[rows][t], rtol=1e-5, atol=1e-5)
        part = part._replace(final_core=core)
        # What scales is what was known before this rollout.
        before = returns[: rows.start][whole.valid[: rows.start]]
        std = np.sqrt(before.var() + 1e-8) if n else 1.0
        variables = Variables((), jax.device_get(stats))
        big = part._replace(reward=np.where(part.reward > 0.5, 1e3, part.reward).astype(np.float32))
        algorithm.postprocess(variables, big, Context())
        np.testing.assert_allclose(seen[-1].reward, np.clip(big.reward / std, -10, 10), rtol=1e-4)
        assert seen[-1].core == seen[-1].final_core == ()
        placed = [
            meshes.put(x, make_mesh(num_devices), s)
            for x, s in zip(part, meshes.ROLLOUT, strict=True)
        ]
        stats = program(stats, Rollout(*placed))
    final = jax.device_get(stats)[0]
    assert final.count == whole.valid.sum()
    np.testing.assert_allclose(final.mean, returns[whole.valid].mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(final.std(), returns[whole.valid].std(), rtol=1e-4)
