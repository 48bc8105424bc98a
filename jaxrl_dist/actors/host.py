"""Acts on host environments: alternates one jitted call and one environment step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.programs import Programs
from jaxrl_dist.actors.step import (
    Rollouts,
    Stages,
    blank_stacks,
    count_steps,
    initial_core,
    row_slices,
)
from jaxrl_dist.envs import masks
from jaxrl_dist.envs.base import EnvSlice, HostEnv, label_of
from jaxrl_dist.errors import EnvWarning
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.spaces import write_rows
from jaxrl_dist.types import (
    Algorithms,
    Array,
    EpisodeStats,
    PyTree,
    Rollout,
    Timestep,
    Variables,
)


class HostActor:
    """Fills rollouts on the mesh from environments on the host.

    The host sends each observation to the devices once. One call on the devices stacks its frames,
    stores it and chooses the action; only the action comes back. Everything that belongs to a
    policy, such as rollouts and statistics, is in a dict keyed by policy, and one call acts with
    all policies.
    """

    def __init__(
        self,
        algorithm: Algorithms,
        env: HostEnv,
        mesh: Mesh,
        rollout_length: int,
        programs: Programs,
        share: EnvSlice | None = None,
        stages: Stages | None = None,
        members: Sequence[Algorithms] = (),
    ) -> None:
        """Resets the environments.

        Args:
          programs: from ``compile_acting`` with the same algorithm, mesh and length; with
            ``members``, from ``compile_members``.
          share: the actor's part of the run's environments; None: all of them.
          members: the algorithms of a population's members. The environments of the first member
            come first; all arrays except the environments' have a leading axis of members.
        """
        self.stages = stages or Stages()
        self._env = env
        self._mesh = mesh
        self._length = rollout_length
        self._programs = programs
        self._episodic = any(policy.episodic for policy in algorithm.values())
        self._lead = (len(members),) if members else ()
        self._obs = env.spec.keyed(env.reset())
        self._action = dict[str, PyTree]()
        share = share or EnvSlice.all(env.num_envs // max(1, len(members)))
        rows = row_slices(env.spec, env.num_envs)
        self._outcome = {
            name: np.zeros((4, part.stop - part.start), np.float32) for name, part in rows.items()
        }
        self._rows: dict[str, np.ndarray] | None = None
        """The environments' rows of the remaining members, by policy; None: all."""
        self._first = np.int32(share.first)
        self._steps = 0
        self._warned = False
        if members:
            cores = [initial_core(member, env.spec, share) for member in members]
            core = jax.tree.map(lambda *x: jnp.stack(x), *cores)
            spec = meshes.of_members(meshes.BATCH)
        else:
            core = initial_core(algorithm, env.spec, share)
            spec = meshes.BATCH
        self._initial_core = meshes.put(core, mesh, spec)
        self._core = meshes.put(jax.tree.map(jnp.copy, core), mesh, spec)
        self._stacks = meshes.put(self._parted(blank_stacks(env.spec, env.num_envs)), mesh, spec)
        self.stages.mark("start")

    def _parted(self, tree: PyTree, axis: int = 0) -> PyTree:
        """Divides an axis of environments into two, of members and their environments, if there are
        members.
        """
        if not self._lead:
            return tree
        return jax.tree.map(
            lambda x: x.reshape(*x.shape[:axis], *self._lead, -1, *x.shape[axis + 1 :]), tree
        )

    def rollout(
        self, variables: Variables, iteration: Array, env_step: jax.Array, *member_inputs: PyTree
    ) -> tuple[Rollouts, PyTree, np.ndarray]:
        """Steps the environments ``rollout_length`` times with one set of variables.

        Args:
          member_inputs: further arguments of members' programs; see ``compile_members``.

        Returns:
          The rollout on the mesh, the statistics of the episodes that ended in it, and its env
          steps and agent steps, ``[2]``; for members, statistics ``[M]`` and steps ``[M, 2]``.
        """
        self.stages.mark("other")
        buffer, params, self._core = self._programs.allocate(
            *member_inputs,
            variables,
            self._stacks,
            self._parted(self._obs),
            self._core,
            iteration,
            env_step,
        )
        episodes = list[EpisodeStats]()
        valid = list[PyTree]()
        taken = list[PyTree]()
        for t in range(self._length):
            buffer, self._core, self._stacks, action = self._programs.act(
                np.int32(t),
                self._first,
                *member_inputs,
                variables,
                params,
                buffer,
                self._core,
                self._stacks,
                self._initial_core,
                *self._env_inputs(),
                iteration,
                env_step,
            )
            action = jax.tree.map(np.asarray, action)
            self.stages.mark("acting")
            step, ended = self._step(action)
            self.stages.mark("env")
            episodes.append(ended)
            if self._env.spec.logs_actions:
                taken.append(over_policies(lambda step: step.action)(step))
            self._obs, self._outcome, valid_now = over_policies(_divided, 3)(step)
            valid.append(self._parted(valid_now))
        rollout, self._core = self._programs.close_rollout(
            *member_inputs,
            buffer,
            self._core,
            self._stacks,
            self._initial_core,
            *self._env_inputs(),
        )
        if taken:
            rollout = over_policies(self._with_actions)(rollout, *taken)
        self.stages.mark("acting")
        if self._episodic:
            self._obs = self._of_rows(self._env.spec.keyed(self._env.reset()))
            self.stages.mark("env")
        ended = EpisodeStats.stack(episodes)
        stacked = jax.tree.map(lambda *x: np.stack(x), *valid)
        steps = count_steps(self._env.spec, stacked).sum(axis=0)
        if not self._lead:
            return rollout, over_policies(EpisodeStats.merge)(ended), steps
        in_rows = jax.tree.map(
            lambda x: np.moveaxis(self._parted(x, 1), 1, 0).reshape(*self._lead, -1), ended
        )
        return rollout, over_policies(lambda episodes: episodes.merge(1))(in_rows), steps

    def _env_inputs(self) -> tuple[PyTree, PyTree]:
        """Returns the programs' inputs from the environments: ``obs`` and ``outcome``."""
        outcome = self._parted(self._outcome, 1)
        if self._lead:
            outcome = jax.tree.map(lambda x: np.moveaxis(x, 1, 0), outcome)
        return self._parted(self._obs), outcome

    def _step(self, action: PyTree) -> tuple[PyTree, PyTree]:
        if self._lead:
            action = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), action)
        if self._rows is None:
            self._action = action
        else:
            self._action = over_policies(write_rows)(self._rows, self._action, action)
        spec = self._env.spec
        step, ended = map(spec.keyed, self._env.step(spec.bare(self._action)))
        self._steps += 1
        self._warn_of_masks(step)
        return self._of_rows(step), self._of_rows(ended)

    def _warn_of_masks(self, step: PyTree) -> None:
        """Warns once of an action mask that allows no action while the episode continues."""
        if self._warned:
            return
        for policy, rows in step.items():
            row = masks.without_choice(self._env.spec.by_policy[policy], rows)
            if row is not None:
                warnings.warn(
                    f"{label_of(self._env.spec)}: {self._place(policy, row)}: the action mask allows "
                    "no action, though the episode continues; all actions count as legal",
                    EnvWarning,
                    stacklevel=2,
                )
                self._warned = True
                return

    def _place(self, policy: str, row: int) -> str:
        """Names the environment, the step and the agent of one of a policy's rows."""
        spec = self._env.spec
        env, agent = divmod(row, spec.by_policy[policy].num_agents)
        place = f"environment {self._first + env} at step {self._steps}"
        if spec.num_agents > 1:
            place += f", agent {agent}"
            if policy:
                place += f" of policy {policy}"
        return place

    def _with_actions(self, rollout: Rollout, *actions: PyTree) -> Rollout:
        """Returns a rollout with the actions of its steps that were taken, ``[B, ...]``."""
        stacked = jax.tree.map(
            lambda chosen, *x: np.stack(x).astype(chosen.dtype), rollout.action, *actions
        )
        return rollout._replace(action=meshes.put(stacked, self._mesh, meshes.TIME_BATCH))

    def _of_rows(self, tree: PyTree) -> PyTree:
        if self._rows is None:
            return tree
        return over_policies(_rows_of)(self._rows, tree)

    def keep(self, index: np.ndarray, programs: Programs) -> None:
        """Keeps the members ``index``; the environments of the others repeat their last actions and
        are ignored.
        """

        def left(outcome: np.ndarray) -> np.ndarray:
            return np.arange(outcome.shape[1]).reshape(*self._lead, -1)[index].reshape(-1)

        rows = over_policies(left)(self._outcome)
        self._obs = over_policies(_rows_of)(rows, self._obs)
        self._outcome = over_policies(lambda rows, outcome: outcome[:, rows])(rows, self._outcome)
        if self._rows is None:
            self._rows = rows
        else:
            self._rows = over_policies(_rows_of)(rows, self._rows)
        self._action = jax.tree.map(np.array, self._action)  # it may be read-only
        self._lead = (len(index),)
        self._programs = programs
        arrays = self._initial_core, self._core, self._stacks
        self._initial_core, self._core, self._stacks = meshes.rows(arrays, index)

    def close(self) -> None:
        """Closes the environments."""
        self._env.close()


def _divided(step: Timestep) -> tuple[PyTree, np.ndarray, np.ndarray]:
    """Returns the observations, the ``outcome`` for the programs, and which steps are valid."""
    outcome = np.stack([step.reward, step.terminated, step.truncated, step.valid]).astype(
        np.float32
    )
    return step.obs, outcome, step.valid


def _rows_of(rows: np.ndarray, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[rows], tree)
