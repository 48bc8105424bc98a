"""Finds out which of several players plays a game better: trained policies, random moves, or players of your own.

Every two players play pairs of games. Both games of a pair begin with the same random moves, by the same chances of the
environment, and the players have changed seats. So neither the opening nor the side favours a player.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng, spaces
from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES, MAX_EPISODE_STEPS, check_samples
from jaxrl_dist.config.train import OWN, Train, env_name
from jaxrl_dist.envs.base import DeviceEnv, label_of
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError, EnvError
from jaxrl_dist.play import ratings
from jaxrl_dist.play.policy import Policy, load_policy
from jaxrl_dist.protocols import Hyperparameters, Traits
from jaxrl_dist.settings.policies import Random, of_run
from jaxrl_dist.types import Context, EnvSpec, PyTree, Timestep

RANDOM = "random"
"""The player that chooses legal moves at random."""
VIEWS = ("opponents", "state")
"""Options of Pgx that say how an agent sees a game, and not which game it is."""
_STEPS = 32
"""Steps of a dispatch."""


class Player(NamedTuple):
    """What plays, as pure functions over a batch of ``G`` games."""

    name: str
    act: Callable[[PyTree, PyTree, jax.Array, PyTree, jax.Array], tuple[jax.Array, PyTree]]
    """``(variables, obs, legal, state, keys) -> (actions, state)``: observations ``[G, ...]`` of the player's seats,
    legal actions ``[G, n]`` bool, the player's state ``[G, ...]`` and keys ``[G]``; actions are integers ``[G]``. A
    player acts at every step: one who is not on the move has one legal action, which does nothing."""
    variables: PyTree = ()
    """An argument of the compiled program, such as parameters."""
    initial_state: Callable[[int], PyTree] = lambda num_games: ()
    """``(G) -> state`` at the start of a game."""
    feedback: Callable[[PyTree, jax.Array, Timestep], PyTree] = lambda state, action, step: state
    """``(state, action, step) -> state``, with the actions that were taken, which are random in the opening."""


class Result(NamedTuple):
    """``P`` pairs of games between two players. The first player has the first seat in the first game of a pair."""

    players: tuple[str, str]
    scores: np.ndarray  # [P, 2] float64, of the first player: 1 won, 0.5 drawn, 0 lost
    first: np.ndarray  # [P, 2] bool: whether the first player had the first of the ``sides``
    moves: np.ndarray  # [P, 2, T, 2] int32, the actions of both seats; -1 after the end of the game
    sides: tuple[str, str] = ("moving first", "moving second")
    cut: int = 0  # games that had not ended within the step limit; their rewards until then count

    @property
    def score(self) -> float:
        """The first player's mean score, 0 to 1."""
        return float(self.scores.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """The interval, 95 %, of the score over pairs; see ``ratings.interval``."""
        return ratings.interval(self.scores.mean(axis=1))

    @property
    def distinct(self) -> int:
        """The number of games whose moves differ."""
        games = self.moves.reshape(len(self.moves) * 2, -1, 2)
        begins = self.first.reshape(-1) ^ (np.arange(len(games)) % 2 == 1)  # whether the first seat does
        return len(np.unique(np.where(begins[:, None, None], games, games[..., ::-1]), axis=0))

    def counts(self, side: int | None = None) -> tuple[int, int, int]:
        """Returns the games that the first player won, drew and lost: all, or as one of the ``sides``."""
        scores = self.scores if side is None else self.scores[self.first == (side == 0)]
        won, drawn, lost = (int((scores == score).sum()) for score in (1, 0.5, 0))
        return won, drawn, lost

    def summary(self) -> dict[str, Any]:
        """Returns the numbers as JSON."""
        return {
            "players": list(self.players),
            "games": self.scores.size,
            "distinct": self.distinct,
            "cut": self.cut,
            "score": self.score,
            "interval": list(self.interval),
            **dict(zip(("won", "drawn", "lost"), self.counts(), strict=True)),
            "sides": {
                name: dict(zip(("won", "drawn", "lost"), self.counts(side), strict=True))
                for side, name in enumerate(self.sides)
            },
        }


class Match(NamedTuple):
    """The games of ``n`` players, each against each, and their Elo ratings."""

    env: str
    players: tuple[str, ...]
    results: tuple[Result, ...]  # of the players 0 and 1, 0 and 2, ..., 1 and 2, ...
    elo: np.ndarray  # [n] float64, mean 1500; see ``ratings.elo``
    intervals: np.ndarray  # [n, 2] float64, 95 %, of the ratings; see ``ratings.elo_table``

    def summary(self) -> dict[str, Any]:
        """Returns the numbers as JSON."""
        table = zip(self.players, self.elo.tolist(), self.intervals.tolist(), strict=True)
        return {
            "env": self.env,
            "results": [result.summary() for result in self.results],
            "elo": [{"player": name, "elo": elo, "interval": interval} for name, elo, interval in table],
        }


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
    progress: Callable[[int], None] = lambda done: None,
) -> Match:
    """Plays every player against every other, in a game of two players that self-play trains, such as those of Pgx.

        jaxrl_dist.match("runs/new", "runs/old@500000", "random").results[0].score

    Equal seeds play equal games, whoever else plays.

    Args:
      players: two or more. Each is ``RUN_DIR[@CHECKPOINT][,POLICY]``, as in ``fixed(...)``, ``random``, a ``Policy`` or
        a ``Player``.
      games: of every two players; an even number.
      opening_moves: random moves, of both players together, with which a game begins: policies that take the best
        action would repeat one game. Both games of a pair have the same.
      checkpoint: of the runs that are named without one, as for ``load_policy``.
      env: the game, if no run names it, or as for ``load_policy``.
      env_options: the game's options instead of those of the first run.
      algorithm: as for ``load_policy``.
      sampled: policies sample their actions; else they take the best ones.
      progress: called with the number of finished games.

    Raises:
      ConfigError: fewer than two players, an odd number of games, a run that cannot be loaded, players of different
        games, or a game that is not one of two players with equal spaces, discrete actions and pure functions.
      EnvError: the game's rewards are not finite.
    """
    if len(players) < 2:
        raise ConfigError('a match needs two or more players, such as "runs/new", "runs/old@100000" and "random"')
    if games < 2 or games % 2:
        raise ConfigError(f"games are played in pairs, with sides swapped: games={games}; {max(2, games + 1)} works")
    loaded = [_loaded(player, checkpoint, env, algorithm) for player in players]
    made = _game([player for _, player in loaded], env, env_options)
    acting = dict[str, Player]()
    entrants = [_player(name, player, made.spec, acting, sampled=sampled) for name, player in loaded]
    programs = dict[Any, Callable[[tuple[Player, Player]], Result]]()
    results, scores = [], {}
    for number, (a, b) in enumerate(itertools.combinations(range(len(entrants)), 2)):
        pair = entrants[a], entrants[b]
        key = tuple(player._replace(name="", variables=()) for player in pair)
        if key not in programs:
            programs[key] = _program(made, pair, games, opening_moves, seed)
        results.append(programs[key](pair))
        scores[a, b] = results[-1].scores.mean(axis=1)
        progress((number + 1) * games)
    elo, intervals = ratings.elo_table(len(entrants), scores, seed)
    return Match(label_of(made.spec), tuple(player.name for player in entrants), tuple(results), elo, intervals)


# --- Players ------------------------------------------------------------------------------------------


def _loaded(
    player: Any, checkpoint: str | int | None, env: Any, algorithm: type[Hyperparameters] | None
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
    return name, load_policy(run.run_dir, algorithm, env=env, policy=run.policy, checkpoint=which)


def _game(players: list[Any], env: Any, env_options: Mapping[str, str] | None) -> DeviceEnv:
    """Makes the game that all players have learnt.

    Raises:
      ConfigError: as ``match``.
    """

    def options(config: Train[Any]) -> dict[str, str]:
        return {name: value for name, value in config.env_options.items() if name not in VIEWS}

    configs = [player.config for player in players if isinstance(player, Policy)]
    known = [(env_name(config.env), options(config)) for config in configs]
    if env is None and not configs:
        raise ConfigError("which game? Such as --env pgx:connect_four")
    for name, values in known:
        if name != known[0][0] or (env_options is None and values != known[0][1]):
            texts = (" ".join([x, *(f"{k}={v}" for k, v in y.items())]) for x, y in (known[0], (name, values)))
            raise ConfigError(f"the players of a match play one game, and these have learnt {' and '.join(texts)}")
    chosen = env_options if env_options is not None else known[0][1] if known else {}
    source = find(configs[0].env if env is None else env, chosen)
    spec, works = source.spec, "games of two players on the device do, such as pgx:connect_four"
    problems = {
        f"has {spec.num_agents} player{'s' * (spec.num_agents > 1)}": spec.num_agents != 2,
        "runs on the host": not source.is_pure,
        f"has the actions {spaces.describe(spec.action)}": not isinstance(spec.action, spaces.Discrete),
    }
    for problem in filter(problems.get, problems):
        raise ConfigError(f"{label_of(spec)} {problem}, and match does not take it; {works}")
    return source.device()


def _player(name: str, player: Any, spec: EnvSpec, acting: dict[str, Player], *, sampled: bool) -> Player:
    """Returns the player of ``_loaded`` for a game; policies that differ in their variables only share functions.

    Raises:
      ConfigError: it cannot play the game.
    """
    if isinstance(player, Player):
        return player
    if player == RANDOM:
        key, make = RANDOM, _random
    else:
        config = player.config
        key = repr((config.algorithm, *(getattr(config, field) for field in OWN), player.source.spec))
        _check(name, player, spec)
        make = _trained
    if key not in acting:
        acting[key] = make(player, spec, sampled)
    return acting[key]._replace(name=name, variables=() if player == RANDOM else player.variables)


def _random(player: str, spec: EnvSpec, sampled: bool) -> Player:
    chance = Random().make(spec)

    def act(variables: PyTree, obs: PyTree, legal: jax.Array, state: PyTree, keys: jax.Array) -> Any:
        return chance.policy(variables, obs, state, Context(keys, jnp.float32(0)))[:2]

    return Player(player, act)


def _check(name: str, policy: Policy, spec: EnvSpec) -> None:
    """Checks that a policy can play the seats of a game.

    Raises:
      ConfigError: it cannot.
    """
    if several := ", ".join(policy.source.spec.policies):
        raise ConfigError(f"{name}: which policy? It has {several}; RUN_DIR,POLICY names one")
    mine, shown = policy.observation, spec.observation
    parts = mine if isinstance(mine, dict) and isinstance(shown, dict) else {"": mine}
    theirs: Any = shown if parts is mine else {"": shown}
    for part, space in parts.items():
        if part not in theirs or spaces.describe(space) != spaces.describe(theirs[part]):
            has = f"the observation {spaces.describe(mine)}, and {label_of(spec)} shows {spaces.describe(shown)}"
            raise ConfigError(f"{name} reads {has}: match does not take it")
    if policy.source.spec.action != spec.action:
        has = f"{spaces.describe(policy.source.spec.action)}, and {label_of(spec)} has {spaces.describe(spec.action)}"
        raise ConfigError(f"{name} has the actions {has}")
    alone = policy.source.spec.num_agents == 1 and not policy.source.wrappers.policies
    if alone and Traits.of(policy.config.algorithm).core != "none":
        raise ConfigError(
            f"{name} is recurrent, and has seen only the steps of its own turns (opponents=random); "
            "one that trained with opponents=agents can play a match"
        )


def _trained(policy: Policy, spec: EnvSpec, sampled: bool) -> Player:
    """Returns the player that acts as a policy does at the end of all schedules.

    Raises:
      ConfigError: as ``check_samples``.
    """
    algorithm, space = policy.algorithm, policy.source.spec.observation
    if sampled:
        check_samples({"": algorithm})

    def act(variables: PyTree, obs: PyTree, legal: jax.Array, state: PyTree, keys: jax.Array) -> Any:
        if isinstance(space, dict):  # parts that only the critic sees are blank
            shape = legal.shape[:1]
            blank = {x: jax.tree.map(lambda y: jnp.zeros(shape + y.shape, y.dtype), part) for x, part in space.items()}
            obs = {part: obs.get(part, blank[part]) for part in space}
        draws = sampled or not algorithm.trains
        context = Context(keys if draws else None, jnp.float32(END_OF_SCHEDULES))
        return algorithm.policy(variables, obs, state, context)[:2]

    return Player("", act, (), algorithm.initial_core, algorithm.feedback)


# --- Games --------------------------------------------------------------------------------------------


def _program(
    env: DeviceEnv, players: tuple[Player, Player], games: int, opening_moves: int, seed: int
) -> Callable[[tuple[Player, Player]], Result]:
    """Compiles the games of two players, and returns a function that plays them with the variables of such players."""
    spec, chance = env.spec, Random().make(env.spec)
    game = np.arange(games)
    rows = np.stack([2 * game + game % 2, 2 * game + 1 - game % 2])  # [2, G], of each player
    back = np.argsort(rows.reshape(-1))
    pair = np.repeat(game // 2, 2)
    seat = 2 * pair + np.tile([0, 1], games)
    key = rng.stream(seed, rng.Stream.EVALUATE)
    env_key, act_key = rng.stream(key, rng.Stream.ENV), rng.stream(key, rng.Stream.ACT)

    def keys(key: jax.Array, step: jax.Array | int, index: np.ndarray) -> jax.Array:
        return rng.per_index(jax.random.fold_in(key, step), jnp.asarray(index, jnp.int32))

    def legal_of(obs: PyTree) -> jax.Array:
        size = spec.action.n  # type: ignore[union-attr]
        return jnp.ones((2 * games, size), bool) if spec.mask is None else obs[spec.mask].astype(bool)

    def of(player: int, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[rows[player]], tree)

    @jax.jit
    def begin() -> PyTree:
        state, obs = env.reset(keys(env_key, rng.RESET, pair))
        choices = legal_of(obs).sum(axis=1).reshape(games, 2) > 1
        return (state, obs, tuple(player.initial_state(games) for player in players), jnp.int32(0)), choices

    @jax.jit
    def play_on(variables: tuple[PyTree, PyTree], under_way: PyTree) -> PyTree:
        def one_step(carry: PyTree, _: None) -> Any:
            env_state, obs, states, step = carry
            legal, chosen = legal_of(obs), []
            for number, player in enumerate(players):
                mine = of(number, obs), of(number, legal), states[number]
                drawn = keys(rng.of_policy(act_key, 1 + number), step, game)
                chosen.append(player.act(variables[number], *mine, drawn))
            drawn = Context(keys(act_key, step, seat), jnp.float32(0))
            at_random = chance.policy((), obs, (), drawn)[0]  # type: ignore[arg-type]
            acted = jnp.concatenate([jnp.asarray(action, at_random.dtype) for action, _ in chosen])[back]
            action = jnp.where(step < opening_moves, at_random, acted)
            env_state, now, _ = env.step(env_state, action, keys(env_key, step, pair))
            states = tuple(
                player.feedback(chosen[number][1], of(number, action), of(number, now))
                for number, player in enumerate(players)
            )
            told = action, jnp.where(now.valid, now.reward, 0.0), now.terminated | now.truncated
            return (env_state, now.obs, states, step + 1), jax.tree.map(lambda x: x.reshape(games, 2), told)

        return jax.lax.scan(one_step, under_way, None, length=_STEPS)

    limit = max(MAX_EPISODE_STEPS, spec.max_episode_steps or 0)

    def play(players: tuple[Player, Player]) -> Result:
        under_way, choices = begin()
        told: list[Any] = []
        ended = np.zeros((games, 2), bool)
        while not ended.all() and len(told) * _STEPS < limit:
            under_way, steps = play_on((players[0].variables, players[1].variables), under_way)
            told.append(jax.device_get(steps))
            ended |= told[-1][2].any(axis=0)
        moves, reward, over = (np.concatenate(x) for x in zip(*told, strict=True))
        return _result(spec, players, np.asarray(choices), moves, reward, over)

    return play


def _result(
    spec: EnvSpec,
    players: tuple[Player, Player],
    choices: np.ndarray,
    moves: np.ndarray,
    reward: np.ndarray,
    over: np.ndarray,
) -> Result:
    """Judges games: who has the larger sum of rewards has won, and equals have drawn.

    Args:
      choices: whether each seat has several legal actions at the start, ``[G, 2]``.
      moves, reward, over: actions, rewards, and whether a seat's episode ends, ``[T, G, 2]``.
    """
    games = np.arange(over.shape[1])
    ended = np.cumsum(over, axis=0) - over > 0  # before the step
    points = np.where(ended, 0, reward.astype(np.float64)).sum(axis=0)
    if not np.isfinite(points).all():
        raise EnvError(f"{label_of(spec)}: rewards are not finite")
    taken = np.where(ended.all(axis=2, keepdims=True), -1, moves)
    length = int((taken[..., 0] >= 0).any(axis=1).sum())
    seat = games % 2  # of the first player
    score = 0.5 * (1 + np.sign(points[games, seat] - points[games, 1 - seat]))
    in_turns = bool((choices.sum(axis=1) == 1).all())
    first = choices[games, seat] if in_turns else seat == 0
    sides = Result._field_defaults["sides"] if in_turns else ("in the first seat", "in the second seat")
    by_game = taken[:length].transpose(1, 0, 2).reshape(-1, 2, length, 2)
    names, cut = (players[0].name, players[1].name), int((~over.any(axis=0)).any(axis=1).sum())
    return Result(names, score.reshape(-1, 2), first.reshape(-1, 2), by_game.astype(np.int32), sides, cut)
