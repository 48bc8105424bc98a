"""Several policies in one environment: the config of each, and how they are filled in.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_dist.algorithms import config_class, having, name_of
from jaxrl_dist.checks import did_you_mean, flag, shown
from jaxrl_dist.config.train import RUN_DEFAULTS, Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings.fixed_policies import Still, still
from jaxrl_dist.settings.resolve import RUN_FIELDS, filled, find_env, rounded, without_preset

if TYPE_CHECKING:
    from jaxrl_dist.envs.source import EnvSource

OWN = ("normalize_observations", "scale_rewards", "clip_rewards", "ema_steps")
"""Fields of ``Train`` that each policy sets for itself; the others apply to the whole run."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclasses.dataclass(frozen=True)
class Policies:
    """The algorithms of several policies; it takes the place of a single policy's hyperparameters."""

    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For each policy, a ``Train`` of which only the algorithm and the fields ``OWN`` count."""

    def validate(self) -> None:
        """Raises ``ConfigError`` if a value of a policy is out of range."""
        for name, part in self.parts.items():
            with naming(name):
                getattr(part.algorithm, "validate", lambda: None)()


def label(algorithm: Any) -> str:
    """Returns the name of an algorithm's config; with several policies, their names, such as ``ppo+dqn``."""
    if not isinstance(algorithm, Policies):
        return name_of(algorithm)
    return "+".join(name_of(part.algorithm).lower() for part in algorithm.parts.values())


@contextlib.contextmanager
def naming(policy: str) -> Iterator[None]:
    """Puts the policy's name before the message of an error, and into its flags: ``--hunter.replay-capacity``."""

    def named(found: re.Match[str]) -> str:
        field = found[2].replace("-", "_")
        return f"--{found[1]}{policy}.{found[2]}" if field in OWN or having(field) else found[0]

    try:
        yield
    except ConfigError as error:
        flags = re.sub(r"--(no-|)([a-z][a-z0-9-]*)(?!\.?[\w-])", named, error.with_flags)
        raise ConfigError(f"policy {policy}: {flags}") from None


def alone(config: Train[Any], policy: str) -> Train[Any]:
    """Returns the config of one policy: the run's, with its own algorithm."""
    part = config.algorithm.parts[policy]
    own = {name: getattr(part, name) for name in OWN}
    return dataclasses.replace(config, algorithm=part.algorithm, policies={}, **own)


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
    from jaxrl_dist.plans import PLANS  # here, not above: it imports JAX

    asked = dataclasses.replace(asked, plan=asked.plan or ("on_device" if source.is_pure else "synchronous"))
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
