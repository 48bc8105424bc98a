"""The planner of the page on planning: it steers an environment that it knows,
and has nothing to learn.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs
from own import Target

import jaxrl_dist
from jaxrl_dist.play.export import export
from jaxrl_dist.settings.resolve import find_env
from jaxrl_dist.training.algorithm import make_algorithm


def cem() -> Any:
    text = (
        (runs.ROOT / "docs/planning.md")
        .read_text(encoding="utf-8")
        .split("```python\n")[1]
        .split("```")[0]
    )
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


def test_observations_are_not_enough_for_it(tmp_path: Path) -> None:
    config = jaxrl_dist.Train(cem()(), "gymnax:Pendulum-v1")
    source = find_env(config)
    policy = jaxrl_dist.Policy(
        config, source, make_algorithm(config, source.spec)[""].init(jax.random.key(0))
    )
    with pytest.raises(ValueError, match="plans with its environment's simulator"):
        policy(np.zeros((1, 3), np.float32))
    with pytest.raises(jaxrl_dist.ConfigError, match="plans with its environment's simulator"):
        export(policy, tmp_path / "policy")


@pytest.mark.case  # test_it_finds_the_action_that_pays_most
def test_it_swings_the_pendulum_up() -> None:
    assert returned("gymnax:Pendulum-v1") > -300
