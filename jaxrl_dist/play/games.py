"""Games of two players: what plays, the programs that play all games at once, and who has won.

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
from jaxrl_dist.envs.device.gymnax import HostGymnax
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import EnvError
from jaxrl_dist.play import ratings
from jaxrl_dist.settings.policies import Random
from jaxrl_dist.simulator import Simulator
from jaxrl_dist.types import Context, EnvSpec, PyTree, Timestep, Variables

_STEPS = 32
"""Steps of a dispatch."""
FILMED_STEPS = 1000
"""Steps of a game that a film shows, at most."""


class Player(NamedTuple):
    """What plays, as pure functions over a batch of ``G`` games."""

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
    """Whether ``act`` takes the games' simulator, too, as in ``Context``."""


class Result(NamedTuple):
    """``P`` pairs of games between two players.
    The first player has the first seat in the first game of a pair.
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
        # whether the first seat does
        begins = self.first.reshape(-1) ^ (np.arange(len(games)) % 2 == 1)
        return len(np.unique(np.where(begins[:, None, None], games, games[..., ::-1]), axis=0))

    @property
    def lengths(self) -> np.ndarray:
        """The steps of each game, ``[P, 2]``."""
        return (self.moves[..., 0] >= 0).sum(axis=-1)

    def counts(self, side: int | None = None) -> tuple[int, int, int]:
        """Returns the games that the first player won, drew and lost: all,
        or as one of the ``sides``.
        """
        if side is None:
            scores = self.scores
        else:
            scores = self.scores[self.first == (side == 0)]
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


class _Acting:
    """What two players do in ``games`` games at once;
    the seats of game ``g`` are the rows ``2 g`` and ``2 g + 1``.
    """

    def __init__(
        self,
        spec: EnvSpec,
        players: tuple[Player, Player],
        games: int,
        opening_moves: int,
        key: jax.Array,
    ):
        """``key``: that of all chances of both players."""
        self.spec = spec
        self.players = players
        self.games = games
        self._opening_moves = opening_moves
        self._key = key
        self._chance = Random().make(spec)
        game = np.arange(games)
        # [2, G], of each player
        self._rows = np.stack([2 * game + game % 2, 2 * game + 1 - game % 2])
        self._back = np.argsort(self._rows.reshape(-1))
        self.pair = np.repeat(game // 2, 2)
        self._seat = 2 * self.pair + np.tile([0, 1], games)

    def legal(self, obs: PyTree) -> jax.Array:
        """The legal actions of every seat, ``[2 G, n]`` bool."""
        size, mask = self.spec.action.n, self.spec.mask  # type: ignore[union-attr]
        if mask is None:
            return jnp.ones((2 * self.games, size), bool)
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
        and the players' states before they see what these lead to.
        """
        legal = self.legal(obs)
        chosen = []
        for number, player in enumerate(self.players):
            mine = self._of(number, obs), self._of(number, legal), states[number]
            drawn = _keys(rng.of_policy(self._key, 1 + number), step, np.arange(self.games))
            if simulator is None or not player.searches:
                tried = []
            else:
                tried = [self._tried(number, simulator)]
            chosen.append(player.act(variables[number], *mine, drawn, *tried))
        opening = Context(_keys(self._key, step, self._seat), jnp.float32(0))
        at_random = self._chance.policy(Variables({}, ()), obs, (), opening)[0]
        acted = jnp.concatenate([jnp.asarray(action, at_random.dtype) for action, _ in chosen])[
            self._back
        ]
        action = jnp.where(step < self._opening_moves, at_random, acted)
        return action, tuple(state for _, state in chosen)

    def see(self, states: PyTree, action: jax.Array, now: Timestep) -> tuple[PyTree, PyTree]:
        """Returns the players' states, and of each seat its action,
        its reward and whether its episode ends.
        """
        states = tuple(
            player.feedback(states[number], self._of(number, action), self._of(number, now))
            for number, player in enumerate(self.players)
        )
        told = action, jnp.where(now.valid, now.reward, 0.0), now.terminated | now.truncated
        return states, jax.tree.map(lambda x: x.reshape(self.games, 2), told)

    def _tried(self, player: int, simulator: Simulator) -> Simulator:
        return simulator._replace(state=self._of(player, simulator.state))

    def _of(self, player: int, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[self._rows[player]], tree)


def program(
    source: EnvSource, players: tuple[Player, Player], games: int, opening_moves: int, seed: int
) -> Callable[[tuple[Player, Player]], Result]:
    """Compiles the games of two players, and returns a function
    that plays them with the variables of such players.
    """
    acting = _Acting(source.spec, players, games, opening_moves, _key(seed, rng.Stream.ACT))
    play = (_on_device if source.is_pure else _on_host)(source, acting, seed)
    limit = max(MAX_EPISODE_STEPS, source.spec.max_episode_steps or 0)

    def played(players: tuple[Player, Player]) -> Result:
        told: list[Any] = []
        ended = np.zeros((games, 2), bool)
        with contextlib.closing(play((players[0].variables, players[1].variables))) as steps:
            choices = next(steps)
            for some in steps:
                told.append(some)
                ended |= some[2].any(axis=0)
                if ended.all() or sum(len(x[0]) for x in told) >= limit:
                    break
        moves, reward, over = (np.concatenate(x) for x in zip(*told, strict=True))
        return _result(
            source.spec,
            (players[0].name, players[1].name),
            np.asarray(choices),
            moves,
            reward,
            over,
        )

    return played


Steps = Generator[Any, None, None]
"""First which seats have a choice at the start, ``[G, 2]``; then some steps of all games at a time,
``[T, G, 2]``: actions, rewards, and where a seat's episode ends."""


def _on_device(source: EnvSource, acting: _Acting, seed: int) -> Callable[[PyTree], Steps]:
    """Plays games whose environment is compiled."""
    env = source.device()
    key = _key(seed, rng.Stream.ENV)

    @jax.jit
    def begin() -> PyTree:
        state, obs = env.reset(_keys(key, rng.RESET, acting.pair))
        states, choices = acting.begin(obs)
        return (state, obs, states, jnp.int32(0)), choices

    @jax.jit
    def play_on(variables: PyTree, under_way: PyTree) -> PyTree:
        def one_step(carry: PyTree, _: Any) -> Any:
            env_state, obs, states, step = carry
            searches = (
                any(player.searches for player in acting.players) and env.simulate is not None
            )
            simulator = env.simulate(env_state) if searches else None  # type: ignore[misc]
            action, states = acting.choose(variables, obs, states, step, simulator)
            env_state, now, *_ = env.step(env_state, action, _keys(key, step, acting.pair))
            states, told = acting.see(states, action, now)
            return (env_state, now.obs, states, step + 1), told

        return jax.lax.scan(one_step, under_way, None, length=_STEPS)

    def play(variables: PyTree) -> Steps:
        under_way, choices = begin()
        yield choices
        while True:
            under_way, told = play_on(variables, under_way)
            yield jax.device_get(told)

    return play


def _on_host(source: EnvSource, acting: _Acting, seed: int) -> Callable[[PyTree], Steps]:
    """Plays games that are stepped on the host, such as PettingZoo's."""
    # The environments of two runs of one seed: the first games of all pairs,
    # then their second games.
    pairs = acting.games // 2
    place = np.arange(2 * acting.games).reshape(2, pairs, 2).swapaxes(0, 1).reshape(-1)
    back = np.argsort(place)
    begin = jax.jit(acting.begin)
    choose = jax.jit(acting.choose)
    see = jax.jit(acting.see)

    def in_place(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[place], tree)

    def play(variables: PyTree) -> Steps:
        with contextlib.closing(
            source.host(acting.games, [evaluation_seed(seed)] * 2, training=False)
        ) as env:
            obs = in_place(env.reset())
            states, choices = begin(obs)
            yield choices
            for step in itertools.count():
                action, states = choose(variables, obs, states, jnp.int32(step))
                now = in_place(env.step(np.asarray(action)[back])[0])
                states, told = see(states, action, now)
                obs = now.obs
                yield tuple(x[None] for x in jax.device_get(told))

    return play


def _keys(key: jax.Array, step: jax.Array | int, index: np.ndarray) -> jax.Array:
    return rng.per_index(jax.random.fold_in(key, step), jnp.asarray(index, jnp.int32))


def pictures(env: DeviceEnv, result: Result, seed: int) -> list[Any]:
    """Draws the first game of ``result`` as its first player sees it: its start,
    and each of its first steps.

    The game is played again, with its moves and with the
    environment's chances that ``program`` drew by this seed.

    Returns:
      The pictures (of Pillow), one more than steps; of those, at most ``FILMED_STEPS``.

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


def _key(seed: int, purpose: rng.Stream) -> jax.Array:
    return rng.stream(rng.stream(seed, rng.Stream.EVALUATE), purpose)


def _result(
    spec: EnvSpec,
    names: tuple[str, str],
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
    if in_turns:
        sides = Result._field_defaults["sides"]
    else:
        sides = ("in the first seat", "in the second seat")
    by_game = taken[:length].transpose(1, 0, 2).reshape(-1, 2, length, 2)
    cut = int((~ended.any(axis=0) & ~over[-1]).any(axis=1).sum())
    return Result(
        names, score.reshape(-1, 2), first.reshape(-1, 2), by_game.astype(np.int32), sides, cut
    )
