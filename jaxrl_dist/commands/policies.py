"""The flags of several policies in one environment:
``--policy prey=ppo:agent_0 --prey.learning-rate 1e-3``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from jaxrl_dist.algorithms import from_file, having
from jaxrl_dist.checks import did_you_mean, flag
from jaxrl_dist.commands import flags, help
from jaxrl_dist.config.train import OWN, Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings import placements
from jaxrl_dist.settings.given import RUN_FIELDS
from jaxrl_dist.settings.policies import Policies, naming
from jaxrl_dist.settings.still import Still, read_still

FLAG = "--policy"
_FORM = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)=(.+):([^:]+)")


@dataclasses.dataclass(frozen=True)
class Several:
    """Trains several policies in one environment; with --config, the policies of a stored run.

    --NAME.FLAG VALUE sets a hyperparameter of one policy, or its {own}. All other flags are the
    run's; `jaxrl-dist train ALGO --help` lists the flags.
    """

    policy: Annotated[tuple[str, ...], help.Values("NAME=ALGO:AGENTS")] = ()
    """AGENTS are names of agents, separated by commas; * and ? match as in the shell. ALGO is an
    algorithm, or a policy that does not train: random; fixed(RUN_DIR) or fixed(RUN_DIR@CHECKPOINT),
    and fixed(RUN_DIR,POLICY) for a run with several policies; copy(POLICY,UPDATES), the variables
    of another policy, copied again after every UPDATES of its updates; copy(POLICY,UPDATES,SIZE), a
    pool of the newest SIZE copies."""


Several.__doc__ = str(Several.__doc__).format(own=", ".join(map(flag, OWN)))
PROG = "jaxrl-dist train --policy NAME=ALGO:AGENTS --policy ... --env ENV"


def names_policies(args: Sequence[str]) -> bool:
    """Returns whether the arguments name policies; ``ppo --policy MlpPolicy``,
    as in other libraries, does not.
    """
    value = flags.value_of(args, FLAG)
    return (value is not None or FLAG in args) and (args[0].startswith("-") or "=" in (value or ""))


def parse(args: Sequence[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns the algorithms' names, the algorithms by policy as ``Train`` takes them,
    and the values of other fields.

    Raises:
      ConfigError: a policy is named twice, has no algorithm or no agents, or a flag is wrong.
      SystemExit: with code 0, after printing help.
    """
    options, args = flags.split(Several, args, PROG)
    if args and not args[0].startswith("-"):
        raise ConfigError(
            f"unexpected {args[0]!r}: {FLAG} already names each policy's algorithm; remove it"
        )
    algorithms: dict[str, Any] = {}
    agents: dict[str, str] = {}
    for text in options.policy:
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(f"{FLAG} {text} is not a NAME=ALGO:AGENTS, such as prey=ppo:agent_0")
        name, algorithm, agents_of = match.groups()
        if name in algorithms:
            raise ConfigError(
                f"{FLAG} names the policy {name} twice; commas join the names of agents"
            )
        algorithms[name] = from_file(algorithm) if algorithm.endswith(".py") else algorithm
        agents[name] = agents_of
    by_policy, rest = _args_by_policy(args, algorithms)
    configs = {
        name: (algorithm, _fields(name, algorithm, by_policy[name]))
        for name, algorithm in algorithms.items()
    }
    fields = _of_run(rest, algorithms)
    if "config" in fields:
        raise ConfigError(
            f"--config {fields['config']} names the algorithms, and so does {FLAG}; "
            "remove one of them"
        )
    names = [
        getattr(algorithm, "__name__", str(algorithm)).split("(")[0]
        for algorithm in algorithms.values()
    ]
    return "+".join(names), configs, {**fields, "policies": agents}


def changed(
    configs: Mapping[str, Train], args: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the algorithms by policy, and the values of other fields,
    of a stored run with changes.

    Raises:
      ConfigError: a flag is wrong.
    """
    by_policy, rest = _args_by_policy(args, configs)
    fields = _of_run(rest, configs)
    for name in OWN:
        if name in fields:
            raise ConfigError(
                f"{flag(name)}: each policy has its own, "
                f"as in --{next(iter(configs))}.{flag(name)[2:]}"
            )
    trained = {}
    for name, config in configs.items():
        stored = {field: getattr(config, field) for field in OWN}
        given = _fields(name, type(config.algorithm), by_policy[name])
        trained[name] = (config.algorithm, stored | given)
    return trained, fields


def _of_run(args: Sequence[str], policies: Iterable[str]) -> dict[str, Any]:
    """Returns the values of the flags that are the run's.

    Raises:
      ConfigError: a flag is wrong, or belongs to a policy.
    """
    for arg in args:
        field = arg.split("=", 1)[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        if arg.startswith("--") and field not in RUN_FIELDS and having(field):
            raise ConfigError(f"{arg} belongs to a policy: --{next(iter(policies))}.{arg[2:]}")
    fields = flags.parse_train(Policies, args)
    placements.check_one_policy(fields)
    return fields


def _args_by_policy(
    args: Sequence[str], policies: Iterable[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the flags of each policy, without its name, and the flags of the run."""
    by_policy: dict[str, list[str]] = {name: [] for name in policies}
    rest: list[str] = []
    into = rest
    for arg in args:
        if arg.startswith("--"):
            into = rest
            name, dot, field = arg[2:].partition(".")
            if dot and "=" not in name:
                no = ""
                if name.startswith("no-") and name not in by_policy:
                    no = "no-"
                    name = name.removeprefix(no)
                if name not in by_policy:
                    raise ConfigError(
                        f"{arg}: there is no policy {name}{did_you_mean(name, by_policy)}"
                    )
                into = by_policy[name]
                arg = f"--{no}{field}"
        into.append(arg)
    return by_policy, rest


def _fields(policy: str, algorithm: str | type, args: Sequence[str]) -> dict[str, Any]:
    """Returns the hyperparameters of a policy, and its fields of ``OWN``."""
    if isinstance(algorithm, str):
        trains = read_still(algorithm) is None
    else:
        trains = not issubclass(algorithm, Still)
    if not trains and args:
        raise ConfigError(
            f"--{policy}.{args[0][2:]}: policy {policy} does not train, and has no flags"
        )
    if not trains:
        return {}
    with naming(policy):
        fields = flags.parse_train(algorithm, args)
    for name in fields:
        if name in RUN_FIELDS and name not in OWN:
            raise ConfigError(f"--{policy}.{flag(name)[2:]}: all policies share {flag(name)}")
    return fields
