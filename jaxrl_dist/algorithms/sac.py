"""Soft actor-critic: Haarnoja et al. (2018b), https://arxiv.org/abs/1812.05905;
discrete: Christodoulou (2019).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxrl_dist.algorithms import exploration, sequences
from jaxrl_dist.algorithms.conservative import ConservativeConfig
from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.algorithms.replayed import ActionScale, copied, n_step_replay, num_actions
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import (
    distributions,
    jax,
    jnp,
    networks,
    observations,
    optax,
    returns,
    spaces,
    values,
)
from jaxrl_dist.memory.config import RandomStartConfig
from jaxrl_dist.nn.config import CriticConfig, CriticsConfig, NoiseConfig
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Variables

CQL_DRAWS = 10
"""Uniform actions, and actions of each of two policies,
whose values ``--cql-weight`` lowers (the authors' code)."""


@dataclasses.dataclass(frozen=True)
class SAC(
    TablePresets,
    ConservativeConfig,
    RandomStartConfig,
    CriticConfig,
    CriticsConfig,
    NoiseConfig,
    hidden_sizes=(256, 256),
    activation="relu",
    replay_capacity=1_000_000,
):
    """Soft actor-critic with a learned temperature (Haarnoja et al. 2018); more critics,
    and quantiles of their returns, are options.
    """

    presets = "sac"

    learning_rate: float = 1e-3
    """Step size of the optimiser for the critics and the temperature."""
    actor_learning_rate: float = setting(3e-4, above=0)
    """Step size of the optimiser for the actor."""
    target_rate: float = setting(0.005, above=0, high=1)
    """Fraction by which each update moves the target critics towards the critics (table 1)."""
    num_critics: int = setting(2, low=1, high=1000)
    """Number of critics; the smallest value is the target (section 5)."""
    target_critics: int | None = setting(None, low=1)
    """Critics that each target draws, the smallest of which counts, while the actor climbs the mean
    of all (Chen et al. 2021, REDQ: 2 of 10); None: all."""
    temperature: float | None = setting(None, above=0)
    """Weight of the entropy; None: learned, so that the entropy approaches its target (section
    5)."""
    target_entropy: float | None = setting(None, low=-1e6, high=1e6)
    """Target entropy in nats; None: minus the number of action components, which are scaled to -1
    .. 1 (table 1), or 0.5 log n for n legal discrete actions."""

    def validate(self) -> None:
        super().validate()
        if self.target_critics is not None and self.target_critics > self.num_critics:
            raise ConfigError(
                f"--target-critics {self.target_critics} is more than --num-critics "
                f"{self.num_critics}; lower it"
            )

    def make(self, spec: EnvSpec) -> Algorithm:
        discrete = isinstance(spec.action, spaces.Discrete)
        if discrete:
            kind: _Discrete | _Continuous = _Discrete(self, spec)
        else:
            kind = _Continuous(self, spec)
        actor = networks.policy_network(
            self,
            observations.input_space(spec, self.hidden),
            kind.num_outputs,
            sequences.recurrence(self, spec),
        )

        def choose(params: PyTree, obs: PyTree) -> Any:
            """Returns the policy's distribution of actions ``[N]``."""
            outputs = actor.apply(params, obs)
            return kind.distribution(observations.masked(outputs, observations.legal(spec, obs)))

        def init(key: jax.Array) -> Variables:
            actor_key, critic_key = jax.random.split(key)
            params = {"actor": actor.init(actor_key), "critic": kind.critic.init(critic_key)}
            temperature = jnp.float32(1.0 if self.temperature is None else self.temperature)
            return Variables(params | {"log_temperature": jnp.log(temperature)}, ())

        def initial_core(num_envs: int) -> PyTree:
            if kind.noise_size:
                return jnp.zeros((num_envs, kind.noise_size))
            return ()

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            chosen = choose(variables.params["actor"], obs)
            if context.keys is None:
                return kind.to_env(chosen.mode()), core, {}
            if self.noise_correlation is not None:
                core = exploration.correlated(core, context.keys, self.noise_correlation)
            action = kind.to_env(chosen.sample(context.keys, core if kind.noise_size else None))
            random = kind.act_randomly(context.keys, observations.legal(spec, obs))
            return jnp.where(self.acts_randomly(context.env_step), random, action), core, {}

        def log_prob(
            variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
        ) -> jax.Array:
            random = kind.random_log_prob(observations.legal(spec, obs), action)
            chosen = kind.log_prob(choose(variables.params["actor"], obs), action)
            return jnp.where(self.acts_randomly(context.env_step), random, chosen)

        def entropy_weight(variables: Variables) -> jax.Array:
            if self.temperature is not None:  # initial variables may hold another temperature
                return jnp.float32(self.temperature)
            return jnp.exp(variables.params["log_temperature"])

        def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, jax.Array]:
            outputs = kind.critic.apply(variables.params["critic"], obs)
            return kind.climbed(outputs), entropy_weight(variables)

        def critic_loss(
            params: PyTree,
            frozen: PyTree,
            temperature: jax.Array,
            batch: PyTree,
            context: Context,
            keys: jax.Array,
        ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
            """Returns losses ``[N]``, priorities ``[N]`` and metrics: equations 2, 3 and 5."""
            chosen = choose(frozen["actor"], batch["next_obs"])
            ahead, next_entropy = kind.foresee(context.target, batch["next_obs"], chosen, keys)
            next_value = ahead.returns + (temperature * next_entropy)[:, None]
            target = batch["reward"][:, None] + batch["discount"][:, None] * next_value
            outputs = kind.outputs(params["critic"], batch["obs"], batch["action"])
            q = kind.head.mean(outputs)
            losses, priority = values.fit(kind.head, outputs, ahead._replace(returns=target))
            losses *= 0.5
            metrics = {"q/mean": q.mean(axis=0)}
            if self.cql_weight is not None:
                policies = (choose(frozen["actor"], batch["obs"]), chosen)
                floor = batch.get("return")
                log_sum = kind.log_sum(
                    params["critic"], batch["obs"], policies, context.keys, floor
                )
                metrics["loss/cql"] = jnp.sum(log_sum - q, axis=0)
                losses = losses + self.cql_weight * metrics["loss/cql"]
            return losses, priority, metrics | {"loss/critic": losses}

        def temperature_loss(params: PyTree, entropy: jax.Array, obs: PyTree) -> jax.Array:
            """Returns losses ``[N]``: equation 18 by the logarithm of the temperature, as in the
            authors' code.
            """
            target: float | jax.Array | None = self.target_entropy
            if target is None:
                target = kind.target_entropy(obs)
            excess = returns.constant(entropy) - target
            if self.temperature is None:
                return params["log_temperature"] * excess
            return jnp.zeros_like(excess)

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            params = variables.params
            frozen = returns.constant(variables.params)
            next_keys, keys = jnp.moveaxis(jax.vmap(jax.random.split)(context.keys), 1, 0)
            temperature = entropy_weight(variables._replace(params=frozen))
            critic_losses, priority, metrics = critic_loss(
                params, frozen, temperature, batch, context, next_keys
            )

            # Equation 7.
            chosen = choose(params["actor"], batch["obs"])
            new_q, entropy = kind.expect(frozen["critic"], batch["obs"], chosen, keys)
            actor_losses = -(new_q + temperature * entropy)

            losses = critic_losses + actor_losses + temperature_loss(params, entropy, batch["obs"])
            metrics |= {
                "loss/actor": actor_losses,
                "policy/entropy": entropy,
                "policy/temperature": jnp.broadcast_to(temperature, entropy.shape),
            }
            if self.cql_floor:
                metrics["q/floored"] = (new_q < batch["return"]).astype(jnp.float32)
            return losses, batch["valid"], Aux(metrics, priority)

        def update_target(params: PyTree, target: PyTree, updates: jax.Array) -> PyTree:
            del updates
            return optax.incremental_update(params["critic"], target, self.target_rate)

        algorithm = Algorithm(
            init=init,
            policy=policy,
            log_prob=log_prob,
            action_values=action_values if discrete else None,
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
            initial_core=initial_core,
        )
        networks_of = {"actor": actor, "critic": kind.critic}
        return sequences.sequences(
            self, spec, self.with_floor(algorithm), networks_of, lambda params: params
        )


class _Kind:
    """What both kinds of actions share: what the critics' outputs ``[C, ..., size]`` say."""

    def __init__(self, config: SAC) -> None:
        self.config = config
        self.head = values.make_head(config, jnp.square)

    def climbed(self, outputs: jax.Array) -> jax.Array:
        """Returns the values ``[...]`` that the policy climbs: of the smallest critic, or the mean
        of all.
        """
        q = self.head.mean(outputs)
        if self.head.quantiles or self.config.target_critics is not None:
            return q.mean(axis=0)
        return q.min(axis=0)

    def pessimistic(self, outputs: jax.Array, keys: jax.Array) -> values.Particles:
        """Returns the particles ``[N, ..., K]`` of a target, which ``keys [N]`` draw."""
        count = self.config.target_critics
        if count is not None:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 3)
            draw = jax.vmap(lambda key: jax.random.permutation(key, len(outputs))[:count])
            shape = (*(1,) * (outputs.ndim - 2), count)
            drawn = jnp.moveaxis(draw(keys).reshape(-1, *shape), -1, 0)
            outputs = jnp.take_along_axis(outputs, drawn, axis=0)
        return values.pessimistic(self.head, outputs, self.config.drop_quantiles)


class _Continuous(_Kind):
    """Squashes actions by tanh (appendix C) to -1 .. 1,
    where entropies of all environments are comparable.
    """

    def __init__(self, config: SAC, spec: EnvSpec) -> None:
        super().__init__(config)
        self.scale = ActionScale.of(config, spec, "categories or vectors of numbers")
        self.num_outputs = 2 * self.scale.size
        self.noise_size = config.noise_size(self.scale.size)
        recurrence = sequences.recurrence(config, spec)
        self.critic = networks.critic_network(
            config,
            observations.input_space(spec),
            config.num_critics,
            action_size=self.scale.size,
            num_atoms=self.head.size,
            recurrence=recurrence,
        )

    def distribution(self, outputs: jax.Array) -> distributions.TanhNormal:
        """Returns the policy's distribution for the actor's outputs ``[N, num_outputs]``."""
        mean, raw = jnp.split(outputs, 2, axis=-1)
        # Bounded smoothly to e^-5 .. e^2, as in the code of
        # Yarats and Kostrikov (2020) and in CleanRL.
        log_std = -5.0 + 0.5 * 7.0 * (jnp.tanh(raw) + 1.0)
        return distributions.TanhNormal(mean, log_std)

    def to_env(self, action: jax.Array) -> jax.Array:
        """Converts a distribution's actions to the environment's."""
        return self.scale.to_env(action)

    def act_randomly(self, keys: jax.Array, legal: jax.Array | None) -> jax.Array:
        """Draws the environment's actions, uniformly distributed over the legal ones."""
        return self.scale.uniform(keys)

    def random_log_prob(self, legal: jax.Array | None, action: jax.Array) -> jax.Array:
        """Returns the log-probability ``[N]`` of ``act_randomly``."""
        return jnp.full(len(action), self.scale.log_slope() - self.scale.size * math.log(2.0))

    def log_prob(self, chosen: distributions.TanhNormal, action: jax.Array) -> jax.Array:
        """Returns the log-probability ``[N]`` of the environment's actions."""
        return chosen.log_prob(self.scale.from_env(action)) + self.scale.log_slope()

    def target_entropy(self, obs: PyTree) -> float | jax.Array:
        """Returns a number of nats, or ``[N]`` of them."""
        return -float(self.scale.size)

    def outputs(self, params: PyTree, obs: PyTree, action: jax.Array) -> jax.Array:
        """Returns the critics' outputs ``[C, N, size]`` for the environment's actions."""
        return self.critic.apply(params, obs, self.scale.from_env(action))

    def expect(
        self, params: PyTree, obs: PyTree, chosen: Any, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the expected value that the policy climbs and
        the entropy of a distribution, ``[N]`` each.
        """
        action, log_prob = chosen.sample_and_log_prob(keys)
        return self.climbed(self.critic.apply(params, obs, action)), -log_prob

    def foresee(
        self, params: PyTree, obs: PyTree, chosen: Any, keys: jax.Array
    ) -> tuple[values.Particles, jax.Array]:
        """Returns the particles ``[N, K]`` of a target's value and the entropy ``[N]`` of a
        distribution.
        """
        action, log_prob = chosen.sample_and_log_prob(keys)
        return self.pessimistic(self.critic.apply(params, obs, action), keys), -log_prob

    def log_sum(
        self,
        params: PyTree,
        obs: PyTree,
        policies: Sequence[Any],
        keys: jax.Array,
        least: jax.Array | None,
    ) -> jax.Array:
        """Returns the logarithm ``[C, N]`` of the integral of ``exp Q`` over actions,
        but for a constant.

        It is estimated by uniform actions and actions of ``policies``, ``CQL_DRAWS`` of each,
        divided by the densities with which they are drawn (Kumar et al. 2020, appendix F). Values
        of the policies' actions count as ``least [N]`` at least, if it is given (Nakamoto et al.
        2023, and their code).
        """
        count = CQL_DRAWS * (1 + len(policies))
        keys = jax.vmap(
            lambda key: jax.random.split(jax.random.fold_in(key, 2), count), out_axes=1
        )(keys)
        uniform, *others = jnp.split(keys, 1 + len(policies))
        draw = jax.vmap(
            jax.vmap(lambda key: jax.random.uniform(key, (self.scale.size,), minval=-1.0))
        )
        drawn = [(draw(uniform), jnp.full(uniform.shape, -self.scale.size * math.log(2.0)))]
        drawn += [
            jax.vmap(chosen.sample_and_log_prob)(part)
            for chosen, part in zip(policies, others, strict=True)
        ]
        actions, log_probs = jax.tree.map(lambda *x: jnp.concatenate(x), *drawn)
        outputs = jax.vmap(lambda action: self.critic.apply(params, obs, action), out_axes=1)
        q = self.head.mean(outputs(actions))
        if least is not None:
            q = jnp.concatenate(
                [q[:, :CQL_DRAWS], jnp.maximum(q[:, CQL_DRAWS:], least[None, None])], axis=1
            )
        return jax.scipy.special.logsumexp(q - log_probs[None], axis=1)


class _Discrete(_Kind):
    """Averages over all actions: Christodoulou (2019), https://arxiv.org/abs/1910.07207,
    equations 10 to 12.

    The methods are as in ``_Continuous``.
    """

    def __init__(self, config: SAC, spec: EnvSpec) -> None:
        super().__init__(config)
        self.spec = spec
        self.num_outputs = num_actions(config, spec)
        self.noise_size = config.noise_size(0)
        recurrence = sequences.recurrence(config, spec)
        self.critic = networks.critic_network(
            config,
            observations.input_space(spec),
            config.num_critics,
            num_actions=self.num_outputs,
            num_atoms=self.head.size,
            recurrence=recurrence,
        )

    def distribution(self, outputs: jax.Array) -> distributions.Categorical:
        return distributions.Categorical(outputs)

    def to_env(self, action: jax.Array) -> jax.Array:
        return action

    def act_randomly(self, keys: jax.Array, legal: jax.Array | None) -> jax.Array:
        return self._random(len(keys), legal).sample(keys)

    def random_log_prob(self, legal: jax.Array | None, action: jax.Array) -> jax.Array:
        return self._random(len(action), legal).log_prob(action)

    def log_prob(self, chosen: distributions.Categorical, action: jax.Array) -> jax.Array:
        return chosen.log_prob(action)

    def _random(self, size: int, legal: jax.Array | None) -> distributions.Categorical:
        equal = jnp.zeros((size, self.num_outputs))
        return distributions.Categorical(observations.masked(equal, legal))

    def target_entropy(self, obs: PyTree) -> float | jax.Array:
        legal = observations.legal(self.spec, obs)
        if legal is None:
            return 0.5 * math.log(self.num_outputs)
        return 0.5 * jnp.log(jnp.sum(legal, axis=-1))

    def outputs(self, params: PyTree, obs: PyTree, action: jax.Array) -> jax.Array:
        return self.critic.apply(params, obs)[:, jnp.arange(len(action)), action]

    def expect(
        self, params: PyTree, obs: PyTree, chosen: Any, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        q = self.climbed(self.critic.apply(params, obs))
        return jnp.sum(jax.nn.softmax(chosen.logits) * q, axis=-1), chosen.entropy()

    def foresee(
        self, params: PyTree, obs: PyTree, chosen: Any, keys: jax.Array
    ) -> tuple[values.Particles, jax.Array]:
        every = self.pessimistic(self.critic.apply(params, obs), keys)
        return values.mixed(every, jax.nn.softmax(chosen.logits)), chosen.entropy()

    def log_sum(
        self,
        params: PyTree,
        obs: PyTree,
        policies: Sequence[Any],
        keys: jax.Array,
        least: jax.Array | None,
    ) -> jax.Array:
        legal = observations.legal(self.spec, obs)
        q = self.head.mean(self.critic.apply(params, obs))
        if least is not None:
            q = jnp.maximum(q, least[None, :, None])
        if legal is not None:
            legal = jnp.broadcast_to(legal[None], q.shape)
        return jax.scipy.special.logsumexp(observations.masked(q, legal), axis=-1)
