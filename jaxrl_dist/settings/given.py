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
from jaxrl_dist.checks import divisor_below, flag, whole_updates_below
from jaxrl_dist.config.plans import PLANS, default_plan, offline_plan
from jaxrl_dist.config.synonyms import hint
from jaxrl_dist.config.train import RUN_DEFAULTS, Train
from jaxrl_dist.config.values import marked
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
    hyperparameters: Mapping[str, Any]
    """Hyperparameters that keep their values: those given beside the algorithm,
    and all of one given as a config."""
    sources: Mapping[str, str]
    """``yours``, or ``stored`` in a run's file, for each field and hyperparameter that is given."""


def check_names(kind: Any, names: Iterable[str], where: str = "") -> None:
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


def several(algorithm: Any) -> bool:
    """Returns whether the ``algorithm`` of a ``Train`` holds those of several policies."""
    return isinstance(algorithm, Mapping | Policies)


def kind_of(algorithm: Any) -> Any:
    """Returns the config class of an algorithm, given by its name, its class or a config."""
    if isinstance(algorithm, str | type):
        return algorithms.config_class(algorithm)
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
    by_name = isinstance(config.algorithm, str | type)
    base = {name: value for name, value in _of_name(algorithm).items() if name not in RUN_FIELDS}
    base = base if by_name else vars(algorithm)
    if by_name:
        fixed = hyperparameters
    else:
        fixed = {**base, **hyperparameters}
    used = [name for name in hyperparameters or fixed if sources.get(name) != "stored"]
    config = checked(
        dataclasses.replace(config, algorithm=kind_of(algorithm)(**{**base, **hyperparameters})),
        used,
    )
    yours = changed(config)
    # a run that was filled in before, such as a stored one, gives all hyperparameters
    if not by_name:
        before = all(
            getattr(config, name) is not None for name in RUN_DEFAULTS if name != "num_actors"
        )
        yours += fixed if before else changed(config.algorithm)
    fixed = {name: getattr(config.algorithm, name) for name in fixed}
    config = dataclasses.replace(config, algorithm=algorithm)
    return Given(config, fixed, dict.fromkeys(yours, "yours") | dict(sources))


def changed(config: Any) -> list[str]:
    """Returns the fields of a config that differ from their defaults."""
    fields = dataclasses.fields(config)
    return [
        field.name for field in fields if getattr(config, field.name) not in (field.default, {})
    ]


def _of_name(algorithm: Any) -> Mapping[str, Any]:
    """Returns the fields that an algorithm's name stands for, such as ``apex`` for those of a
    DQN.
    """
    if isinstance(algorithm, str):
        return algorithms.PRESETS.get(algorithm, (None, {}))[1]
    return {}


def checked(config: Train, explicit: Container[str]) -> Train:
    """As ``config.checked()``; hyperparameters that have no
    effect and are not ``explicit`` get their defaults.

    They are those of a preset, or of a config, that the user's have replaced.

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
            algorithm = dataclasses.replace(
                config.algorithm, **{error.field: defaults[error.field]}
            )
            config = dataclasses.replace(config, algorithm=algorithm)


def filled(user: Given, source: EnvSource) -> tuple[Train, dict[str, str]]:
    """Fills in what the user leaves out, and returns the
    config with the source of each value as in ``settled``.

    Raises:
      ConfigError: a value is out of range.
    """
    config, spec = user.config, source.spec
    values, sources = _of_presets(user, source)
    run = {name: values.pop(name) for name in RUN_FIELDS & values.keys()}
    run = {name: value for name, value in run.items() if getattr(config, name) is None}
    if "report_interval" in run:  # by default, none of the user's intervals waits for a report
        waiting = [getattr(config, name) for name in WAITING]
        run["report_interval"] = min(filter(None, [run["report_interval"], *waiting]))
    plan = PLANS[run.get("plan", config.plan)]
    # a config that was filled in before has values that nobody gave
    new = run.keys() > {"num_actors"}
    for name in plan.unused if new else ():
        if user.sources.get(name) == "yours" and getattr(config, name, 0) is not None:
            raise UnusedError(
                f"{flag(name)} does nothing under --plan {run.get('plan', config.plan)}", name
            )
    if not plan.threaded:
        run.pop("num_actors", None)
    kind = kind_of(config.algorithm)
    check_names(kind, values, f"the preset of {algorithms.name_of(kind)}: ")
    algorithm = kind(**{**values, **user.hyperparameters})
    if isinstance(config.env, str) and config.env:
        env = f"{spec.backend}:{spec.id}"
    else:
        env = config.env
    config = dataclasses.replace(config, algorithm=algorithm, env=env, **run)
    sources |= user.sources
    return checked(
        config, [name for name in user.hyperparameters if sources.get(name) != "stored"]
    ), sources


def _of_presets(user: Given, source: EnvSource) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values of fields and hyperparameters that nobody needs to give,
    and the sources of both.
    """
    spec = source.spec
    kind = kind_of(user.config.algorithm)
    traits = Traits.of(kind)
    preset = traits.preset(spec)
    cores = user.config.vary.get("core", user.hyperparameters.get("core", traits.core))
    if any(core != "none" for core in str(cores).split(",")):  # members share the preset
        preset = traits.recurrent_preset(preset)
    offline = user.config.offline
    if offline:
        plan = offline_plan()
    else:
        plan = default_plan(is_pure=source.is_pure)
    defaults = OFFLINE if offline else {}
    if not user.config.env:  # the spec is that of the data set
        defaults = {**defaults, "evaluation_episodes": 0}
    preset = {
        name: value
        for name, value in preset.items()
        if name not in (*defaults, *(["plan"] if offline else []))
    }
    reports = presets.report_interval(spec, replays=traits.replay_capacity is not None)
    is_atari = spec.backend == "envpool" and spec.family == "atari"
    layers = {
        "default": {**RUN_DEFAULTS, **reports, **defaults, "plan": plan},
        "preset": {"atari_preset": "baselines", **preset, **_of_name(user.config.algorithm)},
        "paper": published.row(algorithms.name_of(kind), spec) if user.config.published else {},
    }
    values = dict[str, Any]()
    sources = dict[str, str]()
    for layer, fields in layers.items():
        fields = {
            name: value for name, value in fields.items() if name != "atari_preset" or is_atari
        }
        values |= fields
        sources |= dict.fromkeys(fields, layer)
    trained = _of_trained(user.config, {**values, **user.hyperparameters})
    return values | trained, sources | dict.fromkeys(trained, "preset")


def _of_trained(config: Train, values: Mapping[str, Any]) -> dict[str, Any]:
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

    def by_nobody(name: str) -> bool:
        return sources.get(name, "default") in NOBODY

    if config.offline:
        return config
    rows = config.num_envs * spec.num_agents
    traits = Traits.of(config.algorithm)
    actors = config.num_actors
    sizes: dict[str, float] = {}
    # what may replay, and does not, leaves the other fields unused
    replays = isinstance(traits.replay_capacity, int)
    if (
        isinstance(traits.replay_capacity, int)
        and traits.replay_capacity > rows
        and by_nobody("replay_capacity")
    ):
        sizes["replay_capacity"] = traits.replay_capacity // rows * rows
    if replays and isinstance(traits.replay_ratio, int | float) and by_nobody("replay_ratio"):
        sizes["replay_ratio"] = whole_updates_below(
            traits.replay_ratio, rows * config.rollout_length
        )
    if not replays and isinstance(traits.num_minibatches, int) and by_nobody("num_minibatches"):
        sizes["num_minibatches"] = _minibatches(traits.num_minibatches, config, spec)
    if actors is not None and by_nobody("num_actors"):
        actors = divisor_below(actors, config.num_envs)
    return dataclasses.replace(
        config, algorithm=dataclasses.replace(config.algorithm, **sizes), num_actors=actors
    )


def _minibatches(most: int, config: Train, spec: EnvSpec) -> int:
    """Returns the largest number up to ``most`` that divides the examples of a rollout.

    Those of each device, too, of as many of ``DEVICES`` as the environments divide over,
    if there are enough examples.
    """
    rows = config.num_envs * spec.num_agents
    devices = math.gcd(config.num_envs, DEVICES)
    if rows // devices % most == 0:
        return most
    examples = config.rollout_length // (
        config.algorithm.make(spec).window or config.rollout_length
    )
    return divisor_below(
        most, rows * examples // (devices if rows * examples >= most * devices else 1)
    )
