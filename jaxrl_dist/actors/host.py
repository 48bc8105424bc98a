"""Acts on host environments: alternates one jitted call and one environment step."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.step import (
    Stages,
    act,
    after_step,
    behave,
    blank_rollout,
    by_parts,
    num_parts,
    rollout_context,
    step_numbers,
)
from jaxrl_dist.envs.base import HostEnv, Share
from jaxrl_dist.memory import frames
from jaxrl_dist.types import Acted, Algorithm, Array, Context, EpisodeStats, PyTree, Rollout, Timestep, Variables


class HostActor:
    """Fills rollouts on the mesh from environments on the host.

    The host sends each observation to the devices once. One call on the devices stacks its frames, stores it and
    chooses the action; only the action is sent back.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        env: HostEnv,
        mesh: Mesh,
        rollout_length: int,
        programs: Programs,
        share: Share | None = None,
        stages: Stages | None = None,
    ) -> None:
        """Resets the environments.

        Args:
          programs: from ``compile_acting`` with the same algorithm, mesh and length.
          share: the actor's part of the run's environments; None: all of them.
        """
        self.stages = stages or Stages()
        self._env = env
        self._episodic = algorithm.episodic
        self._length = rollout_length
        self._programs = programs
        self._obs = env.reset()
        self._outcome = np.zeros((4, env.num_envs), np.float32)
        share = share or Share.all(env.num_envs)
        self._first = np.int32(share.first)
        core = share.initial_core(algorithm)
        self._initial_core = meshes.put(core, mesh, meshes.BATCH)
        self._core = meshes.put(jax.tree.map(jnp.copy, core), mesh, meshes.BATCH)
        self._stacks = meshes.put(frames.blank(env.spec, env.num_envs), mesh, meshes.BATCH)
        self.stages.mark("start")

    def rollout(self, variables: Variables, iteration: Array, env_step: jax.Array) -> tuple[Rollout, EpisodeStats, int]:
        """Steps the environments ``rollout_length`` times with one set of variables.

        Returns:
          The rollout on the mesh, the statistics of the episodes that ended in it, and its count of valid steps.
        """
        self.stages.mark("other")
        start = variables, self._stacks, self._obs, self._core, iteration, env_step
        buffer, own, self._core = self._programs.allocate(*start)
        episodes: list[EpisodeStats] = []
        valid_steps = 0
        for t in range(self._length):
            state = buffer, self._core, self._stacks
            now = self._initial_core, self._obs, self._outcome, np.int32(t), iteration, env_step, self._first
            buffer, self._core, self._stacks, action = self._programs.act(variables, own, *state, *now)
            action = jax.tree.map(np.asarray, action)
            self.stages.mark("acting")
            step, ended = self._env.step(action)
            self.stages.mark("env")
            episodes.append(ended)
            valid_steps += int(np.count_nonzero(step.valid))
            self._obs = step.obs
            self._outcome = np.stack([step.reward, step.terminated, step.truncated, step.valid]).astype(np.float32)
        last = self._stacks, self._initial_core, self._obs, self._outcome
        rollout, self._core = self._programs.close_rollout(buffer, self._core, *last)
        self.stages.mark("acting")
        if self._episodic:
            self._obs = self._env.reset()
            self.stages.mark("env")
        return rollout, EpisodeStats.stack(episodes).merge(), valid_steps

    def close(self) -> None:
        """Closes the environments."""
        self._env.close()


class Programs(NamedTuple):
    """The compiled programs of acting; ``act`` donates the buffer, the policy state and the stacks."""

    allocate: meshes.Program
    """``(variables, stacks, obs, core, iteration, env_step) -> buffer, own, core``, with ``own`` as in ``step.act``."""
    act: meshes.Program
    """``(variables, own, buffer, core, stacks, initial_core, obs, outcome, t, iteration, env_step, first) -> ...,
    action``; ``first`` is the index of the actor's first environment within the run."""
    close_rollout: meshes.Program  # (buffer, core, stacks, initial_core, obs, outcome) -> rollout, core


def compile_acting(algorithm: Algorithm, mesh: Mesh, rollout_length: int, act_key: jax.Array) -> Programs:
    """Compiles the programs of acting, once for all actors on a mesh.

    In the programs, ``outcome`` is ``[4, B]`` float32: reward, terminated, truncated and valid of the previous step.
    ``obs`` is the observation as the environment returns it, and ``stacks`` are the stacks without it.
    """

    def size(obs: PyTree) -> int:
        return len(jax.tree.leaves(obs)[0])

    def allocate(
        variables: Variables, stacks: PyTree, obs: PyTree, core: PyTree, iteration: jax.Array, env_step: jax.Array
    ) -> tuple[Rollout, PyTree, PyTree]:
        _, obs = frames.push(stacks, obs)
        own, core = behave(algorithm, variables, core, rollout_context(act_key, iteration, env_step))
        if num_parts(algorithm, variables, size(obs)) > 1:  # ``choose`` makes them again
            own = ()
        return blank_rollout(algorithm, variables, obs, core, rollout_length), own, core

    def choose(
        variables: Variables, own: PyTree, start: PyTree, begun: Context, obs: PyTree, core: PyTree, now: Context
    ) -> Acted:
        parts = num_parts(algorithm, variables, size(obs))
        if parts == 1:
            return act(algorithm, variables, own, obs, core, now)

        def part(envs: tuple[PyTree, PyTree, PyTree, jax.Array]) -> Acted:
            start, obs, core, keys = envs
            own, _ = behave(algorithm, variables, start, begun)
            return act(algorithm, variables, own, obs, core, now._replace(keys=keys))

        return by_parts(part, parts, (start, obs, core, now.keys))

    def record(
        buffer: Rollout, core: PyTree, initial_core: PyTree, obs: PyTree, outcome: jax.Array, t: jax.Array
    ) -> tuple[Rollout, PyTree]:
        """Stores the observation of step ``t``, and the outcome of step ``t - 1`` if it belongs to this rollout."""
        last = jnp.maximum(t - 1, 0)
        reward, *flags = outcome
        terminated, truncated, valid = (flag > 0 for flag in flags)
        step = Timestep(obs, reward, terminated, truncated, valid)
        action = jax.tree.map(lambda x: x[last], buffer.action)
        after = after_step(algorithm, core, initial_core, action, step)
        core = jax.tree.map(lambda new, old: jnp.where(t > 0, new, old), after, core)
        # At t = 0 this writes the last outcome of the previous rollout to row 0; the next call overwrites it.
        buffer = buffer._replace(
            obs=jax.tree.map(lambda xs, x: xs.at[t].set(x), buffer.obs, obs),
            reward=buffer.reward.at[last].set(reward),
            terminated=buffer.terminated.at[last].set(terminated),
            truncated=buffer.truncated.at[last].set(truncated),
            valid=buffer.valid.at[last].set(valid),
        )
        return buffer, core

    def act_once(
        variables: Variables,
        own: PyTree,
        buffer: Rollout,
        core: PyTree,
        stacks: PyTree,
        initial_core: PyTree,
        obs: PyTree,
        outcome: jax.Array,
        t: jax.Array,
        iteration: jax.Array,
        env_step: jax.Array,
        first: jax.Array,
    ) -> tuple[Rollout, PyTree, PyTree, PyTree]:
        stacks, obs = frames.push(stacks, obs)
        buffer, core = record(buffer, core, initial_core, obs, outcome, t)
        step = step_numbers(iteration, rollout_length)[t]
        keys = rng.per_index(jax.random.fold_in(act_key, step), first + meshes.global_index(size(obs)))
        begun = rollout_context(act_key, iteration, env_step)
        action, core, extras = choose(variables, own, buffer.core, begun, obs, core, Context(keys, env_step))
        action_buffer, extras_buffer = jax.tree.map(
            lambda xs, x: xs.at[t].set(x), (buffer.action, buffer.extras), (action, extras)
        )
        buffer = buffer._replace(action=action_buffer, extras=extras_buffer)
        return buffer, core, stacks, action

    def close_rollout(
        buffer: Rollout, core: PyTree, stacks: PyTree, initial_core: PyTree, obs: PyTree, outcome: jax.Array
    ) -> tuple[Rollout, PyTree]:
        # The pushed stacks are discarded: the next rollout begins with this observation and pushes it again.
        _, obs = frames.push(stacks, obs)
        buffer, core = record(buffer, core, initial_core, obs, outcome, jnp.int32(rollout_length))
        return buffer._replace(final_core=core), jax.tree.map(jnp.copy, initial_core if algorithm.episodic else core)

    batch, packed, one = meshes.BATCH, meshes.TIME_BATCH, meshes.REPLICATED
    rollout = meshes.ROLLOUT
    inputs = (one, batch, rollout, batch, batch, batch, batch, packed, one, one, one, one)
    last = (rollout, batch, batch, batch, batch, packed)
    program = partial(meshes.Program, mesh=mesh, mapped=meshes.acting)
    return Programs(
        allocate=program(allocate, in_specs=(one, batch, batch, batch, one, one), out_specs=(rollout, batch, batch)),
        act=program(act_once, in_specs=inputs, out_specs=(rollout, batch, batch, batch), donate=(2, 3, 4)),
        close_rollout=program(close_rollout, in_specs=last, out_specs=(rollout, batch), donate=(0, 1)),
    )
