"""Multi-agent environments: each agent is a row of its policy's batch.

Rows are environment-major, ``[B * k]`` for ``B`` environments of ``k`` agents. So a device holds whole environments,
and learners need no special case. With several policies, each has the rows of its agents. An agent whose episode has
ended while the others go on has ``valid`` False until the environment resets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh, rng
from jaxrl_dist.envs import masks
from jaxrl_dist.envs.agents.groups import (
    AGENT,
    AGENTS,
    STATE,
    Group,
    Team,
    agents_of,
    check_wrappers,
    group_of,
    in_parts,
    of_policies,
    whole_state,
)
from jaxrl_dist.envs.base import DeviceEnv, Wrappers, clipped, policy_space, restarted, rows_where
from jaxrl_dist.envs.contract import Contract, of_library, zero_action
from jaxrl_dist.envs.drawing import own_render
from jaxrl_dist.envs.episodes import ended_episodes
from jaxrl_dist.envs.native import named, unnamed, without
from jaxrl_dist.types import EpisodeStats, PyTree, Timestep


class State(NamedTuple):
    """A batch of ``B`` environments of ``k`` agents."""

    env: PyTree  # [B, ...]
    obs: PyTree  # [B * k, ...]; with several policies, a dict keyed by policy
    ended: jax.Array  # [B] bool: the next step is a reset
    steps: jax.Array  # [B] int32, of the episode
    gone: jax.Array  # [B * k] bool: the agent's episode has ended
    episode_return: jax.Array  # [B * k] float32
    episode_length: jax.Array  # [B * k] int32


def from_team(team: Team, env_id: str, backend: str, wrappers: Wrappers, contract: Contract | None = None) -> DeviceEnv:
    """Makes the agents of an environment the rows of a batch.

    With ``wrappers.policies``, actions, observations, time steps and episodes are dicts keyed by policy, and a policy's
    rows are its agents. The agents of a policy in ``wrappers.joint`` share one row. Its reward is the mean of what the
    environment pays all of them, also those whose episodes have ended, until the last one's has.

    Raises:
      ConfigError: the agents of a policy have different spaces, or spaces that no policy supports; an agent has no
        policy, or several; or a policy has no agent.
      EnvError: as ``contract.of_env``.
    """
    env, agents, name = team.env, list(team.env.agents), f"{backend}:{env_id}"
    check_wrappers(wrappers, agents, name)
    contract, limit = contract or Contract(name), wrappers.limit(team.time_limit)
    shapes = _traced_reset(contract, env)
    several = agents_of(wrappers.policies, agents, name)
    how = env_id, backend, wrappers
    groups = {policy: group_of(team, own, shapes, *how, policy) for policy, own in several.items()}
    _trace_step(contract, env, *shapes)
    count, rows = len(agents), sum(group.rows for group in groups.values())
    if wrappers.policies:
        spec = of_policies({policy: group.spec for policy, group in groups.items()})
    else:
        spec = groups[""].spec

    def in_rows(tree: Mapping[Any, jax.Array], agents: Sequence[Any] = agents) -> PyTree:
        return jax.tree.map(lambda *parts: _flat(jnp.stack(parts, axis=1)), *(tree[agent] for agent in agents))

    def rows_of(group: Group, x: jax.Array) -> jax.Array:
        """Selects the rows of a policy's agents from those of all agents, ``[B * k, ...]``."""
        if len(group.agents) == count:
            return x
        return _flat(of_agents(group, x))

    def of_agents(group: Group, x: jax.Array) -> jax.Array:
        """Returns the same rows by environment, ``[B, k, ...]``."""
        return x.reshape(-1, count, *x.shape[1:])[:, places(group)]

    def places(group: Group) -> np.ndarray:
        return np.array([agents.index(agent) for agent in group.agents])

    def pays(valid: jax.Array) -> jax.Array:
        """Returns whose rewards count, from who is there, both ``[B * k]``: all of a team while one of it is."""
        each = valid.reshape(-1, count)
        for group in groups.values():
            if group.joint:
                each = each.at[:, places(group)].set(each[:, places(group)].any(axis=1, keepdims=True))
        return each.reshape(-1)

    def observe(obs: Mapping[Any, PyTree], state: PyTree) -> PyTree:
        """Returns the observations of each policy's agents, ``[B * k, ...]``."""

        def of_group(group: Group) -> PyTree:
            seen, extra = named(group.native_obs, in_rows(obs, group.agents)), {}
            if group.legal is not None:
                extra[masks.PART] = in_rows(jax.vmap(group.legal)(state), group.agents).astype(bool)
            if wrappers.agent_ids or group.joint:
                extra[AGENT] = jnp.tile(jnp.eye(len(group.agents)), (len(jax.tree.leaves(obs)[0]), 1))
            if team.shows_state or group.joint:
                whole = jax.vmap(lambda obs: whole_state(obs, agents))(obs)
                extra[STATE] = jnp.repeat(whole, group.rows, axis=0)
            if group.joint:
                seen = {**in_parts(seen), AGENT: extra.pop(AGENT)}
                extra = {name: x.reshape(len(extra[STATE]), -1) for name, x in extra.items()}
                return {AGENTS: jax.tree.map(lambda x: x.reshape(-1, len(group.agents), *x.shape[1:]), seen), **extra}
            if not extra:
                return seen
            return {**in_parts(seen), **extra}

        return spec.bare(mesh.over_policies(of_group)(groups))

    def actions_of(group: Group, action: PyTree) -> dict[Any, PyTree]:
        chosen, size = clipped(group.spec.action, action), len(group.agents)
        chosen = _flat(chosen) if group.joint else chosen
        return {
            agent: unnamed(group.native_action, jax.tree.map(lambda x, at=at: x[at::size], chosen))
            for at, agent in enumerate(group.agents)
        }

    def reset_all(keys: jax.Array) -> tuple[PyTree, PyTree]:
        obs, state = jax.vmap(lambda key: env.reset(rng.raw(key)))(keys)
        return observe(obs, state), jax.tree.map(lambda x: jnp.broadcast_to(x, jnp.shape(x) or keys.shape), state)

    def reset(keys: jax.Array) -> tuple[State, PyTree]:
        obs, state = reset_all(keys[::rows])
        size = len(keys) // rows * count
        none, zeros = jnp.zeros(size, bool), jnp.zeros(size, jnp.float32)
        return State(state, obs, none[::count], jnp.zeros_like(none[::count], jnp.int32), none, zeros, none * 0), obs

    def step(state: State, action: PyTree, keys: jax.Array) -> tuple[State, Timestep, EpisodeStats]:
        keys = jax.vmap(jax.random.split)(keys[::rows])
        chosen = spec.keyed(action)
        actions = {
            agent: own for policy, group in groups.items() for agent, own in actions_of(group, chosen[policy]).items()
        }

        def step_one(key: jax.Array, env_state: PyTree, actions: Mapping[Any, PyTree]) -> Any:
            return env.step_env(rng.raw(key), env_state, actions)[:4]

        obs, env_state, reward, dones = jax.vmap(step_one)(keys[:, 0], state.env, actions)
        stepped = jax.tree.map(
            lambda new, old: new.astype(old.dtype), (observe(obs, env_state), env_state), (state.obs, state.env)
        )

        def started(keys: jax.Array, ended: jax.Array, stepped: PyTree) -> PyTree:
            def of_group(group: Group, new: PyTree, old: PyTree) -> PyTree:
                return rows_where(jnp.repeat(ended, group.rows), new, old)

            seen, env_state = reset_all(keys)
            rows = mesh.over_policies(of_group)(groups, spec.keyed(seen), spec.keyed(stepped[0]))
            return spec.bare(rows), rows_where(ended, env_state, stepped[1])

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
        rewards = jnp.where(pays(valid), in_rows(reward).astype(jnp.float32).reshape(valid.shape), 0.0)
        before = jnp.where(resetting, 0.0, state.episode_return), jnp.where(resetting, 0, state.episode_length)
        episode_return, episode_length = before[0] + rewards, before[1] + valid
        episodes = ended_episodes(terminated | truncated, episode_return, episode_length)
        new = State(env_state, seen, ended, steps, gone, episode_return, episode_length)

        def of_group(group: Group, seen: PyTree) -> tuple[Timestep, EpisodeStats]:
            parts = rewards, terminated, truncated, valid
            if not group.joint:
                own, counts = jax.tree.map(lambda x: rows_of(group, x), (parts, episodes))
                return Timestep(seen, *own), counts
            reward, _, cut, there = (of_agents(group, x) for x in parts)
            over = there.any(axis=1) & of_agents(group, gone).all(axis=1)  # the last agents' episodes end
            cut = over & cut.any(axis=1)
            total = of_agents(group, episode_return).mean(axis=1), of_agents(group, episode_length).max(axis=1)
            step = Timestep(seen, reward.mean(axis=1), over & ~cut, cut, there.any(axis=1))
            return step, ended_episodes(over, *total)

        stepped, ended = map(spec.bare, mesh.over_policies(of_group, outputs=2)(groups, spec.keyed(seen)))
        return new, stepped, ended

    return DeviceEnv(spec, reset, step, own_render(env))


def _traced_reset(contract: Contract, env: Any) -> tuple[PyTree, PyTree]:
    """Traces the reset of a multi-agent environment in JaxMARL's style; returns its observations and its state.

    Raises:
      EnvError: as ``contract.of_env``.
    """
    agents = list(env.agents)
    if not agents:
        raise contract.stop("agents", "it has no agents")
    first = contract.trace("reset", env, lambda key: env.reset(rng.raw(key)), jax.eval_shape(lambda: jax.random.key(0)))
    obs, state = contract.returned("reset", first, ("observations", "state"))
    _check_agents(contract, "reset", agents, observation=obs)
    contract.arrays(state)
    contract.halt()
    return obs, state


def _trace_step(contract: Contract, env: Any, obs: PyTree, state: PyTree) -> None:
    """Traces a step after the reset that ``_traced_reset`` returned, and checks all that both return.

    Raises:
      EnvError: as ``contract.of_env``.
    """
    agents = list(env.agents)
    actions = {}
    for agent in agents:
        native = env.action_space(agent)
        actions[agent] = zero_action(native, policy_space(native, contract.name, "actions"))
    key = jax.eval_shape(lambda: jax.random.key(0))
    step = contract.trace("step_env", env, lambda key, *now: env.step_env(rng.raw(key), *now), key, state, actions)
    names = ("observations", "state", "rewards", "dones", "info")
    next_obs, next_state, rewards, dones, _ = contract.returned("step_env", step, names)
    _check_agents(contract, "step_env", agents, observation=next_obs, reward=rewards)
    _check_agents(contract, "step_env", [*agents, "__all__"], done=dones)
    if not of_library(env.observation_space):
        for agent in agents:
            for call, seen in {"reset": obs, "step_env": next_obs}.items():
                contract.observation(f"{agent} in {call}", seen[agent], env.observation_space(agent))
            contract.number(f"the reward of {agent}", rewards[agent])
            contract.flag(f"the done of {agent}", dones[agent])
        contract.flag("the done of __all__", dones["__all__"])
    before, after = ({agent: seen[agent] for agent in agents} for seen in (obs, next_obs))
    contract.same("the observations", before, after, "reset")
    contract.same("the state", state, next_state, "reset")
    contract.halt()


def _check_agents(contract: Contract, call: str, agents: Sequence[Any], **parts: Any) -> None:
    """Checks that dicts keyed by agent have all agents."""
    for what, values in parts.items():
        if text := without(call, what, values, agents):
            raise contract.stop(what, text)


def _flat(x: jax.Array) -> jax.Array:
    """Merges the first two axes."""
    return x.reshape(-1, *x.shape[2:])
