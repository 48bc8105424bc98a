"""Acting and learning in one program: environments with ordinary control flow,
and members under ``vmap``.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import environment, spaces
from probes import assert_close, learner_of, make_mesh, make_session, with_job

import jaxrl_dist
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.algorithms.a2c import A2C
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.envs.source import find
from jaxrl_dist.hosts import arrays
from jaxrl_dist.learners import sgd
from jaxrl_dist.learners.policies import combined_learner
from jaxrl_dist.plans import asynchronous, averaging, compiled, iteration, on_device
from jaxrl_dist.plans.session import Session
from jaxrl_dist.training import setup
from jaxrl_dist.types import Report


class Branches(environment.Environment):
    """Steps with a branch that returns a constant, and with a loop that starts from one."""

    @property
    def default_params(self) -> environment.EnvParams:
        return environment.EnvParams(max_steps_in_episode=7)

    def reset_env(self, key: jax.Array, params: Any) -> tuple[jax.Array, environment.EnvState]:
        return jnp.zeros(2), environment.EnvState(time=0)

    def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: Any) -> Any:
        obs = jax.lax.cond(
            action == 1, lambda: jnp.zeros(2), lambda: jnp.full(2, state.time, jnp.float32)
        )
        reward = jax.lax.while_loop(lambda x: x < state.time, lambda x: x + 1, 0)
        return (
            obs,
            environment.EnvState(time=state.time + 1),
            reward.astype(jnp.float32),
            jnp.bool_(False),
            {},
        )

    def observation_space(self, params: Any) -> spaces.Box:
        return spaces.Box(0, 10, (2,), jnp.float32)

    def action_space(self, params: Any) -> spaces.Discrete:
        return spaces.Discrete(2)


def session(**options: Any) -> Session:
    source = find(Branches())
    algorithm = PPO(hidden_sizes=(4,), num_minibatches=2, num_epochs=1).make(source.spec)
    return make_session(algorithm, source, num_envs=4, rollout_length=8, **options)


@pytest.mark.case  # test_actor_threads_step_them_too
@pytest.mark.parametrize("num_devices", [1, 2])
def test_environments_may_branch_and_loop_as_they_like(num_devices: int) -> None:
    reports: list[Report] = list(
        on_device.on_device(session(num_devices=num_devices, total_env_steps=56))
    )
    last = reports[-1]
    assert last.env_steps == 2 * 4 * 7  # each environment spends every eighth step on a reset
    assert last.metrics["episode/length"] == 7 and last.metrics["episode/return"] == sum(range(7))


@pytest.mark.case  # test_local_sgd_is_the_mean_of_members_that_learn_alone
def test_minibatches_in_parts_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts' sums vary over all axes of the mesh over which the parameters do."""

    def metrics() -> Any:
        *_, last = on_device.on_device(session(num_devices=2, total_env_steps=1))
        return {name: value for name, value in last.metrics.items() if not name.startswith("time/")}

    whole = metrics()
    monkeypatch.setattr(sgd, "MICROBATCH", 4)  # of 8 examples of a device
    assert metrics() == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_actor_threads_step_them_too() -> None:
    pool = PoolOptions(num_actors=2, meshes=(make_mesh(1),))
    *_, last = asynchronous.asynchronous(session(total_env_steps=56, pool=pool))
    assert last.env_steps >= 56


@pytest.mark.parametrize(
    "rows, columns",
    [
        pytest.param(1, 1, marks=pytest.mark.case),
        pytest.param(2, 1, marks=pytest.mark.case),
        (2, 2),
    ],
)
@pytest.mark.parametrize("name", ["ppo", pytest.param("dqn", marks=pytest.mark.case)])
def test_members_of_a_population_are_their_lone_runs(
    name: str, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members that differ in seed and step size, on meshes of members and of their shards.

    A dispatch and the reports after it read one array, on however many devices.
    """
    read, fetch = list[int](), arrays.fetch

    def counted(tree: Any) -> Any:
        read.append(sum(isinstance(x, jax.Array) for x in jax.tree.leaves(tree)))
        return fetch(tree)

    monkeypatch.setattr(arrays, "fetch", counted)
    check_members(name, 2, rows, columns)
    assert {*read} == {1}


@pytest.mark.case  # test_rng_mesh.py::test_members_may_be_computed_in_groups
def test_members_that_learn_in_groups_are_their_lone_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "LEARN_TOGETHER", 2)
    check_members("ppo", 4, 1, 1)


def check_members(name: str, members: int, rows: int, columns: int) -> None:
    source = find("CartPole-v1")
    kind: Any = {
        "ppo": partial(PPO, hidden_sizes=(4,), num_minibatches=2, num_epochs=1),
        "dqn": partial(
            DQN,
            hidden_sizes=(4,),
            batch_size=8,
            learning_starts=64,
            replay_capacity=96,
            replay_ratio=0.125,
        ),
    }[name]

    def vary(hyper: Any) -> Any:
        algorithm = kind(**hyper).make(source.spec)
        return {"": algorithm}, combined_learner(
            {"": learner_of(algorithm, source.spec, 4, 8, columns)}
        )

    def member(seed: int, mesh: Any) -> Session:
        hyper = {"learning_rate": 1e-3 * (1 + seed)}
        algorithm, learner = vary(hyper)
        made = make_session(
            algorithm[""],
            source,
            num_envs=4,
            rollout_length=8,
            total_env_steps=180 - 40 * (seed % 3),
            seed=seed,
        )
        job = made.job._replace(hyper=tuple(hyper), vary=vary, learner=learner, mesh=mesh)
        return made._replace(hyper=hyper, job=job)

    def numbers(report: Report) -> Any:
        timeless = {
            name: value
            for name, value in report.metrics.items()
            if value is not None and name[:5] != "time/"
        }
        return (
            (report.env_steps, report.updates, timeless),
            report.variables(),
            report.checkpoint()[:2],
        )

    mesh = meshes.make_mesh(jax.devices()[: rows * columns], rows)
    sessions = [member(seed, mesh) for seed in range(members)]
    population = on_device.DevicePopulation(sessions)
    reports = [population.reports(seed, session) for seed, session in enumerate(sessions)]
    side_by_side: list[list[Any]] = [[] for _ in sessions]
    for _ in range(9):
        for seed in range(members):
            side_by_side[seed] += [numbers(report) for report in itertools.islice(reports[seed], 1)]
    for seed in range(members):
        alone = map(numbers, on_device.on_device(member(seed, meshes.make_mesh(mesh.devices[0]))))
        for (here, *trees), (there, *expected) in zip(side_by_side[seed], alone, strict=True):
            assert here[:2] == there[:2]
            assert here[2] == pytest.approx(there[2], rel=1e-4, abs=1e-5)
            assert_close(trees, expected, 1e-5)


def test_the_mean_is_of_the_members_that_run() -> None:
    numbers = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    numbers[2] = np.nan  # of a member that has diverged, and ended
    tree = {
        "weights": jnp.asarray(numbers),
        "bias": jnp.asarray(numbers[:, 0]),
        "count": jnp.arange(4),
    }
    running = np.array([True, True, False, True])
    mean = jax.tree.map(np.asarray, jax.jit(averaging.averaged)(tree, running))
    expected = numbers.astype(np.float64)[running].mean(axis=0)
    np.testing.assert_allclose(mean["weights"][running], np.tile(expected, (3, 1)), rtol=1e-6)
    np.testing.assert_allclose(mean["bias"][running], expected[0], rtol=1e-6)
    assert np.isnan(mean["weights"][2]).all() and np.isnan(mean["bias"][2])
    np.testing.assert_array_equal(mean["count"], np.arange(4))


def test_local_sgd_is_the_mean_of_members_that_learn_alone() -> None:
    source = find("CartPole-v1")
    algorithm = A2C(hidden_sizes=(4,)).make(source.spec)
    sizes: dict[str, Any] = {
        "num_envs": 4,
        "rollout_length": 8,
        "total_env_steps": 32 * 5,
        "report_interval": 32,
    }
    mesh = meshes.make_mesh(jax.devices()[:2], 2)
    sessions = [
        with_job(make_session(algorithm, source, seed=seed, **sizes), mesh=mesh)
        for seed in range(2)
    ]

    def learnt(every: int, iterations: int) -> Any:
        """Returns each member's parameters, and moments of its optimiser."""
        population = on_device.DevicePopulation(sessions, average_every=every)
        reports = [population.reports(seed, session) for seed, session in enumerate(sessions)]
        for _ in range(iterations):
            newest = [next(each) for each in reports]
        return [
            (report.variables().params, report.checkpoint().state.opt_state) for report in newest
        ]

    first, second = learnt(10, 2)  # which begin equal, and are averaged only after ten iterations
    halves = jax.tree.map(lambda x, y: (x / 2 + y / 2).astype(x.dtype), first, second)
    expected = jax.tree.map(lambda x, y: y if x.dtype.kind == "f" else x, first, halves)
    here, there = learnt(2, 2)
    assert_close(here, expected, 1e-6)
    assert_close(here, there, 0)
    later = learnt(2, 3)
    difference = jax.tree.leaves(
        jax.tree.map(lambda x, y: np.abs(x - y).max(), *(x for x, _ in later))
    )
    assert 0 < max(difference) < 0.1, "they learn alone again"


@pytest.mark.parametrize(
    "members, priority_exponent",
    [
        pytest.param(1, None, marks=pytest.mark.case),
        pytest.param(2, None, marks=pytest.mark.case),
        pytest.param(1, 0.6, marks=pytest.mark.case),
        (2, 0.6),
    ],
)
def test_a_replay_memory_is_not_copied(members: int, priority_exponent: float | None) -> None:
    """Rollouts and priorities are written where it lies:
    the program needs no room for a second table of them.
    """
    source = find("CartPole-v1")
    sizes: dict[str, Any] = {
        "hidden_sizes": (4,),
        "batch_size": 8,
        "replay_capacity": 2**18,
        "replay_ratio": 1.0,
    }
    algorithm = DQN(**sizes, priority_exponent=priority_exponent).make(source.spec)
    made = make_session(algorithm, source, num_envs=4, rollout_length=1).job
    # of priorities, or of rewards
    size = members * algorithm.replay.capacity * np.dtype(np.float32).itemsize
    assert compiled.lower(made, members).compile().memory_analysis().temp_size_in_bytes < size / 2


@pytest.mark.parametrize(
    "num_devices, num_envs, seeds, slower",
    [(1, 8, 1, False), (4, 8, 1, True), (2, 64, 1, False), (8, 8, 8, False)],
)
def test_a_run_says_where_one_device_of_a_cpu_is_faster(
    num_devices: int, num_envs: int, seeds: int, slower: bool
) -> None:
    config = jaxrl_dist.preset(
        "ppo", "CartPole-v1", num_devices=num_devices, num_envs=num_envs, seeds=seeds
    )
    assert ("one alone is faster (--num-devices 1)" in setup.prepare(config).describe()) == slower


def test_metrics_of_the_info_are_of_all_devices() -> None:
    def last(num_devices: int) -> Report:
        config = jaxrl_dist.Train(
            PPO(hidden_sizes=(4,), num_epochs=1, num_minibatches=1),
            env="CartPole-v1",
            total_env_steps=512,
            report_interval=256,
            evaluation_episodes=0,
            info_metrics="discount:sum",
            num_devices=num_devices,
        )
        *_, report = jaxrl_dist.train(config)
        return report

    one = last(num_devices=1).metrics
    eight = last(num_devices=8).metrics
    assert one["info/discount:sum"] is not None and one["info/discount:sum"] > 5  # 1 a step
    assert eight["info/discount:sum"] == one["info/discount:sum"]
