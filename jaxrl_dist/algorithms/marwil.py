"""Exponentially weighted imitation learning (MARWIL): Wang et al. (2018), NeurIPS 31."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms import name_of
from jaxrl_dist.algorithms.actor_critic import ActorCriticConfig, actor_critic
from jaxrl_dist.algorithms.replayed import n_step_replay
from jaxrl_dist.checks import MAX_SIZE, check_used
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jax, jnp, mesh, returns
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Variables, swap_axes


@dataclasses.dataclass(frozen=True)
class MARWIL(
    ReplayConfig,
    ActorCriticConfig,
    hidden_sizes=(256, 256),
    activation="relu",
    learning_rate=8e-4,
    batch_size=32,
    value_coefficient=1.0,
    entropy_coefficient=0.0,
    max_gradient_norm=10.0,
):
    """Imitates the actions of its data, those of large advantage most (Wang et al. 2018, algorithm 1)."""

    presets = "marwil"
    beta: float = setting(1.0, low=0)
    """How strongly it prefers actions of large advantage: each weighs ``exp(beta A / c)``; 0: all alike."""
    max_weight: float = setting(20.0, above=0)
    """Largest weight of an action (Peng et al. 2019, AWR, arXiv:1910.00177)."""
    n_step: int = setting(32, low=1, high=MAX_SIZE)
    """Steps of a window, all of which are examples: a return ends with its episode, or bootstraps where the window ends
    or a time limit cuts it."""

    def validate(self) -> None:
        super().validate()
        check_used(self, "max_weight", active=self.beta > 0, needed="--beta above 0")
        learns_values = self.beta > 0 or self.value_coefficient > 0
        check_used(self, "priority_exponent", active=learns_values, needed="--value-coefficient above 0")
        if self.core != "none":
            raise ConfigError(f"--core does not work with {name_of(self)}: remove it")

    def make(self, spec: EnvSpec) -> Algorithm:
        net = actor_critic(self, spec)
        # Behavioural cloning needs no values. A traced scalar is not a float.
        imitates = all(isinstance(x, float) and x == 0 for x in (self.beta, self.value_coefficient))

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            action, core, _ = net.policy(variables, obs, core, context)  # data of others holds no extras
            return action, core, {}

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
            blank = net.initial_core(rollout.reward.shape[1])  # replayed windows carry none
            windows = rollout._replace(extras=(), core=blank, final_core=blank)
            if imitates:
                return {"windows": windows.env_major()}
            values = net.unroll(variables.params, windows)[1]
            value_target = returns.lambda_returns(*rollout.outcomes, values, self.discount, 1.0)
            advantage = value_target - values[:-1]
            size = jnp.sqrt(mesh.global_mean(jnp.square(advantage), rollout.valid) + 1e-8)
            weight = jnp.minimum(jnp.exp(self.beta * advantage / size), self.max_weight)
            return {"windows": windows.env_major(), **swap_axes({"value_target": value_target, "weight": weight})}

        def imitation(variables: Variables, batch: PyTree, context: Context) -> tuple[jax.Array, jax.Array, Aux]:
            windows: Rollout = batch["windows"]
            examples = net.examples(windows.env_major())
            distribution, _ = net.evaluate(variables.params, examples)
            shape, choices = windows.valid.shape, examples["action"]
            metrics = {"loss/policy": -distribution.log_prob(choices), "policy/entropy": distribution.entropy()}
            metrics = {name: x.reshape(shape) for name, x in metrics.items()}
            total = metrics["loss/policy"] - self.entropy_coefficient * metrics["policy/entropy"]
            return total, windows.valid, Aux(metrics)

        def loss(variables: Variables, batch: PyTree, context: Context) -> tuple[jax.Array, jax.Array, Aux]:
            windows: Rollout = batch["windows"].env_major()
            target, weight = swap_axes((batch["value_target"], batch["weight"]))
            distribution, values = net.unroll(variables.params, windows)
            error = jnp.where(windows.valid, values[:-1] - target, 0.0)
            policy_loss = -returns.constant(weight) * distribution.log_prob(windows.action)
            total, metrics = self.combined(
                policy_loss, 0.5 * jnp.square(error), distribution.entropy(), **{"policy/weight": weight}
            )
            count = jnp.maximum(jnp.sum(windows.valid, axis=0), 1)
            priority = returns.constant(jnp.sum(jnp.abs(error), axis=0) / count)
            total, metrics = swap_axes((total, metrics))
            return total, batch["windows"].valid, Aux(metrics, priority)

        return Algorithm(
            loss=imitation if imitates else loss,
            optimizer=self.clipped_optimizer("adam", eps=1e-5),
            **net.acting() | n_step_replay(self) | {"policy": policy, "postprocess": postprocess},
        )
