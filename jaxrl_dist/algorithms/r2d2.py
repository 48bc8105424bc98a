"""Recurrent replay distributed DQN (R2D2): Kapturowski et al. (2019), https://openreview.net/forum?id=r1lyTjAqYX."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_dist.algorithms import exploration, presets, sequences
from jaxrl_dist.algorithms.core_inputs import CoreInputs
from jaxrl_dist.algorithms.replayed import num_actions, value_learner
from jaxrl_dist.checks import MAX_SIZE, check_range
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import distributions, jax, jnp, networks, observations, optax, packing, returns, views
from jaxrl_dist.memory.config import ReplayConfig
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, EnvSpec, PyTree, Rollout, Timestep, Variables, swap_axes


@dataclasses.dataclass(frozen=True)
class R2D2(
    ReplayConfig,
    core="gru",
    activation="relu",
    hidden_sizes=(64,),
    batch_size=32,
    replay_ratio=1 / 16,
    n_step=5,
    priority_exponent=0.9,
    importance_exponent=0.6,
):
    """Recurrent deep Q-learning from replayed sequences (Kapturowski et al. 2019).

    A window has ``burn_in`` steps, ``sequence_length`` training steps, and ``n_step - 1`` more steps for the last
    n-step return.

    Unlike in the paper, windows may start at any step, not at every 40th, and may cross the end of an episode, where
    the core is reset. New windows get the largest priority so far. By default the core is a GRU instead of an
    LSTM, and reads neither the last action nor the last reward.
    """

    rescale_values: bool = True
    """Learn ``h(Q)``, ``h(x) = sign(x)(sqrt(|x| + 1) - 1) + 0.001 x``, which compresses large values (section 2.3)."""
    target_period: int = 100
    """Updates between copies of the parameters to the target network."""
    epsilon_base: float = 0.4
    """Largest probability of a random action; each environment has its own (Horgan et al. 2018)."""
    epsilon_exponent: float = 7.0
    """The smallest probability of a random action is ``epsilon_base ** (1 + epsilon_exponent)``."""
    max_gradient_norm: float = 10.0
    """Largest global norm of a gradient; larger gradients are scaled down."""
    double: bool = True
    """Choose the bootstrap action with the online network (van Hasselt et al. 2016, equation 4)."""
    dueling: bool = True
    """Separate heads for the state's value and the actions' advantages (Wang et al. 2016, equation 9)."""

    def validate(self) -> None:
        super().validate()
        check_range(self, "max_gradient_norm", above=0)
        check_range(self, "epsilon_base", low=0, high=1)
        check_range(self, "epsilon_exponent", low=0, high=MAX_SIZE)
        check_range(self, "target_period", low=1)
        if self.core == "none":
            raise ConfigError("--core none: r2d2 learns with a recurrent core; dqn learns without one")

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        """Flags that differ from the defaults above for this kind of environment."""
        return presets.row("r2d2", spec)

    def make(self, spec: EnvSpec) -> Algorithm:
        seen, size = observations.seen(spec), num_actions(self, spec)
        inputs = CoreInputs.of(self, spec)
        network = networks.recurrent_q_network(self, seen, size, dueling=self.dueling, core_inputs=inputs.size)

        def rescale(values: jax.Array) -> jax.Array:
            return returns.rescale(values) if self.rescale_values else values

        def unscale(values: jax.Array) -> jax.Array:
            return returns.unscale(values) if self.rescale_values else values

        def initial_core(num_envs: int) -> tuple[PyTree, jax.Array]:
            epsilon = exploration.ape_x_epsilon(num_envs, self.epsilon_base, self.epsilon_exponent)
            return inputs.initial(network.initial_core(num_envs), num_envs), epsilon

        def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
            own, epsilon = core
            before, read = inputs.memory(own), inputs.read(own)
            q, after = network.step(variables.params, obs, before, core_inputs=read)
            choice = distributions.EpsilonGreedy(q, epsilon, observations.legal(spec, obs))
            action = choice.mode() if context.keys is None else choice.sample(context.keys)
            extras = {"core": before} if read is None else {"core": before, "core_inputs": read}
            return action, (inputs.acted(own, after, action), epsilon), extras

        def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
            return inputs.feedback(core[0], action, step), core[1]

        def postprocess(variables: Variables, rollout: Rollout, context: Context) -> dict[str, PyTree]:
            steps, core, read = sequences.stored(rollout)
            return {"steps": steps.env_major(), "core": core, "core_inputs": swap_axes(read)}

        def loss(variables: Variables, batch: PyTree, context: Context) -> tuple[jax.Array, jax.Array, Aux]:
            steps, skip, length = batch["steps"].time_major(), self.burn_in, self.sequence_length
            read = swap_axes(batch["core_inputs"])
            late: Rollout = jax.tree.map(lambda x: x[skip:], steps)
            # The last observation has no step. Its flag does not matter, because the core after it is unused.
            valid = jnp.concatenate([steps.valid, steps.valid[-1:]])

            def q_values(params: PyTree) -> jax.Array:
                """``[sequence_length + n_step, N, A]``; each network burns in its own core."""
                return views.unroll_late(network, params, steps.obs, batch["core"], valid, read, skip)[0]

            online, bootstrap = q_values(variables.params), q_values(context.target)
            choosing = online if self.double else bootstrap
            best = jnp.argmax(observations.masked(choosing, observations.legal(spec, late.obs)), axis=-1)
            values = unscale(packing.take_along_last(bootstrap, best))
            returned = returns.n_step(*late.outcomes, values, self.discount, self.n_step)
            q = packing.take_along_last(online[:length], late.action[:length])
            error, mask = (rescale(returned[:length]) - q).T, late.valid[:length].T
            losses = optax.losses.l2_loss(error)

            priority = sequences.priority(self, error, mask)
            return losses, mask, Aux({"loss/q": losses, "q/mean": q.T}, priority)

        return Algorithm(
            policy=policy,
            postprocess=postprocess,
            loss=loss,
            window=sequences.window(self),
            **value_learner(self, network, adam_epsilon=1e-3),
            initial_core=initial_core,
            feedback=feedback,
        )
