"""Environment, acting and learning in one compiled program over the whole mesh.

This is Anakin of the Podracer architectures (Hessel et al. 2021, https://arxiv.org/abs/2104.06272):
nothing goes through the host while the program runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors import device
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.plans import compiled, initial, iteration, recording
from jaxrl_dist.plans.population import Population, ReportNumbers
from jaxrl_dist.plans.report import IntervalSums
from jaxrl_dist.plans.session import Session
from jaxrl_dist.plans.streaming import Feed, updates_ahead
from jaxrl_dist.types import PyTree, Report

DISPATCH_SECONDS = 1.0
"""Approximate duration of one dispatch, so that the run stops soon after a request.
Results do not depend on it."""


def on_device(session: Session) -> Iterator[Report]:
    """Runs ``session`` on environments that are pure functions, many iterations per dispatch:
    a population of one.
    """
    return DevicePopulation([session]).reports(0, session)


class DevicePopulation(Population):
    """A population on environments that are pure functions, in one program."""

    _per_dispatch = 1
    _read: compiled.Numbers | None = None
    """The members' numbers after the newest dispatch, on the host; None:
    they may have changed since."""

    def _begin(self) -> None:
        job = self.job
        sessions = self.sessions
        first = sessions[0]
        self._state = initial.states(sessions, self._hyper, equal=self._average_every is not None)
        self._actor = initial.actors(sessions, self._hyper)
        self._feed: Feed | None = None
        if job.streams:
            self._feed = Feed(first, first.progress.get("iteration", 0))
            self._data = self._feed.windows
        else:
            self._data = job.put_data()
        if not (job.acts or job.streams) and first.resumed is None:
            self._state = initial.with_recorded_stats(job, self._state, self._hyper, self._data)
        act, learn = self._iteration()
        inputs = self._state, self._actor, self._keys, self._hyper
        blank = job.once(
            ("sums", len(sessions)), lambda: compiled.blank_sums(job, act, learn, *inputs)
        )
        self._blank = self._put_sums(initial.stack([blank] * len(sessions)))
        self._since: IntervalSums = initial.stack(
            [
                compiled.reset_interval(IntervalSums.of(session.progress, job.algorithm), blank)
                for session in sessions
            ]
        )
        self._compile(act, learn)

    def _iteration(self) -> tuple[iteration.Act, iteration.Learn]:
        job = self.job
        members = len(self._rows)
        recorded = self.sessions[0].record is not None
        name = "iteration", members, recorded
        return job.once(name, lambda: iteration.make_iteration(job, members, recorded=recorded))

    def _compile(self, act: iteration.Act, learn: iteration.Learn) -> None:
        every = self._average_every
        job = self.job
        keeps = 0
        if self.sessions[0].record is not None:
            inputs = self._state, self._actor, self._keys, self._hyper
            experience = jax.eval_shape(
                lambda *inputs: act(*compiled.squeeze_member(inputs))[1], *inputs
            )
            keeps = recording.kept_iterations(self.sessions[0], experience)
        name = ("program", len(self._rows), every, keeps)
        self._keeps = keeps
        self.program = job.once(name, lambda: compiled.make_program(job, act, learn, every, keeps))
        """The compiled program; see ``compiled.make_program``."""
        self._layout = compiled.layout(job, self._state, self._blank)
        self._ready(self.program)

    def _put_sums(self, sums: IntervalSums) -> IntervalSums:
        """Puts sums on the mesh once: the program does not donate them."""
        placed: IntervalSums = arrays.put(sums, meshes.shardings(self.job.mesh, iteration.SUMS))
        return placed

    def inputs(self, count: int) -> tuple[PyTree, ...]:
        """Returns the arguments with which ``program`` runs ``count`` iterations;
        it donates the first two.
        """
        limit = self._put_small("count", np.int32(count), meshes.REPLICATED)
        return (
            self._state,
            self._actor,
            self._since,
            self._keys,
            self._hyper,
            self._running_mask(),
            limit,
            self._data,
        )

    def _iterate(self, running: Sequence[int]) -> int:
        job = self.job
        session = self.sessions[0]
        program = self.program
        # No member reaches its end before the last of these iterations.
        left = min(self.sessions[member].config.total - self._step(member) for member in running)
        left = -(-left // job.steps_per_iteration)
        count = min(
            self._per_dispatch, max(1, session.iterations_per_report - self._iterations), left
        )
        if self._feed is not None:
            count = min(count, updates_ahead(job))
            self._data = self._feed.windows
            self._feed.ahead(count)
        if self._keeps:
            count = min(count, self._keeps)
        began = time.perf_counter() - program.compile_seconds
        self._read = None
        self._state, self._actor, self._since, packed, kept = program(*self.inputs(count))
        if self._feed is not None:
            self._feed.gather()
        self._read = numbers = self._layout.unpack(arrays.fetch(packed), leading=1)
        self._count(numbers.steps)
        if session.record is not None:
            session.record(
                0, recording.fetched(kept, int(numbers.since.iterations[0]) - self._iterations)
            )
        for row in (row for row, member in enumerate(self._rows) if not self._done[member]):
            # The program stops before the faulty iteration,
            # so that a resumed run meets the fault again.
            first = device.Fault(numbers.fault.iteration[row], numbers.fault.where[row])
            device.check_fault(job.source.spec, first, job.num_envs, job.rollout_length)
        seconds = time.perf_counter() - program.compile_seconds - began
        fitting = max(1, min(2 * self._per_dispatch, int(DISPATCH_SECONDS * count / seconds)))
        self._per_dispatch = peers.minimum(fitting, "iterations of a dispatch")
        return count

    def _numbers(self) -> ReportNumbers:
        """As in each plan, without another transfer if
        nothing has changed since the newest dispatch.
        """
        read = self._read
        self._read = None
        if read is None:
            return super()._numbers()
        return ReportNumbers(self._sums(read.since), read.counts)

    def _sums(self, since: IntervalSums | None = None) -> Sequence[IntervalSums]:
        since = arrays.fetch(self._since) if since is None else since
        return [self._part(since, row) for row in range(len(self._rows))]

    def _restart(self) -> None:
        self._since = self._blank

    def _keep(self, index: np.ndarray) -> None:
        self._since = self._blank = self._put_sums(
            jax.tree.map(lambda x: x[index], arrays.fetch(self._blank))
        )
        self._compile(*self._iteration())
