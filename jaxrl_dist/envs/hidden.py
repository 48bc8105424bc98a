"""Wraps environments to hide some numbers of the observation from the policy."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxrl_dist.envs.base import DeviceEnv, DrawnEnv
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Box, describe
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep

VELOCITIES: dict[str, tuple[int, ...]] = {
    "Acrobot": (4, 5),
    "CartPole": (1, 3),
    "MountainCar": (1,),
    "MountainCarContinuous": (1,),
    "Pendulum": (2,),
}
"""Indices of the velocities in observations of classic control environments, keyed by the id without its version."""


def shown(spec: EnvSpec, hide: str) -> np.ndarray:
    """Returns the indices of the numbers that a policy sees, ``[n]``.

    Args:
      spec: the spec before this wrapper.
      hide: ``velocities``, or indices separated by commas.

    Raises:
      ConfigError: the observations are not vectors, ``hide`` does not fit them, or it leaves no number.
    """
    name, space = f"{spec.backend}:{spec.id}", spec.observation
    if not isinstance(space, Box) or len(space.shape) != 1:
        raise ConfigError(f"--hide {hide} needs observations that are vectors, and {name} has {describe(space)}")
    size = space.shape[0]
    if hide == "velocities":
        indices = VELOCITIES.get(spec.id.rpartition("-")[0])
        if indices is None:
            raise ConfigError(
                f"--hide velocities knows {', '.join(VELOCITIES)}, and not {name}; name velocities by their indices "
                f"among the {size} numbers of an observation, such as --hide {size - 1}"
            )
    else:
        texts = [text.strip() for text in hide.split(",")]
        if not all(text.isdecimal() and int(text) < size for text in texts):
            raise ConfigError(f"--hide {hide}: {name} has indices 0 to {size - 1}; 'velocities' or such indices work")
        indices = tuple(map(int, texts))
    kept = np.delete(np.arange(size), indices)
    if not kept.size:
        raise ConfigError(f"--hide {hide} leaves nothing of the observations of {name} to see")
    return kept


def hidden(env: EnvSpec | DeviceEnv, hide: str) -> EnvSpec | DeviceEnv:
    """Returns the environment or spec without the hidden numbers; for errors see ``shown``."""
    if isinstance(env, EnvSpec):
        return _spec(env, shown(env, hide))
    kept, inner = shown(env.spec, hide), env

    def reset(keys: jax.Array) -> tuple[PyTree, jax.Array]:
        state, obs = inner.reset(keys)
        return state, obs[:, kept]

    def step(state: PyTree, action: PyTree, keys: jax.Array) -> tuple[PyTree, Timestep, EpisodeStats]:
        state, timestep, episodes = inner.step(state, action, keys)
        return state, timestep._replace(obs=timestep.obs[:, kept]), episodes

    return DeviceEnv(_spec(env.spec, kept), reset, step, inner.render)


def _spec(spec: EnvSpec, kept: np.ndarray) -> EnvSpec:
    space = spec.observation
    assert isinstance(space, Box)
    return dataclasses.replace(spec, observation=Box(kept.shape, space.dtype, space.low[kept], space.high[kept]))


class Hidden:
    """A ``HostEnv`` without the hidden numbers."""

    def __init__(self, env: DrawnEnv, hide: str) -> None:
        self._env, self._kept = env, shown(env.spec, hide)
        self.spec, self.num_envs = _spec(env.spec, self._kept), env.num_envs

    def reset(self) -> PyTree:
        return self._env.reset()[:, self._kept]

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        step, episodes = self._env.step(action)
        return step._replace(obs=step.obs[:, self._kept]), episodes

    def render(self, index: int) -> np.ndarray:
        return self._env.render(index)

    def close(self) -> None:
        self._env.close()
