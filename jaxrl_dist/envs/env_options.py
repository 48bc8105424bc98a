"""The texts of ``--env-options`` as values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.errors import ConfigError


def parse_option(env: str, key: str, text: str, default: object) -> bool | int | float | str:
    """Parses the text of one ``--env-options`` entry as the type of its default.

    Raises:
      ConfigError: the text is not a value of this type.
    """
    kind = type(default)
    try:
        if isinstance(default, (bool, np.bool_)):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, (int, np.integer)):
            return int(text)
        if isinstance(default, (float, np.floating)):
            number = float(text)
            if not math.isfinite(number):
                raise ValueError
            return number
        if isinstance(default, str):
            return text
    except (KeyError, ValueError):
        raise ConfigError(
            f"--env-options {key} of {env} must be a {kind.__name__} such as {default}, not {text!r}"
        ) from None
    raise ConfigError(
        f"--env-options {key} of {env} is a {kind.__name__}, which the command line cannot set; "
        "set it in Python"
    )


def check_options(env: str, options: Mapping[str, str], known: Collection[str]) -> None:
    """Raises ``ConfigError`` for an entry of
    ``--env-options`` whose name an environment does not know.
    """
    for key in options:
        if key not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                f"{env} has no option {key!r}{did_you_mean(key, known)}; it has: {names}"
            )


def parse_options(
    env: str, options: Mapping[str, str], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Parses ``--env-options`` by the names and types of an environment's defaults.

    Raises:
      ConfigError: an unknown name or an unreadable value.
    """
    check_options(env, options, defaults)
    return {key: parse_option(env, key, text, defaults[key]) for key, text in options.items()}
