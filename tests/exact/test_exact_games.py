"""Best responses and exploitability, against counterfactual regret minimisation and known
values.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jaxrl_dist import exact
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact.games import Game
from jaxrl_dist.exact.table import Table

BET, CHECK = 0, 1


def kuhn() -> tuple[Table, list[tuple[int, int, str]]]:
    """Kuhn poker; action 0 bets or calls. A state is both cards and the moves,
    and an observation hides one card.
    """
    states = [
        (a, b, moves)
        for moves in ("", "c", "b", "cb")
        for a in range(3)
        for b in range(3)
        if a != b
    ]
    number = {state: i for i, state in enumerate(states)}
    following, reward, going = np.zeros((24, 2, 1), int), np.zeros((24, 2)), np.zeros((24, 2, 1))
    obs = np.zeros((24, 2), np.int32)
    for i, (a, b, moves) in enumerate(states):
        own, other = (a, b) if len(moves) % 2 == 0 else (b, a)
        obs[i] = own, ["", "c", "b", "cb"].index(moves)
        won = 1 if own > other else -1
        for action, letter in enumerate("bc"):
            if (a, b, moves + letter) in number:
                following[i, action], going[i, action] = number[a, b, moves + letter], -1
            else:  # a call, a fold, or two checks
                reward[i, action] = 2 * won if action == BET else -1 if "b" in moves else won
    start = np.where(np.arange(24) < 6, 1 / 6, 0.0)
    return Table.of_arrays(
        np.ones((24, 2, 1)), reward, next=following, going=going, start=start, obs=obs
    ), states


def cfr(states: list[tuple[int, int, str]], iterations: int) -> np.ndarray:
    """Counterfactual regret minimisation (Zinkevich et al. 2007) from the rules:
    the average policy ``[S, 2]``.
    """
    regret: dict[Any, np.ndarray] = {}
    total: dict[Any, np.ndarray] = {}

    def policy(key: Any) -> np.ndarray:
        positive = np.maximum(regret.setdefault(key, np.zeros(2)), 0)
        return positive / positive.sum() if positive.sum() > 0 else np.full(2, 0.5)

    def walk(cards: tuple[int, int], moves: str, reach: tuple[float, float]) -> float:
        """The value for who moves."""
        me = len(moves) % 2
        if moves in ("cc", "bb", "cbb"):
            return (2 if "b" in moves else 1) * (1 if cards[me] > cards[1 - me] else -1)
        if moves in ("bc", "cbc"):
            return 1.0
        key, values = (cards[me], moves), np.zeros(2)
        chosen = policy(key)
        for action, letter in enumerate("bc"):
            scaled = (
                (reach[0] * chosen[action], reach[1])
                if me == 0
                else (reach[0], reach[1] * chosen[action])
            )
            values[action] = -walk(cards, moves + letter, scaled)
        regret[key] += reach[1 - me] * (values - chosen @ values)
        total[key] = total.get(key, np.zeros(2)) + reach[me] * chosen
        return float(chosen @ values)

    for _ in range(iterations):
        for a, b, moves in states[:6]:
            walk((a, b), moves, (1.0, 1.0))
    keys = [((a, b)[len(moves) % 2], moves) for a, b, moves in states]
    return np.array([total[key] / total[key].sum() for key in keys])


def test_exploitability_of_kuhn_poker_is_known() -> None:
    table, states = kuhn()
    game = Game(table)
    # OpenSpiel: NashConv 0.9167
    assert game.exploitability(np.full((24, 2), 0.5)) == pytest.approx(11 / 24)
    answers = [game.best_response(np.full((1, 24, 2), 0.5), seat) for seat in (0, 1)]
    assert answers == pytest.approx([0.5, 5 / 12])
    curve = [game.exploitability(cfr(states, iterations)) for iterations in (10, 100, 500)]
    assert curve[0] > curve[1] > curve[2] and curve[2] < 0.02
    # an equilibrium, by card and moves
    bets = np.array([[1 / 3, 1 / 3, 0, 0], [0, 0, 1 / 3, 2 / 3], [1, 1, 1, 1]])
    policy = np.stack([bets[tuple(table.obs.T)], 1 - bets[tuple(table.obs.T)]], axis=1)
    assert game.exploitability(policy) == pytest.approx(0, abs=1e-12)
    assert game.best_response(policy[None], 0) == pytest.approx(-1 / 18)  # the value of the game


def best_answer(table: Table, policy: np.ndarray, responder: int) -> float:
    """The best of all answers, tried one by one: an action for all that its player knows."""
    known: dict[Any, np.ndarray] = {}

    def walk(
        choice: dict[Any, int], state: int, mover: int, memory: tuple[Any, Any], depth: int
    ) -> float:
        key = memory[mover], int(table.obs[state]), depth
        if mover == responder:
            known[key] = np.flatnonzero(table.legal[state])
        mine = mover == responder
        actions = (
            [(choice[key], 1.0)]
            if mine and choice
            else list(enumerate(np.ones(2) if mine else policy[state]))
        )
        total = 0.0
        for action, chance in actions:
            value = table.reward[state, action] * (1 if mine else -1)
            if going := table.going[state, action, 0]:
                kept = [*memory]
                kept[mover] = (*memory[mover], (key[1], depth, action))
                other = mover if going > 0 else 1 - mover
                value += walk(
                    choice, table.next[state, action, 0], other, (kept[0], kept[1]), depth + 1
                )
            total += chance * value
        return total

    def mean(choice: dict[Any, int]) -> float:
        return sum(
            table.start[state] * walk(choice, state, 0, ((), ()), 0)
            for state in np.flatnonzero(table.start)
        )

    mean({})
    return max(
        mean(dict(zip(known, chosen, strict=True))) for chosen in itertools.product(*known.values())
    )


def test_answers_are_the_best_where_sides_do_not_alternate() -> None:
    """Games of three layers of states, where a side may move twice, and knows what it knew when."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        following, going = np.zeros((10, 2, 1), int), np.zeros((10, 2, 1))
        following[:2], following[2:6] = (
            rng.integers(2, 6, (2, 2, 1)),
            rng.integers(6, 10, (4, 2, 1)),
        )
        going[:6] = rng.choice([-1, 1], (6, 2, 1))
        going[0, 0] = -1
        table = Table.of_arrays(
            np.ones((10, 2, 1)),
            rng.integers(-3, 4, (10, 2)),
            next=following,
            going=going,
            start=np.repeat([0.5, 0.0], [2, 8]),
            obs=rng.integers(0, 2, 10),
        )
        policy, game = rng.dirichlet([1, 1], size=10), Game(table)
        for responder in (0, 1):
            found = game.best_response(policy[None], responder)
            assert found == pytest.approx(best_answer(table, policy, responder))


@pytest.mark.parametrize("going", [1.0, 0.9, 0.5])
def test_a_game_counts_by_the_chance_that_it_continues(going: float) -> None:
    """Matching pennies in turns: the second player does not see the first coin,
    and wins by the same one.
    """
    table = Table.of_arrays(
        np.ones((3, 2, 1)),
        np.array([[0.0, 0.0], [1.0, -1.0], [-1.0, 1.0]]),
        next=np.array([[[1], [2]], [[0], [0]], [[0], [0]]]),
        going=np.array([[[-going], [-going]], [[0], [0]], [[0], [0]]]),
        start=np.array([1.0, 0.0, 0.0]),
        obs=np.array([0, 1, 1]),
    )
    policy = np.array([[[0.8, 0.2], [0.5, 0.5], [0.5, 0.5]]])
    assert Game(table).best_response(policy, 1) == pytest.approx(0.6 * going)


def test_mixtures_play_whole_games() -> None:
    """Half always bet, half always check: later moves tell which one plays,
    as they do not of the mean policy.
    """
    table, _ = kuhn()
    pure = np.stack([np.eye(2)[[BET] * 24], np.eye(2)[[CHECK] * 24]])
    game = Game(table)
    mixed, mean = game.exploitability(pure), game.exploitability(pure.mean(axis=0))
    assert mixed != pytest.approx(mean) and game.exploitability(pure[:1]) == game.exploitability(
        pure[0]
    )
    # Against who always bets: call with a king,
    # and with a queen half of the time it is worth as much as folding.
    assert game.best_response(pure[:1], 1) == pytest.approx((2 + 0 - 1) / 3)


def test_hidden_cards_stay_hidden() -> None:
    table, _ = kuhn()
    seen = Game(table._replace(obs=np.arange(24)))  # a fault: the answer sees both cards
    assert seen.exploitability(np.full((24, 2), 0.5)) > 11 / 24 + 0.04
    one_sided = table._replace(going=np.abs(table.going))
    with pytest.raises(ConfigError, match="game of two players"):
        Game(one_sided)


@pytest.mark.case  # test_exploitability_of_kuhn_poker_is_known is of the same game
def test_poker_of_pgx_has_the_same_exploitability() -> None:
    pytest.importorskip("pgx")
    table = exact.table("pgx:kuhn_poker", {"opponents": "self"})
    assert table.shape == (36, 2) and "with equal chances" in table.sampled
    assert Game(table).exploitability(np.full(table.shape, 0.5)) == pytest.approx(11 / 24)
