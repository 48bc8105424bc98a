"""A member of a training run, with its session in this process; most runs have one."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shlex
from collections.abc import Callable, Generator, Mapping
from typing import IO

from jaxrl_dist import plans
from jaxrl_dist.checks import unit
from jaxrl_dist.config.train import Train
from jaxrl_dist.data.recorder import Recorder
from jaxrl_dist.errors import DivergedError
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.failing import failing
from jaxrl_dist.plans.population import Population
from jaxrl_dist.plans.session import Session
from jaxrl_dist.training.opening import Output, open_output
from jaxrl_dist.training.pipeline import Pipeline, until_error
from jaxrl_dist.training.playing import Progress
from jaxrl_dist.training.recording import recorder
from jaxrl_dist.training.reports import StopState
from jaxrl_dist.training.rows import ENDED, Row, refill
from jaxrl_dist.training.shared import ProgramShared
from jaxrl_dist.types import Report


@dataclasses.dataclass(eq=False)
class Member:
    """A member of a run, which may have only one."""

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
    output: Output = dataclasses.field(default_factory=Output)
    """What writes its files in this session."""
    recorder: Recorder | None = None
    """Takes its experience; None: nothing records it."""

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

    def take(self, report: Report, number: int) -> None:
        """Takes the member's next report; ``number`` is its number in the population."""
        row = self.row
        self.newest = report
        row.take(report)
        row.env_steps = report.env_steps
        row.updates = report.updates
        row.iteration = report.iteration
        if self.halved:
            row.status = "halved"
        elif report.ended_by:
            row.status = "done"
        parent = report.metrics.get("population/parent", number)
        if parent is None or parent == number:
            return
        hyper = {
            name.removeprefix("hyper/"): value
            for name, value in report.metrics.items()
            if name.startswith("hyper/")
        }
        row.lineage.append(
            {
                "env_steps": row.env_steps,
                "iteration": row.iteration,
                "parent": f"{int(parent):03d}",
                "hyper": hyper,
            }
        )

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
        if self.newest is not None:
            self.newest = dataclasses.replace(self.newest, config=self.config)
        state = self.session.resumed
        if self.newest is not None and self.row.status == "training":
            self.newest = dataclasses.replace(self.newest, evaluation=None, ended_by=None)
        elif self.newest is not None and self.row.status in ENDED and state is not None:
            self.newest = dataclasses.replace(
                self.newest, variables=lambda: state.state.variables, checkpoint=lambda: state
            )

    def reports(self, progress: Progress, stop: Callable[[], bool]) -> Generator[Report]:
        """Yields the reports of the pipeline. Saves the run if an error ends it or the caller
        leaves.

        Args:
          progress: receives the number of episodes done in the last evaluation.
          stop: returns whether to end early.
        """
        ending = StopState(lambda: stop() or self.halved)
        with failing():
            try:
                with self.file or contextlib.nullcontext(), contextlib.ExitStack() as stack:
                    pipeline = self._pipeline(stack, ending)
                    plan = self._plan(pipeline.session)
                    stack.enter_context(contextlib.closing(plan))
                    yield from until_error(pipeline.reports(plan, progress), ending)
            except BaseException as error:
                self._note_way_on(error)  # once the stack has closed what saves
                raise
            peers.all_gather(None, "the end of the run")

    def _pipeline(self, stack: contextlib.ExitStack, ending: StopState) -> Pipeline:
        """Opens what records, writes and saves; ``stack`` closes it."""
        session = self.session
        if self.config.record is not None:
            self.recorder = recorder(session, resumed=self.file is not None)
            stack.enter_context(contextlib.closing(self.recorder))
        self.output = open_output(stack, session, self.file)
        return Pipeline(
            session, self.shared, self.output, ending, lambda: self.hyper, self.recorder
        )

    def _plan(self, session: Session) -> Generator[Report]:
        if self.program is None:
            return plans.execute(session)
        return self.program.reports(self.place, session)

    def _note_way_on(self, error: BaseException) -> None:
        """Adds a note that tells how to continue from the state that a failed run has saved,
        if it has saved one.
        """
        notes = getattr(error, "__notes__", ())  # by another member
        saver = self.output.saver
        newest = saver.newest if saver is not None else None
        if newest is None and self.session.resumed is not None:
            newest = self.session.step
        if newest is None or any(self.shared.command in note for note in notes):
            return
        run_dir = shlex.quote(str(self.config.run_dir))
        if isinstance(error, DivergedError):
            error.add_note(
                "its last finite variables are saved; start a new run from them with `--init-from "
                f"{run_dir}`"
            )
        else:
            error.add_note(
                f"the run is saved: `{self.shared.command}` continues from {newest} "
                f"{unit(self.config.clock)}"
            )
