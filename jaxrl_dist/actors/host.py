"""Acts on host environments: alternates one jitted call and one environment step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
        members: Sequence[Algorithm] = (),
    ) -> None:
        """Resets the environments.

        Args:
          programs: from ``compile_acting`` with the same algorithm, mesh and length; for members, ``compile_members``.
          share: the actor's part of the run's environments; None: all of them.
          members: of a population, their algorithms. The environments of the first member come first; all arrays but
            those of the environments get a leading axis of members.
        """
        self.stages = stages or Stages()
        self._env = env
        self._episodic = algorithm.episodic
        self._length = rollout_length
        self._programs = programs
        self._lead = (len(members),) if members else ()
        self._rows: np.ndarray | None = None  # of the environments, those of the members that are left; None: all
        self._obs, self._action = env.reset(), ()
        self._outcome = np.zeros((4, env.num_envs), np.float32)
        share = share or Share.all(env.num_envs // max(1, len(members)))
        self._first = np.int32(share.first)
        core = share.initial_core(algorithm)
        if members:
            core = jax.tree.map(lambda *x: jnp.stack(x), *map(share.initial_core, members))
        spec = meshes.of_members(meshes.BATCH) if members else meshes.BATCH
        self._initial_core = meshes.put(core, mesh, spec)
        self._core = meshes.put(jax.tree.map(jnp.copy, core), mesh, spec)
        self._stacks = meshes.put(self._parted(frames.blank(env.spec, env.num_envs)), mesh, spec)
        self.stages.mark("start")

    def _parted(self, tree: PyTree, axis: int = 0) -> PyTree:
        """Divides an axis of environments into members and the environments of each, if there are members."""
        if not self._lead:
            return tree
        return jax.tree.map(lambda x: x.reshape(*x.shape[:axis], *self._lead, -1, *x.shape[axis + 1 :]), tree)

    def rollout(
        self, variables: Variables, iteration: Array, env_step: jax.Array, *who: PyTree
    ) -> tuple[Rollout, EpisodeStats, Any]:
        """Steps the environments ``rollout_length`` times with one set of variables.

        Args:
          who: what the programs of members take before the arrays.

        Returns:
          The rollout on the mesh, the statistics of the episodes that ended in it, and its count of valid steps; of
          members, statistics and counts ``[M]``.
        """
        self.stages.mark("other")
        start = variables, self._stacks, self._parted(self._obs), self._core, iteration, env_step
        buffer, own, self._core = self._programs.allocate(*who, *start)
        episodes: list[EpisodeStats] = []
        valid_steps = np.zeros(self._lead, int)
        for t in range(self._length):
            state = own, buffer, self._core, self._stacks, self._initial_core, *self._seen()
            given = *who, variables, *state, iteration, env_step
            buffer, self._core, self._stacks, action = self._programs.act(np.int32(t), self._first, *given)
            action = jax.tree.map(np.asarray, action)
            self.stages.mark("acting")
            step, ended = self._step(action)
            self.stages.mark("env")
            episodes.append(ended)
            valid_steps += np.count_nonzero(self._parted(step.valid), axis=-1)
            self._obs = step.obs
            self._outcome = np.stack([step.reward, step.terminated, step.truncated, step.valid]).astype(np.float32)
        last = self._stacks, self._initial_core, *self._seen()
        rollout, self._core = self._programs.close_rollout(*who, buffer, self._core, *last)
        self.stages.mark("acting")
        if self._episodic:
            self._obs = self._of_rows(self._env.reset())
            self.stages.mark("env")
        ended = EpisodeStats.stack(episodes)
        if not self._lead:
            return rollout, ended.merge(), int(valid_steps)
        in_rows = jax.tree.map(lambda x: np.moveaxis(self._parted(x, 1), 1, 0).reshape(*self._lead, -1), ended)
        return rollout, in_rows.merge(1), valid_steps

    def _seen(self) -> tuple[PyTree, np.ndarray]:
        """What the programs take from the environments: ``obs`` and ``outcome``."""
        outcome = self._parted(self._outcome, 1)
        return self._parted(self._obs), np.moveaxis(outcome, 1, 0) if self._lead else outcome

    def _step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        if self._lead:
            action = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), action)
        if self._rows is None:
            self._action = action
        else:
            for whole, part in zip(jax.tree.leaves(self._action), jax.tree.leaves(action), strict=True):
                whole[self._rows] = part
        step, ended = self._env.step(self._action)
        return self._of_rows((step, ended))

    def _of_rows(self, tree: PyTree) -> PyTree:
        return tree if self._rows is None else jax.tree.map(lambda x: x[self._rows], tree)

    def keep(self, index: np.ndarray, programs: Programs) -> None:
        """Goes on with some of the members. The environments of the others repeat their last actions, unseen."""
        rows = np.arange(self._outcome.shape[1]).reshape(*self._lead, -1)[index].reshape(-1)
        self._obs, self._outcome = jax.tree.map(lambda x: x[rows], self._obs), self._outcome[:, rows]
        if self._rows is None:
            self._rows, self._action = np.arange(self._env.num_envs), jax.tree.map(np.array, self._action)
        self._rows, self._lead, self._programs = self._rows[rows], (len(index),), programs
        arrays = self._initial_core, self._core, self._stacks
        where = jax.tree.map(lambda x: x.sharding, arrays)
        kept = jax.jit(lambda tree: jax.tree.map(lambda x: x[index], tree), out_shardings=where)(arrays)
        self._initial_core, self._core, self._stacks = kept

    def close(self) -> None:
        """Closes the environments."""
        self._env.close()


class Programs(NamedTuple):
    """The compiled programs of acting; ``act`` donates the buffer, the policy state and the stacks."""

    allocate: meshes.Program
    """``(variables, stacks, obs, core, iteration, env_step) -> buffer, own, core``, with ``own`` as in ``step.act``."""
    act: meshes.Program
    """``(t, first, variables, own, buffer, core, stacks, initial_core, obs, outcome, iteration, env_step) -> ...,
    action``; ``first`` is the index of the actor's first environment within the run."""
    close_rollout: meshes.Program  # (buffer, core, stacks, initial_core, obs, outcome) -> rollout, core


def compile_acting(algorithm: Algorithm, mesh: Mesh, rollout_length: int, act_key: jax.Array) -> Programs:
    """Compiles the programs of acting, once for all actors on a mesh.

    In the programs, ``outcome`` is ``[4, B]`` float32: reward, terminated, truncated and valid of the previous step.
    ``obs`` is the observation as the environment returns it, and ``stacks`` are the stacks without it.
    """
    return _compiled(acting(algorithm, rollout_length, act_key), mesh)


def compile_members(variant: Callable[[Any], Algorithm], mesh: Mesh, rollout_length: int) -> Programs:
    """As ``compile_acting``, for the members of a population: all arrays have a leading axis of them.

    The programs take one more argument, before the arrays: the members' keys ``[M]`` and hyperparameters ``[M]``, for
    which ``variant`` returns the algorithm.
    """

    def over(at: int, *whole: Any) -> Callable[..., Any]:
        def of_member(who: Any, *arrays: Any) -> Any:
            key, hyper = who
            return acting(variant(hyper), rollout_length, key)[at](*whole, *arrays)

        return meshes.over_members(of_member)

    functions = over(0), lambda t, first, *arrays: over(1, t, first)(*arrays), over(2)
    return _compiled(functions, mesh, meshes.of_members(meshes.REPLICATED))


def acting(algorithm: Algorithm, rollout_length: int, act_key: jax.Array) -> tuple[Callable[..., Any], ...]:
    """Returns the functions of ``Programs``, of a device's environments."""

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
        t: jax.Array,
        first: jax.Array,
        variables: Variables,
        own: PyTree,
        buffer: Rollout,
        core: PyTree,
        stacks: PyTree,
        initial_core: PyTree,
        obs: PyTree,
        outcome: jax.Array,
        iteration: jax.Array,
        env_step: jax.Array,
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

    return allocate, act_once, close_rollout


def _compiled(functions: Sequence[Callable[..., Any]], mesh: Mesh, *who: Any) -> Programs:
    """Compiles the functions of ``Programs``; ``who`` is the placement of what members' programs take, if they do."""
    one, batch, packed, rollout = meshes.REPLICATED, meshes.BATCH, meshes.TIME_BATCH, meshes.ROLLOUT
    begin, begun = (one, batch, batch, batch, one, one), (rollout, batch, batch)
    step, stepped = (one, batch, rollout, batch, batch, batch, batch, packed, one, one), (rollout, batch, batch, batch)
    last, closed = (rollout, batch, batch, batch, batch, packed), (rollout, batch)
    if who:
        begin, begun, step, stepped, last, closed = map(meshes.of_members, (begin, begun, step, stepped, last, closed))
    program, more = partial(meshes.Program, mesh=mesh, mapped=meshes.acting), len(who)
    allocate, act_once, close_rollout = functions
    return Programs(
        allocate=program(allocate, in_specs=(*who, *begin), out_specs=begun),
        act=program(
            act_once, in_specs=(one, one, *who, *step), out_specs=stepped, donate=(4 + more, 5 + more, 6 + more)
        ),
        close_rollout=program(close_rollout, in_specs=(*who, *last), out_specs=closed, donate=(more, 1 + more)),
    )
