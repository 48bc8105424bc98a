"""``jaxrl-dist plot``: plots learning curves of finished and running runs, aggregated over seeds."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from jaxrl_dist import flags
from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.config import CONFIG_FILE, RESUMABLE
from jaxrl_dist.errors import ConfigError, ConfigWarning

if TYPE_CHECKING:
    import numpy as np

POINTS = 200
"""Points of the axis on which the curves of several seeds are aggregated."""
CONFIDENCE = 0.95
"""Confidence level of the interval around their interquartile mean."""
AXES = {"steps": ("env_steps", "environment steps"), "time": ("wall_time_s", "seconds since the start")}
"""Choices for the horizontal axis: the field of ``metrics.jsonl`` and the label."""
SAME_CURVE = {*RESUMABLE, "seed", "run_dir"}
"""Fields of ``Train`` in which the runs of a group may differ: only the seed changes how a run learns."""
LARGEST = 1e100
"""Larger numbers are rejected: their sums and differences would overflow."""
_MAX_METRICS = 2**31  # bytes
_LEGEND_WIDTH = 84  # characters that fit below the axes
_LABEL_WIDTH = 400  # characters: a config.json from elsewhere may hold any text


@dataclasses.dataclass(frozen=True)
class Plot:
    """Plots learning curves of runs, aggregated over the seeds of each configuration."""

    run_dirs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN_DIR ...")]] = ()
    """Directories of runs; seeds of one configuration form a group, and runs without a value are skipped."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "curves.png"
    """The image file to write; its extension sets the format: png, pdf, svg ..."""
    metric: str = "episode/return"
    """A metric of metrics.jsonl."""
    x: Literal["steps", "time"] = "steps"
    """Horizontal axis: environment steps or seconds."""


def run(args: Sequence[str]) -> int:
    """Runs ``plot RUN_DIR ... [-o FILE]``."""
    flags.check_flags(args, ("out", "metric", "x"))
    asked = flags.run_tyro(Plot, args, prog="jaxrl-dist plot")

    from jaxrl_dist.run.console import one_line_warnings

    with one_line_warnings():
        plot(asked.run_dirs, asked.out, metric=asked.metric, x=asked.x)
    print(f"wrote {asked.out}")
    return 0


class Curve(NamedTuple):
    """One metric of one run."""

    x: np.ndarray  # [N] float64, ascending
    y: np.ndarray  # [N] float64, finite


class Middle(NamedTuple):
    """The interquartile mean of several seeds and its interval; ``[POINTS]`` float64, NaN where no curve has values."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


class NoValueError(ConfigError):
    """A run has no value of the metric, or none yet."""


def read_curve(run_dir: pathlib.Path, metric: str, x: str = "steps") -> Curve:
    """Reads one metric from a run's ``metrics.jsonl``, skipping reports in which it is null.

    An incomplete last line is skipped: the run may still be writing it, or may have been killed.

    Raises:
      ConfigError: the file is missing or damaged; the message names the line.
      NoValueError: the file has no report yet, or no such metric, or the metric never had a value.
    """
    import numpy as np

    from jaxrl_dist.run.files import METRICS, read_plain

    path, (field, _) = run_dir / METRICS, AXES[x]
    try:
        content = read_plain(path, _MAX_METRICS)
    except ConfigError as error:
        raise ConfigError(f"{run_dir} is no run directory: {error.with_flags}") from None
    names: set[str] = set()
    points: list[tuple[float, float]] = []
    for number, line in _lines(path, content):
        names |= line.keys()
        at: Any = line.get(field)
        value: Any = line.get(metric)
        if not _can_draw(at) or (points and at < points[-1][0]):
            after = f" after {points[-1][0]:g}" if points and _can_draw(at) else ""
            shown = _shown(at) if field in line else "missing"
            raise ConfigError(f"{path} is damaged: {field} of line {number} is {shown}{after}")
        if value is None:
            continue
        if not _can_draw(value):
            raise ConfigError(f"{path}: {metric} of line {number} is {_shown(value)}, which cannot be drawn")
        points.append((at, value))
    if not names:
        raise NoValueError(f"{path} has no reports yet")
    if metric not in names:
        shown = ", ".join(sorted(name for name in names if "/" in name))
        raise NoValueError(f"{run_dir} has no metric {metric!r}{did_you_mean(metric, names)}; it has: {shown}")
    if not points:
        raise NoValueError(f"{run_dir}: {metric} never had a value, as no episode ended or nothing was learnt")
    return Curve(*np.array(points, float).T)


def _lines(path: pathlib.Path, content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the reports in ``metrics.jsonl``, each with its line number."""
    *whole, last = content.split(b"\n")  # the last line has no newline, so it may be incomplete
    for number, text in enumerate([*whole, last], 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            if number > len(whole):
                return
            raise ConfigError(f"{path} is damaged: line {number} is no JSON") from None
        if not isinstance(line, dict):
            raise ConfigError(f"{path} is damaged: line {number} is {_shown(line)}, which is no report")
        yield number, line


def _can_draw(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= LARGEST


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."


def middle(curves: Sequence[Curve]) -> Middle:
    """Computes the interquartile mean over seeds and its bootstrap interval, point by point.

    Source: Agarwal et al. (2021), https://arxiv.org/abs/2108.13264, section 4.3; the interval is the percentile
    bootstrap over seeds. Curves are interpolated linearly; each point uses only the curves that reach it.
    """
    import numpy as np
    from scipy import stats

    x = np.linspace(min(c.x[0] for c in curves), max(c.x[-1] for c in curves), POINTS)
    values = np.array([np.interp(x, c.x, c.y, left=np.nan, right=np.nan) for c in curves])
    y, low, high = (np.full(POINTS, np.nan) for _ in range(3))
    for point in range(POINTS):
        seeds = values[~np.isnan(values[:, point]), point]
        if len(seeds):
            y[point] = low[point] = high[point] = stats.trim_mean(seeds, 0.25)
        if len(seeds) > 1 and np.ptp(seeds):
            low[point], high[point] = stats.bootstrap(
                (seeds,), _iqm, confidence_level=CONFIDENCE, n_resamples=1000, method="percentile", rng=0
            ).confidence_interval
    return Middle(x, y, low, high)


def _iqm(values: np.ndarray, axis: int) -> np.ndarray:
    from scipy import stats

    return stats.trim_mean(values, 0.25, axis=axis)


def group(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Groups runs that differ only in the seed and in settings that do not change learning.

    Args:
      configs: ``config.json`` of each run, by its directory.

    Returns:
      The directories of each group, by its label: the algorithm, the environment if the runs have several, and the
      settings in which groups of the same algorithm and environment differ.
    """
    kinds: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name, config in configs.items():
        settings = {**config["hyperparameters"], **config["run"]}
        kinds.setdefault((config["algorithm"], settings.pop("env")), {})[name] = settings
    several = len({env for _, env in kinds}) > 1
    groups: dict[str, list[str]] = {}
    for (algorithm, env), runs in kinds.items():
        shared = set.intersection(*(set(settings) for settings in runs.values())) - SAME_CURVE
        differ = [
            key for key in sorted(shared) if len({json.dumps(each[key], sort_keys=True) for each in runs.values()}) > 1
        ]
        for name, settings in runs.items():
            parts = [algorithm, *([env] if several else []), *(f"{key}={_text(settings[key])}" for key in differ)]
            groups.setdefault(" ".join(parts), []).append(name)
    return groups


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{key}={x}" for key, x in value.items()]
    return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def plot(
    run_dirs: Sequence[str | pathlib.Path],
    out: str | pathlib.Path,
    *,
    metric: str = "episode/return",
    x: str = "steps",
) -> None:
    """Plots a metric of runs: a thin line per seed, and the interquartile mean and interval of each group.

    Args:
      out: the image file to write; its extension sets the format (png, pdf, svg ...).
      x: ``steps`` or ``time``.

    Raises:
      ConfigError: a directory is no run, no run has the metric, or the image cannot be written.
    """
    if x not in AXES:
        raise ConfigError(f"--x {x} is none of {', '.join(AXES)}{did_you_mean(x, AXES)}")
    if not run_dirs:
        raise ConfigError("which runs? Name their directories, as in: jaxrl-dist plot runs/* -o curves.png")
    curves: dict[str, Curve] = {}
    without: list[NoValueError] = []
    for name in map(str, run_dirs):
        try:
            curves[name] = read_curve(pathlib.Path(name), metric, x)
        except NoValueError as error:
            without.append(error)
    if not curves:
        raise without[0]
    for reason in without:
        warnings.warn(f"{reason}; this run is left out", ConfigWarning, stacklevel=2)
    groups = group({name: _read_config(pathlib.Path(name)) for name in curves})
    try:
        _draw({label: [curves[name] for name in names] for label, names in groups.items()}, metric, x, out)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {out} cannot be written: {error}") from error


def _draw(groups: Mapping[str, Sequence[Curve]], metric: str, x: str, out: str | pathlib.Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: its backend belongs to the caller, such as a notebook

    fig = Figure(figsize=(7, 4.2), layout="constrained")
    ax = fig.subplots()
    labels = []
    for index, (label, curves) in enumerate(groups.items()):
        color, several = f"C{index}", len(curves) > 1
        for curve in curves:
            ax.plot(curve.x, curve.y, color=color, linewidth=0.6, alpha=0.5 if several else 1.0)
        if several:
            line = middle(curves)
            ax.plot(line.x, line.y, color=color, linewidth=2)
            ax.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)
        ax.plot([], [], color=color, linewidth=2, label=f"group {index}")
        seeds = f" ({len(curves)} seeds)" if several else ""
        labels.append("\n".join(textwrap.wrap(label[:_LABEL_WIDTH] + seeds, _LEGEND_WIDTH)))
    ax.set_xlabel(AXES[x][1])
    ax.set_ylabel(metric, parse_math=False)
    title = None
    if any(len(curves) > 1 for curves in groups.values()):
        title = f"interquartile mean and {CONFIDENCE:.0%} bootstrap interval over seeds"
    # The legend is below the axes. The figure grows by its lines, so the axes keep their size.
    columns = max(1, _LEGEND_WIDTH // (max(map(len, labels)) + 8))
    lines = sum(label.count("\n") + 1 for label in labels) / columns + 2
    fig.set_figheight(4.2 + 0.17 * lines)
    handles, _ = ax.get_legend_handles_labels()
    options: dict[str, Any] = {"fontsize": "small", "title_fontsize": "small", "frameon": False}
    legend = fig.legend(handles, labels, loc="outside lower center", ncols=columns, title=title, **options)
    for text in legend.get_texts():
        text.set_parse_math(False)
    fig.savefig(out, dpi=120)


def _read_config(run_dir: pathlib.Path) -> Mapping[str, Any]:
    """Reads a run's ``config.json``, and checks that it has every entry that ``group`` needs."""
    from jaxrl_dist.run.files import read_json

    path = run_dir / CONFIG_FILE
    config = read_json(path)
    parts = {"algorithm": str, "hyperparameters": dict, "run": dict}
    for part, kind in parts.items():
        if not (isinstance(config, dict) and isinstance(config.get(part), kind)):
            raise ConfigError(f"{path} is damaged: {part} is missing")
    if not isinstance(config["run"].get("env"), str):
        raise ConfigError(f"{path} is damaged: env is missing")
    return config
