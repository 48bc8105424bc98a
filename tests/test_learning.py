"""Learning: the bars of ``scripts/learning.py`` (slow),
and a small one that every change must clear.
"""

from __future__ import annotations

import importlib.util
import re
import runpy

import pytest
import runs
from own import Scored, Target

import jaxrl_dist

LEARNING = runpy.run_path(str(runs.ROOT / "scripts" / "learning.py"))
BARS = [bar for bar in LEARNING["BARS"] if bar.threshold is not None]
OTHERS = ("a2c", "pg", "impala", "appo", "ddpg", "td3", "sac")


@pytest.mark.slow
@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_bar(bar):
    library = bar.env.split(":")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")
    returns = LEARNING["run_bar"](bar)["returns"]
    assert bar.passed(returns), f"{bar.command()}: {returns} against {bar.threshold}"


def test_ppo_learns_cartpole_a_little():
    # One device of the eight: many small all-reduces between devices of one CPU are slow.
    config = jaxrl_dist.Train(
        "ppo", env="gymnax:CartPole-v1", total_env_steps=60_000, num_devices=1
    )
    *_, last = jaxrl_dist.train(config)
    assert last.evaluation is not None
    assert last.evaluation["return_mean"] > 150  # random actions get about 22


BOUNDS = ([0.0, -0.01, -3.0], [100.0, 0.01, 1.0])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ppo", marks=pytest.mark.case),
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_bounds_of_actions_do_not_matter(name):
    """The bounds differ by four orders of magnitude; the optimum is 0,
    and the middle of the bounds gets -0.2.
    """
    steps = {"sac": 4_000, "td3": 4_000, "ddpg": 4_000, "pg": 200_000, "impala": 200_000}.get(
        name, 60_000
    )
    config = jaxrl_dist.preset(
        name, Target(*BOUNDS), total_env_steps=steps, num_devices=1, evaluation_episodes=1
    )
    *_, last = jaxrl_dist.train(config)
    assert last.evaluation is not None
    assert last.evaluation["return_mean"] > -0.05


def test_a_bar_is_passed_by_its_share_of_the_seeds():
    bar = LEARNING["Bar"](
        "some-bar", "ppo", "gymnax:CartPole-v1", 1000, 10.0, 4, 5, {"torso": "mlp"}
    )
    assert (
        bar.command()
        == "jaxrl-dist train ppo --env gymnax:CartPole-v1 --total-env-steps 1000 --torso mlp"
    )
    assert bar.passed([10.0] * 4 + [9.9]) and not bar.passed([10.0] * 3 + [9.9] * 2)
    assert bar.passed([10.0]) and not bar.passed([10.0, 9.9])
    control = bar._replace(at_most=True)
    assert control.passed([10.0]) and not control.passed([10.1])
    assert bar._replace(threshold=None).passed([-1e9])


def test_results_survive_a_round_trip_and_fill_the_page(tmp_path):
    bar = LEARNING["BARS"][0]
    result = {
        "command": bar.command(),
        "steps": bar.steps,
        "returns": [480.0, 20.0],
        "versions": {"jax": "0"},
    }
    kept = {bar.name: result | {"curves": [[None, 20.0], [1.0, 500.0]]}}
    LEARNING["save"](tmp_path / "results.json", kept | {"of no bar": result})
    assert LEARNING["load"](tmp_path / "results.json") == kept
    assert "| ≥ 475 | 480 20 | 1 of 2 | 250 |  | 500 (RL Zoo, 100k), **behind** |" in LEARNING[
        "page"
    ](kept)


def test_a_row_without_a_bar_claims_none_to_be_met(tmp_path):
    bar = LEARNING["BARS"][0]._replace(threshold=None, published=None)
    result = {
        "command": bar.command(),
        "steps": 100,
        "returns": [4.0] * 3,
        "curves": [[1.0] * LEARNING["POINTS"]] * 3,
    }
    row = LEARNING["rows"]([bar], {bar.name: result})[-1]
    assert row.endswith("| 100 |  | 4 4 4 |  | 4 | 4 to 4 |  |  |")
    LEARNING["draw"](bar, result, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1_000


def test_the_interval_is_that_of_means_of_drawn_seeds():
    """Three of three drawn seeds are the same in 1 of 27 cases; of five,
    three or more are the one in 6 % of them.
    """
    assert LEARNING["interval"]([0.0, 3.0, 9.0]) == "0 to 9"
    assert LEARNING["interval"]([0.0, 0.0, 0.0, 0.0, 1.0]) == "0 to 0.6667"
    assert LEARNING["interval"]([1.0, 2.0]) == ""


@pytest.mark.parametrize(
    "returns, value, marked",
    [([-110.0], -100, False), ([-111.0], -100, True), ([0.0, 90.0, 90.0, 91.0], 100, False)],
)
def test_return_is_behind_if_its_iqm_is_a_tenth_lower(returns, value, marked):
    bar = LEARNING["BARS"][0]._replace(published=(value, "a paper, 1M"))
    assert LEARNING["published"](bar, returns) == f"{value} (a paper, 1M)" + (
        ", **behind**" if marked else ""
    )


def test_interrupted_bar_runs_the_missing_seeds(monkeypatch):
    run_bar, bar = LEARNING["run_bar"], LEARNING["BARS"][0]._replace(flags={"info_metrics": "won"})

    def run_seeds(bar, seed, *_):
        return [(float(seed), [None, float(seed)], {"won": seed / 4})]

    monkeypatch.setitem(run_bar.__globals__, "run_seeds", run_seeds)
    kept = []
    first = run_bar(bar, 2, keep=lambda entry: kept.append(list(entry["returns"])))
    assert kept == [[0.0], [0.0, 1.0]]
    assert run_bar(bar, 3, before=first)["returns"] == run_bar(bar, 3)["returns"] == [0.0, 1.0, 2.0]
    assert run_bar(bar, 3, before=first)["won"] == [0.0, 0.25, 0.5]
    monkeypatch.setitem(run_bar.__globals__, "run_seeds", None)
    assert run_bar(bar, 2, before=first) == first


def test_counted_metrics_of_evaluations_are_stored_for_each_seed():
    """A run of both seeds also says when it has compiled and how far it is."""
    flags = {
        "info_metrics": "success",
        "num_envs": 8,
        "hidden_sizes": (4,),
        "evaluation_episodes": 8,
    }
    bar = LEARNING["Bar"]("walk", "ppo", Scored(), 256, None, 2, 2, flags, together=True)
    said = []
    entry = LEARNING["run_bar"](bar, say=said.append)
    assert (
        all(0 <= share <= 1 for share in entry["success"])
        and len(entry["success"]) == len(entry["returns"]) == 2
    )
    assert re.match(r"walk: \d+ env steps after \d+ s$", said[0])


def test_goals_of_offline_learning_compare_normalised_scores():
    records = runpy.run_path(str(runs.ROOT / "scripts" / "records.py"))
    assert len({row.name for row in records["ROWS"]}) == 12 + 12 + 7
    data = {"random": 100.0, "expert": 300.0, "mean": 200.0, "steps": 10}

    def entry(*returns):
        return {"data": data, "returns": returns, "command": "jaxrl-dist train", "seconds": 60}

    names = ("hopper-replay-bc", "hopper-replay-iql", "hopper-medium-bc", "cartpole-replay-cql")
    results = dict(
        zip(
            names,
            (entry(120.0), entry(126.0), entry(170.0, 190.0), entry(440.0, 459.0)),
            strict=True,
        )
    )
    assert list(records["goals"](results).values()) == [True, True, False]
    assert "| hopper medium, 10 steps | 200 (50) | `train` | 170 190 | 180 | 40 | 1.0 |" in records[
        "table"
    ](results)
