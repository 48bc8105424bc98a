"""The notebooks: their code runs, and what is stored in them was made by it."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs

import jaxrl_dist

SCRIPT = runs.ROOT / "scripts" / "notebooks.py"
NAMES = runpy.run_path(str(SCRIPT))
FAST = "1-tour"
"""The one that every change runs."""
NOTEBOOKS = {path.stem: path for path in NAMES["NOTEBOOKS"]}
ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": str(runs.ROOT),
}


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    return [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == kind
    ]


def kinds(path: Path) -> list[list[str]]:
    """What each code cell gives back, in words."""
    return [
        [min(output.get("data", ["text"])) for output in cell["outputs"]] for cell in cells(path)
    ]


def execute(path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(path), "--out", str(out)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)


def test_they_are_numbered() -> None:
    numbers = sorted(int(name.partition("-")[0]) for name in NOTEBOOKS)
    assert numbers == [*range(1, len(NOTEBOOKS) + 1)] and FAST in NOTEBOOKS


def test_every_page_names_the_supported_versions_of_python() -> None:
    pyproject = (runs.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", pyproject)
    supported = f"Python {', '.join(versions[:-1])} or {versions[-1]}"
    pages = [runs.ROOT / "README.md", *(runs.ROOT / "docs").glob("*.md"), *NOTEBOOKS.values()]
    sentences = {
        path.name: re.findall(r"Python 3[\d., ]*? or 3\.\d+", path.read_text("utf-8"))
        for path in pages
    }
    found = {name: texts for name, texts in sentences.items() if texts}
    assert {"README.md", "install.md", "tutorial.md", "1-tour.ipynb"} <= {*found}
    assert {text for texts in found.values() for text in texts} == {supported}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_stored_is_of_this_code(name: str) -> None:
    """``make notebooks`` stores it again."""
    path = NOTEBOOKS[name]
    notebook, code = json.loads(path.read_text(encoding="utf-8")), cells(path)
    assert notebook["metadata"][NAMES["CODE"]] == NAMES["digest"](notebook), (
        "code has changed since it was run"
    )
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    pictures = [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", ())
    ]
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert pictures or name == "6-resume"
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_lead_somewhere(name: str) -> None:
    path = NOTEBOOKS[name]
    for cell in cells(path, "markdown"):
        for link in re.findall(r"\]\(([^)#\s]+)", "".join(cell["source"])):
            assert link.startswith("https://") or (path.parent / link).exists(), link


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.case if n == FAST else pytest.mark.slow) for n in NOTEBOOKS],
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    done = execute(NOTEBOOKS[name], tmp_path)
    assert done.returncode == 0, done.stderr
    assert kinds(tmp_path / NOTEBOOKS[name].name) == kinds(NOTEBOOKS[name])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_uses_what_the_api_pages_show(name: str) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (runs.ROOT / "docs" / "api").glob("*.md")]
    shown = {name for page in pages for name in re.findall("^::: (.*)", page, re.M)}
    shown |= {f"jaxrl_dist.{name}" for name in jaxrl_dist.__all__}
    nodes = [
        node
        for cell in cells(NOTEBOOKS[name])
        for node in ast.walk(ast.parse("".join(cell["source"])))
    ]
    imports = [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom) and "jaxrl_dist" in str(node.module)
    ]
    used = {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    of = [
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and hasattr(node.value, "id")
    ]
    for alias, path in {"jaxrl_dist": "jaxrl_dist", **used}.items():
        if not shown & {path, path.rpartition(".")[0]}:
            parts = {f"{path}.{attribute}" for name, attribute in of if name == alias}
            assert parts and parts <= shown, path


def write(path: Path, *sources: str) -> Path:
    code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    notebook = {
        "cells": [{**code, "source": [source]} for source in sources],
        "metadata": {},
        "nbformat": 4,
    }
    path.write_text(json.dumps(notebook))
    return path


def test_cells_run_as_one_program_and_show_what_jupyter_would(tmp_path: Path) -> None:
    path = write(
        tmp_path / "good.ipynb",
        "import sys\nprint('a')\nprint('b', file=sys.stderr)\nx = 3",
        "import matplotlib.pyplot as plt\nplt.plot([x, 1])\nplt.show()\nprint('drawn')\nx + 1",
        "from __main__ import x as y\nassert y == 3\nNone",
    )
    assert execute(path, tmp_path).returncode == 0
    first, second, third = (cell["outputs"] for cell in cells(path))
    assert [output["text"] for output in first] == [["a\n", "b\n"]]
    assert [min(output.get("data", ["text"])) for output in second] == [
        "image/png",
        "text",
        "text/plain",
    ]
    assert second[2]["data"] == {"text/plain": "4"} and third == []


def test_a_cell_that_fails_stores_nothing_and_says_where(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.ipynb", "x = 1", "\nx / 0")
    before = path.read_text()
    done = execute(path, tmp_path)
    assert done.returncode == 1 and path.read_text() == before
    assert "bad.ipynb" in done.stderr and "<cell 2>" in done.stderr and "x / 0" in done.stderr
