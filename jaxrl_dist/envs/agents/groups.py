"""Which agents of an environment share a policy, and what that policy sees and does for them."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.checks import did_you_mean, flag
from jaxrl_dist.envs import masks
from jaxrl_dist.envs.base import UNWRAPPED, Wrappers, space_of
from jaxrl_dist.envs.native import Mask, PlainSpace, plain
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Part, describe
from jaxrl_dist.types import EnvSpec, PyTree

AGENTS = "agents"
"""Part of an observation that holds the observations of all agents that act as one, each part ``[k, ...]``."""
AGENT = "agent"
"""Part of an observation that says which agent sees it, one-hot among the agents of its policy."""
STATE = "state"
"""Part of an observation that holds the state of the whole environment, for ``--critic-sees``."""
WORLD = "world_state"
"""Name of that state among the observations of JaxMARL's environments."""


@dataclasses.dataclass(frozen=True)
class Team:
    """A multi-agent environment in JaxMARL's style (Rutherford et al. 2024, https://arxiv.org/abs/2311.10090).

    ``env`` has ``agents`` (names), ``reset(key) -> (obs, state)``, ``step_env(key, state, actions) -> (obs, state,
    rewards, dones, info)``, ``observation_space(agent)`` and ``action_space(agent)``. Everything except the states is a
    dict keyed by agent; ``dones`` also has ``__all__``. ``get_avail_actions(state)`` (legal actions) is optional.
    """

    env: Any
    family: str = "team"
    time_limit: int | None = None
    """Env steps after which an episode is truncated; the environment itself ends it later, or never."""
    shows_state: bool = False
    """Whether observations have a part ``state``: the environment's own, or all agents' observations side by side."""


class Group(NamedTuple):
    """The agents of one policy."""

    agents: Sequence[Any]
    spec: EnvSpec
    native_obs: Any
    native_action: Any
    legal: Callable[[PyTree], PyTree] | None  # (state) -> the legal actions of each agent
    joint: bool
    """Whether they act as one, in one row of the batch; see ``joined``."""

    @property
    def rows(self) -> int:
        """Rows of the batch per environment."""
        return 1 if self.joint else len(self.agents)


def check_wrappers(wrappers: Wrappers, agents: Sequence[Any], name: str) -> None:
    """Checks the flags that multi-agent environments, or several policies, do not support.

    Raises:
      ConfigError: names a flag that works only for one agent or one policy.
    """
    for field in ("action_repeat", "info_metrics"):
        if getattr(wrappers, field) != getattr(UNWRAPPED, field):
            raise ConfigError(f"{flag(field)} works for environments with one agent, and {name} has {len(agents)}")
    for field in ("hide", "frame_stack") if wrappers.policies else ():
        if getattr(wrappers, field) is not None:
            raise ConfigError(f"{flag(field)} works for environments with one policy; leave it out, or --policies")
    if wrappers.joint and wrappers.frame_stack is not None:
        # Frames are stacked along the first axis, which is that of the agents here.
        raise ConfigError(f"--frame-stack does not work for agents that act as one, as the {len(agents)} of {name} do")


def agents_of(policies: Mapping[str, str], agents: Sequence[Any], name: str) -> dict[str, list[Any]]:
    """Returns the agents of each policy, in the environment's order; without policies, all under ``""``.

    Args:
      policies: names of agents, keyed by policy: shell patterns (``*``, ``?``, ``[]``), separated by commas.
      name: the environment's, for errors.

    Raises:
      ConfigError: an agent has no policy, or several; or a policy has no agent.
    """
    if not policies:
        return {"": list(agents)}
    names = [str(agent) for agent in agents]
    there = f"the agents of {name} are {', '.join(names)}"
    owners: dict[str, list[str]] = {each: [] for each in names}
    for policy, text in policies.items():
        for pattern in text.split(","):
            found = fnmatch.filter(names, pattern.strip())
            if not found:
                near = did_you_mean(pattern, names)
                raise ConfigError(f"policy {policy}: no agent is named {pattern.strip()}{near}; {there}")
            for each in found:
                owners[each] += [policy] if policy not in owners[each] else []
    for each, found in owners.items():
        if len(found) > 1:
            raise ConfigError(f"agent {each} has the policies {' and '.join(found)}; it can have one")
    if left := [each for each, found in owners.items() if not found]:
        raise ConfigError(f"agents without a policy: {', '.join(left)}; {there}, and each needs one")
    return {
        policy: [agent for agent, each in zip(agents, names, strict=True) if owners[each] == [policy]]
        for policy in policies
    }


def group_of(
    team: Team,
    agents: Sequence[Any],
    shapes: tuple[PyTree, PyTree],
    env_id: str,
    backend: str,
    how: Wrappers,
    policy: str,
) -> Group:
    """Returns what one policy sees and does for its agents.

    Args:
      shapes: of the observations of all agents, and of the state.
      policy: its name, ``""`` for the only one.

    Raises:
      ConfigError: the agents have different spaces, or spaces that no policy supports.
    """
    (first, state), env, name = shapes, team.env, f"{backend}:{env_id}"
    natives = {"observations": env.observation_space, "actions": env.action_space}
    for what, kind in natives.items():
        check_same(name, what, {agent: plain(kind(agent)) for agent in agents})
    native_obs, native_action = (kind(agents[0]) for kind in natives.values())
    known = plain(native_obs)
    if known.kind == "Box":  # some libraries' spaces have other dtypes and shapes than their observations
        known = known._replace(shape=tuple(first[agents[0]].shape), dtype=first[agents[0]].dtype.name)
    observation, action = space_of(known, name, "observations"), space_of(plain(native_action), name, "actions")
    mask = masks.of_parts(known, plain(native_action))
    legal = _legal_actions(env, state) if isinstance(action, Discrete) and not mask.where else None
    if legal is not None and isinstance(action, Discrete):
        sizes = {jax.eval_shape(legal, state)[agent].size for agent in agents}
        mask = Mask("method", legal.__name__)
        if sizes != {action.n}:
            mask = mask._replace(unread=masks.misfit(f"its {legal.__name__}", max(sizes), plain(native_action)))
            legal = None
    joint = policy in how.joint
    if how.agent_ids or joint:
        one_hot = space_of(PlainSpace("Box", (len(agents),), "float32", 0.0, 1.0), name, "indices")
        observation = {**in_parts(observation), AGENT: one_hot}
    if joint:
        observation, action = joined(name, observation, action, len(agents), mask)
    observation, mask_part = masks.with_mask(observation, action, mask)
    if team.shows_state or joint:
        shape = jax.eval_shape(lambda obs: whole_state(obs, list(env.agents)), first)
        whole = space_of(PlainSpace("Box", shape.shape, shape.dtype.name, -jnp.inf, jnp.inf), name, "states")
        observation = {**in_parts(observation), STATE: whole}
    spec = EnvSpec(
        env_id, backend, team.family, observation, action, how.limit(team.time_limit),
        mask=mask_part, unread_mask=mask.unread, num_agents=1 if joint else len(agents),
    )  # fmt: skip
    return Group(agents, spec, native_obs, native_action, legal, joint)


def of_policies(policies: Mapping[str, EnvSpec]) -> EnvSpec:
    """Joins the specs of several policies: spaces are dicts keyed by policy, and rows add up."""
    return dataclasses.replace(
        next(iter(policies.values())),
        observation={policy: each.observation for policy, each in policies.items()},
        action={policy: each.action for policy, each in policies.items()},
        num_agents=sum(each.num_agents for each in policies.values()),
        policies=policies,
        mask=None,
        unread_mask=next((each.unread_mask for each in policies.values() if each.unread_mask), ""),
    )


def in_parts(observation: Any) -> dict[str, Any]:
    """Returns an observation or a space with parts; one without parts becomes the part ``observation``."""
    return observation if isinstance(observation, dict) else {"observation": observation}


def joined(name: str, observation: Any, action: Any, count: int, mask: Mask) -> tuple[Any, Any]:
    """Returns the spaces of agents that act as one: all their observations, and an action for each.

    Raises:
      ConfigError: their actions are not discrete, or a part of their observations is a mask.
    """
    if not isinstance(action, Discrete):
        raise ConfigError(f"{name}: agents that act as one need discrete actions, and have {describe(action)}")
    if mask.where == "part":
        raise ConfigError(f"{name}: agents that act as one need legal actions by a method, not as a part {mask.name!r}")

    def several(part: Part) -> Part:
        if isinstance(part, Box):
            bounds = (np.stack([bound] * count) for bound in (part.low, part.high))
            return Box((count, *part.shape), part.dtype, *bounds)
        raise ConfigError(f"{name}: agents that act as one need observations of numbers, and have {describe(part)}")

    return {AGENTS: jax.tree.map(several, observation)}, MultiDiscrete((action.n,) * count)


def whole_state(obs: Mapping[Any, PyTree], agents: list[Any]) -> jax.Array:
    """Returns the state of the whole environment: the library's, or all observations side by side."""
    if WORLD in obs:
        return obs[WORLD].reshape(-1).astype(jnp.float32)
    leaves = jax.tree.leaves([obs[agent] for agent in agents])
    return jnp.concatenate([x.reshape(-1).astype(jnp.float32) for x in leaves])


def _legal_actions(env: Any, state: PyTree) -> Callable[[PyTree], PyTree] | None:
    """Returns the environment's function for legal actions, if it has one that works."""
    for name in ("get_avail_actions", "get_legal_moves"):
        found: Callable[[PyTree], PyTree] | None = getattr(env, name, None)
        with contextlib.suppress(NotImplementedError):
            if found is not None:
                jax.eval_shape(found, state)
                return found
    return None


def check_same(name: str, what: str, native: Mapping[Any, PlainSpace]) -> None:
    """Checks that all agents have the same space.

    Raises:
      ConfigError: they have different ones.
    """
    kinds: dict[str, list[str]] = {}
    for agent, space in native.items():
        kinds.setdefault(_shown(space), []).append(str(agent))
    if len(kinds) > 1:
        each = "; ".join(f"{', '.join(agents)}: {kind}" for kind, agents in kinds.items())
        raise ConfigError(
            f"{name} has agents with different {what} ({each}); one policy needs agents with equal ones, "
            "and --policies gives others to others"
        )


def _shown(space: PlainSpace) -> str:
    if space.parts is not None:
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in space.parts.items()) + "}"
    return f"{space.kind}{list(space.shape) if space.kind == 'Box' else list(space.sizes or ())}"
