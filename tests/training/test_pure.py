"""Training as a pure function: the numbers of ``train``,
under vmap and under forward differentiation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_dist
from jaxrl_dist.errors import ConfigError

REPLAY: dict[str, Any] = {
    **{
        "num_envs": 4,
        "rollout_length": 8,
        "batch_size": 8,
        "learning_starts": 64,
        "replay_capacity": 96,
    },
    **{"replay_ratio": 0.125, "total_env_steps": 160, "report_interval": 32},
}
SIZES: dict[str, dict[str, Any]] = {
    "ppo": {
        "num_envs": 8,
        "rollout_length": 16,
        "num_epochs": 2,
        "num_minibatches": 2,
        "total_env_steps": 640,
        # with statistics, XLA rounds the two programs differently
        "normalize_observations": False,
        "scale_rewards": False,
    }
    | {"report_interval": 128},
    "dqn": REPLAY,
    "sac": REPLAY,
}


def config(name: str = "ppo", **changes: Any) -> jaxrl_dist.Train[Any]:
    env = "Pendulum-v1" if name == "sac" else "CartPole-v1"
    fixed: dict[str, Any] = {"hidden_sizes": (8,), "num_devices": 1, "evaluation_episodes": 0}
    return jaxrl_dist.preset(name, env, **{**fixed, **SIZES[name], **changes})


def check_equal(name: str, num_devices: int = 1) -> None:
    """The networks, and up to rounding the metrics, are those of ``train``'s first five reports."""
    changes = {"seed": 3, "num_devices": num_devices}
    state, metrics = jax.jit(jaxrl_dist.make_train(config(name, **changes)))(jax.random.key(3))
    for number, report in enumerate(
        jaxrl_dist.train(config(name, **{**changes, "total_env_steps": 10_000}))
    ):
        counts = {
            "env_steps": report.env_steps,
            "updates": report.updates,
            "iteration": number + 1,
            "env/faults": 0,
        }
        for metric, values in metrics.items():
            expected = counts[metric] if metric in counts else report.metrics[metric]
            assert values[number] == pytest.approx(
                np.nan if expected is None else expected, 1e-5, 1e-6, True
            ), metric
        if number == 4:
            jax.tree.map(np.testing.assert_array_equal, state.variables, report.variables())
            break


@pytest.mark.case
@pytest.mark.parametrize("name, num_devices", [("ppo", 1), ("dqn", 1), ("sac", 1), ("ppo", 2)])
def test_it_equals_a_run_bit_for_bit(optimized: None, name: str, num_devices: int) -> None:
    check_equal(name, num_devices)


@pytest.mark.case
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_learning_rates_train_side_by_side(name: str) -> None:
    train, key = jaxrl_dist.make_train(config(name)), jax.random.PRNGKey(0)  # JAX's older keys, too
    rates = jnp.logspace(-4, -2, 16)
    states, metrics = jax.jit(jax.vmap(train, (None, 0)))(key, {"learning_rate": rates})
    assert metrics["episode/return"].shape == (16, 5)
    alone, _ = jax.jit(train)(key, {"learning_rate": rates[7]})
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x[7], y, 1e-4, 1e-5),
        states.variables,
        alone.variables,
    )


@pytest.mark.case
@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_the_derivative_by_the_learning_rate_is_as_of_two_runs(name: str) -> None:
    """Through minibatches, the optimiser, the replay memory,
    and targets that losses take as constant.
    """
    train = jaxrl_dist.make_train(config(name, activation="tanh"))
    rate = jnp.float32(config(name).algorithm.learning_rate)

    @jax.jit
    def learnt(rate: jax.Array) -> Any:
        return train(jax.random.key(0), {"learning_rate": rate})[0].variables.params

    _, tangents = jax.jit(lambda rate: jax.jvp(learnt, (rate,), (jnp.ones_like(rate),)))(rate)
    step = 0.02 * rate
    for tangent, above, below in zip(
        *map(jax.tree.leaves, (tangents, learnt(rate + step), learnt(rate - step))), strict=True
    ):
        assert np.isfinite(tangent).all() and np.abs(tangent).max() > 0
        np.testing.assert_allclose(tangent, (above - below) / (2 * step), rtol=0.01, atol=0.02)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"run_dir": "runs/x"},
            "make_train makes a pure function, which writes nothing; remove run_dir",
        ),
        (
            {"record": "data/x"},
            "make_train makes a pure function, which writes nothing; remove record",
        ),
        (
            {"video_interval": 64},
            "make_train makes a pure function, which writes nothing; remove video_interval",
        ),
        (
            {"exact": True},
            "make_train makes a pure function, which makes no evaluations; remove exact",
        ),
        (
            {"seeds": 4},
            "trains one member, and jax.vmap maps it over keys and hyperparameters; remove seeds",
        ),
        ({"stop_at_return": 9.0}, "makes a fixed number of iterations; remove stop_at_return"),
        (
            {"plan": "synchronous"},
            "make_train needs plan on_device and an environment of JAX, not plan synchronous",
        ),
        ({"total_env_steps": 2**31}, "counts env steps as int32"),
    ],
)
def test_what_a_pure_function_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jaxrl_dist.make_train(config(**changes))


def test_hyperparameters_that_cannot_be_traced_are_refused() -> None:
    train = jaxrl_dist.make_train(config("dqn"))
    for name, message in {
        "learning_rat": r"'learning_rat' is not a float hyperparameter of this run \(did you mean 'learning_rate'\?\)",
        "lr": "'lr' is not a float hyperparameter of this run; it is learning_rate here",
        "batch_size": "'batch_size' is not a float hyperparameter of this run",
        "replay_ratio": "one of replay_ratio must be a number in the config, because a program cannot trace it",
    }.items():
        with pytest.raises(ConfigError, match=message):
            jax.eval_shape(train, jax.random.key(0), {name: 0.5})


MISUSED = {
    "a number for a key": ((0,), "one key"),
    "no key": ((None,), "one key"),
    "several keys": ((jax.random.split(jax.random.key(0), 2),), "one key"),
    "several old keys": ((jax.random.split(jax.random.PRNGKey(0), 2),), "one key"),
    "no dict": ((jax.random.key(0), None), "a dict of scalars"),
    "several rates": ((jax.random.key(0), {"learning_rate": jnp.ones(3)}), r"of shape \(3,\)"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misused_arguments_are_refused_before_anything_is_traced(name: str) -> None:
    arguments, message = MISUSED[name]
    with pytest.raises(ConfigError, match=message):
        jaxrl_dist.make_train(config("ppo"))(*arguments)
