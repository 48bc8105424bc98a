"""Things of the user's own, brought along without editing the library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import faulty
import gymnasium
import gymnax
import jax
import numpy as np
import own
import pytest
import runs
from test_envs import check_contract, random_actions

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.spaces import Discrete

SIZES: dict[str, Any] = {
    "num_envs": 8,
    "rollout_length": 16,
    "total_env_steps": 256,
    "report_interval": 128,
    "evaluation_episodes": 2,
    "num_devices": 1,
    "hidden_sizes": (8,),
}


# --- gymnax-style environments --------------------------------------------------------------------


@pytest.mark.case  # test_a_module_makes_one_for_the_command_line
def test_an_object_is_stepped_as_its_id_is() -> None:
    """With other parameters, those that come along."""
    env, params = gymnax.make("CartPole-v1")
    short = params.replace(max_steps_in_episode=9)
    assert find(env).spec.max_episode_steps == find((env, params)).spec.max_episode_steps == 500
    keys = jax.random.split(jax.random.key(0), 5)
    for given, options in ((env, {}), ((env, short), {"max_steps_in_episode": "9"})):
        ours, named = (
            source.device() for source in (find(given), find("gymnax:CartPole-v1", options))
        )
        assert ours.spec.id == "object:CartPole" and ours.spec.backend == "gymnax"
        assert (ours.spec.family, ours.spec.max_episode_steps) == (
            named.spec.family,
            named.spec.max_episode_steps,
        )
        states = [jax.jit(each.reset)(keys)[0] for each in (ours, named)]
        for _ in range(12):
            results = [
                jax.jit(each.step)(state, np.ones(5, np.int32), keys)
                for each, state in zip((ours, named), states, strict=True)
            ]
            jax.tree.map(np.testing.assert_array_equal, *results)
            states = [result[0] for result in results]


def test_an_environment_need_not_extend_gymnaxs() -> None:
    source = find((own.Walk(), 5))
    assert source.spec.family == "other" and source.spec.action == Discrete(2)
    host = source.host(3, 0)
    host.reset()
    rng = np.random.default_rng(0)
    steps = [host.step(random_actions(source.spec.action, rng, 3)) for _ in range(60)]
    check_contract(steps, source.spec, 3)
    terminated, truncated = (
        np.stack([getattr(step, name) for step, _ in steps]) for name in ("terminated", "truncated")
    )
    assert terminated.any() and truncated.any()


MADE = gymnax.make("CartPole-v1")


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, list[jaxrl_dist.Report]]]:
    """Runs of an object and of its id, and their reports."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {
        name: jaxrl_dist.preset("a2c", env, run_dir=str(folder / name), **SIZES)
        for name, env in (("object", MADE), ("id", "CartPole-v1"))
    }
    return folder, {name: list(jaxrl_dist.train(config)) for name, config in configs.items()}


@pytest.mark.case  # test_a_module_makes_one_for_the_command_line
def test_training_from_python_is_that_of_the_id(
    trained: tuple[Path, dict[str, list[jaxrl_dist.Report]]],
) -> None:
    """And the policy loads again with the object, which no file holds."""
    folder, reports = trained
    for ours, named in zip(*reports.values(), strict=True):
        assert ours.evaluation == named.evaluation
        same = {key for key in named.metrics if not key.startswith("time/")}
        assert {key: ours.metrics[key] for key in same} == {key: named.metrics[key] for key in same}
    config = runs.read_json(folder / "object/config.json")["run"]
    assert (config["env"], config["plan"]) == ("object:CartPole", "on_device")
    obs = np.ones((2, 4), np.float32)
    loaded = jaxrl_dist.load_policy(folder / "object", env=MADE)
    np.testing.assert_array_equal(loaded(obs)[0], jaxrl_dist.load_policy(folder / "id")(obs)[0])
    message = "its environment, object:CartPole, was a Python object, which no file can hold"
    with pytest.raises(ConfigError, match=message):
        jaxrl_dist.load_policy(folder / "object")


@pytest.mark.case  # test_a_module_makes_one_for_the_command_line
def test_no_command_takes_the_name_of_an_object(
    trained: tuple[Path, dict[str, list[jaxrl_dist.Report]]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained[0] / "object"
    for command in (
        "evaluate {run}",
        "train --config {run}",
        "evaluate {run} --env object:CartPole",
    ):
        assert cli.main(command.format(run=run).split()) == 2
        err = capsys.readouterr().err
        assert "object:CartPole" in err and "was a Python object" in err and err.count("\n") == 1
    assert cli.main(f"evaluate {run} --env CartPole-v1 --episodes 2".split()) == 0


def test_a_function_that_a_module_has_is_its_name() -> None:
    """Of any kind of environment: processes and resumed runs find it again by ``MODULE:NAME``."""
    for made, name, pure in ((own.cartpole, "own:cartpole", True), (own.Walk, "own:Walk", True)):
        config, source = resolved(jaxrl_dist.Train("ppo", env=made))
        assert config.env == f"gymnax:{name}" and source.is_pure == pure
    config, source = resolved(jaxrl_dist.Train("ppo", env=faulty.make, env_workers="processes"))
    assert config.env == "gymnasium:faulty:make" and not source.is_pure
    assert resolved(jaxrl_dist.Train("ppo", env=own.cartpole, env_options={"length": "0.4"}))[
        0
    ].env_options


@pytest.mark.case  # test_a_module_makes_one_for_the_command_line
def test_a_local_function_makes_one_and_is_passed_again(tmp_path: Path) -> None:
    short = MADE[1].replace(max_steps_in_episode=9)
    run_dir = tmp_path / "run"
    config = jaxrl_dist.preset("a2c", lambda: (MADE[0], short), run_dir=str(run_dir), **SIZES)
    *_, report = jaxrl_dist.train(config)
    assert report.evaluation is not None and report.evaluation["length_mean"] <= 9
    with pytest.raises(ConfigError, match=r"object:function.*Python"):
        jaxrl_dist.resume(run_dir, total_env_steps=512)
    *_, report = jaxrl_dist.resume(run_dir, env=lambda: (MADE[0], short), total_env_steps=512)
    assert report.env_steps >= 512


def test_a_module_makes_one_for_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which runs inside the compiled program; its options are the function's."""
    run_dir = tmp_path / "run"
    runs.train(
        f"a2c --env own:cartpole --env-options length=0.4 with_params=true {runs.TINY}", run_dir
    )
    config = runs.read_json(run_dir / "config.json")["run"]
    assert (config["env"], config["plan"]) == ("gymnax:own:cartpole", "on_device")
    assert config["env_options"] == {"length": "0.4", "with_params": "true"}
    assert cli.main(["evaluate", str(run_dir), "--episodes", "2"]) == 2
    assert (
        "no file may choose code to run, or a port that other machines reach; name its environment "
        "yourself"
    ) in capsys.readouterr().err
    assert cli.main(["evaluate", str(run_dir), "--env", "own:cartpole", "--episodes", "2"]) == 0
    summary = runs.read_json(run_dir / "summary.json")["evaluation"]
    assert f"return {summary['return_mean']:.4g} " in capsys.readouterr().out
    more = f"resume {run_dir} --total-env-steps 640 --quiet"
    assert cli.main(more.split()) == 2
    assert (err := capsys.readouterr().err).count("\n") == 1 and "with --env own:cartpole" in err
    assert cli.main(f"{more.removesuffix(' --quiet')} --env own:cartpole".split()) == 0
    assert "a2c on own:cartpole, plan on_device" in capsys.readouterr().out
    assert runs.read_metrics(run_dir)[-1]["env_steps"] >= 640
    policy = jaxrl_dist.load_policy(run_dir, env="gymnax:own:cartpole")
    assert policy.source.pure is not None and policy.source.spec.id == "own:cartpole"


class Wide(own.Walk):
    def observation_space(self, params: Any) -> Any:
        return gymnasium.spaces.Discrete(2**40)


class Bits(own.Walk):
    def observation_space(self, params: Any) -> Any:
        return gymnasium.spaces.MultiBinary(2**40)


class Shifted(own.Walk):
    def action_space(self, params: Any) -> Any:
        return gymnasium.spaces.Discrete(2, start=1)


class Square(own.Walk):
    def observation_space(self, params: Any) -> Any:
        return gymnasium.spaces.Dict(bits=gymnasium.spaces.MultiBinary((2, 2)))


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a number": (
        3,
        {},
        "a gymnax-style environment with reset_env and step_env, not a int",
    ),
    "a lambda with a Gymnasium environment": (
        lambda: gymnasium.make("CartPole-v1"),
        {},
        "but this function, which no module has by name, returns a TimeLimit; to train on a gymnasium.Env, pass a func",
    ),
    "a gymnasium.Env": (
        gymnasium.make("CartPole-v1"),
        {},
        "not a TimeLimit; to train on a gymnasium.Env, pass a function of a module or notebook that makes it",
    ),
    "options": (
        own.Walk(),
        {"env_options": {"a": "1"}},
        "env_options need an environment with a name",
    ),
    "workers": (
        own.Walk(),
        {"env_workers": "processes"},
        "needs a Gymnasium environment, but object:Walk",
    ),
    "another backend": (
        "gymnasium:own:cartpole",
        {},
        "makes no gymnasium environment; env own:cartpole finds out",
    ),
    "the other way round": (
        "gymnax:faulty:make",
        {},
        "env gymnax:faulty:make makes no gymnax environment",
    ),
    "too many values": (
        Wide(),
        {},
        "Discrete observations with 1099511627776 values; up to 1048576 work, and a Box",
    ),
    "too many bits": (
        Bits(),
        {},
        "MultiBinary observations with 2199023255552 values; up to 1048576 work, and a Box",
    ),
    "actions from 1": (
        Shifted(),
        {},
        "Discrete actions that do not count from 0; only Gymnasium's",
    ),
    "a table of bits": (
        Square(),
        {},
        "MultiBinary observations that are not vectors; only Gymnasium's",
    ),
    "an unknown option": (
        "own:cartpole",
        {"env_options": {"lenth": "1"}},
        "did you mean 'length'?",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_environment_of_the_users_own(what: str) -> None:
    env, fields, message = REFUSED[what]
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        jaxrl_dist.train(jaxrl_dist.Train("ppo", env=env, **fields))
    assert "\n" not in str(error.value)
