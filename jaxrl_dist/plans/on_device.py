"""Environment, acting and learning in one compiled program over the whole mesh.

This is Anakin of the Podracer architectures (Hessel et al. 2021, https://arxiv.org/abs/2104.06272): nothing goes
through the host while the program runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors import device
from jaxrl_dist.envs.base import Share
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import NO_EPISODES, Clock, IntervalSums, report
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Report, Rollout, TrainState, Variables

DISPATCH_SECONDS = 1.0
"""Approximate duration of one dispatch, so that the run stops soon after a request. Results do not depend on it."""
_SUMS: Any = IntervalSums._make([meshes.REPLICATED] * 3 + [meshes.BATCH])


def on_device(job: Job) -> Iterator[Report]:
    """Runs ``job`` on gymnax environments, many iterations per dispatch."""
    clock = Clock(job.resumed, job.away)
    iterate = _iterate(job)
    program = _program(job, *iterate)
    actor = jax.jit(start(job))(job.key(Stream.ENV)) if job.resumed is None else job.resumed.actor
    actor = meshes.put(actor, job.mesh, meshes.BATCH)
    state = job.initial_state()
    keys = tuple(job.key(stream) for stream in (Stream.ACT, Stream.ENV, Stream.LEARN))
    blank = _blank_sums(job, *iterate, state, actor, keys)
    since = _parted(job, IntervalSums.of(job.resumed), blank)
    clock.ready(program)
    env_steps, iterations, iterations_per_dispatch = job.env_steps, int(since.iterations), 1

    def now() -> Report:
        due = iterations >= job.iterations_per_report
        return report(state, env_steps, clock, since, due=due, actor=actor)

    job.offer(now)
    done = env_steps >= job.total_env_steps
    while not done:
        began = time.perf_counter() - program.compile_seconds
        count = max(1, min(iterations_per_dispatch, job.iterations_per_report - iterations))
        budget = min(job.total_env_steps - env_steps, 2**30)
        state, actor, since, *outputs = program(state, actor, since, keys, np.int32(count), np.int32(budget))
        steps, fault, iterations = jax.device_get((*outputs, since.iterations))
        env_steps += int(steps)
        # The program stops before the faulty iteration, so that a resumed run meets the fault again.
        device.check_fault(job.source.spec, fault, job.num_envs, job.rollout_length)
        seconds = time.perf_counter() - program.compile_seconds - began
        iterations_per_dispatch = max(1, min(2 * iterations_per_dispatch, int(DISPATCH_SECONDS * count / seconds)))
        done = env_steps >= job.total_env_steps or job.stop()
        if not done and iterations >= job.iterations_per_report:
            yield now()
            since, iterations = blank, 0
    yield now()


def lower(job: Job) -> Any:
    """Lowers the plan's program for the devices of ``job``, which need not be there.

    Returns:
      A ``jax.stages.Lowered``, whose ``compile()`` allocates nothing on the devices.
    """
    iterate = _iterate(job)
    key = jax.eval_shape(lambda: rng.stream(job.seed, Stream.INIT))
    state, actor = jax.eval_shape(job.learner.init, key), jax.eval_shape(start(job), key)
    keys = (key, key, key)
    blank = _blank_sums(job, *iterate, state, actor, keys)
    return _program(job, *iterate).lower(state, actor, blank, keys, np.int32(1), np.int32(1))


def start(job: Job) -> Callable[[jax.Array], device.ActorState]:
    """Returns ``(key) -> actor``, which starts the environments with the key of their random stream."""
    share, env = Share.all(job.num_envs), job.source.device()
    return lambda key: device.init(job.algorithm, env, share, key)


def _iterate(job: Job) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the two functions of an iteration on whole arrays: acting and learning.

    They are ``(state, actor, keys) -> (actor, experience, (steps, episodes, fault))`` and ``(state, experience, keys)
    -> (state, metrics)``; ``steps``, ``episodes`` and ``fault`` have an entry for each device. Both are traced once,
    however many programs use them.
    """
    rollout = device.make_rollout(job.algorithm, job.source.device(), job.rollout_length)
    one, batch, experience = meshes.REPLICATED, meshes.BATCH, meshes.ROLLOUT

    def local(
        variables: Variables, actor: device.ActorState, keys: Any, iteration: jax.Array, env_step: jax.Array
    ) -> tuple[Any, ...]:
        actor, experience, episodes = rollout(variables, actor, *keys, iteration, env_step)
        fault = device.Fault(iteration, device.find_fault(experience))
        counts = jnp.sum(experience.valid, dtype=jnp.int32), episodes, fault
        return actor, experience, jax.tree.map(lambda x: x[None], counts)

    acts = meshes.acting(local, job.mesh, (one, batch, one, one, one), (batch, experience, batch))
    learns = meshes.learning(job.learner.update, job.mesh, (meshes.STATE, experience, one), (meshes.STATE, one))

    def act(state: TrainState, actor: device.ActorState, keys: tuple[jax.Array, ...]) -> Any:
        return acts(state.variables, actor, keys[:-1], state.iteration, state.env_step)

    def learn(state: TrainState, experience: Rollout, keys: tuple[jax.Array, ...]) -> Any:
        return learns(state, experience, keys[-1])

    return jax.jit(act, inline=True), jax.jit(learn, inline=True)


def _blank_sums(
    job: Job,
    act: Callable[..., Any],
    learn: Callable[..., Any],
    state: TrainState,
    actor: device.ActorState,
    keys: tuple[jax.Array, ...],
) -> IntervalSums:
    """Returns zero sums, as numpy arrays, of all metrics, and with a part of the episodes for each device."""
    metrics = jax.eval_shape(lambda *args: learn(args[0], act(*args)[1], args[2])[1], state, actor, keys)
    episodes = jax.tree.map(lambda x: np.repeat(x, job.mesh.devices.size), NO_EPISODES)
    sums = {name: np.zeros(x.shape, x.dtype) for name, x in metrics.items()}
    return IntervalSums(np.int32(0), np.int32(0), sums, episodes)


def _parted(job: Job, since: IntervalSums, blank: IntervalSums) -> IntervalSums:
    """Returns sums of a checkpoint with the metrics and the parts of ``blank``."""
    sums = {name: np.asarray(since.sums.get(name, x), x.dtype) for name, x in blank.sums.items()}
    episodes = since.episodes
    if len(episodes.episodes) != job.mesh.devices.size:  # from another number: the first holds all episodes
        episodes = jax.tree.map(lambda all, none: np.append(all, none[1:]), episodes.merge(), blank.episodes)
    return since._replace(sums=sums, episodes=episodes)


def _program(job: Job, act: Callable[..., Any], update: Callable[..., Any]) -> meshes.Program:
    """Returns ``(state, actor, since, keys, count, budget) -> (state, actor, since, steps, fault)``.

    The program makes ``count`` iterations, or fewer if ``budget`` env steps are done earlier, and adds their sums to
    ``since``. If an environment returns NaN or infinity, it stops before that iteration and returns each device's first
    ``fault``.
    """

    def finite(fault: device.Fault) -> jax.Array:
        return jnp.all(fault.where == device.NO_FAULT)

    def run(
        state: TrainState,
        actor: device.ActorState,
        since: IntervalSums,
        keys: tuple[jax.Array, ...],
        count: jax.Array,
        budget: jax.Array,
    ) -> tuple[TrainState, device.ActorState, IntervalSums, jax.Array, device.Fault]:
        last = since.iterations + count

        def more(carry: Any) -> jax.Array:
            _, _, since, steps, fault = carry
            return (since.iterations < last) & (steps < budget) & finite(fault)

        def body(carry: Any) -> Any:
            state, actor, since, steps, _ = carry
            acted, experience, (new_steps, episodes, fault) = act(state, actor, keys)

            def learn(state: TrainState, _: Any, since: IntervalSums, steps: jax.Array) -> Any:
                updates = state.updates
                state, metrics = update(state, experience, keys)
                grew = state.updates > updates
                total = jax.tree.map(lambda *x: jnp.stack(x), since.episodes, episodes)
                since = IntervalSums(
                    iterations=since.iterations + 1,
                    learned=since.learned + grew,
                    sums=jax.tree.map(lambda s, x: s + jnp.where(grew, x, 0), since.sums, metrics),
                    episodes=total.merge(axis=0),
                )
                return state, acted, since, steps + new_steps.sum()

            kept = jax.lax.cond(finite(fault), learn, lambda *before: before, state, actor, since, steps)
            return *kept, fault

        devices = job.mesh.devices.size
        none = device.Fault(jnp.zeros(devices, jnp.int32), jnp.full(devices, device.NO_FAULT))
        with jax.named_scope("iteration"):
            return jax.lax.while_loop(more, body, (state, actor, since, jnp.zeros((), jnp.int32), none))

    one, batch = meshes.REPLICATED, meshes.BATCH
    in_specs = (meshes.STATE, batch, _SUMS, one, one, one)
    out_specs = (meshes.STATE, batch, _SUMS, one, batch)
    return meshes.Program(run, job.mesh, in_specs, out_specs, donate=(0, 1, 2), mapped=meshes.whole)
