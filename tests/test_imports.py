"""Imports flow down only, and a few things are done in one place: read from the source,
without running it.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import runs

import jaxrl_dist

PACKAGE = "jaxrl_dist"


def _rooms() -> dict[str, str]:
    """What each module of the root and each folder may import beside itself,
    as CONTRIBUTING.md says; lower first.
    """
    lines = (runs.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    rows = [
        line.strip("| ").split(" | ")
        for line in lines
        if line.startswith("| `") and line.count(" | ") == 2
    ]
    return {room.strip("`"): low.replace("ground", _GROUND).strip("-") for room, _, low in rows}


_GROUND = "errors heavy checks config spaces simulator types protocols rng"
ALLOWED = _rooms()
# public names, imported when first used: see test_importing_the_package_is_light
UNCHECKED = {"__init__"}

# Who may import what from outside the package; for a name that is not here, anyone.
IMPORTED_BY: dict[str, set[str]] = {
    "flax": {
        *("nn/blocks.py", "nn/cores.py", "nn/heads.py", "nn/layers.py", "nn/torsos.py"),
        *("templates/dqn.py", "templates/ppo.py", "templates/sac.py"),
    },
    **{
        library: set()
        for library in ("pickle", "cloudpickle", "dill", "marshal", "shelve", "socketserver")
    },
    # what listens, if a user asks for it
    "aiohttp": {"envs/wire/server.py", "envs/host/clients.py", "play/serving.py"},
    # which looks whether the coordinator's port is free, and whether it answers
    "socket": {"hosts/start.py"},
}
GRADIENTS = {"jax.grad", "jax.value_and_grad", "jax.vjp", "jax.jacrev"}
GRADIENTS_IN = {"learners/sgd.py"}
EVALUATES_IN = {"scripts/notebooks.py"}  # whose business is to run code that notebooks hold

SOURCES = {
    path.relative_to(base).as_posix(): ast.parse(path.read_text(encoding="utf-8"), str(path))
    for base, folder in (
        (runs.ROOT / PACKAGE, runs.ROOT / PACKAGE),
        (runs.ROOT, runs.ROOT / "scripts"),
    )
    for path in sorted(folder.rglob("*.py"))
}
MODULES = {
    name.split("/")[0].removesuffix(".py") for name in SOURCES if not name.startswith("scripts/")
}


def imported(name: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, in functions too;
    ``from a import b`` is ``a.b``.
    """
    package = [PACKAGE, *name.split("/")[:-1]]
    for node in ast.walk(SOURCES[name]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def test_the_table_names_every_module_and_lower_ones_only() -> None:
    missing = MODULES - ALLOWED.keys() - UNCHECKED
    assert not missing, (
        f"add to the table of CONTRIBUTING.md, with what it may import: {sorted(missing)}"
    )
    rows = list(ALLOWED)
    upward = [
        (row, low)
        for i, row in enumerate(rows)
        for low in ALLOWED[row].split()
        if low not in rows[:i]
    ]
    assert not upward, f"CONTRIBUTING.md names a room that does not lie below: {upward}"


def test_what_contributing_says_to_touch_exists() -> None:
    text = (runs.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("### What to touch")[2].partition("\n## ")[0]
    places = re.findall(r"`([\w/.]+/[\w.]*|\w+\.toml)`", table)
    missing = [
        place
        for place in places
        if not (runs.ROOT / PACKAGE / place).exists() and not (runs.ROOT / place).exists()
    ]
    assert len(places) >= 10 and not missing, missing


def test_folders_of_tests_are_rooms() -> None:
    assert {
        path.parent.name for path in (runs.ROOT / "tests").glob("*/test_*.py")
    } <= ALLOWED.keys()


def test_cases_name_tests_that_stand_in_for_them() -> None:
    files = {
        path.name: path.read_text(encoding="utf-8")
        for path in (runs.ROOT / "tests").rglob("test_*.py")
    }
    tests = {name for text in files.values() for name in re.findall(r"^def (test_\w+)", text, re.M)}
    beside = re.compile(r"mark\.case  # (.*)|^# (.*)\n@pytest\.mark\.case$", re.M)
    comments = ["".join(found) for text in files.values() for found in beside.findall(text)]
    named = {name for line in comments for name in re.findall(r"\btest_\w+(?:\.py)?", line)}
    assert named <= tests | files.keys()


def test_imports_flow_down() -> None:
    wrong = []
    for name in SOURCES:
        module = name.split("/")[0].removesuffix(".py")
        if module in UNCHECKED or name.startswith("scripts/"):
            continue
        for line, target in imported(name):
            top, *rest = target.split(".")
            if top == PACKAGE:
                other = rest[0] if rest and rest[0] in MODULES | ALLOWED.keys() else "__init__"
                if other not in {module, *ALLOWED.get(module, "").split()}:
                    wrong.append(f"{name}:{line}: {module} must not import {other}")
            elif top == "scripts":
                wrong.append(f"{name}:{line}: the package must not import scripts")
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions, and those for type checkers, count too."""
    names = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in SOURCES
        if name != "__init__.py" and not name.startswith("scripts/")
    }
    graph: dict[str, set[str]] = {}
    for name in names.values():
        for target in (
            target for _, target in imported(name) if target.startswith(f"{PACKAGE}.")
        ):  # not another's types
            parts = target.removeprefix(f"{PACKAGE}.").split(".")
            within = next(
                (
                    names[x]
                    for n in (len(parts), len(parts) - 1)
                    if (x := ".".join(parts[:n])) in names
                ),
                name,
            )
            graph.setdefault(name, set()).update({within} - {name})
    graphlib.TopologicalSorter(graph).prepare()


def test_a_reader_finds_few_modules_in_the_root_and_no_long_file() -> None:
    root = [name for name in SOURCES if "/" not in name and name != "__init__.py"]
    assert len(root) <= 14, f"does one of these belong into a folder? {root}"
    lines = {
        path: path.read_text(encoding="utf-8").count("\n")
        for path in (runs.ROOT / PACKAGE).rglob("*.py")
    }
    long = {
        path.relative_to(runs.ROOT).as_posix(): count
        for path, count in lines.items()
        if count > 500
    }
    assert not long, f"divide along a seam: {long}"


def test_some_libraries_are_imported_in_one_place_or_none() -> None:
    wrong = [
        f"{name}:{line}: only {sorted(owners) or 'nobody'} may import {top}"
        for name in SOURCES
        for line, target in imported(name)
        if (owners := IMPORTED_BY.get(top := target.split(".")[0])) is not None
        and name not in owners
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_one_module_takes_gradients() -> None:
    wrong = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name in SOURCES.keys() - GRADIENTS_IN
        for node in ast.walk(SOURCES[name])
        if isinstance(node, ast.Attribute) and ast.unparse(node) in GRADIENTS
    ]
    wrong += [
        f"{name}:{line}: imports {target}"
        for name in SOURCES.keys() - GRADIENTS_IN
        for line, target in imported(name)
        if target in GRADIENTS
    ]
    assert not wrong, f"only {sorted(GRADIENTS_IN)} takes gradients\n" + "\n".join(wrong)


def test_no_source_text_is_evaluated() -> None:
    wrong = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name in SOURCES.keys() - EVALUATES_IN
        for node in ast.walk(SOURCES[name])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"eval", "exec"}
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_algorithm_files_import_on_top_and_nothing_heavy() -> None:
    """``--help`` reads them; what they take from ``lazy``
    is imported when something of it is first used.
    """
    inside = [
        f"{name}:{node.lineno}"
        for name in SOURCES
        if name.startswith("algorithms/")
        for function in ast.walk(SOURCES[name])
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not inside, f"imports belong on top, with those of jaxrl_dist.lazy: {inside}"
    code = (
        f"import sys; from {PACKAGE}.algorithms import ALGORITHMS, config_class; [*map(config_class, ALGORITHMS)];"
        "print(*sorted({'jax', 'numpy', 'optax', 'flax', 'chex'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_every_public_name_is_where_the_package_looks_for_it() -> None:
    assert all(getattr(jaxrl_dist, name) is not None for name in jaxrl_dist.__all__)


def test_importing_the_package_is_light() -> None:
    code = f"import sys, {PACKAGE}; print(*sorted({{'jax', 'gymnax', 'envpool'}} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.case
def test_gymnax_imports_plotting_libraries_lazily() -> None:
    code = """if True:
        import sys
        from jaxrl_dist.envs.device import gymnax
        env, _ = gymnax.native("Catch-bsuite", {})
        assert not {"seaborn", "pandas", "scipy.stats", "matplotlib.pyplot"} & sys.modules.keys()
        plt = sys.modules["gymnax.environments.bsuite.catch"].plt
        figure = plt.figure()
        import matplotlib.pyplot
        assert matplotlib.pyplot.fignum_exists(figure.number) and matplotlib.pyplot is not plt
        assert sys.modules["matplotlib.pyplot"] is matplotlib.pyplot
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
