"""Makes the rows of a data set from what users have: flat arrays, or episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxrl_dist.data import columns
from jaxrl_dist.data.declared import Declaration
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Interface
from jaxrl_dist.types import PyTree


class Rows(NamedTuple):
    """Rows ``[L, ...]``, of which the invalid ones hold the last observations of episodes."""

    obs: PyTree
    action: PyTree
    reward: np.ndarray
    terminated: np.ndarray
    """bool."""
    valid: np.ndarray
    """bool."""
    log_prob: np.ndarray | None
    interface: Interface


# --- Flat arrays ----------------------------------------------------------------------------------


class Steps(NamedTuple):
    """Flat arrays ``[N, ...]``, as ``Dataset.from_arrays`` takes them."""

    obs: PyTree
    action: PyTree
    reward: np.ndarray
    terminals: np.ndarray
    """bool: the ends of the task."""
    timeouts: np.ndarray
    """bool."""
    next_obs: PyTree
    """None: the rows are in the order of time."""
    log_prob: np.ndarray | None

    def torn(self) -> np.ndarray:
        """Returns where ``next_obs`` is not the observation of the row below, bool ``[N]``."""
        if self.next_obs is None:
            return np.zeros_like(self.terminals)
        following = jax.tree.map(lambda x: np.roll(x, -1, axis=0), self.obs)
        torn = ~columns.equal_rows(self.next_obs, following)
        torn[-1] = False  # nothing follows it
        return torn & ~self.terminals & ~self.timeouts


def read_steps(
    said: Declaration,
    obs: PyTree,
    action: PyTree,
    reward: ArrayLike,
    terminals: ArrayLike,
    timeouts: ArrayLike | None,
    next_obs: PyTree,
    log_prob: ArrayLike | None,
) -> Steps:
    """Reads and checks the arguments of ``Dataset.from_arrays``.

    Raises:
      ConfigError: arrays have other lengths, or they may be misread.
    """
    ends = columns.flags(terminals, "terminals").reshape(-1)
    steps = Steps(
        obs=said.observation.read(obs),
        action=said.action.read(action),
        reward=columns.arrays(reward).reshape(-1),
        terminals=ends,
        timeouts=np.zeros_like(ends),
        next_obs=None,
        log_prob=None,
    )
    if timeouts is not None:
        steps = steps._replace(timeouts=columns.flags(timeouts, "timeouts").reshape(-1))
    if next_obs is not None:
        steps = steps._replace(next_obs=said.observation.read(next_obs))
    if log_prob is not None:
        steps = steps._replace(log_prob=columns.arrays(log_prob).reshape(-1))
    _check_steps(steps)
    said.warn_of_starts([steps.action])
    return steps


def _check_steps(steps: Steps) -> None:
    lengths = {len(x) for x in jax.tree.leaves(steps)}
    if lengths != {len(steps.reward)} or not len(steps.reward):
        raise ConfigError(
            "the arrays of a data set must have the same length, at least 1, but these have "
            f"{sorted(lengths)}"
        )
    if steps.next_obs is not None and columns.entries(steps.next_obs) != columns.entries(steps.obs):
        raise ConfigError("next_obs and obs have different shapes")
    if np.count_nonzero(steps.timeouts) > 1 and steps.terminals[steps.timeouts].all():
        raise ConfigError(
            "each time-out is also a terminal; give terminals & ~timeouts, the ends of the task "
            "alone"
        )


def of_steps(steps: Steps, torn: np.ndarray, said: Declaration) -> Rows:
    """Adds a row with the successor of each episode's last step.

    Args:
      torn: as ``Steps.torn`` returns it.

    Raises:
      ConfigError: the mask cannot be one, or integers may mean several things.
    """
    ends = steps.terminals | steps.timeouts | torn
    ends[-1] = True
    if steps.next_obs is None:
        lost = ends & ~steps.terminals  # whose steps only give their observations
        successors = steps.obs
    else:
        lost = np.zeros_like(ends)
        successors = steps.next_obs
    has_successor = ends & ~lost
    copies = 1 + has_successor
    rows = np.repeat(np.arange(len(ends)), copies)
    added = np.zeros(len(rows), bool)
    added[np.cumsum(copies) - 1] = has_successor

    def with_successors(now: np.ndarray, later: np.ndarray) -> np.ndarray:
        column = now[rows]
        column[added] = later[rows[added]]
        return column

    obs = jax.tree.map(with_successors, steps.obs, successors)
    action, reward, terminated, log_prob = jax.tree.map(
        lambda x: x[rows], (steps.action, steps.reward, steps.terminals, steps.log_prob)
    )
    valid = ~added & ~lost[rows]
    interface = said.interface(obs, action)
    return Rows(obs, action, reward, terminated, valid, log_prob, interface)


# --- Episodes -------------------------------------------------------------------------------------


def of_episodes(episodes: Iterable[Mapping[str, PyTree]], said: Declaration) -> Rows:
    """Puts episodes one after the other, as ``Dataset.from_episodes`` takes them.

    Raises:
      ConfigError: there is no episode, or lengths do not fit.
    """
    given = _listed(episodes)
    ends = [columns.flags(episode["terminated"], "terminated") for episode in given]
    arrays = _read_episodes(given, said)
    _check_episodes(arrays, ends)
    said.warn_of_starts([episode["action"] for episode in arrays])
    obs = jax.tree.map(lambda *x: np.concatenate(x), *(episode["obs"] for episode in arrays))
    action = _joined(arrays, "action")
    last = np.cumsum([len(episode["reward"]) + 1 for episode in arrays]) - 1
    valid = np.ones(last[-1] + 1, bool)
    valid[last] = False
    terminated = np.zeros_like(valid)
    terminated[last - 1] = ends
    reward = _joined(arrays, "reward")
    log_prob = _joined(arrays, "log_prob") if "log_prob" in arrays[0] else None
    interface = said.interface(obs, action)
    return Rows(obs, action, reward, terminated, valid, log_prob, interface)


def _listed(episodes: Iterable[Mapping[str, PyTree]]) -> list[Mapping[str, PyTree]]:
    """Returns the episodes as a list, after checking that they are dicts with what is needed."""
    is_dict = isinstance(episodes, Mapping)
    given = [] if is_dict else list(episodes)
    if is_dict or not all(isinstance(episode, Mapping) for episode in given):
        raise ConfigError("make a data set from a list of episodes; each episode must be a dict")
    if not given:
        raise ConfigError("a data set needs one or more episodes")
    for number, episode in enumerate(given):
        missing = {"obs", "action", "reward", "terminated"} - episode.keys()
        if missing:
            raise ConfigError(f"episode {number} has no {min(missing)}; each episode needs one")
    return given


def _read_episodes(
    episodes: Sequence[Mapping[str, PyTree]], said: Declaration
) -> list[dict[str, PyTree]]:
    """Returns the arrays of each episode by name, with ``log_prob`` if all episodes have it."""
    read = {
        "action": said.action.read,
        "log_prob": columns.arrays,
        "obs": said.observation.read,
        "reward": columns.arrays,
    }
    if not all("log_prob" in episode for episode in episodes):
        del read["log_prob"]
    return [
        {name: function(episode[name]) for name, function in read.items()} for episode in episodes
    ]


def _check_episodes(episodes: Sequence[dict[str, PyTree]], ends: Sequence[np.ndarray]) -> None:
    first = columns.entries(episodes[0])
    for number, (episode, end) in enumerate(zip(episodes, ends, strict=True)):
        size = episode["reward"].size
        lengths = {(name, len(part)) for name in episode for part in jax.tree.leaves(episode[name])}
        needed = {(name, size + (name == "obs")) for name in episode}
        if not size or lengths != needed:
            raise ConfigError(
                f"episode {number} has {size} rewards; it needs at least 1, as many actions, and "
                "one more observation"
            )
        if columns.entries(episode) != first or end.ndim:
            raise ConfigError(
                f"episode {number} has other parts or shapes than the first, or several ends"
            )


def _joined(episodes: Sequence[dict[str, PyTree]], name: str) -> PyTree:
    """Joins what has no entry for an episode's last observation, and adds zeros there."""

    def padded(x: np.ndarray) -> np.ndarray:
        return np.append(x, np.zeros_like(x[:1]), axis=0)

    trees = (jax.tree.map(padded, episode[name]) for episode in episodes)
    return jax.tree.map(lambda *x: np.concatenate(x), *trees)
