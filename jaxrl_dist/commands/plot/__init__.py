"""``jaxrl-dist plot``: plots learning curves of finished and running runs,
and compares their final scores.
"""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_dist.checks import check_used
from jaxrl_dist.commands import flags
from jaxrl_dist.commands.plot import reading
from jaxrl_dist.commands.plot.reading import (
    AXES,
    FINAL,
    FORMS,
    Config,
    Curve,
    Group,
    Plot,
    middle,
    read_curve,
)
from jaxrl_dist.commands.plot.runs import read_runs
from jaxrl_dist.config.values import check_declared, plain
from jaxrl_dist.errors import ConfigError, ConfigWarning, visible
from jaxrl_dist.run.storage import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "Plot", "middle", "plot", "read_curve", "run"]


def run(args: Sequence[str]) -> int:
    """Runs ``plot RUN_DIR ... [FLAGS]``."""
    options = flags.parse(Plot, args, "jaxrl-dist plot")
    print(visible(plot(**vars(options))))
    return 0


def plot(
    run_dirs: Sequence[str | pathlib.Path], out: str | pathlib.Path | None = None, **options: Any
) -> str:
    """Compares a metric of runs; runs that differ only in their seed form a group.

    ``curve`` draws a thin line for each run, and the interquartile mean and interval of each group,
    with a panel for each environment. The other kinds compare final scores; over several
    environments scores are scaled so that the lowest of all runs in an environment is 0 and the
    highest 1. Beside a picture, a file such as ``curves.caption.txt`` says what is drawn, and lists
    the settings of each group.

    Args:
      out: as ``--out``; None: ``curves.png``, or for a table nothing is written.
      options: the other fields of ``Plot``; see ``statistics`` for the sources of each ``kind``.

    Returns:
      The table, or a line that names the files.

    Raises:
      ConfigError: a directory is not a run, no run has the metric, there are too few groups to
        compare, or the file's directory is missing or its format unknown.
      OSError: the file cannot be written; an older file stays unchanged.
    """
    wanted = plain(Plot(tuple(run_dirs), out, **options))  # type: ignore[arg-type]
    _check(wanted)
    curves, configs = read_runs(wanted)
    evaluated = wanted.score == "evaluation" or wanted.metric.startswith("evaluation/")
    same = reading.SAME_CURVE - (reading.OF_EVALUATION if evaluated else set())
    groups = _labelled(reading.group(configs, same), wanted.labels, list(configs))
    _warn_of_repeats(groups, configs)
    if wanted.kind != "curve" and wanted.x == "steps":
        _warn_of_ages(groups, curves)
    if wanted.kind == "table":
        return _write_table(wanted, groups, curves, _score(wanted, configs))
    return _write_picture(wanted, groups, curves, configs)


def _check(wanted: Plot) -> None:
    """Raises ``ConfigError`` for options that contradict each other, or without runs."""
    is_curve = wanted.kind == "curve"
    is_table = wanted.kind == "table"
    pictures = "--kind curve, profile or improvement"
    check_declared(wanted)
    check_used(wanted, "smooth", active=is_curve, needed="--kind curve")
    check_used(wanted, "width", active=not is_table, needed=pictures)
    check_used(wanted, "score", active=not is_curve, needed="--kind table, profile or improvement")
    if is_table and _form(wanted) not in FORMS:
        raise ConfigError(
            f"{wanted.out} cannot be written: its extension names no format of tables; "
            ".md, .csv and .tex do"
        )
    if not wanted.run_dirs:
        raise ConfigError(
            "which runs? Name their directories, as in: jaxrl-dist plot runs/* -o curves.png"
        )


def _form(wanted: Plot) -> str:
    """Returns the form of a table."""
    return pathlib.Path(wanted.out or "table.md").suffix[1:].lower()


def _write_table(
    wanted: Plot, groups: Sequence[Group], curves: Mapping[str, Curve], score: str
) -> str:
    """Returns the table, or writes it and returns a line that names the file."""
    from jaxrl_dist.commands.plot import tables

    table = tables.table(groups, curves, score, wanted.score, _form(wanted))
    if wanted.out is None:
        return table
    with replacing(pathlib.Path(wanted.out)) as partial:
        partial.write_text(table + "\n", encoding="utf-8")
    return f"wrote {wanted.out}"


def _write_picture(
    wanted: Plot,
    groups: Sequence[Group],
    curves: Mapping[str, Curve],
    configs: Mapping[str, Config],
) -> str:
    """Writes the picture and its caption, and returns a line that names the files."""
    from jaxrl_dist.commands.plot import drawing, tables

    score = _score(wanted, configs)
    if wanted.kind == "curve":
        label = wanted.metric
        if label == "evaluation/return_mean":
            label = f"{_policy(configs)} return"
        smoothed = {name: curve.smoothed(wanted.smooth) for name, curve in curves.items()}
        figure = drawing.curves(groups, smoothed, label, AXES[wanted.x][1], wanted.width)
    else:
        figure = _compare(wanted, groups, curves, score)
    caption = tables.caption(wanted, groups, curves, configs, score)
    picture_file = pathlib.Path(wanted.out or "curves.png")
    caption_file = picture_file.with_suffix(".caption.txt")
    drawing.save(figure, picture_file)
    with replacing(caption_file) as partial:
        partial.write_text(caption, encoding="utf-8")
    return f"wrote {picture_file} and its caption {caption_file}"


def _compare(
    wanted: Plot, groups: Sequence[Group], curves: Mapping[str, Curve], score: str
) -> Figure:
    """Draws a comparison of final scores."""
    from jaxrl_dist.commands.plot import drawing, tables

    scores = tables.scores(groups, curves)
    if wanted.kind == "improvement":
        return drawing.improvements(scores, score, wanted.width)
    scores, incomplete = tables.complete(scores)
    if incomplete:
        warnings.warn(tables.left_out(incomplete), ConfigWarning, stacklevel=4)
    return drawing.profiles(scores, score, wanted.width)


def _labelled(
    groups: Sequence[Group], labels: Sequence[str], runs: Sequence[str]
) -> Sequence[Group]:
    """Gives the groups the user's labels, if there are any, in the order of their first ``runs``.

    Raises:
      ConfigError: there are more or fewer labels than groups,
        or two groups of an environment have the same one.
    """
    if not labels:
        return groups
    in_order = sorted(groups, key=lambda group: runs.index(group.runs[0]))
    own_labels = list(dict.fromkeys(group.label for group in in_order))
    if len(labels) != len(own_labels):
        raise ConfigError(
            f"--labels names {len(labels)}, but the runs form {len(own_labels)}: "
            f"{'; '.join(own_labels)}"
        )
    renamed = dict(zip(own_labels, labels, strict=True))
    named = [group._replace(label=renamed[group.label]) for group in groups]
    if len({(group.env, group.label) for group in named}) < len(named):
        raise ConfigError(
            "--labels gives two groups of an environment the same name; each needs another"
        )
    return named


def _warn_of_ages(groups: Sequence[Group], curves: Mapping[str, Curve]) -> None:
    """Warns of environments whose runs have trained for different numbers of env steps."""
    for env in dict.fromkeys(group.env for group in groups):
        first, *_, last = sorted(
            end for group in groups if group.env == env for end in group.ends(curves)
        )
        if first < (1 - FINAL) * last:
            warnings.warn(
                f"{env}: runs end between {first:,.0f} and {last:,.0f} env steps, "
                "so their final scores are of different ages",
                ConfigWarning,
                stacklevel=3,
            )


def _warn_of_repeats(groups: Sequence[Group], configs: Mapping[str, Config]) -> None:
    """Warns of runs with the same seed and settings, which count as several samples and are one."""
    repeated = []
    for group in groups:
        by_seed: dict[int, list[str]] = {}
        for name in group.runs:
            by_seed.setdefault(configs[name]["run"]["seed"], []).append(name)
        repeated += [
            f"{', '.join(names)} (seed {seed})" for seed, names in by_seed.items() if len(names) > 1
        ]
    if repeated:
        warnings.warn(
            f"runs with the same seed and settings count as different seeds: {'; '.join(repeated)}; "
            "name only one of each, or deviations and intervals come out too small",
            ConfigWarning,
            stacklevel=3,
        )


def _score(wanted: Plot, configs: Mapping[str, Config]) -> str:
    """Says what the final scores are."""
    if wanted.score == "training":
        return f"final {wanted.metric}"
    metric = wanted.metric.removeprefix("*/").replace("episode/", "")
    return f"{_policy(configs)} {metric}"


def _policy(configs: Mapping[str, Config]) -> str:
    """Says how the evaluated policies act."""
    policies = {
        str(config["run"].get("evaluation_policy", "greedy")) for config in configs.values()
    }
    if len(policies) == 1:
        return policies.pop()
    return "evaluated"
