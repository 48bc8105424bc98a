"""The pipeline of a member's reports: its stages evaluate, write and save them on the way from the
plan to the user.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from jaxrl_dist.data.recorder import Recorder
from jaxrl_dist.errors import FileWarning, first_line
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans.session import Session, step_of
from jaxrl_dist.plans.window import recent_return
from jaxrl_dist.run import signals
from jaxrl_dist.training.opening import Output
from jaxrl_dist.training.playing import Playing, Progress
from jaxrl_dist.training.reports import (
    Evaluations,
    StopState,
    alone,
    filming,
    saving,
    with_final_report,
    writing,
)
from jaxrl_dist.training.shared import ProgramShared
from jaxrl_dist.training.truth import measuring
from jaxrl_dist.types import Report


class Pipeline:
    """The stages that a member's reports pass."""

    def __init__(
        self,
        session: Session,
        shared: ProgramShared,
        output: Output,
        ending: StopState,
        hyper: Callable[[], Mapping[str, float]],
        recorder: Recorder | None,
    ) -> None:
        """Prepares the stages.

        Args:
          hyper: returns the member's hyperparameters, which selections change.
          recorder: takes the member's experience; None: nothing records it.
        """
        self._config = session.config
        self._shared = shared
        self._output = output
        self._ending = ending
        self._hyper = hyper
        self._judged = session.config.judge == "evaluation"
        self._playing = Playing(session, shared, hyper, ending.ends_here)
        self._make_latest: Callable[[], Report] | None = None
        self.session = session._replace(
            stop=ending,
            excluded_seconds=lambda: shared.excluded_seconds,
            publish_latest=self._publish_latest,
            record=recorder,
        )
        """The session that the plan executes: it calls the pipeline."""

    def reports(self, plan: Iterator[Report], progress: Progress) -> Iterator[Report]:
        """Returns the reports of a plan that executes ``session``, evaluated, written and saved
        when that is due.

        Args:
          progress: receives the number of episodes done in the last evaluation.
        """
        config = self._config
        shared = self._shared
        session = self.session
        ending = self._ending
        files, saver = self._output
        evaluations = self._evaluations()
        confirm = None
        reports = measuring(plan, shared, session.job, self._hyper)
        reports = with_final_report(reports, self._latest, ending)
        reports = evaluations.on_the_way(reports, self._playing.evaluate)
        if config.run_dir:
            reports = writing(reports, files, shared.saving)
            film = partial(self._playing.film, files=files)
            reports = filming(reports, film, config.video_interval, session.step, ending)
            saved = None if session.resumed is None else (session.step, session.updates)
            agree = partial(shared.agree, "save")
            reports = saving(
                reports,
                self._save,
                saver=saver,
                files=files,
                config=config,
                saved=saved,
                ending=ending,
                agree=agree,
            )
            if self._judged:
                confirm = partial(self._confirm, progress)
        last = partial(self._playing.evaluate, progress=progress)
        return evaluations.at_the_end(reports, last, files, confirm)

    def _evaluations(self) -> Evaluations:
        progress = self.session.progress
        reported = step_of(self._config, progress.get("reported", {}))
        agree: Callable[[int, Callable[[], bool]], bool] = alone
        if self._judged:
            agree = partial(self._shared.agree, "evaluate")
        return Evaluations(self._config, progress.get("evaluated", reported), self._ending, agree)

    def _publish_latest(self, make_latest: Callable[[], Report]) -> None:
        self._make_latest = make_latest

    def _latest(self) -> Report | None:
        """Returns a report of the newest state of a plan that has failed; None: it has learnt
        nothing.
        """
        if self._make_latest is None:
            return None
        try:
            report = self._make_latest()
        except RuntimeError:
            raise RuntimeError(
                "the update that failed has used up the state that it began with"
            ) from None
        if report.step > self.session.step:
            return report
        return None

    def _save(self, report: Report) -> None:
        """Saves a checkpoint, with the return that judges it."""
        saver = self._output.saver
        if saver is None:
            return
        if self._judged:
            score = (report.evaluation or {}).get("return_mean")
        else:
            score = recent_return(report.metrics)
        saver.save(report.checkpoint(), score)

    def _confirm(self, progress: Progress, report: Report) -> Report:
        """Saves the evaluated last policy, and adds an evaluation of the best checkpoint."""
        evaluated = peers.broadcast(
            report.evaluation is not None, "whether the last policy is evaluated"
        )
        if not evaluated:
            return report
        self._save(report)  # again: the last policy is judged, too
        assert self._output.saver is not None
        self._output.saver.finish()
        return self._playing.evaluate_best(report, progress)


def until_error(reports: Iterator[Report], ending: StopState) -> Iterator[Report]:
    """Yields the reports of a pipeline until an error ends the run, and raises the error;
    the reports after it are only saved.
    """
    while True:
        try:
            while (report := _next(reports, ending)) is not None:
                if ending.error is None:
                    yield report
            break
        except BaseException as error:
            # the run's, the caller's, who may leave the loop, or Ctrl-C at any line
            ending.error = error
    if ending.error is not None:
        raise ending.error


def _next(reports: Iterator[Report], ending: StopState) -> Report | None:
    """Returns the next report; None: there is none. Ctrl-C waits for it:
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
        warnings.warn(
            f"what the run has learnt since its last checkpoint is lost: {first_line(error)}",
            FileWarning,
            stacklevel=2,
        )
        return None
