"""JAX reinforcement learning on one machine or several: one algorithm file under every execution.

import jaxrl_dist

for report in jaxrl_dist.train(jaxrl_dist.Train("ppo", env="CartPole-v1", total_env_steps=150_000)):
    print(report.env_steps, report.metrics["episode/return"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_dist.config.train import Train as Train
    from jaxrl_dist.data.dataset import Dataset as Dataset
    from jaxrl_dist.errors import CheckpointError as CheckpointError
    from jaxrl_dist.errors import ConfigError as ConfigError
    from jaxrl_dist.errors import DivergedError as DivergedError
    from jaxrl_dist.errors import EnvError as EnvError
    from jaxrl_dist.play.estimate import estimate as estimate
    from jaxrl_dist.play.games import Player as Player
    from jaxrl_dist.play.match import match as match
    from jaxrl_dist.play.policy import Policy as Policy
    from jaxrl_dist.play.policy import load_policy as load_policy
    from jaxrl_dist.play.recording import record as record
    from jaxrl_dist.run.console import display as display
    from jaxrl_dist.training import preset as preset
    from jaxrl_dist.training import resume as resume
    from jaxrl_dist.training import train as train
    from jaxrl_dist.training.pure import make_train as make_train
    from jaxrl_dist.types import Algorithm as Algorithm
    from jaxrl_dist.types import Report as Report
    from jaxrl_dist.types import Rollout as Rollout

_PUBLIC = {
    "config.train": ("Train",),
    "data.dataset": ("Dataset",),
    "errors": ("CheckpointError", "ConfigError", "DivergedError", "EnvError"),
    "play.estimate": ("estimate",),
    "play.games": ("Player",),
    "play.match": ("match",),
    "play.policy": ("Policy", "load_policy"),
    "play.recording": ("record",),
    "run.console": ("display",),
    "training": ("preset", "resume", "train"),
    "training.pure": ("make_train",),
    "types": ("Algorithm", "Report", "Rollout"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    # Imported when first used, so that `import jaxrl_dist` and `--help` stay fast.
    if name == "__version__":
        return importlib.import_module("jaxrl_dist.run.version").version()
    if name not in _MODULES:
        from jaxrl_dist.config.synonyms import METHODS, missing

        text = missing(f"module {__name__!r}", name)
        if name in METHODS:  # `from ... import NAME` shows the message of an ImportError only
            raise ImportError(text)
        raise AttributeError(text)
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
