"""Calls that may hang, made in a thread."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from jaxrl_dist.heavy import in_32_bits

T = TypeVar("T")

NAPS = 20
"""Naps into which a wait is divided."""
_LONGEST_NAP = 0.1
"""Seconds; the calls of a caller may take any time."""


def awaited(wait: Callable[[float], T], seconds: float) -> T:
    """Calls ``wait`` until its result is true or ``seconds`` have passed,
    and returns the last result.

    It waits in short naps. If this process is stopped meanwhile, as by Ctrl-Z, it loses one nap and
    not the whole time: the other side may have been stopped with it.
    """
    for _ in range(NAPS):
        if answer := wait(seconds / NAPS):
            return answer
    return wait(0.0)


class Caller:
    """A daemon thread that runs one call at a time and returns its result or raises its exception.

    A call that another caller's thread makes runs in that thread, without a hand-over. Whoever
    waits for that thread watches each such call.
    """

    def __init__(self, name: str, timeout: float = math.inf) -> None:
        self.hangs = False
        self._name = name
        self._timeout = timeout
        self._ends = False
        self._own = self._running = _Running(self)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @in_32_bits
    def _run(self) -> None:
        _HERE.caller = self
        while (task := self._calls.get()) is not None:
            function, future = task
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def call(self, function: Callable[[], T]) -> T:
        """Runs ``function`` in the thread.

        Raises:
          TimeoutError: the function, or another caller's call within it,
            did not return within that caller's time.
        """
        if (outer := getattr(_HERE, "caller", self)) is not self:
            return outer._within(self, function)
        future: Future[T] = Future()
        self._calls.put((function, future))
        if late := self._late(future):
            late.hangs = self.hangs = True
            raise TimeoutError(
                f"{late._name} has not answered for {late._timeout:g} s (--env-timeout)"
            )
        return future.result()

    def _within(self, inner: Caller, function: Callable[[], T]) -> T:
        if self._ends:
            raise RuntimeError(f"{self._name} are being closed")
        self._running = _Running(inner)
        try:
            return function()
        finally:
            self._running = self._own

    def _late(self, future: Future[T]) -> Caller | None:
        """Waits for a result; returns None, or the caller whose call has not returned in time.

        It waits in short naps, and counts the naps in which the same call runs. If this process is
        stopped meanwhile, as by Ctrl-Z, it loses one nap and not the whole time: the other side may
        have been stopped with it.
        """
        nap = min(self._timeout / NAPS, _LONGEST_NAP)
        seen = self._running
        naps = 0
        while not futures.wait([future], nap).done:
            running = self._running
            if running is seen:
                naps += 1
            else:
                seen = running
                naps = 0
            if naps * nap >= seen.caller._timeout:
                return seen.caller
        return None

    def stop(self) -> None:
        """Ends the thread once it is idle, and refuses further calls of other callers in it."""
        self._ends = True
        self._calls.put(None)
        self._thread.join(timeout=1 if self.hangs else 5)
        if self._thread.is_alive():
            self._running.caller.hangs = True


class _Running(NamedTuple):
    """A call, which differs from other calls by identity."""

    caller: Caller
    """The caller whose time limit it has."""


_HERE = threading.local()
"""``caller``: the ``Caller`` whose thread this is."""
