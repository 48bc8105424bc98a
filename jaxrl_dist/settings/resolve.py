"""Fills in the fields that a config leaves out, and finds its environment.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_dist import algorithms
from jaxrl_dist.algorithms import published
from jaxrl_dist.checks import did_you_mean, divisor_below, flag, shown
from jaxrl_dist.config.plans import PLANS, default_plan
from jaxrl_dist.config.synonyms import hint
from jaxrl_dist.config.train import OWN, RUN_DEFAULTS, Train, named_env
from jaxrl_dist.errors import ConfigError, UnusedError
from jaxrl_dist.settings.fixed_policies import Copy, Fixed, Still, still
from jaxrl_dist.settings.policies import NAME, Policies, alone, naming
from jaxrl_dist.settings.stored import acting_config

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


def resolved(
    config: Train[Any], changes: Mapping[str, Any] = {}, stored: Collection[str] = ()
) -> tuple[Train[Any], EnvSource]:
    """As ``settled``, without the sources."""
    return settled(config, changes, stored)[:2]


def settled(
    config: Train[Any], changes: Mapping[str, Any] = {}, stored: Collection[str] = ()
) -> tuple[Train[Any], EnvSource, Mapping[str, str]]:
    """Fills in the fields that a config leaves out, and finds its environment.

    Values come from the user, else from a run's file, the algorithm's paper (``--published``), its preset for the
    environment, and defaults. The user's values are checked before the environment is made.

    Args:
      changes: fields of ``Train`` or hyperparameters of the algorithm, which override the algorithm's preset.
      stored: names of changes that a run's file holds: where the user's make one useless, it has its default.

    Returns:
      The complete config, its environment, and the source of each value that is not a default: ``yours``, ``stored``,
      ``paper`` or ``preset``. With several policies, there are no sources.

    Raises:
      ConfigError: no such algorithm, environment or field, or a value that is out of range.
      EnvError: the environment's own code failed.
      TimeoutError: the environment has not answered in time.
    """
    if not isinstance(config, Train):
        raise ConfigError(f"train takes a config such as Train('ppo', env='CartPole-v1'), not {shown(config)}")
    if several(config.algorithm):
        if config.published:
            raise ConfigError("--published is for runs with one policy; set hyperparameters by the policy's name")
        return (*_policies(config, changes), {})
    own = _check_changes(config, changes, stored)
    fields = {"env": named_env(config.env)} | {name: changes[name] for name in changes if name in RUN_FIELDS}
    if "evolve_interval" in stored and changes.get("evolve", config.evolve) is None:
        fields["evolve_interval"] = None
    config = dataclasses.replace(config, **fields)
    try:
        asked = given(config, own, dict.fromkeys(changes, "yours") | dict.fromkeys(stored, "stored"))
    except UnusedError as error:
        if config.vary and error.field in own:
            name = flag(error.field)[2:]
            raise ConfigError(
                f"{error.with_flags}; for some of the members, it goes into --vary, as {name}=..."
            ) from None
        raise
    source = find_env(asked.config)
    config, sources = filled(asked, source)
    if config.atari_preset != source.atari_preset:  # the algorithm's preset has another protocol
        source = find_env(config)
    return rounded(config, sources, source.spec), source, sources


def _check_changes(config: Train[Any], changes: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """Checks the names of changes, and returns the hyperparameters among them.

    Raises:
      ConfigError: no such algorithm or field, or one that members vary.
    """
    kind = _kind(config.algorithm)
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"algorithm must be a name or a config such as PPO(), not {shown(config.algorithm)}")
    own = {name: value for name, value in changes.items() if name not in RUN_FIELDS}
    hyperparameters = [field.name for field in dataclasses.fields(kind)]
    for name in own:
        if name not in hyperparameters:
            instead = hint(name, [*RUN_FIELDS, *hyperparameters], algorithms.having)
            raise ConfigError(f"neither Train nor {algorithms.name_of(kind)} has a field {name!r}{instead}")
    for name in changes.get("vary") or ():
        if (field := name.replace("-", "_")) in changes and field not in stored:
            why = "the members' values are those of --vary"
            if "vary" in stored:
                why = "the stored run varies it; --vary without values makes a single run of it"
            raise ConfigError(f"--vary {name} contradicts {flag(field)}: {why}")
    return own


def several(algorithm: Any) -> bool:
    """Returns whether the ``algorithm`` of a ``Train`` holds those of several policies."""
    return isinstance(algorithm, Mapping) or (not isinstance(algorithm, type) and hasattr(algorithm, "parts"))


def _kind(algorithm: Any) -> Any:
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
    made = _kind(algorithm)(**values) if by_name else dataclasses.replace(algorithm, **values)
    kept = own if by_name or own else vars(made)
    kept = [name for name in kept if sources.get(name) != "stored"]
    config = checked(dataclasses.replace(config, algorithm=made), kept)
    own = {name: getattr(config.algorithm, name) for name in own}
    others = (field for field in dataclasses.fields(Train) if getattr(config, field.name) not in (field.default, {}))
    sources = dict.fromkeys((field.name for field in others), "yours") | dict(sources)
    return Given(dataclasses.replace(config, algorithm=algorithm) if by_name else config, own, sources)


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
    config, spec, own = asked.config, source.spec, asked.own
    atari = {"atari_preset": "baselines"} if spec.backend == "envpool" and spec.family == "atari" else {}
    kind = _kind(config.algorithm)
    core = own.get("core", "none") if asked.by_name else getattr(config.algorithm, "core", "none")
    preset = kind.preset(spec) if hasattr(kind, "preset") else {}
    if core != "none" and hasattr(kind, "recurrent_preset"):
        preset = kind.recurrent_preset(preset)
    layers = {
        "default": {**RUN_DEFAULTS, "plan": default_plan(is_pure=source.is_pure)},
        "preset": {**atari, **preset, **_of_name(config.algorithm)},
        "paper": published.row(algorithms.name_of(kind), spec) if config.published else {},
    }
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer, of_layer in layers.items():
        values |= of_layer
        sources |= dict.fromkeys(of_layer, layer)
    values = {name: value for name, value in values.items() if name != "atari_preset" or atari}
    run = {name: value for name, value in values.items() if name in RUN_FIELDS and getattr(config, name) is None}
    if not PLANS[run.get("plan", config.plan)].threaded:
        run.pop("num_actors", None)
    if asked.by_name:
        hyper = {name: value for name, value in values.items() if name not in RUN_FIELDS}
        algorithm = kind(**{**hyper, **own})
    else:  # a run that was filled in before, such as a stored one, gives everything
        algorithm, again = (
            config.algorithm,
            all(getattr(config, x) is not None for x in RUN_DEFAULTS if x != "num_actors"),
        )
        differ = [x.name for x in dataclasses.fields(kind) if again or getattr(algorithm, x.name) != x.default]
        sources |= dict.fromkeys(differ, "yours")
    env = f"{spec.backend}:{spec.id}" if isinstance(config.env, str) else config.env
    config = dataclasses.replace(config, algorithm=algorithm, env=env, **run)
    return checked(config, [name for name in own if asked.sources.get(name) != "stored"]), {**sources, **asked.sources}


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
        size = getattr(algorithm, name, None)
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


def find_env(config: Train[Any]) -> EnvSource:
    """Finds the environment of a config.

    Raises:
      ConfigError: no environment has this name, or it does not have these options.
      EnvError: its own code failed.
      TimeoutError: the environment has not answered in time.
    """
    from jaxrl_dist.envs.source import find, locate  # slow to import, so after the checks of flags

    if isinstance(config.env, str):
        locate(config.env)

    from jaxrl_dist.envs.base import Wrappers
    from jaxrl_dist.plans.devices import reserve_memory

    reserve_memory(config.mem_fraction)
    parts = getattr(config.algorithm, "parts", {"": config})
    joint = tuple(name for name in parts if _acts_as_one(name, parts, config.env))
    fields = {name: getattr(config, name) for name in Wrappers._fields if name != "joint"}
    wrappers = Wrappers(**fields, joint=joint)
    how = config.atari_preset, config.env_workers, config.env_timeout
    return find(config.env, config.env_options, *how, wrappers)


def _acts_as_one(policy: str, parts: Mapping[str, Train[Any]], env: Any) -> bool:
    """Returns whether the agents of a policy act as one: as those of the policy that it copies or loads.

    Raises:
      ConfigError: it loads the policy of a run that cannot be read.
    """
    algorithm = parts[policy].algorithm
    if isinstance(algorithm, Copy) and algorithm.policy in parts:
        algorithm = parts[algorithm.policy].algorithm
    elif isinstance(algorithm, Fixed):
        with naming(policy):
            algorithm = acting_config(algorithm.run_dir, algorithm.policy, env).algorithm
    return getattr(_kind(algorithm), "joint", False)


# --- Several policies ---------------------------------------------------------------------------------


def _policies(config: Train[Any], changes: Mapping[str, Any]) -> tuple[Train[Any], EnvSource]:
    """As ``resolved``, for several policies.

    Sizes that the user leaves out are the largest of the presets of policies that train; the plan is ``on_device``, or
    ``synchronous`` for environments on the host.
    """
    algorithms = config.algorithm if isinstance(config.algorithm, Mapping) else config.algorithm.parts
    for name in changes:
        if name not in RUN_FIELDS:
            example = f"--{next(iter(algorithms), 'prey')}.{flag(name)[2:]}"
            raise ConfigError(f"{flag(name)} belongs to a policy, and there are several: {example}")
    config = dataclasses.replace(config, **{"env": named_env(config.env), **changes})
    _check_names(config, algorithms)
    config, asked = dataclasses.replace(config, algorithm=Policies()).checked(), dict[str, Given]()
    for name, value in algorithms.items():
        with naming(name):
            asked[name] = _given_policy(config, value)
    if all(isinstance(part.config.algorithm, Still) for part in asked.values()):
        raise ConfigError("no policy trains; one or more must")
    source = find_env(
        dataclasses.replace(config, algorithm=Policies({name: part.config for name, part in asked.items()}))
    )
    config = dataclasses.replace(config, plan=_plan_of_several(config, source))
    found, sources = dict[str, Train[Any]](), dict[str, Mapping[str, str]]()
    for name, part in asked.items():
        part = part._replace(config=dataclasses.replace(part.config, plan=config.plan))
        with naming(name):
            found[name], sources[name] = filled(part, source._replace(spec=source.spec.policies[name]))
    trained = [part for part in found.values() if not isinstance(part.algorithm, Still)]  # the others need no sizes
    shared = [name for name in RUN_DEFAULTS if name not in OWN and getattr(config, name) is None]
    sizes = {name: max(sizes) for name in shared if None not in (sizes := [getattr(part, name) for part in trained])}
    whole = {
        name: Train(part.algorithm, **{field: getattr(part, field) for field in OWN}) for name, part in found.items()
    }
    config = dataclasses.replace(config, algorithm=Policies(whole), **sizes).checked()
    for name, part in whole.items():
        alike = rounded(alone(config, name), sources[name], source.spec.policies[name])
        whole[name] = dataclasses.replace(part, algorithm=alike.algorithm)
        sizes["num_actors"] = alike.num_actors
    return dataclasses.replace(config, algorithm=Policies(whole), **sizes), source


def _plan_of_several(config: Train[Any], source: EnvSource) -> str:
    """Returns the plan of a run of several policies.

    Raises:
      ConfigError: the user's plan trains one.
    """
    plan = config.plan or default_plan(is_pure=source.is_pure)
    if not PLANS[plan].several:
        works = ", ".join(plan for plan, info in PLANS.items() if info.several)
        raise ConfigError(f"--plan {plan} trains one policy, and there are several; plans for them: {works}")
    return plan


def _check_names(config: Train[Any], given: Mapping[str, Any]) -> None:
    """Checks that each policy has agents and an algorithm.

    Raises:
      ConfigError: a policy lacks agents or an algorithm, or its name is invalid.
    """
    for name in given:
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise ConfigError(f"{shown(name)} is no name of a policy: letters, digits, _ and - work, a letter first")
        if name not in config.policies:
            near = did_you_mean(name, config.policies)
            raise ConfigError(f"policy {name} has no agents{near}; --policies {name}=AGENTS names them")
    if left := [name for name in config.policies if name not in given]:
        raise ConfigError(f"policy {left[0]} has no algorithm{did_you_mean(left[0], given)}; each policy needs one")


def _given_policy(config: Train[Any], value: Any) -> Given:
    """Returns what the user gives a policy.

    Args:
      config: that of the run.
      value: an algorithm, a ``Train`` or, from the command line, an algorithm and a dict of fields.
    """
    algorithm, fields = value if isinstance(value, tuple) else (value, {})
    if isinstance(algorithm, Train):
        algorithm, fields = algorithm.algorithm, _own_fields(algorithm)
    if isinstance(algorithm, str) and (made := still(algorithm)) is not None:
        algorithm = made
    kind = _kind(algorithm)
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"its algorithm must be a name or a config such as PPO(), not {shown(algorithm)}")
    own = {name: value for name, value in fields.items() if name not in OWN}
    seen = {name: fields.get(name, getattr(config, name)) for name in OWN}
    if issubclass(kind, Still):
        seen = {name: RUN_DEFAULTS.get(name) for name in OWN}
    return given(
        dataclasses.replace(config, algorithm=algorithm, policies={}, **seen), own, dict.fromkeys(own, "yours")
    )


def _own_fields(part: Train[Any]) -> dict[str, Any]:
    """Returns the fields that a ``Train`` gives its policy.

    Raises:
      ConfigError: it gives another one, which is the run's.
    """
    defaults = Train(part.algorithm)
    for field in dataclasses.fields(Train):
        if field.name not in ("algorithm", *OWN) and getattr(part, field.name) != getattr(defaults, field.name):
            raise ConfigError(f"{flag(field.name)} is the run's, and no policy's; {', '.join(map(flag, OWN))} are")
    return {name: getattr(part, name) for name in OWN if getattr(part, name) is not None}
