"""Acting inside a compiled program: a scan over environments that are pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import mesh, packing, rng
from jaxrl_dist.actors import step as steps
from jaxrl_dist.actors.step import ActorJob, Rollouts, Stages, initial_core
from jaxrl_dist.envs.base import DeviceEnv, EnvSlice
from jaxrl_dist.envs.checking import not_finite
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.types import (
    Algorithm,
    Algorithms,
    Array,
    Context,
    EnvSpec,
    EpisodeStats,
    PyTree,
    Rollout,
    Variables,
)


class ActorState(NamedTuple):
    """The state of acting between rollouts; each leaf is ``[B, ...]``, sharded over the devices."""

    env: PyTree
    obs: PyTree
    core: PyTree
    initial_core: PyTree
    """The value of ``core`` at the start of an episode."""


def init(algorithm: Algorithms, env: DeviceEnv, share: EnvSlice, key: jax.Array) -> ActorState:
    """Starts the environments of a share; ``key`` is the key of the environment stream."""
    index = share.first + jnp.arange(share.size, dtype=jnp.int32)
    state, obs = env.reset(rng.per_index(jax.random.fold_in(key, rng.RESET), index))
    core = initial_core(algorithm, env.spec, share)
    return ActorState(state, env.spec.keyed(obs), core, jax.tree.map(jnp.copy, core))


def make_rollout(
    algorithm: Algorithms, env: DeviceEnv, rollout_length: int, *, packed: bool = False
) -> Callable[..., tuple[ActorState, Rollouts, PyTree]]:
    """Builds ``(variables, actor_state, act_key, env_key, iteration, env_step, first = 0) ->
    (actor_state, rollout, episodes)``; ``first`` is the global index of the first environment.
    Everything that belongs to a policy is in a dict keyed by policy.

    It runs under ``mesh.acting``; the statistics are sums over this device's environments.
    ``packed`` is as in ``packing.scan``.
    """
    return _Acting(algorithm, env, rollout_length, packed).rollout


class _Inputs(NamedTuple):
    """What all environments of a rollout share."""

    variables: PyTree
    act_key: jax.Array
    env_key: jax.Array
    iteration: jax.Array
    env_step: PyTree
    numbers: jax.Array
    """[T], the steps' numbers from the start of training."""


@dataclasses.dataclass(frozen=True)
class _Acting:
    """Acts in environments that are pure functions."""

    algorithm: Algorithms
    env: DeviceEnv
    rollout_length: int
    packed: bool

    def rollout(
        self,
        variables: PyTree,
        actor: ActorState,
        act_key: jax.Array,
        env_key: jax.Array,
        iteration: jax.Array,
        env_step: PyTree,
        first: jax.Array | int = 0,
    ) -> tuple[ActorState, Rollouts, PyTree]:
        """The function of ``make_rollout``."""
        num_envs = steps.num_rows(actor.obs)
        numbers = steps.step_numbers(iteration, self.rollout_length)
        inputs = _Inputs(variables, act_key, env_key, iteration, env_step, numbers)

        def env_major(envs: tuple[ActorState, jax.Array]) -> tuple[ActorState, Rollouts, PyTree]:
            actor, experience, episodes = self._act(inputs, *envs)
            episodes = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), episodes)
            return actor, over_policies(Rollout.env_major)(experience), episodes

        index = first + mesh.global_index(num_envs)
        counts = over_policies(partial(steps.num_parts, num_envs=num_envs))(
            self.algorithm, variables
        )
        parts = max(counts.values()) if len(counts) == 1 else 1
        if parts == 1:
            actor, experience, episodes = self._act(inputs, actor, index)
        else:
            actor, experience, episodes = steps.by_parts(env_major, parts, (actor, index))
            experience = over_policies(Rollout.env_major)(experience)
        return actor, experience, over_policies(EpisodeStats.merge)(episodes)

    def _act(
        self, inputs: _Inputs, actor: ActorState, index: jax.Array
    ) -> tuple[ActorState, Rollouts, PyTree]:
        """Returns the state after a rollout of some environments, the rollout, and the statistics
        of each step, ``[T, B]``.

        Args:
          index: the environments' global indices, ``[B]``.
        """
        algorithm = self.algorithm
        env_step = inputs.env_step
        env_keys = rng.per_step(inputs.env_key, inputs.numbers, index)
        if any(policy.episodic for policy in algorithm.values()):
            actor = self._restart(inputs, actor, index)
        act_keys, params, started = self._begin(inputs, actor.core, index)

        def step(
            carry: PyTree, keys: tuple[PyTree, jax.Array]
        ) -> tuple[PyTree, tuple[PyTree, ...]]:
            env_state, obs, core = carry
            simulator = steps.simulator(algorithm, self.env, env_state)
            context = over_policies(partial(Context, simulator=simulator))(keys[0], env_step)
            action, core, extras = over_policies(steps.act, 3)(
                algorithm, inputs.variables, params, obs, core, context
            )
            env_state, *stepped = self.env.step(env_state, self.env.spec.bare(action), keys[1])
            timestep, episodes = map(self.env.spec.keyed, stepped)
            core = over_policies(steps.after_step)(
                algorithm, core, actor.initial_core, action, timestep
            )
            next_obs, timestep = over_policies(lambda step: (step.obs, step._replace(obs=())), 2)(
                timestep
            )
            return (env_state, next_obs, core), (obs, action, extras, timestep, episodes)

        with jax.named_scope("env_step"):
            (env_state, obs, core), (*outputs, episodes) = packing.scan(
                step, (actor.env, actor.obs, started), (act_keys, env_keys), packed=self.packed
            )
        experience = over_policies(_experience)(algorithm, obs, *outputs, started, core)
        return ActorState(env_state, obs, core, actor.initial_core), experience, episodes

    def _restart(self, inputs: _Inputs, actor: ActorState, index: jax.Array) -> ActorState:
        """Begins new episodes with the key of the rollout."""
        step = rng.rollout_step(inputs.iteration)
        env_state, obs = self.env.reset(rng.per_step(inputs.env_key, step[None], index)[0])
        return ActorState(
            env_state, self.env.spec.keyed(obs), actor.initial_core, actor.initial_core
        )

    def _begin(
        self, inputs: _Inputs, core: PyTree, index: jax.Array
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Returns each policy's keys ``[T, B]``, the parameters of ``step.act``, and the cores."""

        def of_policy(
            algorithm: Algorithm,
            key: jax.Array,
            index: jax.Array,
            variables: Variables,
            core: PyTree,
            env_step: jax.Array,
        ) -> tuple[PyTree, PyTree, PyTree]:
            context = steps.rollout_context(key, inputs.iteration, env_step)
            params, core = steps.behave(algorithm, variables, core, context)
            return rng.per_step(key, inputs.numbers, index), params, core

        keys = steps.keys_of(self.algorithm, inputs.act_key)
        rows = steps.indices(self.algorithm, self.env.spec, index)
        return over_policies(of_policy, 3)(
            self.algorithm, keys, rows, inputs.variables, core, inputs.env_step
        )


def _experience(
    algorithm: Algorithm, last: PyTree, observations: PyTree, *others: PyTree
) -> Rollout:
    """Joins the outputs of the scan over steps, ``[T, B, ...]``, and the last observations."""
    action, extras, step, core, final_core = others
    obs = jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), observations, last)
    return Rollout(
        obs,
        action,
        step.reward,
        step.terminated,
        step.truncated,
        step.valid,
        extras,
        core,
        final_core,
    )


def steps_of(spec: EnvSpec, experience: Rollouts) -> jax.Array:
    """Returns the env steps and the agent steps of a rollout, int32 ``[2]``."""
    valid = over_policies(lambda rollout: rollout.valid)(experience)
    return steps.count_steps(spec, valid).sum(axis=0)


class Fault(NamedTuple):
    """The first NaN or infinity from an environment of each device, ``[devices]``."""

    iteration: Array
    """Int32."""
    where: Array
    """Uint32, in that iteration's rollout, as ``find_fault`` counts; NO_FAULT: nowhere."""


def fault_of(experience: Rollouts) -> jax.Array:
    """Returns the first value of a rollout that is not finite, as ``find_fault``."""
    obs, reward = over_policies(lambda rollout: (rollout.obs, rollout.reward), 2)(experience)
    return steps.find_fault(obs, reward)


def check_fault(
    spec: EnvSpec, fault: Fault, num_envs: int, rollout_length: int, first: int = 0
) -> None:
    """Raises for the first fault that the programs found; steps count from iteration 0, whose reset
    is step 0.

    Args:
      num_envs: environments on all these devices.
      first: index of their first environment within the run.

    Raises:
      EnvError: an observation or a reward was not finite; names the environment, the step and the
        field.
    """
    size = num_envs // len(fault.where)
    faults = []
    for device, (iteration, where) in enumerate(zip(fault.iteration, fault.where, strict=True)):
        if where != steps.NO_FAULT:
            place = np.unravel_index(int(where), (rollout_length + 1, size, 2))
            t, row, field = map(int, place)
            step = max(int(iteration) * rollout_length + t - 1, 0)
            env = (first + device * size) // spec.num_agents + steps.env_of(spec, row, size)
            faults.append((step, env, field))
    if faults:
        step, env, field = min(faults)
        raise not_finite(spec, env, step, ("observation", "reward")[field])


def compile_rollout(
    algorithm: Algorithms,
    env: DeviceEnv,
    on: Mesh,
    rollout_length: int,
    act_key: jax.Array,
    env_key: jax.Array,
) -> mesh.Program:
    """``(variables, actor_state, iteration, env_step, first) -> (actor_state, rollout, episodes,
    steps, fault)``.

    The last three have an entry for each device, ``[devices]``; ``steps`` are from ``count_steps``,
    and ``fault`` is from ``find_fault``.
    """
    rollout = make_rollout(
        algorithm, env, rollout_length, packed=packing.starts_kernel_per_array(on.devices.flat[0])
    )

    def run(
        variables: Variables,
        actor: ActorState,
        iteration: jax.Array,
        env_step: jax.Array,
        first: jax.Array,
    ) -> tuple[ActorState, Rollouts, PyTree, jax.Array, jax.Array]:
        actor, experience, episodes = rollout(
            variables, actor, act_key, env_key, iteration, env_step, first
        )
        experience = over_policies(sent)(experience)
        counts = episodes, steps_of(env.spec, experience), fault_of(experience)
        return actor, experience, *jax.tree.map(lambda x: x[None], counts)

    def sent(experience: Rollout) -> Rollout:
        # Copied, because the next call overwrites the state, and the sample may live longer.
        core, final_core = jax.tree.map(jnp.copy, (experience.core, experience.final_core))
        return experience._replace(core=core, final_core=final_core)

    one, batch = mesh.REPLICATED, mesh.BATCH
    out_specs = (batch, mesh.rollout_specs(algorithm), batch, batch, batch)
    return mesh.Program(
        run, on, (one, batch, one, one, one), out_specs, donate=(1,), mapped=mesh.acting
    )


class DeviceActor:
    """Fills rollouts from environments that are pure functions, with one call per rollout."""

    def __init__(
        self, job: ActorJob, on: Mesh, program: mesh.Program, share: EnvSlice, stages: Stages
    ) -> None:
        """``program`` is ``compile_rollout``'s for the same job and mesh."""
        env = job.source.device()
        key = rng.stream(job.seed, rng.Stream.ENV)
        self._program = program
        self._spec = env.spec
        self._share = share
        self._length = job.rollout_length
        self._stages = stages
        self._state = mesh.put(
            jax.jit(lambda key: init(job.algorithm, env, share, key))(key), on, mesh.BATCH
        )
        self._stages.mark("start")

    def rollout(
        self, variables: Variables, iteration: Array, env_step: jax.Array
    ) -> tuple[Rollouts, PyTree, np.ndarray]:
        """As ``HostActor.rollout``.

        Raises:
          EnvError: an environment gave NaN or infinity.
        """
        self._stages.mark("other")
        size = self._share.size
        first = self._share.first
        self._state, rollout, *counts = self._program(
            variables, self._state, iteration, env_step, np.int32(first)
        )
        episodes, counted, where = jax.device_get(counts)
        fault = Fault(np.full_like(where, iteration), where)
        check_fault(self._spec, fault, size, self._length, first)
        self._stages.mark("acting")
        return rollout, over_policies(EpisodeStats.merge)(episodes), counted.sum(axis=0)

    def close(self) -> None:
        """Does nothing: the environments are arrays."""
