"""Soft actor-critic against float64 arithmetic on what its networks put out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from probes import perturbed, random_rollout, spec, window_return

from jaxrl_dist.algorithms.sac import SAC
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners import sgd
from jaxrl_dist.nn import networks
from jaxrl_dist.spaces import Box
from jaxrl_dist.types import Algorithm, Aux, Context, EnvSpec, Rollout, Variables

LOW, HIGH = np.array([-1, 0], np.float32), np.array([3, 2], np.float32)
CONTINUOUS, DISCRETE = spec(action=Box((2,), np.dtype(np.float32), LOW, HIGH)), spec()
N = 32
NET: dict[str, Any] = {"hidden_sizes": (8,), "activation": "tanh", "discount": 0.9}


class Problem(NamedTuple):
    """Parameters away from their start, other targets,
    and windows of which some run over an episode's end.
    """

    algorithm: Algorithm
    params: Any
    target: Any
    windows: Rollout
    keys: jax.Array
    loss: Callable[[Any], tuple[jax.Array, jax.Array, Aux]]


@functools.cache
def problem(config: SAC, env: EnvSpec) -> Problem:
    algorithm = config.make(env)
    params = jax.jit(algorithm.init)(jax.random.key(0)).params
    target, params = perturbed(algorithm.initial_target(params), 1), perturbed(params, 2)
    plain = dataclasses.replace(config, cql_floor=False).make(env)
    windows = random_rollout(plain, env, config.n_step, N, end_chance=0.4)
    if config.cql_floor:
        returned = np.random.default_rng(4).normal(size=windows.reward.shape).astype(np.float32)
        windows = windows._replace(extras={"return": returned})
    assert windows.terminated.any() and windows.truncated.any() and not windows.valid[0].all()
    keys = jax.random.split(jax.random.key(3), N)

    @jax.jit
    def loss(params: Any) -> tuple[jax.Array, jax.Array, Aux]:
        variables = Variables(params, ())
        context = Context(keys, target=target)
        return jax.jit(algorithm.loss)(
            variables, algorithm.postprocess(variables, windows, context), context
        )

    return Problem(algorithm, params, target, windows, keys, loss)


def check(
    p: Problem,
    discount: float,
    expect: Callable[..., Any],
    taken: np.ndarray,
    target_entropy: float,
) -> None:
    """The losses of ``p``, given the naive expectation
    ``(critic params, obs, keys) -> (value, entropy)``.
    """
    w, alpha = p.windows, np.exp(np.float64(p.params["log_temperature"]))
    next_keys, keys = np.moveaxis(jax.vmap(jax.random.split)(p.keys), 1, 0)
    reward, bootstrap, last = np.array([window_return(w, i, discount) for i in range(N)]).T
    value, entropy = expect(p.target, w.obs[last.astype(int) + 1, np.arange(N)], next_keys)
    error = taken - (reward + bootstrap * (value + alpha * entropy))
    critic_loss = 0.5 * (error**2).sum(axis=0)
    value, entropy = expect(p.params["critic"], w.obs[0], keys)
    actor_loss = -value - alpha * entropy
    found, mask, aux = p.loss(p.params)
    np.testing.assert_array_equal(mask, w.valid[0])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    close(aux.metrics["loss/critic"], critic_loss)
    close(aux.metrics["loss/actor"], actor_loss)
    close(aux.metrics["policy/entropy"], entropy)
    close(aux.priority, np.abs(error).mean(axis=0))
    temperature_loss = p.params["log_temperature"] * (entropy - target_entropy)
    close(found, critic_loss + actor_loss + temperature_loss)


@pytest.mark.parametrize("n", [1, 3])
def test_continuous_losses(n: int) -> None:
    config = SAC(**NET, n_step=n)
    p = problem(config, CONTINUOUS)
    actor = networks.policy_network(config, CONTINUOUS.observation, 4)
    critic = networks.critic_network(config, CONTINUOUS.observation, 2, action_size=2)

    def q(params: Any, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
        return np.asarray(critic.apply(params, obs, np.asarray(action, np.float32)), np.float64)

    def expect(params: Any, obs: np.ndarray, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        mean, raw = np.split(
            np.asarray(actor.apply(p.params["actor"], obs), np.float64), 2, axis=-1
        )
        log_std = -5 + 7 * (np.tanh(raw) + 1) / 2
        noise = np.stack([jax.random.normal(key, (2,)) for key in keys])
        squashed = np.tanh(mean + np.exp(log_std) * noise)
        density = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - squashed**2)
        return q(params, obs, squashed).min(axis=0), -density.sum(axis=-1)

    taken = q(
        p.params["critic"], p.windows.obs[0], (p.windows.action[0] - LOW) / (HIGH - LOW) * 2 - 1
    )
    check(p, config.discount, expect, taken, target_entropy=-2)


@pytest.mark.parametrize("target_entropy", [0.7, None])
def test_discrete_losses(target_entropy: float | None) -> None:
    """The default aims at half the entropy of random actions."""
    config = SAC(**NET, n_step=2, target_entropy=target_entropy)
    p = problem(config, DISCRETE)
    actor = networks.policy_network(config, DISCRETE.observation, 3)
    critic = networks.critic_network(config, DISCRETE.observation, 2, num_actions=3)

    def expect(params: Any, obs: np.ndarray, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        logits = np.asarray(actor.apply(p.params["actor"], obs), np.float64)
        probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        q = np.asarray(critic.apply(params, obs), np.float64).min(axis=0)
        return (probs * q).sum(axis=-1), -(probs * np.log(probs)).sum(axis=-1)

    taken = np.asarray(critic.apply(p.params["critic"], p.windows.obs[0]), np.float64)
    check(
        p,
        config.discount,
        expect,
        taken[:, np.arange(N), p.windows.action[0]],
        target_entropy or 0.5 * np.log(3),
    )


def expected_critic_loss(outputs: np.ndarray, z: np.ndarray, shares: np.ndarray) -> float:
    """Half the losses of one example's critics ``[C, size]``: Kuznetsov et al. (2020), equations 7
    and 8; with one output, the squared error of the mean.
    """
    size = outputs.shape[1]
    if size == 1:
        return float(0.5 * ((outputs[:, 0] - np.dot(z, shares)) ** 2).sum())
    total = 0.0
    for critic in outputs:
        for i, theta in enumerate(critic):
            for one, share in zip(z, shares, strict=True):
                u = one - theta
                huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                total += share * abs((i + 0.5) / size - (u < 0)) * huber / size
    return 0.5 * total


VARIANTS: dict[str, dict[str, Any]] = {
    "tqc": {"num_critics": 3, "num_atoms": 5, "quantiles": "fixed", "drop_quantiles": 2},
    "redq": {"num_critics": 5, "target_critics": 2},
    "tqc-redq": {"num_critics": 4, "target_critics": 2, "num_atoms": 5, "quantiles": "fixed"},
}


@pytest.mark.parametrize("env", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("name", VARIANTS)
def test_targets_of_several_critics(name: str, env: EnvSpec) -> None:
    """Truncated pools of quantiles, and the least of some critics, which each example draws; the
    actor climbs the mean of all critics and all quantiles.
    """
    config = SAC(**NET, **VARIANTS[name], n_step=2)
    p = problem(config, env)
    w, alpha = p.windows, np.exp(np.float64(p.params["log_temperature"]))
    kind: dict[str, Any] = {"action_size": 2} if env is CONTINUOUS else {"num_actions": 3}
    outputs = 4 if env is CONTINUOUS else 3
    actor = networks.policy_network(config, env.observation, outputs)
    critic = networks.critic_network(
        config, env.observation, config.num_critics, **kind, num_atoms=config.num_atoms
    )
    next_keys, keys = np.moveaxis(jax.vmap(jax.random.split)(p.keys), 1, 0)

    def foresee(params: Any, obs: np.ndarray, keys: Any) -> tuple[Any, ...]:
        """Outputs ``[C, N, A, size]``, probabilities ``[N, A]`` and entropies ``[N]``; the only
        action is the one drawn if actions are continuous."""
        raw = np.asarray(actor.apply(p.params["actor"], obs), np.float64)
        if env is DISCRETE:
            probs = np.exp(raw) / np.exp(raw).sum(axis=-1, keepdims=True)
            found = np.asarray(critic.apply(params, obs), np.float64)
            return found, probs, -(probs * np.log(probs)).sum(axis=-1)
        mean, raw = np.split(raw, 2, axis=-1)
        log_std = -5 + 7 * (np.tanh(raw) + 1) / 2
        noise = np.stack([jax.random.normal(key, (2,)) for key in keys])
        action = np.tanh(mean + np.exp(log_std) * noise)
        density = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - action**2)
        found = np.asarray(critic.apply(params, obs, np.float32(action)), np.float64)
        return found[:, :, None], np.ones((N, 1)), -density.sum(axis=-1)

    reward, bootstrap, last = np.array([window_return(w, i, config.discount) for i in range(N)]).T
    next_obs = w.obs[last.astype(int) + 1, np.arange(N)]
    ahead, weights, next_entropy = foresee(p.target, next_obs, next_keys)
    if env is CONTINUOUS:
        inputs = (w.obs[0], np.float32((w.action[0] - LOW) / (HIGH - LOW) * 2 - 1))
        taken = np.asarray(critic.apply(p.params["critic"], *inputs), np.float64)
    else:
        every = np.asarray(critic.apply(p.params["critic"], w.obs[0]), np.float64)
        taken = every[:, np.arange(N), w.action[0]]
    now, probs, entropy = foresee(p.params["critic"], w.obs[0], keys)
    _, _, aux = p.loss(p.params)
    drawn = set()
    for n in range(N):
        used = np.arange(config.num_critics)
        if config.target_critics is not None:
            key = jax.random.fold_in(next_keys[n], 3)
            used = np.asarray(jax.random.permutation(key, config.num_critics)[:2])
            drawn.add(tuple(sorted(used)))
        z, shares = [], []
        for action, weight in enumerate(weights[n]):
            pool = np.sort(ahead[used, n, action].ravel())
            kept = (
                pool[:1] if config.num_atoms == 1 else pool[: len(pool) - 2 * 3 * (name == "tqc")]
            )
            soft = reward[n] + bootstrap[n] * (kept + alpha * next_entropy[n])
            z += [*soft]
            shares += [weight / len(kept)] * len(kept)
        loss = expected_critic_loss(taken[:, n], np.array(z), np.array(shares))
        np.testing.assert_allclose(aux.metrics["loss/critic"][n], loss, rtol=1e-3, atol=1e-4)
        error = np.abs(taken[:, n].mean(axis=-1) - np.dot(z, shares)).mean()
        np.testing.assert_allclose(aux.priority[n], error, rtol=1e-3, atol=1e-4)
        climbed = np.dot(probs[n], now[:, n].mean(axis=(0, -1)))
        actor_loss = -climbed - alpha * entropy[n]
        np.testing.assert_allclose(aux.metrics["loss/actor"][n], actor_loss, rtol=1e-3, atol=1e-4)
    assert name == "tqc" or len(drawn) > 3


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"drop_quantiles": 2}, "drop_quantiles.*quantiles fixed"),
        ({"num_atoms": 5, "quantiles": "fixed", "drop_quantiles": 5}, "drop_quantiles 5 leaves"),
        ({"num_atoms": 5, "quantiles": "fixed", "drop_quantiles": -1}, "drop_quantiles.*>= 0"),
        ({"num_atoms": 5, "quantiles": "implicit"}, "quantiles implicit.*use quantiles fixed"),
        ({"num_critics": 3, "target_critics": 4}, "target_critics 4 is more than num_critics 3"),
    ],
)
def test_sizes_of_critics_that_do_not_fit_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SAC(**fields).validate()


@pytest.mark.parametrize("env", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_each_loss_moves_its_own_parameters_only(env: EnvSpec) -> None:
    """And by its slope along a random direction, so no gradient is cut off that belongs there."""
    p = problem(SAC(**NET, n_step=2, target_entropy=0.7), env)

    @jax.jit
    def parts(params: Any) -> dict[str, jax.Array]:
        found, _, aux = p.loss(params)
        critic, actor = aux.metrics["loss/critic"], aux.metrics["loss/actor"]
        losses = {"critic": critic, "actor": actor, "log_temperature": found - critic - actor}
        return {name: x.mean() for name, x in losses.items()}

    gradients = jax.jit(jax.jacrev(parts))(p.params)
    rng = np.random.default_rng(0)
    for part, gradient in gradients.items():
        for group, slopes in gradient.items():
            assert all(np.any(x != 0) == (group == part) for x in jax.tree.leaves(slopes)), (
                part,
                group,
            )
        direction = jax.tree.map(
            lambda x: 1e-3 * rng.standard_normal(x.shape).astype(x.dtype), p.params[part]
        )
        ahead, behind = (
            parts(
                p.params
                | {part: jax.tree.map(lambda x, d: x + sign * d, p.params[part], direction)}
            )[part]
            for sign in (1, -1)
        )
        slope = sum(
            jax.tree.leaves(jax.tree.map(lambda g, d: np.vdot(g, d), gradient[part], direction))
        )
        np.testing.assert_allclose((ahead - behind) / 2, slope, rtol=0.02)


def test_a_fixed_temperature_stays() -> None:
    p = problem(SAC(**NET, temperature=0.3), CONTINUOUS)
    assert jax.jit(p.algorithm.init)(jax.random.key(0)).params["log_temperature"] == pytest.approx(
        np.log(0.3)
    )
    gradient = jax.grad(lambda params: p.loss(params)[0].sum())(p.params)
    assert gradient["log_temperature"] == 0 and np.any(
        gradient["actor"]["head"]["params"]["kernel"] != 0
    )


def test_an_update_moves_each_group_at_its_own_rate() -> None:
    """The first step of Adam is the step size, and the targets follow the critics only."""
    config = SAC(**NET, learning_rate=1e-2, actor_learning_rate=1e-3, target_rate=0.1)
    algorithm = config.make(CONTINUOUS)
    state = sgd.init(algorithm, jax.random.key(0))
    after = jax.jit(functools.partial(sgd.apply, algorithm))(
        state, jax.tree.map(jnp.ones_like, state.variables.params)
    )
    before, params = state.variables.params, after.variables.params
    for group, rate in {"critic": 1e-2, "log_temperature": 1e-2, "actor": 1e-3}.items():
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(b - a, rate, atol=1e-6),
            params[group],
            before[group],
        )
    expected = jax.tree.map(
        lambda new, old: 0.1 * new + 0.9 * old, params["critic"], before["critic"]
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after.target, expected)


@pytest.mark.parametrize("floor", runs.cases([False, True], True))
@pytest.mark.parametrize("env", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_conservative_term(env: EnvSpec, floor: bool) -> None:
    """It is added to the loss and moves the critics only;
    of discrete actions it is the sum over all.
    """
    p, plain = problem(SAC(**NET, cql_weight=0.7, cql_floor=floor), env), problem(SAC(**NET), env)
    (found, _, aux), (before, _, _) = p.loss(p.params), jax.jit(plain.loss)(p.params)
    np.testing.assert_allclose(found, before + 0.7 * aux.metrics["loss/cql"], rtol=1e-4, atol=1e-4)
    slopes = jax.jit(jax.grad(lambda params: p.loss(params)[2].metrics["loss/cql"].sum()))(p.params)
    assert {
        name for name, x in slopes.items() if any(np.any(leaf != 0) for leaf in jax.tree.leaves(x))
    } == {"critic"}
    if env is DISCRETE:
        critic = networks.critic_network(SAC(**NET), env.observation, 2, num_actions=3)
        q = np.float64(critic.apply(p.params["critic"], p.windows.obs[0]))
        known = np.maximum(q, p.windows.extras["return"][0][:, None]) if floor else q
        gap = np.log(np.exp(known).sum(axis=-1)) - q[:, np.arange(N), p.windows.action[0]]
        np.testing.assert_allclose(aux.metrics["loss/cql"], gap.sum(axis=0), rtol=1e-4, atol=1e-5)
        if floor:
            actor = networks.policy_network(SAC(**NET), env.observation, 3)
            probs = jax.nn.softmax(actor.apply(p.params["actor"], p.windows.obs[0]))
            below = (probs * q.min(axis=0)).sum(axis=-1) < p.windows.extras["return"][0]
            np.testing.assert_array_equal(aux.metrics["q/floored"], below)
            assert 0 < below.mean() < 1


@pytest.mark.parametrize("floor", [False, True])
def test_conservative_draws_are_weighted_by_their_densities(floor: bool) -> None:
    """A loop over 10 uniform actions, 10 of the policy,
    and 10 of the policy at the next observation.
    """
    config = SAC(**NET, cql_weight=0.7, cql_floor=floor)
    p = problem(config, CONTINUOUS)
    actor = networks.policy_network(config, CONTINUOUS.observation, 4)
    critic = networks.critic_network(config, CONTINUOUS.observation, 2, action_size=2)
    aux, w, terms = p.loss(p.params)[2], p.windows, []
    keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, 2), 30))(p.keys)
    for k in range(30):
        if k < 10:
            action = np.stack([jax.random.uniform(key, (2,), minval=-1) for key in keys[:, k]])
            density = np.full(N, -2 * np.log(2))
        else:
            _, _, last = np.array([window_return(w, i, config.discount) for i in range(N)]).T
            obs = w.obs[0] if k < 20 else w.obs[last.astype(int) + 1, np.arange(N)]
            mean, raw = np.split(np.float64(actor.apply(p.params["actor"], obs)), 2, axis=-1)
            log_std = -5 + 7 * (np.tanh(raw) + 1) / 2
            noise = np.stack([jax.random.normal(key, (2,)) for key in keys[:, k]])
            action = np.tanh(mean + np.exp(log_std) * noise)
            density = (
                -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - action**2)
            ).sum(axis=-1)
        q = np.float64(critic.apply(p.params["critic"], w.obs[0], np.float32(action)))
        if floor and k >= 10:
            q = np.maximum(q, w.extras["return"][0])
        terms.append(q - density)
    taken = np.float64(
        jax.jit(critic.apply)(
            p.params["critic"], w.obs[0], (w.action[0] - LOW) / (HIGH - LOW) * 2 - 1
        )
    )
    expected = (np.log(np.exp(terms).sum(axis=0)) - taken).sum(axis=0)
    np.testing.assert_allclose(aux.metrics["loss/cql"], expected, rtol=1e-3, atol=1e-3)
