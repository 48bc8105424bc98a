"""Searches beyond one population: PPO-ES, and sweeps by Optuna and by Ray Tune."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import probes  # noqa: F401  # registers Probe-v0
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.commands import request, tuning
from jaxrl_dist.commands.tuning import by_optuna, by_ray

SCRIPTS = runs.ROOT / "scripts"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(runs.ROOT), "PYTHONUNBUFFERED": "1"}
SMALL: dict[str, Any] = {"num_envs": 8, "rollout_length": 8, "hidden_sizes": (8,), "num_epochs": 2}


@pytest.mark.case  # the other tests of sweeps
def test_ppo_es_is_short_and_learns() -> None:
    """The mean return of the probes is at first that of random actions, 0.4,
    and 0.8 of the right ones.
    """
    (function,) = (
        x
        for x in ast.parse((SCRIPTS / "ppo_es.py").read_text()).body
        if isinstance(x, ast.FunctionDef)
    )
    assert function.end_lineno is not None and function.end_lineno - function.lineno < 50
    evolve = runpy.run_path(str(SCRIPTS / "ppo_es.py"))["evolve"]
    found = list(evolve("Probe-v0", 8_000, 0, size=4, iterations=4, learning_rate=0.01, **SMALL))
    steps, returns = zip(*found, strict=True)
    assert list(steps) == sorted(steps) and steps[-2] < 8_000 <= steps[-1]
    assert np.mean(returns[-2:]) > np.mean(returns[:1]) + 0.2, returns
    again = evolve("Probe-v0", 1, 0, size=4, iterations=4, learning_rate=0.01, **SMALL)
    assert list(again) == found[:1]


def sweep(*args: object) -> list[str]:
    sizes = "--evaluation-episodes 2 --num-envs 4 --rollout-length 16"
    command = (
        f"-m jaxrl_dist.cli sweep ppo --env CartPole-v1 {sizes} --vary learning-rate=1e-5:1e-1:log"
    )
    return [sys.executable, *command.split(), *map(str, args)]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--vary lr=1:2", "--vary lr: ppo has no such hyperparameter; it is --learning-rate here"),
        (
            "--vary learning-rate=0.1:0.01",
            "--vary learning-rate=0.1:0.01 is not a range of numbers; write LOW:HIGH",
        ),
        ("--vary activation=tanh:relu", "--vary activation=tanh:relu is not a range of numbers"),
        ("--vary learning-rate=0:1:log", "--learning-rate must be > 0, not 0.0"),
        (
            "--vary learning-rate=1:2 --seeds 2",
            "--seeds does not work with --tuner optuna, which chooses the values",
        ),
        (
            "",
            "--tuner optuna needs hyperparameters to choose, such as --vary learning-rate=1e-5:1e-1:log",
        ),
    ],
)
def test_what_a_tuner_cannot_choose_is_refused(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # as if Optuna were installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert cli.main(f"sweep ppo --env CartPole-v1 --tuner optuna {flags}".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxrl-dist: error: {message}")


def test_tuner_and_actors_do_not_share_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if name == "ray" else find_spec(name)
    )
    words = "--plan asynchronous --actors-on ray --tuner ray --vary learning-rate=1e-4:1e-2"
    assert cli.main(f"sweep impala --env CartPole-v1 {words}".split()) == 2
    assert "each would wait for the other; use --tuner optuna" in capsys.readouterr().err


def test_a_tuner_that_is_missing_is_one_line_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        cli.main(
            [
                "sweep",
                "ppo",
                "--env",
                "CartPole-v1",
                "--tuner",
                "ray",
                "--vary",
                "learning-rate=1e-4:1e-2",
            ]
        )
        == 2
    )
    needed = "needs a package that is not installed: pip install 'jaxrl-dist[ray]'"
    assert capsys.readouterr().err == f"jaxrl-dist: error: --tuner ray {needed}\n"


def test_ray_cannot_compare_runs_of_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "check_tuner", lambda *command: None)  # whether it is installed
    step = {
        "obs": np.zeros((11, 4), np.float32),
        "action": np.arange(10) % 2,
        "reward": np.ones(10),
    }
    jaxrl_dist.Dataset.from_episodes([{**step, "terminated": True}]).save(tmp_path / "data")
    command = [
        "dqn",
        "--data",
        str(tmp_path / "data"),
        "--env",
        "CartPole-v1",
        "--vary",
        "learning-rate=1e-4:1e-2",
    ]
    assert cli.main(["sweep", *command, "--tuner", "ray"]) == 2
    assert "--plan offline does not have; use --tuner optuna" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, score",
    {
        "": "greedy return",
        "--evaluation-policy sampled": "sampled return",
        "--evaluation-episodes 0": "training return",
    }.items(),
)
def test_trials_are_headed_by_what_ranks_them(
    flags: str,
    score: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trial = SimpleNamespace(
        number=0,
        value=9.0,
        params={"learning-rate": 0.1},
        user_attrs={by_optuna.RUN: "trials/0000"},
    )
    told = list[Any]()
    study = SimpleNamespace(
        ask=lambda: trial, tell=lambda *result, state: told.append(trial), get_trials=lambda states=None: [*told],
        best_value=9.0, best_params=trial.params,
    )  # fmt: skip
    trial.set_user_attr = trial.user_attrs.__setitem__
    trial.suggest_float = lambda name, low, high, log: trial.params[name]
    optuna, states = MagicMock(), SimpleNamespace(RUNNING=0, COMPLETE=1, PRUNED=2)
    optuna.create_study.return_value = study
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    monkeypatch.setitem(sys.modules, "optuna.trial", SimpleNamespace(TrialState=states))  # type: ignore[arg-type]
    monkeypatch.setattr(
        by_optuna, "_train", lambda run, trials, run_dir, stop: [by_optuna.Outcome(9.0, run_dir)]
    )
    monkeypatch.setattr(tuning, "check_tuner", lambda *command: None)  # whether it is installed
    command = f"sweep ppo --env CartPole-v1 --tuner optuna --vary learning-rate=1e-5:1 --trials 1 {flags} --run-dir"
    assert cli.main([*command.split(), str(tmp_path / "run")]) == 0
    _, batch, *lines = capsys.readouterr().out.splitlines()
    assert batch == f"1 trials, best {score} 9 with --learning-rate 0.1"
    head, row = (re.split("  +", line.strip()) for line in lines)
    assert head == [score, "learning-rate", "run"] and row == ["9", "0.1", "trials/0000"]


def test_ranges_and_choices_of_a_tuner() -> None:
    config, _ = request.parse(["ppo", "--env", "CartPole-v1"]).resolved()
    vary = {
        "learning-rate": "1e-5:1:log",
        "num-epochs": "1:4",
        "activation": "tanh,relu",
        "gae-lambda": "0:1",
    }
    assert tuning.spaces(config, vary) == {
        "learning-rate": (1e-5, 1.0, True), "num-epochs": (1, 4, False), "activation": ("tanh", "relu"),
        "gae-lambda": (0.0, 1.0, False),
    }  # fmt: skip


def sweep_by_optuna(monkeypatch: pytest.MonkeyPatch, path: Path, trials: int) -> int:
    """The exit code of a sweep whose trials do not train."""
    pytest.importorskip("optuna", reason="needs jaxrl-dist[optuna]")
    monkeypatch.setattr(
        by_optuna,
        "_train",
        lambda run, trials, run_dir, stop: [by_optuna.Outcome(9.0, run_dir)] * len(trials),
    )
    command = f"sweep ppo --env CartPole-v1 --tuner optuna --vary learning-rate=1e-5:1 --trials {trials} --run-dir"
    return cli.main([*command.split(), str(path)])


@pytest.mark.parametrize("name", ["a?b", "a%41", "a{b}", "a#b c", "a\n@:"])
def test_optuna_keeps_its_study_in_the_run_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [sweep_by_optuna(monkeypatch, tmp_path / name, trials) for trials in (1, 2)] == [0, 0]
    assert "2 trials, best greedy return 9 with" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / tuning.STUDY).read_bytes().startswith(b"SQLite format 3")


@pytest.mark.parametrize("name", ["optuna.db", "trials", "trials/0001", "ray", "members"])
def test_a_sweep_follows_no_link_in_its_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep_by_optuna(monkeypatch, tmp_path / "run", 1) == 0
    path, victim = tmp_path / "run" / name, tmp_path / "victim"
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    assert sweep_by_optuna(monkeypatch, tmp_path / "run", 2) == 2
    assert f"{path} is a link" in capsys.readouterr().err and not victim.exists()


def test_a_damaged_study_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep_by_optuna(monkeypatch, tmp_path / "run", 1) == 0
    (tmp_path / "run" / tuning.STUDY).write_bytes(b"no database" * 1000)
    capsys.readouterr()
    assert sweep_by_optuna(monkeypatch, tmp_path / "run", 2) == 2
    error = capsys.readouterr().err
    assert "optuna.db cannot be used as Optuna's study: " in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_sweep_by_optuna_survives_a_kill(tmp_path: Path) -> None:
    """The second command keeps what was finished, and trains again with the values of what was
    not.
    """
    optuna = pytest.importorskip("optuna", reason="needs jaxrl-dist[optuna]")
    path = tmp_path / "run"
    command = sweep(
        "--tuner", "optuna", "--trials", 6, "--total-env-steps", 2000, "--run-dir", path
    )
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().startswith(
            "6 trials by optuna, 2 at a time"
        )
        assert process.stdout.readline().startswith("2 trials, best greedy return ")
        study = None
        while study is None or len(study.trials) < 4:  # the second batch has begun
            study = optuna.load_study(study_name="ppo", storage=f"sqlite:///{path / tuning.STUDY}")
        process.send_signal(signal.SIGKILL)
    before = [trial.value for trial in study.trials[:2]]
    asked = [trial.params for trial in study.trials[2:]]
    done = subprocess.run(
        command, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=300
    ).stdout
    assert [line.split(",")[0] for line in done.splitlines()[1:3]] == ["4 trials", "6 trials"]
    trials = optuna.load_study(study_name="ppo", storage=f"sqlite:///{path / tuning.STUDY}").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2 + ["FAIL"] * 2 + [
        "COMPLETE"
    ] * 4
    assert [trial.value for trial in trials[:2]] == before and all(
        math.isfinite(x.value) for x in trials[4:]
    )
    assert [trial.params for trial in trials[4:6]] == asked
    head, *ranking = map(str.split, done.splitlines()[3:])
    assert head == ["greedy", "return", "learning-rate", "run"] and len(ranking) == 6
    best = max(trials, key=lambda trial: trial.value or -math.inf)
    assert ranking[0] == [
        f"{best.value:.4g}",
        f"{best.params['learning-rate']:.4g}",
        best.user_attrs["run"],
    ]
    stored = json.loads((path / best.user_attrs["run"] / "config.json").read_text())
    assert stored["hyperparameters"]["learning_rate"] == best.params["learning-rate"]
    rates = [
        json.loads((path / f"trials/0004/members/{x}/config.json").read_text())
        for x in ("000", "001")
    ]
    assert [x["hyperparameters"]["learning_rate"] for x in rates] == [
        x["learning-rate"] for x in asked
    ]


@pytest.mark.slow
def test_a_sweep_by_ray_ends_bad_trials_early(tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", reason="needs jaxrl-dist[ray]")
    path = tmp_path / "run"
    command = sweep(
        "--tuner", "ray", "--trials", 4, "--jobs", 1, "--total-env-steps", 3600, "--run-dir", path
    )
    environment = {**ENVIRONMENT, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^4 trials, of which 4 with a return, [1-3] after all env steps$", done.stdout, re.M
    )
    best = path / done.stdout.splitlines()[-1].split()[-1]
    assert cli.main(["evaluate", str(best), "--episodes", "2"]) == 0
    lines = [
        file.read_text().splitlines() for file in path.glob("trials/*/members/000/metrics.jsonl")
    ]
    ended = [json.loads(x[-1])["env_steps"] for x in lines]
    assert len(ended) == 4 and min(ended) < 3600 <= max(ended)


def test_a_value_that_cannot_run_leaves_the_other_trials_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = request.parse(runs.CARTPOLE.removesuffix(" --num-minibatches 2").split())
    trials = [{"num-minibatches": value} for value in (2, 3, 2)]
    first, refused, again = by_optuna._train(command, trials, tmp_path / "0000", lambda: False)
    assert first == again and first[0] is not None and first[1] == tmp_path / "0000/members/000"
    assert refused.score is None
    said = capsys.readouterr().err
    assert "the trial with --num-minibatches 3 is left out: " in said and said.count("\n") == 1
    assert by_optuna._train(command, trials[1:2], tmp_path / "0001", lambda: False) == [
        (None, tmp_path / "0001")
    ]
    trials = [{"num-minibatches": value} for value in (2, 4)]  # two programs, in turn
    stopped = by_optuna._train(command, trials, tmp_path / "0002", lambda: True)
    assert len(stopped) == 2 and stopped[1].score is None


def test_what_no_value_could_mend_ends_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, optuna, trial = [], MagicMock(), SimpleNamespace(number=0)
    trial.suggest_float = lambda name, low, high, log: 0.1
    states = SimpleNamespace(RUNNING=0, COMPLETE=1, PRUNED=2, FAIL=3)
    optuna.create_study.return_value = SimpleNamespace(
        ask=lambda: trial,
        tell=lambda number, state: told.append(state),
        get_trials=lambda states=None: [],
    )
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    monkeypatch.setitem(sys.modules, "optuna.trial", SimpleNamespace(TrialState=states))  # type: ignore[arg-type]
    command = request.parse(runs.CARTPOLE.replace("--num-devices 1", "--num-devices 99").split())
    space = {"learning-rate": tuning.Range(0.01, 0.1, False)}
    with pytest.raises(jaxrl_dist.ConfigError, match="99"):
        by_optuna.tune(search_of(command, space, tmp_path, 2, 2), "return", 0)
    assert told == [states.FAIL] * 2


NO_RUN: Any = None  # Ray's processes read the command instead


def search_of(
    run: request.Request, space: Any, run_dir: Path, trials: int, jobs: int, show: Any = print
) -> tuning.Search:
    return tuning.Search(run, space, run_dir, trials, jobs, lambda: False, show)


class Study:
    """As much of Optuna's as a sweep uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, proposals: list[float]) -> None:
        self.trials, self.proposals, optuna = list[Any](), proposals, MagicMock()
        optuna.create_study.return_value = self
        states = SimpleNamespace(RUNNING=0, COMPLETE=1, PRUNED=2, FAIL=3)
        monkeypatch.setitem(sys.modules, "optuna", optuna)
        monkeypatch.setitem(sys.modules, "optuna.trial", SimpleNamespace(TrialState=states))  # type: ignore[arg-type]

    def get_trials(self, states: tuple[int, ...] = (0, 1, 2, 3)) -> list[Any]:
        return [trial for trial in self.trials if trial.state in states]

    def ask(self) -> Any:
        params = {"learning-rate": self.proposals.pop(0)}
        trial = SimpleNamespace(
            number=len(self.trials), params=params, state=0, value=None, user_attrs={}
        )
        trial.set_user_attr = trial.user_attrs.__setitem__
        trial.suggest_float = lambda name, low, high, log: params[name]
        self.trials.append(trial)
        return trial

    def tell(self, trial: Any, value: float | None = None, *, state: int) -> None:
        trial = self.trials[trial] if isinstance(trial, int) else trial
        trial.value, trial.state = value, state

    @property
    def best_value(self) -> float:
        raise ValueError

    def sweep(self, tmp_path: Path, trials: int, said: list[str]) -> bool:
        command, space = (
            request.parse(runs.CARTPOLE.split()),
            {"learning-rate": tuning.Range(0.01, 0.1, False)},
        )
        search = search_of(command, space, tmp_path, trials, 2, said.append)
        return by_optuna.tune(search, "return", 0)


def test_equal_values_train_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, said = list[Any](), list[str]()

    def scores(run: Any, trials: list[Any], run_dir: Path, stop: Any) -> list[Any]:
        trained.extend(trials)
        return [
            by_optuna.Outcome(100 * trial["learning-rate"], run_dir / f"{trial['learning-rate']}")
            for trial in trials
        ]

    monkeypatch.setattr(by_optuna, "_train", scores)
    study = Study(monkeypatch, [0.1, 0.2, 0.2, 0.3, 0.1, 0.2])
    assert study.sweep(tmp_path, 6, said)
    assert [trial["learning-rate"] for trial in trained] == [0.1, 0.2, 0.3]
    assert [trial.value for trial in study.trials] == pytest.approx([10, 20, 20, 30, 10, 20])
    _, *rows = said[-1].splitlines()
    assert [row.split()[-1] for row in rows] == [
        "trials/0002/0.3",
        "trials/0000/0.2",
        "trials/0000/0.1",
    ]


def test_a_second_failure_of_the_environment_ends_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = [True, False, True, True]

    def scores(run: Any, trials: list[Any], run_dir: Path, stop: Any) -> list[Any]:
        if fails.pop(0):
            raise jaxrl_dist.EnvError("step 3 broke")
        return [by_optuna.Outcome(1.0, run_dir / str(number)) for number in range(len(trials))]

    monkeypatch.setattr(by_optuna, "_train", scores)
    study = Study(monkeypatch, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    with pytest.raises(jaxrl_dist.EnvError):
        study.sweep(tmp_path, 8, [])
    assert [trial.state for trial in study.trials] == [2, 2, 1, 1, 2, 2, 3, 3]
    left_out = (
        f"jaxrl-dist: the trials in {tmp_path}/trials/0000 are left out: EnvError: step 3 broke"
    )
    assert capsys.readouterr().err.splitlines()[0] == left_out


def test_a_sweep_in_which_no_trial_has_a_return_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "check_tuner", lambda *command: None)  # whether it is installed
    monkeypatch.setattr(
        by_optuna,
        "_train",
        lambda run, trials, run_dir, stop: [by_optuna.Outcome(None, run_dir)] * len(trials),
    )
    Study(monkeypatch, [0.1, 0.2])
    command = "sweep ppo --env CartPole-v1 --tuner optuna --vary learning-rate=1e-5:1 --trials 2 --run-dir"
    assert cli.main([*command.split(), str(tmp_path / "run")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no trial has a greedy return"


def fake_ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Ray's modules, of which a test says what ``Tuner`` does."""
    ray = MagicMock()
    ray.tune.Stopper = object
    names = "ray ray.tune ray.tune.schedulers ray.tune.search ray.tune.search.basic_variant"
    for name in names.split():
        monkeypatch.setitem(sys.modules, name, ray.tune if name == "ray.tune" else ray)
    return ray


def test_ray_hears_of_a_trial_from_its_first_return_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A 0 before that would be more than any return of many environments."""
    ray, heard = fake_ray(monkeypatch), list[Any]()
    ray.tune.report = heard.append
    ray.tune.get_context.return_value.get_trial_name.return_value = "trial"
    ray.tune.Tuner.side_effect = lambda trial, **_: SimpleNamespace(
        fit=lambda: trial({"learning-rate": 0.1}) or []
    )
    words = (
        runs.CARTPOLE.replace("CartPole-v1", "gymnax:Pendulum-v1")
        .replace(" 384 ", " 2048 ")
        .split()
    )
    config, _ = request.parse(words).resolved()
    space = {"learning-rate": tuning.Range(0.01, 0.1, False)}
    by_ray.tune(search_of(NO_RUN, space, tmp_path, 1, 1), words, config)
    reports = [
        json.loads(line)
        for line in next(tmp_path.glob("trials/*/**/metrics.jsonl")).read_text().splitlines()
    ]
    assert (
        0
        < len(heard)
        == sum(x["episode/recent_return"] is not None for x in reports)
        < len(reports)
    )
    assert all(x["episode_return"] < 0 for x in heard)


def test_what_a_trial_of_ray_cannot_do_is_told_as_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray, heard = fake_ray(monkeypatch), list[Any]()
    ray.tune.report = heard.append
    ray.tune.get_context.return_value.get_trial_name.return_value = "trial"
    ray.tune.Tuner.side_effect = lambda trial, **_: SimpleNamespace(
        fit=lambda: trial({"num-minibatches": 7}) or []
    )
    words = runs.CARTPOLE.removesuffix(" --num-minibatches 2").split()
    config, _ = request.parse(words).resolved()
    search = search_of(NO_RUN, {"num-minibatches": ("7",)}, tmp_path, 1, 1)
    assert not by_ray.tune(search, words, config)
    (told,) = heard
    assert told["episode_return"] == by_ray.LOWEST and told[by_ray.PROBLEM].startswith(
        "--num-minibatches 7 does not"
    )


@pytest.mark.parametrize("whole", [True, False])
def test_ray_s_best_is_of_the_trials_that_ended(
    whole: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A return after fewer env steps may be higher, and is of a run that was stopped as bad."""
    ray, said = fake_ray(monkeypatch), list[str]()
    results = [
        SimpleNamespace(
            metrics={"episode_return": 9.0, "env_steps": 30, "run": "early"}, config={"lr": 0.1}
        ),
        SimpleNamespace(
            metrics={"episode_return": 7.0, "env_steps": 96 if whole else 30, "run": "a"},
            config={"lr": 1},
        ),
        SimpleNamespace(
            metrics={"episode_return": 8.0, "env_steps": 95 if whole else 30, "run": "b"},
            config={"lr": 2},
        ),
        SimpleNamespace(
            metrics={"episode_return": by_ray.LOWEST, "env_steps": 0, "problem": "no"},
            config={"lr": 3},
        ),
        SimpleNamespace(metrics=None, config=None),
    ]
    ray.tune.Tuner.return_value.fit.return_value = results
    config = jaxrl_dist.preset("ppo", "Probe-v0", total_env_steps=90)
    search = search_of(NO_RUN, {}, tmp_path, 5, 1, said.append)
    assert by_ray.tune(search, ["ppo"], config)
    assert said[0] == f"5 trials, of which 3 with a return, {2 if whole else 3} after all env steps"
    _, *rows = (line.split() for line in said[1].splitlines())
    assert [row[-1] for row in rows] == [
        f"trials/{x}/members/000" for x in (["b", "a"] if whole else ["early", "b", "a"])
    ]
    assert capsys.readouterr().err == "jaxrl-dist: the trial with --lr 3 is left out: no\n"


def test_a_sweep_by_ray_says_that_no_trial_has_a_return(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = fake_ray(monkeypatch)
    results = [SimpleNamespace(metrics=x, config=None) for x in (None, {"time": 1.0})]
    ray.tune.Tuner.return_value.fit.return_value = results
    config, said = jaxrl_dist.preset("ppo", "Probe-v0", total_env_steps=90), list[str]()
    space = {"learning_rate": tuning.Range(1e-4, 1e-2, True)}
    search = search_of(NO_RUN, space, tmp_path, 2, 1, said.append)
    assert not by_ray.tune(search, ["ppo"], config)
    assert said[-1] == "no trial has a training return" and ray.shutdown.called
