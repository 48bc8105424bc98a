"""Functions shared by acting on devices and on the host.

Algorithms and everything else that belongs to a policy are dicts keyed by policy;
see ``mesh.over_policies``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from jaxrl_dist import rng, spaces
from jaxrl_dist.envs.base import DeviceEnv, EnvSlice, HostEnv
from jaxrl_dist.envs.device.hosted import HostGymnax
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.memory import frames
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.nn import perturbation
from jaxrl_dist.nn.cores import reset_core
from jaxrl_dist.simulator import Simulator
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Algorithms,
    Array,
    Context,
    EnvSpec,
    EpisodeStats,
    PyTree,
    Rollout,
    Timestep,
    Variables,
)

Rollouts = Mapping[str, Rollout]
"""The experience of each policy."""


class ActorJob(NamedTuple):
    """The task that all actors of a pool share."""

    algorithm: Algorithms
    source: EnvSource
    num_envs: int
    rollout_length: int
    seed: int
    stop: Callable[[], bool]
    """Returns True when waiting for samples should end."""
    once: Callable[[Hashable, Callable[[], Any]], Any]
    """As ``ProgramCache.once``, over the runs of equal jobs."""


def rollout_context(act_key: jax.Array, iteration: jax.Array, env_step: jax.Array) -> Context:
    """The context of ``Algorithm.behaviour`` for the rollout ``iteration``."""
    return Context(jax.random.fold_in(act_key, rng.rollout_step(iteration)), env_step)


def behave(
    algorithm: Algorithm, variables: Variables, core: PyTree, context: Context
) -> tuple[PyTree, PyTree]:
    """Returns the parameters that ``act`` uses until the next rollout, and the core to start
    with.
    """
    if algorithm.behaviour is None:
        return ((), core)
    return algorithm.behaviour(variables, core, context)


def act(
    algorithm: Algorithm,
    variables: Variables,
    params: PyTree,
    obs: PyTree,
    core: PyTree,
    context: Context,
) -> Acted:
    """Chooses actions; ``params`` are the environments' parameters ``[B, ...]``,
    or () if all share one set.
    """
    if algorithm.behaviour is None:
        return algorithm.policy(variables, obs, core, context)

    def one(params: PyTree, *rows: PyTree) -> Acted:
        obs, core, key = jax.tree.map(lambda x: x[None], rows)
        acted = algorithm.policy(
            variables._replace(params=params), obs, core, context._replace(keys=key)
        )
        return jax.tree.map(lambda x: x[0], acted)

    return jax.vmap(one)(params, obs, core, context.keys)


def simulator(algorithm: Algorithms, env: DeviceEnv | None, env_state: PyTree) -> Simulator | None:
    """Returns the environments as a model to plan with; None: no policy searches, or there is
    none.
    """
    if (
        env is None
        or env.simulate is None
        or not any(policy.searches for policy in algorithm.values())
    ):
        return None
    return env.simulate(env_state)


def searched(algorithm: Algorithms, env: HostEnv) -> PyTree:
    """Returns the state that ``simulator`` needs of environments stepped from the host;
    () if nobody searches.
    """
    if isinstance(env, HostGymnax) and any(policy.searches for policy in algorithm.values()):
        return env.state
    return ()


def read_by(function: Callable[..., Any], *arguments: PyTree) -> list[bool]:
    """Returns for each leaf of the arguments whether the outputs of a function depend on it."""
    program = jax.make_jaxpr(function)(*arguments).jaxpr
    return list(partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[1])


def read_later(step: Callable[[PyTree], tuple[PyTree, PyTree]], core: PyTree) -> set[int]:
    """Returns the numbers of the core's arrays on which the outputs of ``step`` depend, in this
    step or in a later one.

    Args:
      step: ``core -> (outputs, core)``.
      core: shapes and dtypes.
    """
    needed = set[int]()
    while True:

        def outputs(core: PyTree, needed: frozenset[int] = frozenset(needed)) -> PyTree:
            output, after = step(core)
            return output, [leaf for at, leaf in enumerate(jax.tree.leaves(after)) if at in needed]

        used = {at for at, reads in enumerate(read_by(outputs, core)) if reads}
        if used <= needed:
            return needed
        needed |= used


def reads_of_core(
    algorithm: Algorithm, spec: EnvSpec, variables: Variables
) -> tuple[set[int], set[int]]:
    """Returns the numbers of the core's arrays on which drawn actions depend,
    and those that ``log_prob`` reads.

    Of ``variables``, only shapes and dtypes count.
    """
    obs, action = (
        jax.tree.map(jnp.asarray, spaces.zeros(space, 2))
        for space in (spec.observation, spec.action)
    )
    given = variables, obs, algorithm.initial_core(2)
    first = len(jax.tree.leaves(given[:2]))

    def read(function: Callable[..., Any] | None, *more: PyTree) -> set[int]:
        context = Context(jax.random.split(jax.random.key(0), 2), jnp.zeros(()))
        if function is None:
            used = []
        else:
            used = read_by(lambda *x: function(*x, *more, context), *given)[first:]
        return {at for at, reads in enumerate(used) if reads}

    return read(lambda *x: algorithm.policy(*x)[0]), read(algorithm.log_prob, action)


def num_parts(algorithm: Algorithm, variables: Variables, num_envs: int) -> int:
    """The number of parts in which environments with separate parameters act,
    so that parameters fit into memory.
    """
    if algorithm.behaviour is None:
        return 1
    return perturbation.num_parts(variables.params, num_envs)


def by_parts(function: Callable[[PyTree], PyTree], parts: int, tree: PyTree) -> PyTree:
    """Applies ``function`` to equal parts of arrays ``[B, ...]``, one after the other,
    and joins its outputs.
    """
    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), tree)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(function, split))


def initial_core(algorithm: Algorithms, spec: EnvSpec, share: EnvSlice) -> PyTree:
    """The core at the start of an episode for a share's rows of each policy."""

    def of_policy(algorithm: Algorithm, part: EnvSpec) -> PyTree:
        first, size, total = (rows // spec.num_agents * part.num_agents for rows in share)
        return jax.tree.map(
            lambda x: jnp.copy(x[first : first + size]), algorithm.initial_core(total)
        )

    return over_policies(of_policy)(algorithm, spec.by_policy)


def indices(algorithm: Algorithms, spec: EnvSpec, index: jax.Array) -> PyTree:
    """The global indices ``[B * k]`` of each policy's rows;
    ``index`` has those of all agents' rows.
    """

    def of_policy(algorithm: Algorithm, part: EnvSpec) -> jax.Array:
        if part.num_agents == spec.num_agents:
            return index
        first = index[:: spec.num_agents] // spec.num_agents * part.num_agents
        return (first[:, None] + jnp.arange(part.num_agents, dtype=index.dtype)[None]).reshape(-1)

    return over_policies(of_policy)(algorithm, spec.by_policy)


def num_rows(obs: Mapping[str, PyTree]) -> int:
    """The number of rows of all policies together."""
    return sum(len(jax.tree.leaves(part)[0]) for part in obs.values())


def blank_stacks(spec: EnvSpec, num_envs: int) -> dict[str, PyTree]:
    """The stacks of each policy before the first frame; see ``frames.blank``."""
    count = num_envs // spec.num_agents
    return {
        name: frames.blank(part, count * part.num_agents) for name, part in spec.by_policy.items()
    }


def row_slices(spec: EnvSpec, rows: int) -> dict[str, slice]:
    """Returns the slice of each policy's rows, in the order of the names."""
    sizes = {
        name: rows // spec.num_agents * spec.by_policy[name].num_agents
        for name in sorted(spec.by_policy)
    }
    starts = itertools.accumulate(sizes.values(), initial=0)
    return {
        name: slice(start, start + sizes[name]) for name, start in zip(sizes, starts, strict=False)
    }


def env_of(spec: EnvSpec, row: int, rows: int) -> int:
    """Returns the environment of a row, with rows in the order of ``row_slices``."""
    name, part = next(
        (name, part) for name, part in row_slices(spec, rows).items() if row < part.stop
    )
    return (row - part.start) // spec.by_policy[name].num_agents


def count_steps(spec: EnvSpec, valid: PyTree) -> Array:
    """Returns the number of env steps and of agent steps, ``[..., 2]``.

    An env step is one of an environment in which any of its agents, of whatever policy, takes part.

    Args:
      valid: which agents of each policy take part in a step, ``[..., B * k]`` bool.
    """
    rows = over_policies(lambda part, x: x.reshape(*x.shape[:-1], -1, part.num_agents))(
        spec.by_policy, valid
    )
    parts = jax.tree.leaves(rows)
    xp = parts[0].__array_namespace__()
    agents = xp.concatenate(parts, axis=-1)  # [..., B, agents]
    return xp.stack([agents.any(axis=-1).sum(axis=-1), agents.sum(axis=(-2, -1))], axis=-1)


NO_FAULT = np.uint32(2**32 - 1)


def find_fault(
    obs: Mapping[str, PyTree], reward: Mapping[str, jax.Array], before: int = 1
) -> jax.Array:
    """The first observation or reward that is not finite,
    as uint32 ``(t * B + b) * 2 + field``; ``NO_FAULT``: none.

    ``t`` counts observations, and ``field`` is 0 for an observation and 1 for a reward. ``B``
    counts the rows of all policies, one after the other in the order of names.

    Args:
      obs: ``[T, B, ...]``, keyed by policy; ``reward`` likewise.
      before: number of observations before that of the first reward's step.
    """
    names = sorted(obs)
    fault = jnp.asarray(NO_FAULT)
    sizes = [reward[name].shape[1] for name in names]
    for name, offset in zip(names, itertools.accumulate(sizes, initial=0), strict=False):
        parts = [
            (part, 0, 0)
            for part in jax.tree.leaves(obs[name])
            if jnp.issubdtype(part.dtype, jnp.floating)
        ]
        for x, start, field in [*parts, (reward[name], before, 1)]:
            wrong = ~jnp.isfinite(x).all(axis=tuple(range(2, x.ndim)))
            t, row = (jax.lax.broadcasted_iota(jnp.uint32, wrong.shape, axis) for axis in (0, 1))
            place = ((t + start) * sum(sizes) + row + offset) * 2 + field
            fault = jnp.minimum(fault, jnp.min(jnp.where(wrong, place, NO_FAULT)))
    return fault


def keys_of(algorithm: Algorithms, key: jax.Array) -> PyTree:
    """The key of a stream for each policy."""
    return {name: rng.of_policy(key, number) for number, name in enumerate(algorithm)}


def in_rows(spec: EnvSpec, step: PyTree, ended: PyTree) -> tuple[PyTree, Timestep, EpisodeStats]:
    """Returns the observations, then step and episodes with the rows of all policies,
    ordered as ``row_slices``.
    """
    obs, rest = over_policies(lambda step: (step.obs, step._replace(obs=())), 2)(step)
    names = sorted(spec.by_policy)

    def join(*parts: Array) -> Array:
        return parts[0].__array_namespace__().concatenate(parts)

    return obs, *(jax.tree.map(join, *(tree[name] for name in names)) for tree in (rest, ended))


def after_step(
    algorithm: Algorithm, core: PyTree, initial_core: PyTree, action: PyTree, step: Timestep
) -> PyTree:
    """The policy state for the next observation, reset where a new episode begins."""
    return reset_core(algorithm.feedback(core, action, step), initial_core, step.valid)


class Stages:
    """Divides a thread's time into stages, which sum to the whole."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        """Adds the time since the last mark to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def merge(self, stage: str) -> None:
        """Adds all time so far to one stage."""
        self.seconds = {stage: sum(self.seconds.values())}


def blank_rollout(
    algorithm: Algorithm, variables: Variables, obs: PyTree, core: PyTree, rollout_length: int
) -> Rollout:
    """A rollout of zeros, with the shapes and dtypes that acting on ``obs [B, ...]`` will fill."""
    num_envs = len(jax.tree.leaves(obs)[0])
    keys = jax.random.split(jax.random.key(0), num_envs)
    action, _, extras = jax.eval_shape(
        algorithm.policy, variables, obs, core, Context(keys, jnp.zeros(()))
    )
    flags = jnp.zeros((rollout_length, num_envs), bool)

    def blank(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((rollout_length, *x.shape), x.dtype)

    obs = jax.tree.map(lambda x: jnp.zeros((rollout_length + 1, *x.shape), x.dtype), obs)
    action, extras = jax.tree.map(blank, (action, extras))
    return Rollout(obs, action, flags.astype(jnp.float32), flags, flags, flags, extras, core, core)


def step_numbers(iteration: jax.Array, rollout_length: int) -> jax.Array:
    """The numbers ``[T]``, from the start of training, of one rollout's steps;
    they wrap after 2^32.
    """
    return iteration.astype(jnp.uint32) * jnp.uint32(rollout_length) + jnp.arange(
        rollout_length, dtype=jnp.uint32
    )
