"""The replay memory against plain Python lists, under wrap-around, resets and priorities."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import scipy.stats
from probes import sample_prioritized, sample_uniform

from jaxrl_dist import mesh as meshes
from jaxrl_dist.memory import ring
from jaxrl_dist.types import Rollout

ENVS = 4
INIT = jax.jit(ring.init, static_argnames=("slots", "prioritized", "frame_stack"))
ADD = jax.jit(ring.add, static_argnums=(2, 3))


def stream(num_steps: int, seed: int = 0) -> Rollout:
    """Steps of four environments; the observation says environment and step,
    episodes end at random.
    """
    rng = np.random.default_rng(seed)
    ended = np.zeros((num_steps + 1, ENVS), bool)
    valid = np.ones((num_steps, ENVS), bool)
    for t in range(num_steps):
        valid[t] = ~ended[t]
        ended[t + 1] = valid[t] & (rng.random(ENVS) < 0.2)
    obs = np.stack(
        np.broadcast_arrays(np.arange(num_steps + 1)[:, None], np.arange(ENVS)), -1
    ).astype(np.uint16)
    step = obs[:-1, :, 0].astype(np.float32)
    truncated = ended[1:] & (rng.random(valid.shape) < 0.5)
    return Rollout(
        obs, obs[:-1, :, 0], step, ended[1:] & ~truncated, truncated, valid, {"q": -step}, (), ()
    )


def stacked(whole: Rollout, frame_stack: int, seed: int = 0) -> Rollout:
    """The same with stacks of frames, the newest last;
    those of a new episode may be fresh or go on.
    """
    if frame_stack == 1:
        return whole
    fresh = np.random.default_rng(seed).random(whole.valid.shape) < 0.5
    stacks = [np.tile(whole.obs[0], frame_stack)]
    for frame, begins in zip(whole.obs[1:], fresh & ~whole.valid, strict=True):
        stacks.append(np.concatenate([stacks[-1][:, 2:], frame], 1))
        stacks[-1][begins] = np.tile(frame, frame_stack)[begins]
    return whole._replace(obs=np.stack(stacks))


def cut(whole: Rollout, start: int, stop: int) -> Rollout:
    """The rollout of steps ``start`` to ``stop - 1``."""
    part = jax.tree.map(lambda x: x[start:stop], whole._replace(obs=()))
    return part._replace(obs=whole.obs[start : stop + 1])


def on_mesh(function: Any, num_devices: int, in_specs: Any, out_specs: Any) -> Any:
    mesh = meshes.make_mesh(jax.local_devices()[:num_devices])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def filled(
    whole: Rollout, slots: int, chunk: int, window: int, *, prioritized: bool, frame_stack: int = 1
) -> ring.Memory:
    memory = INIT(whole, slots, prioritized=prioritized, frame_stack=frame_stack)
    for start in range(0, whole.reward.shape[0], chunk):
        memory = ADD(memory, cut(whole, start, start + chunk), window, frame_stack)
    return memory


def startable(
    whole: Rollout, slots: int, window: int, frame_stack: int = 1
) -> set[tuple[int, int]]:
    """(environment, step) of every window that lies, with the frames before it, in the newest
    ``slots - 1`` steps and starts on no reset."""
    total = whole.reward.shape[0]
    live = range(max(0, total - slots + frame_stack), total - window + 1)
    return {(env, step) for env in range(ENVS) for step in live if whole.valid[step, env]}


def check_windows(windows: Rollout, whole: Rollout, window: int) -> list[tuple[int, int]]:
    """Checks that windows are unbroken pieces of the stream; says where each starts."""
    windows = jax.tree.map(np.asarray, windows)
    starts = [(int(env), int(step)) for step, env in windows.obs[0, :, -2:]]
    for n, (env, step) in enumerate(starts):
        piece = jax.tree.map(lambda x, e=env: x[:, e], cut(whole, step, step + window))
        drawn = jax.tree.map(lambda x, n=n: x[:, n], windows)
        jax.tree.map(np.testing.assert_array_equal, drawn._replace(core=(), final_core=()), piece)
    return starts


@pytest.mark.parametrize("total", [8, 16])  # the slot before is the last one, or the one before
def test_a_cut_step_has_the_last_observation_and_older_extras(total: int) -> None:
    whole = stream(total)
    memory = jax.jit(ring.cut, static_argnums=1)(filled(whole, 16, 8, 3, prioritized=False), 3)
    at = total % 16
    np.testing.assert_array_equal(memory.steps.obs[:, at], whole.obs[-1])
    np.testing.assert_array_equal(memory.steps.extras["q"][:, at], whole.extras["q"][-1])
    assert not memory.steps.valid[:, at].any() and not memory.steps.reward[:, at].any()


WINDOWS = {  # total, slots, chunk, window, frame_stack: prioritized or not, in `make test`
    (40, 64, 8, 3, 1): {False},
    (200, 50, 8, 1, 1): {False},
    (120, 37, 4, 5, 1): {},
    (24, 64, 8, 3, 4): {},
    (48, 50, 8, 3, 4): {False},
    (200, 50, 8, 1, 4): {},
    (120, 37, 4, 5, 2): {True},
}


@pytest.mark.parametrize(
    "prioritized, total, slots, chunk, window, frame_stack",
    [
        pytest.param(prioritized, *sizes, marks=[] if prioritized in kept else pytest.mark.case)
        for prioritized in (False, True)
        for sizes, kept in WINDOWS.items()
    ],
)
def test_windows_are_whole_and_every_one_is_drawn(
    total: int, slots: int, chunk: int, window: int, frame_stack: int, prioritized: bool
) -> None:
    whole = stacked(stream(total), frame_stack)
    memory = filled(whole, slots, chunk, window, prioritized=prioritized, frame_stack=frame_stack)
    draw = sample_prioritized if prioritized else sample_uniform
    out = (meshes.TIME_BATCH, meshes.BATCH, meshes.BATCH)[: 3 if prioritized else 2]
    specs = meshes.BATCH, meshes.REPLICATED
    sample = on_mesh(
        lambda memory, key: draw(memory, key, 4096, window, frame_stack), 1, specs, out
    )
    windows, *_ = sample(memory, jax.random.key(1))
    assert windows.obs.dtype == np.uint16
    starts = check_windows(windows, whole, window)
    assert set(starts) == startable(whole, slots, window, frame_stack)


def test_uniform_is_uniform() -> None:
    whole = stream(100)
    memory = filled(whole, 40, 4, 3, prioritized=False)
    sample = on_mesh(
        lambda memory, key: sample_uniform(memory, key, 50_000, 3)[0].obs[0],
        1,
        (meshes.BATCH, meshes.REPLICATED),
        meshes.BATCH,
    )
    _, counts = np.unique(np.asarray(sample(memory, jax.random.key(0))), axis=0, return_counts=True)
    assert scipy.stats.chisquare(counts).pvalue > 0.01


def test_batch_shares_do_not_overflow_int32() -> None:
    """Example ``i`` of N draws from the environments ``[i B / N, (i + 1) B / N]``."""
    envs, examples = 40_000, 60_000
    blank, no = np.zeros((2, envs), np.float32), np.zeros((2, envs), bool)
    steps = Rollout(np.zeros((3, envs), np.float32), blank, blank, no, no, ~no, {}, (), ())
    memory = ADD(INIT(steps, 4, prioritized=False, frame_stack=1), steps, 1, 1)
    draw = on_mesh(
        lambda memory, key: ring.draw_uniform(memory, key, examples, 1),
        1,
        (meshes.BATCH, meshes.REPLICATED),
        meshes.BATCH,
    )
    first = np.arange(examples) * envs // examples
    beyond = np.asarray(draw(memory, jax.random.key(0)).env) - first
    assert beyond.min() == 0 and beyond.max() == 1


def test_accelerators_draw_the_same_windows_without_a_loop(
    trace_for_gpu: Callable[[], None],
) -> None:
    whole = stream(100)
    memory = filled(whole, 40, 4, 3, prioritized=False)
    found, loops = [], []
    for _platform in ("cpu", "cuda"):

        def sample(memory: ring.Memory, key: jax.Array) -> Any:
            return sample_uniform(memory, key, 512, 3)

        out = (meshes.TIME_BATCH, meshes.BATCH)
        draw = on_mesh(sample, 1, (meshes.BATCH, meshes.REPLICATED), out)
        text = str(jax.make_jaxpr(draw)(memory, jax.random.key(2)))
        loops.append(text.count("while["))
        found.append(draw(memory, jax.random.key(2)))
        trace_for_gpu()
    assert loops[1] == 0 < loops[0]
    jax.tree.map(np.testing.assert_array_equal, *found)
    reset = {(env, step) for step, env in np.argwhere(~whole.valid)}
    assert not reset & {(int(env), int(step)) for step, env in np.asarray(found[1][0].obs[0])}


@functools.cache
def prioritized_memory() -> tuple[ring.Memory, dict[tuple[int, int], float]]:
    """A wrapped-around memory whose priorities were set at random,
    and what they are by (environment, step).
    """
    whole, slots, window = stream(4000), 1500, 3
    memory = filled(whole, slots, 100, window, prioritized=True)
    starts = sorted(startable(whole, slots, window))
    p = np.random.default_rng(0).random(len(starts)).astype(np.float32) ** 3
    env, step = np.asarray(starts, np.int32).T
    memory = jax.jit(ring.set_priority)(memory, ring.Index(env, step % slots), p)
    return memory, dict(zip(starts, p, strict=True))


def test_prioritized_draws_after_wrap_around() -> None:
    memory, p = prioritized_memory()
    sample = on_mesh(
        lambda memory, key: sample_prioritized(memory, key, 1000, 3),
        1,
        (meshes.BATCH, meshes.REPLICATED),
        (meshes.TIME_BATCH, meshes.BATCH, meshes.BATCH),
    )
    total = sum(p.values())
    counts = dict.fromkeys(p, 0)
    for seed in range(30):
        windows, _, probability = sample(memory, jax.random.key(seed))
        starts = [(int(env), int(step)) for step, env in np.asarray(windows.obs[0])]
        np.testing.assert_allclose(probability, [p[start] / total for start in starts], rtol=1e-4)
        for start in starts:
            counts[start] += 1
    keys = sorted(p, key=p.__getitem__)
    groups = np.array_split(np.arange(len(keys)), 100)  # large enough for the test's approximation
    observed = [sum(counts[keys[i]] for i in group) for group in groups]
    expected = [30_000 * sum(p[keys[i]] for i in group) / total for group in groups]
    used = np.asarray(expected) > 5
    observed, expected = np.asarray(observed)[used], np.asarray(expected)[used]
    # Stratified draws vary less than independent ones, so only an excess speaks against them.
    assert (
        scipy.stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1) > 0.01
    )


def test_sums_stay_exact() -> None:
    whole = stream(4000)
    memory, _ = prioritized_memory()
    for start in range(0, 300, 4):
        memory = ADD(memory, cut(whole, start, start + 4), 3)
    blocks = np.asarray(memory.priorities.table, np.float64).reshape(
        *memory.priorities.block_sum.shape, ring.BLOCK
    )
    np.testing.assert_allclose(memory.priorities.block_sum, blocks.sum(-1), rtol=1e-5)
    assert np.asarray(memory.priorities.table)[:, 1500:].sum() == 0


@pytest.mark.parametrize(
    "num_devices",
    [pytest.param(1, marks=pytest.mark.case), pytest.param(2, marks=pytest.mark.case), 4],
)
def test_weighted_estimates_agree_on_any_number_of_devices(num_devices: int) -> None:
    memory, p = prioritized_memory()
    sample = on_mesh(
        lambda memory, key: sample_prioritized(memory, key, 2000 // num_devices, 3),
        num_devices,
        (meshes.BATCH, meshes.REPLICATED),
        (meshes.TIME_BATCH, meshes.BATCH, meshes.BATCH),
    )
    value = np.sin(np.arange(5000.0))
    truth = np.mean([value[step] for _, step in p])
    estimates = []
    for seed in range(20):
        windows, _, probability = sample(memory, jax.random.key(seed))
        step = np.asarray(windows.obs[0, :, 0])
        estimates.append(np.mean(value[step] / np.asarray(probability)) / len(p))
    assert abs(np.mean(estimates) - truth) < 4 * np.std(estimates) / np.sqrt(20) + 0.01


OBSERVATIONS: dict[str, tuple[tuple[int, ...], Any, int]] = {  # shape, dtype, frames in a stack
    "vector": ((17,), np.float32, 1),
    "discrete": ((), np.int32, 1),
    "minatar": ((10, 10, 4), bool, 1),
    "atari": ((4, 84, 84), np.uint8, 4),
    "colours": ((12, 84, 84), np.uint8, 4),
}


@pytest.mark.parametrize(
    "slots, prioritized", [(7, False), (100, True), (1024, False), (1500, True)]
)
@pytest.mark.parametrize(
    "num_devices, observation",
    [
        *((1, observation) for observation in OBSERVATIONS),
        (8, "atari"),
        *(
            pytest.param(8, name, marks=pytest.mark.case)
            for name in OBSERVATIONS
            if name != "atari"
        ),
    ],
)
def test_bytes_are_foretold(
    observation: str, slots: int, prioritized: bool, num_devices: int
) -> None:
    shape, dtype, frame_stack = OBSERVATIONS[observation]
    num_envs = num_devices
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0], num_envs, *x.shape[2:]), x.dtype), stream(4)
    )
    like = like._replace(obs=jax.ShapeDtypeStruct((5, num_envs, *shape), dtype))
    how: dict[str, Any] = {"prioritized": prioritized, "frame_stack": frame_stack}
    place = meshes.shardings(meshes.make_mesh(jax.local_devices()[:num_devices]), meshes.BATCH)
    memory = jax.jit(lambda: ring.init(like, slots, **how), out_shardings=place)()
    real = sum(
        shard.data.on_device_size_in_bytes()
        for x in jax.tree.leaves(memory)
        for shard in x.addressable_shards
    )
    assert ring.nbytes(like, slots, **how) == real
    pixels = np.prod(shape, dtype=int) * np.dtype(dtype).itemsize // frame_stack
    assert 0 <= real / (slots * num_envs) - pixels <= 64 + 8192 * prioritized / slots


@pytest.mark.parametrize("window", [1, 3])
def test_new_windows_get_the_priority_that_comes_with_them(window: int) -> None:
    """Those that end with each step; the largest there has been where none comes."""
    whole, slots, chunk = stream(48), 20, 8
    rng = np.random.default_rng(1)
    memory = INIT(whole, slots, prioritized=True)
    expected: dict[tuple[int, int], float] = {}
    largest = 1.0
    for start in range(0, 48, chunk):
        priority = rng.uniform(0.1, 3.0, (chunk, ENVS)).astype(np.float32)
        priority[: window - 1] = np.nan
        priority[rng.random(priority.shape) < 0.2] = np.nan
        memory = ADD(memory, cut(whole, start, start + chunk), window, priority=priority)
        came: list[float] = []
        for env in range(ENVS):
            known = {
                start + t - window + 1: priority[t, env]
                for t in range(chunk)
                if (env, start + t - window + 1)
                in startable(cut(whole, 0, start + chunk), slots, window)
            }
            for step, p in known.items():
                expected[env, step] = largest if np.isnan(p) else p
            came += [p for p in known.values() if not np.isnan(p)]
        largest = max(largest, *came)
        live = startable(cut(whole, 0, start + chunk), slots, window)
        table = np.zeros((ENVS, slots), np.float32)
        for env, step in live:
            table[env, step % slots] = expected[env, step]
        assert memory.priorities is not None
        np.testing.assert_allclose(memory.priorities.table[:, :slots], table)
        np.testing.assert_allclose(
            np.sum(memory.priorities.block_sum, axis=1), table.sum(axis=1), rtol=1e-5
        )
        np.testing.assert_allclose(memory.priorities.largest, largest)


def test_window_drawn_twice_gets_the_larger_priority() -> None:
    """An accelerator may write equal indices in any order."""
    memory = filled(stream(20), 16, 5, 1, prioritized=True)
    assert memory.priorities is not None
    env, slot = (int(x) for x in np.argwhere(np.asarray(memory.priorities.table) > 0)[3])
    index = ring.Index(np.full(3, env, np.int32), np.full(3, slot, np.int32))
    for priority in ([0.5, 2.0, 0.25], [2.0, 0.25, 0.5]):
        changed = jax.device_get(
            jax.jit(ring.set_priority)(memory, index, np.float32(priority)).priorities
        )
        assert changed is not None and changed.table[env, slot] == 2.0
        np.testing.assert_allclose(changed.block_sum[:, 0], changed.table.sum(1), rtol=1e-6)


def test_new_windows_get_the_largest_priority() -> None:
    """Schaul et al. (2016), algorithm 1, line 6: also after it was lowered again."""
    whole = stream(24)
    memory = filled(cut(whole, 0, 16), 32, 8, 1, prioritized=True)
    env = np.arange(ENVS)
    index = ring.Index(env, whole.valid[:16].argmax(0))  # one window of each environment
    for priority in (2.0, 0.5):
        memory = jax.jit(ring.set_priority)(memory, index, np.full(ENVS, priority, np.float32))
    memory = ADD(memory, cut(whole, 16, 24), 1)
    assert memory.priorities is not None
    np.testing.assert_array_equal(memory.priorities.table[env, index.slot], 0.5)
    np.testing.assert_array_equal(
        memory.priorities.table[:, 16:24], np.where(whole.valid[16:24], 2.0, 0.0).T
    )


@pytest.mark.parametrize("prioritized", [False, True])
def test_no_frames_before_the_first_stored_step_are_drawn(prioritized: bool) -> None:
    stack, window, whole = 4, 2, stream(12)
    whole = whole._replace(valid=np.ones_like(whole.valid))
    # since step 0
    stacks = np.stack(
        [np.concatenate([whole.obs[t + i] for i in range(stack)], 1) for t in range(9)]
    )
    rest = cut(whole, 3, 11)._replace(obs=stacks)
    memory = ring.start_mid_episode(
        INIT(rest, 32, prioritized=prioritized, frame_stack=stack), stack
    )
    memory = ADD(memory, rest, window, stack)
    sample = sample_prioritized if prioritized else sample_uniform
    draw = on_mesh(
        lambda key: sample(memory, key, 64, window, stack)[0].obs,
        1,
        meshes.REPLICATED,
        meshes.TIME_BATCH,
    )
    drawn = np.asarray(draw(jax.random.key(0)))
    stored = {stack.tobytes() for stack in stacks.swapaxes(0, 1).reshape(-1, stacks.shape[2])}
    assert {stack.tobytes() for stack in drawn.reshape(-1, drawn.shape[-1])} <= stored
