"""The findings of a check, and the checks common to Gymnasium and gymnax-style environments."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_dist.envs.native import Mask, named, named_spaces
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import leaves, too_wide

STEPS = 1000
"""Env steps to play; a slow environment plays fewer, and stops after ``SECONDS``."""
SECONDS = 10.0


class Findings(NamedTuple):
    """The result of a check."""

    faults: list[str]
    notes: list[str]
    """Remarks that are no faults, but probably not intended."""
    steps: int
    episodes: int


class Stop(Exception):
    """The check cannot continue."""


class Check:
    """Collects findings, and knows which call is in progress and since when."""

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self.notes: list[str] = []
        self.steps = self.episodes = 0
        self.doing, self.since = "", time.monotonic()

    def fault(self, kind: str, text: str) -> None:
        """Records a fault; keeps only the first of each kind."""
        self.faults.setdefault(kind, " ".join(text.split())[:400])

    def stop(self, kind: str, text: str) -> Stop:
        """Records a fault and returns the exception that ends the check."""
        self.fault(kind, text)
        return Stop()

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Records an exception raised inside as a fault, and ends the check."""
        self.doing, self.since = doing, time.monotonic()
        try:
            yield
        except ConfigError:
            raise
        except BaseException as error:  # SystemExit too
            line = str(error).strip().split("\n")[0]
            raise self.stop(doing, f"{doing} raises {type(error).__name__}{': ' if line else ''}{line}") from None

    def call(self, doing: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Calls a function of the environment inside ``during``."""
        with self.during(doing):
            return function(*args, **keywords)

    # --- Checks of returned values ----------------------------------------------------------------------

    def observation(self, where: str, obs: Any, space: Any) -> None:
        """Checks that an observation, or each of its parts, belongs to its space."""
        try:
            parts = leaves(named(space, obs))
        except ValueError as error:
            return self.fault("parts", f"{where}: {error}")
        for path, own in leaves(named_spaces(space)).items():
            self._part(f"the observation of {where}{path and f' at {path}'}", parts[path], own)

    def _part(self, what: str, obs: Any, space: Any) -> None:
        x = np.asarray(obs)
        if x.dtype == object or x.dtype.kind in "US":
            self.fault("observation", f"{what} is a {type(obs).__name__}, not an array of numbers")
        elif x.shape != tuple(space.shape):
            self.fault("shape", f"{what} has shape {x.shape}, its space {tuple(space.shape)}")
        elif not np.can_cast(x.dtype, space.dtype):
            self.fault("dtype", f"{what} has dtype {x.dtype}, its space {np.dtype(space.dtype)}")
        elif x.dtype.kind == "f" and not np.isfinite(x).all():
            self.fault("finite", f"{what} is not finite: {shown(x)}")
        elif outside := _outside(x, space):
            self.fault("range", f"{what} lies outside its space: {outside}")
        elif wide := too_wide(x, jax.dtypes.canonicalize_dtype(x.dtype)):
            self.fault("integers", f"{what} {wide}")

    def number(self, what: str, x: Any) -> None:
        """Checks that a reward is one finite number."""
        if not isinstance(x, Real) and not (isinstance(x, np.ndarray | jax.Array) and x.shape == ()):
            shape = f" of shape {x.shape}" if hasattr(x, "shape") else ""
            self.fault("reward", f"{what} is a {type(x).__name__}{shape}, not a number")
        elif not np.isfinite(float(x)):
            self.fault("finite reward", f"{what} is {float(x)}")

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
            self.notes.append(f"{where} says which actions are legal, and policies will take only those")

    def legal(self, where: str, mask: Any) -> None:
        """Checks that an action mask allows an action while the episode goes on."""
        if not np.any(mask):
            self.fault("legal", f"the action mask of {where} allows no action, though the episode goes on")

    def info(self, where: str, info: Any) -> None:
        """Checks that an info is a dict."""
        if not isinstance(info, dict):
            self.fault(f"info {where}", f"{where}'s info is a {type(info).__name__}, not a dict")

    def ends(self, lengths: list[int], both: int) -> None:
        """Checks how episodes end: ``both`` of them ended as terminated and truncated at once."""
        self.episodes = len(lengths)
        if not lengths:
            text = f"no episode has ended within {self.steps} steps of random actions; a time limit makes sure of it"
            self.notes.append(text)
        elif both == len(lengths) > 1:
            self.fault("both", "every end is terminated and truncated at once; truncated is for time limits alone")
        if len(lengths) > 4 and lengths[0] > 1 and set(lengths[1:]) == {1}:
            self.fault("restart", "after its first episode each ends with its first step: reset begins no new one")


def shown(x: Any) -> str:
    return " ".join(str(x).split())[:80]


ROUNDING = 1e-6
"""How far past a bound an observation may lie, absolutely and relative to the bound."""


def _outside(x: np.ndarray, space: Any) -> str:
    """Describes where an observation is outside a Gymnasium or gymnax space; empty if it is inside."""
    if hasattr(space, "low"):
        low, high = (np.broadcast_to(np.asarray(bound), x.shape) for bound in (space.low, space.high))
        bad = (x < low) | (x > high)
        if np.issubdtype(x.dtype, np.floating):  # sums and cosines round past a bound by a unit in the last place
            bad &= ~(np.isclose(x, low, ROUNDING, ROUNDING) | np.isclose(x, high, ROUNDING, ROUNDING))
        if not bad.any():
            return ""
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        return f"{x[place]} at {list(place)} is not between {low[place]} and {high[place]}"
    if hasattr(space, "nvec"):
        low, high = np.asarray(space.start), np.asarray(space.start) + space.nvec - 1
    elif type(space).__name__ == "MultiBinary":
        low, high = np.zeros(x.shape, int), np.ones(x.shape, int)
    else:
        low = np.asarray(getattr(space, "start", 0))
        high = low + int(space.n) - 1
    bad = (x < low) | (x > high)
    return f"{shown(x)} is not between {shown(low)} and {shown(high)}" if bad.any() else ""
