"""QMIX and VDN: a team that is paid together."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import team
from jax import export as jax_export
from probes import naive_gru, random_rollout, squash, unsquash

import jaxrl_dist
from jaxrl_dist import spaces
from jaxrl_dist.algorithms.qmix import QMIX
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn.networks import mixing_network
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.training.describing import agents_of
from jaxrl_dist.types import Context

JOINT = Wrappers(joint=("",))
SMALL = QMIX(hidden_sizes=(4,), mixing_size=3)


def test_the_mixer_never_falls_where_an_agent_s_value_rises() -> None:
    mixing = mixing_network(5, 3, 2)
    keys = jax.random.split(jax.random.key(0), 4)
    params = mixing.init(keys[0])
    # biases too, and both signs
    params = jax.tree.map(lambda x: x + jax.random.normal(keys[1], x.shape), params)
    state, values = jax.random.normal(keys[2], (200, 2)), 3 * jax.random.normal(keys[3], (200, 3))
    total = mixing.apply(params, state, values)
    assert total.shape == (200,) and float(total.std()) > 0.1
    for agent in range(3):
        risen = mixing.apply(params, state, values.at[:, agent].add(0.5))
        assert bool((risen >= total).all()) and bool((risen > total + 1e-3).any())


def test_mixer_slopes_start_small_and_are_bounded() -> None:
    """A slope is what the team's value gains by an agent's."""
    mixing, keys = mixing_network(32, 3, 54), jax.random.split(jax.random.key(0), 4)
    params, state = mixing.init(keys[0]), jax.random.normal(keys[1], (200, 54))

    def slopes(value: float, params: Any, state: jax.Array) -> np.ndarray:
        each = jax.vmap(jax.grad(lambda values, state: mixing.apply(params, state, values)))
        return np.asarray(each(jnp.full((200, 3), value), state))

    assert slopes(0.0, params, state).max() < 0.01
    params = jax.tree.map(lambda x: x + jax.random.normal(keys[2], x.shape), params)
    layers = [
        jax.tree.map(np.asarray, params[name]["params"]) for name in ("weights", "last_weights")
    ]
    first, last = (np.abs(layer["kernel"]).sum(axis=0) + np.abs(layer["bias"]) for layer in layers)
    assert (slopes(0.0, params, 1e3 * state) <= first.reshape(3, 32) @ last).all()
    np.testing.assert_allclose(
        slopes(-1e3, params, state), 0.5 * slopes(1e3, params, state), rtol=1e-4
    )


def batch_of(spec: Any, size: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def obs() -> Any:
        who = np.tile(np.eye(2, dtype=np.float32), (size, 1, 1))
        seen = {"observation": rng.normal(size=(size, 2, 1)).astype(np.float32), "agent": who}
        legal = rng.random((size, 6)) < 0.6
        return {
            "agents": seen,
            "state": rng.normal(size=(size, 3)).astype(np.float32),
            "mask": legal,
        }

    return {
        "obs": obs(), "next_obs": obs(), "action": rng.integers(0, 3, (size, 2)), "valid": np.ones(size, bool),
        "reward": rng.normal(size=size).astype(np.float32), "discount": np.full(size, 0.9, np.float32),
    }  # fmt: skip


def dense(params: Any, x: np.ndarray) -> np.ndarray:
    return x @ np.asarray(params["params"]["kernel"], np.float64) + np.asarray(
        params["params"]["bias"], np.float64
    )


def naive_values(params: Any, obs: Any, row: int, agent: int) -> np.ndarray:
    own = obs["agents"]
    read = np.concatenate([own["agent"][row, agent], own["observation"][row, agent]]).astype(
        np.float64
    )
    layer = {"params": params["q"]["torso"]["mlp"]["params"]["Dense_0"]}
    return dense(params["q"]["heads"][0], np.maximum(dense(layer, read), 0))


def naive_total(params: Any, obs: Any, row: int, chosen: list[float], mixer: str) -> float:
    if mixer == "vdn":
        return sum(chosen)
    made, state = params["mixer"], obs["state"][row].astype(np.float64)
    state = np.tanh(dense(made["hidden"], state))
    weights = np.abs(dense(made["weights"], state)).reshape(2, 3)
    hidden = dense(made["bias"], state)
    for agent, value in enumerate(chosen):
        hidden = hidden + value * weights[agent]
    hidden = np.where(hidden > 0, hidden, 0.5 * hidden)
    return float(
        hidden @ np.abs(dense(made["last_weights"], state)) + dense(made["last_bias"], state)[0]
    )


@pytest.mark.parametrize(
    "mixer, double, rescale",
    [("qmix", True, False), ("vdn", True, True), ("vdn", True, False), ("qmix", False, False)],
)
def test_the_loss_is_that_of_a_naive_loop(mixer: Any, double: bool, rescale: bool) -> None:
    spec, size = find(team.Meeting(), wrappers=JOINT).spec, 20
    config = dataclasses.replace(SMALL, mixer=mixer, double=double, rescale_values=rescale)
    h, h_inverse = (squash, unsquash) if rescale else (float, float)
    algorithm = config.make(spec)
    variables, other = (algorithm.init(jax.random.key(seed)) for seed in (0, 1))
    batch = batch_of(spec, size)
    losses, mask, aux = jax.jit(algorithm.loss)(variables, batch, Context(target=other.params))
    for row in range(size):
        online, target = [], []
        for agent in range(2):
            legal = batch["next_obs"]["mask"][row, 3 * agent : 3 * agent + 3]
            legal = legal | ~legal.any()
            choosing = naive_values(
                variables.params if double else other.params, batch["next_obs"], row, agent
            )
            best = max(range(3), key=lambda a, v=choosing, ok=legal: v[a] if ok[a] else -np.inf)
            target.append(naive_values(other.params, batch["next_obs"], row, agent)[best])
            online.append(
                naive_values(variables.params, batch["obs"], row, agent)[
                    batch["action"][row, agent]
                ]
            )
        q = naive_total(variables.params, batch["obs"], row, online, mixer)
        bootstrap = naive_total(other.params, batch["next_obs"], row, target, mixer)
        error = h(batch["reward"][row] + 0.9 * h_inverse(bootstrap)) - q
        assert float(losses[row]) == pytest.approx(0.5 * error**2, rel=1e-4, abs=1e-5)
        assert float(aux.priority[row]) == pytest.approx(abs(error), rel=1e-4, abs=1e-5)
    assert mask.all()


def naive_sequence(params: Any, w: Any, row: int, agent: int) -> np.ndarray:
    """An agent's values ``[W, A]`` in one window;
    its core reads its own last action and the team's reward, too.
    """
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params["q"])
    torso, own, values = params["torso"]["mlp"]["params"]["Dense_0"], w.obs["agents"], []
    core = w.extras["core"]["q"][0, row, agent].astype(np.float64)
    for t, going in enumerate(w.valid[:, row]):
        x = np.concatenate([own["agent"][t, row, agent], own["observation"][t, row, agent]])
        read = w.extras["core_inputs"][t, row][[3 * agent, 3 * agent + 1, 3 * agent + 2, 6]]
        features = np.maximum(x @ torso["kernel"] + torso["bias"], 0)
        core = naive_gru(params["gru"]["params"], np.concatenate([features, read]), core)
        values.append(dense(params["heads"][0], core))
        core = core * going
    return np.stack(values)


@pytest.mark.parametrize("core_inputs", ["action", "action,reward"])
def test_a_recurrent_team_acts_in_any_number_of_environments(core_inputs: str) -> None:
    """As an exported policy does, whose number of rows is a symbol."""
    spec = find(team.Meeting(), wrappers=JOINT).spec
    algorithm = dataclasses.replace(SMALL, core="gru", core_size=3, core_inputs=core_inputs).make(
        spec
    )
    (count,) = jax_export.symbolic_shape("b")
    obs, core = random_rollout(algorithm, spec, 1, 2).last_obs, algorithm.initial_core(2)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), (obs, core)
    )
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    exported = jax_export.export(
        jax.jit(lambda *x: algorithm.policy(variables, *x, Context())[:2])
    )(*shapes)
    for found, wanted in zip(
        exported.call(obs, core),
        jax.jit(algorithm.policy)(variables, obs, core, Context()),
        strict=False,
    ):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.mark.parametrize(
    "mixer", [pytest.param("qmix"), pytest.param("vdn", marks=pytest.mark.case)]
)
def test_the_loss_of_a_recurrent_team_is_that_of_a_naive_loop(mixer: Any) -> None:
    spec, size = find(team.Meeting(), wrappers=JOINT).spec, 8
    sizes = {
        "core_size": 3,
        "burn_in": 2,
        "sequence_length": 4,
        "n_step": 2,
        "core_inputs": "action,reward",
    }
    config = dataclasses.replace(SMALL, core="gru", mixer=mixer, discount=0.9, **sizes)
    algorithm, rng = config.make(spec), np.random.default_rng(1)
    variables, target = (jax.jit(algorithm.init)(jax.random.key(seed)) for seed in (0, 1))
    w = random_rollout(algorithm, spec, algorithm.window, size)._replace(core=(), final_core=())
    w = w._replace(obs=w.obs | {"mask": rng.random((9, size, 6)) < 0.6})
    context = Context(jax.random.split(jax.random.key(0), size), target=target.params)
    losses, mask, aux = jax.jit(algorithm.loss)(
        variables, algorithm.postprocess(variables, w, context), context
    )
    for row in range(size):
        online, later = (
            [naive_sequence(x.params, w, row, agent) for agent in range(2)] for x in (variables, target)
        )  # fmt: skip
        for k, start in enumerate(range(2, 6)):
            assert mask[row, k] == w.valid[start, row]
            ends = w.terminated[:, row] | w.truncated[:, row]
            last = start if ends[start] else start + 1
            total = w.reward[start, row] + (0 if last == start else 0.9 * w.reward[last, row])
            if not w.terminated[last, row]:
                obs = jax.tree.map(lambda x, at=last + 1: x[at], w.obs)
                legal = obs["mask"][row].reshape(2, 3) | ~obs["mask"][row].reshape(2, 3).any(
                    -1, keepdims=True
                )
                best = [
                    np.where(legal[agent], online[agent][last + 1], -np.inf).argmax()
                    for agent in range(2)
                ]
                chosen = [later[agent][last + 1, best[agent]] for agent in range(2)]
                total += 0.9 ** (last + 1 - start) * naive_total(
                    target.params, obs, row, chosen, mixer
                )
            chosen = [online[agent][start, w.action[start, row, agent]] for agent in range(2)]
            q = naive_total(
                variables.params, jax.tree.map(lambda x, at=start: x[at], w.obs), row, chosen, mixer
            )
            if mask[row, k]:
                np.testing.assert_allclose(
                    losses[row, k], 0.5 * (total - q) ** 2, rtol=1e-3, atol=1e-5
                )
                np.testing.assert_allclose(aux.metrics["q/mean"][row, k], q, rtol=1e-3, atol=1e-5)
    assert mask.sum() > 15 and (w.terminated | w.truncated).sum() > 5


def test_actions_are_legal_greedy_and_each_agent_s_own() -> None:
    spec = find(team.Meeting(), wrappers=JOINT).spec
    algorithm, obs = SMALL.make(spec), batch_of(spec, 400)["obs"]
    variables = jax.jit(algorithm.init)(jax.random.key(0))
    greedy, _, _ = jax.jit(algorithm.policy)(variables, obs, (), Context())
    drawn, _, _ = jax.jit(algorithm.policy)(
        variables, obs, (), Context(jax.random.split(jax.random.key(1), 400), 0.0)
    )
    legal = obs["mask"].reshape(400, 2, 3)
    legal = legal | ~legal.any(-1, keepdims=True)
    rows = np.arange(400)
    for agent in range(2):
        assert (
            legal[rows, agent, greedy[:, agent]].all() and legal[rows, agent, drawn[:, agent]].all()
        )
    for row in range(20):
        for agent in range(2):
            values = np.where(
                legal[row, agent], naive_values(variables.params, obs, row, agent), -np.inf
            )
            assert int(greedy[row, agent]) == int(np.argmax(values))
    assert len({(int(a), int(b)) for a, b in drawn}) == 9  # agents explore apart


def test_each_agent_repeats_its_own_random_action() -> None:
    spec = find(team.Meeting(), wrappers=JOINT).spec
    algorithm, obs = (
        dataclasses.replace(SMALL, ez_greedy=True).make(spec),
        batch_of(spec, 400)["obs"],
    )
    obs = obs | {"mask": np.ones_like(obs["mask"])}
    variables, core = jax.jit(algorithm.init)(jax.random.key(0)), algorithm.initial_core(400)
    first, core, _ = jax.jit(algorithm.policy)(
        variables, obs, core, Context(jax.random.split(jax.random.key(1), 400), 0.0)
    )
    second, after, _ = jax.jit(algorithm.policy)(
        variables, obs, core, Context(jax.random.split(jax.random.key(2), 400), 0.0)
    )
    goes_on = np.asarray(core.left) > 0
    assert 0.4 < goes_on.mean() < 0.6 and np.any(goes_on[:, 0] != goes_on[:, 1])
    np.testing.assert_array_equal(np.asarray(second)[goes_on], np.asarray(first)[goes_on])
    np.testing.assert_array_equal(
        np.asarray(after.left)[goes_on], np.asarray(core.left)[goes_on] - 1
    )
    assert np.any(np.asarray(second)[~goes_on] != np.asarray(first)[~goes_on])


def test_a_team_is_a_row_that_is_paid_the_mean() -> None:
    alone = find(team.CartPoles(3, 30)).device()
    joint = find(team.CartPoles(3, 30), wrappers=JOINT).device()
    assert joint.spec.num_agents == 1
    rows = jax.random.split(jax.random.key(0), 12)
    state, obs = alone.reset(rows)
    other, seen = joint.reset(rows[::3])
    step_alone, step_joint = jax.jit(alone.step), jax.jit(joint.step)
    total, length, gone = np.zeros(4), np.zeros((4, 3)), np.zeros((4, 3), bool)
    ended = 0
    for t in range(80):
        np.testing.assert_array_equal(seen["agents"]["observation"], obs.reshape(4, 3, 4))
        np.testing.assert_array_equal(seen["state"], obs.reshape(4, 12))
        np.testing.assert_array_equal(seen["agents"]["agent"], np.tile(np.eye(3), (4, 1, 1)))
        action = jax.random.randint(jax.random.key(t), (12,), 0, 2)
        state, step, _ = step_alone(state, action, rows)
        other, whole, episodes = step_joint(other, action.reshape(4, 3), rows[::3])
        reward, valid, over, cut = (
            np.asarray(x).reshape(4, 3)
            for x in (step.reward, step.valid, step.terminated, step.truncated)
        )
        np.testing.assert_allclose(whole.reward, reward.mean(axis=1))
        np.testing.assert_array_equal(whole.valid, valid.any(axis=1))
        gone = (gone | over | cut) & valid.any(axis=1, keepdims=True)
        done = gone.all(axis=1)
        np.testing.assert_array_equal(whole.truncated, done & cut.any(axis=1))
        np.testing.assert_array_equal(whole.terminated, done & ~cut.any(axis=1))
        total, length = total + reward.mean(axis=1), length + valid
        np.testing.assert_allclose(episodes.return_sum, np.where(done, total, 0), rtol=1e-6)
        np.testing.assert_array_equal(episodes.length_sum, np.where(done, length.max(axis=1), 0))
        total, length, ended = (
            np.where(done, 0, total),
            np.where(done[:, None], 0, length),
            ended + done.sum(),
        )
        obs, seen = step.obs, whole.obs
    assert ended > 4


@pytest.mark.parametrize("policies", [{}, {"team": "second,first"}])
def test_a_team_is_paid_whoever_of_it_has_died(policies: Any) -> None:
    env = find(
        team.Sacrifice(), wrappers=Wrappers(policies=policies, joint=tuple(policies) or ("",))
    ).device()
    keys, action, (name,) = (
        jax.random.split(jax.random.key(0), 2),
        np.array([[0, 0], [1, 1]]),
        policies or [""],
    )
    of = (lambda x: x[name]) if policies else (lambda x: x)
    state, _ = env.reset(keys)
    for paid, over, returned in (
        ([0, 0], False, [0, 0]),
        ([6, 10], True, [6, 10]),
        ([0, 0], False, [0, 0]),
    ):
        state, step, episodes = env.step(state, {name: action} if policies else action, keys)
        assert of(step).reward.tolist() == paid and of(step).terminated.tolist() == [over] * 2
        assert of(episodes).return_sum.tolist() == returned


def test_agent_ids_say_who_sees() -> None:
    env = find(team.CartPoles(3), wrappers=Wrappers(agent_ids=True)).device()
    _, obs = env.reset(jax.random.split(jax.random.key(0), 6))
    np.testing.assert_array_equal(obs["agent"], np.tile(np.eye(3), (2, 1)))
    policies = {"a": "pole_1", "b": "pole_0,pole_2"}
    env = find(team.CartPoles(3), wrappers=Wrappers(agent_ids=True, policies=policies)).device()
    _, obs = env.reset(jax.random.split(jax.random.key(0), 6))
    np.testing.assert_array_equal(obs["a"]["agent"], np.ones((2, 1)))
    np.testing.assert_array_equal(obs["b"]["agent"], np.tile(np.eye(2), (2, 1)))
    with pytest.raises(
        ConfigError,
        match=r"agent_ids.*CartPole-v1",
    ):
        find("CartPole-v1", wrappers=Wrappers(agent_ids=True))


def test_the_first_line_of_a_run_counts_the_agents_of_a_team() -> None:
    policies = {"team": "pole_0,pole_2", "other": "pole_1"}
    for wrappers, expected in [
        (Wrappers(), "3 agents x "),
        (JOINT, "a team of 3 agents x "),
        (Wrappers(policies=policies), "3 agents x "),
        (Wrappers(policies=policies, joint=("team",)), "(a team of 2 agents and 1 agent) x "),
    ]:
        assert (
            agents_of(find("team:CartPoles", {"num_agents": "3"}, wrappers=wrappers).spec)
            == expected
        )
    assert agents_of(find("CartPole-v1").spec) == ""


def test_what_does_not_fit_is_refused() -> None:
    for field, value in (
        ("num_atoms", 51),
        ("noisy", True),
        ("parameter_noise", True),
        ("cql_weight", 0.0),
    ):
        with pytest.raises(ConfigError, match=f"{field} does not work with a mixer"):
            dataclasses.replace(SMALL, **{field: value}).validate()
    with pytest.raises(ConfigError, match="mixing_size does nothing without mixer qmix"):
        QMIX(mixer="vdn", mixing_size=4).validate()
    with pytest.raises(ConfigError, match="frame_stack does not work for agents that act as one"):
        find(team.CartPoles(2), wrappers=JOINT._replace(frame_stack=2))


@pytest.mark.case  # test_a_team_is_a_row_that_is_paid_the_mean
def test_a_team_beside_another_policy(tmp_path: Path) -> None:
    small = {
        "replay_capacity": 1024,
        "batch_size": 8,
        "learning_starts": 64,
        "replay_ratio": 1 / 32,
    }
    config = jaxrl_dist.Train(
        {"team": dataclasses.replace(SMALL, **small), "other": "random"}, env=team.CartPoles(3),
        policies={"team": "pole_0,pole_2", "other": "pole_1"}, num_envs=8, rollout_length=8, total_env_steps=500,
        num_devices=1, evaluation_episodes=4, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    *_, last = jaxrl_dist.train(config)
    assert last.evaluation["team/episodes"] == 2 == last.evaluation["other/episodes"]
    assert last.metrics["team/loss/q"] is not None and last.updates > 0
    check_acts_as_a_team(f"fixed({config.run_dir},team)", team.CartPoles(3), "pole_1")


@pytest.mark.parametrize("copies", ["copy(team)", "copy(team,9,2)"])
def test_a_copy_of_a_team_is_a_team(copies: str) -> None:
    check_acts_as_a_team(copies, team.CartPoles(4), "pole_1,pole_3")


def check_acts_as_a_team(other: str, env: Any, agents: str) -> None:
    policies = {"team": agents, "other": "pole_0,pole_2"}
    config, source = resolved(
        jaxrl_dist.Train({"team": SMALL, "other": other}, env=env, policies=policies)
    )
    spec = source.spec.policies["other"]
    assert spec.num_agents == 1
    acting, obs = make_algorithm(config, source.spec)["other"], spaces.zeros(spec.observation, 3)
    variables = jax.jit(acting.init)(jax.random.key(0))
    action, _, _ = jax.jit(acting.policy)(
        variables, obs, acting.initial_core(3), Context(jax.random.split(jax.random.key(1), 3))
    )
    assert action.shape == (3, 2)


TWO_STEPS: dict[str, Any] = {
    "epsilon_start": 1.0, "epsilon_end": 1.0, "hidden_sizes": (64,), "batch_size": 32, "replay_capacity": 512,
    "learning_starts": 64, "replay_ratio": 0.25, "target_period": 100, "learning_rate": 5e-4, "num_envs": 8,
    "rollout_length": 4, "num_devices": 1, "total_env_steps": 40_000, "evaluation_episodes": 8,
    "report_interval": 20_000,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qmix", "vdn", "dqn"])
@pytest.mark.parametrize("seed", range(3))
def test_only_a_mixing_network_solves_the_two_step_game(name: str, seed: int) -> None:
    """Rashid et al. (2018), section 5 and figure 4: VDN, and learning apart,
    take the 7 that is safe.
    """
    own = {"agent_ids": True, "n_step": 1} if name == "dqn" else {}
    *_, last = jaxrl_dist.train(
        jaxrl_dist.preset(name, team.TwoSteps(), **{**TWO_STEPS, **own}, seed=seed)
    )
    value = last.evaluation["return_mean"]
    assert value >= 7.5 if name == "qmix" else value == pytest.approx(7.0, abs=0.3)


@pytest.mark.slow
def test_a_team_learns_to_sacrifice_one_of_its_agents() -> None:
    config = jaxrl_dist.preset("vdn", team.Sacrifice(), **{**TWO_STEPS, "total_env_steps": 6_000})
    assert list(jaxrl_dist.train(config))[-1].evaluation["return_mean"] == 10.0


RECALL: dict[str, Any] = {
    "epsilon_end": 0.05, "epsilon_steps": 20_000, "hidden_sizes": (32,), "replay_capacity": 8192, "batch_size": 16,
    "learning_starts": 512, "replay_ratio": 1 / 8, "learning_rate": 1e-3, "num_envs": 8, "rollout_length": 8,
    "num_devices": 1, "total_env_steps": 200_000, "evaluation_episodes": 64, "report_interval": 100_000,
}  # fmt: skip
RECURRENT = {"core": "gru", "core_size": 32, "burn_in": 0, "sequence_length": 6}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qmix", "vdn"])
@pytest.mark.parametrize("core", [{}, RECURRENT], ids=["memoryless", "gru"])
def test_only_a_recurrent_team_recalls(name: str, core: dict[str, Any]) -> None:
    """Each agent has to remember its bit;
    without memory both are right in a quarter of the episodes.
    """
    *_, last = jaxrl_dist.train(jaxrl_dist.preset(name, team.Recall(), **RECALL, **core))
    assert last.evaluation["return_mean"] > 0.95 if core else last.evaluation["return_mean"] < 0.45
