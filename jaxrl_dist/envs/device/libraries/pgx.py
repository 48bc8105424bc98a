"""Pgx: board games and others (Koyamada et al. 2023, https://arxiv.org/abs/2303.17503)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pgx
from gymnasium import spaces

from jaxrl_dist import rng
from jaxrl_dist.envs.agents.groups import Team
from jaxrl_dist.envs.device.libraries import Adapted, Step, bool_space, theirs
from jaxrl_dist.envs.env_options import parse_options
from jaxrl_dist.envs.native import Agent
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.simulator import Simulated, Simulator
from jaxrl_dist.types import PyTree

PLAYER = 0
"""The player that learns if the opponents are random; pgx draws which player begins."""
OPPONENTS = ("agents", "random", "self")


def ids() -> list[str]:
    return list(pgx.available_envs())


def make(env_id: str, options: Mapping[str, str]) -> Adapted | Team:
    """Makes a game; if it has several players, each is an agent.

    Options of games with several players are ``opponents`` (``random``: the agent is player 0, and
    the others choose legal actions at random; ``self``: one agent moves for both players) and
    ``state`` (whether observations have a part ``state``: those of all players).

    Raises:
      ConfigError: an option is unknown, or one agent cannot move for the players,
        who are more than two.
    """
    env = pgx.make(env_id)
    name = f"pgx:{env_id}"
    if env.num_players == 1:
        parse_options(name, options, {})
        return against_random(env)
    values = {"opponents": OPPONENTS[0], "state": False}
    values |= parse_options(name, options, values)
    opponents = values["opponents"]
    if opponents not in OPPONENTS:
        raise ConfigError(
            f"{name}: opponents={opponents} is unknown; {', '.join(OPPONENTS[:-1])} and "
            f"{OPPONENTS[-1]} work"
        )
    if opponents == "agents":
        return Team(Players(env), "game", shows_state=bool(values["state"]))
    if values["state"]:
        raise ConfigError(f"{name}: state=true needs opponents=agents")
    if opponents == "random":
        return against_random(env)
    if env.num_players > 2:
        raise ConfigError(
            f"{name}: opponents=self needs a game of 2 players, but this one has {env.num_players}"
        )
    return against_itself(env)


class Players:
    """A game whose players are agents, in JaxMARL's style; see ``groups.Team``.

    All players act at every step. Except for the player whose turn it is, action 0 is the only
    legal one and has no effect. Each player gets its rewards after every move, and sees the game
    from its side; pgx draws which player begins.
    """

    def __init__(self, env: pgx.Env) -> None:
        self.env = env
        self.agents = [f"player_{player}" for player in range(env.num_players)]
        observation, _ = jax.eval_shape(self.reset, jax.eval_shape(lambda: jax.random.PRNGKey(0)))
        self._observation = box(observation[self.agents[0]])
        self.simulate = None if env.num_players > 2 else self._simulate
        """``(state [R, ...]) -> simulator`` of single moves,
        in which both players are as ``against_itself``."""

    def observation_space(self, agent: Agent) -> spaces.Box:
        return self._observation

    def action_space(self, agent: Agent) -> spaces.Discrete:
        return spaces.Discrete(self.env.num_actions)

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], PyTree]:
        with theirs():
            state = self.env.init(key)
            return self._observations(state), state

    def step_env(
        self, key: jax.Array, state: pgx.State, actions: Mapping[str, jax.Array]
    ) -> tuple[PyTree, PyTree, PyTree, PyTree, PyTree]:
        with theirs():
            action = jnp.stack([actions[agent] for agent in self.agents])[state.current_player]
            state = self.env.step(state, action, key)
            rewards = dict(zip(self.agents, state.rewards, strict=True))
            over = dict.fromkeys([*self.agents, "__all__"], state.terminated | state.truncated)
            return self._observations(state), state, rewards, over, {}

    def get_avail_actions(self, state: pgx.State) -> dict[str, jax.Array]:
        legal = state.legal_action_mask
        passes = jnp.arange(len(legal)) == 0
        return {
            agent: jnp.where(state.current_player == player, legal, passes)
            for player, agent in enumerate(self.agents)
        }

    def _simulate(self, state: PyTree) -> Simulator:
        game = against_itself(self.env)

        def step(state: pgx.State, action: jax.Array, key: jax.Array) -> Simulated:
            with theirs():
                then = game.step(rng.raw(key), state, action)
            turn = jnp.where(state.current_player == then.state.current_player, 1.0, -1.0)
            discount = jnp.where(then.terminated, 0.0, turn)
            return Simulated(then.state, then.obs, jnp.float32(then.reward), discount)

        return Simulator(jax.vmap(without_observation)(state), jax.tree_util.Partial(step))

    def _observations(self, state: pgx.State) -> dict[str, jax.Array]:
        return {
            agent: self.env.observe(state, jnp.int32(player))
            for player, agent in enumerate(self.agents)
        }


def against_random(env: pgx.Env) -> Adapted:
    """Makes a game in which all players but player 0 choose legal actions at random.

    A step is an action of player 0, and actions of the others until it is player 0's turn again.
    The observation's part ``mask`` has the legal actions.
    """

    def others_play(key: jax.Array, state: pgx.State) -> pgx.State:
        """Returns the state at player 0's next turn, with the rewards ``[players]`` since its
        last.
        """

        def waits(carry: tuple[jax.Array, pgx.State]) -> jax.Array:
            _, state = carry
            return (state.current_player != PLAYER) & ~(state.terminated | state.truncated)

        def play(carry: tuple[jax.Array, pgx.State]) -> tuple[jax.Array, pgx.State]:
            key, state = carry
            key, choice, chance = jax.random.split(key, 3)
            action = jax.random.categorical(
                choice, jnp.where(state.legal_action_mask, 0.0, -jnp.inf)
            )
            new = env.step(state, action, chance)
            return key, new.replace(rewards=state.rewards + new.rewards)

        if env.num_players == 1:
            return state
        return jax.lax.while_loop(waits, play, (key, state))[1]

    def observed(state: pgx.State) -> PyTree:
        if env.num_players == 1:
            obs = env.observe(state)
        else:
            obs = env.observe(state, jnp.int32(PLAYER))
        return {"observation": obs, "mask": state.legal_action_mask}

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        first, then = jax.random.split(key)
        state = others_play(then, env.init(first))
        return observed(state), state

    def step(key: jax.Array, state: pgx.State, action: jax.Array) -> Step:
        chance, then = jax.random.split(key)
        state = others_play(then, env.step(state, action, chance))
        return Step(
            observed(state), state, state.rewards[PLAYER], state.terminated, state.truncated
        )

    return _adapted(env, reset, step)


def against_itself(env: pgx.Env) -> Adapted:
    """Makes a game of two players in which one agent moves for both.

    A step is a move. Observation and mask belong to the player who is to move, and the reward to
    the player who has moved.
    """

    def observed(state: pgx.State) -> PyTree:
        return {"observation": env.observe(state), "mask": state.legal_action_mask}

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        state = without_observation(env.init(key))
        return observed(state), state

    def step(key: jax.Array, state: pgx.State, action: jax.Array) -> Step:
        new = without_observation(env.step(state, action, key))
        return Step(
            observed(new), new, new.rewards[state.current_player], new.terminated, new.truncated
        )

    return _adapted(env, reset, step, lambda state: state.current_player)


def without_observation(state: pgx.State) -> pgx.State:
    """Returns a game's state without the observation, most of its bytes,
    which follows from the rest.
    """
    return state.replace(observation=jnp.zeros(0))


def _adapted(
    env: pgx.Env,
    reset: Callable[[jax.Array], tuple[PyTree, PyTree]],
    step: Callable[[jax.Array, PyTree, PyTree], Step],
    side: Callable[[PyTree], jax.Array] | None = None,
) -> Adapted:
    """Returns the adapted game; arguments as its fields."""
    with theirs():
        obs, _ = jax.eval_shape(reset, jax.eval_shape(lambda: jax.random.PRNGKey(0)))
    parts: dict[str, spaces.Space] = {
        "observation": box(obs["observation"]),
        "mask": bool_space((env.num_actions,)),
    }
    family = "pgx" if side is None else "game"
    return Adapted(
        reset, step, spaces.Dict(parts), spaces.Discrete(env.num_actions), family, side=side
    )


def box(shape: jax.ShapeDtypeStruct) -> spaces.Box:
    """Returns the space of observations of this shape and dtype."""
    low, high = (0, 1) if shape.dtype == bool else (-np.inf, np.inf)
    return spaces.Box(low, high, shape.shape, np.dtype(shape.dtype).type)
