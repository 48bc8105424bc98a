"""A prepared training run, which evaluates, writes and saves the reports of its plan."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import pathlib
import shlex
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import IO, Any, NamedTuple

from jaxrl_dist import algorithms, plans
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.checks import counted
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train, env_name, split_env
from jaxrl_dist.errors import ConfigError, DivergedError, EnvError, EnvWarning, FileWarning
from jaxrl_dist.hosts import peers, start
from jaxrl_dist.plans.job import Job
from jaxrl_dist.run import directories, machine, signals, trackers
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run.arrays import first_line
from jaxrl_dist.run.saving import PieceSaver, Saver
from jaxrl_dist.settings.policies import Policies, label
from jaxrl_dist.settings.stored import module_of_user, to_json
from jaxrl_dist.training.reports import Ending, Evaluations, saving, surviving, writing
from jaxrl_dist.types import Checkpoint, Report


class Shared:
    """State that the members of a population share; a single run has its own."""

    def __init__(self, evaluator: Evaluator, run_dir: str | None) -> None:
        """``run_dir`` is the population's, or the run's."""
        self.evaluator, self.run_dir = evaluator, run_dir
        self.away = 0.0
        """Seconds that were not spent on training, such as on evaluations."""
        self._asked: tuple[int, bool] = -1, False

    def agree(self, iteration: int, wants: Callable[[], bool]) -> bool:
        """Returns the answer of the member that asks first after an iteration, so that all save after the same one."""
        if self._asked[0] != iteration:
            self._asked = iteration, wants()
        return self._asked[1]


class Run(NamedTuple):
    """A training run that is ready to start."""

    config: Train[Any]  # resolved: no field is left out
    job: Job
    file: IO[bytes] | None = None  # open metrics.jsonl of a resumed run; holding it locks the run
    shared: Shared | None = None  # with the other members of a population; None: this is a single run
    execute: Callable[[Job], Iterator[Report]] | None = None  # runs a member of a population; None: the config's plan

    @property
    def env_steps(self) -> int:
        """Env steps done before this session."""
        return self.job.env_steps

    @property
    def total_env_steps(self) -> int:
        """Env steps at the end."""
        return self.config.total_env_steps

    def stopped_by(self, stop: Callable[[], bool]) -> Run:
        """Returns the run with a function that says whether to end early."""
        return self._replace(job=self.job._replace(stop=stop))

    def reports(self, evaluating: Callable[[int], None] = lambda done: None) -> Iterator[Report]:
        """As ``train``; ``evaluating`` receives the number of episodes done in the last evaluation.

        Raises:
          ConfigError: at once, if the run directory cannot be written or holds a run already.
        """
        with start.failing():
            if self.file is None and self.config.run_dir and peers.first():
                run_files.check_free(self.config.run_dir)
        reports = self._reports(evaluating)
        UNFINISHED.add(reports)
        return reports

    def _reports(self, evaluating: Callable[[int], None]) -> Generator[Report]:
        """Yields the reports of all stages. Saves the run if an error ends it or the caller leaves."""
        ending = Ending(self.job.stop)
        with start.failing():
            with contextlib.ExitStack() as stack:
                files: run_files.RunFiles | None = None
                saver: Saver | PieceSaver | None = None
                if self.config.run_dir is not None:
                    files, saver = peers.attempt(partial(self._opened, stack), "the run's files")
                    peers.attempt(self._check_shared, "a look at the run directory")
                reports = self._stages(stack, files, saver, ending, evaluating)
                while (report := self._next(reports, ending)) is not None:
                    if ending.error is None:  # after an error, the report is only saved
                        try:
                            yield report
                        except BaseException as error:  # raised by the caller, or the caller left the loop
                            ending.error = error
            if ending.error is not None:
                if saver is not None and saver.newest is not None:
                    said = getattr(ending.error, "__notes__", ())  # by another member, if a population ends
                    if not any(self.resume_command() in note for note in said):
                        ending.error.add_note(self._way_on(ending.error, saver.newest))
                raise ending.error
            peers.gather(None, "the end of the run")

    def _next(self, reports: Iterator[Report], ending: Ending) -> Report | None:
        """Returns the next report after all stages. Ctrl-C waits for it: it would otherwise lose an update."""

        def interrupt() -> None:
            ending.error = ending.error or KeyboardInterrupt()

        try:
            with signals.deferring(interrupt):
                return next(reports, None)
        except Exception as error:
            if ending.error is None:
                raise
            text = f"what the run has learnt since its last checkpoint is lost: {first_line(error)}"
            warnings.warn(text, FileWarning, stacklevel=2)
            return None

    def _opened(self, stack: contextlib.ExitStack) -> tuple[run_files.RunFiles | None, Saver | PieceSaver]:
        return self._files(stack) if peers.first() else (None, self._pieces(stack))

    def _files(self, stack: contextlib.ExitStack) -> tuple[run_files.RunFiles, Saver]:
        """Opens the run's files; ``stack`` closes them."""
        config, resumed = self.config, self.job.resumed
        assert config.run_dir is not None
        if self.file is None:
            run_files.claim(config.run_dir)
        directory, kept = pathlib.Path(config.run_dir), to_json(config, self.job.source.spec)
        file = stack.enter_context(self.file or run_files.lock(config.run_dir))
        reported = None if resumed is None else resumed.progress["reported"]
        with run_files.freeing(directory):
            others = trackers.start(config, directory, kept, reported and reported["env_steps"])
            for tracker in others:
                stack.callback(trackers.close, tracker)
            files = run_files.RunFiles(directory, file, kept, reported and reported["iteration"], others)
        stack.enter_context(contextlib.closing(files))
        about = {"config": kept, "versions": machine.versions()}
        saver = Saver(directory, config.keep_checkpoints, about)
        return files, stack.enter_context(contextlib.closing(saver))

    def _pieces(self, stack: contextlib.ExitStack) -> PieceSaver:
        """Returns what saves this process's part of checkpoints; ``stack`` closes it."""
        assert self.config.run_dir is not None
        return stack.enter_context(contextlib.closing(PieceSaver(pathlib.Path(self.config.run_dir))))

    def _check_shared(self) -> None:
        """Checks that this process sees the files of process 0, beside which it writes its pieces of checkpoints.

        Raises:
          ConfigError: it does not.
        """
        path = pathlib.Path(str(self.config.run_dir), run_files.METRICS)
        if not peers.first() and not directories.appears(path):
            raise ConfigError(
                f"process {peers.index()} does not see {path}, which process 0 has made: --run-dir must be on a file "
                "system that all hosts share"
            )

    def _stages(
        self,
        stack: contextlib.ExitStack,
        files: run_files.RunFiles | None,
        saver: Saver | PieceSaver | None,
        ending: Ending,
        evaluating: Callable[[int], None],
    ) -> Iterator[Report]:
        """Returns the plan's reports, evaluated, written and saved when due; ``stack`` closes the plan."""
        config, shared = self.config, self.shared or self.alone()
        offered: list[Callable[[], Report]] = []
        job = self.job._replace(stop=ending, away=lambda: shared.away, offer=offered.append)
        evaluator = shared.evaluator.of_member(config.seed, job.hyper)

        def evaluate(report: Report, **options: Any) -> Report:
            began = time.perf_counter()
            report = self._evaluate(evaluator, report, stop=ending.here, **options)
            shared.away += time.perf_counter() - began
            return report

        def newest() -> Report | None:
            try:
                report = offered[0]() if offered else None
            except RuntimeError:
                raise RuntimeError("the update that failed has used up the state that it began with") from None
            return report if report and report.env_steps > job.env_steps else None

        def save(report: Report) -> None:
            if saver is not None:
                saver.save(report.checkpoint(), report.metrics["episode/return"])

        evaluations = Evaluations(config, 0 if job.resumed is None else _evaluated(job.resumed), ending)
        plan: Any = (self.execute or plans.execute)(job)
        stack.enter_context(contextlib.closing(plan))
        reports = evaluations.on_the_way(surviving(plan, newest, ending), evaluate)
        if config.run_dir:
            done = None if job.resumed is None else (job.env_steps, job.updates)
            reports = writing(reports, files)
            reports = saving(reports, save, saver, files, config, done, ending, agree=shared.agree)
        return evaluations.at_the_end(reports, partial(evaluate, progress=evaluating), files)

    def _way_on(self, error: BaseException, env_steps: int) -> str:
        """Returns a note that tells how to continue from the state that a failed run saved."""
        run_dir = shlex.quote(str(self.config.run_dir))
        if isinstance(error, DivergedError):
            return f"its last finite variables are saved: `--init-from {run_dir}` starts a new run from them"
        return f"the run is saved: `{self.resume_command()}` goes on from {env_steps} env steps"

    def resume_command(self) -> str:
        """Returns the command, or in Python the call, that resumes the run, and says what no file may."""
        run_dir = str(self.shared.run_dir if self.shared else self.config.run_dir)
        words = ["jaxrl-dist", "resume", run_dir]
        if not isinstance(self.config.env, str):
            return f"jaxrl_dist.resume({run_dir!r}, env=...{', wandb=True' if self.config.wandb else ''})"
        if module_of_user(self.config.env) is not None:
            words += ["--env", self.config.env]
        kind = type(self.config.algorithm)
        if kind is not Policies and algorithms.name_of(kind) not in algorithms.ALGORITHMS:
            words += ["--algorithm", getattr(sys.modules.get(kind.__module__), "__file__", None) or "FILE.py"]
        return shlex.join([*words, *(["--wandb"] if self.config.wandb else [])])

    def alone(self, run_dir: str | None = None) -> Shared:
        """Returns the ``Shared`` of a single run; ``run_dir`` is that of its population, if it has one."""
        config, job = self.config, self.job
        sizes = config.evaluation_episodes, config.seed, config.evaluation_max_steps, config.num_envs
        sampled = config.evaluation_policy == "sampled"

        def make(job: Job) -> Evaluator:
            return Evaluator(job.algorithm, job.source, *sizes, lambda hyper: job.variant(hyper)[0], sampled)

        of_any_seed = "evaluator", sizes[0], *sizes[2:], sampled
        return Shared(job.once(of_any_seed, make), run_dir or config.run_dir)

    def _evaluate(
        self,
        evaluator: Evaluator,
        report: Report,
        progress: Callable[[int], None] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Report:
        """Adds an evaluation, unless it is stopped, or environments fail under ``--on-actor-error restart``."""
        variables = report.variables()  # other processes may hold parts of them
        if not peers.first():
            return report
        try:
            played = evaluator.play(variables, progress, stop=stop)
        except (EnvError, TimeoutError) as error:
            if self.config.on_actor_error == "raise":
                raise
            warnings.warn(f"the evaluation could not be finished: {error}", EnvWarning, stacklevel=2)
            return report
        return report if played is None else dataclasses.replace(report, evaluation=played.summary())

    def describe(self, name: str | None = None) -> str:
        """Describes the run and its devices in one line; ``name``: the user's name for the algorithm."""
        config, learning = self.config, self.job.mesh.devices.size
        devices = counted(learning, f"{self.job.mesh.devices.flat[0].platform} device")
        if PLANS[config.plan].threaded:
            acting = f" on {len(self.job.pool.meshes)}" if config.actor_devices else ""
            learner = "learner on " if config.actor_devices else ""
            devices = f"{counted(self.job.pool.num_actors, 'actor')}{acting}, {learner}{devices}"
        env = env_name(config.env)
        _, module, made_by = split_env(env)
        env = f"{module}:{made_by}" if module else env  # the user's own name for it
        count = self.job.source.spec.num_agents
        agents = f"{counted(count, 'agent')} x " if count > 1 else ""
        return (
            f"{name or label(config.algorithm)} on {env}, plan {config.plan}, {devices}, "
            f"{counted(config.num_envs, 'environment')} x {agents}{counted(config.rollout_length, 'step')} an iteration"
        )


def _evaluated(resumed: Checkpoint) -> int:
    """Returns the env steps of the newest report whose evaluation is done or was not due."""
    progress = resumed.progress
    return progress.get("evaluated", progress["reported"]["env_steps"])


UNFINISHED: weakref.WeakSet[Generator[Report]] = weakref.WeakSet()
"""Reports of runs that may not have ended."""


def _leave_all() -> None:
    """Closes the runs whose reports a program still holds when it ends.

    Saving needs a new thread, which Python then no longer starts: a warning says so.
    """
    for reports in list(UNFINISHED):
        with contextlib.suppress(Exception):
            reports.close()


atexit.register(_leave_all)
