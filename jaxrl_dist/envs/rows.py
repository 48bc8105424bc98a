"""The agents of PettingZoo's environments as rows of the batch, as ``agents`` has it for JAX environments."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxrl_dist.envs.base import DrawnEnv
from jaxrl_dist.envs.episodes import EpisodeCounter
from jaxrl_dist.envs.groups import in_parts
from jaxrl_dist.envs.masks import PART
from jaxrl_dist.envs.native import Mask
from jaxrl_dist.envs.parallel import FLAGS, OBS, THERE
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Part, Space
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep

FAMILY = "pettingzoo"
"""The family of their specs."""
FROM_INFO = Mask("info", PART)
"""Where legal actions are if they are no part of the agents' own observations."""


def whole(spec: EnvSpec, mask: Mask) -> EnvSpec:
    """Returns the spec of ``parallel.Parallel``, for that of its agents.

    Args:
      mask: where they see which actions are legal.
    """
    count, seen = spec.num_agents, spec.observation

    def several(part: Part) -> Part:
        if isinstance(part, Box):
            return Box(
                (count, *part.shape), part.dtype, *(np.stack([bound] * count) for bound in (part.low, part.high))
            )
        return MultiDiscrete((part.n,) * count if isinstance(part, Discrete) else part.nvec * count)

    def joined(space: Space) -> Space:
        return jax.tree.map(several, space)

    parts: dict[str, Space] = {}
    if mask == FROM_INFO:
        assert isinstance(seen, dict)
        parts[PART] = joined(seen[PART])
        seen = {name: part for name, part in seen.items() if name != PART}
        seen = seen["observation"] if list(seen) == ["observation"] else seen
    reward = np.full(count, np.inf, np.float32)
    parts |= {OBS: joined(seen), "reward": Box((count,), reward.dtype, -reward, reward)}
    parts |= {name: MultiDiscrete((2,) * count) for name in (THERE, *FLAGS)}
    return dataclasses.replace(spec, observation=parts, action=joined(spec.action), num_agents=1, mask=None)


class Rows:
    """A ``HostEnv`` whose rows are the agents of environments, environment by environment: ``[B * k]``.

    An agent that is not there has ``valid`` False: it has not joined yet, or its episode has ended before the others'.
    An environment resets once no agent is left. Where a time limit of the run cuts it, all its agents are truncated.
    """

    def __init__(self, env: DrawnEnv, spec: EnvSpec, mask: Mask) -> None:
        """``env`` has the spec ``whole(spec, mask)``."""
        self.spec, self.num_envs = spec, env.num_envs * spec.num_agents
        self._env, self._from_info = env, mask == FROM_INFO
        self._episodes = EpisodeCounter(self.num_envs)

    def reset(self) -> PyTree:
        obs = self._env.reset()
        self._episodes = EpisodeCounter(self.num_envs)
        return self._seen(obs)

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        size = self._env.num_envs
        joint = jax.tree.map(lambda space, x: np.asarray(x).reshape(size, *space.shape), self._env.spec.action, action)
        step, _ = self._env.step(joint)
        there, terminated, truncated = (step.obs[name].astype(bool) for name in (THERE, *FLAGS))
        valid = there & step.valid[:, None]
        terminated = terminated & valid
        cut = np.asarray(step.truncated) | np.asarray(step.terminated)  # also those that leave without a flag
        truncated = (truncated | cut[:, None]) & valid & ~terminated
        reward = np.where(valid, step.obs["reward"], 0).astype(np.float32).reshape(-1)
        flags = [flag.reshape(-1) for flag in (terminated, truncated, valid)]
        episodes = self._episodes.add(reward, flags[2], flags[0] | flags[1])
        return Timestep(self._seen(step.obs), reward, *flags), episodes

    def render(self, index: int) -> np.ndarray:
        return self._env.render(index // self.spec.num_agents)

    def close(self) -> None:
        self._env.close()

    def _seen(self, obs: PyTree) -> PyTree:
        parts = {**in_parts(obs[OBS]), PART: obs[PART]} if self._from_info else obs[OBS]
        return jax.tree.map(lambda space, x: x.reshape(-1, *space.shape), self.spec.observation, parts)
