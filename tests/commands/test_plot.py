"""Learning curves over seeds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl_dist import cli
from jaxrl_dist.commands import plot
from jaxrl_dist.commands.plot import Curve
from jaxrl_dist.errors import ConfigError


def make_run(folder: Path, name: str, returns: list[float | None], seed: int = 0, **hyperparameters: float) -> Path:
    run_dir = folder / name
    run_dir.mkdir()
    config = {
        "format": 1,
        "algorithm": "ppo",
        "hyperparameters": {"learning_rate": 1e-3, **hyperparameters},
        "run": {"env": "gymnax:CartPole-v1", "plan": "on_device", "seed": seed},
    }
    (run_dir / "config.json").write_text(json.dumps(config))
    lines = [
        {"env_steps": 100 * i, "wall_time_s": 0.5 * i, "episode/return": value} for i, value in enumerate(returns, 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_a_curve_leaves_out_what_has_no_value_and_a_line_that_is_cut_off(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", [None, 2.0, None, 4.0])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 500, "episo')
    curve = plot.read_curve(run_dir, "episode/return")
    assert curve.x.tolist() == [200, 400] and curve.y.tolist() == [2, 4]
    assert plot.read_curve(run_dir, "episode/return", "time").x.tolist() == [1.0, 2.0]


def test_the_middle_is_the_mean_of_the_middle_half_of_the_seeds() -> None:
    rng = np.random.default_rng(0)
    curves = [Curve(np.array([0.0, 100.0]), rng.normal(size=2)) for _ in range(8)]
    line = plot.middle(curves)
    for point in (0, 50, plot.POINTS - 1):
        values = sorted(c.y[0] + (c.y[1] - c.y[0]) * line.x[point] / 100 for c in curves)
        assert line.y[point] == pytest.approx(sum(values[2:6]) / 4)
        assert line.low[point] < line.y[point] < line.high[point]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """The percentile bootstrap of few seeds is known to be a little narrow."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(20):
        line = plot.middle([Curve(np.arange(2.0), np.full(2, value)) for value in rng.normal(3.0, 1.0, 20)])
        covered += line.low[0] <= 3.0 <= line.high[0]
    assert 15 <= covered <= 20


def test_where_a_seed_has_ended_the_others_count() -> None:
    line = plot.middle([Curve(np.array([0.0, 50.0]), np.zeros(2)), Curve(np.array([0.0, 100.0]), np.ones(2))])
    assert line.y[0] == 0.5 and line.y[-1] == line.low[-1] == line.high[-1] == 1


def test_runs_that_differ_in_their_seed_alone_are_put_together(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"s{seed}", [1.0, 2.0], seed) for seed in range(3)]
    runs.append(make_run(tmp_path, "other", [1.0, 2.0], 0, learning_rate=3e-4))
    groups = plot.group({str(run): json.loads((run / "config.json").read_text()) for run in runs})
    assert groups == {
        "ppo gymnax:CartPole-v1 on_device learning_rate=0.001": [str(run) for run in runs[:3]],
        "ppo gymnax:CartPole-v1 on_device learning_rate=0.0003": [str(runs[3])],
    }
    for ending, begin in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        out = tmp_path / f"curves.{ending}"
        assert cli.main(["plot", *map(str, runs), "-o", str(out), "--x", "time"]) == 0
        assert out.read_bytes().startswith(begin)


def test_the_backend_of_a_notebook_stays_its_own(tmp_path: Path) -> None:
    import matplotlib

    before = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        plot.plot([make_run(tmp_path, "a", [1.0, 2.0])], tmp_path / "curve.png")
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use(before)


@pytest.mark.parametrize(
    "args, message",
    [
        ("", "which runs?"),
        ("{runs}/nowhere", "nowhere is no run directory"),
        ("{runs}/good --metric episode/retur", "did you mean 'episode/return'?"),
        ("{runs}/good --x hours", "hours"),
        ("{runs}/good -o {runs}/nowhere/x.png", "nowhere/x.png cannot be written"),
        ("{runs}/good -o {runs}/x.docx", "x.docx cannot be written"),
        ("{runs}/good --outt x", "did you mean '--out'?"),
        ("{runs}/silent", "episode/return never had a value"),
        ("{runs}/empty", "has no reports yet"),
        ("{runs}/damaged", "damaged: line 1 is no JSON"),
    ],
)
def test_bad_input(args: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "good", [1.0])
    make_run(tmp_path, "silent", [None])
    make_run(tmp_path, "empty", [])
    (make_run(tmp_path, "damaged", [1.0, 2.0]) / "metrics.jsonl").write_text("{\n{}\n")
    assert cli.main(["plot", *args.format(runs=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_axis_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hours is none of steps, time"):
        plot.plot([make_run(tmp_path, "a", [1.0])], tmp_path / "x.png", x="hours")
