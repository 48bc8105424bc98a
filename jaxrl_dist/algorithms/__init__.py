"""Algorithms by name. Each has its own file, which is imported only when a run needs the
algorithm.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import inspect
import pathlib
import sys
import traceback
import types
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from jaxrl_dist.config.named import ALGORITHMS as ALGORITHMS
from jaxrl_dist.config.named import PRESETS as PRESETS
from jaxrl_dist.config.named import check_name
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.protocols import Traits

_HINTS: dict[type, str] = {kind: kind.__name__ for kind in (bool, int, float, str)}
_HINTS |= {tuple: "tuple[int, ...]", type(None): "float | None"}
"""Types of hyperparameters, as they are annotated."""


class Source(NamedTuple):
    """The user's file of an algorithm, as it was when it was executed."""

    path: str
    """As the user named it."""
    text: str
    sha256: str
    """Of the text in UTF-8."""
    code: str
    """SHA-256 of the code: comments, docstrings and layout do not count."""


_SOURCES: dict[type, Source] = {}
"""By the config class that ``from_file`` has returned."""


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


def source_of(config: Any) -> Source | None:
    """Returns the file of the user's algorithm, for a config or config class; None: ``from_file``
    has not made it.
    """
    return _SOURCES.get(config if isinstance(config, type) else type(config))


def label_of(config: Any) -> str:
    """Returns how runs show an algorithm: ``name_of``, or the label of the user's file."""
    source = source_of(config)
    if source is None:
        return name_of(config)
    return label_of_file(pathlib.Path(source.path).name)


def label_of_file(name: str) -> str:
    """Returns the label of a file such as ``spo.py``: ``spo``, or the file's name if ``spo`` is one
    of ours.
    """
    stem = name.removesuffix(".py")
    return name if stem.lower() in {**ALGORITHMS, **PRESETS} else stem


def from_file(path: str) -> type:
    """Returns the config class in the user's Python file:
    its only dataclass with a ``make`` method.

    Executes the file like a script, which can import the modules beside it. The path must therefore
    come from the user, never from a file.

    Raises:
      ConfigError: the file is missing, fails to run, or does not hold exactly one algorithm.
    """
    module, text = _executed(path)
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
    _SOURCES[kinds[0]] = Source(path, text, _sha256(text), _sha256(_code(text)))
    return kinds[0]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _code(text: str) -> str:
    """Returns the code of a Python file without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [line for line in node.body if not _is_docstring(line)]
    return ast.unparse(tree)


def _is_docstring(line: ast.stmt) -> bool:
    if not isinstance(line, ast.Expr) or not isinstance(line.value, ast.Constant):
        return False
    return isinstance(line.value.value, str)


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


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes a file as it is now, and not what Python may have cached of it."""

    text = ""

    def get_code(self, fullname: str) -> types.CodeType:
        self.text = importlib.util.decode_source(self.get_data(self.path))
        return self.source_to_code(self.text, self.path)


def _executed(path: str) -> tuple[types.ModuleType, str]:
    """Returns the module that a Python file makes, and the file's text."""
    file = pathlib.Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"there is no file {path}")
    if file.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file; name one that ends in .py")
    name = f"algorithm_of_{file.stem}"  # avoids replacing another module
    loader = _Loader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up annotations here
    sys.path.insert(0, str(file.parent))
    try:
        loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)] or [None]
        # only syntax errors have one of their own
        line = getattr(error, "lineno", None) or lines[-1]
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {error}") from error
    return module, loader.text
