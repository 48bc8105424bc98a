"""DQN and each of Rainbow's parts against its closed form."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from probes import sample_uniform, squash, unsquash

import jaxrl_dist
from jaxrl_dist import mesh as meshes
from jaxrl_dist import returns
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners import off_policy, sgd
from jaxrl_dist.memory import ring
from jaxrl_dist.nn import networks
from jaxrl_dist.nn.config import TorsoConfig
from jaxrl_dist.nn.heads import NoisyDense, q_heads
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.spaces import Box, Discrete
from jaxrl_dist.training import setup
from jaxrl_dist.types import Context, EnvSpec, Replay, Rollout

OBSERVATION = Box((3,), np.dtype(np.float32), np.full(3, -1, np.float32), np.full(3, 1, np.float32))
SPEC = EnvSpec("Test", "gymnax", "misc", OBSERVATION, Discrete(4), 100)
N = 16


def windows(n: int, seed: int = 0) -> Rollout:
    """``N`` windows of ``n`` steps, some of which run over an episode's end."""
    rng = np.random.default_rng(seed)
    ended = rng.random((n, N)) < 0.3
    valid = np.concatenate([np.ones((1, N), bool), ~ended[:-1]])
    ended &= valid
    terminated = ended & (rng.random((n, N)) < 0.5)
    obs = rng.normal(size=(n + 1, N, 3)).astype(np.float32)
    reward = np.where(valid, rng.normal(size=(n, N)), 0).astype(np.float32)
    action = rng.integers(0, 4, (n, N)).astype(np.int32)
    return Rollout(obs, action, reward, terminated, ended & ~terminated, valid, {}, (), ())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_window_return_is_the_n_step_return_of_the_first_step(n: int) -> None:
    w = windows(n)
    values = np.random.default_rng(1).normal(size=(n + 1, N))
    reward, discount, last = (
        np.asarray(x, np.float64) for x in returns.window_return(*w.outcomes, 0.9)
    )
    for i in range(N):
        total, factor, t = 0.0, 1.0, 0
        while True:
            total += factor * w.reward[t, i]
            factor *= 0.9
            if w.terminated[t, i] or w.truncated[t, i] or t == n - 1:
                break
            t += 1
        if not w.terminated[t, i]:
            total += factor * values[t + 1, i]
        assert last[i] == t
        np.testing.assert_allclose(
            reward[i] + discount[i] * values[int(last[i]) + 1, i], total, rtol=1e-5
        )


def losses(config: DQN, w: Rollout, seed: int = 0) -> tuple[Any, ...]:
    """The algorithm's losses on windows, with what is needed to compute them again."""
    algorithm = config.make(SPEC)
    init = jax.jit(algorithm.init)
    variables, target = init(jax.random.key(seed)), init(jax.random.key(seed + 1)).params

    @jax.jit
    def compute(w: Rollout) -> Any:
        context = Context(jax.random.split(jax.random.key(2), N), target=target)
        return jax.jit(algorithm.loss)(
            variables, algorithm.postprocess(variables, w, context), context
        )

    loss, mask, aux = compute(w)
    np.testing.assert_array_equal(mask, w.valid[0])
    return np.asarray(loss), aux, variables.params, target


@pytest.mark.parametrize("num_atoms", [1, 5])
def test_conservative_term(num_atoms: int) -> None:
    """Kumar et al. (2020), equation 4."""
    fields: dict[str, Any] = {"hidden_sizes": (8,), "num_atoms": num_atoms}
    w = windows(3)
    plain, (found, aux, params, _) = (
        losses(DQN(**fields), w)[0],
        losses(DQN(**fields, cql_weight=0.7), w),
    )
    q = q_values(params, w.obs[0], num_atoms)
    q = (
        q[..., 0]
        if num_atoms == 1
        else (np.exp(q) / np.exp(q).sum(-1, keepdims=True)) @ np.linspace(-10, 10, 5)
    )
    gap = np.log(np.exp(q).sum(axis=1)) - q[np.arange(N), w.action[0]]
    np.testing.assert_allclose(aux.metrics["loss/cql"], gap, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, plain + 0.7 * gap, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rescaled", [False, True])
def test_values_under_the_floor_are_not_lowered(rescaled: bool) -> None:
    """Nakamoto et al. (2023), section 5; new experience has no floor."""
    fields: dict[str, Any] = {"hidden_sizes": (8,), "rescale_values": rescaled, "cql_weight": 0.7}
    floor = np.where(np.arange(N) % 4, np.random.default_rng(5).normal(size=N), -np.inf).astype(
        np.float32
    )
    w = windows(3)._replace(extras={"return": np.stack([floor, floor + 5, floor + 5])})
    _, aux, params, _ = losses(DQN(**fields, cql_floor=True), w)
    q = q_values(params, w.obs[0])[..., 0]
    least = np.sign(floor) * (np.sqrt(np.abs(floor) + 1) - 1) + 1e-3 * floor if rescaled else floor
    gap = np.log(np.exp(np.maximum(q, least[:, None])).sum(axis=1)) - q[np.arange(N), w.action[0]]
    np.testing.assert_allclose(aux.metrics["loss/cql"], gap, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(aux.metrics["q/floored"], (q < least[:, None]).mean(axis=1))
    assert 0 < np.mean(aux.metrics["q/floored"]) < 0.75


@functools.cache
def compiled_network(num_atoms: int, noisy: bool) -> Any:
    config = TorsoConfig(hidden_sizes=(8,), activation="relu")
    return jax.jit(
        networks.q_network(
            config, OBSERVATION, 4, num_atoms=num_atoms, dueling=False, noisy=noisy
        ).apply
    )


def q_values(
    params: Any, obs: Any, num_atoms: int = 1, noise: jax.Array | None = None
) -> np.ndarray:
    return np.asarray(
        compiled_network(num_atoms, noise is not None)(params, obs, noise), np.float64
    )


@pytest.mark.parametrize(
    "n, double, noisy, rescale",
    [
        (1, False, False, False),
        (3, False, False, True),
        (3, True, False, False),
        (1, True, True, False),
    ],
)
def test_loss_is_that_of_the_n_step_error(n: int, double: bool, noisy: bool, rescale: bool) -> None:
    """Each evaluation of a noisy network draws other noise: Fortunato et al. (2018), section
    3.1.
    """
    w = windows(n)
    td_loss: Any = "squared" if n == 3 and double else "huber"
    own: dict[str, Any] = {"n_step": n, "double": double, "td_loss": td_loss, "noisy": noisy}
    config = DQN(hidden_sizes=(8,), **own, rescale_values=rescale)
    found, aux, params, target = losses(config, w)
    keys = jax.vmap(lambda key: jax.random.split(key, 3))(jax.random.split(jax.random.key(2), N))
    noise = [keys[:, use] if noisy else None for use in range(3)]
    reward, discount, last = (np.asarray(x) for x in returns.window_return(*w.outcomes, 0.99))
    next_obs = w.obs[last + 1, np.arange(N)]
    bootstrap = q_values(target, next_obs, noise=noise[1])[..., 0]
    best = (q_values(params, next_obs, noise=noise[2])[..., 0] if double else bootstrap).argmax(1)
    q = q_values(params, w.obs[0], noise=noise[0])[np.arange(N), w.action[0], 0]
    h, h_inverse = (squash, unsquash) if rescale else (float, float)
    value_target = [
        h(r + d * h_inverse(v))
        for r, d, v in zip(reward, discount, bootstrap[np.arange(N), best], strict=True)
    ]
    error = np.array(value_target) - q
    assert np.abs(error).max() > 1
    linear = (np.abs(error) > 1) & (td_loss == "huber")
    np.testing.assert_allclose(
        found, np.where(linear, np.abs(error) - 0.5, 0.5 * error**2), atol=1e-5
    )
    np.testing.assert_allclose(aux.priority, np.abs(error), atol=1e-5)


@pytest.mark.parametrize("rescale", [False, True])
def test_distributional_loss_is_projected_cross_entropy(rescale: bool) -> None:
    w = windows(2)
    own: dict[str, Any] = {
        "num_atoms": 11,
        "value_min": -2,
        "value_max": 2,
        "rescale_values": rescale,
    }
    config = DQN(hidden_sizes=(8,), n_step=2, double=False, **own)
    h, h_inverse = (squash, unsquash) if rescale else (float, float)
    found, _, params, target = losses(config, w)
    atoms = np.linspace(-2, 2, 11)
    reward, discount, last = (
        np.asarray(x, np.float64) for x in returns.window_return(*w.outcomes, 0.99)
    )
    next_obs = w.obs[last.astype(int) + 1, np.arange(N)]

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    p_next = softmax(q_values(target, next_obs, num_atoms=11))
    best = (p_next * atoms).sum(-1).argmax(1)
    logits = q_values(params, w.obs[0], num_atoms=11)[np.arange(N), w.action[0]]
    for i in range(N):
        projected = np.zeros(11)  # Bellemare et al. (2017), algorithm 1
        for j in range(11):
            b = (np.clip(h(reward[i] + discount[i] * h_inverse(atoms[j])), -2, 2) + 2) / 0.4
            low, high = int(np.floor(b)), int(np.ceil(b))
            projected[low] += p_next[i, best[i], j] * (high - b if high > low else 1)
            projected[high] += p_next[i, best[i], j] * (b - low if high > low else 0)
        np.testing.assert_allclose(
            found[i], -(projected * np.log(softmax(logits[i]))).sum(), atol=1e-4
        )


def test_dueling_values_are_the_value_plus_centred_advantages() -> None:
    config = TorsoConfig(hidden_sizes=(8,), activation="relu")
    network = networks.q_network(config, OBSERVATION, 4, num_atoms=1, dueling=True, noisy=False)
    params = jax.jit(network.init)(jax.random.key(0))
    obs = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
    q = np.asarray(jax.jit(network.apply)(params, obs, None))[..., 0]
    dense = params["torso"]["params"]["Dense_0"]
    hidden = np.maximum(obs @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"]), 0)
    advantage, value = (
        hidden @ np.asarray(h["params"]["kernel"]) + np.asarray(h["params"]["bias"])
        for h in params["heads"]
    )
    np.testing.assert_allclose(q, value + advantage - advantage.mean(1, keepdims=True), atol=1e-5)


def test_noisy_layer_draws_noise_per_example() -> None:
    layer = NoisyDense(5)
    x = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
    params, apply = jax.jit(layer.init)(jax.random.key(0), x), jax.jit(layer.apply)
    w = {name: np.asarray(value) for name, value in params["params"].items()}
    assert np.all(np.abs(w["kernel"]) <= 3**-0.5)
    np.testing.assert_allclose(w["kernel_sigma"], 0.5 / np.sqrt(3), rtol=1e-6)
    keys = jax.random.split(jax.random.key(1), N)
    found = np.asarray(apply(params, x, keys))
    noises = np.asarray(jax.jit(jax.vmap(lambda key: jax.random.normal(key, (8,))))(keys))
    for i, noise in enumerate(noises):
        f = np.sign(noise) * np.sqrt(np.abs(noise))
        kernel = w["kernel"] + w["kernel_sigma"] * np.outer(f[:3], f[3:])
        np.testing.assert_allclose(
            found[i], x[i] @ kernel + w["bias"] + w["bias_sigma"] * f[3:], atol=1e-5
        )
    np.testing.assert_allclose(apply(params, x), x @ w["kernel"] + w["bias"], atol=1e-5)


def test_noisy_heads_of_a_dueling_network_draw_separate_noise() -> None:
    x = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
    heads = q_heads(4, num_atoms=1, dueling=True, noisy=True)
    params = heads.init(jax.random.split(jax.random.key(0), 2), x[:1])
    keys = jax.random.split(jax.random.key(1), N)
    advantage, value = (
        np.asarray(
            NoisyDense(size).apply(weights, x, jax.vmap(jax.random.fold_in, (0, None))(keys, index))
        )
        for index, (size, weights) in enumerate(zip((4, 1), params["heads"], strict=True))
    )
    (q,) = heads.apply(params, x, keys)
    np.testing.assert_allclose(
        q[..., 0], value + advantage - advantage.mean(1, keepdims=True), atol=1e-5
    )


def test_epsilon_falls_linearly() -> None:
    algorithm = DQN(hidden_sizes=(8,), epsilon_start=0.8, epsilon_end=0.2, epsilon_steps=1000).make(
        SPEC
    )
    variables, act = jax.jit(algorithm.init)(jax.random.key(0)), jax.jit(algorithm.policy)
    obs = np.ones((20_000, 3), np.float32)
    keys = jax.random.split(jax.random.key(1), 20_000)
    greedy = np.asarray(act(variables, obs[:1], (), Context())[0][0])
    for env_step, epsilon in ((0.0, 0.8), (500.0, 0.5), (1e6, 0.2)):
        action, _, _ = act(variables, obs, (), Context(keys, np.float32(env_step)))
        assert abs((np.asarray(action) != greedy).mean() - 0.75 * epsilon) < 0.015


@pytest.mark.parametrize("num_devices", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_prioritized_update_is_equal_on_any_device_count(num_devices: int) -> None:
    algorithm = DQN(hidden_sizes=(8,), n_step=3).make(SPEC)
    state = jax.jit(functools.partial(sgd.init, algorithm))(jax.random.key(0))
    probability = np.random.default_rng(0).random(N).astype(np.float32)
    w = windows(3)

    def update(state: Any, w: Rollout, probability: jax.Array) -> Any:
        keys = jax.random.split(jax.random.key(0), w.reward.shape[1])
        batch = algorithm.postprocess(state.variables, w, state.context(keys))
        weight = off_policy.importance_weights(probability, 0.6)
        grads, _, _ = sgd.gradient(algorithm, state, batch, keys, weight)
        return grads, weight

    results = []
    for size in (1, num_devices):
        mesh = meshes.make_mesh(jax.local_devices()[:size])
        specs = (
            meshes.REPLICATED,
            meshes.ROLLOUT._replace(core=(), final_core=(), extras={}),
            meshes.BATCH,
        )
        program = meshes.learning(update, mesh, specs, (meshes.REPLICATED, meshes.BATCH))
        results.append(jax.device_get(jax.jit(program)(state, w, probability)))
    np.testing.assert_allclose(results[0][1], (probability / probability.min()) ** -0.6, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *results)


@pytest.mark.case  # test_resume.py does, too
@pytest.mark.parametrize("plan", ["on_device", "synchronous"])
def test_a_run_counts_its_updates_and_repeats_bit_for_bit(plan: str) -> None:
    config = DQN(
        hidden_sizes=(8,),
        learning_starts=100,
        replay_capacity=800,
        priority_exponent=0.6,
        batch_size=16,
    )
    kind = {
        "plan": plan,
        "total_env_steps": 400,
        "report_interval": 100,
        "evaluation_episodes": 0,
        "num_devices": 2,
    }
    runs = []
    for _ in range(2):
        reports = list(jaxrl_dist.train(jaxrl_dist.Train(config, env="CartPole-v1", **kind)))
        runs.append(
            [{k: v for k, v in r.metrics.items() if not k.startswith("time/")} for r in reports]
        )
    np.testing.assert_equal(runs[0], runs[1])
    # 16 updates after each rollout of 8 x 4 steps, from the first that reaches 100 steps on
    assert reports[-1].updates == 16 * (reports[-1].iteration - 3)


def test_sizes_that_do_not_fit_are_refused() -> None:
    algorithm = DQN().make(SPEC)

    def refused(message: str, num_envs: int = 8, rollout_length: int = 4, **fields: Any) -> None:
        plan = dataclasses.replace(algorithm.replay or Replay(1, 1, 1, 1), **fields)
        with pytest.raises(ConfigError, match=message):
            off_policy.check_sizes(
                dataclasses.replace(algorithm, replay=plan), num_envs, rollout_length, 8
            )

    refused(
        "batch_size 12 does not divide over 8 devices; nearest that work: 8 or 16", batch_size=12
    )
    refused(
        "replay_capacity 1001 does not divide over 8 environments; nearest that work: 1000 or 1008",
        capacity=1001,
    )
    refused("replay_capacity 56 is too small .* need 64 or more", capacity=56)
    refused("batch_size 4096 is larger than replay_capacity 4000", batch_size=4096, capacity=4000)
    refused("num_envs 12 does not divide over 8 devices; nearest that work: 8 or 16", num_envs=12)
    refused("replay_ratio 0.3 makes 9.6 updates .* nearest that work: 0.28125 or 0.3125", ratio=0.3)


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match="dqn needs discrete actions"):
        DQN().make(dataclasses.replace(SPEC, action=OBSERVATION))


def test_memory_is_made_on_the_mesh() -> None:
    run = setup.prepare(jaxrl_dist.Train("dqn", env="CartPole-v1"))
    state = run.session.initial_state()
    assert {x.sharding.spec for x in jax.tree.leaves(state.memory)} == {meshes.BATCH}
    assert len(state.memory[""].added.sharding.device_set) == 8
    assert isinstance(state.memory[""], ring.Memory)


@pytest.mark.case  # test_uniform_windows_are_the_same_on_any_number_of_devices
@pytest.mark.parametrize("priority_exponent", [None, 0.5])
def test_a_run_on_two_devices(priority_exponent: float | None) -> None:
    """With normalisation, and reports that are None until the first update."""
    sizes: dict[str, Any] = {
        "hidden_sizes": (8,),
        "replay_capacity": 2048,
        "batch_size": 8,
        "learning_starts": 100,
    }
    config = DQN(**sizes, replay_ratio=1 / 16, priority_exponent=priority_exponent)
    kind = {
        "num_envs": 8,
        "rollout_length": 4,
        "total_env_steps": 256,
        "num_devices": 2,
        "evaluation_episodes": 0,
    }
    scaling = {"scale_rewards": True, "normalize_observations": True, "report_interval": 64}
    first, *_, last = jaxrl_dist.train(
        jaxrl_dist.Train(config, env="CartPole-v1", **kind, **scaling)
    )
    assert first.metrics["loss/q"] is None and first.updates == 0
    assert last.metrics["loss/q"] is not None and np.isfinite(last.metrics["loss/q"])


@pytest.mark.case  # importance weights and one update are
def test_uniform_windows_are_the_same_on_any_number_of_devices() -> None:
    w = windows(40)
    memory = jax.jit(lambda w: ring.add(ring.init(w, 64, prioritized=False), w, 3))(w)
    drawn = []
    for num_devices in (1, 2, 8):
        mesh = meshes.make_mesh(jax.local_devices()[:num_devices])
        sample = jax.shard_map(
            lambda memory, key, size=32 // num_devices: sample_uniform(memory, key, size, 3)[0].obs,
            mesh=mesh,
            in_specs=(meshes.BATCH, meshes.REPLICATED),
            out_specs=meshes.TIME_BATCH,
        )
        drawn.append(np.asarray(jax.jit(sample)(memory, jax.random.key(0))))
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])


def test_too_large_memory_is_refused_with_one_that_fits() -> None:
    with pytest.raises(
        ConfigError,
        match=r"replay_capacity.*80000000000.*\d+\.\d.*GB.*GB.*\d+",
    ):
        setup.prepare(jaxrl_dist.preset("dqn", "CartPole-v1", replay_capacity=80_000_000_000))


def test_loaded_policy_explores_as_at_the_end_of_training() -> None:
    run = setup.prepare(
        jaxrl_dist.preset(
            "dqn", "CartPole-v1", total_env_steps=20_000, hidden_sizes=(8,), replay_capacity=800
        )
    )
    policy = Policy(
        run.config, run.job.source, jax.jit(run.job.algorithm[""].init)(jax.random.key(0))
    )
    obs = np.ones((2000, 4), np.float32)
    greedy, _ = policy(obs)
    sampled, _ = policy(obs, key=jax.random.key(0))
    # epsilon_end, half of whose draws are greedy
    assert 0 < np.mean(np.asarray(greedy) != np.asarray(sampled)) < 0.05
