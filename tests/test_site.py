"""The documentation in a real browser: nothing is cut, pictures show, light and dark;
its search works.

The browser needs ``pip install playwright``, and Chromium: ``playwright install chromium``,
or its path in CHROMIUM.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs

from jaxrl_dist.run.version import RELEASE

pytestmark = pytest.mark.slow

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
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(built),
    ]
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "NO_MKDOCS_2_WARNING": "1",
        "PYTHONPATH": str(runs.ROOT),
    }
    subprocess.run(command, cwd=runs.ROOT, env=env, check=True)
    return built


@pytest.fixture(scope="module")
def page() -> Any:
    """One for all tests: where Chromium has one process, closing a page ends it."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        # as containers need
        flags = ["--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu"]
        try:
            opened = driver.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=flags)
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error}")
        yield opened.new_page()
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_and_every_picture_shows(
    site: Path, page: Any, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    faults = {}
    files = [
        file
        for file in site.rglob("*.html")
        if "assets" not in file.parts and file.name not in ("404.html", "cartpole.html")
    ]
    assert len(files) > 40
    page.goto(files[0].as_uri())
    page.evaluate("localStorage.clear()")  # the scheme that a page has chosen once
    for file in files:
        page.goto(file.as_uri())
        found = page.evaluate(CUT)
        if any(found.values()):
            faults[str(file.relative_to(site))] = found
    assert not faults
    assert (
        page.evaluate("document.body.dataset.mdColorScheme")
        == {"light": "default", "dark": "slate"}[scheme]
    )


@pytest.fixture
def address(site: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "file":
        yield site.as_uri()
        return
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("address", ["file", "http"], indirect=True)
@pytest.mark.parametrize("name", ["index.html", "api/types.html"])
def test_the_search_finds_pages(address: str, name: str, page: Any) -> None:
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{address}/{name}")
    page.locator(".md-search__input").press_sequentially("resume")
    page.wait_for_selector(".md-search-result__item")
    targets = [link.get_attribute("href") for link in page.locator(".md-search-result__link").all()]
    assert len(targets) >= 10 and all(target.startswith(address) for target in targets)


def test_pages_show_the_version_and_load_nothing_from_elsewhere(site: Path) -> None:
    assert (
        (site / "search" / "search_index.js")
        .read_text(encoding="utf-8")
        .startswith("var __index = {")
    )
    for file in (site / "index.html", site / "api" / "types.html"):
        text = file.read_text(encoding="utf-8")
        header = text[text.index("<header") : text.index("</header>")]
        assert f"jaxrl_dist {RELEASE}" in header and "iframe-worker.js" in text
        assert not re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="https?:[^"]*', text)


def test_the_search_prefers_guides_to_the_api(site: Path) -> None:
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    pages = json.loads(text.removeprefix("var __index = ").rstrip(";\n"))["docs"]
    boosts = {
        page["location"].startswith("api/"): page.get("boost", 1)
        for page in pages
        if "#" not in page["location"]
    }
    assert boosts == {True: 0.1, False: 1}


def test_the_first_page_about_checkpoints_is_a_guide(site: Path, page: Any) -> None:
    page.goto(site.as_uri() + "/index.html")
    page.locator(".md-search__input").press_sequentially("checkpoint")
    page.wait_for_selector(".md-search-result__item")
    assert "/api/" not in page.locator(".md-search-result__link").first.get_attribute("href")
