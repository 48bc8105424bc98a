"""The scripts that search beyond one population: PPO-ES, and sweeps by Optuna and by Ray Tune."""

from __future__ import annotations

import ast
import math
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import probes  # noqa: F401  # registers Probe-v0
import pytest
import runs

SCRIPTS = runs.ROOT / "scripts"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(runs.ROOT), "PYTHONUNBUFFERED": "1"}
SMALL: dict[str, Any] = {"num_envs": 8, "rollout_length": 8, "hidden_sizes": (8,), "num_epochs": 2}


@pytest.mark.case  # the other tests of sweeps
def test_ppo_es_is_short_and_learns() -> None:
    """The mean return of the probes is at first that of random actions, 0.4, and 0.8 of the right ones."""
    (function,) = (x for x in ast.parse((SCRIPTS / "ppo_es.py").read_text()).body if isinstance(x, ast.FunctionDef))
    assert function.end_lineno is not None and function.end_lineno - function.lineno < 50
    evolve = runpy.run_path(str(SCRIPTS / "ppo_es.py"))["evolve"]
    found = list(evolve("Probe-v0", 8_000, 0, size=4, iterations=4, learning_rate=0.01, **SMALL))
    steps, returns = zip(*found, strict=True)
    assert list(steps) == sorted(steps) and steps[-2] < 8_000 <= steps[-1]
    assert np.mean(returns[-2:]) > np.mean(returns[:1]) + 0.2, returns
    again = evolve("Probe-v0", 1, 0, size=4, iterations=4, learning_rate=0.01, **SMALL)
    assert list(again) == found[:1]


@pytest.mark.slow
def test_a_sweep_by_optuna_survives_a_kill(tmp_path: Path) -> None:
    """The second command keeps what was finished, and trains again with the values of what was not."""
    optuna = pytest.importorskip("optuna", reason="needs jaxrl-dist[optuna]")
    file = tmp_path / "study.db"
    command = [sys.executable, str(SCRIPTS / "optuna_sweep.py"), str(file), "--trials", "6", "--members", "2"]
    command += ["--total-env-steps", "2000"]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("2 trials, best return ")
        study = None
        while study is None or len(study.trials) < 4:  # the second batch has begun
            study = optuna.load_study(study_name="ppo", storage=f"sqlite:///{file}")
        process.send_signal(signal.SIGKILL)
    before = [trial.value for trial in study.trials[:2]]
    asked = [trial.params for trial in optuna.load_study(study_name="ppo", storage=f"sqlite:///{file}").trials[2:]]
    done = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=300).stdout
    assert [line.split(",")[0] for line in done.splitlines()] == ["4 trials", "6 trials"]
    trials = optuna.load_study(study_name="ppo", storage=f"sqlite:///{file}").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2 + ["FAIL"] * 2 + ["COMPLETE"] * 4
    assert [trial.value for trial in trials[:2]] == before and all(math.isfinite(x.value) for x in trials[4:])
    assert [trial.params for trial in trials[4:6]] == asked


@pytest.mark.slow
def test_a_sweep_by_ray_ends_bad_trials_early(tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", reason="needs jaxrl-dist[ray]")
    program = (
        "import runpy, sys; script = runpy.run_path(sys.argv[1]); "
        "found = script['sweep'](4, 1, 'CartPole-v1', 3600, sys.argv[2]); "
        "print(*('%d,%r' % (x.metrics['env_steps'], x.error) for x in found))"
    )
    command = [sys.executable, "-c", program, str(SCRIPTS / "ray_sweep.py"), str(tmp_path)]
    environment = {**ENVIRONMENT, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    ended = [x.split(",") for x in done.stdout.splitlines()[-1].split()]
    assert len(ended) == 4 and all(error == "None" for _, error in ended)
    assert min(int(steps) for steps, _ in ended) < 3600 <= max(int(steps) for steps, _ in ended)
