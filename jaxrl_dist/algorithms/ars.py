"""Augmented random search: Mania et al. (2018), https://arxiv.org/abs/1803.07055."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxrl_dist.algorithms.es import ES
from jaxrl_dist.config.values import setting
from jaxrl_dist.lazy import jax, jnp


@dataclasses.dataclass(frozen=True)
class ARS(ES, hidden_sizes=(), learning_rate=0.02, noise_std=0.03, weight_decay=0.0):
    """Augmented random search (Mania et al. 2018):
    a linear policy that follows the best directions.
    """

    presets = "ars"
    own_optimizer: ClassVar[str] = "sgd"

    top_fraction: float = setting(0.5, above=0, high=1)
    """Fraction of the directions that an update uses,
    those with the largest returns (b / N in algorithm 2)."""

    def weigh(self, fitness: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As ``ES.weigh``: the difference of a pair's returns
        over the standard deviation of those that count.

        Algorithm 2, lines 6 and 7: the directions with the largest returns of either sign count.
        """
        pairs = fitness.reshape(-1, 2)
        best = pairs.max(axis=1)
        rank = jnp.argsort(jnp.argsort(-best))  # stable: the first of equals wins
        used = jnp.repeat(rank < jnp.ceil(self.top_fraction * len(pairs)), 2)
        count = jnp.sum(used, dtype=jnp.float32)
        mean = jnp.sum(jnp.where(used, fitness, 0.0)) / count
        std = jnp.sqrt(jnp.sum(jnp.where(used, jnp.square(fitness - mean), 0.0)) / count)
        difference = (pairs - pairs[:, ::-1]).reshape(-1)
        return difference / jnp.maximum(std, 1e-8), used
