"""Environments of random numbers: any spaces, rewards by action, short episodes,
and both kinds of ends.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.envs.base import DeviceEnv
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Part, Space, leaves, num_choices
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep

END_CHANCE = 0.1
"""Chance of each kind of end, in each step."""
NOISE = 0.1
"""Standard deviation of rewards, around the size of the action."""
FAR = 1e6
"""A bound as large as this counts as none: observations lie within ``WIDTH`` of the other bound,
or of 0."""
WIDTH = 3.0


def made_up(spec: EnvSpec) -> DeviceEnv:
    """Returns environments with the spaces of ``spec``,
    whose agents begin and end their episodes together.

    The larger an action is, the larger the reward, from -1 to 1; nothing else depends on it.
    """

    def reset(keys: jax.Array) -> tuple[PyTree, PyTree]:
        return jnp.zeros(len(keys), bool), _observation(spec, keys)

    def step(
        ended: PyTree, action: PyTree, keys: jax.Array
    ) -> tuple[PyTree, Timestep, EpisodeStats]:
        noise, chance = jax.vmap(
            lambda key: jax.random.normal(jax.random.fold_in(key, len(keys)), (2,))
        )(keys).T
        chance = jnp.repeat(jax.scipy.stats.norm.cdf(chance[:: spec.num_agents]), spec.num_agents)
        valid = ~ended
        terminated = valid & (chance < END_CHANCE)
        truncated = valid & (chance > 1 - END_CHANCE)
        reward = jnp.where(valid, _pay(spec.action, action) + NOISE * noise, 0.0)
        timestep = Timestep(_observation(spec, keys), reward, terminated, truncated, valid)
        ended = terminated | truncated
        zero = jnp.zeros(len(keys))
        return ended, timestep, EpisodeStats(ended.astype(jnp.float32), zero, zero, zero, zero)

    return DeviceEnv(spec, reset, step)


def _observation(spec: EnvSpec, keys: jax.Array) -> PyTree:
    """Draws observations ``[B, ...]``, whose action masks allow all actions."""

    def of_part(number: int, part: Part) -> jax.Array:
        return jax.vmap(lambda key: _drawn(jax.random.fold_in(key, number), part))(keys)

    parts, tree = jax.tree.flatten(spec.observation)
    obs = jax.tree.unflatten(tree, [of_part(number, part) for number, part in enumerate(parts)])
    if spec.mask is None:
        return obs
    return {**obs, spec.mask: jnp.ones_like(obs[spec.mask])}


def _drawn(key: jax.Array, part: Part) -> jax.Array:
    """Returns a random value of a space."""
    if isinstance(part, Discrete | MultiDiscrete):
        n = np.asarray(part.n if isinstance(part, Discrete) else part.nvec)
        return jax.random.randint(key, part.shape, 0, n)
    low, high = _bounds(part)
    width = (high - low).astype(np.float32)
    number = jax.random.uniform(key, part.shape) * width + low.astype(np.float32)
    if not np.issubdtype(part.dtype, np.floating):
        number = jnp.round(number)
    return number.astype(part.dtype)


def _bounds(part: Box) -> tuple[np.ndarray, np.ndarray]:
    """Returns bounds that are finite and not far from each other."""
    low = np.asarray(part.low, np.float64)
    high = np.asarray(part.high, np.float64)
    has_low = np.abs(low) < FAR
    has_high = np.abs(high) < FAR
    low = np.where(has_low, low, np.where(has_high, high - 2 * WIDTH, -WIDTH))
    return low, np.where(has_high, high, low + 2 * WIDTH)


def _pay(space: Space, action: PyTree) -> jax.Array:
    """Returns how large actions ``[B, ...]`` are, from -1 to 1: the mean over their components."""

    def share(part: Part, x: jax.Array) -> jax.Array:
        if isinstance(part, Box):
            low, high = _bounds(part)
        else:
            low = np.zeros(())
            high = np.reshape(num_choices(part), part.shape) - 1
        width = np.maximum(np.subtract(high, low), 1e-6).astype(np.float32)
        return jnp.clip((x.astype(np.float32) - np.float32(low)) / width, 0.0, 1.0).reshape(-1)

    def of_row(action: PyTree) -> jax.Array:
        pairs = zip(leaves(space).values(), leaves(action).values(), strict=True)
        return 2 * jnp.concatenate([share(part, x) for part, x in pairs]).mean() - 1

    return jax.vmap(of_row)(action)
