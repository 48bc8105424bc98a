"""Deep deterministic policy gradient: Lillicrap et al. (2016), https://arxiv.org/abs/1509.02971."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_dist.algorithms.td3 import TD3


@dataclasses.dataclass(frozen=True)
class DDPG(TD3):
    """Deep deterministic policy gradient (Lillicrap et al. 2016): TD3 with one critic and none of its additions."""

    num_critics: int = 1
    """Critics, of which the least counts; more than one is TD3's addition."""
    actor_period: int = 1
    """Updates of the critic for each of the actor and the targets; more than one is TD3's addition."""
    target_noise: float = 0.0
    """Standard deviation of noise on the target's action, which is TD3's addition."""
    noise: Literal["gaussian", "ornstein_uhlenbeck"] = "ornstein_uhlenbeck"
    """How to explore: with independent noise, or with noise that is correlated in time (section 7)."""
    noise_std: float = 0.2
    """Standard deviation of what that noise adds at each step, to actions that span -1 .. 1 (section 7)."""
