"""Which agents of an environment share a policy, and what that policy sees and does for them."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_dist.checks import did_you_mean, flag
from jaxrl_dist.envs import masks
from jaxrl_dist.envs.base import UNWRAPPED, Wrappers
from jaxrl_dist.envs.masks import in_parts
from jaxrl_dist.envs.native import Agent, Mask, PlainSpace
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import (
    AGENT,
    AGENTS,
    STATE,
    Box,
    Discrete,
    MultiDiscrete,
    Part,
    Space,
    describe,
)
from jaxrl_dist.types import Array, EnvSpec, PyTree, Timestep

WORLD = "world_state"
"""Key of the state of the whole environment among the observations of JaxMARL."""


class TeamEnv(Protocol):
    """An environment of several agents in JaxMARL's style (Rutherford et al. 2024,
    https://arxiv.org/abs/2311.10090).

    All that it takes and returns, except states, is a dict keyed by agent. A method
    ``get_avail_actions(state)``, of the legal actions, is optional.
    """

    @property
    def agents(self) -> Sequence[Agent]: ...

    def reset(self, key: jax.Array, /) -> tuple[PyTree, PyTree]:
        """Returns ``(obs, state)`` at the start of an episode."""

    def step_env(
        self, key: jax.Array, state: PyTree, actions: PyTree, /
    ) -> tuple[PyTree, PyTree, PyTree, PyTree, PyTree]:
        """Returns ``(obs, state, rewards, dones, info)``; ``dones`` also has ``__all__``."""

    def observation_space(self, agent: Agent, /) -> object:
        """Returns the space of an agent's observations."""

    def action_space(self, agent: Agent, /) -> object:
        """Returns the space of an agent's actions."""


@dataclasses.dataclass(frozen=True)
class Team:
    """An environment of several agents, and what it does not say itself."""

    env: TeamEnv
    family: str = "team"
    time_limit: int | None = None
    """Env steps after which an episode is truncated; the environment itself ends it later,
    or never."""
    shows_state: bool = False
    """Whether observations have a part ``state``: the environment's own,
    or all agents' observations side by side."""
    render: Callable[[PyTree], object] | None = None
    """Draws one state, ``[H, W, 3]`` uint8, in place of the environment's own ``render``."""


class Group(NamedTuple):
    """The agents of one policy. Its methods take arrays of numpy or of JAX."""

    agents: Sequence[Agent]
    places: Sequence[int]
    """Their places among all ``K`` agents of the environment, ``[k]``."""
    spec: EnvSpec
    spec_of_one: EnvSpec
    """The spec of one of these agents, without the parts added here."""
    mask: Mask
    """Where the environment says which actions are legal."""
    added: frozenset[str]
    """The added parts, of ``masks.PART``, ``AGENT`` and ``STATE``."""
    joint: bool
    """Whether they act as one, in one row of the batch; see ``joined``."""

    def of_all(self, x: Array) -> Array:
        """Selects these agents from all: ``[B, k, ...]`` from ``[B, K, ...]``."""
        if len(self.agents) == x.shape[1]:
            return x
        return x[:, np.array(self.places)]

    def actions(self, action: PyTree) -> dict[Agent, PyTree]:
        """Returns the action of each agent, ``[B, ...]``, from the actions of the policy's rows."""
        count = len(self.agents)
        flat = jax.tree.map(_flat, action) if self.joint else action
        return {
            agent: jax.tree.map(lambda x, at=at: x[at::count], flat)
            for at, agent in enumerate(self.agents)
        }

    def observation(self, obs: PyTree, legal: Array, state: Array) -> PyTree:
        """Returns the observations of the policy's rows, with the added parts.

        Args:
          obs: what the agents see, ``[B * k, ...]``.
          legal: which of their actions are legal, ``[B * k, n]``;
            None without the part ``masks.PART``.
          state: of the whole environment, ``[B, S]``; None without the part ``STATE``.
        """
        count = len(self.agents)
        first = jax.tree.leaves(obs)[0]
        xp = first.__array_namespace__()
        num_envs = len(first) // count
        ids = {}
        if AGENT in self.added:
            ids[AGENT] = xp.tile(xp.eye(count, dtype=xp.float32), (num_envs, 1))
        legal_part = {}
        if masks.PART in self.added:
            legal_part[masks.PART] = legal
        if self.joint:
            by_agent = jax.tree.map(
                lambda x: x.reshape(num_envs, count, *x.shape[1:]), {**in_parts(obs), **ids}
            )
            of_team = {part: x.reshape(num_envs, -1) for part, x in legal_part.items()}
            return {AGENTS: by_agent, **of_team, STATE: state}
        if not self.added:
            return obs
        state_part = {}
        if STATE in self.added:
            state_part[STATE] = xp.repeat(state, count, axis=0)
        return {**in_parts(obs), **legal_part, **state_part, **ids}

    def step(
        self, obs: PyTree, reward: Array, terminated: Array, truncated: Array, valid: Array
    ) -> Timestep:
        """Returns the step of the policy's rows,
        from their observations and the rest of all agents, ``[B, K]``.

        Agents that act as one have the mean of their rewards,
        and their episode ends when the last agent's episode ends.
        """
        reward, terminated, truncated, valid = map(
            self.of_all, (reward, terminated, truncated, valid)
        )
        if not self.joint:
            return Timestep(obs, *(_flat(x) for x in (reward, terminated, truncated, valid)))
        taking_part = valid.any(axis=1)
        over = taking_part & (~valid | terminated | truncated).all(axis=1)  # whoever may join later
        cut = over & truncated.any(axis=1)
        return Timestep(obs, reward.mean(axis=1), over & ~cut, cut, taking_part)

    def info(self, reported: Mapping[str, tuple[Array, Array]]) -> dict[str, tuple[Array, Array]]:
        """Returns the field ``info`` of the statistics of the policy's rows,
        from the field of all agents, ``[B, K]`` each.

        Agents that act as one have the sums over all of them, and so their mean.
        """

        def of_rows(x: Array) -> Array:
            if self.joint:
                return self.of_all(x).sum(axis=1)
            return _flat(self.of_all(x))

        return {
            metric: (of_rows(total), of_rows(count)) for metric, (total, count) in reported.items()
        }


class Groups(NamedTuple):
    """The agents of an environment, divided among the policies."""

    agents: Sequence[Agent]
    by_policy: Mapping[str, Group]
    """``""`` if there is one policy."""
    spec: EnvSpec

    def pays(self, valid: Array) -> Array:
        """Returns which agents' rewards count, from which agents are ``valid``, both ``[B, K]``.

        Of agents that act as one, all count while one is valid.
        """
        for group in self.by_policy.values():
            if group.joint:
                members = np.isin(np.arange(len(self.agents)), group.places)[None]
                valid = valid | (group.of_all(valid).any(axis=1, keepdims=True) & members)
        return valid


SpecOfOne = Callable[[Sequence[Agent]], tuple[EnvSpec, Mask]]
"""Takes the agents of a policy, and returns the spec of one of them without an action mask,
and the mask."""


def divided(
    agents: Sequence[Agent],
    name: str,
    wrappers: Wrappers,
    spec_of_one: SpecOfOne,
    state_size: int,
    *,
    shows_state: bool = False,
) -> Groups:
    """Divides the agents of an environment among the policies of ``wrappers``.

    Args:
      name: the environment's, for errors.
      spec_of_one: as ``SpecOfOne``.
      state_size: numbers of the whole environment's state.
      shows_state: adds the state to what each agent sees; agents that act as one always see it.

    Raises:
      ConfigError: the agents of a policy have different spaces, or spaces that no policy supports;
        an agent has no policy, or several; or a policy has no agent.
    """

    def group_of(policy: str, members: Sequence[Agent]) -> Group:
        spec, mask = spec_of_one(members)
        count = len(members)
        joint = policy in wrappers.joint
        observation = spec.observation
        action = spec.action
        added = set()
        if wrappers.agent_ids or joint:
            observation = {**in_parts(observation), AGENT: _numbers(count, 0, 1)}
            added.add(AGENT)
        if joint:
            observation, action = joined(name, observation, action, count, mask)
        observation, part = masks.with_mask(observation, action, mask)
        if part is not None and mask.where != "part":
            added.add(part)
        if shows_state or joint:
            observation = {**in_parts(observation), STATE: _numbers(state_size, -np.inf, np.inf)}
            added.add(STATE)
        full = dataclasses.replace(
            spec,
            observation=observation,
            action=action,
            mask=part,
            unread_mask=mask.unread,
            num_agents=1 if joint else count,
        )
        places = [agents.index(agent) for agent in members]
        return Group(members, places, full, spec, mask, frozenset(added), joint)

    check_wrappers(wrappers, agents, name)
    owners = agents_of(wrappers.policies, agents, name)
    groups = {policy: group_of(policy, members) for policy, members in owners.items()}
    specs = {policy: group.spec for policy, group in groups.items()}
    return Groups(agents, groups, of_policies(specs) if wrappers.policies else specs[""])


def _numbers(size: int, low: float, high: float) -> Box:
    lows = np.full(size, low, np.float32)
    highs = np.full(size, high, np.float32)
    return Box((size,), lows.dtype, lows, highs)


def check_wrappers(wrappers: Wrappers, agents: Sequence[Agent], name: str) -> None:
    """Checks the flags that multi-agent environments, or several policies, do not support.

    Raises:
      ConfigError: names a flag that works only for one agent or one policy.
    """
    if wrappers.action_repeat != UNWRAPPED.action_repeat:
        raise ConfigError(
            f"--action-repeat works for environments with one agent, and {name} has {len(agents)}"
        )
    for field in ("hide", "frame_stack") if wrappers.policies else ():
        if getattr(wrappers, field) is not None:
            raise ConfigError(
                f"{flag(field)} works for environments with one policy; remove it, or train one"
            )
    if wrappers.joint and wrappers.frame_stack is not None:
        # Frames are stacked along the first axis, which is the axis of the agents here.
        raise ConfigError(
            "--frame-stack does not work for agents that act as one, as the "
            f"{len(agents)} of {name} do"
        )


def agents_of(
    policies: Mapping[str, str], agents: Sequence[Agent], name: str
) -> dict[str, list[Agent]]:
    """Returns the agents of each policy, in the environment's order; without policies,
    all under ``""``.

    Args:
      policies: names of agents, keyed by policy: shell patterns (``*``, ``?``, ``[]``),
        separated by commas.
      name: the environment's, for errors.

    Raises:
      ConfigError: an agent has no policy, or several; or a policy has no agent.
    """
    if not policies:
        return {"": list(agents)}
    matching = {
        policy: _matching(policy, patterns, agents, name) for policy, patterns in policies.items()
    }
    for agent in agents:
        owners = [policy for policy in policies if agent in matching[policy]]
        if len(owners) > 1:
            raise ConfigError(
                f"agent {agent} has several policies: {' and '.join(owners)}; give it one"
            )
    owned = set().union(*matching.values())
    unowned = [str(agent) for agent in agents if agent not in owned]
    if unowned:
        raise ConfigError(
            f"agents without a policy: {', '.join(unowned)}; the agents of {name} are "
            f"{', '.join(map(str, agents))}, and each needs one"
        )
    return matching


def _matching(policy: str, patterns: str, agents: Sequence[Agent], name: str) -> list[Agent]:
    """Returns the agents whose names match any of a policy's patterns, in the environment's order.

    Raises:
      ConfigError: a pattern matches none.
    """
    names = [str(agent) for agent in agents]
    matching = set[str]()
    for pattern in patterns.split(","):
        matched = fnmatch.filter(names, pattern.strip())
        if not matched:
            near = did_you_mean(pattern, names)
            raise ConfigError(
                f"policy {policy}: no agent is named {pattern.strip()}{near}; the agents of {name} "
                f"are {', '.join(names)}"
            )
        matching.update(matched)
    return [agent for agent in agents if str(agent) in matching]


def of_policies(policies: Mapping[str, EnvSpec]) -> EnvSpec:
    """Joins the specs of several policies: spaces are dicts keyed by policy, and rows add up."""
    return dataclasses.replace(
        next(iter(policies.values())),
        observation={policy: spec.observation for policy, spec in policies.items()},
        action={policy: spec.action for policy, spec in policies.items()},
        num_agents=sum(spec.num_agents for spec in policies.values()),
        policies=policies,
        mask=None,
        unread_mask=next((spec.unread_mask for spec in policies.values() if spec.unread_mask), ""),
    )


def joined(
    name: str, observation: Space, action: Space, count: int, mask: Mask
) -> tuple[Space, Space]:
    """Returns the spaces of agents that act as one: all their observations, and an action for each.

    Raises:
      ConfigError: their actions are not discrete, or a part of their observations is a mask.
    """
    if not isinstance(action, Discrete):
        raise ConfigError(
            f"{name}: agents that act as one need discrete actions, but have {describe(action)}"
        )
    if mask.where == "part":
        raise ConfigError(
            f"{name}: agents that act as one need a method that returns legal actions, not a part "
            f"{mask.name!r}"
        )

    def several(part: Part) -> Box:
        if not isinstance(part, Box):
            raise ConfigError(
                f"{name}: agents that act as one need observations of numbers, but have "
                f"{describe(part)}"
            )
        lows = np.stack([part.low] * count)
        return Box((count, *part.shape), part.dtype, lows, np.stack([part.high] * count))

    return {AGENTS: jax.tree.map(several, observation)}, MultiDiscrete((action.n,) * count)


def team_size(spec: EnvSpec) -> int:
    """Returns how many agents act as one in each row of a policy; 0: a row is one agent's."""
    parts, action = spec.observation, spec.action
    joint = isinstance(parts, dict) and STATE in parts and isinstance(parts.get(AGENTS), dict)
    if joint and isinstance(action, MultiDiscrete):
        return len(action.nvec)
    return 0


def stacked(agents: Sequence[Agent], values: Mapping[Agent, PyTree]) -> PyTree:
    """Stacks the values of these agents, ``[B, ...]`` each: ``[B, k, ...]``."""
    first = jax.tree.leaves(values[agents[0]])[0]
    xp = first.__array_namespace__()
    return jax.tree.map(lambda *x: xp.stack(x, axis=1), *(values[agent] for agent in agents))


def in_rows(agents: Sequence[Agent], values: Mapping[Agent, PyTree]) -> PyTree:
    """Makes the values of these agents rows of a batch,
    environment by environment: ``[B * k, ...]``.
    """
    return jax.tree.map(_flat, stacked(agents, values))


def whole_state(obs: Mapping[Agent, PyTree], agents: Sequence[Agent]) -> Array:
    """Returns the state of the whole environment, ``[B, S]``: the library's,
    or all observations side by side.
    """
    if WORLD in obs:
        leaves = [obs[WORLD]]
    else:
        leaves = jax.tree.leaves([obs[agent] for agent in agents])
    xp = leaves[0].__array_namespace__()
    return xp.concatenate([x.reshape(len(x), -1).astype(xp.float32) for x in leaves], axis=1)


def _flat(x: Array) -> Array:
    """Merges the first two axes."""
    return x.reshape(-1, *x.shape[2:])


def check_same(name: str, role: str, native: Mapping[Agent, PlainSpace]) -> None:
    """Checks that all agents have the same space.

    Raises:
      ConfigError: they have different ones.
    """
    kinds: dict[str, list[str]] = {}
    for agent, space in native.items():
        kinds.setdefault(_shown(space), []).append(str(agent))
    if len(kinds) > 1:
        listed = "; ".join(f"{', '.join(agents)}: {kind}" for kind, agents in kinds.items())
        raise ConfigError(
            f"{name} has agents with different {role} ({listed}), which cannot share a policy; "
            "give them several policies with `jaxrl-dist train --policy NAME=ALGO:AGENTS`"
        )


def _shown(space: PlainSpace) -> str:
    if space.parts is not None:
        parts = [f"{name}: {_shown(part)}" for name, part in space.parts.items()]
        return f"{{{', '.join(parts)}}}"
    return f"{space.kind}{list(space.sizes or space.shape)}"
