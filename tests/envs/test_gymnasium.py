"""Gymnasium environments: the contract of the other backends,
and what happens to code that fails, hangs or dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faulty
import gymnasium as library
import numpy as np
import psutil
import pytest
import runs
from test_envs import check_contract, random_actions

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.config.envs import split_env
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.host import gymnasium as adapter
from jaxrl_dist.envs.host import vector
from jaxrl_dist.envs.host import worker as env_worker
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError, ConfigWarning, EnvError
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete
from jaxrl_dist.types import EpisodeStats, Timestep

WORKERS = ("threads", "processes")
NUM_ENVS = 3
ACTION = {what: index for index, what in enumerate(faulty.Scripted.ACTIONS)}


@pytest.fixture
def make() -> Iterator[Callable[..., vector.Gymnasium]]:
    """Makes environments and closes them."""
    with contextlib.ExitStack() as stack:

        def make(
            env: str,
            num_envs: int = NUM_ENVS,
            seed: int = 0,
            workers: Any = "threads",
            timeout: float = 60,
            **texts: str,
        ) -> Any:
            host = find(env, texts, None, workers, timeout).host(num_envs, seed)
            stack.callback(host.close)
            return host

        yield make


def play(
    host: vector.Gymnasium, num_steps: int, seed: int = 0
) -> list[tuple[Timestep, EpisodeStats]]:
    """Random steps from a reset."""
    rng = np.random.default_rng(seed)
    obs = host.reset()
    assert (obs.dtype, obs.shape) == (
        host.spec.observation.dtype,
        (host.num_envs, *host.spec.observation.shape),
    )
    return [
        host.step(random_actions(host.spec.action, rng, host.num_envs)) for _ in range(num_steps)
    ]


def act(host: vector.Gymnasium, *whats: str) -> tuple[Timestep, EpisodeStats]:
    return host.step(np.array([ACTION[what] for what in whats], np.int32))


# --- The contract ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env_id, options, num_steps, observation, action, family, ends",
    [
        ("CartPole-v1", {"max_episode_steps": "15"}, 60, ("float32", (4,)), Discrete(2), "classic_control", "both"),
        ("Pendulum-v1", {"max_episode_steps": "7"}, 30, ("float32", (3,)), "float32", "classic_control", "truncated"),
        ("FrozenLake-v1", {"max_episode_steps": "8"}, 60, ("int32", ()), Discrete(4), "toy_text", "both"),
        ("faulty:make", {"max_episode_steps": "15", "p_crash": "0", "p_crash_reset": "0", "p_stall": "0",
          "p_stall_reset": "0"}, 60, ("float32", (4,)), Discrete(2), "classic_control", "both"),
    ],
)  # fmt: skip
def test_contract(
    env_id: str,
    options: Any,
    num_steps: int,
    observation: Any,
    action: Any,
    family: str,
    ends: str,
    make: Any,
) -> None:
    host = make(f"gymnasium:{env_id}", **options)
    spec = host.spec
    assert (spec.id, spec.backend, spec.family) == (env_id, "gymnasium", family)
    assert (spec.observation.dtype.name, spec.observation.shape) == observation
    assert action in (spec.action, spec.action.dtype.name)
    assert spec.max_episode_steps == int(options["max_episode_steps"])
    for _ in range(2):  # a later reset forgets what was under way
        steps = play(host, num_steps)
        check_contract(steps, spec, NUM_ENVS)
        assert any(step.truncated.any() for step, _ in steps)
        assert any(step.terminated.any() for step, _ in steps) == (ends == "both")


@pytest.mark.parametrize("workers", WORKERS)
def test_steps_are_those_of_the_environments_themselves(workers: str, make: Any) -> None:
    """And those that EnvPool's adapter gives, except for the numbers that come up: ends,
    reset steps, statistics.
    """
    seeds = np.random.SeedSequence(3).generate_state(NUM_ENVS) & 0x7FFFFFFF
    host = make("gymnasium:CartPole-v1", seed=3, workers=workers, max_episode_steps="15")
    first = host.reset()
    actions = np.random.default_rng(0).integers(2, size=(60, NUM_ENVS))
    steps = [host.step(action) for action in actions]
    check_contract(steps, host.spec, NUM_ENVS)
    for index in range(NUM_ENVS):
        env = library.make("CartPole-v1", max_episode_steps=15)
        np.testing.assert_array_equal(env.reset(seed=int(seeds[index]))[0], first[index])
        ended = False
        for (step, _), action in zip(steps, actions, strict=True):
            if ended:
                obs, reward, terminated, truncated = env.reset()[0], 0.0, False, False
            else:
                obs, reward, terminated, truncated, _ = env.step(action[index])
            np.testing.assert_array_equal(step.obs[index], obs)
            assert step.valid[index] != ended
            assert (step.reward[index], step.terminated[index]) == (reward, terminated)
            assert step.truncated[index] == (truncated and not terminated)
            ended = terminated or truncated


def test_both_workers_and_a_second_time_give_the_same(make: Any) -> None:
    def stream(seed: int, workers: str = "threads") -> np.ndarray:
        host = make("gymnasium:CartPole-v1", 4, seed, workers)
        return np.stack([step.obs for step, _ in play(host, 30)], 1)

    one, again, processes, two = stream(1), stream(1), stream(1, "processes"), stream(2)
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(one, processes)
    assert len(np.unique(np.concatenate([one, two])[:, 0], axis=0)) == 8, (
        "each environment has another seed"
    )


def test_an_end_and_its_reset(make: Any) -> None:
    host = make("faulty:Scripted")
    assert host.spec.max_episode_steps is None
    first = host.reset()
    assert len(set(first[:, 0])) == 3 and first.dtype == np.float32
    step, episodes = act(host, "terminate", "truncate", "terminate and truncate")
    np.testing.assert_array_equal(step.terminated, [True, False, True])
    np.testing.assert_array_equal(step.truncated, [False, True, False])
    np.testing.assert_array_equal(step.obs[:, 1:], [[0, 1]] * 3, "the last of the episode")
    np.testing.assert_array_equal(episodes.episodes, [1, 1, 1])
    step, episodes = act(host, "raise", "raise", "raise")  # which is ignored
    assert (
        not step.valid.any()
        and not step.reward.any()
        and not (step.terminated | step.truncated).any()
    )
    np.testing.assert_array_equal(step.obs[:, 0], first[:, 0], "no new seed")
    np.testing.assert_array_equal(step.obs[:, 1:], [[1, 0]] * 3, "the first of the next")
    assert not episodes.episodes.any()
    step, _ = act(host, "go on", "terminate", "go on")
    assert step.valid.all()
    np.testing.assert_array_equal(step.reward, [1, 1, 1])
    np.testing.assert_array_equal(host.reset()[:, 1:], [[2, 0]] * 3)
    step, _ = act(host, "go on", "go on", "go on")
    assert step.valid.all()


# --- Spaces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, dtype, shape, space",
    [
        ("Box", "float32", (2, 3), Box),
        ("Image", "uint8", (4, 4, 3), Box),
        ("Whole", "int32", (2,), Box),
        ("Discrete", "int32", (), Discrete(3)),
        ("MultiDiscrete", "int32", (4,), MultiDiscrete((2, 3, 4, 2))),
        ("MultiBinary", "int32", (4,), MultiDiscrete((2, 2, 2, 2))),
    ],
)
def test_spaces(kind: str, dtype: str, shape: Any, space: Any, make: Any) -> None:
    host = make("faulty:spaced", observation=kind)
    found = host.spec.observation
    assert (found.dtype.name, found.shape) == (dtype, shape)
    assert found == space or isinstance(found, Box)
    check_contract(play(host, 4), host.spec, NUM_ENVS)
    native = faulty.spaced(kind)
    seeds = np.random.SeedSequence(0).generate_state(NUM_ENVS) & 0x7FFFFFFF
    shown = np.asarray(native.reset(seed=int(seeds[0]))[0])
    again = make("faulty:spaced", observation=kind).reset()
    start = {"Discrete": -1, "MultiDiscrete": [[5, 0], [-3, 0]]}.get(kind, 0)
    np.testing.assert_array_equal(again[0], (shown - start).reshape(shape).astype(dtype))
    if kind in ("Image", "Whole"):
        with pytest.raises(ConfigError, match=rf"Box.*{dtype}.*Box"):
            find("faulty:spaced", {"action": kind})
        return
    host = make("faulty:spaced", action=kind)
    assert host.spec.action == space or isinstance(host.spec.action, Box)
    play(host, 10)  # the environment looks at its actions


@pytest.mark.parametrize("kind", ["Text", "Words"])
def test_spaces_that_no_policy_handles(kind: str) -> None:
    for what in ("observation", "action"):
        has = f"Text {what}s" if kind == "Text" else f"a part 'x' of its {what}s that is Text"
        message = rf"faulty:spaced has {has}; Discrete, MultiDiscrete, MultiBinary, Box, Dict and Tuple work, "
        message += (
            "and wrappers such as Flatten"
            if what == "observation"
            else "and a gymnasium.ActionWrapper can"
        )
        with pytest.raises(ConfigError, match=message):
            find("faulty:spaced", {what: kind})


@pytest.mark.parametrize("parts", ["", "Dict", "Tuple"])
@pytest.mark.parametrize("workers", WORKERS)
def test_repeats_get_the_action_whatever_became_of_a_copy(workers: str, parts: str) -> None:
    source = find(
        "faulty:Halving", {"parts": parts}, None, workers, 60, wrappers=Wrappers(action_repeat=4)
    )
    action = np.full((2, 2), 0.8, np.float32)
    whole = {"Dict": {"a": action, "b": action}, "Tuple": {"0": action, "1": action}}.get(
        parts, action
    )
    with contextlib.closing(source.host(2, 0)) as host:
        host.reset()
        for _ in range(2):
            step, _ = host.step(whole)
            np.testing.assert_allclose(step.reward, 4 * 2 * 0.8 * (2 if parts else 1), rtol=1e-6)


def test_bad_actions_are_refused_and_large_ones_clipped(make: Any) -> None:
    host = make("gymnasium:CartPole-v1")
    host.reset()
    with pytest.raises(ValueError, match=r"gymnasium:CartPole-v1:.*2.*1.*0"):
        host.step(np.array([0, 2, 0]))
    host.step(np.array([0, 1, 0]))  # nothing has been sent
    steps = []
    for action in (2.0, 50.0):
        host = make("gymnasium:Pendulum-v1")
        host.reset()
        steps.append(host.step(np.full((NUM_ENVS, 1), action, np.float32))[0].obs)
    np.testing.assert_array_equal(*steps)


def test_integers_that_policies_cannot_hold_are_an_error(make: Any) -> None:
    with pytest.raises(
        EnvError,
        match=r"\d{10,}.*32-bit.*Box",
    ):
        make("faulty:spaced", observation="Wide").reset()


def test_actions_at_a_bound_that_float32_rounds_are_in_the_space(make: Any) -> None:
    host = make("faulty:spaced", action="Narrow")
    assert host.spec.action.high[0].item() > 0.1
    host.reset()
    for action in (-1.0, 1.0):
        # the environment looks at its actions
        host.step(np.full((NUM_ENVS, 2), action, np.float32))


# --- Options --------------------------------------------------------------------------------------


def test_options() -> None:
    def options(env_id: str, *texts: str) -> dict[str, Any]:
        return adapter.options(env_id, dict(text.split("=", 1) for text in texts))

    assert options("Pendulum-v1", "g=3", "max_episode_steps=4") == {
        "g": 3.0,
        "max_episode_steps": 4,
    }
    assert options("FrozenLake-v1", "map_name=8x8", "is_slippery=False") == {
        "map_name": "8x8",
        "is_slippery": False,
    }
    guessed = {"a": 1, "b": 1.5, "c": True, "d": "x=y", "e": "1e", "f": -1e-3, "size": 4}
    texts = [f"{key}={value}" for key, value in guessed.items()]
    assert options("faulty:Scripted", *texts) == guessed
    assert options("faulty:sized", "size=4") == {"size": 4}
    for env_id, text, message in [
        (
            "Pendulum-v1",
            "gg=3",
            r"gymnasium:Pendulum-v1 has no option 'gg' \(did you mean 'g'\?\); it has: g, max_ep",
        ),
        (
            "Pendulum-v1",
            "g=high",
            "env_options g of gymnasium:Pendulum-v1 must be a float such as 10.0, not 'high'",
        ),
        ("faulty:make", "p_crsh=1", r"did you mean 'p_crash'\?"),
        ("faulty:sized", "sze=1", r"did you mean 'size'\?"),
        ("FrozenLake-v1", "reward_schedule=1", "is a tuple, which the command line cannot set"),
    ]:
        with pytest.raises(ConfigError, match=message):
            options(env_id, text)
    with pytest.raises(ConfigError, match=r"faulty:sized.*env_options.*size="):
        find("faulty:sized")


# --- Failures -------------------------------------------------------------------------------------

FAILURES = {
    "raise": "in step: KeyError: 'no such key'",
    "exit": "in step: SystemExit: 3",
    "show a wrong shape": r"in step: ValueError: the observation has shape (4,) and dtype float64, where its space has "
    "(3,) and float64",
    "show a wrong dtype": "in step: ValueError: the observation has shape (3,) and dtype complex128, where its space",
    "end by a text": "in step: TypeError: terminated is 'False', not a bool",
    "pay a text": "in step: TypeError: the reward is '1.5', not a number",
    "return four": "in step: TypeError: step returned 4 values, as in Gym before 0.26, not (observation, reward, termi",
    "raise in reset": "in reset: RuntimeError: no new game",
    "show nan": "gave an observation that is not finite: [ 0. nan 0.]",
    "pay nan": "gave a reward that is not finite: nan",
}


@pytest.mark.parametrize(
    "what, workers",
    [
        *((what, "threads") for what in FAILURES),
        ("raise", "processes"),
        ("raise in reset", "processes"),
    ],
)
def test_failures_name_environment_and_step(what: str, workers: str, make: Any) -> None:
    host = make("faulty:Scripted", workers=workers)
    host.reset()
    act(host, "go on", "terminate", "go on")
    step = 1
    if what == "raise in reset":
        act(host, "go on", "go on", what)
        step = 2
    with pytest.raises(EnvError) as failure:
        act(host, "go on", "go on", what)
    line = str(failure.value)
    assert line.startswith(f"faulty:Scripted: environment 2 at step {step}")
    assert FAILURES[what] in line and "\n" not in line
    if "Error: " in line or "Exit" in line:
        (note,) = failure.value.__notes__
        assert note.startswith("Traceback (most recent call last)")
        if "raise" in what:
            assert 'faulty.py", line' in note and note.endswith(
                line.split("in reset: ")[-1].split("in step: ")[-1]
            )
        with pytest.raises(RuntimeError, match="make new ones"):
            host.reset()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_constructor_that_raises(workers: str) -> None:
    with pytest.raises(EnvError, match=r"faulty:Scripted.*RuntimeError:") as failure:
        find("faulty:Scripted", {"constructor": "raise"})
    assert "__init__" in failure.value.__notes__[0]
    spec = find("faulty:Scripted").spec  # where only a later one raises
    before = threading.active_count()
    with pytest.raises(EnvError, match=r"\d.*0.*RuntimeError:") as failure:
        vector.Gymnasium(spec, [0, 1, 2], {"constructor": "raise"}, workers)  # type: ignore[arg-type]
    assert "__init__" in failure.value.__notes__[0]
    assert threading.active_count() == before and not children()


def test_what_makes_no_environment() -> None:
    message = "faulty:vector made a SyncVectorEnv; return one environment, which num_envs copies"
    for workers in WORKERS:
        with pytest.raises(ConfigError, match=message):
            find("faulty:vector", workers=workers)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"gymnasium.Env.*reset_env"):
        find("faulty:nothing")
    with pytest.raises(ConfigError, match=r"cannot be made here: .*a_library_that_is_not_there"):
        find("faulty:faulty/LacksALibrary-v0")


@pytest.mark.parametrize(
    "wrapper, message",
    [
        ("NormalizeReward", "statistics of NormalizeReward inside it .*use scale_rewards"),
        ("NormalizeObservation", "NormalizeObservation inside it .*use normalize_observations"),
        ("ClipReward", "ClipReward inside it also changes the reported returns;"),
        ("FrameStackObservation", None),
    ],
)
def test_statistics_inside_an_environment_are_warned_of_once(
    wrapper: str, message: str | None
) -> None:
    sizes = {"num_envs": 2, "rollout_length": 8, "total_env_steps": 16, "evaluation_episodes": 0}
    run = jaxrl_dist.preset(
        "a2c",
        "faulty:wrapped",
        env_options={"wrapper": wrapper},
        # both kinds of workers tell their wrappers
        env_workers="threads" if wrapper == "NormalizeReward" else "processes",
        num_devices=1,
        **sizes,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(jaxrl_dist.train(run))
    found = [
        str(warning.message) for warning in caught if issubclass(warning.category, ConfigWarning)
    ]
    assert len(found) == (message is not None)
    assert message is None or re.search(message, found[0])


def test_a_number_beyond_float32_is_an_error_not_a_warning() -> None:
    with contextlib.closing(find("faulty:Huge").host(1, 0)) as host:
        host.reset()
        with pytest.raises(EnvError, match="inf"):
            host.step(np.zeros(1, np.int32))


# --- Time-outs ------------------------------------------------------------------------------------


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def release(before: int) -> None:
    """Ends the threads that hang, so that later tests can count."""
    faulty.RELEASED.set()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    faulty.RELEASED.clear()
    assert threading.active_count() == before


@pytest.mark.parametrize("workers", runs.cases(WORKERS, "threads"))
@pytest.mark.parametrize("what", ["hang", pytest.param("hang in reset", marks=pytest.mark.case)])
def test_hanging_environment_times_out_with_its_name(what: str, workers: str, make: Any) -> None:
    before = threading.active_count()
    host = make("faulty:Scripted", workers=workers)
    host._timeout = 0.5
    host.reset()
    if what == "hang in reset":
        act(host, "go on", what, "go on")
    message = (
        r"faulty:Scripted: no answer from environment 1 at step \d within 0.5 s \(--env-timeout\)"
    )
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=message):
        act(host, "go on", what, "go on")
    assert time.monotonic() - began < 1.5
    host.close()
    assert time.monotonic() - began < 20  # it hangs for a minute
    assert not children()
    # a daemon: see the test of Ctrl-C
    assert threading.active_count() == before + (workers == "threads")
    release(before)


def test_each_environment_has_the_full_time(make: Any) -> None:
    """However many share a worker."""
    num_envs = 4 * len(os.sched_getaffinity(0))
    host = make("faulty:Scripted", num_envs, seconds="0.3")
    host._timeout = 0.6
    host.reset()
    began = time.monotonic()
    act(host, *["hang"] * num_envs)
    assert time.monotonic() - began > 0.7


def test_a_constructor_that_hangs() -> None:
    before = threading.active_count()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"faulty:Scripted:.*0.5"):
        find("faulty:Scripted", {"constructor": "hang"}, timeout=0.5)
    assert time.monotonic() - began < 1.5
    spec = find("faulty:Scripted").spec
    for workers in WORKERS:
        with pytest.raises(TimeoutError, match=r"0.*0.*0.5"):
            vector.Gymnasium(spec, [0, 1], {"constructor": "hang"}, workers, 0.5)  # type: ignore[arg-type]
    assert not children()
    release(before)


HANGS = """
import numpy as np
from jaxrl_dist.envs.source import find
host = find("faulty:Scripted", {}, None, "WORKERS").host(2, 0)
host.reset()
print("ready", flush=True)
host.step(np.array([0, HANG]))
"""


@pytest.mark.parametrize(
    "workers, how",
    [
        ("threads", signal.SIGINT),
        pytest.param("processes", signal.SIGINT, marks=pytest.mark.case),
        pytest.param("processes", signal.SIGKILL, marks=pytest.mark.case),
    ],
    ids=["threads", "processes", "killed"],
)
def test_ctrl_c_ends_a_process_whose_environment_hangs(workers: str, how: signal.Signals) -> None:
    """And no worker outlives it, even if it has no time to say goodbye."""
    code = HANGS.replace("WORKERS", workers).replace("HANG", str(ACTION["hang"]))
    env = {**os.environ, "PYTHONPATH": f"{runs.ROOT}:{runs.ROOT / 'tests'}"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        below = psutil.Process(process.pid).children()
        assert len(below) == (0 if workers == "threads" else min(2, len(os.sched_getaffinity(0))))
        began = time.monotonic()
        process.send_signal(how)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - began < 15  # it hangs for a minute
        assert how != signal.SIGINT or "KeyboardInterrupt" in err
        assert not psutil.wait_procs(below, timeout=15)[1]


# --- Threads and processes ------------------------------------------------------------------------


def test_a_killed_worker_is_reported(make: Any) -> None:
    host = make("faulty:Scripted", workers="processes")
    host.reset()
    with pytest.raises(EnvError, match=r"\d.*2.*SIGKILL.*0"):
        act(host, "go on", "go on", "die")
    host.close()
    assert not children()
    host = make("faulty:Scripted", workers="processes")
    host.reset()
    killed = children()[-1]
    os.kill(killed.pid, signal.SIGKILL)  # between two steps
    while killed.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with pytest.raises(EnvError, match=r"was ended by SIGKILL at step 0"):
        act(host, "go on", "go on", "go on")


@pytest.mark.parametrize("workers", WORKERS)
def test_close_leaves_nothing_behind(workers: str) -> None:
    threads, descriptors = threading.enumerate(), set(os.listdir("/proc/self/fd"))
    cores = len(os.sched_getaffinity(0))
    host = find("gymnasium:CartPole-v1", {}, None, workers).host(5, 0)  # type: ignore[arg-type]
    workers_there = len(threading.enumerate()) - len(threads) + len(children())
    assert workers_there == min(5, cores)
    play(host, 3)  # type: ignore[arg-type]
    host.close()
    host.close()
    assert threading.enumerate() == threads and not children()
    del host
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_a_worker_process_imports_no_jax() -> None:
    code = f"import sys, {env_worker.__name__} as w; w.construct('CartPole-v1', {{}}); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n", done.stderr


# --- By name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env, parts",
    [
        ("CartPole-v1", (None, None, "CartPole-v1")),
        ("envpool:Pong-v5", ("envpool", None, "Pong-v5")),
        ("gymnasium:Ant-v5", ("gymnasium", None, "Ant-v5")),
        ("a.b:make", (None, "a.b", "make")),
        ("gymnasium:a.b:make", ("gymnasium", "a.b", "make")),
        ("gymnax:a.b:make", ("gymnax", "a.b", "make")),
        ("ale_py:ALE/Pong-v5", (None, "ale_py", "ALE/Pong-v5")),
        ("gymnasium:gymnax:make", ("gymnasium", "gymnax", "make")),
    ],
)
def test_split_env(env: str, parts: Any) -> None:
    assert split_env(env) == parts


@pytest.mark.parametrize(
    "env", ["envpool:a:b", "a:b:c", "a-b:make", ".a:make", ":make", "gymnasium::make"]
)
def test_what_has_no_form(env: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown backend .*or MODULE:NAME"):
        split_env(env)


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("CartPole-v1").spec.backend == "gymnax"
    own = find("Scripted-v0").spec  # registered by the user, and neither gymnax nor EnvPool has it
    assert (own.backend, own.max_episode_steps) == ("gymnasium", 5)
    for env, message in [
        (
            "gymnasium:CartPol-v1",
            r"gymnasium has no such environment \(did you mean 'CartPole-v1'\?\)",
        ),
        ("gymnasium:GymV26Environment-v0", "gymnasium has no such environment"),
        ("faulty:mak", r"the module faulty has no function 'mak' \(did you mean 'make'\?\)"),
        (
            "no_such_module:make",
            "unknown backend 'no_such_module', and no module of that name can be imported",
        ),
        ("faulty.sub:make", "no module of that name"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find(env)
    with pytest.raises(ConfigError, match=r"env_workers.*Gymnasium.*gymnax:Cart"):
        find("CartPole-v1", workers="processes")
    with pytest.raises(ConfigError, match="use plan synchronous"):
        find("gymnasium:CartPole-v1").device()
    (tmp_path / "pkg_of_envs").mkdir()
    (tmp_path / "pkg_of_envs" / "sub.py").write_text("from faulty import make")
    (tmp_path / "pkg_of_envs" / "lacks.py").write_text("import a_library_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("pkg_of_envs.sub:make").spec.id == "pkg_of_envs.sub:make"
    with pytest.raises(
        ConfigError, match="cannot be made here: No module named 'a_library_that_is_not_there'"
    ):
        find("pkg_of_envs.lacks:make")


# --- Runs -----------------------------------------------------------------------------------------

NO_FAULTS = "--env-options p_crash=0 p_crash_reset=0 p_stall=0 p_stall_reset=0"


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A module of the user's, and a run that was trained on its environment."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "module_of_the_user.py").write_text("from faulty import make\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", sys.path)  # the command adds the current directory
        sys.path = list(sys.path)
        command = (
            f"a2c --env module_of_the_user:make {NO_FAULTS} {runs.TINY} --env-workers processes"
        )
        runs.train(f"{command} --normalize-observations", folder / "run")
        sys.modules.pop("module_of_the_user")
        yield "module_of_the_user"


def test_no_file_chooses_what_is_imported(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = runs.read_json(Path("run/config.json"))["run"]
    assert config["env"] == f"gymnasium:{module}:make" and config["env_workers"] == "processes"
    message = f"no file may choose code to run, or a port that other machines reach; name its environment yourself, with --env {module}:make"
    for command in (
        "evaluate run",
        "train --config run",
        "train a2c --config run/config.json --seed 3",
    ):
        assert cli.main(command.split()) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    with pytest.raises(ConfigError, match=re.escape(message.replace("--env", "env"))):
        jaxrl_dist.load_policy("run")
    assert module not in sys.modules
    # Named by the user it works. Weights are only numbers.
    assert cli.main(["evaluate", "run", "--env", f"{module}:make", "--episodes", "2"]) == 0
    summary = runs.read_json(Path("run/summary.json"))["evaluation"]
    assert f"return {summary['return_mean']:.4g} " in capsys.readouterr().out
    sys.modules.pop(module)
    # which is refused, but only of an environment that was found
    changes = f"--env {module}:make --plan on_device"
    assert cli.main(["train", "--config", "run", *changes.split()]) == 2
    assert f"{module}:make runs on the host" in capsys.readouterr().err
    sys.modules.pop(module)
    policy = jaxrl_dist.load_policy("run", env=f"gymnasium:{module}:make")
    with contextlib.closing(policy.source.host(2, 0)) as env:
        action, _ = policy(env.reset())
        env.step(np.asarray(action))
    sys.modules.pop(module)
    with pytest.raises(ConfigError, match="has no option 'p_crash'"):
        jaxrl_dist.load_policy("run", env="gymnasium:CartPole-v1")
    assert module not in sys.modules


@pytest.mark.case  # test_no_file_chooses_what_is_imported
def test_a_run_of_ones_own_environment_is_resumed_by_naming_it(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, more = shutil.copytree("run", tmp_path / "run"), "--total-env-steps 640 --quiet"
    sys.modules.pop(module, None)
    for flags, message in {
        "": f"no file may choose code to run, or a port that other machines reach; name its environment yourself, with --env {module}:make",
        "--env CartPole-v1": "has no option 'p_crash'",
        f"--env {module}:mke": "has no function 'mke' (did you mean 'make'?)",
        f"--env {module}:make --num-envs 16": "resume keeps --num-envs",
    }.items():
        assert cli.main(f"resume {run_dir} {flags} {more}".split()) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
        assert (module in sys.modules) == (":mke" in flags)
        sys.modules.pop(module, None)
    before = runs.untimed(run_dir)
    assert cli.main(f"resume {run_dir} --env {module}:make {more}".split()) == 0
    assert capsys.readouterr() == ("", "")
    after = runs.untimed(run_dir)
    assert after[: len(before) - 1] == before[:-1] and after[-1]["env_steps"] >= 640
    config = runs.read_json(run_dir / "config.json")["run"]
    assert (config["env"], config["total_env_steps"]) == (f"gymnasium:{module}:make", 640)
    sys.modules.pop(module)


def test_the_id_of_a_registry_in_a_file_is_no_code(module: str, tmp_path: Path) -> None:
    run_dir = shutil.copytree("run", tmp_path / "run")
    config = runs.read_json(run_dir / "config.json")

    def load(**changes: Any) -> jaxrl_dist.Policy:
        changed = {**config["run"], "env_options": {}, "env_timeout": 30, **changes}
        del changed["env_workers"]  # as in a file that was written before it could be chosen
        (run_dir / "config.json").write_text(json.dumps({**config, "run": changed}))
        return jaxrl_dist.load_policy(run_dir)

    source = load(env="gymnasium:CartPole-v1").source
    assert (source.spec.id, source.timeout, source.workers) == ("CartPole-v1", 30, "threads")
    for changes in (
        {"env": "gymnasium:this:CartPole-v1"},  # Gymnasium's own way to import a module
        {"env": ["this:CartPole-v1"]},
        {"env": "CartPole-v1", "num_envs": [8, "--env", "this:CartPole-v1"]},
    ):
        with pytest.raises(
            ConfigError,
            match=r"no file may choose code to run|must be a name|must be a whole number",
        ):
            load(**changes)
    del config["run"]["env"]
    with pytest.raises(ConfigError, match="num_devices must be a whole number"):
        load(num_devices=[1, "--env", "this:CartPole-v1"])
    assert "this" not in sys.modules and module not in sys.modules


@pytest.mark.case  # test_learning.py::test_ppo_learns_cartpole_a_little
def test_ppo_learns() -> None:
    config = jaxrl_dist.Train(
        "ppo",
        env="gymnasium:CartPole-v1",
        total_env_steps=16_000,
        num_devices=1,
        evaluation_episodes=10,
    )
    *_, last = jaxrl_dist.train(config)
    assert last.evaluation is not None
    assert last.evaluation["return_mean"] > 60  # random actions get about 22


ONE_LINE = {
    "train ppo --env gymnasium:CartPol-v1": (2, "did you mean 'CartPole-v1'?"),
    "train ppo --env gymnasium:CartPole-v1 --plan on_device": (2, "use --plan synchronous"),
    "train ppo --env faulty:mak": (2, "did you mean 'make'?"),
    "train ppo --env gymnasium:LunarLander-v3": (2, "Box2D is not installed"),
    "train ppo --env faulty:spaced --env-options observation=Words": (
        2,
        "a part 'x' of its observations that is Text",
    ),
    "train ppo --env gymnasium:Pendulum-v1 --env-options gg=1": (2, "did you mean 'g'?"),
    "train ppo --env gymnasium:CartPole-v1 --env-timeout 0": (2, "--env-timeout must be > 0"),
    "train ppo --env gymnasium:CartPole-v1 --env-workers fibres": (
        2,
        "--env-workers must be one of threads, processes, not 'fibres'",
    ),
    "train ppo --env faulty:Scripted --env-options constructor=hang --env-timeout .2": (
        1,
        "longer than 0.2 s",
    ),
    "train ppo --env gymnasium:CartPole-v1 --atari-preset machado": (
        2,
        "needs an Atari environment",
    ),
}


@pytest.mark.parametrize("command", ONE_LINE)
def test_the_command_line_says_what_is_wrong_in_one_line(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, message = ONE_LINE[command]
    assert cli.main(command.split()) == code
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("jaxrl-dist: error: ")


def test_the_command_line_shows_the_environments_own_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        cli.main(["train", "ppo", "--env", "faulty:Scripted", "--env-options", "constructor=raise"])
        == 1
    )
    *note, line = capsys.readouterr().err.splitlines()
    assert line == "jaxrl-dist: error: faulty:Scripted cannot be made: RuntimeError: no such luck"
    assert note[0].startswith("Traceback") and note[-1] == "RuntimeError: no such luck"


def test_a_module_of_the_current_directory_replaces_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("colorsys", "mine"):
        (tmp_path / f"{name}.py").write_text("raise ValueError('imported')")
        assert cli.main(["check-env", f"{name}:make"]) != 0
    said = "--env colorsys:make: Python has another module colorsys, so rename the one in this directory\n"
    assert capsys.readouterr().err.startswith(f"jaxrl-dist: error: {said}")
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1


def test_list_envs_names_gymnasium(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "envs"]) == 0
    out = capsys.readouterr().out
    assert "gymnasium:CartPole-v1\n" in out and "my_module:make" in out and "GymV2" not in out
