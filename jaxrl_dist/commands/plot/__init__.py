"""``jaxrl-dist plot``: plots learning curves of finished and running runs, and compares their final scores."""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from jaxrl_dist.checks import check_range, check_used, did_you_mean
from jaxrl_dist.commands import flags, help
from jaxrl_dist.commands.plot.reading import (
    AXES,
    FINAL,
    POINTS,
    SAME_CURVE,
    Curve,
    Group,
    Middle,
    NoValueError,
    group,
    metrics_of,
    middle,
    read_config,
    read_curve,
    read_evaluation,
    with_members,
)
from jaxrl_dist.errors import ConfigError, ConfigWarning, visible
from jaxrl_dist.run.atomic_files import replacing

__all__ = [
    "POINTS",
    "SAME_CURVE",
    "Curve",
    "Group",
    "Middle",
    "group",
    "middle",
    "plot",
    "read_curve",
    "run",
    "with_members",
]

Kind = Literal["curve", "profile", "improvement", "table"]
Score = Literal["training", "evaluation"]
Width = Literal["one", "two"]


@dataclasses.dataclass(frozen=True)
class Plot:
    """Plots learning curves of runs, or compares their final scores; seeds of one configuration form a group."""

    run_dirs: Annotated[tuple[str, ...], help.Argument("RUN_DIR ...")] = ()
    """Directories of runs or of populations; runs without a value of the metric are skipped with a warning."""
    out: Annotated[str | None, help.Alias("-o")] = None
    """The file to write; its extension sets the format: png, pdf, svg ..., for tables md or csv. None: curves.png, or
    the terminal for a table."""
    kind: Kind = "curve"
    """Learning curves; or of final scores the performance profile, the probability of improvement, or a table."""
    metric: str = "episode/return"
    """A metric of metrics.jsonl; of several policies, '*/episode/return' is each one's."""
    score: Score = "training"
    """The final score of a run: the metric's mean over its last tenth, or its value in the evaluation at the end."""
    x: Literal["steps", "time"] = "steps"
    """Horizontal axis of curves: environment steps or seconds."""
    smooth: int = 1
    """Number of reports in the moving average that is drawn; 1 draws every report as it is."""
    width: Width = "two"
    """Width of the picture: 'one' column of a page with two columns (3.3 inches), or 'two' (6.9 inches)."""


def run(args: Sequence[str]) -> int:
    """Runs ``plot RUN_DIR ... [FLAGS]``."""
    asked = flags.parse(Plot, args, "jaxrl-dist plot")

    from jaxrl_dist.run.console import one_line_warnings

    options = {field.name: getattr(asked, field.name) for field in dataclasses.fields(Plot)}
    with one_line_warnings():
        print(visible(plot(**options)))
    return 0


def plot(
    run_dirs: Sequence[str | pathlib.Path],
    out: str | pathlib.Path | None = None,
    *,
    kind: Kind = "curve",
    metric: str = "episode/return",
    score: Score = "training",
    x: Literal["steps", "time"] = "steps",
    smooth: int = 1,
    width: Width = "two",
) -> str:
    """Compares a metric of runs, of which those that differ only in their seed form a group.

    ``curve`` draws a thin line for each run, and the interquartile mean and interval of each group, with a panel for
    each environment. The other kinds compare final scores; over several environments scores are scaled so that the
    lowest of all runs in an environment is 0 and the highest 1. Beside a picture, a file such as ``curves.caption.txt``
    says what is drawn, and lists the settings of each group.

    Args:
      out: as ``--out``; None: ``curves.png``, or for a table nothing is written.
      kind: ``curve``, ``profile``, ``improvement`` or ``table``; see ``statistics`` for sources.
      score: of training, the mean of ``metric`` over the last tenth of a run, or of its ``evaluation`` at the end.
      x: ``steps`` or ``time``.
      smooth: number of reports in the moving average of curves.
      width: ``one`` or ``two`` columns of a page.

    Returns:
      The table, or a line that names the files.

    Raises:
      ConfigError: a directory is no run, no run has the metric, there are too few groups to compare, or the file's
        directory is missing or its format unknown.
      OSError: the file cannot be written; an older file stays unchanged.
    """
    for name, value, choices in (
        ("x", x, tuple(AXES)),
        ("kind", kind, get_args(Kind)),
        ("score", score, get_args(Score)),
        ("width", width, ("one", "two")),
    ):
        if value not in choices:
            raise ConfigError(f"--{name} {value} is none of {', '.join(choices)}{did_you_mean(value, choices)}")
    check_range(Plot(smooth=smooth), "smooth", low=1)
    check_used(Plot(score=score), "score", there=kind != "curve", needed="--kind table, profile or improvement")
    if not run_dirs:
        raise ConfigError("which runs? Name their directories, as in: jaxrl-dist plot runs/* -o curves.png")
    curves: dict[str, Curve] = {}
    configs: dict[str, Mapping[str, Any]] = {}
    without: list[NoValueError] = []
    read = read_curve if score == "training" else read_evaluation
    for run_dir in map(pathlib.Path, with_members(run_dirs)):
        for policy, name in metrics_of(run_dir, metric).items():
            curve = f"{run_dir}: {policy}" if policy else str(run_dir)
            try:
                curves[curve] = read(run_dir, name, x)
            except NoValueError as error:
                without.append(error)
            else:
                config = read_config(run_dir)
                configs[curve] = {**config, "algorithm": policy or config["algorithm"]}
    if not curves:
        raise without[0]
    for reason in without:
        warnings.warn(f"{reason.with_flags}; this run is left out", ConfigWarning, stacklevel=2)
    groups = group(configs)
    for each in groups if kind != "curve" and x == "steps" else ():
        ends = [float(curves[name].x[-1]) for name in each.runs]
        if min(ends) < (1 - FINAL) * max(ends):
            text = f"{each.env}, {each.label}: runs end between {min(ends):,.0f} and {max(ends):,.0f} env steps"
            warnings.warn(f"{text}, so their final scores are of different ages", ConfigWarning, stacklevel=2)

    from jaxrl_dist.commands.plot import drawing, tables

    policies = {str(config["run"].get("evaluation_policy", "greedy")) for config in configs.values()}
    evaluated = None if score == "training" else policies.pop() if len(policies) == 1 else "evaluated"
    what = tables.score_name(metric, evaluated)
    written = pathlib.Path(out or "curves.png")
    caption = written.with_suffix(".caption.txt")
    if kind == "table":
        text = tables.table(groups, curves, metric, evaluated, as_csv=written.suffix == ".csv")
        if out is None:
            return text
        with replacing(written) as partial:
            partial.write_text(text + "\n", encoding="utf-8")
        return f"wrote {written}"
    if kind == "curve":
        smoothed = {name: curve.smoothed(smooth) for name, curve in curves.items()}
        figure = drawing.curves(groups, smoothed, metric, AXES[x][1], width)
    elif kind == "profile":
        figure = drawing.profiles(tables.scores(groups, curves), what, width)
    else:
        figure = drawing.improvements(tables.scores(groups, curves), what, width)
    drawing.save(figure, written)
    with replacing(caption) as partial:
        text = tables.caption(kind, groups, curves, configs, metric, x, smooth, evaluated)
        partial.write_text(text, encoding="utf-8")
    return f"wrote {written} and its caption {caption}"
