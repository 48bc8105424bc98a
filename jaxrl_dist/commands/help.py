"""Help pages: the settings in groups, with their meanings and the values that a run would use.

Imports nothing heavy, so that ``--help`` is fast.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxrl_dist.checks import flag
from jaxrl_dist.config.train import GROUPS, RUN_DEFAULTS
from jaxrl_dist.config.values import alternatives, marks_of

Hint = Any
"""The type of a field, with what ``Annotated`` adds to it."""
COMMON = ("learning_rate", "discount", "hidden_sizes")
"""The hyperparameters that most users set first."""
_FIRST, *_OTHERS = (group.__name__.lower() for group in GROUPS)
ORDER = (_FIRST, "algorithm", "network", "optimizer", "memory", *_OTHERS)
"""The groups of settings, in the order in which help shows them."""
SHORT = ("common", "algorithm")
"""The groups that ``--help`` shows; ``--help-all`` shows all."""
_COLUMN = 28
"""Column at which the meaning of a flag begins."""
_WIDEST = 110
"""Maximum width of a page, in characters."""


class Argument(str):
    """Annotates a field that is given by its place, not by a flag: the name that help shows."""


class Alias(str):
    """Annotates a field that has a second flag, such as ``-o``."""


class Values(str):
    """Annotates a field whose flag may be repeated: the name that help shows for its values."""


def docstrings(kind: type) -> dict[str, str]:
    """Returns the docstrings of the fields of a dataclass or a ``NamedTuple``, by field;
    inherited fields are left out.
    """
    if not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@functools.cache
def inherited_docstrings(kind: type) -> dict[str, str]:
    """Returns the docstrings of all fields of a dataclass, by field."""
    return {
        name: text for base in reversed(kind.__mro__) for name, text in docstrings(base).items()
    }


def defaults_of(kind: type) -> dict[str, Any]:
    """Returns the default of each field; for fields that presets fill in,
    the default without a preset.
    """
    defaults = {}
    for field in dataclasses.fields(kind):
        default = field.default
        if callable(field.default_factory):
            default = field.default_factory()
        defaults[field.name] = RUN_DEFAULTS.get(field.name) if default is None else default
    return defaults


def choices_of(hint: Hint) -> list[str]:
    """Returns the choices of a ``Literal`` or of ``Literal | None``; empty for other types."""
    return [
        str(x)
        for part in (hint, *get_args(hint))
        if get_origin(part) is Literal
        for x in get_args(part)
    ]


def is_switch(hint: Hint) -> bool:
    """Returns whether a field of this type is given by ``--field`` and ``--no-field``."""
    return alternatives(hint)[0] == [bool]


def repeats(hint: Hint) -> bool:
    """Returns whether the flag of a field may be repeated, with further values."""
    return any(isinstance(extra, Values) for extra in getattr(hint, "__metadata__", ()))


def spellings_of(name: str, hint: Hint) -> list[str]:
    """Returns how a field is written on the command line: as its flag and aliases,
    or as a positional argument.
    """
    extras = getattr(hint, "__metadata__", ())
    places = [str(extra) for extra in extras if isinstance(extra, Argument)]
    return places or [flag(name), *(str(extra) for extra in extras if isinstance(extra, Alias))]


def spelled(value: Any) -> str:
    """Formats a value as it would be typed."""
    match value:
        case None | "" | () | {}:
            return "none"
        case bool():
            return "on" if value else "off"
        case int():
            return f"{value:_}" if value >= 10_000 else str(value)
        case dict():
            return " ".join(f"{key}={x}" for key, x in value.items())
        case tuple():
            return " ".join(map(str, value))
    return str(value)


def group_of(name: str, kind: type, command: type) -> str:
    """Returns the group of a field of the hyperparameters ``kind``, or else of the command line."""
    if name in COMMON:
        return "common"
    if (first := _declaring(name, kind)) is not None:
        groups = {"nn.config": "network", "nn.optimizers": "optimizer", "memory.config": "memory"}
        return groups.get(first.__module__.removeprefix("jaxrl_dist."), "algorithm")
    (field,) = (field for field in dataclasses.fields(command) if field.name == name)
    first = _declaring(name, command)
    return marks_of(field).group or (first.__name__.lower() if first in GROUPS else "run")


def _declaring(name: str, kind: type) -> type | None:
    """Returns the first class that declares a field."""
    return next(
        (base for base in reversed(kind.__mro__) if name in vars(base).get("__annotations__", {})),
        None,
    )


def page(kind: type, prog: str) -> str:
    """Returns the help of a command whose flags are the fields of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    texts = inherited_docstrings(kind)
    values = defaults_of(kind)
    names = [spellings_of(field, hints[field])[0] for field in values]
    positional = [name for name in names if not name.startswith("-")]
    lines = [
        f"usage: {' '.join([prog, *positional, '[FLAGS]'])}",
        "",
        *_wrapped(str(kind.__doc__), 0),
        "",
    ]
    for name, value in values.items():
        lines += _entry(name, hints[name], texts.get(name, ""), value)
    return "\n".join(lines) + "\n"


def train_page(
    command: type,
    kind: type,
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    prog: str,
    about: str,
    *,
    everything: bool,
) -> str:
    """Returns the help of ``train`` for an algorithm, in groups.

    Args:
      command: the dataclass of the command line's flags.
      kind: the dataclass of the hyperparameters.
      values: the values of all fields that the run would use.
      sources: where those come from that are not defaults; see ``resolve.resolved_with_sources``.
      about: explains where the values come from.
      everything: shows all groups, not only ``SHORT``.
    """
    hints = {
        **get_type_hints(command, include_extras=True),
        **get_type_hints(kind, include_extras=True),
    }
    texts = {**inherited_docstrings(command), **inherited_docstrings(kind)}
    groups = _grouped(values, kind, command)
    lines = [
        f"usage: {prog} --env ENV [FLAGS]",
        "",
        *_wrapped(f"{inspect.cleandoc(str(kind.__doc__))}\n\n{about}", 0),
    ]
    shown = [group for group in groups if everything or group in SHORT]
    for group in shown:
        lines += ["", f"{group}:"]
        for name in groups[group]:
            lines += _entry(
                name, hints[name], texts.get(name, ""), values[name], sources.get(name, "default")
            )
    if not everything:
        rest = ", ".join(
            f"{group} ({len(names)})" for group, names in groups.items() if group not in shown
        )
        lines += ["", *_wrapped(f"More flags, with --help-all: {rest}.", 0)]
    return "\n".join(lines) + "\n"


def _grouped(names: Iterable[str], kind: type, command: type) -> dict[str, list[str]]:
    """Returns the fields of each group that has some, in the order of ``ORDER``."""
    groups: dict[str, list[str]] = {group: [] for group in ORDER}
    for name in names:
        groups[group_of(name, kind, command)].append(name)
    groups["common"].sort(key=lambda name: COMMON.index(name) if name in COMMON else -1)
    return {group: names for group, names in groups.items() if names}


def _entry(field: str, hint: Hint, text: str, value: Any, source: str = "default") -> Iterator[str]:
    """Yields the lines of one setting: how it is written, what it means,
    its value and where that comes from.
    """
    name, *aliases = spellings_of(field, hint)
    head = ", ".join([name, *aliases])
    if is_switch(hint):
        head = head.replace("--", "--[no-]", 1)
    head = f"  {head}"
    if name.startswith("--"):
        head += _metavar(hint)
        where = "" if source == "default" else f"; {source}"
        text += f" ({spelled(value)}{where})"
    body = _wrapped(text, _COLUMN)
    if len(head) + 2 > _COLUMN:
        yield head
    else:
        body[0] = head + body[0][len(head) :]
    yield from body


def _metavar(hint: Hint) -> str:
    """Returns the placeholder of a flag's value."""
    (kind, *others), _ = alternatives(hint)
    if is_switch(hint):
        return ""
    if repeats(hint):
        return f" {hint.__metadata__[0]} ..."
    if get_origin(kind) is dict:
        return " KEY=VALUE ..."
    many = ""
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        many = " ..."
    if others:
        return f" TEXT{many}"
    if choices := choices_of(kind):
        return f" {{{','.join(choices)}}}{many}"
    words: dict[object, str] = {int: "N", float: "X"}
    return f" {words.get(kind, 'TEXT')}{many}"


def _wrapped(text: str, indent: int) -> list[str]:
    """Wraps paragraphs to the width of the terminal, and returns the lines."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, _WIDEST), indent + 40)
    margin = " " * indent
    wrapper = textwrap.TextWrapper(
        width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )
    lines = []
    for paragraph in text.split("\n\n"):
        lines += [*wrapper.wrap(" ".join(paragraph.split())), ""]
    return lines[:-1]
