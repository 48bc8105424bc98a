"""Importance sampling: what happened, weighed by how much more probable another policy would have
made it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.play.fitted import Values

LARGEST = 300.0
"""Largest logarithm of an episode's ratio, so that its square is finite."""


class Episodes:
    """The steps of whole episodes, ``N`` in all of ``E`` episodes, with importance ratios; float64.

    ``ratio`` is ``rho_t``, the product of ``target / behaviour`` over the steps of its episode up
    to this one.
    """

    def __init__(self, data: Dataset, discount: float, log_prob: np.ndarray | None) -> None:
        """``log_prob`` float32 ``[L]`` is the target's; None: it or the behaviour's is unknown."""
        self.rows = np.flatnonzero(data.valid)
        self.lengths = data.lengths
        self.size = len(self.lengths)
        self.discount = discount
        self._data = data
        self.first = np.concatenate([[0], data.ends[:-1] + 2])
        start = np.cumsum(self.lengths) - self.lengths
        self.episode = np.repeat(np.arange(self.size), self.lengths)
        self.number = np.arange(len(self.rows)) - start[self.episode]
        self.power = discount**self.number
        self.reward = data.reward[self.rows].astype(np.float64)
        if log_prob is not None:
            assert data.log_prob is not None
            log_ratio = log_prob[self.rows].astype(np.float64) - data.log_prob[self.rows]
            self.of_step = np.exp(np.minimum(log_ratio, LARGEST))
            zero = np.isneginf(log_ratio)
            total = np.cumsum(np.where(zero, 0.0, log_ratio))
            zeros = np.cumsum(zero)
            before = start[self.episode]
            total = total - np.where(before, total[before - 1], 0.0)
            self.ratio = np.where(
                zeros - np.where(before, zeros[before - 1], 0),
                0.0,
                np.exp(np.minimum(total, LARGEST)),
            )
            self.weight = self.ratio[start + self.lengths - 1]

    def estimate(self, name: str) -> tuple[float, np.ndarray]:
        """Returns an estimate, and each episode's influence ``[E]``: ``E`` times the derivative by
        its count.
        """
        if name == "pdwis":
            return self._per_decision_normalised()
        ratio = self.ratio if name == "pdis" else 1.0
        total = self._sums(self.power * ratio * self.reward)  # Precup et al. (2000), equation 5
        weight = self.weight if name in ("is", "wis") else np.ones(self.size)  # equation 3
        count = weight.sum() if name == "wis" else self.size  # equation 4
        value = float(quotient((weight * total).sum(), count))
        if name == "wis":
            return value, quotient(weight * (total - value), np.full(self.size, weight.mean()))
        return value, weight * total - value

    def _per_decision_normalised(self) -> tuple[float, np.ndarray]:
        """Divides the sum of each step's rewards by the sum of its ratios; an episode keeps its
        last ratio after its end.

        Source: Thomas (2015), "Safe Reinforcement Learning", section 3.9.
        """
        length = int(self.lengths.max())
        ended = np.cumsum(np.bincount(self.lengths, self.weight, length + 1))[:length]
        total = np.bincount(self.number, self.ratio * self.reward, length)
        weight = np.bincount(self.number, self.ratio, length) + ended
        reward = quotient(total, weight)
        factor = quotient(self.discount ** np.arange(length) * self.size, weight)
        # What the last ratio of an ended episode takes away.
        later = np.append(np.cumsum((factor * reward)[::-1])[::-1], 0.0)
        before = self._sums(factor[self.number] * self.ratio * (self.reward - reward[self.number]))
        value = np.sum(self.discount ** np.arange(length) * reward)
        return float(value), before - self.weight * later[self.lengths]

    def effective(self) -> float:
        """The effective number of episodes, ``(sum w)^2 / sum w^2`` (Kong 1992)."""
        return float(quotient(self.weight.sum() ** 2, np.square(self.weight).sum()))

    def doubly_robust(self, values: Values) -> np.ndarray:
        """``V(s_0) + sum_t discount^t rho_t (r_t + discount V(s_t+1) - Q(s_t, a_t))``, ``[M, E]``
        for each network; V is 0 after a termination.

        Source: Jiang and Li (2016), arXiv:1511.03722, equation 10, unrolled.
        """
        state, action = (x.astype(np.float64) for x in values)
        goes_on = self.discount * ~self._data.terminated[self.rows]
        error = self.reward + goes_on * state[:, self.rows + 1] - action[:, self.rows]
        return state[:, self.first] + np.stack(
            [self._sums(self.power * self.ratio * x) for x in error]
        )

    def _sums(self, x: np.ndarray) -> np.ndarray:
        return np.bincount(self.episode, x, self.size)


def quotient(total: Any, weight: Any) -> Any:
    """Returns the quotient, 0 where nothing has a weight."""
    return np.divide(
        total,
        weight,
        out=np.zeros_like(np.asarray(total, np.float64)),
        where=np.asarray(weight) != 0,
    )
