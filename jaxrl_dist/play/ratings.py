"""How much better one player is than another: scores over pairs of games,
and Elo ratings of several players.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MEAN = 1500.0
"""Mean rating of the players: only differences between ratings mean something."""
Z95 = 1.959964
"""Quantile of the normal distribution for intervals of 95 %."""


def padded(scores: np.ndarray) -> np.ndarray:
    """Returns the scores of pairs ``[P]``, and of one more pair that is won and one that is lost,
    ``[P + 2]``.

    So an interval keeps a width if all pairs end alike. These are the two successes and two
    failures that Agresti and Coull (1998, "Approximate is better than 'exact' for interval
    estimation of binomial proportions") add.
    """
    return np.append(scores, (0.0, 1.0))


def interval(scores: np.ndarray) -> tuple[float, float]:
    """Returns the interval, 95 %, of the expected score of a pair,
    from the scores ``[P]`` of pairs, each 0 to 1.
    """
    values = padded(scores)
    half = Z95 * values.std(ddof=1) / np.sqrt(len(values))
    return max(0.0, float(values.mean() - half)), min(1.0, float(values.mean() + half))


def elo(
    games: np.ndarray, points: np.ndarray, variance: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ratings of maximum likelihood, with mean ``MEAN``,
    and their standard errors, both ``[n]``.

    The model is by Bradley and Terry (1952), on the scale of Elo (1978): a difference of ``D``
    points predicts the score ``1 / (1 + 10^(-D / 400))``. A draw is half a win. Every two players
    who have met get one more game, a draw, so ratings are finite even if one has won all games. The
    errors are by Huber (1967), "The behavior of maximum likelihood estimates under nonstandard
    conditions", so games may depend on each other.

    Args:
      games: number of games between every two players, ``[n, n]``, symmetric.
      points: points of the row's player against the column's, ``[n, n]``.
      variance: variance of the points, ``[n, n]``, symmetric, and zero on the diagonal.
    """
    met = games > 0
    games = games + met
    points = points + 0.5 * met
    strength = np.zeros(len(points))
    for _ in range(100):  # Newton's method; the likelihood is concave
        predicted = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
        gradient = (points - games * predicted).sum(-1)
        # Ones keep the mean of the strengths, which the games say nothing about, at zero.
        hessian = _laplacian(games * predicted * (1 - predicted)) + 1.0
        step = np.linalg.solve(hessian, gradient)
        strength = strength + np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-10:
            break
    inverse = np.linalg.inv(hessian)
    errors = np.sqrt(np.diag(inverse @ _laplacian(variance * met) @ inverse))
    scale = 400 / np.log(10)
    return MEAN + (strength - strength.mean()) * scale, errors * scale


def _laplacian(weight: np.ndarray) -> np.ndarray:
    """Returns the Laplacian matrix of a graph with symmetric weights, all ``[n, n]``."""
    return np.diag(weight.sum(-1)) - weight


def elo_table(
    count: int, scores: dict[tuple[int, int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ratings ``[n]`` of players who have all met,
    and their intervals of 95 %, ``[n, 2]``.

    The variance of a score is the variance between pairs of games, including the two of ``padded``.
    A player who has won nearly all games has a rating with hardly a bound away from ``MEAN``, where
    the likelihood is flat. Towards ``MEAN`` the rating has a bound: on that side, the error comes
    from ratings in which the two pairs of ``padded`` also count.

    Args:
      count: number of players.
      scores: by two players, the first player's scores ``[P]`` in pairs of games, each 0 to 1.
    """

    def fit(change: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        games, points, variance = np.zeros((3, count, count))
        for (first, second), pair_scores in scores.items():
            counted = change(pair_scores)
            spread = padded(pair_scores).var(ddof=1)
            games[first, second] = games[second, first] = 2 * len(counted)
            points[first, second] = 2 * counted.sum()
            points[second, first] = 2 * (1 - counted).sum()
            variance[first, second] = variance[second, first] = 4 * len(counted) * spread
        return elo(games, points, variance)

    ratings, outwards = fit(np.asarray)
    _, inwards = fit(padded)
    below, above = np.where(ratings >= MEAN, (inwards, outwards), (outwards, inwards))
    return ratings, np.stack([ratings - Z95 * below, ratings + Z95 * above], axis=1)
