"""What a run computes, apart from the run itself: members and later runs share it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners.policies import joined, state_of
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.memory.records import HostRecords
from jaxrl_dist.types import Algorithms, Array, PyTree, TrainState

T = TypeVar("T")
Vary = Callable[[Mapping[str, Array]], tuple[Algorithms, Learner]]
"""Returns algorithm and learner with other hyperparameters, which may be traced scalars."""


class ProgramCache:
    """Traced and compiled functions by name."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._results = dict[Hashable, Any]()

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of ``make`` from the first call with this name.

        A run does not wait for a program that an earlier one has compiled:
        its ``compile_seconds`` begin at 0.
        """
        with self._lock:
            if name not in self._results:
                self._results[name] = make()
            result: T = self._results[name]
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, meshes.Program):
                part.compile_seconds = 0.0
        return result


class Job(NamedTuple):
    """What is computed. It knows no seed, no checkpoint and no length of a run:
    these belong to a ``Session``.
    """

    config: Train
    """Resolved. Only fields on which programs depend have the run's values;
    ``training.setup`` resets the others to their defaults."""
    algorithm: Algorithms
    learner: Learner
    source: EnvSource
    mesh: Mesh
    hyper: tuple[str, ...] = ()
    """Names of the hyperparameters that are inputs of the programs, because members differ in
    them."""
    vary: Vary | None = None
    """None: the hyperparameters cannot change."""
    pool: PoolOptions = PoolOptions()
    """For plans whose actors run in threads."""
    cache: ProgramCache | None = None
    """Shared with later runs of the process that compute the same; None: nothing is shared."""
    data: HostRecords | None = None
    """The data set, whose rows ``put_data`` puts on the devices; None: there is none."""
    data_identity: str | None = None
    """As ``data.files.identity`` returns it; None: there is no data set."""

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """Returns what ``make`` returns for this job, or has returned in an earlier run of it.

        Args:
          name: names the result, with everything it depends on besides the job.
          make: must not put a session into its result, which may live longer.
        """
        if self.cache is None:
            return make()
        return self.cache.once((name, self.hyper), make)

    def variant(self, hyper: Mapping[str, Array]) -> tuple[Algorithms, Learner]:
        """Returns algorithm and learner with these hyperparameters, which may be traced scalars."""
        if hyper and self.vary is not None:
            return self.vary(hyper)
        return (self.algorithm, self.learner)

    def put_data(self) -> PyTree:
        """Returns the data set on the mesh, of which each process reads its devices' rows;
        () if there is none.
        """
        if self.data is None:
            return ()
        sharding = meshes.shardings(self.mesh, meshes.BATCH)
        return self.data.rows(partial(arrays.from_rows, sharding=sharding))

    @property
    def streams(self) -> bool:
        """Whether the data set stays on the host, which gathers the windows of each update."""
        return self.data is not None and self.config.data_memory == "host"

    @property
    def acts(self) -> bool:
        """Whether the plan acts in the environment, or learns from a data set alone."""
        return not self.config.offline

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
    def steps_per_iteration(self) -> int:
        """Steps of the clock in an iteration: env steps, if no environment resets, or one
        update.
        """
        if self.acts:
            return self.config.num_envs * self.config.rollout_length
        return 1

    def keyed(self, state: TrainState) -> TrainState:
        """Returns a checkpoint's state with its fields keyed by policy, as plans compute it."""
        if self.source.spec.policies:
            return state
        return joined({"": state})

    def bare(self, state: TrainState) -> TrainState:
        """The inverse of ``keyed``: what checkpoints hold, without the name of a single policy."""
        if self.source.spec.policies:
            return state
        return state_of(state, "")
