"""Actors in processes of a Ray cluster of two nodes on this machine: the numbers, and what is lost,
stopped, killed and left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
import runs
import team
from actors.test_remote import COMMANDS, SIZES

from jaxrl_dist import load_policy

pytestmark = pytest.mark.slow
SECONDS = 600
"""Ray starts slowly on a machine that does other things."""
PATH = os.pathsep.join((str(runs.ROOT), str(runs.ROOT / "tests")))
PROGRAM = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
print(cluster.address, flush=True)
nodes = []
for line in sys.stdin:
    if line.strip() == "add":
        nodes.append(cluster.add_node(num_cpus=2))
    else:
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""


class Cluster:
    """Two nodes of two CPUs each, which another process starts: Ray forks, and JAX warns of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        """Adds a node, or removes the first one that was added."""
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)
        assert self._line() == "done"

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="needs jaxrl-dist[ray]")
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def environment(cluster: Cluster) -> dict[str, str]:
    return {
        **os.environ,
        "RAY_ADDRESS": cluster.address,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": PATH,
        "JAX_PLATFORMS": "cpu",
    }


def start(command: str, run_dir: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    words = [*command.split(), "--actors-on", "ray", "--run-dir", str(run_dir)]
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl_dist.cli", "train", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits for the end; returns the exit code, and the lines on stderr."""
    _, said = process.communicate(timeout=SECONDS)
    return process.returncode, said


def acting() -> list[psutil.Process]:
    """The processes that act."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if any("ActorProcess" in word for word in process.info["cmdline"] or ()):
                found.append(process)
    return found


def wait_until(holds: Any, seconds: float = SECONDS) -> float:
    """Waits until something holds, and returns for how long."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, "it does not hold"
        time.sleep(0.1)
    return time.monotonic() - began


def reported(run_dir: Path, iterations: int = 1) -> bool:
    path = run_dir / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= iterations


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("psm_")}


LONG = (
    "impala --env gymnasium:CartPole-v1 --plan asynchronous --num-envs 4 --rollout-length 16 "
    "--hidden-sizes 8 --num-actors 2 --total-env-steps 10000000 --report-interval 640 "
    "--evaluation-episodes 0 --num-devices 1"
)


@pytest.mark.parametrize("name", COMMANDS)
def test_actors_in_a_cluster_learn_what_threads_learn(
    name: str, environment: dict[str, str], tmp_path: Path
) -> None:
    threads = runs.finished(COMMANDS[name])
    assert end(start(COMMANDS[name], tmp_path / "run", environment)) == (0, "")
    env = team.CartPoles() if name == "policies" else None
    mine, theirs = (
        jax.tree.leaves(load_policy(str(x), env=env).variables) for x in (threads, tmp_path / "run")
    )
    for here, there in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(here, there)
    assert not acting()


def test_killed_actors_are_replaced(environment: dict[str, str], tmp_path: Path) -> None:
    """Five times ``kill -9``: five restarts, and every sample is counted."""
    run_dir = tmp_path / "run"
    process = start(f"{LONG} --on-actor-error restart", run_dir, environment)
    wait_until(lambda: reported(run_dir))
    for _ in range(5):
        lines = len(runs.read_metrics(run_dir))
        wait_until(lambda: len(acting()) == 2)
        acting()[0].kill()
        wait_until(lambda lines=lines: reported(run_dir, lines + 3))
    wait_until(lambda: runs.read_metrics(run_dir)[-1]["async/restarts"] == 5)
    os.kill(process.pid, signal.SIGTERM)
    code, said = end(process)
    assert code == 143, said
    assert said.count("continues in a new process") == 5
    last = runs.read_metrics(run_dir)[-1]
    assert last["async/restarts"] == 5
    assert last["async/sent"] == sum(
        last[f"async/{name}"] for name in ("trained", "dropped", "queue")
    )
    wait_until(lambda: not acting(), 10)


def test_a_killed_actor_ends_the_run_which_threads_continue(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(LONG, run_dir, environment)
    wait_until(lambda: reported(run_dir, 2))
    acting()[0].kill()
    began = time.monotonic()
    code, said = end(process)
    assert code == 1
    assert time.monotonic() - began < 15, "on an idle machine 5 s"
    assert "is lost: its process has died" in said.splitlines()[-1]
    assert f"jaxrl-dist resume {run_dir}" in said
    steps = runs.read_metrics(run_dir)[-1]["env_steps"]
    words = f"--actors-on None --total-env-steps {steps + 640} --quiet".split()
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_dist.cli", "resume", str(run_dir), *words],
        env=environment,
        timeout=SECONDS,
        check=True,
    )
    assert done.returncode == 0


def test_a_stopped_actor_is_lost_after_its_time(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(f"{LONG} --lost-process-timeout 5", run_dir, environment)
    wait_until(lambda: reported(run_dir, 2))
    stopped = acting()
    learner = psutil.Process(process.pid)
    # both sides together, for longer than the limit: nobody is lost
    for one in (*stopped, learner):
        one.suspend()
    time.sleep(8)
    for one in (*stopped, learner):
        one.resume()
    lines = len(runs.read_metrics(run_dir))
    wait_until(lambda: reported(run_dir, lines + 2))
    stopped[0].suspend()
    code, said = end(process)
    assert code == 1
    assert re.search("has not answered for [56] s", said.splitlines()[-1])
    wait_until(lambda: not acting(), 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run(
    number: signal.Signals, environment: dict[str, str], tmp_path: Path
) -> None:
    """At any moment, also while Ray starts."""
    before = shared_memory()
    for attempt, seconds in enumerate((4, 8, 12, 16, 0)):
        run_dir = tmp_path / str(attempt)
        workers = "--env-workers processes" if attempt % 2 else ""
        process = start(f"{LONG} {workers}", run_dir, environment)
        if seconds:
            time.sleep(seconds)
        else:
            wait_until(lambda run_dir=run_dir: reported(run_dir, 2))
        os.killpg(process.pid, number)
        code, said = end(process)
        assert code == 128 + number, said
        wait_until(lambda: not acting(), 20)
    wait_until(lambda: shared_memory() <= before, 10)


def test_actors_end_with_a_killed_learner(environment: dict[str, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(LONG, run_dir, environment)
    wait_until(lambda: reported(run_dir))
    process.kill()
    end(process)
    wait_until(lambda: not acting(), 10)


def test_a_node_that_is_removed_is_replaced(
    cluster: Cluster, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster.tell("add")
    run_dir = tmp_path / "run"
    more = "--actor-cpus 2 --num-actors 3 --num-envs 6 --on-actor-error restart"
    command = LONG.replace("--num-actors 2", "").replace("--num-envs 4", "")
    process = start(f"{command} {more}", run_dir, environment)
    wait_until(lambda: reported(run_dir, 2))
    assert len(acting()) == 3
    cluster.tell("remove")
    cluster.tell("add")
    wait_until(lambda: runs.read_metrics(run_dir)[-1]["async/restarts"] == 1)
    os.kill(process.pid, signal.SIGTERM)
    assert end(process)[0] == 143


def test_a_file_of_the_user_travels(environment: dict[str, str], tmp_path: Path) -> None:
    """Its algorithm acts in processes that cannot find the file."""
    file = tmp_path / "mine.py"
    source = (runs.ROOT / "jaxrl_dist/algorithms/impala.py").read_text()
    file.write_text(source.replace("class IMPALA", "class Mine"))
    command = f"{file} --env envpool:CartPole-v1 --plan asynchronous {SIZES}"
    assert end(start(command, tmp_path / "run", environment)) == (0, "")


def test_a_local_cluster_ends_with_the_run(environment: dict[str, str], tmp_path: Path) -> None:
    del environment["RAY_ADDRESS"]
    command = f"{COMMANDS['impala']} --actor-cpus 0.5"
    assert end(start(command, tmp_path / "run", environment)) == (0, "")
    assert not acting()


def test_doctor_says_whether_a_cluster_answers(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "jaxrl_dist.cli", "doctor"]
    for address, answer in (
        (environment["RAY_ADDRESS"], "answers, "),
        ("127.0.0.1:1", "finds no cluster at RAY_ADDRESS=127.0.0.1:1"),
    ):
        done = subprocess.run(
            command,
            env={**environment, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        (line,) = (
            line
            for line in done.stdout.splitlines()
            if "ray" in line.lower() and ("answers" in line or "--actors-on" in line)
        )
        assert answer in line, json.dumps(done.stdout)
