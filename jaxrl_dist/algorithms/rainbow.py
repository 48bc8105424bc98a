"""Rainbow: Hessel et al. (2018), https://arxiv.org/abs/1710.02298."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms.dqn import DQN


@dataclasses.dataclass(frozen=True)
class Rainbow(
    DQN,
    dueling=True,
    priority_exponent=0.5,
    num_atoms=51,
    noisy=True,
    epsilon_start=0.0,
    epsilon_end=0.0,
):
    """Deep Q-learning with all of Rainbow's extensions switched on (Hessel et al. 2018, table 1).

    The noisy layers explore, and epsilon is 0.
    """

    presets = "rainbow"
