"""Writes the generated parts of the documents again: ``python scripts/docs.py``.

A part stands between ``<!-- generated: NAME ARGUMENT -->`` and ``<!-- end -->``. It is the result
of the function of that name below: flags, presets, measurements, code and what is tested. Without
arguments the script rewrites all pages in ``docs``, otherwise those that are named. It needs the
extra ``test``, since it reads presets from environments and what is tested from the tests.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import pathlib
import re
import runpy
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

import numpy as np

import jaxrl_dist
from jaxrl_dist import algorithms
from jaxrl_dist.algorithms.presets import KINDS
from jaxrl_dist.checks import flag
from jaxrl_dist.commands import help
from jaxrl_dist.commands.flags import plain_defaults
from jaxrl_dist.config.named import data_of
from jaxrl_dist.config.synonyms import SYNONYMS
from jaxrl_dist.config.train import GROUPS
from jaxrl_dist.envs.source import DeviceEnv, EnvSource, find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings import given
from jaxrl_dist.spaces import Box, Discrete, Space
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.types import EnvSpec

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PART = re.compile(r"^<!-- generated: (\w+)(?: (\S+))? -->\n(.*?)^<!-- end -->$", re.M | re.S)
"""A generated part of a page: its function, the argument, and its text."""
EXAMPLES = {
    "classic_control": "gymnax:CartPole-v1",
    "classic_control/continuous": "gymnax:Pendulum-v1",
    "box2d": "envpool:LunarLander-v2",
    "box2d/continuous": "envpool:LunarLanderContinuous-v2",
    "mujoco/continuous": "envpool:HalfCheetah-v4",
    "minatar": "gymnax:Breakout-MinAtar",
    "atari": "envpool:Pong-v5",
    "bsuite": "gymnax:MemoryChain-bsuite",
    "craftax": "craftax:Craftax-Symbolic-v1",
    "game": "pgx:tic_tac_toe",
    "table": "envpool:Taxi-v3",
    "image": "envpool:CarRacing-v2",
    "unknown": "gymnax:FourRooms-misc",
    "unknown/continuous": "gymnax:Reacher-misc",
}
"""An environment of each kind of task that presets distinguish."""
OF_A_RUN = ("num_envs", "rollout_length", "plan", "report_interval")
"""Fields of ``Train`` with which a reader begins; presets change most of them."""


# --- Flags ----------------------------------------------------------------------------------------


def fields(path: str) -> str:
    """Returns a table of the flags of a dataclass such as
    ``jaxrl_dist.commands.flags.Command``, not inherited ones.
    """
    module, name = path.rsplit(".", 1)
    kind = getattr(importlib.import_module(module), name)
    return flag_table(kind, help.docstrings(kind), help.defaults_of(kind))


def record(path: str) -> str:
    """Returns a table of the fields of a record such as ``jaxrl_dist.types.Rollout``."""
    module, name = path.rsplit(".", 1)
    texts = help.docstrings(getattr(importlib.import_module(module), name))
    return table(("field", "holds"), [(f"`{field}`", text) for field, text in texts.items()])


def run_flags(_: None) -> str:
    """Returns a table for each group of a run's flags."""
    parts: list[str] = []
    for group in GROUPS:
        parts += [
            f"**{inspect.cleandoc(str(group.__doc__))}**",
            fields(f"{group.__module__}.{group.__name__}"),
        ]
    return "\n\n".join(parts)


def algorithm_flags(name: str) -> str:
    """Returns a table of the flags that an algorithm's file defines, and one of the defaults of
    those that it shares; for a preset, a table of the flags it sets.
    """
    kind = algorithms.config_class(name)
    if name in algorithms.PRESETS:
        base, values = algorithms.PRESETS[name]
        train: Any = jaxrl_dist.Train
        texts = help.inherited_docstrings(train) | help.inherited_docstrings(kind)
        return (
            f"`{name}` is [`{base}`]({base}.md) with these flags; that page lists all others.\n\n"
            + flag_table(
                kind,
                {field: texts[field] for field in values},
                values,
                get_type_hints(train) | get_type_hints(kind),
            )
        )
    own: dict[str, str] = {}
    shared: dict[str, list[str]] = {}
    defaults = help.defaults_of(kind)
    for base in kind.__mro__:
        texts = help.docstrings(base)
        if base.__module__ == kind.__module__:
            own |= texts
            continue
        for field in texts:
            if field not in own and field in defaults:
                setting = f"`{flag(field)}` {quoted(defaults.pop(field))}"
                shared.setdefault(place_of(base), []).append(setting)
    parts = []
    if own:
        parts.append(flag_table(kind, own, help.defaults_of(kind)))
    parts += [
        f"Shared with other algorithms, with the defaults of `{name}`; the links say what they do:",
        table(
            ("flags of", "defaults"), [(where, ", ".join(each)) for where, each in shared.items()]
        ),
        "The flags of every run are in [commands and flags](../commands.md#train); "
        f"`jaxrl-dist train {name} --help-all` prints all of them.",
    ]
    return "\n\n".join(parts)


def place_of(kind: type) -> str:
    """Returns a link from an algorithm's page to the description of flags that algorithms share."""
    name = kind.__module__.rpartition(".")[2]
    if name in algorithms.ALGORITHMS:
        return f"[{name}]({name}.md#flags)"
    before, marker, _ = commands_page().partition(
        f"<!-- generated: fields {kind.__module__}.{kind.__name__} -->"
    )
    if not marker:
        raise LookupError(f"docs/commands.md does not show the flags of {kind}; add them")
    title = re.findall(r"^#+ (.*)$", before, re.M)[-1]
    return f"[{title}](../commands.md#{title.lower().replace(' ', '-')})"


@functools.cache
def commands_page() -> str:
    return (DOCS / "commands.md").read_text(encoding="utf-8")


def flag_table(
    kind: Any,
    texts: Mapping[str, str],
    defaults: Mapping[str, Any],
    hints: Mapping[str, Any] | None = None,
) -> str:
    """Returns a table with a row for each field in ``texts``, which holds docstrings by name."""
    hints = hints or get_type_hints(kind, include_extras=True)
    rows = []
    for name, text in texts.items():
        if isinstance(hints[name], TypeVar):  # the algorithm is not a flag; its fields are
            continue
        if name not in defaults:  # a constant of the class
            continue
        choices = help.choices_of(hints[name])
        if choices:
            listed = f" One of {', '.join(f'`{choice}`' for choice in choices)}."
        else:
            listed = ""
        spellings = ", ".join(f"`{spelling}`" for spelling in help.spellings_of(name, hints[name]))
        rows.append((spellings, quoted(defaults[name]), text + listed))
    return table(("flag", "default", "what"), rows)


def quoted(value: Any) -> str:
    """Formats a default for a table, as code unless it is ``on``, ``off`` or ``none``,
    which nobody types.
    """
    text = help.spelled(value)
    if isinstance(value, bool) or text == "none":
        return text
    return f"`{text}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def synonyms(_: str | None) -> str:
    """Returns a table of our flags and their names in other libraries."""
    rows = []
    for fields, names in SYNONYMS.items():
        ours = " or ".join(f"`{flag(field)}`" for field in fields.split())
        rows.append((ours, ", ".join(f"`{name}`" for name in names.split())))
    return table(("here", "elsewhere"), rows)


# --- Presets --------------------------------------------------------------------------------------


def algorithm_presets(name: str) -> str:
    """Returns a table of the flags that differ from the defaults on each kind of environment."""
    default = plain_defaults(name)
    kinds: dict[str, list[str]] = {}
    refusals: dict[str, list[str]] = {}
    for kind, env in EXAMPLES.items():
        example = f"{KINDS[kind]} (`{env}`)"
        config, _ = given.filled(
            given.user_values(jaxrl_dist.Train(name, env=env, data=data_of(name))), source_of(env)
        )
        try:
            make_algorithm(config, spec_of(env))
        except ConfigError as error:
            reason = error.with_flags.replace(spec_of(env).id, "it")
            refusals.setdefault(reason, []).append(example)
            continue
        pairs = [(config, default), (config.algorithm, default.algorithm)]
        changed = [
            f"`{flag(field.name)}` {quoted(getattr(new, field.name))}"
            for new, old in pairs
            for field in dataclasses.fields(new)
            if field.name not in ("algorithm", "env")
            and getattr(new, field.name) not in (None, getattr(old, field.name))
        ]
        kinds.setdefault(", ".join(changed) or "nothing", []).append(example)
    rows = [("; ".join(examples), changed) for changed, examples in kinds.items()]
    rows += [("; ".join(examples), f"refused: {why}") for why, examples in refusals.items()]
    run = ", ".join(f"`{flag(field)}` {quoted(getattr(default, field))}" for field in OF_A_RUN)
    return "\n\n".join(
        [
            f"A run has {run}, unless the table says otherwise.",
            table(("kind, such as", "differs from the defaults"), rows),
        ]
    )


@functools.cache
def source_of(env: str) -> EnvSource:
    """Finds an environment; those of libraries that need not be installed are described here."""

    def box(dtype: type, *shape: int) -> Box:
        return Box(shape, np.dtype(dtype), np.zeros(shape, dtype), np.ones(shape, dtype))

    if env == EXAMPLES["game"]:
        parts: Space = {"observation": box(np.bool_, 3, 3, 2), "mask": box(np.bool_, 9)}
        spec = EnvSpec(
            "tic_tac_toe", "pgx", "game", parts, Discrete(9), None, mask="mask", num_agents=2
        )
    elif env == EXAMPLES["craftax"]:
        spec = EnvSpec(
            "Craftax-Symbolic-v1", "craftax", "craftax", box(np.float32, 8268), Discrete(43), 10_000
        )
    else:
        return find(env)
    return EnvSource(spec, {}, pure=DeviceEnv(spec, *[_unplayed] * 2))


def _unplayed(*_: Any) -> Any:
    raise NotImplementedError("only its spec is shown")


def spec_of(env: str) -> EnvSpec:
    return source_of(env).spec


# --- Measurements ---------------------------------------------------------------------------------


@functools.cache
def learning() -> dict[str, Any]:
    """Returns the globals of ``scripts/learning.py``."""
    return runpy.run_path(str(ROOT / "scripts" / "learning.py"))


def algorithm_curves(name: str) -> str:
    """Returns an algorithm's measurements: its rows of ``learning.md``, and its curves."""
    script = learning()
    results = script["load"](DOCS / "learning" / script["RESULTS"])
    bars = [bar for bar in script["BARS"] if bar.algorithm == name]
    measured = [bar for bar in bars if bar.name in results]
    if not measured:
        if bars:
            todo = f"; `python scripts/learning.py --only {bars[0].name}` does it"
        else:
            todo = ""
        return f"Not measured yet{todo}."
    rows = "\n".join(script["rows"](measured, results))
    pictures = script["gallery"](measured, "../learning")
    return f"[What the defaults learn](../learning.md) says how these were made.\n\n{rows}\n\n{pictures}"


def measured(names: str) -> str:
    """Returns some columns of ``learning.md`` with links to the algorithms' pages,
    for bars by name, or for all measured ones of a family of environments such as ``MinAtar``.
    """
    script = learning()
    results = script["load"](DOCS / "learning" / script["RESULTS"])
    bars: list[Any] = []
    for name in names.split(","):
        chosen = [bar for bar in script["BARS"] if name in (bar.name, bar.env.rpartition("-")[2])]
        assert chosen, f"{name} is no bar, and no family of environments"
        bars += sorted(
            (bar for bar in chosen if bar.name in results),
            key=lambda bar: (bar.env, -results[bar.name]["steps"]),
        )
    rows = []
    for bar, line in zip(bars, script["rows"](bars, results)[2:], strict=True):
        _, command, steps, _, _, _, iqm, *_ = (cell.strip() for cell in line.split("|"))
        link = f"[{command}](algorithms/{bar.algorithm}.md#measured)"
        returns = results[bar.name]["returns"]
        seeds = [f"{function(returns):.4g}" for function in (min, max)]
        rows.append((link, steps, iqm, *seeds, str(len(returns))))
    head = ("`jaxrl-dist train ...`", "env steps", "IQM of greedy returns")
    return table((*head, "lowest seed", "highest seed", "seeds"), rows)


def battles(names: str) -> str:
    """Returns the battles won and the returns of bars by name:
    mean and standard deviation over the seeds.
    """
    script = learning()
    results = script["load"](DOCS / "learning" / script["RESULTS"])
    rows = []
    for name in names.split(","):
        result = results[name]
        [bar] = [bar for bar in script["BARS"] if bar.name == name]
        won = result.get("won")
        returns = result["returns"]
        cells = (
            f"[{name}](algorithms/{bar.algorithm}.md#measured)",
            f"{100 * statistics.mean(won):.0f} % ± {100 * statistics.stdev(won):.0f}"
            if won
            else "not counted",
            f"{statistics.mean(returns):.2f} ± {statistics.stdev(returns):.2f}",
            f"{result['steps']:,}",
            f"{statistics.median(result['seconds']) / 60:.1f}",
            f"`{result['command'].removeprefix('jaxrl-dist train ')}`",
        )
        rows.append(cells)
    return table(
        ("", "battles won", "greedy return", "env steps", "minutes", "`jaxrl-dist train ...`"), rows
    )


# --- Accelerators ---------------------------------------------------------------------------------


def accelerators(_: str | None) -> str:
    """Returns tables of what every algorithm's program starts, as counted by accelerators.py."""
    table: str = runpy.run_path(str(ROOT / "scripts" / "accelerators.py"))["tables"]()
    return table


def scale(_: str | None) -> str:
    """Returns a table of predicted and measured rates of a run over several devices and
    processes.
    """
    measured = json.loads((DOCS / "scale.json").read_text(encoding="utf-8"))
    table: str = runpy.run_path(str(ROOT / "benchmarks" / "scale.py"))["table"](measured)
    return table


# --- Tests ----------------------------------------------------------------------------------------


def tested(_: str | None) -> str:
    """Returns a table of algorithms by plan and backend: what the tests show,
    or why the combination is refused.
    """
    shown = runpy.run_path(str(ROOT / "scripts" / "tested.py"))["tested"]()
    head = ("algorithm", *map(" ".join, shown.columns))
    rows = [(f"[`{name}`](algorithms/{name}.md)", *cells) for name, cells in shown.rows.items()]
    reasons = (f"{i}. {reason}" for i, reason in enumerate(shown.reasons, 1))
    return "\n".join([table(head, rows), "", *reasons])


# --- Documents ------------------------------------------------------------------------------------


def source(path: str) -> str:
    """Returns the code of ``module:function``; a method or a nested function is
    ``module:Class.method.nested``.

    Raises:
      LookupError: there is no such function any more.
    """
    module, names = path.split(":")
    file = f"{module.replace('.', '/')}.py"
    text = (ROOT / file).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in names.split("."):
        parts = [part for part in ast.walk(node) if getattr(part, "name", None) == name]
        if len(parts) != 1:
            raise LookupError(f"{len(parts)} functions {name!r} of {path}")
        node = parts[0]
    code = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
    return f"[`{file}`](../{file})\n\n```python\n{code}\n```"


def file(path: str) -> str:
    """Returns a file of the repository as a block."""
    return f"```text\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n```"


def algorithm(name: str) -> str:
    """Returns the second half of an algorithm's page."""
    parts = {"Flags": algorithm_flags, "Presets": algorithm_presets, "Measured": algorithm_curves}
    text = "\n\n".join(f"## {title}\n\n{part(name)}" for title, part in parts.items())
    if name in algorithms.PRESETS:
        return text
    path = pathlib.Path(inspect.getfile(algorithms.config_class(name))).relative_to(ROOT)
    return f"{text}\n\n## Source\n\n[`{path}`](../../{path})"


def reference(_: None) -> str:
    """Returns a table of the pages of the API and of the files that they show."""
    rows = []
    for path in sorted((DOCS / "api").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        files = dict.fromkeys(file_of(name) for name in re.findall(r"^::: (\S+)", text, re.M))
        title = text.split("\n")[0].strip("# ")
        links = ", ".join(f"[`{file}`](../../{file})" for file in files)
        rows.append((f"[{title}]({path.name})", links))
    return table(("page", "files"), rows)


def file_of(name: str) -> str:
    """Returns the file of a module, or of a name in a module."""
    path = name.replace(".", "/")
    for file in (f"{path}.py", f"{path}/__init__.py"):
        if (ROOT / file).exists():
            return file
    return file_of(name.rpartition(".")[0])


PARTS: dict[str, Callable[[Any], str]] = {
    "accelerators": accelerators,
    "algorithm": algorithm,
    "fields": fields,
    "file": file,
    "measured": measured,
    "battles": battles,
    "record": record,
    "reference": reference,
    "run_flags": run_flags,
    "scale": scale,
    "source": source,
    "synonyms": synonyms,
    "tested": tested,
}


def pages() -> list[pathlib.Path]:
    """The pages that may have generated parts."""
    return sorted(path for path in DOCS.rglob("*.md") if PART.search(path.read_text("utf-8")))


def generated(text: str) -> str:
    """Returns the text of a page with its generated parts written again."""
    return PART.sub(_part, text)


def _part(part: re.Match[str]) -> str:
    name, argument, _ = part.groups()
    first, last = part[0].split("\n", 1)[0], "<!-- end -->"
    return f"{first}\n\n{PARTS[name](argument)}\n\n{last}"


def main() -> None:
    """Rewrites the pages."""
    for path in [pathlib.Path(name) for name in sys.argv[1:]] or pages():
        text = path.read_text(encoding="utf-8")
        path.write_text(generated(text), encoding="utf-8")


if __name__ == "__main__":
    main()
