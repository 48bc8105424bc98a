"""The loop of the plans with actor threads: rollouts arrive, trainers take turns,
and actors get the new policy.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import flow
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.pool import ActorPool, Deliver, ParamStore, Sample, Snapshot
from jaxrl_dist.actors.remote import RemotePool
from jaxrl_dist.actors.step import ActorJob, Rollouts, Stages
from jaxrl_dist.actors.transport import Experience
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.plans import report as reports
from jaxrl_dist.plans.clock import Clock
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.recording import acting, recorders
from jaxrl_dist.plans.report import updates_of
from jaxrl_dist.plans.session import Session
from jaxrl_dist.plans.window import Window
from jaxrl_dist.types import Algorithms, Join, PyTree, Report, TrainState

JOINS = {
    "async/queue": Join.SUM,
    "async/sent": Join.SUM,
    "async/trained": Join.SUM,
    "async/dropped": Join.SUM,
    "async/restarts": Join.SUM,
    "async/lag/": Join.SUM,
    "async/lag_max": Join.MAX,
    "updates": Join.SUM,
    "time/learner/": Join.SECONDS,
}
"""How members' metrics of the data flow are joined, as ``Join`` says; ``updates`` are those of each
of several policies."""


class Turn(NamedTuple):
    """The result of a trainer's turn, with or without a round of new experience."""

    state: TrainState
    metrics: Mapping[str, Any]
    counts: Mapping[str, Any]
    """As for ``HostInterval.learned``."""
    more: bool = False
    """Whether the trainers can learn on without new experience."""
    last: bool = True
    """Whether all policies have had their turn."""


Rounds = Iterator[Any]
"""What ``Exchange.join`` makes of each round of samples; None where no new experience has
arrived."""
Training = Callable[[TrainState, Rounds], Iterator[Turn]]
"""``(state, rounds) -> turns``: one or several trainers, which learn from each round as it
comes."""


Digest = Callable[[ActorJob, Mesh], Deliver | None]
"""``(job, device) -> (snapshot, rollouts, number) -> digest``: makes what an actor computes from
its rollouts where it acts; None: nothing."""


Send = Callable[[Rollouts, PyTree], PyTree]
"""``(rollouts, digest) -> content``: places what an actor has made on the devices that learn."""


class Exchange(NamedTuple):
    """How experience gets from the actors to a trainer."""

    digest: Digest
    send: Sequence[Send]
    """For each actor."""
    join: Callable[[Sequence[Any]], Any]
    """Makes what a trainer learns from of the samples of a round; None:
    a sample that is late or too old."""
    size: int
    """Samples of a round: one of each actor, or fewer in order of arrival."""


def replays(algorithm: Algorithms) -> bool:
    """Returns whether any policy replays experience."""
    return any(policy.replay is not None for policy in algorithm.values())


def dataflow(
    session: Session, training: Training, programs: Sequence[meshes.Program], exchange: Exchange
) -> Iterator[Report]:
    """Runs ``session``: rollouts arrive and are joined in rounds, trainers take their turns,
    and actors get the new policy.

    Args:
      programs: those of ``training``, whose compilation counts apart.
    """
    job = session.job
    clock = Clock(session.progress, session.excluded_seconds)
    stages = Stages()
    options = job.pool
    state = session.initial_state()
    more = False
    store = ParamStore(options.meshes, keep=options.lag or 0)
    store.publish(arrays.as_local(state, job.mesh))
    with contextlib.closing(start_actors(session, store, exchange)) as pool:
        tally = Tally(
            session,
            pool,
            store,
            session.iterations_per_report * options.num_actors // exchange.size,
        )
        stages.mark("starting")
        pool.streams.wait()
        clock.ready(*programs)
        stages.mark("actors_starting")

        def now() -> Report:
            return tally.report(state, clock, stages, programs)

        def received() -> Rounds:
            done = session.ended_by(session.step, session.score)  # before this session
            local_rounds = iter(
                () if done else rounds(job, pool, tally, exchange.size, lambda: more)
            )
            while (
                samples := peers.run_everywhere(partial(next, local_rounds, ()), "the actors")
            ) != ():
                stages.mark("waiting")
                if samples is not None:
                    tally.learn(samples)
                yield None if samples is None else exchange.join(samples)

        session.publish_latest(now)
        for turn in training(state, received()):
            state, more = turn.state, turn.more
            jax.block_until_ready(state)
            stages.mark("updating")
            store.publish(arrays.as_local(state, job.mesh))
            tally.learned(turn.metrics, counts=turn.counts)
            stages.mark("publishing")
            if not turn.last:
                continue
            if tally.ends():
                break
            if tally.due:
                yield now()
                stages.mark("reporting")
        pool.close()
        stages.mark("closing")
        yield now()


def start_actors(session: Session, store: ParamStore, exchange: Exchange) -> ActorPool:
    """Starts the actors of a session: threads, or processes of a Ray cluster."""
    job = session.job
    acting_job = session.actor_job(acting(session))
    record = recorders(session, len(exchange.send))
    if session.launch is None:
        learning_job = session.actor_job(job.algorithm)
        digests = itertools.cycle([exchange.digest(learning_job, on) for on in job.pool.meshes])
        deliver = list(map(_acting_here, digests, record, exchange.send))
        return ActorPool(acting_job, job.pool, store, deliver)
    return RemotePool(
        acting_job,
        job.pool,
        store,
        list(map(_acting_elsewhere, record, exchange.send)),
        session.launch(session),
        continuous=session.record is not None or replays(job.algorithm),
    )


def _acting_here(
    digest: Deliver | None, record: Callable[[Rollouts], Rollouts], send: Send
) -> Deliver:
    """Returns what an actor's thread does with its rollouts."""

    def deliver(snapshot: Snapshot, rollouts: Rollouts, number: np.int32) -> PyTree:
        learnt = record(rollouts)
        if digest is None:
            return send(learnt, None)
        return send(learnt, digest(snapshot, learnt, number))

    return deliver


def _acting_elsewhere(record: Callable[[Rollouts], Rollouts], send: Send) -> Deliver:
    """Returns what an actor's thread does with what another process has made."""

    def deliver(snapshot: Snapshot, experience: Experience, number: np.int32) -> PyTree:
        del snapshot, number  # the digest has used them
        if experience.rollouts is None:
            return send({}, experience.digest)
        return send(record(experience.rollouts), experience.digest)

    return deliver


def rounds(
    job: Job, pool: ActorPool, tally: Tally, size: int, more: Callable[[], bool]
) -> Iterator[Sequence[Sample | None] | None]:
    """Yields the samples of each iteration: one from each actor,
    or ``size`` of them in order of arrival.

    Replayed experience must keep each environment's order, so it takes one from each actor. Yields
    None while no new samples have arrived and there is ``more`` to learn without them.
    """
    options = job.pool
    ordered = options.lag is not None or options.gather is not None or replays(job.algorithm)
    if size < options.num_actors or not ordered:
        yield from flow.batch(filter(tally.fresh, flow.gather_async(pool.streams)), size)
        return
    for samples in flow.gather_sync(pool.streams, options.gather, options.gather_deadline, more):
        if samples is None:
            yield None
        elif any(fresh := [tally.fresh(sample) for sample in samples]):
            yield fresh


class Tally(reports.HostInterval):
    """The ``HostInterval`` of plans with actor threads, which also counts samples and their
    lags.
    """

    def __init__(self, session: Session, pool: ActorPool, store: ParamStore, length: int) -> None:
        """``length`` is that of an interval, in iterations."""
        super().__init__(session)
        self._length = length
        self._window = Window(session)
        self._steps = np.array(session.steps)  # of samples learned from or dropped as too old
        self._pool = pool
        self._store = store
        self._max_lag = session.config.max_lag
        self._trained = 0
        self._restarts_before = session.progress.get("restarts", 0)
        self._lags: collections.Counter[int] = collections.Counter()  # of the samples learned from

    @property
    def env_steps(self) -> int:
        """Env steps of the run so far."""
        return int(self._steps[0])

    @property
    def due(self) -> bool:
        """Whether the interval is complete."""
        return self.iterations >= self._length

    def ends(self) -> bool:
        """Returns whether the run ends after this iteration."""
        if self.due:
            self._window.add(self.since().episodes)
        return (
            self._session.ended_by(self.env_steps, self._window.score) is not None
            or self._session.stop()
        )

    def fresh(self, sample: Sample | None) -> Sample | None:
        """Returns a sample whose policy is recent enough to learn from;
        otherwise counts its steps and episodes.
        """
        if sample is None or self._max_lag is None or self._lag(sample) <= self._max_lag:
            return sample
        self._count([sample])
        return None

    def _count(self, samples: Sequence[Sample]) -> None:
        """Counts the samples of each process's first actor, then of each one's next actor,
        and so on.
        """
        for sample in samples:
            for steps, episodes in reports.of_all(sample.steps, sample.episodes):
                self._steps += steps
                self.ended(episodes)

    def _lag(self, sample: Sample) -> int:
        return self._store.version - sample.version

    def learn(self, samples: Sequence[Sample | None]) -> None:
        """Begins an iteration that learns from these samples."""
        self.iterations += 1
        arrived = [sample for sample in samples if sample is not None]
        self._count(arrived)
        for sample in arrived:  # those of other processes, in lockstep, have the same lag
            self._trained += peers.count()
            self._lags[self._lag(sample)] += peers.count()

    def counts(self) -> dict[str, float]:
        """Returns what has become of this session's samples, of all processes."""
        sent, queued = map(
            sum, zip(*peers.all_gather(self._pool.streams.count(), "the samples"), strict=True)
        )
        # Nothing was learned from these: too old, of a round that was cut short,
        # or left when the pool was closed.
        dropped = sent - queued - self._trained
        numbers = {"queue": queued, "sent": sent, "trained": self._trained, "dropped": dropped}
        return {f"async/{name}": float(number) for name, number in numbers.items()}

    def report(
        self, state: TrainState, clock: Clock, stages: Stages, programs: Sequence[Any]
    ) -> Report:
        """Returns the report of the interval since the last report; all processes must call it.

        Args:
          stages: of the learner's thread; its "updating" includes the compilation of ``programs``.
        """
        pool, lags = self._pool, self._lags
        # Of the whole run, like its env steps and updates.
        restarts = self._restarts_before + sum(peers.all_gather(pool.restarts, "the restarts"))
        compiling = sum(program.compile_seconds for program in programs)
        seconds = dict(stages.seconds)
        seconds |= {"updating": seconds.get("updating", 0.0) - compiling, "compiling": compiling}
        acting = pool.seconds()
        made = updates_of(state)
        idle = sum(acting.get(f"time/actor/{stage}_s", 0.0) for stage in ("parameters", "blocked"))
        metrics: dict[str, float | None] = {
            "async/lag": sum(lag * count for lag, count in lags.items()) / lags.total()
            if lags
            else None,
            "async/lag_max": float(max(lags)) if lags else None,
            **{f"async/lag/{lag}": float(count) for lag, count in sorted(lags.items())},
            **self.counts(),
            "async/restarts": float(restarts),
            **{f"{name}/updates": float(count) for name, count in made.items() if name},
            "async/learner_idle": seconds.get("waiting", 0.0) / max(sum(seconds.values()), 1e-9),
            "async/actor_idle": idle / max(sum(acting.values()), 1e-9),
        }
        times = {f"time/learner/{stage}_s": value for stage, value in seconds.items()} | acting
        report = reports.report(
            self._session,
            state,
            self._steps,
            clock,
            self.since(),
            due=self.due,
            window=self._window,
            extra_metrics={**metrics, **times},
            extra_progress={"restarts": restarts},
        )
        self.restart()
        self._lags.clear()
        return report
