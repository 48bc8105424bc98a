"""Action masks: finds where an environment says which actions are legal.

This module imports no JAX until it is used, because worker processes import it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_dist.envs.native import NO_MASK, Mask, PlainSpace, named
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import jax
from jaxrl_dist.spaces import Box, Interface, MultiDiscrete, Space, describe, num_choices
from jaxrl_dist.types import EnvSpec, PyTree, Timestep

NAMES = (
    *("action_mask", "action_masks", "legal_action_mask", "legal_actions", "avail_actions"),
    *("get_action_mask", "get_legal_actions", "get_legal_moves", "get_avail_actions"),
)
"""Names of action masks, as parts of observations, keys of infos, methods or fields of states."""
PART = "mask"
"""Name of the observation's part for a mask that the environment gives in another way."""


def of_parts(observation: PlainSpace, action: PlainSpace) -> Mask:
    """Finds the action mask among the parts of an observation.

    A part ``mask`` that has another size is something else, such as the mask of an image.
    """
    for name in (PART, *NAMES):
        if (part := (observation.parts or {}).get(name)) is None:
            continue
        if part.kind in ("Box", "MultiBinary"):
            size = math.prod(part.shape)
        else:
            size = len(part.sizes or ())
        if action.num_choices == size and _holds_flags(part):
            return Mask("part", name)
        if name != PART:
            return Mask("part", name, misfit(f"part {name!r} of its observation", size, action))
    return NO_MASK


def part_of(observation: Space, action: Space) -> str | None:
    """Returns the name of the action mask among the parts of recorded observations; None:
    there is none.

    Raises:
      ConfigError: a part has the name and the values of one,
        and another number of flags than there are actions.
    """
    parts = observation if isinstance(observation, dict) else {}
    for name in NAMES:
        part = parts.get(name)
        if isinstance(part, Box | MultiDiscrete) and len(part.shape) == 1 and _may_be_flags(part):
            size = sum(num_choices(action))
            if size != part.shape[0]:
                raise ConfigError(
                    f"{name} has {part.shape[0]} flags, and the actions are {describe(action)}; give action_space=, or "
                    "mask='' if it says something else"
                )
    for name in (PART, *NAMES):
        fits = Interface(observation, action, name).problem() is None
        if fits and _may_be_flags(parts[name]):
            return name
    return None


def _may_be_flags(part: Space) -> bool:
    if not isinstance(part, Box):
        return isinstance(part, MultiDiscrete) and max(part.nvec) <= 2
    return part.dtype == np.bool_ or bool(np.all(part.low >= 0) and np.all(part.high <= 1))


def _holds_flags(space: PlainSpace) -> bool:
    """Returns whether a space holds a vector of bools or integers, or of zeros and ones."""
    if space.kind != "Box":
        return space.kind == "MultiBinary"
    zero_one = np.all(np.asarray(space.low) == 0) and np.all(np.asarray(space.high) == 1)
    return bool(len(space.shape) <= 1 and (np.dtype(space.dtype).kind in "biu" or zero_one))


def with_arrays(space: PlainSpace, name: str = "") -> PlainSpace:
    """Returns a space whose ``MultiBinary`` parts are arrays of bool;
    those with the name of a mask become vectors.
    """
    if space.parts:
        parts = {name: with_arrays(part, name) for name, part in space.parts.items()}
        return space._replace(parts=parts)
    if space.kind != "MultiBinary":
        return space
    is_mask = name in (PART, *NAMES)
    shape = (math.prod(space.shape),) if is_mask else space.shape
    return PlainSpace("Box", shape, "bool", 0, 1)


def misfit(name: str, size: int, action: PlainSpace) -> str:
    """Explains why a value of ``size`` numbers that looks like an action mask is not one."""
    if not action.num_choices:
        return f"{name} looks like an action mask, but {action.kind} actions cannot use one; illegal actions will be tried"
    return (
        f"{name} looks like an action mask, but has {size} numbers instead of {action.num_choices} "
        "zeros and ones; illegal actions will be tried"
    )


def flat(value: Any, size: int) -> np.ndarray | None:
    """Returns a mask, or a tuple with a mask per component, as one vector of bools;
    None if it is not a mask.

    Args:
      size: the number of zeros and ones that a mask has.
    """
    by_component = isinstance(value, tuple | list) and value and np.ndim(value[0])
    components = value if by_component else [value]
    numbers = np.concatenate([np.ravel(component) for component in components])
    if len(numbers) == size and np.isin(numbers, (0, 1)).all():
        return numbers.astype(bool)
    return None


def of_gymnasium(env: Any, observation: PlainSpace, action: PlainSpace) -> Mask:
    """Finds the action mask of a Gymnasium environment;
    resets it once to see its info and its methods' answers.
    """
    mask = of_parts(observation, action)
    methods = [name for name in NAMES if env.has_wrapper_attr(name)]
    if mask.where or not (methods or action.num_choices):
        return mask
    # training will show an error of reset, and where it came from
    with contextlib.suppress(Exception):
        _, info = env.reset(seed=0)
        offered = [of_value("info", name, info[name], action) for name in NAMES if name in info]
        for name in methods:
            with contextlib.suppress(Exception):  # such as Taxi's, which needs arguments
                offered.append(of_value("method", name, env.get_wrapper_attr(name)(), action))
        return min(offered, key=lambda mask: bool(mask.unread), default=mask)
    return mask


def of_value(where: str, name: str, value: Any, action: PlainSpace) -> Mask:
    """Returns the mask of this name, whose value is ``value`` now."""
    if action.num_choices and flat(value, action.num_choices) is not None:
        return Mask(where, name)
    source = f"info[{name!r}]" if where == "info" else f"its method {name}"
    return Mask(where, name, misfit(source, np.size(value), action))


def of_keys(keys: Sequence[str]) -> str:
    """Returns why the mask among the keys of EnvPool's infos cannot be used; empty without a
    mask.
    """
    for key in keys:
        name = key.removeprefix("info:")
        if name in NAMES:
            return f"info[{name!r}] says which actions are legal, but policies cannot read it; illegal actions will be tried"
    return ""


def flags(action: Space) -> Box:
    """Returns the space of masks of a discrete action."""
    size = sum(num_choices(action))
    return Box((size,), np.dtype(np.bool_), np.zeros(size, np.bool_), np.ones(size, np.bool_))


def with_mask(observation: Space, action: Space, mask: Mask) -> tuple[Space, str | None]:
    """Returns the observation with the action mask as a part,
    and that part's name (None without a mask).

    A mask from elsewhere becomes the part ``PART``;
    an observation without parts becomes the part ``observation``.
    """
    if not mask.where or mask.unread:
        return observation, None
    if mask.where == "part":
        return observation, mask.name
    return {**in_parts(observation), PART: flags(action)}, PART


def in_parts(observation: PyTree) -> dict[str, PyTree]:
    """Returns an observation, or its space, as a dict; one without parts is ``observation``."""
    return observation if isinstance(observation, dict) else {"observation": observation}


def without_choice(spec: EnvSpec, step: Timestep) -> int | None:
    """Returns the first row with a running episode and a mask that allows no action,
    of a step on the host; or None.
    """
    if spec.mask is None:
        return None
    allows_none = ~np.asarray(step.obs[spec.mask], bool).any(-1)
    stuck = allows_none & step.valid & ~(step.terminated | step.truncated)
    return int(stuck.argmax()) if stuck.any() else None


# --- gymnax-style environments --------------------------------------------------------------------


def of_gymnax(
    env: object, state: PyTree, info: PyTree, observation: PlainSpace, action: PlainSpace
) -> Mask:
    """Finds the action mask of a gymnax-style environment: a part of its observation,
    or a field of its state.

    One in the info of a step comes too late for the first action of an episode.

    Args:
      state, info: shapes and dtypes suffice.
    """
    mask = of_parts(observation, action)
    if mask.where:
        return mask
    unread = [f"its {name}" for name in NAMES if hasattr(env, name)]
    for path, leaf in jax.tree.leaves_with_path(state):
        name = _name(path)
        if name in NAMES:
            if leaf.shape == (action.num_choices,):
                return Mask("state", name)
            unread.append(f"its {name}")
    for path, _ in jax.tree.leaves_with_path(info):
        if _name(path) in NAMES:
            unread.append(f"info[{_name(path)!r}]")
    if not unread:
        return mask
    why = (
        f"{unread[0]} seems to say which actions are legal, but policies read only a part {PART!r} "
        "of the observation, or a field of the state, with a bool for each action; illegal "
        "actions will be tried"
    )
    return Mask("method", unread[0], why)


def _name(path: jax.tree_util.KeyPath) -> str:
    """Returns the last name of a path in a tree; empty for an index, or no path."""
    if path:
        return str(getattr(path[-1], "name", getattr(path[-1], "key", "")))
    return ""


def observer(mask: Mask, native: object) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns ``(obs, state) -> obs`` for one environment: what policies see,
    with a mask in the state as a part.
    """

    def observe(obs: PyTree, state: PyTree) -> PyTree:
        obs = named(native, obs)
        if mask.where != "state":
            return obs
        by_name = {_name(path): leaf for path, leaf in reversed(jax.tree.leaves_with_path(state))}
        return {**in_parts(obs), PART: by_name[mask.name].astype(bool)}

    return observe
