"""Handles Ctrl-C, SIGTERM and SIGHUP: the first one ends a run gracefully, a second one
immediately; all other commands end with the first, and delete what they have half written.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from jaxrl_dist.errors import say

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECOND_SECONDS = 1.0
"""Seconds after the first signal in which more are ignored: some tools send two,
or one to each process of a group."""

AGAIN_SECONDS = 0.05
"""Seconds until a signal is raised again that could not raise its exception,
or whose exception was dropped."""
IMPORT_SECONDS = 10.0
"""Seconds for which a signal waits for the end of an import."""


class Interrupted(KeyboardInterrupt):
    """A signal has ended the run, or another command."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Stop:
    """Callable: True once a signal has arrived."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.notice: str | None = None
        """What is said on the first signal."""
        self.unread = -1
        """Descriptor of the pipe that holds signals until a thread of Python reads them; -1:
        none are handled."""
        self.last_words: Callable[[], str] = lambda: ""
        """Returns what is said once a second signal ends the process; "": nothing."""

    def __call__(self) -> bool:
        return self.number is not None

    def interrupted(self, message: str = "interrupted") -> Interrupted:
        """Returns the exception to raise once a signal has arrived."""
        assert self.number is not None
        return Interrupted(self.number, message)


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Handles the signals while the context is open,
    except those that the process was started to ignore.

    A thread notices the first signal immediately, even while the main thread waits in compiled
    code, where Python runs no handler. A second signal, at least ``SECOND_SECONDS`` later, ends the
    process immediately.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        """Does nothing: ``watch`` reads signals from a pipe. An exception here could be lost,
        as in a GC callback.
        """

    def watch() -> None:
        began = 0.0
        # without Python's lock, a blocked `os.read` would already take a signal from the pipe
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        while poll.poll() and (numbers := os.read(reading, 1)):
            if numbers[0] not in SIGNALS:
                continue
            if stop.number is None:
                stop.number = numbers[0]
                began = time.monotonic()
                if stop.notice:
                    say(stop.notice)
            elif time.monotonic() - began >= SECOND_SECONDS:
                if words := stop.last_words():
                    say(f"error: ended immediately: {words}")
                os._exit(128 + numbers[0])

    reading, writing = os.pipe()
    stop.unread = reading
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
def raising() -> Iterator[None]:
    """Makes the signals raise ``Interrupted`` in the main thread,
    except those that the process was started to ignore.

    One that is raised where Python drops exceptions, as in a finaliser or in JAX's callback of the
    garbage collector, is raised again. During an import a signal waits: libraries in C, such as
    jaxlib, abort the process if an exception interrupts their initialisation.
    """
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return

    deadline: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal deadline
        if deadline is None:
            deadline = time.monotonic() + IMPORT_SECONDS
        if time.monotonic() > deadline or not _importing(frame):
            raise Interrupted(number, "interrupted")
        again(number)

    def again(number: int) -> None:
        threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number)).start()

    def dropped(about: Any) -> None:
        # not from here, where it would also be dropped
        if isinstance(about.exc_value, Interrupted):
            again(about.exc_value.exit_code - 128)
        else:
            report(about)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    report = sys.unraisablehook
    sys.unraisablehook = dropped
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        sys.unraisablehook = report
        for number in handled:
            signal.signal(number, before[number])


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


_forking = threading.local()
"""``mask``: the signals that a thread blocked before it forked."""


def _block() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _detach() -> None:
    """Detaches a child of ``fork``, as of an environment's ``multiprocessing``,
    which ends such children by SIGTERM.

    The child shares the pipe of ``stopping``, so a signal for it would end the run.
    """
    handled = [
        number
        for number in SIGNALS
        if getattr(signal.getsignal(number), "__module__", "") == __name__
    ]
    if handled:
        signal.set_wakeup_fd(-1)
    if signal.SIGTERM in handled:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_detach)


@contextlib.contextmanager
def deferring(interrupt: Callable[[], None]) -> Iterator[None]:
    """Makes Ctrl-C call ``interrupt``, instead of raising ``KeyboardInterrupt``,
    while the context is open.

    A second Ctrl-C, at least ``SECOND_SECONDS`` later, raises ``KeyboardInterrupt``. Has no
    effect outside the main thread, or if Ctrl-C has a custom handler already.
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
