"""A run's progress where Python trains: the command line's table, and in notebooks a plot."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_console import report

import jaxrl_dist
from jaxrl_dist.run import console


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Puts a notebook in IPython's place, which keeps the points of each drawing."""
    drawn: list[Any] = []

    def draw(figure: Any) -> None:
        (axes,) = figure.axes
        drawn.append([np.transpose(line.get_data()).tolist() for line in axes.lines])
        figure.canvas.draw()

    def output(figure: Any, *, display_id: bool) -> Any:
        assert display_id and not drawn, "later drawings replace the first"
        draw(figure)
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
        report(8_000, **{"episode/return": None}),
        report(10_000, {"return_mean": 480.25}, **{"episode/return": 200.0}),
    ]
    assert list(jaxrl_dist.display(reports, 10_000, plot=True)) == reports
    assert len(capsys.readouterr().out.splitlines()) == 5  # compiling, the head and three rows
    assert drawings[:2] == [[[[4_000, 171.5]], []]] * 2
    assert drawings[2] == [[[4_000, 171.5], [10_000, 200.0]], [[10_000, 480.25]]]


def test_without_a_notebook_there_is_the_table_and_no_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    with pytest.raises(jaxrl_dist.ConfigError, match="IPython is not installed"):
        jaxrl_dist.display([], 1, plot=True)
    assert len(list(jaxrl_dist.display([report(4_000)], 10_000))) == 1
    assert "return" in capsys.readouterr().out
