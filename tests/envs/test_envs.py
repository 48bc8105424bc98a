"""Environments: one contract for both backends, against the backends' own steps."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, assert_close, make_mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist.envs import base, checking
from jaxrl_dist.envs.device import gymnax as adapter
from jaxrl_dist.envs.device.hosted import HostGymnax
from jaxrl_dist.envs.host import envpool
from jaxrl_dist.envs.host.calls import Caller
from jaxrl_dist.envs.source import BACKENDS, find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space
from jaxrl_dist.types import EnvSpec, EpisodeStats, Timestep


def random_actions(space: Space, rng: np.random.Generator, *shape: int) -> np.ndarray:
    if isinstance(space, Box):
        low, high = (
            np.broadcast_to(np.clip(x, -2, 2), (*shape, *space.shape))
            for x in (space.low, space.high)
        )
        return rng.uniform(low, high).astype(space.dtype)
    size = space.n if isinstance(space, Discrete) else np.asarray(space.nvec)
    return rng.integers(size, size=(*shape, *space.shape), dtype=np.int32)


def check_contract(
    steps: list[tuple[Timestep, EpisodeStats]], spec: EnvSpec, num_envs: int
) -> None:
    """What holds on every backend, over a run from the first reset: ends, reset steps,
    dtypes, episode statistics.
    """
    ended = np.zeros(num_envs, bool)
    total, length = np.zeros(num_envs), np.zeros(num_envs, int)
    for step, episodes in steps:
        check_observation(step.obs, spec, num_envs)
        for flag in (step.terminated, step.truncated, step.valid):
            assert (flag.dtype, flag.shape) == (np.bool_, (num_envs,))
        assert step.reward.dtype == np.float32 and np.isfinite(step.reward).all()
        np.testing.assert_array_equal(step.valid, ~ended)
        assert not (step.terminated & step.truncated).any()
        assert not ((step.terminated | step.truncated) & ~step.valid).any()
        assert not step.reward[~step.valid].any()
        total, length = total + step.reward, length + step.valid
        ended = step.terminated | step.truncated
        assert all(
            x.dtype == np.float32 and x.shape == (num_envs,) for x in jax.tree.leaves(episodes)
        )
        np.testing.assert_array_equal(episodes.episodes, ended)
        np.testing.assert_array_equal(episodes.length_sum, np.where(ended, length, 0))
        for x, none in (
            (episodes.return_sum, 0),
            (episodes.return_min, np.inf),
            (episodes.return_max, -np.inf),
        ):
            np.testing.assert_allclose(x, np.where(ended, total, none), rtol=1e-5)
        if spec.max_episode_steps is not None:
            assert (length <= spec.max_episode_steps).all()
            assert ended[length == spec.max_episode_steps].all()
        total, length = np.where(ended, 0, total), np.where(ended, 0, length)


def check_observation(obs: Any, spec: EnvSpec, num_envs: int) -> None:
    """An array of the space, or one frame of its stack; of several parts, one of each."""
    if isinstance(spec.observation, dict):
        assert obs.keys() == spec.observation.keys()
        for name, part in spec.observation.items():
            check_observation(obs[name], dataclasses.replace(spec, observation=part), num_envs)
        return
    shape = spec.observation.shape
    if spec.frame_stack > 1:
        (obs, fresh), shape = obs, (shape[0] // spec.frame_stack, *shape[1:])
        assert (fresh.dtype, fresh.shape) == (np.bool_, (num_envs,))
    assert (obs.dtype, obs.shape) == (spec.observation.dtype, (num_envs, *shape))


def unstack(steps: Any) -> list[Any]:
    """A tree of ``[T, ...]`` as a list of ``T`` trees of numpy arrays."""
    steps = jax.tree.map(np.asarray, steps)
    return [jax.tree.map(lambda x: x[t], steps) for t in range(len(jax.tree.leaves(steps)[0]))]


# --- gymnax ---------------------------------------------------------------------------------------

NUM_ENVS, NUM_STEPS = 3, 40


def run_gymnax(
    env: base.DeviceEnv, actions: np.ndarray, keys: jax.Array, first: jax.Array
) -> tuple[Any, Any, Any]:
    """``T`` steps as a scan: the first observation, the states after each step,
    the steps with their statistics.

    On a mesh, as in training.
    """

    def run(actions: jax.Array, keys: jax.Array, first: jax.Array) -> Any:
        def step(state: Any, now: Any) -> Any:
            state, timestep, episodes = env.step(state, *now)
            return state, (state, (timestep, episodes))

        state, obs = env.reset(first)
        return obs, *jax.lax.scan(step, state, (actions, keys))[1]

    batch, steps = meshes.BATCH, meshes.TIME_BATCH
    program = meshes.Program(
        run, make_mesh(1), (steps, steps, batch), (batch, steps, steps), mapped=meshes.acting
    )
    return program(actions, keys, first)


def run_native(
    env: Any, params: Any, actions: np.ndarray, keys: jax.Array, first: jax.Array
) -> list[list[Any]]:
    """The same for each environment in turn by gymnax's own ``step``,
    but with each reset on a separate step.
    """
    step, reset_env = jax.jit(env.step), jax.jit(env.reset_env)
    reset_keys = jax.vmap(jax.vmap(lambda key: jax.random.split(key)[1]))(keys)
    columns = []
    for index in range(actions.shape[1]):
        obs, state = reset_env(first[index], params)
        episode_return, length, ended = 0.0, 0, False
        rows = []
        for t in range(len(actions)):
            if ended:
                obs, state = reset_env(reset_keys[t, index], params)
                row = 0.0, False, False, False
                episode_return, length = 0.0, 0
            else:
                _, state, reward, terminated, truncated, info = step(
                    keys[t, index], state, actions[t, index], params
                )
                obs = info["final_observation"]
                row = float(reward), bool(terminated), bool(truncated) and not terminated, True
                episode_return, length = episode_return + row[0], length + 1
            ended = row[1] or row[2]
            rows.append((np.asarray(obs), *row, episode_return, length))
        columns.append(rows)
    return columns


AGAINST_NATIVE = [  # with time limits so short that 40 random steps meet them
    ("CartPole-v1", {"max_steps_in_episode": 15}, "both"),
    ("Pendulum-v1", {"max_steps_in_episode": 7}, "truncated"),
    ("Catch-bsuite", {"max_steps_in_episode": 9}, "terminated"),  # where both fall on one step
    ("MemoryChain-bsuite", {}, "any"),
    ("FourRooms-misc", {"max_steps_in_episode": 12}, "any"),
    ("FrozenLake-misc", {"max_steps_in_episode": 8}, "both"),
    ("Breakout-MinAtar", {"max_steps_in_episode": 10}, "any"),
]


def pure(env_id: str, options: dict[str, str]) -> base.DeviceEnv:
    return adapter.adapt(adapter.native(env_id, options), env_id, "gymnax")


@pytest.mark.parametrize(
    "env_id, options, ends",
    [
        pytest.param(
            *row,
            marks=pytest.mark.case
            if row[0] in ("Catch-bsuite", "MemoryChain-bsuite", "FourRooms-misc")
            else [],
        )
        for row in AGAINST_NATIVE
    ],
)
def test_gymnax_against_its_own_step(env_id: str, options: dict[str, int], ends: str) -> None:
    env = pure(env_id, {key: str(value) for key, value in options.items()})
    actions = random_actions(env.spec.action, np.random.default_rng(0), NUM_STEPS, NUM_ENVS)
    keys = jax.random.split(jax.random.key(1), (NUM_STEPS, NUM_ENVS))
    first = jax.random.split(jax.random.key(2), NUM_ENVS)
    first_obs, states, steps = run_gymnax(env, actions, keys, first)
    assert first_obs.dtype == env.spec.observation.dtype
    rows = unstack(steps)
    check_contract(rows, env.spec, NUM_ENVS)
    terminated, truncated = np.any(steps[0].terminated), np.any(steps[0].truncated)
    assert terminated or truncated
    assert {
        "both": terminated and truncated,
        "terminated": not truncated,
        "truncated": not terminated,
    }.get(ends, True)

    native_env, params = gymnax.make(env_id)
    params = params.replace(**options)
    for index, native in enumerate(run_native(native_env, params, actions, keys, first)):
        for t, (obs, reward, *flags, episode_return, length) in enumerate(native):
            step = jax.tree.map(lambda x: x[index], rows[t][0])
            np.testing.assert_allclose(step.obs, obs, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(step.reward, reward, rtol=1e-5, atol=1e-6)
            assert [step.terminated, step.truncated, step.valid] == flags
            np.testing.assert_allclose(
                states.episode_return[t, index], episode_return, rtol=1e-4, atol=1e-5
            )
            assert states.episode_length[t, index] == length


def test_accelerators_reset_without_a_condition(trace_for_gpu: Callable[[], None]) -> None:
    """And step as CPUs do, which reset only when an environment needs it."""
    env = pure("CartPole-v1", {"max_steps_in_episode": "7"})
    actions = random_actions(env.spec.action, np.random.default_rng(0), NUM_STEPS, NUM_ENVS)
    keys = jax.random.split(jax.random.key(1), (NUM_STEPS, NUM_ENVS))
    first = jax.random.split(jax.random.key(2), NUM_ENVS)
    on_cpu = run_gymnax(env, actions, keys, first)
    step = jax.jit(env.step)
    args = (
        jax.eval_shape(env.reset, first)[0],
        jax.ShapeDtypeStruct(actions[0].shape, actions.dtype),
        keys[0],
    )
    conditions = [
        len(
            re.findall(
                "stablehlo.(?:case|if)",
                jax.export.export(step, platforms=[platform])(*args).mlir_module(),
            )
        )
        for platform in ("cpu", "cuda", "tpu")
    ]
    # two are the choice of the platform, by a constant: XLA removes them
    assert conditions == [3, 2, 2]
    trace_for_gpu()
    assert_close(run_gymnax(env, actions, keys, first), on_cpu)


# the first downloads its data
TESTED = {"MNISTBandit-bsuite", *(env_id for env_id, *_ in AGAINST_NATIVE)}
OTHERS = [env_id for env_id in adapter.ids() if env_id not in TESTED]
COMPILED = {"Acrobot-v1", "MountainCarContinuous-v0", "DeepSea-bsuite", "Swimmer-misc"}


@pytest.mark.parametrize("env_id", OTHERS)
def test_every_other_gymnax_environment_has_the_spaces_it_names(env_id: str) -> None:
    """Of what its reset and its step trace to, without compiling them."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(1), 2))
    with jax.numpy_rank_promotion("allow"):  # Swimmer needs it
        env = pure(env_id, {})
        actions = jnp.asarray(random_actions(env.spec.action, np.random.default_rng(0), 2))
        state, first = jax.eval_shape(env.reset, keys)
        after, step, _ = jax.eval_shape(env.step, state, actions, keys)
    check_observation(first, env.spec, 2)
    check_observation(step.obs, env.spec, 2)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


@pytest.mark.parametrize(
    "env_id",
    [
        env_id
        if env_id in COMPILED
        else pytest.param(
            env_id, marks=pytest.mark.case if env_id == "Freeway-MinAtar" else pytest.mark.slow
        )
        for env_id in OTHERS
    ],
)
def test_every_other_gymnax_environment_steps(env_id: str) -> None:
    keys = jax.random.split(jax.random.key(1), (50, 2))
    with jax.numpy_rank_promotion("allow"):  # Swimmer needs it
        env = pure(env_id, {})
        actions = random_actions(env.spec.action, np.random.default_rng(0), 50, 2)
        _, _, steps = run_gymnax(env, actions, keys, keys[0])
    check_contract(unstack(steps), env.spec, 2)


def test_gymnax_options() -> None:
    env = pure("Catch-bsuite", {"rows": "6", "columns": "3", "max_steps_in_episode": "4"})
    assert env.spec.observation.shape == (6, 3) and env.spec.max_episode_steps == 4
    assert env.spec.family == "bsuite"
    pendulum = pure("Pendulum-v1", {"max_torque": "0.5"})
    assert pendulum.spec.action.high == 0.5
    with pytest.raises(ConfigError, match=r"'max_torqe'.*did.*'max_torque'"):
        pure("Pendulum-v1", {"max_torqe": "0.5"})
    with pytest.raises(ConfigError, match=r"max_steps_in_episode.*gymnax:Pendulum-v1"):
        pure("Pendulum-v1", {"max_steps_in_episode": "ten"})


def test_environment_of_the_user() -> None:
    """``gymnax.register`` is all it takes."""
    source = find("Clock-v0", {"dead": "true", "max_steps_in_episode": "5"})
    assert (
        source.spec.backend == "gymnax"
        and source.spec.family == "other"
        and source.spec.max_episode_steps == 5
    )
    with pytest.raises(ConfigError, match=r"has no such environment \(did you mean 'Clock-v0'\?\)"):
        find("gymnax:Clok-v0")


def test_gymnax_actions_outside_their_bounds() -> None:
    """Clipped where they are continuous, an error on the host where they are not numbers."""
    keys = jax.random.split(jax.random.key(0), 2)
    env = pure("PointRobot-misc", {})
    state, _ = jax.jit(env.reset)(keys)
    bound = np.broadcast_to(env.spec.action.high, (2, 2))
    step = jax.jit(env.step)
    assert_close(step(state, 100 * jnp.asarray(bound), keys), step(state, jnp.asarray(bound), keys))
    host = HostGymnax(env, 2, jax.random.key(0))
    host.reset()
    host.step(bound)
    with pytest.raises(ValueError, match=r"gymnax:PointRobot-misc:.*1.*1"):
        host.step(np.array([[0, 0], [0, np.nan]], np.float32))
    host.close()


def test_spaces_that_no_policy_handles() -> None:
    class Strange(Probe):
        def action_space(self, params: Any) -> Any:
            return gymnax.environments.spaces.Tuple(())

    with pytest.raises(ConfigError, match=r"gymnax:Strange-v0.*Tuple"):
        adapter.adapt(Strange(), "Strange-v0", "gymnax")


# --- EnvPool --------------------------------------------------------------------------------------


@pytest.fixture
def make_pool() -> Iterator[Callable[..., envpool.EnvPool]]:
    """Makes environments with the options of ``find(..., options, preset)`` and closes them."""
    made: list[envpool.EnvPool] = []

    def make(
        env_id: str,
        num_envs: int,
        seed: int = 0,
        training: bool = True,
        preset: Any = None,
        **options: Any,
    ) -> Any:
        texts = {key: str(value) for key, value in options.items()}
        host = find(f"envpool:{env_id}", texts, preset).host(num_envs, seed, training=training)
        made.append(host)
        return host

    yield make
    for host in made:
        host.close()


def run_pool(
    host: envpool.EnvPool, num_steps: int, seed: int = 0
) -> list[tuple[Timestep, EpisodeStats]]:
    """Random steps from a reset."""
    rng = np.random.default_rng(seed)
    obs = host.reset()
    check_observation(obs, host.spec, host.num_envs)
    return [
        host.step(random_actions(host.spec.action, rng, host.num_envs)) for _ in range(num_steps)
    ]


@pytest.mark.parametrize(
    "env_id, options, num_steps, observation, action",
    [
        ("CartPole-v1", {"max_episode_steps": 15}, 60, ("float32", (4,)), Discrete(2)),
        ("Pendulum-v1", {"max_episode_steps": 7}, 30, ("float32", (3,)), "float32"),
        ("FrozenLake-v1", {"max_episode_steps": 8}, 60, ("int32", ()), Discrete(4)),
        ("Taxi-v3", {"max_episode_steps": 8}, 30, ("int32", ()), Discrete(6)),
        ("Pong-v5", {"max_episode_steps": 12}, 30, ("uint8", (4, 84, 84)), Discrete(6)),
        ("HalfCheetah-v4", {"max_episode_steps": 9}, 25, ("float32", (17,)), "float32"),
    ],
)
def test_envpool_contract(
    env_id: str,
    options: dict[str, int],
    num_steps: int,
    observation: Any,
    action: Any,
    make_pool: Any,
) -> None:
    host = make_pool(env_id, NUM_ENVS, **options)
    assert (host.spec.observation.dtype.name, host.spec.observation.shape) == observation
    assert action in (host.spec.action, host.spec.action.dtype.name)
    steps = run_pool(host, num_steps)
    assert any(step.truncated.any() for step, _ in steps)
    if env_id in ("CartPole-v1", "FrozenLake-v1"):
        assert any(step.terminated.any() for step, _ in steps)
    check_contract(steps, host.spec, NUM_ENVS)


def test_envpool_reset_begins_a_new_episode(make_pool: Any) -> None:
    """The reset step ignores its action and shows a first observation;
    a later ``reset`` forgets what was under way.
    """
    host = make_pool("CartPole-v1", 8, max_episode_steps=6)
    for _ in range(2):
        steps = run_pool(host, 20)
        check_contract(steps, host.spec, 8)
        for step, _ in steps:
            assert (
                np.abs(step.obs[~step.valid]) <= 0.05
            ).all()  # CartPole starts there, and leaves within a step or two


def test_envpool_seeds(make_pool: Any) -> None:
    def stream(seed: int) -> np.ndarray:
        return np.stack(
            [step.obs for step, _ in run_pool(make_pool("CartPole-v1", 4, seed), 30)], 1
        )

    one, again, two = stream(1), stream(1), stream(2)
    np.testing.assert_array_equal(one, again)
    both = np.concatenate([one, two])
    distinct = np.unique(both[:, 0], axis=0)
    # above all, environment i of seed s is not environment i - 1 of seed s + 1
    assert len(distinct) == 8


@pytest.mark.parametrize(
    "env_id, action, message",
    [
        (
            "CartPole-v1",
            [0, 2, 0],
            r"envpool:CartPole-v1: action 2 of environment 1 at step 1 lies outside Discrete\(n=2\)",
        ),
        ("CartPole-v1", [0, 1, -1], "action -1 of environment 2 at step 1"),
        (
            "Pendulum-v1",
            [[0.0], [0.0], [np.nan]],
            "envpool:Pendulum-v1: action .*nan.* of environment 2 at step 1",
        ),
        ("Pendulum-v1", [[np.inf], [0.0], [0.0]], "environment 0 at step 1"),
    ],
)
def test_envpool_refuses_bad_actions(
    env_id: str, action: Any, message: str, make_pool: Any
) -> None:
    host = make_pool(env_id, 3)
    run_pool(host, 1)
    with pytest.raises(ValueError, match=message):
        host.step(np.asarray(action))
    run_pool(host, 1)  # nothing has been sent


def test_bad_actions_of_a_vector() -> None:
    spec = EnvSpec("Test", "envpool", "other", Discrete(2), MultiDiscrete((2, 3)), None)
    checking.checked_action(spec, np.array([[1, 2], [0, 0]]), 0)
    with pytest.raises(ValueError, match=r"action \[2 1\] of environment 1 at step 4"):
        checking.checked_action(spec, np.array([[1, 2], [2, 1]]), 4)


def test_envpool_clips_continuous_actions(make_pool: Any) -> None:
    steps = []
    for action in (2.0, 50.0):
        host = make_pool("Pendulum-v1", 2)
        host.reset()
        steps.append(host.step(np.full((2, 1), action, np.float32)))
    assert_close(*steps)


@pytest.mark.parametrize(
    "env_id, action", [("CartPole-v1", np.zeros(1, int)), ("HalfCheetah-v4", np.zeros((1, 6)))]
)
def test_envpool_warns_of_nothing(env_id: str, action: np.ndarray) -> None:
    """Gymnasium warns of bounds that lose precision where a space is first looked at;
    -W error makes it an error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host = find(f"envpool:{env_id}").host(1, 0)
        host.reset()
        host.step(action)
        host.close()


def test_envpool_without_a_library_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Procgen without Qt."""

    class Registry:
        def make_spec(self, *args: Any, **options: Any) -> Any:
            raise ImportError("EnvPool Procgen requires Qt 5")

    monkeypatch.setattr(envpool, "_registry", Registry)
    with pytest.raises(
        ConfigError,
        match=r"envpool:CoinrunEasy-v0.*Qt.*5",
    ):
        envpool.spec("CoinrunEasy-v0", {})


def test_envpool_resets_in_the_next_step_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "Craftax-Symbolic-AutoReset-v1", "Craftax-Symbolic-v1"

    class Registry:
        specs = dict.fromkeys(names, ("envpool.craftax",))

    monkeypatch.setattr(envpool, "_registry", Registry)
    assert envpool.ids() == ["Craftax-Symbolic-v1"]
    with pytest.raises(
        ConfigError,
        match=r"AutoReset-v1:.*'Craftax-Symbolic-v1'",
    ):
        find("envpool:Craftax-Symbolic-AutoReset-v1")


def test_envpool_levels_have_unlisted_time_limits(make_pool: Any) -> None:
    host = make_pool("BabyAI-GoToLocal-v0", 4)
    assert host.spec.max_episode_steps is None
    lengths = np.concatenate(
        [episodes.length_sum[step.truncated] for step, episodes in run_pool(host, 66)]
    )
    assert (lengths == 64).all() and len(lengths) > 0
    with pytest.raises(ConfigError, match="a time limit of 0 steps"):
        find("envpool:BabyAI-GoToLocal-v0", {"max_episode_steps": "0"})


def test_envpool_leaves_no_thread() -> None:
    def threads() -> int:  # Python's and C++'s
        return (
            len(os.listdir("/proc/self/task"))
            if os.path.exists("/proc/self/task")
            else threading.active_count()
        )

    before = threads(), threading.enumerate()
    host = find("envpool:CartPole-v1").host(3, 0)
    run_pool(host, 3)
    assert threading.active_count() == len(before[1]) + 1
    host.close()
    assert threading.enumerate() == before[1]
    # JAX's own pools may change size meanwhile, but only ever grow
    deadline = time.monotonic() + 10
    while threads() > before[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before[0]
    with pytest.raises(AssertionError):  # EnvPool's own
        envpool.EnvPool("CartPole-v1", [], {})
    assert threading.enumerate() == before[1]


def test_worker_hands_over_exceptions() -> None:
    worker = Caller("test", 60)
    assert worker.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0)
    with pytest.raises(KeyboardInterrupt):
        worker.call(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert worker.call(threading.current_thread) is worker._thread
    worker._timeout = 0.05
    release = threading.Event()
    with pytest.raises(TimeoutError, match="test has not answered"):
        worker.call(release.wait)
    release.set()
    worker.stop()
    assert not worker._thread.is_alive()


def test_calls_within_a_call_need_no_thread_of_their_own() -> None:
    inner, outer, release = Caller("inner", 1.0), Caller("outer"), threading.Event()

    def several(*times: float) -> list[threading.Thread]:
        return [inner.call(lambda: time.sleep(x) or threading.current_thread()) for x in times]

    # together more than one may take
    assert outer.call(lambda: several(0.3, 0.3, 0.3, 0.3)) == [outer._thread] * 4
    assert several(0.0) == [inner._thread]
    with pytest.raises(ZeroDivisionError):
        outer.call(lambda: inner.call(lambda: 1 / 0))
    outer.call(lambda: time.sleep(1.2))  # nobody says how long
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match="inner has not answered for 1 s"):
        outer.call(lambda: inner.call(release.wait))
    assert 1 <= time.perf_counter() - began < 20 and inner.hangs and outer.hangs
    release.set()
    outer.stop()
    inner.stop()
    assert not outer._thread.is_alive() and not inner._thread.is_alive()


def test_a_caller_that_stops_refuses_calls_within() -> None:
    """As where the user's Ctrl-C ends the wait for a rollout, which then goes on."""
    inner, outer, refused, stops = Caller("inner", 60), Caller("the steps"), [], threading.Event()

    def several() -> None:
        stops.wait()
        try:
            inner.call(lambda: None)
        except RuntimeError as error:
            refused.append(str(error))

    outer._calls.put((several, futures.Future()))
    threading.Timer(0.2, stops.set).start()
    outer.stop()
    assert refused == ["the steps are being closed"] and not outer._thread.is_alive()
    inner.stop()


# --- Atari ----------------------------------------------------------------------------------------


def test_atari_presets_are_never_mixed() -> None:
    def options(preset: str | None, training: bool, **texts: str) -> dict[str, Any]:
        return envpool.options("Breakout-v5", texts, preset, training=training)

    baselines, machado = options("baselines", True), options("machado", True)
    protocol = (
        "repeat_action_probability",
        "noop_max",
        "use_fire_reset",
        "episodic_life",
        "reward_clip",
    )
    assert [baselines[name] for name in protocol] == [0.0, 30, True, True, True]
    assert [machado[name] for name in protocol] == [0.25, 1, False, False, False]
    assert set(baselines) == set(machado)  # each sets all that the other does
    assert baselines["max_episode_steps"] * 4 == machado["max_episode_steps"] * 4 == 108_000
    evaluation = options("baselines", False)
    assert evaluation == {**baselines, "episodic_life": False, "reward_clip": False}
    assert options("machado", False) == machado
    # What the user names wins; nothing else changes.
    assert options("machado", True, noop_max="5") == {**machado, "noop_max": 5}
    assert find("Breakout-v5").atari_preset == "baselines"
    assert (
        find("CartPole-v1").atari_preset is None
        and find("envpool:CartPole-v1").atari_preset is None
    )
    for env_id in ("CartPole-v1", "envpool:CartPole-v1"):
        with pytest.raises(ConfigError, match=r"atari_preset.*Atari"):
            find(env_id, atari_preset="machado")


def spy(host: envpool.EnvPool, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """What EnvPool itself says at each step."""
    infos: list[dict[str, np.ndarray]] = []
    step = host._envs.step

    def spying(action: np.ndarray) -> Any:
        *out, info = step(action)
        infos.append({"reward": info["reward"].copy(), "lives": info["lives"].copy()})
        return *out, info

    monkeypatch.setattr(host._envs, "step", spying)
    return infos


@pytest.mark.parametrize(
    "game, training",
    [
        ("Breakout-v5", True),
        pytest.param("Asterix-v5", True, marks=pytest.mark.case),
        pytest.param("Asterix-v5", False, marks=pytest.mark.case),
    ],
)
def test_atari_returns_are_of_whole_games(
    game: str, training: bool, make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training under ``baselines`` sees lives and clipped rewards;
    the statistics see games and their own score.
    """
    num_envs = 4
    host = make_pool(game, num_envs, training=training)
    infos = spy(host, monkeypatch)
    steps = run_pool(host, 340)
    fields = ("reward", "terminated", "valid")
    reward, terminated, valid = (
        np.stack([getattr(step, name) for step, _ in steps]) for name in fields
    )
    over = np.stack([episodes.episodes for _, episodes in steps]) > 0
    returns = np.stack([episodes.return_sum for _, episodes in steps])
    raw = np.stack([info["reward"] for info in infos])
    lives = np.stack([info["lives"] for info in infos])
    assert over.sum() >= 2 and returns.max() > 0
    assert (lives[over] == 0).all()
    assert game == "Breakout-v5" or returns.max() > 10  # so that clipping would show
    if training:
        assert terminated.sum() > 2 * over.sum() and (lives[terminated & ~over] > 0).all()
        assert np.abs(reward).max() == 1
    else:
        np.testing.assert_array_equal(terminated, over)
        np.testing.assert_array_equal(reward, raw)
    for index in range(num_envs):
        start = 0
        for end in np.flatnonzero(over[:, index]):
            assert returns[end, index] == raw[start : end + 1, index].sum()
            assert (
                sum(x.length_sum[index] for _, x in steps[start : end + 1])
                == valid[start : end + 1, index].sum()
            )
            start = end + 1


# --- By name --------------------------------------------------------------------------------------


def test_find() -> None:
    assert find("CartPole-v1").spec.backend == "gymnax"
    assert find("envpool:CartPole-v1").spec.backend == "envpool"
    assert (
        find("HalfCheetah-v4").spec.backend == "envpool"
        and find("HalfCheetah-v4").spec.family == "mujoco"
    )
    with pytest.raises(ConfigError, match=r"'gymnas'.*'gymnax'"):
        find("gymnas:CartPole-v1")
    with pytest.raises(ConfigError, match="CartPole-v1"):
        find("CartPole-v11")
    with pytest.raises(
        ConfigError, match="runs on the host, where plan on_device cannot compile it"
    ):
        find("HalfCheetah-v4").device()
    with pytest.raises(ConfigError, match="envpool:CartPole-v1 has no option 'max_episode_step'"):
        find("envpool:CartPole-v1", {"max_episode_step": "3"})
    assert set(BACKENDS) == {"gymnax", "envpool", "gymnasium"}
