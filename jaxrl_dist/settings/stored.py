"""``config.json``: the config of a run, as its directory and its checkpoints store it.

Imports nothing heavy, so that a directory without a run is refused fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxrl_dist.algorithms import config_class, name_of, source_of
from jaxrl_dist.checks import did_you_mean, shown
from jaxrl_dist.config.envs import OBJECT, env_name, module_of_user, named_env, split_env
from jaxrl_dist.config.train import CONFIG_FILE, OWN, RUN_DEFAULTS, Train
from jaxrl_dist.config.values import Fields, marked, plain
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import spaces
from jaxrl_dist.run.storage import check_run_dir, read_json
from jaxrl_dist.settings.policies import Policies, by_policy, learner_name, naming
from jaxrl_dist.settings.still import STILL, Copy
from jaxrl_dist.types import EnvSpec

FORMAT = 1
"""Format number of ``config.json``; a reader refuses unknown numbers."""
FILE = "algorithm_file"
"""Key of the name and checksums of the user's algorithm file."""
SPACES = ("observation", "action")
"""Spaces of the environment that are stored: they must not change between two sessions of a run."""
_STORED = marked(Train, stored=True)
_PARTS = {"algorithm": str, "hyperparameters": dict, "run": dict}


def to_json(config: Train, spec: EnvSpec | None = None) -> dict[str, Any]:
    """Returns the contents of ``config.json`` for a resolved config,
    with its environment's spaces if known.
    """
    run = {name: getattr(config, name) for name in _STORED}
    content = {
        "format": FORMAT,
        "clock": config.clock,
        **_algorithm(config),
        "run": {**run, "env": env_name(config.env)},
    }
    if spec is not None:
        content["spaces"] = {name: spaces.describe(getattr(spec, name)) for name in SPACES}
    return content


def _algorithm(config: Train) -> dict[str, object]:
    """Returns the algorithm as JSON; of the user's file, the name and checksums."""
    content: dict[str, object] = {
        "algorithm": name_of(config.algorithm),
        "hyperparameters": _hyperparameters(config.algorithm),
    }
    source = source_of(config.algorithm)
    if source is not None:
        name = pathlib.Path(source.path).name
        content[FILE] = {"name": name, "sha256": source.sha256, "code": source.code}
    return content


def file_in(part: Mapping[str, Any]) -> dict[str, str]:
    """Returns the name and checksums of the user's algorithm file in a ``config.json``, or in one
    of its policies; {}: there are none.
    """
    file = part.get(FILE)
    if not isinstance(file, dict):
        return {}
    return {name: str(file.get(name)) for name in ("name", "sha256", "code")}


def copy_of_file(policy: str) -> str:
    """Returns the name of the text in a run directory that is a policy's algorithm file."""
    return f"algorithm-{policy}.txt" if policy else "algorithm.txt"


def changed_code(run_dir: pathlib.Path, kind: type) -> str:
    """Says that the user's algorithm file has other code than a run has trained with; empty: it
    has the same, or one of the two is unknown.

    Args:
      kind: the config class that ``from_file`` returned.
    """
    content = stored_content(run_dir / CONFIG_FILE)
    source = source_of(kind)
    parts = {"": content}
    if content["algorithm"] == Policies.stored_as:
        parts = content["hyperparameters"]
    for policy, part in parts.items():
        if source is None or not isinstance(part, dict) or part.get("algorithm") != name_of(kind):
            continue
        file = file_in(part)
        if file and source.sha256 != file["sha256"] and source.code != file["code"]:
            return (
                f"{source.path} has other code than {run_dir / copy_of_file(policy)}, with which the "
                "run trained; restore that code"
            )
    return ""


def _hyperparameters(algorithm: object) -> dict[str, object]:
    if isinstance(algorithm, Policies):
        return {name: _policy(part) for name, part in algorithm.configs.items()}
    return {name: _in_json(getattr(algorithm, name)) for name in marked(algorithm)}


def _policy(part: Train) -> dict[str, object]:
    """Returns one of several policies as JSON."""
    policy_fields = {name: getattr(part, name) for name in OWN}
    return {**_algorithm(part), **policy_fields}


def _read_policies(stored: Mapping[str, object], user_class: type | None) -> dict[str, Train]:
    """The inverse of ``_policy`` for all policies.

    Raises:
      ConfigError: a part is missing, or unknown.
    """
    parts = {}
    for policy, part in stored.items():
        with naming(policy):
            if not isinstance(part, dict) or not isinstance(part.get("hyperparameters"), dict):
                raise ConfigError("algorithm or hyperparameters is missing")
            _check_known(part, ("algorithm", "hyperparameters", FILE, *OWN))
            algorithm = str(part.get("algorithm"))
            kind = STILL.get(algorithm) or config_class(algorithm, user_class)
            _check_known(part["hyperparameters"], marked(kind))
            fields = {name: part[name] for name in OWN if name in part}
            hyperparameters = _without_objects(part["hyperparameters"], (), kind)
            parts[policy] = plain(Train(plain(kind(**hyperparameters)), **fields))
    return parts


def _in_json(value: object) -> object:
    """Returns a hyperparameter as JSON; an object becomes a name that cannot be loaded."""
    try:
        json.dumps(value)
    except TypeError:
        return f"{OBJECT}:{type(value).__name__}"
    return value


def stored_config(
    run_dir: str | pathlib.Path,
    algorithm: type | None = None,
    env: object = None,
    **objects: Any,
) -> Train:
    """Reads the config of a run; the arguments replace objects that no file can hold,
    as in ``load_policy``.

    ``objects`` are hyperparameters, such as ``torso``; None: the file's value.

    Raises:
      ConfigError: the config cannot be read, or an object that it needs is not passed.
    """
    objects = {name: value for name, value in objects.items() if value is not None}
    name_of_env = None
    if env is not None:
        env = named_env(env)
        name_of_env = env_name(env)
    name, fields = stored_fields(pathlib.Path(run_dir), algorithm, name_of_env, objects)
    if env is not None:
        fields["env"] = env
    kind = Policies if name == Policies.stored_as else config_class(name, algorithm)
    hyperparameters = {name: fields.pop(name) for name in marked(kind) if name in fields}
    return Train(kind(**hyperparameters, **objects), **{**RUN_DEFAULTS, **fields})


def stored_fields(
    path: pathlib.Path,
    user_class: type | None = None,
    env: str | None = None,
    objects: Collection[str] = (),
) -> tuple[str, dict[str, Any]]:
    """Reads a ``config.json``: the algorithm's name,
    and the values of the stored fields and hyperparameters.

    Args:
      path: the file, or its run directory.
      user_class: the config class of an algorithm that is not built in.
      env: the user's environment, which replaces the file's.
      objects: hyperparameters that the caller sets to the user's objects;
        the file's values are ignored.

    Raises:
      ConfigError: the file is missing or damaged, has unknown names, names a module to import,
        which no file may, or needs an object, which no file can hold.
    """
    path = file_of(path)
    content = stored_content(path)
    algorithm, hyperparameters, run = (content[key] for key in _PARTS)
    several = algorithm == Policies.stored_as
    with _with_file_name(path):
        kind = Policies if several else config_class(algorithm, user_class)
        hyperparameters = _without_objects(hyperparameters, objects, kind)
        if several:
            hyperparameters = {"configs": _read_policies(hyperparameters, user_class)}
        _check_known(run, _STORED)
        _check_known(hyperparameters, marked(kind))
        config = plain(Train(plain(kind(**hyperparameters)), **run))
        values = {name: getattr(config, name) for name in run}
        values |= {name: getattr(config.algorithm, name) for name in hyperparameters}
        if env is None:
            env = _checked_env(run.get("env", ""))
        return algorithm, {**values, "env": env}


def file_of(path: pathlib.Path) -> pathlib.Path:
    """Returns the ``config.json`` that the user names by itself or by its run directory.

    A link that the user names is followed; one in a run directory is not.
    """
    if path.is_dir():
        return path / CONFIG_FILE
    return pathlib.Path(os.path.realpath(path))


def _without_objects(hyperparameters: Fields, objects: Collection[str], kind: type) -> Fields:
    """Returns stored hyperparameters without those that the caller sets to ``objects``,
    and without objects that are defaults of the class.

    Raises:
      ConfigError: another one needs an object.
    """
    values = {name: value for name, value in hyperparameters.items() if name not in objects}
    for name, value in list(values.items()):
        if not isinstance(value, str) or not value.startswith(f"{OBJECT}:"):
            continue
        if value != _in_json(getattr(kind, name, None)):
            raise ConfigError(
                f"its {name}, {value}, was a Python object, which no file can hold; pass it again "
                f"in Python, as in load_policy(run_dir, {name}=...).evaluate(), because commands "
                "take one only from the algorithm file that has trained the run"
            )
        del values[name]
    return values


def _checked_env(env: object) -> str:
    """Returns the environment that a file names.

    Raises:
      ConfigError: it is not a name, or a name that only the user may choose.
    """
    if not isinstance(env, str):
        raise ConfigError(f"env must be a name, not {shown(env)}")
    module = module_of_user(env)
    if module == OBJECT:
        raise ConfigError(
            f"its environment, {env}, was a Python object, which no file can hold; name one with "
            "--env, or pass env= in Python"
        )
    if module is not None:
        _, module, name = split_env(env)
        named = env if module is None else ":".join(filter(None, (module, name)))
        raise ConfigError(
            "no file may choose code to run, or a port that other machines reach; name its "
            f"environment yourself, with --env {named}"
        )
    return env


def stored_content(path: pathlib.Path) -> dict[str, Any]:
    """Reads a ``config.json``; it has all parts, but their contents are unchecked.

    Raises:
      ConfigError: the file is missing or damaged.
    """
    content = read_json(path)
    with _with_file_name(path):
        if not isinstance(content, dict):
            raise ConfigError(f"a run's config is an object, not a {type(content).__name__}")
        if content.get("format") != FORMAT:
            raise ConfigError(
                f"format {shown(content.get('format'))} is unknown; this version reads format {FORMAT}"
            )
        if not all(isinstance(content.get(name), kind) for name, kind in _PARTS.items()):
            raise ConfigError("algorithm, hyperparameters or run is missing")
    return content


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """Yields the fields in which two contents of ``config.json`` differ, with both values,
    by name within each part.
    """
    for part in _PARTS:
        before = old[part]
        now = new[part]
        if part == "algorithm":
            before = {part: before}
            now = {part: now}
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                yield name, before.get(name), now.get(name)


def _check_known(values: Collection[str], known: Collection[str]) -> None:
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown field {name!r}{did_you_mean(name, known)}")


@contextlib.contextmanager
def _with_file_name(path: pathlib.Path) -> Iterator[None]:
    """Puts the file's name before the message of an error."""
    try:
        yield
    except ConfigError as error:
        raise error.within(str(path)) from None


def to_ask(run: Fields) -> dict[str, str]:
    """Returns the flags with which a run sends or writes something to a place that no file may
    choose, by field.

    A data set may go below the current directory, if no directory above it is hidden:
    programs read files in those.
    """
    flags = {}
    if run.get("wandb"):
        flags["wandb"] = "--wandb"
    record = run.get("record")
    if record is not None and not _may_be_written(pathlib.Path(os.path.realpath(record))):
        flags["record"] = f"--record {shlex.quote(record)}"
    return flags


def _may_be_written(place: pathlib.Path) -> bool:
    """Returns whether a place is below the current directory, and not hidden."""
    here = pathlib.Path.cwd()
    if place == here or not place.is_relative_to(here):
        return False
    return not any(part.startswith(".") for part in place.relative_to(here).parts)


def check_asked(run: Fields, user_fields: Collection[str]) -> None:
    """Checks that the user, and not a file alone, asks for what ``to_ask`` returns.

    Args:
      run: fields of a stored run.
      user_fields: names of the fields that the user gives.

    Raises:
      ConfigError: only the file does.
    """
    missing = {name: flag for name, flag in to_ask(run).items() if name not in user_fields}
    if "wandb" in missing:
        raise ConfigError(
            "the stored run sends its metrics to Weights & Biases, which no file may choose for "
            "you; choose --wandb or --no-wandb"
        )
    if "record" in missing:
        raise ConfigError(
            f"the stored run writes a data set to {shown(run['record'])}, but no file may choose a "
            f"hidden place or one outside the current directory; choose {missing['record']} or "
            "--record None"
        )


HOW_TO_NAME_ONE = "; name one as fixed(RUN_DIR,POLICY) or fixed(RUN_DIR@CHECKPOINT,POLICY)"
"""How to name the policy of a run that does not train."""


def acting_config(run_dir: str, policy: str | None, env: object) -> tuple[Train, str | None]:
    """Returns the config of a finished run, or of one of its policies,
    with another environment; and the policy's name.

    Without a name it is the run's only policy, or the only one that trains.

    Raises:
      ConfigError: there is no such run or policy, or its files are damaged.
    """
    check_run_dir(pathlib.Path(run_dir))
    config = stored_config(run_dir, env=env)
    name = policy or learner_name(config)
    return of_policy(config, name, run_dir, HOW_TO_NAME_ONE), name


def of_policy(config: Train, policy: str | None, run_dir: object, advice: str = "") -> Train:
    """Returns the config of the policy that the user has named in a run.

    ``advice`` says how to name one.

    Raises:
      ConfigError: the run has no such policy, or has several, and none is named.
    """
    policies = by_policy(config)
    name = policy or ""
    if name not in policies:
        if not name:
            raise ConfigError(f"{run_dir}: which policy? It has {', '.join(policies)}{advice}")
        if "" in policies:
            raise ConfigError(
                f"{run_dir}: no policy {name}; it has one policy, so leave the name out"
            )
        raise ConfigError(f"{run_dir}: no policy {name}; it has the policies {', '.join(policies)}")
    algorithm = policies[name].algorithm
    if not isinstance(algorithm, Copy):
        return policies[name]
    if algorithm.size > 1:
        raise ConfigError(
            f"{run_dir}: {name} is a pool of copies of {algorithm.policy}; load {algorithm.policy} instead"
        )
    return policies[algorithm.policy]
