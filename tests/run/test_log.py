"""``report.log``: the caller's numbers in the run's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import runs
from test_trackers import shown

import jaxrl_dist
from jaxrl_dist.errors import ConfigError

SIZES: dict[str, Any] = {
    "num_envs": 4, "rollout_length": 4, "hidden_sizes": (4,), "num_devices": 1, "report_interval": 48,
    "total_env_steps": 110, "evaluation_episodes": 2, "evaluation_interval": 60, "evaluation_max_steps": 20,
}  # fmt: skip


def test_numbers_of_the_loop_are_in_the_line_of_its_report(tmp_path: Path) -> None:
    config = jaxrl_dist.preset(
        "pg", "envpool:CartPole-v1", **SIZES, run_dir=str(tmp_path / "run"), tensorboard=True
    )
    logged = []
    for report in jaxrl_dist.train(config):
        report.log({"own/steps": 2 * report.env_steps, "own/none": None})
        report.log({"own/numpy": np.float32(0.5), "own/jax": jnp.int32(3), "own/nan": float("nan")})
        logged.append(report.env_steps)
    *lines, last = runs.read_metrics(tmp_path / "run")
    assert [*(line["env_steps"] for line in lines), last["env_steps"]] == logged
    for line in (*lines, last):
        assert [line[f"own/{name}"] for name in ("steps", "numpy", "jax")] == [
            2 * line["env_steps"],
            0.5,
            3.0,
        ]
        assert line["own/none"] is None and line["own/nan"] is None and "loss/total" in line
    assert any("evaluation/return_mean" in line for line in lines), "it stays in its line"
    assert {step: values["own/steps"] for step, values in shown(tmp_path / "run").items()} == {
        step: 2 * step for step in logged
    }
    with pytest.raises(RuntimeError, match="this report is past: call report"):
        report.log({"own/late": 1.0})


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"env_steps": 1.0},
            "the line already has env_steps; use another name, such as own/env_steps",
        ),
        ({"own/a": "fast"}, "own/a must be a number, not 'fast'"),
        ({"own/a": np.zeros(1)}, r"own/a must be a number, not array\(\[0.\]\)"),
    ],
)
def test_what_cannot_be_logged_leaves_the_line_as_it_is(
    values: Any, message: str, tmp_path: Path
) -> None:
    config = jaxrl_dist.preset("pg", "envpool:CartPole-v1", **SIZES, run_dir=str(tmp_path / "run"))
    for report in jaxrl_dist.train(config):
        with pytest.raises(ConfigError, match=message):
            report.log(values)
        break
    (line,) = runs.read_metrics(tmp_path / "run")
    assert not any(name.startswith("own/") for name in line)


def test_without_a_directory_it_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = next(iter(jaxrl_dist.train(jaxrl_dist.preset("pg", "envpool:CartPole-v1", **SIZES))))
    report.log({"own/steps": 1.0})
    assert "own/steps" not in report.metrics and not list(tmp_path.iterdir())
