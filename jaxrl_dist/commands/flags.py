"""Parses the flags of the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Collection, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import tyro

from jaxrl_dist import algorithms
from jaxrl_dist.algorithms import config_class
from jaxrl_dist.checks import did_you_mean, flag, shown
from jaxrl_dist.commands import help
from jaxrl_dist.config import RUN_DEFAULTS, Config, Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.synonyms import hint
from jaxrl_dist.training.policies import Policies

HELP = ("-h", "--help", "--help-all")


@dataclasses.dataclass(frozen=True)
class Command(Train[Config]):
    """``Train`` with the flags that only the command line has."""

    env: str = ""
    """Environment such as CartPole-v1, gymnax:CartPole-v1, envpool:Pong-v5, gymnasium:Ant-v5; without a prefix, gymnax
    is tried first. Or one of a further library, such as brax:ant. Or a Python function that makes a gymnasium.Env or a
    gymnax-style one, such as my_module:make."""
    config: str | None = None
    """A run's config.json or directory: train with its config; other flags override it."""
    resume_or_start: bool = False
    """Resume the run in --run-dir if it has saved a checkpoint, else start it; a supervisor can repeat the command."""
    placement: str | None = None
    """One word for the flags that say where acting and learning run, such as anakin, sebulba:1+3, seed, replicas:4,
    server:4 or apex:4; see jaxrl-dist list placements. Explicit flags override it."""
    plan_memory: str | None = None
    """Print the memory that the run needs, and do not train. The value is a device: here, h200, v5e:2x4 ..., as for
    jaxrl-dist doctor --compile-for."""
    quiet: bool = False
    """Print nothing but errors."""
    verbose: bool = False
    """Print every report, with all its metrics."""


@dataclasses.dataclass(frozen=True)
class _NoHyperparameters:
    """Replaces the algorithm's flags in a run with several policies, which share no hyperparameters."""


def plain_defaults(algorithm: str | type) -> Command[Any]:
    """Returns the defaults that apply if neither a preset nor the user sets a value.

    Raises:
      ConfigError: there is no such algorithm.
    """
    return Command(config_class(algorithm)(), **RUN_DEFAULTS)


def parse_train(algorithm: str | type, args: Sequence[str]) -> dict[str, Any]:
    """Parses the flags of a training run, and returns the given values by field name.

    Args:
      algorithm: name or config class.

    Raises:
      ConfigError: the algorithm or a flag is unknown, or a value cannot be read; the message is one line.
    """
    default = plain_defaults(_NoHyperparameters if algorithm is Policies else algorithm)
    kind = type(default.algorithm)
    hints = {**get_type_hints(Command), **get_type_hints(kind)}
    del hints["algorithm"]
    switches = [name for name, hint in hints.items() if hint in (bool, bool | None)]
    args = _merged(args, [name for name, hint in hints.items() if hint == dict[str, str]])
    given = check_flags(args, hints, switches, algorithm if isinstance(algorithm, str) else algorithms.name_of(kind))
    args = _spelled_out(args, [name for name in switches if hints[name] is not bool])
    command = run_tyro(Command[kind], args, default=default)  # type: ignore[valid-type]
    values = {**vars(command), **vars(command.algorithm)}
    return {name: values[name] for name in given}


def _merged(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Moves the values of a flag of these names that is given again behind those of the first time."""
    repeatable, first = {flag(name) for name in names}, dict[str, list[str]]()
    parts: list[list[str]] = [[]]
    into = parts[0]
    for arg in args:
        spelling, equals, value = arg.partition("=")
        name = spelling.replace("_", "-")
        if name in first:
            into = first[name]
            into += [value] if equals else []
            continue
        if arg.startswith("--"):
            into = []
            parts.append(into)
            first |= {name: into} if name in repeatable else {}
        into.append(arg)
    return [arg for part in parts for arg in part]


def _spelled_out(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Adds a value to the switches of these names: tyro needs one for switches that may be None."""
    values = {spelling: flag(name) for name in names for spelling in (flag(name), "--no-" + flag(name)[2:])}
    parts = []
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name = arg.replace("_", "-")
        known = name in values and following != "None"
        parts += [values[name], str(name == values[name])] if known else [arg]
    return parts


def value_of(args: Sequence[str], name: str) -> str | None:
    """Returns the value of one flag, ``--flag value`` or ``--flag=value``, before the others can be parsed."""
    for arg, following in zip(args, [*args[1:], None], strict=False):
        if arg == name or arg.startswith(name + "="):
            return following if arg == name else arg.split("=", 1)[1]
    return None


def taken(args: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Returns the flag's value as ``value_of``, and the arguments without that flag.

    Raises:
      ConfigError: the flag has no value.
    """
    value = value_of(args, name)
    at = next((at for at, arg in enumerate(args) if arg.split("=", 1)[0] == name), len(args))
    if at < len(args) and (not value or value.startswith("--")):
        raise ConfigError(f"{name} needs a value")
    return value, [*args[:at], *args[at + (2 if name in args[at : at + 1] else 1) :]]


def check_flags(
    args: Sequence[str],
    names: Collection[str],
    switches: Collection[str] = (),
    algorithm: str | None = None,
) -> list[str]:
    """Checks that every flag exists and is given once, and returns the names of the given fields.

    Args:
      names: all fields.
      switches: names of the fields that also have a ``--no-`` form.
      algorithm: the name of the algorithm whose flags are checked, if it is one's.

    Raises:
      ConfigError: a flag is unknown or repeated; the message names the first such flag and the nearest known one.
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
            others = algorithms.having if algorithm else lambda field: ""
            instead = hint(name[2:], [each[2:].replace("-", "_") for each in known], others) or "; --help lists all"
            of_others = others(name[2:].removeprefix("no-").replace("-", "_"))
            unknown = f"{given} is not a flag of {algorithm}" if of_others else f"unknown flag {given}"
            raise ConfigError(f"{unknown}{instead}")
        if known[name] in seen:
            earlier = seen[known[name]]
            raise ConfigError(f"{given} is given twice" if earlier == name else f"{given} contradicts {earlier}")
        seen[known[name]] = name
    return [name for name in names if flag(name) in seen]


# --- tyro ---------------------------------------------------------------------------------------------

_registry = tyro.constructors.ConstructorRegistry()
NO_NUMBER = "none", "auto"
"""Values of an optional number that leave it to the run, in any case; other libraries have ``auto``."""


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
    """Parses a whole number, which may be written as 1e6."""
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
        for arg in [part for given in args for part in given.split(",")] if many else args:
            try:
                values.append(None if optional and arg.lower() in NO_NUMBER else convert(arg))
            except ValueError:
                what = "whole number" if kind is int else "number"
                problem = f"neither a {what} nor None" if optional else f"no {what}"
                raise ValueError(f"{shown(arg)} is {problem}") from None
        return tuple(values) if many else values[0]

    name = kind.__name__.upper()
    return tyro.constructors.PrimitiveConstructorSpec[Any](
        nargs="*" if many else 1,
        metavar=f"[{name} ...]" if many else f"{name}|None" if optional else name,
        instance_from_str=read,
        is_instance=lambda x: True,
        str_from_instance=lambda x: [str(y) for y in x] if many else [str(x)],
    )


def parse(target: Any, args: Sequence[str], prog: str) -> Any:
    """Parses the flags of a command other than ``train`` into the dataclass ``target``, or prints their help.

    Raises:
      ConfigError: an argument is rejected.
      SystemExit: with code 0, after ``--help``.
    """
    if wants_help(args):
        print(help.page(target, prog), end="")
        raise SystemExit(0)
    hints = get_type_hints(target, include_extras=True)
    check_flags(args, [name for name, hint in hints.items() if help.spellings_of(name, hint)[0].startswith("--")])
    return run_tyro(target, args)


def wants_help(args: Sequence[str]) -> bool:
    """Returns whether the arguments ask for help."""
    return any(arg in HELP for arg in args)


def run_tyro(target: Any, args: Sequence[str], **options: Any) -> Any:
    """Parses with tyro, and turns its boxed error into one line.

    Raises:
      ConfigError: tyro rejects the arguments.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(target, args=list(args), config=(tyro.conf.OmitArgPrefixes,), registry=_registry, **options)
    except SystemExit:
        raise ConfigError(_reworded(_message(box.getvalue()), args)) from None


def _message(box: str) -> str:
    """Returns the message of a tyro error box: the text between the title and the next rule."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[│|╭╮╰╯]", "", box)
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{4,}", plain)]
    parts = [part for part in parts if part]
    message = parts[min(1, len(parts) - 1)] if parts else "the flags cannot be read"
    return re.sub(r"^Error parsing (--\S+):", r"\1:", message)


def _reworded(message: str, args: Sequence[str]) -> str:
    """Returns tyro's message in the words that this package uses for the same mistakes elsewhere."""
    if found := re.match(r"Missing value for argument '(--\S+)'", message):
        return f"{found[1]} needs a value"
    if found := re.match(r"invalid choice (.+) for argument '(--\S+)'\. Expected one of \((.*?),?\)", message):
        choices = [choice.strip(" '") for choice in found[3].split(",")]
        if "None" in choices:  # tyro orders these by their hashes, which differ between processes
            choices = [*sorted({*choices} - {"None"}), "None"]
        given = found[1].strip("'")
        return f"{found[2]} must be one of {', '.join(choices)}, not {found[1]}{did_you_mean(given, choices)}"
    if message.startswith("--seeds: "):
        return f"{message}; --seeds 3 runs three seeds, and --seed 7 the one of that number"
    if not message.startswith("Unrecognized options:"):
        return message
    extra = message.removeprefix("Unrecognized options:").split(", ")[0].strip()
    parts = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    before = parts[: len(parts) - 1 - parts[::-1].index(extra)] if extra in parts else []
    flags = [at for at, arg in enumerate(before) if arg.startswith("--")]
    if not flags or extra.startswith("-"):
        return f"{shown(extra)} is neither a flag nor the value of one; --help lists all"
    name, number = before[flags[-1]], len(before) - 1 - flags[-1]
    takes = "takes one value" if number else "takes no value"
    off = "" if number or name.startswith("--no-") else f"; --no-{name[2:]} turns it off"
    return f"{name} {takes}, so {shown(extra)} is too much{off}"
