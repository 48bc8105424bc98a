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
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.checks import shown
from jaxrl_dist.data import formats
from jaxrl_dist.envs.wire.spaces import interface_from_json
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import directories, storage
from jaxrl_dist.run.storage import Json
from jaxrl_dist.spaces import Box, Interface, Part
from jaxrl_dist.types import PyTree

FORMAT = 2
"""Format number of ``dataset.json``; a reader refuses unknown numbers."""
INDEX = "dataset.json"
ENDS = "random", "expert"
"""Policies whose mean returns are the ends of a normalised score."""
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
