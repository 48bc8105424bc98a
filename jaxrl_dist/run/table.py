"""The table of a run's reports: which metrics it shows, and the texts of its cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxrl_dist.checks import unit
from jaxrl_dist.types import Report

COLUMNS = {
    "episode/recent_return": "training return",
    "population/return_best": "best",
    "population/return_iqm": "IQM",
    "population/done": "done",
    "episode/recent_length": "length",
    "loss/total": "loss",
    "loss/policy": "policy loss",
    "loss/value": "value loss",
    "q/mean": "Q",
    "policy/approx_kl": "KL",
    "policy/entropy": "entropy",
    "async/lag": "lag",
}
"""Metrics that the table shows if a run has them, and their titles; ``_titles`` adds others."""
TRIMMED = 4
"""Fewest values of which an interquartile mean leaves any out; of fewer it is the mean."""
_RETURN = "episode/recent_return"
_TAKEN = {*COLUMNS.values(), "env steps", "agent steps", "updates", "steps/s", "left"}
"""Titles that no metric of ``--info-metrics`` gets."""


def _policies(metrics: Mapping[str, float | None]) -> list[str]:
    """Returns the names of several policies; of a single one, none."""
    return [name.removesuffix(f"/{_RETURN}") for name in metrics if name.endswith(f"/{_RETURN}")]


def progress(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Returns the metrics that say how good the policies are, and their titles.

    The mean over all agents says nothing where each of several policies has its own,
    as in a game of opponents.
    """
    policies = _policies(metrics)
    if not policies:
        return {_RETURN: COLUMNS[_RETURN]}
    returns = {f"{policy}/{_RETURN}": f"{policy} return" for policy in policies}
    ratings = {f"{policy}/elo": f"{policy} elo" for policy in policies}
    return returns | {name: title for name, title in ratings.items() if name in metrics}


def _titles(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Returns the metrics that the table may show, including ``--info-metrics``,
    and their titles.
    """
    titles = progress(metrics)
    for policy in _policies(metrics) or [""]:
        info = f"{policy}/info/".lstrip("/")
        for name in metrics:
            if name.startswith(info):
                title = f"{policy} {name.removeprefix(info)}".lstrip()
                # One that is called like a column, such as "length", keeps its whole name.
                titles[name] = name if title in _TAKEN else title
    return titles | {name: title for name, title in COLUMNS.items() if name != _RETURN}


def cells(report: Report, total_steps: int) -> dict[str, str]:
    """Returns a row of the table by the titles of its columns."""
    metrics = report.metrics
    # sums over the members, as is the total
    members = f"{len(report.members)} members' " if report.members else ""
    cells = {f"{members}{unit(report.clock)}": f"{report.step:,}"}
    if report.agent_steps is not None:
        cells[f"{members}agent steps"] = f"{report.agent_steps:,}"
    for name, title in _titles(metrics).items():
        if name == "population/return_iqm" and len(report.members or ()) < TRIMMED:
            title = "mean"
        if name in metrics:
            cells[title] = number(metrics[name])
    rate = metrics.get(f"time/{report.clock}_per_second") or 0.0
    cells["steps/s"] = f"{rate:,.0f}"
    left = max(total_steps - report.step, 0)
    seconds = None
    if rate:
        seconds = left / rate
    elif not left:
        seconds = 0.0
    cells["left"] = duration(seconds)
    return cells


def line(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Formats a time in its largest unit."""
    if seconds is None:
        return "-"
    for letters, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {letters}"
    return f"{seconds:.0f} s"
