"""``check-env``: every fault is named, and what is right is not."""

from __future__ import annotations

import broken
import gymnasium
import numpy as np
import pytest

from jaxrl_dist import cli
from jaxrl_dist.commands.check_env import findings


@pytest.mark.parametrize("name", broken.BROKEN)
def test_what_is_wrong_is_named_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--env-timeout 1" if name == "Hangs" else ""
    assert cli.main(f"check-env broken:{name} {options}".split()) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert all(line.startswith(f"broken:{name}: ") for line in lines) and not err
    assert [line for line in lines if broken.BROKEN[name] in line], out
    assert len(lines) == 1, out


@pytest.mark.parametrize(
    "env", ["gymnax:CartPole-v1", "gymnasium:CartPole-v1", "broken:Right", "broken:RightJAX"]
)
def test_nothing_is_wrong_with_what_is_right(env: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-env", env]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    words = line.removeprefix(f"{env}: no fault found in ").split()
    assert (
        900 <= int(words[0]) <= 1000 and int(words[2]) > 20 and words[3] == "episodes" and not err
    )


def test_what_never_ends_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-env", "broken:NeverEnds"]) == 0
    note, fine = capsys.readouterr().out.splitlines()
    assert (
        "note: no episode ended within 1000 steps" in note
        and "no fault found in 1000 steps" in fine
    )


@pytest.mark.parametrize(
    "env, remedy",
    [
        (
            "LimitInDone",
            "44 of 44 episodes ended as terminated after exactly 20 steps, which learning takes for real ends; if it is a time limit, return it from is_truncated",
        ),
        ("HostLimitInDone", "as truncated"),
    ],
)
def test_a_time_limit_in_terminated_is_noted(
    env: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check-env", f"broken:{env}"]) == 0
    note, fine = capsys.readouterr().out.splitlines()
    assert "note: " in note and "episodes ended as terminated after exactly" in note
    assert "if it is a time limit" in note and remedy in note
    assert "no fault found in" in fine


def test_goals_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-env", "broken:Goals"]) == 0
    note, fine = capsys.readouterr().out.splitlines()
    assert (
        "note: it has goals" in note
        and "--her 0.8 and --goal-reward" in note
        and "no fault found in" in fine
    )


@pytest.mark.case  # test_environments_of_several_agents_are_played_too
def test_action_masks_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    for env, told in {
        "broken:Masked": "looks like an action mask, but has 3 numbers instead of 4 zeros and ones",
        "own:Masked": "info['legal_action_mask'] seems to say which actions are legal",
        "parts:Grid": "part 'mask' of its observation says which actions are legal, and policies will take only those",
        "parts:HostGrid --env-options where=info": "info['action_mask'] says which actions are legal, and policies",
        "parts:HostGrid --env-options where=method": "its method action_masks says which actions are legal",
    }.items():
        assert cli.main(["check-env", *env.split()]) == 0
        note, _ = capsys.readouterr().out.splitlines()
        assert told in note


def test_environments_of_several_agents_are_played_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-env", "team:CartPoles"]) == 0
    assert "no fault found in" in capsys.readouterr().out
    assert cli.main(["check-env", "team:Spoilt"]) == 1
    assert (
        "team:Spoilt: the observation of step_env at observation is not finite: [nan]"
        in capsys.readouterr().out
    )
    # moves off the line are tried, and leave the space
    assert cli.main(["check-env", "team:ShortMask"]) == 1
    assert (
        "note: its get_avail_actions looks like an action mask, but has 2 numbers instead of 3"
        in capsys.readouterr().out
    )
    assert cli.main(["check-env", "parts:Shrinking"]) == 1
    out = capsys.readouterr().out
    assert (
        "the action mask of step is array([" in out and "dtype=int8), not 4 zeros and ones" in out
    )
    assert cli.main(["check-env", "parts:Stuck"]) == 1
    assert (
        "the action mask of step 4 allows no action, though the episode continues"
        in capsys.readouterr().out
    )
    assert cli.main(["check-env", "team:NoMove"]) == 1
    out = capsys.readouterr().out
    assert (
        "the action mask of step_env in environment 0 at step 1 for agent 0 allows no action" in out
    )
    assert cli.main(["check-env", "team:Unequal"]) == 2
    assert "agents with different actions" in capsys.readouterr().err


def test_options_and_their_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            ["check-env", "gymnasium:CartPole-v1", "--env-options", "sutton_barto_reward=true"]
        )
        == 0
    )
    capsys.readouterr()
    for command, message in {
        "check-env": "which environment?",
        "check-env CartPol-v1": "did you mean 'CartPole-v1'?",
        "check-env broken:Rigt": "did you mean 'Right'?",
        "check-env no_such_module:make": "no module of that name can be imported",
        "check-env gymnasium:CartPole-v1 --env-options sutton=1": "has no option 'sutton'",
        "check-env envpool:Pong-v5": "comes from EnvPool",
        "check-env CartPole-v1 --env-timeout 0": "--env-timeout must be > 0",
        "check-env CartPole-v1 --seed 1": "unknown flag --seed",
    }.items():
        assert cli.main(command.split()) == 2
        out, err = capsys.readouterr()
        assert message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    "value, fault", [(1.0 + 1.2e-7, ""), (-1.0 - 1.2e-7, ""), (1.5, "1.5"), (-1.5, "-1.5")]
)
def test_an_observation_may_round_past_its_bound(value: float, fault: str) -> None:
    space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    found = findings._outside(np.array([0.0, value], np.float32), space)
    assert found == (f"{fault} at [1] is not between -1.0 and 1.0" if fault else "")


def test_a_slow_import_is_no_fault_of_the_environment(tmp_path, monkeypatch, capsys):
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(2)\nmake = None\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check-env", "slow_to_import:make", "--env-timeout", "0.3"]) == 2
    error = capsys.readouterr().err
    assert "took longer than 0.3 s" in error and "--env-timeout" in error and error.count("\n") == 1
