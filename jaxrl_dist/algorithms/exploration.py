"""Exploration noise: on the actions of greedy and of stochastic policies,
or on the parameters of greedy ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.checks import check_used
from jaxrl_dist.config.inherit import Inherits
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import distributions, jax, jnp, mesh, optax, packing, perturbation, rng
from jaxrl_dist.types import Algorithm, Aux, Context, PyTree, Rollout, Variables


@dataclasses.dataclass(frozen=True)
class EpsilonConfig(Inherits):
    """Flags of random actions, whose probability epsilon falls during the run."""

    epsilon_start: float = setting(1.0, low=0, high=1)
    """Probability of a random action at the start."""
    epsilon_end: float = setting(0.01, low=0, high=1)
    """Probability of a random action after ``epsilon_steps``."""
    epsilon_steps: int = setting(10_000, low=0)
    """Env steps over which epsilon falls linearly."""

    def validate(self) -> None:
        super().validate()
        falls = self.epsilon_start != self.epsilon_end
        check_used(
            self,
            "epsilon_steps",
            active=falls,
            needed="--epsilon-start and --epsilon-end that differ",
        )

    def epsilon(self, env_step: jax.Array) -> jax.Array:
        """Returns the probability of a random action, of all environments alike."""
        return optax.linear_schedule(
            self.epsilon_start, self.epsilon_end, max(self.epsilon_steps, 1)
        )(env_step)


def ape_x_epsilon(num_envs: int, base: float, exponent: float) -> jax.Array:
    """Returns an epsilon for each environment,
    ``base ** (1 + exponent * i / (num_envs - 1))``, float32 ``[num_envs]``.

    A single environment gets ``base``, the largest.

    Source: Horgan et al. (2018), "Distributed Prioritized Experience Replay", section 4,
    https://arxiv.org/abs/1803.00933.
    """
    fraction = jnp.arange(num_envs, dtype=jnp.float32) / max(num_envs - 1, 1)
    return base ** (1.0 + exponent * fraction)


LONGEST_REPETITION = 10_000
"""Most env steps that a random action lasts in any environment."""


def ez_greedy(
    q: jax.Array,
    epsilon: jax.Array | float,
    legal: jax.Array | None,
    keys: jax.Array,
    core: Repetition,
) -> tuple[jax.Array, Repetition]:
    """Chooses the best actions or, with probability ``epsilon``,
    random ones that are then repeated.

    A random action lasts ``n`` steps with ``P(n >= k) = 1 / k`` up to the environment's longest:
    half of them last one step, and a few as long as the episode, so they cross regions that a
    random walk would take very long to leave. One that becomes illegal ends.

    Source: Dabney et al. (2021), "Temporally-Extended Epsilon-Greedy Exploration", section 3,
    https://arxiv.org/abs/2006.01782. Its durations follow a zeta distribution of exponent 2, whose
    tail falls alike. Environments of different longest durations are this library's: where long
    ones end episodes early, others continue.

    Args:
      q: values ``[..., A]`` float32.
      epsilon: scalar or ``[...]``, the probability that a random action starts.
      legal: ``[..., A]`` bool, or None if all actions are.
      keys: ``[...]``, one for each action.

    Returns:
      Actions ``[...]`` int32, and what is left to repeat.
    """
    draws = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (2,)))(
        keys.reshape(-1)
    )
    chance = draws[:, 0].reshape(keys.shape)
    length = draws[:, 1].reshape(keys.shape)
    duration = jnp.minimum(1.0 / (1.0 - length), core.longest).astype(jnp.int32)
    repeat = repeats(core, legal)
    starts = ~repeat & (chance < epsilon)
    random = distributions.EpsilonGreedy(q, 1.0, legal).sample(keys)
    other = jnp.where(starts, random, distributions.EpsilonGreedy(q, 0.0, legal).mode())
    left = jnp.where(repeat, core.left, jnp.where(starts, duration, 1)) - 1
    action = jnp.where(repeat, core.action, other)
    return action, core._replace(action=action, left=left)


def repeats(core: Repetition, legal: jax.Array | None) -> jax.Array:
    """Returns where ``ez_greedy`` repeats an action, ``[...]`` bool."""
    repeats = core.left > 0
    if legal is None:
        return repeats
    return repeats & packing.take_along_last(legal, core.action)


class Repetition(NamedTuple):
    """The policy state of ``ez_greedy``."""

    action: jax.Array
    """[...] int32."""
    left: jax.Array
    """[...] int32: env steps for which the action continues."""
    longest: jax.Array
    """[...] float32: env steps that a random action lasts at most."""

    @classmethod
    def none(cls, num_envs: int, *agents: int) -> Repetition:
        """Returns the state before the first step, ``[num_envs, *agents]``.

        Durations grow geometrically from 1 in the last
        environment to ``LONGEST_REPETITION`` in the first.
        """
        ladder = LONGEST_REPETITION ** jnp.linspace(1.0, 0.0, num_envs)
        longest = jnp.broadcast_to(ladder.reshape(-1, *(1 for _ in agents)), (num_envs, *agents))
        return cls(
            jnp.zeros(longest.shape, jnp.int32), jnp.zeros(longest.shape, jnp.int32), longest
        )


def gaussian(keys: jax.Array, size: int) -> jax.Array:
    """Draws standard normal noise ``[N, size]`` float32 with one key per row."""
    return jax.vmap(lambda key: jax.random.normal(key, (size,)))(keys)


def ornstein_uhlenbeck(
    noise: jax.Array, keys: jax.Array, std: jax.Array | float, theta: float = 0.15
) -> jax.Array:
    """Advances noise that is correlated in time and drifts back to 0: ``[N, A]`` float32.

    ``x' = x - theta x + std N(0, 1)``: Lillicrap et al. (2016), section 7,
    https://arxiv.org/abs/1509.02971, with ``theta = 0.15`` and ``std = 0.2``; from Uhlenbeck and
    Ornstein (1930), with a time step of 1.
    """
    return noise - theta * noise + std * gaussian(keys, noise.shape[-1])


def correlated(noise: jax.Array, keys: jax.Array, correlation: jax.Array | float) -> jax.Array:
    """Advances standard normal noise that is correlated in time, ``[N, A]`` float32;
    rows of zeros start.

    ``x' = c x + sqrt(1 - c^2) N(0, 1)``: an autoregressive process of order 1. Each ``x`` by itself
    is standard normal, so an action has the same density as with independent noise. Sources:
    Eberhard et al. (2023), "Pink Noise Is All You Need", and Hollenstein et al. (2024), "Colored
    Noise in PPO", https://arxiv.org/abs/2312.11091, who draw whole sequences of coloured noise;
    this process needs no more than the last number.
    """
    fresh = gaussian(keys, noise.shape[-1])
    started = jnp.any(noise != 0, axis=-1, keepdims=True)
    return jnp.where(
        started, correlation * noise + jnp.sqrt(1 - jnp.square(correlation)) * fresh, fresh
    )


# --- Noise on parameters --------------------------------------------------------------------------

ADAPTATION = 1.01
"""Factor by which each rollout changes the standard
deviation (Plappert et al. 2018, equation 8 and appendix C)."""


def parameter_noise(
    algorithm: Algorithm,
    acting: Callable[[PyTree], PyTree],
    distance: Callable[[PyTree, PyTree, jax.Array], jax.Array],
    limit: Callable[[jax.Array], jax.Array],
    std: float | jax.Array,
) -> Algorithm:
    """Lets each environment act with normal noise on the parameters,
    which stays the same until its episode ends.

    An episode that starts within a rollout keeps the last episode's noise until the next rollout.
    The standard deviation adapts after each rollout, so that perturbed and plain actions differ by
    about ``limit``.

    Source: Plappert et al. (2018), "Parameter Space Noise for Exploration", section 3,
    https://arxiv.org/abs/1706.01905.

    Args:
      acting: ``(params) -> params``: the part of the parameters that ``algorithm.policy`` needs.
      distance: ``(params, perturbed, obs [N, ...]) -> [N]``: how far apart their actions are.
      limit: ``(env_step) -> []``: the mean distance to keep.
      std: the standard deviation at the start.
    """

    def perturbed(variables: Variables, noise: jax.Array) -> PyTree:
        key = jax.random.wrap_key_data(noise)
        return perturbation.perturbed(acting(variables.params), key, variables.stats[0])

    def initial_core(num_envs: int) -> PyTree:
        noise = jnp.zeros((num_envs, 2), jnp.uint32)  # a key's data; zeros: none has been drawn
        return {"env": jnp.arange(num_envs, dtype=jnp.int32), "noise": noise}

    inner = wrappers.extended(algorithm, lambda params: jnp.asarray(std, jnp.float32), initial_core)

    def behaviour(variables: Variables, core: PyTree, context: Context) -> tuple[PyTree, PyTree]:
        noise_state, rest = core
        fresh = jax.random.key_data(rng.per_index(context.keys, noise_state["env"]))
        drawn = jnp.any(noise_state["noise"] != 0, axis=1, keepdims=True)
        noise = jnp.where(drawn, noise_state["noise"], fresh)
        return jax.vmap(lambda row: perturbed(variables, row))(noise), (
            noise_state | {"noise": noise},
            rest,
        )

    def loss(
        variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        losses, mask, aux = inner.loss(variables, batch, context)
        metrics = {**aux.metrics, "noise/std": jnp.full_like(losses, variables.stats[0])}
        return losses, mask, aux._replace(metrics=metrics)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        std, others = inner.updated_stats(variables, rollout, context)
        plain = acting(variables.params)

        def apart(env: tuple[jax.Array, PyTree]) -> jax.Array:
            noise, obs = env
            batch = jax.tree.map(lambda x: x[None], obs)
            return distance(plain, perturbed(variables, noise), batch)[0]

        noise = rollout.core[0]["noise"]
        rows = noise, jax.tree.map(lambda x: x[0], rollout.obs)
        at_once = min(perturbation.copies_at_once(plain), len(noise))
        # a data set is not played with noise
        acted = rollout.valid[0] & jnp.any(noise != 0, axis=1)
        mean = mesh.global_mean(jax.lax.map(apart, rows, batch_size=at_once), acted)
        adapted = jnp.where(mean > limit(context.env_step), std / ADAPTATION, std * ADAPTATION)
        return jnp.where(mesh.global_sum(jnp.sum(acted)) > 0, adapted, std), others

    return dataclasses.replace(inner, behaviour=behaviour, loss=loss, update_stats=update_stats)
