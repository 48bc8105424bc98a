"""The results of a population: its joined reports, a row for each member, and the files that hold the rows."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import text
from jaxrl_dist.run.checkpoint import finite
from jaxrl_dist.run.files import METRICS, POPULATION, RESULTS, SUMMARY
from jaxrl_dist.types import Report

_FORMAT = 1
ENDED = "done", "halved"
"""Status of members that have ended with a result, which stays."""
_MAX_METRICS = 2**31  # bytes
_COUNTS, _EVALUATION = ("env_steps", "updates", "iteration"), "evaluation/"


@dataclasses.dataclass
class Row:
    """A member's entry in the population's results."""

    member: str
    """Its directory's name."""
    seed: int
    values: Mapping[str, Any]
    """The hyperparameters in which members differ."""
    status: str = "training"
    """``training``, ``done``, ``halved`` (ended by successive halving), ``diverged``, or ``failed`` in a sweep."""
    env_steps: int = 0
    iteration: int = 0
    episode_return: float | None = None
    """Mean return of the newest report with finished episodes."""
    evaluation_return: float | None = None
    """Mean return of the newest evaluation."""
    lineage: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """With population-based training: env steps, iteration, parent and new hyperparameters of each copy."""

    @property
    def score(self) -> float | None:
        """The return that ranks members: of the evaluation, or else of training; None if the member has failed."""
        if self.status in ("diverged", "failed"):
            return None
        return self.episode_return if self.evaluation_return is None else self.evaluation_return

    def take(self, report: Report) -> None:
        """Takes the returns of the member's newest report."""
        if (value := report.metrics["episode/return"]) is not None:
            self.episode_return = value
        if report.evaluation is not None:
            self.evaluation_return = report.evaluation.get("return_mean")


def refill(row: Row, run_dir: pathlib.Path, until: float = math.inf) -> Report | None:
    """Takes a member's returns from its files, and returns the last report there, without variables and checkpoint.

    The row stays as it is, and the result is None, if the files hold no report.

    Args:
      until: iteration after which reports do not count.
    """
    last = None
    for report in _reports(run_dir, until):
        if last is None:
            row.episode_return = row.evaluation_return = None
        row.take(report)
        last = report
    return last


def _reports(run_dir: pathlib.Path, until: float) -> Iterator[Report]:
    """Yields the reports in a run's files, up to an iteration; others may have written them, and a kill cut them."""
    content, counts, end = b"", None, dict[str, Any]()
    with contextlib.suppress(ConfigError):
        content = text.read_plain(run_dir / METRICS, _MAX_METRICS)
    with contextlib.suppress(ConfigError, LookupError, TypeError, AttributeError):
        summary = text.read_json(run_dir / SUMMARY)
        end = {"ended_by": str(summary["ended_by"]), "evaluation": _known(summary["evaluation"] or {})}
        counts = summary["env_steps"], summary["updates"]
    for line in content.splitlines():
        report = None
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            report = _report(json.loads(line))
        if report is not None and report.iteration > until:
            return
        if report is not None:  # the last evaluation comes after its line
            yield dataclasses.replace(report, **end) if counts == (report.env_steps, report.updates) else report


def _report(line: Mapping[str, Any]) -> Report:
    """Returns the report of a line of ``metrics.jsonl``."""
    env_steps, updates, iteration = (int(line[name]) for name in _COUNTS)
    evaluation = {name.removeprefix(_EVALUATION): x for name, x in line.items() if name.startswith(_EVALUATION)}
    others = {name: finite(line[name]) for name in line if not name.startswith(_EVALUATION) and name not in _COUNTS}
    seconds, agent_steps = others.pop("wall_time_s") or 0.0, others.pop("agent_steps", None)
    metrics = {**dict.fromkeys(("episode/return", "time/compile_s", "time/env_steps_per_second")), **others}
    report = Report(env_steps, updates, iteration, seconds, metrics, _past, _past, _known(evaluation))
    return dataclasses.replace(report, agent_steps=None if agent_steps is None else int(agent_steps))


def _known(evaluation: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Returns the numbers of an evaluation; None if it has not all that every evaluation has."""
    known = {name: value for name, value in evaluation.items() if finite(value) is not None}
    return known if {"episodes", "cut"} <= known.keys() else None


def _past() -> Any:
    raise RuntimeError("this report is of an earlier session")


def together(
    newest: Mapping[int, Report], new: Sequence[int], rows: Sequence[Row], groups: Sequence[Sequence[int]]
) -> Report:
    """Joins the members' newest reports: counts are sums, metrics means over the members.

    Variables and checkpoint are those of the member with the highest return.

    Args:
      new: members that have just reported; the rate of the population is the sum of theirs.
      groups: members that train at the same time; times are sums over the groups, which train one after another.
    """
    reports = [newest[number] for number in sorted(newest)]
    by_group = [found for group in groups if (found := [newest[number] for number in group if number in newest])]
    names = dict.fromkeys(name for report in reports for name in report.metrics)
    metrics = {name: mean([report.metrics.get(name) for report in reports]) for name in names}
    returns = [row.episode_return for row in rows if row.episode_return is not None]
    agent_steps = [report.agent_steps for report in reports if report.agent_steps is not None]
    going = [number for number, row in enumerate(rows) if row.status != "diverged"]
    evaluations = [x for number in going if number in newest and (x := newest[number].evaluation) is not None]
    over = all(row.status != "training" for row in rows)
    ended_by = [report.ended_by for report in reports if report.ended_by]
    there = {*new, *(number for number in newest if rows[number].status in ENDED)}  # others' arrays may be gone
    best = max(sorted(there), key=lambda number: (rows[number].score is not None, rows[number].score))
    return Report(
        env_steps=sum(row.env_steps for row in rows),
        updates=sum(report.updates for report in reports),
        iteration=sum(row.iteration for row in rows),
        wall_time_s=sum(max(report.wall_time_s for report in group) for group in by_group),
        metrics={
            **metrics,
            "time/compile_s": sum(
                max(report.metrics["time/compile_s"] or 0.0 for report in group) for group in by_group
            ),
            "time/env_steps_per_second": sum(newest[x].metrics["time/env_steps_per_second"] or 0.0 for x in new),
            "population/return_best": max(returns, default=None),
            "population/return_iqm": iqm(returns),
            "population/done": float(sum(row.status == "done" for row in rows)),
        },
        variables=newest[best].variables,
        checkpoint=newest[best].checkpoint,
        evaluation=_evaluation(evaluations) if len(evaluations) == len(going) else None,
        ended_by=max(ended_by, default=None) if over else None,
        members=tuple(reports),
        agent_steps=sum(agent_steps) if agent_steps else None,
    )


def _evaluation(evaluations: Sequence[Mapping[str, float | int]]) -> Mapping[str, float | int]:
    """Joins the members' evaluations: means over the members, and sums of the numbers of episodes."""
    names = dict.fromkeys(name for x in evaluations for name in x)
    means = {name: mean([x.get(name) for x in evaluations]) or 0.0 for name in names}
    return means | {name: int(sum(x[name] for x in evaluations)) for name in ("episodes", "cut")}


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def iqm(values: Sequence[float]) -> float | None:
    """Returns the interquartile mean (Agarwal et al. 2021, section 4.3); None if there are none."""
    from scipy import stats

    return float(stats.trim_mean(values, 0.25)) if values else None


def settings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the scores of each setting over its seeds, the best interquartile mean first.

    Each has the varied ``values``, the number of ``seeds`` with a score, and their ``iqm``, ``mean``, ``min`` and
    ``max``, which are None if there is no score.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr(row.values), []).append(row)
    found = []
    for group in groups.values():
        scores = [row.score for row in group if row.score is not None]
        extremes = {"min": min(scores, default=None), "max": max(scores, default=None)}
        known = {"seeds": len(scores), "iqm": iqm(scores), "mean": mean(scores), **extremes}
        found.append({"values": dict(group[0].values), **known})
    return sorted(found, key=lambda x: (x["iqm"] is not None, x["iqm"]), reverse=True)


def table(rows: Sequence[Row]) -> str:
    """Returns the settings and their scores as lines of text, the best first."""
    found = settings(rows)
    header = [*found[0]["values"], "seeds", "iqm", "mean", "min", "max"]
    lines = [[*x["values"].values(), *(x[name] for name in header[len(x["values"]) :])] for x in found]
    shown = [header, *([_cell(x) for x in line] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join("  ".join(x.rjust(width) for x, width in zip(line, widths, strict=True)) for line in shown)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def read_rows(run_dir: pathlib.Path, begun: Sequence[Row]) -> list[Row]:
    """Returns the rows of a population's last session; copies of ``begun`` if its file is lost or damaged."""
    fields = {field.name for field in dataclasses.fields(Row)} - {"member", "seed", "values"}
    with contextlib.suppress(ConfigError, LookupError, TypeError, AttributeError, ValueError):
        kept = text.read_json(run_dir / POPULATION)["members"]
        rows = zip(begun, kept, strict=True)
        return [dataclasses.replace(row, **{name: there[name] for name in fields}) for row, there in rows]
    return [dataclasses.replace(row) for row in begun]


def write_results(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes ``population.json`` and ``results.csv``.

    Raises:
      OSError: a file cannot be written.
    """
    text.write_json(
        path / POPULATION,
        {"format": _FORMAT, "members": [dataclasses.asdict(row) for row in rows], "settings": settings(rows)},
    )
    table = io.StringIO()
    columns = ["member", "seed", *rows[0].values, "status", "env_steps", "episode_return", "evaluation_return"]
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([getattr(row, name, row.values.get(name)) for name in columns] for row in rows)
    text.write_text(path / RESULTS, table.getvalue())
