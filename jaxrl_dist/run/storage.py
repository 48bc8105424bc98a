"""Files of a run, and files that a user asks for: written completely or not at all,
and read with care, as others may have written them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import IO, Any, TypeAlias

from jaxrl_dist.config.train import CONFIG_FILE
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run.directories import sync

Json: TypeAlias = Any
"""A value in JSON, which others may have written."""
_MAX_JSON = _MAX_LINE = 2**26


def check_run_dir(run_dir: pathlib.Path) -> None:
    """Checks that a directory is a run directory.

    Raises:
      ConfigError: it is not.
    """
    if not run_dir.is_dir():
        problem = "is not a directory" if run_dir.exists() else "does not exist"
        path, at, number = str(run_dir).rpartition("@")
        if at and pathlib.Path(path).is_dir():  # as players of `match` are named
            raise ConfigError(
                f"{run_dir} is not a run directory: it {problem}; name a checkpoint of {path} with "
                f"--checkpoint {number}"
            )
        raise ConfigError(f"{run_dir} is not a run directory: it {problem}")
    if not (run_dir / CONFIG_FILE).exists():
        if inner := runs_in(run_dir):
            raise ConfigError(
                f"{run_dir} is not a run directory: it has no {CONFIG_FILE}; name a run in it, "
                f"such as {inner[0]}"
            )
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")


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
            f"{path} is a link, and links in a run directory are not followed; replace it with its "
            "target"
        )


def check_no_links(folder: pathlib.Path) -> None:
    """As ``check_no_link``, for a folder and all in it."""
    check_no_link(folder)
    for path in folder.glob("*"):
        check_no_link(path)


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
      ConfigError: the directory is missing or read-only, or the path is a directory.
    """
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a directory")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no directory {path.parent}")
    if not path.exists() and not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: the directory {path.parent} is read-only")


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


def read_json(path: pathlib.Path) -> Json:
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
