"""Writes checkpoints, which ``checkpoint.py`` describes and reads.

A run over several processes also has one checkpoint. Each process writes the pieces of the state
that only it has, and tells process 0 their checksums. Process 0 writes the rest, adds the others'
pieces and gives the directory its name.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import os
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_dist.errors import FileWarning, ProcessError, first_line
from jaxrl_dist.hosts import peers
from jaxrl_dist.run import arrays, directories, manifest, storage
from jaxrl_dist.run.checkpoint import (
    ARRAYS,
    RUN,
    best_of,
    episode_return,
    number_of,
    saved,
)
from jaxrl_dist.run.files import CHECKPOINTS, FINAL
from jaxrl_dist.run.storage import finite
from jaxrl_dist.types import Checkpoint, PyTree, Variables

_HIDDEN = re.compile(r"\.([0-9]+|final)\.(new|kept|old|pieces-[0-9]+)")
"""Name of a checkpoint that is being written (new), replaced (kept) or deleted (old),
or of a process's pieces."""


def save_variables(run_dir: str | pathlib.Path, variables: Variables) -> None:
    """Writes a run's trained variables into its directory.

    Raises:
      ConfigError: the directory's ``checkpoints`` is a link.
      OSError: the directory cannot be written.
    """
    _write(_own_folder(run_dir) / FINAL, variables, None)


class Saver:
    """Writes a run's checkpoints in a background thread, one at a time,
    and keeps the newest ones and the best.

    The best checkpoint is the one that was saved with the highest return. The ``Saver`` of a
    process other than 0 writes that process's pieces of the checkpoints, for the one of process 0.
    """

    newest: int | None = None
    """Env steps of this session's newest checkpoint on disk; None: there is none yet,
    or another process knows."""

    def __init__(
        self,
        run_dir: pathlib.Path,
        keep: int,
        about: Mapping[str, Any] | None = None,
        clock: str = "env_steps",
        since: int | None = None,
    ) -> None:
        """Process 0 takes over from an earlier session, if there was one.

        Args:
          about: facts of the run for each ``run.json``, such as its config.
          clock: the count in a checkpoint's progress by which it is numbered.
          since: number of the checkpoint that the run continues from: newer ones are damaged, and
            make room. None: none is newer.

        Raises:
          ConfigError: the run directory's ``checkpoints`` is a link.
          OSError: leftovers of an earlier session cannot be deleted.
        """
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: concurrent.futures.Future[None] | None = None
        self._folder = run_dir / CHECKPOINTS
        self._keep = keep
        self._about = about or {}
        self._clock = clock
        if not peers.first():
            return
        _clean_up(_own_folder(run_dir))
        ours = [path for path in saved(run_dir) if since is None or number_of(path) <= since]
        self._returns = {number_of(path): episode_return(path) for path in ours}
        directories.remove(self._folder / FINAL)  # of a finished session, whose run trains further

    def busy(self) -> bool:
        """Returns True while a checkpoint is being written; warns if writing failed."""
        if self._writing is not None and self._writing.done():
            writing = self._writing
            self._writing = None
            if (error := writing.exception()) is not None:
                warnings.warn(
                    f"the run continues without a checkpoint: {error}", FileWarning, stacklevel=2
                )
        return self._writing is not None

    def save(self, checkpoint: Checkpoint, episode_return: float | None) -> None:
        """Starts writing a checkpoint, once the previous one is written.

        Args:
          episode_return: the mean return by which the run judges it; None: it is not known.
        """
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
            self.busy()
        step = checkpoint.progress[self._clock]
        post = peers.post()
        state = checkpoint._replace(progress={})
        if peers.first():
            content = {
                **self._about,
                "progress": checkpoint.progress,
                "episode_return": finite(episode_return),
            }
            self._writing = self._thread.submit(self._save, step, state, content, post)
        elif post is not None:
            path = _path_of(self._folder, step)
            self._writing = self._thread.submit(_write_pieces, path, state, post)
        self._thread.submit(_give_back_memory)

    def _save(
        self, step: int, state: Checkpoint, content: dict[str, Any], post: peers.Post | None
    ) -> None:
        _write(_path_of(self._folder, step), state, content, post)
        self.newest = step
        self._returns[step] = content["episode_return"]
        numbers = [number_of(path) for path in saved(self._folder.parent)]
        # Others are damaged ones of an earlier session: the run was resumed from an older one.
        ours = [number for number in numbers if number in self._returns]
        for number in set(numbers) - _checkpoints_to_keep(self._returns, ours, self._keep):
            directories.remove(_path_of(self._folder, number))

    def finish(self) -> None:
        """Waits until all checkpoints are written.

        Raises:
          OSError: the last checkpoint could not be written.
        """
        # or ``busy`` would also warn of the error
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Ends the thread, once it has written the current checkpoint."""
        self._thread.shutdown()
        self.busy()


def _path_of(folder: pathlib.Path, step: int) -> pathlib.Path:
    return folder / f"{step:012d}"


def _give_back_memory() -> None:
    """Returns the memory of saved copies to the system;
    the C library would keep it in the thread's arena.
    """
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _checkpoints_to_keep(
    returns: Mapping[int, float | None], numbers: Sequence[int], keep: int
) -> set[int]:
    """Returns the numbers of the checkpoints to keep, the newest and the best;
    ``numbers`` come newest first.
    """
    kept = set(numbers[:keep])
    best = best_of({number: returns.get(number) for number in numbers})
    if best is not None:
        kept.add(best)
    return kept


def _own_folder(run_dir: str | pathlib.Path) -> pathlib.Path:
    """Returns the directory of a run's checkpoints, in which files will be deleted;
    creates it if it does not exist.

    Raises:
      ConfigError: the directory is a link, and so may belong to someone else.
      OSError: the directory cannot be created.
    """
    folder = pathlib.Path(run_dir, CHECKPOINTS)
    storage.check_no_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _clean_up(folder: pathlib.Path) -> None:
    """Puts back or deletes what a session has left that was killed while writing or deleting."""
    for path in folder.glob(".*"):
        if (name := _HIDDEN.fullmatch(path.name)) is None:
            continue
        final = path.with_name(name[1])
        if name[2] == "kept" and not os.path.lexists(final):
            path.rename(final)
        else:
            directories.delete(path)


def _write(
    path: pathlib.Path,
    tree: PyTree,
    about: Mapping[str, Any] | None,
    post: peers.Post | None = None,
) -> None:
    """Writes a complete checkpoint or none; replaces one of the same name.

    Args:
      post: brings the checksums of the other processes' pieces; None:
        this process has all of the tree.
    """
    # absolute, for orbax; a link is replaced, not followed
    path = path.parent.resolve() / path.name
    temporary = path.with_name(f".{path.name}.new")
    previous = path.with_name(f".{path.name}.kept")
    named = arrays.named_arrays(tree)
    others: Mapping[int, Any] = {}
    try:
        directories.delete(temporary)
        temporary.mkdir()  # not its parents: someone may have removed or renamed the run directory
        directories.check_room(temporary / "room", arrays.nbytes(named))
        arrays.save(temporary / ARRAYS, named)
        if about is not None:
            (temporary / RUN).write_text(json.dumps(about, indent=2), encoding="utf-8")
        if post is not None:
            others = post.collect()
        manifest.write_manifest(temporary, _add_pieces(path, temporary, others))
        directories.commit(temporary, path, previous)
    except Exception as error:  # orbax and tensorstore raise many kinds on a full disk
        if post is not None and not others:  # they may still be writing
            with contextlib.suppress(ProcessError):
                post.collect()
        for left in (temporary, *path.parent.glob(f".{path.name}.pieces-*")):
            directories.delete(left)
        raise OSError(f"{path} cannot be written: {first_line(error)}") from error


def _write_pieces(path: pathlib.Path, tree: PyTree, post: peers.Post) -> None:
    """Writes this process's pieces of a checkpoint next to it,
    and tells process 0 their checksums or the failure.
    """
    folder = _pieces_of(path.parent.resolve() / path.name, peers.index())
    named = arrays.named_arrays(tree, pieces=True)
    try:
        directories.delete(folder)
        folder.mkdir()
        if named:
            directories.check_room(folder / "room", arrays.nbytes(named))
            arrays.save_pieces(folder / ARRAYS, named)
            directories.sync_all(folder)
        post.send({"sha256": directories.digests(folder)})
    except Exception as error:  # as in ``_write``
        directories.delete(folder)
        post.send({"error": first_line(error)})


def _add_pieces(
    path: pathlib.Path, temporary: pathlib.Path, others: Mapping[int, Any]
) -> dict[str, str]:
    """Moves the pieces of other processes into a checkpoint that is being written;
    returns their files' checksums.

    Raises:
      OSError: a process could not write its pieces, or they cannot be moved.
    """
    digests: dict[str, str] = {}
    for process, answer in others.items():
        if "error" in answer:
            raise OSError(f"process {process}: {answer['error']}")
        folder = _pieces_of(path, process)
        name = f"{ARRAYS}.{process}"
        if answer["sha256"]:
            if not directories.appears(folder / ARRAYS):
                raise OSError(
                    f"process {process} wrote {folder}, but this process does not see it; use a file system that all hosts share"
                )
            (folder / ARRAYS).rename(temporary / name)
        directories.delete(folder)
        for file, digest in answer["sha256"].items():
            digests[name + file.removeprefix(ARRAYS)] = digest
    return digests


def _pieces_of(path: pathlib.Path, process: int) -> pathlib.Path:
    return path.with_name(f".{path.name}.pieces-{process}")
