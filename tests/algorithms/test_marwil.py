"""MARWIL and behavioural cloning against float64 loops over the steps of windows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from probes import box, perturbed, random_rollout, spec

from jaxrl_dist.algorithms.bc import BC
from jaxrl_dist.algorithms.marwil import MARWIL
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import by_hand
from jaxrl_dist.nn import distributions, networks
from jaxrl_dist.spaces import Box
from jaxrl_dist.types import Context, Variables

LOW, HIGH = np.array([-1, 0], np.float32), np.array([3, 2], np.float32)
ENVS = {
    "continuous": spec(action=Box((2,), np.dtype(np.float32), LOW, HIGH)),
    "discrete": spec(),
    "unbounded": spec(action=box(2)),
}
T, N = 6, 24
NET: dict[str, Any] = {"hidden_sizes": (8,), "activation": "tanh", "discount": 0.9}
CONFIG = MARWIL(
    **NET, n_step=T, beta=1.5, max_weight=4.0, value_coefficient=0.7, entropy_coefficient=0.1
)


@functools.cache
def problem(kind: str, config: MARWIL = CONFIG) -> tuple[Any, ...]:
    """Windows over ends of episodes, the loss of parameters,
    and the policy and the values ``[T + 1, N]`` of these.
    """
    env = ENVS[kind]
    algorithm = config.make(env)
    assert algorithm.window == config.n_step
    params = perturbed(jax.jit(algorithm.init)(jax.random.key(0)).params)
    windows = random_rollout(algorithm, env, config.n_step, N, end_chance=0.3)._replace(
        core=(), final_core=()
    )
    batch = jax.jit(by_hand(algorithm.postprocess))(Variables(params, ()), windows, Context())

    @jax.jit
    def loss(params: Any) -> Any:
        return algorithm.loss(Variables(params, ()), batch, Context())

    head = distributions.policy_head(env.action)
    network = networks.actor_critic(
        config, env.observation, head.num_outputs, False, head.log_std_size
    )
    outputs = [network.step(params, obs, ()) for obs in windows.obs]
    policy = head.distribution(np.stack([x for x, _, _ in outputs])[:-1])
    return params, loss, windows, policy, np.float64([value for _, value, _ in outputs])


def returns_of(windows: Any, values: np.ndarray, discount: float) -> np.ndarray:
    """To the end of the episode; bootstrapped at a time limit and at the window's end."""
    found = np.zeros(windows.reward.shape)
    for n in range(N):
        for start in range(len(found)):
            factor = 1.0
            for t in range(start, len(found)):
                found[start, n] += factor * windows.reward[t, n]
                factor *= discount
                if windows.terminated[t, n] or windows.truncated[t, n]:
                    factor *= not windows.terminated[t, n]
                    break
            found[start, n] += factor * values[t + 1, n]
    return found


@pytest.mark.parametrize("kind", ENVS)
def test_losses(kind: str) -> None:
    """Environment-major, of every valid step of a window;
    the scale of advantages is that of all windows.
    """
    _, loss, w, policy, values = problem(kind)
    assert w.terminated[:-1].any() and w.truncated[:-1].any() and not w.valid.all()
    target = returns_of(w, values, CONFIG.discount)
    advantage = target - values[:-1]
    scale = np.sqrt((advantage[w.valid] ** 2).mean())
    weight = np.minimum(np.exp(1.5 * advantage / scale), 4.0)
    assert (weight[w.valid] == 4).any()
    value_loss = 0.5 * advantage**2
    policy_loss = -weight * np.float64(policy.log_prob(w.action))
    total = policy_loss + 0.7 * value_loss - 0.1 * np.float64(policy.entropy())
    found, mask, aux = loss(problem(kind)[0])
    np.testing.assert_array_equal(mask, w.valid.T)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    close(found.T[w.valid], total[w.valid])
    close(aux.metrics["loss/policy"].T[w.valid], policy_loss[w.valid])
    close(aux.metrics["loss/value"].T[w.valid], value_loss[w.valid])
    error = np.where(w.valid, np.abs(advantage), 0)
    close(aux.priority, error.sum(axis=0) / np.maximum(w.valid.sum(axis=0), 1))


def test_gradients_are_those_of_fixed_weights_and_targets() -> None:
    params, loss, w, _, values = problem("discrete")
    env, count = ENVS["discrete"], w.valid.sum()
    network = networks.actor_critic(CONFIG, env.observation, 3, False)
    target = returns_of(w, values, CONFIG.discount)
    advantage = target - values[:-1]
    weight = np.minimum(np.exp(1.5 * advantage / np.sqrt((advantage[w.valid] ** 2).mean())), 4.0)

    def expected(params: Any) -> Any:
        logits, value, _ = network.unroll(params, w.obs[:-1], (), w.valid)
        policy = distributions.Categorical(logits)
        losses = (
            -np.float32(weight) * policy.log_prob(w.action)
            + 0.35 * (value - np.float32(target)) ** 2
        )
        return ((losses - 0.1 * policy.entropy()) * w.valid).sum() / count

    def mean(params: Any) -> Any:
        losses, mask, _ = loss(params)
        return (losses * mask).sum() / count

    found, wanted = jax.jit(jax.grad(mean))(params), jax.jit(jax.grad(expected))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, wanted)


@pytest.mark.parametrize("kind", ENVS)
def test_bc_is_marwil_without_values(kind: str) -> None:
    """It computes none: the gradient is that of weights of 1, with values that weigh nothing."""
    sizes = {**NET, "n_step": T, "entropy_coefficient": 0.1}
    params, loss, w, policy, _ = problem(kind, BC(**sizes))
    losses, mask, aux = loss(params)
    np.testing.assert_array_equal(mask.T, w.valid)
    expected = -np.float64(policy.log_prob(w.action)) - 0.1 * np.float64(policy.entropy())
    np.testing.assert_allclose(losses.T[w.valid], expected[w.valid], rtol=1e-4, atol=1e-5)
    assert aux.priority is None and not any("value" in name for name in aux.metrics)

    # as those that vary are
    whole = MARWIL(**sizes, beta=np.float32(0), value_coefficient=np.float32(0))
    _, general, *_ = problem(kind, whole)
    found, wanted = (
        jax.grad(lambda params, f=f: (f(params)[0] * mask).sum())(params) for f in (loss, general)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)
    moved = {
        name for name, x in found.items() if any(np.any(leaf != 0) for leaf in jax.tree.leaves(x))
    }
    assert moved and not any("value" in name for name in moved)


def test_bc_has_no_priorities() -> None:
    with pytest.raises(ConfigError, match="without value_coefficient above 0"):
        BC(priority_exponent=0.5).validate()


CORE: dict[str, Any] = {"core": "gru", "core_size": 4, "core_inputs": "action,reward", "burn_in": 2}


@pytest.mark.parametrize("beta", [0.0, 1.5])
def test_a_core_starts_each_window_anew_and_learns_after_burn_in(beta: float) -> None:
    env = ENVS["discrete"]
    coefficients = {
        "beta": beta,
        "value_coefficient": beta,
        "entropy_coefficient": 0.0,
        "max_weight": 1e9,
    }
    config = MARWIL(**NET, **CORE, n_step=T, **coefficients)
    algorithm = config.make(env)
    assert algorithm.window == 2 + T
    params = perturbed(jax.jit(algorithm.init)(jax.random.key(0)).params)
    windows = random_rollout(algorithm, env, 2 + T, N, end_chance=0.3)._replace(
        core=(), final_core=(), extras={}
    )
    variables = Variables(params, ())
    batch = jax.jit(by_hand(algorithm.postprocess))(variables, windows, Context())
    total, mask, aux = jax.jit(algorithm.loss)(variables, batch, Context())
    wanted = windows.valid.T.copy()
    wanted[:, :2] = False
    np.testing.assert_array_equal(mask, wanted)

    log_prob, core = np.zeros((2 + T, N)), algorithm.initial_core(N)
    act = jax.jit(lambda obs, core: algorithm.policy(variables, obs, core, Context())[1])
    seen = jax.jit(
        lambda obs, core, action: algorithm.log_prob(variables, obs, core, action, Context())
    )
    for t in range(2 + T):  # as acting would, with the actions of the windows
        obs, action = windows.obs[t], windows.action[t]
        log_prob[t] = seen(obs, core, action)
        after = act(obs, core) | {
            "action": np.eye(3, dtype=np.float32)[action],
            "reward": windows.reward[t][:, None],
        }
        core = jax.tree.map(
            functools.partial(_unless_reset, windows.valid[t]), after, algorithm.initial_core(N)
        )
    expected = -log_prob.T * (np.asarray(batch["weight"]) if beta else 1.0)
    np.testing.assert_allclose(
        aux.metrics["loss/policy"][wanted], expected[wanted], rtol=2e-5, atol=2e-6
    )
    assert np.isfinite(total[wanted]).all()
    if beta:  # the values' error counts in units of the advantages that are learnt from
        advantage = np.log(np.asarray(batch["weight"])[wanted]) / beta
        assert np.mean(advantage**2) == pytest.approx(1.0, rel=1e-4)
        np.testing.assert_allclose(
            aux.metrics["loss/value"][wanted], 0.5 * advantage**2, rtol=1e-4, atol=1e-6
        )


def _unless_reset(valid: np.ndarray, after: np.ndarray, initial: np.ndarray) -> np.ndarray:
    return np.where(valid.reshape(-1, *(1,) * (np.ndim(after) - 1)), after, initial)


def test_with_a_core_n_step_is_the_length() -> None:
    with pytest.raises(ConfigError, match="sequence_length does nothing without another algorithm"):
        BC(core="gru", sequence_length=4).validate()
