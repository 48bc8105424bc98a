"""Finds out which of several players plays a game better: trained policies, random moves,
or players of your own.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES, check_samples
from jaxrl_dist.actors.film import speed
from jaxrl_dist.checks import counted
from jaxrl_dist.config.train import OWN, Train, env_name
from jaxrl_dist.envs import drawing
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.source import EnvSource, find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.play import ratings
from jaxrl_dist.play.games import Player, Result, pictures, program
from jaxrl_dist.play.policy import Policy, load_policy
from jaxrl_dist.play.video import writer
from jaxrl_dist.protocols import Hyperparameters, Traits
from jaxrl_dist.run.storage import replacing
from jaxrl_dist.settings.policies import Random, by_policy, learner, of_run
from jaxrl_dist.settings.stored import stored_config
from jaxrl_dist.types import Context, EnvSpec, PyTree

RANDOM = "random"
"""The player that chooses legal moves at random."""
VIEWS = ("opponents", "state")
"""Options of Pgx that say how an agent sees a game, and not which game it is."""
FPS = 2
"""Pictures per second of a film, where the environment does not say: a board is looked at."""


class Match(NamedTuple):
    """The games of ``n`` players, each against each, and their Elo ratings."""

    env: str
    players: tuple[str, ...]
    results: tuple[Result, ...]
    """Of the players 0 and 1, 0 and 2, ..., 1 and 2, ..."""
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
    such as those of Pgx.

        jaxrl_dist.match("runs/new", "runs/old@500000", "random").results[0].score

    Equal seeds play equal games, whoever else plays.

    Args:
      players: two or more. Each is ``RUN_DIR[@CHECKPOINT][,POLICY]``, as in ``fixed(...)``,
        ``random``, a ``Policy`` or a ``Player``.
      games: of every two players; an even number.
      opening_moves: random moves, of both players together, with which a game begins: policies that
        take the best action would repeat one game. Both games of a pair have the same.
      checkpoint: of the runs that are named without one, as for ``load_policy``.
      env: the game, if no run names it, or as for ``load_policy``.
      env_options: the game's options instead of those of the first run.
      algorithm: as for ``load_policy``.
      sampled: policies sample their actions; else they take the best ones.
      num_simulations: of the runs whose algorithms plan, as for ``load_policy``.
      progress: called with the number of finished games, with 0 before the first one.
      film: the file, which ends in ``.gif`` or ``.mp4``, that shows the first game of the first two
        players, as ``games.pictures``; where the environment names no speed, a step is shown for
        half a second.

    Raises:
      ConfigError: fewer than two players, an odd number of games, a run that cannot be loaded,
        players of different games, a game that is not one of two players with equal spaces and
        discrete actions, or a player that searches a game on the host; with ``film``, a game that
        cannot be drawn or runs on the host, or a file as ``video.writer`` refuses.
      EnvError: the game's rewards are not finite.
      OSError: the film cannot be written.
    """
    if len(players) < 2:
        raise ConfigError(
            'a match needs two or more players, such as "runs/new", "runs/old@100000" and "random"'
        )
    if games < 2 or games % 2:
        raise ConfigError(
            f"games are played in pairs, with sides swapped: games={games}; {max(2, games + 1)} works"
        )
    write = None if film is None else writer(pathlib.Path(film))
    loaded = [_loaded(player, checkpoint, env, algorithm, num_simulations) for player in players]
    if num_simulations is not None and not any(
        isinstance(x, Policy) and _plans(x.config) for _, x in loaded
    ):
        raise ConfigError(f"--num-simulations {num_simulations}: no player searches")
    made = _game([player for _, player in loaded], env, env_options)
    if film is not None:
        if not made.is_pure:
            raise ConfigError(
                f"{label_of(made.spec)} runs on the host, and --film shows games on the device"
            )
        drawing.check(made.spec, made.device().render)
    acting = dict[str, Player]()
    entrants = [
        _player(name, player, made.spec, acting, sampled=sampled) for name, player in loaded
    ]
    if searching := [player.name for player in entrants if player.searches and not made.is_pure]:
        raise ConfigError(
            f"{searching[0]} searches, and {label_of(made.spec)} runs on the host, where nothing can be tried ahead; "
            "--num-simulations 0 lets its network play alone"
        )
    programs = dict[Any, Callable[[tuple[Player, Player]], Result]]()
    results = []
    scores = {}
    progress(0)
    for number, (a, b) in enumerate(itertools.combinations(range(len(entrants)), 2)):
        pair = entrants[a], entrants[b]
        key = tuple(player._replace(name="", variables=()) for player in pair)
        if key not in programs:
            programs[key] = program(made, pair, games, opening_moves, seed)
        results.append(programs[key](pair))
        scores[a, b] = results[-1].scores.mean(axis=1)
        if number == 0 and film is not None and write is not None:
            with replacing(pathlib.Path(film)) as partial:
                write(pictures(made.device(), results[0], seed), partial, speed(made.spec, FPS))
        progress((number + 1) * games)
    elo, intervals = ratings.elo_table(len(entrants), scores)
    return Match(
        label_of(made.spec),
        tuple(player.name for player in entrants),
        tuple(results),
        elo,
        intervals,
    )


# --- Players --------------------------------------------------------------------------------------


def _loaded(
    player: Any,
    checkpoint: str | int | None,
    env: Any,
    algorithm: type[Hyperparameters] | None,
    num_simulations: int | None,
) -> tuple[str, Any]:
    """Returns a player's name, and its ``Policy``, its ``Player`` or the text ``random``."""
    if isinstance(player, Policy | Player):
        return player.name if isinstance(player, Player) else repr(player), player
    name = str(player)
    if name == RANDOM:
        return name, name
    run = of_run(name)
    which = checkpoint if run.checkpoint is None else run.checkpoint
    if which is not None and run.checkpoint is None:
        name = f"{run.run_dir}@{which}{f',{run.policy}' if run.policy else ''}"
    config = stored_config(run.run_dir, algorithm, env)
    wanted = run.policy or learner(config)
    if _plans(by_policy(config).get(wanted or "")):
        simulations = num_simulations
    else:
        simulations = None
    policy = load_policy(
        run.run_dir,
        algorithm,
        env=env,
        policy=wanted,
        checkpoint=which,
        num_simulations=simulations,
    )
    return name, policy


def _plans(config: Any) -> bool:
    """Returns whether the algorithm of a config searches; None: there is none."""
    return hasattr(getattr(config, "algorithm", None), "num_simulations")


def _game(players: Sequence[Any], env: Any, env_options: Mapping[str, str] | None) -> EnvSource:
    """Makes the game that all players have learnt.

    Raises:
      ConfigError: as ``match``.
    """
    learnt = [_learnt(player.config) for player in players if isinstance(player, Policy)]
    if env is None and not learnt:
        raise ConfigError("which game? Such as --env pgx:connect_four")
    for one, options in learnt:
        if env_name(one) != env_name(learnt[0][0]) or (
            env_options is None and options != learnt[0][1]
        ):
            names = f"{_words(*learnt[0])} and {_words(one, options)}"
            raise ConfigError(
                f"the players of a match play one game, and these have learnt {names}"
            )
    known = learnt[0] if learnt else (env, {})
    source = find(
        known[0] if env is None else env, known[1] if env_options is None else env_options
    )
    _check_game(source)
    return source


def _check_game(source: EnvSource) -> None:
    """Raises ``ConfigError`` for a game that does not work in a match."""
    spec = source.spec
    works = "games of two players do, such as pgx:connect_four"
    problems = {
        f"has {counted(spec.num_agents, 'player')}": spec.num_agents != 2,
        f"has the actions {spaces.describe(spec.action)}": not isinstance(
            spec.action, spaces.Discrete
        ),
    }
    for problem in filter(problems.get, problems):
        raise ConfigError(f"{label_of(spec)} {problem}, which does not work in a match; {works}")


def _learnt(config: Train) -> tuple[Any, dict[str, str]]:
    """Returns the game of a run, and its options."""
    return config.env, {
        name: value for name, value in config.env_options.items() if name not in VIEWS
    }


def _words(env: Any, options: Mapping[str, str]) -> str:
    return " ".join([env_name(env), *(f"{name}={value}" for name, value in options.items())])


def _player(
    name: str, player: Any, spec: EnvSpec, acting: dict[str, Player], *, sampled: bool
) -> Player:
    """Returns the player of ``_loaded`` for a game;
    policies that differ in their variables only share functions.

    Raises:
      ConfigError: it cannot play the game.
    """
    if isinstance(player, Player):
        return player
    if player == RANDOM:
        return acting.setdefault(RANDOM, _random(spec))
    _check(name, player, spec)
    config = player.config
    key = repr((config.algorithm, *(getattr(config, field) for field in OWN), player.source.spec))
    return acting.setdefault(key, _trained(player, sampled=sampled))._replace(
        name=name, variables=player.variables
    )


def _random(spec: EnvSpec) -> Player:
    chance = Random().make(spec)

    def act(
        variables: PyTree, obs: PyTree, legal: jax.Array, state: PyTree, keys: jax.Array
    ) -> Any:
        return chance.policy(variables, obs, state, Context(keys, jnp.float32(0)))[:2]

    return Player(RANDOM, act)


def _check(name: str, policy: Policy, spec: EnvSpec) -> None:
    """Checks that a policy can play the seats of a game.

    Raises:
      ConfigError: it cannot.
    """
    if several := ", ".join(policy.source.spec.policies):
        raise ConfigError(f"{name}: which policy? It has {several}; RUN_DIR,POLICY names one")
    mine, shown = (_described(space) for space in (policy.observation, spec.observation))
    if not mine.items() <= shown.items():
        texts = spaces.describe(policy.observation), spaces.describe(spec.observation)
        raise ConfigError(
            f"{name} reads the observation {texts[0]}, and {label_of(spec)} shows {texts[1]} in a match"
        )
    if policy.source.spec.action != spec.action:
        texts = spaces.describe(policy.source.spec.action), spaces.describe(spec.action)
        raise ConfigError(
            f"{name} has the actions {texts[0]}, and {label_of(spec)} takes {texts[1]}"
        )
    alone = policy.source.spec.num_agents == 1 and not policy.source.wrappers.policies
    if alone and Traits.of(policy.config.algorithm).core != "none":
        raise ConfigError(
            f"{name} is recurrent, and has seen only the steps of its own turns (opponents=random); "
            "one that trained with opponents=agents can play a match"
        )


def _described(space: spaces.Space) -> dict[str, str]:
    """Describes the parts of an observation; one without parts is its only part."""
    return {
        name: spaces.describe(part)
        for name, part in (space if isinstance(space, dict) else {"": space}).items()
    }


def _trained(policy: Policy, *, sampled: bool) -> Player:
    """Returns the player that acts as a policy does at the end of all schedules.

    Raises:
      ConfigError: as ``check_samples``.
    """
    algorithm, space = policy.algorithm, policy.source.spec.observation
    if sampled:
        check_samples({"": algorithm})

    def act(
        variables: PyTree,
        obs: PyTree,
        legal: jax.Array,
        state: PyTree,
        keys: jax.Array,
        simulator: Any = None,
    ) -> Any:
        if isinstance(space, dict):  # parts that only the critic sees are blank
            shape = legal.shape[:1]
            blank = {
                x: jax.tree.map(lambda y: jnp.zeros(shape + y.shape, y.dtype), part)
                for x, part in space.items()
            }
            obs = {part: obs.get(part, blank[part]) for part in space}
        draws = sampled or not algorithm.trains
        context = Context(
            keys if draws else None, jnp.float32(END_OF_SCHEDULES), simulator=simulator
        )
        return algorithm.policy(variables, obs, state, context)[:2]

    return Player("", act, (), algorithm.initial_core, algorithm.feedback, algorithm.searches)
