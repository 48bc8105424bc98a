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
from jaxrl_dist.errors import ConfigError, FileWarning
from jaxrl_dist.run import directories, locks, storage
from jaxrl_dist.spaces import Interface, Space

_RESERVED = 2**16  # bytes of an index, beside the spaces


def check_new(path: pathlib.Path) -> None:
    """Checks that a data set can get this name.

    Raises:
      ConfigError: something has it, it is a name of another format, or it does not lie in a
        writable directory.
    """
    prefix = formats.prefix_of(str(path))
    if prefix is not None:
        raise ConfigError(
            f"{path} is not a directory: `jaxrl-dist data DIR -o {path}` makes one of "
            f"{formats.FORMATS[prefix].title} of it"
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
    """The name of a directory that is to be made, kept from other processes until it is closed."""

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
        """Gives the directory its name or, if that has been taken meanwhile,
        the first free one, which it says.

        Raises:
          OSError: the disk fails.
        """
        wanted = self.path
        self.path = directories.commit_new(self.temporary, self.path)
        if self.path != wanted:
            text = (
                f"{wanted} has appeared while its data set was written, which is in {self.path} now"
            )
            warnings.warn(text, FileWarning, stacklevel=2)

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
        self._kinds = kinds
        parts = {name: spaces.leaves(space) for name, space in kinds.items()}
        self._parts = {
            (name, part): kind for name, space in parts.items() for part, kind in space.items()
        }
        self._interface = files.interface_to_json(interface)
        self._files = dict[tuple[str, str], FileIO]()
        try:
            with storage.naming(place.path):
                for name, part in self._parts:
                    self._files[name, part] = _opened(
                        place.temporary / files.file_of(name, part), part
                    )
                self._heads()
                # so that a full disk has room for it
                reserve = _RESERVED + len(json.dumps(self._interface, indent=2))
                (place.temporary / files.INDEX).write_bytes(bytes(reserve))
        except BaseException:
            self.close()
            raise

    def append(self, columns: Mapping[str, Any]) -> None:
        """Appends rows to all arrays. Raises ``OSError`` if the disk is full;
        the directory is then as before.
        """
        arrays = {
            (name, part): x
            for name, tree in columns.items()
            for part, x in spaces.leaves(tree).items()
        }
        for array, file in self._files.items():
            with storage.naming(self.place.path):
                _write(file, np.ascontiguousarray(arrays[array]).data.cast("B"))
        self.rows += len(next(iter(arrays.values())))

    def commit(self, about: Mapping[str, Any]) -> None:
        """Gives the directory its name; ``about`` is more for the index, in JSON.
        Raises as ``append``.
        """
        folder = self.place.temporary
        with storage.naming(self.place.path):
            self._heads()
            for file in self._files.values():
                file.close()
            digests = directories.digests(folder, without=[files.INDEX])
            content = {
                "format": files.FORMAT,
                **about,
                "interface": self._interface,
                "files": digests,
            }
            with FileIO(folder / files.INDEX, "r+") as index:
                _write(
                    index,
                    memoryview((json.dumps(content, indent=2, allow_nan=False) + "\n").encode()),
                )
                index.truncate()
            self.place.commit()

    def close(self) -> None:
        """Deletes what has not got its name."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self.place.close()

    def _heads(self) -> None:
        """Writes the header of each array, which is as long for any number of rows,
        and cuts what follows them.
        """
        for (name, part), file in self._files.items():
            kind = self._parts[name, part]
            shape = (self.rows, *kind.shape)
            descr = np.lib.format.dtype_to_descr(kind.dtype)
            file.seek(0)
            np.lib.format.write_array_header_1_0(
                file, {"descr": descr, "fortran_order": False, "shape": shape}
            )
            file.seek(math.prod(shape) * kind.dtype.itemsize, 1)
            file.truncate()


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
            text = f"the part {shown(part)} has a name of {len(part)} letters, too many for a file; shorten it"
            raise ConfigError(text) from None
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
    """Makes the directory in which ``path`` grows, or empties what a killed process has left of it.

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
            f"another process writes {path}; a data set needs a directory of its own"
        ) from None
    except OSError:  # some cluster file systems have no locks
        pass
    left = list(folder.iterdir())
    if foreign := [
        x for x in left if not (x.is_file() and (x.name == files.INDEX or x.suffix == ".npy"))
    ]:
        os.close(lock)
        raise ConfigError(
            f"{path} cannot be written: {foreign[0]} is not of a data set; move it elsewhere"
        )
    for file in left:
        file.unlink()
    return lock


def write(
    path: str | pathlib.Path | Place,
    columns: Mapping[str, Any],
    kinds: Mapping[str, Space],
    interface: Interface,
    about: Mapping[str, Any],
) -> pathlib.Path:
    """Writes arrays as a new directory, whole or not at all, and returns its path, as
    ``Place.commit`` chooses it.

    Other arguments and errors are those of ``Place`` and ``Writer``.
    """
    if isinstance(path, Place):
        place = path
    else:
        place = Place(path)
    with contextlib.closing(Writer(place, kinds, interface)) as writer:
        writer.append(columns)
        writer.commit(about)
    return place.path
