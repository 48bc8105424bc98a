"""The planner of the page on planning: it steers an environment that it knows, and has nothing to learn."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import runs
from own import Target

import jaxrl_dist


def cem() -> Any:
    text = (runs.ROOT / "docs/planning.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    module = types.ModuleType("cem")
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    exec(compile(text, "cem.py", "exec"), module.__dict__)
    return module.CEM


def returned(env: Any, **fields: Any) -> float:
    sizes = {"num_envs": 8, "rollout_length": 8, "total_env_steps": 64, "evaluation_episodes": 8}
    *_, last = jaxrl_dist.train(jaxrl_dist.Train(cem()(**fields), env, **sizes))
    assert last.evaluation is not None
    return float(last.evaluation["return_mean"])


def test_it_finds_the_action_that_pays_most() -> None:
    """Zero actions would return -0.2."""
    sizes = {"horizon": 2, "num_candidates": 32, "num_elites": 4, "num_rounds": 6}
    assert returned(Target([-1.0, 0.0], [1.0, 5.0]), **sizes) > -0.05


@pytest.mark.case  # test_it_finds_the_action_that_pays_most
def test_it_swings_the_pendulum_up() -> None:
    assert returned("gymnax:Pendulum-v1") > -300
