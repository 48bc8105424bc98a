"""What a run writes, that it can be repeated bit for bit, and ``jaxrl_dist.train`` from Python."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.errors import ConfigError, EnvError, FileWarning
from jaxrl_dist.run import checkpoint, saving, storage
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.types import Report, Variables

ALL = [runs.CARTPOLE, runs.ENVPOOL]


@pytest.mark.parametrize("command", ALL)
def test_a_run_leaves_config_metrics_summary_and_variables(command: str) -> None:
    run_dir = runs.finished(command)
    assert {path.name for path in run_dir.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
    }
    config = runs.read_json(run_dir / "config.json")
    assert (config["format"], config["algorithm"]) == (1, command.split()[0])
    assert config["run"]["num_envs"] == 8 and config["hyperparameters"]["hidden_sizes"] == [8]
    assert {"jax", "flax", "gymnax", "envpool", "python"} <= config["versions"].keys()
    lines = runs.read_metrics(run_dir)
    assert len(lines) >= 3
    needed = {
        "env_steps",
        "updates",
        "iteration",
        "wall_time_s",
        "episode/return",
        "episode/length",
        "loss/total",
    }
    needed |= {"time/env_steps_per_second", "time/compile_s"}
    assert all(needed <= line.keys() for line in lines)
    for name in ("env_steps", "updates", "iteration", "wall_time_s"):
        values = [line[name] for line in lines]
        assert values == sorted(set(values)), f"{name} must grow: {values}"
    assert lines[-1]["env_steps"] >= 384 > lines[-2]["env_steps"]
    summary = runs.read_json(run_dir / "summary.json")
    assert summary["env_steps"] == lines[-1]["env_steps"]
    assert summary["wall_time_s"] == lines[-1]["wall_time_s"] > summary["compile_time_s"] > 0
    seconds = summary["wall_time_s"] - summary["compile_time_s"]
    assert summary["env_steps_per_second"] == pytest.approx(summary["env_steps"] / seconds)
    assert summary["evaluation"].keys() == {
        "episodes",
        "return_mean",
        "return_std",
        "length_mean",
        "cut",
    }
    assert (summary["evaluation"]["episodes"], summary["evaluation"]["cut"]) == (2, 0)


@pytest.mark.case  # test_an_evaluation_looks_too, in envs/test_finite.py
def test_an_evaluation_that_fails_costs_the_evaluation_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any, **kinds: Any) -> None:
        raise EnvError("broken")

    monkeypatch.setattr(Evaluator, "play", fail)
    command = f"train impala --env envpool:CartPole-v1 {runs.TINY} --run-dir {tmp_path}/"
    assert cli.main(f"{command}raise".split()) == 1
    assert cli.main(f"{command}restart --on-actor-error restart".split()) == 0
    for name in ("raise", "restart"):
        summary = runs.read_json(tmp_path / name / "summary.json")
        assert summary["evaluation"] is None and summary["env_steps"] >= 384
        assert summary["restarts"] == 0
        jaxrl_dist.load_policy(tmp_path / name)


def test_where_no_episode_ended_there_is_null() -> None:
    lines = runs.read_metrics(runs.finished(runs.ENVPOOL))  # 200 steps an episode, 48 were made
    assert [line["episode/return"] for line in lines] == [None] * len(lines)
    assert all(line["episode/count"] == 0 for line in lines)


def test_a_run_can_be_repeated_from_its_config(tmp_path: Path) -> None:
    """On EnvPool; on gymnax see test_cli.py, where another process repeats it."""
    first = runs.finished(runs.ENVPOOL)
    again = runs.train(f"--config {first / 'config.json'}", tmp_path / "again")
    assert runs.untimed(again) == runs.untimed(first)
    summaries = [runs.read_json(run_dir / "summary.json") for run_dir in (first, again)]
    assert summaries[0]["evaluation"] == summaries[1]["evaluation"]
    assert runs.read_json(again / "config.json") == runs.read_json(first / "config.json")


def test_a_command_can_be_repeated_and_extended(tmp_path: Path) -> None:
    first = runs.finished(runs.CARTPOLE)
    longer = runs.train(
        runs.CARTPOLE.replace("--total-env-steps 384", "--total-env-steps 640"), tmp_path / "longer"
    )
    whole = len(runs.untimed(first)) - 1  # the last report may come early, when the steps are done
    assert whole >= 2
    assert runs.untimed(longer)[:whole] == runs.untimed(first)[:whole]
    assert len(runs.untimed(longer)) > whole + 1


# --- Files ----------------------------------------------------------------------------------------


def report(iteration: int = 3, **values: float | None) -> Report:
    return Report(
        1,
        2,
        iteration,
        0.5,
        {"time/compile_s": None, **values},
        lambda: Variables((), ()),
        lambda: None,
    )


def test_what_is_no_number_becomes_null(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, run_files.lock(str(tmp_path)), {})
    files.write(report(a=float("nan"), b=float("inf"), c=None, d=1.5))
    files.finish(report())
    files.close()
    assert runs.read_metrics(tmp_path)[0] == {
        **{
            "env_steps": 1,
            "updates": 2,
            "iteration": 3,
            "wall_time_s": 0.5,
            "time/compile_s": None,
        },
        **{"a": None, "b": None, "c": None, "d": 1.5},
    }
    assert runs.read_json(tmp_path / "summary.json")["evaluation"] is None


def test_every_line_is_on_the_disk_when_write_returns(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, run_files.lock(str(tmp_path)), {})
    for count in (1, 2, 3):
        files.write(report(count))
        assert len(runs.read_metrics(tmp_path)) == count
    files.close()


def test_an_evaluation_after_resuming_overwrites_only_its_line(tmp_path: Path) -> None:
    """As that of the last report, which the earlier session had no time for."""
    files = RunFiles(tmp_path, run_files.lock(str(tmp_path)), {})
    for iteration in (1, 2, 3):
        files.write(report(iteration))
    files.close()
    before = runs.read_metrics(tmp_path)
    files = RunFiles(tmp_path, run_files.lock(str(tmp_path)), {}, 3)
    files.write(dataclasses.replace(report(3), evaluation={"return_mean": 1.5}))
    files.close()
    assert runs.read_metrics(tmp_path) == [
        *before[:2],
        {**before[2], "evaluation/return_mean": 1.5},
    ]


def test_one_of_two_runs_gets_a_directory(tmp_path: Path) -> None:
    run_files.claim(str(tmp_path / "a" / "b"))
    with pytest.raises(ConfigError, match="already holds a run"):
        run_files.claim(str(tmp_path / "a" / "b"))


@pytest.fixture
def no_space() -> Any:
    """Files of this process may not grow beyond 4 kB."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_names_the_file(tmp_path: Path, no_space: None) -> None:
    """A report that does not fit is a warning, as the disk may not stay full,
    and at the end it is an error.
    """
    files = RunFiles(tmp_path, run_files.lock(str(tmp_path)), {})
    files.write(report())
    with pytest.warns(FileWarning, match=r"metrics\.jsonl.*File"):
        files.write(report(4, **{"x" * 5000: 1.0}))
    files.write(report(5))  # without a second warning
    _, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.warns(FileWarning, match=r"metrics\.jsonl can be written again"):
        files.write(report(6))
    files.write(report(7))
    assert [line["iteration"] for line in runs.read_metrics(tmp_path)] == [3, 4, 5, 6, 7]
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit))
    with pytest.warns(FileWarning, match=r"metrics\.jsonl.*File"):
        files.write(report(8))
    with pytest.raises(OSError, match=r"metrics\.jsonl") as error:
        files.close()
    assert error.value.filename == str(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match=r"summary\.json"):
        storage.write_json(tmp_path / "summary.json", {"a": "x" * 5000})
    assert not (tmp_path / "summary.json").exists()


# --- Variables ------------------------------------------------------------------------------------


def variables(width: int = 3) -> Variables:
    generator = np.random.default_rng(0)
    params = {
        "a": {"kernel": generator.normal(size=(2, width)).astype(np.float32)},
        "b": np.float32(3),
    }
    return Variables(params, ({"count": np.arange(4, dtype=np.int32)}, ()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved")
    saving.save_variables(run_dir, variables())
    return run_dir


def test_variables_come_back_bit_for_bit(saved: Path) -> None:
    found = checkpoint.load_variables(saved, jax.eval_shape(variables))
    assert jax.tree.structure(found) == jax.tree.structure(variables())
    jax.tree.map(np.testing.assert_array_equal, found, variables())
    jax.tree.map(
        lambda x, y: np.testing.assert_equal(x.dtype, np.asarray(y).dtype), found, variables()
    )


OTHERS: dict[str, tuple[Variables, str]] = {
    "shape": (variables(5), "params/a/kernel is float32[2, 3] there, but float32[2, 5] here"),
    "more": (
        variables()._replace(stats=({"count": np.arange(4, dtype=np.int32)}, np.ones(2))),
        "missing there",
    ),
    "less": (variables()._replace(stats=()), "stats/0/count is int32[4] there, but missing here"),
    "dtype": (
        variables()._replace(stats=({"count": np.zeros(4, np.float32)}, ())),
        "but float32[4] here",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_variables_of_another_network_are_refused(what: str, saved: Path) -> None:
    like, message = OTHERS[what]
    with pytest.raises(ConfigError) as error:
        checkpoint.load_variables(saved, like)
    assert message in str(error.value)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_any_damage_to_any_file_is_seen(damage: str, saved: Path, tmp_path: Path) -> None:
    files = [
        file.relative_to(saved)
        for file in saved.rglob("*")
        if file.is_file() and file.stat().st_size
    ]
    assert len(files) > 3
    for index, name in enumerate(files):
        copy = shutil.copytree(saved, tmp_path / str(index))
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        if damage == "remove":
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(content if damage == "flip" else content[: len(content) // 2])
        with pytest.raises(ConfigError, match=r"damaged|not JSON|there is no|has no checkpoint"):
            checkpoint.load_variables(copy, variables())


FULL_DISK = """
import resource, signal, sys
import numpy as np
from jaxrl_dist.run import saving
from jaxrl_dist.types import Variables
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    saving.save_variables(sys.argv[1], Variables({"a": np.random.normal(size=10_000)}, ()))
except OSError as error:
    print(error)
"""


def test_a_checkpoint_that_cannot_be_written_is_one_oserror(tmp_path: Path) -> None:
    """In a separate process, because orbax leaves unfinished coroutines behind."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(runs.ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (
        done.stdout.startswith(f"{tmp_path}/checkpoints/final cannot be written: ")
        and done.stdout.count("\n") == 1
    )
    assert done.stderr == ""
    with pytest.raises(ConfigError, match="has no checkpoint"):
        checkpoint.load_variables(tmp_path, variables())


FULL_WHILE_WRITING = """
import pathlib, resource, signal, sys
import numpy as np
from jaxrl_dist.run import arrays
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
for number in range(3):
    try:
        named = {str(name): np.random.normal(size=1000) for name in range(40)}
        arrays.save(pathlib.Path(sys.argv[1], str(number)), named)
    except Exception as error:
        print("File too large" in str(error))
"""


def test_full_disk_during_a_checkpoint_raises_quietly(tmp_path: Path) -> None:
    """Each of the 40 writes fails, most of them after
    the save has ended with the error of the first.
    """
    command = [sys.executable, "-c", FULL_WHILE_WRITING, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(runs.ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n" * 3, "")


# --- Python ---------------------------------------------------------------------------------------


def config(**values: Any) -> jaxrl_dist.Train:
    sizes = {
        "num_envs": 8,
        "rollout_length": 8,
        "report_interval": 64,
        "num_devices": 1,
        "evaluation_episodes": 0,
    }
    return jaxrl_dist.Train(
        "pg", **{"env": "envpool:CartPole-v1", "total_env_steps": 10**9, **sizes, **values}
    )


def test_reports_come_without_files_and_breaking_out_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.active_count()
    past = None
    reports = jaxrl_dist.train(config())
    for report in reports:
        if past is not None:
            with pytest.raises(RuntimeError, match="before taking the next"):
                past.variables()
            break
        past = report
        before = report.variables()
        kept = jax.tree.map(np.copy, before)
    assert (past.env_steps, past.iteration, past.evaluation) == (64, 1, None)
    assert report.env_steps > 64
    # a copy: training went on and left it alone
    jax.tree.map(np.testing.assert_array_equal, before, kept)
    changed = [
        bool(np.any(x != y))
        for x, y in zip(*map(jax.tree.leaves, (before, report.variables())), strict=True)
    ]
    assert any(changed)
    reports.close()
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "values, message",
    [
        ({"env": ""}, "env is missing"),
        ({"num_envs": 12, "num_devices": None}, "nearest that work: 8 or 16"),
        ({"plan": "on_device"}, "use plan synchronous"),
        (
            {"plan": "fast"},
            "plan must be one of on_device, synchronous, asynchronous, own_pace, gradients, offline, not 'fast'",
        ),
        ({"init_from": "nowhere"}, "there is no run directory nowhere"),
    ],
)
def test_train_refuses_before_the_first_report(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(jaxrl_dist.ConfigError) as error:
        jaxrl_dist.train(config(run_dir=str(tmp_path / "run"), **values))
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(jaxrl_dist.ConfigError, match="did you mean 'ppo'"):
        jaxrl_dist.train(jaxrl_dist.Train("pppo", env="CartPole-v1"))


# --- Files that someone else has made -------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "checkpoints"])
def test_what_is_left_of_a_run_is_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="already holds a run"):
        run_files.claim(str(tmp_path))
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(
        ConfigError, match="already holds a run" if name == "config.json" else "has a link"
    ):
        run_files.claim(str(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_files_are_written_through_no_link_and_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, victim = [], tmp_path / "victim"
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    victim.write_text("precious")
    (tmp_path / "config.tmp").symlink_to(victim)
    storage.write_json(tmp_path / "config.json", {"a": 1})
    (tmp_path / ".out.new").symlink_to(victim)
    with storage.replacing(tmp_path / "out") as partial:
        partial.write_text("new")
    assert victim.read_text() == "precious" and (tmp_path / "out").read_text() == "new"
    assert storage.read_json(tmp_path / "config.json") == {"a": 1}
    assert synced == [(tmp_path / "config.json").stat().st_ino, tmp_path.stat().st_ino]


def test_json_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as error:
            storage.read_json(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        return str(error.value)

    path = tmp_path / "x"
    assert message(path) == f"there is no {path}"
    assert "is not a plain file" in message(Path("/dev/null"))
    assert "Is a directory" in message(tmp_path)
    (tmp_path / "link").symlink_to("/dev/zero")
    assert "cannot be read" in message(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    assert "is not a plain file" in message(tmp_path / "pipe")
    for content in (b"{", b"\xff", b"", b"[" * 10**5, b"1" * 10**5):
        path.write_bytes(content)
        assert "is not JSON" in message(path)
    with path.open("r+b") as file:
        file.truncate(2**40)
    assert f"it has {2**40} bytes" in message(path)


def test_metrics_pipe_is_refused_and_nested_line_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is not a plain file"):
        run_files.lock(str(tmp_path))
    path.unlink()
    path.write_bytes(b"[" * 10**5 + b"\n")
    with pytest.warns(FileWarning, match="has lost the lines after iteration 0, up to 3"):
        RunFiles(tmp_path, run_files.lock(str(tmp_path)), {}, 3).close()
    assert path.stat().st_size == 10**5 + 1
