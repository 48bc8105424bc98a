"""Exponentially weighted imitation learning (MARWIL): Wang et al. (2018), NeurIPS 31."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.algorithms.actor_critic import ActorCriticConfig, actor_critic
from jaxrl_dist.algorithms.replayed import n_step_replay
from jaxrl_dist.checks import MAX_SIZE, check_used
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import jax, jnp, mesh, returns
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Aux,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Variables,
    swap_axes,
)


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
    """Imitates the actions of its data, those of large
    advantage most (Wang et al. 2018, algorithm 1).
    """

    presets = "marwil"
    beta: float = setting(1.0, low=0)
    """How strongly the policy prefers actions of large advantage: each weighs ``exp(beta A / c)``;
    0: all weigh the same."""
    max_weight: float = setting(20.0, above=0)
    """Largest weight of an action (Peng et al. 2019, AWR, arXiv:1910.00177)."""
    n_step: int = setting(32, low=1, high=MAX_SIZE)
    """Steps of a window, all of which are examples: a return ends with its episode, or bootstraps
    where the window ends or a time limit cuts it. With a core, --burn-in more come before them."""

    @classmethod
    def recurrent_preset(cls, preset: dict[str, Any]) -> dict[str, Any]:
        """Returns it as it is: windows are also sequences without a core."""
        return preset

    def validate(self) -> None:
        super().validate()
        check_used(self, "max_weight", active=self.beta > 0, needed="--beta above 0")
        learns_values = self.beta > 0 or self.value_coefficient > 0
        check_used(
            self, "priority_exponent", active=learns_values, needed="--value-coefficient above 0"
        )
        instead = "another algorithm; here --n-step is the length of a sequence, and the mean error its priority"
        check_used(self, "sequence_length", "max_priority_share", active=False, needed=instead)

    def make(self, spec: EnvSpec) -> Algorithm:
        net = actor_critic(self, spec)
        # Behavioural cloning needs no values. A traced scalar is not a float.
        imitates = all(isinstance(x, float) and x == 0 for x in (self.beta, self.value_coefficient))
        recurrent = self.core != "none"
        burn_in = self.burn_in if recurrent else 0

        def learnt(valid: jax.Array) -> jax.Array:
            """Returns which steps ``[T, ...]`` of windows are examples."""
            if not burn_in:
                return valid
            return valid.at[:burn_in].set(False)

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            # data of others holds no extras
            action, core, _ = net.policy(variables, obs, core, context)
            return action, core, {}

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
            windows = net.from_start(rollout)
            if imitates:
                return {"windows": windows.env_major()}
            values = net.unroll(variables.params, windows)[1]
            value_target = returns.lambda_returns(*rollout.outcomes, values, self.discount, 1.0)
            advantage = value_target - values[:-1]
            size = jnp.sqrt(mesh.global_mean(jnp.square(advantage), learnt(rollout.valid)) + 1e-8)
            weight = jnp.minimum(jnp.exp(self.beta * advantage / size), self.max_weight)
            # Policy and value share a core,
            # and the gradient of large values would drown the policy's.
            unit = jnp.broadcast_to(size if recurrent else 1.0, weight.shape)
            fields = {"value_target": value_target, "weight": weight, "unit": unit}
            return {"windows": windows.env_major(), **swap_axes(fields)}

        def imitation(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            windows: Rollout = batch["windows"]
            examples = net.examples(windows.env_major())
            distribution, _ = net.evaluate(variables.params, examples)
            shape = windows.valid.shape
            choices = examples["action"]
            metrics = {
                "loss/policy": -distribution.log_prob(choices),
                "policy/entropy": distribution.entropy(),
            }
            metrics = {name: x.reshape(shape) for name, x in metrics.items()}
            total = metrics["loss/policy"] - self.entropy_coefficient * metrics["policy/entropy"]
            return total, learnt(windows.valid.T).T, Aux(metrics)

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            windows: Rollout = batch["windows"].env_major()
            target, weight, unit = swap_axes(
                (batch["value_target"], batch["weight"], batch["unit"])
            )
            distribution, values = net.unroll(variables.params, windows)
            mask = learnt(windows.valid)
            error = jnp.where(mask, values[:-1] - target, 0.0)
            policy_loss = -returns.constant(weight) * distribution.log_prob(windows.action)
            total, metrics = self.combined(
                policy_loss,
                0.5 * jnp.square(error / unit),
                distribution.entropy(),
                **{"policy/weight": weight},
            )
            count = jnp.maximum(jnp.sum(mask, axis=0), 1)
            priority = returns.constant(jnp.sum(jnp.abs(error), axis=0) / count)
            total, metrics, mask = swap_axes((total, metrics, mask))
            return total, mask, Aux(metrics, priority)

        replaced = {"policy": policy, "postprocess": postprocess, "window": burn_in + self.n_step}
        return Algorithm(
            loss=imitation if imitates else loss,
            optimizer=self.clipped_optimizer("adam", eps=1e-5),
            whole_windows=True,
            imitates=imitates,
            **net.acting() | n_step_replay(self) | replaced,
        )
