"""A run that is ready to start, and what it writes and evaluates on its way."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from jaxrl_dist import algorithms
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.checks import counted
from jaxrl_dist.config import Train, env_name
from jaxrl_dist.errors import ConfigError, EnvError, EnvWarning
from jaxrl_dist.plans import PLANS
from jaxrl_dist.plans.job import Job
from jaxrl_dist.run import checkpoint, trackers
from jaxrl_dist.run import files as run_files
from jaxrl_dist.training.stored import to_json
from jaxrl_dist.types import Checkpoint, Report


def _passed(interval: int | None, before: int, now: int) -> bool:
    """Whether a multiple of the interval is above the one number and not above the other; None or 0: there is none."""
    return interval is not None and interval > 0 and now // interval > before // interval


def _evaluated(resumed: Checkpoint) -> int:
    """The env steps of the newest report that was evaluated, or that had no need to be."""
    progress = resumed.progress
    return progress.get("evaluated", progress["reported"]["env_steps"])


class Run(NamedTuple):
    """A training run that is ready to start."""

    config: Train[Any]  # resolved: nothing is left open
    job: Job
    file: IO[bytes] | None = None  # the metrics of a run that is resumed, by which it is locked

    def reports(self, evaluating: Callable[[int], None] = lambda done: None) -> Iterator[Report]:
        """As ``train``; ``evaluating`` hears how many episodes of the evaluation at the end are done.

        Raises:
          ConfigError: at once, if the run directory cannot be written or holds a run already.
        """
        if self.file is None and self.config.run_dir:
            run_files.claim(self.config.run_dir)
        return self._reports(evaluating)

    def _reports(self, evaluating: Callable[[int], None]) -> Iterator[Report]:
        config, away = self.config, 0.0
        job = self.job._replace(away=lambda: away)
        evaluator = self._evaluator()
        # The newest report that lacks no evaluation: a run that is resumed evaluates where it would have anyway.
        evaluated = 0 if job.resumed is None else _evaluated(job.resumed)
        with contextlib.ExitStack() as stack:
            files = saver = None
            if config.run_dir:
                file = stack.enter_context(self.file or run_files.lock(config.run_dir))
                resumed = None if job.resumed is None else job.resumed.progress["reported"]["iteration"]
                directory, kept = pathlib.Path(config.run_dir), to_json(config, self.job.source.spec)
                before = None if job.resumed is None else job.resumed.progress["reported"]["env_steps"]
                try:
                    others = trackers.start(config, directory, kept, before)
                except ConfigError:
                    if resumed is None:
                        (directory / run_files.METRICS).unlink()  # else the directory would seem to hold a run
                    raise
                for tracker in others:
                    stack.callback(trackers.close, tracker)
                files = run_files.RunFiles(directory, file, kept, resumed, others)
                stack.enter_context(contextlib.closing(files))
                saver = stack.enter_context(contextlib.closing(checkpoint.Saver(directory, config.keep_checkpoints)))
                about = {"config": kept, "versions": run_files.versions()}
            saved_steps = job.env_steps
            for report in PLANS[config.plan].run(job):
                last = report.env_steps >= config.total_env_steps
                before, to_evaluate = evaluated, _passed(config.evaluation_interval, evaluated, report.env_steps)
                if to_evaluate and not last and not job.stop():
                    began = time.perf_counter()
                    report = self._evaluate(evaluator, report, stop=job.stop)
                    away += time.perf_counter() - began
                if last or report.evaluation or not to_evaluate:  # else it is made with the next report
                    evaluated = report.env_steps
                ends = last or job.stop()
                if files and saver:
                    files.write(report)
                    if last:  # before the checkpoint, which is larger, and the evaluation, which may be long
                        checkpoint.save_variables(files.path, report.variables())
                        files.finish(report)
                    due = _passed(config.checkpoint_interval, saved_steps, report.env_steps)
                    known = job.resumed is not None and report.env_steps == job.env_steps
                    # Training does not wait for the disk: while a checkpoint is being written, the next is put off.
                    if not known and (ends or (due and not saver.busy())):
                        whole = self._trimmed(report.checkpoint())
                        again = whole.progress["since"] is not None  # when the interval of this report is over
                        progress = {**whole.progress, "evaluated": before if again else evaluated}
                        whole = whole._replace(progress=progress)
                        saver.save(whole, about, report.metrics["episode/return"])
                        saved_steps = report.env_steps
                    if ends:
                        saver.finish()
                if last and config.evaluation_episodes:
                    report = self._evaluate(evaluator, report, evaluating, stop=job.stop)
                    if files:
                        if to_evaluate:
                            files.write(report)
                        files.finish(report)
                yield report

    def _trimmed(self, whole: Checkpoint) -> Checkpoint:
        """What a checkpoint is to hold of the state."""
        return whole if self.config.checkpoint_replay else whole._replace(state=whole.state._replace(memory=()))

    def _evaluator(self) -> Evaluator:
        config, job = self.config, self.job
        episodes, most = config.evaluation_episodes, config.evaluation_max_steps
        return Evaluator(job.algorithm, job.source, episodes, config.seed, most, config.num_envs)

    def _evaluate(
        self,
        evaluator: Evaluator,
        report: Report,
        progress: Callable[[int], None] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Report:
        """The report with an evaluation, or without if it is stopped, or environments fail and that is forgiven."""
        try:
            played = evaluator.play(report.variables(), progress, stop=stop)
        except (EnvError, TimeoutError) as error:
            if self.config.on_actor_error == "raise":
                raise
            warnings.warn(f"the evaluation could not be finished: {error}", EnvWarning, stacklevel=2)
            return report
        return report if played is None else dataclasses.replace(report, evaluation=played.summary())

    def describe(self, name: str | None = None) -> str:
        """One line on what runs where, for people; ``name`` is what they call the algorithm."""
        config, learning = self.config, self.job.mesh.devices.size
        devices = counted(learning, f"{self.job.mesh.devices.flat[0].platform} device")
        if PLANS[config.plan].threaded:
            acting = f" on {len(self.job.pool.meshes)}" if config.actor_devices else ""
            learner = "learner on " if config.actor_devices else ""
            devices = f"{counted(self.job.pool.num_actors, 'actor')}{acting}, {learner}{devices}"
        return (
            f"{name or algorithms.name_of(config.algorithm)} on {env_name(config.env)}, plan {config.plan}, {devices}, "
            f"{counted(config.num_envs, 'environment')} x {counted(config.rollout_length, 'step')} an iteration"
        )
