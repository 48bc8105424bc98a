"""Packed loops compute what plain ones do, and pack what can be packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import assert_close, make_session

from jaxrl_dist import packing
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.algorithms.rainbow import Rainbow
from jaxrl_dist.envs.source import find
from jaxrl_dist.learners import sgd
from jaxrl_dist.plans import on_device


def body(carry: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Changes leaves of many dtypes and ranks."""
    total = carry["total"] + x.sum()
    new = {
        "total": total,
        "matrix": carry["matrix"] * 1.5 + total,
        "count": carry["count"] - 1,
        "even": ~carry["even"],
        "bits": carry["bits"] << 1,
        "small": carry["small"] + jnp.uint8(1),
        "half": carry["half"] * 2,
        "key": jax.random.fold_in(carry["key"], 1),
        "none": (),
    }
    return new, (total > 3, new["matrix"][0], -new["count"], new["small"])


CARRY = {
    "total": jnp.float32(-0.0),
    "matrix": jnp.array([[1.0, jnp.inf], [-jnp.inf, 2.0], [0.25, -0.0]]),
    "count": jnp.int32(-3),
    "even": jnp.array([True, False]),
    "bits": jnp.array([[2**31 + 1, 7]], jnp.uint32),
    "small": jnp.array([254], jnp.uint8),
    "half": jnp.bfloat16(0.5),
    "key": jax.random.key(3),
    "none": (),
}


def scanned(packed: bool) -> tuple[Any, str]:
    program = jax.jit(lambda carry, xs: packing.scan(body, carry, xs, packed=packed))
    xs = jnp.arange(10.0).reshape(5, 2)
    return program(CARRY, xs), str(
        jax.make_jaxpr(lambda c, x: packing.scan(body, c, x, packed=packed))(CARRY, xs)
    )


def test_a_packed_loop_returns_the_same_bits() -> None:
    (plain, _), (packed, traced) = scanned(False), scanned(True)
    assert jax.tree.structure(plain) == jax.tree.structure(packed)
    for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(packed), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    # the carry: 1 + 6 + 1 + 2 + 2 numbers; the outputs: 1 + 2 + 1
    assert "u32[12]" in traced and "u32[4]" in traced


def test_the_host_reads_what_a_program_has_packed() -> None:
    tree = {name: jnp.stack([x, x]) for name, x in CARRY.items() if name not in ("key", "none")}
    packing_of = packing.Packing.of(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    )
    packed = jax.jit(jax.vmap(lambda one: packing.Packing.of(one).pack(one)))(tree)
    assert [(x.shape, str(x.dtype)) for x in packed] == [
        ((2, 12), "uint32"),
        ((2,), "bfloat16"),
        ((2, 1), "uint8"),
    ]
    read = packing_of.unpack(jax.device_get(packed), leading=1)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(read), strict=True):
        assert isinstance(y, np.ndarray) and (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == y.tobytes()


def test_large_arrays_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGEST", 4 * 5)
    assert "u32[6]" in scanned(True)[1]  # without the matrix of 24 bytes


def test_what_a_gpu_computes_together_is_equal(trace_for_gpu: Callable[[], None]) -> None:
    values = jax.random.normal(jax.random.key(0), (3, 4, 5))
    index = jnp.array([[0, 1, 4, 2], [4, 4, 0, 3], [1, 2, 3, 0]])
    values = values.at[0, 0, 1].set(-jnp.inf)  # not taken, so it must not matter
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.float32(-2), "c": (jnp.full(3, 1e-3),)}

    def everything() -> Any:
        taken, gradient = jax.value_and_grad(lambda x: packing.take_along_last(x, index).sum())(
            values
        )
        sums = packing.sums([values[1], values[2], jnp.ones((4, 5))])
        clipped = [
            packing.clip_by_global_norm(most).update(tree, optax.EmptyState())[0]
            for most in (0.5, 50.0)
        ]
        return taken, gradient, sums, packing.global_norm(tree), clipped

    plain = everything()
    expected = [
        optax.clip_by_global_norm(most).update(tree, optax.EmptyState())[0] for most in (0.5, 50.0)
    ]
    assert_close(plain[-1], expected, 1e-7)
    trace_for_gpu()
    assert_close(everything(), plain, 1e-6)


@pytest.mark.parametrize(
    "lengths, reverse",
    [
        ((1, 7, packing.LARGEST_KERNEL), False),
        ((7, 2 * packing.LARGEST_KERNEL + 44), True),
    ],
)
def test_a_recursion_without_a_loop_on_a_gpu_is_equal(
    lengths: tuple[int, ...], reverse: bool, trace_for_gpu: Callable[[], None]
) -> None:
    def step(carry: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return x[0] + x[1] * carry, carry

    def accumulated(length: int) -> tuple[Any, str]:
        xs = jnp.split(jax.random.uniform(jax.random.key(length), (length, 2, 3)), 2, axis=1)
        compiled = jax.jit(
            lambda first, *xs: packing.recursion(step, first, xs, reverse=reverse)
        ).lower
        compiled = compiled(jnp.ones((1, 3)), *xs).compile()
        return compiled(jnp.ones((1, 3)), *xs), compiled.as_text()

    plain = [accumulated(length) for length in lengths]
    trace_for_gpu()
    for length, (expected, looped) in zip(lengths, plain, strict=True):
        found, text = accumulated(length)
        assert_close(found, expected, 1e-6)
        assert ("while(" in text) == (length > packing.LARGEST_KERNEL), length
        assert "while(" in looped or length == 1


@pytest.mark.case  # test_what_a_gpu_computes_together_is_equal
@pytest.mark.parametrize("name", ["ppo", "dqn", "rainbow"])
def test_a_run_in_the_form_for_gpus_is_equal(
    name: str, trace_for_gpu: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acting, learning and counting, on several devices, up to the rounding of sums."""
    source = find("CartPole-v1")
    sizes: dict[str, Any] = {"hidden_sizes": (8,), "max_gradient_norm": 0.01}
    replay = {
        "batch_size": 8,
        "replay_capacity": 256,
        "replay_ratio": 0.0625,
        "learning_starts": 0,
        "target_period": 3,
    }
    algorithm = {
        "ppo": lambda: PPO(**sizes, num_epochs=2, num_minibatches=2),
        "dqn": lambda: DQN(**sizes, **replay),
        "rainbow": lambda: Rainbow(**sizes, **replay, num_atoms=5),
    }[name]()

    def run() -> Any:
        made = make_session(
            algorithm.make(source.spec),
            source,
            num_devices=2,
            total_env_steps=250,
            report_interval=1,
        )
        *_, last = on_device.on_device(made)
        metrics = {key: value for key, value in last.metrics.items() if not key.startswith("time/")}
        return last.variables().params, metrics, last.env_steps

    plain = run()
    monkeypatch.setattr(packing, "starts_kernel_per_array", lambda device: True)
    trace_for_gpu()
    monkeypatch.setattr(sgd, "SUMMED_AT_ONCE", 4)
    packed = run()
    assert_close(packed[0], plain[0], 1e-4)
    assert packed[1].keys() == plain[1].keys() and packed[2] == plain[2]
    for key, value in plain[1].items():
        assert packed[1][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
