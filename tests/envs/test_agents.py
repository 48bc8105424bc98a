"""Environments of several agents, each a row of the batch."""

from __future__ import annotations

import functools
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import team

import jaxrl_dist
from jaxrl_dist.algorithms.impala import IMPALA
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import describe

SIZES: dict[str, Any] = {
    "num_envs": 8, "rollout_length": 16, "total_env_steps": 512, "report_interval": 128, "evaluation_episodes": 3,
    "hidden_sizes": (8,), "num_devices": 1, "num_minibatches": 2, "num_epochs": 2,
}  # fmt: skip


def train(env: Any, name: str = "ppo", **fields: Any) -> list[Any]:
    return list(jaxrl_dist.train(jaxrl_dist.preset(name, env, **{**SIZES, **fields})))


def play(env: Any, rows: int, steps: int, seed: int = 0) -> list[Any]:
    """Random actions from a reset: the first observation, then the time steps and their
    episodes.
    """
    keys = jax.random.split(jax.random.key(seed), (steps + 1, rows))
    state, obs = env.reset(keys[0])
    step, out = jax.jit(env.step), [obs]
    for t in range(steps):
        state, *stepped = step(
            state, jax.random.randint(jax.random.key(t), (rows,), 0, 2), keys[t + 1]
        )
        out.append(stepped)
    return out


def test_one_agent_is_the_environment_itself_bit_for_bit() -> None:
    ours, theirs = (
        play(find(env).device(), 4, 60) for env in (team.CartPoles(1), "gymnax:CartPole-v1")
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert any(step.terminated.any() for step, _ in ours[1:])


def assert_alike(ours: list[Any], theirs: list[Any], rel: float) -> None:
    """The metrics of runs whose programs XLA fuses in its own way:
    sums of losses and gradients may round otherwise.
    """
    for our, their in zip(ours, theirs, strict=True):
        for metric, value in their.metrics.items():
            if not metric.startswith("time/"):
                assert our.metrics[metric] == (value and pytest.approx(value, rel=rel, abs=1e-6)), (
                    metric
                )


@pytest.mark.case  # test_one_agent_is_the_environment_itself_bit_for_bit
def test_training_one_agent_is_training_the_environment_itself() -> None:
    # presets know only the environment of gymnax
    raw = {"normalize_observations": False, "scale_rewards": False}
    ours, theirs = (train(env, **raw) for env in (team.CartPoles(1), "gymnax:CartPole-v1"))
    assert_alike(ours, theirs, 1e-6)
    assert ours[-1].evaluation == theirs[-1].evaluation


# test_one_agent_is_the_environment_itself_bit_for_bit, test_rows_are_the_agents_of_each_environment
@pytest.mark.case
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_shared_policy_trains_as_with_as_many_environments(name: str) -> None:
    """Nothing in these environments is random. Of one agent,
    each environment makes as many env steps as of two.
    """
    memory = {"replay_capacity": 2048, "batch_size": 16, "replay_ratio": 1 / 32}
    fields = {**SIZES, "evaluation_episodes": 0}
    if name == "dqn":
        fields = {
            **{x: y for x, y in fields.items() if x not in ("num_minibatches", "num_epochs")},
            **memory,
        }
    found = []
    for agents, count in ((("long_1", "long_2"), 8), (("long_1",), 16)):
        counted = {"num_envs": count, "total_env_steps": 32 * count, "report_interval": 16 * count}
        warm_up = (
            {"learning_starts": 20 * count, "epsilon_steps": 40 * count} if name == "dqn" else {}
        )
        config = jaxrl_dist.preset(
            name, team.Unlike(*agents), **{**fields, **counted, **warm_up, "ema_steps": 8 * count}
        )
        found.append(list(jaxrl_dist.train(config)))
    two, one = found
    for ours, theirs in zip(two, one, strict=True):
        assert (2 * ours.env_steps, ours.agent_steps, theirs.agent_steps) == (
            theirs.env_steps,
            theirs.env_steps,
            None,
        )
        for metric, value in theirs.metrics.items():
            if not metric.startswith("time/"):
                assert ours.metrics[metric] == (
                    value and pytest.approx(value, rel=1e-5, abs=1e-6)
                ), metric
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6),
        two[-1].variables(),
        one[-1].variables(),
    )


def test_other_orders_of_agents_are_other_orders_of_rows() -> None:
    keys, rows = jax.random.split(jax.random.key(0), (4, 6)), np.array([1, 0, 3, 2, 5, 4])
    here, there = (
        find(team.Unlike(*agents)).device()
        for agents in (("long_1", "long_2"), ("long_2", "long_1"))
    )
    (state, obs), (other, seen) = here.reset(keys[0]), there.reset(keys[0])
    for t in range(1, 4):
        jax.tree.map(np.testing.assert_array_equal, seen, jax.tree.map(lambda x: x[rows], obs))
        action = jnp.array([2, 0, 1, 1, 2, 3])
        state, *stepped = here.step(state, action, keys[t])
        other, *permuted = there.step(other, action[rows], keys[t])
        jax.tree.map(
            np.testing.assert_array_equal, permuted, jax.tree.map(lambda x: x[rows], stepped)
        )
        obs, seen = stepped[0].obs, permuted[0].obs


@pytest.mark.parametrize("limit", [pytest.param(500, marks=pytest.mark.case), 13])
def test_rows_are_the_agents_of_each_environment(limit: int) -> None:
    """Against a loop over single poles: an agent that has fallen waits, invalid,
    until the environment resets.
    """
    num_envs, count, steps = 3, 3, 70
    env = find(team.CartPoles(count, limit)).device()
    assert env.spec.num_agents == count and env.spec.max_episode_steps == limit
    obs, *rest = play(env, num_envs * count, steps)
    own = team.CartPoles(count)
    keys = jax.random.split(jax.random.key(0), (steps + 1, num_envs * count))
    for index in range(num_envs):
        rows = slice(index * count, (index + 1) * count)
        plain = jax.random.key_data(keys[0][index * count])
        shown, state = own.reset(plain)
        np.testing.assert_array_equal(obs[rows], [shown[agent] for agent in own.agents])
        over, time, gone, total = False, 0, np.zeros(count, bool), np.zeros(count)
        for t, (step, episodes) in enumerate(rest):
            assert step.valid[rows].tolist() == [not over and not left for left in gone]
            both = jax.random.split(keys[t + 1][index * count])
            if over:
                shown, state = own.reset(jax.random.key_data(both[1]))
                over, time, gone, total = False, 0, np.zeros(count, bool), np.zeros(count)
                assert not step.terminated[rows].any() and not step.truncated[rows].any()
            else:
                action = jax.random.randint(jax.random.key(t), (num_envs * count,), 0, 2)[rows]
                chosen = dict(zip(own.agents, action, strict=True))
                shown, state, reward, dones, _ = own.step_env(
                    jax.random.key_data(both[0]), state, chosen
                )
                time += 1
                paid = np.where(gone, 0.0, [reward[agent] for agent in own.agents])
                total += paid
                np.testing.assert_array_equal(step.reward[rows], paid)
                ended = np.array([dones[agent] for agent in own.agents]) & ~gone
                cut = ~gone & ~ended & (time >= limit)
                assert (
                    step.terminated[rows].tolist() == ended.tolist()
                    and step.truncated[rows].tolist() == cut.tolist()
                )
                np.testing.assert_array_equal(
                    episodes.return_sum[rows], np.where(ended | cut, total, 0.0)
                )
                gone |= ended | cut
                over = bool(gone.all())
            np.testing.assert_allclose(
                step.obs[rows], [shown[agent] for agent in own.agents], atol=1e-6
            )


def test_agent_observations_hold_masks_and_state() -> None:
    env = find(team.Meeting()).device()
    assert (
        describe(env.spec.observation) == "{observation: float32[1], mask: bool[3]}"
        and env.spec.mask == "mask"
    )
    keys = jax.random.split(jax.random.key(0), 4)
    state, obs = env.reset(keys)
    assert obs["mask"].tolist() == [[False, True, True], [True, True, False]] * 2
    _, step, _ = env.step(state, jnp.array([2, 0, 1, 1]), keys)
    assert step.obs["observation"][:, 0].tolist() == [1, 3, 0, 4]
    with closing(find(team.Meeting()).host(4, 0)) as host:
        assert host.reset()["mask"].tolist() == obs["mask"].tolist()
        assert host.step(np.array([2, 0, 1, 1]))[0].obs["observation"][:, 0].tolist() == [
            1,
            3,
            0,
            4,
        ]


@pytest.mark.parametrize("name", ["get_legal_moves", "get_legal_actions", "action_mask"])
def test_masks_of_a_team_have_the_names_that_others_have(name: str) -> None:
    class Renamed(team.Meeting):
        get_avail_actions = None  # type: ignore[assignment]

    setattr(
        Renamed, name, functools.partial(jax.jit, static_argnums=0)(team.Meeting.get_avail_actions)
    )
    assert find(Renamed()).spec.mask == "mask"
    # about one agent: another thing of this name
    setattr(Renamed, name, lambda self, state, agent: None)
    assert find(Renamed()).spec.mask is None and not find(Renamed()).spec.unread_mask
    setattr(Renamed, name, lambda self, state: jnp.ones(3, bool))
    assert find(Renamed()).spec.mask is None
    assert (
        find(Renamed()).spec.unread_mask == f"its {name} does not answer for each agent: not read"
    )


@pytest.mark.parametrize(
    "plan, name",
    [
        pytest.param("synchronous", "ppo", marks=pytest.mark.case),
        pytest.param("asynchronous", "impala", marks=pytest.mark.case),
        pytest.param("on_device", "dqn", marks=pytest.mark.slow),
        pytest.param("on_device", "es", marks=pytest.mark.slow),
    ],
)
def test_every_plan_takes_several_agents(plan: str, name: str) -> None:
    memory = {
        "replay_capacity": 2040,
        "batch_size": 16,
        "learning_starts": 64,
        "replay_ratio": 1 / 32,
    }
    fields = {"ppo": {}, "dqn": memory}.get(name, {})
    sizes = {
        key: value
        for key, value in SIZES.items()
        if name == "ppo" or key not in ("num_minibatches", "num_epochs")
    }
    config = jaxrl_dist.preset(name, team.CartPoles(3), **{**sizes, **fields, "plan": plan})
    *_, last = jaxrl_dist.train(config)
    assert last.evaluation is not None
    assert last.evaluation["episodes"] == 3 and last.env_steps >= 512


@pytest.mark.parametrize(
    "plan",
    [
        "on_device",
        pytest.param("synchronous", marks=pytest.mark.case),
        "asynchronous",
        pytest.param("gradients", marks=pytest.mark.case),
        pytest.param("own_pace", marks=pytest.mark.case),
    ],
)
def test_env_steps_and_agent_steps_are_counted(plan: str) -> None:
    """Against a loop over an environment, whose first agent acts in two steps of five;
    the sixth is a reset.
    """
    policies = {"a": "long_1,long_3", "b": "long_2"} if plan in ("on_device", "own_pace") else {}
    algorithm, threads = (
        IMPALA(hidden_sizes=(8,)),
        {} if plan in ("on_device", "synchronous") else {"num_actors": 1},
    )
    config = jaxrl_dist.Train(
        {name: algorithm for name in policies} or algorithm, env=team.Outlived("long_1", "long_2", "long_3"),
        policies=policies, plan=plan, time_limit=5, num_envs=8, rollout_length=16, total_env_steps=512,
        report_interval=128, evaluation_episodes=0, num_devices=1, scale_rewards=False, **threads,
    )  # fmt: skip
    for report in jaxrl_dist.train(config):
        env_steps = agent_steps = time = 0
        for _ in range(16 * report.iteration):
            time = 0 if time == 5 else time + 1
            env_steps += 8 * (time > 0)
            agent_steps += 8 * (0, 3, 3, 2, 2, 2)[time]
        assert (report.env_steps, report.agent_steps) == (env_steps, agent_steps)
    assert report.iteration == 5 and report.ended_by == "total_env_steps"
    env_step = report.checkpoint().state.env_step  # nominal: with resets
    assert jax.tree.leaves(env_step) == [5 * 8 * 16] * max(1, len(policies))


@pytest.mark.case  # test_rows_are_the_agents_of_each_environment
def test_a_team_learns_to_meet() -> None:
    *_, last = train(
        team.Meeting(),
        total_env_steps=3000,
        num_minibatches=4,
        hidden_sizes=(32,),
        learning_rate=3e-3,
    )
    assert last.evaluation is not None
    assert last.evaluation["return_mean"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    "critic, seed",
    [
        pytest.param("state", 0, marks=pytest.mark.case),
        *[pytest.param(x, y, marks=pytest.mark.slow) for x in ("state", None) for y in range(3)][
            1:
        ],
    ],
)
def test_central_critic_solves_what_no_agent_sees(critic: str | None, seed: int) -> None:
    """MAPPO, and IPPO, whose agents agree by chance, one time in four;
    see ``team.Echo`` for the critic's error.
    """
    *_, last = train(
        team.Echo(critic is not None), num_envs=32, total_env_steps=6_000 if critic else 20_000, report_interval=2_000,
        evaluation_episodes=0, hidden_sizes=(16,), num_epochs=4, learning_rate=1e-2, gae_lambda=0.0,
        normalize_advantages=False, critic_sees=critic, seed=seed,
    )  # fmt: skip
    if critic is not None:
        assert last.metrics["episode/return"] > 0.98 and last.metrics["loss/value"] < 0.005
        return
    paid = last.metrics["episode/return"]
    assert 0.1 < paid < 0.45
    # Half of the squared error, in one of two steps.
    assert last.metrics["loss/value"] > 0.9 * paid * (1 - paid) / 4


@pytest.mark.case  # learners/test_learners.py::test_one_device_is_as_many
def test_eight_devices_give_what_one_gives() -> None:
    one, eight = (train(team.CartPoles(3), num_devices=count)[0].metrics for count in (1, 8))
    assert one.keys() == eight.keys()
    for name, value in one.items():
        if not name.startswith("time/") and value is not None:
            assert eight[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Discrete\[3\].*Discrete\[4\]",
    ):
        find(team.Unequal())
    with pytest.raises(ConfigError, match=r"action_repeat.*2"):
        find(team.CartPoles(), wrappers=Wrappers(action_repeat=2))
    with pytest.raises(ConfigError, match=r"num_envs 4 .* 8 devices"):
        train(team.CartPoles(8), num_envs=4, num_devices=8)
