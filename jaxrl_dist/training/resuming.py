"""Prepares to resume a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shlex
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_dist.checks import flag, unit
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import CONFIG_FILE, OWN, RESUMABLE, Train
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import (
    CheckpointError,
    ConfigError,
    ConfigWarning,
    FileWarning,
    FinishedError,
)
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans import initial
from jaxrl_dist.plans.devices import all_devices, learner_devices
from jaxrl_dist.plans.report import check_progress
from jaxrl_dist.plans.session import Session, ended_by, score_of, step_of
from jaxrl_dist.run import checkpoint, directories, machine
from jaxrl_dist.run import files as run_files
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.policies import by_policy
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.stored import (
    SPACES,
    changed_code,
    differences,
    stored_content,
    to_json,
)
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.training.job import init_variables
from jaxrl_dist.training.learner import check_sizes
from jaxrl_dist.training.member import Member
from jaxrl_dist.training.rows import Row, read_rows
from jaxrl_dist.training.run import Run
from jaxrl_dist.training.setup import prepare
from jaxrl_dist.training.tables import write_results
from jaxrl_dist.types import Checkpoint, EnvSpec, PyTree

ALLOWS = "add --change-env-options to change them"


@in_32_bits
def prepare_resume(
    config: Train,
    run_dir: pathlib.Path,
    changes: Mapping[str, Any],
    *,
    change_env_options: bool = False,
) -> Run:
    """Prepares to resume a run with this config; the arguments and errors are those of
    ``resume``.
    """
    allowed = (*RESUMABLE, "env_options") if change_env_options else RESUMABLE
    _check_changes(changes, allowed)
    stored = stored_content(run_dir / CONFIG_FILE)
    if stored.get("sweep"):
        first = shlex.quote(str(run_dir / run_files.MEMBERS / "000"))
        raise ConfigError(
            f"{run_dir} is a sweep; continue it by its own command with --run-dir {run_dir}, or "
            f"one member with `jaxrl-dist resume {first}`"
        )
    for part in by_policy(config).values():
        if problem := changed_code(run_dir, type(part.algorithm)):
            where = shlex.quote(str(run_dir))
            raise ConfigError(
                f"{problem}, or start a new run from its parameters with `jaxrl-dist train FILE.py "
                f"--config {where} --init-from {where}`"
            )
    with contextlib.ExitStack() as files:
        file = None
        if peers.first():  # for all processes of this run: another run might resume it, too
            file = files.enter_context(run_files.lock(str(run_dir)))
        config = dataclasses.replace(config, run_dir=str(run_dir))
        origin: dict[str, Any] = {"init_from": config.init_from, "init_parts": config.init_parts}
        new, source = resolved(
            dataclasses.replace(config, init_from=None, init_parts=None), changes
        )
        _check_config(dataclasses.replace(new, **origin), source.spec, stored, allowed)
        _check_devices(new, source)
        run = prepare(new, source)
        run.config = dataclasses.replace(run.config, **origin)
        for member in run.members:
            member.session = member.session._replace(
                config=dataclasses.replace(member.config, **origin)
            )
        if is_population(new):
            run.file = file
            for member, row in zip(run.members, read_rows(run_dir, run.rows), strict=True):
                member.row = row
        else:
            run.members[0].file = file
            _load(run.members[0], allowed)
        for group in run.groups:
            members = [run.members[number] for number in group]
            _resume_members(run.config, members, changes, allowed, files)
        _check_unfinished(run)
        files.pop_all()
        return run


def _check_changes(changes: Collection[str], allowed: Collection[str]) -> None:
    for name in sorted(set(changes) - set(allowed)):
        instead = ALLOWS if name == "env_options" else f"change only {', '.join(RESUMABLE)}"
        raise ConfigError(f"resume keeps {flag(name)}; {instead}")


class Saved(NamedTuple):
    """What the files of a run, or of a population, hold of a member."""

    folder: pathlib.Path
    status: str
    """In the results of the last session."""
    progress: Sequence[Mapping[str, Any]]
    """Progress of each intact checkpoint, newest first."""
    checkpoints: int = 1
    """Intact or damaged."""
    trained: bool = False
    """Whether it has saved its trained variables, which are written before the last checkpoint."""
    finished: bool = False
    """Whether nothing is left to do at its end, such as an evaluation."""

    @property
    def lost(self) -> bool:
        """Whether it has diverged, and its state is lost."""
        return self.status == "diverged" and not self.progress

    def iterations(self) -> set[int]:
        """Returns the iterations of its intact checkpoints."""
        return {x["iteration"] for x in self.progress}

    def newest(self, within: Collection[int] | None) -> Mapping[str, Any] | None:
        """Returns the progress of the newest intact checkpoint, among those of these iterations."""
        return next((x for x in self.progress if within is None or x["iteration"] in within), None)

    def over(self, config: Train) -> bool:
        """Returns whether it trains no further."""
        last = self.newest(None) or {}
        ended = last.get("halved") or ended_by(config, step_of(config, last), score_of(last))
        return self.status == "diverged" or bool(ended)


class Decision(NamedTuple):
    """How a member continues."""

    status: str | None
    """"training", or how it has ended; None: it begins, as in a new population."""
    iteration: int | None = None
    """Of the checkpoint with its state; None: there is none, or its state is lost."""


BEGIN = Decision(None)


def decide(config: Train, members: Sequence[Saved]) -> list[Decision]:
    """Decides how the members of one program continue: those that train, from the same iteration.

    Members that have saved nothing, because the population was stopped before they began, begin
    now. So do those of a program that was killed while its members saved for the first time. A
    member that has diverged has ended, also if its state is lost.

    Raises:
      CheckpointError: the members that train share no intact checkpoint.
    """
    if _have_saved_nothing(members, config.keep_checkpoints):
        return [Decision(x.status) if x.lost else BEGIN for x in members]
    going = [x for x in members if not x.over(config)]
    shared = set[int]()
    if going:
        shared = set.intersection(*map(Saved.iterations, going))
        if not shared:
            raise CheckpointError(
                f"the members of {config.run_dir} share no intact checkpoint; resume them one by "
                f"one, such as {going[0].folder}"
            )
    return [_decided(config, x, shared) for x in members]


def _decided(config: Train, member: Saved, shared: Collection[int]) -> Decision:
    """Decides how a member continues; ``shared``: iterations of which all that train have a
    checkpoint.
    """
    over = member.over(config)
    at = member.newest(None if over else shared)
    if at is None:
        return Decision("diverged")
    status = "done" if over and member.finished else "training"
    if at.get("halved"):
        status = "halved"
    elif member.status == "diverged":
        status = "diverged"
    return Decision(status, at["iteration"])


def _have_saved_nothing(members: Sequence[Saved], keep_checkpoints: int) -> bool:
    """Returns whether no member of a program has saved its state, or only some have,
    and for the first time.

    A damaged checkpoint counts. Where only one is kept, a single one may be a later one. A
    member whose state is lost does not count.
    """
    members = [x for x in members if not x.lost]
    counts = [x.checkpoints for x in members]
    if not any(counts):
        return True
    return (
        keep_checkpoints > 1
        and min(counts) == 0
        and max(counts) < 2
        and not any(x.trained for x in members)
    )


def _saved(member: Member, changes: Collection[str]) -> Saved:
    """Returns what the files hold of a member.

    A single run has loaded its checkpoint; it is also finished if it was told to end there.
    """
    folder = member.folder
    finished = run_files.finished(folder, member.config.evaluation_episodes)
    loaded = member.session.resumed
    progress: Sequence[Mapping[str, Any]]
    if loaded is None:
        progress = checkpoint.progress(folder)
    else:
        progress = [{**loaded.progress, "halved": False}]
        ends = {"total_env_steps", "total_updates", "stop_at_return"}
        finished = finished or not ends.isdisjoint(changes)
    return Saved(
        folder,
        member.row.status,
        progress,
        checkpoints=len(checkpoint.saved(folder)),
        trained=checkpoint.trained(folder),
        finished=finished,
    )


def _resume_members(
    config: Train,
    members: Sequence[Member],
    changes: Collection[str],
    allowed: Collection[str],
    files: contextlib.ExitStack,
) -> None:
    """Resumes the members of one program as ``decide`` says;
    ``files`` closes those that it opens.
    """
    saved = [_saved(member, changes) for member in members]
    intact = any(x.progress for x in saved)
    for member, x in zip(members, saved, strict=True):
        if x.checkpoints and not intact:
            _load(member, allowed)  # which says how they are damaged
    decisions = decide(config, saved)
    variables = None
    if BEGIN in decisions:
        if intact:
            warnings.warn(
                f"not all members of {config.run_dir} that train together saved their state, so "
                "they start again",
                FileWarning,
                stacklevel=3,
            )
        variables = init_variables(members[0].config, members[0].session.job.algorithm)
    for member, decision in zip(members, decisions, strict=True):
        _resume_member(member, decision, allowed, files)
    state = next(filter(None, (member.session.resumed for member in members)), None)
    # the program takes a state for each, and ignores it for a member whose own is lost
    for member in members:
        member.session = member.session._replace(
            resumed=member.session.resumed or state, init_variables=variables
        )


def _resume_member(
    member: Member, decision: Decision, allowed: Collection[str], files: contextlib.ExitStack
) -> None:
    if decision.status is None:
        if peers.first():
            directories.remove(member.folder)  # it holds only reports of lost progress
        member.row = Row(member.row.member, member.row.seed, member.row.values)
    elif decision.iteration is not None:
        if member.session.resumed is None:
            _load(member, allowed, decision.iteration)
        member.go_back(decision.status)
        if decision.status == "training" and member.file is None and peers.first():
            member.file = files.enter_context(run_files.lock(str(member.folder)))


def _load(member: Member, allowed: Collection[str], iteration: int | None = None) -> None:
    """Loads a member's checkpoint, from which it resumes.

    Args:
      allowed: fields of the config that may differ from the checkpoint's.
      iteration: of the checkpoint; None: the newest.
    """
    config = member.config
    session = member.session
    job = session.job
    shapes = _checkpoint_shapes(session)
    spec = job.source.spec
    resumed = checkpoint.load(
        member.folder, shapes, lambda x: _check_same(config, spec, x, allowed), iteration
    )
    if resumed.progress.get("data") != job.data_identity:
        raise ConfigError(
            f"{config.data} is not the data set that {member.folder} learnt from; name its new "
            "directory with --data, or start a new run from its variables with `--init-from "
            f"{shlex.quote(str(member.folder))}`"
        )
    hyper = resumed.progress.get("hyper", session.hyper)
    member.session = session._replace(resumed=resumed, hyper=hyper)


def _check_unfinished(run: Run) -> None:
    """Checks that a member trains on, and reads what the members of a population have reported.

    Raises:
      FinishedError: all have ended.
    """
    several = is_population(run.config)
    if several:
        for member in run.members:
            member.read()
    if any(row.status == "training" for row in run.rows):
        return
    if several:
        if peers.first():  # members may have been resumed one by one
            write_results(pathlib.Path(str(run.config.run_dir)), run.rows)
        raise _members_finished(run.config, run.rows)
    raise _finished(run.config, run.session)


def _members_finished(config: Train, rows: Sequence[Row]) -> FinishedError:
    ends = f"{flag(f'total_{config.clock}')} {config.total}"
    if config.stop_at_return is not None:
        ends += f" or --stop-at-return {config.stop_at_return}"
    if any(row.status == "diverged" for row in rows):
        ends += ", or have diverged"
    return FinishedError(
        f"all members of {config.run_dir} have ended at {ends}; raise it to continue"
    )


def _finished(config: Train, session: Session) -> FinishedError:
    field = str(session.ended_by(session.step, session.score))
    limit = f"{flag(field)} {getattr(config, field)}"
    if field == f"total_{config.clock}":
        return FinishedError(
            f"{config.run_dir} has done {session.step} {unit(config.clock)} of {limit}; raise it "
            "to continue"
        )
    return FinishedError(
        f"{config.run_dir} has reached a mean return of {session.score:.4g}, {limit}; raise it to "
        "continue"
    )


def _check_devices(config: Train, source: EnvSource) -> None:
    """Checks that a single run's sizes, which can no longer change, divide over the devices.

    Raises:
      ConfigError: they do not; the message names numbers of devices that work.
    """
    if is_population(config):
        return
    algorithm = make_algorithm(config, source.spec)

    def problem(num_devices: int) -> str | None:
        try:
            check_sizes(config, algorithm, source.spec, num_devices)
        except ConfigError as error:
            return error.with_flags
        return None

    num_devices = len(learner_devices(config))
    why = problem(num_devices)
    if why is None:
        return
    working = [str(n) for n in range(1, len(all_devices()) + 1) if problem(n) is None]
    if working:
        why = (
            f"the run cannot continue on {num_devices} devices; these --num-devices work: "
            f"{', '.join(working)}"
        )
    raise ConfigError(why)


def _checkpoint_shapes(session: Session) -> Checkpoint:
    """Returns the shapes and dtypes of a checkpoint of this session."""
    job = session.job
    key = jax.random.key(0)
    state = job.bare(jax.eval_shape(job.learner.init, key))
    actor: PyTree = ()
    if PLANS[job.config.plan].compiled:
        actor = jax.eval_shape(initial.start(job), key, session.hyper)
    return Checkpoint(state, actor, {})


def _check_same(
    config: Train, spec: EnvSpec, about: Mapping[str, Any], allowed: Collection[str]
) -> bool:
    """As ``_check_config``, for a checkpoint; returns True if the checkpoint holds a replay memory.

    ``about`` is the contents of its ``run.json``.
    """
    check_progress(about["progress"])
    _check_config(config, spec, about["config"], allowed)
    versions = machine.versions().items()
    changed = sorted(name for name, value in versions if about["versions"].get(name) != value)
    if changed:
        warnings.warn(
            f"the run was saved with other versions of {', '.join(changed)}, so its numbers may "
            "differ a little",
            ConfigWarning,
            stacklevel=2,
        )
    return bool(about["config"]["run"]["checkpoint_replay"])


def _with_later_fields(stored: Mapping[str, Any], config: Train) -> dict[str, Any]:
    """Returns what a run's file stores, with the defaults of fields that later versions have."""

    def defaults(algorithm: object) -> Mapping[str, Any]:
        content: Mapping[str, Any] = json.loads(
            json.dumps(to_json(Train(type(algorithm)(), config.env)))
        )
        return content

    plain = defaults(config.algorithm)
    filled = {part: {**plain[part], **stored[part]} for part in ("hyperparameters", "run")}
    for name, part in getattr(config.algorithm, "configs", {}).items():
        policy = filled["hyperparameters"].get(name)
        if isinstance(policy, dict):
            values = defaults(part.algorithm)
            own = {field: values["run"][field] for field in OWN}
            hyperparameters = {**values["hyperparameters"], **policy["hyperparameters"]}
            filled["hyperparameters"][name] = {
                **own,
                **policy,
                "hyperparameters": hyperparameters,
            }
    return {**stored, **filled}


def _check_config(
    config: Train, spec: EnvSpec, stored: Mapping[str, Any], allowed: Collection[str]
) -> None:
    """Checks that a run has this config and this environment.

    Args:
      stored: the config of the run to be resumed, as a file stores it.
      allowed: fields that may differ.

    Raises:
      ConfigError: a field differs; the message names it.
      LookupError, TypeError, ValueError: ``stored`` is damaged.
    """
    current = json.loads(json.dumps(to_json(config, spec)))
    for name, old, new in differences(_with_later_fields(stored, config), current):
        if name not in allowed:
            hint = ALLOWS if name == "env_options" else "give the run's value, or start a new run"
            raise ConfigError(f"{flag(name)} is {new}, but the run to resume has {old}; {hint}")
    for name in SPACES:
        old = stored["spaces"][name]
        new = current["spaces"][name]
        if old != new:
            raise ConfigError(
                f"the environment's {name}s are {new}, but the run to resume has {old}; "
                "resume it with its own environment"
            )
