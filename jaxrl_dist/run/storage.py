"""Files and directories of a run, and files that a user asks for: written completely or not at all,
and read with care, as others may have written them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from typing import IO, Any

from jaxrl_dist.config.train import CONFIG_FILE
from jaxrl_dist.errors import ConfigError

_MAX_JSON = _MAX_LINE = 2**26
_MAX_FILES = 10_000
_SLACK = 2**16  # bytes of files that hold no arrays


class DamageError(ConfigError):
    """A checkpoint is damaged or belongs to another run."""


def check_run_dir(run_dir: pathlib.Path) -> None:
    """Checks that a directory is a run directory.

    Raises:
      ConfigError: it is not.
    """
    if not run_dir.is_dir():
        problem = "is not a directory" if run_dir.exists() else "does not exist"
        path, at, number = str(run_dir).rpartition("@")
        if at and pathlib.Path(path).is_dir():  # as players of `match` are named
            problem += f"; the commands that take a checkpoint of {path} have --checkpoint {number}"
        raise ConfigError(f"{run_dir} is not a run directory: it {problem}")
    if not (run_dir / CONFIG_FILE).exists():
        if held := runs_in(run_dir):
            inside = f"; name a run in it, such as {held[0]}"
        else:
            inside = ""
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}{inside}")


def runs_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the run directories in a folder."""
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}"))


def check_no_link(path: pathlib.Path) -> None:
    """Checks that a file or directory of a run is not a link, which may lead to someone else's.

    Raises:
      ConfigError: it is.
    """
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link, and a link in a run directory is not followed: put what it names there"
        )


def check_no_links(folder: pathlib.Path) -> None:
    """As ``check_no_link``, for a folder and all in it."""
    check_no_link(folder)
    for path in folder.glob("*"):
        check_no_link(path)


# --- Writing directories --------------------------------------------------------------------------


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


# --- Reading directories --------------------------------------------------------------------------


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


# --- Files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the path to an ``OSError``: the operating
    system leaves it out if the file is open already.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a library's, in words of its own
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_place(path: pathlib.Path) -> None:
    """Checks that a file can be written where a user asks for it.

    Raises:
      ConfigError: the directory is missing or read-only, or the path is that of a directory.
    """
    problem = None
    if path.is_dir():
        problem = "it is a directory"
    elif not path.parent.is_dir():
        problem = f"there is no directory {path.parent}"
    elif not path.exists() and not os.access(path.parent, os.W_OK):
        problem = f"the directory {path.parent} is read-only"
    if problem is not None:
        raise ConfigError(f"{path} cannot be written: {problem}")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a temporary file,
    which becomes ``path`` if the context ends without an error.

    An older file stays unchanged until then. Pipes and devices are written in place.

    Raises:
      ConfigError: as ``check_place``.
      OSError: the file cannot be written; the error names it.
    """
    check_place(path)
    if path.exists() and not path.is_file():
        yield path
        return
    place = pathlib.Path(os.path.realpath(path))  # a link stays a link
    partial = place.with_name(f".{place.name}.new")
    with naming(path):
        partial.unlink(missing_ok=True)  # which may be a link of someone else's
        try:
            yield partial
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a complete file or none, through a temporary file next to it, and syncs it to disk.

    Raises:
      OSError: the file cannot be written; the error names it.
    """
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """As ``write_json``, for any text."""
    temporary = path.with_suffix(".tmp")
    with naming(path):
        temporary.unlink(missing_ok=True)
        try:
            with temporary.open("x", encoding="utf-8") as file:  # "x" follows no link
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file that others may have written; see ``read_plain``.

    Raises:
      ConfigError: the file does not exist, cannot be read, or is not JSON.
    """
    content = read_plain(path, _MAX_JSON)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def finite(value: Any) -> float | None:
    """Returns a finite number as it is, None for anything else: others may have written the
    file.
    """
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return None


def read_plain(path: pathlib.Path, most: int) -> bytes:
    """Reads a file that others may have written; refuses links, pipes and more than ``most`` bytes.

    Raises:
      ConfigError: the file does not exist or cannot be read.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    try:
        with open(path, "rb", opener=opener) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"{path} is not a plain file")
            if about.st_size > most:
                raise ConfigError(f"{path} cannot be read: it has {about.st_size} bytes")
            return file.read()
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def complete_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines of an open file that others may have written,
    up to one that does not end within 64 MB.
    """
    with open(file.fileno(), "rb", closefd=False) as buffered:
        while (line := buffered.readline(_MAX_LINE)).endswith(b"\n"):
            yield line
