"""R2D2 against a naive loop in float64, and replayed sequences against what acting stored."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import (
    assert_close,
    box,
    make_mesh,
    naive_gru,
    random_rollout,
    sample_prioritized,
    sample_uniform,
    spec,
    squash,
    unsquash,
)

from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors import device
from jaxrl_dist.algorithms.r2d2 import R2D2
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.learners import off_policy, sgd
from jaxrl_dist.memory import ring
from jaxrl_dist.nn import networks
from jaxrl_dist.nn.cores import make_core
from jaxrl_dist.nn.heads import q_heads
from jaxrl_dist.types import Context, EnvSpec, Rollout

SPEC = spec()
N = 16
NET: dict[str, Any] = {"hidden_sizes": (8,), "core_size": 4}


def network_of(config: R2D2, env: EnvSpec = SPEC) -> networks.RecurrentNetwork:
    """The network of a config, which returns the core too."""
    heads = q_heads(env.action.n, num_atoms=1, dueling=config.dueling, noisy=False)
    return networks.make_network(
        config, env.observation, make_core(config, jnp.dtype(config.precision)), heads
    )


# --- The loss -------------------------------------------------------------------------------------


@functools.cache
def problem(config: R2D2) -> tuple[Any, Any, Any, Rollout]:
    """Variables, another target network and windows, some of which run over an episode's end."""
    algorithm = config.make(SPEC)
    init = jax.jit(algorithm.init)
    variables, target = init(jax.random.key(0)), init(jax.random.key(1)).params
    assert algorithm.window is not None
    windows = random_rollout(algorithm, SPEC, algorithm.window, N)
    return (
        algorithm,
        variables,
        target,
        windows._replace(reward=10 * windows.reward, core=(), final_core=()),
    )


@functools.partial(jax.jit, static_argnums=0)
def losses(config: R2D2, variables: Any, target: Any, windows: Rollout) -> Any:
    algorithm = config.make(SPEC)
    keys = jax.random.split(jax.random.key(0), N)
    context = Context(keys, target=target)
    return jax.jit(algorithm.loss)(
        variables, algorithm.postprocess(variables, windows, context), context
    )


def naive_values(params: Any, windows: Rollout, env: int, dueling: bool) -> np.ndarray:
    """The values ``[W + 1, A]`` of one window."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    dense, cell = params["torso"]["params"]["Dense_0"], params["gru"]["params"]
    core, q = windows.extras["core"]["q"][0, env].astype(np.float64), []
    for t in range(len(windows.obs)):
        core = naive_gru(
            cell, np.maximum(windows.obs[t, env] @ dense["kernel"] + dense["bias"], 0), core
        )
        advantage, *value = (
            core @ head["params"]["kernel"] + head["params"]["bias"] for head in params["heads"]
        )
        q.append(value[0] + advantage - advantage.mean() if dueling else advantage)
        if t < len(windows.valid) and not windows.valid[t, env]:
            core = np.zeros_like(core)
    return np.stack(q)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"double": False, "dueling": False},
        {"rescale_values": False, "n_step": 1},
        {"burn_in": 0, "max_priority_share": 0.3},
    ],
    ids=str,
)
def test_loss_is_that_of_a_naive_loop(flags: dict[str, Any]) -> None:
    config = R2D2(
        **{**NET, "burn_in": 3, "sequence_length": 6, "n_step": 3, "discount": 0.9, **flags}
    )
    _, variables, target, w = problem(config)
    found, mask, aux = (jax.device_get(x) for x in losses(config, variables, target, w))
    h, h_inverse = (squash, unsquash) if config.rescale_values else (float, float)
    compared = crossed = 0
    for i in range(N):
        online, bootstrap = (
            naive_values(params, w, i, config.dueling) for params in (variables.params, target)
        )
        errors = []
        for k in range(config.sequence_length):
            start = t = config.burn_in + k
            assert mask[i, k] == w.valid[start, i]
            if not w.valid[start, i]:
                continue
            total, factor = 0.0, 1.0
            for t in range(start, start + config.n_step):
                total += factor * w.reward[t, i]
                factor *= config.discount
                if w.terminated[t, i] or w.truncated[t, i]:
                    crossed += t < start + config.n_step - 1
                    break
            if not w.terminated[t, i]:
                best = (online if config.double else bootstrap)[t + 1].argmax()
                total += factor * h_inverse(bootstrap[t + 1, best])
            errors.append(abs(h(total) - online[start, w.action[start, i]]))
            np.testing.assert_allclose(found[i, k], 0.5 * errors[-1] ** 2, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(
                aux.metrics["q/mean"][i, k], online[start, w.action[start, i]], rtol=1e-4, atol=1e-5
            )
            compared += 1
        eta = config.max_priority_share
        expected = eta * max(errors) + (1 - eta) * np.mean(errors) if errors else 0.0
        np.testing.assert_allclose(aux.priority[i], expected, rtol=1e-3, atol=1e-4)
    assert compared > 50 and (crossed > 5 or config.n_step == 1)


def test_burn_in_only_makes_the_core() -> None:
    """The loss and its gradient are those of a shorter window that starts with the burnt-in
    core.
    """
    config = R2D2(**NET, burn_in=5, sequence_length=4, n_step=2)
    _, variables, _, w = problem(config)
    cores = w.extras["core"]["q"]
    late = w._replace(extras={"core": {"q": cores[5:]}}, **{f: getattr(w, f)[5:] for f in STEPS})
    cores[5] = jax.jit(network_of(config).unroll)(
        variables.params, w.obs[:5], cores[0], w.valid[:5]
    )[1]

    @functools.partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def total(params: Any, config: R2D2, windows: Rollout) -> jax.Array:
        loss, mask, _ = losses(config, variables._replace(params=params), variables.params, windows)
        return jnp.sum(jnp.where(mask, loss, 0.0))

    short = dataclasses.replace(config, burn_in=0)
    assert_close(
        total(variables.params, config, w),
        total(variables.params, short, late),
    )


STEPS = ("obs", "action", "reward", "terminated", "truncated", "valid")


@pytest.mark.case  # td3's is, in test_learners.py
@pytest.mark.parametrize("num_devices", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_one_update_is_the_same_on_any_number_of_devices(num_devices: int) -> None:
    config = R2D2(**NET, burn_in=3, sequence_length=6, n_step=3)
    algorithm, _, _, w = problem(config)
    state = jax.jit(functools.partial(sgd.init, algorithm))(jax.random.key(0))
    weight = np.random.default_rng(0).random(N).astype(np.float32)

    def update(state: Any, w: Rollout, weight: jax.Array) -> Any:
        keys = jax.random.split(jax.random.key(0), w.reward.shape[1])
        batch = algorithm.postprocess(state.variables, w, state.context(keys))
        return sgd.gradient(algorithm, state, batch, keys, weight)

    results = []
    for size in (1, num_devices):
        specs = (meshes.REPLICATED, meshes.ROLLOUT._replace(core=(), final_core=()), meshes.BATCH)
        out = (meshes.REPLICATED, meshes.REPLICATED, meshes.BATCH)
        program = meshes.learning(update, make_mesh(size), specs, out)
        results.append(jax.device_get(jax.jit(program)(state, w, weight)))
    assert np.ptp(w.valid.sum(0)) > 0  # so that a mean of the devices' means would differ
    assert_close(results[1], results[0])


# --- The stored core ------------------------------------------------------------------------------

ENVS, LENGTH, SLOTS = 8, 20, 90
ACTING = R2D2(**NET, burn_in=6, sequence_length=8, n_step=3, epsilon_base=1.0, epsilon_exponent=0.0)


@functools.cache
def rollouts() -> tuple[Any, list[Rollout]]:
    """Parameters, and consecutive rollouts with them in CartPole."""
    env = find("gymnax:CartPole-v1").device()
    algorithm = ACTING.make(env.spec)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    everywhere, batch = meshes.REPLICATED, meshes.BATCH
    rollout = jax.shard_map(
        lambda *args: device.make_rollout({"": algorithm}, env, LENGTH)(*args)[:2],
        mesh=make_mesh(1),
        in_specs=(everywhere, batch, *[everywhere] * 4),
        out_specs=(batch, {"": meshes.ROLLOUT}),
    )
    act = jax.jit(rollout)
    actor = jax.jit(functools.partial(device.init, {"": algorithm}, env, EnvSlice(0, ENVS, ENVS)))(
        jax.random.key(1)
    )
    parts = []
    for iteration in range(8):
        now = np.int32(iteration), {"": np.float32(0)}
        actor, experience = act({"": variables}, actor, jax.random.key(2), jax.random.key(3), *now)
        parts.append(jax.device_get(experience[""]))
    return variables.params, parts


@functools.cache
def acted(prioritized: bool) -> tuple[Any, Rollout, ring.Memory]:
    """Parameters, all that was done with them, and a memory that has wrapped around."""
    params, parts = rollouts()
    window = ACTING.make(find("gymnax:CartPole-v1").spec).window
    assert window is not None
    memory = jax.jit(functools.partial(ring.init, slots=SLOTS, prioritized=prioritized))(parts[0])
    add = jax.jit(ring.add, static_argnums=2)
    for part in parts:
        memory = add(memory, part, window)
    parts = [part._replace(core=(), final_core=()) for part in parts]
    whole = jax.tree.map(
        lambda *x: np.concatenate(x), *[part._replace(obs=part.obs[:-1]) for part in parts]
    )
    return params, whole._replace(obs=np.concatenate([whole.obs, parts[-1].obs[-1:]])), memory


@functools.cache
def sampled(prioritized: bool, batch_size: int = 2048) -> tuple[Rollout, np.ndarray, np.ndarray]:
    """Windows, and the environment and the step ``[N]`` at which each of them starts."""
    _, whole, memory = acted(prioritized)
    window = ACTING.burn_in + ACTING.sequence_length + ACTING.n_step - 1
    draw = sample_prioritized if prioritized else sample_uniform
    sample = jax.shard_map(
        lambda memory, key: draw(memory, key, batch_size, window)[:2],
        mesh=make_mesh(1),
        in_specs=(meshes.BATCH, meshes.REPLICATED),
        out_specs=(meshes.TIME_BATCH, meshes.BATCH),
    )
    windows, index = jax.device_get(jax.jit(sample)(memory, jax.random.key(4)))
    newest = len(whole.reward)
    return windows, index.env, newest - 1 - (newest - 1 - index.slot) % SLOTS


@pytest.mark.parametrize("prioritized", [pytest.param(False, marks=pytest.mark.case), True])
def test_replayed_windows_match_rollout_and_core_state(prioritized: bool) -> None:
    _, whole, _ = acted(prioritized)
    windows, env, start = sampled(prioritized)
    length = len(windows.reward)
    # the write head
    assert start.min() > len(whole.reward) - SLOTS and start.max() == len(whole.reward) - length
    assert windows.valid[0].all()
    rows = start + np.arange(length + 1)[:, None]
    np.testing.assert_array_equal(windows.obs, whole.obs[rows, env])
    for drawn, done in zip(windows[1:7], whole[1:7], strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[rows[:-1], env]), drawn, done)


def test_recomputed_core_matches_the_stored_one() -> None:
    """With the parameters that acted, across the ends of episodes."""
    params, _, _ = acted(False)
    windows, _, _ = sampled(False)
    network = network_of(ACTING, find("gymnax:CartPole-v1").spec)
    stored = windows.extras["core"]["q"]
    assert (~windows.valid).any(0).mean() > 0.3 and np.abs(stored).mean() > 0.05
    unroll = jax.jit(network.unroll)
    last = len(stored) - 1
    _, core = unroll(params, windows.obs[:last], stored[0], windows.valid[:last])
    np.testing.assert_allclose(core, stored[last], atol=1e-6)
    core = stored[0]
    for t in range(last):
        _, core = unroll(params, windows.obs[t : t + 1], core, windows.valid[t : t + 1])
        np.testing.assert_allclose(core, stored[t + 1], atol=1e-6)
    np.testing.assert_array_equal(stored[1:][~windows.valid[:-1]], 0.0)


def test_sampling_reads_the_core_of_the_first_step_alone() -> None:
    """A gather of all would not fit what the compiled program allocates."""
    config = R2D2(hidden_sizes=(8,), core_size=4096)
    algorithm = config.make(SPEC)
    windows = jax.eval_shape(
        lambda: jax.tree.map(jnp.asarray, random_rollout(algorithm, SPEC, 4, ENVS))
    )
    memory = jax.eval_shape(lambda: ring.init(windows, SLOTS, prioritized=False))

    def batch(memory: ring.Memory, key: jax.Array) -> Any:
        windows, _ = sample_uniform(memory, key, 64, 28)
        return algorithm.postprocess(None, windows, None)

    specs = (meshes.BATCH, meshes.REPLICATED)
    program = jax.shard_map(batch, mesh=make_mesh(1), in_specs=specs, out_specs=meshes.BATCH)
    compiled = jax.jit(program).lower(memory, jax.eval_shape(lambda: jax.random.key(0))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 28 * 64 * 4096 * 4 / 10


def test_core_resets_and_epsilon_stays_at_episode_begin() -> None:
    algorithm = R2D2(**NET, epsilon_base=0.5, epsilon_exponent=3.0).make(SPEC)
    core, epsilon = algorithm.initial_core(4)
    np.testing.assert_array_equal(core["q"], np.zeros((4, 4)))
    np.testing.assert_allclose(epsilon, [0.5, 0.25, 0.125, 0.0625])
    variables, policy = jax.jit(algorithm.init)(jax.random.key(0)), jax.jit(algorithm.policy)
    many = ({"q": np.zeros((20_000, 4), np.float32)}, np.tile(epsilon, 5_000))
    obs, keys = np.ones((20_000, 3), np.float32), jax.random.split(jax.random.key(1), 20_000)
    greedy, *_ = policy(variables, obs[:1], algorithm.initial_core(1), Context())
    action, _, extras = policy(variables, obs, many, Context(keys))
    explored = np.mean((np.asarray(action) != greedy).reshape(5_000, 4), axis=0)
    np.testing.assert_allclose(explored, epsilon * 2 / 3, atol=0.02)
    assert_close(extras, {"core": many[0]})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"r2d2.*Test-v0"):
        R2D2().make(spec(action=box(2, bound=1.0)))
    algorithm = R2D2(burn_in=40, sequence_length=80, n_step=5, replay_capacity=1024).make(SPEC)
    message = (
        "replay_capacity 1024 is too small for 8 environments: .* windows of 124 need 1064 or more"
    )
    with pytest.raises(ConfigError, match=message):
        off_policy.check_sizes(algorithm, 8, 8, 1)
    for name, value, wanted in (
        ("burn_in", -1, ">= 0"),
        ("sequence_length", 0, ">= 1"),
        ("core_size", 0, ">= 1"),
        ("max_priority_share", 1.5, "<= 1"),
        ("epsilon_base", -0.1, ">= 0"),
        ("target_period", 0, ">= 1"),
    ):
        with pytest.raises(ConfigError, match=f"{name} must be .*{wanted}") as error:
            R2D2(**{name: value}).validate()
        assert "\n" not in str(error.value)
