"""Selection: population-based training and successive halving, alone and within runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import jaxrl_dist
from jaxrl_dist import Train
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.plans.evolve import Hyper, Selection, halving, pbt, perturbed
from jaxrl_dist.run.storage import read_json
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import run as training_run
from jaxrl_dist.training.setup import prepare


def config(run_dir: pathlib.Path | None = None, *, total: int = 640, **values: Any) -> Train[Any]:
    algorithm = PPO(hidden_sizes=(4,), num_epochs=1, num_minibatches=2)
    sizes = {
        "num_envs": 4,
        "rollout_length": 16,
        "report_interval": 64,
        "evaluation_episodes": 0,
        "num_devices": 1,
    }
    where = None if run_dir is None else str(run_dir)
    return Train(
        algorithm, "CartPole-v1", total_env_steps=total, run_dir=where, **{**sizes, **values}
    )


# --- The functions --------------------------------------------------------------------------------


def test_the_worst_copy_the_best_and_are_perturbed() -> None:
    scores = np.array([5.0, 1.0, 3.0, -np.inf, 9.0, 4.0, 2.0, 8.0, 7.0, 6.0])
    hyper = {"learning_rate": np.arange(1.0, 11.0), "discount": np.full(10, 0.99)}
    for seed in range(20):
        source, new = pbt(np.random.default_rng(seed), scores, hyper)
        copied = np.flatnonzero(source != np.arange(10))
        assert set(copied) == {1, 3} and set(source[copied]) <= {4, 7}
        for name, values in hyper.items():
            assert np.array_equal(np.delete(new[name], copied), np.delete(values, copied))
        for k in copied:
            ratio = new["learning_rate"][k] / hyper["learning_rate"][source[k]]
            assert min(abs(ratio - 0.8), abs(ratio - 1.25)) < 1e-12
            horizon = (1 - new["discount"][k]) / 0.01
            assert min(abs(horizon - 0.8), abs(horizon - 1.25)) < 1e-9


def test_equal_scores_replace_nothing() -> None:
    source, _ = pbt(np.random.default_rng(0), np.full(4, -np.inf), {})
    assert np.array_equal(source, np.arange(4))


def test_perturbed_probabilities_stay_below_one() -> None:
    rng, x = np.random.default_rng(0), np.full(1000, 0.9)
    for _ in range(20):
        x = perturbed(rng, x)
    assert (x < 1).all() and (x > 0).all()


def theta_after(use: Any, steps: int = 200) -> float:
    """Best true value of the toy of Jaderberg et al. (2017), section 4.1, with two workers.

    The value is ``1.2 - |theta|^2``. A worker climbs ``1.2 - h0 theta0^2 - h1 theta1^2`` by
    gradient steps of 0.01, and each has hyperparameters that neglect one of the two parameters.
    Only ``theta`` is copied.
    """
    theta, h = np.array([[0.9, 0.9], [0.9, 0.8]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    for step in range(steps):
        theta = theta - 0.01 * 2 * h * theta
        if use is not None and step % 4 == 3:
            scores = 1.2 - (theta**2).sum(axis=1)
            theta = theta[use(np.random.default_rng(step), scores, {})[0]]
    return float((1.2 - (theta**2).sum(axis=1)).max())


def test_the_toy_of_the_paper() -> None:
    assert theta_after(None) < 0.45
    assert theta_after(pbt, 1000) > 1.15 > 0.45 > theta_after(None, 1000)


def test_halving_keeps_the_best_of_every_bracket() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        truth = rng.normal(size=int(rng.integers(2, 40)))
        members, scores = np.arange(len(truth)), truth
        while len(members) > 1:
            source, hyper = halving(rng, scores, {"x": members.astype(float)})
            assert len(source) == -(-len(members) // 2)
            members, scores = members[source], scores[source]
            assert np.array_equal(hyper["x"], members)
        assert members[0] == truth.argmax()


def test_when_to_select() -> None:
    every, rungs = Selection(pbt, 0, 4), Selection(halving, 0, 4, doubles=True)
    assert [x for x in range(1, 40) if every.due(x - 1, x)] == [4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert [x for x in range(1, 40) if rungs.due(x - 1, x)] == [4, 8, 16, 32]
    # As after a resume from iteration 3 with a report every two iterations, or every six:
    assert [x for x in range(5, 40, 2) if rungs.due(x - 2, x)] == [5, 9, 17, 33]
    assert [x for x in range(9, 40, 6) if every.due(x - 6, x)] == [9, 15, 21, 27, 33, 39]
    assert [x for x in range(9, 40, 6) if rungs.due(x - 6, x)] == [9, 21, 33]


def test_each_selection_of_a_run_draws_its_own_numbers() -> None:
    """So a resumed run draws them again."""
    drawn = [
        Selection(pbt, seed, 4).rng(iteration).random()
        for seed, iteration in ((0, 4), (0, 8), (1, 4))
    ]
    assert len(set(drawn)) == 3 and Selection(pbt, 0, 4).rng(4).random() == drawn[0]


# --- In runs --------------------------------------------------------------------------------------


def lines(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "time" not in name} for line in found]


def test_population_based_training_goes_on_as_if_never_stopped(tmp_path: pathlib.Path) -> None:
    """Bit for bit, lineage and numbers of updates included,
    which differ here and are copied with the parameters.

    Members record whose parameters they took, and their hyperparameters.
    """
    asked: dict[str, Any] = {
        "vary": {"learning_rate": "1e-1,1e-3,1e-4"},
        "evolve": "pbt",
        "evolve_interval": 128,
    }
    whole, parts = (
        config(tmp_path / x, checkpoint_interval=64, **asked) for x in ("whole", "parts")
    )
    algorithm = dataclasses.replace(whole.algorithm, num_epochs=4, target_kl=1e-4)
    list(jaxrl_dist.train(dataclasses.replace(whole, algorithm=algorithm)))
    reports = jaxrl_dist.train(dataclasses.replace(parts, algorithm=algorithm))
    while next(reports).iteration < 3 * 4:  # after a selection
        pass
    reports.close()  # type: ignore[attr-defined]
    list(jaxrl_dist.resume(tmp_path / "parts"))
    whole, parts = (
        read_json(tmp_path / x / "population.json")["members"] for x in ("whole", "parts")
    )
    assert whole == parts and any(row["lineage"] for row in whole)
    for row in whole:
        written = lines(tmp_path / "whole" / "members" / row["member"])
        assert written == lines(tmp_path / "parts" / "members" / row["member"])
        rates = [line["hyper/learning_rate"] for line in written]
        copies = [line for line in written if line["population/parent"] != int(row["member"])]
        assert [line["iteration"] for line in copies] == [x["iteration"] for x in row["lineage"]]
        assert len(set(rates)) <= 1 + len(copies)


def test_when_members_are_selected_does_not_depend_on_the_total() -> None:
    for evolve, interval in (("pbt", 20_000), ("halving", 40_000)):
        for total in (10**5, 10**6):
            run = prepare(config(seeds=2, evolve=evolve, total=total))
            assert run.config.evolve_interval == interval
            assert training_run.selection(run.config, run.session).interval == round(interval / 64)


def test_a_stored_interval_ends_with_its_selection() -> None:
    """As in `train --config RUN --evolve None`, where only the file names an interval."""
    fields = {"env": "CartPole-v1", "seeds": 2, "evolve": None, "evolve_interval": 20_000}
    assert resolved(Train("ppo"), fields, ["evolve_interval"])[0].evolve_interval is None
    with pytest.raises(ConfigError, match="evolve_interval does nothing without evolve"):
        resolved(Train("ppo"), fields)


@pytest.mark.case  # test_population_based_training_goes_on_as_if_never_stopped
@pytest.mark.parametrize("evolve", ["pbt", "halving"])
def test_stop_at_a_selection_does_not_change_it(evolve: str, tmp_path: pathlib.Path) -> None:
    asked: dict[str, Any] = {
        "seeds": 2,
        "vary": {"learning_rate": "1e-1,1e-4"},
        "total": 192,
        "evolve_interval": 64,
    }
    list(jaxrl_dist.train(config(tmp_path / "whole", evolve=evolve, **asked)))
    list(prepare(config(tmp_path / "parts", evolve=evolve, **asked)).reports(stop=lambda: True))
    list(jaxrl_dist.resume(tmp_path / "parts"))
    whole, parts = (
        read_json(tmp_path / x / "population.json")["members"] for x in ("whole", "parts")
    )
    assert whole == parts and any(row["lineage"] or row["status"] == "halved" for row in whole)


@pytest.mark.case  # test_population_based_training_goes_on_as_if_never_stopped
def test_a_stop_between_two_selections_is_not_a_copy(tmp_path: pathlib.Path) -> None:
    """Neither in the lineage nor in the members' metrics, before and after the resume."""
    asked: dict[str, Any] = {
        "seeds": 2,
        "vary": {"learning_rate": "1e-1,1e-4"},
        "report_interval": 128,
    }
    asked |= {"evolve": "pbt", "evolve_interval": 128, "plan": "synchronous"}
    metrics = tmp_path / "members" / "000" / "metrics.jsonl"
    run = prepare(config(tmp_path, **asked))
    *_, stopped = run.reports(stop=lambda: metrics.exists() and metrics.stat().st_size > 0)
    # a selection comes after every second one
    assert [member.iteration for member in stopped.members] == [3] * 4
    list(jaxrl_dist.resume(tmp_path))
    rows = read_json(tmp_path / "population.json")["members"]
    copies = [copy["iteration"] for row in rows for copy in row["lineage"]]
    assert 2 in copies and all(iteration % 2 == 0 for iteration in copies)
    for row in rows:
        written = lines(tmp_path / "members" / row["member"])
        parents = {line["iteration"]: line["population/parent"] for line in written}
        copied = [
            iteration for iteration, parent in parents.items() if parent != int(row["member"])
        ]
        assert copied == [copy["iteration"] for copy in row["lineage"]]


def test_a_copy_takes_its_parents_value_for_an_invalid_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def evolve(
        rng: np.random.Generator, scores: np.ndarray, hyper: Hyper
    ) -> tuple[np.ndarray, Hyper]:
        return np.zeros(4, int), {"learning_rate": np.array([0.1, 0.25, 0.5, -1.0])}

    monkeypatch.setattr(training_run, "pbt", evolve)
    asked = config(
        seeds=2, vary={"learning_rate": "1e-1,1e-4"}, evolve="pbt", evolve_interval=64, total=64
    )
    *_, last = jaxrl_dist.train(asked)
    assert [member.metrics["hyper/learning_rate"] for member in last.members] == [
        0.1,
        0.25,
        0.5,
        0.1,
    ]


@pytest.mark.filterwarnings("ignore:member 00. has ended")
def test_no_member_becomes_one_that_has_diverged(tmp_path: pathlib.Path) -> None:
    """The second member of each seed diverges in the first iteration, in which it acts,
    and scores, as the first.
    """
    asked = config(
        tmp_path,
        seeds=2,
        vary={"learning_rate": "1e-3,1e30"},
        evolve="pbt",
        evolve_interval=64,
        total=320,
    )
    list(
        jaxrl_dist.train(
            dataclasses.replace(asked, algorithm=dataclasses.replace(asked.algorithm, num_epochs=8))
        )
    )
    rows = read_json(tmp_path / "population.json")["members"]
    assert [row["status"] for row in rows] == ["done", "diverged"] * 2
    assert {copy["parent"] for row in rows for copy in row["lineage"]} <= {"000", "002"}


@pytest.mark.case  # test_population_based_training_goes_on_as_if_never_stopped
def test_a_copy_uses_its_new_hyperparameters_everywhere(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acted, of_member = list[dict[str, float]](), Evaluator.of_member

    def watched(self: Evaluator, seed: int, hyper: Any, **options: Any) -> Evaluator:
        acted.append(dict(hyper))
        return of_member(self, seed, hyper, **options)

    monkeypatch.setattr(Evaluator, "of_member", watched)
    algorithm = DQN(hidden_sizes=(4,), learning_starts=64, batch_size=8, replay_capacity=1024)
    vary = {"discount": [0.5, 0.97], "epsilon_end": [0.1, 0.4]}
    asked = config(
        tmp_path, total=1280, vary=vary, evolve="pbt", evolve_interval=64, exact=True, seed=1
    )
    asked = dataclasses.replace(
        asked, algorithm=algorithm, env="gymnax:FrozenLake-misc", evaluation_policy="sampled"
    )
    *_, last = jaxrl_dist.train(dataclasses.replace(asked, evaluation_episodes=2))
    now = [{name: report.metrics[f"hyper/{name}"] for name in vary} for report in last.members]
    # one was copied
    assert [tuple(x.values()) for x in now] != [*itertools.product(*vary.values())]
    assert acted[-4:] == now
    for member, report in enumerate(last.members):
        policy = jaxrl_dist.load_policy(tmp_path / "members" / f"{member:03d}")
        assert {name: getattr(policy.config.algorithm, name) for name in vary} == now[member]
        truth = jaxrl_dist.exact.measure(policy).numbers
        assert report.metrics["exact/value_optimal"] == pytest.approx(truth["value_optimal"])


@pytest.mark.case  # test_population_based_training_goes_on_as_if_never_stopped
@pytest.mark.parametrize("plan", ["on_device", "synchronous"])
def test_halving_ends_the_worse_half_again_and_again(plan: str, tmp_path: pathlib.Path) -> None:
    asked = config(tmp_path / "run", seeds=5, evolve="halving", evolve_interval=128, plan=plan)
    *_, last = jaxrl_dist.train(asked)
    rows = read_json(tmp_path / "run" / "population.json")["members"]
    ended = sorted(row["iteration"] for row in rows if row["status"] == "halved")
    assert ended == [2, 2, 4, 8]
    (winner,) = (row for row in rows if row["status"] == "done")
    assert winner["env_steps"] >= 640 and last.metrics["population/done"] == 1
    for member in sorted(last.members, key=lambda member: member.iteration)[:-1]:
        # it holds no state of all members
        with pytest.raises(RuntimeError, match="this report is past"):
            member.checkpoint()
    for row in rows:
        there = tmp_path / "run" / "members" / row["member"]
        assert jaxrl_dist.load_policy(there) is not None
        reported = [json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines()]
        assert all(line["time/env_steps_per_second"] < 1e8 for line in reported)
        assert all(
            value >= 0
            for line in reported
            for name, value in line.items()
            if name.startswith("time/")
        )
    with pytest.raises(ConfigError, match="have ended"):
        jaxrl_dist.resume(tmp_path / "run")


@pytest.mark.slow
def test_a_halved_population_goes_on_with_those_that_are_left(tmp_path: pathlib.Path) -> None:
    asked: dict[str, Any] = {
        "seeds": 4,
        "evolve": "halving",
        "evolve_interval": 128,
        "checkpoint_interval": 64,
    }
    list(jaxrl_dist.train(config(tmp_path / "whole", **asked)))
    reports = jaxrl_dist.train(config(tmp_path / "parts", **asked))
    for _ in range(3):  # after the first rung
        next(reports)
    reports.close()  # type: ignore[attr-defined]
    list(jaxrl_dist.resume(tmp_path / "parts"))
    whole, parts = (
        read_json(tmp_path / x / "population.json")["members"] for x in ("whole", "parts")
    )
    assert whole == parts
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


@pytest.mark.case  # test_a_halved_population_goes_on_over_several_devices
def test_the_last_member_goes_on_with_its_own_hyperparameters(tmp_path: pathlib.Path) -> None:
    """Not with those of the first one, which hardly learns."""
    rates = {"learning_rate": "1e-9,1e-2"}
    asked = config(
        tmp_path, plan="synchronous", seed=5, vary=rates, evolve="halving", evolve_interval=128
    )
    reports = jaxrl_dist.train(dataclasses.replace(asked, checkpoint_interval=64))
    for _ in range(3):  # after the rung
        next(reports)
    reports.close()  # type: ignore[attr-defined]
    assert [row["status"] for row in read_json(tmp_path / "population.json")["members"]] == [
        "halved",
        "training",
    ]
    policy = tmp_path / "members" / "001"
    before = jaxrl_dist.load_policy(policy).variables.params
    list(jaxrl_dist.resume(tmp_path))
    moved = jax.tree.map(
        lambda x, y: np.abs(x - y).max(), before, jaxrl_dist.load_policy(policy).variables.params
    )
    assert max(jax.tree.leaves(moved)) > 1e-2


@pytest.mark.case  # test_population_based_training_goes_on_as_if_never_stopped
@pytest.mark.parametrize("plan", ["on_device", "synchronous"])
def test_a_halved_population_goes_on_over_several_devices(
    plan: str, tmp_path: pathlib.Path
) -> None:
    asked = config(
        tmp_path, seeds=4, num_devices=4, plan=plan, evolve="halving", evolve_interval=128
    )
    reports = jaxrl_dist.train(dataclasses.replace(asked, checkpoint_interval=64))
    for _ in range(3):  # after the first rung
        next(reports)
    reports.close()  # type: ignore[attr-defined]
    list(jaxrl_dist.resume(tmp_path))
    statuses = [row["status"] for row in read_json(tmp_path / "population.json")["members"]]
    assert sorted(statuses) == ["done", "halved", "halved", "halved"]


@pytest.mark.slow
def test_population_based_training_finds_the_learning_rate(optimized: None) -> None:
    """PPO learns CartPole in 150,000 env steps with 1e-3, and not with 1, 1e-5 or 3e-5:
    it starts at the last two.
    """
    sizes: dict[str, Any] = {
        "total": 150_000,
        "num_envs": 8,
        "rollout_length": 32,
        "report_interval": 1024,
    }

    def learned(rates: list[float], **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Of each member: the mean return in the last quarter of the run, and the last step
        size.
        """
        asked = config(vary={"learning_rate": rates}, **sizes, **options)
        asked = dataclasses.replace(
            asked, algorithm=PPO(hidden_sizes=(16,), num_epochs=4, num_minibatches=4)
        )
        reports = list(jaxrl_dist.train(asked))
        last = [
            [x.metrics["episode/return"] for x in report.members]
            for report in reports[-len(reports) // 4 :]
        ]
        chosen = [
            x.metrics.get("hyper/learning_rate", rate)
            for x, rate in zip(reports[-1].members, rates, strict=True)
        ]
        return np.nanmean(np.array(last, float), axis=0), np.array(chosen)

    fixed, _ = learned([1e-5, 3e-5, 1.0, 1e-3])
    assert max(fixed[:3]) < 100 and fixed[3] > 300
    found, rates = learned(list(np.geomspace(1e-5, 3e-5, 10)), evolve="pbt", evolve_interval=1024)
    assert np.median(found) > 200 and 1e-4 < np.median(rates) < 1e-2


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"evolve": "pbt"}, "evolve does nothing without members"),
        ({"evolve_interval": 100, "seeds": 2}, "evolve_interval does nothing without evolve"),
        (
            {"evolve": "pbt", "vary": {"num_epochs": "1,2"}},
            "each value of num_epochs needs its own",
        ),
        (
            {"evolve": "pbt", "seeds": 2, "plan": "asynchronous"},
            "evolve needs plan on_device or synchronous; under",
        ),
    ],
)
def test_refusals(asked: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        jaxrl_dist.train(config(**asked))
    assert message in str(error.value)
