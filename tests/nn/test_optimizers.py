"""The optimiser of every algorithm: by name, with weight decay, and with a schedule over env
steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from probes import box, spec

import jaxrl_dist
from jaxrl_dist.algorithms import ALGORITHMS, config_class
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.learners import sgd
from jaxrl_dist.nn.optimizers import OptimizerConfig

DISCRETE, CONTINUOUS = spec(), spec(action=box(2, bound=1.0))
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]])}
GRADS = {"w": jnp.array([[0.1, 0.2], [-0.3, 0.4]])}
NAMES = [
    name
    for kind in get_args(get_type_hints(OptimizerConfig)["optimizer"])
    for name in get_args(kind)
]


def steps(optimizer: optax.GradientTransformation, *env_steps: float) -> np.ndarray:
    """The parameters after an update at each of these env steps."""
    params, state = PARAMS, optimizer.init(PARAMS)
    update = optax.with_extra_args_support(optimizer).update
    for env_step in env_steps:
        updates, state = update(GRADS, state, params, env_step=jnp.float32(env_step))
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"])


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_is_optaxs_of_that_name(name: str) -> None:
    ours = OptimizerConfig(optimizer=name).make_optimizer("sgd", 0.1)
    theirs = getattr(optax.contrib if name == "muon" else optax, name)(0.1)
    np.testing.assert_array_equal(steps(ours, 0, 1, 2), steps(theirs, 0, 1, 2))


def test_without_a_name_it_is_the_algorithms_with_its_options() -> None:
    ours = OptimizerConfig().make_optimizer("rmsprop", 0.1, decay=0.5)
    np.testing.assert_array_equal(steps(ours, 0, 1), steps(optax.rmsprop(0.1, decay=0.5), 0, 1))
    named = OptimizerConfig(optimizer="sgd").make_optimizer("rmsprop", 0.1, decay=0.5)
    np.testing.assert_array_equal(steps(named, 0), np.asarray(PARAMS["w"] - 0.1 * GRADS["w"]))


def test_named_optimizer_has_the_defaults_of_optax() -> None:
    ours = OptimizerConfig(optimizer="rmsprop").make_optimizer("rmsprop", 0.1, decay=0.5)
    np.testing.assert_array_equal(steps(ours, 0, 1), steps(optax.rmsprop(0.1), 0, 1))
    assert (steps(ours, 0, 1) != steps(optax.rmsprop(0.1, decay=0.5), 0, 1)).any()


def test_weight_decay_is_added_to_the_gradient_or_apart_from_it() -> None:
    added = OptimizerConfig(optimizer="sgd", weight_decay=0.5).make_optimizer("adam", 0.1)
    np.testing.assert_allclose(
        steps(added, 0), PARAMS["w"] - 0.1 * (GRADS["w"] + 0.5 * PARAMS["w"]), rtol=1e-6
    )
    apart = OptimizerConfig(optimizer="adamw", weight_decay=0.5).make_optimizer("adam", 0.1)
    np.testing.assert_array_equal(
        steps(apart, 0, 1), steps(optax.adamw(0.1, weight_decay=0.5), 0, 1)
    )
    assert (steps(apart, 0, 1) != steps(optax.adamw(0.1), 0, 1)).any()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_schedule_takes_the_step_size_to_zero_over_env_steps(schedule: Any, name: Any) -> None:
    config = OptimizerConfig(
        optimizer=name, learning_rate_schedule=schedule, learning_rate_steps=100
    )
    scheduled, constant = config.make_optimizer("sgd", 0.1), getattr(optax, name)(0.1)
    moved = steps(constant, 0) - PARAMS["w"]
    for env_step, linear in ((0, 1.0), (25, 0.75), (100, 0.0), (1e7, 0.0)):
        left = linear if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - linear)))
        np.testing.assert_allclose(
            steps(scheduled, env_step) - PARAMS["w"], left * moved, rtol=1e-4, atol=1e-7
        )


@pytest.mark.parametrize("name", runs.cases(ALGORITHMS, "ppo", "dqn"))
def test_every_algorithm_has_the_flags_and_obeys_them(name: str) -> None:
    """At the end of the schedule nothing moves; at its start all parameters do."""
    kind = config_class(name)
    assert issubclass(kind, OptimizerConfig)
    fields: dict[str, Any] = {
        "hidden_sizes": (4,),
        "learning_rate_schedule": "linear",
        "learning_rate_steps": 64,
    }
    config = dataclasses.replace(kind(), **fields)
    config.validate()
    algorithm = config.make(CONTINUOUS if name in ("td3", "ddpg") else DISCRETE)
    state = sgd.init(algorithm, jax.random.key(0))
    grads = jax.tree.map(jnp.ones_like, state.variables.params)

    def moved(env_step: float) -> list[bool]:
        new = state._replace(env_step=jnp.float32(env_step))
        for _ in range(2):  # TD3's actor moves with every second update
            new = sgd.apply(algorithm, new, grads)
        changed = jax.tree.map(
            lambda x, y: bool((x != y).any()), state.variables.params, new.variables.params
        )
        return jax.tree.leaves(changed)

    assert all(moved(0)) and not any(moved(64))


@pytest.mark.parametrize("total, warned", [(512, False), (513, True)])
def test_a_run_says_so_if_it_goes_on_after_its_schedule(total: int, warned: bool) -> None:
    from jaxrl_dist.training.setup import prepare

    schedule: dict[str, Any] = {"learning_rate_schedule": "linear", "learning_rate_steps": 512}
    config = jaxrl_dist.preset(
        "ppo", "gymnax:CartPole-v1", total_env_steps=total, num_devices=1, **schedule
    )
    said = pytest.warns(ConfigWarning, match="512.*total_env_steps.*513.* 0")
    with said if warned else contextlib.nullcontext():
        prepare(config)


def test_population_varies_the_step_size_of_a_schedule() -> None:
    config = jaxrl_dist.preset(
        "ppo",
        "gymnax:CartPole-v1",
        vary={"learning_rate": "1e-4,1e-2", "weight_decay": "0.0,0.1"},
        zip=True,
        learning_rate_schedule="linear",
        learning_rate_steps=1000,
        optimizer="adamw",
        hidden_sizes=(4,),
        total_env_steps=512,
        num_envs=8,
        rollout_length=32,
        evaluation_episodes=0,
        num_devices=1,
    )
    from jaxrl_dist.training.setup import prepare

    prepared = prepare(config)
    assert len(prepared.groups) == 1, "one program trains both"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no horizon": (
        {"learning_rate_schedule": "linear"},
        "linear needs learning_rate_steps, the env steps",
    ),
    "no schedule": (
        {"learning_rate_steps": 9},
        "learning_rate_steps does nothing without learning_rate_schedule",
    ),
    "another name": ({"optimizer": "adan"}, "optimizer must be one of"),
    "growth": ({"weight_decay": -1.0}, "weight_decay must be >= 0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    fields, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        jaxrl_dist.Train(PPO(**fields), env="gymnax:CartPole-v1").checked()


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_settings_of_the_replaced_optimizer_are_refused(name: str) -> None:
    config = jaxrl_dist.Train("a2c", env="gymnax:CartPole-v1")
    with pytest.raises(
        ConfigError,
        match=r"rms_decay.*A2C's.*RMSProp",
    ):
        jaxrl_dist.preset("a2c", config.env, optimizer=name, rms_decay=0.9)
