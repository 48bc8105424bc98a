"""An algorithm in a file of the user's, named on the command line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import runs
from probes import random_rollout, spec
from test_docs import blocks

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.algorithms import from_file, label_of, name_of, source_of
from jaxrl_dist.algorithms.actor_critic import actor_critic
from jaxrl_dist.algorithms.pg import PG
from jaxrl_dist.commands import request
from jaxrl_dist.config.train import RUN_DEFAULTS
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings.members import members
from jaxrl_dist.settings.stored import stored_config, to_json
from jaxrl_dist.training.setup import prepare
from jaxrl_dist.types import Acted, Algorithm, Context, EnvSpec, Replay, Variables

OWN = blocks("docs/adding-an-algorithm.md")[0]
CONFIG_CLASS = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Mine:
    x: int = 3

    @staticmethod
    def preset(spec):
        return {}

    def make(self, spec):
        return None
"""


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of what running a file adds to where modules are found."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.path", [*__import__("sys").path])
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documented algorithm, with a part of it in a module beside the file."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "a_helper_beside_it.py").write_text("BOUND = 3.0\n")
    text = OWN.replace("-3.0, 3.0", "-BOUND, BOUND").replace(
        "import jax\n", "import jax\nfrom a_helper_beside_it import BOUND\n"
    )
    (folder / "my_algo.py").write_text(text)
    return folder / "my_algo.py"


@pytest.fixture(scope="module")
def run_dir(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = "--env CartPole-v1 --temperature 0.5"
    return runs.train(f"{file} {flags} {runs.TINY}", tmp_path_factory.mktemp("runs") / "run")


def test_its_fields_are_flags(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(file), "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (
        "jaxrl-dist train my_algo" in out
        and "--temperature X" in out
        and "How much better an action must be" in out
    )
    assert cli.main(["train", str(file), "--env", "CartPole-v1", "--temperature", "0"]) == 2
    assert "--temperature must be > 0" in capsys.readouterr().err
    assert cli.main(["train", str(file), "--env", "CartPole-v1", "--temprature", "1"]) == 2
    assert "did you mean '--temperature'?" in capsys.readouterr().err


def test_a_loss_that_takes_a_mean_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text().replace("return total,", "return jnp.mean(total),")
    (tmp_path / "mean.py").write_text(
        text.replace("from a_helper_beside_it import BOUND", "BOUND = 3.0")
    )
    assert (
        cli.main(
            [
                "train",
                str(tmp_path / "mean.py"),
                "--env",
                "CartPole-v1",
                *runs.TINY.split(),
                "--run-dir",
                str(tmp_path / "x"),
            ]
        )
        == 2
    )
    assert (
        "the algorithm's loss returned losses ()" in (err := capsys.readouterr().err)
        and err.count("\n") == 1
    )


@pytest.mark.case  # test_its_runs_are_evaluated_and_repeated_by_naming_it
def test_its_runs_name_no_code(run_dir: Path, file: Path) -> None:
    config = runs.read_json(run_dir / "config.json")
    assert (
        config["algorithm"] == "RWR"
        and str(file.parent) not in (run_dir / "config.json").read_text()
    )
    assert (config["hyperparameters"]["temperature"], config["run"]["num_envs"]) == (0.5, 8)


def test_a_run_holds_the_text_of_its_file(run_dir: Path, file: Path) -> None:
    stored = runs.read_json(run_dir / "config.json")["algorithm_file"]
    assert (run_dir / "algorithm.txt").read_text() == file.read_text()
    assert stored["name"] == "my_algo.py"
    assert stored["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert not [*run_dir.rglob("*.py")]
    assert not (runs.finished(runs.CARTPOLE) / "algorithm.txt").exists()
    assert "algorithm_file" not in runs.read_json(runs.finished(runs.CARTPOLE) / "config.json")


def test_its_runs_are_evaluated_and_repeated_by_naming_it(
    run_dir: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(run_dir), "--episodes", "2"]) == 2
    assert (
        "unknown algorithm 'RWR'" in (err := capsys.readouterr().err)
        and "RUN_DIR --algorithm FILE.py`" in err
    )
    with pytest.raises(
        ConfigError, match=r"load_policy\(run_dir.*MyPPO\).*Python.*--algorithm.*FILE.py"
    ):
        jaxrl_dist.load_policy(run_dir)
    assert cli.main(["evaluate", str(run_dir), "--episodes", "2", "--algorithm", str(file)]) == 0
    summary = runs.read_json(run_dir / "summary.json")["evaluation"]
    assert f"return {summary['return_mean']:.4g} " in capsys.readouterr().out
    again = runs.train(f"{file} --config {run_dir}", tmp_path / "again")
    assert runs.untimed(again) == runs.untimed(run_dir)
    assert cli.main(["train", str(file), "--config", str(runs.finished(runs.CARTPOLE))]) == 2
    assert "was made by ppo, not by RWR" in capsys.readouterr().err
    assert cli.main(["evaluate", str(runs.finished(runs.CARTPOLE)), "--algorithm", str(file)]) == 2
    assert "is a run of ppo, not of RWR; remove --algorithm" in capsys.readouterr().err


@pytest.mark.case  # test_its_runs_are_evaluated_and_repeated_by_naming_it
def test_its_runs_are_resumed_by_naming_it(
    run_dir: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, more = shutil.copytree(run_dir, tmp_path / "run"), "--total-env-steps 640 --quiet"
    (tmp_path / "mine.py").write_text(CONFIG_CLASS)
    for flags, message in {
        "": "unknown algorithm 'RWR'",
        f"--algorithm {tmp_path}/mine.py": "the run trained RWR, not Mine; name the file",
        f"--algorithm {tmp_path}/nowhere.py": f"there is no file {tmp_path}/nowhere.py",
        f"--algorithm {file} --temperature 2": "resume keeps --temperature",
    }.items():
        assert cli.main(f"resume {copy} {flags} {more}".split()) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    before = runs.untimed(copy)
    assert cli.main(f"resume {copy} --algorithm {file} {more}".split()) == 0
    assert capsys.readouterr() == ("", "")
    after = runs.untimed(copy)
    assert after[: len(before) - 1] == before[:-1] and after[-1]["env_steps"] >= 640
    assert runs.read_json(copy / "summary.json")["env_steps"] == after[-1]["env_steps"]


@pytest.fixture
def changed(file: Path, tmp_path: Path) -> Path:
    """Another file whose class has the same name, with another loss."""
    shutil.copy(file.parent / "a_helper_beside_it.py", tmp_path)
    other = tmp_path / "other.py"
    other.write_text(file.read_text().replace("-BOUND, BOUND", "-2 * BOUND, BOUND"))
    assert other.read_text() != file.read_text()
    return other


def test_another_file_does_not_resume_a_run(
    run_dir: Path, changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "run")
    before = (copy / "metrics.jsonl").read_bytes()
    for command in (
        f"resume {copy} --algorithm {changed} --total-env-steps 640",
        f"train {changed} --config {copy} --run-dir {copy} --resume-or-start",
    ):
        assert cli.main(command.split()) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"{changed} has other code than {copy}/algorithm.txt" in err
        assert f"--config {copy} --init-from {copy}" in err
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_evaluations_with_another_file_warn(
    run_dir: Path, changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"evaluate {run_dir} --episodes 2 --quiet --algorithm {changed}"
    assert cli.main(command.split()) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"warning: {changed} has other code than {run_dir}/algorithm.txt" in err


def test_comments_docstrings_and_layout_are_not_code(tmp_path: Path) -> None:
    code = set()
    for index, text in enumerate(
        (
            CONFIG_CLASS,
            CONFIG_CLASS.replace("x: int = 3", 'x: int = (3)  # three\n    """Three."""'),
            '"""Mine."""\n' + CONFIG_CLASS.replace("spec):\n", 'spec):\n        "Makes."\n'),
        )
    ):
        (tmp_path / f"mine{index}.py").write_text(text)
        source = source_of(from_file(str(tmp_path / f"mine{index}.py")))
        assert source is not None and source.text == text
        code.add(source.code)
    assert len(code) == 1
    (tmp_path / "mine0.py").write_text(CONFIG_CLASS.replace("= 3", "= 4"))  # of the same size
    kind = from_file(str(tmp_path / "mine0.py"))
    source = source_of(kind)
    assert source is not None and source.code not in code and kind().x == 4


def test_a_file_that_is_not_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "algorithm.txt").write_text(CONFIG_CLASS)
    with pytest.raises(ConfigError, match=r"algorithm.txt is not a Python file; name one .*\.py"):
        from_file(str(tmp_path / "algorithm.txt"))


def test_its_class_stands_for_its_preset(file: Path) -> None:
    config = jaxrl_dist.preset(from_file(str(file)), "CartPole-v1", temperature=2.0)
    assert (config.num_envs, config.rollout_length, config.algorithm.temperature) == (16, 64, 2.0)
    with pytest.raises(ConfigError, match=r"Train.*RWR.*'temprature'"):
        jaxrl_dist.preset(type(config.algorithm), "CartPole-v1", temprature=2.0)


def test_a_preset_may_be_left_out(tmp_path: Path) -> None:
    text = CONFIG_CLASS.replace(
        "    @staticmethod\n    def preset(spec):\n        return {}\n\n", ""
    )
    assert "preset" not in text
    (tmp_path / "mine.py").write_text(text)
    config = jaxrl_dist.preset(from_file(str(tmp_path / "mine.py")), "CartPole-v1")
    assert (config.num_envs, config.plan, config.algorithm.x) == (
        RUN_DEFAULTS["num_envs"],
        "on_device",
        3,
    )


def prepared(fields: dict[str, Any], **parts: Any) -> Any:
    """PG with other parts, as a config without fields, prepared to train."""

    @dataclasses.dataclass(frozen=True)
    class Own:
        def make(self, spec: EnvSpec) -> Algorithm:
            return dataclasses.replace(PG(hidden_sizes=(4,)).make(spec), **parts)

    sizes = {"num_devices": 1, "num_envs": 8, "rollout_length": 4}
    return prepare(jaxrl_dist.preset(Own, "CartPole-v1", **sizes, **fields))


PARTS = """
import dataclasses

from jaxrl_dist.algorithms.pg import PG

@dataclasses.dataclass(frozen=True)
class Mine(PG):
    parts: int = 3
    scale: float = 1.0
"""


def test_a_field_called_parts_does_not_make_several_policies(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PARTS)
    kind, env = from_file(str(file)), "gymnax:CartPole-v1"
    (tmp_path / "config.json").write_text(
        json.dumps(to_json(jaxrl_dist.preset(kind, env, parts=4), find(env).spec))
    )
    parsed = request.parse([str(file), "--config", str(tmp_path / "config.json")])
    assert name_of(parsed.algorithm) == "Mine" and parsed.resolved()[0].algorithm.parts == 4
    varied = jaxrl_dist.preset(kind, env, vary={"scale": "1,2"})
    assert [x.config.algorithm.scale for x in members(varied)] == [1, 2]


def test_rewards_are_not_scaled_without_a_discount() -> None:
    with pytest.raises(
        ConfigError,
        match=r"scale_rewards.*'discount'",
    ):
        prepared({"scale_rewards": True})


@pytest.mark.parametrize("plan", ["on_device", "gradients"])
def test_replay_needs_a_window(plan: str) -> None:
    with pytest.raises(
        ConfigError,
        match="replay needs windows of a fixed length; set window, such as window=1 for transitions",
    ):
        prepared({"plan": plan}, replay=Replay(64, 8, 1.0, 0), window=None)


def test_policy_that_needs_keys_is_refused_before_training() -> None:
    def policy(variables: Variables, obs: Any, core: Any, context: Context) -> Acted:
        return (
            jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(context.keys),
            core,
            {"value": jnp.zeros(len(obs))},
        )

    with pytest.raises(ConfigError, match=r"context.keys.*None.*ValueError:") as caught:
        prepared({}, policy=policy)
    assert "\n" not in str(caught.value)
    for fields in ({"evaluation_policy": "sampled"}, {"evaluation_episodes": 0}):
        prepared(fields, policy=policy)
    with pytest.raises(ConfigError, match=r"^Own:.*ZeroDivisionError:.*test_own"):
        prepared({}, policy=lambda *args: 1 / 0)


MINE = """
import dataclasses

import jax.numpy as jnp
from jaxrl_dist.algorithms.{module} import {base}

torso = lambda key, x: {{"mine": jnp.ones((4, 2))}}, lambda params, x: x @ params["mine"]
core = lambda key, x: {{}}, lambda params, x, state: (x + state, x + state), lambda num_envs: jnp.zeros((num_envs, 2))

@dataclasses.dataclass(frozen=True)
class Mine({base}, torso=torso, core=core):
    pass
"""


@pytest.mark.parametrize("base", ["PPO", "DQN"])
def test_one_of_ours_with_a_network_of_ones_own(base: str, tmp_path: Path) -> None:
    """Its settings are those of a run that is given the network,
    and its file is all that its runs need.
    """
    (tmp_path / "mine.py").write_text(MINE.format(module=base.lower(), base=base))
    kind = from_file(str(tmp_path / "mine.py"))
    config, given = (
        jaxrl_dist.preset(algorithm, "CartPole-v1", **network)
        for algorithm, network in (
            (kind, {}),
            (base.lower(), {"torso": kind.torso, "core": kind.core}),
        )
    )
    assert vars(config.algorithm) == vars(given.algorithm) and config.num_envs == given.num_envs
    assert config.scale_rewards == given.scale_rewards == (base == "PPO")
    params = config.algorithm.make(find("CartPole-v1").spec).init(jax.random.key(0)).params
    assert [x.shape for path, x in jax.tree.leaves_with_path(params) if "mine" in str(path)] == [
        (4, 2)
    ]
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    assert stored_config(tmp_path, kind) == config


def test_a_file_called_as_one_of_ours_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "ppo.py").write_text(CONFIG_CLASS.replace("Mine", "PPO"))
    kind = from_file(str(tmp_path / "ppo.py"))
    assert label_of(kind) == "ppo.py"
    assert (
        name_of(kind()) == "PPO"
        and name_of(jaxrl_dist.preset("ppo", "CartPole-v1").algorithm) == "ppo"
    )


BAD = {
    "import nothing_of_that_name": "line 1: ModuleNotFoundError: No module named 'nothing_of_that_name'",
    "x = 1\ndef f(:\n": "line 2: SyntaxError",
    "x = 1\n\ny = 1 / 0": "line 3: ZeroDivisionError: division by zero",
    "import sys\nsys.exit(0)": "line 2: SystemExit: 0",
    "import sys\n\nsys.exit('enough')": "line 3: SystemExit: enough",
    "x = 1": "must hold one algorithm, a dataclass with make, but there is none",
    CONFIG_CLASS + CONFIG_CLASS.replace("Mine", "Yours"): "but there are several: Mine, Yours",
    CONFIG_CLASS.replace("@dataclasses.dataclass(frozen=True)\n", ""): "Mine must be a dataclass",
    CONFIG_CLASS.replace("Mine", "ppo"): "ppo is the name of one of ours; call the class otherwise",
    CONFIG_CLASS.replace("x: int = 3", "x: int"): "Mine.x needs a default",
    CONFIG_CLASS.replace(
        "x: int", "EPS = 1e-8; beta = 1.0; x: int"
    ): "Mine.beta needs an annotation to be a hyper",
    CONFIG_CLASS
    + "class Yours(Mine):\n    x = 4\nMine = 1": "Yours.x needs an annotation to be a hyperp",
    "from jaxrl_dist.algorithms.ppo import PPO": "but there is none",
}


@pytest.mark.parametrize("text", BAD)
def test_a_file_without_an_algorithm_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(text)
    for command in (
        ["train", str(tmp_path / "mine.py")],
        ["evaluate", "x", "--algorithm", str(tmp_path / "mine.py")],
    ):
        assert cli.main(command) == 2
        out, err = capsys.readouterr()
        assert (
            BAD[text] in err
            and str(tmp_path / "mine.py") in err
            and err.count("\n") == 1
            and not out
        )


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "nowhere/mine.py", "--env", "CartPole-v1"]) == 2
    assert "there is no file nowhere/mine.py" in capsys.readouterr().err


def test_fields_of_examples_that_lack_an_axis_are_named() -> None:
    env = spec()
    net = actor_critic(PG(hidden_sizes=(4,)), env)
    rollout = random_rollout(PG(hidden_sizes=(4,)).make(env), env, 3, 2)
    with pytest.raises(
        ValueError,
        match=r"'weight'.*\[T.*B.*\[3.*2",
    ):
        net.examples(rollout, weight=jnp.ones(()))


def test_make_refuses_the_value_of_one_member(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "light.py"
    file.write_text(
        """
import dataclasses
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.errors import ConfigError

@dataclasses.dataclass(frozen=True)
class Light(PPO):
    weight: float = 0.5

    def make(self, spec):
        if self.weight > 1:
            raise ConfigError("--weight must be at most 1")
        return super().make(spec)
""",
        encoding="utf-8",
    )
    run_dir = tmp_path / "run"
    command = ["train", str(file), "--env", "CartPole-v1", "--run-dir", str(run_dir)]
    assert cli.main([*command, "--total-env-steps", "500", "--vary", "weight=0.5,2.0"]) == 2
    assert capsys.readouterr().err == "jaxrl-dist: error: --weight must be at most 1\n"
    assert not run_dir.exists()
