"""Acting on environments that live on the host: one jitted call and one environment step at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.common import after_step
from jaxrl_dist.envs import HostEnv
from jaxrl_dist.types import Algorithm, EpisodeStats, PyTree, Rollout, Timestep, Variables


class HostActor:
    """Fills rollouts that lie on the mesh from environments on the host.

    Each observation is sent to the devices once, where the same call that chooses the action also stores it; only
    the action comes back.
    """

    def __init__(self, algorithm: Algorithm, env: HostEnv, mesh: Mesh, rollout_length: int, act_key: jax.Array) -> None:
        self._env = env
        self._mesh = mesh
        self._length = rollout_length
        self._act_key = act_key
        self._obs = env.reset()
        self._outcome = np.zeros((4, env.num_envs), np.float32)
        core = algorithm.initial_core(env.num_envs)
        self._initial_core = meshes.place(core, mesh, meshes.BATCH)
        self._core = meshes.place(jax.tree.map(jnp.copy, core), mesh, meshes.BATCH)
        self._acting_seconds = self._env_seconds = 0.0

        def allocate(variables: Variables, obs: PyTree, core: PyTree) -> Rollout:
            keys = jax.random.split(act_key, obs.shape[0])
            action, _, extras = jax.eval_shape(algorithm.policy, variables, obs, core, keys, jnp.zeros(()))
            flags = jnp.zeros((rollout_length, obs.shape[0]), bool)

            def blank(x: jax.ShapeDtypeStruct) -> jax.Array:
                return jnp.zeros((rollout_length, *x.shape), x.dtype)

            buffer = Rollout(
                obs=jnp.zeros((rollout_length + 1, *obs.shape), obs.dtype),
                action=jax.tree.map(blank, action),
                reward=flags.astype(jnp.float32),
                terminated=flags,
                truncated=flags,
                valid=flags,
                extras=jax.tree.map(blank, extras),
                core=core,
                final_core=core,
            )
            return meshes.vary(buffer)

        def record(
            buffer: Rollout, core: PyTree, initial_core: PyTree, obs: PyTree, outcome: jax.Array, t: jax.Array
        ) -> tuple[Rollout, PyTree]:
            """Stores what step ``t - 1`` led to, if this rollout has one, and the observation it ended in."""
            last = jnp.maximum(t - 1, 0)
            reward, *flags = outcome
            terminated, truncated, valid = (flag > 0 for flag in flags)
            step = Timestep(obs, reward, terminated, truncated, valid)
            action = jax.tree.map(lambda x: x[last], buffer.action)
            after = after_step(algorithm, core, initial_core, action, step)
            core = jax.tree.map(lambda new, old: jnp.where(t > 0, new, old), after, core)
            # At t = 0 this writes what the last rollout has already stored; the next call writes over it.
            buffer = buffer._replace(
                obs=buffer.obs.at[t].set(obs),
                reward=buffer.reward.at[last].set(reward),
                terminated=buffer.terminated.at[last].set(terminated),
                truncated=buffer.truncated.at[last].set(truncated),
                valid=buffer.valid.at[last].set(valid),
            )
            return buffer, core

        def act(
            variables: Variables,
            buffer: Rollout,
            core: PyTree,
            initial_core: PyTree,
            obs: PyTree,
            outcome: jax.Array,
            t: jax.Array,
            iteration: jax.Array,
            env_step: jax.Array,
        ) -> tuple[Rollout, PyTree, PyTree]:
            buffer, core = record(buffer, core, initial_core, obs, outcome, t)
            step = iteration.astype(jnp.uint32) * jnp.uint32(rollout_length) + t.astype(jnp.uint32)
            keys = rng.per_index(jax.random.fold_in(act_key, step), meshes.global_index(obs.shape[0]))
            action, core, extras = algorithm.policy(variables, obs, core, keys, env_step)
            store = lambda xs, x: xs.at[t].set(x)  # noqa: E731
            buffer = buffer._replace(
                action=jax.tree.map(store, buffer.action, action), extras=jax.tree.map(store, buffer.extras, extras)
            )
            return buffer, core, action

        def finish(
            buffer: Rollout, core: PyTree, initial_core: PyTree, obs: PyTree, outcome: jax.Array
        ) -> tuple[Rollout, PyTree]:
            buffer, core = record(buffer, core, initial_core, obs, outcome, jnp.int32(rollout_length))
            return buffer._replace(final_core=core), jax.tree.map(jnp.copy, core)

        batch, packed, one = meshes.BATCH, meshes.TIME_BATCH, meshes.REPLICATED
        self._allocate = meshes.Program(allocate, mesh, (one, batch, batch), meshes.ROLLOUT)
        self._act = meshes.Program(
            act,
            mesh,
            (one, meshes.ROLLOUT, batch, batch, batch, packed, one, one, one),
            (meshes.ROLLOUT, batch, batch),
            donate=(1, 2),
        )
        self._finish = meshes.Program(
            finish, mesh, (meshes.ROLLOUT, batch, batch, batch, packed), (meshes.ROLLOUT, batch), donate=(0, 1)
        )
        self.programs = (self._allocate, self._act, self._finish)

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of all rollouts so far went, compilation excluded."""
        return {"time/acting_s": self._acting_seconds - self._act.compile_seconds, "time/env_s": self._env_seconds}

    def rollout(
        self, variables: Variables, iteration: jax.Array, env_step: jax.Array
    ) -> tuple[Rollout, EpisodeStats, int]:
        """Steps the environments ``rollout_length`` times with one set of variables.

        Returns:
          The rollout on the mesh, the statistics of the episodes that ended in it, and its count of valid steps.
        """
        buffer = self._allocate(variables, self._obs, self._core)
        episodes: list[EpisodeStats] = []
        valid_steps = 0
        for t in range(self._length):
            began = time.perf_counter()
            buffer, self._core, action = self._act(
                variables, buffer, self._core, self._initial_core, self._obs, self._outcome, np.int32(t), iteration, env_step
            )
            action = np.asarray(action)
            acted = time.perf_counter()
            step, ended = self._env.step(action)
            self._acting_seconds += acted - began
            self._env_seconds += time.perf_counter() - acted
            episodes.append(ended)
            valid_steps += int(np.count_nonzero(step.valid))
            self._obs = step.obs
            self._outcome = np.stack([step.reward, step.terminated, step.truncated, step.valid]).astype(np.float32)
        rollout, self._core = self._finish(buffer, self._core, self._initial_core, self._obs, self._outcome)
        return rollout, stack_episodes(episodes).merge(), valid_steps


def stack_episodes(steps: Sequence[EpisodeStats]) -> EpisodeStats:
    """Statistics of several steps along a new leading axis."""
    return jax.tree.map(lambda *x: np.stack(x), *steps)
