"""Real processes, which exchange arrays by gloo: several are as one, to rounding,
and all end together.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
import runs
import tensorstore

from jaxrl_dist import cli
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.run import checkpoint

SECONDS = 400
"""For a run of some reports on a busy machine."""
LOST_SECONDS = 5
SIZES = (
    "--num-envs 16 --rollout-length 8 --hidden-sizes 8 --total-env-steps 640 --report-interval 256 "
    "--evaluation-episodes 2 --seed 3"
)
COMMANDS = {
    "ppo": f"ppo --env CartPole-v1 {SIZES} --num-epochs 2 --num-minibatches 2 --normalize-observations",
    "dqn": f"dqn --env CartPole-v1 {SIZES} --batch-size 16 --replay-capacity 512 --replay-ratio 0.03125 "
    "--learning-starts 128 --priority-exponent 0.6",
    "impala": f"impala --env CartPole-v1 {SIZES} --plan on_device --core gru --core-size 4",
    "ppo-synchronous": f"ppo --env envpool:CartPole-v1 {SIZES} --num-epochs 2 --num-minibatches 2",
    "a2c-gymnasium": f"a2c --env gymnasium:CartPole-v1 {SIZES} --plan synchronous",
    "dqn-synchronous": f"dqn --env envpool:CartPole-v1 {SIZES} --batch-size 16 --replay-capacity 512 "
    "--replay-ratio 0.03125 --learning-starts 128 --plan synchronous",
    "impala-asynchronous": f"impala --env envpool:CartPole-v1 {SIZES} --plan asynchronous --lockstep --num-actors 4",
    "es": f"es --env CartPole-v1 {SIZES} --plan on_device",
    "policies": "--policy a=ppo:pole_0 --policy b=dqn:pole_1 --env team:CartPoles "
    f"{SIZES.replace('--hidden-sizes 8 --total-env-steps 640', '--total-env-steps 320')} "
    "--a.hidden-sizes 8 --a.num-epochs 2 --a.num-minibatches 2 "
    "--b.hidden-sizes 8 --b.batch-size 16 --b.replay-capacity 512 --b.replay-ratio 0.03125 --b.learning-starts 128",
    "population": f"ppo --env CartPole-v1 {SIZES} --num-epochs 1 --num-minibatches 2 --seeds 2",
}
OFFLINE = (
    "--env CartPole-v1 --data {records} --batch-size 16 --hidden-sizes 8 --total-updates 40 --report-interval 16 "
    "--evaluation-episodes 2 --seed 3"
)
COMMANDS |= {
    "iql": f"iql {OFFLINE} --normalize-observations",
    "marwil-host": f"marwil {OFFLINE} --data-memory host",
    "dqn-data": f"dqn --env CartPole-v1 {SIZES} --batch-size 32 --replay-capacity 512 --replay-ratio 0.03125 "
    "--learning-starts 128 --data {records} --data-share 0.5",
}
COMMANDS["ppo-best"] = f"{COMMANDS['ppo']} --keep-best evaluation --evaluation-interval 256"
COMMANDS["policies-synchronous"] = f"{COMMANDS['policies']} --plan synchronous"


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float
    """Since the others were told to end."""


@contextlib.contextmanager
def started(
    words: Sequence[str],
    processes: int,
    devices: int,
    last: Sequence[str] = (),
    missing: int | None = None,
    folders: Sequence[Path] | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of one run on this machine, with so many devices each.

    ``last`` are more words of the last one, ``missing`` is the number of one that is not started,
    and each starts in its own of the ``folders``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{runs.ROOT}{os.pathsep}{runs.ROOT / 'tests'}",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
    }
    there = [
        subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "jaxrl_dist.cli",
                    *words,
                    "--lost-process-timeout",
                    str(LOST_SECONDS),
                ),
                *(
                    "--coordinator",
                    address,
                    "--processes",
                    str(processes),
                    "--process",
                    str(number),
                ),
                *(last if number == processes - 1 else ()),
            ],
            env={**environment, "TEST_PROCESS": str(number)},
            cwd=folders and folders[number],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
        if number != missing
    ]
    try:
        yield there
    finally:
        for process in there:
            process.kill()
            process.communicate()


def ends(there: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    """Waits for all of them."""
    began, codes = time.monotonic(), dict[int, tuple[int, float]]()
    while len(codes) < len(there):
        assert time.monotonic() - began < SECONDS, codes
        for number, process in enumerate(there):
            if number not in codes and process.poll() is not None:
                codes[number] = process.returncode, time.monotonic() - began
        time.sleep(0.02)
    return [ended(process, *codes[number]) for number, process in enumerate(there)]


def ended(process: subprocess.Popen[str], code: int, seconds: float) -> Ended:
    out, err = process.communicate()
    # of a busy machine's start
    return Ended(code, out, re.sub("jaxrl-dist: waiting for .*\n", "", err), seconds)


def train(name: str, processes: int, devices: int, run_dir: Path) -> list[Ended]:
    with started(["train", *words_of(name, run_dir)], processes, devices) as there:
        done = ends(there)
    assert [process.code for process in done] == [0] * processes, done
    for process in done[1:]:
        assert (process.out, process.err) == ("", "")
    assert done[0].err == ""
    # whose sums are over other groups of devices
    assert name == "population" or "[Gloo]" not in done[0].out
    return done


def alone(name: str, run_dir: Path) -> None:
    """The same run on eight devices of this process."""
    assert cli.main(["train", *words_of(name, run_dir), "--quiet"]) == 0


def words_of(name: str, run_dir: Path) -> list[str]:
    """Its data set, if it has one, lies beside the directory of the run."""
    return [
        *COMMANDS[name].format(records=run_dir.parent / "records").split(),
        "--run-dir",
        str(run_dir),
    ]


def make_records(path: Path, seed: int = 0) -> None:
    """A data set of CartPole's spaces, with episodes of several lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 20, 60)
    Dataset.from_episodes(
        [
            {
                "obs": rng.normal(size=(length + 1, 4)).astype(np.float32),
                "action": rng.integers(0, 2, length),
                "reward": np.ones(length),
                "terminated": bool(length % 2),
            }
            for length in lengths
        ]
    ).save(path)


def arrays(run_dir: Path) -> dict[str, np.ndarray]:
    """Those of the newest checkpoint, which is whole."""
    newest = checkpoint.saved(run_dir)[0]
    checkpoint.verify(newest, None)
    found: dict[str, np.ndarray] = {}
    pieces: dict[str, list[tuple[list[list[int]], np.ndarray]]] = {}
    entries = [
        (key, value)
        for part in newest.absolute().glob("arrays*")
        for key, value in entries_of(part)
    ]
    for key, value in entries:
        name, _, bounds = key.partition("@")
        if bounds:
            where = [[int(x) for x in pair.split(":")] for pair in bounds.split(",")]
            pieces.setdefault(name, []).append((where, value))
        else:
            assert name not in found
            found[name] = value
    for name, parts in pieces.items():
        whole = np.empty(
            [max(where[axis][1] for where, _ in parts) for axis in range(parts[0][1].ndim)]
        )
        count = np.zeros(whole.shape, int)
        for where, value in parts:
            whole[tuple(slice(*pair) for pair in where)] = value
            count[tuple(slice(*pair) for pair in where)] += 1
        assert name not in found and (count == 1).all()
        found[name] = whole
    return found


def entries_of(part: Path) -> Iterator[tuple[str, np.ndarray]]:
    if part.name == "arrays":
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            yield from (
                (key, np.asarray(value)) for key, value in checkpointer.restore(part).items()
            )
        return
    database: dict[str, Any] = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{part}/"}}
    for file in tensorstore.KvStore.open(database).result().list().result():
        if (name := file.decode()).endswith("/.zarray"):
            key = name.removesuffix("/.zarray")
            yield (
                key,
                tensorstore.open({"driver": "zarr", "kvstore": {**database, "path": key}})
                .result()
                .read()
                .result(),
            )


def assert_alike(one: Path, other: Path) -> None:
    """All numbers of both runs: metrics within 1e-4, what a run continues from within 1e-5."""
    first, second = runs.untimed(one), runs.untimed(other)
    assert len(first) == len(second) > 1
    for before, after in zip(first, second, strict=True):
        own = {
            name
            for name in before
            if re.match("async/(sent|queue|dropped|actor_idle|learner_idle)", name)
        }
        assert before.keys() == after.keys()
        for name in before.keys() - own:
            wanted = (
                None if before[name] is None else pytest.approx(before[name], rel=1e-4, abs=1e-6)
            )
            assert after[name] == wanted, name
    there, here = arrays(one), arrays(other)
    assert there.keys() == here.keys()
    for name, value in there.items():
        scale = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(here[name], value, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize(
    "name, processes",
    [
        pytest.param("dqn", 2, marks=pytest.mark.case),
        *[
            pytest.param(name, 2, marks=pytest.mark.slow)
            for name in COMMANDS
            if name not in ("dqn", "population")
        ],
        *[pytest.param(name, 4, marks=pytest.mark.slow) for name in ("ppo", "impala-asynchronous")],
    ],
)
def test_several_processes_are_as_one(name: str, processes: int, tmp_path: Path) -> None:
    make_records(tmp_path / "records")
    done = train(name, processes, 8 // processes, tmp_path / "several")
    assert "8 cpu devices" in done[0].out
    alone(name, tmp_path / "alone")
    assert_alike(tmp_path / "alone", tmp_path / "several")
    best = [
        runs.read_json(tmp_path / x / "summary.json").get("best_evaluation")
        for x in ("alone", "several")
    ]
    assert best[0] == best[1] and (best[0] is not None) == (name == "ppo-best")


@pytest.mark.slow
def test_a_population_over_two_processes(tmp_path: Path) -> None:
    train("population", 2, 4, tmp_path / "several")
    alone("population", tmp_path / "alone")
    for member in ("000", "001"):
        assert_alike(
            tmp_path / "alone" / "members" / member, tmp_path / "several" / "members" / member
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_a_run_goes_on_with_other_processes(name: str, tmp_path: Path) -> None:
    """Two, then one, then two: they end where one would have ended."""
    parts = tmp_path / "parts"
    train(name, 2, 4, parts)
    resume = ["resume", str(parts), "--total-env-steps"]
    assert cli.main([*resume, "1024", "--quiet"]) == 0
    with started([*resume, "1536"], 2, 4) as there:
        done = ends(there)
    assert [process.code for process in done] == [0, 0], done
    longer = COMMANDS[name].replace("640", "1536").split()
    assert cli.main(["train", *longer, "--run-dir", str(tmp_path / "whole"), "--quiet"]) == 0
    whole, here = arrays(tmp_path / "whole"), arrays(parts)
    assert whole.keys() == here.keys()
    for key, value in whole.items():
        scale = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(here[key], value, rtol=1e-4, atol=1e-4 * scale, err_msg=key)


# --- Ends -----------------------------------------------------------------------------------------


def endless(name: str) -> list[str]:
    return [
        "train",
        *COMMANDS[name].replace("--total-env-steps 640", "--total-env-steps 100000000").split(),
    ]


def wait_for_reports(run_dir: Path, there: Sequence[subprocess.Popen[str]]) -> None:
    until, lines = time.monotonic() + SECONDS, run_dir / "metrics.jsonl"
    while not (lines.exists() and lines.read_bytes().count(b"\n") > 1):
        assert time.monotonic() < until and all(process.poll() is None for process in there), ends(
            there
        )
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", ["ppo", "dqn-synchronous", "impala-asynchronous"])
def test_a_signal_to_one_process_ends_all_after_the_same_update(
    name: str, number: Any, tmp_path: Path
) -> None:
    run_dir, generator = tmp_path / "run", random.Random(f"{name}{number}")
    with started([*endless(name), "--run-dir", str(run_dir)], 2, 4) as there:
        wait_for_reports(run_dir, there)
        time.sleep(generator.random())
        generator.choice(there).send_signal(number)
        done = ends(there)
    assert [process.code for process in done] == [128 + number] * 2, done
    assert max(process.seconds for process in done) < 60
    newest = checkpoint.saved(run_dir)[0]
    arrays(run_dir)
    assert not list(run_dir.glob("checkpoints/.*"))
    for process in done:
        *_, line = process.err.splitlines()
        assert f"`jaxrl-dist resume {run_dir}` continues from {int(newest.name)} env steps" in line
        assert "Traceback" not in process.err


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("name, interval", [("ppo", 256), ("impala-asynchronous", 10**8)])
def test_a_lost_process_ends_the_others(
    name: str, interval: int, lost: int, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = [*endless(name), "--run-dir", str(run_dir), "--checkpoint-interval", str(interval)]
    with started(words, 2, 4) as there:
        wait_for_reports(run_dir, there)
        while interval == 256 and not checkpoint.saved(run_dir):
            time.sleep(0.05)
        there[lost].kill()
        done = ends(there)
    survivor = done[1 - lost]
    assert survivor.code == 1 and survivor.seconds < LOST_SECONDS + 15, done
    assert survivor.err.count("\n") == 1, survivor.err
    saved = (
        f"`jaxrl-dist resume {run_dir}` continues"
        if interval == 256
        else "the run has saved no checkpoint"
    )
    assert f"process {lost} is lost" in survivor.err and saved in survivor.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_one_that_waits_for_the_others_ends_at_a_signal(number: int, tmp_path: Path) -> None:
    """Process 0 listens for them only where they look for it."""
    words = [*endless("ppo"), "--run-dir", str(tmp_path / "run")]
    with started(words, 2, 1, missing=1 - number) as (waiting,):
        assert waiting.stderr is not None and "waiting for" in waiting.stderr.readline()
        listening = [
            x.laddr.ip
            for x in psutil.Process(waiting.pid).net_connections()
            if x.status == "LISTEN"
        ]
        assert listening == (["::ffff:127.0.0.1"] if number == 0 else [])
        waiting.send_signal(signal.SIGTERM)
        (done,) = ends([waiting])
    assert done.code == 143 and done.seconds < 5 and done.err.count("\n") == 1, done


@pytest.mark.slow
@pytest.mark.parametrize(
    "other, said",
    [
        ("--learning-rate 0.5", "--learning-rate is"),
        ("--resume-or-start", "`train --resume-or-start`"),
    ],
)
def test_other_flags_in_another_process_are_refused(other: str, said: str, tmp_path: Path) -> None:
    with started(
        [*endless("ppo"), "--run-dir", str(tmp_path / "run")], 2, 4, other.split()
    ) as there:
        done = ends(there)
    for process in done:
        assert process.code == 2 and process.err.count("\n") == 1 and said in process.err, done
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_processes_that_start_from_other_values_are_refused(tmp_path: Path) -> None:
    """Each reads the variables by itself, and the directory of one host may not be that of
    another.
    """
    folders = [tmp_path / "0", tmp_path / "1"]
    for seed, folder in enumerate(folders):
        words = COMMANDS["ppo"].replace("--seed 3", f"--seed {seed}").split()
        assert cli.main(["train", *words, "--run-dir", str(folder / "parent"), "--quiet"]) == 0
    with started(
        ["train", *COMMANDS["ppo"].split(), "--init-from", "parent"], 2, 4, folders=folders
    ) as there:
        done = ends(there)
    for process in done:
        assert process.code == 2 and process.err.count("\n") == 1, done
        assert "read other values of what the run starts from" in process.err, done


@pytest.mark.slow
def test_processes_with_other_records_are_refused(tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for seed, folder in enumerate(folders):
        make_records(folder / "records", seed)
    words = COMMANDS["iql"].format(records="records").split()
    with started(
        ["train", *words, "--run-dir", str(tmp_path / "run")], 2, 4, folders=folders
    ) as there:
        done = ends(there)
    for process in done:
        assert process.code == 2 and process.err.count("\n") == 1, done
        assert "read other values of --data records" in process.err, done


@pytest.mark.slow
def test_a_directory_that_is_taken_ends_all(tmp_path: Path) -> None:
    """Only process 0 looks at it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.json").write_text("{}")
    with started([*endless("ppo"), "--run-dir", str(run_dir)], 2, 4) as there:
        done = ends(there)
    for process in done:
        assert (
            process.code == 2
            and process.err.count("\n") == 1
            and "already holds a run" in process.err
        ), done


FAILING = """
import os
import gymnasium, numpy as np
from gymnasium import spaces

class Failing(gymnasium.Env):
    observation_space, action_space, total = spaces.Box(-1, 1, (2,)), spaces.Discrete(2), 0
    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.steps += 1
        Failing.total += 1
        if Failing.total > 400 and os.environ.get("TEST_PROCESS") == "1":
            raise RuntimeError("a plug was pulled")
        return np.zeros(2, np.float32), 1.0, self.steps > 20, False, {}
"""


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["synchronous", "asynchronous --lockstep --num-actors 2"])
def test_an_environment_that_fails_in_one_process_ends_all_saved(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_here.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    words = f"train impala --env failing_here:Failing {SIZES} --plan {plan} --run-dir {tmp_path / 'run'}"
    with started(
        words.replace("--total-env-steps 640", "--total-env-steps 1000000").split(), 2, 4
    ) as there:
        done = ends(there)
    assert [process.code for process in done] == [1, 1], done
    first, second = (process.err.splitlines()[-1] for process in done)
    assert (
        "a plug was pulled" in second and "process 1" in first and "a plug was pulled" in first
    ), done
    arrays(tmp_path / "run")


@pytest.mark.slow
def test_environments_that_are_made_anew_are_logged_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_here.py").write_text(FAILING.replace("> 400", "== 100"))
    monkeypatch.chdir(tmp_path)
    run_dir, plan = (
        tmp_path / "run",
        "asynchronous --lockstep --num-actors 2 --on-actor-error restart",
    )
    with started(
        f"train impala --env failing_here:Failing {SIZES} --plan {plan} --run-dir {run_dir}".split(),
        2,
        1,
    ) as there:
        done = ends(there)
    assert [process.code for process in done] == [0, 0], done
    (line,) = done[1].err.splitlines()
    assert line.startswith(
        "jaxrl-dist: warning: process 1: actor 0 continues with new environments"
    ), done
    assert runs.read_json(run_dir / "summary.json")["restarts"] == 1
    last = runs.read_metrics(run_dir)[-1]
    assert last["async/restarts"] == 1
    assert last["async/sent"] == last["async/trained"] + last["async/dropped"] + last["async/queue"]


ON_RAY = """
import runpy, sys
import ray
from ray.cluster_utils import Cluster
cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)
script = runpy.run_path(sys.argv[1])
print("codes", *script["run"](sys.argv[2:], 2, 1, 0, strategy="STRICT_SPREAD"))
"""


@pytest.mark.slow
def test_ray_places_the_processes_of_a_run_on_its_nodes(tmp_path: Path) -> None:
    """Two nodes of a cluster on this machine; the same command again finds the run finished."""
    pytest.importorskip("ray")
    words = [*COMMANDS["ppo"].split(), "--run-dir", str(tmp_path / "run"), "--quiet"]
    command = [
        sys.executable,
        "-c",
        ON_RAY,
        str(runs.ROOT / "scripts" / "launch" / "ray_run.py"),
        *words,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(runs.ROOT),
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_PLATFORMS": "cpu",
    }
    for _ in range(2):
        done = subprocess.run(
            command,
            env={**environment, "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr
        assert "2 processes on 2 nodes" in done.stdout and "codes 0 0" in done.stdout
    alone("ppo", tmp_path / "alone")
    assert_alike(tmp_path / "alone", tmp_path / "run")
