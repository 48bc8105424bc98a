"""Soft actor-critic: Haarnoja et al. (2018b), https://arxiv.org/abs/1812.05905; discrete: Christodoulou (2019)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_dist.algorithms import exploration, sequences
from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.algorithms.replayed import ActionScale, copied, n_step_replay, num_actions
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import distributions, jax, jnp, networks, observations, optax, spaces
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.nn.config import CriticConfig, NoiseConfig
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Variables


@dataclasses.dataclass(frozen=True)
class SAC(
    TablePresets,
    ReplayConfig,
    CriticConfig,
    NoiseConfig,
    hidden_sizes=(256, 256),
    activation="relu",
    replay_capacity=1_000_000,
):
    """Soft actor-critic with two critics and a learned temperature (Haarnoja et al. 2018)."""

    learning_rate: float = 1e-3
    """Step size of the optimiser for the critics and the temperature."""
    actor_learning_rate: float = setting(3e-4, above=0)
    """Step size of the optimiser for the actor."""
    target_rate: float = setting(0.005, above=0, high=1)
    """Fraction by which each update moves the target critics towards the critics (table 1)."""
    temperature: float | None = setting(None, above=0)
    """Weight of the entropy; None: learned, so that the entropy approaches its target (section 5)."""
    target_entropy: float | None = setting(None, low=-1e6, high=1e6)
    """Target entropy in nats; None: minus the number of action components, which are scaled to -1 .. 1 (table 1), or
    0.5 log n for n legal discrete actions."""

    def make(self, spec: EnvSpec) -> Algorithm:
        kind = _discrete(self, spec) if isinstance(spec.action, spaces.Discrete) else _continuous(self, spec)
        recurrence = sequences.recurrence(self, spec)
        actor = networks.policy_network(self, observations.seen(spec, self.hidden), kind.num_outputs, recurrence)

        def choose(params: PyTree, obs: PyTree) -> jax.Array:
            return observations.masked(actor.apply(params, obs), observations.legal(spec, obs))

        def init(key: jax.Array) -> Variables:
            actor_key, critic_key = jax.random.split(key)
            params = {"actor": actor.init(actor_key), "critic": kind.critic.init(critic_key)}
            return Variables(params | {"log_temperature": jnp.log(jnp.float32(self.temperature or 1.0))}, ())

        noise_size = self.noise_size(kind.action_size)

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            outputs = choose(variables.params["actor"], obs)
            if self.noise_correlation is not None and context.keys is not None:
                core = exploration.correlated(core, context.keys, self.noise_correlation)
            action = kind.act(outputs, context.keys, core if noise_size else None)
            if context.keys is not None:
                random = kind.act_randomly(context.keys, observations.legal(spec, obs))
                action = jnp.where(context.env_step < self.learning_starts, random, action)
            return action, core, {}

        def loss(variables: Variables, batch: PyTree, context: Context) -> tuple[jax.Array, jax.Array, Aux]:
            params, frozen = variables.params, jax.lax.stop_gradient(variables.params)
            next_keys, keys = jnp.moveaxis(jax.vmap(jax.random.split)(context.keys), 1, 0)
            temperature = jnp.exp(frozen["log_temperature"])
            if self.temperature is not None:  # initial variables may hold another temperature
                temperature = jnp.float32(self.temperature)

            # Equations 2, 3 and 5, with the smaller of two critics.
            outputs = choose(frozen["actor"], batch["next_obs"])
            next_q, next_entropy = kind.expect(context.target, batch["next_obs"], outputs, next_keys)
            value_target = batch["reward"] + batch["discount"] * (next_q + temperature * next_entropy)
            q = kind.taken(params["critic"], batch["obs"], batch["action"])
            error = q - jax.lax.stop_gradient(value_target)[None]
            critic_loss = 0.5 * jnp.sum(jnp.square(error), axis=0)

            # Equation 7
            outputs = choose(params["actor"], batch["obs"])
            new_q, entropy = kind.expect(frozen["critic"], batch["obs"], outputs, keys)
            actor_loss = -(new_q + temperature * entropy)

            # Equation 18 by the logarithm of the temperature, as in the authors' code
            wanted = kind.target_entropy(batch["obs"]) if self.target_entropy is None else self.target_entropy
            excess = jax.lax.stop_gradient(entropy) - wanted
            temperature_loss = (
                params["log_temperature"] * excess if self.temperature is None else jnp.zeros_like(excess)
            )

            metrics = {
                "loss/critic": critic_loss,
                "loss/actor": actor_loss,
                "policy/entropy": entropy,
                "policy/temperature": jnp.broadcast_to(temperature, entropy.shape),
                "q/mean": q.mean(axis=0),
            }
            priority = jax.lax.stop_gradient(jnp.abs(error).mean(axis=0))
            return critic_loss + actor_loss + temperature_loss, batch["valid"], Aux(metrics, priority)

        def update_target(params: PyTree, target: PyTree, updates: jax.Array) -> PyTree:
            del updates
            return optax.incremental_update(params["critic"], target, self.target_rate)

        algorithm = Algorithm(
            init=init,
            policy=policy,
            loss=loss,
            optimizer=optax.partition(
                {
                    "actor": self.make_optimizer("adam", self.actor_learning_rate),
                    "critic": self.make_optimizer("adam", self.learning_rate),
                },
                {"actor": "actor", "critic": "critic", "log_temperature": "critic"},
            ),
            target=update_target,
            initial_target=lambda params: copied(params["critic"]),
            **n_step_replay(self),
            initial_core=lambda num_envs: jnp.zeros((num_envs, noise_size)) if noise_size else (),
        )
        networks_of = {"actor": actor, "critic": kind.critic}
        return sequences.sequences(self, spec, algorithm, networks_of, lambda params: params)


class _Kind(NamedTuple):
    """The parts that depend on the kind of action; ``outputs`` are the actor's, ``[N, num_outputs]``."""

    num_outputs: int
    action_size: int
    """Components of a continuous action; 0: actions are discrete."""
    target_entropy: Callable[[PyTree], float | jax.Array]
    """``(obs) -> nats``, a number or ``[N]``."""
    critic: Any
    act: Callable[..., jax.Array]
    """``(outputs, keys or None, noise or None) -> action`` in the environment's units."""
    act_randomly: Callable[[jax.Array, jax.Array | None], jax.Array]
    """``(keys, legal) -> action``, uniformly distributed over the legal ones."""
    expect: Callable[..., tuple[jax.Array, jax.Array]]
    """``(critic_params, obs, outputs, keys) -> (q [N], entropy [N])``: the policy's expected value under the
    smaller critic, and its entropy; exact for discrete actions, else estimated from one action."""
    taken: Callable[..., jax.Array]
    """``(critic_params, obs, action) -> q [2, N]``."""


def _continuous(config: SAC, spec: EnvSpec) -> _Kind:
    """Squashes actions by tanh (appendix C) to -1 .. 1, where entropies of all environments are comparable."""
    scale = ActionScale.of(config, spec, "categories or vectors of numbers")
    critic = networks.critic_network(
        config, observations.seen(spec), 2, action_size=scale.size, recurrence=sequences.recurrence(config, spec)
    )

    def distribution(outputs: jax.Array) -> distributions.TanhNormal:
        mean, raw = jnp.split(outputs, 2, axis=-1)
        # Bounded smoothly to e^-5 .. e^2, as in the code of Yarats and Kostrikov (2020) and in CleanRL.
        log_std = -5.0 + 0.5 * 7.0 * (jnp.tanh(raw) + 1.0)
        return distributions.TanhNormal(mean, log_std, -jnp.ones(scale.size), jnp.ones(scale.size))

    def act(outputs: jax.Array, keys: jax.Array | None, noise: jax.Array | None) -> jax.Array:
        squashed = distribution(outputs)
        return scale.to_env(squashed.mode() if keys is None else squashed.sample(keys, noise))

    def expect(params: PyTree, obs: jax.Array, outputs: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        action, log_prob = distribution(outputs).sample_and_log_prob(keys)
        return critic.apply(params, obs, action).min(axis=0), -log_prob

    def taken(params: PyTree, obs: jax.Array, action: jax.Array) -> jax.Array:
        return critic.apply(params, obs, scale.from_env(action))

    def act_randomly(keys: jax.Array, legal: jax.Array | None) -> jax.Array:
        del legal
        return scale.uniform(keys)

    def target_entropy(obs: PyTree) -> float:
        del obs
        return -float(scale.size)

    return _Kind(2 * scale.size, scale.size, target_entropy, critic, act, act_randomly, expect, taken)


def _discrete(config: SAC, spec: EnvSpec) -> _Kind:
    """Averages over all actions: Christodoulou (2019), https://arxiv.org/abs/1910.07207, equations 10 to 12."""
    size = num_actions(config, spec)
    critic = networks.critic_network(
        config, observations.seen(spec), 2, num_actions=size, recurrence=sequences.recurrence(config, spec)
    )

    def act(outputs: jax.Array, keys: jax.Array | None, noise: None) -> jax.Array:
        del noise
        chosen = distributions.Categorical(outputs)
        return chosen.mode() if keys is None else chosen.sample(keys)

    def act_randomly(keys: jax.Array, legal: jax.Array | None) -> jax.Array:
        return distributions.Categorical(observations.masked(jnp.zeros((len(keys), size)), legal)).sample(keys)

    def target_entropy(obs: PyTree) -> float | jax.Array:
        legal = observations.legal(spec, obs)
        return 0.5 * (math.log(size) if legal is None else jnp.log(jnp.sum(legal, axis=-1)))

    def expect(params: PyTree, obs: jax.Array, outputs: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        del keys
        q = critic.apply(params, obs).min(axis=0)
        return jnp.sum(jax.nn.softmax(outputs) * q, axis=-1), distributions.Categorical(outputs).entropy()

    def taken(params: PyTree, obs: jax.Array, action: jax.Array) -> jax.Array:
        return critic.apply(params, obs)[:, jnp.arange(len(action)), action]

    return _Kind(size, 0, target_entropy, critic, act, act_randomly, expect, taken)
