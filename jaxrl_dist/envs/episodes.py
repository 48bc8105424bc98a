"""Statistics of episodes: returns, lengths, and the numbers that an environment's info reports.

Metrics of the info are named as in ``--info-metrics``: ``success`` is the last value that an
episode reports, and ``fuel:sum`` is the sum of its values. NaN means that an episode has reported
none so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import leaves
from jaxrl_dist.types import Array, EpisodeStats

SUM = ":sum"
"""Ending of a metric that adds up the values of an episode."""


def parse(metrics: str | None) -> tuple[str, ...]:
    """Splits ``--info-metrics`` at its commas.

    Raises:
      ConfigError: a name is empty, or occurs twice.
    """
    if metrics is None:
        return ()
    names = tuple(name.strip() for name in metrics.split(","))
    for name in names:
        if not name.removesuffix(SUM):
            raise ConfigError(
                f"--info-metrics {metrics!r} has an empty name; write names such as success,score"
            )
        if names.count(name) > 1:
            raise ConfigError(f"--info-metrics names {name} twice")
    return names


def field(metric: str) -> str:
    """Returns a metric's name in the info: that of an entry,
    or a path such as ``task/success`` into nested dicts.
    """
    return metric.removesuffix(SUM)


def check_known(metrics: Iterable[str], known: Iterable[str], env: str) -> None:
    """Checks that an info has all entries of the metrics.

    Args:
      known: the entries that the info has.
      env: the environment's name, with its backend.

    Raises:
      ConfigError: an entry is missing.
    """
    known = sorted(known)
    for metric in metrics:
        if field(metric) not in known:
            raise ConfigError(
                f"--info-metrics {metric}: the info of {env} has no number {field(metric)!r}"
                f"{did_you_mean(field(metric), known)}; it has: {', '.join(known) or 'none'}"
            )


def numbers(info: Any, agents: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the entries of an info that are single numbers, by their path.

    Args:
      agents: the ``K`` agents of the environment, if there are several. Then an entry is also an
        array ``[K]``, or a list of a number for each agent, where the info has it by agent:
        ``success`` stands for both ``{"ann": {"success": 1}}`` and ``{"success": {"ann": 1}}``. It
        is NaN for an agent without this entry.
    """
    entries: dict[str, Any] = {}
    by_agent: dict[str, dict[str, Any]] = {}
    for path, x in leaves(_with_text_names(info)).items():
        owner, name = _divided(path, agents)
        if owner and name and _is_number(x):
            by_agent.setdefault(name, {})[owner] = x.reshape(()) if hasattr(x, "reshape") else x
        elif path and (_is_number(x) or (not owner and _is_number_of_each(x, agents))):
            entries[path] = x
    for name, values in by_agent.items():
        entries[name] = [values.get(agent, np.nan) for agent in agents]
    return entries


def _divided(path: str, agents: Sequence[str]) -> tuple[str, str]:
    """Returns the agent whose entry this is, if any, and the path without the agent."""
    places = path.split("/")
    owner = next((place for place in places if place in agents), "")
    return owner, "/".join(place for place in places if place != owner)


def _with_text_names(info: object) -> Any:
    """Returns an info whose names, also in nested dicts, are texts."""
    if isinstance(info, Mapping):
        return {str(name): _with_text_names(x) for name, x in info.items()}
    return info


def _is_number(x: Any) -> bool:
    """Returns whether this is a single number, or an array of one."""
    if not hasattr(x, "dtype"):
        return isinstance(x, bool | int | float)
    return getattr(x.dtype, "kind", "") in "biuf" and math.prod(np.shape(x)) == 1


def _is_number_of_each(x: Any, agents: Sequence[str]) -> bool:
    """Returns whether this is an array of a number for each of several agents."""
    if not agents or not hasattr(x, "dtype"):
        return False
    return getattr(x.dtype, "kind", "") in "biuf" and np.shape(x) == (len(agents),)


def advanced(running: Mapping[str, Array], new: Mapping[str, Array]) -> dict[str, Array]:
    """Adds a step's values to the running episodes' values, both ``[...]`` float32 by metric."""

    def one(metric: str, old: Array, value: Array) -> Array:
        xp = value.__array_namespace__()
        finite = xp.isfinite(value)
        if metric.endswith(SUM):
            value = value + xp.where(xp.isfinite(old), old, 0)
        return xp.where(finite, value, old)

    return {metric: one(metric, running[metric], value) for metric, value in new.items()}


def reported(ended: Array, info: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Returns the field ``info`` of the statistics of the episodes that ended, ``[B]``;
    ``info``: ``[B, ...]`` each.
    """
    xp = ended.__array_namespace__()
    known = {metric: rows(ended, x) & xp.isfinite(x) for metric, x in info.items()}
    return {
        metric: (xp.where(known[metric], x, 0), known[metric].astype(np.float32))
        for metric, x in info.items()
    }


def rows(mask: Array, like: Array) -> Array:
    """Returns a mask ``[B]`` with axes of size 1 appended,
    so that it selects rows of ``like``, ``[B, ...]``.
    """
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


def ended_episodes(
    ended: Array, episode_return: Array, episode_length: Array, info: Mapping[str, Array] = {}
) -> EpisodeStats:
    """Returns the statistics ``[B]`` of the episodes that ended in this step;
    ``info`` as from ``advanced``.
    """
    xp = ended.__array_namespace__()
    return EpisodeStats(
        episodes=ended.astype(np.float32),
        return_sum=xp.where(ended, episode_return, 0.0),
        length_sum=xp.where(ended, episode_length, 0).astype(np.float32),
        return_min=xp.where(ended, episode_return, np.inf),
        return_max=xp.where(ended, episode_return, -np.inf),
        info=reported(ended, info),
    )


def no_episodes(count: int, metrics: Sequence[str] = ()) -> EpisodeStats:
    """Returns the statistics ``[count]`` of no episodes, as numpy arrays."""
    zeros = np.zeros(count, np.float32)
    return ended_episodes(zeros > 0, zeros, zeros, dict.fromkeys(metrics, zeros))


class EpisodeCounter:
    """Adds up returns, lengths and numbers of the info of
    the running episodes in ``B`` host environments.
    """

    def __init__(
        self, num_envs: int, metrics: Sequence[str] = (), agents: Sequence[str] = ()
    ) -> None:
        """``metrics`` are from ``--info-metrics``,
        which several ``agents`` have each: ``[B, K]``.
        """
        self._return = np.zeros(num_envs, np.float32)
        self.length = np.zeros(num_envs, np.int32)
        """Env steps of the running episodes, ``[B]``."""
        shape = (num_envs, len(agents)) if agents else (num_envs,)
        self._info = {metric: np.full(shape, np.nan, np.float32) for metric in metrics}
        self._none = no_episodes(num_envs)

    def forget(self, env: int) -> None:
        """Begins anew in one environment, without the episode that it has broken off."""
        self._return[env] = 0
        self.length[env] = 0
        for x in self._info.values():
            x[env] = np.nan

    def add(
        self,
        reward: np.ndarray,
        valid: np.ndarray,
        over: np.ndarray,
        info: Mapping[str, np.ndarray] = {},
    ) -> EpisodeStats:
        """Adds one step and returns the statistics ``[B]`` of the episodes that ended in it.

        Args:
          reward: ``[B]``, raw; ignored where not ``valid``.
          over: ``[B]`` bool, True where an episode has ended.
          info: numbers ``[B]`` by metric, or ``[B, K]``, NaN where there is none;
            ignored where not ``valid``.
        """
        self._return += np.where(valid, reward, 0)
        self.length += valid
        new = {
            metric: np.where(rows(valid, x), info[metric], np.nan)
            for metric, x in self._info.items()
        }
        self._info = advanced(
            self._info, {metric: x.astype(np.float32) for metric, x in new.items()}
        )
        if not self._info and not over.any():  # as in most steps
            return self._none
        episodes = ended_episodes(over, self._return, self.length, self._info)
        self._return = np.where(over, 0, self._return).astype(np.float32)
        self.length = np.where(over, 0, self.length).astype(np.int32)
        self._info = {
            metric: np.where(rows(over, x), np.float32(np.nan), x)
            for metric, x in self._info.items()
        }
        return episodes
