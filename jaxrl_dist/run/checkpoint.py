"""Checkpoints: arrays in orbax's format and JSON, a checksum of every file, and nothing that runs when it is read.

A run directory keeps one in ``checkpoints/<env steps>`` for each time that it saved its whole state, and in
``checkpoints/final`` what it has trained. Each is a directory of its own::

    arrays/        orbax's files: arrays by name, such as state/variables/params/policy/Dense_0/kernel
    run.json       counts, times, config and versions; not in final
    manifest.json  the SHA-256 of each of these files; a changed bit passes orbax unseen

It is written under another name, brought to the disk, and then renamed: what has the name is whole. What it takes the
place of keeps a third name until then, by which it is found.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_dist.errors import CheckpointError, ConfigError, FileWarning
from jaxrl_dist.machine import memory_size
from jaxrl_dist.run.files import CHECKPOINTS, read_json, sync
from jaxrl_dist.types import Checkpoint, PyTree, Variables

FINAL = "final"
ARRAYS, RUN, MANIFEST = "arrays", "run.json", "manifest.json"
FORMAT = 1
"""Of a checkpoint; a reader refuses a number that it does not know."""
_MAX_FILES = 10_000
_SLACK = 2**16  # bytes of what is no array
_HIDDEN = re.compile(r"\.([0-9]+|final)\.(new|kept|old)")
"""A checkpoint that is being written, that is to be replaced by the new one, or that is being deleted."""


# --- Writing ------------------------------------------------------------------------------------------


def save_variables(run_dir: str | pathlib.Path, variables: Variables) -> None:
    """Writes what a run has trained into its directory.

    Raises:
      ConfigError: its ``checkpoints`` is a link.
      OSError: the directory cannot be written.
    """
    _write(_own_folder(run_dir) / FINAL, variables, None)


class Saver:
    """Writes a run's checkpoints in a thread of its own, and keeps the newest of them and the best.

    The best is the one whose report had the highest mean return of training episodes.
    """

    def __init__(self, run_dir: pathlib.Path, keep: int) -> None:
        """Takes over from an earlier session, if there was one.

        Raises:
          ConfigError: the run directory's ``checkpoints`` is a link.
          OSError: what an earlier session left there cannot be cleared away.
        """
        self._folder, self._keep = _own_folder(run_dir), keep
        for path in self._folder.glob(".*"):  # of a session that was killed as it wrote or deleted
            if (name := _HIDDEN.fullmatch(path.name)) is None:
                continue
            if name[2] == "kept" and not os.path.lexists(path.with_name(name[1])):
                path.rename(path.with_name(name[1]))
            else:
                _delete(path)
        self._returns: dict[int, float | None] = {}
        for path in saved(run_dir):
            with contextlib.suppress(ConfigError, LookupError, TypeError, OverflowError):
                self._returns[_number(path)] = _finite(read_json(path / RUN)["episode_return"])
        _remove(self._folder / FINAL)  # of a session that came to its end, and will be gone beyond
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: concurrent.futures.Future[None] | None = None

    def busy(self) -> bool:
        """Whether a checkpoint is still being written; if it failed, warns."""
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            if (error := writing.exception()) is not None:
                warnings.warn(f"the run goes on without a checkpoint: {error}", FileWarning, stacklevel=2)
        return self._writing is not None

    def save(self, checkpoint: Checkpoint, about: Mapping[str, Any], episode_return: float | None) -> None:
        """Begins to write a checkpoint, as soon as the one before is written.

        Args:
          about: of the run, for ``run.json``.
        """
        content = {**about, "progress": checkpoint.progress, "episode_return": episode_return}
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
            self.busy()
        self._writing = self._thread.submit(self._save, checkpoint, content)

    def _save(self, checkpoint: Checkpoint, content: dict[str, Any]) -> None:
        steps = checkpoint.env_steps
        _write(self._folder / f"{steps:012d}", checkpoint._replace(progress={}), content)
        self._returns[steps] = _finite(content["episode_return"])
        there = [_number(path) for path in saved(self._folder.parent)]
        # Later ones are of a session that this one did not go on from: they were damaged.
        ours = [number for number in there if number <= steps]
        for number in set(there) - _kept(self._returns, ours, self._keep):
            _remove(self._folder / f"{number:012d}")

    def finish(self) -> None:
        """Waits until all is written.

        Raises:
          OSError: the last checkpoint could not be written.
        """
        writing, self._writing = self._writing, None  # so that no one else tells of its error
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Ends the thread, once it has written what it is at."""
        self._thread.shutdown()
        self.busy()


def _kept(returns: Mapping[int, float | None], numbers: Sequence[int], keep: int) -> set[int]:
    """Which checkpoints are kept, of those with these numbers, newest first: some of the newest, and the best."""
    known = [(value, number) for number in numbers if (value := returns.get(number)) is not None]
    return {*numbers[:keep], *(number for _, number in sorted(known)[-1:])}


def _finite(value: Any) -> float | None:
    """A finite number; None for anything else, such as another might have written."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _own_folder(run_dir: str | pathlib.Path) -> pathlib.Path:
    """The directory of a run's checkpoints, in which files will be deleted.

    Raises:
      ConfigError: it is a link, and so perhaps not the run's own.
    """
    folder = pathlib.Path(run_dir, CHECKPOINTS)
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link; put a directory in its place")
    return folder


def _write(path: pathlib.Path, tree: PyTree, about: Mapping[str, Any] | None) -> None:
    """Writes a whole checkpoint or none; one of the same name is replaced."""
    import orbax.checkpoint as ocp  # here, not above: it takes half a second

    path = path.parent.resolve() / path.name  # absolute, for orbax; a link is replaced, not followed
    temporary, kept = (path.with_name(f".{path.name}.{state}") for state in ("new", "kept"))
    arrays = {name: np.asarray(leaf) for name, leaf in _named(tree).items()}
    try:
        _delete(temporary)
        temporary.mkdir(parents=True)
        _check_room(temporary / "room", sum(array.nbytes for array in arrays.values()))
        with _silence(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(temporary / ARRAYS, args=ocp.args.StandardSave(arrays))
        if about is not None:
            (temporary / RUN).write_text(json.dumps(about, indent=2), encoding="utf-8")
        files = {file.relative_to(temporary).as_posix(): _sha256(file) for file in _plain_files(temporary)}
        manifest = {"format": FORMAT, "sha256": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        for part in (*temporary.rglob("*"), temporary):
            sync(part)
        if os.path.lexists(path):
            _delete(kept)
            path.rename(kept)
        temporary.rename(path)
        sync(path.parent)
        _delete(kept)
    except Exception as error:  # orbax and tensorstore raise many kinds where a disk is full
        _delete(temporary)
        raise OSError(f"{path} cannot be written: {_first_line(error)}") from error


def _remove(path: pathlib.Path) -> None:
    """Deletes a checkpoint, if it is there, so that no half of it ever has its name."""
    doomed = path.with_name(f".{path.name}.old")
    _delete(doomed)
    with contextlib.suppress(FileNotFoundError):
        path.rename(doomed)
    _delete(doomed)


def _delete(path: pathlib.Path) -> None:
    """Deletes what has this name, as far as that is possible; of a link, the link alone."""
    shutil.rmtree(path, ignore_errors=True)  # it leaves alone what is no directory
    with contextlib.suppress(OSError):
        path.unlink()


def _check_room(path: pathlib.Path, size: int) -> None:
    """Asks the disk for so many bytes, and gives them back: orbax is not quiet when it finds none.

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


def load_variables(run_dir: str | pathlib.Path, like: Variables) -> Variables:
    """Reads what a run has trained, or has so far, into the structure of ``like`` (shapes and dtypes suffice).

    Raises:
      ConfigError: there is nothing, it cannot be read, or it is of another network.
    """
    final = pathlib.Path(run_dir, CHECKPOINTS, FINAL)
    if not pathlib.Path(run_dir).is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    if os.path.lexists(final):
        _verify(final, like)
        return _restore(final, like)

    def read(path: pathlib.Path) -> Variables:
        _verify(path, None)
        return _restore(path, like, "state/variables/")

    try:
        return _newest(run_dir, read)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def load(run_dir: pathlib.Path, like: Checkpoint, check: Callable[[dict[str, Any]], bool]) -> Checkpoint:
    """Reads the newest checkpoint of a run that is whole, with a warning for each newer one that is not.

    Args:
      like: shapes and dtypes.
      check: looks at ``run.json`` first, and says whether there is a replay memory. A ``ConfigError`` of it comes out
        as it is; anything else that goes wrong is the checkpoint's fault.

    Raises:
      CheckpointError: none can be read.
    """

    def read(path: pathlib.Path) -> Checkpoint:
        _verify(path, like)
        about = _read_json(path / RUN)
        try:
            with_memory = check(about)
        except ConfigError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _DamageError(f"{path / RUN} is damaged: {type(error).__name__}: {_first_line(error)}") from None
        wanted = like if with_memory else like._replace(state=like.state._replace(memory=()))
        return _restore(path, wanted._replace(progress={}))._replace(progress=about["progress"])

    return _newest(run_dir, read)


def saved(run_dir: str | pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints in a run directory, whole or not, newest first."""
    folder = pathlib.Path(run_dir, CHECKPOINTS)
    if folder.is_symlink():
        return []
    there = [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]
    for path in folder.glob(".[0-9]*.kept"):  # of a session that was killed as it replaced one
        if path.name[1:-5].isdecimal() and not os.path.lexists(path.with_name(path.name[1:-5])):
            there.append(path)
    return sorted(there, key=_number, reverse=True)


def _number(path: pathlib.Path) -> int:
    return int(path.name.removeprefix(".").removesuffix(".kept"))


def _newest(run_dir: str | pathlib.Path, read: Callable[[pathlib.Path], Any]) -> Any:
    """What ``read`` makes of the newest checkpoint that it can read.

    Raises:
      CheckpointError: there is none.
    """
    problems = []
    for path in saved(run_dir):
        try:
            found = read(path)
        except _DamageError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}; {path} is used instead", FileWarning, stacklevel=3)
        return found
    if problems:
        more = f" (and {len(problems) - 1} older ones are no better)" if len(problems) > 1 else ""
        raise CheckpointError(f"{problems[0]}{more}")
    again = f"its run has saved no checkpoint, and can be begun again by train --config {run_dir}"
    raise CheckpointError(f"{run_dir} holds no trained variables: {again}")


class _DamageError(ConfigError):
    """A checkpoint is not what was written, or of another run."""


def _verify(path: pathlib.Path, like: PyTree) -> None:
    """Checks that the files of a checkpoint are those that were written, all of them and no others.

    Args:
      like: shapes and dtypes of what it holds, by which its size is bounded; None: it is not.

    Raises:
      ConfigError: one is missing, has changed or has come, or is no plain file.
    """
    files = _plain_files(path)
    room = None if like is None else 2 * sum(_nbytes(leaf) for leaf in jax.tree.leaves(like)) + 2**26
    with _reading(path):
        size = sum(file.stat().st_size for file in files)
    if room is not None and size > room:
        raise _DamageError(f"{path} is damaged: it has {size} bytes, of which its arrays explain at most {room}")
    manifest = _read_json(path / MANIFEST)
    digests = manifest.get("sha256")
    if manifest.get("format") != FORMAT or not isinstance(digests, dict):
        raise _DamageError(f"{path / MANIFEST} is damaged: it is no list of format {FORMAT}")
    there = {file.relative_to(path).as_posix(): file for file in files}
    del there[MANIFEST]
    for name in sorted(digests.keys() | there.keys()):
        if name not in there:
            raise _DamageError(f"{path / name} is damaged: No such file or directory")
        if name not in digests:
            raise _DamageError(f"{path / name} is damaged: it does not belong there")
        if _sha256(there[name]) != digests[name]:
            raise _DamageError(f"{path / name} is damaged: it is not what was written")


def _plain_files(path: pathlib.Path) -> list[pathlib.Path]:
    """All files below a directory, none of which may be a link, a pipe or a device."""
    files, folders = [], [path]
    with _reading(path):
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise _DamageError(f"{path} is damaged: it is no directory")
        while folders:
            for entry in list(os.scandir(folders.pop())):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(pathlib.Path(entry))
                elif entry.is_file(follow_symlinks=False):
                    files.append(pathlib.Path(entry))
                else:
                    raise _DamageError(f"{entry.path} is damaged: it is no plain file")
                if len(files) + len(folders) > _MAX_FILES:
                    raise _DamageError(f"{path} is damaged: it has more than {_MAX_FILES} files")
    return files


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads an object from a file of a checkpoint."""
    try:
        content = read_json(path)
    except ConfigError as error:
        raise _DamageError(str(error)) from None
    if not isinstance(content, dict):
        raise _DamageError(f"{path} is damaged: it is no object")
    return content


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Makes an error of the disk one of the checkpoint, so that the one before may be used instead."""
    try:
        yield
    except OSError as error:
        raise _DamageError(f"{path} is damaged: {error.strerror}") from None


def _restore(path: pathlib.Path, like: PyTree, prefix: str | None = None) -> Any:
    """Reads arrays into the structure of ``like``.

    Args:
      prefix: of the names of these arrays, where others are to be left alone; None: there are no others.
    """
    import orbax.checkpoint as ocp

    path = path.resolve() / ARRAYS
    wanted = {(prefix or "") + name: _shape(leaf) for name, leaf in _named(like).items()}
    needed = sum(_nbytes(leaf) for leaf in jax.tree.leaves(like))
    if needed > (there := memory_size()):
        raise ConfigError(f"{path} needs {needed / 1e9:.1f} GB, and {there / 1e9:.1f} GB are there")
    try:
        with _silence(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(path).item_metadata.tree
            found = {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in tree.items()}
            for name in sorted(wanted if prefix else wanted.keys() | found.keys()):
                if wanted.get(name) != found.get(name):
                    raise _DamageError(
                        f"{path.parent} holds another network: {name} is {_describe(found.get(name))} there and "
                        f"{_describe(wanted.get(name))} here"
                    )
            blank = {name: np.zeros(shape, dtype) for name, (shape, dtype) in wanted.items()}
            how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
            args = ocp.args.PyTreeRestore(blank, restore_args=how, partial_restore=prefix is not None)
            arrays = checkpointer.restore(path, args=args)
    except ConfigError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds for a damaged file
        raise _DamageError(f"{path} cannot be read: {_first_line(error)}") from error
    empty = {name: np.zeros(*_shape(leaf)) for name, leaf in _named(like, empty=True).items()}
    named = {**empty, **{name: np.asarray(arrays[(prefix or "") + name]) for name in _named(like)}}
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in _names(like)])


# --- Both ---------------------------------------------------------------------------------------------


def _names(tree: PyTree) -> list[str]:
    """The path of each array of a tree, such as ``params/policy/Dense_0/kernel``."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def _named(tree: PyTree, *, empty: bool = False) -> dict[str, Any]:
    """The arrays of a tree by their paths; those without a single number, which orbax does not take, if ``empty``."""
    leaves = zip(_names(tree), jax.tree.leaves(tree), strict=True)
    return {name: leaf for name, leaf in leaves if (0 in _shape(leaf)[0]) == empty}


def _shape(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    return tuple(np.shape(leaf)), np.dtype(leaf.dtype if hasattr(leaf, "dtype") else type(leaf))


def _nbytes(leaf: Any) -> int:
    shape, dtype = _shape(leaf)
    return int(np.prod(shape, dtype=object)) * dtype.itemsize


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps orbax from logging the traceback of what it raises as well."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _sha256(file: pathlib.Path) -> str:
    with _reading(file), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _describe(entry: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "missing" if entry is None else f"{entry[1]}{list(entry[0])}"
