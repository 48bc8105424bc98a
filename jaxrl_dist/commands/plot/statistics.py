"""Statistics over seeds and environments, after Agarwal et al. (2021),
https://arxiv.org/abs/2108.13264.

A sample is a list of strata, one for each environment: ``[N]`` float64 scores of N runs. Intervals
are percentiles of the stratified bootstrap over runs (section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
"""Confidence level of intervals."""
BAND = 1_000
NUMBER = 50_000
CHUNK = 1_000
"""Bootstrap resamples of an interval that is drawn, of one that is printed,
and of those that are computed at once."""
Strata: TypeAlias = Sequence[np.ndarray]


def mean(strata: Strata) -> np.ndarray:
    """Returns the mean over all runs ``[..., N]`` of all environments, as ``[...]``."""
    return np.concatenate(strata, axis=-1).mean(axis=-1)


def iqm(strata: Strata) -> np.ndarray:
    """Returns the interquartile mean over all runs ``[..., N]`` of all environments,
    as ``[...]`` (section 4.3).
    """
    return stats.trim_mean(np.concatenate(strata, axis=-1), 0.25, axis=-1)


def profile(taus: np.ndarray) -> Callable[[Strata], np.ndarray]:
    """Returns the performance profile: the fraction of runs
    that score above each of ``taus [T]`` (section 4.2).

    It maps strata ``[..., N]`` to ``[..., T]``, the mean over environments of their fractions.
    """
    return lambda strata: np.mean([(x[..., None] > taus).mean(axis=-2) for x in strata], axis=0)


def improvement(strata: Strata) -> np.ndarray:
    """Returns the probability that a run of the first half of
    the strata scores higher than one of the second half.

    Both halves are strata ``[..., N]`` of the same environments, over which it is averaged; a tie
    counts one half (section 4.3: the Mann-Whitney U statistic).
    """
    pairs = zip(strata[: len(strata) // 2], strata[len(strata) // 2 :], strict=True)
    wins = [np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) for x, y in pairs]
    return (1.0 + np.mean(wins, axis=0)) / 2.0


def interval(
    strata: Strata, statistic: Callable[[Strata], np.ndarray], resamples: int = BAND
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bootstrap interval ``(low, high)`` of a statistic; the same numbers each time.

    All resamples count, each once, where they are no more than ``resamples``: the interval is
    exact. Of one stratum of N runs there are ``N ** N``, of several the product.

    Args:
      strata: ``[..., N]`` for each environment; runs are drawn along the last axis.
      statistic: maps strata ``[R, ..., N]`` to ``[R, ...]``.
      resamples: how many to draw at random.
    """
    rng = np.random.default_rng(0)
    sizes = [x.shape[-1] for x in strata]
    if (every := math.prod(size**size for size in sizes)) <= resamples:
        resamples = every
        places = np.unravel_index(np.arange(every), [size**size for size in sizes])
        rows = [
            np.indices((size,) * size).reshape(size, -1).T[place]
            for size, place in zip(sizes, places, strict=True)
        ]
    else:
        rows = [rng.integers(size, size=(resamples, size)) for size in sizes]

    def of(chunk: slice) -> np.ndarray:
        return statistic(
            [
                np.moveaxis(x[..., drawn[chunk]], -2, 0)
                for x, drawn in zip(strata, rows, strict=True)
            ]
        )

    values = np.concatenate(
        [of(slice(first, first + CHUNK)) for first in range(0, resamples, CHUNK)]
    )
    tails = 0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2
    # few runs have few values
    low, high = np.quantile(values, tails, axis=0, method="inverted_cdf")
    return low, high
