"""The job that a plan executes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.actors.step import ActorJob
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners.policies import joined, state_of
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.memory.records import HostRecords, Windows
from jaxrl_dist.types import (
    Algorithms,
    Array,
    Checkpoint,
    PyTree,
    Report,
    Rollout,
    TrainState,
    Variables,
)

T = TypeVar("T")


class ProgramCache:
    """Traced and compiled functions by name,
    shared with later runs of the process that compute the same.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made = dict[Hashable, Any]()

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of ``make`` from the first call with this name.

        A run does not wait for a program that an earlier one has compiled:
        its ``compile_seconds`` begin at 0.
        """
        with self._lock:
            if name not in self._made:
                self._made[name] = make()
            made: T = self._made[name]
        for part in made if isinstance(made, tuple) else (made,):
            if isinstance(part, meshes.Program):
                part.compile_seconds = 0.0
        return made


MOST_WINDOWS = 256
MOST_BYTES = 2**27
"""Updates whose windows the host gathers at a time, at most, and their bytes."""
WINDOWS: Any = Windows._make([meshes.BATCH, meshes.REPLICATED])
"""Sharding of these windows."""


class Job(NamedTuple):
    """What to execute; a plan decides how."""

    config: Train
    """Resolved: no field is left out."""
    algorithm: Algorithms
    learner: Learner
    source: EnvSource
    mesh: Mesh
    hyper: Mapping[str, float] = {}
    """The hyperparameters in which members of a population differ."""
    vary: Callable[[Mapping[str, Array]], tuple[Algorithms, Learner]] | None = None
    """Returns both for other ``hyper``."""
    init_variables: dict[str, Variables] | None = None
    """None: the algorithm's own."""
    pool: PoolOptions = PoolOptions()
    """For plans whose actors run in threads."""
    resumed: Checkpoint | None = None
    """Where to resume from; None: a new run."""
    stop: Callable[[], bool] = lambda: False
    """Whether to end early, with a report of the progress so far."""
    excluded_seconds: Callable[[], float] = lambda: 0.0
    """Not spent on training, but on evaluations and the like."""
    # Called before the first update with a function that reports the newest state,
    # even after the plan has failed.
    publish_latest: Callable[[Callable[[], Report]], None] = lambda newest: None
    # Takes all experience, as ``(index of the first environment, rollouts [T, B, ...])``;
    # None: nothing does.
    record: Callable[[int, Iterable[Rollout]], None] | None = None
    cache: ProgramCache | None = None
    """None: nothing is shared."""
    data: HostRecords | None = None
    """The data set, whose rows ``put_data`` puts on the devices; None: there is none."""
    data_identity: str | None = None
    """As ``data.files.identity`` returns it; None: there is no data set."""

    def once(self, name: Hashable, make: Callable[[Job], T]) -> T:
        """Returns what ``make`` returns for this job, or for an equal one of an earlier run.

        Args:
          name: names the result, with everything it depends on except the fields that
            ``setup.make_job`` compares.
          make: gets the job without its checkpoint and callbacks,
            which would live as long as the result.
        """
        defaults = (
            "init_variables",
            "resumed",
            "stop",
            "excluded_seconds",
            "publish_latest",
            "record",
            "cache",
        )
        bare = self._replace(**{name: self._field_defaults[name] for name in defaults})
        if self.cache is None:
            return make(bare)
        return self.cache.once((name, tuple(self.hyper)), lambda: make(bare))

    def put_data(self) -> PyTree:
        """Returns the data set on the mesh, of which each process reads its devices' rows;
        () if there is none.
        """
        if self.data is None:
            return ()
        return self.data.rows(
            partial(arrays.from_rows, sharding=meshes.shardings(self.mesh, meshes.BATCH))
        )

    @property
    def data_shapes(self) -> PyTree:
        """The shapes and dtypes of ``put_data``."""
        if self.data is None or not self.streams:
            return () if self.data is None else self.data.shapes
        size = self.updates_ahead * self.batch_size, self.data.window + 1
        shape = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*size, *x.shape[1:]), x.dtype), self.data.record
        )
        return Windows(shape, jax.ShapeDtypeStruct((), jnp.int32))

    @property
    def data_spec(self) -> Any:
        """The sharding of ``data_shapes``."""
        return WINDOWS if self.streams else meshes.BATCH

    @property
    def streams(self) -> bool:
        """Whether the host gathers the windows of each update:
        the devices do not hold the data set.
        """
        return self.config.data_memory == "host"

    @property
    def updates_ahead(self) -> int:
        """Updates whose windows the host gathers at a time."""
        assert self.data is not None
        row = sum(x.nbytes // len(x) for x in jax.tree.leaves(self.data.record))
        return max(
            1, min(MOST_WINDOWS, MOST_BYTES // (row * (self.data.window + 1) * self.batch_size))
        )

    @property
    def batch_size(self) -> int:
        """Windows of an update of the only policy, which replays."""
        (algorithm,) = self.algorithm.values()
        assert algorithm.replay is not None
        return algorithm.replay.batch_size

    @property
    def num_envs(self) -> int:
        """Environments, over all devices and actors; each agent counts as one."""
        return self.config.num_envs * self.source.spec.num_agents

    @property
    def share(self) -> EnvSlice:
        """The environments of this process's devices; under ``on_device``,
        a program has those of all processes.
        """
        size = self.num_envs // peers.count()
        return EnvSlice(peers.index() * size, size, self.num_envs)

    @property
    def rollout_length(self) -> int:
        """Steps of each environment in an iteration."""
        return self.config.rollout_length

    @property
    def acts(self) -> bool:
        """Whether the plan acts in the environment, or learns from a data set alone."""
        return not self.config.offline

    @property
    def steps_per_iteration(self) -> int:
        """Steps of the clock in an iteration: env steps, if no environment resets, or one
        update.
        """
        if self.acts:
            return self.config.num_envs * self.config.rollout_length
        return 1

    def variant(self, hyper: Mapping[str, Array]) -> tuple[Algorithms, Learner]:
        """Returns algorithm and learner with these hyperparameters, which may be traced scalars."""
        if hyper and self.vary is not None:
            return self.vary(hyper)
        return (self.algorithm, self.learner)

    def initial_state(self) -> TrainState:
        """Returns the state before the first update, on the mesh; for a resumed run,
        the checkpoint's state.

        Environments on the host are restarted; ``on_device``, where they go on,
        uses ``initial.states``.
        """
        shardings = meshes.shardings(self.mesh, meshes.STATE)
        init = self.once(
            "initial state", lambda job: jax.jit(job.learner.init, out_shardings=shardings)
        )
        key = self.key(rng.Stream.INIT)
        if self.resumed is None:
            return self.with_init_variables(init(key), meshes.REPLICATED)
        state = TrainState._make(map(arrays.put, self.keyed(self.resumed.state), shardings))
        # the algorithm has none, or it was not saved and fills again
        if not jax.tree.leaves(state.memory):
            return state._replace(memory=init(key).memory)
        cut = meshes.Program(
            self.learner.cut, self.mesh, (meshes.BATCH,), meshes.BATCH, donate=(0,)
        )
        return state._replace(memory=cut(state.memory))

    def keyed(self, state: TrainState) -> TrainState:
        """Returns the state of a checkpoint with its fields keyed by policy, as a plan computes
        it.
        """
        if self.source.spec.policies:
            return state
        return joined({"": state})

    def bare(self, state: TrainState) -> TrainState:
        """The inverse of ``keyed``: what checkpoints hold, without the name of a single policy."""
        if self.source.spec.policies:
            return state
        return state_of(state, "")

    def with_init_variables(self, state: TrainState, spec: PartitionSpec) -> TrainState:
        """Returns the state with ``init_variables``, if there are any,
        in the state's shapes and shardings.
        """
        if self.init_variables is None:
            return state

        def filled(value: Any, initial: jax.Array) -> np.ndarray:
            """Copies to a numpy array: donation must not delete the caller's arrays."""
            return np.array(
                np.broadcast_to(value, initial.shape) if isinstance(value, np.ndarray) else initial
            )

        variables = jax.tree.map(filled, self.init_variables, arrays.whole(state.variables))
        target = {
            name: policy.initial_target(variables[name].params)
            for name, policy in self.algorithm.items()
        }
        variables, target = meshes.put((variables, jax.tree.map(np.array, target)), self.mesh, spec)
        return state._replace(variables=variables, target=target)

    @property
    def progress(self) -> Mapping[str, Any]:
        """The progress that the checkpoint holds; {}: a new run."""
        return {} if self.resumed is None else self.resumed.progress

    @property
    def steps(self) -> tuple[int, int]:
        """Env steps and agent steps before this session."""
        done = self.progress.get("env_steps", 0)
        return done, self.progress.get("agent_steps", done)  # an older version did not store them

    @property
    def updates(self) -> int:
        """Updates before this session, of all policies."""
        if self.resumed is None:
            return 0
        return sum(map(int, jax.tree.leaves(self.resumed.state.updates)))

    @property
    def score(self) -> float:
        """The score of ``Window`` before this session; -infinity if there was none."""
        return score_of(self.progress)

    @property
    def step(self) -> int:
        """What the clock said before this session: env steps or updates."""
        return step_of(self.config, self.progress)

    def ended_by(self, step: int, score: float) -> str | None:
        """As ``ended_by``, for this job's config."""
        return ended_by(self.config, step, score)

    @property
    def session_seed(self) -> int:
        """The seed of environments on the host and of actors in threads,
        which a resumed run restarts.
        """
        if self.resumed is None:
            return self.config.seed
        return rng.host_seed(self.config.seed, int(self.resumed.state.iteration))

    def key(self, stream: rng.Stream) -> jax.Array:
        """Returns the replicated key of a stream of this run."""
        return meshes.put(rng.stream(self.config.seed, stream), self.mesh, meshes.REPLICATED)

    def actor_job(self, algorithm: Algorithms) -> ActorJob:
        """Returns the job of an actor pool; ``algorithm`` is that of this job,
        or what records it, too.
        """
        # Threads do not vote on stopping: with several processes,
        # waits end with the rollouts under way.
        stop = self.stop if peers.world() is None else _never

        def once(name: Hashable, make: Callable[[], T]) -> T:
            return self.once((name, self.record is not None), lambda _: make())

        return ActorJob(
            algorithm,
            self.source,
            self.num_envs,
            self.rollout_length,
            self.session_seed,
            stop,
            once,
        )

    @property
    def iterations_per_report(self) -> int:
        """Rollouts between two reports."""
        return max(1, self.config.report_interval // self.steps_per_iteration)

    @property
    def reports_per_score(self) -> int:
        """Newest reports whose episodes give the score."""
        window = max(
            1,
            (self.config.return_window or self.config.report_interval) // self.steps_per_iteration,
        )
        return -(-window // self.iterations_per_report)


def _never() -> bool:
    return False


def step_of(config: Train, progress: Mapping[str, Any]) -> int:
    """Returns what the clock says in a checkpoint's progress; 0: a new run."""
    step: int = progress.get(config.clock, 0)
    return step


def ended_by(config: Train, step: int, score: float) -> str | None:
    """Returns the field of ``Train`` that has ended a run, its total or ``stop_at_return``;
    None: it goes on.

    Args:
      step: what the run's clock says.
      score: mean return of the episodes in its newest full ``Window``.
    """
    if step >= config.total:
        return f"total_{config.clock}"
    reached = config.stop_at_return is not None and score >= config.stop_at_return
    return "stop_at_return" if reached else None


def score_of(progress: Mapping[str, Any]) -> float:
    """Returns the score in a checkpoint's progress; -infinity if it has no score."""
    return float.fromhex(progress.get("score", "-inf"))
