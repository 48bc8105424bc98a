"""Environments of several agents: each agent is a row of the batch of its policy.

Rows are environment-major, ``[B * k]`` for ``B`` environments of ``k`` agents. So a device holds whole environments,
and a learner sees nothing new. With several policies, each has the rows of its own agents. An agent whose episode has
ended while the others go on has ``valid`` False until the environment resets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh
from jaxrl_dist.checks import did_you_mean, flag
from jaxrl_dist.envs import masks
from jaxrl_dist.envs.base import DeviceEnv, Wrappers, clipped, ended_episodes, restarted, rows_where, space_of
from jaxrl_dist.envs.native import Mask, PlainSpace, named, plain, unnamed
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Discrete
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep

STATE = "state"
"""Part of an observation that holds the state of the whole environment, for ``--critic-sees``."""
WORLD = "world_state"
"""Name of that state beside the observations of JaxMARL's environments."""


@dataclasses.dataclass(frozen=True)
class Team:
    """An environment of several agents in JaxMARL's style (Rutherford et al. 2024, https://arxiv.org/abs/2311.10090).

    ``env`` has ``agents`` (names), ``reset(key) -> (obs, state)``, ``step_env(key, state, actions) -> (obs, state,
    rewards, dones, info)``, ``observation_space(agent)`` and ``action_space(agent)``. All but the states are dicts by
    agent; ``dones`` also has ``__all__``. It may have ``get_avail_actions(state)``: legal actions, by agent.
    """

    env: Any
    family: str = "team"
    time_limit: int | None = None
    """Env steps after which an episode is truncated; the environment itself ends it later, or never."""
    shows_state: bool = False
    """Whether observations have a part ``state``: the environment's own, or all agents' observations side by side."""


class State(NamedTuple):
    """A batch of ``B`` environments of ``k`` agents."""

    env: PyTree  # [B, ...]
    obs: PyTree  # [B * k, ...]; of several policies, a dict by policy
    ended: jax.Array  # [B] bool: the next step is a reset
    steps: jax.Array  # [B] int32, of the episode
    gone: jax.Array  # [B * k] bool: the agent's episode has ended
    episode_return: jax.Array  # [B * k] float32
    episode_length: jax.Array  # [B * k] int32


class Group(NamedTuple):
    """The agents of one policy."""

    agents: Sequence[Any]
    spec: EnvSpec
    native_obs: Any
    native_action: Any
    legal: Callable[[PyTree], PyTree] | None  # (state) -> the legal actions of each agent


def from_team(team: Team, env_id: str, backend: str, wrappers: Wrappers) -> DeviceEnv:
    """Makes the agents of an environment the rows of a batch.

    With ``wrappers.policies``, actions, observations, time steps and episodes are dicts by policy, and the rows of a
    policy are its agents.

    Raises:
      ConfigError: the agents of a policy have different spaces, or spaces that no policy supports; an agent has no
        policy, or several; or a policy has no agent.
    """
    env, agents, name = team.env, list(team.env.agents), f"{backend}:{env_id}"
    if wrappers.action_repeat != 1:
        raise ConfigError(f"--action-repeat works for environments with one agent, and {name} has {len(agents)}")
    for field in ("hide", "frame_stack") if wrappers.policies else ():
        if getattr(wrappers, field) is not None:
            raise ConfigError(f"{flag(field)} works for environments with one policy; leave it out, or --policies")
    key, limit = jax.eval_shape(lambda: jax.random.key(0)), wrappers.limit(team.time_limit)
    shapes = jax.eval_shape(lambda key: env.reset(_plain(key)), key)
    several = agents_of(wrappers.policies, agents, name)
    groups = {policy: _group(team, own, shapes, env_id, backend, limit) for policy, own in several.items()}
    count = len(agents)
    if wrappers.policies:
        policies = {policy: group.spec for policy, group in groups.items()}
        first = next(iter(policies.values()))
        observation, action = ({x: getattr(policies[x], kind) for x in policies} for kind in ("observation", "action"))
        unread = next((each.unread_mask for each in policies.values() if each.unread_mask), "")
        spec = dataclasses.replace(
            first, observation=observation, action=action, num_agents=count, policies=policies, mask=None,
            unread_mask=unread,
        )  # fmt: skip
    else:
        spec = groups[""].spec
    tree: Any = groups if wrappers.policies else groups[""]

    def in_rows(tree: Mapping[Any, jax.Array], agents: Sequence[Any] = agents) -> PyTree:
        return jax.tree.map(lambda *parts: _flat(jnp.stack(parts, axis=1)), *(tree[agent] for agent in agents))

    def rows_of(group: Group, x: jax.Array) -> jax.Array:
        """Returns the rows of a policy's agents, of those of all agents, ``[B * k, ...]``."""
        if len(group.agents) == count:
            return x
        places = np.array([agents.index(agent) for agent in group.agents])
        return _flat(x.reshape(-1, count, *x.shape[1:])[:, places])

    def observe(obs: Mapping[Any, PyTree], state: PyTree) -> PyTree:
        """Returns the observations of all agents, ``[B * k, ...]``, or those of each policy's."""

        def of_group(group: Group) -> PyTree:
            seen, extra = named(group.native_obs, in_rows(obs, group.agents)), {}
            if group.legal is not None:
                extra[masks.PART] = in_rows(jax.vmap(group.legal)(state), group.agents).astype(bool)
            if team.shows_state:
                whole = jax.vmap(lambda obs: _whole(obs, agents))(obs)
                extra[STATE] = jnp.repeat(whole, len(group.agents), axis=0)
            if not extra:
                return seen
            return {**(seen if isinstance(seen, dict) else {"observation": seen}), **extra}

        return mesh.over_policies(of_group)(tree)

    def actions_of(group: Group, action: PyTree) -> dict[Any, PyTree]:
        chosen, size = clipped(group.spec.action, action), len(group.agents)
        return {
            agent: unnamed(group.native_action, jax.tree.map(lambda x, at=at: x[at::size], chosen))
            for at, agent in enumerate(group.agents)
        }

    def reset_all(keys: jax.Array) -> tuple[PyTree, PyTree]:
        obs, state = jax.vmap(lambda key: env.reset(_plain(key)))(keys)
        return observe(obs, state), jax.tree.map(lambda x: jnp.broadcast_to(x, jnp.shape(x) or keys.shape), state)

    def reset(keys: jax.Array) -> tuple[State, PyTree]:
        obs, state = reset_all(keys[::count])
        none, zeros = jnp.zeros(keys.shape, bool), jnp.zeros(keys.shape, jnp.float32)
        return State(state, obs, none[::count], jnp.zeros_like(none[::count], jnp.int32), none, zeros, none * 0), obs

    def step(state: State, action: PyTree, keys: jax.Array) -> tuple[State, Timestep, EpisodeStats]:
        keys = jax.vmap(jax.random.split)(keys[::count])
        chosen = {"": action} if not wrappers.policies else action
        actions = {
            agent: own for policy, group in groups.items() for agent, own in actions_of(group, chosen[policy]).items()
        }

        def step_one(key: jax.Array, env_state: PyTree, actions: Mapping[Any, PyTree]) -> Any:
            return env.step_env(_plain(key), env_state, actions)[:4]

        obs, env_state, reward, dones = jax.vmap(step_one)(keys[:, 0], state.env, actions)
        stepped = jax.tree.map(
            lambda new, old: new.astype(old.dtype), (observe(obs, env_state), env_state), (state.obs, state.env)
        )

        def started(keys: jax.Array, ended: jax.Array, stepped: PyTree) -> PyTree:
            def of_group(group: Group, new: PyTree, old: PyTree) -> PyTree:
                return rows_where(jnp.repeat(ended, len(group.agents)), new, old)

            seen, env_state = reset_all(keys)
            return mesh.over_policies(of_group)(tree, seen, stepped[0]), rows_where(ended, env_state, stepped[1])

        seen, env_state = restarted(started, keys[:, 1], state.ended, stepped)
        steps = jnp.where(state.ended, 0, state.steps + 1)
        timed = jnp.zeros_like(state.ended) if limit is None else steps >= limit
        over = dones["__all__"].astype(bool)
        resetting = jnp.repeat(state.ended, count)
        valid = ~resetting & ~state.gone
        terminated = valid & (in_rows(dones).astype(bool) | jnp.repeat(over, count))
        truncated = valid & ~terminated & jnp.repeat(timed, count)
        gone = ~resetting & (state.gone | terminated | truncated)
        ended = ~state.ended & (over | timed | jnp.all(gone.reshape(-1, count), axis=1))
        rewards = jnp.where(valid, in_rows(reward).astype(jnp.float32).reshape(valid.shape), 0.0)
        before = jnp.where(resetting, 0.0, state.episode_return), jnp.where(resetting, 0, state.episode_length)
        episode_return, episode_length = before[0] + rewards, before[1] + valid
        episodes = ended_episodes(terminated | truncated, episode_return, episode_length)
        new = State(env_state, seen, ended, steps, gone, episode_return, episode_length)

        def of_group(group: Group, seen: PyTree) -> tuple[Timestep, EpisodeStats]:
            parts = rewards, terminated, truncated, valid
            own, counts = jax.tree.map(lambda x: rows_of(group, x), (parts, episodes))
            return Timestep(seen, *own), counts

        return new, *mesh.over_policies(of_group, outputs=2)(tree, seen)

    return DeviceEnv(spec, reset, step)


def agents_of(policies: Mapping[str, str], agents: Sequence[Any], name: str) -> dict[str, list[Any]]:
    """Returns the agents of each policy, in the order of the environment; of no policies, all under ``""``.

    Args:
      policies: names of agents by policy, with ``*``, ``?`` and ``[]`` as in the shell, and commas between several.
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


def _group(
    team: Team, agents: Sequence[Any], shapes: tuple[PyTree, PyTree], env_id: str, backend: str, limit: int | None
) -> Group:
    """Returns what one policy sees and does for its agents.

    Args:
      shapes: of the observations of all agents, and of the state.

    Raises:
      ConfigError: the agents have different spaces, or spaces that no policy supports.
    """
    (first, state), env, name = shapes, team.env, f"{backend}:{env_id}"
    native_obs, native_action = (
        _the_same(name, what, {agent: kind(agent) for agent in agents})
        for what, kind in (("observations", env.observation_space), ("actions", env.action_space))
    )
    known = plain(native_obs)
    if known.kind == "Box":  # some libraries name other dtypes and shapes than they show
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
    observation, mask_part = masks.with_mask(observation, action, mask)
    if team.shows_state:
        shape = jax.eval_shape(lambda obs: _whole(obs, list(env.agents)), first)
        whole = space_of(PlainSpace("Box", shape.shape, shape.dtype.name, -jnp.inf, jnp.inf), name, "states")
        observation = {**(observation if isinstance(observation, dict) else {"observation": observation}), STATE: whole}
    spec = EnvSpec(
        env_id, backend, team.family, observation, action, limit,
        mask=mask_part, unread_mask=mask.unread, num_agents=len(agents),
    )  # fmt: skip
    return Group(agents, spec, native_obs, native_action, legal)


def _flat(x: jax.Array) -> jax.Array:
    """Merges the first two axes."""
    return x.reshape(-1, *x.shape[2:])


def _plain(key: jax.Array) -> jax.Array:
    """Returns a key as libraries know it, uint32 ``[2]``: they keep keys in states, which are saved."""
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def _whole(obs: Mapping[Any, PyTree], agents: list[Any]) -> jax.Array:
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


def _the_same(name: str, what: str, native: Mapping[Any, Any]) -> Any:
    """Returns the space that all agents have.

    Raises:
      ConfigError: they have different ones.
    """
    kinds: dict[str, list[str]] = {}
    for agent, space in native.items():
        kinds.setdefault(_shown(plain(space)), []).append(str(agent))
    if len(kinds) > 1:
        each = "; ".join(f"{', '.join(agents)}: {kind}" for kind, agents in kinds.items())
        raise ConfigError(
            f"{name} has agents with different {what} ({each}); one policy needs agents with equal ones, "
            "and --policies gives others to others"
        )
    return next(iter(native.values()))


def _shown(space: PlainSpace) -> str:
    if space.parts is not None:
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in space.parts.items()) + "}"
    return f"{space.kind}{list(space.shape) if space.kind == 'Box' else list(space.sizes or ())}"
