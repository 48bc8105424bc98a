"""Algorithms by name. Each has its own file, which is imported only when a run needs the
algorithm.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import pathlib
import sys
import traceback
import types
from typing import TYPE_CHECKING, Any, NoReturn

from jaxrl_dist.config.named import ALGORITHMS as ALGORITHMS
from jaxrl_dist.config.named import PRESETS as PRESETS
from jaxrl_dist.config.named import check_name
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.protocols import Traits

_HINTS: dict[type, str] = {kind: kind.__name__ for kind in (bool, int, float, str)}
_HINTS |= {tuple: "tuple[int, ...]", type(None): "float | None"}
"""Types of hyperparameters, as they are annotated."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        if name not in ALGORITHMS.values():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        file = name.lower()
        # `from ... import PPO` shows the message of an ImportError only
        raise ImportError(
            f"module {__name__!r} has no attribute {name!r}: it is {__name__}.{file}.{name}; "
            f"jaxrl_dist.preset({file!r}, env) has its values for an environment"
        )


def config_class(name: str | type, user_class: type | None = None) -> Any:
    """Returns an algorithm's config dataclass: ``user_class`` if it has that name,
    else the built-in one.

    A class is returned unchanged.

    Raises:
      ConfigError: the algorithm is unknown.
    """
    if isinstance(name, type):
        return name
    if user_class is not None and user_class.__name__ == name:
        return user_class
    if user_class is not None and name not in {**ALGORITHMS, **PRESETS}:
        raise ConfigError(
            f"the run trained {name}, not {user_class.__name__}; name the file or class of {name}"
        )
    check_name(name)
    if name in PRESETS:
        name = PRESETS[name][0]
    return getattr(importlib.import_module(f"{__name__}.{name}"), ALGORITHMS[name])


def having(field: str) -> str:
    """Returns which algorithms have a hyperparameter of this name,
    such as ``ddpg and td3 have``; empty: none.
    """
    names = [
        name for name in (*ALGORITHMS, *PRESETS) if field in config_class(name).__dataclass_fields__
    ]
    if not names:
        return ""
    if len(names) == 1:
        return f"{names[0]} has"
    return f"{', '.join(names[:-1])} and {names[-1]} have"


def name_of(config: Any) -> str:
    """Returns the algorithm's name for a config or config class; for the user's own algorithm,
    the class name.
    """
    kind = config if isinstance(config, type) else type(config)
    package, _, file = kind.__module__.rpartition(".")
    if package == __name__ and ALGORITHMS.get(file) == kind.__name__:
        return file
    # those of policies in an environment with several
    name: str = getattr(kind, "stored_as", kind.__name__)
    return name


def from_file(path: str) -> type:
    """Returns the config class in the user's Python file:
    its only dataclass with a ``make`` method.

    Executes the file like a script, which can import the modules beside it. The path must therefore
    come from the user, never from a file.

    Raises:
      ConfigError: the file is missing, fails to run, or does not hold exactly one algorithm.
    """
    module = _executed(path)
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    ]
    kinds = [kind for kind in kinds if callable(getattr(kind, "make", None))]
    if not kinds:
        raise ConfigError(
            f"{path} must hold one algorithm, a dataclass with make, but there is none"
        )
    if len(kinds) > 1:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(
            f"{path} must hold one algorithm, a dataclass with make, but there are several: {names}"
        )
    _check(path, kinds[0])
    return kinds[0]


def _check(path: str, kind: type) -> None:
    """Checks the config class of the user's file."""
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"{path}: {kind.__name__} must be a dataclass")
    if kind.__name__ in {**ALGORITHMS, **PRESETS}:
        raise ConfigError(
            f"{path}: {kind.__name__} is the name of one of ours; call the class otherwise"
        )
    for field in dataclasses.fields(kind):
        if field.default is field.default_factory:  # both are missing
            raise ConfigError(f"{path}: {kind.__name__}.{field.name} needs a default")
    if fault := unannotated(kind):
        raise ConfigError(f"{path}: {fault}")


def unannotated(kind: type) -> str:
    """Returns which value of a config class needs an annotation to be a hyperparameter;
    empty: none.

    Without one, ``dataclass`` makes no field of it, and leaves an inherited field its default.
    Names in capitals or with a ``_`` in front are constants, as are those that a base annotates and
    ``Traits``.
    """
    fields = {field.name for field in dataclasses.fields(kind)}
    annotated = set[str]()
    for base in reversed(kind.__mro__):
        own = inspect.get_annotations(base).keys()
        annotated |= own
        for name, value in vars(base).items():
            constant = (
                name.startswith("_")
                or name.isupper()
                or name in annotated
                or name in Traits._fields
            )
            if type(value) in _HINTS and name not in own and (name in fields or not constant):
                hint = f"`{name}: {_HINTS[type(value)]} = {value!r}`"
                return f"{base.__name__}.{name} needs an annotation to be a hyperparameter: {hint}"
    return ""


def _executed(path: str) -> types.ModuleType:
    """Returns the module that a Python file makes."""
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)] or [None]
        # only syntax errors have one of their own
        line = getattr(error, "lineno", None) or lines[-1]
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {error}") from error
    return module
