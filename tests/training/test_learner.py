"""Sizes that a learner is refused for, and those that are rounded instead."""

from __future__ import annotations

from typing import Any

import pytest
import team

import jaxrl_dist
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training.learner import MAX_COUNT
from jaxrl_dist.training.setup import prepare


@pytest.mark.parametrize(
    "name, fields, updates",
    [
        ("ppo", {"num_envs": 8, "rollout_length": 4, "num_epochs": 4, "num_minibatches": 2}, 8),
        ("dqn", {"num_envs": 8, "rollout_length": 4, "replay_ratio": 0.5}, 16),
        # steps of an environment
        ("dqn", {"num_envs": 8, "rollout_length": 4, "replay_ratio": 0.03125}, 4),
        ("a2c", {"num_envs": 8, "rollout_length": 4, "plan": "gradients", "num_actors": 4}, 4),
    ],
)
def test_a_run_that_devices_cannot_count_is_refused(
    name: str, fields: dict[str, Any], updates: int
) -> None:
    """int32 counts would turn negative, and no checkpoint could be resumed."""
    works = (MAX_COUNT // updates - 1) * 32

    def total(steps: int) -> jaxrl_dist.Train[Any]:
        return jaxrl_dist.preset(
            name, "CartPole-v1", num_devices=1, total_env_steps=steps, **fields
        )

    with pytest.raises(ConfigError, match=f"32.*{updates}.*{works}"):
        prepare(total(works + 1))
    assert prepare(total(works)).config.total_env_steps == works


def config(algorithm: Any, env: str, fields: dict[str, Any]) -> jaxrl_dist.Train[Any]:
    return resolved(jaxrl_dist.Train(algorithm, env=env, num_devices=1), fields)[0]


@pytest.mark.parametrize(
    "algorithm, fields, size, rounded",
    [
        ("dqn", {"num_envs": 12}, "replay_capacity", 999_996),
        (DQN(), {"num_envs": 12}, "replay_capacity", 99_996),
        ("ppo", {"num_envs": 3, "rollout_length": 50}, "num_minibatches", 3),  # of 150 examples
        (
            "ppo",
            {"num_envs": 10, "core": "gru", "rollout_length": 48},
            "num_minibatches",
            1,
        ),  # of 5 sequences on each of 2
        ("ppo", {"num_envs": 3, "rollout_length": 48}, "num_minibatches", 4),
        ("impala", {"num_envs": 9, "num_actors": 3}, "num_actors", 3),
        ("a3c", {"num_envs": 9}, "num_actors", 3),
    ],
)
def test_a_default_that_does_not_divide_is_rounded_down(
    algorithm: Any, fields: dict[str, Any], size: str, rounded: int
) -> None:
    found = config(algorithm, "envpool:CartPole-v1", fields)
    assert {**vars(found), **vars(found.algorithm)}[size] == rounded
    assert resolved(prepare(found).config)[0] == prepare(found).config  # where it is resumed


@pytest.mark.parametrize(
    "algorithm, fields, message",
    [
        (
            "dqn",
            {"num_envs": 12, "replay_capacity": 100_000},
            "replay_capacity 100000 does not divide over 12 env",
        ),
        (
            DQN(replay_capacity=1000),
            {"num_envs": 12},
            "replay_capacity 1000 does not divide over 12 environments",
        ),
        (
            "dqn",
            {"num_envs": 12, "published": True},
            "replay_capacity 1000000 does not divide over 12 environments",
        ),
        (
            "dqn",
            {"num_envs": 8, "replay_capacity": 8},
            "replay_capacity 8 is too small for 8 environments",
        ),
        (
            "ppo",
            {"num_envs": 3, "rollout_length": 50, "num_minibatches": 4},
            "num_minibatches 4 does not divide",
        ),
        ("impala", {"num_envs": 9, "num_actors": 2}, "9 does not divide over 2 actors"),
    ],
)
def test_what_the_user_gave_is_refused_instead(
    algorithm: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(config(algorithm, "envpool:Pong-v5", fields))


def test_a_memory_of_several_agents_divides_over_rows() -> None:
    for capacity, message in ((100, "does not divide over"), (24, "is too small for")):
        with pytest.raises(ConfigError, match=rf"{message} 24 rows \(environments x 3 agents\)"):
            prepare(config(DQN(replay_capacity=capacity), team.CartPoles(3), {"num_envs": 8}))
