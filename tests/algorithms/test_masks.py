"""Illegal actions: no policy draws one, and no loss or target reads anything of them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parts
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import algorithms
from jaxrl_dist.envs.source import find
from jaxrl_dist.mesh import by_hand
from jaxrl_dist.nn.distributions import Categorical, EpsilonGreedy, policy_head
from jaxrl_dist.nn.observations import ILLEGAL, masked
from jaxrl_dist.spaces import Discrete, MultiDiscrete
from jaxrl_dist.types import Algorithm, Context, Rollout, Variables

LEGAL = np.array([[True, False, True, True], [False, False, True, False], [True, True, True, True]])
NEVER = 3
"""The action that ``roll`` makes illegal everywhere."""


# --- Distributions --------------------------------------------------------------------------------


def test_masked_categorical_equals_one_over_legal_actions() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 4)) * 3
    found = policy_head(Discrete(4)).distribution(
        jnp.asarray(logits, jnp.float32), jnp.asarray(LEGAL)
    )
    for row, legal in enumerate(LEGAL):
        weights = np.where(legal, np.exp(logits[row]), 0.0)
        probs = weights / weights.sum()
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        assert float(found.entropy()[row]) == pytest.approx(entropy, abs=1e-6)
        for action in np.flatnonzero(legal):
            log_prob = found.log_prob(jnp.full(3, action))[row]
            assert float(log_prob) == pytest.approx(math.log(probs[action]), abs=1e-5)
    keys = jax.random.split(jax.random.key(0), (3000, 3))
    drawn = np.asarray(jax.vmap(found.sample)(keys))
    assert (
        all(LEGAL[row, drawn[:, row]].all() for row in range(3))
        and LEGAL[range(3), found.mode()].all()
    )


def test_masked_logits_have_zero_gradients() -> None:
    def total(logits: jax.Array) -> jax.Array:
        found = Categorical(masked(logits, jnp.asarray(LEGAL)))
        return jnp.sum(found.entropy() + found.log_prob(jnp.array([0, 2, 1])))

    gradient = np.asarray(jax.grad(total)(jnp.array([[1e3, 1e4, -1e3, 0.0]] * 3)))
    assert np.isfinite(gradient).all() and (gradient[~LEGAL] == 0).all()


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_spreads_epsilon_over_the_legal_actions(epsilon: float) -> None:
    q = np.array([[1.0, 9.0, 2.0, 0.0], [5.0, 4.0, -3.0, 2.0], [0.0, 1.0, 2.0, 3.0]], np.float32)
    found = EpsilonGreedy(jnp.asarray(q), epsilon, jnp.asarray(LEGAL))
    assert found.mode().tolist() == [2, 2, 3]
    for row, legal in enumerate(LEGAL):
        best = int(found.mode()[row])
        for action in range(4):
            chance = legal[action] * epsilon / legal.sum() + (1 - epsilon) * (action == best)
            log_prob = float(found.log_prob(jnp.full(3, action))[row])
            assert math.exp(log_prob) == pytest.approx(chance, abs=1e-6)
    drawn = np.asarray(jax.vmap(found.sample)(jax.random.split(jax.random.key(1), (2000, 3))))
    assert all(LEGAL[row, drawn[:, row]].all() for row in range(3))


def test_each_component_of_an_action_has_its_own_mask() -> None:
    head = policy_head(MultiDiscrete((2, 2)))
    legal = jnp.array([[True, False, True, True]])
    found = head.distribution(jnp.array([[0.0, 50.0, 0.0, 0.0]]), legal)
    drawn = np.asarray(jax.vmap(found.sample)(jax.random.split(jax.random.key(0), (500, 1))))
    assert set(drawn[:, 0, 0]) == {0} and set(drawn[:, 0, 1]) == {0, 1}
    assert float(found.entropy()[0]) == pytest.approx(math.log(2), abs=1e-6)


# --- Losses ---------------------------------------------------------------------------------------


def roll(
    algorithm: Algorithm, variables: Variables, spec: Any, steps: int, num_envs: int = 6
) -> Rollout:
    """Acts on random observations of ``parts.Grid`` in which ``NEVER`` is never legal."""
    rng, core, rows = np.random.default_rng(0), algorithm.initial_core(num_envs), []
    first = core
    for _ in range(steps + 1):
        numbers = rng.random((num_envs, 2)).astype(np.float32)
        mask = rng.random((num_envs, 4)) < 0.7
        mask[:, 0], mask[:, NEVER] = True, False
        obs = {"observation": numbers, "mask": mask}
        before = core
        action, core, extras = jax.jit(algorithm.policy)(
            variables,
            obs,
            core,
            Context(jax.random.split(jax.random.key(len(rows)), num_envs), jnp.float32(1e6)),
        )
        assert mask[range(num_envs), action].all()
        rows.append((obs, action, extras))
    obs, action, extras = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    action, extras = jax.tree.map(lambda x: x[:-1], (action, extras))
    ended = jnp.asarray(rng.random((steps, num_envs)) < 0.2)
    reward = jnp.asarray(rng.normal(size=(steps, num_envs)), jnp.float32)
    return Rollout(obs, action, reward, ended, ~ended & False, ended | True, extras, first, before)


def shifted(variables: Variables, action: int, atoms: int) -> Variables:
    """Adds a lot to the last layers' bias of one action."""

    def shift(path: Any, x: jax.Array) -> jax.Array:
        if getattr(path[-1], "key", "") != "bias" or x.shape != (4 * atoms,):
            return x
        return x.reshape(4, atoms).at[action].add(jnp.linspace(30.0, 50.0, atoms)).reshape(-1)

    return variables._replace(params=jax.tree_util.tree_map_with_path(shift, variables.params))


ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"normalize_advantages": False}),
    "a2c": ("a2c", {}),
    "pg": ("pg", {}),
    "impala": ("impala", {}),
    "appo": ("appo", {"normalize_advantages": False}),
    "ppo-gru": ("ppo", {"normalize_advantages": False, "core": "gru", "core_size": 5}),
    "pqn": ("pqn", {}),
    "dqn": ("dqn", {"double": True}),
    "dqn-cql": ("dqn", {"cql_weight": 1.0}),
    "dqn-cql-floor": ("dqn", {"cql_weight": 1.0, "cql_floor": True}),
    "dqn-single": ("dqn", {"double": False}),
    "dqn-atoms": ("dqn", {"num_atoms": 5, "value_min": -5.0, "value_max": 5.0}),
    "dqn-quantiles": ("dqn", {"num_atoms": 5, "quantiles": "fixed"}),
    "dqn-munchausen": ("dqn", {"num_atoms": 5, "quantiles": "fixed", "munchausen": 0.9}),
    "r2d2": (
        "r2d2",
        {"dueling": False, "burn_in": 2, "sequence_length": 3, "n_step": 2, "core_size": 5},
    ),
    "sac": ("sac", {"cql_weight": 1.0}),
    "sac-quantiles": ("sac", {"num_atoms": 5, "quantiles": "fixed", "drop_quantiles": 1}),
    "iql": ("iql", {}),
    "marwil": ("marwil", {"n_step": 3}),
}


@pytest.mark.parametrize("name", runs.cases(ALGORITHMS, "dqn"))
def test_losses_ignore_outputs_of_illegal_actions(name: str) -> None:
    """A large number there changes nothing; the same number at a legal action does."""
    algorithm_name, fields = ALGORITHMS[name]
    spec = find(parts.Grid("state")).spec
    config = algorithms.config_class(algorithm_name)(hidden_sizes=(5,), **fields)
    algorithm = config.make(spec)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    rollout = roll(algorithm, variables, spec, (algorithm.window or 4) if algorithm.replay else 4)
    target = algorithm.initial_target(variables.params)
    atoms = fields.get("num_atoms", 1)

    def losses(action: int | None) -> np.ndarray:
        changed = variables if action is None else shifted(variables, action, atoms)
        changed_target = target
        if action is not None and jax.tree.leaves(target):
            changed_target = shifted(variables._replace(params=target), action, atoms).params
        context = Context(jax.random.split(jax.random.key(1), 6), jnp.float32(1e6), changed_target)
        batch = by_hand(algorithm.postprocess)(changed, rollout, context)
        keys = jax.random.split(jax.random.key(2), len(jax.tree.leaves(batch)[0]))
        return np.asarray(algorithm.loss(changed, batch, context._replace(keys=keys))[0])

    plain = losses(None)
    assert np.isfinite(plain).all() and (np.abs(plain) < abs(ILLEGAL) / 1e9).all()
    np.testing.assert_allclose(losses(NEVER), plain, rtol=1e-5, atol=1e-6)
    assert not np.allclose(losses(0), plain, rtol=1e-2, atol=1e-2)


def test_sac_aims_at_half_the_entropy_of_random_legal_actions() -> None:
    algorithm = algorithms.config_class("sac")(hidden_sizes=(5,)).make(
        find(parts.Grid("state")).spec
    )
    params = jax.jit(algorithm.init)(jax.random.key(0)).params | {"log_temperature": jnp.float32(1)}
    obs = {"observation": np.ones((3, 2), np.float32), "mask": LEGAL}
    zeros, ones = np.zeros(3, np.float32), np.ones(3, bool)
    batch = {
        "obs": obs,
        "next_obs": obs,
        "action": np.int32([0, 2, 1]),
        "reward": zeros,
        "discount": zeros,
    }
    context = Context(
        jax.random.split(jax.random.key(1), 3), target=algorithm.initial_target(params)
    )
    losses, _, aux = jax.jit(algorithm.loss)(
        Variables(params, ()), {**batch, "valid": ones}, context
    )
    # the temperature's loss
    excess = losses - aux.metrics["loss/critic"] - aux.metrics["loss/actor"]
    wanted = aux.metrics["policy/entropy"] - excess
    np.testing.assert_allclose(wanted, 0.5 * np.log(LEGAL.sum(axis=-1)), atol=1e-5)


# --- Runs -----------------------------------------------------------------------------------------

OFF = {"replay_capacity": 2048, "batch_size": 32, "learning_starts": 200, "replay_ratio": 1 / 8}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"num_envs": 16, "rollout_length": 32},
    "dqn": {"num_envs": 8, "epsilon_steps": 4000, **OFF},
}
PENALTY = -9.0
"""Below any return without an illegal action, and above any with one."""


@pytest.mark.parametrize(
    "steps",
    [pytest.param(12_000, marks=pytest.mark.case), pytest.param(1_000_000, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", RUNS)
def test_training_reaches_the_optimum_without_an_illegal_action(name: str, steps: int) -> None:
    config = jaxrl_dist.preset(
        name,
        parts.Grid(),
        total_env_steps=steps,
        num_devices=1,
        evaluation_episodes=4,
        hidden_sizes=(32,),
        **RUNS[name],
    )
    *reports, last = jaxrl_dist.train(config)
    worst = [report.metrics["episode/return_min"] for report in (*reports, last)]
    assert min(x for x in worst if x is not None) > PENALTY
    assert last.evaluation is not None
    assert last.evaluation["return_mean"] == pytest.approx(parts.OPTIMUM)


@pytest.mark.case  # test_losses_ignore_outputs_of_illegal_actions
def test_random_actions_of_the_warm_up_are_legal_too() -> None:
    config = jaxrl_dist.preset(
        "sac", parts.Grid("state"), total_env_steps=2000, num_devices=1, evaluation_episodes=1, hidden_sizes=(4,),
        num_envs=8, **{**OFF, "learning_starts": 1900},
    )  # fmt: skip
    *_, last = jaxrl_dist.train(config)
    assert last.metrics["episode/return_min"] is not None
    assert last.metrics["episode/return_min"] > PENALTY
