"""Averages of parameters: against a float64 loop, and who acts with them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.types import Algorithm, Context, PyTree, Variables

STEPS = 512
SIZES: dict[str, Any] = {
    "num_envs": 8,
    "rollout_length": 16,
    "hidden_sizes": (8,),
    "evaluation_episodes": 0,
}


def flat(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@functools.cache
def variables(name: str, num_devices: int, ema_steps: int, **more: Any) -> list[Variables]:
    """The variables after each rollout of 128 env steps, of which some may not count."""
    config = jaxrl_dist.preset(
        name, "CartPole-v1", num_devices=num_devices, ema_steps=ema_steps, total_env_steps=1200,
        report_interval=1, **SIZES, **more,
    )  # fmt: skip
    return [report.variables() for report in jaxrl_dist.train(config)]


@pytest.mark.parametrize(
    "name, num_devices, ema_steps, more",
    [
        pytest.param("pg", 1, STEPS, {"scale_rewards": True}, marks=pytest.mark.case),
        ("pg", 8, STEPS, {"scale_rewards": False}),
        # less than a rollout
        pytest.param("pg", 1, 100, {"scale_rewards": False}, marks=pytest.mark.case),
        pytest.param(
            "dqn",
            1,
            200,
            {
                "learning_starts": 64,
                "batch_size": 8,
                "replay_capacity": 800,
                "normalize_observations": True,
            },
            marks=pytest.mark.case,
        ),
    ],
)
def test_against_a_loop(name: str, num_devices: int, ema_steps: int, more: dict[str, Any]) -> None:
    """The first steps count equally; each rollout moves the
    average towards the parameters that acted in it.
    """
    seen = variables(name, num_devices, ema_steps, **more)
    assert len(seen) >= 10
    plain = variables(name, num_devices, 0, **more)
    average, counted = np.zeros(0), 0
    for n in range(1, len(seen)):
        np.testing.assert_allclose(
            flat(seen[n].params), flat(plain[n].params), rtol=1e-4, atol=1e-5
        )
        acted = flat(seen[n - 1].params).astype(np.float64)
        # the first rollout's parameters, those before the first update, are not reported
        if n == 1:
            average, counted = flat(average_of(seen[0], more)).astype(np.float64), 128
        counted += 128
        rate = min(1.0, 128 / min(counted, ema_steps))
        average = (1 - rate) * average + rate * acted
        np.testing.assert_allclose(flat(average_of(seen[n], more)), average, rtol=1e-5, atol=1e-6)
    assert np.abs(average - flat(seen[-1].params)).max() > 1e-4, "the average lags"


def average_of(variables: Variables, more: dict[str, Any]) -> PyTree:
    """The average, which lies beneath the statistics of the other wrappers."""
    stats = variables.stats
    for wrapped in ("scale_rewards", "normalize_observations"):
        stats = stats[1] if more.get(wrapped) else stats
    return stats[0]


def test_only_greedy_actions_come_from_the_average() -> None:
    def policy(variables: Variables, obs: Any, core: Any, context: Context) -> Any:
        return obs * variables.params["w"], core, {}

    params = {"w": jnp.float32(3)}
    unused: Any = None
    plain = Algorithm(
        lambda key: Variables(params, ()), policy, postprocess=unused, loss=unused, optimizer=unused
    )
    algorithm = wrappers.average_parameters(plain, STEPS)
    made = algorithm.init(jax.random.key(0))
    assert made.stats[0]["w"] == 3
    made = made._replace(stats=({"w": jnp.float32(5)}, ()))
    assert algorithm.policy(made, 1.0, (), Context())[0] == 5
    assert algorithm.policy(made, 1.0, (), Context(jax.random.split(jax.random.key(0), 1)))[0] == 3


@pytest.mark.case  # test_only_greedy_actions_come_from_the_average
def test_a_run_evaluates_stores_and_plays_the_average(tmp_path: Path) -> None:
    command = f"{runs.CARTPOLE} --learning-rate 0.05"
    newest, averaged = (
        runs.train(command, tmp_path / "a"),
        runs.train(f"{command} --ema-steps 1000", tmp_path / "b"),
    )
    assert runs.untimed(newest)[0] == pytest.approx(runs.untimed(averaged)[0], rel=1e-3), (
        "training is the same"
    )
    ends = [
        runs.read_json(run / "summary.json")["evaluation"]["return_mean"]
        for run in (newest, averaged)
    ]
    policy, other = jaxrl_dist.load_policy(averaged), jaxrl_dist.load_policy(newest)
    obs = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    greedy, sampled = policy(obs)[0], policy(obs, key=jax.random.key(0))[0]
    assert (greedy != other(obs)[0]).any()
    np.testing.assert_array_equal(sampled, other(obs, key=jax.random.key(0))[0])
    played = [each.evaluate(2).returns.mean() for each in (other, policy)]
    assert played == ends


@pytest.mark.case  # training/test_weights.py
def test_parts_of_a_network_are_not_those_of_its_average(tmp_path: Path) -> None:
    """``--init-parts`` names parts of the network that learns;
    the average of another run may be missing.
    """
    source = runs.finished(runs.CARTPOLE)
    run_dir = runs.train(
        f"{runs.CARTPOLE} --ema-steps 1000 --init-from {source} --init-parts torso", tmp_path / "a"
    )
    assert runs.read_json(run_dir / "config.json")["run"]["ema_steps"] == 1000
    config = jaxrl_dist.preset(
        "ppo", "CartPole-v1", ema_steps=9, init_from=str(source), init_parts="no"
    )
    with pytest.raises(jaxrl_dist.ConfigError, match=r"policy_torso.*value_torso$"):
        list(jaxrl_dist.train(config))
