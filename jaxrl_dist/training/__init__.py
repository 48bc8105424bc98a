"""Trains a ``Train`` config, and yields reports."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any, Never

from jaxrl_dist.config.train import Train, launch_of
from jaxrl_dist.hosts import start
from jaxrl_dist.hosts.failing import failing
from jaxrl_dist.protocols import CoreLike, Hyperparameters, TorsoLike
from jaxrl_dist.run.storage import check_run_dir
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.stored import check_asked, stored_config
from jaxrl_dist.types import Report

# The functions import what needs JAX, so that a run's config can be read without it.


def train(config: Train, *others: Never, **fields: Never) -> Iterator[Report]:
    """Trains, and yields a report after each interval. The last report has an evaluation,
    as do those at its interval.

    Training advances only while the caller takes the next report, so leaving the loop stops it.
    With a ``run_dir``, the run writes config, metrics, summary, checkpoints and trained variables
    there. However the run ends, it saves its state before an error is raised. An iterator that you
    keep but do not finish saves on ``close()`` or as Python ends.

    In the main thread Ctrl-C ends the run after its update; a second one, at least 1 s later,
    ends it immediately.

    Raises:
      ConfigError: immediately, before anything is written, if the config cannot be run,
        or if there are other arguments.
    """
    from jaxrl_dist.training.setup import prepare

    if others or fields:
        given: Any = (config, *others, *([fields] if fields else []))
    else:
        given = config
    if isinstance(given, Train):  # else ``prepare`` says what is wrong
        given.check_launch()
        start.start(given)
    with failing():
        return prepare(given).reports()


def resume(
    run_dir: str | pathlib.Path,
    algorithm: type[Hyperparameters] | None = None,
    *,
    env: Any = None,
    torso: TorsoLike | None = None,
    core: CoreLike | None = None,
    change_env_options: bool = False,
    **changes: Any,
) -> Iterator[Report]:
    """Resumes a run from its newest intact checkpoint, and yields reports as ``train`` does.

    Under the plan ``on_device`` the run continues as if it had never stopped, bit for bit.
    Environments on the host and actors in threads are restarted; two runs that are resumed from
    equal checkpoints are equal.

    Args:
      algorithm: the run's config class, if it is not built in. No file can name code to run.
      env: the run's environment, if no file can hold it: an object,
        or a name such as ``my_module:make``.
      torso: the run's custom network, if it has one.
      core: its custom recurrent core, if it has one.
      change_env_options: allow ``env_options`` among the changes, as in a curriculum. Spaces must
        stay the same. Under ``on_device`` episodes that are under way go on with the new options.
      changes: fields of ``Train`` among ``RESUMABLE``, such as ``total_env_steps``. A run with
        ``wandb`` needs it again, True or False, and so does one with a ``record`` outside of the
        current directory, or a hidden one: no file can choose to send metrics away, or where to
        write.

    Raises:
      ConfigError: immediately, if the run cannot be resumed with these arguments.
      CheckpointError: immediately, if no checkpoint can be read.
    """
    from jaxrl_dist.training.resuming import prepare_resume

    check_run_dir(pathlib.Path(run_dir))
    start.start(launch_of(changes))
    with failing():
        config = stored_config(run_dir, algorithm, env, torso=torso, core=core)
        check_asked(vars(config), changes)
        return prepare_resume(
            config, pathlib.Path(run_dir), changes, change_env_options=change_env_options
        ).reports()


def preset(algorithm: str | type[Hyperparameters], env: Any, **changes: Any) -> Train:
    """Returns ``Train(algorithm, env=env)`` with the preset filled in and some fields changed.

    Args:
      algorithm: its name, or its config class.
      env: as in ``Train``.
      changes: fields of ``Train`` or hyperparameters of the algorithm,
        such as ``learning_rate=3e-4``.

    Raises:
      ConfigError: no such algorithm, environment or field, or a value that is out of range.
    """
    return resolved(Train(algorithm, env=env), changes)[0]
