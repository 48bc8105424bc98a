"""A member of a training run, which evaluates, writes and saves the reports of its plan;
most runs have one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import shlex
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import IO, Any

from jaxrl_dist import plans
from jaxrl_dist.actors.film import film, speed, write_gif
from jaxrl_dist.checks import unit
from jaxrl_dist.config.train import Train
from jaxrl_dist.data.files import scored
from jaxrl_dist.data.recorder import Recorder
from jaxrl_dist.errors import (
    ConfigError,
    DivergedError,
    EnvError,
    EnvWarning,
    FileWarning,
    first_line,
)
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.failing import failing
from jaxrl_dist.plans.population import Population
from jaxrl_dist.plans.session import Session, step_of
from jaxrl_dist.plans.window import recent_return
from jaxrl_dist.run import checkpoint, directories, machine, signals, trackers
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run.saving import Saver
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.stored import to_json
from jaxrl_dist.training.recording import recorder
from jaxrl_dist.training.reports import (
    Evaluations,
    StopState,
    alone,
    filming,
    saving,
    with_final_report,
    writing,
)
from jaxrl_dist.training.rows import ENDED, Row, refill
from jaxrl_dist.training.shared import ProgramShared
from jaxrl_dist.training.truth import measuring
from jaxrl_dist.types import Report


@dataclasses.dataclass(eq=False)
class Member:
    """A member of a run, which may have only one, with its session in this process."""

    session: Session
    shared: ProgramShared
    row: Row
    """Its results so far."""
    file: IO[bytes] | None = None
    """Open metrics.jsonl of a resumed member; holding it locks its directory."""
    program: Population | None = None
    """What trains it, with others; None: the config's plan, alone."""
    place: int = 0
    """Its place in the program."""
    newest: Report | None = None
    """Of this session or an earlier one."""
    files: RunFiles | None = None
    """None: without a run directory, or another process writes them."""
    saver: Saver | None = None
    """None: without a run directory."""
    recorder: Recorder | None = None
    """None: its experience is not recorded."""

    @property
    def config(self) -> Train:
        """Its config, resolved: no field is left out."""
        return self.session.config

    @property
    def folder(self) -> pathlib.Path:
        """Its run directory."""
        return pathlib.Path(str(self.config.run_dir))

    @property
    def hyper(self) -> Mapping[str, float]:
        """The hyperparameters in which it differs from other members,
        as the newest selection has set them.
        """
        if self.program is None:
            return self.session.hyper
        return self.program.sessions[self.place].hyper

    @property
    def halved(self) -> bool:
        """Whether a selection has ended it."""
        return self.program is not None and self.place in self.program.halved

    @property
    def reported(self) -> int:
        """Iteration of its newest line in the population's metrics, before this session."""
        resumed = self.session.resumed
        if resumed is None or self.row.status != "training":
            return self.row.iteration
        return int(resumed.progress["reported"]["iteration"])

    def go_back(self, status: str) -> None:
        """Sets the row back to the checkpoint that the member has resumed from."""
        row = self.row
        resumed = self.session.resumed
        assert resumed is not None
        row.status = status
        if status != "diverged":  # whose last report is not one of the population
            row.env_steps = resumed.env_steps
            row.updates = self.session.updates
            row.iteration = resumed.progress["iteration"]
        row.lineage = [x for x in row.lineage if x["iteration"] <= row.iteration]

    def read(self) -> None:
        """Reads the newest report before the checkpoint, and its returns into the row."""
        self.newest = refill(self.row, self.folder, self.reported)
        state = self.session.resumed
        if self.newest is not None and self.row.status == "training":
            self.newest = dataclasses.replace(self.newest, evaluation=None, ended_by=None)
        elif self.newest is not None and self.row.status in ENDED and state is not None:
            self.newest = dataclasses.replace(
                self.newest, variables=lambda: state.state.variables, checkpoint=lambda: state
            )

    def reports(
        self, evaluating: Callable[[int], None], stop: Callable[[], bool]
    ) -> Generator[Report]:
        """Yields the reports of all stages. Saves the run if an error ends it or the caller
        leaves.
        """
        ending = StopState(lambda: stop() or self.halved)
        with failing():
            try:
                with self.file or contextlib.nullcontext(), contextlib.ExitStack() as stack:
                    if self.config.record is not None:
                        self.recorder = recorder(self.session, resumed=self.file is not None)
                        stack.enter_context(contextlib.closing(self.recorder))
                    if self.config.run_dir is not None:
                        self.files, self.saver = peers.run_everywhere(
                            partial(self._opened, stack), "the run's files"
                        )
                        peers.run_everywhere(self._check_shared, "a look at the run directory")
                    yield from self._passed(self._stages(stack, ending, evaluating), ending)
            except BaseException as error:
                self._add_way_on(error)  # once the stack has closed what saves
                raise
            peers.all_gather(None, "the end of the run")

    def _passed(self, reports: Iterator[Report], ending: StopState) -> Iterator[Report]:
        """Yields the reports of all stages until an error ends the run;
        the reports after it are only saved.
        """
        while True:
            try:
                while (report := self._next(reports, ending)) is not None:
                    if ending.error is None:
                        yield report
                break
            except BaseException as error:
                # the run's, the caller's, who may leave the loop, or Ctrl-C at any line
                ending.error = error
        if ending.error is not None:
            raise ending.error

    def _next(self, reports: Iterator[Report], ending: StopState) -> Report | None:
        """Returns the next report after all stages. Ctrl-C waits for it:
        it would otherwise lose an update.
        """

        def interrupt() -> None:
            ending.error = ending.error or KeyboardInterrupt()

        try:
            with signals.deferring(interrupt):
                return next(reports, None)
        except Exception as error:
            if ending.error is None:
                raise
            lost = "what the run has learnt since its last checkpoint is lost"
            return warnings.warn(f"{lost}: {first_line(error)}", FileWarning, stacklevel=2)

    def _opened(self, stack: contextlib.ExitStack) -> tuple[RunFiles | None, Saver]:
        """Opens the files, and what saves this process's part of checkpoints;
        ``stack`` closes them.
        """
        stored = to_json(self.config, self.session.job.source.spec)
        files = None
        if peers.first():
            files = open_files(
                stack, self.config, stored, self.file, self.session.progress.get("reported", {})
            )
        about = {"config": stored, "versions": machine.versions(), "judge": self.config.judge}
        saver = Saver(
            self.folder, self.config.keep_checkpoints, about, self.config.clock, self.session.step
        )
        return files, stack.enter_context(contextlib.closing(saver))

    def _check_shared(self) -> None:
        """Checks that this process sees the files of process 0,
        beside which it writes its pieces of checkpoints.

        Raises:
          ConfigError: it does not.
        """
        path = self.folder / run_files.METRICS
        if not peers.first() and not directories.appears(path):
            raise ConfigError(
                f"process {peers.index()} does not see {path}, which process 0 has made: --run-dir must be on a file "
                "system that all hosts share"
            )

    def _stages(
        self, stack: contextlib.ExitStack, ending: StopState, evaluating: Callable[[int], None]
    ) -> Iterator[Report]:
        """Returns the plan's reports, evaluated, written and saved when due;
        ``stack`` closes the plan.
        """
        config = self.config
        shared = self.shared
        files = self.files
        saver = self.saver
        offered: list[Callable[[], Report]] = []
        session = self.session._replace(
            stop=ending,
            excluded_seconds=lambda: shared.excluded_seconds,
            publish_latest=offered.append,
            record=self.recorder,
        )
        evaluate = partial(self._evaluate, ending.ends_here)
        judged = config.judge == "evaluation"

        def newest() -> Report | None:
            try:
                report = offered[0]() if offered else None
            except RuntimeError:
                raise RuntimeError(
                    "the update that failed has used up the state that it began with"
                ) from None
            if report and report.step > session.step:
                return report
            return None

        def save(report: Report) -> None:
            if saver is not None:
                evaluated = (report.evaluation or {}).get("return_mean")
                saver.save(
                    report.checkpoint(), evaluated if judged else recent_return(report.metrics)
                )

        def confirm(report: Report) -> Report:
            if not peers.broadcast(
                report.evaluation is not None, "whether the last policy is evaluated"
            ):
                return report
            save(report)  # again: the last policy is judged, too
            return self._confirm(ending.ends_here, evaluating, report)

        reported = step_of(config, session.progress.get("reported", {}))
        together: Callable[[int, Callable[[], bool]], bool] = alone
        if judged:
            together = partial(shared.agree, "evaluate")
        evaluations = Evaluations(
            config, session.progress.get("evaluated", reported), ending, together
        )
        if self.program is None:
            plan: Any = plans.execute(session)
        else:
            plan = self.program.reports(self.place, session)
        stack.enter_context(contextlib.closing(plan))
        measured = measuring(plan, shared, session.job, lambda: self.hyper)
        reports = evaluations.on_the_way(with_final_report(measured, newest, ending), evaluate)
        last = partial(evaluate, progress=evaluating)
        films = partial(self._film, ending.ends_here)
        if config.run_dir:
            if session.resumed is None:
                done = None
            else:
                done = (session.step, session.updates)
            reports = filming(
                writing(reports, files, shared.saving),
                films,
                config.video_interval,
                session.step,
                ending,
            )
            reports = saving(
                reports,
                save,
                saver,
                files,
                config,
                done,
                ending,
                agree=partial(shared.agree, "save"),
            )
        return evaluations.at_the_end(
            reports, last, files, confirm if judged and config.run_dir else None
        )

    def _add_way_on(self, error: BaseException) -> None:
        """Adds a note that tells how to continue from the state that a failed run has saved,
        if it has saved one.
        """
        notes = getattr(error, "__notes__", ())  # by another member
        newest = (self.saver and self.saver.newest) or (self.session.resumed and self.session.step)
        if newest is None or any(self.shared.command in note for note in notes):
            return
        run_dir = shlex.quote(str(self.config.run_dir))
        if isinstance(error, DivergedError):
            error.add_note(
                f"its last finite variables are saved: `--init-from {run_dir}` starts a new run from them"
            )
        else:
            way_on = f"`{self.shared.command}` continues from {newest} {unit(self.config.clock)}"
            error.add_note(f"the run is saved: {way_on}")

    def _evaluate(
        self,
        stop: Callable[[], bool],
        report: Report,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Report:
        """Adds an evaluation, as ``_play``."""
        # other processes may hold parts of them
        variables = self.session.job.source.spec.keyed(report.variables())
        played = self._play(variables, progress, stop)
        if played is None:
            return report
        return dataclasses.replace(report, evaluation=played)

    def _play(
        self,
        variables: Any,
        progress: Callable[[int], None],
        stop: Callable[[], bool],
        *,
        fresh: bool = False,
    ) -> Mapping[str, float | int] | None:
        """Returns the numbers of an evaluation, or of a ``fresh`` one; None: stopped, failed,
        or of another process.
        """
        evaluator = self.shared.evaluator.of_member(self.config.seed, self.hyper, fresh=fresh)
        began = time.perf_counter()
        played = None
        try:
            if peers.first():
                played = evaluator.play(variables, progress, stop=stop)
        except (EnvError, TimeoutError) as error:
            if self.config.on_actor_error == "raise":
                raise
            warnings.warn(
                f"the evaluation could not be finished: {error}", EnvWarning, stacklevel=2
            )
        self.shared.excluded_seconds += time.perf_counter() - began
        if played is None:
            return None
        return scored(played.summary(), self.config.data)

    def _confirm(
        self, stop: Callable[[], bool], progress: Callable[[int], None], report: Report
    ) -> Report:
        """Adds the evaluation of the best checkpoint in fresh episodes:
        those that chose it would flatter it.
        """
        assert self.saver is not None
        self.saver.finish()
        # other processes may hold parts of them
        variables = self.session.job.source.spec.keyed(report.variables())
        if not peers.first():
            return report
        try:
            number = checkpoint.number_of(checkpoint.chosen(self.folder, "best"))
            best = checkpoint.load_variables(self.folder, variables, which=number)
        except ConfigError as error:
            warnings.warn(
                f"the best checkpoint is not evaluated: {error}", FileWarning, stacklevel=2
            )
            return report
        if (played := self._play(best, progress, stop, fresh=True)) is None:
            return report
        return dataclasses.replace(report, best_evaluation={"checkpoint": number, **played})

    def _film(self, stop: Callable[[], bool], report: Report) -> None:
        """Sends a film of an episode to the trackers. A failure is a warning, once,
        and ends the films, not the run.
        """
        began = time.perf_counter()
        spec = self.session.job.source.spec
        # Also where films have ended, which the others do not know:
        # each process may hold parts of the variables.
        variables = spec.keyed(report.variables())
        try:
            if self.shared.films and self.files is not None:
                evaluator = self.shared.filmed().of_member(self.config.seed, self.hyper)
                if (filmed := film(evaluator, spec, variables, 1, stop=stop)) is not None:
                    write_gif(filmed[1], gif := io.BytesIO(), speed(spec))
                    self.files.film(report.step, gif.getvalue(), filmed[1][0].size)
        except Exception as error:  # whatever a renderer raises
            self.shared.films = False
            warnings.warn(
                f"--video-interval: there will be no films: {first_line(error)}",
                EnvWarning,
                stacklevel=2,
            )
        self.shared.excluded_seconds += time.perf_counter() - began


def open_files(
    stack: contextlib.ExitStack,
    config: Train,
    stored: dict[str, Any],
    file: IO[bytes] | None,
    done: Mapping[str, int],
) -> RunFiles:
    """Opens the files of a run, or of a member; ``stack`` closes them.

    Args:
      stored: the config, as the files hold it.
      file: open ``metrics.jsonl`` of a resumed run.
      done: counts of the last report before the checkpoint; {}: a new run.
    """
    assert config.run_dir is not None
    if file is None:
        run_files.claim(config.run_dir)
    directory = pathlib.Path(config.run_dir)
    file = stack.enter_context(file or run_files.lock(config.run_dir))
    with run_files.freeing(directory):
        others = []
        if not is_population(config):  # its members send their own
            others = trackers.start(stack, config, directory, stored, done.get(config.clock))
        files = RunFiles(directory, file, stored, done.get("iteration"), others)
    return stack.enter_context(files)
