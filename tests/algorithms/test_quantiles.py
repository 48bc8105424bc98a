"""DQN with quantiles of returns, and Munchausen's target, against loops in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import perturbed, random_rollout, spec, window_return

from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.config.named import PRESETS
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn import networks
from jaxrl_dist.nn.heads import COSINES, FRACTIONS, q_heads
from jaxrl_dist.types import Context, Variables

SPEC = spec()
N, A = 16, 3
NET: dict[str, Any] = {"hidden_sizes": (8,), "n_step": 2, "discount": 0.9}


class Problem:
    """Parameters away from their start, other targets, and the loss of random windows."""

    def __init__(self, **fields: Any) -> None:
        self.config = DQN(**NET, **fields)
        algorithm = self.config.make(SPEC)
        params = jax.jit(algorithm.init)(jax.random.key(0)).params
        self.target = perturbed(algorithm.initial_target(params), 1)
        self.params = perturbed(params, 2)
        self.windows = random_rollout(algorithm, SPEC, 2, N, end_chance=0.4)
        self.keys = jax.random.split(jax.random.key(3), N)
        context = Context(self.keys, target=self.target)
        variables = Variables(self.params, ())
        batch = algorithm.postprocess(variables, self.windows, context)
        self.losses, _, self.aux = jax.jit(algorithm.loss)(variables, batch, context)
        returned = [window_return(self.windows, i, 0.9) for i in range(N)]
        self.reward, self.discount, last = np.array(returned).T
        self.next_obs = self.windows.obs[last.astype(int) + 1, np.arange(N)]

    def outputs(self, params: Any, obs: np.ndarray, *inputs: Any) -> np.ndarray:
        network = networks.q_network(
            self.config,
            SPEC.observation,
            A,
            num_atoms=5 if self.config.quantiles == "fixed" else 1,
            dueling=False,
            noisy=self.config.noisy,
            implicit=self.config.quantiles == "implicit",
        )
        return np.asarray(jax.jit(network.apply)(params, obs, *inputs or [None]), np.float64)


def quantile_huber(x: np.ndarray, fractions: np.ndarray, z: np.ndarray, p: np.ndarray) -> float:
    """Dabney et al. (2018), equation 10, over the number of quantiles."""
    total = 0.0
    for theta, tau in zip(x, fractions, strict=True):
        for one, share in zip(z, p, strict=True):
            u = one - theta
            huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
            total += share * abs(tau - (u < 0)) * huber / len(x)
    return total


@pytest.mark.parametrize("quantiles", ["fixed", "implicit"])
@pytest.mark.parametrize("double", [True, False])
def test_loss_is_that_of_the_best_actions_quantiles(quantiles: Any, double: bool) -> None:
    """The best action by the mean, then its quantiles; each evaluation draws other fractions."""
    p = Problem(num_atoms=5, quantiles=quantiles, double=double)
    fixed = np.broadcast_to((np.arange(5) + 0.5) / 5, (N, 5))
    own, others, inputs = fixed, fixed, [(), ()]
    if quantiles == "implicit":
        keys = jax.vmap(jax.random.fold_in, (0, None))(p.keys, 4)
        drawn = np.stack([jax.random.uniform(key, (4, 5)) for key in keys])
        own, others = drawn[:, 0], drawn[:, 1]
        assert not np.allclose(own, others)
        inputs = [(None, own), (None, others)]
    online = p.outputs(p.params, p.windows.obs[0], *inputs[0])[..., :5]
    bootstrap = p.outputs(p.target, p.next_obs, *inputs[1])[..., :5]
    choosing = bootstrap
    if double:
        count = FRACTIONS if quantiles == "implicit" else 5
        choosing = p.outputs(p.params, p.next_obs)[..., :count]
    for i in range(N):
        best = choosing[i].mean(axis=-1).argmax()
        z = p.reward[i] + p.discount[i] * bootstrap[i, best]
        x = online[i, p.windows.action[0, i]]
        expected = quantile_huber(x, own[i], z, np.full(5, 0.2))
        np.testing.assert_allclose(p.losses[i], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(p.aux.priority[i], abs(z.mean() - x.mean()), atol=1e-5)


@pytest.mark.parametrize("quantiles", ["none", "fixed"])
def test_munchausen_target(quantiles: Any) -> None:
    """Vieillard et al. (2020), equation 2 with the clipping of section 3.1: of target values."""
    size = 5 if quantiles == "fixed" else 1
    tau = 0.3
    p = Problem(num_atoms=size, quantiles=quantiles, munchausen=0.6, soft_temperature=tau)

    def log_policy(q: np.ndarray) -> np.ndarray:
        return q / tau - np.log(np.exp(q / tau).sum())

    before = p.outputs(p.target, p.windows.obs[0])
    after = p.outputs(p.target, p.next_obs)
    online = p.outputs(p.params, p.windows.obs[0])
    added = []
    for i in range(N):
        action = p.windows.action[0, i]
        added.append(0.6 * max(-1, min(0, tau * log_policy(before[i].mean(axis=-1))[action])))
        z, shares = [], []
        logs = log_policy(after[i].mean(axis=-1))
        for one, log_prob in zip(after[i], logs, strict=True):
            soft = p.reward[i] + added[-1] + p.discount[i] * (one - tau * log_prob)
            z += [*soft]
            shares += [np.exp(log_prob) / size] * size
        x = online[i, action]
        expected = 0.5 * (np.dot(z, shares) - x[0]) ** 2
        if size > 1:
            expected = quantile_huber(x, (np.arange(5) + 0.5) / 5, np.array(z), np.array(shares))
        np.testing.assert_allclose(p.losses[i], expected, rtol=1e-3, atol=1e-5)
    assert min(added) < -0.05 and min(added) >= -0.6


def test_fourth_noise_does_not_change_the_first_three() -> None:
    """Three keys by ``split``, and the fourth by ``fold_in``: otherwise Rainbow would change."""
    keys = jax.random.split(jax.random.key(3), N)
    draws = DQN(noisy=True).draws(keys)
    expected = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
    data = [np.asarray(jax.random.key_data(noise)) for noise, _ in draws]
    for use in range(3):
        np.testing.assert_array_equal(data[use], jax.random.key_data(expected[:, use]))
        assert not (data[use] == data[3]).all(axis=-1).any()


@pytest.mark.parametrize("dueling, noisy", [(False, False), (True, True)])
def test_implicit_heads_multiply_features_by_cosines(dueling: bool, noisy: bool) -> None:
    """Dabney et al. (2018), https://arxiv.org/abs/1806.06923, equation 4."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 4)).astype(np.float32)
    fractions = rng.random((N, 6)).astype(np.float32)
    heads = q_heads(A, num_atoms=1, dueling=dueling, noisy=noisy, implicit=True)
    params = heads.init(jax.random.split(jax.random.key(0), heads.num_keys), x[:1])
    assert sum(leaf.shape == (COSINES, 4) for leaf in jax.tree.leaves(params)) == 1
    keys = jax.random.split(jax.random.key(1), N) if noisy else None
    (found,) = jax.jit(heads.apply)(params, x, keys, fractions)
    plain = q_heads(A, num_atoms=1, dueling=dueling, noisy=noisy)
    weights = jax.tree.map(np.float64, params["fractions"]["params"])
    for j in range(6):
        waves = np.cos(np.pi * np.arange(64) * fractions[:, j : j + 1])
        factors = np.maximum(waves @ weights["kernel"] + weights["bias"], 0)
        (expected,) = plain.apply(params, np.float32(x * factors), keys)
        np.testing.assert_allclose(found[:, :, j], expected[..., 0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[:, :, 6 + j], fractions[:, j : j + 1].repeat(A, 1))
    (middles,) = heads.apply(params, x, keys)
    assert middles.shape == (N, A, 2 * FRACTIONS)
    np.testing.assert_allclose(middles[0, 0, FRACTIONS:], (np.arange(32) + 0.5) / 32, rtol=1e-6)


@pytest.mark.parametrize("name", ["qrdqn", "iqn"])
def test_presets_choose_adams_epsilon_for_means_over_quantiles(name: str) -> None:
    """The papers' 0.01 / 32 is for sums; and no limit clips the gradient of the mean."""
    fields = PRESETS[name][1]
    assert fields["adam_epsilon"] * fields["num_atoms"] == pytest.approx(0.01 / 32)
    config = DQN(**fields, hidden_sizes=(64, 64))
    algorithm = config.make(SPEC)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    windows = random_rollout(algorithm, SPEC, 3, N)
    windows = windows._replace(reward=windows.reward + 50)  # each error is in the linear part

    def loss(params: Any) -> jax.Array:
        own = variables._replace(params=params)
        context = Context(jax.random.split(jax.random.key(1), N), target=variables.params)
        return algorithm.loss(own, algorithm.postprocess(own, windows, context), context)[0].mean()

    gradient = jax.jit(jax.grad(loss))(variables.params)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)))
    assert 0 < norm < 0.5 * config.max_gradient_norm


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"munchausen": 0.9, "rescale_values": True}, "munchausen does not work with rescale"),
        ({"munchausen": 0.9, "double": False}, "double.*does nothing without munchausen none"),
        ({"soft_temperature": 0.1}, "soft_temperature.*munchausen"),
        ({"num_atoms": 5, "quantiles": "fixed", "td_loss": "huber"}, "td_loss.*num.atoms 1"),
    ],
)
def test_combinations_without_effect_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DQN(**fields).validate()
