"""``--record``: what a run plays becomes a data set."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re

import jax
import numpy as np
import own
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.errors import ConfigError, EnvError
from jaxrl_dist.settings.stored import stored_config
from jaxrl_dist.training.describing import resume_command

SIZES = {
    "num_envs": 8,
    "rollout_length": 16,
    "total_env_steps": 384,
    "report_interval": 128,
    "num_devices": 1,
}
SIZES |= {"hidden_sizes": (8,), "evaluation_episodes": 0}


def config(algorithm="ppo", **changes):
    epochs = {"num_epochs": 2, "num_minibatches": 2} if algorithm == "ppo" else {}
    return jaxrl_dist.preset(
        algorithm, "CartPole-v1", **{"plan": "synchronous", **SIZES, **epochs, **changes}
    )


@pytest.mark.parametrize(
    "plan, num_devices",
    [
        ("synchronous", 1),
        pytest.param("on_device", 1, marks=pytest.mark.case),
        ("on_device", 8),
    ],
)
def test_recording_changes_nothing_and_resuming_records_apart(tmp_path, plan, num_devices):
    run_dir, path, here = (
        str(tmp_path / "run"),
        str(tmp_path / "data"),
        {"plan": plan, "num_devices": num_devices},
    )
    *_, report = jaxrl_dist.train(config(record=path, run_dir=run_dir, **here))
    *_, plain = jaxrl_dist.train(config(**here))
    for x, y in zip(
        jax.tree.leaves(report.variables()), jax.tree.leaves(plain.variables()), strict=True
    ):
        if plan == "synchronous":
            np.testing.assert_array_equal(x, y)
        else:  # XLA rounds otherwise in a program that also puts out its experience
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    data = Dataset.load(path)
    assert data.steps == report.env_steps and data.about["behaviour"] == {
        "run": run_dir,
        "training": "ppo",
    }
    assert data.log_prob is not None and (data.log_prob[data.valid] < 0).all()
    with pytest.raises(ConfigError, match="data exists; a data set needs a new directory"):
        list(jaxrl_dist.train(config(record=path)))
    with pytest.raises(ConfigError, match="data exists"):
        jaxrl_dist.train(config(record=path, run_dir=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match="is not a directory"):
        jaxrl_dist.train(
            config(record=f"{path}/dataset.json/more", run_dir=str(tmp_path / "other"))
        )
    assert not (tmp_path / "other").exists()  # and nothing is compiled before
    *_, more = jaxrl_dist.resume(run_dir, total_env_steps=512, record=path)
    assert Dataset.load(f"{path}-2").steps == more.env_steps - report.env_steps


@pytest.mark.parametrize(
    "place", ["{}/away/data", "../away/data", "link/data", ".config/data", "."]
)
def test_a_file_does_not_choose_where_record_writes(tmp_path, monkeypatch, capsys, place):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    runs.train(f"ppo --env CartPole-v1 --plan synchronous {runs.TINY}", pathlib.Path("run"))
    content = runs.read_json(pathlib.Path("run", "config.json"))
    content["run"]["record"] = place.format(tmp_path)
    pathlib.Path("run", "config.json").write_text(json.dumps(content))
    before = sorted(tmp_path.rglob("*"))
    more = ["resume", "run", "--total-env-steps", "500", "--quiet"]
    again = ["train", "--config", "run", "--run-dir", "new", "--quiet"]
    for command in (more, again, ["sweep", *again[1:], "--vary", "learning-rate=1e-3,1e-2"]):
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert f"--record {content['run']['record']} or --record None" in error
    with pytest.raises(ConfigError, match="record None"):
        jaxrl_dist.resume("run", total_env_steps=500)
    assert sorted(tmp_path.rglob("*")) == before
    assert cli.main([*again, "--record", "None"]) == 0
    config = stored_config("run")
    assert resume_command(config) == f"jaxrl-dist resume None --record {config.record}"


def test_an_own_run_goes_on_to_record_below_the_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = f"ppo --env CartPole-v1 --plan synchronous {runs.TINY} --record data/played"
    runs.train(command, pathlib.Path("run"))
    assert cli.main(["resume", "run", "--total-env-steps", "500", "--quiet"]) == 0
    assert Dataset.load("data/played").steps > Dataset.load("data/played-2").steps > 0
    assert resume_command(stored_config("run")) == "jaxrl-dist resume None"


@pytest.mark.parametrize(
    "algorithm, num_devices, kept",
    [
        ("ppo", 1, 10_000),
        ("dqn", 4, 1),
        ("es", 1, 2**26),
        pytest.param("ppo", 1, 2**26, marks=pytest.mark.case),
        pytest.param("ppo", 4, 1, marks=pytest.mark.case),
        pytest.param("dqn", 1, 10_000, marks=pytest.mark.case),
        pytest.param("dqn", 1, 2**26, marks=pytest.mark.case),
        pytest.param("es", 1, 10_000, marks=pytest.mark.case),
        pytest.param("es", 4, 1, marks=pytest.mark.case),
    ],
)
def test_all_plans_record_the_same(tmp_path, monkeypatch, algorithm, num_devices, kept):
    """The program keeps the iterations between two reports, some of them, or one."""
    monkeypatch.setattr("jaxrl_dist.plans.recording.KEPT_BYTES", kept)
    changes = {"total_env_steps": 1024, "report_interval": 512}
    if algorithm == "dqn":
        changes |= {
            "rollout_length": 2,
            "batch_size": 32,
            "replay_capacity": 512,
            "learning_starts": 64,
        }
    if algorithm == "es":
        changes |= {"rollout_length": 64}
    for plan, devices in [("synchronous", 1), ("on_device", num_devices)]:
        record = str(tmp_path / plan)
        list(
            jaxrl_dist.train(
                config(
                    algorithm, **{**changes, "plan": plan, "record": record, "num_devices": devices}
                )
            )
        )
    one, other = (Dataset.load(tmp_path / plan) for plan in ("synchronous", "on_device"))
    assert one.steps == other.steps and len(one.returns) == len(other.returns) > 8
    assert (one.log_prob is None) == (other.log_prob is None) == (algorithm == "es")
    for x, y in zip(jax.tree.leaves(one.columns), jax.tree.leaves(other.columns), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ["synchronous", "on_device"])
def test_a_failing_environment_leaves_earlier_rollouts_recorded(tmp_path, plan):
    sizes = {**SIZES, "rollout_length": 4, "total_env_steps": 10**6, "report_interval": 6400}
    spoilt = jaxrl_dist.preset(
        "a2c", own.Spoilt(), plan=plan, record=str(tmp_path / "data"), **sizes
    )
    with pytest.raises(EnvError, match=r"at step \d+ gave") as caught:
        list(jaxrl_dist.train(spoilt))
    rows = int(re.search(r"at step (\d+)", str(caught.value))[1]) // 4 * 4
    # seven steps and a reset
    assert Dataset.load(tmp_path / "data").steps == (rows - rows // 8) * 8 > 0


@pytest.mark.parametrize("record", ["", "/", "."])
def test_a_resumed_run_records_where_a_directory_can_be_made(tmp_path, monkeypatch, capsys, record):
    monkeypatch.chdir(tmp_path)
    run = str(runs.train(f"ppo --env CartPole-v1 --plan synchronous {runs.TINY}", tmp_path / "run"))
    command = ["resume", run, "--total-env-steps", "100000", "--record", record]
    assert (
        cli.main(command) == 2
        and "exists; a data set needs a new directory" in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_of_the_record_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    run = str(runs.train(f"ppo --env CartPole-v1 --plan synchronous {runs.TINY}", tmp_path / "run"))

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("jaxrl_dist.data.writing.FileIO", full)
    command = ["resume", run, "--total-env-steps", "100000", "--record", str(tmp_path / "data")]
    assert cli.main(command) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/data: No space left on device" in error and "with --record None" in error
    assert f"`jaxrl-dist resume {run}" in error


@pytest.mark.parametrize("correlation", [None, 0.5])
def test_probabilities_of_correlated_noise_are_not_recorded(tmp_path, correlation):
    changes = {"num_epochs": 1, "num_minibatches": 1, "noise_correlation": correlation, **SIZES}
    path = str(tmp_path / "data")
    run = jaxrl_dist.preset("ppo", "gymnax:Pendulum-v1", plan="synchronous", record=path, **changes)
    *_, _ = jaxrl_dist.train(run)
    assert (Dataset.load(path).log_prob is None) == bool(correlation)


def test_a_run_that_is_left_has_recorded_what_its_actors_played(tmp_path):
    epsilon = {
        "epsilon_start": 0.5,
        "epsilon_end": 0.5,
        "learning_starts": 64,
        "replay_capacity": 512,
    }
    dqn = config(
        "dqn",
        plan="asynchronous",
        num_actors=2,
        record=str(tmp_path / "data"),
        **epsilon,
        batch_size=32,
    )
    reports = jaxrl_dist.train(dqn)
    report = next(reports)
    reports.close()
    data = Dataset.load(tmp_path / "data")
    assert data.steps >= report.env_steps > 0
    # 1: an action is repeated
    assert set(np.exp(data.log_prob[data.valid]).round(4)) <= {0.25, 0.75, 1.0}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seeds": 2}, "a population cannot record while it trains"),
        ({"frame_stack": 2}, "stacked frames; record a run without"),
        (
            {"env": "pgx:tic_tac_toe"},
            "one agent; leave one in a game with --env-options opponents=random",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused(tmp_path, capsys, changes, message):
    flags = {"plan": "synchronous", **changes}.items()
    words = [word for name, value in flags for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [
        *runs.CARTPOLE.replace("--env CartPole-v1 " if "env" in changes else " ", " ").split(),
        *words,
        "--record",
        str(tmp_path / "data"),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert cli.main(["train", *command]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "plan", [pytest.param("on_device", marks=pytest.mark.case), "synchronous", "asynchronous"]
)
def test_recorded_actions_are_those_that_were_executed(tmp_path, plan):
    """Within bounds, although the density stays that of what the policy drew."""
    name = "appo" if plan == "asynchronous" else "ppo"
    changes = {
        "num_epochs": 1,
        "num_minibatches": 1,
        "initial_std": 3.0,
        "noise_correlation": None,
        **SIZES,
    }
    path = str(tmp_path / "data")
    *_, _ = jaxrl_dist.train(
        jaxrl_dist.preset(name, "gymnax:Pendulum-v1", plan=plan, record=path, **changes)
    )
    data = Dataset.load(path)
    action = data.action[data.valid, 0]
    assert np.abs(action).max() == 2
    beyond = np.abs(action) == 2
    assert 0.3 < beyond.mean() < 0.9  # of a normal distribution of deviation 3
    # they differ as the drawn actions did
    assert len(set(data.log_prob[data.valid][beyond])) > beyond.sum() / 2
