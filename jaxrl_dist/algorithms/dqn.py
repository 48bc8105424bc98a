"""Deep Q-learning (Mnih et al. 2015), with Rainbow's extensions (Hessel et al. 2018) as options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jaxrl_dist.algorithms import exploration, sequences
from jaxrl_dist.algorithms.conservative import ConservativeConfig
from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.algorithms.replayed import num_actions, value_learner
from jaxrl_dist.checks import MAX_SIZE, check_used, flag
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import (
    distributions,
    jax,
    jnp,
    networks,
    observations,
    optax,
    packing,
    returns,
    values,
)
from jaxrl_dist.nn.config import DistributionConfig
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Variables


@dataclasses.dataclass(frozen=True)
class DQN(
    TablePresets,
    exploration.EpsilonConfig,
    ConservativeConfig,
    DistributionConfig,
    hidden_sizes=(128, 128),
    activation="relu",
    learning_rate=5e-4,
    batch_size=128,
    replay_ratio=0.5,
    n_step=3,
):
    """Deep Q-learning (Mnih et al. 2015); Rainbow's extensions (Hessel et al. 2018) are options."""

    presets = "dqn"

    target_period: int = setting(250, low=1)
    """Updates between copies of the parameters to the target network."""
    epsilon_ladder: bool = False
    """Give each environment its own constant epsilon (Horgan et al. 2018, Ape-X)."""
    epsilon_base: float = setting(0.4, low=0, high=1)
    """Largest epsilon of the ladder."""
    epsilon_exponent: float = setting(7.0, low=0, high=MAX_SIZE)
    """The smallest epsilon of the ladder is ``epsilon_base ** (1 + epsilon_exponent)``,
    by default 0.00066."""
    ez_greedy: bool = False
    """Repeat each random action, mostly for a step or two
    and seldom for hundreds (Dabney et al. 2021)."""
    max_gradient_norm: float = setting(10.0, above=0)
    """Largest global norm of a gradient; larger gradients are scaled down."""
    td_loss: Literal["huber", "squared"] = "squared"
    """Loss of the temporal-difference error: squared, or linear beyond 1 as for Atari's clipped
    rewards. With larger returns, the linear part gives the few ends of episodes too little weight,
    and values can grow without bound."""
    double: bool = True
    """Choose the bootstrap action with the online network (van Hasselt et al. 2016, equation 4)."""
    dueling: bool = False
    """Separate heads for the state's value and the
    actions' advantages (Wang et al. 2016, equation 9)."""
    rescale_values: bool = False
    """Learn ``h(Q)``, ``h(x) = sign(x)(sqrt(|x| + 1) - 1) + 0.001 x``, which compresses large
    values (Pohlen et al. 2018; Kapturowski et al. 2019, section 2.3)."""
    munchausen: float | None = setting(None, low=0, high=1)
    """Weight of the log-probability of its action that each window's reward gets, and soft values
    in its bootstrap (Vieillard et al. 2020: 0.9); None: plain Q-learning."""
    soft_temperature: float = setting(0.03, above=0, needs="munchausen")
    """Temperature of the softmax policy of ``--munchausen``, in units of the reward."""
    noisy: bool = False
    """Explore with noisy layers (Fortunato et al. 2018), in addition to epsilon."""
    parameter_noise: bool = False
    """Explore with noise on the parameters, constant within an episode, in place of random actions;
    its size adapts to change the policy about as much as epsilon would (Plappert et al. 2018)."""

    adam_epsilon: float = setting(1.5e-4, above=0)
    """Added to the root of mean squared gradients by which Adam divides (Hessel et al. 2018, table
    1)."""

    def validate(self) -> None:
        super().validate()
        check_used(self, "td_loss", active=self.num_atoms == 1, needed="--num-atoms 1")
        check_used(self, "double", active=self.munchausen is None, needed="--munchausen none")
        check_used(self, "adam_epsilon", active=self.optimizer is None, needed="--optimizer none")
        if self.munchausen is not None and self.rescale_values:
            raise ConfigError("--munchausen does not work with --rescale-values; remove one")
        annealed = not self.epsilon_ladder
        annealing = "epsilon_start", "epsilon_end", "epsilon_steps", "ez_greedy"
        check_used(self, *annealing, active=annealed, needed="--no-epsilon-ladder")
        check_used(
            self, "epsilon_base", "epsilon_exponent", active=not annealed, needed="--epsilon-ladder"
        )
        random = self.epsilon_start > 0 or self.epsilon_end > 0
        check_used(
            self, "ez_greedy", active=random, needed="--epsilon-start or --epsilon-end above 0"
        )
        check_used(
            self, "ez_greedy", active=not self.parameter_noise, needed="--no-parameter-noise"
        )
        others = [flag(name) for name in ("noisy", "epsilon_ladder") if getattr(self, name)]
        if self.core != "none":
            others.append("--core")
        if self.parameter_noise and others:
            raise ConfigError(f"--parameter-noise does not work with {others[0]}; remove one")

    def error_loss(self, error: jax.Array) -> jax.Array:
        """Returns the loss of each temporal-difference error."""
        if self.td_loss == "huber":
            return optax.losses.huber_loss(error)
        return optax.losses.l2_loss(error)

    def bellman(self, reward: jax.Array, discount: jax.Array, value: jax.Array) -> jax.Array:
        """Returns ``h(reward + discount h^-1(value))``, without ``rescale_values``
        ``reward + discount value``.

        Source: Kapturowski et al. (2019), section 2.3.
        """
        if not self.rescale_values:
            return reward + discount * value
        return returns.rescale(reward + discount * returns.unscale(value))

    def draws(self, keys: jax.Array) -> list[tuple[jax.Array | None, jax.Array | None]]:
        """Returns the keys ``[N]`` of the noise and the fractions ``[N, num_atoms]`` for a loss's
        four evaluations of the network; None: without.
        """

        def extra(number: int) -> jax.Array:
            return jax.vmap(jax.random.fold_in, (0, None))(keys, number)

        noise: list[jax.Array | None] = [None] * 4
        fractions: list[jax.Array | None] = [None] * 4
        if self.noisy:
            split = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
            noise = [*jnp.moveaxis(split, 1, 0), extra(3)]
        if self.quantiles == "implicit":
            draw = jax.vmap(lambda key: jax.random.uniform(key, (4, self.num_atoms)))
            fractions = list(jnp.moveaxis(draw(extra(4)), 1, 0))
        return list(zip(noise, fractions, strict=True))

    def soft_log_probs(self, q: jax.Array, legal: jax.Array | None) -> jax.Array:
        """Returns log-probabilities ``[N, A]`` of the softmax of values ``[N, A]``."""
        return jax.nn.log_softmax(observations.masked(q, legal) / self.soft_temperature)

    def soft_reward(self, log_prob: jax.Array) -> jax.Array:
        """Returns what an action's log-probability adds to its reward, at least
        ``-munchausen``.

        Source: Vieillard et al. (2020), https://arxiv.org/abs/2007.14430, section 3.1.
        """
        assert self.munchausen is not None
        return self.munchausen * jnp.clip(self.soft_temperature * log_prob, -1.0, 0.0)

    @classmethod
    def recurrent_preset(cls, preset: dict[str, Any]) -> dict[str, Any]:
        """Returns an environment's preset for a run with a recurrent core,
        which takes fewer windows and updates.

        Where the preset repeats random actions, a core's does not, and it copies the target every
        500 updates: CartPole without velocities was learnt so.
        """
        if preset.get("ez_greedy"):
            preset = preset | {"ez_greedy": False, "target_period": 500}
        return super().recurrent_preset(preset)

    def exploration_state(self, *agents: int) -> Callable[[int], PyTree]:
        """Returns the function ``(num_envs) -> core`` of the state that exploration needs,
        for each of ``agents``.
        """
        if self.ez_greedy:
            return lambda num_envs: exploration.Repetition.none(num_envs, *agents)
        if self.epsilon_ladder:
            return lambda num_envs: exploration.ape_x_epsilon(
                num_envs, self.epsilon_base, self.epsilon_exponent
            )
        return Algorithm.initial_core

    def act(
        self,
        q: jax.Array,
        legal: jax.Array | None,
        keys: jax.Array | None,
        core: PyTree,
        env_step: jax.Array,
    ) -> tuple[jax.Array, PyTree]:
        """Returns actions ``[...]`` by values ``q [..., A]``, without keys the best ones,
        and the core after them.
        """
        if keys is None:
            return distributions.EpsilonGreedy(q, 0.0, legal).mode(), core
        epsilon = self._epsilon(core, keys.ndim, env_step)
        if self.ez_greedy:
            return exploration.ez_greedy(q, epsilon, legal, keys, core)
        return distributions.EpsilonGreedy(q, epsilon, legal).sample(keys), core

    def _epsilon(self, core: PyTree, rank: int, env_step: jax.Array) -> jax.Array | float:
        """Returns the probability of a random action, of rank ``rank`` where environments
        differ.
        """
        if self.epsilon_ladder:
            return jnp.expand_dims(core, tuple(range(1, rank)))
        if self.parameter_noise:
            return 0.0
        return self.epsilon(env_step)

    def log_prob(
        self,
        q: jax.Array,
        legal: jax.Array | None,
        core: PyTree,
        action: jax.Array,
        env_step: jax.Array,
    ) -> jax.Array:
        """Returns the log-probability ``[...]`` with which ``act`` chooses actions ``[...]``,
        from the same core.
        """
        epsilon = self._epsilon(core, action.ndim, env_step)
        chosen = distributions.EpsilonGreedy(q, epsilon, legal).log_prob(action)
        if not self.ez_greedy:
            return chosen
        repeated = jnp.where(action == core.action, 0.0, -jnp.inf)
        return jnp.where(exploration.repeats(core, legal), repeated, chosen)

    def make(self, spec: EnvSpec) -> Algorithm:
        size = num_actions(self, spec)
        head = values.make_head(self, self.error_loss)
        network = networks.q_network(
            self,
            observations.input_space(spec),
            size,
            num_atoms=head.size,
            dueling=self.dueling,
            noisy=self.noisy,
            implicit=self.quantiles == "implicit",
            recurrence=sequences.recurrence(self, spec),
        )

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            noise_keys = keys = None
            if context.keys is not None:
                noise_keys, keys = jnp.moveaxis(jax.vmap(jax.random.split)(context.keys), 1, 0)
            noise = noise_keys if self.noisy else None
            q = head.mean(network.apply(variables.params, obs, noise))
            action, core = self.act(q, observations.legal(spec, obs), keys, core, context.env_step)
            return action, core, {}

        def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, float]:
            q = head.mean(network.apply(variables.params, obs, None))
            if self.rescale_values:
                q = returns.unscale(q)
            return q, 0.0

        def log_prob(
            variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
        ) -> jax.Array:
            q = head.mean(network.apply(variables.params, obs, None))
            return self.log_prob(q, observations.legal(spec, obs), core, action, context.env_step)

        def soft_value(outputs: jax.Array, legal: jax.Array | None) -> values.Particles:
            """Returns the particles ``[N, K]`` of the softmax policy's value, with its entropy."""
            log_probs = self.soft_log_probs(head.mean(outputs), legal)
            particles = head.particles(outputs)
            soft = particles.returns - self.soft_temperature * log_probs[..., None]
            return values.mixed(particles._replace(returns=soft), jnp.exp(log_probs))

        def conservative_metrics(
            q: jax.Array, batch: PyTree, online: jax.Array
        ) -> dict[str, jax.Array]:
            """Returns the loss of ``cql_weight``, ``[N]``, and how many values are at the floor."""
            every_q = head.mean(online)
            legal = observations.legal(spec, batch["obs"])
            metrics = {}
            if self.cql_floor:
                floor = batch["return"][:, None]
                if self.rescale_values:
                    floor = returns.rescale(floor)
                metrics["q/floored"] = jnp.mean(every_q < floor, axis=-1, where=legal)
                every_q = jnp.maximum(every_q, floor)
            log_sum = jax.scipy.special.logsumexp(observations.masked(every_q, legal), axis=-1)
            return {**metrics, "loss/cql": log_sum - q}

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            draws = self.draws(context.keys)
            now = (batch["obs"], *draws[0])
            following = (batch["next_obs"], draws[2][0])
            online, next_online = network.apply_each(variables.params, now, following)
            bootstrap = network.apply(context.target, batch["next_obs"], *draws[1])
            taken = packing.take_rows(online, batch["action"])
            q = head.mean(taken)
            legal = observations.legal(spec, batch["next_obs"])
            reward = batch["reward"]
            if self.munchausen is None:
                choosing = next_online if self.double else bootstrap
                best = jnp.argmax(observations.masked(head.mean(choosing), legal), axis=-1)
                ahead = head.particles(packing.take_rows(bootstrap, best))
            else:
                before = head.mean(network.apply(context.target, batch["obs"], *draws[3]))
                log_probs = self.soft_log_probs(before, observations.legal(spec, batch["obs"]))
                reward += self.soft_reward(packing.take_along_last(log_probs, batch["action"]))
                ahead = soft_value(bootstrap, legal)
            target = self.bellman(reward[:, None], batch["discount"][:, None], ahead.returns)
            losses, priority = head.loss(taken, returns.constant(ahead._replace(returns=target)))
            metrics = {"loss/q": losses, "q/mean": q}
            if self.cql_weight is not None:
                metrics |= conservative_metrics(q, batch, online)
                losses += self.cql_weight * metrics["loss/cql"]
            return losses, batch["valid"], Aux(metrics, returns.constant(priority))

        algorithm = Algorithm(
            policy=policy,
            log_prob=None if self.noisy or self.parameter_noise else log_prob,
            # Munchausen values contain log-probabilities
            action_values=action_values if self.munchausen is None else None,
            loss=loss,
            **value_learner(self, network),
            initial_core=self.exploration_state(),
        )
        algorithm = self.with_floor(algorithm)
        if not self.parameter_noise:
            return sequences.sequences(
                self, spec, algorithm, {"q": network}, lambda params: {"q": params}
            )

        def divergence(params: PyTree, perturbed: PyTree, obs: jax.Array) -> jax.Array:
            """KL divergence of the values' softmax (Plappert et al. 2018, appendix C.1)."""
            legal = observations.legal(spec, obs)

            def log_probs(params: PyTree) -> jax.Array:
                q = head.mean(network.apply(params, obs, None))
                return jax.nn.log_softmax(observations.masked(q, legal))

            plain = log_probs(params)
            noisy = log_probs(perturbed)
            return jnp.sum(jnp.exp(plain) * (plain - noisy), axis=-1)

        def limit(env_step: jax.Array) -> jax.Array:
            """The divergence of a greedy policy from an epsilon-greedy one (same source)."""
            epsilon = self.epsilon(env_step)
            return -jnp.log(1.0 - epsilon + epsilon / size)

        return exploration.parameter_noise(
            algorithm, lambda params: params, divergence, limit, std=0.1
        )
