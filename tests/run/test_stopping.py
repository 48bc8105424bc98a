"""``report.stop``: the caller ends the run as if its total were reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import Report

SIZES: dict[str, Any] = {
    "num_envs": 4, "rollout_length": 4, "hidden_sizes": (4,), "num_devices": 1, "report_interval": 48,
    "total_env_steps": 400, "evaluation_episodes": 2, "evaluation_max_steps": 20,
}  # fmt: skip
ENVS = {
    "on_device": "gymnax:CartPole-v1",
    "synchronous": "envpool:CartPole-v1",
    "asynchronous": "envpool:CartPole-v1",
}


def stopped(at: int, **fields: Any) -> list[Report]:
    """The reports of a run that its caller stops at one of them, and that log a number."""
    plan = fields.get("plan", "on_device")
    config = jaxrl_dist.preset("impala", ENVS[plan], **{**SIZES, "plan": plan, **fields})
    reports = []
    for report in jaxrl_dist.train(config):
        reports.append(report)
        report.log({"own/reports": len(reports)})
        if len(reports) == at:
            report.stop()
    return reports


@pytest.mark.parametrize("plan", ENVS)
@pytest.mark.parametrize("interval", [None, 40])
def test_a_run_ends_with_the_report_that_the_caller_stops(
    plan: str, interval: int | None, tmp_path: Path
) -> None:
    there = tmp_path / "run"
    *before, last = stopped(2, plan=plan, evaluation_interval=interval, run_dir=str(there))
    assert len(before) == 2 and last.iteration == before[-1].iteration
    assert last.ended_by == "stop" and last.evaluation is not None
    lines = runs.read_metrics(there)
    assert [line["iteration"] for line in lines] == [report.iteration for report in before]
    assert [line["own/reports"] for line in lines] == [1, 3]
    assert [("evaluation/episodes" in line) for line in lines] == [interval is not None] * 2
    summary = runs.read_json(there / "summary.json")
    assert summary["ended_by"] == "stop" and summary["env_steps"] == last.env_steps
    assert summary["evaluation"] == last.evaluation
    policy = jaxrl_dist.load_policy(there)
    jax.tree.map(np.testing.assert_array_equal, policy.variables, last.variables())


def test_a_stopped_run_resumes_as_if_it_had_not(tmp_path: Path) -> None:
    stopped(2, run_dir=str(tmp_path / "run"))
    *_, resumed = jaxrl_dist.resume(tmp_path / "run")
    whole = stopped(0)
    jax.tree.map(np.testing.assert_array_equal, resumed.variables(), whole[-1].variables())
    assert resumed.ended_by == "total_env_steps"


def test_stop_does_nothing_after_the_last_report() -> None:
    reports = stopped(0)
    assert len(stopped(len(reports))) == len(reports)


def test_stopping_a_population_ends_all_its_members(tmp_path: Path) -> None:
    reports = stopped(2, seeds=2, run_dir=str(tmp_path / "run"))
    assert len(reports) == 3 and reports[-1].ended_by == "stop"
    assert [member.ended_by for member in reports[-1].members] == ["stop", "stop"]
    assert reports[-1].evaluation is not None and reports[-1].evaluation["members"] == 2
    for member in ("000", "001"):
        summary = runs.read_json(tmp_path / "run/members" / member / "summary.json")
        assert summary["ended_by"] == "stop"
    assert runs.read_json(tmp_path / "run/summary.json")["ended_by"] == "stop"


def test_stopping_a_member_lets_the_others_train() -> None:
    config = jaxrl_dist.preset("pg", "gymnax:CartPole-v1", **SIZES, seeds=2)
    for number, report in enumerate(jaxrl_dist.train(config)):
        if number == 1:
            report.members[0].stop()
    first, second = report.members
    assert (first.ended_by, second.ended_by) == ("stop", "total_env_steps")
    assert first.env_steps < second.env_steps
