"""The stages of an iteration, each as a separate program."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
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
from jaxrl_dist.plans.session import Session
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Algorithm, EpisodeStats, PyTree, Rollout, Timestep, TrainState

ONE = meshes.REPLICATED
BATCH = meshes.BATCH
TIME = meshes.TIME_BATCH
ROLLOUT = meshes.ROLLOUT


class Stage(NamedTuple):
    """A stage of an iteration, as a separate program."""

    run: Callable[[], PyTree]
    """Does one iteration's work of the stage; the work is done when the outputs are ready."""
    traced: jax.stages.Traced
    """The program as JAX traces it."""


def make_stages(session: Session) -> dict[str, Stage]:
    """Returns the stages of an iteration that run on devices and that no thread times,
    in their order.

    They are ``environment`` and ``policy`` under the plan ``on_device``, and the learner's:
    ``replay``, ``postprocess``, ``shuffle``, ``gradient`` and ``optimizer``. The plan ``gradients``
    has none. With several policies, the learner's stages belong to one each, such as
    ``prey/gradient``.
    """
    job = session.job
    if PLANS[job.config.plan].sends_gradients:
        return {}
    state = session.initial_state()
    learn_key = session.key(Stream.LEARN)
    if not job.source.is_pure:
        return _learning(job, state, _host_rollout(session, state), learn_key)
    env = job.source.device()
    act_key = session.key(Stream.ACT)
    env_key = session.key(Stream.ENV)
    begin = jax.jit(lambda key: device.init(job.algorithm, env, EnvSlice.all(job.num_envs), key))
    program = device.compile_rollout(
        job.algorithm, env, job.mesh, job.rollout_length, act_key, env_key
    )
    # The program donates its actor, so the stages need a second one.
    actor, started = (meshes.put(begin(env_key), job.mesh, BATCH) for _ in range(2))
    rollout = program(state.variables, actor, state.iteration, state.env_step, np.int32(0))[1]
    learning = _learning(job, state, rollout, learn_key)
    if not PLANS[job.config.plan].compiled:
        return learning
    light = state._replace(memory=())
    return {
        "environment": _environment(job, env, started, rollout, env_key),
        "policy": _policy(job, env, started, rollout, light, act_key),
        **learning,
    }


def _host_rollout(session: Session, state: TrainState) -> Rollouts:
    """Fills a rollout from environments on the host."""
    job = session.job
    with contextlib.closing(job.source.host(job.num_envs, session.host_seed)) as env:
        programs = compile_acting(
            job.algorithm, job.source.spec, job.mesh, job.rollout_length, session.key(Stream.ACT)
        )
        actor = host.HostActor(job.algorithm, env, job.mesh, job.rollout_length, programs)
        return actor.rollout(state.variables, state.iteration, state.env_step)[0]


# --- Acting ---------------------------------------------------------------------------------------


def _environment(
    job: Job, env: DeviceEnv, actor: device.ActorState, rollout: Rollouts, key: jax.Array
) -> Stage:
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
    return _stage(mapped, actor.env, actions, key, carries=True)[0]


def _policy(
    job: Job,
    env: DeviceEnv,
    actor: device.ActorState,
    rollout: Rollouts,
    state: TrainState,
    key: jax.Array,
) -> Stage:
    """Acts on the observations of a rollout, and stores actions and observations."""
    searches = simulator(job.algorithm, env, actor.env) is not None
    act = device.make_rollout(
        # Resets before a rollout belong to the environment.
        over_policies(lambda algorithm: dataclasses.replace(algorithm, episodic=False))(
            job.algorithm
        ),
        _replaying(env, searches=searches),
        job.rollout_length,
        packed=packing.starts_kernel_per_array(job.mesh.devices.flat[0]),
    )

    def act_all(actor: device.ActorState, state: TrainState, key: jax.Array) -> PyTree:
        acted = act(state.variables, actor, key, key, state.iteration, state.env_step)[1]
        return over_policies(lambda x: (x.obs, (x.action, x.extras), x.final_core), 3)(acted)

    observations = meshes.put(over_policies(_observations)(rollout), job.mesh, BATCH)
    actor = actor._replace(env=(observations, actor.env if searches else ()))
    mapped = meshes.acting(act_all, job.mesh, (BATCH, ONE, ONE), (TIME, TIME, BATCH))
    return _stage(mapped, actor, state, key)[0]


def _replaying(env: DeviceEnv, *, searches: bool) -> DeviceEnv:
    """Returns an environment that returns recorded observations, whatever the actions.

    Its state is a pair of the ``_observations`` of each policy and the state from which searches
    plan, which stays the first one.
    """

    def step(state: tuple[PyTree, PyTree], action: PyTree, keys: jax.Array) -> Any:
        del action, keys
        observations, native = state
        observations, *stepped = over_policies(_next_observation, 3)(observations)
        return (observations, native), *map(env.spec.bare, stepped)

    def simulate(state: tuple[PyTree, PyTree]) -> Any:
        assert env.simulate is not None, "a search needs an environment that can be simulated"
        return env.simulate(state[1])

    return env._replace(step=step, simulate=simulate if searches else None)


def _observations(rollout: Rollout) -> tuple[PyTree, jax.Array]:
    """Returns the observations of a rollout by environment, [B, T + 1, ...],
    and the step that each environment is at, [B].
    """
    by_env = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rollout.obs)
    return by_env, jnp.zeros(rollout.reward.shape[1], jnp.int32)


def _next_observation(
    state: tuple[PyTree, jax.Array],
) -> tuple[tuple[PyTree, jax.Array], Timestep, EpisodeStats]:
    """Advances ``_observations`` by a step that pays nothing and ends no episode."""
    observations, now = state
    no = jnp.zeros(now.shape, bool)
    zeros = jnp.zeros(now.shape, jnp.float32)
    obs = jax.tree.map(lambda x: x[:, now[0] + 1], observations)
    return (
        (observations, now + 1),
        Timestep(obs, zeros, no, no, ~no),
        ended_episodes(no, zeros, now),
    )


# --- Learning -------------------------------------------------------------------------------------


def _learning(job: Job, state: TrainState, rollout: Rollouts, key: jax.Array) -> dict[str, Stage]:
    """Returns the stages of each policy that trains."""
    stages: dict[str, dict[str, Stage]] = {}
    for name, algorithm in job.algorithm.items():
        if algorithm.trains:
            frame_stack = job.source.spec.by_policy[name].frame_stack
            learner = _Learner(algorithm, job, state_of(state, name), key)
            stages[name] = learner.stages(rollout[name], frame_stack)
    return meshes.flat(stages)


class _Learner:
    """The learner of one policy; its methods make its stages."""

    def __init__(self, algorithm: Algorithm, job: Job, state: TrainState, key: jax.Array) -> None:
        self._algorithm = algorithm
        self._mesh = job.mesh
        self._rollout_length = job.rollout_length
        self._memory = state.memory
        self._state = state._replace(memory=())
        self._key = key

    def stages(self, rollout: Rollout, frame_stack: int) -> dict[str, Stage]:
        """Returns the stages in their order."""
        algorithm = self._algorithm
        stages: dict[str, Stage] = {}
        if algorithm.replay is None:
            stages["postprocess"], (batch, _) = self._postprocess_once(rollout)
            minibatches = algorithm.num_minibatches
            order = _order(algorithm.num_epochs * minibatches)
            if minibatches > 1:
                stages["shuffle"], _ = self._shuffle(batch, rollout.reward.shape[1])
        else:
            minibatches = 1
            size = rollout.reward.size
            order = _order(off_policy.updates_per_iteration(algorithm.replay, size))
            stages["replay"], (_, windows) = self._replay(rollout, order, frame_stack)
            stages["postprocess"], batch = self._postprocess_each(windows, order)
        stages["gradient"], gradient = self._gradient(batch, order, minibatches)
        stages["optimizer"] = self._optimizer(gradient, order)
        return stages

    def _postprocess_once(self, rollout: Rollout) -> tuple[Stage, tuple[PyTree, PyTree]]:
        """Postprocesses a rollout, and observes it for running statistics."""
        algorithm = self._algorithm

        def postprocess(
            state: TrainState, rollout: Rollout, key: jax.Array
        ) -> tuple[PyTree, PyTree]:
            keys = rng.per_index(key, meshes.global_index(rollout.reward.shape[1]))
            batch = algorithm.postprocess(state.variables, rollout, state.context(keys))
            return batch, algorithm.updated_stats(state.variables, rollout, state.context())

        mapped = meshes.acting(postprocess, self._mesh, (ONE, ROLLOUT, ONE), (BATCH, ONE))
        return _stage(mapped, self._state, rollout, self._key)

    def _shuffle(self, batch: PyTree, rows: int) -> tuple[Stage, PyTree]:
        """Divides the examples of a rollout into the minibatches of every epoch."""
        minibatches = self._algorithm.num_minibatches
        num_envs = rows // self._mesh.size

        def shuffle(batch: PyTree, key: jax.Array, order: jax.Array) -> PyTree:
            size = len(jax.tree.leaves(batch)[0])

            def epoch(number: jax.Array) -> PyTree:
                rows = on_policy.shuffled(key, number, num_envs, size, minibatches)
                return _repeated(lambda rows: on_policy.take(batch, rows), rows)

            return _repeated(epoch, order)

        mapped = meshes.acting(shuffle, self._mesh, (BATCH, ONE, ONE), BATCH)
        return _stage(mapped, batch, self._key, _order(self._algorithm.num_epochs))

    def _replay(
        self, rollout: Rollout, order: np.ndarray, frame_stack: int
    ) -> tuple[Stage, tuple[ring.Memory, Rollout]]:
        """Stores a rollout, then draws and gathers the windows of every update;
        prioritised replay also sets their priorities.
        """
        replay = self._algorithm.replay
        window = self._algorithm.window
        assert replay is not None and window is not None, "replay needs windows of a fixed length"
        size = replay.batch_size // self._mesh.size

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
        ) -> tuple[ring.Memory, Rollout]:
            memory = store(memory, rollout)
            keys = rng.per_index(key, order)
            blank = _blank(lambda: draw(memory, keys[0])[1])

            def one(
                carry: tuple[ring.Memory, Rollout], key: jax.Array
            ) -> tuple[tuple[ring.Memory, Rollout], None]:
                return draw(carry[0], key), None

            return jax.lax.scan(one, (memory, blank), keys)[0]

        fill = jax.jit(meshes.acting(store, self._mesh, (BATCH, ROLLOUT), BATCH), donate_argnums=0)
        memory = self._memory
        # A draw needs whole windows in the memory.
        for _ in range(2 + window // self._rollout_length):
            memory = fill(memory, rollout)
        mapped = meshes.acting(
            store_and_draw, self._mesh, (BATCH, ROLLOUT, ONE, ONE), (BATCH, ROLLOUT)
        )
        return _stage(mapped, memory, rollout, self._key, order, carries=True)

    def _postprocess_each(self, windows: Rollout, order: np.ndarray) -> tuple[Stage, PyTree]:
        """Postprocesses the windows of every update."""
        algorithm = self._algorithm

        def postprocess(
            state: TrainState, windows: Rollout, key: jax.Array, order: jax.Array
        ) -> PyTree:
            keys = rng.per_index(key, meshes.global_index(windows.reward.shape[1]))
            pair = _twice(windows)

            def one(number: jax.Array) -> PyTree:
                chosen = jax.tree.map(lambda x: x[number % 2], pair)
                return algorithm.postprocess(state.variables, chosen, state.context(keys))

            return _repeated(one, order)

        mapped = meshes.acting(postprocess, self._mesh, (ONE, ROLLOUT, ONE, ONE), BATCH)
        return _stage(mapped, self._state, windows, self._key, order)

    def _gradient(self, batch: PyTree, order: np.ndarray, minibatches: int) -> tuple[Stage, PyTree]:
        """Differentiates the loss of every update's examples."""

        def differentiate(
            state: TrainState, batch: PyTree, key: jax.Array, order: jax.Array, chosen: jax.Array
        ) -> PyTree:
            if minibatches == 1:
                choices = _twice(batch)
            else:
                choices = jax.tree.map(lambda x: x.reshape(minibatches, -1, *x.shape[1:]), batch)
            examples = meshes.global_index(jax.tree.leaves(choices)[0].shape[1])

            def one(now: tuple[jax.Array, jax.Array]) -> PyTree:
                number, choice = now
                keys = rng.per_index(jax.random.fold_in(key, number), examples)
                minibatch = jax.tree.map(lambda x: x[choice], choices)
                return sgd.gradient(self._algorithm, state, minibatch, keys)[:2]

            return _repeated(one, (order, chosen))[0]

        mapped = meshes.learning(differentiate, self._mesh, (ONE, BATCH, ONE, ONE, ONE), ONE)
        chosen = order % max(minibatches, 2)
        return _stage(mapped, self._state, batch, self._key, order, chosen)

    def _optimizer(self, gradient: PyTree, order: np.ndarray) -> Stage:
        """Makes every update, from one gradient."""

        def update(state: TrainState, gradient: PyTree, order: jax.Array) -> tuple[TrainState]:
            def one(state: TrainState, number: jax.Array) -> tuple[TrainState, None]:
                del number
                return sgd.apply(self._algorithm, state, gradient), None

            return (jax.lax.scan(one, state, order)[0],)

        mapped = meshes.learning(update, self._mesh, (ONE, ONE, ONE), ONE)
        return _stage(mapped, self._state, gradient, order, carries=True)[0]


# --- Stages ---------------------------------------------------------------------------------------


def _order(updates: int) -> np.ndarray:
    return np.arange(updates, dtype=np.int32)


def _twice(tree: PyTree) -> PyTree:
    """Stacks two copies of arrays. A loop that chooses one at run time computes in each pass:
    the compiler cannot move the computation out of the loop.
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


def _stage(
    mapped: Callable[..., PyTree], *args: PyTree, carries: bool = False
) -> tuple[Stage, PyTree]:
    """Returns a mapped function as a stage, and its first output.

    Args:
      carries: the function returns a tuple, and takes its
        first output as its first argument in the next run.
    """
    if carries:
        args = (jax.tree.map(jnp.copy, args[0]), *args[1:])
    program = jax.jit(mapped, donate_argnums=0 if carries else ())
    traced = program.trace(*args)
    first = program(*args)
    state = first[0] if carries else args[0]

    def run() -> PyTree:
        nonlocal state
        out = program(state, *args[1:])
        if carries:
            state = out[0]
        return out

    return Stage(run, traced), first
