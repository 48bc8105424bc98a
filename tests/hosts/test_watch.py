"""The watch of a process over the others of its run."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from jaxrl_dist.hosts import watch

pytestmark = pytest.mark.quick


class Client:
    """A key-value store in which nobody else tells anything."""

    def key_value_set(self, *args: Any) -> None:
        pass

    def key_value_dir_get(self, name: str) -> list[tuple[str, str]]:
        return []


def test_a_failing_library_lets_the_process_say_why_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, said = threading.Event(), list[str]()

    def advice() -> str:
        asked.set()
        time.sleep(0.2)
        return "advice"

    monkeypatch.setattr(watch, "say", said.append)
    monkeypatch.setattr(watch.os, "_exit", lambda code: None)
    other = watch.Watch(Client(), 1, 2, timeout=60.0)
    other.advice = advice
    thread = threading.Thread(target=other.lost, args=(0,))
    thread.start()
    asked.wait(5)
    other.terminated()  # as std::terminate of a thread of gloo, after which the process ends
    assert [line.endswith("advice") for line in said] == [True]
    thread.join()
    other.close()
