"""Algorithms by name; each lives in a file of its own and is imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from jaxrl_dist.config import ConfigError, did_you_mean

ALGORITHMS = {
    "ppo": "PPO",
    "a2c": "A2C",
    "pg": "PG",
    "dqn": "DQN",
}
"""The file (without ``.py``) and the config class in it."""


def config_class(name: str, own: type | None = None) -> Any:
    """The config dataclass of an algorithm: ``own`` if it has that name, else ours.

    Raises:
      ConfigError: there is no such algorithm.
    """
    if own is not None and own.__name__ == name:
        return own
    if name not in ALGORITHMS:
        raise ConfigError(
            f"unknown algorithm {name!r}{did_you_mean(name, ALGORITHMS)}; these work: {', '.join(ALGORITHMS)}"
        )
    return getattr(importlib.import_module(f"{__name__}.{name}"), ALGORITHMS[name])


def name_of(config: Any) -> str:
    """The name of the algorithm that a config belongs to; for one that is not ours, the name of its class."""
    kind = type(config)
    file = kind.__module__.removeprefix(f"{__name__}.")
    return file if ALGORITHMS.get(file) == kind.__name__ else kind.__name__
