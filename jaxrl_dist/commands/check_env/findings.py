"""The faults that a check finds, and the checks common to Gymnasium and gymnax-style
environments.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_dist.algorithms.wrappers.hindsight import ACHIEVED, DESIRED
from jaxrl_dist.envs.contract import Contract, Stop, shown
from jaxrl_dist.envs.goals import FORMS
from jaxrl_dist.envs.native import Mask
from jaxrl_dist.errors import ConfigError, say
from jaxrl_dist.spaces import too_wide

STEPS = 1000
"""Env steps to play; a slow environment plays fewer, and stops after ``SECONDS``."""
SECONDS = 10.0


class Check(Contract):
    """Collects findings, and knows which call is in progress and since when."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.faults: dict[str, str] = {}
        self.notes: list[str] = []
        self.steps = 0
        self.episodes = 0
        self.doing = ""
        self.since = time.monotonic()

    def fault(self, kind: str, text: str) -> None:
        """Records a fault; keeps only the first of each kind."""
        self.faults.setdefault(kind, " ".join(text.split())[:400])

    def stop(self, kind: str, text: str, cause: BaseException | None = None) -> Stop:
        self.fault(kind, text)
        return Stop()

    def refuse(self, kind: str, error: ConfigError) -> None:
        self.fault(kind, error.with_flags)

    def halt(self) -> None:
        if self.faults:
            raise Stop

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, phase: str) -> None:
        say(f"{phase} ...")

    def lines(self, name: str, done: str) -> list[str]:
        """Returns all findings as lines for the terminal; ``done`` says what was tried."""
        lines = [*self.faults.values(), *(f"note: {note}" for note in self.notes)]
        if not self.faults:
            lines.append(f"no fault found in {done}")
        return [f"{name}: {line}" for line in lines]

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        self.doing = doing
        self.since = time.monotonic()
        with super().during(doing):
            yield

    # --- Checks of values -------------------------------------------------------------------------

    def part(self, subject: str, obs: Any, space: Any) -> bool:
        right = super().part(subject, obs, space)
        if not right or isinstance(obs, jax.ShapeDtypeStruct):
            return right
        x = np.asarray(obs)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            self.fault("finite", f"{subject} is not finite: {shown(x)}")
        elif outside := _outside(x, space):
            self.fault("range", f"{subject} lies outside its space: {outside}")
        elif wide := too_wide(x, jax.dtypes.canonicalize_dtype(x.dtype)):
            self.fault("integers", f"{subject} {wide}")
        else:
            return True
        return False

    def number(self, subject: str, x: Any) -> bool:
        right = super().number(subject, x)
        if right and not isinstance(x, jax.ShapeDtypeStruct) and not np.isfinite(float(x)):
            self.fault("finite reward", f"{subject} is {float(x)}")
        return right

    def masked(self, mask: Mask) -> None:
        """Adds the note on action masks."""
        if mask.unread:
            self.notes.append(mask.unread)
        elif mask.where:
            where = {
                "part": f"part {mask.name!r} of its observation",
                "info": f"info[{mask.name!r}]",
                "method": f"its method {mask.name}",
                "state": f"field {mask.name!r} of its state",
            }[mask.where]
            self.notes.append(
                f"{where} says which actions are legal, and policies will take only those"
            )

    def goals(self, parts: Iterable[str], *, known: bool) -> None:
        """Adds the note on goals, if they are parts of an observation.

        Args:
          known: whether the environment says what reaching a goal pays.
        """
        if not {ACHIEVED, DESIRED} <= set(parts):
            return
        how = "--her 0.8"
        if not known:
            how += f" and --goal-reward {FORMS}"
        self.notes.append(f"it has goals, which dqn, sac and td3 can replace in hindsight: {how}")

    def legal(self, where: str, mask: Any) -> None:
        """Checks that an action mask allows an action while the episode continues.

        Args:
          where: the call that the mask comes from, and its agent.
        """
        if not np.any(mask):
            self.fault(
                "legal",
                f"the action mask of {where} allows no action, though the episode continues",
            )

    def ends(self, lengths: list[int], both: int, truncated: int, limit: str) -> None:
        """Checks how episodes end: ``both`` of them were terminated and truncated in one step, and
        ``truncated`` were truncated.

        Args:
          limit: where the environment says that its time limit ends an episode.
        """
        self.episodes = len(lengths)
        if not lengths:
            self.notes.append(
                f"no episode ended within {self.steps} steps of random actions; a time limit would "
                "end each one"
            )
        elif both == len(lengths) > 1:
            self.fault(
                "both",
                "every episode ends both terminated and truncated; set truncated for time limits "
                "only",
            )
        longest = max(lengths, default=0)
        alike = lengths.count(longest)
        if longest > 1 and alike >= max(3, len(lengths) / 2) and not (both or truncated):
            self.notes.append(
                f"{alike} of {len(lengths)} episodes ended as terminated after exactly {longest} "
                f"steps, which learning takes for real ends; if it is a time limit, return it {limit}"
            )
        if len(lengths) > 4 and lengths[0] > 1 and set(lengths[1:]) == {1}:
            self.fault(
                "restart",
                "after the first episode, each one ends with its first step; reset must start a "
                "new one",
            )


ROUNDING = 1e-6
"""How far past a bound an observation may lie, absolutely and relative to the bound."""


def _outside(x: np.ndarray, space: Any) -> str:
    """Describes where an observation is outside a Gymnasium or gymnax space; empty if it is
    inside.
    """
    if hasattr(space, "low"):
        bounds = space.low, space.high
    elif type(space).__name__ == "MultiBinary":
        bounds = 0, 1
    else:
        first = np.asarray(getattr(space, "start", 0))
        bounds = first, first + np.asarray(space.nvec if hasattr(space, "nvec") else space.n) - 1
    low, high = (np.broadcast_to(np.asarray(bound), x.shape) for bound in bounds)
    bad = (x < low) | (x > high)
    # sums and cosines round past a bound by a unit in the last place
    if np.issubdtype(x.dtype, np.floating):
        bad &= ~(np.isclose(x, low, ROUNDING, ROUNDING) | np.isclose(x, high, ROUNDING, ROUNDING))
    if not bad.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    where = f" at {list(place)}" if place else ""
    return f"{x[place]}{where} is not between {low[place]} and {high[place]}"
