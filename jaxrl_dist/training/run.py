"""A prepared training run: of one member, or of a population,
whose members each have a complete run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import IO

from jaxrl_dist import mesh as meshes
from jaxrl_dist import plans
from jaxrl_dist.actors import cluster
from jaxrl_dist.config.train import Train
from jaxrl_dist.data.writing import check_new
from jaxrl_dist.errors import DivergedError, FileWarning
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.arrays import check_equal
from jaxrl_dist.hosts.failing import failing
from jaxrl_dist.plans.evolve import Selection, halving, pbt
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.population import Population
from jaxrl_dist.plans.session import Session
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.stored import to_json
from jaxrl_dist.training.describing import describe, resume_command
from jaxrl_dist.training.joining import join_reports
from jaxrl_dist.training.leaving import save_at_exit, warn_if_unread
from jaxrl_dist.training.member import Member
from jaxrl_dist.training.opening import open_files
from jaxrl_dist.training.playing import unshown
from jaxrl_dist.training.reports import StopState
from jaxrl_dist.training.rows import ENDED, Row
from jaxrl_dist.training.tables import write_results
from jaxrl_dist.types import Report


class Run:
    """A training run that is ready to start: of one member, or of a population.

    The members of a group advance together; the groups follow each other.
    """

    def __init__(
        self, config: Train, members: Sequence[Member], groups: Sequence[Sequence[int]]
    ) -> None:
        """Prepares a new run.

        Args:
          config: resolved: no field is left out.
          groups: numbers of the members that one program trains.
        """
        self.config = config
        self.members = members
        self.groups = groups
        self.file: IO[bytes] | None = None
        """Open ``metrics.jsonl`` of a resumed population."""

    @property
    def session(self) -> Session:
        """The session of the first member."""
        return self.members[0].session

    @property
    def job(self) -> Job:
        """The job of the first member, whose environment, devices and sizes are those of all."""
        return self.session.job

    @property
    def rows(self) -> list[Row]:
        """The members' results so far."""
        return [member.row for member in self.members]

    @property
    def steps(self) -> int:
        """What the clocks of all members said before this session, added up."""
        return sum(getattr(row, self.config.clock) for row in self.rows)

    @property
    def total_steps(self) -> int:
        """What they say at the end."""
        return sum(member.config.total for member in self.members)

    def describe(self, name: str | None = None) -> str:
        """As ``describe``; ``name`` is the user's name for the algorithm."""
        first = self.members[0].config
        return describe(self.config, first, self.job, len(self.members), len(self.groups), name)

    def resume_command(self) -> str:
        """As ``resume_command``."""
        return resume_command(self.config)

    def reports(
        self,
        progress: Callable[[int], None] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
        saving: Callable[[int], None] = lambda members: None,
    ) -> Iterator[Report]:
        """As ``train``: yields reports. In those of a population,
        ``members`` holds the newest report of each member.

        Args:
          progress: receives the number of episodes done in the last evaluation.
          stop: returns whether to end early.
          saving: receives the number of members that train together,
            as soon as they are trained and will be saved.

        Raises:
          ConfigError: immediately, if the run directory cannot be written or holds a run already.
        """
        self._progress = progress
        self._stop = stop
        self._saving = saving
        file = self.file if is_population(self.config) else self.members[0].file
        reports = _started(self.config, file, self._reports)
        self._note_read = warn_if_unread(reports)
        return reports

    def _reports(self) -> Generator[Report]:
        with cluster.joined(self.members[0].config):
            yield from self._connected_reports()

    @in_32_bits
    def _connected_reports(self) -> Generator[Report]:
        self._note_read()
        sessions = [member.session for member in self.members]
        with failing():
            resumed = [
                session.resumed and (session.resumed.state.variables, session.resumed.state.updates)
                for session in sessions
            ]
            initial = [session.init_variables for session in sessions]
            check_equal((resumed, initial), "what the run starts from")
        if not is_population(self.config):
            yield from self.members[0].reports(self._progress, self._stop)
            return
        with failing(), contextlib.ExitStack() as stack:
            files = None
            if self.config.run_dir and peers.first():
                files = self._files(stack)
            for new in self._in_turn():
                if new or any(row.status in ENDED for row in self.rows):
                    yield self._together(new, files)
            self._check_not_all_diverged(files)

    def _check_not_all_diverged(self, files: RunFiles | None) -> None:
        if any(row.status != "diverged" for row in self.rows):
            return
        if files is not None:
            write_results(files.path, self.rows)
        raise DivergedError(
            f"all {len(self.rows)} members have diverged; try smaller values of --learning-rate"
        )

    def _in_turn(self) -> Generator[list[int]]:
        """Trains the groups one after the other; yields as ``_train``."""
        stopping = StopState(self._stop)
        reported = False
        for group in self.groups:
            if reported and stopping():
                return
            with contextlib.closing(self._train(group)) as reports:
                for new in reports:
                    reported = reported or bool(new)
                    yield new

    def _train(self, group: Sequence[int]) -> Generator[list[int]]:
        """Trains a group; yields the numbers of the members with new reports,
        also none where a member diverges.
        """
        with contextlib.ExitStack() as stack:
            running = self._begin(group, stack)
            while running:
                try:
                    new = [
                        number for number, reports in running.items() if self._next(number, reports)
                    ]
                except BaseException as error:
                    self._end(running, error)
                    raise
                diverged = any(self.rows[number].status == "diverged" for number in running)
                running = {number: running[number] for number in new}
                if new or diverged:
                    yield new

    def _begin(
        self, group: Sequence[int], stack: contextlib.ExitStack
    ) -> dict[int, Generator[Report]]:
        """Returns the reports of a group's members that are not done, by their numbers;
        ``stack`` ends them.
        """
        # The numbers of several evaluations would flash by.
        shown = self._progress if len(group) == 1 else unshown
        first = self.members[group[0]]
        first.shared.saving = self.once_trained(group, self._saving)
        left = [number for number in group if self.rows[number].status != "halved"]
        if len(left) % first.session.job.mesh.shape[meshes.AGENT] == 0:
            group = left  # otherwise stay padded: the members left do not divide over the devices
        places = {
            number: place
            for place, number in enumerate(group)
            if self.rows[number].status == "training"
        }
        program = self._program(group, list(places.values()))
        if program is not None:
            stack.callback(program.close)
        running = {}
        for number, place in places.items():
            member = self.members[number]
            member.program = program
            member.place = place
            begin = partial(member.reports, shown, self._stop)
            reports = _started(member.config, member.file, begin)
            # closing saves members that still run
            running[number] = stack.enter_context(contextlib.closing(reports))
        return running

    def _program(self, group: Sequence[int], training: Sequence[int]) -> Population | None:
        """Returns what trains a group together, of which the ``training`` places are not done;
        None: each member trains alone.
        """
        population_plan = plans.population_plan(self.config.plan)
        if population_plan is None:
            return None
        # The members stop also before each takes its first report.
        sessions = [self.members[number].session._replace(stop=self._stop) for number in group]
        select = selection(self.config, self.session)
        return population_plan(sessions, training, select, group, self.config.average_every)

    def once_trained(
        self, group: Sequence[int], saving: Callable[[int], None]
    ) -> Callable[[Report], None]:
        """Returns a function that calls ``saving`` at the first last report of several members,
        unless others train on.
        """
        called = len(group) == 1

        def call_once(report: Report) -> None:
            nonlocal called
            if not called and report.ended_by != "stop_at_return":
                called = True
                saving(sum(self.rows[number].status == "training" for number in group))

        return call_once

    def _next(self, number: int, reports: Iterator[Report]) -> bool:
        """Takes a member's next report; returns False if it has ended."""
        member = self.members[number]
        try:
            report = next(reports, None)
        except DivergedError as error:
            member.row.status = "diverged"
            warnings.warn(
                f"member {member.row.member} has ended, but the others continue: {error}",
                FileWarning,
                stacklevel=2,
            )
            return False
        if report is None:
            return False
        member.take(report, number)
        return True

    def _end(self, running: Mapping[int, Iterator[Report]], error: BaseException) -> None:
        """Ends members after an error of one of them: each saves what it has learnt,
        also one that has not begun.
        """
        for number, reports in running.items():
            program = self.members[number].program
            if program is not None:
                program.error = error
            with contextlib.suppress(Exception, type(error)):
                for _ in reports:
                    pass

    def _together(self, new: Sequence[int], files: RunFiles | None) -> Report:
        """Returns the population's report after new reports of some members, and writes it."""
        newest = {
            number: member.newest
            for number, member in enumerate(self.members)
            if member.newest is not None
        }
        policies = self.job.source.spec.policies
        report = join_reports(newest, new, self.rows, self.groups, policies)
        report = dataclasses.replace(report, stop=partial(_stop, report.members))
        if files is not None:
            files.write(report)
            report = dataclasses.replace(report, log=partial(files.log, report.iteration))
            write_results(files.path, self.rows)
            if report.ended_by:
                files.finish(report)
        return report

    def _files(self, stack: contextlib.ExitStack) -> RunFiles:
        """Opens the population's own files; ``stack`` closes them."""
        stored = to_json(self.config, self.job.source.spec)
        reported = {}
        if self.file is not None:
            reported["iteration"] = sum(member.reported for member in self.members)
        return open_files(stack, self.config, stored, self.file, reported)


def _stop(members: Sequence[Report]) -> None:
    """Ends the members of a population that train, as ``Report.stop``."""
    for member in members:
        member.stop()


def _started(
    config: Train, file: IO[bytes] | None, begin: Callable[[], Generator[Report]]
) -> Generator[Report]:
    """Returns the reports of a run, or of a member, that can start.

    Args:
      file: open ``metrics.jsonl`` of a resumed one.

    Raises:
      ConfigError: the run directory cannot be written or holds a run already,
        or that of its record exists.
    """
    with failing():
        if file is None and config.record is not None:
            check_new(pathlib.Path(config.record))
        if file is None and config.run_dir and peers.first():
            run_files.check_free(config.run_dir)
    reports = begin()
    save_at_exit(reports)
    return reports


def selection(config: Train, session: Session) -> Selection | None:
    """Returns the selection that a resolved config asks for."""
    if config.evolve is None or config.evolve_interval is None:
        return None
    evolve = {"pbt": pbt, "halving": halving}[config.evolve]
    iterations = config.evolve_interval / session.job.steps_per_iteration
    report = session.iterations_per_report
    interval = max(1, round(iterations / report)) * report
    return Selection(evolve, config.seed, interval, doubles=config.evolve == "halving")
