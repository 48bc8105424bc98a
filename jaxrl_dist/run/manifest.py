"""The list of a checkpoint's files, each with its checksum: orbax does not notice a changed bit."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import arrays, storage
from jaxrl_dist.run.machine import memory_size
from jaxrl_dist.run.storage import DamageError, read_json
from jaxrl_dist.types import PyTree

NAME = "manifest.json"
FORMAT = 1
"""Format number of a checkpoint; a reader refuses unknown numbers."""


def write(path: pathlib.Path, known: Mapping[str, str] = {}) -> None:
    """Writes the SHA-256 of each file below ``path``.

    Args:
      known: those of files that other processes have written.

    Raises:
      OSError: the file cannot be written.
    """
    manifest = {"format": FORMAT, "sha256": {**storage.digests(path, known), **known}}
    (path / NAME).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def verify(path: pathlib.Path, like: PyTree) -> None:
    """Checks that a checkpoint holds exactly the files that were written, unchanged.

    Args:
      like: shapes and dtypes of its arrays, which bound its size; None: only this machine's memory bounds each file.

    Raises:
      ConfigError: a file is missing, changed or added, is not a plain file, or is too large.
    """
    with storage.reading(path):
        sizes = {file: file.stat().st_size for file in storage.plain_files(path)}
    size, memory = sum(sizes.values()), memory_size()
    if like is not None and size > (room := 2 * arrays.nbytes(like) + 2**26):
        raise DamageError(f"{path} is damaged: it has {size} bytes, of which its arrays explain at most {room}")
    for file, size in sizes.items():
        if size > memory:  # an array may claim all of it
            raise DamageError(f"{file} cannot be read: it has {size} bytes, which is more than the memory here")
    manifest = read_object(path / NAME)
    written = manifest.get("sha256")
    if manifest.get("format") != FORMAT or not isinstance(written, dict):
        raise DamageError(f"{path / NAME} is damaged: it is not a list of format {FORMAT}")
    digests = storage.digests(path, without={NAME})
    problems = dict.fromkeys(written.keys() & digests.keys(), "it is not what was written")
    problems |= dict.fromkeys(written.keys() - digests.keys(), "No such file or directory")
    problems |= dict.fromkeys(digests.keys() - written.keys(), "it does not belong there")
    for name, problem in sorted(problems.items()):
        if name not in digests or written.get(name) != digests[name]:
            raise DamageError(f"{path / name} is damaged: {problem}")


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object from a file of a checkpoint."""
    try:
        content = read_json(path)
    except ConfigError as error:
        raise DamageError(error.with_flags) from None
    if not isinstance(content, dict):
        raise DamageError(f"{path} is damaged: it is not an object")
    return content
