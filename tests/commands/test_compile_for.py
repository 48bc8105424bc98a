"""``jaxrl-dist doctor --compile-for``: on a target that is this CPU, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from jaxrl_dist import cli
from jaxrl_dist.commands import accelerators, compile_for
from jaxrl_dist.profiling import targets

RUN = "ppo --env CartPole-v1 --num-envs 8 --rollout-length 16 --hidden-sizes 8 --num-epochs 2 --num-minibatches 2"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with both compilers, of which the GPU's compiles for two devices of this CPU."""
    monkeypatch.setattr(accelerators, "version", lambda package: "1.0")
    monkeypatch.setattr(targets.Target, "devices", lambda self: jax.local_devices()[:2])


def test_a_run_is_compiled_and_its_memory_is_said(
    installed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = targets.Target("h200x2", "cuda", 10**9, {}, {})
    monkeypatch.setattr(targets, "target", lambda name: {"h200x2": chosen}[name])
    assert cli.main(["doctor", "--compile-for", "h200x2", *RUN.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (
        report["env"] == "gymnax:CartPole-v1" and report["devices"] == 2 and report["num_envs"] == 8
    )
    assert report["memory"]["device"] == 10**9 and report["memory"]["state"] > 8 * 4 * 4

    assert cli.main(["doctor", f"--compile-for={chosen.name}", *RUN.split(), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("\n") == 2
        and "2 x cpu" in out
        and "of 1.0 GB" in out
        and "does not fit" not in out
    )


@pytest.mark.case  # test_a_run_is_compiled_and_its_memory_is_said
def test_what_a_run_would_allocate_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    replay = "dqn --env CartPole-v1 --num-envs 8 --hidden-sizes 8 --batch-size 8 --replay-capacity"
    sizes = []
    for capacity in (4096, 1048576):
        assert (
            cli.main(["doctor", "--compile-for", "here", *replay.split(), str(capacity), "--json"])
            == 0
        )
        report = json.loads(capsys.readouterr().out)
        assert report["devices"] == len(jax.local_devices()) and report["memory"]["device"] > 10**8
        sizes.append(report["memory"]["state"])
    # A step of CartPole: 4 numbers observed, 1 of action, 1 of reward, and 3 bools.
    # Each device holds its share.
    assert (sizes[1] - sizes[0]) * 8 == pytest.approx((1048576 - 4096) * (6 * 4 + 3), rel=0.01)


def test_a_run_says_what_it_would_take_and_does_not_train(
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    sizes = {
        "device": 10**9,
        "state": 3 * 10**8,
        "new_state": 0,
        "temporary": 9 * 10**8,
        "program": 0,
    }
    about = {
        "algorithm": "PPO",
        "env": "X",
        "plan": "on_device",
        "num_envs": 8,
        "rollout_length": 4,
        "devices": 1,
        "kind": "cpu",
    }
    asked = []
    report = {**about, "compile_seconds": 1.0, "memory": sizes}
    monkeypatch.setattr(compile_for, "report", lambda *run: asked.append(run) or report)
    run_dir = str(tmp_path / "run")
    assert (
        cli.main(["train", *RUN.split(), "--run-dir", run_dir, "--quiet", "--plan-memory", "h200"])
        == 0
    )
    [(target, found)] = asked
    assert target == "h200" and found.resolved()[0].num_envs == 8 and not Path(run_dir).exists()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "memory of a device: 1.2 GB of 1.0 GB (state 300.0 MB, temporary 900.0 MB)",
        "it does not fit: it needs 1.2 GB, and a device has 1.0 GB",
    ]
    monkeypatch.undo()
    assert cli.main(["train", *RUN.split(), "--plan-memory", "h20"]) == 2
    assert "no target 'h20' (did you mean 'h200'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "target, flags, message",
    [
        ("h20", RUN, "no target 'h20' (did you mean 'h200'?); such as here, h200, h200x8"),
        ("v5e", RUN, "no target 'v5e'"),
        ("h200x0", RUN, "no target 'h200x0'"),
        ("", "", "--compile-for which accelerator? Such as here, h200"),
        ("", "--json", "--compile-for which accelerator? Such as here, h200"),
        ("here", f"--json=maybe {RUN}", "--json takes no value; remove 'maybe'"),
        ("", RUN.removeprefix("ppo "), "--compile-for which accelerator? Such as here, h200"),
        (
            "here",
            f"{RUN} --plan-memory here",
            "only `train` accepts --plan-memory; see what a run needs with `train ... --plan-memory here`",
        ),
        (
            "h200",
            "",
            "which run? Such as: jaxrl-dist doctor --compile-for h200 ppo --env CartPole-v1",
        ),
        ("h200x2", "ppo --env CartPole-v1 --plan synchronous", "this run has --plan synchronous"),
        ("h200x2", f"{RUN} --seeds 2", "remove --seeds and --vary"),
        ("h200x2", f"{RUN} --num-devices 1", "--num-devices names devices of this machine"),
        (
            "h200x2",
            "ppo --env CartPole-v1 --num-envs 3",
            "--num-envs 3 does not divide over 2 devices",
        ),
    ],
)
def test_what_cannot_be_compiled_is_said_in_one_line(
    installed: None, capsys: pytest.CaptureFixture[str], target: str, flags: str, message: str
) -> None:
    assert cli.main(["doctor", "--compile-for", *([target] if target else []), *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize("target, extra", [("h200", "cuda12"), ("v5e:2x4", "tpu")])
def test_missing_compiler_names_its_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str, extra: str
) -> None:
    monkeypatch.setattr(
        accelerators, "version", lambda package: "0.11.2" if package == "jax" else None
    )
    assert cli.main(["doctor", "--compile-for", target, *RUN.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"-m pip install 'jax[{extra}]==0.11.2'" in err and err.count("\n") == 1
