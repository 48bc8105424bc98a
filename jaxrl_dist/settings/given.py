"""One run's settings, or one policy's: what the user gives, and what presets fill in.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_dist import algorithms
from jaxrl_dist.algorithms import published
from jaxrl_dist.checks import divisor_below
from jaxrl_dist.config.plans import PLANS, default_plan
from jaxrl_dist.config.train import RUN_DEFAULTS, Train
from jaxrl_dist.errors import UnusedError
from jaxrl_dist.protocols import Traits
from jaxrl_dist.settings.policies import Policies

if TYPE_CHECKING:
    from jaxrl_dist.envs.source import EnvSource
    from jaxrl_dist.types import EnvSpec

RUN_FIELDS = {field.name for field in dataclasses.fields(Train)}
NOBODY = ("default", "preset")
"""Sources of values that nobody gave."""


class Given(NamedTuple):
    """What the user gives a run, or one of its policies; a preset may fill in the rest."""

    config: Train[Any]
    """Its fields have been checked. The algorithm is a name, a class or a config."""
    own: Mapping[str, Any]
    """Hyperparameters that are given beside the algorithm."""
    sources: Mapping[str, str]
    """``yours``, or ``stored`` in a run's file, for each field and hyperparameter that is given."""

    @property
    def by_name(self) -> bool:
        """Whether the algorithm gets its preset's hyperparameters; one given as a config keeps its own."""
        return isinstance(self.config.algorithm, str | type)


def several(algorithm: Any) -> bool:
    """Returns whether the ``algorithm`` of a ``Train`` holds those of several policies."""
    return isinstance(algorithm, Mapping | Policies)


def kind_of(algorithm: Any) -> Any:
    """Returns the config class of an algorithm, given by its name, its class or a config."""
    return algorithms.config_class(algorithm) if isinstance(algorithm, str | type) else type(algorithm)


def given(config: Train[Any], own: Mapping[str, Any] = {}, sources: Mapping[str, str] = {}) -> Given:
    """Checks what the user gives, before the environment is known.

    Args:
      config: its fields, and an algorithm by name, by class or as a config.
      own: hyperparameters that are given beside the algorithm.
      sources: where they and some of the fields come from; other fields count as the user's if they differ from their
        defaults.

    Raises:
      ConfigError: a value has the wrong type, is out of range, or has no effect.
    """
    algorithm, by_name = config.algorithm, isinstance(config.algorithm, str | type)
    values = {name: value for name, value in {**_of_name(algorithm), **own}.items() if name not in RUN_FIELDS}
    made = kind_of(algorithm)(**values) if by_name else dataclasses.replace(algorithm, **values)
    kept = own if by_name or own else [field.name for field in dataclasses.fields(made)]
    kept = [name for name in kept if sources.get(name) != "stored"]
    config = checked(dataclasses.replace(config, algorithm=made), kept)
    own = {name: getattr(config.algorithm, name) for name in own}
    others = [
        field.name for field in dataclasses.fields(Train) if getattr(config, field.name) not in (field.default, {})
    ]
    sources = dict.fromkeys([*others, *([] if by_name else _given_by(config))], "yours") | dict(sources)
    return Given(dataclasses.replace(config, algorithm=algorithm) if by_name else config, own, sources)


def _given_by(config: Train[Any]) -> list[str]:
    """Returns the hyperparameters that count as given by an algorithm's config: those that differ from its class.

    A run that was filled in before, such as a stored one, gives all.
    """
    again = all(getattr(config, name) is not None for name in RUN_DEFAULTS if name != "num_actors")
    fields, algorithm = dataclasses.fields(config.algorithm), config.algorithm
    return [field.name for field in fields if again or getattr(algorithm, field.name) != field.default]


def _of_name(algorithm: Any) -> Mapping[str, Any]:
    """Returns the fields that an algorithm's name stands for, such as ``apex`` for those of a DQN."""
    return algorithms.PRESETS.get(algorithm, (None, {}))[1] if isinstance(algorithm, str) else {}


def checked(config: Train[Any], kept: Container[str]) -> Train[Any]:
    """As ``config.checked()``; hyperparameters that have no effect and are not ``kept`` get their defaults.

    They are those of a preset, or of a config, that the user's have replaced.

    Raises:
      ConfigError: one of ``kept`` has no effect, or a value is out of range.
    """
    while True:
        try:
            return config.checked()
        except UnusedError as error:
            defaults = {field.name: field.default for field in dataclasses.fields(config.algorithm)}
            if error.field in kept or error.field not in defaults:
                raise
            algorithm = dataclasses.replace(config.algorithm, **{error.field: defaults[error.field]})
            config = dataclasses.replace(config, algorithm=algorithm)


def filled(asked: Given, source: EnvSource) -> tuple[Train[Any], dict[str, str]]:
    """Fills in what the user leaves out, and returns the config with the source of each value as in ``settled``.

    Raises:
      ConfigError: a value is out of range.
    """
    config, spec, algorithm = asked.config, source.spec, asked.config.algorithm
    values, sources = _of_presets(asked, source)
    run = {name: value for name, value in values.items() if name in RUN_FIELDS and getattr(config, name) is None}
    if not PLANS[run.get("plan", config.plan)].threaded:
        run.pop("num_actors", None)
    if asked.by_name:
        hyper = {name: value for name, value in values.items() if name not in RUN_FIELDS}
        algorithm = kind_of(algorithm)(**{**hyper, **asked.own})
    env = f"{spec.backend}:{spec.id}" if isinstance(config.env, str) else config.env
    config = dataclasses.replace(config, algorithm=algorithm, env=env, **run)
    sources |= asked.sources
    return checked(config, [name for name in asked.own if sources[name] != "stored"]), sources


def _of_presets(asked: Given, source: EnvSource) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values of fields and hyperparameters that nobody needs to give, and the sources of both."""
    spec, kind = source.spec, kind_of(asked.config.algorithm)
    core = asked.own.get("core", "none") if asked.by_name else Traits.of(asked.config.algorithm).core
    traits = Traits.of(kind)
    preset = traits.preset(spec)
    if core != "none":
        preset = traits.recurrent_preset(preset)
    is_atari = spec.backend == "envpool" and spec.family == "atari"
    layers = {
        "default": {**RUN_DEFAULTS, "plan": default_plan(is_pure=source.is_pure)},
        "preset": {"atari_preset": "baselines", **preset, **_of_name(asked.config.algorithm)},
        "paper": published.row(algorithms.name_of(kind), spec) if asked.config.published else {},
    }
    values, sources = dict[str, Any](), dict[str, str]()
    for layer, given in layers.items():
        given = {name: value for name, value in given.items() if name != "atari_preset" or is_atari}
        values |= given
        sources |= dict.fromkeys(given, layer)
    return values, sources


def rounded(config: Train[Any], sources: Mapping[str, str], spec: EnvSpec) -> Train[Any]:
    """Returns a filled-in config, the sizes that nobody gave rounded down to what divides over its environments.

    What does not divide and was given, by the user or by ``--published``, stays and is refused where devices are known.
    Their number changes nothing here: a run may be resumed on others.

    Args:
      sources: as ``filled`` returns them.
      spec: the environment's; of one of several policies, that of its agents.
    """
    algorithm, rows, sizes = config.algorithm, config.num_envs * spec.num_agents, dict[str, int]()
    for name in ("replay_capacity", "num_minibatches"):
        size = getattr(Traits.of(algorithm), name)
        if not isinstance(size, int) or sources.get(name, "default") not in NOBODY:
            continue
        if name == "replay_capacity" and size > rows:
            sizes[name] = size - size % rows
        elif name == "num_minibatches" and rows % size:  # else any number of examples of each row divides
            window = algorithm.make(spec).window or config.rollout_length
            sizes[name] = divisor_below(size, rows * (config.rollout_length // window))
    actors = config.num_actors
    if actors is not None and sources["num_actors"] in NOBODY:
        actors = divisor_below(actors, config.num_envs)
    return dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, **sizes), num_actors=actors)
