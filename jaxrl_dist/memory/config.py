"""Flags of replay, which algorithms inherit."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.checks import MAX_SIZE, check_range, check_used
from jaxrl_dist.nn.config import CoreConfig
from jaxrl_dist.nn.optimizers import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class ReplayConfig(CoreConfig, OptimizerConfig):
    """Flags of learning from replayed experience."""

    learning_rate: float = 1e-3
    """Step size of the optimiser, Adam by default."""
    discount: float = 0.99
    """Discount factor of future rewards."""
    batch_size: int = 256
    """Windows per update, over all devices."""
    replay_capacity: int = 100_000
    """Agent steps that the memory holds, over all environments; a default is rounded down to what they divide."""
    replay_ratio: float = 1.0
    """Updates per agent step; with one agent, per env step."""
    learning_starts: int = 1_000
    """Env steps before the first update."""
    n_step: int = 1
    """Rewards summed before the bootstrap (Sutton 1988)."""
    priority_exponent: float | None = None
    """alpha of prioritised replay (Schaul et al. 2016, equation 1); None: uniform replay."""
    importance_exponent: float = 0.4
    """beta of prioritised replay's importance weights (section 3.4)."""
    burn_in: int = 8
    """Steps before the training steps that only update the stored recurrent state (Kapturowski et al. 2019, section
    3)."""
    sequence_length: int = 16
    """Training steps of a window, with a recurrent core."""
    max_priority_share: float = 0.9
    """eta: weight of the largest error in a window's priority, with a recurrent core; the mean gets the rest
    (Kapturowski et al. 2019, section 2.3)."""

    @classmethod
    def recurrent_preset(cls, preset: dict[str, Any]) -> dict[str, Any]:
        """Returns an environment's preset for a run with a recurrent core.

        A window then has 16 training steps instead of 1. With a quarter of the windows and a quarter of the updates, an
        env step is used as often as without a core. An algorithm that always has a core keeps its values.
        """
        if cls.core != "none":
            return preset
        flags = {"batch_size": cls.batch_size, "replay_ratio": cls.replay_ratio, **preset}
        return {**flags, "batch_size": max(1, flags["batch_size"] // 4), "replay_ratio": flags["replay_ratio"] / 4}

    def validate(self) -> None:
        super().validate()
        check_range(self, "learning_rate", "replay_ratio", above=0)
        check_range(self, "discount", low=0, high=1)
        check_range(self, "batch_size", "n_step", low=1, high=MAX_SIZE)
        check_range(self, "replay_capacity", low=1)
        check_range(self, "learning_starts", low=0)
        check_range(self, "priority_exponent", "importance_exponent", low=0, high=1)
        check_range(self, "burn_in", low=0, high=MAX_SIZE)
        check_range(self, "sequence_length", low=1, high=MAX_SIZE)
        check_range(self, "max_priority_share", low=0, high=1)
        sequential = "burn_in", "sequence_length", "max_priority_share"
        check_used(self, *sequential, there=self.core != "none", needed="--core")
        prioritized = self.priority_exponent is not None
        check_used(self, "importance_exponent", there=prioritized, needed="--priority-exponent")
