"""What the on-policy actor-critics share: the policy, and how a rollout becomes examples of the network's inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_dist import returns
from jaxrl_dist.nn import networks, torsos
from jaxrl_dist.nn.config import NetworkConfig
from jaxrl_dist.nn.distributions import Distribution, policy_head
from jaxrl_dist.types import Aux, Context, EnvSpec, PyTree, Rollout, Variables


class ActorCritic(NamedTuple):
    """A policy and a value function over one network, feed-forward or recurrent."""

    init: Callable[[jax.Array], Variables]
    policy: Callable[..., tuple[jax.Array, PyTree, dict[str, jax.Array]]]
    """As ``Algorithm.policy``; its extras are ``log_prob`` and ``value``, both ``[B]`` float32."""
    initial_core: Callable[[int], PyTree]
    window: int | None
    """As ``Algorithm.window``: a recurrent core learns from whole rollouts, a feed-forward one from transitions."""
    values: Callable[[Variables, Rollout], jax.Array]
    """``(variables, rollout) -> [T + 1, B]``: the values found while acting, and that of the last observation."""
    examples: Callable[..., dict[str, PyTree]]
    """``(rollout, **fields [T, B, ...]) -> batch``, environment-major: transitions ``[B * T, ...]``, or with a
    recurrent core sequences ``[B, T, ...]``. Beside the fields it holds ``obs``, ``action``, ``valid`` and ``core``."""
    evaluate: Callable[[PyTree, dict[str, PyTree]], tuple[Distribution, jax.Array]]
    """``(params, batch) -> (distribution, value)``, shaped as the batch's fields."""
    unroll: Callable[[PyTree, Rollout], tuple[Distribution, jax.Array]]
    """``(params, rollout) -> (distribution [T, B], values [T + 1, B])`` by these parameters, whichever acted."""


def actor_critic(config: NetworkConfig, spec: EnvSpec) -> ActorCritic:
    """Builds policy and value for an environment: separate torsos for vectors, one for images.

    Raises:
      ConfigError: spaces that the networks or distributions do not handle.
    """
    head = policy_head(spec.action)
    shared = torsos.choose_torso(config.torso, spec.observation) != "mlp"
    network = networks.actor_critic(config, spec.observation, head.num_outputs, shared, log_std=head.log_std_size)
    recurrent = config.core != "none"

    def policy(
        variables: Variables, obs: PyTree, core: PyTree, context: Context
    ) -> tuple[jax.Array, PyTree, dict[str, jax.Array]]:
        outputs, value, core = network.step(variables.params, obs, core)
        distribution = head.distribution(outputs)
        action = distribution.mode() if context.keys is None else distribution.sample(context.keys)
        return action, core, {"log_prob": distribution.log_prob(action), "value": value}

    def values(variables: Variables, rollout: Rollout) -> jax.Array:
        _, bootstrap, _ = network.step(variables.params, rollout.obs[-1], rollout.final_core)
        return jnp.concatenate([rollout.extras["value"], bootstrap[None]])

    def examples(rollout: Rollout, **fields: jax.Array) -> dict[str, PyTree]:
        fields |= {"obs": rollout.obs[:-1], "action": rollout.action, "valid": rollout.valid}
        batch: dict[str, Any] = {name: jnp.swapaxes(x, 0, 1) for name, x in fields.items()}
        if not recurrent:
            batch = {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}
        return {**batch, "core": rollout.core}

    def evaluate(params: PyTree, batch: dict[str, PyTree]) -> tuple[Distribution, jax.Array]:
        if not recurrent:
            outputs, value, _ = network.step(params, batch["obs"], batch["core"])
            return head.distribution(outputs), value
        obs, valid = (jnp.swapaxes(batch[name], 0, 1) for name in ("obs", "valid"))
        outputs, value, _ = network.unroll(params, obs, batch["core"], valid)
        return head.distribution(jnp.swapaxes(outputs, 0, 1)), jnp.swapaxes(value, 0, 1)

    def unroll(params: PyTree, rollout: Rollout) -> tuple[Distribution, jax.Array]:
        valid = jnp.concatenate([rollout.valid, jnp.ones_like(rollout.valid[:1])])
        outputs, values, _ = network.unroll(params, rollout.obs, rollout.core, valid)
        return head.distribution(outputs[:-1]), values

    return ActorCritic(
        init=lambda key: Variables(network.init(key), ()),
        policy=policy,
        initial_core=network.initial_core,
        window=None if recurrent else 1,
        values=values,
        examples=examples,
        evaluate=evaluate,
        unroll=unroll,
    )


def policy_gradient(
    net: ActorCritic,
    discount: float | jax.Array,
    gae_lambda: float | jax.Array,
    value_coefficient: float | jax.Array,
    entropy_coefficient: float | jax.Array,
) -> tuple[Callable[..., PyTree], Callable[..., tuple[jax.Array, jax.Array, Aux]]]:
    """Postprocessor and loss of ``-log pi(a|s) A``, a squared value error and an entropy bonus.

    Sources: Williams (1992), REINFORCE with a baseline; Mnih et al. (2016), section 4.3.
    """

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        values = net.values(variables, rollout)
        advantage = returns.gae(*rollout.outcomes, values, discount, gae_lambda)
        return net.examples(rollout, advantage=advantage, value_target=advantage + values[:-1])

    def loss(variables: Variables, batch: PyTree, context: Context) -> tuple[jax.Array, jax.Array, Aux]:
        distribution, value = net.evaluate(variables.params, batch)
        policy_loss = -distribution.log_prob(batch["action"]) * batch["advantage"]
        value_loss = 0.5 * jnp.square(value - batch["value_target"])
        entropy = distribution.entropy()
        total = policy_loss + value_coefficient * value_loss - entropy_coefficient * entropy
        metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "policy/entropy": entropy}
        return total, batch["valid"], Aux(metrics)

    return postprocess, loss


def annealed(learning_rate: float | jax.Array, anneal_updates: int | None) -> Any:
    """A constant step size, or one that falls linearly to zero over ``anneal_updates`` updates."""
    if anneal_updates is None:
        return learning_rate
    return optax.linear_schedule(learning_rate, 0.0, anneal_updates)
