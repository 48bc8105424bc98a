"""What a user brings along: gymnax-style environments, as a module of theirs would make them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gymnax.environments import spaces
from gymnax.environments.classic_control.cartpole import CartPole


def cartpole(length: float = 0.5, with_params: bool = False) -> Any:
    """gymnax's CartPole with a pole of another length, alone or with its parameters."""
    env = CartPole()
    params = env.default_params.replace(length=length)
    return (env, params) if with_params else env


class WalkState(NamedTuple):
    place: jax.Array
    time: jax.Array


class Walk:
    """A walk from 0 that pays its place and ends at +-3; extends nothing of gymnax. Parameters:
    the time limit.
    """

    default_params = 7

    def reset_env(self, key: jax.Array, params: int) -> tuple[jax.Array, WalkState]:
        return jnp.zeros(1), WalkState(jnp.int32(0), jnp.int32(0))

    def step_env(self, key: jax.Array, state: WalkState, action: jax.Array, params: int) -> Any:
        place = state.place + 2 * action - 1
        return (
            jnp.float32(place)[None],
            WalkState(place, state.time + 1),
            place,
            jnp.abs(place) >= 3,
            {},
        )

    def is_truncated(self, state: WalkState, params: int) -> jax.Array:
        return state.time >= params

    def observation_space(self, params: int) -> spaces.Box:
        return spaces.Box(-3, 3, (1,), jnp.float32)

    def action_space(self, params: int) -> spaces.Discrete:
        return spaces.Discrete(2)


class Masked(Walk):
    """Says in its info that all actions are legal."""

    def step_env(self, key: jax.Array, state: WalkState, action: jax.Array, params: int) -> Any:
        *step, _ = super().step_env(key, state, action, params)
        return *step, {"legal_action_mask": jnp.ones(2, bool)}


class Scored(Walk):
    """Reports in its info whether it has reached 3, what the step has cost,
    and what only later steps have.
    """

    def step_env(self, key: jax.Array, state: WalkState, action: jax.Array, params: int) -> Any:
        obs, state, *rest, _ = super().step_env(key, state, action, params)
        late = jnp.where(state.time > 5, state.place, jnp.nan)
        info = {
            "success": state.place >= 3,
            "task": {"cost": jnp.abs(state.place)},
            "late": late,
            "words": jnp.ones(2),
        }
        return obs, state, *rest, info


class Picture(Walk):
    """Shows its place as an image with the channels last."""

    def reset_env(self, key: jax.Array, params: int) -> tuple[jax.Array, WalkState]:
        return jnp.zeros((4, 4, 2)), super().reset_env(key, params)[1]

    def step_env(self, key: jax.Array, state: WalkState, action: jax.Array, params: int) -> Any:
        obs, *rest = super().step_env(key, state, action, params)
        return jnp.broadcast_to(obs.reshape(1, 1, 1), (4, 4, 2)), *rest

    def observation_space(self, params: int) -> spaces.Box:
        return spaces.Box(-3, 3, (4, 4, 2), jnp.float32)


class Plain(Walk):
    """Gives Python numbers where they suffice."""

    def step_env(self, key: jax.Array, state: WalkState, action: jax.Array, params: int) -> Any:
        obs, state, *_ = super().step_env(key, state, action, params)
        return obs, state, 1.0, False, {}

    def is_truncated(self, state: WalkState, params: int) -> Any:
        return False


class Spoilt(Walk):
    """Shows or pays what is no finite number, by chance, whatever the actions;
    each episode has seven steps.
    """

    def __init__(
        self, field: str = "observation", value: str = "nan", chance: float = 0.01
    ) -> None:
        self._field, self._value, self._chance = field, float(value), chance

    def step_env(self, key: jax.Array, state: WalkState, action: jax.Array, params: int) -> Any:
        obs, state, reward, *_ = super().step_env(key, state, action, params)
        spoilt = jnp.where(jax.random.uniform(key) < self._chance, self._value, 0.0)
        if self._field == "observation":
            obs += spoilt
        else:
            reward += spoilt
        return obs, state, reward, False, {}


class SpoiltStart(Walk):
    """Begins with what is no number."""

    def reset_env(self, key: jax.Array, params: int) -> tuple[jax.Array, WalkState]:
        return jnp.full(1, jnp.nan), super().reset_env(key, params)[1]


class Branching(Walk):
    """Asks an array for its truth, as no compiled program can."""

    def step_env(self, key: jax.Array, state: WalkState, action: jax.Array, params: int) -> Any:
        return super().step_env(key, state, action if state.place < 2 else 0, params)


class Target:
    """Episodes of one step that pay minus the distance to 70 % of the action's bounds,
    in units of their distance.
    """

    default_params = None

    def __init__(self, low: list[float], high: list[float]) -> None:
        self._low, self._high = jnp.array(low), jnp.array(high)

    def reset_env(self, key: jax.Array, params: None) -> tuple[jax.Array, jax.Array]:
        return jnp.ones(1), jnp.int32(0)

    def step_env(self, key: jax.Array, state: jax.Array, action: jax.Array, params: None) -> Any:
        reward = -jnp.abs((action - self._low) / (self._high - self._low) - 0.7).mean()
        return jnp.ones(1), state + 1, reward, jnp.bool_(True), {}

    def is_truncated(self, state: jax.Array, params: None) -> Any:
        return False

    def observation_space(self, params: None) -> spaces.Box:
        return spaces.Box(-1, 1, (1,), jnp.float32)

    def action_space(self, params: None) -> spaces.Box:
        return spaces.Box(self._low, self._high, self._low.shape, jnp.float32)


class Turns(Walk):
    """Two sides move one place: the first moves twice, then the second once.
    The side that reaches +-3 is paid 1.
    """

    def step_env(self, key: jax.Array, state: WalkState, action: jax.Array, params: int) -> Any:
        obs, state, *_, terminated, info = super().step_env(key, state, action, params)
        return obs, state, jnp.float32(terminated), terminated, info

    def side_to_move(self, state: WalkState) -> jax.Array:
        return state.time % 3 // 2


class FlipState(NamedTuple):
    bits: jax.Array
    goal: jax.Array
    time: jax.Array


class BitFlip:
    """Flip one bit a step until all are the goal's (Andrychowicz et al. 2017, section 3.1): -1 a
    step until then, in as many steps as bits. Parameters: the number of bits.
    """

    def __init__(self, bits: int = 4) -> None:
        self.default_params = bits

    def reset_env(self, key: jax.Array, params: int) -> Any:
        bits, goal = jax.random.bernoulli(key, 0.5, (2, params)).astype(jnp.float32)
        state = FlipState(bits, goal, jnp.int32(0))
        return self.observed(state), state

    def step_env(self, key: jax.Array, state: FlipState, action: jax.Array, params: int) -> Any:
        bits = jnp.where(jnp.arange(params) == action, 1.0 - state.bits, state.bits)
        state = FlipState(bits, state.goal, state.time + 1)
        reward, over = self.goals(bits, state.goal)
        return self.observed(state), state, reward, over, {"success": over.astype(jnp.float32)}

    def goals(self, achieved: jax.Array, desired: jax.Array) -> tuple[jax.Array, jax.Array]:
        reached = jnp.all(achieved == desired)
        return reached.astype(jnp.float32) - 1.0, reached

    def observed(self, state: FlipState) -> dict[str, jax.Array]:
        return {
            "observation": state.bits,
            "achieved_goal": state.bits,
            "desired_goal": state.goal,
        }

    def is_truncated(self, state: FlipState, params: int) -> jax.Array:
        return state.time >= params

    def observation_space(self, params: int) -> spaces.Dict:
        bits = spaces.Box(0.0, 1.0, (params,))
        return spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), bits))

    def action_space(self, params: int) -> spaces.Discrete:
        return spaces.Discrete(params)
