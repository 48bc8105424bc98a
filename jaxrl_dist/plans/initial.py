"""The states of a population before its first iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors import device
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.hosts import arrays
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.session import Session
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Array, PyTree, TrainState

MEMBERS = meshes.of_members(meshes.REPLICATED)
BATCH = meshes.of_members(meshes.BATCH)
STATE = meshes.of_members(meshes.STATE)


def start(job: Job) -> Callable[..., device.ActorState]:
    """Returns ``(key, hyper) -> actor``, which starts the
    environments with the key of their random stream.
    """
    share = EnvSlice.all(job.num_envs)
    env = job.source.device()
    return lambda key, hyper: device.init(job.variant(hyper)[0], env, share, key)


def member_keys(sessions: Sequence[Session], stream: Stream) -> jax.Array:
    """Returns the members' keys of a stream, ``[M]``."""
    keys = jnp.stack([rng.stream(session.config.seed, stream) for session in sessions])
    return meshes.put(keys, sessions[0].job.mesh, MEMBERS)


def stacked_hyper(sessions: Sequence[Session], dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """Returns the members' hyperparameters, each ``[M]``."""
    return {
        name: np.array([session.hyper[name] for session in sessions], dtype)
        for name in sessions[0].hyper
    }


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function over the members without batching it,
    so results equal single runs bit for bit.
    """

    def mapped(*args: Any) -> Any:
        if len(jax.tree.leaves(args)[0]) > 1:
            return jax.lax.map(lambda args: function(*args), args)
        return meshes.over_members(function)(*args)

    return mapped


def actors(sessions: Sequence[Session], hyper: Mapping[str, Array]) -> PyTree:
    """Returns the states of the members' environments, on the mesh; () if the plan does not act."""
    job = sessions[0].job
    if not job.acts:
        return ()
    resumed = [session.resumed for session in sessions if session.resumed is not None]
    if resumed:
        actor = stack([checkpoint.actor for checkpoint in resumed])
    else:
        begin = job.once("initial actor", lambda: jax.jit(_one_by_one(start(job))))
        actor = begin(member_keys(sessions, Stream.ENV), hyper)
    return meshes.put(actor, job.mesh, BATCH)


def states(
    sessions: Sequence[Session],
    hyper: Mapping[str, Array],
    *,
    equal: bool = False,
    restarted: bool = False,
) -> TrainState:
    """Returns the states before the first update, on the mesh; for resumed members,
    the states in their checkpoints.

    Args:
      equal: the members begin with the networks of the first one.
      restarted: resumed members begin new episodes.
    """
    first = sessions[0]
    job = first.job
    keys = member_keys([first] * len(sessions) if equal else sessions, Stream.INIT)
    shardings = meshes.shardings(job.mesh, STATE)
    resumed = [session.resumed for session in sessions if session.resumed is not None]
    if not resumed:

        def make() -> Callable[..., TrainState]:
            return jax.jit(
                _one_by_one(lambda key, hyper: job.variant(hyper)[1].init(key)),
                out_shardings=shardings,
            )

        return first.with_init_variables(job.once("initial states", make)(keys, hyper), MEMBERS)
    stacked = stack([job.keyed(checkpoint.state) for checkpoint in resumed])
    state = TrainState._make(map(arrays.put, stacked, shardings))
    if jax.tree.leaves(state.memory):
        if not restarted:
            return state
        cut = meshes.Program(
            meshes.over_members(job.learner.cut), job.mesh, (BATCH,), BATCH, donate=(0,)
        )
        return state._replace(memory=cut(state.memory))

    # not saved, or the algorithm has none
    def refill(key: jax.Array, hyper: Mapping[str, Array]) -> PyTree:
        learner = job.variant(hyper)[1]
        memory = learner.init(key).memory
        if restarted:
            return memory
        return learner.start_mid_episode(memory)

    return state._replace(
        memory=jax.jit(_one_by_one(refill), out_shardings=shardings.memory)(keys, hyper)
    )


def with_recorded_stats(
    job: Job, state: TrainState, hyper: Mapping[str, Array], data: PyTree
) -> TrainState:
    """Returns the states of new runs with the running statistics
    of a whole data set on the mesh, if there are any.
    """
    if all(policy.update_stats is None for policy in job.algorithm.values()):
        return state

    def observe(state: TrainState, hyper: Any, data: PyTree) -> TrainState:
        return meshes.over_members(lambda state, hyper: job.variant(hyper)[1].observe(state, data))(
            state, hyper
        )

    specs = (STATE, MEMBERS, meshes.BATCH)
    return meshes.Program(observe, job.mesh, specs, STATE, donate=(0,))(state, hyper, data)


def stack(trees: Sequence[Any]) -> Any:
    """Stacks trees of numpy arrays along a new leading axis; one tree is not copied."""
    if len(trees) == 1:
        return jax.tree.map(lambda x: np.asarray(x)[None], trees[0])
    return jax.tree.map(lambda *x: np.stack(x), *trees)
