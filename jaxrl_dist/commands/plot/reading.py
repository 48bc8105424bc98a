"""Reads the curves and configs of run directories, and groups runs that differ only in their seed.

Imports numpy late, so that ``--help`` is fast.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeGuard

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.commands import help
from jaxrl_dist.config.train import RESUMABLE
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import np
from jaxrl_dist.run.files import METRICS, SUMMARY, members_of
from jaxrl_dist.run.storage import read_json, read_plain

AXES = {
    "steps": ("env_steps", "environment steps"),
    "updates": ("updates", "updates"),
    "time": ("wall_time_s", "seconds since the start"),
}
"""Choices for the horizontal axis: the field of ``metrics.jsonl`` and the label."""
FORMS = ("md", "csv", "tex")
"""Forms of tables, by the extensions of their files: Markdown, CSV and LaTeX."""
SAME_CURVE = {*RESUMABLE, "seed", "run_dir"} - {"data"}
"""Fields of ``Train`` in which the runs of a group may differ:
only the seed changes how a run learns."""
OF_EVALUATION = {"evaluation_policy", "evaluation_max_steps"}
"""Fields of ``SAME_CURVE`` that change what an evaluation measures."""
LARGEST = 1e100
"""Larger numbers are rejected: their sums and differences would overflow."""
POINTS = 200
"""Points of the axis on which the curves of several seeds are aggregated."""
FINAL = 0.1
"""Last part of a curve whose mean is the run's final score."""
AT_ONCE = ("evaluation/", "exact/")
"""Prefixes of metrics that are not means over an interval of training, but measure one policy."""
_MAX_METRICS = 2**31  # bytes
Config: TypeAlias = Mapping[str, Any]
"""A run's ``config.json``."""


@dataclasses.dataclass(frozen=True)
class Plot:
    """Plots learning curves of runs, or compares their final scores;
    seeds of one configuration form a group.
    """

    run_dirs: Annotated[tuple[str, ...], help.Argument("RUN_DIR ...")] = ()
    """Directories of runs or of populations, and CSV files of other libraries (columns env_steps
    and return, perhaps seed and env);
    runs without a value of the metric are skipped with a warning."""
    out: Annotated[str | None, help.Alias("-o")] = None
    """The file to write; its extension sets the format: png, pdf, svg ..., for tables md, csv or
    tex. None: curves.png, or the terminal for a table."""
    kind: Literal["curve", "profile", "improvement", "table"] = "curve"
    """Learning curves, or final scores as a performance profile, a probability of improvement or a
    table."""
    labels: tuple[str, ...] = ()
    """A name for each group of runs, in the order of their first runs: --labels IPPO MAPPO.
    None: what differs."""
    metric: str = "episode/return"
    """A metric of metrics.jsonl; with several policies, '*/episode/return' draws each one's. A last
    report of less than half an interval is joined to the one before, weighted by episodes or else
    by env steps."""
    score: Literal["training", "evaluation"] = "training"
    """The final score of a run: the metric's mean over its last tenth, weighted by episodes or else
    by env steps, or its value in the evaluation at the end."""
    x: Literal["steps", "updates", "time"] = "steps"
    """Horizontal axis of curves: environment steps, updates or seconds."""
    smooth: int = setting(1, low=1)
    """Number of reports to average for each point of a curve, the newest up to it; 1 draws each
    report by itself. A last report of less than half an interval is always joined to the one
    before."""
    width: Literal["one", "two"] = "two"
    """Width of the picture: 'one' column of a page with two columns (3.3 inches),
    or 'two' (6.9 inches)."""


class Curve(NamedTuple):
    """One metric of one run."""

    x: np.ndarray
    """[N] float64, ascending."""
    y: np.ndarray
    """[N] float64, finite."""
    weight: np.ndarray | float = 1.0
    """[N] float64, positive: the episodes, or env steps, of which y is the mean."""
    end: float = 0.0
    """Where the run's last report is, if that is after x[-1]: the metric may be null there."""

    def smoothed(self, reports: int) -> Curve:
        """Returns the trailing moving average over so many reports, of fewer at the start."""
        ends = range(1, len(self.y) + 1)  # a difference of sums would be wrong after a large number
        means = [self.y[max(end - reports, 0) : end].mean() for end in ends]
        return self._replace(y=np.array(means))

    def final(self) -> float:
        """Returns the run's final score: the mean by ``weight``
        of the reports in the last tenth of the run.

        If none of them has a value, it is the last value.
        """
        last = self.x > (1 - FINAL) * max(self.end, self.x[-1])
        last[-1] = True
        weight = np.broadcast_to(self.weight, self.y.shape)
        return float(np.average(self.y[last], weights=weight[last]))


class Middle(NamedTuple):
    """The interquartile mean of several seeds and its interval; ``[POINTS]`` float64.

    NaN where no curve has values, and at the first point after a curve begins or ends:
    a line has a gap there.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    curves: np.ndarray
    """``[POINTS]`` integers: how many curves have values."""


class Group(NamedTuple):
    """Runs of one environment that differ only in their seed."""

    env: str
    label: str
    """What tells the group from the others of its environment, in few words."""
    runs: list[str]
    """Their directories."""

    def ends(self, curves: Mapping[str, Curve]) -> tuple[float, float]:
        """Returns where the first and the last of its runs end."""
        ends = [max(float(curves[name].x[-1]), curves[name].end) for name in self.runs]
        return min(ends), max(ends)


class NoValueError(ConfigError):
    """A run has no value of the metric, or none yet."""


class _Point(NamedTuple):
    """A point of a curve; see ``Curve``."""

    x: float
    y: float
    weight: float


def with_members(run_dirs: Sequence[str | pathlib.Path]) -> list[str]:
    """Replaces the directory of each population by its members' directories."""
    return [
        str(run)
        for run_dir in map(pathlib.Path, run_dirs)
        for run in members_of(run_dir) or [run_dir]
    ]


def read_curve(run_dir: pathlib.Path, metric: str, x: str = "steps") -> Curve:
    """Reads one metric from a run's ``metrics.jsonl``, skipping reports in which it is null.

    A mean over episodes (``episode/...``) has their number as its weight, other metrics the env
    steps since the report before. A last report of less than half an interval is joined to the one
    before, by these weights. Evaluations are of one moment: they weigh alike and are not joined. An
    incomplete last line is skipped: the run may still be writing it, or may have been killed.

    Raises:
      ConfigError: the file is missing or damaged; the message names the line.
      NoValueError: the file has no report yet, or no such metric, or the metric never had a value.
    """
    path = run_dir / METRICS
    field, _ = AXES[x]
    try:
        content = read_plain(path, _MAX_METRICS)
    except ConfigError as error:
        raise ConfigError(f"{run_dir} is not a run directory: {error.with_flags}") from None
    names: set[str] = set()
    points: list[_Point] = []
    end = 0.0
    env_steps_before: Any = 0
    for number, line in _lines(path, content):
        names |= line.keys()
        end = _number(path, number, line, field)
        if points and end < points[-1].x:
            raise ConfigError(
                f"{path} is damaged: {field} of line {number} is {end:g} after {points[-1].x:g}"
            )
        if line.get(metric) is not None:
            value = _number(path, number, line, metric)
            points.append(_Point(end, value, _weight(line, metric, env_steps_before)))
        env_steps_before = line.get("env_steps", 0)
    if not points:
        raise _without_value(run_dir, metric, names)
    if not metric.startswith(AT_ONCE):
        points = _in_whole_intervals(points)
    x_values, values, weights = np.array(points, float).T
    return Curve(x_values, values, weights, end)


def _weight(line: Mapping[str, Any], metric: str, env_steps_before: Any) -> float:
    """Returns the number of episodes, or of env steps since the report before, of which a report's
    value is the mean; at least 1.
    """
    if metric.startswith(AT_ONCE):
        return 1
    # with several policies: NAME/episode/return
    policy, of_episodes, _ = metric.partition("episode/")
    if of_episodes:
        size = line.get(f"{policy}episode/count")
    else:
        env_steps: Any = line.get("env_steps")
        if not (_can_draw(env_steps) and _can_draw(env_steps_before)):
            return 1
        size = env_steps - env_steps_before
    return max(size, 1) if _can_draw(size) else 1


def _without_value(run_dir: pathlib.Path, metric: str, names: Collection[str]) -> NoValueError:
    """Returns the error that says why a run has no value of a metric; ``names``: the metrics of
    its reports.
    """
    if not names:
        return NoValueError(f"{run_dir / METRICS} has no reports yet")
    if metric in names:
        return NoValueError(
            f"{run_dir}: {metric} never had a value, as no episode ended or nothing was learnt"
        )
    shown = ", ".join(sorted(name for name in names if "/" in name))
    return NoValueError(
        f"{run_dir} has no metric {metric!r}{did_you_mean(metric, names)}; it has: {shown}"
    )


def read_evaluation(run_dir: pathlib.Path, metric: str, x: str = "steps") -> Curve:
    """Reads a metric of a run's last evaluation from its ``summary.json``, as a curve of one point.

    Raises:
      ConfigError: the file is damaged.
      NoValueError: the run has no evaluation at its end, or none of this metric.
    """
    path = run_dir / SUMMARY
    field, _ = AXES[x]
    summary = {field: 0}  # of a run that still trains, or has ended early
    if path.exists():
        summary = read_json(path)
    if not isinstance(summary, dict) or not _can_draw(summary.get(field)):
        raise ConfigError(f"{path} is damaged: {field} is missing")
    evaluation: Any = summary.get("evaluation")
    if not isinstance(evaluation, dict):
        raise NoValueError(f"{run_dir} has no evaluation at its end")
    name = metric.replace("episode/return", "return_mean").replace("episode/length", "length_mean")
    if not _can_draw(evaluation.get(name)):
        raise NoValueError(
            f"{path}: the evaluation has no {name}; it has: {', '.join(sorted(evaluation))}"
        )
    return Curve(*np.array([[summary[field]], [evaluation[name]]], float))


def _in_whole_intervals(points: list[_Point]) -> list[_Point]:
    """Joins a last report of less than half an interval to the one before:
    it may have only an episode or two.
    """
    if len(points) < 3:
        return points
    *others, before, last = points
    if last.x - before.x >= 0.5 * (before.x - others[-1].x):
        return points
    weight = before.weight + last.weight
    mean = (before.weight * before.y + last.weight * last.y) / weight
    return [*others, _Point(last.x, mean, weight)]


def _lines(path: pathlib.Path, content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the reports in ``metrics.jsonl``, each with its line number."""
    raw_lines = content.split(b"\n")
    for number, raw_line in enumerate(raw_lines, 1):
        try:
            line = json.loads(raw_line)
        except (ValueError, RecursionError):
            if number == len(raw_lines):  # it has no newline, so it may be incomplete
                return
            raise ConfigError(f"{path} is damaged: line {number} is not JSON") from None
        if not isinstance(line, dict):
            raise ConfigError(
                f"{path} is damaged: line {number} is {_shown(line)}, which is not a report"
            )
        yield number, line


def _number(path: pathlib.Path, number: int, line: Mapping[str, Any], name: str) -> float:
    """Returns a number of a line.

    Raises:
      ConfigError: it is missing or cannot be drawn.
    """
    if name not in line:
        raise ConfigError(f"{path} is damaged: {name} of line {number} is missing")
    value: Any = line[name]
    if not _can_draw(value):
        raise ConfigError(
            f"{path} is damaged: {name} of line {number} is {_shown(value)}, which cannot be drawn"
        )
    return float(value)


def _can_draw(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST


def _shown(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else f"{shown[:36]} ..."


def middle(curves: Sequence[Curve]) -> Middle:
    """Computes the interquartile mean over seeds and its bootstrap interval, point by point.

    Source: Agarwal et al. (2021), https://arxiv.org/abs/2108.13264, section 4.3. Curves are
    interpolated linearly; each point uses only the curves that reach it. Curves that begin, or end,
    within a report interval of each other do so together: their first or last value is held until
    then.
    """
    from jaxrl_dist.commands.plot import statistics  # here, not above: it imports scipy

    # runs begin at 0
    intervals = [float(np.median(np.diff(curve.x, prepend=0.0))) for curve in curves]
    begins = -_joined([-curve.x[0] for curve in curves], intervals)
    ends = _joined([curve.x[-1] for curve in curves], intervals)
    x = np.linspace(begins.min(), ends.max(), POINTS)
    values = np.array([np.interp(x, curve.x, curve.y) for curve in curves])
    reached = (begins[:, None] <= x) & (x <= ends[:, None])
    y, low, high = np.full((3, POINTS), np.nan)
    sets, points = np.unique(reached, axis=1, return_inverse=True)
    for index, seeds in enumerate(sets.T):
        if seeds.any():
            chosen = points == index
            strata = [values[seeds][:, chosen].T]
            y[chosen] = statistics.iqm(strata)
            low[chosen], high[chosen] = statistics.interval(strata, statistics.iqm)
    for line in (y, low, high):
        line[1:][np.diff(points) != 0] = np.nan
    return Middle(x, y, low, high, reached.sum(axis=0))


def _joined(ends: Sequence[float], intervals: Sequence[float]) -> np.ndarray:
    """Moves each end up to the highest end that is less than its report interval above it."""
    joined = np.array(ends)
    top = np.inf
    for index in np.argsort(-joined):
        if top - ends[index] >= intervals[index]:
            top = ends[index]
        joined[index] = top
    return joined


def group(configs: Mapping[str, Config], same: Collection[str] = SAME_CURVE) -> list[Group]:
    """Groups runs that differ only in the seed and in settings that do not change learning.

    A label is the algorithm, if there are several, and the settings in which runs of the same
    algorithm and environment differ. Without such settings, it is the algorithm.

    Args:
      configs: ``config.json`` of each run, by its directory.
      same: the settings in which the runs of a group may differ.
    """
    kinds: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name, config in configs.items():
        settings = {**config["hyperparameters"], **config["run"]}
        kinds.setdefault((settings.pop("env"), config["algorithm"]), {})[name] = settings
    several = len({algorithm for _, algorithm in kinds}) > 1
    groups: dict[tuple[str, str], list[str]] = {}
    for (env, algorithm), runs in kinds.items():
        differ = _differing(list(runs.values()), same)
        for name, settings in runs.items():
            words = [f"{key}={_text(settings[key])}" for key in differ]
            if several or not words:
                words = [algorithm, *words]
            groups.setdefault((env, " ".join(words)), []).append(name)
    return [Group(env, label, names) for (env, label), names in groups.items()]


def _differing(runs: Sequence[Mapping[str, Any]], same: Collection[str]) -> list[str]:
    """Returns the names of the settings that all runs have, and in which they differ,
    without the ``same``.
    """
    shared = sorted(set.intersection(*map(set, runs)) - {*same})
    return [
        key
        for key in shared
        if len({json.dumps(settings[key], sort_keys=True) for settings in runs}) > 1
    ]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)
