"""A prepared training run: of one member, or of a population,
whose members each have a complete run directory.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread as _registered_first  # noqa: F401
import contextlib
import dataclasses
import pathlib
import shlex
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any

from jaxrl_dist import algorithms, plans
from jaxrl_dist import mesh as meshes
from jaxrl_dist.checks import counted
from jaxrl_dist.config.envs import env_name, module_of_user, split_env
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.data.writing import check_new
from jaxrl_dist.envs.agents.groups import team_size
from jaxrl_dist.errors import ConfigWarning, DivergedError, FileWarning
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.arrays import check_equal
from jaxrl_dist.hosts.failing import failing
from jaxrl_dist.plans.evolve import Selection, halving, pbt
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.session import Session
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.policies import Policies, label
from jaxrl_dist.settings.stored import to_ask, to_json
from jaxrl_dist.training.joining import join_reports
from jaxrl_dist.training.member import Member
from jaxrl_dist.training.opening import open_files
from jaxrl_dist.training.reports import StopState
from jaxrl_dist.training.rows import ENDED, Row
from jaxrl_dist.training.tables import write_results
from jaxrl_dist.types import EnvSpec, Report

FEW = 16
"""Environments a device below which one CPU device alone is faster: two ran PPO at 0.7 of its speed
with 4 or 8 each, and at 1.0 to 1.2 with 16."""


class Run:
    """A training run that is ready to start: that of one member, or a population.

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
        """Describes the run and its devices in a line,
        and says in another one where fewer devices would be faster.

        Args:
          name: the user's name for the algorithm.
        """
        first = self.members[0].config
        algorithm = name or label(first.algorithm)
        env = env_name(first.env) or "no environment"
        _, module, made_by = split_env(env)
        if module:  # the user's own name for it
            env = f"{module}:{made_by}"
        return (
            f"{self._members_in_words()}{algorithm} on {env}, plan {first.plan}, "
            f"{self._devices_in_words()}, {self._work_in_words()}{self._faster()}"
        )

    def _members_in_words(self) -> str:
        if not is_population(self.config):
            return ""
        members = counted(len(self.members), "member")
        if len(self.groups) == 1:
            return f"{members}, each "
        return f"{members} in {counted(len(self.groups), 'program')}, each "

    def _devices_in_words(self) -> str:
        first = self.members[0].config
        mesh = self.job.mesh
        devices = counted(mesh.devices.size, f"{mesh.devices.flat[0].platform} device")
        if not PLANS[first.plan].threaded:
            return devices
        pool = self.job.pool
        actors = counted(pool.num_actors, "actor")
        if first.actor_devices:
            return f"{actors} on {len(pool.meshes)}, learner on {devices}"
        return f"{actors}, {devices}"

    def _work_in_words(self) -> str:
        first = self.members[0].config
        job = self.job
        if job.data is not None and not job.acts:
            return f"{int(job.data.sizes.sum()):,} recorded steps of {first.data}"
        envs = counted(first.num_envs, "environment")
        steps = counted(first.rollout_length, "step")
        return f"{envs} x {agents_of(job.source.spec)}{steps} an iteration"

    def _faster(self) -> str:
        """Returns a line that says how fewer devices of a CPU would be faster;
        empty where they would not.
        """
        mesh = self.job.mesh
        num_envs = self.config.num_envs
        sharing = mesh.shape[meshes.DATA]
        forced = mesh.devices.flat[0].platform == "cpu" and peers.world() is None
        compiled = PLANS[self.config.plan].compiled
        if not forced or not compiled or sharing == 1 or num_envs >= FEW * sharing:
            return ""
        return f"\n{sharing} CPU devices share {num_envs} environments; one alone is faster: --num-devices 1"

    def resume_command(self) -> str:
        """As ``resume_command``."""
        return resume_command(self.config)

    def reports(
        self,
        evaluating: Callable[[int], None] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
        saving: Callable[[int], None] = lambda members: None,
    ) -> Iterator[Report]:
        """As ``train``: yields reports. In those of a population,
        ``members`` holds the newest report of each member.

        Args:
          evaluating: receives the number of episodes done in the last evaluation.
          stop: returns whether to end early.
          saving: receives the number of members that train together,
            as soon as they are trained and will be saved.

        Raises:
          ConfigError: at once, if the run directory cannot be written or holds a run already.
        """
        self._evaluating = evaluating
        self._stop = stop
        self._saving = saving
        file = self.file if is_population(self.config) else self.members[0].file
        reports = _started(self.config, file, self._reports)
        self._unread = weakref.finalize(reports, _warn_unread)
        self._unread.atexit = False
        return reports

    @in_32_bits
    def _reports(self) -> Generator[Report]:
        self._unread.detach()
        sessions = [member.session for member in self.members]
        with failing():
            resumed = [
                session.resumed and (session.resumed.state.variables, session.resumed.state.updates)
                for session in sessions
            ]
            initial = [session.init_variables for session in sessions]
            check_equal((resumed, initial), "what the run starts from")
        if not is_population(self.config):
            yield from self.members[0].reports(self._evaluating, self._stop)
            return
        with failing(), contextlib.ExitStack() as stack:
            files = None
            if self.config.run_dir and peers.first():
                files = self._files(stack)
            for new in self._in_turn():
                if new or any(row.status in ENDED for row in self.rows):
                    yield self._together(new, files)
            self._check_standing(files)

    def _check_standing(self, files: RunFiles | None) -> None:
        if any(row.status != "diverged" for row in self.rows):
            return
        if files is not None:
            write_results(files.path, self.rows)
        raise DivergedError(
            f"all {len(self.rows)} members have diverged; smaller values of --learning-rate may help"
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
            running = dict(self._begin(group, stack))
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
    ) -> Iterator[tuple[int, Iterator[Report]]]:
        """Yields the numbers and the reports of a group's members that are not done;
        ``stack`` ends them.
        """
        # The numbers of several evaluations would flash by.
        shown = self._evaluating if len(group) == 1 else _unshown
        self.members[group[0]].shared.saving = self.once_trained(group, self._saving)
        left = [number for number in group if self.rows[number].status != "halved"]
        if len(left) % self.members[group[0]].session.job.mesh.shape[meshes.AGENT] == 0:
            group = left  # otherwise stay padded: the members left do not divide over the devices
        places = {
            number: at for at, number in enumerate(group) if self.rows[number].status == "training"
        }
        config = self.config
        population_plan = plans.population_plan(self.config.plan)
        program = None
        if population_plan is not None:
            # The members stop also before each takes its first report.
            sessions = [self.members[number].session._replace(stop=self._stop) for number in group]
            select = selection(config, self.session)
            program = population_plan(
                sessions, list(places.values()), select, group, config.average_every
            )
            stack.callback(program.close)
        for number, place in places.items():
            member = self.members[number]
            member.program, member.place = program, place
            reports = _started(
                member.config, member.file, partial(member.reports, shown, self._stop)
            )
            # closing saves members that still run
            yield number, stack.enter_context(contextlib.closing(reports))

    def once_trained(
        self, group: Sequence[int], saving: Callable[[int], None]
    ) -> Callable[[Report], None]:
        """Returns what calls ``saving`` at the first last report of several members,
        unless others train on.
        """
        said = len(group) == 1

        def say(report: Report) -> None:
            nonlocal said
            if not said and report.ended_by != "stop_at_return":
                said = True
                saving(sum(self.rows[number].status == "training" for number in group))

        return say

    def _next(self, number: int, reports: Iterator[Report]) -> bool:
        """Takes a member's next report; returns False if it has ended."""
        member = self.members[number]
        row = self.members[number].row
        try:
            report = next(reports, None)
        except DivergedError as error:
            row.status = "diverged"
            warnings.warn(
                f"member {row.member} has ended, the others continue: {error}",
                FileWarning,
                stacklevel=2,
            )
            return False
        if report is None:
            return False
        member.newest = report
        row.take(report)
        row.env_steps = report.env_steps
        row.updates = report.updates
        row.iteration = report.iteration
        if report.ended_by:
            row.status = "done"
        if member.halved:
            row.status = "halved"
        parent = report.metrics.get("population/parent", number)
        if parent is not None and parent != number:
            hyper = {
                name[6:]: value
                for name, value in report.metrics.items()
                if name.startswith("hyper/")
            }
            copy = {
                "env_steps": row.env_steps,
                "iteration": row.iteration,
                "parent": f"{int(parent):03d}",
            }
            row.lineage.append({**copy, "hyper": hyper})
        return True

    def _end(self, running: Mapping[int, Iterator[Report]], error: BaseException) -> None:
        """Ends members after an error of one of them: each saves what it has learnt,
        also one that has not begun.
        """
        for number, reports in running.items():
            if (program := self.members[number].program) is not None:
                program.error = error
            with contextlib.suppress(Exception, type(error)):
                for _ in reports:
                    pass

    def _together(self, new: Sequence[int], files: RunFiles | None) -> Report:
        """Returns the report of the population after new reports of some members, and writes it."""
        newest = {
            number: member.newest
            for number, member in enumerate(self.members)
            if member.newest is not None
        }
        policies = self.job.source.spec.policies
        report = join_reports(newest, new, self.rows, self.groups, policies)
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
        done = {}
        if self.file is not None:
            done["iteration"] = sum(member.reported for member in self.members)
        return open_files(stack, self.config, stored, self.file, done)


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
    _UNFINISHED.add(reports)
    return reports


def _unshown(done: Any) -> None:
    """Shows nothing."""


def _warn_unread() -> None:
    text = "nothing has been trained: a run advances only while a loop takes its reports, as in `for report in "
    warnings.warn(f"{text}jaxrl_dist.train(config): pass`", ConfigWarning, stacklevel=3)


def resume_command(config: Train) -> str:
    """Returns the command, or in Python the call, that resumes a run, and says what no file may."""
    run_dir = str(config.run_dir)
    again = to_ask(vars(config))
    words = ["jaxrl-dist", "resume", run_dir]
    if not isinstance(config.env, str):
        more = "".join(f", {name}={getattr(config, name)!r}" for name in again)
        return f"jaxrl_dist.resume({run_dir!r}, env=...{more})"
    if module_of_user(config.env) is not None:
        words += ["--env", config.env]
    kind = type(config.algorithm)
    if kind is not Policies and algorithms.name_of(kind) not in algorithms.ALGORITHMS:
        words += [
            "--algorithm",
            getattr(sys.modules.get(kind.__module__), "__file__", None) or "FILE.py",
        ]
    return " ".join([shlex.join(words), *again.values()])


def agents_of(spec: EnvSpec) -> str:
    """Returns the agents of an environment as ``Run.describe`` counts them; "" if it has one."""
    teams = {name: team_size(part) for name, part in spec.by_policy.items()}
    alone = sum(part.num_agents for name, part in spec.by_policy.items() if not teams[name])
    words = [f"a team of {counted(size, 'agent')}" for size in teams.values() if size]
    if alone > (not words):
        words.append(counted(alone, "agent"))
    if len(words) > 1:
        return f"({' and '.join(words)}) x "
    if words:
        return f"{words[0]} x "
    return ""


def selection(config: Train, session: Session) -> Selection | None:
    """Returns the selection that a resolved config asks for."""
    if config.evolve is None or config.evolve_interval is None:
        return None
    interval = config.evolve_interval / session.job.steps_per_iteration
    report = session.iterations_per_report
    evolve = {"pbt": pbt, "halving": halving}[config.evolve]
    return Selection(
        evolve, config.seed, max(1, round(interval / report)) * report, config.evolve == "halving"
    )


_UNFINISHED: weakref.WeakSet[Generator[Report]] = weakref.WeakSet()
"""Reports of runs that may not have ended."""


def _leave_all() -> None:
    """Closes the runs whose reports a program still holds when it ends,
    so that they save their states.
    """
    for reports in list(_UNFINISHED):
        with contextlib.suppress(Exception):
            reports.close()


# Saving needs ``concurrent.futures``, which takes no more work after its own function of this kind:
# Python calls the newest first. If it ceases to offer them to others, saving at the end fails with
# a warning.
getattr(threading, "_register_atexit", atexit.register)(_leave_all)
