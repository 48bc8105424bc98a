"""Importance weighted actor-learner architecture: Espeholt et al. (2018),
https://arxiv.org/abs/1802.01561.
"""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms.actor_critic import ActorCriticConfig, actor_critic
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import jax, jnp, returns
from jaxrl_dist.types import Algorithm, Aux, Context, EnvSpec, Rollout, Variables, swap_axes


@dataclasses.dataclass(frozen=True)
class IMPALA(ActorCriticConfig):
    """An actor-critic that corrects for policy lag with V-trace (Espeholt et al. 2018).

    The optimiser is Adam; the paper uses RMSProp.
    """

    presets = "impala"

    trace_lambda: float = setting(1.0, low=0, high=1)
    """Decay of the corrections along a trace (remark 2)."""
    correction: bool = True
    """Correct for policy lag; if off, learn as if the newest policy had acted."""
    clip_rho: float = setting(1.0, above=0)
    """Largest importance weight of a value error and of
    the policy's gradient (rho-bar of equation 1)."""
    clip_c: float = setting(1.0, above=0)
    """Largest importance weight along a trace (c-bar of equation 1)."""

    def make(self, spec: EnvSpec) -> Algorithm:
        net = actor_critic(self, spec)

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> Rollout:
            return rollout.env_major()

        def loss(
            variables: Variables, batch: Rollout, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            rollout = batch.env_major()
            distribution, values = net.unroll(variables.params, rollout)
            log_prob = distribution.log_prob(rollout.action)
            if self.correction:
                log_rhos = log_prob - rollout.extras["log_prob"]
            else:
                log_rhos = jnp.zeros_like(log_prob)
            # The targets depend on the parameters too, but no gradient flows through them.
            vs, advantage = returns.vtrace(
                *rollout.outcomes,
                values,
                log_rhos,
                self.discount,
                gae_lambda=self.trace_lambda,
                clip_rho=self.clip_rho,
                clip_c=self.clip_c,
                clip_pg_rho=self.clip_rho,
            )
            policy_loss = -log_prob * advantage  # section 4.2
            value_loss = 0.5 * jnp.square(vs - values[:-1])
            importance = {"policy/importance": jnp.exp(log_rhos)}
            total, metrics = swap_axes(
                self.combined(policy_loss, value_loss, distribution.entropy(), **importance)
            )
            return total, batch.valid, Aux(metrics)

        return Algorithm(
            postprocess=postprocess,
            loss=loss,
            optimizer=self.clipped_optimizer("adam", eps=1e-5),
            corrects_lag=self.correction,
            **net.acting() | {"window": None},
        )
