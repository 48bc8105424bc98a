"""Sizes that a learner is refused for."""

from __future__ import annotations

from typing import Any

import pytest

import jaxrl_dist
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.training.learner import MAX_COUNT
from jaxrl_dist.training.setup import prepare


@pytest.mark.parametrize(
    "name, fields, updates",
    [
        ("ppo", {"num_envs": 8, "rollout_length": 4, "num_epochs": 4, "num_minibatches": 2}, 8),
        ("dqn", {"num_envs": 8, "rollout_length": 4, "replay_ratio": 0.5}, 16),
        ("dqn", {"num_envs": 8, "rollout_length": 4, "replay_ratio": 0.03125}, 4),  # steps of an environment
        ("a2c", {"num_envs": 8, "rollout_length": 4, "plan": "gradients", "num_actors": 4}, 4),
    ],
)
def test_a_run_that_devices_cannot_count_is_refused(name: str, fields: dict[str, Any], updates: int) -> None:
    """int32 counts would turn negative, and no checkpoint could be resumed."""
    works = (MAX_COUNT // updates - 1) * 32

    def total(steps: int) -> jaxrl_dist.Train[Any]:
        return jaxrl_dist.preset(name, "CartPole-v1", num_devices=1, total_env_steps=steps, **fields)

    with pytest.raises(ConfigError, match=f"32 env steps make {updates}; {works} works"):
        prepare(total(works + 1))
    assert prepare(total(works)).config.total_env_steps == works
