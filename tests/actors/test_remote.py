"""Actors in other processes, with a stand-in for Ray: they compute what threads compute, and a lost
process costs its last rollout.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import standin
import team

from jaxrl_dist import cli, heavy, load_policy, preset, spaces, train
from jaxrl_dist.actors import remote, transport
from jaxrl_dist.config.train import Train
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.errors import ConfigError, EnvError, EnvWarning, ProcessError
from jaxrl_dist.memory import frames
from jaxrl_dist.training import actor_process
from jaxrl_dist.types import EnvSpec, Rollout

SIZES = (
    "--num-envs 8 --rollout-length 8 --hidden-sizes 8 --num-actors 2 --total-env-steps 640 "
    "--report-interval 320 --evaluation-episodes 0 --num-devices 1 --seed 3"
)
REPLAY = "--batch-size 16 --replay-capacity 512 --replay-ratio 0.03125 --learning-starts 128"
LOCKSTEP = f"--plan asynchronous --lockstep {SIZES}"
COMMANDS = {
    "impala": f"impala --env envpool:CartPole-v1 {LOCKSTEP}",
    "gru": f"impala --env CartPole-v1 --core gru --core-size 4 {LOCKSTEP}",
    "appo": f"appo --env gymnasium:CartPole-v1 {LOCKSTEP}",
    "apex": f"dqn --env envpool:CartPole-v1 --priority-exponent 0.6 {REPLAY} {LOCKSTEP}",
    "policies": "--policy a=impala:pole_0 --policy b=dqn:pole_1 --env team:CartPoles "
    f"--b.batch-size 16 --b.replay-capacity 512 --b.learning-starts 128 {LOCKSTEP}".replace(
        "--hidden-sizes 8", "--a.hidden-sizes 8 --b.hidden-sizes 8"
    ),
    "lag": f"impala --env envpool:CartPole-v1 --lag 3 {LOCKSTEP}",
    "gradients": f"a2c --env envpool:CartPole-v1 --plan gradients {SIZES}".replace(
        "--num-actors 2", "--num-actors 1"
    ),
}
ON_RAY = "--actors-on ray"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[standin.Ray]:
    """Stands for Ray, with a cluster of two nodes."""
    ray = standin.Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # it would change the filters of the test
    monkeypatch.setattr(actor_process, "_env_warnings", lambda: contextlib.nullcontext([]))
    platforms = jax.config.values["jax_platforms"]
    yield ray
    jax.config.update("jax_platforms", platforms)
    assert all(process.dead for process in ray.processes), "a process is left"
    assert not ray.is_initialized()


def error_of(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["train", *command.split()])
    return code, capsys.readouterr().err.strip().splitlines()[-1]


# --- The same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", runs.cases(COMMANDS, "impala", "apex"))
def test_actors_in_processes_learn_what_threads_learn(
    name: str, ray: standin.Ray, tmp_path: Path
) -> None:
    threads = runs.finished(COMMANDS[name])
    processes = runs.train(f"{COMMANDS[name]} {ON_RAY}", tmp_path / "run")
    env = team.CartPoles() if name == "policies" else None
    mine, theirs = (
        jax.tree.leaves(load_policy(str(x), env=env).variables) for x in (threads, processes)
    )
    for here, there in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(here, there)
    assert len(ray.processes) == (1 if name == "gradients" else 2)
    for before, after in zip(runs.untimed(threads), runs.untimed(processes), strict=True):
        idle = ("async/actor_idle", "async/learner_idle", "async/sent", "async/queue")
        dropped = "async/dropped"
        for name in before.keys() - {*idle, dropped}:
            assert before[name] == after[name], name


def test_the_first_line_names_the_cluster(
    ray: standin.Ray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"train {COMMANDS['impala']} {ON_RAY} --run-dir {tmp_path / 'run'}"
    assert cli.main(command.split()) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "2 actors on Ray (2 nodes, 4 CPUs), 1 cpu device" in first
    assert ray.addresses == ["local"]


def test_a_run_continues_where_its_actors_were_not(ray: standin.Ray, tmp_path: Path) -> None:
    run = runs.train(COMMANDS["impala"], tmp_path / "run")
    for steps, actors_on, processes in ((960, "ray", 2), (1280, "None", 2), (1600, "ray", 4)):
        more = f"--total-env-steps {steps} --actors-on {actors_on} --quiet"
        assert cli.main(["resume", str(run), *more.split()]) == 0
        assert runs.read_metrics(run)[-1]["env_steps"] >= steps
        assert len(ray.processes) == processes


def test_records_are_those_of_threads(ray: standin.Ray, tmp_path: Path) -> None:
    # several actors record in order of arrival
    command = COMMANDS["impala"].replace("--num-actors 2", "--num-actors 1")
    for name, more in (("threads", ""), ("ray", ON_RAY)):
        runs.train(f"{command} {more} --record {tmp_path / name}-data", tmp_path / name)

    def steps(name: str) -> collections.Counter[bytes]:
        data = Dataset.load(f"{tmp_path / name}-data")
        rows = zip(data.obs[data.valid], data.action[data.valid], strict=True)
        return collections.Counter(obs.tobytes() + action.tobytes() for obs, action in rows)

    mine, theirs = sorted((steps("threads"), steps("ray")), key=collections.Counter.total)
    assert mine.total() > 600
    assert mine <= theirs
    # the last rollout may be under way when the learner ends
    assert theirs.total() - mine.total() <= 64


# --- What travels ---------------------------------------------------------------------------------


def test_frames_travel_once() -> None:
    """Stacks of random episodes, some of whose frames are equal, come back as they were."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 3, (21, 4, 1, 2, 2), np.uint8)
    fresh = random.random((21, 4)) < 0.2
    fresh[0] = True
    stacks = jnp.zeros((4, 4, 2, 2), jnp.uint8)
    seen = []
    for frame in map(frames.Frame, pixels, fresh):
        stacks, obs = frames.push(stacks, frame)
        seen.append(obs)
    obs = jnp.stack(seen)
    sent = frames.unstack(obs, 4)
    np.testing.assert_array_equal(frames.restack(sent), obs)
    assert sum(x.nbytes for x in sent.later.pixels) == 20 * 4 * 4


def test_bytes_of_a_sample_are_those_of_its_frames() -> None:
    obs = jnp.zeros((21, 16, 4, 84, 84), jnp.uint8)
    flags = jnp.zeros((20, 16), bool)
    extras = (jnp.zeros((20, 16, 6)), jnp.zeros((20, 16)))
    whole = Rollout(obs, flags * 1, flags * 1.0, flags, flags, flags, extras, (), ())
    pixels = spaces.Box(0, 255, (4, 84, 84), np.dtype(np.uint8))
    spec = EnvSpec("Pong-v5", "envpool", "", pixels, spaces.Discrete(6), None, frame_stack=4)
    sent = jax.eval_shape(lambda x: transport.packed(spec, {"": x}), whole)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(sent))
    assert size <= 1.3 * 21 * 16 * 84 * 84


def test_a_request_is_sent_ahead(ray: standin.Ray, tmp_path: Path) -> None:
    """An actor knows its next rollout before it has sent the one that it makes; under the plan
    gradients it waits for the parameters that its gradient changes.
    """
    most = dict[str, int]()
    for name in ("impala", "gradients"):
        waiting = list[int]()

        def before(process: standin.Process, method: str, waiting: Any = waiting) -> bool:
            if method == "rollout":
                time.sleep(0.05)  # it acts
                done = process.__dict__.get("done", 0)
                waiting.append(process.calls.count("rollout") - done)
                process.done = done + 1
            return False

        ray.before = before
        command = COMMANDS[name].replace("--lockstep", "")
        runs.train(f"{command} {ON_RAY}", tmp_path / name)
        most[name] = max(waiting)
    assert most == {"impala": 2, "gradients": 1}


# --- What is lost ---------------------------------------------------------------------------------


def config(**fields: Any) -> Train[Any]:
    sizes = {"num_envs": 8, "rollout_length": 8, "num_actors": 2, "num_devices": 1, "seed": 3}
    steps = {"total_env_steps": 1280, "report_interval": 320, "evaluation_episodes": 0}
    replay = {"batch_size": 16, "replay_capacity": 4096, "learning_starts": 128}
    return preset(
        "dqn",
        **{
            "env": "gymnasium:counting:Counting",
            "plan": "asynchronous",
            "actors_on": "ray",
            "hidden_sizes": (8,),
            "run_dir": None,
            **sizes,
            **steps,
            **replay,
            **fields,
        },
    )


def gaps(memory: Any) -> int:
    """Counts the valid steps of a replay memory that do not lead to the next step of their
    episode.
    """
    added = int(memory.added[0])
    obs = np.asarray(memory.steps.obs)[:, : added + 1]
    valid = np.asarray(memory.steps.valid)[:, :added]
    leads = obs[:, 1:] - obs[:, :-1] == [0, 0, 1]
    assert valid.sum() > 500
    return int((valid & ~leads.all(-1)).sum())


@pytest.mark.parametrize("mended", [True, False])
def test_a_replacement_leaves_no_gap_in_replay(
    mended: bool, ray: standin.Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rollout of a gap, the successor of a step is another environment's."""
    if not mended:
        monkeypatch.setattr(remote.RemotePool, "_broken", lambda *_: False)
    ray.before = standin.dies({0: 3, 1: 5, 2: 0, 3: 2})
    with pytest.warns(EnvWarning, match="continues in a new process"):
        *_, last = train(config(on_actor_error="restart"))
    metrics = last.metrics
    assert metrics["async/restarts"] == 4 == len(ray.processes) - 2
    assert metrics["async/sent"] == sum(
        metrics[f"async/{name}"] for name in ("trained", "dropped", "queue")
    )
    found = gaps(last.checkpoint().state.memory)
    assert (found == 0) == mended


def test_a_lost_process_ends_the_run_which_is_saved(ray: standin.Ray, tmp_path: Path) -> None:
    ray.before = standin.dies({1: 4})
    reports = train(config(run_dir=str(tmp_path / "run")))
    with pytest.raises(
        ProcessError, match=r"actor ., process .* is lost: its process has died"
    ) as e:
        list(reports)
    assert any("continues from" in note for note in e.value.__notes__)


def test_too_many_restarts_end_the_run(ray: standin.Ray) -> None:
    ray.before = standin.dies({0: 1, 1: 1, 2: 1})
    with (
        pytest.warns(EnvWarning) as caught,
        pytest.raises(ProcessError, match=r"is lost after 2 restarts: .*; a higher --max-restarts"),
    ):
        list(train(config(num_actors=1, on_actor_error="restart", max_restarts=2)))
    assert ["(restart 2 of 2)" in str(one.message) for one in caught] == [False, True]


def test_a_silent_process_is_lost(ray: standin.Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.before = standin.stays_silent(0)
    with pytest.raises(ProcessError, match="has not answered for 2 s"):
        list(train(config(lost_process_timeout=2)))


def test_an_error_of_an_environment_ends_the_run(ray: standin.Ray) -> None:
    fields = {"env": "gymnasium:faulty:make", "env_options": {"p_crash": "1", "p_stall": "0"}}
    with pytest.raises(EnvError, match="simulated crash"):
        list(train(config(**fields)))


def test_restarts_of_environments_count_too(ray: standin.Ray) -> None:
    options = {"p_crash": "0.02", "p_crash_reset": "0", "p_stall": "0", "p_stall_reset": "0"}
    fields = {"env": "gymnasium:faulty:make", "env_options": options}
    ray.before = standin.dies({0: 5})
    with pytest.warns(EnvWarning) as caught:
        *_, last = train(config(**fields, on_actor_error="restart", max_restarts=1000))
    texts = [str(one.message) for one in caught]
    # the newest are of rollouts that nobody has taken: up to two of each actor, each with some
    assert 3 <= last.metrics["async/restarts"] <= len(texts) <= last.metrics["async/restarts"] + 12
    assert sum("continues in a new process" in text for text in texts) == 1


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command, message",
    [
        (
            "--actors-on ray --actor-devices 0",
            "--actor-devices names devices of this process, where --actors-on ray has no actors",
        ),
        (
            "--actors-on ray --actor-cpus 1.5",
            "--num-actors 2 need 1.5 CPU each, but the Ray cluster (2 nodes, 2 CPUs) has room for 0",
        ),
        (
            "--actors-on ray --actor-gpus 1",
            "--num-actors 2 need 1 CPU and 1 GPU each, but the Ray cluster (2 nodes, 2 CPUs) has "
            "room for 0",
        ),
        ("--actor-cpus 2", "--actor-cpus does nothing without --actors-on"),
        ("--actors-on dask", "--actors-on must be one of ray, None, not 'dask'"),
    ],
)
def test_actors_on_ray_refuses_what_cannot_be(
    command: str, message: str, ray: standin.Ray, tmp_path: Path, capsys: Any
) -> None:
    ray.cpus = 2.0
    try:
        code, line = error_of(f"{COMMANDS['impala']} {command} --run-dir {tmp_path / 'r'}", capsys)
        assert code == 2
        assert message in line
    finally:
        ray.shutdown()


def test_ray_must_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, line = error_of(f"{COMMANDS['impala']} {ON_RAY} --run-dir {tmp_path / 'r'}", capsys)
    assert (code, line) == (
        2,
        "jaxrl-dist: error: --actors-on ray needs Ray: pip install 'jaxrl-dist[ray]'",
    )


@pytest.mark.parametrize(
    "address, why", [("auto", "there is none"), ("127.0.0.1:1", "nothing answers there")]
)
def test_a_cluster_must_answer(
    address: str,
    why: str,
    ray: standin.Ray,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def init(address: str, **options: Any) -> None:
        raise ConnectionError("there is none\nmore")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", address)
    code, line = error_of(f"{COMMANDS['impala']} {ON_RAY} --run-dir {tmp_path / 'r'}", capsys)
    assert code == 2
    assert line.endswith(
        f"--actors-on ray finds no cluster at RAY_ADDRESS={address}: {why}; start one with `ray "
        "start --head`, or unset RAY_ADDRESS"
    )


def test_versions_must_be_the_same(ray: standin.Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    here = transport.versions()
    answers = iter([{**here, "jaxlib": "0.1"}])
    monkeypatch.setattr(transport, "versions", lambda: next(answers, here))
    with pytest.raises(ConfigError, match=r"has jaxlib .*, and the learner 0\.1; install the same"):
        list(train(config(num_actors=1)))


def test_a_module_that_a_node_lacks_is_named(ray: standin.Ray, monkeypatch: Any) -> None:
    def begin(process: standin.Process, name: str) -> bool:
        if name == "begin":
            monkeypatch.setitem(sys.modules, "counting", None)
        return False

    ray.before = begin
    with pytest.raises(ConfigError, match=r"actor 0 on .*counting"):
        list(train(config(num_actors=1)))


def test_lazy_modules_travel_by_name() -> None:
    assert pickle.loads(pickle.dumps(heavy.jnp)).zeros is jnp.zeros


def test_a_process_that_does_not_start_is_warned_of_once(
    ray: standin.Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "START_SECONDS", 0.4)

    def before(process: standin.Process, name: str) -> bool:
        if name == "alive":
            return True
        if name == "begin":
            standin.until(lambda: process.calls.count("alive") > 0)
            standin.time.sleep(2)
        return False

    ray.before = before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(train(config()))
    texts = [str(one.message) for one in caught if "has not started" in str(one.message)]
    assert len(texts) == 1
    assert "still imports, or no node of the Ray cluster (2 nodes, 4 CPUs) has 1 CPU" in texts[0]
