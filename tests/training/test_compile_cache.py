"""Compiled programs: found by later runs in memory and on the disk, kept apart by CPU,
and never a reason to fail.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import mesh
from jaxrl_dist.config.values import marked
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import compile_cache
from jaxrl_dist.training.job import make_job

TRAIN = """
import pathlib, sys
from jaxrl_dist import cli

home = pathlib.Path(sys.argv[1])
for flag in ("--no-compile-cache", "--compile-cache", "--compile-cache"):
    run_dir = home / f"run{len(list(home.iterdir()))}"
    assert cli.main(["train", *sys.argv[2:], flag, "--quiet", "--run-dir", str(run_dir)]) == 0
    print(len(list(home.glob("cache/jaxrl_dist/*/*-cache"))))
"""


def start(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Trains three times, the first without the cache;
    prints the number of kept programs after each.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env |= {
        "PYTHONPATH": str(runs.ROOT),
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(home / "cache"),
        **environment,
    }
    command = [sys.executable, "-c", TRAIN, str(home), *runs.CARTPOLE.split()]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.case  # the other tests of the cache
def test_a_second_run_finds_what_the_first_compiled(tmp_path: Path) -> None:
    done = start(tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    none, first, second = map(int, done.stdout.split())
    assert none == 0 and first == second > 0


@pytest.mark.slow
def test_the_user_s_own_directory_counts(tmp_path: Path) -> None:
    done = start(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0", "0"] and any((tmp_path / "own").iterdir())


def test_old_programs_are_deleted_whatever_else_happens_to_them(tmp_path: Path) -> None:
    """A link to nothing stands for one that another run deletes meanwhile."""
    for number in range(9):
        path = tmp_path / f"{number}-cache"
        path.write_text("")
        os.utime(path, (0, 0))
        (tmp_path / f"gone-{number}").symlink_to(tmp_path / "nowhere")
    (tmp_path / "new-cache").write_text("")
    compile_cache._delete_old(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.is_symlink()] == ["new-cache"]


def test_each_version_and_each_cpu_has_a_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = compile_cache.cache_dir()
    assert here == compile_cache.cache_dir() and here.parent == tmp_path / "jaxrl_dist"
    assert jax.__version__ in here.name
    monkeypatch.setattr(compile_cache, "_cpu", lambda: "flags: fpu sse avx512f")
    assert compile_cache.cache_dir() != here
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compile_cache.cache_dir().parent == tmp_path / "home" / ".cache" / "jaxrl_dist"


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A home for caches, in a process that has chosen none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ("dir", "min_compile_time_secs", "enable_xla_caches")
    options = [
        f"jax_{'compilation_cache' if name == 'dir' else 'persistent_cache'}_{name}"
        for name in names
    ]
    before = {option: getattr(jax.config, option) for option in options}
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache"
    for option, value in before.items():
        jax.config.update(option, value)


def test_programs_that_nobody_reads_are_deleted(unset: Path) -> None:
    folder = compile_cache.cache_dir()
    folder.mkdir(parents=True)
    for name, days in {"old": 40, "new": 2}.items():
        (folder / name).touch()
        os.utime(folder / name, (time.time() - 86400 * days,) * 2)
    compile_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert [path.name for path in folder.iterdir()] == ["new"]


@pytest.mark.parametrize("seconds", [None, "1"])
def test_the_user_s_directory_keeps_quick_programs_too(
    seconds: str | None, unset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = "jax_persistent_cache_min_compile_time_secs"
    jax.config.update("jax_compilation_cache_dir", str(unset))
    jax.config.update(smallest, 1.0)
    monkeypatch.delenv(smallest.upper(), raising=False)
    if seconds is not None:
        monkeypatch.setenv(smallest.upper(), seconds)
    compile_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(unset)
    assert getattr(jax.config, smallest) == (0.1 if seconds is None else 1.0)


def test_a_place_that_cannot_be_written_is_no_error(unset: Path) -> None:
    unset.write_text("a file")
    compile_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None


# --- In memory ------------------------------------------------------------------------------------


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[mesh.Program]:
    """The programs that are lowered."""
    found: list[mesh.Program] = []
    lower = mesh.Program.lower
    monkeypatch.setattr(
        mesh.Program, "lower", lambda self, *args: found.append(self) or lower(self, *args)
    )
    return found


def returns(
    env: object = "gymnax:CartPole-v1",
    plan: str = "on_device",
    algorithm: str = "a2c",
    **fields: object,
) -> list[object]:
    """Trains, and returns what the reports say without times."""
    sizes = {
        "num_envs": 8,
        "rollout_length": 6,
        "hidden_sizes": (8,),
        "num_devices": 1,
        "evaluation_episodes": 2,
    }
    config = jaxrl_dist.preset(
        algorithm, env, plan=plan, report_interval=48, **{"total_env_steps": 96, **sizes, **fields}
    )
    reports = list(jaxrl_dist.train(config))
    assert all(report.metrics["time/compile_s"] < report.wall_time_s for report in reports)
    return [
        [value for name, value in report.metrics.items() if not name.startswith("time/")]
        + [report.evaluation]
        for report in reports
    ]


@pytest.mark.parametrize(
    "plan", runs.cases(["on_device", "synchronous", "asynchronous", "gradients"], "synchronous")
)
def test_a_second_run_of_a_process_compiles_nothing(plan: str, lowered: list[mesh.Program]) -> None:
    fields = {"num_actors": 2, "max_lag": 0} if plan in ("asynchronous", "gradients") else {}
    first, made = returns(plan=plan, **fields), len(lowered)
    assert made, "another test has trained with this config: choose another one"
    again = returns(plan=plan, **fields)
    assert len(lowered) == made
    if fields:  # threads decide what is learnt from
        return
    assert str(again) == str(first)
    if plan == "synchronous":  # whose programs hold the seed
        return
    other = returns(seed=1, total_env_steps=144)
    assert len(lowered) == made and len(other) > len(first) and str(other[0]) != str(first[0])
    with jax.default_matmul_precision("bfloat16"):
        returns()
    assert len(lowered) > made, "JAX's settings decide what is compiled"


def test_a_second_run_with_priorities_compiles_nothing(lowered: list[mesh.Program]) -> None:
    """Which actors compute on their way to the learner."""
    fields: dict[str, object] = {
        "learning_starts": 48,
        "batch_size": 8,
        "priority_exponent": 0.6,
        "num_actors": 2,
    }
    for again in (False, True):
        made = len(lowered)
        returns(plan="asynchronous", algorithm="dqn", **fields)
        assert (len(lowered) == made) == again


@pytest.mark.case  # test_a_second_run_of_a_process_compiles_nothing
def test_what_the_user_s_code_decides_is_compiled_each_time(lowered: list[mesh.Program]) -> None:
    for _ in range(2):
        made = len(lowered)
        returns("own:cartpole")
        assert len(lowered) > made


def test_a_job_knows_nothing_of_the_run_that_made_it() -> None:
    """Later runs of the process share it."""
    sizes = {"num_envs": 8, "rollout_length": 5, "hidden_sizes": (8,), "num_devices": 1}
    config, source = resolved(jaxrl_dist.Train("a2c", env="gymnax:CartPole-v1"), sizes)
    run = {"seed": 3, "total_env_steps": 80, "report_interval": 40, "evaluation_policy": "sampled"}
    job = make_job(dataclasses.replace(config, **run), source)
    assert make_job(config, source) is job
    blank = jaxrl_dist.Train(config.algorithm)
    for name in marked(jaxrl_dist.Train, compiled=False):
        assert getattr(job.config, name) == getattr(blank, name), name
    _, learner = job.variant({"learning_rate": 1e-3})
    assert learner is not job.learner
