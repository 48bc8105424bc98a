"""Parallelised Q-network: Gallici et al. (2024), https://arxiv.org/abs/2407.04811."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms import exploration
from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.algorithms.replayed import num_actions
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import distributions, jax, jnp, networks, observations, optax, packing, returns
from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.nn.optimizers import OptimizerConfig
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
class PQN(
    TablePresets,
    exploration.EpsilonConfig,
    TorsoConfig,
    OptimizerConfig,
    hidden_sizes=(128, 128),
    activation="relu",
    layer_norm=True,
    epsilon_end=0.05,
    epsilon_steps=100_000,
):
    """Parallelised Q-network (Gallici et al. 2024): Q(lambda) without replay or target network.

    Layer normalisation keeps learning stable instead (section 3).
    """

    presets = "pqn"

    learning_rate: float = setting(5e-4, above=0)
    """Step size of the optimiser, RAdam by default."""
    discount: float = setting(0.99, low=0, high=1)
    """Discount factor of future rewards."""
    q_lambda: float = setting(0.9, low=0, high=1)
    """Decay of the lambda return: 0 is the one-step target, 1 the whole return (algorithm 1)."""
    num_epochs: int = setting(4, low=1)
    """Passes over each rollout."""
    num_minibatches: int = setting(4, low=1)
    """Minibatches of each pass; each makes one update."""
    max_gradient_norm: float = setting(10.0, above=0)
    """Largest global norm of a gradient; larger gradients are scaled down."""

    def make(self, spec: EnvSpec) -> Algorithm:
        size = num_actions(self, spec)
        space = observations.input_space(spec)
        network = networks.q_network(self, space, size, num_atoms=1, dueling=False, noisy=False)

        def values(params: PyTree, obs: PyTree) -> jax.Array:
            return network.apply(params, obs, None)[..., 0]

        def best(q: jax.Array, obs: PyTree) -> jax.Array:
            return observations.masked(q, observations.legal(spec, obs)).max(axis=-1)

        def choices(q: jax.Array, obs: PyTree, context: Context) -> distributions.EpsilonGreedy:
            return distributions.EpsilonGreedy(
                q, self.epsilon(context.env_step), observations.legal(spec, obs)
            )

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            q = values(variables.params, obs)
            greedy = choices(q, obs, context)
            if context.keys is None:
                action = greedy.mode()
            else:
                action = greedy.sample(context.keys)
            return action, core, {"value": best(q, obs)}

        def log_prob(
            variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
        ) -> jax.Array:
            return choices(values(variables.params, obs), obs, context).log_prob(action)

        def postprocess(
            variables: Variables, rollout: Rollout, context: Context
        ) -> dict[str, PyTree]:
            bootstrap = best(values(variables.params, rollout.last_obs), rollout.last_obs)
            estimates = jnp.concatenate([rollout.extras["value"], bootstrap[None]])
            value_target = returns.lambda_returns(
                *rollout.outcomes, estimates, self.discount, self.q_lambda
            )
            fields = {
                "obs": rollout.obs_before,
                "action": rollout.action,
                "valid": rollout.valid,
                "value_target": value_target,
            }
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), swap_axes(fields))

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            q = packing.take_along_last(values(variables.params, batch["obs"]), batch["action"])
            losses = 0.5 * jnp.square(q - batch["value_target"])
            return losses, batch["valid"], Aux({"loss/q": losses, "q/mean": q})

        return Algorithm(
            init=lambda key: Variables(network.init(key), ()),
            policy=policy,
            log_prob=log_prob,
            action_values=lambda variables, obs: (values(variables.params, obs), 0.0),
            postprocess=postprocess,
            loss=loss,
            optimizer=optax.chain(
                packing.clip_by_global_norm(self.max_gradient_norm),
                self.make_optimizer("radam", self.learning_rate),
            ),
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            window=1,
        )
