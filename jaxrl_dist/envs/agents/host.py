"""Makes the agents of PettingZoo environments rows of the batch,
like ``device`` for JAX environments.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxrl_dist.envs import masks
from jaxrl_dist.envs.agents import groups
from jaxrl_dist.envs.agents.groups import Group, Groups
from jaxrl_dist.envs.agents.pettingzoo import FLAGS, OBS, THERE
from jaxrl_dist.envs.base import DrawnEnv, Wrappers, outcome
from jaxrl_dist.envs.conversion import space_of
from jaxrl_dist.envs.episodes import EpisodeCounter
from jaxrl_dist.envs.host import gymnasium
from jaxrl_dist.envs.masks import PART
from jaxrl_dist.envs.native import Agent, Description, Mask, PlainSpace, alike, env_label
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.spaces import STATE, Box, MultiDiscrete, Space, leaves
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep


def divided(env_id: str, made: Description, wrappers: Wrappers) -> Groups:
    """Divides the agents of a ``pettingzoo.Parallel`` among the policies of ``wrappers``.

    Raises:
      ConfigError: as ``groups.divided``.
    """
    name = env_label("gymnasium", env_id)
    observations = made.observation.parts
    actions = made.action.parts

    def spec_of_one(agents: Sequence[Agent]) -> tuple[EnvSpec, Mask]:
        first = str(agents[0])
        _check_alike(name, "observations", {agent: observations[agent] for agent in agents})
        _check_alike(name, "actions", {agent: actions[agent] for agent in agents})
        one = made._replace(
            observation=observations[first], action=actions[first], mask=Mask(), agents={}
        )
        return gymnasium.spec(env_id, one, wrappers), made.agents[first]

    whole = leaves(space_of(made.observation, name, "observations"))
    state_size = sum(math.prod(part.shape) for part in whole.values())
    return groups.divided(list(made.agents), name, wrappers, spec_of_one, state_size)


def _check_alike(name: str, role: str, spaces: Mapping[Agent, PlainSpace]) -> None:
    """Checks that the agents of a policy have equal spaces.

    Raises:
      ConfigError: they differ.
    """
    groups.check_same(name, role, spaces)
    first, *others = spaces
    for other in others:
        if not alike(spaces[other], spaces[first]):
            raise ConfigError(
                f"{name}: {role} of {first} and {other} have different bounds; one policy needs "
                "equal bounds"
            )


def whole(divided: Groups) -> EnvSpec:
    """Returns the spec of the ``pettingzoo.Parallel`` that has all agents."""
    agents = divided.agents
    of_agents = [
        (str(agent), group) for group in divided.by_policy.values() for agent in group.agents
    ]
    reward = np.full(len(agents), np.inf, np.float32)
    parts: dict[str, Space] = {
        OBS: {agent: group.spec_of_one.observation for agent, group in of_agents},
        "reward": Box((len(agents),), reward.dtype, -reward, reward),
        **{flag: MultiDiscrete((2,) * len(agents)) for flag in (THERE, *FLAGS)},
    }
    legal: Space = {
        agent: masks.flags(group.spec_of_one.action)
        for agent, group in of_agents
        if PART in group.added
    }
    if legal:
        parts[PART] = legal
    actions: Space = {agent: group.spec_of_one.action for agent, group in of_agents}
    return dataclasses.replace(
        divided.spec, observation=parts, action=actions, num_agents=1, mask=None, policies={}
    )


class Rows:
    """A ``HostEnv`` whose rows are agents, environment by environment: ``[B * k]``.

    Agents that act as one share one row, ``[B]``, with the reward of ``device.from_team``.

    With several policies, actions, observations, time steps and episodes are dicts keyed by policy,
    and a policy's rows are its agents. ``valid`` is False for an agent that has not joined yet, or
    whose episode has ended before the others'. An environment resets once no agent is left. If the
    run's time limit cuts it, all its agents are truncated.
    """

    def __init__(self, env: DrawnEnv, divided: Groups) -> None:
        """``env`` has the spec ``whole(divided)``."""
        self.spec = divided.spec
        self.num_envs = env.num_envs * divided.spec.num_agents
        self._env = env
        self._groups = divided

    def reset(self) -> PyTree:
        obs = self._env.reset()
        self._episodes = {
            group.agents[0]: EpisodeCounter(self._env.num_envs * group.spec.num_agents)
            for group in self._groups.by_policy.values()
        }
        group_obs = over_policies(lambda group: self._group_obs(group, obs))
        return self.spec.bare(group_obs(self._groups.by_policy))

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        by_policy = self._groups.by_policy
        acting = [
            by_policy[name].actions(jax.tree.map(np.asarray, x))
            for name, x in self.spec.keyed(action).items()
        ]
        step, whole = self._env.step(dict(collections.ChainMap(*acting)))
        present, terminated, truncated = (step.obs[name].astype(bool) for name in (THERE, *FLAGS))
        truncated = truncated | np.asarray(step.truncated)[:, None]
        valid, terminated, truncated = outcome(
            ~(present & step.valid[:, None]), terminated, truncated
        )
        reward = np.where(self._groups.pays(valid), step.obs["reward"], 0).astype(np.float32)

        def of_group(group: Group) -> tuple[Timestep, EpisodeStats]:
            rows = group.step(
                self._group_obs(group, step.obs), reward, terminated, truncated, valid
            )
            counter = self._episodes[group.agents[0]]
            over = rows.terminated | rows.truncated
            episodes = counter.add(rows.reward, rows.valid, over)
            return rows, episodes._replace(info=group.info(whole.info))

        stepped, ended = over_policies(of_group, 2)(by_policy)
        return self.spec.bare(stepped), self.spec.bare(ended)

    def render(self, index: int) -> np.ndarray:
        return self._env.render(index // self.spec.num_agents)

    def close(self) -> None:
        self._env.close()

    def _group_obs(self, group: Group, obs: PyTree) -> PyTree:
        """Returns the observations of a policy's rows."""
        legal = None
        if PART in group.added:
            legal = groups.in_rows(group.agents, obs[PART])
        state = None
        if STATE in group.added:
            state = groups.whole_state(obs[OBS], self._groups.agents)
        return group.observation(groups.in_rows(group.agents, obs[OBS]), legal, state)
