"""Sends what is printed to stdout elsewhere, by Python,
by C and by processes that are started meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def discarded() -> Iterator[None]:
    """Discards it, as gloo logs each of its connections."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        with _sent_to(null):
            yield
    finally:
        os.close(null)


def kept_for(json: bool) -> contextlib.AbstractContextManager[None]:
    """Sends it to stderr if the command prints JSON:
    what environments and libraries print would spoil it.
    """
    if json:
        return _sent_to(2)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _sent_to(descriptor: int) -> Iterator[None]:
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        with contextlib.suppress(OSError):  # stderr is closed
            os.dup2(descriptor, 1)
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # the buffers of C
        os.dup2(stdout, 1)
        os.close(stdout)
