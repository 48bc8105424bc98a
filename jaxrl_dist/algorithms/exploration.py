"""Exploration noise: on the actions of greedy and of stochastic policies, or on the parameters of greedy ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxrl_dist.lazy import jax, jnp, mesh, perturbation, rng
from jaxrl_dist.types import Acted, Algorithm, Aux, Context, PyTree, Rollout, Timestep, Variables


def ape_x_epsilon(num_envs: int, base: float = 0.4, exponent: float = 7.0) -> jax.Array:
    """Returns an epsilon for each environment, ``base ** (1 + exponent * i / (num_envs - 1))``, float32 ``[num_envs]``.

    A single environment gets ``base``, the largest.

    Source: Horgan et al. (2018), "Distributed Prioritized Experience Replay", section 4,
    https://arxiv.org/abs/1803.00933.
    """
    fraction = jnp.arange(num_envs, dtype=jnp.float32) / max(num_envs - 1, 1)
    return base ** (1.0 + exponent * fraction)


def gaussian(keys: jax.Array, size: int) -> jax.Array:
    """Draws standard normal noise ``[N, size]`` float32 with one key per row."""
    return jax.vmap(lambda key: jax.random.normal(key, (size,)))(keys)


def ornstein_uhlenbeck(noise: jax.Array, keys: jax.Array, std: jax.Array | float, theta: float = 0.15) -> jax.Array:
    """Advances noise that is correlated in time and drifts back to 0: ``[N, A]`` float32.

    ``x' = x - theta x + std N(0, 1)``: Lillicrap et al. (2016), section 7, https://arxiv.org/abs/1509.02971, with
    ``theta = 0.15`` and ``std = 0.2``; from Uhlenbeck and Ornstein (1930), with a time step of 1.
    """
    return noise - theta * noise + std * gaussian(keys, noise.shape[-1])


def correlated(noise: jax.Array, keys: jax.Array, correlation: jax.Array | float) -> jax.Array:
    """Advances standard normal noise that is correlated in time, ``[N, A]`` float32; rows of zeros start.

    ``x' = c x + sqrt(1 - c^2) N(0, 1)``: an autoregressive process of order 1. Each ``x`` by itself is standard normal,
    so an action has the same density as with independent noise. Sources: Eberhard et al. (2023), "Pink Noise Is All You
    Need", and Hollenstein et al. (2024), "Colored Noise in PPO", https://arxiv.org/abs/2312.11091, who draw whole
    sequences of coloured noise; this process needs no more than the last number.
    """
    fresh = gaussian(keys, noise.shape[-1])
    started = jnp.any(noise != 0, axis=-1, keepdims=True)
    return jnp.where(started, correlation * noise + jnp.sqrt(1 - jnp.square(correlation)) * fresh, fresh)


# --- Noise on parameters --------------------------------------------------------------------------------

ADAPTATION = 1.01
"""Factor by which each rollout changes the standard deviation (Plappert et al. 2018, equation 8 and appendix C)."""


def parameter_noise(
    algorithm: Algorithm,
    acting: Callable[[PyTree], PyTree],
    distance: Callable[[PyTree, PyTree, jax.Array], jax.Array],
    limit: Callable[[jax.Array], jax.Array],
    std: float | jax.Array,
) -> Algorithm:
    """Lets each environment act with normal noise on the parameters, which stays the same until its episode ends.

    An episode that starts within a rollout keeps the last episode's noise until the next rollout. The standard
    deviation adapts after each rollout, so that perturbed and plain actions differ by about ``limit``.

    Source: Plappert et al. (2018), "Parameter Space Noise for Exploration", section 3, https://arxiv.org/abs/1706.01905.

    Args:
      acting: ``(params) -> params``: the part of the parameters that ``algorithm.policy`` needs.
      distance: ``(params, perturbed, obs [N, ...]) -> [N]``: how far apart their actions are.
      limit: ``(env_step) -> []``: the mean distance to keep.
      std: the standard deviation at the start.
    """

    def inner(variables: Variables) -> Variables:
        return variables._replace(stats=variables.stats[1])

    def strip(rollout: Rollout) -> Rollout:
        if not rollout.core:  # replayed windows carry no policy state
            return rollout
        return rollout._replace(core=rollout.core[1], final_core=rollout.final_core[1])

    def perturbed(variables: Variables, noise: jax.Array) -> PyTree:
        key = jax.random.wrap_key_data(noise)
        return perturbation.perturbed(acting(variables.params), key, variables.stats[0])

    def init(key: jax.Array) -> Variables:
        variables = algorithm.init(key)
        return variables._replace(stats=(jnp.asarray(std, jnp.float32), variables.stats))

    def initial_core(num_envs: int) -> PyTree:
        noise = jnp.zeros((num_envs, 2), jnp.uint32)  # a key's data; zeros: none has been drawn
        return {"env": jnp.arange(num_envs, dtype=jnp.int32), "noise": noise}, algorithm.initial_core(num_envs)

    def behaviour(variables: Variables, core: PyTree, context: Context) -> tuple[PyTree, PyTree]:
        own, rest = core
        fresh = jax.random.key_data(rng.per_index(context.keys, own["env"]))
        drawn = jnp.any(own["noise"] != 0, axis=1, keepdims=True)
        noise = jnp.where(drawn, own["noise"], fresh)
        return jax.vmap(lambda row: perturbed(variables, row))(noise), (own | {"noise": noise}, rest)

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        action, rest, extras = algorithm.policy(inner(variables), obs, core[1], context)
        return action, (core[0], rest), extras

    def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        return core[0], algorithm.feedback(core[1], action, step)

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return algorithm.postprocess(inner(variables), strip(rollout), context)

    def loss(variables: Variables, batch: PyTree, context: Context) -> tuple[jax.Array, jax.Array, Aux]:
        losses, mask, aux = algorithm.loss(inner(variables), batch, context)
        metrics = {**aux.metrics, "noise/std": jnp.full_like(losses, variables.stats[0])}
        return losses, mask, aux._replace(metrics=metrics)

    def observe(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        std, _ = variables.stats
        plain = acting(variables.params)

        def apart(env: tuple[jax.Array, PyTree]) -> jax.Array:
            noise, obs = env
            batch = jax.tree.map(lambda x: x[None], obs)
            return distance(plain, perturbed(variables, noise), batch)[0]

        rows = rollout.core[0]["noise"], jax.tree.map(lambda x: x[0], rollout.obs)
        at_once = min(perturbation.copies_at_once(plain), len(rows[0]))
        mean = mesh.global_mean(jax.lax.map(apart, rows, batch_size=at_once), rollout.valid[0])
        std = jnp.where(mean > limit(context.env_step), std / ADAPTATION, std * ADAPTATION)
        return std, algorithm.observe(inner(variables), strip(rollout), context)

    return dataclasses.replace(
        algorithm,
        init=init,
        policy=policy,
        postprocess=postprocess,
        loss=loss,
        observe=observe,
        initial_core=initial_core,
        feedback=feedback,
        behaviour=behaviour,
    )
