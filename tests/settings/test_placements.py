"""One word for the flags that say where acting and learning run."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs

from jaxrl_dist import cli
from jaxrl_dist.commands import request
from jaxrl_dist.settings import placements

SMALL = (
    "--total-env-steps 256 --evaluation-episodes 0 --num-envs 8 --rollout-length 8 --hidden-sizes 4"
)


@pytest.mark.parametrize(
    "command, expected",
    [
        ("ppo --placement anakin", {"plan": "on_device"}),
        (
            "impala --placement sebulba:1+3",
            {
                "plan": "asynchronous",
                "num_actors": 1,
                "actor_devices": "0",
                "learner_devices": "1-3",
            },
        ),
        (
            "impala --placement sebulba:2+1 --num-actors 4",
            {"num_actors": 4, "actor_devices": "0-1", "learner_devices": "2"},
        ),
        ("ppo --placement seed", {"plan": "synchronous"}),
        (
            "appo --placement replicas:4",
            {"lockstep": True, "lag": 1, "num_actors": 4, "num_devices": 4},
        ),
        ("a2c --placement=server:3", {"plan": "gradients", "num_actors": 3}),
        ("a2c --placement server:3 --plan gradients", {"plan": "gradients", "num_actors": 3}),
        ("ppo --placement averaged:5", {"plan": "on_device", "average_every": 5, "seeds": 8}),
        ("ppo --placement averaged:5 --seeds 2", {"average_every": 5, "seeds": 2}),
        (
            "dqn --placement apex:3",
            {"plan": "asynchronous", "num_actors": 3, "priority_exponent": 0.6},
        ),
    ],
)
def test_a_word_stands_for_flags_and_given_ones_win(
    command: str, expected: dict[str, object]
) -> None:
    asked = request.parse([*command.split(), "--env", "CartPole-v1"])
    assert asked is not None and "placement" not in asked.fields
    assert {name: asked.fields[name] for name in expected} == expected


@pytest.mark.parametrize(
    "command, message",
    [
        (
            "ppo --placement anakn",
            "'anakn' is not one of anakin, sebulba:A+L, seed, replicas:K, server:K, averaged:K, apex:K",
        ),
        (
            "ppo --placement sebulba",
            "--placement sebulba must have the form sebulba:A+L, such as --placement sebulba:2+2",
        ),
        (
            "ppo --placement sebulba:0+1",
            "--placement sebulba:0+1 must have the form sebulba:A+L",
        ),
        (
            "ppo --placement anakin:2",
            "--placement anakin:2 must have the form anakin, such as --placement anakin",
        ),
        (
            "ppo --placement server:2 --plan on_device",
            "--placement server:2 runs under --plan gradients, which contradicts",
        ),
        (
            "ppo --average-every 5",
            "--average-every does nothing without members: --seeds or --vary",
        ),
        ("ppo --seeds 2 --average-every 0", "--average-every must be >= 1"),
        (
            "ppo --seeds 2 --average-every 5 --evolve pbt",
            "--average-every joins all members, but --evolve",
        ),
        (
            "a2c --seeds 2 --average-every 5 --plan asynchronous",
            "--average-every needs --plan on_device or synchronous",
        ),
        (
            "ppo --vary num-epochs=1,2 --average-every 5",
            "--average-every needs all members in one program, but each value of num_epochs needs its own;",
        ),
        ("ppo --placement apex:2", "--placement apex needs an algorithm with --priority-exponent"),
        ("--policy a=ppo:* --placement seed", "--placement needs a run with one policy"),
    ],
)
def test_what_fits_no_placement_is_refused_in_one_line(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *command.split(), "--env", "CartPole-v1"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "placements"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == placements.spelled()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            "ppo --env CartPole-v1 --num-devices 2 --placement anakin", marks=pytest.mark.case
        ),
        "impala --env envpool:CartPole-v1 --placement sebulba:1+2",
        pytest.param(
            "ppo --env envpool:CartPole-v1 --placement seed --num-devices 1", marks=pytest.mark.case
        ),
        pytest.param(
            "appo --env envpool:CartPole-v1 --placement replicas:2", marks=pytest.mark.case
        ),
        pytest.param(
            "a2c --env envpool:CartPole-v1 --placement server:2 --num-devices 1",
            marks=pytest.mark.case,
        ),
        pytest.param(
            "dqn --env envpool:CartPole-v1 --placement apex:2 --num-devices 1"
            " --learning-starts 64 --replay-capacity 800",
            marks=pytest.mark.case,
        ),
    ],
)
def test_a_placed_run_keeps_flags_and_no_word(command: str, tmp_path: Path) -> None:
    run_dir = runs.train(f"{command} {SMALL}", tmp_path / "run")
    kept = runs.read_json(run_dir / "config.json")
    assert "placement" not in kept["run"] and kept["run"]["plan"] in (
        "on_device",
        "synchronous",
        "asynchronous",
        "gradients",
    )
