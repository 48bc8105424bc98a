"""Gymnasium environments that fail: now and then (``make``),
or when an action says so (``scripted``).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit


class FaultyCartPole(CartPoleEnv):
    """CartPole that crashes and stalls, with RLlib's probabilities
    (``cartpole_crashing_and_stalling``).
    """

    def __init__(
        self, p_crash: tuple[float, float], p_stall: tuple[float, float], stall: tuple[float, float]
    ) -> None:
        super().__init__()
        self._p_crash, self._p_stall, self._stall = p_crash, p_stall, stall
        self._faults = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        # a separate stream, so that CartPole's states are those without faults
        if seed is not None:
            self._faults = np.random.default_rng(seed)
        self._fail(1)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._fail(0)
        return super().step(action)

    def _fail(self, where: int) -> None:
        if self._faults.random() < self._p_crash[where]:
            raise RuntimeError("simulated crash")
        if self._faults.random() < self._p_stall[where]:
            time.sleep(self._faults.uniform(*self._stall))


def make(
    p_crash: float = 1e-4,
    p_crash_reset: float = 1e-3,
    p_stall: float = 5e-4,
    p_stall_reset: float = 1e-3,
    stall_min: float = 2.0,
    stall_max: float = 5.0,
    max_episode_steps: int = 500,
) -> gymnasium.Env:
    """CartPole that crashes and stalls with these probabilities a step or a reset,
    for so many seconds.
    """
    env = FaultyCartPole((p_crash, p_crash_reset), (p_stall, p_stall_reset), (stall_min, stall_max))
    return TimeLimit(env, max_episode_steps)


RELEASED = threading.Event()
"""Ends what hangs in a thread."""
HANGING_SINCE: list[float] = []
"""When each ``HangingCartPole`` began to hang, by ``time.perf_counter``."""


class HangingCartPole(CartPoleEnv):
    """CartPole that stops answering at one of its steps."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def step(self, action: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            HANGING_SINCE.append(time.perf_counter())
            RELEASED.wait()
        return super().step(action)


def hanging(after: int = 20) -> gymnasium.Env:
    """CartPole that does ``after`` steps."""
    return TimeLimit(HangingCartPole(after), 500)


class Scripted(gymnasium.Env):
    """An environment in which the action says what happens: ``ACTIONS``. It shows seed,
    episode and step.
    """

    ACTIONS = (
        "go on", "terminate", "truncate", "terminate and truncate", "raise", "raise in reset", "exit", "hang",
        "hang in reset", "die", "show a wrong shape", "show a wrong dtype", "show nan", "pay nan", "return four",
        "print", "end by a text", "pay a text",
    )  # fmt: skip
    observation_space = spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = spaces.Discrete(len(ACTIONS))

    def __init__(
        self,
        constructor: str = "",
        seconds: float = 60.0,
        closing: str = "",
        mask: str = "",
        **anything: Any,
    ) -> None:
        self._seconds, self.anything = seconds, anything
        self._closing, self._info = (
            closing,
            {"action_mask": np.ones(3, bool)} if mask == "info" else {},
        )
        if mask == "method":
            self.action_masks = lambda: np.ones(3, bool)
        if constructor == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if constructor == "exit":
            os._exit(7)
        if constructor == "main thread":
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if constructor == "raise":
            raise RuntimeError("no such luck")
        if constructor == "hang":
            RELEASED.wait(seconds)
        self._seed = self._episode = self._time = -1
        self._next = ""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self._next == "raise in reset":
            raise RuntimeError("no new game")
        if self._next == "hang in reset":
            RELEASED.wait(self._seconds)
        if seed is not None:
            self._seed = seed % 1000
        self._episode, self._time = self._episode + 1, 0
        return self._show(), self._info

    def close(self) -> None:
        if self._closing == "raise":
            raise OSError("no window")
        if self._closing == "hang":
            RELEASED.wait(self._seconds)

    def step(self, action: Any) -> Any:
        assert isinstance(action, np.int64), type(action)  # as Discrete.sample gives
        what = self.ACTIONS[action]
        self._time += 1
        self._next = what
        if what == "raise":
            raise KeyError("no such key")
        if what == "exit":
            sys.exit(3)
        if what == "hang":
            RELEASED.wait(self._seconds)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "print":
            print("from the environment", flush=True)
        terminated = what.startswith("terminate") or what.endswith("in reset")
        obs: Any = {
            "show a wrong shape": np.zeros(4),
            "show a wrong dtype": np.zeros(3, complex),
            "show nan": np.array([0, np.nan, 0]),
        }.get(what, self._show())
        reward: Any = {"pay nan": float("nan"), "pay a text": "1.5"}.get(what, self._time)
        out = (
            obs,
            reward,
            "False" if what == "end by a text" else terminated,
            what.endswith("truncate"),
            {},
        )
        return out[:4] if what == "return four" else out

    def _show(self) -> np.ndarray:
        return np.array([self._seed, self._episode, self._time], np.float64)


def spaced(observation: str = "Box", action: str = "Discrete") -> gymnasium.Env:
    """An environment with these kinds of spaces that shows samples of the one,
    and insists on the other.
    """
    kinds = {
        "Box": spaces.Box(-1, 1, (2, 3), np.float64),
        "Image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
        "Grey": spaces.Box(0, 255, (12, 14), np.uint8),
        "Whole": spaces.Box(-3, 3, (2,), np.int64),
        "Wide": spaces.Box(2**31, 2**40, (2,), np.int64),
        "Narrow": spaces.Box(-0.1, 0.1, (2,), np.float64),
        "Discrete": spaces.Discrete(3, start=-1),
        "MultiDiscrete": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[5, 0], [-3, 0]]),
        "MultiBinary": spaces.MultiBinary((2, 2)),
        "Dict": spaces.Dict(x=spaces.Discrete(2)),
        "Tuple": spaces.Tuple((spaces.Discrete(2),)),
        "Text": spaces.Text(3),
        "Words": spaces.Dict(x=spaces.Text(3)),
    }

    class Spaced(gymnasium.Env):
        observation_space, action_space = kinds[observation], kinds[action]

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.observation_space.seed(seed)
            self.shown = [self.observation_space.sample()]
            return self.shown[-1], {}

        def step(self, action: Any) -> Any:
            assert action in self.action_space, action
            self.shown.append(self.observation_space.sample())
            return self.shown[-1], np.sum(action), False, False, {}

    return Spaced()


class Halving(gymnasium.Env):
    """Halves its action in place, as simulators do that rescale it,
    and pays the sum of what it was given.
    """

    observation_space = spaces.Box(-1, 1, (1,))

    def __init__(self, parts: str = "") -> None:
        box = spaces.Box(-1, 1, (2,))
        self.action_space: Any = {
            "Dict": spaces.Dict(a=box, b=box),
            "Tuple": spaces.Tuple((box, box)),
        }.get(parts, box)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        arrays = list(action.values()) if isinstance(action, dict) else action
        arrays = arrays if isinstance(arrays, list | tuple) else [action]
        given = float(sum(x.sum() for x in arrays))
        for x in arrays:
            x *= 0.5
        return np.zeros(1, np.float32), given, False, False, {}


class Huge(gymnasium.Env):
    """Shows a number beyond float32, after its reset."""

    observation_space, action_space = (
        spaces.Box(-np.inf, np.inf, (1,), np.float64),
        spaces.Discrete(2),
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        return np.full(1, 1e39), 0.0, False, False, {}


def wrapped(wrapper: str = "") -> gymnasium.Env:
    """CartPole in a wrapper of Gymnasium's."""
    more = {"ClipReward": (-1.0, 1.0), "FrameStackObservation": (2,)}.get(wrapper, ())
    return getattr(gymnasium.wrappers, wrapper)(gymnasium.make("CartPole-v1"), *more)


def nothing() -> Any:
    return {}


def vector() -> Any:
    """No environment, but a vector of them."""
    return gymnasium.vector.SyncVectorEnv([make])


def sized(size: int) -> gymnasium.Env:
    """Has an option without a default."""
    return Scripted(size=size)


gymnasium.register("Scripted-v0", entry_point=Scripted, max_episode_steps=5)
gymnasium.register("faulty/LacksALibrary-v0", entry_point="a_library_that_is_not_there:Env")
