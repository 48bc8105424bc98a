"""Flags of replay, which algorithms inherit."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.checks import MAX_SIZE, check_used
from jaxrl_dist.config.values import setting
from jaxrl_dist.nn.config import CoreConfig
from jaxrl_dist.nn.optimizers import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class ReplayConfig(CoreConfig, OptimizerConfig):
    """Flags of learning from replayed experience."""

    learning_rate: float = setting(1e-3, above=0)
    """Step size of the optimiser, Adam by default."""
    discount: float = setting(0.99, low=0, high=1)
    """Discount factor of future rewards."""
    batch_size: int = setting(256, low=1, high=MAX_SIZE)
    """Windows per update, over all devices."""
    replay_capacity: int = setting(100_000, low=1)
    """Agent steps that the memory holds, over all environments;
    a default is rounded down to what they divide."""
    replay_ratio: float = setting(1.0, above=0)
    """Updates per agent step; with one agent, per env step.
    A default is rounded down to whole updates after each rollout."""
    learning_starts: int = setting(1_000, low=0)
    """Env steps before the first update."""
    n_step: int = setting(1, low=1, high=MAX_SIZE)
    """Rewards summed before the bootstrap (Sutton 1988)."""
    priority_exponent: float | None = setting(None, low=0, high=1)
    """alpha of prioritised replay (Schaul et al. 2016, equation 1); None: uniform replay."""
    importance_exponent: float = setting(0.4, low=0, high=1)
    """beta of prioritised replay's importance weights (section 3.4)."""
    burn_in: int = setting(8, low=0, high=MAX_SIZE)
    """Steps before the training steps that only update the stored
    recurrent state (Kapturowski et al. 2019, section 3)."""
    sequence_length: int = setting(16, low=1, high=MAX_SIZE)
    """Training steps of a window, with a recurrent core."""
    max_priority_share: float = setting(0.9, low=0, high=1)
    """eta: weight of the largest error in a window's priority, with a recurrent core; the mean gets
    the rest (Kapturowski et al. 2019, section 2.3)."""

    @classmethod
    def recurrent_preset(cls, preset: dict[str, Any]) -> dict[str, Any]:
        """Returns an environment's preset for a run with a recurrent core.

        A window then has 16 training steps instead of 1. With a quarter of the windows and a
        quarter of the updates, an env step is used as often as without a core.
        """
        flags = {"batch_size": cls.batch_size, "replay_ratio": cls.replay_ratio, **preset}
        return {
            **flags,
            "batch_size": max(1, flags["batch_size"] // 4),
            "replay_ratio": flags["replay_ratio"] / 4,
        }

    def validate(self) -> None:
        super().validate()
        sequential = "burn_in", "sequence_length", "max_priority_share"
        check_used(self, *sequential, active=self.core != "none", needed="--core")
        prioritized = self.priority_exponent is not None
        check_used(self, "importance_exponent", active=prioritized, needed="--priority-exponent")


@dataclasses.dataclass(frozen=True)
class RandomStartConfig(ReplayConfig):
    """Flags of replay that begins with random actions."""

    random_steps: int | None = setting(None, low=0, high=10**15)
    """Env steps of uniformly random actions before the policy acts; None: until the first update,
    and none for a policy that `--init-from` has loaded."""

    def acts_randomly(self, env_step: Any) -> Any:
        """Returns whether actions are still random; ``env_step`` may be traced."""
        return env_step < (self.learning_starts if self.random_steps is None else self.random_steps)
