"""Exploration noise for greedy policies."""

from __future__ import annotations

from jaxrl_dist.lazy import jax, jnp


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
