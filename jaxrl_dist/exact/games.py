"""Games of two players, zero sum: best responses over histories, and exploitability.

A player knows what it has seen and done itself, and how many moves both have made. Hidden cards
stay hidden. Source: Zinkevich et al. (2007), https://papers.nips.cc/paper/3306; Lanctot et al.
(2017), https://arxiv.org/abs/1711.00832.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact.table import Table, as_bytes

MAX_HISTORIES = 3_000_000


class _Level(NamedTuple):
    """The histories of one length, ``n``; one leads to another by an action and an outcome."""

    state: np.ndarray
    """[n]."""
    mover: np.ndarray
    """[n] 0 for the player who has moved first."""
    chance: np.ndarray
    """[n] probability of what chance has done."""
    known: np.ndarray
    """[n] number of what the mover has seen and done."""
    parent: np.ndarray
    """[n] place of the history before, in its level."""
    action: np.ndarray
    """[n] the action that has led here."""


class Game:
    """The histories of a game, whose table is of the side to move (``opponents=self``)."""

    def __init__(self, table: Table) -> None:
        """Lists all histories.

        Raises:
          ConfigError: it is not a game of two sides, or has too many histories.
        """
        if not (table.going < 0).any() or table.obs is None:
            raise ConfigError("exploitability needs a game of two players who take turns")
        self.table = table
        seen = _numbered(as_bytes(jax.tree.leaves(table.obs)))
        self.levels: list[_Level] = []
        state = np.flatnonzero(table.start)
        chance = table.start[state]
        memory = np.zeros((2, len(state)), np.int64)
        mover = parent = action = np.zeros(len(state), np.int64)
        while len(state):
            known = _numbered(memory[mover, np.arange(len(state))] * len(seen) + seen[state])
            self.levels.append(_Level(state, mover, chance, known, parent, action))
            if sum(len(level.state) for level in self.levels) > MAX_HISTORIES:
                raise ConfigError(
                    f"the game has more than {MAX_HISTORIES:,} histories; smaller ones have an exact answer"
                )
            live = (table.probability[state] > 0) & (table.going[state] != 0)
            parent, action, outcome = np.nonzero(live)
            memory = memory[:, parent]
            # unlike those of before
            fresh = memory.max(initial=0) + 1 + known[parent] * table.shape[1] + action
            memory[mover[parent], np.arange(len(parent))] = fresh
            memory = np.stack([_numbered(row) for row in memory])
            going = table.going[state[parent], action, outcome]
            chance = (
                chance[parent] * table.probability[state[parent], action, outcome] * np.abs(going)
            )
            turns = going < 0
            mover = np.where(turns, 1 - mover[parent], mover[parent])
            state = table.next[state[parent], action, outcome]

    def best_response(self, policies: np.ndarray, responder: int) -> float:
        """Returns the mean payoff of the best answer to a mixture of policies,
        one of which plays each whole game.

        Args:
          policies: probabilities ``[M, S, A]``; each policy is equally likely.
          responder: 0: the answer moves first; 1: it moves second.
        """
        table = self.table
        reach = np.zeros(0)
        reaches = list[np.ndarray]()
        for depth, level in enumerate(self.levels):
            if depth == 0:
                reach = np.full((len(policies), len(level.state)), 1 / len(policies))
            else:
                above = self.levels[depth - 1]
                taken = policies[:, above.state[level.parent], level.action]
                reach = reach[:, level.parent] * np.where(
                    above.mover[level.parent] == responder, 1.0, taken
                )
            reaches.append(reach)
        # of the histories of the level below, weighted by the probability of getting there
        value = np.zeros(0)
        for depth in reversed(range(len(self.levels))):
            level = self.levels[depth]
            reach = reaches[depth]
            mine = level.mover == responder
            gain = np.zeros((len(level.state), table.shape[1]))
            if depth + 1 < len(self.levels):
                below = self.levels[depth + 1]
                np.add.at(gain, (below.parent, below.action), value)
            paid = table.reward[level.state] * level.chance[:, None]
            theirs = np.einsum("mn,mna->na", reach, policies[:, level.state])
            gain += np.where(mine[:, None], reach.sum(axis=0)[:, None] * paid, -theirs * paid)
            value = gain.sum(axis=1)
            best = np.zeros((level.known.max() + 1, table.shape[1]))
            np.add.at(best, level.known[mine], gain[mine])
            legal = table.legal[level.state]
            allowed = np.zeros(best.shape, bool)
            allowed[level.known[mine]] = legal[mine]
            choice = np.argmax(np.where(allowed, best, -np.inf), axis=1)
            value[mine] = gain[mine, choice[level.known[mine]]]
        return float(value.sum())

    def exploitability(self, policies: np.ndarray) -> float:
        """Returns half of NashConv: what best answers win in the mean over both seats;
        0 in an equilibrium.

        Args:
          policies: ``[S, A]``, or ``[M, S, A]`` for a mixture.
        """
        policies = policies.reshape(-1, *self.table.shape)
        return 0.5 * sum(self.best_response(policies, responder) for responder in (0, 1))


def _numbered(rows: np.ndarray) -> np.ndarray:
    """Returns a number for each of ``rows [N]``, equal for equal ones, ``[N]``."""
    return np.unique(rows, return_inverse=True)[1].reshape(-1)
