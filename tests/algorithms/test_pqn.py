"""PQN against a loop in float64 and rlax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rlax
from probes import acted, perturbed, random_rollout, spec

from jaxrl_dist.algorithms.pqn import PQN
from jaxrl_dist.nn import networks
from jaxrl_dist.types import Context, Rollout, Variables

SPEC = spec()
T, B = 12, 16
CONFIG = PQN(hidden_sizes=(8,), discount=0.9, q_lambda=0.7)


@functools.cache
def problem() -> tuple[Any, Variables, Rollout, dict[str, np.ndarray], np.ndarray]:
    """What PQN makes of a rollout in which it acted,
    and the values ``[T + 1, B, A]`` of all actions.
    """
    algorithm = CONFIG.make(SPEC)
    variables = Variables(perturbed(algorithm.init(jax.random.key(0)).params), ())
    rollout = acted(algorithm, variables, random_rollout(algorithm, SPEC, T, B))
    assert rollout.terminated.any() and rollout.truncated.any() and not rollout.valid.all()
    batch = jax.jit(algorithm.postprocess)(variables, rollout, Context())
    network = networks.q_network(
        CONFIG, SPEC.observation, 3, num_atoms=1, dueling=False, noisy=False
    )
    q = np.stack(
        [np.asarray(network.apply(variables.params, obs, None))[..., 0] for obs in rollout.obs]
    )
    return algorithm, variables, rollout, jax.device_get(batch), q


def by_time(x: np.ndarray) -> np.ndarray:
    """Examples, environment-major, as ``[T, B]``."""
    return x.reshape(B, T).T


def test_targets_are_lambda_returns_of_the_best_values() -> None:
    """Across terminations, truncations and resets: algorithm 1 of Gallici et al. (2024)."""
    _, _, w, batch, q = problem()
    best = q.astype(np.float64).max(axis=-1)
    expected = np.zeros((T, B))
    for b in range(B):
        for t in reversed(range(T)):
            successor = best[t + 1, b]
            if w.terminated[t, b]:
                successor = 0.0
            elif not w.truncated[t, b] and t + 1 < T:
                successor = (1 - CONFIG.q_lambda) * successor + CONFIG.q_lambda * expected[t + 1, b]
            expected[t, b] = w.reward[t, b] + CONFIG.discount * successor
    found = by_time(batch["value_target"])
    np.testing.assert_allclose(found[w.valid], expected[w.valid], rtol=1e-5, atol=1e-5)


def test_errors_are_those_of_rlax() -> None:
    """Of one long sequence, whose trace is cut by a
    discount or a lambda of 0 where an episode ends.
    """
    algorithm, variables, w, batch, q = problem()
    discount = CONFIG.discount * (1 - w.terminated.astype(np.float32))
    trace = CONFIG.q_lambda * (1 - w.truncated.astype(np.float32))
    error = jax.vmap(rlax.q_lambda, in_axes=1, out_axes=1)(
        q[:-1], w.action, w.reward, discount, q[1:], trace
    )
    losses, mask, aux = jax.jit(algorithm.loss)(variables, batch, Context())
    np.testing.assert_array_equal(by_time(mask), w.valid)
    np.testing.assert_allclose(
        by_time(losses)[w.valid], 0.5 * np.square(error)[w.valid], rtol=1e-3, atol=1e-5
    )
    taken = np.take_along_axis(q[:-1], w.action[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(by_time(aux.metrics["q/mean"]), taken, rtol=1e-5, atol=1e-5)


def test_epsilon_falls_linearly() -> None:
    algorithm = PQN(hidden_sizes=(8,), epsilon_start=0.9, epsilon_end=0.3, epsilon_steps=1000).make(
        SPEC
    )
    variables, obs = jax.jit(algorithm.init)(jax.random.key(0)), jnp.ones((20_000, 3))
    act, keys = jax.jit(algorithm.policy), jax.random.split(jax.random.key(1), 20_000)
    greedy, _, extras = jax.jit(algorithm.policy)(variables, obs[:1], (), Context())
    for env_step, epsilon in ((0.0, 0.9), (500.0, 0.6), (1e6, 0.3)):
        action, _, sampled = act(variables, obs, (), Context(keys, jnp.float32(env_step)))
        assert abs(float((action != greedy[0]).mean()) - epsilon * 2 / 3) < 0.015
        # of the best action all the same
        np.testing.assert_allclose(sampled["value"], extras["value"][0], rtol=1e-5)
