"""Checks of the user's values, and the wording of their error messages.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import math
import operator
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from jaxrl_dist.errors import ConfigError, UnusedError
from jaxrl_dist.errors import flag as flag

UPDATES_TOLERANCE = 1e-6
"""How far a rounded ratio may leave the number of updates after a rollout from a whole one."""


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: ``1 device``, ``2 devices``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def unit(clock: str) -> str:
    """Returns what a run's clock counts, in words."""
    return clock.replace("_", " ")


def install_extra(name: str) -> str:
    """Returns the command that installs an extra of this package."""
    return f"pip install 'jaxrl-dist[{name}]'"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns `` (did you mean 'x'?)`` for the nearest of ``choices``,
    or an empty string if none is near.
    """
    near = nearest(word, choices)
    if near is None:
        return ""
    return f" (did you mean {near!r}?)"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that is spelled most like ``word``, or None if none is similar.

    One of twice as many letters is similar only if it begins with the word:
    ``her`` is not ``gather``.
    """
    lower = word.lower()
    by_lower = {choice.lower(): choice for choice in choices}
    similar = [
        choice for choice in by_lower if len(choice) < 2 * len(lower) or choice.startswith(lower)
    ]
    near = difflib.get_close_matches(lower, similar, n=1, cutoff=0.6)
    if near:
        return by_lower[near[0]]
    return None


def check_range(
    config: Any,
    *names: str,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Checks that the named fields are finite numbers with
    ``low <= x <= high`` and ``above < x < below``.

    Fields that are None are skipped, and tuples are checked element by element. A field whose type
    does not mention float must be a whole number, and is bounded by ``MAX_COUNT`` if ``high`` is
    None.

    Raises:
      ConfigError: a value is out of range; the message names its flag and the range that works.
    """
    types = {field.name: str(field.type) for field in dataclasses.fields(config)}
    for name in names:
        value = getattr(config, name)
        whole = "float" not in types[name]
        kind: Any = Integral if whole else Real
        for number in value if isinstance(value, tuple) else (value,):
            if number is None:
                continue
            if not isinstance(number, kind):
                noun = "whole number" if whole else "number"
                raise ConfigError(f"must be a {noun}, not {shown(number)}", name)
            most = high
            if whole and high is None and number > MAX_COUNT:
                most = MAX_COUNT
            check_bounds(name, number, {">=": low, ">": above, "<=": most, "<": below})


_HOLDS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def check_bounds(name: str, number: Any, bounds: Mapping[str, float | None]) -> None:
    """Checks that a field's number is finite and within bounds, keyed by their signs,
    such as ``{">=": 0}``.

    Raises:
      ConfigError: it is not; the message names its flag and the range that works.
    """
    known = {sign: bound for sign, bound in bounds.items() if bound is not None}
    # a huge whole number does not fit a float
    finite = isinstance(number, Integral) or math.isfinite(number)
    if not (finite and all(_HOLDS[sign](number, bound) for sign, bound in known.items())):
        wanted = " and ".join(f"{sign} {bound}" for sign, bound in known.items()) or "finite"
        raise ConfigError(f"must be {wanted}, not {shown(number)}", name)


def check_used(config: Any, *names: str, active: bool, needed: str) -> None:
    """Checks that the named fields have their defaults,
    unless the feature that uses them is ``active``.

    Raises:
      UnusedError: a field has another value; the message names its flag and what is ``needed``.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in names:
        if not active and getattr(config, name) != defaults[name]:
            raise UnusedError(f"does nothing without {needed}", name)


def check_divides(name: str, value: int, *divisors: tuple[int, str]) -> None:
    """Checks that a field's value is divisible by each divisor, such as ``(8, "devices")``.

    Raises:
      ConfigError: it is not; the message names the first such divisor,
        and the nearest values divisible by all.
    """
    for divisor, unit in divisors:
        if value % divisor:
            near = multiples_near(value, math.lcm(*[divisor for divisor, _ in divisors]))
            raise ConfigError(
                f"{value} does not divide over {divisor} {unit}; nearest that work: {near}", name
            )


def parse_devices(name: str, text: str | None) -> list[int] | None:
    """Reads the device numbers of a flag, such as ``0,2-5``; None stays None.

    Raises:
      ConfigError: the text is not such a list.
    """
    if text is None:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch("([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if ends is None or int(ends[1]) > int(ends[2] or ends[1]):
            raise ConfigError(f"must be device numbers such as 0,1 or 2-7, not {shown(text)}", name)
        numbers += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{text} names a device twice", name)
    return numbers


def parse_bounds(name: str, text: str | None) -> tuple[float, float] | None:
    """Reads a flag's bound, such as ``1``, or range, such as ``-1,1``, as ``(low, high)``;
    None stays None.

    Raises:
      ConfigError: the text is neither.
    """
    if text is None:
        return None
    try:
        numbers = [float(number) for number in str(text).split(",")]
        if len(numbers) == 1:
            numbers.insert(0, -numbers[0])
        low, high = numbers
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(
            f"must be a bound such as 1 or a range such as -1,1, not {shown(text)}", name
        )
    return low, high


def multiples_near(value: int, of: int) -> str:
    """Returns the positive multiples of ``of`` just below and just above ``value``, as ``8 or
    16``.
    """
    below = value // of * of
    return " or ".join(str(m) for m in (below, below + of) if m > 0)


def divisor_below(value: int, of: int) -> int:
    """Returns the largest divisor of ``of`` that is not above ``value``."""
    return next(d for d in range(value, 0, -1) if of % d == 0)


def whole_updates_below(ratio: float, steps: int) -> float:
    """Returns the largest ratio up to ``ratio`` that makes a whole number of updates,
    at least 1, after ``steps``.
    """
    updates = ratio * steps
    is_whole = round(updates) >= 1 and abs(updates - round(updates)) <= UPDATES_TOLERANCE
    if is_whole:
        return ratio
    return max(1, int(updates)) / steps


def divisors_near(value: int, of: int) -> str:
    """Returns the divisors of ``of`` just below and just above ``value``, as ``4 or 8``."""
    small = [d for d in range(1, math.isqrt(of) + 1) if of % d == 0]
    divisors = sorted({*small, *(of // d for d in small)} - {value})
    above = bisect.bisect(divisors, value)
    return " or ".join(map(str, divisors[max(above - 1, 0) : above + 1]))


def shown(value: object) -> str:
    """Formats any value for a message, on one line of at most 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not write out thousands of digits
        return "a number of thousands of digits"
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."


def check_env_object(env: object) -> None:
    """Checks that an object is not an environment whose many copies would all be the same one.

    Raises:
      ConfigError: it has ``reset`` and ``step``, as a ``gymnasium.Env``,
        and not the ``step_env`` of gymnax's style.
    """
    if (
        not callable(env)
        and not hasattr(env, "step_env")
        and hasattr(env, "step")
        and hasattr(env, "reset")
    ):
        raise no_env(f"not a {type(env).__name__}")


def no_env(fault: str) -> ConfigError:
    """Returns the refusal of an object that is not an environment for training; ``fault`` says
    what it is instead.
    """
    return ConfigError(
        f"env must be a name, or a gymnax-style environment with reset_env and step_env, {fault}; to train on a "
        "gymnasium.Env, pass a function of a module or notebook that makes it: def make() and env=make"
    )


MAX_SIZE = 2**20
"""Maximum length of an array axis: far more than anyone uses,
far below an overflow of 32-bit indices."""
MAX_RETURN = 1e30
"""Largest return that a data set may name, far from an overflow of its square."""


MAX_STEPS = 2**30
"""Maximum env steps of a rollout of all environments, and of a report interval:
devices count them in 32 bits."""


MAX_COUNT = 10**15
"""Maximum of all other whole numbers: far more than anyone uses, and still exact as a float."""
