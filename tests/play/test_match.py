"""Games between policies, and ratings from them."""

from __future__ import annotations

import functools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import scipy.optimize
from PIL import Image, ImageSequence

import jaxrl_dist
from jaxrl_dist import Train, cli, load_policy
from jaxrl_dist.algorithms.muzero import MuZero
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.envs.drawing import draw
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.play import entrants, ratings
from jaxrl_dist.play import match as matches
from jaxrl_dist.play.games import Player, Result
from jaxrl_dist.play.match import Match, match
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.settings.policies import Policies
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.still import Copy

LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
GAME = "pgx:tic_tac_toe"

Stones = frozenset[int]


def in_a_row(stones: Stones) -> bool:
    return any(stones.issuperset(line) for line in LINES)


def lowest(variables: Any, obs: Any, legal: jax.Array, state: Any, keys: jax.Array) -> Any:
    """Takes the lowest free field, and counts its steps."""
    return jnp.argmax(legal, axis=1), state + 1


LOWEST = Player("lowest", lowest, (), lambda num_games: jnp.zeros(num_games, jnp.int32))


@functools.cache
def expected(own: Stones, other: Stones, moving: bool) -> float:
    """The mean score of random moves against the lowest field in tic-tac-toe, by enumeration."""
    free = [field for field in range(9) if field not in own | other]
    if in_a_row(own) or in_a_row(other) or not free:
        return 0.5 * (1 + in_a_row(own) - in_a_row(other))
    if not moving:
        return expected(own, other | {free[0]}, True)
    return float(np.mean([expected(own | {field}, other, False) for field in free]))


def replayed(result: Result, pair: int, game: int) -> tuple[list[int], float]:
    """Plays a game's moves by the rules: the fields in turn, and the score of the first player."""
    # the first player has the seat of the game's number
    seat = game if result.first[pair, game] else 1 - game
    stones: list[Stones] = [frozenset(), frozenset()]
    fields = []
    for actions in result.moves[pair, game]:
        if in_a_row(stones[0]) or in_a_row(stones[1]) or len(fields) == 9:
            assert (actions == -1).all()
            continue
        field = int(actions[seat])
        assert field not in stones[0] | stones[1] and actions[1 - seat] == 0
        fields.append(field)
        stones[seat] |= {field}
        seat = 1 - seat
    return fields, 0.5 * (1 + in_a_row(stones[game]) - in_a_row(stones[1 - game]))


def test_scores_are_what_the_rules_give() -> None:
    pytest.importorskip("pgx")
    (result,) = match("random", LOWEST, env=GAME, games=400, opening_moves=0, seed=1).results
    games = {(pair, game): replayed(result, pair, game) for pair in range(200) for game in (0, 1)}
    assert all(result.scores[where] == score for where, (_, score) in games.items())
    assert result.distinct == len({tuple(fields) for fields, _ in games.values()}) > 100
    assert (result.first.sum(axis=1) == 1).all(), "each player begins one game of a pair"
    none: Stones = frozenset()
    for side in (0, 1):
        scores, mean = result.scores[result.first == (side == 0)], expected(none, none, side == 0)
        assert result.counts(side) == tuple(int((scores == score).sum()) for score in (1, 0.5, 0))
        assert abs(scores.mean() - mean) < 4 * scores.std() / np.sqrt(200)
    low, high = result.interval
    assert low < (expected(none, none, True) + expected(none, none, False)) / 2 < high


def untrained(seed: int, env: str = GAME, **fields: Any) -> Policy:
    """A policy with initial parameters."""
    config, source = resolved(Train(PPO(hidden_sizes=(8,)), env=env, **fields))
    policy = Policy(config, source, ())
    policy.variables = jax.jit(policy.algorithm.init)(jax.random.key(seed))
    return policy


def test_policies_take_their_best_moves() -> None:
    """Both games of a pair have the same opening;
    then each move is the one that the policy chooses on the host.
    """
    pytest.importorskip("pgx")
    players = [untrained(seed) for seed in (0, 1)]
    played = match(*players, games=12, opening_moves=2, seed=3)
    (result,) = played.results
    openings = set()
    for pair in range(6):
        (first, _), (second, _) = (replayed(result, pair, game) for game in (0, 1))
        assert first[:2] == second[:2]
        openings.add(tuple(first[:2]))
        for game, fields in enumerate((first, second)):
            for turn, field in list(enumerate(fields))[2:]:
                board = np.zeros((1, 9, 2), bool)
                board[0, fields[:turn][turn % 2 :: 2], 0] = board[
                    0, fields[:turn][1 - turn % 2 :: 2], 1
                ] = True
                obs = {"observation": board.reshape(1, 3, 3, 2), "mask": ~board.any(axis=2)}
                policy = players[0 if (turn % 2 == 0) == result.first[pair, game] else 1]
                assert policy(obs)[0][0] == field
    assert len(openings) > 3
    swapped = match(*players[::-1], games=12, opening_moves=2, seed=3).results[0]
    np.testing.assert_array_equal(swapped.scores, 1 - result.scores[:, ::-1])


def test_games_on_the_host_are_played_as_on_the_device() -> None:
    """Pairs begin alike; then each move is the policy's, and who takes the last stick wins."""
    players = [untrained(seed, "flock:Sticks") for seed in (0, 1)]
    (result,) = match(*players, games=12, opening_moves=2, seed=3).results
    beginnings = set()
    for pair in range(6):
        begun = []
        for game in (0, 1):
            taken = 1 + result.moves[pair, game, : result.lengths[pair, game]]
            # of the seat whose turn it is
            taken = taken[np.arange(len(taken)), np.arange(len(taken)) % 2]
            begun.append((int(taken.sum()), *taken[:2].tolist()))
            for turn in range(2, len(taken)):
                sticks = taken[turn:].sum()
                seen = {
                    "observation": np.float32([[sticks]]),
                    "action_mask": np.arange(3)[None] < sticks,
                }
                policy = players[0 if (turn % 2 == 0) == result.first[pair, game] else 1]
                assert 1 + policy(seen)[0][0] == taken[turn]
            assert (len(taken) % 2 == 1) == (
                result.first[pair, game] == (result.scores[pair, game] == 1)
            )
        assert begun[0] == begun[1] and result.first[pair].tolist() == [True, False]
        beginnings.add(begun[0])
    assert len(beginnings) > 3 and all(7 <= sticks <= 10 for sticks, *_ in beginnings)
    again = match(*players, games=12, opening_moves=2, seed=3).results[0]
    np.testing.assert_array_equal(again.moves, result.moves)


def test_ratings_are_those_of_maximum_likelihood() -> None:
    games = np.array([[0, 40, 20], [40, 0, 60], [20, 60, 0]])
    points = np.array([[0, 30, 20], [10, 0, 33.5], [0, 26.5, 0]])

    def loss(others: np.ndarray) -> float:
        elo = np.append(others, -others.sum())
        won = 1 / (1 + 10 ** ((elo[None] - elo[:, None]) / 400))
        more = 0.5 * (games > 0)  # a drawn game
        return float(-((points + more) * np.log(won)).sum())

    best = scipy.optimize.minimize(loss, np.zeros(2), tol=1e-10).x
    np.testing.assert_allclose(
        ratings.elo(games, points)[0], 1500 + np.append(best, -best.sum()), atol=0.01
    )
    two, _ = ratings.elo(games[:2, :2], points[:2, :2])
    assert two[0] - two[1] == pytest.approx(
        400 * np.log10(30.5 / 10.5)
    ) and two.mean() == pytest.approx(1500)


def test_intervals_hold_the_truth_in_95_of_100() -> None:
    """Also of pairs that depend on their opening, where intervals over games would be too wide."""
    draw = np.random.default_rng(0)
    for chance in (0.5, 0.8, 0.97):
        for paired in (False, True):
            won = draw.random((1000, 100, 2)) < chance
            scores = (0.5 * (won[..., 0] + ~won[..., 0]) if paired else won.mean(axis=2)) * 1.0
            truth = 0.5 if paired else chance
            inside = [low <= truth <= high for low, high in map(ratings.interval, scores)]
            assert np.mean(inside) > (0.999 if paired else 0.93)
    low, high = ratings.interval(np.ones(100))
    assert 0.95 < low < 0.98 and high == 1


def test_intervals_of_ratings_hold_the_truth_in_95_of_100() -> None:
    draw, truth = np.random.default_rng(0), np.array([1800.0, 1700.0, 1300.0, 1200.0])
    chance = 1 / (1 + 10 ** ((truth[None] - truth[:, None]) / 400))
    inside = []
    for _ in range(300):
        scores = {
            (a, b): (draw.random((100, 2)) < chance[a, b]).mean(1)
            for a in range(4)
            for b in range(a + 1, 4)
        }
        elo, intervals = ratings.elo_table(4, scores)
        assert ((intervals[:, 0] < elo) & (elo < intervals[:, 1])).all()
        inside.append((intervals[:, 0] <= truth) & (truth <= intervals[:, 1]))
    assert 0.93 < np.mean(inside) < 0.98 and np.ptp(intervals, axis=1).max() < 120


def test_a_clean_sweep_tells_two_players_apart() -> None:
    widths = []
    for pairs in (10, 20, 100):
        (low, high), (others_low, others_high) = ratings.elo_table(2, {(0, 1): np.ones(pairs)})[1]
        assert low > others_high and high - low == pytest.approx(others_high - others_low)
        widths.append(low - others_high)
    assert widths == sorted(widths)


def test_intervals_of_unequal_players_hold_the_truth() -> None:
    draw = np.random.default_rng(0)
    for pairs in (10, 100):
        inside = []
        for _ in range(300):
            scores = (draw.random((pairs, 2)) < 1 / (1 + 10 ** (-500 / 400))).mean(axis=1)
            (low, high), _ = ratings.elo_table(2, {(0, 1): scores})[1]
            inside.append(low <= 1750 <= high)
        assert np.mean(inside) > 0.92


def test_ratings_of_a_player_who_won_all_games_have_an_interval() -> None:
    scores = {
        (0, 1): np.repeat([1.0, 0.5], [60, 40]),
        (0, 2): np.ones(100),
        (1, 2): np.repeat([1.0, 0.0], [70, 30]),
    }
    elo, intervals = ratings.elo_table(3, scores)
    games = 200 * (1 - np.eye(3))
    points = np.array([[0, 160, 200], [40, 0, 140], [0, 60, 0]])
    np.testing.assert_array_equal(elo, ratings.elo(games, points)[0])
    assert (np.ptp(intervals, axis=1) > 20).all()


WRONG = {
    "": r"which players\? Name two or more",
    "random": r"which players\? Name two or more",
    "random random --games 7": r"--games 7 is odd.* use 6 or 8",
    "random random": r"which game\? Such as --env pgx:connect_four",
    "random nowhere": "nowhere is not a run directory",
    "random random --env CartPole-v1": "CartPole-v1 has 1 player; name a game of two players, such",
    "random random --env flock:Sticks --film game.gif": "flock:Sticks runs on the host, but --film shows games on the",
    f"random random --env {GAME} --film game.png": r"game\.png must end in \.gif or \.mp4",
    f"random random --env {GAME} --film nowhere/game.gif": "there is no directory nowhere",
    "random random --env pgx:kuhn_poker --film game.gif": "pgx:kuhn_poker cannot be drawn",
    "random random --env team:Unlike": "has 3 players|different observations",
}


@pytest.mark.parametrize("flags", WRONG)
def test_what_is_wrong_exits_2_in_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["match", *flags.split()]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and re.search(WRONG[flags], message), message


def test_a_run_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["match", "", "random"]) == 2
    assert "a run's directory is missing" in capsys.readouterr().err


def test_policies_of_other_games_are_refused() -> None:
    pytest.importorskip("pgx")
    with pytest.raises(
        ConfigError, match="num_simulations 5 does nothing, because no player searches"
    ):
        match(untrained(0), "random", num_simulations=5)
    with pytest.raises(ConfigError, match=r"pgx:tic_tac_toe.*CartPole-v1"):
        match(untrained(0), untrained(0, "CartPole-v1"))
    with pytest.raises(
        ConfigError,
        match=r"\{.*agent: float32\[2\], .*\}.*pgx:tic_tac_toe",
    ):
        match(untrained(0, agent_ids=True), "random")
    with pytest.raises(
        ConfigError, match="games are played in pairs with sides swapped; use games=4"
    ):
        match("random", "random", games=3)


def test_a_match_of_several_tells_how_far_it_has_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def played(*players: str, games: int, progress: Any, **fields: Any) -> Any:
        for number in range(len(players) * (len(players) - 1) // 2 + 1):
            progress(number * games)
        raise ConfigError("the end")

    monkeypatch.setattr(matches, "match", played)
    for players, lines in {("random", "random"): 2, ("random", "random", "random"): 5}.items():
        assert cli.main(["match", *players, "--games", "2", "--env", GAME]) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == lines
        assert told[0] == "compiling, then playing 2 games for each two players"
    assert told[2] == "random against random has ended: 2 of 3 pairs of players"


def test_the_film_is_the_first_game(tmp_path: Path) -> None:
    """Its pictures are those of the board by the rules, as the first player sees it."""
    pytest.importorskip("pgx")
    file, spec = tmp_path / "game.gif", find(GAME).spec
    (result,) = match(
        "random", LOWEST, env=GAME, games=4, seed=5, opening_moves=3, film=file
    ).results
    fields, score = replayed(result, 0, 0)
    assert score == result.scores[0, 0] and len(fields) == result.lengths[0, 0]
    boards, board = [], np.zeros((9, 2), bool)
    for turn, field in enumerate([None, *fields]):
        if field is not None:
            board[field, int((turn % 2 == 0) == result.first[0, 0])] = True
        boards.append(
            draw(spec, None, {"observation": board.reshape(3, 3, 2), "mask": np.ones(9, bool)})
        )
    with Image.open(file) as film:
        shown = [np.array(picture.convert("RGB")) for picture in ImageSequence.Iterator(film)]
        assert film.info["duration"] == 500, "milliseconds"
    np.testing.assert_array_equal(shown, boards)


CONNECT_FOUR = (
    "ppo --env pgx:connect_four --num-envs 16 --rollout-length 16 --hidden-sizes 16 --num-devices 1 "
    "--total-env-steps 60000 --evaluation-episodes 0 --checkpoint-interval 20000 --keep-checkpoints 9"
)


@pytest.mark.slow
def test_of_a_policy_and_its_copy_the_one_that_learns_plays(tmp_path: Path) -> None:
    pytest.importorskip("pgx")
    policies = "--policy new=ppo:player_0 --policy old=copy(new,1,2):player_1 --env pgx:tic_tac_toe"
    run = runs.train(
        f"{policies} {runs.TINY.replace('--hidden', '--new.hidden')}", tmp_path / "run"
    )
    played, named = (match(player, "random", games=40) for player in (str(run), f"{run},new"))
    np.testing.assert_array_equal(played.results[0].scores, named.results[0].scores)
    alone = load_policy(run, env_options={"opponents": "self"})
    assert alone.source.spec.both_sides and not alone.source.spec.policies
    jax.tree.map(
        np.testing.assert_array_equal, alone.variables, load_policy(run, policy="new").variables
    )


def test_the_learning_policy_takes_the_simulations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds: dict[str, Any] = {"new": MuZero(), "old": Copy("new", 1, 2)}
    loads = []

    def load(
        run_dir: str,
        *args: Any,
        policy: str | None,
        num_simulations: int | None = None,
        **fields: Any,
    ) -> Any:
        loads.append(policy)
        return SimpleNamespace(policy=policy, num_simulations=num_simulations)

    monkeypatch.setattr(entrants, "load_policy", load)
    stored = Train(Policies({name: Train(kind) for name, kind in kinds.items()}))
    monkeypatch.setattr(entrants, "stored_config", lambda *args: stored)
    for player in ("runs/x", "runs/x,new", "runs/x,old"):
        loads.clear()
        loaded: Any = entrants.load(player, entrants.Loading(num_simulations=7)).acting
        learns = not player.endswith("old")
        assert (loaded.policy, loaded.num_simulations) == (("new", 7) if learns else ("old", None))
        assert len(loads) == 1, "a policy is read once"


@pytest.mark.slow
def test_checkpoints_play_connect_four(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pgx")
    run = runs.train(CONNECT_FOUR, tmp_path / "run")
    oldest = min(int(path.name) for path in (run / "checkpoints").glob("0*"))
    words = [str(run), f"{run}@{oldest}", "random"]
    played = jaxrl_dist.match(*words)
    assert cli.main(["match", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == played.summary(), "equal seeds, equal games"
    assert cli.main(["match", str(run), "random", "--checkpoint", str(oldest), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["results"][0]
    assert {**alone, "players": 0} == {
        **played.summary()["results"][2],
        "players": 0,
        "score": alone["score"],
    }
    (first, *_) = played.results
    assert first.scores.shape == (100, 2) and first.distinct >= 150
    assert isinstance(played, Match) and played.elo.argmin() == 2
    began = time.perf_counter()
    match(*words[:2], seed=1)
    assert time.perf_counter() - began < 60, "compiling included"


def test_help_of_match_asks_for_two_players(capsys):
    assert cli.main(["match", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: jaxrl-dist match PLAYER PLAYER ... [FLAGS]\n")
