"""Data sets of a run's own experience, ``--record``."""

from __future__ import annotations

import pathlib

import jax

from jaxrl_dist.actors.recorded_policy import probabilities_known
from jaxrl_dist.config.train import Train, settings_of
from jaxrl_dist.data.recorder import Recorder, advising, kinds, unrecordable
from jaxrl_dist.data.writing import Place, Writer
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans.session import Session
from jaxrl_dist.run import directories
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.policies import label
from jaxrl_dist.types import EnvSpec


def check_recording(config: Train, spec: EnvSpec) -> None:
    """Checks that the experience of a resolved config can be recorded, if the config asks for it.

    Raises:
      ConfigError: it cannot.
    """
    if config.record is None:
        return
    problem: str | None
    if config.offline:
        problem = "--plan offline makes no experience"
    elif is_population(config):
        problem = "a population cannot record while it trains; use `jaxrl-dist record` afterwards"
    elif peers.count() > 1:
        problem = "it works in one process"
    else:
        problem = unrecordable(spec)
    if problem is not None:
        raise ConfigError(f"--record {config.record} does not work here: {problem}")


def recorder(session: Session, *, resumed: bool) -> Recorder:
    """Returns the recorder of a run whose config names a directory for its experience.

    Args:
      resumed: if the directory exists, its name gets the first free number from 2 on.

    Raises:
      ConfigError: the directory exists, or cannot be written.
    """
    config = session.config
    spec = session.job.source.spec
    (algorithm,) = session.job.algorithm.values()
    path = pathlib.Path(str(config.record))
    if resumed and path.name not in ("", ".."):  # which are directories, and no names
        path = directories.free(path)
    behaviour = {"run": config.run_dir, "training": label(config.algorithm)}
    about = {"env": spec.id, "settings": settings_of(config), "behaviour": behaviour}
    known = probabilities_known(algorithm, spec, jax.eval_shape(algorithm.init, jax.random.key(0)))
    with advising():
        writer = Writer(Place(path), kinds(spec, known=known), spec.interface)
    return Recorder(writer, spec, about, episodic=algorithm.episodic)
