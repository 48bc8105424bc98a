"""Sweeps: members as processes, restarted when they die, stopped and continued."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import runs

from jaxrl_dist.cli import main
from jaxrl_dist.commands import train
from jaxrl_dist.run import processes
from jaxrl_dist.run.text import read_json


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run_all(tmp_path: pathlib.Path, codes: list[str], jobs: int = 2, **options: object) -> list[int]:
    done: list[int] = []
    logs = [tmp_path / f"{number:03d}.log" for number in range(len(codes))]
    commands = [lambda code=code: python(code) for code in codes]
    arguments = {"stop": lambda: False, "ended": done.append, **options}
    processes.run_all(commands, logs, jobs, **arguments)  # type: ignore[arg-type]
    return done


def test_all_commands_run_at_most_so_many_at_a_time(tmp_path: pathlib.Path) -> None:
    mark = "import os, time, pathlib; p = pathlib.Path(os.environ['MARKS'], str(os.getpid())); p.touch(); "
    wait = "time.sleep(0.3); n = len(list(p.parent.iterdir())); p.unlink(); assert n <= 2, n"
    os.environ["MARKS"] = str(tmp_path / "marks")
    (tmp_path / "marks").mkdir()
    assert sorted(run_all(tmp_path, [mark + wait] * 5)) == [0, 1, 2, 3, 4]


def test_what_dies_starts_again(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = tmp_path / "here"
    die_once = (
        f"import os, pathlib; p = pathlib.Path({str(here)!r}); there = p.exists(); p.touch(); there or os.abort()"
    )
    assert run_all(tmp_path, [die_once]) == [0]
    assert "000 has died and starts again: exit code -6" in capsys.readouterr().err
    with pytest.raises(OSError, match=r"000 has died 3 times: ValueError: no; see .*000\.log"):
        run_all(tmp_path, ["raise ValueError('no')"])


def test_a_wrong_command_ends_all(tmp_path: pathlib.Path) -> None:
    wrong = "import sys; print('jaxrl-dist: error: --x is wrong', file=sys.stderr); sys.exit(2)"
    began = time.monotonic()
    with pytest.raises(processes.RefusedError, match=r"^001: --x is wrong$"):
        run_all(tmp_path, ["import time; time.sleep(100)", wrong])
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


@pytest.mark.parametrize(
    "flags, message",
    [
        ("", "a sweep needs members, by --seeds or --vary"),
        ("--seeds 2 --jobs x", "--jobs must be a whole number, not x"),
        ("--seeds 2 --jobs 0", "--jobs must be >= 1"),
        ("--seeds 2 --evolve pbt", "not selected by --evolve"),
        ("--seeds 2 --verbose", "--verbose is of train"),
        ("--seeds 2 --plan-memory here", "--plan-memory is of train"),
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
    ],
)
def test_members_get_the_flags_that_are_theirs(
    flags: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def collect(made: Any, *args: Any) -> None:
        commands.extend(command() for command in made)

    monkeypatch.setattr(processes, "run_all", collect)
    stored = str(runs.finished(runs.CARTPOLE)) if "stored" in flags else ""
    assert main(["sweep", *flags.format(run_dir=tmp_path / "run", stored=stored).split()]) == 0
    assert len(commands) == 2
    for number, words in enumerate(commands):
        assert words[1:4] == ["-m", "jaxrl_dist.cli", "train"]
        found = train.asked(words[4:])
        assert found is not None and found.fields["run_dir"] == str(tmp_path / "run" / "members" / f"{number:03d}")
        assert found.fields["seed"] == 3 + number and found.fields.get("seeds", 1) == found.fields["processes"] == 1


@pytest.mark.slow
def test_a_sweep_is_stopped_and_goes_on(tmp_path: pathlib.Path) -> None:
    """As a user would: Ctrl-C while two members train, then the same command again."""
    run_dir = tmp_path / "run"
    words = f"sweep ppo --env CartPole-v1 --total-env-steps 60000 --vary learning-rate=1e-3,1e-4 --run-dir {run_dir}"
    words += " --evaluation-episodes 5 --checkpoint-interval 5000 --num-epochs 1"
    command = [sys.executable, "-m", "jaxrl_dist.cli", *words.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(300, process.kill)
    timer.start()
    while len(list(run_dir.glob("members/*/checkpoints/[0-9]*"))) < 2 and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    with process:
        assert process.stderr is not None and "the same command with --run-dir" in process.stderr.read()
    timer.cancel()
    assert process.returncode == 130
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    assert "2 of 2 done" in done and "learning_rate" in done
    assert [row["status"] for row in read_json(run_dir / "population.json")["members"]] == ["done", "done"]
    other = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True)
    assert other.returncode == 2 and "holds a run with other flags" in other.stderr
