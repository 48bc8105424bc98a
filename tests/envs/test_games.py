"""Games of several players (Pgx): every player is an agent."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from test_libraries import needs

from jaxrl_dist import load_policy
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.device import libraries
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError

NUM_ENVS, NUM_STEPS = 4, 60
LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
"""Fields of tic-tac-toe that win."""

pytestmark = pytest.mark.filterwarnings("ignore")


def played(env: Any) -> tuple[Any, np.ndarray, jax.Array, Any]:
    """Plays legal actions at random: the first observations, actions ``[T, B * k]``, keys,
    and the time steps.
    """
    rows = NUM_ENVS * env.spec.num_agents

    def play(keys: jax.Array) -> Any:
        def step(carry: Any, keys: jax.Array) -> Any:
            state, obs = carry
            logits = jnp.where(obs["mask"], 0.0, -jnp.inf)
            action = jax.vmap(jax.random.categorical)(
                jax.vmap(jax.random.fold_in, (0, None))(keys, 1), logits
            )
            state, now, _ = env.step(state, action, keys)
            return (state, now.obs), (action, now)

        state, obs = env.reset(keys[0])
        return obs, *jax.lax.scan(step, (state, obs), keys[1:])[1]

    keys = jax.random.split(jax.random.key(0), (NUM_STEPS + 1, rows))
    first, actions, steps = jax.device_get(jax.jit(play)(keys))
    return first, actions, keys, steps


def pgx_games(
    env_id: str, index: int, actions: np.ndarray, keys: jax.Array
) -> Iterator[tuple[Any, ...]]:
    """Plays the same moves by Pgx alone: ``(state, began)`` at the start, then after each step."""
    import pgx

    env: Any = pgx.make(env_id)
    init, move = jax.jit(env.init), jax.jit(env.step)
    own = jax.random.key_data(keys[:, index * env.num_players])
    split = jax.vmap(jax.random.split)(own)
    state = init(own[0])
    yield state, True
    for t in range(NUM_STEPS):
        if state.terminated:
            state = init(split[t + 1, 1])
            yield state, True
        else:
            choice = actions[t, index * env.num_players + int(state.current_player)]
            state = move(state, choice, split[t + 1, 0])
            yield state, False


@pytest.mark.parametrize(
    "env_id", runs.cases(["tic_tac_toe", "leduc_holdem", "sparrow_mahjong"], "tic_tac_toe")
)
def test_a_game_is_played_as_pgx_plays_it(env_id: str) -> None:
    needs("pgx")
    import pgx

    env, game = find(f"pgx:{env_id}").device(), pgx.make(env_id)  # type: ignore[arg-type]
    players = env.spec.num_agents
    assert players == game.num_players
    first, actions, keys, steps = played(env)
    observe, begins = jax.jit(game.observe), set()
    for index in range(NUM_ENVS):
        with libraries.theirs():
            states = [
                (jax.device_get(state), began)
                for state, began in pgx_games(env_id, index, actions, keys)
            ]
            views = [
                [np.asarray(observe(state, player)) for player in range(players)]
                for state, _ in states
            ]
        for t, (state, began) in enumerate(states):
            for player in range(players):
                row = index * players + player
                obs, now = first, (0.0, False, False)
                if t:
                    obs = jax.tree.map(lambda x, t=t: x[t - 1], steps.obs)
                    now = (
                        steps.reward[t - 1, row],
                        steps.terminated[t - 1, row],
                        steps.valid[t - 1, row],
                    )
                np.testing.assert_array_equal(obs["observation"][row], views[t][player])
                legal = (
                    np.arange(env.spec.action.n) == 0
                    if player != state.current_player
                    else state.legal_action_mask
                )
                np.testing.assert_array_equal(obs["mask"][row], legal)
                reward = 0.0 if began else state.rewards[player]
                assert now == (reward, bool(state.terminated), not began)
            begins |= {int(state.current_player)} if began else set()
    assert not steps.truncated.any() and steps.terminated.any()
    assert begins == set(range(players)), "each player begins some games"


def test_rewards_and_views_belong_to_the_player() -> None:
    """Tic-tac-toe, judged by its rules: whose stones are in a row has won, whichever player
    began.
    """
    needs("pgx")
    first, _, _, steps = played(find("pgx:tic_tac_toe").device())
    boards = np.concatenate([first["observation"][None], steps.obs["observation"]]).reshape(
        -1, NUM_ENVS, 2, 9, 2
    )
    own, others = boards[..., 0], boards[..., 1]
    np.testing.assert_array_equal(own[:, :, 0], others[:, :, 1])
    won, lost = (stones[..., np.array(LINES)].all(-1).any(-1) for stones in (own, others))
    over = won | lost | (own | others).all(-1)
    np.testing.assert_array_equal(steps.terminated.reshape(-1, NUM_ENVS, 2), over[1:])
    reward = (won.astype(float) - lost)[1:]
    np.testing.assert_array_equal(steps.reward.reshape(-1, NUM_ENVS, 2), reward)
    assert {-1.0, 1.0} <= set(reward[..., 0].flat) == set(reward[..., 1].flat)
    # Who is on the move, and only who is, may choose among the empty fields, and whoever began is
    # so when stones are equally many.
    masks = np.concatenate([first["mask"][None], steps.obs["mask"]]).reshape(-1, NUM_ENVS, 2, 9)
    going = ~over.any(-1)
    moves = (masks == ~(own | others)).all(-1) & ~(masks == (np.arange(9) == 0)).all(-1)
    last = (own | others).sum(-1) == 8  # then one field is free, and it may be field 0
    assert (moves.sum(-1) == 1)[going & ~last.any(-1)].all()
    count = own.sum(-1)
    level = going & (count[..., 0] == count[..., 1]) & (count[..., 0] > 0)
    assert set(moves[level].argmax(-1)) == {0, 1}, "either player begins"
    behind = going & ~last.any(-1) & (count[..., 0] != count[..., 1])
    np.testing.assert_array_equal(moves[behind].argmax(-1), count[behind].argmin(-1))


def test_options_of_games() -> None:
    needs("pgx")
    assert find("pgx:tic_tac_toe", {"opponents": "random"}).spec.num_agents == 1
    seen = find("pgx:tic_tac_toe", {"state": "true"}).spec.observation
    assert isinstance(seen, dict) and seen["state"].shape == (36,)
    each = find(
        "pgx:tic_tac_toe", wrappers=Wrappers(policies={"a": "player_0", "b": "player_1"})
    ).spec
    assert set(each.policies) == {"a", "b"}
    for options, message in (
        ({"opponents": "me"}, "opponents=me is unknown; agents, random and self work"),
        ({"opponents": "random", "state": "true"}, "state=true needs opponents=agents"),
        ({"opponent": "random"}, "has no option 'opponent' (did you mean 'opponents'?)"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            find("pgx:tic_tac_toe", options)
    with pytest.raises(ConfigError, match="has no option 'opponents'"):
        find("pgx:2048", {"opponents": "random"})


# --- Self-play ------------------------------------------------------------------------------------

Stones = frozenset[int]


def in_a_row(stones: Stones) -> bool:
    return any(stones.issuperset(line) for line in LINES)


def free(own: Stones, other: Stones) -> list[int]:
    return [field for field in range(9) if field not in own | other]


@functools.cache
def worth(own: Stones, other: Stones) -> int:
    """What tic-tac-toe pays the player on the move if both play perfectly: minimax."""
    if in_a_row(other):
        return -1
    return max((-worth(other, own | {field}) for field in free(own, other)), default=0)


def perfect_moves(own: Stones, other: Stones) -> list[int]:
    return [
        field for field in free(own, other) if -worth(other, own | {field}) == worth(own, other)
    ]


def results(
    choose: Callable[[Stones, Stones], int], own: Stones, other: Stones, mine: bool
) -> dict[int, int]:
    """The numbers of games with each result,
    of all games against a player whose every move is a perfect one.
    """
    if in_a_row(own) or in_a_row(other) or not free(own, other):
        return {in_a_row(own) - in_a_row(other): 1}
    if mine:
        return results(choose, own | {choose(own, other)}, other, False)
    counts: dict[int, int] = {}
    for field in perfect_moves(other, own):
        for result, count in results(choose, own, other | {field}, True).items():
            counts[result] = counts.get(result, 0) + count
    return counts


def test_perfect_players_draw() -> None:
    def choose(own: Stones, other: Stones) -> int:
        return perfect_moves(own, other)[-1]

    none: Stones = frozenset()
    assert worth(none, none) == 0 and worth(frozenset({0, 4}), frozenset({1, 2})) == 1
    assert set(results(choose, none, none, True)) == set(results(choose, none, none, False)) == {0}
    assert -1 in results(lambda own, other: free(own, other)[-1], none, none, False)


TIC_TAC_TOE = (
    "--env pgx:tic_tac_toe --total-env-steps 2000000 --num-devices 1 --evaluation-episodes 0"
)
SELF_PLAY = {
    "shared": ("ppo --learning-rate-schedule linear --learning-rate-steps 2000000", None),
    "copy": (
        "--policy new=ppo:player_0 --policy old=copy(new,100):player_1 --new.learning-rate-schedule linear "
        "--new.learning-rate-steps 2000000",
        "new",
    ),
}
"""Whose step sizes fall to zero: with a constant one,
the best moves of a run that has learnt still change."""


@pytest.mark.slow
@pytest.mark.parametrize("how, seed", [("shared", 0), ("shared", 1), ("shared", 2), ("copy", 0)])
def test_self_play_never_loses_to_a_perfect_player(how: str, seed: int, tmp_path: Path) -> None:
    needs("pgx")
    flags, name = SELF_PLAY[how]
    policy = load_policy(
        runs.train(f"{flags} {TIC_TAC_TOE} --seed {seed}", tmp_path / "run"), policy=name
    )

    @functools.cache
    def choose(own: Stones, other: Stones) -> int:
        board = np.array([[field in stones for stones in (own, other)] for field in range(9)])
        mask = ~board.any(-1)
        return int(policy({"observation": board.reshape(1, 3, 3, 2), "mask": mask[None]})[0][0])

    for begins in (True, False):
        assert -1 not in results(choose, frozenset(), frozenset(), begins)


def search(env: Any, state: Any, key: jax.Array) -> jax.Array:
    """A move that wins at once if there is one, else any legal one: a search of one ply."""
    rewards = jax.vmap(lambda action: env.step(state, action).rewards[state.current_player])(
        jnp.arange(env.num_actions)
    )
    worth = jnp.where(state.legal_action_mask, rewards, -jnp.inf)
    return jax.random.categorical(key, jnp.where(worth == worth.max(), 0.0, -jnp.inf))


def at_random(env: Any, state: Any, key: jax.Array) -> jax.Array:
    return jax.random.categorical(key, jnp.where(state.legal_action_mask, 0.0, -jnp.inf))


def rewards_against(
    env: Any, policy: Any, opponent: Callable[..., jax.Array], games: int
) -> np.ndarray:
    """What a policy gets as player 0 in games of which Pgx draws who begins, ``[games]``."""
    choose, step = jax.jit(jax.vmap(functools.partial(opponent, env))), jax.jit(jax.vmap(env.step))
    state = jax.vmap(env.init)(jax.random.split(jax.random.key(0), games))
    total, moves = np.zeros(games), 0
    while not state.terminated.all():
        obs = {"observation": state.observation, "mask": state.legal_action_mask}
        other = choose(state, jax.random.split(jax.random.key(moves), games))
        state = step(state, jnp.where(state.current_player == 0, policy(obs)[0], other))
        total, moves = total + state.rewards[:, 0], moves + 1
    return total


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_self_play_wins_connect_four(seed: int, tmp_path: Path) -> None:
    needs("pgx")
    import pgx

    flags = "--torso minatar --num-epochs 2 --total-env-steps 2000000 --num-devices 1 --evaluation-episodes 0"
    policy = load_policy(
        runs.train(f"ppo --env pgx:connect_four {flags} --seed {seed}", tmp_path / "run")
    )
    for opponent in (at_random, search):
        with libraries.theirs():
            rewards = rewards_against(pgx.make("connect_four"), policy, opponent, 100)
        assert (rewards > 0).sum() >= 95
