"""A training session: a run, or a member of one, from its start or resume to its end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.step import ActorJob
from jaxrl_dist.actors.transport import Launch
from jaxrl_dist.config.train import Train
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.plans.job import Job
from jaxrl_dist.types import Algorithms, Checkpoint, Report, Rollout, TrainState, Variables

T = TypeVar("T")


class Session(NamedTuple):
    """What a plan executes: a job, and where and how long this run trains it."""

    config: Train
    """Resolved: no field is left out."""
    job: Job
    hyper: Mapping[str, float] = {}
    """The values of ``job.hyper``."""
    init_variables: dict[str, Variables] | None = None
    """None: the algorithm's own."""
    resumed: Checkpoint | None = None
    """Where to resume from; None: a new run."""
    stop: Callable[[], bool] = lambda: False
    """Whether to end early, with a report of the progress so far."""
    excluded_seconds: Callable[[], float] = lambda: 0.0
    """Returns the seconds that evaluations, films and the like took from training."""
    publish_latest: Callable[[Callable[[], Report]], None] = lambda newest: None
    """Called before the first update with a function that reports the newest state,
    even after the plan has failed."""
    launch: Callable[[Session], Launch] | None = None
    """Returns what actors in other processes need to act as threads of the session would; None:
    actors are threads."""
    record: Callable[[int, Iterable[Rollout]], None] | None = None
    """Takes all experience, as ``(index of the first environment, rollouts [T, B, ...])``;
    None: nothing does."""

    # --- Where it starts --------------------------------------------------------------------------

    @property
    def progress(self) -> Mapping[str, Any]:
        """The progress that the checkpoint holds; {}: a new run."""
        return {} if self.resumed is None else self.resumed.progress

    @property
    def steps(self) -> tuple[int, int]:
        """Env steps and agent steps before this session."""
        if self.resumed is None:
            return 0, 0
        return self.progress["env_steps"], self.progress["agent_steps"]

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

    def initial_state(self) -> TrainState:
        """Returns the state before the first update, on the mesh; for a resumed run,
        the checkpoint's state.

        Environments on the host are restarted; ``on_device``, where they continue,
        uses ``initial.states``.
        """
        job = self.job
        shardings = meshes.shardings(job.mesh, meshes.STATE)
        init = job.once("initial state", lambda: jax.jit(job.learner.init, out_shardings=shardings))
        key = self.key(rng.Stream.INIT)
        if self.resumed is None:
            return self.with_init_variables(init(key), meshes.REPLICATED)
        state = TrainState._make(map(arrays.put, job.keyed(self.resumed.state), shardings))
        # the algorithm has none, or it was not saved and fills again
        if not jax.tree.leaves(state.memory):
            return state._replace(memory=init(key).memory)
        cut = meshes.Program(job.learner.cut, job.mesh, (meshes.BATCH,), meshes.BATCH, donate=(0,))
        return state._replace(memory=cut(state.memory))

    def with_init_variables(self, state: TrainState, spec: PartitionSpec) -> TrainState:
        """Returns the state with ``init_variables``, if there are any,
        in the state's shapes and shardings.
        """
        if self.init_variables is None:
            return state

        def filled(value: Any, initial: jax.Array) -> np.ndarray:
            """Copies to a numpy array: donation must not delete the caller's arrays."""
            if not isinstance(value, np.ndarray):
                return np.array(initial)
            return np.array(np.broadcast_to(value, initial.shape))

        variables = jax.tree.map(filled, self.init_variables, arrays.whole(state.variables))
        target = {
            name: policy.initial_target(variables[name].params)
            for name, policy in self.job.algorithm.items()
        }
        variables, target = meshes.put(
            (variables, jax.tree.map(np.array, target)), self.job.mesh, spec
        )
        return state._replace(variables=variables, target=target)

    # --- Its random numbers -----------------------------------------------------------------------

    @property
    def host_seed(self) -> int:
        """The seed of environments on the host and of actors in threads,
        which a resumed run restarts.
        """
        if self.resumed is None:
            return self.config.seed
        return rng.host_seed(self.config.seed, int(self.resumed.state.iteration))

    def key(self, stream: rng.Stream) -> jax.Array:
        """Returns the replicated key of a stream of this run."""
        return meshes.put(rng.stream(self.config.seed, stream), self.job.mesh, meshes.REPLICATED)

    def actor_job(self, algorithm: Algorithms) -> ActorJob:
        """Returns the job of an actor pool.

        Args:
          algorithm: the job's, or one whose rollouts also hold what is recorded.
        """
        job = self.job
        # Threads do not vote on stopping: with several processes,
        # waits end with the rollouts under way.
        stop = self.stop if peers.world() is None else _never
        records = self.record is not None

        def once(name: Hashable, make: Callable[[], T]) -> T:
            return job.once((name, records), make)

        return ActorJob(
            algorithm, job.source, job.num_envs, job.rollout_length, self.host_seed, stop, once
        )

    # --- Its reports and its end ------------------------------------------------------------------

    @property
    def iterations_per_report(self) -> int:
        """Rollouts between two reports."""
        return max(1, self.config.report_interval // self.job.steps_per_iteration)

    @property
    def reports_per_score(self) -> int:
        """Newest reports whose episodes give the score."""
        steps = self.config.return_window or self.config.report_interval
        window = max(1, steps // self.job.steps_per_iteration)
        return -(-window // self.iterations_per_report)

    def ended_by(self, step: int, score: float) -> str | None:
        """As ``ended_by``, for this session's config."""
        return ended_by(self.config, step, score)


def _never() -> bool:
    return False


def step_of(config: Train, progress: Mapping[str, Any]) -> int:
    """Returns what the clock says in a checkpoint's progress; 0: a new run."""
    step: int = progress.get(config.clock, 0)
    return step


def ended_by(config: Train, step: int, score: float) -> str | None:
    """Returns the field of ``Train`` that has ended a run, its total or ``stop_at_return``;
    None: it continues.

    Args:
      step: what the run's clock says.
      score: mean return of the episodes in its newest full ``Window``.
    """
    if step >= config.total:
        return f"total_{config.clock}"
    if config.stop_at_return is not None and score >= config.stop_at_return:
        return "stop_at_return"
    return None


def score_of(progress: Mapping[str, Any]) -> float:
    """Returns the score in a checkpoint's progress; -infinity if it has no score."""
    return float.fromhex(progress.get("score", "-inf"))
