"""Environments that are wrong, each in one way:
``BROKEN`` says what ``check-env`` is to find in it.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnax.environments import spaces as jax_spaces

# --- Gymnasium ------------------------------------------------------------------------------------


class Right(gymnasium.Env):
    """A random walk in two dimensions until it leaves a square: nothing is wrong with it."""

    observation_space: Any = spaces.Box(-2, 2, (2,), np.float32)
    action_space: Any = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-0.5, 0.5, 2).astype(np.float32)
        return self.place.copy(), {}

    def step(self, action: Any) -> Any:
        self.place = (
            self.place
            + np.float32(0.3) * np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)[action]
        )
        self.place += self.np_random.normal(0, 0.01, 2).astype(np.float32)
        return (
            self.place.copy(),
            float(self.place[0]),
            bool(np.abs(self.place).max() > 1),
            False,
            {},
        )


class RaisesInConstructor(Right):
    def __init__(self) -> None:
        raise RuntimeError("no such luck")


class Goals(Right):
    """Pays for reaching a goal that its observation names, in Gymnasium-Robotics' interface."""

    observation_space = spaces.Dict(
        {name: Right.observation_space for name in ("achieved_goal", "desired_goal")}
    )

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -np.linalg.norm(achieved - desired, axis=-1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        place, info = super().reset(seed=seed)
        return {"achieved_goal": place, "desired_goal": np.ones(2, np.float32)}, info

    def step(self, action: Any) -> Any:
        place, _, *ended = super().step(action)
        obs = {"achieved_goal": place, "desired_goal": np.ones(2, np.float32)}
        return obs, float(self.compute_reward(place, obs["desired_goal"], {})), *ended


class Hangs(Right):
    def step(self, action: Any) -> Any:
        time.sleep(30)


class NoEnvironment:
    observation_space, action_space = Right.observation_space, Right.action_space

    def reset(self, seed: Any = None) -> Any:
        return np.zeros(2, np.float32), {}


class NoActionSpace(Right):
    action_space = None


class TextObservations(Right):
    observation_space = spaces.Text(3)


class WholeActions(Right):
    action_space = spaces.Box(0, 3, (1,), np.int64)


class NoReset(gymnasium.Env):
    observation_space, action_space, step = Right.observation_space, Right.action_space, Right.step


class OldReset(Right):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class ResetWithoutSeed(Right):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset(seed=0)


class OldStep(Right):
    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class ShortStep(Right):
    def step(self, action: Any) -> Any:
        return super().step(action)[:3]


class WrongShape(Right):
    observation_space = spaces.Box(-2, 2, (3,), np.float32)


class WrongDtype(Right):
    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs.astype(np.float64), *rest


class OutOfRange(Right):
    observation_space = spaces.Box(-0.6, 0.6, (2,), np.float32)


class OutsideDiscrete(Right):
    observation_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        return 3, *super().step(action)[1:]


class WideIntegers(Right):
    observation_space = spaces.Box(0, 2**40, (2,), np.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.array([0, 1]), {}

    def step(self, action: Any) -> Any:
        return np.array([0, 3_000_000_000]), *super().step(action)[1:]


class ShowsNaN(Right):
    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return np.where(rest[1], np.nan, obs).astype(np.float32), *rest


class ArrayReward(Right):
    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


class InfiniteReward(Right):
    def step(self, action: Any) -> Any:
        obs, _, terminated, *rest = super().step(action)
        return obs, -np.inf if terminated else 0.0, terminated, *rest


class WholeFlags(Right):
    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, int(terminated), truncated, info


class TextInfo(Right):
    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], "fine"


class DoneTwice(Right):
    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, terminated, info


class IgnoresSeed(Right):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=int(np.random.default_rng().integers(2**31)))


class NewGenerator(Right):
    """Whose episodes after the first are random, though its steps are not."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(
            seed=int(np.random.default_rng().integers(2**31)) if seed is None else seed
        )


class FixedSeed(Right):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.generator = np.random.default_rng(0)
        return super().reset(seed=int(self.generator.integers(2**31)))


class RandomSteps(Right):
    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, np.random.default_rng().random(), *rest


class KeepsState(Right):
    games = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        self.games += 0.001
        return obs + np.float32(self.games), info


class NotReset(Right):
    steps = 0

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        self.steps += 1
        return np.clip(obs, -2, 2), reward, self.steps > 20, truncated, info


class SharesItsBuffer(Right):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.place, {}

    def step(self, action: Any) -> Any:
        self.place += (
            np.float32(0.3) * np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)[action]
        )
        return self.place, 0.0, bool(np.abs(self.place).max() > 1), False, {}


class WritesIntoActions(Right):
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> Any:
        action *= 0.5
        return super().step(0)


class FailsLater(Right):
    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        return super().step([][self.steps] if self.steps > 20 else action)


class FailsToClose(Right):
    def close(self) -> None:
        raise OSError("no window")


class NeverEnds(Right):
    """Which is no fault."""

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        self.place = np.clip(self.place, -1, 1)
        return np.clip(obs, -2, 2), reward, False, truncated, info


class Masked(Right):
    """Which is no fault either."""

    def reset(self, **keywords: Any) -> Any:
        obs, info = super().reset(**keywords)
        return obs, {**info, "action_mask": np.ones(3, np.int8)}


# --- gymnax ---------------------------------------------------------------------------------------


class State(NamedTuple):
    place: Any
    time: Any


class RightJAX:
    """A walk until it leaves an interval: nothing is wrong with it."""

    default_params = 20

    def reset_env(self, key: Any, params: int) -> Any:
        place = jax.random.uniform(key, (2,), minval=-0.5, maxval=0.5)
        return place, State(place, 0)

    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        place = state.place + (action - 0.5) * jax.random.uniform(key, (2,))
        return place, State(place, state.time + 1), place[0], jnp.abs(place).max() > 1, {}

    def is_truncated(self, state: Any, params: int) -> Any:
        return state.time >= params

    def observation_space(self, params: int) -> Any:
        return jax_spaces.Box(-2, 2, (2,), jnp.float32)

    def action_space(self, params: int) -> Any:
        return jax_spaces.Discrete(2)


class LimitInDone(RightJAX):
    """Its time limit is a part of ``terminated``, as in older gymnax environments."""

    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        _, after, *_ = super().step_env(key, state, action, params)
        return state.place, after._replace(place=state.place), 0.0, after.time >= params, {}

    def is_truncated(self, state: Any, params: int) -> Any:
        return jnp.bool_(False)


class HostLimitInDone(Right):
    """As ``LimitInDone``, but a goal also ends some episodes."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        obs, reward, done, _, info = super().step(action)
        self.time += 1
        return obs, reward, done or self.time >= 4, False, info


class NoTimeLimitMethod(RightJAX):
    is_truncated = None  # type: ignore[assignment]


class NoParams(RightJAX):
    @property
    def default_params(self) -> int:  # type: ignore[override]
        raise KeyError("params")


class TupleActions(RightJAX):
    def action_space(self, params: int) -> Any:
        return jax_spaces.Tuple(())


class NoState(RightJAX):
    def reset_env(self, key: Any, params: int) -> Any:
        return super().reset_env(key, params)[0]


class TextState(RightJAX):
    def reset_env(self, key: Any, params: int) -> Any:
        obs, state = super().reset_env(key, params)
        return obs, state._replace(time="zero")


class Branches(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        return super().step_env(key, state, 1 if action > 0 else 0, params)


class SixValues(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        return *super().step_env(key, state, action, params), {}


class OtherStructure(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        obs, state, *rest = super().step_env(key, state, action, params)
        return obs, tuple(state), *rest

    def is_truncated(self, state: Any, params: int) -> Any:
        return state[1] >= params


class OtherStateShape(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        obs, state, *rest = super().step_env(key, state, action, params)
        return obs, state._replace(place=state.place[:1]), *rest


class OtherStateDtype(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        obs, state, *rest = super().step_env(key, state, action, params)
        return obs, state._replace(time=state.time * 0.5), *rest


class OtherObservation(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        obs, *rest = super().step_env(key, state, action, params)
        return jnp.append(obs, 0.0), *rest


class WholeObservation(RightJAX):
    def observation_space(self, params: int) -> Any:
        return jax_spaces.Box(-2, 2, (2,), jnp.int32)


class NarrowSpace(RightJAX):
    def observation_space(self, params: int) -> Any:
        return jax_spaces.Box(-0.6, 0.6, (2,), jnp.float32)


class VectorReward(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        obs, state, _, *rest = super().step_env(key, state, action, params)
        return obs, state, obs, *rest


class FloatEnd(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, reward, terminated.astype(jnp.float32), info


class EndsTwice(RightJAX):
    def is_truncated(self, state: Any, params: int) -> Any:
        return jnp.abs(state.place).max() > 1


class HiddenRandomness(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        obs, state, _, *rest = super().step_env(key, state, action, params)
        return obs, state, jnp.float32(np.random.default_rng().random()), *rest


class KeepsTracers(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        self.last = state.place + 0.0
        return super().step_env(key, state, action, params)


class NaNAtTheEnd(RightJAX):
    def step_env(self, key: Any, state: Any, action: Any, params: int) -> Any:
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return jnp.where(terminated, jnp.nan, obs), state, reward, terminated, info


BROKEN = {
    "RaisesInConstructor": "its constructor raises RuntimeError: no such luck",
    "Hangs": "step did not return within 1 s; if the machine is only busy, raise --env-timeout",
    "NoEnvironment": "is a NoEnvironment, neither a gymnasium.Env nor a gymnax-style environment",
    "NoActionSpace": "its action_space is missing",
    "TextObservations": "has Text observations; Discrete, MultiDiscrete, MultiBinary, Box, Dict and Tuple work",
    "WholeActions": "its action_space is a Box of int32; a Box of floats works",
    "NoReset": "reset returned a NoneType, not (observation, info)",
    "OldReset": "reset returned an array of shape (2,) and dtype float32, not (observation, info)",
    "ResetWithoutSeed": "reset(seed=0) raises TypeError",
    "OldStep": "step returned 4 values, as in Gym before 0.26, not (observation, reward, terminated, truncated, info)",
    "ShortStep": "step returned 3 values, not (observation, reward, terminated, truncated, info)",
    "WrongShape": "the observation of reset has shape (2,), its space (3,)",
    "WrongDtype": "the observation of step has dtype float64, its space float32",
    "OutOfRange": "lies outside its space: ",
    "OutsideDiscrete": "lies outside its space: 3 is not between 0 and 2",
    "WideIntegers": "the observation of step holds 3000000000, which 32-bit integers cannot; a Box of floats can",
    "ShowsNaN": "the observation of step is not finite: [nan nan]",
    "ArrayReward": "the reward is an array of shape (1,) and dtype float64, not a number",
    "InfiniteReward": "the reward is -inf",
    "WholeFlags": "terminated is a int, not a bool",
    "TextInfo": "step's info is a str, not a dict",
    "DoneTwice": "every episode ends both terminated and truncated",
    "IgnoresSeed": "two environments with the same seed start differently: reset ignores its seed",
    "FixedSeed": "every seed gives the same episodes, which differ from each other: reset ignores its seed",
    "RandomSteps": "the second time; draw random numbers from the seeded generator",
    "NewGenerator": "lead elsewhere after a reset without a seed; continue with",
    "KeepsState": "starts differently after some episodes; reset must clear what they left",
    "NotReset": "each one ends with its first step; reset must start a new one",
    "SharesItsBuffer": "changes with the next call: return a copy of it",
    "WritesIntoActions": "step changes the action array that it gets; copy it first",
    "FailsLater": "step raises IndexError",
    "FailsToClose": "close raises OSError: no window",
    "NoTimeLimitMethod": "it has no method is_truncated",
    "NoParams": "default_params raises KeyError",
    "TupleActions": "has Tuple actions without parts; ",
    "NoState": "reset_env returned an array of shape (2,) and dtype float32, not (observation, state)",
    "TextState": "its state holds a str at .time, not an array",
    "Branches": f"(broken.py, line {Branches.step_env.__code__.co_firstlineno + 1}): TracerBoolConversionError: ",
    "SixValues": "step_env returned 6 values, not (observation, state, reward, terminated, info)",
    "OtherStructure": "the state of step_env is",
    "OtherStateShape": "the state at .place has shape (1,) after step_env and (2,) after reset_env",
    "OtherStateDtype": "the state at .time has dtype float32 after step_env and int32 after reset_env",
    "OtherObservation": "the observation of step_env has shape (3,), its space (2,)",
    "WholeObservation": "the observation of reset_env has dtype float32, its space int32",
    "NarrowSpace": "the observation of step_env lies outside its space",
    "VectorReward": "the reward is an array of shape (2,) and dtype float32, not a number",
    "FloatEnd": "terminated is an array of shape () and dtype float32, not a bool",
    "EndsTwice": "every episode ends both terminated and truncated",
    "HiddenRandomness": "step_env gives something else the second time for the same arguments",
    "KeepsTracers": "step_env keeps a traced value in the environment",
    "NaNAtTheEnd": "the observation of step_env is not finite: [nan nan]",
}
"""What is to stand in the line on each."""
