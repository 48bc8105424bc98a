"""The files of a run directory, and who may use it: a run claims and locks its directory."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import warnings
from collections.abc import Iterator
from typing import IO

from jaxrl_dist.config.train import CONFIG_FILE
from jaxrl_dist.errors import ConfigError, FileWarning
from jaxrl_dist.run import directories, locks, storage

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"
FINAL = "final"
POPULATION = "population.json"
RESULTS = "results.csv"
"""Files of a population's run directory: its members and their scores, as JSON and as a table."""
MEMBERS = "members"
"""Folder of a population's run directory that holds the run directories of its members."""


def claim(run_dir: str) -> None:
    """Creates the directory of a new run.

    Raises:
      ConfigError: the directory cannot be created or written, is a file, or holds a run already.
    """
    path = pathlib.Path(run_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG_FILE, CHECKPOINTS):  # a new run would overwrite them
            if os.path.lexists(path / name):
                raise FileExistsError
        (path / METRICS).touch(exist_ok=False)  # fails for all but one of several processes
    except FileExistsError:
        if (path / CHECKPOINTS).is_symlink():
            raise ConfigError(
                f"--run-dir {run_dir} has a link instead of {CHECKPOINTS}; name another directory"
            ) from None
        if not path.is_dir():
            raise ConfigError(f"--run-dir {run_dir} is a file; name another directory") from None
        raise ConfigError(
            f"--run-dir {run_dir} already holds a run; continue it with `jaxrl-dist resume "
            f"{run_dir}`, restart a run without a checkpoint with `jaxrl-dist train "
            "--resume-or-start`, or name another directory"
        ) from None
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def freeing(path: pathlib.Path) -> Iterator[None]:
    """Frees a directory that a run has claimed if the run cannot write its config:
    it would seem to hold a run.
    """
    try:
        yield
    except BaseException:
        if not (path / CONFIG_FILE).exists():
            (path / METRICS).unlink(missing_ok=True)
        raise


def abandon(path: pathlib.Path) -> None:
    """Deletes the files that a run without a checkpoint has left in its directory,
    so that it can start again.

    Other files stay. If there are trained variables, nothing is deleted.

    Raises:
      ConfigError: another process uses the run.
    """
    if not (path / METRICS).is_file() or (path / CHECKPOINTS / FINAL).exists():
        return
    with lock(str(path)):
        for name in (CONFIG_FILE, SUMMARY, POPULATION, RESULTS):
            (path / name).unlink(missing_ok=True)
        for name in (CHECKPOINTS, MEMBERS):
            if not (path / name).is_symlink():
                directories.remove(path / name)
        (path / METRICS).unlink()


def members_of(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the run directories of a population's members, in their order; none for a single run.

    Raises:
      ConfigError: a link is in the place of one, or of the folder of all.
    """
    storage.check_no_links(run_dir / MEMBERS)
    return sorted(path.parent for path in (run_dir / MEMBERS).glob(f"*/{CONFIG_FILE}"))


def check_free(run_dir: str) -> None:
    """Checks that a new run can claim a directory when it starts.

    Raises:
      ConfigError: as ``claim``.
    """
    claim(run_dir)
    (pathlib.Path(run_dir) / METRICS).unlink()


def lock(run_dir: str) -> IO[bytes]:
    """Opens a run's ``metrics.jsonl``, and locks the run
    against other processes until the file is closed.

    Raises:
      ConfigError: the file cannot be written or is not a plain file,
        or another process holds the lock.
    """
    path = pathlib.Path(run_dir, METRICS)
    try:  # follows no link: the file may be truncated
        number = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    file = os.fdopen(number, "r+b", buffering=0)
    if not stat.S_ISREG(os.fstat(number).st_mode):  # reading a pipe would block forever
        file.close()
        raise ConfigError(f"{path} is not a plain file")
    try:
        locks.lock(number)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another process is using the run in {run_dir}") from None
    except OSError as error:  # some cluster file systems have no locks
        warnings.warn(
            f"{path} cannot be locked ({error.strerror}); make sure that no other process uses "
            "this run",
            FileWarning,
            stacklevel=2,
        )
    return file


def finished(run_dir: pathlib.Path, evaluation_episodes: int) -> bool:
    """Returns True if a run is complete, including its evaluation."""
    with contextlib.suppress(ConfigError, LookupError, TypeError):
        summary = storage.read_json(run_dir / SUMMARY)
        return summary["evaluation"] is not None or not evaluation_episodes
    return False
