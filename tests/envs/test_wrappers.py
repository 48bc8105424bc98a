"""Repeated actions, time limits, stacks of frames and clipped rewards: against plain loops,
on every backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import envpool as pool_library
import gymnasium as library
import gymnax as gymnax_library
import jax
import jax.numpy as jnp
import numpy as np
import own
import pytest
import runs
from probes import assert_close, box, make_mesh, random_rollout, spec
from test_envs import check_contract, random_actions

import jaxrl_dist
from jaxrl_dist import cli, rng
from jaxrl_dist import mesh as meshes
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.source import find
from jaxrl_dist.envs.wrappers import wrapped
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners.gradients import check_sizes
from jaxrl_dist.memory import frames
from jaxrl_dist.rng import RESET
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.types import Algorithm, Context, Timestep

NUM_ENVS, NUM_STEPS, SEED = 3, 50, 3
SEEDS = [int(seed) for seed in np.random.SeedSequence(SEED).generate_state(NUM_ENVS) & 0x7FFFFFFF]

Single = tuple[Callable[[int], Any], Callable[[Any], tuple[Any, float, bool, bool]]]
"""``reset(step)`` and ``step(action)`` of one environment, by the backend's own means."""


def of_gymnasium(index: int) -> Single:
    env = library.make("CartPole-v1", max_episode_steps=25)
    first = iter([SEEDS[index]])
    return lambda t: env.reset(seed=next(first, None))[0], lambda action: env.step(action)[:4]  # type: ignore[return-value]


def of_envpool(index: int, env_id: str = "CartPole-v1", **options: Any) -> Single:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bounds that lose precision
        env = pool_library.registration.registry.make_gymnasium(
            env_id, num_envs=1, seed=[SEEDS[index]], **options
        )
        _ = env.observation_space, env.action_space

    def step(action: Any) -> Any:
        obs, reward, terminated, truncated, _ = env.step(np.asarray(action)[None])
        return obs[0], reward[0], terminated[0], truncated[0]

    return lambda t: env.reset()[0][0], step


@functools.cache
def compiled() -> tuple[Any, Any]:
    env, _ = gymnax_library.make("CartPole-v1")
    return jax.jit(env.reset_env), jax.jit(env.step_env)


def of_gymnax(index: int) -> Single:
    """The dynamics draw no numbers; of the keys, those of the resets matter."""
    env, params = gymnax_library.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=25)
    key, now = rng.stream(SEED, rng.Stream.ENV), jnp.arange(NUM_ENVS)
    state: list[Any] = [None]
    reset_env, step_env = compiled()

    def reset(t: int) -> Any:
        each = rng.per_index(jax.random.fold_in(key, RESET if t < 0 else t), now)[index]
        obs, state[0] = reset_env(each if t < 0 else jax.random.split(each)[1], params)
        return np.asarray(obs)

    def step(action: Any) -> Any:
        obs, state[0], reward, terminated, _ = step_env(key, state[0], action, params)
        return (
            np.asarray(obs),
            float(reward),
            bool(terminated),
            bool(env.is_truncated(state[0], params)),
        )

    return reset, step


def plain(
    single: Single, actions: np.ndarray, wrappers: Wrappers, axis: int = 0
) -> list[tuple[Any, ...]]:
    """What one environment does, step by step: observation, reward, terminated, truncated,
    valid.
    """
    reset, step = single
    stack = [reset(-1)] * (wrappers.frame_stack or 1)
    rows: list[tuple[Any, ...]] = [(np.concatenate(stack, axis),)]
    length, ended = 0, False
    for t, action in enumerate(actions):
        if ended:
            stack, row, length = [reset(t)] * len(stack), (0.0, False, False, False), 0
        else:
            total = 0.0
            for _ in range(wrappers.action_repeat):
                obs, reward, terminated, truncated = step(action)
                total += reward
                if terminated or truncated:
                    break
            length += 1
            stack = [*stack[1:], obs]
            truncated = truncated or length == wrappers.time_limit
            row = (total, terminated, truncated and not terminated, True)
        ended = row[1] or row[2]
        rows.append((np.concatenate(stack, axis), *row))
    return rows


def shown(obs: Any, before: Any) -> tuple[Any, np.ndarray]:
    """The stacks for the next call, and what a policy sees."""
    before, obs = frames.push(before, jax.tree.map(jnp.asarray, obs))
    return before, np.asarray(obs)


def compare(
    source: Any, singles: Callable[[int], Single], axis: int = 0, num_steps: int = NUM_STEPS
) -> list[Timestep]:
    """Steps the environments of a source, which must be those of the plain loop."""
    actions = random_actions(source.spec.action, np.random.default_rng(0), num_steps, NUM_ENVS)
    with contextlib.closing(source.host(NUM_ENVS, SEED)) as host:
        before, first = shown(host.reset(), frames.blank(source.spec, NUM_ENVS))
        steps, episodes = [], []
        for action in actions:
            step, ended = host.step(action)
            before, obs = shown(step.obs, before)
            steps.append(step._replace(obs=obs))
            episodes.append(ended)
    assert (
        first.shape[1:] == source.spec.observation.shape
        and first.dtype == source.spec.observation.dtype
    )
    check_contract(
        list(zip(steps, episodes, strict=True)),
        dataclasses.replace(source.spec, frame_stack=1),
        NUM_ENVS,
    )
    for index in range(NUM_ENVS):
        begin, *rows = plain(singles(index), actions[:, index], source.wrappers, axis)
        np.testing.assert_allclose(first[index], begin[0], rtol=1e-5, atol=1e-6)
        for step, (obs, reward, *flags) in zip(steps, rows, strict=True):
            np.testing.assert_allclose(step.obs[index], obs, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(step.reward[index], reward, rtol=1e-6)
            assert [step.terminated[index], step.truncated[index], step.valid[index]] == flags
    return steps


BACKENDS: dict[str, tuple[str, dict[str, str], Callable[[int], Single]]] = {
    "gymnax": ("gymnax:CartPole-v1", {"max_steps_in_episode": "25"}, of_gymnax),
    "gymnasium": ("gymnasium:CartPole-v1", {"max_episode_steps": "25"}, of_gymnasium),
    "envpool": (
        "envpool:CartPole-v1",
        {"max_episode_steps": "25"},
        lambda index: of_envpool(index, max_episode_steps=25),
    ),
}
ALL = [
    (Wrappers(), 25),
    (Wrappers(action_repeat=3), 9),
    (Wrappers(time_limit=8), 8),
    (Wrappers(time_limit=100), 25),
    (Wrappers(frame_stack=3), 25),
    (Wrappers(frame_stack=2, action_repeat=2, time_limit=7), 7),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrappers, limit", ALL)
def test_against_a_plain_loop(backend: str, wrappers: Wrappers, limit: int) -> None:
    env, options, single = BACKENDS[backend]
    source = find(env, options, wrappers=wrappers)
    assert source.spec.max_episode_steps == limit
    assert source.spec.observation.shape == (4 * (wrappers.frame_stack or 1),)
    steps = compare(source, single)
    assert any((step.truncated if limit < 9 else step.terminated).any() for step in steps)


@pytest.mark.parametrize("env_id, limit", [("Catch-v0", 4), ("Catch-v0", 9), ("Highway-v0", 4)])
def test_environments_of_envpool_that_ignore_their_time_limit(env_id: str, limit: int) -> None:
    """Episodes are cut where EnvPool does not end them; where the task ends with the limit,
    it is a termination.
    """
    source = find(f"envpool:{env_id}", wrappers=Wrappers(time_limit=limit))
    steps = compare(source, lambda index: of_envpool(index, env_id))
    cut = np.any([step.truncated for step in steps])
    assert cut == (limit == 4)


def test_rows_that_are_cut_begin_again_while_others_go_on() -> None:
    """On the cliff, one walks to the goal in 13 steps,
    and the other waits at the start until its time is over.
    """
    up, right, down, left = range(4)
    walk = [up, *[right] * 11, down]
    wrappers = Wrappers(time_limit=20)
    with contextlib.closing(find("envpool:CliffWalking-v1", wrappers=wrappers).host(2, 0)) as host:
        start, place = host.reset(), []
        for t in range(3 * 14 * 3):
            walked = t % 14
            step, ended = host.step(np.array([walk[walked] if walked < 13 else left, left]))
            assert step.terminated.tolist() == [walked == 12, False]
            assert step.truncated.tolist() == [False, t % 21 == 19]
            assert step.valid.tolist() == [walked != 13, t % 21 != 20]
            assert ended.length_sum.tolist() == [13 * (walked == 12), 20 * (t % 21 == 19)]
            assert step.obs[1] == start[1]
            place.append(int(step.obs[0]))
        assert len(set(place)) == 14 and place == place[:14] * 9


@pytest.mark.case  # memory/test_frames.py::test_rollouts_hold_the_stacks_that_envpool_makes
def test_on_atari() -> None:
    """Where the frames of a stack are EnvPool's own option,
    and a repeated action is on top of its frame skip.
    """
    options = {"noop_max": "1", "use_fire_reset": "true"}
    wrappers = Wrappers(frame_stack=2, action_repeat=3, time_limit=12)
    source = find("envpool:Breakout-v5", options, "machado", wrappers=wrappers)
    assert source.spec.frame_stack == 2 and source.spec.observation.shape == (2, 84, 84)
    native = {
        "stack_num": 1,
        "repeat_action_probability": 0.25,
        "noop_max": 1,
        "use_fire_reset": True,
    }
    steps = compare(
        source, lambda index: of_envpool(index, "Breakout-v5", episodic_life=False, **native)
    )
    assert sum(step.reward.sum() for step in steps) > 0
    with pytest.raises(ConfigError, match="frame_stack 2 contradicts env_options stack_num=3"):
        find("envpool:Breakout-v5", {"stack_num": "3"}, wrappers=wrappers)
    same = find("envpool:Breakout-v5", {"stack_num": "2"}, wrappers=Wrappers(frame_stack=2))
    assert same.spec.frame_stack == 2


@pytest.mark.parametrize("env", [(own.Picture(), 7), "faulty:spaced"])
def test_images_are_stacked_along_their_channels(env: Any) -> None:
    """Wherever those are."""
    options = {"observation": "Image"} if env == "faulty:spaced" else {}
    single, source = (find(env, options, wrappers=Wrappers(frame_stack=k)) for k in (None, 3))
    height, width, channels = single.spec.observation.shape
    assert source.spec.observation.shape == (height, width, 3 * channels)
    with (
        contextlib.closing(single.host(2, SEED)) as one,
        contextlib.closing(source.host(2, SEED)) as three,
    ):
        stack = [one.reset()] * 3
        before, obs = shown(three.reset(), frames.blank(source.spec, 2))
        np.testing.assert_array_equal(obs, np.concatenate(stack, -1))
        for action in random_actions(single.spec.action, np.random.default_rng(0), 30, 2):
            step, again = one.step(action)[0], three.step(action)[0]
            before, obs = shown(again.obs, before)
            stack = [
                np.where(step.valid[:, None, None, None], older, step.obs)
                for older in [*stack[1:], step.obs]
            ]
            np.testing.assert_array_equal(obs, np.concatenate(stack, -1))
            np.testing.assert_array_equal(again.valid, step.valid)


def test_grey_images_become_channels_of_a_stack() -> None:
    single, source = (
        find("faulty:spaced", {"observation": "Grey"}, wrappers=Wrappers(frame_stack=k))
        for k in (None, 3)
    )
    assert source.spec.observation.shape == (3, 12, 14)
    with (
        contextlib.closing(single.host(2, SEED)) as one,
        contextlib.closing(source.host(2, SEED)) as three,
    ):
        stack = [one.reset()] * 3
        before, obs = shown(three.reset(), frames.blank(source.spec, 2))
        np.testing.assert_array_equal(obs, np.stack(stack, 1))
        action = np.zeros(2, np.int32)
        for _ in range(4):
            stack = [*stack[1:], one.step(action)[0].obs]
            before, obs = shown(three.step(action)[0].obs, before)
            np.testing.assert_array_equal(obs, np.stack(stack, 1))


def test_a_walk_in_a_compiled_program() -> None:
    """A step with repeated actions stops at an end, and both kinds of limit count as they
    should.
    """
    env = find((own.Walk(), 7), wrappers=Wrappers(action_repeat=2, time_limit=3)).device()
    assert env.spec.max_episode_steps == 3
    keys = jax.random.split(jax.random.key(0), 2)
    state, _ = env.reset(keys)
    seen = []
    for actions in ([1, 1], [1, 0], [1, 1], [1, 0]):
        state, step, _ = jax.jit(env.step)(state, jnp.array(actions), keys)
        rows = np.stack(
            [step.obs[:, 0], step.reward, step.terminated, step.truncated, step.valid], axis=1
        )
        seen.append(rows.astype(int).tolist())
    assert [rows[0] for rows in seen] == [
        [2, 3, 0, 0, 1],
        [3, 3, 1, 0, 1],
        [0, 0, 0, 0, 0],
        [2, 3, 0, 0, 1],
    ]
    assert [rows[1] for rows in seen] == [
        [2, 3, 0, 0, 1],
        [0, 1, 0, 0, 1],
        [2, 3, 0, 1, 1],
        [0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("action_repeat", [1, 3])
def test_python_numbers_will_do(action_repeat: int) -> None:
    env = find(own.Plain(), wrappers=Wrappers(action_repeat=action_repeat)).device()
    keys = jax.random.split(jax.random.key(0), 2)
    _, step, _ = jax.jit(env.step)(env.reset(keys)[0], jnp.ones(2, int), keys)
    assert step.reward.tolist() == [action_repeat] * 2 and step.reward.dtype == np.float32
    assert not (step.terminated | step.truncated).any()


@pytest.mark.parametrize(
    "env", ["gymnax:FrozenLake-misc", "gymnasium:FrozenLake-v1", "envpool:FrozenLake-v1"]
)
def test_what_cannot_be_stacked(env: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"frame_stack.*2.*{env}.*Disc",
    ):
        find(env, wrappers=Wrappers(frame_stack=2))


def test_a_layout_is_never_lost() -> None:
    assert frames.channel_axis((3, 12, 12)) == 0 and frames.channel_axis((12, 12, 3)) == 2
    space = box(3, 12, 12, bound=1)
    with pytest.raises(ConfigError, match=r"makes images of shape \(12, 12, 12\).* fewer frames"):
        wrapped(spec(space), Wrappers(frame_stack=4))


# --- Clipped rewards ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bounds, low, high",
    [
        pytest.param("0.5", -0.5, 0.5, marks=pytest.mark.case),
        ("-1,0.25", -1, 0.25),
        ("0.1,0.2", 0.1, 0.2),
    ],
)
def test_learning_sees_clipped_rewards(bounds: str, low: float, high: float) -> None:
    """Examples, running statistics and what the policy
    remembers are those of rewards clipped beforehand.
    """
    plain_config = jaxrl_dist.preset("a2c", "CartPole-v1", scale_rewards=True)
    config = dataclasses.replace(plain_config, clip_rewards=bounds)
    clipping, algorithm = (make_algorithm(each, spec())[""] for each in (config, plain_config))
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    rollout = random_rollout(algorithm, spec(), 12, 4)
    clipped = rollout._replace(
        reward=np.where(rollout.valid, np.clip(rollout.reward, low, high), 0).astype(np.float32)
    )
    assert (clipped.reward != rollout.reward).any()
    keys = jax.random.split(jax.random.key(0), 4)
    pairs = (clipping, rollout), (algorithm, clipped)
    assert_close(*[each.postprocess(variables, x, Context(keys)) for each, x in pairs])
    assert_close(*[updated_stats(each, variables, x) for each, x in pairs])
    for t in range(12):
        fields = [
            (x.obs[t + 1], x.reward[t], x.terminated[t], x.truncated[t], x.valid[t])
            for _, x in pairs
        ]
        assert_close(
            *[pairs[i][0].feedback(rollout.core, (), Timestep(*fields[i])) for i in range(2)]
        )


def updated_stats(algorithm: Algorithm, variables: Any, rollout: Any) -> Any:
    """The running statistics after a rollout, on a mesh, as their sums run over devices."""
    update_stats = meshes.Program(
        lambda x: algorithm.updated_stats(variables, x, Context()),
        make_mesh(1),
        (meshes.ROLLOUT,),
        meshes.REPLICATED,
    )
    return update_stats(rollout)


def test_gradients_plan_takes_clipped_rewards() -> None:
    plain = jaxrl_dist.preset("a3c", "CartPole-v1", clip_rewards="1")
    check_sizes(make_algorithm(plain, spec())[""], 8)
    for name in ("normalize_observations", "scale_rewards"):
        config = dataclasses.replace(plain, **{name: True})  # type: ignore[arg-type]
        with pytest.raises(
            ConfigError, match="running statistics are not kept under plan gradients"
        ):
            check_sizes(make_algorithm(config, spec())[""], 8)


# --- From the command line ------------------------------------------------------------------------

FLAGS = "--frame-stack 3 --action-repeat 2 --time-limit 6 --clip-rewards -1,1"


@pytest.mark.case  # the others
@pytest.mark.parametrize(
    "command",
    [
        "a2c --env CartPole-v1 --num-envs 8",
        "ppo --env gymnasium:CartPole-v1 --num-envs 8 --num-epochs 1 --num-minibatches 1",
    ],
)
def test_a_run_its_evaluation_and_its_policy_have_them(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--rollout-length 16 --total-env-steps 384 --report-interval 128 --evaluation-episodes 3 --num-devices 1"
    run_dir = runs.train(f"{command} {sizes} --hidden-sizes 8 {FLAGS}", tmp_path / "run")
    assert max(line["episode/length"] for line in runs.read_metrics(run_dir)) <= 6
    assert max(line["episode/return_max"] for line in runs.read_metrics(run_dir)) > 6, (
        "raw, and of two steps each"
    )
    summary = runs.read_json(run_dir / "summary.json")["evaluation"]
    assert summary["length_mean"] <= 6
    policy = jaxrl_dist.load_policy(run_dir)
    assert policy.source.spec.observation.shape == (12,) and policy.source.wrappers == Wrappers(
        3, 2, 6
    )
    assert policy(np.zeros((2, 12)))[0].shape == (2,)
    assert cli.main(["evaluate", str(run_dir), "--episodes", "3"]) == 0
    assert f"return {summary['return_mean']:.4g} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--clip-rewards high",
            "--clip-rewards must be a bound such as 1 or a range such as -1,1, not 'high'",
        ),
        ("--clip-rewards 0", "not '0'"),
        ("--clip-rewards=1,-1", "not '1,-1'"),
        ("--clip-rewards 1,2,3", "not '1,2,3'"),
        ("--clip-rewards nan", "not 'nan'"),
        ("--frame-stack 0", "--frame-stack must be >= 1"),
        ("--time-limit 0", "--time-limit must be >= 1"),
        ("--action-repeat 0", "--action-repeat must be >= 1"),
        (
            "--frame-stack 2 --env FrozenLake-misc",
            "--frame-stack 2 needs observations that are arrays of numbers",
        ),
    ],
)
def test_what_makes_no_sense(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    env = "" if "--env" in flags else "--env CartPole-v1"
    assert cli.main(f"train ppo {env} {flags}".split()) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
