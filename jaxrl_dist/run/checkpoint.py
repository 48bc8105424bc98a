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
import ctypes
import json
import math
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxrl_dist.errors import CheckpointError, ConfigError, FileWarning
from jaxrl_dist.run import arrays, directories
from jaxrl_dist.run.arrays import first_line
from jaxrl_dist.run.directories import DamageError
from jaxrl_dist.run.files import CHECKPOINTS, read_json
from jaxrl_dist.types import Checkpoint, PyTree, Variables

FINAL = "final"
ARRAYS, RUN, MANIFEST = "arrays", "run.json", "manifest.json"
FORMAT = 1
"""Of a checkpoint; a reader refuses a number that it does not know."""
REPLAY_LIMIT = 2 * 10**9
"""Bytes of a replay memory that checkpoints hold without being told to."""
_HIDDEN = re.compile(r"\.([0-9]+|final)\.(new|kept|old)")
"""A checkpoint that is being written, that is to be replaced by the new one, or that is being deleted."""


# --- Writing ------------------------------------------------------------------------------------------


def keeps_replay(asked: bool | None, memory: PyTree) -> bool:
    """Whether checkpoints hold the replay memory.

    Args:
      asked: ``Train.checkpoint_replay``.
      memory: of a train state, or its shapes and dtypes; no arrays: nothing is replayed.

    Raises:
      ConfigError: they are not to, and the run has no replay memory.
    """
    leaves = jax.tree.leaves(memory)
    if asked is None:
        return arrays.nbytes(leaves) < REPLAY_LIMIT
    if not (asked or leaves):
        raise ConfigError("--no-checkpoint-replay does nothing without a replay memory")
    return asked


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

    def __init__(self, run_dir: pathlib.Path, keep: int, about: Mapping[str, Any] | None = None) -> None:
        """Takes over from an earlier session, if there was one.

        Args:
          about: of the run, for each ``run.json``.

        Raises:
          ConfigError: the run directory's ``checkpoints`` is a link.
          OSError: what an earlier session left there cannot be cleared away.
        """
        self._folder, self._keep, self._about = _own_folder(run_dir), keep, about or {}
        self.newest: int | None = None
        """Env steps of the newest checkpoint that is on the disk, if one of this session is."""
        for path in self._folder.glob(".*"):  # of a session that was killed as it wrote or deleted
            if (name := _HIDDEN.fullmatch(path.name)) is None:
                continue
            if name[2] == "kept" and not os.path.lexists(path.with_name(name[1])):
                path.rename(path.with_name(name[1]))
            else:
                directories.delete(path)
        self._returns: dict[int, float | None] = {}
        for path in saved(run_dir):
            with contextlib.suppress(ConfigError, LookupError, TypeError, OverflowError):
                self._returns[_number(path)] = _finite(read_json(path / RUN)["episode_return"])
        directories.remove(self._folder / FINAL)  # of a session that came to its end, and will be gone beyond
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: concurrent.futures.Future[None] | None = None

    def busy(self) -> bool:
        """Whether a checkpoint is still being written; if it failed, warns."""
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            if (error := writing.exception()) is not None:
                warnings.warn(f"the run goes on without a checkpoint: {error}", FileWarning, stacklevel=2)
        return self._writing is not None

    def save(self, checkpoint: Checkpoint, episode_return: float | None) -> None:
        """Begins to write a checkpoint, as soon as the one before is written."""
        content = {**self._about, "progress": checkpoint.progress, "episode_return": episode_return}
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
            self.busy()
        self._writing = self._thread.submit(self._save, checkpoint, content)
        self._thread.submit(_give_back_memory)

    def _save(self, checkpoint: Checkpoint, content: dict[str, Any]) -> None:
        steps = checkpoint.env_steps
        _write(self._folder / f"{steps:012d}", checkpoint._replace(progress={}), content)
        self.newest = steps
        self._returns[steps] = _finite(content["episode_return"])
        there = [_number(path) for path in saved(self._folder.parent)]
        # Later ones are of a session that this one did not go on from: they were damaged.
        ours = [number for number in there if number <= steps]
        for number in set(there) - _kept(self._returns, ours, self._keep):
            directories.remove(self._folder / f"{number:012d}")

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


def _give_back_memory() -> None:
    """Returns to the system what the C library keeps of the copies that were saved, in an arena for each thread."""
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _kept(returns: Mapping[int, float | None], numbers: Sequence[int], keep: int) -> set[int]:
    """Which checkpoints are kept, of those with these numbers, newest first: some of the newest, and the best."""
    known = [(value, number) for number in numbers if (value := returns.get(number)) is not None]
    return {*numbers[:keep], *(number for _, number in sorted(known)[-1:])}


def _finite(value: Any) -> float | None:
    """A finite number; None for anything else, such as another might have written."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _own_folder(run_dir: str | pathlib.Path) -> pathlib.Path:
    """The directory of a run's checkpoints, in which files will be deleted; it is made if it does not exist.

    Raises:
      ConfigError: it is a link, and so perhaps not the run's own.
      OSError: it cannot be made.
    """
    folder = pathlib.Path(run_dir, CHECKPOINTS)
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link; put a directory in its place")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(path: pathlib.Path, tree: PyTree, about: Mapping[str, Any] | None) -> None:
    """Writes a whole checkpoint or none; one of the same name is replaced."""
    path = path.parent.resolve() / path.name  # absolute, for orbax; a link is replaced, not followed
    temporary, kept = (path.with_name(f".{path.name}.{state}") for state in ("new", "kept"))
    named = arrays.named_arrays(tree)
    try:
        directories.delete(temporary)
        temporary.mkdir()  # not its parents: someone may have removed or renamed the run directory
        directories.check_room(temporary / "room", arrays.nbytes(named))
        arrays.save(temporary / ARRAYS, named)
        if about is not None:
            (temporary / RUN).write_text(json.dumps(about, indent=2), encoding="utf-8")
        manifest = {"format": FORMAT, "sha256": directories.digests(temporary)}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        directories.put(temporary, path, kept)
    except Exception as error:  # orbax and tensorstore raise many kinds where a disk is full
        directories.delete(temporary)
        raise OSError(f"{path} cannot be written: {first_line(error)}") from error


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
        return arrays.restore(final / ARRAYS, like)

    def read(path: pathlib.Path) -> Variables:
        _verify(path, None)
        return arrays.restore(path / ARRAYS, like, "state/variables/")

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
            raise DamageError(f"{path / RUN} is damaged: {type(error).__name__}: {first_line(error)}") from None
        wanted = like if with_memory else like._replace(state=like.state._replace(memory=()))
        return arrays.restore(path / ARRAYS, wanted._replace(progress={}))._replace(progress=about["progress"])

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
        except DamageError as error:
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


def _verify(path: pathlib.Path, like: PyTree) -> None:
    """Checks that the files of a checkpoint are those that were written, all of them and no others.

    Args:
      like: shapes and dtypes of what it holds, by which its size is bounded; None: it is not.

    Raises:
      ConfigError: one is missing, has changed or has come, or is no plain file.
    """
    files = directories.plain_files(path)
    room = None if like is None else 2 * arrays.nbytes(like) + 2**26
    with directories.reading(path):
        size = sum(file.stat().st_size for file in files)
    if room is not None and size > room:
        raise DamageError(f"{path} is damaged: it has {size} bytes, of which its arrays explain at most {room}")
    manifest = _read_json(path / MANIFEST)
    digests = manifest.get("sha256")
    if manifest.get("format") != FORMAT or not isinstance(digests, dict):
        raise DamageError(f"{path / MANIFEST} is damaged: it is no list of format {FORMAT}")
    there = {file.relative_to(path).as_posix(): file for file in files}
    del there[MANIFEST]
    for name in sorted(digests.keys() | there.keys()):
        if name not in there:
            raise DamageError(f"{path / name} is damaged: No such file or directory")
        if name not in digests:
            raise DamageError(f"{path / name} is damaged: it does not belong there")
        if directories.sha256(there[name]) != digests[name]:
            raise DamageError(f"{path / name} is damaged: it is not what was written")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads an object from a file of a checkpoint."""
    try:
        content = read_json(path)
    except ConfigError as error:
        raise DamageError(str(error)) from None
    if not isinstance(content, dict):
        raise DamageError(f"{path} is damaged: it is no object")
    return content
