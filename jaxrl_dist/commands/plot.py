"""Learning curves of finished and running runs, over their seeds."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.config import CONFIG_FILE
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run.files import METRICS

POINTS = 200
"""Of the axis on which the curves of several seeds are put together."""
CONFIDENCE = 0.95
"""Of the interval around their interquartile mean."""
AXES = {"steps": ("env_steps", "environment steps"), "time": ("wall_time_s", "seconds since the start")}
"""What the horizontal axis may show: the field of ``metrics.jsonl`` and the label."""


class Curve(NamedTuple):
    """One metric of one run."""

    x: np.ndarray  # [N] float64, ascending
    y: np.ndarray  # [N] float64, finite


class Middle(NamedTuple):
    """The interquartile mean of several seeds and its interval; ``[POINTS]`` float64, NaN where no curve reaches."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_curve(run_dir: pathlib.Path, metric: str, x: str = "steps") -> Curve:
    """One metric of a run's ``metrics.jsonl``, without the reports in which it is null.

    A last line that is cut off, as that of a run that is being written or was killed may be, is left out.

    Raises:
      ConfigError: there is no such file or metric, or the metric never had a value.
    """
    path = run_dir / METRICS
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{run_dir} is no run directory: {METRICS} cannot be read ({error.strerror})") from error
    lines: list[Mapping[str, Any]] = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except ValueError:
            if number < len(texts):
                raise ConfigError(f"{path} is damaged: line {number} is no JSON") from None
    if not lines:
        raise ConfigError(f"{path} has no reports yet")
    names = {name for line in lines for name in line}
    if metric not in names:
        shown = ", ".join(sorted(name for name in names if "/" in name))
        raise ConfigError(f"{run_dir} has no metric {metric!r}{did_you_mean(metric, names)}; it has: {shown}")
    field, _ = AXES[x]
    points = [(line[field], line[metric]) for line in lines if line.get(metric) is not None]
    if not points:
        raise ConfigError(f"{run_dir}: {metric} never had a value, as no episode ended or nothing was learnt")
    return Curve(*np.array(points, float).T)


def middle(curves: Sequence[Curve]) -> Middle:
    """The interquartile mean over seeds and its bootstrap interval, point by point.

    Source: Agarwal et al. (2021), https://arxiv.org/abs/2108.13264, section 4.3; the interval is the percentile
    bootstrap over seeds. Curves are interpolated linearly; where one has not begun or has ended, the others count.
    """
    from scipy import stats

    x = np.linspace(min(c.x[0] for c in curves), max(c.x[-1] for c in curves), POINTS)
    values = np.array([np.interp(x, c.x, c.y, left=np.nan, right=np.nan) for c in curves])
    y, low, high = (np.full(POINTS, np.nan) for _ in range(3))
    for point in range(POINTS):
        there = values[~np.isnan(values[:, point]), point]
        if len(there):
            y[point] = low[point] = high[point] = stats.trim_mean(there, 0.25)
        if len(there) > 1 and np.ptp(there):
            low[point], high[point] = stats.bootstrap(
                (there,), _iqm, confidence_level=CONFIDENCE, n_resamples=1000, method="percentile", rng=0
            ).confidence_interval
    return Middle(x, y, low, high)


def _iqm(values: np.ndarray, axis: int) -> np.ndarray:
    from scipy import stats

    return stats.trim_mean(values, 0.25, axis=axis)


def group(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Puts runs together that differ in their seed alone.

    Args:
      configs: ``config.json`` of each run, by its directory.

    Returns:
      The directories of each group, by a label that says in what it differs from the others.
    """
    fields = {name: _flat(config) for name, config in configs.items()}
    seen = {key for flat in fields.values() for key in flat}
    differ = [
        key
        for key in sorted(seen - {"algorithm", "env", "plan"})
        if len({json.dumps(flat.get(key)) for flat in fields.values()}) > 1
    ]
    groups: dict[str, list[str]] = {}
    for name, flat in fields.items():
        more = [f"{key}={flat[key]}" for key in differ if key in flat]
        label = " ".join([f"{flat.get('algorithm')} {flat.get('env')} {flat.get('plan')}", *more])
        groups.setdefault(label, []).append(name)
    return groups


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    run = {name: value for name, value in config.get("run", {}).items() if name not in ("seed", "run_dir")}
    return {"algorithm": config.get("algorithm"), **config.get("hyperparameters", {}), **run}


def plot(
    run_dirs: Sequence[str | pathlib.Path],
    out: str | pathlib.Path,
    *,
    metric: str = "episode/return",
    x: str = "steps",
) -> None:
    """Draws a metric of runs: thin lines for seeds, and for each group of them its middle and interval.

    Args:
      out: the picture to write, in the format of its ending (png, pdf, svg ...).
      x: ``steps`` or ``time``.

    Raises:
      ConfigError: what is no run, a metric that it does not have, or a picture that cannot be written.
    """
    from matplotlib.figure import Figure  # not pyplot, whose backend belongs to the caller, as a notebook's does

    if x not in AXES:
        raise ConfigError(f"--x {x} is none of {', '.join(AXES)}{did_you_mean(x, AXES)}")
    out, paths = pathlib.Path(out), {str(name): pathlib.Path(name) for name in run_dirs}
    if not paths:
        raise ConfigError("which runs? Name their directories, as in: jaxrl-dist plot runs/* -o curves.png")
    curves = {name: read_curve(path, metric, x) for name, path in paths.items()}
    groups = group({name: _read_config(path) for name, path in paths.items()})
    fig = Figure(figsize=(7, 4.2), layout="constrained")
    ax = fig.subplots()
    try:
        for index, (label, names) in enumerate(groups.items()):
            color, own = f"C{index}", [curves[name] for name in names]
            for curve in own:
                ax.plot(curve.x, curve.y, color=color, linewidth=0.6, alpha=0.5 if len(own) > 1 else 1.0)
            if len(own) > 1:
                line = middle(own)
                ax.plot(line.x, line.y, color=color, linewidth=2)
                ax.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)
            seeds = f" ({len(own)} seeds)" if len(own) > 1 else ""
            ax.plot([], [], color=color, linewidth=2, label=label + seeds)
        ax.set(xlabel=AXES[x][1], ylabel=metric)
        several = any(len(names) > 1 for names in groups.values())
        title = f"interquartile mean and {CONFIDENCE:.0%} bootstrap interval over seeds" if several else None
        ax.legend(loc="best", fontsize="small", title=title, title_fontsize="small")
        fig.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {out} cannot be written: {error}") from error


def _read_config(run_dir: pathlib.Path) -> Mapping[str, Any]:
    path = run_dir / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no config of a run")
    return config
