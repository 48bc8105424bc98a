"""Runs that advance together, as ``on_device`` and ``synchronous`` train them;
a single run is a population of one.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_dist import mesh as meshes
from jaxrl_dist.envs.base import HostEnv
from jaxrl_dist.hosts import arrays
from jaxrl_dist.plans import initial
from jaxrl_dist.plans.clock import Clock
from jaxrl_dist.plans.evolve import Selection
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import Counts, IntervalSums, copied, diverged, held, report
from jaxrl_dist.plans.window import Window
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Checkpoint, Report, TrainState

ReportNumbers = tuple[Sequence[IntervalSums], Counts]
"""What the members' reports need: the sums of each row since the last report, and the rows'
counts."""


class Population(abc.ABC):
    """Runs that differ only in seed and ``hyper``, called members, in the same programs.

    Every array of the programs has a leading axis of members. A member learns the same as a single
    run, up to rounding. Once it is done, further results for it are ignored. Each plan's subclass
    defines how members advance. The members' ``jobs`` have the hyperparameters that selections have
    given them.
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
        jobs: Sequence[Job],
        training: Collection[int] | None = None,
        selection: Selection | None = None,
        numbers: Sequence[int] | None = None,
        average_every: int | None = None,
    ) -> None:
        """Prepares the program.

        Args:
          jobs: the members' jobs; resumed members that are not done are at the same iteration.
          training: the members whose reports will be taken; None: all.
          selection: when and how to select among the members that are not done; None: never.
          numbers: the members' numbers in the whole population, for reports; None:
            these are all members.
          average_every: iterations after which the members' networks become their mean;
            None: never.
        """
        self._names = range(len(jobs)) if numbers is None else numbers
        self.jobs = list(jobs)
        self._selection = selection
        self._average_every = average_every
        self._rows = list(range(len(jobs)))  # the members of the program's arrays
        # whose parameters each member has since its last report
        self._parents = list(range(len(jobs)))
        if selection is None:
            most = None
        else:
            most = selection.interval // jobs[0].iterations_per_report
        self._windows = [Window(job, most) for job in jobs]
        self.halved: set[int] = set()
        """The members that a selection has ended."""
        self._due: dict[int, Report] = {}
        # of members that are done, and whose reports wait while others advance
        self._held: dict[int, Checkpoint] = {}
        self._small: dict[str, tuple[Any, jax.Array]] = {}
        trained = range(len(jobs)) if training is None else training
        self._ended = [at for at in trained if jobs[at].ended_by(jobs[at].step, jobs[at].score)]
        self._done = [at not in trained or at in self._ended for at in range(len(jobs))]
        self._started = False
        self.error: BaseException | None = None
        """Ends all members that are not done: each raises it instead of advancing,
        and can still save its state."""

    def reports(self, member: int, job: Job) -> Iterator[Report]:
        """Yields the reports of a member; ``job`` is its job, with the functions of its run.

        The members advance together: the caller takes the next report of every member before it
        takes a second one of any. The variables of members that are done stay valid.
        """
        # which a selection may have changed
        self.jobs[member] = job._replace(hyper=self.jobs[member].hyper)
        if not self._started:
            self._check()
            self._start()
        job.publish_latest(lambda: self._now(member, self._numbers()))
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
        jobs = self.jobs
        self._clocks = [
            Clock(job.progress, partial(self._excluded_seconds, at)) for at, job in enumerate(jobs)
        ]
        self._put_inputs()
        self._steps = np.array([job.steps for job in jobs])
        self._updates = [job.updates for job in jobs]
        since = [
            IntervalSums.of(jobs[member].progress, jobs[member].algorithm)
            for member in self._running()
        ]
        self._iterations = max((int(x.iterations) for x in since), default=0)
        self._begin()
        if self._ended:  # before this session, but their reports have not been taken
            self._offer(self._ended, self._numbers())
        self._started = True

    def _ready(self, *programs: meshes.Program) -> None:
        for clock in self._clocks:
            clock.ready(*programs)

    def _put_inputs(self) -> None:
        """Puts the keys and hyperparameters of the program's members on the mesh."""
        jobs = [self.jobs[member] for member in self._rows]
        self._keys = tuple(
            initial.member_keys(jobs, stream) for stream in (Stream.ACT, Stream.ENV, Stream.LEARN)
        )
        self._hyper = meshes.put(
            initial.stacked_hyper(jobs, np.float32), jobs[0].mesh, initial.MEMBERS
        )

    def _excluded_seconds(self, member: int) -> float:
        return self.jobs[member].excluded_seconds()

    def _running(self) -> list[int]:
        return [member for member, done in enumerate(self._done) if not done]

    def _part(self, tree: Any, row: int) -> Any:
        if self._axis:
            return jax.tree.map(lambda x: x[row], tree)
        return tree

    def _running_mask(self) -> jax.Array:
        """Returns which members of the programs are not done, ``[M]`` bool on the mesh."""
        return self._placed(
            "running", [not self._done[member] for member in self._rows], initial.MEMBERS
        )

    def _placed(self, name: str, value: Any, spec: PartitionSpec) -> jax.Array:
        """Returns a small value on the mesh, placed only when it has changed:
        placing takes as long as a dispatch.
        """
        if name not in self._small or self._small[name][0] != value:
            self._small[name] = value, meshes.put(np.asarray(value), self.jobs[0].mesh, spec)
        return self._small[name][1]

    def _advance(self) -> None:
        """Runs some iterations, and makes the reports that are due after them."""
        running = self._running()
        assert not any(member in self._due for member in running), "a report has not been taken"
        self._hold()
        if self._iterations == 0 and self.halved.intersection(self._rows):
            self._shrink()  # not before the reports have been taken
        count = self._iterate(running)
        self._iterations += count
        for member in running:  # of the plans that do not act, where an iteration is an update
            self._updates[member] += count
        self._report(running)

    def _hold(self) -> None:
        """Copies what the checkpoints of waiting reports need,
        until these have been taken and saved.
        """
        for member, due in self._due.items():
            # else nothing saves a replay memory
            if self.jobs[member].config.run_dir and member not in self._held:
                self._held[member] = due.checkpoint()
                self._due[member] = dataclasses.replace(
                    due, checkpoint=partial(held, self._held, member)
                )

    def _count(self, steps: np.ndarray) -> None:
        """Adds the env steps and agent steps of each row, ``[M, 2]``, to those of its member."""
        for row, member in enumerate(self._rows):
            self._steps[member] += 0 if self._done[member] else steps[row]

    def _step(self, member: int) -> int:
        """Returns what the member's clock says."""
        if self.jobs[member].acts:
            return int(self._steps[member, 0])
        return self._updates[member]

    def _report(self, running: Sequence[int]) -> None:
        """Makes the reports of members that are done, and of all members after an interval."""
        interval_over = self._iterations >= self.jobs[0].iterations_per_report
        numbers = None
        if interval_over:
            numbers = self._numbers()
            self._score(running, numbers[0])
        ended = [x for x in running if self.jobs[x].ended_by(self._step(x), self._windows[x].score)]
        stopped = self._stopped(running)
        due = running if interval_over else sorted({*ended, *stopped})
        if not due:
            return
        self._end(ended)
        since, counts = numbers or self._numbers()
        if interval_over:
            counts = self._select(counts)  # also among those that stop: a resume goes on after it
        self._end(stopped)
        self._offer(due, (since, counts))
        self._parents = list(range(len(self.jobs)))
        if interval_over:
            self._restart()
            self._iterations = 0

    def _offer(self, members: Iterable[int], numbers: ReportNumbers) -> None:
        """Makes reports. The variables of members that are done stay valid while others advance."""
        for member in members:
            self._due[member] = self._now(
                member, numbers, keep=self._done[member] and not all(self._done)
            )

    def _score(self, members: Sequence[int], since: Sequence[IntervalSums]) -> None:
        """Adds the episodes of a whole interval to those that score the members."""
        for member in members:
            self._windows[member].add(since[self._rows.index(member)].episodes)

    def _end(self, members: Iterable[int]) -> None:
        for member in members:
            self._done[member] = True

    def _stopped(self, running: Sequence[int]) -> list[int]:
        """Returns the members that end early: all of them for a signal,
        or some for an error of theirs.

        A signal that comes between two questions ends all after the next iteration:
        they resume from a shared one.
        """
        jobs = self.jobs
        stopped = [member for member in running if jobs[member].stop()]
        others = [member for member in running if member not in stopped]
        if stopped and others and jobs[others[0]].stop():
            return []
        return stopped

    def _select(self, counts: Counts) -> Counts:
        """Selects among the members that go on, if it is time: after an interval,
        before its reports.

        Returns the counts after it. A member that has diverged takes no part:
        its report ends it, and it has no copies.
        """
        rows, selection, jobs = self._rows, self._selection, self.jobs
        members = [
            x for x in self._running() if not diverged(self._part(counts.skipped, rows.index(x)))
        ]
        if selection is None or len(members) < 2:
            return counts
        iteration = int(self._part(counts.iteration, rows.index(members[0])))
        if not selection.due(iteration - self._iterations, iteration):
            return counts
        before = [jobs[member] for member in members]
        scores = np.array([self._windows[member].score for member in members])
        source, chosen = selection.evolve(
            selection.rng(iteration), scores, initial.stacked_hyper(before)
        )
        if len(source) < len(members):
            self.halved.update(np.delete(members, source).tolist())
            self._end(self.halved)
            return counts
        for place, member in enumerate(members):
            job = jobs[member]
            self._parents[member] = members[source[place]]
            values = {name: float(x[place]) for name, x in chosen.items()}
            jobs[member] = job._replace(
                hyper=selection.checked(job.config, values, before[source[place]].hyper)
            )
        return self._copy_parents(counts)

    def _copy_parents(self, counts: Counts) -> Counts:
        """Gives each member the state and the counts of its parent; each keeps its experience."""
        index = np.array([self._rows.index(self._parents[member]) for member in self._rows])
        memory = self._state.memory
        self._state = meshes.rows(self._state._replace(memory=()), index)._replace(memory=memory)
        self._put_inputs()
        return jax.tree.map(lambda x: x[index], counts)

    def _shrink(self) -> None:
        """Removes the members that are done from the programs, which are compiled again."""
        index = np.array([row for row, member in enumerate(self._rows) if not self._done[member]])
        if not len(index) or len(index) % self.jobs[0].mesh.shape[meshes.AGENT]:
            return  # none is left, or the rest does not divide over the devices: all are computed
        self._rows = [self._rows[row] for row in index]
        before = self._state, self._actor
        self._state, self._actor = meshes.rows(before, index)
        for x in jax.tree.leaves(before):
            x.delete()  # reports hold it, too
        self._put_inputs()
        self._keep(index)

    def _numbers(self) -> ReportNumbers:
        """Fetches the numbers of all members' reports."""
        state = self._state
        return self._sums(), arrays.fetch(Counts.of(state))

    def _now(self, member: int, numbers: ReportNumbers, *, keep: bool = False) -> Report:
        """Returns a member's report; ``keep`` copies its variables,
        which others' advance would overwrite.
        """
        job = self.jobs[member]
        row = self._rows.index(member)
        since = numbers[0][row]
        counts = self._part(numbers[1], row)
        state = self._state._replace(**counts._asdict())
        actor = self._actor
        own_row = row if self._axis else None
        selected = {"hyper": dict(job.hyper), "halved": member in self.halved}
        if keep:
            state = state._replace(variables=copied(state.variables, "variables", row=own_row))
        return report(
            job,
            state,
            self._steps[member],
            self._clocks[member],
            since,
            due=since.iterations >= job.iterations_per_report,
            window=self._windows[member],
            actor=actor,
            row=own_row,
            extra_metrics={**self._times(), **self._selected(member)},
            extra_progress=selected if job.hyper or self._selection else {},
        )

    def _selected(self, member: int) -> Mapping[str, float]:
        """Returns the metrics of selection: whose parameters the member has, and its
        hyperparameters from now on.
        """
        if self._selection is None:
            return {}
        hyper = {f"hyper/{name}": value for name, value in self.jobs[member].hyper.items()}
        return {"population/parent": float(self._names[self._parents[member]]), **hyper}

    # --- Defined by each plan ---------------------------------------------------------------------

    @abc.abstractmethod
    def _begin(self) -> None:
        """Makes the state, the environments and the programs, and calls ``_ready`` with these."""

    @abc.abstractmethod
    def _iterate(self, running: Sequence[int]) -> int:
        """Runs some iterations, calls ``_count``, and returns their number;
        no member ends before the last of them.
        """

    @abc.abstractmethod
    def _sums(self) -> Sequence[IntervalSums]:
        """Returns each row's sums since the last report, on the host."""

    @abc.abstractmethod
    def _restart(self) -> None:
        """Begins the next interval."""

    @abc.abstractmethod
    def _keep(self, index: np.ndarray) -> None:
        """Keeps only these rows of the plan's other arrays, and compiles the programs again."""

    def _times(self) -> Mapping[str, float]:
        """Returns the seconds of the plan's stages."""
        return {}

    def close(self) -> None:
        """Ends environments on the host."""
        if self._env is not None:
            self._env.close()
