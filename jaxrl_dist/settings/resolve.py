"""Fills in the fields that a config leaves out, and finds its environment.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_dist.algorithms import having, name_of
from jaxrl_dist.checks import check_used, did_you_mean, flag, shown
from jaxrl_dist.config.envs import REMOTE, named_env
from jaxrl_dist.config.plans import PLANS, default_plan
from jaxrl_dist.config.train import OWN, RUN_DEFAULTS, Train
from jaxrl_dist.config.values import Fields
from jaxrl_dist.envs.native import env_label
from jaxrl_dist.errors import ConfigError, UnusedError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.protocols import Traits
from jaxrl_dist.settings.given import (
    RUN_FIELDS,
    Given,
    changed,
    check_names,
    filled,
    kind_of,
    rounded,
    several,
    user_values,
)
from jaxrl_dist.settings.policies import NAME, Policies, by_policy, naming
from jaxrl_dist.settings.still import Copy, Fixed, Still, read_still
from jaxrl_dist.settings.stored import acting_config

if TYPE_CHECKING:
    from jaxrl_dist.envs.source import EnvSource

_OF_ENV = (
    "atari_preset",
    "frame_stack",
    "action_repeat",
    "time_limit",
    "hide",
    "info_metrics",
    "agent_ids",
)
"""Fields that change what an environment gives."""


def resolved(
    config: Train, changes: Fields | None = None, stored: Collection[str] = ()
) -> tuple[Train, EnvSource]:
    """As ``resolved_with_sources``, without the sources."""
    return resolved_with_sources(config, changes, stored)[:2]


def resolved_with_sources(
    config: Train, changes: Fields | None = None, stored: Collection[str] = ()
) -> tuple[Train, EnvSource, Mapping[str, str]]:
    """Fills in the fields that a config leaves out, and finds its environment.

    Values come from the user, else from a run's file, the algorithm's paper (``--published``), its
    preset for the environment, and defaults. The user's values are checked before the environment
    is made.

    Args:
      changes: fields of ``Train`` or hyperparameters of the algorithm,
        which override the algorithm's preset.
      stored: names of changes that a run's file holds; one that has no effect
        beside the user's gets its default.

    Returns:
      The complete config, its environment, and the source of each value that is not a default:
      ``yours``, ``stored``, ``paper`` or ``preset``. With several policies, there are no sources.

    Raises:
      ConfigError: no such algorithm, environment or field, or a value that is out of range.
      EnvError: the environment's own code failed.
      TimeoutError: the environment has not answered in time.
    """
    if not isinstance(config, Train):
        raise ConfigError(
            f"train takes one config, such as Train('ppo', env='CartPole-v1'), not {shown(config)}"
        )
    changes = changes or {}
    if several(config.algorithm):
        return (*_resolved_policies(config, changes), {})
    hyperparameters = _check_changes(config, changes, stored)
    fields = {name: changes[name] for name in RUN_FIELDS & changes.keys()}
    fields.setdefault("env", named_env(config.env))
    if "evolve_interval" in stored and changes.get("evolve", config.evolve) is None:
        fields["evolve_interval"] = None
    config = dataclasses.replace(config, **fields)
    origins = dict.fromkeys(changes, "yours") | dict.fromkeys(stored, "stored")
    try:
        user = user_values(config, hyperparameters, origins)
    except UnusedError as error:
        if config.vary and error.field is not None and error.field in hyperparameters:
            name = flag(error.field)[2:]
            raise ConfigError(
                f"{error.with_flags}; for some of the members, set it in --vary, as {name}=..."
            ) from None
        raise
    source = find_env(user.config)
    config, sources = filled(user, source)
    if config.atari_preset != source.atari_preset:  # the algorithm's preset has another protocol
        source = find_env(config)
    config = dataclasses.replace(config, env_options={**source.options})
    return rounded(config, sources, source.spec), source, sources


def _check_changes(config: Train, changes: Fields, stored: Collection[str]) -> Fields:
    """Checks the names of changes, and returns the hyperparameters among them.

    Raises:
      ConfigError: no such algorithm or field, or one that members vary.
    """
    kind = kind_of(config.algorithm)
    hyperparameters = {name: value for name, value in changes.items() if name not in RUN_FIELDS}
    check_names(kind, hyperparameters)
    for name in changes.get("vary") or ():
        field = name.replace("-", "_")
        if field not in changes or field in stored:
            continue
        if "vary" in stored:
            raise ConfigError(
                f"{flag(field)} contradicts --vary {name} of the stored run; add --vary without "
                "values to train a single run"
            )
        raise ConfigError(f"--vary {name} contradicts {flag(field)}; remove one")
    return hyperparameters


@in_32_bits
def find_env(config: Train) -> EnvSource:
    """Finds the environment of a config, after reserving the GPU memory that the config asks for.

    Raises:
      ConfigError: no environment has this name, or it does not have these options.
      EnvError: its own code failed.
      TimeoutError: the environment has not answered in time.
    """
    # slow to import, so after the checks of flags
    from jaxrl_dist.envs.host import remote
    from jaxrl_dist.envs.source import find, locate

    if config.env == "" and config.data:
        return _env_of_data(config, config.data)
    if isinstance(config.env, str) and locate(config.env).backend == REMOTE:
        remote.check_config(config)

    from jaxrl_dist.envs.base import Wrappers
    from jaxrl_dist.plans.devices import reserve_memory

    reserve_memory(config.mem_fraction)
    policies = by_policy(config)
    joint = tuple(name for name in policies if _acts_as_one(name, policies, config.env))
    fields = {name: getattr(config, name) for name in Wrappers._fields if name != "joint"}
    wrappers = Wrappers(**fields, joint=joint)
    return find(
        config.env,
        config.env_options,
        config.atari_preset,
        config.env_workers,
        config.env_timeout,
        wrappers,
    )


def _env_of_data(config: Train, directory: str) -> EnvSource:
    """Returns what a data set says about its environment.

    Raises:
      ConfigError: there is no such data set, or the config has a field of an environment.
    """
    from jaxrl_dist.data.dataset import Dataset
    from jaxrl_dist.envs.source import RECORDS, EnvSource
    from jaxrl_dist.types import EnvSpec

    options = ["env_options"] if config.env_options else []
    check_used(config, *options, *_OF_ENV, active=False, needed="--env")
    interface = dict(vars(Dataset.load(directory).interface))
    spec = EnvSpec(directory, RECORDS, RECORDS, max_episode_steps=None, **interface)
    return EnvSource(spec, {})


def _acts_as_one(policy: str, policies: Mapping[str, Train], env: object) -> bool:
    """Returns whether the agents of a policy, or of the policy that it copies or loads, act as one.

    Raises:
      ConfigError: it loads the policy of a run that cannot be read.
    """
    algorithm = policies[policy].algorithm
    if isinstance(algorithm, Copy) and algorithm.policy in policies:
        algorithm = policies[algorithm.policy].algorithm
    elif isinstance(algorithm, Fixed):
        with naming(policy):
            algorithm = acting_config(algorithm.run_dir, algorithm.policy, env)[0].algorithm
    return Traits.of(kind_of(algorithm)).joint


# --- Several policies -----------------------------------------------------------------------------


def _resolved_policies(config: Train, changes: Fields) -> tuple[Train, EnvSource]:
    """As ``resolved``, for several policies.

    Sizes that the user leaves out are the largest of the presets of policies that train; the plan
    is ``on_device``, or ``synchronous`` for environments on the host.
    """
    config, policies = _given_policies(config, changes)
    parts = {name: policy.config for name, policy in policies.items()}
    source = find_env(dataclasses.replace(config, algorithm=Policies(parts)))
    config = dataclasses.replace(config, plan=_plan_of_several(config, source))
    full = dict[str, Train]()
    sources = dict[str, Mapping[str, str]]()
    for name, policy in policies.items():
        policy = policy._replace(config=dataclasses.replace(policy.config, plan=config.plan))
        own_source = source._replace(spec=source.spec.policies[name])
        with naming(name):
            full[name], sources[name] = filled(policy, own_source)
    parts = {
        name: Train(part.algorithm, **{field: getattr(part, field) for field in OWN})
        for name, part in full.items()
    }
    sizes = {**_sizes(config, full.values())}
    config = dataclasses.replace(config, algorithm=Policies(parts), **sizes).checked()
    for name, part in parts.items():
        alike = rounded(by_policy(config)[name], sources[name], source.spec.policies[name])
        parts[name] = dataclasses.replace(part, algorithm=alike.algorithm)
        sizes["num_actors"] = alike.num_actors
    return dataclasses.replace(config, algorithm=Policies(parts), **sizes), source


def _sizes(config: Train, parts: Iterable[Train]) -> Fields:
    """Returns the fields of the run that the user leaves out,
    from the presets of the policies that train.
    """
    trained = [part for part in parts if not isinstance(part.algorithm, Still)]
    shared = [name for name in RUN_DEFAULTS if name not in OWN and getattr(config, name) is None]
    presets = {name: [getattr(part, name) for part in trained] for name in shared}
    return {name: max(values) for name, values in presets.items() if None not in values}


def _given_policies(config: Train, changes: Fields) -> tuple[Train, dict[str, Given]]:
    """Returns the config of the run, without algorithms, and what the user gives each policy."""
    if config.published:
        raise ConfigError(
            "--published needs a run with one policy; set hyperparameters by the policy's name"
        )
    algorithms = config.algorithm
    if isinstance(algorithms, Policies):
        algorithms = algorithms.configs
    for name in changes:
        if name not in RUN_FIELDS:
            policy = next(iter(algorithms), "prey")
            raise ConfigError(
                f"{flag(name)} belongs to a policy, and there are several: --{policy}.{flag(name)[2:]}"
            )
    config = dataclasses.replace(config, **{"env": named_env(config.env), **changes})
    _check_policies(config, algorithms)
    config = dataclasses.replace(config, algorithm=Policies()).checked()
    policies = dict[str, Given]()
    for name, algorithm in algorithms.items():
        with naming(name):
            policies[name] = _given_policy(config, algorithm)
    if all(isinstance(policy.config.algorithm, Still) for policy in policies.values()):
        raise ConfigError("no policy trains; at least one must")
    return config, policies


def _plan_of_several(config: Train, source: EnvSource) -> str:
    """Returns the plan of a run of several policies.

    Raises:
      ConfigError: the user's plan trains one.
    """
    plan = config.plan or default_plan(is_pure=source.is_pure)
    if not PLANS[plan].several:
        works = ", ".join(plan for plan, info in PLANS.items() if info.several)
        raise ConfigError(
            f"--plan {plan} trains one policy, but there are several; use --plan {works}"
        )
    return plan


def _check_policies(config: Train, algorithms: Mapping[str, object]) -> None:
    """Checks that each policy has agents and an algorithm.

    Raises:
      ConfigError: a policy lacks agents or an algorithm, or its name is invalid.
    """
    for name in algorithms:
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{shown(name)} cannot name a policy; use letters, digits, _ and -, with a letter "
                "first"
            )
        if name not in config.policies:
            near = did_you_mean(name, config.policies)
            raise ConfigError(
                f"policy {name} has no agents{near}; name them with --policies {name}=AGENTS"
            )
    for name in config.policies:
        if name not in algorithms:
            near = did_you_mean(name, algorithms)
            raise ConfigError(f"policy {name} has no algorithm{near}; give it one")


def _given_policy(config: Train, algorithm: object) -> Given:
    """Returns what the user gives a policy.

    Args:
      config: the config of the run.
      algorithm: an algorithm, a ``Train`` or,
        from the command line, an algorithm and a dict of fields.
    """
    fields: Fields = {}
    if isinstance(algorithm, tuple):
        algorithm, fields = algorithm
    if isinstance(algorithm, Train):
        fields = _own_fields(algorithm)
        algorithm = algorithm.algorithm
    if isinstance(algorithm, str):
        algorithm = read_still(algorithm) or algorithm
    if isinstance(algorithm, Fixed):
        algorithm = algorithm.pinned()
    kind = kind_of(algorithm)
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(
            f"its algorithm must be a name or a config such as PPO(), not {shown(algorithm)}"
        )
    hyperparameters = {name: value for name, value in fields.items() if name not in OWN}
    values = {**vars(config), **fields}
    if isinstance(algorithm, Still):
        values = {**{name: getattr(Train, name) for name in OWN}, **RUN_DEFAULTS}
    of_policy: dict[str, Any] = {name: values[name] for name in OWN}
    config = dataclasses.replace(config, algorithm=algorithm, policies={}, **of_policy)
    return user_values(config, hyperparameters, dict.fromkeys(hyperparameters, "yours"))


def _own_fields(part: Train) -> Fields:
    """Returns the fields that a ``Train`` gives its policy.

    Raises:
      ConfigError: it gives a field of the run.
    """
    for name in changed(part):
        if name not in ("algorithm", *OWN):
            raise ConfigError(
                f"{flag(name)} belongs to the run; a policy may set {', '.join(map(flag, OWN))}"
            )
    return {name: getattr(part, name) for name in OWN if getattr(part, name) is not None}


def with_simulations(config: Train, source: EnvSource, number: int) -> Train:
    """Returns the config whose algorithm searches with this number of simulations.

    Raises:
      ConfigError: it does not search, or cannot here.
    """
    name = name_of(config.algorithm)
    if not hasattr(config.algorithm, "num_simulations"):
        raise ConfigError(
            f"--num-simulations {number}: {name} does not search; {having('num_simulations')} this flag"
        )
    config = dataclasses.replace(
        config, algorithm=dataclasses.replace(config.algorithm, num_simulations=number)
    )
    searches = config.algorithm.make(source.spec).searches
    if searches and (source.pure is None or source.pure.simulate is None):
        env = env_label(source.spec.backend, source.spec.id)
        raise ConfigError(
            f"--num-simulations {number} needs a simulator, which {env} does not have, so {name} "
            "acts there without a search; remove it"
        )
    return config
