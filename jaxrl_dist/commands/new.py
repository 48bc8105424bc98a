"""``jaxrl-dist new``: writes an algorithm as one file, for the user to change."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jaxrl_dist.algorithms import config_class
from jaxrl_dist.checks import flag
from jaxrl_dist.commands import find_modules, flags, help
from jaxrl_dist.config.train import RUN_DEFAULTS, Train
from jaxrl_dist.config.values import Fields, marked
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.run.storage import check_place

ENVS = {"ppo": "CartPole-v1", "dqn": "CartPole-v1", "sac": "Pendulum-v1"}
"""The algorithms that have a file in ``templates``, and the environment whose values it has."""
NOTHING = {"noise_correlation": 0.0}
"""Values of fields that are None in the originals, and numbers in the files."""
WIDTH = 100
"""Maximum width of a line."""


@dataclasses.dataclass(frozen=True)
class New:
    """Writes an algorithm as one file that imports little of this package, for you to change."""

    algorithm: Annotated[str, help.Argument("ALGO")] = ""
    """Algorithm to begin with: ppo, dqn or sac."""
    file: Annotated[str, help.Argument("FILE.py")] = ""
    """File to write."""
    env: str | None = None
    """Environment whose preset becomes the file's defaults; None: Pendulum-v1 for sac, CartPole-v1
    for the others."""


def run(args: Sequence[str]) -> int:
    """Runs ``new ALGO FILE.py [--env ID]``."""
    options = flags.parse(New, args, "jaxrl-dist new")
    name = options.algorithm
    if not name:
        raise ConfigError("which algorithm? Such as: jaxrl-dist new ppo my_ppo.py")
    if name not in ENVS:
        raise ConfigError(f"new cannot write {name!r}; name one of {', '.join(ENVS)}")
    if not options.file:
        raise ConfigError(f"which file? Such as: jaxrl-dist new {name} my_{name}.py")
    path = pathlib.Path(options.file)
    if path.suffix != ".py":
        raise ConfigError(f"{path} must end in .py; name it {path}.py")
    check_place(path)
    if path.exists():
        raise ConfigError(f"{path} exists; name another file")
    env = options.env or ENVS[name]
    find_modules(env)

    text = renamed(written(name, env), config_class(name).__name__, path.stem)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    print(visible(f"wrote {path}, with the values for {env}"))
    for use, command in {"train": "train", "check your changes": "check-algorithm"}.items():
        line = shlex.join(["jaxrl-dist", command, str(path), "--env", env])
        print(visible(f"{use + ':':19} {line}"))
    return 0


def written(name: str, env: str) -> str:
    """Returns the text of an algorithm's file, with the preset of an environment as defaults.

    Raises:
      ConfigError: there is no such environment, or the file does not support it.
    """
    from jaxrl_dist.envs.source import find

    spec = find(env).spec
    original = config_class(name)
    module = importlib.import_module(f"jaxrl_dist.templates.{name}")
    template = getattr(module, original.__name__)
    template().make(spec)
    run = {field: RUN_DEFAULTS[field] for field in ("num_envs", "rollout_length")}
    values = {}
    for field in marked(template):
        default = getattr(original, field)
        values[field] = NOTHING.get(field) if default is None else default
    for field, value in original.preset(spec).items():
        if field in values:
            values[field] = value
        elif field in marked(Train):
            run[field] = value
        else:
            raise ConfigError(
                f"the file of {name} does not have {flag(field)}, which {env} needs; "
                f"use `jaxrl-dist train {name}`"
            )
    return with_values(inspect.getsource(module), values, run)


def renamed(source: str, kind: str, stem: str) -> str:
    """Returns the text with the config class ``kind`` named after the file, as ``MyPPO`` after
    ``my_ppo``, since plots tell algorithms apart by this name. A name that the text needs for
    something else, or that is none, stays ``kind``.
    """

    def titled(word: str) -> str:
        return kind if word == kind.lower() else word[:1].upper() + word[1:]

    new = "".join(map(titled, re.split(r"[\W_]+", stem)))
    if not new.isidentifier() or re.search(rf"\b{new}\b", source):
        return source
    return re.sub(rf"\b{kind}\b", new, source)


def with_values(source: str, values: Fields, run: Fields) -> str:
    """Returns the text of a template with other defaults of its hyperparameters,
    and with what its ``preset`` returns.
    """
    lines = source.splitlines(keepends=True)

    def replace(node: ast.expr, value: object) -> None:
        if ast.literal_eval(node) == value:
            return
        assert node.end_lineno is not None, "ast.parse sets it"
        line = lines[node.lineno - 1]
        before = line[: node.col_offset]
        last = lines[node.end_lineno - 1]
        after = last[node.end_col_offset :]
        text = spelled(value)
        if len(before + text) > WIDTH and isinstance(value, Mapping):
            indent = " " * (len(before) - len(before.lstrip()))
            rows = (f'{indent}    "{key}": {spelled(one)},\n' for key, one in value.items())
            text = "{\n" + "".join(rows) + indent + "}"
        lines[node.lineno - 1] = before + text + after
        lines[node.lineno : node.end_lineno] = [""] * (node.end_lineno - node.lineno)

    tree = ast.parse(source)
    kind = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert node.value is not None, "hyperparameters have defaults"
            # a plain default, or that of ``setting``
            default = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            replace(default, values[node.target.id])
        elif isinstance(node, ast.FunctionDef) and node.name == "preset":
            result = node.body[-1]
            assert isinstance(result, ast.Return) and result.value is not None
            replace(result.value, run)
    return "".join(lines)


def spelled(value: Any) -> str:
    """Returns a value as code, in the style of the package."""
    match value:
        case str():
            return json.dumps(value)
        case Mapping():
            items = (f"{spelled(key)}: {spelled(one)}" for key, one in value.items())
            return "{" + ", ".join(items) + "}"
        case bool() | None | tuple() | float():
            return repr(value)
        case _:
            return f"{value:_}"
