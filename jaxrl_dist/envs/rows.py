"""The agents of PettingZoo's environments as rows of the batch, as ``agents`` has it for JAX environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_dist.checks import flag
from jaxrl_dist.envs import gymnasium
from jaxrl_dist.envs.base import UNWRAPPED, DrawnEnv, Wrappers
from jaxrl_dist.envs.episodes import EpisodeCounter
from jaxrl_dist.envs.groups import AGENT, agents_of, check_same, in_parts
from jaxrl_dist.envs.masks import PART
from jaxrl_dist.envs.native import Description, Mask, alike
from jaxrl_dist.envs.parallel import FLAGS, OBS, THERE
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.spaces import Box, MultiDiscrete, Space
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep

FROM_INFO = Mask("info", PART)
"""Where legal actions are if they are no part of the agents' own observations."""


class Group(NamedTuple):
    """The agents of one policy."""

    agents: Sequence[str]
    spec: EnvSpec
    native: Space
    """What each of them sees without the parts that are added here."""
    from_info: bool
    """Whether legal actions are one of these parts."""


class Team(NamedTuple):
    """An environment of several agents on the host."""

    spec: EnvSpec
    whole: EnvSpec
    """Of ``parallel.Parallel``, which has all agents."""
    agents: Sequence[str]
    groups: Mapping[str, Group]
    """By policy; that of the only one is ``""``."""
    agent_ids: bool


def team(env_id: str, made: Description, wrappers: Wrappers) -> Team:
    """Divides the agents of a ``parallel.Parallel`` among the policies of ``wrappers``.

    Raises:
      ConfigError: as ``agents.from_team``.
    """
    name, agents = f"gymnasium:{env_id}", list(made.agents)
    for field in ("action_repeat", "info"):
        if getattr(wrappers, field) != getattr(UNWRAPPED, field):
            said = flag(field if field != "info" else "info_metrics")
            raise ConfigError(f"{said} works for environments with one agent, and {name} has {len(agents)}")
    for field in ("hide", "frame_stack") if wrappers.policies else ():
        if getattr(wrappers, field) is not None:
            raise ConfigError(f"{flag(field)} works for environments with one policy; leave it out, or --policies")
    if wrappers.joint:
        raise ConfigError(f"a team as one agent works for JAX environments, and {name} runs on the host")
    groups = {
        policy: _group(env_id, made, own, wrappers)
        for policy, own in agents_of(wrappers.policies, agents, name).items()
    }
    policies = {policy: group.spec for policy, group in groups.items()} if wrappers.policies else {}
    spec = next(iter(groups.values())).spec
    if policies:
        observation, action = ({x: getattr(policies[x], kind) for x in policies} for kind in ("observation", "action"))
        unread = next((each.unread_mask for each in policies.values() if each.unread_mask), "")
        spec = dataclasses.replace(
            spec, observation=observation, action=action, num_agents=len(agents), policies=policies, mask=None,
            unread_mask=unread,
        )  # fmt: skip
    of_agents = [(agent, group) for group in groups.values() for agent in group.agents]
    reward = np.full(len(agents), np.inf, np.float32)
    parts: dict[str, Space] = {
        OBS: {agent: group.native for agent, group in of_agents},
        "reward": Box((len(agents),), reward.dtype, -reward, reward),
        **{flag: MultiDiscrete((2,) * len(agents)) for flag in (THERE, *FLAGS)},
    }
    if legal := {agent: group.spec.observation[PART] for agent, group in of_agents if group.from_info}:  # type: ignore[index]
        parts[PART] = legal
    actions: Space = {agent: group.spec.action for agent, group in of_agents}
    whole = dataclasses.replace(spec, observation=parts, action=actions, num_agents=1, mask=None, policies={})
    return Team(spec, whole, agents, groups, wrappers.agent_ids)


def _group(env_id: str, made: Description, agents: Sequence[str], wrappers: Wrappers) -> Group:
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
    spec = gymnasium.spec(env_id, one, wrappers)
    native = gymnasium.spec(env_id, one._replace(mask=Mask()), wrappers).observation
    if wrappers.agent_ids:
        zeros = np.zeros(len(agents), np.float32)
        one_hot = Box(zeros.shape, zeros.dtype, zeros, zeros + 1)
        spec = dataclasses.replace(spec, observation={**in_parts(spec.observation), AGENT: one_hot})
    spec = dataclasses.replace(spec, num_agents=len(agents))
    return Group(agents, spec, native, from_info=made.agents[first] == FROM_INFO)


class Rows:
    """A ``HostEnv`` whose rows are the agents of environments, environment by environment: ``[B * k]``.

    Of several policies, actions, observations, time steps and episodes are dicts by policy, and the rows of a policy
    are its agents. An agent that is not there has ``valid`` False: it has not joined yet, or its episode has ended
    before the others'. An environment resets once no agent is left. Where a time limit of the run cuts it, all its
    agents are truncated.
    """

    def __init__(self, env: DrawnEnv, team: Team) -> None:
        """``env`` has the spec ``team.whole``."""
        self.spec, self.num_envs = team.spec, env.num_envs * len(team.agents)
        self._env, self._team = env, team
        self._groups = dict(team.groups) if team.spec.policies else team.groups[""]
        self._episodes = EpisodeCounter(self.num_envs)

    def reset(self) -> PyTree:
        obs = self._env.reset()
        self._episodes = EpisodeCounter(self.num_envs)
        return over_policies(lambda group: self._seen(group, obs))(self._groups)

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        chosen, joint = action if self.spec.policies else {"": action}, {}
        for policy, group in self._team.groups.items():
            for at, agent in enumerate(group.agents):
                own = slice(at, None, len(group.agents))
                joint[agent] = jax.tree.map(lambda x, own=own: np.asarray(x)[own], chosen[policy])
        step, _ = self._env.step(joint)
        there, terminated, truncated = (step.obs[name].astype(bool) for name in (THERE, *FLAGS))
        valid = there & step.valid[:, None]
        terminated = terminated & valid
        cut = np.asarray(step.truncated) | np.asarray(step.terminated)  # also those that leave without a flag
        truncated = (truncated | cut[:, None]) & valid & ~terminated
        reward = np.where(valid, step.obs["reward"], 0).astype(np.float32)
        flags = terminated, truncated, valid
        episodes = self._episodes.add(reward.reshape(-1), valid.reshape(-1), (terminated | truncated).reshape(-1))

        def of_group(group: Group) -> tuple[Timestep, EpisodeStats]:
            places = [self._team.agents.index(agent) for agent in group.agents]

            def rows(x: np.ndarray) -> np.ndarray:
                return x.reshape(len(there), -1)[:, places].reshape(-1)

            return Timestep(self._seen(group, step.obs), *map(rows, (reward, *flags))), jax.tree.map(rows, episodes)

        stepped: tuple[Timestep, EpisodeStats] = over_policies(of_group, 2)(self._groups)
        return stepped

    def render(self, index: int) -> np.ndarray:
        return self._env.render(index // len(self._team.agents))

    def close(self) -> None:
        self._env.close()

    def _seen(self, group: Group, obs: PyTree) -> PyTree:
        """Returns what the agents of a policy see, ``[B * k, ...]``."""

        def rows(part: str) -> PyTree:
            each = [obs[part][agent] for agent in group.agents]
            return jax.tree.map(lambda *x: np.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *each)

        seen = rows(OBS)
        if group.from_info:
            seen = {**in_parts(seen), PART: rows(PART)}
        if self._team.agent_ids:
            one_hot = np.tile(np.eye(len(group.agents), dtype=np.float32), (self._env.num_envs, 1))
            seen = {**in_parts(seen), AGENT: one_hot}
        return seen
