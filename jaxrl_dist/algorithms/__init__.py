"""Algorithms by name; each lives in a file of its own and is imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from jaxrl_dist.config import ConfigError, did_you_mean

ALGORITHMS = {
    "ppo": "PPO",
    "a2c": "A2C",
    "pg": "PG",
    "impala": "IMPALA",
    "appo": "APPO",
    "dqn": "DQN",
    "rainbow": "Rainbow",
    "pqn": "PQN",
    "r2d2": "R2D2",
    "ddpg": "DDPG",
    "td3": "TD3",
    "sac": "SAC",
}
"""The file (without ``.py``) and the config class in it."""


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "apex": (
        "dqn",  # Horgan et al. (2018), sections 4.1 and appendix C, at the size of one host
        {
            "plan": "asynchronous",
            "num_envs": 16,
            "rollout_length": 8,
            "epsilon_ladder": True,
            "priority_exponent": 0.6,
            "importance_exponent": 0.4,
        },
    ),
    "apex-ddpg": (
        "ddpg",  # section 4.2
        {"plan": "asynchronous", "num_envs": 8, "rollout_length": 16, "n_step": 5, "priority_exponent": 0.6},
    ),
    "a3c": ("a2c", {"plan": "gradients", "num_actors": 4, "scale_rewards": False}),
    "async-dqn": (
        "dqn",  # Mnih et al. (2016), section 4
        {
            "plan": "gradients",
            "num_actors": 4,
            "num_envs": 16,
            "rollout_length": 8,
            "n_step": 4,
            "target_period": 100,
            "learning_rate": 1e-3,
            "epsilon_steps": 50_000,
            "layer_norm": True,  # without a memory, its experience is correlated, and it diverges more easily
        },
    ),
}
"""Names for an algorithm under a plan: the algorithm, and what differs from its own preset."""


def config_class(name: str, own: type | None = None) -> Any:
    """The config dataclass of an algorithm: ``own`` if it has that name, else ours.

    Raises:
      ConfigError: there is no such algorithm.
    """
    if own is not None and own.__name__ == name:
        return own
    if name in PRESETS:
        name = PRESETS[name][0]
    if name not in ALGORITHMS:
        known = [*ALGORITHMS, *PRESETS]
        raise ConfigError(f"unknown algorithm {name!r}{did_you_mean(name, known)}; these work: {', '.join(known)}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), ALGORITHMS[name])


def name_of(config: Any) -> str:
    """The name of the algorithm that a config belongs to; for one that is not ours, the name of its class."""
    kind = type(config)
    file = kind.__module__.removeprefix(f"{__name__}.")
    return file if ALGORITHMS.get(file) == kind.__name__ else kind.__name__
