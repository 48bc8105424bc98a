"""Writes data sets: the directories that ``data.files`` reads, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from io import FileIO
from typing import Any

import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.checks import shown
from jaxrl_dist.data import files, formats
from jaxrl_dist.envs.wire.spaces import interface_to_json
from jaxrl_dist.errors import ConfigError, FileWarning
from jaxrl_dist.run import directories, locks, storage
from jaxrl_dist.spaces import Interface, Space
from jaxrl_dist.types import PyTree

_RESERVED = 2**16  # bytes of an index, besides the spaces


def check_new(path: pathlib.Path) -> None:
    """Checks that a data set can get this name.

    Raises:
      ConfigError: something has it, it is a name of another format, or it does not lie in a
        writable directory.
    """
    prefix = formats.prefix_of(str(path))
    if prefix is not None:
        raise ConfigError(
            f"{path} is not a directory; make a data set of {formats.FORMATS[prefix].title} with "
            f"`jaxrl-dist data DIR -o {path}`"
        )
    if path.name == ".." or "\0" in path.name:
        raise ConfigError(f"{str(path)!r} has no name for a new directory; add one")
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists; a data set needs a new directory")
    above = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        problem = "is not writable" if above.is_dir() else "is not a directory"
        raise ConfigError(f"{path} cannot be written: {above} {problem}")


class Place:
    """The name of a new directory, which other processes cannot take until it is closed."""

    def __init__(self, path: str | pathlib.Path) -> None:
        """Makes the directories above it.

        Raises:
          ConfigError: the directory exists, or cannot be written, or another process writes it.
          OSError: the disk is full.
        """
        self.path = path = pathlib.Path(path)
        check_new(path)
        with _placing(path, f"there is no directory {path.parent}, and none can be made"):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = path.with_name(f".{path.name}.new")
        """Where the directory grows until it is complete."""
        self._lock: int | None = _claimed(self.temporary, path)

    def commit(self) -> None:
        """Gives the directory its name, or the first free one, with a warning, if that has been
        taken.

        Raises:
          OSError: the disk fails.
        """
        wanted = self.path
        self.path = directories.commit_new(self.temporary, self.path)
        if self.path != wanted:
            warnings.warn(
                f"{wanted} appeared while its data set was written, so the data set is in "
                f"{self.path}",
                FileWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Deletes what has not got its name."""
        if self._lock is not None:
            directories.delete(self.temporary)
            os.close(self._lock)
        self._lock = None


class Writer:
    """Writes a new directory, whole or not at all, whose arrays grow by what is appended."""

    def __init__(self, place: Place, kinds: Mapping[str, Space], interface: Interface) -> None:
        """Closes the place at the end; ``kinds`` are the spaces of the arrays, by name.

        Raises:
          OSError: the disk is full.
        """
        self.place = place
        self.rows = 0
        self._parts = _leaves(kinds)
        self._interface = interface_to_json(interface)
        self._files = dict[tuple[str, str], FileIO]()
        try:
            with storage.naming(place.path):
                for name, part in self._parts:
                    file = place.temporary / files.file_of(name, part)
                    self._files[name, part] = _opened(file, part)
                self._write_headers()
                # A disk that is full at the end has room for the index.
                reserve = _RESERVED + len(json.dumps(self._interface, indent=2))
                (place.temporary / files.INDEX).write_bytes(bytes(reserve))
        except BaseException:
            self.close()
            raise

    def append(self, columns: Mapping[str, PyTree]) -> None:
        """Appends rows to all arrays.

        Raises:
          OSError: the disk is full; the directory is then as before.
        """
        arrays = _leaves(columns)
        for key, file in self._files.items():
            with storage.naming(self.place.path):
                _write(file, np.ascontiguousarray(arrays[key]).data.cast("B"))
        self.rows += len(next(iter(arrays.values())))

    def commit(self, about: Mapping[str, storage.Json]) -> None:
        """Gives the directory its name; ``about`` is more for the index, in JSON.

        Raises:
          OSError: the disk is full.
        """
        folder = self.place.temporary
        with storage.naming(self.place.path):
            self._write_headers()
            for file in self._files.values():
                file.close()
            content = {
                "format": files.FORMAT,
                **about,
                "interface": self._interface,
                "files": directories.digests(folder, without=[files.INDEX]),
            }
            lines = json.dumps(content, indent=2, allow_nan=False) + "\n"
            with FileIO(folder / files.INDEX, "r+") as index:
                _write(index, memoryview(lines.encode()))
                index.truncate()
            self.place.commit()

    def close(self) -> None:
        """Deletes what has not got its name."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self.place.close()

    def _write_headers(self) -> None:
        """Writes the header of each array, which is as long for any number of rows, and cuts its
        file after the last row.
        """
        for (name, part), file in self._files.items():
            kind = self._parts[name, part]
            shape = (self.rows, *kind.shape)
            descr = np.lib.format.dtype_to_descr(kind.dtype)
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, header)
            file.seek(math.prod(shape) * kind.dtype.itemsize, 1)
            file.truncate()


def _leaves(trees: Mapping[str, PyTree]) -> dict[tuple[str, str], Any]:
    """Returns the leaves of columns, or of their spaces, by column and part."""
    return {
        (name, part): leaf
        for name, tree in trees.items()
        for part, leaf in spaces.leaves(tree).items()
    }


def _opened(file: pathlib.Path, part: str) -> FileIO:
    """Opens the new file of an array.

    Raises:
      ConfigError: the name of the array's part is too long.
      OSError: it cannot be opened.
    """
    try:
        return FileIO(file, "x")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(
                f"the part {shown(part)} has a name of {len(part)} letters, too many for a file; "
                "shorten it"
            ) from None
        raise


def _write(file: FileIO, content: memoryview) -> None:
    """Writes all of it, without a buffer that a full disk would leave half written."""
    while content:
        content = content[file.write(content) :]


@contextlib.contextmanager
def _placing(path: pathlib.Path, problem: str) -> Iterator[None]:
    """Says why a directory cannot be made as a ``ConfigError``, unless the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"{path} cannot be written: {problem}: {error.strerror}") from None


def _claimed(folder: pathlib.Path, path: pathlib.Path) -> int:
    """Makes the directory in which ``path`` grows, or empties one that a killed process has left.

    Returns:
      A file descriptor that locks it against other processes until it is closed.

    Raises:
      ConfigError: it cannot be made, or another process has locked it.
    """
    with _placing(path, f"the directory {folder} cannot be made"):
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        locks.lock(lock)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"another process is writing {path}; name a directory of its own for each data set"
        ) from None
    except OSError:  # some cluster file systems have no locks
        pass
    leftovers = list(folder.iterdir())
    for file in leftovers:
        if not file.is_file() or not (file.name == files.INDEX or file.suffix == ".npy"):
            os.close(lock)
            raise ConfigError(
                f"{path} cannot be written: {file} does not belong to a data set; move it elsewhere"
            )
    for file in leftovers:
        file.unlink()
    return lock


def write(
    path: str | pathlib.Path | Place,
    columns: Mapping[str, PyTree],
    kinds: Mapping[str, Space],
    interface: Interface,
    about: Mapping[str, storage.Json],
) -> pathlib.Path:
    """Writes arrays as a new directory, whole or not at all, and returns its path, as
    ``Place.commit`` chooses it.

    Other arguments and errors are as for ``Place`` and ``Writer``.
    """
    place = path if isinstance(path, Place) else Place(path)
    with contextlib.closing(Writer(place, kinds, interface)) as writer:
        writer.append(columns)
        writer.commit(about)
    return place.path
