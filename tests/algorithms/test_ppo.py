"""Metrics of the values of PPO."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxrl_dist
from jaxrl_dist import mesh
from jaxrl_dist.algorithms.ppo import explained_variance


def explained(values: np.ndarray, targets: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The metric of a rollout ``[devices, T, B]``."""

    def of_device(values: Any, targets: Any, valid: Any) -> jax.Array:
        rollout: Any = SimpleNamespace(valid=valid, extras={"value": values})
        return explained_variance(rollout, targets)

    return np.asarray(jax.vmap(of_device, axis_name=mesh.DATA)(values, targets, valid))


def test_explained_variance_is_of_all_valid_steps() -> None:
    rng = np.random.default_rng(0)
    targets = rng.normal(3, 2, (2, 5, 4)).astype(np.float32)
    values = (targets + rng.normal(1, 1, targets.shape)).astype(np.float32)
    valid = rng.random(targets.shape) < 0.8
    expected = 1 - np.var((targets - values)[valid]) / np.var(targets[valid])
    np.testing.assert_allclose(explained(values, targets, valid), expected, rtol=1e-4)
    assert 0.3 < expected < 1


def test_explained_variance_of_equal_targets_is_0() -> None:
    ones = np.ones((1, 3, 2), np.float32)
    np.testing.assert_array_equal(explained(2 * ones, ones, ones > 0), 0)


@pytest.mark.parametrize("name", ["ppo", "appo"])
def test_ppo_and_appo_report_how_well_values_explain_returns(name: str) -> None:
    fields = {"num_envs": 8, "rollout_length": 16, "hidden_sizes": (4,), "num_devices": 1}
    plan = {"plan": "on_device"} if name == "appo" else {}
    config = jaxrl_dist.preset(
        name, "gymnax:CartPole-v1", **fields, **plan, total_env_steps=256, evaluation_episodes=0
    )
    *_, report = jaxrl_dist.train(config)
    share = report.metrics["value/explained_variance"]
    assert share is not None and -10 < share < 1
    assert abs(report.metrics["value/mean"] or 0) > 0
    assert np.isfinite(share)
