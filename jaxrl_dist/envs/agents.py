"""Environments of several agents that share one policy: each agent is a row of the batch.

Rows are environment-major, ``[B * k]`` for ``B`` environments of ``k`` agents. So a device holds whole environments,
and a learner sees nothing new. An agent whose episode has ended while the others go on has ``valid`` False until the
environment resets.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    obs: PyTree  # [B * k, ...]
    ended: jax.Array  # [B] bool: the next step is a reset
    steps: jax.Array  # [B] int32, of the episode
    gone: jax.Array  # [B * k] bool: the agent's episode has ended
    episode_return: jax.Array  # [B * k] float32
    episode_length: jax.Array  # [B * k] int32


def from_team(team: Team, env_id: str, backend: str, wrappers: Wrappers) -> DeviceEnv:
    """Makes the agents of an environment the rows of a batch.

    Raises:
      ConfigError: the agents have different spaces, or spaces that no policy supports.
    """
    env, agents, name = team.env, list(team.env.agents), f"{backend}:{env_id}"
    if wrappers.action_repeat != 1:
        raise ConfigError(f"--action-repeat works for environments with one agent, and {name} has {len(agents)}")
    key = jax.eval_shape(lambda: jax.random.key(0))
    first, state = jax.eval_shape(lambda key: env.reset(_plain(key)), key)
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
        shape = jax.eval_shape(lambda obs: _whole(obs, agents), first)
        whole = space_of(PlainSpace("Box", shape.shape, shape.dtype.name, -jnp.inf, jnp.inf), name, "states")
        observation = {**(observation if isinstance(observation, dict) else {"observation": observation}), STATE: whole}
    limit = wrappers.limit(team.time_limit)
    spec = EnvSpec(
        env_id, backend, team.family, observation, action, limit,
        mask=mask_part, unread_mask=mask.unread, num_agents=len(agents),
    )  # fmt: skip
    count = len(agents)

    def of_agent(rows: PyTree, index: int) -> PyTree:
        return jax.tree.map(lambda x: x[index::count], rows)

    def in_rows(tree: Mapping[Any, jax.Array]) -> PyTree:
        return jax.tree.map(lambda *parts: _flat(jnp.stack(parts, axis=1)), *(tree[agent] for agent in agents))

    def observe(obs: Mapping[Any, PyTree], state: PyTree) -> PyTree:
        """Returns the observations of all agents, ``[B * k, ...]``."""
        seen, extra = named(native_obs, in_rows(obs)), {}
        if legal is not None:
            extra[masks.PART] = in_rows(jax.vmap(legal)(state)).astype(bool)
        if team.shows_state:
            extra[STATE] = jnp.repeat(jax.vmap(lambda obs: _whole(obs, agents))(obs), count, axis=0)
        if not extra:
            return seen
        return {**(seen if isinstance(seen, dict) else {"observation": seen}), **extra}

    def reset_all(keys: jax.Array) -> tuple[PyTree, PyTree]:
        obs, state = jax.vmap(lambda key: env.reset(_plain(key)))(keys)
        return observe(obs, state), jax.tree.map(lambda x: jnp.broadcast_to(x, jnp.shape(x) or keys.shape), state)

    def reset(keys: jax.Array) -> tuple[State, PyTree]:
        obs, state = reset_all(keys[::count])
        none, zeros = jnp.zeros(keys.shape, bool), jnp.zeros(keys.shape, jnp.float32)
        return State(state, obs, none[::count], jnp.zeros_like(none[::count], jnp.int32), none, zeros, none * 0), obs

    def step(state: State, action: PyTree, keys: jax.Array) -> tuple[State, Timestep, EpisodeStats]:
        keys = jax.vmap(jax.random.split)(keys[::count])
        chosen = clipped(spec.action, action)
        actions = {agent: unnamed(native_action, of_agent(chosen, index)) for index, agent in enumerate(agents)}

        def step_one(key: jax.Array, env_state: PyTree, actions: Mapping[Any, PyTree]) -> Any:
            return env.step_env(_plain(key), env_state, actions)[:4]

        obs, env_state, reward, dones = jax.vmap(step_one)(keys[:, 0], state.env, actions)
        stepped = jax.tree.map(
            lambda new, old: new.astype(old.dtype), (observe(obs, env_state), env_state), (state.obs, state.env)
        )

        def started(keys: jax.Array, ended: jax.Array, stepped: PyTree) -> PyTree:
            seen, env_state = reset_all(keys)
            return rows_where(jnp.repeat(ended, count), seen, stepped[0]), rows_where(ended, env_state, stepped[1])

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
        return new, Timestep(seen, rewards, terminated, truncated, valid), episodes

    return DeviceEnv(spec, reset, step)


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
        raise ConfigError(f"{name} has agents with different {what} ({each}); one policy needs agents with equal ones")
    return next(iter(native.values()))


def _shown(space: PlainSpace) -> str:
    if space.parts is not None:
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in space.parts.items()) + "}"
    return f"{space.kind}{list(space.shape) if space.kind == 'Box' else list(space.sizes or ())}"
