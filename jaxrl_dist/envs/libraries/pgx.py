"""Pgx: board games and others (Koyamada et al. 2023, https://arxiv.org/abs/2303.17503)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pgx
from gymnasium import spaces

from jaxrl_dist.envs.base import parse_options
from jaxrl_dist.envs.libraries import Adapted, Step, bool_space
from jaxrl_dist.types import PyTree

PLAYER = 0
"""The player that learns; pgx draws which player begins."""


def ids() -> list[str]:
    return list(pgx.available_envs())


def make(env_id: str, options: Mapping[str, str]) -> Adapted:
    """Makes a game in which all other players choose legal actions at random; there are no options.

    A step is an action of player 0 and those of the others, until it is player 0's turn again. The observation's part
    ``mask`` has the legal actions.
    """
    parse_options(f"pgx:{env_id}", options, {})
    env = pgx.make(env_id)

    def others_play(key: jax.Array, state: Any) -> Any:
        """Returns the state at player 0's next turn, with the rewards ``[players]`` since its last."""

        def waits(carry: Any) -> jax.Array:
            _, state = carry
            return (state.current_player != PLAYER) & ~(state.terminated | state.truncated)

        def play(carry: Any) -> Any:
            key, state = carry
            key, choice, chance = jax.random.split(key, 3)
            action = jax.random.categorical(choice, jnp.where(state.legal_action_mask, 0.0, -jnp.inf))
            new = env.step(state, action, chance)
            return key, new.replace(rewards=state.rewards + new.rewards)

        return state if env.num_players == 1 else jax.lax.while_loop(waits, play, (key, state))[1]

    def observed(state: Any) -> PyTree:
        obs = env.observe(state) if env.num_players == 1 else env._observe(state, jnp.int32(PLAYER))
        return {"observation": obs, "mask": state.legal_action_mask}

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        first, then = jax.random.split(key)
        state = others_play(then, env.init(first))
        return observed(state), state

    def step(key: jax.Array, state: Any, action: Any) -> Step:
        chance, then = jax.random.split(key)
        state = others_play(then, env.step(state, action, chance))
        return Step(observed(state), state, state.rewards[PLAYER], state.terminated, state.truncated)

    shape = jax.eval_shape(reset, jax.eval_shape(lambda: jax.random.PRNGKey(0)))[0]["observation"]
    low, high = (0, 1) if shape.dtype == bool else (-np.inf, np.inf)
    observation = spaces.Box(low, high, shape.shape, np.dtype(shape.dtype).type)
    parts: dict[str, spaces.Space[Any]] = {"observation": observation, "mask": bool_space((env.num_actions,))}
    return Adapted(reset, step, spaces.Dict(parts), spaces.Discrete(env.num_actions), "pgx")
