"""``jaxrl-dist plot``: plots learning curves of finished and running runs,
and compares their final scores.
"""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_dist.checks import check_used
from jaxrl_dist.commands import flags
from jaxrl_dist.commands.plot import reading
from jaxrl_dist.commands.plot.reading import (
    AXES,
    FINAL,
    FORMS,
    Curve,
    Group,
    Plot,
    middle,
    read_curve,
)
from jaxrl_dist.config.train import CONFIG_FILE
from jaxrl_dist.config.values import check_declared, plain
from jaxrl_dist.errors import ConfigError, ConfigWarning, visible
from jaxrl_dist.run.storage import replacing, runs_in
from jaxrl_dist.settings.policies import Policies
from jaxrl_dist.settings.stored import stored_content

__all__ = ["Curve", "Plot", "middle", "plot", "read_curve", "run"]


def run(args: Sequence[str]) -> int:
    """Runs ``plot RUN_DIR ... [FLAGS]``."""
    options = flags.parse(Plot, args, "jaxrl-dist plot")

    print(visible(plot(**vars(options))))
    return 0


def plot(
    run_dirs: Sequence[str | pathlib.Path], out: str | pathlib.Path | None = None, **options: Any
) -> str:
    """Compares a metric of runs, of which those that differ only in their seed form a group.

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
    check_declared(wanted)
    check_used(wanted, "smooth", active=wanted.kind == "curve", needed="--kind curve")
    check_used(
        wanted,
        "width",
        active=wanted.kind != "table",
        needed="--kind curve, profile or improvement",
    )
    check_used(
        wanted,
        "score",
        active=wanted.kind != "curve",
        needed="--kind table, profile or improvement",
    )
    written = pathlib.Path(wanted.out or ("curves.png" if wanted.kind != "table" else "table.md"))
    if wanted.kind == "table" and written.suffix[1:].lower() not in FORMS:
        raise ConfigError(
            f"{written} cannot be written: its extension names no format of tables; .md, .csv and .tex do"
        )
    if not run_dirs:
        raise ConfigError(
            "which runs? Name their directories, as in: jaxrl-dist plot runs/* -o curves.png"
        )
    curves, configs = _read(wanted)
    evaluated = wanted.score == "evaluation" or wanted.metric.startswith("evaluation/")
    same = reading.SAME_CURVE - (reading.OF_EVALUATION if evaluated else set())
    groups = _labelled(reading.group(configs, same), wanted.labels, list(configs))
    _warn_of_repeats(groups, configs)
    if wanted.kind != "curve" and wanted.x == "steps":
        _warn_of_ages(groups, curves)

    from jaxrl_dist.commands.plot import drawing, tables

    score = _score(wanted, configs)
    if wanted.kind == "table":
        text = tables.table(groups, curves, score, wanted.score, written.suffix[1:].lower())
        if wanted.out is None:
            return text
        with replacing(written) as partial:
            partial.write_text(text + "\n", encoding="utf-8")
        return f"wrote {written}"
    if wanted.kind == "curve":
        smoothed = {name: curve.smoothed(wanted.smooth) for name, curve in curves.items()}
        if wanted.metric == "evaluation/return_mean":
            label = f"{_policy(configs)} return"
        else:
            label = wanted.metric
        figure = drawing.curves(groups, smoothed, label, AXES[wanted.x][1], wanted.width)
    else:
        draw = {"profile": drawing.profiles, "improvement": drawing.improvements}[wanted.kind]
        finals = tables.scores(groups, curves)
        if wanted.kind == "profile":
            finals, partial_ones = tables.complete(finals)
            if partial_ones:
                warnings.warn(tables.left_out(partial_ones), ConfigWarning, stacklevel=2)
        figure = draw(finals, score, wanted.width)
    text = tables.caption(wanted, groups, curves, configs, score)
    drawing.save(figure, written)
    caption = written.with_suffix(".caption.txt")
    with replacing(caption) as partial:
        partial.write_text(text, encoding="utf-8")
    return f"wrote {written} and its caption {caption}"


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
    known = list(
        dict.fromkeys(
            group.label for group in sorted(groups, key=lambda group: runs.index(group.runs[0]))
        )
    )
    if len(labels) != len(known):
        raise ConfigError(
            f"--labels names {len(labels)}, and the runs form {len(known)}: {'; '.join(known)}"
        )
    renamed = dict(zip(known, labels, strict=True))
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
            text = f"{env}: runs end between {first:,.0f} and {last:,.0f} env steps"
            warnings.warn(
                f"{text}, so their final scores are of different ages", ConfigWarning, stacklevel=3
            )


def _warn_of_repeats(groups: Sequence[Group], configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Warns of runs with the same seed and settings, which count as several samples and are one."""
    alike: dict[tuple[str, str, int], list[str]] = {}
    for group in groups:
        for name in group.runs:
            alike.setdefault((group.env, group.label, configs[name]["run"]["seed"]), []).append(
                name
            )
    repeated = [
        f"{', '.join(names)} (seed {seed})"
        for (_, _, seed), names in alike.items()
        if len(names) > 1
    ]
    if repeated:
        warnings.warn(
            f"runs with the same seed and settings count as different seeds: {'; '.join(repeated)}; "
            "name only one of each, or deviations and intervals come out too small",
            ConfigWarning,
            stacklevel=3,
        )


def _score(wanted: Plot, configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Says what the final scores are."""
    if wanted.score == "training":
        return f"final {wanted.metric}"
    metric = wanted.metric.removeprefix("*/").replace("episode/", "")
    return f"{_policy(configs)} {metric}"


def _policy(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Says how the evaluated policies act."""
    policies = {
        str(config["run"].get("evaluation_policy", "greedy")) for config in configs.values()
    }
    if len(policies) == 1:
        return policies.pop()
    return "evaluated"


def _read(wanted: Plot) -> tuple[dict[str, Curve], dict[str, Mapping[str, Any]]]:
    """Returns the curves of all runs and policies, and their configs, by names;
    warns of runs without a value.

    Raises:
      ConfigError: no run has a value, or a file is damaged.
    """
    curves: dict[str, Curve] = {}
    configs: dict[str, Mapping[str, Any]] = {}
    without: list[reading.NoValueError] = []
    read = read_curve if wanted.score == "training" else reading.read_evaluation
    for run_dir in map(pathlib.Path, reading.with_members(wanted.run_dirs)):
        if not (run_dir / CONFIG_FILE).exists() and runs_in(run_dir):
            text = f"{run_dir} is not a run directory: it has no {CONFIG_FILE}"
            raise ConfigError(f"{text}; the runs in it are {run_dir}/*")
        for policy, metric in _metrics_of(run_dir, wanted.metric).items():
            name = f"{run_dir}: {policy}" if policy else str(run_dir)
            try:
                curves[name] = read(run_dir, metric, wanted.x)
            except reading.NoValueError as error:
                without.append(error)
            else:
                config = _read_config(run_dir)
                if config.get("clock") == "updates" and wanted.x == "steps":
                    raise ConfigError(
                        f"{run_dir} has learnt from records, without env steps: --x updates draws it"
                    )
                algorithms = "+".join(_algorithms(config).values()).lower()
                configs[name] = {**config, "algorithm": policy or algorithms or config["algorithm"]}
    if not curves:
        raise without[0]
    for reason in without:
        warnings.warn(f"{reason.with_flags}; this run is left out", ConfigWarning, stacklevel=3)
    return curves, configs


def _metrics_of(run_dir: pathlib.Path, metric: str) -> dict[str, str]:
    """Returns the metrics that a run's curves show, by what names their policy: of ``*/NAME``,
    that of each policy.

    One that belongs to no policy of several has the name "".

    Raises:
      ConfigError: ``*`` is given, and the run has one policy.
    """
    first, _, rest = metric.partition("/")
    if first != "*" and not (run_dir / CONFIG_FILE).exists():
        return {"": metric}  # the reader of the curve says what is missing
    names = _algorithms(_read_config(run_dir))
    if first == "*" and not names:
        raise ConfigError(
            f"{run_dir} has one policy, whose metric is {rest}; * stands for each of several"
        )
    wanted = [name for name in names if first in ("*", name)]
    return {f"{policy} ({names[policy]})": f"{policy}/{rest}" for policy in wanted} or {"": metric}


def _algorithms(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the algorithm of each of several policies, from a config of ``_read_config``;
    {} if there is one.
    """
    settings = config["hyperparameters"].items()
    return {
        name.removesuffix(".algorithm"): value
        for name, value in settings
        if name.endswith(".algorithm")
    }


def _read_config(run_dir: pathlib.Path) -> Mapping[str, Any]:
    """Reads a run's ``config.json``, with every entry that ``group`` needs.

    Hyperparameters of several policies are named as in ``--vary prey.learning-rate=...``.

    Raises:
      ConfigError: the file is missing or damaged.
    """
    path = run_dir / CONFIG_FILE
    config = stored_content(path)
    for name, kind in {"env": str, "seed": int}.items():
        if not isinstance(config["run"].get(name), kind):
            raise ConfigError(f"{path} is damaged: {name} is missing")
    if config["algorithm"] != Policies.stored_as:
        return config
    settings = {
        f"{policy}.{name}": value
        for policy, part in config["hyperparameters"].items()
        if isinstance(part, dict)
        for fields in (part, part.get("hyperparameters"))
        for name, value in (fields or {}).items()
        if name != "hyperparameters"
    }
    return {**config, "hyperparameters": settings}
