"""Makes the agents of PettingZoo environments rows of the batch, like ``agents`` for JAX environments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_dist.envs import masks
from jaxrl_dist.envs.agents.groups import (
    AGENT,
    AGENTS,
    STATE,
    agents_of,
    check_same,
    check_wrappers,
    in_parts,
    joined,
    of_policies,
)
from jaxrl_dist.envs.agents.pettingzoo import FLAGS, OBS, THERE
from jaxrl_dist.envs.base import DrawnEnv, Wrappers, space_of
from jaxrl_dist.envs.episodes import EpisodeCounter
from jaxrl_dist.envs.host import gymnasium
from jaxrl_dist.envs.masks import PART
from jaxrl_dist.envs.native import Description, Mask, alike
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.spaces import Box, MultiDiscrete, Space, leaves
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep

FROM_INFO = Mask("info", PART)
"""Where legal actions are if they are not part of the agents' observations."""


class Group(NamedTuple):
    """The agents of one policy."""

    agents: Sequence[str]
    spec: EnvSpec
    native: Space
    """Each agent's observation space, without the parts added here."""
    action: Space
    """Each agent's action space."""
    from_info: bool
    """Whether legal actions are one of the added parts."""
    joint: bool
    """Whether they act as one, in one row of the batch."""


class Team(NamedTuple):
    """A multi-agent environment on the host."""

    spec: EnvSpec
    whole: EnvSpec
    """The spec of ``parallel.Parallel``, which has all agents."""
    agents: Sequence[str]
    groups: Mapping[str, Group]
    """Keyed by policy; ``""`` if there is one policy."""
    agent_ids: bool


def team(env_id: str, made: Description, wrappers: Wrappers) -> Team:
    """Divides the agents of a ``parallel.Parallel`` among the policies of ``wrappers``.

    Raises:
      ConfigError: as ``agents.from_team``.
    """
    name, agents = f"gymnasium:{env_id}", list(made.agents)
    check_wrappers(wrappers, agents, name)
    groups = {
        policy: _group(env_id, made, own, wrappers, joint=policy in wrappers.joint)
        for policy, own in agents_of(wrappers.policies, agents, name).items()
    }
    specs = {policy: group.spec for policy, group in groups.items()}
    spec = of_policies(specs) if wrappers.policies else specs[""]
    of_agents = [(agent, group) for group in groups.values() for agent in group.agents]
    reward = np.full(len(agents), np.inf, np.float32)
    parts: dict[str, Space] = {
        OBS: {agent: group.native for agent, group in of_agents},
        "reward": Box((len(agents),), reward.dtype, -reward, reward),
        **{flag: MultiDiscrete((2,) * len(agents)) for flag in (THERE, *FLAGS)},
    }
    if legal := {agent: _flags(group.action) for agent, group in of_agents if group.from_info}:
        parts[PART] = legal
    actions: Space = {agent: group.action for agent, group in of_agents}
    whole = dataclasses.replace(spec, observation=parts, action=actions, num_agents=1, mask=None, policies={})
    return Team(spec, whole, agents, groups, wrappers.agent_ids)


def _flags(action: Space) -> Space:
    """Returns the space of legal actions."""
    parts, _ = masks.with_mask({}, action, FROM_INFO)
    assert isinstance(parts, dict)
    return parts[PART]


def _group(env_id: str, made: Description, agents: Sequence[str], wrappers: Wrappers, *, joint: bool) -> Group:
    """Returns what one policy sees and does for its agents.

    Raises:
      ConfigError: they have different spaces, or spaces that no policy supports.
    """
    name, first = f"gymnasium:{env_id}", agents[0]
    for what, spaces in (("observations", made.observation.parts), ("actions", made.action.parts)):
        check_same(name, what, {agent: spaces[agent] for agent in agents})
        if other := next((agent for agent in agents if not alike(spaces[agent], spaces[first])), None):
            raise ConfigError(f"{name}: {what} of {first} and {other} have other bounds; one policy needs equal ones")
    one = made._replace(
        observation=made.observation.parts[first], action=made.action.parts[first], mask=made.agents[first], agents={}
    )
    mask, from_info = made.agents[first], made.agents[first] == FROM_INFO
    plain = gymnasium.spec(env_id, one._replace(mask=Mask()), wrappers)
    native, action = plain.observation, plain.action
    zeros = np.zeros(len(agents), np.float32)
    ids = {AGENT: Box(zeros.shape, zeros.dtype, zeros, zeros + 1)}
    if not joint:
        spec = gymnasium.spec(env_id, one, wrappers)
        if wrappers.agent_ids:
            spec = dataclasses.replace(spec, observation={**in_parts(spec.observation), **ids})
        return Group(agents, dataclasses.replace(spec, num_agents=len(agents)), native, action, from_info, joint)
    team, actions = joined(name, {**in_parts(native), **ids}, action, len(agents), mask)
    seen, part = masks.with_mask(team, actions, mask)
    sizes = [math.prod(space.shape) for space in leaves(space_of(made.observation, name, "observations")).values()]
    bound = np.full(sum(sizes), np.inf, np.float32)
    seen = {**in_parts(seen), STATE: Box(bound.shape, bound.dtype, -bound, bound)}
    spec = dataclasses.replace(plain, observation=seen, action=actions, mask=part, unread_mask=mask.unread)
    return Group(agents, spec, native, action, from_info, joint)


class Rows:
    """A ``HostEnv`` whose rows are agents, environment by environment: ``[B * k]``.

    Agents that act as one share one row, ``[B]``, with the reward of ``agents.from_team``.

    With several policies, actions, observations, time steps and episodes are dicts keyed by policy, and a policy's rows
    are its agents. ``valid`` is False for an agent that has not joined yet, or whose episode has ended before the
    others'. An environment resets once no agent is left. If the run's time limit cuts it, all its agents are truncated.
    """

    def __init__(self, env: DrawnEnv, team: Team) -> None:
        """``env`` has the spec ``team.whole``."""
        self.spec, self.num_envs = team.spec, env.num_envs * team.spec.num_agents
        self._env, self._team = env, team
        self._begin()

    def _begin(self) -> None:
        size, groups = self._env.num_envs, self._team.groups.values()
        self._episodes = {group.agents[0]: EpisodeCounter(size * group.spec.num_agents) for group in groups}

    def reset(self) -> PyTree:
        obs = self._env.reset()
        self._begin()
        return self.spec.bare(over_policies(lambda group: self._seen(group, obs))(self._team.groups))

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        chosen, joint = self.spec.keyed(action), {}
        for policy, group in self._team.groups.items():
            for at, agent in enumerate(group.agents):
                own = slice(at, None, len(group.agents))
                flat = np.ravel if group.joint else np.asarray
                joint[agent] = jax.tree.map(lambda x, own=own, flat=flat: flat(x)[own], chosen[policy])
        step, _ = self._env.step(joint)
        there, terminated, truncated = (step.obs[name].astype(bool) for name in (THERE, *FLAGS))
        valid = there & step.valid[:, None]
        terminated = terminated & valid
        truncated = (truncated | np.asarray(step.truncated)[:, None]) & valid & ~terminated
        going = valid & ~terminated & ~truncated

        def of_group(group: Group) -> tuple[Timestep, EpisodeStats]:
            places = [self._team.agents.index(agent) for agent in group.agents]
            flags: list[Any] = [flag[:, places] for flag in (terminated, truncated, valid)]
            pays = flags[2].any(axis=1, keepdims=True) if group.joint else flags[2]
            paid = np.where(pays, step.obs["reward"][:, places], 0).astype(np.float32)
            if group.joint:
                here = flags[2].any(axis=1)
                over = here & ~going[:, places].any(axis=1)  # the last agents' episodes end, whoever may join later
                late = over & flags[1].any(axis=1)
                paid, flags = paid.mean(axis=1), [over & ~late, late, here]
            paid, flags = paid.reshape(-1), [flag.reshape(-1) for flag in flags]
            episodes = self._episodes[group.agents[0]].add(paid, flags[2], flags[0] | flags[1])
            return Timestep(self._seen(group, step.obs), paid, *flags), episodes

        stepped, ended = over_policies(of_group, 2)(self._team.groups)
        return self.spec.bare(stepped), self.spec.bare(ended)

    def render(self, index: int) -> np.ndarray:
        return self._env.render(index // self.spec.num_agents)

    def close(self) -> None:
        self._env.close()

    def _seen(self, group: Group, obs: PyTree) -> PyTree:
        """Returns the observations of a policy's agents, ``[B * k, ...]``."""

        def rows(part: str) -> PyTree:
            each = [obs[part][agent] for agent in group.agents]
            return jax.tree.map(lambda *x: np.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *each)

        seen, size = rows(OBS), self._env.num_envs
        legal = {PART: rows(PART)} if group.from_info else {}
        one_hot = {AGENT: np.tile(np.eye(len(group.agents), dtype=np.float32), (size, 1))}
        if not group.joint:
            extra = {**legal, **(one_hot if self._team.agent_ids else {})}
            return {**in_parts(seen), **extra} if extra else seen
        each = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), {**in_parts(seen), **one_hot})
        everything = [part for agent in self._team.agents for part in jax.tree.leaves(obs[OBS][agent])]
        state = np.concatenate([x.reshape(size, -1).astype(np.float32) for x in everything], axis=1)
        return {AGENTS: each, STATE: state, **{part: x.reshape(size, -1) for part, x in legal.items()}}
