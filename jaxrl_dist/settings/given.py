"""One run's settings, or one policy's: what the user gives, and what presets fill in.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_dist import algorithms
from jaxrl_dist.algorithms import presets, published
from jaxrl_dist.checks import divisor_below, whole_updates_below
from jaxrl_dist.config.envs import REMOTE
from jaxrl_dist.config.plans import PLANS, default_plan, offline_plan
from jaxrl_dist.config.synonyms import hint
from jaxrl_dist.config.train import RUN_DEFAULTS, Train
from jaxrl_dist.config.values import Fields, marked
from jaxrl_dist.errors import ConfigError, UnusedError
from jaxrl_dist.protocols import Traits
from jaxrl_dist.settings.policies import Policies

if TYPE_CHECKING:
    from jaxrl_dist.envs.source import EnvSource
    from jaxrl_dist.types import EnvSpec

RUN_FIELDS = {*marked(Train)}
OFFLINE = {"report_interval": 500}
"""Defaults of a run whose clock is updates, where they differ."""
NOBODY = ("default", "preset")
"""Sources of values that nobody gave."""
WAITING = ("evolve_interval", "evaluation_interval", "checkpoint_interval", "video_interval")
"""Intervals that end with a report."""
DEVICES = 8
"""Devices over which sizes that nobody gave divide."""


class Given(NamedTuple):
    """What the user gives a run, or one of its policies; a preset may fill in the rest."""

    config: Train
    """Its fields have been checked. The algorithm is a name, a class or a config."""
    hyperparameters: Fields
    """Hyperparameters that keep their values: those given beside the algorithm,
    and all of one given as a config."""
    sources: Mapping[str, str]
    """``yours``, or ``stored`` in a run's file, for each field and hyperparameter that is given."""


def check_names(kind: type, names: Iterable[str], where: str = "") -> None:
    """Raises ``ConfigError`` for a name of none of an algorithm's hyperparameters,
    or of none of the run's fields.
    """
    known = [*RUN_FIELDS, *marked(kind)]
    for name in names:
        if name not in known:
            instead = hint(name, known, algorithms.having)
            raise ConfigError(
                f"{where}neither Train nor {algorithms.name_of(kind)} has a field {name!r}{instead}"
            )


def several(algorithm: object) -> bool:
    """Returns whether the ``algorithm`` of a ``Train`` holds the algorithms of several policies."""
    return isinstance(algorithm, Mapping | Policies)


def kind_of(algorithm: object) -> type:
    """Returns the config class of an algorithm, given by its name, its class or a config."""
    if isinstance(algorithm, str | type):
        kind: type = algorithms.config_class(algorithm)
        return kind
    return type(algorithm)


def user_values(
    config: Train, hyperparameters: Mapping[str, Any] = {}, sources: Mapping[str, str] = {}
) -> Given:
    """Checks what the user gives, before the environment is known.

    Args:
      config: its fields, and an algorithm by name, by class or as a config.
      hyperparameters: hyperparameters that are given beside the algorithm.
      sources: where they and some of the fields come from;
        other fields count as the user's if they differ from their defaults.

    Raises:
      ConfigError: a value has the wrong type, is out of range, or has no effect.
    """
    algorithm = config.algorithm
    kind = kind_of(algorithm)
    if isinstance(algorithm, str | type):
        named = _fields_of_name(algorithm)
        base = {name: value for name, value in named.items() if name not in RUN_FIELDS}
        fixed = hyperparameters
    else:
        base = vars(algorithm)
        fixed = {**base, **hyperparameters}
    explicit = [name for name in hyperparameters or fixed if sources.get(name) != "stored"]
    complete = dataclasses.replace(config, algorithm=kind(**{**base, **hyperparameters}))
    complete = checked(complete, explicit)
    yours = changed(complete)
    if not isinstance(algorithm, str | type):
        yours += fixed if _filled_in_before(complete) else changed(complete.algorithm)
    return Given(
        dataclasses.replace(complete, algorithm=algorithm),
        {name: getattr(complete.algorithm, name) for name in fixed},
        dict.fromkeys(yours, "yours") | dict(sources),
    )


def _filled_in_before(config: Train) -> bool:
    """Returns whether a config comes from an earlier run, such as a stored one, in which all
    hyperparameters count as given.
    """
    names = [name for name in RUN_DEFAULTS if name != "num_actors"]
    return all(getattr(config, name) is not None for name in names)


def changed(config: object) -> list[str]:
    """Returns the fields of a config that differ from their defaults."""
    return [
        field.name
        for field in dataclasses.fields(config)  # type: ignore[arg-type]
        if getattr(config, field.name) not in (field.default, {})
    ]


def _fields_of_name(algorithm: object) -> Fields:
    """Returns the fields that an algorithm's name stands for: of ``apex``, those of a DQN."""
    if isinstance(algorithm, str) and algorithm in algorithms.PRESETS:
        return algorithms.PRESETS[algorithm][1]
    return {}


def checked(config: Train, explicit: Container[str]) -> Train:
    """As ``config.checked()``, but a hyperparameter that has no effect and is not ``explicit`` gets
    its default.

    It is one of a preset, or of a config, which another value of the user's has replaced.

    Raises:
      ConfigError: one of ``explicit`` has no effect, or a value is out of range.
    """
    while True:
        try:
            return config.checked()
        except UnusedError as error:
            defaults = {field.name: field.default for field in dataclasses.fields(config.algorithm)}
            if error.field in explicit or error.field not in defaults:
                raise
            default = {error.field: defaults[error.field]}
            config = dataclasses.replace(
                config, algorithm=dataclasses.replace(config.algorithm, **default)
            )


def filled(user: Given, source: EnvSource) -> tuple[Train, dict[str, str]]:
    """Fills in what the user leaves out, and returns the config with the source of each value as
    in ``resolved_with_sources``.

    Raises:
      ConfigError: a value is out of range.
    """
    config = user.config
    kind = kind_of(config.algorithm)
    values, sources = _preset_values(user, source)
    run = _run_fields(user, values)
    hyperparameters = {name: value for name, value in values.items() if name not in RUN_FIELDS}
    check_names(kind, hyperparameters, f"the preset of {algorithms.name_of(kind)}: ")
    algorithm = kind(**{**hyperparameters, **user.hyperparameters})
    env = config.env
    if isinstance(env, str) and env:
        env = f"{source.spec.backend}:{source.spec.id}"
    sources |= user.sources
    explicit = [name for name in user.hyperparameters if sources.get(name) != "stored"]
    config = dataclasses.replace(config, algorithm=algorithm, env=env, **run)
    return checked(config, explicit), sources


def _run_fields(user: Given, values: Fields) -> Fields:
    """Returns the values of fields of ``Train`` that the user leaves out.

    Raises:
      UnusedError: the plan that they name makes no use of a field of the user's.
    """
    config = user.config
    run = {
        name: values[name] for name in RUN_FIELDS & values.keys() if getattr(config, name) is None
    }
    if "report_interval" in run:  # by default, none of the user's intervals waits for a report
        waiting = [getattr(config, name) for name in WAITING]
        run["report_interval"] = min(filter(None, [run["report_interval"], *waiting]))
    name_of_plan = run.get("plan", config.plan)
    plan = PLANS[name_of_plan]
    # A config that was filled in before has values that nobody gave.
    if run.keys() > {"num_actors"}:
        for name in plan.unused:
            if user.sources.get(name) == "yours" and getattr(config, name, 0) is not None:
                raise UnusedError(f"does nothing under --plan {name_of_plan}", name)
    if not plan.threaded:
        run.pop("num_actors", None)
    return run


def _preset_values(user: Given, source: EnvSource) -> tuple[Fields, dict[str, str]]:
    """Returns the values of fields and hyperparameters that nobody needs to give, and the sources
    of both.
    """
    config = user.config
    spec = source.spec
    kind = kind_of(config.algorithm)
    replays = Traits.of(kind).replay_capacity is not None
    defaults = {**RUN_DEFAULTS, **presets.report_interval(spec, replays=replays)}
    preset = _preset_for(user, spec)
    if config.offline:
        defaults |= {**OFFLINE, "plan": offline_plan()}
        for name in (*OFFLINE, "plan"):
            preset.pop(name, None)
    else:
        defaults["plan"] = default_plan(is_pure=source.is_pure)
    # the spec is that of the data set, or of clients that train already
    if not config.env or spec.backend == REMOTE:
        defaults["evaluation_episodes"] = 0
        preset.pop("evaluation_episodes", None)
    layers = {
        "default": defaults,
        "preset": {"atari_preset": "baselines", **preset, **_fields_of_name(config.algorithm)},
        "paper": published.row(algorithms.name_of(kind), spec) if config.published else {},
    }
    is_atari = spec.backend == "envpool" and spec.family == "atari"
    values = dict[str, Any]()
    sources = dict[str, str]()
    for layer, fields in layers.items():
        for name, value in fields.items():
            if name != "atari_preset" or is_atari:
                values[name] = value
                sources[name] = layer
    trained = _of_trained(config, {**values, **user.hyperparameters})
    return {**values, **trained}, sources | dict.fromkeys(trained, "preset")


def _preset_for(user: Given, spec: EnvSpec) -> dict[str, Any]:
    """Returns the values of the algorithm's preset for an environment."""
    traits = Traits.of(kind_of(user.config.algorithm))
    preset = traits.preset(spec)
    cores = user.config.vary.get("core", user.hyperparameters.get("core", traits.core))
    if any(core != "none" for core in str(cores).split(",")):  # members share the preset
        preset = traits.recurrent_preset(preset)
    return dict(preset)


def _of_trained(config: Train, values: Fields) -> Fields:
    """Returns the values of a run whose policy is loaded, and need not explore anew."""
    kind = kind_of(config.algorithm)
    if not config.init_from or config.init_parts or config.offline:
        return {}
    trained = {
        "random_steps": 0,
        "epsilon_start": values.get("epsilon_end", getattr(kind, "epsilon_end", 0.0)),
    }
    return {name: value for name, value in trained.items() if name in marked(kind)}


def rounded(config: Train, sources: Mapping[str, str], spec: EnvSpec) -> Train:
    """Returns a filled-in config, the sizes that nobody gave
    rounded down to what divides over its environments.

    What does not divide and was given, by the user or by ``--published``, stays and is refused
    where devices are known. Their number changes nothing here: a run may be resumed on others.
    Batches of the presets divide over ``DEVICES``.

    Args:
      sources: as ``filled`` returns them.
      spec: the environment's; of one of several policies, that of its agents.
    """

    if config.offline:
        return config

    def may_round(name: str, size: object) -> bool:
        is_number = isinstance(size, int | float)
        return is_number and sources.get(name, "default") in NOBODY

    rows = config.num_envs * spec.num_agents
    traits = Traits.of(config.algorithm)
    capacity = traits.replay_capacity
    sizes: dict[str, float] = {}
    # An algorithm that may replay, and does not, leaves the other fields unused.
    if isinstance(capacity, int):
        if capacity > rows and may_round("replay_capacity", capacity):
            sizes["replay_capacity"] = capacity // rows * rows
        ratio = traits.replay_ratio
        if ratio is not None and may_round("replay_ratio", ratio):
            sizes["replay_ratio"] = whole_updates_below(ratio, rows * config.rollout_length)
    else:
        most = traits.num_minibatches
        if most is not None and may_round("num_minibatches", most):
            sizes["num_minibatches"] = _minibatches(most, config, spec)
    actors = config.num_actors
    if actors is not None and may_round("num_actors", actors):
        actors = divisor_below(actors, config.num_envs)
    return dataclasses.replace(
        config, algorithm=dataclasses.replace(config.algorithm, **sizes), num_actors=actors
    )


def _minibatches(most: int, config: Train, spec: EnvSpec) -> int:
    """Returns the largest number up to ``most`` that divides the examples of a rollout.

    It also divides those of each device, of as many of ``DEVICES`` as the environments divide
    over, if there are enough examples.
    """
    rows = config.num_envs * spec.num_agents
    devices = math.gcd(config.num_envs, DEVICES)
    if rows // devices % most == 0:
        return most
    window = config.algorithm.make(spec).window or config.rollout_length
    examples = rows * (config.rollout_length // window)
    if examples < most * devices:
        devices = 1
    return divisor_below(most, examples // devices)
