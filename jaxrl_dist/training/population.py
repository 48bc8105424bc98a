"""A prepared population: runs that are trained together, each with a complete run directory."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import math
import pathlib
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any

from jaxrl_dist import mesh as meshes
from jaxrl_dist import plans
from jaxrl_dist.checks import counted
from jaxrl_dist.config import Train
from jaxrl_dist.errors import ConfigError, DivergedError, FileWarning
from jaxrl_dist.hosts import peers, start
from jaxrl_dist.plans.evolve import Selection, halving, pbt
from jaxrl_dist.plans.population import Population
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run import text
from jaxrl_dist.training.members import Member
from jaxrl_dist.training.run import UNFINISHED, Run
from jaxrl_dist.training.stored import to_json
from jaxrl_dist.types import Report

POPULATION, RESULTS = "population.json", "results.csv"
"""Files of a population's run directory: its members and their scores, as JSON and as a table."""
_FORMAT = 1


@dataclasses.dataclass
class Row:
    """A member's entry in the population's results."""

    member: str
    """Its directory's name."""
    seed: int
    values: Mapping[str, Any]
    """The hyperparameters in which members differ."""
    status: str = "training"
    """``training``, ``done``, ``halved`` (ended by successive halving) or ``diverged``."""
    env_steps: int = 0
    iteration: int = 0
    episode_return: float | None = None
    """Mean return of the newest report with finished episodes."""
    evaluation_return: float | None = None
    """Mean return of the newest evaluation."""
    lineage: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """With population-based training: env steps, iteration, parent and new hyperparameters of each copy."""

    @property
    def score(self) -> float | None:
        """The return that ranks members: of the evaluation, or else of training."""
        return self.episode_return if self.evaluation_return is None else self.evaluation_return


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
        self._newest: dict[int, Report] = {}
        self._programs: dict[int, tuple[Population, int]] = {}  # with each member's place in its program

    def resumed(self, runs: Sequence[Run], rows: Sequence[Row], file: IO[bytes] | None) -> PopulationRun:
        """Returns the population with resumed members; ``file`` is the open ``metrics.jsonl``."""
        self.runs, self.rows, self._file = list(runs), rows, file
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
            for group in self.groups:
                with contextlib.ExitStack() as members:
                    running = dict(self._begin(group, members, evaluating))
                    while running:
                        try:
                            new = [number for number, reports in running.items() if self._next(number, reports)]
                        except BaseException as error:
                            self._end(running, error)
                            raise
                        running = {number: running[number] for number in new}
                        if new:
                            yield self._together(new, files)

    def _begin(
        self, group: Sequence[int], stack: contextlib.ExitStack, evaluating: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        """Yields the numbers and the reports of a group's members that are not done; ``stack`` ends them."""
        left = [number for number in group if self.rows[number].status != "halved"]
        if len(left) % self.runs[group[0]].job.mesh.shape[meshes.AGENT] == 0:  # else the halved ones fill up its rows
            group = left
        numbers = [number for number in group if self.rows[number].status == "training"]
        training = [group.index(number) for number in numbers]
        how = training, selection(self.config, len(self.runs), self.runs[0].job.num_envs), group
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
        if (value := report.metrics["episode/return"]) is not None:
            row.episode_return = value
        if report.evaluation is not None:
            row.evaluation_return = report.evaluation["return_mean"]
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
        report = together(self._newest, new, self.rows)
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
        files = run_files.RunFiles(pathlib.Path(config.run_dir), file, kept, done)
        return stack.enter_context(contextlib.closing(files))


    def _reported(self, number: int) -> int:
        """Returns the iteration of a resumed member's newest line in the population's metrics."""
        row, resumed = self.rows[number], self.runs[number].job.resumed
        if resumed is None or row.status != "training":
            return row.iteration
        return int(resumed.progress["reported"]["iteration"])


def _stops(stop: Callable[[], bool], program: Population, place: int) -> bool:
    """Returns whether a member is to end early: all are stopped, or a selection has ended it."""
    return stop() or place in program.halved


def selection(config: Train[Any], num_members: int, num_envs: int) -> Selection | None:
    """Returns the selection that a resolved config asks for."""
    if config.evolve is None:
        return None
    iteration = num_envs * config.rollout_length
    report = max(1, config.report_interval // iteration)
    rungs = 2 ** math.ceil(math.log2(num_members)) if config.evolve == "halving" else 20
    interval = (config.evolve_interval or config.total_env_steps / rungs) / iteration
    evolve = {"pbt": pbt, "halving": halving}[config.evolve]
    return Selection(evolve, config.seed, max(1, round(interval / report)) * report, config.evolve == "halving")


# --- Numbers of a population --------------------------------------------------------------------------


def together(newest: Mapping[int, Report], new: Sequence[int], rows: Sequence[Row]) -> Report:
    """Joins the members' newest reports: counts are sums, metrics means over the members.

    Variables and checkpoint are those of the member with the highest return.

    Args:
      new: members that have just reported; the rate of the population is the sum of theirs.
    """
    reports = [newest[number] for number in sorted(newest)]
    names = dict.fromkeys(name for report in reports for name in report.metrics)
    metrics = {name: mean([report.metrics.get(name) for report in reports]) for name in names}
    returns = [row.episode_return for row in rows if row.episode_return is not None]
    evaluations = [report.evaluation for report in reports if report.evaluation is not None]
    over = all(row.status != "training" for row in rows)
    ended_by = [report.ended_by for report in reports if report.ended_by]
    best = max(new, key=lambda number: (rows[number].score is not None, rows[number].score))
    return Report(
        env_steps=sum(row.env_steps for row in rows),
        updates=sum(report.updates for report in reports),
        iteration=sum(row.iteration for row in rows),
        wall_time_s=max(report.wall_time_s for report in reports),
        metrics={
            **metrics,
            "time/env_steps_per_second": sum(newest[x].metrics["time/env_steps_per_second"] or 0.0 for x in new),
            "population/return_best": max(returns, default=None),
            "population/return_iqm": iqm(returns),
            "population/done": float(sum(row.status == "done" for row in rows)),
        },
        variables=newest[best].variables,
        checkpoint=newest[best].checkpoint,
        evaluation=_evaluation(evaluations) if len(evaluations) == len(rows) else None,
        ended_by=max(ended_by, default=None) if over else None,
        members=tuple(reports),
    )


def _evaluation(evaluations: Sequence[Mapping[str, float | int]]) -> Mapping[str, float | int]:
    """Joins the members' evaluations: means over the members, and sums of the numbers of episodes."""
    names = dict.fromkeys(name for x in evaluations for name in x)
    means = {name: mean([x.get(name) for x in evaluations]) or 0.0 for name in names}
    return means | {name: int(sum(x[name] for x in evaluations)) for name in ("episodes", "cut")}


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def iqm(values: Sequence[float]) -> float | None:
    """Returns the interquartile mean (Agarwal et al. 2021, section 4.3); None if there are none."""
    from scipy import stats

    return float(stats.trim_mean(values, 0.25)) if values else None


def settings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the scores of each setting over its seeds, the best interquartile mean first.

    Each has the varied ``values``, the number of ``seeds`` with a score, and their ``iqm``, ``mean``, ``min`` and
    ``max``, which are None if there is no score.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr(row.values), []).append(row)
    found = []
    for group in groups.values():
        scores = [row.score for row in group if row.score is not None]
        extremes = {"min": min(scores, default=None), "max": max(scores, default=None)}
        known = {"seeds": len(scores), "iqm": iqm(scores), "mean": mean(scores), **extremes}
        found.append({"values": dict(group[0].values), **known})
    return sorted(found, key=lambda x: (x["iqm"] is not None, x["iqm"]), reverse=True)


def table(rows: Sequence[Row]) -> str:
    """Returns the settings and their scores as lines of text, the best first."""
    found = settings(rows)
    header = [*found[0]["values"], "seeds", "iqm", "mean", "min", "max"]
    lines = [[*x["values"].values(), *(x[name] for name in header[len(x["values"]) :])] for x in found]
    shown = [header, *([_cell(x) for x in line] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join("  ".join(x.rjust(width) for x, width in zip(line, widths, strict=True)) for line in shown)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def read_rows(population: PopulationRun) -> list[Row]:
    """Returns the rows of a population's last session; new rows if its file is lost or damaged."""
    fields = {field.name for field in dataclasses.fields(Row)} - {"member", "seed", "values"}
    rows = [dataclasses.replace(row) for row in population.begun]
    with contextlib.suppress(ConfigError, LookupError, TypeError, AttributeError, ValueError):
        kept = text.read_json(pathlib.Path(str(population.config.run_dir)) / POPULATION)["members"]
        for row, there in zip(rows, kept, strict=True):
            for name in fields:
                setattr(row, name, there[name])
    return rows


def write_results(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes ``population.json`` and ``results.csv``.

    Raises:
      OSError: a file cannot be written.
    """
    text.write_json(
        path / POPULATION,
        {"format": _FORMAT, "members": [dataclasses.asdict(row) for row in rows], "settings": settings(rows)},
    )
    table = io.StringIO()
    columns = ["member", "seed", *rows[0].values, "status", "env_steps", "episode_return", "evaluation_return"]
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([getattr(row, name, row.values.get(name)) for name in columns] for row in rows)
    text.write_text(path / RESULTS, table.getvalue())
