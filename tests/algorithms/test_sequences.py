"""Recurrent DQN, SAC and TD3: the losses of transitions, on sequences whose cores acting stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from probes import acted, assert_close, box, make_mesh, perturbed, random_rollout, spec

import jaxrl_dist
from jaxrl_dist.algorithms import config_class
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners.sharded import compile_gradient
from jaxrl_dist.memory.ring import windows
from jaxrl_dist.spaces import Discrete
from jaxrl_dist.types import Context, TrainState

LENGTH, BURN_IN, N = 5, 2, 6
WINDOW = {"burn_in": BURN_IN, "sequence_length": LENGTH, "n_step": 2}
NET: dict[str, Any] = {"hidden_sizes": (8,), "core_size": 4}
NO_MEMORY = (
    lambda key, features: {},
    lambda params, features, state: (features, state),
    lambda num_envs: jnp.zeros((num_envs, 1)),
)
ALGORITHMS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "dqn": ("dqn", Discrete(3), {"dueling": True}),
    "c51": ("dqn", Discrete(3), {"num_atoms": 5}),
    "iqn": ("dqn", Discrete(3), {"num_atoms": 5, "quantiles": "implicit", "munchausen": 0.9}),
    "sac": ("sac", box(2, bound=1.0), {}),
    "tqc": ("sac", box(2, bound=1.0), {"num_atoms": 5, "quantiles": "fixed"}),
    "sac-discrete": ("sac", Discrete(3), {}),
    "td3": ("td3", box(2, bound=1.0), {}),
    "iql": ("iql", box(2, bound=1.0), {}),
}


def with_core(params: Any) -> Any:
    """The parameters of a network with ``NO_MEMORY``, from those of one without a core."""
    if isinstance(params, list):
        return [with_core(each) for each in params]
    if "head" in params or "heads" in params:
        return {**params, "core": {}}
    return {
        name: with_core(each) if name in ("actor", "critic", "value") else each
        for name, each in params.items()
    }


@pytest.mark.parametrize("name", runs.cases(ALGORITHMS, "dqn"))
def test_without_memory_the_losses_are_those_of_transitions(name: str) -> None:
    kind, action, fields = ALGORITHMS[name]
    env = spec(action=action)
    plain = config_class(kind)(hidden_sizes=(8,), n_step=2, **fields).make(env)
    recurrent = config_class(kind)(hidden_sizes=(8,), core=NO_MEMORY, **WINDOW, **fields).make(env)
    assert recurrent.window == BURN_IN + LENGTH + 1
    variables = jax.jit(plain.init)(jax.random.key(0))
    variables = variables._replace(params=perturbed(variables.params))
    target = plain.initial_target(perturbed(variables.params, 1))
    rollout = random_rollout(recurrent, env, recurrent.window, N)._replace(core=(), final_core=())
    keys = jax.random.split(jax.random.key(1), N)

    batch = recurrent.postprocess(variables, rollout, Context())
    context = Context(keys, target=with_core(target))
    found, mask, aux = jax.jit(recurrent.loss)(
        variables._replace(params=with_core(variables.params)), batch, context
    )

    late = jax.tree.map(lambda x: x[BURN_IN:], rollout._replace(extras=()))
    pieces = windows(late, 2)  # LENGTH of them for each sequence
    keys = jax.vmap(lambda key: jax.random.split(key, LENGTH))(keys).T.reshape(-1)
    context = Context(keys, target=target)
    expected, flags, other = jax.jit(plain.loss)(
        variables, plain.postprocess(variables, pieces, context), context
    )
    assert found.shape == (N, LENGTH) and mask.any() and not mask.all()
    np.testing.assert_array_equal(mask, flags.reshape(LENGTH, N).T)
    assert_close(np.where(mask, found, 0), np.where(mask, expected.reshape(LENGTH, N).T, 0))
    error = np.where(mask, other.priority.reshape(LENGTH, N).T, 0)
    mean = error.sum(1) / np.maximum(mask.sum(1), 1)
    assert_close(aux.priority, np.float32(0.9 * error.max(1) + 0.1 * mean))


def test_last_windows_bootstrap_from_the_last_step() -> None:
    """One more step from which nothing is learnt changes no gradient."""
    config = config_class("dqn")(**NET, **WINDOW, core="gru", core_inputs="action,reward")
    env, steps = spec(), 10
    algorithm = config.make(env)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    variables = variables._replace(params=perturbed(variables.params))
    target, zero = algorithm.initial_target(perturbed(variables.params, 1)), jnp.int32(0)
    state = TrainState(variables, target, (), zero, zero, jnp.float32(0), zero)
    rollout = random_rollout(algorithm, env, steps + 1, N)
    for x in (rollout.reward, rollout.terminated, rollout.truncated, rollout.valid):
        x[-1] = 0
    shorter = jax.tree.map(lambda x: x[:-1], rollout._replace(core=(), final_core=()))
    found, expected = (
        compile_gradient(algorithm, make_mesh(1))(
            state, acted(algorithm, variables, each), jax.random.key(1), np.int32(0)
        )[0]
        for each in (shorter, rollout)
    )
    assert_close(found, expected)


@pytest.mark.case  # algorithms/test_r2d2.py::test_one_update_is_the_same_on_any_number_of_devices
@pytest.mark.parametrize(
    "name, env, fields",
    [
        ("dqn", "CartPole-v1", {"core": "lstm", "priority_exponent": 0.6, "epsilon_ladder": True}),
        ("sac", "Pendulum-v1", {"core": "gru", "core_inputs": "action,reward"}),
        ("ddpg", "Pendulum-v1", {"core": "linear"}),
    ],
)
def test_a_run_on_two_devices(name: str, env: str, fields: dict[str, Any]) -> None:
    sizes = {
        "num_envs": 8,
        "rollout_length": 16,
        "total_env_steps": 512,
        "report_interval": 128,
        "num_devices": 2,
    }
    replay = {
        "replay_ratio": 1 / 64,
        "batch_size": 8,
        "learning_starts": 128,
        "replay_capacity": 1024,
    }
    more = {"hide": "velocities", "normalize_observations": True, "evaluation_episodes": 2}
    config = jaxrl_dist.preset(name, env, **NET, **WINDOW, **fields, **sizes, **replay, **more)
    *_, last = jaxrl_dist.train(config)
    losses = [value for metric, value in last.metrics.items() if metric.startswith("loss/")]
    assert losses and all(value is not None and np.isfinite(value) for value in losses)
    assert last.evaluation is not None and last.evaluation["episodes"] == 2


def test_flags_that_do_not_fit_a_core_are_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_length does nothing without core"):
        config_class("sac")(sequence_length=5).validate()
    with pytest.raises(ConfigError, match="parameter_noise does not work with core"):
        config_class("dqn")(core="gru", parameter_noise=True).validate()
    with pytest.raises(ConfigError, match="noise parameter does not work with core"):
        config_class("td3")(core="gru", noise="parameter").validate()
