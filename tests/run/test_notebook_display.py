"""A run's progress where Python trains: the command line's table, and in notebooks a plot."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
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
        drawn.append(
            np.asarray(
                Image.open(io.BytesIO(base64.b64decode(picture["image/png"]))).convert("RGB")
            )
        )

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
    counts = [
        [int((drawing == color).all(axis=2).sum()) for color in (training, evaluation)]
        for drawing in drawings
    ]
    assert [drawing.shape for drawing in drawings] == [(300, 600, 3)] * 3
    assert (
        counts[0] == counts[1]
        and counts[0][1] == 0
        and counts[2][0] > counts[0][0]
        and counts[2][1] > 10
    )


def test_without_a_notebook_there_is_the_table_and_no_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    with pytest.raises(jaxrl_dist.ConfigError, match="IPython is not installed"):
        jaxrl_dist.display([], 1, plot=True)
    assert len(list(jaxrl_dist.display([report(4_000)], 10_000))) == 1
    assert "return" in capsys.readouterr().out


def interrupted(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["drawing", "row", "loop", "left"])
def test_display_closes_what_it_shows_in_whatever_way_it_ends(
    where: str, drawings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, errors = [], []

    def reports() -> Any:
        try:
            yield from (report(step) for step in range(1_000, 9_000, 1_000))
        finally:
            closed.append(where)

    if where == "drawing":
        monkeypatch.setattr(sys.modules["IPython.display"], "display", interrupted)
    elif where == "row":
        monkeypatch.setattr(console.Display, "_row", interrupted)
    kept = reports()  # as a traceback keeps it
    try:
        for _ in (shown := jaxrl_dist.display(kept, 10_000, plot=True)):
            if where == "loop":
                raise KeyboardInterrupt
            break
    except KeyboardInterrupt as error:
        errors.append(error)  # as a notebook keeps the last one, with its frames
    if where in ("loop", "left"):
        del shown  # as a loop does that holds it alone
    assert closed == [where] and bool(errors) == (where != "left")


@pytest.mark.case  # tests/training/test_leaving.py stands in for it
def test_an_interrupt_while_it_draws_saves_the_run(
    drawings: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["IPython.display"], "display", interrupted)
    sizes: dict[str, Any] = {
        "hidden_sizes": (8,),
        "num_envs": 8,
        "rollout_length": 16,
        "report_interval": 128,
    }
    config = jaxrl_dist.preset(
        "ppo", "CartPole-v1", **sizes, num_devices=1, run_dir=str(tmp_path / "run")
    )
    with pytest.raises(KeyboardInterrupt) as error:
        for _ in jaxrl_dist.display(jaxrl_dist.train(config), 1_000_000, plot=True):
            pass
    assert error.tb is not None and list((tmp_path / "run" / "checkpoints").iterdir())
