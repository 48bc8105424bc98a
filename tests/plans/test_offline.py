"""The plan ``offline``, and learning from a data set beside new experience."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import subprocess
import sys
from collections import OrderedDict

import gymnasium
import jax
import numpy as np
import own
import pytest
from jax import export as jax_export

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.data import columns, files
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.plans import compiled, iteration
from jaxrl_dist.play.export import export
from jaxrl_dist.profiling import timing
from jaxrl_dist.run import checkpoint
from jaxrl_dist.settings.members import members
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training.job import make_job

SIZES = {"batch_size": 32, "hidden_sizes": (16,), "num_devices": 1}
CORE = {
    "core": "gru",
    "core_size": 4,
    "core_inputs": "action,reward",
    "burn_in": 2,
    "sequence_length": 4,
}


def dataset(path, episodes=30):
    rng = np.random.default_rng(1)
    parts = []
    for number in range(episodes):
        length = int(rng.integers(3, 20))
        obs = rng.normal(loc=2.0, size=(length + 1, 4)).astype(np.float32)
        reward = np.ones(length)
        parts.append(
            {
                "obs": obs,
                "action": rng.integers(0, 2, length),
                "reward": reward,
                "terminated": number % 2 == 0,
            }
        )
    data = Dataset.from_episodes(parts)
    data.save(path)
    return data


def config(path, algorithm="dqn", **changes):
    changes = {
        "data": str(path),
        "total_updates": 20,
        "report_interval": 5,
        "evaluation_episodes": 0,
        **SIZES,
    } | changes
    changes = {name: value for name, value in changes.items() if value is not None}
    return jaxrl_dist.preset(algorithm, changes.pop("env", "gymnax:CartPole-v1"), **changes)


def final(reports):
    for report in reports:
        last = report, report.variables(), report.checkpoint()
    return last


def assert_equal(one, other, **tolerance):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if tolerance:
            np.testing.assert_allclose(x, y, **tolerance)
        else:
            np.testing.assert_array_equal(x, y)


def test_the_clock_is_updates(tmp_path):
    dataset(tmp_path / "data")
    reports = list(jaxrl_dist.train(config(tmp_path / "data")))
    assert (
        [report.step for report in reports]
        == [5, 10, 15, 20]
        == [report.updates for report in reports]
    )
    assert {report.env_steps for report in reports} == {0}
    assert (
        reports[-1].ended_by == "total_updates"
        and reports[-1].metrics["time/updates_per_second"] > 0
    )


@pytest.mark.parametrize("core", [{}, pytest.param(CORE, marks=pytest.mark.case)])
def test_a_resumed_run_equals_one_without_a_stop_bit_for_bit(tmp_path, core):
    dataset(tmp_path / "data")
    whole = final(jaxrl_dist.train(config(tmp_path / "data", **core)))
    run_dir = tmp_path / "run"
    first = jaxrl_dist.train(
        config(tmp_path / "data", run_dir=str(run_dir), total_updates=11, **core)
    )
    assert final(first)[0].step == 11
    assert (run_dir / "checkpoints" / "000000000011").is_dir()
    resumed = final(jaxrl_dist.resume(run_dir, total_updates=20))
    assert_equal(whole[1], resumed[1])
    assert_equal(whole[2].state, resumed[2].state)
    with pytest.raises(ConfigError, match="has done 20 updates of total_updates 20"):
        jaxrl_dist.resume(run_dir)
    with pytest.raises(ConfigError, match="total_env_steps does nothing without new experience"):
        jaxrl_dist.resume(run_dir, total_updates=30, total_env_steps=5)


@pytest.mark.case  # actors/test_evaluate.py::test_evaluations_choose_the_best_checkpoint
def test_evaluations_judge_the_checkpoints(tmp_path):
    """Training has no returns; without evaluations on the way, no checkpoint is the best."""
    dataset(tmp_path / "data")
    sizes = {"evaluation_episodes": 2, "evaluation_interval": 5, "run_dir": str(tmp_path / "run")}
    reports = list(jaxrl_dist.train(config(tmp_path / "data", **sizes)))
    best = max(reports, key=lambda report: (report.evaluation["return_mean"], report.step))
    assert checkpoint.number_of(checkpoint.chosen(tmp_path / "run", "best")) == best.step
    assert reports[-1].best_evaluation["checkpoint"] == best.step
    with pytest.raises(
        ConfigError,
        match="keep_best training needs training episodes, which plan offline does not have",
    ):
        jaxrl_dist.train(config(tmp_path / "data", keep_best="training"))
    assert config(tmp_path / "data").judge == "training"


def test_a_resumed_run_has_the_same_records_wherever_they_lie(tmp_path):
    dataset(tmp_path / "data", episodes=10)
    run_dir = str(tmp_path / "run")
    final(jaxrl_dist.train(config(tmp_path / "data", env="", run_dir=run_dir, total_updates=5)))
    (tmp_path / "data").rename(tmp_path / "moved")
    dataset(tmp_path / "data", episodes=9)
    with pytest.raises(ConfigError, match=r"data is not the data set that .*run learnt from;"):
        jaxrl_dist.resume(run_dir, total_updates=10)
    reports = jaxrl_dist.resume(run_dir, total_updates=10, data=str(tmp_path / "moved"))
    assert [report.updates for report in reports] == [10]


@pytest.mark.parametrize(
    "devices, core",
    [
        (1, {}),
        pytest.param(8, {}, marks=pytest.mark.case),
        pytest.param(1, CORE, marks=pytest.mark.case),
    ],
)
def test_data_on_the_host_give_the_same_numbers(tmp_path, devices, core, optimized):
    """Also those that the host gathers after the first 256 updates of a session."""
    dataset(tmp_path / "data")
    resident = final(
        jaxrl_dist.train(config(tmp_path / "data", num_devices=devices, total_updates=300, **core))
    )
    host, run_dir = {"data_memory": "host", "num_devices": devices, **core}, str(tmp_path / "run")
    final(jaxrl_dist.train(config(tmp_path / "data", **host, total_updates=7, run_dir=run_dir)))
    streamed = final(jaxrl_dist.resume(run_dir, total_updates=300))
    assert_equal(resident[1], streamed[1])
    assert streamed[0].metrics["loss/q"] == resident[0].metrics["loss/q"]


MEMORY = """
import pathlib, re, sys
import jaxrl_dist
sizes = {"batch_size": 8, "hidden_sizes": (8,), "num_devices": 1, "evaluation_episodes": 0}
for report in jaxrl_dist.train(jaxrl_dist.preset("td3", "", data=sys.argv[1], total_updates=32, seeds=64, **sizes)):
    pass
print(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
def test_64_members_hold_one_copy_of_a_million_steps(tmp_path):
    def kilobytes(episodes):
        rng, path = np.random.default_rng(0), tmp_path / str(episodes)
        obs, reward = rng.random((1001, 17), np.float32), np.ones(1000)
        one = {
            "obs": obs,
            "action": rng.random((1000, 6), np.float32),
            "reward": reward,
            "terminated": False,
        }
        Dataset.from_episodes([one] * episodes).save(path)
        command = [sys.executable, "-c", MEMORY, str(path)]
        runs = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for _ in range(2)
        ]
        return int(runs[1])  # the first may have compiled

    copy = 1001 * 1000 * (17 * 4 + 6 * 4 + 4 + 3) / 1024
    assert kilobytes(1000) - kilobytes(8) < 1.4 * copy


@pytest.mark.parametrize(
    "algorithm, core",
    [
        pytest.param("dqn", {}, marks=pytest.mark.case),
        ("dqn", CORE),
        pytest.param("marwil", {**CORE, "sequence_length": None}, marks=pytest.mark.case),
    ],
)
def test_several_devices_learn_what_one_does(tmp_path, algorithm, core):
    dataset(tmp_path / "data")
    one = final(jaxrl_dist.train(config(tmp_path / "data", algorithm, **core)))
    eight = final(
        jaxrl_dist.train(config(tmp_path / "data", algorithm, **{**core, "num_devices": 8}))
    )
    assert_equal(one[1], eight[1], rtol=1e-5, atol=1e-6)


def test_members_share_the_data_and_learn_what_lone_runs_do(tmp_path):
    dataset(tmp_path / "data")
    report, *_ = final(jaxrl_dist.train(config(tmp_path / "data", seeds=2)))
    lone = final(jaxrl_dist.train(config(tmp_path / "data", seed=1)))[0]
    assert report.members[1].metrics["loss/q"] == pytest.approx(lone.metrics["loss/q"], rel=1e-4)
    assert report.step == 40 and report.env_steps == 0


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.case), 2])
def test_members_that_learn_in_turn_learn_what_lone_runs_do(tmp_path, devices, monkeypatch):
    """Large networks on a CPU: each makes all updates of a dispatch before the next one begins."""
    dataset(tmp_path / "data")
    changes = {
        "seeds": 4,
        "vary": {"learning_rate": "1e-3,1e-4"},
        "num_devices": devices,
        "ema_steps": 4,
    }
    together = final(jaxrl_dist.train(config(tmp_path / "data", **changes)))[0]
    taken = []
    monkeypatch.setattr(
        compiled, "learn_in_turn", lambda job: taken.append(job) or iteration.learn_in_turn(job)
    )
    # with the program of the members that learn together
    monkeypatch.setattr("jaxrl_dist.training.job._jobs", OrderedDict())
    monkeypatch.setattr(iteration, "CACHED", 0)
    run_dir = str(tmp_path / "run")
    list(jaxrl_dist.train(config(tmp_path / "data", **changes, total_updates=10, run_dir=run_dir)))
    *_, report = jaxrl_dist.resume(run_dir, total_updates=20)
    assert taken
    lone = final(
        jaxrl_dist.train(config(tmp_path / "data", seed=1, learning_rate=1e-4, ema_steps=4))
    )
    number = next(
        x
        for x, member in enumerate(members(config(tmp_path / "data", **changes)))
        if is_lone(member.config)
    )
    for name, value in lone[0].metrics.items():
        if not name.startswith("time/") and value is not None:
            assert report.members[number].metrics[name] == pytest.approx(value, rel=1e-6), name
            assert together.members[number].metrics[name] == pytest.approx(value, rel=1e-4), name
    assert_equal(
        report.members[number].checkpoint().state.variables,
        lone[2].state.variables,
        rtol=1e-6,
        atol=1e-7,
    )


def is_lone(member):
    return member.seed == 1 and member.algorithm.learning_rate == 1e-4


def test_statistics_of_observations_are_those_of_the_data(tmp_path):
    data = dataset(tmp_path / "data")
    _, variables, _ = final(
        jaxrl_dist.train(config(tmp_path / "data", normalize_observations=True, total_updates=5))
    )
    stats = variables.stats[0]
    obs = data.obs[data.valid].astype(np.float64)
    assert stats.count == len(obs)
    np.testing.assert_allclose(stats.mean, obs.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(stats.std(), obs.std(axis=0), rtol=1e-4)


def test_rewards_are_scaled_so_that_the_returns_span_a_thousand(tmp_path):
    data = dataset(tmp_path / "data")
    scaled = config(tmp_path / "data", scale_rewards=True)
    rewards = make_job(*resolved(scaled)).put_data().steps.reward
    np.testing.assert_allclose(np.unique(rewards), [0, 1000 / np.ptp(data.returns)], rtol=1e-6)
    data.best(0.01).save(tmp_path / "one")
    with pytest.raises(ConfigError, match="the same return; use scale_rewards=False"):
        make_job(*resolved(dataclasses.replace(scaled, data=str(tmp_path / "one"))))


def test_scores_are_normalised_where_both_ends_are_known(tmp_path, capsys):
    dataset(tmp_path / "data", episodes=10)
    path = str(tmp_path / "data")
    assert (
        files.scored({"return_mean": 60.0}, path)
        == files.scored({"return_mean": 60.0}, None)
        == {"return_mean": 60}
    )
    assert cli.main(["data", path, "--random", "10", "--expert", "110"]) == 0
    assert "random policy 10\nexpert policy 110" in capsys.readouterr().out
    assert files.scored({"return_mean": 60.0}, path)["normalized_score"] == 50
    with contextlib.chdir(path):  # which is not the data set of a run that has none
        assert files.scored({"return_mean": 60.0}, None) == {"return_mean": 60}
    run = config(
        path,
        total_updates=1,
        evaluation_episodes=2,
        evaluation_max_steps=5,
        run_dir=str(tmp_path / "run"),
    )
    evaluation = final(jaxrl_dist.train(run))[0].evaluation
    assert evaluation["normalized_score"] == pytest.approx(evaluation["return_mean"] - 10)
    assert cli.main(["evaluate", run.run_dir, "--episodes", "2", "--max-steps", "5"]) == 0
    assert "normalised -5, where random 10 is 0 and expert 110 is 100" in " ".join(
        capsys.readouterr().out.split()
    )


def test_ends_are_checked(tmp_path, capsys):
    path = str(tmp_path / "data")
    dataset(path, episodes=10)
    for words, message in {
        ("--random", "nan"): "--random",
        ("--random", "1e40"): "--random",
        ("--random", "1", "--expert", "1"): "are both 1",
        ("--random", "1", "--best", "0.5"): "change one data set in place",
        (path, "--expert", "1"): "change one data set in place",
    }.items():
        assert cli.main(["data", path, *words]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["data", path, "--random", "1"]) == 0  # it is as it was


def test_actions_beyond_the_bounds_of_the_environment_are_told(tmp_path):
    actions = np.linspace(-5, 5, 100, dtype=np.float32)[:, None]
    ends = np.arange(100) % 10 == 9
    Dataset.from_arrays(np.ones((100, 3), np.float32), actions, np.arange(100), ends).save(
        tmp_path / "wide"
    )
    with pytest.warns(ConfigWarning, match="60%.*gymnax:Pendulum-v1"):
        make_job(*resolved(config(tmp_path / "wide", "td3", env="gymnax:Pendulum-v1")))


def test_a_trained_policy_makes_no_random_start(tmp_path):
    run_dir = str(tmp_path / "run")
    dqn = jaxrl_dist.preset("dqn", "gymnax:CartPole-v1", init_from=run_dir)
    assert dqn.algorithm.epsilon_start == dqn.algorithm.epsilon_end == 0.05
    given = jaxrl_dist.preset("dqn", "gymnax:CartPole-v1", init_from=run_dir, epsilon_start=0.5)
    parts = jaxrl_dist.preset("dqn", "gymnax:CartPole-v1", init_from=run_dir, init_parts="torso")
    later = jaxrl_dist.preset("dqn", "gymnax:CartPole-v1", init_from=run_dir, epsilon_end=0.2)
    starts = [run.algorithm.epsilon_start for run in (given, parts, later)]
    assert starts == [0.5, 1.0, 0.2]
    sac, new = (
        jaxrl_dist.preset("sac", "Pendulum-v1", init_from=x).algorithm for x in (run_dir, None)
    )
    assert [new.acts_randomly(step) for step in (0, 999, 1000)] == [
        True,
        True,
        False,
    ] and not sac.acts_randomly(0)


def test_the_error_of_the_values_is_reported(tmp_path):
    dataset(tmp_path / "data", episodes=10)
    report = final(
        jaxrl_dist.train(
            config(tmp_path / "data", batch_size=1, total_updates=1, report_interval=1)
        )
    )[0]
    assert report.metrics["loss/q"] == pytest.approx(0.5 * report.metrics["loss/td_error"] ** 2)


def test_the_average_of_parameters_moves_with_each_update(tmp_path):
    dataset(tmp_path / "data")
    reports = jaxrl_dist.train(
        config(tmp_path / "data", ema_steps=4, total_updates=6, report_interval=1)
    )
    average = None
    params = [report.variables() for report in reports]
    # Each update moves the average towards the parameters before it,
    # by 1/k for the first 4 updates.
    for k, (before, after) in enumerate(itertools.pairwise(params), start=2):
        average = before.stats[0] if average is None else average
        average = jax.tree.map(lambda a, p, k=k: a + (p - a) / min(k, 4), average, before.params)
        assert_equal(average, after.stats[0], rtol=1e-5, atol=1e-6)


def test_without_an_environment_the_data_say_what_there_is(tmp_path):
    dataset(tmp_path / "data")
    report, variables, _ = final(jaxrl_dist.train(config(tmp_path / "data", env="")))
    assert_equal(variables, final(jaxrl_dist.train(config(tmp_path / "data")))[1])
    assert report.evaluation is None


def test_a_command_without_an_environment_names_its_run_by_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dataset(tmp_path / "records")
    flags = "--data records --total-updates 3 --hidden-sizes 4 --num-devices 1"
    assert cli.main(["train", "bc", *flags.split()]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert (
        run.name.startswith("records__bc__0__")
        and f"writing runs/{run.name}" in capsys.readouterr().out
    )


def test_fields_that_are_left_out_by_name_are_not_refused(tmp_path):
    dataset(tmp_path / "data", episodes=10)
    assert (
        config(tmp_path / "data").plan
        == jaxrl_dist.preset(
            "dqn",
            "gymnax:CartPole-v1",
            data=str(tmp_path / "data"),
            evolve=None,
            rollout_length=None,
            stop_at_return=None,
        ).plan
    )  # as a sweep gives its members


@pytest.mark.parametrize(
    "core",
    [pytest.param({}, marks=pytest.mark.case), CORE, {"cql_weight": 0.5, "cql_floor": True}],
)
def test_records_beside_new_experience(tmp_path, core):
    dataset(tmp_path / "data")
    changes = {
        "total_updates": jaxrl_dist.Train.total_updates,
        "data_share": 0.5,
        "total_env_steps": 256,
    }
    changes |= {
        "num_envs": 8,
        "rollout_length": 8,
        "learning_starts": 64,
        "replay_capacity": 512,
        "replay_ratio": 0.125,
    }
    mixed = config(tmp_path / "data", **changes, **core)
    report, variables, _ = final(jaxrl_dist.train(mixed))
    assert report.env_steps >= 256 and report.updates > 0 and mixed.plan == "on_device"
    host = final(jaxrl_dist.train(dataclasses.replace(mixed, plan="synchronous")))
    assert_equal(variables, host[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"algorithm": "ppo", "batch_size": None},
            "records need an algorithm with replay",
        ),
        ({"priority_exponent": 0.6}, "records are drawn uniformly"),
        ({"env": "gymnax:Acrobot-v1"}, "has the observations"),
        ({"data": "/nowhere"}, "is not a data set"),
        ({"total_env_steps": 5}, "total_env_steps does nothing without new experience"),
        ({"replay_ratio": 0.5}, "replay_ratio does nothing under plan offline"),
        ({"rollout_length": 3}, "rollout_length does nothing under plan offline"),
        ({"data_share": 0.5}, "total_updates does nothing without"),
        ({"env": "", "evaluation_episodes": 5}, "evaluation_episodes needs env"),
        ({"env": "", "hide": "1,3"}, "hide does nothing without env"),
        ({"env": "", "frame_stack": 4}, "frame_stack does nothing without env"),
        ({"env": "", "env_options": {"foo": "3"}}, "env_options does nothing without env"),
        (
            {"data_memory": "host", "seeds": 2},
            "data_memory does nothing without a single run under",
        ),
        ({"data_memory": "host", "normalize_observations": True}, "give no running statistics"),
        (
            {**CORE, "scale_rewards": True},
            "core_inputs reads raw rewards; use scale_rewards=False",
        ),
        ({"cql_floor": True}, "cql_floor does nothing without cql_weight"),
        ({"cql_weight": 1.0, "cql_floor": True, **CORE}, "cql_floor does not work with core gru"),
        (
            {"cql_weight": 1.0, "cql_floor": True, "clip_rewards": "-1,1"},
            "of raw rewards; remove clip_rewards and scale_rewards",
        ),
        (
            {"data": None, "total_updates": None, "cql_weight": 1.0, "cql_floor": True},
            "name one with data",
        ),
        ({"batch_size": 33, "num_devices": 2}, "must be a multiple of 2 devices"),
        (
            {"total_updates": None, "data_share": 0.01, "plan": "on_device"},
            "makes 0 records and .* each must be one or more",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, changes, message):
    dataset(tmp_path / "data", episodes=10)
    with pytest.raises(ConfigError, match=message):
        jaxrl_dist.train(config(tmp_path / "data", **changes))


def test_what_needs_an_environment_says_so(tmp_path):
    dataset(tmp_path / "data", episodes=10)
    run_dir = tmp_path / "run"
    final(
        jaxrl_dist.train(config(tmp_path / "data", env="", total_updates=5, run_dir=str(run_dir)))
    )
    policy = jaxrl_dist.load_policy(run_dir)
    assert policy(np.zeros((2, 4), np.float32))[0].shape == (2,)
    with pytest.raises(ConfigError, match="name one with env"):
        policy.evaluate(episodes=1)
    assert (
        jaxrl_dist.load_policy(run_dir, env="gymnax:CartPole-v1").evaluate(episodes=1).returns.size
        == 1
    )
    with pytest.raises(ConfigError, match="remove data"):
        timing.profile(config(tmp_path / "data"), policy.source, seconds=1.0)


@pytest.mark.parametrize("memory", ["device", "host"])
def test_each_member_has_the_floor_of_its_discount(tmp_path, memory):
    data, cql = dataset(tmp_path / "data"), {"cql_weight": 0.5, "cql_floor": True}
    lone = config(tmp_path / "data", **cql, discount=0.5, data_memory=memory)
    job = make_job(*resolved(lone))
    expected = columns.returns_to_go(data.reward, data.ends, data.terminated, 0.5)
    np.testing.assert_array_equal(job.data.record.extras["return"], expected)
    report = final(jaxrl_dist.train(lone))[0]
    assert 0 < report.metrics["q/floored"] <= 1
    varied = config(tmp_path / "data", **cql, vary={"discount": "0.5,0.9"})
    first, second = final(jaxrl_dist.train(varied))[0].members
    assert first.metrics["loss/cql"] == pytest.approx(report.metrics["loss/cql"], rel=1e-4)
    assert second.metrics["loss/cql"] > first.metrics["loss/cql"] + 0.1


@pytest.mark.parametrize("share", [None, pytest.param(0.5, marks=pytest.mark.case)])
def test_one_program_trains_members_that_vary(tmp_path, share):
    dataset(tmp_path / "data")
    changes = {"vary": {"learning_rate": "1e-3,1e-4"}}
    if share is not None:
        changes |= {
            "total_updates": jaxrl_dist.Train.total_updates,
            "data_share": share,
            "total_env_steps": 128,
        }
        changes |= {
            "num_envs": 8,
            "rollout_length": 8,
            "learning_starts": 64,
            "replay_capacity": 512,
        }
    varied = final(
        jaxrl_dist.train(config(tmp_path / "data", **changes, run_dir=str(tmp_path / "run")))
    )[0]
    changes["vary"] = {}
    lone = final(jaxrl_dist.train(config(tmp_path / "data", **changes, learning_rate=1e-4)))[0]
    assert varied.members[1].metrics["loss/q"] == pytest.approx(lone.metrics["loss/q"], rel=1e-4)
    assert len(list((tmp_path / "run" / "members").iterdir())) == 2


@pytest.mark.parametrize(
    "algorithm, changes",
    [("dqn", {"parameter_noise": True, "noisy": False}), ("ddpg", {"noise": "parameter"})],
)
def test_parameter_noise_keeps_its_deviation_without_acting(tmp_path, algorithm, changes):
    data = dataset(tmp_path / "data")
    if algorithm == "ddpg":
        columns_ = (
            data.obs,
            np.sin(np.arange(len(data.valid)))[:, None],
            data.reward,
            data.terminated,
            data.valid,
        )
        Dataset.of_rows(*columns_).save(tmp_path / "moved")
    path = tmp_path / ("data" if algorithm == "dqn" else "moved")
    reports = list(jaxrl_dist.train(config(path, algorithm, env="", **changes)))
    assert {report.metrics["noise/std"] for report in reports} == {reports[0].metrics["noise/std"]}
    assert reports[0].metrics["noise/std"] == pytest.approx(0.1 if algorithm == "dqn" else 0.2)


def test_marwil_learns_the_first_step_as_often_as_the_last(tmp_path):
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(25, 3)).astype(np.float32)
    obs[0] = obs[23] = 2.0
    action = rng.integers(0, 2, 24)
    action[0], action[23] = 0, 1
    Dataset.from_episodes(
        [{"obs": obs, "action": action, "reward": np.ones(24), "terminated": True}]
    ).save(tmp_path / "data")
    changes = {"beta": 0.0, "value_coefficient": 0.0, "learning_rate": 3e-3, "total_updates": 600}
    whole = {
        **changes,
        "hidden_sizes": (32,),
        "report_interval": 600,
        "run_dir": str(tmp_path / "run"),
    }
    final(jaxrl_dist.train(config(tmp_path / "data", "marwil", env="", **whole)))
    policy = jaxrl_dist.load_policy(tmp_path / "run")
    drawn, _ = policy(np.full((4000, 3), 2.0, np.float32), key=jax.random.key(0))
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.05)


def steps_of_one(path, reward, **declared):
    """Many episodes of one step: action ``i`` pays ``reward[i]``, and all of them begin alike."""
    action = np.arange(300) % len(reward)
    obs = declared.pop("obs", np.ones((300, 1), np.float32))
    start = getattr(declared.get("action_space"), "start", 0)
    pay = np.asarray(reward, np.float32)[action]
    Dataset.from_arrays(obs, action + start, pay, np.ones(300), **declared).save(path)


@pytest.mark.parametrize("algorithm", ["dqn", pytest.param("iql", marks=pytest.mark.case)])
def test_a_policy_of_records_acts_from_the_start_of_its_space(tmp_path, algorithm):
    steps_of_one(tmp_path / "data", [0, 0, 1], action_space=gymnasium.spaces.Discrete(3, start=-1))
    run = {"env": "", "run_dir": str(tmp_path / "run"), "total_updates": 300, "learning_rate": 3e-3}
    final(jaxrl_dist.train(config(tmp_path / "data", algorithm, **run)))
    action, _ = jaxrl_dist.load_policy(tmp_path / "run")(np.ones((2, 1), np.float32))
    assert action.tolist() == [1, 1]
    export(jaxrl_dist.load_policy(tmp_path / "run"), tmp_path / "policy.stablehlo")
    exported = jax_export.deserialize(bytearray((tmp_path / "policy.stablehlo").read_bytes()))
    core = jaxrl_dist.load_policy(tmp_path / "run").initial_core(2)
    acted, _ = exported.call(np.ones((2, 1), np.float32), core, np.ones(2, bool))
    assert acted.tolist() == [1, 1]


def test_a_policy_of_records_knows_which_actions_were_legal(tmp_path):
    """Legal actions cost something. The illegal one was never tried,
    so its value is that of the first weights, 0.
    """
    obs = {
        "action_mask": np.tile([False, True, True], (300, 1)),
        "place": np.ones((300, 1), np.float32),
    }
    action = 1 + np.arange(300) % 2
    space = gymnasium.spaces.Discrete(3)
    data = Dataset.from_arrays(
        obs, action, -2.0 / action, np.zeros(300), next_obs=obs, action_space=space
    )
    data.save(tmp_path / "data")
    run = {
        "env": "",
        "run_dir": str(tmp_path / "run"),
        "total_updates": 600,
        "discount": 0.5,
        "learning_rate": 3e-3,
    }
    final(
        jaxrl_dist.train(
            config(tmp_path / "data", n_step=1, target_period=20, report_interval=100, **run)
        )
    )
    policy = jaxrl_dist.load_policy(tmp_path / "run")
    chosen, _ = policy(jax.tree.map(lambda x: x[:2], obs))
    assert chosen.tolist() == [2, 2]
    values, _ = policy.algorithm.action_values(policy.variables, jax.tree.map(lambda x: x[:1], obs))
    assert values[0, 2] == pytest.approx(-2, abs=0.2)  # -1 / (1 - 0.5); with the illegal one: -1


@pytest.mark.parametrize("algorithm", ["dqn", "iql", "marwil"])
def test_moves_of_both_sides_are_not_learnt_as_those_of_one(tmp_path, algorithm):
    steps_of_one(tmp_path / "data", [0, 1], both_sides=True)
    for env in ("", own.Walk()):
        with pytest.raises(ConfigError, match=r"both sides|for both"):
            list(jaxrl_dist.train(config(tmp_path / "data", algorithm, env=env)))


def test_moves_of_both_sides_can_be_imitated_and_not_estimated(tmp_path):
    steps_of_one(tmp_path / "data", [0, 1], both_sides=True)
    final(jaxrl_dist.train(config(tmp_path / "data", "bc", env="", run_dir=str(tmp_path / "run"))))
    policy = jaxrl_dist.load_policy(tmp_path / "run")
    with pytest.raises(ConfigError, match="both sides"):
        jaxrl_dist.estimate(policy, Dataset.load(tmp_path / "data"), discount=1.0)


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """Random walks, whose returns span less than a tenth of what --scale-rewards makes of them."""
    path = tmp_path_factory.mktemp("walks")
    flags = {
        "total_env_steps": 2000,
        "learning_starts": 2000,
        "num_envs": 8,
        "evaluation_episodes": 0,
    }
    final(
        jaxrl_dist.train(
            jaxrl_dist.preset("dqn", own.Walk(), record=str(path / "data"), **flags, **SIZES)
        )
    )
    return path / "data"


@pytest.mark.parametrize("algorithm", [pytest.param("dqn", marks=pytest.mark.case), "sac"])
def test_exact_errors_are_of_raw_rewards(walks, tmp_path, algorithm):
    runs_of, changes = {}, {"temperature": 0.2} if algorithm == "sac" else {}
    for scale in (False, True):
        path = tmp_path / str(scale)
        run = {
            "env": own.Walk(),
            "total_updates": 100,
            "report_interval": 100,
            "exact": True,
            "run_dir": str(path),
        }
        *_, report = jaxrl_dist.train(
            config(walks, algorithm, scale_rewards=scale, **run, **changes)
        )
        runs_of[scale] = report.metrics["exact/q_largest"]
        measured = jaxrl_dist.exact.measure(jaxrl_dist.load_policy(path, env=own.Walk())).numbers
        assert measured["q_error"] == pytest.approx(report.metrics["exact/q_error"], rel=1e-4)
        factor = (
            float(jaxrl_dist.load_policy(path, env=own.Walk()).variables.stats[0]) if scale else 1.0
        )
        assert factor == pytest.approx(1000 / np.ptp(Dataset.load(walks).returns) if scale else 1)
        assert measured["q_error"] < measured["q_largest"]
        if algorithm == "sac":
            assert measured["temperature"] == pytest.approx(0.2 / factor)
    if algorithm == "dqn":
        assert runs_of[True] == runs_of[False]


def test_values_of_scaled_records_start_no_run_of_raw_rewards(walks, tmp_path):
    scaled = {"env": own.Walk(), "scale_rewards": True, "run_dir": str(tmp_path / "first")}
    final(jaxrl_dist.train(config(walks, **scaled)))
    with pytest.raises(ConfigError, match=r"scale_rewards multiplied its rewards by 41\.67"):
        list(jaxrl_dist.train(config(walks, env=own.Walk(), init_from=str(tmp_path / "first"))))


def test_actions_that_the_mask_forbids_are_told(tmp_path):
    obs = {
        "action_mask": np.tile([False, True, True], (300, 1)),
        "place": np.ones((300, 1), np.float32),
    }
    Dataset.from_arrays(obs, np.arange(300) % 3, np.ones(300), np.ones(300)).save(tmp_path / "data")
    with pytest.warns(ConfigWarning, match=r"33\.33%.*'action_mask'"):
        final(jaxrl_dist.train(config(tmp_path / "data", env="")))


def test_records_of_another_form_of_the_environment_are_told(tmp_path):
    sizes = {"total_env_steps": 64, "num_envs": 8, "rollout_length": 8, "evaluation_episodes": 0}
    changed = {
        "time_limit": 20,
        "record": str(tmp_path / "data"),
        "learning_starts": 64,
        **sizes,
        **SIZES,
    }
    final(jaxrl_dist.train(jaxrl_dist.preset("dqn", "gymnax:CartPole-v1", **changed)))
    assert Dataset.load(tmp_path / "data").about["settings"] == {"time_limit": 20}
    assert "with time_limit 20" in Dataset.load(tmp_path / "data").summary()
    with pytest.warns(ConfigWarning, match="time_limit.*20.*None"):
        final(jaxrl_dist.train(config(tmp_path / "data")))
    final(jaxrl_dist.train(config(tmp_path / "data", time_limit=20)))  # a warning is an error


@pytest.mark.parametrize(
    "changes", [{"scale_rewards": True}, {"cql_weight": 1.0, "cql_floor": True}, CORE]
)
def test_pieces_of_episodes_are_refused_where_whole_ones_count(tmp_path, changes):
    obs = np.arange(40.0)[::-1, None]
    with pytest.warns(ConfigWarning, match="are not followed"):
        data = Dataset.from_arrays(
            obs, np.arange(40) % 2, np.arange(40.0), np.zeros(40), next_obs=obs + 1
        )
    data.save(tmp_path / "data")
    with pytest.raises(ConfigError, match="no whole episodes"):
        list(jaxrl_dist.train(config(tmp_path / "data", env="", **changes)))
    final(jaxrl_dist.train(config(tmp_path / "data", env="")))
