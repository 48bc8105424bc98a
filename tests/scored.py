"""``own.Scored`` for Gymnasium, in a module that worker processes import at once: it needs no
JAX.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class HostScored(gymnasium.Env):
    """Reports the success at the end alone."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-3, 3, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.place, self.time = self.place + 2 * int(action) - 1, self.time + 1
        ended, cut = abs(self.place) >= 3, self.time >= 7
        info: dict[str, Any] = {"task": {"cost": np.array([abs(self.place)])}, "words": "none"}
        info |= {"late": self.place} if self.time > 5 else {}
        info |= {"success": self.place >= 3} if ended or cut else {}
        return np.float32([self.place]), float(self.place), ended, cut, info
