"""A thread in each process that tells the others that the process is alive,
and ends it once another one is lost.

A process that waits in a device collective cannot be woken, so once another process is lost or has
failed, the thread prints one line and ends the whole process. It learns this from the key-value
store of JAX's coordination service; jaxlib's client notices the end of process 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_dist.errors import ProcessError, say

SECONDS = 1.0
"""Seconds between two checks of the other processes."""
GRACE_SECONDS = 8.0
"""Seconds that the main thread has to end by itself after another process has failed."""
_STATE = "jaxrl/state"


class Watch:
    """Reports the state of this process to the others, and tracks theirs."""

    def __init__(self, client: Any, index: int, count: int, timeout: float) -> None:
        """Starts the threads; ``timeout`` is ``Processes.lost_process_timeout``."""
        self.advice: Callable[[], str] = lambda: ""
        """Returns advice for the user once a process is lost, such as a command to run."""
        self.gone: Callable[[], bool] = lambda: False
        """Returns whether process 0 is known to have ended."""
        self.stop_signal: Callable[[], int] = lambda: 0
        """Returns the number of the signal that asks this process to end the run; 0: none."""
        self.signal = 0
        """Number of the signal that asks any process to end the run; 0: none."""
        self.running = 0
        """Runs that this process is in, for which it needs the others."""
        self.problem: ProcessError | None = None
        self._client = client
        self._index = index
        self._count = count
        self._timeout = timeout
        self.failed: dict[str, Any] | None = None
        """The message and the exit code with which this process has failed."""
        self._beat = 0
        self._left = False
        self._failed_at = 0.0
        self._gone: set[int] = set()
        """The processes that have left."""
        self._since = {other: (time.monotonic(), -1) for other in range(count) if other != index}
        self._stopping = threading.Event()
        self._telling = threading.Lock()
        self._ending = threading.Lock()
        self._answered = time.monotonic()
        self._tell()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("processes", self._run), ("coordinator", self._wait_for_answers))
        ]
        for thread in self._threads:
            thread.start()

    def fail(self, message: str, code: int) -> None:
        """Tells the others that this process has failed: they also end, with the same exit code."""
        self.failed = {"message": message, "code": code}
        self._tell()

    def wait(self) -> ProcessError | None:
        """Waits until another process is known to have failed, and returns its error; None:
        all still answer.

        Does not return if one is lost.
        """
        until = time.monotonic() + self._timeout + 4 * SECONDS
        while self.problem is None and time.monotonic() < until:
            if self._index and self.gone():
                self.lost(0)
            time.sleep(SECONDS / 5)
        return self.problem

    def exit_now(self, code: int) -> None:
        """Ends this process after a failure; process 0 lets the others leave first."""
        self._left = True
        self._tell()
        until = time.monotonic() + 2 * GRACE_SECONDS
        while self._index == 0 and len(self._gone) < self._count - 1 and time.monotonic() < until:
            time.sleep(SECONDS / 5)
        self._stopping.set()
        end(code)

    def disconnect(self) -> None:
        """Tells the others that this process ends in order: they may continue alone."""
        self._left = True
        self._tell()
        self.close()

    def close(self) -> None:
        """Ends the threads."""
        self._stopping.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._timeout)

    def lost(self, process: int) -> None:
        """Ends this process because another one is lost; its own number: nobody knows which."""
        with self._ending:  # the first to come says the line, and the others wait for the end
            if self._stopping.is_set():
                return
            self._stopping.set()
            problem = f"process {process} is lost: no answer for {self._timeout:g} s"
            if process == self._index:
                problem = (
                    "a library has failed: another process may be lost, or have the same --process"
                )
            elif process == 0 and time.monotonic() - self._answered < self._timeout:
                problem = "process 0 is lost"
            with contextlib.suppress(Exception):  # such as that no thread can be started
                if advice := self.advice():
                    problem += f"; {advice}"
            say(f"error: {problem}")
            os._exit(1)

    def terminated(self) -> None:
        """Ends this process after a thread of jaxlib or gloo has failed in it,
        once it is known which process is lost.
        """
        if self._stopping.is_set():
            with self._ending:  # a thread that ends the process has yet to say why
                return
        if self.wait() is None:
            self.lost(self._index)
        # in which the main thread ends this process, or ``_run`` does
        time.sleep(2 * GRACE_SECONDS)

    def _tell(self) -> None:
        """Tells the others the state of this process; if that fails for long,
        they notice that it is lost.
        """
        with self._telling, contextlib.suppress(Exception):
            self._beat += 1
            state = {
                "beat": self._beat,
                "signal": self.stop_signal(),
                "failed": self.failed,
                "left": self._left,
            }
            self._client.key_value_set(f"{_STATE}/{self._index}", json.dumps(state), True)

    def _wait_for_answers(self) -> None:
        """Notices that the coordinator's host has vanished,
        while the other thread waits for its answer.
        """
        while not self._stopping.wait(SECONDS):
            if time.monotonic() - self._answered > self._timeout:
                self.lost(0)

    def _run(self) -> None:
        while not self._stopping.wait(SECONDS):
            self._tell()
            try:
                states = self._client.key_value_dir_get(_STATE)
            except Exception:  # process 0 may be back in a moment
                continue
            self._answered = time.monotonic()
            for key, text in states:
                self._hear(int(key.rsplit("/", 1)[1]), json.loads(text))
            if self.problem is not None and self._answered - self._failed_at > GRACE_SECONDS:
                say(f"error: {self.problem}")
                self.exit_now(self.problem.exit_code)
            if self.problem is None and self.failed is None:
                self._check_beats()

    def _check_beats(self) -> None:
        """Ends this process if one that it needs has not told its state for too long."""
        for other, (heard, _) in self._since.items():
            if self._answered - heard > self._timeout and (self.running or other not in self._gone):
                self.lost(other)

    def _hear(self, process: int, state: Mapping[str, Any]) -> None:
        """Takes in the state that a process has told."""
        self.signal = self.signal or int(state["signal"])
        if process == self._index:
            return
        if state["left"]:
            self._gone.add(process)
        if state["beat"] != self._since[process][1]:
            self._since[process] = self._answered, state["beat"]
        if state["failed"] is not None and self.problem is None:
            self.problem = ProcessError(
                f"process {process} has failed: {state['failed']['message']}"
            )
            self.problem.exit_code = state["failed"]["code"]
            self._failed_at = self._answered


def end(code: int) -> None:
    """Ends this process without waiting for JAX, whose functions may wait for other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def on_terminate(function: Callable[[], None]) -> object:
    """Calls a function where C++ would end the process with ``std::terminate``;
    returns what must be kept alive.

    jaxlib 0.10 and 0.11 cannot hand the status of ``missed_heartbeat_callback`` to Python, and end
    the process. So do threads of gloo once a process is lost. If the C++ library cannot be found,
    the process ends with its own message.
    """
    callback = ctypes.CFUNCTYPE(None)(function)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"](callback)
    return callback
