"""Final scores of groups of runs: as tables, and as captions of pictures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_dist.checks import counted
from jaxrl_dist.commands.plot import statistics
from jaxrl_dist.commands.plot.reading import AXES, FINAL, SAME_CURVE, Curve, Group

ALL = "all environments, scaled"
"""Row of a table over several environments."""
TELLS = {
    "curve": "Thick lines and bands: interquartile mean over the seeds of a group, and its {interval}; dotted where "
    "only some of them have values, as others have not begun or have ended; thin lines: runs.",
    "profile": "Fraction of runs whose final score is above the score on the axis; bands: {interval}.",
    "improvement": "Probability that a run of the first group has a higher final score than one of the second, the "
    "mean over environments; bars: {interval}. At 0.5 neither is better.",
}
"""What a picture of each kind shows."""


def env_names(groups: Sequence[Group]) -> dict[str, str]:
    """Returns a short name for each environment: without the backend, unless two would be the same."""
    envs = list(dict.fromkeys(group.env for group in groups))
    short = [env.split(":", 1)[-1] for env in envs]
    return dict(zip(envs, short if len(set(short)) == len(short) else envs, strict=True))


def scores(groups: Sequence[Group], curves: Mapping[str, Curve]) -> dict[str, dict[str, np.ndarray]]:
    """Returns the final scores ``[N]`` of each label's N runs, by environment; scaled if there are several."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for group in groups:
        found.setdefault(group.label, {})[group.env] = np.array([curves[name].final() for name in group.runs])
    envs = {group.env for group in groups}
    if len(envs) > 1:
        for env in envs:
            together = np.concatenate([each[env] for each in found.values() if env in each])
            low, span = together.min(), float(np.ptp(together)) or 1.0
            for each in found.values():
                if env in each:
                    each[env] = (each[env] - low) / span
    return found


def score_name(metric: str, evaluated: str | None) -> str:
    """Returns what a final score is, in words; ``evaluated``: the policy of the evaluation that it is of, if any."""
    return (
        f"final {metric}" if evaluated is None else f"{evaluated} {metric.removeprefix('*/').replace('episode/', '')}"
    )


def table(
    groups: Sequence[Group],
    curves: Mapping[str, Curve],
    metric: str,
    evaluated: str | None = None,
    *,
    as_csv: bool = False,
) -> str:
    """Returns the mean, the interquartile mean and its interval of final scores, as Markdown or CSV.

    In each environment, the highest interquartile mean comes first. ``evaluated`` is as for ``score_name``.
    """
    rows: list[tuple[str, ...]] = []
    names = env_names(groups)
    for env, name in names.items():
        final = {x.label: [np.array([curves[run].final() for run in x.runs])] for x in groups if x.env == env}
        rows += _ranked(name, final)
    if len(names) > 1:
        rows += _ranked(ALL, {label: list(each.values()) for label, each in scores(groups, curves).items()})
    name = score_name(metric, evaluated)
    head = ("environment", "group", "runs", f"{name}, mean", f"{name}, IQM", "low", "high")
    if as_csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([head, *rows])
        return text.getvalue().rstrip()
    cells: list[tuple[str, ...]] = [(*head[:5], f"{statistics.CONFIDENCE:.0%} interval")]
    cells += [(*row[:5], f"{row[5]} .. {row[6]}") for row in rows]
    cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (n + 2) for n in widths) + "|")
    trimmed = "IQM: interquartile mean; of fewer than 4 runs nothing is trimmed, so it is the mean."
    return "\n".join([*lines, "", *_meaning(metric, evaluated, len(names)), trimmed])


def _meaning(metric: str, evaluated: str | None, envs: int) -> list[str]:
    name = score_name(metric, evaluated)
    trained = "the mean of training over the last tenth of each run"
    what = trained if evaluated is None else "the mean over the episodes of the evaluation that ends each run"
    scaled = ["Over environments, scores are scaled: 0 is the lowest of all runs in an environment, 1 the highest."]
    return [f"{name[0].upper()}{name[1:]}: {what}.", *(scaled if envs > 1 else [])]


def _ranked(env: str, samples: Mapping[str, statistics.Strata]) -> list[tuple[str, ...]]:
    """Returns a row for each label, the highest interquartile mean first."""
    rows = []
    for label in sorted(samples, key=lambda label: -statistics.iqm(samples[label])):
        strata = samples[label]
        values = statistics.mean(strata), statistics.iqm(strata), *statistics.interval(strata, statistics.iqm)
        rows.append((env, label, str(sum(map(len, strata))), *(f"{float(value):.4g}" for value in values)))
    return rows


def caption(
    kind: str,
    groups: Sequence[Group],
    curves: Mapping[str, Curve],
    configs: Mapping[str, Mapping[str, Any]],
    metric: str,
    x: str,
    smooth: int,
    evaluated: str | None = None,
) -> str:
    """Returns the text beside a picture: what it shows, and the runs and settings of each group."""
    interval = f"{statistics.CONFIDENCE:.0%} bootstrap interval (Agarwal et al. 2021)"
    lines = [TELLS[kind].format(interval=interval)]
    if kind == "curve":
        average = f", as a moving average over {smooth} reports" if smooth > 1 else ""
        lines.insert(0, f"{metric} by {AXES[x][1]}{average}.")
    else:
        lines += _meaning(metric, evaluated, len({group.env for group in groups}))
    for group in groups:
        config = configs[group.runs[0]]
        seeds = sorted(str(configs[name]["run"].get("seed")) for name in group.runs)
        ends = [float(curves[name].x[-1]) for name in group.runs]
        number = ",.0f" if x == "steps" else ",.1f"
        until = f"{max(ends):{number}} {AXES[x][1] if x == 'steps' else 's'}"
        if min(ends) < (1 - FINAL) * max(ends):
            until = f"{min(ends):{number}} to {until}"
        settings = {**config["hyperparameters"], **config["run"]}
        shown = [f"{key}={json.dumps(value)}" for key, value in settings.items() if key not in {*SAME_CURVE, "env"}]
        lines += [
            "",
            f"{group.env}, {group.label}: {config['algorithm']}, {counted(len(group.runs), 'run')} "
            f"(seeds {' '.join(seeds)}), {until}.",
            f"  {' '.join(shown)}",
        ]
    return "\n".join(lines) + "\n"
