"""Every command of the README and of the documents runs as it stands there,
in the order of its page.

A command that trains reports after its first rollout (the one flag that is added), and is then
stopped by Ctrl-C. Its run is saved, so later commands find it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import runs

from jaxrl_dist.data.dataset import Dataset

PAGES = [
    "README.md",
    *sorted(str(path.relative_to(runs.ROOT)) for path in (runs.ROOT / "docs").rglob("*.md")),
]
ELSEWHERE = {
    "pip install": "changes this machine",
    "python3 -m venv": "changes this machine",
    "make t": "changes this machine",
    "git commit": "changes the repository",
    "scripts/release.py": "changes the repository; tests/test_docs.py",
    "make dist": "needs a network; tests/test_release.py",
    "10.0.0.1": "needs two hosts; tests/hosts, tests/actors",
    "ray start": "starts what only another command ends; tests/actors",
    "remote:127": "needs clients; tests/envs/test_clients.py",
    "docs/remote": "needs a trainer; tests/envs/test_clients.py",
    "scripts/launch/": "needs a cluster; tests/hosts",
    "scripts/benchmark.py": "takes an hour; tests/test_benchmark.py",
    "XLA_FLAGS=--xla_gpu": "needs a GPU",
    "--learner-devices 2-7": "needs eight devices: forced ones of a CPU take a quarter of an hour; tests/plans",
    "exact RUN_DIR": "needs a run in a small environment; docs/exact.md has one",
    "--checkpoint 1003162": "needs a run of so many steps; tests/commands",
    "@100352": "needs a run of so many steps; tests/play",
    "@403162": "needs a run of so many steps; tests/play",
    "plot runs/ppo-10 runs/a2c-10": "needs runs that ended; tests/test_docs.py",
    "--metric own/": "needs a metric of one's own; tests/training",
}
"""Parts of commands that are not run here, with the reason and what tests them."""
EXTRAS = {
    "envpool:": "envpool",
    "brax": "brax",
    "jaxmarl": "jaxmarl",
    "pgx:": "pgx",
    "mpe2.": "mpe2",
    "pettingzoo:butterfly": "pymunk",
    "minari:": "minari",
    "--tuner optuna": "optuna",
    "--tuner ray": "ray",
    "--actors-on ray": "ray",
    "--compile-for h200": "jax_cuda12_plugin",
    "--compile-for v5e": "libtpu",
    "gymnasium:HalfCheetah": "mujoco",
    "onnx": "onnxruntime",
}
"""Packages without which a command with such a part is skipped."""
DEVICES = {"sebulba:1+3": 4}
"""Forced devices of commands that need several."""
RUN_OF = {
    "--env my_module:make": "*my_module*",
    "export RUN_DIR": "CartPole-v1__ppo*",
    "serve RUN_DIR": "CartPole-v1__ppo*",
    "video RUN_DIR film.gif": "CartPole-v1__ppo*",
    "RUN_DIR --kind table --score evaluation": "*before",
}
"""Which runs ``RUN_DIR`` stands for in commands with such a part, instead of the newest."""
MY_MODULE = '''
import gymnasium
import numpy as np
import team


class Count(gymnasium.Env):
    """Pays for the action 1 until the episode has as many steps as its size."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size):
        self.size, self.steps = size, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        info = {"success": float(action), "task": {"score": self.steps}}
        return np.full(1, self.steps / self.size, np.float32), float(action), self.steps >= self.size, False, info


def make(size=5):
    return Count(size)


def CartPoles():
    return team.CartPoles(4)
'''


def commands(page: str) -> list[tuple[str, str | None]]:
    """The commands of a page, and what a refused one says: whole blocks with loops,
    and lines of the others.
    """
    text = (runs.ROOT / page).read_text(encoding="utf-8")
    found: list[tuple[str, str | None]] = []
    pattern = r"^```(?P<language>\w*)\n(?P<block>.*?)^```|`(?P<inline>jaxrl-dist [^\s`]+ [^`]+)`"
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        block = match["block"] or ""
        if match["inline"]:
            line = " ".join(match["inline"].split())
            if not re.search(
                r"\.\.\.|\b(?!RUN_DIR)[A-Z_]{2,}\b|\b[NK]\b| --help|resume RUN_DIR$", line
            ):
                found.append((line, None))
        elif match["language"] == "text":
            found += re.findall(r"^\$ (.+)\n(jaxrl-dist: error: .+)", block, re.MULTILINE)
        elif match["language"] == "sh":
            block = (
                block if "\nfor " in block else re.sub(r"\s+#.*", "", block.replace("\\\n", " "))
            )
            found += [
                (line, None)
                for line in ([block] if "\nfor " in block else block.splitlines())
                if line
            ]
    return found


def refusal(command: str) -> str | None:
    """Why a command is not run here."""
    for part, reason in ELSEWHERE.items():
        if part in command:
            return reason
    for part, package in EXTRAS.items():
        if part in command and importlib.util.find_spec(package) is None:
            return f"without {package}"
    return None


def reported(folder: Path) -> int:
    """How much all runs below a folder have reported."""
    return sum(path.stat().st_size for path in folder.rglob("metrics.jsonl"))


def environment(command: str, folder: Path) -> dict[str, str]:
    """The environment variables of a command."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
    }
    return env | {
        "JAX_PLATFORMS": "cpu",
        "MINARI_DATASETS_PATH": str(folder / "minari"),  # not among the user's
        "JAX_NUM_CPU_DEVICES": str(next((n for part, n in DEVICES.items() if part in command), 1)),
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        # no clone: a wheel may be tried
        "PYTHONPATH": f"{runs.ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
    }


@contextlib.contextmanager
def serving(command: str, folder: Path, limit: float = 300) -> Iterator[None]:
    """Serves until the context ends, from the first line of the server's output on."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=folder,
        env=environment(command, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ended = threading.Timer(limit, process.kill)
    ended.start()
    assert process.stdout is not None
    first = process.stdout.readline()
    try:
        assert first.startswith('{"url": "http://'), (command, process.communicate())
        yield
    finally:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
        ended.cancel()
        assert process.returncode == 130 and "Traceback" not in told, told


def execute(command: str, folder: Path, limit: float = 900) -> tuple[int, str]:
    """Runs a command line in a folder, until it reports if it trains;
    returns its exit code and its output.
    """
    before, stops = reported(folder), "\nfor " not in command
    if re.match(r"jaxrl-dist (train|sweep|resume) ", command) and "--help" not in command:
        command += " --report-interval 1"
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            ["bash", "-c", command if "\n" in command else f"exec {command}"],
            cwd=folder,
            env=environment(command, folder),
            stdout=output,
            stderr=output,
        )
        until = time.monotonic() + limit
        while process.poll() is None and time.monotonic() < until:
            if stops and reported(folder) > before:
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.2)
        try:
            code = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        output.seek(0)
        return code, output.read()


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """A folder with what the pages take for granted: some files of the reader's, and finished
    runs.
    """
    (tmp_path / "path" / "to").mkdir(parents=True)
    pages = (
        "adding-an-algorithm.md",
        "adding-an-off-policy-algorithm.md",
        "exploration.md",
        "planning.md",
    )
    own, rem, curious, cem = (
        re.findall(
            r"```python\n(.*?)```",
            (runs.ROOT / "docs" / page).read_text(encoding="utf-8"),
            re.DOTALL,
        )[0]
        for page in pages
    )
    texts = {
        "my_module.py": MY_MODULE,
        "path/to/my_algo.py": own,
        "curious_ppo.py": curious,
    }
    texts |= {"path/to/rem.py": rem, "cem.py": cem}
    page = (runs.ROOT / "docs" / "your-environment.md").read_text(encoding="utf-8")
    gravity, brax = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    texts |= {"random_gravity.py": gravity, "random_brax.py": brax}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "scripts").symlink_to(runs.ROOT / "scripts")
    for algorithm in ("ppo", "a2c"):
        command = f"{algorithm} --env CartPole-v1 {runs.TINY} --tensorboard"
        shutil.copytree(
            runs.finished(command), tmp_path / "runs" / f"CartPole-v1__{algorithm}__0__before"
        )
    rng = np.random.default_rng(0)
    hopper = {
        "obs": rng.normal(size=(65, 11)),
        "action": rng.uniform(-1, 1, (64, 3)),
        "reward": np.ones(64),
    }
    Dataset.from_episodes([{**hopper, "terminated": False}]).save(tmp_path / "data" / "NAME")
    for name, algorithm in {"NAME": "ppo", "ippo0": "ppo", "mappo0": "a2c"}.items():
        (tmp_path / "runs" / name).symlink_to(f"CartPole-v1__{algorithm}__0__before")
    return tmp_path


def newest(folder: Path, pattern: str, *, populations: bool) -> str:
    """The newest run below a folder's ``runs``."""
    found = [
        path.parent
        for path in (folder / "runs").glob(f"{pattern}/config.json")
        if not path.parent.is_symlink()
    ]
    found = [path for path in found if populations or not (path / "members").exists()]
    return str(
        max(found, key=lambda path: (path / "config.json").stat().st_mtime).relative_to(folder)
    )


def test_pages_have_commands_and_a_table_of_those_run_elsewhere() -> None:
    lines = {page: [line for line, _ in commands(page)] for page in PAGES}
    every = [line for found in lines.values() for line in found]
    assert len(every) > 110 and all(
        lines[f"docs/algorithms/{name}.md"] for name in ("ppo", "dqn", "qmix")
    )
    assert not [
        part
        for part in (*ELSEWHERE, *EXTRAS, *DEVICES, *RUN_OF)
        if not any(part in line for line in every)
    ]
    assert ("jaxrl-dist train dqn --env MountainCar-v0", None) in commands("docs/exploration.md")


NIGHTLY_STUB = """#!/bin/sh
echo "$@" >> "$LOG"
[ "$1" = train ] || exit 0
for last; do [ "$flag" != --run-dir ] || run_dir=$last; flag=$last; done
mkdir -p "$run_dir" && echo '{"evaluation": {"return_mean": 1.0}}' > "$run_dir/summary.json"
"""
"""A ``jaxrl-dist`` that notes what it is asked for, and leaves a summary instead of a run."""


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is of Linux")
def test_the_nightly_script_trains_each_night(tmp_path: Path) -> None:
    """A night has its own runs, another one at the same time is refused, and seven nights are
    kept.
    """
    [script] = [line for line, _ in commands("docs/runs.md") if "flock" in line]
    (tmp_path / "jaxrl-dist").write_text(NIGHTLY_STUB)
    (tmp_path / "jaxrl-dist").chmod(0o755)
    log = tmp_path / "log"
    env = {
        **os.environ,
        "LOG": str(log),
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def night(date: str) -> int:
        return subprocess.run(
            ["bash", "-c", script, "nightly.sh", date], cwd=tmp_path, env=env, check=False
        ).returncode

    for day in range(1, 10):
        assert night(f"2030-01-0{day}") == 0
    asked = log.read_text().splitlines()
    for day in (1, 9):
        for algorithm in ("ppo", "dqn", "pqn"):
            assert any(
                f"train {algorithm} " in line and f"2030-01-0{day}/{algorithm}" in line
                for line in asked
            )
    assert sum("export nightly/2030-01-09/" in line for line in asked) == 1
    kept = sorted(path.name for path in (tmp_path / "nightly").iterdir() if path.is_dir())
    assert kept == [f"2030-01-0{day}" for day in range(3, 10)]
    with (tmp_path / "nightly" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert night("2030-01-10") == 1
    assert log.read_text().splitlines() == asked


CASES = ("docs/index.md", "docs/algorithms/ppo.md", "docs/algorithms/pqn.md")
"""Pages that take seconds."""


@pytest.mark.slow
@pytest.mark.parametrize(  # test_pages_have_commands_and_a_table_of_those_run_elsewhere
    "page",
    [
        pytest.param(page, marks=[pytest.mark.case] if page in CASES else [])
        for page in PAGES
        if commands(page)
    ],
)
def test_the_commands_of_a_page_run(page: str, reader: Path) -> None:
    with contextlib.ExitStack() as servers:
        run_commands(page, reader, servers)


def run_commands(page: str, reader: Path, servers: contextlib.ExitStack) -> None:
    """Runs the commands of a page; a server of one answers the later ones."""
    skipped: list[str] = []
    for command, message in commands(page):
        if (reason := refusal(command)) is not None:
            skipped.append(f"{command} ({reason})")
            continue
        if "RUN_DIR" in command:
            pattern = next((of_runs for part, of_runs in RUN_OF.items() if part in command), "*")
            command = command.replace(
                "RUN_DIR", newest(reader, pattern, populations="populations" in page)
            )
        if command.startswith("jaxrl-dist serve "):
            servers.enter_context(serving(command, reader))
            continue
        code, output = execute(command, reader)
        told = f"{page}: {command}\nexit code {code}\n{output[-3000:]}"
        assert code == 2 if message else code in (0, 130), told
        assert message is None or message in output, told
        assert "Traceback" not in output, told
        print(told)
    if all(line in "\n".join(skipped) for line, _ in commands(page)):
        pytest.skip("; ".join(skipped))
