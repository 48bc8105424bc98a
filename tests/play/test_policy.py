"""Policies taken out of their run directories."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty
import jax
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli, rng
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.commands import evaluate
from jaxrl_dist.play.export import export
from jaxrl_dist.settings.resolve import find_env
from jaxrl_dist.spaces import Box, Discrete
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.types import Context

SIZES: dict[str, Any] = {
    "num_envs": 8, "rollout_length": 4, "hidden_sizes": (4,), "num_devices": 1, "total_env_steps": 128,
    "evaluation_episodes": 0,
}  # fmt: skip
RUNS = {"discrete": runs.CARTPOLE, "envpool": runs.ENVPOOL, "recurrent": runs.RECURRENT}


@pytest.fixture(params=runs.cases(RUNS, "discrete", "envpool"), scope="module")
def run_dir(request: pytest.FixtureRequest) -> Path:
    return runs.finished(RUNS[request.param])


@pytest.fixture(scope="module")
def policy(run_dir: Path) -> jaxrl_dist.Policy:
    return jaxrl_dist.load_policy(run_dir)


def observations(policy: jaxrl_dist.Policy, count: int = 64) -> np.ndarray:
    shape = (count, *policy.source.spec.observation.shape)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_stepped_by_hand_it_plays_as_the_run_says(policy: jaxrl_dist.Policy, run_dir: Path) -> None:
    said = runs.read_json(run_dir / "summary.json")["evaluation"]
    seed = int(jax.random.bits(rng.stream(0, rng.Stream.EVALUATE))) & 0x7FFFFFFF
    returns: dict[int, float] = {}
    lengths: dict[int, float] = {}
    with contextlib.closing(policy.source.host(2, seed, training=False)) as env:
        obs, core = env.reset(), policy.initial_core(2)
        while len(returns) < 2:
            action, core = policy(obs, core)
            step, ended = env.step(np.asarray(action))
            obs = step.obs
            for index in np.flatnonzero(ended.episodes):
                returns.setdefault(index, float(ended.return_sum[index]))
                lengths.setdefault(index, float(ended.length_sum[index]))
    assert np.mean(list(returns.values())) == pytest.approx(said["return_mean"], rel=1e-5)
    assert np.std(list(returns.values())) == pytest.approx(said["return_std"], rel=1e-3)
    assert np.mean(list(lengths.values())) == said["length_mean"]


def test_a_population_has_no_policy_but_its_members(run_dir: Path, tmp_path: Path) -> None:
    population = shutil.copytree(run_dir, tmp_path / "population")
    shutil.copytree(run_dir, population / "members" / "000")
    with pytest.raises(
        jaxrl_dist.ConfigError,
        match=r"is a population; name one of its members, such as .*members/000",
    ):
        jaxrl_dist.load_policy(population)
    assert jaxrl_dist.load_policy(population / "members" / "000").config.seed == 0


def test_all_members_of_a_population_are_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = runs.finished(runs.CARTPOLE)
    population = shutil.copytree(run_dir, tmp_path / "population")
    for member in ("000", "001"):
        shutil.copytree(run_dir, population / "members" / member)
    head_of_file = (
        "member,seed,learning_rate,status,env_steps,iteration,episode_return,evaluation_return"
    )
    (population / "results.csv").write_text(
        f"{head_of_file}\n000,7,0.1,done,9,3,20,\n001,8,0.1,done,9,3,21,\n"
    )
    with pytest.raises(
        jaxrl_dist.ConfigError, match=r"such as .*members/001, the best by its training return"
    ):
        jaxrl_dist.load_policy(population)
    assert cli.main(["evaluate", str(population), "--episodes", "3"]) == 0
    returns = jaxrl_dist.load_policy(run_dir).evaluate(3).returns
    titles = ["greedy return, mean", "std over episodes"]
    mean, std = f"{returns.mean():.4g}", f"{returns.std():.4g}"
    told, head, *rows, last = capsys.readouterr().out.splitlines()
    assert told == "evaluating 2 members: 3 episodes each"
    assert re.split(" {2,}", head) == ["member", "seed", "learning_rate", "episodes", *titles]
    assert [row.split() for row in rows] == [
        ["000", "7", "0.1", "3", mean, std],
        ["001", "8", "0.1", "3", mean, std],
    ]
    about = "mean and standard deviation of 6 greedy episodes; 0 between the means of the 2 members"
    assert last == f"return {mean} +- {std} ({about})"
    for status, finished in {"done": True, "training": False}.items():
        (population / "results.csv").write_text(
            f"{head_of_file}\n000,7,0.1,done,9,3,20,\n001,8,0.1,{status},9,3,21,\n"
        )
        assert cli.main(["evaluate", str(population), "--episodes", "3", "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["finished"] is finished and set(printed["by_member"]) == {"000", "001"}


def test_the_table_of_members_has_metrics_of_the_info() -> None:
    numbers = {"episodes": 1, "cut": 0, "return_mean": 5.0, "info/success": 0.25}
    columns = {"episodes": "1", "greedy return, mean": "5", "info/success": "0.25"}
    assert evaluate._columns(numbers) == columns
    of_policies = {**numbers, **{f"prey/{name}": x for name, x in numbers.items()}}
    assert evaluate._columns(of_policies) == {
        "episodes": "1", "prey greedy return, mean": "5", "prey info/success": "0.25",
    }  # fmt: skip


def test_greedy_without_a_key_and_sampled_with_one(policy: jaxrl_dist.Policy) -> None:
    obs = observations(policy)
    greedy = np.asarray(policy(obs)[0])
    np.testing.assert_array_equal(policy(obs)[0], greedy)
    sampled = [np.asarray(policy(obs, None, jax.random.key(seed))[0]) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(sampled[0], sampled[1])
    assert (sampled[0] != sampled[2]).any() and (sampled[0] != greedy).any()
    same = np.broadcast_to(obs[:1], obs.shape)
    assert len(np.unique(np.asarray(policy(same, None, jax.random.key(3))[0]))) > 1, (
        "each row has another key"
    )


def test_actions_lie_in_the_environments_bounds(policy: jaxrl_dist.Policy) -> None:
    space = policy.source.spec.action
    for key in (None, jax.random.key(0)):
        action = np.concatenate(
            [policy(scale * observations(policy), None, key)[0] for scale in (1, 10, 100, 1000)]
        )
        assert action.shape == (256, *space.shape)
        if isinstance(space, Discrete):
            assert np.issubdtype(action.dtype, np.integer) and set(np.unique(action)) <= set(
                range(space.n)
            )
        else:
            assert isinstance(space, Box)
            assert (action >= space.low).all() and (action <= space.high).all()


def test_missing_core_is_the_initial_core(policy: jaxrl_dist.Policy) -> None:
    obs = observations(policy)
    np.testing.assert_array_equal(policy(obs)[0], policy(obs, policy.initial_core(len(obs)))[0])


def test_a_recurrent_policy_remembers() -> None:
    policy = jaxrl_dist.load_policy(runs.finished(runs.RECURRENT))
    obs = observations(policy)
    _, core = policy(obs)
    remembered, later = policy(obs, core)
    assert (np.asarray(remembered) != np.asarray(policy(obs)[0])).any()
    changed = [
        np.any(np.asarray(x) != np.asarray(y))
        for x, y in zip(jax.tree.leaves(core), jax.tree.leaves(later), strict=True)
    ]
    assert any(changed)


def test_normalisation_comes_with_the_policy() -> None:
    policy = jaxrl_dist.load_policy(runs.finished(runs.ENVPOOL))
    stats = policy.variables.stats[0]
    assert float(stats.count) == runs.read_metrics(runs.finished(runs.ENVPOOL))[-1]["env_steps"]
    assert (np.asarray(stats.mean) != 0).all()


def test_observations_of_another_shape_are_refused(policy: jaxrl_dist.Policy) -> None:
    obs = observations(policy, 1)
    for wrong in (obs[0], obs[..., :-1], obs[None]):
        with pytest.raises(ValueError, match=r"observations have shape \[B, .*\]") as error:
            policy(wrong)
        assert str(error.value).endswith("; obs[None] makes one observation a batch") == (
            wrong.shape == obs.shape[1:]
        )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda obs: {"x": obs}, "observations are arrays here, not a dict"),
        (
            lambda obs: (obs[0], {}),
            r"observations are arrays here, not \(obs, info\), as reset returns them",
        ),
        (lambda obs: obs[:0], r"observations have shape \[B, \d\] here, not \[0, \d\]"),
    ],
)
def test_observations_of_another_kind_are_refused(
    policy: jaxrl_dist.Policy, wrong: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policy(wrong(observations(policy, 1)))


@pytest.mark.parametrize("kind", ["Discrete", "MultiDiscrete", "MultiBinary", "Narrow"])
def test_it_speaks_the_environments_language(kind: str, tmp_path: Path) -> None:
    """Categories may count from any number, and vectors of them may have several axes."""
    native, options = faulty.spaced(kind, kind), {"observation": kind, "action": kind}
    config = jaxrl_dist.preset("ppo", "faulty:spaced", hidden_sizes=(8,), env_options=options)
    source = find_env(config)
    variables = source.spec.bare(make_algorithm(config, source.spec)).init(jax.random.key(0))
    policy = jaxrl_dist.Policy(config, source, variables)
    exported = tmp_path / "policy"
    pytest.importorskip("flatbuffers")
    export(policy, exported)
    call = jax.export.deserialize(bytearray(exported.read_bytes())).call
    obs, _ = native.reset(seed=0)
    for _ in range(20):
        actions, _ = policy(np.asarray(obs)[None], key=jax.random.key(1))
        # which refuses others
        obs, *_ = native.step(np.asarray(actions)[0].astype(native.action_space.dtype))
        seen = np.asarray(obs)[None]
        acted = call(seen.astype(policy.observation.dtype), (), np.ones(1, bool))[0]
        np.testing.assert_allclose(acted, policy(seen)[0], rtol=1e-5)
    if kind != "Narrow":
        with pytest.raises(ValueError, match="hold values that the environment's do not"):
            policy(np.full((1, *native.observation_space.shape), 9))


@pytest.mark.parametrize(
    "core, reward, message",
    [
        (2, np.zeros(3), "the core must have 3 environments"),
        (3, np.float32(0), r"rewards have shape \[3\] here, not \[\]"),
        (3, np.zeros((3, 1)), r"rewards have shape \[3\] here, not \[3, 1\]"),
        (3, np.zeros(2), r"rewards have shape \[3\] here, not \[2\]"),
    ],
)
def test_cores_and_rewards_of_another_batch_are_refused(
    core: int, reward: Any, message: str
) -> None:
    config = jaxrl_dist.preset(
        "ppo", "CartPole-v1", core="gru", core_size=4, core_inputs="action,reward"
    )
    source = find_env(config)
    variables = source.spec.bare(make_algorithm(config, source.spec)).init(jax.random.key(0))
    policy = jaxrl_dist.Policy(config, source, variables)
    policy(np.zeros((3, 4)), policy.initial_core(3), None, np.zeros(3))
    with pytest.raises(ValueError, match=message):
        policy(np.zeros((3, 4)), policy.initial_core(core), None, reward)


def test_one_observation_of_several_parts_is_told_of_batches() -> None:
    policy: Any = object.__new__(jaxrl_dist.Policy)
    space = {"at": Discrete(3), "eye": Box((2,), np.dtype(np.float32), -np.ones(2), np.ones(2))}
    policy.source = SimpleNamespace(spec=SimpleNamespace(observation=space, policies={}, tuples=()))
    policy.config = SimpleNamespace(algorithm=PPO())
    tells = r"^observations at have shape \[B\] here, not \[\]; jax\.tree\.map\(lambda x: x\[None\], obs\) makes one"
    with pytest.raises(ValueError, match=tells):
        policy({"at": np.int64(1), "eye": np.zeros(2, np.float32)})


def test_what_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        jaxrl_dist.ConfigError, match=r"is not a run directory: it has no config\.json"
    ):
        jaxrl_dist.load_policy(tmp_path)
    (tmp_path / "config.json").write_bytes(
        (runs.finished(runs.CARTPOLE) / "config.json").read_bytes()
    )
    with pytest.raises(
        jaxrl_dist.ConfigError, match=r"^nothing is not a run directory: it does not exist$"
    ):
        jaxrl_dist.load_policy("nothing")
    with pytest.raises(
        jaxrl_dist.ConfigError, match=r"is not a run directory: it is not a directory$"
    ):
        jaxrl_dist.load_policy(runs.finished(runs.CARTPOLE) / "config.json")
    with pytest.raises(jaxrl_dist.ConfigError, match="has no checkpoint"):
        jaxrl_dist.load_policy(str(tmp_path))


def test_an_old_style_key_is_the_same_key(policy: jaxrl_dist.Policy) -> None:
    obs = observations(policy)
    old = jax.random.PRNGKey(3)
    for key in (old, np.asarray(old)):
        np.testing.assert_array_equal(
            policy(obs, key=key)[0], policy(obs, key=jax.random.key(3))[0]
        )


def test_what_is_no_key_is_refused() -> None:
    policy = jaxrl_dist.load_policy(runs.finished(runs.CARTPOLE))
    for key in (
        0,
        1.5,
        "key",
        [0, 1],
        np.zeros(2),
        np.uint32(3),
        jax.random.split(jax.random.key(0)),
    ):
        with pytest.raises(
            ValueError, match=r"key must be a single key such as jax.random.key\(0\), not "
        ):
            policy(observations(policy, 2), key=key)  # type: ignore[arg-type]


def test_misuse_is_refused_in_one_line(policy: jaxrl_dist.Policy) -> None:
    with pytest.raises(jaxrl_dist.ConfigError, match="plays 1 episode or more, not 0"):
        policy.evaluate(episodes=0)
    with pytest.raises(
        jaxrl_dist.ConfigError, match=r"takes load_policy\(run_dir\), not 'runs/lake'"
    ):
        jaxrl_dist.exact.measure("runs/lake")
    table = jaxrl_dist.exact.Table.random(np.random.default_rng(0), 3, 2)
    for temperature in (-1.0, float("nan")):
        with pytest.raises(jaxrl_dist.ConfigError, match="a temperature must be 0 or more"):
            jaxrl_dist.exact.optimal(table, 0.9, temperature=temperature)
    data = jaxrl_dist.record(policy, 20, num_envs=2)
    with pytest.raises(jaxrl_dist.ConfigError, match=r"networks need 1 or more|recurrent core"):
        jaxrl_dist.estimate(policy, data, updates=0)


def test_tuples_are_those_of_the_environment() -> None:
    """Observations of a Tuple are given as such, and actions come back as one."""
    options = "--env-options observation=Tuple action=Tuple"
    tuples = jaxrl_dist.load_policy(
        runs.finished(
            f"ppo --env faulty:spaced {options} {runs.TINY.replace('384', '128').replace('episodes 2', 'episodes 0')}"
        ),
        env="faulty:spaced",
    )
    action, _ = tuples((np.array([0, 1, 1]),))
    assert isinstance(action, tuple) and action[0].shape == (3,)
    again, _ = tuples({"0": np.array([0, 1, 1])})
    np.testing.assert_array_equal(action[0], again[0])


@pytest.mark.parametrize("on", [False, True])
def test_value_is_of_raw_rewards(on: bool) -> None:
    fields = {"scale_rewards": on, "normalize_observations": on}
    config = jaxrl_dist.preset("ppo", "gymnax:CartPole-v1", **SIZES, **fields, report_interval=64)
    *_, report = jaxrl_dist.train(config)
    policy = jaxrl_dist.load_policy(report)
    obs = observations(policy, 3)
    context = Context(None, np.float32(0.0))
    core = policy.initial_core(3)
    _, _, extras = policy.algorithm.policy(policy.variables, obs, core, context)
    scale = policy.variables.stats[0].std() if on else 1.0
    np.testing.assert_allclose(policy.value(obs), scale * extras["value"], rtol=1e-6)
    assert not on or abs(float(scale) - 1) > 0.01


def test_log_prob_of_all_actions_is_a_distribution() -> None:
    report = next(iter(jaxrl_dist.train(jaxrl_dist.preset("ppo", "gymnax:CartPole-v1", **SIZES))))
    policy = jaxrl_dist.load_policy(report)
    obs = observations(policy, 3)
    chosen = np.stack([np.exp(policy.log_prob(obs, np.full(3, a))) for a in range(2)], -1)
    np.testing.assert_allclose(chosen.sum(-1), 1, rtol=1e-5)
    greedy, _ = policy(obs)
    np.testing.assert_array_equal(chosen.argmax(-1), greedy)


def test_value_of_action_values_is_the_best() -> None:
    config = jaxrl_dist.preset("dqn", "gymnax:CartPole-v1", **SIZES)
    policy = jaxrl_dist.load_policy(next(iter(jaxrl_dist.train(config))))
    obs = observations(policy, 3)
    assert policy.algorithm.action_values is not None
    values, _ = policy.algorithm.action_values(policy.variables, obs)
    np.testing.assert_array_equal(policy.value(obs), values.max(-1))


def test_a_policy_without_value_or_distribution_says_so() -> None:
    config = jaxrl_dist.preset("es", "gymnax:CartPole-v1", **SIZES)
    policy = jaxrl_dist.load_policy(next(iter(jaxrl_dist.train(config))))
    obs = observations(policy, 3)
    with pytest.raises(ValueError, match="es has no value of an observation; estimate it with"):
        policy.value(obs)
    with pytest.raises(ValueError, match="es has no known distribution of actions; sample them"):
        policy.log_prob(obs, np.zeros(3, int))


def test_the_policy_of_a_report_acts_as_its_run_does(tmp_path: Path) -> None:
    fields: dict[str, Any] = {**SIZES, "env_options": {"max_steps_in_episode": "5"}}
    config = jaxrl_dist.preset("ppo", "gymnax:CartPole-v1", **fields, run_dir=str(tmp_path / "run"))
    for report in jaxrl_dist.train(config):
        policy = jaxrl_dist.load_policy(report)
        longer = jaxrl_dist.load_policy(report, env_options={"max_steps_in_episode": "30"})
        assert policy.evaluate(4, max_steps=40).lengths.max() <= 5
        assert longer.evaluate(4, max_steps=40).lengths.max() > 5
        with pytest.raises(jaxrl_dist.ConfigError, match="a report holds its run's torso"):
            jaxrl_dist.load_policy(report, torso=object())  # type: ignore[arg-type]
    loaded = jaxrl_dist.load_policy(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, policy.variables)
    assert loaded.evaluate(4).summary() == policy.evaluate(4).summary()


def test_the_policy_of_a_past_report_is_refused() -> None:
    config = jaxrl_dist.preset("ppo", "gymnax:CartPole-v1", **SIZES, report_interval=32)
    with contextlib.closing(jaxrl_dist.train(config)) as reports:
        first = next(reports)
        next(reports)
        with pytest.raises(RuntimeError, match="past"):
            jaxrl_dist.load_policy(first)
