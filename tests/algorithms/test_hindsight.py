"""Replaced goals against a naive loop, and what runs with them refuse and learn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from probes import box, random_rollout, spec

from jaxrl_dist import cli
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.wrappers.hindsight import REWARD_ERROR
from jaxrl_dist.envs import goals
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.memory import ring
from jaxrl_dist.types import Algorithm, Context, Goals, Rollout, Variables

PARTS = {"observation": box(2), "achieved_goal": box(2), "desired_goal": box(2)}
GOAL_PARTS = "achieved_goal", "desired_goal"
SPEC = spec(PARTS)
PLAIN = DQN(hidden_sizes=(4,), n_step=2).make(SPEC)
HORIZON = 6
FLIP = (
    "dqn --env own:BitFlip --her 0.8 --her-horizon 4 --info-metrics success --hidden-sizes 32 "
    "--learning-starts 256 --num-devices 1"
)


def ends_where_near(achieved: Any, desired: Any) -> tuple[Any, Any]:
    """Pays 2 and ends the episode within a distance of 0.8; else pays minus the distance."""
    xp = jnp if isinstance(achieved, jax.Array) else np
    distance = xp.linalg.norm(achieved - desired)
    return xp.where(distance < 0.8, 2.0, -distance), distance < 0.8


def windows(seed: int) -> Rollout:
    """Windows ``[HORIZON, N]`` of random walks of the achieved goal. Episodes end at the goal, by a
    fall or by a time limit; some environments are made again in the middle of one.
    """
    rng = np.random.default_rng(seed)
    num_steps, num_envs = 40, 16
    rollout = random_rollout(PLAIN, SPEC, num_steps, num_envs, seed)
    obs = {name: rng.normal(size=x.shape).astype(np.float32) for name, x in rollout.obs.items()}
    reward, terminated, truncated, valid = (np.zeros_like(x) for x in rollout.outcomes)
    for n in range(num_envs):
        resets = False
        for t in range(num_steps):
            valid[t, n] = not resets and rng.random() > 0.05
            resets = False
            if not valid[t, n]:  # the goal of the next episode comes with its first observation
                continue
            obs["desired_goal"][t + 1, n] = obs["desired_goal"][t, n]
            pays, ends = ends_where_near(*(obs[name][t + 1, n] for name in GOAL_PARTS))
            reward[t, n] = pays
            terminated[t, n] = ends or rng.random() < 0.07
            truncated[t, n] = not terminated[t, n] and rng.random() < 0.07
            resets = terminated[t, n] or truncated[t, n]
    rollout = rollout._replace(
        obs=obs, reward=reward, terminated=terminated, truncated=truncated, valid=valid
    )
    return jax.device_get(ring.windows(jax.tree.map(jnp.asarray, rollout), HORIZON))


def returned(share: float, function: Goals = ends_where_near) -> Algorithm:
    """DQN with replaced goals, whose batch is the rollout that its own postprocessor gets."""

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> Any:
        return rollout

    plain = dataclasses.replace(PLAIN, postprocess=postprocess)
    return wrappers.hindsight(plain, SPEC, share, HORIZON, function)


@pytest.fixture(scope="module")
def relabelled() -> tuple[Rollout, Rollout, np.ndarray]:
    """Windows, what becomes of them if each goal is replaced, and the error of the function."""
    before = windows(seed=1)
    algorithm = returned(share=1.0)
    keys = jax.random.split(jax.random.key(3), before.reward.shape[1])
    batch = jax.jit(algorithm.postprocess)(None, before, Context(keys))
    return before, *jax.device_get((batch["batch"], batch["error"]))


def steps_of_episode(window: Rollout, n: int) -> int:
    """How many steps of window ``n`` belong to the episode of its first one, by a loop."""
    for t in range(HORIZON):
        if window.terminated[t, n] or window.truncated[t, n]:
            return t + 1
        if t + 1 < HORIZON and not window.valid[t + 1, n]:
            return t + 1
    return HORIZON


def test_each_new_goal_was_achieved_later_in_the_episode(
    relabelled: tuple[Rollout, Rollout, np.ndarray],
) -> None:
    before, after, _ = relabelled
    assert after.reward.shape[0] == PLAIN.window == 2
    places = []
    for n in np.flatnonzero(before.valid[0]):
        goal = after.obs["desired_goal"][:, n]
        np.testing.assert_array_equal(goal, np.broadcast_to(goal[0], goal.shape))
        later = before.obs["achieved_goal"][1 : 1 + steps_of_episode(before, n), n]
        (place,) = np.flatnonzero(np.all(later == goal[0], axis=1))
        places.append((place, len(later)))
    whole = [place for place, length in places if length == HORIZON]
    assert len(whole) > 100
    counts = np.bincount(whole, minlength=HORIZON)
    assert np.all(np.abs(counts - len(whole) / HORIZON) < 4 * np.sqrt(len(whole) / HORIZON))


def test_rewards_and_ends_are_those_of_the_new_goal(
    relabelled: tuple[Rollout, Rollout, np.ndarray],
) -> None:
    before, after, error = relabelled
    np.testing.assert_allclose(error, 0, atol=1e-6)
    other_ends = 0
    for n in np.flatnonzero(before.valid[0]):
        for t in range(2):
            if not before.valid[t, n]:
                assert after.reward[t, n] == 0
                continue
            achieved = before.obs["achieved_goal"][t + 1, n].astype(np.float64)
            new, old = (
                np.linalg.norm(achieved - x.obs["desired_goal"][t + 1, n]) for x in (after, before)
            )
            assert after.reward[t, n] == pytest.approx(2.0 if new < 0.8 else -new, abs=1e-5)
            other_end = before.terminated[t, n] and old >= 0.8
            other_ends += other_end
            assert after.terminated[t, n] == (new < 0.8 or other_end)
            over = before.terminated[t, n] or before.truncated[t, n]
            assert after.truncated[t, n] == (over and not after.terminated[t, n])
    assert other_ends > 3


@pytest.mark.parametrize("share", [0.25, 0.8])
def test_a_share_of_the_steps_gets_a_new_goal(share: float) -> None:
    before = windows(seed=2)
    keys = jax.random.split(jax.random.key(4), before.reward.shape[1])
    after = returned(share).postprocess(Variables((), ()), before, Context(keys))["batch"]
    changed = np.any(after.obs["desired_goal"][0] != before.obs["desired_goal"][0], axis=1)
    assert not changed[~before.valid[0]].any()
    assert changed[before.valid[0]].mean() == pytest.approx(share, abs=0.1)
    kept = ~changed
    np.testing.assert_array_equal(after.reward[:, kept], before.reward[:2, kept])
    np.testing.assert_array_equal(after.terminated[:, kept], before.terminated[:2, kept])


def test_the_error_says_how_far_a_wrong_function_is_off() -> None:
    before = windows(seed=1)
    keys = jax.random.split(jax.random.key(3), before.reward.shape[1])
    error = returned(0.5, goals.near(0.05)).postprocess(None, before, Context(keys))["error"]
    wanted = np.abs(-1.0 - before.reward[0]) / np.maximum(1, np.abs(before.reward[0]))
    np.testing.assert_allclose(error, np.where(before.valid[0], wanted, 0), atol=1e-5)


@pytest.mark.parametrize(
    "text, inside, beyond", [("near:0.5", 0.0, -1.0), ("within:5e-1", 1.0, 0.0)]
)
def test_the_forms_of_goal_reward(text: str, inside: float, beyond: float) -> None:
    function = goals.parse(text)
    at = jnp.zeros(3)
    for distance, pays in ((0.4, inside), (0.6, beyond)):
        reward, ends = function(at, at.at[1].set(distance))
        assert (float(reward), bool(ends)) == (pays, False)


@pytest.mark.parametrize("text", ["near", "near:", "near:0", "near:-1", "far:1", "near:nan", "1"])
def test_other_forms_of_goal_reward_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="goal_reward must be near:DISTANCE"):
        goals.parse(text)


def test_known_robots_and_mazes() -> None:
    paid = {}
    for name in ("FetchReach-v4", "PointMaze_UMaze-v3", "FetchPushDense-v1", "HandReach-v3"):
        function = goals.known(name)
        assert function is not None
        paid[name] = [float(function(jnp.zeros(2), jnp.array([x, 0.0]))[0]) for x in (0.04, 0.4)]
    assert paid.pop("FetchPushDense-v1") == pytest.approx([-0.04, -0.4])
    assert paid == {
        "FetchReach-v4": [0.0, -1.0],
        "PointMaze_UMaze-v3": [1.0, 1.0],
        "HandReach-v3": [-1.0, -1.0],
    }
    assert goals.known("PointMaze_UMazeDense-v3") is None
    assert goals.known("CartPole-v1") is None


REFUSED = {
    "dqn --env CartPole-v1 --her 0.8": "no achieved_goal",
    "ppo --env own:BitFlip --her 0.8": "learns from replayed transitions",
    "dqn --env own:BitFlip --her 0.8 --core gru": "without --core",
    "dqn --env own:BitFlip --her 0.8 --action-repeat 2": "--action-repeat",
    "dqn --env own:BitFlip --her 0.8 --frame-stack 2": "--frame-stack 1",
    "dqn --env own:BitFlip --her 0": "--her must be > 0",
    "dqn --env own:BitFlip --her-horizon 5": "--her",
    "dqn --env own:BitFlip --her 0.5 --goal-reward close:1": "near:DISTANCE or within:DISTANCE",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_replaced_is_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *command.split(), "--no-compile-cache"]) == 2
    assert REFUSED[command] in capsys.readouterr().err


def test_a_wrong_goal_reward_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train {FLIP} --goal-reward within:0.5 --total-env-steps 4000 --report-interval 500"
    assert cli.main([*words.split(), "--quiet", "--run-dir", str(tmp_path / "run")]) == 2
    assert "differ from the environment's by 1 on average" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints").is_dir(), "what was learnt is kept"


def test_dqn_flips_bits_by_hindsight(tmp_path: Path) -> None:
    command = f"{FLIP} --total-env-steps 6000 --report-interval 2000 --evaluation-episodes 50"
    run_dir = runs.train(command, tmp_path / "run")
    assert runs.read_json(run_dir / "summary.json")["evaluation"]["info/success"] == 1.0
    assert runs.read_metrics(run_dir)[-1][REWARD_ERROR] == 0.0


EXACT = f"{FLIP} --report-interval 512 --evaluation-episodes 0 --checkpoint-replay"


@pytest.mark.case
def test_a_resumed_run_replaces_the_same_goals(tmp_path: Path) -> None:
    whole = runs.train(f"{EXACT} --total-env-steps 2048", tmp_path / "whole")
    parts = runs.train(f"{EXACT} --total-env-steps 1024", tmp_path / "parts")
    again = f"resume {parts} --env own:BitFlip --total-env-steps 2048 --quiet"
    assert cli.main(again.split()) == 0
    assert runs.untimed(parts) == runs.untimed(whole)


@pytest.mark.case
def test_members_replace_goals_as_lone_runs_do(tmp_path: Path) -> None:
    alone = runs.train(f"{EXACT} --total-env-steps 1024 --seed 1", tmp_path / "alone")
    both = runs.train(f"{EXACT} --total-env-steps 1024 --seeds 2", tmp_path / "both")
    member = runs.untimed(both / "members" / "001")
    for line, other in zip(member, runs.untimed(alone), strict=True):
        assert line["loss/q"] == pytest.approx(other["loss/q"], rel=1e-4)


@pytest.mark.case
def test_eight_devices_replace_the_same_goals_as_one(tmp_path: Path) -> None:
    words = f"{EXACT} --total-env-steps 1024"
    one = runs.untimed(runs.train(words, tmp_path / "one"))
    eight = runs.untimed(
        runs.train(words.replace("--num-devices 1", "--num-devices 8"), tmp_path / "eight")
    )
    for line, other in zip(eight, one, strict=True):
        assert line["loss/q"] == pytest.approx(other["loss/q"], rel=1e-4)
