"""Descriptions of the user's environments, their spaces and what they return.

This module imports no JAX, because worker processes import it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from jaxrl_dist import checks
from jaxrl_dist.config.envs import REMOTE
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import np

Agent = Hashable
"""The name of an agent; in most libraries a text."""


class PlainSpace(NamedTuple):
    """A Gymnasium or gymnax space, in types that JSON can store once arrays are lists."""

    kind: str
    """The name of its class."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    low: Any = None
    """Bounds of a ``Box``."""
    high: Any = None
    sizes: Any = None
    """Number of values of each component of a ``Discrete`` or ``MultiDiscrete`` space."""
    parts: Any = None
    """``PlainSpace`` of each part of a ``Dict`` or ``Tuple``, by name."""
    start: Any = 0
    """The least value of a ``Discrete`` space, or of each component of a ``MultiDiscrete`` one;
    0: all count from 0."""

    @classmethod
    def restored(cls, stored: Sequence[Any]) -> PlainSpace:
        """Returns the space that JSON has stored as a list."""
        space = cls(*stored)
        parts = space.parts and {name: cls.restored(part) for name, part in space.parts.items()}
        return space._replace(shape=tuple(space.shape), parts=parts)

    @property
    def num_choices(self) -> int:
        """Returns the length of an action mask; 0 for actions that are not discrete."""
        if self.kind == "MultiBinary":
            return 2 * math.prod(self.shape)
        return sum(self.sizes or ())


def plain(space: Any) -> PlainSpace:
    """Converts a space; keeps only the name of kinds that no policy supports."""
    kind = type(space).__name__
    parts = parts_of(space)
    if parts is not None:
        return PlainSpace(kind, parts={name: plain(part) for name, part in parts.items()})
    if kind == "Box":
        # one number in some libraries
        shape = tuple(int(size) for size in np.atleast_1d(space.shape))
        return PlainSpace(
            kind, shape, np.dtype(space.dtype).name, _bound(space.low), _bound(space.high)
        )
    if kind == "Discrete":
        return PlainSpace(kind, sizes=[int(space.n)], start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        sizes = np.ravel(space.nvec).tolist()
        start = np.ravel(getattr(space, "start", 0)).tolist()
        return PlainSpace(kind, np.shape(space.nvec), sizes=sizes, start=start if any(start) else 0)
    if kind == "MultiBinary":
        return PlainSpace(kind, tuple(space.shape))
    return PlainSpace(kind)


def check_counted(space: PlainSpace, name: str, role: str) -> PlainSpace:
    """Returns the space if nobody has to convert its discrete values, as workers do;
    arguments as of ``space_of``.

    Raises:
      ConfigError: they do not count from 0, or are not vectors.
    """
    for part in (space.parts or {}).values():
        check_counted(part, name, role)
    if np.any(space.start):
        raise ConfigError(
            f"{name} has {space.kind} {role} that do not count from 0; only Gymnasium's and "
            "PettingZoo's environments may have these"
        )
    if space.kind.startswith("Multi") and len(space.shape) != 1:
        raise ConfigError(
            f"{name} has {space.kind} {role} that are not vectors; only Gymnasium's and "
            "PettingZoo's environments may have these"
        )
    return space


def counted(space: PlainSpace) -> PlainSpace:
    """Returns ``MultiDiscrete`` for a ``Box`` that holds a vector of integers from 0 on."""
    if (
        space.kind != "Box"
        or np.dtype(space.dtype).kind not in "iu"
        or len(space.shape) != 1
        or np.any(space.low)
    ):
        return space
    sizes = [int(high) + 1 for high in np.broadcast_to(space.high, space.shape)]
    return PlainSpace("MultiDiscrete", space.shape, sizes=sizes)


def _bound(bound: Any) -> Any:
    """Returns a Box's bound as one number if all its numbers are equal,
    because there may be one per pixel.
    """
    equal = isinstance(bound, np.ndarray) and bound.size > 0 and (bound == bound.flat[0]).all()
    if equal:
        return bound.flat[0].item()
    return bound


def alike(one: PlainSpace, other: PlainSpace) -> bool:
    """Returns whether two spaces hold the same values."""
    fields = ("kind", "shape", "dtype", "sizes")  # policies do not see a start
    if any(getattr(one, field) != getattr(other, field) for field in fields):
        return False
    if not np.array_equal(one.low, other.low) or not np.array_equal(one.high, other.high):
        return False
    parts = one.parts or {}
    others = other.parts or {}
    same_names = parts.keys() == others.keys()
    return same_names and all(alike(parts[name], others[name]) for name in parts)


def parts_of(space: Any) -> dict[str, Any] | None:
    """Returns the spaces of the parts of a ``Dict`` or ``Tuple``, by name; None for other
    spaces.
    """
    kind = type(space).__name__
    inner = getattr(space, "spaces", None)
    if kind == "Tuple" and inner is not None:
        return {str(index): part for index, part in enumerate(inner)}
    if kind == "Dict" and inner is not None:
        return {str(name): part for name, part in inner.items()}
    return None


def tuples(observation: PlainSpace, action: PlainSpace, mask: Mask) -> tuple[str, ...]:
    """Returns ``EnvSpec.tuples``; observations to which a mask is added are dicts."""
    found = tuples_in(observation, "observation") + tuples_in(action, "action")
    added = bool(mask.where) and not mask.unread and mask.where != "part"
    return tuple(path for path in found if not (added and path == "observation"))


def tuples_in(space: PlainSpace, path: str) -> list[str]:
    """Returns the paths of a space's tuples, which begin with its own ``path``."""
    parts = space.parts or {}
    inner = [below for name, part in parts.items() for below in tuples_in(part, f"{path}/{name}")]
    if space.kind == "Tuple":
        return [path, *inner]
    return inner


def named(space: Any, value: Any) -> Any:
    """Returns a value of a space as nested dicts: a tuple becomes a dict with the names "0",
    "1" and so on.

    Raises:
      ValueError: a part is missing.
    """
    parts = parts_of(space)
    if parts is None:
        return value
    if isinstance(value, tuple | list):
        value = dict(enumerate(value))
    by_name = {}
    if isinstance(value, Mapping):
        by_name = {str(name): part for name, part in value.items()}
    for name in parts:
        if name not in by_name:
            raise ValueError(f"the observation has no part {name!r}, which its space has")
    return {name: named(part, by_name[name]) for name, part in parts.items()}


def named_spaces(space: Any) -> Any:
    """Returns nested dicts of the spaces of the parts of a ``Dict`` or ``Tuple``;
    other spaces stay as they are.
    """
    parts = parts_of(space)
    if parts is None:
        return space
    return {name: named_spaces(part) for name, part in parts.items()}


def unnamed(space: Any, value: Any) -> Any:
    """The inverse of ``named``."""
    parts = parts_of(space)
    if parts is None:
        return value
    inner = {name: unnamed(part, value[name]) for name, part in parts.items()}
    if type(space).__name__ == "Tuple":
        return tuple(inner.values())
    return {key: inner[str(key)] for key in space.spaces}


RESET = ("observation", "info")
STEP = ("observation", "reward", "terminated", "truncated", "info")
"""What Gymnasium's ``reset`` and ``step`` return."""


def described(value: object) -> str:
    """Returns what a value is, in a few words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"


def miscounted(call: str, values: object, names: Sequence[str]) -> str:
    """Says that a call has returned more or fewer values than these,
    as environments for older APIs do; else empty.
    """
    wanted = ", ".join(names)
    if not isinstance(values, tuple | list):
        return f"{call} returned {described(values)}, not ({wanted})"
    if len(values) == len(names):
        return ""
    if call == "step" and len(values) == 4:
        return f"step returned 4 values, as in Gym before 0.26, not ({wanted})"
    return f"{call} returned {checks.counted(len(values), 'value')}, not ({wanted})"


def returned(call: str, values: Any, names: Sequence[str]) -> Any:
    """Returns the values of a call after checking their number.

    Raises:
      TypeError: there are more or fewer.
    """
    problem = miscounted(call, values, names)
    if problem:
        raise TypeError(problem)
    return values


def check_agents(
    fault: Callable[[str], Exception], call: str, agents: Iterable[Agent], **parts: object
) -> None:
    """Checks that dicts keyed by agent have these agents.

    Raises:
      Exception: as ``fault`` says, if one lacks an agent.
    """
    for part, values in parts.items():
        known = values if isinstance(values, Mapping) else {}
        for agent in agents:
            if agent not in known:
                raise fault(f"{call} returned no {part} for agent {agent}")


def number(subject: str, value: object, kind: str = "number") -> bool | np.bool_ | int | float:
    """Returns a reward, or a flag (``kind`` ``bool``), after checking that it is one number.

    Raises:
      TypeError: the value is something else, such as a string,
        which Python might convert to a number or True.
    """
    if isinstance(value, bool | np.bool_ | int | float):
        return value
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise TypeError(f"{subject} is {value!r:.80}, not a {kind}")
    item: bool | int | float = array.item()
    return item


def flag(subject: str, value: object) -> bool:
    """Returns the end of an episode after checking that it is a bool, or 0 or 1.

    Raises:
      TypeError: it is something else.
    """
    truth = number(subject, value, "bool")
    if truth not in (0, 1):
        raise TypeError(f"{subject} is {value!r:.80}, not a bool")
    return bool(truth)


class Mask(NamedTuple):
    """Where an environment says which actions are legal."""

    where: str = ""
    """A ``part`` of its observation, ``info``, a ``method``, or a gymnax-style ``state``;
    empty: nowhere."""
    name: str = ""
    unread: str = ""
    """Why policies cannot use it; empty: they can."""


NO_MASK = Mask()


class Description(NamedTuple):
    """The properties of an environment, in types that JSON can store once arrays are lists."""

    kind: str
    """The name of its class."""
    gymnasium: bool
    """Whether it is a ``gymnasium.Env``; if not, the fields after ``gymnax`` are unset."""
    gymnax: bool
    """Whether it is a gymnax-style environment, or a pair ``(env, params)``."""
    observation: PlainSpace = PlainSpace("")
    action: PlainSpace = PlainSpace("")
    family: str = ""
    time_limit: int | None = None
    """In raw environment steps, before action repeat."""
    mask: Mask = NO_MASK
    """Found by ``masks.of_gymnasium``."""
    agents: Mapping[str, Mask] = {}
    """Where each agent of a ``pettingzoo.Parallel`` finds its legal actions; the spaces above have
    a part for each. Empty for other environments."""
    fps: float | None = None
    """Its ``render_fps``; None: it names none."""
    inside: str = ""
    """As ``EnvSpec.inside``."""


NORMALIZING = {
    "NormalizeObservation": "--normalize-observations",
    "NormalizeReward": "--scale-rewards",
}
"""Gymnasium's wrappers that keep statistics, and the flags that do the same."""
MAX_WRAPPERS = 100
CHANGING_REWARDS = ("ClipReward", "TransformReward")


def inside(env: Any) -> str:
    """Returns what wrappers inside an environment do that policies and returns suffer from;
    empty: nothing.
    """
    names = set[str]()
    for _ in range(MAX_WRAPPERS):
        if not hasattr(env, "env"):
            break
        names |= {kind.__name__ for kind in type(env).__mro__}
        env = env.env
    problems = []
    keeping = [name for name in NORMALIZING if name in names]
    if keeping:
        flags = " and ".join(NORMALIZING[name] for name in keeping)
        problems.append(
            f"the statistics of {' and '.join(keeping)} inside it restart in each evaluation and "
            f"are not saved with the policy; remove these wrappers and use {flags}"
        )
    changing = [name for name in CHANGING_REWARDS if name in names]
    if changing:
        problems.append(
            f"{changing[0]} inside it also changes the reported returns; remove it and use "
            "--clip-rewards or --scale-rewards, which do not"
        )
    return "; ".join(problems)


def render_fps(env: object) -> float | None:
    """Returns the ``render_fps`` of an environment's ``metadata``: its steps in a second;
    None where there is none.
    """
    metadata = getattr(env, "metadata", None)
    fps = metadata.get("render_fps") if isinstance(metadata, Mapping) else None
    if isinstance(fps, Real) and 0 < float(fps) < math.inf:
        return float(fps)
    return None


def picture(drawn: object) -> np.ndarray:
    """Returns the result of an environment's ``render`` if it is a picture, ``[H, W, 3]`` uint8.

    Raises:
      TypeError: it is something else.
    """
    if not hasattr(drawn, "shape"):  # an array of numpy or JAX has one
        raise TypeError(
            f"render() returned a {type(drawn).__name__}, not an array [H, W, 3] of uint8"
        )
    image = np.asarray(drawn)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise TypeError(
            f"render() returned a {type(drawn).__name__}{list(image.shape)}, not an array [H, W, "
            "3] of uint8"
        )
    return image


def family_of(env: object, default: str) -> str:
    """Returns the group of an environment of Gymnasium, gymnax or the ALE,
    such as ``classic_control``.
    """
    for kind in type(env).__mro__:  # the user's class may extend one of theirs
        match kind.__module__.split("."):
            case ["gymnasium", "envs", family, _, *_] | ["gymnax", "environments", family, _, *_]:
                return family
            case ["ale_py", *_]:
                return "atari"
    return default


def env_label(backend: str, env_id: str) -> str:
    """Returns an environment's name for messages: ``envpool:Pong-v5``,
    or ``my_module:make`` as users write theirs.
    """
    if ":" in env_id and backend != REMOTE:
        return env_id
    return f"{backend}:{env_id}"


def advice_on(env_id: str) -> str:
    """Returns how to install what a family of PettingZoo's games needs;
    empty for other environments.
    """
    # PettingZoo's own error says that it has moved, and how to install it
    if env_id.startswith("pettingzoo.mpe."):
        return f"; with it, --env mpe2.{env_id.removeprefix('pettingzoo.mpe.')} works"
    family = re.match(r"pettingzoo\.(\w+)\.", env_id)
    if family:
        return f"; pip install 'pettingzoo[{family[1]}]'"
    return ""


def is_gymnax(made: object) -> bool:
    """Returns True if an object is a gymnax-style environment, a pair ``(env, params)``,
    or a multi-agent one.
    """
    env = made[0] if isinstance(made, tuple) and len(made) == 2 else made
    if isinstance(env, type) or not hasattr(env, "step_env"):
        return False
    return hasattr(env, "reset_env") or is_team(env)


def is_team(made: object) -> bool:
    """Returns True for a multi-agent environment in JaxMARL's style."""
    wanted = ("agents", "reset", "step_env", "observation_space", "action_space")
    return not isinstance(made, type) and all(hasattr(made, name) for name in wanted)
