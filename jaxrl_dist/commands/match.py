"""``jaxrl-dist match``: plays games between policies, to find out which plays better."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxrl_dist.algorithms import from_file
from jaxrl_dist.commands import find_modules, flags, help
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.hosts import stdout
from jaxrl_dist.run.storage import check_run_dir
from jaxrl_dist.settings.policies import of_run
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
    """Number of games of every two players; an even one."""
    opening_moves: int = setting(4, low=0, high=10**4)
    """Random moves, of both players together, with which a game begins;
    both games of a pair have the same."""
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
    """Film the first game of the first two players, as its first player sees it: a file that ends
    in .gif or .mp4. A film is of 1,000 steps at most."""
    json: bool = False
    """Print JSON."""


def run(args: Sequence[str]) -> int:
    """Runs ``match PLAYER PLAYER ... [FLAGS]``."""
    options = flags.parse(Games, args, "jaxrl-dist match PLAYER")
    if len(options.players) < 2:
        raise ConfigError(f"which players? Name two or more, as in: {EXAMPLE}")
    if options.games % 2:
        near = f"{options.games - 1} and {options.games + 1} work"
        raise ConfigError(
            f"--games {options.games}: games are played in pairs, with sides swapped; {near}"
        )
    with stdout.kept_for(options.json):
        if options.algorithm:
            kind = from_file(options.algorithm)
        else:
            kind = None
    for path in (
        pathlib.Path(of_run(player).run_dir) for player in options.players if player != "random"
    ):
        check_run_dir(path)
        stored_fields(path, kind, options.env)  # fails before JAX is imported
    find_modules(options.env)

    from jaxrl_dist.play.match import match

    names = "games", "opening_moves", "seed", "checkpoint", "env", "num_simulations", "film"
    fields = {name: getattr(options, name) for name in names}
    sampled = options.evaluation_policy == "sampled"
    env_options = options.env_options or None
    pairs = list(itertools.combinations(options.players, 2))

    def progress(done: int) -> None:
        number = done // options.games
        if not number:
            print(
                f"compiling, and playing {options.games} games of each two players",
                file=sys.stderr,
                flush=True,
            )
        elif len(pairs) > 1:
            line = f"{' against '.join(pairs[number - 1])} has ended: {number} of {len(pairs)} pairs of players"
            print(visible(line), file=sys.stderr, flush=True)

    with stdout.kept_for(options.json):
        played = match(
            *options.players,
            **fields,
            env_options=env_options,
            algorithm=kind,
            sampled=sampled,
            progress=progress,
        )
    if options.json:
        print(json.dumps(played.summary(), indent=2))
    else:
        text = [
            *lines(played),
            *([] if options.film is None else ["", _filmed(options.film, played.results[0])]),
        ]
        print(visible("\n".join(text)))
    return 0


def lines(match: Match) -> Iterator[str]:
    """Formats a match for reading."""
    several = len(match.players) > 2
    names = match.players
    if several:
        names = tuple(f"{number} {name}" for number, name in enumerate(names, 1))
    yield from (
        *(_of_several(match, names) if several else _of_pair(match.env, match.results[0])),
        "",
    )
    width = max(map(len, names))
    yield f"{'':{width}}  {'Elo':>6}  {'95 %':>14}"
    for number in match.elo.argsort()[::-1]:
        low, high = match.intervals[number]
        yield f"{names[number]:{width}}  {match.elo[number]:6.0f}  {f'{low:.0f} to {high:.0f}':>14}"
    yield from _unclear(match)


def _of_several(match: Match, names: Sequence[str]) -> Iterator[str]:
    """Formats the scores of three and more players: a table of each against each,
    and a line for every two.
    """
    between = _between(match)
    numbers = range(len(names))
    scores = {pair: result.score for pair, result in between.items()}
    scores |= {(b, a): 1 - score for (a, b), score in scores.items()}
    width = max(map(len, names))
    yield f"score of the row's player against the column's in {match.env}"
    yield f"{'':{width}}" + "".join(f"{number + 1:7}" for number in numbers)
    for a, name in enumerate(names):
        cells = (f"{'-':>7}" if a == b else f"{scores[a, b]:7.3f}" for b in numbers)
        yield f"{name:{width}}{''.join(cells)}"
    yield ""
    title = f"{match.results[0].scores.size} games each"
    pair = max(len(title), 2 * len(str(len(names))) + len(" against "))
    yield f"{title:{pair}}  {'score':>5}  {'95 %':>14}     won  drawn   lost  distinct"
    for (a, b), result in between.items():
        low, high = result.interval
        won, drawn, lost = result.counts()
        if result.cut:
            cut = f"  {result.cut} cut before they had ended"
        else:
            cut = ""
        score = f"{result.score:.3f}  {low:.3f} to {high:.3f}"
        yield f"{f'{a + 1} against {b + 1}':{pair}}  {score}  {won:6} {drawn:6} {lost:6}  {result.distinct:8}{cut}"


def _between(match: Match) -> dict[tuple[int, int], Result]:
    return dict(
        zip(itertools.combinations(range(len(match.players)), 2), match.results, strict=True)
    )


def _unclear(match: Match) -> Iterator[str]:
    """Says so where the games do not tell the two players of the highest ratings apart."""
    first, second = (int(number) for number in match.elo.argsort()[::-1][:2])
    result = _between(match)[min(first, second), max(first, second)]
    score, (low, high) = result.score, result.interval
    if first > second:
        score, low, high = 1 - score, 1 - high, 1 - low
    reasons = []
    if match.intervals[first, 0] <= match.intervals[second, 1]:
        reasons.append("their Elo intervals overlap")
    best = match.players[first]
    next_best = match.players[second]
    if low <= 0.5:
        above = "below" if high < 0.5 else "not clearly above"
        reasons.append(
            f"{best} scored {score:.3f} ({low:.3f} to {high:.3f}) in their own games, {above} 0.5"
        )
    if reasons:
        yield ""
        yield f"{best} and {next_best} do not differ clearly: {', and '.join(reasons)}"


def _filmed(file: str, result: Result) -> str:
    """Says which game a film shows, who plays which side in it, and how it ends."""
    a, b = result.players
    if result.first[0, 0]:
        own, other = result.sides
    else:
        own, other = result.sides[::-1]
    outcome = {1.0: f"{a} won", 0.5: "it was drawn", 0.0: f"{b} won"}[float(result.scores[0, 0])]
    return f"wrote {file}: the first game of {a} ({own}) and {b} ({other}); {outcome} after {result.lengths[0, 0]} steps"


def _of_pair(env: str, result: Result) -> Iterator[str]:
    numbers: dict[str, Any] = result.summary()
    low, high = numbers["interval"]
    a, b = numbers["players"]
    if result.cut:
        cut = f", {result.cut} of them cut before they had ended"
    else:
        cut = ""
    yield f"{a} against {b} in {env}"
    yield f"score {result.score:.3f} ({low:.3f} to {high:.3f}, 95 % over {len(result.scores)} pairs of games)"
    yield f"{numbers['games']} games, {numbers['distinct']} distinct{cut}"
    for name, counts in {"all games": numbers, **numbers["sides"]}.items():
        yield f"  {name:18} {counts['won']:>6} won {counts['drawn']:>6} drawn {counts['lost']:>6} lost"
