"""Runs that take seconds, for the tests of what a run leaves behind."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxrl_dist import cli

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""

TINY = (
    "--total-env-steps 384 --report-interval 128 --evaluation-episodes 2 --num-envs 8 --rollout-length 16 "
    "--hidden-sizes 8 --num-devices 1"
)
"""Three or four reports; two of the episodes that a CartPole policy ends within some 40 steps."""


CARTPOLE = f"ppo --env CartPole-v1 {TINY} --num-epochs 2 --num-minibatches 2"
ENVPOOL = f"a2c --env envpool:Pendulum-v1 {TINY} --normalize-observations"
RECURRENT = f"pg --env Pendulum-v1 {TINY} --plan synchronous --core gru --core-size 8 --normalize-observations --scale-rewards"


def cases(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a test: ``make test`` runs those that are kept, and the others are cases."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.case) for value in values
    ]


_FOLDER = tempfile.TemporaryDirectory(prefix="jaxrl-dist-tests-")
atexit.register(_FOLDER.cleanup)


@functools.cache
def finished(command: str) -> Path:
    """The directory of a finished run, not to be changed; each test process trains it once."""
    return train(command, Path(tempfile.mkdtemp(dir=_FOLDER.name)))


def train(command: str, run_dir: Path) -> Path:
    """Runs ``jaxrl-dist train``, which must print nothing if it is to be quiet,
    and returns its run directory.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert cli.main(["train", *command.split(), "--run-dir", str(run_dir), "--quiet"]) == 0, (
            printed.getvalue()
        )
    assert printed.getvalue() == ""
    return run_dir


def read_json(path: Path) -> Any:
    """A JSON file in which every number is finite."""
    return json.loads(path.read_text(), parse_constant=_refuse)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``."""
    return [
        json.loads(line, parse_constant=_refuse)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` without what differs from run to run: the clock's numbers."""
    return [
        {
            name: value
            for name, value in line.items()
            if name != "wall_time_s" and not name.startswith("time/")
        }
        for line in read_metrics(run_dir)
    ]


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")
