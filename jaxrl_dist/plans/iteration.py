"""An iteration of a population's program: its members act,
then they learn from what they have experienced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_dist import mesh as meshes
from jaxrl_dist import packing
from jaxrl_dist.actors import device, recorded_policy
from jaxrl_dist.actors.step import NO_FAULT
from jaxrl_dist.envs.episodes import no_episodes
from jaxrl_dist.plans.initial import BATCH, MEMBERS, STATE
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import IntervalSums
from jaxrl_dist.plans.streaming import data_spec
from jaxrl_dist.types import EpisodeStats, PyTree, Rollout, TrainState, Variables

LEARN_TOGETHER = 16
"""Members that learn together on a CPU: the activations
of more would not fit into its caches (docs/speed.md)."""
CACHED = 2**20
"""Elements in the states of a device's members up to which the caches of a CPU keep them all."""
SUMS: Any = IntervalSums._make([MEMBERS] * 3 + [BATCH])
"""Sharding of the members' sums."""


def make_iteration(
    job: Job, members: int, *, recorded: bool = False
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the two functions of an iteration on whole arrays of all members:
    acting and learning.

    The arrays of a single member have no axis of members.

    They are ``(state, actor, keys, hyper) -> (actor, experience, (steps, episodes, fault))`` and
    ``(state, experience, keys, hyper, data) -> (state, metrics)``; ``steps``, ``episodes`` and
    ``fault`` have an entry for each device of each member. Both are traced once, however many
    programs use them.

    Args:
      recorded: the experience is as of ``recorded_policy.with_probabilities``.
    """
    one, state = meshes.REPLICATED, meshes.STATE
    experience: Any = one
    if job.acts:
        act = _acting(job, members, recorded)
        experience = meshes.rollout_specs(job.algorithm)
    else:
        act = _idling(job, members)
    specs = (state, experience, one, one), (state, one)
    if members > 1:
        specs = meshes.of_members(specs)
    if members > 1:
        learns = learn_together(job)
    else:
        learns = partial(_learn, job)
    learns = meshes.learning(learns, job.mesh, (*specs[0], data_spec(job)), specs[1])

    def learn(
        state: TrainState,
        experience: Any,
        keys: tuple[jax.Array, ...],
        hyper: Any,
        data: PyTree = (),
    ) -> Any:
        if recorded:
            own = recorded_policy.to_learn(experience)
        else:
            own = experience
        return learns(state, own, keys[-1], hyper, data)

    return jax.jit(act, inline=True), jax.jit(learn, inline=True)


def _acting(job: Job, members: int, recorded: bool) -> Callable[..., Any]:
    env = job.source.device()
    rollout_length = job.rollout_length
    packed = packing.starts_kernel_per_array(job.mesh.devices.flat[0])

    def local_act(
        variables: Variables,
        actor: device.ActorState,
        keys: Any,
        hyper: Any,
        iteration: jax.Array,
        env_step: jax.Array,
    ) -> tuple[Any, ...]:
        algorithm = job.variant(hyper)[0]
        if recorded:
            algorithm = recorded_policy.with_probabilities(algorithm, env.spec)
        rollout = device.make_rollout(algorithm, env, rollout_length, packed=packed)
        actor, experience, episodes = rollout(variables, actor, *keys, iteration, env_step)
        fault = device.Fault(iteration, device.fault_of(experience))
        counts = device.steps_of(env.spec, experience), episodes, fault
        return actor, experience, jax.tree.map(lambda x: x[None], counts)

    one, batch = meshes.REPLICATED, meshes.BATCH
    specs = (one, batch, one, one, one, one), (batch, meshes.rollout_specs(job.algorithm), batch)
    if members == 1:
        acts = meshes.acting(local_act, job.mesh, *specs)
    else:
        acts = meshes.acting(meshes.over_members(local_act), job.mesh, *meshes.of_members(specs))

    def act(
        state: TrainState, actor: device.ActorState, keys: tuple[jax.Array, ...], hyper: Any
    ) -> Any:
        return acts(state.variables, actor, keys[:-1], hyper, state.iteration, state.env_step)

    return act


def _idling(job: Job, members: int) -> Callable[..., Any]:
    """Returns the acting of a plan that does not act: no steps, no episodes and no fault."""
    devices = job.mesh.shape[meshes.DATA]

    def act(state: TrainState, actor: Any, keys: Any, hyper: Any) -> Any:
        episodes = dict.fromkeys(job.algorithm, no_episodes(devices, job.source.spec.info_metrics))
        fault = device.Fault(jnp.zeros(devices, jnp.int32), jnp.full(devices, NO_FAULT))
        counts = jnp.zeros((devices, 2), jnp.int32), episodes, fault
        if members > 1:
            counts = jax.tree.map(lambda x: jnp.broadcast_to(x, (members, *x.shape)), counts)
        return actor, dict.fromkeys(job.algorithm, ()), counts

    return act


def _learn(
    job: Job, state: TrainState, experience: Rollout, key: jax.Array, hyper: Any, data: PyTree
) -> tuple[Any, ...]:
    return job.variant(hyper)[1].update(state, experience, key, data=data)


def learn_in_turn(job: Job) -> Callable[..., Any]:
    """``(state, since, keys, hyper, count, data) -> (state, since)``
    of members that do not act, and share devices.

    Each makes all ``count`` updates before the next one begins,
    so that its variables stay in the caches.
    """
    nothing: Any = dict.fromkeys(job.algorithm, ())
    episodes = dict.fromkeys(job.algorithm, no_episodes(1, job.source.spec.info_metrics))

    def learn(state: TrainState, experience: Any, keys: Any, hyper: Any, data: PyTree) -> Any:
        return _learn(job, state, experience, keys[-1], hyper, data)

    def of_device(
        state: TrainState,
        since: IntervalSums,
        keys: Any,
        hyper: Any,
        count: jax.Array,
        data: PyTree,
    ) -> Any:
        def of_member(given: Any) -> Any:
            state, since, keys, hyper = given

            def update(_: jax.Array, carry: Any) -> Any:
                state, since = carry
                return learned(learn, state, since, nothing, episodes, keys, hyper, data)

            return jax.lax.fori_loop(0, count, update, (state, since))

        return jax.lax.map(of_member, (state, since, keys, hyper))

    specs = STATE, SUMS, MEMBERS, MEMBERS, meshes.REPLICATED, data_spec(job)
    return meshes.learning(of_device, job.mesh, specs, specs[:2])


def in_turn(job: Job, state: TrainState, members: int) -> bool:
    """Returns whether members learn faster one after the other:
    where their variables fill the caches of a CPU.
    """
    large = sum(x.size for x in jax.tree.leaves(state)) > CACHED * job.mesh.shape[meshes.AGENT]
    return (
        not job.acts
        and members > job.mesh.size
        and large
        and job.mesh.devices.flat[0].platform == "cpu"
    )


def learn_together(job: Job) -> Callable[..., Any]:
    most = LEARN_TOGETHER if job.mesh.devices.flat[0].platform == "cpu" else None

    def learn(
        state: TrainState, experience: Rollout, key: jax.Array, hyper: Any, data: PyTree
    ) -> Any:
        return meshes.over_members(partial(_learn, job, data=data), most)(
            state, experience, key, hyper
        )

    return learn


def _added(
    grew: jax.Array,
    learned: jax.Array,
    sums: Any,
    episodes: EpisodeStats,
    metrics: Any,
    ended: EpisodeStats,
) -> tuple[Any, ...]:
    """Adds an iteration to the sums of a policy: ``learned, sums, episodes``; ``grew``:
    it made updates.
    """
    total = jax.tree.map(lambda *x: jnp.stack(x), episodes, ended)
    sums = jax.tree.map(lambda s, x: s + jnp.where(grew, x, 0), sums, metrics)
    return learned + grew, sums, total.merge(axis=0)


def learned(
    update: Callable[..., Any],
    state: TrainState,
    since: IntervalSums,
    experience: Rollout,
    episodes: Mapping[str, EpisodeStats],
    keys: tuple[jax.Array, ...],
    hyper: Mapping[str, jax.Array],
    data: PyTree = (),
) -> tuple[TrainState, IntervalSums]:
    """Learns from an iteration's experience,
    and adds its metrics and finished episodes to the sums.
    """
    updates = state.updates
    state, metrics = update(state, experience, keys, hyper, data)
    grew = jax.tree.map(operator.gt, state.updates, updates)
    parts = meshes.over_policies(_added, 3)(grew, *since[1:], metrics, episodes)
    return state, IntervalSums(since.iterations + 1, *parts)
