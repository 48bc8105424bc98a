"""Finds out which of several players plays a game better: trained policies, random moves,
or players of your own.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_dist.actors.film import speed
from jaxrl_dist.envs import drawing
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.play import ratings
from jaxrl_dist.play.entrants import Loading, check_simulations, find_game, load, make_players
from jaxrl_dist.play.games import Player, Result, Rules, pictures, program
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.play.video import writer
from jaxrl_dist.protocols import Hyperparameters

FPS = 2
"""Pictures per second of a film, if the environment does not say: players look at a board."""


class Match(NamedTuple):
    """The games of ``n`` players, each against each, and their Elo ratings."""

    env: str
    players: tuple[str, ...]
    results: tuple[Result, ...]
    """The players 0 and 1, 0 and 2, ..., 1 and 2, ..."""
    elo: np.ndarray
    """[n] float64, mean 1500; see ``ratings.elo``."""
    intervals: np.ndarray
    """[n, 2] float64, 95 %, of the ratings; see ``ratings.elo_table``."""

    def summary(self) -> dict[str, Any]:
        """Returns the numbers as JSON."""
        table = zip(self.players, self.elo.tolist(), self.intervals.tolist(), strict=True)
        return {
            "env": self.env,
            "results": [result.summary() for result in self.results],
            "elo": [
                {"player": name, "elo": elo, "interval": interval} for name, elo, interval in table
            ],
        }


@in_32_bits
def match(
    *players: Any,
    games: int = 200,
    opening_moves: int = 4,
    seed: int = 0,
    checkpoint: str | int | None = None,
    env: Any = None,
    env_options: Mapping[str, str] | None = None,
    algorithm: type[Hyperparameters] | None = None,
    sampled: bool = False,
    num_simulations: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
    film: str | pathlib.Path | None = None,
) -> Match:
    """Plays every player against every other, in a game of two players that self-play trains,
    such as ``pgx:connect_four``.

        jaxrl_dist.match("runs/new", "runs/old@500000", "random").results[0].score

    Equal seeds play equal games, whoever else plays.

    Args:
      players: two or more. Each is ``RUN_DIR[@CHECKPOINT][,POLICY]``, as in ``fixed(...)``,
        ``random``, a ``Policy`` or a ``Player``.
      games: number of games of every two players; an even number.
      opening_moves: random moves, of both players together, with which a game begins: policies that
        take the best action would repeat one game. Both games of a pair have the same.
      checkpoint: of the runs that are named without one, as for ``load_policy``.
      env: the game, if no run names it, or as for ``load_policy``.
      env_options: the game's options instead of the first run's.
      algorithm: as for ``load_policy``.
      sampled: policies sample their actions; else they take the best ones.
      num_simulations: of the runs whose algorithms plan, as for ``load_policy``.
      progress: called with the number of finished games, with 0 before the first one.
      film: a file that ends in ``.gif`` or ``.mp4``, for the first game of the first two players,
        as ``games.pictures``; if the environment names no speed, each step lasts half a second.

    Raises:
      ConfigError: fewer than two players, an odd number of games, a run that cannot be loaded,
        players of different games, a game that is not one of two players with equal spaces and
        discrete actions, or a player that searches a game on the host; with ``film``, a game that
        cannot be drawn or runs on the host, or a file as ``video.writer`` refuses.
      EnvError: the game's rewards are not finite.
      OSError: the film cannot be written.
    """
    _check_numbers(len(players), games)
    write_film = None
    if film is not None:
        write_film = writer(pathlib.Path(film))  # refuses a file before anything is loaded
    loading = Loading(checkpoint, env, algorithm, num_simulations)
    entrants = [load(player, loading) for player in players]
    policies = [entrant.acting for entrant in entrants if isinstance(entrant.acting, Policy)]
    check_simulations(num_simulations, policies)
    source = find_game(policies, env, env_options)
    if write_film is not None:
        _check_film(source)
    game_players = make_players(entrants, source, sampled=sampled)
    results = dict[tuple[int, int], Result]()
    progress(0)
    for pair, result in _play(source, game_players, Rules(games, opening_moves, seed)):
        if write_film is not None and not results:
            write_film(pictures(source.device(), result, seed), speed(source.spec, FPS))
        results[pair] = result
        progress(len(results) * games)
    scores = {pair: result.scores.mean(axis=1) for pair, result in results.items()}
    elo, intervals = ratings.elo_table(len(game_players), scores)
    names = tuple(player.name for player in game_players)
    return Match(label_of(source.spec), names, tuple(results.values()), elo, intervals)


def _check_numbers(players: int, games: int) -> None:
    if players < 2:
        raise ConfigError(
            'a match needs two or more players, such as "runs/new", "runs/old@100000" and "random"'
        )
    if games < 2 or games % 2:
        raise ConfigError(
            f"games={games}, but games are played in pairs with sides swapped; use "
            f"games={max(2, games + 1)}"
        )


def _play(
    source: EnvSource, players: Sequence[Player], rules: Rules
) -> Iterator[tuple[tuple[int, int], Result]]:
    """Plays the games of every two players, and yields the numbers of the two with their result.

    Pairs that differ only in names and variables share a compiled program.
    """
    programs = dict[Any, Callable[[tuple[Player, Player]], Result]]()
    for first, second in itertools.combinations(range(len(players)), 2):
        pair = (players[first], players[second])
        functions = tuple(player._replace(name="", variables=()) for player in pair)
        if functions not in programs:
            programs[functions] = program(source, pair, rules)
        yield (first, second), programs[functions](pair)


def _check_film(source: EnvSource) -> None:
    """Raises ``ConfigError`` if the game cannot be filmed."""
    if not source.is_pure:
        raise ConfigError(
            f"{label_of(source.spec)} runs on the host, but --film shows games on the device; "
            "remove it"
        )
    drawing.check_drawable(source.spec, source.device().render)
