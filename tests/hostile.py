"""A Gymnasium environment whose code does what environments should not do to a process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pathlib
import re
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

FORK = multiprocessing.get_context("fork")
FIRST = threading.Lock()


def sleep() -> None:
    while True:
        time.sleep(1)


class Hostile(gymnasium.Env[np.ndarray, int]):
    """Does ``what`` once the run in ``after`` has saved a checkpoint; ``prints`` in each step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    done = False

    def __init__(self, what: str = "nothing", after: str = "") -> None:
        self.what, self.checkpoints = what, pathlib.Path(after, "checkpoints")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        self.time += 1
        if self.what == "prints":
            self.prints()
        elif self.what != "nothing" and not Hostile.done:
            time.sleep(0.003)
            if any(self.checkpoints.glob("0*")) and FIRST.acquire(blocking=False):
                Hostile.done = True
                getattr(self, self.what)()
        return np.zeros(2, np.float32), float(action), False, self.time == 10, {}

    def prints(self) -> None:
        print("{noise")
        os.write(1, b"{noise of a descriptor\n")
        ctypes.CDLL(None).printf(b"{noise of C\n")

    def exits(self) -> None:
        os._exit(0)

    def holds(self) -> None:
        """Keeps Python's lock for longer than anyone lives."""
        print("holding", file=sys.stderr, flush=True)
        re.match("(a+)+$", "a" * 60 + "b")

    def forks(self) -> None:
        child = FORK.Process(target=sleep, daemon=True)
        child.start()
        print("child", child.pid, file=sys.stderr, flush=True)

    def ends_child(self) -> None:
        child = FORK.Process(target=sleep, daemon=True)
        child.start()
        child.terminate()
        child.join(20)
        print("exit code", child.exitcode, file=sys.stderr, flush=True)
        child.kill()
