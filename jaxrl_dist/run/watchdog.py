"""Ends a run whose Python stands still: code in C that holds Python's lock, such as an endless
match of a regular expression, lets no thread run, so no time limit of this package and no handler
of a signal.

``watching`` starts this file as a small process, which imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator

BEAT_SECONDS = 0.5
"""Time between two signs of life."""
LATE_SECONDS = 2.0
"""Seconds without one after which an unread signal has met code that holds the lock."""
SECOND_SECONDS = 1.0
"""As in ``signals``."""
ALIVE = b"."
STOPPING = b"!"
"""Signs of life, before and after the first signal."""


@contextlib.contextmanager
def watching(limit: float, signals: int, stop: Callable[[], bool], advice: str) -> Iterator[None]:
    """Lets a process of its own kill this one after
    ``limit`` seconds in which no thread of Python could run.

    It also does so if a second signal arrives meanwhile.

    Args:
      signals: descriptor of the pipe that holds a byte for each signal until it is handled.
      stop: whether one has been handled.
      advice: what to do then, for the message.
    """
    words = [
        sys.executable,
        "-I",
        "-S",
        __file__,
        str(os.getpid()),
        str(limit),
        str(signals),
        advice,
    ]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, pass_fds=[signals], start_new_session=True
    )
    assert process.stdin is not None
    pipe = process.stdin.fileno()
    ended = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):  # the other process has been killed
            while not ended.wait(BEAT_SECONDS):
                os.write(pipe, STOPPING if stop() else ALIVE)

    thread = threading.Thread(target=beat, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        process.kill()  # closing the pipe is not enough: children of `fork` also hold it open
        process.wait()
        process.stdin.close()


def main() -> None:
    """Runs ``python watchdog.py PROCESS LIMIT SIGNALS ADVICE``
    until the process ends or closes the standard input.
    """
    watched = int(sys.argv[1])
    limit = float(sys.argv[2])
    signals = int(sys.argv[3])
    advice = sys.argv[4]
    still = 0.0
    # when the oldest unread signal came, and how many have come with it
    begun = time.monotonic()
    first = 0
    stopping = False
    while os.getppid() == watched:
        if select.select([0], [], [], BEAT_SECONDS)[0]:
            beats = os.read(0, 4096)
            if not beats:
                return
            still = 0.0
            stopping = beats.endswith(STOPPING)
        elif not _suspended(watched):
            still += BEAT_SECONDS  # not by the clock: this process may also have been suspended
        now = time.monotonic()
        unread = _unread(signals)
        if not unread:
            begun = now
            first = 0
        elif now - begun < SECOND_SECONDS and not stopping:
            first = unread
        again = unread > first and still >= LATE_SECONDS
        if again or still >= limit:
            problem = "ended immediately" if again else f"no Python code has run for {still:g} s"
            message = (
                f"jaxrl-dist: error: {problem}: C code, such as an environment's, holds Python's "
                f"lock; with --env-workers processes only that environment would end; {advice}\n"
            )
            os.write(2, message.encode())
            os.kill(watched, signal.SIGKILL)
            return


def _unread(pipe: int) -> int:
    """Returns the number of bytes in a pipe."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(count)


def _suspended(process: int) -> bool:
    """Returns whether a process is stopped, as by Ctrl-Z."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


if __name__ == "__main__":
    main()
