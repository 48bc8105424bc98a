"""A run's progress where Python trains: the command line's table, and in notebooks a plot."""

from __future__ import annotations

import base64
import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image
from test_console import report

import jaxrl_dist
from jaxrl_dist.run import console


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Puts a notebook in IPython's place, which keeps the pixels of each drawing."""
    drawn: list[Any] = []

    def draw(picture: Any, *, raw: bool) -> None:
        assert raw and list(picture) == ["image/png"]
        drawn.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["image/png"]))).convert("RGB")))

    def output(picture: Any, *, raw: bool, display_id: bool) -> Any:
        assert display_id and not drawn, "later drawings replace the first"
        draw(picture, raw=raw)
        return SimpleNamespace(update=draw)

    module: Any = ModuleType("IPython.display")
    module.display = output
    package: Any = ModuleType("IPython")
    package.version_info = (9, 0)  # matplotlib asks for it
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return drawn


def test_reports_are_shown_and_drawn(
    drawings: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "ROW_SECONDS", -1.0)
    monkeypatch.setattr(console, "PLOT_SECONDS", -1.0)
    reports = [
        report(4_000),
        report(8_000, **{"episode/recent_return": None}),
        report(10_000, {"return_mean": 480.25}, **{"episode/recent_return": 200.0}),
    ]
    assert list(jaxrl_dist.display(reports, 10_000, plot=True)) == reports
    assert len(capsys.readouterr().out.splitlines()) == 5  # compiling, the head and three rows
    training, evaluation = (np.round(255 * np.array(to_rgb(color))) for color in ("C0", "C1"))
    counts = [[int((drawing == color).all(axis=2).sum()) for color in (training, evaluation)] for drawing in drawings]
    assert [drawing.shape for drawing in drawings] == [(300, 600, 3)] * 3
    assert counts[0] == counts[1] and counts[0][1] == 0 and counts[2][0] > counts[0][0] and counts[2][1] > 10


def test_without_a_notebook_there_is_the_table_and_no_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    with pytest.raises(jaxrl_dist.ConfigError, match="IPython is not installed"):
        jaxrl_dist.display([], 1, plot=True)
    assert len(list(jaxrl_dist.display([report(4_000)], 10_000))) == 1
    assert "return" in capsys.readouterr().out
