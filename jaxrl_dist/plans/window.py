"""The returns of the newest reports, by which a run ends, members are selected and checkpoints are
judged.

A report interval may hold only a few episodes, so their window is a length of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_dist.mesh import flat
from jaxrl_dist.types import EpisodeStats

if TYPE_CHECKING:
    from jaxrl_dist.plans.session import Session

METRIC = "episode/recent_return"
"""Mean return of the episodes in the window; in a last report of less than an interval,
with those since then."""
LENGTH = "episode/recent_length"
"""Mean length of the same episodes, in env steps."""
_Sums = dict[str, tuple[float, float, float]]
"""Sum of the returns, number, and sum of the lengths of the finished episodes in an interval: of
all under "", and of each policy."""


class Window:
    """The finished episodes of the newest whole reports, ``session.reports_per_score`` of them."""

    def __init__(self, session: Session, most: int | None = None) -> None:
        """Begins as the checkpoint of ``session`` says, or empty.

        Args:
          most: reports between two selections, which judge no
            episode from before the last one; None: there are none.
        """
        self.score = session.score
        """Mean return in the newest full window in which episodes ended;
        -infinity if there was none."""
        if most is None:
            reports = session.reports_per_score
        else:
            reports = min(most, session.reports_per_score)
        self._reports = collections.deque(
            sums_of_json(session.progress.get("window", [])), maxlen=reports
        )

    def add(self, episodes: Mapping[str, EpisodeStats]) -> None:
        """Adds each policy's finished episodes of a whole interval."""
        self._reports.append(_sums(episodes))
        mean = _means(self._reports)[""][METRIC]
        if len(self._reports) == self._reports.maxlen and mean is not None:
            self.score = mean

    def metrics(self, since: Mapping[str, EpisodeStats] | None) -> dict[str, float | None]:
        """Returns ``METRIC`` and ``LENGTH``, of all episodes and of each of several policies;
        None where none ended.

        Args:
          since: finished episodes after the newest whole interval; None: the report is at its end.
        """
        means = _means([*self._reports, *([] if since is None else [_sums(since)])])
        return flat(means)

    def to_json(self) -> list[dict[str, list[str]]]:
        """Returns the checkpoint's JSON: numbers in exact hexadecimal, which has infinity."""
        return [
            {name: [x.hex() for x in parts] for name, parts in sums.items()}
            for sums in self._reports
        ]


def sums_of_json(stored: list[dict[str, list[str]]]) -> list[_Sums]:
    """The inverse of ``Window.to_json``.

    Raises:
      LookupError, TypeError, ValueError, AttributeError: no run can have written it.
    """

    def exact(total: str, count: str, length: str) -> tuple[float, float, float]:
        return float.fromhex(total), float.fromhex(count), float.fromhex(length)

    return [{name: exact(*parts) for name, parts in sums.items()} for sums in stored]


def recent_return(metrics: Mapping[str, float | None]) -> float | None:
    """Returns the mean return of a report's window; None if no episode ended in it."""
    return metrics.get(METRIC)


def merged(episodes: Mapping[str, EpisodeStats], xp: Any = np) -> EpisodeStats:
    """Combines the statistics of all devices and policies; ``xp`` is ``jax.numpy`` in a program."""
    first, *others = (stats.merge() for stats in episodes.values())
    if others:
        return jax.tree.map(lambda *x: xp.stack(x), first, *others).merge()
    return first


def _sums(episodes: Mapping[str, EpisodeStats]) -> _Sums:
    parts = {
        "": merged(episodes),
        **{name: stats.merge() for name, stats in episodes.items() if name},
    }
    return {
        name: (float(x.return_sum), float(x.episodes), float(x.length_sum))
        for name, x in parts.items()
    }


def _means(reports: Collection[_Sums]) -> dict[str, dict[str, float | None]]:
    """Returns the mean return and length of all episodes of some intervals, and of each
    policy's.
    """
    means: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(name for sums in reports for name in sums) or ("",):
        total, count, length = np.sum(
            [sums.get(name, (0.0, 0.0, 0.0)) for sums in reports] or [(0.0,) * 3], axis=0
        )
        means[name] = {
            METRIC: float(total / count) if count else None,
            LENGTH: float(length / count) if count else None,
        }
    return means
