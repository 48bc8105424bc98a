"""TD3 and DDPG against float64 arithmetic on what their networks put out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
from probes import perturbed, random_rollout, spec, window_return

from jaxrl_dist.algorithms.ddpg import DDPG
from jaxrl_dist.algorithms.td3 import TD3
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners import sgd
from jaxrl_dist.mesh import by_hand
from jaxrl_dist.nn import networks
from jaxrl_dist.spaces import Box
from jaxrl_dist.types import Context, Variables

LOW, HIGH = np.array([-1, 0], np.float32), np.array([3, 2], np.float32)
ENV = spec(action=Box((2,), np.dtype(np.float32), LOW, HIGH))
N = 32
NET: dict[str, Any] = {"hidden_sizes": (8,), "activation": "tanh", "discount": 0.9}
CONFIGS = {
    "td3": TD3(**NET, target_noise=0.5, target_noise_clip=0.4),
    "td3-n-step": TD3(**NET, n_step=3, num_critics=3, target_noise=0.8),
    "ddpg": DDPG(**NET, n_step=2),
    "td3+bc": TD3(**NET, behaviour_weight=0.4, normalize_q=True),
    "rebrac": TD3(
        **NET,
        n_step=2,
        behaviour_weight=0.3,
        behaviour_penalty="rebrac",
        critic_behaviour_weight=0.5,
        normalize_q=True,
        critic_layer_norm=True,
    ),
}


DISTRIBUTIONS = {
    "d4pg": DDPG(**NET, n_step=2, num_atoms=5, value_min=-2.0, value_max=2.0),
    "categorical": TD3(**NET, target_noise=0.0, num_atoms=5, value_min=-2.0, value_max=2.0),
    "quantiles": TD3(
        **NET, target_noise=0.0, num_critics=3, num_atoms=5, quantiles="fixed", drop_quantiles=1
    ),
}
CONFIGS |= DISTRIBUTIONS


@functools.cache
def problem(name: str) -> tuple[Any, ...]:
    """Parameters away from their start, other targets, windows over ends of episodes, keys,
    and the loss of params.
    """
    config = CONFIGS[name]
    algorithm = config.make(ENV)
    params = algorithm.init(jax.random.key(0)).params
    target, params = perturbed(algorithm.initial_target(params), 1), perturbed(params, 2)
    assert algorithm.window == config.n_step + (name == "rebrac")
    windows = random_rollout(algorithm, ENV, algorithm.window, N, end_chance=0.4)._replace(
        core=(), final_core=()
    )
    assert windows.terminated.any() and windows.truncated.any() and not windows.valid[0].all()
    keys = jax.random.split(jax.random.key(3), N)

    @jax.jit
    def loss(params: Any) -> Any:
        variables = Variables(params, ())
        context = Context(keys, target=target)
        return algorithm.loss(
            variables, by_hand(algorithm.postprocess)(variables, windows, Context()), context
        )

    return config, params, target, windows, keys, loss


def networks_of(config: TD3) -> tuple[networks.Network, networks.Network]:
    actor = networks.policy_network(config, ENV.observation, 2)
    config = dataclasses.replace(config, layer_norm=config.critic_layer_norm)
    return actor, networks.critic_network(
        config, ENV.observation, config.num_critics, action_size=2
    )


def best_action(config: TD3, params: Any, obs: np.ndarray) -> np.ndarray:
    return np.tanh(np.asarray(networks_of(config)[0].apply(params["actor"], obs), np.float64))


def q_values(config: TD3, params: Any, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    critic = networks_of(config)[1]
    return np.asarray(
        critic.apply(params["critic"], obs, np.asarray(action, np.float32)), np.float64
    )


def scaled(action: np.ndarray) -> np.ndarray:
    return (action - LOW) / (HIGH - LOW) * 2 - 1


@functools.cache
def td_error(name: str) -> np.ndarray:
    """The errors ``[num_critics, N]``."""
    config, params, target, w, keys, _ = problem(name)
    steps = jax.tree.map(lambda x: x[: config.n_step], w)
    reward, bootstrap, last = np.array(
        [window_return(steps, i, config.discount) for i in range(N)]
    ).T
    next_obs = w.obs[last.astype(int) + 1, np.arange(N)]
    next_action = best_action(config, target, next_obs)
    if name != "ddpg":
        noise = config.target_noise * np.stack([jax.random.normal(key, (2,)) for key in keys])
        clip = config.target_noise_clip
        blurred = next_action + np.clip(noise, -clip, clip)
        assert (np.abs(noise) > clip).any() and (np.abs(blurred) > 1).any()
        next_action = np.clip(blurred, -1, 1)
    next_q = q_values(config, target, next_obs, next_action).min(axis=0)
    if name == "rebrac":
        for i, t in enumerate(last.astype(int)):
            if not (w.terminated[t, i] or w.truncated[t, i]):
                next_q[i] -= (
                    0.5 * ((next_action[i] - scaled(w.action[t + 1, i])) ** 2).sum() * w.valid[0, i]
                )
    return q_values(config, params, w.obs[0], scaled(w.action[0])) - (reward + bootstrap * next_q)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_losses_of_distributions(name: str) -> None:
    """Each critic fits the least critic's atoms, or the least quantiles of all; the actor climbs
    the mean of the first.
    """
    config, params, target, w, _, loss = problem(name)
    count = config.num_critics
    critic = networks.critic_network(config, ENV.observation, count, action_size=2, num_atoms=5)
    atoms = np.linspace(-2, 2, 5)

    def outputs(params: Any, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
        return np.asarray(critic.apply(params["critic"], obs, np.float32(action)), np.float64)

    def probs(x: np.ndarray) -> np.ndarray:
        return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)

    returned = [window_return(w, i, config.discount) for i in range(N)]
    reward, discount, last = np.array(returned).T
    next_obs = w.obs[last.astype(int) + 1, np.arange(N)]
    ahead = outputs(target, next_obs, best_action(config, target, next_obs))
    taken = outputs(params, w.obs[0], scaled(w.action[0]))
    climbed = outputs(params, w.obs[0], best_action(config, params, w.obs[0]))[0]
    _, _, aux = loss(params)
    for n in range(N):
        expected = 0.0
        if name == "quantiles":
            kept = reward[n] + discount[n] * np.sort(ahead[:, n].ravel())[:12]
            error = kept[None, None] - taken[:, n, :, None]
            tau = ((np.arange(5) + 0.5) / 5)[None, :, None]
            huber = np.where(np.abs(error) <= 1, 0.5 * error**2, np.abs(error) - 0.5)
            expected = (np.abs(tau - (error < 0)) * huber).mean(axis=(1, 2)).sum()
            value = climbed[n].mean()
        else:
            least = (probs(ahead[:, n]) @ atoms).argmin()
            projected = np.zeros(5)
            for p, z in zip(probs(ahead[least, n]), atoms, strict=True):
                b = np.clip(reward[n] + discount[n] * z, -2, 2) + 2
                low, high = int(np.floor(b)), int(np.ceil(b))
                projected[low] += p * (high - b if high > low else 1)
                projected[high] += p * (b - low if high > low else 0)
            expected = -(projected * np.log(probs(taken[:, n]))).sum()
            value = probs(climbed[n]) @ atoms
        np.testing.assert_allclose(aux.metrics["loss/critic"][n], expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(aux.metrics["loss/actor"][n], -value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in DISTRIBUTIONS])
def test_losses(name: str) -> None:
    config, params, _, w, _, loss = problem(name)
    error = td_error(name)
    action = best_action(config, params, w.obs[0])
    actor_loss = -q_values(config, params, w.obs[0], action)[0]
    if name == "rebrac":
        actor_loss = -q_values(config, params, w.obs[0], action).min(axis=0)
    if config.normalize_q:
        squares = (action - scaled(w.action[0])) ** 2
        distance = squares.mean(axis=1) if name == "td3+bc" else squares.sum(axis=1)
        actor_loss = (
            actor_loss / np.abs(actor_loss[w.valid[0]]).mean() + config.behaviour_weight * distance
        )
    found, mask, aux = loss(params)
    np.testing.assert_array_equal(mask, w.valid[0])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    valid = w.valid[0]
    close(aux.metrics["loss/critic"][valid], (error**2).sum(axis=0)[valid])
    close(aux.metrics["loss/actor"], actor_loss)
    close(aux.priority[valid], np.abs(error).mean(axis=0)[valid])
    close(found[valid], ((error**2).sum(axis=0) + actor_loss)[valid])


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_gradients(name: str) -> None:
    """The critics' is that of a regression on fixed targets, the actor's that of rlax's;
    neither has any other.
    """
    config, params, _, w, _, loss = problem(name)
    actor, critic = networks_of(config)
    found = jax.jit(jax.grad(lambda params: loss(params)[0].sum()))(params)

    def critic_loss(params: Any) -> jax.Array:
        q = critic.apply(params, w.obs[0], scaled(w.action[0]))
        return jnp.vdot(2 * td_error(name).astype(np.float32), q)

    def actor_loss(actor_params: Any) -> jax.Array:
        action = jnp.tanh(actor.apply(actor_params, w.obs[0]))
        slope = jax.grad(lambda action: critic.apply(params["critic"], w.obs[0], action)[0].sum())(
            action
        )
        return jax.vmap(rlax.dpg_loss)(action, slope).sum()

    expected = {
        "actor": jax.jit(jax.grad(actor_loss))(params["actor"]),
        "critic": jax.grad(critic_loss)(params["critic"]),
    }
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected
    )


@pytest.mark.parametrize("name", ["td3+bc", "rebrac"])
def test_the_behaviour_moves_the_actor_on_a_fixed_scale(name: str) -> None:
    """Neither the mean magnitude of values nor the critics' target has a gradient."""
    config, params, _, w, _, loss = problem(name)
    actor, critic = networks_of(config)
    parts = jax.jit(jax.grad(lambda params: loss(params)[2].metrics["loss/actor"].sum()))(params)
    q = q_values(config, params, w.obs[0], best_action(config, params, w.obs[0]))
    size = np.abs(q[0] if name == "td3+bc" else q.min(axis=0))[w.valid[0]].mean()

    def actor_loss(actor_params: Any) -> jax.Array:
        action = jnp.tanh(actor.apply(actor_params, w.obs[0]))
        q = critic.apply(params["critic"], w.obs[0], action)
        squares = jnp.square(action - scaled(w.action[0]))
        q, distance = (
            (q[0], squares.mean(axis=1))
            if name == "td3+bc"
            else (q.min(axis=0), squares.sum(axis=1))
        )
        return jnp.sum(-q / np.float32(size) + config.behaviour_weight * distance)

    expected = jax.jit(jax.grad(actor_loss))(params["actor"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        parts["actor"],
        expected,
    )
    assert not any(np.any(x != 0) for x in jax.tree.leaves(parts["critic"]))


def test_what_needs_the_batch_does_not_work_with_a_core() -> None:
    for fields in (
        {"normalize_q": True},
        {"critic_behaviour_weight": 0.1},
        {"critic_behaviour_weight": 0.0},
    ):
        with pytest.raises(ConfigError, match="does not work with core; remove one"):
            TD3(core="gru", **fields).validate()
    TD3(core="gru", behaviour_weight=0.1).validate()


def test_actor_and_targets_move_every_other_update() -> None:
    """Bit for bit; the actor's optimiser knows nothing of the updates between."""
    algorithm = TD3(**NET).make(ENV)
    state = sgd.init(algorithm, jax.random.key(0))
    apply = jax.jit(functools.partial(sgd.apply, algorithm))
    rng = np.random.default_rng(0)

    def moved(before: Any, after: Any) -> bool:
        """Whether every array has, or else none."""
        changes = {
            bool(np.any(a != b))
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        }
        (change,) = changes
        return change

    actors, gradients = [state.variables.params["actor"]], []
    for update in (1, 2, 3, 4):
        grads = jax.tree.map(
            lambda x: rng.standard_normal(x.shape).astype(x.dtype), state.variables.params
        )
        before, state = state, apply(state, grads)
        params = before.variables.params, state.variables.params
        assert moved(params[0]["critic"], params[1]["critic"])
        assert moved(params[0]["actor"], params[1]["actor"]) == (update % 2 == 0)
        assert moved(before.target, state.target) == (update % 2 == 0)
        if update % 2 == 0:
            actors.append(params[1]["actor"])
            gradients.append(grads["actor"])
            expected = jax.tree.map(
                lambda new, old: 0.005 * new + 0.995 * old, params[1], before.target
            )
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.target, expected
            )
    adam = optax.adam(1e-3)
    opt_state = adam.init(actors[0])
    for actor, after, grads in zip(actors[:-1], actors[1:], gradients, strict=True):
        updates, opt_state = adam.update(grads, opt_state)
        jax.tree.map(
            lambda a, b, u: np.testing.assert_allclose(a, b + u, atol=1e-6), after, actor, updates
        )


def test_actor_and_targets_agree_after_a_skipped_gradient() -> None:
    algorithm = TD3(**NET).make(ENV)
    apply = jax.jit(functools.partial(sgd.apply, algorithm))
    state = sgd.init(algorithm, jax.random.key(0))
    grads = jax.tree.map(jnp.ones_like, state.variables.params)
    state, moved = apply(state, jax.tree.map(lambda x: x * np.nan, grads)), []
    for _ in range(4):
        before, state = state, apply(state, grads)
        pairs = (
            (before.variables.params["actor"], state.variables.params["actor"]),
            (before.target, state.target),
        )
        moved.append(
            [
                any(map(np.any, jax.tree.leaves(jax.tree.map(jnp.not_equal, *pair))))
                for pair in pairs
            ]
        )
    assert moved == [[True, True], [False, False]] * 2


def test_ddpg_has_one_critic_and_moves_all_at_every_update() -> None:
    algorithm = DDPG(**NET).make(ENV)
    state = sgd.init(algorithm, jax.random.key(0))
    assert len(state.variables.params["critic"]) == 1
    after = jax.jit(functools.partial(sgd.apply, algorithm))(
        state, jax.tree.map(jnp.ones_like, state.variables.params)
    )
    for before, now in ((state.variables, after.variables), (state.target, after.target)):
        assert all(
            np.any(a != b)
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(now), strict=True)
        )
