"""Learners: the same on any number of devices, blind to masked steps, and equal to a naive PPO."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from probes import assert_close, box, learner_of, make_mesh, random_rollout, spec, with_sgd

from jaxrl_dist import mesh as meshes
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.algorithms.a2c import A2C
from jaxrl_dist.algorithms.actor_critic import actor_critic
from jaxrl_dist.algorithms.alphazero import AlphaZero
from jaxrl_dist.algorithms.appo import APPO
from jaxrl_dist.algorithms.ars import ARS
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.es import ES
from jaxrl_dist.algorithms.impala import IMPALA
from jaxrl_dist.algorithms.iql import IQL
from jaxrl_dist.algorithms.marwil import MARWIL
from jaxrl_dist.algorithms.muzero import MuZero
from jaxrl_dist.algorithms.pg import PG
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.algorithms.pqn import PQN
from jaxrl_dist.algorithms.qmix import QMIX
from jaxrl_dist.algorithms.rainbow import Rainbow
from jaxrl_dist.algorithms.sac import SAC
from jaxrl_dist.algorithms.td3 import TD3
from jaxrl_dist.envs.episodes import no_episodes
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners import gradients, off_policy, sgd
from jaxrl_dist.learners.on_policy import check_sizes, envs_per_group
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.plans.report import IntervalSums, metrics_of
from jaxrl_dist.spaces import MultiDiscrete
from jaxrl_dist.types import (
    Algorithm,
    Aux,
    Context,
    EnvSpec,
    Replay,
    Rollout,
    TrainState,
    Variables,
)

DISCRETE, CONTINUOUS = spec(), spec(action=box(2, bound=1.0))
AGENTS = {"agents": {"agent": box(2, 2, bound=1), "observation": box(2, 1)}, "state": box(3)}
TEAM = spec(observation=AGENTS, action=MultiDiscrete((3, 3)))
NET: dict[str, Any] = {"hidden_sizes": (8,), "core_size": 4}
NUM_STEPS, NUM_ENVS = 8, 16
# of which uniform draws are the same on any number of devices; two updates after a rollout
MEMORY: dict[str, Any] = {
    "hidden_sizes": (8,),
    "batch_size": 16,
    "replay_capacity": 16 * NUM_ENVS,
    "replay_ratio": 2 / (NUM_STEPS * NUM_ENVS),
    "learning_starts": 0,
}
SMALL: dict[str, Any] = {"num_atoms": 9, "state_size": 4, "unroll_steps": 2, "n_step": 2}
SEQUENCES: dict[str, Any] = {
    "core": "gru",
    "core_size": 4,
    "core_inputs": "action",
    "burn_in": 2,
    "sequence_length": 3,
}


@functools.cache
def compiled(
    algorithm: Algorithm, num_devices: int, case: str
) -> tuple[TrainState, meshes.Program]:
    """The state to begin with, on the host, and the update, by the path that plans take,
    in a case's environment.
    """
    learner = learner_of(algorithm, CASES[case][1], NUM_ENVS, NUM_STEPS, num_devices)
    state = jax.device_get(jax.jit(learner.init)(jax.random.key(0)))
    return state, compile_update(learner, make_mesh(num_devices))


def updated(
    algorithm: Algorithm,
    rollouts: list[Rollout],
    num_devices: int,
    variables: Variables | None = None,
    case: str = "ppo",
) -> tuple[TrainState, Any]:
    """State and metrics after an update with each rollout."""
    mesh = make_mesh(num_devices)
    state, program = compiled(algorithm, num_devices, case)
    if variables is not None:
        state = state._replace(variables=variables)
    state = jax.device_put(state, meshes.shardings(mesh, meshes.STATE))
    key = meshes.put(jax.random.key(1), mesh, meshes.REPLICATED)
    for rollout in rollouts:
        placed = [
            meshes.put(x, mesh, where) for x, where in zip(rollout, meshes.ROLLOUT, strict=True)
        ]
        state, metrics = program(state, Rollout(*placed), key)
    return jax.device_get(state), jax.device_get(metrics)


# --- Devices --------------------------------------------------------------------------------------

# with running statistics, without, or of observations alone
CASES: dict[str, tuple[Any, EnvSpec, bool | str]] = {
    "ppo": (PPO(**NET, num_epochs=4, num_minibatches=4), DISCRETE, False),
    # two environments a group
    "ppo-continuous": (PPO(**NET, num_epochs=2, num_minibatches=16), CONTINUOUS, True),
    "ppo-gru": (PPO(**NET, core="gru", num_epochs=2, num_minibatches=2), DISCRETE, True),
    "a2c": (A2C(**NET), DISCRETE, True),
    "a2c-gru": (A2C(**NET, core="gru"), CONTINUOUS, False),
    "pg": (PG(**NET), CONTINUOUS, True),
    "pg-discrete": (PG(**NET), DISCRETE, False),
    "impala": (IMPALA(**NET), CONTINUOUS, True),
    "appo": (APPO(**NET, num_epochs=2, num_minibatches=2), DISCRETE, False),
    "pqn": (PQN(hidden_sizes=(8,), num_epochs=2, num_minibatches=4), DISCRETE, True),
    "dqn": (DQN(**MEMORY, n_step=3), DISCRETE, True),
    "rainbow": (Rainbow(**MEMORY, num_atoms=5, priority_exponent=None), DISCRETE, False),
    # so ddpg, which is the same
    "td3": (TD3(**MEMORY, n_step=2, noise="ornstein_uhlenbeck"), CONTINUOUS, True),
    "td3-parameter": (TD3(**MEMORY, noise="parameter"), CONTINUOUS, True),
    "qmix-gru": (QMIX(**MEMORY, **SEQUENCES), TEAM, False),
    "td3-behaviour": (
        TD3(**MEMORY, behaviour_weight=0.5, critic_behaviour_weight=0.5, normalize_q=True),
        CONTINUOUS,
        True,
    ),
    "sac": (SAC(**MEMORY), CONTINUOUS, False),
    "sac-cql": (SAC(**MEMORY, cql_weight=1.0), CONTINUOUS, False),
    "sac-discrete": (SAC(**MEMORY), DISCRETE, False),
    "iql": (IQL(**MEMORY, n_step=2), CONTINUOUS, True),
    "marwil": (MARWIL(**{**MEMORY, "n_step": 3}), CONTINUOUS, True),
    "alphazero": (AlphaZero(hidden_sizes=(8,), num_epochs=2, num_minibatches=2), DISCRETE, True),
    "muzero": (MuZero(**MEMORY, **SMALL, priority_exponent=None), DISCRETE, True),
    "es": (ES(hidden_sizes=(8,)), CONTINUOUS, False),
    "ars": (ARS(), DISCRETE, "observations"),
}


@functools.cache
def make(name: str) -> tuple[Algorithm, list[Rollout]]:
    """An algorithm with SGD, and two rollouts whose valid steps lie unevenly over the devices."""
    config, env, with_stats = CASES[name]
    algorithm = config.make(env)
    if with_stats:
        algorithm = wrappers.normalize_observations(algorithm, env)
        if with_stats != "observations":
            algorithm = wrappers.scale_rewards(algorithm, config.discount)
    ends = np.linspace(0, 1, NUM_ENVS)
    algorithm = with_sgd(algorithm)
    return algorithm, [
        random_rollout(algorithm, env, NUM_STEPS, NUM_ENVS, seed, ends) for seed in (1, 2)
    ]


DEVICES = {"ppo": (8, 2), "ppo-continuous": (4,), "dqn": (8, 2)}


@pytest.mark.parametrize(
    "name, num_devices",
    [
        pytest.param(name, n, marks=[] if name == "ppo-gru" else pytest.mark.case)
        for name in CASES
        for n in DEVICES.get(name, (8,))
    ],
)
def test_one_device_is_as_many(name: str, num_devices: int) -> None:
    """Parameters, running statistics, optimiser state, counts, memory and metrics,
    after two rollouts.
    """
    algorithm, rollouts = make(name)
    one = updated(algorithm, rollouts, 1, case=name)
    assert one[0].updates == 2 * (
        2 if algorithm.replay else algorithm.num_epochs * algorithm.num_minibatches
    )
    assert one[0].iteration == 2 and one[0].env_step == 2 * NUM_STEPS * NUM_ENVS
    assert_close(updated(algorithm, rollouts, num_devices, case=name), one)


@pytest.mark.case  # test_each_epoch_sees_every_example_once
def test_shuffling_changes_the_result() -> None:
    """Else the test above could not see that devices shuffle alike."""
    algorithm, rollouts = make("ppo")
    first, second = (
        updated(dataclasses.replace(algorithm, num_epochs=1, num_minibatches=n), rollouts[:1], 1)[0]
        for n in (1, 4)
    )
    with pytest.raises(AssertionError):
        assert_close(first.variables, second.variables)


def test_mean_over_unequal_masks() -> None:
    """``psum / psum``, differentiated as it stands;
    a mean of the devices' own means would be another number.
    """
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=32), rng.normal(size=32)
    # the first device has nothing at all
    mask = rng.random(32) < np.repeat(np.linspace(0, 0.9, 8), 4)
    values = {"x": x.astype(np.float32), "noise": noise.astype(np.float32), "mask": mask}

    def loss(variables: Variables, batch: Any, context: Context) -> Any:
        losses = jnp.square(variables.params["w"] * batch["x"] - batch["noise"])
        return jnp.where(batch["mask"], losses, jnp.nan), batch["mask"], Aux({"mean": batch["x"]})

    algorithm = Algorithm(
        init=lambda key: Variables({"w": jnp.float32(0.7)}, ()),
        policy=lambda *_: ((), (), ()),
        postprocess=lambda *_: (),
        loss=loss,
        optimizer=with_sgd(PG(**NET).make(DISCRETE)).optimizer,
    )

    def run(state: TrainState, batch: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), batch["x"].shape)
        mean = (
            meshes.global_mean(batch["x"], batch["mask"]),
            meshes.global_mean(batch["x"], batch["x"] > 99),
        )
        return *sgd.gradient(algorithm, state, batch, keys)[:2], mean

    mesh = make_mesh(8)
    state = sgd.init(algorithm, jax.random.key(0))
    program = meshes.Program(run, mesh, (meshes.REPLICATED, meshes.BATCH), meshes.REPLICATED)
    placed = meshes.put(state, mesh, meshes.REPLICATED), meshes.put(values, mesh, meshes.BATCH)
    grads, metrics, (mean, empty) = program(*placed)
    error = 0.7 * x - noise
    np.testing.assert_allclose(grads["w"], np.mean((2 * error * x)[mask]), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss/total"], np.mean((error**2)[mask]), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["gradient/norm"], abs(np.mean((2 * error * x)[mask])), rtol=1e-5
    )
    np.testing.assert_allclose([metrics["mean"], mean], np.mean(x[mask]), rtol=1e-5)
    assert empty == 0
    by_device = [
        np.mean(part[keep])
        for part, keep in zip(np.split(x, 8), np.split(mask, 8), strict=True)
        if keep.any()
    ]
    assert abs(np.mean(by_device) - np.mean(x[mask])) > 0.01  # so the test can tell


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize(
    "weights", [[0.5, 1.0, 2.0], [1e-3], [1, 3]], ids=["mixed", "small", "whole"]
)
def test_a_mask_of_weights_makes_a_weighted_mean(weights: list[float], num_devices: int) -> None:
    """Against float64, beside importance weights, which metrics do not have;
    a weight of 0 hides even NaN.
    """
    rng = np.random.default_rng(0)
    x, noise, importance = rng.normal(size=32), rng.normal(size=32), rng.random(32)
    mask = rng.choice([0, *weights], size=32)
    batch = {"x": np.float32(x), "noise": np.float32(noise)}
    batch["mask"] = mask.astype(np.int32 if isinstance(weights[0], int) else np.float32)

    def loss(variables: Variables, batch: Any, context: Context) -> Any:
        w = variables.params["w"]
        losses = jnp.where(batch["mask"] == 0, jnp.nan, jnp.square(w * batch["x"] - batch["noise"]))
        # Of a weight that depends on the parameters, no gradient is taken.
        mask = (
            batch["mask"] * (1 + w - jax.lax.stop_gradient(w))
            if weights == [1e-3]
            else batch["mask"]
        )
        return losses, mask, Aux({"mean": batch["x"]})

    params = {"w": jnp.float32(0.7)}
    algorithm = dataclasses.replace(
        PG(**NET).make(DISCRETE), init=lambda key: Variables(params, ()), loss=loss
    )

    def run(state: TrainState, batch: Any, importance: jax.Array) -> Any:
        keys = jax.vmap(jax.random.key)(meshes.global_index(len(importance)))
        return sgd.gradient(algorithm, state, batch, keys, importance)[:2]

    specs = (meshes.REPLICATED, meshes.BATCH, meshes.BATCH)
    program = jax.jit(meshes.learning(run, make_mesh(num_devices), specs, meshes.REPLICATED))
    grads, metrics = program(sgd.init(algorithm, jax.random.key(0)), batch, np.float32(importance))
    assert 0 < (mask == 0).sum() < 32
    error, total = 0.7 * x - noise, mask.sum()
    np.testing.assert_allclose(
        metrics["loss/total"], (mask * importance * error**2).sum() / total, rtol=1e-5
    )
    np.testing.assert_allclose(
        grads["w"], (mask * importance * 2 * error * x).sum() / total, rtol=1e-5
    )
    np.testing.assert_allclose(metrics["mean"], (mask * x).sum() / total, rtol=1e-5)


@pytest.mark.parametrize(
    "num_examples, each, parts",
    [
        (4096, (), 1),
        (4098, (), 2),
        (65536, (), 16),
        (100, (128,), 4),
        (12000, (), 3),
        (4099, (), 1),
        (3, (9000,), 1),
    ],
)
def test_examples_are_divided_into_parts_that_are_equal(
    num_examples: int, each: tuple[int, ...], parts: int
) -> None:
    assert sgd.num_parts(4096, num_examples, *each) == parts


@pytest.mark.parametrize(
    "side, kernels, parts",
    [
        (84, [(8, 8, 4, 32), (512, 6)], 9),  # 640 frames of Atari, of which 2 MB hold 74
        (10, [(3, 3, 4, 16), (128, 6)], 1),  # of MinAtar
        (84, [(28224, 64), (64, 6)], 1),  # without convolutions
    ],
)
def test_large_images_are_convolved_in_small_parts(
    side: int, kernels: list[tuple[int, ...]], parts: int
) -> None:
    params = [jax.ShapeDtypeStruct(shape, np.float32) for shape in kernels]
    batch = {"obs": jax.ShapeDtypeStruct((640, side, side, 4), np.uint8)}
    most = sgd._microbatch(params, batch, 640)
    assert -(-640 // most) == parts


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    "each, total, num_bytes", [((), 2**14, 1), ((3,), 10240, 1), ((3,), 2**8, 2**15)]
)
def test_the_gradient_of_parts_is_that_of_the_whole(
    each: tuple[int, ...], total: int, num_bytes: int, num_devices: int
) -> None:
    """With masked examples, weights, keys and priorities, which stay in order; against float64."""
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=(total, *each)).astype(np.float32) for name in ("x", "y")}
    values["mask"] = rng.random((total, *each)) < 0.7
    values["other"] = np.zeros((total, num_bytes), np.uint8)
    weight = rng.random(total).astype(np.float32)
    keys = jax.vmap(jax.random.key)(np.arange(total))

    def loss(variables: Variables, batch: Any, context: Context) -> Any:
        noise = jax.vmap(jax.random.normal)(context.keys).reshape(-1, *(1,) * len(each))
        error = jnp.sum(variables.params["w"]) * batch["x"] - batch["y"] + noise
        priority = jnp.abs(error).reshape(len(error), -1).sum(axis=1)
        return jnp.square(error), batch["mask"], Aux({"error": error}, priority)

    # The limit in bytes holds where a parameter is the kernel of a convolution.
    params = {"w": jnp.full((1, 1, 1, 1) if num_bytes > 1 else (), 0.7)}
    algorithm = dataclasses.replace(
        PG(**NET).make(DISCRETE), init=lambda key: Variables(params, ()), loss=loss
    )
    specs = meshes.REPLICATED, meshes.BATCH, meshes.BATCH, meshes.BATCH
    function = jax.jit(
        meshes.learning(
            lambda *args: sgd.gradient(algorithm, *args),
            make_mesh(num_devices),
            specs,
            (*specs[:1] * 2, meshes.BATCH),
        )
    )
    state = sgd.init(algorithm, jax.random.key(0))
    program = str(jax.make_jaxpr(function)(state, values, keys, weight))
    assert "scan[" in program and (",1024]" in program) == (each == ()), (
        "one after the other, and on GPUs all at once"
    )
    grads, metrics, priority = function(state, values, keys, weight)
    x, y, mask = (values[name].astype(np.float64) for name in ("x", "y", "mask"))
    error = (
        0.7 * x - y + np.asarray(jax.vmap(jax.random.normal)(keys)).reshape(-1, *(1,) * len(each))
    )
    weights = mask * weight.reshape(-1, *(1,) * len(each)) / mask.sum()
    np.testing.assert_allclose(np.ravel(grads["w"]), [(weights * 2 * error * x).sum()], rtol=1e-4)
    np.testing.assert_allclose(metrics["loss/total"], (weights * error**2).sum(), rtol=1e-4)
    np.testing.assert_allclose(metrics["error"], (mask * error).sum() / mask.sum(), atol=1e-5)
    np.testing.assert_allclose(
        priority, np.abs(error).reshape(total, -1).sum(axis=1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("way", [sgd._in_turn, sgd._side_by_side])
def test_sums_of_parts_are_those_of_the_whole(way: Any) -> None:
    """On CPUs one part after the other, and on GPUs all at once."""
    examples = np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32)

    def function(params: Any, examples: jax.Array) -> Any:
        errors = examples @ params["w"] - params["b"]
        return (
            jax.grad(lambda p: jnp.square(examples @ p["w"] - p["b"]).sum())(params),
            errors.sum(),
        ), errors

    params = {"w": jnp.array([0.5, 2.0]), "b": jnp.float32(0.1)}
    assert_close(way(function, 3, params, examples), function(params, examples), 1e-5)


# --- Masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", runs.cases(["ppo", "ppo-gru", "a2c", "pg"], "ppo-gru", "a2c"))
def test_reset_steps_teach_nothing(name: str) -> None:
    """Garbage in all that a reset step holds, except for the observation that it begins with: the
    one its episode ended on, which a truncation bootstraps from through the value found while
    acting.
    """
    algorithm, (rollout, _) = make(name)
    off = ~rollout.valid
    assert 10 < off.sum() < off.size / 2

    def spoil(x: np.ndarray) -> np.ndarray:
        garbage = (99 + np.arange(x.size).reshape(x.shape) % 7).astype(x.dtype)
        return np.where(off.reshape(*off.shape, *[1] * (x.ndim - 2)), garbage, x)

    spoilt = rollout._replace(
        obs=np.concatenate([spoil(rollout.obs[:-1]), rollout.obs[-1:]]),
        action=spoil(rollout.action)
        if rollout.action.dtype == np.float32
        else spoil(rollout.action) % 3,
        reward=spoil(rollout.reward),
        extras={**rollout.extras, "log_prob": spoil(rollout.extras["log_prob"])},
    )
    plain, garbage = (updated(algorithm, [each], 1) for each in (rollout, spoilt))
    assert_close(garbage, plain, 1e-6)
    # The value found there is the bootstrap of the truncations, and so must matter.
    other = rollout._replace(extras={**rollout.extras, "value": spoil(rollout.extras["value"])})
    with pytest.raises(AssertionError):
        assert_close(updated(algorithm, [other], 1)[0].variables, plain[0].variables)


# --- A naive PPO ----------------------------------------------------------------------------------


def naive_ppo_loss(params: Any, rollout: Rollout, config: PPO) -> jax.Array:
    """Equation 9 of Schulman et al. (2017), step by step in float64,
    for a tanh network of one hidden layer.
    """

    def dense(layer: Any, x: Any) -> Any:
        return x @ layer["params"]["kernel"] + layer["params"]["bias"]

    def network(obs: Any) -> tuple[Any, Any]:
        towers = [
            jnp.tanh(dense({"params": params[name]["params"]["Dense_0"]}, obs)) for name in TOWERS
        ]
        return dense(params["policy"], towers[0]), dense(params["value"], towers[1])[0]

    num_steps, num_envs = rollout.reward.shape
    old = rollout.extras["value"]
    last = [float(jax.lax.stop_gradient(network(rollout.obs[-1, b])[1])) for b in range(num_envs)]
    values = [*old, last]
    advantage = np.zeros((num_steps, num_envs))
    for b in range(num_envs):
        for t in reversed(range(num_steps)):
            if not rollout.valid[t, b]:
                continue
            bootstrap = 0.0 if rollout.terminated[t, b] else values[t + 1][b]
            advantage[t, b] = rollout.reward[t, b] + config.discount * bootstrap - values[t][b]
            ended = rollout.terminated[t, b] or rollout.truncated[t, b]
            if not ended and t + 1 < num_steps:
                advantage[t, b] += config.discount * config.gae_lambda * advantage[t + 1, b]
    valid = [(t, b) for t in range(num_steps) for b in range(num_envs) if rollout.valid[t, b]]
    chosen = np.array([advantage[i] for i in valid])
    mean, std = chosen.mean(), np.sqrt(chosen.var() + 1e-8)
    total = 0.0
    for i in valid:
        logits, value = network(rollout.obs[i])
        log_probs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(log_probs[rollout.action[i]] - rollout.extras["log_prob"][i])
        a = (advantage[i] - mean) / std
        surrogate = jnp.minimum(
            ratio * a, jnp.clip(ratio, 1 - config.clip_epsilon, 1 + config.clip_epsilon) * a
        )
        target = advantage[i] + old[i]
        near = old[i] + jnp.clip(
            value - old[i], -config.value_clip_epsilon, config.value_clip_epsilon
        )
        error = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs)
        total += (
            -surrogate + config.value_coefficient * error - config.entropy_coefficient * entropy
        )
    return total / len(valid)


TOWERS = ("policy_torso", "value_torso")


def test_ppo_against_a_naive_one() -> None:
    config = PPO(
        hidden_sizes=(5,),
        num_epochs=1,
        num_minibatches=1,
        value_clip_epsilon=0.1,
        entropy_coefficient=0.03,
    )
    config = dataclasses.replace(config, clip_epsilon=0.4)
    algorithm = with_sgd(config.make(DISCRETE), 1.0)
    rollout = random_rollout(algorithm, DISCRETE, 5, 3, seed=5, end_chance=0.4)
    assert (~rollout.valid).any() and rollout.truncated.any() and rollout.terminated.any()
    init = jax.device_get(jax.jit(algorithm.init)(jax.random.key(5)))
    # Away from the start, where logits are nearly 0.
    init = jax.tree.map(
        lambda x: x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape).astype(x.dtype), init
    )
    state, metrics = updated(algorithm, [rollout], 1, init)
    with jax.enable_x64(True):
        exact = [
            jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, x)
            for x in (init, rollout)
        ]
        loss, grads = jax.value_and_grad(naive_ppo_loss)(exact[0].params, exact[1], config)
        expected = jax.tree.map(lambda x, g: np.asarray(x - g, np.float32), exact[0].params, grads)
    np.testing.assert_allclose(metrics["loss/total"], loss, rtol=1e-5)
    assert 0 < metrics["policy/clip_fraction"] < 1  # both branches count
    assert_close(state.variables.params, expected)


@pytest.mark.parametrize("size", [pytest.param(1.0, marks=pytest.mark.case), 1e-3])
def test_advantages_are_scaled_down_but_hardly_up(size: float) -> None:
    """Where nothing is rewarded, advantages are the errors of the values."""
    algorithm = PPO(**NET, discount=0.0).make(DISCRETE)
    rollout = random_rollout(algorithm, DISCRETE, 20, 8)
    values = {**rollout.extras, "value": size * rollout.extras["value"]}
    rollout = rollout._replace(reward=size * rollout.reward, extras=values)
    batch = meshes.by_hand(algorithm.postprocess)(
        jax.jit(algorithm.init)(jax.random.key(0)), rollout, Context()
    )
    valid = rollout.valid.T.reshape(-1)
    error = (rollout.reward - values["value"]).T.reshape(-1).astype(np.float64)[valid]
    assert (error.std() > 0.01) == (size == 1)
    expected = (error - error.mean()) / max(error.std(), 0.01)
    np.testing.assert_allclose(batch["advantage"][valid], expected, rtol=1e-4, atol=1e-6)


# --- Minibatches ----------------------------------------------------------------------------------


def minibatches(num_devices: int, num_epochs: int, num_minibatches: int) -> np.ndarray:
    """Which examples each update of a rollout saw: bool ``[epochs, minibatches, examples]``.

    The parameters are that table: the gradient says which examples a minibatch holds,
    and the optimiser writes it down.
    """
    total, num_updates = NUM_STEPS * NUM_ENVS, num_epochs * num_minibatches

    def loss(variables: Variables, batch: Any, context: Context) -> Any:
        return variables.params.sum(axis=0)[batch], jnp.ones(batch.shape, bool), Aux({})

    def write(grads: jax.Array, count: jax.Array, params: Any) -> Any:
        row = jnp.arange(num_updates) == count
        return row[:, None].astype(jnp.float32) * (grads > 0), count + 1

    template = PG(**NET).make(DISCRETE)
    algorithm = dataclasses.replace(
        template,
        init=lambda key: Variables(jnp.zeros((num_updates, total)), ()),
        postprocess=lambda variables, rollout, context: rollout.action.T.reshape(-1),
        loss=loss,
        optimizer=optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), write),
        num_epochs=num_epochs,
        num_minibatches=num_minibatches,
    )
    check_sizes(algorithm, NUM_ENVS, NUM_STEPS, num_devices)
    rollout = random_rollout(template, DISCRETE, NUM_STEPS, NUM_ENVS)
    numbers = np.arange(total, dtype=np.int32).reshape(NUM_ENVS, NUM_STEPS).T
    state, _ = updated(algorithm, [rollout._replace(action=numbers)], num_devices)
    assert state.updates == num_updates
    table = state.variables.params.reshape(num_epochs, num_minibatches, total)
    assert set(np.unique(table)) <= {0, 1}
    return table.astype(bool)


@pytest.mark.parametrize(
    "num_minibatches, num_devices", [pytest.param(1, 8, marks=pytest.mark.case), (4, 8), (16, 4)]
)
def test_each_epoch_sees_every_example_once(num_minibatches: int, num_devices: int) -> None:
    table = minibatches(1, 3, num_minibatches)
    np.testing.assert_array_equal(table.sum(axis=1), 1)
    np.testing.assert_array_equal(table.sum(axis=2), NUM_STEPS * NUM_ENVS // num_minibatches)
    np.testing.assert_array_equal(minibatches(num_devices, 3, num_minibatches), table)
    if num_minibatches > 1:
        assert (table[0] != table[1]).any() and (table[1] != table[2]).any()
        chunks = np.repeat(
            np.eye(num_minibatches, dtype=bool), NUM_STEPS * NUM_ENVS // num_minibatches, axis=1
        )
        assert (table[0] != chunks).any()


SIZES = st.integers(1, 24)


@hypothesis.given(SIZES, SIZES, SIZES, st.sampled_from([1, 2, 8]))
@hypothesis.settings(max_examples=200, deadline=None)
def test_sizes_are_refused_with_what_would_work(
    envs: int, steps: int, wanted: int, devices: int
) -> None:
    transitions = PG(**NET).make(DISCRETE)

    def fits(num_envs: int, num_minibatches: int) -> bool:
        algorithm = dataclasses.replace(transitions, num_minibatches=num_minibatches)
        try:
            check_sizes(algorithm, num_envs, steps, devices)
        except ConfigError:
            return False
        return True

    if fits(envs, wanted):
        assert envs % devices == 0 and (envs // devices * steps) % wanted == 0
        assert (envs // devices) % envs_per_group(steps, wanted) == 0
        return
    with pytest.raises(ConfigError) as caught:
        check_sizes(dataclasses.replace(transitions, num_minibatches=wanted), envs, steps, devices)
    message = str(caught.value)
    flag, number = ("num_envs", envs) if envs % devices else ("num_minibatches", wanted)
    assert message.startswith(f"{flag} {number} does not divide")
    nearest = [int(n) for n in message.split("nearest that work: ")[1].split(" or ")]
    assert nearest
    for n in nearest:
        assert fits(n, 1) if envs % devices else fits(envs, n)
    between = range(max(1, min(nearest) + 1), max(nearest)) if len(nearest) > 1 else ()
    for n in between:
        assert not (fits(n, 1) if envs % devices else fits(envs, n))


def test_sizes_that_are_refused() -> None:
    ppo = PPO(**NET, num_minibatches=3).make(DISCRETE)
    with pytest.raises(
        ConfigError,
        match=r"^num_envs.*9.*8.*8.*16$",
    ):
        check_sizes(ppo, 9, 8, 8)
    with pytest.raises(ConfigError, match=r"^num_minibatches.*3.*2.*8.*2.*4$"):
        check_sizes(ppo, 16, 8, 8)
    # A recurrent policy learns from whole rollouts: one example an environment.
    gru = PPO(**NET, core="gru", num_minibatches=4).make(DISCRETE)
    check_sizes(gru, 32, 8, 8)
    with pytest.raises(ConfigError, match=r"^num_minibatches.*4.*2.*1.*2$"):
        check_sizes(gru, 16, 8, 8)


# --- Gradients that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.case), 8])
@pytest.mark.parametrize(
    "algorithm",
    [PPO(**NET, num_epochs=2), pytest.param(DQN(**MEMORY), marks=pytest.mark.case)],
    ids=["ppo", "dqn"],
)
def test_non_finite_gradient_is_skipped_and_counted(algorithm: Any, num_devices: int) -> None:
    made = algorithm.make(DISCRETE)
    good = random_rollout(made, DISCRETE, NUM_STEPS, NUM_ENVS, seed=0)
    bad = good._replace(reward=np.full_like(good.reward, np.nan))
    before, _ = updated(made, [good], num_devices)
    after, metrics = updated(made, [good, bad], num_devices)
    kept = ("variables", "opt_state", "target")
    for name in kept:
        for old, new in zip(
            *(jax.tree.leaves(getattr(state, name)) for state in (before, after)), strict=True
        ):
            np.testing.assert_array_equal(old, new)
    assert before.skipped == 0
    assert after.skipped > 0
    assert metrics["gradient/skipped"] == 1.0
    again, metrics = updated(
        made, [good, bad, good] if made.replay is None else [good], num_devices
    )
    assert again.skipped == 0
    assert metrics["gradient/skipped"] == 0.0


def test_a_mean_over_a_skipped_update_is_missing() -> None:
    since = IntervalSums(
        np.int32(4),
        {"": np.int32(4)},
        {"": {"loss/total": np.nan, "loss/other": 2.0}},
        {"": no_episodes(1)},
    )
    metrics = metrics_of(since)
    assert metrics["loss/total"] is None and metrics["loss/other"] == 0.5


def test_non_finite_loss_with_finite_gradient_is_skipped() -> None:
    """An index out of range gives NaN, whose gradient is 0."""

    def loss(variables: Variables, batch: Any, context: Context) -> Any:
        return (
            jnp.take_along_axis(variables.params, batch, axis=0),
            jnp.ones(batch.shape, bool),
            Aux({}),
        )

    template = with_sgd(PG(**NET).make(DISCRETE), 1.0)
    algorithm = dataclasses.replace(
        template, init=lambda key: Variables(jnp.zeros(3), ()), loss=loss
    )

    @jax.jit
    @meshes.by_hand
    def update(state: TrainState, batch: jax.Array) -> Any:
        grads, metrics, _ = sgd.gradient(
            algorithm, state, batch, jax.random.split(jax.random.key(0), len(batch))
        )
        return sgd.apply(algorithm, state, grads), metrics

    state, metrics = update(sgd.init(algorithm, jax.random.key(0)), jnp.array([0, 3]))
    assert metrics["gradient/skipped"] == state.skipped == 1
    np.testing.assert_array_equal(state.variables.params, np.zeros(3))
    state, metrics = update(state, jnp.array([0, 2]))
    assert metrics["gradient/skipped"] == state.skipped == 0
    np.testing.assert_array_equal(state.variables.params, [-0.5, 0, -0.5])


def test_ten_in_a_row_are_the_end() -> None:
    made = PG(**NET).make(DISCRETE)
    good = random_rollout(made, DISCRETE, NUM_STEPS, NUM_ENVS, seed=0)
    bad = good._replace(reward=np.full_like(good.reward, np.nan))
    nine, _ = updated(made, [bad] * (sgd.MAX_SKIPPED - 1) + [good], 1)
    assert nine.skipped == 0
    ten, _ = updated(made, [bad] * sgd.MAX_SKIPPED + [good], 1)
    assert ten.skipped == sgd.MAX_SKIPPED + 1
    initial, _ = compiled(made, 1, "ppo")
    for old, new in zip(
        *(jax.tree.leaves(state.variables) for state in (initial, ten)), strict=True
    ):
        np.testing.assert_array_equal(old, new)


# --- What a loss returns --------------------------------------------------------------------------

X = np.ones(4)
RETURNED: dict[str, tuple[Any, str]] = {
    "no aux": ((X, X), "must return losses, a mask and Aux(metrics), not (array, array)"),
    "losses alone": (X, "not (array)"),
    "no mask": ((X, None, Aux({})), "not (array, NoneType, Aux)"),
    "a dict": ((X, X, {"x": X}), "not (array, array, dict)"),
    "a mean": (
        (X.mean(), X, Aux({})),
        "returned losses () with a mask (4,); return both with an entry for each of 4",
    ),
    "a number": ((1.0, X, Aux({})), "returned losses () with a mask (4,)"),
    "a column": (
        (X[:, None], X[:, None], Aux({"x": X})),
        "returned losses (4, 1) with a metric 'x' (4,)",
    ),
    "a table": (
        (X, X, Aux({"x": np.ones((4, 7))})),
        "returned losses (4,) with a metric 'x' (4, 7)",
    ),
    "a mean priority": (
        (X, X, Aux({}, X.mean())),
        "returned an Aux.priority (); return an entry for each of 4",
    ),
    "a column of priorities": ((X, X, Aux({}, X[:, None])), "returned an Aux.priority (4, 1)"),
    "no priority": (
        (X, X, Aux({})),
        "returned no Aux.priority, which prioritised replay needs",
    ),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_loss_that_returns_something_else_is_refused(name: str) -> None:
    returned, message = RETURNED[name]
    replay = Replay(64, 4, 1.0, 0, priority_exponent=0.6 if "priorit" in name else None)
    template = dataclasses.replace(PG(**NET).make(DISCRETE), window=1, replay=replay)
    algorithm = dataclasses.replace(template, loss=lambda variables, batch, context: returned)
    with pytest.raises(ConfigError, match=re.escape(message)):
        sgd.losses_of(
            algorithm, Variables((), ()), (), Context(jax.random.split(jax.random.key(0), 4))
        )


def test_priorities_have_no_sign_and_are_finite() -> None:
    """One that is NaN would poison the sums from which windows are drawn."""
    replay = Replay(64, 4, 1.0, 0, priority_exponent=0.5)
    powered = off_policy.powered_priority(
        replay, jnp.array([4.0, -4.0, 0.0, jnp.nan, jnp.inf, -jnp.inf])
    )
    np.testing.assert_allclose(powered, [2, 2, 1e-3, 1e-3, 1e-3, 1e-3], rtol=1e-6)


# --- Random numbers -------------------------------------------------------------------------------


def test_keys_differ_between_rollouts_and_replay_rounds() -> None:
    """In each of the ways to learn, which all get the same key."""

    def drawing(config: Any) -> Algorithm:
        """Its losses are those of ``config``;
        what each example draws is the metric and the priority.
        """
        algorithm = config.make(DISCRETE)

        def loss(variables: Variables, batch: Any, context: Context) -> Any:
            losses, mask, _ = jax.jit(algorithm.loss)(variables, batch, context)
            drawn = jax.vmap(jax.random.uniform)(context.keys)
            return losses, jnp.ones_like(mask), Aux({"drawn": drawn}, drawn)

        return dataclasses.replace(algorithm, loss=loss)

    fresh, replayed = drawing(PG(**NET)), drawing(DQN(**MEMORY, priority_exponent=0.6))
    rollouts = [
        random_rollout(algorithm, DISCRETE, NUM_STEPS, NUM_ENVS) for algorithm in (fresh, replayed)
    ]
    learners = [
        learner_of(algorithm, DISCRETE, NUM_ENVS, NUM_STEPS) for algorithm in (fresh, replayed)
    ]
    states = [jax.jit(learner.init)(jax.random.key(0)) for learner in learners]
    key = jax.random.key(1)

    @jax.jit
    @meshes.by_hand
    def draw(number: jax.Array) -> dict[str, jax.Array]:
        on, off = (state._replace(iteration=number) for state in states)
        return {
            "on policy": learners[0].update(on, rollouts[0], key)[1]["drawn"],
            "off policy": learners[1].update(off, rollouts[1], key)[1]["drawn"],
            "from memory": learners[1].relearn(states[1]._replace(updates=number), key)[1]["drawn"],
            "gradients": gradients.gradient(fresh, states[0], rollouts[0], key, number)[1]["drawn"],
            "priorities": off_policy.initial_priority(
                replayed, states[1], rollouts[1], key, number
            ),
        }

    first, second = draw(jnp.int32(0)), draw(jnp.int32(1))
    assert [name for name in first if not (np.abs(first[name] - second[name]) > 0).any()] == []


# --- Stopping early -------------------------------------------------------------------------------


@pytest.mark.case  # test_ppo_against_a_naive_one
@pytest.mark.parametrize("num_devices", [1, 8])
def test_target_kl_skips_the_remaining_updates(num_devices: int) -> None:
    """As fewer epochs do, each of one update; the first is that of the acting policy,
    from which it cannot diverge.
    """
    config = PPO(**NET, learning_rate=0.05, num_epochs=6, num_minibatches=1)
    whole, net = config.make(DISCRETE), actor_critic(config, DISCRETE)
    variables = jax.device_get(whole.init(jax.random.key(3)))
    rollout = random_rollout(whole, DISCRETE, NUM_STEPS, NUM_ENVS)
    log_prob = net.unroll(variables.params, rollout)[0].log_prob(rollout.action)
    rollout = rollout._replace(extras={**rollout.extras, "log_prob": np.asarray(log_prob)})
    made = []
    for limit in (1e-9, 0.01, 1e9):
        algorithm = dataclasses.replace(config, target_kl=limit).make(DISCRETE)
        state, metrics = updated(algorithm, [rollout], num_devices, variables)
        made.append(int(state.updates))
        epochs = dataclasses.replace(config, num_epochs=made[-1]).make(DISCRETE)
        expected, theirs = updated(epochs, [rollout], num_devices, variables)
        assert_close(state.variables, expected.variables)
        assert float(metrics["learner/left_out"]) == pytest.approx(1 - made[-1] / 6)
        assert "learner/left_out" not in theirs and np.isfinite(list(metrics.values())).all()
    assert made[0] == 1 < made[1] < made[2] == 6


def test_an_update_exceeds_target_kl_by_half_of_it() -> None:
    """Stable-Baselines3 stops beyond 1.5 times the target."""
    done = PPO(**NET, target_kl=0.01).make(DISCRETE).done
    assert done is not None
    assert [bool(done({"policy/approx_kl": jnp.float32(kl)})) for kl in (0.014, 0.016)] == [
        False,
        True,
    ]
