"""Spaces of observations and actions.

A space of named parts is a ``dict`` of spaces. Its values are dicts of arrays: trees,
which JAX's functions map over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar

import numpy as np

AGENTS = "agents"
"""Part of an observation that holds the observations of all agents that act as one,
each part ``[k, ...]``."""
AGENT = "agent"
"""Part of an observation that says which agent sees it, one-hot among the agents of its policy."""
STATE = "state"
"""Part of an observation that holds the state of the whole environment, for ``--critic-sees``."""


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Integers ``0 .. n - 1``, as int32 scalars."""

    n: int
    start: int = dataclasses.field(default=0, compare=False, repr=False)
    """What the environment calls 0."""
    native_shape: ClassVar[tuple[int, ...]] = ()
    shape: ClassVar[tuple[int, ...]] = ()
    dtype: ClassVar[np.dtype] = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """One integer ``0 .. nvec[i] - 1`` for each ``i``, as an int32 vector."""

    nvec: tuple[int, ...]
    start: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """What the environment calls 0, for each ``i``; empty: 0."""
    axes: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """The shape in which the environment has the vector; empty: as a vector."""
    binary: bool = dataclasses.field(default=False, compare=False, repr=False)
    """Whether the environment has it as ``MultiBinary``."""
    dtype: ClassVar[np.dtype] = np.dtype(np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    @property
    def native_shape(self) -> tuple[int, ...]:
        return self.axes or self.shape


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Arrays of one shape and dtype between ``low`` and
    ``high`` (arrays of that shape; may be infinite).
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    low: np.ndarray
    high: np.ndarray

    @property
    def native_shape(self) -> tuple[int, ...]:
        return self.shape


Part = Discrete | MultiDiscrete | Box
"""A space whose values are single arrays."""
Space = Part | dict[str, "Space"]


@dataclasses.dataclass(frozen=True, eq=False)
class Interface:
    """What belongs to the spaces of one agent: a part of ``EnvSpec``, which a data set keeps."""

    observation: Space
    action: Space
    mask: str | None = None
    """Part of the observation that says which actions are legal; None: all are."""
    both_sides: bool = False
    """Whether the agent moves for both sides of a game."""
    tuples: tuple[str, ...] = ()
    """Paths of the dicts that the environment has as a ``Tuple``,
    each below ``observation`` or ``action``."""

    @property
    def kinds(self) -> dict[str, Space]:
        """The spaces by the names of the arrays in which rollouts and data sets hold their
        values.
        """
        return {"obs": self.observation, "action": self.action}

    def problem(self) -> str | None:
        """Says why the mask cannot be one; None: it can, or there is none."""
        if self.mask is None:
            return None
        size = sum(num_choices(self.action))
        parts = self.observation if isinstance(self.observation, dict) else {}
        part = parts.get(self.mask)
        if size and isinstance(part, Part) and part.shape == (size,):
            return None
        return f"mask {self.mask!r} is not a part of the observations with a flag for each of {size} actions"


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Returns the parts of nested dicts by their path, in JAX's order:
    ``{"camera/left": ..., "speed": ...}``.

    Anything except a dict is a part; without a dict around it, it has the path ``""``.
    """
    if not isinstance(tree, dict):
        return {path: tree}
    inner = f"{path}/" if path else ""
    return {
        key: part for name in sorted(tree) for key, part in leaves(tree[name], inner + name).items()
    }


def nested(space: Space, values: dict[str, Any], path: str = "") -> Any:
    """The inverse of ``leaves``: returns the values of a space's parts in its form."""
    if not isinstance(space, dict):
        return values[path]
    inner = f"{path}/" if path else ""
    return {name: nested(part, values, inner + name) for name, part in space.items()}


def tupled(tree: Any, tuples: Collection[str], path: str) -> Any:
    """Returns nested dicts with tuples in place of those at the paths ``tuples``,
    as the environment has them.

    Args:
      path: that of the tree itself.
    """
    if not isinstance(tree, dict):
        return tree
    parts = {name: tupled(part, tuples, f"{path}/{name}") for name, part in tree.items()}
    if path in tuples:
        return tuple(parts[str(number)] for number in range(len(parts)))
    return parts


def untupled(tree: Any, tuples: Collection[str], path: str) -> Any:
    """The inverse of ``tupled``; dicts stay."""
    if path in tuples and isinstance(tree, tuple | list):
        tree = {str(number): part for number, part in enumerate(tree)}
    if not isinstance(tree, dict):
        return tree
    return {name: untupled(part, tuples, f"{path}/{name}") for name, part in tree.items()}


def write_rows(rows: np.ndarray, whole: Any, part: Any) -> Any:
    """Writes the parts of ``part`` into these rows of the parts of ``whole``,
    and returns the latter.
    """
    for x, values in zip(leaves(whole).values(), leaves(part).values(), strict=True):
        x[rows] = values
    return whole


def paths(tree: Any, path: str = "") -> Any:
    """Returns nested dicts with each part replaced by its path, as in ``leaves``."""
    if not isinstance(tree, dict):
        return path
    inner = f"{path}/" if path else ""
    return {name: paths(part, inner + name) for name, part in tree.items()}


def too_wide(values: np.ndarray, dtype: np.dtype) -> str:
    """Says which integer an integer ``dtype`` cannot hold; empty if it holds all."""
    if values.dtype.kind not in "iu" or dtype.kind not in "iu":
        return ""
    bounds = np.iinfo(dtype)
    wide = values[(values < bounds.min) | (values > bounds.max)]
    if wide.size:
        return f"holds {wide[0]}, which {bounds.bits}-bit integers cannot; a Box of floats can"
    return ""


def counted(part: Part, values: Any) -> Any:
    """Returns values ``[B, ...]`` of an environment on the host as policies see them:
    vectors that count from 0.
    """
    if isinstance(part, Box):
        return values
    values = values.reshape(values.shape[0], *part.shape)
    if part.start:
        return values - _start(part)
    return values


def native(part: Part, values: Any) -> Any:
    """Returns values ``[B, ...]`` of policies as the environment has them:
    the inverse of ``counted``.
    """
    if isinstance(part, Box):
        return values
    values = values + _start(part) if part.start else values
    return values.reshape(values.shape[0], *part.native_shape)


def _start(part: Discrete | MultiDiscrete) -> np.ndarray:
    """Returns what the environment calls 0, with as many axes as a batch of values, or none."""
    return np.asarray([part.start] if part.shape else part.start, part.dtype)


def holds(part: Part, values: np.ndarray) -> bool:
    """Returns whether a discrete space has all of these values;
    values of a ``Box`` are not checked.
    """
    if isinstance(part, Box):
        return True
    most = np.asarray(part.n if isinstance(part, Discrete) else part.nvec)
    return bool(((values >= 0) & (values < most)).all())


def num_choices(action: Space) -> list[int]:
    """Returns the number of values of each component of a discrete action; other actions have
    none.
    """
    if isinstance(action, Discrete):
        return [action.n]
    if isinstance(action, MultiDiscrete):
        return list(action.nvec)
    return []


def clipped(space: Space, action: Any) -> Any:
    """Returns actions ``[..., *shape]`` as an environment executes them:
    with numbers between their bounds.

    Works on numpy and on JAX arrays.
    """
    if isinstance(space, dict):
        return {name: clipped(part, action[name]) for name, part in space.items()}
    if not isinstance(space, Box):
        return action
    xp = action.__array_namespace__()
    low, high = (xp.broadcast_to(bound, action.shape) for bound in (space.low, space.high))
    return xp.clip(action, low, high)


def zeros(space: Space, num_envs: int) -> Any:
    """Returns values ``[num_envs, ...]`` of a space, all zero."""
    if isinstance(space, dict):
        return {name: zeros(part, num_envs) for name, part in space.items()}
    return np.zeros((num_envs, *space.shape), space.dtype)


def is_image(space: Space) -> bool:
    """Returns True for arrays of three axes, and for grey images."""
    return is_grey(space) or (isinstance(space, Box) and len(space.shape) == 3)


def is_grey(space: Space) -> bool:
    """Returns True for images without an axis of channels: matrices of bytes from 0 to 255,
    of 10 or more a side.

    Gymnasium's ``GrayscaleObservation`` makes them by default.
    A stack of an Atari game's memory has fewer rows.
    """
    if not isinstance(space, Box) or len(space.shape) != 2 or space.dtype != np.uint8:
        return False
    return min(space.shape) >= 10 and int(np.min(space.low)) == 0 and int(np.max(space.high)) == 255


def describe(space: Space, *, starts: bool = False) -> str:
    """Describes a space in a word, without its bounds: ``float32[4]``,
    ``Discrete(2)`` or ``MultiDiscrete(3, 2)``.

    Named parts look like ``{camera: uint8[64, 64, 3], speed: float32[2]}``.

    Args:
      starts: say also what the environment calls 0, if it is not 0: ``Discrete(2) from 1``.
    """
    if isinstance(space, dict):
        parts = (f"{name}: {describe(part, starts=starts)}" for name, part in space.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(space, Box):
        return f"{space.dtype}{list(space.shape)}"
    if isinstance(space, Discrete):
        text = f"Discrete({space.n})"
    else:
        text = f"MultiDiscrete{tuple(space.nvec)}"
    if starts and np.any(space.start):
        return f"{text} from {space.start}"
    return text


def channels_first(shape: tuple[int, ...]) -> bool:
    """Returns True for an image shape such as EnvPool's Atari (4, 84, 84),
    not gymnax's MinAtar (10, 10, 4).

    A square image has two equal sides; any other image has fewer channels than rows or columns.
    """
    if len(shape) != 3 or 1 < shape[0] == shape[1]:
        return False
    return 1 < shape[1] == shape[2] or shape[0] < shape[2]
