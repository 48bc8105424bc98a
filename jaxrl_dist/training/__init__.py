"""From a ``Train`` config to an iterator of reports."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxrl_dist.config import Train

if TYPE_CHECKING:
    from jaxrl_dist.types import Report

# What needs JAX is imported where it is used: a run's config can be read without it.


def train(config: Train[Any]) -> Iterator[Report]:
    """Trains, yielding a report each interval; the last one carries an evaluation, as do those at its interval.

    Nothing runs that the caller does not ask for by taking the next report, so leaving the loop stops training. With
    a ``run_dir``, config, metrics, summary, checkpoints and trained variables are written there; what the run has
    learnt is saved however it ends, before an error is raised. ``close()`` an iterator that is left and kept.

    In the main thread Ctrl-C ends the run after its update; a second one, at least 1 s later, at once.

    Raises:
      ConfigError: at once, before anything is written, if the config cannot be run.
    """
    from jaxrl_dist.training.setup import prepare

    return prepare(config).reports()


def resume(
    run_dir: str | pathlib.Path, algorithm: type | None = None, *, env: Any = None, torso: Any = None, **changes: Any
) -> Iterator[Report]:
    """Goes on with a run from the newest of its checkpoints that is whole, and yields reports as ``train`` does.

    Under the plan ``on_device`` it goes on as if it had never stopped, bit for bit. Where environments are on the host
    they start anew, and so do actors in threads; two runs that are resumed from equal checkpoints are equal.

    Args:
      algorithm: the config class that is trained, if it is not one of ours. No file can name code to run.
      env: the run's environment, where no file can hold it: an object, or of the form ``my_module:make``.
      torso: the network of your own that is trained, if there is one.
      changes: fields of ``Train`` among ``RESUMABLE``, such as ``total_env_steps``.

    Raises:
      ConfigError: at once, if the run cannot go on so.
      CheckpointError: at once, if it has no checkpoint that can be read.
    """
    from jaxrl_dist.training.resuming import prepare_resume
    from jaxrl_dist.training.stored import stored_config

    config = stored_config(run_dir, algorithm, env, torso)
    return prepare_resume(config, pathlib.Path(run_dir), changes).reports()


def preset(algorithm: str | type, env: Any, **changes: Any) -> Train[Any]:
    """The config that ``Train(algorithm, env=env)`` stands for, with some fields changed.

    Args:
      algorithm: its name, or its config class.
      env: as in ``Train``.
      changes: fields of ``Train`` or hyperparameters of the algorithm, such as ``learning_rate=3e-4``.

    Raises:
      ConfigError: no such algorithm, environment or field, or a value that is out of range.
    """
    from jaxrl_dist.training.resolving import resolved

    return resolved(Train(algorithm, env=env), changes)[0]
