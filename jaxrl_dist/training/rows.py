"""A row of results for each member of a population, and what its files say of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.plans.window import recent_return
from jaxrl_dist.run import storage
from jaxrl_dist.run.files import METRICS, POPULATION, SUMMARY
from jaxrl_dist.types import Report

ENDED = "done", "halved"
"""Status of members that have ended with a result, which stays."""
_FAILED = "diverged", "failed"
_MAX_METRICS = 2**31
"""Bytes of a file of metrics, at most."""
_COUNTS = ("env_steps", "updates", "iteration")
_EVALUATION = "evaluation/"


@dataclasses.dataclass
class Row:
    """A member's entry in the population's results."""

    member: str
    """Its directory's name."""
    seed: int
    values: Mapping[str, Any]
    """The hyperparameters in which members differ."""
    status: str = "training"
    """``training``, ``done``, ``halved`` (ended by successive halving), ``diverged``,
    or ``failed`` in a sweep."""
    env_steps: int = 0
    iteration: int = 0
    episode_return: float | None = None
    """Mean return of the newest window in which episodes ended."""
    evaluation_return: float | None = None
    """Mean return of the newest evaluation."""
    lineage: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """With population-based training: env steps, iteration,
    parent and new hyperparameters of each copy."""
    updates: int = 0
    evaluation_info: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the info in the newest evaluation, by their names in ``metrics.jsonl``."""

    def score(self, field: str) -> float | None:
        """Returns this field's return; None if the member has failed or has none."""
        score: float | None = getattr(self, field)
        return None if self.status in _FAILED else score

    def take(self, report: Report) -> None:
        """Takes the returns, and metrics of the info, of the member's newest report."""
        episode_return = recent_return(report.metrics)
        if episode_return is not None:
            self.episode_return = episode_return
        if report.evaluation is not None:
            self.evaluation_return = report.evaluation.get("return_mean")
            self.evaluation_info = {
                _EVALUATION + name: value
                for name, value in report.evaluation.items()
                if "info/" in name
            }


def scored(rows: Sequence[Row]) -> tuple[str, list[float | None]]:
    """Returns the field of ``Row`` that ranks the members, and each member's score.

    The field is the return of evaluations if all members that have not failed have one, otherwise
    the return of training: the two kinds do not compare.
    """
    unknown = any(row.evaluation_return is None for row in rows if row.status not in _FAILED)
    field = "episode_return" if unknown else "evaluation_return"
    return field, [row.score(field) for row in rows]


def read_rows(run_dir: pathlib.Path, begun: Sequence[Row]) -> list[Row]:
    """Returns the rows of a population's last session;
    copies of ``begun`` if its file is lost or damaged.
    """
    stored_fields = {field.name for field in dataclasses.fields(Row)} - {"member", "seed", "values"}
    with contextlib.suppress(ConfigError, LookupError, TypeError, AttributeError, ValueError):
        members = storage.read_json(run_dir / POPULATION)["members"]
        return [
            dataclasses.replace(row, **{name: stored[name] for name in stored_fields})
            for row, stored in zip(begun, members, strict=True)
        ]
    return [dataclasses.replace(row) for row in begun]


def refill(row: Row, run_dir: pathlib.Path, until: float = math.inf) -> Report | None:
    """Takes a member's returns from its files, and returns the last report there,
    without variables and checkpoint.

    If the files hold no report, the row stays as it is, and the result is None.

    Args:
      until: iteration after which reports do not count.
    """
    last = None
    for report in _reports(run_dir, until):
        if last is None:
            row.episode_return = None
            row.evaluation_return = None
            row.evaluation_info = {}
        row.take(report)
        last = report
    return last


def _reports(run_dir: pathlib.Path, until: float) -> Iterator[Report]:
    """Yields the reports in a run's files, up to an iteration.

    Skips damaged lines: others may have written the files, and a kill may have cut them.
    """
    content = b""
    with contextlib.suppress(ConfigError):
        content = storage.read_plain(run_dir / METRICS, _MAX_METRICS)
    end_counts, end = _end(run_dir)
    for line in content.splitlines():
        try:
            report = _report(json.loads(line))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            continue
        if report.iteration > until:
            return
        if (report.env_steps, report.updates) == end_counts:
            report = dataclasses.replace(report, **end)
        yield report


def _end(run_dir: pathlib.Path) -> tuple[tuple[int, int] | None, dict[str, Any]]:
    """Returns the env steps and updates of a run's last report, and the fields that its line
    misses, because it was written before the last evaluation.
    """
    with contextlib.suppress(ConfigError, LookupError, TypeError, AttributeError):
        summary = storage.read_json(run_dir / SUMMARY)
        counts = summary["env_steps"], summary["updates"]
        return counts, {
            "evaluation": _complete(summary["evaluation"] or {}),
            "best_evaluation": _complete(summary.get("best_evaluation") or {}),
            "ended_by": str(summary["ended_by"]),
        }
    return None, {}


def _report(line: Mapping[str, Any]) -> Report:
    """Returns the report of a line of ``metrics.jsonl``."""
    env_steps, updates, iteration = (int(line[name]) for name in _COUNTS)
    evaluation = {}
    metrics = dict.fromkeys(("episode/return", "time/compile_s", "time/env_steps_per_second"))
    for name, value in line.items():
        if name.startswith(_EVALUATION):
            evaluation[name.removeprefix(_EVALUATION)] = value
        elif name not in _COUNTS:
            metrics[name] = storage.finite(value)
    wall_time_s = metrics.pop("wall_time_s") or 0.0
    agent_steps = metrics.pop("agent_steps", None)
    return Report(
        env_steps,
        updates,
        iteration,
        wall_time_s,
        metrics,
        variables=_past,
        checkpoint=_past,
        evaluation=_complete(evaluation),
        agent_steps=None if agent_steps is None else int(agent_steps),
    )


def _complete(evaluation: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Returns the numbers of an evaluation; None if one is missing that all evaluations have."""
    numbers = {name: x for name, x in evaluation.items() if storage.finite(x) is not None}
    if {"episodes", "cut"} <= numbers.keys():
        return numbers
    return None


def _past() -> NoReturn:
    raise RuntimeError("this report is of an earlier session")
