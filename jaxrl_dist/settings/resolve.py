"""Fills in the fields that a config leaves out, and finds its environment.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_dist import algorithms
from jaxrl_dist.algorithms import config_class, published
from jaxrl_dist.checks import did_you_mean, divisor_below, flag, shown
from jaxrl_dist.config.plans import PLANS, default_plan
from jaxrl_dist.config.synonyms import hint
from jaxrl_dist.config.train import RUN_DEFAULTS, Train, named_env
from jaxrl_dist.config.values import plain
from jaxrl_dist.errors import ConfigError, UnusedError
from jaxrl_dist.settings.fixed_policies import Copy, Fixed, Still, still
from jaxrl_dist.settings.policies import NAME, OWN, Policies, alone, naming
from jaxrl_dist.settings.stored import acting_config

if TYPE_CHECKING:
    from jaxrl_dist.envs.source import EnvSource
    from jaxrl_dist.types import EnvSpec

RUN_FIELDS = {field.name for field in dataclasses.fields(Train)}


def resolved(
    config: Train[Any], changes: Mapping[str, Any] = {}, stored: Collection[str] = ()
) -> tuple[Train[Any], EnvSource]:
    """Fills in the fields that a config leaves out, and finds its environment.

    The user's values are checked before the environment is made.

    Args:
      changes: fields of ``Train`` or hyperparameters of the algorithm, which override the algorithm's preset.
      stored: names of changes that a run's file holds: where the user's make one useless, it has its default.

    Raises:
      ConfigError: no such algorithm, environment or field, or a value that is out of range.
      EnvError: the environment's own code failed.
      TimeoutError: the environment has not answered in time.
    """
    if not isinstance(config, Train):
        raise ConfigError(f"train takes a config such as Train('ppo', env='CartPole-v1'), not {shown(config)}")
    config = dataclasses.replace(config, env=named_env(config.env))
    if not isinstance(config.algorithm, str | type) and several(config.algorithm):
        if config.published:
            raise ConfigError("--published is for runs with one policy; set hyperparameters by the policy's name")
        return resolved_policies(config, changes)
    by_name = isinstance(config.algorithm, str | type)
    kind = _kind(config.algorithm)
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"algorithm must be a name or a config such as PPO(), not {shown(config.algorithm)}")
    hyperparameters = [field.name for field in dataclasses.fields(kind)]
    for name in changes:
        if name not in RUN_FIELDS and name not in hyperparameters:
            instead = hint(name, [*RUN_FIELDS, *hyperparameters], algorithms.having)
            raise ConfigError(f"neither Train nor {algorithms.name_of(kind)} has a field {name!r}{instead}")
    for name in changes.get("vary") or ():
        if (field := name.replace("-", "_")) in changes and field not in stored:
            why = "the members' values are those of --vary"
            if "vary" in stored:
                why = "the stored run varies it; --vary without values makes a single run of it"
            raise ConfigError(f"--vary {name} contradicts {flag(field)}: {why}")
    own = {name: value for name, value in changes.items() if name not in RUN_FIELDS}
    config = dataclasses.replace(config, **{name: changes[name] for name in changes if name in RUN_FIELDS})
    if config.evolve is None and "evolve_interval" in stored:
        config = dataclasses.replace(config, evolve_interval=None)

    try:
        asked = dataclasses.replace(config, algorithm=without_preset(config.algorithm, own, stored)).checked()
    except UnusedError as error:
        if config.vary and error.field in own:
            name = flag(error.field)[2:]
            raise ConfigError(
                f"{error.with_flags}; for some of the members, it goes into --vary, as {name}=..."
            ) from None
        raise
    own = {name: getattr(asked.algorithm, name) for name in own}
    asked = dataclasses.replace(asked, algorithm=config.algorithm if by_name else asked.algorithm)

    source = find_env(asked)
    config = filled(asked, own, source)
    if config.atari_preset != source.atari_preset:  # the algorithm's preset has another protocol
        source = find_env(config)
    return rounded(config, asked, own, source.spec), source


def several(algorithm: Any) -> bool:
    """Returns whether the ``algorithm`` of a ``Train`` holds those of several policies."""
    return isinstance(algorithm, Mapping) or hasattr(algorithm, "parts")


def _kind(algorithm: Any) -> Any:
    """Returns the config class of an algorithm, given by its name, its class or a config."""
    return algorithms.config_class(algorithm) if isinstance(algorithm, str | type) else type(algorithm)


def filled(config: Train[Any], own: Mapping[str, Any], source: EnvSource) -> Train[Any]:
    """As ``resolve``, with hyperparameters ``own`` that override the preset's; checks the result."""
    by_name = isinstance(config.algorithm, str | type)
    config = resolve(config, source, own)
    algorithm = dataclasses.replace(config.algorithm, **own)
    return dataclasses.replace(config, algorithm=without_unused(algorithm) if by_name else algorithm).checked()


def rounded(config: Train[Any], asked: Train[Any], own: Collection[str], spec: EnvSpec) -> Train[Any]:
    """Returns a filled-in config, the sizes that nobody gave rounded down to what divides over its environments.

    What does not divide and was given, by the user or by ``--published``, stays and is refused where devices are known.
    Their number changes nothing here: a run may be resumed on others.

    Args:
      asked: what the user gave. An algorithm's config counts as giving what differs from its class; that of a run that
        was filled in before, such as a stored one, gives everything.
      own: names of hyperparameters that the user gave besides.
      spec: the environment's; of one of several policies, that of its agents.
    """
    algorithm, rows, sizes = config.algorithm, config.num_envs * spec.num_agents, dict[str, int]()
    given = {*own, *(published.row(algorithms.name_of(algorithm), spec) if config.published else ())}
    by_name = isinstance(asked.algorithm, str | type)
    filled_in = all(getattr(asked, name) is not None for name in RUN_DEFAULTS if name != "num_actors")
    for name in ("replay_capacity", "num_minibatches"):
        size, default = (getattr(each, name, None) for each in (algorithm, type(algorithm)))
        if not isinstance(size, int) or name in given or not (by_name or (size == default and not filled_in)):
            continue
        if name == "replay_capacity" and size > rows:
            sizes[name] = size - size % rows
        elif name == "num_minibatches" and rows % size:  # else any number of examples of each row divides
            window = algorithm.make(spec).window or config.rollout_length
            sizes[name] = divisor_below(size, rows * (config.rollout_length // window))
    if config.num_actors is not None and asked.num_actors is None:
        config = dataclasses.replace(config, num_actors=divisor_below(config.num_actors, config.num_envs))
    return dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, **sizes))


def without_preset(algorithm: Any, own: Mapping[str, Any], stored: Collection[str] = ()) -> Any:
    """Returns the hyperparameters that are known before the environment, whose preset may add more.

    Args:
      stored: names in ``own`` whose values may have no effect.

    Raises:
      ConfigError: a value of ``own`` has the wrong type, is out of range, or has no effect.
    """
    if isinstance(algorithm, str | type):
        named = algorithms.PRESETS.get(algorithm, (None, {}))[1] if isinstance(algorithm, str) else {}
        given = {**{name: value for name, value in named.items() if name not in RUN_FIELDS}, **own}
        algorithm = algorithms.config_class(algorithm)(**given)
    elif own:
        algorithm = dataclasses.replace(algorithm, **own)
    else:
        return algorithm
    return without_unused(plain(algorithm), own.keys() - set(stored))


def without_unused(algorithm: Any, kept: Container[str] = ()) -> Any:
    """Resets hyperparameters that have no effect to their defaults: those of a preset, or of a config, that the user's
    have replaced.

    Raises:
      ConfigError: one of ``kept`` has no effect, or a value is out of range.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(algorithm)}
    while True:
        try:
            getattr(algorithm, "validate", lambda: None)()
        except UnusedError as error:
            if error.field in kept:
                raise
            algorithm = dataclasses.replace(algorithm, **{error.field: defaults[error.field]})
        else:
            return algorithm


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
    seen = config.frame_stack, config.action_repeat, config.time_limit, config.hide
    wrappers = Wrappers(*seen, config.policies, joint, config.agent_ids, config.info_metrics)
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


def resolve(config: Train[Any], source: EnvSource, own: Mapping[str, Any] = {}) -> Train[Any]:
    """Fills in the fields that a config leaves out, from the preset for ``source``, else from ``RUN_DEFAULTS``.

    An algorithm given by name or class gets its preset's hyperparameters; one given as a config keeps its own.

    Args:
      own: the user's hyperparameters of an algorithm given by name or class.
    """
    spec = source.spec
    by_name = isinstance(config.algorithm, str | type)
    kind = _kind(config.algorithm)
    plan = default_plan(is_pure=source.is_pure)
    core = own.get("core", "none") if by_name else getattr(config.algorithm, "core", "none")
    preset = kind.preset(spec) if hasattr(kind, "preset") else {}
    if core != "none" and hasattr(kind, "recurrent_preset"):
        preset = kind.recurrent_preset(preset)
    preset = {**RUN_DEFAULTS, "plan": plan, **preset}
    if by_name:
        preset |= algorithms.PRESETS.get(config.algorithm, (None, {}))[1]
    if config.published:
        preset |= published.row(algorithms.name_of(kind), spec)
    if spec.backend == "envpool" and spec.family == "atari":
        preset.setdefault("atari_preset", "baselines")
    else:
        preset.pop("atari_preset", None)
    run = {name: value for name, value in preset.items() if name in RUN_FIELDS and getattr(config, name) is None}
    if not PLANS[run.get("plan", config.plan)].threaded:
        run.pop("num_actors", None)
    algorithm = config.algorithm
    if by_name:
        algorithm = kind(**{name: value for name, value in preset.items() if name not in RUN_FIELDS})
    env = f"{spec.backend}:{spec.id}" if isinstance(config.env, str) else config.env
    return dataclasses.replace(config, algorithm=algorithm, env=env, **run)


# --- Several policies ---------------------------------------------------------------------------------


def resolved_policies(config: Train[Any], changes: Mapping[str, Any]) -> tuple[Train[Any], EnvSource]:
    """As ``resolving.resolved``, for several policies.

    Sizes that the user leaves out are the largest of the presets of policies that train; the plan is ``on_device``, or
    ``synchronous`` for environments on the host.
    """
    given = config.algorithm if isinstance(config.algorithm, Mapping) else config.algorithm.parts
    for name in changes:
        if name not in RUN_FIELDS:
            example = f"--{next(iter(given), 'prey')}.{flag(name)[2:]}"
            raise ConfigError(f"{flag(name)} belongs to a policy, and there are several: {example}")
    config = dataclasses.replace(config, **changes)
    _check_names(config, given)
    asked, parts = dataclasses.replace(config, algorithm=Policies()).checked(), {}
    for name, value in given.items():
        with naming(name):
            parts[name] = _asked(asked, value)
    if all(isinstance(part.algorithm, Still) for part, _ in parts.values()):
        raise ConfigError("no policy trains; one or more must")
    source = find_env(dataclasses.replace(asked, algorithm=Policies({name: part for name, (part, _) in parts.items()})))
    asked = dataclasses.replace(asked, plan=asked.plan or default_plan(is_pure=source.is_pure))
    if not PLANS[asked.plan].several:
        works = ", ".join(plan for plan, info in PLANS.items() if info.several)
        raise ConfigError(f"--plan {asked.plan} trains one policy, and there are several; plans for them: {works}")
    found = {}
    for name, (part, own) in parts.items():
        part = dataclasses.replace(part, plan=asked.plan)
        with naming(name):
            found[name] = filled(part, own, source._replace(spec=source.spec.policies[name]))
    trained = [part for part in found.values() if not isinstance(part.algorithm, Still)]  # the others need no sizes
    sizes = {
        name: max(getattr(part, name) for part in trained)
        for name in RUN_DEFAULTS
        if name not in OWN and getattr(asked, name) is None and (name != "num_actors" or PLANS[asked.plan].threaded)
    }
    whole = {
        name: Train(part.algorithm, **{field: getattr(part, field) for field in OWN}) for name, part in found.items()
    }
    config = dataclasses.replace(asked, algorithm=Policies(whole), **sizes).checked()
    for name, (part, own) in parts.items():
        alike = rounded(alone(config, name), part, own, source.spec.policies[name])
        whole[name] = dataclasses.replace(whole[name], algorithm=alike.algorithm)
        sizes["num_actors"] = alike.num_actors
    return dataclasses.replace(config, algorithm=Policies(whole), **sizes), source


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


def _asked(config: Train[Any], value: Any) -> tuple[Train[Any], dict[str, Any]]:
    """Returns the config that the user gives a policy, which a preset may fill in, and its hyperparameters.

    Args:
      config: that of the run.
      value: an algorithm, a ``Train`` or, from the command line, an algorithm and a dict of fields.
    """
    algorithm, fields = value if isinstance(value, tuple) else (value, {})
    if isinstance(algorithm, Train):
        defaults, part = Train(algorithm.algorithm), algorithm
        for field in dataclasses.fields(Train):
            if field.name not in ("algorithm", *OWN) and getattr(part, field.name) != getattr(defaults, field.name):
                raise ConfigError(f"{flag(field.name)} is the run's, and no policy's; {', '.join(map(flag, OWN))} are")
        fields = {name: getattr(part, name) for name in OWN if getattr(part, name) is not None}
        algorithm = part.algorithm
    if isinstance(algorithm, str) and (made := still(algorithm)) is not None:
        algorithm = made
    by_name = isinstance(algorithm, str | type)
    kind = config_class(algorithm) if by_name else type(algorithm)
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"its algorithm must be a name or a config such as PPO(), not {shown(algorithm)}")
    own = {name: value for name, value in fields.items() if name not in OWN}
    seen = {name: fields.get(name, getattr(config, name)) for name in OWN}
    if issubclass(kind, Still):
        seen = {"normalize_observations": False, "scale_rewards": False, "clip_rewards": None, "ema_steps": 0}
    part = dataclasses.replace(config, algorithm=without_preset(algorithm, own), policies={}, **seen).checked()
    own = {name: getattr(part.algorithm, name) for name in own}
    return dataclasses.replace(part, algorithm=algorithm if by_name else part.algorithm), own
