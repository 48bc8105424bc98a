"""Algorithms by name. Each has its own file, which is imported only when a run needs the algorithm."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys
import traceback
from typing import Any

from jaxrl_dist.checks import did_you_mean
from jaxrl_dist.errors import ConfigError

_CLASSES = "PPO A2C PG IMPALA APPO DQN Rainbow PQN R2D2 QMIX DDPG TD3 SAC ES ARS"
ALGORITHMS = {name.lower(): name for name in _CLASSES.split()}
"""The module and the config class of each algorithm."""
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "apex": (
        "dqn",  # Horgan et al. (2018), sections 4.1 and appendix C, at the size of one host
        {
            "plan": "asynchronous",
            "num_envs": 16,
            "rollout_length": 8,
            "replay_ratio": 0.25,
            "target_period": 250,
            "learning_rate": 5e-4,
            "normalize_observations": False,
            "epsilon_ladder": True,
            "priority_exponent": 0.6,
            "importance_exponent": 0.4,
        },
    ),
    "apex-ddpg": (
        "ddpg",  # section 4.2
        {"plan": "asynchronous", "num_envs": 8, "rollout_length": 16, "n_step": 5, "priority_exponent": 0.6},
    ),
    "vdn": (
        "qmix",  # Sunehag et al. (2017), who do not normalise layers
        # Without it, values on MPE_simple_spread rose above 0, where no reward is, in one of three seeds.
        {"plan": "on_device", "mixer": "vdn", "layer_norm": True},
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
            "target_period": 1,
            "learning_rate": 3e-4,
            "epsilon_end": 0.05,
            "epsilon_steps": 50_000,
            "ez_greedy": False,
            "normalize_observations": False,  # which the plan does not do
            # Without replay, experience is correlated. Layer normalisation stabilises learning more than a target
            # network, which would only slow it down (Gallici et al. 2024, section 3).
            "layer_norm": True,
        },
    ),
}
"""Named presets: the algorithm, and the flags that differ from the algorithm's own preset."""


def config_class(name: str | type, own: type | None = None) -> Any:
    """Returns an algorithm's config dataclass: ``own`` if it has that name, else the built-in one.

    A class is returned unchanged.

    Raises:
      ConfigError: the algorithm is unknown.
    """
    if isinstance(name, type):
        return name
    if own is not None and own.__name__ == name:
        return own
    if name in PRESETS:
        name = PRESETS[name][0]
    if name not in ALGORITHMS:
        known = [*ALGORITHMS, *PRESETS]
        near, all_of_them = did_you_mean(name, known), ", ".join(known)
        raise ConfigError(
            f"unknown algorithm {name!r}{near}. One of your own is its file: `jaxrl-dist train FILE.py`, for its runs "
            f"--algorithm FILE.py, in Python its class. These are here: {all_of_them}"
        )
    return getattr(importlib.import_module(f"{__name__}.{name}"), ALGORITHMS[name])


def having(field: str) -> str:
    """Returns which algorithms have a hyperparameter of this name, such as ``ddpg and td3 have``; empty: none."""
    names = [name for name in (*ALGORITHMS, *PRESETS) if field in config_class(name).__dataclass_fields__]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    return listed and f"{listed} {'has' if len(names) == 1 else 'have'}"


def name_of(config: Any) -> str:
    """Returns the algorithm's name for a config or config class; for the user's own algorithm, the class name."""
    kind = config if isinstance(config, type) else type(config)
    package, _, file = kind.__module__.rpartition(".")
    if package == __name__ and ALGORITHMS.get(file) == kind.__name__:
        return file
    name: str = getattr(kind, "stored_as", kind.__name__)  # those of policies in an environment with several
    return name


def from_file(path: str) -> type:
    """Returns the config class in the user's Python file: its only dataclass with a ``make`` method.

    Executes the file like a script, which can import the modules beside it. The path must therefore come from the
    user, never from a file.

    Raises:
      ConfigError: the file is missing, fails to run, or does not hold exactly one algorithm.
    """
    file = pathlib.Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"there is no file {path}")
    name = f"algorithm_of_{file.stem}"  # avoids replacing another module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "its name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up annotations here
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = getattr(error, "lineno", None)  # only syntax errors have one
        for frame in frames if line is None else ():
            line = frame.lineno if frame.filename == str(file) else line
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {error}") from error
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == name and callable(getattr(value, "make", None))
    ]
    if len(found) != 1:
        several = f"several: {', '.join(kind.__name__ for kind in found)}" if found else "none"
        raise ConfigError(f"{path} must hold one algorithm, a dataclass with make, but there is {several}")
    (kind,) = found
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"{path}: {kind.__name__} must be a dataclass")
    if kind.__name__ in {**ALGORITHMS, **PRESETS}:
        raise ConfigError(f"{path}: {kind.__name__} is the name of one of ours; call the class otherwise")
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}: {kind.__name__}.{field.name} needs a default")
    return kind
