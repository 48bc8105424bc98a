"""Stacks of frames: against plain loops, and against those that EnvPool makes itself, bit for
bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import make_mesh, sample_prioritized, sample_uniform

from jaxrl_dist import mesh as meshes
from jaxrl_dist import preset, rng, train
from jaxrl_dist.actors.evaluate import Evaluation, Evaluator
from jaxrl_dist.actors.host import HostActor
from jaxrl_dist.actors.programs import compile_acting
from jaxrl_dist.envs.host import envpool
from jaxrl_dist.envs.source import find
from jaxrl_dist.memory import frames, ring
from jaxrl_dist.settings.resolve import find_env
from jaxrl_dist.training import learner
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.types import Algorithm, Context, EpisodeStats, Rollout, Variables

NUM_ENVS, LENGTH, ROLLOUTS = 8, 30, 8


# --- Against plain loops --------------------------------------------------------------------------


def plain_stacks(
    pixels: np.ndarray, fresh: np.ndarray, frame_stack: int, axis: int = 0
) -> np.ndarray:
    """Stacks ``[T, B, k * c, ...]`` of the frames
    ``[T, B, c, ...]`` of a stream that begins with fresh ones.
    """
    columns = []
    for env in range(pixels.shape[1]):
        stack: list[np.ndarray] = []
        stacks = []
        for frame, starts in zip(pixels[:, env], fresh[:, env], strict=True):
            stack = [frame] * frame_stack if starts else [*stack[1:], frame]
            stacks.append(np.concatenate(stack, axis))
        columns.append(stacks)
    return np.stack(columns, 1)


def stream(channels: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames ``[40, 3, c, 5, 5]``, and which are fresh; with few ``levels``,
    some stacks become equal by and by.
    """
    random = np.random.default_rng(channels)
    fresh = random.random((40, 3)) < 0.2
    fresh[0] = True
    pixels = np.broadcast_to(
        random.integers(levels, size=(40, 3, channels, 1, 1)), (40, 3, channels, 5, 5)
    )
    return pixels.astype(np.uint8), fresh


@pytest.mark.parametrize("frame_stack, channels", [(2, 1), (4, 1), (4, 3)])
@pytest.mark.parametrize("levels", [2, 200])
@pytest.mark.parametrize("layout", ["channels first", "channels last", "vector"])
def test_stacks_against_a_plain_loop(
    frame_stack: int, channels: int, levels: int, layout: str
) -> None:
    """Pushed one by one, stacked from any ``k`` in a row,
    and from the newest frames of the stacks themselves.
    """
    pixels, fresh = stream(channels, levels)
    if layout == "channels last":
        pixels = np.moveaxis(pixels, 2, -1)
    elif layout == "vector":
        pixels = pixels[..., 0, 0].astype(np.float32)
    expected = plain_stacks(pixels, fresh, frame_stack, axis=2 if layout == "channels last" else 0)

    stacks = np.full(expected.shape[1:], 77, expected.dtype)  # nothing may be left of it
    push = jax.jit(frames.push)
    for frame, wanted in zip(zip(pixels, fresh, strict=True), expected, strict=True):
        stacks, obs = push(stacks, frames.Frame(*frame))
        np.testing.assert_array_equal(obs, wanted)

    kept = jax.device_get(jax.jit(frames.newest, static_argnums=1)(expected, frame_stack))
    assert (np.asarray(kept.fresh) | ~fresh).all() and (levels == 2) == (
        np.asarray(kept.fresh) & ~fresh
    ).any()
    stack = jax.jit(frames.stack)
    for given in (frames.Frame(pixels, fresh), kept):
        for end in range(frame_stack, 41):
            part = slice(end - frame_stack, end)
            stacked = stack(given.pixels[part], given.fresh[part])
            np.testing.assert_array_equal(stacked, expected[end - 1])


def test_observations_that_are_no_frames_pass() -> None:
    obs = np.ones((3, 4), np.float32)
    source = find("CartPole-v1")
    assert source.spec.frame_stack == 1 and frames.blank(source.spec, 3) == ()
    assert frames.push((), obs) == ((), obs)


# --- Against EnvPool's own ------------------------------------------------------------------------

CASES: dict[str, tuple[str, dict[str, str], int]] = {  # the last: how many devices
    "lives": ("Breakout-v5", {}, 1),
    "truncations": ("Pong-v5", {"max_episode_steps": "37"}, 2),
    "truncated lives": ("Breakout-v5", {"max_episode_steps": "41", "stack_num": "2"}, 1),
    "colours": ("Breakout-v5", {"gray_scale": "false", "stack_num": "3"}, 1),
    "games that end among no-ops": ("Asterix-v5", {"noop_max": "600"}, 1),
}


@contextlib.contextmanager
def stacked_by_envpool() -> Iterator[None]:
    """Within it, the adapter hands over EnvPool's own stacks,
    as it does all observations that are no stacks.
    """
    ours = envpool.spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            envpool, "spec", lambda *args: dataclasses.replace(ours(*args), frame_stack=1)
        )
        yield


def watching(num_actions: int) -> Algorithm:
    """Acts at random, and by every pixel that it sees."""

    def policy(variables: Variables, obs: jax.Array, core: Any, context: Context) -> Any:
        weight = jnp.arange(obs[0].size, dtype=jnp.uint32) * jnp.uint32(2654435761)
        seen = jnp.sum(obs.reshape(len(obs), -1).astype(jnp.uint32) * weight[None], axis=1) >> 16
        if context.keys is not None:
            seen += jax.vmap(jax.random.bits)(context.keys) >> 16
        return (seen % num_actions).astype(jnp.int32), core, {"seen": seen}

    def none(*args: Any) -> Any:
        raise NotImplementedError

    return Algorithm(lambda key: Variables((), ()), policy, none, none, optax.identity())


@functools.cache
def act(name: str, num_devices: int) -> list[tuple[Rollout, EpisodeStats]]:
    """Consecutive rollouts of ``LENGTH`` steps, as numpy arrays, with our stacks or,
    on no device, EnvPool's.
    """
    env_id, options, _ = CASES[name]
    mesh = make_mesh(num_devices or 1)
    key = meshes.put(rng.stream(0, rng.Stream.ACT), mesh, meshes.REPLICATED)
    results = []
    with contextlib.ExitStack() as exits:
        if not num_devices:
            exits.enter_context(stacked_by_envpool())
        source = find(env_id, options)
        env = exits.enter_context(contextlib.closing(source.host(NUM_ENVS, 0)))
        assert (source.spec.frame_stack > 1) == bool(num_devices)
        algorithm = {"": watching(source.spec.action.n)}
        programs = compile_acting(algorithm, env.spec, mesh, LENGTH, key)
        actor = HostActor(algorithm, env, mesh, LENGTH, programs)
        for iteration in range(ROLLOUTS):
            numbers = meshes.put(
                (jnp.int32(iteration), {"": jnp.float32(0)}), mesh, meshes.REPLICATED
            )
            experience, episodes, _ = actor.rollout({"": Variables((), ())}, *numbers)
            results.append(jax.device_get((experience[""], episodes[""])))
    return results


@pytest.mark.case  # test_evaluation_sees_the_stacks_that_envpool_makes
@pytest.mark.parametrize("name", CASES)
def test_rollouts_hold_the_stacks_that_envpool_makes(name: str) -> None:
    """Over lost lives, games that end, time limits and the seams between rollouts."""
    env_id, options, num_devices = CASES[name]
    results, expected = act(name, num_devices), act(name, 0)
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, results, expected)

    spec = find(env_id, options).spec
    games, lost, truncations, restarts = 0, 0, 0, 0
    newest = jax.jit(frames.newest, static_argnums=1)
    for experience, episodes in results:
        fresh = np.asarray(newest(experience.obs[1:], spec.frame_stack).fresh)
        restarts += (fresh & ~experience.valid).sum()
        games += episodes.episodes
        lost += experience.terminated.sum()
        truncations += experience.truncated.sum()
    assert games >= 6 and restarts >= 6
    assert (lost > games) == (name not in ("truncations", "truncated lives")) and (
        truncations > 0
    ) == ("trunc" in name)
    assert (restarts > games) == ("no-ops" in name)  # those that EnvPool does not report


@pytest.mark.case  # test_evaluation_sees_the_stacks_that_envpool_makes
@pytest.mark.parametrize(
    "rollouts, prioritized", [(2, False), (2, True), (ROLLOUTS, False), (ROLLOUTS, True)]
)
def test_replay_gives_the_stacks_back(prioritized: bool, rollouts: int) -> None:
    """Before and after the ring wraps around, of every window that may be drawn, and of no
    other.
    """
    frame_stack, slots, window = 4, 2 * LENGTH + 11, 3

    def crop(rollout: Rollout) -> Rollout:
        return rollout._replace(obs=rollout.obs[..., ::6, ::6])

    whole, theirs = (
        [crop(experience) for experience, _ in act("lives", n)[:rollouts]] for n in (1, 0)
    )
    obs = np.concatenate([*(rollout.obs[:-1] for rollout in theirs), theirs[-1].obs[-1:]])
    valid = np.concatenate([rollout.valid for rollout in whole])
    init = jax.jit(ring.init, static_argnames=("slots", "prioritized", "frame_stack"))
    memory = init(whole[0], slots, prioritized=prioritized, frame_stack=frame_stack)
    add = jax.jit(ring.add, static_argnums=(2, 3))
    for rollout in whole:
        memory = add(memory, rollout, window, frame_stack)
    draw = sample_prioritized if prioritized else sample_uniform

    def sample(memory: ring.Memory, key: jax.Array) -> Any:
        drawn, index, *_ = draw(memory, key, 8192, window, frame_stack)
        return drawn, index

    run = jax.shard_map(
        sample,
        mesh=make_mesh(1),
        in_specs=(meshes.BATCH, meshes.REPLICATED),
        out_specs=(meshes.ROLLOUT, meshes.BATCH),
    )
    drawn, (env, slot) = jax.device_get(jax.jit(run)(memory, jax.random.key(0)))
    added = rollouts * LENGTH
    # the newest complete window that lies there
    step = added - window - (added - window - slot) % slots
    for t in range(window + 1):
        np.testing.assert_array_equal(drawn.obs[t], obs[step + t, env])
    live = range(max(0, added - slots + frame_stack), added - window + 1)
    assert set(zip(env, step, strict=True)) == {
        (e, s) for e in range(NUM_ENVS) for s in live if valid[s, e]
    }


def test_evaluation_sees_the_stacks_that_envpool_makes() -> None:
    def play() -> Evaluation:
        source = find("Breakout-v5", {"max_episode_steps": "90"})
        return Evaluator({"": watching(source.spec.action.n)}, source, 6, 0).play(
            {"": Variables((), ())}
        )

    ours = play()
    with stacked_by_envpool():
        theirs = play()
    assert len(np.unique(ours.returns)) > 1 and (ours.lengths > 20).all()
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_million_atari_steps_take_seven_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "memory_size", lambda: 2**40)  # a machine that has them
    config = preset("dqn", "envpool:Pong-v5", replay_capacity=1_000_000)
    spec = find_env(config).spec
    made = learner.make_learner(config, make_algorithm(config, spec), spec, jax.local_devices()[:1])
    memory = jax.eval_shape(made.init, jax.random.key(0)).memory
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(memory)) == pytest.approx(
        1e6 * 84 * 84, rel=0.005
    )


@pytest.mark.case  # test_replay_gives_the_stacks_back
def test_dqn_learns_on_atari() -> None:
    """A few updates from a memory that has wrapped around, and two games."""
    config = preset(
        "dqn",
        "envpool:Pong-v5",
        env_options={"max_episode_steps": "20"},
        num_devices=2,
        total_env_steps=256,
        evaluation_episodes=2,
        replay_capacity=160,
        learning_starts=200,
        batch_size=2,
        replay_ratio=0.03125,
        torso="mlp",
        hidden_sizes=(8,),
    )
    *_, last = train(config)
    assert last.updates >= 1 and np.isfinite(last.metrics["loss/q"])
    assert last.evaluation["length_mean"] == 20
