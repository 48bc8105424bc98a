"""Reads the curves and configs of all runs of a plot."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

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
from jaxrl_dist.settings.stored import stored_content


def read_runs(wanted: Plot) -> tuple[dict[str, Curve], dict[str, Config]]:
    """Returns the curves of all runs and policies, and their configs, by names;
    warns of runs without a value.

    Raises:
      ConfigError: no run has a value, or a file is damaged.
    """
    curves: dict[str, Curve] = {}
    configs: dict[str, Config] = {}
    without: list[NoValueError] = []
    read = read_curve if wanted.score == "training" else read_evaluation
    for run_dir in map(pathlib.Path, with_members(wanted.run_dirs)):
        if not (run_dir / CONFIG_FILE).exists() and runs_in(run_dir):
            raise ConfigError(
                f"{run_dir} is not a run directory: it has no {CONFIG_FILE}; "
                f"the runs in it are {run_dir}/*"
            )
        for policy, metric in _metrics_of(run_dir, wanted.metric).items():
            name = f"{run_dir}: {policy}" if policy else str(run_dir)
            try:
                curves[name] = read(run_dir, metric, wanted.x)
            except NoValueError as error:
                without.append(error)
            else:
                configs[name] = _config_of_curve(run_dir, policy, wanted.x)
    if not curves:
        raise without[0]
    for reason in without:
        warnings.warn(f"{reason.with_flags}; this run is left out", ConfigWarning, stacklevel=3)
    return curves, configs


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
    settings: dict[str, Any] = {}
    for policy, part in config["hyperparameters"].items():
        if isinstance(part, dict):
            fields = {**part, **(part.get("hyperparameters") or {})}
            fields.pop("hyperparameters", None)
            settings |= {f"{policy}.{name}": value for name, value in fields.items()}
    return {**config, "hyperparameters": settings}
