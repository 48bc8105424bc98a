"""Tables of a population's results: its settings by their scores, on the screen and in files."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxrl_dist.run import storage
from jaxrl_dist.run.files import POPULATION, RESULTS
from jaxrl_dist.run.table import TRIMMED
from jaxrl_dist.training.rows import Row, scored

_FORMAT = 1


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


def settings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the scores of each setting over its seeds, the best interquartile mean first.

    Each has the varied ``values``, the number of ``seeds`` with a score, the ``score``'s name, and
    the scores' ``iqm``, ``mean``, ``min`` and ``max``, which are None if there is no score.
    """
    field, scores = scored(rows)
    by_values: dict[str, list[tuple[Row, float | None]]] = {}
    for row, score in zip(rows, scores, strict=True):
        by_values.setdefault(repr(row.values), []).append((row, score))
    summaries = []
    for members in by_values.values():
        having = [score for _, score in members if score is not None]
        summaries.append(
            {
                "values": dict(members[0][0].values),
                "seeds": len(having),
                "score": field,
                "iqm": iqm(having),
                "mean": mean(having),
                "min": min(having, default=None),
                "max": max(having, default=None),
            }
        )
    return sorted(summaries, key=lambda x: (x["iqm"] is not None, x["iqm"]), reverse=True)


def table(rows: Sequence[Row], policy: str = "greedy") -> str:
    """Returns the settings and their scores as lines of text, the best first.

    An interquartile mean of fewer than four seeds trims nothing, so without a setting of four
    the table calls it the mean. ``policy`` is the policy of evaluations.
    """
    summaries = settings(rows)
    score = score_name(summaries[0]["score"], policy)
    most = max(summary["seeds"] for summary in summaries)
    if most >= TRIMMED:
        titles = {"iqm": f"{score}, iqm", "mean": "mean", "min": "min", "max": "max"}
    elif most > 1:
        titles = {"mean": f"{score}, mean", "min": "min", "max": "max"}
    else:
        titles = {"mean": score}
    lines = [[*summaries[0]["values"], "seeds", *titles.values()]]
    for summary in summaries:
        scores = [summary[name] for name in titles]
        lines.append([_cell(x) for x in (*summary["values"].values(), summary["seeds"], *scores)])
    return aligned(lines)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows of a table as lines of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in rows)


def score_name(field: str, policy: str) -> str:
    """Returns what a score is in words, such as ``greedy return``."""
    if field == "evaluation_return":
        return f"{policy} return"
    return "training return"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def write_results(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes ``population.json`` and ``results.csv``.

    Raises:
      OSError: a file cannot be written.
    """
    members = [dataclasses.asdict(row) for row in rows]
    storage.write_json(
        path / POPULATION, {"format": _FORMAT, "members": members, "settings": settings(rows)}
    )
    counts = "env_steps", "updates", "episode_return", "evaluation_return"
    info = dict.fromkeys(itertools.chain(*(row.evaluation_info for row in rows)))
    columns = ["member", "seed", *rows[0].values, "status", *counts, *info]
    lines = [{**row.evaluation_info, **row.values, **vars(row)} for row in rows]
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([line.get(name) for name in columns] for line in lines)
    storage.write_text(path / RESULTS, content.getvalue())
