"""Calls that may hang, made in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from jaxrl_dist.envs.base import awaited


class Caller:
    """A daemon thread that runs one call at a time and returns its result or raises its exception."""

    def __init__(self, name: str, timeout: float) -> None:
        self.hangs = False
        self._name, self._timeout = name, timeout
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._calls.get()) is not None:
            function, future = task
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs ``function`` in the thread.

        Raises:
          TimeoutError: the function did not return in time.
        """
        future: Future[Any] = Future()
        self._calls.put((function, future))
        if not awaited(lambda nap: futures.wait([future], nap).done, self._timeout):
            self.hangs = True
            raise TimeoutError(f"{self._name} has not answered for {self._timeout:g} s (--env-timeout)")
        return future.result()

    def stop(self) -> None:
        """Ends the thread once it is idle."""
        self._calls.put(None)
        self._thread.join(timeout=1 if self.hangs else 5)
