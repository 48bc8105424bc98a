"""Prepares to resume a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shlex
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import IO, Any

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
from jaxrl_dist.run import checkpoint, directories, machine
from jaxrl_dist.run import files as run_files
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.stored import SPACES, check_clock, differences, stored_content, to_json
from jaxrl_dist.training.learner import check_sizes
from jaxrl_dist.training.population import PopulationRun
from jaxrl_dist.training.results import read_rows, write_results
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
            run = _resumed_population(run, file, files, initial, changes, allowed)
        else:
            resumed = _resumed(run, initial, changes, allowed)
            run = resumed._replace(file=file)
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


def _resumed(
    run: Run,
    initial: Mapping[str, Any],
    changes: Mapping[str, Any],
    allowed: Collection[str],
    *,
    iteration: int | None = None,
    again: bool = False,
) -> Run:
    """Returns a prepared run that resumes from its newest checkpoint.

    Args:
      initial: the fields of the run's config that only its first session used.
      allowed: fields that may differ from the checkpoint's.
      iteration: of the checkpoint to resume from; None: the newest.
      again: also resume a finished run, as a member of a population.
    """
    config = dataclasses.replace(run.config, **initial)
    assert config.run_dir is not None
    run_dir, spec = pathlib.Path(config.run_dir), run.job.source.spec
    shapes = _checkpoint_shapes(run.job)
    resumed = checkpoint.load(run_dir, shapes, lambda about: _check_same(config, spec, about, allowed), iteration)
    done, score = resumed.env_steps, score_of(resumed.progress)
    field = ended_by(config, done, score)
    ends = {"total_env_steps", "stop_at_return"}
    over = not ends.isdisjoint(changes) or run_files.finished(run_dir, config.evaluation_episodes)
    if field is not None and over and not again:
        what = f"done {done} env steps of" if field == "total_env_steps" else f"reached a mean return of {score:.4g},"
        raise FinishedError(f"{run_dir} has {what} {flag(field)} {getattr(config, field)}; name more to go on")
    hyper = resumed.progress.get("hyper", run.job.hyper)
    return run._replace(config=config, job=run.job._replace(resumed=resumed, hyper=hyper))


def _resumed_population(
    population: PopulationRun,
    file: IO[bytes] | None,
    files: contextlib.ExitStack,
    initial: Mapping[str, Any],
    changes: Mapping[str, Any],
    allowed: Collection[str],
) -> PopulationRun:
    """Returns a prepared population whose members resume; members of one program resume from the same iteration.

    Members that have saved nothing, because the population was stopped before they began, begin now. So do those of a
    program that was killed while its members saved for the first time. A member that has diverged has ended, also if
    its state is lost.

    Raises:
      ConfigError: all members are done.
      CheckpointError: the members of a program share no intact checkpoint.
    """
    population.config = config = dataclasses.replace(population.config, **initial)
    runs = list(population.runs)
    rows = read_rows(pathlib.Path(str(config.run_dir)), population.begun)
    for group in population.groups:
        all_folders = {number: pathlib.Path(str(runs[number].config.run_dir)) for number in group}
        found = {number: checkpoint.progress(folder) for number, folder in all_folders.items()}
        there = {number: own for number, own in found.items() if own or rows[number].status != "diverged"}
        folders = {number: all_folders[number] for number in there}
        if not there:
            continue
        if not any(there.values()) or _first_save_was_cut(folders.values(), config.keep_checkpoints):
            if any(there.values()):
                text = (
                    f"not all members of {config.run_dir} that train together have saved their state: they begin again"
                )
                warnings.warn(text, FileWarning, stacklevel=2)
            begun = _begun([runs[number] for number in group], initial)
            for number, run in zip(group, begun, strict=True):
                runs[number] = run
            for number in there:
                if peers.first():
                    directories.remove(folders[number])  # it holds only reports of lost progress
                rows[number] = dataclasses.replace(population.begun[number])
            continue
        over = {number for number in there if rows[number].status == "diverged" or _over(config, there[number])}
        going = [{x["iteration"] for x in there[number]} for number in there if number not in over]
        common = set.intersection(*going) if going else set()
        if going and not common:
            alone = f"resume them one by one, such as {next(iter(folders.values()))}"
            raise CheckpointError(f"the members of {config.run_dir} share no intact checkpoint; {alone}")
        for number in there:
            at = there[number][0]["iteration"] if number in over else max(common)
            runs[number] = _resumed(runs[number], initial, changes, allowed, iteration=at, again=True)
            resumed, row = runs[number].job.resumed, rows[number]
            assert resumed is not None
            if row.status != "diverged":  # whose last report is not one of the population
                row.env_steps, row.iteration = resumed.env_steps, resumed.progress["iteration"]
            row.lineage = [x for x in row.lineage if x["iteration"] <= row.iteration]
            if resumed.progress.get("halved"):
                row.status = "halved"
            elif row.status != "diverged":
                ended = number in over and run_files.finished(folders[number], config.evaluation_episodes)
                row.status = "done" if ended else "training"
            if row.status == "training" and peers.first():
                lock = files.enter_context(run_files.lock(str(folders[number])))
                runs[number] = runs[number]._replace(file=lock)
        for number in found.keys() - there.keys():  # the program takes a state for each member, and ignores this one's
            job = runs[number].job._replace(resumed=runs[min(there)].job.resumed)
            runs[number] = runs[number]._replace(job=job)
    population = population.resumed(runs, rows, file)
    if all(row.status != "training" for row in rows):
        if peers.first():
            write_results(pathlib.Path(str(config.run_dir)), rows)  # members may have been resumed one by one
        ends = f"--total-env-steps {config.total_env_steps}"
        if config.stop_at_return is not None:
            ends += f" or --stop-at-return {config.stop_at_return}"
        if any(row.status == "diverged" for row in rows):
            ends += ", or have diverged"
        raise FinishedError(f"all members of {config.run_dir} have ended at {ends}; name more to go on")
    return population


def _begun(runs: Sequence[Run], initial: Mapping[str, Any]) -> list[Run]:
    """Returns the prepared runs of a program, which begin as those of a new population do."""
    configs = [dataclasses.replace(run.config, **initial) for run in runs]
    variables = init_variables(configs[0], runs[0].job.algorithm)
    jobs = [run.job._replace(config=own, init_variables=variables) for run, own in zip(runs, configs, strict=True)]
    return [run._replace(config=job.config, job=job) for run, job in zip(runs, jobs, strict=True)]


def _first_save_was_cut(folders: Collection[pathlib.Path], keep_checkpoints: int) -> bool:
    """Returns whether only some members of a program have saved their state, and for the first time.

    A damaged checkpoint is one, too. Where only one is kept, a single one may be a later one.
    """
    saved = [checkpoint.saved(folder) for folder in folders]
    first = keep_checkpoints > 1 and all(len(own) < 2 for own in saved)
    return first and not all(saved) and not any(map(checkpoint.trained, folders))


def _over(config: Train[Any], progress: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a member has ended, according to the progress of its checkpoints."""
    return any(x.get("halved") or ended_by(config, x["env_steps"], score_of(x)) for x in progress[:1])


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
