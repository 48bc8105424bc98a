"""Populations: members are their lone runs, stop and go on together,
and leave complete run directories.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import probes
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import Train, preset
from jaxrl_dist.actors.evaluate import Evaluation
from jaxrl_dist.algorithms import ALGORITHMS, config_class
from jaxrl_dist.algorithms.a2c import A2C
from jaxrl_dist.algorithms.appo import APPO
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.commands import request
from jaxrl_dist.commands.plot.reading import with_members
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import (
    CheckpointError,
    ConfigError,
    ConfigWarning,
    DivergedError,
    FileWarning,
)
from jaxrl_dist.plans import compiled
from jaxrl_dist.plans import population as populations
from jaxrl_dist.plans.devices import divide_cpu, undivided
from jaxrl_dist.plans.synchronous import HostPopulation
from jaxrl_dist.run import checkpoint
from jaxrl_dist.run.storage import read_json
from jaxrl_dist.settings.members import members, number_of_members, programs
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import setup
from jaxrl_dist.training.job import make_job
from jaxrl_dist.training.joining import join_reports
from jaxrl_dist.training.rows import Row, read_rows, refill, scored
from jaxrl_dist.training.setup import prepare
from jaxrl_dist.training.tables import settings, table, write_results
from jaxrl_dist.types import Report

SMALL = {
    "num_envs": 4,
    "rollout_length": 16,
    "report_interval": 128,
    "evaluation_episodes": 4,
    "num_devices": 1,
}


def config(run_dir: pathlib.Path | None = None, *, total: int = 600, **values: Any) -> Train[Any]:
    algorithm = PPO(hidden_sizes=(4,), num_epochs=1, num_minibatches=2)
    where = None if run_dir is None else str(run_dir)
    return Train(algorithm, "CartPole-v1", total_env_steps=total, run_dir=where, **(SMALL | values))


def lines(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The reports of a run, without times."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "time" not in name} for line in found]


def check_lines(run_dir: pathlib.Path, expected: pathlib.Path) -> None:
    """Checks that two runs have reported the same, up to rounding."""
    here, there = lines(run_dir), lines(expected)
    assert [line["env_steps"] for line in here] == [line["env_steps"] for line in there]
    for one, other in zip(here, there, strict=True):
        assert {x for x in one if one[x] is None} == {x for x in other if other[x] is None}
        shown = [x for x in one if one[x] is not None]
        assert [one[x] for x in shown] == pytest.approx(
            [other[x] for x in shown], rel=1e-4, abs=1e-5
        )


@pytest.mark.case  # plans/test_on_device.py::test_members_of_a_population_are_their_lone_runs
def test_a_member_is_its_lone_run(tmp_path: pathlib.Path) -> None:
    """Its directory holds what a run of one seed with these hyperparameters would have written."""
    vary = {"learning_rate": [1e-3, 3e-4], "num_epochs": [1, 2]}
    *_, last = jaxrl_dist.train(config(tmp_path / "all", seeds=2, vary=vary, seed=5))
    assert len(last.members) == 8 == last.metrics["population/done"]
    assert last.env_steps == sum(member.env_steps for member in last.members)
    for number in (0, 7):  # of both programs
        there = tmp_path / "all" / "members" / f"{number:03d}"
        kept = read_json(there / "config.json")
        values = kept["hyperparameters"]
        assert kept["run"]["seed"] == 5 + number // 4 and kept["run"]["seeds"] == 1
        folder = tmp_path / f"alone{number}"
        algorithm = PPO(**{**values, "hidden_sizes": (4,)})
        alone = dataclasses.replace(config(folder, seed=5 + number // 4), algorithm=algorithm)
        list(jaxrl_dist.train(alone))
        check_lines(there, folder)
        assert jaxrl_dist.load_policy(there).evaluate(4).returns.shape == (4,)
    rows = (tmp_path / "all" / "results.csv").read_text().splitlines()
    assert (
        rows[0].startswith("member,seed,learning_rate,num_epochs,status,env_steps")
        and len(rows) == 9
    )
    assert all(",done," in row for row in rows[1:])


# plans/test_evolve.py::test_population_based_training_goes_on_as_if_never_stopped
@pytest.mark.case
def test_stopped_and_resumed_is_as_never_stopped(tmp_path: pathlib.Path) -> None:
    """Also where a member has lost its newest checkpoint: all go back to the one that they
    share.
    """
    asked: dict[str, Any] = {
        "seeds": 2,
        "vary": {"learning_rate": "1e-3,1e-4"},
        "checkpoint_interval": 128,
    }
    list(jaxrl_dist.train(config(tmp_path / "whole", **asked)))
    reports = jaxrl_dist.train(config(tmp_path / "parts", **asked))
    while next(reports).iteration < 4 * 6:
        pass
    reports.close()  # type: ignore[attr-defined]
    folders = sorted((tmp_path / "parts" / "members").iterdir())
    saved = sorted((folders[2] / "checkpoints").iterdir())
    shutil.rmtree(saved[-1])
    list(jaxrl_dist.resume(tmp_path / "parts"))
    for folder in folders:
        assert lines(folder) == lines(tmp_path / "whole" / "members" / folder.name)
        policies = [
            jaxrl_dist.load_policy(x / "members" / folder.name)
            for x in (tmp_path / "whole", tmp_path / "parts")
        ]
        one, other = (jax.tree.leaves(policy.variables) for policy in policies)
        assert all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    with pytest.raises(
        ConfigError,
        match=r"total_env_steps.*600",
    ):
        jaxrl_dist.resume(tmp_path / "parts")
    *_, last = jaxrl_dist.resume(tmp_path / "parts", total_env_steps=800)
    assert all(member.env_steps >= 800 for member in last.members)


@pytest.mark.case  # test_the_caller_may_leave_and_an_error_ends_all
def test_a_member_that_diverges_ends_alone(tmp_path: pathlib.Path) -> None:
    asked = config(
        tmp_path / "run", vary={"learning_rate": "1e-3,1e30"}, total=2000, evaluation_interval=128
    )
    with pytest.warns(
        FileWarning, match="member 001 has ended, but the others continue: training has diverged"
    ):
        *_, last = jaxrl_dist.train(asked)
    assert last.members[1].evaluation is not None  # which does not count
    rows = read_json(tmp_path / "run" / "population.json")["members"]
    assert [row["status"] for row in rows] == ["done", "diverged"]
    assert last.members[0].env_steps >= 2000 > rows[1]["env_steps"]
    assert last.evaluation == last.members[0].evaluation is not None


@pytest.mark.case  # training/test_resuming.py decides for each state of a member's files
def test_a_member_that_diverges_changes_no_count_of_a_resume(tmp_path: pathlib.Path) -> None:
    asked = config(tmp_path, vary={"learning_rate": "1e-3,1e30"}, total=64, evaluation_episodes=0)
    asked = dataclasses.replace(
        asked, algorithm=dataclasses.replace(asked.algorithm, num_epochs=16)
    )
    with pytest.warns(FileWarning, match="member 001 has ended"):
        *_, last = jaxrl_dist.train(asked)
    assert not (tmp_path / "members" / "001" / "summary.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no line is lost
        first, *_ = jaxrl_dist.resume(tmp_path, total_env_steps=200)
    assert (
        first.env_steps - last.env_steps == first.members[0].env_steps - last.members[0].env_steps
    )
    assert [row["status"] for row in read_json(tmp_path / "population.json")["members"]] == [
        "done",
        "diverged",
    ]
    scores = {
        x["values"]["learning_rate"]: x["seeds"]
        for x in read_json(tmp_path / "population.json")["settings"]
    }
    assert scores == {1e-3: 1, 1e30: 0}


@pytest.mark.case  # training/test_resuming.py decides for each state of a member's files
def test_population_restarts_after_a_kill_in_its_first_save(tmp_path: pathlib.Path) -> None:
    asked: dict[str, Any] = {"seeds": 2, "checkpoint_interval": 128}
    reports = jaxrl_dist.train(config(tmp_path / "parts", **asked))
    while next(reports).iteration < 2 * 8:
        pass
    reports.close()  # type: ignore[attr-defined]
    one, other = sorted((tmp_path / "parts" / "members").iterdir())
    shutil.rmtree(other / "checkpoints")
    first, *later = [path for path in (one / "checkpoints").iterdir() if path.name.isdecimal()]
    # a member has lost its checkpoints
    with pytest.raises(CheckpointError, match="share no intact checkpoint"):
        jaxrl_dist.resume(tmp_path / "parts")
    for path in later:
        shutil.rmtree(path)
    with pytest.warns(
        FileWarning, match="parts that train together saved their state, so they start again"
    ):
        list(jaxrl_dist.resume(tmp_path / "parts"))
    list(jaxrl_dist.train(config(tmp_path / "whole", **asked)))
    assert first and lines(other) == lines(tmp_path / "whole" / "members" / other.name)


@pytest.mark.case  # training/test_resuming.py decides for each state of a member's files
def test_a_damaged_checkpoint_costs_no_other_member_its_own(tmp_path: pathlib.Path) -> None:
    list(jaxrl_dist.train(config(tmp_path, seeds=2, total=128)))
    one, other = sorted((tmp_path / "members").iterdir())

    def damage(member: pathlib.Path) -> None:
        for path in checkpoint.saved(member):
            for file in path.rglob("*"):
                if file.is_file():
                    file.write_bytes(b"")

    damage(other)
    assert checkpoint.saved(other) and not checkpoint.progress(other)
    kept = checkpoint.saved(one)
    with pytest.raises(CheckpointError, match="share no intact checkpoint"):
        jaxrl_dist.resume(tmp_path, total_env_steps=300)
    assert checkpoint.saved(one) == kept and len(kept) == 1
    damage(one)
    errors = []
    for run_dir in (one, tmp_path):  # the population says the same as a single run
        with pytest.raises(CheckpointError, match=r"damaged|checksum|manifest") as error:
            jaxrl_dist.resume(run_dir, total_env_steps=300)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.case  # training/test_resuming.py decides for each state of a member's files
@pytest.mark.filterwarnings("ignore:member 000 has ended")
def test_others_resume_beside_a_diverged_member(tmp_path: pathlib.Path) -> None:
    asked = config(
        tmp_path, vary={"learning_rate": "1e30,1e-3"}, total=2000, checkpoint_interval=256
    )
    reports = jaxrl_dist.train(asked)
    while next(reports).env_steps < 2000:
        pass
    reports.close()  # type: ignore[attr-defined]
    shutil.rmtree(tmp_path / "members" / "000" / "checkpoints")
    kept = checkpoint.saved(tmp_path / "members" / "001")
    for path in kept[1:]:  # as after its first save
        shutil.rmtree(path)
    *_, last = jaxrl_dist.resume(tmp_path)
    assert [row["status"] for row in read_json(tmp_path / "population.json")["members"]] == [
        "diverged",
        "done",
    ]
    assert len(last.members) == 2 and lines(tmp_path / "members" / "001")[-1]["env_steps"] >= 2000


@pytest.mark.case  # training/test_resuming.py decides for each state of a member's files
def test_a_population_from_trained_variables_is_resumed_twice(tmp_path: pathlib.Path) -> None:
    list(jaxrl_dist.train(config(tmp_path / "first", total=64)))
    list(
        jaxrl_dist.train(
            config(tmp_path / "run", total=64, seeds=2, init_from=str(tmp_path / "first"))
        )
    )
    for total in (200, 300):
        *_, last = jaxrl_dist.resume(tmp_path / "run", total_env_steps=total)
        assert all(member.env_steps >= total for member in last.members)


def test_the_save_of_trained_members_is_said_once() -> None:
    said: list[int] = []
    begin = prepare(config(seeds=3)).once_trained([0, 1, 2], said.append)
    for ended_by in ("stop_at_return", "total_env_steps", "total_env_steps"):
        begin(report(1, ended_by=ended_by, wall_time_s=1.0))
    assert said == [3]


def test_damaged_results_are_not_half_read(tmp_path: pathlib.Path) -> None:
    run = prepare(config(tmp_path, seeds=2))
    kept = [dataclasses.asdict(row) | {"env_steps": 9} for row in run.rows]
    for damaged in ([kept[0]], [kept[0], {}], [kept[0], None]):
        (tmp_path / "population.json").write_text(json.dumps({"members": damaged}))
        assert read_rows(tmp_path, run.rows) == run.rows
    (tmp_path / "population.json").write_text(json.dumps({"members": kept}))
    assert [row.env_steps for row in read_rows(tmp_path, run.rows)] == [9, 9]


@pytest.mark.parametrize("name", ["members", "members/001"])
def test_no_link_in_the_place_of_members_is_followed(name: str, tmp_path: pathlib.Path) -> None:
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    (victim / "000").mkdir(parents=True)
    (run_dir / name).parent.mkdir(parents=True)
    (run_dir / name).symlink_to(victim)
    for folder in (run_dir, victim / "000"):
        (folder / "config.json").write_text("{}")
    for use in (
        partial(prepare, config(run_dir, seeds=2)),
        partial(jaxrl_dist.load_policy, run_dir),
        partial(checkpoint.load_variables, run_dir, {}),
        partial(with_members, [run_dir]),
    ):
        with pytest.raises(ConfigError, match=f"{name} is a link, and"):
            use()


@pytest.mark.filterwarnings("ignore:member 00. has ended")
def test_a_population_of_which_all_diverge_ends_with_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        DivergedError,
        match=r"2.*--learning-rate",
    ):
        list(jaxrl_dist.train(config(tmp_path / "run", seeds=2, vary={"learning_rate": "1e30"})))
    rows = read_json(tmp_path / "run" / "population.json")["members"]
    assert [row["status"] for row in rows] == ["diverged"] * 2


def report(iteration: int, **values: Any) -> Report:
    """A report of a member of which only these fields matter."""
    metrics = {"episode/return": None, "time/env_steps_per_second": 1.0, "time/compile_s": 2.0}
    known = {
        "env_steps": 10,
        "updates": 1,
        "iteration": iteration,
        "metrics": metrics,
        "checkpoint": lambda: None,
    }
    return Report(**{**known, "variables": lambda: iteration, **values})


def test_population_variables_are_those_of_the_best_member() -> None:
    rows = [
        Row("000", 0, {}, "done", episode_return=9.0),
        Row("001", 1, {}, "training", episode_return=5.0),
    ]
    rows += [Row("002", 2, {}, "training", episode_return=7.0)]
    newest = {number: report(number, wall_time_s=1.0) for number in range(3)}
    assert join_reports(newest, [1, 2], rows, [range(3)]).variables() == 0
    rows[0].status = "training"  # its arrays are those of a state that the program has left
    assert join_reports(newest, [1, 2], rows, [range(3)]).variables() == 2


def test_programs_that_run_one_after_another_add_up_their_times() -> None:
    rows = [Row(f"{number:03d}", number, {}, "done", env_steps=10) for number in range(4)]
    newest = {number: report(number, wall_time_s=float(number)) for number in range(4)}
    joined = join_reports(newest, [2, 3], rows, [[0, 1], [2, 3]])
    assert joined.wall_time_s == 1 + 3 and joined.metrics["time/compile_s"] == 2 + 2


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("sizes", [(5, 5, 5), (1, 7, 0)])
def test_an_evaluation_of_members_is_that_of_all_their_episodes(
    sizes: Sequence[int], sampled: bool
) -> None:
    """Of a policy, too; a member that has diverged does not count."""
    rng = np.random.default_rng(0)

    def played(size: int) -> Evaluation:
        info = {"episodes": rng.normal(size=size)}
        return Evaluation(
            rng.normal(3.0, 9.0, size), rng.integers(1, 99, size), min(size, 2), sampled, info=info
        )

    def whole(parts: Sequence[Evaluation]) -> dict[str, float | int]:
        returns, lengths, cut, _, _, _ = zip(*parts, strict=True)
        info = {"episodes": np.concatenate([part.info["episodes"] for part in parts])}
        every = Evaluation(
            np.concatenate(returns), np.concatenate(lengths), sum(cut), sampled, info=info
        )
        means = [x.mean() for x in returns if len(x)]
        return {
            **every.summary(),
            "members": len(means),
            "members_return_std": statistics.stdev(means),
        }

    parts = [(played(size), played(2 * size)) for size in sizes]
    summaries = [one._replace(policies={"prey": prey}).summary() for one, prey in parts]
    rows = [Row(f"{number:03d}", number, {}, "done") for number in range(3)] + [
        Row("003", 3, {}, "diverged")
    ]
    newest = {
        at: report(at, wall_time_s=1.0, evaluation=x)
        for at, x in enumerate([*summaries, summaries[0]])
    }
    every, prey = (whole(each) for each in zip(*parts, strict=True))
    expected = every | {f"prey/{name}": x for name, x in prey.items()}
    assert join_reports(newest, [0], rows, [range(4)]).evaluation == pytest.approx(
        expected, rel=1e-12
    )
    del newest[2]
    assert join_reports(newest, [0], rows, [range(4)]).evaluation is None, "until all have one"


def test_metrics_of_a_population_are_of_all_members() -> None:
    """Without those of members that have diverged: of one, its report has just said so."""
    rng = np.random.default_rng(0)
    joins = dict.fromkeys(
        (
            "episode/return",
            "loss/total",
            "info/updates",
            "info/episode/count",
            "hyper/discount",
            "async/lag",
        ),
        np.mean,
    )
    joins |= dict.fromkeys(
        ("episode/count", "a/episode/count", "a/updates", "async/restarts", "async/lag/2"), np.sum
    )
    joins |= {"episode/return_min": np.min, "a/episode/return_max": np.max, "async/lag_max": np.max}
    values, returns = {name: rng.normal(size=5) for name in joins}, rng.normal(size=5)
    rows = [
        Row(f"{at:03d}", at, {}, "done", episode_return=float(x)) for at, x in enumerate(returns)
    ]
    rows[4].status, rates = (
        "diverged",
        {"time/env_steps_per_second": 2.0, "time/updates_per_second": 5.0},
    )
    times = {**rates, "time/acting_s": 3.0}
    metrics = [{**times, **{name: float(x[at]) for name, x in values.items()}} for at in range(5)]
    metrics[0] |= {"population/parent": 2.0, "loss/total": None}
    newest = {
        at: report(at, wall_time_s=1.0, metrics=x, diverged=at == 3) for at, x in enumerate(metrics)
    }
    found = join_reports(newest, [0, 1], rows, [range(2), range(2, 5)], ("a",)).metrics
    for name, join in joins.items():
        assert found[name] == pytest.approx(join(values[name][name == "loss/total" : 3])), name
    best = np.sort(returns[:4])
    assert (
        found["population/return_best"] == best[3]
        and found["population/return_iqm"] == best[1:3].mean()
    )
    assert found["population/done"] == 4 and "population/parent" not in found
    assert {name: found[name] for name in rates} == {name: 2 * x for name, x in rates.items()}
    assert found["time/acting_s"] == 3 + 3


@pytest.mark.parametrize(
    "env, devices",
    [
        ("envpool:CartPole-v1", 1),
        pytest.param("gymnasium:CartPole-v1", 8, marks=pytest.mark.case),
        pytest.param("gymnasium:CartPole-v1", 1, marks=pytest.mark.case),
        pytest.param("gymnax:CartPole-v1", 2, marks=pytest.mark.case),
    ],
)
def test_members_on_the_host_are_their_lone_runs(
    env: str, devices: int, tmp_path: pathlib.Path
) -> None:
    """Their environments are one batch, and each has the seeds that it would have alone;
    so it is after a resume.
    """
    asked = dataclasses.replace(config(plan="synchronous", total=200, num_devices=devices), env=env)
    vary = {"learning_rate": [1e-3, 1e-4]}
    run = dataclasses.replace(asked, seeds=2, vary=vary, run_dir=str(tmp_path / "all"))
    algorithm = dataclasses.replace(asked.algorithm, learning_rate=1e-4)
    alone = dataclasses.replace(
        asked, algorithm=algorithm, seed=1, num_devices=1, run_dir=str(tmp_path / "alone")
    )
    threads = threading.enumerate()
    for train in (jaxrl_dist.train, partial(jaxrl_dist.resume, total_env_steps=400)):
        *_, last = train(run if train is jaxrl_dist.train else run.run_dir)
        *_, expected = train(alone if train is jaxrl_dist.train else alone.run_dir)
        probes.assert_close(last.members[3].variables(), expected.variables(), 1e-5)
        check_lines(tmp_path / "all" / "members" / "003", tmp_path / "alone")
        assert last.members[3].evaluation == expected.evaluation
    assert len({str(member.variables()) for member in last.members}) == 4 and set(
        threading.enumerate()
    ) <= set(threads)


@pytest.mark.case  # test_a_run_ends_with_the_return_that_it_is_to_reach
def test_under_other_plans_members_train_one_after_the_other(tmp_path: pathlib.Path) -> None:
    asked = config(
        tmp_path / "run",
        plan="asynchronous",
        num_actors=2,
        seeds=2,
        total=128,
        evaluation_episodes=0,
    )
    asked = dataclasses.replace(
        asked, algorithm=APPO(hidden_sizes=(4,), num_epochs=1, num_minibatches=2)
    )
    *_, last = jaxrl_dist.train(asked)
    assert [member.env_steps >= 128 for member in last.members] == [True, True]
    assert len(lines(tmp_path / "run" / "members" / "001")) >= 1


@pytest.mark.case  # test_population_based_training_goes_on_as_if_never_stopped
def test_the_caller_may_leave_and_an_error_ends_all(tmp_path: pathlib.Path) -> None:
    for report in jaxrl_dist.train(config(tmp_path / "run", seeds=3)):
        assert report.variables().params
        break
    for folder in (tmp_path / "run" / "members").iterdir():
        assert [path for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()]


def test_signal_stops_members_after_the_same_iteration(tmp_path: pathlib.Path) -> None:
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(bool(asked))
        return asked[-1]

    run = prepare(config(tmp_path, seeds=2, total=1000, plan="synchronous", evaluation_episodes=0))
    list(run.reports(stop=stop))
    assert [row.iteration for row in read_rows(tmp_path, prepare(config(seeds=2)).rows)] == [2, 2]


@pytest.mark.case  # test_signal_stops_members_after_the_same_iteration
def test_a_stop_begins_no_further_program(tmp_path: pathlib.Path) -> None:
    seen: list[Report] = []
    run = prepare(config(tmp_path, vary={"num_epochs": "1,2"}, total=300))
    for report in run.reports(stop=lambda: bool(seen)):
        seen.append(report)
    assert seen[-1].ended_by is None and not (tmp_path / "members" / "001").exists()
    *_, last = jaxrl_dist.resume(tmp_path)
    assert [member.env_steps >= 300 for member in last.members] == [True, True]


def test_members_begun_after_a_stop_use_init_from(tmp_path: pathlib.Path) -> None:
    first, whole, parts = (tmp_path / name for name in ("first", "whole", "parts"))
    list(jaxrl_dist.train(config(first, total=64)))
    asked: dict[str, Any] = {"vary": {"num_epochs": "1,2"}, "total": 200, "init_from": str(first)}
    list(jaxrl_dist.train(config(whole, **asked)))
    reports = jaxrl_dist.train(config(parts, **asked))
    next(reports)
    reports.close()  # type: ignore[attr-defined]
    assert not (parts / "members" / "001").exists()
    list(jaxrl_dist.resume(parts))
    here, there = (folder / "members" / "001" for folder in (parts, whole))
    assert lines(here) == lines(there)
    assert read_json(here / "config.json") == read_json(there / "config.json")
    shutil.rmtree(first)  # which those that have begun no longer need
    *_, last = jaxrl_dist.resume(parts, total_env_steps=300)
    assert [member.env_steps >= 300 for member in last.members] == [True, True]


def test_ended_members_count_in_resumed_reports(tmp_path: pathlib.Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    asked: dict[str, Any] = {"vary": {"num_epochs": "1,2"}, "total": 200}
    *_, expected = jaxrl_dist.train(config(whole, **asked))
    reports = jaxrl_dist.train(config(parts, **asked))
    while len(next(reports).members) < 2:  # the second program has begun
        pass
    reports.close()  # type: ignore[attr-defined]
    *_, last = jaxrl_dist.resume(parts)
    assert lines(parts) == lines(whole)
    summaries = [read_json(run_dir / "summary.json") for run_dir in (parts, whole)]
    one, other = (
        {name: x[name] for name in ("ended_by", "updates", "env_steps", "evaluation")}
        for x in summaries
    )
    assert one == other and one["evaluation"]["episodes"] == 8
    assert read_json(parts / "population.json") == read_json(whole / "population.json")
    probes.assert_close(last.variables(), expected.variables(), 0)
    assert last.checkpoint().env_steps == expected.checkpoint().env_steps


# which only the members have
@pytest.mark.filterwarnings("ignore:.*metrics.jsonl has lost the lines")
def test_the_results_of_members_that_are_resumed_one_by_one(tmp_path: pathlib.Path) -> None:
    """Those of the population follow when it is resumed, also if all members have ended."""

    def check(number: int) -> None:
        row = read_json(tmp_path / "population.json")["members"][number]
        folder = tmp_path / "members" / f"{number:03d}"
        reported, summary = lines(folder), read_json(folder / "summary.json")
        assert row["env_steps"] == summary["env_steps"] == reported[-1]["env_steps"]
        assert (
            row["episode_return"]
            == [x for line in reported if (x := line["episode/recent_return"]) is not None][-1]
        )
        assert row["evaluation_return"] == summary["evaluation"]["return_mean"]

    said: list[int] = []
    list(prepare(config(tmp_path, seeds=2, total=64)).reports(saving=said.append))
    assert said == [2]
    list(jaxrl_dist.resume(tmp_path / "members" / "000", total_env_steps=300))
    *_, last = jaxrl_dist.resume(tmp_path, total_env_steps=300)
    assert last.updates == sum(
        lines(tmp_path / "members" / name)[-1]["updates"] for name in ("000", "001")
    )
    check(0)
    list(jaxrl_dist.resume(tmp_path / "members" / "001", total_env_steps=500))
    list(jaxrl_dist.resume(tmp_path / "members" / "000", total_env_steps=500))
    with pytest.raises(ConfigError, match=r"all members of .* have ended"):
        jaxrl_dist.resume(tmp_path, total_env_steps=500)
    check(0)
    check(1)


def test_damaged_reports_of_a_member_do_not_count(tmp_path: pathlib.Path) -> None:
    whole = {
        "env_steps": 8,
        "updates": 1,
        "iteration": 2,
        "wall_time_s": 1.0,
        "episode/recent_return": 3.0,
    }
    row = Row("000", 0, {}, episode_return=1.0, evaluation_return=1.0)
    assert refill(row, tmp_path) is None and scored([row]) == ("evaluation_return", [1.0])
    damaged: list[Any] = [
        {},
        [],
        "x",
        None,
        {**whole, "updates": None},
        {**whole, "iteration": 1e400},
    ]
    later = {
        **whole,
        "env_steps": 16,
        "iteration": 4,
        "episode/recent_return": "x",
        "evaluation/return_mean": 5.0,
    }
    written = [json.dumps(line) for line in [*damaged, whole, later]]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*written, '{"env_st']))
    for summary in ("", "[]", "{}", '{"env_steps": 16, "updates": 1}'):
        (tmp_path / "summary.json").write_text(summary)
        last = refill(row, tmp_path)
        assert last is not None and (row.episode_return, row.evaluation_return) == (3.0, None)
        assert last.env_steps == 16
    assert (last := refill(row, tmp_path, until=3)) is not None and last.env_steps == 8


@pytest.mark.parametrize(
    "error, iterations",
    [
        (RuntimeError, 1),  # before the first report
        (KeyboardInterrupt, 3),  # between reports
        pytest.param(RuntimeError, 3, marks=pytest.mark.case),
        pytest.param(KeyboardInterrupt, 1, marks=pytest.mark.case),
    ],
)
def test_an_error_of_the_program_loses_no_member(
    iterations: int,
    error: type[BaseException],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iterate, done = HostPopulation._iterate, []

    def failing(self: HostPopulation, running: Any) -> int:
        if len(done) == iterations:
            raise error("simulated")
        done.append(running)
        return iterate(self, running)

    monkeypatch.setattr(HostPopulation, "_iterate", failing)
    with pytest.raises(error, match="simulated") as raised:
        list(jaxrl_dist.train(config(tmp_path / "run", seeds=3, plan="synchronous")))
    assert [" continues from " in note for note in raised.value.__notes__] == [True]
    for folder in (tmp_path / "run" / "members").iterdir():
        (saved,) = checkpoint.progress(folder)
        assert saved["iteration"] == iterations
    monkeypatch.undo()
    *_, last = jaxrl_dist.resume(tmp_path / "run")
    assert all(member.env_steps >= 600 for member in last.members)


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"vary": {"learning_rate": "1e-3,x"}}, "learning_rate: 'x' is not a number"),
        ({"vary": {"learning_rate": "1e-3,-1"}}, "learning_rate must be"),
        (
            {"vary": {"lerning_rate": "1"}},
            "vary lerning_rate: ppo has no such hyperparameter (did you mean 'learn",
        ),
        (
            {"vary": {"seed": "1,2"}},
            "vary seed does not work: members have the seeds seed, seed + 1 and so on; set their number with seeds",
        ),
        (
            {"vary": {"env": "a,b"}},
            "vary env does not work: all members share env; run the command once for each",
        ),
        ({"vary": {"num_epochs": "1,2.5"}}, "num_epochs: '2.5' is not a whole number"),
        ({"vary": {"hidden_sizes": "1,x"}}, "hidden_sizes: 'x' is not a whole number"),
        ({"seeds": 0}, "seeds must be >= 1"),
        ({"seed": 2**31 - 2, "seeds": 3}, "seed must be"),
        ({"zip": True}, "zip does nothing without vary"),
        (
            {"vary": {"learning_rate": "1,2", "discount": "0.9"}, "zip": True},
            "vary names 2 of learning_rate, 1 of d",
        ),
        ({"vary": {"learning_rate": "1e-3,0.001"}}, "vary names the same values twice"),
        (
            {"seeds": 101, "vary": {"discount": ",".join(["0.9"] * 100)}},
            "100 settings times seeds 101 is more than",
        ),
    ],
)
def test_what_cannot_be_trained_together_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(config(**asked))
    assert message in str(error.value)


def test_members_divide_over_devices_or_devices_over_members() -> None:
    with pytest.raises(
        ConfigError,
        match=r"6 members do not divide over 4 devices; nearest that work: 4 or 8 members",
    ):
        prepare(config(seeds=6, num_devices=4, num_envs=8))


@pytest.mark.parametrize(
    "fields, devices",
    [
        ({"seeds": 2}, 2),
        ({"seeds": 5}, 5),
        ({"seeds": 9}, 3),
        ({"seeds": 16}, 8),
        ({"vary": {"num_epochs": "1,2"}}, 1),
        ({"seeds": 2, "plan": "synchronous"}, 1),
        ({}, 8),
    ],
)
def test_of_a_cpu_members_take_as_many_devices_as_divide_them(fields: Any, devices: int) -> None:
    assert prepare(config(**fields, num_envs=8, num_devices=None)).job.mesh.size == devices


@pytest.mark.parametrize(
    "members, cores, devices",
    [(1, 4, None), (2, 4, 2), (8, 2, 2), (6, 4, 6), (5, 2, 5), (12, 4, 4), (127, 4, 4)],
)
def test_the_cpu_is_divided_for_a_population(
    members: int, cores: int, devices: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = dict[str, int]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(
        type(jax.config), "update", lambda self, name, value: set_to.update({name: value})
    )
    divide_cpu(members)
    assert not set_to, "JAX_NUM_CPU_DEVICES is set in tests, so the user has chosen"
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    divide_cpu(members)
    assert set_to.get("jax_num_cpu_devices") == devices


def test_dividing_the_cpu_after_jax_has_begun_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = jax.device_count()
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    divide_cpu(5)
    assert jax.device_count() == before == 8


@pytest.mark.parametrize(
    "members, fields, devices",
    [
        (8, {}, 4),
        (6, {}, 6),
        (8, {"plan": "synchronous"}, None),
        (8, {"num_devices": 1}, None),
        (1, {}, None),
        (127, {}, None),
    ],
)
def test_train_names_the_way_to_several_cpu_devices(
    members: int, fields: Any, devices: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    asked, _ = resolved(config(seeds=members, **({"num_devices": None} | fields)))
    assert undivided(asked, members) == "", (
        "JAX_NUM_CPU_DEVICES is set in tests, so the user has chosen"
    )
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    assert undivided(asked, members) == "", "JAX has several devices"
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    said = undivided(asked, members)
    assert re.findall(r"'jax_num_cpu_devices', (\d+)", said) == (
        [] if devices is None else [str(devices)]
    )
    if devices is not None:
        setup._warn_once.cache_clear()
        with pytest.warns(ConfigWarning, match="jax_num_cpu_devices"):
            prepare(asked)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConfigWarning)
            prepare(asked)  # says it once


@pytest.mark.case  # test_the_cpu_is_divided_for_a_population
@pytest.mark.parametrize("seeds, devices", [(1, 1), (5, 5)])
def test_a_population_of_a_command_has_a_device_for_each_core(
    seeds: int, devices: int, tmp_path: pathlib.Path
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"
    }
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(runs.ROOT)}

    def said(command: str) -> str:
        words = [sys.executable, "-m", "jaxrl_dist.cli", *command.split()]
        return subprocess.run(
            words, check=True, env=environment, capture_output=True, text=True
        ).stdout

    run_dir = tmp_path / "run"
    command = f"train ppo --env CartPole-v1 --seeds {seeds} {runs.TINY} --run-dir {run_dir}"
    assert f"{devices} cpu device" in said(command.replace("--num-devices 1", ""))
    total = read_json(run_dir / "config.json")["run"]["total_env_steps"]
    assert f"{devices} cpu device" in said(f"resume {run_dir} --total-env-steps {2 * total}")


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", 1),
        ("--seeds 4", 4),
        ("--seeds 2 --vary discount=0.9,0.99 num-epochs=1,2,3", 12),
        ("--vary discount=0.9,0.99 num-epochs=1,2 --zip", 2),
    ],
)
def test_members_are_counted_before_jax_is_used(flags: str, expected: int) -> None:
    assert (
        number_of_members(request.parse(f"ppo --env CartPole-v1 {flags}".split()).fields)
        == expected
    )


def test_settings_are_a_product_or_go_in_step() -> None:
    vary = {"learning_rate": [1e-3, 1e-4], "num_epochs": range(1, 3)}
    product = [member.values for member in members(config(vary=vary).checked())]
    assert [(x["learning_rate"], x["num_epochs"]) for x in product] == [
        (1e-3, 1),
        (1e-3, 2),
        (1e-4, 1),
        (1e-4, 2),
    ]
    zipped = [member.values for member in members(config(vary=vary, zip=True).checked())]
    assert [(x["learning_rate"], x["num_epochs"]) for x in zipped] == [(1e-3, 1), (1e-4, 2)]


def test_sizes_of_networks_vary() -> None:
    for sizes in ("4,8x8", [(4,), (8, 8)]):
        varied = members(config(vary={"hidden_sizes": sizes}).checked())
        assert [member.config.algorithm.hidden_sizes for member in varied] == [(4,), (8, 8)]
    with pytest.raises(ConfigError, match=r"num_epochs: '2x2' is not a whole number"):
        members(config(vary={"num_epochs": "2x2"}).checked())


def dqns(**vary: str) -> list[Any]:
    """The hyperparameters of the members that a DQN with an epsilon and its repetition has."""
    run = Train(DQN(ez_greedy=True, epsilon_end=0.2), "CartPole-v1", total_env_steps=600, vary=vary)
    return [member.config.algorithm for member in members(run.checked())]


def test_varied_hyperparameter_without_effect_has_its_default() -> None:
    noisy, greedy = dqns(parameter_noise="true,false")
    assert (noisy.parameter_noise, noisy.ez_greedy, noisy.epsilon_end) == (True, False, 0.2)
    assert (greedy.parameter_noise, greedy.ez_greedy, greedy.epsilon_end) == (False, True, 0.2)
    ladder, _ = dqns(epsilon_ladder="true,false")
    assert (ladder.ez_greedy, ladder.epsilon_end) == (False, DQN().epsilon_end)
    constant, linear = dqns(learning_rate_schedule="constant,linear", learning_rate_steps="500")
    assert (constant.learning_rate_steps, linear.learning_rate_steps) == (None, 500)
    with pytest.raises(ConfigError, match=r"epsilon_end does nothing without epsilon_ladder=False"):
        dqns(epsilon_ladder="true,false", epsilon_end="0.1,0.3")


def test_reset_hyperparameters_need_a_program_per_member() -> None:
    run = Train(
        DQN(priority_exponent=0.5, importance_exponent=0.9),
        "CartPole-v1",
        total_env_steps=600,
        num_devices=1,
    )
    population = members(
        dataclasses.replace(run, vary={"priority_exponent": "None,0.5,0.6"}).checked()
    )
    assert [member.config.algorithm.importance_exponent for member in population] == [0.4, 0.9, 0.9]
    assert programs(population, ["priority_exponent"]) == [[0], [1, 2]]


STATIC = {"replay_ratio", "reanalyse"}
"""Hyperparameters that are floats and shape the program: each value trains in a separate
program."""
_QUICK = ("ppo", "dqn", "td3", "sac")


@pytest.mark.parametrize(
    "name", [x if x in _QUICK else pytest.param(x, marks=pytest.mark.slow) for x in ALGORITHMS]
)
def test_every_other_float_varies_within_a_program(name: str) -> None:
    for env in ("Pendulum-v1", "CartPole-v1"):
        with contextlib.suppress(ConfigError):  # some take discrete actions only
            whole, source = preset(name, env, num_envs=8, plan="on_device"), find(env)
            job = make_job(whole, source)
            break
    floats = {
        x: value
        for x, value in dataclasses.asdict(whole.algorithm).items()
        if isinstance(value, float)
    }
    if name == "sac":
        floats["temperature"] = 0.2  # None by default: learnt
    varying = {x: value for x, value in floats.items() if x not in STATIC}
    assert varying and compiled.traces(job, varying)
    replays = getattr(whole.algorithm, "replay_capacity", None) is not None
    for x in STATIC & floats.keys() if replays else ():
        assert not compiled.traces(job, {x: floats[x]})


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("plan", ["on_device", "synchronous"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_members_of_every_algorithm_are_their_lone_runs(name: str, plan: str) -> None:
    """Two seeds with two values of every float:
    parameters to 1e-5 and metrics to 1e-4 after 20 iterations and more.

    The episodes are short or the actions continuous: an action that rounding decides would lead
    elsewhere. MuZero's search decides between nearly equal actions all the time, so it has 3
    iterations, of which the last ones learn.
    """
    if (name, plan) == ("alphazero", "synchronous"):
        pytest.skip("it has no simulator under this plan")
    iterations, every = (2, 1) if name == "muzero" else (20, 4)
    env = "Pendulum-v1" if name in ("ddpg", "td3") else "Catch-bsuite"
    small = {
        "hidden_sizes": (8,),
        "learning_starts": 256,
        "batch_size": 16,
        "replay_capacity": 2048,
        "replay_ratio": 1 / 8,
    }
    hyperparameters = {field.name for field in dataclasses.fields(config_class(name))}
    own = {x: value for x, value in small.items() if x in hyperparameters}
    own |= {
        "plan": plan,
        "num_envs": 8,
        "rollout_length": 16,
        "num_devices": 1,
        "evaluation_episodes": 0,
    }
    own |= {"report_interval": every * 8 * 16, "total_env_steps": iterations * 8 * 16}
    whole, varied = preset(name, env, **own), {}
    for x, value in vars(whole.algorithm).items():
        with contextlib.suppress(ConfigError):  # some do nothing here
            if (
                isinstance(value, float)
                and x not in STATIC
                and preset(name, env, **own, **{x: 0.9 * value})
            ):
                varied[x] = [value, 0.9 * value]
    reports = list(jaxrl_dist.train(dataclasses.replace(whole, seeds=2, vary=varied, zip=True)))
    assert reports[-1].members[0].iteration >= iterations and "learning_rate" in varied
    assert not hasattr(whole.algorithm, "replay_capacity") or reports[-1].updates
    # the other values of the first seed, and the first values of the other one
    for number in (1, 2):
        algorithm = dataclasses.replace(
            whole.algorithm, **{x: values[number % 2] for x, values in varied.items()}
        )
        alone = list(
            jaxrl_dist.train(dataclasses.replace(whole, algorithm=algorithm, seed=number // 2))
        )
        for report, other in zip(reports, alone, strict=True):
            one = report.members[number]
            here, there = (
                {x: y for x, y in z.metrics.items() if "time" not in x and y is not None}
                for z in (one, other)
            )
            assert (one.env_steps, one.updates) == (other.env_steps, other.updates)
            assert here == pytest.approx(there, rel=1e-4, abs=1e-4)
        probes.assert_close(reports[-1].members[number].variables(), alone[-1].variables(), 1e-5)


def test_scores_of_settings() -> None:
    values = [{"learning_rate": 0.1}, {"learning_rate": 0.2}, {"learning_rate": 0.3}]
    rows = [Row(f"{n:03d}", n, values[n % 3], "done", 1, 1, float(n), None) for n in range(12)]
    rows[2].episode_return = rows[5].episode_return = rows[8].episode_return = rows[
        11
    ].episode_return = None
    found = settings(rows)
    assert [x["values"] for x in found] == [values[1], values[0], values[2]]
    scores = np.array([1.0, 4.0, 7.0, 10.0])
    assert found[0]["iqm"] == scores[1:3].mean() and found[0]["mean"] == scores.mean()
    assert (found[0]["min"], found[0]["max"], found[0]["seeds"]) == (1.0, 10.0, 4)
    assert found[2]["iqm"] is None and table(rows).splitlines()[-1].split() == [
        "0.3",
        "0",
        "-",
        "-",
        "-",
        "-",
    ]


def test_a_table_says_which_returns_rank_the_settings() -> None:
    """Greedy ones if all members that have not failed have one."""
    rows = [
        Row(f"{n:03d}", n, {"learning_rate": n % 2}, "done", 1, 1, float(n), 9.0 - n)
        for n in range(8)
    ]
    rows[4].status, rows[4].evaluation_return = "diverged", None
    head, best, other = table(rows).splitlines()
    assert re.split("  +", head.strip())[1:3] == ["seeds", "greedy return, iqm"]
    assert "sampled return, iqm" in table(rows, "sampled")
    assert [best.split()[:3], other.split()[:3]] == [["0", "3", "6.33333"], ["1", "4", "5"]]
    rows[1].evaluation_return = None  # a member that halving has ended
    head, best, *_ = table(rows).splitlines()
    assert "training return, iqm" in head
    assert best.split()[:3] == ["1", "4", "4"]
    assert [x["score"] for x in settings(rows)] == ["episode_return"] * 2


@pytest.mark.parametrize(
    "seeds, titles",
    [(1, ["greedy return"]), (3, ["greedy return, mean", "min", "max"])],
)
def test_a_few_seeds_have_no_interquartile_mean(seeds: int, titles: list[str]) -> None:
    rows = [
        Row(f"{n:03d}", n, {"learning_rate": n % 2}, "done", 1, 1, float(n), 9.0 - n)
        for n in range(2 * seeds)
    ]
    head, best, other = table(rows).splitlines()
    assert re.split("  +", head.strip()) == ["learning_rate", "seeds", *titles]
    assert best.split()[1] == other.split()[1] == str(seeds)


def test_results_have_the_info_of_each_members_evaluation(
    tmp_path: pathlib.Path,
) -> None:
    rows = [Row("000", 0, {"learning_rate": 0.1}), Row("001", 1, {"learning_rate": 0.2})]
    evaluation = {
        "episodes": 2,
        "cut": 0,
        "return_mean": 5.0,
        "info/success": 0.5,
        "prey/info/caught": 2.0,
    }
    rows[1].take(report(1, wall_time_s=0.0, evaluation=evaluation))
    write_results(tmp_path, rows)
    head, *lines = (line.split(",") for line in (tmp_path / "results.csv").read_text().splitlines())
    assert head[-3:] == [
        "evaluation_return",
        "evaluation/info/success",
        "evaluation/prey/info/caught",
    ]
    assert [line[1:3] + line[-3:] for line in lines] == [
        ["0", "0.1", "", "", ""],
        ["1", "0.2", "5.0", "0.5", "2.0"],
    ]
    again = [Row("000", 0, {"learning_rate": 0.1}), Row("001", 1, {"learning_rate": 0.2})]
    assert read_rows(tmp_path, again) == rows


def test_a_member_that_ends_before_a_smaller_number_is_saved(
    tmp_path: pathlib.Path,
) -> None:
    """It ends between two reports, and the others advance before its last report is taken."""
    asked = config(seeds=4, seed=1)
    *_, last = jaxrl_dist.train(asked)
    most = max(member.env_steps for member in last.members)  # others need a further iteration
    *_, last = jaxrl_dist.train(
        config(tmp_path, seeds=4, seed=1, total=most, report_interval=16 * 64)
    )
    iterations = [member.iteration for member in last.members]
    first = max(at for at in range(4) if iterations[at] == min(iterations))
    assert max(iterations[:first]) > iterations[first]
    # what was copied to be saved has gone
    with pytest.raises(RuntimeError, match="this report is past"):
        last.members[first].checkpoint()
    variables, folder = last.members[first].variables(), tmp_path / "members" / f"{first:03d}"
    stored = checkpoint.load_variables(
        folder, variables, which=int(checkpoint.saved(folder)[0].name)
    )
    jax.tree.map(np.testing.assert_array_equal, stored, variables)


def test_a_member_that_ends_early_keeps_a_memory_only_to_save_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, pieces = list[int](), populations.arrays.pieces

    def watched(tree: Any) -> Any:
        kept.append(max(x.size for x in jax.tree.leaves(tree)))
        return pieces(tree)

    monkeypatch.setattr(populations.arrays, "pieces", watched)
    dqn = DQN(hidden_sizes=(4,), learning_starts=64, batch_size=8, replay_capacity=4096)
    asked, found = Train(dqn, "CartPole-v1", seeds=3, total_env_steps=600, **SMALL), []
    *_, last = jaxrl_dist.train(asked)
    apart = max(member.env_steps for member in last.members)  # that others reach an iteration later
    for run_dir in (None, str(tmp_path / "run")):
        kept.clear()
        list(jaxrl_dist.train(dataclasses.replace(asked, total_env_steps=apart, run_dir=run_dir)))
        found.append(max(kept, default=0))
    assert found[0] == 0 and found[1] > 4096  # the largest array, and the memory's number of steps


@pytest.mark.slow
def test_eight_devices_train_as_one_does(tmp_path: pathlib.Path) -> None:
    """Eight members on eight devices, and two members of four devices each."""
    asked = {"num_envs": 8, "rollout_length": 8, "evaluation_episodes": 0, "total": 256}
    for seeds in (8, 2):
        runs = [
            config(tmp_path / f"{seeds}-{n}", seeds=seeds, num_devices=n, **asked) for n in (1, 8)
        ]
        one, eight = (
            [jax.tree.leaves(x.variables()) for x in list(jaxrl_dist.train(run))[-1].members]
            for run in runs
        )
        for here, there in zip(one, eight, strict=True):
            for x, y in zip(here, there, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


# --- Stopping at a return -------------------------------------------------------------------------


@pytest.mark.case
def test_members_end_with_the_return_that_they_are_to_reach(tmp_path: pathlib.Path) -> None:
    """The others go on as if nothing had happened, and the population ends with the last;
    all can be resumed.
    """
    two: dict[str, Any] = {"seeds": 4, "return_window": 256}  # the returns of two reports
    *_, last = jaxrl_dist.train(config(tmp_path / "whole", **two))
    assert last.ended_by == "total_env_steps"
    whole = [lines(tmp_path / "whole" / "members" / f"{number:03d}") for number in range(4)]
    best = [max(line["episode/recent_return"] or 0.0 for line in found[1:-1]) for found in whole]
    goal = sorted(best)[1]  # so that one goes on to the end
    *_, last = jaxrl_dist.train(config(tmp_path / "parts", **two, stop_at_return=goal))
    ended = []
    for number, found in enumerate(whole):
        there = tmp_path / "parts" / "members" / f"{number:03d}"
        reached = [
            index
            for index, line in enumerate(found)
            if index and (line["episode/recent_return"] or 0) >= goal
        ]
        assert lines(there) == found[: reached[0] + 1 if reached else None]
        ended.append(read_json(there / "summary.json")["ended_by"])
        assert read_json(there / "summary.json")["evaluation"] is not None
        assert jaxrl_dist.load_policy(there).evaluate(2).returns.shape == (2,)
    assert sorted(ended)[0] == "stop_at_return" and last.metrics["population/done"] == 4
    assert read_json(tmp_path / "parts" / "summary.json")["ended_by"] == last.ended_by == max(ended)
    with pytest.raises(
        ConfigError,
        match=r"total_env_steps.*600.*stop_at_return",
    ):
        jaxrl_dist.resume(tmp_path / "parts")
    with pytest.raises(
        CheckpointError, match="share no intact checkpoint; resume them one by one, such as"
    ):
        jaxrl_dist.resume(tmp_path / "parts", stop_at_return=1e6)
    early = tmp_path / "parts" / "members" / f"{ended.index('stop_at_return'):03d}"
    *_, last = jaxrl_dist.resume(early, stop_at_return=1e6)
    assert last.ended_by == "total_env_steps"
    for here, there in zip(lines(early), whole[ended.index("stop_at_return")], strict=True):
        shown = [name for name in here if here[name] is not None]
        assert [here[x] for x in shown] == pytest.approx(
            [there[x] for x in shown], rel=1e-4, abs=1e-5
        )


@pytest.mark.case  # training/test_resuming.py decides for each state of a member's files
@pytest.mark.parametrize("plan, seed, early", [("on_device", 6, 1), ("synchronous", 0, 0)])
def test_a_member_that_ended_before_a_stop_trains_no_further(
    plan: str, seed: int, early: int, tmp_path: pathlib.Path
) -> None:
    """The stop has cut its evaluation short, and the others are in the middle of an interval."""
    asked = config(seeds=3, plan=plan, seed=seed, stop_at_return=25.0, return_window=128)
    whole, parts = (
        dataclasses.replace(asked, run_dir=str(tmp_path / x)) for x in ("whole", "parts")
    )
    list(jaxrl_dist.train(whole))
    summary = tmp_path / "parts" / "members" / f"{early:03d}" / "summary.json"
    list(prepare(parts).reports(stop=summary.exists))
    assert [
        row.status == "done" for row in read_rows(tmp_path / "parts", prepare(asked).rows)
    ].count(True) == 1
    assert read_json(summary)["evaluation"] is None
    list(jaxrl_dist.resume(tmp_path / "parts"))
    # on the host, a resume restarts environments
    for number in range(3) if plan == "on_device" else [early]:
        one, other = (tmp_path / x / "members" / f"{number:03d}" for x in ("whole", "parts"))
        assert lines(one) == lines(other)
        ends = [read_json(folder / "summary.json") for folder in (one, other)]
        assert all(
            ends[0][name] == ends[1][name]
            for name in ("ended_by", "env_steps", "updates", "evaluation")
        )
        probes.assert_close(
            *(jaxrl_dist.load_policy(folder).variables for folder in (one, other)), 0
        )


# plans/test_evolve.py::test_population_based_training_goes_on_as_if_never_stopped
@pytest.mark.case
@pytest.mark.filterwarnings("ignore:a2c assumes on-policy data")
@pytest.mark.parametrize("plan", ["on_device", "synchronous", "asynchronous", "gradients"])
def test_a_run_ends_with_the_return_that_it_is_to_reach(plan: str, tmp_path: pathlib.Path) -> None:
    """Every episode of the clock returns 10; the first report comes before one has ended."""
    sizes: dict[str, Any] = {
        "num_envs": 4,
        "rollout_length": 4,
        "report_interval": 16,
        "num_devices": 1,
    }
    asked = Train(
        A2C(hidden_sizes=(4,)),
        "Clock-v0",
        plan=plan,
        total_env_steps=160,
        run_dir=str(tmp_path),
        **sizes,
    )
    asked = dataclasses.replace(asked, evaluation_episodes=2, stop_at_return=9.5, return_window=16)
    *before, last = jaxrl_dist.train(asked)
    assert last.ended_by == "stop_at_return" and last.evaluation is not None and last.env_steps < 80
    assert before and all(report.ended_by is None for report in before)
    assert last.metrics["episode/return"] == 10 == last.evaluation["return_mean"]
    assert read_json(tmp_path / "summary.json")["ended_by"] == "stop_at_return"
    with pytest.raises(
        ConfigError,
        match=r"10.*stop_at_return.*9.5",
    ):
        jaxrl_dist.resume(tmp_path)
    (tmp_path / "summary.json").unlink()  # as if it had been killed before its evaluation
    (again,) = jaxrl_dist.resume(tmp_path)
    assert (again.env_steps, again.ended_by, again.evaluation) == (
        last.env_steps,
        "stop_at_return",
        last.evaluation,
    )
    *_, last = jaxrl_dist.resume(tmp_path, stop_at_return=10.5)
    assert last.ended_by == "total_env_steps" and last.env_steps >= 160
