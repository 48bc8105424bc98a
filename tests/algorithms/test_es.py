"""Evolution strategies: ranks and weights against naive loops, gradients against analytic ones,
and what is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from flax import struct
from gymnax.environments import environment, spaces
from probes import assert_close, learner_of, make_mesh, make_session, random_rollout, spec, with_sgd

from jaxrl_dist import mesh as meshes
from jaxrl_dist import preset, rng, train
from jaxrl_dist.actors import device
from jaxrl_dist.algorithms.ars import ARS
from jaxrl_dist.algorithms.es import ES, centred_ranks
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners import sgd
from jaxrl_dist.learners.sharded import compile_update
from jaxrl_dist.nn import perturbation
from jaxrl_dist.plans.on_device import on_device
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Algorithm, Context, Rollout

NUM_ENVS, NUM_STEPS = 16, 8


# --- Ranks ----------------------------------------------------------------------------------------


def naive_ranks(x: np.ndarray) -> np.ndarray:
    """Each value's rank among all, the mean of the ranks of its equals, scaled to -0.5 .. 0.5."""
    ranks = []
    for value in x:
        below, equal = sum(other < value for other in x), sum(other == value for other in x)
        ranks.append(np.mean([below + i for i in range(equal)]))
    return np.array(ranks) / (len(x) - 1) - 0.5


@pytest.mark.parametrize("values", [10**6, 5, 1])
def test_ranks(values: int) -> None:
    """Without equals, with some, and with nothing else."""
    x = np.random.default_rng(0).integers(values, size=33).astype(np.float32)
    np.testing.assert_allclose(centred_ranks(x), naive_ranks(x), atol=1e-6)


# --- Updates --------------------------------------------------------------------------------------


def experience(algorithm: Algorithm) -> tuple[Any, Rollout]:
    """Variables, and random rewards of environments with noise on their parameters."""
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    begin = algorithm.behaviour
    assert begin is not None
    context = sgd.init(algorithm, jax.random.key(0)).context(jax.random.key(5))
    _, core = begin(variables, algorithm.initial_core(NUM_ENVS), context)
    return variables, random_rollout(algorithm, spec(), NUM_STEPS, NUM_ENVS, 2)._replace(
        core=jax.device_get(core)
    )


def updated(algorithm: Algorithm, rollout: Rollout, num_devices: int) -> Any:
    """The change of the parameters by an update with a step size of 1, by the path that plans
    take.
    """
    learner = learner_of(algorithm, spec(), NUM_ENVS, NUM_STEPS, num_devices)
    mesh = make_mesh(num_devices)
    state = jax.device_put(learner.init(jax.random.key(0)), meshes.shardings(mesh, meshes.STATE))
    before = jax.device_get(state.variables.params)
    placed = [meshes.put(x, mesh, where) for x, where in zip(rollout, meshes.ROLLOUT, strict=True)]
    key = meshes.put(jax.random.key(1), mesh, meshes.REPLICATED)
    state, _ = compile_update(learner, mesh)(state, Rollout(*placed), key)
    return jax.tree.map(np.subtract, jax.device_get(state.variables.params), before)


def naive_fitness(rollout: Rollout) -> np.ndarray:
    fitness = np.zeros(NUM_ENVS)
    for b in range(NUM_ENVS):
        finished, total = [], 0.0
        for t in range(NUM_STEPS):
            total += float(rollout.reward[t, b])
            if rollout.terminated[t, b] or rollout.truncated[t, b]:
                finished.append(total)
                total = 0.0
        fitness[b] = np.mean(finished) if finished else total
    return fitness


def directions(params: Any, rollout: Rollout) -> list[Any]:
    """The noise of each pair, float64."""
    keys = [jax.random.wrap_key_data(rollout.core["noise"][2 * i]) for i in range(NUM_ENVS // 2)]
    return [
        jax.tree.map(lambda x: np.asarray(x, np.float64), perturbation.noise(params, key))
        for key in keys
    ]


def summed(weights: Any, trees: list[Any]) -> Any:
    total = jax.tree.map(np.zeros_like, trees[0])
    for weight, tree in zip(weights, trees, strict=True):
        total = jax.tree.map(lambda t, x, w=weight: t + w * x, total, tree)
    return jax.tree.map(np.float32, total)


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.case), 8])
def test_es_is_equation_1(num_devices: int) -> None:
    """Salimans et al. (2017): ``1 / (n sigma) sum_i F_i epsilon_i``, with ranks for F,
    one perturbation at a time.
    """
    std = 0.05
    algorithm = with_sgd(ES(hidden_sizes=(4,), noise_std=std).make(spec()), 1.0)
    variables, rollout = experience(algorithm)
    noise = directions(variables.params, rollout)
    ranks = naive_ranks(naive_fitness(rollout).astype(np.float32))
    trees = [
        jax.tree.map(lambda x, s=sign: s * x, noise[i])
        for i in range(NUM_ENVS // 2)
        for sign in (1, -1)
    ]
    assert_close(
        updated(algorithm, rollout, num_devices), summed(ranks / (NUM_ENVS * std), trees), 2e-6
    )


@pytest.mark.parametrize("fraction, num_devices", [(0.5, 8), (0.3, 1), (1.0, 1)])
def test_ars_is_algorithm_2(fraction: float, num_devices: int) -> None:
    """Mania et al. (2018), lines 6 and 7:
    ``alpha / (b sigma_R) sum_k (r_k+ - r_k-) delta_k`` over the best b.
    """
    step_size = 0.02
    algorithm = ARS(top_fraction=fraction, learning_rate=step_size).make(spec())
    variables, rollout = experience(algorithm)
    fitness = naive_fitness(rollout).reshape(-1, 2)
    best = sorted(range(len(fitness)), key=lambda k: -max(fitness[k]))[
        : int(np.ceil(fraction * len(fitness)))
    ]
    std = np.std([fitness[k][side] for k in best for side in (0, 1)])
    noise = directions(variables.params, rollout)
    weights = [step_size / (len(best) * std) * (fitness[k][0] - fitness[k][1]) for k in best]
    assert_close(
        updated(algorithm, rollout, num_devices), summed(weights, [noise[k] for k in best]), 2e-6
    )


def test_equal_returns_change_nothing() -> None:
    for config in (ES(hidden_sizes=(4,)), ARS()):
        algorithm = with_sgd(config.make(spec()), 1.0)
        _, rollout = experience(algorithm)
        rollout = rollout._replace(reward=np.zeros_like(rollout.reward))
        assert_close(
            updated(algorithm, rollout, 1),
            jax.tree.map(np.zeros_like, updated(algorithm, rollout, 1)),
        )


# --- A quadratic ----------------------------------------------------------------------------------

CENTRE = np.array([0.5, -1.0, 2.0], np.float32)


@struct.dataclass
class QuadraticState:
    time: jax.Array


@struct.dataclass
class QuadraticParams:
    max_steps_in_episode: int = 1


class Quadratic(environment.Environment):
    """One step, which pays minus the squared distance of the action from ``CENTRE``;
    it observes a 1.
    """

    @property
    def default_params(self) -> QuadraticParams:
        return QuadraticParams()

    def reset_env(self, key: jax.Array, params: QuadraticParams) -> Any:
        return jnp.ones(1), QuadraticState(jnp.int32(0))

    def step_env(
        self, key: jax.Array, state: QuadraticState, action: jax.Array, params: QuadraticParams
    ) -> Any:
        reward = -jnp.sum(jnp.square(action - CENTRE))
        return jnp.ones(1), QuadraticState(state.time + 1), reward, jnp.bool_(True), {}

    def observation_space(self, params: QuadraticParams) -> spaces.Box:
        return spaces.Box(0, 1, (1,), jnp.float32)

    def action_space(self, params: QuadraticParams) -> spaces.Box:
        return spaces.Box(-jnp.inf, jnp.inf, CENTRE.shape, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Plain(ES, hidden_sizes=(), noise_std=0.3):
    """Returns in place of ranks, which is equation 1 before section 2.1."""

    def weigh(self, fitness: jax.Array) -> tuple[jax.Array, jax.Array]:
        return fitness / self.noise_std, jnp.ones_like(fitness, bool)


@functools.cache
def gradients() -> tuple[np.ndarray, np.ndarray]:
    """Independent gradients ``[iterations, P]`` at one point, acted and learnt,
    and the analytic one ``[P]``.
    """
    source = find(Quadratic())
    algorithm = Plain().make(source.spec)
    iterations, num_envs = 200, 32
    rollout = device.make_rollout({"": algorithm}, source.device(), 2)
    state = sgd.init(algorithm, jax.random.key(0))
    actor = device.init(
        {"": algorithm}, source.device(), EnvSlice.all(num_envs), rng.stream(0, Stream.ENV)
    )
    keys = rng.stream(0, Stream.ACT), rng.stream(0, Stream.ENV)

    def estimate(state: Any, actor: Any, iteration: jax.Array) -> jax.Array:
        _, experience, _ = rollout(
            {"": state.variables}, actor, *keys, iteration, {"": jnp.float32(0)}
        )
        batch = algorithm.postprocess(state.variables, experience[""], state.context())
        grads, _, _ = sgd.gradient(
            algorithm, state, batch, jax.random.split(jax.random.key(0), num_envs)
        )
        return jax.flatten_util.ravel_pytree(grads)[0]

    many = meshes.by_hand(
        lambda *args: jax.lax.map(lambda i: estimate(*args, i), jnp.arange(iterations))
    )
    found = np.asarray(jax.jit(many)(state, actor), np.float64)
    params = state.variables.params
    # At the observation 1 an action is kernel + bias; the loss is minus the return.
    action = np.asarray(
        params["head"]["params"]["kernel"][0] + params["head"]["params"]["bias"], np.float64
    )
    analytic = jax.tree.map(lambda x: np.broadcast_to(2 * (action - CENTRE), x.shape), params)
    return found, np.asarray(jax.flatten_util.ravel_pytree(analytic)[0], np.float64)


def test_the_gradient_on_a_quadratic_is_the_analytic_one() -> None:
    """By Hotelling's statistic, a chi-square of 6 degrees: 22.5 is its 99.9th percentile;
    1.1 times it would be far.
    """
    found, analytic = gradients()

    def statistic(expected: np.ndarray) -> float:
        off = found.mean(axis=0) - expected
        return float(off @ np.linalg.solve(np.cov(found.T) / len(found), off))

    assert statistic(analytic) < 22.5
    assert statistic(1.1 * analytic) > 30.0


OPTIMISERS = {
    "es": ES(hidden_sizes=(), noise_std=0.1, learning_rate=0.1, weight_decay=0.0),
    "ars": ARS(noise_std=0.1, learning_rate=0.05),
}


@pytest.mark.parametrize("name", runs.cases(OPTIMISERS, "es"))
def test_it_finds_the_optimum(name: str) -> None:
    source = find(Quadratic())
    algorithm = OPTIMISERS[name].make(source.spec)
    sizes = {
        "num_envs": 16,
        "rollout_length": 1,
        "report_interval": 10**9,
        "total_env_steps": 16 * 150,
    }
    *_, last = on_device(make_session(algorithm, source, num_devices=2, **sizes))
    action, _, _ = jax.jit(algorithm.policy)(last.variables(), jnp.ones((1, 1)), (), Context())
    np.testing.assert_allclose(action[0], CENTRE, atol=0.1)


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.case  # test_es_is_equation_1
def test_the_noise_of_all_is_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What XLA sets aside for an iteration grows by less
    than a copy of the parameters for each environment.
    """
    source = find("CartPole-v1")
    algorithm = ES(hidden_sizes=(256, 256)).make(source.spec)
    size = 4 * sum(
        np.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(algorithm.init, jax.random.key(0)))
    )
    monkeypatch.setattr(perturbation, "MAX_BYTES", 4 * int(size))
    num_envs = 64
    state = jax.eval_shape(functools.partial(sgd.init, algorithm), jax.random.key(0))
    actor = jax.eval_shape(
        lambda key: device.init({"": algorithm}, source.device(), EnvSlice.all(num_envs), key),
        jax.random.key(0),
    )
    rollout = device.make_rollout({"": algorithm}, source.device(), 4)
    key = jax.random.key(0)

    def iterate(state: Any, actor: Any) -> Any:
        _, experience, _ = rollout(
            {"": state.variables}, actor, key, key, jnp.int32(0), {"": jnp.float32(0)}
        )
        batch = algorithm.postprocess(state.variables, experience[""], state.context())
        return sgd.gradient(algorithm, state, batch, jax.random.split(key, num_envs))[0]

    memory = jax.jit(meshes.by_hand(iterate)).lower(state, actor).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 20 * size


# --- Runs -----------------------------------------------------------------------------------------


SMALL: dict[str, Any] = {
    "num_devices": 1,
    "evaluation_episodes": 3,
    "report_interval": 10**6,
    "rollout_length": 20,
}


def test_an_odd_number_of_environments_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num.envs.*33.*2.*32.*34"):
        train(preset("es", "CartPole-v1", num_envs=33, **SMALL))


@pytest.mark.parametrize("plan", ["asynchronous", "gradients"])
def test_actors_in_threads_are_refused(plan: str) -> None:
    with pytest.raises(
        ConfigError, match=r"es compares whole episodes of one policy.*plan synchronous"
    ):
        train(preset("es", "CartPole-v1", plan=plan, **SMALL))


def test_scaled_rewards_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scale.rewards.*es.*whole returns"):
        train(preset("es", "CartPole-v1", scale_rewards=True, **SMALL))


@pytest.mark.case  # test_it_finds_the_optimum
@pytest.mark.parametrize("env", ["envpool:CartPole-v1", "gymnasium:Pendulum-v1"])
def test_on_the_host(env: str) -> None:
    """Each rollout starts episodes that differ from those before it."""
    run = preset("ars", env, plan="synchronous", num_envs=4, total_env_steps=200, **SMALL)
    *_, last = train(run)
    assert last.updates >= 2 and np.isfinite(last.metrics["fitness"])
    assert last.evaluation["episodes"] == 3
