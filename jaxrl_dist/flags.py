"""Flags and ``config.json``: two spellings of one ``Train`` config, read by the same parser."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_type_hints

import tyro

from jaxrl_dist.algorithms import config_class, name_of
from jaxrl_dist.config import CONFIG_FILE, RUN_DEFAULTS, ConfigError, Train, did_you_mean, flag

FORMAT = 1
"""Of ``config.json``; a reader refuses a number that it does not know."""
_NOT_KEPT = ("algorithm", "run_dir")

_registry = tyro.constructors.ConstructorRegistry()


@_registry.primitive_rule
def _key_value_pairs(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Reads ``dict[str, str]`` as ``key=value key=value``."""
    if info.type != dict[str, str]:
        return None

    def read(args: list[str]) -> dict[str, str]:
        for arg in args:
            if "=" not in arg:
                raise ValueError(f"{arg!r} is no key=value pair")
        return dict(arg.split("=", 1) for arg in args)

    return tyro.constructors.PrimitiveConstructorSpec[dict[str, str]](
        nargs="*",
        metavar="KEY=VALUE ...",
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, dict),
        str_from_instance=lambda x: [f"{key}={value}" for key, value in x.items()],
    )


def plain_defaults(algorithm: str) -> Train[Any]:
    """What holds where neither a preset nor the user says anything else.

    Raises:
      ConfigError: there is no such algorithm.
    """
    return Train(config_class(algorithm)(), **RUN_DEFAULTS)


def parse_train(args: Sequence[str], default: Train[Any]) -> Train[Any]:
    """Reads the flags of a training run over the values of ``default``.

    Raises:
      ConfigError: an unknown flag or a value that cannot be read, in one line.
      SystemExit: with code 0, after ``--help``.
    """
    algorithm = type(default.algorithm)
    known = [
        field.name for kind in (Train, algorithm) for field in dataclasses.fields(kind) if field.name != "algorithm"
    ]
    switches = [name for kind in (Train, algorithm) for name, hint in get_type_hints(kind).items() if hint is bool]
    check_known(args, [flag(name) for name in known] + ["--no-" + flag(name)[2:] for name in switches])
    return run_tyro(
        Train[algorithm],  # type: ignore[valid-type]
        args,
        prog=f"jaxrl-dist train {name_of(default.algorithm)}",
        description=f"{algorithm.__doc__}\n\nDefaults may depend on the environment; config.json names what ran.",
        default=default,
    )


def check_known(args: Sequence[str], known: Iterable[str]) -> None:
    """Checks the names of all flags.

    Raises:
      ConfigError: naming the first that is unknown, and the nearest that is not.
    """
    known = [*known, "--help"]
    for arg in args:
        name = arg.split("=", 1)[0].replace("_", "-")
        if arg.startswith("--") and name not in known:
            raise ConfigError(f"unknown flag {arg.split('=', 1)[0]}{did_you_mean(name, known)}; --help lists all")


def run_tyro(target: Any, args: Sequence[str], *, prog: str, **options: Any) -> Any:
    """Parses with tyro, whose boxed error becomes one line.

    Raises:
      ConfigError: what tyro objects to.
      SystemExit: with code 0, after ``--help``.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                target, args=list(args), prog=prog, config=(tyro.conf.OmitArgPrefixes,), registry=_registry, **options
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(_one_line(box.getvalue())) from None


def _one_line(box: str) -> str:
    """The message of one of tyro's error boxes: its text up to the first rule."""
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines() if line.startswith("│")]
    rule = next((i for i, line in enumerate(lines) if set(line) == {"─"}), len(lines))
    return " ".join(lines[:rule]) or " ".join(box.split())


# --- config.json --------------------------------------------------------------------------------------


def to_json(config: Train[Any]) -> dict[str, Any]:
    """A resolved config as ``config.json`` keeps it."""
    run = {name: value for name, value in vars(config).items() if name not in _NOT_KEPT}
    return {
        "format": FORMAT,
        "algorithm": name_of(config.algorithm),
        "hyperparameters": dataclasses.asdict(config.algorithm),
        "run": run,
    }


def read_config(path: pathlib.Path) -> Train[Any]:
    """Reads ``config.json``, given itself or as its run directory.

    Raises:
      ConfigError: it is missing, damaged, or names what this version does not know.
    """
    algorithm, args = config_flags(path)
    with _naming(path):
        return parse_train(args, plain_defaults(algorithm))


def config_flags(path: pathlib.Path) -> tuple[str, list[str]]:
    """The algorithm's name and the flags that a ``config.json`` stands for; its run directory will do too.

    Raises:
      ConfigError: it is missing or damaged.
    """
    if path.is_dir():
        path = path / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    with _naming(path):
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else None
            raise ConfigError(f"format {found} is unknown; this version reads format {FORMAT}")
        sections = [x for x in (content.get("hyperparameters"), content.get("run")) if isinstance(x, dict)]
        if not isinstance(content.get("algorithm"), str) or len(sections) != 2:
            raise ConfigError("algorithm, hyperparameters or run is missing")
        args = [arg for section in sections for name, value in section.items() for arg in _as_flags(name, value)]
        return content["algorithm"], args


def _as_flags(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else "--no-" + flag(name)[2:]]
    if isinstance(value, dict):
        return [flag(name), *(f"{k}={v}" for k, v in value.items())]
    if isinstance(value, list):
        return [flag(name), *map(str, value)]
    return [flag(name), str(value)]


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Any:
    """Puts the file's name before what is wrong with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def resolve_flags(
    algorithm: str, layers: Sequence[Sequence[str]], preset: Callable[[Train[Any]], Train[Any]]
) -> Train[Any]:
    """Merges flags over the preset for the environment that they name; later layers win.

    The flags are first read over plain defaults, so that a bad one is refused before an environment is made.

    Args:
      preset: gives the preset's config for a config of which ``env`` and its options count.

    Raises:
      ConfigError: a flag cannot be read or is out of range.
    """
    config = plain_defaults(algorithm)
    for layer in layers:
        config = parse_train(layer, config)
    config.validate()
    config = preset(config)
    for layer in layers:
        config = parse_train(layer, config)
    return config
