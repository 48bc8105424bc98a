"""Environments in worker processes and signals, stops, constructors, ``close``,
and what no policy heeds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import own
import pytest
import runs
from test_gymnasium import WORKERS, act, children, release

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.envs.host import envpool, runners, vector
from jaxrl_dist.envs.host.calls import awaited
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError, EnvError, EnvWarning
from jaxrl_dist.training import setup

SCRIPTED = "faulty:Scripted"


# --- Signals and stops ----------------------------------------------------------------------------


@pytest.mark.case  # training/test_resume.py::test_a_signal_saves_and_ends_the_run
def test_a_signal_to_the_whole_process_group_saves(tmp_path: Path) -> None:
    """As GNU timeout, systemd and Slurm send it."""
    endless = runs.TINY.replace("384", "1000000000")
    command = f"train a2c --env gymnasium:CartPole-v1 --env-workers processes {endless} --run-dir {tmp_path / 'run'}"
    with subprocess.Popen(
        [sys.executable, "-m", "jaxrl_dist.cli", *command.split()],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "was ended by" not in err and any((tmp_path / "run" / "checkpoints").iterdir())


def test_workers_outlive_what_ends_others() -> None:
    host = find("faulty:Scripted", workers="processes").host(2, 0)
    host.reset()
    for child in children():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(child.pid, number)
    act(host, "go on", "go on")  # type: ignore[arg-type]
    host.close()
    assert not children()


def test_a_stop_is_no_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z stops this process in the middle of a step,
    and with it the environments in its threads.
    """
    host = find("faulty:Scripted", {"seconds": "0.3"}, timeout=2).host(2, 0)
    host.reset()
    ahead = [0.0]
    original = vector.wait

    def wait(connections: Any, timeout: float) -> Any:
        if not ahead[0]:
            ahead[0] = 100.0
            return []
        return original(connections, timeout)

    monkeypatch.setattr(vector, "wait", wait)
    monkeypatch.setattr(
        vector, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    )
    act(host, "hang", "go on")  # type: ignore[arg-type]
    host.close()


def test_a_stop_costs_one_nap() -> None:
    naps: list[float] = []

    def wait(nap: float) -> str:
        naps.append(nap)
        return "answer" if len(naps) == 3 else ""

    assert awaited(wait, 10.0) == "answer" and sum(naps) < 10
    naps[:] = [0.0] * 3
    assert not awaited(wait, 10.0) and sum(naps) == pytest.approx(10.0)


# --- Constructors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "constructor, message",
    [
        ("segfault", "the process of its constructor was ended by SIGSEGV"),
        ("exit", "the process of its constructor has ended with exit code 7"),
        ("raise", "RuntimeError: no such luck"),
    ],
)
def test_a_constructor_ends_its_worker_process_alone(
    constructor: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--env-options constructor={constructor} --env-workers processes"
    assert cli.main(f"train ppo --env faulty:Scripted {options}".split()) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"jaxrl-dist: error: {SCRIPTED} cannot be made: {message}"
    assert not children()


def test_a_constructor_that_needs_the_main_thread() -> None:
    options = {"constructor": "main thread"}
    with pytest.raises(EnvError, match="signal only works in main thread"):
        find("faulty:Scripted", options)
    source = find("faulty:Scripted", options, None, "processes")
    host = source.host(1, 0)
    host.reset()
    host.close()


@pytest.mark.parametrize(
    "kind",
    [
        "Box",
        pytest.param("Image", marks=pytest.mark.case),
        pytest.param("Whole", marks=pytest.mark.case),
        "Discrete",
        "MultiDiscrete",
        "MultiBinary",
    ],
)
def test_processes_describe_spaces_as_threads_do(kind: str) -> None:
    threads, processes = (
        find("faulty:spaced", {"observation": kind}, None, workers).spec for workers in WORKERS
    )  # type: ignore[arg-type]
    for name in ("observation", "action"):
        one, two = getattr(threads, name), getattr(processes, name)
        assert repr(one) == repr(two) and one.dtype == two.dtype
        for bound in ("low", "high"):
            np.testing.assert_array_equal(getattr(one, bound, 0), getattr(two, bound, 0))


def test_a_constructor_that_hangs_in_a_process() -> None:
    with pytest.raises(TimeoutError, match=r"making an environment took longer than 0.5 s"):
        find("faulty:Scripted", {"constructor": "hang"}, None, "processes", 0.5)
    assert not children()


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "closing, message",
    [
        ("raise", r"faulty:Scripted: close\(\) raises OSError: no window"),
        (
            "hang",
            r"faulty:Scripted: close\(\) did not return within 0.5 s; the run does not wait for",
        ),
    ],
)
def test_close_is_no_fault(
    closing: str, message: str, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    monkeypatch.setattr(runners, "CLOSE_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.warns(EnvWarning, match=message):
        source = find("faulty:Scripted", {"closing": closing}, None, workers)
    host = source.host(2, 0)
    host.reset()
    act(host, "go on", "go on")  # type: ignore[arg-type]
    with pytest.warns(EnvWarning, match=message):
        host.close()
    assert time.monotonic() - began < 30 and not children()  # it hangs for a minute
    if workers == "threads":
        release(before)


# --- EnvPool's options ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env_id, option, message",
    [
        ("CartPole-v1", "num_threads=-1", "0 or more works"),
        ("CartPole-v1", "num_threads=100000", "at most 1024 work, and 0 stands for one a core"),
        ("Pong-v5", "stack_num=0", "1 or more works"),
        ("Pong-v5", "noop_max=0", "1 or more works"),
        ("Pong-v5", "img_height=0", "1 or more works"),
        ("Pong-v5", "img_width=-3", "1 or more works"),
        ("FrozenLake-v1", "size=-1", "1 or more works"),
    ],
)
def test_what_would_abort_the_process_is_refused(env_id: str, option: str, message: str) -> None:
    key, _, value = option.partition("=")
    with pytest.raises(ConfigError, match=f"env_options {option} of envpool:{env_id}: {message}"):
        find(f"envpool:{env_id}", {key: value})


def test_numbers_that_stand_for_none_are_taken() -> None:
    assert (
        envpool.options("Pong-v5", {"mode": "-1", "num_threads": "0"}, None, training=True)["mode"]
        == -1
    )


# --- Action masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["faulty:Scripted", "own:Masked"])
@pytest.mark.parametrize("mask", ["method", "info"])
def test_unread_masks_warn(env: str, mask: str) -> None:
    options = {"mask": mask} if env.startswith("faulty") else {}
    config = jaxrl_dist.preset("a2c", env, env_options=options, hidden_sizes=(4,))
    with pytest.warns(
        EnvWarning,
        match=rf"{env}: (its|info).*; illegal actions will be tried",
    ):
        setup.prepare(config)


@pytest.mark.parametrize(
    "env", ["parts:ShortInfo", pytest.param("team:ShortMask", marks=pytest.mark.case)]
)
def test_a_mask_of_the_wrong_length_is_left_out_with_a_warning(env: str) -> None:
    config = jaxrl_dist.preset(
        "a2c", env, hidden_sizes=(4,), total_env_steps=64, evaluation_episodes=0, num_devices=1
    )
    with pytest.warns(
        EnvWarning, match=r"looks like an action mask, but has 2 numbers instead of [34] "
    ):
        *_, last = jaxrl_dist.train(config)
    assert last.env_steps >= 64


def test_environments_without_masks_have_none() -> None:
    for env in (own.Walk(), "faulty:Scripted", "CartPole-v1", "gymnasium:CartPole-v1"):
        assert (find(env).spec.mask, find(env).spec.unread_mask) == (None, "")
