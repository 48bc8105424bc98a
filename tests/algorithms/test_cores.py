"""Recurrent cores in losses: a sequence with resets is worth what its episodes are, one by one."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from probes import acted, assert_close, perturbed, random_rollout, spec

import jaxrl_dist
from jaxrl_dist.algorithms import config_class
from jaxrl_dist.algorithms.a2c import A2C
from jaxrl_dist.algorithms.actor_critic import actor_critic
from jaxrl_dist.algorithms.r2d2 import R2D2
from jaxrl_dist.algorithms.wrappers import clip_rewards
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn import networks
from jaxrl_dist.nn.cores import make_core, reset_core
from jaxrl_dist.nn.heads import q_heads
from jaxrl_dist.types import Context, Rollout

SPEC = spec()
NET: dict[str, Any] = {"hidden_sizes": (8,), "core_size": 4}
CORES: dict[str, dict[str, Any]] = {
    "gru": {"core": "gru"},
    "lstm": {"core": "lstm"},
    "attention": {"core": "attention", "core_window": 5},
    "linear": {"core": "linear"},
    "inputs": {"core": "gru", "core_inputs": "action,reward"},
}
WINDOWED = {"burn_in": 2, "sequence_length": 8, "n_step": 2}


def previous(rollout: Rollout) -> np.ndarray:
    """The last action and its reward before each step, ``[T, B, 4]``; 0 at the start of an
    episode.
    """
    both = np.concatenate([np.eye(3)[np.asarray(rollout.action)], rollout.reward[..., None]], -1)
    both = np.where(rollout.valid[..., None], both, 0.0).astype(np.float32)
    return np.concatenate([np.zeros_like(both[:1]), both[:-1]])


@pytest.mark.parametrize("core", runs.cases(CORES, "inputs"))
def test_records_get_what_acting_would_have_stored(core: str) -> None:
    """The core of an episode's start, and the core's inputs, of which a loss takes clipped
    rewards.
    """
    config = config_class("dqn")(**NET, **CORES[core], **WINDOWED)
    algorithm = clip_rewards(config.make(SPEC), -0.1, 0.1)
    assert algorithm.add_extras is not None
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    rollout = acted(algorithm, variables, random_rollout(algorithm, SPEC, 12, 6))
    made = jax.jit(algorithm.add_extras)(rollout._replace(extras={}))
    assert_close(made._replace(extras={}), rollout._replace(extras={}))
    assert jax.tree.map(jnp.shape, made.extras) == jax.tree.map(jnp.shape, rollout.extras)
    for x, y in zip(
        jax.tree.leaves(made.extras["core"]), jax.tree.leaves(rollout.extras["core"]), strict=True
    ):
        np.testing.assert_array_equal(x[0], y[0])
    if core == "inputs":
        np.testing.assert_array_equal(made.extras["core_inputs"], rollout.extras["core_inputs"])
        assert np.abs(made.extras["core_inputs"][..., -1]).max() == np.float32(0.1)


@pytest.mark.parametrize("core", runs.cases(CORES, "inputs"))
def test_rollout_loss_is_that_of_its_episodes(core: str) -> None:
    algorithm = A2C(**NET, **CORES[core]).make(SPEC)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    variables = variables._replace(params=perturbed(variables.params))
    rollout = acted(algorithm, variables, random_rollout(algorithm, SPEC, 12, 6))
    batch = jax.jit(algorithm.postprocess)(variables, rollout, Context())
    if core == "inputs":
        np.testing.assert_array_equal(batch["core_inputs"], previous(rollout).swapaxes(0, 1))
    loss = jax.jit(algorithm.loss)
    whole, mask, _ = loss(variables, batch, Context())
    np.testing.assert_array_equal(mask, rollout.valid.T)
    episodes = [
        (env, begin, end)
        for env in range(6)
        for begin, end in itertools.pairwise([0, *(1 + np.flatnonzero(~rollout.valid[:, env])), 12])
    ]
    assert len(episodes) > 12

    def alone(x: jax.Array) -> np.ndarray:
        """Each episode from the first place on; what follows it does not matter."""
        rows = np.zeros((len(episodes), *x.shape[1:]), x.dtype)
        for row, (env, begin, end) in zip(rows, episodes, strict=True):
            row[: end - begin] = x[env, begin:end]
        return rows

    parts = {name: jax.tree.map(alone, x) for name, x in batch.items() if name != "core"}
    start = algorithm.initial_core(len(episodes))
    start = start["memory"] if core == "inputs" else start
    losses, _, _ = loss(variables, parts | {"core": start}, Context())
    for row, (env, begin, end) in zip(losses, episodes, strict=True):
        assert_close(row[: end - begin], whole[env, begin:end], 1e-6)


@pytest.mark.parametrize("core", runs.cases(CORES, "inputs"))
def test_replayed_sequences_match_single_episodes(core: str) -> None:
    """Whatever part of them the burn-in repeats, from the core that acting stored."""
    config = R2D2(**NET, **CORES[core], **WINDOWED, epsilon_base=1.0)
    algorithm, heads = config.make(SPEC), q_heads(3, num_atoms=1, dueling=True, noisy=False)
    read_by, size = make_core(config, jnp.float32), 4 if core == "inputs" else 0
    network = networks.make_network(config, SPEC.observation, read_by, heads, core_inputs=size)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    variables = variables._replace(params=perturbed(variables.params))
    steps = acted(algorithm, variables, random_rollout(algorithm, SPEC, 20, 8))
    step, reset = jax.jit(network.step), jax.jit(reset_core)
    state = initial = network.initial_core(8)
    values = []
    read = previous(steps) if core == "inputs" else [None] * 20
    for obs, valid, inputs in zip(steps.obs[:-1], steps.valid, read, strict=True):
        q, state = step(variables.params, obs, state, core_inputs=inputs)
        state = reset(state, initial, valid)
        values.append(q)
    taken = np.take_along_axis(np.stack(values)[..., 0], np.asarray(steps.action)[..., None], -1)[
        ..., 0
    ]
    loss, begin, length = jax.jit(algorithm.loss), 7, algorithm.window
    assert (
        length == (12 if core == "inputs" else 11)
        and (~steps.valid[begin : begin + 10]).any(0).sum() > 3
    )

    def cut(x: Any) -> Any:
        return jax.tree.map(lambda x: x[begin : begin + length], x)

    window = Rollout(
        jax.tree.map(lambda x: x[begin : begin + length + 1], steps.obs), *cut(steps[1:7]), (), ()
    )
    batch = algorithm.postprocess(variables, window, Context())
    context = Context(jax.random.split(jax.random.key(0), 8), target=variables.params)
    _, _, aux = loss(variables, batch, context)
    assert_close(aux.metrics["q/mean"], taken[begin + 2 : begin + 10].T, 1e-6)
    _, _, other = loss(variables, batch | {"core": {"q": initial}}, context)
    assert np.max(np.abs(other.metrics["q/mean"] - aux.metrics["q/mean"])) > 1e-4


@pytest.mark.parametrize("name", ["ppo", pytest.param("impala", marks=pytest.mark.case)])
def test_learning_reads_the_inputs_that_acting_read(name: str) -> None:
    """So the values are the same; the last is that of the observation after the rollout."""
    config = config_class(name)(**NET, **CORES["inputs"])
    algorithm, net = config.make(SPEC), actor_critic(config, SPEC)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    whole = acted(algorithm, variables, random_rollout(algorithm, SPEC, 13, 6))
    rollout = acted(
        algorithm, variables, jax.tree.map(lambda x: x[:12], whole)._replace(obs=whole.obs[:13])
    )
    rollout = rollout._replace(core=whole.core)
    recorded = np.asarray(whole.extras["value"])
    assert_close(jax.jit(net.unroll)(variables.params, rollout)[1], recorded, 1e-6)
    assert_close(jax.jit(net.values)(variables, rollout), recorded, 1e-6)
    batch = net.examples(rollout)
    assert_close(jax.jit(net.evaluate)(variables.params, batch)[1], recorded[:12].T, 1e-6)


@pytest.mark.case  # test_rollout_loss_is_that_of_its_episodes
def test_a_policy_is_told_its_reward(tmp_path: Path) -> None:
    sizes = {
        "num_envs": 8,
        "rollout_length": 16,
        "total_env_steps": 256,
        "report_interval": 128,
        "num_devices": 1,
    }
    inputs = {"core": "gru", "core_inputs": "action,reward", "core_size": 4}
    config = jaxrl_dist.preset(
        "a2c", "CartPole-v1", hidden_sizes=(8,), evaluation_episodes=2, **inputs, **sizes
    )
    *_, last = jaxrl_dist.train(dataclasses.replace(config, run_dir=str(tmp_path / "run")))
    assert last.evaluation is not None
    policy, obs = jaxrl_dist.load_policy(tmp_path / "run"), np.ones((3, 4), np.float32)
    first, core = policy(obs)
    _, inputs = core  # the first part is the return, by which a run with a core scales rewards
    np.testing.assert_array_equal(inputs["action"], np.eye(2)[first])
    np.testing.assert_array_equal(inputs["reward"], np.zeros((3, 1)))
    with pytest.raises(ValueError, match="this policy reads the reward of its last action"):
        policy(obs, core)
    (_, low), (_, high) = (policy(obs, core, reward=np.full(3, r))[1] for r in (0.0, 5.0))
    assert np.abs(low["memory"] - high["memory"]).max() > 1e-4


# --- Cores of one's own ---------------------------------------------------------------------------


class Decay:
    """A running sum of features."""

    def init(self, key: jax.Array, features: jax.Array) -> dict[str, jax.Array]:
        return {"rate": jnp.full(features.shape[1:], 0.9)}

    def step(
        self, params: Any, features: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        state = params["rate"][None] * state + features
        return state, state

    def initial(self, num_envs: int) -> jax.Array:
        return jnp.zeros((num_envs, 8))


@pytest.mark.case  # nn/test_own_network.py::test_a_run_and_its_policy
def test_a_run_with_a_core_of_ones_own(tmp_path: Path) -> None:
    """Which the policy and a resumed run need once more: no file holds it."""
    sizes = {
        "num_envs": 8,
        "rollout_length": 16,
        "total_env_steps": 256,
        "report_interval": 128,
        "num_devices": 1,
    }
    config = jaxrl_dist.preset(
        "a2c", "CartPole-v1", core=Decay(), hidden_sizes=(8,), evaluation_episodes=2, **sizes
    )
    *_, last = jaxrl_dist.train(dataclasses.replace(config, run_dir=str(tmp_path / "run")))
    assert runs.read_json(tmp_path / "run/config.json")["hyperparameters"]["core"] == "object:Decay"
    policy = jaxrl_dist.load_policy(tmp_path / "run", core=Decay())
    jax.tree.map(np.testing.assert_array_equal, policy.variables, last.variables())
    assert last.variables().params["core"]["rate"].shape == (8,)
    # beside the return, by which a run with a core scales rewards
    _, (_, state) = policy(np.zeros((3, 4)))
    assert state.shape == (3, 8)
    message = r"its core, object:Decay, was a Python object.*load_policy\(run_dir, core=...\)"
    with pytest.raises(ConfigError, match=message):
        jaxrl_dist.load_policy(tmp_path / "run")
    *_, more = jaxrl_dist.resume(tmp_path / "run", core=Decay(), total_env_steps=384)
    assert more.env_steps >= 384


def wrong(step: Any, initial: Any = lambda num_envs: jnp.zeros((num_envs, 3))) -> Any:
    return (lambda key, x: {}, step, initial)


def joined(params: Any, x: jax.Array, state: jax.Array) -> Any:
    return jnp.concatenate([x, state], -1), state


REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown name": (
        "rnn",
        "unknown core 'rnn'; these work: none, gru, lstm, attention, linear",
    ),
    "a pair": (
        (jnp.tanh, jnp.tanh),
        "core must be a name, or three functions (init, step, initial), not",
    ),
    "a state that grows": (
        wrong(lambda params, x, state: (x, jnp.concatenate([state, x], -1))),
        "the core's step turned a state float32[1, 3] into float32[1, 11]; it must return an equal",
    ),
    "a class": (Decay, "core must be an instance, such as Decay(), not the class Decay"),
    "a state of no environment": (
        wrong(joined, lambda num_envs: jnp.zeros(32)),
        "the core's initial(1) returned (32,); it must return (1, ...), a row for each environment",
    ),
    "a state of one environment": (
        wrong(joined, lambda num_envs: {"a": jnp.zeros((num_envs, 3)), "b": jnp.zeros((1, 3))}),
        "the core's initial(2) returned (1, 3); it must return (2, ...), a row for each environment",
    ),
    "no batch": (
        wrong(lambda params, x, state: (x[0], state)),
        "returned (8,) for features (1, 8); it must return (1, width)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_core(what: str) -> None:
    core, message = REFUSED[what]
    with pytest.raises(ConfigError) as error:
        A2C(hidden_sizes=(8,), core=core).make(SPEC).init(jax.random.key(0))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_flags_without_their_core_are_refused() -> None:
    with pytest.raises(ConfigError, match="core_window does nothing without core attention"):
        A2C(core="gru", core_window=5).validate()
    with pytest.raises(ConfigError, match="core_inputs does nothing without core"):
        A2C(core_inputs="action").validate()
    with pytest.raises(ConfigError, match="r2d2 needs a recurrent core, but core is none; use dqn"):
        R2D2(core="none").validate()
