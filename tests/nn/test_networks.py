"""Networks: convolutions against XLA's, what reads which observation,
recurrent unrolls against single episodes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn.config import NetworkConfig, TorsoConfig
from jaxrl_dist.nn.cores import Core, reset_core
from jaxrl_dist.nn.heads import action_value_head
from jaxrl_dist.nn.layers import Conv, conv2d, max_pool
from jaxrl_dist.nn.networks import (
    RecurrentNetwork,
    actor_critic,
    critic_network,
    make_network,
    policy_network,
)
from jaxrl_dist.nn.observations import preprocess
from jaxrl_dist.nn.torsos import (
    MLP,
    ImpalaResNet,
    MinAtarCNN,
    NatureCNN,
    choose_torso,
)
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space


def box(*shape: int, dtype: type = np.float32) -> Box:
    high = 255 if dtype == np.uint8 else 1
    return Box(shape, np.dtype(dtype), np.zeros(shape, dtype), np.full(shape, high, dtype))


VECTOR, SMALL = box(3), box(5, 5, 2, dtype=np.bool_)
SMALL_CORE: dict[str, Any] = {"hidden_sizes": (8,), "core_size": 5}


def init_sums(key: jax.Array, features: jax.Array) -> dict[str, jax.Array]:
    return {"decay": jax.random.uniform(key, features.shape[1:])}


def step_sums(params: Any, features: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    total = params["decay"][None] * state["total"] + features
    return jnp.tanh(total + state["steps"][:, None]), {
        "total": total,
        "steps": state["steps"] + 0.1,
    }


def initial_sums(num_envs: int) -> Any:
    """Not all of it is 0."""
    return {"total": jnp.zeros((num_envs, 8)), "steps": jnp.full((num_envs,), 0.3)}


OWN = (init_sums, step_sums, initial_sums)
GRU = NetworkConfig(core="gru", **SMALL_CORE)
CORES: dict[str, NetworkConfig] = {
    "gru": GRU,
    "lstm": NetworkConfig(core="lstm", **SMALL_CORE),
    "attention": NetworkConfig(core="attention", core_window=3, **SMALL_CORE),
    "linear": NetworkConfig(core="linear", **SMALL_CORE),
    "own": NetworkConfig(core=OWN, **SMALL_CORE),
}
NAMED = [name for name in CORES if name != "own"]
MINATAR, ATARI = box(10, 10, 4, dtype=np.bool_), box(4, 84, 84, dtype=np.uint8)


def sample(space: Space, *batch: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if isinstance(space, Discrete):
        return rng.integers(space.n, size=batch, dtype=np.int32)
    if isinstance(space, MultiDiscrete):
        return rng.integers(space.nvec, size=(*batch, len(space.nvec))).astype(np.int32)
    if space.dtype == np.uint8:
        return rng.integers(256, size=(*batch, *space.shape), dtype=np.uint8)
    if space.dtype == np.bool_:
        return rng.random((*batch, *space.shape)) < 0.5
    return (rng.standard_normal((*batch, *space.shape)) * 2).astype(space.dtype)


def equal(actual: object, expected: object, tolerance: float = 1e-6) -> None:
    """Arrays differ by no more than ``tolerance``, or that fraction of the largest element."""

    def check(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.max(np.abs(b))))

    jax.tree.map(check, actual, expected)


def draw(shapes: Any, seed: int = 0) -> Any:
    """Parameters that keep numbers near 1, drawn much faster than a network's own."""
    rng = np.random.default_rng(seed)

    def leaf(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(
            rng.standard_normal(x.shape) / math.sqrt(math.prod(x.shape[:-1])), x.dtype
        )

    return jax.tree.map(leaf, shapes)


def build(
    config: NetworkConfig, space: Space, shared: bool = True, log_std: int = 0, seed: int = 0
) -> tuple[RecurrentNetwork, dict[str, Any]]:
    """A network with two outputs, and parameters."""
    network = actor_critic(config, space, 2, shared, log_std)
    return network, draw(jax.eval_shape(network.init, jax.random.key(0)), seed)


def xla_conv(x: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=layout
    )


# --- Layers ---------------------------------------------------------------------------------------


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
        ((1030, 4, 4, 2), 3, 3, 1, "SAME"),  # more than the CPU takes at a time
        # the CPU's gradient takes these in parts, of which the last is shorter
        ((131, 6, 6, 12), 3, 3, 1, "SAME"),
    ],
)
def test_convolution_equals_xlas(
    shape: tuple[int, ...], size: int, features: int, stride: int, padding: str
) -> None:
    x = sample(box(*shape))
    kernel = sample(box(size, size, shape[-1], features), seed=1) / (
        4 * size * math.sqrt(shape[-1])
    )

    def gradients_and_value(conv: Callable[..., jax.Array]) -> object:
        def loss(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = conv(x, kernel, stride, padding)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, kernel)

    equal(gradients_and_value(conv2d), gradients_and_value(xla_conv), 1e-5)


@pytest.mark.parametrize("platform, fast", [("cpu", 3), ("cuda", 1), ("tpu", 1)])
def test_gradient_of_convolution_is_chosen_by_platform(platform: str, fast: int) -> None:
    """On the CPU all three have the layout that is fast in loops;
    elsewhere XLA derives two of them as it likes.
    """
    gradients = jax.jit(
        jax.grad(lambda x, kernel: jnp.sum(jnp.sin(conv2d(x, kernel, 2, "SAME"))), argnums=(0, 1))
    )
    exported = jax.export.export(gradients, platforms=[platform])(
        jnp.ones((2, 8, 8, 12)), jnp.ones((3, 3, 12, 4))
    )
    layouts = re.findall(
        r"stablehlo\.convolution.*dim_numbers = (.*), window", exported.mlir_module()
    )
    assert len(layouts) == 3
    assert layouts.count("[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]") == fast


@pytest.mark.parametrize(
    "platform, channels, count", [("cpu", 10, 0), ("cpu", 12, 1), ("cuda", 10, 1)]
)
def test_few_channels_are_a_product_on_the_cpu(platform: str, channels: int, count: int) -> None:
    inputs = jnp.ones((2, 10, 10, channels)), jnp.ones((3, 3, channels, 16))
    exported = jax.export.export(
        jax.jit(lambda *inputs: conv2d(*inputs, 1, "VALID")), platforms=[platform]
    )(*inputs)
    assert exported.mlir_module().count("stablehlo.convolution") == count


def test_convolution_of_accelerators_is_the_same(trace_for_gpu: Callable[[], None]) -> None:
    x, kernel = sample(box(2, 11, 8, 3)), sample(box(4, 4, 3, 5), seed=1) / 8
    on_cpu = conv2d(x, kernel, 3, "SAME")
    trace_for_gpu()
    equal(conv2d(x, kernel, 3, "SAME"), on_cpu, 1e-5)


@pytest.mark.parametrize("height, width", [(12, 11), (1, 2)])
def test_max_pool_equals_xlas(height: int, width: int) -> None:
    x = sample(box(2, height, width, 3)) - 5  # negative, so that a padding of zeros would win

    def xla(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(x, -math.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    def gradient_and_value(pool: Callable[[jax.Array], jax.Array]) -> object:
        return jax.jit(jax.grad(lambda x: (jnp.sum(jnp.sin(pool(x))), pool(x)), has_aux=True))(x)

    equal(gradient_and_value(lambda x: max_pool(x, 3, 2)), gradient_and_value(xla))


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
        # as counted for the published network, less its last layer
        (NatureCNN(), (84, 84, 4), 512, 1_684_128),
        (ImpalaResNet(), (10, 10, 4), 256, 97_744 + 2 * 2 * 32 * 256 + 256),
    ],
)
def test_torsos(torso: Any, shape: tuple[int, ...], width: int, parameters: int) -> None:
    x = sample(box(*shape), 2, 3)
    features, params = jax.eval_shape(torso.init_with_output, jax.random.key(0), x)
    assert features.shape == (2, 3, width) and features.dtype == jnp.float32
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters


@pytest.mark.parametrize("torso, shape", [(MLP((8,), axes=2), (3, 2)), (MinAtarCNN(), (5, 4, 2))])
def test_leading_axes_are_a_batch(torso: Any, shape: tuple[int, ...]) -> None:
    x = sample(box(*shape), 2, 3)
    params = draw(jax.eval_shape(torso.init, jax.random.key(0), x))
    features = jax.jit(torso.apply)(params, x)
    equal(features[1, 2], jax.jit(torso.apply)(params, x[1, 2]), 1e-5)


def nature_by_hand(params: dict[str, Any], x: jax.Array) -> jax.Array:
    for i, stride in enumerate((4, 2, 1)):
        x = jax.nn.relu(layer_by_hand(params[f"Conv_{i}"], x, stride, "VALID"))
    return x


def impala_by_hand(params: dict[str, Any], x: jax.Array) -> jax.Array:
    def conv(i: int, x: jax.Array) -> jax.Array:
        return layer_by_hand(params[f"Conv_{i}"], x, 1, "SAME")

    for first in (0, 5, 10):
        x = max_pool(conv(first, x), 3, 2)
        for i in (first + 1, first + 3):
            x = x + conv(i + 1, jax.nn.relu(conv(i, jax.nn.relu(x))))
    return jax.nn.relu(x)


def layer_by_hand(
    params: dict[str, jax.Array], x: jax.Array, stride: int, padding: str
) -> jax.Array:
    return xla_conv(x, params["kernel"], stride, padding) + jnp.expand_dims(
        params["bias"], (0, 1, 2)
    )


@pytest.mark.parametrize(
    "torso, shape, by_hand",
    [(NatureCNN(), (36, 44, 2), nature_by_hand), (ImpalaResNet(), (3, 2, 2), impala_by_hand)],
)
def test_cnns_layer_by_layer(
    torso: Any, shape: tuple[int, ...], by_hand: Callable[..., jax.Array]
) -> None:
    x = sample(box(*shape), 3)
    params = draw(jax.eval_shape(torso.init, jax.random.key(0), x))["params"]
    images = jax.jit(by_hand)(params, x).reshape(3, -1)
    dense = params["Dense_0"]
    expected = jax.nn.relu(images @ dense["kernel"] + dense["bias"][None])
    equal(jax.jit(torso.apply)({"params": params}, x), expected, 1e-5)


def normalized_by_hand(params: dict[str, Any], x: jax.Array) -> np.ndarray:
    """Section 3 of Ba et al. (2016), over all axes of an example;
    scale and shift belong to the last one.
    """
    over = tuple(range(1, x.ndim))
    x = np.asarray(x, np.float64)
    x = (x - x.mean(over, keepdims=True)) / np.sqrt(x.var(over, keepdims=True) + 1e-6)
    return x * params["LayerNorm_0"]["scale"] + params["LayerNorm_0"]["bias"]


@pytest.mark.parametrize(
    "torso, shape",
    [(MLP((8, 6), jax.nn.silu, layer_norm=True), (5,)), (MinAtarCNN(layer_norm=True), (5, 4, 2))],
)
def test_layers_are_normalized_before_their_activation(torso: Any, shape: tuple[int, ...]) -> None:
    x = sample(box(*shape), 3)
    params = draw(jax.eval_shape(torso.init, jax.random.key(0), x))["params"]
    params = jax.tree.map(lambda x: np.asarray(x + 0.1), params)  # scales away from 0
    expected, activation = x, jax.nn.relu if len(shape) == 3 else jax.nn.silu
    if len(shape) == 3:
        expected = layer_by_hand(params["Conv_0"], jnp.asarray(x), 1, "VALID")
        expected = np.maximum(normalized_by_hand(params["LayerNorm_0"], expected), 0).reshape(3, -1)
    norms = [params[name] for name in sorted(params) if name.startswith("LayerNorm")]
    denses = [params[name] for name in sorted(params) if name.startswith("Dense")]
    for dense, norm in zip(denses, norms[-len(denses) :], strict=True):
        hidden = expected @ dense["kernel"] + dense["bias"]
        expected = np.asarray(activation(normalized_by_hand(norm, hidden)))
    equal(jax.jit(torso.apply)({"params": params}, x), expected, 1e-5)


def test_normalized_features_ignore_observation_scale() -> None:
    # with no activation after
    torso, x = MLP((64,), jnp.asarray, axes=3, layer_norm=True), sample(box(4, 4, 2), 3)
    params, apply = jax.jit(torso.init)(jax.random.key(0), x), jax.jit(torso.apply)
    features = np.asarray(apply(params, x))
    np.testing.assert_allclose(features.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(features.var(axis=1), 1, atol=1e-4)
    equal(apply(params, 100 * x), features, 1e-3)


# --- Observations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space, obs, expected",
    [
        (Discrete(3), np.array([2, 0]), [[0, 0, 1], [1, 0, 0]]),
        (MultiDiscrete((2, 3)), np.array([[1, 2], [0, 0]]), [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]),
        (box(2), np.array([[0.5, -3.0]]), [[0.5, -3.0]]),
        (box(), np.array([0.5, -3.0]), [0.5, -3.0]),
        (box(2, dtype=np.uint8), np.array([[0, 51]], np.uint8), [[0.0, 0.2]]),
        (
            Box((2,), np.dtype(np.uint8), np.uint8([0, 0]), np.uint8([2, 4])),
            np.uint8([[2, 1]]),
            [[0.5, 0.25]],
        ),
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
        equal(
            x.astype(jnp.float32),
            np.asarray(expected, np.float32),
            1e-6 if dtype == jnp.float32 else 1e-2,
        )


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
        assert (
            message.startswith(f"torso {torso} ")
            and str(space.shape) in message
            and "\n" not in message
        )
        assert message.endswith(f"use torso {' or '.join(['auto', 'mlp', *readers.split()])}")


# --- Actor and critics apart ----------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "space", [Discrete(5), MultiDiscrete((2, 3)), box(), VECTOR, box(3, 2, dtype=np.float64), SMALL]
)
def test_shapes_and_dtypes_of_actors_and_critics(space: Space, precision: str) -> None:
    config, obs, action = (
        TorsoConfig(hidden_sizes=(8, 6), precision=precision),
        sample(space, 4),
        jnp.ones((4, 2)),
    )
    for network, inputs, shape in [
        (policy_network(config, space, 5), (obs,), (4, 5)),
        (critic_network(config, space, 3, action_size=2), (obs, action), (3, 4)),
        (critic_network(config, space, 3, num_actions=5), (obs,), (3, 4, 5)),
    ]:
        params = jax.eval_shape(network.init, jax.random.key(0))
        outputs = jax.eval_shape(network.apply, params, *inputs)
        assert outputs.shape == shape
        assert {leaf.dtype for leaf in jax.tree.leaves((params, outputs))} == {jnp.float32.dtype}


@pytest.mark.parametrize("space", [VECTOR, SMALL], ids=["vector", "image"])
def test_critics_are_independent_and_read_observation_and_action(space: Space) -> None:
    network = critic_network(TorsoConfig(hidden_sizes=(8,)), space, 2, action_size=2)
    params = jax.jit(network.init)(jax.random.key(0))
    obs, action = sample(space, 4), sample(box(2), 4)
    apply = jax.jit(network.apply)
    q = apply(params, obs, action)
    assert jnp.max(jnp.abs(q[0] - q[1])) > 0.01
    equal(apply([params[0], params[0]], obs, action)[1], q[0])
    # each example by itself
    equal(apply(params, obs, action[::-1])[:, ::-1], apply(params, obs[::-1], action))
    for other in (apply(params, obs[::-1], action), apply(params, obs, action[::-1])):
        assert jnp.min(jnp.max(jnp.abs(other - q), axis=1)) > 0.01


def test_a_critic_of_vectors_by_hand() -> None:
    """One MLP over observation and action side by side."""
    network = critic_network(TorsoConfig(hidden_sizes=(8,)), VECTOR, 1, action_size=2)
    params = jax.device_get(draw(jax.eval_shape(network.init, jax.random.key(0))))
    obs, action = sample(VECTOR, 4), sample(box(2), 4)
    dense, head = params[0]["mlp"]["params"]["Dense_0"], params[0]["head"]["params"]
    hidden = np.tanh(np.concatenate([obs, action], axis=1) @ dense["kernel"] + dense["bias"])
    equal(network.apply(params, obs, action), (hidden @ head["kernel"] + head["bias"]).T, 1e-5)


# --- Actor and critic -----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "torso, space, core",
    [
        *(("auto", space, core) for space in (VECTOR, SMALL) for core in ("none", *NAMED)),
        *(
            ("auto", space, "gru")
            for space in (Discrete(5), MultiDiscrete((2, 3)), box(), box(3, 2, dtype=np.float64))
        ),
        *((torso, SMALL, "none") for torso in ("mlp", "impala")),
    ],
)
def test_shapes_and_dtypes(torso: str, space: Space, core: str, precision: str) -> None:
    network = actor_critic(
        NetworkConfig(
            torso=torso, hidden_sizes=(8, 6), core=core, core_size=5, precision=precision
        ),
        space,
        3,
        False,
        2,
    )

    def trace(key: jax.Array) -> object:
        params = network.init(key)
        start = network.initial_core(4)
        unrolled = network.unroll(params, sample(space, 7, 4), start, np.ones((7, 4), bool))
        return params, start, network.step(params, sample(space, 4), start), unrolled

    params, start, (outputs, value, after), (all_outputs, values, final) = jax.eval_shape(
        trace, jax.random.key(0)
    )
    assert outputs.shape == (4, 5) and value.shape == (4,)
    assert all_outputs.shape == (7, 4, 5) and values.shape == (7, 4)
    assert {
        leaf.dtype for leaf in jax.tree.leaves((params, outputs, value, all_outputs, values))
    } == {jnp.float32.dtype}
    assert start == after == final
    assert bool(jax.tree.leaves(start)) == (core != "none")
    assert all(leaf.shape[0] == 4 and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(start))


def test_start() -> None:
    network = actor_critic(
        NetworkConfig(hidden_sizes=(8,), initial_std=0.5), VECTOR, 2, False, log_std=3
    )
    params = jax.jit(network.init)(jax.random.key(0))
    equal(params["log_std"], np.log([0.5] * 3))
    torsos = [params[part]["params"]["Dense_0"] for part in ("policy_torso", "value_torso")]
    heads = [params[part]["params"] for part in ("policy", "value")]
    for layer, scale in zip(
        [*torsos, *heads], [math.sqrt(2), math.sqrt(2), 0.01, 1.0], strict=True
    ):
        rows = layer["kernel"] if layer["kernel"].shape == (3, 8) else layer["kernel"].T
        equal(rows @ rows.T / scale**2, np.eye(len(rows)), 1e-5)
        equal(layer["bias"], np.zeros_like(layer["bias"]))
    assert jnp.max(jnp.abs(torsos[0]["kernel"] - torsos[1]["kernel"])) > 0.1


@pytest.mark.parametrize("shared", [True, False])
def test_a_core_starts_at_zero_behind_one_torso(shared: bool) -> None:
    network, params = build(GRU, VECTOR, shared)
    assert params.keys() == {"torso", "gru", "policy", "value"}
    equal(network.initial_core(4), np.zeros((4, 5)))


@pytest.mark.parametrize("shared", [True, False])
def test_heads_and_torsos(shared: bool) -> None:
    network, params = build(NetworkConfig(hidden_sizes=(8,)), VECTOR, shared, log_std=2)
    obs = sample(VECTOR, 4)
    params = params | {"log_std": jnp.array([-1.0, 2.0])}
    outputs = np.asarray(jax.jit(network.step)(params, obs, ())[0])
    equal(outputs[:, 2:], np.tile([-1.0, 2.0], (4, 1)))

    def gradient(pick: Callable[[jax.Array, jax.Array], jax.Array]) -> set[str]:
        """Which parts of the parameters the picked output depends on."""
        grads = jax.jit(jax.grad(lambda params: jnp.sum(pick(*network.step(params, obs, ())[:2]))))(
            params
        )
        return {
            part
            for part, grad in grads.items()
            if any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grad))
        }

    torsos = ("torso", "torso") if shared else ("policy_torso", "value_torso")
    assert gradient(lambda outputs, value: outputs[:, :2]) == {torsos[0], "policy"}
    assert gradient(lambda outputs, value: outputs[:, 2:]) == {"log_std"}
    assert gradient(lambda outputs, value: value) == {torsos[1], "value"}


@pytest.mark.parametrize("torso, count", [("mlp", 4), ("minatar", 1)])
def test_activation_is_that_of_the_mlp_only(torso: str, count: int) -> None:
    names = "tanh", "relu", "silu", "gelu"
    configs = [NetworkConfig(torso=torso, hidden_sizes=(8,), activation=name) for name in names]
    (_, params), obs = build(configs[0], SMALL), sample(SMALL, 1)
    steps = [jax.jit(actor_critic(config, SMALL, 2, True).step) for config in configs]
    assert len({float(step(params, obs, ())[1][0]) for step in steps}) == count


@pytest.mark.parametrize(
    "core, space", [("none", VECTOR), ("none", SMALL), *((core, SMALL) for core in NAMED)]
)
def test_bfloat16_is_near_float32_but_not_equal(core: str, space: Space) -> None:
    fine, params = build(NetworkConfig(hidden_sizes=(8,), core=core), space)
    coarse = actor_critic(
        NetworkConfig(hidden_sizes=(8,), core=core, precision="bfloat16"), space, 2, True
    )
    arguments = params, sample(space, 5, 4), fine.initial_core(4), np.ones((5, 4), bool)
    values, rough = (jax.jit(network.unroll)(*arguments)[1] for network in (fine, coarse))
    assert 1e-5 < jnp.max(jnp.abs(values - rough)) < 5e-2


def test_heads_compute_in_float32() -> None:
    fine, params = build(NetworkConfig(hidden_sizes=()), VECTOR)
    coarse = actor_critic(NetworkConfig(hidden_sizes=(), precision="bfloat16"), VECTOR, 2, True)
    # exact in bfloat16, and there are no layers but the heads
    obs = np.array([[1, -2, 4]], np.float32)
    equal(coarse.step(params, obs, ()), fine.step(params, obs, ()))


# --- Memory across episodes -----------------------------------------------------------------------

# [T, B]
VALID = np.array([[1, 1, 0, 1, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 9], bool).T
RECURRENT = [
    pytest.param(GRU, SMALL, id="cnn"),
    *(pytest.param(config, VECTOR, id=name) for name, config in CORES.items()),
]


def underway(network: Any, params: Any, space: Space, num_envs: int) -> Any:
    """States within episodes, in which environment 0 began again."""
    core = network.initial_core(num_envs)
    for seed in range(4):
        *_, core = jax.jit(network.step)(params, sample(space, num_envs, seed=seed + 10), core)
        core = reset_core(
            core, network.initial_core(num_envs), (np.arange(num_envs) > 0) | (seed != 1)
        )
    return core


@pytest.mark.parametrize("config, space", RECURRENT)
def test_unroll_equals_running_episodes_one_by_one(config: NetworkConfig, space: Space) -> None:
    network, params = build(config, space)
    steps, num_envs = VALID.shape
    obs = sample(space, steps, num_envs)
    start = underway(network, params, space, num_envs)  # the rollout may begin within an episode
    step, unroll = jax.jit(network.step), jax.jit(network.unroll)
    outputs, values, final = jax.device_get(unroll(params, obs, start, VALID))
    for env in range(num_envs):
        core = jax.tree.map(lambda x, env=env: x[env : env + 1], start)
        for t in range(steps):
            output, value, core = step(params, obs[t, env][None], core)
            equal((outputs[t, env], values[t, env]), (np.asarray(output)[0], np.asarray(value)[0]))
            if not VALID[t, env]:
                core = network.initial_core(1)
        equal(
            jax.tree.map(lambda x, env=env: x[env], final),
            jax.tree.map(lambda x: np.asarray(x)[0], core),
        )
    never_reset = np.asarray(unroll(params, obs, start, np.ones_like(VALID))[1])
    changed = np.any(np.abs(values - never_reset) > 1e-4, axis=0)
    assert changed.tolist() == [True, True, False]


@pytest.mark.parametrize("config, space", RECURRENT)
def test_step_with_reset_core_equals_unroll(config: NetworkConfig, space: Space) -> None:
    network, params = build(config, space)
    obs = sample(space, *VALID.shape)
    core = initial = network.initial_core(VALID.shape[1])
    step, reset, rows = jax.jit(network.step), jax.jit(reset_core), []
    for t, valid in enumerate(VALID):
        *row, core = step(params, obs[t], core)
        core = reset(core, initial, valid)
        rows.append(row)
    *unrolled, final = jax.jit(network.unroll)(params, obs, initial, VALID)
    equal(unrolled, [np.stack(column) for column in zip(*rows, strict=True)])
    equal(final, core)


def test_any_core_joins_any_heads() -> None:
    """A critic over running sums of features: what a custom core, and heads with an input, need."""

    def step(
        params: dict[str, Any], features: jax.Array, core: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        core = params["decay"] * core + features
        return jnp.tanh(core), core

    def unroll(
        params: dict[str, Any], features: jax.Array, core: jax.Array, valid: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        outputs = []
        for x, ok in zip(features, valid, strict=True):
            output, core = step(params, x, core)
            outputs.append(output)
            core = reset_core(core, jnp.zeros_like(core), ok)
        return jnp.stack(outputs), core

    core = Core(
        lambda key, features: ({"decay": jnp.float32(0.5)}, features),
        step,
        unroll,
        lambda n: jnp.zeros((n, 8)),
    )
    config = TorsoConfig(hidden_sizes=(8,))
    critic = make_network(config, VECTOR, core, action_value_head(config, 2))
    params, step_critic, reset = (
        jax.jit(critic.init)(jax.random.key(0)),
        jax.jit(critic.step),
        jax.jit(reset_core),
    )
    assert params.keys() == {"torso", "decay", "mlp", "head"}
    obs, action = sample(VECTOR, *VALID.shape), sample(box(2), *VALID.shape)
    state = initial = critic.initial_core(VALID.shape[1])
    rows = []
    for x, a, valid in zip(obs, action, VALID, strict=True):
        q, state = step_critic(params, x, state, a)
        state = reset(state, initial, valid)
        rows.append(q)
    equal(jax.jit(critic.unroll)(params, obs, initial, VALID, action), (np.stack(rows), state))
    forgetful, _ = step_critic(params, obs[1], initial, action[1])
    assert np.max(np.abs(np.asarray(rows[1]) - forgetful)) > 1e-3  # it remembers


@pytest.mark.parametrize("name", CORES)
def test_nothing_flows_over_a_reset(name: str) -> None:
    network, params = build(dataclasses.replace(CORES[name], core_window=9), VECTOR)
    obs, start = jnp.asarray(sample(VECTOR, *VALID.shape)), network.initial_core(3)
    gradient = jax.jit(
        jax.grad(lambda obs: jnp.sum(network.unroll(params, obs, start, VALID)[1][-1]))
    )(obs)
    depends = jnp.any(gradient != 0, axis=-1)
    assert depends[:, 0].tolist() == [False] * 8 + [True]  # reset at steps 6 and 7
    # its reset at step 8 comes after that step's value
    assert depends[:, 1].tolist() == [False] + [True] * 8
    assert depends[:, 2].tolist() == [True] * 9


def test_reset_core_broadcasts_over_any_state() -> None:
    core = {"memory": jnp.ones((2, 3, 4)), "epsilon": jnp.array([0.1, 0.2])}
    initial = {"memory": jnp.zeros((2, 3, 4)), "epsilon": jnp.array([0.3, 0.4])}
    after = reset_core(core, initial, np.array([True, False]))
    equal(after["memory"], np.stack([np.ones((3, 4)), np.zeros((3, 4))]))
    equal(after["epsilon"], [0.1, 0.4])
    assert reset_core((), (), np.array([True, False])) == ()


def test_without_a_core_steps_are_independent() -> None:
    network, params = build(NetworkConfig(hidden_sizes=(8,)), VECTOR, False)
    obs = sample(VECTOR, *VALID.shape)
    outputs, values, core = jax.device_get(jax.jit(network.unroll)(params, obs, (), VALID))
    assert core == ()
    equal((outputs[4], values[4]), jax.jit(network.step)(params, obs[4], ())[:2])


# --- Many devices ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, space",
    [
        pytest.param(GRU, SMALL, id="cnn"),
        *(
            pytest.param(
                CORES[name],
                VECTOR,
                id=name,
                marks=pytest.mark.case if name in ("gru", "lstm", "linear") else [],
            )
            for name in CORES
        ),
        pytest.param(NetworkConfig(hidden_sizes=(8,)), VECTOR, id="mlp-no-core"),
    ],
)
def test_gradients_are_equal_on_one_and_eight_devices(config: NetworkConfig, space: Space) -> None:
    network, params = build(config, space, False, log_std=1)
    valid = np.tile(VALID, (1, 3))[:, :8]
    obs, core = sample(space, *valid.shape), network.initial_core(8)

    def total(params: object, obs: jax.Array, core: object, valid: jax.Array) -> jax.Array:
        outputs, values, final = network.unroll(params, obs, core, valid)
        squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x)), (outputs, values, final))
        return jax.tree.reduce(jnp.add, squares)

    def sharded(params: object, *shards: object) -> object:
        return jax.value_and_grad(lambda params: jax.lax.psum(total(params, *shards), "data"))(
            params
        )

    batch, time_batch = PartitionSpec("data"), PartitionSpec(None, "data")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("data",))
    specs = (PartitionSpec(), time_batch, batch, time_batch)
    program = jax.jit(
        jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True)
    )
    one, eight = (
        jax.jit(jax.value_and_grad(total))(params, obs, core, valid),
        program(params, obs, core, valid),
    )
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
    program = jax.jit(
        jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True)
    )
    equal(program(kernel, x), jax.jit(jax.value_and_grad(total))(kernel, x), 1e-5)


@pytest.mark.parametrize("name", ["gru", "lstm", "own"])
def test_a_recurrent_gradient_is_summed_over_devices_once(name: str) -> None:
    network, params = build(CORES[name], VECTOR)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("data",))

    def gradient(params: object, obs: jax.Array, core: jax.Array, valid: jax.Array) -> object:
        return jax.grad(
            lambda params: jax.lax.psum(
                jnp.sum(network.unroll(params, obs, core, valid)[1]), "data"
            )
        )(params)

    time_batch = PartitionSpec(None, "data")
    specs = (PartitionSpec(), time_batch, PartitionSpec("data"), time_batch)
    program = jax.shard_map(
        gradient, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True
    )
    arguments = (
        params,
        sample(VECTOR, 9, 8),
        network.initial_core(8),
        np.ones((9, 8), bool),
    )
    jaxpr = jax.make_jaxpr(program)(*arguments)
    scans = [str(eqn) for eqn in jaxpr.eqns[0].params["jaxpr"].eqns if eqn.primitive.name == "scan"]
    assert len(scans) == 2 and "psum" in str(jaxpr)
    assert not any("psum" in scan for scan in scans)


def test_a_population_of_networks_is_a_vmap() -> None:
    (network, _), *_ = built = [build(GRU, SMALL, seed=seed) for seed in range(3)]
    obs, core, step = sample(SMALL, 4), network.initial_core(4), jax.jit(network.step)
    members = [params for _, params in built]
    population = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    values = jax.jit(jax.vmap(step, in_axes=(0, None, None)))(population, obs, core)[1]
    equal(values, jnp.stack([step(params, obs, core)[1] for params in members]), 1e-5)


def test_inside_a_scan_gradients_are_the_same() -> None:
    (network, params), obs = build(NetworkConfig(), SMALL), sample(SMALL, 3, 4)
    gradient = jax.jit(
        jax.grad(lambda params, obs: jnp.sum(jnp.square(network.step(params, obs, ())[1])))
    )
    scanned = jax.jit(
        lambda params: jax.lax.scan(lambda _, obs: (None, gradient(params, obs)), None, obs)[1]
    )(params)
    equal(jax.tree.map(lambda x: x[1], scanned), gradient(params, obs[1]), 1e-5)
