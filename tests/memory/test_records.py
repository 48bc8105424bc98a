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
            {"obs": obs, "action": np.zeros(length, int), "reward": obs[:-1, 0], "terminated": length % 2 == 0}
        )
        first += length + 1
    return Dataset.from_episodes(episodes)


def whole(shape, rows):
    return rows(slice(None))


def drawn(num_devices, window, batch_size=64, draws=200):
    mesh = runs.mesh(num_devices) if hasattr(runs, "mesh") else meshes.make_mesh(jax.devices()[:num_devices])
    data = dataset()
    packed = records.source(data.rollout(), window, num_devices).rows(whole)

    def draw(packed, keys):
        def one(key):
            index = records.draw(packed, key, batch_size // num_devices)
            return ring.gather(packed.steps, index, window)

        return jax.lax.map(one, keys)

    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(None, None, meshes.DATA), packed.steps)
    program = meshes.Program(draw, mesh, (meshes.BATCH, meshes.REPLICATED), specs, mapped=meshes.acting)
    return data, jax.device_get(program(packed, jax.random.split(jax.random.key(0), draws)))


@pytest.mark.parametrize("window", [1, 3])
def test_each_step_is_drawn_equally_often_on_any_number_of_devices(window):
    data, windows = drawn(1, window)
    starts = windows.obs[:, 0, :, 0].astype(int).reshape(-1)
    counts = np.bincount(starts, minlength=len(data.valid))
    assert (counts[~data.valid] == 0).all()
    share = counts[data.valid] / counts.sum() * data.steps
    assert share.min() > 0.7 and share.max() < 1.4  # 12,800 draws of 40 steps: 0.06 is one standard deviation
    for number in (2, 8):
        for x, y in zip(jax.tree.leaves(windows), jax.tree.leaves(drawn(number, window)[1]), strict=True):
            np.testing.assert_array_equal(x, y)


def test_windows_are_those_of_the_record():
    data, windows = drawn(1, 3, draws=5)
    start = windows.obs[:, 0, :, 0].astype(int)
    for step in range(3):
        at = np.minimum(start + step, len(data.valid) - 1)
        inside = start + step < len(data.valid)
        for name in ("reward", "terminated", "truncated", "valid"):
            expected = np.where(inside, getattr(data, name)[at], 0)
            np.testing.assert_array_equal(getattr(windows, name)[:, step], expected)


def test_all_steps_are_counted_once():
    data = dataset()
    for num_devices in (1, 8):
        mesh = meshes.make_mesh(jax.devices()[:num_devices])
        packed = records.source(data.rollout(), 3, num_devices).rows(whole)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, 1, *x.shape[1:]), x.dtype), data.rollout())

        def total(packed, like=like):
            rollout = records.once(packed, like)
            valid = rollout.valid
            return meshes.global_sum(((rollout.obs_before[..., 0] * valid).sum(), valid.sum()))

        program = meshes.Program(total, mesh, (meshes.BATCH,), (meshes.REPLICATED, meshes.REPLICATED))
        obs, count = program(packed)
        assert float(obs) == data.obs[data.valid].sum() and int(count) == data.steps
