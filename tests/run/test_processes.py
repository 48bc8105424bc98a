"""What code of users may do to the process of a run: fork, hold Python's lock, exit;
and signals at any moment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs

from jaxrl_dist import cli
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import files, locks, signals

SECONDS = 120
"""For whatever must end, on a busy machine."""
TRAIN = f"ppo --env hostile:Hostile {runs.TINY}"


def script(code: str, *args: object) -> subprocess.Popen[str]:
    """Runs Python code, whose first line of output says that it has begun."""
    process = command("-c", code, *args)
    assert process.stdout is not None and process.stdout.readline() == "begun\n", (
        process.communicate()[1]
    )
    return process


def command(*words: object) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    path = os.pathsep.join([str(runs.ROOT), str(runs.ROOT / "tests")])
    words = (sys.executable, *map(str, words))
    return subprocess.Popen(
        words, cwd=runs.ROOT / "tests", env={**os.environ, "PYTHONPATH": path}, **pipes
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what is printed to stderr."""
    error = process.communicate(timeout=SECONDS)[1]
    return process.returncode, error


def said(process: subprocess.Popen[str], word: str) -> str:
    """The line of stderr that begins with a word, once it is printed."""
    assert process.stderr is not None
    return next(line for line in process.stderr if line.startswith(word))


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children()
    return child


FORKS = """
import os, pathlib, sys, time
from jaxrl_dist.run import files, locks
run_dir = sys.argv[1]
file = files.lock(run_dir)
locks.lock(os.open(run_dir, os.O_RDONLY))
if not os.fork():
    time.sleep(1000)
print("begun", flush=True)
time.sleep(1000)
"""


def test_a_child_of_a_killed_run_holds_no_lock(tmp_path: Path) -> None:
    process = script(FORKS, tmp_path)
    child = child_of(process)
    with pytest.raises(ConfigError, match="another process is using the run"):
        files.lock(str(tmp_path))
    process.kill()
    process.wait()
    try:
        assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        files.lock(str(tmp_path)).close()
        directory = os.open(tmp_path, os.O_RDONLY)
        locks.lock(directory)
        os.close(directory)
    finally:
        child.kill()
        process.communicate()


def test_a_child_keeps_files_that_reuse_a_descriptor(tmp_path: Path) -> None:
    code = """
import os, sys
from jaxrl_dist.run import files
file = files.lock(sys.argv[1])
number = file.fileno()
file.close()
other = os.open(sys.argv[1] + "/other", os.O_RDWR | os.O_CREAT)
assert other == number
if not os.fork():
    os.write(other, b"child")
    os._exit(0)
os.wait()
print("begun", flush=True)
"""
    assert ended(script(code, tmp_path)) == (0, "")
    assert (tmp_path / "other").read_text() == "child"


def test_a_signal_for_a_forked_child_does_not_stop_the_run() -> None:
    code = """
import os, signal, time
from jaxrl_dist.run import signals
with signals.stopping() as stop:
    child = os.fork()
    if not child:
        time.sleep(1000)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    time.sleep(0.2)
    assert not stop()
print("begun", flush=True)
"""
    assert ended(script(code)) == (0, "")


def test_a_signal_waits_for_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\ndone = True\n"
    (tmp_path / "imported_slowly.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(signals.Interrupted), signals.raising():
            _import_and_wait("imported_slowly")
        assert sys.modules["imported_slowly"].done
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_ends_an_import_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(100)\n"
    (tmp_path / "imported_for_ever.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(signals, "IMPORT_SECONDS", 0.2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(signals.Interrupted), signals.raising():
            _import_and_wait("imported_for_ever")
    finally:
        signal.signal(signal.SIGINT, before)


def _import_and_wait(module: str) -> None:
    importlib.import_module(module)
    time.sleep(5)


# Python's ``re`` answers to signals in the main thread, so it holds the lock in another one.
HOLDS = """
import re, sys, threading, time
from jaxrl_dist.run import signals, watchdog
with signals.stopping() as stop, watchdog.watching(float(sys.argv[1]), stop.unread, stop, "advice"):
    print("begun", flush=True)
    holding = threading.Thread(target=re.match, args=("(a+)+$", "a" * 60 + "b"), daemon=True)
    time.sleep(float(sys.argv[2]))
    holding.start()
    holding.join()
"""


def test_code_that_holds_the_lock_ends_the_run_in_time() -> None:
    process = script(HOLDS, 3, 0)
    code, error = ended(process)
    assert code == -signal.SIGKILL
    assert error.count("\n") == 1 and "for 3 s" in error and error.endswith("advice\n")


@pytest.mark.parametrize("before", runs.cases([True, False], False))
def test_a_second_signal_ends_code_that_holds_the_lock(before: bool) -> None:
    process = script(HOLDS, 1000, 2 if before else 0)
    if not before:
        time.sleep(1)
    for _ in range(2):  # some tools send two at once
        process.send_signal(signal.SIGTERM)
    time.sleep(5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, error = ended(process)
    assert code == -signal.SIGKILL
    assert error.count("\n") == 1 and "ended immediately" in error


@pytest.mark.case  # test_code_that_holds_the_lock_ends_the_run_in_time
def test_the_watchdog_does_not_count_while_a_run_is_suspended() -> None:
    process = script(HOLDS, 3, 8)
    watchdog = child_of(process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    assert watchdog.is_running() and watchdog.status() != psutil.STATUS_ZOMBIE
    process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert process.poll() is None
    process.kill()
    process.communicate()
    watchdog.wait(10)  # it ends with the run


EXITS = """
import os, sys
from jaxrl_dist import cli
from jaxrl_dist.commands import data

def run(args):
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os._exit(int(args[0]))

data.run = run
print("begun", flush=True)
cli.main(["data", sys.argv[1]])
"""


@pytest.mark.parametrize("status, code, lines", [(0, 1, 1), (3, 3, 0)])
def test_an_exit_of_users_code_is_not_success(status: int, code: int, lines: int) -> None:
    returned, error = ended(script(EXITS, status))
    assert (returned, error.count("\n")) == (code, lines)
    assert not lines or "os._exit(0)" in error


def test_json_is_what_a_command_prints_alone() -> None:
    words = (
        "evaluate",
        runs.finished(TRAIN),
        "--env",
        "hostile:Hostile",
        "--env-options",
        "what=prints",
        "--json",
    )
    out, err = command("-m", "jaxrl_dist.cli", *words, "--episodes", 2).communicate(timeout=SECONDS)
    assert json.loads(out)["episodes"] == 2
    assert {"{noise", "{noise of a descriptor", "{noise of C"} <= {*err.splitlines()}


def test_a_name_that_is_too_long_is_a_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "x" * 3000 + ".py", "--env", "CartPole-v1"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and len(line) < 500 and "File name too long" in line


# --- Whole runs -----------------------------------------------------------------------------------


@pytest.mark.case  # test_a_signal_waits_for_an_import
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_at_the_start_end_a_run_in_a_line(number: signal.Signals, tmp_path: Path) -> None:
    moments = random.Random(0)
    for attempt in range(20):
        words = TRAIN.replace("hostile:Hostile", "CartPole-v1").split()
        process = command(
            "-m", "jaxrl_dist.cli", "train", *words, "--quiet", "--run-dir", tmp_path / str(attempt)
        )
        while not _handles_sigterm(process.pid):  # Python itself is starting
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 1.5))
        process.send_signal(number)
        code, error = ended(process)
        assert (code, error.count("\n")) == (128 + number, 1), error


def _handles_sigterm(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    caught = re.search(r"SigCgt:\s*(\w+)", status)
    assert caught is not None
    return bool(int(caught[1], 16) >> signal.SIGTERM - 1 & 1)


def hostile(what: str, run_dir: Path, *flags: str) -> subprocess.Popen[str]:
    words = TRAIN.replace("384", "4000").split()
    options = "--env-options", f"what={what}", f"after={run_dir}"
    often = "--checkpoint-interval", "256"
    return command(
        "-m",
        "jaxrl_dist.cli",
        "train",
        *words,
        "--quiet",
        "--run-dir",
        run_dir,
        *often,
        *flags,
        *options,
    )


def resumed(run_dir: Path) -> None:
    words = (
        "resume",
        str(run_dir),
        "--env",
        "hostile:Hostile",
        "--change-env-options",
        "--env-options",
        "what=nothing",
    )
    assert cli.main([*words, "--quiet"]) == 0


@pytest.mark.case  # test_a_child_of_a_killed_run_holds_no_lock
def test_a_run_resumes_beside_a_child_of_its_environment(tmp_path: Path) -> None:
    process = hostile("forks", tmp_path / "run")
    child = psutil.Process(int(said(process, "child").split()[1]))
    process.kill()
    process.wait()
    try:
        resumed(tmp_path / "run")
        assert child.is_running()
    finally:
        child.kill()
        process.communicate()


@pytest.mark.case  # test_a_second_signal_ends_code_that_holds_the_lock
def test_a_run_resumes_after_an_environment_that_holds_the_lock(tmp_path: Path) -> None:
    process = hostile("holds", tmp_path / "run")
    said(process, "holding")
    time.sleep(1)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(4)
    code, error = ended(process)
    assert code == -signal.SIGKILL and f"jaxrl-dist resume {tmp_path}/run" in error
    resumed(tmp_path / "run")


@pytest.mark.case  # test_a_signal_for_a_forked_child_does_not_stop_the_run
def test_a_run_goes_on_after_its_environment_ends_a_child(tmp_path: Path) -> None:
    code, error = ended(hostile("ends_child", tmp_path / "run"))
    assert code == 0 and f"exit code {-signal.SIGTERM}" in error


@pytest.mark.case  # test_an_exit_of_users_code_is_not_success
def test_an_environment_that_exits_fails_the_run(tmp_path: Path) -> None:
    code, error = ended(hostile("exits", tmp_path / "run"))
    assert code == 1 and error.splitlines()[-1].startswith("jaxrl-dist: error: ")
    resumed(tmp_path / "run")


@pytest.mark.case  # test_a_second_signal_ends_code_that_holds_the_lock
def test_worker_processes_that_hold_the_lock_end_with_the_run(tmp_path: Path) -> None:
    process = hostile("holds", tmp_path / "run", "--env-workers", "processes")
    said(process, "holding")
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(workers, 10)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert workers and all(worker.status() == psutil.STATUS_ZOMBIE for worker in alive)
