"""How actions are tried: noise, ladders of epsilons, scales of continuous actions,
random beginnings.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import scipy.special
import scipy.stats
from probes import box, random_rollout, spec

from jaxrl_dist.actors.step import after_step
from jaxrl_dist.algorithms import exploration
from jaxrl_dist.algorithms.ddpg import DDPG
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.impala import IMPALA
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.algorithms.replayed import ActionScale
from jaxrl_dist.algorithms.sac import SAC
from jaxrl_dist.algorithms.td3 import TD3
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import by_hand
from jaxrl_dist.nn.distributions import policy_head
from jaxrl_dist.nn.networks import q_network
from jaxrl_dist.nn.perturbation import perturbed
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete
from jaxrl_dist.types import Algorithm, Context, Rollout, Timestep, Variables

LOW, HIGH = np.array([-1, 0.1], np.float32), np.array([3, 0.7], np.float32)
CONTINUOUS = spec(action=Box((2,), np.dtype(np.float32), LOW, HIGH))
MANY = 20_000

# --- Epsilon --------------------------------------------------------------------------------------


def test_ape_x_ladder() -> None:
    """Section 4 of Horgan et al. (2018): epsilon ** (1 + alpha i / (N - 1)), of 0.4 and 7."""
    expected = [0.4 ** (1 + 7 * i / 359) for i in range(360)]
    np.testing.assert_allclose(exploration.ape_x_epsilon(360, 0.4, 7.0), expected, rtol=1e-5)
    np.testing.assert_allclose(exploration.ape_x_epsilon(1, 0.4, 7.0), [0.4], rtol=1e-6)


def test_each_environment_keeps_its_epsilon() -> None:
    algorithm = DQN(hidden_sizes=(8,), epsilon_ladder=True, epsilon_start=1.0).make(spec())
    variables, epsilon = jax.jit(algorithm.init)(jax.random.key(0)), algorithm.initial_core(4)
    obs, keys = jnp.ones((MANY, 3)), jax.random.split(jax.random.key(1), MANY)
    greedy, _, _ = jax.jit(algorithm.policy)(variables, obs[:4], epsilon, Context())
    action, core, _ = jax.jit(algorithm.policy)(
        variables, obs, jnp.tile(epsilon, MANY // 4), Context(keys)
    )
    explored = np.mean(np.asarray(action != greedy[0]).reshape(-1, 4), axis=0)
    np.testing.assert_allclose(
        explored, np.float32(0.4) ** (1 + 7 * np.arange(4) / 3) * 2 / 3, atol=0.01
    )
    kept = after_step(
        algorithm, core[:4], epsilon, action[:4], step(valid=[True, False, True, False])
    )
    np.testing.assert_array_equal(kept, epsilon)


def step(valid: list[bool]) -> Timestep:
    """What matters of a step to the policy's state."""
    return Timestep((), jnp.zeros(len(valid)), *[jnp.zeros(len(valid), bool)] * 2, jnp.array(valid))


def test_random_actions_last_as_long_as_their_source_says() -> None:
    """P(n >= k) = 1 / k; from one random action to the next, epsilon decides at each step."""
    envs, steps, epsilon = 512, 800, 0.1
    q = jnp.tile(jnp.array([0.0, 0.0, 1.0, 0.0]), (envs, 1))
    legal = jnp.ones_like(q, dtype=bool)

    def advance(core: exploration.Repetition, key: jax.Array) -> tuple[exploration.Repetition, Any]:
        keys = jax.random.split(key, envs)
        action, after = exploration.ez_greedy(q, epsilon, legal, keys, core)
        return after, (action, core.left, after)

    keys = jax.random.split(jax.random.key(0), steps)
    start = exploration.Repetition.none(envs)._replace(longest=jnp.full(envs, 10_000.0))
    _, (action, before, after) = jax.lax.scan(advance, start, keys)
    action, before, left = np.asarray(action), np.asarray(before), np.asarray(after.left)
    begins = before == 0
    np.testing.assert_array_equal(before, np.concatenate([np.zeros((1, envs)), left[:-1]]))
    np.testing.assert_array_equal(left[~begins], before[~begins] - 1)
    np.testing.assert_array_equal(action[1:][~begins[1:]], action[:-1][~begins[1:]])
    chosen, lengths = action[begins], left[begins] + 1
    # A random action is the best one in a quarter of the cases.
    np.testing.assert_allclose(np.mean(chosen != 2), epsilon * 3 / 4, rtol=0.05)
    for other in (0, 1, 3):
        np.testing.assert_allclose(np.mean(chosen == other), epsilon / 4, rtol=0.1)
    lasted = lengths[chosen != 2]
    assert lasted.max() <= 10_000
    for longest in (1, 2, 3, 5, 10, 50):
        np.testing.assert_allclose(np.mean(lasted >= longest), 1 / longest, rtol=0.15)


def test_environments_repeat_for_different_times() -> None:
    start = exploration.Repetition.none(5, 2)
    np.testing.assert_allclose(
        start.longest, [[10_000.0] * 2, [1000.0] * 2, [100.0] * 2, [10.0] * 2, [1.0] * 2], rtol=1e-5
    )
    np.testing.assert_allclose(exploration.Repetition.none(1).longest, [10_000.0], rtol=1e-5)
    starts = jax.tree.map(lambda x: jnp.repeat(x[:, 0], 4000), start)
    keys = jax.random.split(jax.random.key(0), len(starts.left))
    _, after = exploration.ez_greedy(jnp.zeros((len(keys), 3)), 1.0, None, keys, starts)
    most = np.asarray(after.left).reshape(5, -1).max(axis=1) + 1
    np.testing.assert_array_equal(most[2:], [100, 10, 1])
    assert 100 < most[1] <= 1000 and 100 < most[0] <= 10_000


def test_repeated_action_ends_if_illegal_or_at_episode_end() -> None:
    algorithm = DQN(hidden_sizes=(8,), ez_greedy=True, epsilon_start=0.0, epsilon_end=0.0).make(
        spec()
    )
    variables, start = jax.jit(algorithm.init)(jax.random.key(0)), algorithm.initial_core(4)
    core = start._replace(
        action=jnp.array([0, 1, 2, 0], jnp.int32), left=jnp.array([3, 3, 3, 0], jnp.int32)
    )
    keys = jax.random.split(jax.random.key(1), 4)
    greedy, unchanged, _ = jax.jit(algorithm.policy)(variables, jnp.ones((4, 3)), core, Context())
    jax.tree.map(np.testing.assert_array_equal, unchanged, core)
    action, after, _ = jax.jit(algorithm.policy)(variables, jnp.ones((4, 3)), core, Context(keys))
    np.testing.assert_array_equal(action, [0, 1, 2, greedy[3]])
    np.testing.assert_array_equal(after.left, [2, 2, 2, 0])
    kept = after_step(algorithm, after, start, action, step(valid=[True, False, True, False]))
    np.testing.assert_array_equal(kept.left, [2, 0, 2, 0])
    q = jnp.array([[0.0, 2.0, 1.0]] * 4)
    legal = jnp.array(
        [[True, True, True], [True, False, True], [True, True, False], [True, True, True]]
    )
    action, after = exploration.ez_greedy(q, 0.0, legal, keys, core)
    np.testing.assert_array_equal(action, [0, 2, 1, 1])
    np.testing.assert_array_equal(after.left, [2, 0, 0, 0])


@pytest.mark.parametrize("other", ["epsilon_ladder", "parameter_noise"])
def test_what_repeats_no_random_actions_says_so(other: str) -> None:
    with pytest.raises(ConfigError, match=f"ez_greedy does nothing without {other}=False"):
        DQN(ez_greedy=True, **{other: True}).validate()


# --- Noise ----------------------------------------------------------------------------------------


def test_ornstein_uhlenbeck_noise_is_stationary_and_correlated() -> None:
    """An autoregressive process: variance std^2 / (1 - a^2) and autocorrelation a^k,
    with a = 1 - theta.
    """

    def advance(noise: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        noise = exploration.ornstein_uhlenbeck(noise, jax.random.split(key, 64), 0.2)
        return noise, noise

    keys = jax.random.split(jax.random.key(0), 2050)
    path = np.asarray(jax.lax.scan(advance, jnp.zeros((64, 3)), keys)[1][50:], np.float64)
    np.testing.assert_allclose(path.mean(), 0.0, atol=0.02)
    variance = 0.04 / (1 - 0.85**2)
    np.testing.assert_allclose(np.square(path).mean(axis=(0, 1)), variance, rtol=0.05)
    for lag in (1, 5, 10):
        correlation = (path[lag:] * path[:-lag]).mean() / variance
        np.testing.assert_allclose(correlation, 0.85**lag, atol=0.03)
    independent = (path[:, :, 0] * path[:, :, 1]).mean() / variance
    np.testing.assert_allclose(independent, 0.0, atol=0.03)


@pytest.mark.parametrize("noise", ["gaussian", "ornstein_uhlenbeck"])
def test_noise_is_added_and_begins_anew_with_each_episode(noise: Any) -> None:
    config = TD3(hidden_sizes=(8,), noise=noise, noise_std=0.1, learning_starts=0)
    algorithm, obs, keys = (
        config.make(CONTINUOUS),
        jnp.ones((4, 3)),
        jax.random.split(jax.random.key(1), 4),
    )
    variables, scale = (
        jax.jit(algorithm.init)(jax.random.key(0)),
        ActionScale.of(config, CONTINUOUS),
    )
    start = algorithm.initial_core(4)
    core = jax.tree.map(lambda x: x + 0.3, start)
    greedy, untouched, _ = jax.jit(algorithm.policy)(variables, obs, core, Context())
    action, core, _ = jax.jit(algorithm.policy)(variables, obs, core, Context(keys))
    drawn = 0.1 * np.stack([jax.random.normal(key, (2,)) for key in keys])
    if noise == "ornstein_uhlenbeck":
        drawn += 0.85 * 0.3
        np.testing.assert_allclose(untouched, 0.3, rtol=1e-6)
        np.testing.assert_allclose(core, drawn, atol=1e-6)
        kept = after_step(algorithm, core, start, action, step(valid=[True, False, True, False]))
        np.testing.assert_array_equal(kept, np.where([[True], [False], [True], [False]], core, 0.0))
    np.testing.assert_allclose(scale.from_env(action) - scale.from_env(greedy), drawn, atol=1e-5)


def test_correlated_noise_is_standard_normal() -> None:
    def advance(noise: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        noise = exploration.correlated(noise, jax.random.split(key, 4096), 0.7)
        return noise, noise

    _, path = jax.lax.scan(advance, jnp.zeros((4096, 2)), jax.random.split(jax.random.key(0), 12))
    path = np.asarray(path, np.float64)
    for noise in (path[0], path[1], path[-1]):
        assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    for lag in (1, 3):
        np.testing.assert_allclose((path[lag:] * path[:-lag]).mean(), 0.7**lag, atol=0.02)
    np.testing.assert_allclose((path[:, :, 0] * path[:, :, 1]).mean(), 0.0, atol=0.02)


CORRELATED: dict[str, Any] = {
    "ppo": PPO(hidden_sizes=(8,), noise_correlation=0.6),
    "ppo with a core": PPO(
        hidden_sizes=(8,), noise_correlation=0.6, core="gru", core_size=4, core_inputs="action"
    ),
    "impala": IMPALA(hidden_sizes=(8,), noise_correlation=0.6),
    "sac": SAC(hidden_sizes=(8,), noise_correlation=0.6, learning_starts=0),
}


@pytest.mark.parametrize("name", CORRELATED)
def test_noise_of_consecutive_actions_is_correlated(name: str) -> None:
    """The standardised action is the noise; greedy actions leave it alone,
    and an episode's end forgets it.
    """
    algorithm, keys = CORRELATED[name].make(CONTINUOUS), jax.random.split(jax.random.key(1), (3, 4))
    variables, obs, start = (
        jax.jit(algorithm.init)(jax.random.key(0)),
        jnp.ones((4, 3)),
        algorithm.initial_core(4),
    )
    scale = ActionScale.of(TD3(), CONTINUOUS)

    def noise_of(core: Any) -> np.ndarray:
        return np.asarray(core if name == "sac" else core[0])

    _, untouched, _ = jax.jit(algorithm.policy)(variables, obs, start, Context())
    np.testing.assert_array_equal(noise_of(untouched), 0.0)
    core, noise = start, np.zeros((4, 2))
    for t, now in enumerate(keys):
        greedy, _, _ = jax.jit(algorithm.policy)(variables, obs, core, Context())
        action, core, extras = jax.jit(algorithm.policy)(variables, obs, core, Context(now))
        fresh = np.stack([jax.random.normal(key, (2,)) for key in now])
        noise = 0.6 * noise + 0.8 * fresh if t else fresh
        np.testing.assert_allclose(noise_of(core), noise, atol=1e-6)
        if name != "sac":  # its standard deviation depends on the observation
            np.testing.assert_allclose(
                scale.from_env(action) - scale.from_env(greedy), noise, atol=1e-5
            )
            std = np.asarray(HIGH - LOW) / 2
            density = scipy.stats.norm.logpdf(noise) - np.log(std)
            np.testing.assert_allclose(extras["log_prob"], density.sum(axis=1), atol=1e-4)
    kept = noise_of(
        after_step(algorithm, core, start, action, step(valid=[True, False, True, False]))
    )
    np.testing.assert_array_equal(
        kept, np.where([[True], [False], [True], [False]], noise_of(core), 0.0)
    )


@pytest.mark.parametrize("name", runs.cases(["impala", "ppo", "ppo with a core"], "impala"))
def test_losses_do_not_see_the_noise_that_a_policy_keeps(name: str) -> None:
    config = CORRELATED[name]
    plain = dataclasses.replace(config, noise_correlation=None).make(CONTINUOUS)
    variables, rollout = (
        jax.jit(plain.init)(jax.random.key(0)),
        random_rollout(plain, CONTINUOUS, 5, 3),
    )
    kept = rollout._replace(
        core=(jnp.ones((3, 2)), rollout.core), final_core=(jnp.ones((3, 2)), rollout.final_core)
    )

    def losses(algorithm: Algorithm, rollout: Rollout) -> jax.Array:
        batch = by_hand(algorithm.postprocess)(variables, rollout, Context())
        return jax.jit(algorithm.loss)(variables, batch, Context())[0]

    np.testing.assert_array_equal(losses(config.make(CONTINUOUS), kept), losses(plain, rollout))


def test_noise_of_a_dict_of_actions_goes_to_its_continuous_parts() -> None:
    parts = {"grip": Discrete(3), "move": box(2, bound=1), "turn": box(1, bound=2)}
    head = policy_head(parts)
    keys, noise = jax.random.split(jax.random.key(0), 4), jnp.arange(12.0).reshape(4, 3) / 10
    action = head.distribution(jnp.zeros((4, 9))).sample(keys, noise)
    np.testing.assert_allclose(action["move"], noise[:, :2], atol=1e-6)
    np.testing.assert_allclose(action["turn"], 2 * noise[:, 2:], atol=1e-6)
    plain = head.distribution(jnp.zeros((4, 9))).sample(keys)
    np.testing.assert_array_equal(action["grip"], plain["grip"])


def test_correlated_noise_needs_continuous_actions() -> None:
    for config in (PPO, SAC):
        with pytest.raises(
            ConfigError,
            match=r"noise.correlation needs continuous actions, .* does not have; remove it",
        ):
            config(noise_correlation=0.5).make(spec())
        with pytest.raises(ConfigError, match=r"noise.correlation must be >= 0 and < 1, not 1"):
            config(noise_correlation=1.0).validate()


# --- Scales ---------------------------------------------------------------------------------------


def test_action_scale() -> None:
    scale = ActionScale.of(TD3(), CONTINUOUS)
    ends = jnp.array([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]])
    np.testing.assert_array_equal(scale.to_env(ends)[:2], [LOW, HIGH])
    np.testing.assert_allclose(scale.to_env(ends)[2], (LOW + HIGH) / 2, rtol=1e-6)
    inside = np.random.default_rng(0).uniform(-1, 1, (MANY, 2)).astype(np.float32)
    action = np.asarray(scale.to_env(inside))
    assert np.all((action >= LOW) & (action <= HIGH))
    np.testing.assert_allclose(scale.from_env(action), inside, atol=1e-6)


def test_on_policy_heads_have_the_same_scale() -> None:
    outputs = jnp.array([[-1.0, -1.0], [1.0, 1.0], [0.2, -0.7]])
    mode = policy_head(CONTINUOUS.action).distribution(jnp.pad(outputs, ((0, 0), (0, 2)))).mode()
    np.testing.assert_allclose(mode, ActionScale.of(TD3(), CONTINUOUS).to_env(outputs), rtol=1e-6)


@pytest.mark.parametrize(
    "action, message",
    [
        (
            None,
            "td3 needs .* which Test-v0 lacks; dqn, rainbow, pqn, sac and ppo handle discrete ones",
        ),
        (
            MultiDiscrete((2, 3)),
            "td3 needs actions that are vectors of numbers, .*; ppo, marwil and bc handle vectors of integers",
        ),
        (
            box(2, 2, bound=1),
            r"td3 needs actions that are vectors of numbers, but .*Test-v0.*TransformAction",
        ),
        (
            box(2, dtype=np.int32, bound=1),
            "td3 needs actions that are vectors of numbers, which Test-v0 lacks",
        ),
        (box(2), "td3 needs bounded actions, which Test-v0 lacks; ppo handles unbounded ones"),
    ],
)
def test_actions_without_a_scale_are_refused(action: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TD3().make(spec(action=action))


# --- Policies -------------------------------------------------------------------------------------

POLICIES = {
    "sac": SAC(hidden_sizes=(8,), learning_starts=1000),
    "td3": TD3(hidden_sizes=(8,), learning_starts=1000, noise_std=0.3),
    "ddpg": DDPG(hidden_sizes=(8,), learning_starts=1000, noise_std=0.3),
}


@functools.cache
def acting(name: str) -> Any:
    """``(keys, env_step) -> actions`` of a policy whose
    greedy action lies close to the upper bounds.
    """
    algorithm = POLICIES[name].make(CONTINUOUS)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    head = variables.params["actor"]["head"]["params"]
    head["bias"] = head["bias"].at[:2].set(1.0)
    obs, core = jnp.ones((MANY, 3)), algorithm.initial_core(MANY)
    return jax.jit(
        lambda keys, env_step: algorithm.policy(variables, obs, core, Context(keys, env_step))[0]
    )


@pytest.mark.parametrize("name", POLICIES)
def test_random_actions_before_learning(name: str) -> None:
    """Uniform in each component and independent, then no more;
    greedy actions are the same all the time.
    """
    act = acting(name)
    keys = jax.random.split(jax.random.key(1), MANY)
    random, learned = np.asarray(act(keys, 999.0)), np.asarray(act(keys, 1000.0))
    share = (random - LOW) / (HIGH - LOW)
    for component in share.T:
        assert scipy.stats.kstest(component, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(share.T)[0, 1]) < 0.03
    assert scipy.stats.kstest((learned[:, 0] - LOW[0]) / (HIGH - LOW)[0], "uniform").pvalue < 1e-9
    np.testing.assert_array_equal(act(None, 999.0), act(None, 1000.0))


@pytest.mark.parametrize("name", POLICIES)
def test_actions_stay_within_bounds(name: str) -> None:
    act = acting(name)
    sampled, greedy = (
        np.asarray(act(jax.random.split(jax.random.key(2), MANY), 1000.0)),
        np.asarray(act(None, 1000.0)),
    )
    assert sampled.dtype == np.float32
    assert np.all((sampled >= LOW) & (sampled <= HIGH)) and np.all((greedy > LOW) & (greedy < HIGH))
    assert np.unique(greedy, axis=0).shape == (1, 2) and len(np.unique(sampled, axis=0)) > MANY / 2
    # The sampled ones lie around the greedy one.
    assert np.all(np.abs(np.median(sampled, axis=0) - greedy[0]) < 0.05 * (HIGH - LOW))


def test_random_discrete_actions_before_learning() -> None:
    algorithm = SAC(hidden_sizes=(8,), learning_starts=1000).make(spec())
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    bias = variables.params["actor"]["head"]["params"]["bias"]
    variables.params["actor"]["head"]["params"]["bias"] = bias + jnp.array([0.0, 1.0, 2.0])
    obs, keys = jnp.zeros((MANY, 3)), jax.random.split(jax.random.key(1), MANY)
    act = jax.jit(algorithm.policy)
    counts = [
        np.bincount(act(variables, obs, (), Context(keys, env_step))[0], minlength=3)
        for env_step in (999.0, 1000.0)
    ]
    assert scipy.stats.chisquare(counts[0]).pvalue > 1e-3
    probs = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    assert scipy.stats.chisquare(counts[1], probs * MANY).pvalue > 1e-3
    np.testing.assert_array_equal(algorithm.policy(variables, obs[:2], (), Context())[0], 2)


# --- Noise on parameters --------------------------------------------------------------------------


NOISY: dict[str, Any] = {
    "dqn": DQN(
        hidden_sizes=(8,),
        parameter_noise=True,
        epsilon_start=0.5,
        epsilon_end=0.1,
        epsilon_steps=1000,
    ),
    "td3": TD3(hidden_sizes=(8,), noise="parameter", noise_std=0.3),
}


def measured(name: str, std: float, env_step: float) -> tuple[Any, Any, Any, Any]:
    """Algorithm, variables with this standard deviation, a rollout,
    and the standard deviation after it.
    """
    env = CONTINUOUS if name == "td3" else spec()
    algorithm = NOISY[name].make(env)
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    variables = variables._replace(stats=(jnp.float32(std), variables.stats[1]))
    rollout = random_rollout(algorithm, env, 4, 16)
    context = Context(env_step=jnp.float32(env_step))
    after, _ = by_hand(algorithm.updated_stats)(variables, rollout, context)
    return algorithm, variables, rollout, after


def root_mean_square(variables: Any, rollout: Any) -> float:
    """Of what the noise changes in actions of -1 .. 1, one environment at a time, float64."""
    scale = ActionScale(LOW, HIGH)
    algorithm = TD3(hidden_sizes=(8,)).make(CONTINUOUS)
    squares = []
    for b in np.flatnonzero(rollout.valid[0]):
        key = jax.random.wrap_key_data(rollout.core[0]["noise"][b])
        actor = perturbed({"actor": variables.params["actor"]}, key, variables.stats[0])
        pair = [
            scale.from_env(
                jax.jit(algorithm.policy)(Variables(params, ()), rollout.obs[:1, b], (), Context())[
                    0
                ]
            )[0]
            for params in (variables.params, actor)
        ]
        squares.append(np.mean(np.square(np.float64(pair[0]) - np.float64(pair[1]))))
    return float(np.sqrt(np.mean(squares)))


def divergence(variables: Any, rollout: Any) -> float:
    """Of the softmax of plain values from that of perturbed ones, one environment at a time."""
    config = NOISY["dqn"]
    network = q_network(config, spec().observation, 3, num_atoms=1, dueling=False, noisy=False)
    found = []
    for b in np.flatnonzero(rollout.valid[0]):
        key = jax.random.wrap_key_data(rollout.core[0]["noise"][b])
        both = variables.params, perturbed(variables.params, key, variables.stats[0])
        plain, noisy = (
            scipy.special.softmax(
                np.float64(network.apply(params, rollout.obs[:1, b], None)[0, :, 0])
            )
            for params in both
        )
        found.append(scipy.stats.entropy(plain, noisy))
    return float(np.mean(found))


@pytest.mark.parametrize(
    "std",
    [
        pytest.param(0.05, marks=pytest.mark.case),
        pytest.param(0.2, marks=pytest.mark.case),
        0.5,
        pytest.param(2.0, marks=pytest.mark.case),
    ],
)
@pytest.mark.parametrize("name", runs.cases(NOISY, "dqn"))
def test_the_size_of_the_noise_adapts(name: str, std: float) -> None:
    """It grows by 1.01 where the noise changes actions less than it may,
    and shrinks by as much where it does more.
    """
    _, variables, rollout, after = measured(name, std, 500.0)
    if name == "td3":
        more = root_mean_square(variables, rollout) > 0.3
    else:  # epsilon is 0.3
        more = divergence(variables, rollout) > -np.log(1 - 0.3 + 0.3 / 3)
    assert more or std < 2.0
    assert not more or std > 0.05
    np.testing.assert_allclose(after, std / 1.01 if more else std * 1.01, rtol=1e-6)


def test_ways_to_explore_exclude_each_other() -> None:
    for other in ("noisy", "epsilon_ladder"):
        with pytest.raises(ConfigError, match=r"parameter.noise does not work with"):
            DQN(parameter_noise=True, **{other: True}).validate()
