"""REINFORCE with a learned baseline: Williams (1992), https://doi.org/10.1007/BF00992696."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms.actor_critic import ActorCriticConfig, policy_gradient
from jaxrl_dist.types import Algorithm, EnvSpec


@dataclasses.dataclass(frozen=True)
class PG(ActorCriticConfig, learning_rate=3e-3, entropy_coefficient=0.0):
    """REINFORCE with a learned baseline (Williams 1992): whole returns,
    bootstrapped only where a rollout ends.
    """

    presets = "pg"

    def make(self, spec: EnvSpec) -> Algorithm:
        return policy_gradient(self, spec, 1.0, self.clipped_optimizer("adam"))
