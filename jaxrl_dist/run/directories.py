"""Directories that hold a whole thing or none, and files of a run that someone else may have put there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator

from jaxrl_dist.errors import ConfigError

_MAX_FILES = 10_000
_SLACK = 2**16  # bytes of files that hold no arrays


class DamageError(ConfigError):
    """A checkpoint is not what was written, or of another run."""


# --- Writing ------------------------------------------------------------------------------------------


def sync(path: pathlib.Path) -> None:
    """Brings a file, or the names in a directory, to the disk.

    Raises:
      OSError: it cannot be opened, or the disk fails.
    """
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def put(temporary: pathlib.Path, path: pathlib.Path, kept: pathlib.Path) -> None:
    """Gives a directory that is whole its name, in an instant and on the disk.

    What had the name is found under ``kept`` until then, and is deleted.
    """
    for part in (*temporary.rglob("*"), temporary):
        sync(part)
    if os.path.lexists(path):
        delete(kept)
        path.rename(kept)
    temporary.rename(path)
    sync(path.parent)
    delete(kept)


def remove(path: pathlib.Path) -> None:
    """Deletes a directory, if it exists, so that no half of it ever has its name."""
    doomed = path.with_name(f".{path.name}.old")
    delete(doomed)
    with contextlib.suppress(FileNotFoundError):
        path.rename(doomed)
    delete(doomed)


def delete(path: pathlib.Path) -> None:
    """Deletes whatever has this name, as far as that is possible; of a link, the link alone."""
    shutil.rmtree(path, ignore_errors=True)  # it leaves alone what is no directory
    with contextlib.suppress(OSError):
        path.unlink()


def check_room(path: pathlib.Path, size: int) -> None:
    """Asks the disk for so many bytes, as the file ``path``, and gives them back: orbax is not quiet without them.

    Raises:
      OSError: it does not have them.
    """
    number = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.posix_fallocate(number, 0, size + _SLACK)
    finally:
        os.close(number)
    path.unlink()


# --- Reading ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Makes an error of the disk one of the checkpoint, so that the one before may be used instead."""
    try:
        yield
    except OSError as error:
        raise DamageError(f"{path} is damaged: {error.strerror}") from None


def plain_files(path: pathlib.Path) -> list[pathlib.Path]:
    """All files below a directory, none of which may be a link, a pipe or a device."""
    files, folders = [], [path]
    with reading(path):
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise DamageError(f"{path} is damaged: it is no directory")
        while folders:
            for entry in list(os.scandir(folders.pop())):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(pathlib.Path(entry))
                elif entry.is_file(follow_symlinks=False):
                    files.append(pathlib.Path(entry))
                else:
                    raise DamageError(f"{entry.path} is damaged: it is no plain file")
                if len(files) + len(folders) > _MAX_FILES:
                    raise DamageError(f"{path} is damaged: it has more than {_MAX_FILES} files")
    return files


def digests(path: pathlib.Path) -> dict[str, str]:
    """The SHA-256 of each file below a directory, by its relative name."""
    return {file.relative_to(path).as_posix(): sha256(file) for file in plain_files(path)}


def sha256(file: pathlib.Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with reading(file), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
