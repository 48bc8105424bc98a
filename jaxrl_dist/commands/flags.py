"""Parses the flags of the command line."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, get_origin, get_type_hints

from jaxrl_dist import algorithms
from jaxrl_dist.algorithms import config_class
from jaxrl_dist.checks import flag, shown
from jaxrl_dist.commands import help
from jaxrl_dist.config import synonyms
from jaxrl_dist.config.train import RUN_DEFAULTS, Config, Train
from jaxrl_dist.config.values import alternatives, check_declared, from_texts, setting
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.settings.policies import Policies

HELP = ("-h", "--help", "--help-all")
_LIKE_A_FLAG = re.compile("--|-(?!inf|nan)[a-z]", re.IGNORECASE)
"""How a flag begins; a negative number is a value."""
_MANY = sys.maxsize
_SEEDS = "; --seeds 3 runs three seeds, and --seed 7 the one of that number"


@dataclasses.dataclass(frozen=True)
class Command(Train[Config]):
    """``Train`` with the flags that only the command line has."""

    env: str = ""
    """Environment such as CartPole-v1, gymnax:CartPole-v1, envpool:Pong-v5, gymnasium:Ant-v5;
    without a prefix, gymnax is tried first. Or one of a further library, such as brax:ant. Or a
    Python function that makes a gymnasium.Env or a gymnax-style one, such as my_module:make."""
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
    """Print nothing but errors, and warnings of what has failed, such as a damaged file."""
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
    hints = {
        **_types(Command),
        **({} if algorithm is Policies else _types(config_class(algorithm))),
    }
    del hints["algorithm"]
    return read(
        args, hints, algorithm if isinstance(algorithm, str) else algorithms.name_of(algorithm)
    )


def parse(target: Any, args: Sequence[str], prog: str) -> Any:
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


def split(target: Any, args: Sequence[str], prog: str) -> tuple[Any, list[str]]:
    """As ``parse``, for a command that also takes those of ``train``,
    which are returned as they are.
    """
    known = _known(_types(target))
    left = 0
    command_args = list[str]()
    others = list[str]()
    for arg in args:
        if _LIKE_A_FLAG.match(arg):
            name, equals, _ = arg.replace("_", "-").partition("=")
            if name not in known:
                left = 0
            else:
                left = 1 if equals else 1 + known[name].most
        if left > 0:
            command_args.append(arg.removesuffix("="))  # which is no value
        else:
            others.append(arg)
        left -= 1
    return parse(target, ["--help"] if wants_help(args) else command_args, prog), others


def _types(kind: Any) -> dict[str, Any]:
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
        if arg == name or arg.startswith(name + "="):
            if arg == name:
                return following
            return arg.split("=", 1)[1]
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
    without: list[str] | None
    """What it says without a value; None: it needs one."""
    again: bool = False
    """Whether it may be repeated, with further values."""

    def texts(self, token: str, values: list[str]) -> list[str]:
        """Returns what it says with the values behind it,
        of which it leaves those that are too many.
        """
        if not values and self.without is None:
            raise ConfigError(f"{token} needs a value")
        return values[: self.most] or self.without or []


def read(
    args: Sequence[str], hints: Mapping[str, Any], algorithm: str | None = None
) -> dict[str, Any]:
    """Reads arguments, and returns the given values by field, in the order of ``hints``.

    Args:
      hints: the type of each field, in which ``help.Argument``
        and ``help.Alias`` say how else it is given.
      algorithm: the name of the algorithm whose flags are read, if it is one's.

    Raises:
      ConfigError: a flag is unknown, repeated, or has too few or too many values,
        or a value cannot be read.
    """
    known = _known(hints)
    texts: dict[str, list[str]] = {}
    typed: dict[str, str] = {}
    loose: list[tuple[str, str, int]] = []
    for token, values in _groups(args, known):
        spelling, definition = _flag_of(token, known, algorithm)
        earlier = typed.setdefault(definition.field, spelling)
        if definition.field in texts and not definition.again:
            raise ConfigError(
                f"{token} is given twice"
                if earlier == spelling
                else f"{token} contradicts {earlier}"
            )
        texts.setdefault(definition.field, []).extend(definition.texts(token, values))
        loose += [(value, token, definition.most) for value in values[definition.most :]]
    texts |= _by_place(loose, known)
    return {name: _value(name, texts[name], hint) for name, hint in hints.items() if name in texts}


def _known(hints: Mapping[str, Any]) -> dict[str, _Flag]:
    """Returns all flags by spelling, and arguments by their names in help."""
    known: dict[str, _Flag] = {}
    for name, hint in hints.items():
        (kind, *_), optional = alternatives(hint)
        switch = help.is_switch(hint)
        many = get_origin(kind) in (tuple, dict)
        if many:
            most = _MANY
        else:
            most = 1 if optional or not switch else 0
        without: list[str] | None = None
        if switch:
            without = ["True"]
        elif many:
            without = []
        for spelling in help.spellings_of(name, hint):
            known[spelling] = _Flag(
                name, most, without, again=get_origin(kind) is dict or help.repeats(hint)
            )
        if switch:
            known["--no-" + flag(name)[2:]] = _Flag(name, 0, ["False"])
    return known


def _groups(args: Sequence[str], known: Collection[str]) -> Iterator[tuple[str, list[str]]]:
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
        if arg[:2] in known:  # -o FILE, -oFILE and -o=FILE
            token = arg[:2]
            if arg[2:]:
                values = [arg[2:].removeprefix("=")]
            else:
                values = []
        else:
            token, equals, value = arg.partition("=")
            values = [value] if equals else []
    yield token, values


def _flag_of(token: str, known: Mapping[str, _Flag], algorithm: str | None) -> tuple[str, _Flag]:
    """Returns a flag's spelling and what it gives; the empty flag gives nothing.

    Raises:
      ConfigError: it is unknown; the message names the nearest known one.
    """
    if token.startswith("--"):
        spelling = token.replace("_", "-")
    else:
        spelling = token
    if spelling in known or not spelling:
        return spelling, known.get(spelling, _Flag("", 0, []))
    if not token.startswith("--"):
        raise ConfigError(
            f"{shown(token)} is neither a flag nor the value of one; --help lists all"
        )
    names = [
        known_flag[2:].replace("-", "_")
        for known_flag in ("--help", *known)
        if known_flag.startswith("--")
    ]
    others = algorithms.having if algorithm else lambda field: ""
    instead = synonyms.hint(spelling[2:], names, others) or "; --help lists all"
    of_others = others(spelling[2:].removeprefix("no-").replace("-", "_"))
    raise ConfigError(
        f"{f'{token} is not a flag of {algorithm}' if of_others else f'unknown flag {token}'}{instead}"
    )


def _by_place(
    loose: Sequence[tuple[str, str, int]], known: Mapping[str, _Flag]
) -> dict[str, list[str]]:
    """Returns the texts of the arguments that have no flag, given each text,
    the flag before it and what that takes.

    Raises:
      ConfigError: there are too many.
    """
    texts = {}
    for spelling, (field, most, *_) in known.items():
        if loose and not spelling.startswith("-"):
            texts[field] = [value for value, *_ in loose[:most]]
            loose = loose[most:]
    if not loose:
        return texts
    value, token, most = loose[0]
    if not token:
        raise ConfigError(
            f"{shown(value)} is neither a flag nor the value of one; --help lists all"
        )
    if most or token.startswith("--no-"):
        more = ""
    else:
        more = f"; --no-{token[2:]} turns it off"
    if token == "--seed" and "--seeds" in known:
        more = _SEEDS
    raise ConfigError(
        f"{token} takes {'one' if most else 'no'} value, so {shown(value)} is too much{more}"
    )


def _value(name: str, texts: Sequence[str], hint: Any) -> Any:
    try:
        return from_texts(name, texts, hint)
    except ConfigError as error:
        more = _SEEDS if name == "seeds" else ""
        raise ConfigError(error.with_flags + more) from None
