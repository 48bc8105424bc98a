"""The returns by which a run ends, members are selected and checkpoints are judged: those of the newest reports.

A report interval may hold only a few episodes, so their window is a length of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_dist.types import EpisodeStats

if TYPE_CHECKING:
    from jaxrl_dist.plans.job import Job

METRIC = "episode/recent_return"
"""Mean return of the episodes in the window; in a last report of less than an interval, with those since then."""
_Sums = dict[str, tuple[float, float]]
"""Sum of the returns, and number, of the finished episodes in an interval: of all under "", and of each policy."""


class Window:
    """The finished episodes of the newest whole reports, ``job.reports_per_score`` of them."""

    def __init__(self, job: Job, most: int | None = None) -> None:
        """Begins as the checkpoint of ``job`` says, or empty.

        Args:
          most: reports between two selections, which judge no episode from before the last one; None: there are none.
        """
        self.score = job.score
        """Mean return in the newest full window in which episodes ended; -infinity if there was none."""
        reports = job.reports_per_score if most is None else min(most, job.reports_per_score)
        self._reports = collections.deque(sums_of_json(job.progress.get("window", [])), maxlen=reports)

    def add(self, episodes: Mapping[str, EpisodeStats]) -> None:
        """Adds each policy's finished episodes of a whole interval."""
        self._reports.append(_sums(episodes))
        mean = _means(self._reports).get("")
        if len(self._reports) == self._reports.maxlen and mean is not None:
            self.score = mean

    def metrics(self, since: Mapping[str, EpisodeStats] | None) -> dict[str, float | None]:
        """Returns ``METRIC``, of all episodes and of each of several policies; None where no episode ended.

        Args:
          since: finished episodes after the newest whole interval; None: the report is at its end.
        """
        means = _means([*self._reports, *([] if since is None else [_sums(since)])])
        return {f"{name}/{METRIC}" if name else METRIC: mean for name, mean in means.items()}

    def to_json(self) -> list[dict[str, list[str]]]:
        """Returns the checkpoint's JSON: numbers in hexadecimal, which is exact and can represent infinity."""
        return [{name: [x.hex() for x in pair] for name, pair in sums.items()} for sums in self._reports]


def sums_of_json(stored: list[dict[str, list[str]]]) -> list[_Sums]:
    """The inverse of ``Window.to_json``.

    Raises:
      LookupError, TypeError, ValueError, AttributeError: no run can have written it.
    """

    def exact(total: str, count: str) -> tuple[float, float]:
        return float.fromhex(total), float.fromhex(count)

    return [{name: exact(*pair) for name, pair in sums.items()} for sums in stored]


def recent_return(metrics: Mapping[str, float | None]) -> float | None:
    """Returns the mean return of a report's window, or of its interval in files of an earlier version."""
    return metrics.get(METRIC, metrics["episode/return"])


def merged(episodes: Mapping[str, EpisodeStats], xp: Any = np) -> EpisodeStats:
    """Combines the statistics of all devices and policies; ``xp`` is ``jax.numpy`` in a program."""
    first, *others = (stats.merge() for stats in episodes.values())
    return jax.tree.map(lambda *x: xp.stack(x), first, *others).merge() if others else first


def _sums(episodes: Mapping[str, EpisodeStats]) -> _Sums:
    parts = {"": merged(episodes), **{name: stats.merge() for name, stats in episodes.items() if name}}
    return {name: (float(x.return_sum), float(x.episodes)) for name, x in parts.items()}


def _means(reports: Any) -> dict[str, float | None]:
    """Returns the mean return of all episodes of some intervals, and of each policy's."""
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for sums in reports for name in sums) or ("",):
        totals, counts = zip(*(sums.get(name, (0.0, 0.0)) for sums in reports), strict=True) if reports else ((), ())
        means[name] = sum(totals) / count if (count := sum(counts)) else None
    return means
