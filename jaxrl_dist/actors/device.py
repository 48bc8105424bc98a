"""Acting inside a compiled program: a scan over environments that are pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist import mesh, rng
from jaxrl_dist.actors.common import after_step, step_numbers
from jaxrl_dist.envs import DeviceEnv
from jaxrl_dist.envs.gymnax import RESET
from jaxrl_dist.types import Algorithm, EpisodeStats, PyTree, Rollout, Timestep, Variables


class ActorState(NamedTuple):
    """What acting carries from rollout to rollout; every leaf is ``[B, ...]``, divided over the devices."""

    env: PyTree
    obs: PyTree
    core: PyTree
    initial_core: PyTree  # what ``core`` is set back to with each episode


def init(algorithm: Algorithm, env: DeviceEnv, num_envs: int, key: jax.Array) -> ActorState:
    """Starts ``num_envs`` environments; ``key`` is the key of the environment stream."""
    keys = rng.per_index(jax.random.fold_in(key, RESET), jnp.arange(num_envs, dtype=jnp.int32))
    state, obs = env.reset(keys)
    core = algorithm.initial_core(num_envs)
    return ActorState(state, obs, core, jax.tree.map(jnp.copy, core))


def make_rollout(
    algorithm: Algorithm, env: DeviceEnv, rollout_length: int
) -> Callable[..., tuple[ActorState, Rollout, EpisodeStats]]:
    """Builds ``(variables, actor_state, act_key, env_key, iteration, env_step) -> (actor_state, rollout, episodes)``.

    It runs under ``jax.shard_map``; the statistics are sums over this device's environments.
    """

    def rollout(
        variables: Variables,
        actor: ActorState,
        act_key: jax.Array,
        env_key: jax.Array,
        iteration: jax.Array,
        env_step: jax.Array,
    ) -> tuple[ActorState, Rollout, EpisodeStats]:
        num_envs = jax.tree.leaves(actor.obs)[0].shape[0]
        index = mesh.global_index(num_envs)
        steps = step_numbers(iteration, rollout_length)
        keys = rng.per_step(act_key, steps, index), rng.per_step(env_key, steps, index)

        def step(
            carry: tuple[PyTree, PyTree, PyTree], keys: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree, Timestep, EpisodeStats]]:
            env_state, obs, core = carry
            action, core, extras = algorithm.policy(variables, obs, core, keys[0], env_step)
            env_state, timestep, episodes = env.step(env_state, action, keys[1])
            core = after_step(algorithm, core, actor.initial_core, action, timestep)
            carry = mesh.vary((env_state, timestep.obs, core))
            return carry, (obs, action, extras, timestep._replace(obs=()), episodes)

        (env_state, obs, core), (observations, action, extras, timestep, episodes) = jax.lax.scan(
            step, (actor.env, actor.obs, actor.core), keys
        )
        experience = Rollout(
            obs=jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), observations, obs),
            action=action,
            reward=timestep.reward,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            valid=timestep.valid,
            extras=extras,
            core=actor.core,
            final_core=core,
        )
        return ActorState(env_state, obs, core, actor.initial_core), experience, episodes.merge()

    return rollout
