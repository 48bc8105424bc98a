"""What a release gives its users: files that pip installs, and that train in an empty
environment.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from functools import partial
from pathlib import Path

import pytest
import runs
import yaml
from test_commands_of_pages import PAGES, commands

from jaxrl_dist.run import version
from jaxrl_dist.run.version import RELEASE

PROJECT = tomllib.loads((runs.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))


def run_in(folder: Path, *command: str | Path) -> str:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_workflow_runs_targets_that_exist_on_every_python() -> None:
    jobs = yaml.safe_load(
        (runs.ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    )["jobs"]
    targets = re.findall(
        r"^([a-z]+):.*## ", (runs.ROOT / "Makefile").read_text(encoding="utf-8"), re.M
    )
    made = [
        re.fullmatch(r"make (\w+)( PYTHON=python)?", x["run"])
        for job in jobs.values()
        for x in job["steps"]
        if "run" in x
    ]
    assert {x and x[1] for x in made} == {"test", "cases", "dist", "docs"} <= {*targets}
    assert jobs["test"]["strategy"]["matrix"]["python"] == PYTHONS


def test_the_image_names_files_and_extras_that_exist() -> None:
    text = (runs.ROOT / "Dockerfile").read_text(encoding="utf-8")
    (python,) = re.findall(r"^FROM python:(\S+)-slim$", text, re.M)
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    ignored = (runs.ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert python in PYTHONS and all(
        (runs.ROOT / name).exists() and f"!{name}" in ignored for name in copied
    )
    assert {"pyproject.toml", "jaxrl_dist", PROJECT["readme"], *PROJECT["license-files"]} <= {
        *copied
    }
    (wanted,) = re.findall(r"--build-arg EXTRAS=(\S+) ", text)
    assert {*wanted.split(",")} <= PROJECT["optional-dependencies"].keys()
    (target,) = re.findall(r'^RUN pip install .* "(.*)"$', text, re.M)
    for extras, path in {"": ".", wanted: f".[{wanted}]"}.items():
        shell = subprocess.run(
            ["sh", "-c", f'echo "{target}"'], env={"EXTRAS": extras}, capture_output=True, text=True
        )
        assert shell.stdout == f"{path}\n"


def test_a_checkout_says_its_commit(tmp_path: Path) -> None:
    (tmp_path / "jaxrl_dist" / "run").mkdir(parents=True)
    file = shutil.copy(
        runs.ROOT / "jaxrl_dist" / "run" / "version.py", tmp_path / "jaxrl_dist" / "run"
    )
    identity = "-c", "user.name=x", "-c", "user.email=x@y"

    def check(expected: str) -> None:
        assert re.fullmatch(expected, runpy.run_path(file)["version"]())

    def git(*words: str) -> None:
        run_in(tmp_path, "git", *identity, *words)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "x")
    check(r"0\.1\.0\+g[0-9a-f]{8}")
    git("tag", f"v{RELEASE}")
    check(re.escape(RELEASE))
    git("commit", "--quiet", "--allow-empty", "-m", "y")
    check(r"0\.1\.0\+g[0-9a-f]{8}")
    with open(file, "a") as changed:
        changed.write("\n")
    check(r"0\.1\.0\+g[0-9a-f]{8}\.dirty")
    (tmp_path / ".git" / "HEAD").unlink()
    check(re.escape(importlib.metadata.version("jaxrl-dist")))  # git knows none


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source archive."""
    folder = tmp_path_factory.mktemp("built")
    run_in(folder, sys.executable, "-m", "venv", "builds")
    run_in(folder, "builds/bin/python", "-m", "pip", "install", "--quiet", "build")
    run_in(folder, "builds/bin/python", "-m", "build", "--outdir", folder / "dist", runs.ROOT)
    (wheel,), (source,) = ([*(folder / "dist").glob(f"*.{ending}")] for ending in ("whl", "tar.gz"))
    return wheel, source


@pytest.mark.slow
def test_the_wheel_installs_and_trains_in_an_empty_environment(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    run, (wheel, source) = partial(run_in, tmp_path), built
    assert wheel.name == f"jaxrl_dist-{version.version()}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    assert "jaxrl_dist/py.typed" in names and "jaxrl_dist/cli.py" in names
    assert all(name.startswith(("jaxrl_dist/", "jaxrl_dist-")) for name in names)
    with tarfile.open(source) as content:
        parts = {name.split("/")[1] for name in content.getnames() if "/" in name}
    assert {"jaxrl_dist", "tests", "docs", "README.md", "LICENSE", "pyproject.toml"} <= parts
    assert not parts & {".ci", ".offline", "runs", ".venv", ".cache"}

    run(sys.executable, "-m", "venv", "empty")
    run(
        "empty/bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        runs.ROOT / "constraints.txt",
        wheel,
    )
    sizes = "--total-env-steps 2000 --evaluation-episodes 2 --no-compile-cache"
    out = run("empty/bin/jaxrl-dist", "train", "ppo", "--env", "CartPole-v1", *sizes.split())
    assert "2 greedy episodes" in out
    assert (
        run("empty/bin/jaxrl-dist", "--version").strip() == f"jaxrl-dist {wheel.name.split('-')[1]}"
    )
    documented = [
        line.split()[1]
        for page in PAGES
        for line, _ in commands(page)
        if line.startswith("jaxrl-dist ")
    ]
    assert len({*documented}) > 10
    for command in {*documented}:
        assert run("empty/bin/jaxrl-dist", command, "--help").startswith("usage: ")


@pytest.mark.slow
def test_the_cell_for_colab_keeps_the_jax_that_is_there(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    (cell,) = re.findall(
        r"```python\n(.*?)```",
        (runs.ROOT / "docs" / "install.md").read_text(encoding="utf-8"),
        re.S,
    )
    (tmp_path / built[0].name).symlink_to(built[0])
    run_in(tmp_path, sys.executable, "-m", "venv", "colab")
    run_in(tmp_path, "colab/bin/python", "-m", "pip", "install", "--quiet", "jax==0.10.1")
    program = cell.replace('== "gpu"', '== "cpu"')
    out = run_in(
        tmp_path, "colab/bin/python", "-c", f"{program}\nimport jaxrl_dist\nprint(jax.__version__)"
    )
    assert (
        out.splitlines()[-1] == "0.10.1" and "jax==0.10.1\n" in (tmp_path / "kept.txt").read_text()
    )


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
