"""The members of a population: the runs that ``--seeds`` and ``--vary`` ask for."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import math
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, get_args, get_origin, get_type_hints

from jaxrl_dist.algorithms import name_of
from jaxrl_dist.checks import did_you_mean, flag
from jaxrl_dist.config.synonyms import hint
from jaxrl_dist.config.train import ALONE, VARIED, Train
from jaxrl_dist.config.values import Fields, alternatives, from_text, from_texts, marked, varied
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run.files import MEMBERS, RESULTS
from jaxrl_dist.run.storage import check_no_links, read_plain
from jaxrl_dist.settings.given import checked, several
from jaxrl_dist.settings.policies import by_policy
from jaxrl_dist.settings.still import Still

MAX_MEMBERS = 10_000
_MAX_RESULTS = 2**28
"""Maximum bytes of ``results.csv``."""


class MemberConfig(NamedTuple):
    """A run of a population."""

    config: Train
    values: Fields
    """The varied fields, with this member's values."""


def is_population(config: Train) -> bool:
    """Returns whether a config asks for several runs."""
    return config.seeds > 1 or bool(config.vary)


def number_of_members(fields: Fields) -> int:
    """Returns the number of runs that fields of ``Train`` ask for, before their values are read."""
    counts = [len(text.split(",")) for text in (fields.get("vary") or {}).values()]
    settings = max(counts, default=1) if fields.get("zip") else math.prod(counts)
    return int(settings * fields.get("seeds", 1))


def members(config: Train) -> list[MemberConfig]:
    """Returns the members of a resolved config: all settings with the first seed,
    then with the second, and so on.

    A hyperparameter that has no effect in one of the members, such as the end of epsilon in a
    member that explores in another way, has its default there.

    Raises:
      ConfigError: a field cannot vary, a value cannot be read or is out of range, several values
        of a field have no effect, there are too many members, or the directory of a member is a
        link.
    """
    if config.run_dir is not None:
        check_no_links(pathlib.Path(config.run_dir, MEMBERS))
    choices = _varied(config)
    settings = _settings(choices, zipped=config.zip)
    if len(settings) * config.seeds > MAX_MEMBERS:
        raise ConfigError(
            f"{len(settings)} settings times --seeds {config.seeds} is more than {MAX_MEMBERS} members"
        )
    if len(set(map(repr, settings))) < len(settings):
        raise ConfigError(
            "--vary names the same values twice, so members would be equal; add seeds with --seeds"
        )
    population: list[MemberConfig] = []
    for offset, values in itertools.product(range(config.seeds), settings):
        hyperparameters = dict(values)
        run = {name: hyperparameters.pop(name) for name in VARIED if name in values}
        run |= {"seed": config.seed + offset, **ALONE}
        if config.run_dir is not None:
            run["run_dir"] = str(pathlib.Path(config.run_dir, MEMBERS, f"{len(population):03d}"))
        algorithm = varied(config.algorithm, hyperparameters)
        used = [name for name in hyperparameters if several(algorithm) or len(choices[name]) > 1]
        member = dataclasses.replace(config, algorithm=algorithm, **run)
        population.append(MemberConfig(checked(member, used), values))
    return population


def _varied(config: Train) -> dict[str, list[object]]:
    """Returns the values of each field of ``--vary``."""
    known = kinds(config)
    choices = dict[str, list[object]]()
    for written, text in config.vary.items():
        policy, dot, field = written.rpartition(".")
        name = policy + dot + field.replace("-", "_")
        if name not in known:
            raise ConfigError(_refusal(name, known, config.algorithm))
        if name in choices:
            raise ConfigError(f"--vary names {name} twice")
        choices[name] = [_read(name, value, known[name]) for value in text.split(",")]
    return choices


def _read(name: str, text: str, kind: object) -> object:
    """Reads a value of ``--vary``; several numbers are written as 64x64."""
    (first, *_), _ = alternatives(kind)
    if get_origin(first) is not tuple:
        return from_text(name, text, kind)
    return from_texts(name, re.split(r"(?<=\d)x(?=\d)", text), kind)


def kinds(config: Train) -> dict[str, object]:
    """Returns the types of the fields in which members may differ, by name:
    ``POLICY.FIELD`` if a policy has it.
    """
    of_train = get_type_hints(Train, include_extras=True)
    types = {name: of_train[name] for name in marked(Train, varies=True, per_policy=False)}
    for policy, part in by_policy(config).items():
        if isinstance(part.algorithm, Still):
            continue
        hints = of_train | get_type_hints(type(part.algorithm), include_extras=True)
        for name in (*marked(part.algorithm), *marked(Train, varies=True, per_policy=True)):
            types[_named(policy, name)] = hints[name]
    return types


def tunable(config: Train) -> list[str]:
    """Returns the fields of ``kinds`` that may be numbers with a fraction:
    programs can compute with them.
    """
    return [name for name, kind in kinds(config).items() if float in (kind, *get_args(kind))]


def _named(policy: str, field: str) -> str:
    """Returns the name of a field in ``--vary``; of several policies, it begins with the policy."""
    if policy:
        return f"{policy}.{field}"
    return field


def _refusal(name: str, known: Collection[str], algorithm: object) -> str:
    """Returns the message that members cannot vary a field."""
    if name == "seed":
        return (
            "--vary seed does not work: members have the seeds --seed, --seed + 1 and so on; set "
            "their number with --seeds"
        )
    owners = [field for field in known if field.partition(".")[2] == name]
    if several(algorithm) and owners:
        return f"--vary {name} belongs to a policy, and there are several: --vary {owners[0]}=..."
    if name in marked(Train):
        return f"--vary {name} does not work: all members share {flag(name)}; run the command once for each value"
    if several(algorithm):
        return f"--vary {name}: no policy that trains has such a field{did_you_mean(name, known)}"
    return (
        f"--vary {name}: {name_of(type(algorithm))} has no such hyperparameter{hint(name, known)}"
    )


def _settings(varied: Mapping[str, Sequence[object]], *, zipped: bool) -> list[Fields]:
    """Returns the combinations of values: all of them, or the first of each field,
    then the second, and so on.

    Raises:
      ConfigError: fields that are combined one by one have different numbers of values.
    """
    if zipped and len({len(values) for values in varied.values()}) > 1:
        counts = ", ".join(f"{len(values)} of {name}" for name, values in varied.items())
        raise ConfigError(
            f"--zip combines values one by one, but --vary names {counts}; give all the same number"
        )
    rows: Iterable[tuple[object, ...]] = itertools.product(*varied.values())
    if zipped:
        rows = zip(*varied.values(), strict=True)
    return [dict(zip(varied, row, strict=True)) for row in rows]


def programs(population: Sequence[MemberConfig], hyper: Sequence[str]) -> list[list[int]]:
    """Returns the members, by number, that one program can train:
    they differ in seeds and in ``hyper`` only.
    """
    groups: dict[str, list[int]] = {}
    for number, member in enumerate(population):
        fields = dict(member.values)
        for policy, part in by_policy(member.config).items():
            fields |= {_named(policy, name): value for name, value in vars(part.algorithm).items()}
        fixed = {name: value for name, value in fields.items() if name not in hyper}
        groups.setdefault(repr(fixed), []).append(number)
    return list(groups.values())


def results_of(run_dir: pathlib.Path) -> dict[str, dict[str, str]]:
    """Returns the lines of a population's ``results.csv`` by the names of members;
    {} if it cannot be read.
    """
    with contextlib.suppress(ConfigError, UnicodeError, csv.Error, KeyError):
        lines = csv.DictReader(io.StringIO(read_plain(run_dir / RESULTS, _MAX_RESULTS).decode()))
        return {line["member"]: line for line in lines}
    return {}


def best_of(run_dir: pathlib.Path, members: Sequence[pathlib.Path]) -> str:
    """Names the member with the highest return for messages.

    The return is an evaluation's if all members that did not fail have one.
    """
    folders = {folder.name: folder for folder in members}
    lines = [
        line
        for line in results_of(run_dir).values()
        if line["member"] in folders and line.get("status") not in ("diverged", "failed")
    ]
    for field, kind in {"evaluation_return": "evaluation", "episode_return": "training"}.items():
        with contextlib.suppress(KeyError, ValueError):
            _, best = max((float(line[field]), line["member"]) for line in lines)
            return f"{folders[best]}, the best by its {kind} return"
    return str(members[0])
