"""Keys as functions of the global index, and programs over a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import make_mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import EpisodeStats


def data(keys: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(keys)).reshape(-1, 2)


def test_keys_are_all_different() -> None:
    """Over seeds, streams, steps and environments."""
    steps, index = jnp.array([0, 1, 2**31, 2**32 - 2], jnp.uint32), jnp.arange(8)
    per_step = jax.jit(rng.per_step)
    keys = [
        data(per_step(rng.stream(seed, stream), steps, index))
        for seed in (0, 1, 2**31 - 1)
        for stream in rng.Stream
    ]
    keys.append(
        np.stack([data(rng.stream(seed, stream))[0] for seed in (0, 1) for stream in rng.Stream])
    )
    keys = np.concatenate(keys)
    assert len(np.unique(keys, axis=0)) == len(keys)


def test_keys_say_what_they_are_for() -> None:
    """The key of a step of an environment is found without those of others,
    from a seed or from its key.
    """
    key = rng.stream(7, rng.Stream.ACT)
    np.testing.assert_array_equal(data(rng.stream(jax.random.key(7), rng.Stream.ACT)), data(key))
    keys = rng.per_step(key, jnp.arange(3, dtype=jnp.uint32), jnp.arange(4))
    assert keys.shape == (3, 4)
    alone = jax.random.fold_in(jax.random.fold_in(key, 2), 3)
    np.testing.assert_array_equal(data(keys[2, 3]), data(alone))
    np.testing.assert_array_equal(
        data(rng.per_index(key, jnp.array([[5], [9]]))[1, 0]), data(jax.random.fold_in(key, 9))
    )


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_sums_and_indices_over_a_mesh(num_devices: int) -> None:
    x = np.arange(16, dtype=np.float32)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return meshes.global_index(x.size), meshes.global_sum(jnp.sum(x))

    mesh = make_mesh(num_devices)
    program = meshes.Program(run, mesh, (meshes.BATCH,), (meshes.BATCH, meshes.REPLICATED))
    index, total = program(meshes.put(x, mesh, meshes.BATCH))
    np.testing.assert_array_equal(index, np.arange(16))
    assert index.dtype == jnp.int32 and total == x.sum()


def test_acting_allows_loops_from_constants() -> None:
    mesh = make_mesh(2)

    def act(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, total: total + x, jnp.zeros(2))

    def run(x: jax.Array) -> jax.Array:
        learned = meshes.learning(
            lambda x: meshes.global_sum(x.sum()), mesh, meshes.BATCH, meshes.REPLICATED
        )
        return learned(meshes.acting(act, mesh, meshes.BATCH, meshes.BATCH)(x)) + x.sum()

    x = np.arange(4, dtype=np.float32)
    with pytest.raises(TypeError, match="varying"):
        meshes.Program(act, mesh, (meshes.BATCH,), meshes.BATCH)(x)
    program = meshes.Program(run, mesh, (meshes.BATCH,), meshes.REPLICATED, mapped=meshes.whole)
    assert program(x) == 4 * x.sum()


def test_episodes_merge_along_an_axis_or_all() -> None:
    x = np.array([[1.0, 2.0], [3.0, -4.0]], np.float32)
    episodes = EpisodeStats(x, x, x, x, x, {"success": (x, x)})
    *fields, info = episodes.merge(axis=0)
    assert [list(field) for field in fields] == [[4, -2], [4, -2], [4, -2], [1, -4], [3, 2]]
    assert [list(field) for field in info["success"]] == [[4, -2], [4, -2]]
    assert tuple(map(float, episodes.merge()[:-1])) == (2, 2, 2, -4, 3)


def test_a_program_compiles_once() -> None:
    traces = []

    def run(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return x + 1

    program = meshes.Program(run, make_mesh(2), (meshes.BATCH,), meshes.BATCH)
    x = meshes.put(np.zeros(4, np.float32), make_mesh(2), meshes.BATCH)
    for _ in range(3):
        x = program(x)
    assert traces == [(2,)] and program.compile_seconds > 0
    np.testing.assert_array_equal(x, 3)
    with pytest.raises(TypeError):
        program(meshes.put(np.zeros(8, np.float32), make_mesh(2), meshes.BATCH))
    assert traces == [(2,)]


def test_what_differs_cannot_be_called_replicated() -> None:
    program = meshes.Program(lambda x: x * 2, make_mesh(2), (meshes.BATCH,), meshes.REPLICATED)
    with pytest.raises(ValueError, match="replicat"):
        program(np.zeros(4, np.float32))


def test_what_sums_over_devices_can_be_tried_by_hand() -> None:
    x, mask = np.arange(4, dtype=np.float32), np.array([True, False, True, True])

    def centre(x: jax.Array, mask: jax.Array, nothing: None) -> tuple[jax.Array, jax.Array]:
        assert nothing is None
        return x - meshes.global_mean(x, mask), meshes.global_index(len(x))

    with pytest.raises(NameError, match="unbound axis name"):
        centre(x, mask, None)
    centred, index = meshes.by_hand(centre)(x, mask, None)
    np.testing.assert_allclose(centred, x - 5 / 3, rtol=1e-6)
    np.testing.assert_array_equal(index, np.arange(4))


def test_a_key_for_the_batch_is_the_same_on_any_devices() -> None:
    def draws(data: jax.Array) -> jax.Array:
        return jax.random.normal(meshes.batch_key(jax.random.wrap_key_data(data)), (1,))

    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 4))
    one, two = (
        meshes.Program(draws, make_mesh(n), (meshes.BATCH,), meshes.BATCH)(keys) for n in (1, 2)
    )
    np.testing.assert_array_equal(two, np.repeat(one, 2))


def test_without_jit_a_program_runs_step_by_step() -> None:
    """As one debugs a loss: ``print`` shows numbers,
    and the results are those of the compiled program.
    """
    shown = []

    def function(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        shown.append(str(x))

        def loss(w: jax.Array) -> jax.Array:
            return meshes.global_mean((w * x) ** 2, x > 0)

        return jax.grad(loss)(w), jax.lax.fori_loop(
            0, 3, lambda i, y: y + i, meshes.global_sum(loss(w))
        )

    arguments = np.arange(4.0, dtype=np.float32), np.float32(2.0)
    specs = (meshes.BATCH, meshes.REPLICATED), (meshes.REPLICATED, meshes.REPLICATED)
    compiled = meshes.Program(function, make_mesh(1), *specs)(*arguments)
    assert "[0. 1. 2. 3.]" not in shown[-1]
    with jax.disable_jit():
        program = meshes.Program(function, make_mesh(1), *specs)
        result = program(*arguments)
        assert "[0. 1. 2. 3.]" in shown[-1]
        with pytest.raises(ConfigError, match=r"2.*num_devices.*1"):
            meshes.Program(function, make_mesh(2), *specs)(*arguments)
    np.testing.assert_allclose(result, compiled, rtol=1e-6)
    np.testing.assert_allclose(program(*arguments), compiled, rtol=1e-6)


@pytest.mark.parametrize("most, loops", [(None, 0), (5, 1), (4, 1), (1, 0), (16, 0)])
def test_members_may_be_computed_in_groups(most: int | None, loops: int) -> None:
    """Groups of the largest size that divides their number;
    a single member's function is not changed by it.
    """

    def member(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x**2, jax.random.uniform(key, (3,))

    x, keys = jnp.arange(12.0), jax.random.split(jax.random.key(0), 12)
    grouped = meshes.over_members(member, most)
    for found, expected in zip(
        grouped(x, keys), (x**2, jax.vmap(lambda key: member(x[0], key)[1])(keys)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    assert str(jax.make_jaxpr(grouped)(x, keys)).count("scan[") == loops
    heavy = jnp.zeros((12, meshes.LIGHT + 1))  # such as a replay memory, which a loop would copy
    assert "scan[" not in str(jax.make_jaxpr(meshes.over_members(lambda x: x + 1, most))(heavy))
