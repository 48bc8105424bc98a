"""AlphaZero: its targets against a loop in float64, games with both sides' signs,
and play with and without search.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own
import pytest
from probes import assert_close, box, spec

import jaxrl_dist
from jaxrl_dist.algorithms.alphazero import AlphaZero
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.play.match import match
from jaxrl_dist.types import Context, Rollout, Variables

TINY: dict[str, Any] = {"hidden_sizes": (4,), "num_simulations": 4}
T, B, DISCOUNT, DECAY = 7, 64, 0.9, 0.7


def rollout() -> Rollout:
    """Steps of games with random ends, turns and random actions."""
    rng = np.random.default_rng(0)
    terminated, truncated = rng.uniform(size=(2, T, B)) < 0.15
    truncated &= ~terminated
    over = terminated | truncated
    valid = np.concatenate([np.ones((1, B), bool), ~over[:-1]])
    terminated, truncated = terminated & valid, truncated & valid
    extras = {
        "weights": np.full((T, B, 3), 1 / 3, np.float32),
        "value": rng.normal(size=(T, B)).astype(np.float32),
        "turn": rng.choice([-1.0, 1.0], size=(T, B)).astype(np.float32),
        "depth": np.ones((T, B), np.float32),
        "random": rng.uniform(size=(T, B)) < 0.3,
    }
    reward = np.where(valid, rng.normal(size=(T, B)), 0).astype(np.float32)
    obs = rng.normal(size=(T + 1, B, 3)).astype(np.float32)
    action = rng.integers(2, size=(T, B))
    return Rollout(obs, action, reward, terminated, truncated, valid, extras, (), ())


def naive(x: Rollout, last: np.ndarray) -> np.ndarray:
    """Value targets ``[T, B]``; ``last``: values of the last observations."""
    steps = len(x.reward)
    targets = np.zeros((steps, B))
    values = np.concatenate([x.extras["value"], last[None]]).astype(np.float64)
    for b in range(B):
        for t in range(steps):
            if x.extras["random"][t, b] or not x.valid[t, b]:
                targets[t, b] = values[t, b]
                continue
            total, weight, s = 0.0, 1.0, t  # of the steps under way
            while True:
                total += weight * x.reward[s, b]
                weight *= DISCOUNT * x.extras["turn"][s, b]
                if x.terminated[s, b]:
                    break
                goes_on = (
                    s + 1 < steps and not x.truncated[s, b] and not x.extras["random"][s + 1, b]
                )
                decay = DECAY if goes_on else 0.0
                total += weight * (1 - decay) * values[s + 1, b]
                weight *= decay
                if not goes_on:
                    break
                s += 1
            targets[t, b] = total
    return targets


def test_value_targets_are_signed_lambda_returns_of_the_search() -> None:
    algorithm = AlphaZero(**TINY, discount=DISCOUNT, gae_lambda=DECAY).make(spec())
    variables, x = jax.jit(algorithm.init)(jax.random.key(0)), rollout()
    blank = jax.eval_shape(
        lambda: algorithm.policy(variables, jnp.asarray(x.obs[0]), (), Context())
    )[2]
    assert blank.keys() == x.extras.keys()
    last = jax.jit(algorithm.policy)(variables, jnp.asarray(x.obs[-1]), (), Context())[2]["value"]
    batch = jax.jit(algorithm.postprocess)(variables, jax.tree.map(jnp.asarray, x), Context())
    actual = np.asarray(batch["value_target"]).reshape(B, T).T
    np.testing.assert_allclose(actual, naive(x, np.asarray(last)), rtol=1e-4, atol=1e-5)
    losses, mask, aux = jax.jit(algorithm.loss)(variables, batch, Context())
    assert np.isfinite(losses).all() and (mask == x.valid.T.reshape(-1)).all()
    assert {"search/depth", "search/value", "loss/policy", "loss/value"} <= aux.metrics.keys()


def test_a_replayed_window_learns_from_its_first_step() -> None:
    """Its target is that of the whole window, whose last step supplies the value of its search."""
    replay = {"replay_capacity": 1_000, "n_step": T - 1}
    algorithm = AlphaZero(**TINY, **replay, discount=DISCOUNT, gae_lambda=DECAY).make(spec())
    assert algorithm.window == T and algorithm.replay is not None
    variables, x = jax.jit(algorithm.init)(jax.random.key(0)), rollout()
    batch = jax.jit(algorithm.postprocess)(variables, jax.tree.map(jnp.asarray, x), Context())
    short = jax.tree.map(lambda y: y[:-1], x)
    np.testing.assert_allclose(
        batch["value_target"], naive(short, x.extras["value"][-1])[0], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(batch["obs"], x.obs[0])
    losses, mask, aux = jax.jit(algorithm.loss)(variables, batch, Context())
    assert (
        np.isfinite(losses).all()
        and (mask == x.valid[0]).all()
        and (np.asarray(aux.priority) >= 0).all()
    )


def test_flags_of_replay_and_of_passes_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="batch_size does nothing without replay_capacity"):
        AlphaZero(batch_size=8).validate()
    with pytest.raises(ConfigError, match=r"num_epochs does nothing .*remove replay_capacity"):
        AlphaZero(replay_capacity=8, num_epochs=2).validate()


@functools.cache
def made(**fields: Any) -> tuple[Any, Any, Variables]:
    source = find(own.Turns())
    algorithm = AlphaZero(**{**TINY, **fields}).make(source.spec)
    return algorithm, source.device(), jax.jit(algorithm.init)(jax.random.key(0))


def searched(
    env: Any,
    algorithm: Any,
    variables: Variables,
    places: list[int],
    times: list[int],
    keys: Any = None,
) -> Any:
    """Acts in these states of ``own.Turns``."""
    native = own.WalkState(jnp.asarray(places), jnp.asarray(times))
    state, _ = env.reset(jax.random.split(jax.random.key(0), len(places)))
    obs = jnp.asarray(places, jnp.float32)[:, None]
    core = algorithm.initial_core(len(places))
    context = Context(keys, simulator=env.simulate(state._replace(env=native)))
    return jax.jit(algorithm.policy)(variables, obs, core, context)


def test_both_sides_win_if_they_can_and_turns_need_not_alternate() -> None:
    """The side that reaches +-3 wins: from +-2 at once.
    Which side moves next depends on the number of moves.
    """
    algorithm, env, variables = made(discount=1.0)
    action, _, told = searched(env, algorithm, variables, [2, 2, -2, -2, 0, 0], [2, 4, 2, 4, 3, 4])
    np.testing.assert_array_equal(action[:4], [1, 1, 0, 0])
    np.testing.assert_array_equal(told["turn"][4:], [1, -1])  # the first of two moves; the second
    assert (told["value"][:4] > 0.5).all() and not told["random"].any()


def test_a_mover_leaves_no_win_to_the_other_side() -> None:
    """From 1, the first side's second move: up to 2 would let the other side win,
    and down to 0 does not.
    """
    algorithm, env, variables = made(discount=1.0, num_simulations=16)
    action, _, _ = searched(env, algorithm, variables, [1, -1], [1, 1])
    np.testing.assert_array_equal(action, [0, 1])


@pytest.mark.parametrize("search", ["gumbel", "puct"])
def test_temperature_ends_and_some_actions_are_random(search: str) -> None:
    algorithm, env, variables = made(
        search=search, temperature_moves=1, epsilon=0.5, num_simulations=8
    )
    keys = jax.random.split(jax.random.key(3), 64)
    action, core, told = searched(env, algorithm, variables, [2] * 64, [2] * 64, keys)
    assert (core == 1).all() and 16 < told["random"].sum() < 48
    assert (action[told["random"]] == 0).any()


def test_without_simulations_the_network_acts_alone() -> None:
    algorithm, env, variables = made(num_simulations=0)
    assert not algorithm.searches and made()[0].searches
    obs = jnp.asarray([[2.0], [-1.0]])
    action, _, told = searched(env, algorithm, variables, [2, -1], [2, 2])
    alone, _, expected = made()[0].policy(variables, obs, (), Context())
    np.testing.assert_array_equal(action, alone)
    np.testing.assert_allclose(told["weights"], expected["weights"], rtol=1e-6)


def test_what_alphazero_refuses() -> None:
    with pytest.raises(ConfigError, match="core does not work with alphazero"):
        AlphaZero(core="gru").validate()
    with pytest.raises(ConfigError, match="needs discrete actions"):
        AlphaZero().make(spec(action=box(2)))
    with pytest.raises(ConfigError, match="temperature_moves"):
        AlphaZero(temperature=0.0, temperature_moves=3).validate()


RUN: dict[str, Any] = {
    **TINY,
    "num_envs": 8,
    "rollout_length": 8,
    "num_epochs": 1,
    "num_minibatches": 1,
    "total_env_steps": 192,
    "report_interval": 1,
    "evaluation_episodes": 4,
}


@pytest.mark.case  # learners/test_learners.py::test_one_device_is_as_many
@pytest.mark.parametrize("devices", [2, 8])
def test_results_do_not_depend_on_devices(devices: int) -> None:
    """Two iterations: rounding of sums later changes a choice."""
    seen = []
    for number in (1, devices):
        config = jaxrl_dist.preset("alphazero", own.Turns(), **RUN, num_devices=number, epsilon=0.2)
        seen.append([(report.metrics, report.variables()) for report in jaxrl_dist.train(config)])
    one, several = seen
    for name in ("loss/policy", "loss/value", "search/depth", "search/value"):
        assert one[0][0][name] == pytest.approx(several[0][0][name], rel=1e-4), name
    for x, y in zip(*(jax.tree.leaves(reports[1][1]) for reports in (one, several)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.case  # test_a_replayed_window_learns_from_its_first_step
def test_it_learns_from_replay_as_on_one_device_so_on_eight() -> None:
    seen = []
    fields = {**RUN, "replay_capacity": 256, "n_step": 4, "batch_size": 8, "replay_ratio": 1 / 32}
    fields = {
        name: value
        for name, value in fields.items()
        if name not in ("num_epochs", "num_minibatches")
    }
    for devices in (1, 8):
        config = jaxrl_dist.preset(
            "alphazero", own.Turns(), **fields, num_devices=devices, epsilon=0.2
        )
        *_, last = jaxrl_dist.train(config)
        seen.append(last)
    one, eight = seen
    assert one.updates == eight.updates > 0
    assert_close(one.variables(), eight.variables(), 1e-3)


@pytest.mark.case  # test_without_simulations_the_network_acts_alone
@pytest.mark.filterwarnings("ignore")
def test_a_policy_plays_a_match_with_and_without_simulations(tmp_path: Path) -> None:
    """It has learnt nothing, and its search finds wins that random moves leave open."""
    pytest.importorskip("pgx")
    options = {"env_options": {"opponents": "self"}, "run_dir": str(tmp_path / "run")}
    list(jaxrl_dist.train(jaxrl_dist.preset("alphazero", "pgx:tic_tac_toe", **RUN, **options)))
    run = options["run_dir"]
    result = match(run, "random", games=40, num_simulations=32).results[0]
    assert result.score > 0.8
    policy = jaxrl_dist.load_policy(run, num_simulations=0)
    assert not policy.algorithm.searches and policy.evaluate(4).returns.shape == (4,)
    with pytest.raises(ConfigError, match="needs a simulator, which pgx:tic_tac_toe"):
        jaxrl_dist.load_policy(
            run,
            env="pgx:tic_tac_toe",
            env_options={"opponents": "agents", "state": "true"},
            num_simulations=4,
        )


def test_simulations_of_what_does_not_search_are_refused(tmp_path: Path) -> None:
    fields = {
        "hidden_sizes": (4,),
        "total_env_steps": 64,
        "num_envs": 8,
        "rollout_length": 8,
        "evaluation_episodes": 0,
    }
    config = jaxrl_dist.preset("a2c", own.Walk(), **fields, run_dir=str(tmp_path / "run"))
    list(jaxrl_dist.train(config))
    with pytest.raises(
        ConfigError, match=r"a2c does not search; alphazero and muzero have this flag"
    ):
        jaxrl_dist.load_policy(tmp_path / "run", env=own.Walk(), num_simulations=4)
