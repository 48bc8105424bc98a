"""The files of a run directory: config, metrics line by line, summary."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import pathlib
import platform
from collections.abc import Iterator
from typing import Any

from jaxrl_dist.config import CONFIG_FILE, ConfigError
from jaxrl_dist.types import Report

METRICS, SUMMARY = "metrics.jsonl", "summary.json"


def default_run_dir(env: str, algorithm: str, seed: int) -> str:
    """``runs/<env>__<algo>__<seed>__<utc>``, the time in UTC to the microsecond."""
    utc = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
    return f"runs/{env.replace(':', '-').replace('/', '-')}__{algorithm}__{seed}__{utc}"


def claim(run_dir: str) -> pathlib.Path:
    """Makes the directory of a new run.

    Raises:
      ConfigError: it cannot be made or written, is a file, or holds a run already.
    """
    path = pathlib.Path(run_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / METRICS).touch(exist_ok=False)  # of several processes, one gets the directory
    except FileExistsError:
        holds = "holds a run already" if path.is_dir() else "is a file"
        raise ConfigError(f"--run-dir {run_dir} {holds}; name another directory") from None
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be written: {error.strerror}") from error
    return path


class RunFiles:
    """Writes a run's files as its reports come in.

    Raises:
      OSError: a file cannot be written; the error names it.
    """

    def __init__(self, run_dir: pathlib.Path, config: dict[str, Any]) -> None:
        self.path = run_dir
        write_json(run_dir / CONFIG_FILE, {**config, "versions": versions()})
        self._metrics = (run_dir / METRICS).open("w", encoding="utf-8")

    def write(self, report: Report) -> None:
        """Adds a line to ``metrics.jsonl``."""
        line = {
            "env_steps": report.env_steps,
            "updates": report.updates,
            "iteration": report.iteration,
            "wall_time_s": report.wall_time_s,
            **report.metrics,
        }
        line = {name: value if value is None or math.isfinite(value) else None for name, value in line.items()}
        with _naming(self.path / METRICS):
            self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
            self._metrics.flush()

    def finish(self, last: Report) -> None:
        """Writes ``summary.json``: rates leave compilation and evaluation out."""
        compile_seconds = last.metrics["time/compile_s"] or 0.0
        restarts = last.metrics.get("async/restarts")
        write_json(
            self.path / SUMMARY,
            {
                "env_steps": last.env_steps,
                "updates": last.updates,
                "wall_time_s": last.wall_time_s,
                "compile_time_s": compile_seconds,
                "env_steps_per_second": last.env_steps / max(last.wall_time_s - compile_seconds, 1e-9),
                **({} if restarts is None else {"restarts": int(restarts)}),
                "evaluation": last.evaluation,
            },
        )

    def close(self) -> None:
        with _naming(self.path / METRICS):
            self._metrics.close()


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Says which file could not be written: the operating system does not where it is open already."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def versions() -> dict[str, str]:
    """The versions that a run's numbers depend on."""
    packages = ("jaxrl-dist", "jax", "jaxlib", "flax", "optax", "gymnax", "envpool", "numpy")
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a whole file or none: through a temporary file beside it."""
    temporary = path.with_suffix(".tmp")
    with _naming(path):
        temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
