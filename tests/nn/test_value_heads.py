"""Value heads against loops in float64, rlax, and small tables whose values are known."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax

from jaxrl_dist import exact, returns
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn import values
from jaxrl_dist.nn.config import DistributionConfig
from jaxrl_dist.nn.values import Particles

N, K = 6, 7
LARGE = 1e30


def particles(seed: int = 0, size: int = K) -> Particles:
    """Random returns with random probabilities."""
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(size), N).astype(np.float32)
    return Particles(rng.normal(0, 2, (N, size)).astype(np.float32), probabilities)


def outputs(size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (N, size)).astype(np.float32)


def huber_slopes(
    quantiles: np.ndarray, fractions: np.ndarray, target: Particles, kappa: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Losses ``[N]`` and their gradients ``[N, F]``: Dabney et al. (2018a), equations 9 and 10."""
    losses, slopes = np.zeros(N), np.zeros(quantiles.shape)
    for n in range(N):
        for i, (theta, tau) in enumerate(zip(quantiles[n], fractions[n], strict=True)):
            for z, p in zip(*(x[n].astype(np.float64) for x in target), strict=True):
                u = z - theta
                huber = 0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)
                weight = abs(tau - (u < 0)) * p / quantiles.shape[1]
                losses[n] += weight * huber / kappa
                slopes[n, i] -= weight * max(-1.0, min(1.0, u / kappa))
    return losses, slopes


def fitted(head: values.ValueHead, x: np.ndarray, target: Particles) -> tuple[Any, Any, Any]:
    """A head's losses, priorities, and gradient of the summed losses."""

    def loss(x: jax.Array) -> Any:
        losses, priorities = head.loss(x, target)
        return losses.sum(), (losses, priorities)

    slopes, (losses, priorities) = jax.jit(jax.grad(loss, has_aux=True))(x)
    return losses, priorities, slopes


@pytest.mark.parametrize("kappa", [1.0, 0.3])
def test_quantile_head_is_the_quantile_huber_loss(kappa: float) -> None:
    x, target = outputs(5), particles()
    losses, priorities, slopes = fitted(values.quantile(5, kappa), x, target)
    fractions = np.broadcast_to((np.arange(5) + 0.5) / 5, x.shape)
    expected, expected_slopes = huber_slopes(x.astype(np.float64), fractions, target, kappa)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-4, atol=1e-6)
    mean = (target.returns * target.probabilities).sum(axis=1)
    np.testing.assert_allclose(priorities, np.abs(mean - x.mean(axis=1)), rtol=1e-4, atol=1e-6)


def test_quantile_head_is_that_of_rlax() -> None:
    """There the loss is a sum over the quantiles, and all particles are equally likely."""
    x, target = outputs(5), particles()._replace(probabilities=np.full((N, K), 1 / K, np.float32))
    losses, _, slopes = fitted(values.quantile(5), x, target)
    fractions = jnp.asarray((np.arange(5) + 0.5) / 5, jnp.float32)

    def summed(x: jax.Array) -> jax.Array:
        zeros = jnp.zeros(())
        one = lambda x, z: rlax.quantile_q_learning(  # noqa: E731
            x[:, None], fractions, jnp.int32(0), zeros, jnp.ones(()), z[:, None], z[:, None], 1.0
        )
        return jax.vmap(one)(x, target.returns) / 5

    np.testing.assert_allclose(losses, jax.jit(summed)(x), rtol=1e-5)
    expected = jax.jit(jax.grad(lambda x: summed(x).sum()))(jnp.asarray(x))
    np.testing.assert_allclose(slopes, expected, rtol=1e-4, atol=1e-6)


def test_implicit_head_reads_its_fractions() -> None:
    rng = np.random.default_rng(2)
    x, fractions, target = outputs(4), rng.random((N, 4)).astype(np.float32), particles()
    head = values.implicit()
    both = np.concatenate([x, fractions], axis=-1)
    losses, priorities, slopes = fitted(head, both, target)
    expected, expected_slopes = huber_slopes(x.astype(np.float64), fractions, target)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(slopes[:, :4], expected_slopes, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slopes[:, 4:], 0)
    mean = (target.returns * target.probabilities).sum(axis=1)
    np.testing.assert_allclose(priorities, np.abs(mean - x.mean(axis=1)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(head.mean(both), x.mean(axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(head.particles(both).returns, x)


def test_categorical_head_is_projected_cross_entropy() -> None:
    """Bellemare et al. (2017), algorithm 1, and the divergence of Hessel et al. (2018)."""
    x, target = outputs(5), particles()
    losses, priorities, _ = fitted(values.categorical(-2.0, 2.0, 5), x, target)
    for n in range(N):
        projected = np.zeros(5)
        for z, p in zip(*(part[n].astype(np.float64) for part in target), strict=True):
            b = np.clip(z, -2, 2) + 2
            low, high = int(np.floor(b)), int(np.ceil(b))
            projected[low] += p * (high - b if high > low else 1)
            projected[high] += p * (b - low if high > low else 0)
        log_probs = x[n] - np.log(np.exp(x[n].astype(np.float64)).sum())
        cross = -(projected * log_probs).sum()
        entropy = -sum(q * np.log(q) for q in projected if q > 0)
        np.testing.assert_allclose(losses[n], cross, rtol=1e-5)
        np.testing.assert_allclose(priorities[n], cross - entropy, rtol=1e-3, atol=1e-5)


def test_expected_head_fits_the_mean() -> None:
    x, target = outputs(1), particles()
    losses, priorities, slopes = fitted(values.expected(optax.losses.l2_loss), x, target)
    error = (target.returns * target.probabilities).sum(axis=1) - x[:, 0]
    np.testing.assert_allclose(losses, 0.5 * error**2, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(priorities, np.abs(error), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slopes[:, 0], -error, rtol=1e-4, atol=1e-6)


HEADS = {
    "expected": values.expected(optax.losses.l2_loss),
    "categorical": values.categorical(-3.0, 3.0, 4),
    "quantile": values.quantile(4),
}


@pytest.mark.parametrize("name", HEADS)
def test_actions_without_probability_do_not_matter(name: str) -> None:
    """Their particles may be huge: those of illegal actions are, with the entropy."""
    head = HEADS[name]
    rng = np.random.default_rng(3)
    x, ahead = outputs(head.size), rng.normal(size=(N, 3, head.size)).astype(np.float32)
    weights = rng.dirichlet(np.ones(2), N).astype(np.float32)
    legal = jax.tree.map(np.asarray, head.particles(ahead[:, :2]))
    wanted = fitted(head, x, values.mixed(legal, weights))
    for huge in (LARGE, -LARGE, np.inf):
        every = jax.tree.map(np.array, head.particles(ahead))
        every.returns[:, 2] = huge
        mixed = values.mixed(every, np.pad(weights, ((0, 0), (0, 1))))
        for found, expected in zip(fitted(head, x, mixed), wanted, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dropped", [0, 1, 3])
def test_truncation_drops_the_largest_quantiles_of_all_critics(dropped: int) -> None:
    """Kuznetsov et al. (2020), equation 5: ``dropped`` for each critic, wherever they are."""
    x = np.stack([outputs(4, seed) + seed for seed in range(3)])
    x[0, 0] = x[1, 0] = 2.0  # equal ones count one by one
    found = values.pessimistic(values.quantile(4), x, dropped)
    for n in range(N):
        kept = np.sort(x[:, n].ravel())[: 12 - 3 * dropped]
        used = np.asarray(found.probabilities[n]) > 0
        np.testing.assert_array_equal(np.sort(np.asarray(found.returns[n])[used]), kept)
        np.testing.assert_allclose(found.probabilities[n][used], 1 / len(kept), rtol=1e-6)


@pytest.mark.parametrize("name", ["expected", "categorical"])
def test_the_least_critic_is_the_target_of_other_heads(name: str) -> None:
    head = HEADS[name]
    x = np.stack([outputs(head.size, seed) for seed in range(3)])
    found = values.pessimistic(head, x)
    least = np.asarray(head.mean(x)).argmin(axis=0)
    assert len(set(least)) > 1
    expected = head.particles(x[least, np.arange(N)])
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_gradients_do_not_grow_with_the_number_of_quantiles() -> None:
    """A sum over them would: a limit of 10 would then clip nearly every update."""
    target = particles()
    norms = [
        np.linalg.norm(fitted(values.quantile(size), np.full((N, size), 9.0), target)[2].sum(1))
        for size in (1, 50, 200)
    ]
    np.testing.assert_allclose(norms[1:], norms[0], rtol=1e-4)


STATES, PAIRS, SIZE = 3, 6, 51


def ahead(head: values.ValueHead, x: jax.Array, weights: jax.Array, reward: jax.Array) -> Particles:
    """The targets ``[PAIRS, K]`` of a table: of each outcome, and of the episode's end, which is
    the last one.
    """
    every = x.reshape(STATES, -1, SIZE)
    best = head.particles(every[jnp.arange(STATES), jnp.argmax(head.mean(every), axis=1)])
    outcomes = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]])[None], best)
    going = jnp.append(jnp.ones(STATES), 0.0)
    returned = reward[:, None, None] + 0.9 * going[None, :, None] * outcomes.returns
    shares = jnp.broadcast_to(outcomes.probabilities, returned.shape)
    return jax.lax.stop_gradient(values.mixed(Particles(returned, shares), weights))


def solved(
    head: values.ValueHead, weights: jax.Array, reward: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Means ``[PAIRS]`` of the outputs that fit their own targets, and the last gradient."""
    optimizer = optax.adam(optax.exponential_decay(0.1, 200, 0.1))

    def loss(x: jax.Array) -> jax.Array:
        return head.loss(x, ahead(head, x, weights, reward))[0].sum()

    def step(state: Any, _: None) -> Any:
        x, memory = state
        if not head.quantiles:  # cross-entropy has its minimum at the target
            atoms = head.particles(x[0]).returns
            target = ahead(head, x, weights, reward)
            projected = jax.vmap(returns.project, (0, 0, None))(*target, atoms)
            return (jnp.log(projected + 1e-12), memory), None
        updates, memory = optimizer.update(jax.grad(loss)(x), memory)
        return (optax.apply_updates(x, updates), memory), None

    x = jnp.zeros((PAIRS, SIZE)) + jnp.linspace(0, 5, SIZE).reshape(1, -1) * head.quantiles
    (x, _), _ = jax.lax.scan(step, (x, optimizer.init(x)), length=400)
    return head.mean(x), jax.grad(loss)(x)


@pytest.mark.case  # the losses are compared with loops above
@pytest.mark.parametrize("name", ["categorical", "quantile"])
def test_means_of_random_tables(name: str) -> None:
    """Means come within 2 % of the largest optimal value."""
    head = values.quantile(SIZE, kappa=0.1)
    if name == "categorical":
        head = values.categorical(0.0, 10.0, SIZE)
    tables = [exact.Table.random(np.random.default_rng(k), STATES, 2, 0.1) for k in range(20)]
    going = np.stack([(t.probability * t.going).reshape(PAIRS, STATES) for t in tables])
    reward = np.float32([t.reward.reshape(PAIRS) for t in tables])
    weights = np.float32(np.concatenate([going, 1 - going.sum(axis=2, keepdims=True)], axis=2))
    solve = jax.jit(jax.vmap(functools.partial(solved, head)))
    q, slopes = map(np.asarray, solve(weights, reward))
    assert np.abs(slopes).max() < 2e-3
    for table, found in zip(tables, q, strict=True):
        truth = exact.optimal(table, 0.9).reshape(PAIRS)
        np.testing.assert_allclose(found, truth, rtol=0, atol=0.02 * np.abs(truth).max())


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"quantiles": "fixed"}, "quantiles.*num.atoms above 1"),
        ({"num_atoms": 5, "quantiles": "fixed", "value_min": -3.0}, "value_min.*quantiles none"),
        ({"num_atoms": 5, "value_min": 3.0, "value_max": 3.0}, "value.min 3 must be below"),
        ({"num_atoms": 0}, "num_atoms.*>= 1"),
    ],
)
def test_what_does_nothing_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DistributionConfig(**fields).validate()
