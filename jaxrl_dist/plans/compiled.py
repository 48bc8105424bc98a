"""The programs of a population: for ``on_device`` environments, acting and learning;
for ``synchronous`` learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist import packing, rng
from jaxrl_dist.actors import device, programs
from jaxrl_dist.actors.recorded_policy import to_record
from jaxrl_dist.actors.step import NO_FAULT, initial_core, keys_of
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.envs.episodes import no_episodes
from jaxrl_dist.plans.averaging import averaging
from jaxrl_dist.plans.initial import BATCH, MEMBERS, STATE, stack, start
from jaxrl_dist.plans.iteration import (
    SUMS,
    Act,
    Hyper,
    Keys,
    Learn,
    Metrics,
    in_turn,
    learn_in_turn,
    learn_together,
    learned,
    make_iteration,
)
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import Counts, IntervalSums, with_info
from jaxrl_dist.plans.streaming import data_shapes, data_spec
from jaxrl_dist.rng import Stream
from jaxrl_dist.spaces import zeros
from jaxrl_dist.types import Array, EnvSpec, EpisodeStats, PyTree, Rollout, TrainState


def lower(job: Job, members: int = 1) -> jax.stages.Lowered:
    """Lowers the plan's program for the devices of ``job``, which need not exist.

    Args:
      members: number of members of a population with equal hyperparameters.

    Returns:
      A ``jax.stages.Lowered``, whose ``compile()`` allocates nothing on the devices.
    """
    act, learn = make_iteration(job, members)
    key = jax.eval_shape(lambda: jnp.stack([rng.stream(job.config.seed, Stream.INIT)] * members))
    init = (
        meshes.over_members(job.learner.init),
        meshes.over_members(lambda key: start(job)(key, {})),
    )
    state, actor = (jax.eval_shape(begin, key) for begin in init)
    keys = key, key, key
    since = stack([blank_sums(job, act, learn, state, actor, keys, {})] * members)
    return make_program(job, act, learn).lower(
        state, actor, since, keys, {}, np.ones(members, bool), np.int32(1), data_shapes(job)
    )


def traces(job: Job, hyper: Mapping[str, float]) -> bool:
    """Returns whether one program can train members that differ in these hyperparameters:
    tracing needs no values.
    """

    def iteration(hyper: Hyper, data: PyTree) -> PyTree:
        algorithm, learner = job.variant(hyper)
        key = rng.stream(job.config.seed, Stream.INIT)
        size = job.num_envs // job.mesh.shape[meshes.DATA]
        spec = job.source.spec
        state = learner.init(key)
        if not job.acts:
            return learner.update(state, dict.fromkeys(algorithm, ()), key, data=data)
        acting = programs.Acting(algorithm, spec, job.rollout_length, keys_of(algorithm, key))
        core = initial_core(algorithm, spec, EnvSlice.all(size))
        zero = jnp.int32(0)

        def blank(policy_spec: EnvSpec) -> tuple[PyTree, PyTree, Array]:
            rows = size // spec.num_agents * policy_spec.num_agents
            return (), zeros(policy_spec.observation, rows), np.zeros((4, rows), np.float32)

        stacks, obs, outcome = meshes.over_policies(blank, 3)(spec.by_policy)
        buffer, params, begun = acting.allocate(
            state.variables, stacks, obs, core, zero, state.env_step
        )
        buffer, begun, stacks, _ = acting.act(
            zero,
            zero,
            state.variables,
            params,
            buffer,
            begun,
            stacks,
            core,
            obs,
            outcome,
            zero,
            state.env_step,
        )
        rollouts, _ = acting.close_rollout(buffer, begun, stacks, core, obs, outcome)
        return learner.update(state, rollouts, key, data=data)

    function = meshes.acting(
        iteration, job.mesh, (meshes.REPLICATED, meshes.BATCH), meshes.REPLICATED
    )
    try:
        jax.eval_shape(
            function,
            {name: np.float32(value) for name, value in hyper.items()},
            data_shapes(job),
        )
    except TypeError:  # such as JAX's, for a tracer where Python needs a number
        return False
    return True


# --- Before the first iteration -------------------------------------------------------------------


def blank_sums(job: Job, act: Act, learn: Learn, *inputs: PyTree) -> IntervalSums:
    """Returns a member's zero sums of all metrics, with episodes for each of its devices,
    as numpy arrays.
    """

    def metrics(data: PyTree, *inputs: PyTree) -> Metrics:
        state, actor, keys, hyper = squeeze_member(inputs)
        return learn(state, act(state, actor, keys, hyper)[1], keys, hyper, data)[1]

    sums = jax.tree.map(
        lambda x: np.zeros((), x.dtype), jax.eval_shape(metrics, data_shapes(job), *inputs)
    )
    episodes = no_episodes(job.mesh.shape[meshes.DATA], job.source.spec.info_metrics)
    learned, episodes = meshes.over_policies(lambda _: (np.int32(0), episodes), 2)(job.algorithm)
    return IntervalSums(np.int32(0), learned, sums, episodes)


def reset_interval(since: IntervalSums, blank: IntervalSums) -> IntervalSums:
    """Returns sums of a checkpoint with all metrics of ``blank``."""

    def of_policy(
        _: Array,
        learned: Array,
        sums: Mapping[str, Array],
        episodes: EpisodeStats,
        zeros: Mapping[str, np.ndarray],
        none: EpisodeStats,
    ) -> tuple[Array, Mapping[str, Array], EpisodeStats]:
        sums = {name: np.asarray(sums.get(name, zero), zero.dtype) for name, zero in zeros.items()}
        # another number of devices: the first holds all episodes
        if len(episodes.episodes) != len(none.episodes):
            whole = with_info(episodes.merge(), none.merge())
            episodes = jax.tree.map(lambda all, none: np.append(all, none[1:]), whole, none)
        episodes = with_info(episodes, none)
        return learned, sums, episodes

    parts = meshes.over_policies(of_policy, 3)(blank.learned, *since[1:], *blank[2:])
    return IntervalSums(since.iterations, *parts)


# --- The program ----------------------------------------------------------------------------------

KEPT = PartitionSpec(None, None, meshes.DATA)
"""Sharding of the rollouts that a program keeps, ``[K, T, B, ...]``."""


class Numbers(NamedTuple):
    """What the host reads after a dispatch: one array, however many metrics there are."""

    since: IntervalSums
    counts: Counts
    steps: Array
    """[2], env steps and agent steps."""
    fault: device.Fault
    """[devices]."""


def layout(job: Job, state: TrainState, since: IntervalSums) -> packing.Packing:
    """Returns how a member's ``Numbers`` lie in what the program returns;
    the arguments have an axis of members.
    """
    devices = job.mesh.shape[meshes.DATA]
    fault = device.Fault(np.zeros((1, devices), np.int32), np.full((1, devices), NO_FAULT))
    numbers = Numbers(since, Counts.of(state), np.zeros((1, 2), np.int32), fault)
    return packing.Packing.of(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), numbers)
    )


def squeeze_member(tree: PyTree) -> PyTree:
    """Removes the axis of members if there is one member.

    A loop would copy a replay memory in each iteration if its body removed the axis.
    """
    if len(jax.tree.leaves(tree)[0]) == 1:
        return jax.tree.map(lambda x: x[0], tree)
    return tree


def compile_update(job: Job, average_every: int | None = None) -> meshes.Program:
    """``(state, rollout, keys, hyper, running, data) -> (state, metrics)`` for members;
    the state is donated.

    Args:
      average_every: as for ``make_program``.
    """
    inputs = STATE, meshes.of_members(meshes.rollout_specs(job.algorithm)), MEMBERS, MEMBERS
    learn = meshes.learning(
        learn_together(job), job.mesh, (*inputs, meshes.BATCH), (STATE, MEMBERS)
    )

    def update(
        state: TrainState,
        rollout: Rollout,
        keys: jax.Array,
        hyper: Hyper,
        running: jax.Array,
        data: PyTree,
    ) -> tuple[TrainState, Metrics]:
        state, metrics = learn(state, rollout, keys, hyper, data)
        return averaging(state, running, average_every), metrics

    specs = *inputs, MEMBERS, meshes.BATCH
    return meshes.Program(
        update, job.mesh, specs, (STATE, MEMBERS), donate=(0,), mapped=meshes.whole
    )


class Inputs(NamedTuple):
    """What all iterations of a dispatch read."""

    keys: Keys
    hyper: Hyper
    running: Array
    """``[M]`` bool, the members that are not done."""
    count: Array
    """The number of iterations."""
    data: PyTree


class Carry(NamedTuple):
    """What an iteration changes."""

    state: TrainState
    actor: PyTree
    since: IntervalSums
    steps: Array
    """Env steps and agent steps of the dispatch, ``[M, 2]``."""
    kept: PyTree
    """What is recorded of each iteration, ``[keeps, ...]``."""
    done: Array
    """The number of iterations."""
    fault: device.Fault


def make_program(
    job: Job, act: Act, learn: Learn, average_every: int | None = None, keeps: int = 0
) -> meshes.Program:
    """Returns ``(state, actor, since, keys, hyper, running,
    count, data) -> (state, actor, since, numbers, kept)``.

    The program donates the first two. It runs ``count`` iterations,
    and adds their sums to ``since``; ``numbers [M,
    ...]`` are the members' ``Numbers`` as in ``layout``, on all devices.
    If an environment of a member that is ``running [M]`` returns NaN or infinity, it stops before
    that iteration, and the numbers have each device's first ``fault``.

    Args:
      average_every: iterations after which the networks of all members become their mean;
        None: never.
      keeps: the largest ``count`` of a run that is recorded. Then ``kept`` is what
        ``to_record`` returns for each iteration, ``[keeps, ...]``; 0: it is (), and
        ``count`` has no limit.
    """
    dispatch = Dispatch(job, act, learn, average_every, keeps)
    in_specs = (STATE, BATCH, SUMS, MEMBERS, MEMBERS, MEMBERS, meshes.REPLICATED, data_spec(job))
    out_specs = (STATE, BATCH, SUMS, meshes.REPLICATED, KEPT)
    return meshes.Program(
        dispatch.run, job.mesh, in_specs, out_specs, donate=(0, 1), mapped=meshes.whole
    )


class Dispatch:
    """The iterations that the program of ``make_program`` runs in a loop."""

    def __init__(
        self, job: Job, act: Act, learn: Learn, average_every: int | None, keeps: int
    ) -> None:
        self._job = job
        self._act = act
        self._learn = learn
        self._average_every = average_every
        self._keeps = keeps

    def run(
        self,
        state: TrainState,
        actor: PyTree,
        since: IntervalSums,
        keys: Keys,
        hyper: Hyper,
        running: jax.Array,
        count: jax.Array,
        data: PyTree,
    ) -> tuple[TrainState, PyTree, IntervalSums, list[jax.Array], PyTree]:
        """The program."""
        job = self._job
        members = len(running)
        state, actor, since, keys, hyper, running = squeeze_member(
            (state, actor, since, keys, hyper, running)
        )
        inputs = Inputs(keys, hyper, running, count, data)
        carry = self._begin(state, actor, since, inputs)
        with jax.named_scope("iteration"):
            if self._average_every is None and in_turn(job, state, members):
                state, since = learn_in_turn(job)(state, since, keys, hyper, count, data)
                carry = carry._replace(state=state, since=since)
            else:
                carry = jax.lax.while_loop(
                    partial(self._goes_on, inputs), partial(self._iterate, inputs), carry
                )
        outputs: PyTree = carry.state, carry.actor, carry.since, carry.steps, carry.fault
        if members == 1:
            outputs = jax.tree.map(lambda x: x[None], outputs)
        state, actor, since, steps, fault = outputs
        numbers = Numbers(since, Counts.of(state), steps, fault)
        packed = jax.vmap(lambda one: packing.Packing.of(one).pack(one))(numbers)
        return state, actor, since, packed, carry.kept

    def _begin(
        self, state: TrainState, actor: PyTree, since: IntervalSums, inputs: Inputs
    ) -> Carry:
        shape = *inputs.running.shape, self._job.mesh.shape[meshes.DATA]
        no_fault = device.Fault(jnp.zeros(shape, jnp.int32), jnp.full(shape, NO_FAULT))
        no_steps = jnp.zeros((*inputs.running.shape, 2), jnp.int32)
        kept: PyTree = ()
        if self._keeps:
            _, experience, _ = jax.eval_shape(self._act, state, actor, inputs.keys, inputs.hyper)
            kept = jax.tree.map(
                lambda x: jnp.zeros((self._keeps, *x.shape), x.dtype),
                to_record(experience),
            )
        return Carry(state, actor, since, no_steps, kept, jnp.zeros((), jnp.int32), no_fault)

    def _goes_on(self, inputs: Inputs, carry: Carry) -> jax.Array:
        return (carry.done < inputs.count) & _finite(inputs, carry.fault)

    def _iterate(self, inputs: Inputs, carry: Carry) -> Carry:
        """Acts, and learns from it unless an environment has a fault."""
        keys = inputs.keys
        hyper = inputs.hyper
        acted, experience, counted = self._act(carry.state, carry.actor, keys, hyper)
        kept = carry.kept
        if self._keeps:
            kept = jax.tree.map(
                lambda all, x: all.at[carry.done].set(x),
                kept,
                to_record(experience),
            )

        def learn(state: TrainState, _: PyTree, since: IntervalSums, steps: jax.Array) -> PyTree:
            state, since = learned(
                self._learn, state, since, experience, counted.episodes, keys, hyper, inputs.data
            )
            state = averaging(state, inputs.running, self._average_every)
            return state, acted, since, steps + counted.steps.sum(axis=-2)

        state, actor, since, steps = jax.lax.cond(
            _finite(inputs, counted.fault),
            learn,
            lambda *before: before,
            carry.state,
            carry.actor,
            carry.since,
            carry.steps,
        )
        return Carry(state, actor, since, steps, kept, carry.done + 1, counted.fault)


def _finite(inputs: Inputs, fault: device.Fault) -> jax.Array:
    """Returns whether no running member's environment has a fault."""
    return jnp.all((fault.where == NO_FAULT) | ~inputs.running[..., None])
