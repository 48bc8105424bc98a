"""Reads the curves and configs of run directories, and groups runs that differ only in their seed.

Imports numpy late, so that ``--help`` is fast.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

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
FORMS = "md", "csv", "tex"
"""Forms of tables, by the extensions of their files: Markdown, CSV and LaTeX."""
SAME_CURVE = {*RESUMABLE, "seed", "run_dir"} - {"data"}
"""Fields of ``Train`` in which the runs of a group may differ:
only the seed changes how a run learns."""
OF_EVALUATION = {"evaluation_policy", "evaluation_max_steps"}
"""Those that change what an evaluation measures."""
LARGEST = 1e100
"""Larger numbers are rejected: their sums and differences would overflow."""
POINTS = 200
"""Points of the axis on which the curves of several seeds are aggregated."""
FINAL = 0.1
"""Last part of a curve whose mean is the run's final score."""
AT_ONCE = "evaluation/", "exact/"
"""How metrics begin that are of a policy, and not means over an interval of training."""
_MAX_METRICS = 2**31  # bytes


@dataclasses.dataclass(frozen=True)
class Plot:
    """Plots learning curves of runs, or compares their final scores;
    seeds of one configuration form a group.
    """

    run_dirs: Annotated[tuple[str, ...], help.Argument("RUN_DIR ...")] = ()
    """Directories of runs or of populations;
    runs without a value of the metric are skipped with a warning."""
    out: Annotated[str | None, help.Alias("-o")] = None
    """The file to write; its extension sets the format: png, pdf, svg ..., for tables md, csv or
    tex. None: curves.png, or the terminal for a table."""
    kind: Literal["curve", "profile", "improvement", "table"] = "curve"
    """Learning curves; or of final scores the performance profile,
    the probability of improvement, or a table."""
    labels: tuple[str, ...] = ()
    """A name for each group of runs, in the order of their first runs: --labels IPPO MAPPO.
    None: what differs."""
    metric: str = "episode/return"
    """A metric of metrics.jsonl; of several policies, '*/episode/return' is each one's. A last
    report of less than half an interval is joined to the one before, weighted by episodes or else
    by env steps."""
    score: Literal["training", "evaluation"] = "training"
    """The final score of a run: the metric's mean over its last tenth, weighted by episodes or else
    by env steps, or its value in the evaluation at the end."""
    x: Literal["steps", "updates", "time"] = "steps"
    """Horizontal axis of curves: environment steps, updates or seconds."""
    smooth: int = setting(1, low=1)
    """Each point of a curve is the mean of so many of the newest reports up to it, of fewer at the
    start; 1 draws each report by itself. A last report of less than half an interval is always
    joined to the one before."""
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
    """Where the run's last report is, if that is after x[-1]: there the metric may be null."""

    def smoothed(self, reports: int) -> Curve:
        """Returns the trailing moving average over so many reports, of fewer at the start."""
        ends = range(1, len(self.y) + 1)  # a difference of sums would be wrong after a large number
        return self._replace(
            y=np.array([self.y[max(end - reports, 0) : end].mean() for end in ends])
        )

    def final(self) -> float:
        """Returns the run's final score: the mean by ``weight``
        of the reports in the last tenth of the run.

        If none of them has a value, it is the last value.
        """
        last = self.x > (1 - FINAL) * max(self.end, self.x[-1])
        last[-1] = True
        return float(
            np.average(self.y[last], weights=np.broadcast_to(self.weight, self.y.shape)[last])
        )


class Middle(NamedTuple):
    """The interquartile mean of several seeds and its interval; ``[POINTS]`` float64.

    NaN where no curve has values, and at the first point of other curves than before:
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


def with_members(run_dirs: Sequence[str | pathlib.Path]) -> list[str]:
    """Replaces the directory of each population by those of its members."""
    return [
        str(run)
        for run_dir in map(pathlib.Path, run_dirs)
        for run in members_of(run_dir) or [run_dir]
    ]


def read_curve(run_dir: pathlib.Path, metric: str, x: str = "steps") -> Curve:
    """Reads one metric from a run's ``metrics.jsonl``, skipping reports in which it is null.

    The weight of a mean over episodes (``episode/...``) is their number, that of others the env
    steps since the report before. A last report of less than half an interval is joined to the one
    before, by these weights. Evaluations are of one moment: they weigh alike and are not joined. An
    incomplete last line is skipped: the run may still be writing it, or may have been killed.

    Raises:
      ConfigError: the file is missing or damaged; the message names the line.
      NoValueError: the file has no report yet, or no such metric, or the metric never had a value.
    """
    path = run_dir / METRICS
    (field, _) = AXES[x]
    try:
        content = read_plain(path, _MAX_METRICS)
    except ConfigError as error:
        raise ConfigError(f"{run_dir} is not a run directory: {error.with_flags}") from None
    names: set[str] = set()
    points: list[tuple[float, float, float]] = []
    at = 0.0
    before = 0
    for number, line in _lines(path, content):
        names |= line.keys()
        at = _number(path, number, line, field)
        if points and at < points[-1][0]:
            raise ConfigError(
                f"{path} is damaged: {field} of line {number} is {at:g} after {points[-1][0]:g}"
            )
        if line.get(metric) is not None:
            points.append((at, _number(path, number, line, metric), _weight(line, metric, before)))
        before = line.get("env_steps", 0)
    if not points:
        raise _without_value(run_dir, metric, names)
    if metric.startswith(AT_ONCE):
        whole = points
    else:
        whole = _in_whole_intervals(points)
    xs, ys, weights = np.array(whole, float).T
    return Curve(xs, ys, weights, at)


def _weight(line: Mapping[str, Any], metric: str, before: Any) -> float:
    """Returns of how much a report's value is the mean: episodes,
    or env steps since it had ``before``; at least 1.
    """
    # of several policies: NAME/episode/return
    policy, of_episodes, _ = metric.partition("episode/")
    if metric.startswith(AT_ONCE):
        return 1
    size: Any = line.get(f"{policy}episode/count" if of_episodes else "env_steps")
    if not of_episodes:
        if _can_draw(size) and _can_draw(before):
            size = size - before
        else:
            size = 1
    if _can_draw(size):
        return max(size, 1)
    return 1


def _without_value(run_dir: pathlib.Path, metric: str, names: Collection[str]) -> NoValueError:
    """Says why a run has no value of a metric, if its reports have those of ``names``."""
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
    (field, _) = AXES[x]
    # the run still trains, or has ended early
    if path.exists():
        summary = read_json(path)
    else:
        summary = {field: 0}
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


def _in_whole_intervals(
    points: list[tuple[float, float, float]],
) -> list[tuple[float, float, float]]:
    """Joins a last report of less than half an interval to the one before:
    it may have only an episode or two.
    """
    if len(points) < 3 or points[-1][0] - points[-2][0] >= 0.5 * (points[-2][0] - points[-3][0]):
        return points
    (_, before, many), (at, last, few) = points[-2:]
    return [*points[:-2], (at, (many * before + few * last) / (many + few), many + few)]


def _lines(path: pathlib.Path, content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the reports in ``metrics.jsonl``, each with its line number."""
    texts = content.split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            if number == len(texts):  # it has no newline, so it may be incomplete
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
    value: Any = line.get(name)
    if not _can_draw(value):
        if name in line:
            shown = f"{_shown(value)}, which cannot be drawn"
        else:
            shown = "missing"
        raise ConfigError(f"{path} is damaged: {name} of line {number} is {shown}")
    return float(value)


def _can_draw(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= LARGEST


def _shown(value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= 40:
        return text
    return f"{text[:36]} ..."


def middle(curves: Sequence[Curve]) -> Middle:
    """Computes the interquartile mean over seeds and its bootstrap interval, point by point.

    Source: Agarwal et al. (2021), https://arxiv.org/abs/2108.13264, section 4.3. Curves are
    interpolated linearly; each point uses only the curves that reach it. Those that begin, or end,
    within a report interval of each other do so together: their first or last value is held until
    then.
    """
    from jaxrl_dist.commands.plot import statistics  # here, not above: it imports scipy

    intervals = [float(np.median(np.diff(c.x, prepend=0.0))) for c in curves]  # runs begin at 0
    begins = -_joined([-c.x[0] for c in curves], intervals)
    ends = _joined([c.x[-1] for c in curves], intervals)
    x = np.linspace(begins.min(), ends.max(), POINTS)
    values = np.array([np.interp(x, c.x, c.y) for c in curves])
    reached = (begins[:, None] <= x) & (x <= ends[:, None])
    y, low, high = (np.full(POINTS, np.nan) for _ in range(3))
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
    """Moves each end up to the highest one of those less than its report interval above it."""
    joined = np.array(ends)
    top = np.inf
    for index in np.argsort(-joined):
        if top - ends[index] < intervals[index]:
            top = top
        else:
            top = ends[index]
        joined[index] = top
    return joined


def group(
    configs: Mapping[str, Mapping[str, Any]], same: Collection[str] = SAME_CURVE
) -> list[Group]:
    """Groups runs that differ only in the seed and in settings that do not change learning.

    A label is the algorithm, if there are several, and the settings in which runs of the same
    algorithm and environment differ. Where there are no settings, it is the algorithm.

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
            if several or not differ:
                parts = [algorithm]
            else:
                parts = []
            parts += [f"{key}={_text(settings[key])}" for key in differ]
            groups.setdefault((env, " ".join(parts)), []).append(name)
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
        value = [f"{key}={x}" for key, x in value.items()]
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)
