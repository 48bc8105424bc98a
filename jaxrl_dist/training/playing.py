"""Plays episodes of a member's policy: evaluations, and films."""

from __future__ import annotations

import dataclasses
import io
import pathlib
import warnings
from collections.abc import Callable, Mapping

from jaxrl_dist.actors.film import film, speed, write_gif
from jaxrl_dist.data.files import scored
from jaxrl_dist.errors import ConfigError, EnvError, EnvWarning, FileWarning, first_line
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans.session import Session
from jaxrl_dist.run import checkpoint
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.training.shared import ProgramShared
from jaxrl_dist.types import PyTree, Report

Progress = Callable[[int], None]
"""Receives the number of episodes done in an evaluation."""


def unshown(done: int) -> None:
    """Shows nothing."""


class Playing:
    """Plays episodes of a member's policy. Process 0 plays; the others give it their variables.

    The time that it takes is no part of the time of training.
    """

    def __init__(
        self,
        session: Session,
        shared: ProgramShared,
        hyper: Callable[[], Mapping[str, float]],
        stop: Callable[[], bool],
    ) -> None:
        """Prepares it.

        Args:
          hyper: returns the member's hyperparameters, which selections change.
          stop: returns whether to end an evaluation early.
        """
        self._config = session.config
        self._spec = session.job.source.spec
        self._shared = shared
        self._hyper = hyper
        self._stop = stop

    def evaluate(self, report: Report, progress: Progress = unshown) -> Report:
        """Adds an evaluation of the report's policy, unless it is stopped or fails."""
        # all processes: each may hold parts of the variables
        variables = self._spec.keyed(report.variables())
        numbers = self._play(variables, progress)
        if numbers is None:
            return report
        return dataclasses.replace(report, evaluation=numbers)

    def evaluate_best(self, report: Report, progress: Progress) -> Report:
        """Adds the evaluation of the best checkpoint in fresh episodes:
        those that chose it would flatter it.
        """
        # all processes: each may hold parts of the variables
        variables = self._spec.keyed(report.variables())
        if not peers.first():
            return report
        folder = pathlib.Path(str(self._config.run_dir))
        try:
            number = checkpoint.number_of(checkpoint.chosen(folder, "best"))
            best = checkpoint.load_variables(folder, variables, which=number)
        except ConfigError as error:
            warnings.warn(
                f"the best checkpoint was not evaluated: {error}", FileWarning, stacklevel=2
            )
            return report
        numbers = self._play(best, progress, fresh=True)
        if numbers is None:
            return report
        return dataclasses.replace(report, best_evaluation={"checkpoint": number, **numbers})

    def _play(
        self, variables: PyTree, progress: Progress, *, fresh: bool = False
    ) -> Mapping[str, float | int] | None:
        """Returns the numbers of an evaluation; None: it was stopped, has failed, or another
        process plays.
        """
        config = self._config
        evaluator = self._shared.evaluator.of_member(config.seed, self._hyper(), fresh=fresh)
        evaluation = None
        with self._shared.excluded():
            try:
                if peers.first():
                    evaluation = evaluator.play(variables, progress, stop=self._stop)
            except (EnvError, TimeoutError) as error:
                if config.on_actor_error == "raise":
                    raise
                warnings.warn(
                    f"the evaluation could not be finished: {error}", EnvWarning, stacklevel=2
                )
        if evaluation is None:
            return None
        return scored(evaluation.summary(), config.data)

    def film(self, report: Report, files: RunFiles | None) -> None:
        """Sends a film of an episode to the trackers. After a failure it warns, once,
        and films no more; the run continues.
        """
        with self._shared.excluded():
            # all processes, even if films have failed in one: each may hold parts of the variables
            variables = self._spec.keyed(report.variables())
            if not self._shared.films or files is None:
                return
            try:
                self._send_film(report.step, variables, files)
            except Exception as error:  # whatever a renderer raises
                self._shared.films = False
                warnings.warn(
                    f"--video-interval: there will be no films: {first_line(error)}",
                    EnvWarning,
                    stacklevel=2,
                )

    def _send_film(self, step: int, variables: PyTree, files: RunFiles) -> None:
        evaluator = self._shared.filmed().of_member(self._config.seed, self._hyper())
        filmed = film(evaluator, self._spec, variables, 1, stop=self._stop)
        if filmed is None:
            return
        _, pictures = filmed
        gif = io.BytesIO()
        write_gif(pictures, gif, speed(self._spec))
        files.film(step, gif.getvalue(), pictures[0].size)
