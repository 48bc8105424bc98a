"""``--init-parts``: parts of another run's networks to start from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs
import team

import jaxrl_dist
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.run import arrays, checkpoint, saving
from jaxrl_dist.settings.resolve import find_env, resolved
from jaxrl_dist.training.algorithm import make_algorithm, variable_shapes
from jaxrl_dist.training.job import make_session
from jaxrl_dist.training.weights import _offered, load
from jaxrl_dist.types import Variables


def named(tree: Any) -> dict[str, np.ndarray]:
    return dict(zip(arrays.names(tree), jax.tree.leaves(tree), strict=True))


RAW = {"scale_rewards": False, "normalize_observations": False}


def first(**fields: Any) -> dict[str, np.ndarray]:
    """The variables of a run that has learnt nothing: its learning rate is too small to change
    any.
    """
    sizes = {
        "num_envs": 8,
        "rollout_length": 16,
        "hidden_sizes": (8,),
        "num_devices": 1,
        "evaluation_episodes": 0,
    }
    fields = {
        **sizes,
        "num_epochs": 2,
        "num_minibatches": 2,
        "total_env_steps": 1,
        "seed": 3,
        **fields,
    }
    (report,) = jaxrl_dist.train(
        jaxrl_dist.preset("ppo", "CartPole-v1", learning_rate=1e-30, **fields)
    )
    return named(report.variables())


def test_a_run_starts_with_parts_of_another(tmp_path: Path) -> None:
    there = runs.finished(runs.CARTPOLE)
    config = jaxrl_dist.preset("ppo", "CartPole-v1", hidden_sizes=(8,))
    trained = named(
        checkpoint.load_variables(
            there, variable_shapes(make_algorithm(config, find_env(config).spec))
        )
    )
    mixed = first(init_from=str(there), init_parts="policy_torso,value")
    assert mixed.keys() == trained.keys()
    for name, value in mixed.items():
        taken = "policy_torso" in name or "value/" in name
        if taken:
            np.testing.assert_allclose(value, trained[name], rtol=0, atol=1e-20, err_msg=name)
        elif "kernel" in name:
            assert np.abs(value - trained[name]).max() > 1e-3, f"{name} is untrained"


def saved(tmp_path: Path, **params: Any) -> str:
    saving.save_variables(tmp_path, Variables(params, ()))
    return str(tmp_path)


def layer(*shape: int) -> Any:
    return {"params": {"Dense_0": {"kernel": np.ones(shape, np.float32)}}}


def test_init_parts_are_found_at_any_depth(tmp_path: Path) -> None:
    shapes = {
        "actor": {"torso": layer(4, 8), "gru": layer(8, 8), "head": layer(8, 1)},
        "value_torso": layer(4, 8),
    }
    like = jax.eval_shape(lambda: Variables(shapes, ()))
    run_dir = saved(
        tmp_path,
        actor={"torso": layer(4, 8), "gru": layer(8, 8)},
        value_torso=layer(4, 8),
        other=layer(2),
    )
    for parts, wanted in {
        "torso": (1, 0, 0, 1),
        "core": (0, 1, 0, 0),
        "actor/torso,core": (1, 1, 0, 0),
    }.items():
        got = load(run_dir, like, parts).params
        places = (
            got["actor"]["torso"],
            got["actor"]["gru"],
            got["actor"]["head"],
            got["value_torso"],
        )
        kernels = [place["params"]["Dense_0"]["kernel"] for place in places]
        assert [isinstance(x, np.ndarray) for x in kernels] == [bool(x) for x in wanted], parts
        assert all(
            np.array_equal(x, np.ones(x.shape)) for x in kernels if isinstance(x, np.ndarray)
        )


@pytest.mark.parametrize("size", [1, 2])
def test_copies_begin_with_init_parts_of_their_source(size: int, tmp_path: Path) -> None:
    kinds = {"new": DQN(hidden_sizes=(8,)), "old": f"copy(new,4,{size})"}
    fields = {
        "policies": {"new": "pole_0", "old": "pole_1"},
        "num_devices": 1,
        "num_envs": 2,
        "rollout_length": 4,
    }
    config, source = resolved(
        jaxrl_dist.Train(kinds, env=team.CartPoles(2), normalize_observations=True, **fields)
    )
    shapes = variable_shapes(make_algorithm(config, source.spec))["new"]
    saving.save_variables(
        tmp_path, {"new": jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), shapes)}
    )
    config = dataclasses.replace(config, init_from=str(tmp_path), init_parts="new")
    variables = make_session(config, source).initial_state().variables
    new, old = variables["new"], variables["old"]
    stats = old.stats if size == 1 else old.stats.stats
    for mine, theirs in zip(*map(jax.tree.leaves, ((old.params, stats), tuple(new))), strict=True):
        np.testing.assert_array_equal(mine, np.full((size, *theirs.shape)[size == 1 :], 7))


@pytest.mark.case  # test_copies_begin_with_init_parts_of_their_source
def test_the_policy_that_trains_goes_on_from_a_run_of_one_policy(tmp_path: Path) -> None:
    fields = {
        "env": team.CartPoles(2),
        "num_devices": 1,
        "num_envs": 2,
        "rollout_length": 4,
        "total_env_steps": 8,
    }
    alone = jaxrl_dist.Train(
        DQN(hidden_sizes=(8,)), **fields, run_dir=str(tmp_path / "run"), evaluation_episodes=0
    )
    *_, last = jaxrl_dist.train(alone)
    kinds, policies = (
        {"new": DQN(hidden_sizes=(8,)), "old": "copy(new,4,2)"},
        {"new": "pole_0", "old": "pole_1"},
    )
    league = jaxrl_dist.Train(kinds, **fields, policies=policies, init_from=str(tmp_path / "run"))
    variables = make_session(*resolved(league)).initial_state().variables
    for name, copies in {"new": 1, "old": 2}.items():
        for mine, theirs in zip(
            *map(jax.tree.leaves, (variables[name].params, last.variables().params)), strict=True
        ):
            np.testing.assert_array_equal(
                mine, np.broadcast_to(theirs, (copies, *theirs.shape)[copies == 1 :])
            )


def test_parts_of_several_policies_are_offered_without_names() -> None:
    names = "a/params/policy/params/bias", "a/params/value_torso/mlp/params/bias", "b/stats/mean"
    assert (
        _offered(names)
        == {"policy", "value_torso/mlp", "stats"}
        == _offered([name[2:] for name in names])
    )


@pytest.mark.parametrize(
    "parts, message",
    [
        (
            "torsos",
            r"init_parts 'torsos': .* no such part \(did you mean 'torso'\?\); they have: policy, torso",
        ),
        (
            "torso,",
            "init_parts '': the networks of this run have no such part; they have: policy, torso",
        ),
        (
            "torso",
            r"another network: params/torso/.*kernel is float32\[3, 8\] there, but float32\[4, 8\] here",
        ),
        (
            "policy",
            r"another network: params/policy/.*kernel is missing there, but float32\[8, 2\] here",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(parts: str, message: str, tmp_path: Path) -> None:
    like = jax.eval_shape(lambda: Variables({"torso": layer(4, 8), "policy": layer(8, 2)}, ()))
    with pytest.raises(ValueError, match=message) as refused:
        load(saved(tmp_path, torso=layer(3, 8)), like, parts)
    assert "\n" not in str(refused.value)


def test_other_running_statistics_name_the_settings_to_change(tmp_path: Path) -> None:
    like = jax.eval_shape(lambda: Variables({"torso": layer(3, 8)}, {"count": np.float32(0)}))
    with pytest.raises(
        ValueError, match=r"stats/count is missing there, .*; normalise observations"
    ):
        load(saved(tmp_path, torso=layer(3, 8)), like, None)


def test_parts_need_a_run() -> None:
    with pytest.raises(ValueError, match="init_parts does nothing without init_from"):
        jaxrl_dist.Train(DQN(), env="CartPole-v1", init_parts="torso").checked()


SAME = [
    ("CartPole-v1", ("ppo", "appo", "a2c", "pg", "impala", "bc", "marwil", "alphazero")),
    ("CartPole-v1", ("dqn", "apex")),
    ("Pendulum-v1", ("td3", "td3+bc")),
]
"""Algorithms that can start from each other, as docs/runs.md says."""


@pytest.mark.parametrize("env, names", SAME)
def test_algorithms_of_a_row_have_equal_networks(env: str, names: tuple[str, ...]) -> None:
    page = (runs.ROOT / "docs/runs.md").read_text(encoding="utf-8")
    assert f"| each other | {', '.join(f'`{name}`' for name in names)} |" in page
    shapes = []
    spec = find_env(jaxrl_dist.preset("ppo", env)).spec
    for name in names:
        config = jaxrl_dist.preset(
            name,
            env,
            hidden_sizes=(8,),
            scale_rewards=False,
            normalize_observations=False,
            plan="on_device",
        )
        algorithm = make_algorithm(config, spec)
        shapes.append({path: x.shape for path, x in named(variable_shapes(algorithm)).items()})
    assert all(each == shapes[0] for each in shapes)


@pytest.mark.parametrize(
    "fields, remedy",
    [
        (
            {"scale_rewards": True},
            "scale_rewards is on in one of the two runs alone; add scale_rewards=False",
        ),
        ({"ema_steps": 64}, "ema_steps is on in one of the two runs alone; add ema_steps 0"),
        ({"normalize_observations": True}, "add normalize_observations=False"),
    ],
)
def test_a_run_with_other_statistics_names_the_flag(fields: dict[str, Any], remedy: str) -> None:
    there = str(runs.finished(f"{runs.CARTPOLE} --no-scale-rewards --no-normalize-observations"))
    with pytest.raises(jaxrl_dist.ConfigError, match=remedy) as error:
        first(init_from=there, **RAW | fields)
    assert "init_parts policy,policy_torso,value,value_torso" in str(error.value)
    first(init_from=there, init_parts="policy,policy_torso,value,value_torso", **RAW | fields)


def test_a_run_without_the_statistics_of_another_names_the_flag(tmp_path: Path) -> None:
    first(**RAW | {"scale_rewards": True}, run_dir=str(tmp_path / "run"))
    with pytest.raises(jaxrl_dist.ConfigError, match="runs alone; add scale_rewards, or"):
        first(init_from=str(tmp_path / "run"), **RAW)
