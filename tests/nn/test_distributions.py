"""distributions.py against scipy, enumeration and numerical integration."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_dist import spaces
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn.distributions import (
    Categorical,
    EpsilonGreedy,
    MultiCategorical,
    Normal,
    TanhNormal,
    policy_head,
)

NUM_SAMPLES = 20_000
SIGNIFICANT = 1e-3  # keys are fixed, so a test that passes once passes always

# Parameters are numpy arrays, and all that jax does is compiled:
# eager jax would compile each operation on its own.
sample = jax.jit(lambda distribution, keys: distribution.sample(keys))
sample_and_log_prob = jax.jit(lambda distribution, keys: distribution.sample_and_log_prob(keys))
log_prob = jax.jit(lambda distribution, action: distribution.log_prob(action))
entropy = jax.jit(lambda distribution: distribution.entropy())
mode = jax.jit(lambda distribution: distribution.mode())


@functools.cache
def keys(*shape: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), shape)


def array(*x: Any) -> np.ndarray:
    return np.array(x, np.float32)


def normal_like(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


EXAMPLES = {
    "categorical": lambda b: Categorical(normal_like(0, b, 5)),
    "multi_categorical": lambda b: MultiCategorical((normal_like(1, b, 3), normal_like(2, b, 4))),
    "normal": lambda b: Normal(normal_like(3, b, 2), normal_like(4, b, 2)),
    "tanh_normal": lambda b: TanhNormal(normal_like(5, b, 2), normal_like(6, b, 2)),
    "epsilon_greedy": lambda b: EpsilonGreedy(
        normal_like(7, b, 5), np.linspace(0.0, 1.0, b, dtype=np.float32)
    ),
}


def map_batched(function: Any, distribution: Any) -> Any:
    """``function`` of every array."""
    return distribution._replace(**jax.tree.map(function, distribution._asdict()))


def copies(distribution: Any, count: int) -> Any:
    return map_batched(lambda x: np.broadcast_to(x, (count, *np.shape(x))), distribution)


def samples(distribution: Any) -> np.ndarray:
    return np.asarray(sample(copies(distribution, NUM_SAMPLES), keys(NUM_SAMPLES)))


def assert_frequencies(index: np.ndarray, probs: np.ndarray) -> None:
    counts = np.bincount(index, minlength=len(probs))
    possible = probs * len(index) > 1e-3
    assert counts.shape == probs.shape
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        assert (
            scipy.stats.chisquare(counts[possible], probs[possible] * len(index)).pvalue
            > SIGNIFICANT
        )


# --- What all have in common ----------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_shapes_and_dtypes(name: str) -> None:
    event = () if name in ("categorical", "epsilon_greedy") else (2,)
    dtype = jnp.float32 if "normal" in name else jnp.int32

    def everything(distribution: Any, keys: jax.Array) -> Any:
        action = distribution.sample(keys)
        numbers = [distribution.log_prob(action)]
        if name == "tanh_normal":
            again, log_prob = distribution.sample_and_log_prob(keys)
            return [action, again, distribution.mode()], [*numbers, log_prob]
        return [action, distribution.mode()], [*numbers, distribution.entropy()]

    for batch in ((), (8,), (2, 4)):
        index = np.arange(8)[: math.prod(batch)].reshape(batch)
        distribution = map_batched(lambda x, index=index: x[index], EXAMPLES[name](8))
        actions, numbers = jax.eval_shape(
            everything, distribution, keys(*batch) if batch else jax.random.key(0)
        )
        for action in actions:
            assert (action.shape, action.dtype) == ((*batch, *event), dtype)
        for number in numbers:
            assert (number.shape, number.dtype) == (batch, jnp.float32)


@pytest.mark.parametrize("name", EXAMPLES)
def test_sample_depends_on_its_own_key_only(name: str) -> None:
    @jax.jit
    def sample_rows(index: np.ndarray) -> jax.Array:
        return map_batched(lambda x: jnp.asarray(x)[index], EXAMPLES[name](64)).sample(
            keys(64)[index]
        )

    keys(64)  # outside the trace
    whole = np.asarray(sample_rows(np.arange(64)))
    assert len(np.unique(whole)) > 1
    for index in (
        np.arange(64)[::-1],
        np.arange(5, 17).reshape(3, 4),
        np.array(0),
        np.array(7),
        np.array(63),
    ):
        # XLA rounds the tail of a vector otherwise than its body, by a unit in the last place.
        np.testing.assert_allclose(
            sample_rows(index), whole[index], rtol=3e-7 if "normal" in name else 0
        )


@pytest.mark.parametrize("name", EXAMPLES)
def test_wrong_number_of_keys(name: str) -> None:
    for wrong in (keys(4), keys(1), jax.random.key(0), keys(8, 2)):
        with pytest.raises(AssertionError):
            jax.eval_shape(
                lambda distribution, keys: distribution.sample(keys), EXAMPLES[name](8), wrong
            )


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("optimized")
def test_shard_map(name: str) -> None:
    """With all of XLA's optimisations, as near its bounds a
    squashed action's log-probability feels every rounding.
    """
    distribution = EXAMPLES[name](16)
    specs = map_batched(lambda _: P("data"), jax.tree.map(lambda _: P(), distribution))

    def act(distribution: Any, keys: jax.Array) -> Any:
        action = distribution.sample(keys)
        return action, distribution.log_prob(action), distribution.mode()

    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    sharded = jax.shard_map(
        act, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check_vma=True
    )
    for x, y in zip(
        jax.jit(sharded)(distribution, keys(16)), jax.jit(act)(distribution, keys(16)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


# --- Discrete -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_categorical(scale: float) -> None:
    distribution = Categorical(scale * normal_like(0, 5, 5))
    log_probs = scipy.special.log_softmax(np.float64(distribution.logits), axis=-1)
    for action in np.arange(5) + np.arange(5)[:, None]:
        expected = log_probs[np.arange(5), action % 5]
        np.testing.assert_allclose(
            log_prob(distribution, action % 5), expected, rtol=1e-5, atol=1e-6
        )
    expected = scipy.stats.entropy(np.exp(log_probs), axis=-1)
    np.testing.assert_allclose(entropy(distribution), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(mode(distribution), np.argmax(log_probs, axis=-1))
    assert_frequencies(samples(Categorical(distribution.logits[0])), np.exp(log_probs[0]))


def test_categorical_with_impossible_actions() -> None:
    some, one = array(0.3, -np.inf, -1.0, -np.inf, -np.inf), array(0.3, *[-np.inf] * 4)
    for logits in (some, one):
        distribution = copies(Categorical(logits), 5)
        probs = scipy.special.softmax(np.float64(logits))
        np.testing.assert_allclose(np.exp(log_prob(distribution, np.arange(5))), probs, rtol=1e-6)
        np.testing.assert_allclose(entropy(distribution), scipy.stats.entropy(probs), rtol=1e-6)
        assert_frequencies(samples(Categorical(logits)), probs)
        gradient = jax.jit(
            jax.grad(lambda x: Categorical(x).entropy() + Categorical(x).log_prob(jnp.int32(0)))
        )(logits)
        assert np.isfinite(gradient).all()
        assert (gradient[probs == 0] == 0).all()


def test_multi_categorical_by_enumeration() -> None:
    distribution = MultiCategorical((array(0.5, -1.0, 0.2), array(1.0, 0.0), array(0.0)))
    vectors = np.array(list(itertools.product(range(3), range(2), range(1))), np.int32)
    log_probs = np.float64(log_prob(copies(distribution, 6), vectors))
    parts = [scipy.special.softmax(np.float64(x)) for x in distribution.logits]
    expected = [math.prod(p[i] for p, i in zip(parts, v, strict=True)) for v in vectors]
    np.testing.assert_allclose(np.exp(log_probs), expected, rtol=1e-5)
    np.testing.assert_allclose(entropy(distribution), scipy.stats.entropy(expected), rtol=1e-5)
    np.testing.assert_array_equal(mode(distribution), vectors[np.argmax(expected)])
    drawn = samples(distribution)
    # joint: the components are independent
    assert_frequencies(drawn[:, 0] * 2 + drawn[:, 1], np.array(expected))


def test_multi_categorical_components_do_not_share_bits() -> None:
    drawn = samples(MultiCategorical((array(0, 0, 0), array(0, 0, 0))))
    assert_frequencies(drawn[:, 0] * 3 + drawn[:, 1], np.full(9, 1 / 9))


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1.0])
def test_epsilon_greedy(epsilon: float) -> None:
    probs = np.full(5, epsilon / 5) + (1 - epsilon) * np.array([0, 1, 0, 0, 0])
    distribution = EpsilonGreedy(array(0.0, 2.0, -1.0, 2.0, 1.0), np.float32(epsilon))
    every = copies(distribution, 5)
    np.testing.assert_allclose(np.exp(log_prob(every, np.arange(5))), probs, rtol=1e-6)
    np.testing.assert_allclose(entropy(every), scipy.stats.entropy(probs), rtol=1e-5, atol=1e-6)
    assert (mode(every) == 1).all()
    assert_frequencies(samples(distribution), probs)


def test_epsilon_is_one_or_one_for_each_environment() -> None:
    q = np.tile(array(0.0, 1.0), (3, 1))
    each = EpsilonGreedy(q, array(0.0, 0.5, 1.0))
    np.testing.assert_allclose(
        np.exp(log_prob(each, np.ones(3, np.int32))), [1.0, 0.75, 0.5], rtol=1e-6
    )
    np.testing.assert_allclose(
        np.exp(log_prob(EpsilonGreedy(q, 0.5), np.zeros(3, np.int32))), 0.25, rtol=1e-6
    )


# --- Continuous -----------------------------------------------------------------------------------


def test_normal() -> None:
    distribution = Normal(array(1.0, -3.0), array(-1.0, 0.7))
    exact = scipy.stats.norm(
        np.float64(distribution.mean), np.exp(np.float64(distribution.log_std))
    )
    drawn = samples(distribution)
    for x, z in zip(drawn.T, exact.cdf(drawn).T, strict=True):
        assert scipy.stats.kstest(z, "uniform").pvalue > SIGNIFICANT
        assert len(np.unique(x)) > 0.99 * NUM_SAMPLES
    assert scipy.stats.pearsonr(*drawn.T).pvalue > SIGNIFICANT
    actual = log_prob(copies(distribution, NUM_SAMPLES), drawn)
    np.testing.assert_allclose(
        actual, exact.logpdf(np.float64(drawn)).sum(axis=-1), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(entropy(distribution), exact.entropy().sum(), rtol=1e-6)
    np.testing.assert_array_equal(mode(distribution), distribution.mean)


@pytest.mark.parametrize("mean, log_std", [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5)])
def test_tanh_normal_integrates_to_its_mass(mean: float, log_std: float) -> None:
    distribution = TanhNormal(array(mean), array(log_std))
    # Dense near the bounds, where the density of a wide normal peaks.
    grid = np.tanh(np.linspace(-6.5, 6.5, 4001))
    density = np.exp(np.float64(log_prob(copies(distribution, 4001), np.float32(grid)[:, None])))
    inside = np.diff(scipy.stats.norm(mean, np.exp(log_std)).cdf([-6.5, 6.5]))
    assert scipy.integrate.trapezoid(density, grid) == pytest.approx(inside.item(), abs=1e-4)


def test_tanh_normal_samples() -> None:
    distribution = TanhNormal(array(0.3, -1.0), array(-0.5, 0.2))
    drawn = samples(distribution)
    unit = np.clip(np.float64(drawn), -0.9999999, 0.9999999)
    z = scipy.stats.norm(distribution.mean, np.exp(distribution.log_std)).cdf(np.arctanh(unit))
    for i in range(2):
        assert scipy.stats.kstest(z[:, i], "uniform").pvalue > SIGNIFICANT
    np.testing.assert_allclose(mode(distribution), np.median(drawn, axis=0), atol=0.05)

    batch = copies(distribution, NUM_SAMPLES)
    actions, log_probs = sample_and_log_prob(batch, keys(NUM_SAMPLES))
    np.testing.assert_allclose(actions, drawn, rtol=1e-6, atol=1e-6)
    # beyond, a float32 action says too little of what was squashed
    inner = (np.abs(unit) < 0.999).all(axis=-1)
    assert inner.mean() > 0.98
    np.testing.assert_allclose(
        log_prob(batch, actions)[inner], log_probs[inner], rtol=2e-3, atol=2e-3
    )


def test_tanh_normal_is_exact_where_tanh_saturates() -> None:
    """``sample_and_log_prob`` against float64 out to |u| = 30,
    where tanh(u) is 1 in float32 from 9 on.
    """
    mean = np.linspace(-30, 30, 60, dtype=np.float32)[:, None]
    action, actual = sample_and_log_prob(TanhNormal(mean, np.full_like(mean, -20.0)), keys(60))
    assert action.min() == -1
    assert action.max() == 1
    # So small a deviation vanishes in the sum with the mean.
    # log(1 - tanh(u)^2)
    log_slope = 2 * (np.log(2) - np.logaddexp(np.float64(mean), -np.float64(mean)))
    expected = scipy.stats.norm.logpdf(0.0) + 20.0 - log_slope
    np.testing.assert_allclose(actual, expected[:, 0], rtol=1e-5)


@jax.jit
def tanh_normal_gradients(mean: Any, log_std: Any) -> Any:
    params = (jnp.full((7, 2), mean), jnp.full((7, 2), log_std))
    least, most, beyond = np.nextafter(np.float32([-1, 1, -1]), np.float32([0, 0, -2]))
    actions = jnp.tile(array(-1.0, 1.0, least, most, beyond, 0.0, 2.0)[:, None], 2)

    def reparameterised(params: Any) -> jax.Array:
        action, log_prob = TanhNormal(*params).sample_and_log_prob(keys(7))
        return jnp.sum(action) + jnp.sum(log_prob)

    def of_action(params: Any, actions: jax.Array) -> jax.Array:
        return jnp.sum(TanhNormal(*params).log_prob(actions))

    both = jax.value_and_grad(of_action, argnums=(0, 1))
    return jax.value_and_grad(reparameterised)(params), both(params, actions)


@pytest.mark.parametrize("mean", [-1e3, -20.0, 0.0, 20.0, 1e3])
@pytest.mark.parametrize("log_std", [-5.0, 2.0])
def test_tanh_normal_gradients_are_finite(mean: float, log_std: float) -> None:
    keys(7)  # outside the trace
    for x in jax.tree.leaves(tanh_normal_gradients(mean, log_std)):
        assert np.isfinite(x).all()


def test_discrete_gradients_are_finite() -> None:
    @jax.jit
    @jax.grad
    def gradient(x: jax.Array) -> jax.Array:
        both = (Categorical(x), MultiCategorical((x, -x)))
        return sum(jnp.sum(d.entropy() + d.log_prob(d.mode())) for d in both)

    for scale in (0.0, 1e4, 1e30):
        assert np.isfinite(gradient(scale * array([1.0, -1.0, 0.0]))).all()


# --- Heads ----------------------------------------------------------------------------------------


def box(*shape: int, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(shape, np.dtype(dtype), np.full(shape, -1, dtype), np.full(shape, 1, dtype))


@pytest.mark.parametrize(
    "space, num_outputs, log_std_size, kind",
    [
        (spaces.Discrete(4), 4, 0, Categorical),
        (spaces.MultiDiscrete((3, 1, 2)), 6, 0, MultiCategorical),
        (spaces.MultiDiscrete((5,)), 5, 0, MultiCategorical),
        (box(3), 3, 3, Normal),
        (box(1, dtype=np.float64), 1, 1, Normal),
    ],
)
def test_policy_head(space: spaces.Space, num_outputs: int, log_std_size: int, kind: type) -> None:
    head = policy_head(space)
    assert (head.num_outputs, head.log_std_size) == (num_outputs, log_std_size)
    outputs = normal_like(0, 7, num_outputs + log_std_size)
    distribution = head.distribution(outputs)
    assert isinstance(distribution, kind)
    np.testing.assert_array_equal(np.concatenate(jax.tree.leaves(distribution), axis=-1), outputs)

    def act(outputs: jax.Array, keys: jax.Array) -> Any:
        distribution = head.distribution(outputs)
        action = distribution.sample(keys)
        return (action, distribution.mode()), (
            distribution.log_prob(action),
            distribution.entropy(),
        )

    dtype = jnp.float32 if isinstance(space, spaces.Box) else jnp.int32
    for precision in (jnp.float32, jnp.bfloat16):
        actions, numbers = jax.eval_shape(act, outputs.astype(precision), keys(7))
        assert [(x.shape, x.dtype) for x in actions] == [((7, *space.shape), dtype)] * 2
        assert [(x.shape, x.dtype) for x in numbers] == [((7,), jnp.float32)] * 2


def test_noise_reaches_all_normal_parts_of_a_nested_dict() -> None:
    box = spaces.Box((2,), np.dtype(np.float32), array(-1.0, -1.0), array(1.0, 1.0))
    discrete = spaces.Discrete(3)
    head = policy_head(
        {"a": box, "b": {"c": discrete, "d": {"e": box}}, "f": {"g": discrete}, "h": box}
    )
    outputs, noise = (
        np.zeros((4, head.num_outputs + head.log_std_size), np.float32),
        normal_like(0, 4, 6),
    )
    action = jax.jit(lambda outputs, keys, noise: head.distribution(outputs).sample(keys, noise))(
        outputs, keys(4), noise
    )
    found = np.concatenate([action["a"], action["b"]["d"]["e"], action["h"]], axis=-1)
    np.testing.assert_allclose(found, noise, rtol=1e-6)


def test_a_normal_is_in_the_units_of_its_bounds() -> None:
    """In float64, for outputs in units where finite bounds are -1 and 1;
    other components keep their units.
    """
    largest = np.finfo(np.float32).max
    low, high = (
        np.array([0, -0.01, -3, -np.inf, 0, -largest, 2]),
        np.array([100, 0.01, 1, 5, np.inf, largest, 2]),
    )
    centre, half = np.array([50, 0, -1, 0, 0, 0, 0]), np.array([50, 0.01, 2, 1, 1, 1, 1])
    mean, log_std = normal_like(0, 64, 7), 0.3 * normal_like(1, 64, 7)
    space = spaces.Box((7,), np.dtype(np.float32), np.float32(low), np.float32(high))
    distribution: Any = policy_head(space).distribution(np.concatenate([mean, log_std], axis=-1))
    exact = scipy.stats.norm(centre + half * mean, half * np.exp(np.float64(log_std)))
    # draws before the affine map
    unit = (np.float64(sample(distribution, keys(64))) - centre) / half
    np.testing.assert_allclose(unit, sample(Normal(mean, log_std), keys(64)), rtol=1e-5, atol=1e-5)
    action = np.float32(centre + half * unit)
    np.testing.assert_allclose(mode(distribution), exact.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        log_prob(distribution, action), exact.logpdf(action).sum(axis=-1), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        entropy(distribution), exact.entropy().sum(axis=-1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("space", [box(), box(2, 3), box(2, dtype=np.int32)])
def test_policy_head_refuses_other_boxes(space: spaces.Box) -> None:
    with pytest.raises(
        ConfigError,
        match=r"Box.*TransformAction",
    ):
        policy_head(space)
