"""REINFORCE with a learned baseline: Williams (1992), https://doi.org/10.1007/BF00992696."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxrl_dist.checks import check_range
from jaxrl_dist.nn.config import NetworkConfig

if TYPE_CHECKING:
    from jaxrl_dist.types import Algorithm, EnvSpec


@dataclasses.dataclass(frozen=True)
class PG(NetworkConfig):
    """REINFORCE with a learned baseline (Williams 1992): whole returns, bootstrapped only where a rollout ends."""

    learning_rate: float = 3e-3
    """Step size of Adam."""
    anneal_updates: int | None = None
    """Number of updates over which the step size falls linearly to zero; None keeps it constant."""
    discount: float = 0.99
    """Discount factor of future rewards."""
    value_coefficient: float = 0.5
    """Weight of the baseline's squared error."""
    entropy_coefficient: float = 0.0
    """Weight of an entropy bonus; plain REINFORCE has none."""
    max_gradient_norm: float = 0.5
    """Gradients with a larger global norm are scaled down to it."""

    def validate(self) -> None:
        super().validate()
        check_range(self, "learning_rate", "max_gradient_norm", above=0)
        check_range(self, "discount", low=0, high=1)
        check_range(self, "anneal_updates", low=1)
        check_range(self, "value_coefficient", "entropy_coefficient", low=0)

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        """Flags that differ from the defaults above for this kind of environment."""
        return {"num_envs": 8, "rollout_length": 128}

    def make(self, spec: EnvSpec) -> Algorithm:
        import optax  # these here, not above, so that --help need not wait for JAX

        from jaxrl_dist.algorithms.actor_critic import actor_critic, annealed, policy_gradient
        from jaxrl_dist.types import Algorithm

        net = actor_critic(self, spec)
        postprocess, loss = policy_gradient(net, self.discount, 1.0, self.value_coefficient, self.entropy_coefficient)
        return Algorithm(
            init=net.init,
            policy=net.policy,
            postprocess=postprocess,
            loss=loss,
            optimizer=optax.chain(
                optax.clip_by_global_norm(self.max_gradient_norm),
                optax.adam(annealed(self.learning_rate, self.anneal_updates)),
            ),
            initial_core=net.initial_core,
            window=net.window,
        )
