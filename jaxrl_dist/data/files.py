"""Directories of data sets: an ``.npy`` file for each array, and ``dataset.json``, which holds
spaces and checksums.

Others may have written them: no file names code, and nothing is read that the index does not
announce.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.checks import MAX_SIZE, shown
from jaxrl_dist.data import formats
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import directories, storage
from jaxrl_dist.run.storage import Json
from jaxrl_dist.spaces import Box, Discrete, Interface, MultiDiscrete, Part, Space
from jaxrl_dist.types import PyTree

FORMAT = 2
"""Format number of ``dataset.json``; a reader refuses unknown numbers."""
INDEX = "dataset.json"
MAX_AXES = 32
"""Axes of an array of numpy; further axes in an index are not read, so that its array has another
shape."""
ENDS = "random", "expert"
"""Policies whose mean returns are the ends of a normalised score."""
_DTYPES = {np.dtype(code).name for code in "?bBhHiIqQefd"}
_MAX_HEADER = 1000  # characters; those of data sets are below 200


def describe(path: pathlib.Path, about: Mapping[str, Json]) -> None:
    """Adds to what a directory says of its data set.

    Raises:
      OSError: it cannot be written.
    """
    content = storage.read_json(path / INDEX)
    storage.write_json(path / INDEX, {**content, "about": {**content["about"], **about}})


def scored(evaluation: Mapping[str, Json], path: str | None) -> dict[str, Json]:
    """Adds the normalised score to an evaluation, if the data set of the run knows both ends.

    It is ``100 (return - random) / (expert - random)``. Source: Fu et al. (2020), D4RL,
    arXiv:2004.07219, section 6.
    """
    random, expert = (None, None) if path is None else _ends(pathlib.Path(path))
    if random is None or expert is None or random == expert or "return_mean" not in evaluation:
        return dict(evaluation)
    score = 100 * (evaluation["return_mean"] - random) / (expert - random)
    return {
        **evaluation,
        "normalized_score": score,
        "random_return": random,
        "expert_return": expert,
    }


def _ends(path: pathlib.Path) -> tuple[float | None, float | None]:
    """Returns the mean returns of a random and of an expert policy, if the index has them."""
    try:
        about = storage.read_json(path / INDEX)["about"]
        random, expert = (storage.finite(about.get(end)) for end in ENDS)
    except (ConfigError, LookupError, TypeError, AttributeError):
        return None, None
    return random, expert


def read(
    path: pathlib.Path, rows: Mapping[str, Box], optional: Sequence[str]
) -> tuple[dict[str, PyTree], Interface, dict[str, Json]]:
    """Reads a directory: its arrays, which stay on the disk until they are used, its interface and
    its index.

    Args:
      rows: the spaces of the arrays for which the index has none.
      optional: the arrays that may be missing.

    Raises:
      ConfigError: there is no data set, or it is damaged.
    """
    path = path.resolve()  # a link that the user names is followed, and none below it
    content, interface = _index(path)
    present = {file.relative_to(path).as_posix() for file in directories.plain_files(path)} - {
        INDEX
    }
    unnamed = sorted(present - content["files"].keys())
    if unnamed:
        raise ConfigError(
            f"{path} holds {shown(unnamed[0])}, which {INDEX} does not name: remove it"
        )
    missing = {name for name in optional if file_of(name) not in content["files"]}
    kinds = {name: kind for name, kind in rows.items() if name not in missing}
    first = next(iter(kinds))
    size = 0
    fields = {}
    needed = set[str]()
    for name, space in {**kinds, **interface.kinds}.items():
        parts = {
            part: _array(path / file_of(name, part), kind, size)
            for part, kind in spaces.leaves(space).items()
        }
        fields[name] = spaces.nested(space, parts)
        size = len(fields[first])
        needed |= {file_of(name, part) for part in parts}
    # Digests last: only now does each file have the size that the spaces say.
    if present != needed or directories.digests(path, without=[INDEX]) != content["files"]:
        raise ConfigError(f"{path} is damaged: its arrays are not those that {INDEX} names")
    return fields, interface, content


def identity(path: str | pathlib.Path) -> str:
    """Returns a text that is equal for data sets with equal arrays and spaces, wherever they lie.

    Raises:
      ConfigError: there is no data set, or its index is damaged.
    """
    content, _ = _index(pathlib.Path(path).resolve())
    same = json.dumps([content["interface"], content["files"]], sort_keys=True)
    return hashlib.sha256(same.encode()).hexdigest()


def _index(path: pathlib.Path) -> tuple[dict[str, Json], Interface]:
    """Returns the index of a directory, and the interface in it. Raises as ``read``."""
    if not (path / INDEX).is_file():
        prefix = next(filter(None, map(formats.prefix_of, path.parts)), None)
        if prefix is not None:
            raise ConfigError(
                f"{path} is not a directory: `jaxrl-dist data {prefix}NAME -o DIR` makes one of a "
                f"data set of {formats.FORMATS[prefix].title}"
            )
        raise ConfigError(
            f"{path} is not a data set: it has no {INDEX}; "
            f"`jaxrl-dist record RUN_DIR -o {path}` makes one"
        )
    try:
        content = storage.read_json(path / INDEX)
        if content["format"] != FORMAT:
            raise ConfigError(
                f"{path} has format {shown(content['format'])}, but this version reads {FORMAT}; "
                "make the data set again, with jaxrl-dist record or from its episodes in Python"
            )
        interface = interface_from_json(content["interface"])
        if not isinstance(content["about"], dict) or not isinstance(content["files"], dict):
            raise TypeError
        json.dumps(content["about"], allow_nan=False)  # so that it can be written again
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise ConfigError(f"{path / INDEX} is damaged, or does not belong to a data set") from None
    return content, interface


def file_of(name: str, part: str = "") -> str:
    """Returns the name of a file, in which no path of the part's name counts."""
    if part:
        return f"{name}.{part.replace('%', '%25').replace('/', '%2F')}.npy"
    return f"{name}.npy"


def _array(file: pathlib.Path, kind: Part, size: int) -> np.ndarray:
    """Returns a mapped array ``[size, ...]`` of values of a space, whose file holds nothing else.

    Args:
      size: 0: any.
    """
    try:
        with file.open("rb") as content:
            version = np.lib.format.read_magic(content)
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(
                content, max_header_size=_MAX_HEADER
            )
            start = content.tell()
            end = content.seek(0, 2)
        is_kind = version == (1, 0) and dtype == kind.dtype and not fortran_order
        has_shape = shape == (size or shape[0], *kind.shape)
        if is_kind and has_shape and end - start == math.prod(shape) * dtype.itemsize > 0:
            return np.memmap(file, dtype, "r", start, shape)
    except Exception:  # numpy evaluates the header, which anyone may have written
        pass
    sizes = ", ".join(map(str, (size or "...", *kind.shape)))
    raise ConfigError(f"{file} is damaged: it does not hold {kind.dtype}[{sizes}]")


def interface_to_json(interface: Interface) -> dict[str, Json]:
    """Returns an interface as the index holds it."""
    return {
        "observation": _space_to_json(interface.observation),
        "action": _space_to_json(interface.action),
        "mask": interface.mask,
        "both_sides": interface.both_sides,
        "tuples": list(interface.tuples),
    }


def interface_from_json(stored: Json) -> Interface:
    """The inverse of ``interface_to_json``.

    Raises:
      ValueError, TypeError, LookupError, AttributeError, OverflowError: somebody else has written
        it.
    """
    observation = _space_from_json(stored["observation"])
    action = _space_from_json(stored["action"])
    mask = stored["mask"]
    both_sides = stored["both_sides"]
    tuples = stored["tuples"]
    if not isinstance(mask, str | None) or not isinstance(both_sides, bool):
        raise TypeError("not the name of a mask, or not a flag")
    dicts = _dicts({"observation": observation, "action": action})
    for path in tuples:
        if dicts[path].keys() != set(map(str, range(len(dicts[path])))):
            raise ValueError("not the parts of a tuple")
    interface = Interface(observation, action, mask, both_sides, tuple(tuples))
    if interface.problem() is not None:
        raise ValueError("not a mask")
    return interface


def _dicts(parts: dict[str, Space], above: str = "") -> dict[str, dict[str, Space]]:
    """Returns the spaces of the parts that have parts themselves, by path."""
    dicts: dict[str, dict[str, Space]] = {}
    for name, space in parts.items():
        if isinstance(space, dict):
            dicts |= {above + name: space, **_dicts(space, f"{above}{name}/")}
    return dicts


def _space_to_json(space: Space) -> Json:
    if isinstance(space, dict):
        return {"parts": {name: _space_to_json(part) for name, part in space.items()}}
    if isinstance(space, Discrete):
        return {"n": space.n, "start": space.start}
    if isinstance(space, MultiDiscrete):
        native = {"start": list(space.start), "axes": list(space.axes), "binary": space.binary}
        return {"nvec": list(space.nvec), **native}
    bounds = {"low": _bound_to_json(space.low), "high": _bound_to_json(space.high)}
    return {"shape": list(space.shape), "dtype": space.dtype.name, **bounds}


def _bound_to_json(bound: np.ndarray) -> Json:
    """Returns a bound as numbers or, for infinity, texts; equal numbers are one number."""
    numbers = np.asarray(bound).reshape(-1)
    if numbers.size and (numbers == numbers[0]).all():
        return _finite_or_text(numbers[0].item())
    return [_finite_or_text(number) for number in numbers.tolist()]


def _finite_or_text(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _space_from_json(stored: Json) -> Space:
    if "parts" in stored:
        _check_names(stored["parts"].keys())
        return {name: _space_from_json(part) for name, part in stored["parts"].items()}
    if "n" in stored:
        size = _count(stored["n"])
        return Discrete(size, _start(stored["start"]))
    if "nvec" in stored:
        sizes = tuple(map(_count, stored["nvec"][:] or [0]))
        start = tuple(map(_start, stored["start"]))
        axes = tuple(map(_count, stored["axes"][:MAX_AXES]))
        binary = stored["binary"]
        if len(start) not in (0, len(sizes)) or not isinstance(binary, bool):
            raise ValueError("not the starts of these sizes, or not a flag")
        if axes and math.prod(axes) != len(sizes):
            raise ValueError("not the axes of so many values")
        return MultiDiscrete(sizes, start, axes, binary)
    return _box_from_json(stored)


def _box_from_json(stored: Json) -> Box:
    shape = tuple(map(_count, stored["shape"][:MAX_AXES]))
    name = stored["dtype"]
    if name not in _DTYPES or math.prod(shape) > 2**30:
        raise ValueError("not a dtype or shape of observations")
    low = _bound_from_json(stored["low"], shape, name)
    high = _bound_from_json(stored["high"], shape, name)
    if not np.all(low <= high):
        raise ValueError("not bounds")
    return Box(shape, np.dtype(name), np.broadcast_to(low, shape), np.broadcast_to(high, shape))


def _check_names(names: Collection[str]) -> None:
    # "a/b" beside "a" could also name the part "b" of "a".
    clash = any(
        name[:at] in names for name in names for at, letter in enumerate(name) if letter == "/"
    )
    if not names or clash or not all(name and name.isprintable() for name in names):
        raise ValueError("no parts, or names that parts cannot have")


def _bound_from_json(value: Json, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns a bound that can be broadcast to ``shape``, which may be larger than what announces
    it.
    """
    if isinstance(value, list):
        bound = np.array([float(number) for number in value]).reshape(shape)
    else:
        bound = np.array(float(value))
    with np.errstate(over="ignore", invalid="ignore"):
        return bound.astype(dtype)


def _start(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**30) <= value <= 2**30:
        raise ValueError("not a start")
    return value


def _count(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_SIZE:
        raise ValueError("not a size")
    return value
