"""The command ``presets``."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.algorithms.presets import KINDS
from jaxrl_dist.commands import flags, request


@pytest.mark.parametrize(
    "algorithm, env, options, own",
    [
        ("ppo", "gymnax:Breakout-MinAtar", {}, {}),
        ("apex", "gymnax:CartPole-v1", {"max_steps_in_episode": "9"}, {}),
        ("td3", "gymnax:Pendulum-v1", {}, {}),
        ("ppo", "gymnax:CartPole-v1", {}, {"core": "gru"}),
    ],
)
def test_it_prints_the_command_that_would_run(
    algorithm: str,
    env: str,
    options: dict[str, str],
    own: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every flag of it is read back as the value of the preset, and no flag is left out."""
    given = (
        ["--env-options", *(f"{key}={text}" for key, text in options.items())] if options else []
    )
    given += [f"--{name}={text}" for name, text in own.items()]
    assert cli.main(["presets", algorithm, "--env", env, *given]) == 0
    kind, line = capsys.readouterr().out.splitlines()
    assert kind.startswith(f"{env} is of the kind: ")
    words = shlex.split(line)
    assert words[:5] == ["jaxrl-dist", "train", algorithm, "--env", env]
    read = flags.parse_train(algorithm, words[3:])
    config = jaxrl_dist.preset(algorithm, env, env_options=options, **own)
    default = flags.plain_defaults(algorithm)
    for ours, plain in ((config, default), (config.algorithm, default.algorithm)):
        for field in dataclasses.fields(ours):
            value = getattr(ours, field.name)
            if field.name == "algorithm" or (value is None and field.default is None):
                continue
            if value != getattr(plain, field.name):
                assert read.pop(field.name) == value
    assert not read
    asked = request.parse(words[2:])
    assert asked is not None and asked.resolved()[0] == config


def test_without_an_algorithm_it_lists_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in KINDS.values())
    assert next(line for line in out.splitlines() if line.startswith("minatar")).endswith(
        "MinAtar: ppo, a2c, impala, dqn, rainbow, pqn, muzero, sac, ars"
    )


@pytest.mark.parametrize(
    "args, message",
    [
        (["ppo"], "which environment? Such as: jaxrl-dist presets ppo --env CartPole-v1"),
        (["ppoo", "--env", "CartPole-v1"], "did you mean 'ppo'"),
        (["ppo", "--env", "CartPole-v11"], "has no such environment"),
        (["ppo", "--env", "CartPole-v1", "--core", "gruu"], "must be one of none, gru, lstm"),
        (["es", "--env", "CartPole-v1", "--core", "gru"], "--core is not a flag of es; ppo"),
    ],
)
def test_what_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", *args]) == 2
    assert message in capsys.readouterr().err
