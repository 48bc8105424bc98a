"""Games of two players: what plays, the compiled program that plays all games at once, and who has won.

Both games of a pair begin with the same random moves, by the same chances of the environment, and the players have
changed seats. So neither the opening nor the side favours a player.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng
from jaxrl_dist.actors.evaluate import MAX_EPISODE_STEPS
from jaxrl_dist.actors.film import picture
from jaxrl_dist.envs.base import DeviceEnv, label_of
from jaxrl_dist.envs.device.gymnax import HostGymnax
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
    """``(variables, obs, legal, state, keys) -> (actions, state)``: observations ``[G, ...]`` of the player's seats,
    legal actions ``[G, n]`` bool, the player's state ``[G, ...]`` and keys ``[G]``; actions are integers ``[G]``. A
    player acts at every step: one who is not on the move has one legal action, which does nothing."""
    variables: PyTree = ()
    """An argument of the compiled program, such as parameters."""
    initial_state: Callable[[int], PyTree] = lambda num_games: ()
    """``(G) -> state`` at the start of a game."""
    feedback: Callable[[PyTree, jax.Array, Timestep], PyTree] = lambda state, action, step: state
    """``(state, action, step) -> state``, with the actions that were taken, which are random in the opening."""
    searches: bool = False
    """Whether ``act`` takes the games' simulator, too, as in ``Context``."""


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

    @property
    def lengths(self) -> np.ndarray:
        """The steps of each game, ``[P, 2]``."""
        return (self.moves[..., 0] >= 0).sum(axis=-1)

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


def program(
    env: DeviceEnv, players: tuple[Player, Player], games: int, opening_moves: int, seed: int
) -> Callable[[tuple[Player, Player]], Result]:
    """Compiles the games of two players, and returns a function that plays them with the variables of such players."""
    spec, chance = env.spec, Random().make(env.spec)
    game = np.arange(games)
    rows = np.stack([2 * game + game % 2, 2 * game + 1 - game % 2])  # [2, G], of each player
    back = np.argsort(rows.reshape(-1))
    pair = np.repeat(game // 2, 2)
    seat = 2 * pair + np.tile([0, 1], games)
    env_key, act_key = (_key(seed, purpose) for purpose in (rng.Stream.ENV, rng.Stream.ACT))

    def keys(key: jax.Array, step: jax.Array | int, index: np.ndarray) -> jax.Array:
        return rng.per_index(jax.random.fold_in(key, step), jnp.asarray(index, jnp.int32))

    def legal_of(obs: PyTree) -> jax.Array:
        size = spec.action.n  # type: ignore[union-attr]
        return jnp.ones((2 * games, size), bool) if spec.mask is None else obs[spec.mask].astype(bool)

    def of(player: int, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[rows[player]], tree)

    def planned(player: int, env_state: PyTree) -> tuple[Simulator, ...]:
        if not players[player].searches or env.simulate is None:
            return ()
        simulator = env.simulate(env_state)
        return (simulator._replace(state=of(player, simulator.state)),)

    @jax.jit
    def begin() -> PyTree:
        state, obs = env.reset(keys(env_key, rng.RESET, pair))
        choices = legal_of(obs).sum(axis=1).reshape(games, 2) > 1
        return (state, obs, tuple(player.initial_state(games) for player in players), jnp.int32(0)), choices

    @jax.jit
    def play_on(variables: tuple[PyTree, PyTree], under_way: PyTree) -> PyTree:
        def one_step(carry: PyTree, _: Any) -> Any:
            env_state, obs, states, step = carry
            legal, chosen = legal_of(obs), []
            for number, player in enumerate(players):
                mine = of(number, obs), of(number, legal), states[number]
                drawn = keys(rng.of_policy(act_key, 1 + number), step, game)
                chosen.append(player.act(variables[number], *mine, drawn, *planned(number, env_state)))
            opening = Context(keys(act_key, step, seat), jnp.float32(0))
            at_random = chance.policy(Variables({}, ()), obs, (), opening)[0]
            acted = jnp.concatenate([jnp.asarray(action, at_random.dtype) for action, _ in chosen])[back]
            action = jnp.where(step < opening_moves, at_random, acted)
            env_state, now, *_ = env.step(env_state, action, keys(env_key, step, pair))
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
        return _result(spec, (players[0].name, players[1].name), np.asarray(choices), moves, reward, over)

    return play


def pictures(env: DeviceEnv, result: Result, seed: int) -> list[Any]:
    """Draws the first game of ``result`` as its first player sees it: its start, and each of its first steps.

    The game is played again, with its moves and with the environment's chances that ``program`` drew by this seed.

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
    sides = Result._field_defaults["sides"] if in_turns else ("in the first seat", "in the second seat")
    by_game = taken[:length].transpose(1, 0, 2).reshape(-1, 2, length, 2)
    cut = int((~ended.any(axis=0) & ~over[-1]).any(axis=1).sum())
    return Result(names, score.reshape(-1, 2), first.reshape(-1, 2), by_game.astype(np.int32), sides, cut)
