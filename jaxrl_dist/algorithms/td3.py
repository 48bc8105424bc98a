"""Twin delayed deep deterministic policy gradient: Fujimoto et al. (2018),
https://arxiv.org/abs/1802.09477.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_dist.algorithms import exploration, sequences
from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.algorithms.replayed import ActionScale, copied, n_step_replay, transitions
from jaxrl_dist.checks import check_used, flag
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jax, jnp, mesh, networks, observations, optax, returns, values
from jaxrl_dist.memory.config import RandomStartConfig
from jaxrl_dist.nn.config import CriticConfig, CriticsConfig
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Variables


@dataclasses.dataclass(frozen=True)
class TD3(
    TablePresets,
    RandomStartConfig,
    CriticConfig,
    CriticsConfig,
    hidden_sizes=(256, 256),
    activation="relu",
    replay_capacity=1_000_000,
):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018)."""

    presets = "td3"

    learning_rate: float = 1e-3
    """Step size of the optimiser for the critics (section 6.1)."""
    actor_learning_rate: float = setting(1e-3, above=0)
    """Step size of the optimiser for the actor (section 6.1)."""
    target_rate: float = setting(0.005, above=0, high=1)
    """Fraction by which each actor update moves the
    targets towards actor and critics (section 6.1)."""
    num_critics: int = setting(2, low=1, high=1000)
    """Number of critics; the smallest value is the target (section 4.2)."""
    actor_period: int = setting(2, low=1, high=1000)
    """Critic updates per update of the actor and the targets (section 5.2)."""
    target_noise: float = setting(0.2, low=0, high=1000)
    """Standard deviation of the noise on target actions, which span -1 .. 1 (section 5.3)."""
    target_noise_clip: float = setting(0.5, low=0, high=1000, needs="target_noise")
    """Largest magnitude of the noise on target actions."""
    noise: Literal["gaussian", "ornstein_uhlenbeck", "parameter"] = "gaussian"
    """Exploration noise: on the actions, independent at each step or correlated in time (Lillicrap
    et al. 2016), or on the actor's parameters, constant within an episode (Plappert et al.
    2018)."""
    noise_std: float = setting(0.1, low=0, high=1000)
    """Standard deviation that each step adds to the exploration noise; actions span -1 .. 1
    (section 6.1). With 'parameter', how far the noise moves actions, as a root mean square."""
    behaviour_weight: float | None = setting(None, low=0)
    """Weight of the squared distance between the policy's action and the data's in the actor's
    loss, for data that others recorded (Fujimoto and Gu 2021, TD3+BC; Tarasov et al. 2023, ReBRAC);
    None: none."""
    behaviour_penalty: Literal["td3+bc", "rebrac"] = "td3+bc"
    """'td3+bc': the distance is a mean over the action's components, and the actor climbs the first
    critic; 'rebrac': the distance is a sum, and the actor climbs the smallest critic."""
    critic_behaviour_weight: float | None = setting(None, low=0)
    """Weight of the squared distance between the target's action and the data's next one, summed
    over components, in the critics' target (ReBRAC, equation 5); None: none."""
    normalize_q: bool = False
    """Divide the value in the actor's loss by its mean magnitude in the batch (TD3+BC, equation
    5)."""
    critic_layer_norm: bool = False
    """Normalise the outputs of the critics' layers, even if the actor's are not normalised (ReBRAC,
    section 3)."""

    def validate(self) -> None:
        super().validate()
        active = self.behaviour_weight is not None
        check_used(self, "behaviour_penalty", active=active, needed="--behaviour-weight")
        refused = {
            "critic_behaviour_weight": self.critic_behaviour_weight is not None,
            "normalize_q": self.normalize_q,
        }
        for name, used in refused.items():
            if self.core != "none" and used:
                raise ConfigError(f"{flag(name)} does not work with --core; remove one")
        if self.noise == "parameter" and self.core != "none":
            raise ConfigError("--noise parameter does not work with --core; remove one")

    def make(self, spec: EnvSpec) -> Algorithm:
        scale = ActionScale.of(self, spec)
        recurrence = sequences.recurrence(self, spec)
        actor = networks.policy_network(
            self, observations.input_space(spec, self.hidden), scale.size, recurrence
        )
        layers = dataclasses.replace(self, layer_norm=self.layer_norm or self.critic_layer_norm)
        head = values.make_head(self, jnp.square)
        critic = networks.critic_network(
            layers,
            observations.input_space(spec),
            self.num_critics,
            action_size=scale.size,
            num_atoms=head.size,
            recurrence=recurrence,
        )
        follows = self.critic_behaviour_weight is not None
        correlated = self.noise == "ornstein_uhlenbeck"

        def best_action(params: PyTree, obs: jax.Array) -> jax.Array:
            """Returns the greedy action, in -1 .. 1."""
            return jnp.tanh(actor.apply(params["actor"], obs))

        def init(key: jax.Array) -> Variables:
            actor_key, critic_key = jax.random.split(key)
            return Variables(
                {"actor": actor.init(actor_key), "critic": critic.init(critic_key)}, ()
            )

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            action = best_action(variables.params, obs)
            if context.keys is None:
                return scale.to_env(action), core, {}
            if self.noise == "parameter":  # the parameters carry the noise
                noise = jnp.zeros_like(action)
            elif correlated:
                noise = core = exploration.ornstein_uhlenbeck(core, context.keys, self.noise_std)
            else:
                noise = self.noise_std * exploration.gaussian(context.keys, scale.size)
            noisy = scale.to_env(jnp.clip(action + noise, -1.0, 1.0))
            random = scale.uniform(jax.vmap(jax.random.fold_in, (0, None))(context.keys, 1))
            return jnp.where(self.acts_randomly(context.env_step), random, noisy), core, {}

        def actor_values(
            params: PyTree, critics: PyTree, obs: PyTree
        ) -> tuple[jax.Array, jax.Array]:
            """Returns the actor's actions ``[N, A]``, and the values ``[N]`` that it climbs."""
            action = best_action(params, obs)
            if self.behaviour_penalty == "rebrac":
                return action, head.mean(critic.apply(critics, obs, action)).min(axis=0)
            return action, head.mean(critic.apply(critics[:1], obs, action))[0]

        def postprocess(
            variables: Variables, rollout: Rollout, context: Context
        ) -> dict[str, PyTree]:
            batch = transitions(rollout, self.discount, next_action=follows)
            if self.normalize_q:
                _, q = actor_values(variables.params, variables.params["critic"], batch["obs"])
                size = returns.constant(mesh.global_mean(jnp.abs(q), batch["valid"]))
                batch["q_size"] = jnp.broadcast_to(jnp.maximum(size, 1e-8), q.shape)
            return batch

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            params = variables.params
            frozen = returns.constant(variables.params)

            # Equation 14: noise on the target action keeps narrow
            # peaks of the critics out of the target.
            next_action = best_action(context.target, batch["next_obs"])
            # a traced scalar is not a float
            if not (isinstance(self.target_noise, float) and self.target_noise == 0):
                noise = self.target_noise * exploration.gaussian(context.keys, scale.size)
                noise = jnp.clip(noise, -self.target_noise_clip, self.target_noise_clip)
                next_action = jnp.clip(next_action + noise, -1.0, 1.0)
            bootstrap = critic.apply(context.target["critic"], batch["next_obs"], next_action)
            ahead = values.pessimistic(head, bootstrap, self.drop_quantiles)
            next_value = ahead.returns
            if self.critic_behaviour_weight is not None:
                distance = jnp.sum(
                    jnp.square(next_action - scale.from_env(batch["next_action"])), axis=-1
                )
                penalty = jnp.where(batch["acts"], distance, 0.0)
                next_value -= (self.critic_behaviour_weight * penalty)[:, None]
            target = batch["reward"][:, None] + batch["discount"][:, None] * next_value
            outputs = critic.apply(params["critic"], batch["obs"], scale.from_env(batch["action"]))
            critic_loss, priority = values.fit(head, outputs, ahead._replace(returns=target))

            # Equation 1, by the first critic
            action, climbed = actor_values(params, frozen["critic"], batch["obs"])
            if self.normalize_q:
                actor_loss = -climbed / batch["q_size"]
            else:
                actor_loss = -climbed
            behaviour: dict[str, jax.Array] = {}
            if self.behaviour_weight is not None:
                squares = jnp.square(action - scale.from_env(batch["action"]))
                if self.behaviour_penalty == "rebrac":
                    distance = squares.sum(axis=-1)
                else:
                    distance = squares.mean(axis=-1)
                behaviour = {"loss/behaviour": distance}
                actor_loss = actor_loss + self.behaviour_weight * distance

            metrics = {
                "loss/critic": critic_loss,
                "loss/actor": actor_loss,
                "q/mean": head.mean(outputs).mean(axis=0),
                **behaviour,
            }
            return critic_loss + actor_loss, batch["valid"], Aux(metrics, priority)

        def update_target(params: PyTree, target: PyTree, updates: jax.Array) -> PyTree:
            due = updates % self.actor_period == 0
            return optax.incremental_update(params, target, jnp.where(due, self.target_rate, 0.0))

        algorithm = Algorithm(
            init=init,
            policy=policy,
            loss=loss,
            optimizer=optax.partition(
                {
                    "actor": optax.conditionally_mask(
                        self.make_optimizer("adam", self.actor_learning_rate),
                        # As for the targets; ``step`` leaves out gradients that were not finite.
                        lambda step, updates_done, **extra: (
                            (updates_done + 1) % self.actor_period == 0
                        ),
                        forward_extra_args=True,
                    ),
                    "critic": self.make_optimizer("adam", self.learning_rate),
                },
                {"actor": "actor", "critic": "critic"},
            ),
            target=update_target,
            initial_target=copied,
            **n_step_replay(self) | {"postprocess": postprocess, "window": self.n_step + follows},
            initial_core=lambda num_envs: jnp.zeros((num_envs, scale.size)) if correlated else (),
        )
        if self.noise != "parameter":
            return sequences.sequences(
                self, spec, algorithm, {"actor": actor, "critic": critic}, lambda params: params
            )

        def moved(params: PyTree, perturbed: PyTree, obs: jax.Array) -> jax.Array:
            """Equation 9 of Plappert et al. (2018), squared:
            its limit is the variance of equal Gaussian noise.
            """
            return jnp.mean(
                jnp.square(best_action(params, obs) - best_action(perturbed, obs)), axis=-1
            )

        return exploration.parameter_noise(
            algorithm,
            acting=lambda params: {"actor": params["actor"]},
            distance=moved,
            limit=lambda env_step: jnp.square(self.noise_std),
            std=self.noise_std,
        )
