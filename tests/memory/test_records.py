"""Recorded windows on the devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import runs

from jaxrl_dist import mesh as meshes
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.memory import records, ring


def dataset(lengths=(5, 1, 7, 2, 9, 3, 1, 12)):
    """Episodes whose observations count all steps: step ``k`` of all has the observation ``k``."""
    episodes, first = [], 0
    for length in lengths:
        obs = np.arange(first, first + length + 1, dtype=np.float32)[:, None]
        episodes.append(
            {
                "obs": obs,
                "action": np.zeros(length, int),
                "reward": obs[:-1, 0],
                "terminated": length % 2 == 0,
            }
        )
        first += length + 1
    return Dataset.from_episodes(episodes)


def whole(shape, rows):
    return rows(slice(None))


def drawn(num_devices, window, batch_size=64, draws=200, whole_windows=False):
    mesh = (
        runs.mesh(num_devices)
        if hasattr(runs, "mesh")
        else meshes.make_mesh(jax.devices()[:num_devices])
    )
    data = dataset()
    source = records.divide(data.rollout(), window, num_devices, whole_windows=whole_windows)
    packed = source.rows(whole)

    def draw(packed, keys):
        def one(key):
            index = records.draw(packed, key, batch_size // num_devices)
            return ring.gather(packed.steps, index, window)

        return jax.lax.map(one, keys)

    specs = jax.tree.map(
        lambda _: jax.sharding.PartitionSpec(None, None, meshes.DATA), packed.steps
    )
    program = meshes.Program(
        draw, mesh, (meshes.BATCH, meshes.REPLICATED), specs, mapped=meshes.acting
    )
    return data, jax.device_get(program(packed, jax.random.split(jax.random.key(0), draws)))


@pytest.mark.parametrize("window", [1, 3])
def test_each_step_is_drawn_equally_often_on_any_devices(window):
    data, windows = drawn(1, window)
    starts = windows.obs[:, 0, :, 0].astype(int).reshape(-1)
    counts = np.bincount(starts, minlength=len(data.valid))
    assert (counts[~data.valid] == 0).all()
    share = counts[data.valid] / counts.sum() * data.steps
    # 12,800 draws of 40 steps: 0.06 is one standard deviation
    assert share.min() > 0.7 and share.max() < 1.4
    for number in (2, 8):
        for x, y in zip(
            jax.tree.leaves(windows), jax.tree.leaves(drawn(number, window)[1]), strict=True
        ):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("lengths", [(24,), (5, 1, 7, 2, 9, 3)])
def test_each_step_is_at_each_place_of_whole_windows_once(num_devices, lengths):
    data = dataset(lengths)
    source = records.divide(data.rollout(), 4, num_devices, whole_windows=True)
    row, number = np.nonzero(np.arange(source.starts.shape[1]) < source.sizes[:, None])
    slot = source.starts[row, number]
    windows = source.windows(row, slot)
    packed = source.rows(whole)
    for place in range(4):
        steps = windows.obs[windows.valid[:, place], place, 0]
        assert sorted(steps) == sorted(data.obs[data.valid, 0])
        np.testing.assert_array_equal(
            packed.steps.valid[row, slot + place], windows.valid[:, place]
        )
        np.testing.assert_array_equal(packed.steps.obs[row, slot + place], windows.obs[:, place])


def test_whole_windows_are_drawn_alike_on_any_number_of_devices():
    for x, y in zip(
        *(jax.tree.leaves(drawn(n, 3, draws=3, whole_windows=True)[1]) for n in (1, 8)), strict=True
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("count", [7, 2**22, 10**8])
def test_entries_of_long_rows_are_drawn_evenly(count):
    def draw(key):
        return ring.stratified(key, 2**16, 8, lambda row: jax.numpy.int32(count), count)

    program = meshes.Program(
        draw,
        meshes.make_mesh(jax.devices()[:1]),
        (meshes.REPLICATED,),
        meshes.BATCH,
        mapped=meshes.acting,
    )
    row, entry = jax.device_get(program(jax.random.key(0)))
    assert np.bincount(row).tolist() == [2**13] * 8 and entry.min() >= 0 and entry.max() < count
    parts = np.bincount((entry.astype(np.int64) * 7) // count, minlength=7) / 2**16 * 7
    np.testing.assert_allclose(parts, 1, atol=0.05)  # 0.01 is a standard deviation
    if count == 10**8:  # float32 has even numbers alone from 2^24 on
        assert abs((entry % 2).mean() - 0.5) < 0.01


def test_windows_are_those_of_the_record():
    data, windows = drawn(1, 3, draws=5)
    start = windows.obs[:, 0, :, 0].astype(int)
    for step in range(3):
        at = np.minimum(start + step, len(data.valid) - 1)
        inside = start + step < len(data.valid)
        for name in ("reward", "terminated", "truncated", "valid"):
            expected = np.where(inside, getattr(data, name)[at], 0)
            np.testing.assert_array_equal(getattr(windows, name)[:, step], expected)


@pytest.mark.parametrize("whole_windows", [False, True])
@pytest.mark.parametrize("lengths", [(5, 1, 7, 2, 9, 3, 1, 12), (3, 2)])
def test_all_steps_are_counted_once(lengths, whole_windows):
    data = dataset(lengths)
    for num_devices in (1, 8):
        mesh = meshes.make_mesh(jax.devices()[:num_devices])
        packed = records.divide(data.rollout(), 3, num_devices, whole_windows=whole_windows).rows(
            whole
        )
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, 1, *x.shape[1:]), x.dtype), data.rollout()
        )

        def total(packed, like=like):
            rollout = records.once(packed, like)
            valid = rollout.valid
            return meshes.global_sum(((rollout.obs_before[..., 0] * valid).sum(), valid.sum()))

        program = meshes.Program(
            total, mesh, (meshes.BATCH,), (meshes.REPLICATED, meshes.REPLICATED)
        )
        obs, count = program(packed)
        assert float(obs) == data.obs[data.valid].sum() and int(count) == data.steps
