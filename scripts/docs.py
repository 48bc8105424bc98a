"""The hook of ``mkdocs.yml``: generates the documents' flags, presets,
measurements and tests from the code.

A line ``{{ name argument }}`` of a document is replaced by the result of the function of that name
below, so nothing generated can be out of date. ``make docs`` builds the site.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import pathlib
import re
import runpy
import statistics
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

import numpy as np
from latex2mathml.converter import convert as to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import jaxrl_dist
from jaxrl_dist import algorithms
from jaxrl_dist.algorithms.presets import KINDS
from jaxrl_dist.checks import flag
from jaxrl_dist.commands import help
from jaxrl_dist.commands.flags import plain_defaults
from jaxrl_dist.config.envs import LIBRARIES, split_env
from jaxrl_dist.config.named import data_of
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.synonyms import SYNONYMS
from jaxrl_dist.config.train import GROUPS
from jaxrl_dist.envs.source import BACKENDS, DeviceEnv, EnvSource, find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run.version import RELEASE
from jaxrl_dist.settings import given
from jaxrl_dist.spaces import Box, Discrete, Space
from jaxrl_dist.training import setup
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.types import EnvSpec

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = (*algorithms.ALGORITHMS, *algorithms.PRESETS)
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


WIDE = ("learning.md", "speed.md", "accelerators.md", "tested.md")
"""Documents with wide tables, which take the place of the list of headings."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Shows the version of the package in the header of each page; mkdocs calls it."""
    config.site_name += f" {RELEASE}"
    return config


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds a page for each notebook, and its pictures; mkdocs calls it."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name, content in notebook(path).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Inserts the generated parts into the text of a document; mkdocs calls it."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri.startswith("api/"):
        page.meta["search"] = {"boost": 0.1}  # a name in the API is in a title: guides come first
    markdown = re.sub(
        r"^```math\n(.*?)\n```$", lambda found: formula(found[1]), markdown, flags=re.M | re.S
    )
    markdown = re.sub(r"\]\((?:\.\./(notebooks/))?([\w-]+)\.ipynb\)", r"](\1\2.md)", markdown)
    return re.sub(
        r"^\{\{ (\w+)(?: (\S+))? \}\}$",
        lambda found: PARTS[found[1]](found[2]),
        markdown,
        flags=re.M,
    )


def formula(latex: str) -> str:
    """Returns a formula as MathML, which a browser draws without a script or a network."""
    return f'<div class="formula">{to_mathml(latex, display="block")}</div>'


# --- Flags ----------------------------------------------------------------------------------------


def fields(path: str) -> str:
    """Returns a table of the flags of a dataclass such as
    ``jaxrl_dist.commands.flags.Command``, not inherited ones.
    """
    module, name = path.rsplit(".", 1)
    kind = getattr(importlib.import_module(module), name)
    return flag_table(kind, help.docstrings(kind), help.defaults_of(kind))


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
    """Returns a table for each class that defines flags of an algorithm; for a preset,
    a table of the flags it sets.
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
    parts: list[str] = []
    seen: set[str] = set()
    for base in kind.__mro__:
        texts = {field: text for field, text in help.docstrings(base).items() if field not in seen}
        seen |= texts.keys()
        if texts:
            title = inspect.cleandoc(base.__doc__).splitlines()[0]
            parts += [f"**{title}**", flag_table(kind, texts, help.defaults_of(kind))]
    return "\n\n".join(parts)


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
    rows = []
    for kind, env in EXAMPLES.items():
        config, _ = given.filled(
            given.user_values(jaxrl_dist.Train(name, env=env, data=data_of(name))), source_of(env)
        )
        try:
            make_algorithm(config, spec_of(env))
        except ConfigError as error:
            rows.append((KINDS[kind], f"`{env}`", f"refused: {error.with_flags}"))
            continue
        pairs = [(config, default), (config.algorithm, default.algorithm)]
        changed = [
            f"`{flag(field.name)}` {quoted(getattr(new, field.name))}"
            for new, old in pairs
            for field in dataclasses.fields(new)
            if field.name not in ("algorithm", "env")
            and getattr(new, field.name) not in (None, getattr(old, field.name))
        ]
        rows.append((KINDS[kind], f"`{env}`", ", ".join(changed) or "nothing"))
    return table(("kind", "such as", "differs from the defaults"), rows)


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
    results = script["load"](ROOT / "docs" / "learning" / script["RESULTS"])
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
    """Returns some columns of ``learning.md`` for bars by name,
    with links to the algorithms' pages.
    """
    script = learning()
    results = script["load"](ROOT / "docs" / "learning" / script["RESULTS"])
    bars = [bar for name in names.split(",") for bar in script["BARS"] if bar.name == name]
    assert len(bars) == len(names.split(",")), f"not all of {names} are bars"
    rows = []
    for bar, line in zip(bars, script["rows"](bars, results)[2:], strict=True):
        _, command, steps, _, seeds, _, iqm, *_ = (cell.strip() for cell in line.split("|"))
        rows.append(
            (
                f"[{command}](algorithms/{bar.algorithm}.md#measured)",
                steps,
                iqm,
                str(len(seeds.split())),
            )
        )
    return table(("`jaxrl-dist train ...`", "env steps", "IQM of greedy returns", "seeds"), rows)


def battles(names: str) -> str:
    """Returns the battles won and the returns of bars by name:
    mean and standard deviation over the seeds.
    """
    script = learning()
    results = script["load"](ROOT / "docs" / "learning" / script["RESULTS"])
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
    measured = json.loads((ROOT / "docs" / "scale.json").read_text(encoding="utf-8"))
    table: str = runpy.run_path(str(ROOT / "benchmarks" / "scale.py"))["table"](measured)
    return table


# --- Tests ----------------------------------------------------------------------------------------


def cases(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yields the arguments of each case of a parametrised test."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    for chosen in itertools.product(*(mark.args[1] for mark in marks)):
        case: dict[str, Any] = {}
        for mark, values in zip(marks, chosen, strict=True):
            names = [name.strip() for name in mark.args[0].split(",")]
            if hasattr(values, "marks"):  # of pytest.param
                values = values.values
            elif len(names) == 1:
                values = [values]
            case |= zip(names, values, strict=True)
        yield case


def evidence() -> Iterator[tuple[str, str, str, str]]:
    """Yields ``(algorithm, plan, backend, what)`` for
    each parametrised case of the tests that train.
    """
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "plans")]
    plans, threads, bars = (
        importlib.import_module(name)
        for name in ("test_plans", "test_asynchronous", "test_learning")
    )
    for test in (
        plans.test_probe,
        plans.test_continuous_probe,
        plans.test_probes_under_the_other_plans,
    ):
        for case in cases(test):
            yield case["name"], case.get("plan", "on_device"), "gymnax", "probes"
    for case in cases(plans.test_every_combination_trains_or_is_refused):
        yield case["name"], case["plan"], case["backend"], "trains"
    for case in cases(plans.test_every_algorithm_repeats_bit_for_bit):
        yield case["name"], "on_device", "gymnax", "repeats"
    for case in cases(plans.test_same_seed_same_numbers):
        run = plans.RUNS[case["plan"]]
        yield algorithms.name_of(run.algorithm), case["plan"], spec_of(run.env).backend, "repeats"
    for case in cases(threads.test_lockstep_repeats_bit_for_bit):
        yield case["name"], "asynchronous", backend_of(case["env_id"]), "repeats"
    for case in cases(bars.test_bar):
        # the table has no columns for them, and they may be missing
        if case["bar"].env.split(":")[0] in LIBRARIES:
            continue
        config = bars.LEARNING["config_of"](case["bar"], 0)
        yield case["bar"].algorithm, config.plan, backend_of(config.env), "learns"


def backend_of(env: str) -> str:
    backend = split_env(env)[0]
    assert backend is not None
    return backend


def refused(name: str, env: str, **fields: Any) -> str | None:
    """Returns the reason why an algorithm cannot train on an environment; None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            setup.prepare(jaxrl_dist.preset(name, env, **fields))
    except ConfigError as error:
        return error.with_flags
    return None


def tested(_: str | None) -> str:
    """Returns a table of algorithms by plan and backend: what the tests show,
    or why the combination is refused.
    """
    found: dict[tuple[str, str, str], set[str]] = {}
    for name, plan, backend, what in evidence():
        found.setdefault((name, plan, backend), set()).add(what[0].upper())
    columns = [(plan, backend) for plan in PLANS for backend in BACKENDS]
    columns = [column for column in columns if any((name, *column) in found for name in NAMES)]
    reasons: list[str] = []
    rows = []
    for name in NAMES:
        env = next(
            (
                env
                for env in ("CartPole-v1", "Pendulum-v1")
                if refused(name, f"gymnax:{env}") is None
            ),
            "",
        )
        row = [f"[`{name}`](algorithms/{name}.md)"]
        for plan, backend in columns:
            cell = " ".join(sorted(found.get((name, plan, backend), ())))
            if cell and (reason := refused(name, f"{backend}:{env}", plan=plan)):
                reasons += [reason] if reason not in reasons else []
                cell = f"no ({reasons.index(reason) + 1})"
            row.append(cell)
        rows.append(row)
    head = ("algorithm", *(f"{plan} {backend}" for plan, backend in columns))
    return "\n".join(
        [table(head, rows), "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]
    )


# --- Notebooks ------------------------------------------------------------------------------------


def notebook(path: pathlib.Path) -> dict[str, str | bytes]:
    """Returns a notebook's page, with its stored outputs, and its pictures, by file name."""
    parts: list[str] = []
    found: dict[str, str | bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if (picture := output.get("data", {}).get("image/png")) is not None:
                name = f"{path.stem}-{len(found) + 1}.png"
                found[name] = base64.b64decode(picture)
                parts.append(f"![]({name})")
            else:
                text = "".join(output.get("text") or output["data"]["text/plain"])
                parts.append(f"```text\n{text.rstrip()}\n```")
    return {f"{path.stem}.md": "\n\n".join(parts), **found}


# --- Documents ------------------------------------------------------------------------------------


def source(path: str) -> str:
    """Returns the code of ``module:function``; a method or a nested function is
    ``module:Class.method.nested``.

    Raises:
      LookupError: there is no such function any more.
    """
    module, names = path.split(":")
    file = ROOT / f"{module.replace('.', '/')}.py"
    text = file.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in names.split("."):
        parts = [part for part in ast.walk(node) if getattr(part, "name", None) == name]
        if len(parts) != 1:
            raise LookupError(f"{len(parts)} functions {name!r} of {path}")
        node = parts[0]
    code = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
    return f"`{file.relative_to(ROOT)}`\n\n```python\n{code}\n```"


def file(path: str) -> str:
    """Returns a file of the repository as a block."""
    return f"```text\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n```"


def algorithm(name: str) -> str:
    """Returns the second half of an algorithm's page."""
    parts = {"Flags": algorithm_flags, "Presets": algorithm_presets, "Measured": algorithm_curves}
    text = "\n\n".join(f"## {title}\n\n{part(name)}" for title, part in parts.items())
    if name in algorithms.PRESETS:
        return text
    path = pathlib.Path(inspect.getfile(algorithms.config_class(name)))
    code = textwrap.indent(f"```python\n{path.read_text(encoding='utf-8')}```", "    ")
    return f'{text}\n\n## Source\n\n??? note "`{path.relative_to(ROOT)}`"\n{code}'


PARTS: dict[str, Callable[[Any], str]] = {
    "accelerators": accelerators,
    "algorithm": algorithm,
    "fields": fields,
    "file": file,
    "measured": measured,
    "battles": battles,
    "run_flags": run_flags,
    "scale": scale,
    "source": source,
    "synonyms": synonyms,
    "tested": tested,
}
