"""Final scores of groups of runs: as tables, and as captions of pictures."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_dist.checks import counted
from jaxrl_dist.commands.plot import statistics
from jaxrl_dist.commands.plot.reading import AXES, FINAL, SAME_CURVE, Config, Curve, Group, Plot

ALL = "all environments, scaled"
"""Row of a table over several environments."""
TELLS = {
    "curve": "Thick lines: interquartile mean over the seeds of a group (mean, if it has 2 or 3), dotted where only "
    "some of them have values, as others have not begun or have ended; bands, for groups of 5 or more seeds: its "
    "{interval}; thin lines: runs.",
    "profile": "Fraction of runs with a final score above the score on the axis; bands: {interval}.",
    "improvement": "Probability that a run of the first group has a higher final score than one of the second, the "
    "mean over environments; bars: {interval}. At 0.5 neither is better.",
}
"""What a picture of each kind shows."""


JOINED = (
    " A last report of less than half an interval is joined to the one before, weighted by episodes "
    "or else env steps."
)
"""How the last point of a curve is made."""
TERMS = (
    "std: standard deviation of the runs (divisor: their number less one).",
    "IQM: interquartile mean; of fewer than 4 runs nothing is trimmed, so it is the mean, and the "
    "interval in an environment reaches from the lowest run to the highest.",
)
"""What the columns of a table are."""


def env_names(groups: Sequence[Group]) -> dict[str, str]:
    """Returns a short name for each environment: without the backend, unless two would be the
    same.
    """
    envs = list(dict.fromkeys(group.env for group in groups))
    short = [env.split(":", 1)[-1] for env in envs]
    return dict(zip(envs, short if len(set(short)) == len(short) else envs, strict=True))


def _full_name(env: str) -> str:
    """Returns an environment's name with its backend, or the user's own as ``MODULE:NAME``."""
    name = env.partition(":")[2]
    return name if ":" in name else env


def scores(
    groups: Sequence[Group], curves: Mapping[str, Curve]
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the final scores ``[N]`` of each label's N runs, by environment;
    scaled if there are several.
    """
    labels = _finals(groups, curves)
    envs = {group.env for group in groups}
    for env in envs if len(envs) > 1 else ():
        runs = np.concatenate([finals[env] for finals in labels.values() if env in finals])
        for finals in labels.values():
            if env in finals:
                finals[env] = (finals[env] - runs.min()) / (float(np.ptp(runs)) or 1.0)
    return labels


def complete(
    scores: Mapping[str, dict[str, np.ndarray]],
) -> tuple[dict[str, dict[str, np.ndarray]], list[str]]:
    """Returns the labels with scores in all environments, and the names of the others."""
    envs = {env for finals in scores.values() for env in finals}
    whole = {label: finals for label, finals in scores.items() if finals.keys() == envs}
    return whole or dict(scores), [label for label in scores if whole and label not in whole]


def left_out(labels: Sequence[str]) -> str:
    """Says which labels are left out of a comparison over all environments."""
    return f"over all environments, {', '.join(labels)} is left out: some have no run of it"


def _finals(
    groups: Sequence[Group], curves: Mapping[str, Curve]
) -> dict[str, dict[str, np.ndarray]]:
    """Returns ``scores`` that are not scaled."""
    labels: dict[str, dict[str, np.ndarray]] = {}
    for group in groups:
        labels.setdefault(group.label, {})[group.env] = np.array(
            [curves[name].final() for name in group.runs]
        )
    return labels


def table(
    groups: Sequence[Group],
    curves: Mapping[str, Curve],
    name: str,
    score: str = "training",
    form: str = "md",
) -> str:
    """Returns the mean, the interquartile mean and its interval of final scores.

    In each environment, the highest interquartile mean comes first.

    Args:
      name: what the scores are.
      score: as ``Plot.score``.
      form: one of ``reading.FORMS``.
    """
    rows: list[tuple[str, ...]] = []
    envs = env_names(groups)
    labels = _finals(groups, curves)
    for env, shown in envs.items():
        rows += _ranked(
            shown, {label: [finals[env]] for label, finals in labels.items() if env in finals}
        )
    whole, partial = complete(scores(groups, curves))
    if len(envs) > 1:
        rows += _ranked(ALL, {label: list(finals.values()) for label, finals in whole.items()})
    head = ("environment", "group", "runs", f"{name}, mean", "std", f"{name}, IQM", "low", "high")
    if form == "csv":
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([head, *rows])
        return file.getvalue().rstrip()
    lines = [
        (*head[:6], f"{statistics.CONFIDENCE:.0%} interval"),
        *((*row[:6], " .. ".join(filter(None, row[6:]))) for row in rows),
    ]
    notes = _meaning(name, score, len(envs))
    if partial:
        notes.append(f"{left_out(partial)}.")
    notes += TERMS
    if form == "tex":
        return "\n".join(_latex(lines, notes))
    return "\n".join([*_markdown(lines), "", *notes])


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table; its first row is the head."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (n + 2) for n in widths) + "|", *lines[1:]]


_LATEX = str.maketrans(
    {**{x: f"\\{x}" for x in "%_&#${}"}, "^": r"\^{}", "~": r"\~{}", "\\": r"\textbackslash{}", "|": r"\textbar{}",
     "<": r"\textless{}", ">": r"\textgreater{}"}
)  # fmt: skip


def _latex(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> list[str]:
    """Returns the lines of a table; its first row is the head, and the notes as comments."""
    cells = [
        [re.sub(r"(?<!\w)-(?=\d)", "$-$", cell.translate(_LATEX)) for cell in row] for row in rows
    ]
    head, *body = (" & ".join(row) + r" \\" for row in cells)
    return [
        r"% Needs \usepackage{booktabs}.",
        rf"\begin{{tabular}}{{ll{'r' * (len(rows[0]) - 2)}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        *(f"% {note}" for note in notes),
    ]


MEANS = {
    "training": "the mean of the reports in the last tenth of each run, weighted by their episodes or else env steps; "
    "a last report of less than half an interval is joined to the one before",
    "evaluation": "the mean over the episodes of the evaluation that ends each run",
}
"""What the final score of a run is, by ``Plot.score``."""


def _meaning(name: str, score: str, envs: int) -> list[str]:
    meaning = [f"{name[0].upper()}{name[1:]}: {MEANS[score]}."]
    if envs > 1:
        meaning.append(
            "Over environments, scores are scaled: 0 is the lowest of all runs in an environment, "
            "1 the highest."
        )
    return meaning


def _ranked(env: str, samples: Mapping[str, statistics.Strata]) -> list[tuple[str, ...]]:
    """Returns a row for each label, the highest interquartile mean first;
    without an interval where a run is alone.
    """
    rows: list[tuple[str, ...]] = []
    for label in sorted(samples, key=lambda label: -statistics.iqm(samples[label])):
        strata = samples[label]
        std = low = high = ""
        # a single run says nothing about how far others are from it
        if any(len(runs) > 1 for runs in strata):
            if len(strata) == 1:
                std = _shown(np.std(strata[0], ddof=1))
            bounds = statistics.interval(strata, statistics.iqm, statistics.NUMBER)
            low, high = map(_shown, bounds)
        mean = _shown(statistics.mean(strata))
        iqm = _shown(statistics.iqm(strata))
        rows.append((env, label, str(sum(map(len, strata))), mean, std, iqm, low, high))
    return rows


def _shown(value: Any) -> str:
    return f"{float(value):.4g}"


def caption(
    plot: Plot,
    groups: Sequence[Group],
    curves: Mapping[str, Curve],
    configs: Mapping[str, Config],
    score: str,
) -> str:
    """Returns the text beside a picture: what it shows, and the runs and settings of each group.

    Args:
      score: what the scores are.
    """
    tells = TELLS[plot.kind].format(
        interval=f"{statistics.CONFIDENCE:.0%} bootstrap interval (Agarwal et al. 2021)"
    )
    if plot.kind == "curve":
        average = ""
        if plot.smooth > 1:
            average = (
                f"; each point is the mean of the newest {plot.smooth} reports up to it, "
                "of fewer at the start"
            )
        lines = [f"{plot.metric} by {AXES[plot.x][1]}{average}.{JOINED}", tells]
    else:
        lines = [tells, *_meaning(score, plot.score, len({group.env for group in groups}))]
    for group in groups:
        config = configs[group.runs[0]]
        seeds = map(str, sorted(configs[name]["run"]["seed"] for name in group.runs))
        settings = {**config["hyperparameters"], **config["run"]}
        shown = [
            f"{key}={json.dumps(value)}"
            for key, value in settings.items()
            if key not in {*SAME_CURVE, "env"}
        ]
        lines += [
            "",
            f"{_full_name(group.env)}, {group.label}: {config['algorithm']}, "
            f"{counted(len(group.runs), 'run')} (seeds {' '.join(seeds)}), "
            f"{_length(group, curves, plot.x)}.",
            f"  {' '.join(shown)}",
        ]
    return "\n".join(lines) + "\n"


def _length(group: Group, curves: Mapping[str, Curve], axis: str) -> str:
    """Says how long the runs of a group are."""
    first, last = group.ends(curves)
    form, unit = (",.1f", "s") if axis == "time" else (",.0f", AXES[axis][1])
    if first < (1 - FINAL) * last:
        return f"{first:{form}} to {last:{form}} {unit}"
    return f"{last:{form}} {unit}"
