"""Implicit Q-learning: Kostrikov et al. (2021), https://arxiv.org/abs/2110.06169;
continuous and discrete actions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.algorithms import sequences
from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.algorithms.replayed import ActionScale, copied, n_step_replay, num_actions
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import distributions, jax, jnp, networks, observations, optax, returns, spaces
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.nn.config import CriticConfig
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Variables

OPTIMIZERS = {"actor": "actor", "log_std": "actor"}
"""The optimiser of each part of the parameters, if it is not the critic's."""
LOG_STD = -5.0, 2.0
"""Bounds of the policy's log standard deviation, in units where actions span -1 ..
1 (the authors' code)."""


@dataclasses.dataclass(frozen=True)
class IQL(
    TablePresets,
    ReplayConfig,
    CriticConfig,
    hidden_sizes=(256, 256),
    activation="relu",
    learning_rate=3e-4,
    replay_capacity=1_000_000,
):
    """Implicit Q-learning (Kostrikov et al. 2021),
    which never asks for the value of an action outside its data.
    """

    presets = "iql"

    actor_learning_rate: float = setting(3e-4, above=0)
    """Step size of the optimiser for the actor."""
    target_rate: float = setting(0.005, above=0, high=1)
    """Fraction by which each update moves the target critics towards the critics."""
    expectile: float = setting(0.7, above=0, below=1)
    """tau: a state's value is this expectile of its actions' values;
    towards 1 it is their maximum (equation 5)."""
    beta: float = setting(3.0, low=0)
    """Inverse temperature: how strongly the policy prefers actions of large advantage (equation
    7)."""
    max_weight: float = setting(100.0, above=0, needs="beta")
    """Largest weight ``exp(beta A)`` of an action in the policy's loss (the authors' code)."""

    def make(self, spec: EnvSpec) -> Algorithm:
        discrete = isinstance(spec.action, spaces.Discrete)
        if discrete:
            scale = None
        else:
            scale = ActionScale.of(self, spec, "categories or vectors of numbers")
        if scale is None:
            size = num_actions(self, spec)
        else:
            size = scale.size
        if scale is None:
            sizes: dict[str, Any] = {"num_actions": size}
        else:
            sizes = {"action_size": size}
        head = distributions.policy_head(spec.action)
        space = observations.input_space(spec)
        recurrence = sequences.recurrence(self, spec)
        actor = networks.policy_network(
            self, observations.input_space(spec, self.hidden), size, recurrence
        )
        critic = networks.critic_network(self, space, 2, **sizes, recurrence=recurrence)
        value = networks.critic_network(self, space, 1, recurrence=recurrence, name="value")
        networks_of = {"actor": actor, "critic": critic, "value": value}

        def choose(params: PyTree, obs: PyTree) -> distributions.Distribution:
            """Returns the policy's distribution of the environment's actions ``[N]``."""
            outputs = actor.apply(params["actor"], obs)
            if scale is not None:
                log_std = jnp.clip(params["log_std"], *LOG_STD)
                outputs = jnp.concatenate(
                    [jnp.tanh(outputs), jnp.broadcast_to(log_std, outputs.shape)], axis=-1
                )
            return head.distribution(outputs, observations.legal(spec, obs))

        def values(params: PyTree, obs: PyTree, action: jax.Array) -> jax.Array:
            """Returns the critics' values ``[2, N]`` of the environment's actions."""
            if scale is None:
                return critic.apply(params, obs)[:, jnp.arange(len(action)), action]
            return critic.apply(params, obs, jnp.clip(scale.from_env(action), -1.0, 1.0))

        def init(key: jax.Array) -> Variables:
            keys = jax.random.split(key, len(networks_of))
            params = {
                name: network.init(key)
                for (name, network), key in zip(networks_of.items(), keys, strict=True)
            }
            return Variables(
                params if scale is None else params | {"log_std": jnp.zeros(scale.size)}, ()
            )

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            chosen = choose(variables.params, obs)
            return chosen.mode() if context.keys is None else chosen.sample(context.keys), core, {}

        def log_prob(
            variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
        ) -> jax.Array:
            return choose(variables.params, obs).log_prob(action)

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            params, stop = variables.params, returns.constant
            obs = batch["obs"]
            action = batch["action"]

            # Equation 5, by the smaller target critic
            v = value.apply(params["value"], obs)[0, :, 0]
            advantage = stop(values(context.target, obs, action).min(axis=0)) - v
            value_loss = jnp.where(
                advantage < 0, 1.0 - self.expectile, self.expectile
            ) * jnp.square(advantage)

            # Equation 6
            next_v = value.apply(params["value"], batch["next_obs"])[0, :, 0]
            q = values(params["critic"], obs, action)
            error = q - stop(batch["reward"] + batch["discount"] * next_v)[None]
            critic_loss = jnp.sum(jnp.square(error), axis=0)

            # Equation 7
            weight = stop(jnp.minimum(jnp.exp(self.beta * advantage), self.max_weight))
            actor_loss = -weight * choose(params, obs).log_prob(action)

            metrics = {
                "loss/value": value_loss,
                "loss/critic": critic_loss,
                "loss/actor": actor_loss,
                "policy/weight": weight,
                "q/mean": q.mean(axis=0),
            }
            priority = stop(jnp.abs(error).mean(axis=0))
            return value_loss + critic_loss + actor_loss, batch["valid"], Aux(metrics, priority)

        algorithm = Algorithm(
            init=init,
            policy=policy,
            log_prob=log_prob,
            loss=loss,
            optimizer=optax.partition(
                {
                    "actor": self.make_optimizer("adam", self.actor_learning_rate),
                    "critic": self.make_optimizer("adam", self.learning_rate),
                },
                lambda params: {name: OPTIMIZERS.get(name, "critic") for name in params},
            ),
            target=lambda params, target, updates: optax.incremental_update(
                params["critic"], target, self.target_rate
            ),
            initial_target=lambda params: copied(params["critic"]),
            **n_step_replay(self),
        )
        return sequences.sequences(self, spec, algorithm, networks_of, lambda params: params)
