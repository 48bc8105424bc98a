"""Plans: probe environments with known answers, the truncation test, reports,
repeatability, threads, traces.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import jax
import numpy as np
import pytest
import runs
from probes import KINDS, make_mesh, make_session

from jaxrl_dist import plans, preset, train
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.algorithms import ALGORITHMS, PRESETS, config_class
from jaxrl_dist.algorithms.a2c import A2C
from jaxrl_dist.algorithms.appo import APPO
from jaxrl_dist.algorithms.ddpg import DDPG
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.impala import IMPALA
from jaxrl_dist.algorithms.pg import PG
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.algorithms.pqn import PQN
from jaxrl_dist.algorithms.rainbow import Rainbow
from jaxrl_dist.algorithms.sac import SAC
from jaxrl_dist.algorithms.td3 import TD3
from jaxrl_dist.config import plans as table
from jaxrl_dist.config.envs import BACKENDS
from jaxrl_dist.config.named import data_of
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.host import envpool
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import Program
from jaxrl_dist.plans import clock
from jaxrl_dist.plans import on_device as on_device_module
from jaxrl_dist.plans.asynchronous import asynchronous
from jaxrl_dist.plans.gradients import gradients
from jaxrl_dist.plans.on_device import on_device
from jaxrl_dist.plans.session import Session
from jaxrl_dist.plans.synchronous import synchronous
from jaxrl_dist.types import Algorithm, Context, Report, Rollout, Variables

PLANS: dict[str, Callable[[Session], Iterator[Report]]] = {
    "on_device": on_device,
    "synchronous": synchronous,
}
THREADED: dict[str, Callable[[Session], Iterator[Report]]] = {
    "asynchronous": asynchronous,
    "gradients": gradients,
}
"""Plans that ``test_asynchronous`` looks at more closely."""

# --- Probe environments ---------------------------------------------------------------------------

DISCOUNT = 0.8
COMMON: dict[str, Any] = {"hidden_sizes": (16,), "discount": DISCOUNT, "learning_rate": 0.01}
STEPS_OF_ITERATION = 64 * 8
ACTOR_CRITIC: dict[str, Any] = {**COMMON, "max_gradient_norm": 10.0, "value_coefficient": 1.0}
REPLAY: dict[str, Any] = {  # eight updates after a rollout
    **COMMON,
    "batch_size": 64,
    "replay_capacity": 8 * STEPS_OF_ITERATION,
    "replay_ratio": 8 / STEPS_OF_ITERATION,
    "learning_starts": 2 * STEPS_OF_ITERATION,
}
EPSILON: dict[str, Any] = {"epsilon_start": 0.5, "epsilon_end": 0.5}
ACTOR: dict[str, Any] = {"actor_learning_rate": 0.01, "target_rate": 0.1}
PROBED = {
    "ppo": PPO(**COMMON, num_epochs=2, num_minibatches=2, entropy_coefficient=0.0),
    "a2c": A2C(**ACTOR_CRITIC, entropy_coefficient=0.0),
    "pg": PG(**ACTOR_CRITIC),
    "impala": IMPALA(**ACTOR_CRITIC, entropy_coefficient=0.0),
    "appo": APPO(**COMMON, num_epochs=2, num_minibatches=2, entropy_coefficient=0.0),
    "pqn": PQN(**COMMON, **EPSILON, num_epochs=2, num_minibatches=2),
    "dqn": DQN(**REPLAY, **EPSILON, n_step=2, target_period=20),
    "rainbow": Rainbow(
        **REPLAY, n_step=2, target_period=20, num_atoms=11, value_min=-2.0, value_max=2.0
    ),
    "ddpg": DDPG(**{**REPLAY, **ACTOR, "actor_learning_rate": 0.003}, noise_std=0.2),
    "td3": TD3(**REPLAY, **ACTOR, noise_std=0.3),
    "sac": SAC(**REPLAY, **ACTOR, temperature=0.01),
}
CONTINUOUS = ("ppo", "a2c", "pg", "impala", "appo", "ddpg", "td3", "sac")
DISCRETE = [name for name in PROBED if name not in ("ddpg", "td3")]


@functools.cache
def probed(
    name: str, env_id: str, plan: str = "on_device"
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What an algorithm learns of all the probes at once: of each,
    greedy actions and values where x is -1 and 1.
    """
    source = find(env_id)
    config = PROBED[name]
    # of policies that are some versions old, on which large steps go to and fro
    if plan == "gradients":
        config = dataclasses.replace(config, learning_rate=0.002)
    algorithm = config.make(source.spec)
    iterations, num_devices = (
        (80, 1) if algorithm.replay else (60 if plan == "synchronous" else 200, 2)
    )
    steps = STEPS_OF_ITERATION * iterations
    session = make_session(
        algorithm,
        source,
        num_envs=64,
        total_env_steps=steps,
        report_interval=10**9,
        num_devices=num_devices,
        pool=PoolOptions(
            num_actors=2, meshes=(make_mesh(1),), lag=1 if plan == "asynchronous" else None
        ),
    )
    *_, report = {**PLANS, **THREADED}[plan](session)
    obs = np.zeros((len(KINDS), 2, len(KINDS) + 1), np.float32)
    obs[..., :-1] = np.eye(len(KINDS))[:, None]
    obs[..., -1] = [-1, 1]
    action, value = greedy(algorithm, report.variables(), obs.reshape(-1, len(KINDS) + 1))
    actions, values = action.reshape(len(KINDS), 2, *action.shape[1:]), value.reshape(len(KINDS), 2)
    return {kind: (actions[i], values[i]) for i, kind in enumerate(KINDS)}


def greedy(
    algorithm: Algorithm, variables: Variables, obs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy actions, and the values that the policy or the loss sees in them."""
    action, _, extras = jax.jit(algorithm.policy)(
        variables, obs, algorithm.initial_core(len(obs)), Context()
    )
    if "value" in extras:
        return np.asarray(action), np.asarray(extras["value"])
    assert algorithm.window is not None
    draws = 64  # of the noise that a loss may have
    obs, taken = np.repeat(obs, draws, axis=0), np.repeat(action, draws, axis=0)
    none = np.zeros((algorithm.window, len(obs)))
    windows = Rollout(
        np.stack([obs] * (algorithm.window + 1)),
        np.stack([taken] * algorithm.window),
        none.astype(np.float32),
        *[none > 0] * 2,
        none == 0,
        {},
        (),
        (),
    )

    @jax.jit
    def value(windows: Rollout, keys: jax.Array) -> jax.Array:
        target = algorithm.initial_target(variables.params)
        context = Context(keys, target=target)
        batch = algorithm.postprocess(variables, windows, context)
        return algorithm.loss(variables, batch, context)[2].metrics["q/mean"]

    values = value(windows, jax.random.split(jax.random.key(0), len(obs)))
    return np.asarray(action), np.asarray(values).reshape(-1, draws).mean(axis=1)


def check_probe(
    learned: dict[str, tuple[np.ndarray, np.ndarray]], kind: str, continuous: bool
) -> None:
    action, value = learned[kind]
    expected = {"from_observation": [-1.0, 1.0], "two_steps": [DISCOUNT, 1.0]}.get(kind, [1.0, 1.0])
    np.testing.assert_allclose(value, expected, atol=0.2)
    if kind.startswith("from_a") or kind == "from_both":
        wanted = [0.5, 0.5] if kind == "from_action" else [-0.5, 0.5]
        if continuous:
            np.testing.assert_allclose(action[:, 0], wanted, atol=0.2)
        else:
            np.testing.assert_array_equal(action, np.array(wanted) > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", runs.cases(DISCRETE, "ppo", "dqn"))
def test_probe(name: str, kind: str) -> None:
    check_probe(probed(name, "Probe-v0"), kind, False)


@pytest.mark.parametrize("kind", ["constant", "two_steps", "from_action", "from_both"])
@pytest.mark.parametrize("name", runs.cases(CONTINUOUS, "td3"))
def test_continuous_probe(name: str, kind: str) -> None:
    check_probe(probed(name, "ContinuousProbe-v0"), kind, True)


@pytest.mark.case  # test_probe
@pytest.mark.parametrize(
    "name, plan",
    [
        ("ppo", "synchronous"),
        ("impala", "synchronous"),
        ("dqn", "synchronous"),
        ("impala", "asynchronous"),
        ("dqn", "asynchronous"),
        ("a2c", "gradients"),
    ],
)
def test_probes_under_the_other_plans(name: str, plan: str) -> None:
    learned = probed(name, "Probe-v0", plan)
    for kind in KINDS:
        check_probe(learned, kind, False)


def plans_of(name: str) -> list[str]:
    """All plans, or the one that a preset names."""
    _, fields = PRESETS.get(name, ("", {}))
    if "plan" in fields:
        return [fields["plan"]]
    return [*PLANS, *THREADED]


COMBINATIONS = [
    (name, plan, backend)
    for name in (*ALGORITHMS, *(name for name in PRESETS if data_of(name) is None))
    for plan in plans_of(name)
    for backend in BACKENDS
    if backend == "gymnax" or plan != "on_device"
]
NO_GRADIENTS = ("ppo", "impala", "appo", "rainbow", "pqn", "r2d2", "alphazero", "muzero")
"""Whose presets ask for what ``gradients`` does not do: several updates of a rollout,
or priorities."""

EPISODIC = ("es", "ars")
"""Whose rollouts begin with new episodes, for which actor threads do not wait."""


@pytest.mark.slow
# of experience that is older than it should be
@pytest.mark.filterwarnings("ignore::jaxrl_dist.errors.ConfigWarning")
@pytest.mark.parametrize("name, plan, backend", COMBINATIONS)
def test_every_combination_trains_or_is_refused(name: str, plan: str, backend: str) -> None:
    """For a few updates from the preset, with small networks."""
    env = "Pendulum-v1" if name in ("ddpg", "td3", "apex-ddpg", "d4pg") else "CartPole-v1"
    small = {
        "hidden_sizes": (8,),
        "learning_starts": 500,
        "batch_size": 16,
        "replay_capacity": 8192,
    }
    own = {field.name for field in dataclasses.fields(config_class(name))}
    fields: dict[str, Any] = {field: value for field, value in small.items() if field in own}
    sizes = {
        "num_devices": 1,
        "total_env_steps": 1500,
        "report_interval": 500,
        "evaluation_episodes": 0,
    }
    run = preset(name, f"{backend}:{env}", plan=plan, **fields, **sizes)
    simulated = backend == "gymnax" and plan != "synchronous"
    if name == "alphazero" and not simulated:
        with pytest.raises(ConfigError, match="alphazero plans with the environment itself"):
            train(run)
        return
    if (plan == "gradients" and name in NO_GRADIENTS) or (plan in THREADED and name in EPISODIC):
        with pytest.raises(ConfigError, match=f"plan {plan}"):
            train(run)
        return
    *_, last = train(run)
    assert last.env_steps >= 1500 and last.updates > 0
    assert last.metrics["loss/total"] is not None and np.isfinite(last.metrics["loss/total"])


# --- Truncation -----------------------------------------------------------------------------------


TIMED: dict[str, Any] = {"hidden_sizes": (8,), "discount": 0.9, "learning_rate": 0.03}


def fitted_value(plan: str, env: str, options: dict[str, str], config: Any = None) -> float:
    """The mean value that PPO, or another algorithm, finds where every step pays 1."""
    source = find(env, options)
    config = config or PPO(**TIMED, num_epochs=2, num_minibatches=4)
    algorithm = config.make(source.spec)
    iterations = 150
    session = make_session(
        algorithm,
        source,
        num_envs=16,
        rollout_length=15,
        total_env_steps=iterations * 16 * 13,
        report_interval=10**9,
    )
    *_, report = PLANS[plan](session)
    if env == "Clock-v0":
        obs = np.ones((1, 1), np.float32)
    else:
        obs = np.random.default_rng(0).uniform(-0.05, 0.05, (64, 4)).astype(np.float32)
    return float(np.mean(greedy(algorithm, report.variables(), obs)[1]))


def test_time_limit_is_not_a_termination() -> None:
    """1 / (1 - 0.9) = 10; taken for an end, the limit of 10
    steps would give 5.26 (TD) or 4.14 (Monte Carlo).
    """
    assert fitted_value("on_device", "Clock-v0", {}) == pytest.approx(10.0, abs=0.2)
    assert 4.0 < fitted_value("on_device", "Clock-v0", {"dead": "true"}) < 5.4


@pytest.mark.case  # test_time_limit_is_not_a_termination
def test_time_limit_is_not_a_termination_in_replay() -> None:
    """Of three steps, one in four of which runs over the limit."""
    replay = {
        "batch_size": 32,
        "replay_capacity": 3200,
        "replay_ratio": 4 / 240,
        "learning_starts": 240,
    }
    config = DQN(**TIMED, **replay, n_step=3, target_period=10)
    assert fitted_value("on_device", "Clock-v0", {}, config) == pytest.approx(10.0, abs=0.2)


@pytest.mark.case  # test_time_limit_is_not_a_termination
def test_time_limit_of_envpool_is_not_a_termination() -> None:
    """CartPole cannot fall within 7 steps, so all its episodes end by the clock."""
    assert fitted_value(
        "synchronous", "envpool:CartPole-v1", {"max_episode_steps": "7"}
    ) == pytest.approx(10.0, abs=0.2)


# --- Reports and repeatability --------------------------------------------------------------------

STEPS = 16 * 8  # of one iteration
RUNS: dict[str, Train[Any]] = {
    "on_device": Train(PPO(hidden_sizes=(8,), num_epochs=2, num_minibatches=2), "CartPole-v1"),
    "synchronous": Train(A2C(hidden_sizes=(8,)), "envpool:CartPole-v1"),
}
RUNS = {
    plan: dataclasses.replace(
        run,
        num_envs=8,
        rollout_length=16,
        report_interval=2 * STEPS,
        evaluation_episodes=2,
        normalize_observations=True,
        scale_rewards=True,
        num_devices=2,
    )
    for plan, run in RUNS.items()
}


@functools.cache
def reports(plan: str, seed: int, total: int) -> list[Report]:
    return list(train(dataclasses.replace(RUNS[plan], seed=seed, total_env_steps=total)))


def numbers(report: Report) -> dict[str, Any]:
    """All that a report says but the time."""
    metrics = {
        name: value for name, value in report.metrics.items() if not name.startswith("time/")
    }
    return {
        "env_steps": report.env_steps,
        "updates": report.updates,
        "iteration": report.iteration,
        **metrics,
    }


@pytest.mark.case  # test_every_algorithm_repeats_bit_for_bit
@pytest.mark.parametrize("plan", RUNS)
def test_same_seed_same_numbers(plan: str) -> None:
    """And a longer run begins with the shorter one, up to the shorter one's last, partial
    report.
    """
    short, long, other = (
        reports(plan, 0, 5 * STEPS),
        reports(plan, 0, 10 * STEPS),
        reports(plan, 1, 5 * STEPS),
    )
    assert len(short) == 3 and len(long) > 4
    assert [numbers(report) for report in short[:2]] == [numbers(report) for report in long[:2]]
    for a, b in zip(short, other, strict=True):
        assert a.metrics["loss/total"] != b.metrics["loss/total"]
    assert short[-1].evaluation["episodes"] == 2 and short[0].evaluation is None
    assert short[-1].evaluation["return_mean"] != other[-1].evaluation["return_mean"]


SMALL_MEMORY: dict[str, Any] = {
    "hidden_sizes": (8,),
    "batch_size": 8,
    "replay_capacity": 256,
    "replay_ratio": 0.25,
    "learning_starts": 100,
}
REPEATED = {
    "pqn": PQN(hidden_sizes=(8,), num_epochs=1, num_minibatches=2),
    "impala": IMPALA(hidden_sizes=(8,)),
    "appo": APPO(hidden_sizes=(8,), num_epochs=1, num_minibatches=2),
    "td3": TD3(**SMALL_MEMORY, noise="ornstein_uhlenbeck"),
    "sac": SAC(**SMALL_MEMORY),
}


@pytest.mark.case  # pqn, and dqn in algorithms/test_dqn.py
@pytest.mark.parametrize("name", REPEATED)
def test_every_algorithm_repeats_bit_for_bit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """And compiles nothing after its first report; those that replay report how much."""
    env = "Pendulum-v1" if name in ("td3", "sac") else "CartPole-v1"
    sizes: dict[str, Any] = {
        "num_envs": 8,
        "rollout_length": 4,
        "num_devices": 1,
        "evaluation_episodes": 0,
    }
    config = Train(
        REPEATED[name], env, **sizes, plan="on_device", report_interval=64, total_env_steps=256
    )
    runs = []
    for _ in range(2):
        run = train(config)
        first = next(run)
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.DEBUG):
            runs.append([first, *run])
        assert [record.message for record in caplog.records if "ompil" in record.message] == []
    assert len(runs[0]) >= 4
    assert [numbers(report) for report in runs[0]] == [numbers(report) for report in runs[1]]
    last = runs[0][-1]
    assert last.metrics["loss/total"] is not None and np.isfinite(last.metrics["loss/total"])
    if config.algorithm not in (REPEATED["td3"], REPEATED["sac"]):
        assert "replay/ratio" not in last.metrics
        return
    updates = steps = 0
    for report in runs[0]:
        made, taken = report.updates - updates, report.env_steps - steps
        assert report.metrics["replay/ratio"] == pytest.approx(made / taken)
        updates, steps = report.updates, report.env_steps
    assert first.metrics["replay/ratio"] == 0 and last.metrics["replay/ratio"] == pytest.approx(
        0.25
    )


@pytest.mark.case  # actors/test_actors.py::test_evaluation_plays_what_it_was_asked_for
@pytest.mark.parametrize("plan", RUNS)
def test_env_steps_are_valid_transitions(plan: str) -> None:
    """The run ends with the first rollout that reaches the total; reset steps do not count."""
    total = 10 * STEPS
    run = reports(plan, 0, total)
    last, before = run[-1], run[-2]
    nominal = last.iteration * STEPS
    assert total <= last.env_steps < nominal
    assert last.env_steps - STEPS < total  # one rollout less would not have reached it
    assert before.env_steps < total
    assert [report.iteration for report in run[:-1]] == [2 * (i + 1) for i in range(len(run) - 1)]
    updates = {"on_device": 4, "synchronous": 1}[plan]
    for report in run:
        assert report.updates == report.iteration * updates
        # Every ended episode spends one step on its reset, in this rollout or the next.
        episodes = sum(r.metrics["episode/count"] for r in run[: run.index(report) + 1])
        assert 0 <= report.env_steps - (report.iteration * STEPS - episodes) <= 8
        assert report.metrics["episode/return"] == pytest.approx(report.metrics["episode/length"])
        assert all(value is None or np.isfinite(value) for value in report.metrics.values())
    assert last.evaluation["length_mean"] == last.evaluation["return_mean"]


@pytest.mark.case  # run/test_run_files.py::test_where_no_episode_ended_there_is_null
def test_no_episode_no_value() -> None:
    """None, not NaN, where no episode has ended; and metrics that are means over iterations,
    not sums.
    """
    algorithm = PG(hidden_sizes=(4,), learning_rate=1e-9).make(find("Pendulum-v1").spec)
    one, four = (
        next(
            on_device(
                make_session(
                    algorithm, "Pendulum-v1", total_env_steps=10**6, report_interval=n * 64
                )
            )
        )
        for n in (1, 4)
    )
    assert one.metrics["episode/count"] == 0 and one.metrics["episode/return"] is None
    assert four.iteration == 4
    assert four.metrics["policy/entropy"] == pytest.approx(one.metrics["policy/entropy"], rel=0.01)


# --- Variables, threads, traces -------------------------------------------------------------------


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Session:
    env = {"on_device": "Clock-v0", "synchronous": "envpool:CartPole-v1"}[request.param]
    algorithm = PG(hidden_sizes=(4,)).make(find(env).spec)
    return make_session(algorithm, env, num_devices=2, total_env_steps=6 * 64, report_interval=128)


@pytest.mark.parametrize(
    "plan, session",
    [
        pytest.param("on_device", "on_device", marks=pytest.mark.case),
        ("synchronous", "synchronous"),
    ],
    indirect=["session"],
)
def test_a_run_from_outside(plan: str, session: Session, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is traced or compiled after the first report; reports give out copies;
    leaving the loop ends threads.
    """
    traces: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(
            session.job.algorithm[""], "updated_stats" if name == "update_stats" else name
        )

        def count(*args: Any) -> Any:
            traces.append(name)
            return function(*args)

        return count

    names = ("policy", "postprocess", "loss", "update_stats", "feedback", "initial_core")
    algorithm = dataclasses.replace(
        session.job.algorithm[""], **{name: counted(name) for name in names}
    )
    before = threading.enumerate()
    run = PLANS[plan](
        make_session(
            algorithm,
            session.job.source,
            num_devices=2,
            total_env_steps=5 * 64,
            report_interval=128,
        )
    )
    first = next(run)
    kept = first.variables()
    copied = jax.tree.map(np.copy, kept)
    seen = list(traces)
    assert set(names) <= set(seen)
    if plan == "synchronous":
        # EnvPool's, and the one that fills rollouts
        assert len(threading.enumerate()) == len(before) + 2
    with jax.log_compiles(), caplog.at_level(logging.DEBUG):
        second, last = run  # the latter is of one iteration, not two
    assert [record.message for record in caplog.records if "ompil" in record.message] == []
    assert traces == seen
    jax.tree.map(np.testing.assert_array_equal, kept, copied)
    assert any(
        (a != b).any()
        for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(last.variables()), strict=True)
    )
    with pytest.raises(RuntimeError, match=r"ask for report.variables\(\) before"):
        second.variables()
    assert threading.enumerate() == before


def test_leaving_the_loop_ends_the_threads() -> None:
    before = threading.enumerate()
    config = dataclasses.replace(RUNS["synchronous"], total_env_steps=10**6, num_devices=1)
    for _ in (run := train(config)):
        break
    run.close()
    assert threading.enumerate() == before


def test_an_error_ends_the_threads() -> None:
    """An action that EnvPool does not have reaches the caller as it is."""
    source = find("envpool:CartPole-v1")
    algorithm = PG(hidden_sizes=(4,)).make(source.spec)

    def policy(*args: Any) -> Any:
        action, core, extras = algorithm.policy(*args)
        return action + 2, core, extras

    before = threading.enumerate()
    with pytest.raises(ValueError, match=r"envpool:CartPole-v1:.*0.*0"):
        next(synchronous(make_session(dataclasses.replace(algorithm, policy=policy), source)))
    assert threading.enumerate() == before


def test_environments_that_hang_in_a_rollout_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time of one step, however long rollouts take; nothing is closed that still
    runs.
    """
    source = find("envpool:CartPole-v1", timeout=1.0)
    advance, calls, release = envpool.EnvPool._advance, itertools.count(), threading.Event()

    def slow(self: envpool.EnvPool, action: np.ndarray) -> Any:
        if next(calls) == 21:
            release.wait()
        time.sleep(0.12)  # 10 steps take longer than one may
        return advance(self, action)

    monkeypatch.setattr(envpool.EnvPool, "_advance", slow)
    session = make_session(
        PG(hidden_sizes=(4,)).make(source.spec), source, rollout_length=10, total_env_steps=10_000
    )
    run = synchronous(session)
    next(run)
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"envpool:CartPole-v1.*1"):
        list(run)
    assert time.perf_counter() - began < 20
    release.set()


def test_nothing_goes_through_the_host() -> None:
    """While the program of ``on_device`` runs: all that it needs, it has."""
    algorithm = PG(hidden_sizes=(4,)).make(find("Clock-v0").spec)
    session = make_session(algorithm, "Clock-v0", num_devices=2, report_interval=128)
    population = on_device_module.DevicePopulation([session])
    next(population.reports(0, session))
    inputs = population.inputs(2)
    with jax.transfer_guard("disallow"):
        state, *_ = population.program(*inputs)
    assert int(state.iteration[0]) == 3  # one before, which ended the run, and two


def test_a_clock_adds_up_programs_that_replace_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where halving compiles the program again: only the first set-up is one,
    and training goes on between.
    """
    now = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    first, second = (cast(Program, SimpleNamespace(compile_seconds=0.0)) for _ in range(2))
    timed = clock.Clock({}, lambda: 0.0)
    now[0] += 1
    timed.ready(first)
    now[0] += 5
    first.compile_seconds = 3.0
    assert timed.rates(100, 300, 1)["time/env_steps_per_second"] == 100 / 2
    timed.reported(1, 100, 300, 1)
    timed.ready(second)
    now[0] += 10
    second.compile_seconds = 6.0
    rates = timed.rates(300, 900, 4)
    assert (rates["time/env_steps_per_second"], rates["time/compile_s"]) == (200 / 4, 1 + 3 + 6)
    assert rates["replay/ratio"] == 3 / 600  # updates of an agent step


def test_the_table_of_plans_names_code_that_exists() -> None:
    """The command line reads it without JAX."""
    assert get_args(get_type_hints(Train)["plan"]) == tuple(table.PLANS)
    for name, plan in table.PLANS.items():
        module = importlib.import_module(f"{plans.__name__}.{name}")
        assert callable(getattr(module, name)) and hasattr(module, "check_plan") == plan.threaded
        assert plan.members is None or plans.population_plan(name) is getattr(module, plan.members)
