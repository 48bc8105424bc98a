"""Flags, presets and config.json."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxrl_dist import cli, preset
from jaxrl_dist.algorithms import ALGORITHMS, config_class
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.commands import flags, help, request
from jaxrl_dist.commands.plot import Plot
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import RUN_DEFAULTS, Train
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.settings import resolve
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.stored import stored_config, stored_fields, to_json
from jaxrl_dist.types import EnvSpec

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_flag_has_a_help_sentence_and_a_default(
    algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", algorithm, "--help-all"]) == 0
    text = capsys.readouterr().out
    names = {
        f.name
        for kind in (flags.Command, config_class(algorithm))
        for f in dataclasses.fields(kind)
    }
    names -= {"algorithm"}
    assert {"env_options", "mem_fraction", "precision", "init_from", "config", "quiet"} <= names
    entries = re.findall(r"^  --(\[no-\])?([a-z-]+)(.*?)(?=^  --|^$|\Z)", text, re.M | re.S)
    assert sorted(name for _, name, _ in entries) == sorted(
        name.replace("_", "-") for name in names
    )
    for _, name, rest in entries:
        sentence, value, _ = " ".join(rest.split()).rpartition(" (")
        assert value, f"{name} shows no value: {rest}"
        assert len(sentence.split()) > 3 and sentence.endswith("."), (
            f"{name} has no help sentence: {rest}"
        )
    groups = re.findall(r"^(\w+):$", text, re.M)
    assert groups == [group for group in help.ORDER if group in groups] and groups[0] == "common"
    assert max(map(len, text.splitlines())) <= 110


def test_help_is_short_and_shows_the_values_that_would_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    def shown(command: str) -> tuple[dict[str, str], str]:
        assert cli.main(command.split()) == 0
        text = capsys.readouterr().out
        entries = re.findall(r"^  --(?:\[no-\])?([a-z-]+).*?\(([^()]*)\)$", text, re.M | re.S)
        return {name: " ".join(value.split()) for name, value in entries}, text

    plain, text = shown("train dqn --help")
    assert plain["num-envs"] == "8" and "memory" not in plain and "frame-stack" not in plain
    assert "values without a preset" in text and "More flags, with --help-all: network (13)" in text
    atari, text = shown(
        "train dqn --env envpool:Pong-v5 --seed 7 --quiet --plan-memory here --help"
    )
    config, _ = resolved(Train("dqn", env="envpool:Pong-v5"))
    assert (
        atari["num-envs"] == f"{config.num_envs}; preset"
        and atari["plan"] == config.plan != plain["plan"]
    )
    assert (
        atari["learning-rate"] == f"{config.algorithm.learning_rate}; preset"
        and atari["seed"] == "7; yours"
    )
    assert "on envpool:Pong-v5, and where they come from" in text
    paper, _ = shown("train dqn --env envpool:Pong-v5 --published --batch-size 32 --help-all")
    assert (paper["discount"], paper["batch-size"], paper["quiet"]) == (
        "0.99; paper",
        "32; yours",
        "off",
    )
    named, _ = shown("train apex --env CartPole-v1 --help-all")
    assert (named["plan"], named["num-actors"], named["priority-exponent"]) == (
        "asynchronous; preset",
        "2",
        "0.6; preset",
    )
    assert (
        len(shown("train ppo --help")[1].splitlines())
        < 60
        < len(shown("train ppo --help-all")[1].splitlines())
    )


def test_help_names_the_plans_of_actor_flags() -> None:
    sentence = help.inherited_docstrings(Train)["num_actors"]
    named = {name for name in PLANS if f"'{name}'" in sentence}
    assert named == {name for name, plan in PLANS.items() if plan.threaded}


def test_help_of_a_command_names_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["video", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: jaxrl-dist video RUN_DIR FILE.gif [FLAGS]\n")
    assert "\n  --fps N " in out and "(1000)" in out and "\n  RUN_DIR  " in out


@dataclasses.dataclass(frozen=True)
class Sixteen(PPO):
    """An algorithm whose preset says 16."""

    @staticmethod
    def preset(spec: EnvSpec) -> dict[str, Any]:
        run = {"num_envs": 16, "rollout_length": 16, "report_interval": 16, "plan": "synchronous"}
        return {**run, "discount": 0.16, "gae_lambda": 0.16, "clip_epsilon": 0.16}


def test_flags_win_over_file_over_preset_over_default(tmp_path: Path) -> None:
    run = {"env": "CartPole-v1", "rollout_length": 8, "report_interval": 8, "seed": 8}
    own = {"gae_lambda": 0.8, "clip_epsilon": 0.8}
    file = {"format": 1, "algorithm": "Sixteen", "hyperparameters": own, "run": run}
    (tmp_path / "config.json").write_text(json.dumps(file))
    _, stored = stored_fields(tmp_path, Sixteen)
    line = flags.parse_train(Sixteen, ["--report-interval=4", "--clip-epsilon=.4", "--seed=4"])
    config, _ = resolved(Train(Sixteen), {**stored, **line})
    # default, preset, file, flag
    assert (
        config.total_env_steps,
        config.num_envs,
        config.rollout_length,
        config.report_interval,
    ) == (
        1_000_000,
        16,
        8,
        4,
    )
    ppo = config.algorithm
    assert (ppo.num_epochs, ppo.discount, ppo.gae_lambda, ppo.clip_epsilon) == (4, 0.16, 0.8, 0.4)
    assert (config.plan, config.seed) == ("synchronous", 4)


def test_vary_and_flags_override_stored_values(tmp_path: Path) -> None:
    """A population's ``--config`` runs it again, and one of a single run becomes a population."""
    single = preset("ppo", "CartPole-v1", learning_rate_schedule="linear", learning_rate_steps=10)
    whole = dataclasses.replace(single, vary={"learning-rate": "1e-3,1e-4"})

    def config(stored: Train[Any], args: str) -> Any:
        write(tmp_path / "config.json", stored)
        asked = request.parse(["--config", str(tmp_path), *args.split()])
        assert asked is not None
        return asked.resolved()[0]

    assert config(whole, "") == config(single, "--vary learning-rate=1e-3,1e-4") == whole
    plain = config(single, "--learning-rate-schedule constant").algorithm
    assert (plain.learning_rate_schedule, plain.learning_rate_steps) == ("constant", None)
    for args in (
        "--vary learning-rate=1e-3,1e-4 --learning-rate 1e-3",
        "--vary learning_rate=1 --learning-rate 1e-3",
    ):
        with pytest.raises(ConfigError, match="contradicts learning_rate"):
            config(single, args)
    with pytest.raises(ConfigError, match="learning_rate_steps does nothing without"):
        config(single, "--learning-rate-schedule constant --learning-rate-steps 20")


def test_a_flag_wins_even_with_the_value_of_the_default() -> None:
    default = flags.plain_defaults("ppo")
    args = ["--num-envs", str(default.num_envs), "--discount", str(default.algorithm.discount)]
    given = flags.parse_train(Sixteen, args)
    assert given == {"num_envs": 8, "discount": 0.99}
    config, _ = resolved(Train(Sixteen, "CartPole-v1"), given)
    assert (config.num_envs, config.algorithm.discount, config.algorithm.gae_lambda) == (
        8,
        0.99,
        0.16,
    )


@pytest.mark.parametrize(
    "wrong", [{"num_envs": 0}, {"discount": 2}, {"seed": "3"}, {"discont": 0.9}]
)
def test_values_are_checked_before_the_environment_is_made(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(config: Train[Any]) -> EnvSource:
        raise AssertionError

    monkeypatch.setattr(resolve, "find_env", never)
    with pytest.raises(
        ConfigError, match=r"num_envs must be|discount must be|seed must be|a field 'discont'"
    ):
        resolved(Train("ppo", "CartPole-v1"), wrong)


def test_a_named_preset_counts_before_the_environment_is_known() -> None:
    """Prioritised replay is Ape-X's, so its exponents may be set."""
    config, _ = resolved(Train("apex", "CartPole-v1"), {"importance_exponent": 0.5})
    assert (config.algorithm.priority_exponent, config.algorithm.importance_exponent) == (0.6, 0.5)


CONFIG: Train[Any] = Train(PPO(), **RUN_DEFAULTS)


def write(path: Path, config: Train[Any]) -> dict[str, Any]:
    content = to_json(config)
    path.write_text(json.dumps(content))
    return content


def test_config_json_brings_back_every_value(tmp_path: Path) -> None:
    ppo = PPO(
        hidden_sizes=(7, 9),
        learning_rate_schedule="linear",
        learning_rate_steps=11,
        normalize_advantages=False,
        torso="impala",
        learning_rate=1 / 3,
    )
    run = {
        "env_options": {"a": "1", "b": "x=y z"},
        "atari_preset": "machado",
        "plan": "synchronous",
        "num_devices": 3,
    }
    more = {"normalize_observations": True, "mem_fraction": 0.1, "init_from": "runs/a b", "seed": 5}
    config = dataclasses.replace(CONFIG, algorithm=ppo, env="X", **run, **more)
    write(tmp_path / "config.json", config)
    assert stored_config(tmp_path) == stored_config(tmp_path / "config.json") == config
    empty = dataclasses.replace(
        config, algorithm=dataclasses.replace(ppo, hidden_sizes=()), env_options={}
    )
    write(tmp_path / "config.json", empty)
    assert stored_config(tmp_path) == empty


def test_whole_numbers_may_have_an_exponent() -> None:
    args = ["--total-env-steps", "1e6", "--num-envs", "1.6E1", "--hidden-sizes", "1_0", "2e1"]
    given = flags.parse_train("ppo", args)
    assert given == {"total_env_steps": 1_000_000, "num_envs": 16, "hidden_sizes": (10, 20)}
    assert type(given["total_env_steps"]) is int
    assert flags.parse_train("ppo", ["--hidden-sizes", "256,256", "64"]) == {
        "hidden_sizes": (256, 256, 64)
    }
    assert flags.parse_train("ppo", ["--hidden-sizes"]) == {"hidden_sizes": ()}


@pytest.mark.parametrize(
    "args", ["--temperature auto", "--temperature=None", "--temperature none", "--temperature=AUTO"]
)
def test_an_optional_number_may_be_left_to_the_run(args: str) -> None:
    assert flags.parse_train("sac", ["--env", "auto", *args.split()]) == {
        "env": "auto",
        "temperature": None,
    }


@pytest.mark.parametrize(
    "args", ["-o x.png a b", "-ox.png a b", "-o=x.png a b", "a --out=x.png b", "a b --out x.png"]
)
def test_arguments_and_flags_in_any_order(args: str) -> None:
    read = flags.parse(Plot, ["--smooth", "3", *args.split()], "plot")
    assert read == Plot(run_dirs=("a", "b"), out="x.png", smooth=3)


@pytest.mark.parametrize(
    "text, value", [("", True), ("=True", True), (" False", False), (" None", None)]
)
def test_a_switch_that_may_be_left_to_the_run(text: str, value: bool | None) -> None:
    assert flags.parse_train("dqn", f"--checkpoint-replay{text}".split()) == {
        "checkpoint_replay": value
    }
    assert flags.parse_train("dqn", ["--no-checkpoint-replay"]) == {"checkpoint_replay": False}


def test_values_of_fields_of_your_own() -> None:
    hints = {
        "pair": tuple[float, float],
        "named": tuple[str, int],
        "size": int | str,
        "sizes": tuple[int, ...] | None,
    }
    args = ["--pair", "-.5,-inf", "--named", "a,b", "3", "--size", "large", "--sizes", "None"]
    assert flags.read(args, hints) == {
        "pair": (-0.5, float("-inf")), "named": ("a,b", 3), "size": "large", "sizes": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"2.*\['1'\]"):
        flags.read(["--pair", "1"], hints)
    with pytest.raises(ConfigError, match="named: 'b' is not a whole number"):
        flags.read(["--named", "a", "b"], hints)


def test_a_run_directory_is_not_kept() -> None:
    """Another run of the same config must not write to the same place."""
    content = to_json(dataclasses.replace(CONFIG, env="X", run_dir="here"))
    assert "here" not in json.dumps(content)


DAMAGES: dict[str, tuple[Any, str]] = {
    "a list": (lambda c: [c], "is an object, not a list"),
    "a number": (lambda c: 3, "is an object, not a int"),
    "no format": (
        lambda c: {k: v for k, v in c.items() if k != "format"},
        "format None is unknown",
    ),
    "a later format": (
        lambda c: {**c, "format": 99},
        "format 99 is unknown; this version reads format 1",
    ),
    "no algorithm": (
        lambda c: {**c, "algorithm": None},
        "algorithm, hyperparameters or run is missing",
    ),
    "run a list": (lambda c: {**c, "run": []}, "algorithm, hyperparameters or run is missing"),
    "unknown algorithm": (
        lambda c: {**c, "algorithm": "pppo"},
        "unknown algorithm 'pppo' (did you mean 'ppo'?)",
    ),
    "unknown field": (
        lambda c: {**c, "run": {**c["run"], "sed": 1}},
        "unknown field 'sed' (did you mean 'seed'?)",
    ),
    "a flag, not a field": (
        lambda c: {**c, "run": {**c["run"], "quiet": True}},
        "unknown field 'quiet'",
    ),
    "unknown hyperparameter": (
        lambda c: {**c, "hyperparameters": {"discont": 1}},
        "unknown field 'discont'",
    ),
    "text for a number": (
        lambda c: {**c, "run": {**c["run"], "num_envs": "many"}},
        "num_envs must be a whole number, not 'many'",
    ),
    "a fraction": (
        lambda c: {**c, "run": {**c["run"], "num_envs": 8.5}},
        "num_envs must be a whole number, not 8.5",
    ),
    "a switch for a number": (
        lambda c: {**c, "run": {**c["run"], "num_envs": True}},
        "num_envs must be a whole number, not True",
    ),
    "a number for a switch": (
        lambda c: {**c, "hyperparameters": {"normalize_advantages": 3}},
        "must be True or False, not 3",
    ),
    "a wrong choice": (
        lambda c: {**c, "run": {**c["run"], "plan": "fast"}},
        "plan must be one of on_device, synchronous, asynchronous, own_pace, gradients, offline, not 'fast'",
    ),
    "a flag for a number": (
        lambda c: {**c, "hyperparameters": {"hidden_sizes": ["--help"]}},
        "must be a whole number, not '--help'",
    ),
    "a NUL in a path": (
        lambda c: {**c, "run": {**c["run"], "record": "a\0b"}},
        "record must be text without the",
    ),
    "a list for text": (
        lambda c: {**c, "run": {**c["run"], "env_options": {"a": []}}},
        "env_options a must be text",
    ),
    "text for options": (
        lambda c: {**c, "run": {**c["run"], "env_options": "a"}},
        "env_options must be a dictionary",
    ),
    "a list for a name": (
        lambda c: {**c, "run": {**c["run"], "env": ["X"]}},
        "env must be a name, not ['X']",
    ),
    "null for a number": (
        lambda c: {**c, "run": {**c["run"], "seed": None}},
        "seed must be a whole number, not None",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_config_is_refused(what: str, tmp_path: Path) -> None:
    damage, message = DAMAGES[what]
    path = tmp_path / "config.json"
    content = write(path, dataclasses.replace(CONFIG, env="X"))
    path.write_text(json.dumps(damage(content)))
    with pytest.raises(ConfigError) as error:
        stored_config(tmp_path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_config_that_is_no_text_or_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=f"there is no {path}"):
        stored_config(tmp_path)
    whole = json.dumps(to_json(CONFIG))
    for content in (b"", b"\xff\xfe\x00", whole[: len(whole) // 2].encode()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is not JSON"):
            stored_config(path)
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        stored_config(path / "below")


@pytest.mark.parametrize("args", ["", "--config", "--seed --config=", "--configs x"])
def test_value_of_finds_nothing(args: str) -> None:
    assert not flags.value_of(args.split(), "--config")


@pytest.mark.parametrize("args", ["--config x", "--seed 3 --config=x", "--config x --seed 3"])
def test_value_of_finds_the_value(args: str) -> None:
    assert flags.value_of(args.split(), "--config") == "x"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a text": ({"num_envs": "8"}, "num_envs must be a whole number, not '8'"),
    "a fraction": ({"rollout_length": 8.5}, "rollout_length must be a whole number, not 8.5"),
    "infinity": ({"mem_fraction": float("inf")}, "mem_fraction must be > 0 and <= 1, not inf"),
    "too many": (
        {"num_envs": 2**20, "rollout_length": 2**20},
        "num_envs times rollout_length must be <= 107374",
    ),
    "an empty run directory": ({"run_dir": ""}, "run_dir is empty"),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_from_python_are_checked_too(what: str) -> None:
    values, message = WRONG[what]
    with pytest.raises(ConfigError) as error:
        Train("ppo", env="CartPole-v1", **values).validate()
    assert message in str(error.value)


@pytest.mark.parametrize(
    "args",
    [
        "--vary learning-rate=1e-3,1e-4 discount=0.9,0.99",
        "--vary learning-rate=1e-3,1e-4 --vary discount=0.9,0.99",
        "--vary=learning-rate=1e-3,1e-4 --seed 3 --vary=discount=0.9,0.99",
    ],
)
def test_a_flag_of_pairs_may_be_repeated(args: str) -> None:
    fields = flags.parse_train("ppo", ["--env", "X", *args.split()])
    assert fields["vary"] == {"learning-rate": "1e-3,1e-4", "discount": "0.9,0.99"}
    assert fields.get("seed") == (3 if "--seed" in args else None)


def test_a_pair_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="discount is given twice"):
        flags.parse_train("ppo", ["--env", "X", "--vary", "discount=1,2", "--vary", "discount=3"])
