"""The trials of ``jaxrl-dist sweep --tuner``, whose values Optuna or Ray Tune chooses."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_dist.checks import flag, install_extra
from jaxrl_dist.commands.request import Request
from jaxrl_dist.config.train import ALONE, Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings.members import members

if TYPE_CHECKING:
    from jaxrl_dist.training.run import Run

STUDY = "optuna.db"
"""File of the run directory that holds Optuna's study."""
TRIALS = "trials"
"""Folder of the run directory with a folder for each run of trials."""
RAY = "ray"
"""Folder of the run directory in which Ray Tune writes."""


class Range(NamedTuple):
    """The values that a hyperparameter may take, bounds included."""

    low: int | float
    high: int | float
    log: bool


Space = Range | tuple[str, ...]
Values = Mapping[str, Any]
"""The values of one trial, by the names in ``--vary``."""


class Search(NamedTuple):
    """What a tuner does, and where."""

    run: Request
    """The run of one trial, without the values that the tuner chooses."""
    space: Mapping[str, Space]
    run_dir: pathlib.Path
    trials: int
    jobs: int
    """Number of trials that train at the same time."""
    stop: Callable[[], bool]
    show: Callable[[str], None]
    """Prints a line or a table."""


def check_tuner(tuner: str, run: Request) -> None:
    """Checks that a tuner is installed, and that a command leaves the members of its trials to it.

    Raises:
      ConfigError: it is not, or the command asks for members.
    """
    if importlib.util.find_spec(tuner) is None:
        raise ConfigError(
            f"--tuner {tuner} needs a package that is not installed: {install_extra(tuner)}"
        )
    if not run.fields.get("vary"):
        raise ConfigError(
            f"--tuner {tuner} needs hyperparameters to choose, such as "
            "--vary learning-rate=1e-5:1e-1:log activation=tanh,relu"
        )
    for name in ALONE.keys() & run.fields.keys() - {"vary"}:
        raise ConfigError(
            f"{flag(name)} does not work with --tuner {tuner}, which chooses the values of each "
            "run; remove it"
        )


def spaces(config: Train, vary: Mapping[str, str]) -> dict[str, Space]:
    """Returns what each hyperparameter of ``--vary`` may be.

    Args:
      config: of one trial.
      vary: for each hyperparameter ``LOW:HIGH``, ``LOW:HIGH:log`` or ``A,B,C``.

    Raises:
      ConfigError: there is no such hyperparameter, or it cannot have these values.
    """
    return {name: _space(config, name, text) for name, text in vary.items()}


def _space(config: Train, name: str, text: str) -> Space:
    log = text.endswith(":log")
    bounds = text.removesuffix(":log")
    listed = text
    if bounds.count(":") == 1:
        listed = bounds.replace(":", ",")
    varied = members(dataclasses.replace(config, vary={name: listed}))
    values = [value for member in varied for value in member.values.values()]
    if ":" not in text:
        return tuple(text.split(","))
    if not _are_bounds(values, log=log):
        raise ConfigError(
            f"--vary {name}={text} is not a range of numbers; write LOW:HIGH, LOW:HIGH:log (above "
            "0), or values such as A,B,C"
        )
    low, high = values
    return Range(low, high, log)


def _are_bounds(values: Sequence[Any], *, log: bool) -> bool:
    if len(values) != 2 or any(type(value) not in (int, float) for value in values):
        return False
    low, high = values
    return low < high and (low > 0 or not log)


def prepare_trials(run: Request, trials: Sequence[Values], run_dir: pathlib.Path) -> Run:
    """Prepares one run, a population, of trials with different values."""
    from jaxrl_dist.training.setup import prepare

    vary = {name: ",".join(str(values[name]) for values in trials) for name in trials[0]}
    fields = {**run.fields, "vary": vary, "zip": True, "run_dir": str(run_dir)}
    return prepare(*run._replace(fields=fields).resolved())


class Ranked(NamedTuple):
    """A trial that has a score."""

    score: float
    values: Values
    run: str
    """Directory of the run that trained with these values, within the search's."""


def ranking(trials: Sequence[Ranked], ranked_by: str) -> str:
    """Returns a table of the ten best trials; ``ranked_by`` says what their scores are."""
    from jaxrl_dist.training.tables import aligned

    if not trials:
        return f"no trial has a {ranked_by}"
    best = sorted(trials, key=lambda trial: -trial.score)[:10]
    rows = [(f"{score:.4g}", *map(_short, values.values()), run) for score, values, run in best]
    return aligned([(ranked_by, *best[0].values, "run"), *rows])


def as_flags(values: Values) -> str:
    """Returns the values of a trial as flags, for messages."""
    return " ".join(f"{flag(name)} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
