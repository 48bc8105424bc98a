"""Prepares to resume a run."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_dist.checks import flag
from jaxrl_dist.config import RESUMABLE, Train
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.plans import on_device
from jaxrl_dist.plans.devices import learner_devices
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import check_progress
from jaxrl_dist.run import checkpoint
from jaxrl_dist.run import files as run_files
from jaxrl_dist.training.learner import check_sizes
from jaxrl_dist.training.resolving import resolved
from jaxrl_dist.training.run import Run
from jaxrl_dist.training.setup import make_algorithm, prepare
from jaxrl_dist.training.stored import SPACES, to_json
from jaxrl_dist.types import Checkpoint


def prepare_resume(config: Train[Any], run_dir: pathlib.Path, changes: Mapping[str, Any]) -> Run:
    """Prepares to resume a run with this config; ``changes`` and errors are those of ``resume``."""
    for name in changes:
        if name not in RESUMABLE:
            raise ConfigError(f"{flag(name)} cannot change where a run is resumed; {', '.join(RESUMABLE)} can")
    file = run_files.lock(str(run_dir))  # before the checkpoint is read: another process might resume it
    try:
        config = dataclasses.replace(config, run_dir=str(run_dir))
        new, source = resolved(dataclasses.replace(config, init_from=None), changes)
        _check_devices(new, source)
        run = prepare(new, source)
        config = dataclasses.replace(run.config, init_from=config.init_from)
        shapes = _checkpoint_shapes(run.job, run.config.plan)
        here = to_json(config, source.spec)
        resumed = checkpoint.load(run_dir, shapes, lambda about: _check_same(config, here, about))
        done, total = resumed.env_steps, config.total_env_steps
        if done >= total and ("total_env_steps" in changes or run_files.finished(run_dir, config.evaluation_episodes)):
            raise ConfigError(f"{run_dir} has done {done} env steps of --total-env-steps {total}; name more to go on")
        return Run(config, run.job._replace(resumed=resumed), file)
    except BaseException:
        file.close()
        raise


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
        working = [str(n) for n in range(1, len(jax.local_devices()) + 1) if problem(n) is None]
        if working:
            why = f"the run cannot go on over {num_devices} devices; these --num-devices work: {', '.join(working)}"
        raise ConfigError(why)


def _checkpoint_shapes(job: Job, plan: str) -> Checkpoint:
    """Returns the shapes and dtypes of a checkpoint of this job."""
    key = jax.random.key(0)
    state = jax.eval_shape(job.learner.init, key)
    actor = jax.eval_shape(on_device.start(job), key) if plan == "on_device" else ()
    return Checkpoint(state, actor, {})


def _check_same(config: Train[Any], here: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Checks that a checkpoint's run has this config; returns True if the checkpoint holds a replay memory.

    Args:
      here: the config and its environment's spaces, as a new checkpoint would store them.
      about: contents of the checkpoint's ``run.json``.

    Raises:
      ConfigError: a field differs; the message names it.
      LookupError, TypeError, ValueError: ``about`` is damaged.
    """
    check_progress(about["progress"])
    there, here = about["config"], json.loads(json.dumps(here))
    plain = to_json(Train(type(config.algorithm)(), config.env))  # for fields that an older version did not have
    for part in ("algorithm", "hyperparameters", "run"):
        default, old, new = ({part: x[part]} if part == "algorithm" else x[part] for x in (plain, there, here))
        old = {**json.loads(json.dumps(default)), **old}
        for name in sorted(old.keys() | new.keys()):
            if name not in RESUMABLE and old.get(name) != new.get(name):
                raise ConfigError(
                    f"{flag(name)} is {new.get(name)}, and the run to be resumed has {old.get(name)}; it cannot change"
                )
    for name in SPACES:
        old, new = there.get("spaces", {}).get(name), here["spaces"][name]
        if old not in (None, new):  # an older version did not store it
            raise ConfigError(
                f"the environment's {name}s are {new}, and those of the run to be resumed {old}; they cannot change"
            )
    changed = {name for name, version in run_files.versions().items() if about["versions"].get(name) != version}
    if changed:
        text = f"the run was saved with other versions of {', '.join(sorted(changed))}: its numbers may differ a little"
        warnings.warn(text, ConfigWarning, stacklevel=2)
    return bool(there["run"]["checkpoint_replay"])
