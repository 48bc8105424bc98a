"""However a run ends, what it has learnt is saved: errors, Ctrl-C, signals,
a loop that is left, Python's end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import own
import psutil
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli, plans
from jaxrl_dist.algorithms.pg import PG
from jaxrl_dist.commands import train
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigWarning, DivergedError, EnvError, FileWarning
from jaxrl_dist.plans.session import Session
from jaxrl_dist.run import arrays, checkpoint, saving, signals, trackers
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.training import reports as stages
from jaxrl_dist.training import run as training_run
from jaxrl_dist.training import setup
from jaxrl_dist.training.describing import resume_command
from jaxrl_dist.types import Checkpoint, Report, Variables

ROOT = Path(__file__).resolve().parents[2]

# --- Stages ---------------------------------------------------------------------------------------


def fake_report(env_steps: int, **values: Any) -> Report:
    """Every 10 env steps are an iteration; only multiples of 20 are due."""
    since = None if env_steps % 20 == 0 else {"iterations": 1}
    reported = {"env_steps": env_steps, "iteration": env_steps // 10, "updates": 0, "seconds": 0.0}
    progress = {
        "env_steps": env_steps,
        "since": since,
        "reported": reported,
        "wall_time_s": 1.0,
        "compile_s": 0.0,
    }
    whole = Checkpoint({"x": np.full(3, env_steps)}, (), progress)  # type: ignore[arg-type]
    metrics = {"episode/return": None, "time/compile_s": 0.0}
    variables = Variables({"x": np.zeros(2)}, ())
    return Report(
        env_steps, 1, env_steps // 10, 0.5, metrics, lambda: variables, lambda: whole, **values
    )


def steps(reports: Any) -> list[int]:
    return [report.env_steps for report in reports]


def ending() -> stages.StopState:
    return stages.StopState(lambda: False)


def failing(*env_steps: int) -> Iterator[Report]:
    yield from map(fake_report, env_steps)
    raise EnvError("broken")


def test_a_plan_that_fails_makes_one_report_more() -> None:
    ends = ending()
    assert steps(stages.with_final_report(failing(20, 40), lambda: fake_report(50), ends)) == [
        20,
        40,
        50,
    ]
    assert isinstance(ends.error, EnvError) and ends()
    assert steps(stages.with_final_report(failing(20), lambda: None, ending())) == [20]
    assert steps(
        stages.with_final_report(iter([fake_report(20)]), lambda: fake_report(50), ending())
    ) == [20]


def test_what_has_diverged_ends_with_that_report() -> None:
    ends, reports = (
        ending(),
        iter([fake_report(20), fake_report(40, diverged=True), fake_report(60)]),
    )
    assert set(steps(stages.with_final_report(reports, lambda: None, ends))) == {20, 40}
    assert isinstance(ends.error, DivergedError) and "by environment step 40" in str(ends.error)


class FakeSaver:
    """Is busy with a checkpoint whenever it is asked for the first time."""

    def __init__(self) -> None:
        self.asked, self.finished = 0, False

    def busy(self) -> bool:
        self.asked += 1
        return self.asked == 1

    def finish(self) -> None:
        self.finished = True


class FakeFiles:
    def in_place(self) -> bool:
        return True

    def check_place(self) -> None: ...


@pytest.mark.parametrize(
    "interval, minutes, saved, expected",
    [
        (0, 0, None, [100]),
        (40, 0, None, [60, 80, 100]),  # the first is put off
        (0, 2, None, [60, 100]),  # the first again, and 2 minutes from then on
        (0, 2, (100, 1), []),  # a resumed run that had nothing left to do
        (0, 2, (100, 0), [100]),  # or that has learnt more from the same env steps
    ],
)
def test_checkpoints_come_by_steps_and_by_time(
    interval: int, minutes: float, saved: tuple[int, int] | None, expected: list[int]
) -> None:
    config = jaxrl_dist.Train(
        "pg", env="x", total_env_steps=100, checkpoint_interval=interval, checkpoint_minutes=minutes
    )
    saver, kept, seconds = FakeSaver(), [], [0.0]

    def a_minute_each() -> Iterator[Report]:
        for env_steps in (20, 40, 60, 80, 100) if saved is None else (100,):
            seconds[0] += 60
            yield fake_report(env_steps, ended_by="total_env_steps" if env_steps == 100 else None)

    files: Any = FakeFiles()
    writer: Any = saver
    list(
        stages.saving(
            a_minute_each(),
            kept.append,
            saver=writer,
            files=files,
            config=config,
            saved=saved,
            ending=ending(),
            clock=lambda: seconds[0],
        )
    )
    assert steps(kept) == expected and saver.finished


def test_an_evaluation_that_fails_passes_its_report_on() -> None:
    def fail(report: Report) -> Report:
        raise EnvError("broken")

    config: Any = jaxrl_dist.Train(
        "pg", env="x", total_env_steps=100, evaluation_interval=40, evaluation_episodes=1
    )
    ends = ending()
    passed_on = list(
        stages.Evaluations(config, 0, ends).on_the_way(map(fake_report, (20, 40)), fail)
    )
    assert steps(passed_on) == [20, 40] and isinstance(ends.error, EnvError)
    assert [report.checkpoint().progress["evaluated"] for report in passed_on] == [20, 20]


# --- Runs of a plan that learns nothing -----------------------------------------------------------


Fake = Callable[..., tuple[Iterator[Report], Path]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """``(at, event, **fields) -> (reports, run_dir)`` of a
    run in whose iteration ``at`` the event happens.
    """

    def begin(at: int, event: Callable[[], Any], **fields: Any) -> tuple[Iterator[Report], Path]:
        def plan(session: Session) -> Iterator[Report]:
            done = 0
            session.publish_latest(lambda: fake_report(done))
            while done < session.config.total_env_steps and not session.stop():
                if done // 10 == at:
                    event()
                done += 10
                if done % 20 == 0 and done < session.config.total_env_steps and not session.stop():
                    yield fake_report(done)
            yield fake_report(
                done, ended_by="total_env_steps" if done >= session.config.total_env_steps else None
            )

        monkeypatch.setattr(plans, "execute", plan)
        run_dir = tmp_path / "run"
        sizes = {"num_envs": 4, "rollout_length": 4, "num_devices": 1, "evaluation_episodes": 0}
        sizes |= {"total_env_steps": 200, "run_dir": str(run_dir)}
        return setup.prepare(
            jaxrl_dist.preset("pg", "CartPole-v1", **{**sizes, **fields})
        ).reports(), run_dir

    return begin


def saved(run_dir: Path) -> list[int]:
    """Env steps of the checkpoints, whose files have to be whole."""
    for path in checkpoint.saved(run_dir):
        checkpoint.verify(path, None)
    return [int(path.name) for path in checkpoint.saved(run_dir)]


def fail() -> None:
    raise KeyError("no such thing")


def test_what_is_learnt_without_new_env_steps_is_saved_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As under ``--free-running``: the last checkpoint
    takes the place of the one at the same env steps.
    """

    def plan(session: Session) -> Iterator[Report]:
        yield fake_report(20)
        again = fake_report(20, ended_by="total_env_steps")
        more = again.checkpoint()._replace(state={"x": np.zeros(3, int)})  # type: ignore[arg-type]
        yield dataclasses.replace(again, updates=again.updates + 1, checkpoint=lambda: more)

    monkeypatch.setattr(plans, "execute", plan)
    sizes: dict[str, Any] = {"num_devices": 1, "evaluation_episodes": 0, "total_env_steps": 20}
    config = jaxrl_dist.preset(
        "pg", "CartPole-v1", checkpoint_interval=20, run_dir=str(tmp_path / "run"), **sizes
    )
    list(setup.prepare(config).reports())
    assert saved(tmp_path / "run") == [20] and not list(tmp_path.glob("run/checkpoints/.*"))
    (path,) = checkpoint.saved(tmp_path / "run")
    like = Checkpoint({"x": np.zeros(3, int)}, (), {})  # type: ignore[arg-type]
    np.testing.assert_array_equal(arrays.restore(path / checkpoint.ARRAYS, like).state["x"], 0)


def test_an_error_is_raised_as_it_was_when_all_is_saved(fake: Fake) -> None:
    reports, run_dir = fake(5, fail)
    taken = []
    with pytest.raises(KeyError, match="no such thing") as error:
        taken.extend(report.env_steps for report in reports)
    assert error.value.__notes__ == [
        f"the run is saved: `jaxrl-dist resume {run_dir}` continues from 50 env steps"
    ]
    assert saved(run_dir) == [50]
    assert [line["env_steps"] for line in runs.read_metrics(run_dir)] == [20, 40, 50]
    run_files.lock(str(run_dir)).close()


@pytest.mark.parametrize("way", ["break", "raise", "close"])
def test_a_loop_that_is_left_has_saved_the_last_report(way: str, fake: Fake) -> None:
    reports, run_dir = fake(99, fail)
    with contextlib.suppress(ZeroDivisionError):
        for report in reports:
            if report.env_steps == 60:
                if way == "raise":
                    raise ZeroDivisionError
                break
    reports.close()  # type: ignore[attr-defined]
    assert saved(run_dir) == [60]
    assert [line["env_steps"] for line in runs.read_metrics(run_dir)] == [20, 40, 60]


def test_ctrl_c_in_python_waits_for_the_update(fake: Fake) -> None:
    reports, run_dir = fake(4, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        list(reports)
    assert saved(run_dir) == [50]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_in_python_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[bool] = []
    with signals.deferring(lambda: came.append(True)):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)  # sooner than a second one counts
        assert came == [True]
        monkeypatch.setattr(signals, "SECOND_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_error_outlives_that_saving_fails(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(saving, "_write", full)
    reports, run_dir = fake(5, fail)
    text = "what the run has learnt since its last checkpoint is lost: the disk is full"
    with (
        pytest.raises(KeyError, match="no such thing") as error,
        pytest.warns(FileWarning, match=text),
    ):
        list(reports)
    assert not hasattr(error.value, "__notes__") and saved(run_dir) == []


def test_a_disk_that_is_full_at_the_end_leaves_a_way_on(fake: Fake) -> None:
    """Neither the trained variables nor the lines of the reports fit,
    and the run says what it has saved.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, limits[1]))
    reports, run_dir = fake(15, fill, checkpoint_interval=140)
    try:
        while next(reports).env_steps < 140:
            pass
        while not checkpoint.saved(run_dir):
            time.sleep(0.05)
        with (
            pytest.raises(OSError, match="final cannot be written") as error,
            pytest.warns(FileWarning) as warned,
        ):
            list(reports)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.__notes__ == [
        f"the run is saved: `jaxrl-dist resume {run_dir}` continues from 140 env steps"
    ]
    assert saved(run_dir)[0] == 140 and len(warned) == 1


def test_what_has_learnt_nothing_saves_nothing(fake: Fake) -> None:
    reports, run_dir = fake(0, fail)
    with pytest.raises(KeyError):
        list(reports)
    assert saved(run_dir) == []


@pytest.mark.parametrize("what", ["directory", "metrics.jsonl"])
def test_a_directory_that_is_renamed_is_told_once(what: str, fake: Fake, tmp_path: Path) -> None:
    def rename() -> None:
        path = tmp_path / "run"
        (path if what == "directory" else path / what).rename(tmp_path / "elsewhere")

    reports, run_dir = fake(5, rename, checkpoint_interval=60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="was removed or renamed"):
            list(reports)
    (warning,) = [str(warning.message) for warning in caught]
    assert warning.startswith(str(run_dir)) and "nothing is saved" in warning
    assert run_dir.exists() == (what != "directory")
    assert (tmp_path / "elsewhere").exists() and not (run_dir / "checkpoints" / "final").exists()


def test_reports_that_nobody_takes_leave_the_directory_free(fake: Fake) -> None:
    first, run_dir = fake(99, fail)
    with pytest.warns(ConfigWarning, match="nothing was trained"):
        del first
    reports, _ = fake(99, fail)
    assert steps(reports)[-1] == 200 and saved(run_dir) == [200]


# --- Real plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, options",
    [
        ("on_device", {}),
        pytest.param("synchronous", {}, marks=pytest.mark.case),
        pytest.param(
            "asynchronous", {"num_actors": 2, "lockstep": True, "lag": 0}, marks=pytest.mark.case
        ),
        pytest.param("gradients", {"num_actors": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_its_environment_ends_can_go_on(
    plan: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The state is that before the fault, and on the device the run goes on into the same fault."""
    sizes = {
        "num_envs": 8,
        "rollout_length": 4,
        "hidden_sizes": (8,),
        "report_interval": 10**6,
        "num_devices": 1,
    }
    config = jaxrl_dist.preset(
        "a2c", own.Spoilt(), plan=plan, run_dir=str(tmp_path), **sizes, **options
    )
    with pytest.raises(EnvError, match="not finite") as error:
        list(jaxrl_dist.train(config))
    (env_steps,) = saved(tmp_path)
    assert error.value.__notes__[-1].endswith(f"continues from {env_steps} env steps")
    assert env_steps > 0 and runs.read_metrics(tmp_path)[-1]["env_steps"] == env_steps
    policy = jaxrl_dist.load_policy(tmp_path, env=own.Spoilt())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(policy.variables))
    if plan == "on_device":
        with pytest.raises(EnvError) as again:
            list(jaxrl_dist.resume(tmp_path, env=own.Spoilt()))
        assert str(again.value) == str(error.value) and saved(tmp_path) == [env_steps]
    elif plan == "synchronous":  # its environments start again
        reports = jaxrl_dist.resume(tmp_path, env=own.Spoilt(), report_interval=32)
        assert next(reports).env_steps > env_steps
        reports.close()  # type: ignore[attr-defined]


def test_the_command_that_resumes_a_run_names_the_user_s_code() -> None:
    def command(algorithm: Any, env: Any) -> str:
        return resume_command(Train(algorithm, env=env, run_dir="runs/a b"))

    assert command(PG(), "gymnax:CartPole-v1") == "jaxrl-dist resume 'runs/a b'"
    assert (
        command(PG(), "gymnasium:my:make") == "jaxrl-dist resume 'runs/a b' --env gymnasium:my:make"
    )
    mine = type("Mine", (PG,), {"__module__": __name__})()
    assert (
        command(mine, "gymnax:CartPole-v1")
        == f"jaxrl-dist resume 'runs/a b' --algorithm {__file__}"
    )
    assert command(PG(), own.Spoilt()) == "jaxrl_dist.resume('runs/a b', env=...)"


def test_a_run_that_has_diverged_leaves_finite_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--num-devices 1 --num-envs 4 --rollout-length 8 --num-minibatches 2 --hidden-sizes 4"
    command = f"train ppo --env gymnax:CartPole-v1 --learning-rate 1e38 {sizes} --total-env-steps 4000 --quiet"
    assert cli.main([*command.split(), "--run-dir", str(tmp_path / "run")]) == 1
    note, line = capsys.readouterr().err.splitlines()
    assert f"start a new run from them with `--init-from {tmp_path / 'run'}`" in note
    assert (
        "training has diverged by environment step" in line
        and "start a new run with a smaller --learning-" in line
    )
    policy = jaxrl_dist.load_policy(tmp_path / "run")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(policy.variables))


HELD = """
import sys, jaxrl_dist
sizes = {"num_envs": 8, "rollout_length": 8, "report_interval": 64, "num_devices": 1, "hidden_sizes": (4,)}
reports = jaxrl_dist.train(jaxrl_dist.preset("impala", "envpool:CartPole-v1", run_dir=sys.argv[1], **sizes))
print(next(reports).env_steps)
"""


@pytest.mark.case  # test_a_run_that_its_environment_ends_can_go_on
def test_reports_that_are_held_when_python_ends_are_closed(tmp_path: Path) -> None:
    """Nothing is lost: they are closed while Python still starts the thread that saving needs."""
    command = [sys.executable, "-c", HELD, str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert (
        done.returncode == 0
        and "Exception ignored" not in done.stderr
        and "Traceback" not in done.stderr
    )
    assert "is lost" not in done.stderr
    (step,) = saved(tmp_path / "run")
    assert step >= int(done.stdout)
    run_files.lock(str(tmp_path / "run")).close()


def test_the_copies_that_were_saved_go_back_to_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_write", lambda *args: None)
    saver, process = saving.Saver(tmp_path, 1), psutil.Process()
    # the latter stay, and keep the C library from seeing that all above them is free
    copies, between = [], []
    for _ in range(500):
        copies.append(np.ones(25_000, np.float32))
        between.append(np.ones(250, np.float32))
    before = process.memory_info().rss
    saver.save(Checkpoint({"x": copies}, (), {"env_steps": 10}), None)  # type: ignore[arg-type]
    del copies
    saver.close()
    assert before - process.memory_info().rss > 30e6


# --- Signals --------------------------------------------------------------------------------------

HEARS = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
"""Under `nohup`, what a test starts would ignore SIGHUP."""
WAITING = f"""{HEARS}
import os, sys, time
from jaxrl_dist.run import signals
name, gap = sys.argv[1:]
with signals.stopping() as stop:
    stop.last_words = lambda: "nothing is saved"
    for _ in range(2):
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(float(gap))
    time.sleep(0.3)
    print(stop.number)
"""


@pytest.mark.parametrize(
    "name, gap, ends", [("SIGTERM", 0.001, False), ("SIGHUP", 0.1, False), ("SIGHUP", 1.1, True)]
)
def test_a_second_signal_counts_after_a_second(name: str, gap: float, ends: bool) -> None:
    env, number = {**os.environ, "PYTHONPATH": str(ROOT)}, getattr(signal, name)
    command = [sys.executable, "-c", WAITING, name, str(gap)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (
        (128 + number, "") if ends else (0, f"{number.value}\n")
    )
    assert done.stderr == (
        "jaxrl-dist: error: ended immediately: nothing is saved\n" if ends else ""
    )


def test_a_run_that_ends_at_once_says_what_is_saved(tmp_path: Path) -> None:
    run = training_run.Run(Train(PG(), env="gymnax:CartPole-v1", run_dir=str(tmp_path)), [], [])
    (tmp_path / "checkpoints" / ".000000000090.new").mkdir(parents=True)
    assert train._continues_from(run) == "the run has saved no checkpoint"
    for env_steps in (20, 60):
        (tmp_path / "checkpoints" / f"{env_steps:012d}").mkdir()
    assert train._continues_from(run) == (
        f"nothing is saved after 60 env steps; `jaxrl-dist resume {tmp_path}` continues from there"
    )


@pytest.mark.case  # test_resume.py::test_a_signal_saves_and_ends_the_run
def test_a_closed_terminal_ends_a_run_in_order(tmp_path: Path) -> None:
    """SIGHUP comes then, and nothing can be shown any more."""
    program = f"{HEARS}from jaxrl_dist import cli; raise SystemExit(cli.main())"
    command = f"train pg --env envpool:CartPole-v1 {runs.TINY} --run-dir x"
    command = command.replace("steps 384", "steps 1000000000")
    env, (ours, its) = {**os.environ, "PYTHONPATH": str(ROOT)}, pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command.split()],
        cwd=tmp_path,
        env=env,
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    try:
        metrics, deadline = tmp_path / "x" / "metrics.jsonl", time.monotonic() + 100
        while not (metrics.exists() and metrics.stat().st_size > 2000):
            assert process.poll() is None and time.monotonic() < deadline
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 2**16)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=60) == 128 + signal.SIGHUP
    finally:
        process.kill()
    newest, *_ = saved(tmp_path / "x")
    assert newest == runs.read_metrics(tmp_path / "x")[-1]["env_steps"]


# --- Files ----------------------------------------------------------------------------------------


def test_metrics_that_someone_cuts_get_no_hole(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, run_files.lock(str(tmp_path)), {})
    files.write(fake_report(20))
    os.truncate(tmp_path / "metrics.jsonl", 0)
    files.write(fake_report(40))
    files.close()
    assert [line["env_steps"] for line in runs.read_metrics(tmp_path)] == [40]


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(FileWarning, match=r"metrics\.jsonl.*Function"):
        run_files.lock(str(tmp_path)).close()


def test_event_files_are_in_order_though_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for seconds in (2_000_000_000, 1_700_000_000, 2_000_000_001):
        monkeypatch.setattr(trackers.time, "time", lambda seconds=seconds: float(seconds))
        trackers.TensorBoard(tmp_path, None).close()
        (new,) = {path.name for path in tmp_path.iterdir()} - set(made)
        made.append(new)
    assert made == sorted(made)
