"""Running means and deviations over all devices."""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxrl_dist.lazy import jax, jnp, mesh

CLIP = 10.0
"""Normalised observations and scaled rewards are clipped to +- 10,
as in OpenAI baselines' ``VecNormalize``."""
EPSILON = 1e-8
HORIZON = 2**20
"""Batches that running statistics remember; older ones decay geometrically. Without this limit, a
float32 count would stop growing after 2^24 batches, and the variance would grow instead."""


class RunningStats(NamedTuple):
    """Count, mean and summed squared deviation of all values so far; float32."""

    count: jax.Array  # type: ignore[assignment]  # hides ``tuple.count``
    """[]."""
    mean: jax.Array
    """[...]."""
    deviation: jax.Array
    """[...]."""

    @staticmethod
    def zeros(shape: tuple[int, ...]) -> RunningStats:
        return RunningStats(jnp.zeros(()), jnp.zeros(shape), jnp.zeros(shape))

    def std(self) -> jax.Array:
        """Returns the standard deviation; 1 before the first value."""
        variance = self.deviation / jnp.maximum(self.count, 1.0)
        return jnp.where(self.count > 0, jnp.sqrt(variance + EPSILON), 1.0)

    def merge(self, x: jax.Array, mask: jax.Array) -> RunningStats:
        """Adds the rows of ``x [..., *shape]`` where ``mask`` holds, over all devices.

        The mask may lack the last axes of rows: an entry then holds for several rows.

        Parallel algorithm of Chan, Golub and LeVeque (1979), equations 2.1: the batch is centred on
        its own mean before squaring, so a large offset costs no precision.
        """
        axes = tuple(range(x.ndim - self.mean.ndim))
        rows_per_entry = math.prod(x.shape[mask.ndim : len(axes)])
        weight = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        x = x.astype(jnp.float32)
        # A first centring on the running mean keeps the sums small.
        centred = jnp.where(weight, x - jnp.broadcast_to(self.mean, x.shape), 0.0)
        count, total = mesh.global_sum(
            (rows_per_entry * jnp.sum(mask, dtype=jnp.float32), jnp.sum(centred, axes))
        )
        shift = total / jnp.maximum(count, 1.0)
        residual = jnp.where(weight, centred - jnp.broadcast_to(shift, x.shape), 0.0)
        deviation = mesh.global_sum(jnp.sum(jnp.square(residual), axes))
        before = jnp.where(count > 0, jnp.minimum(self.count, HORIZON * count), self.count)
        remembered = self.deviation * (before / jnp.maximum(self.count, 1.0))
        new_count = jnp.maximum(before + count, 1.0)
        return RunningStats(
            count=before + count,
            mean=self.mean + shift * count / new_count,
            deviation=remembered + deviation + jnp.square(shift) * before * count / new_count,
        )
