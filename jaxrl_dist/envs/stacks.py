"""Wraps environments so that a policy sees a stack of the newest observations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.envs.base import DeviceEnv, DrawnEnv
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.memory import frames
from jaxrl_dist.memory.frames import Frame
from jaxrl_dist.spaces import Box, Part, describe, paths
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep


def stacked(env: EnvSpec | DeviceEnv, frame_stack: int) -> EnvSpec | DeviceEnv:
    """Gives an environment or a spec stacked observations; if it has this stack already, returns it unchanged.

    Raises:
      ConfigError: the observations are not arrays of numbers, or stacking makes an image's channel axis ambiguous.
    """
    if isinstance(env, DeviceEnv):
        return _pure(env, _spec(env.spec, frame_stack)) if frame_stack > 1 else env
    return env if env.frame_stack == frame_stack else _spec(env, frame_stack)


def _spec(spec: EnvSpec, frame_stack: int) -> EnvSpec:
    name = f"{spec.backend}:{spec.id}"

    def stack(path: str, space: Part) -> Box:
        if not isinstance(space, Box) or not space.shape:
            where = f" in its part {path}; an environment's wrapper can leave that part out" if path else ""
            raise ConfigError(
                f"--frame-stack {frame_stack} needs observations that are arrays of numbers, and {name} has "
                f"{describe(space)}{where}"
            )
        axis = frames.channel_axis(space.shape)
        low, high = (np.concatenate([bound] * frame_stack, axis) for bound in (space.low, space.high))
        if frames.channel_axis(low.shape) != axis:
            raise ConfigError(
                f"--frame-stack {frame_stack} makes images of shape {low.shape} of {name}'s {space.shape}, of which "
                "nobody can say where the channels are; fewer frames work"
            )
        return Box(low.shape, space.dtype, low, high)

    return dataclasses.replace(
        spec, observation=jax.tree.map(stack, paths(spec.observation), spec.observation), frame_stack=frame_stack
    )


def _pure(env: DeviceEnv, spec: EnvSpec) -> DeviceEnv:
    def reset(keys: jax.Array) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(keys)
        stacks, obs = frames.push(frames.blank(spec, len(keys)), Frame(obs, jnp.ones(keys.shape, bool)))
        return (state, stacks), obs

    def step(state: PyTree, action: PyTree, keys: jax.Array) -> tuple[PyTree, Timestep, EpisodeStats]:
        state, stacks = state
        state, timestep, episodes = env.step(state, action, keys)
        stacks, obs = frames.push(stacks, Frame(timestep.obs, ~timestep.valid))
        return (state, stacks), timestep._replace(obs=obs), episodes

    return DeviceEnv(spec, reset, step, env.render)


class Stacked:
    """A ``HostEnv`` that returns its observations as ``Frame``; each episode starts a new stack."""

    def __init__(self, env: DrawnEnv, spec: EnvSpec) -> None:
        self.spec, self.num_envs = spec, env.num_envs
        self._env = env

    def reset(self) -> Frame:
        return Frame(self._env.reset(), np.ones(self.num_envs, bool))

    def step(self, action: np.ndarray) -> tuple[Timestep, EpisodeStats]:
        step, episodes = self._env.step(action)
        return step._replace(obs=Frame(step.obs, ~step.valid)), episodes

    def render(self, index: int) -> np.ndarray:
        return self._env.render(index)

    def close(self) -> None:
        self._env.close()
