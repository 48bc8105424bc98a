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

from jaxrl_dist.checks import flag
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import CONFIG_FILE, RESUMABLE, Train
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import CheckpointError, ConfigError, ConfigWarning, FileWarning, FinishedError
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans import compiled
from jaxrl_dist.plans.devices import all_devices, learner_devices
from jaxrl_dist.plans.job import Job, ended_by, score_of
from jaxrl_dist.plans.report import check_progress
from jaxrl_dist.run import checkpoint, machine, storage
from jaxrl_dist.run import files as run_files
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.stored import SPACES, check_clock, differences, stored_content, to_json
from jaxrl_dist.training.learner import check_sizes
from jaxrl_dist.training.member import Member
from jaxrl_dist.training.results import Row, read_rows, write_results
from jaxrl_dist.training.run import Run
from jaxrl_dist.training.setup import init_variables, make_algorithm, prepare
from jaxrl_dist.types import Checkpoint, EnvSpec


def prepare_resume(
    config: Train[Any], run_dir: pathlib.Path, changes: Mapping[str, Any], *, change_env_options: bool = False
) -> Run:
    """Prepares to resume a run with this config; the arguments and errors are those of ``resume``."""
    allowed = resumable(change_env_options)
    for name in changes:
        if name not in allowed:
            raise ConfigError(f"{flag(name)} cannot change where a run is resumed; {can_change(name)}")
    with contextlib.ExitStack() as files:
        file = None
        if peers.first():  # of the processes of this run; another run might resume it, too
            file = files.enter_context(run_files.lock(str(run_dir)))
        config = dataclasses.replace(config, run_dir=str(run_dir))
        initial: dict[str, Any] = {name: getattr(config, name) for name in ("init_from", "init_parts")}
        new, source = resolved(dataclasses.replace(config, init_from=None, init_parts=None), changes)
        stored = stored_content(run_dir / CONFIG_FILE)
        _check_config(dataclasses.replace(new, **initial), source.spec, stored, allowed)
        if not is_population(new):
            _check_devices(new, source)
        run = prepare(new, source)
        run.config = dataclasses.replace(run.config, **initial)
        for member in run.members:
            member.job = member.job._replace(config=dataclasses.replace(member.config, **initial))
        if is_population(new):
            run.file = file
            for member, row in zip(run.members, read_rows(run_dir, run.rows), strict=True):
                member.row = row
        else:
            run.members[0].file = file
            _load(run.members[0], allowed)
        for group in run.groups:
            _go_on(run.config, [run.members[number] for number in group], changes, allowed, files)
        _check_going(run)
        files.pop_all()
        return run


def resumable(change_env_options: bool) -> tuple[str, ...]:
    """Returns the fields that may change where a run is resumed."""
    return (*RESUMABLE, "env_options") if change_env_options else RESUMABLE


def can_change(name: str) -> str:
    """Returns which fields may change instead of this one, or how this one may."""
    if name == "env_options":
        return "--change-env-options allows it"
    return f"{', '.join(RESUMABLE)} can"


class Saved(NamedTuple):
    """What the files of a run, or of a population, hold of a member."""

    folder: pathlib.Path
    status: str  # in the results of the last session
    progress: Sequence[Mapping[str, Any]]  # of its intact checkpoints, newest first
    checkpoints: int = 1  # intact or damaged
    trained: bool = False  # whether it has saved its trained variables, which are written before the last checkpoint
    finished: bool = False  # whether nothing is left to do at its end, such as an evaluation

    @property
    def lost(self) -> bool:
        """Whether it has diverged, and its state is lost."""
        return self.status == "diverged" and not self.progress

    def newest(self, within: Collection[int] | None) -> Mapping[str, Any] | None:
        """Returns the progress of the newest intact checkpoint, among those of these iterations."""
        return next((x for x in self.progress if within is None or x["iteration"] in within), None)

    def over(self, config: Train[Any]) -> bool:
        """Returns whether it trains no further."""
        last = self.newest(None) or {"env_steps": 0}
        ended = last.get("halved") or ended_by(config, last["env_steps"], score_of(last))
        return self.status == "diverged" or bool(ended)


class Begin(NamedTuple):
    """A member begins, as those of a new population do."""


class Resume(NamedTuple):
    """A member goes on from its checkpoint after this iteration."""

    iteration: int
    status: str = "training"


class Ended(NamedTuple):
    """A member trains no further; its state is in the checkpoint after this iteration. None: its state is lost."""

    iteration: int | None
    status: str


def decide(config: Train[Any], members: Sequence[Saved]) -> list[Begin | Resume | Ended]:
    """Decides how the members of one program go on: those that train, from the same iteration.

    Members that have saved nothing, because the population was stopped before they began, begin now. So do those of a
    program that was killed while its members saved for the first time. A member that has diverged has ended, also if
    its state is lost.

    Raises:
      CheckpointError: the members that train share no intact checkpoint.
    """
    left = [x for x in members if not x.lost]
    if not any(x.progress for x in left) or _first_save_was_cut(left, config.keep_checkpoints):
        return [Ended(None, x.status) if x.lost else Begin() for x in members]
    going = [{at["iteration"] for at in x.progress} for x in members if not x.over(config)]
    shared = set.intersection(*going) if going else set()
    if going and not shared:
        alone = f"resume them one by one, such as {left[0].folder}"
        raise CheckpointError(f"the members of {config.run_dir} share no intact checkpoint; {alone}")
    return [_decided(config, x, shared) for x in members]


def _decided(config: Train[Any], member: Saved, shared: Collection[int]) -> Resume | Ended:
    """Decides how a member goes on; ``shared``: iterations of which all that train have a checkpoint."""
    over = member.over(config)
    at = member.newest(None if over else shared)
    if at is None:
        return Ended(None, "diverged")
    if member.status == "diverged" or at.get("halved"):
        return Ended(at["iteration"], "halved" if at.get("halved") else "diverged")
    return Ended(at["iteration"], "done") if over and member.finished else Resume(at["iteration"])


def _first_save_was_cut(members: Sequence[Saved], keep_checkpoints: int) -> bool:
    """Returns whether only some members of a program have saved their state, and for the first time.

    A damaged checkpoint is one, too. Where only one is kept, a single one may be a later one.
    """
    counts = [x.checkpoints for x in members]
    return keep_checkpoints > 1 and min(counts) == 0 and max(counts) < 2 and not any(x.trained for x in members)


def _saved(member: Member, changes: Collection[str]) -> Saved:
    """Returns what the files hold; of a single run, which has loaded its checkpoint, also whether it shall end here."""
    folder, alone = member.folder, member.job.resumed
    progress = [{**alone.progress, "halved": False}] if alone else checkpoint.progress(folder)
    finished = run_files.finished(folder, member.config.evaluation_episodes)
    finished = finished or (alone is not None and not {"total_env_steps", "stop_at_return"}.isdisjoint(changes))
    count, trained = len(checkpoint.saved(folder)), checkpoint.trained(folder)
    return Saved(folder, member.row.status, progress, count, trained, finished)


def _go_on(
    config: Train[Any],
    members: Sequence[Member],
    changes: Collection[str],
    allowed: Collection[str],
    files: contextlib.ExitStack,
) -> None:
    """Lets the members of one program go on as ``decide`` says; ``files`` closes those that it opens."""
    saved = [_saved(member, changes) for member in members]
    decisions = decide(config, saved)
    if Begin() in decisions:
        if any(own.progress for own in saved):
            text = f"not all members of {config.run_dir} that train together have saved their state: they begin again"
            warnings.warn(text, FileWarning, stacklevel=3)
        variables = init_variables(members[0].config, members[0].job.algorithm)
        for member in members:
            member.job = member.job._replace(init_variables=variables)
    for member, decision in zip(members, decisions, strict=True):
        _apply(member, decision, allowed, files)
    states = [state for member in members if (state := member.job.resumed) is not None]
    for member in members:
        if states and member.job.resumed is None:  # the program takes a state for each, and ignores this one's
            member.job = member.job._replace(resumed=states[0])


def _apply(
    member: Member, decision: Begin | Resume | Ended, allowed: Collection[str], files: contextlib.ExitStack
) -> None:
    if isinstance(decision, Begin):
        if peers.first():
            storage.remove(member.folder)  # it holds only reports of lost progress
        member.row = Row(member.row.member, member.row.seed, member.row.values)
    elif decision.iteration is not None:
        if member.job.resumed is None:
            _load(member, allowed, decision.iteration)
        member.go_back(decision.status)
        if isinstance(decision, Resume) and member.file is None and peers.first():
            member.file = files.enter_context(run_files.lock(str(member.folder)))


def _load(member: Member, allowed: Collection[str], iteration: int | None = None) -> None:
    """Loads a member's checkpoint, from which it resumes.

    Args:
      allowed: fields of the config that may differ from the checkpoint's.
      iteration: of the checkpoint; None: the newest.
    """
    config, job = member.config, member.job
    shapes, spec = _checkpoint_shapes(job), job.source.spec
    resumed = checkpoint.load(member.folder, shapes, lambda x: _check_same(config, spec, x, allowed), iteration)
    member.job = job._replace(resumed=resumed, hyper=resumed.progress.get("hyper", job.hyper))


def _check_going(run: Run) -> None:
    """Checks that a member goes on, and reads what the members of a population have reported.

    Raises:
      FinishedError: all have ended.
    """
    config, resumed = run.config, run.job.resumed
    if is_population(config):
        for member in run.members:
            member.read()
    if any(row.status == "training" for row in run.rows):
        return
    if is_population(config):
        if peers.first():
            write_results(pathlib.Path(str(config.run_dir)), run.rows)  # members may have been resumed one by one
        ends = f"--total-env-steps {config.total_env_steps}"
        if config.stop_at_return is not None:
            ends += f" or --stop-at-return {config.stop_at_return}"
        if any(row.status == "diverged" for row in run.rows):
            ends += ", or have diverged"
        raise FinishedError(f"all members of {config.run_dir} have ended at {ends}; name more to go on")
    assert resumed is not None
    done, score = resumed.env_steps, score_of(resumed.progress)
    field = str(ended_by(config, done, score))
    what = f"done {done} env steps of" if field == "total_env_steps" else f"reached a mean return of {score:.4g},"
    raise FinishedError(f"{config.run_dir} has {what} {flag(field)} {getattr(config, field)}; name more to go on")


def _check_devices(config: Train[Any], source: EnvSource) -> None:
    """Checks that the run's sizes, which can no longer change, divide over the devices.

    Raises:
      ConfigError: they do not; the message names numbers of devices that work.
    """
    algorithm = make_algorithm(config, source.spec)

    def problem(num_devices: int) -> str | None:
        try:
            check_sizes(config, algorithm, source.spec, num_devices)
        except ConfigError as error:
            return error.with_flags
        return None

    num_devices = len(learner_devices(config))
    if (why := problem(num_devices)) is not None:
        working = [str(n) for n in range(1, len(all_devices()) + 1) if problem(n) is None]
        if working:
            why = f"the run cannot go on over {num_devices} devices; these --num-devices work: {', '.join(working)}"
        raise ConfigError(why)


def _checkpoint_shapes(job: Job) -> Checkpoint:
    """Returns the shapes and dtypes of a checkpoint of this job."""
    key = jax.random.key(0)
    state = jax.eval_shape(job.learner.init, key)
    actor = jax.eval_shape(compiled.start(job), key, job.hyper) if PLANS[job.config.plan].compiled else ()
    return Checkpoint(state, actor, {})


def _check_same(config: Train[Any], spec: EnvSpec, about: Mapping[str, Any], allowed: Collection[str]) -> bool:
    """As ``_check_config``, for a checkpoint; returns True if the checkpoint holds a replay memory.

    ``about`` is the contents of its ``run.json``.
    """
    check_progress(about["progress"])
    _check_config(config, spec, about["config"], allowed)
    changed = {name for name, version in machine.versions().items() if about["versions"].get(name) != version}
    if changed:
        text = f"the run was saved with other versions of {', '.join(sorted(changed))}: its numbers may differ a little"
        warnings.warn(text, ConfigWarning, stacklevel=2)
    return bool(about["config"]["run"]["checkpoint_replay"])


def _check_config(config: Train[Any], spec: EnvSpec, there: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Checks that a run has this config and this environment.

    Args:
      there: the config of the run to be resumed, as a file stores it.
      allowed: fields that may differ.

    Raises:
      ConfigError: a field differs; the message names it. Or its numbers of steps count something else.
      LookupError, TypeError, ValueError: ``there`` is damaged.
    """
    run_dir = pathlib.Path(str(config.run_dir))
    instead = f"it cannot go on, and `--init-from {shlex.quote(str(run_dir))}` starts a new run from its variables"
    check_clock(there, spec, run_dir, instead)
    here = json.loads(json.dumps(to_json(config, spec)))
    plain = json.loads(json.dumps(to_json(Train(type(config.algorithm)(), config.env))))
    filled = {part: {**plain[part], **there[part]} for part in ("hyperparameters", "run")}  # of an older version
    for name, old, new in differences({**there, **filled}, here):
        if name not in allowed:
            how = can_change(name) if name == "env_options" else "it cannot change"
            raise ConfigError(f"{flag(name)} is {new}, and the run to be resumed has {old}; {how}")
    spaces = there.get("spaces")
    for name in SPACES:
        old, new = spaces.get(name) if isinstance(spaces, dict) else None, here["spaces"][name]
        if old not in (None, new):  # an older version did not store it
            raise ConfigError(
                f"the environment's {name}s are {new}, and those of the run to be resumed {old}; they cannot change"
            )
