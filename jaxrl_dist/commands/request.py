"""A training run as the command line names it."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_dist.algorithms import config_class, from_file, name_of
from jaxrl_dist.commands import find_modules, flags, help, help_text, policies
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings import members as populations
from jaxrl_dist.settings import placements
from jaxrl_dist.settings.policies import Policies, label
from jaxrl_dist.settings.resolve import resolved_with_sources
from jaxrl_dist.settings.stored import (
    check_asked,
    stored_fields,
)

if TYPE_CHECKING:
    from jaxrl_dist.envs.source import EnvSource


class Request(NamedTuple):
    """A training run as the command line names it."""

    name: str
    """The algorithm's display name."""
    algorithm: Any
    """Its name or config class; with several policies, all of them, as ``Train`` takes them."""
    fields: dict[str, Any]
    """Fields of ``Train`` and hyperparameters, also from ``--config``."""
    stored: Collection[str] = ()
    """Names of the fields that only ``--config`` gives."""
    config: str | None = None
    """The file or run directory of ``--config``."""

    def resolved(self) -> tuple[Train, EnvSource]:
        """Returns the complete config, and its environment;
        prepares the process as ``resolved_with_sources`` does.
        """
        return self.resolved_with_sources()[:2]

    def check_asked(self) -> None:
        """Checks, as ``stored.check_asked``, that the user asks for what no file may choose."""
        check_asked(self.fields, self.fields.keys() - {*self.stored})

    def in_run_dir(self, config: Train) -> Train:
        """Returns the resolved config with a run directory: a new one if the user names none."""
        if config.run_dir is not None:
            return config
        # data may come without one
        where = self.fields.get("env") or pathlib.Path(str(config.data)).resolve().name
        return dataclasses.replace(config, run_dir=default_run_dir(where, self.name, config.seed))

    def resolved_with_sources(self) -> tuple[Train, EnvSource, Mapping[str, str]]:
        """Returns the complete config, its environment, and the sources of its values;
        see ``resolve.resolved_with_sources``.

        It prepares this process for the run: CPU devices for its members, the user's module,
        memory on GPUs.
        """
        if (members := populations.number_of_members(self.fields)) > 1:
            from jaxrl_dist.plans import devices

            devices.divide_cpu(members)
        if "env" not in self.stored:
            find_modules(self.fields.get("env"))
        config, source, sources = resolved_with_sources(
            Train(self.algorithm), self.fields, self.stored
        )
        return config, source, sources


def parse(args: Sequence[str]) -> Request:
    """Parses ``ALGO --env ID [FLAGS]``; ``ALGO`` is a name or a file.

    Raises:
      ConfigError: the algorithm is missing, or a flag is wrong.
      SystemExit: with code 0, after printing help.
    """
    if policies.names_policies(args):
        return Request(*policies.parse(args))
    first, args = _algorithm(args)
    wants_help = flags.wants_help(args)
    everything = "--help-all" in args
    args = [arg for arg in args if arg not in flags.HELP]
    algorithm, stored = _stored(first, args)
    if wants_help and (algorithm is None or isinstance(algorithm, Policies)):
        flags.show(help_text() if algorithm is None else help.page(policies.Several, policies.PROG))
    if algorithm is None:
        raise ConfigError("which algorithm? Such as: jaxrl-dist train ppo --env CartPole-v1")
    request = _changed(algorithm, stored, args)
    if wants_help:
        flags.show(_help(request, everything=everything))
    return request


def _algorithm(args: Sequence[str]) -> tuple[str | type | None, Sequence[str]]:
    """Returns the algorithm that the arguments begin with, if any, and the flags behind it."""
    first = None
    if args and not args[0].startswith("-"):
        first, *args = args
    if args and not args[0].startswith("-"):
        if args[0].endswith("Policy"):  # as in Stable-Baselines3
            raise ConfigError(
                f"unknown argument {args[0]!r}; --torso and --hidden-sizes choose the network"
            )
        raise ConfigError(f"unknown argument {args[0]!r}; name an environment with --env {args[0]}")
    if first is not None and first.endswith(".py"):
        return from_file(first), args
    return first, args


def _stored(
    algorithm: str | type | None, args: Sequence[str]
) -> tuple[str | type | Policies | None, dict[str, Any]]:
    """Returns the algorithm and the fields that ``--config`` names; without it,
    ``algorithm`` and no fields.
    """
    config_file = flags.value_of(args, "--config")
    if config_file is None:
        return algorithm, {}
    kind = algorithm if isinstance(algorithm, type) else None
    name, fields = stored_fields(pathlib.Path(config_file), kind, flags.value_of(args, "--env"))
    stored: str | type | Policies = name
    if name == Policies.stored_as:
        stored = Policies(fields.pop("configs"))
        if kind is not None:  # the file of one of the stored policies
            return stored, fields
    given = algorithm if kind is None else name_of(kind)
    if given is not None and given != _name(stored):
        raise ConfigError(
            f"{config_file} was made by {_name(stored)}, not by {given}; "
            "remove the algorithm's name"
        )
    return kind or stored, fields


def _name(algorithm: str | type | Policies) -> str:
    """Returns the display name of an algorithm, or of several policies."""
    if isinstance(algorithm, str):
        return algorithm
    return label(algorithm)


def _changed(
    algorithm: str | type | Policies, stored: dict[str, Any], args: Sequence[str]
) -> Request:
    """Returns the run of an algorithm, or of several stored policies,
    with the fields of ``--config`` and flags.
    """
    trained: Any = algorithm
    if isinstance(algorithm, Policies):
        trained, fields = policies.changed(algorithm.configs, args)
    else:
        fields = flags.parse_train(algorithm, args)
    config_file = fields.pop("config", None)
    if (word := fields.pop("placement", None)) is not None:
        fields = {**placements.fields(word, config_class(trained), fields), **fields}
    return Request(
        _name(algorithm), trained, {**stored, **fields}, stored.keys() - fields.keys(), config_file
    )


def _help(request: Request, *, everything: bool) -> str:
    """Returns the help of an algorithm; if ``--env`` is given,
    with the values that the run would use.
    """
    config: Train = flags.plain_defaults(request.algorithm)
    values = dict(vars(config))
    sources = dict[str, str]()
    about = "In parentheses: values without a preset; with --env ID, those that would run."
    if request.fields.get("env"):
        request.fields.pop("plan_memory", None)
        output_flags(request.fields)
        config, _, settled_sources = request.resolved_with_sources()
        values.update(vars(config))
        sources.update(settled_sources)
        about = (
            f"In parentheses: the values that would run on {config.env}, "
            "and where they come from if not defaults."
        )
    values.update(vars(config.algorithm))
    del values["algorithm"]
    kind = type(config.algorithm)
    prog = f"jaxrl-dist train {request.name}"
    return help.train_page(flags.Command, kind, values, sources, prog, about, everything=everything)


def output_flags(fields: dict[str, Any]) -> dict[str, bool]:
    """Removes ``quiet`` and ``verbose`` from ``fields``, and returns them.

    Raises:
      ConfigError: they contradict each other, or ``fields`` ask for what only ``train`` does.
    """
    if "plan_memory" in fields:
        raise ConfigError(
            "only `train` accepts --plan-memory; see what a run needs with `train ... "
            "--plan-memory here`"
        )
    output = {name: fields.pop(name, False) for name in ("quiet", "verbose")}
    fields.pop("resume_or_start", None)
    if all(output.values()):
        raise ConfigError("--verbose contradicts --quiet")
    return output


def default_run_dir(env: str, algorithm: str, seed: int) -> str:
    """Returns ``runs/<env>__<algo>__<seed>__<utc>``, with the time in UTC to the microsecond."""
    utc = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
    return f"runs/{env.replace(':', '-').replace('/', '-')}__{algorithm}__{seed}__{utc}"
