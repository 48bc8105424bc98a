"""Fields of configs: what holds for them, and converting
Python values to what flags and files can hold.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from jaxrl_dist.checks import check_range, check_used, did_you_mean, flag, shown
from jaxrl_dist.errors import ConfigError

OR_OBJECT = "or an object from Python"
"""Annotates the type of a field whose value may also
be an object that no flag and no file can hold."""
NO_NUMBER = "none", "auto"
"""Texts of an optional number that leave it to the run, in any case; other libraries have
``auto``."""
Fields = TypeVar("Fields")


class Marks(NamedTuple):
    """What holds for a field of a run beside its type and default; see ``setting``."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    """Bounds of a number, as for ``checks.check_range``."""
    needs: str | None = None
    """The field without which this one does nothing."""
    without_preset: Any = None
    """The value if neither the user nor the algorithm's preset gives one; None:
    presets do not fill it in."""
    resumable: bool = False
    """Whether it may change when a run is resumed."""
    compiled: bool = True
    """Whether compiled programs depend on it."""
    stored: bool = True
    """Whether ``config.json`` holds it among the fields of the run."""
    per_policy: bool = False
    """Whether each of several policies has its own."""
    varies: bool = False
    """Whether members of a population may differ in it."""
    of_machine: bool = False
    """Whether it names devices of this machine."""
    needs_actors: bool = False
    """Whether it does nothing under plans without actor threads."""
    timed: bool = False
    """Whether it lets a run depend on the threads' timing, which ``--lockstep`` rules out."""
    skips: bool = False
    """Whether it leaves experience out, of which a replay memory must have all."""
    needs_rollouts: bool = False
    """Whether it does not work where actors send gradients."""
    group: str | None = None
    """The group that help shows it in; None: that of its class."""


def setting(default: Any = dataclasses.MISSING, **marks: Any) -> Any:
    """Declares a field of a run or a hyperparameter, with its ``Marks``."""
    field_marks = Marks(**marks)
    metadata = {Marks: field_marks}
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(
        default=default if field_marks.without_preset is None else None, metadata=metadata
    )


def marks_of(field: dataclasses.Field[Any]) -> Marks:
    """Returns the marks of a field."""
    marks: Marks = field.metadata.get(Marks, Marks())
    return marks


def marked(kind: Any, **wanted: Any) -> tuple[str, ...]:
    """Returns the names of a dataclass's fields that have these marks, in their order."""
    fields = ((field.name, marks_of(field)) for field in dataclasses.fields(kind))
    return tuple(
        name
        for name, marks in fields
        if all(getattr(marks, mark) == value for mark, value in wanted.items())
    )


def check_declared(config: Any) -> None:
    """Checks that numbers are within the bounds that any base class declares,
    and that fields have what they need.

    Raises:
      ConfigError: a number is out of range; the message names its flag.
      UnusedError: a field does nothing.
    """
    bases = filter(dataclasses.is_dataclass, reversed(type(config).__mro__))
    declared = [
        field for base in bases for field in dataclasses.fields(base) if Marks in field.metadata
    ]
    fields = {field.name: (str(field.type), marks_of(field)) for field in declared}
    for name, (kind, marks) in fields.items():
        if re.search(r"\b(int|float)\b", kind):
            check_range(
                config, name, low=marks.low, high=marks.high, above=marks.above, below=marks.below
            )
    for name, (_, marks) in fields.items():
        if marks.needs is not None:
            needed = getattr(config, marks.needs)
            unfilled = (
                needed is None
                and marks.needs in fields
                and fields[marks.needs][1].without_preset is not None
            )
            check_used(config, name, active=unfilled or bool(needed), needed=flag(marks.needs))


def plain(config: Fields) -> Fields:
    """Converts the values of a dataclass to plain Python values of the fields' types.

    Scalars of numpy and JAX become Python numbers, lists and arrays become tuples, and paths become
    text. A text field also takes a number, and an integer field a float such as 1e6. So every
    config can be written to ``config.json`` and read again. Fields of other types (not numbers,
    switches, text, choices, or tuples and dictionaries of these) stay unchanged, and so do fields
    that still have their default.

    Raises:
      ConfigError: a value has the wrong type;
        the message names the field's flag and the type that works.
    """
    hints: Mapping[str, Any] = {}
    with contextlib.suppress(NameError):  # names that only type checkers import
        hints = get_type_hints(type(config), include_extras=True)
    values = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if value is not field.default:
            values[field.name] = _plain(field.name, value, hints.get(field.name, Any))
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def _plain(name: str, value: Any, hint: Any) -> Any:
    """Converts ``value`` to the type ``hint``."""
    (kind, *others), optional = alternatives(hint)
    is_object = OR_OBJECT in get_args(hint) and not isinstance(value, _NO_OBJECT)
    if others or is_object or (optional and value is None):
        return value
    if get_origin(kind) is tuple:
        return _plain_tuple(name, value, get_args(kind))
    if get_origin(kind) is Literal:
        return _choice(name, value, get_args(kind))
    read = _READERS.get(kind)
    if read is None:
        return value
    return read(name, _scalar(value))


_NO_OBJECT = str | bool | int | float | None


def _scalar(value: Any) -> Any:
    """Converts a numpy or JAX scalar to a Python number; returns other values unchanged."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"must be True or False, not {shown(value)}", name)
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not (
        isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    ):
        raise ConfigError(f"must be a whole number, not {shown(value)}", name)
    return int(value)


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, Real):
            return float(value)
    except OverflowError:
        pass
    raise ConfigError(f"must be a number, not {shown(value)}", name)


def _text(name: str, value: Any, part: str = "") -> str:
    """Returns text unchanged, and converts a path or a number to text."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        if "\0" in value:
            raise ConfigError(
                f"{part}must be text without the character NUL, not {shown(value)}", name
            )
        return value
    with contextlib.suppress(ValueError):  # Python does not write out thousands of digits
        if not isinstance(value, bool) and isinstance(value, Real):
            return str(value)
    if isinstance(value, bytes):
        raise ConfigError(f"{part}must be text, not bytes: {shown(value)}.decode() is text", name)
    joined = ""
    if isinstance(value, tuple | list) and value and all(isinstance(x, str) for x in value):
        joined = f"; as text it is {shown(','.join(value))}"
    raise ConfigError(f"{part}must be text or a number, not {shown(value)}{joined}", name)


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if not (isinstance(value, str) and value in choices):
        if isinstance(value, str):
            near = did_you_mean(value, map(str, choices))
        else:
            near = ""
        raise ConfigError(
            f"must be one of {', '.join(map(str, choices))}, not {shown(value)}{near}", name
        )
    return value


def _plain_tuple(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    if hasattr(value, "tolist"):  # an array
        value = value.tolist()
    if not isinstance(value, tuple | list | range):
        raise ConfigError(f"must be a tuple, not {shown(value)}", name)
    return tuple(_plain(name, part, kind) for part, kind in _with_kinds(name, value, kinds))


def _with_kinds(
    name: str, parts: Sequence[Any], kinds: tuple[Any, ...]
) -> Iterator[tuple[Any, Any]]:
    """Pairs the values of a tuple with their types, given the arguments of the tuple's type."""
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(parts)
    if len(kinds) != len(parts):
        raise ConfigError(f"must be a tuple of {len(kinds)} values, not {shown(parts)}", name)
    return zip(parts, kinds, strict=True)


def _plain_texts(name: str, value: Any) -> Any:
    """Converts a dictionary's values to text as on the command line,
    such as ``True`` and ``False``.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"must be a dictionary of names and values, not {shown(value)}", name)
    scalars = {key: _scalar(x) for key, x in value.items()}
    return {
        key: str(x) if isinstance(x, bool) else _text(name, x, f"{key} ")
        for key, x in scalars.items()
    }


_READERS: Mapping[Any, Callable[[str, Any], Any]] = {
    **{bool: _truth, int: _whole, float: _number, str: _text},
    dict[str, str]: _plain_texts,
}


def alternatives(hint: Any) -> tuple[list[Any], bool]:
    """Returns the types of values that ``hint`` allows beside None, and whether it allows None."""
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        kinds = get_args(hint)
    else:
        kinds = (hint,)
    return [kind for kind in kinds if kind is not type(None)], type(None) in kinds


def from_texts(name: str, texts: Sequence[str], hint: Any) -> Any:
    """Reads a value of the type ``hint`` from the texts behind a flag:
    several for a tuple or ``key=value`` pairs.

    Raises:
      ConfigError: the texts are not such a value.
    """
    (kind, *_), optional = alternatives(hint)
    if kind == dict[str, str]:
        return _pairs(name, texts)
    if get_origin(kind) is not tuple or (optional and texts == ["None"]):
        return from_text(name, texts[-1], hint)
    kinds = get_args(kind)
    numbers = {*kinds} <= {int, float, ...}  # which commas may divide, too
    parts = [part for text in texts for part in text.split(",")] if numbers else texts
    return tuple(from_text(name, part, kind) for part, kind in _with_kinds(name, parts, kinds))


def _pairs(name: str, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"{flag(name)}: {text!r} is not a key=value pair")
        if key in pairs:
            raise ConfigError(f"{flag(name)}: {key} is given twice")
        pairs[key] = value
    return pairs


def from_text(name: str, text: str, hint: Any) -> Any:
    """Reads a value of the type ``hint`` from one text.

    Raises:
      ConfigError: the text is not such a value, or the type cannot be written as text.
    """
    kinds, optional = alternatives(hint)
    if optional and (text.lower() in NO_NUMBER if kinds[0] in (int, float) else text == "None"):
        return None
    for kind in kinds:
        if get_origin(kind) is Literal:
            return _choice(name, text, (*get_args(kind), *(["None"] if optional else [])))
        with contextlib.suppress(ValueError, OverflowError, KeyError):
            return _FROM_TEXT[kind](text)
    words = {bool: "neither True nor False", int: "not a whole number", float: "not a number"}
    words |= (
        {int: "neither a whole number nor None", float: "neither a number nor None"}
        if optional
        else {}
    )
    raise ConfigError(
        f"{flag(name)}: {shown(text)} is {words.get(kinds[-1], 'more than a flag of one value can hold')}"
    )


def _whole_of(text: str) -> int:
    """Reads a whole number, which may be written as 1e6."""
    if "e" in text.lower():
        return _whole("", float(text))
    return int(text)


_FROM_TEXT: Mapping[Any, Callable[[str], Any]] = {
    str: str,
    int: _whole_of,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
}


@dataclasses.dataclass(frozen=True)
class Parts:
    """The configs of several policies in place of one algorithm's hyperparameters."""

    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For each policy, a ``Train`` of which only the algorithm and the fields ``OWN`` count."""


def varied(algorithm: Any, values: Mapping[str, Any]) -> Any:
    """Returns hyperparameters with other values; with several policies, names are
    ``POLICY.FIELD``.
    """
    if not isinstance(algorithm, Parts):
        return dataclasses.replace(algorithm, **values)
    parts = dict(algorithm.parts)
    for name, value in values.items():
        policy, _, field = name.partition(".")
        part = parts[policy]
        # a field of the algorithm, or of the policy's normalisation and clipping
        changes = {field: value}
        if field in {hyperparameter.name for hyperparameter in dataclasses.fields(part.algorithm)}:
            changes = {"algorithm": dataclasses.replace(part.algorithm, **changes)}
        parts[policy] = dataclasses.replace(part, **changes)
    return dataclasses.replace(algorithm, parts=parts)
