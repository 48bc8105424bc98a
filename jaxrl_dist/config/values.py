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
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from jaxrl_dist.checks import check_range, check_used, did_you_mean, flag, shown
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.protocols import Traits

OR_OBJECT = "or an object from Python"
"""Annotates the type of a field whose value may also
be an object that no flag and no file can hold."""
NO_NUMBER = "none", "auto"
"""Texts of an optional number that leave it to the run, in any case; other libraries have
``auto``."""
Fields: TypeAlias = Mapping[str, Any]
"""Values of fields by name, each of its field's type."""
Config = TypeVar("Config")
T = TypeVar("T")


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
    """The group that help shows it in; None: its class's group."""


def setting(default: Any = dataclasses.MISSING, **marks: Any) -> Any:
    """Declares a field of a run or a hyperparameter, with its ``Marks``."""
    field_marks = Marks(**marks)
    metadata = {Marks: field_marks}
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    if field_marks.without_preset is not None:
        default = None
    return dataclasses.field(default=default, metadata=metadata)


def marks_of(field: dataclasses.Field[object]) -> Marks:
    """Returns the marks of a field."""
    marks: Marks = field.metadata.get(Marks, Marks())
    return marks


def marked(kind: object, **wanted: bool) -> tuple[str, ...]:
    """Returns the names of a dataclass's fields that have these marks, in their order."""

    def has_marks(field: dataclasses.Field[object]) -> bool:
        marks = marks_of(field)
        return all(getattr(marks, mark) == value for mark, value in wanted.items())

    return tuple(field.name for field in dataclasses.fields(kind) if has_marks(field))  # type: ignore[arg-type]


def check_declared(config: object) -> None:
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
            active = bool(getattr(config, marks.needs))
            if getattr(config, marks.needs) is None and marks.needs in fields:
                _, marks_of_needed = fields[marks.needs]
                active = marks_of_needed.without_preset is not None  # a preset will fill it in
            check_used(config, name, active=active, needed=flag(marks.needs))


def check_hyperparameters(config: object) -> None:
    """Checks a config of hyperparameters as ``check_declared``, and by its own ``validate``."""
    check_declared(config)
    Traits.of(config).validate()


def plain(config: Config) -> Config:
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
    hints: Mapping[str, object] = {}
    with contextlib.suppress(NameError):  # names that only type checkers import
        hints = get_type_hints(type(config), include_extras=True)
    values = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if value is not field.default:
            values[field.name] = _plain(field.name, value, hints.get(field.name, Any))
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def _plain(name: str, value: object, hint: object) -> object:
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


def _scalar(value: object) -> object:
    """Converts a numpy or JAX scalar to a Python number; returns other values unchanged."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"must be True or False, not {shown(value)}", name)
    return value


def _whole(name: str, value: object) -> int:
    if not isinstance(value, bool):
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    raise ConfigError(f"must be a whole number, not {shown(value)}", name)


def _number(name: str, value: object) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, Real):
            return float(value)
    except OverflowError:
        pass
    raise ConfigError(f"must be a number, not {shown(value)}", name)


def _text(name: str, value: object, part: str = "") -> str:
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
        raise ConfigError(
            f"{part}must be text, not bytes; decode it: {shown(value)}.decode()", name
        )
    if isinstance(value, tuple | list) and value and all(isinstance(word, str) for word in value):
        raise ConfigError(
            f"{part}must be text or a number, not {shown(value)}; "
            f"as text it is {shown(','.join(value))}",
            name,
        )
    raise ConfigError(f"{part}must be text or a number, not {shown(value)}", name)


def _choice(name: str, value: object, choices: Sequence[str]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    near = did_you_mean(value, choices) if isinstance(value, str) else ""
    raise ConfigError(f"must be one of {', '.join(choices)}, not {shown(value)}{near}", name)


def _plain_tuple(name: str, value: object, kinds: tuple[object, ...]) -> tuple[object, ...]:
    if hasattr(value, "tolist"):  # an array
        value = value.tolist()
    if not isinstance(value, tuple | list | range):
        raise ConfigError(f"must be a tuple, not {shown(value)}", name)
    return tuple(_plain(name, element, kind) for element, kind in _with_kinds(name, value, kinds))


def _with_kinds(
    name: str, elements: Sequence[T], kinds: tuple[object, ...]
) -> Iterator[tuple[T, object]]:
    """Pairs the values of a tuple with their types, given the arguments of the tuple's type."""
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(elements)
    if len(kinds) != len(elements):
        raise ConfigError(f"must be a tuple of {len(kinds)} values, not {shown(elements)}", name)
    return zip(elements, kinds, strict=True)


def _plain_texts(name: str, value: object) -> dict[str, str]:
    """Converts a dictionary's values to text as on the command line,
    such as ``True`` and ``False``.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"must be a dictionary of names and values, not {shown(value)}", name)
    texts = {}
    for key, scalar in ((key, _scalar(scalar)) for key, scalar in value.items()):
        if isinstance(scalar, bool):
            scalar = str(scalar)
        texts[key] = _text(name, scalar, f"{key} ")
    return texts


_READERS: Mapping[object, Callable[[str, object], object]] = {
    **{bool: _truth, int: _whole, float: _number, str: _text},
    dict[str, str]: _plain_texts,
}


def alternatives(hint: object) -> tuple[list[object], bool]:
    """Returns the types of values that ``hint`` allows beside None, and whether it allows None."""
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        kinds = get_args(hint)
    else:
        kinds = (hint,)
    return [kind for kind in kinds if kind is not type(None)], type(None) in kinds


def from_texts(name: str, texts: Sequence[str], hint: object) -> object:
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
    if {*kinds} <= {int, float, ...}:  # commas may also divide numbers
        texts = [number for text in texts for number in text.split(",")]
    return tuple(from_text(name, text, kind) for text, kind in _with_kinds(name, texts, kinds))


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


def from_text(name: str, text: str, hint: object) -> object:
    """Reads a value of the type ``hint`` from one text.

    Raises:
      ConfigError: the text is not such a value, or the type cannot be written as text.
    """
    kinds, optional = alternatives(hint)
    if optional and text == "None":
        return None
    if optional and kinds[0] in (int, float) and text.lower() in NO_NUMBER:
        return None
    for kind in kinds:
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            return _choice(name, text, (*choices, "None") if optional else choices)
        with contextlib.suppress(ValueError, OverflowError, KeyError):
            return _FROM_TEXT[kind](text)
    faults: dict[object, str] = {
        bool: "neither True nor False",
        int: "not a whole number",
        float: "not a number",
    }
    if optional:
        faults[int] = "neither a whole number nor None"
        faults[float] = "neither a number nor None"
    if kinds[-1] not in faults:
        raise ConfigError(
            f"{flag(name)} takes several values, so {shown(text)} cannot be one of a list; start "
            "a run for each choice"
        )
    raise ConfigError(f"{flag(name)}: {shown(text)} is {faults[kinds[-1]]}")


def _whole_of(text: str) -> int:
    """Reads a whole number, which may be written as 1e6."""
    if "e" in text.lower():
        return _whole("", float(text))
    return int(text)


_FROM_TEXT: Mapping[object, Callable[[str], object]] = {
    str: str,
    int: _whole_of,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
}


@dataclasses.dataclass(frozen=True)
class PolicyConfigs:
    """The configs of several policies in place of one algorithm's hyperparameters."""

    configs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For each policy, a ``Train`` of which only the algorithm and the fields ``OWN`` count."""


def varied(algorithm: Config, values: Fields) -> Config:
    """Returns hyperparameters with other values; with several policies, names are
    ``POLICY.FIELD``.
    """
    if not isinstance(algorithm, PolicyConfigs):
        return dataclasses.replace(algorithm, **values)  # type: ignore[type-var]
    configs = dict(algorithm.configs)
    for name, value in values.items():
        policy, _, field = name.partition(".")
        config = configs[policy]
        changes = {field: value}
        if any(field == known.name for known in dataclasses.fields(config.algorithm)):
            changes = {"algorithm": dataclasses.replace(config.algorithm, **changes)}
        # otherwise a field of the policy's normalisation or clipping
        configs[policy] = dataclasses.replace(config, **changes)
    return dataclasses.replace(algorithm, configs=configs)
