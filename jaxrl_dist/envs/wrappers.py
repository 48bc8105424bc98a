"""Wraps environments, on devices and on the host,
so that a policy sees fewer numbers or the newest observations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.envs.base import DeviceEnv, DrawnEnv, Wrappers, label_of
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.memory import frames
from jaxrl_dist.memory.frames import Frame
from jaxrl_dist.simulator import Simulated, Simulator
from jaxrl_dist.spaces import Box, Part, describe, is_grey, paths
from jaxrl_dist.types import Array, EnvSpec, EpisodeStats, PyTree, Timestep

VELOCITIES: dict[str, tuple[int, ...]] = {
    "Acrobot": (4, 5),
    "CartPole": (1, 3),
    "MountainCar": (1,),
    "MountainCarContinuous": (1,),
    "Pendulum": (2,),
}
"""Indices of the velocities in observations of classic control environments,
keyed by the id without its version."""
View = Callable[[PyTree, Array], PyTree]
"""``(obs [B, ...], fresh [B]) -> obs``, of numpy or of JAX; ``fresh``: an episode begins.
A stack is a ``Frame``."""


def wrapped(spec: EnvSpec, wrappers: Wrappers) -> tuple[EnvSpec, View | None]:
    """Returns the spec with ``wrappers.hide`` and then ``wrappers.frame_stack``,
    and the view of observations.

    None: they change nothing, also where the environment stacks as many frames itself.

    Raises:
      ConfigError: the observations are not of the form that a wrapper needs,
        or ``hide`` does not fit them.
    """
    hide, frame_stack, native = wrappers.hide, wrappers.frame_stack, spec
    if hide is not None:
        visible = _visible(spec, hide)
        space = spec.observation
        assert isinstance(space, Box)
        box = Box(visible.shape, space.dtype, space.low[visible], space.high[visible])
        spec = dataclasses.replace(spec, observation=box)
    stacks = frame_stack is not None and frame_stack != spec.frame_stack
    if frame_stack is not None and stacks:
        spec = _stacked(spec, frame_stack)

    def with_channel(x: Array, space: Part) -> Array:
        if is_grey(space):
            return x[:, None]
        return x

    def view(obs: PyTree, fresh: Array) -> PyTree:
        obs = obs if hide is None else obs[:, visible]
        if not stacks:
            return obs
        return Frame(jax.tree.map(with_channel, obs, native.observation), fresh)

    return spec, None if spec is native else view


def on_device(env: DeviceEnv, wrappers: Wrappers) -> DeviceEnv:
    """Returns the environment with the wrappers of ``wrapped``;
    stacks are the second part of its state.
    """
    spec, view = wrapped(env.spec, wrappers)
    if view is None:
        return env
    stacked = spec.frame_stack > 1

    def view_obs(
        state: PyTree, stacks: PyTree, obs: PyTree, fresh: jax.Array
    ) -> tuple[PyTree, PyTree]:
        stacks, obs = frames.push(stacks, view(obs, fresh))
        return (state, stacks) if stacked else state, obs

    def reset(keys: jax.Array) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(keys)
        return view_obs(state, frames.blank(spec, len(keys)), obs, jnp.ones(keys.shape, bool))

    def step(
        state: PyTree, action: PyTree, keys: jax.Array
    ) -> tuple[PyTree, Timestep, EpisodeStats]:
        state, stacks = state if stacked else (state, ())
        state, timestep, episodes = env.step(state, action, keys)
        state, obs = view_obs(state, stacks, timestep.obs, ~timestep.valid)
        return state, timestep._replace(obs=obs), episodes

    def simulate(state: PyTree) -> Simulator:
        state, stacks = state if stacked else (state, ())
        assert env.simulate is not None, "there is no simulator without it"
        inner = env.simulate(state)

        def step_one(now: PyTree, action: PyTree, key: jax.Array) -> Simulated:
            state, stacks = now
            then = inner.step(state, action, key)
            # A view is of several environments.
            stacks, obs = jax.tree.map(lambda x: x[None], (stacks, then.obs))
            pushed = frames.push(stacks, view(obs, jnp.zeros(1, bool)))
            stacks, obs = jax.tree.map(lambda x: x[0], pushed)
            return then._replace(state=(then.state, stacks), obs=obs)

        return Simulator((inner.state, stacks), jax.tree_util.Partial(step_one))

    return DeviceEnv(spec, reset, step, env.render, None if env.simulate is None else simulate)


class Wrapped:
    """A ``HostEnv`` that returns its observations through a ``View``."""

    def __init__(self, env: DrawnEnv, spec: EnvSpec, view: View) -> None:
        self.spec = spec
        self.num_envs = env.num_envs
        self.render = env.render
        self.close = env.close
        self._env, self._view = env, view

    def reset(self) -> PyTree:
        return self._view(self._env.reset(), np.ones(self.num_envs, bool))

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        step, episodes = self._env.step(action)
        return step._replace(obs=self._view(step.obs, ~step.valid)), episodes


def on_host(env: DrawnEnv, wrappers: Wrappers) -> DrawnEnv:
    """Returns the environments with the wrappers of ``wrapped``."""
    spec, view = wrapped(env.spec, wrappers)
    if view is None:
        return env
    return Wrapped(env, spec, view)


def _visible(spec: EnvSpec, hide: str) -> np.ndarray:
    """Returns the indices of the numbers that a policy sees, ``[n]``.

    Args:
      hide: ``velocities``, or indices separated by commas.

    Raises:
      ConfigError: the observations are not vectors, ``hide`` does not fit them,
        or it leaves no number.
    """
    name = label_of(spec)
    space = spec.observation
    if not isinstance(space, Box) or len(space.shape) != 1:
        raise ConfigError(
            f"--hide {hide} needs observations that are vectors, but {name} has {describe(space)}"
        )
    size = space.shape[0]
    if hide == "velocities":
        indices = VELOCITIES.get(spec.id.rpartition("-")[0])
        if indices is None:
            raise ConfigError(
                f"--hide velocities knows only {', '.join(VELOCITIES)}; hide the velocities of "
                f"{name} by their indices among the {size} numbers of an observation, such as "
                f"--hide {size - 1}"
            )
    else:
        texts = [text.strip() for text in hide.split(",")]
        if not all(text.isdecimal() and int(text) < size for text in texts):
            raise ConfigError(
                f"--hide {hide}: {name} has the indices 0 to {size - 1}; name some of these or "
                "'velocities'"
            )
        indices = tuple(map(int, texts))
    visible = np.delete(np.arange(size), indices)
    if not visible.size:
        raise ConfigError(f"--hide {hide} leaves nothing of the observations of {name} to see")
    return visible


def _stacked(spec: EnvSpec, frame_stack: int) -> EnvSpec:
    """Returns the spec with stacks of frames.

    Raises:
      ConfigError: the observations are not arrays of numbers,
        or stacking makes an image's channel axis ambiguous.
    """
    name = label_of(spec)

    def stack(path: str, space: Part) -> Box:
        if not isinstance(space, Box) or not space.shape:
            if path:
                raise ConfigError(
                    f"--frame-stack {frame_stack} needs observations that are arrays of numbers, "
                    f"but {name} has {describe(space)} in its part {path}; leave that part out "
                    "with a wrapper of the environment"
                )
            raise ConfigError(
                f"--frame-stack {frame_stack} needs observations that are arrays of numbers, but "
                f"{name} has {describe(space)}"
            )
        if is_grey(space):  # its frames become channels
            space = Box((1, *space.shape), space.dtype, space.low[None], space.high[None])
        axis = frames.channel_axis(space.shape)
        low = np.concatenate([space.low] * frame_stack, axis)
        high = np.concatenate([space.high] * frame_stack, axis)
        if frames.channel_axis(low.shape) != axis:
            raise ConfigError(
                f"--frame-stack {frame_stack} makes images of shape {low.shape} of {name}'s "
                f"{space.shape}, where the axis of channels is ambiguous; use fewer frames"
            )
        return Box(low.shape, space.dtype, low, high)

    observation = jax.tree.map(stack, paths(spec.observation), spec.observation)
    return dataclasses.replace(spec, observation=observation, frame_stack=frame_stack)
