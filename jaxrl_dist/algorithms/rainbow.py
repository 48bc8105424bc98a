"""Rainbow: Hessel et al. (2018), https://arxiv.org/abs/1710.02298."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxrl_dist.algorithms.dqn import DQN

if TYPE_CHECKING:
    from jaxrl_dist.types import EnvSpec


@dataclasses.dataclass(frozen=True)
class Rainbow(DQN):
    """Deep Q-learning with all of Rainbow's extensions switched on (Hessel et al. 2018, table 1)."""

    dueling: bool = True
    """Separate heads for the state's value and the actions' advantages (Wang et al. 2016, equation 9)."""
    priority_exponent: float | None = 0.5
    """alpha of prioritised replay (Schaul et al. 2016, equation 1); None: uniform replay."""
    num_atoms: int = 51
    """Atoms of the distribution of returns (Bellemare et al. 2017); 1: only its mean."""
    noisy: bool = True
    """Noisy layers explore (Fortunato et al. 2018), beside what epsilon does."""
    epsilon_start: float = 0.0
    """Probability of a random action at the start; the noisy layers explore without."""
    epsilon_end: float = 0.0
    """Probability of a random action from ``epsilon_steps`` on."""

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        """Flags that differ from the defaults above for this kind of environment."""
        preset: dict[str, Any] = {"num_envs": 8, "rollout_length": 4}
        if spec.family == "classic_control":  # at most 1 a step in size, so 1 / (1 - discount) in all
            preset |= {"value_min": -100.0, "value_max": 100.0, "replay_ratio": 0.25}
        return preset
