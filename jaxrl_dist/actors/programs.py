"""The compiled programs of acting on host environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors import step as steps
from jaxrl_dist.actors.step import act
from jaxrl_dist.memory import frames
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Algorithms,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Timestep,
    Variables,
)


class Programs(NamedTuple):
    """The compiled programs of acting; ``act`` donates the buffer, the policy state and the
    stacks.
    """

    allocate: meshes.Program
    """``(variables, stacks, obs, core, iteration, env_step) -> buffer, params, core``;
    ``params``: see ``step.act``."""
    act: meshes.Program
    """``(t, first, variables, params, buffer, core, stacks, initial_core, obs, outcome, iteration,
    env_step) -> ..., action``; ``first`` is the index of the actor's first environment within the
    run."""
    close_rollout: meshes.Program
    """(buffer, core, stacks, initial_core, obs, outcome) -> rollout, core."""


def compile_acting(
    algorithm: Algorithms, spec: EnvSpec, mesh: Mesh, rollout_length: int, act_key: jax.Array
) -> Programs:
    """Compiles the programs of acting, once for all actors on a mesh.

    In the programs, ``outcome`` is ``[4, B]`` float32: reward, terminated, truncated and valid of
    the previous step. ``obs`` is the observation as the environment returns it, and ``stacks`` are
    the stacks before it is added. Everything that belongs to a policy is in a dict keyed by policy.
    """
    return _compiled(acting(algorithm, spec, rollout_length, act_key), spec, mesh)


def compile_members(
    variant: Callable[[Any], Algorithms], spec: EnvSpec, mesh: Mesh, rollout_length: int
) -> Programs:
    """As ``compile_acting``, for a population: all arrays have a leading axis of members.

    The programs take one more argument, before the arrays: the members' keys ``[M]`` and
    hyperparameters ``[M]``, for which ``variant`` returns the algorithm.
    """

    def over(at: int, *whole: Any) -> Callable[..., Any]:
        def of_member(member: Any, *arrays: Any) -> Any:
            key, hyper = member
            return acting(variant(hyper), spec, rollout_length, key)[at](*whole, *arrays)

        return meshes.over_members(of_member)

    functions = over(0), lambda t, first, *arrays: over(1, t, first)(*arrays), over(2)
    return _compiled(functions, spec, mesh, meshes.of_members(meshes.REPLICATED))


def acting(
    algorithm: Algorithms, spec: EnvSpec, rollout_length: int, act_key: jax.Array
) -> tuple[Callable[..., Any], ...]:
    """Returns the functions of ``Programs`` for one device's environments."""
    keys = steps.keys_of(algorithm, act_key)

    def allocate(
        variables: Variables,
        stacks: PyTree,
        obs: PyTree,
        core: PyTree,
        iteration: jax.Array,
        env_step: jax.Array,
    ) -> tuple[Rollout, PyTree, PyTree]:
        _, obs = over_policies(frames.push, 2)(stacks, obs)

        def of_policy(
            algorithm: Algorithm, key: jax.Array, *acting: PyTree
        ) -> tuple[Rollout, PyTree, PyTree]:
            variables, obs, core, env_step = acting
            params, core = steps.behave(
                algorithm, variables, core, steps.rollout_context(key, iteration, env_step)
            )
            # ``act_once`` makes them again
            if steps.num_parts(algorithm, variables, _size(obs)) > 1:
                params = ()
            return (
                steps.blank_rollout(algorithm, variables, obs, core, rollout_length),
                params,
                core,
            )

        return over_policies(of_policy, 3)(algorithm, keys, variables, obs, core, env_step)

    def act_once(
        t: jax.Array,
        first: jax.Array,
        variables: Variables,
        params: PyTree,
        buffer: Rollout,
        core: PyTree,
        stacks: PyTree,
        initial_core: PyTree,
        obs: PyTree,
        outcome: PyTree,
        iteration: jax.Array,
        env_step: jax.Array,
    ) -> tuple[Rollout, PyTree, PyTree, PyTree]:
        stacks, obs = over_policies(frames.push, 2)(stacks, obs)
        buffer, core = over_policies(partial(_record, t=t), 2)(
            algorithm, buffer, core, initial_core, obs, outcome
        )
        step = steps.step_numbers(iteration, rollout_length)[t]
        index = steps.indices(algorithm, spec, first + meshes.global_index(steps.num_rows(obs)))

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
                params, _ = steps.behave(
                    algorithm, variables, start, steps.rollout_context(key, iteration, env_step)
                )
                return act(algorithm, variables, params, obs, core, Context(keys, env_step))

            if (parts := steps.num_parts(algorithm, variables, _size(obs))) == 1:
                action, core, extras = act(
                    algorithm, variables, params, obs, core, Context(keys, env_step)
                )
            else:
                action, core, extras = steps.by_parts(
                    of_part, parts, (buffer.core, obs, core, keys)
                )
            recorded = jax.tree.map(
                lambda xs, x: xs.at[t].set(x), (buffer.action, buffer.extras), (action, extras)
            )
            return buffer._replace(action=recorded[0], extras=recorded[1]), core, action

        buffer, core, action = over_policies(of_policy, 3)(
            algorithm, keys, index, buffer, env_step, variables, params, obs, core
        )
        return buffer, core, stacks, action

    def close_rollout(
        buffer: Rollout,
        core: PyTree,
        stacks: PyTree,
        initial_core: PyTree,
        obs: PyTree,
        outcome: PyTree,
    ) -> tuple[Rollout, PyTree]:
        # The pushed stacks are discarded: the next rollout
        # begins with this observation and pushes it again.
        _, obs = over_policies(frames.push, 2)(stacks, obs)

        def of_policy(
            algorithm: Algorithm, buffer: Rollout, *last: PyTree
        ) -> tuple[Rollout, PyTree]:
            _, start, _, _ = last
            buffer, core = _record(algorithm, buffer, *last, t=jnp.int32(rollout_length))
            return buffer._replace(final_core=core), jax.tree.map(
                jnp.copy, start if algorithm.episodic else core
            )

        return over_policies(of_policy, 2)(algorithm, buffer, core, initial_core, obs, outcome)

    return allocate, act_once, close_rollout


def _size(obs: PyTree) -> int:
    return len(jax.tree.leaves(obs)[0])


def _record(
    algorithm: Algorithm, buffer: Rollout, *last: PyTree, t: jax.Array
) -> tuple[Rollout, PyTree]:
    """Stores the observation of step ``t``, and the outcome
    of step ``t - 1`` if it belongs to this rollout.
    """
    core, initial_core, obs, outcome = last
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
    functions: Sequence[Callable[..., Any]], spec: EnvSpec, mesh: Mesh, *members: Any
) -> Programs:
    """Compiles the functions of ``Programs``;
    ``members`` places further arguments of members' programs.
    """
    one, batch, packed = meshes.REPLICATED, meshes.BATCH, meshes.TIME_BATCH
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
    first = len(members)
    allocate, act_once, close_rollout = functions
    return Programs(
        allocate=program(allocate, in_specs=(*members, *begin), out_specs=begun),
        act=program(
            act_once,
            in_specs=(one, one, *members, *step),
            out_specs=stepped,
            donate=(4 + first, 5 + first, 6 + first),
        ),
        close_rollout=program(
            close_rollout, in_specs=(*members, *last), out_specs=closed, donate=(first, 1 + first)
        ),
    )
