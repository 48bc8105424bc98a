"""Messages to and from programs outside this package: JSON or msgpack, and the arrays in them.

An array is a number, a nested list, or a map of its ``dtype``, its ``shape`` and its ``data``: the
little-endian bytes in C order, in JSON as base64. Whoever sends a message may have written anything
in it, so each fault is a ``WireError``.
"""

from __future__ import annotations

import base64
import enum
import itertools
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.checks import MAX_SIZE, did_you_mean, shown
from jaxrl_dist.envs.wire.spaces import DTYPES, MAX_AXES
from jaxrl_dist.spaces import Part, Space
from jaxrl_dist.types import PyTree


class WireError(ValueError):
    """A message is refused; the text is one line: *problem; remedy*."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status
        """Status of HTTP."""


MAX_NAME = 200
"""Characters of an episode's name, at most."""


def check_name(name: str) -> None:
    """Refuses the name of an episode that is empty, long, or not text in any format."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise WireError(
            f"an episode's name has 1 to {MAX_NAME} printable characters; send another name"
        )


class Format(enum.Enum):
    """How a message is written; the values are types of content."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"

    @classmethod
    def of(cls, content_type: str) -> Format:
        """Returns the format of a body; without a type it is JSON.

        Raises:
          WireError: it has neither format.
        """
        if content_type in _MSGPACK:
            return cls.MSGPACK
        if content_type in _JSON:
            return cls.JSON
        raise WireError(
            f"the body has the type {shown(content_type)}; send {cls.JSON.value} or "
            f"{cls.MSGPACK.value}",
            415,
        )


_MSGPACK = {Format.MSGPACK.value, "application/x-msgpack", "application/vnd.msgpack"}
_JSON = {
    Format.JSON.value,
    # what clients send that name no type: curl, urllib, a page's fetch and aiohttp
    "application/x-www-form-urlencoded",
    "text/plain",
    "application/octet-stream",
    "",
}


def unpack(content: bytes | str, format: Format) -> Any:
    """Returns the value of a message: numbers, texts, bytes, lists and dicts.

    Raises:
      WireError: it is malformed.
    """
    try:
        if format is Format.JSON:
            return json.loads(content, parse_constant=_refuse_constant)
        import msgpack  # belongs to an extra

        return msgpack.unpackb(content, max_array_len=MAX_SIZE, max_map_len=MAX_SIZE)
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        name = format.name.lower()
        raise WireError(f"the message is not {name} ({error!s:.100}); send valid {name}") from error


def _refuse_constant(constant: str) -> NoReturn:
    raise WireError(f"{constant} is not JSON; send finite numbers")


def pack(value: Any, format: Format) -> bytes:
    """Returns a message that holds a value, which may contain arrays of numpy.

    Raises:
      ValueError: JSON cannot hold a number, which is not finite.
    """
    if format is Format.JSON:
        return json.dumps(value, default=_as_list, allow_nan=False).encode()
    import msgpack

    packed: bytes = msgpack.packb(value, default=_as_map)
    return packed


def _as_list(array: Any) -> Any:
    return np.asarray(array).tolist()


def _as_map(array: Any) -> Any:
    array = np.asarray(array)
    if not array.ndim:
        return array.item()
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": little.tobytes()}


def fields(message: Any, kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Returns the fields of a message.

    Args:
      kinds: the types of each field that a message may have; none: any.

    Raises:
      WireError: it is not a map, or it has other fields.
    """
    if not isinstance(message, dict):
        raise WireError(f"a message is a map, not {_kind(message)}; send {{{', '.join(kinds)}}}")
    for name, value in message.items():
        if name not in kinds:
            advice = did_you_mean(str(name), kinds)
            raise WireError(
                f"a message has no field {shown(name)}{advice}; its fields are {', '.join(kinds)}"
            )
        # to Python, a flag is an integer
        if kinds[name] and type(value) not in kinds[name]:
            wanted = " or ".join(_WORDS[kind] for kind in kinds[name])
            raise WireError(f"{name} is {_kind(value)}; send {wanted}")
    return message


def read(space: Space, value: Any, tuples: Collection[str] = (), path: str = "obs") -> PyTree:
    """Returns what a message holds as a value of a space, in the environment's form: nested dicts
    of arrays of ``native_shape``.

    Args:
      tuples: paths of the dicts that may be lists, as in ``Interface.tuples``.
      path: of the value, for messages and ``tuples``.

    Raises:
      WireError: the space does not hold it.
    """
    if not isinstance(space, dict):
        return _array(space, value, path)
    if path in tuples and isinstance(value, list):
        value = {str(number): part for number, part in enumerate(value)}
    names = ", ".join(space)
    if not isinstance(value, dict):
        raise WireError(f"{path} is {_kind(value)}; send a map of {names}")
    for name in space:
        if name not in value:
            raise WireError(f"{path} has no part {name}; send {names}")
    for name in value:
        if name not in space:
            raise WireError(f"{path} has a part {shown(name)}; send only {names}")
    return {name: read(part, value[name], tuples, f"{path}/{name}") for name, part in space.items()}


def _array(part: Part, value: Any, path: str) -> np.ndarray:
    """Returns a part of an observation or action."""
    wanted = spaces.describe(part, starts=True)
    if isinstance(value, dict):
        given = _of_map(value, path)
    else:
        given = _of_lists(value, part.native_shape, path, wanted)
    allowed = "fiu" if part.dtype.kind == "f" else "iub"
    if given.dtype.kind not in allowed and given.size:
        raise WireError(f"{path} holds {given.dtype}; send {wanted}")
    if given.shape != part.native_shape:
        raise WireError(
            f"{path} has the shape {list(given.shape)}; send {list(part.native_shape)}, {wanted}"
        )
    with np.errstate(over="ignore"):
        array = given.astype(part.dtype)
    if part.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise WireError(f"{path} holds a number that is not finite; send finite {part.dtype}")
    elif (array != given).any() or not spaces.holds(part, spaces.counted(part, array[None])):
        raise WireError(f"{path} holds a value outside of its space; send {wanted}")
    return array


def _of_lists(value: Any, shape: tuple[int, ...], path: str, wanted: str) -> np.ndarray:
    """Returns the array that nested lists hold; numpy sees numbers only, and as many as fit."""
    values = [value]
    for size in shape:
        if not all(type(x) is list and len(x) == size for x in values):
            raise WireError(f"{path} does not hold lists of the shape {list(shape)}; send {wanted}")
        values = list(itertools.chain.from_iterable(values))
    array = None
    if {bool, int, float}.issuperset(map(type, values)):
        array = np.array(values)
    if array is None or array.dtype.kind == "O":  # numpy has no such integer
        raise WireError(f"{path} holds something else than numbers; send {wanted}")
    return array.reshape(shape)


def _of_map(value: dict[Any, Any], path: str) -> np.ndarray:
    """Returns the array that a map of ``dtype``, ``shape`` and ``data`` holds."""
    dtype = value.get("dtype")
    shape = value.get("shape")
    data = value.get("data")
    if not isinstance(dtype, str) or dtype not in DTYPES or len(value) != 3:
        raise WireError(
            f"{path} is a map; send numbers, or a map of dtype, shape and data with a dtype such "
            "as uint8 or float32"
        )
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_AXES
        or not all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape)
    ):
        raise WireError(f"{path} has no shape; send it as a list of sizes")
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except ValueError:
            raise WireError(f"{path} has data that is not base64; encode its bytes") from None
    kind = np.dtype("uint8" if dtype == "bool" else dtype).newbyteorder("<")
    needed = math.prod(shape) * kind.itemsize
    if not isinstance(data, bytes) or len(data) != needed:
        raise WireError(f"{path} needs {needed} bytes of data for {dtype}{shape}; send these")
    return np.frombuffer(data, kind).reshape(shape)


def _kind(value: Any) -> str:
    """Names the type of a value in the words of a message."""
    return _WORDS.get(type(value), f"of type {type(value).__name__}")


_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    bytes: "bytes",
    list: "a list",
    dict: "a map",
    type(None): "null",
}
