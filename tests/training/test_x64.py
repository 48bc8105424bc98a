"""JAX's 64-bit mode: runs compute in 32 bits, with the numbers that they have without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own
import pytest
import runs

import jaxrl_dist

SMALL: dict[str, Any] = {"num_envs": 8, "rollout_length": 8, "hidden_sizes": [4], "num_devices": 1}
PPO = {"num_epochs": 1, "num_minibatches": 2}
REPLAY = {"batch_size": 8, "replay_capacity": 96, "replay_ratio": 0.03125, "learning_starts": 8}


class Wide(own.Walk):
    """Its place is float64 where JAX has it."""

    def reset_env(self, key: jax.Array, params: int) -> Any:
        return jnp.zeros(1), own.WalkState(jnp.zeros(()), jnp.int32(0))

    def step_env(self, key: jax.Array, state: own.WalkState, action: jax.Array, params: int) -> Any:
        place = state.place + 2.0 * action - 1 + 0.1 * jax.random.normal(key)
        return place[None], own.WalkState(place, state.time + 1), place, jnp.abs(place) >= 3, {}


def numbers(algorithm: str, env: Any, **changes: Any) -> Any:
    """The metrics and the variables of a run's reports,
    between which the caller's mode is as before.
    """
    mode = jnp.zeros(()).dtype
    config = jaxrl_dist.preset(
        algorithm,
        env,
        total_env_steps=192,
        report_interval=64,
        evaluation_episodes=2,
        **SMALL,
        **changes,
    )
    seen = []
    for report in jaxrl_dist.train(config):
        assert jnp.zeros(()).dtype == mode
        metrics = {
            name: x
            for name, x in report.metrics.items()
            if not name.startswith(("time/", "async/"))
        }
        seen.append((metrics, report.evaluation, report.variables()))
    return seen


def check_equal(expected: Any, found: Any, rtol: float = 0.0) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_allclose(y, x, rtol, atol=rtol)


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("ppo", Wide(), PPO),
    ("ppo", "CartPole-v1", {**PPO, "seeds": 2}),
    ("ppo", "CartPole-v1", {**PPO, "plan": "synchronous"}),
    ("impala", "CartPole-v1", {"plan": "asynchronous", "lockstep": True}),
    ("dqn", "Catch-bsuite", REPLAY),
    ("sac", "Pendulum-v1", REPLAY),
]


@pytest.mark.parametrize(
    "algorithm, env, changes",
    [("ppo", "CartPole-v1", PPO), *(pytest.param(*case, marks=pytest.mark.case) for case in CASES)],
)
def test_training_is_equal_in_64_bit_mode(algorithm: str, env: Any, changes: Any) -> None:
    expected = numbers(algorithm, env, **changes)
    with jax.enable_x64(True):
        found = numbers(algorithm, env, **changes)
        assert jnp.zeros(()).dtype == jnp.float64, "the caller's mode is as before"
    check_equal(expected, found)


def test_make_train_agrees_in_64_bit_mode() -> None:
    config = jaxrl_dist.preset(
        "ppo", "CartPole-v1", total_env_steps=128, report_interval=64, **SMALL, **PPO
    )
    rate = {"learning_rate": 1e-3}
    expected = jax.jit(jaxrl_dist.make_train(config))(jax.random.key(3), rate)
    with jax.enable_x64(True):
        found = jax.jit(jaxrl_dist.make_train(config))(
            jax.random.key(3), {"learning_rate": jnp.asarray(1e-3)}
        )
        tangent = jax.jvp(
            lambda rate: jaxrl_dist.make_train(config)(jax.random.key(3), {"learning_rate": rate})[
                1
            ]["loss/value"],
            (jnp.float64(1e-3),),
            (jnp.float64(1.0),),
        )[1]
    check_equal(expected, found, rtol=1e-5)
    assert np.isfinite(tangent).all()


def test_policy_acts_alike_in_64_bit_mode() -> None:
    run_dir = runs.finished(runs.CARTPOLE)
    obs = np.linspace(-0.1, 0.1, 12, dtype=np.float32).reshape(3, 4)

    def acted() -> Any:
        policy = jaxrl_dist.load_policy(run_dir)
        return policy(obs, key=jax.random.key(1))[0], policy.evaluate(4).summary()

    expected = acted()
    with jax.enable_x64(True):
        check_equal(expected, acted())


@pytest.mark.case  # test_command_line_trains_in_64_bit_mode
def test_profile_works_in_64_bit_mode() -> None:
    command = (
        "profile ppo --env CartPole-v1 --num-envs 8 --hidden-sizes 4 --num-devices 1 --seconds 0.1"
    )
    found = subprocess.run(
        [sys.executable, "-m", "jaxrl_dist.cli", *command.split()],
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr


def test_command_line_trains_in_64_bit_mode(tmp_path: Path) -> None:
    size = "--num-envs 8 --rollout-length 8 --hidden-sizes 4 --total-env-steps 128 --num-devices 1 --quiet"
    flags = f"{size} --evaluation-episodes 0 --run-dir {tmp_path / 'run'}"
    words = f"-m jaxrl_dist.cli train ppo --env CartPole-v1 {flags}".split()
    found = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")
    dtypes = {x.dtype for x in jax.tree.leaves(jaxrl_dist.load_policy(tmp_path / "run").variables)}
    assert dtypes == {np.dtype(np.float32)}
