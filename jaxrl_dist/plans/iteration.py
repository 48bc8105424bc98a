"""An iteration of a population's program: its members act,
then they learn from what they have experienced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_dist import mesh as meshes
from jaxrl_dist import packing
from jaxrl_dist.actors import device, recorded_policy
from jaxrl_dist.actors.step import NO_FAULT, Rollouts
from jaxrl_dist.envs.episodes import no_episodes
from jaxrl_dist.plans.initial import BATCH, MEMBERS, STATE
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import IntervalSums
from jaxrl_dist.plans.streaming import data_spec
from jaxrl_dist.types import EpisodeStats, PyTree, TrainState, Variables

LEARN_TOGETHER = 16
"""Members that learn together on a CPU: the activations
of more would not fit into its caches (docs/speed.md)."""
CACHED = 2**20
"""Elements in the states of a device's members up to which the caches of a CPU keep them all."""
SUMS: Any = IntervalSums._make([MEMBERS] * 3 + [BATCH])
"""Sharding of the members' sums."""
Keys = tuple[jax.Array, ...]
"""Keys of acting, of the environments and of learning."""
Hyper = Mapping[str, jax.Array]
"""Hyperparameters that are inputs of the programs."""
Metrics = Mapping[str, PyTree]
"""Metrics of an iteration's updates, by policy."""


class Counted(NamedTuple):
    """What the host learns of an iteration's acting; an entry for each device of each member."""

    steps: jax.Array
    """Env steps and agent steps."""
    episodes: Mapping[str, EpisodeStats]
    fault: device.Fault


Act = Callable[[TrainState, PyTree, Keys, Hyper], tuple[PyTree, Rollouts, Counted]]
"""``(state, actor, keys, hyper) -> (actor, experience, counted)``"""
Learn = Callable[[TrainState, Rollouts, Keys, Hyper, PyTree], tuple[TrainState, Metrics]]
"""``(state, experience, keys, hyper, data) -> (state, metrics)``"""


def make_iteration(job: Job, members: int, *, recorded: bool = False) -> tuple[Act, Learn]:
    """Returns the two functions of an iteration on whole arrays of all members:
    acting and learning.

    The arrays of a single member have no axis of members. Both are traced once, however many
    programs use them.

    Args:
      recorded: the experience is as of ``recorded_policy.with_probabilities``.
    """
    act = _acting(job, members, recorded) if job.acts else _idling(job, members)
    learns = _learning(job, members)

    def learn(
        state: TrainState, experience: Rollouts, keys: Keys, hyper: Hyper, data: PyTree
    ) -> tuple[TrainState, Metrics]:
        if recorded:
            experience = recorded_policy.to_learn(experience)
        return learns(state, experience, keys[-1], hyper, data)

    return jax.jit(act, inline=True), jax.jit(learn, inline=True)


def _acting(job: Job, members: int, recorded: bool) -> Act:
    env = job.source.device()
    rollout_length = job.rollout_length
    packed = packing.starts_kernel_per_array(job.mesh.devices.flat[0])

    def local_act(
        variables: Variables,
        actor: device.ActorState,
        keys: Keys,
        hyper: Hyper,
        iteration: jax.Array,
        env_step: jax.Array,
    ) -> tuple[device.ActorState, Rollouts, Counted]:
        algorithm = job.variant(hyper)[0]
        if recorded:
            algorithm = recorded_policy.with_probabilities(algorithm, env.spec)
        rollout = device.make_rollout(algorithm, env, rollout_length, packed=packed)
        actor, experience, episodes = rollout(variables, actor, *keys, iteration, env_step)
        fault = device.Fault(iteration, device.fault_of(experience))
        counted = Counted(device.steps_of(env.spec, experience), episodes, fault)
        return actor, experience, jax.tree.map(lambda x: x[None], counted)

    one, batch = meshes.REPLICATED, meshes.BATCH
    specs = (one, batch, one, one, one, one), (batch, meshes.rollout_specs(job.algorithm), batch)
    if members == 1:
        acts = meshes.acting(local_act, job.mesh, *specs)
    else:
        acts = meshes.acting(meshes.over_members(local_act), job.mesh, *meshes.of_members(specs))

    def act(
        state: TrainState, actor: device.ActorState, keys: Keys, hyper: Hyper
    ) -> tuple[device.ActorState, Rollouts, Counted]:
        return acts(state.variables, actor, keys[:-1], hyper, state.iteration, state.env_step)

    return act


def _idling(job: Job, members: int) -> Act:
    """Returns the acting of a plan that does not act: no steps, no episodes and no fault."""
    devices = job.mesh.shape[meshes.DATA]

    def act(
        state: TrainState, actor: PyTree, keys: Keys, hyper: Hyper
    ) -> tuple[PyTree, Rollouts, Counted]:
        episodes = dict.fromkeys(job.algorithm, no_episodes(devices, job.source.spec.info_metrics))
        fault = device.Fault(jnp.zeros(devices, jnp.int32), jnp.full(devices, NO_FAULT))
        counted = Counted(jnp.zeros((devices, 2), jnp.int32), episodes, fault)
        if members > 1:
            counted = jax.tree.map(lambda x: jnp.broadcast_to(x, (members, *x.shape)), counted)
        return actor, _no_experience(job), counted

    return act


def _no_experience(job: Job) -> Rollouts:
    nothing: PyTree = dict.fromkeys(job.algorithm, ())
    experience: Rollouts = nothing
    return experience


Update = Callable[[TrainState, Rollouts, jax.Array, Hyper, PyTree], tuple[TrainState, Metrics]]
"""As ``Learn``, with the key of learning alone."""


def _learning(job: Job, members: int) -> Update:
    """Returns the update of all members, mapped over the mesh."""
    one = meshes.REPLICATED
    experience: PyTree = meshes.rollout_specs(job.algorithm) if job.acts else one
    specs: PyTree = (meshes.STATE, experience, one, one), (meshes.STATE, one)
    update: Update = partial(_update, job)
    if members > 1:
        specs = meshes.of_members(specs)
        update = learn_together(job)
    inputs, outputs = specs
    return meshes.learning(update, job.mesh, (*inputs, data_spec(job)), outputs)


def _update(
    job: Job, state: TrainState, experience: Rollouts, key: jax.Array, hyper: Hyper, data: PyTree
) -> tuple[TrainState, Metrics]:
    return job.variant(hyper)[1].update(state, experience, key, data=data)


InTurn = Callable[
    [TrainState, IntervalSums, Keys, Hyper, jax.Array, PyTree], tuple[TrainState, IntervalSums]
]
"""``(state, since, keys, hyper, count, data) -> (state, since)``"""


def learn_in_turn(job: Job) -> InTurn:
    """Returns the ``count`` updates of members that do not act, and share devices.

    Each makes all updates before the next one begins, so that its variables stay in the caches.
    """
    nothing = _no_experience(job)
    episodes = dict.fromkeys(job.algorithm, no_episodes(1, job.source.spec.info_metrics))

    def learn(
        state: TrainState, experience: Rollouts, keys: Keys, hyper: Hyper, data: PyTree
    ) -> tuple[TrainState, Metrics]:
        return _update(job, state, experience, keys[-1], hyper, data)

    def of_device(
        state: TrainState,
        since: IntervalSums,
        keys: Keys,
        hyper: Hyper,
        count: jax.Array,
        data: PyTree,
    ) -> tuple[TrainState, IntervalSums]:
        def of_member(member: PyTree) -> tuple[TrainState, IntervalSums]:
            state, since, keys, hyper = member

            def update(_: jax.Array, carry: PyTree) -> PyTree:
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


def learn_together(job: Job) -> Update:
    """Returns the update of members that share a device, mapped over them."""
    most = LEARN_TOGETHER if job.mesh.devices.flat[0].platform == "cpu" else None

    def update(
        state: TrainState, experience: Rollouts, key: jax.Array, hyper: Hyper, data: PyTree
    ) -> tuple[TrainState, Metrics]:
        one = partial(_update, job, data=data)
        return meshes.over_members(one, most)(state, experience, key, hyper)

    return update


def _added(
    grew: jax.Array,
    learned: jax.Array,
    sums: Mapping[str, jax.Array],
    episodes: EpisodeStats,
    metrics: Mapping[str, jax.Array],
    ended: EpisodeStats,
) -> tuple[jax.Array, Mapping[str, jax.Array], EpisodeStats]:
    """Adds an iteration to the sums of a policy: ``learned, sums, episodes``; ``grew``:
    it made updates.
    """
    total = jax.tree.map(lambda *x: jnp.stack(x), episodes, ended)
    sums = jax.tree.map(lambda s, x: s + jnp.where(grew, x, 0), sums, metrics)
    return learned + grew, sums, total.merge(axis=0)


def learned(
    learn: Learn,
    state: TrainState,
    since: IntervalSums,
    experience: Rollouts,
    episodes: Mapping[str, EpisodeStats],
    keys: Keys,
    hyper: Hyper,
    data: PyTree = (),
) -> tuple[TrainState, IntervalSums]:
    """Learns from an iteration's experience,
    and adds its metrics and finished episodes to the sums.
    """
    updates = state.updates
    state, metrics = learn(state, experience, keys, hyper, data)
    grew = jax.tree.map(operator.gt, state.updates, updates)
    parts = meshes.over_policies(_added, 3)(grew, *since[1:], metrics, episodes)
    return state, IntervalSums(since.iterations + 1, *parts)
