"""The manifest of a checkpoint: the SHA-256 of each of its files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import arrays, directories
from jaxrl_dist.run.directories import DamageError
from jaxrl_dist.run.machine import memory_size
from jaxrl_dist.run.storage import read_json
from jaxrl_dist.types import PyTree

MANIFEST = "manifest.json"
FORMAT = 1
"""Format number of a checkpoint; a reader refuses unknown numbers."""


def write_manifest(path: pathlib.Path, others: Mapping[str, str] = {}) -> None:
    """Writes the SHA-256 of each file below ``path``.

    Args:
      others: checksums of files that other processes have written.

    Raises:
      OSError: the file cannot be written.
    """
    manifest = {"format": FORMAT, "sha256": {**directories.digests(path, others), **others}}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def verify(path: pathlib.Path, like: PyTree) -> None:
    """Checks that a checkpoint holds exactly the files that were written, unchanged.

    Args:
      like: shapes and dtypes of its arrays, which bound its size; None:
        only this machine's memory bounds each file.

    Raises:
      DamageError: a file is missing, changed or added.
      ConfigError: it is not a plain file, or is too large.
    """
    _check_sizes(path, like)
    manifest = read_object(path / MANIFEST)
    written = manifest.get("sha256")
    if manifest.get("format") != FORMAT or not isinstance(written, dict):
        raise DamageError(f"{path / MANIFEST} is damaged: it is not a list of format {FORMAT}")
    digests = directories.digests(path, without={MANIFEST})
    for name in sorted(written.keys() | digests.keys()):
        if name not in digests:
            raise DamageError(f"{path / name} is damaged: No such file or directory")
        if name not in written:
            raise DamageError(f"{path / name} is damaged: it does not belong there")
        if written[name] != digests[name]:
            raise DamageError(f"{path / name} is damaged: it is not what was written")


def _check_sizes(path: pathlib.Path, like: PyTree) -> None:
    with directories.reading(path):
        sizes = {file: file.stat().st_size for file in directories.plain_files(path)}
    if like is not None:
        size = sum(sizes.values())
        room = 2 * arrays.nbytes(like) + 2**26
        if size > room:
            raise DamageError(
                f"{path} is damaged: it has {size} bytes, but its arrays need at most {room}"
            )
    memory = memory_size()
    for file, size in sizes.items():
        if size > memory:  # an array may claim all of it
            raise DamageError(
                f"{file} cannot be read: it has {size} bytes, which is more than the memory here"
            )


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object from a file of a checkpoint.

    Raises:
      DamageError: the file cannot be read, or holds no object.
    """
    try:
        content = read_json(path)
    except ConfigError as error:
        raise DamageError(error.with_flags) from None
    if not isinstance(content, dict):
        raise DamageError(f"{path} is damaged: it is not an object")
    return content
