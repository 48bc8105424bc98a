"""What every plan is given, and how it reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.pool import ActorJob, PoolOptions
from jaxrl_dist.config import DivergedError
from jaxrl_dist.envs import EnvSource
from jaxrl_dist.learners.sgd import MAX_SKIPPED
from jaxrl_dist.types import Algorithm, EpisodeStats, Learner, Report, TrainState, Variables


class Job(NamedTuple):
    """What to execute; a plan decides how."""

    algorithm: Algorithm
    learner: Learner
    source: EnvSource
    mesh: Mesh
    num_envs: int
    rollout_length: int
    total_env_steps: int
    report_interval: int  # in env steps
    seed: int
    init_variables: Variables | None  # None: the algorithm's own
    pool: PoolOptions = PoolOptions()  # for plans whose actors run in threads

    def initial_state(self) -> TrainState:
        """The state before the first update, on the mesh."""
        shardings = meshes.shardings(self.mesh, meshes.STATE)
        state = jax.jit(self.learner.init, out_shardings=shardings)(rng.stream(self.seed, rng.Stream.INIT))
        if self.init_variables is not None:
            # As numpy arrays: donation must not take away what the caller still holds.
            variables = jax.tree.map(np.array, self.init_variables)
            target = jax.tree.map(np.array, self.algorithm.initial_target(variables.params))
            placed = meshes.place((variables, target), self.mesh, meshes.REPLICATED)
            state = state._replace(variables=placed[0], target=placed[1])
        return state

    def key(self, stream: rng.Stream) -> jax.Array:
        """The replicated key of a stream of this run."""
        return meshes.place(rng.stream(self.seed, stream), self.mesh, meshes.REPLICATED)

    def actor_job(self) -> ActorJob:
        """What an actor pool is given."""
        return ActorJob(self.algorithm, self.source, self.num_envs, self.rollout_length, self.seed)

    @property
    def iterations_per_report(self) -> int:
        """Rollouts between two reports."""
        return max(1, self.report_interval // (self.num_envs * self.rollout_length))


class Plan(Protocol):
    """A way to execute an algorithm: it yields a report each interval until the steps are done."""

    def __call__(self, job: Job) -> Iterator[Report]: ...


class Clock:
    """Wall time since a plan began, and how much of it went into setting up and compiling."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._programs: tuple[meshes.Program, ...] = ()
        self._setup_seconds = 0.0
        self._last_seconds = 0.0
        self._last_steps = 0
        self._last_updates = 0

    def ready(self, *programs: meshes.Program) -> None:
        """Says that all is set up but for these programs, which compile when they are first called."""
        self._programs = programs
        self._setup_seconds = self.wall_time()

    def wall_time(self) -> float:
        """Seconds since the plan began."""
        return time.perf_counter() - self._began

    def rates(self, env_steps: int, updates: int) -> dict[str, float | None]:
        """Times and rates of one report; rates are those of the stretch since the last call, compilation excluded."""
        compile_seconds = self._setup_seconds + sum(program.compile_seconds for program in self._programs)
        seconds = self.wall_time() - compile_seconds
        steps, made = env_steps - self._last_steps, updates - self._last_updates
        rate = steps / max(seconds - self._last_seconds, 1e-9)
        self._last_seconds, self._last_steps, self._last_updates = seconds, env_steps, updates
        return {
            "time/env_steps_per_second": rate,
            "time/compile_s": compile_seconds,
            "replay/ratio": made / steps if steps else None,
        }


def episode_metrics(episodes: EpisodeStats) -> dict[str, float | None]:
    """Means over the episodes that ended, or None where none did."""
    count, total, length, least, most = (float(x) for x in episodes)
    if count == 0:
        return {"episode/count": 0.0} | dict.fromkeys(
            ("episode/return", "episode/length", "episode/return_min", "episode/return_max"), None
        )
    return {
        "episode/count": count,
        "episode/return": total / count,
        "episode/length": length / count,
        "episode/return_min": least,
        "episode/return_max": most,
    }


def report(
    state: TrainState,
    env_steps: int,
    clock: Clock,
    learning: Mapping[str, float | None],
    episodes: EpisodeStats,
    stage_seconds: Mapping[str, float] = {},
) -> Report:
    """Brings one interval's numbers to the host; ``stage_seconds`` says where the time since the start went.

    Raises:
      DivergedError: too many gradients in a row were not finite.
    """
    if int(state.skipped) >= MAX_SKIPPED:
        raise DivergedError(
            f"training has diverged by environment step {env_steps:,}: {MAX_SKIPPED} gradients in a row were not "
            "finite; a smaller --learning-rate may help, or smaller rewards and observations"
        )
    episodes, updates = jax.device_get(episodes), int(state.updates)
    rates = clock.rates(env_steps, updates)
    if not state.memory:
        del rates["replay/ratio"]  # of algorithms that replay nothing
    return Report(
        env_steps=env_steps,
        updates=updates,
        iteration=int(state.iteration),
        wall_time_s=clock.wall_time(),
        metrics={**episode_metrics(episodes), **learning, **rates, **stage_seconds},
        variables=copier(state),
    )


def mean(sums: Mapping[str, jax.Array | float], count: int | jax.Array) -> dict[str, float | None]:
    """The mean of each metric over ``count`` iterations in which something was learnt; None if there were none."""
    sums, count = jax.device_get((dict(sums), count))
    return {name: float(value / count) if count else None for name, value in sums.items()}


def copier(state: TrainState) -> Callable[[], Variables]:
    """A function that copies the variables to the host, as long as training has not gone on."""

    def copy() -> Variables:
        if any(x.is_deleted() for x in jax.tree.leaves(state.variables)):
            raise RuntimeError("this report is past: ask for report.variables() before taking the next one")
        return jax.tree.map(np.array, state.variables)

    return copy
