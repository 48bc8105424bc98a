"""IMPALA and APPO against a naive V-trace in float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import acted, assert_close, perturbed, random_rollout, spec

from jaxrl_dist import mesh
from jaxrl_dist.algorithms.actor_critic import actor_critic
from jaxrl_dist.algorithms.appo import APPO
from jaxrl_dist.algorithms.impala import IMPALA
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.nn import networks
from jaxrl_dist.nn.cores import reset_core
from jaxrl_dist.types import Context, Rollout, Variables

SPEC = spec()
T, B = 9, 8
NET: dict[str, Any] = {"hidden_sizes": (8,), "core_size": 4, "discount": 0.9}


def naive_vtrace(
    rollout: Rollout,
    values: np.ndarray,
    rhos: np.ndarray,
    discount: float,
    decay: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Equation 1 of Espeholt et al. (2018) as the sum it is,
    and the advantages of section 4.2 without their rho.

    Both ``[T, B]``; the advantages mix ``vs`` and value of the successor by ``decay``,
    as rlax does.
    """
    vs = values[:-1].copy()
    ended = rollout.terminated | rollout.truncated
    bootstrap = np.where(rollout.terminated, 0.0, values[1:])
    error = rollout.reward + discount * bootstrap - values[:-1]
    for b in range(B):
        for s in range(T):
            weight = 1.0
            for t in range(s, T):
                if not rollout.valid[t, b]:
                    break
                vs[s, b] += weight * min(rho_bar, rhos[t, b]) * error[t, b]
                if ended[t, b]:
                    break
                weight *= discount * decay * min(c_bar, rhos[t, b])
    following = np.concatenate([vs[1:], values[-1:]])
    mixed = np.where(ended, bootstrap, decay * following + (1 - decay) * values[1:])
    return vs, rollout.reward + discount * mixed - values[:-1]


@functools.cache
def problem(config: Any) -> tuple[Any, Variables, Rollout, np.ndarray, np.ndarray]:
    """A rollout of another policy, and the logits
    ``[T, B, A]`` and values ``[T + 1, B]`` of this one.
    """
    algorithm = config.make(SPEC)
    variables = Variables(perturbed(algorithm.init(jax.random.key(0)).params), ())
    rollout = random_rollout(algorithm, SPEC, T, B)
    assert rollout.terminated.any() and rollout.truncated.any() and not rollout.valid.all()
    network = networks.actor_critic(config, SPEC.observation, 3, shared_torso=False)
    step, core, logits, values = jax.jit(network.step), rollout.core, [], []
    for obs, valid in zip(rollout.obs, [*rollout.valid, rollout.valid[0]], strict=True):
        outputs, value, core = step(variables.params, obs, core)
        core = reset_core(core, network.initial_core(B), valid)
        logits.append(np.asarray(outputs, np.float64))
        values.append(np.asarray(value, np.float64))
    return algorithm, variables, rollout, np.stack(logits[:-1]), np.stack(values)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            IMPALA(**NET, trace_lambda=0.8, clip_rho=1.3, clip_c=0.9), marks=pytest.mark.case
        ),
        IMPALA(**NET, core="gru", clip_rho=1.3, clip_c=0.9),
        IMPALA(**NET, trace_lambda=0.8, correction=False),
    ],
    ids=["plain", "gru", "uncorrected"],
)
def test_impala_loss(config: IMPALA) -> None:
    """Value for value, and the gradient is that of the naive loss with its targets held fixed."""
    algorithm, variables, w, logits, values = problem(config)

    @jax.jit
    def losses(params: Any, w: Rollout) -> Any:
        batch = algorithm.postprocess(variables._replace(params=params), w, Context())
        return algorithm.loss(Variables(params, ()), batch, Context())

    found, mask, aux = losses(variables.params, w)
    np.testing.assert_array_equal(mask, w.valid.T)
    log_probs = log_softmax(logits)
    log_prob = np.take_along_axis(log_probs, w.action[..., None], axis=-1)[..., 0]
    rhos = np.exp(log_prob - w.extras["log_prob"]) if config.correction else np.ones((T, B))
    if config.correction:
        assert (rhos[w.valid] > config.clip_rho).any() and (rhos[w.valid] < config.clip_c).any()
    vs, advantage = naive_vtrace(
        w, values, rhos, config.discount, config.trace_lambda, config.clip_rho, config.clip_c
    )
    advantage = np.minimum(rhos, config.clip_rho) * advantage
    entropy = -(np.exp(log_probs) * log_probs).sum(axis=-1)
    expected = -log_prob * advantage + 0.25 * (vs - values[:-1]) ** 2 - 0.01 * entropy
    np.testing.assert_allclose(found.T[w.valid], expected[w.valid], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        aux.metrics["policy/importance"].T[w.valid], rhos[w.valid], rtol=1e-4
    )

    net = actor_critic(config, SPEC)

    def fixed(params: Any) -> jax.Array:
        distribution, values = net.unroll(params, w)
        error = 0.5 * config.value_coefficient * jnp.square(vs - values[:-1])
        policy = (
            -distribution.log_prob(w.action) * advantage
            - config.entropy_coefficient * distribution.entropy()
        )
        return jnp.where(w.valid, policy + error, 0.0).sum()

    gradient = jax.jit(jax.grad(lambda params: jnp.where(mask, losses(params, w)[0], 0.0).sum()))(
        variables.params
    )
    assert_close(gradient, jax.jit(jax.grad(fixed))(variables.params), 1e-4)

    other, _, _ = losses(
        variables.params, w._replace(extras={**w.extras, "log_prob": w.extras["log_prob"] - 1})
    )
    assert np.array_equal(other, found) != config.correction


@pytest.mark.parametrize("core", ["none", "gru"])
def test_appo_estimates(core: str) -> None:
    config = APPO(**NET, core=core, clip_rho=1.3, clip_c=0.9, normalize_advantages=False)
    algorithm, variables, w, logits, values = problem(config)
    log_prob = np.take_along_axis(log_softmax(logits), w.action[..., None], axis=-1)[..., 0]
    rhos = np.exp(log_prob - w.extras["log_prob"])
    vs, advantage = naive_vtrace(
        w, values, rhos, config.discount, config.gae_lambda, config.clip_rho, config.clip_c
    )
    batch = mesh.by_hand(algorithm.postprocess)(variables, w, Context())
    for name, expected in {"advantage": advantage, "value_target": vs}.items():
        found = np.asarray(batch[name]).reshape(B, T).T
        np.testing.assert_allclose(found[w.valid], expected[w.valid], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_on_policy_appo_is_ppo(core: str) -> None:
    appo = APPO(**NET, core=core)
    ppo = PPO(**{f.name: getattr(appo, f.name) for f in dataclasses.fields(PPO)})
    algorithm, variables, w, _, _ = problem(appo)
    w = acted(algorithm, variables, w)
    for found, expected in zip(
        appo.estimate(actor_critic(appo, SPEC), variables, w),
        ppo.estimate(actor_critic(ppo, SPEC), variables, w),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
