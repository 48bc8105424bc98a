"""An environment whose observations say in which episode of which process they are, and when."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counting(gymnasium.Env[np.ndarray, int]):
    """Observations are ``[number of the environment, episode, step]``; an episode has 5 steps."""

    observation_space = spaces.Box(0, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)
    numbers = itertools.count(1)

    def __init__(self) -> None:
        self._number = next(self.numbers)
        self._episode = 0
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode += 1
        self._step = 0
        return self._obs(), {}

    def step(self, action: int) -> Any:
        self._step += 1
        return self._obs(), 1.0, self._step == 5, False, {}

    def _obs(self) -> np.ndarray:
        return np.array([self._number, self._episode, self._step], np.float32)
