"""Shared by the on-policy actor-critics: flags, the policy,
and the conversion of rollouts to training examples.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.algorithms import exploration
from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.checks import check_used
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import (
    core_inputs,
    distributions,
    jax,
    jnp,
    networks,
    observations,
    optax,
    packing,
    returns,
    torsos,
)
from jaxrl_dist.nn.config import CriticConfig, NetworkConfig, NoiseConfig
from jaxrl_dist.nn.optimizers import OptimizerConfig
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Aux,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Timestep,
    Variables,
    swap_axes,
)


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig(TablePresets, NetworkConfig, CriticConfig, OptimizerConfig, NoiseConfig):
    """Flags of actor-critic learning."""

    learning_rate: float = setting(1e-3, above=0)
    """Step size of the optimiser."""
    discount: float = setting(0.99, low=0, high=1)
    """Discount factor of future rewards."""
    value_coefficient: float = setting(0.5, low=0)
    """Weight of the value loss."""
    entropy_coefficient: float = setting(0.01, low=0)
    """Weight of the entropy bonus."""
    max_gradient_norm: float = setting(0.5, above=0)
    """Largest global norm of a gradient; larger gradients are scaled down."""

    @classmethod
    def recurrent_preset(cls, preset: dict[str, Any]) -> dict[str, Any]:
        """Returns an environment's preset for a run with a recurrent core:
        it scales rewards unless it says otherwise.

        Policy and value share the core, and the gradient of large values would drown the policy's:
        measured on CartPole without velocities.
        """
        return {"scale_rewards": True, **preset}

    def combined(
        self,
        policy_loss: jax.Array,
        value_loss: jax.Array,
        entropy: jax.Array,
        **metrics: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the loss, shaped as its parts, and these with further ``metrics`` by name."""
        total = (
            policy_loss + self.value_coefficient * value_loss - self.entropy_coefficient * entropy
        )
        return total, {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "policy/entropy": entropy,
            **metrics,
        }

    def clipped_optimizer(self, name: str, **options: Any) -> optax.GradientTransformationExtraArgs:
        """Returns ``make_optimizer(name, learning_rate, **options)``, applied to clipped
        gradients.
        """
        optimizer = self.make_optimizer(name, self.learning_rate, **options)
        return optax.chain(packing.clip_by_global_norm(self.max_gradient_norm), optimizer)


@dataclasses.dataclass(frozen=True, eq=False)
class ActorCritic:
    """A policy and a value function over one network, feed-forward or recurrent."""

    config: ActorCriticConfig
    spec: EnvSpec
    head: distributions.PolicyHead
    network: networks.RecurrentNetwork
    inputs: core_inputs.CoreInputs
    """What the core reads beside the observation."""
    noise_size: int
    """Components of the noise that actions keep from step to step; 0: none."""

    @property
    def recurrent(self) -> bool:
        """Whether there is a core."""
        return self.config.core != "none"

    @property
    def window(self) -> int | None:
        """As ``Algorithm.window``: a recurrent core learns from whole rollouts,
        a feed-forward one from transitions."""
        return None if self.recurrent else 1

    def acting(self) -> dict[str, Any]:
        """Returns the fields of an ``Algorithm`` that acts by this policy."""
        names = ("init", "policy", "log_prob", "initial_core", "feedback", "window")
        return {name: getattr(self, name) for name in names}

    def init(self, key: jax.Array) -> Variables:
        """As ``Algorithm.init``."""
        return Variables(self.network.init(key), ())

    def initial_core(self, num_envs: int) -> PyTree:
        """As ``Algorithm.initial_core``."""
        core = self.inputs.initial(self.network.initial_core(num_envs), num_envs)
        noise = jnp.zeros((num_envs, self.noise_size)) if self.noise_size else None
        return _with_noise(noise, core)

    def policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        """As ``Algorithm.policy``. Its extras are ``log_prob`` and ``value``, both ``[B]`` float32,
        and ``core_inputs`` if the core reads any.
        """
        noise, core = self._split(core)
        correlation = self.config.noise_correlation
        if noise is not None and correlation is not None and context.keys is not None:
            noise = exploration.correlated(noise, context.keys, correlation)
        read = self.inputs.read(core)
        outputs, value, memory = self.network.step(
            variables.params, obs, self.inputs.memory(core), core_inputs=read
        )
        distribution = self._distribution(outputs, obs)
        if context.keys is None:
            action = distribution.mode()
        else:
            action = distribution.sample(context.keys, noise)
        extras = {"log_prob": distribution.log_prob(action), "value": value}
        if read is not None:
            extras["core_inputs"] = read
        return action, _with_noise(noise, self.inputs.acted(core, memory, action)), extras

    def log_prob(
        self, variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
    ) -> jax.Array:
        """As ``Algorithm.log_prob``."""
        outputs, _ = self._step(variables, obs, core)
        return self._distribution(outputs, obs).log_prob(action)

    def feedback(self, core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        """As ``Algorithm.feedback``."""
        noise, core = self._split(core)
        return _with_noise(noise, self.inputs.feedback(core, action, step))

    def values(self, variables: Variables, rollout: Rollout) -> jax.Array:
        """Returns the values computed while acting, then that of the last observation,
        ``[T + 1, B]``.
        """
        _, bootstrap = self._step(variables, rollout.last_obs, rollout.final_core)
        return jnp.concatenate([rollout.extras["value"], bootstrap[None]])

    def examples(self, rollout: Rollout, **fields: PyTree) -> dict[str, PyTree]:
        """Returns a batch of the fields ``[T, B, ...]``, and of the rollout's ``obs``, ``action``,
        ``valid`` and ``core``: environment-major transitions ``[B * T, ...]``, or with a recurrent
        core sequences ``[B, T, ...]``.

        Raises:
          ValueError: a field has other axes than the rollout.
        """
        num_steps, num_rows = rollout.reward.shape
        for name, field in fields.items():
            for x in jax.tree.leaves(field):
                if jnp.shape(x)[:2] != (num_steps, num_rows):
                    raise ValueError(
                        f"the field {name!r} of examples has shape {list(jnp.shape(x))}; "
                        f"it needs [T, B, ...], here [{num_steps}, {num_rows}, ...]"
                    )
        fields |= {"obs": rollout.obs_before, "action": rollout.action, "valid": rollout.valid}
        if self.inputs.size:
            fields["core_inputs"] = rollout.extras["core_inputs"]
        batch: dict[str, PyTree] = swap_axes(fields)
        if not self.recurrent:
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        _, core = self._split(rollout.core)
        return {**batch, "core": self.inputs.memory(core)}

    def evaluate(
        self, params: PyTree, batch: dict[str, PyTree]
    ) -> tuple[distributions.Distribution, jax.Array]:
        """Returns the distribution and the value of ``examples``, shaped as their fields."""
        if not self.recurrent:
            outputs, value, _ = self.network.step(params, batch["obs"], batch["core"])
            return self._distribution(outputs, batch["obs"]), value
        obs, valid, read = swap_axes((batch["obs"], batch["valid"], batch.get("core_inputs")))
        outputs, value, _ = self.network.unroll(params, obs, batch["core"], valid, core_inputs=read)
        return self._distribution(swap_axes(outputs), batch["obs"]), swap_axes(value)

    def features(self, params: PyTree, batch: dict[str, PyTree]) -> jax.Array:
        """Returns the features ``[..., D]`` that the policy's torso computes from the observations
        of ``examples``, for an auxiliary loss.
        """
        torso = "torso" if "torso" in params else "policy_torso"
        space = observations.input_space(self.spec, self.config.hidden)
        return networks.torso_features(self.config, space, params[torso], batch["obs"])

    def unroll(
        self, params: PyTree, rollout: Rollout
    ) -> tuple[distributions.Distribution, jax.Array]:
        """Returns the distribution ``[T, B]`` and the values ``[T + 1, B]`` of a rollout under
        these parameters, not the acting ones.
        """
        valid = jnp.concatenate([rollout.valid, jnp.ones_like(rollout.valid[:1])])
        _, core = self._split(rollout.core)
        _, final_core = self._split(rollout.final_core)
        read = self.inputs.read(final_core)
        if read is not None:
            read = jnp.concatenate([rollout.extras["core_inputs"], read[None]])
        outputs, values, _ = self.network.unroll(
            params, rollout.obs, self.inputs.memory(core), valid, core_inputs=read
        )
        return self._distribution(outputs[:-1], rollout.obs_before), values

    def from_start(self, rollout: Rollout) -> Rollout:
        """Returns windows that hold no core as ``unroll`` and ``examples`` take them: with the core
        of an episode's start, and as extras what the core reads, if anything.
        """
        core = self.initial_core(rollout.reward.shape[1])
        before = self.inputs.of_steps(rollout)
        read = self.inputs.read(before)
        if read is None:
            return rollout._replace(extras={}, core=core, final_core=core)
        noise, rest = self._split(core)
        last = {name: x[-1] for name, x in before.items()}
        return rollout._replace(
            extras={"core_inputs": read[:-1]},
            core=core,
            final_core=_with_noise(noise, {**rest, **last}),
        )

    def _distribution(self, outputs: jax.Array, obs: PyTree) -> distributions.Distribution:
        return self.head.distribution(outputs, observations.legal(self.spec, obs))

    def _step(self, variables: Variables, obs: PyTree, core: PyTree) -> tuple[jax.Array, jax.Array]:
        """Returns the policy's outputs and the value of one step."""
        _, core = self._split(core)
        memory = self.inputs.memory(core)
        read = self.inputs.read(core)
        outputs, value, _ = self.network.step(variables.params, obs, memory, core_inputs=read)
        return outputs, value

    def _split(self, core: PyTree) -> tuple[jax.Array | None, PyTree]:
        """Divides the policy's state into the noise of the last action and the rest."""
        if self.noise_size:
            noise, rest = core
            return noise, rest
        return None, core


def _with_noise(noise: jax.Array | None, core: PyTree) -> PyTree:
    """The inverse of ``ActorCritic._split``."""
    return core if noise is None else (noise, core)


def actor_critic(config: ActorCriticConfig, spec: EnvSpec) -> ActorCritic:
    """Builds policy and value for an environment: separate torsos for vectors,
    a shared one for images.

    Raises:
      ConfigError: the networks or distributions do not support the spaces.
    """
    head = distributions.policy_head(spec.action)
    space = observations.input_space(spec, config.hidden)
    critic_space = observations.input_space(spec)
    inputs = core_inputs.CoreInputs.of(config, spec)
    network = networks.actor_critic(
        config,
        space,
        head.num_outputs,
        shared_torso=torsos.choose_torso(config.torso, space) != "mlp",
        log_std=head.log_std_size,
        critic_sees=critic_space if config.hidden else None,
        core_inputs=inputs.size,
    )
    check_used(config, "initial_std", active=bool(head.log_std_size), needed="continuous actions")
    return ActorCritic(
        config, spec, head, network, inputs, noise_size=config.noise_size(head.log_std_size)
    )


def policy_gradient(
    config: ActorCriticConfig,
    spec: EnvSpec,
    gae_lambda: float | jax.Array,
    optimizer: optax.GradientTransformation,
) -> Algorithm:
    """Returns the algorithm whose loss is ``-log pi(a|s) A``,
    a squared value error and an entropy bonus.

    Sources: Williams (1992), REINFORCE with a baseline; Mnih et al. (2016), section 4.3.
    """
    net = actor_critic(config, spec)

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        values = net.values(variables, rollout)
        advantage = returns.gae(*rollout.outcomes, values, config.discount, gae_lambda)
        return net.examples(rollout, advantage=advantage, value_target=advantage + values[:-1])

    def loss(
        variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        distribution, value = net.evaluate(variables.params, batch)
        policy_loss = -distribution.log_prob(batch["action"]) * batch["advantage"]
        value_loss = 0.5 * jnp.square(value - batch["value_target"])
        total, metrics = config.combined(policy_loss, value_loss, distribution.entropy())
        return total, batch["valid"], Aux(metrics)

    return Algorithm(postprocess=postprocess, loss=loss, optimizer=optimizer, **net.acting())
