"""Advantage actor-critic, synchronous: Mnih et al. (2016), https://arxiv.org/abs/1602.01783."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms.actor_critic import ActorCriticConfig, policy_gradient
from jaxrl_dist.checks import check_used
from jaxrl_dist.config.values import setting
from jaxrl_dist.types import Algorithm, EnvSpec


@dataclasses.dataclass(frozen=True)
class A2C(ActorCriticConfig, learning_rate=7e-4):
    """Advantage actor-critic (Mnih et al. 2016): one RMSProp update per rollout."""

    presets = "a2c"

    rms_decay: float = setting(0.99, low=0, high=1)
    """Decay of RMSProp's running mean of squared gradients (section 8 of the supplement)."""
    rms_epsilon: float = setting(1e-5, above=0)
    """Added to the mean of squared gradients, under the root (section 4.5)."""
    gae_lambda: float = setting(1.0, low=0, high=1)
    """Decay of generalised advantage estimation:
    1 is the paper's n-step return to the end of the rollout."""

    def validate(self) -> None:
        super().validate()
        needed = "A2C's own RMSProp, which --optimizer replaces"
        check_used(self, "rms_decay", "rms_epsilon", active=self.optimizer is None, needed=needed)

    def make(self, spec: EnvSpec) -> Algorithm:
        optimizer = self.clipped_optimizer("rmsprop", decay=self.rms_decay, eps=self.rms_epsilon)
        return policy_gradient(self, spec, self.gae_lambda, optimizer)
