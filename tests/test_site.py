"""The documentation in a real browser: nothing is cut, every picture shows, wide and narrow, light and dark.

Needs ``pip install playwright``, and Chromium: ``playwright install chromium``, or its path in ``CHROMIUM``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api")

CUT = """
() => {
    const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
    const cut = e => e.scrollWidth > e.clientWidth + 1;
    const wide = [...document.querySelectorAll("article pre > code")].filter(cut);
    const tables = [...document.querySelectorAll("article table, article .formula")].filter(
        table => cut(table) && !scrolls(table.closest(".md-typeset__scrollwrap, .formula") ?? table));
    return {
        page: document.documentElement.scrollWidth - document.documentElement.clientWidth,
        cut: [...wide, ...tables].map(e => e.textContent.trim().slice(0, 60)),
        lost: [...document.images].filter(image => image.naturalWidth === 0).map(image => image.src),
        unread: [...document.querySelectorAll("math")].filter(math => math.textContent.includes("\\\\")).length,
    }
}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(runs.ROOT)}
    subprocess.run(command, cwd=runs.ROOT, env=env, check=True)
    return built


@pytest.fixture(scope="module")
def page() -> Any:
    """One for all tests: where Chromium has one process, closing a page ends it."""
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu"]  # as containers need
        try:
            opened = driver.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=flags)
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error}")
        yield opened.new_page()
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_and_every_picture_shows(site: Path, page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    faults = {}
    files = [file for file in site.rglob("*.html") if "assets" not in file.parts and file.name != "404.html"]
    assert len(files) > 40
    page.goto(files[0].as_uri())
    page.evaluate("localStorage.clear()")  # the scheme that a page has chosen once
    for file in files:
        page.goto(file.as_uri())
        found = page.evaluate(CUT)
        if any(found.values()):
            faults[str(file.relative_to(site))] = found
    assert not faults
    assert page.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[scheme]
