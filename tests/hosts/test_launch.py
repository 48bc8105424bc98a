"""The processes of a run: which there are, what they tell each other,
and what each holds of an array.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import socket
import subprocess
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import runs
import yaml
from probes import make_mesh

from jaxrl_dist import Train, cli, preset
from jaxrl_dist import mesh as meshes
from jaxrl_dist.config.train import Processes, launch_of
from jaxrl_dist.errors import ConfigError, EnvWarning, FileWarning, ProcessError
from jaxrl_dist.hosts import arrays, failing, peers, start
from jaxrl_dist.hosts import watch as watching
from jaxrl_dist.hosts.warn import one_line_warnings
from jaxrl_dist.run import signals
from jaxrl_dist.settings.stored import to_json
from jaxrl_dist.training import setup

# --- Flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"coordinator": "a:1"}, "--coordinator needs --processes and --process"),
        ({"processes": 2}, "--processes needs --coordinator and --process"),
        ({"process": 0}, "--process needs --coordinator and --processes"),
        ({"coordinator": "a", "processes": 2, "process": 0}, "--coordinator must be HOST:PORT"),
        (
            {"coordinator": "a:99999", "processes": 2, "process": 0},
            "--coordinator must be HOST:PORT",
        ),
        (
            {"coordinator": "a:1", "processes": 2, "process": 2},
            "--process 2 is not one of --processes 2",
        ),
        ({"processes": 0}, "--processes must be >= 1"),
        ({"lost_process_timeout": 0.5}, "--lost-process-timeout must be >= 2"),
    ],
)
def test_flags_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch_of(fields)
    assert caught.value.with_flags.startswith(message)
    with pytest.raises(ConfigError):
        Train("ppo", env="CartPole-v1", **fields).checked()


def test_a_launch_is_no_part_of_a_run() -> None:
    """A resumed run is not compared with it, and its files do not hold it."""
    config = preset("ppo", "CartPole-v1")
    launched = dataclasses.replace(
        config, coordinator="a:1", processes=2, process=1, lost_process_timeout=9.0
    )
    launched.checked()
    assert to_json(launched) == to_json(config)


def test_the_command_line_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "ppo", "--env", "CartPole-v1", "--coordinator", "10.0.0.1:99"]) == 2
    assert capsys.readouterr().err == (
        "jaxrl-dist: error: --coordinator needs --processes and --process, as in --coordinator 10.0.0.1:9876 "
        "--processes 2 --process 0\n"
    )


@pytest.mark.parametrize("words", ["--resume-or-start --run-dir runs/none", ""])
def test_another_command_in_another_process_is_refused(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gather(value: Any, about: str) -> list[Any]:
        assert about == "the command"
        return [value, "resume"]

    monkeypatch.setattr(peers, "all_gather", gather)
    assert cli.main(["train", "ppo", "--env", "CartPole-v1", *words.split()]) == 2
    here = "train --resume-or-start" if words else "train"
    assert capsys.readouterr().err == (
        f"jaxrl-dist: error: all processes of a run need the same command, but it is `{here}` in process 0 and "
        "`resume` in process 1\n"
    )


@pytest.mark.parametrize("process, shown", [(0, ["a file", "an env"]), (1, ["process 1: an env"])])
def test_each_process_warns_of_its_environments(
    process: int,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(peers, "index", lambda: process)
    for quiet in (False, True):
        with one_line_warnings(quiet):
            warnings.warn("a file", FileWarning, stacklevel=1)
            warnings.warn("an env", EnvWarning, stacklevel=1)
        lines = [f"jaxrl-dist: warning: {text}" for text in shown]
        assert capsys.readouterr().err.splitlines() == lines, (
            "what has failed is said, also to the quiet"
        )


SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OMPI = {
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.mark.parametrize(
    "variables, found",
    [
        ({}, None),
        ({**SLURM, "SLURM_NTASKS": "2"}, "slurm"),
        ({**SLURM, "SLURM_NTASKS": "1"}, None),
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "4"}, "ompi"),
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)
def test_cluster_is_detected_with_several_processes(
    variables: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SLURM, *OMPI, "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert start.detected() == found
    assert start._arguments(Processes(), detect=False) is None


def test_one_process_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    start.start(Processes(processes=1), detect=True)
    assert (
        not jax.distributed.is_initialized() and failing.watch() is None and peers.world() is None
    )


def test_launch_files_can_be_read() -> None:
    folder = runs.ROOT / "scripts" / "launch"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == {"slurm.sbatch", "tpu_pod.sh", "skypilot.yaml", "jobset.yaml", "ray_run.py"}
    for name in ("slurm.sbatch", "tpu_pod.sh"):
        subprocess.run(["bash", "-n", str(folder / name)], check=True, timeout=60)
    for name in ("skypilot.yaml", "jobset.yaml"):
        assert list(yaml.safe_load_all((folder / name).read_text(encoding="utf-8")))
    text = "".join((folder / name).read_text(encoding="utf-8") for name in files)
    assert text.count("--resume-or-start") == 5


def test_other_numbers_of_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(here: Any, about: str) -> list[Any]:
        return [{**here, "run": {**here["run"], "processes": 3}}]

    monkeypatch.setattr(peers, "world", lambda: "two")
    monkeypatch.setattr(peers, "all_gather", gather)
    config = preset("ppo", "CartPole-v1", coordinator="a:1", processes=2, process=1)
    with pytest.raises(
        ConfigError, match="need the same flags, but processes is 2 in process 0 and 3 in process 0"
    ):
        setup.prepare(config)


# --- The start ------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_process_0_listens_only_where_the_others_look_for_it(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    for name in (f"127.0.0.1:{port}", f"localhost:{port}", f"a-name:{port}", f"192.0.2.1:{port}"):
        with pytest.raises(ConfigError, match=r"coordinator.* in use"):
            start.listens_at(name)
    listening.close()
    for name, wanted in (
        ("127.0.0.1", True),
        ("localhost", True),
        ("a-name", False),
        ("192.0.2.1", False),
    ):
        assert start.listens_at(f"{name}:{port}") == (f"{name}:{port}" if wanted else None)


@pytest.mark.parametrize("seconds", [2.0, 30.0, 86400.0])
def test_the_watch_finds_a_lost_process_before_jax_does(seconds: float) -> None:
    """JAX's service hears of a process every half of its time-out."""
    launch = Processes(coordinator="a:1", processes=2, process=0, lost_process_timeout=seconds)
    arguments = start._arguments(launch, detect=False)
    assert (
        arguments is not None
        and arguments["heartbeat_timeout_seconds"] / 2 > seconds + watching.SECONDS
    )


def joining(process: int, where: str, waiting: Callable[[], None] = lambda: None) -> None:
    """Waits as process ``process`` of 2, while C++ would wait for a minute."""
    thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    thread.start()
    about = {
        "client": "any",
        "process_id": process,
        "num_processes": 2,
        "coordinator_address": where,
    }
    start._wait(thread, types.SimpleNamespace(**about), waiting)


@pytest.mark.parametrize("process", [0, 1])
def test_a_signal_ends_the_wait_for_the_others(process: int, listening: socket.socket) -> None:
    def signalled() -> None:
        raise signals.Interrupted(15, "interrupted")

    with pytest.raises(signals.Interrupted):
        joining(process, address(listening), signalled)


def test_process_0_that_ends_is_not_waited_for(listening: socket.socket) -> None:
    where = address(listening)
    threading.Timer(1.0, listening.close).start()
    with pytest.raises(
        ProcessError, match="process 0 is lost: it ended before all processes joined"
    ):
        joining(1, where)


@pytest.mark.parametrize("process, there", [(0, True), (1, True), (1, False)])
def test_a_long_wait_is_said_once_and_has_an_end(
    process: int,
    there: bool,
    listening: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    who = "the others of 2 processes" if there else f"process 0 at {address(listening)}"
    where = address(listening)
    monkeypatch.setattr(start, "QUIET_SECONDS", 0)
    monkeypatch.setattr(start, "JOIN_SECONDS", 1)
    if not there:
        listening.close()
    with pytest.raises(ConfigError, match=f"{who}.*1"):
        joining(process, where)
    assert capsys.readouterr().err == f"jaxrl-dist: waiting for {who}, for at most 1 s\n"


# --- What processes tell each other ---------------------------------------------------------------


class Store:
    """The key-value store of the coordination service, for threads that stand for processes."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: it is not there")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            self.values = {
                name: value for name, value in self.values.items() if not name.startswith(key)
            }

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        with self.changed:
            return [
                (name, value)
                for name, value in self.values.items()
                if name.startswith(f"{folder}/")
            ]


def of_processes(count: int, run: Callable[[Any, int], Any], problem: Any = None) -> list[Any]:
    """Results or errors of ``run(peers, number)`` in threads for processes:
    each has a copy of the module.
    """
    spec = importlib.util.find_spec("jaxrl_dist.hosts.peers")
    assert spec is not None and spec.loader is not None
    store, results = Store(), [None] * count

    def process(number: int) -> None:
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.join(module.World(store, number, count, lambda: problem if number else None))
        try:
            results[number] = run(module, number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=process, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(store.values) <= count + 1  # what all have read is deleted
    return results


def test_values_of_all_in_their_order() -> None:
    def run(peers: Any, number: int) -> Any:
        found = [peers.all_gather([number, round], f"round {round}") for round in range(20)]
        assert found == [[[other, round] for other in range(3)] for round in range(20)]
        votes = (
            peers.any_of(number == 2, "a wish"),
            peers.any_of(False, "none"),
            peers.minimum(5 - number, "the least"),
        )
        return (
            *votes,
            peers.broadcast(f"of {number}", "what process 0 says"),
            peers.run_everywhere(lambda: number, "a call"),
        )

    assert of_processes(3, run) == [(True, False, 3, "of 0", number) for number in range(3)]


def test_process_0_hears_of_the_others_beside_their_votes() -> None:
    def run(peers: Any, number: int) -> Any:
        posts = [peers.post() for _ in range(3)]
        for at in (2, 0, 1):  # in any order
            if number:
                posts[at].send([number, at])
            peers.all_gather(at, "a vote")
        return [post.collect() for post in posts] if number == 0 else None

    found, *_ = of_processes(3, run)
    assert found == [{other: [other, at] for other in (1, 2)} for at in range(3)]
    lost = ProcessError("process 1 is lost")
    _, error = of_processes(
        2, lambda peers, number: peers.post().collect() if number else None, lost
    )
    assert error is lost


def test_one_process_asks_nobody() -> None:
    assert peers.post() is None
    assert peers.all_gather([np.inf], "alone") == [[np.inf]]
    assert peers.any_of(True, "alone") and peers.minimum(3, "alone") == 3
    with pytest.raises(KeyError):
        peers.run_everywhere(lambda: {}["there is none"], "alone")


def test_what_fails_in_one_fails_in_all() -> None:
    def run(peers: Any, number: int) -> Any:
        return peers.run_everywhere(lambda: 1 // (number - 1), "a division")

    first, second, third = of_processes(3, run)
    assert isinstance(second, ZeroDivisionError)
    for other in (first, third):
        assert isinstance(other, ProcessError) and str(other).startswith(
            "process 1 has failed: ZeroDivisionError"
        )


def test_processes_at_different_points_of_the_run_end() -> None:
    for error in of_processes(2, lambda peers, number: peers.all_gather(None, f"point {number}")):
        assert isinstance(error, ProcessError) and "point 1, and process 0 at point 0" in str(error)
    first, second = of_processes(2, lambda peers, number: peers.fail_alike("it broke", within=5))
    assert first is second is True
    first, second = of_processes(
        2,
        lambda peers, number: (
            peers.all_gather(1, "a vote") if number else peers.fail_alike("it broke", within=5)
        ),
    )
    assert first is False and str(second) == "process 0 has failed: it broke"


def test_nobody_waits_for_one_that_does_not_come() -> None:
    first, _ = of_processes(
        2, lambda peers, number: number or peers.all_gather(None, "a vote", within=0.1)
    )
    assert isinstance(first, TimeoutError)
    gone = ProcessError("process 0 has failed")
    assert of_processes(
        2, lambda peers, number: number == 0 or peers.all_gather(None, "a vote"), gone
    ) == [True, gone]


class Left(Exception):
    """In place of the end of a process."""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of processes that have ended: their threads sleep."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    monkeypatch.setattr(watching.os, "_exit", leave)
    monkeypatch.setattr(watching, "SECONDS", 0.02)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return codes


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_is_silent_is_lost(
    ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store()
    one, other = (watching.Watch(store, number, 2, 0.5) for number in range(2))
    one.advice = lambda: "`resume` goes on"
    time.sleep(1.0)
    assert not ended  # both answer
    other.close()
    until(lambda: bool(ended))
    one.close()
    assert ended == [1]
    text = "jaxrl-dist: error: process 1 is lost: no answer for 0.5 s; `resume` goes on\n"
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    "number, gone, closed, error",
    [
        (1, True, [], "process 0 is lost"),  # at once
        (0, False, [1], "process 1 is lost: no answer for 0.5 s"),
        (
            0,
            False,
            [],
            "a library has failed: another process may be lost, or have the same --process",
        ),
    ],
)
def test_a_library_that_fails_ends_the_process(
    number: int,
    gone: bool,
    closed: list[int],
    error: str,
    ended: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once it is known who is lost, if anybody is: gloo's threads fail then,
    and jaxlib's if it is process 0.
    """
    store = Store()
    watches = [watching.Watch(store, each, 2, 0.5) for each in range(2)]
    watches[number].gone = lambda: gone
    for other in closed:
        watches[other].close()
    threading.Thread(target=watches[number].terminated, daemon=True).start()
    until(lambda: bool(ended))
    for watch in watches:
        watch.close()
    assert ended == [1] and capsys.readouterr().err == f"jaxrl-dist: error: {error}\n"


def test_orderly_exit_of_a_process_is_a_loss_to_runs_only(ended: list[int]) -> None:
    store = Store()
    one, other = (watching.Watch(store, number, 2, 0.5) for number in range(2))
    until(lambda: other._beat > 1)
    other.disconnect()
    time.sleep(1.5)
    assert not ended  # such as an evaluation after the run
    one.running = 1
    until(lambda: bool(ended))
    one.close()
    assert ended == [1]


def test_all_hear_of_a_signal_and_of_a_failure(
    ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store()
    watches = [watching.Watch(store, number, 3, 30.0) for number in range(3)]
    watches[2].stop_signal = lambda: 15
    until(lambda: all(watch.signal == 15 for watch in watches))
    watches[1].fail("the disk is full", 2)
    until(lambda: watches[0].problem is not None and watches[2].problem is not None)
    assert str(watches[0].problem) == "process 1 has failed: the disk is full"
    assert watches[2].problem is not None and watches[2].problem.exit_code == 2
    assert watches[1].problem is None and not ended
    for watch in watches:
        watch.close()
    assert capsys.readouterr().err == ""


# --- Arrays ---------------------------------------------------------------------------------------


def test_one_process_needs_no_copies() -> None:
    mesh = make_mesh(8)
    x = meshes.put(np.arange(16.0, dtype=np.float32), mesh, meshes.BATCH)
    assert arrays.own_part(mesh) is mesh and arrays.whole({"x": x})["x"] is x
    assert arrays.as_local(x, mesh) is x and arrays.as_global(x, mesh, meshes.BATCH) is x
    np.testing.assert_array_equal(arrays.fetch(x), np.arange(16.0))


def test_rows_that_several_devices_hold_are_made_once() -> None:
    values, made = np.arange(24.0).reshape(8, 3), list[slice]()

    def rows(part: slice) -> np.ndarray:
        made.append(part)
        return values[part]

    sharding = meshes.shardings(meshes.make_mesh(jax.devices()[:8], rows=2), meshes.BATCH)
    found = arrays.from_rows(values.shape, rows, sharding=sharding)
    np.testing.assert_array_equal(found, values)
    assert found.sharding == sharding and sorted(part.start for part in made) == [0, 2, 4, 6]
