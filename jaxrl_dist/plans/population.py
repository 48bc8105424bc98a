"""Runs that advance together under ``on_device`` and ``synchronous``, or a single run."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist.envs.base import HostEnv
from jaxrl_dist.hosts import arrays
from jaxrl_dist.plans import initial
from jaxrl_dist.plans.clock import Clock
from jaxrl_dist.plans.evolve import Selection
from jaxrl_dist.plans.report import Counts, IntervalSums, copied, diverged, held, report
from jaxrl_dist.plans.session import Session
from jaxrl_dist.plans.window import Window
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Checkpoint, Report, TrainState


class ReportNumbers(NamedTuple):
    """The numbers of the reports, for each row of the program's arrays."""

    since: Sequence[IntervalSums]
    """The sums since the last report."""
    counts: Counts
    """[M]."""


class Population(abc.ABC):
    """Runs that differ only in seed and ``hyper``, called members, in the same programs.

    Every array of the programs has a leading axis of members, one row for each. A member learns the
    same as a single run, up to rounding. Results for members that are done are ignored. Each plan's
    subclass defines how members advance. Selections change the hyperparameters in ``sessions``.
    """

    _state: TrainState
    """The state of all members that the programs compute."""
    _actor: Any = ()
    """The environments' state, for checkpoints; () if they run on the host."""
    _env: HostEnv | None = None
    _axis = True
    """Whether all arrays have an axis of members."""

    def __init__(
        self,
        sessions: Sequence[Session],
        training: Collection[int] | None = None,
        selection: Selection | None = None,
        numbers: Sequence[int] | None = None,
        average_every: int | None = None,
    ) -> None:
        """Prepares the program.

        Args:
          sessions: the members' sessions, which have one job; resumed members that are not done are
            at the same iteration.
          training: the members whose reports will be taken; None: all.
          selection: when and how to select among the members that are not done; None: never.
          numbers: the members' numbers in the whole population, for reports; None:
            these are all members.
          average_every: iterations after which the members' networks become their mean;
            None: never.
        """
        members = range(len(sessions))
        self._member_numbers = members if numbers is None else numbers
        self.job = sessions[0].job
        self.sessions = list(sessions)
        self._selection = selection
        self._average_every = average_every
        self._rows = list(members)
        """The members of the program's rows."""
        self._parents = list(members)
        """The member whose parameters each member has since its last report."""
        reports_per_selection = None
        if selection is not None:
            reports_per_selection = selection.interval // sessions[0].iterations_per_report
        self._windows = [Window(session, reports_per_selection) for session in sessions]
        self.halved: set[int] = set()
        """The members that a selection has ended."""
        self._due: dict[int, Report] = {}
        """The reports that have not been taken."""
        self._held: dict[int, Checkpoint] = {}
        """The checkpoints of reports that wait while other members advance."""
        self._placed: dict[str, tuple[Any, jax.Array]] = {}
        """Small values, and their arrays on the mesh."""
        trained = members if training is None else training
        self._ended = [
            x for x in trained if sessions[x].ended_by(sessions[x].step, sessions[x].score)
        ]
        """The members that an earlier session has ended."""
        self._done = [x not in trained or x in self._ended for x in members]
        self._started = False
        self.error: BaseException | None = None
        """Ends all members that are not done: each raises it instead of advancing,
        and can still save its state."""

    def reports(self, member: int, session: Session) -> Generator[Report]:
        """Yields the reports of a member; ``session`` is its own, with the functions of its run.

        The members advance together: the caller takes the next report of every member before it
        takes a second one of any. The variables of members that are done stay valid.
        """
        hyper = self.sessions[member].hyper  # a selection may have changed it
        self.sessions[member] = session._replace(hyper=hyper)
        if not self._started:
            self._check()
            self._start()
        session.publish_latest(lambda: self._make_report(member, self._numbers()))
        try:
            while not self._done[member] or member in self._due:
                while member not in self._due:
                    self._check()
                    self._advance()
                yield self._due.pop(member)
        finally:
            self._done[member] = True  # also if the caller stops early
            self._held.pop(member, None)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def _start(self) -> None:
        sessions = self.sessions
        self._clocks = [
            Clock(session.progress, partial(self._excluded_seconds, member))
            for member, session in enumerate(sessions)
        ]
        self._put_inputs()
        self._steps = np.array([session.steps for session in sessions])
        self._updates = [session.updates for session in sessions]
        since = [
            IntervalSums.of(sessions[member].progress, self.job.algorithm)
            for member in self._running()
        ]
        self._iterations = max((int(sums.iterations) for sums in since), default=0)
        self._begin()
        if self._ended:  # their last reports have not been taken
            self._make_reports(self._ended, self._numbers())
        self._started = True

    def _ready(self, *programs: meshes.Program) -> None:
        for clock in self._clocks:
            clock.ready(*programs)

    def _put_inputs(self) -> None:
        """Puts the keys and hyperparameters of the program's members on the mesh."""
        sessions = [self.sessions[member] for member in self._rows]
        self._keys = tuple(
            initial.member_keys(sessions, stream)
            for stream in (Stream.ACT, Stream.ENV, Stream.LEARN)
        )
        self._hyper = meshes.put(
            initial.stacked_hyper(sessions, np.float32), self.job.mesh, initial.MEMBERS
        )

    def _excluded_seconds(self, member: int) -> float:
        return self.sessions[member].excluded_seconds()

    def _running(self) -> list[int]:
        return [member for member, done in enumerate(self._done) if not done]

    def _part(self, tree: Any, row: int) -> Any:
        if self._axis:
            return jax.tree.map(lambda x: x[row], tree)
        return tree

    def _running_mask(self) -> jax.Array:
        """Returns which rows' members are not done, ``[M]`` bool on the mesh."""
        running = [not self._done[member] for member in self._rows]
        return self._put_small("running", running, initial.MEMBERS)

    def _put_small(self, name: str, value: Any, spec: PartitionSpec) -> jax.Array:
        """Returns a small value on the mesh, placed only when it has changed: placing takes as long
        as a dispatch.
        """
        if name not in self._placed or self._placed[name][0] != value:
            self._placed[name] = value, meshes.put(np.asarray(value), self.job.mesh, spec)
        return self._placed[name][1]

    def _advance(self) -> None:
        """Runs some iterations, and makes the reports that are due after them."""
        running = self._running()
        assert not any(member in self._due for member in running), "a report has not been taken"
        self._hold_checkpoints()
        if self._iterations == 0 and self.halved.intersection(self._rows):
            self._shrink()  # not before the reports have been taken
        count = self._iterate(running)
        self._iterations += count
        for member in running:
            self._updates[member] += count  # read only if the plan does not act
        self._report(running)

    def _hold_checkpoints(self) -> None:
        """Copies the checkpoints of waiting reports, until these have been taken and saved."""
        for member, due in self._due.items():
            # without a directory nothing saves a replay memory
            if self.sessions[member].config.run_dir and member not in self._held:
                self._held[member] = due.checkpoint()
                self._due[member] = dataclasses.replace(
                    due, checkpoint=partial(held, self._held, member)
                )

    def _count(self, steps: np.ndarray) -> None:
        """Adds the env steps and agent steps of each row, ``[M, 2]``, to its member's."""
        for row, member in enumerate(self._rows):
            if not self._done[member]:
                self._steps[member] += steps[row]

    def _step(self, member: int) -> int:
        """Returns what the member's clock says: env steps, or updates if the plan does not act."""
        if self.job.acts:
            return int(self._steps[member, 0])
        return self._updates[member]

    def _report(self, running: Sequence[int]) -> None:
        """Makes the reports of members that are done, and of all members after an interval."""
        interval_over = self._iterations >= self.sessions[0].iterations_per_report
        numbers = None
        if interval_over:
            numbers = self._numbers()
            for member in running:
                row = self._rows.index(member)
                self._windows[member].add(numbers.since[row].episodes)
        ended = [
            x for x in running if self.sessions[x].ended_by(self._step(x), self._windows[x].score)
        ]
        stopped = self._stopped(running)
        due = running if interval_over else sorted({*ended, *stopped})
        if not due:
            return
        self._end(ended)
        numbers = numbers or self._numbers()
        if interval_over:
            # Also among members that stop, because they resume after the selection.
            numbers = numbers._replace(counts=self._select(numbers.counts))
        self._end(stopped)
        self._make_reports(due, numbers)
        self._parents = list(range(len(self.sessions)))
        if interval_over:
            self._restart()
            self._iterations = 0

    def _make_reports(self, members: Iterable[int], numbers: ReportNumbers) -> None:
        """The variables of members that are done stay valid while others advance."""
        for member in members:
            keep = self._done[member] and not all(self._done)
            self._due[member] = self._make_report(member, numbers, keep=keep)

    def _end(self, members: Iterable[int]) -> None:
        for member in members:
            self._done[member] = True

    def _stopped(self, running: Sequence[int]) -> list[int]:
        """Returns the members that end early: all for a signal, or some for their own errors.

        If a signal comes while the members are asked, all end after the next iteration, so that
        they resume from the same one.
        """
        sessions = self.sessions
        stopped = [member for member in running if sessions[member].stop()]
        others = [member for member in running if member not in stopped]
        if stopped and others and sessions[others[0]].stop():
            return []
        return stopped

    def _select(self, counts: Counts) -> Counts:
        """Selects among the running members, if it is time: after an interval, before its reports.

        Returns the counts after the selection. A member that has diverged takes no part: its report
        ends it, and no member copies it.
        """
        selection = self._selection
        members = [
            member
            for member in self._running()
            if not diverged(self._part(counts.skipped, self._rows.index(member)))
        ]
        if selection is None or len(members) < 2:
            return counts
        iteration = int(self._part(counts.iteration, self._rows.index(members[0])))
        if not selection.due(iteration - self._iterations, iteration):
            return counts
        before = [self.sessions[member] for member in members]
        scores = np.array([self._windows[member].score for member in members])
        source, chosen = selection.evolve(
            selection.rng(iteration), scores, initial.stacked_hyper(before)
        )
        if len(source) < len(members):
            self.halved.update(np.delete(members, source).tolist())
            self._end(self.halved)
            return counts
        for place, (member, parent) in enumerate(zip(members, source, strict=True)):
            self._parents[member] = members[parent]
            values = {name: float(column[place]) for name, column in chosen.items()}
            config = self.sessions[member].config
            hyper = selection.checked(config, values, before[parent].hyper)
            self.sessions[member] = self.sessions[member]._replace(hyper=hyper)
        return self._copy_parents(counts)

    def _copy_parents(self, counts: Counts) -> Counts:
        """Copies the state and the counts of each member's parent; each keeps its own memory."""
        index = np.array([self._rows.index(self._parents[member]) for member in self._rows])
        memory = self._state.memory
        self._state = meshes.rows(self._state._replace(memory=()), index)._replace(memory=memory)
        self._put_inputs()
        return jax.tree.map(lambda x: x[index], counts)

    def _shrink(self) -> None:
        """Removes the members that are done from the programs, which are compiled again.

        All stay if none would be left, or if the others do not divide over the devices.
        """
        index = np.array([row for row, member in enumerate(self._rows) if not self._done[member]])
        if not len(index) or len(index) % self.job.mesh.shape[meshes.AGENT]:
            return
        self._rows = [self._rows[row] for row in index]
        before = self._state, self._actor
        self._state, self._actor = meshes.rows(before, index)
        for array in jax.tree.leaves(before):
            array.delete()  # reports also hold it
        self._put_inputs()
        self._keep(index)

    def _numbers(self) -> ReportNumbers:
        """Fetches the numbers of the reports."""
        return ReportNumbers(self._sums(), arrays.fetch(Counts.of(self._state)))

    def _make_report(self, member: int, numbers: ReportNumbers, *, keep: bool = False) -> Report:
        """Returns a member's report.

        Args:
          keep: copy its variables, which the advance of others would overwrite.
        """
        session = self.sessions[member]
        row = self._rows.index(member)
        since = numbers.since[row]
        counts = self._part(numbers.counts, row)
        state = self._state._replace(**counts._asdict())
        own_row = row if self._axis else None
        if keep:
            state = state._replace(variables=copied(state.variables, "variables", row=own_row))
        selected: Mapping[str, Any] = {}
        if session.hyper or self._selection:
            selected = {"hyper": dict(session.hyper), "halved": member in self.halved}
        return report(
            session,
            state,
            self._steps[member],
            self._clocks[member],
            since,
            due=since.iterations >= session.iterations_per_report,
            window=self._windows[member],
            actor=self._actor,
            row=own_row,
            extra_metrics={**self._times(), **self._selection_metrics(member)},
            extra_progress=selected,
        )

    def _selection_metrics(self, member: int) -> Mapping[str, float]:
        """Returns whose parameters the member has, and its new hyperparameters."""
        if self._selection is None:
            return {}
        hyper = {f"hyper/{name}": value for name, value in self.sessions[member].hyper.items()}
        parent = self._member_numbers[self._parents[member]]
        return {"population/parent": float(parent), **hyper}

    # --- Defined by each plan ---------------------------------------------------------------------

    @abc.abstractmethod
    def _begin(self) -> None:
        """Makes the state, the environments and the programs, and calls ``_ready`` with them."""

    @abc.abstractmethod
    def _iterate(self, running: Sequence[int]) -> int:
        """Runs some iterations, calls ``_count``, and returns the number of iterations; no member
        ends before the last of them.
        """

    @abc.abstractmethod
    def _sums(self) -> Sequence[IntervalSums]:
        """Returns the sums of each row since the last report, on the host."""

    @abc.abstractmethod
    def _restart(self) -> None:
        """Begins the next interval."""

    @abc.abstractmethod
    def _keep(self, index: np.ndarray) -> None:
        """Keeps only these rows of the plan's own arrays, and compiles the programs again."""

    def _times(self) -> Mapping[str, float]:
        """Returns the seconds of the plan's stages."""
        return {}

    def close(self) -> None:
        """Ends environments on the host."""
        if self._env is not None:
            self._env.close()
