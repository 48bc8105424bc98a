"""Environments whose observations have parts, and that say which actions are legal."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnax.environments import spaces as jax_spaces

SIDE = 4
MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]], np.int32)
OPTIMUM = 1.0 - 0.1 * (2 * (SIDE - 1) - 1)
"""Return of the shortest way from one corner to the other."""


class State(NamedTuple):
    place: jax.Array
    time: jax.Array
    illegal: jax.Array  # illegal actions so far
    legal_action_mask: jax.Array


class Grid:
    """A walk to the far corner: each move but the last costs 0.1,
    and moves off the grid are illegal.

    The observation has the place as numbers, as a picture and as a number, and ``mask``; with
    ``where="state"`` it is the place alone, and the mask is in the state. An illegal action ends
    the episode with a reward of -10.
    """

    default_params = 30

    def __init__(self, where: str = "part", goal_in: str = "") -> None:
        self.where, self.goal_in = where, goal_in

    def reset_env(self, key: jax.Array, params: int) -> tuple[Any, State]:
        state = State(
            jnp.zeros(2, jnp.int32), jnp.int32(0), jnp.int32(0), legal(jnp.zeros(2, jnp.int32))
        )
        return self.shown(state), state

    def step_env(self, key: jax.Array, state: State, action: jax.Array, params: int) -> Any:
        allowed = state.legal_action_mask[action]
        place = jnp.where(allowed, state.place + jnp.asarray(MOVES)[action], state.place)
        there = jnp.all(place == SIDE - 1)
        illegal = state.illegal + (1 - allowed.astype(jnp.int32))
        state = State(place, state.time + 1, illegal, legal(place))
        reward = jnp.where(allowed, jnp.where(there, 1.0, -0.1), -10.0)
        return self.shown(state), state, reward, there | ~allowed, {}

    def is_truncated(self, state: State, params: int) -> jax.Array:
        return state.time >= params

    def shown(self, state: State) -> Any:
        numbers = state.place.astype(jnp.float32) / SIDE
        if self.where == "state":
            return numbers
        picture = jnp.zeros((6, 6, 1), jnp.uint8).at[state.place[0], state.place[1], 0].set(255)
        inner = {"row": state.place[0], "picture": picture}
        return {"numbers": numbers, "inner": inner, "mask": state.legal_action_mask}

    def observation_space(self, params: int) -> Any:
        numbers = jax_spaces.Box(0.0, 1.0, (2,), jnp.float32)
        if self.where == "state":
            return numbers
        picture = jax_spaces.Box(0, 255, (6, 6, 1), jnp.uint8)
        inner = jax_spaces.Dict({"row": jax_spaces.Discrete(SIDE), "picture": picture})
        return jax_spaces.Dict(
            {"numbers": numbers, "inner": inner, "mask": jax_spaces.Box(0, 1, (4,), jnp.bool_)}
        )

    def action_space(self, params: int) -> jax_spaces.Discrete:
        return jax_spaces.Discrete(4)


def legal(place: jax.Array) -> jax.Array:
    """Which moves stay on the grid, ``[4]`` bool."""
    after = place[None] + jnp.asarray(MOVES)
    return jnp.all((after >= 0) & (after < SIDE), axis=1)


class HostGrid(gymnasium.Env):
    """``Grid`` for Gymnasium, with the mask as ``part``, in ``info`` or by ``method``.

    With ``wide``, an action says for each axis whether to move on, which is illegal at its end.
    """

    def __init__(self, where: str = "part", wide: bool = False) -> None:
        self.where, self.wide = where, wide
        numbers = spaces.Box(0.0, 1.0, (2,), np.float64)
        inner = spaces.Tuple(
            (spaces.Discrete(SIDE, start=2), spaces.Box(0, 255, (6, 6, 1), np.uint8))
        )
        parts = {"numbers": numbers, "inner": inner}
        self.observation_space: Any = numbers
        if where == "part":
            self.observation_space = spaces.Dict({**parts, "action_mask": spaces.MultiBinary(4)})
        self.action_space: Any = (
            spaces.MultiDiscrete([2, 2], start=[3, 0]) if wide else spaces.Discrete(4)
        )
        if where == "method":
            self.action_masks = self.mask

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.time = np.zeros(2, np.int32), 0
        return self.shown()

    def step(self, action: Any) -> Any:
        after = self.place + (action - [3, 0] if self.wide else MOVES[action])
        if (after < 0).any() or (after >= SIDE).any():
            raise AssertionError(f"illegal move {action} at {self.place}")
        self.place, self.time = after, self.time + 1
        there = bool((self.place == SIDE - 1).all())
        obs, info = self.shown()
        return obs, 1.0 if there else -0.1, there, self.time >= 30, info

    def mask(self) -> np.ndarray:
        if self.wide:
            return np.array([[1, place < SIDE - 1] for place in self.place], np.int8).reshape(-1)
        after = self.place[None] + MOVES
        return ((after >= 0) & (after < SIDE)).all(axis=1).astype(np.int8)

    def shown(self) -> Any:
        numbers = self.place / SIDE
        info = {"action_mask": self.mask()} if self.where == "info" else {}
        if self.where != "part":
            return numbers, info
        picture = np.zeros((6, 6, 1), np.uint8)
        picture[self.place[0], self.place[1]] = 255
        inner = (np.int64(self.place[0] + 2), picture)
        return {"numbers": numbers, "inner": inner, "action_mask": self.mask()}, info


class Arms(gymnasium.Env):
    """Actions of parts whose names have slashes; the reward shows them."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Dict(
        {
            "arm/left": spaces.Discrete(3, start=1),
            "arm": spaces.Dict(right=spaces.Tuple((spaces.Discrete(9),))),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        reward = float(10 * action["arm/left"] + action["arm"]["right"][0])
        return np.zeros(1, np.float32), reward, False, False, {}


class Secret:
    """One step an episode: ``state`` holds the number to guess,
    which the policy cannot see; ``hint`` is its sign.
    """

    default_params = 1

    def reset_env(self, key: jax.Array, params: int) -> tuple[Any, Any]:
        secret = jax.random.uniform(key, (1,), minval=-1.0)
        return {"state": secret, "hint": jnp.sign(secret)}, (secret, jnp.int32(0))

    def step_env(self, key: jax.Array, state: Any, action: Any, params: int) -> Any:
        secret, time = state
        error = jnp.abs(action["guess"][0] - secret[0]) + (
            action["sign"] != (secret[0] > 0)
        ).astype(jnp.float32)
        state = secret, time + 1
        return {"state": secret, "hint": jnp.sign(secret)}, state, -error, jnp.array(True), {}

    def is_truncated(self, state: Any, params: int) -> jax.Array:
        return state[1] >= 1

    def observation_space(self, params: int) -> Any:
        return jax_spaces.Dict(
            {
                "state": jax_spaces.Box(-1, 1, (1,), jnp.float32),
                "hint": jax_spaces.Box(-1, 1, (1,), jnp.float32),
            }
        )

    def action_space(self, params: int) -> Any:
        return jax_spaces.Dict(
            {"guess": jax_spaces.Box(-2, 2, (1,), jnp.float32), "sign": jax_spaces.Discrete(2)}
        )


class Both:
    """A picture with a bright side, and a number that says whether to go there or away:
    neither says it alone.

    Each of the four steps of an episode pays 1 for the right side.
    """

    default_params = 4

    def reset_env(self, key: jax.Array, params: int) -> tuple[Any, Any]:
        state = jax.random.bernoulli(key, 0.5, (2,)), jnp.int32(0)
        return self.shown(state), state

    def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: int) -> Any:
        (side, there), time = state
        reward = (action == (side == there)).astype(jnp.float32)
        state = jax.random.bernoulli(key, 0.5, (2,)), time + 1
        return self.shown(state), state, reward, state[1] >= params, {}

    def is_truncated(self, state: Any, params: int) -> Any:
        return False

    def shown(self, state: Any) -> Any:
        side, there = state[0]
        picture = (
            jnp.zeros((6, 6, 1), jnp.uint8)
            .at[:, :3, 0]
            .set(jnp.where(side, 0, 255).astype(jnp.uint8))
        )
        return picture.at[:, 3:, 0].set(jnp.where(side, 255, 0).astype(jnp.uint8)), jnp.where(
            there, 1.0, -1.0
        )[None]

    def observation_space(self, params: int) -> Any:
        picture = jax_spaces.Box(0, 255, (6, 6, 1), jnp.uint8)
        return jax_spaces.Tuple((picture, jax_spaces.Box(-1, 1, (1,), jnp.float32)))

    def action_space(self, params: int) -> jax_spaces.Discrete:
        return jax_spaces.Discrete(2)


class HostBoth(gymnasium.Env):
    """``Both`` for Gymnasium, as a Dict."""

    def __init__(self) -> None:
        sides = {
            "picture": spaces.Box(0, 255, (6, 6, 1), np.uint8),
            "number": spaces.Box(-1, 1, (1,), np.float32),
        }
        self.observation_space = spaces.Dict(sides)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self.shown(), {}

    def step(self, action: Any) -> Any:
        reward, self.time = float(action == (self.side == self.there)), self.time + 1
        return self.shown(), reward, self.time >= 4, False, {}

    def shown(self) -> Any:
        self.side, self.there = self.np_random.random(2) < 0.5
        picture = np.zeros((6, 6, 1), np.uint8)
        picture[:, 3:] = 255 * self.side
        picture[:, :3] = 255 * (not self.side)
        return {"picture": picture, "number": np.float32([1 if self.there else -1])}


class Forgetful(HostGrid):
    """Says at the start which actions are legal, and then no more."""

    def __init__(self) -> None:
        super().__init__("info")

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {}


class ShortInfo(HostGrid):
    """Lets all moves pass, and shows a mask of two numbers for four actions."""

    def __init__(self) -> None:
        super().__init__("none")

    def step(self, action: Any) -> Any:
        self.time += 1
        return *self.shown()[:1], 0.0, self.time >= 5, False, {"action_mask": np.ones(2, np.int8)}

    def reset(self, **keywords: Any) -> Any:
        obs, _ = super().reset(**keywords)
        return obs, {"action_mask": np.ones(2, np.int8)}


class Stuck(HostGrid):
    """Allows no action from its fourth step on."""

    def __init__(self) -> None:
        super().__init__("info")

    def step(self, action: Any) -> Any:
        action = action if self.mask()[action] else int(self.mask().argmax())
        return super().step(action)

    def shown(self) -> Any:
        obs, info = super().shown()
        return obs, {"action_mask": info["action_mask"] * (self.time < 4)}


class Shrinking(HostGrid):
    """Shows a mask of two numbers after some steps."""

    def __init__(self) -> None:
        super().__init__("info")

    def shown(self) -> Any:
        obs, info = super().shown()
        return obs, {"action_mask": info["action_mask"][: 2 if self.time > 3 else 4]}
