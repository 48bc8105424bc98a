"""Sweeps: members as processes, restarted when they die, stopped and continued."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import runs

from jaxrl_dist.cli import main
from jaxrl_dist.commands import request, sweep
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import files, storage, subprocesses
from jaxrl_dist.run.storage import read_json, write_json
from jaxrl_dist.settings.members import is_population, members


@pytest.fixture
def instead_of_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls a function where a sweep would start its runs."""
    return lambda function: monkeypatch.setattr(subprocesses, "run_all", function)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run_all(
    tmp_path: pathlib.Path, codes: list[str], jobs: int = 2, **options: object
) -> list[int]:
    done: list[int] = []
    logs = [tmp_path / f"{number:03d}.log" for number in range(len(codes))]
    arguments = {"stop": lambda: False, "ended": done.append, "failed": pytest.fail, **options}
    subprocesses.run_all([*map(python, codes)], logs, jobs, **arguments)  # type: ignore[arg-type]
    return done


def test_all_commands_run_at_most_so_many_at_a_time(tmp_path: pathlib.Path) -> None:
    mark = "import os, time, pathlib; p = pathlib.Path(os.environ['MARKS'], str(os.getpid())); p.touch(); "
    wait = "time.sleep(0.3); n = len(list(p.parent.iterdir())); p.unlink(); assert n <= 2, n"
    os.environ["MARKS"] = str(tmp_path / "marks")
    (tmp_path / "marks").mkdir()
    assert sorted(run_all(tmp_path, [mark + wait] * 5)) == [0, 1, 2, 3, 4]


def test_what_dies_starts_again(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = tmp_path / "here"
    die_once = f"import os, pathlib; p = pathlib.Path({str(here)!r}); there = p.exists(); p.touch(); there or os.abort()"
    assert run_all(tmp_path, [die_once]) == [0]
    assert "000 died and starts again: exit code -6" in capsys.readouterr().err


def test_what_fails_for_good_ends_alone(tmp_path: pathlib.Path) -> None:
    """After three attempts, and after one if its training has diverged."""
    diverged = (
        "import sys; sys.exit('jaxrl-dist: error: training has diverged by environment step 9')"
    )
    given_up: dict[int, str] = {}
    codes = ["print('begun'); raise ValueError('no')", diverged, "import time; time.sleep(1)"]
    assert run_all(tmp_path, codes, failed=given_up.__setitem__) == [2]
    assert given_up == {0: "ValueError: no", 1: "training has diverged by environment step 9"}
    assert (tmp_path / "000.log").read_text().count("ValueError: no") == subprocesses.ATTEMPTS
    assert (tmp_path / "001.log").read_text().count("\n") == 1


def test_a_wrong_command_ends_all(tmp_path: pathlib.Path) -> None:
    wrong = "import sys; print('jaxrl-dist: error: --x is wrong', file=sys.stderr); sys.exit(2)"
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        run_all(tmp_path, ["import time; time.sleep(100)", wrong])
    assert error.value.with_flags == "001: --x is wrong"
    assert time.monotonic() - began < 30


def test_stop_ends_the_processes_in_order(tmp_path: pathlib.Path) -> None:
    saved = tmp_path / "saved"
    code = (
        f"import pathlib, signal, sys, time; p = pathlib.Path({str(saved)!r}); "
        "signal.signal(15, lambda *_: (p.touch(), sys.exit(143))); print('up', flush=True); time.sleep(100)"
    )
    log = tmp_path / "000.log"
    assert run_all(tmp_path, [code], stop=lambda: log.exists() and "up" in log.read_text()) == []
    assert saved.exists()


def test_what_ends_with_its_parent_ends_in_order(tmp_path: pathlib.Path) -> None:
    """Though the parent is killed; what it has started has a standard input of its own."""
    saved, member = tmp_path / "saved", tmp_path / "member.py"
    member.write_text(
        "import os, pathlib, signal, sys, time\n"
        "from jaxrl_dist.run import subprocesses\nsubprocesses.end_with_parent()\n"
        f"signal.signal(15, lambda *_: (pathlib.Path({str(saved)!r}).touch(), sys.exit(143)))\n"
        "assert not sys.stdin.read(); os.kill(os.getppid(), 9); [time.sleep(0.1) for _ in range(600)]"
    )
    run = f"subprocesses.run_all([[sys.executable, {str(member)!r}]], [pathlib.Path({str(tmp_path / 'log')!r})], 1, "
    parent = python(
        f"import pathlib, sys; from jaxrl_dist.run import subprocesses; {run} lambda: False, print, print)"
    )
    assert (
        subprocess.run(
            parent, env={**os.environ, "PYTHONPATH": str(runs.ROOT)}, timeout=60
        ).returncode
        == -9
    )
    deadline = time.monotonic() + 30
    while not saved.exists():
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)


def test_a_sweep_waits_for_the_members_of_one_that_was_killed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held, began = files.lock(str(tmp_path)), time.monotonic()
    threading.Timer(0.5, held.close).start()
    for _ in range(2):
        sweep._wait_for(tmp_path, lambda: False)
    assert held.closed and time.monotonic() - began < 30
    assert capsys.readouterr().err == (
        f"jaxrl-dist: another process is using the run in {tmp_path}: waiting until it has ended, for at most 60 s\n"
    )
    with files.lock(str(tmp_path)):
        sweep._wait_for(tmp_path, lambda: True)  # Ctrl-C
    sweep._wait_for(tmp_path / "new", lambda: False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("", "add --seeds or --vary"),
        ("--seeds 2 --jobs x", "--jobs: 'x' is not a whole number"),
        ("--seeds 2 --jobs 0", "--jobs must be >= 1"),
        ("--seeds 2 --evolve pbt", "does not support --evolve"),
        ("--seeds 2 --average-every 3", "only `train` accepts --average-every"),
        (
            "--seeds 2 --record data",
            "--record data does not work with a sweep;",
        ),
        ("--seeds 2 --verbose", "only `train` accepts --verbose"),
        ("--seeds 2 --plan-memory here", "only `train` accepts --plan-memory"),
    ],
)
def test_refusals(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "ppo", "--env", "CartPole-v1", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        "ppo --env CartPole-v1 --seeds 2 --seed 3 --run-dir {run_dir} --quiet",
        "ppo --env CartPole-v1 --seeds=2 --seed=3 --run_dir={run_dir} --lost_process_timeout 9 --no-zip",
        "--seeds 2 --seed 3 --run_dir {run_dir} --env team:CartPoles --policy a=ppo:pole_0 --policy b=ppo:pole_1",
        "--seeds 2 --seed 3 --run-dir {run_dir} --config {stored}",
        "--seed 3 --run-dir {run_dir} --config {population} --resume-or-start",
    ],
)
def test_members_get_the_flags_that_are_theirs(
    flags: str, tmp_path: pathlib.Path, instead_of_runs: Callable[..., None]
) -> None:
    commands: list[list[str]] = []

    def collect(made: Any, *args: Any) -> None:
        commands.extend(made)

    instead_of_runs(collect)
    stored, population = (
        runs.finished(runs.CARTPOLE) if "{stored}" in flags else "",
        tmp_path / "config.json",
    )
    if "{population}" in flags:
        config = runs.read_json(runs.finished(runs.CARTPOLE) / "config.json")
        config["run"] |= {"seeds": 2, "vary": {"num-epochs": "1"}, "zip": True}
        write_json(population, config)
    words = flags.format(run_dir=tmp_path / "run", stored=stored, population=population).split()
    assert main(["sweep", *words]) == 0
    assert len(commands) == 2
    for number, words in enumerate(commands):
        assert words[1:5] == ["-P", "-m", "jaxrl_dist.cli", "train"]
        found = request.parse(words[5:])
        assert found is not None and found.fields.pop("resume_or_start")
        assert found.fields["run_dir"] == str(tmp_path / "run" / "members" / f"{number:03d}")
        assert (
            found.fields["seed"] == 3 + number
            and found.fields["seeds"] == found.fields["processes"] == 1
        )
        found.fields.pop("quiet")
        config, _ = found.resolved()
        assert not is_population(config) and not config.zip


@pytest.mark.parametrize(
    "flags",
    [
        "ppo --env CartPole-v1 --vary learning-rate-schedule=constant,linear learning-rate-steps=1000",
        "dqn --env CartPole-v1 --ez_greedy --epsilon-end=0.2 --vary parameter-noise=true,false",
    ],
)
def test_members_get_no_flag_that_does_nothing_in_them(
    flags: str, tmp_path: pathlib.Path, instead_of_runs: Callable[..., None]
) -> None:
    commands: list[list[str]] = []
    instead_of_runs(lambda made, *_: commands.extend(made))
    words = [*flags.split(), "--run-dir", str(tmp_path)]
    assert main(["sweep", *words]) == 0
    population = request.parse(words)
    assert population is not None
    for command, member in zip(commands, members(population.resolved()[0]), strict=True):
        found = request.parse(command[5:])
        assert found is not None
        assert found.fields.pop("quiet") and found.fields.pop("resume_or_start")
        assert found.resolved()[0].algorithm == member.config.algorithm


def test_a_member_that_diverges_ends_alone_in_the_results(
    tmp_path: pathlib.Path, instead_of_runs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all(commands: Any, logs: Any, jobs: int, stop: Any, ended: Any, failed: Any) -> None:
        failed(0, "training has diverged by environment step 9")
        failed(1, "No space left on \\x1b[2Jdevice")
        ended(2)
        with pytest.raises(ConfigError, match="another process is using the run"):
            files.lock(str(tmp_path))

    instead_of_runs(run_all)
    command = [
        "sweep",
        "ppo",
        "--env",
        "CartPole-v1",
        "--seeds",
        "3",
        "--run-dir",
        str(tmp_path),
        "--quiet",
    ]
    assert main(command) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"jaxrl-dist: member 000 has diverged, but the others continue: training has diverged by environment step 9; see {tmp_path}/members/000.log",
        f"jaxrl-dist: member 001 has failed, but the others continue: No space left on \\x1b[2Jdevice; see {tmp_path}/members/001.log",
    ]
    rows = read_json(tmp_path / "population.json")["members"]
    assert [row["status"] for row in rows] == ["diverged", "failed", "done"]
    # the next session ends early
    instead_of_runs(lambda *given: given[4](0))
    assert main(command) == 1
    rows = read_json(tmp_path / "population.json")["members"]
    assert [row["status"] for row in rows] == ["done", "failed", "done"]


def test_a_start_that_fails_leaves_the_directory_free(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "write_json", no_space)
    assert (
        main(["sweep", "ppo", "--env", "CartPole-v1", "--seeds", "2", "--run-dir", str(tmp_path)])
        == 1
    )
    assert [*tmp_path.iterdir()] == []


def test_resume_leaves_a_sweep_to_its_own_command(
    tmp_path: pathlib.Path, instead_of_runs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its members have their own checkpoints, which a population's would have to share."""
    instead_of_runs(lambda *args: None)
    run_dir = tmp_path / "run"
    command = [
        "sweep",
        "ppo",
        "--env",
        "CartPole-v1",
        "--seeds",
        "2",
        "--run-dir",
        str(run_dir),
        "--quiet",
    ]
    main(command)
    kept = run_dir / "members" / "000" / "kept"
    kept.parent.mkdir()
    kept.touch()
    assert main(["resume", str(run_dir)]) == 2
    assert (
        f"continue it by its own command with --run-dir {run_dir}" in capsys.readouterr().err
        and kept.exists()
    )
    main(command)  # which holds its flags


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_sweep_is_stopped_and_goes_on(
    number: signal.Signals, code: int, tmp_path: pathlib.Path
) -> None:
    """As a user would: Ctrl-C while two members train, then the same command again, at once."""
    run_dir = tmp_path / "run"
    words = f"sweep ppo --env CartPole-v1 --total-env-steps 60000 --vary learning-rate=1e-3,1e-4 --run-dir {run_dir}"
    words += " --evaluation-episodes 5 --checkpoint-interval 5000 --num-epochs 1"
    command = [sys.executable, "-m", "jaxrl_dist.cli", *words.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(300, process.kill)
    timer.start()
    while len(list(run_dir.glob("members/*/checkpoints/[0-9]*"))) < 2 and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(number)
    with process:
        assert process.stderr is not None
        assert (number == signal.SIGKILL) != (
            "the same command with --run-dir" in process.stderr.read()
        )
    timer.cancel()
    assert process.returncode == code
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    assert "2 of 2 done" in done and "learning_rate" in done
    assert [row["status"] for row in read_json(run_dir / "population.json")["members"]] == [
        "done",
        "done",
    ]
    assert (
        "2 of 2 done"
        in subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    )
    other = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True)
    assert other.returncode == 2 and "holds a run with other flags" in other.stderr
