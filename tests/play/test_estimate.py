"""Estimates of a policy from others' experience."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact import solve
from jaxrl_dist.play.fitted import Values
from jaxrl_dist.play.importance import Episodes

DISCOUNT = 0.9


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return runpy.run_path(str(runs.ROOT / "benchmarks" / "estimates.py"))


def episodes() -> tuple[Dataset, np.ndarray, Values]:
    """Episodes of several lengths, one cut, one with an action that the target never takes,
    and values of two fits.
    """
    rng = np.random.default_rng(0)
    parts = [
        {
            "obs": rng.normal(size=(length + 1, 2)).astype(np.float32),
            "action": rng.integers(0, 2, length),
            "reward": rng.normal(size=length),
            "terminated": number != 1,
            "log_prob": np.log(rng.uniform(0.2, 1, length)),
        }
        for number, length in enumerate((3, 5, 1, 4))
    ]
    data = Dataset.from_episodes(parts)
    log_prob = np.log(rng.uniform(0.2, 1, len(data.reward)))
    log_prob[-3] = -np.inf
    return data, log_prob, Values(*rng.normal(size=(2, 2, len(data.reward))))


def test_estimates_are_those_of_the_papers() -> None:
    data, log_prob, values = episodes()
    record = Episodes(data, DISCOUNT, log_prob)
    starts, whole, ratios, decided, robust = [0, 4, 10, 12], [], [], [], []
    assert data.log_prob is not None
    step_ratio = np.zeros((5, 4, 2))  # per step and episode: the ratio so far, and the reward
    for episode, (start, length) in enumerate(zip(starts, (3, 5, 1, 4), strict=True)):
        ratio, total, per_decision, dr = 1.0, 0.0, 0.0, values.state[:, start].copy()
        for t in range(5):
            if t < length:
                row = start + t
                ratio *= np.exp(log_prob[row] - data.log_prob[row])
                total += DISCOUNT**t * data.reward[row]
                per_decision += DISCOUNT**t * ratio * data.reward[row]
                following = 0.0 if data.terminated[row] else values.state[:, row + 1]
                error = data.reward[row] + DISCOUNT * following - values.action[:, row]
                dr += DISCOUNT**t * ratio * error
            step_ratio[t, episode] = ratio, data.reward[start + t] if t < length else 0.0
        whole.append(total), ratios.append(ratio), decided.append(per_decision), robust.append(dr)
    expected = {
        "behaviour": np.mean(whole),
        "is": np.mean(np.multiply(ratios, whole)),
        "wis": np.sum(np.multiply(ratios, whole)) / np.sum(ratios),
        "pdis": np.mean(decided),
        "pdwis": sum(
            DISCOUNT**t * np.average(x[:, 1], weights=x[:, 0]) for t, x in enumerate(step_ratio)
        ),
    }
    actual = {name: record.estimate(name)[0] for name in expected}
    assert actual == pytest.approx(expected, rel=1e-6) and ratios[-1] == 0
    np.testing.assert_allclose(record.doubly_robust(values), np.transpose(robust), rtol=1e-6)
    assert record.effective() == pytest.approx(
        np.sum(ratios) ** 2 / np.sum(np.square(ratios)), rel=1e-6
    )


def test_the_influence_of_an_episode_is_the_change_by_one_more() -> None:
    data, log_prob, _ = episodes()
    rows, many = np.split(np.arange(len(log_prob)), [4, 10, 12]), np.tile(np.arange(4), 500)
    for name in ("behaviour", "is", "wis", "pdis", "pdwis"):
        value, influence = Episodes(data, DISCOUNT, log_prob).estimate(name)
        for episode in range(4):
            chosen = np.append(many, episode)
            of_chosen = log_prob[np.concatenate([rows[i] for i in chosen])]
            more, _ = Episodes(data.episodes(chosen), DISCOUNT, of_chosen).estimate(name)
            assert (more - value) * len(chosen) == pytest.approx(
                influence[episode], rel=0.01, abs=1e-4
            )


def test_the_truth_of_a_linear_solve_lies_in_every_interval(tables: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    table, target = tables["Table"].random(rng, 3, 2, 0.3), rng.dirichlet(np.ones(2), 3)
    data = tables["play"](table, rng, 0.5 * target + 0.25, 1000)
    sizes: Any = {"hidden_sizes": (8,), "updates": 800, "refits": 10}
    made = jaxrl_dist.estimate(tables["policy_of"](target, DISCOUNT), data, sampled=True, **sizes)
    truth = solve.start_value(table, solve.values(table, target, DISCOUNT))
    for name in ("is", "pdis", "wis", "pdwis", "fqe", "dr"):
        low, high = made.estimates[name].interval
        assert low <= truth <= high and high - low < 0.3 * truth
    assert made.estimates["fqe"].value == pytest.approx(truth, rel=0.05)
    json.dumps(made.summary(), allow_nan=False)


def test_ratios_need_a_behaviour_that_might_have_acted_otherwise(tmp_path: Path) -> None:
    """A repeated action of ez-greedy has all the probability:
    what the target would do instead was never tried.
    """
    flags = f"dqn --env CartPole-v1 {runs.TINY} --epsilon-start 1 --epsilon-end 1"
    few: dict[str, Any] = {"sampled": True, "updates": 1, "refits": 2, "hidden_sizes": (4,)}
    target, repeats = (
        jaxrl_dist.load_policy(runs.finished(f"{flags} --{x}ez-greedy")) for x in ("no-", "")
    )
    made = jaxrl_dist.estimate(target, jaxrl_dist.record(repeats, 400, num_envs=4), **few)
    assert [*made.estimates] == ["behaviour", "fqe"]
    assert (
        "the behaviour had no choice in" in made.assumptions[0]
        and "`record --random-share`" in made.assumptions[0]
    )
    mixed = jaxrl_dist.estimate(
        target, jaxrl_dist.record(repeats, 400, num_envs=4, random_share=0.5), **few
    )
    assert [*mixed.estimates] == ["behaviour", "is", "pdis", "wis", "pdwis", "fqe", "dr"]


def test_a_search_is_not_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = (
        str(runs.finished(f"alphazero --env CartPole-v1 {runs.TINY}")),
        str(tmp_path / "data"),
    )
    jaxrl_dist.record(jaxrl_dist.load_policy(run, num_simulations=0), 50, num_envs=4).save(out)
    few = ["--updates", "2", "--refits", "2", "--hidden-sizes", "8"]
    assert cli.main(["estimate", run, "--data", out, *few]) == 2
    assert (
        "this policy searches before it acts, which an estimate does not" in capsys.readouterr().err
    )
    assert cli.main(["estimate", run, "--data", out, *few, "--num-simulations", "0"]) == 0


def test_the_command_says_what_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(runs.finished(f"ppo --env CartPole-v1 {runs.TINY}")), str(tmp_path / "data")
    assert (
        cli.main(
            ["record", run, "-o", out, "--steps", "100", "--num-envs", "4", "--random-share", "0.5"]
        )
        == 0
    )
    few = ["--updates", "2", "--refits", "2", "--hidden-sizes", "8"]
    capsys.readouterr()
    assert cli.main(["estimate", run, "--data", out, *few, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [*printed["estimates"]] == ["behaviour", "fqe"] and "deterministic" in printed[
        "assumptions"
    ][0]
    assert cli.main(["estimate", run, "--data", out, *few, "--evaluation-policy", "sampled"]) == 0
    shown = capsys.readouterr().out
    assert (
        "discount 0.99" in shown
        and "doubly robust" in shown
        and "assumptions: the probabilities are stored" in shown
    )
    refused = {
        ("estimate",): "which run, and from which data set? As in",
        ("estimate", run): "from which data set? As in",
        ("estimate", run, "--data", str(tmp_path)): "is not a data set",
        ("estimate", run, "--data", out, "--discount", "2"): "--discount",
    }
    for words, message in refused.items():
        assert cli.main(list(words)) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_actions_that_last_for_several_steps_are_refused(tmp_path: Path) -> None:
    """Their probability is not a function of the observation."""
    data, _, _ = episodes()
    obs = np.zeros((len(data.reward), 4), np.float32)
    data = Dataset.of_rows(
        obs, data.action, data.reward, data.terminated, data.valid, log_prob=data.log_prob
    )
    run = runs.finished(f"dqn --env CartPole-v1 {runs.TINY} --ez-greedy --learning-starts 100")
    with pytest.raises(ConfigError, match="evaluation_policy greedy"):
        jaxrl_dist.estimate(run, data, sampled=True)
    assert "fqe" in jaxrl_dist.estimate(run, data, updates=2, refits=2, hidden_sizes=(4,)).estimates


def test_time_limits_leave_no_value_without_a_discount(tables: dict[str, Any]) -> None:
    data, _, _ = episodes()
    policy = tables["policy_of"](np.full((2, 2), 0.5), 1.0)
    made = jaxrl_dist.estimate(policy, data, sampled=True)
    assert (
        "fqe" not in made.estimates and "with discount 1 fqe has no values" in made.assumptions[-1]
    )
    with pytest.raises(ConfigError, match="actions Discrete"):
        jaxrl_dist.estimate(tables["policy_of"](np.full((2, 3), 1 / 3), 0.9), data)
