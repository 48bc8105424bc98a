"""The probabilities of a policy's actions against what it draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parts
import pytest
import runs
from probes import perturbed, spec

from jaxrl_dist.algorithms import ALGORITHMS, config_class, wrappers
from jaxrl_dist.envs.source import find
from jaxrl_dist.spaces import Box
from jaxrl_dist.types import Algorithm, Context, EnvSpec, Variables

LOW, HIGH = -1.0, 3.0
DISCRETE = spec()
CONTINUOUS = spec(action=Box((1,), np.dtype(np.float32), np.float32([LOW]), np.float32([HIGH])))
LEGAL = find(parts.Grid("state")).spec
"""Four actions, some of them illegal."""
N = 4000
EPSILON = {"epsilon_start": 0.5, "epsilon_end": 0.5}
OFF = {**EPSILON, "noisy": False}
# with the env step at which it acts
CASES: dict[str, tuple[str, EnvSpec, float, dict[str, Any]]] = {
    "ppo": ("ppo", DISCRETE, 0, {}),
    "ppo-continuous": ("ppo", CONTINUOUS, 0, {"noise_correlation": 0.6}),
    "a2c-gru": (
        "a2c",
        CONTINUOUS,
        0,
        {"core": "gru", "core_size": 4, "core_inputs": "action,reward"},
    ),
    "pg": ("pg", DISCRETE, 0, {}),
    "impala": ("impala", LEGAL, 0, {}),
    "appo": ("appo", CONTINUOUS, 0, {}),
    "dqn": ("dqn", LEGAL, 5_000, {"epsilon_steps": 10_000}),
    "dqn-repeating": ("dqn", LEGAL, 0, {**EPSILON, "ez_greedy": True}),
    "rainbow": ("rainbow", DISCRETE, 0, OFF),
    "pqn": ("pqn", LEGAL, 50_000, {}),
    "r2d2": ("r2d2", DISCRETE, 0, {"core_size": 4}),
    "sac": ("sac", CONTINUOUS, 2_000, {"noise_correlation": 0.6}),
    "sac-random": ("sac", CONTINUOUS, 0, {}),
    "sac-discrete": ("sac", LEGAL, 2_000, {}),
    "sac-discrete-random": ("sac", LEGAL, 0, {}),
    "iql": ("iql", CONTINUOUS, 0, {}),
    "iql-discrete": ("iql", LEGAL, 0, {}),
    "marwil": ("marwil", CONTINUOUS, 0, {"noise_correlation": 0.6}),
    "bc": ("bc", LEGAL, 0, {}),
    "sac-gru": ("sac", DISCRETE, 2_000, {"core": "gru", "core_size": 4}),
}
_NONE = "ddpg", "td3", "es", "ars", "qmix", "rainbow", "alphazero", "muzero"
NONE: dict[str, dict[str, bool]] = {name: {} for name in _NONE}
NONE |= {"dqn": {"parameter_noise": True}}


def scaled(name: str, env: EnvSpec, fields: dict[str, Any]) -> Algorithm:
    """An algorithm that scales observations."""
    return wrappers.normalize_observations(
        config_class(name)(hidden_sizes=(4,), **fields).make(env), env
    )


def made(name: str, env: EnvSpec, fields: dict[str, Any]) -> tuple[Algorithm, Variables]:
    """An algorithm that scales observations, and variables away from their start."""
    algorithm = scaled(name, env, fields)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    seen, others = variables.stats
    stats = jax.tree.map(lambda x: x + 1.5, seen), others
    return algorithm, Variables(perturbed(variables.params), stats)


@pytest.mark.parametrize(
    "name", runs.cases(CASES, "ppo-continuous", "dqn-repeating", "r2d2", "sac", "sac-discrete")
)
def test_draws_have_these_probabilities(name: str) -> None:
    """Of one observation, beside the log-probability that actor-critics store;
    all of them add up to 1.
    """
    kind, env, env_step, fields = CASES[name]
    algorithm, variables = made(kind, env, fields)
    one: Any = np.float32([0.5, -1, 2])
    if env is LEGAL:
        one = {"observation": np.float32([0.5, -1]), "mask": np.array([True, False, True, True])}
    obs = jax.tree.map(lambda x: np.stack([x] * N), one)
    core, context = (
        algorithm.initial_core(N),
        Context(jax.random.split(jax.random.key(1), N), jnp.float32(env_step)),
    )
    if kind == "r2d2":  # environments have different epsilons
        core = jax.tree.map(lambda x: jnp.broadcast_to(x[N // 20], x.shape), core)
    if "ez_greedy" in fields:
        # an illegal action ends
        core = core._replace(left=jnp.arange(N) % 2, action=jnp.arange(N) // 2 % 2)
    action, _, extras = jax.jit(algorithm.policy)(variables, obs, core, context)
    assert algorithm.log_prob is not None
    log_prob = jax.jit(algorithm.log_prob)
    if "log_prob" in extras:
        np.testing.assert_allclose(
            log_prob(variables, obs, core, action, context), extras["log_prob"], atol=1e-5
        )

    if env is CONTINUOUS:
        half = (
            np.linspace(-1, 1, N + 1) * 12 if kind != "sac" else np.tanh(np.linspace(-7, 7, N + 1))
        )
        edges = (LOW + HIGH) / 2 + (HIGH - LOW) / 2 * half
        middle = ((edges[1:] + edges[:-1]) / 2).astype(np.float32)
        mass = np.exp(
            np.float64(log_prob(variables, obs, core, middle[:, None], context))
        ) * np.diff(edges)
        assert mass.sum() == pytest.approx(1, abs=5e-3)
        below = np.searchsorted(np.sort(action[:, 0]), edges[1:]) / N
        # Kolmogorov: P(above 0.03) = 1e-3
        np.testing.assert_allclose(below, np.cumsum(mass), atol=0.03)
        return
    actions = range(4 if env is LEGAL else 3)
    rows = [log_prob(variables, obs, core, np.full(N, a, np.int32), context) for a in actions]
    probs = np.exp(np.float64(rows))
    np.testing.assert_allclose(probs.sum(axis=0), 1, atol=1e-5)
    counts = np.bincount(action, minlength=len(rows))
    np.testing.assert_allclose(counts / N, probs.mean(axis=1), atol=0.035)


@pytest.mark.parametrize("name", NONE)
def test_others_have_none(name: str) -> None:
    env = CONTINUOUS if name in ("ddpg", "td3") else DISCRETE
    assert scaled(name, env, NONE[name]).log_prob is None
    assert {*NONE} | {kind for kind, *_ in CASES.values()} == {*ALGORITHMS}
