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
"""Bootstrap resamples of an interval that is drawn."""
NUMBER = 50_000
"""Bootstrap resamples of an interval that is printed."""
CHUNK = 1_000
"""Bootstrap resamples that are computed together."""
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
    return lambda strata: np.mean(
        [(scores[..., None] > taus).mean(axis=-2) for scores in strata], axis=0
    )


def improvement(strata: Strata) -> np.ndarray:
    """Returns the probability that a run of the first half of
    the strata scores higher than one of the second half.

    Both halves are strata ``[..., N]`` of the same environments, over which it is averaged; a tie
    counts one half (section 4.3: the Mann-Whitney U statistic).
    """
    pairs = zip(strata[: len(strata) // 2], strata[len(strata) // 2 :], strict=True)
    wins = [
        np.sign(first[..., :, None] - second[..., None, :]).mean(axis=(-2, -1))
        for first, second in pairs
    ]
    return (1.0 + np.mean(wins, axis=0)) / 2.0


def interval(
    strata: Strata, statistic: Callable[[Strata], np.ndarray], resamples: int = BAND
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bootstrap interval ``(low, high)`` of a statistic; the same numbers each time.

    If there are no more than ``resamples``, each possible resample counts once: the interval is
    exact. One stratum of N runs has ``N ** N`` of them, several strata have the product.

    Args:
      strata: ``[..., N]`` for each environment; runs are drawn along the last axis.
      statistic: maps strata ``[R, ..., N]`` to ``[R, ...]``.
      resamples: how many to draw at random.
    """
    rng = np.random.default_rng(0)
    sizes = [scores.shape[-1] for scores in strata]
    possible = [size**size for size in sizes]
    if math.prod(possible) <= resamples:
        resamples = math.prod(possible)
        places = np.unravel_index(np.arange(resamples), possible)
        rows = [
            np.indices((size,) * size).reshape(size, -1).T[place]
            for size, place in zip(sizes, places, strict=True)
        ]
    else:
        rows = [rng.integers(size, size=(resamples, size)) for size in sizes]

    values = []
    for start in range(0, resamples, CHUNK):
        resampled = [
            np.moveaxis(scores[..., drawn[start : start + CHUNK]], -2, 0)
            for scores, drawn in zip(strata, rows, strict=True)
        ]
        values.append(statistic(resampled))
    tails = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)
    # few runs have few values
    low, high = np.quantile(np.concatenate(values), tails, axis=0, method="inverted_cdf")
    return low, high
