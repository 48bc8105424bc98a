"""Plans whose actors run in threads: lag, counts, devices, what is late, what fails,
and what is left behind.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import logging
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import faulty
import jax
import numpy as np
import pytest
import runs
from probes import (
    assert_close,
    learner_of,
    make_mesh,
    make_session,
    perturbed,
    random_rollout,
    with_job,
    with_sgd,
)

from jaxrl_dist import flow, returns
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors import device, host
from jaxrl_dist.actors.pool import ParamStore, PoolOptions, RestartingEnv, Sample
from jaxrl_dist.actors.programs import compile_acting
from jaxrl_dist.algorithms.a2c import A2C
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.impala import IMPALA
from jaxrl_dist.envs.base import HostEnv
from jaxrl_dist.envs.source import EnvSource, find
from jaxrl_dist.errors import EnvError, EnvWarning
from jaxrl_dist.hosts import peers
from jaxrl_dist.learners.gradients import _extended
from jaxrl_dist.learners.policies import state_of
from jaxrl_dist.learners.sharded import (
    compile_apply,
    compile_gradient,
    compile_priority,
    compile_update,
)
from jaxrl_dist.memory import ring
from jaxrl_dist.plans import asynchronous as asynchronous_module
from jaxrl_dist.plans import threaded
from jaxrl_dist.plans.asynchronous import asynchronous
from jaxrl_dist.plans.dataflow import Exchange, Tally, rounds
from jaxrl_dist.plans.gradients import gradients
from jaxrl_dist.plans.job import ProgramCache
from jaxrl_dist.plans.report import check_progress
from jaxrl_dist.plans.session import Session
from jaxrl_dist.plans.threaded import Joiner, homes, sender
from jaxrl_dist.types import Algorithm, EnvSpec, EpisodeStats, Report, Rollout, Timestep, TrainState

# of environments that are to fail
pytestmark = pytest.mark.filterwarnings("ignore::jaxrl_dist.errors.EnvWarning")

ACTORS, SIZE, LENGTH = 4, 2, 8
STEPS = ACTORS * SIZE * LENGTH  # of one iteration
CONFIGS: dict[str, Any] = {
    "impala": IMPALA(hidden_sizes=(8,)),
    "a2c": A2C(hidden_sizes=(8,)),
    "dqn": DQN(
        hidden_sizes=(8,),
        batch_size=16,
        replay_capacity=64 * STEPS,
        replay_ratio=2 / STEPS,
        learning_starts=2 * STEPS,
    ),
}
PLANS = {"asynchronous": asynchronous, "gradients": gradients}
PLAN_OF = {"impala": asynchronous, "a2c": gradients, "dqn": asynchronous}


# --- Jobs -----------------------------------------------------------------------------------------


class Hooked(NamedTuple):
    """As ``EnvSource``, but each step of its host environments calls ``hook`` before."""

    source: EnvSource
    hook: Callable[[str, int], None]
    """``(thread, steps)``: the name of the actor's thread, and the environment's steps so far."""

    @property
    def spec(self) -> EnvSpec:
        return self.source.spec

    @property
    def is_pure(self) -> bool:
        return self.source.is_pure

    def host(self, num_envs: int, seed: int, *, training: bool = True) -> HostEnv:
        env = self.source.host(num_envs, seed, training=training)
        step, steps = env.step, itertools.count()

        def hooked(action: np.ndarray) -> tuple[Timestep, EpisodeStats]:
            self.hook(threading.current_thread().name, next(steps))
            return step(action)

        env.step = hooked  # type: ignore[method-assign]
        return env


@functools.cache
def base(
    name: str, num_devices: int, env_id: str = "envpool:CartPole-v1", num_actors: int = ACTORS
) -> Session:
    """A session whose runs share their programs, as those of one process do."""
    source = find(env_id)
    algorithm = CONFIGS[name].make(source.spec)
    session = make_session(
        algorithm, source, num_envs=ACTORS * SIZE, rollout_length=LENGTH, num_devices=num_devices
    )
    return with_job(session, cache=ProgramCache(), pool=PoolOptions(num_actors, (make_mesh(1),)))


def make(
    name: str = "impala",
    *,
    env: EnvSource | str = "envpool:CartPole-v1",
    hook: Callable[[str, int], None] | None = None,
    iterations: int = 10**6,
    interval: int = 1,
    learners: int = 1,
    num_actors: int = ACTORS,
    max_lag: int | None = None,
    **options: Any,
) -> Session:
    """A session of at least so many iterations, with a report after each ``interval``;
    ``env`` is like CartPole.
    """
    session = base(name, learners, *([env] if isinstance(env, str) else []), num_actors=num_actors)
    source: Any = session.job.source if isinstance(env, str) else env
    steps = {
        "total_env_steps": iterations * STEPS,
        "report_interval": interval * STEPS,
        "max_lag": max_lag,
    }
    session = with_job(
        session,
        source=source if hook is None else Hooked(source, hook),
        pool=session.job.pool._replace(**options),
    )
    return session._replace(config=dataclasses.replace(session.config, **steps))


class Calling(ProgramCache):
    """The programs of another cache; those of one name call ``before`` with the number of the
    call.
    """

    def __init__(
        self, programs: ProgramCache | None, name: str, before: Callable[[int], None]
    ) -> None:
        assert programs is not None
        self._programs, self._name, self._before = programs, name, before

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        program = self._programs.once(name, make)
        return Wrapped(program, self._before) if self._name in (name[0], name[0][0]) else program


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Neither an actor's nor an environment's."""
    before = set(threading.enumerate())
    yield
    faulty.RELEASED.set()
    until(lambda: set(threading.enumerate()) <= before)
    faulty.RELEASED.clear()


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits for what other threads bring about."""
    deadline = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < deadline, f"it never came about: {threading.enumerate()}"
        time.sleep(0.001)


def take(run: Iterator[Report], count: int) -> list[Report]:
    """The first reports; leaves the run."""
    with_close: Any = run
    try:
        return list(itertools.islice(run, count))
    finally:
        with_close.close()


TIMED = (
    "time/",
    "async/queue",
    "async/sent",
    "async/dropped",
    "async/learner_idle",
    "async/actor_idle",
)


def numbers(report: Report) -> dict[str, Any]:
    """All that a report says but what the clock decides."""
    metrics = {name: value for name, value in report.metrics.items() if not name.startswith(TIMED)}
    return {
        "env_steps": report.env_steps,
        "updates": report.updates,
        "iteration": report.iteration,
        **metrics,
    }


def lags(report: Report) -> dict[int, float]:
    """How many samples of each lag have been learnt from since the last report."""
    prefix = "async/lag/"
    return {
        int(name.removeprefix(prefix)): n
        for name, n in report.metrics.items()
        if name.startswith(prefix) and n
    }


# --- ParamStore -----------------------------------------------------------------------------------


def test_store_keeps_the_newest_versions() -> None:
    """As copies on each acting device, which outlive the learner's own state."""
    session, acting = base("dqn", 2), [make_mesh(1), meshes.make_mesh(jax.devices()[3:4])]
    store = ParamStore([*acting, acting[0]], keep=1)
    kept = []
    for version in range(3):
        state = session.initial_state()._replace(
            updates=meshes.put(jax.numpy.int32(version), session.job.mesh, meshes.REPLICATED)
        )
        kept.append(jax.tree.map(np.array, state._replace(opt_state=(), memory=())))
        store.publish(state)
        for x in jax.tree.leaves(state):
            x.delete()  # as by donation
        assert store.version == version
    going = threading.Event()
    for on in acting:
        assert store.latest(on).version == 2
        for version in (1, 2):
            snapshot = store.wait_for(version, on, going)
            assert snapshot is not None and snapshot.version == version
            assert_close(jax.tree.map(np.asarray, snapshot.state), kept[version], 0)
            assert {d for x in jax.tree.leaves(snapshot.state) for d in x.devices()} == set(
                on.devices.flat
            )
    with pytest.raises(IndexError):
        store.wait_for(0, acting[0], going)


def test_waiting_for_a_version_ends_with_it_or_with_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # not by looking again and again
    monkeypatch.setattr("jaxrl_dist.actors.pool.WAKE_SECONDS", 100.0)
    session, on, stopping = base("impala", 1), make_mesh(1), threading.Event()
    store, found = ParamStore([on]), []

    def wait(version: int) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: found.append(store.wait_for(version, on, stopping))
        )
        thread.start()
        time.sleep(0.05)
        assert thread.is_alive()
        return thread

    thread = wait(0)
    store.publish(session.initial_state())
    thread.join(5)
    assert found.pop().version == 0
    thread = wait(1)
    stopping.set()
    store.wake()
    thread.join(5)
    assert found == [None]


# --- Lag and counts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, lag",
    [("impala", 0), ("impala", 1), ("impala", 3), pytest.param("dqn", 1, marks=pytest.mark.case)],
)
def test_lockstep_keeps_the_lag_exactly(name: str, lag: int) -> None:
    """As soon as there are so many versions, whichever thread is slow."""
    rng = random_sleeps(0.003)
    for iteration, report in enumerate(take(asynchronous(make(name, hook=rng, lag=lag)), 7)):
        assert lags(report) == {min(iteration, lag): ACTORS}
        assert report.metrics["async/lag"] == report.metrics["async/lag_max"] == min(iteration, lag)


@pytest.mark.parametrize("plan", runs.cases(PLANS, "asynchronous"))
def test_older_experience_than_allowed_is_dropped(plan: str) -> None:
    """And all that was sent is accounted for in every report; in the last one, nothing is left."""
    slow = {"actor-0": 0.01}
    session = make(
        "a2c",
        iterations=12,
        max_lag=1,
        hook=lambda thread, steps: time.sleep(slow.get(thread, 0.0)),
    )
    reports = list(PLANS[plan](session))
    for report in reports:
        sent, trained, dropped, queued = (
            report.metrics[f"async/{x}"] for x in ("sent", "trained", "dropped", "queue")
        )
        assert sent == trained + dropped + queued
        assert 0 <= queued <= 2 * ACTORS
        assert report.metrics["async/lag_max"] <= 1
    assert queued == 0 and dropped > 0
    assert sum(sum(lags(report).values()) for report in reports) == trained
    assert trained == reports[-1].iteration * (ACTORS if plan == "asynchronous" else 1)


def test_without_a_limit_nothing_is_dropped_before_the_stop() -> None:
    *reports, last = list(asynchronous(make(iterations=12, hook=random_sleeps(0.002))))
    for report in reports:
        assert report.metrics["async/dropped"] == 0
        assert (
            report.metrics["async/sent"]
            == report.metrics["async/trained"] + report.metrics["async/queue"]
        )
    assert (
        last.metrics["async/sent"] == last.metrics["async/trained"] + last.metrics["async/dropped"]
    )
    assert last.metrics["async/dropped"] <= 2 * ACTORS
    assert last.env_steps >= 12 * STEPS


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("lag", [None, 0])
def test_a_round_that_is_cut_short_is_dropped(
    lag: int | None, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stop or by an error, after two rollouts of its four have been taken."""
    take, calls, offered = flow.Parallel.take, itertools.count(), list[Callable[[], Report]]()

    def cut_short(*args: Any) -> Any:
        if next(calls) < ACTORS + 2:
            return take(*args)
        if fails:
            raise ZeroDivisionError("injected")
        return None

    monkeypatch.setattr(flow.Parallel, "take", cut_short)
    run = asynchronous(make(lag=lag)._replace(publish_latest=offered.append))
    if fails:
        with pytest.raises(ZeroDivisionError):
            list(run)
        last = offered[0]()
    else:
        *_, last = run
    sent, trained, dropped, queued = (
        last.metrics[f"async/{x}"] for x in ("sent", "trained", "dropped", "queue")
    )
    assert trained == ACTORS and queued == 0
    assert sent == trained + dropped and dropped is not None and dropped >= 2


def test_the_last_report_comes_after_the_actors() -> None:
    """So they take nothing from the evaluation."""
    before = set(threading.enumerate())
    for report in asynchronous(make(iterations=3)):
        if report.env_steps >= 3 * STEPS:
            assert set(threading.enumerate()) <= before


def test_a_slow_learner_is_not_flooded() -> None:
    made: list[int] = []
    session = make(hook=lambda thread, steps: made.append(steps))
    run = asynchronous(
        with_job(session, cache=Calling(session.job.cache, "update", lambda call: time.sleep(0.05)))
    )
    queues = []
    for report in itertools.islice(run, 8):
        queues.append(report.metrics["async/queue"])
        assert len(made) <= (report.metrics["async/trained"] + 2 * ACTORS) * LENGTH
    assert max(queues) == 2 * ACTORS
    run.close()  # type: ignore[attr-defined]


class Wrapped:
    """A program that calls ``before`` with the number of each of its calls."""

    def __init__(self, program: Any, before: Callable[[int], None]) -> None:
        self.compile_seconds = 0.0
        self._program, self._before, self._calls = program, before, itertools.count()

    def __call__(self, *args: Any) -> Any:
        self._before(next(self._calls))
        return self._program(*args)


def random_sleeps(most: float) -> Callable[[str, int], None]:
    """Sleeps of another length each time."""
    rng = np.random.default_rng()
    return lambda thread, steps: time.sleep(rng.uniform(0, most))


# --- Repeatability and devices --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, env_id",
    [
        ("impala", "envpool:CartPole-v1"),
        ("impala", "gymnasium:CartPole-v1"),
        ("impala", "gymnax:CartPole-v1"),
        pytest.param("dqn", "envpool:CartPole-v1", marks=pytest.mark.case),
    ],
)
def test_lockstep_repeats_bit_for_bit(
    name: str, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the threads are scheduled."""
    rollout, sleep = device.DeviceActor.rollout, random_sleeps(0.02)

    def delayed(self: Any, *args: Any) -> Any:
        sleep("", 0)
        return rollout(self, *args)

    monkeypatch.setattr(device.DeviceActor, "rollout", delayed)
    hook = None if env_id.startswith("gymnax") else random_sleeps(0.002)
    # each actor's reset is a program
    options = {"num_actors": 2} if env_id.startswith("gymnax") else {}
    results = []
    for _ in range(2):
        session = make(name, env=env_id, hook=hook, iterations=6, interval=2, lag=1, **options)
        *reports, last = asynchronous(session)
        results.append(([numbers(report) for report in [*reports, last]], last.variables()))
    assert results[0][0] == results[1][0]
    jax.tree.map(np.testing.assert_array_equal, results[0][1], results[1][1])
    assert results[0][0][-1]["loss/total"] is not None


def placed(tree: Any) -> set[jax.Device]:
    return {on for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) for on in x.devices()}


@pytest.mark.case  # the other ways to learn the same
def test_a_split_host_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two acting and six learning devices as one for both, and each array where it belongs."""
    devices = jax.devices()
    acting, learning = devices[:2], devices[2:8]
    seen: dict[str, set[Any]] = {"actor": set(), "rollout": set()}
    rollout = host.HostActor.rollout

    def watched(self: Any, *args: Any) -> Any:
        result = rollout(self, *args)
        actor = self._core, self._stacks, self._initial_core, args[0]
        seen["actor"].add((threading.current_thread().name, *placed(actor)))
        seen["rollout"].add((threading.current_thread().name, *placed(result[0])))
        return result

    def exchanged(session: Session) -> Exchange:
        exchange = threaded.exchange(session)

        def join(samples: Any) -> Any:
            sent = [placed(sample.content) for sample in samples]
            joined = exchange.join(samples)
            places.append((*sent, placed(joined)))
            return joined

        return exchange._replace(join=join)

    publish = ParamStore.publish

    def published(self: ParamStore, state: Any) -> None:
        places.append((placed(state),))
        publish(self, state)

    source = find("envpool:CartPole-v1")
    algorithm = IMPALA(hidden_sizes=(8,), core="gru", core_size=4).make(source.spec)
    results, places = [], list[tuple[set[Any], ...]]()
    for actors, learners in ((acting, learning), (devices[:1], devices[:1])):
        options = PoolOptions(
            num_actors=2, meshes=tuple(meshes.make_mesh([on]) for on in actors), lag=1
        )
        session = make_session(
            algorithm, source, num_envs=12, rollout_length=8, total_env_steps=500, pool=options
        )
        with monkeypatch.context() as patch:
            if len(learners) > 1:
                patch.setattr(host.HostActor, "rollout", watched)
                patch.setattr(asynchronous_module, "exchange", exchanged)
                patch.setattr(ParamStore, "publish", published)
            *reports, last = asynchronous(with_job(session, mesh=meshes.make_mesh(learners)))
            results.append(
                ([numbers(report) for report in [*reports, last]][-4:], last.variables())
            )
    whole = set(learning)
    assert {len(place): place for place in places} == {
        1: (whole,),
        3: ({*learning[:3]}, {*learning[3:]}, whole),
    }
    assert seen["actor"] == seen["rollout"] == {("actor-0", acting[0]), ("actor-1", acting[1])}
    assert_close(results[0][1], results[1][1], 1e-4)
    for split, together in zip(results[0][0], results[1][0], strict=True):
        assert split.keys() == together.keys()
        for name, value in split.items():
            assert value == (
                together[name] and pytest.approx(together[name], rel=1e-4, abs=1e-4)
            ), name


# --- Time and compilation -------------------------------------------------------------------------


def test_thread_stages_sum_to_its_time_without_recompiling(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor with actors that are late and with environments that are recreated."""
    broken = breaks(("actor-3", 40))

    def hook(thread: str, steps: int) -> None:
        time.sleep(0.02 if thread == "actor-0" else 0.002)
        broken(thread, steps)

    session = make(
        hook=hook,
        iterations=12,
        learners=2,
        interval=2,
        gather=2,
        gather_deadline=0.001,
        max_restarts=9,
    )
    run: Any = asynchronous(with_job(session, cache=None))
    next(run)
    lags = []
    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.DEBUG):
            for report in run:
                metrics = report.metrics
                lags.append(metrics["async/lag_max"] or 0.0)
                learner = sum(
                    value for name, value in metrics.items() if name.startswith("time/learner/")
                )
                assert learner == pytest.approx(report.wall_time_s, rel=0.05)
                inside = run.gi_frame.f_locals
    finally:
        jax.config.update("jax_log_compiles", False)
    assert metrics["async/restarts"] == 1 and max(lags) > 1, "an actor is late and one is recreated"
    acting = report.wall_time_s - metrics["time/learner/starting_s"]
    for stages in inside["pool"].stages:
        assert sum(stages.seconds.values()) == pytest.approx(acting, rel=0.05)
    assert sum(v for n, v in metrics.items() if n.startswith("time/actor/")) == pytest.approx(
        acting, rel=0.05
    )
    assert metrics["time/learner/compiling_s"] > 0.1
    assert [record.message for record in caplog.records if "ompil" in record.message] == []


# --- What is left behind --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, times",
    [
        ("impala", 20),
        pytest.param("impala", 100, marks=pytest.mark.case),
        pytest.param("a2c", 100, marks=pytest.mark.case),
    ],
)
def test_leaving_the_loop_leaves_nothing(name: str, times: int) -> None:
    """No thread (EnvPool's own C++ threads included) and no array, however often."""
    session = make(name)
    take(PLAN_OF[name](session), 1)  # what is compiled stays
    gc.collect()
    arrays, threads = len(jax.live_arrays()), native_threads()
    for _ in range(times):
        take(PLAN_OF[name](session), 1)
    until(lambda: native_threads() <= threads)
    assert len(jax.live_arrays()) <= arrays


def native_threads() -> int:
    import psutil

    return psutil.Process().num_threads()


# --- Late actors ----------------------------------------------------------------------------------


def rate(slow: float, **options: Any) -> tuple[float, list[Report]]:
    """Iterations a second, where one actor's steps take ``slow`` times as long, and the reports."""
    seconds = {"actor-2": 0.01 * slow}
    session = make(hook=lambda thread, steps: time.sleep(seconds.get(thread, 0.01)), **options)
    reports = take(asynchronous(session), 16)
    times = [report.wall_time_s for report in reports]
    return 1 / statistics.median(b - a for a, b in itertools.pairwise(times[2:])), reports


@pytest.mark.case  # test_leaving_the_loop_leaves_nothing, and the tests of flow.py
def test_gather_does_not_wait_for_a_slow_actor() -> None:
    """Whose rollouts are learnt from late, or dropped if they are then too old."""
    even, _ = rate(1, gather=3, gather_deadline=1.0)
    uneven, reports = rate(10, gather=3, gather_deadline=0.005)
    assert uneven > 0.7 * even
    assert any(sum(lags(report).values()) == 3 for report in reports)
    assert any(max(lags(report)) >= 4 for report in reports)
    assert all(report.metrics["async/dropped"] == 0 for report in reports)
    _, reports = rate(10, gather=3, gather_deadline=0.005, max_lag=2)
    assert reports[-1].metrics["async/dropped"] >= 1
    assert all(max(lags(report)) <= 2 for report in reports)


@pytest.mark.parametrize("name", ["impala", pytest.param("a2c", marks=pytest.mark.case)])
def test_missing_rollout_changes_nothing(name: str) -> None:
    """The update is that of a batch without it."""
    session = base(name, 1)
    algorithm, key = with_sgd(session.job.algorithm[""]), jax.random.key(5)
    none = EpisodeStats(*np.zeros(5))
    contents = [
        random_rollout(algorithm, session.job.source.spec, LENGTH, SIZE, seed) for seed in range(2)
    ]
    samples = [Sample(0, [content], none, np.zeros(2)) for content in contents]
    updated = []
    for there in ((samples[0], None, samples[1]), samples):
        (rollout,) = Joiner(session.job.mesh, len(there), [meshes.ROLLOUT])(there)
        learner = learner_of(algorithm, session.job.source.spec, SIZE * len(there), LENGTH)
        state = jax.jit(learner.init)(jax.random.key(0))
        state = state._replace(
            variables=state.variables._replace(params=perturbed(state.variables.params))
        )
        state, metrics = compile_update(learner, session.job.mesh)(state, rollout, key)
        updated.append((state.variables, dict(metrics)))
        assert rollout.valid.shape == (LENGTH, SIZE * len(there))
    assert_close(updated[0], updated[1], 1e-5)


@pytest.mark.parametrize(
    "actors, devices", [(1, 1), (4, 1), (4, 2), (2, 2), (2, 4), (1, 4), (3, 2)]
)
def test_rollouts_are_sent_to_their_learner_devices(actors: int, devices: int) -> None:
    session = base("a2c", 1)
    mesh, none = make_mesh(devices), EpisodeStats(*np.zeros(5))
    rollouts = [
        random_rollout(session.job.algorithm[""], session.job.source.spec, LENGTH, 4, seed)
        for seed in range(actors)
    ]
    samples = [
        Sample(
            0,
            sender(home, [meshes.ROLLOUT])(cast(Any, rollout), None),
            none,
            np.zeros(2),
        )
        for home, rollout in zip(homes(mesh, actors), rollouts, strict=True)
    ]
    join = Joiner(mesh, actors, [meshes.ROLLOUT])
    (joined,) = join(samples)
    axes = Rollout._make([1] * 7 + [0] * 2)
    for axis, name in zip(axes, Rollout._fields, strict=True):
        parts = [jax.tree.leaves(getattr(rollout, name)) for rollout in rollouts]
        for x, *of_actors in zip(jax.tree.leaves(getattr(joined, name)), *parts, strict=True):
            np.testing.assert_array_equal(x, np.concatenate(of_actors, axis))
            assert x.sharding.device_set == {*mesh.devices.flat}
    if actors in (devices, 1):  # nothing is copied: each device has what an actor sent there
        sent = [
            shard.data
            for sample in samples
            for shard in sample.content[0].reward.addressable_shards
        ]
        there = [shard.data for shard in joined.reward.addressable_shards]
        assert {x.unsafe_buffer_pointer() for x in there} == {
            x.unsafe_buffer_pointer() for x in sent
        }
    if actors > 1:
        (joined,) = join(samples[::-1])  # in order of arrival, which need not be that of the actors
        np.testing.assert_array_equal(
            joined.reward, np.concatenate([x.reward for x in rollouts[::-1]], 1)
        )
        (joined,) = join([*samples[:-1], None])
        assert (
            not np.asarray(joined.valid)[:, -4:].any() and not np.asarray(joined.obs)[:, -4:].any()
        )
        np.testing.assert_array_equal(np.asarray(joined.obs)[:, :4], rollouts[0].obs)


def test_rounds_in_which_all_is_too_old_are_skipped() -> None:
    class Store:
        version = 3

    def samples(actor: int) -> list[Sample]:
        none, steps = EpisodeStats(*np.zeros(5)), np.array([7, 9])
        return [Sample(version, (), none, steps) for version in (0, 0, actor + 2)]

    session = make(num_actors=2, max_lag=0, gather=2)
    fake: Any = type("Pool", (), {"streams": flow.Parallel([samples(0), samples(1)], in_flight=3)})
    tally = Tally(make(max_lag=0), fake, Store(), 1)  # type: ignore[arg-type]
    (found,) = rounds(session.job, fake, tally, 2, lambda: False)
    assert found[0] is None and found[1] is not None and found[1].version == 3
    assert tally.env_steps == 5 * 7
    tally.learn(found)
    assert tally.env_steps == 6 * 7 and tally.counts()["async/dropped"] == 5


# --- Restarts -------------------------------------------------------------------------------------


def breaks(*when: tuple[str, int]) -> Callable[[str, int], None]:
    """Fails at these steps of these actors' environments, each once."""
    left = set(when)

    def hook(thread: str, steps: int) -> None:
        if (thread, steps) in left:
            left.remove((thread, steps))
            raise EnvError(f"broken at step {steps}")

    return hook


@pytest.mark.parametrize("env_id", ["envpool:CartPole-v1", "gymnasium:CartPole-v1"])
def test_environments_that_fail_are_made_anew(env_id: str) -> None:
    hook = breaks(("actor-0", 3), ("actor-2", 5), ("actor-0", 11))
    session = make(env=env_id, hook=hook, iterations=6, max_restarts=2)
    restarts = [report.metrics["async/restarts"] for report in asynchronous(session)]
    assert restarts == sorted(restarts) and restarts[-1] == 3


def test_a_resumed_run_goes_on_counting_restarts() -> None:
    *_, last = asynchronous(
        make(hook=breaks(("actor-0", 3), ("actor-2", 5)), iterations=3, max_restarts=2)
    )
    whole = last.checkpoint()
    assert whole.progress["restarts"] == 2
    check_progress(whole.progress)
    session = make(hook=breaks(("actor-1", 3)), iterations=6, max_restarts=2)
    *_, last = asynchronous(session._replace(resumed=whole))
    assert last.metrics["async/restarts"] == 3 == last.checkpoint().progress["restarts"]
    for wrong in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match="counts that no run has"):
            check_progress({**whole.progress, "restarts": wrong})


def test_reports_count_what_happens_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has restarted environments four times, and has sent 9 rollouts,
    of which 2 wait.
    """
    others: dict[str, Any] = {"the restarts": [4], "the samples": [(9, 2)]}
    monkeypatch.setattr(peers, "all_gather", lambda value, about: [value, *others.get(about, [])])
    *_, last = asynchronous(make(hook=breaks(("actor-0", 3)), iterations=3, max_restarts=2))
    assert last.metrics["async/restarts"] == 4 + 1 == last.checkpoint().progress["restarts"]
    sent, *parts = (
        last.metrics[f"async/{name}"] or 0 for name in ("sent", "trained", "dropped", "queue")
    )
    assert sent == sum(parts) and sent >= 9 + 3 * ACTORS and parts[-1] == 2


def test_too_many_restarts_end_the_run() -> None:
    hook = breaks(("actor-0", 3), ("actor-0", 5), ("actor-0", 7))
    with (
        pytest.warns(
            EnvWarning,
            match=r"^actor 0 continues with new environments \(restart 2 of 2\): .*broken at step 5",
        ),
        pytest.raises(EnvError, match="broken at step 7") as caught,
    ):
        list(asynchronous(make(hook=hook, iterations=10, max_restarts=2)))
    assert caught.value.__notes__ == ["(of the 2 environments of actor 0, after 2 restarts)"]


def test_gymnasium_that_crashes_by_chance_goes_on() -> None:
    source = find(
        "faulty:make",
        {"p_crash": "0.02", "p_crash_reset": "0.1", "p_stall": "0", "p_stall_reset": "0"},
    )
    *_, last = asynchronous(make(env=source, iterations=10, max_restarts=1000))
    assert last.metrics["async/restarts"] >= 2
    with pytest.raises(EnvError, match="simulated crash"):
        list(asynchronous(make(env=source, iterations=10)))


def restarting(hook: Callable[[str, int], None], limit: int) -> RestartingEnv:
    source = find("envpool:CartPole-v1")
    hooked = Hooked(source, hook)
    return RestartingEnv(
        source.spec,
        SIZE,
        lambda restarts: hooked.host(SIZE, restarts),
        limit,
        threading.Event(),
        "me",
    )


def test_an_invalid_action_is_no_failure_of_the_environment() -> None:
    env = restarting(lambda thread, steps: None, 5)
    env.reset()
    with pytest.raises(ValueError, match="lies outside"):
        env.step(np.array([0, 7]))
    assert env.restarts == 0
    env.close()


def test_a_pool_that_closes_does_not_wait_for_the_rollout() -> None:
    env = restarting(lambda thread, steps: None, 5)
    env.reset()
    env.stopping.set()
    with pytest.raises(RuntimeError, match="being closed"):
        env.step(np.zeros(SIZE, np.int32))
    assert env.restarts == 0
    env.close()


def test_an_environment_that_cannot_be_made_is_tried_so_often() -> None:
    made: list[int] = []

    def fail(restarts: int) -> HostEnv:
        made.append(restarts)
        raise EnvError("it cannot be made")

    env = RestartingEnv(
        base("impala", 1).job.source.spec, SIZE, fail, 3, threading.Event(), "actor 5"
    )
    with pytest.raises(EnvError, match="it cannot be made"):
        env.reset()
    assert made == [0, 1, 2, 3]


def test_a_restart_is_a_step_that_is_not_valid() -> None:
    """Its observation is the first of the new environments, as of any reset,
    and the step before has its successor.
    """
    session, on = base("impala", 1), make_mesh(1)
    env = restarting(breaks(("MainThread", 3)), 1)
    programs = compile_acting(session.job.algorithm, env.spec, on, LENGTH, jax.random.key(0))
    actor = host.HostActor(session.job.algorithm, env, on, LENGTH, programs)
    start = {"": jax.jit(session.job.algorithm[""].init)(jax.random.key(0))}
    zero = np.int32(0), {"": jax.numpy.zeros(())}
    rollouts, episodes, steps = actor.rollout(meshes.put(start, on, meshes.REPLICATED), *zero)
    rollout = rollouts[""]
    actor.close()
    expected = np.ones((LENGTH, SIZE), bool)
    expected[3] = False
    np.testing.assert_array_equal(rollout.valid, expected)
    assert steps.tolist() == [(LENGTH - 1) * SIZE] * 2 and episodes[""].episodes == 0
    assert not (np.asarray(rollout.terminated) | np.asarray(rollout.truncated)).any()
    np.testing.assert_array_equal(rollout.reward[:, 0], [1, 1, 1, 0, 1, 1, 1, 1])
    fresh = find("envpool:CartPole-v1").host(SIZE, 1)
    np.testing.assert_array_equal(rollout.obs[4], fresh.reset())
    fresh.close()
    assert (np.abs(np.asarray(rollout.obs[3] - rollout.obs[2])) > 0).any()


def test_learning_cuts_at_a_restart() -> None:
    """Rewards of 1, values as given, discount 0.5, and environments lost at step 2:
    a hand-made example.
    """
    reward = np.array([[1.0], [1.0], [0.0], [1.0]], np.float32)
    never = np.zeros((4, 1), bool)
    valid = np.array([[True], [True], [False], [True]])
    values = np.array([[4.0], [8.0], [16.0], [32.0], [64.0]], np.float32)
    outcomes = reward, never, never, valid
    # Step 1 bootstraps from obs[2], worth 16; step 3 from obs[4], worth 64.
    one = [1 + 0.5 * 8 - 4, 1 + 0.5 * 16 - 8, 0, 1 + 0.5 * 64 - 32]
    expected = [one[0] + 0.5 * one[1], one[1], 0, one[3]]
    np.testing.assert_allclose(returns.gae(*outcomes, values, 0.5, 1.0)[:, 0], expected)
    np.testing.assert_allclose(
        returns.n_step(*outcomes, values, 0.5, 3)[:, 0], expected + values[:-1, 0]
    )
    vs, advantage = returns.vtrace(*outcomes, values, np.zeros((4, 1), np.float32), 0.5)
    np.testing.assert_allclose(vs[:, 0], expected + values[:-1, 0])
    np.testing.assert_allclose(advantage[:, 0], expected)
    # As replayed windows of three steps from 0, of two steps from 1 and from 0, of one step from 3.
    for first, length, total, factor, last in (
        (0, 3, 1.5, 0.25, 1),
        (1, 2, 1, 0.5, 0),
        (0, 2, 1.5, 0.25, 1),
        (3, 1, 1, 0.5, 0),
    ):
        window = (x[first : first + length] for x in outcomes)
        found = returns.window_return(*window, 0.5)
        np.testing.assert_allclose([float(x[0]) for x in found], [total, factor, last])


# --- Faults ---------------------------------------------------------------------------------------


def surfaces(run: Iterator[Report], at: list[float], where: str) -> None:
    """The error reaches the caller in time, with its traceback, and leaves no thread."""
    with pytest.raises(ZeroDivisionError, match="injected") as caught:
        list(run)
    assert time.perf_counter() - at[0] < 2.0
    assert where in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    until(
        lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("actor-")]
    )


@functools.cache
def compile_first(plan: str, name: str = "a2c") -> None:
    """So that the times that follow are not those of the compiler."""
    take(PLANS[plan](make(name)), 2)


SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 50))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plan", PLANS)
def test_an_error_in_an_actor_ends_the_run(plan: str, seed: int) -> None:
    rng, at = np.random.default_rng(seed), []
    where = f"actor-{rng.integers(ACTORS)}", int(rng.integers(60))

    def broken_step(thread: str, steps: int) -> None:
        if (thread, steps) == where:
            at.append(time.perf_counter())
            raise ZeroDivisionError("injected")

    compile_first(plan)
    options = {"lag": 1} if seed % 2 and plan == "asynchronous" else {}
    surfaces(PLANS[plan](make("a2c", hook=broken_step, **options)), at, "broken_step")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plan", PLANS)
def test_an_error_in_the_learner_ends_the_run(plan: str, seed: int) -> None:
    fatal, at = int(np.random.default_rng(seed).integers(12)), []

    def broken_update(call: int) -> None:
        if call == fatal:
            at.append(time.perf_counter())
            raise ZeroDivisionError("injected")

    compile_first(plan)
    session = make("a2c")
    kept = Calling(
        session.job.cache, {"asynchronous": "update", "gradients": "apply"}[plan], broken_update
    )
    surfaces(PLANS[plan](with_job(session, cache=kept)), at, "broken_update")


@pytest.mark.parametrize(
    "lag, seed",
    [
        (1, 0),
        pytest.param(None, 0, marks=pytest.mark.case),
        *(
            pytest.param(lag, seed, marks=pytest.mark.slow)
            for lag in (None, 1)
            for seed in range(1, 20)
        ),
    ],
)
def test_an_environment_that_hangs_ends_the_run(lag: int | None, seed: int) -> None:
    """Within the time-out, and a few seconds for what else there is to close."""
    after = int(np.random.default_rng(seed).integers(50))
    source = find("faulty:hanging", {"after": str(after)}, timeout=1.0)
    compile_first("asynchronous", "impala")
    faulty.HANGING_SINCE.clear()
    with pytest.raises(TimeoutError, match="within 1 s"):
        list(asynchronous(make(env=source, lag=lag)))
    assert time.perf_counter() - min(faulty.HANGING_SINCE) < 1.0 + 5.0


# --- Gradients ------------------------------------------------------------------------------------


def test_one_gradient_is_one_update() -> None:
    """Of one actor's rollout: what a learner that holds the rollout itself makes of it."""
    session = base("a2c", 2)
    algorithm, spec = with_sgd(session.job.algorithm[""]), session.job.source.spec
    rollout, key = random_rollout(algorithm, spec, LENGTH, ACTORS * SIZE), jax.random.key(3)
    learner = learner_of(algorithm, spec, ACTORS * SIZE, LENGTH, 2)

    def start() -> Any:
        state = jax.jit(learner.init)(jax.random.key(0))
        return state._replace(
            variables=state.variables._replace(params=perturbed(state.variables.params))
        )

    on = make_mesh(1)
    grads, metrics = compile_gradient(algorithm, on)(start(), rollout, key, np.int32(4))
    grads = meshes.put(grads, session.job.mesh, meshes.REPLICATED)
    applied = compile_apply(algorithm, session.job.mesh, ACTORS * SIZE * LENGTH)(start(), grads)
    updated, expected = compile_update(learner, session.job.mesh)(start(), rollout, key)
    assert_close(applied, updated, 1e-5)
    assert_close(dict(metrics), dict(expected), 1e-5)
    moved = jax.tree.map(
        lambda a, b: bool((np.asarray(a) != b).any()), applied.variables, start().variables
    )
    assert any(jax.tree.leaves(moved))


def test_gradients_are_no_older_than_there_are_other_actors() -> None:
    """As no actor goes on before its gradient has been applied, however slow the learner."""
    session = make("a2c")
    *_, last = take(
        gradients(
            with_job(
                session, cache=Calling(session.job.cache, "apply", lambda call: time.sleep(0.03))
            )
        ),
        4,
    )
    assert last.metrics["async/lag"] <= ACTORS - 1


def test_one_actor_s_gradients_are_of_the_newest_parameters() -> None:
    session = make("a2c", num_actors=1)
    *_, last = take(
        gradients(with_job(session, config=dataclasses.replace(session.config, num_envs=SIZE))), 3
    )
    assert last.metrics["async/lag"] == last.metrics["async/lag_max"] == 0


def test_windows_are_all_that_lie_in_the_rollout() -> None:
    session = base("dqn", 1)
    rollout = random_rollout(session.job.algorithm[""], session.job.source.spec, LENGTH, SIZE)
    for length in (1, 3, LENGTH):
        found = jax.jit(ring.windows, static_argnums=1)(rollout, length)
        assert found.core == found.final_core == ()
        index = 0
        for first in range(LENGTH - length + 1):
            for env in range(SIZE):
                for name in ("obs", "action", "reward", "terminated", "truncated", "valid"):
                    whole = getattr(rollout, name)
                    expected = whole[first : first + length + (name == "obs"), env]
                    np.testing.assert_array_equal(getattr(found, name)[:, index], expected)
                index += 1
        assert found.reward.shape == (length, index)


def test_gradients_of_replayed_windows_are_those_of_the_loss() -> None:
    """Async DQN: the mean over all windows of the rollout,
    except for those that begin on a reset step.
    """
    session = base("dqn", 1)
    algorithm, spec = session.job.algorithm[""], session.job.source.spec
    rollout = random_rollout(algorithm, spec, LENGTH, SIZE)
    state = state_of(jax.jit(session.job.learner.init)(jax.random.key(0)), "")._replace(memory=())
    _, metrics = compile_gradient(algorithm, make_mesh(1))(
        state, rollout, jax.random.key(1), np.int32(0)
    )
    length = algorithm.window or 0
    windows = ring.windows(_extended(rollout, {}, length - 1), length)
    assert windows.reward.shape == (length, LENGTH * SIZE)
    keys = jax.random.split(jax.random.key(2), windows.reward.shape[1])
    losses, mask, _ = losses_of(algorithm, state, windows, keys)
    np.testing.assert_array_equal(mask, windows.valid[0])
    assert 0 < mask.sum() < mask.size
    assert float(metrics["loss/total"]) == pytest.approx(float(losses[mask].mean()), rel=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def losses_of(algorithm: Algorithm, state: TrainState, windows: Rollout, keys: jax.Array) -> Any:
    batch = algorithm.postprocess(state.variables, windows, state.context(keys))
    return algorithm.loss(state.variables, batch, state.context(keys))


# --- Replay beside actors -------------------------------------------------------------------------


def test_actors_find_the_priorities_that_the_learner_would() -> None:
    session = base("dqn", 1)
    config = dataclasses.replace(CONFIGS["dqn"], n_step=3, priority_exponent=0.6)
    algorithm, spec = config.make(session.job.source.spec), session.job.source.spec
    rollout = random_rollout(algorithm, spec, LENGTH, SIZE)
    state = state_of(jax.jit(session.job.learner.init)(jax.random.key(0)), "")._replace(memory=())
    found = compile_priority(algorithm, make_mesh(1))(
        state, rollout, jax.random.key(1), np.int32(0)
    )
    assert found.shape == (LENGTH, SIZE) and np.isnan(found[:2]).all()
    for end in (2, LENGTH - 1):
        piece = jax.tree.map(
            lambda x: x[end - 2 : end + 1], rollout._replace(obs=(), core=(), final_core=())
        )
        piece = piece._replace(obs=rollout.obs[end - 2 : end + 2])
        keys = jax.random.split(jax.random.key(2), SIZE)
        _, _, aux = losses_of(algorithm, state, piece, keys)
        np.testing.assert_allclose(found[end], (aux.priority + 1e-6) ** 0.6, rtol=1e-4)
    too_long = dataclasses.replace(config, n_step=LENGTH + 1).make(spec)
    assert np.isnan(
        compile_priority(too_long, make_mesh(1))(state, rollout, jax.random.key(1), np.int32(0))
    ).all()


def test_new_window_without_finite_priority_gets_the_smallest() -> None:
    """As one that was replayed: one that is infinite would be drawn for ever,
    and NaN stands for the largest.
    """
    session = base("dqn", 1)
    config = dataclasses.replace(CONFIGS["dqn"], n_step=1, priority_exponent=0.6)
    algorithm, spec = config.make(session.job.source.spec), session.job.source.spec
    rollout = random_rollout(algorithm, spec, LENGTH, SIZE)
    places = tuple(np.argwhere(rollout.valid)[[1, 5]].T)
    broken = rollout.reward.copy()
    broken[places] = np.inf, np.nan
    state = state_of(jax.jit(session.job.learner.init)(jax.random.key(0)), "")._replace(memory=())
    program = compile_priority(algorithm, make_mesh(1))
    plain, found = (
        program(state, rollout._replace(reward=reward), jax.random.key(1), np.int32(0))
        for reward in (rollout.reward, broken)
    )
    expected = np.array(plain)
    expected[places] = 1e-6**0.6
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.case  # test_lockstep_repeats_bit_for_bit
def test_free_running_learner_does_not_wait_for_actors() -> None:
    """It makes more updates than the ratio asks for, from the first on,
    and still sees what goes wrong.
    """

    def slow(thread: str, steps: int) -> None:
        time.sleep(0.01)
        if steps == 12 * LENGTH:
            raise RuntimeError("broken on purpose")

    made: list[Report] = []
    with pytest.raises(RuntimeError, match="broken on purpose"):
        made.extend(asynchronous(make("dqn", hook=slow, free_running=True)))
    for iteration, report in enumerate(made, 1):
        assert report.metrics["async/trained"] == ACTORS * iteration
    assert made[0].updates == 0  # the memory is still filling
    assert made[-1].updates > 3 * 2 * (len(made) - 1)
