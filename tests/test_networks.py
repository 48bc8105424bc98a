"""Networks: convolutions against XLA's, what reads which observation, recurrent unrolls against single episodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrl_dist.config import ConfigError, NetworkConfig
from jaxrl_dist.networks import (
    MLP,
    ActorCritic,
    Conv,
    ImpalaResNet,
    MinAtarCNN,
    NatureCNN,
    actor_critic,
    choose_torso,
    conv2d,
    max_pool,
    preprocess,
    reset_core,
)
from jaxrl_dist.types import Box, Discrete, MultiDiscrete, Space


def box(*shape: int, dtype: type = np.float32) -> Box:
    return Box(shape, np.dtype(dtype), np.zeros(shape, dtype), np.ones(shape, dtype))


VECTOR, SMALL = box(3), box(5, 5, 2, dtype=np.bool_)
MINATAR, ATARI = box(10, 10, 4, dtype=np.bool_), box(4, 84, 84, dtype=np.uint8)


def sample(space: Space, *batch: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if isinstance(space, Discrete):
        return rng.integers(space.n, size=batch, dtype=np.int32)
    if isinstance(space, MultiDiscrete):
        return rng.integers(space.nvec, size=(*batch, len(space.nvec))).astype(np.int32)
    if space.dtype == np.uint8:
        return rng.integers(256, size=(*batch, *space.shape), dtype=np.uint8)
    return (rng.standard_normal((*batch, *space.shape)) * 2).astype(space.dtype)


def equal(actual: object, expected: object, tolerance: float = 1e-6) -> None:
    """Arrays differ by no more than ``tolerance``, or that fraction of the largest element."""

    def check(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.max(np.abs(b))))

    jax.tree.map(check, actual, expected)


def xla_conv(x: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=layout)


# --- Layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, size, features, stride, padding",
    [
        ((2, 84, 84, 4), 8, 32, 4, "VALID"),
        ((2, 20, 20, 32), 4, 64, 2, "VALID"),
        ((2, 9, 9, 64), 3, 64, 1, "VALID"),
        ((3, 10, 10, 4), 3, 16, 1, "VALID"),
        ((2, 11, 7, 3), 4, 5, 3, "VALID"),  # windows leave a rest
        ((2, 12, 9, 3), 3, 5, 1, "SAME"),
        ((2, 12, 9, 3), 3, 5, 2, "SAME"),
        ((2, 11, 8, 3), 4, 5, 3, "SAME"),
        ((2, 5, 5, 3), 1, 2, 2, "SAME"),
        ((1, 84, 84, 3), 8, 4, 4, "SAME"),
    ],
)
def test_convolution_equals_xlas(shape: tuple[int, ...], size: int, features: int, stride: int, padding: str) -> None:
    x = sample(box(*shape))
    kernel = sample(box(size, size, shape[-1], features), seed=1) / (4 * size * math.sqrt(shape[-1]))

    def gradients_and_value(conv: Callable[..., jax.Array]) -> object:
        def loss(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = conv(x, kernel, stride, padding)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, kernel)

    equal(gradients_and_value(conv2d), gradients_and_value(xla_conv), 1e-5)


@pytest.mark.parametrize("platform, convolutions", [("cpu", 0), ("cuda", 3), ("tpu", 3)])
def test_convolution_is_chosen_by_platform(platform: str, convolutions: int) -> None:
    gradients = jax.jit(jax.grad(lambda x, kernel: jnp.sum(jnp.sin(conv2d(x, kernel, 2, "SAME"))), argnums=(0, 1)))
    exported = jax.export.export(gradients, platforms=[platform])(jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4)))
    assert exported.mlir_module().count("stablehlo.convolution") == convolutions


@pytest.mark.parametrize("height, width", [(84, 84), (21, 11), (3, 2), (1, 1)])
def test_max_pool_equals_xlas(height: int, width: int) -> None:
    x = sample(box(2, height, width, 3)) - 5  # negative, so that a padding of zeros would win

    def xla(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(x, -math.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    equal(max_pool(x, 3, 2), xla(x))
    assert max_pool(x[:, None], 3, 2).shape == (2, 1, -(-height // 2), -(-width // 2), 3)
    equal(*(jax.grad(lambda x: jnp.sum(jnp.sin(pool(x))))(x) for pool in (lambda x: max_pool(x, 3, 2), xla)))


@pytest.mark.parametrize("scale", [1.0, math.sqrt(2)])
def test_convolutions_start_orthogonal(scale: float) -> None:
    params = Conv(16, 3, scale=scale).init(jax.random.key(0), jnp.zeros((1, 10, 10, 4)))["params"]
    matrix = params["kernel"].reshape(3 * 3 * 4, 16)
    equal(matrix.T @ matrix, scale**2 * np.eye(16), 1e-5)
    equal(params["bias"], np.zeros(16))


@pytest.mark.parametrize(
    "torso, shape, width, parameters",
    [
        (MLP((8, 6)), (5,), 6, 5 * 8 + 8 + 8 * 6 + 6),
        (MLP((8,), axes=3), (4, 4, 2), 8, 32 * 8 + 8),
        (MLP((8,), axes=0), (), 8, 8 + 8),
        (MinAtarCNN(), (10, 10, 4), 128, 9 * 4 * 16 + 16 + 8 * 8 * 16 * 128 + 128),
        (NatureCNN(), (84, 84, 4), 512, 1_684_128),  # as counted for the published network, less its last layer
        (ImpalaResNet(), (10, 10, 4), 256, 97_744 + 2 * 2 * 32 * 256 + 256),
    ],
)
def test_torsos(torso: Any, shape: tuple[int, ...], width: int, parameters: int) -> None:
    x = sample(box(*shape), 2, 3)
    features, params = jax.eval_shape(torso.init_with_output, jax.random.key(0), x)
    assert features.shape == (2, 3, width) and features.dtype == jnp.float32
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters


@pytest.mark.parametrize(
    "torso, shape", [(MLP((8,), axes=2), (3, 2)), (MinAtarCNN(), (5, 5, 2)), (NatureCNN(), (36, 40, 1))]
)
def test_leading_axes_are_a_batch(torso: Any, shape: tuple[int, ...]) -> None:
    x = sample(box(*shape), 2, 3)
    features, params = jax.jit(torso.init_with_output)(jax.random.key(0), x)
    equal(features[1, 2], torso.apply(params, x[1, 2]), 1e-5)


# --- Observations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space, obs, expected",
    [
        (Discrete(3), np.array([2, 0]), [[0, 0, 1], [1, 0, 0]]),
        (MultiDiscrete((2, 3)), np.array([[1, 2], [0, 0]]), [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]),
        (box(2), np.array([[0.5, -3.0]]), [[0.5, -3.0]]),
        (box(), np.array([0.5, -3.0]), [0.5, -3.0]),
        (box(2, dtype=np.uint8), np.array([[0, 51]], np.uint8), [[0.0, 0.2]]),
        (box(2, dtype=np.bool_), np.array([[True, False]]), [[1.0, 0.0]]),
        (box(2, 1, 1), np.array([[[3.0]], [[4.0]]]), [[[3.0]], [[4.0]]]),  # channels last
        (box(1, 1, 2), np.array([[[3.0, 4.0]]]), [[[3.0], [4.0]]]),  # channels first
        (box(1, 1, 1, 2), np.array([[[[3.0, 4.0]]]]), [[[[3.0, 4.0]]]]),  # no image
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("x64", [False, True])
def test_preprocess(space: Space, obs: np.ndarray, expected: list, dtype: type, x64: bool) -> None:
    if isinstance(space, Box) and space.dtype == np.float32:
        obs = obs.astype(np.float64)  # what MuJoCo has
    with jax.enable_x64(x64):
        x = preprocess(obs, space, dtype)
        assert x.dtype == dtype
        equal(x.astype(jnp.float32), np.asarray(expected, np.float32), 1e-6 if dtype == jnp.float32 else 1e-2)


def test_preprocess_keeps_pixels_in_place() -> None:
    obs = sample(ATARI, 2, 3)
    equal(preprocess(obs, ATARI, jnp.float32), obs.transpose(0, 1, 3, 4, 2) / 255.0)
    obs = sample(MINATAR, 2, 3)
    equal(preprocess(obs, MINATAR, jnp.float32), obs.astype(np.float32))


@pytest.mark.parametrize(
    "space, auto, readers",
    [
        (Discrete(5), "mlp", ""),
        (MultiDiscrete((2, 3, 4)), "mlp", ""),
        (box(), "mlp", ""),
        (VECTOR, "mlp", ""),
        (box(84, 84), "mlp", ""),
        (box(84, 84, 4, 4), "mlp", ""),
        (box(2, 9, 1), "mlp", "impala"),
        (box(9, 2, 1), "mlp", "impala"),
        (box(3, 3, 2), "minatar", "minatar impala"),
        (MINATAR, "minatar", "minatar impala"),
        (box(35, 84, 3), "minatar", "minatar impala"),
        (box(3, 84, 35), "minatar", "minatar impala"),
        (box(36, 36, 3), "nature", "minatar nature impala"),
        (box(210, 160, 3, dtype=np.uint8), "nature", "minatar nature impala"),
        (ATARI, "nature", "minatar nature impala"),
    ],
)
def test_choice_of_torso(space: Space, auto: str, readers: str) -> None:
    assert choose_torso("auto", space) == auto
    assert choose_torso("mlp", space) == "mlp"
    for torso in ("minatar", "nature", "impala"):
        if torso in readers.split():
            assert choose_torso(torso, space) == torso
            continue
        with pytest.raises(ConfigError) as error:
            actor_critic(NetworkConfig(torso=torso), space, 2, shared_torso=True)
        message = str(error.value)
        assert message.startswith(f"--torso {torso} ") and str(space.shape) in message and "\n" not in message
        assert message.endswith(f"--torso {' or '.join(['auto', 'mlp', *readers.split()])} can read them")


# --- Actor and critic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("log_std", [0, 2])
@pytest.mark.parametrize(
    "torso, space",
    [
        ("auto", Discrete(5)),
        ("auto", MultiDiscrete((2, 3))),
        ("auto", box()),
        ("auto", VECTOR),
        ("auto", box(3, 2, dtype=np.float64)),
        ("auto", SMALL),
        ("mlp", SMALL),
        ("impala", SMALL),
    ],
)
def test_shapes_and_dtypes(torso: str, space: Space, log_std: int, core: str, precision: str) -> None:
    network = actor_critic(
        NetworkConfig(torso, (8, 6), core=core, core_size=5, precision=precision), space, 3, False, log_std
    )

    def trace(key: jax.Array) -> object:
        params = network.init(key)
        start = network.initial_core(4)
        unrolled = network.unroll(params, sample(space, 7, 4), start, np.ones((7, 4), bool))
        return params, start, network.step(params, sample(space, 4), start), unrolled

    params, start, (outputs, value, after), (all_outputs, values, final) = jax.eval_shape(trace, jax.random.key(0))
    assert outputs.shape == (4, 3 + log_std) and value.shape == (4,)
    assert all_outputs.shape == (7, 4, 3 + log_std) and values.shape == (7, 4)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, outputs, value, all_outputs, values))} == {
        jnp.float32.dtype
    }
    assert start == after == final
    assert start == () if core == "none" else (start.shape, start.dtype) == ((4, 5), jnp.float32)


@pytest.mark.parametrize("shared", [True, False])
def test_heads_and_torsos(shared: bool) -> None:
    network = actor_critic(NetworkConfig(hidden_sizes=(8,)), VECTOR, 2, shared, log_std=2)
    params, obs = network.init(jax.random.key(0)), sample(VECTOR, 4)
    policy, value = (params[head]["params"]["kernel"] for head in ("policy", "value"))
    equal(100**2 * policy.T @ policy, np.eye(2), 1e-5)
    equal(value.T @ value, np.ones((1, 1)), 1e-5)
    params |= {"log_std": jnp.array([-1.0, 2.0])}
    outputs, _, _ = network.step(params, obs, ())
    equal(outputs[:, 2:], np.tile([-1.0, 2.0], (4, 1)))

    def gradient(pick: Callable[[jax.Array, jax.Array], jax.Array]) -> dict[str, bool]:
        """Which parts of the parameters the picked output depends on."""
        grads = jax.grad(lambda params: jnp.sum(pick(*network.step(params, obs, ())[:2])))(params)
        return {part for part, grad in grads.items() if any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grad))}

    torsos = ("torso", "torso") if shared else ("policy_torso", "value_torso")
    assert gradient(lambda outputs, value: outputs[:, :2]) == {torsos[0], "policy"}
    assert gradient(lambda outputs, value: outputs[:, 2:]) == {"log_std"}
    assert gradient(lambda outputs, value: value) == {torsos[1], "value"}


def test_activation_is_that_of_the_mlp_only() -> None:
    def values(torso: str, activation: str) -> jax.Array:
        network = actor_critic(NetworkConfig(torso, (8,), activation), SMALL, 2, True)
        return network.step(network.init(jax.random.key(0)), sample(SMALL, 2), ())[1]

    names = ("tanh", "relu", "silu", "gelu")
    assert len({float(values("mlp", name)[0]) for name in names}) == 4
    assert len({float(values("minatar", name)[0]) for name in names}) == 1


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("space", [VECTOR, SMALL])
def test_bfloat16_is_near_float32_but_not_equal(space: Space, core: str) -> None:
    fine, coarse = (
        actor_critic(NetworkConfig(core=core, precision=precision), space, 3, True)
        for precision in ("float32", "bfloat16")
    )
    params, obs = fine.init(jax.random.key(0)), sample(space, 5, 4)
    equal(coarse.init(jax.random.key(0)), params, 2e-2)
    arguments = params, obs, fine.initial_core(4), np.ones((5, 4), bool)
    values, rough = fine.unroll(*arguments)[1], coarse.unroll(*arguments)[1]
    assert 1e-5 < jnp.max(jnp.abs(values - rough)) < 5e-2


# --- Memory across episodes ---------------------------------------------------------------------------

VALID = np.array([[1, 1, 0, 1, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 9], bool).T  # [T, B]
RECURRENT = [
    pytest.param(NetworkConfig(hidden_sizes=(8,), core="gru", core_size=5), VECTOR, id="mlp"),
    pytest.param(NetworkConfig(core="gru", core_size=5), SMALL, id="cnn"),
]


def recurrent(config: NetworkConfig, space: Space) -> tuple[ActorCritic, dict[str, Any]]:
    """A network and parameters that put out numbers near 1."""
    network = actor_critic(config, space, 2, True)
    params = jax.jit(network.init)(jax.random.key(0))
    return network, params | {"policy": jax.tree.map(lambda x: 100 * x, params["policy"])}


@pytest.mark.parametrize("config, space", RECURRENT)
def test_unroll_equals_running_episodes_one_by_one(config: NetworkConfig, space: Space) -> None:
    network, params = recurrent(config, space)
    steps, num_envs = VALID.shape
    obs = sample(space, steps, num_envs)
    start = jnp.asarray(sample(box(5), num_envs, seed=1))  # the rollout may begin within an episode
    outputs, values, final = jax.jit(network.unroll)(params, obs, start, VALID)
    step = jax.jit(network.step)
    for env in range(num_envs):
        core = start[env : env + 1]
        for t in range(steps):
            output, value, core = step(params, obs[t, env][None], core)
            equal((outputs[t, env], values[t, env]), (output[0], value[0]))
            if not VALID[t, env]:
                core = network.initial_core(1)
        equal(final[env], core[0])
    never_reset = network.unroll(params, obs, start, np.ones_like(VALID))[1]
    changed = np.any(np.abs(values - never_reset) > 1e-4, axis=0)
    assert changed.tolist() == [True, True, False]


@pytest.mark.parametrize("config, space", RECURRENT)
def test_step_with_reset_core_equals_unroll(config: NetworkConfig, space: Space) -> None:
    network, params = recurrent(config, space)
    obs = sample(space, *VALID.shape)
    core = initial = network.initial_core(VALID.shape[1])
    step, rows = jax.jit(network.step), []
    for t, valid in enumerate(VALID):
        *row, core = step(params, obs[t], core)
        core = reset_core(core, initial, valid)
        rows.append(row)
    *unrolled, final = jax.jit(network.unroll)(params, obs, initial, VALID)
    equal(unrolled, [jnp.stack(column) for column in zip(*rows, strict=True)])
    equal(final, core)


def test_nothing_flows_over_a_reset() -> None:
    network = actor_critic(RECURRENT[0].values[0], VECTOR, 2, True)
    params, obs, start = network.init(jax.random.key(0)), jnp.asarray(sample(VECTOR, 9, 3)), network.initial_core(3)
    gradient = jax.grad(lambda obs: jnp.sum(network.unroll(params, obs, start, VALID)[1][-1]))(obs)
    depends = jnp.any(gradient != 0, axis=-1)
    assert depends[:, 0].tolist() == [False] * 8 + [True]  # reset at steps 6 and 7
    assert depends[:, 1].tolist() == [False] + [True] * 8  # its reset at step 8 comes after that step's value
    assert depends[:, 2].tolist() == [True] * 9


def test_reset_core_broadcasts_over_any_state() -> None:
    core = {"memory": jnp.ones((2, 3, 4)), "epsilon": jnp.array([0.1, 0.2])}
    initial = {"memory": jnp.zeros((2, 3, 4)), "epsilon": jnp.array([0.3, 0.4])}
    after = reset_core(core, initial, np.array([True, False]))
    equal(after["memory"], np.stack([np.ones((3, 4)), np.zeros((3, 4))]))
    equal(after["epsilon"], [0.1, 0.4])
    assert reset_core((), (), np.array([True, False])) == ()


def test_without_a_core_steps_are_independent() -> None:
    network = actor_critic(NetworkConfig(hidden_sizes=(8,)), VECTOR, 2, False)
    params, obs = network.init(jax.random.key(0)), sample(VECTOR, *VALID.shape)
    outputs, values, core = network.unroll(params, obs, (), VALID)
    assert core == ()
    equal((outputs[4], values[4]), network.step(params, obs[4], ())[:2])


# --- Many devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, space",
    [
        *RECURRENT,
        pytest.param(NetworkConfig(hidden_sizes=(8,)), VECTOR, id="mlp-no-core"),
    ],
)
def test_gradients_are_equal_on_one_and_eight_devices(config: NetworkConfig, space: Space) -> None:
    network = actor_critic(config, space, 2, False, log_std=1)
    valid = np.tile(VALID, (1, 3))[:, :8]
    params, obs, core = network.init(jax.random.key(0)), sample(space, *valid.shape), network.initial_core(8)

    def total(params: object, obs: jax.Array, core: object, valid: jax.Array) -> jax.Array:
        outputs, values, final = network.unroll(params, obs, core, valid)
        squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x)), (100 * outputs, values, final))
        return jax.tree.reduce(jnp.add, squares)

    def sharded(params: object, *shards: object) -> object:
        return jax.value_and_grad(lambda params: jax.lax.psum(total(params, *shards), "data"))(params)

    batch, time_batch = PartitionSpec("data"), PartitionSpec(None, "data")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("data",))
    specs = (PartitionSpec(), time_batch, batch, time_batch)
    program = jax.jit(jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True))
    one, eight = jax.jit(jax.value_and_grad(total))(params, obs, core, valid), program(params, obs, core, valid)
    assert len(eight[0].sharding.device_set) == 8
    equal(eight, one, 1e-5)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_convolution_and_pool_on_eight_devices(padding: str) -> None:
    x, kernel = sample(box(6, 6, 2), 8), sample(box(3, 3, 2, 4), seed=1) / 4

    def total(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(max_pool(conv2d(x, kernel, 1, padding), 3, 2)))

    def sharded(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda kernel: jax.lax.psum(total(kernel, x), "data"))(kernel)

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("data",))
    specs = (PartitionSpec(), PartitionSpec("data"))
    program = jax.jit(jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True))
    equal(program(kernel, x), jax.value_and_grad(total)(kernel, x), 1e-5)


def test_a_recurrent_gradient_is_summed_over_devices_once() -> None:
    network = actor_critic(RECURRENT[0].values[0], VECTOR, 2, True)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("data",))

    def gradient(params: object, obs: jax.Array, core: jax.Array, valid: jax.Array) -> object:
        return jax.grad(lambda params: jax.lax.psum(jnp.sum(network.unroll(params, obs, core, valid)[1]), "data"))(
            params
        )

    time_batch = PartitionSpec(None, "data")
    specs = (PartitionSpec(), time_batch, PartitionSpec("data"), time_batch)
    program = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True)
    arguments = network.init(jax.random.key(0)), sample(VECTOR, 9, 8), network.initial_core(8), np.ones((9, 8), bool)
    jaxpr = jax.make_jaxpr(program)(*arguments)
    scans = [str(eqn) for eqn in jaxpr.eqns[0].params["jaxpr"].eqns if eqn.primitive.name == "scan"]
    assert len(scans) == 2 and "psum" in str(jaxpr)
    assert not any("psum" in scan for scan in scans)


def test_a_population_of_networks_is_a_vmap() -> None:
    network = actor_critic(NetworkConfig(core="gru", core_size=5), SMALL, 2, True)
    obs, core = sample(SMALL, 4), network.initial_core(4)
    population = jax.vmap(network.init)(jax.random.split(jax.random.key(0), 3))
    values = jax.vmap(network.step, in_axes=(0, None, None))(population, obs, core)[1]
    one = jax.tree.map(lambda x: x[2], population)
    equal(values[2], network.step(one, obs, core)[1], 1e-5)


def test_inside_a_scan_gradients_are_the_same() -> None:
    network = actor_critic(NetworkConfig(), SMALL, 2, True)
    params, obs = network.init(jax.random.key(0)), sample(SMALL, 3, 4)
    gradient = jax.grad(lambda params, obs: jnp.sum(jnp.square(network.step(params, obs, ())[1])))
    scanned = jax.jit(lambda params: jax.lax.scan(lambda _, obs: (None, gradient(params, obs)), None, obs)[1])(params)
    equal(jax.tree.map(lambda x: x[1], scanned), gradient(params, obs[1]), 1e-5)
