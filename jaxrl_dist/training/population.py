"""A prepared population: runs that are trained together, each with a complete run directory."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any

from jaxrl_dist import mesh as meshes
from jaxrl_dist import plans
from jaxrl_dist.checks import counted
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import DivergedError, FileWarning
from jaxrl_dist.hosts import peers, start
from jaxrl_dist.plans.evolve import Selection, halving, pbt
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.population import Population
from jaxrl_dist.run import files as run_files
from jaxrl_dist.settings.members import Member
from jaxrl_dist.settings.stored import to_json
from jaxrl_dist.training.reports import Ending
from jaxrl_dist.training.results import ENDED, Row, refill, together, write_results
from jaxrl_dist.training.run import UNFINISHED, Run
from jaxrl_dist.types import Checkpoint, Report


class PopulationRun:
    """The runs of a population. Those in a group advance together; the groups follow each other."""

    def __init__(
        self, config: Train[Any], members: Sequence[Member], runs: Sequence[Run], groups: Sequence[Sequence[int]]
    ) -> None:
        """Prepares a new population.

        Args:
          groups: numbers of the members that one program trains.
        """
        self.config, self.runs, self.groups = config, list(runs), groups
        self.begun = [Row(f"{number:03d}", member.config.seed, member.values) for number, member in enumerate(members)]
        """The rows before any training."""
        self.rows: Sequence[Row] = [dataclasses.replace(row) for row in self.begun]
        self._file: IO[bytes] | None = None
        self._before: dict[int, Report] = {}  # the newest report of each resumed member before this session
        self._newest: dict[int, Report] = {}  # and in this session
        self._programs: dict[int, tuple[Population, int]] = {}  # with each member's place in its program

    def resumed(self, runs: Sequence[Run], rows: Sequence[Row], file: IO[bytes] | None) -> PopulationRun:
        """Returns the population with resumed members, whose returns in ``rows`` become those of their files.

        Args:
          file: the open ``metrics.jsonl``.
        """
        self.runs, self.rows, self._file = list(runs), rows, file
        for number, row in enumerate(rows):
            job, folder = runs[number].job, pathlib.Path(str(runs[number].config.run_dir))
            report = refill(row, folder, self._reported(number))
            if report is not None and row.status == "training":
                report = dataclasses.replace(report, evaluation=None, ended_by=None)
            elif report is not None and row.status in ENDED and job.resumed is not None:
                report = _with_state(report, job.resumed)
            if report is not None:
                self._before[number] = report
        return self

    @property
    def env_steps(self) -> int:
        """Env steps of all members before this session."""
        return sum(row.env_steps for row in self.rows)

    @property
    def total_env_steps(self) -> int:
        """Env steps of all members at the end."""
        return sum(run.total_env_steps for run in self.runs)

    def stopped_by(self, stop: Callable[[], bool]) -> PopulationRun:
        """As ``Run.stopped_by``."""
        self.runs = [run.stopped_by(stop) for run in self.runs]
        return self

    def describe(self, name: str | None = None) -> str:
        """Describes the population in one line."""
        programs = f" in {counted(len(self.groups), 'program')}" if len(self.groups) > 1 else ""
        return f"{counted(len(self.runs), 'member')}{programs}, each {self.runs[0].describe(name)}"

    def resume_command(self) -> str:
        """Returns the command that resumes the population."""
        return self.runs[0].resume_command()

    def reports(self, evaluating: Callable[[int], None] = lambda done: None) -> Iterator[Report]:
        """Yields reports of the population, whose ``members`` holds the newest report of each member.

        Raises:
          ConfigError: at once, if the run directory cannot be written or holds a run already.
        """
        with start.failing():
            if self._file is None and self.config.run_dir and peers.first():
                run_files.check_free(self.config.run_dir)
        reports = self._reports(evaluating)
        UNFINISHED.add(reports)
        return reports

    def _reports(self, evaluating: Callable[[int], None]) -> Generator[Report]:
        with start.failing(), contextlib.ExitStack() as stack:
            files = self._files(stack) if self.config.run_dir and peers.first() else None
            stopping = Ending(self.runs[0].job.stop)
            for group in self.groups:
                if self._newest and stopping():
                    break
                with contextlib.ExitStack() as members:
                    running = dict(self._begin(group, members, evaluating))
                    while running:
                        try:
                            new = [number for number, reports in running.items() if self._next(number, reports)]
                        except BaseException as error:
                            self._end(running, error)
                            raise
                        diverged = any(self.rows[number].status == "diverged" for number in running)
                        running = {number: running[number] for number in new}
                        if new or (diverged and any(row.status in ENDED for row in self.rows)):
                            yield self._together(new, files)
            if all(row.status == "diverged" for row in self.rows):
                if files is not None:
                    write_results(files.path, self.rows)
                raise DivergedError(
                    f"all {len(self.rows)} members have diverged; smaller values of --learning-rate may help"
                )

    def _begin(
        self, group: Sequence[int], stack: contextlib.ExitStack, evaluating: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        """Yields the numbers and the reports of a group's members that are not done; ``stack`` ends them."""
        left = [number for number in group if self.rows[number].status != "halved"]
        if len(left) % self.runs[group[0]].job.mesh.shape[meshes.AGENT] == 0:  # else the halved ones fill up its rows
            group = left
        numbers = [number for number in group if self.rows[number].status == "training"]
        training = [group.index(number) for number in numbers]
        how = training, selection(self.config, self.runs[0].job), group
        jobs = [self.runs[number].job for number in group]
        together = plans.together(self.config.plan)
        program = None if together is None else together(jobs, *how, average_every=self.config.average_every)
        if program is not None:
            stack.callback(program.close)
        for place, number in zip(training, numbers, strict=True):
            run = self.runs[number]
            if program is not None:
                self._programs[number] = program, place
                run = run.stopped_by(partial(_stops, run.job.stop, program, place))
                run = run._replace(execute=partial(program.reports, place))
            reports: Any = run.reports(evaluating) if len(group) == 1 else run.reports()  # those of many would flash by
            yield number, stack.enter_context(contextlib.closing(reports))  # which saves a member that has not ended

    def _next(self, number: int, reports: Iterator[Report]) -> bool:
        """Takes a member's next report; returns False if it has ended."""
        row = self.rows[number]
        try:
            report = next(reports, None)
        except DivergedError as error:
            row.status = "diverged"
            warnings.warn(f"member {row.member} has ended, the others go on: {error}", FileWarning, stacklevel=2)
            return False
        if report is None:
            return False
        self._newest[number] = report
        row.env_steps, row.iteration = report.env_steps, report.iteration
        row.take(report)
        if report.ended_by:
            row.status = "done"
        if number in self._programs:
            program, place = self._programs[number]
            row.status = "halved" if place in program.halved else row.status
        parent = report.metrics.get("population/parent", number)
        if parent is not None and parent != number:
            hyper = {name[6:]: value for name, value in report.metrics.items() if name.startswith("hyper/")}
            kept = {"env_steps": row.env_steps, "iteration": row.iteration, "parent": f"{int(parent):03d}"}
            row.lineage.append({**kept, "hyper": hyper})
        return True

    def _end(self, running: Mapping[int, Iterator[Report]], error: BaseException) -> None:
        """Ends members after an error of one of them: each saves what it has learnt, also one that has not begun."""
        for number, reports in running.items():
            if number in self._programs:
                self._programs[number][0].error = error
            with contextlib.suppress(Exception, type(error)):
                for _ in reports:
                    pass

    def _together(self, new: Sequence[int], files: run_files.RunFiles | None) -> Report:
        """Returns the report of the population after new reports of some members, and writes it."""
        report = together({**self._before, **self._newest}, new, self.rows, self.groups)
        if files is not None:
            files.write(report)
            report = dataclasses.replace(report, log=partial(files.log, report.iteration))
            write_results(files.path, self.rows)
            if report.ended_by:
                files.finish(report)
        return report

    def _files(self, stack: contextlib.ExitStack) -> run_files.RunFiles:
        """Opens the population's own files; ``stack`` closes them."""
        config = self.config
        assert config.run_dir is not None
        if self._file is None:
            run_files.claim(config.run_dir)
        file = stack.enter_context(self._file or run_files.lock(config.run_dir))
        kept = to_json(config, self.runs[0].job.source.spec)
        done = None if self._file is None else sum(map(self._reported, range(len(self.rows))))
        directory = pathlib.Path(config.run_dir)
        with run_files.freeing(directory):
            files = run_files.RunFiles(directory, file, kept, done)
        return stack.enter_context(contextlib.closing(files))

    def _reported(self, number: int) -> int:
        """Returns the iteration of a resumed member's newest line in the population's metrics."""
        row, resumed = self.rows[number], self.runs[number].job.resumed
        if resumed is None or row.status != "training":
            return row.iteration
        return int(resumed.progress["reported"]["iteration"])


def _with_state(report: Report, state: Checkpoint) -> Report:
    """Returns a report that was read from a file with the checkpoint of the same moment."""
    return dataclasses.replace(report, variables=lambda: state.state.variables, checkpoint=lambda: state)


def _stops(stop: Callable[[], bool], program: Population, place: int) -> bool:
    """Returns whether a member is to end early: all are stopped, or a selection has ended it."""
    return stop() or place in program.halved


def selection(config: Train[Any], job: Job) -> Selection | None:
    """Returns the selection that a resolved config asks for."""
    if config.evolve is None or config.evolve_interval is None:
        return None
    interval, report = config.evolve_interval / job.steps_per_iteration, job.iterations_per_report
    evolve = {"pbt": pbt, "halving": halving}[config.evolve]
    return Selection(evolve, config.seed, max(1, round(interval / report)) * report, config.evolve == "halving")
