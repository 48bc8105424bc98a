"""Locks against other processes, which end with this process even if children of it live on."""

from __future__ import annotations

import contextlib
import fcntl
import os

_locked: dict[int, tuple[int, int]] = {}
"""Descriptors of locked files, and device and inode of each:
a closed descriptor's number may be another file's."""


def lock(descriptor: int) -> None:
    """Locks an open file or directory until this process closes it or ends.

    Raises:
      BlockingIOError: another process holds the lock.
      OSError: the file system has no locks.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _locked[descriptor] = _file(descriptor)


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _in_child() -> None:
    """Replaces the locked files in a child of ``fork``, as of an environment's
    ``multiprocessing``.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, file in _locked.items():
        with contextlib.suppress(OSError):  # it is closed
            if _file(descriptor) == file:
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _locked.clear()


os.register_at_fork(after_in_child=_in_child)
