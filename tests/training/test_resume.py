"""Checkpoints and what goes on from them: to the bit, after signals and kills,
from damaged and hostile directories.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
import runs
import tensorstore

import jaxrl_dist
from jaxrl_dist import cli, plans
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import CheckpointError, ConfigError, ConfigWarning, FileWarning
from jaxrl_dist.hosts import arrays as hosts
from jaxrl_dist.plans import on_device
from jaxrl_dist.plans.session import Session
from jaxrl_dist.run import arrays, checkpoint, directories, machine, saving
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run.directories import DamageError
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.settings import stored
from jaxrl_dist.training import resuming, setup
from jaxrl_dist.training import run as training_run
from jaxrl_dist.types import Checkpoint, Report

SIZES: dict[str, Any] = {
    "num_envs": 4,
    "rollout_length": 4,
    "num_devices": 1,
    "evaluation_episodes": 0,
    "report_interval": 48,
    "hidden_sizes": (4,),
}
"""A report every three iterations."""
MEMORY: dict[str, Any] = {"replay_capacity": 160, "batch_size": 8, "learning_starts": 32}


def slow(values: list[Any]) -> list[Any]:
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in values
    ]


def config(name: str = "pg", env: str = "CartPole-v1", **values: Any) -> Train[Any]:
    memory = MEMORY if hasattr(jaxrl_dist.preset(name, env).algorithm, "replay_capacity") else {}
    return jaxrl_dist.preset(name, env, **{**SIZES, **memory, **values})


def numbers(reports: list[Report]) -> list[dict[str, Any]]:
    """All that reports say but the time."""
    return [
        {"env_steps": report.env_steps, "updates": report.updates, "iteration": report.iteration}
        | {name: value for name, value in report.metrics.items() if not name.startswith("time/")}
        for report in reports
    ]


def untimed(whole: Checkpoint) -> dict[str, Any]:
    """What of a checkpoint's progress is no time."""
    progress = {
        name: value
        for name, value in whole.progress.items()
        if name not in ("wall_time_s", "compile_s")
    }
    return {**progress, "reported": {**progress["reported"], "seconds": None}}


def assert_equal(one: Checkpoint, other: Checkpoint) -> None:
    assert jax.tree.structure(one._replace(progress={})) == jax.tree.structure(
        other._replace(progress={})
    )
    for x, y in zip(jax.tree.leaves(one[:2]), jax.tree.leaves(other[:2]), strict=True):
        np.testing.assert_array_equal(x, y)
    assert untimed(one) == untimed(other)


def last_checkpoint(run_dir: Path, changes: dict[str, Any] | None = None) -> Checkpoint:
    """The checkpoint from which a run would be resumed."""
    resumed = prepare_resume(run_dir, changes).session.resumed
    assert resumed is not None
    return resumed


def prepare_resume(run_dir: Path, changes: dict[str, Any] | None = None) -> training_run.Run:
    config = stored.stored_config(run_dir)
    run = resuming.prepare_resume(config, run_dir, {"total_env_steps": 10**9, **(changes or {})})
    (member,) = run.members
    assert member.file is not None
    member.file.close()
    return run


# --- To the bit -----------------------------------------------------------------------------------

EXACT: dict[str, dict[str, Any]] = {
    "ppo": {
        "normalize_observations": True,
        "scale_rewards": True,
        "ema_steps": 100,
        "num_epochs": 2,
        "num_minibatches": 2,
    },
    "dqn": {"priority_exponent": 0.5, "num_devices": 2, "parameter_noise": True},
    "a2c": {"num_devices": 2, "core": "gru", "core_size": 4},
    "pg": {"env": "Pendulum-v1", "normalize_observations": True, "scale_rewards": True},
    "impala": {"plan": "on_device"},
    "appo": {"plan": "on_device"},
    "pqn": {},
    "rainbow": {"num_devices": 2},
    "alphazero": {
        "num_devices": 2,
        "num_simulations": 2,
        "temperature_moves": 3,
        "scale_rewards": True,
    },
    "muzero": {"num_devices": 2, "num_simulations": 2},
    "r2d2": {"replay_capacity": 400, "core_size": 4},
    "ddpg": {"env": "Pendulum-v1", "noise": "ornstein_uhlenbeck"},
    "td3": {"env": "Pendulum-v1", "scale_rewards": True, "ema_steps": 100},
    "sac": {"env": "Pendulum-v1", "normalize_observations": True},
    "es": {"num_devices": 2},
    "ars": {"normalize_observations": True},
}
FAST = ("pg", "dqn", "es")
"""With running statistics, with a replay memory on two devices,
and with parameters for each environment."""


@pytest.mark.parametrize(
    "name", [*runs.cases(FAST, "dqn"), *slow([name for name in EXACT if name not in FAST])]
)
def test_on_device_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    """Its first part ends between two reports, so its last line is not one of the whole run's."""
    here = config(name, **{"env": "CartPole-v1", "plan": "on_device", **EXACT[name]})
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    list(jaxrl_dist.train(dataclasses.replace(here, total_env_steps=160, run_dir=str(parts))))
    first = runs.untimed(parts)
    list(jaxrl_dist.resume(parts, total_env_steps=320))
    list(jaxrl_dist.train(dataclasses.replace(here, total_env_steps=320, run_dir=str(whole))))
    assert runs.untimed(parts) == runs.untimed(whole) != first
    assert len(first) > 2 and first[-1] not in runs.untimed(whole)
    times = [line["wall_time_s"] for line in runs.read_metrics(parts)]
    assert times == sorted(times)
    assert_equal(last_checkpoint(parts), last_checkpoint(whole))
    assert (parts / "config.json").read_text() == (whole / "config.json").read_text()
    for run_dir in (parts, whole):
        assert not list(run_dir.glob("checkpoints/.*"))
    summaries = [runs.read_json(run_dir / "summary.json") for run_dir in (parts, whole)]
    assert summaries[0]["env_steps"] == summaries[1]["env_steps"] >= 320


class StopAt:
    """Asks for a stop when it has been asked so often itself."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self) -> bool:
        self.calls -= 1
        return self.calls <= 0


@functools.cache
def begun(
    plan: str, env: str, name: str, **options: Any
) -> tuple[training_run.Run, Checkpoint, list[Report]]:
    """A run that ended with its fourth iteration, between two reports."""
    run = setup.prepare(config(name, env, plan=plan, total_env_steps=50, **options))
    reports = list(plans.execute(run.session))
    return run, reports[-1].checkpoint(), reports


def until(session: Session, env_steps: int) -> Session:
    return session._replace(config=dataclasses.replace(session.config, total_env_steps=env_steps))


def resumed(run: training_run.Run, whole: Checkpoint, env_steps: int) -> list[Report]:
    session = until(run.session._replace(resumed=whole), env_steps)
    return list(plans.execute(session))


def test_a_stop_between_two_reports_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # one iteration at a time, or as many as it likes
    monkeypatch.setattr(on_device, "DISPATCH_SECONDS", 0.0)
    run = setup.prepare(config(plan="on_device", total_env_steps=10**6))
    first = list(on_device.on_device(run.session._replace(stop=StopAt(4))))
    monkeypatch.undo()
    whole = first[-1].checkpoint()
    total = whole.env_steps + 100
    straight = list(plans.execute(until(run.session, total)))
    assert [report.iteration for report in first] == [3, 4]
    assert whole.progress["since"]["iterations"] == 1
    again = resumed(run, whole, total)
    assert numbers(first[:-1] + again) == numbers(straight)
    assert_equal(again[-1].checkpoint(), straight[-1].checkpoint())
    (nothing,) = resumed(run, whole, whole.env_steps)  # what is done already is reported once more
    assert numbers([nothing]) == numbers(first[-1:])


@pytest.mark.parametrize(
    "plan, env, name, options",
    [
        ("synchronous", "envpool:CartPole-v1", "dqn", {}),
        pytest.param(
            "asynchronous",
            "CartPole-v1",
            "impala",
            {"lockstep": True, "num_actors": 2},
            marks=pytest.mark.case,
        ),
        *slow(
            [
                ("synchronous", "gymnasium:CartPole-v1", "ppo", {"num_minibatches": 2}),
                ("synchronous", "CartPole-v1", "r2d2", {"replay_capacity": 400}),
            ]
        ),
        pytest.param(
            *(
                "asynchronous",
                "envpool:CartPole-v1",
                "rainbow",
                {"lockstep": True, "num_actors": 2},
            ),
            marks=pytest.mark.case,
        ),
    ],
)
def test_two_runs_resumed_from_one_checkpoint_are_equal(
    plan: str, env: str, name: str, options: dict[str, Any]
) -> None:
    """Where environments start again: with other episodes than the run began with."""
    run, whole, first = begun(plan, env, name, **options)
    assert whole.actor == () and int(whole.state.iteration) == first[-1].iteration
    total = whole.env_steps + 100
    one, other = (resumed(run, whole, total) for _ in range(2))
    without = (
        "async/sent",
        "async/queue",
        "async/dropped",
        "async/learner_idle",
        "async/actor_idle",
    )
    ones, others = (
        [
            {key: value for key, value in line.items() if key not in without}
            for line in numbers(reports)
        ]
        for reports in (one, other)
    )
    assert ones == others
    assert_equal(one[-1].checkpoint(), other[-1].checkpoint())
    assert one[0].iteration == 6 > whole.state.iteration  # due when it would have been anyway
    assert run.session._replace(resumed=whole).host_seed != run.session.host_seed


def test_resumed_replay_memory_is_cut_at_the_restart() -> None:
    run, whole, _ = begun("synchronous", "envpool:CartPole-v1", "dqn")
    before, added = whole.state.memory, int(whole.state.memory.added[0])
    memory = jax.device_get(run.session._replace(resumed=whole).initial_state().memory[""])
    assert (memory.added == added + 1).all()
    assert not memory.steps.valid[:, added].any() and not memory.steps.terminated[:, added].any()
    np.testing.assert_array_equal(memory.steps.obs[:, added], before.steps.obs[:, added])
    np.testing.assert_array_equal(memory.steps.valid[:, :added], before.steps.valid[:, :added])
    np.testing.assert_array_equal(memory.steps.obs[:, :added], before.steps.obs[:, :added])


def test_a_memory_that_is_not_saved_is_not_copied_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be larger than the host's memory."""
    run = setup.prepare(
        config("dqn", plan="on_device", total_env_steps=50, checkpoint_replay=False)
    )
    copied: list[Any] = []
    to_host = hosts.pieces
    monkeypatch.setattr(hosts, "pieces", lambda tree: copied.append(tree) or to_host(tree))
    *_, last = plans.execute(run.session)
    assert last.checkpoint().state.memory == () == copied[0].state.memory
    assert jax.tree.leaves(last.checkpoint().state.opt_state)
    # Neither has the name of the only policy.
    jax.tree.map(np.testing.assert_array_equal, last.checkpoint().state.variables, last.variables())


def test_resume_without_replay_refills_before_learning() -> None:
    run, whole, _ = begun("synchronous", "envpool:CartPole-v1", "dqn")
    assert whole.state.updates > 0
    bare = whole._replace(state=whole.state._replace(memory=()))
    steps = SIZES["num_envs"] * SIZES["rollout_length"]
    one, two = (resumed(run, bare, whole.env_steps + count) for count in (steps // 2, 3 * steps))
    assert one[-1].updates == whole.state.updates < two[-1].updates


# --- A run's directory ----------------------------------------------------------------------------

TINY = (
    "pg --env CartPole-v1 --num-envs 4 --rollout-length 4 --hidden-sizes 4 --num-devices 1 --report-interval 16 "
    "--checkpoint-interval 16 --evaluation-episodes 0 --quiet"
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, not to be changed."""
    run_dir = tmp_path_factory.mktemp("resume") / "run"
    here = config(
        checkpoint_interval=1, keep_checkpoints=3, report_interval=16, run_dir=str(run_dir)
    )
    for report in jaxrl_dist.train(dataclasses.replace(here, total_env_steps=160)):
        written = run_dir / "checkpoints" / f"{report.env_steps:012d}"
        # a checkpoint is skipped while the one before is being written, and never comes
        for _ in range(20):
            if written.exists():
                break
            time.sleep(0.1)
    assert len(checkpoint.saved(run_dir)) in (3, 4)
    return run_dir


@pytest.fixture
def run_dir(original: Path, tmp_path: Path) -> Path:
    """A copy of it, without what it left when it ended."""
    copy = shutil.copytree(original, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "final")
    return copy


@functools.cache
def shapes(original: Path) -> Checkpoint:
    run = prepare_resume(original)
    return resuming._checkpoint_shapes(run.session)


def load(run_dir: Path, like: Checkpoint) -> Checkpoint:
    return checkpoint.load(run_dir, like, lambda about: True)


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    saver = saving.Saver(tmp_path, 2)
    state: Any = {"x": np.arange(3)}
    for steps, value in {
        10: 1.0,
        20: 7.0,
        30: None,
        35: np.nan,
        40: 7.0,
        50: 3.0,
        60: 2.0,
        70: 1.0,
    }.items():
        saver.save(Checkpoint(state, (), {"env_steps": steps}), value)
    saver.finish()
    saver.close()
    assert [int(path.name) for path in checkpoint.saved(tmp_path)] == [70, 60, 40]
    (tmp_path / "checkpoints" / ".000000000080.new").mkdir()
    saver = saving.Saver(tmp_path, 1, since=60)
    saver.save(Checkpoint(state, (), {"env_steps": 65}), 0.0)
    saver.finish()
    saver.close()
    assert [int(path.name) for path in checkpoint.saved(tmp_path)] == [65, 40]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "000000000065",
        "000000000040",
    }
    saver = saving.Saver(tmp_path, 2, since=40)  # 65 was damaged
    saver.save(Checkpoint(state, (), {"env_steps": 70}), 0.0)
    saver.finish()
    saver.close()
    assert [int(path.name) for path in checkpoint.saved(tmp_path)] == [70, 40]


def test_checkpoint_is_chosen_by_env_steps_or_best(tmp_path: Path) -> None:
    def x(which: str | int | None) -> float:
        return float(checkpoint.load_variables(tmp_path, {"x": np.zeros(3)}, which=which)["x"][0])

    saver = saving.Saver(tmp_path, 3)
    returns = {10: -7.0, 20: None, 30: 0.0, 40: -1.0}
    for steps, value in returns.items():
        state: Any = {"variables": {"x": np.full(3, float(steps))}}
        saver.save(Checkpoint(state, (), {"env_steps": steps}), value)
    saver.finish()
    saver.close()
    final: Any = {"x": np.full(3, 50.0)}
    saving.save_variables(tmp_path, final)
    assert [x(which) for which in (None, "best", 40, "20", "4e1")] == [50.0, 30.0, 40.0, 20.0, 40.0]
    for absent in (10, "newest", "40.5", "nan"):
        with pytest.raises(ConfigError, match=f"{absent}.*40.*30.*20"):
            x(absent)
    (tmp_path / "checkpoints" / "000000000020" / "more").touch()
    with pytest.raises(
        ConfigError, match=r"more is damaged: it does not belong there; take .*: 40, 30, best$"
    ):
        x(20)


@pytest.mark.parametrize("command", ["evaluate", "export", "video"])
def test_commands_take_a_checkpoint(
    run_dir: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, str(run_dir), *(["x.gif"] if command == "video" else []), "--checkpoint"]
    assert cli.main([*words, "7"]) == 2
    assert "has no checkpoint 7; it has " in capsys.readouterr().err
    assert cli.main([*words, "bets"]) == 2
    assert "has no checkpoint bets; it has " in capsys.readouterr().err


def test_variables_of_an_unfinished_run_can_be_used(run_dir: Path, original: Path) -> None:
    policy = jaxrl_dist.load_policy(run_dir)
    assert policy.variables.stats == jaxrl_dist.load_policy(original).variables.stats == ()
    jax.tree.map(
        np.testing.assert_array_equal,
        policy.variables.params,
        jaxrl_dist.load_policy(original).variables.params,
    )


def test_one_process_at_a_time(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_files.lock(str(run_dir)):
        assert cli.main(["resume", str(run_dir), "--total-env-steps", "999999"]) == 2
        assert (
            capsys.readouterr().err
            == f"jaxrl-dist: error: another process is using the run in {run_dir}\n"
        )
    run_files.lock(str(run_dir)).close()


def test_metrics_are_cut_at_the_checkpoint(tmp_path: Path) -> None:
    lines = [
        b'{"iteration": 1}\n',
        b"damaged\n",
        b'{"iteration": 3}\n',
        b'{"iteration": 4}\n',
        b'{"iteration": 5',
    ]
    for iteration, kept in {0: 0, 1: 2, 2: 2, 3: 3, 4: 4, 9: 4}.items():
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
        # more than the memory, without the end of a line
        os.truncate(tmp_path / "metrics.jsonl", 2**43)
        lost = pytest.warns(
            FileWarning,
            match=f"has lost the lines after iteration {1 if iteration == 2 else 4}, up to",
        )
        with lost if iteration in (2, 9) else contextlib.nullcontext():
            files = RunFiles(tmp_path, run_files.lock(str(tmp_path)), {}, iteration)
        files.write(Report(1, 2, iteration, 0.0, {}, lambda: None, lambda: None))  # type: ignore[arg-type, return-value]
        files.close()
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:kept])


# --- Changed configurations -----------------------------------------------------------------------

CHANGED: dict[str, Any] = {
    "learning_rate": 0.5,
    "num_envs": 8,
    "seed": 7,
    "hidden_sizes": [8],
    "normalize_observations": True,
    "discount": 0.5,
    "gae_lambda": 0.5,
    "rollout_length": 8,
    "plan": "synchronous",
    "env": "gymnax:Acrobot-v1",
    "scale_rewards": True,
    "activation": "relu",
    "layer_norm": True,
    "torso": "mlp",
    "core": "gru",
    "core_size": 8,
    "precision": "bfloat16",
    "max_gradient_norm": 9.0,
    "value_coefficient": 0.1,
    "env_options": {"gravity": "9.7"},
}


@pytest.mark.parametrize("where", ["file", "flag"])
@pytest.mark.parametrize("name", [*list(CHANGED)[:4], *slow(list(CHANGED)[4:])])
def test_a_changed_configuration_is_refused_by_name(
    name: str, where: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((run_dir / "config.json").read_text())
    part = content["hyperparameters" if name in content["hyperparameters"] else "run"]
    if name not in part:
        pytest.skip(f"pg has no {name}")
    before, arguments = (
        (run_dir / "metrics.jsonl").read_bytes(),
        ["resume", str(run_dir), "--total-env-steps", "999"],
    )
    value = CHANGED[name]
    assert part[name] != value
    if where == "file":
        part[name] = value
        (run_dir / "config.json").write_text(json.dumps(content))
    else:
        field = "--" + name.replace("_", "-")
        spelled = (
            [f"{key}={x}" for key, x in value.items()] if isinstance(value, dict) else [str(value)]
        )
        spelled = [str(x) for x in value] if isinstance(value, list) else spelled
        arguments += [field] if value is True else [field, *spelled]
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    first = f"jaxrl-dist: error: {'' if where == 'file' else 'resume keeps '}--"
    assert err.startswith(first + name.replace("_", "-")) and err.count("\n") == 1
    assert (run_dir / "metrics.jsonl").read_bytes() == before and (
        run_dir / "summary.json"
    ).exists()


def test_what_may_change(run_dir: Path) -> None:
    changes = {
        "report_interval": 32,
        "keep_checkpoints": 1,
        "evaluation_episodes": 1,
        "num_devices": 2,
    }
    reports = list(jaxrl_dist.resume(run_dir, total_env_steps=200, **changes))
    assert reports[-1].evaluation and reports[-1].evaluation["episodes"] == 1
    assert runs.read_json(run_dir / "config.json")["run"]["report_interval"] == 32
    assert len(checkpoint.saved(run_dir)) <= 2
    with pytest.raises(ConfigError, match="resume keeps seed"):
        jaxrl_dist.resume(run_dir, total_env_steps=300, seed=3)


def test_other_versions_are_worth_a_warning(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "versions", lambda: {"jax": "0.0.1"})
    with pytest.warns(ConfigWarning, match=r"saved with other versions of .*jax"):
        prepare_resume(run_dir)


def test_a_run_of_a_version_with_fewer_flags_goes_on(run_dir: Path) -> None:
    def older(content: dict[str, Any]) -> dict[str, Any]:
        del content["run"]["free_running"], content["hyperparameters"]["initial_std"]
        return content

    config = run_dir / "config.json"
    config.write_text(json.dumps(older(runs.read_json(config))))
    for path in reversed(checkpoint.saved(run_dir)):
        content = runs.read_json(path / "run.json")
        older(content["config"])
        done = content["progress"]
        (path / "run.json").write_text(json.dumps(content))
        resealed(path)
    assert prepare_resume(run_dir).session.steps == (done["env_steps"], done["env_steps"])
    *_, last = jaxrl_dist.resume(run_dir, total_env_steps=done["env_steps"] + 16)
    assert last.env_steps > done["env_steps"]


@pytest.mark.parametrize(
    "name, there, message",
    [
        (
            "observation",
            "uint8[4]",
            "observations are float32[4], but the run to resume has uint8[4]",
        ),
        (
            "action",
            "Discrete(3)",
            "actions are Discrete(2), but the run to resume has Discrete(3)",
        ),
    ],
)
def test_an_environment_with_other_spaces_is_refused(
    run_dir: Path, name: str, there: str, message: str
) -> None:
    for path in checkpoint.saved(run_dir):
        content = runs.read_json(path / "run.json")
        assert content["config"]["spaces"] == {"observation": "float32[4]", "action": "Discrete(2)"}
        content["config"]["spaces"][name] = there
        (path / "run.json").write_text(json.dumps(content))
        resealed(path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare_resume(run_dir)


@pytest.mark.case  # test_what_may_change
def test_a_run_of_natural_values_is_resumed_and_loaded(tmp_path: Path) -> None:
    """Those that Python offers, where the command line has text and whole numbers."""
    values = {
        "hidden_sizes": [4],
        "seed": np.int64(3),
        "total_env_steps": 3e1,
        "learning_rate": np.float32(1e-3),
    }
    options = {
        "env_options": {"gravity": 9.5},
        "clip_rewards": 1,
        "normalize_observations": np.bool_(True),
    }
    here = jaxrl_dist.preset(
        "pg", "CartPole-v1", run_dir=tmp_path / "run", **{**SIZES, **values, **options}
    )
    list(jaxrl_dist.train(here))
    kept = runs.read_json(tmp_path / "run/config.json")
    assert kept["run"]["env_options"] == {"gravity": "9.5"} and kept["run"]["clip_rewards"] == "1"
    assert kept["run"]["seed"] == 3 and kept["hyperparameters"]["hidden_sizes"] == [4]
    assert (
        list(jaxrl_dist.resume(tmp_path / "run", total_env_steps=np.int64(60)))[-1].env_steps >= 60
    )
    policy = jaxrl_dist.load_policy(tmp_path / "run", env_options={"gravity": 9})
    assert policy.config.env_options == {
        "gravity": "9"
    } and policy.config.algorithm.hidden_sizes == (4,)


@pytest.mark.parametrize(
    "wrong", [{"normalize_observations": "False"}, {"core": "bogus"}, {"env_options": None}]
)
def test_unstorable_config_is_refused_before_writing(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        jaxrl_dist.train(
            jaxrl_dist.preset(
                "pg", "CartPole-v1", run_dir=str(tmp_path / "run"), **{**SIZES, **wrong}
            )
        )
    assert not (tmp_path / "run").exists()


# --- Damage ---------------------------------------------------------------------------------------


def damage(path: Path, how: str, generator: random.Random) -> str:
    """Damages one file of a checkpoint, and returns its name."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.stat().st_size]
    file = generator.choice(files)
    content = bytearray(file.read_bytes())
    if how == "remove":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: generator.randrange(len(content))])
    else:
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        file.write_bytes(content)
    return str(file.relative_to(path))


@pytest.mark.parametrize("seed", [0, 1, 2, *slow(list(range(3, 200)))])
def test_any_damage_is_seen_and_the_checkpoint_before_is_used(
    seed: int, run_dir: Path, original: Path
) -> None:
    newest, before, *_ = checkpoint.saved(run_dir)
    name = damage(newest, ("flip", "cut", "remove")[seed % 3], random.Random(seed))
    like = shapes(original)
    with pytest.warns(FileWarning) as caught:
        found = load(run_dir, like)
    assert found.env_steps == int(before.name)
    (message,) = [str(warning.message) for warning in caught]
    assert (
        str(newest) in message and f"{before} is used instead" in message and "\n" not in message
    ), name


def test_a_run_without_a_whole_checkpoint_is_not_begun_anew(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run_dir / "metrics.jsonl").read_bytes()
    for path in checkpoint.saved(run_dir):
        damage(path, "cut", random.Random(0))
    for _ in range(2):
        assert cli.main(["resume", str(run_dir), "--total-env-steps", "9999"]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("jaxrl-dist: error: ") and captured.err.count("\n") == 1
        assert captured.out == "" and (run_dir / "metrics.jsonl").read_bytes() == before
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        jaxrl_dist.resume(run_dir, total_env_steps=9999)


FULL_DISK = """
import resource, signal, sys, warnings
import jaxrl_dist
from jaxrl_dist.errors import FileWarning
warnings.simplefilter("always", FileWarning)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
config = jaxrl_dist.preset("pg", "CartPole-v1", num_envs=4, rollout_length=4, hidden_sizes=(64,), num_devices=1,
    report_interval=16, checkpoint_interval=1, keep_checkpoints=1, evaluation_episodes=0)
import dataclasses, pathlib, time
folder = pathlib.Path(sys.argv[1])
def settled():  # a checkpoint is there, and none is being written
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return names and all(name[0] != "." for name in names)
for report in jaxrl_dist.train(dataclasses.replace(config, total_env_steps=256, run_dir=str(folder))):
    time.sleep(0.1)
    if report.iteration == 5:
        for _ in range(300):
            if settled():
                break
            time.sleep(0.1)
        print("FULL", *sorted(path.name for path in (folder / "checkpoints").iterdir()))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    if report.iteration == 10:
        time.sleep(1)  # by then one has failed
        print("FREE", *sorted(path.name for path in (folder / "checkpoints").iterdir()))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.case  # run/test_run_files.py::test_full_disk_during_a_checkpoint_raises_quietly
def test_on_a_full_disk_training_goes_on(tmp_path: Path) -> None:
    """In a separate process, because orbax leaves unfinished coroutines behind."""
    command = [
        sys.executable,
        "-W",
        "ignore::RuntimeWarning",
        "-c",
        FULL_DISK,
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "metrics.jsonl cannot be written" in done.stderr
    assert (
        "the run continues without a checkpoint" in done.stderr and "Traceback" not in done.stderr
    )
    full, free = ([*line.split()[1:]] for line in done.stdout.splitlines())
    assert {name for name in full if name[0] != "."} & set(free), (
        "the last that was written is still there"
    )
    lines = runs.read_metrics(tmp_path / "run")
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1)) and len(
        lines
    ) > 15
    assert last_checkpoint(tmp_path / "run").env_steps == lines[-1]["env_steps"]


# --- Signals and kills ----------------------------------------------------------------------------

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(runs.ROOT)}


def start(command: str, run_dir: Path, file: str = "metrics.jsonl") -> subprocess.Popen[str]:
    """Starts a run, and waits for its first report in ``file``; if that is far, until it
    compiles.
    """
    arguments = [*command.split(), "--total-env-steps", str(10**9), "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_dist.cli", "train", *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    lines = run_dir / ("config.json" if "100000000" in command else file)
    while not (lines.exists() and lines.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    return process


STOPPED = [
    TINY,
    TINY.replace("--report-interval 16", "--report-interval 100000000"),
    TINY.replace("CartPole-v1", "envpool:CartPole-v1"),
    f"{TINY} --plan asynchronous --num-actors 2".replace("pg", "impala"),
    f"{TINY} --plan gradients --num-actors 2".replace("pg", "a2c"),
]


@pytest.mark.parametrize("attempt", [0, *slow(list(range(1, 20)))])
def test_a_signal_saves_and_ends_the_run(attempt: int, tmp_path: Path) -> None:
    generator, run_dir = random.Random(attempt), tmp_path / "run"
    number = (signal.SIGTERM, signal.SIGINT)[attempt % 2]
    command = STOPPED[attempt % len(STOPPED)]
    process = start(command, run_dir)
    try:
        time.sleep(generator.random())
        assert [
            c
            for c in psutil.Process(process.pid).net_connections()
            if c.status == psutil.CONN_LISTEN
        ] == []
        sent, began = time.time(), time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 40  # 10 s on an idle machine
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert (
        out == ""
        and err.count("\n") == 1
        and f"`jaxrl-dist resume {run_dir}` continues from" in err
    )
    newest = checkpoint.saved(run_dir)[0]
    assert (newest / "manifest.json").stat().st_mtime >= sent - 0.1
    assert (
        runs.read_metrics(run_dir)[-1]["env_steps"]
        == int(newest.name)
        == last_checkpoint(run_dir).env_steps
    )
    assert not (run_dir / "summary.json").exists()


def test_a_second_signal_ends_at_once_even_while_xla_compiles(tmp_path: Path) -> None:
    code = (
        "import os, signal, time, sys\n"
        "from jaxrl_dist.run import signals\n"
        "signals.SECOND_SECONDS = 0.2\n"
        "with signals.stopping() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while not stop(): time.sleep(0.01)\n"
        "    print('patient', flush=True)\n"
        "    import ctypes\n"
        "    time.sleep(0.3)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    ctypes.CDLL(None).sleep(60)\n"  # as compiled code: no Python handler runs meanwhile
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "patient\n", "")
    assert time.monotonic() - began < 40


@pytest.mark.parametrize("attempt", slow(list(range(20))))
def test_a_killed_run_goes_on_from_its_newest_checkpoint(attempt: int, tmp_path: Path) -> None:
    generator, run_dir = random.Random(attempt), tmp_path / "run"
    process = start(TINY if attempt % 2 else TINY.replace("pg", "pqn"), run_dir)
    try:
        time.sleep(1 + 3 * generator.random())
    finally:
        process.kill()
        process.communicate()
    newest = checkpoint.saved(run_dir)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is damaged: what has its name is whole
        assert last_checkpoint(run_dir).env_steps == int(newest.name)
    total = int(newest.name) + 100
    reports = list(jaxrl_dist.resume(run_dir, total_env_steps=total))
    assert reports[-1].env_steps >= total
    steps = [line["env_steps"] for line in runs.read_metrics(run_dir)]
    assert steps == sorted(set(steps)) and len(steps) > 3


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(5))
def test_a_killed_population_goes_on_with_all_members(attempt: int, tmp_path: Path) -> None:
    generator, run_dir = random.Random(attempt), tmp_path / "run"
    command = f"{TINY} --vary learning-rate=1e-3,1e-2 --evolve pbt --evolve-interval 64"
    members = [run_dir / "members" / name for name in ("000", "001")]
    process = start(command, run_dir, "members/001/metrics.jsonl")
    try:
        while not all(map(checkpoint.saved, members)):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(3 * generator.random())
    finally:
        process.kill()
        process.communicate()
    total = int(checkpoint.saved(members[0])[0].name) + 200
    with warnings.catch_warnings():
        # The members save a report before the population writes its line,
        # which may be lost in between.
        warnings.filterwarnings("ignore", ".*has lost the lines after iteration", FileWarning)
        *_, last = jaxrl_dist.resume(run_dir, total_env_steps=total)
    assert len(last.members) == 2 and last.ended_by is not None
    for member in members:
        lines = runs.read_metrics(member)
        steps = [line["env_steps"] for line in lines]
        assert steps == sorted(set(steps)) and steps[-1] >= total
        assert {line["population/parent"] for line in lines} <= {0.0, 1.0}


# --- Hostile directories --------------------------------------------------------------------------


class Canary:
    """Pickled, it would leave a file behind when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def resealed(path: Path) -> None:
    """Writes the manifest that fits the files."""
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    digests = {file.relative_to(path).as_posix(): directories.sha256(file) for file in files}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "sha256": digests}))


def hostile(path: Path, canary: Path, seed: int) -> None:
    """Makes a checkpoint one that someone else might have made to do harm."""
    import pickle

    generator, evil = random.Random(seed), pickle.dumps(Canary(canary))
    manifest = path / "manifest.json"
    files = sorted(file for file in path.rglob("*") if file.is_file() and file != manifest)
    victim, data = generator.choice(files), max(files, key=lambda file: file.stat().st_size)
    kind = seed % 10
    if kind == 0:  # a pickle in the place of a file that is read, or of all
        for file in [path / "run.json"] if seed % 20 else files:
            file.write_bytes(evil)
        resealed(path)
    elif kind == 1:  # one more, which nobody has signed
        (path / "arrays" / "state.pkl").write_bytes(evil)
    elif kind == 2:  # a huge shape
        store = tensorstore.KvStore.open(
            {"driver": "ocdbt", "base": f"file://{path}/arrays/"}
        ).result()
        name = generator.choice([key for key in store.list().result() if key.endswith(b"/.zarray")])
        header = json.loads(store[name])
        header["shape"] = [10 ** (3 + seed % 13) for _ in header["shape"]] or [10**12]
        header["chunks"] = generator.choice([header["shape"], [1] * len(header["shape"])])
        store[name] = json.dumps(header).encode()
        resealed(path)
    elif kind == 3:  # names that lead out
        content = json.loads(manifest.read_text())
        content["sha256"]["../" * (1 + seed // 10) + "etc/passwd"] = "0" * 64
        manifest.write_text(json.dumps(content))
    elif kind == 4:  # links
        target = generator.choice([Path("/etc/passwd"), Path("/dev/zero"), canary.parent, data])
        moved = data.read_bytes()
        victim.unlink()
        if target == data == victim:
            (path / "copy").write_bytes(moved)
            target = path / "copy"
        victim.symlink_to(target)
        if seed % 20 == 4:
            resealed(path)
    elif kind == 5:  # what never ends
        victim.unlink()
        os.mkfifo(victim)
    elif kind == 6:  # larger than it can be
        with data.open("r+b") as file:
            file.truncate(2**40)
    elif kind == 7:  # JSON that is none, or too deep
        nested = "[" * 100_000 + "]" * 100_000
        name = generator.choice(["manifest.json", "run.json"])
        (path / name).write_text(
            generator.choice([nested, "[]", "{}", "null", '"x"', '{"sha256": []}'])
        )
        if name == "run.json":
            resealed(path)
    elif kind == 8:  # the checkpoint itself is a link, or a file
        moved_to = path.with_name("elsewhere")
        path.rename(moved_to)
        path.symlink_to(moved_to) if seed % 20 == 8 else path.write_bytes(evil)
    else:  # counts that no run has
        content = json.loads((path / "run.json").read_text())
        content["progress"] = generator.choice(
            [None, [], {}, {"env_steps": "x"}, {"env_steps": -1, "since": 3}]
        )
        (path / "run.json").write_text(json.dumps(content))
        resealed(path)


@pytest.mark.parametrize("seed", [*range(10), *slow(list(range(10, 100)))])
def test_a_hostile_directory_is_refused_and_runs_nothing(
    seed: int, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, *others = checkpoint.saved(run_dir)
    for path in others:
        shutil.rmtree(path)
    canary = tmp_path / "canary"
    hostile(newest, canary, seed)
    before = (run_dir / "metrics.jsonl").read_bytes()
    began = time.process_time()
    code = cli.main(["resume", str(run_dir), "--total-env-steps", "9999"])
    assert time.process_time() - began < 5
    err = capsys.readouterr().err
    assert (
        code == 2
        and err.startswith("jaxrl-dist: error: ")
        and err.count("\n") == 1
        and len(err) < 600
    ), err
    assert not canary.exists() and (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "header",
    [
        {"chunks": [2 * 10**11, 1]},
        {"chunks": [1, 2**60]},
        {"chunks": [-(2**40), -(2**40)]},
        {"chunks": ["4", "4"]},
        {"shape": [2**62, 2**62], "chunks": [1, 1]},
        {"dtype": [["x", "<f4", [10**6, 10**6]]]},
        {"dtype": "|V100000000000"},
        {"dtype": "|S4"},
        {"filters": [{"id": "delta"}]},
        {"compressor": {"id": "pickle"}},
        {"fill_value": "A" * 10**6},
        {"zarr_format": 3},
    ],
)
def test_array_header_cannot_claim_memory(header: dict[str, Any], tmp_path: Path) -> None:
    like = {"x": np.ones((4, 4), np.float32)}
    arrays.save(tmp_path / "arrays", like)
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{tmp_path}/arrays/"}
    ).result()
    store["x/.zarray"] = json.dumps({**json.loads(store["x/.zarray"]), **header}).encode()
    with pytest.raises(
        DamageError, match=r"is damaged: x has chunks|cannot be read|another network: x is"
    ) as raised:
        arrays.restore(tmp_path / "arrays", like)
    assert len(str(raised.value)) < 600 and "\n" not in str(raised.value)


def test_a_file_larger_than_the_memory_is_not_read(run_dir: Path) -> None:
    path = checkpoint.saved(run_dir)[0]
    os.truncate(path / "arrays/manifest.ocdbt", 2**43)
    with pytest.raises(
        DamageError, match=f"it has {2**43} bytes, which is more than the memory here"
    ):
        checkpoint.verify(path, None)


@pytest.mark.parametrize("name", ["{}", ".{}.new", ".{}.kept", ".{}.old"])
def test_target_of_a_checkpoint_link_is_not_deleted(name: str, tmp_path: Path) -> None:
    folder, victim = tmp_path / "run" / "checkpoints", tmp_path / "victim"
    saver = saving.Saver(folder.parent, 1)
    for path in (victim, folder):
        path.mkdir(parents=True, exist_ok=True)
    (victim / "precious").touch()
    (folder / name.format("000000000010")).symlink_to(victim)
    for _ in range(2):
        saver.save(Checkpoint({"x": np.arange(3)}, (), {"env_steps": 10}), None)
        saver.finish()
    saver.close()
    assert [path.name for path in victim.iterdir()] == ["precious"]
    checkpoint.verify(folder / "000000000010", None)


def test_what_is_no_checkpoint_is_never_deleted(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in (".ssh", ".000000000010.new", ".final.old", ".10.new.old"):
        (home / name).mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "checkpoints").symlink_to(home)
    with pytest.raises(ConfigError, match="checkpoints is a link"):
        saving.Saver(tmp_path / "linked", 1)
    with pytest.raises(ConfigError, match="checkpoints is a link"):
        saving.save_variables(tmp_path / "linked", {})  # type: ignore[arg-type]
    assert len(list(home.iterdir())) == 4
    shutil.copytree(home, tmp_path / "run" / "checkpoints")
    saving.Saver(tmp_path / "run", 1).close()
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {
        ".ssh",
        ".10.new.old",
    }


class _KillError(BaseException):
    """As if the process was killed."""


def test_rewritten_checkpoint_is_always_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen, rename = tmp_path / "checkpoints" / "000000000010", [], Path.rename
    path.parent.mkdir()

    def write(value: int) -> None:
        saving._write(path, {"x": np.arange(3)}, {"value": value})

    def look() -> None:
        found = checkpoint._newest(
            tmp_path, checkpoint.saved(tmp_path), lambda path: checkpoint.verify(path, None) or path
        )
        seen.append(runs.read_json(found / "run.json")["value"])

    def watched(self: Path, to: Path) -> None:
        rename(self, to)
        if self.parent == path.parent:
            look()
            if seen == [1, 2, 2]:
                raise _KillError

    write(1)
    monkeypatch.setattr(Path, "rename", watched)
    write(2)
    assert seen == [1, 2]
    with pytest.raises(_KillError):
        write(3)
    monkeypatch.undo()
    write(3)  # over what was left by the one that was killed
    look()
    assert seen == [1, 2, 2, 3]
    path.rename(path.with_name(f".{path.name}.kept"))
    path.with_name(f".{path.name}.new").mkdir()
    saving.Saver(tmp_path, 1).close()
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_the_disk_does_not_give_is_damage(
    run_dir: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, before, *_ = checkpoint.saved(run_dir)
    whole = hashlib.file_digest

    def fail(file: Any, name: str) -> Any:
        if str(newest) in file.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(file, name)

    like = shapes(original)
    monkeypatch.setattr(hashlib, "file_digest", fail)
    with pytest.warns(FileWarning, match=f"Input/output.*{before}"):
        assert load(run_dir, like).env_steps == int(before.name)


@pytest.mark.parametrize(
    "what", ["pipe", "link", "nested", '"x"', "NaN", "1e999", "1" + "0" * 400, "[]"]
)
def test_checkpoint_with_invalid_return_is_not_the_best(what: str, tmp_path: Path) -> None:
    about = tmp_path / "checkpoints" / "000000000010" / "run.json"
    about.parent.mkdir(parents=True)
    if what == "pipe":
        os.mkfifo(about)
    elif what == "link":
        (tmp_path / "elsewhere").write_text('{"episode_return": 9}')
        about.symlink_to(tmp_path / "elsewhere")
    else:
        value = "[" * 100_000 + "]" * 100_000 if what == "nested" else what
        about.write_text(f'{{"episode_return": {value}}}')
    saver = saving.Saver(tmp_path, 1)
    for steps, value in ((20, 2.0), (30, 1.0)):
        saver.save(Checkpoint({"x": np.arange(3)}, (), {"env_steps": steps}), value)
    saver.finish()
    saver.close()
    assert [int(path.name) for path in checkpoint.saved(tmp_path)] == [30, 20]


def test_a_last_checkpoint_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(saving, "_write", fail)
    saver = saving.Saver(tmp_path, 1)
    saver.save(Checkpoint({}, (), {"env_steps": 20}), None)
    with pytest.raises(OSError, match="full"):
        saver.finish()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saver.close()


@pytest.mark.parametrize(
    "returns, keep, kept",
    [
        ({}, 2, {70, 60}),
        ({70: None, 60: None}, 1, {70}),
        ({70: 1.0, 50: 3.0, 40: 2.0}, 1, {70, 50}),
        ({70: 3.0, 50: 3.0, 40: 3.0}, 1, {70}),  # of equals, the newest
        ({70: -2.0, 40: -1.0, 30: 9.0}, 2, {70, 60, 40}),  # 30 is gone
        ({40: 1.0}, 9, {70, 60, 50, 40}),
    ],
)
def test_which_checkpoints_are_kept(
    returns: dict[int, float | None], keep: int, kept: set[int]
) -> None:
    assert saving._checkpoints_to_keep(returns, [70, 60, 50, 40], keep) == kept


# --- Other options of the environment -------------------------------------------------------------


@pytest.mark.case  # test_what_may_change
def test_a_curriculum_changes_the_options_of_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where it is asked for; a later session goes on with the newest options."""
    run_dir = runs.train(f"{runs.CARTPOLE} --env-options max_steps_in_episode=6", tmp_path / "run")
    short = runs.read_metrics(run_dir)[-1]["episode/length"]
    assert short <= 6
    more = f"resume {run_dir} --quiet --total-env-steps"
    longer = "--env-options max_steps_in_episode=60"
    assert cli.main(f"{more} 768 {longer}".split()) == 2
    assert "resume keeps --env-options; add --change-env-options" in capsys.readouterr().err
    assert cli.main(f"{more} 768 {longer} --change-env-options".split()) == 0
    assert runs.read_json(run_dir / "config.json")["run"]["env_options"] == {
        "max_steps_in_episode": "60"
    }
    assert runs.read_metrics(run_dir)[-1]["episode/length"] > 6
    assert cli.main(f"{more} 1024".split()) == 0, "with the newest options"
    with pytest.raises(ConfigError, match=r"env_options.*change_env_options"):
        jaxrl_dist.resume(run_dir, env_options={}, total_env_steps=2048)
    reports = jaxrl_dist.resume(
        run_dir, env_options={}, change_env_options=True, total_env_steps=1280
    )
    assert list(reports)[-1].env_steps >= 1280
