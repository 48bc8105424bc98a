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
from jaxrl_dist.run.storage import check_run_dir
from jaxrl_dist.settings.policies import of_run
from jaxrl_dist.settings.stored import stored_fields

if TYPE_CHECKING:
    from jaxrl_dist.play.games import Result
    from jaxrl_dist.play.match import Match

EXAMPLE = "jaxrl-dist match runs/new runs/old@500000 random"


@dataclasses.dataclass(frozen=True)
class Games:
    """Plays games between policies, in pairs with sides swapped, and says which plays better; with three and more
    players, every two play, and each gets an Elo rating."""

    players: Annotated[tuple[str, ...], help.Argument("PLAYER")] = ()
    """RUN_DIR or RUN_DIR@CHECKPOINT, with ,POLICY for one of several policies; or random. CHECKPOINT is "best" or env
    steps."""
    games: int = setting(200, low=2, high=10**5)
    """Number of games of every two players; an even one."""
    opening_moves: int = setting(4, low=0, high=10**4)
    """Random moves, of both players together, with which a game begins; both games of a pair have the same."""
    seed: int = setting(0, low=0, high=2**31 - 1)
    """Seed of the games."""
    checkpoint: str | None = None
    """Checkpoint of the runs that are named without one; None: their trained policies."""
    evaluation_policy: Literal["greedy", "sampled"] = "greedy"
    """Take the best actions or sample them."""
    num_simulations: int | None = setting(None, low=0, high=10**4)
    """Steps of each search of the players that plan; 0: their networks act alone; None: as in training."""
    env: str | None = None
    """The game, if no run names it; required again if it has the form my_module:make."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the game instead of the first run's."""
    algorithm: str | None = None
    """File of the algorithm, if the runs trained your own."""
    json: bool = False
    """Print JSON."""


def run(args: Sequence[str]) -> int:
    """Runs ``match PLAYER PLAYER ... [FLAGS]``."""
    options = flags.parse(Games, args, "jaxrl-dist match")
    if len(options.players) < 2:
        raise ConfigError(f"which players? Name two or more, as in: {EXAMPLE}")
    if options.games % 2:
        near = f"{options.games - 1} and {options.games + 1} work"
        raise ConfigError(f"--games {options.games}: games are played in pairs, with sides swapped; {near}")
    kind = from_file(options.algorithm) if options.algorithm else None
    for path in (pathlib.Path(of_run(player).run_dir) for player in options.players if player != "random"):
        check_run_dir(path)
        stored_fields(path, kind, options.env)  # fails before JAX is imported
    find_modules(options.env)

    from jaxrl_dist.play.match import match

    names = "games", "opening_moves", "seed", "checkpoint", "env", "num_simulations"
    fields = {name: getattr(options, name) for name in names}
    sampled = options.evaluation_policy == "sampled"
    env_options = options.env_options or None
    pairs = list(itertools.combinations(options.players, 2))

    def progress(done: int) -> None:
        number = done // options.games
        if len(pairs) > 1:
            line = f"{' against '.join(pairs[number - 1])} has ended: {number} of {len(pairs)} pairs of players"
            print(visible(line), file=sys.stderr, flush=True)

    played = match(
        *options.players, **fields, env_options=env_options, algorithm=kind, sampled=sampled, progress=progress
    )
    print(json.dumps(played.summary(), indent=2) if options.json else visible("\n".join(lines(played))))
    return 0


def lines(match: Match) -> Iterator[str]:
    """Formats a match for reading."""
    for result in match.results:
        yield from (*_of_pair(match.env, result), "")
    width = max(map(len, match.players))
    yield f"{'':{width}}  {'Elo':>6}  {'95 %':>14}"
    for number in match.elo.argsort()[::-1]:
        low, high = match.intervals[number]
        yield f"{match.players[number]:{width}}  {match.elo[number]:6.0f}  {f'{low:.0f} to {high:.0f}':>14}"


def _of_pair(env: str, result: Result) -> Iterator[str]:
    numbers: dict[str, Any] = result.summary()
    low, high = numbers["interval"]
    a, b = numbers["players"]
    cut = f", {result.cut} of them cut before they had ended" if result.cut else ""
    yield f"{a} against {b} in {env}"
    yield f"score {result.score:.3f} ({low:.3f} to {high:.3f}, 95 % over {len(result.scores)} pairs of games)"
    yield f"{numbers['games']} games, {numbers['distinct']} distinct{cut}"
    for name, counts in {"all games": numbers, **numbers["sides"]}.items():
        yield f"  {name:18} {counts['won']:>6} won {counts['drawn']:>6} drawn {counts['lost']:>6} lost"
