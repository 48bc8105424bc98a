"""The stages of an iteration, each as a separate program."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh as meshes
from jaxrl_dist import packing, rng
from jaxrl_dist.actors import device, host
from jaxrl_dist.actors.programs import compile_acting
from jaxrl_dist.actors.step import Rollouts, num_rows, simulator, step_numbers
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.envs.base import DeviceEnv, EnvSlice
from jaxrl_dist.envs.episodes import ended_episodes
from jaxrl_dist.learners import off_policy, on_policy, sgd
from jaxrl_dist.learners.policies import state_of
from jaxrl_dist.memory import ring
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.plans.job import Job
from jaxrl_dist.profiling import costs
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import EpisodeStats, PyTree, Rollout, Timestep, TrainState

ONE = meshes.REPLICATED
BATCH = meshes.BATCH
TIME = meshes.TIME_BATCH
ROLLOUT = meshes.ROLLOUT


class Part(NamedTuple):
    """A stage of an iteration, as a separate program."""

    run: Callable[[], Any]
    """Does an iteration's work of the stage; once its outputs are ready, the work is done."""
    layers: Mapping[str, int]
    """Floating-point operations of its matrix products and convolutions by layer, on all
    devices."""
    moved: int
    """Bytes that it reads and writes on all devices, as ``costs.of_memory`` counts them."""


def make_parts(job: Job) -> dict[str, Part]:
    """Returns the stages of an iteration that run on devices and that no thread times,
    in their order.

    They are ``environment`` and ``policy`` under the plan ``on_device``, and the learner's:
    ``replay``, ``postprocess``, ``shuffle``, ``gradient`` and ``optimizer``. The plan ``gradients``
    has none. With several policies, the learner's stages belong to one each, such as
    ``prey/gradient``.
    """
    if PLANS[job.config.plan].sends_gradients:
        return {}
    state = job.initial_state()
    if not job.source.is_pure:
        return _of_learners(job, state, _host_rollout(job, state))
    env = job.source.device()
    act_key = job.key(Stream.ACT)
    env_key = job.key(Stream.ENV)
    begin = jax.jit(lambda key: device.init(job.algorithm, env, EnvSlice.all(job.num_envs), key))
    program = device.compile_rollout(
        job.algorithm, env, job.mesh, job.rollout_length, act_key, env_key
    )
    # the program uses up the first
    actor, started = (meshes.put(begin(env_key), job.mesh, BATCH) for _ in range(2))
    rollout = program(state.variables, actor, state.iteration, state.env_step, np.int32(0))[1]
    parts = _of_learners(job, state, rollout)
    if not PLANS[job.config.plan].compiled:
        return parts
    light = state._replace(memory=())
    return {
        "environment": _environment(job, env, started, rollout),
        "policy": _policy(job, env, started, rollout, light),
        **parts,
    }


def _host_rollout(job: Job, state: TrainState) -> Rollouts:
    """Fills a rollout from environments on the host."""
    with contextlib.closing(job.source.host(job.num_envs, job.session_seed)) as env:
        programs = compile_acting(
            job.algorithm, job.source.spec, job.mesh, job.rollout_length, job.key(Stream.ACT)
        )
        actor = host.HostActor(job.algorithm, env, job.mesh, job.rollout_length, programs)
        return actor.rollout(state.variables, state.iteration, state.env_step)[0]


# --- Acting ---------------------------------------------------------------------------------------


def _environment(job: Job, env: DeviceEnv, actor: device.ActorState, rollout: PyTree) -> Part:
    """Steps the environments with the actions of a rollout, and stores what they return."""
    packed = packing.starts_kernel_per_array(job.mesh.devices.flat[0])
    actions = env.spec.bare(over_policies(lambda rollout: rollout.action)(rollout))

    def step_all(state: PyTree, actions: PyTree, key: jax.Array) -> tuple[PyTree, PyTree]:
        rows = num_rows(env.spec.keyed(jax.tree.map(lambda x: x[0], actions)))
        keys = rng.per_step(
            key, step_numbers(jnp.int32(0), job.rollout_length), meshes.global_index(rows)
        )

        def step(
            state: PyTree, now: tuple[PyTree, jax.Array]
        ) -> tuple[PyTree, tuple[Timestep, EpisodeStats]]:
            state, timestep, episodes = env.step(state, *now)
            return state, (timestep, episodes)

        return packing.scan(step, state, (actions, keys), packed=packed)

    mapped = meshes.acting(step_all, job.mesh, (BATCH, TIME, ONE), (BATCH, TIME))
    return _part(mapped, actor.env, actions, job.key(Stream.ENV), carries=True)[0]


def _policy(
    job: Job, env: DeviceEnv, actor: device.ActorState, rollout: PyTree, state: TrainState
) -> Part:
    """Acts on the observations of a rollout, and stores actions and observations."""

    searches = simulator(job.algorithm, env, actor.env) is not None

    def replayed(state: PyTree, action: PyTree, keys: jax.Array) -> Any:
        del action, keys
        state, native = state
        state, *stepped = over_policies(of_policy, 3)(state)
        return (state, native), *map(env.spec.bare, stepped)

    def simulate(state: PyTree) -> Any:
        # of the first states, again and again
        if env.simulate:
            return env.simulate(state[1])
        return None

    def of_policy(state: tuple[PyTree, jax.Array]) -> tuple[PyTree, Timestep, EpisodeStats]:
        observations, now = state  # [B, T + 1, ...], [B]
        no = jnp.zeros(now.shape, bool)
        zeros = jnp.zeros(now.shape, jnp.float32)
        obs = jax.tree.map(lambda x: x[:, now[0] + 1], observations)
        return (
            (observations, now + 1),
            Timestep(obs, zeros, no, no, ~no),
            ended_episodes(no, zeros, now),
        )

    def replay_of(rollout: Rollout) -> PyTree:
        by_env = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rollout.obs)
        return by_env, jnp.zeros(rollout.reward.shape[1], jnp.int32)

    act = device.make_rollout(
        # Resets before a rollout belong to the environment.
        over_policies(lambda algorithm: dataclasses.replace(algorithm, episodic=False))(
            job.algorithm
        ),
        env._replace(step=replayed, simulate=simulate if searches else None),
        job.rollout_length,
        packed=packing.starts_kernel_per_array(job.mesh.devices.flat[0]),
    )

    def act_all(actor: device.ActorState, state: TrainState, key: jax.Array) -> Any:
        done = act(state.variables, actor, key, key, state.iteration, state.env_step)[1]
        return over_policies(lambda x: (x.obs, (x.action, x.extras), x.final_core), 3)(done)

    native = actor.env if searches else ()
    actor = actor._replace(
        env=(meshes.put(over_policies(replay_of)(rollout), job.mesh, BATCH), native)
    )
    mapped = meshes.acting(act_all, job.mesh, (BATCH, ONE, ONE), (TIME, TIME, BATCH))
    return _part(mapped, actor, state, job.key(Stream.ACT))[0]


# --- Learning -------------------------------------------------------------------------------------


def _of_learners(job: Job, state: TrainState, rollout: PyTree) -> dict[str, Part]:
    """Returns the stages of each policy that trains."""
    parts: dict[str, dict[str, Part]] = {}
    for name, algorithm in job.algorithm.items():
        if algorithm.trains:
            of_policy = job._replace(algorithm=algorithm)
            frame_stack = job.source.spec.by_policy[name].frame_stack
            parts[name] = _learner_parts(
                of_policy, state_of(state, name), rollout[name], frame_stack
            )
    return meshes.flat(parts)


def _learner_parts(
    job: Job, state: TrainState, rollout: Rollout, frame_stack: int
) -> dict[str, Part]:
    algorithm = job.algorithm
    key = job.key(Stream.LEARN)
    light = state._replace(memory=())
    parts: dict[str, Part] = {}
    if algorithm.replay is None:
        parts["postprocess"], (batch, _) = _postprocess_once(job, light, rollout, key)
        minibatches = algorithm.num_minibatches
        updates = algorithm.num_epochs * minibatches
        if minibatches > 1:
            parts["shuffle"], _ = _shuffle(job, batch, key, rollout.reward.shape[1])
    else:
        minibatches = 1
        updates = off_policy.updates_per_iteration(algorithm.replay, rollout.reward.size)
        parts["replay"], (_, windows) = _replay(
            job, state.memory, rollout, key, updates, frame_stack
        )
        parts["postprocess"], batch = _postprocess_each(job, light, windows, key, updates)
    parts["gradient"], gradient = _gradient(job, light, batch, key, updates, minibatches)
    parts["optimizer"] = _optimizer(job, light, gradient, updates)
    return parts


def _postprocess_once(
    job: Job, state: TrainState, rollout: Rollout, key: jax.Array
) -> tuple[Part, Any]:
    """Postprocesses a rollout, and observes it for running statistics."""
    algorithm = job.algorithm

    def postprocess(state: TrainState, rollout: Rollout, key: jax.Array) -> tuple[PyTree, PyTree]:
        keys = rng.per_index(key, meshes.global_index(rollout.reward.shape[1]))
        batch = algorithm.postprocess(state.variables, rollout, state.context(keys))
        return batch, algorithm.updated_stats(state.variables, rollout, state.context())

    return _part(
        meshes.acting(postprocess, job.mesh, (ONE, ROLLOUT, ONE), (BATCH, ONE)), state, rollout, key
    )


def _shuffle(job: Job, batch: PyTree, key: jax.Array, rows: int) -> tuple[Part, PyTree]:
    """Divides the examples of a rollout into the minibatches of every epoch."""
    minibatches = job.algorithm.num_minibatches
    num_envs = rows // job.mesh.size

    def shuffle(batch: PyTree, key: jax.Array, order: jax.Array) -> PyTree:
        size = len(jax.tree.leaves(batch)[0])

        def epoch(number: jax.Array) -> PyTree:
            rows = on_policy.shuffled(key, number, num_envs, size, minibatches)
            return _repeated(lambda rows: on_policy.take(batch, rows), rows)

        return _repeated(epoch, order)

    return _part(
        meshes.acting(shuffle, job.mesh, (BATCH, ONE, ONE), BATCH),
        batch,
        key,
        _order(job.algorithm.num_epochs),
    )


def _replay(
    job: Job, memory: ring.Memory, rollout: Rollout, key: jax.Array, updates: int, frame_stack: int
) -> tuple[Part, tuple[ring.Memory, Rollout]]:
    """Stores a rollout, draws and gathers the windows of every update,
    and sets their priorities, if it has any.
    """
    replay, window = job.algorithm.replay, job.algorithm.window
    assert replay is not None and window is not None, "replay needs windows of a fixed length"
    size = replay.batch_size // job.mesh.size

    def store(memory: ring.Memory, rollout: Rollout) -> ring.Memory:
        return ring.add(memory, rollout, window, frame_stack)

    def draw(memory: ring.Memory, key: jax.Array) -> tuple[ring.Memory, Rollout]:
        if replay.priority_exponent is None:
            index = ring.draw_uniform(memory, key, size, window, frame_stack)
        else:
            index, probability = ring.draw_prioritized(memory, key, size)
            memory = ring.set_priority(memory, index, probability)
        return memory, ring.gather(memory.steps, index, window, frame_stack)

    def store_and_draw(
        memory: ring.Memory, rollout: Rollout, key: jax.Array, order: jax.Array
    ) -> Any:
        memory = store(memory, rollout)
        keys = rng.per_index(key, order)
        blank = _blank(lambda: draw(memory, keys[0])[1])
        return jax.lax.scan(lambda carry, key: (draw(carry[0], key), None), (memory, blank), keys)[
            0
        ]

    fill = jax.jit(meshes.acting(store, job.mesh, (BATCH, ROLLOUT), BATCH), donate_argnums=0)
    for _ in range(2 + window // job.rollout_length):  # so that there are windows to draw
        memory = fill(memory, rollout)
    mapped = meshes.acting(store_and_draw, job.mesh, (BATCH, ROLLOUT, ONE, ONE), (BATCH, ROLLOUT))
    return _part(mapped, memory, rollout, key, _order(updates), carries=True)


def _postprocess_each(
    job: Job, state: TrainState, windows: Rollout, key: jax.Array, updates: int
) -> tuple[Part, Any]:
    """Postprocesses the windows of every update."""
    algorithm = job.algorithm

    def postprocess(
        state: TrainState, windows: Rollout, key: jax.Array, order: jax.Array
    ) -> PyTree:
        keys = rng.per_index(key, meshes.global_index(windows.reward.shape[1]))
        pair = _twice(windows)

        def one(number: jax.Array) -> PyTree:
            chosen = jax.tree.map(lambda x: x[number % 2], pair)
            return algorithm.postprocess(state.variables, chosen, state.context(keys))

        return _repeated(one, order)

    mapped = meshes.acting(postprocess, job.mesh, (ONE, ROLLOUT, ONE, ONE), BATCH)
    return _part(mapped, state, windows, key, _order(updates))


def _gradient(
    job: Job, state: TrainState, batch: PyTree, key: jax.Array, updates: int, minibatches: int
) -> tuple[Part, PyTree]:
    """Differentiates the loss of every update's examples."""
    algorithm = job.algorithm

    def differentiate(
        state: TrainState, batch: PyTree, key: jax.Array, order: jax.Array, which: jax.Array
    ) -> PyTree:
        parts = jax.tree.map(lambda x: x.reshape(minibatches, -1, *x.shape[1:]), batch)
        if minibatches == 1:
            parts = _twice(batch)
        examples = meshes.global_index(jax.tree.leaves(parts)[0].shape[1])

        def one(now: tuple[jax.Array, jax.Array]) -> PyTree:
            number, which = now
            keys = rng.per_index(jax.random.fold_in(key, number), examples)
            return sgd.gradient(algorithm, state, jax.tree.map(lambda x: x[which], parts), keys)[:2]

        return _repeated(one, (order, which))[0]

    order = _order(updates)
    mapped = meshes.learning(differentiate, job.mesh, (ONE, BATCH, ONE, ONE, ONE), ONE)
    return _part(mapped, state, batch, key, order, order % max(minibatches, 2))


def _optimizer(job: Job, state: TrainState, gradient: PyTree, updates: int) -> Part:
    """Makes every update, from one gradient."""

    def update(state: TrainState, gradient: PyTree, order: jax.Array) -> tuple[TrainState]:
        return (
            jax.lax.scan(
                lambda state, _: (sgd.apply(job.algorithm, state, gradient), None), state, order
            )[0],
        )

    mapped = meshes.learning(update, job.mesh, (ONE, ONE, ONE), ONE)
    return _part(mapped, state, gradient, _order(updates), carries=True)[0]


# --- Parts ----------------------------------------------------------------------------------------


def _order(updates: int) -> np.ndarray:
    return np.arange(updates, dtype=np.int32)


def _twice(tree: PyTree) -> PyTree:
    """Stacks arrays twice: with a copy chosen at run time,
    no compiler can move the computation out of a loop.
    """
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def _blank(function: Callable[[], PyTree]) -> PyTree:
    """Returns zeros with the shapes and dtypes of a function's output."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function))


def _repeated(function: Callable[[Any], PyTree], over: PyTree) -> PyTree:
    """Calls a function with each entry of the arrays ``over``, one after the other,
    and returns its last output.
    """
    blank = _blank(lambda: function(jax.tree.map(lambda x: x[0], over)))
    return jax.lax.scan(lambda _, now: (function(now), None), blank, over)[0]


def _part(mapped: Callable[..., Any], *args: Any, carries: bool = False) -> tuple[Part, Any]:
    """Returns a mapped function as a part, and its first output.

    Args:
      carries: the function returns a tuple, and takes its
        first output as its first argument in the next run.
    """
    if carries:
        args = jax.tree.map(jnp.copy, args[:1]) + args[1:]
    else:
        args = args
    jaxpr = jax.make_jaxpr(mapped)(*args).jaxpr
    program = jax.jit(mapped, donate_argnums=0 if carries else ())
    first = program(*args)
    state = first[0] if carries else args[0]

    def run() -> Any:
        nonlocal state
        out = program(state, *args[1:])
        if carries:
            state = out[0]
        return out

    return Part(run, costs.of_products(jaxpr), costs.of_memory(jaxpr)), first
