"""Checks of what a user asks for, and the words in which they are refused.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from jaxrl_dist.errors import ConfigError


def flag(name: str) -> str:
    """The command-line spelling of a field: ``num_envs`` -> ``--num-envs``."""
    return "--" + name.replace("_", "-")


def counted(number: int, noun: str) -> str:
    """``1 device``, ``2 devices``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest of ``choices``, or nothing when none is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""


def check_range(
    config: Any,
    *names: str,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Checks that the named fields are finite numbers with ``low <= x <= high`` and ``above < x < below``.

    A field that is None is skipped, a tuple is checked element by element; whole numbers are asked for where the
    field's type does not say float.

    Raises:
      ConfigError: naming the field's flag, its value and the range that works.
    """
    bounds = [(low, ">="), (above, ">"), (high, "<="), (below, "<")]
    wanted = " and ".join(f"{sign} {bound}" for bound, sign in bounds if bound is not None)
    kinds = {field.name: str(field.type) for field in dataclasses.fields(config)}
    for name in names:
        value = getattr(config, name)
        for x in value if isinstance(value, tuple) else (value,):
            if x is None:
                continue
            kind: Any = Real if "float" in kinds[name] else Integral
            if not isinstance(x, kind):
                what = "number" if kind is Real else "whole number"
                raise ConfigError(f"{flag(name)} must be a {what}, not {x!r}")
            inside = (
                math.isfinite(x)
                and (low is None or x >= low)
                and (high is None or x <= high)
                and (above is None or x > above)
                and (below is None or x < below)
            )
            if not inside:
                raise ConfigError(f"{flag(name)} must be {wanted}, not {x}")


def check_used(config: Any, *names: str, there: bool, needed: str) -> None:
    """Checks that the named fields have their defaults unless what they belong to is ``there``.

    Raises:
      ConfigError: naming the field's flag and what is ``needed``.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in names:
        if not there and getattr(config, name) != defaults[name]:
            raise ConfigError(f"{flag(name)} does nothing without {needed}")


def check_divides(name: str, value: int, *divisors: tuple[int, str]) -> None:
    """Checks that a field divides over each of the divisors, such as ``(8, "devices")``.

    Raises:
      ConfigError: naming the first over which it does not, and the nearest values that divide over all.
    """
    for divisor, what in divisors:
        if value % divisor:
            near = multiples_near(value, math.lcm(*[divisor for divisor, _ in divisors]))
            raise ConfigError(f"{flag(name)} {value} does not divide over {divisor} {what}; nearest that work: {near}")


def parse_devices(name: str, text: str | None) -> list[int] | None:
    """Reads the device numbers of a flag, such as ``0,2-5``; None stays None.

    Raises:
      ConfigError: it is no such list.
    """
    if text is None:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 10**6):
            raise ConfigError(f"{flag(name)} must be device numbers such as 0,1 or 2-7, not {text!r}")
        numbers += range(int(first), int(last) + 1)
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{flag(name)} {text} names a device twice")
    return numbers


def parse_bounds(name: str, text: str | None) -> tuple[float, float] | None:
    """Reads the value of a flag that is a bound, such as ``1``, or a range, such as ``-1,1``; None stays None.

    Raises:
      ConfigError: it is neither.
    """
    if text is None:
        return None
    try:
        numbers = [float(part) for part in str(text).split(",")]
        low, high = numbers if len(numbers) == 2 else (-numbers[0], *numbers)
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{flag(name)} must be a bound such as 1 or a range such as -1,1, not {text!r}")
    return low, high


def multiples_near(value: int, of: int) -> str:
    """The positive multiples of ``of`` just below and just above ``value``, as ``8 or 16``."""
    below = value // of * of
    return " or ".join(str(m) for m in (below, below + of) if m > 0)


MAX_SIZE = 2**20
"""Of what lies in an array's axis: far above use, far below what overflows 32-bit indices."""


MAX_STEPS = 2**30
"""Of one rollout of all environments, and of a report interval: devices count them in 32 bits."""
