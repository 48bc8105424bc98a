"""What the plans with actors in threads do alike: taking samples in, and keeping count of them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.pool import ActorPool, Finish, ParamStore, Sample, Snapshot
from jaxrl_dist.actors.step import Stages
from jaxrl_dist.learners.sharded import compile_priority
from jaxrl_dist.plans import report as reports
from jaxrl_dist.plans.job import Job
from jaxrl_dist.types import PyTree, Report, Rollout, TrainState


def sender(job: Job, priority: Finish | None = None) -> Finish:
    """An actor's last work on a rollout: the transfer to the learner, which so overlaps with the updates there.

    What is sent is a list of the rollout and, with ``priority``, what that makes of it.
    """
    first = job.mesh.devices.flat[0]

    def send(snapshot: Snapshot, rollout: Rollout, number: np.int32) -> list[PyTree]:
        extra = [] if priority is None else [priority(snapshot, rollout, number)]
        return jax.device_put([rollout, *extra], first)

    return send


def prioritize(job: Job, on: Mesh) -> Finish:
    """What finds the initial priorities of the windows in a rollout, on the device that acted."""
    program = compile_priority(job.algorithm, on)
    key = meshes.place(rng.stream(job.session_seed, rng.Stream.PRIORITIZE), on, meshes.REPLICATED)
    return lambda snapshot, rollout, number: program(snapshot.state, rollout, key, number)


def joiner(mesh: Mesh) -> Callable[[Sequence[Sample | None]], list[PyTree]]:
    """Makes one rollout, divided over the mesh, of those of all actors; steps that did not come are not valid."""
    axes: list[Any] = [Rollout._make([1] * 7 + [0] * 2), 1]  # of the environments, in a rollout and in priorities
    shardings = [meshes.shardings(mesh, spec) for spec in (meshes.ROLLOUT, meshes.TIME_BATCH)]

    @jax.jit
    def concatenate(contents: Sequence[list[PyTree]], there: Sequence[bool]) -> list[PyTree]:
        def along(axis: int, *parts: PyTree) -> PyTree:
            blanked = [
                jax.tree.map(lambda x, here=here: jnp.where(here, x, jnp.zeros_like(x)), part)
                for part, here in zip(parts, there, strict=True)
            ]
            return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *blanked)

        return jax.tree.map(along, axes[: len(contents[0])], *contents)

    def join(samples: Sequence[Sample | None]) -> list[PyTree]:
        there = [sample is not None for sample in samples]
        some = next(sample for sample in samples if sample is not None)
        # One that did not come is put in another's likeness and blanked, in a program that serves either case.
        contents = [(sample or some).content for sample in samples]
        joined = concatenate(contents, there) if len(contents) > 1 else contents[0]
        return [jax.device_put(part, where) for part, where in zip(joined, shardings, strict=False)]

    return join


class Tally(reports.Interval):
    """Counts samples, and what has been learnt from them since the last report."""

    def __init__(self, job: Job, pool: ActorPool, store: ParamStore) -> None:
        super().__init__(job.resumed)
        self.env_steps = job.env_steps  # of all samples that were learnt from, or too old
        self.learning = False  # whether the last iteration made an update
        self._pool, self._store, self._max_lag = pool, store, job.pool.max_lag
        self._trained = self._dropped = 0
        self._lags: collections.Counter[int] = collections.Counter()  # of the samples learnt from

    def fresh(self, sample: Sample) -> bool:
        """Whether to learn from a sample: whether its policy is not too old. Else it is dropped."""
        fresh = self._max_lag is None or self._lag(sample) <= self._max_lag
        if not fresh:
            self._count(sample)
            self._dropped += 1
        return fresh

    def _count(self, sample: Sample) -> None:
        self.env_steps += sample.env_steps
        self.ended(sample.episodes)

    def _lag(self, sample: Sample) -> int:
        return self._store.version - sample.version

    def learn(self, samples: Sequence[Sample | None]) -> None:
        """Begins an iteration: the next version of the policy learns from these."""
        self.iterations += 1
        for sample in samples:
            if sample is not None:
                self._count(sample)
                self._trained += 1
                self._lags[self._lag(sample)] += 1

    def learned(self, metrics: Mapping[str, jax.Array], counts: bool = True) -> None:
        """Ends an iteration, as ``Interval.learned``."""
        self.learning = counts
        super().learned(metrics, counts)

    def drop(self, samples: int) -> None:
        """Says that so many were left behind."""
        self._dropped += samples

    def report(
        self, state: TrainState, clock: reports.Clock, stages: Stages, programs: Sequence[Any], *, due: bool
    ) -> Report:
        """What has happened since the last report.

        Args:
          due: as in ``report.report``.
          stages: of the learner's thread, whose "updating" has the compilation of ``programs`` in it.
        """
        pool, lags = self._pool, self._lags
        compiling = sum(program.compile_seconds for program in programs)
        seconds = dict(stages.seconds)
        seconds |= {"updating": seconds.get("updating", 0.0) - compiling, "compiling": compiling}
        acting = pool.seconds()
        idle = sum(acting.get(f"time/actor/{stage}_s", 0.0) for stage in ("parameters", "blocked"))
        sent, queued = pool.streams.count()
        metrics: dict[str, float | None] = {
            "async/lag": sum(lag * count for lag, count in lags.items()) / lags.total() if lags else None,
            "async/lag_max": float(max(lags)) if lags else None,
            **{f"async/lag/{lag}": float(count) for lag, count in sorted(lags.items())},
            "async/queue": float(queued),
            "async/sent": float(sent),
            "async/trained": float(self._trained),
            "async/dropped": float(self._dropped),
            "async/restarts": float(pool.restarts),
            "async/learner_idle": seconds.get("waiting", 0.0) / max(sum(seconds.values()), 1e-9),
            "async/actor_idle": idle / max(sum(acting.values()), 1e-9),
        }
        times = {f"time/learner/{stage}_s": value for stage, value in seconds.items()} | acting
        more = {**metrics, **times}
        report = reports.report(state, self.env_steps, clock, self.since(), due=due, more=more)
        self.restart()
        self._lags.clear()
        return report
