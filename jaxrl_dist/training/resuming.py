"""Prepares to resume a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shlex
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import IO, Any, NamedTuple

import jax

from jaxrl_dist.checks import flag
from jaxrl_dist.config.train import CONFIG_FILE, RESUMABLE, Train
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import CheckpointError, ConfigError, ConfigWarning, FileWarning, FinishedError
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans import compiled
from jaxrl_dist.plans.devices import all_devices, learner_devices
from jaxrl_dist.plans.job import Job, ended_by, score_of
from jaxrl_dist.plans.report import check_progress
from jaxrl_dist.run import checkpoint, directories, machine
from jaxrl_dist.run import files as run_files
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.stored import SPACES, check_clock, differences, stored_content, to_json
from jaxrl_dist.training.learner import check_sizes
from jaxrl_dist.training.population import PopulationRun
from jaxrl_dist.training.results import Row, read_rows, write_results
from jaxrl_dist.training.run import Run
from jaxrl_dist.training.setup import init_variables, make_algorithm, prepare
from jaxrl_dist.types import Checkpoint, EnvSpec


def prepare_resume(
    config: Train[Any], run_dir: pathlib.Path, changes: Mapping[str, Any], *, change_env_options: bool = False
) -> Run | PopulationRun:
    """Prepares to resume a run, or a population, with this config; the arguments and errors are those of ``resume``."""
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
        if isinstance(run, PopulationRun):
            run = _resumed_population(run, file, files, initial, allowed)
        else:
            run = _resumed(run, initial, changes, allowed)._replace(file=file)
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
    """What the files of a run, or of a member, hold."""

    folder: pathlib.Path
    progress: Sequence[Mapping[str, Any]]  # of its intact checkpoints, newest first
    checkpoints: int  # intact or damaged
    trained: bool  # whether it has saved its trained variables, which are written before the last checkpoint
    finished: bool  # whether nothing is left to do at its end, such as an evaluation


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


def decide(config: Train[Any], statuses: Sequence[str], saved: Sequence[Saved]) -> list[Begin | Resume | Ended]:
    """Decides how the members of one program go on: those that train, from the same iteration.

    Members that have saved nothing, because the population was stopped before they began, begin now. So do those of a
    program that was killed while its members saved for the first time. A member that has diverged has ended, also if
    its state is lost.

    Args:
      statuses: those that the last session has left in the results.

    Raises:
      CheckpointError: the members that train share no intact checkpoint.
    """
    lost = [status == "diverged" and not own.progress for status, own in zip(statuses, saved, strict=True)]
    left = [own for own, gone in zip(saved, lost, strict=True) if not gone]
    if not any(own.progress for own in left) or _first_save_was_cut(left, config.keep_checkpoints):
        return [Ended(None, "diverged") if gone else Begin() for gone in lost]
    ended = [status == "diverged" or _over(config, own.progress) for status, own in zip(statuses, saved, strict=True)]
    going = [{x["iteration"] for x in own.progress} for own, over in zip(saved, ended, strict=True) if not over]
    shared = max(set.intersection(*going), default=None) if going else None
    if going and shared is None:
        alone = f"resume them one by one, such as {left[0].folder}"
        raise CheckpointError(f"the members of {config.run_dir} share no intact checkpoint; {alone}")

    def of(status: str, own: Saved, over: bool) -> Resume | Ended:
        at = next((x for x in own.progress if over or x["iteration"] == shared), None)
        if at is None or status == "diverged":
            return Ended(at and at["iteration"], "diverged")
        if at.get("halved"):
            return Ended(at["iteration"], "halved")
        return Ended(at["iteration"], "done") if over and own.finished else Resume(at["iteration"])

    return list(map(of, statuses, saved, ended))


def _first_save_was_cut(saved: Sequence[Saved], keep_checkpoints: int) -> bool:
    """Returns whether only some members of a program have saved their state, and for the first time.

    A damaged checkpoint is one, too. Where only one is kept, a single one may be a later one.
    """
    first = keep_checkpoints > 1 and all(own.checkpoints < 2 for own in saved)
    return first and not all(own.checkpoints for own in saved) and not any(own.trained for own in saved)


def _over(config: Train[Any], progress: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a member has ended, according to the progress of its checkpoints."""
    return any(x.get("halved") or ended_by(config, x["env_steps"], score_of(x)) for x in progress[:1])


def _loaded(run: Run, initial: Mapping[str, Any], allowed: Collection[str], iteration: int | None = None) -> Run:
    """Returns a prepared run that resumes from a checkpoint.

    Args:
      initial: the fields of the run's config that only its first session used.
      allowed: fields that may differ from the checkpoint's.
      iteration: of the checkpoint; None: the newest.
    """
    config = dataclasses.replace(run.config, **initial)
    spec, shapes = run.job.source.spec, _checkpoint_shapes(run.job, config.plan)
    folder = pathlib.Path(str(config.run_dir))
    resumed = checkpoint.load(folder, shapes, lambda about: _check_same(config, spec, about, allowed), iteration)
    hyper = resumed.progress.get("hyper", run.job.hyper)
    return run._replace(config=config, job=run.job._replace(resumed=resumed, hyper=hyper))


def _resumed(run: Run, initial: Mapping[str, Any], changes: Mapping[str, Any], allowed: Collection[str]) -> Run:
    """Returns a prepared run that resumes from its newest checkpoint.

    Raises:
      FinishedError: it has ended.
    """
    run = _loaded(run, initial, allowed)
    config, resumed = run.config, run.job.resumed
    assert resumed is not None
    folder = pathlib.Path(str(config.run_dir))
    finished = not {"total_env_steps", "stop_at_return"}.isdisjoint(changes)
    finished = finished or run_files.finished(folder, config.evaluation_episodes)
    progress = {**resumed.progress, "halved": False}  # a member that is resumed by itself goes on
    (decision,) = decide(config, ["training"], [Saved(folder, [progress], 1, False, finished)])
    if isinstance(decision, Ended):
        done, score = resumed.env_steps, score_of(progress)
        field = str(ended_by(config, done, score))
        what = f"done {done} env steps of" if field == "total_env_steps" else f"reached a mean return of {score:.4g},"
        raise FinishedError(f"{folder} has {what} {flag(field)} {getattr(config, field)}; name more to go on")
    return run


def _resumed_population(
    population: PopulationRun,
    file: IO[bytes] | None,
    files: contextlib.ExitStack,
    initial: Mapping[str, Any],
    allowed: Collection[str],
) -> PopulationRun:
    """Returns a prepared population whose members go on as ``decide`` says.

    Raises:
      FinishedError: all members are done.
      CheckpointError: the members of a program share no intact checkpoint.
    """
    population.config = config = dataclasses.replace(population.config, **initial)
    runs, path = list(population.runs), pathlib.Path(str(config.run_dir))
    rows = read_rows(path, population.begun)
    saved = [_saved(pathlib.Path(str(run.config.run_dir)), config) for run in runs]
    for group in population.groups:
        decisions = decide(config, [rows[number].status for number in group], [saved[number] for number in group])
        if Begin() in decisions:
            if any(saved[number].progress for number in group):
                text = f"not all members of {path} that train together have saved their state: they begin again"
                warnings.warn(text, FileWarning, stacklevel=2)
            for number, run in zip(group, _begun([runs[number] for number in group], initial), strict=True):
                runs[number] = run
        for number, decision in zip(group, decisions, strict=True):
            if isinstance(decision, Begin):
                if peers.first():
                    directories.remove(saved[number].folder)  # it holds only reports of lost progress
                rows[number] = dataclasses.replace(population.begun[number])
            elif decision.iteration is not None:
                runs[number] = _loaded(runs[number], initial, allowed, decision.iteration)
                state = runs[number].job.resumed
                assert state is not None
                _go_back(rows[number], decision.status, state)
                if isinstance(decision, Resume) and peers.first():
                    lock = files.enter_context(run_files.lock(str(saved[number].folder)))
                    runs[number] = runs[number]._replace(file=lock)
        states = [state for number in group if (state := runs[number].job.resumed) is not None]
        for number in group:
            if states and runs[number].job.resumed is None:  # the program takes a state for each, and ignores this one
                runs[number] = runs[number]._replace(job=runs[number].job._replace(resumed=states[0]))
    population = population.resumed(runs, rows, file)
    if all(row.status != "training" for row in rows):
        if peers.first():
            write_results(path, rows)  # members may have been resumed one by one
        ends = f"--total-env-steps {config.total_env_steps}"
        if config.stop_at_return is not None:
            ends += f" or --stop-at-return {config.stop_at_return}"
        if any(row.status == "diverged" for row in rows):
            ends += ", or have diverged"
        raise FinishedError(f"all members of {path} have ended at {ends}; name more to go on")
    return population


def _saved(folder: pathlib.Path, config: Train[Any]) -> Saved:
    progress, checkpoints = checkpoint.progress(folder), len(checkpoint.saved(folder))
    finished = run_files.finished(folder, config.evaluation_episodes)
    return Saved(folder, progress, checkpoints, checkpoint.trained(folder), finished)


def _go_back(row: Row, status: str, resumed: Checkpoint) -> None:
    """Sets a member's row back to its checkpoint."""
    row.status = status
    if status != "diverged":  # whose last report is not one of the population
        row.env_steps, row.iteration = resumed.env_steps, resumed.progress["iteration"]
    row.lineage = [x for x in row.lineage if x["iteration"] <= row.iteration]


def _begun(runs: Sequence[Run], initial: Mapping[str, Any]) -> list[Run]:
    """Returns the prepared runs of a program, which begin as those of a new population do."""
    configs = [dataclasses.replace(run.config, **initial) for run in runs]
    variables = init_variables(configs[0], runs[0].job.algorithm)
    jobs = [run.job._replace(config=own, init_variables=variables) for run, own in zip(runs, configs, strict=True)]
    return [run._replace(config=job.config, job=job) for run, job in zip(runs, jobs, strict=True)]


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


def _checkpoint_shapes(job: Job, plan: str) -> Checkpoint:
    """Returns the shapes and dtypes of a checkpoint of this job."""
    key = jax.random.key(0)
    state = jax.eval_shape(job.learner.init, key)
    actor = jax.eval_shape(compiled.start(job), key, job.hyper) if plan == "on_device" else ()
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
