"""Several policies in one environment."""

from __future__ import annotations

import dataclasses
import itertools
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import team

import jaxrl_dist
from jaxrl_dist import Train, cli
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.actors.step import blank_rollout
from jaxrl_dist.algorithms import name_of
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.commands import request
from jaxrl_dist.commands.plot import plot
from jaxrl_dist.config.values import varied
from jaxrl_dist.envs.agents.groups import agents_of
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import by_hand
from jaxrl_dist.run import checkpoint, saving
from jaxrl_dist.run.console import evaluation_lines
from jaxrl_dist.run.storage import write_json
from jaxrl_dist.settings.policies import Policies, learner_name
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.still import STILL, Copy, Fixed, Random, read_still
from jaxrl_dist.settings.stored import (
    HOW_TO_NAME_ONE,
    acting_config,
    of_policy,
    stored_config,
    to_json,
)
from jaxrl_dist.spaces import Box, MultiDiscrete, zeros
from jaxrl_dist.training.algorithm import make_algorithm, variable_shapes
from jaxrl_dist.training.learner import check_sizes
from jaxrl_dist.training.setup import prepare
from jaxrl_dist.types import Context

PPO_ = PPO(hidden_sizes=(8,), num_minibatches=2, num_epochs=2)
DQN_ = DQN(
    hidden_sizes=(8,), replay_capacity=1024, batch_size=8, learning_starts=100, replay_ratio=1 / 32,
    epsilon_steps=200, priority_exponent=0.6, importance_exponent=0.4,
)  # fmt: skip
SIZES: dict[str, Any] = {
    "num_envs": 8, "rollout_length": 8, "total_env_steps": 320, "report_interval": 64, "evaluation_episodes": 6,
    "num_devices": 1,
}  # fmt: skip
BOTH = {"a": "short", "b": "long_*"}
THREE = {"a": Train(PPO_, normalize_observations=True), "b": DQN_, "c": "random"}
OF_THREE = {"a": "short", "b": "long_1", "c": "long_2"}


def train(algorithms: Any, env: Any = None, **fields: Any) -> list[Any]:
    return list(
        jaxrl_dist.train(Train(algorithms, env=env or team.Unlike(), **{**SIZES, **fields}))
    )


def timeless(report: Any) -> dict[str, Any]:
    return {name: value for name, value in report.metrics.items() if not name.startswith("time/")}


@cache
def three() -> tuple[Any, ...]:
    """A run of PPO, DQN and random actions, and its variables at the end."""
    *_, last = reports = train(THREE, policies=OF_THREE)
    return reports, last.variables(), last.checkpoint()


@pytest.mark.case
@pytest.mark.parametrize("algorithm", [PPO_, dataclasses.replace(DQN_, replay_capacity=1008)])
def test_one_policy_by_name_is_the_shared_one_bit_for_bit(algorithm: Any) -> None:
    env = team.CartPoles(3)
    named, shared = train({"x": algorithm}, env, policies={"x": "*"}), train(algorithm, env)
    for ours, theirs in zip(named, shared, strict=True):
        own = {name[2:]: value for name, value in timeless(ours).items() if name.startswith("x/")}
        assert own == {name: timeless(theirs)[name] for name in own} and len(own) > 8
    jax.tree.map(np.testing.assert_array_equal, named[-1].variables()["x"], shared[-1].variables())


@pytest.mark.case  # test_one_policy_by_name_is_the_shared_one_bit_for_bit
@pytest.mark.parametrize("policy", ["a", "b"])
def test_each_policy_learns_what_it_learns_alone(policy: str) -> None:
    """The second policy has other keys, so it is put first here."""
    reports, variables, _ = three()
    agent = OF_THREE[policy]
    if policy == "b":
        *_, last = reports = train({name: THREE[name] for name in "bac"}, policies=OF_THREE)
        variables = last.variables()
    alone = train(
        {"a": PPO_, "b": DQN_}[policy], team.Unlike(agent), normalize_observations=policy == "a"
    )
    # XLA fuses a larger program differently
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, variables[policy], alone[-1].variables())
    for ours, theirs in zip(reports, alone, strict=True):
        for name, value in timeless(theirs).items():
            if name != "replay/ratio":  # of all policies
                expected = value if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)
                assert ours.metrics[f"{policy}/{name}"] == expected, name


@pytest.mark.case  # envs/test_parallel.py::test_several_policies_train_are_evaluated_and_resumed
@pytest.mark.parametrize("plan", ["synchronous", "asynchronous"])
def test_on_the_host_they_learn_what_they_learn_in_one_program(plan: str) -> None:
    """Actors that wait for each update act with the newest policies, as the other plans do."""
    uniform = dataclasses.replace(
        DQN_, priority_exponent=None, importance_exponent=DQN().importance_exponent
    )
    how = {"lockstep": True, "lag": 0, "num_actors": 2} if plan == "asynchronous" else {}
    algorithms = THREE if plan == "synchronous" else {**THREE, "b": uniform}
    expected = three()[0] if plan == "synchronous" else train(algorithms, policies=OF_THREE)
    reports = train(algorithms, policies=OF_THREE, plan=plan, **how)
    for ours, theirs in zip(reports, expected, strict=True):
        for name, value in timeless(theirs).items():
            near = value if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)
            assert ours.metrics[name] == near, name
    assert reports[-1].evaluation == expected[-1].evaluation


# envs/test_parallel.py::test_several_policies_train_are_evaluated_and_resumed
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("synchronous", marks=pytest.mark.slow),
        pytest.param("asynchronous", marks=pytest.mark.case),
    ],
)
def test_a_run_on_the_host_is_resumed(plan: str, tmp_path: Path) -> None:
    """With replay, priorities and a pool of copies."""
    how = {"lockstep": True, "lag": 0} if plan == "asynchronous" else {}
    config = Train(
        {"a": PPO_, "b": DQN_, "c": "copy(b,4,2)"}, env=team.CartPoles(3), plan=plan, **how,
        policies={"a": "pole_0", "b": "pole_1", "c": "pole_2"}, run_dir=str(tmp_path / "run"),
        **{**SIZES, "evaluation_episodes": 0},
    )  # fmt: skip
    first = list(itertools.islice(jaxrl_dist.train(config), 2))
    *_, last = jaxrl_dist.resume(tmp_path / "run", env=team.CartPoles(3))
    assert last.env_steps >= 320 > first[-1].env_steps and last.iteration > first[-1].iteration
    assert last.metrics["b/elo"] is not None and last.metrics["a/loss/policy"] is not None


@pytest.mark.case  # test_the_command_line_trains_resumes_and_evaluates
def test_counts_and_returns_are_of_all_policies() -> None:
    reports, _, _ = three()
    last = reports[-1]
    assert (last.env_steps, last.agent_steps) == (320, 960)
    assert reports[0].metrics["b/loss/q"] is None and last.metrics["b/loss/q"] is not None
    counts = {name: last.metrics[f"{name}episode/count"] for name in ("", "a/", "b/", "c/")}
    parts = ("a/", "b/", "c/")
    assert counts[""] == sum(counts[name] for name in parts) and counts["b/"] == counts["a/"] > 0
    mean = sum(last.metrics[f"{name}episode/return"] * counts[name] for name in parts) / counts[""]
    assert last.metrics["episode/return"] == pytest.approx(mean)
    evaluation = last.evaluation
    assert evaluation["episodes"] == 6 and evaluation["a/episodes"] == 2 == evaluation["c/episodes"]
    mean = sum(evaluation[f"{name}return_mean"] for name in parts) / 3
    assert evaluation["return_mean"] == pytest.approx(mean) and evaluation["length_mean"] == 5.0
    assert not any(name.startswith("c/loss") for name in last.metrics)


def test_policies_have_their_own_random_numbers() -> None:
    """But the first has those that it has alone."""
    algorithms, both = {"a": PPO_, "b": PPO_}, {"a": "long_1", "b": "long_2"}
    config = {**SIZES, "env": team.Unlike("long_1", "long_2")}
    states = [
        prepare(Train(PPO_, **config)).job.learner.init(jax.random.key(5)).variables[""].params,
        *prepare(Train(algorithms, policies=both, **config))
        .job.learner.init(jax.random.key(5))
        .variables.values(),
    ]
    alone, a, b = map(jax.tree.leaves, [states[0], states[1].params, states[2].params])
    assert all(np.array_equal(x, y) for x, y in zip(alone, a, strict=True))
    assert not any(np.array_equal(x, y) for x, y in zip(a, b, strict=True) if x.ndim > 1)


@pytest.mark.case  # test_the_command_line_trains_resumes_and_evaluates
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    reports, _, checkpoint = three()
    config = Train(
        THREE, env=team.Unlike(), policies=OF_THREE, run_dir=str(tmp_path / "run"), **SIZES
    )
    first = list(itertools.islice(jaxrl_dist.train(config), 2))
    rest = list(jaxrl_dist.resume(tmp_path / "run", env=team.Unlike()))
    assert len(first) + len(rest) == len(reports)
    assert (
        timeless(rest[-1]) == timeless(reports[-1])
        and rest[-1].evaluation == reports[-1].evaluation
    )
    assert (rest[-1].env_steps, rest[-1].agent_steps) == (
        reports[-1].env_steps,
        reports[-1].agent_steps,
    )
    jax.tree.map(np.testing.assert_array_equal, rest[-1].checkpoint().state, checkpoint.state)
    assert checkpoint.state.updates["c"] == 0

    policy = jaxrl_dist.load_policy(tmp_path / "run", env=team.Unlike(), policy="b")
    action, _ = policy(np.zeros((4, 2), np.float32))
    assert action.shape == (4,)
    everyone = jaxrl_dist.load_policy(tmp_path / "run", env=team.Unlike())
    assert everyone.evaluate(6).summary() == {**rest[-1].evaluation}
    with pytest.raises(ValueError, match=r"load_policy\(run_dir.*policy=\.\.\."):
        everyone(np.zeros((4, 2), np.float32))
    with pytest.raises(ConfigError, match=r"no policy z; it has the policies a, b, c"):
        jaxrl_dist.load_policy(tmp_path / "run", env=team.Unlike(), policy="z")
    with pytest.raises(ConfigError, match="plays with the other policies of its run"):
        policy.evaluate(2)


@pytest.mark.case
def test_a_fixed_policy_is_that_of_its_run(tmp_path: Path) -> None:
    *_, before = train(THREE, policies=OF_THREE, run_dir=str(tmp_path / "run"))
    fixed = f"fixed({tmp_path / 'run'},b)"
    *_, last = train(
        {"x": PPO_, "y": fixed}, policies={"x": "short", "y": "long_*"}, total_env_steps=128
    )
    jax.tree.map(np.testing.assert_array_equal, last.variables()["y"], before.variables()["b"])
    assert not any(name.startswith("y/loss") for name in last.metrics)


@pytest.mark.case
def test_a_fixed_policy_stays_at_its_checkpoint(tmp_path: Path) -> None:
    run, again = tmp_path / "run", str(tmp_path / "again")
    train(THREE, policies=OF_THREE, run_dir=str(run), checkpoint_interval=64)
    *_, oldest = map(checkpoint.number_of, checkpoint.saved(run))
    expected = jaxrl_dist.load_policy(
        run, env=team.Unlike(), policy="b", checkpoint=oldest
    ).variables
    policies, sizes = {"x": "short", "y": "long_*"}, {"total_env_steps": 128, "run_dir": again}
    with pytest.raises(ConfigError, match=rf"7.*320.*{oldest}"):
        train({"x": PPO_, "y": f"fixed({run}@7,b)"}, policies=policies, **sizes)
    *_, last = train({"x": PPO_, "y": f"fixed({run}@{oldest},b)"}, policies=policies, **sizes)
    *_, resumed = jaxrl_dist.resume(again, env=team.Unlike(), total_env_steps=192)
    for report in (last, resumed):
        jax.tree.map(
            np.testing.assert_array_equal, jax.device_get(report.variables()["y"]), expected
        )
    # A run that starts from that one's networks has the opponent that it names, not that one's.
    *_, begun = train(
        {"x": PPO_, "y": f"fixed({run}@320,b)"},
        policies=policies,
        total_env_steps=64,
        init_from=again,
    )
    newer = jaxrl_dist.load_policy(run, env=team.Unlike(), policy="b", checkpoint=320).variables
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(begun.variables()["y"]), newer)
    best = resolved(
        Train({"x": PPO_, "y": f"fixed({run}@best,b)"}, env=team.Unlike(), policies=policies)
    )[0]
    steps = best.algorithm.configs["y"].algorithm.checkpoint
    assert steps == str(checkpoint.number_of(checkpoint.chosen(run, "best"))), (
        "another one may become the best"
    )


def test_runs_are_named_with_checkpoint_and_policy(tmp_path: Path) -> None:
    (tmp_path / "a@7").mkdir()
    for text, expected in {
        "runs/a": ("runs/a", None, None), "runs/a@best": ("runs/a", None, "best"),
        "x@y/a@1e6,new": ("x@y/a", "new", "1e6"), "x@y/a,new": ("x@y/a", "new", None),
        f"{tmp_path}/a@7": (f"{tmp_path}/a@7", None, None), f"{tmp_path}/a@7@8": (f"{tmp_path}/a@7", None, "8"),
    }.items():  # fmt: skip
        fixed = read_still(f"fixed({text})")
        assert (
            isinstance(fixed, Fixed) and (fixed.run_dir, fixed.policy, fixed.checkpoint) == expected
        )


def test_a_fixed_policy_of_several_must_be_named() -> None:
    several = Train(Policies({"a": Train(PPO_), "b": Train(DQN_)}))
    ways = r"name one as fixed\(RUN_DIR,POLICY\) or fixed\(RUN_DIR@CHECKPOINT,POLICY\)"
    with pytest.raises(ConfigError, match=rf"^r: which policy\? It has a, b; {ways}$"):
        of_policy(several, None, "r", HOW_TO_NAME_ONE)


def test_the_only_policy_that_trains_needs_no_name() -> None:
    """In ``fixed(RUN_DIR)`` and ``match``."""
    for others in ({"b": Fixed("r")}, {"b": Random()}, {"b": Fixed("r"), "c": Copy("a")}):
        parts = {name: Train(kind) for name, kind in {**others, "a": PPO_}.items()}
        assert learner_name(Train(Policies(parts))) == "a"
    for kinds in ({"a": PPO_, "b": DQN_}, {"a": Random(), "b": Fixed("r")}):
        assert (
            learner_name(Train(Policies({name: Train(kind) for name, kind in kinds.items()})))
            is None
        )
    assert learner_name(Train(PPO_)) is None


def test_a_fixed_run_with_copies_as_others_is_its_learner(tmp_path: Path) -> None:
    """As in ``match``."""
    policies, env = {"b": "long_1", "c": "long_2"}, team.Unlike("long_1", "long_2")
    config, source = resolved(
        Train({"b": PPO_, "c": "copy(b)"}, env=env, policies=policies, **SIZES)
    )
    write_json(tmp_path / "config.json", to_json(config))
    acting, name = acting_config(str(tmp_path), None, "team:Unlike")
    assert (acting.algorithm, name) == (PPO_, "b")
    shapes = variable_shapes(make_algorithm(config, source.spec))["b"]
    made = jax.tree.map(lambda x: np.full(x.shape, 2, x.dtype), shapes)
    saving.save_variables(tmp_path, {"b": made, "c": made})
    fixed = dataclasses.replace(acting, algorithm=Fixed(str(tmp_path)))
    loaded = make_algorithm(fixed, source.spec.policies["b"])[""].init(jax.random.key(4))
    jax.tree.map(np.testing.assert_array_equal, loaded, made)


# learners/test_learners.py::test_one_device_is_as_many
@pytest.mark.parametrize(
    "other",
    [
        pytest.param("dqn", marks=pytest.mark.case),
        pytest.param("copy(a,6,2)", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_give_what_one_gives(other: str) -> None:
    env, policies = team.CartPoles(3), {"a": "pole_0", "b": "pole_[12]"}
    uniform = dataclasses.replace(
        DQN_, priority_exponent=None, importance_exponent=DQN().importance_exponent
    )
    algorithms = {"a": PPO_, "b": uniform if other == "dqn" else other}
    one, eight = (
        train(algorithms, env, policies=policies, num_devices=count)[0].metrics for count in (1, 8)
    )
    assert one.keys() == eight.keys()
    for name, value in one.items():
        if not name.startswith("time/") and value is not None:
            assert eight[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.case  # plans/test_population.py
def test_members_of_a_population_are_their_lone_runs() -> None:
    algorithms = {"a": PPO_, "b": DQN_}
    *_, both = train(algorithms, policies=BOTH, seeds=2)
    assert (both.env_steps, both.agent_steps) == (2 * 320, 2 * 960)
    for seed, member in enumerate(both.members):
        *_, alone = train(algorithms, policies=BOTH, seed=seed)
        assert (member.env_steps, member.agent_steps) == (alone.env_steps, alone.agent_steps)
        for name, value in timeless(alone).items():
            assert member.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


# plans/test_population.py
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("on_device", marks=pytest.mark.case),
        pytest.param("synchronous", marks=pytest.mark.slow),
    ],
)
def test_hyperparameters_of_policies_vary_in_one_program(plan: str, tmp_path: Path) -> None:
    algorithms, vary = (
        {"a": PPO_, "b": DQN_},
        {"a.learning-rate": "1e-3,1e-2", "b.discount": "0.9,0.5"},
    )
    run_dir = tmp_path / "all"
    *_, both = train(
        algorithms, policies=BOTH, vary=vary, zip=True, run_dir=str(run_dir), plan=plan
    )
    assert len(list((run_dir / "members").iterdir())) == 2
    second = {
        "a": dataclasses.replace(PPO_, learning_rate=1e-2),
        "b": dataclasses.replace(DQN_, discount=0.5),
    }
    *_, alone = train(second, policies=BOTH)
    for name, value in timeless(alone).items():
        assert both.members[1].metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    config = runs.read_json(run_dir / "members" / "001" / "config.json")["hyperparameters"]
    assert (
        config["a"]["hyperparameters"]["learning_rate"] == 1e-2
        and config["b"]["hyperparameters"]["discount"] == 0.5
    )
    assert plot([run_dir], tmp_path / "curves.png", metric="*/episode/return").startswith("wrote")
    caption = (tmp_path / "curves.caption.txt").read_text()
    assert (
        "a (ppo) a.learning_rate=0.01 b.discount=0.5:" in caption
        and "b (dqn) a.learning_rate=0.001 b" in caption
    )


@pytest.mark.case  # test_the_command_line_trains_resumes_and_evaluates
@pytest.mark.parametrize("every", [1, 3, 10**6])
def test_a_copy_is_renewed_after_so_many_updates(every: int) -> None:
    """Each iteration makes two updates of the policy that is copied;
    checked on the learner by hand.
    """
    policies, env = {"b": "long_1", "c": "long_2"}, team.Unlike("long_1", "long_2")
    algorithms = {"b": dataclasses.replace(PPO_, num_minibatches=1), "c": f"copy(b,{every})"}
    job = prepare(Train(algorithms, env=env, policies=policies, **SIZES)).job
    state = jax.jit(job.learner.init)(jax.random.key(0))
    rollouts = {
        name: blank_rollout(
            job.algorithm[name], state.variables[name], zeros(spec.observation, 8), (), 8
        )
        for name, spec in job.source.spec.policies.items()
    }
    rollouts = {
        name: x._replace(valid=~x.valid, reward=x.reward + 1.0) for name, x in rollouts.items()
    }
    update, expected = jax.jit(by_hand(job.learner.update)), state.variables["b"]
    for iteration in range(1, 5):
        jax.tree.map(np.testing.assert_array_equal, state.variables["c"], expected)
        before = state
        state, metrics = update(state, rollouts, jax.random.key(1))
        assert (
            int(state.updates["b"]) == 2 * iteration
            and int(state.updates["c"]) == 0
            and not metrics["c"]
        )
        moved = jax.tree.map(
            lambda x, y: bool((x != y).any()), state.variables["b"], before.variables["b"]
        )
        assert any(jax.tree.leaves(moved))
        if 2 * iteration // every > 2 * (iteration - 1) // every:
            expected = state.variables["b"]


# test_the_command_line_trains_resumes_and_evaluates
@pytest.mark.parametrize(
    "copies, episodes",
    [
        pytest.param("copy(a,6)", 6, marks=pytest.mark.slow),
        pytest.param("copy(a,6,3)", 6, marks=pytest.mark.case),
        pytest.param("copy(a,6,2)", 0, marks=pytest.mark.slow),
    ],
)
def test_self_play_is_resumed_and_loaded(copies: str, episodes: int, tmp_path: Path) -> None:
    config = {**SIZES, "env": team.CartPoles(2), "policies": {"a": "pole_0", "b": "pole_1"}}
    config["evaluation_episodes"] = episodes
    algorithms = {"a": PPO_, "b": copies}
    *_, whole = jaxrl_dist.train(Train(algorithms, **config))
    run = Train(algorithms, **config, run_dir=str(tmp_path / "run"))
    list(itertools.islice(jaxrl_dist.train(run), 2))
    *_, rest = jaxrl_dist.resume(tmp_path / "run", env=team.CartPoles(2))
    jax.tree.map(np.testing.assert_array_equal, rest.checkpoint().state, whole.checkpoint().state)
    assert timeless(rest) == timeless(whole) and rest.evaluation == whole.evaluation
    if copies != "copy(a,6)":
        versions = whole.variables()["b"]
        assert rest.metrics["a/elo"] != 1500.0 and len(set(versions.stats.ratings)) > 1
        assert any((x[0] != x[1]).any() for x in jax.tree.leaves(versions.params))
        with pytest.raises(ConfigError, match="b is a pool of copies of a; load a instead"):
            jaxrl_dist.load_policy(tmp_path / "run", env=team.CartPoles(2), policy="b")
        return
    copied = jaxrl_dist.load_policy(tmp_path / "run", env=team.CartPoles(2), policy="b")
    assert copied(np.zeros((3, 4), np.float32), key=jax.random.key(0))[0].shape == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ppo_and_dqn_learn_side_by_side(seed: int) -> None:
    config = Train(
        {"a": "ppo", "b": "dqn"}, env=team.CartPoles(4), policies={"a": "pole_0,pole_1", "b": "pole_[23]"}, seed=seed,
        num_envs=8, rollout_length=32, num_devices=1, total_env_steps=125_000, evaluation_interval=25_000,
    )  # fmt: skip
    found = [report.evaluation for report in jaxrl_dist.train(config) if report.evaluation]
    for policy in ("a", "b"):
        returns = [evaluation[f"{policy}/return_mean"] for evaluation in found]
        assert returns[0] >= 150 and max(returns) >= 475


def test_random_actions_are_legal_and_uniform() -> None:
    env = find(team.Meeting()).device()
    algorithm = Random().make(env.spec)
    keys = jax.random.split(jax.random.key(0), 3000)
    mask = jnp.tile(jnp.array([[True, False, True]]), (3000, 1))
    obs = {"observation": jnp.zeros((3000, 1)), "mask": mask}
    action, _, _ = algorithm.policy(algorithm.init(keys[0]), obs, (), Context(keys))
    counts = np.bincount(np.asarray(action), minlength=3)
    assert counts[1] == 0 and counts[0] == pytest.approx(1500, abs=150)
    spec = find("gymnax:Pendulum-v1").spec
    action, _, _ = Random().make(spec).policy((), jnp.zeros((3000, 3)), (), Context(keys))
    assert action.shape == (3000, 1) and float(action.std()) == pytest.approx(4 / 12**0.5, abs=0.06)


def test_random_actions_are_independent_and_in_bounds() -> None:
    half = Box(
        (2,),
        np.dtype(np.float32),
        np.array([-1, -np.inf], np.float32),
        np.array([1, np.inf], np.float32),
    )
    parts = {"arm": half, "body": {"head": half, "tail": half}, "turn": MultiDiscrete((2, 2))}
    acting = Random().make(dataclasses.replace(find("gymnax:Pendulum-v1").spec, action=parts))
    keys = jax.random.split(jax.random.key(0), 3000)
    action, _, _ = acting.policy((), jnp.zeros((3000, 3)), (), Context(keys))
    drawn = np.concatenate(jax.tree.leaves(action), axis=1)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(8)).max() < 0.1
    uniform, normal = drawn[:, [0, 2, 4]], drawn[:, [1, 3, 5]]
    assert 0.99 < np.abs(uniform).max() <= 1
    np.testing.assert_allclose(uniform.std(axis=0), 2 / 12**0.5, atol=0.03)
    np.testing.assert_allclose(normal.std(axis=0), 1, atol=0.05)


def test_fixed_policy_does_not_change_sizes() -> None:
    config = Train(
        {"a": "dqn", "b": "random"}, env=team.CartPoles(2), policies={"a": "pole_0", "b": "pole_1"}
    )
    alone = resolved(dataclasses.replace(config, algorithm="dqn", env="CartPole-v1", policies={}))[
        0
    ]
    both = resolved(config)[0]
    assert (
        (both.num_envs, both.rollout_length)
        == (alone.num_envs, alone.rollout_length)
        == (alone.num_envs, 4)
    )


def test_an_evaluation_says_which_policies_sampled() -> None:
    of_three = {"a": "long_1", "b": "short", "c": "long_2"}
    job = prepare(
        Train({"a": PPO_, "b": "random", "c": "copy(a)"}, team.Unlike(), policies=of_three, **SIZES)
    ).job
    evaluator = Evaluator(job.algorithm, job.source, 3, seed=0, max_steps=4)
    evaluation = evaluator.play(job.learner.init(jax.random.key(0)).variables)
    assert evaluation is not None and not evaluation.sampled
    lines = evaluation_lines(evaluation.summary()).splitlines()
    assert [re.findall("1 ([a-z]+) episode", line) for line in lines] == [
        ["greedy"],
        ["sampled"],
        ["sampled"],
    ], lines


@pytest.mark.case  # test_the_command_line_trains_resumes_and_evaluates
def test_rows_of_a_policy_are_its_agents() -> None:
    whole = find(team.CartPoles(3)).device()
    parts = find(
        team.CartPoles(3), wrappers=Wrappers(policies={"a": "pole_1", "b": "pole_0,pole_2"})
    ).device()
    keys = jax.random.split(jax.random.key(0), 12)
    (state, obs), (other, seen) = whole.reset(keys), parts.reset(keys)
    places = {"a": np.array([1, 4, 7, 10]), "b": np.array([0, 2, 3, 5, 6, 8, 9, 11])}
    action = jax.random.randint(keys[0], (12,), 0, 2)
    step_whole, step_parts = jax.jit(whole.step), jax.jit(parts.step)
    for _ in range(40):
        for name, rows in places.items():
            np.testing.assert_array_equal(seen[name], obs[rows])
        state, step, ended = step_whole(state, action, keys)
        other, steps, episodes = step_parts(
            other, {name: action[rows] for name, rows in places.items()}, keys
        )
        for name, rows in places.items():
            expected = jax.tree.map(lambda x, rows=rows: x[rows], (step, ended))
            jax.tree.map(np.testing.assert_array_equal, (steps[name], episodes[name]), expected)
        obs, seen = step.obs, {name: each.obs for name, each in steps.items()}


def test_agents_of_a_policy() -> None:
    agents = ["good_0", "good_1", "bad_0", 3]
    assert agents_of({}, agents, "E") == {"": agents}
    found = agents_of({"x": "*_0, 3", "y": "good_1"}, agents, "E")
    assert found == {"x": ["good_0", "bad_0", 3], "y": ["good_1"]}


WRONG = {
    "--policy a=ppo:short": "agents without a policy: long_1, long_2; the agents of .* are short, long_1, long_2",
    "--policy a=ppo:short --policy b=dqn:*": "agent short has several policies: a and b; give it one",
    "--policy a=ppo:shirt,long_*": r"policy a: no agent is named shirt \(did you mean 'short'\?\); the agents of",
    "--policy a=ppo:*": r"different observations \(short: Box\[1\]; long_1, long_2: Box\[2\]\).* --policy NAME=A",
    "--policy a=ppoo:short --policy b=ppo:long_*": r"policy a: unknown algorithm 'ppoo' \(did you mean 'ppo'\?\)",
    "--policy a:short": "--policy a:short is not a NAME=ALGO:AGENTS, such as prey=ppo:agent_0",
    "--policy a=ppo:short --policy a=ppo:long_*": "names the policy a twice",
    "--policy a=ppo:short --policy b=sac:long_* --b.learning-rate -1": "policy b: --b.learning-rate must be > 0",
    "--policy a=ppo:short --policy b=ppo:long_* --gamma 1": "unknown flag --gamma",
    "--policy a=ppo:short --policy b=ppo:long_* --b.gamma 1": "policy b: unknown flag --gamma; it is --discount here",
    "--policy a=ppo:short --policy b=dqn:long_* --num-envs 8 --b.replay-capacity 9": "b: --b.replay-capacity 9 does",
    "--policy a=ppo:short --policy b=ppo:long_* --discount 1": "--discount belongs to a policy: --a.discount",
    "--policy a=ppo:short --policy b=ppo:long_* --c.learning-rate 1": "there is no policy c",
    "--policy a=ppo:short --policy b=ppo:long_* --b.num-envs 1": "--b.num-envs: all policies share --num-envs",
    "--policy a=es:short --policy b=ppo:long_*": "policy a: es restarts all environments",
    "--policy a=td3:short --policy b=ppo:long_*": "policy a: td3 needs actions that are vectors of numbers",
    "--policy a=ppo:short --policy b=ppo:long_* --plan gradients": "--plan gradients trains one policy, .* on_device, ",
    "--policy a=ppo:short --policy b=dqn:long_* --plan asynchronous --free-running": "--free-running needs a run with one policy",
    "--policy a=ppo:short --policy b=ppo:long_* --plan own_pace --lockstep": "--lockstep makes policies wait, ",
    "--policy a=ppo:short --policy b=ppo:long_1 --policy c=copy(b):long_2 --plan own_pace": "policy c: .* none waits f",
    "--policy a=ppo:short --policy b=random:long_* --b.discount 1": "--b.discount: policy b does not train",
    "--policy a=ppo:short --policy b=fixed(nowhere):long_*": "policy b: nowhere is not a run directory",
    "--policy a=random:short --policy b=random:long_*": "no policy trains",
    "--policy a=ppo:short --policy b=ppo:long_* --vary a.learning-rat=1": "no policy .*mean 'a.learning_rate'",
    "--policy a=ppo:short --policy b=ppo:long_* --vary scale-rewards=True": "belongs to .* a.scale_rewards=",
    "--policy a=ppo:short --policy b=random:long_* --vary b.every=1": "--vary b.every: no policy that trains has such",
    "--policy a=ppo:short --policy b=ppo:long_* --vary a.discount=0.9,2": "policy a: --a.discount must be",
    "--policy a=ppo:short --policy b=copy(a):long_*": "policy b: it is a copy of a; its agents have the observation",
    "--policy a=ppo:short --policy b=copy(d):long_*": "policy b: it is a copy of d, and there is no such policy",
    "--policy a=ppo:short --policy b=ppo:long_1 --policy c=copy(b,x):long_2": "'copy.b,x.' is not a policy; copy.PO",
    "--policy a=ppo:short --policy b=ppo:long_1 --policy c=copy(b,0):long_2": "policy c: copy.b,0. needs 1 to",
    "--policy a=ppo:short --policy b=ppo:long_1 --policy c=copy(b,9,0):long_2": "policy c: copy.b,9,0. needs a pool of",
    "--policy a=ppo:short --policy b=ppo:long_1 --policy c=copy(b,9,x):long_2": "'copy.b,9,x.' is not a policy; copy.P",
    "--policy a=ppo:short --policy b=copy(a:long_*": "'copy.a' is not a policy; copy.POLICY.",
    "--policy a=ppo:short --policy b=fixed(runs/x:long_*": "'fixed.runs/x' is not a policy; fixed.RUN_DIR. and",
    "--policy a=ppo:short --policy b=ppo:long_* --config x": "--config x names the algorithms, and so does --policy",
    "--policy a=ppo:short --policy b=ppo:long_* --hide 0": "--hide works for environments with one policy",
}


@pytest.mark.parametrize("flags", WRONG)
def test_what_is_wrong_exits_2_in_one_line(
    flags: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert (
        cli.main(["train", *flags.split(), "--env", "team:Unlike", "--run-dir", str(run_dir)]) == 2
    )
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and re.search(WRONG[flags], message), message
    assert not run_dir.exists()


def test_in_python_the_message_names_fields() -> None:
    with pytest.raises(
        ConfigError, match="policy b has no agents; name them with policies b=AGENTS"
    ):
        train({"a": PPO_, "b": DQN_}, policies={"a": "*"})
    with pytest.raises(
        ConfigError, match="several policies need an environment of several agents, but Cart"
    ):
        train({"a": PPO_}, "CartPole-v1", policies={"a": "*"})
    pools = {"a": PPO_, "b": "copy(a,9,2)", "c": "copy(a,9,3)"}
    with pytest.raises(ConfigError, match="policy b: a has 2 pools of copies; use one"):
        train(pools, team.CartPoles(3), policies={"a": "pole_0", "b": "pole_1", "c": "pole_2"})
    with pytest.raises(ConfigError, match="num_envs belongs to the run; a policy may set"):
        train({"a": Train(PPO_, num_envs=3), "b": DQN_}, policies=BOTH)
    with pytest.raises(ConfigError, match=r"policy b: b\.learning_rate must be > 0"):
        train({"a": PPO_, "b": dataclasses.replace(DQN_, learning_rate=0.0)}, policies=BOTH)


def test_stored_policy_names_do_not_depend_on_classes() -> None:
    assert list(STILL) == ["Random", "Fixed", "Copy"]
    renamed = type("Renamed", (Policies,), {})
    assert [name_of(kind) for kind in (*STILL.values(), renamed)] == [*STILL, "Policies"]


def test_the_replay_of_a_policy_is_rounded_to_its_agents_rows() -> None:
    agents = {"a": "pole_0", "b": "pole_1,pole_2"}
    config = Train({"a": "dqn", "b": DQN()}, env=team.CartPoles(3), policies=agents, num_envs=12)
    parts = resolved(config)[0].algorithm.configs
    assert {name: part.algorithm.replay_capacity for name, part in parts.items()} == {
        "a": 99_996,
        "b": 99_984,
    }


@pytest.mark.parametrize("name", ["dqn", "r2d2", "rainbow", "qmix", "sac"])
def test_policies_share_sizes_that_divide_for_both(name: str) -> None:
    policies = {"a": "pole_0", "b": "pole_1,pole_2"}
    for sizes in ({}, {"num_envs": 24, "rollout_length": 5}):
        config, source = resolved(
            Train({"a": "ppo", "b": name}, env=team.CartPoles(3), policies=policies, **sizes)
        )
        for devices in (1, 8):
            check_sizes(config, make_algorithm(config, source.spec), source.spec, devices)


def test_the_command_line_trains_resumes_and_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--num-envs 8 --rollout-length 8 --total-env-steps 128 --report-interval 64 --evaluation-episodes 6"
    own = "--a.hidden-sizes 8 --a.num-minibatches 2 --a.num-epochs 2 --a.normalize-observations --num-devices 1 "
    own += "--b.hidden-sizes 8 --b.replay-capacity 1024 --b.batch-size 8 --b.learning-starts 100 --b.replay-ratio=0.03125 "
    own += "--b.epsilon-steps 200 --b.priority-exponent 0.6 --b.importance-exponent 0.4 --b.double"
    command = f"--policy a=ppo:short --policy b=dqn:long_1 --policy c=random:long_2 --env team:Unlike {sizes} {own}"
    run = runs.train(command, tmp_path / "run")
    config = runs.read_json(run / "config.json")
    assert config["hyperparameters"]["b"]["hyperparameters"]["batch_size"] == 8
    assert (
        config["hyperparameters"]["a"]["normalize_observations"]
        and config["run"]["policies"]["b"] == "long_1"
    )
    again = runs.train(f"--config {run} --env team:Unlike", tmp_path / "again")
    assert runs.untimed(again) == runs.untimed(run)
    stored = ["--config", str(run), "--env", "team:Unlike"]
    asked = request.parse([*stored, "--a.learning-rate", "0.5", "--no-a.normalize-observations"])
    assert asked is not None
    before = stored_config(run, env="team:Unlike").algorithm
    expected = varied(before, {"a.learning_rate": 0.5, "a.normalize_observations": False})
    assert asked.resolved()[0].algorithm == expected
    for args, message in {
        "--scale-rewards": "--scale-rewards: each policy has its own, as in --a.scale-rewards",
        "--discount 1": "--discount belongs to a policy: --a.discount",
        "--c.discount 1": "--c.discount: policy c does not train",
        "--d.discount 1": "there is no policy d",
        "--b.num-envs 1": "--b.num-envs: all policies share --num-envs",
    }.items():
        assert cli.main(["train", *stored, *args.split()]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["train", "ppo", *stored]) == 2
    assert "was made by ppo+dqn+random, not by ppo" in capsys.readouterr().err
    assert cli.main(["train", *stored, "--help"]) == 0
    assert "--NAME.FLAG" in capsys.readouterr().out
    more = ["resume", str(run), "--env", "team:Unlike", "--total-env-steps", "256", "--quiet"]
    assert cli.main(more) == 0
    last, summary = runs.read_metrics(run)[-1], runs.read_json(run / "summary.json")
    assert last["env_steps"] == summary["env_steps"] >= 256
    assert last["agent_steps"] == summary["agent_steps"] == 3 * last["env_steps"]
    assert cli.main(["evaluate", str(run), "--env", "team:Unlike", "--episodes", "3"]) == 0
    assert "b/return_mean" in runs.read_json(run / "summary.json")["evaluation"]
    assert cli.main(["train", "--policy", "a=ppo:b", "--help"]) == 0
    assert "--NAME.FLAG" in capsys.readouterr().out
