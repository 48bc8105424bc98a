"""What ``match`` prints."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jaxrl_dist.commands import match as command
from jaxrl_dist.commands.match import lines
from jaxrl_dist.play import ratings
from jaxrl_dist.play.games import Result
from jaxrl_dist.play.match import Match

pytestmark = pytest.mark.quick


def of_scores(players: tuple[str, ...], scores: dict[tuple[int, int], float]) -> Match:
    """A match of 200 games each, in which a player has won this share of them against another."""
    results, of_pairs = [], {}
    for (a, b), score in scores.items():
        won = (np.arange(200).reshape(100, 2) < 200 * score) * 1.0
        first, moves = (
            np.tile([True, False], (100, 1)),
            np.arange(400, dtype=np.int32).reshape(100, 2, 1, 2),
        )
        results.append(Result((players[a], players[b]), won, first, moves))
        of_pairs[a, b] = won.mean(axis=1)
    return Match(
        "pgx:connect_four", players, tuple(results), *ratings.elo_table(len(players), of_pairs)
    )


LONG = tuple(f"runs/pool_of_all_my_policies@{number}005219" for number in range(1, 5))


def test_several_players_have_one_table_and_a_line_for_every_two() -> None:
    pairs = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
    scores = dict(zip(pairs, (0.75, 0.9, 0.95, 1, 0.8, 0.9, 1, 0.6, 1, 0.995), strict=True))
    text = [*lines(of_scores((*LONG, "random"), scores))]
    assert max(map(len, text)) <= 100
    assert text[1].split() == [*"12345"]
    for number, name in enumerate((*LONG, "random")):
        cells = [
            "-" if a == number else f"{scores.get((number, a), 1 - scores.get((a, number), 0)):.3f}"
            for a in range(5)
        ]
        assert text[2 + number].split() == [str(number + 1), name, *cells]
    of_pairs = [line.split() for line in text if re.match(r"\d against \d", line)]
    assert [(int(words[0]) - 1, int(words[2]) - 1) for words in of_pairs] == pairs
    assert " ".join(of_pairs[0]) == "1 against 2 0.750 0.660 to 0.830 150 0 50 200"
    assert sum("won" in line for line in text) == 1, "no block for each pair"
    assert (
        len({len(line) for line in text if "200 games each" in line or " against " in line[:12]})
        == 1
    ), "in columns"
    assert [line.split()[:2] for line in text[-5:]] == [
        [str(number + 1), (*LONG, "random")[number]] for number in range(5)
    ]


def test_a_winner_who_may_be_none_is_not_left_alone() -> None:
    def unclear(players: tuple[str, ...], *scores: float) -> list[str]:
        pairs = [(a, b) for a in range(len(players)) for b in range(a + 1, len(players))]
        text = [*lines(of_scores(players, dict(zip(pairs, scores, strict=True))))]
        return [line for line in text if "do not differ clearly" in line]

    assert not unclear(("a", "b"), 0.8) and not unclear(("a", "b", "c"), 0.2, 0.9, 0.95)
    (line,) = unclear(("a", "b"), 0.48)
    assert line.startswith(
        "b and a do not differ clearly: their Elo intervals overlap, and b scored 0.520 (0.4"
    )
    assert line.endswith("in their own games, not clearly above 0.5")
    # a loses to b, and beats the others
    (line,) = unclear(("a", "b", "c", "d"), 0.4, 0.995, 0.995, 0.55, 0.55, 0.5)
    assert line.startswith("a and b do not differ clearly: a scored 0.400 (") and line.endswith(
        "games, below 0.5"
    )


@pytest.mark.parametrize(
    "first, score, told",
    [
        (
            True,
            1.0,
            "the first game of a (moving first) and b (moving second); a won after 3 steps",
        ),
        (
            False,
            0.0,
            "the first game of a (moving second) and b (moving first); b won after 3 steps",
        ),
        (
            True,
            0.5,
            "the first game of a (moving first) and b (moving second); it was drawn after 3 steps",
        ),
    ],
)
def test_the_console_says_who_plays_which_side_of_a_film(
    first: bool, score: float, told: str
) -> None:
    moves = np.array(
        [[[[1, 0], [0, 2], [3, 0], [-1, -1]], [[1, 0], [0, 2], [3, 0], [0, 4]]]], np.int32
    )
    result = Result(("a", "b"), np.array([[score, 1.0]]), np.array([[first, not first]]), moves)
    assert command._filmed("game.gif", result) == f"wrote game.gif: {told}"
