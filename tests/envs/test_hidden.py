"""Observations without some of their numbers, on every backend."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.envs.base import UNWRAPPED, Wrappers
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.memory import frames

NUM_ENVS = 3
VELOCITIES = Wrappers(hide="velocities")


def played(env: str, wrappers: Wrappers) -> tuple[Any, list[np.ndarray]]:
    """The spec, and what 30 steps of host environments return."""
    source = find(env, wrappers=wrappers)
    with contextlib.closing(source.host(NUM_ENVS, 0)) as envs:
        seen = [envs.reset()]
        for t in range(30):
            action = np.full((NUM_ENVS, *source.spec.action.shape), t % 2, source.spec.action.dtype)
            seen.append(envs.step(action)[0].obs)
    return source.spec, seen


@pytest.mark.parametrize(
    "env, hide, kept",
    [
        ("gymnax:CartPole-v1", "velocities", [0, 2]),
        ("envpool:Pendulum-v1", "velocities", [0, 1]),
        ("gymnasium:Acrobot-v1", "velocities", [0, 1, 2, 3]),
        ("gymnasium:MountainCar-v0", "velocities", [0]),
        ("gymnasium:MountainCarContinuous-v0", "velocities", [0]),
        ("gymnasium:CartPole-v1", "0, 3", [1, 2]),
    ],
)
def test_policies_see_the_other_numbers_of_the_same_episodes(
    env: str, hide: str, kept: list[int]
) -> None:
    spec, seen = played(env, Wrappers(hide=hide))
    whole, full = played(env, UNWRAPPED)
    np.testing.assert_array_equal(spec.observation.low, whole.observation.low[kept])
    assert spec.observation.shape == (len(kept),)
    np.testing.assert_array_equal(seen, np.stack(full)[..., kept])


def test_they_are_hidden_before_frames_are_stacked() -> None:
    wrappers = VELOCITIES._replace(frame_stack=2)
    spec, seen = played("gymnasium:CartPole-v1", wrappers)
    _, full = played("gymnasium:CartPole-v1", UNWRAPPED)
    assert spec.observation.shape == (4,)
    newest = [obs.pixels if isinstance(obs, frames.Frame) else obs[:, 2:] for obs in seen]
    np.testing.assert_array_equal(newest, np.stack(full)[..., [0, 2]])


def test_in_a_compiled_program() -> None:
    whole, env = (
        find("CartPole-v1", wrappers=wrappers).device() for wrappers in (UNWRAPPED, VELOCITIES)
    )
    keys = jax.random.split(jax.random.key(0), NUM_ENVS)
    (state, obs), (all_state, all_obs) = (jax.jit(each.reset)(keys) for each in (env, whole))
    np.testing.assert_array_equal(obs, all_obs[:, [0, 2]])
    action = np.zeros(NUM_ENVS, np.int32)
    _, step, _ = jax.jit(env.step)(state, action, keys)
    _, all_step, _ = jax.jit(whole.step)(all_state, action, keys)
    np.testing.assert_array_equal(step.obs, all_step.obs[:, [0, 2]])


@pytest.mark.parametrize(
    "env, hide, message",
    [
        (
            "CartPole-v1",
            "4",
            "hide 4: gymnax:CartPole-v1 has the indices 0 to 3; name some of these or 'velocities'",
        ),
        ("CartPole-v1", "-1", "hide -1: gymnax:CartPole-v1 has the indices 0 to 3"),
        ("CartPole-v1", "speed", "hide speed: gymnax:CartPole-v1 has the indices 0 to 3"),
        (
            "CartPole-v1",
            "0,1,2,3",
            "hide 0,1,2,3 leaves nothing of the observations of gymnax:CartPole-v1 to see",
        ),
        (
            "Breakout-MinAtar",
            "1",
            "hide 1 needs observations that are vectors, but gymnax:Breakout-MinAtar has float32[10, 10, 4]",
        ),
        ("Reacher-misc", "velocities", "such as --hide "),
    ],
)
def test_what_cannot_be_hidden(env: str, hide: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        find(env, wrappers=Wrappers(hide=hide))
    assert message in error.value.with_flags and "\n" not in str(error.value)


@pytest.mark.case  # test_policies_see_the_other_numbers_of_the_same_episodes
def test_a_run_keeps_what_it_hides(tmp_path: Path) -> None:
    """And its policy takes observations without it."""
    command = "train a2c --env CartPole-v1 --hide velocities --core gru --core-size 4 --hidden-sizes 8 --num-envs 8"
    more = "--rollout-length 16 --total-env-steps 128 --num-devices 1 --evaluation-episodes 2 --quiet --run-dir"
    assert cli.main([*command.split(), *more.split(), str(tmp_path / "run")]) == 0
    assert runs.read_json(tmp_path / "run/config.json")["run"]["hide"] == "velocities"
    policy = jaxrl_dist.load_policy(tmp_path / "run")
    assert policy(np.zeros((3, 2)))[0].shape == (3,)
    with pytest.raises(ValueError, match=r"observations have shape \[B, 2\] here, not \[3, 4\]"):
        policy(np.zeros((3, 4)))
