"""Metrics from an environment's info, against a plain loop, and in the files of a run."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs
import team

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.episodes import numbers
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import EpisodeStats

METRICS = "success,task/cost:sum,task/cost,late"
ACTIONS = np.random.default_rng(0).integers(2, size=(40, 3), dtype=np.int32)


def walked(actions: np.ndarray, repeat: int) -> list[dict[str, list[float]]]:
    """The metrics of the episodes that ended, by step of one environment:
    a plain loop over ``own.Scored``.
    """
    place = time = 0
    cost, late, ended, found = 0.0, list[float](), False, []
    for action in actions:
        if ended:
            place, time, cost, late, ended = 0, 0, 0.0, [], False
            found.append(dict[str, list[float]]())
            continue
        for _ in range(repeat):
            place, time = place + 2 * int(action) - 1, time + 1
            cost += abs(place)
            late = [place] if time > 5 else late
            if ended := abs(place) >= 3 or time >= 7:
                break
        last = {
            "success": [place >= 3],
            "task/cost:sum": [cost],
            "task/cost": [abs(place)],
            "late": late,
        }
        found.append(last if ended else {})
    return found


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize(
    "env, workers",
    [
        ("own:Scored", "threads"),
        ("scored:HostScored", "threads"),
        pytest.param("scored:HostScored", "processes", marks=pytest.mark.case),
    ],
)
def test_against_a_plain_loop(env: str, workers: Any, repeat: int) -> None:
    source = find(
        env, workers=workers, wrappers=Wrappers(action_repeat=repeat, info_metrics=METRICS)
    )
    assert source.spec.info_metrics == tuple(METRICS.split(","))
    wanted = [walked(row, repeat) for row in ACTIONS.T]
    with closing(source.host(3, 0)) as host:
        host.reset()
        steps = [host.step(action)[1] for action in ACTIONS]
    for t, episodes in enumerate(steps):
        for metric, (total, count) in episodes.info.items():
            said = [row[t].get(metric, []) for row in wanted]
            assert (total.tolist(), count.tolist()) == (
                [sum(x) for x in said],
                [len(x) for x in said],
            ), (t, metric)
    whole = EpisodeStats.stack(steps).merge()
    assert 0 < whole.info["late"][1] < whole.info["success"][1] == whole.episodes, (
        "not all episodes report it"
    )


@pytest.mark.parametrize("repeat", [pytest.param(1, marks=pytest.mark.case), 2])
def test_envpools_parts_of_the_reward_add_up_to_the_return(repeat: int) -> None:
    names = ("reward_run:sum", "reward_ctrl:sum", "x_position", "x_position:sum")
    metrics = Wrappers(action_repeat=repeat, time_limit=3, info_metrics=", ".join(names))
    with closing(find("envpool:HalfCheetah-v4", wrappers=metrics).host(2, 0)) as host:
        host.reset()
        steps = [host.step(np.full((2, 6), 0.3, np.float32))[1] for _ in range(8)]
    episodes = EpisodeStats.stack(steps).merge()
    assert episodes.episodes == 4 == episodes.info["x_position"][1]
    run, control = (episodes.info[f"reward_{name}:sum"][0] for name in ("run", "ctrl"))
    np.testing.assert_allclose(run + control, episodes.return_sum, rtol=1e-5)
    with closing(
        find("envpool:HalfCheetah-v4", wrappers=metrics._replace(info_metrics="x_position")).host(
            2, 0
        )
    ) as host:
        host.reset()
        steps = [host.step(np.full((2, 6), 0.3, np.float32))[1] for _ in range(8)]
    np.testing.assert_array_equal(
        EpisodeStats.stack(steps).merge().info["x_position"], episodes.info["x_position"]
    )


REFUSED = {
    "sucess": r"info of own:Scored has no number 'sucess' \(did you mean 'success'\?\); it has: late, success",
    "words": "has no number 'words'; it has: late, success, task/cost",
    "success,": "'success,' has an empty name; write names such as success,score",
    "late,late": "names late twice",
}


@pytest.mark.parametrize("metrics", REFUSED)
def test_what_is_no_number_of_the_info(metrics: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[metrics]):
        find("own:Scored", wrappers=Wrappers(info_metrics=metrics))


def test_other_entries_of_an_info_do_not_matter() -> None:
    others = {
        "words": "none",
        "path": [[1, 2], [3]],
        "rows": np.zeros(2),
        "task": {1: None, "cost": np.array([3])},
    }
    info = {"success": 1.0, "agents": {0: True, "all": np.float32(2)}, **others}
    assert numbers(info) == {"success": 1, "agents/0": 1, "agents/all": 2, "task/cost": 3}
    assert numbers([1.0]) == numbers(None) == {}


def test_other_backends_name_what_they_have() -> None:
    with pytest.raises(
        ConfigError,
        match=r"envpool:Pong-v5.*'ram'",
    ):
        find("envpool:Pong-v5", wrappers=Wrappers(info_metrics="ram"))
    with pytest.raises(ConfigError, match=r"Reporting.*'won'"):
        find(team.Reporting(*BIRDS), wrappers=Wrappers(info_metrics="won"))


BIRDS = "long_0", "long_1", "long_2"


@pytest.mark.parametrize("policies", [{}, {"a": "long_0", "b": "long_[12]"}])
def test_metrics_of_agents_end_with_them_others_with_the_episode(
    policies: dict[str, str],
) -> None:
    names = "place,places:sum,time,time:sum"
    env = find(
        team.Reporting(*BIRDS), wrappers=Wrappers(info_metrics=names, policies=policies)
    ).device()
    action = {
        policy: np.full(2 * x.num_agents, 2, np.int32) for policy, x in env.spec.by_policy.items()
    }
    keys = jax.random.split(jax.random.key(0), 6)
    (state, _), step, found = env.reset(keys), jax.jit(env.step), []
    # all move right in both environments; the first agent is there for two steps, of four
    for _ in range(5):
        state, _, episodes = step(state, env.spec.bare(action), keys)
        found.append([x.info for x in env.spec.keyed(episodes).values()])
    values = {x: np.concatenate([part[x][0] for part in found[3]]) for x in names.split(",")}
    wanted = {
        "place": [2, 4, 4],
        "places:sum": [3, 10, 10],
        "time": [4, 4, 4],
        "time:sum": [10, 10, 10],
    }
    assert {x: sorted(y.tolist()) for x, y in values.items()} == {
        x: sorted(2 * y) for x, y in wanted.items()
    }
    assert [sum(part["time"][1].sum() for part in parts) for parts in found] == [0, 0, 0, 6, 0]


@pytest.mark.parametrize("algorithm", ["pg", pytest.param("vdn", marks=pytest.mark.case)])
def test_an_evaluation_has_info_from_after_an_agents_episode(
    algorithm: str,
) -> None:
    fields = {**SIZES, "info_metrics": "time,place,late", "evaluation_episodes": 4}
    *_, last = jaxrl_dist.train(jaxrl_dist.preset(algorithm, team.Reporting(*BIRDS), **fields))
    assert last.evaluation is not None and last.evaluation["episodes"] == (
        6 if algorithm == "pg" else 4
    )
    assert (
        last.evaluation["info/time"] == 4 == last.metrics["info/time"] == last.metrics["info/late"]
    )
    assert 0 <= last.metrics["info/place"] <= 10 / 3


@pytest.mark.parametrize("workers", ["threads", pytest.param("processes", marks=pytest.mark.case)])
def test_pettingzoos_agents_report_until_they_leave(workers: Any) -> None:
    source = find(
        "flock:Reporting", workers=workers, wrappers=Wrappers(info_metrics="place,place:sum,wind")
    )
    with closing(source.host(6, 0)) as host:
        host.reset()
        places = list[np.ndarray]()
        for _ in range(9):  # all fly to the right, home at place 4
            step, episodes = host.step(np.full(6, 2, np.int32))
            places.append(np.where(step.valid, step.obs["observation"][:, 0], np.nan))
            if episodes.info["wind"][1].any():
                break
    assert episodes.info["place"][0][:3].tolist() == [4, 4, 4]
    np.testing.assert_array_equal(episodes.info["place:sum"][0][:3], np.nansum(places, axis=0)[:3])
    assert episodes.info["wind"][0][:3].tolist() == [len(places)] * 3


def test_gymnasium_is_asked_for_a_whole_episode(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = f"train pg --env scored:HostScored {runs.TINY} --info-metrics speed --quiet --run-dir {tmp_path / 'run'}"
    assert cli.main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--info-metrics speed: the info of scored:HostScored has no number 'speed'" in line
    assert "it has: late, success, task/cost" in line or "it has: success, task/cost" in line


SIZES: dict[str, Any] = {
    "num_envs": 8, "rollout_length": 16, "report_interval": 128, "evaluation_episodes": 3, "hidden_sizes": (4,),
    "num_devices": 1, "total_env_steps": 384, "info_metrics": "success,late",
}  # fmt: skip


@pytest.mark.case  # test_other_plans_report_them
def test_a_run_reports_them_and_a_resumed_one_alike(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    config = jaxrl_dist.preset("pg", "own:Scored", **SIZES, run_dir=str(whole))
    reports = list(jaxrl_dist.train(config))
    lines = runs.untimed(whole)
    assert [line["info/success"] for line in lines] == [
        report.metrics["info/success"] for report in reports
    ]
    assert all(0 <= line["info/success"] <= 1 for line in lines)
    evaluation = jaxrl_dist.load_policy(whole, env="own:Scored").evaluate(episodes=3, seed=0)
    wins = evaluation.returns[evaluation.info["success"] == 1]
    assert wins.size + (evaluation.info["success"] == 0).sum() == 3 and (wins > 0).all()
    summary = runs.read_json(whole / "summary.json")
    # greedy, and the walk knows no chance
    assert summary["evaluation"]["info/success"] in (0.0, 1.0)
    list(jaxrl_dist.train(dataclasses.replace(config, total_env_steps=160, run_dir=str(halves))))
    list(jaxrl_dist.resume(halves, total_env_steps=384, env="own:Scored"))
    assert runs.untimed(halves) == lines


@pytest.mark.parametrize(
    "plan", ["synchronous", pytest.param("asynchronous", marks=pytest.mark.slow)]
)
def test_other_plans_report_them(plan: str) -> None:
    env = "scored:HostScored" if plan == "synchronous" else "own:Scored"
    lag = {"max_lag": 0} if plan == "asynchronous" else {}  # pg is on-policy
    fields = {**SIZES, **lag, "plan": plan, "info_metrics": "success"}
    *_, last = jaxrl_dist.train(jaxrl_dist.preset("pg", env, **fields))
    assert 0 <= (last.metrics["info/success"] or 0) <= 1 and last.evaluation is not None
    assert last.evaluation["info/success"] in (0.0, 1.0)
