"""Parses the flags of the command line."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, get_origin, get_type_hints

from jaxrl_dist import algorithms
from jaxrl_dist.algorithms import config_class
from jaxrl_dist.checks import flag, shown
from jaxrl_dist.commands import help
from jaxrl_dist.commands.help import Hint
from jaxrl_dist.config import synonyms
from jaxrl_dist.config.train import RUN_DEFAULTS, Config, Train
from jaxrl_dist.config.values import alternatives, check_declared, from_texts, setting
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.settings.policies import Policies

Options = TypeVar("Options")
"""The dataclass of a command's flags."""
HELP = ("-h", "--help", "--help-all")
_LIKE_A_FLAG = re.compile("--|-(?!inf|nan)[a-z]", re.IGNORECASE)
"""How a flag begins; a negative number is a value."""
_MANY = sys.maxsize
_SEEDS = "; --seeds 3 runs three seeds, --seed 7 runs seed 7"


@dataclasses.dataclass(frozen=True)
class Command(Train[Config]):
    """``Train`` with the flags that only the command line has."""

    env: str = ""
    """Environment such as CartPole-v1, gymnax:CartPole-v1, envpool:Pong-v5 or gymnasium:Ant-v5;
    without a prefix, gymnax is tried first. Also one of another library, such as brax:ant, or a
    function that makes a gymnasium.Env or a gymnax-style one, such as my_module:make."""
    config: str | None = setting(None, group="common")
    """A run's config.json or directory: train with its config; other flags override it."""
    resume_or_start: bool = False
    """Resume the run in --run-dir if it has saved a checkpoint, else start it;
    a supervisor can repeat the command."""
    placement: str | None = setting(None, group="execution")
    """One word for the flags that say where acting and learning run, such as anakin, sebulba:1+3,
    seed, replicas:4, server:4 or apex:4; see jaxrl-dist list placements. Explicit flags override
    it."""
    plan_memory: str | None = None
    """Print the memory that the run needs, and do not train. The value is a device: here, h200,
    v5e:2x4 ..., as for jaxrl-dist doctor --compile-for."""
    quiet: bool = False
    """Print only errors, and warnings about failures such as a damaged file."""
    verbose: bool = False
    """Print every report, with all its metrics."""


def plain_defaults(algorithm: str | type) -> Command[Any]:
    """Returns the defaults that apply if neither a preset nor the user sets a value.

    Raises:
      ConfigError: there is no such algorithm.
    """
    return Command(config_class(algorithm)(), **RUN_DEFAULTS)


def parse_train(algorithm: str | type, args: Sequence[str]) -> dict[str, Any]:
    """Parses the flags of a training run, and returns the given values by field name.

    Args:
      algorithm: name or config class; ``Policies`` has no flags of its own.

    Raises:
      ConfigError: the algorithm or a flag is unknown, or a value cannot be read;
        the message is one line.
    """
    hints = _types(Command)
    if algorithm is not Policies:
        hints |= _types(config_class(algorithm))
    del hints["algorithm"]
    return read(
        args, hints, algorithm if isinstance(algorithm, str) else algorithms.name_of(algorithm)
    )


def parse(target: type[Options], args: Sequence[str], prog: str) -> Options:
    """Parses the flags of a command other than ``train`` into the dataclass ``target``,
    or prints their help.

    Raises:
      ConfigError: an argument is rejected.
      SystemExit: with code 0, after ``--help``.
    """
    if wants_help(args):
        show(help.page(target, prog))
    options = target(**read(args, _types(target)))
    check_declared(options)
    return options


def split(target: type[Options], args: Sequence[str], prog: str) -> tuple[Options, list[str]]:
    """As ``parse``; also returns the flags of ``train``, which are not parsed."""
    declared = _declared(_types(target))
    own = list[str]()
    others = list[str]()
    left = 0
    """How many of the next arguments belong to the command."""
    for arg in args:
        if _LIKE_A_FLAG.match(arg):
            name, equals, _ = arg.replace("_", "-").partition("=")
            if name not in declared:
                left = 0
            elif equals:
                left = 1
            else:
                left = 1 + declared[name].most
        if left > 0:
            own.append(arg.removesuffix("="))  # "=" alone gives no value
        else:
            others.append(arg)
        left -= 1
    return parse(target, ["--help"] if wants_help(args) else own, prog), others


def _types(kind: type) -> dict[str, Hint]:
    """Returns the type of each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def show(page: str) -> NoReturn:
    """Prints a page of help, and ends the command by ``SystemExit(0)``."""
    print(visible(page), end="")
    raise SystemExit(0)


def wants_help(args: Sequence[str]) -> bool:
    """Returns whether the arguments ask for help."""
    return any(arg in HELP for arg in args)


def value_of(args: Sequence[str], name: str) -> str | None:
    """Returns the value of one flag, ``--flag value`` or ``--flag=value``,
    before the others can be parsed.
    """
    for arg, following in zip(args, [*args[1:], None], strict=False):
        if arg == name:
            return following
        if arg.startswith(f"{name}="):
            return arg.removeprefix(f"{name}=")
    return None


def written(name: str, value: Any) -> list[str]:
    """Returns a field's value as arguments of the command line."""
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{flag(name)[2:]}"]
    if isinstance(value, dict):
        return [flag(name), *(f"{key}={text}" for key, text in value.items())]
    return [flag(name), *map(str, value if isinstance(value, tuple) else [value])]


# --- reading --------------------------------------------------------------------------------------


class _Flag(NamedTuple):
    """What a flag, or an argument without one, gives."""

    field: str
    most: int
    """Maximum number of values."""
    bare: list[str] | None
    """What it says without a value; None: it needs one."""
    repeats: bool = False
    """Whether it may be repeated, with further values."""

    def texts(self, token: str, values: list[str]) -> list[str]:
        """Returns what it says with the values behind it, except those that are too many."""
        if not values and self.bare is None:
            raise ConfigError(f"{token} needs a value")
        return values[: self.most] or self.bare or []


def read(
    args: Sequence[str], hints: Mapping[str, Hint], algorithm: str | None = None
) -> dict[str, Any]:
    """Reads arguments, and returns the given values by field, in the order of ``hints``.

    Args:
      hints: the type of each field, in which ``help.Argument``
        and ``help.Alias`` say how else it is given.
      algorithm: the name of the algorithm that has the flags; None: a command has them.

    Raises:
      ConfigError: a flag is unknown, repeated, or has too few or too many values,
        or a value cannot be read.
    """
    declared = _declared(hints)
    texts: dict[str, list[str]] = {}
    typed: dict[str, str] = {}
    loose: list[_Loose] = []
    for token, values in _groups(args, declared):
        spelling, definition = _flag_of(token, declared, algorithm)
        field = definition.field
        earlier = typed.setdefault(field, spelling)
        if field in texts and not definition.repeats:
            if earlier == spelling:
                raise ConfigError(f"{token} is given twice")
            raise ConfigError(f"{token} contradicts {earlier}")
        texts.setdefault(field, []).extend(definition.texts(token, values))
        loose += [_Loose(value, token, definition.most) for value in values[definition.most :]]
    texts |= _by_place(loose, declared)
    return {name: _value(name, texts[name], hint) for name, hint in hints.items() if name in texts}


def _declared(hints: Mapping[str, Hint]) -> dict[str, _Flag]:
    """Returns all flags by spelling, and arguments by their names in help."""
    declared: dict[str, _Flag] = {}
    for name, hint in hints.items():
        (kind, *_), optional = alternatives(hint)
        if help.is_switch(hint):
            definition = _Flag(name, 1 if optional else 0, ["True"])
            declared["--no-" + flag(name)[2:]] = _Flag(name, 0, ["False"])
        elif get_origin(kind) in (tuple, dict):
            repeats = get_origin(kind) is dict or help.repeats(hint)
            definition = _Flag(name, _MANY, [], repeats=repeats)
        else:
            definition = _Flag(name, 1, None)
        for spelling in help.spellings_of(name, hint):
            declared[spelling] = definition
    return declared


def _groups(args: Sequence[str], declared: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each flag as typed and the values behind it; before them, with an empty flag,
    those before all flags.
    """
    token = ""
    values = list[str]()
    for arg in args:
        if not _LIKE_A_FLAG.match(arg):
            values.append(arg)
            continue
        yield token, values
        values = []
        if arg[:2] in declared:  # -o FILE, -oFILE and -o=FILE
            token = arg[:2]
            if arg[2:]:
                values.append(arg[2:].removeprefix("="))
        else:
            token, equals, value = arg.partition("=")
            if equals:
                values.append(value)
    yield token, values


def _flag_of(token: str, declared: Mapping[str, _Flag], algorithm: str | None) -> tuple[str, _Flag]:
    """Returns a flag's spelling and what it gives; the empty flag gives nothing.

    Raises:
      ConfigError: it is unknown; the message names the nearest known one.
    """
    spelling = token.replace("_", "-") if token.startswith("--") else token
    if spelling in declared or not spelling:
        return spelling, declared.get(spelling, _Flag("", 0, []))
    if not token.startswith("--"):
        raise _neither(token)
    names = [name[2:].replace("-", "_") for name in declared if name.startswith("--")]
    others = algorithms.having if algorithm else lambda field: ""
    instead = synonyms.hint(spelling[2:], ["help", *names], others) or "; --help lists the flags"
    if others(spelling[2:].removeprefix("no-").replace("-", "_")):
        raise ConfigError(f"{token} is not a flag of {algorithm}{instead}")
    raise ConfigError(f"unknown flag {token}{instead}")


class _Loose(NamedTuple):
    """A value that no flag takes."""

    value: str
    flag: str
    """The flag before it; empty: none."""
    most: int
    """Maximum number of values of that flag."""


def _by_place(loose: Sequence[_Loose], declared: Mapping[str, _Flag]) -> dict[str, list[str]]:
    """Returns the texts of the arguments that have no flag.

    Raises:
      ConfigError: there are too many.
    """
    texts = {}
    for spelling, (field, most, *_) in declared.items():
        if loose and not spelling.startswith("-"):
            texts[field] = [one.value for one in loose[:most]]
            loose = loose[most:]
    if not loose:
        return texts
    value, token, most = loose[0]
    if not token:
        raise _neither(value)
    if token == "--seed" and "--seeds" in declared:
        raise ConfigError(f"--seed takes one value; remove {shown(value)}{_SEEDS}")
    if most:
        raise ConfigError(f"{token} takes one value; remove {shown(value)}")
    if token.startswith("--no-"):
        raise ConfigError(f"{token} takes no value; remove {shown(value)}")
    raise ConfigError(
        f"{token} takes no value; remove {shown(value)}; --no-{token[2:]} turns it off"
    )


def _neither(argument: str) -> ConfigError:
    return ConfigError(
        f"unexpected {shown(argument)}: it is not a flag or a flag's value; --help lists the flags"
    )


def _value(name: str, texts: Sequence[str], hint: Hint) -> Any:
    try:
        return from_texts(name, texts, hint)
    except ConfigError as error:
        more = _SEEDS if name == "seeds" else ""
        raise ConfigError(error.with_flags + more) from None
