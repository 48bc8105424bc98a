"""Recorded experience on the host: data sets in memory, and their directories."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.checks import MAX_RETURN
from jaxrl_dist.data import columns, declared, farama, files, writing
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.spaces import Discrete, Interface, MultiDiscrete, Space
from jaxrl_dist.types import PyTree, Rollout

PIECES = "pieces"
"""Name in ``Dataset.about`` of whether most rows are not in the order in which they were played."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Steps of many episodes, one after the other: arrays ``[L, ...]``.

    The successor of step ``t`` is ``obs[t + 1]``. After the last step of each episode comes an
    invalid one, which holds the episode's last observation.
    """

    obs: PyTree
    action: PyTree
    reward: np.ndarray
    """float32."""
    terminated: np.ndarray
    """bool: the task ended with this step."""
    truncated: np.ndarray
    """bool: a time limit, or the end of the record, cut the episode after this step."""
    valid: np.ndarray
    """bool: False on the step that holds an episode's last observation."""
    interface: Interface
    """What belongs to its spaces: the spaces themselves, the action mask, and whose moves it
    holds."""
    log_prob: np.ndarray | None = None
    """float32: logarithm of the probability, or of the density, with which the behaviour took each
    action; None: it is unknown, or the behaviour is deterministic."""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Where it comes from, in JSON: ``env`` and its ``settings``, the ``behaviour``, and the mean
    returns of a ``random`` and of an ``expert`` policy, if they are known."""

    @property
    def observation_space(self) -> Space:
        """The space of observations as policies see them."""
        return self.interface.observation

    @property
    def action_space(self) -> Space:
        """The space of actions as policies see them."""
        return self.interface.action

    @property
    def steps(self) -> int:
        """Number of transitions."""
        return int(np.count_nonzero(self.valid))

    @property
    def columns(self) -> dict[str, PyTree]:
        """Its arrays by name, without those that are not known."""
        arrays = {name: getattr(self, name) for name in ("obs", "action", *columns.ROWS)}
        return {name: x for name, x in arrays.items() if x is not None}

    @property
    def kinds(self) -> dict[str, Space]:
        """The spaces of the ``columns``."""
        return {**self.interface.kinds, **columns.ROWS}

    @property
    def ends(self) -> np.ndarray:
        """Indices of the last steps of the episodes, int64 ``[E]``."""
        return np.flatnonzero(self.terminated | self.truncated)

    @property
    def returns(self) -> np.ndarray:
        """Sum of the rewards of each episode, float64 ``[E]``."""
        return np.add.reduceat(np.where(self.valid, self.reward, np.float64(0)), self._firsts)

    @property
    def _firsts(self) -> np.ndarray:
        """Indices of the first steps of the episodes, int64 ``[E]``."""
        return np.append(0, self.ends[:-1] + 2)

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each episode, int64 ``[E]``."""
        return np.diff(np.cumsum(self.valid)[self.ends], prepend=0)

    def summary(self) -> str:
        """Describes it in a few lines."""
        returns, about = self.returns, self.about
        behaviour = about.get("behaviour", {})
        lines = [
            f"{self.steps:,} steps in {len(returns):,} episodes, {self.lengths.mean():.4g} steps each",
            f"returns {returns.mean():.6g} on average, standard deviation {returns.std():.4g}, "
            f"{returns.min():.6g} to {returns.max():.6g}",
            f"observations {spaces.describe(self.observation_space, starts=True)}, "
            f"actions {spaces.describe(self.action_space, starts=True)}",
        ]
        if self.interface.mask is not None:
            lines.append(f"legal actions are in the part {self.interface.mask}")
        if self.interface.both_sides:
            lines.append("the agent moves for both sides of a game")
        lines += [f"environment {about['env']}"] if "env" in about else []
        lines += [f"with {name} {x}" for name, x in about.get("settings", {}).items()]
        lines += (
            [f"behaviour {', '.join(f'{name} {x}' for name, x in behaviour.items())}"]
            if behaviour
            else []
        )
        lines += [f"{end} policy {about[end]:.6g}" for end in files.ENDS if end in about]
        if self.log_prob is None:
            lines.append("the probabilities of the actions are not known")
        return "\n".join(lines)

    def rollout(self) -> Rollout:
        """Returns all steps as one row, without an axis of environments: what
        ``memory.records.divide`` takes.
        """
        parts: Any = (
            self.obs,
            self.action,
            self.reward,
            self.terminated,
            self.truncated,
            self.valid,
            {},
            (),
            (),
        )
        return Rollout._make(parts)

    def episodes(self, chosen: np.ndarray) -> Dataset:
        """Returns the data set of these episodes, by their numbers, in the order of the numbers.

        Raises:
          ConfigError: there is none, or not one of these numbers.
        """
        count = len(self.ends)
        numbers = np.asarray(chosen)
        if (
            not numbers.size
            or numbers.dtype.kind not in "iu"
            or not np.isin(numbers, range(count)).all()
        ):
            raise ConfigError(
                f"episodes are chosen by their numbers; give one or more of 0 to {count - 1}"
            )
        firsts = self._firsts
        rows = np.concatenate([np.arange(firsts[i], self.ends[i] + 2) for i in numbers])
        return self._map(lambda x: x[rows])

    def best(self, share: float) -> Dataset:
        """Returns the share of the episodes with the highest returns, rounded up,
        in the order of their recording.

        Raises:
          ConfigError: ``share`` is not above 0 and at most 1.
        """
        if not 0 < share <= 1:
            raise ConfigError(
                f"the share of the best episodes is above 0 and at most 1, and not {share}"
            )
        count = math.ceil(share * len(self.ends) - 1e-9)  # 0.07 x 100 is a little more than 7
        return self.episodes(np.sort(np.argsort(-self.returns, kind="stable")[:count]))

    def _map(self, function: Any, *others: Dataset) -> Dataset:
        mine = self.columns
        theirs = [other.columns for other in others]
        known = [name for name in mine if all(name in x for x in theirs)]
        arrays = {
            name: jax.tree.map(function, mine[name], *(x[name] for x in theirs)) for name in known
        }
        return dataclasses.replace(self, **{"log_prob": None, **arrays})

    # --- Making one -------------------------------------------------------------------------------

    @classmethod
    def of_rows(
        cls,
        obs: PyTree,
        action: PyTree,
        reward: np.ndarray,
        terminated: np.ndarray,
        valid: np.ndarray,
        *,
        log_prob: np.ndarray | None = None,
        interface: Interface | None = None,
        about: Mapping[str, Any] = {},
    ) -> Dataset:
        """Makes a data set of rows, of which the invalid
        ones hold the last observations of episodes.

        A step before an invalid row that has not terminated is truncated. An invalid row that
        follows no step goes. Observations and actions are as policies see them: integers count from
        0, and a tuple is a dict.

        Args:
          interface: None: that of the data, as for ``from_arrays`` without spaces.

        Raises:
          ConfigError: no algorithm could learn from it.
        """
        before = np.append(False, valid[:-1])
        after = np.append(valid[1:], False)
        keep = valid | before
        terminated = terminated & valid
        if not keep.any():
            raise ConfigError("no step of the data set has a successor")
        fields = {
            "obs": obs,
            "action": action,
            "reward": np.where(valid, reward, 0).astype(np.float32),
        }
        fields |= {
            "terminated": terminated,
            "truncated": valid & ~after & ~terminated,
            "valid": valid,
        }
        fields |= (
            {}
            if log_prob is None
            else {"log_prob": np.where(valid, log_prob, 0).astype(np.float32)}
        )
        fields = {
            name: jax.tree.map(lambda x: np.asarray(x)[keep], field)
            for name, field in fields.items()
        }
        interface = interface or declared.interface(fields["obs"], fields["action"])
        for name, space in interface.kinds.items():
            fields[name] = columns.cast(fields[name], space, name)
        return checked(cls(**fields, interface=interface, about=about))

    @classmethod
    def from_arrays(
        cls,
        obs: PyTree,
        action: PyTree,
        reward: Any,
        terminals: Any,
        timeouts: Any = None,
        *,
        next_obs: PyTree = None,
        log_prob: Any = None,
        observation_space: Any = None,
        action_space: Any = None,
        mask: str | None = None,
        both_sides: bool = False,
        about: Mapping[str, Any] = {},
    ) -> Dataset:
        """Makes a data set of flat arrays ``[N, ...]``, as D4RL has them; ``log_prob``,
        ``about`` as for ``of_rows``.

        Without ``next_obs``, rows are those of one environment, in the order of time. An episode
        ends where ``terminals``, the ends of the task alone, or ``timeouts`` is True, and where
        ``next_obs`` is not the observation of the row below, as in rows that are shuffled: such a
        step keeps the successor that ``next_obs`` gives it, and counts as truncated. Without
        ``next_obs``, the successor of an episode's last step is unknown: a step that is cut by a
        time-out, or by the end, then only gives its observation, and a terminal one, whose
        successor counts for nothing, repeats its own.

        Args:
          observation_space: a space of ours or of Gymnasium, of which ``obs`` and ``next_obs`` hold
            the environment's own values: a ``Discrete(3, start=1)`` has 1, 2 and 3. None: integers
            count from 0, and bounds are the data's.
          action_space: as ``observation_space``.
          mask: the part of the observations that says which actions are legal. None: the one with
            the name of a mask, as in environments; empty: all are legal.
          both_sides: one agent moved for both sides of a game; only ``bc`` learns from it.

        Warns: ConfigWarning: more than half of the rows are
          not followed by the row that ``next_obs`` names.

        Raises:
          ConfigError: arrays have other lengths, or no algorithm could learn from them.
        """
        terminals = columns.flags(terminals, "terminals").reshape(-1)
        if timeouts is None:
            timeouts = np.zeros_like(terminals)
        else:
            timeouts = columns.flags(timeouts, "timeouts").reshape(-1)
        seen = declared.form(observation_space, "observations")
        taken = declared.form(action_space, "actions")
        obs = seen.read(obs)
        action = taken.read(action)
        reward = columns.arrays(reward)
        next_obs = None if next_obs is None else seen.read(next_obs)
        if log_prob is None:
            log_prob = None
        else:
            log_prob = columns.arrays(log_prob)
        reward, log_prob = (None if x is None else x.reshape(-1) for x in (reward, log_prob))
        lengths = {
            len(x)
            for x in jax.tree.leaves((obs, action, reward, terminals, timeouts, log_prob, next_obs))
        }
        if len(lengths) != 1 or not len(reward):
            raise ConfigError(
                f"a data set's arrays have one length, 1 or more, and these have {sorted(lengths)}"
            )
        declared.warn_of_starts(taken, [action])
        if next_obs is not None and columns.entries(next_obs) != columns.entries(obs):
            raise ConfigError("next_obs has other shapes than obs")
        if np.count_nonzero(timeouts) > 1 and terminals[timeouts].all():
            raise ConfigError(
                "each time-out is a terminal, too; give terminals & ~timeouts, the ends of the task alone"
            )
        ends = terminals | timeouts
        if next_obs is not None:
            following = jax.tree.map(lambda x: np.roll(x, -1, axis=0), obs)
            torn = ~ends & ~columns.equal_rows(next_obs, following)
            torn[-1] = False  # nothing follows it
            ends |= torn
            if np.count_nonzero(torn) > len(torn) / 2:
                warnings.warn(_torn(torn), ConfigWarning, stacklevel=2)
                about = {**about, PIECES: True}
        ends[-1] = True
        if next_obs is None:
            lost = ends & ~terminals
        else:
            lost = np.zeros_like(ends)
        repeats = 1 + (ends & ~lost)
        rows = np.repeat(np.arange(len(ends)), repeats)
        added = np.zeros(repeats.sum(), bool)
        added[np.cumsum(repeats) - 1] = ends & ~lost

        def with_successors(x: np.ndarray, after: np.ndarray) -> np.ndarray:
            x = x[rows]
            x[added] = np.asarray(after)[rows[added]]
            return x

        obs = jax.tree.map(with_successors, obs, obs if next_obs is None else next_obs)
        action, reward, terminals, log_prob = jax.tree.map(
            lambda x: x[rows], (action, reward, terminals, log_prob)
        )
        interface = declared.interface(obs, action, seen, taken, mask=mask, both_sides=both_sides)
        valid = ~added & ~lost[rows]
        return cls.of_rows(
            obs,
            action,
            reward,
            terminals,
            valid,
            log_prob=log_prob,
            interface=interface,
            about=about,
        )

    @classmethod
    def from_episodes(
        cls,
        episodes: Sequence[Mapping[str, PyTree]],
        *,
        observation_space: Any = None,
        action_space: Any = None,
        mask: str | None = None,
        both_sides: bool = False,
        about: Mapping[str, Any] = {},
    ) -> Dataset:
        """Makes a data set of episodes; spaces, ``mask``,
        ``both_sides`` and ``about`` as for ``from_arrays``.

        Args:
          episodes: dicts of ``obs [T + 1, ...]``, ``action [T, ...]``, ``reward [T]``, the flag
            ``terminated`` (False: cut by a time limit), and optionally ``log_prob [T]``.

        Raises:
          ConfigError: there is no episode, lengths do not fit, or no algorithm could learn from it.
        """
        if isinstance(episodes, Mapping):
            episodes = episodes
        else:
            episodes = list(episodes)
        if isinstance(episodes, Mapping) or not all(
            isinstance(episode, Mapping) for episode in episodes
        ):
            raise ConfigError("a data set is made of a list of episodes, each of which is a dict")
        if not episodes:
            raise ConfigError("a data set needs one or more episodes")
        for number, episode in enumerate(episodes):
            if missing := {"obs", "action", "reward", "terminated"} - episode.keys():
                raise ConfigError(f"episode {number} has no {min(missing)}; each episode needs one")
        names = [
            "action",
            *(["log_prob"] if all("log_prob" in x for x in episodes) else []),
            "obs",
            "reward",
        ]
        seen = declared.form(observation_space, "observations")
        taken = declared.form(action_space, "actions")
        read = {"obs": seen.read, "action": taken.read}
        arrays = [
            {name: read.get(name, columns.arrays)(episode[name]) for name in names}
            for episode in episodes
        ]
        flags = [columns.flags(episode["terminated"], "terminated") for episode in episodes]
        sizes = [len(episode["reward"].reshape(-1)) for episode in arrays]
        first = columns.entries(arrays[0])
        for number, (size, episode, flag) in enumerate(zip(sizes, arrays, flags, strict=True)):
            lengths = [{len(x) for x in jax.tree.leaves(episode[name])} for name in names]
            if not size or lengths != [{size + (name == "obs")} for name in names]:
                needed = "it needs as many actions and one more observation, 1 or more steps"
                raise ConfigError(f"episode {number} has {size} rewards: {needed}")
            if columns.entries(episode) != first or flag.ndim:
                raise ConfigError(
                    f"episode {number} has other parts or shapes than the first, or several ends"
                )

        declared.warn_of_starts(taken, [episode["action"] for episode in arrays])

        def joined(name: str) -> PyTree:
            padded = (
                jax.tree.map(lambda x: np.append(x, np.zeros_like(x[:1]), axis=0), x[name])
                for x in arrays
            )
            return jax.tree.map(lambda *x: np.concatenate(x), *padded)

        obs = jax.tree.map(lambda *x: np.concatenate(x), *(x["obs"] for x in arrays))
        ends = np.cumsum([size + 1 for size in sizes]) - 1
        valid = np.ones(ends[-1] + 1, bool)
        terminated = np.zeros(ends[-1] + 1, bool)
        valid[ends] = False
        terminated[ends - 1] = flags
        action = joined("action")
        interface = declared.interface(obs, action, seen, taken, mask=mask, both_sides=both_sides)
        return cls.of_rows(
            obs,
            action,
            joined("reward"),
            terminated,
            valid,
            log_prob=joined("log_prob") if "log_prob" in names else None,
            interface=interface,
            about=about,
        )

    @classmethod
    def from_minari(cls, source: Any) -> Dataset:
        """Makes a data set of one of Minari's; environments that its metadata name are not made.

        Args:
          source: a ``minari.MinariDataset``, or the name of one on this machine.

        Raises:
          ConfigError: there is none, it is damaged, or no algorithm could learn from it.
        """
        return cls.from_episodes(**farama.read(source))

    def to_minari(self, name: str, **options: Any) -> Any:
        """Makes a ``minari.MinariDataset`` of it on this machine, and returns that.

        Args:
          name: as Minari writes them, such as ``cartpole/medium-v0``.
          options: more for ``minari.create_dataset_from_buffers``, such as ``env`` and ``author``.

        Raises:
          ConfigError: there is one of this name, or this is not a name.
        """
        episodes = list[Mapping[str, PyTree]]()
        for start, end in zip(self._firsts, self.ends, strict=True):
            steps = slice(start, end + 1)
            whole = {"obs": jax.tree.map(lambda x, a=start, b=end: x[a : b + 2], self.obs)}
            parts = {"action": self.action, "reward": self.reward}
            parts |= {} if self.log_prob is None else {"log_prob": self.log_prob}
            cut = jax.tree.map(lambda x, steps=steps: x[steps], parts)
            episodes.append(whole | cut | {"terminated": bool(self.terminated[end])})
        return farama.write(name, episodes, self.interface, self.about, **options)

    @classmethod
    def joined(cls, parts: Sequence[Dataset]) -> Dataset:
        """Joins data sets of equal spaces.

        Raises:
          ConfigError: there is none, or their spaces differ.
        """
        if not parts:
            raise ConfigError("there is no data set to join; give one or more")
        first = parts[0]
        for part in parts[1:]:
            check_spaces("one of the data sets", part, first.observation_space, first.action_space)
            if part.interface.mask != first.interface.mask:
                raise ConfigError("the data sets differ in their masks")
            if part.interface.both_sides != first.interface.both_sides:
                raise ConfigError(
                    "in one of the data sets, and not in another, one agent moves for both sides"
                )
        abouts = [part.about for part in parts]
        about = {
            name: x
            for name, x in abouts[0].items()
            if all(other.get(name) == x for other in abouts)
        }
        interfaces = [part.interface for part in parts]
        interface = dataclasses.replace(
            first.interface,
            observation=columns.hull(*(each.observation for each in interfaces)),
            action=columns.hull(*(each.action for each in interfaces)),
        )
        whole = first._map(lambda *x: np.concatenate(x), *parts[1:])
        return dataclasses.replace(whole, about={**about, "parts": abouts}, interface=interface)

    # --- Files ------------------------------------------------------------------------------------

    def save(self, path: str | pathlib.Path | writing.Place) -> pathlib.Path:
        """Writes a new directory, whole or not at all; returns it,
        as ``data.writing.Place.commit`` names it.

        Raises:
          ConfigError: the directory exists, or cannot be written.
          OSError: the disk is full.
        """
        about = {"steps": self.steps, "episodes": len(self.ends), "about": dict(self.about)}
        known = self.columns
        kinds = {name: kind for name, kind in self.kinds.items() if name in known}
        return writing.write(path, known, kinds, self.interface, about)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Dataset:
        """Reads a directory; the arrays stay on the disk until they are used.

        Raises:
          ConfigError: there is no data set, or it is damaged.
        """
        if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
            raise ConfigError(f"the path of a data set is text, and not {path!r}")
        fields, interface, content = files.read(pathlib.Path(path), columns.ROWS, ("log_prob",))
        data = cls(**fields, interface=interface, about=content["about"])
        return checked(data, str(path))


def checked(data: Dataset, name: str = "the data set") -> Dataset:
    """Returns a data set after checking that its arrays have the shapes,
    dtypes and order that it promises.

    Raises:
      ConfigError: they do not.
    """
    problem = (
        _problem_about(data.about)
        or data.interface.problem()
        or columns.problem(data.columns, data.kinds)
    )
    if problem is not None:
        raise ConfigError(f"{name} cannot be learnt from: {problem}")
    return data


def _torn(torn: np.ndarray) -> str:
    return (
        f"{np.count_nonzero(torn)} of {len(torn)} rows are not followed by the row that next_obs names, "
        "so episodes are pieces: returns, --best and estimates of this data set mean little"
    )


def _problem_about(about: Mapping[str, Any]) -> str | None:
    try:
        json.dumps(dict(about), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return "what it is about is no dict in JSON"
    for end in ("random", "expert"):
        if not isinstance(x := about.get(end, 0.0), int | float) or not abs(x) <= MAX_RETURN:
            return f"the return of its {end} policy is not a number"
    wrong = [
        name for name in ("behaviour", "settings") if not isinstance(about.get(name, {}), Mapping)
    ]
    if wrong:
        return f"its {wrong[0]} is not a dict"
    return None


def check_spaces(name: str, data: Dataset, observation: Space, action: Space) -> None:
    """Checks that a data set has these spaces, of which the bounds of numbers may differ;
    starts count.

    Raises:
      ConfigError: it has not.
    """
    pairs = {
        "observations": (data.observation_space, observation),
        "actions": (data.action_space, action),
    }
    for role, (mine, wanted) in pairs.items():
        own, other = (spaces.describe(space, starts=True) for space in (mine, wanted))
        if own != other:
            problem = f"{name} has the {role} {own}, and not {other}"
            if isinstance(mine, Discrete | MultiDiscrete):
                problem += (
                    f"; if values never occur in the data, give {role[:-1]}_space= to the Dataset"
                )
            raise ConfigError(problem)
