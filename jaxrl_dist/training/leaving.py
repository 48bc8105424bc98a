"""Runs whose reports a program does not take to the end: they save their states when it ends."""

from __future__ import annotations

import atexit

# Registers a function of its own before ours: see the end of this file.
import concurrent.futures.thread as _registered_first  # noqa: F401
import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Generator

from jaxrl_dist.errors import ConfigWarning
from jaxrl_dist.types import Report

_UNFINISHED: weakref.WeakSet[Generator[Report]] = weakref.WeakSet()
"""Reports of runs that may not have ended."""


def save_at_exit(reports: Generator[Report]) -> None:
    """Lets a run save its state if Python ends before the run."""
    _UNFINISHED.add(reports)


def warn_if_unread(reports: Generator[Report]) -> Callable[[], object]:
    """Warns if nothing takes a report before the reports are deleted, except as Python ends.

    Returns:
      What the first report calls.
    """
    finalizer = weakref.finalize(reports, _warn_unread)
    finalizer.atexit = False
    return finalizer.detach


def _warn_unread() -> None:
    warnings.warn(
        "nothing was trained: a run advances only while a loop takes its reports, as in `for "
        "report in jaxrl_dist.train(config): pass`",
        ConfigWarning,
        stacklevel=3,
    )


def _save_all() -> None:
    """Closes the runs whose reports a program still holds when it ends,
    so that they save their states.
    """
    for reports in list(_UNFINISHED):
        with contextlib.suppress(Exception):
            reports.close()


# Saving needs ``concurrent.futures``, which takes no more work after its own function of this kind:
# Python calls the newest first. If Python ceases to offer them to others, saving at the end fails
# with a warning.
getattr(threading, "_register_atexit", atexit.register)(_save_all)
