"""The compiled programs of acting on host environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors import step as steps
from jaxrl_dist.actors.step import Rollouts
from jaxrl_dist.memory import frames
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Algorithms,
    Array,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Timestep,
)


class Programs(NamedTuple):
    """The compiled programs of acting, which donate the buffer, the policy state and the stacks."""

    allocate: meshes.Program
    """``(variables, stacks, obs, core, iteration, env_step) -> buffer, params, core``; ``params``:
    see ``step.act``."""
    act: meshes.Program
    """``(t, first, variables, params, buffer, core, stacks, initial_core, obs, outcome, iteration,
    env_step) -> buffer, core, stacks, action``; ``first`` is the index of the actor's first
    environment within the run."""
    close_rollout: meshes.Program
    """``(buffer, core, stacks, initial_core, obs, outcome) -> rollout, core``."""


def compile_acting(
    algorithm: Algorithms, spec: EnvSpec, mesh: Mesh, rollout_length: int, act_key: jax.Array
) -> Programs:
    """Compiles the programs of acting, once for all actors on a mesh.

    In the programs, ``outcome`` is ``[4, B]`` float32: reward, terminated, truncated and valid of
    the previous step. ``obs`` is the observation as the environment returns it, and ``stacks`` are
    the stacks before it is added. Everything that belongs to a policy is in a dict keyed by policy.
    """
    acting = Acting(algorithm, spec, rollout_length, steps.keys_of(algorithm, act_key))
    return _compiled(acting.allocate, acting.act, acting.close_rollout, spec, mesh)


def compile_members(
    variant: Callable[[Mapping[str, Array]], Algorithms],
    spec: EnvSpec,
    mesh: Mesh,
    rollout_length: int,
) -> Programs:
    """As ``compile_acting``, for a population: all arrays have a leading axis of members.

    The programs take one more argument, before the arrays: the members' keys ``[M]`` and
    hyperparameters ``[M]``, for which ``variant`` returns the algorithm.
    """

    def of_member(name: str, *shared: jax.Array) -> Callable[..., tuple[PyTree, ...]]:
        def function(member: tuple[jax.Array, Mapping[str, Array]], *arrays: PyTree) -> Any:
            key, hyper = member
            algorithm = variant(hyper)
            acting = Acting(algorithm, spec, rollout_length, steps.keys_of(algorithm, key))
            return getattr(acting, name)(*shared, *arrays)

        return meshes.over_members(function)

    def act(t: jax.Array, first: jax.Array, *arrays: PyTree) -> tuple[PyTree, ...]:
        return of_member("act", t, first)(*arrays)

    members = meshes.of_members(meshes.REPLICATED)
    allocate, close_rollout = map(of_member, ("allocate", "close_rollout"))
    return _compiled(allocate, act, close_rollout, spec, mesh, members)


@dataclasses.dataclass(frozen=True)
class Acting:
    """The functions of ``Programs`` for one device's environments."""

    algorithm: Algorithms
    spec: EnvSpec
    rollout_length: int
    keys: PyTree
    """Of each policy's acting."""

    def allocate(
        self,
        variables: PyTree,
        stacks: PyTree,
        obs: PyTree,
        core: PyTree,
        iteration: jax.Array,
        env_step: PyTree,
    ) -> tuple[Rollouts, PyTree, PyTree]:
        _, obs = over_policies(frames.push, 2)(stacks, obs)

        def of_policy(
            algorithm: Algorithm, key: jax.Array, *acting: PyTree
        ) -> tuple[Rollout, PyTree, PyTree]:
            variables, obs, core, env_step = acting
            context = steps.rollout_context(key, iteration, env_step)
            params, core = steps.behave(algorithm, variables, core, context)
            if steps.num_parts(algorithm, variables, _size(obs)) > 1:
                params = ()  # ``act`` makes them again
            buffer = steps.blank_rollout(algorithm, variables, obs, core, self.rollout_length)
            return buffer, params, core

        return over_policies(of_policy, 3)(
            self.algorithm, self.keys, variables, obs, core, env_step
        )

    def act(
        self,
        t: jax.Array,
        first: jax.Array,
        variables: PyTree,
        params: PyTree,
        buffer: Rollouts,
        core: PyTree,
        stacks: PyTree,
        initial_core: PyTree,
        obs: PyTree,
        outcome: PyTree,
        iteration: jax.Array,
        env_step: PyTree,
    ) -> tuple[Rollouts, PyTree, PyTree, PyTree]:
        stacks, obs = over_policies(frames.push, 2)(stacks, obs)
        buffer, core = over_policies(partial(_store, t=t), 2)(
            self.algorithm, buffer, core, initial_core, obs, outcome
        )
        step = steps.step_numbers(iteration, self.rollout_length)[t]
        rows = first + meshes.global_index(steps.num_rows(obs))
        index = steps.indices(self.algorithm, self.spec, rows)

        def of_policy(
            algorithm: Algorithm,
            key: jax.Array,
            index: jax.Array,
            buffer: Rollout,
            env_step: jax.Array,
            *acting: Any,
        ) -> tuple[Rollout, PyTree, PyTree]:
            keys = rng.per_index(jax.random.fold_in(key, step), index)
            variables, params, obs, core = acting

            def of_part(envs: tuple[PyTree, PyTree, PyTree, jax.Array]) -> Acted:
                start, obs, core, keys = envs
                context = steps.rollout_context(key, iteration, env_step)
                params, _ = steps.behave(algorithm, variables, start, context)
                return steps.act(algorithm, variables, params, obs, core, Context(keys, env_step))

            parts = steps.num_parts(algorithm, variables, _size(obs))
            if parts == 1:
                context = Context(keys, env_step)
                action, core, extras = steps.act(algorithm, variables, params, obs, core, context)
            else:
                envs = buffer.core, obs, core, keys
                action, core, extras = steps.by_parts(of_part, parts, envs)
            stored = jax.tree.map(
                lambda xs, x: xs.at[t].set(x), (buffer.action, buffer.extras), (action, extras)
            )
            return buffer._replace(action=stored[0], extras=stored[1]), core, action

        buffer, core, action = over_policies(of_policy, 3)(
            self.algorithm, self.keys, index, buffer, env_step, variables, params, obs, core
        )
        return buffer, core, stacks, action

    def close_rollout(
        self,
        buffer: Rollouts,
        core: PyTree,
        stacks: PyTree,
        initial_core: PyTree,
        obs: PyTree,
        outcome: PyTree,
    ) -> tuple[Rollouts, PyTree]:
        # The pushed stacks are discarded: the next rollout begins with this observation and pushes
        # it again.
        _, obs = over_policies(frames.push, 2)(stacks, obs)

        def of_policy(
            algorithm: Algorithm, buffer: Rollout, *last: PyTree
        ) -> tuple[Rollout, PyTree]:
            _, initial_core, _, _ = last
            buffer, core = _store(algorithm, buffer, *last, t=jnp.int32(self.rollout_length))
            start = initial_core if algorithm.episodic else core
            return buffer._replace(final_core=core), jax.tree.map(jnp.copy, start)

        return over_policies(of_policy, 2)(self.algorithm, buffer, core, initial_core, obs, outcome)


def _size(obs: PyTree) -> int:
    return len(jax.tree.leaves(obs)[0])


def _store(
    algorithm: Algorithm,
    buffer: Rollout,
    core: PyTree,
    initial_core: PyTree,
    obs: PyTree,
    outcome: jax.Array,
    *,
    t: jax.Array,
) -> tuple[Rollout, PyTree]:
    """Stores the observation of step ``t``, and the outcome of step ``t - 1`` if this is a step of
    the rollout; returns the buffer and the core for the observation.
    """
    before = jnp.maximum(t - 1, 0)
    reward, *flags = outcome
    terminated, truncated, valid = (flag > 0 for flag in flags)
    step = Timestep(obs, reward, terminated, truncated, valid)
    action = jax.tree.map(lambda x: x[before], buffer.action)
    after = steps.after_step(algorithm, core, initial_core, action, step)
    core = jax.tree.map(lambda new, old: jnp.where(t > 0, new, old), after, core)
    # At t = 0 this writes the last outcome of the previous rollout to row 0;
    # the next call overwrites it.
    buffer = buffer._replace(
        obs=jax.tree.map(lambda xs, x: xs.at[t].set(x), buffer.obs, obs),
        reward=buffer.reward.at[before].set(reward),
        terminated=buffer.terminated.at[before].set(terminated),
        truncated=buffer.truncated.at[before].set(truncated),
        valid=buffer.valid.at[before].set(valid),
    )
    return buffer, core


def _compiled(
    allocate: Callable[..., tuple[PyTree, ...]],
    act: Callable[..., tuple[PyTree, ...]],
    close_rollout: Callable[..., tuple[PyTree, ...]],
    spec: EnvSpec,
    mesh: Mesh,
    *members: PartitionSpec,
) -> Programs:
    """Compiles the functions of ``Programs``; ``members`` places further arguments of members."""
    one = meshes.REPLICATED
    batch = meshes.BATCH
    packed = meshes.TIME_BATCH
    rollout = meshes.rollout_specs(spec.by_policy)
    begin = (one, batch, batch, batch, one, one)
    begun = (rollout, batch, batch)
    step = (one, batch, rollout, batch, batch, batch, batch, packed, one, one)
    stepped = (rollout, batch, batch, batch)
    last = (rollout, batch, batch, batch, batch, packed)
    closed = (rollout, batch)
    if members:
        begin, begun, step, stepped, last, closed = map(
            meshes.of_members, (begin, begun, step, stepped, last, closed)
        )
    program = partial(meshes.Program, mesh=mesh, mapped=meshes.acting)
    first = len(members)  # the first argument of each member's environments
    return Programs(
        allocate=program(allocate, in_specs=(*members, *begin), out_specs=begun),
        act=program(
            act,
            in_specs=(one, one, *members, *step),
            out_specs=stepped,
            donate=(4 + first, 5 + first, 6 + first),
        ),
        close_rollout=program(
            close_rollout, in_specs=(*members, *last), out_specs=closed, donate=(first, 1 + first)
        ),
    )
