"""Games of two players: who plays, the programs that play all games together, and who has won.

Both games of a pair begin with the same random moves, by the same chances of the environment, and
the players have changed seats. So neither the opening nor the side favours a player.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng
from jaxrl_dist.actors.evaluate import MAX_EPISODE_STEPS, evaluation_seed
from jaxrl_dist.actors.film import picture
from jaxrl_dist.envs.base import DeviceEnv, label_of
from jaxrl_dist.envs.device.hosted import HostGymnax
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import EnvError
from jaxrl_dist.play import ratings
from jaxrl_dist.settings.still import Random
from jaxrl_dist.simulator import Simulator
from jaxrl_dist.types import Array, Context, EnvSpec, PyTree, Timestep, Variables

_STEPS = 32
"""Steps of a dispatch."""
FILMED_STEPS = 1000
"""Steps of a game that a film shows, at most."""


class Rules(NamedTuple):
    """How two players meet."""

    games: int
    """Number of games; an even one."""
    opening_moves: int
    """Random moves of both players together, with which a game begins."""
    seed: int


class Player(NamedTuple):
    """A player, as pure functions over a batch of ``G`` games."""

    name: str
    act: Callable[..., tuple[jax.Array, PyTree]]
    """``(variables, obs, legal, state, keys) -> (actions, state)``: observations ``[G, ...]`` of
    the player's seats, legal actions ``[G, n]`` bool, the player's state ``[G, ...]`` and keys
    ``[G]``; actions are integers ``[G]``. A player acts at every step: one who is not on the move
    has one legal action, which does nothing."""
    variables: PyTree = ()
    """An argument of the compiled program, such as parameters."""
    initial_state: Callable[[int], PyTree] = lambda num_games: ()
    """``(G) -> state`` at the start of a game."""
    feedback: Callable[[PyTree, jax.Array, Timestep], PyTree] = lambda state, action, step: state
    """``(state, action, step) -> state``, with the actions that were taken,
    which are random in the opening."""
    searches: bool = False
    """Whether ``act`` also takes the games' simulator, as in ``Context``."""


class Result(NamedTuple):
    """``P`` pairs of games between two players; the first player has the first seat in the first
    game of a pair.
    """

    players: tuple[str, str]
    scores: np.ndarray
    """[P, 2] float64, of the first player: 1 won, 0.5 drawn, 0 lost."""
    first: np.ndarray
    """[P, 2] bool: whether the first player had the first of the ``sides``."""
    moves: np.ndarray
    """[P, 2, T, 2] int32, the actions by seat and not by player; -1 after the game."""
    sides: tuple[str, str] = ("moving first", "moving second")
    cut: int = 0
    """Games that had not ended within the step limit; their rewards until then count."""

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
        # in the second game of a pair, the first player has the second seat
        first_seat_begins = self.first.reshape(-1) ^ (np.arange(len(games)) % 2 == 1)
        in_turn = np.where(first_seat_begins[:, None, None], games, games[..., ::-1])
        return len(np.unique(in_turn, axis=0))

    @property
    def lengths(self) -> np.ndarray:
        """The steps of each game, ``[P, 2]``."""
        return (self.moves[..., 0] >= 0).sum(axis=-1)

    def counts(self, side: int | None = None) -> tuple[int, int, int]:
        """Returns the games that the first player won, drew and lost: all,
        or as one of the ``sides``.
        """
        scores = self.scores
        if side is not None:
            scores = scores[self.first == (side == 0)]
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
            **self._outcomes(),
            "sides": {name: self._outcomes(side) for side, name in enumerate(self.sides)},
        }

    def _outcomes(self, side: int | None = None) -> dict[str, int]:
        return dict(zip(("won", "drawn", "lost"), self.counts(side), strict=True))


class _Steps(NamedTuple):
    """Some steps of all games, ``[T, G, 2]`` by seat."""

    action: Array
    reward: Array
    over: Array
    """Whether the seat's episode ends."""


class _Pair:
    """Two players in all their games; the seats of game ``g`` are the rows ``2 g`` and
    ``2 g + 1``, where the players sit in turn.
    """

    def __init__(self, spec: EnvSpec, players: tuple[Player, Player], rules: Rules):
        self.spec = spec
        self.players = players
        self.games = rules.games
        self._opening_moves = rules.opening_moves
        self._key = _key(rules.seed, rng.Stream.ACT)
        self._random = Random().make(spec)
        game = np.arange(self.games)
        # [2, G], of each player
        self._rows = np.stack([2 * game + game % 2, 2 * game + 1 - game % 2])
        self._by_seat = np.argsort(self._rows.reshape(-1))
        self.pair = np.repeat(game // 2, 2)
        self._seat = 2 * self.pair + np.tile([0, 1], self.games)

    def legal(self, obs: PyTree) -> jax.Array:
        """The legal actions of every seat, ``[2 G, n]`` bool."""
        mask = self.spec.mask
        if mask is None:
            return jnp.ones((2 * self.games, self.spec.action.n), bool)  # type: ignore[union-attr]
        return jnp.asarray(obs[mask], bool)

    def begin(self, obs: PyTree) -> tuple[PyTree, jax.Array]:
        """Returns the players' first states,
        and which seats have a choice at the start, ``[G, 2]``.
        """
        choices = self.legal(obs).sum(axis=1).reshape(self.games, 2) > 1
        return tuple(player.initial_state(self.games) for player in self.players), choices

    def choose(
        self,
        variables: PyTree,
        obs: PyTree,
        states: PyTree,
        step: jax.Array,
        simulator: Simulator | None = None,
    ) -> tuple[jax.Array, PyTree]:
        """Returns the actions of all seats ``[2 G]``,
        and the players' states before they see the next observations.
        """
        legal = self.legal(obs)
        actions = []
        next_states = []
        for number, player in enumerate(self.players):
            own = (self._of(number, obs), self._of(number, legal), states[number])
            keys = _keys(rng.of_policy(self._key, 1 + number), step, np.arange(self.games))
            if simulator is None or not player.searches:
                action, state = player.act(variables[number], *own, keys)
            else:
                model = simulator._replace(state=self._of(number, simulator.state))
                action, state = player.act(variables[number], *own, keys, model)
            actions.append(action)
            next_states.append(state)
        context = Context(_keys(self._key, step, self._seat), jnp.float32(0))
        at_random, *_ = self._random.policy(Variables({}, ()), obs, (), context)
        by_player = jnp.concatenate([jnp.asarray(action, at_random.dtype) for action in actions])
        action = jnp.where(step < self._opening_moves, at_random, by_player[self._by_seat])
        return action, tuple(next_states)

    def see(self, states: PyTree, action: jax.Array, step: Timestep) -> tuple[PyTree, _Steps]:
        """Returns the players' states after a step, and what it was to each seat, ``[G, 2]``."""
        states = tuple(
            player.feedback(states[number], self._of(number, action), self._of(number, step))
            for number, player in enumerate(self.players)
        )
        reward = jnp.where(step.valid, step.reward, 0.0)
        seen = _Steps(action, reward, step.terminated | step.truncated)
        return states, jax.tree.map(lambda leaf: leaf.reshape(self.games, 2), seen)

    def _of(self, player: int, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[self._rows[player]], tree)


Course = Generator[Any, None, None]
"""The course of all games: first which seats have a choice at the start, ``[G, 2]``; then
``_Steps`` without end."""


def program(
    source: EnvSource, players: tuple[Player, Player], rules: Rules
) -> Callable[[tuple[Player, Player]], Result]:
    """Compiles the games of two players, and returns a function
    that plays them with the variables of such players.
    """
    pair = _Pair(source.spec, players, rules)
    start = (_on_device if source.is_pure else _on_host)(source, pair, rules.seed)
    limit = max(MAX_EPISODE_STEPS, source.spec.max_episode_steps or 0)

    def play(players: tuple[Player, Player]) -> Result:
        chunks = list[_Steps]()
        ended = np.zeros((rules.games, 2), bool)
        with contextlib.closing(start((players[0].variables, players[1].variables))) as course:
            choices = np.asarray(next(course))
            for chunk in course:
                chunks.append(chunk)
                ended |= chunk.over.any(axis=0)
                if ended.all() or sum(len(chunk.over) for chunk in chunks) >= limit:
                    break
        steps = _Steps(*(np.concatenate(arrays) for arrays in zip(*chunks, strict=True)))
        return _judge(source.spec, (players[0].name, players[1].name), choices, steps)

    return play


def _on_device(source: EnvSource, pair: _Pair, seed: int) -> Callable[[PyTree], Course]:
    """Plays games whose environment is compiled."""
    env = source.device()
    key = _key(seed, rng.Stream.ENV)
    searches = any(player.searches for player in pair.players)
    simulate = env.simulate if searches else None

    @jax.jit
    def begin() -> PyTree:
        state, obs = env.reset(_keys(key, rng.RESET, pair.pair))
        states, choices = pair.begin(obs)
        return (state, obs, states, jnp.int32(0)), choices

    @jax.jit
    def advance(variables: PyTree, position: PyTree) -> PyTree:
        def one_step(position: PyTree, inputs: None) -> tuple[PyTree, _Steps]:
            env_state, obs, states, number = position
            simulator = simulate(env_state) if simulate else None
            action, states = pair.choose(variables, obs, states, number, simulator)
            env_state, step, *_ = env.step(env_state, action, _keys(key, number, pair.pair))
            states, seen = pair.see(states, action, step)
            return (env_state, step.obs, states, number + 1), seen

        return jax.lax.scan(one_step, position, None, length=_STEPS)

    def start(variables: PyTree) -> Course:
        position, choices = begin()
        yield choices
        while True:
            position, chunk = advance(variables, position)
            yield jax.device_get(chunk)

    return start


def _on_host(source: EnvSource, pair: _Pair, seed: int) -> Callable[[PyTree], Course]:
    """Plays games that are stepped on the host, such as PettingZoo's."""
    # The environments of two runs of one seed: the first games of all pairs,
    # then their second games.
    pairs = pair.games // 2
    to_pair = np.arange(2 * pair.games).reshape(2, pairs, 2).swapaxes(0, 1).reshape(-1)
    to_env = np.argsort(to_pair)
    begin = jax.jit(pair.begin)
    choose = jax.jit(pair.choose)
    see = jax.jit(pair.see)

    def in_pairs(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[to_pair], tree)

    def start(variables: PyTree) -> Course:
        seeds = [evaluation_seed(seed)] * 2
        with contextlib.closing(source.host(pair.games, seeds, training=False)) as env:
            obs = in_pairs(env.reset())
            states, choices = begin(obs)
            yield choices
            for number in itertools.count():
                action, states = choose(variables, obs, states, jnp.int32(number))
                step = in_pairs(env.step(np.asarray(action)[to_env])[0])
                states, seen = see(states, action, step)
                obs = step.obs
                yield _Steps(*(array[None] for array in jax.device_get(seen)))

    return start


def _key(seed: int, purpose: rng.Stream) -> jax.Array:
    return rng.stream(rng.stream(seed, rng.Stream.EVALUATE), purpose)


def _keys(key: jax.Array, step: jax.Array | int, index: np.ndarray) -> jax.Array:
    return rng.per_index(jax.random.fold_in(key, step), jnp.asarray(index, jnp.int32))


def pictures(env: DeviceEnv, result: Result, seed: int) -> list[Any]:
    """Draws the first game of ``result`` as its first player sees it.

    The game is played again, with its moves and with the
    environment's chances that ``program`` drew by this seed.

    Returns:
      The pictures (of Pillow) of its start and of its first ``FILMED_STEPS`` steps.

    Raises:
      ConfigError: as ``DrawnEnv.render``.
    """
    again = HostGymnax(env, 2, _key(seed, rng.Stream.ENV))
    again.reset()
    drawn = [picture(again, 0)]
    for action in result.moves[0, 0, : min(result.lengths[0, 0], FILMED_STEPS)]:
        again.step(action)
        drawn.append(picture(again, 0))
    return drawn


def _judge(spec: EnvSpec, names: tuple[str, str], choices: np.ndarray, steps: _Steps) -> Result:
    """Judges games: the player with the larger sum of rewards has won; equal sums are a draw.

    Args:
      choices: whether each seat has several legal actions at the start, ``[G, 2]``.
      steps: of whole games.
    """
    games = np.arange(steps.over.shape[1])
    ended = np.cumsum(steps.over, axis=0) - steps.over > 0  # before the step
    points = np.where(ended, 0, steps.reward.astype(np.float64)).sum(axis=0)
    if not np.isfinite(points).all():
        raise EnvError(f"{label_of(spec)}: rewards are not finite")
    seat = games % 2  # of the first player
    score = 0.5 * (1 + np.sign(points[games, seat] - points[games, 1 - seat]))
    in_turns = bool((choices.sum(axis=1) == 1).all())
    if in_turns:
        first = choices[games, seat]
        sides = Result._field_defaults["sides"]
    else:
        first = seat == 0
        sides = ("in the first seat", "in the second seat")
    moves = np.where(ended.all(axis=2, keepdims=True), -1, steps.action)
    length = int((moves[..., 0] >= 0).any(axis=1).sum())
    by_game = moves[:length].transpose(1, 0, 2).reshape(-1, 2, length, 2)
    cut = int((~ended.any(axis=0) & ~steps.over[-1]).any(axis=1).sum())
    return Result(
        names, score.reshape(-1, 2), first.reshape(-1, 2), by_game.astype(np.int32), sides, cut
    )
