"""The returns by which a run ends: those of the newest reports, also after a resume."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl_dist.config.train import Train
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.session import Session
from jaxrl_dist.plans.window import LENGTH, METRIC, Window, recent_return
from jaxrl_dist.types import EpisodeStats


def session(reports: int, progress: dict[str, Any] | None = None) -> Any:
    progress = progress or {}
    score = float.fromhex(progress.get("score", "-inf"))
    return SimpleNamespace(reports_per_score=reports, progress=progress, score=score)


def resumed(window: Window, reports: int) -> Window:
    stored = json.loads(json.dumps({"score": window.score.hex(), "window": window.to_json()}))
    return Window(session(reports, stored))


def stats(returns: list[float], devices: int = 2) -> EpisodeStats:
    """Statistics of episodes that have ended on some devices."""
    parts = [np.float32(returns[at::devices]) for at in range(devices)]
    count, total = np.float32([len(x) for x in parts]), np.float32([x.sum() for x in parts])
    ends = [
        [getattr(x, end)(initial=start) for x in parts]
        for end, start in (("min", math.inf), ("max", -math.inf))
    ]
    return EpisodeStats(count, total, 10 * count, *map(np.float32, ends))


@pytest.mark.parametrize("reports", [1, 3])
def test_the_score_is_that_of_a_naive_loop_also_after_resumes(reports: int) -> None:
    rng = np.random.default_rng(0)
    intervals = [list(rng.integers(-50, 50, rng.integers(0, 4)).astype(float)) for _ in range(40)]
    intervals[20:24] = [[], [], [], []]  # a whole window without an episode
    window, expected = Window(session(reports)), -math.inf
    for at, returns in enumerate(intervals):
        window = resumed(window, reports)
        window.add({"": stats(returns)})
        newest = [x for part in intervals[max(0, at + 1 - reports) : at + 1] for x in part]
        if at + 1 >= reports and newest:
            expected = float(np.mean(newest))
        assert window.score == pytest.approx(expected)
        mean = pytest.approx(np.mean(newest)) if newest else None
        assert window.metrics(None) == {METRIC: mean, LENGTH: 10.0 if newest else None}
        last = window.metrics({"": stats([100.0])})[METRIC]
        assert last == pytest.approx(np.mean([*newest, 100.0])), (
            "an interval that is cut short joins the window"
        )


def test_each_policy_has_its_own_and_the_score_is_that_of_all() -> None:
    window = Window(session(2))
    window.add({"prey": stats([1.0, 2.0]), "hunter": stats([])})
    assert window.score == -math.inf and window.metrics(None)[METRIC] == 1.5
    assert (
        window.metrics(None)["prey/episode/recent_length"] == 10
        and window.metrics(None)[f"hunter/{LENGTH}"] is None
    )
    window.add({"prey": stats([6.0]), "hunter": stats([10.0])})
    assert window.score == 19 / 4
    returns = {METRIC: 19 / 4, f"prey/{METRIC}": 3.0, f"hunter/{METRIC}": 10.0}
    assert window.metrics(None) == returns | dict.fromkeys(
        (LENGTH, f"prey/{LENGTH}", f"hunter/{LENGTH}"), 10.0
    )
    before = Window(session(3), most=1)
    before.add({"": stats([1.0])})
    before.add({"": stats([2.0])})
    assert before.score == 2.0, "nothing from before the last selection"
    assert resumed(window, 2).metrics(None) == window.metrics(None)
    assert Window(session(2)).metrics(None) == {METRIC: None, LENGTH: None}


def test_a_score_lasts_until_an_episode_ends() -> None:
    window = Window(session(1, {"score": (7.5).hex()}))
    assert window.score == 7.5
    window.add({"": stats([])})
    assert window.score == 7.5
    assert recent_return({"episode/return": 3.0, METRIC: None}) is None


@pytest.mark.parametrize(
    "fields, reports",
    [
        # one of 9 iterations of 1,024 steps
        ({"report_interval": 10_000, "return_window": 10_000}, 1),
        ({"report_interval": 3_000, "return_window": 10_000}, 5),  # 5 times 2 iterations
        ({"report_interval": 1, "return_window": 10_000}, 9),
        ({"report_interval": 100_000, "return_window": 10_000}, 1),
    ],
)
def test_a_window_covers_its_steps_in_whole_reports(fields: dict[str, int], reports: int) -> None:
    config = Train("ppo", "CartPole-v1", num_envs=8, rollout_length=128, plan="on_device", **fields)
    nothing: Any = dict.fromkeys(Job._fields)
    job = Job(**{**nothing, "config": config})
    assert Session(config, job).reports_per_score == reports
