"""Joins the reports and the evaluations of a population's members into one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from jaxrl_dist.actors import pool
from jaxrl_dist.mesh import flat
from jaxrl_dist.plans import clock, dataflow, synchronous
from jaxrl_dist.plans import report as reports
from jaxrl_dist.run.console import of_each_policy
from jaxrl_dist.training import truth
from jaxrl_dist.training.rows import ENDED, Row, scored
from jaxrl_dist.training.tables import iqm, mean
from jaxrl_dist.types import Join, Report

_JOINS: Mapping[str, Join] = {
    **pool.JOINS,
    **clock.JOINS,
    **reports.JOINS,
    **dataflow.JOINS,
    **synchronous.JOINS,
    **truth.JOINS,
}
_FUNCTIONS: Mapping[Join, Callable[[Sequence[float]], float | None]] = {
    Join.MEAN: mean,
    Join.SUM: sum,
    Join.MIN: min,
    Join.MAX: max,
}
_Evaluation = Mapping[str, float | int]


def join_reports(
    newest: Mapping[int, Report],
    new: Sequence[int],
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    policies: Collection[str] = (),
) -> Report:
    """Joins the members' newest reports: counts are sums, metrics as their makers declare in
    ``JOINS``, evaluations as ``join_evaluations`` does.

    The member with the highest return gives variables and checkpoint; they are past if it has ended
    before others.

    Args:
      new: members that have just reported.
      groups: members that train at the same time; the groups train one after another.
      policies: names of several policies.
    """
    by_group = [[newest[number] for number in group if number in newest] for group in groups]
    members = [newest[number] for number in sorted(newest)]
    best = newest[_best(newest, new, rows)]
    return Report(
        env_steps=sum(row.env_steps for row in rows),
        updates=sum(report.updates for report in members),
        iteration=sum(row.iteration for row in rows),
        wall_time_s=sum(
            max((report.wall_time_s for report in group), default=0.0) for group in by_group
        ),
        metrics=_metrics(newest, new, rows, by_group, policies) | _of_rows(rows),
        variables=best.variables,
        checkpoint=best.checkpoint,
        config=best.config,
        evaluation=_evaluation(newest, rows, "evaluation"),
        best_evaluation=_evaluation(newest, rows, "best_evaluation"),
        ended_by=_ended_by(members, rows),
        members=tuple(members),
        clock=best.clock,
        agent_steps=sum(filter(None, (report.agent_steps for report in members))) or None,
    )


def _best(newest: Mapping[int, Report], new: Sequence[int], rows: Sequence[Row]) -> int:
    """Returns the member with the highest score of those whose arrays are still there."""
    available = {*new, *(number for number in newest if rows[number].status in ENDED)}
    _, scores = scored(rows)
    return max(sorted(available), key=lambda number: (scores[number] is not None, scores[number]))


def _ended_by(members: Sequence[Report], rows: Sequence[Row]) -> str | None:
    """Returns what has ended the population; None while a member trains."""
    if any(row.status == "training" for row in rows):
        return None
    return max((report.ended_by for report in members if report.ended_by), default=None)


# --- Metrics --------------------------------------------------------------------------------------


def _metrics(
    newest: Mapping[int, Report],
    new: Sequence[int],
    rows: Sequence[Row],
    groups: Sequence[Sequence[Report]],
    policies: Collection[str],
) -> dict[str, float | None]:
    """Joins the metrics; those that are not times or rates without members that have diverged."""
    standing = [
        report
        for number, report in newest.items()
        if rows[number].status != "diverged" and not report.diverged
    ]
    reporting = [newest[number] for number in new]
    names = dict.fromkeys(itertools.chain(*(newest[number].metrics for number in sorted(newest))))
    names.pop("population/parent", None)  # which only a member has
    metrics: dict[str, float | None] = {}
    for name in names:
        join = _join_of(name, policies)
        if join is Join.SECONDS:
            metrics[name] = sum((max(_values(group, name), default=0.0) for group in groups), 0.0)
        elif join is Join.RATE:
            metrics[name] = sum(_values(reporting, name)) or 0.0
        else:
            values = _values(standing, name)
            metrics[name] = _FUNCTIONS[join](values) if values else None
    return metrics


def _join_of(name: str, policies: Collection[str]) -> Join:
    """Returns how a metric, of all policies or of one of several, is joined."""
    folder = name[: name.rfind("/") + 1]
    declared = _JOINS.get(name) or _JOINS.get(folder)
    if declared is not None:
        return declared
    policy, _, own_name = name.partition("/")
    if policy in policies:
        return _join_of(own_name, ())
    return Join.MEAN


def _values(members: Sequence[Report], name: str) -> list[float]:
    """Returns a metric's values of the members that have one."""
    values = (report.metrics.get(name) for report in members)
    return [value for value in values if value is not None]


def _of_rows(rows: Sequence[Row]) -> dict[str, float | None]:
    """Returns the metrics that only a population has."""
    standing = (row.episode_return for row in rows if row.status != "diverged")
    returns = [episode_return for episode_return in standing if episode_return is not None]
    return {
        "population/return_best": max(returns, default=None),
        "population/return_iqm": iqm(returns),
        "population/done": float(sum(row.status == "done" for row in rows)),
    }


# --- Evaluations ----------------------------------------------------------------------------------


def _evaluation(
    newest: Mapping[int, Report], rows: Sequence[Row], field: str
) -> _Evaluation | None:
    """Joins an evaluation of the members that have not ended early; None until all have one."""
    going = [number for number, row in enumerate(rows) if row.status in ("training", "done")]
    evaluations = (getattr(newest.get(number), field, None) for number in going)
    played = [evaluation for evaluation in evaluations if evaluation is not None]
    if not played or len(played) < len(going):
        return None
    return join_evaluations(played)


def join_evaluations(evaluations: Sequence[_Evaluation]) -> _Evaluation:
    """Joins members' evaluations into one of all their episodes, policy by policy."""
    by_policy = [of_each_policy(evaluation) for evaluation in evaluations]
    policies = dict.fromkeys(itertools.chain(*by_policy))
    return flat(
        {
            policy: _join_of_policy([member[policy] for member in by_policy if policy in member])
            for policy in policies
        }
    )


def _join_of_policy(evaluations: Sequence[_Evaluation]) -> _Evaluation:
    """Joins members' evaluations of one policy into one of all their episodes.

    With several, ``members_return_std`` is the sample standard deviation (by n - 1) of the n
    ``members``' means. Numbers of the info are means over the members, weighted by episodes: how
    many episodes gave one is not known.
    """
    if len(evaluations) == 1:
        return evaluations[0]
    joined: dict[str, float | int] = {
        name: int(sum(evaluation[name] for evaluation in evaluations))
        for name in ("episodes", "cut")
    }
    played = [x for x in evaluations if x["episodes"] > 0 and "return_mean" in x]
    for name in dict.fromkeys(itertools.chain(*played)):
        if name not in ("episodes", "cut", "checkpoint"):  # each member has its own checkpoint
            joined[name] = _average(name, played)
    if "sampled" in joined:
        joined["sampled"] = True
    if len(played) > 1:
        joined |= _spread(played, joined["return_mean"])
    return joined


def _average(name: str, evaluations: Sequence[_Evaluation]) -> float:
    """Returns the mean of a number of the evaluations that have it, weighted by episodes."""
    having = [x for x in evaluations if name in x]
    return float(np.average([x[name] for x in having], weights=[x["episodes"] for x in having]))


def _spread(played: Sequence[_Evaluation], mean: float) -> dict[str, float | int]:
    """Returns the standard deviations of all episodes, whose mean return is ``mean``,
    and of the members' means.
    """
    means = np.array([x.get("return_mean", 0.0) for x in played])
    stds = np.array([x.get("return_std", 0.0) for x in played])
    variance = float(
        np.average(stds**2 + (means - mean) ** 2, weights=[x["episodes"] for x in played])
    )
    return {
        "return_std": variance**0.5,
        "members": len(played),
        "members_return_std": float(means.std(ddof=1)),
    }
