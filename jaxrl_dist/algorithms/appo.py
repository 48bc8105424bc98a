"""Asynchronous proximal policy optimisation: PPO's loss on V-trace estimates.

Sources: Schulman et al. (2017), https://arxiv.org/abs/1707.06347, and Espeholt et al. (2018),
https://arxiv.org/abs/1802.01561, combined as in the APPO of RLlib and of Sample Factory (Petrenko
et al. 2020, https://arxiv.org/abs/2006.11751, section 3.4).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.algorithms.actor_critic import ActorCritic
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import jax, returns
from jaxrl_dist.types import Algorithm, EnvSpec, Rollout, Variables


@dataclasses.dataclass(frozen=True)
class APPO(PPO):
    """Asynchronous PPO: the clipped loss on V-trace estimates, which correct for policy lag."""

    clip_rho: float = setting(1.0, above=0)
    """Largest importance weight of a value error (rho-bar
    of V-trace, Espeholt et al. 2018, equation 1)."""
    clip_c: float = setting(1.0, above=0)
    """Largest importance weight along a trace (c-bar of V-trace)."""

    @classmethod
    def preset(cls, spec: EnvSpec) -> dict[str, Any]:
        """Flags that differ from the defaults above for this kind of environment."""
        return {**super().preset(spec), "plan": "asynchronous"}

    def estimate(
        self, net: ActorCritic, variables: Variables, rollout: Rollout
    ) -> tuple[jax.Array, jax.Array]:
        distribution, values = net.unroll(variables.params, rollout)
        log_rhos = distribution.log_prob(rollout.action) - rollout.extras["log_prob"]
        # The loss applies the importance ratio itself, clipped.
        vs, advantage = returns.vtrace(
            *rollout.outcomes,
            values,
            log_rhos,
            self.discount,
            self.gae_lambda,
            self.clip_rho,
            self.clip_c,
            None,
        )
        return advantage, vs

    def make(self, spec: EnvSpec) -> Algorithm:
        return dataclasses.replace(super().make(spec), corrects_lag=True)
