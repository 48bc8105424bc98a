"""Reads the curves and configs of all runs of a plot."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

from jaxrl_dist.algorithms import label_of_file
from jaxrl_dist.commands.plot.foreign import SUFFIX, read_table
from jaxrl_dist.commands.plot.reading import (
    Config,
    Curve,
    NoValueError,
    Plot,
    read_curve,
    read_evaluation,
    with_members,
)
from jaxrl_dist.config.train import CONFIG_FILE
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.run.storage import runs_in
from jaxrl_dist.settings.policies import Policies
from jaxrl_dist.settings.stored import FILE, file_in, stored_content


def read_runs(wanted: Plot) -> tuple[dict[str, Curve], dict[str, Config]]:
    """Returns the curves of all runs and policies, and their configs, by names;
    warns of runs without a value.

    Raises:
      ConfigError: no run has a value, or a file is damaged.
    """
    without: list[NoValueError] = []
    paths = [pathlib.Path(path) for path in with_members(wanted.run_dirs)]
    found: dict[pathlib.Path, dict[str, tuple[Curve, Config]]] = {
        path: _read_run(path, wanted, without) for path in paths if path.suffix != SUFFIX
    }
    envs = {config["run"]["env"] for run in found.values() for _, config in run.values()}
    for path in paths:
        if path.suffix == SUFFIX:
            found[path] = read_table(path, wanted, envs)
    both = {name: pair for path in paths for name, pair in found[path].items()}
    if not both:
        raise without[0]
    for reason in without:
        warnings.warn(f"{reason.with_flags}; this run is left out", ConfigWarning, stacklevel=3)
    curves = {name: curve for name, (curve, _) in both.items()}
    return curves, {name: config for name, (_, config) in both.items()}


def _read_run(
    run_dir: pathlib.Path, wanted: Plot, without: list[NoValueError]
) -> dict[str, tuple[Curve, Config]]:
    """Returns the curve and config of each policy of a run, by name; says in ``without`` why there
    is none.
    """
    if not (run_dir / CONFIG_FILE).exists() and runs_in(run_dir):
        raise ConfigError(
            f"{run_dir} is not a run directory: it has no {CONFIG_FILE}; "
            f"the runs in it are {run_dir}/*"
        )
    read = read_curve if wanted.score == "training" else read_evaluation
    curves: dict[str, tuple[Curve, Config]] = {}
    for policy, metric in _metrics_of(run_dir, wanted.metric).items():
        name = f"{run_dir}: {policy}" if policy else str(run_dir)
        try:
            curve = read(run_dir, metric, wanted.x)
        except NoValueError as error:
            without.append(error)
        else:
            curves[name] = curve, _config_of_curve(run_dir, policy, wanted.x)
    return curves


def _config_of_curve(run_dir: pathlib.Path, policy: str, axis: str) -> Config:
    """Returns a run's config; its ``algorithm`` names the curve's policy, or all algorithms."""
    config = _read_config(run_dir)
    if config.get("clock") == "updates" and axis == "steps":
        raise ConfigError(
            f"{run_dir} has learnt from records, without env steps: --x updates draws it"
        )
    algorithms = "+".join(_algorithms(config).values()).lower()
    return {**config, "algorithm": policy or algorithms or config["algorithm"]}


def _metrics_of(run_dir: pathlib.Path, metric: str) -> dict[str, str]:
    """Returns the metrics that a run's curves show, by what names their policy; ``*/NAME`` is one
    metric for each policy.

    A metric that does not belong to one of several policies has the name "".

    Raises:
      ConfigError: ``*`` is given, but the run has one policy.
    """
    first, _, rest = metric.partition("/")
    if first != "*" and not (run_dir / CONFIG_FILE).exists():
        return {"": metric}  # the reader of the curve says what is missing
    names = _algorithms(_read_config(run_dir))
    if first == "*" and not names:
        raise ConfigError(
            f"{run_dir} has one policy, with the metric {rest}; * stands for each of several"
        )
    wanted = [name for name in names if first in ("*", name)]
    return {f"{policy} ({names[policy]})": f"{policy}/{rest}" for policy in wanted} or {"": metric}


def _algorithms(config: Config) -> dict[str, str]:
    """Returns the algorithm of each of several policies, from a config of ``_read_config``;
    {}: there is one policy.
    """
    return {
        name.removesuffix(".algorithm"): value
        for name, value in config["hyperparameters"].items()
        if name.endswith(".algorithm")
    }


def _read_config(run_dir: pathlib.Path) -> Config:
    """Reads a run's ``config.json``, with every entry that ``group`` needs.

    Hyperparameters of several policies are named as in ``--vary prey.learning-rate=...``. An
    algorithm in a file of the user's has the file's label, and its code counts as a setting.

    Raises:
      ConfigError: the file is missing or damaged.
    """
    path = run_dir / CONFIG_FILE
    config = stored_content(path)
    for name, kind in {"env": str, "seed": int}.items():
        if not isinstance(config["run"].get(name), kind):
            raise ConfigError(f"{path} is damaged: {name} is missing")
    if config["algorithm"] != Policies.stored_as:
        return _with_file(config)
    settings: dict[str, Any] = {}
    for policy, part in config["hyperparameters"].items():
        if isinstance(part, dict):
            part = _with_file(part)
            fields = {**part, **(part.get("hyperparameters") or {})}
            fields.pop("hyperparameters", None)
            fields.pop(FILE, None)
            settings |= {f"{policy}.{name}": value for name, value in fields.items()}
    return {**config, "hyperparameters": settings}


def _with_file(part: Config) -> Config:
    """Returns a config, or one of its policies, by the label and code of the algorithm's file."""
    file = file_in(part)
    if not file:
        return part
    code = {file["name"]: file["code"][:7]}
    return {
        **part,
        "algorithm": label_of_file(file["name"]),
        "hyperparameters": {**code, **(part.get("hyperparameters") or {})},
    }
