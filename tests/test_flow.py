"""Streams: what each operator gives, and what ``Parallel`` does with threads, errors and the
stop.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from jaxrl_dist import flow
from jaxrl_dist.flow import Parallel

PROMPT = 2.0
"""Seconds in which a thread is heard of, on a machine that is busy."""


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits for what other threads bring about."""
    deadline = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < deadline, "it never came about"
        time.sleep(0.001)


class Gate:
    """A stream of ``(name, 0), (name, 1), ...``, each of which ``open`` lets through."""

    def __init__(self, name: str = "", length: int = 10**9) -> None:
        self.name, self.length = name, length
        self._tickets = threading.Semaphore(0)

    def open(self, count: int = 1) -> Gate:
        self._tickets.release(count)
        return self

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for number in range(self.length):
            while not self._tickets.acquire(timeout=0.01):
                if Gate.closed.is_set():
                    return
            yield self.name, number

    closed = threading.Event()


def gated(streams: list[Any], in_flight: int = 1) -> Parallel[Any]:
    """The streams in parallel, whose gates see the stop."""
    Gate.closed = threading.Event()
    return Parallel(streams, in_flight, Gate.closed)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = threading.enumerate()
    yield
    until(lambda: set(threading.enumerate()) <= set(before))


# --- Parallel -------------------------------------------------------------------------------------


def test_items_come_in_their_order() -> None:
    """Whoever is first is taken first; of one stream, in its own order."""
    gates = [Gate("a"), Gate("b")]
    with closing(gated(gates, in_flight=3)) as streams:
        for sent, index in enumerate((1, 0, 1, 1, 0)):
            gates[index].open()
            until(lambda: streams.count()[0] == sent + 1)
        taken = [streams.take() for _ in range(5)]
        assert taken == [(1, ("b", 0)), (0, ("a", 0)), (1, ("b", 1)), (1, ("b", 2)), (0, ("a", 1))]
        assert streams.count() == (5, 0)


def test_only_wanted_streams_are_taken_from() -> None:
    gates = [Gate("a"), Gate("b").open(2)]
    with closing(gated(gates)) as streams:
        until(lambda: streams.count()[0])
        with pytest.raises(flow.Late):
            streams.take({0}, deadline=time.perf_counter() + 0.05)
        gates[0].open()
        assert streams.take({0}) == (0, ("a", 0))
        assert streams.take([1]) == (1, ("b", 0))


@pytest.mark.parametrize("in_flight", [0, 1, 3])
def test_no_stream_runs_far_ahead(in_flight: int) -> None:
    """While more than ``in_flight`` items wait, no other is begun; with 0,
    an item waits up to the next ``take``.
    """
    begun: list[int] = []

    def stream() -> Iterator[int]:
        for number in itertools.count():
            begun.append(number)
            yield number

    with closing(Parallel([stream()], in_flight)) as streams:
        for taken in range(5):
            most = taken + in_flight + 1 if in_flight else max(taken, 1)
            until(lambda: len(begun) == most)
            time.sleep(0.02)
            assert len(begun) == most
            assert streams.count() == (most, most - taken)
            assert streams.take() == (0, taken)


def test_an_error_comes_out_at_once_with_its_traceback() -> None:
    """Before items that wait, from a stream that nobody asked, and while another hangs."""
    begin = threading.Event()

    def fails() -> Iterator[int]:
        begin.wait()
        raise KeyError("what went wrong")
        yield 0

    with closing(gated([Gate().open(), fails(), Gate()])) as streams:
        until(lambda: streams.count()[1] == 1)
        threading.Timer(0.1, begin.set).start()
        began = time.perf_counter()
        with pytest.raises(KeyError, match="what went wrong") as caught:
            streams.take({2})
        assert time.perf_counter() - began < PROMPT
        assert "fails" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        with pytest.raises(KeyError):  # it does not go away
            streams.take()


@pytest.mark.parametrize(
    "error", [TimeoutError("no answer"), StopIteration(3), SystemExit(4), GeneratorExit()]
)
def test_no_kind_of_error_is_taken_for_something_else(error: BaseException) -> None:
    """Neither a stream's time-out for a deadline nor its StopIteration for its end."""

    def fails() -> Iterator[int]:
        raise error
        yield 0

    # Python's own rule for generators
    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    for gather in (flow.gather_async, lambda streams: flow.gather_sync(streams, 1, 0.01)):
        with closing(gated([Gate(), fails()])) as streams, pytest.raises(expected):
            next(iter(gather(streams)))


def test_what_cannot_be_iterated_is_an_error_too() -> None:
    with closing(Parallel([3])) as streams, pytest.raises(TypeError):  # type: ignore[list-item]
        streams.take()


def test_streams_end() -> None:
    """The items of those that have ended can still be taken; then there are none."""
    with closing(gated([Gate("a", 1).open(), Gate("b", 2).open(2)])) as streams:
        taken = [streams.take() for _ in range(3)]
        assert sorted(item for _, item in taken) == [("a", 0), ("b", 0), ("b", 1)]
        assert streams.take() is None
        assert streams.take({0}) is None


def test_close_ends_streams_in_their_own_threads() -> None:
    """Those that wait for room as well as those that are at work, and their threads with them."""
    closed: dict[str, str] = {}

    def stream(name: str) -> Iterator[int]:
        try:
            for number in itertools.count():
                if name == "at work":
                    stopping.wait()
                yield number
        finally:
            closed[name] = threading.current_thread().name

    stopping = threading.Event()
    streams = Parallel([stream("at work"), stream("waiting")], stopping=stopping, name="stream")
    until(lambda: streams.count() == (2, 2))
    streams.close()
    assert closed == {"at work": "stream-0", "waiting": "stream-1"}
    assert streams.count() == (2, 0)  # nobody has taken them


def test_an_error_of_the_stop_itself_disturbs_nobody() -> None:
    raised = []

    def stream() -> Iterator[int]:
        try:
            yield 0
        finally:
            raised.append(True)
            raise OSError("closing went wrong")

    with closing(Parallel([stream()])) as streams:
        until(lambda: streams.count()[0])
    assert raised


def test_a_stuck_stream_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "JOIN_SECONDS", 0.2)
    release = threading.Event()

    def stuck() -> Iterator[int]:
        release.wait()
        yield 0

    with closing(Parallel([stuck()])) as streams:
        began = time.perf_counter()
        streams.close()
        streams.close()
    assert 0.1 < time.perf_counter() - began < 0.4 + PROMPT
    release.set()
    until(lambda: "stream-0" not in [thread.name for thread in threading.enumerate()])
    assert streams.count() == (0, 0)


def test_a_stuck_stream_does_not_keep_the_process() -> None:
    code = """
import contextlib, itertools, time
from jaxrl_dist import flow
flow.JOIN_SECONDS = 0.1
with contextlib.closing(flow.Parallel([map(time.sleep, itertools.repeat(1000))])):
    pass
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# --- Gathering ------------------------------------------------------------------------------------


def test_gather_async_takes_what_comes() -> None:
    gates = [Gate("a", 3), Gate("b", 2).open(2)]
    with closing(gated(gates)) as streams:
        items = flow.gather_async(streams)
        assert [next(items), next(items)] == [("b", 0), ("b", 1)]
        gates[0].open(3)
        assert list(items) == [("a", 0), ("a", 1), ("a", 2)]


def test_gather_sync_takes_one_of_each() -> None:
    """In the order of the streams, whoever is first; until one of them ends, though others go
    on.
    """
    gates = [Gate("a", 2), Gate("b").open(100), Gate("c").open(100)]
    with closing(gated(gates)) as streams:
        rounds = flow.gather_sync(streams)
        until(lambda: streams.count()[1] == 4)
        gates[0].open(2)
        assert list(rounds) == [[("a", n), ("b", n), ("c", n)] for n in range(2)]


def test_gather_sync_goes_on_without_those_that_are_late() -> None:
    """Not before the deadline, nor with fewer than ``least``;
    what is late takes its place in a later round.
    """
    gates = [Gate("a").open(3), Gate("b").open(3), Gate("c")]
    with closing(gated(gates)) as streams:
        rounds = flow.gather_sync(streams, least=2, deadline_seconds=0.4)
        began = time.perf_counter()
        assert next(rounds) == [("a", 0), ("b", 0), None]
        assert 0.35 < time.perf_counter() - began < 0.4 + PROMPT
        gates[2].open(2)
        until(lambda: streams.count()[1] == 6)
        began = time.perf_counter()
        assert next(rounds) == [("a", 1), ("b", 1), ("c", 0)]
        assert time.perf_counter() - began < 0.35
        assert next(rounds) == [("a", 2), ("b", 2), ("c", 1)]
        gates[1].open()
        threading.Timer(0.6, gates[0].open).start()  # after the deadline, as one alone is too few
        assert next(rounds) == [("a", 3), ("b", 3), None]


# --- Operators ------------------------------------------------------------------------------------


def test_concurrently() -> None:
    """Ends with the first of the streams that does, and asks for nothing ahead."""
    assert list(flow.concurrently("abc", "12")) == [*"a1b2c"]
    asked: list[int] = []
    items = flow.concurrently(map(asked.append, range(9)), "12")
    next(items)
    assert asked == [0]


def test_batch() -> None:
    assert list(flow.batch(range(8), 3)) == [[0, 1, 2], [3, 4, 5]]


def test_errors_pass_through_the_operators() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise KeyError("within")

    for items in (
        flow.concurrently(fails(), range(9)),
        flow.batch(fails(), 2),
    ):
        with pytest.raises(KeyError, match="within"):
            list(items)


def test_a_dataflow_of_several() -> None:
    """What comes is stored, and after each item the last two are learnt from."""
    stored: list[Any] = []
    with closing(gated([Gate("a", 4).open(4), Gate("b", 4).open(4)])) as streams:
        store_op = map(stored.append, flow.gather_async(streams))
        learn_op = (stored[-2:] for _ in itertools.count())
        learnt = list(flow.concurrently(store_op, learn_op))
    assert learnt == [part for i in range(8) for part in (None, stored[max(0, i - 1) : i + 1])]
