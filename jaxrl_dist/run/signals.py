"""What Ctrl-C, SIGTERM and SIGHUP do to a run: it ends in order, and at a second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECOND_SECONDS = 1.0
"""A signal that comes sooner after the first does not count: some tools send two, or one to each process of a group."""


class Interrupted(KeyboardInterrupt):
    """A signal has ended the run."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Stop:
    """Called, it says whether a signal has come."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.notice: str | None = None
        """What the first signal is answered by on stderr."""

    def __call__(self) -> bool:
        return self.number is not None

    def interrupted(self, message: str = "interrupted") -> Interrupted:
        """What to raise once a signal has come."""
        assert self.number is not None
        return Interrupted(self.number, message)


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Handles the signals while it is open; those that the process was started to ignore, it ignores.

    The first is seen by a thread as soon as it comes, even while the main thread waits in compiled code, where Python
    runs no handler. A second one, at least ``SECOND_SECONDS`` later, ends the process there and then.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        """Nothing: ``watch`` is told in another way. An exception from here can be lost, as in a call of the GC's."""

    def watch() -> None:
        began = 0.0
        while numbers := os.read(reading, 1):
            if numbers[0] in SIGNALS:
                if stop.number is not None:
                    if time.monotonic() - began >= SECOND_SECONDS:
                        os._exit(128 + numbers[0])
                    continue
                stop.number, began = numbers[0], time.monotonic()
                if stop.notice:
                    with contextlib.suppress(OSError, ValueError):
                        print(stop.notice, file=sys.stderr, flush=True)

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="signals", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        for number in handled:
            signal.signal(number, before[number])
        os.close(writing)
        thread.join()
        os.close(reading)


@contextlib.contextmanager
def deferring(interrupt: Callable[[], None]) -> Iterator[None]:
    """While it is open, Ctrl-C in Python calls ``interrupt`` and raises nothing.

    A second one, at least ``SECOND_SECONDS`` later, raises ``KeyboardInterrupt`` at once. Changes nothing in other
    threads than the main one, and where Ctrl-C does something else already.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    began: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal began
        if began is None:
            began = time.monotonic()
            interrupt()
        elif time.monotonic() - began >= SECOND_SECONDS:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
