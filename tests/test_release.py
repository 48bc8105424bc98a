"""What a release gives its users: files that pip installs, and that train in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from functools import partial
from pathlib import Path

import pytest
import runs

PROJECT = tomllib.loads((runs.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run_in(folder: Path, *command: str | Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_installs_and_trains_in_an_empty_environment(tmp_path: Path) -> None:
    run = partial(run_in, tmp_path)
    run(sys.executable, "-m", "venv", "builds")
    run("builds/bin/python", "-m", "pip", "install", "--quiet", "build")
    run("builds/bin/python", "-m", "build", "--outdir", tmp_path / "dist", runs.ROOT)
    (wheel,), (source,) = (list((tmp_path / "dist").glob(f"*.{ending}")) for ending in ("whl", "tar.gz"))
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    assert "jaxrl_dist/py.typed" in names and "jaxrl_dist/cli.py" in names
    assert all(name.startswith(("jaxrl_dist/", "jaxrl_dist-")) for name in names)
    with tarfile.open(source) as content:
        parts = {name.split("/")[1] for name in content.getnames() if "/" in name}
    assert {"jaxrl_dist", "tests", "docs", "README.md", "LICENSE", "pyproject.toml"} <= parts
    assert not parts & {".ci", ".offline", "runs", ".venv", ".cache"}

    run(sys.executable, "-m", "venv", "empty")
    run("empty/bin/python", "-m", "pip", "install", "--quiet", "-c", runs.ROOT / "constraints.txt", wheel)
    sizes = "--total-env-steps 2000 --evaluation-episodes 2 --no-compile-cache"
    out = run("empty/bin/jaxrl-dist", "train", "ppo", "--env", "CartPole-v1", *sizes.split())
    assert "2 greedy episodes" in out
    assert run("empty/bin/jaxrl-dist", "--version").strip() == f"jaxrl-dist {wheel.name.split('-')[1]}"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty")
    run_in(folder, sys.executable, "-m", "venv", ".")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_the_bounds_of_every_extra_can_be_met(extra: str, empty: Path) -> None:
    pip = ("bin/python", "-m", "pip", "install", "--quiet", "--dry-run")
    run_in(empty, *pip, "-c", runs.ROOT / "constraints.txt", f"{runs.ROOT}[{extra}]")
