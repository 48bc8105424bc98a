"""Checkpoints: arrays in orbax's format, JSON, and a checksum of every file. Reading one executes no code.

A run directory keeps checkpoints of the whole state in ``checkpoints/<env steps>``, and the trained variables in
``checkpoints/final``. Each checkpoint is a directory::

    arrays/        orbax's files: arrays by name, such as state/variables/params/policy/Dense_0/kernel
    run.json       counts, times, config and versions; not in final
    manifest.json  the SHA-256 of each of these files; orbax does not notice a changed bit

A checkpoint is written under a temporary name, synced to disk and then renamed, so a checkpoint with its final name is
complete. The checkpoint that it replaces gets a third name until then, under which a reader still finds it.
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
from jaxrl_dist.run import arrays, directories, manifest
from jaxrl_dist.run.arrays import first_line
from jaxrl_dist.run.directories import DamageError
from jaxrl_dist.run.files import CHECKPOINTS, members_of
from jaxrl_dist.run.text import read_json
from jaxrl_dist.types import Checkpoint, PyTree, Variables

FINAL = "final"
ARRAYS, RUN = "arrays", "run.json"
REPLAY_LIMIT = 2 * 10**9
"""Bytes below which checkpoints hold the replay memory by default."""
_HIDDEN = re.compile(r"\.([0-9]+|final)\.(new|kept|old)")
"""Name of a checkpoint that is being written (new), replaced (kept) or deleted (old)."""


# --- Writing ------------------------------------------------------------------------------------------


def keeps_replay(asked: bool | None, memory: PyTree) -> bool:
    """Returns True if checkpoints hold the replay memory.

    Args:
      asked: ``Train.checkpoint_replay``.
      memory: a train state's replay memory, or its shapes and dtypes; no arrays: the algorithm replays nothing.

    Raises:
      ConfigError: ``asked`` is False, and the run has no replay memory.
    """
    leaves = jax.tree.leaves(memory)
    if asked is None:
        return arrays.nbytes(leaves) < REPLAY_LIMIT
    if not (asked or leaves):
        raise ConfigError("--no-checkpoint-replay does nothing without a replay memory")
    return asked


def save_variables(run_dir: str | pathlib.Path, variables: Variables) -> None:
    """Writes a run's trained variables into its directory.

    Raises:
      ConfigError: the directory's ``checkpoints`` is a link.
      OSError: the directory cannot be written.
    """
    _write(_own_folder(run_dir) / FINAL, variables, None)


class Saver:
    """Writes a run's checkpoints in a background thread, and keeps the newest ones and the best.

    The best checkpoint is the one whose report had the highest mean return of training episodes.
    """

    def __init__(self, run_dir: pathlib.Path, keep: int, about: Mapping[str, Any] | None = None) -> None:
        """Takes over from an earlier session, if there was one.

        Args:
          about: facts of the run for each ``run.json``, such as its config.

        Raises:
          ConfigError: the run directory's ``checkpoints`` is a link.
          OSError: leftovers of an earlier session cannot be deleted.
        """
        self._folder, self._keep, self._about = _own_folder(run_dir), keep, about or {}
        self.newest: int | None = None
        """Env steps of this session's newest checkpoint on disk; None: there is none yet."""
        for path in self._folder.glob(".*"):  # left by a session killed while writing or deleting
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
        directories.remove(self._folder / FINAL)  # of a finished session, whose run trains further
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: concurrent.futures.Future[None] | None = None

    def busy(self) -> bool:
        """Returns True while a checkpoint is being written; warns if writing failed."""
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            if (error := writing.exception()) is not None:
                warnings.warn(f"the run goes on without a checkpoint: {error}", FileWarning, stacklevel=2)
        return self._writing is not None

    def save(self, checkpoint: Checkpoint, episode_return: float | None) -> None:
        """Starts writing a checkpoint, once the previous one is written."""
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
        # Later checkpoints are from an earlier session: they were damaged, so the run was resumed from an older one.
        ours = [number for number in there if number <= steps]
        for number in set(there) - _kept(self._returns, ours, self._keep):
            directories.remove(self._folder / f"{number:012d}")

    def finish(self) -> None:
        """Waits until all checkpoints are written.

        Raises:
          OSError: the last checkpoint could not be written.
        """
        writing, self._writing = self._writing, None  # or ``busy`` would warn of the error, too
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Ends the thread, once it has written the current checkpoint."""
        self._thread.shutdown()
        self.busy()


def _give_back_memory() -> None:
    """Returns the memory of saved copies to the system; the C library would keep it in the thread's arena."""
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _kept(returns: Mapping[int, float | None], numbers: Sequence[int], keep: int) -> set[int]:
    """Returns the numbers of the checkpoints to keep, the newest and the best; ``numbers`` come newest first."""
    known = [(value, number) for number in numbers if (value := returns.get(number)) is not None]
    return {*numbers[:keep], *(number for _, number in sorted(known)[-1:])}


def _finite(value: Any) -> float | None:
    """Returns a finite number as it is, None for anything else: others may have written the file."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _own_folder(run_dir: str | pathlib.Path) -> pathlib.Path:
    """Returns the directory of a run's checkpoints, in which files will be deleted; creates it if it does not exist.

    Raises:
      ConfigError: the directory is a link, and so may belong to someone else.
      OSError: the directory cannot be created.
    """
    folder = pathlib.Path(run_dir, CHECKPOINTS)
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link; put a directory in its place")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(path: pathlib.Path, tree: PyTree, about: Mapping[str, Any] | None) -> None:
    """Writes a complete checkpoint or none; replaces one of the same name."""
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
        manifest.write(temporary)
        directories.put(temporary, path, kept)
    except Exception as error:  # orbax and tensorstore raise many kinds on a full disk
        directories.delete(temporary)
        raise OSError(f"{path} cannot be written: {first_line(error)}") from error


# --- Reading ------------------------------------------------------------------------------------------


def load_variables(run_dir: str | pathlib.Path, like: Any, policy: str | None = None, *, some: bool = False) -> Any:
    """Reads a run's trained variables, or else those of its newest checkpoint, into the structure of ``like``.

    Args:
      like: shapes and dtypes suffice. With several policies, a dict keyed by policy.
      policy: one of several policies, whose variables to read; None: all variables.
      some: ``like`` has only some of the variables; the others are ignored.

    Raises:
      ConfigError: the run has saved none, they cannot be read, or they belong to another network.
    """
    final = pathlib.Path(run_dir, CHECKPOINTS, FINAL)
    if not pathlib.Path(run_dir).is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    if members := members_of(pathlib.Path(run_dir)):
        raise ConfigError(
            f"{run_dir} is a population of {len(members)}; name the run of one member, such as {members[0]}"
        )
    part = "" if policy is None else f"{policy}/"
    if os.path.lexists(final):
        manifest.verify(final, None if part or some else like)
        return arrays.restore(final / ARRAYS, like, part if part or some else None)

    def read(path: pathlib.Path) -> Any:
        manifest.verify(path, None)
        return arrays.restore(path / ARRAYS, like, f"state/variables/{part}")

    try:
        return _newest(run_dir, read)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def progress(run_dir: pathlib.Path) -> list[Mapping[str, Any]]:
    """Returns the progress of a run's intact checkpoints, newest first, with its counts and its score."""

    def read(path: pathlib.Path) -> Mapping[str, Any] | None:
        with contextlib.suppress(DamageError, LookupError, TypeError, ValueError):
            manifest.verify(path, None)
            there = manifest.read_object(path / RUN)["progress"]
            float.fromhex(there.get("score", "0"))
            if isinstance(there["iteration"], int) and isinstance(there["env_steps"], int):
                return there
        return None

    return [found for path in saved(run_dir) if (found := read(path)) is not None]


def load(
    run_dir: pathlib.Path,
    like: Checkpoint,
    check: Callable[[dict[str, Any]], bool],
    iteration: int | None = None,
) -> Checkpoint:
    """Reads a run's newest intact checkpoint, and warns of each newer one that is damaged.

    Args:
      like: shapes and dtypes.
      iteration: of the checkpoint to read; None: the newest.
      check: takes the contents of ``run.json``, and returns True if the checkpoint holds a replay memory. Its
        ``ConfigError`` is passed on; any other error means that the checkpoint is damaged.

    Raises:
      CheckpointError: no checkpoint can be read.
    """

    def read(path: pathlib.Path) -> Checkpoint:
        manifest.verify(path, like)
        about = manifest.read_object(path / RUN)
        try:
            with_memory = check(about)
        except ConfigError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"{path / RUN} is damaged: {type(error).__name__}: {first_line(error)}") from None
        wanted = like if with_memory else like._replace(state=like.state._replace(memory=()))
        return arrays.restore(path / ARRAYS, wanted._replace(progress={}))._replace(progress=about["progress"])

    def there(path: pathlib.Path) -> bool:
        with contextlib.suppress(ConfigError, LookupError, TypeError):
            return bool(read_json(path / RUN)["progress"]["iteration"] == iteration)
        return False

    return _newest(run_dir, read, lambda path: iteration is None or there(path))


def saved(run_dir: str | pathlib.Path) -> list[pathlib.Path]:
    """Returns the checkpoints in a run directory, intact or damaged, newest first."""
    folder = pathlib.Path(run_dir, CHECKPOINTS)
    if folder.is_symlink():
        return []
    there = [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]
    for path in folder.glob(".[0-9]*.kept"):  # left by a session killed while replacing one
        if path.name[1:-5].isdecimal() and not os.path.lexists(path.with_name(path.name[1:-5])):
            there.append(path)
    return sorted(there, key=_number, reverse=True)


def _number(path: pathlib.Path) -> int:
    return int(path.name.removeprefix(".").removesuffix(".kept"))


def _newest(
    run_dir: str | pathlib.Path,
    read: Callable[[pathlib.Path], Any],
    wanted: Callable[[pathlib.Path], bool] = lambda path: True,
) -> Any:
    """Returns ``read`` of the newest checkpoint that is ``wanted`` and can be read.

    Raises:
      CheckpointError: no checkpoint can be read.
    """
    problems = []
    for path in filter(wanted, saved(run_dir)):
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
    again = f"its run has saved no checkpoint; `jaxrl-dist train --config {run_dir}` starts it again"
    raise CheckpointError(f"{run_dir} holds no trained variables: {again}")
