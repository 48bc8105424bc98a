"""Streams of experience, and the operators that plans are written in.

A stream is an iterator. The operators are from RLlib Flow (Liang et al. 2021,
https://arxiv.org/abs/2011.12719, section 4) as plain generator functions, in the manner of
``itertools``; its ``for_each`` and ``filter`` are Python's own ``map`` and comprehensions, and
``duplicate`` is ``itertools.tee``. Only ``Parallel`` starts threads.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")

WAKE_SECONDS = 0.5
"""Longest single wait in seconds, so that a thread sees a stop even if the notice of it is lost."""
JOIN_SECONDS = 5.0
"""Seconds for which ``Parallel.close`` waits for its threads."""


class Late(Exception):
    """A deadline has passed. Not the built-in ``TimeoutError``, which a stream may raise."""


class Parallel(Generic[Item]):
    """Runs streams in daemon threads; none begins an item
    while more than ``in_flight`` of its items wait.

    With ``in_flight`` 0 an item also counts as waiting while its consumer works on it,
    until the next ``take``.

    An exception in a stream is raised again where items are taken. A stream may end. ``close``
    closes each stream in its thread and joins the threads.
    """

    def __init__(
        self,
        streams: Sequence[Iterable[Item]],
        in_flight: int = 1,
        stopping: threading.Event | None = None,
        name: str = "stream",
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts the threads.

        Args:
          stopping: is set to end the streams; a stream that waits for something should check it.
          enough: returns True when consumers should stop waiting although the streams go on.
        """
        self.stopping = stopping or threading.Event()
        self._in_flight = in_flight
        self._enough = enough
        self._size = len(streams)
        self._sent = 0
        # those that wait, each with its stream, oldest first
        self._items: list[tuple[int, Item]] = []
        self._taken: int | None = None  # the stream whose item was taken last
        self._running = set(range(len(streams)))
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(
                target=self._run, args=(index, stream), name=f"{name}-{index}", daemon=True
            )
            for index, stream in enumerate(streams)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return self._size

    def count(self) -> tuple[int, int]:
        """Counts the items that the streams have sent so far, and the items that still wait."""
        with self._changed:
            return self._sent, len(self._items)

    def complete(self) -> bool:
        """True if one item of each stream can be taken without waiting, or if a stream has
        failed.
        """
        with self._changed:
            waiting = {index for index, _ in self._items}
            return self._error is not None or self._enough() or self._running <= waiting

    def wait(self) -> None:
        """Waits until ``complete``."""
        with self._changed:
            while not self.complete():
                self._changed.wait(WAKE_SECONDS)

    def _run(self, index: int, stream: Iterable[Item]) -> None:
        try:
            iterator = iter(stream)
            try:
                for item in iterator:
                    if not self._send(index, item):
                        return
            finally:
                if hasattr(iterator, "close"):
                    iterator.close()
        except BaseException as error:
            with self._changed:
                # after a stop nobody waits for it
                if self._error is None and not self.stopping.is_set():
                    self._error = error
        finally:
            with self._changed:
                self._running.remove(index)
                self._changed.notify_all()

    def _send(self, index: int, item: Item) -> bool:
        """Hands an item to ``take`` and waits until the stream may begin the next; False:
        it must end.
        """
        with self._changed:
            if self.stopping.is_set():
                return False
            self._items.append((index, item))
            self._sent += 1
            self._changed.notify_all()
            while self._waiting(index) > self._in_flight and not self.stopping.is_set():
                self._changed.wait(WAKE_SECONDS)
            return not self.stopping.is_set()

    def _waiting(self, index: int) -> int:
        """Counts the items of a stream that wait."""
        return sum(at == index for at, _ in self._items) + (
            self._in_flight == 0 and self._taken == index
        )

    def take(
        self, wanted: Collection[int] | None = None, deadline: float | None = None
    ) -> tuple[int, Item] | None:
        """Takes the oldest item of the ``wanted`` streams (None: of all);
        returns ``(stream, item)``.

        Args:
          deadline: time of ``time.perf_counter`` at which to give up; None: never.

        Returns:
          None if none of these streams runs any more, or if ``enough`` returns True.

        Raises:
          Late: the deadline has passed.
          BaseException: any stream, wanted or not, raised it.
        """
        wanted = range(len(self)) if wanted is None else wanted
        with self._changed:
            self._taken = None
            self._changed.notify_all()
            while True:
                if self._error is not None:
                    raise self._error
                for place, (index, _) in enumerate(self._items):
                    if index in wanted:
                        self._taken = index
                        self._changed.notify_all()
                        return self._items.pop(place)
                if self._running.isdisjoint(wanted) or self._enough():
                    return None
                if deadline is None:
                    left = WAKE_SECONDS
                else:
                    left = deadline - time.perf_counter()
                if left <= 0:
                    raise Late
                self._changed.wait(min(left, WAKE_SECONDS))

    def close(self) -> None:
        """Ends the streams, and drops the items that nobody has taken.

        A thread that is stuck in other code is left running; it is a daemon,
        so the process can still end.
        """
        self.stopping.set()
        with self._changed:
            self._changed.notify_all()
        until = time.perf_counter() + JOIN_SECONDS
        # so that a second call does not wait for a stuck thread again
        threads = self._threads
        self._threads = []
        for thread in threads:
            thread.join(max(0.0, until - time.perf_counter()))
        with self._changed:
            self._items.clear()


def gather_async(streams: Parallel[Item]) -> Iterator[Item]:
    """Yields the items of all streams in order of arrival."""
    while (indexed_item := streams.take()) is not None:
        yield indexed_item[1]


def gather_sync(
    streams: Parallel[Item],
    least: int | None = None,
    deadline_seconds: float = 0.0,
    busy: Callable[[], bool] = lambda: False,
) -> Iterator[list[Item | None] | None]:
    """Yields rounds with one item from each stream, in the order of the streams;
    ends when a round cannot be filled.

    Args:
      least: items that suffice once ``deadline_seconds`` have passed since the round's first item.
        A stream whose item is late has None in this round, and the item in the next.
      busy: returns whether consumers have something else to do: yields None then,
        rather than wait for a round.
    """
    while True:
        while busy() and not streams.complete():
            yield None
        items: dict[int, Item] = {}
        deadline = None
        with contextlib.suppress(Late):
            while missing := set(range(len(streams))) - items.keys():
                enough = least is not None and len(items) >= least
                indexed_item = streams.take(missing, deadline if enough else None)
                if indexed_item is None:
                    return
                items[indexed_item[0]] = indexed_item[1]
                deadline = deadline or time.perf_counter() + deadline_seconds
        yield [items.get(index) for index in range(len(streams))]


def concurrently(*streams: Iterable[Item]) -> Iterator[Item]:
    """Yields an item of each stream in turn, and ends with the first stream that ends."""
    for iterator in itertools.cycle([iter(stream) for stream in streams]):
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def batch(stream: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yields lists of ``size`` consecutive items; a last, shorter list is dropped."""
    iterator = iter(stream)
    while len(items := list(itertools.islice(iterator, size))) == size:
        yield items
