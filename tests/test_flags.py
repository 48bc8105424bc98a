"""Flags, presets and config.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl_dist import flags
from jaxrl_dist.algorithms import ALGORITHMS, config_class
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.config import Train
from jaxrl_dist.errors import ConfigError


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_flag_has_a_help_sentence_and_a_default(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        flags.parse_train(["--help"], flags.plain_defaults(algorithm))
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    names = {f.name for kind in (flags.Command, config_class(algorithm)) for f in dataclasses.fields(kind)}
    names -= {"algorithm"}
    assert {"env_options", "mem_fraction", "precision", "init_from", "config", "quiet"} <= names
    options = {part.split()[0].rstrip(","): part for part in text.split(" --")[1:] if part.strip()}
    for name in names:
        part = options[name.replace("_", "-")]
        if "--no-" + name.replace("_", "-") in text:
            part = options["no-" + name.replace("_", "-")]
        sentence, default, _ = part.partition("(default:")
        assert default, f"{name} shows no default: {part}"
        assert len(sentence.split()) > 4 and sentence.rstrip().endswith("."), f"{name} has no help sentence: {part}"


def preset(config: Train[Any]) -> Train[Any]:
    assert config.env == "X"
    fields = {"num_envs": 16, "rollout_length": 16, "report_interval": 16, "plan": "synchronous"}
    algorithm = PPO(discount=0.16, gae_lambda=0.16, clip_epsilon=0.16)
    return dataclasses.replace(config, algorithm=algorithm, env="gymnax:X", **fields)


def test_flags_win_over_file_over_preset_over_default() -> None:
    file = ["--env=X", "--rollout-length=8", "--report-interval=8", "--gae-lambda=.8", "--clip-epsilon=.8", "--seed=8"]
    line = ["--report-interval=4", "--clip-epsilon=.4", "--seed=4"]
    command = flags.resolve_flags("ppo", [file, line], preset)
    # default, preset, file, flag
    assert (command.total_env_steps, command.num_envs, command.rollout_length, command.report_interval) == (
        1_000_000,
        16,
        8,
        4,
    )
    ppo = command.algorithm
    assert (ppo.num_epochs, ppo.discount, ppo.gae_lambda, ppo.clip_epsilon) == (4, 0.16, 0.8, 0.4)
    assert (command.plan, command.seed) == ("synchronous", 4)


def test_a_flag_wins_even_with_the_value_of_the_default() -> None:
    default = flags.plain_defaults("ppo")
    args = ["--env", "X", "--num-envs", str(default.num_envs), "--discount", str(default.algorithm.discount)]
    command = flags.resolve_flags("ppo", [args], preset)
    assert (command.num_envs, command.algorithm.discount) == (default.num_envs, default.algorithm.discount)


def test_flags_are_checked_before_the_preset_is_asked_for() -> None:
    def never(config: Train[Any]) -> Train[Any]:
        raise AssertionError

    with pytest.raises(ConfigError, match="--num-envs must be"):
        flags.resolve_flags("ppo", [["--env", "X", "--num-envs", "0"]], never)


def write(path: Path, config: Train[Any]) -> dict[str, Any]:
    content = flags.to_json(config)
    path.write_text(json.dumps(content))
    return content


def test_config_json_brings_back_every_value(tmp_path: Path) -> None:
    ppo = PPO(hidden_sizes=(7, 9), anneal_updates=11, normalize_advantages=False, torso="impala", learning_rate=1 / 3)
    run = {"env_options": {"a": "1", "b": "x=y z"}, "atari_preset": "machado", "plan": "synchronous", "num_devices": 3}
    more = {"normalize_observations": True, "mem_fraction": 0.1, "init_from": "runs/a b", "seed": 5}
    config = dataclasses.replace(flags.plain_defaults("ppo").train(), algorithm=ppo, env="X", **run, **more)
    write(tmp_path / "config.json", config)
    assert flags.read_config(tmp_path) == flags.read_config(tmp_path / "config.json") == config
    empty = dataclasses.replace(config, algorithm=dataclasses.replace(ppo, hidden_sizes=()), env_options={})
    write(tmp_path / "config.json", empty)
    assert flags.read_config(tmp_path) == empty


def test_whole_numbers_may_have_an_exponent() -> None:
    args = ["--env", "X", "--total-env-steps", "1e6", "--num-envs", "1.6E1", "--hidden-sizes", "1_0", "2e1"]
    command = flags.parse_train(args, flags.plain_defaults("ppo"))
    assert (command.total_env_steps, command.num_envs, command.algorithm.hidden_sizes) == (1_000_000, 16, (10, 20))
    assert type(command.total_env_steps) is int


def test_a_run_directory_is_not_kept() -> None:
    """Another run of the same config must not write to the same place."""
    content = flags.to_json(dataclasses.replace(flags.plain_defaults("ppo").train(), env="X", run_dir="here"))
    assert "here" not in json.dumps(content)


DAMAGES: dict[str, tuple[Any, str]] = {
    "a list": (lambda c: [c], "is an object, not a list"),
    "a number": (lambda c: 3, "is an object, not a int"),
    "no format": (lambda c: {k: v for k, v in c.items() if k != "format"}, "format None is unknown"),
    "a later format": (lambda c: {**c, "format": 99}, "format 99 is unknown; this version reads format 1"),
    "no algorithm": (lambda c: {**c, "algorithm": None}, "algorithm, hyperparameters or run is missing"),
    "run a list": (lambda c: {**c, "run": []}, "algorithm, hyperparameters or run is missing"),
    "unknown algorithm": (lambda c: {**c, "algorithm": "pppo"}, "unknown algorithm 'pppo' (did you mean 'ppo'?)"),
    "unknown field": (lambda c: {**c, "run": {**c["run"], "sed": 1}}, "unknown field 'sed' (did you mean 'seed'?)"),
    "a flag, not a field": (lambda c: {**c, "run": {**c["run"], "quiet": True}}, "unknown field 'quiet'"),
    "unknown hyperparameter": (lambda c: {**c, "hyperparameters": {"discont": 1}}, "unknown field 'discont'"),
    "text for a number": (lambda c: {**c, "run": {**c["run"], "num_envs": "many"}}, "--num-envs: 'many' is no"),
    "a fraction": (lambda c: {**c, "run": {**c["run"], "num_envs": 8.5}}, "--num-envs: '8.5' is no whole number"),
    "a switch for a number": (lambda c: {**c, "run": {**c["run"], "num_envs": True}}, "--num-envs"),
    "a number for a switch": (lambda c: {**c, "hyperparameters": {"normalize_advantages": 3}}, "3"),
    "a wrong choice": (lambda c: {**c, "run": {**c["run"], "plan": "fast"}}, "invalid choice 'fast'"),
    "a flag for a number": (lambda c: {**c, "hyperparameters": {"hidden_sizes": ["--help"]}}, "cannot be '--help'"),
    "a flag for a name": (lambda c: {**c, "run": {**c["run"], "env_options": {"-h": 1}}}, "env_options cannot be '-h'"),
    "null for a number": (lambda c: {**c, "run": {**c["run"], "seed": None}}, "--seed: 'None' is no whole number"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_config_is_refused(what: str, tmp_path: Path) -> None:
    damage, message = DAMAGES[what]
    path = tmp_path / "config.json"
    content = write(path, dataclasses.replace(flags.plain_defaults("ppo").train(), env="X"))
    path.write_text(json.dumps(damage(content)))
    with pytest.raises(ConfigError) as error:
        flags.read_config(tmp_path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_config_that_is_no_text_or_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=f"there is no {path}"):
        flags.read_config(tmp_path)
    whole = json.dumps(flags.to_json(flags.plain_defaults("ppo").train()))
    for content in (b"", b"\xff\xfe\x00", whole[: len(whole) // 2].encode()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is not JSON"):
            flags.read_config(path)
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        flags.read_config(path / "below")


@pytest.mark.parametrize("args", ["", "--config", "--seed --config=", "--configs x"])
def test_value_of_finds_nothing(args: str) -> None:
    assert not flags.value_of(args.split(), "--config")


@pytest.mark.parametrize("args", ["--config x", "--seed 3 --config=x", "--config x --seed 3"])
def test_value_of_finds_the_value(args: str) -> None:
    assert flags.value_of(args.split(), "--config") == "x"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a text": ({"num_envs": "8"}, "--num-envs must be a whole number, not '8'"),
    "a fraction": ({"rollout_length": 8.5}, "--rollout-length must be a whole number, not 8.5"),
    "infinity": ({"mem_fraction": float("inf")}, "--mem-fraction must be > 0 and <= 1, not inf"),
    "too many": ({"num_envs": 2**20, "rollout_length": 2**20}, "--num-envs times --rollout-length must be <= 107374"),
    "an empty run directory": ({"run_dir": ""}, "--run-dir is empty"),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_from_python_are_checked_too(what: str) -> None:
    values, message = WRONG[what]
    with pytest.raises(ConfigError) as error:
        Train("ppo", env="CartPole-v1", **values).validate()
    assert message in str(error.value)
