"""Proximal policy optimisation: Schulman et al. (2017), https://arxiv.org/abs/1707.06347."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_dist.algorithms.actor_critic import ActorCritic, ActorCriticConfig, actor_critic
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import jax, jnp, mesh, returns
from jaxrl_dist.types import Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Variables

SMALLEST_STD = 0.01
"""The smallest standard deviation by which advantages are divided: before the first reward, they
are only the errors of the values. Hafner et al. (2023, DreamerV3) do not scale up small returns for
the same reason. Measured: on a grid of 8 x 8 cells with a reward in one corner, and on MountainCar,
five of five seeds find the goal; without it, two of three and four of five. With 0.03, no seed
finds MountainCar's, which the noise helps to explore."""


@dataclasses.dataclass(frozen=True)
class PPO(ActorCriticConfig):
    """Proximal policy optimisation (Schulman et al. 2017,
    equation 9) with clipped policy and value losses.
    """

    presets = "ppo"

    gae_lambda: float = setting(0.95, low=0, high=1)
    """Decay of generalised advantage estimation: 0 is the one-step error, 1 the whole return."""
    num_epochs: int = setting(4, low=1)
    """Passes over each rollout."""
    num_minibatches: int = setting(4, low=1)
    """Minibatches of each pass; each makes one update."""
    clip_epsilon: float = setting(0.2, above=0)
    """Clip range of the probability ratio around 1 (equation 7)."""
    value_clip_epsilon: float | None = setting(None, above=0)
    """Clip range of a value around its estimate while acting; None: no clipping."""
    target_kl: float | None = setting(None, above=0)
    """Stop learning from a rollout once its approximate KL
    divergence exceeds 1.5 times this (Stable-Baselines3)."""
    normalize_advantages: bool = True
    """Shift the advantages of each rollout to mean 0 and
    divide them by their standard deviation (at least 0.01)."""

    @classmethod
    def recurrent_preset(cls, preset: dict[str, Any]) -> dict[str, Any]:
        """Returns an environment's preset for a run with a recurrent core:
        at least 32 environments.

        Minibatches hold whole rollouts of some environments, here of four or more. With 8
        environments, a minibatch of the defaults has two, and PPO stays at about 400 on CartPole
        without velocities, where it reaches 500 with 32: measured. Otherwise as for all
        actor-critics.
        """
        preset = {"num_minibatches": cls.num_minibatches, **super().recurrent_preset(preset)}
        num_envs = max(32, preset.get("num_envs", 0))
        return preset | {
            "num_envs": num_envs,
            "num_minibatches": min(preset["num_minibatches"], num_envs // 4),
        }

    def estimate(
        self, net: ActorCritic, variables: Variables, rollout: Rollout
    ) -> tuple[jax.Array, jax.Array]:
        """Returns advantages and value targets, ``[T, B]`` each."""
        values = net.values(variables, rollout)
        advantage = returns.gae(*rollout.outcomes, values, self.discount, self.gae_lambda)
        return advantage, advantage + values[:-1]

    def make(self, spec: EnvSpec) -> Algorithm:
        net = actor_critic(self, spec)

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
            advantage, value_target = self.estimate(net, variables, rollout)
            explained = explained_variance(rollout, value_target)
            if self.normalize_advantages:
                centred = advantage - mesh.global_mean(advantage, rollout.valid)
                std = jnp.sqrt(mesh.global_mean(jnp.square(centred), rollout.valid) + 1e-8)
                advantage = centred / jnp.maximum(std, SMALLEST_STD)
            return net.examples(
                rollout,
                **rollout.extras,
                advantage=advantage,
                value_target=value_target,
                explained=explained,
            )

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            distribution, value = net.evaluate(variables.params, batch)
            log_ratio = distribution.log_prob(batch["action"]) - batch["log_prob"]
            ratio = jnp.exp(log_ratio)
            clipped = jnp.clip(ratio, 1 - self.clip_epsilon, 1 + self.clip_epsilon)
            policy_loss = -jnp.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
            value_loss = 0.5 * jnp.square(value - batch["value_target"])
            if self.value_clip_epsilon is not None:
                step = jnp.clip(
                    value - batch["value"], -self.value_clip_epsilon, self.value_clip_epsilon
                )
                value_loss = jnp.maximum(
                    value_loss, 0.5 * jnp.square(batch["value"] + step - batch["value_target"])
                )
            further = {
                "value/mean": value,
                # The low-variance estimator k3 of Schulman (2020),
                # http://joschu.net/blog/kl-approx.html
                "policy/approx_kl": ratio - 1 - log_ratio,
                "policy/clip_fraction": (jnp.abs(ratio - 1) > self.clip_epsilon).astype(
                    jnp.float32
                ),
            }
            if "explained" in batch:  # a batch of the user's may lack it
                further["value/explained_variance"] = batch["explained"]
            total, metrics = self.combined(
                policy_loss, value_loss, distribution.entropy(), **further
            )
            return total, batch["valid"], Aux(metrics)

        def too_far(metrics: Mapping[str, jax.Array]) -> jax.Array:
            assert self.target_kl is not None
            return metrics["policy/approx_kl"] > 1.5 * self.target_kl

        return Algorithm(
            postprocess=postprocess,
            loss=loss,
            optimizer=self.clipped_optimizer("adam", eps=1e-5),
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            done=None if self.target_kl is None else too_far,
            **net.acting(),
        )


def explained_variance(rollout: Rollout, value_target: jax.Array) -> jax.Array:
    """Returns which share of the variance of a rollout's value targets ``[T, B]`` its values
    explain, for each step: 1 - Var(targets - values) / Var(targets), or 0 if the targets are equal.
    """

    def variance(x: jax.Array) -> jax.Array:
        centred = x - mesh.global_mean(x, rollout.valid)
        return mesh.global_mean(jnp.square(centred), rollout.valid)

    whole = variance(value_target)
    rest = variance(value_target - rollout.extras["value"])
    share = jnp.where(whole > 0, 1 - rest / jnp.maximum(whole, 1e-30), 0.0)
    return jnp.full_like(value_target, share)
