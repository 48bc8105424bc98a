"""Signals that end other commands than those that train."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxrl_dist import cli
from jaxrl_dist.commands import data
from jaxrl_dist.run import signals


def wait() -> None:
    for _ in range(500):
        time.sleep(0.01)
    pytest.fail("the signal was lost")


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_ends_a_command_in_a_line(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []

    def run(args: object) -> int:
        try:
            os.kill(os.getpid(), number)
            wait()
        finally:
            done.append("cleaned up")
        return 0

    monkeypatch.setattr(data, "run", run)
    # `nohup` ignores SIGHUP, and a shell SIGINT in the background
    with handled(number, signal.SIG_DFL):
        assert cli.main(["data", "x"]) == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    assert capsys.readouterr().err == "jaxrl-dist: error: interrupted\n" and done == ["cleaned up"]


def test_a_signal_in_a_finaliser_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Python drops the exceptions there, as JAX's callback of the garbage collector does."""

    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    @signals.raising()
    def work() -> None:
        made = Finalised()
        del made
        wait()

    hook = sys.unraisablehook
    with (
        handled(signal.SIGINT, signal.SIG_DFL),
        pytest.raises(signals.Interrupted, match="interrupted"),
    ):
        work()
    assert sys.unraisablehook is hook and not capsys.readouterr().err


def test_a_signal_ignored_at_the_start_stays_ignored() -> None:
    with handled(signal.SIGHUP, signal.SIG_IGN), signals.raising():
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.01)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
