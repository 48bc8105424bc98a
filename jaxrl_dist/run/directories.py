"""Directories that are written completely or not at all, and read with care,
as others may have written them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pathlib
import shutil
import stat
import time
from collections.abc import Collection, Iterator

from jaxrl_dist.errors import ConfigError

_MAX_FILES = 10_000
_SLACK = 2**16
"""Bytes of files that hold no arrays."""


class DamageError(ConfigError):
    """A checkpoint is damaged or belongs to another run."""


def sync(path: pathlib.Path) -> None:
    """Syncs a file, or the entries of a directory, to disk.

    Raises:
      OSError: the file cannot be opened, or the disk fails.
    """
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_all(path: pathlib.Path) -> None:
    """Syncs a directory and all below it to disk. Raises as ``sync``."""
    for part in (*path.rglob("*"), path):
        sync(part)


def commit(temporary: pathlib.Path, path: pathlib.Path, previous: pathlib.Path) -> None:
    """Syncs a complete directory to disk and renames it to its final name.

    A directory that has this name already is renamed to ``previous`` first, and deleted at the end.
    """
    sync_all(temporary)
    if os.path.lexists(path):
        delete(previous)
        path.rename(previous)
    temporary.rename(path)
    sync(path.parent)
    delete(previous)


def free(path: pathlib.Path) -> pathlib.Path:
    """Returns a path that does not exist: this one,
    or else with the first number from 2 on after its name.
    """
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(place for place in itertools.chain([path], numbered) if not os.path.lexists(place))


def commit_new(temporary: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """As ``commit``, but keeps what has this name already: returns the path that is ``free``,
    and now the directory's.

    Raises:
      OSError: as ``sync``, or it cannot be renamed.
    """
    sync_all(temporary)
    while True:
        place = free(path)
        try:
            temporary.rename(place)
        except OSError:
            if not os.path.lexists(place):
                raise
            continue  # another process has just made it
        sync(path.parent)
        return place


def appears(path: pathlib.Path, within: float = 60.0) -> bool:
    """Returns whether a path exists, or does so within some seconds:
    network file systems show new names late.
    """
    until = time.monotonic() + within
    while not os.path.lexists(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def remove(path: pathlib.Path) -> None:
    """Deletes a directory, if it exists. Renames it first,
    so that its name never refers to a part of it.
    """
    doomed = path.with_name(f".{path.name}.old")
    delete(doomed)
    with contextlib.suppress(FileNotFoundError):
        path.rename(doomed)
    delete(doomed)


def delete(path: pathlib.Path) -> None:
    """Deletes the file or directory of this name, as far as possible; deletes a link,
    but not its target.
    """
    shutil.rmtree(path, ignore_errors=True)  # skips files and links
    with contextlib.suppress(OSError):
        path.unlink()


def check_room(path: pathlib.Path, size: int) -> None:
    """Checks that the disk has room for ``size`` bytes: orbax prints messages on a full disk.

    Args:
      path: file that is allocated and deleted again.

    Raises:
      OSError: the disk has too little room.
    """
    number = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.posix_fallocate(number, 0, size + _SLACK)
    finally:
        os.close(number)
    path.unlink()


# --- Reading --------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Turns a disk error into a ``DamageError``,
    so that the previous checkpoint can be used instead.
    """
    try:
        yield
    except OSError as error:
        raise DamageError(f"{path} is damaged: {error.strerror}") from None


def plain_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files below a directory; refuses links, pipes and devices."""
    files = []
    with reading(path):
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise DamageError(f"{path} is damaged: it is not a directory")
        for count, entry in enumerate(path.rglob("*")):
            mode = entry.lstat().st_mode
            if count == _MAX_FILES:
                raise DamageError(f"{path} is damaged: it has more than {_MAX_FILES} files")
            if stat.S_ISREG(mode):
                files.append(entry)
            elif not stat.S_ISDIR(mode):
                raise DamageError(f"{entry} is damaged: it is not a plain file")
    return files


def digests(path: pathlib.Path, without: Collection[str] = ()) -> dict[str, str]:
    """Returns the SHA-256 of each file below a directory, by relative name;
    ``without`` names files to leave out.
    """
    named = {file.relative_to(path).as_posix(): file for file in plain_files(path)}
    return {name: sha256(file) for name, file in named.items() if name not in without}


def sha256(file: pathlib.Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with reading(file), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
