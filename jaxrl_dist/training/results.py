"""The results of a population: its joined reports, a row for each member,
and the files that hold the rows.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import flat
from jaxrl_dist.plans.window import recent_return
from jaxrl_dist.run import storage
from jaxrl_dist.run.console import of_each_policy
from jaxrl_dist.run.files import METRICS, POPULATION, RESULTS, SUMMARY
from jaxrl_dist.types import Report

_FORMAT = 1
ENDED = "done", "halved"
"""Status of members that have ended with a result, which stays."""
_FAILED = "diverged", "failed"
_MAX_METRICS = 2**31  # bytes
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

    def take(self, report: Report) -> None:
        """Takes the returns, and metrics of the info, of the member's newest report."""
        if (value := recent_return(report.metrics)) is not None:
            self.episode_return = value
        if report.evaluation is not None:
            self.evaluation_return = report.evaluation.get("return_mean")
            self.evaluation_info = {
                _EVALUATION + name: x for name, x in report.evaluation.items() if "info/" in name
            }


def refill(row: Row, run_dir: pathlib.Path, until: float = math.inf) -> Report | None:
    """Takes a member's returns from its files, and returns the last report there,
    without variables and checkpoint.

    The row stays as it is, and the result is None, if the files hold no report.

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
    """Yields the reports in a run's files, up to an iteration; others may have written them,
    and a kill cut them.
    """
    content = b""
    counts = None
    end = dict[str, Any]()
    with contextlib.suppress(ConfigError):
        content = storage.read_plain(run_dir / METRICS, _MAX_METRICS)
    with contextlib.suppress(ConfigError, LookupError, TypeError, AttributeError):
        summary = storage.read_json(run_dir / SUMMARY)
        end = {name: _known(summary.get(name) or {}) for name in ("evaluation", "best_evaluation")}
        counts = (summary["env_steps"], summary["updates"])
        end["ended_by"] = str(summary["ended_by"])
    for line in content.splitlines():
        report = None
        with contextlib.suppress(
            LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError
        ):
            report = _report(json.loads(line))
        if report is not None and report.iteration > until:
            return
        if report is not None:  # the last evaluation comes after its line
            yield (
                dataclasses.replace(report, **end)
                if counts == (report.env_steps, report.updates)
                else report
            )


def _report(line: Mapping[str, Any]) -> Report:
    """Returns the report of a line of ``metrics.jsonl``."""
    env_steps, updates, iteration = (int(line[name]) for name in _COUNTS)
    evaluation = {
        name.removeprefix(_EVALUATION): x
        for name, x in line.items()
        if name.startswith(_EVALUATION)
    }
    others = {
        x: storage.finite(y)
        for x, y in line.items()
        if not x.startswith(_EVALUATION) and x not in _COUNTS
    }
    seconds = others.pop("wall_time_s") or 0.0
    agent_steps = others.pop("agent_steps", None)
    metrics = {
        **dict.fromkeys(("episode/return", "time/compile_s", "time/env_steps_per_second")),
        **others,
    }
    report = Report(
        env_steps, updates, iteration, seconds, metrics, _past, _past, _known(evaluation)
    )
    return dataclasses.replace(
        report, agent_steps=None if agent_steps is None else int(agent_steps)
    )


def _known(evaluation: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Returns the numbers of an evaluation; None if it has not all that every evaluation has."""
    known = {name: value for name, value in evaluation.items() if storage.finite(value) is not None}
    if {"episodes", "cut"} <= known.keys():
        return known
    return None


def _past() -> Any:
    raise RuntimeError("this report is of an earlier session")


def merged_rows(
    newest: Mapping[int, Report],
    new: Sequence[int],
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
) -> Report:
    """Joins the members' newest reports: counts are sums, metrics as ``JOINED`` says,
    evaluations as in ``_joined``.

    Variables and checkpoint (past if it has ended before
    others) are those of the member with the highest return.

    Args:
      new: members that have just reported; the rate of the population is the sum of theirs.
      groups: members that train at the same time; times are sums over the groups,
        which train one after another.
    """
    reports = [newest[number] for number in sorted(newest)]
    by_group = [list(filter(None, map(newest.get, group))) for group in groups]
    best = newest[_best(newest, new, rows)]
    return Report(
        env_steps=sum(row.env_steps for row in rows),
        updates=sum(report.updates for report in reports),
        iteration=sum(row.iteration for row in rows),
        wall_time_s=sum(
            max((report.wall_time_s for report in group), default=0.0) for group in by_group
        ),
        metrics=_metrics(newest, new, rows, by_group) | _of_rows(rows),
        variables=best.variables,
        checkpoint=best.checkpoint,
        evaluation=_evaluation(newest, rows, "evaluation"),
        best_evaluation=_evaluation(newest, rows, "best_evaluation"),
        ended_by=_ended_by(reports, rows),
        members=tuple(reports),
        clock=best.clock,
        agent_steps=sum(filter(None, (report.agent_steps for report in reports))) or None,
    )


def _ended_by(reports: Sequence[Report], rows: Sequence[Row]) -> str | None:
    """Returns what has ended the population; None while a member trains."""
    going = any(row.status == "training" for row in rows)
    if going:
        return None
    return max((report.ended_by for report in reports if report.ended_by), default=None)


def _best(newest: Mapping[int, Report], new: Sequence[int], rows: Sequence[Row]) -> int:
    """Returns the member with the highest score of those whose arrays are still there."""
    available = {*new, *(number for number in newest if rows[number].status in ENDED)}
    _, scores = scored(rows)
    return max(sorted(available), key=lambda number: (scores[number] is not None, scores[number]))


def _metrics(
    newest: Mapping[int, Report],
    new: Sequence[int],
    rows: Sequence[Row],
    groups: Sequence[Sequence[Report]],
) -> dict[str, float | None]:
    """Joins the metrics of the members that have not diverged;
    times and rate as ``merged_rows`` says.
    """
    joined: dict[str, float | None] = {}
    standing = [
        x for number, x in newest.items() if rows[number].status != "diverged" and not x.diverged
    ]
    for name in dict.fromkeys(
        itertools.chain(*(newest[number].metrics for number in sorted(newest)))
    ):
        if re.fullmatch(_SECONDS, name):
            joined[name] = sum(filter(None, (_metric(group, name) for group in groups)), 0.0)
        else:
            joined[name] = _metric(standing, name)
    joined.pop("population/parent", None)  # which only a member has
    return joined | {
        x: _metric([newest[number] for number in new], x) or 0.0
        for x in joined
        if re.fullmatch(_RATE, x)
    }


def _metric(reports: Sequence[Report], name: str) -> float | None:
    """Joins a metric of reports as ``JOINED`` says; None where none of them has a value."""
    values = [x for report in reports if (x := report.metrics.get(name)) is not None]
    join = next((join for pattern, join in JOINED.items() if re.fullmatch(pattern, name)), mean)
    if values:
        return join(values)
    return None


_SECONDS = "time/.*_s"
_RATE = "time/(env_steps|updates)_per_second"
JOINED: Mapping[str, Callable[[Sequence[float]], float | None]] = {
    "(.+/)?episode/count": sum,
    "(.+/)?episode/return_min": min,
    "(.+/)?episode/return_max": max,
    "(?!info/)[^/]+/updates": sum,  # of each of several policies
    r"async/(queue|sent|trained|dropped|restarts|lag/\d+)": sum,
    "async/lag_max": max,
    _SECONDS: max,  # of members that train at the same time
    _RATE: sum,
}
"""How the members' metrics are joined, by patterns of their names;
all others are means over the members."""


def _of_rows(rows: Sequence[Row]) -> dict[str, float | None]:
    """Returns the metrics that only a population has."""
    returns = [
        x for row in rows if row.status != "diverged" and (x := row.episode_return) is not None
    ]
    return {
        "population/return_best": max(returns, default=None),
        "population/return_iqm": iqm(returns),
        "population/done": float(sum(row.status == "done" for row in rows)),
    }


def _evaluation(
    newest: Mapping[int, Report], rows: Sequence[Row], field: str
) -> Mapping[str, float | int] | None:
    """Joins an evaluation of the members that have not ended early, policy by policy;
    None until all have one.
    """
    going = [
        newest.get(number) for number, row in enumerate(rows) if row.status in ("training", "done")
    ]
    known = [x for report in going if (x := getattr(report, field, None)) is not None]
    if len(known) >= max(1, len(going)):
        return joined(known)
    return None


def joined(evaluations: Sequence[Mapping[str, float | int]]) -> Mapping[str, float | int]:
    """Joins members' evaluations into one of all their episodes, policy by policy."""
    parts = [of_each_policy(evaluation) for evaluation in evaluations]
    policies = dict.fromkeys(itertools.chain(*parts))
    return flat(
        {policy: _joined([part[policy] for part in parts if policy in part]) for policy in policies}
    )


def _joined(evaluations: Sequence[Mapping[str, float | int]]) -> Mapping[str, float | int]:
    """Joins members' evaluations of one policy into that of all their episodes together.

    With several, ``members_return_std`` is the sample standard deviation (by n - 1) of the n
    ``members``' means. Numbers of the info are means over the members, weighted by episodes: how
    many episodes gave one is not known.
    """
    if len(evaluations) == 1:
        return evaluations[0]
    joined: dict[str, float | int] = {
        name: int(sum(x[name] for x in evaluations)) for name in ("episodes", "cut")
    }
    played = [x for x in evaluations if x["episodes"] > 0 and "return_mean" in x]
    # each its own
    names = [x for x in dict.fromkeys(itertools.chain(*played)) if x not in (*joined, "checkpoint")]
    joined |= {name: _average(name, played) for name in names}
    if "sampled" in joined:
        joined["sampled"] = True
    if len(played) < 2:
        return joined
    return {**joined, **_spread(played, joined["return_mean"])}


def _spread(played: Sequence[Mapping[str, float | int]], mean: float) -> dict[str, float | int]:
    """Returns the standard deviations of all episodes, whose mean return is ``mean``,
    and of the members' means.
    """
    means, stds = (
        np.array([x.get(name, 0.0) for x in played]) for name in ("return_mean", "return_std")
    )
    variance = float(
        np.average(stds**2 + (means - mean) ** 2, weights=[x["episodes"] for x in played])
    )
    return {
        "return_std": variance**0.5,
        "members": len(played),
        "members_return_std": float(means.std(ddof=1)),
    }


def _average(name: str, evaluations: Sequence[Mapping[str, Any]]) -> float:
    """Returns the mean of a number of the evaluations that have it, weighted by episodes."""
    known = [x for x in evaluations if name in x]
    return float(np.average([x[name] for x in known], weights=[x["episodes"] for x in known]))


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean; None if there are no values."""
    if values:
        return sum(values) / len(values)
    return None


def iqm(values: Sequence[float]) -> float | None:
    """Returns the interquartile mean (Agarwal et al. 2021, section 4.3); None if there are none."""
    from scipy import stats

    if values:
        return float(stats.trim_mean(values, 0.25))
    return None


def scored(rows: Sequence[Row]) -> tuple[str, list[float | None]]:
    """Returns which return ranks the members, a field of ``Row``, and each one's;
    None if it has failed or has none.

    It is that of the evaluation if all members that have not failed have one, otherwise that of
    training: the two kinds do not compare.
    """
    unknown = any(row.evaluation_return is None for row in rows if row.status not in _FAILED)
    field = "episode_return" if unknown else "evaluation_return"
    return field, [None if row.status in _FAILED else getattr(row, field) for row in rows]


def settings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the scores of each setting over its seeds, the best interquartile mean first.

    Each has the varied ``values``, the number of ``seeds`` with a score, the ``score``'s name, and
    the scores' ``iqm``, ``mean``, ``min`` and ``max``, which are None if there is no score.
    """
    groups: dict[str, list[tuple[Row, float | None]]] = {}
    name, scores = scored(rows)
    for row, score in zip(rows, scores, strict=True):
        groups.setdefault(repr(row.values), []).append((row, score))
    summaries = []
    for group in groups.values():
        known = [score for _, score in group if score is not None]
        numbers = {"iqm": iqm(known), "mean": mean(known), "min": min(known, default=None)}
        numbers |= {"max": max(known, default=None)}
        summaries.append(
            {"values": dict(group[0][0].values), "seeds": len(known), "score": name, **numbers}
        )
    return sorted(summaries, key=lambda x: (x["iqm"] is not None, x["iqm"]), reverse=True)


def table(rows: Sequence[Row], policy: str = "greedy") -> str:
    """Returns the settings and their scores as lines of text, the best first; ``policy``:
    that of evaluations.
    """
    summaries = settings(rows)
    names = {
        "iqm": f"{score_name(summaries[0]['score'], policy)}, iqm",
        "mean": "mean",
        "min": "min",
        "max": "max",
    }
    lines = [[*x["values"].values(), x["seeds"], *(x[name] for name in names)] for x in summaries]
    shown = [
        [*summaries[0]["values"], "seeds", *names.values()],
        *([_cell(x) for x in line] for line in lines),
    ]
    untrimmed = "The interquartile mean (iqm) of fewer than 4 is the mean: nothing is trimmed."
    return "\n".join(
        [aligned(shown), *([untrimmed] if any(0 < x["seeds"] < 4 for x in summaries) else [])]
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows of a table as lines of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in rows)


def score_name(field: str, policy: str) -> str:
    """Returns what a score is in words, such as ``greedy return``."""
    if field == "evaluation_return":
        return f"{policy} return"
    return "training return"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def read_rows(run_dir: pathlib.Path, begun: Sequence[Row]) -> list[Row]:
    """Returns the rows of a population's last session;
    copies of ``begun`` if its file is lost or damaged.
    """
    fields = {field.name for field in dataclasses.fields(Row)} - {"member", "seed", "values"}
    with contextlib.suppress(ConfigError, LookupError, TypeError, AttributeError, ValueError):
        stored = storage.read_json(run_dir / POPULATION)["members"]
        rows = zip(begun, ({"updates": 0, "evaluation_info": {}, **x} for x in stored), strict=True)
        return [
            dataclasses.replace(row, **{name: fields_of[name] for name in fields})
            for row, fields_of in rows
        ]
    return [dataclasses.replace(row) for row in begun]


def write_results(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes ``population.json`` and ``results.csv``.

    Raises:
      OSError: a file cannot be written.
    """
    members = [dataclasses.asdict(row) for row in rows]
    storage.write_json(
        path / POPULATION, {"format": _FORMAT, "members": members, "settings": settings(rows)}
    )
    table = io.StringIO()
    counts = "env_steps", "updates", "episode_return", "evaluation_return"
    info = dict.fromkeys(itertools.chain(*(row.evaluation_info for row in rows)))
    columns = ["member", "seed", *rows[0].values, "status", *counts, *info]
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [{**row.evaluation_info, **row.values, **vars(row)}.get(name) for name in columns]
        for row in rows
    )
    storage.write_text(path / RESULTS, table.getvalue())
