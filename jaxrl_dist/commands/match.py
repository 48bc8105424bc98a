"""``jaxrl-dist match``: plays games between policies, to find out which plays better."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from jaxrl_dist.algorithms import from_file
from jaxrl_dist.commands import find_modules, flags, help
from jaxrl_dist.commands.evaluate import warn_of_code
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.hosts import stdout
from jaxrl_dist.run.storage import check_run_dir
from jaxrl_dist.settings.still import read_fixed
from jaxrl_dist.settings.stored import stored_fields

if TYPE_CHECKING:
    from jaxrl_dist.play.games import Result
    from jaxrl_dist.play.match import Match

EXAMPLE = "jaxrl-dist match runs/new runs/old@500000 random"


@dataclasses.dataclass(frozen=True)
class Games:
    """Plays games between policies, in pairs with sides swapped, and says which plays better; with
    three and more players, every two play, a table shows their scores, and each gets an Elo
    rating."""

    players: Annotated[tuple[str, ...], help.Argument("PLAYER ...")] = ()
    """RUN_DIR or RUN_DIR@CHECKPOINT, with ,POLICY for one of several policies; or random.
    CHECKPOINT is "best" or env steps."""
    games: int = setting(200, low=2, high=10**5)
    """Number of games for every two players; it must be even."""
    opening_moves: int = setting(4, low=0, high=10**4)
    """Random moves at the start of a game, of both players together; both games of a pair have the
    same."""
    seed: int = setting(0, low=0, high=2**31 - 1)
    """Seed of the games."""
    checkpoint: str | None = None
    """Checkpoint of the runs that are named without one; None: their trained policies."""
    evaluation_policy: Literal["greedy", "sampled"] = "greedy"
    """Take the best actions or sample them."""
    num_simulations: int | None = setting(None, low=0, high=10**4)
    """Steps of each search of the players that plan; 0: their networks act alone; None:
    as in training."""
    env: str | None = None
    """The game, if no run names it; required again if it has the form my_module:make."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the game instead of the first run's."""
    algorithm: str | None = None
    """File of the algorithm, if the runs trained your own."""
    film: str | None = None
    """File that ends in .gif or .mp4: film the first game of the first two players, as its first
    player sees it, for at most 1,000 steps."""
    json: bool = False
    """Print JSON."""


def run(args: Sequence[str]) -> int:
    """Runs ``match PLAYER PLAYER ... [FLAGS]``."""
    options = flags.parse(Games, args, "jaxrl-dist match PLAYER")
    if len(options.players) < 2:
        raise ConfigError(f"which players? Name two or more, as in: {EXAMPLE}")
    if options.games % 2:
        raise ConfigError(
            f"--games {options.games} is odd, but games are played in pairs with sides swapped; "
            f"use {options.games - 1} or {options.games + 1}"
        )
    with stdout.kept_for(options.json):
        played = _play(options)
    if options.json:
        print(json.dumps(played.summary(), indent=2))
        return 0
    print(visible("\n".join(lines(played))))
    if options.film is not None:
        print(visible(f"\n{_filmed(options.film, played.results[0])}"))
    return 0


def _play(options: Games) -> Match:
    algorithm = from_file(options.algorithm) if options.algorithm else None
    for player in options.players:
        if player != "random":
            run_dir = pathlib.Path(read_fixed(player).run_dir)
            check_run_dir(run_dir)
            stored_fields(run_dir, algorithm, options.env)  # fails before JAX is imported
            if algorithm:
                warn_of_code(run_dir, algorithm)
    find_modules(options.env)

    from jaxrl_dist.play.match import match

    return match(
        *options.players,
        games=options.games,
        opening_moves=options.opening_moves,
        seed=options.seed,
        checkpoint=options.checkpoint,
        env=options.env,
        env_options=options.env_options or None,
        algorithm=algorithm,
        sampled=options.evaluation_policy == "sampled",
        num_simulations=options.num_simulations,
        progress=_progress(options),
        film=options.film,
    )


def _progress(options: Games) -> Callable[[int], None]:
    """Returns what prints, after each pair of players, how many have played."""
    pairs = list(itertools.combinations(options.players, 2))

    def show(finished_games: int) -> None:
        if not finished_games:
            line = f"compiling, then playing {options.games} games for each two players"
        elif len(pairs) > 1:
            finished = finished_games // options.games
            against = " against ".join(pairs[finished - 1])
            line = f"{against} has ended: {finished} of {len(pairs)} pairs of players"
        else:
            return
        print(visible(line), file=sys.stderr, flush=True)

    return show


def lines(match: Match) -> Iterator[str]:
    """Formats a match for reading."""
    names = match.players
    if len(names) > 2:
        names = tuple(f"{number} {name}" for number, name in enumerate(names, 1))
        yield from _scores_of_several(match, names)
    else:
        yield from _scores_of_two(match.env, match.results[0])
    yield ""
    width = max(map(len, names))
    yield f"{'':{width}}  {'Elo':>6}  {'95 %':>14}"
    for number in match.elo.argsort()[::-1]:
        low, high = match.intervals[number]
        interval = f"{low:.0f} to {high:.0f}"
        yield f"{names[number]:{width}}  {match.elo[number]:6.0f}  {interval:>14}"
    yield from _unclear(match)


def _scores_of_two(env: str, result: Result) -> Iterator[str]:
    first, second = result.players
    low, high = result.interval
    yield f"{first} against {second} in {env}"
    yield (
        f"score {result.score:.3f} ({low:.3f} to {high:.3f}, 95 % over "
        f"{len(result.scores)} pairs of games)"
    )
    games = f"{result.scores.size} games, {result.distinct} distinct"
    if result.cut:
        games += f", {result.cut} of them cut before their end"
    yield games
    counts = {"all games": result.counts()}
    counts |= {name: result.counts(side) for side, name in enumerate(result.sides)}
    for name, (won, drawn, lost) in counts.items():
        yield f"  {name:18} {won:>6} won {drawn:>6} drawn {lost:>6} lost"


def _scores_of_several(match: Match, names: Sequence[str]) -> Iterator[str]:
    """Formats the scores of three and more players: a table of each against each,
    and a line for every two.
    """
    results = _by_numbers(match)
    numbers = range(len(names))
    cells = {(number, number): "-" for number in numbers}
    for (first, second), result in results.items():
        cells[first, second] = f"{result.score:.3f}"
        cells[second, first] = f"{1 - result.score:.3f}"
    width = max(map(len, names))
    yield f"score of the row's player against the column's in {match.env}"
    yield f"{'':{width}}" + "".join(f"{number + 1:7}" for number in numbers)
    for row, name in enumerate(names):
        yield f"{name:{width}}" + "".join(f"{cells[row, column]:>7}" for column in numbers)
    yield ""
    title = f"{match.results[0].scores.size} games each"
    width = max(len(title), 2 * len(str(len(names))) + len(" against "))
    yield f"{title:{width}}  {'score':>5}  {'95 %':>14}     won  drawn   lost  distinct"
    for (first, second), result in results.items():
        pair = f"{first + 1} against {second + 1}"
        low, high = result.interval
        won, drawn, lost = result.counts()
        line = (
            f"{pair:{width}}  {result.score:.3f}  {low:.3f} to {high:.3f}  "
            f"{won:6} {drawn:6} {lost:6}  {result.distinct:8}"
        )
        if result.cut:
            line += f"  {result.cut} cut before their end"
        yield line


def _by_numbers(match: Match) -> dict[tuple[int, int], Result]:
    """Returns the results by the numbers of the two players, the lower one first."""
    pairs = itertools.combinations(range(len(match.players)), 2)
    return dict(zip(pairs, match.results, strict=True))


def _unclear(match: Match) -> Iterator[str]:
    """Says so if the games do not tell the two players of the highest ratings apart."""
    best, next_best = (int(number) for number in match.elo.argsort()[::-1][:2])
    result = _by_numbers(match)[min(best, next_best), max(best, next_best)]
    score = result.score
    interval = result.interval
    if best > next_best:
        score = 1 - score
        interval = (1 - interval[1], 1 - interval[0])
    low, high = interval
    name = match.players[best]
    reasons = []
    if match.intervals[best, 0] <= match.intervals[next_best, 1]:
        reasons.append("their Elo intervals overlap")
    if low <= 0.5:
        above = "below" if high < 0.5 else "not clearly above"
        reasons.append(
            f"{name} scored {score:.3f} ({low:.3f} to {high:.3f}) in their own games, {above} 0.5"
        )
    if reasons:
        yield ""
        yield (
            f"{name} and {match.players[next_best]} do not differ clearly: {', and '.join(reasons)}"
        )


def _filmed(file: str, result: Result) -> str:
    """Says which game a film shows, who plays which side in it, and how it ends."""
    first, second = result.players
    side, other_side = result.sides
    if not result.first[0, 0]:
        side, other_side = other_side, side
    outcomes = {1.0: f"{first} won", 0.5: "it was drawn", 0.0: f"{second} won"}
    return (
        f"wrote {file}: the first game of {first} ({side}) and {second} ({other_side}); "
        f"{outcomes[float(result.scores[0, 0])]} after {result.lengths[0, 0]} steps"
    )
