"""Flags and ``config.json``: two spellings of one ``Train`` config, read by the same parser."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import tyro

from jaxrl_dist.algorithms import config_class, name_of
from jaxrl_dist.checks import did_you_mean, flag
from jaxrl_dist.config import CONFIG_FILE, OBJECT, RUN_DEFAULTS, Config, Train, env_name, split_env
from jaxrl_dist.errors import ConfigError

FORMAT = 1
"""Of ``config.json``; a reader refuses a number that it does not know."""
_NOT_KEPT = ("algorithm", "run_dir")


@dataclasses.dataclass(frozen=True)
class Command(Train[Config]):
    """``Train`` and the flags that only a command line has."""

    env: str = ""
    """Environment such as CartPole-v1, gymnax:CartPole-v1, envpool:Pong-v5, gymnasium:Ant-v5; without prefix gymnax
    comes first. Or a Python function that makes a gymnasium.Env or a gymnax-style one, such as my_module:make."""
    config: str | None = None
    """A run's config.json, or its directory: train again as it says, but for the flags that are given."""
    quiet: bool = False
    """Print nothing but errors."""

    def train(self) -> Train[Config]:
        """The run that the flags describe."""
        return Train(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Train)})


def plain_defaults(algorithm: str | type, own: type | None = None) -> Command[Any]:
    """What holds where neither a preset nor the user says anything else; ``own`` as in ``config_class``.

    Raises:
      ConfigError: there is no such algorithm.
    """
    return Command(config_class(algorithm, own)(), **RUN_DEFAULTS)


def parse_train(args: Sequence[str], default: Command[Any]) -> Command[Any]:
    """Reads the flags of a training run over the values of ``default``.

    Raises:
      ConfigError: an unknown flag or a value that cannot be read, in one line.
      SystemExit: with code 0, after ``--help``.
    """
    algorithm = type(default.algorithm)
    hints = {**get_type_hints(Command), **get_type_hints(algorithm)}
    del hints["algorithm"]
    switches = [name for name, hint in hints.items() if hint in (bool, bool | None)]
    check_flags(args, hints, switches)
    args = _spelled_out(args, [name for name in switches if hints[name] is not bool])
    return run_tyro(
        Command[algorithm],  # type: ignore[valid-type]
        args,
        prog=f"jaxrl-dist train {name_of(default.algorithm)}",
        description=f"{algorithm.__doc__}\n\nThe defaults shown are those of no environment: a preset for its kind may "
        "differ, and config.json names what ran.",
        default=default,
    )


def _spelled_out(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Gives the switches of these names a value, as tyro wants it for those that may be None."""
    values = {spelling: flag(name) for name in names for spelling in (flag(name), "--no-" + flag(name)[2:])}
    parts = []
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name = arg.replace("_", "-")
        known = name in values and following != "None"
        parts += [values[name], str(name == values[name])] if known else [arg]
    return parts


def resolve_flags(
    algorithm: str | type, layers: Sequence[Sequence[str]], preset: Callable[[Train[Any]], Train[Any]]
) -> Command[Any]:
    """Merges flags over the preset for the environment that they name; later layers win.

    The flags are first read over plain defaults, so that a bad one is refused before an environment is made.

    Args:
      algorithm: its name, or its config class.
      preset: gives the preset's config for a config of which ``env`` and its options count.

    Raises:
      ConfigError: a flag cannot be read or is out of range.
    """

    def merge(command: Command[Any]) -> Command[Any]:
        for layer in layers:
            command = parse_train(layer, command)
        return command

    command = merge(plain_defaults(algorithm))
    command.validate()
    return merge(Command(**vars(preset(command.train()))))


def value_of(args: Sequence[str], name: str) -> str | None:
    """The value of one flag, given as ``--flag value`` or ``--flag=value``, before the others can be read."""
    for arg, following in zip(args, [*args[1:], None], strict=False):
        if arg == name or arg.startswith(name + "="):
            return following if arg == name else arg.split("=", 1)[1]
    return None


def taken(args: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """As ``value_of``, and the arguments without that flag."""
    value = value_of(args, name)
    at = next((at for at, arg in enumerate(args) if arg.split("=", 1)[0] == name), len(args))
    return value, [*args[:at], *args[at + (2 if name in args[at : at + 1] else 1) :]]


def check_flags(args: Sequence[str], names: Collection[str], switches: Collection[str] = ()) -> None:
    """Checks that every flag exists and comes once; ``names`` are fields, those of ``switches`` have a ``--no-`` form.

    Raises:
      ConfigError: naming the first that does not, and the nearest that does.
    """
    known = {"--help": "--help", **{flag(name): flag(name) for name in names}}
    known |= {"--no-" + flag(name)[2:]: flag(name) for name in switches}
    seen: dict[str, str] = {}
    for arg in args:
        given = arg.split("=", 1)[0]
        name = given.replace("_", "-")
        if not given.startswith("--"):
            continue
        if name not in known:
            raise ConfigError(f"unknown flag {given}{did_you_mean(name, known)}; --help lists all")
        if known[name] in seen:
            earlier = seen[known[name]]
            raise ConfigError(f"{given} is given twice" if earlier == name else f"{given} contradicts {earlier}")
        seen[known[name]] = name


# --- tyro ---------------------------------------------------------------------------------------------

_registry = tyro.constructors.ConstructorRegistry()


@_registry.primitive_rule
def _key_value_pairs(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Reads ``dict[str, str]`` as ``key=value key=value``."""
    if info.type != dict[str, str]:
        return None

    def read(args: list[str]) -> dict[str, str]:
        pairs: dict[str, str] = {}
        for arg in args:
            key, equals, value = arg.partition("=")
            if not (key and equals):
                raise ValueError(f"{arg!r} is no key=value pair")
            if key in pairs:
                raise ValueError(f"{key} is given twice")
            pairs[key] = value
        return pairs

    return tyro.constructors.PrimitiveConstructorSpec[dict[str, str]](
        nargs="*",
        metavar="[KEY=VALUE ...]",
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, dict),
        str_from_instance=lambda x: [f"{key}={value}" for key, value in x.items()],
    )


def _whole(text: str) -> int:
    """A whole number, which may be written as 1e6."""
    number = float(text) if "e" in text.lower() else 0.5
    return int(number) if number.is_integer() else int(text)


@_registry.primitive_rule
def _numbers(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Reads ``int``, ``float``, either ``| None``, and tuples of them; tyro's own messages take several lines."""
    many, parts = get_origin(info.type) is tuple, set(get_args(info.type) or (info.type,)) - {...}
    optional, kinds = type(None) in parts, parts - {type(None)}
    if kinds not in ({int}, {float}):
        return None
    kind = kinds.pop()
    convert = _whole if kind is int else kind

    def read(args: list[str]) -> Any:
        values = []
        for arg in args:
            try:
                values.append(None if optional and arg == "None" else convert(arg))
            except ValueError:
                what = "whole number" if kind is int else "number"
                problem = f"neither a {what} nor None" if optional else f"no {what}"
                raise ValueError(f"{arg!r} is {problem}") from None
        return tuple(values) if many else values[0]

    name = kind.__name__.upper()
    return tyro.constructors.PrimitiveConstructorSpec[Any](
        nargs="*" if many else 1,
        metavar=f"[{name} ...]" if many else f"{name}|None" if optional else name,
        instance_from_str=read,
        is_instance=lambda x: True,
        str_from_instance=lambda x: [str(y) for y in x] if many else [str(x)],
    )


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
        raise ConfigError(_message(box.getvalue())) from None


def _message(box: str) -> str:
    """The message in one of tyro's error boxes: what stands between the title and the next rule."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[│|╭╮╰╯]", "", box)
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{4,}", plain)]
    parts = [part for part in parts if part]
    message = parts[min(1, len(parts) - 1)] if parts else "the flags cannot be read"
    return re.sub(r"^Error parsing (--\S+):", r"\1:", message)


# --- config.json --------------------------------------------------------------------------------------


def to_json(config: Train[Any]) -> dict[str, Any]:
    """A resolved config as ``config.json`` keeps it."""
    run = {name: value for name, value in vars(config).items() if name not in _NOT_KEPT}
    hyperparameters = [field.name for field in dataclasses.fields(config.algorithm)]
    return {
        "format": FORMAT,
        "algorithm": name_of(config.algorithm),
        "hyperparameters": {name: _in_json(getattr(config.algorithm, name)) for name in hyperparameters},
        "run": {**run, "env": env_name(config.env)},
    }


def _in_json(value: Any) -> Any:
    """A hyperparameter as JSON holds it; an object, by a name that nothing loads."""
    try:
        json.dumps(value)
    except TypeError:
        return f"{OBJECT}:{type(value).__name__}"
    return value


def read_config(
    path: pathlib.Path, own: type | None = None, env: str | None = None, objects: Collection[str] = ()
) -> Train[Any]:
    """Reads ``config.json``, given itself or as its run directory; arguments as those of ``config_flags``.

    Raises:
      ConfigError: it is missing, damaged, or names what this version does not know.
    """
    algorithm, args = config_flags(path, own, env, objects)
    return parse_train(args, plain_defaults(algorithm, own)).train()


def config_flags(
    path: pathlib.Path, own: type | None = None, env: str | None = None, objects: Collection[str] = ()
) -> tuple[str, list[str]]:
    """The algorithm's name and the flags that a ``config.json`` stands for; its run directory will do too.

    Args:
      own: the config class of an algorithm that is not ours.
      env: the environment that the user names, to take the place of the file's.
      objects: hyperparameters that the caller fills in by objects of the user's, so that the file's do not count.

    Raises:
      ConfigError: it is missing or damaged, says what no flag can, names a module to import, as no file may, or says
        that something was an object, as no file can hold.
    """
    if path.is_dir():
        path = path / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    with _naming(path):
        if not isinstance(content, dict):
            raise ConfigError(f"a run's config is an object, not a {type(content).__name__}")
        if content.get("format") != FORMAT:
            raise ConfigError(f"format {content.get('format')} is unknown; this version reads format {FORMAT}")
        algorithm, hyperparameters, run = (content.get(key) for key in ("algorithm", "hyperparameters", "run"))
        if not (isinstance(algorithm, str) and isinstance(hyperparameters, dict) and isinstance(run, dict)):
            raise ConfigError("algorithm, hyperparameters or run is missing")
        if env is not None:
            run = {**run, "env": env}
        hyperparameters = {name: value for name, value in hyperparameters.items() if name not in objects}
        for name, value in hyperparameters.items():
            if isinstance(value, str) and value.startswith(f"{OBJECT}:"):
                raise ConfigError(
                    f"its {name}, {value}, was an object handed over from Python, which no file can hold; hand it over "
                    f"again, as in load_policy(run_dir, {name}=...), or have an algorithm file of yours name it"
                )
        known_run = [field.name for field in dataclasses.fields(Train) if field.name not in _NOT_KEPT]
        known_own = [field.name for field in dataclasses.fields(config_class(algorithm, own))]
        args = [*_as_flags(run, known_run), *_as_flags(hyperparameters, known_own)]
        named = parse_train(args, plain_defaults(algorithm, own)).env
        module = None if env is not None else split_env(named)[1]
        if module == OBJECT:
            raise ConfigError(
                f"its environment, {named}, was an object handed over from Python, which no file can hold; name one "
                "yourself, by --env or in Python as env="
            )
        if module is not None:
            raise ConfigError(f"no file may choose code to run; name its environment yourself, by --env {named}")
        return algorithm, args


def _as_flags(values: dict[str, Any], known: Collection[str]) -> list[str]:
    """The flags that set fields to these JSON values."""
    args: list[str] = []
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"unknown field {name!r}{did_you_mean(name, known)}")
        for text in value if isinstance(value, dict | list) else [value]:
            if isinstance(text, str) and re.match("-+[A-Za-z]", text):  # it would be read as a flag of its own
                raise ConfigError(f"{name} cannot be {text!r}")
        if isinstance(value, bool):
            args.append(flag(name) if value else "--no-" + flag(name)[2:])
        elif isinstance(value, dict):
            args += [flag(name), *(f"{key}={x}" for key, x in value.items())]
        elif isinstance(value, list):
            args += [flag(name), *map(str, value)]
        else:
            args += [flag(name), str(value)]
    return args


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Puts the file's name before what is wrong with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
