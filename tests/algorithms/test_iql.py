"""Implicit Q-learning against float64 arithmetic on what its networks put out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import perturbed, random_rollout, spec, window_return

from jaxrl_dist.algorithms.iql import IQL
from jaxrl_dist.learners import sgd
from jaxrl_dist.nn import networks
from jaxrl_dist.spaces import Box
from jaxrl_dist.types import Context, EnvSpec, Rollout, Variables

LOW, HIGH = np.array([-1, 0], np.float32), np.array([3, 2], np.float32)
ENVS = {"continuous": spec(action=Box((2,), np.dtype(np.float32), LOW, HIGH)), "discrete": spec()}
N = 32
CONFIG = IQL(
    hidden_sizes=(8,),
    activation="tanh",
    discount=0.9,
    n_step=2,
    expectile=0.8,
    beta=2.0,
    max_weight=3.0,
)


class Outputs:
    """What the networks say of ``N`` windows, in float64."""

    def __init__(self, env: EnvSpec, params: Any, target: Any, windows: Rollout) -> None:
        discrete = env is ENVS["discrete"]
        size: dict[str, int] = {"num_actions": 3} if discrete else {"action_size": 2}
        critic = networks.critic_network(CONFIG, env.observation, 2, **size)
        value = networks.critic_network(CONFIG, env.observation, 1)
        actor = networks.policy_network(CONFIG, env.observation, 3 if discrete else 2)
        obs, action = windows.obs[0], windows.action[0]
        scaled = (action - LOW) / (HIGH - LOW) * 2 - 1 if not discrete else action
        rows = np.array([window_return(windows, i, CONFIG.discount) for i in range(N)])

        def q(params: Any) -> np.ndarray:
            if discrete:
                return np.float64(critic.apply(params, obs))[:, np.arange(N), action]
            return np.float64(critic.apply(params, obs, np.clip(scaled, -1, 1)))

        self.v = np.float64(value.apply(params["value"], obs))[0, :, 0]
        next_obs = windows.obs[rows[:, 2].astype(int) + 1, np.arange(N)]
        self.y = (
            rows[:, 0] + rows[:, 1] * np.float64(value.apply(params["value"], next_obs))[0, :, 0]
        )
        self.q, self.target_q = q(params["critic"]), q(target).min(axis=0)
        outputs = np.float64(actor.apply(params["actor"], obs))
        if discrete:
            self.log_prob = (outputs - np.log(np.exp(outputs).sum(axis=1, keepdims=True)))[
                np.arange(N), action
            ]
        else:
            std = np.exp(np.clip(np.float64(params["log_std"]), -5, 2))
            z = (scaled - np.tanh(outputs)) / std
            self.log_prob = (
                -0.5 * z**2 - np.log(std * (HIGH - LOW) / 2) - 0.5 * np.log(2 * np.pi)
            ).sum(axis=1)


@functools.cache
def problem(kind: str) -> tuple[Any, ...]:
    """Parameters away from their start, the loss of parameters, and what the networks say."""
    env = ENVS[kind]
    algorithm = CONFIG.make(env)
    params = algorithm.init(jax.random.key(0)).params
    target, params = perturbed(algorithm.initial_target(params), 1), perturbed(params, 2)
    if kind == "continuous":
        params["log_std"] = np.float32([0.3, -9])  # of which the second is out of bounds
    windows = random_rollout(algorithm, env, CONFIG.n_step, N, end_chance=0.4)
    if kind == "continuous":
        windows = windows._replace(
            action=windows.action * np.float32([6, 0.004]) + np.float32([1, 1.1])
        )
        assert (windows.action > HIGH).any(), (
            "as a policy of normal actions that the environment clips"
        )
    keys = jax.random.split(jax.random.key(3), N)

    @jax.jit
    def loss(params: Any) -> Any:
        variables, context = Variables(params, ()), Context(keys, target=target)
        return algorithm.loss(
            variables, algorithm.postprocess(variables, windows, context), context
        )

    return params, loss, windows, Outputs(env, params, target, windows)


@pytest.mark.parametrize("kind", ENVS)
def test_losses(kind: str) -> None:
    params, loss, windows, x = problem(kind)
    u = x.target_q - x.v
    losses = {
        "loss/value": np.where(u < 0, 0.2, 0.8) * u**2,
        "loss/critic": ((x.q - x.y) ** 2).sum(axis=0),
        "policy/weight": np.minimum(np.exp(2.0 * u), 3.0),
        "loss/actor": -np.minimum(np.exp(2.0 * u), 3.0) * x.log_prob,
    }
    assert (losses["policy/weight"] == 3).any() and (losses["policy/weight"] < 1).any()
    found, mask, aux = loss(params)
    np.testing.assert_array_equal(mask, windows.valid[0])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    for name, expected in losses.items():
        close(aux.metrics[name], expected, err_msg=name)
    close(aux.priority, np.abs(x.q - x.y).mean(axis=0))
    close(found, losses["loss/value"] + losses["loss/critic"] + losses["loss/actor"])


@pytest.mark.parametrize("kind", ENVS)
def test_each_loss_moves_its_own_networks_only(kind: str) -> None:
    params, loss, _, _ = problem(kind)
    gradients = jax.jit(
        jax.jacrev(lambda params: {k: x.mean() for k, x in loss(params)[2].metrics.items()})
    )(params)
    moved = {
        loss: {
            group
            for group, slopes in gradient.items()
            if any(np.any(x != 0) for x in jax.tree.leaves(slopes))
        }
        for loss, gradient in gradients.items()
    }
    own = {"actor", "log_std"} & params.keys()
    assert (
        moved["loss/value"] == {"value"}
        and moved["loss/critic"] == {"critic"}
        and moved["loss/actor"] == own
    )
    whole = jax.jit(jax.grad(lambda params: loss(params)[0].mean()))(params)
    for group, (name,) in {
        "value": ["loss/value"],
        "critic": ["loss/critic"],
        "actor": ["loss/actor"],
    }.items():
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            whole[group],
            gradients[name][group],
        )


def test_it_prefers_the_better_actions_of_its_data() -> None:
    """Of 0 and 1, which the data has alike, the second pays; nothing is known of 2,
    which it avoids.
    """
    algorithm = IQL(
        hidden_sizes=(8,),
        learning_rate=0.01,
        actor_learning_rate=0.01,
        target_rate=0.1,
        discount=0.0,
    ).make(spec())
    rng = np.random.default_rng(0)
    obs, action = (
        rng.standard_normal((2, N, 3)).astype(np.float32),
        rng.integers(2, size=(1, N)).astype(np.int32),
    )
    none = np.zeros((1, N), bool)
    windows = Rollout(obs, action, np.float32(action), ~none, none, ~none, {}, (), ())

    @jax.jit
    def trained(state: Any) -> Any:
        def update(_: Any, state: Any) -> Any:
            batch = algorithm.postprocess(state.variables, windows, state.context())
            context = state.context(jax.random.split(jax.random.key(0), N))
            grads = jax.grad(
                lambda params: algorithm.loss(
                    state.variables._replace(params=params), batch, context
                )[0].mean()
            )(state.variables.params)
            return sgd.apply(algorithm, state, grads)

        return jax.lax.fori_loop(0, 300, update, state)

    variables = trained(sgd.init(algorithm, jax.random.key(0))).variables
    assert algorithm.log_prob is not None
    log_probs = [
        algorithm.log_prob(variables, obs[0], (), jnp.full(N, action), Context()).mean()
        for action in range(3)
    ]
    assert np.exp(log_probs[1]) > 0.8 and np.exp(log_probs[2]) < 0.05
