"""Selection among the members of a population: which ones continue, with whose parameters and which
hyperparameters.

Both methods are functions of one type, ``Evolve``. A plan calls them between two dispatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_dist.config.values import check_hyperparameters, varied
from jaxrl_dist.errors import ConfigError

Hyper = Mapping[str, np.ndarray]
"""Each varied hyperparameter of the members, ``[M]`` float64."""
Evolve = Callable[[np.random.Generator, np.ndarray, Hyper], tuple[np.ndarray, Hyper]]
"""``(rng, scores [M], hyper) -> (source [M'], hyper [M'])``: the members that go on, ``M' <= M``,
copy the parameters of the member ``source`` and train with the new hyperparameters. A score of
-infinity: no episode has ended yet."""

FRACTION = 0.2
"""Share of the members that truncation selection replaces (Jaderberg et al. 2017, section
4.1.1)."""
FACTORS = (0.8, 1.25)
"""Factors of a perturbation: one step down and one up
undo each other (Jaderberg et al. 2017 use 0.8 and 1.2)."""


def pbt(rng: np.random.Generator, scores: np.ndarray, hyper: Hyper) -> tuple[np.ndarray, Hyper]:
    """Population-based training (Jaderberg et al. 2017, https://arxiv.org/abs/1711.09846):
    truncation and perturbation.

    Each of the worst fifth, but at least one member, copies a random member of the best fifth, and
    perturbs each of its hyperparameters. A member is not replaced by one with an equal score.
    """
    order = np.argsort(scores, kind="stable")
    count = max(1, int(FRACTION * len(scores)))
    source = np.arange(len(scores))
    for loser in order[:count]:
        winner = rng.choice(order[-count:])
        if scores[winner] > scores[loser]:
            source[loser] = winner
    copied = source != np.arange(len(scores))
    return source, {
        name: np.where(copied, perturbed(rng, x[source]), x) for name, x in hyper.items()
    }


def perturbed(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """Multiplies each value by a random factor of ``FACTORS``.

    Between 0.5 and 1 it multiplies the distance from 1: for a discount of 0.99,
    the horizon is what counts.
    """
    factors = rng.choice(FACTORS, values.shape)
    near_one = (values > 0.5) & (values < 1.0)
    return np.where(near_one, 1.0 - (1.0 - values) * factors, values * factors)


def halving(rng: np.random.Generator, scores: np.ndarray, hyper: Hyper) -> tuple[np.ndarray, Hyper]:
    """Successive halving (Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943):
    the better half continues.

    With an odd number, the middle member also continues; members keep their order.
    """
    del rng
    best = np.argsort(-scores, kind="stable")[: math.ceil(len(scores) / 2)]
    source = np.sort(best)
    return source, {name: x[source] for name, x in hyper.items()}


class Selection(NamedTuple):
    """When and how the members of a population are selected."""

    evolve: Evolve
    seed: int
    interval: int
    """Iterations before the first selection, and for ``pbt`` between selections."""
    doubles: bool = False
    """Whether each interval ends at twice the iterations of the last one, as in halving:
    each rung costs the same."""

    def due(self, before: int, now: int) -> bool:
        """Returns whether to select after ``now`` iterations; the last report was at ``before``.

        It is due with the first report after the end of an interval: a resume may have moved the
        reports away from it.
        """
        passed = before // self.interval
        count = now // self.interval
        if self.doubles and count:
            last = 1 << count.bit_length() - 1
        else:
            last = count
        return last > passed

    @staticmethod
    def checked(
        config: Any, values: Mapping[str, float], parents: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Returns hyperparameters, with the parent's value in place of each invalid one."""
        checked = dict(parents)
        for name, value in values.items():
            try:
                check_hyperparameters(varied(config.algorithm, {**checked, name: value}))
            except ConfigError:
                continue
            checked[name] = value
        return checked

    def rng(self, iteration: int) -> np.random.Generator:
        """Returns the random numbers of the selection after this many iterations."""
        return np.random.default_rng((self.seed, iteration))
