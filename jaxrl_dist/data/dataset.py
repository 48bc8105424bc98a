"""Recorded experience on the host: data sets in memory, and their directories."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxrl_dist import spaces
from jaxrl_dist.checks import MAX_RETURN
from jaxrl_dist.data import columns, farama, files, making, writing
from jaxrl_dist.data.declared import Declaration, declaration
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.run.storage import Json
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
    about: Mapping[str, Json] = dataclasses.field(default_factory=dict)
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
        returns = self.returns
        about = self.about
        lines = [
            f"{self.steps:,} steps in {len(returns):,} episodes, "
            f"{self.lengths.mean():.4g} steps each",
            f"returns {returns.mean():.6g} on average, standard deviation {returns.std():.4g}, "
            f"{returns.min():.6g} to {returns.max():.6g}",
            f"observations {spaces.describe(self.observation_space, starts=True)}, "
            f"actions {spaces.describe(self.action_space, starts=True)}",
        ]
        if self.interface.mask is not None:
            lines.append(f"legal actions are in the part {self.interface.mask}")
        if self.interface.both_sides:
            lines.append("the agent moves for both sides of a game")
        if "env" in about:
            lines.append(f"environment {about['env']}")
        lines += [f"with {name} {value}" for name, value in about.get("settings", {}).items()]
        behaviour = [f"{name} {value}" for name, value in about.get("behaviour", {}).items()]
        if behaviour:
            lines.append(f"behaviour {', '.join(behaviour)}")
        lines += [f"{end} policy {about[end]:.6g}" for end in files.ENDS if end in about]
        if self.log_prob is None:
            lines.append("the probabilities of the actions are not known")
        return "\n".join(lines)

    def rollout(self) -> Rollout:
        """Returns all steps as one row, without an axis of environments, as
        ``memory.records.divide`` takes it.
        """
        names = "obs", "action", "reward", "terminated", "truncated", "valid"
        arrays: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Rollout(**arrays, extras={}, core=(), final_core=())

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
            raise ConfigError(f"choose episodes by number: one or more of 0 to {count - 1}")
        firsts = self._firsts
        rows = np.concatenate([np.arange(firsts[i], self.ends[i] + 2) for i in numbers])
        return self._map(lambda x: x[rows])

    def best(self, share: float) -> Dataset:
        """Returns the share of the episodes with the highest returns, rounded up, in the order of
        their recording.

        Raises:
          ConfigError: ``share`` is not above 0 and at most 1.
        """
        if not 0 < share <= 1:
            raise ConfigError(
                f"the share of the best episodes must be above 0 and at most 1, not {share}"
            )
        count = math.ceil(share * len(self.ends) - 1e-9)  # 0.07 x 100 is a little more than 7
        return self.episodes(np.sort(np.argsort(-self.returns, kind="stable")[:count]))

    def as_episodes(self) -> list[dict[str, PyTree]]:
        """Returns the episodes as ``from_episodes`` takes them."""
        steps = self.columns
        names = [name for name in ("action", "reward", "log_prob") if name in steps]
        return [
            {
                "obs": columns.sliced(self.obs, first, end + 2),
                **{name: columns.sliced(steps[name], first, end + 1) for name in names},
                "terminated": bool(self.terminated[end]),
            }
            for first, end in zip(self._firsts, self.ends, strict=True)
        ]

    def _map(self, function: Callable[..., np.ndarray], *others: Dataset) -> Dataset:
        """Returns a data set of the function's results for the columns that all data sets have."""
        columns_of = [data.columns for data in (self, *others)]
        common = [name for name in self.columns if all(name in columns for columns in columns_of)]
        arrays = {
            name: jax.tree.map(function, *(columns[name] for columns in columns_of))
            for name in common
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
        about: Mapping[str, Json] = {},
    ) -> Dataset:
        """Makes a data set of rows, of which the invalid ones hold the last observations of
        episodes.

        A step before an invalid row that has not terminated is truncated. An invalid row that
        follows no step goes. Observations and actions are as policies see them: integers count from
        0, and a tuple is a dict.

        Args:
          interface: None: the data's, as for ``from_arrays`` without spaces.

        Raises:
          ConfigError: no algorithm could learn from it.
        """
        follows_step = np.append(False, valid[:-1])
        precedes_step = np.append(valid[1:], False)
        keep = valid | follows_step
        if not keep.any():
            raise ConfigError("no step of the data set has a successor")
        terminated = terminated & valid
        fields = {
            "obs": obs,
            "action": action,
            "reward": np.where(valid, reward, 0).astype(np.float32),
            "terminated": terminated,
            "truncated": valid & ~precedes_step & ~terminated,
            "valid": valid,
        }
        if log_prob is not None:
            fields["log_prob"] = np.where(valid, log_prob, 0).astype(np.float32)
        fields = {
            name: jax.tree.map(lambda x: np.asarray(x)[keep], field)
            for name, field in fields.items()
        }
        if interface is None:
            interface = Declaration().interface(fields["obs"], fields["action"])
        for name, space in interface.kinds.items():
            fields[name] = columns.cast(fields[name], space, name)
        return checked(cls(**fields, interface=interface, about=about))

    @classmethod
    def from_arrays(
        cls,
        obs: PyTree,
        action: PyTree,
        reward: ArrayLike,
        terminals: ArrayLike,
        timeouts: ArrayLike | None = None,
        *,
        next_obs: PyTree = None,
        log_prob: ArrayLike | None = None,
        observation_space: object = None,
        action_space: object = None,
        mask: str | None = None,
        both_sides: bool = False,
        about: Mapping[str, Json] = {},
    ) -> Dataset:
        """Makes a data set of flat arrays ``[N, ...]``, as D4RL has them; ``log_prob`` and
        ``about`` are as for ``of_rows``.

        Without ``next_obs``, rows belong to one environment, in the order of time. An episode
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

        Warns:
          ConfigWarning: more than half of the rows are not followed by the row that ``next_obs``
            names.

        Raises:
          ConfigError: arrays have other lengths, or no algorithm could learn from them.
        """
        said = declaration(observation_space, action_space, mask, both_sides)
        steps = making.read_steps(
            said, obs, action, reward, terminals, timeouts, next_obs, log_prob
        )
        torn = steps.torn()
        if np.count_nonzero(torn) > len(torn) / 2:
            warnings.warn(
                f"{np.count_nonzero(torn)} of {len(torn)} rows are not followed by the row that "
                "next_obs names, so episodes are pieces: returns, --best and estimates of this "
                "data set mean little",
                ConfigWarning,
                stacklevel=2,
            )
            about = {**about, PIECES: True}
        rows = making.of_steps(steps, torn, said)
        return cls.of_rows(**rows._asdict(), about=about)

    @classmethod
    def from_episodes(
        cls,
        episodes: Sequence[Mapping[str, PyTree]],
        *,
        observation_space: object = None,
        action_space: object = None,
        mask: str | None = None,
        both_sides: bool = False,
        about: Mapping[str, Json] = {},
    ) -> Dataset:
        """Makes a data set of episodes; spaces, ``mask``, ``both_sides`` and ``about`` are as for
        ``from_arrays``.

        Args:
          episodes: dicts of ``obs [T + 1, ...]``, ``action [T, ...]``, ``reward [T]``, the flag
            ``terminated`` (False: cut by a time limit), and optionally ``log_prob [T]``.

        Raises:
          ConfigError: there is no episode, lengths do not fit, or no algorithm could learn from it.
        """
        said = declaration(observation_space, action_space, mask, both_sides)
        rows = making.of_episodes(episodes, said)
        return cls.of_rows(**rows._asdict(), about=about)

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
        return farama.write(name, self.as_episodes(), self.interface, self.about, **options)

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
                    "one agent moves for both sides in some of the data sets, but not in all"
                )
        abouts = [part.about for part in parts]
        about = {
            name: value
            for name, value in first.about.items()
            if all(other.get(name) == value for other in abouts)
        }
        interface = dataclasses.replace(
            first.interface,
            observation=columns.hull(*(part.observation_space for part in parts)),
            action=columns.hull(*(part.action_space for part in parts)),
        )
        whole = first._map(lambda *x: np.concatenate(x), *parts[1:])
        return dataclasses.replace(whole, about={**about, "parts": abouts}, interface=interface)

    # --- Files ------------------------------------------------------------------------------------

    def save(self, path: str | pathlib.Path | writing.Place) -> pathlib.Path:
        """Writes a new directory, whole or not at all; returns it, as
        ``data.writing.Place.commit`` names it.

        Raises:
          ConfigError: the directory exists, or cannot be written.
          OSError: the disk is full.
        """
        about = {"steps": self.steps, "episodes": len(self.ends), "about": dict(self.about)}
        arrays = self.columns
        kinds = {name: kind for name, kind in self.kinds.items() if name in arrays}
        return writing.write(path, arrays, kinds, self.interface, about)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Dataset:
        """Reads a directory; the arrays stay on the disk until they are used.

        Raises:
          ConfigError: there is no data set, or it is damaged.
        """
        if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
            raise ConfigError(f"the path of a data set must be text, not {path!r}")
        fields, interface, content = files.read(pathlib.Path(path), columns.ROWS, ("log_prob",))
        data = cls(**fields, interface=interface, about=content["about"])
        return checked(data, str(path))


def checked(data: Dataset, name: str = "the data set") -> Dataset:
    """Returns a data set after checking that its arrays have the shapes, dtypes and order that it
    promises.

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


def _problem_about(about: Mapping[str, Json]) -> str | None:
    try:
        json.dumps(dict(about), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return "its description is not a dict in JSON"
    for end in files.ENDS:
        value = about.get(end, 0.0)
        if not isinstance(value, int | float) or not abs(value) <= MAX_RETURN:
            return f"the return of its {end} policy is not a number"
    for name in ("behaviour", "settings"):
        if not isinstance(about.get(name, {}), Mapping):
            return f"its {name} is not a dict"
    return None


def check_spaces(name: str, data: Dataset, observation: Space, action: Space) -> None:
    """Checks that a data set has these spaces; only the bounds of numbers may differ.

    Raises:
      ConfigError: it has not.
    """
    _check_space(name, "observation", data.observation_space, observation)
    _check_space(name, "action", data.action_space, action)


def _check_space(name: str, role: str, space: Space, needed: Space) -> None:
    own = spaces.describe(space, starts=True)
    other = spaces.describe(needed, starts=True)
    if own == other:
        return
    remedy = ""
    if isinstance(space, Discrete | MultiDiscrete):
        remedy = f"; if values never occur in the data, give {role}_space= to the Dataset"
    raise ConfigError(f"{name} has the {role}s {own}, not {other}{remedy}")
