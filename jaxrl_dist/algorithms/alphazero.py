"""AlphaZero (Silver et al. 2018, https://doi.org/10.1126/science.aar6404):
plans with the environment itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.algorithms import searching
from jaxrl_dist.algorithms.actor_critic import ActorCriticConfig, actor_critic
from jaxrl_dist.algorithms.replayed import n_step_replay, num_actions
from jaxrl_dist.checks import MAX_SIZE, check_used
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import distributions, jax, jnp, observations, optax, returns
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Aux,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Simulator,
    Variables,
)


@dataclasses.dataclass(frozen=True)
class AlphaZero(
    searching.SearchConfig,
    ReplayConfig,
    ActorCriticConfig,
    hidden_sizes=(128, 128),
    activation="relu",
    replay_ratio=1 / 32,
    learning_starts=0,
    n_step=16,
    value_coefficient=1.0,
    entropy_coefficient=0.0,
    max_gradient_norm=10.0,
    weight_decay=1e-4,
):
    """AlphaZero (Silver et al. 2018): plans with the environment itself, and imitates its plans;
    its search is Gumbel AlphaZero's (Danihelka et al. 2022)."""

    presets = "alphazero"

    replay_capacity: int | None = setting(None, low=1)  # type: ignore[assignment]  # the others always replay
    """Steps in the replay memory, from which updates draw windows of `--n-step` steps; None: learn
    from each rollout, on policy."""
    gae_lambda: float = setting(0.95, low=0, high=1)
    """Decay of the returns that values learn: 1 is the outcome of the episode; less also weighs the
    values of later searches."""
    num_epochs: int = setting(4, low=1)
    """Passes over each rollout."""
    num_minibatches: int = setting(8, low=1)
    """Minibatches of each pass; each makes one update."""
    temperature: float = setting(1.0, low=0)
    """Temperature of actions in training; 0: the best action."""
    temperature_moves: int | None = setting(None, low=1, high=MAX_SIZE)
    """Steps of an episode after which the temperature is 0; None: never."""
    epsilon: float = setting(0.0, low=0, below=1)
    """Probability of a random legal action in training; values do not learn from these actions."""

    def validate(self) -> None:
        super().validate()
        if self.core != "none":
            raise ConfigError(
                "--core does not work with alphazero, which would have to search over its states; "
                "remove it"
            )
        replays = self.replay_capacity is not None
        memory = "batch_size", "replay_ratio", "learning_starts", "n_step", "priority_exponent"
        check_used(self, *memory, active=replays, needed="--replay-capacity")
        check_used(
            self,
            "num_epochs",
            "num_minibatches",
            active=not replays,
            needed="learning on policy: remove --replay-capacity",
        )
        check_used(
            self, "temperature_moves", active=self.temperature > 0, needed="--temperature above 0"
        )

    def make(self, spec: EnvSpec) -> Algorithm:
        searching.check_installed(self)
        num_actions(self, spec)
        net = actor_critic(self, spec)
        counts = self.temperature_moves is not None
        replays = self.replay_capacity is not None

        def predict(params: PyTree, obs: PyTree) -> tuple[jax.Array, jax.Array]:
            choices, value = net.evaluate(params, {"obs": obs, "core": ()})
            assert isinstance(choices, distributions.Categorical), "actions are discrete"
            return choices.logits, value

        def explored(
            keys: jax.Array, action: jax.Array, logits: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            """Returns actions with some random legal ones in their places, and which these are."""
            chance, draw = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, 1)))(
                keys
            ).T
            legal = observations.masked(jnp.zeros_like(logits), logits > observations.ILLEGAL)
            random = jax.vmap(jax.random.uniform)(chance) < self.epsilon
            return jnp.where(random, distributions.Categorical(legal).sample(draw), action), random

        def search(
            variables: Variables, *roots: PyTree, core: PyTree, context: Context
        ) -> searching.Found:
            logits, value, obs = roots
            simulator = context.simulator
            if simulator is None:
                return searching.unsearched(logits, value, context.keys)
            foresee = jax.vmap(simulator.step)

            def imagine(
                params: PyTree, keys: jax.Array, action: jax.Array, state: PyTree
            ) -> tuple[PyTree, ...]:
                then = foresee(state, action, keys)
                logits, value = predict(params, then.obs)
                return then.reward, self.discount * then.discount, logits, value, then.state

            heat: Any = self.temperature
            if counts:
                heat = jnp.where(core < self.temperature_moves, self.temperature, 0.0)
            legal = observations.legal(spec, obs)
            return searching.search(
                self,
                imagine,
                variables.params,
                logits,
                value,
                simulator.state,
                legal,
                context.keys,
                heat,
            )

        def turns(simulator: Simulator, action: jax.Array) -> jax.Array:
            """Returns -1 where the other side moves after these actions, else 1:
            the rules say so, and not chance.
            """
            then = jax.vmap(simulator.step, (0, 0, None))(
                simulator.state, action, jax.random.key(0)
            )
            return jnp.where(then.discount < 0, -1.0, 1.0)

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            logits, value = predict(variables.params, obs)
            found = search(variables, logits, value, obs, core=core, context=context)
            action = found.action
            random = jnp.zeros(value.shape, bool)
            if context.keys is not None:
                action, random = explored(context.keys, action, logits)
            turn = jnp.ones_like(value)
            if spec.both_sides and context.simulator is not None:
                turn = turns(context.simulator, action)
            told = {
                "weights": found.weights,
                "value": found.value,
                "depth": found.depth,
                "random": random,
            }
            return action, core + 1 if counts else core, {**told, "turn": turn}

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
            told, outcomes = rollout.extras, rollout.outcomes
            if replays:  # the last step of a window only supplies the value of its observation
                values = told["value"]
                told, outcomes = jax.tree.map(lambda x: x[:-1], (told, outcomes))
            else:
                values = jnp.concatenate(
                    [told["value"], predict(variables.params, rollout.last_obs)[1][None]]
                )
            # What a random action leads to says nothing of the state before it:
            # its search's value stands for both.
            random = jnp.concatenate([told["random"][1:], jnp.zeros_like(told["random"][:1])])
            decay = jnp.where(random, 0.0, self.gae_lambda)
            target = returns.lambda_returns(*outcomes, values, self.discount * told["turn"], decay)
            target = jnp.where(told["random"], told["value"], target)
            fields = {
                "weights": told["weights"],
                "depth": told["depth"],
                "root_value": told["value"],
            }
            fields["value_target"] = target
            if replays:  # its first step is the example
                fields |= {"obs": rollout.obs, "valid": rollout.valid}
                return {**jax.tree.map(lambda x: x[0], fields), "core": ()}
            return net.examples(rollout._replace(core=(), final_core=()), **fields)

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            choices, value = net.evaluate(variables.params, batch)
            assert isinstance(choices, distributions.Categorical), "actions are discrete"
            policy_loss = optax.losses.softmax_cross_entropy(choices.logits, batch["weights"])
            value_loss = jnp.square(value - batch["value_target"])
            found = {"search/depth": batch["depth"], "search/value": batch["root_value"]}
            total, metrics = self.combined(policy_loss, value_loss, choices.entropy(), **found)
            priority = None
            if replays:
                priority = returns.constant(jnp.abs(value - batch["value_target"]))
            return total, batch["valid"], Aux(metrics, priority)

        if replays:
            source = n_step_replay(self)
        else:
            source = {"num_epochs": self.num_epochs, "num_minibatches": self.num_minibatches}
        return Algorithm(
            **source | {"window": self.n_step + 1 if replays else 1, "postprocess": postprocess},
            init=net.init,
            policy=policy,
            loss=loss,
            optimizer=self.clipped_optimizer("adam"),
            initial_core=lambda num_envs: jnp.zeros(num_envs, jnp.int32) if counts else (),
            searches=self.num_simulations > 0,
        )
