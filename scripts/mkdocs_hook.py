"""The hook of ``mkdocs.yml``: what a site has that Markdown lacks.

Formulas become MathML, notebooks become pages, and a link to a file of the repository becomes its
name or its text, because the site has only pages. ``make docs`` builds the site.
"""

from __future__ import annotations

import base64
import json
import pathlib
import re
import textwrap
from typing import Any

from latex2mathml.converter import convert as to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from jaxrl_dist.run.version import RELEASE

ROOT = pathlib.Path(__file__).resolve().parent.parent
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
    """Replaces formulas and links to files in the text of a document; mkdocs calls it."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri.startswith("api/"):
        page.meta["search"] = {"boost": 0.1}  # a name in the API is in a title: guides come first
    markdown = re.sub(
        r"^```math\n(.*?)\n```$", lambda found: formula(found[1]), markdown, flags=re.M | re.S
    )
    markdown = re.sub(r"\]\((?:\.\./(notebooks/))?([\w-]+)\.ipynb\)", r"](\1\2.md)", markdown)
    markdown = re.sub(
        r"(?<=^## Source\n\n)\[`([^`]+)`\]\(\S+\)$",
        lambda found: source(found[1]),
        markdown,
        flags=re.M,
    )
    outside = "../" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^]]+)\]\({re.escape(outside)}[^)]*\)", r"\1", markdown)


def formula(latex: str) -> str:
    """Returns a formula as MathML, which a browser draws without a script or a network."""
    return f'<div class="formula">{to_mathml(latex, display="block")}</div>'


def source(path: str) -> str:
    """Returns a Python file of the repository as a block that a click unfolds."""
    text = (ROOT / path).read_text(encoding="utf-8")
    code = textwrap.indent(f"```python\n{text}```", "    ")
    return f'??? note "`{path}`"\n{code}'


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
