"""Environments as a model that a policy may plan with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_dist.heavy import jax

PyTree = Any


class Simulated(NamedTuple):
    """The result of one simulated step of one environment."""

    state: PyTree
    """The next state, as in ``Simulator``."""
    obs: PyTree
    """What the policy sees of it, with its legal actions where the observation has them."""
    reward: Any
    """Float32 scalar, of whoever has moved."""
    discount: Any
    """Float32 scalar: 0 where the task ended, -1 where the other side of a game moves next, else
    1."""


class Simulator(NamedTuple):
    """The states of ``B`` environments, and the function that steps one of them;
    a pytree of the states.

    Values and rewards belong to the side that moves: a state's value is that of its mover, so that
    of a step is ``reward + discount * value``, as mctx has it. Time limits end nothing here, and
    nothing resets.
    """

    state: PyTree
    """[B, ...]."""
    step: Callable[[PyTree, PyTree, Any], Simulated]
    """``(state, action, key) -> simulated`` of one environment:
    no argument has an axis for environments."""

    def mapped(self, change: Callable[[Simulated], Simulated]) -> Simulator:
        """Returns the simulator with ``change`` made to each step, such as a scaling of its
        reward.
        """
        inner = self.step
        return self._replace(step=jax.tree_util.Partial(lambda *now: change(inner(*now))))
