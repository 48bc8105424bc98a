"""Recorded experience on the host: data sets in memory, and their directories."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import storage
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space
from jaxrl_dist.types import EnvSpec, PyTree, Rollout

FORMAT = 1
"""Format number of ``dataset.json``; a reader refuses unknown numbers."""
INDEX = "dataset.json"
_FLAGS = ("terminated", "truncated", "valid")
_DTYPES = {"reward": np.float32, "log_prob": np.float32, **dict.fromkeys(_FLAGS, np.bool_)}
_MAX_STEPS = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Steps of many episodes, one after the other: arrays ``[L, ...]``.

    The successor of step ``t`` is ``obs[t + 1]``. After the last step of each episode comes an invalid one, which holds
    the episode's last observation.
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
    observation_space: Space
    action_space: Space
    log_prob: np.ndarray | None = None
    """float32: logarithm of the probability, or of the density, with which the behaviour took each action; None: it is
    unknown, or the behaviour is deterministic."""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Where it comes from, in JSON: ``env``, the ``behaviour``, and the mean returns of a ``random`` and of an
    ``expert`` policy, if they are known."""

    @property
    def steps(self) -> int:
        """Number of transitions."""
        return int(np.count_nonzero(self.valid))

    @property
    def ends(self) -> np.ndarray:
        """Indices of the last steps of the episodes, int64 ``[E]``."""
        return np.flatnonzero(self.terminated | self.truncated)

    @property
    def returns(self) -> np.ndarray:
        """Sum of the rewards of each episode, float64 ``[E]``."""
        totals = np.cumsum(np.where(self.valid, self.reward, 0.0), dtype=np.float64)
        return np.diff(totals[self.ends], prepend=0.0)

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
            f"observations {spaces.describe(self.observation_space)}, actions {spaces.describe(self.action_space)}",
        ]
        lines += [f"environment {about['env']}"] if "env" in about else []
        lines += [f"behaviour {', '.join(f'{name} {x}' for name, x in behaviour.items())}"] if behaviour else []
        lines += [f"{end} policy {about[end]:.6g}" for end in ("random", "expert") if end in about]
        if self.log_prob is None:
            lines.append("the probabilities of the actions are not known")
        return "\n".join(lines)

    def rollout(self) -> Rollout:
        """Returns all steps as one row, without an axis of environments: what ``memory.records.packed`` takes."""
        parts = self.obs, self.action, self.reward, self.terminated, self.truncated, self.valid
        return Rollout(*parts, extras={}, core=(), final_core=())

    def episodes(self, chosen: np.ndarray) -> Dataset:
        """Returns the data set of these episodes, by their numbers, in the order of the numbers."""
        first = np.concatenate([[0], self.ends[:-1] + 2])
        rows = np.concatenate([np.arange(first[i], self.ends[i] + 2) for i in chosen])
        return self._map(lambda x: x[rows])

    def best(self, share: float) -> Dataset:
        """Returns the share of the episodes with the highest returns, rounded up, in the order of their recording."""
        count = math.ceil(share * len(self.ends))
        return self.episodes(np.sort(np.argsort(-self.returns, kind="stable")[:count]))

    def _map(self, function: Any, *others: Dataset) -> Dataset:
        names = ["obs", "action", "reward", *_FLAGS]
        arrays = {name: jax.tree.map(function, *(getattr(x, name) for x in (self, *others))) for name in names}
        log_probs = [x.log_prob for x in (self, *others)]
        known = all(x is not None for x in log_probs)
        return dataclasses.replace(self, **arrays, log_prob=function(*log_probs) if known else None)

    # --- Making one ---------------------------------------------------------------------------------------

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
        observation_space: Space | None = None,
        action_space: Space | None = None,
        about: Mapping[str, Any] = {},
    ) -> Dataset:
        """Makes a data set of flat arrays ``[N, ...]``, as D4RL has them.

        An episode ends where ``terminals`` or ``timeouts`` is True. Without ``next_obs``, the successor of an episode's
        last step is unknown: a time-out then loses its last step, and a terminal one, whose successor counts for
        nothing, repeats its own observation.

        Args:
          observation_space, action_space: None: bounds are those of the data.

        Raises:
          ConfigError: arrays have other lengths, or no episode ends.
        """
        terminals = np.asarray(terminals, bool).reshape(-1)
        timeouts = np.zeros_like(terminals) if timeouts is None else np.asarray(timeouts, bool).reshape(-1)
        timeouts = timeouts & ~terminals
        obs, action, reward = jax.tree.map(np.asarray, (obs, action, np.asarray(reward).reshape(-1)))
        lengths = {len(x) for x in jax.tree.leaves((obs, action, reward, terminals, timeouts, next_obs))}
        if len(lengths) != 1:
            raise ConfigError(f"a data set's arrays have one length, and these have {sorted(lengths)}")
        size = len(reward)
        ends = np.flatnonzero(terminals | timeouts)
        if not len(ends):
            raise ConfigError("no episode of the data set ends: terminals or timeouts must be True at the end of each")
        last = np.append(ends, size - 1) if ends[-1] < size - 1 else ends
        parts, begin = list[dict[str, PyTree]](), 0
        for end in last:
            rows = slice(begin, end + 1)
            episode = {"obs": jax.tree.map(lambda x, rows=rows: x[rows], obs)}
            episode["action"] = jax.tree.map(lambda x, rows=rows: x[rows], action)
            episode |= {"reward": reward[rows], "terminated": bool(terminals[end])}
            after = jax.tree.map(lambda x, end=end: x[end : end + 1], obs if next_obs is None else next_obs)
            if next_obs is None and not terminals[end]:
                episode |= {"action": jax.tree.map(lambda x: x[:-1], episode["action"]), "reward": reward[rows][:-1]}
            else:
                episode["obs"] = jax.tree.map(lambda x, y: np.concatenate([x, y]), episode["obs"], after)
            if len(episode["reward"]):
                parts.append(episode)
            begin = end + 1
        return cls.from_episodes(parts, observation_space=observation_space, action_space=action_space, about=about)

    @classmethod
    def from_episodes(
        cls,
        episodes: Sequence[Mapping[str, PyTree]],
        *,
        observation_space: Space | None = None,
        action_space: Space | None = None,
        about: Mapping[str, Any] = {},
    ) -> Dataset:
        """Makes a data set of episodes: dicts of ``obs [T + 1, ...]``, ``action [T, ...]``, ``reward [T]``, the flag
        ``terminated`` (False: cut by a time limit), and optionally ``log_prob [T]``.

        Raises:
          ConfigError: there is no episode, or lengths do not fit.
        """
        if not episodes:
            raise ConfigError("a data set needs one or more episodes")
        known = all("log_prob" in episode for episode in episodes)
        rows = [_rows(number, episode, known=known) for number, episode in enumerate(episodes)]
        joined: dict[str, PyTree] = jax.tree.map(lambda *x: np.concatenate(x), *rows)
        observation_space = observation_space or _space_of(joined["obs"])
        action_space = action_space or _space_of(joined["action"])
        joined["obs"] = _cast(joined["obs"], observation_space)
        joined["action"] = _cast(joined["action"], action_space)
        return checked(cls(**joined, observation_space=observation_space, action_space=action_space, about=about))

    @classmethod
    def joined(cls, parts: Sequence[Dataset]) -> Dataset:
        """Joins data sets of equal spaces.

        Raises:
          ConfigError: their spaces differ.
        """
        first = parts[0]
        for part in parts[1:]:
            check_spaces("the data sets", part, first.observation_space, first.action_space)
        abouts = [part.about for part in parts]
        about = {name: x for name, x in abouts[0].items() if all(other.get(name) == x for other in abouts)}
        return dataclasses.replace(
            first._map(lambda *x: np.concatenate(x), *parts[1:]), about={**about, "parts": abouts}
        )

    # --- Files --------------------------------------------------------------------------------------------

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the data set as a new directory, whole or not at all: an ``.npy`` file for each array, and
        ``dataset.json``.

        Raises:
          ConfigError: the directory exists, or cannot be written.
          OSError: the disk is full.
        """
        path = pathlib.Path(path)
        if path.exists():
            raise ConfigError(f"{path} exists; a data set needs a new directory")
        storage.check_place(path)
        temporary = path.with_name(f".{path.name}.new")
        storage.delete(temporary)
        temporary.mkdir()
        try:
            for name, x in self._arrays().items():
                np.save(temporary / f"{name}.npy", np.ascontiguousarray(x), allow_pickle=False)
            content = {
                "format": FORMAT,
                "steps": self.steps,
                "episodes": len(self.ends),
                "spaces": {
                    "observation": _space_to_json(self.observation_space),
                    "action": _space_to_json(self.action_space),
                },
                "about": dict(self.about),
                "files": storage.digests(temporary),
            }
            (temporary / INDEX).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
            storage.commit(temporary, path, path.with_name(f".{path.name}.old"))
        finally:
            storage.delete(temporary)

    def _arrays(self) -> dict[str, np.ndarray]:
        fields = {"obs": self.obs, "action": self.action, "reward": self.reward}
        fields |= {name: getattr(self, name) for name in _FLAGS}
        fields |= {} if self.log_prob is None else {"log_prob": self.log_prob}
        return {_file_of(name, path): x for name, field in fields.items() for path, x in spaces.leaves(field).items()}

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Dataset:
        """Reads a directory; the arrays stay on the disk until they are used.

        Raises:
          ConfigError: there is no data set, or it is damaged.
        """
        path = pathlib.Path(path)
        if not (path / INDEX).is_file():
            raise ConfigError(
                f"{path} is not a data set: it has no {INDEX}; `jaxrl-dist record RUN_DIR -o {path}` makes one"
            )
        try:
            content = storage.read_json(path / INDEX)
            if content["format"] != FORMAT:
                raise ConfigError(f"{path} has format {content['format']!r}, and this version reads {FORMAT}")
            about, files = content["about"], content["files"]
            kinds = {name: _space_from_json(content["spaces"][name]) for name in ("observation", "action")}
            if not isinstance(about, dict) or not isinstance(files, dict):
                raise TypeError
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            raise ConfigError(f"{path / INDEX} is damaged, or not of a data set") from None
        if storage.digests(path, without=[INDEX]) != files:
            raise ConfigError(f"{path} is damaged: its arrays are not those that {INDEX} names")

        def read(name: str, space: Space | None) -> Any:
            parts = {"": None} if space is None else spaces.leaves(space)
            arrays = {part: _read(path / f"{_file_of(name, part)}.npy") for part in parts}
            return arrays[""] if space is None else _unflattened(space, arrays)

        names = ["reward", *_FLAGS, *(["log_prob"] if "log_prob.npy" in files else [])]
        fields = {name: read(name, None) for name in names}
        fields |= {"obs": read("obs", kinds["observation"]), "action": read("action", kinds["action"])}
        return checked(
            cls(**fields, observation_space=kinds["observation"], action_space=kinds["action"], about=about), str(path)
        )


def checked(data: Dataset, name: str = "the data set") -> Dataset:
    """Returns a data set after checking that its arrays have the shapes, dtypes and order that it promises.

    Raises:
      ConfigError: they do not.
    """

    def fault(text: str) -> ConfigError:
        return ConfigError(f"{name} cannot be learnt from: {text}")

    size = len(data.reward)
    fields = {"obs": (data.obs, data.observation_space), "action": (data.action, data.action_space)}
    for field, (tree, space) in fields.items():
        for path, part in spaces.leaves(space).items():
            x, where = spaces.leaves(tree)[path], f"{field}{path and f' {path}'}"
            if x.shape != (size, *part.shape) or x.dtype != part.dtype:
                raise fault(f"{where} is {x.dtype}{list(x.shape)}, not {part.dtype}{[size, *part.shape]}")
            if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
                raise fault(f"{where} has a NaN or an infinity")
            _check_choices(x, part, where, fault)
    rows = {field: getattr(data, field) for field in _DTYPES if getattr(data, field) is not None}
    for field, x in rows.items():
        if x.shape != (size,) or x.dtype != _DTYPES[field]:
            raise fault(f"{field} is {x.dtype}{list(x.shape)}, not {np.dtype(_DTYPES[field])}[{size}]")
        if x.dtype == np.float32 and not np.isfinite(x).all():
            raise fault(f"{field} has a NaN or an infinity")
    if not 0 < size <= _MAX_STEPS:
        raise fault(f"it has {size} steps; 1 to {_MAX_STEPS} work")
    over = data.terminated | data.truncated
    if (data.terminated & data.truncated).any() or (over & ~data.valid).any():
        raise fault("a step both terminates and is truncated, or an invalid step ends an episode")
    if data.valid[-1] or not np.array_equal(np.flatnonzero(~data.valid), np.flatnonzero(over) + 1):
        raise fault("its invalid steps are not those after the ends of its episodes")
    return data


def _check_choices(x: np.ndarray, part: Space, where: str, fault: Any) -> None:
    if isinstance(part, Box):
        return
    most = part.n if isinstance(part, Discrete) else np.asarray(part.nvec)  # type: ignore[union-attr]
    if (x < 0).any() or (x >= most).any():
        raise fault(f"{where} has a value that {spaces.describe(part)} has not")


def check_spaces(name: str, data: Dataset, observation: Space, action: Space) -> None:
    """Checks that a data set has these spaces, of which the bounds of numbers may differ.

    Raises:
      ConfigError: it has not.
    """
    pairs = {"observations": (data.observation_space, observation), "actions": (data.action_space, action)}
    for role, (mine, wanted) in pairs.items():
        if spaces.describe(mine) != spaces.describe(wanted):
            raise ConfigError(f"{name} has the {role} {spaces.describe(mine)}, and not {spaces.describe(wanted)}")


def load_for(path: str, spec: EnvSpec) -> Dataset:
    """Reads a data set for an environment.

    Raises:
      ConfigError: it cannot be read, or has other spaces.
    """
    data = Dataset.load(path)
    check_spaces(f"--data {path}", data, spec.observation, spec.action)
    return data


def spec_of(path: str) -> EnvSpec:
    """Returns what an algorithm needs to know of the environment of a data set.

    Raises:
      ConfigError: it cannot be read.
    """
    data = Dataset.load(path)
    return EnvSpec(path, "data", "data", data.observation_space, data.action_space, None)


# --- Parts --------------------------------------------------------------------------------------------


def _rows(number: int, episode: Mapping[str, PyTree], *, known: bool) -> dict[str, PyTree]:
    """Returns the rows of an episode, the invalid one with its last observation included."""
    reward = np.asarray(episode["reward"], np.float32).reshape(-1)
    obs, action = (jax.tree.map(np.asarray, episode[name]) for name in ("obs", "action"))
    size = len(reward)
    sizes = {len(x) for x in jax.tree.leaves(obs)}, {len(x) for x in jax.tree.leaves(action)}
    if not size or sizes != ({size + 1}, {size}):
        raise ConfigError(
            f"episode {number} has {size} rewards: it needs as many actions and one more observation, 1 or more steps"
        )
    end = np.zeros(size + 1, bool)
    end[size - 1] = True
    none, terminated = np.zeros(size + 1, bool), bool(episode["terminated"])
    rows = {
        "obs": obs,
        "action": jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), action),
        "reward": np.append(reward, np.float32(0)),
        "terminated": end if terminated else none,
        "truncated": none if terminated else end,
        "valid": np.append(np.ones(size, bool), False),
    }
    if known:
        rows["log_prob"] = np.append(np.asarray(episode["log_prob"], np.float32), np.float32(0))
    return rows


def _space_of(tree: PyTree) -> Space:
    """Returns the space of arrays ``[L, ...]``: integers count from 0, and the bounds of numbers are the data's."""
    if isinstance(tree, dict):
        return {name: _space_of(part) for name, part in tree.items()}
    x = np.asarray(tree)
    if np.issubdtype(x.dtype, np.integer) and x.dtype != np.uint8 and x.ndim <= 2:
        if x.ndim == 1:
            return Discrete(int(x.max()) + 1)
        return MultiDiscrete(tuple(int(most) + 1 for most in x.max(axis=0)))
    dtype = x.dtype if x.dtype in (np.uint8, np.bool_) else np.dtype(np.float32)
    return Box(x.shape[1:], np.dtype(dtype), x.min(axis=0).astype(dtype), x.max(axis=0).astype(dtype))


def _cast(tree: PyTree, space: Space) -> PyTree:
    if isinstance(space, dict):
        return {name: _cast(tree[name], part) for name, part in space.items()}
    return np.asarray(tree).astype(space.dtype)


def _space_to_json(space: Space) -> Any:
    if isinstance(space, dict):
        return {"parts": {name: _space_to_json(part) for name, part in space.items()}}
    if isinstance(space, Discrete):
        return {"n": space.n}
    if isinstance(space, MultiDiscrete):
        return {"nvec": list(space.nvec)}
    bounds = {side: _bound(getattr(space, side)) for side in ("low", "high")}
    return {"shape": list(space.shape), "dtype": space.dtype.name, **bounds}


def _bound(bound: np.ndarray) -> Any:
    """Returns a bound as numbers or, for infinity, texts; one of equal numbers is one."""
    bound = np.asarray(bound)
    equal = bound.size > 0 and (bound == bound.flat[0]).all()
    texts = [
        x if math.isfinite(x) else str(x) for x in (bound.reshape(-1)[:1] if equal else bound.reshape(-1)).tolist()
    ]
    return texts[0] if equal else texts


def _space_from_json(stored: Any) -> Space:
    if "parts" in stored:
        return {str(name): _space_from_json(part) for name, part in stored["parts"].items()}
    if "n" in stored:
        return Discrete(_count(stored["n"]))
    if "nvec" in stored:
        return MultiDiscrete(tuple(map(_count, stored["nvec"])))
    shape, dtype = tuple(map(_count, stored["shape"])), np.dtype(str(stored["dtype"]))
    if dtype.kind not in "fiub" or math.prod(shape) > 2**30:
        raise ValueError("no dtype or shape of observations")

    def bound(value: Any) -> np.ndarray:
        values = np.array([float(x) for x in (value if isinstance(value, list) else [value])])
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(dtype)
        return np.broadcast_to(values.reshape(shape) if isinstance(value, list) else values[0], shape)

    return Box(shape, dtype, bound(stored["low"]), bound(stored["high"]))


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 2**20:
        raise ValueError("not a size")
    return value


def _file_of(name: str, path: str) -> str:
    """Returns the name of the file of a part, in which no path of the part's name counts."""
    return f"{name}.{path.replace('%', '%25').replace('/', '%2F')}" if path else name


def _read(file: pathlib.Path) -> np.ndarray:
    storage.check_no_link(file)
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, OverflowError, SyntaxError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from None


def _unflattened(space: Space, arrays: Mapping[str, np.ndarray], path: str = "") -> Any:
    if not isinstance(space, dict):
        return arrays[path]
    inner = f"{path}/" if path else ""
    return {name: _unflattened(part, arrays, inner + name) for name, part in space.items()}
