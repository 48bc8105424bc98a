"""MuZero (Schrittwieser et al. 2020, https://arxiv.org/abs/1911.08265):
plans with a model that it learns.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from jaxrl_dist.algorithms import searching
from jaxrl_dist.algorithms.presets import TablePresets
from jaxrl_dist.algorithms.replayed import num_actions, value_learner
from jaxrl_dist.checks import MAX_SIZE, check_used
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jax, jnp, mesh, models, observations, optax, returns, values
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
class MuZero(
    TablePresets,
    searching.SearchConfig,
    ReplayConfig,
    hidden_sizes=(128,),
    activation="relu",
    batch_size=128,
    replay_ratio=0.25,
    n_step=5,
    replay_capacity=32_768,
):
    """MuZero (Schrittwieser et al. 2020): plans with a model that it learns;
    its search is Gumbel MuZero's.
    """

    presets = "muzero"

    unroll_steps: int = setting(5, low=1, high=1_000)
    """K: steps of the model that each window trains."""
    state_size: int = setting(128, low=2, high=MAX_SIZE)
    """Width of the model's states."""
    num_atoms: int = setting(127, low=3, high=MAX_SIZE)
    """Atoms of the distributions of values and of rewards."""
    value_limit: float = setting(1000.0, above=0, high=1e9)
    """Values and rewards of the outermost atoms: plus and minus this."""
    value_coefficient: float = setting(0.25, low=0)
    """Weight of the loss of values."""
    bootstrap: Literal["stored", "current"] = "current"
    """Values that end n-step returns: from the searches that acted, or the target network's."""
    target_period: int = setting(200, low=1)
    """Updates between copies of the parameters to the target network."""
    reanalyse: float = setting(0.0, low=0, high=1)
    """Share of the windows for which new searches with the newest parameters replace the stored
    policies (appendix H: 0.8); each takes ``unroll_steps + 1`` searches."""
    temperature_start: float = setting(1.0, low=0)
    """Temperature of actions at the start; see ``temperature_end``."""
    temperature_end: float = setting(1.0, low=0)
    """Temperature of actions after ``temperature_steps``: 0 takes the best."""
    temperature_steps: int = setting(100_000, low=1)
    """Env steps over which the temperature falls linearly."""
    max_gradient_norm: float = setting(5.0, above=0)
    """Largest global norm of a gradient; larger gradients are scaled down."""

    adam_epsilon: ClassVar[float] = 1e-8

    def validate(self) -> None:
        super().validate()
        if self.core != "none":
            raise ConfigError(
                "--core does not work with muzero, because its model has a state of its own; "
                "remove it"
            )
        check_used(
            self, "target_period", active=self.bootstrap == "current", needed="--bootstrap current"
        )
        constant = self.temperature_start == self.temperature_end
        check_used(self, "temperature_steps", active=not constant, needed="--temperature-end")

    def temperature(self, env_step: jax.Array) -> jax.Array:
        """Returns the temperature of actions."""
        return optax.linear_schedule(
            self.temperature_start, self.temperature_end, self.temperature_steps
        )(env_step)

    def make(self, spec: EnvSpec) -> Algorithm:
        searching.check_installed(self)
        if spec.both_sides:
            raise ConfigError(f"muzero cannot play both sides of {spec.id}; use alphazero")
        size = num_actions(self, spec)
        space = observations.input_space(spec)
        model = models.make_model(self, space, size, self.state_size, self.num_atoms)
        top = returns.rescale(jnp.asarray(self.value_limit, jnp.float32))
        head = values.categorical(-top, top, self.num_atoms)
        stored = self.bootstrap == "stored"

        def scalar(logits: jax.Array) -> jax.Array:
            """Returns the values or rewards ``[...]`` that logits ``[..., L]`` mean (appendix
            F).
            """
            return returns.unscale(head.mean(logits))

        def missed(logits: jax.Array, x: jax.Array) -> jax.Array:
            """Returns the losses ``[N]`` of logits ``[N, L]`` for values or rewards ``[N]``."""
            one = returns.rescale(x)[:, None]
            return head.loss(logits, values.Particles(one, jnp.ones_like(one)))[0]

        def predict(params: PyTree, state: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits, value = model.predict(params, state)
            return logits, scalar(value)

        def imagine(
            params: PyTree, keys: jax.Array, action: jax.Array, state: PyTree
        ) -> tuple[Any, ...]:
            state, reward = model.advance(params, state, action)
            logits, value = predict(params, state)
            return scalar(reward), jnp.full_like(value, self.discount), logits, value, state

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            state = model.represent(variables.params, obs)
            logits, value = predict(variables.params, state)
            legal = observations.legal(spec, obs)
            temperature = self.temperature(context.env_step)
            roots = logits, value, state, legal, context.keys, temperature
            found = searching.search(self, imagine, variables.params, *roots)
            return found.action, core, {"weights": found.weights, "value": found.value}

        def searched_anew(variables: Variables, rollout: Rollout, keys: jax.Array) -> jax.Array:
            """Returns the policies ``[K + 1, N, A]`` of windows,
            a share of them by the newest parameters.
            """
            if jax.lax.axis_size(mesh.DATA) > 1:
                raise ConfigError("--reanalyse searches on one device; use --num-devices 1")
            steps = self.unroll_steps + 1
            weights = rollout.extras["weights"]
            # Windows come in the order of their environments, so those searched are drawn.
            chance, *searching_keys = jax.vmap(
                lambda key: jax.random.split(jax.random.fold_in(key, 1), 1 + steps)
            )(keys).T
            rows = jnp.argsort(jax.vmap(jax.random.uniform)(chance))[
                : max(1, round(self.reanalyse * len(chance)))
            ]
            obs = jax.tree.map(lambda x: x[:steps, rows].reshape(-1, *x.shape[2:]), rollout.obs)
            state = model.represent(variables.params, obs)
            logits, value = predict(variables.params, state)
            roots = (
                logits,
                value,
                state,
                observations.legal(spec, obs),
                jnp.stack(searching_keys)[:, rows].reshape(-1),
            )
            found = searching.search(self, imagine, variables.params, *roots)
            return weights[:steps].at[:, rows].set(found.weights.reshape(steps, len(rows), -1))

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
            outcomes = rollout.outcomes
            estimates = rollout.extras["value"]
            if stored:  # the last step only supplies the value of its observation
                outcomes = jax.tree.map(lambda x: x[:-1], outcomes)
            else:
                of_obs = jax.vmap(
                    lambda obs: predict(context.target, model.represent(context.target, obs))[1]
                )
                estimates = of_obs(rollout.obs)
            value = returns.n_step(*outcomes, estimates, self.discount, self.n_step)
            last = self.unroll_steps + 1
            acts, ended = returns.unroll_masks(*outcomes[1:], self.unroll_steps)
            weights = rollout.extras["weights"][:last]
            if self.reanalyse:
                weights = searched_anew(variables, rollout, context.keys)
            draw = jax.vmap(lambda key: jax.random.randint(key, (self.unroll_steps,), 0, size))
            fields = {
                # After an end, any action leads nowhere.
                "action": jnp.where(ended[:-1], draw(context.keys).T, rollout.action[: last - 1]),
                "reward": jnp.where(acts[:-1], rollout.reward[: last - 1], 0.0),
                "value": jnp.where(acts, value[:last], 0.0),
                "weights": weights,
                "acts": acts,
                "known": acts | ended,
            }
            batch: dict[str, PyTree] = swap_axes(fields)
            return {
                **batch,
                "obs": jax.tree.map(lambda x: x[0], rollout.obs),
                "valid": rollout.valid[0],
            }

        def loss(
            variables: Variables, batch: PyTree, context: Context
        ) -> tuple[jax.Array, jax.Array, Aux]:
            params = variables.params
            steps = swap_axes({k: x for k, x in batch.items() if k not in ("obs", "valid")})
            state = model.represent(params, batch["obs"])
            losses: dict[str, list[jax.Array]] = {"policy": [], "value": [], "reward": []}
            first = jnp.zeros(len(state))
            for k in range(self.unroll_steps + 1):
                logits, value = model.predict(params, state)
                # appendix G
                if k == 0:
                    share = 1.0
                else:
                    share = 1.0 / self.unroll_steps
                cross = optax.losses.softmax_cross_entropy(logits, steps["weights"][k])
                losses["policy"].append(share * steps["acts"][k] * cross)
                known = steps["known"][k]
                losses["value"].append(share * known * missed(value, steps["value"][k]))
                first = scalar(value) if k == 0 else first
                if k < self.unroll_steps:
                    halved = 0.5 * state + returns.constant(0.5 * state)  # its gradient: appendix G
                    state, reward = model.advance(params, halved, steps["action"][k])
                    error = missed(reward, steps["reward"][k])
                    losses["reward"].append(known * error / self.unroll_steps)
            summed = {name: sum(parts[1:], parts[0]) for name, parts in losses.items()}
            total = summed["policy"] + self.value_coefficient * summed["value"] + summed["reward"]
            metrics = {f"loss/{name}": x for name, x in summed.items()} | {"value/mean": first}
            # Appendix G takes the value of the search that acted;
            # this one follows what has been learnt since.
            priority = returns.constant(jnp.abs(first - batch["value"][:, 0]))
            return total, batch["valid"], Aux(metrics, priority)

        learner = value_learner(self, model)
        if stored:
            del learner["target"], learner["initial_target"]
        return Algorithm(
            **learner
            | {"postprocess": postprocess, "window": self.unroll_steps + self.n_step + stored},
            policy=policy,
            loss=loss,
        )
