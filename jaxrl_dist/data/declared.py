"""What users say of the spaces of their arrays."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.data import columns
from jaxrl_dist.envs import masks
from jaxrl_dist.envs.conversion import space_of
from jaxrl_dist.envs.native import named, plain, tuples_in
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.spaces import Box, Interface, Part, Space
from jaxrl_dist.types import PyTree


class Form(NamedTuple):
    """The form in which an environment has its observations or its actions."""

    space: Space | None
    """None: the data say which."""
    native: Any = None
    """The space of Gymnasium from which ``space`` is made."""

    def read(self, values: PyTree) -> PyTree:
        """Returns values ``[L, ...]`` of the environment in the form that policies see.

        Raises:
          ConfigError: the values are not of the space.
        """
        if self.space is None:
            return columns.arrays(values)
        try:
            tree = columns.arrays(values if self.native is None else named(self.native, values))
            return _counted(self.space, tree)
        except (LookupError, ValueError, AttributeError, OverflowError):
            described = spaces.describe(self.space, starts=True)
            raise ConfigError(
                f"a data set has values that are not of the space {described}"
            ) from None


OF_DATA = Form(None)


class Declaration(NamedTuple):
    """What a user says of observations and actions."""

    observation: Form = OF_DATA
    action: Form = OF_DATA
    mask: str | None = None
    """The part of the observations that says which actions are legal; None: the one with the name
    of a mask; empty: all actions are legal."""
    both_sides: bool = False

    def interface(self, obs: PyTree, action: PyTree) -> Interface:
        """Returns the interface of arrays ``[L, ...]`` in the form that policies see.

        Raises:
          ConfigError: the mask cannot be one, or integers may mean several things.
        """
        if not isinstance(self.both_sides, bool):
            raise ConfigError(f"both_sides must be True or False, not {self.both_sides!r:.80}")
        observation = self.observation.space or columns.space_of(obs)
        actions = self.action.space or columns.space_of(action, actions=True)
        if self.mask is None:
            mask = masks.part_of(observation, actions)
        else:
            mask = self.mask or None
        tuples = [
            *_tuples(self.observation.native, "observation"),
            *_tuples(self.action.native, "action"),
        ]
        interface = Interface(observation, actions, mask, self.both_sides, tuple(tuples))
        problem = interface.problem()
        if problem is not None:
            raise ConfigError(problem)
        return interface

    def warn_of_starts(self, actions: Sequence[PyTree]) -> None:
        """Warns of actions that may count from 1, if nobody has declared their space.

        Args:
          actions: arrays of the steps that were played, such as the arrays of each episode.
        """
        if self.action.space is not None:
            return
        parts = [part for action in actions for part in spaces.leaves(action).values()]
        if all(part.dtype.kind in "iu" and part.ndim == 1 and part.min() > 0 for part in parts):
            warnings.warn(
                "action 0 never occurs in the data set; if actions count from 1, give "
                "action_space=gymnasium.spaces.Discrete(n, start=1)",
                ConfigWarning,
                stacklevel=4,
            )


def declaration(
    observation_space: object, action_space: object, mask: str | None, both_sides: bool
) -> Declaration:
    """Returns what the arguments of ``Dataset.from_arrays`` say.

    Raises:
      ConfigError: a space is none, or no policy reads it.
    """
    return Declaration(
        form(observation_space, "observations"), form(action_space, "actions"), mask, both_sides
    )


def form(space: Any, role: str) -> Form:
    """Returns the form of a space of ours or of Gymnasium, or of the data for None.

    Args:
      role: ``observations`` or ``actions``.

    Raises:
      ConfigError: it is not a space, or no policy reads it.
    """
    if space is None:
        return OF_DATA
    parts = spaces.leaves(space).values()
    if parts and all(isinstance(part, Part) for part in parts):
        return Form(space)
    if not hasattr(space, "contains") or not hasattr(space, "sample"):
        raise ConfigError(
            f"{role} need a space of jaxrl_dist.spaces or of Gymnasium, not {space!r:.80}"
        )
    return Form(space_of(plain(space), "the data set", role), space)


def _counted(space: Space, values: PyTree) -> PyTree:
    if isinstance(space, dict):
        return {name: _counted(part, values[name]) for name, part in space.items()}
    if isinstance(space, Box):
        return values
    return spaces.counted(space, np.asarray(values))


def _tuples(native: Any, role: str) -> list[str]:
    """Returns the paths of the tuples in a space of Gymnasium; None has none."""
    if native is None:
        return []
    return list(tuples_in(plain(native), role))
