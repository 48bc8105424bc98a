"""Advantage actor-critic, synchronous: Mnih et al. (2016), https://arxiv.org/abs/1602.01783."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxrl_dist.checks import check_range
from jaxrl_dist.nn.config import NetworkConfig

if TYPE_CHECKING:
    from jaxrl_dist.types import Algorithm, EnvSpec


@dataclasses.dataclass(frozen=True)
class A2C(NetworkConfig):
    """Advantage actor-critic (Mnih et al. 2016): one update on each rollout."""

    learning_rate: float = 7e-4
    """Step size of RMSProp."""
    anneal_updates: int | None = None
    """Number of updates over which the step size falls linearly to zero; None keeps it constant."""
    rms_decay: float = 0.99
    """Decay of RMSProp's running mean of squared gradients (section 8 of the supplement)."""
    rms_epsilon: float = 1e-5
    """Added to RMSProp's denominator."""
    discount: float = 0.99
    """Discount factor of future rewards."""
    gae_lambda: float = 1.0
    """Decay of generalised advantage estimation: 1 is the paper's n-step return to the end of the rollout."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    entropy_coefficient: float = 0.01
    """Weight of the entropy bonus (section 4.3)."""
    max_gradient_norm: float = 0.5
    """Gradients with a larger global norm are scaled down to it."""

    def validate(self) -> None:
        super().validate()
        check_range(self, "learning_rate", "max_gradient_norm", "rms_epsilon", above=0)
        check_range(self, "discount", "gae_lambda", "rms_decay", low=0, high=1)
        check_range(self, "anneal_updates", low=1)
        check_range(self, "value_coefficient", "entropy_coefficient", low=0)

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        """Flags that differ from the defaults above for this kind of environment."""
        from jaxrl_dist.spaces import Box

        preset: dict[str, Any] = {"rollout_length": 16}
        if isinstance(spec.action, Box):  # unscaled, Pendulum's returns of -1000 drown the policy's gradient
            preset |= {"learning_rate": 2e-3, "scale_rewards": True, "gae_lambda": 0.95, "entropy_coefficient": 0.0}
        elif not isinstance(spec.observation, Box):  # tables of states with rare rewards
            preset |= {"learning_rate": 2e-3, "scale_rewards": True}
        return preset

    def make(self, spec: EnvSpec) -> Algorithm:
        import optax  # these here, not above, so that --help need not wait for JAX

        from jaxrl_dist.algorithms.actor_critic import actor_critic, annealed, policy_gradient
        from jaxrl_dist.types import Algorithm

        net = actor_critic(self, spec)
        postprocess, loss = policy_gradient(
            net, self.discount, self.gae_lambda, self.value_coefficient, self.entropy_coefficient
        )
        return Algorithm(
            init=net.init,
            policy=net.policy,
            postprocess=postprocess,
            loss=loss,
            optimizer=optax.chain(
                optax.clip_by_global_norm(self.max_gradient_norm),
                optax.rmsprop(
                    annealed(self.learning_rate, self.anneal_updates), decay=self.rms_decay, eps=self.rms_epsilon
                ),
            ),
            initial_core=net.initial_core,
            window=net.window,
        )
