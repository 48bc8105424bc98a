"""Deep Q-learning (Mnih et al. 2015), with Rainbow's extensions (Hessel et al. 2018) as options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from jaxrl_dist.algorithms import exploration, sequences
from jaxrl_dist.algorithms.conservative import ConservativeConfig
from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.algorithms.replayed import num_actions, value_learner
from jaxrl_dist.checks import MAX_SIZE, check_used, flag
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import distributions, jax, jnp, networks, observations, optax, packing, returns
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Variables


@dataclasses.dataclass(frozen=True)
class DQN(
    TablePresets,
    exploration.EpsilonConfig,
    ConservativeConfig,
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
    num_atoms: int = setting(1, low=1)
    """Atoms of the return distribution (Bellemare et al. 2017, C51: 51); 1: only its mean."""
    value_min: float = setting(-10.0, low=-1e9, high=1e9)
    """Return of the lowest atom."""
    value_max: float = setting(10.0, low=-1e9, high=1e9)
    """Return of the highest atom."""
    noisy: bool = False
    """Explore with noisy layers (Fortunato et al. 2018), in addition to epsilon."""
    parameter_noise: bool = False
    """Explore with noise on the parameters, constant within an episode, in place of random actions;
    its size adapts to change the policy about as much as epsilon would (Plappert et al. 2018)."""

    adam_epsilon: ClassVar[float] = 1.5e-4
    """Hessel et al. (2018), table 1."""

    def validate(self) -> None:
        super().validate()
        check_used(self, "td_loss", active=self.num_atoms == 1, needed="--num-atoms 1")
        check_used(
            self, "value_min", "value_max", active=self.num_atoms > 1, needed="--num-atoms above 1"
        )
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
        if self.num_atoms > 1 and not self.value_min < self.value_max:
            raise ConfigError(
                f"--value-min {self.value_min:g} must be below --value-max {self.value_max:g}"
            )

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
        network = networks.q_network(
            self,
            observations.input_space(spec),
            size,
            num_atoms=self.num_atoms,
            dueling=self.dueling,
            noisy=self.noisy,
            recurrence=sequences.recurrence(self, spec),
        )
        atoms = jnp.linspace(self.value_min, self.value_max, self.num_atoms)

        def values(outputs: jax.Array) -> jax.Array:
            """Converts network outputs ``[N, A, atoms]`` to action values ``[N, A]``."""
            if self.num_atoms == 1:
                return outputs[..., 0]
            return jnp.sum(jax.nn.softmax(outputs) * atoms.reshape(1, 1, -1), axis=-1)

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            noise_keys = keys = None
            if context.keys is not None:
                noise_keys, keys = jnp.moveaxis(jax.vmap(jax.random.split)(context.keys), 1, 0)
            q = values(network.apply(variables.params, obs, noise_keys if self.noisy else None))
            action, core = self.act(q, observations.legal(spec, obs), keys, core, context.env_step)
            return action, core, {}

        def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, float]:
            q = values(network.apply(variables.params, obs, None))
            if self.rescale_values:
                q = returns.unscale(q)
            return q, 0.0

        def log_prob(
            variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
        ) -> jax.Array:
            q = values(network.apply(variables.params, obs, None))
            return self.log_prob(q, observations.legal(spec, obs), core, action, context.env_step)

        def expected_loss(
            q: jax.Array, batch: PyTree, bootstrap: jax.Array, best: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            """Returns losses and priorities, ``[N]`` each, of mean returns."""
            next_q = packing.take_along_last(values(bootstrap), best)
            target = self.bellman(batch["reward"], batch["discount"], next_q)
            error = returns.constant(target) - q
            return self.error_loss(error), jnp.abs(error)

        def categorical_loss(
            online: jax.Array, batch: PyTree, bootstrap: jax.Array, best: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            """Returns losses and priorities, ``[N]`` each, of distributions of returns."""
            rows = jnp.arange(len(online))
            probs = jax.nn.softmax(bootstrap[rows, best])
            reward = batch["reward"][:, None]
            target = self.bellman(reward, batch["discount"][:, None], atoms[None])
            project = jax.vmap(returns.project, (0, 0, None))
            projected = returns.constant(project(target, probs, atoms))
            losses = optax.losses.softmax_cross_entropy(online[rows, batch["action"]], projected)
            # Hessel et al. (2018), section 4: the KL divergence, which is 0 where the prediction
            # equals the target.
            entropy = jnp.sum(jax.scipy.special.entr(projected), axis=-1)
            return losses, jnp.maximum(losses - entropy, 0.0)

        def conservative_metrics(
            q: jax.Array, batch: PyTree, online: jax.Array
        ) -> dict[str, jax.Array]:
            """Returns the loss of ``cql_weight``, ``[N]``, and how many values are at the floor."""
            every_q = values(online)
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
            noise: list[jax.Array | None] = [None, None, None]
            if self.noisy:
                keys = jax.vmap(lambda key: jax.random.split(key, 3))(context.keys)
                noise = list(jnp.moveaxis(keys, 1, 0))
            now = (batch["obs"], noise[0])
            following = (batch["next_obs"], noise[2])
            online, next_online = network.apply_each(variables.params, now, following)
            bootstrap = network.apply(context.target, batch["next_obs"], noise[1])
            choosing = next_online if self.double else bootstrap
            q = packing.take_along_last(values(online), batch["action"])
            legal = observations.legal(spec, batch["next_obs"])
            best = jnp.argmax(observations.masked(values(choosing), legal), axis=-1)
            if self.num_atoms == 1:
                losses, priority = expected_loss(q, batch, bootstrap, best)
            else:
                losses, priority = categorical_loss(online, batch, bootstrap, best)
            metrics = {"loss/q": losses, "q/mean": q}
            if self.cql_weight is not None:
                metrics |= conservative_metrics(q, batch, online)
                losses += self.cql_weight * metrics["loss/cql"]
            return losses, batch["valid"], Aux(metrics, returns.constant(priority))

        algorithm = Algorithm(
            policy=policy,
            log_prob=None if self.noisy or self.parameter_noise else log_prob,
            action_values=action_values,
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
                q = values(network.apply(params, obs, None))
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
