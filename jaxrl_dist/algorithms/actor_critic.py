"""Shared by the on-policy actor-critics: flags, the policy,
and the conversion of rollouts to training examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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
    Policy,
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


class ActorCritic(NamedTuple):
    """A policy and a value function over one network, feed-forward or recurrent."""

    init: Callable[[jax.Array], Variables]
    policy: Policy
    """Its extras are ``log_prob`` and ``value``, both ``[B]`` float32,
    and ``core_inputs`` if the core reads any."""
    log_prob: Callable[[Variables, PyTree, PyTree, PyTree, Context], jax.Array]
    """As ``Algorithm.log_prob``."""
    initial_core: Callable[[int], PyTree]
    window: int | None
    """As ``Algorithm.window``: a recurrent core learns from whole rollouts,
    a feed-forward one from transitions."""
    values: Callable[[Variables, Rollout], jax.Array]
    """``(variables, rollout) -> [T + 1, B]``: the values computed while acting,
    then that of the last observation."""
    examples: Callable[..., dict[str, PyTree]]
    """``(rollout, **fields [T, B, ...]) -> batch`` of the fields, and of the rollout's ``obs``,
    ``action``, ``valid`` and ``core``: environment-major transitions ``[B * T, ...]``, or with a
    recurrent core sequences ``[B, T, ...]``."""
    feedback: Callable[[PyTree, PyTree, Timestep], PyTree]
    """As ``Algorithm.feedback``."""
    evaluate: Callable[[PyTree, dict[str, PyTree]], tuple[distributions.Distribution, jax.Array]]
    """``(params, batch) -> (distribution, value)``, shaped as the batch's fields."""
    unroll: Callable[[PyTree, Rollout], tuple[distributions.Distribution, jax.Array]]
    """``(params, rollout) -> (distribution [T, B], values [T + 1, B])`` under these parameters,
    not the acting ones."""
    from_start: Callable[[Rollout], Rollout]
    """``(rollout) -> rollout`` for ``unroll`` and ``examples``: its core becomes that of an
    episode's start, its extras the core's inputs, if it reads any. For windows that hold
    neither."""

    def acting(self) -> dict[str, Any]:
        """Returns the fields of an ``Algorithm`` that acts by this policy."""
        names = "init", "policy", "log_prob", "initial_core", "feedback", "window"
        return {name: getattr(self, name) for name in names}


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
    recurrent = config.core != "none"
    noise_size = config.noise_size(head.log_std_size)

    def choices(outputs: jax.Array, obs: PyTree) -> distributions.Distribution:
        return head.distribution(outputs, observations.legal(spec, obs))

    def split(core: PyTree) -> tuple[Any, PyTree]:
        """Divides the policy's state into the noise of the last action and the rest."""
        if noise_size:
            return core
        return (None, core)

    def joined(noise: jax.Array | None, rest: PyTree) -> PyTree:
        if noise is None:
            return rest
        return (noise, rest)

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        noise, core = split(core)
        if config.noise_correlation is not None and context.keys is not None:
            noise = exploration.correlated(noise, context.keys, config.noise_correlation)
        read = inputs.read(core)
        outputs, value, memory = network.step(
            variables.params, obs, inputs.memory(core), core_inputs=read
        )
        distribution = choices(outputs, obs)
        if context.keys is None:
            action = distribution.mode()
        else:
            action = distribution.sample(context.keys, noise)
        extras = {"log_prob": distribution.log_prob(action), "value": value}
        core = joined(noise, inputs.acted(core, memory, action))
        return action, core, extras if read is None else {**extras, "core_inputs": read}

    def log_prob(
        variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
    ) -> jax.Array:
        _, core = split(core)
        memory = inputs.memory(core)
        read = inputs.read(core)
        outputs, _, _ = network.step(variables.params, obs, memory, core_inputs=read)
        return choices(outputs, obs).log_prob(action)

    def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        noise, core = split(core)
        return joined(noise, inputs.feedback(core, action, step))

    def initial_core(num_envs: int) -> PyTree:
        if noise_size:
            noise = jnp.zeros((num_envs, noise_size))
        else:
            noise = None
        return joined(noise, inputs.initial(network.initial_core(num_envs), num_envs))

    def values(variables: Variables, rollout: Rollout) -> jax.Array:
        _, core = split(rollout.final_core)
        memory = inputs.memory(core)
        read = inputs.read(core)
        _, bootstrap, _ = network.step(variables.params, rollout.last_obs, memory, core_inputs=read)
        return jnp.concatenate([rollout.extras["value"], bootstrap[None]])

    def examples(rollout: Rollout, **fields: jax.Array) -> dict[str, PyTree]:
        steps = rollout.reward.shape
        for name, x in (
            (name, x) for name, field in fields.items() for x in jax.tree.leaves(field)
        ):
            if jnp.shape(x)[:2] != steps:
                wanted = f"[T, B, ...], here [{steps[0]}, {steps[1]}, ...]"
                raise ValueError(
                    f"the field {name!r} of examples has shape {list(jnp.shape(x))}; it needs {wanted}"
                )
        fields |= {"obs": rollout.obs_before, "action": rollout.action, "valid": rollout.valid}
        if inputs.size:
            fields["core_inputs"] = rollout.extras["core_inputs"]
        batch: dict[str, Any] = swap_axes(fields)
        if not recurrent:
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        return {**batch, "core": inputs.memory(split(rollout.core)[1])}

    def evaluate(
        params: PyTree, batch: dict[str, PyTree]
    ) -> tuple[distributions.Distribution, jax.Array]:
        if not recurrent:
            outputs, value, _ = network.step(params, batch["obs"], batch["core"])
            return choices(outputs, batch["obs"]), value
        obs, valid, read = swap_axes((batch["obs"], batch["valid"], batch.get("core_inputs")))
        outputs, value, _ = network.unroll(params, obs, batch["core"], valid, core_inputs=read)
        return choices(swap_axes(outputs), batch["obs"]), swap_axes(value)

    def unroll(params: PyTree, rollout: Rollout) -> tuple[distributions.Distribution, jax.Array]:
        valid = jnp.concatenate([rollout.valid, jnp.ones_like(rollout.valid[:1])])
        (_, core) = split(rollout.core)
        (_, final_core) = split(rollout.final_core)
        read = inputs.read(final_core)
        if read is not None:
            read = jnp.concatenate([rollout.extras["core_inputs"], read[None]])
        outputs, values, _ = network.unroll(
            params, rollout.obs, inputs.memory(core), valid, core_inputs=read
        )
        return choices(outputs[:-1], rollout.obs_before), values

    def from_start(rollout: Rollout) -> Rollout:
        core = initial_core(rollout.reward.shape[1])
        before = inputs.of_steps(rollout)
        read = inputs.read(before)
        if read is None:
            return rollout._replace(extras={}, core=core, final_core=core)
        noise, rest = split(core)
        final = joined(noise, {**rest, **{name: x[-1] for name, x in before.items()}})
        return rollout._replace(extras={"core_inputs": read[:-1]}, core=core, final_core=final)

    return ActorCritic(
        init=lambda key: Variables(network.init(key), ()),
        policy=policy,
        log_prob=log_prob,
        initial_core=initial_core,
        feedback=feedback,
        window=None if recurrent else 1,
        values=values,
        examples=examples,
        evaluate=evaluate,
        unroll=unroll,
        from_start=from_start,
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
