"""Recurrent replay distributed DQN (R2D2): Kapturowski et al. (2019), https://openreview.net/forum?id=r1lyTjAqYX."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.algorithms import exploration
from jaxrl_dist.algorithms.replayed import num_actions, taken, value_learner
from jaxrl_dist.checks import MAX_SIZE, check_range
from jaxrl_dist.lazy import distributions, jax, jnp, networks, optax, returns
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Variables


@dataclasses.dataclass(frozen=True)
class R2D2(
    ReplayConfig,
    activation="relu",
    hidden_sizes=(64,),
    batch_size=32,
    replay_ratio=1 / 16,
    n_step=5,
    priority_exponent=0.9,
    importance_exponent=0.6,
):
    """Deep Q-learning with a memory, from replayed sequences (Kapturowski et al. 2019).

    A window is ``burn_in`` steps, ``sequence_length`` steps whose values learn, and the ``n_step - 1`` more that the
    last of their returns spans.

    Unlike the paper's, windows may start at any step, not at every 40th, and may run over an episode's end, where the
    core is reset; new ones are drawn with the largest priority so far. The core is a GRU and no LSTM, and reads neither
    the last action nor reward.
    """

    core_size: int = 64
    """Width of the recurrent core's state."""
    burn_in: int = 8
    """Steps that only bring the stored core up to date before those that learn (section 3)."""
    sequence_length: int = 16
    """Steps of a window that learn."""
    max_priority_share: float = 0.9
    """eta: of a window's priority, the share of its largest error; the rest is the mean's (section 2.3)."""
    rescale_values: bool = True
    """Learn ``h(Q)``, ``h(x) = sign(x)(sqrt(|x| + 1) - 1) + 0.001 x``, which makes large values small (section 2.3)."""
    target_period: int = 100
    """Updates between two copies of the parameters to the target network."""
    epsilon_base: float = 0.4
    """Probability of a random action in the environment that explores most; each has its own (Horgan et al. 2018)."""
    epsilon_exponent: float = 7.0
    """The environment that explores least has the probability ``epsilon_base ** (1 + epsilon_exponent)``."""
    max_gradient_norm: float = 10.0
    """Gradients with a larger global norm are scaled down to it."""
    double: bool = True
    """The online network chooses the action whose target value counts (van Hasselt et al. 2016, equation 4)."""
    dueling: bool = True
    """Separate heads for the state's value and the actions' advantages (Wang et al. 2016, equation 9)."""

    def validate(self) -> None:
        super().validate()
        check_range(self, "max_gradient_norm", above=0)
        check_range(self, "max_priority_share", "epsilon_base", low=0, high=1)
        check_range(self, "epsilon_exponent", "burn_in", low=0, high=MAX_SIZE)
        check_range(self, "core_size", "sequence_length", low=1, high=MAX_SIZE)
        check_range(self, "target_period", low=1)

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        """Flags that differ from the defaults above for this kind of environment."""
        if spec.family == "atari":
            # Kapturowski et al. (2019), section 2.3 and appendix; for one host fewer environments, less capacity.
            # An update sees 5,120 steps, so each step is learned from about five times. Rescaled values take the place
            # of clipped rewards, and a lost life ends no episode, which is the protocol of Machado et al. (2018).
            return {
                "atari_preset": "machado",
                "num_envs": 64,
                "rollout_length": 16,
                "core_size": 512,
                "burn_in": 40,
                "sequence_length": 80,
                "batch_size": 64,
                "replay_ratio": 1 / 1024,
                "replay_capacity": 1_000_000,
                "learning_starts": 50_000,
                "learning_rate": 1e-4,
                "discount": 0.997,
                "target_period": 2500,
                "evaluation_episodes": 10,
            }
        return {"num_envs": 16, "rollout_length": 8}

    def make(self, spec: EnvSpec) -> Algorithm:
        network = networks.recurrent_q_network(
            self, spec.observation, num_actions(self, spec), core_size=self.core_size, dueling=self.dueling
        )

        def rescale(values: jax.Array) -> jax.Array:
            return returns.rescale(values) if self.rescale_values else values

        def unscale(values: jax.Array) -> jax.Array:
            return returns.unscale(values) if self.rescale_values else values

        def initial_core(num_envs: int) -> tuple[jax.Array, jax.Array]:
            epsilon = exploration.ape_x_epsilon(num_envs, self.epsilon_base, self.epsilon_exponent)
            return network.initial_core(num_envs), epsilon

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            before, epsilon = core
            q, after = network.step(variables.params, obs, before)
            choice = distributions.EpsilonGreedy(q, epsilon)
            action = choice.mode() if context.keys is None else choice.sample(context.keys)
            return action, (after, epsilon), {"core": before}

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> dict[str, PyTree]:
            steps = rollout._replace(extras=(), core=(), final_core=())
            return {"steps": steps.env_major(), "core": rollout.extras["core"][0]}

        def loss(variables: Variables, batch: PyTree, context: Context) -> tuple[jax.Array, jax.Array, Aux]:
            steps, skip, length = batch["steps"].time_major(), self.burn_in, self.sequence_length
            late: Rollout = jax.tree.map(lambda x: x[skip:], steps)
            # The last observation has no step, so any flag will do: the core after it is not used.
            valid = jnp.concatenate([late.valid, late.valid[-1:]])

            def q_values(params: PyTree) -> jax.Array:
                """``[sequence_length + n_step, N, A]``; each network has the core of its own burn-in."""
                core = batch["core"]
                if skip:
                    _, core = network.unroll(params, steps.obs[:skip], core, steps.valid[:skip])
                return network.unroll(params, late.obs, jax.lax.stop_gradient(core), valid)[0]

            online, bootstrap = q_values(variables.params), q_values(context.target)
            best = jnp.argmax(online if self.double else bootstrap, axis=-1)
            values = unscale(taken(bootstrap, best))
            returned = returns.n_step(*late.outcomes, values, self.discount, self.n_step)
            q = taken(online[:length], late.action[:length])
            error, mask = (rescale(returned[:length]) - q).T, late.valid[:length].T
            losses = optax.losses.l2_loss(error)

            size = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(error)), 0.0)
            mean = jnp.sum(size, axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)
            eta = self.max_priority_share
            priority = eta * jnp.max(size, axis=1) + (1 - eta) * mean
            return losses, mask, Aux({"loss/q": losses, "q/mean": q.T}, priority)

        return Algorithm(
            policy=policy,
            postprocess=postprocess,
            loss=loss,
            window=self.burn_in + self.sequence_length + self.n_step - 1,
            **value_learner(self, network, adam_epsilon=1e-3),
            initial_core=initial_core,
        )
