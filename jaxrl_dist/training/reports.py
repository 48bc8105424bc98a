"""Generators between a plan and the user, which evaluate, write and save each report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from jaxrl_dist.algorithms.wrappers.hindsight import REWARD_ERROR
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import DIVERGED, ConfigError, DivergedError, ProcessError, first_line
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.failing import failed_alike, signalled
from jaxrl_dist.run.saving import Saver, save_variables
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.types import Checkpoint, Report

STOPPED = "stop"
"""``Report.ended_by`` of a run that the caller has ended."""


class StopState:
    """Callable: True once the run must end early, because of a stop request or an error.

    The error is raised after the run's state is saved. In a run over several processes each call is
    a vote, so that all end after the same update.
    """

    def __init__(self, requested: Callable[[], bool]) -> None:
        self.error: BaseException | None = None
        self._requested = requested
        self._finishing = False

    def __call__(self) -> bool:
        return peers.any_of(self.ends_here(), "whether to stop")

    def ends_here(self) -> bool:
        """Returns whether this process must end, without a vote: for its waits and evaluations."""
        return self.error is not None or self._requested() or signalled()

    def finish(self) -> None:
        """Ends the run with the newest report, as ``Report.stop``."""
        self._finishing = True

    def finishes(self) -> bool:
        """Returns whether the caller has ended the run, here or in another process."""
        return peers.any_of(self._finishing, "whether the caller ends the run")

    def failed(self) -> bool:
        """Returns whether an error ends the run, here or in another process,
        whose error then becomes this one's.
        """
        message = None if self.error is None else first_line(self.error)
        for process, problem in enumerate(peers.all_gather(message, "errors")):
            if problem is not None and self.error is None:
                self.error = ProcessError(f"process {process} has ended the run: {problem}")
        return self.error is not None


def with_final_report(
    reports: Iterator[Report], newest: Callable[[], Report | None], ending: StopState
) -> Iterator[Report]:
    """Passes reports on; after an error, yields one more
    report of the newest state for the next stages to save. After ``Report.stop``, yields the report
    again as the last one.

    Args:
      newest: makes that report if the plan itself failed; returns None if it has learnt nothing.
      ending: receives the plan's error. If it holds another stage's error,
        the last report is passed on again.
    """
    report: Report | None = None
    while not ending.failed():
        try:
            if report is not None and ending.finishes():
                if report.ended_by is not None:
                    return
                report = dataclasses.replace(report, ended_by=STOPPED)
            else:
                report = dataclasses.replace(next(reports), stop=ending.finish)
        except StopIteration:
            return
        except BaseException as error:
            ending.error = error
            report = newest() if failed_alike(error) else None
            break
        if report.diverged:
            ending.error = DivergedError(
                f"{DIVERGED} by {_at(report)}: too many losses or gradients in a row were not "
                "finite; start a new run with a smaller --learning-rate, or with smaller rewards "
                "and observations"
            )
        elif _goal_error(report) > GOAL_TOLERANCE:
            ending.error = ConfigError(
                f"--her: the rewards of the goals' function differ from the environment's by "
                f"{_goal_error(report):.3g} on average, up to {_at(report)}; correct --goal-reward "
                "or the environment's function goals"
            )
        yield report
    if report is not None:
        yield report


GOAL_TOLERANCE = 1e-3
"""Share of a reward by which what goals pay may differ: rounding decides at the very distance."""


def _goal_error(report: Report) -> float:
    """Returns the largest ``REWARD_ERROR`` of the report's policies; 0 without goals."""
    errors = [value for name, value in report.metrics.items() if name.endswith(REWARD_ERROR)]
    return max((error for error in errors if error is not None), default=0.0)


def alone(iteration: int, wants: Callable[[], bool]) -> bool:
    """Returns what a run wants after an iteration that agrees with no other member."""
    return wants()


Agree = Callable[[int, Callable[[], bool]], bool]
"""``(iteration, wants) -> answer``, for members that do something after the same iterations."""


class Evaluations:
    """Evaluates the reports at the evaluation interval, and the last one."""

    def __init__(
        self, config: Train, evaluated: int, ending: StopState, agree: Agree = alone
    ) -> None:
        """Begins after an evaluation.

        Args:
          evaluated: the clock of the newest report whose evaluation is done or was not due.
          agree: as for ``saving``, where evaluations judge the checkpoints:
            members save after the same iterations.
        """
        self._interval = config.evaluation_interval
        self._at_the_end = config.evaluation_episodes > 0
        self._evaluated = evaluated
        self._ending = ending
        self._agree = agree
        self._due = False
        """Whether the newest report is at the interval."""

    def on_the_way(
        self, reports: Iterable[Report], evaluate: Callable[[Report], Report]
    ) -> Iterator[Report]:
        """Evaluates at the interval, before the report is written.
        Checkpoints store which evaluations are done.
        """
        for report in reports:
            before = self._evaluated
            last = report.ended_by is not None
            self._due = self._agree(
                report.iteration, partial(passed, self._interval, before, report.step)
            )
            evaluated = False
            if self._due and not last and not self._ending():
                try:
                    report = evaluate(report)
                except BaseException as error:
                    self._ending.error = error
                evaluated = peers.broadcast(
                    report.evaluation is not None, "whether the evaluation is done"
                )
            if last or evaluated or not self._due:  # else the next report is evaluated
                self._evaluated = report.step
            marked = partial(_marked, report.checkpoint, before, self._evaluated)
            yield dataclasses.replace(report, checkpoint=marked)

    def at_the_end(
        self,
        reports: Iterable[Report],
        evaluate: Callable[[Report], Report],
        files: RunFiles | None,
        confirm: Callable[[Report], Report] | None = None,
    ) -> Iterator[Report]:
        """Evaluates the last report after everything else is saved: an evaluation may take long.

        Args:
          confirm: adds the evaluation of the best checkpoint; None:
            evaluations do not judge the checkpoints.
        """
        for report in reports:
            if report.ended_by and self._at_the_end and self._ending.error is None:
                report = evaluate(report)
                if files is not None:
                    send = files.write if self._due else files.track
                    send(report)
                    files.finish(report)
                if confirm is not None:
                    report = confirm(report)
                    if report.best_evaluation and files is not None:
                        files.finish(report)
            yield report


def _marked(copy: Callable[[], Checkpoint], before: int, evaluated: int) -> Checkpoint:
    """Returns a report's checkpoint, with the clock of
    the newest report that needs no more evaluation.
    """
    whole = copy()
    if whole.progress["since"] is not None:  # a resumed run recreates this report
        evaluated = before
    return whole._replace(progress={**whole.progress, "evaluated": evaluated})


def writing(
    reports: Iterable[Report],
    files: RunFiles | None,
    begin: Callable[[Report], None] = lambda report: None,
) -> Iterator[Report]:
    """Adds each report to the metrics, and writes the
    trained variables and the summary with the last one.

    Args:
      files: None: another process writes.
      begin: receives the last report before the variables are written.

    Raises:
      OSError: the variables or the summary cannot be written.
    """
    finished = False
    for report in reports:
        if files is not None:
            files.write(report)
        if report.ended_by and not finished:  # before the checkpoint, which is larger
            finished = True
            begin(report)
            if files is not None:
                files.check_place()
            variables = report.variables()  # other processes may hold parts of them
            if files is not None:
                save_variables(files.path, variables)
                files.finish(report)
        if files is not None:
            report = dataclasses.replace(report, log=partial(files.log, report.iteration))
        yield report


def filming(
    reports: Iterable[Report],
    film: Callable[[Report], None],
    interval: int | None,
    filmed: int,
    ending: StopState,
) -> Iterator[Report]:
    """Films the policy of each report at the interval, after the report is written; ``filmed``:
    env steps done.
    """
    for report in reports:
        if passed(interval, filmed, report.step) and not ending():
            film(report)
        filmed = report.step
        yield report


def saving(
    reports: Iterable[Report],
    save: Callable[[Report], None],
    *,
    saver: Saver | None,
    files: RunFiles | None,
    config: Train,
    saved: tuple[int, int] | None,
    ending: StopState,
    clock: Callable[[], float] = time.monotonic,
    agree: Agree = alone,
) -> Iterator[Report]:
    """Saves a checkpoint by the run's clock, by time, at the end of the run,
    and with each evaluation that judges it.

    Training does not wait for the disk: while a checkpoint is being written, the next one is
    postponed, except for one that is judged.

    Args:
      save: all processes must call it, since each may hold parts of the state.
      saver: saves what this process has of the state.
      files: None: process 0 writes them.
      saved: clock and updates of the checkpoint that the run was resumed from; None: a new run.
      clock: returns seconds.
      agree: members of a population save on the way after the same iterations.

    Raises:
      OSError: the last checkpoint cannot be written.
    """
    saved_at = clock()

    def due(report: Report) -> bool:
        return peers.any_of(due_here(report), "whether to save")

    def due_here(report: Report) -> bool:
        if saver is None or files is None:
            return False
        late = 0 < config.checkpoint_minutes * 60 <= clock() - saved_at
        before = saved[0] if saved else 0
        wanted = late or passed(config.checkpoint_interval, before, report.step)
        judged = config.judge == "evaluation" and report.evaluation is not None
        return (judged or (wanted and not saver.busy())) and files.in_place()

    for report in reports:
        ends = report.ended_by is not None or ending()
        # a free-running learner makes updates without new env steps
        progress = report.step, report.updates
        if progress != saved and (ends or agree(report.iteration, partial(due, report))):
            if ends and files is not None:
                files.check_place()
            save(report)
            saved = progress
            saved_at = clock()
        if ends and saver is not None:
            saver.finish()
        yield report


def _at(report: Report) -> str:
    """Says when a report was made."""
    if report.clock == "env_steps":
        return f"environment step {report.step:,}"
    return f"update {report.step:,}"


def passed(interval: int | None, before: int, now: int) -> bool:
    """Returns True if ``before < k * interval <= now`` for an integer ``k``;
    False for an interval of None or 0.
    """
    return interval is not None and interval > 0 and now // interval > before // interval
