"""Learning curves over seeds."""

from __future__ import annotations

import csv
import dataclasses
import errno
import itertools
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats

from jaxrl_dist import cli
from jaxrl_dist.commands import plot
from jaxrl_dist.commands.plot import Curve, drawing, reading, statistics
from jaxrl_dist.config.train import RESUMABLE, Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run.storage import write_json
from jaxrl_dist.training.rows import Row
from jaxrl_dist.training.tables import settings

pytestmark = pytest.mark.quick


def make_run(
    folder: Path,
    name: str,
    returns: list[float | None],
    seed: int = 0,
    algorithm: str = "ppo",
    run: Mapping[str, Any] = {},
    **hyperparameters: Any,
) -> Path:
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    config = {
        "format": 1,
        "algorithm": algorithm,
        "hyperparameters": {"learning_rate": 1e-3, **hyperparameters},
        "run": {"env": "gymnax:CartPole-v1", "plan": "on_device", "seed": seed, **run},
    }
    (run_dir / "config.json").write_text(json.dumps(config))
    lines = [
        {"env_steps": 100 * i, "wall_time_s": 0.5 * i, "episode/return": value}
        for i, value in enumerate(returns, 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_curve_skips_missing_values_and_a_cut_line(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", [None, 2.0, None, 4.0])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 500, "episo')
    curve = plot.read_curve(run_dir, "episode/return")
    assert curve.x.tolist() == [200, 400] and curve.y.tolist() == [2, 4]
    assert plot.read_curve(run_dir, "episode/return", "time").x.tolist() == [1.0, 2.0]


def test_iqm_is_the_mean_of_the_middle_half() -> None:
    rng = np.random.default_rng(0)
    curves = [Curve(np.array([0.0, 100.0]), rng.normal(size=2)) for _ in range(8)]
    line = plot.middle(curves)
    for point in (0, 50, reading.POINTS - 1):
        values = sorted(c.y[0] + (c.y[1] - c.y[0]) * line.x[point] / 100 for c in curves)
        assert line.y[point] == pytest.approx(sum(values[2:6]) / 4)
        assert line.low[point] < line.y[point] < line.high[point]


def test_a_short_last_report_is_joined_to_the_one_before(tmp_path: Path) -> None:
    """A mean of 10 over 9 episodes and one episode of 110 make 20;
    a last report of half an interval stays.
    """
    rows = [(100, 5.0, 9), (200, 10.0, 9), (210, 110.0, 1)]
    for end, expected in (
        (210, [(100, 5.0), (210, 20.0)]),
        (250, [(100, 5.0), (200, 10.0), (250, 110.0)]),
    ):
        run_dir = tmp_path / str(end)
        run_dir.mkdir()
        lines = [
            {
                "env_steps": end if steps == 210 else steps,
                "wall_time_s": 1.0,
                "episode/return": value,
                "episode/count": n,
                "exact/regret": value,
            }
            for steps, value, n in rows
        ]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        curve = reading.read_curve(run_dir, "episode/return")
        assert [*zip(curve.x, curve.y, strict=True)] == expected
        # of the policy at its time
        assert [*reading.read_curve(run_dir, "exact/regret").y] == [5, 10, 110]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """The percentile bootstrap of few seeds is known to be a little narrow."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(10):
        line = plot.middle(
            [Curve(np.arange(2.0), np.full(2, value)) for value in rng.normal(3.0, 1.0, 20)]
        )
        covered += line.low[0] <= 3.0 <= line.high[0]
    assert 8 <= covered <= 10


def test_where_a_seed_has_ended_the_others_count(tmp_path: Path, figures: list[Figure]) -> None:
    """In another line, with a gap between the two, as where others have not begun."""
    line = plot.middle(
        [Curve(np.arange(0.0, 51.0), np.zeros(51)), Curve(np.arange(20.0, 101.0), np.ones(81))]
    )
    for only, value, count in (
        (line.x < 20, 0, 1),
        ((line.x > 21) & (line.x < 50), 0.5, 2),
        (line.x > 51, 1, 1),
    ):
        assert set(line.y[only]) == {value} and set(line.curves[only]) == {count}
    assert np.isnan(line.y).sum() == np.isnan(line.low).sum() == np.isnan(line.high).sum() == 2
    plot.plot([make_run(tmp_path, str(n), [1.0] * n, n) for n in (5, 10, 11)], tmp_path / "x.svg")
    *_, whole, rest = (
        [*x.get_xdata()[~np.isnan(x.get_ydata())]] for x in figures[0].axes[0].get_lines()
    )
    assert (min(whole), max(rest)) == (100, 1100) and 490 < max(whole) < 500 < min(rest) < 520
    caption = (tmp_path / "x.caption.txt").read_text()
    assert (
        "3 runs (seeds 5 10 11), 500 to 1,100 environment steps." in caption
        and "dotted where only some" in caption
    )


def test_seeds_within_one_report_interval_count_whole() -> None:
    """A mean of fewer of them would look as if it rose or fell."""
    ends, levels = (
        [39_712.0, 39_900.0, 40_249.0, 31_000.0, 40_000.0],
        np.array([0.0, 100.0, 0.0, 50.0, 20.0]),
    )
    xs = [np.array([9_000.0 + 500 * n, 20_000.0, 30_000.0, end]) for n, end in enumerate(ends)]
    line = plot.middle([Curve(x, np.full(4, level)) for x, level in zip(xs, levels, strict=True)])
    assert set(line.y) == {np.sort(levels)[1:4].mean()} and set(line.curves) == {5}
    assert (line.x[0], line.x[-1]) == (9_000, 40_249)


def grouped(runs: Sequence[Path]) -> dict[str, list[str]]:
    """The names of the runs in each group, by its label,
    after its environment if there are several.
    """
    groups = reading.group(
        {run.name: json.loads((run / "config.json").read_text()) for run in runs}
    )
    several = len({group.env for group in groups}) > 1
    return {
        f"{group.env} {group.label}" if several else group.label: sorted(group.runs)
        for group in groups
    }


def test_runs_that_differ_in_their_seed_alone_are_put_together(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"s{seed}", [1.0, 2.0], seed) for seed in range(3)]
    assert grouped(runs) == {"ppo": ["s0", "s1", "s2"]}
    runs.append(make_run(tmp_path, "other", [1.0, 2.0], 0, learning_rate=3e-4))
    assert grouped(runs) == {
        "learning_rate=0.001": ["s0", "s1", "s2"],
        "learning_rate=0.0003": ["other"],
    }
    for ending, begin in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        out = tmp_path / f"curves.{ending}"
        assert cli.main(["plot", *map(str, runs), "-o", str(out), "--x", "time"]) == 0
        assert out.read_bytes().startswith(begin)


def test_what_cannot_change_a_curve_splits_no_group(tmp_path: Path) -> None:
    """Of every field that may change at a resume, and of those that name the run."""
    fields = {field.name for field in dataclasses.fields(Train)}
    assert {
        "total_env_steps",
        "report_interval",
        "wandb",
        "checkpoint_interval",
        "env_timeout",
    } <= set(RESUMABLE)
    assert fields >= reading.SAME_CURVE
    other = {name: "another" for name in (*RESUMABLE, "run_dir") if name != "data"}
    runs = [
        make_run(tmp_path, "a", [1.0], run=dict.fromkeys(other)),
        make_run(tmp_path, "b", [1.0], 1, run=other),
    ]
    assert grouped(runs) == {"ppo": ["a", "b"]}


def test_what_is_learnt_from_and_how_it_is_judged_split_groups(tmp_path: Path) -> None:
    files = [make_run(tmp_path, name, [1.0], run={"data": name}) for name in ("good", "bad")]
    assert grouped(files) == {"data=good": ["good"], "data=bad": ["bad"]}
    policies = "greedy", "sampled"
    runs = [make_run(tmp_path, name, [1.0], run={"evaluation_policy": name}) for name in policies]
    assert grouped(runs) == {"ppo": [*policies]}  # by what they return in training
    for run in runs:
        write_json(
            run / "summary.json",
            {"env_steps": 9, "evaluation": {"episodes": 1, "return_mean": 1.0}},
        )
    text = plot.plot(runs, kind="table", score="evaluation")
    assert "evaluation_policy=greedy" in text and "evaluation_policy=sampled" in text


def test_a_spike_changes_no_other_point() -> None:
    curve = reading.Curve(np.arange(5.0), np.array([29.5, 3e17, 26.7, 11.5, 20.8]))
    np.testing.assert_array_equal(curve.smoothed(1).y, curve.y)
    np.testing.assert_allclose(curve.smoothed(2).y[3:], [(26.7 + 11.5) / 2, (11.5 + 20.8) / 2])


def test_options_that_do_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(make_run(tmp_path, "a", [1.0]))
    for flags in (
        "--kind table --smooth 5",
        "--kind table --width one",
        "--kind profile --smooth 5",
    ):
        assert cli.main(["plot", run, *flags.split()]) == 2
        assert "does nothing without --kind" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [None, "1", [1]])
def test_a_config_without_a_seed_is_damaged(
    seed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "a", [1.0], run={"seed": seed})
    assert cli.main(["plot", str(run), "-o", str(tmp_path / "x.png")]) == 2
    assert (
        "is damaged: seed is missing" in capsys.readouterr().err
        and not (tmp_path / "x.png").exists()
    )


def test_intervals_of_improvements_are_those_of_all_resamples() -> None:
    """Of three and four runs there are 27 x 256; more are drawn, some at a time,
    by the same numbers.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=3), rng.normal(size=4)
    drawn = itertools.product(itertools.product(x, repeat=3), itertools.product(y, repeat=4))
    every = [np.mean(np.greater.outer(np.array(a), np.array(b))) for a, b in drawn]
    expected = np.quantile(every, (0.025, 0.975), method="inverted_cdf")
    np.testing.assert_allclose(
        statistics.interval([x, y], statistics.improvement, statistics.NUMBER), expected
    )
    big = rng.normal(size=(2, 40))
    once = statistics.interval([*big], statistics.improvement, 3_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "CHUNK", 10**9)
        np.testing.assert_array_equal(
            once, statistics.interval([*big], statistics.improvement, 3_000)
        )


def test_a_label_names_what_tells_runs_apart_and_no_more(tmp_path: Path) -> None:
    ppo = [make_run(tmp_path, f"ppo{seed}", [1.0], seed, clip_epsilon=0.2) for seed in range(2)]
    dqn = make_run(
        tmp_path,
        "dqn",
        [1.0],
        algorithm="dqn",
        learning_rate=5e-4,
        n_step=3,
        run={"plan": "synchronous"},
    )
    assert grouped([*ppo, dqn]) == {"ppo": ["ppo0", "ppo1"], "dqn": ["dqn"]}
    wide = make_run(tmp_path, "wide", [1.0], clip_epsilon=0.2, hidden_sizes=[64, 64])
    assert grouped([*ppo, wide]) == {"ppo": ["ppo0", "ppo1", "wide"]}, (
        "saved before there was such a field"
    )
    old = make_run(tmp_path, "old", [1.0], clip_epsilon=0.1)
    assert grouped([*ppo, old, dqn]) == {
        "ppo clip_epsilon=0.2": ["ppo0", "ppo1"],
        "ppo clip_epsilon=0.1": ["old"],
        "dqn": ["dqn"],
    }
    acrobot = make_run(tmp_path, "acrobot", [1.0], run={"env": "gymnax:Acrobot-v1"})
    assert grouped([ppo[0], acrobot, dqn]) == {
        "gymnax:CartPole-v1 ppo": ["ppo0"],
        "gymnax:Acrobot-v1 ppo": ["acrobot"],
        "gymnax:CartPole-v1 dqn": ["dqn"],
    }
    options = [
        make_run(tmp_path, f"o{g}", [1.0], run={"env_options": {"gravity": g} if g else {}})
        for g in (0, 9)
    ]
    assert set(grouped(options)) == {"env_options=none", "env_options=gravity=9"}


def test_legend_fits_the_figure(tmp_path: Path, figures: list[Figure]) -> None:
    runs = [
        make_run(
            tmp_path,
            str(i),
            [1.0, 2.0],
            learning_rate=i,
            hidden_sizes=[256] * 9 * i,
            torso="_$x_{$" + "wide " * i,
        )
        for i in range(7)
    ]
    plot.plot(runs[:1], tmp_path / "one.png")
    plot.plot(
        [
            *runs,
            make_run(tmp_path, "same", [2.0, 2.0], 1, learning_rate=0, sizes=[], torso="_$x_{$"),
        ],
        tmp_path / "many.png",
    )
    heights = []
    for fig, count in zip(figures, (1, 7), strict=True):
        (legend,), (ax,) = fig.legends, fig.axes
        assert len(legend.get_texts()) == count
        box, bounds = legend.get_window_extent(), ax.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= fig.bbox.x1 and box.y1 < bounds.y0
        heights.append(bounds.height / fig.dpi)
    assert heights[0] > 3 and heights[1] > 0.9 * heights[0]


def test_runs_without_a_value_are_left_out_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "good", [1.0, 2.0])
    make_run(tmp_path, "silent", [None])
    (make_run(tmp_path, "begun", []) / "config.json").unlink()
    (make_run(tmp_path, "other", [1.0]) / "metrics.jsonl").write_text(
        '{"env_steps": 1, "loss/total": 2}\n'
    )
    out = tmp_path / "x.png"
    assert cli.main(["plot", *map(str, sorted(tmp_path.iterdir())), "-o", str(out)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert out.read_bytes().startswith(b"\x89PNG") and len(lines) == 3
    for line, text in zip(
        lines,
        ("has no reports yet", "has no metric 'episode/return'", "never had a value"),
        strict=True,
    ):
        assert (
            line.startswith("jaxrl-dist: warning: ")
            and text in line
            and line.endswith("; this run is left out")
        )


@pytest.mark.parametrize("runs", [2, 3])
def test_the_interval_of_few_runs_is_lowest_to_highest(runs: int) -> None:
    sample = np.array([3.0, -1.0, 7.0])[:runs]
    low, high = statistics.interval([sample], statistics.iqm, statistics.NUMBER)
    assert (low, high) == (sample.min(), sample.max())


@pytest.mark.parametrize("flags", ["--kind table", "-o x.png", "--kind table --score evaluation"])
def test_plot_warns_of_runs_of_one_seed(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of one seed are named, and those of another seed or other settings are not."""
    monkeypatch.chdir(tmp_path)
    runs = {"a": {}, "again": {}, "b": {"seed": 1}, "c": {"learning_rate": 1.0}}
    for name, changed in runs.items():
        make_run(tmp_path, name, [1.0, 2.0], **changed)
        write_json(
            tmp_path / name / "summary.json", {"env_steps": 200, "evaluation": {"return_mean": 1.0}}
        )
    assert cli.main(["plot", *runs, *flags.split()]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert "a, again (seed 0);" in line and line.count("(seed") == 1
    assert cli.main(["plot", "a", "b", "c", *flags.split()]) == 0
    assert capsys.readouterr().err == ""


def test_final_scores_of_different_ages_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, (name, reports) in enumerate((("short", 5), ("long", 10), ("nearly", 9))):
        make_run(tmp_path, name, [1.0] * reports, seed)
    folders = {name: str(tmp_path / name) for name in ("short", "long", "nearly")}
    assert cli.main(["plot", *folders.values(), "--kind", "table"]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert (
        "runs end between 500 and 1,000 env steps, so their final scores are of different ages"
        in line
    )
    assert cli.main(["plot", folders["long"], folders["nearly"], "--kind", "table"]) == 0
    # a curve shows where it ends
    assert cli.main(["plot", *folders.values(), "-o", str(tmp_path / "x.png")]) == 0
    assert capsys.readouterr().err == ""
    other = str(make_run(tmp_path, "other", [1.0] * 3, learning_rate=1.0))  # of another group
    assert cli.main(["plot", folders["long"], other, "--kind", "table"]) == 0
    assert "CartPole-v1: runs end between 300 and 1,000 env steps, so" in capsys.readouterr().err


def test_a_run_ends_with_its_last_report_even_without_an_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its summary says, so that the warning of both scores names the same steps."""
    for name, returns in (("a", [1.0] * 5), ("b", [1.0] * 9 + [None])):
        summary = {
            "env_steps": 100 * len(returns),
            "wall_time_s": 1.0,
            "evaluation": {"return_mean": 1.0},
        }
        (make_run(tmp_path, name, returns) / "summary.json").write_text(json.dumps(summary))
    for score in ("training", "evaluation"):
        assert (
            cli.main(
                ["plot", *map(str, sorted(tmp_path.iterdir())), "--kind", "table", "--score", score]
            )
            == 0
        )
        assert "runs end between 500 and 1,000 env steps" in capsys.readouterr().err


def test_the_axis_of_evaluations_names_the_policy(tmp_path: Path, figures: list[Figure]) -> None:
    for name in ("greedy", "sampled"):
        run_dir = make_run(tmp_path, name, [], run={"evaluation_policy": name})
        (run_dir / "metrics.jsonl").write_text('{"env_steps": 1, "evaluation/return_mean": 2}\n')
        plot.plot([run_dir], tmp_path / "x.png", metric="evaluation/return_mean")
        assert figures[-1].axes[0].get_ylabel() == f"{name} return"
    plot.plot([make_run(tmp_path, "trained", [1.0])], tmp_path / "x.png")
    assert figures[-1].axes[0].get_ylabel() == "episode return"


def test_the_legend_names_the_policy_or_the_algorithms(tmp_path: Path) -> None:
    parts = {
        name: {"algorithm": kind, "hyperparameters": {}}
        for name, kind in {"new": "ppo", "old": "Copy"}.items()
    }
    run = make_run(tmp_path, "run", [1.0], algorithm="Policies", **parts)
    line = {
        "env_steps": 100,
        "wall_time_s": 1.0,
        "episode/return": 1.0,
        "new/elo": 1500.0,
        "loss/policy": 0.5,
    }
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for metric, label in {
        "new/elo": "new (ppo)",
        "*/elo": "new (ppo)",
        "episode/return": "ppo+copy",
    }.items():
        with warnings.catch_warnings(action="ignore"):  # old has no Elo rating
            table = plot.plot([run], kind="table", metric=metric)
        assert f" {label} " in table and "Policies" not in table


def test_labels_name_the_groups_in_the_order_of_their_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, env, state in (
        ("a", "x:One", "true"),
        ("b", "x:Two", "true"),
        ("c", "x:One", "false"),
    ):
        options = {"env": env, "env_options": {"state": state}}
        make_run(tmp_path, name, [1.0], run=options, algorithm="dqn" if name == "b" else "ppo")
    command = ["plot", *(str(tmp_path / name) for name in "bac"), "--kind", "table"]
    assert cli.main([*command, "--labels", "DQN", "MAPPO", "IPPO"]) == 0
    rows = [row.split("|")[1:3] for row in capsys.readouterr().out.splitlines()[2:5]]
    assert [[x.strip() for x in row] for row in rows] == [
        ["Two", "DQN"],
        ["One", "MAPPO"],
        ["One", "IPPO"],
    ]
    assert cli.main([*command, "--labels", "DQN"]) == 2
    text = "--labels names 1, but the runs form 3: dqn; ppo env_options=state=true; ppo env_options=state=false"
    assert text in capsys.readouterr().err
    assert cli.main([*command, "--labels", "DQN", "PPO", "PPO"]) == 2
    assert "two groups of an environment the same name" in capsys.readouterr().err


def with_file(run_dir: Path, name: str, code: str) -> Path:
    """The run, as one of an algorithm in a file of the user's."""
    config = json.loads((run_dir / "config.json").read_text())
    config["algorithm_file"] = {"name": name, "sha256": f"sum {code}", "code": code * 64}
    (run_dir / "config.json").write_text(json.dumps(config))
    return run_dir


def labels_of(run_dirs: Sequence[Path]) -> list[str]:
    rows = plot.plot(run_dirs, kind="table").splitlines()[2 : 2 + len(run_dirs)]
    return sorted(row.split("|")[2].strip() for row in rows if row.startswith("|"))


def test_files_and_their_versions_tell_algorithms_apart(tmp_path: Path) -> None:
    """Both are ``class PPO``; a run of our own PPO has no file."""
    spo, other, third = (
        with_file(make_run(tmp_path, f"{seed}", [1.0], seed, "PPO"), name, code)
        for seed, (name, code) in enumerate([("spo.py", "a"), ("my_ppo.py", "a"), ("spo.py", "b")])
    )
    ours = make_run(tmp_path, "ours", [1.0], 4)
    same_name = with_file(make_run(tmp_path, "5", [1.0], 5, "PPO"), "ppo.py", "a")
    again = with_file(make_run(tmp_path, "6", [1.0], 6, "PPO"), "spo.py", "a")
    assert labels_of([spo, again]) == ["spo"]
    assert labels_of([spo, other]) == ["my_ppo", "spo"]
    assert labels_of([spo, third]) == ["spo.py=aaaaaaa", "spo.py=bbbbbbb"]
    assert labels_of([spo, third, ours]) == ["ppo", "spo spo.py=aaaaaaa", "spo spo.py=bbbbbbb"]
    assert labels_of([ours, same_name]) == ["ppo", "ppo.py"]


def test_several_policies_are_told_apart_by_their_files(tmp_path: Path) -> None:
    for name, file, code in (("a", "spo.py", "a"), ("b", "spo.py", "b"), ("c", "new.py", "a")):
        run_dir = make_run(tmp_path, name, [1.0], algorithm="Policies")
        config = json.loads((run_dir / "config.json").read_text())
        own = {"name": file, "sha256": code, "code": code * 64}
        prey = {"algorithm": "PPO", "hyperparameters": {"x": 1}, "algorithm_file": own}
        config["hyperparameters"] = {"prey": prey, "cat": {**prey, "algorithm_file": None}}
        (run_dir / "config.json").write_text(json.dumps(config))
    assert labels_of([tmp_path / "a", tmp_path / "b"]) == [
        "prey.spo.py=aaaaaaa",
        "prey.spo.py=bbbbbbb",
    ]
    assert labels_of([tmp_path / "a", tmp_path / "c"]) == [
        "new+ppo",
        "spo+ppo",
    ]


def test_a_csv_file_is_drawn_beside_runs(tmp_path: Path, figures: list[Figure]) -> None:
    run_dir = make_run(tmp_path, "a", [1.0, 2.0])
    file = tmp_path / "cleanrl.csv"
    file.write_text("global_step,seed,return\n100,1,5\n200,1,7\n150,2,\n200,2,6\n")
    plot.plot([file, run_dir], tmp_path / "x.png", labels=("CleanRL", "ours"))
    (ax,) = figures[0].axes
    lines = [tuple(line.get_xdata()) for line in ax.get_lines()]
    assert (100, 200) in lines and (200,) in lines
    caption = (tmp_path / "x.caption.txt").read_text()
    assert "gymnax:CartPole-v1, CleanRL: cleanrl.csv, 2 runs (seeds 1 2)" in caption
    file.write_text("env_steps,return,env\n200,5,CartPole-v1\n200,3,Pong\n")
    rows = plot.plot([run_dir, file], kind="table").splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows[2:5]]
    assert ["CartPole-v1", "cleanrl.csv", "1"] in cells and ["Pong", "cleanrl.csv", "1"] in cells


@pytest.mark.parametrize(
    "text, options, message",
    [
        ("step,reward\n1,2\n", {}, "no column return.*step, return .*not step, reward"),
        ("", {}, "no column env_steps"),
        ("step,return\n1,\n", {}, "has no value of return"),
        ("step,return\n1,2\n2,x\n", {}, "line 3: step, return and seed must be numbers"),
        ("step,return\n1,nan\n", {}, "line 2: .* must be numbers"),
        ("step,return,seed\n1,2,a\n", {}, "line 2: .* must be numbers"),
        ("step,return\n1,2\n", {"x": "updates"}, "no column updates"),
        ("step,return\n1,2\n", {"metric": "loss/total"}, "no column loss/total"),
        ("step,return\n1,2\n", {"score": "evaluation", "kind": "profile"}, "no evaluations"),
    ],
)
def test_a_csv_file_that_cannot_be_drawn_is_refused(
    text: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    lines = {
        "updates": 1,
        "loss/total": 1.0,
        "env_steps": 1,
        "wall_time_s": 1.0,
        "episode/return": 1,
    }
    run_dir = make_run(tmp_path, "a", [])
    (run_dir / "metrics.jsonl").write_text(json.dumps(lines) + "\n")
    write_json(run_dir / "summary.json", {"env_steps": 1, "evaluation": {"return_mean": 1.0}})
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        plot.plot([run_dir, tmp_path / "other.csv"], tmp_path / "x.png", **options)


def test_a_csv_file_without_env_needs_runs_of_one_environment(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("step,return\n1,2\n")
    with pytest.raises(ConfigError, match=r"column env .*are of none"):
        plot.plot([tmp_path / "other.csv"], tmp_path / "x.png")
    runs = [make_run(tmp_path, env, [1.0], run={"env": env}) for env in ("x:One", "x:Two")]
    with pytest.raises(ConfigError, match=r"column env .*are of x:One, x:Two"):
        plot.plot([*runs, tmp_path / "other.csv"], tmp_path / "x.png")


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
        ("{runs}/nowhere", "nowhere is not a run directory"),
        ("{runs}", "is not a run directory: it has no config.json; the runs in it are {runs}/*"),
        (
            "{runs} --kind table --score evaluation",
            "is not a run directory: it has no config.json; the runs in it",
        ),
        ("{runs}/good --metric episode/retur", "did you mean 'episode/return'?"),
        ("{runs}/good --x hours", "hours"),
        ("{runs}/good -o {runs}/nowhere/x.png", "nowhere/x.png cannot be written"),
        ("{runs}/good -o {runs}/x.docx", "x.docx cannot be written"),
        ("{runs}/good --outt x", "did you mean '--out'?"),
        ("{runs}/silent", "episode/return never had a value"),
        ("{runs}/empty", "has no reports yet"),
        ("{runs}/damaged", "damaged: line 1 is not JSON"),
        (
            "{runs}/good --kind curves",
            "--kind must be one of curve, profile, improvement, table, not 'curves' (did you",
        ),
        (
            "{runs}/good --kind improvement",
            "compares groups of runs on the same environment, but there is only one; name",
        ),
        (
            "{runs}/good --score evaluation",
            "--score does nothing without --kind table, profile or improvement",
        ),
        ("{runs}/good --kind table --score evaluation", "good has no evaluation at its end"),
        ("{runs}/good --width 3", "--width must be one of one, two, not '3'"),
        (
            "{runs}/good --kind table -o {runs}/x.txt",
            "x.txt cannot be written: its extension names no format of tables; ",
        ),
        ("{runs}/good --smooth 0", "--smooth must be >= 1, not 0"),
    ],
)
def test_bad_input(
    args: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "good", [1.0])
    make_run(tmp_path, "silent", [None])
    make_run(tmp_path, "empty", [])
    (make_run(tmp_path, "damaged", [1.0, 2.0]) / "metrics.jsonl").write_text("{\n{}\n")
    assert cli.main(["plot", *args.format(runs=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert message.format(runs=tmp_path) in error and error.count("\n") == 1


def test_a_full_disk_leaves_the_picture_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Figure, out: Path, **more: object) -> None:
        out.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", full)
    run_dir, out = make_run(tmp_path, "good", [1.0]), tmp_path / "x.png"
    out.write_bytes(b"before")
    assert cli.main(["plot", str(run_dir), "-o", str(out)]) == 1
    assert capsys.readouterr().err == f"jaxrl-dist: error: {out}: No space left on device\n"
    assert out.read_bytes() == b"before" and {path.name for path in tmp_path.iterdir()} == {
        "good",
        "x.png",
    }


def test_an_axis_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x must be one of steps, updates, time, not 'hours'"):
        plot.plot([make_run(tmp_path, "a", [1.0])], tmp_path / "x.png", x="hours")


# --- Statistics -----------------------------------------------------------------------------------


def test_smoothing_is_the_mean_of_the_newest_reports() -> None:
    curve = Curve(np.arange(5.0), np.array([1.0, 2.0, 6.0, 0.0, 3.0]))
    assert (
        curve.smoothed(3).y.tolist() == [1, 1.5, 3, 8 / 3, 3]
        and curve.smoothed(1).y.tolist() == curve.y.tolist()
    )
    assert curve.smoothed(99).y[-1] == curve.y.mean()


def test_the_final_score_is_the_mean_over_the_last_tenth() -> None:
    assert Curve(np.arange(101.0), np.arange(101.0)).final() == 95.5
    assert Curve(np.array([7.0]), np.array([3.0])).final() == 3
    assert (
        Curve(np.arange(101.0), np.arange(101.0), np.r_[np.ones(100), 10.0]).final()
        == np.r_[91:101, [100] * 9].mean()
    )


def test_the_last_tenth_is_one_of_the_run_not_of_the_values(tmp_path: Path) -> None:
    """Of 20 reports of 100 steps, those after 1,800 count; where none of them has a value,
    the last one that has.
    """
    values: list[float | None] = [*map(float, range(1, 20)), None]
    assert plot.read_curve(make_run(tmp_path, "a", values), "episode/return").final() == 19
    late = plot.read_curve(make_run(tmp_path, "b", [*values[:15], *[None] * 5]), "episode/return")
    assert late.final() == 15 and late.end == 2000


def test_a_short_last_interval_weighs_its_env_steps(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "run", [])
    metrics = ("loss/total", "evaluation/return_mean")
    rows = [(100, 5.0), (200, 10.0), (240, 45.0)]
    lines = [
        {"env_steps": n, "wall_time_s": n**2, **dict.fromkeys(metrics, value)} for n, value in rows
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for axis in ("steps", "time"):
        curve = plot.read_curve(run_dir, "loss/total", axis)
        assert curve.y.tolist() == (
            [5, (100 * 10 + 40 * 45) / 140] if axis == "steps" else [5, 10, 45]
        )
    assert plot.read_curve(run_dir, metrics[1]).y.tolist() == [5, 10, 45]  # of one moment


def test_a_last_report_of_one_episode_counts_as_one_episode(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "run", [])
    lines = [
        {"env_steps": 9_804, "wall_time_s": 1.0, "episode/return": 47.0, "episode/count": 180},
        {"env_steps": 9_990, "wall_time_s": 1.1, "episode/return": 53.0, "episode/count": 2},
        {"env_steps": 10_027, "wall_time_s": 1.2, "episode/return": 400.0, "episode/count": 1},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = plot.read_curve(run_dir, "episode/return")
    assert curve.weight.tolist() == [180, 3]
    of_a_policy = [
        {name.replace("episode", "a/episode"): value for name, value in line.items()}
        for line in lines
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in of_a_policy))
    assert plot.read_curve(run_dir, "a/episode/return").weight.tolist() == [180, 3]
    assert curve._replace(x=np.full(2, 10_027.0)).final() == pytest.approx(
        (180 * 47 + 2 * 53 + 400) / 183
    )


def test_statistics_are_those_of_the_paper() -> None:
    x, y = np.array([1.0, 4.0, 2.0]), np.array([2.0, 3.0])
    # by pairs; a tie is one half
    assert statistics.improvement([x, y]) == (0 + 0 + 1 + 1 + 0.5 + 0) / 6
    # x, y of two environments
    assert statistics.improvement([x, y, y, y]) == pytest.approx((2.5 / 6 + 0.5) / 2)
    taus = np.array([0.0, 2.0, 9.0])
    assert statistics.profile(taus)([x]).tolist() == [1, 1 / 3, 0]
    assert statistics.profile(taus)([x, y]).tolist() == [1, (1 / 3 + 1 / 2) / 2, 0]
    # of all runs together
    assert statistics.iqm([np.arange(6.0), np.array([100.0, -100.0])]) == 2.5
    low, high = statistics.interval([np.arange(50.0)], statistics.mean)
    # the standard error is 2.04
    assert 24.5 - 3 * 2 < low < 24.5 - 2 < 24.5 + 2 < high < 24.5 + 3 * 2
    both = statistics.interval([np.stack([x, 10 * x])], statistics.mean)
    # the same resamples for all points of a curve
    np.testing.assert_allclose(both[0][1], 10 * both[0][0], rtol=1e-14)


def test_printed_intervals_are_those_of_all_resamples() -> None:
    scores = np.array([35.15, 56.05, 99.6, 103.5, 115.7])
    every = [np.sort(drawn)[1:4].mean() for drawn in itertools.product(scores, repeat=5)]
    found = statistics.interval([scores], statistics.iqm, statistics.NUMBER)
    np.testing.assert_allclose(found, np.sort(every)[[78, 3046]], rtol=1e-12)
    x, options = (
        np.random.default_rng(3).normal(size=16),
        {"n_resamples": 50_000, "method": "percentile"},
    )
    peer = stats.bootstrap(
        (x,), lambda x, axis: stats.trim_mean(x, 0.25, axis=axis), **options, rng=1
    )
    found = statistics.interval([x], statistics.iqm, statistics.NUMBER)
    np.testing.assert_allclose(found, peer.confidence_interval, atol=0.02)


def compared(folder: Path, envs: Sequence[str], seeds: int = 5) -> list[Path]:
    """Runs of two algorithms that learn along noisy curves."""
    rng, x = np.random.default_rng(0), np.linspace(-6, 6, 60)
    runs = []
    for env, (name, top) in itertools.product(envs, (("ppo", 500.0), ("dqn", 400.0))):
        for seed in range(seeds):
            curve = top * (0.8 + 0.2 * rng.random()) / (1 + np.exp(-x)) + rng.normal(0, 20, len(x))
            options: dict[str, Any] = {"algorithm": name, "run": {"env": f"gymnax:{env}"}}
            runs.append(make_run(folder, f"{env}-{name}-{seed}", curve.tolist(), seed, **options))
    return runs


def test_a_table_of_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, score in (("a", 1.0), ("b", 2.0), ("c", 6.0)):
        make_run(tmp_path, name, [score], seed=ord(name))
    make_run(tmp_path, "d", [5.0], algorithm="dqn")
    make_run(tmp_path, "e", [4.0], algorithm="dqn", run={"env": "gymnax:Acrobot-v1"})
    command = ["plot", *(str(tmp_path / name) for name in "abcd"), "--kind", "table"]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    score = "final episode/return"
    assert [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[0], *lines[2:4])
    ] == [
        ["environment", "group", "runs", f"{score}, mean", "std", f"{score}, IQM", "95% interval"],
        ["CartPole-v1", "dqn", "1", "5", "", "5", ""],
        ["CartPole-v1", "ppo", "3", "3", "2.646", "3", "1 .. 6"],
    ]
    assert len({len(line) for line in lines[:4]}) == 1 and set(lines[1]) == {"|", "-"}
    assert lines[5:] == [
        "Final episode/return: the mean of the reports in the last tenth of each run, weighted by their episodes or "
        "else env steps; a last report of less than half an interval is joined to the one before.",
        "std: standard deviation of the runs (divisor: their number less one).",
        "IQM: interquartile mean; of fewer than 4 runs nothing is trimmed, so it is the mean, and the interval in an "
        "environment reaches from the lowest run to the highest.",
    ]
    assert cli.main(["plot", str(tmp_path / "e"), *command[1:], "-o", str(tmp_path / "x.csv")]) == 0
    rows = list(csv.reader((tmp_path / "x.csv").read_text().splitlines()))
    assert rows[0][3:6] == ["final episode/return, mean", "std", "final episode/return, IQM"]
    assert rows[0][6:] == ["low", "high"] and rows[1][:4] == ["Acrobot-v1", "dqn", "1", "4"]
    assert rows[1][6:] == ["", ""] and rows[3] == [
        "CartPole-v1",
        "ppo",
        "3",
        "3",
        "2.646",
        "3",
        "1",
        "6",
    ]
    # 0.8, and 0: the only one of its environment
    assert rows[4][:4] == ["all environments, scaled", "dqn", "2", "0.4"]
    assert len(rows) == 5  # PPO has no run in the other one
    assert cli.main(["plot", str(tmp_path / "e"), *command[1:]]) == 0
    assert "over all environments, ppo is left out" in capsys.readouterr().out


def test_a_table_for_latex(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, f"{seed}", [-1.0 - seed], seed, run={"env": "gymnax:a_b"})
        for seed in (0, 1)
    ]
    plot.plot(runs, tmp_path / "x.tex", kind="table", labels=[r"50% & #1^2 {\x}"])
    needs, *lines = (tmp_path / "x.tex").read_text().splitlines()
    assert needs == r"% Needs \usepackage{booktabs}."
    assert lines[:3] == [
        r"\begin{tabular}{llrrrrr}",
        r"\toprule",
        r"environment & group & runs & final episode/return, mean & std & final episode/return, IQM & 95\% interval \\",
    ]
    row = r"a\_b & 50\% \& \#1\^{}2 \{\textbackslash{}x\} & 2 & $-$1.5 & 0.7071 & $-$1.5 & $-$2 .. $-$1 \\"
    assert lines[3:7] == [r"\midrule", row, r"\bottomrule", r"\end{tabular}"]
    assert lines[7].startswith("% Final episode/return: the mean of") and all(
        x.startswith("% ") for x in lines[7:]
    )


def test_a_table_of_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ranks as the end of `train` does, by the summaries of the runs."""
    scores = {
        (1e-3, 0): (9.0, 20.0),
        (1e-3, 1): (8.0, 30.0),
        (1e-2, 0): (7.0, 40.0),
        (1e-2, 1): (6.0, 50.0),
    }
    members = []
    for number, ((rate, seed), (trained, evaluated)) in enumerate(scores.items()):
        members.append(make_run(tmp_path, f"{number}", [trained], seed, learning_rate=rate))
        evaluation = {
            "episodes": 2,
            "return_mean": evaluated,
            "a/return_mean": -evaluated,
            "cut": 0,
        }
        summary = {"env_steps": 100, "wall_time_s": 1.0, "evaluation": evaluation}
        (members[-1] / "summary.json").write_text(json.dumps(summary))
    rows = [
        Row("", n, {"learning_rate": rate}, "done", 1, 1, *scores[rate, n]) for rate, n in scores
    ]
    assert [x["iqm"] for x in settings(rows)] == [45, 25]
    command = ["plot", *map(str, members), "--kind", "table", "--score", "evaluation"]
    assert cli.main(command) == 0
    head, _, *best, _, meaning, _, _ = capsys.readouterr().out.splitlines()
    assert [x.strip() for x in head.split("|")[4:7]] == [
        "greedy return, mean",
        "std",
        "greedy return, IQM",
    ]
    cells = [[cell.strip() for cell in row.split("|")[2:7]] for row in best]
    assert cells == [
        ["learning_rate=0.01", "2", "45", "7.071", "45"],
        ["learning_rate=0.001", "2", "25", "7.071", "25"],
    ]
    assert (
        meaning == "Greedy return: the mean over the episodes of the evaluation that ends each run."
    )
    assert cli.main([*command, "--metric", "a/episode/return"]) == 0
    assert "-25" in capsys.readouterr().out.splitlines()[2]
    assert cli.main([*command, "--metric", "episode/length"]) == 2
    assert (
        "the evaluation has no length_mean; it has: a/return_mean, cut" in capsys.readouterr().err
    )
    (members[0] / "summary.json").write_text(
        '{"env_steps": 5, "wall_time_s": 1, "evaluation": null}'
    )
    assert cli.main(command) == 0
    assert "0 has no evaluation at its end; this run is left out" in capsys.readouterr().err


# --- Pictures -------------------------------------------------------------------------------------

SWEEP = "a population"
PICTURES: dict[str, tuple[Sequence[str] | str, dict[str, Any]]] = {
    "algorithms": (["CartPole-v1"], {}),
    "column": (["CartPole-v1"], {"width": "one", "smooth": 5}),
    "environments": (["Acrobot-v1", "CartPole-v1", "Breakout-MinAtar"], {}),
    "profile": (["Acrobot-v1", "CartPole-v1"], {"kind": "profile"}),
    "improvement": (["Acrobot-v1", "CartPole-v1"], {"kind": "improvement"}),
    "population": (SWEEP, {}),
}
REDUCED = (230, 150)
"""Pictures are compared at this size: letters then differ
little between versions of matplotlib and its fonts."""
TOLERANCE = 6.0
"""Root mean square difference of brightness, of 255."""


def pictured(folder: Path, what: Sequence[str] | str) -> list[Path]:
    """Runs that compare two algorithms on these environments,
    or a population that varies the step size.
    """
    if what != SWEEP:
        return compared(folder, what)
    rng, x = np.random.default_rng(0), np.linspace(-6, 6, 60)
    population = make_run(folder, "population", [9.0])
    for number, (rate, seed) in enumerate(itertools.product((1e-4, 1e-3, 1e-2), range(4))):
        top = {1e-4: 200.0, 1e-3: 480.0, 1e-2: 120.0}[rate]
        curve = top * (0.8 + 0.2 * rng.random()) / (1 + np.exp(-x)) + rng.normal(0, 10, len(x))
        make_run(population / "members", f"{number:03d}", curve.tolist(), seed, learning_rate=rate)
    return [population]


def reduced(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB").resize(REDUCED, Image.Resampling.BOX), float)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_look_as_they_did(name: str, tmp_path: Path) -> None:
    """``JAXRL_DRAW=1`` keeps them as they now are: look at them before you do."""
    what, options = PICTURES[name]
    out = tmp_path / f"{name}.png"
    plot.plot(pictured(tmp_path, what), out, **options)
    kept = Path(__file__).parent / "pictures" / out.name
    if os.environ.get("JAXRL_DRAW"):
        Image.fromarray(reduced(out).astype(np.uint8)).quantize(64).save(kept)
    before, now = reduced(kept), reduced(out)
    assert np.sqrt(np.mean((now - before) ** 2)) < TOLERANCE
    other = PICTURES["column" if name == "algorithms" else "algorithms"]
    plot.plot(pictured(tmp_path / "other", other[0]), tmp_path / "other.png", **other[1])
    assert np.sqrt(np.mean((reduced(tmp_path / "other.png") - before) ** 2)) > TOLERANCE, (
        "the tolerance is too wide"
    )


def test_a_caption_names_the_smoothing_and_an_own_environment(
    tmp_path: Path,
) -> None:
    own = make_run(tmp_path, "own", [1.0], run={"env": "gymnax:rocket:Rocket"})
    plot.plot([own], tmp_path / "x.svg", smooth=5)
    caption = (tmp_path / "x.caption.txt").read_text()
    smoothed = "each point is the mean of the newest 5 reports up to it, of fewer at the start."
    assert caption.startswith(f"episode/return by environment steps; {smoothed}")
    assert "\nrocket:Rocket, ppo: ppo, 1 run" in caption and "gymnax" not in caption


def test_a_sweep_has_a_line_for_each_value(tmp_path: Path, figures: list[Figure]) -> None:
    runs = [
        make_run(tmp_path, f"{rate}-{s}", [s, rate], s, learning_rate=rate)
        for rate in (1, 2, 3)
        for s in (0, 1)
    ]
    plot.plot(runs, tmp_path / "sweep.svg")
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"learning_rate={rate} (2 seeds)" for rate in (1, 2, 3)
    ]
    assert "learning_rate=3 (2 seeds)" in (tmp_path / "sweep.svg").read_text(), (
        "text stays text in a vector picture"
    )
    caption = (tmp_path / "sweep.caption.txt").read_text()
    assert (
        "gymnax:CartPole-v1, learning_rate=2: ppo, 2 runs (seeds 0 1), 200 environment steps."
        in caption
    )
    assert 'learning_rate=2 plan="on_device"' in caption


def test_a_population_is_drawn_by_its_members(tmp_path: Path, figures: list[Figure]) -> None:
    population = make_run(tmp_path, "population", [9.0])
    for number, (rate, seed) in enumerate(itertools.product((1, 2), (0, 1, 2))):
        make_run(population / "members", f"{number:03d}", [seed, rate], seed, learning_rate=rate)
    single = make_run(tmp_path, "single", [5.0, 6.0], 7, learning_rate=2)
    assert reading.with_members([single, population])[:2] == [
        str(single),
        str(population / "members" / "000"),
    ]
    plot.plot([population, single], tmp_path / "x.png")
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "learning_rate=1 (3 seeds)",
        "learning_rate=2 (4 seeds)",
    ]


def test_plot_has_panels_per_env_and_colours_per_algorithm(
    tmp_path: Path, figures: list[Figure]
) -> None:
    plot.plot(compared(tmp_path, ["Acrobot-v1", "CartPole-v1"], seeds=1), tmp_path / "x.png")
    assert [ax.get_title() for ax in figures[0].axes] == ["Acrobot-v1", "CartPole-v1"]
    colors = [[line.get_color() for line in ax.get_lines()] for ax in figures[0].axes]
    assert colors[0] == colors[1] == [drawing.COLORS[0], drawing.COLORS[1]]


# Machado et al. (2009), severity 1: what people without red, green or blue cones see of linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}


@pytest.mark.parametrize("kind", BLINDNESS)
def test_the_colour_blind_can_tell_the_first_four_colours_apart(kind: str) -> None:
    def seen(color: str) -> np.ndarray:
        rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]) ** 2.2
        return np.clip(np.array(BLINDNESS[kind]) @ rgb, 0, 1) ** (1 / 2.2)

    def distance(first: str, second: str) -> float:
        return float(np.linalg.norm(seen(first) - seen(second)))

    assert min(distance(*pair) for pair in itertools.combinations(drawing.COLORS[:4], 2)) > 0.3
    assert min(distance(*pair) for pair in itertools.pairwise(drawing.COLORS)) > 0.15
    assert kind != "deuteranopia" or distance("#d62728", "#2ca02c") < 0.15, (
        "matplotlib's default red and green"
    )


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *args, **more: saved.append(self) or save(self, *args, **more),
    )
    return saved


# --- Damage ---------------------------------------------------------------------------------------

GOOD = b'{"env_steps": 1, "wall_time_s": 1, "episode/return": 1}\n'


@pytest.mark.parametrize(
    "line, message",
    [
        (b"5", "line 2 is 5, which is not a report"),
        (b"null", "line 2 is null, which is not a report"),
        (b"[1]", "line 2 is [1], which is not a report"),
        (b'"text"', 'line 2 is "text", which is not a report'),
        (b"", "line 2 is not JSON"),
        (b"{", "line 2 is not JSON"),
        (b"\xff", "line 2 is not JSON"),
        (b'{"env_steps": 2, "episode/return": "\xff"}', "line 2 is not JSON"),
        (b"\0\0\0\0", "line 2 is not JSON"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b'{"a":' * 100_000, "line 2 is not JSON"),
        (b"9" * 5000, "line 2 is not JSON"),
        (b"{}", "env_steps of line 2 is missing"),
        (b'{"episode/return": 2}', "env_steps of line 2 is missing"),
        (b'{"env_steps": null, "episode/return": 2}', "env_steps of line 2 is null"),
        (b'{"env_steps": "2", "episode/return": 2}', 'env_steps of line 2 is "2"'),
        (b'{"env_steps": NaN, "episode/return": 2}', "env_steps of line 2 is NaN"),
        (b'{"env_steps": 0, "episode/return": 2}', "env_steps of line 2 is 0 after 1"),
        (
            b'{"env_steps": 2, "episode/return": "high"}',
            'episode/return of line 2 is "high", which cannot be drawn',
        ),
        (b'{"env_steps": 2, "episode/return": [2]}', "episode/return of line 2 is [2]"),
        (b'{"env_steps": 2, "episode/return": {"a": 2}}', 'episode/return of line 2 is {"a": 2}'),
        (b'{"env_steps": 2, "episode/return": true}', "episode/return of line 2 is true"),
        (b'{"env_steps": 2, "episode/return": -Infinity}', "episode/return of line 2 is -Infinity"),
        (b'{"env_steps": 2, "episode/return": 1e300}', "episode/return of line 2 is 1e+300"),
        (
            b'{"env_steps": 2, "episode/return": 1' + b"0" * 400 + b"}",
            "episode/return of line 2 is 1000",
        ),
    ],
)
def test_a_damaged_line_is_named(
    line: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path, "run", []) / "metrics.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD.replace(b"1", b"3"))
    assert cli.main(["plot", str(path.parent), "-o", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error and error.count("\n") == 1 and len(error) < 400


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"5", "a run's config is an object, not a int"),
        (b'{"algorithm": "ppo"}', "format None is unknown"),
        (
            b'{"format": 1, "algorithm": 5, "hyperparameters": {}, "run": {"env": "x"}}',
            "algorithm, hyperparameters or",
        ),
        (
            b'{"format": 1, "algorithm": "ppo", "hyperparameters": [], "run": {"env": "x"}}',
            "or run is missing",
        ),
        (
            b'{"format": 1, "algorithm": "ppo", "hyperparameters": {}, "run": null}',
            "or run is missing",
        ),
        (
            b'{"format": 1, "algorithm": "ppo", "hyperparameters": {}, "run": {"env": null}}',
            "env is missing",
        ),
    ],
)
def test_a_damaged_config_is_named(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path, "run", [1.0]) / "config.json"
    path.write_bytes(content)
    assert cli.main(["plot", str(path.parent), "-o", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_what_is_no_plain_file_is_not_waited_for(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path, "run", [1.0]) / name
    path.unlink()
    os.mkfifo(path)
    assert cli.main(["plot", str(path.parent)]) == 2
    assert f"{path} is not a plain file" in capsys.readouterr().err
