"""returns.py against definitions written as forward sums in float64, and against rlax."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_dist import returns

DISCOUNT = 0.97
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

gae = jax.jit(returns.gae)
lambda_returns = jax.jit(returns.lambda_returns)
n_step = jax.jit(returns.n_step, static_argnums=6)
vtrace = jax.jit(returns.vtrace)


class Data(NamedTuple):
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    values: np.ndarray


def random_data(
    seed: int, num_steps: int, num_envs: int = 240, endless: bool = False
) -> tuple[Data, np.ndarray]:
    """Rollouts as the environments make them, and log importance ratios.

    Every end is followed by a reset step; the chance of an end differs by environment and is 1 for
    some, half of the environments begin on a reset step.
    """
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
    chance = rng.choice([0.0, 0.1, 0.5, 1.0], num_envs) * (not endless)
    terminated, truncated, valid = np.zeros((3, *shape), bool)
    resetting = (rng.random(num_envs) < 0.5) & (not endless)
    for t in range(num_steps):
        valid[t] = ~resetting
        ended = valid[t] & (rng.random(num_envs) < chance)
        kind = rng.integers(3, size=num_envs)  # terminated, truncated, both
        terminated[t], truncated[t] = ended & (kind != 1), ended & (kind != 0)
        resetting = ended
    reward = np.where(valid, rng.normal(size=shape), 0.0).astype(np.float32)
    values = rng.normal(size=(num_steps + 1, num_envs)).astype(np.float32)
    return Data(reward, terminated, truncated, valid, values), rng.normal(size=shape).astype(
        np.float32
    )


def test_episode_returns_are_means_over_the_episodes_that_ended() -> None:
    """Added up one environment and one step at a time; where none has ended, what there is so
    far.
    """
    data, _ = random_data(3, 9)
    reward, terminated, truncated, valid, _ = data
    expected = np.zeros(reward.shape[1])
    for b in range(reward.shape[1]):
        finished, total = [], 0.0
        for t in range(len(reward)):
            total += float(reward[t, b]) * valid[t, b]
            if terminated[t, b] or truncated[t, b]:
                finished.append(total)
                total = 0.0
        expected[b] = np.mean(finished) if finished else total
    assert (terminated | truncated).any(axis=0).sum() not in (0, reward.shape[1])
    np.testing.assert_allclose(returns.episode_return(*data[:4]), expected, **TOLERANCE)


# --- The definitions: for each start step, sums that run forward to where the episode or the rollou


class Column(NamedTuple):
    """One environment of ``Data`` as lists of Python numbers."""

    reward: list[float]
    terminated: list[bool]
    truncated: list[bool]
    valid: list[bool]
    values: list[float]

    def last(self, t: int) -> int:
        """The last step that a return from step ``t`` may look at."""
        steps = range(t, len(self.reward))
        stops = [
            s
            for s in steps
            if self.terminated[s] or self.truncated[s] or not all(self.valid[s + 1 : s + 2])
        ]
        return stops[0] if stops else steps[-1]

    def successor_value(self, t: int) -> float:
        return 0.0 if self.terminated[t] else self.values[t + 1]

    def td_error(self, t: int, discount: float) -> float:
        return self.reward[t] + discount * self.successor_value(t) - self.values[t]


def columns(data: Data) -> list[Column]:
    return [
        Column(
            *(x[:, b].astype(np.float64 if x.dtype == np.float32 else bool).tolist() for x in data)
        )
        for b in range(data.reward.shape[1])
    ]


def naive(data: Data, of_step: Any) -> np.ndarray:
    """``of_step(column, t)`` for each environment and step, ``[T, B]`` or ``[T, B, k]``."""
    return np.swapaxes(
        [[of_step(column, t) for t in range(len(column.reward))] for column in columns(data)], 0, 1
    )


def naive_n_step(column: Column, t: int, n: int) -> float:
    if not column.valid[t]:
        return column.values[t]
    last = min(t + n - 1, column.last(t))
    total = sum(DISCOUNT ** (s - t) * column.reward[s] for s in range(t, last + 1))
    return total + DISCOUNT ** (last + 1 - t) * column.successor_value(last)


def naive_lambda_return(column: Column, t: int, gae_lambda: float) -> float:
    """The mixture of n-step returns: Sutton and Barto, eq. 12.3."""
    if not column.valid[t]:
        return column.values[t]
    longest = column.last(t) - t + 1
    mixture = sum(gae_lambda ** (n - 1) * naive_n_step(column, t, n) for n in range(1, longest))
    return (1 - gae_lambda) * mixture + gae_lambda ** (longest - 1) * naive_n_step(
        column, t, longest
    )


def naive_gae(column: Column, t: int, gae_lambda: float) -> float:
    """Schulman et al. 2016, eq. 16."""
    if not column.valid[t]:
        return 0.0
    steps = range(t, column.last(t) + 1)
    return sum((DISCOUNT * gae_lambda) ** (s - t) * column.td_error(s, DISCOUNT) for s in steps)


def naive_vtrace(
    data: Data, log_rhos: np.ndarray, gae_lambda: float, rho: float, c: float, pg_rho: float
) -> Any:
    """Espeholt et al. 2018, eq. 1 with remark 2, and section 4.2; ``[T, B]`` twice."""
    all_ratios = np.exp(log_rhos.astype(np.float64)).T.tolist()
    targets = []
    for column, ratios in zip(columns(data), all_ratios, strict=True):
        vs = list(column.values)
        for t in range(len(ratios)):
            product = 1.0
            for s in range(t, column.last(t) + 1) if column.valid[t] else ():
                vs[t] += (
                    DISCOUNT ** (s - t)
                    * product
                    * min(rho, ratios[s])
                    * column.td_error(s, DISCOUNT)
                )
                product *= gae_lambda * min(c, ratios[s])
        advantages = [0.0] * len(ratios)
        for t in range(len(ratios)):
            if column.valid[t]:
                after = column.successor_value(t)
                if t < column.last(t):
                    after = gae_lambda * vs[t + 1] + (1 - gae_lambda) * after
                advantages[t] = min(pg_rho, ratios[t]) * (
                    column.reward[t] + DISCOUNT * after - column.values[t]
                )
        targets.append((vs[:-1], advantages))
    return np.transpose(targets, (1, 2, 0))


# --- Against the definitions ----------------------------------------------------------------------

LENGTHS = (1, 2, 7, 16)


@functools.cache
def cached_data(num_steps: int) -> tuple[Data, np.ndarray]:
    return random_data(num_steps, num_steps)


def test_patterns_cover_the_cases() -> None:
    data, _ = cached_data(7)
    ended = data.terminated | data.truncated
    assert (~data.valid[0]).any() and data.valid[0].any()
    assert ended[-1].any() and (~data.valid[-1]).any()
    assert (ended[0] & ended[2] & ended[4]).any(), "consecutive episodes of length 1"
    assert (~ended).all(axis=0).any()
    assert (data.terminated & data.truncated).any()
    np.testing.assert_array_equal(data.valid[1:], ~ended[:-1])
    assert (data.reward[~data.valid] == 0).all()


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_gae_and_lambda_returns(num_steps: int, gae_lambda: float) -> None:
    data, _ = cached_data(num_steps)
    advantages = gae(*data, DISCOUNT, gae_lambda)
    assert advantages.dtype == jnp.float32
    np.testing.assert_allclose(
        advantages, naive(data, lambda x, t: naive_gae(x, t, gae_lambda)), **TOLERANCE
    )
    expected = naive(data, lambda x, t: naive_lambda_return(x, t, gae_lambda))
    np.testing.assert_allclose(lambda_returns(*data, DISCOUNT, gae_lambda), expected, **TOLERANCE)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("n", [1, 2, 5, 16, 1000])
def test_n_step(num_steps: int, n: int) -> None:
    data, _ = cached_data(num_steps)
    expected = naive(data, lambda x, t: naive_n_step(x, t, n))
    result = n_step(*data, DISCOUNT, n)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, **TOLERANCE)
    if n >= num_steps:
        np.testing.assert_allclose(result, lambda_returns(*data, DISCOUNT, 1.0), **TOLERANCE)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize(
    "gae_lambda, rho, c, pg_rho",
    [(1.0, 1.0, 1.0, 1.0), (0.9, 1.5, 1.05, 2.0), (0.0, 1.0, 1.0, 1.0)],
)
def test_vtrace(num_steps: int, gae_lambda: float, rho: float, c: float, pg_rho: float) -> None:
    data, log_rhos = cached_data(num_steps)
    result = vtrace(*data, log_rhos, DISCOUNT, gae_lambda, rho, c, pg_rho)
    vs, pg_advantages = naive_vtrace(data, log_rhos, gae_lambda, rho, c, pg_rho)
    np.testing.assert_allclose(result.vs, vs, **TOLERANCE)
    np.testing.assert_allclose(result.pg_advantages, pg_advantages, **TOLERANCE)


FLAGS = st.tuples(st.booleans(), st.booleans(), st.booleans())
NUMBERS = st.floats(-10, 10, width=32)
STEPS = st.tuples(NUMBERS, FLAGS, NUMBERS, st.floats(-3, 3, width=32))


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(steps=st.lists(STEPS, min_size=6, max_size=6), last_value=NUMBERS)
def test_any_flags_at_all(steps: list[Any], last_value: float) -> None:
    """Even flags that no environment sends: ends and rewards on reset steps, resets in
    mid-episode.
    """
    rewards, flags, values, log_rhos = (
        np.array(column)[:, None] for column in zip(*steps, strict=True)
    )
    values = np.append(values, [[last_value]], axis=0).astype(np.float32)
    data = Data(rewards.astype(np.float32), *np.moveaxis(flags, -1, 0), values)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    expected = naive(data, lambda x, t: (naive_gae(x, t, 0.9), naive_n_step(x, t, 3)))
    np.testing.assert_allclose(gae(*data, DISCOUNT, 0.9), expected[..., 0], **tolerance)
    np.testing.assert_allclose(n_step(*data, DISCOUNT, 3), expected[..., 1], **tolerance)
    result = vtrace(*data, log_rhos.astype(np.float32), DISCOUNT, 0.9)
    np.testing.assert_allclose(
        result, naive_vtrace(data, log_rhos, 0.9, 1.0, 1.0, 1.0), **tolerance
    )


# --- Against rlax, which knows terminations only --------------------------------------------------


def test_rlax() -> None:
    import rlax

    data, log_rhos = random_data(0, 12, num_envs=50, endless=True)
    terminated = np.random.default_rng(1).random(data.reward.shape) < 0.15
    data = data._replace(terminated=terminated)
    discounts = np.where(terminated, 0.0, DISCOUNT).astype(np.float32)
    before, after = data.values[:-1], data.values[1:]

    def over_envs(function: Any, num_arrays: int) -> Any:
        """Of arrays ``[T, B]`` and numbers."""
        of_column = lambda numbers, *arrays: function(*arrays, *numbers)  # noqa: E731
        mapped = jax.jit(jax.vmap(of_column, in_axes=(None, *(1,) * num_arrays), out_axes=1))
        return lambda *args: mapped(args[num_arrays:], *args[:num_arrays])

    rlax_lambda_returns = over_envs(rlax.lambda_returns, 3)
    rlax_gae = over_envs(
        lambda r, d, v, x: rlax.truncated_generalized_advantage_estimation(
            r, d, lambda_=x, values=v
        ),
        3,
    )
    rlax_vtrace = over_envs(
        partial(
            rlax.vtrace_td_error_and_advantage, clip_rho_threshold=1.5, clip_pg_rho_threshold=2.0
        ),
        5,
    )
    for gae_lambda in (0.0, 0.9, 1.0):
        expected = rlax_lambda_returns(data.reward, discounts, after, gae_lambda)
        np.testing.assert_allclose(
            lambda_returns(*data, DISCOUNT, gae_lambda), expected, **TOLERANCE
        )

        expected = rlax_gae(data.reward, discounts, data.values, gae_lambda)
        np.testing.assert_allclose(gae(*data, DISCOUNT, gae_lambda), expected, **TOLERANCE)

        expected = rlax_vtrace(before, after, data.reward, discounts, np.exp(log_rhos), gae_lambda)
        result = vtrace(*data, log_rhos, DISCOUNT, gae_lambda, 1.5, 1.0, 2.0)
        np.testing.assert_allclose(result.vs - before, expected.errors, **TOLERANCE)
        np.testing.assert_allclose(result.pg_advantages, expected.pg_advantage, **TOLERANCE)

    for n in (1, 3, 12):
        expected = over_envs(partial(rlax.n_step_bootstrapped_returns, n=n), 3)(
            data.reward, discounts, after
        )
        np.testing.assert_allclose(n_step(*data, DISCOUNT, n), expected, **TOLERANCE)


@pytest.mark.parametrize("num_atoms", [1, 2, 11])
def test_projection_is_that_of_rlax(num_atoms: int) -> None:
    """Onto atoms of any spacing, from values below, on, between and above them."""
    import rlax

    rng = np.random.default_rng(num_atoms)
    atoms = np.cumsum(rng.uniform(0.1, 2, num_atoms)).astype(np.float32) - 3
    support = np.concatenate(
        [rng.uniform(-6, 12, (20, 5)), np.tile(atoms[:1], (20, 1))], axis=1
    ).astype(np.float32)
    probs = rng.dirichlet(np.ones(6), 20).astype(np.float32)
    found, expected = (
        jax.jit(jax.vmap(project, (0, 0, None)))(support, probs, atoms)
        for project in (returns.project, rlax.categorical_l2_project)
    )
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-5)


def test_rescaled_values_are_those_of_rlax() -> None:
    import rlax

    x = np.concatenate([np.linspace(-3, 3, 25), [-1e4, -200.0, 300.0, 1e5]]).astype(np.float32)
    pair = rlax.SIGNED_HYPERBOLIC_PAIR
    np.testing.assert_array_equal(jax.jit(returns.rescale)(x), jax.jit(pair.apply)(x))
    np.testing.assert_allclose(
        jax.jit(returns.unscale)(x), jax.jit(pair.apply_inv)(x), rtol=1e-3, atol=1e-3
    )


def test_rescaling_and_its_inverse_cancel() -> None:
    x = np.concatenate([np.linspace(-5, 5, 100_001), [-1e4, -200.0, 300.0, 1e5]]).astype(np.float32)
    again = np.asarray(jax.jit(lambda x: returns.unscale(returns.rescale(x)))(x), np.float64)
    np.testing.assert_allclose(again, x, rtol=1e-5, atol=1e-5)
    # targets of n-step returns would add up what does not average out
    assert abs(np.mean((again - x)[x > 0])) < 1e-6


# --- Properties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_vtrace_on_policy_is_lambda_returns_and_gae(gae_lambda: float) -> None:
    data, log_rhos = cached_data(16)
    result = vtrace(*data, np.zeros_like(log_rhos), DISCOUNT, gae_lambda)
    np.testing.assert_allclose(result.vs, lambda_returns(*data, DISCOUNT, gae_lambda), **TOLERANCE)
    np.testing.assert_allclose(result.pg_advantages, gae(*data, DISCOUNT, gae_lambda), **TOLERANCE)


def everything(
    data: Data, log_rhos: np.ndarray, discount: Any = DISCOUNT, gae_lambda: Any = 0.9
) -> Any:
    """What all functions return, as offsets from the value of their own step."""
    offsets = (
        returns.gae(*data, discount, gae_lambda),
        returns.lambda_returns(*data, discount, gae_lambda) - data.values[:-1],
        returns.n_step(*data, discount, 3) - data.values[:-1],
    )
    result = returns.vtrace(*data, log_rhos, discount, gae_lambda)
    return *offsets, result.vs - data.values[:-1], result.pg_advantages


def test_reset_steps_matter_only_as_bootstrap() -> None:
    data, log_rhos = cached_data(16)
    rng = np.random.default_rng(0)
    shape, reset = data.reward.shape, ~data.valid
    clean = np.stack(jax.jit(everything)(data, log_rhos))

    bits = rng.random((2, *shape)) < 0.5
    noise = rng.normal(scale=1e4, size=(3, *shape)).astype(np.float32)
    dirty = data._replace(
        reward=np.where(reset, noise[0], data.reward),
        terminated=np.where(reset, bits[0], data.terminated),
        truncated=np.where(reset, bits[1], data.truncated),
    )
    dirty_log_rhos = np.where(reset, noise[1], log_rhos)
    np.testing.assert_array_equal(jax.jit(everything)(dirty, dirty_log_rhos), clean)
    assert (clean[:, reset] == 0).all()

    # The value of a reset step is that of the terminal observation: used after a truncation,
    # and by nothing else.
    bootstraps = np.zeros((17, shape[1]), bool)
    bootstraps[1:] = data.truncated & ~data.terminated
    unused = np.append(reset, np.zeros((1, shape[1]), bool), axis=0) & ~bootstraps
    assert unused.any() and (bootstraps[:-1] <= reset).all()
    garbage = np.append(noise[2], noise[2, :1], axis=0)
    dirty = data._replace(values=np.where(unused, garbage, data.values))
    np.testing.assert_array_equal(jax.jit(everything)(dirty, log_rhos), clean)

    dirty = data._replace(values=np.where(bootstraps, garbage, data.values))
    changed = jax.jit(everything)(dirty, log_rhos)
    by_truncation = bootstraps[1:]
    assert (changed[0][by_truncation] != clean[0][by_truncation]).all()
    never_truncated = ~by_truncation.any(axis=0)
    np.testing.assert_array_equal(
        np.stack(changed)[:, :, never_truncated], clean[:, :, never_truncated]
    )
    expected = naive(dirty, lambda x, t: naive_gae(x, t, 0.9))
    np.testing.assert_allclose(changed[0], expected, rtol=1e-5, atol=1e-5 * 1e4)


def test_truncation_is_not_a_terminal() -> None:
    """Reward 1, time limit 10, discount 0.9, true value 10:
    the return is 10 from anywhere in the episode.
    """
    column = np.ones((10, 1), np.float32)
    last = np.arange(10)[:, None] == 9
    data = Data(column, last & False, last, ~(last & False), np.full((11, 1), 10.0, np.float32))
    np.testing.assert_allclose(lambda_returns(*data, 0.9, 1.0), 10 * column, rtol=1e-6)
    np.testing.assert_allclose(n_step(*data, 0.9, 3), 10 * column, rtol=1e-6)


def test_extreme_ratios_are_finite() -> None:
    data, log_rhos = cached_data(16)
    for log_rho in (-1e4, 1e4):
        extreme = np.full_like(log_rhos, log_rho)
        assert np.isfinite(vtrace(*data, extreme, DISCOUNT)).all()
        unclipped = vtrace(
            *data, np.where(data.valid, log_rhos, extreme), DISCOUNT, 1.0, np.inf, np.inf, np.inf
        )
        assert np.isfinite(unclipped).all()


def test_no_gradient() -> None:
    data, log_rhos = cached_data(7)

    def total(values: jax.Array) -> jax.Array:
        results = everything(data._replace(values=values), log_rhos)
        return sum(
            jnp.sum(x + y)
            for x, y in zip(results, (0.0, values[:-1], values[:-1], values[:-1], 0.0), strict=True)
        )

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(data.values), np.zeros_like(data.values))


def test_bad_arguments() -> None:
    data, log_rhos = cached_data(2)
    with pytest.raises(ValueError, match="n must be >= 1, not 0"):
        returns.n_step(*data, DISCOUNT, 0)
    for call in (
        # would broadcast for T = 2
        lambda: returns.gae(*data._replace(values=data.values[:-1]), DISCOUNT, 0.9),
        lambda: returns.n_step(*data._replace(values=data.values[:-1]), DISCOUNT, 3),
        lambda: returns.vtrace(*data, log_rhos[:1], DISCOUNT),
    ):
        with pytest.raises(AssertionError):
            call()


# --- Execution ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 8])
def test_shard_map(num_devices: int) -> None:
    data, log_rhos = cached_data(16)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    time_major = P(None, "data")
    sharded = jax.jit(
        jax.shard_map(
            everything,
            mesh=mesh,
            in_specs=(time_major, time_major, P(), P()),
            out_specs=time_major,
            check_vma=True,
        )
    )
    result = sharded(data, log_rhos, jnp.float32(DISCOUNT), jnp.float32(0.9))
    np.testing.assert_allclose(result, jax.jit(everything)(data, log_rhos), rtol=1e-6, atol=1e-6)


def test_shard_map_over_hyperparameters() -> None:
    """A population over the mesh: lambda varies by device, data and discount do not."""
    data, log_rhos = cached_data(7)
    mesh = Mesh(np.array(jax.devices()[:2]), ("agent",))

    def of_agent(gae_lambda: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[None], everything(data, log_rhos, DISCOUNT, gae_lambda[0]))

    lambdas = jnp.array([0.5, 0.9])
    sharded = jax.shard_map(
        of_agent, mesh=mesh, in_specs=P("agent"), out_specs=P("agent"), check_vma=True
    )
    vmapped = jax.vmap(partial(everything, data, log_rhos, DISCOUNT))
    result = np.stack(jax.jit(sharded)(lambdas))
    np.testing.assert_allclose(result, jax.jit(vmapped)(lambdas), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        result[:, 1], jax.jit(everything)(data, log_rhos), rtol=1e-6, atol=1e-6
    )
