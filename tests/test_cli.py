"""The command line, above all what it says to input that cannot be run."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import runs
from messages import Messages, shortened

from jaxrl_dist import cli
from jaxrl_dist.commands import COMMANDS, accelerators, request
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError, ConfigWarning, EnvWarning, FileWarning
from jaxrl_dist.hosts.warn import one_line_warnings
from jaxrl_dist.play.policy import load_policy
from jaxrl_dist.run import checkpoint, console, saving
from jaxrl_dist.training import run as training_run
from jaxrl_dist.training import setup

SLACK = 4
"""A slow or loaded machine takes so many times as long as an idle one of today."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the run ``done`` and with what looks like a run and is none."""
    folder = tmp_path_factory.mktemp("runs")
    done = shutil.copytree(runs.finished(runs.CARTPOLE), folder / "done")
    config = (done / "config.json").read_text()
    for name, content in {
        "unfinished": config,
        "truncated": config[: len(config) // 2],
        "list": "[]",
        "newer": config.replace('"format": 1', '"format": 2'),
        "unknown-field": config.replace('"seed"', '"sed"'),
        "wrong-type": config.replace('"seed": 0', '"seed": "zero"'),
        "nested": "[" * 100_000,
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(content)
    (folder / "other.csv").write_text("step,reward\n100,5\n")
    for name in ("pipe", "link"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipe/config.json")
    (folder / "link/config.json").symlink_to("/dev/zero")
    damaged = shutil.copytree(done, folder / "damaged")
    for part in (damaged / "checkpoints").iterdir():
        large = max((part / "arrays").rglob("*"), key=lambda x: x.stat().st_size * x.is_file())
        content = bytearray(large.read_bytes())
        content[len(content) // 2] ^= 1
        large.write_bytes(content)
    return folder


CARTPOLE = "train ppo --env CartPole-v1 "
DQN, PENDULUM = "train dqn --env CartPole-v1 ", "train {} --env Pendulum-v1 "
PONG = "train ppo --env envpool:Pong-v5 "
IMPALA = "train impala --env CartPole-v1 "
A3C = "train a3c --env CartPole-v1 "
BAD = {
    # commands
    "bogus": "'bogus'",
    "trian ppo": "'train'",
    "--verson": "'--version'",
    "list": "algorithms envs plans",
    "list env": "'envs'",
    "list envs plans": "algorithms envs plans",
    "train": "algorithm --env",
    "train --env CartPole-v1": "algorithm --env",
    "train pppo --env CartPole-v1": "'pppo' 'ppo'",
    "train mappo --env CartPole-v1": "'mappo' --env-options",
    "train ppo a2c --env CartPole-v1": "'a2c'",
    # environments
    "train ppo": "--env",
    "train ppo --env": "--env",
    "train ppo --env ''": "--env",
    "train ppo --env CartPol-v1": "'CartPole-v1'",
    "train ppo --env gymnax:": "--env gymnax:",
    "train ppo --env envpool:Pog-v5": "'Pong-v5'",
    "train ppo --env gym:CartPole-v1": "'gym' 'gymnax'",
    "train ppo --env MNISTBandit-bsuite": "gymnax:MNISTBandit-bsuite",
    # flags
    CARTPOLE + "--sed 3": "--sed '--seed'",
    CARTPOLE + "-s 3": "'-s'",
    CARTPOLE + "extra": "--env 'extra'",
    CARTPOLE + "--no-seed": "--no-seed",
    CARTPOLE + "--seed": "--seed",
    CARTPOLE + "--seed 1 --seed 2": "--seed",
    CARTPOLE + "--num-envs 8 --num_envs=16": "--num_envs",
    CARTPOLE + "--normalize-advantages --no-normalize-advantages": "--normalize-advantages",
    CARTPOLE + "--normalize-advantages 1": "'1' --no-normalize-advantages",
    # sizes and numbers
    CARTPOLE + "--num-envs 0": "--num-envs 1 1048576 0",
    CARTPOLE + "--num-envs -8": "--num-envs 1",
    CARTPOLE + "--num-envs 1000000000000": "--num-envs 1 1048576",
    CARTPOLE
    + "--num-envs 1048576 --rollout-length 1048576": "--num-envs --rollout-length 1073741824 1099511627776",
    CARTPOLE + "--num-envs 1e-3": "--num-envs '1e-3'",
    CARTPOLE + "--num-envs nan": "--num-envs 'nan'",
    CARTPOLE + "--normalize-advantages=off": "'off' --no-normalize-advantages",
    CARTPOLE + "--normalize-advantages=": "--normalize-advantages '' --no-normalize",
    CARTPOLE + "--seed 8 --num-envs 8 8": "--num-envs '8'",
    CARTPOLE + "--num-envs 8 16": "--num-envs '16'",
    CARTPOLE + "--num-envs 12": "--num-envs 12 8 16",
    CARTPOLE + "--num-minibatches 7": "--num-minibatches 7 2 32 4 8",
    CARTPOLE + "--num-minibatches 2147483647": "--num-minibatches 64",
    CARTPOLE + f"--num-envs 1{'0' * 400}": "--num-envs 1 1048576 1000",
    CARTPOLE + f"--seed 1{'0' * 400}": "--seed 0 2147483647 1000",
    CARTPOLE + f"--seed {'1' * 5000}": "--seed 111",
    CARTPOLE + f"--learning-rate-steps 1{'0' * 400}": "--learning-rate-steps 1 1000000000000000",
    CARTPOLE + f"--actor-devices {'1' * 400}": "--actor-devices 0 1 2-7 111",
    CARTPOLE + "--rollout-length 1.5": "--rollout-length '1.5'",
    CARTPOLE + "--total-env-steps inf": "--total-env-steps 'inf'",
    CARTPOLE + "--total-env-steps 0": "--total-env-steps 1",
    CARTPOLE + "--seed -1": "--seed 0",
    CARTPOLE + "--seed 99999999999": "--seed 0 2147483647",
    CARTPOLE + "--evaluation-episodes -1": "--evaluation-episodes 0",
    CARTPOLE + "--evaluation-interval 0": "--evaluation-interval 1",
    CARTPOLE + "--evaluation-max-steps 0": "--evaluation-max-steps 1",
    CARTPOLE + "--core-size 8": "--core-size --core",
    CARTPOLE + "--learning-rate 1e-3 --vary learning-rate=1,2": "--vary --learning-rate",
    CARTPOLE
    + "--evaluation-episodes 0 --evaluation-interval 9": "--evaluation-interval --evaluation-episodes",
    CARTPOLE + "--keep-best evaluation": "--keep-best evaluation --evaluation-interval 50000",
    CARTPOLE
    + "--keep-best evaluation --evaluation-interval 9 --evaluation-episodes 0": "--keep-best --evaluation-episodes 0 20",
    CARTPOLE + "--num-devices 99": "--num-devices 99 8",
    CARTPOLE + "--num-devices 0": "--num-devices 1",
    CARTPOLE + "--num-devices all": "--num-devices 'all'",
    CARTPOLE + "--mem-fraction 2": "--mem-fraction 0 1",
    CARTPOLE + "--learning-rate nan": "--learning-rate 0 nan",
    CARTPOLE + "--learning-rate inf": "--learning-rate 0 inf",
    CARTPOLE + "--learning-rate fast": "--learning-rate 'fast'",
    CARTPOLE + "--discount 1.5": "--discount 0 1",
    CARTPOLE + "--hidden-sizes 64 x": "--hidden-sizes 'x'",
    CARTPOLE + "--hidden-sizes 64 0": "--hidden-sizes 1",
    # replay and exploration
    DQN + "--batch-size 4096 --replay-capacity 4000": "--batch-size 4096 --replay-capacity 4000",
    DQN + "--n-step 2000 --replay-capacity 8000": "--replay-capacity 8000 8 4 2000 16040",
    DQN + "--replay-capacity 1001": "--replay-capacity 8 1000 1008",
    DQN + "--replay-capacity -8": "--replay-capacity 1 -8",
    DQN + "--replay-capacity 15e-1": "--replay-capacity '15e-1'",
    DQN + "--replay-ratio 0.3": "--replay-ratio 0.28125 0.3125",
    DQN + "--replay-ratio 0": "--replay-ratio 0 0.0",
    DQN + "--batch-size 0": "--batch-size 1",
    DQN + "--batch-size 12": "--batch-size 12 8 16",
    DQN + "--n-step 0": "--n-step 1",
    DQN + "--learning-starts -1": "--learning-starts 0",
    DQN + "--priority-exponent 2": "--priority-exponent 0 1",
    DQN + "--epsilon-end 1.5": "--epsilon-end 0 1",
    DQN + "--num-atoms 51 --value-min 1 --value-max 1": "--value-min 1 --value-max",
    "train pqn --env CartPole-v1 --q-lambda 2": "--q-lambda 0 1",
    "train pqn --env CartPole-v1 --replay-ratio 1": "--replay-ratio pqn",
    "train impala --env CartPole-v1 --clip-rho 0": "--clip-rho 0",
    "train appo --env CartPole-v1 --clip-c nan": "--clip-c 0 nan",
    PENDULUM.format("sac") + "--temperature -1": "--temperature 0 -1.0",
    PENDULUM.format("sac") + "--target-rate 1.5": "--target-rate 0 1 1.5",
    PENDULUM.format("sac") + "--gae-lambda 1": "--gae-lambda sac",
    PENDULUM.format("td3") + "--noise pink": "--noise",
    PENDULUM.format("td3") + "--noise-std -0.1": "--noise-std 0",
    PENDULUM.format("td3") + "--actor-period 0": "--actor-period 1",
    **{
        PENDULUM.format(
            name
        ): f"{name} needs discrete actions, which Pendulum-v1 lacks; sac, td3, ddpg and ppo handle vectors of numbers"
        for name in ("dqn", "rainbow", "pqn")
    },
    **{
        f"train {name} --env CartPole-v1": "which CartPole-v1 lacks; dqn, rainbow, pqn, sac and ppo handle discrete"
        for name in ("td3", "ddpg")
    },
    # choices
    CARTPOLE + "--plan bogus": "--plan",
    CARTPOLE + "--precision float64": "'float64'",
    CARTPOLE + "--torso nature": "--torso",
    CARTPOLE + "--atari-preset bogus": "--atari-preset 'bogus'",
    CARTPOLE + "--atari-preset machado": "--atari-preset machado Atari",
    "train ppo --env envpool:CartPole-v1 --atari-preset machado": "--atari-preset machado Atari",
    "train ppo --env envpool:CartPole-v1 --plan on_device": "--plan",
    PONG + "--normalize-observations": "--normalize-observations",
    # options of the environment
    CARTPOLE + "--env-options gravty=1": "'gravity'",
    CARTPOLE + "--env-options gravity=high": "9.8 'high'",
    CARTPOLE + "--env-options gravity=nan": "9.8 'nan'",
    CARTPOLE + "--env-options gravity": "'gravity'",
    CARTPOLE + "--env-options gravity=1 gravity=2": "--env-options gravity twice",
    PONG + "--env-options stack_nm=2": "'stack_num'",
    PONG + "--env-options num_envs=2": "'num_envs'",
    # actors in threads
    CARTPOLE + "--actor-devices 0": "--actor-devices --plan",
    CARTPOLE + "--max-lag 1": "--max-lag --plan",
    CARTPOLE + "--lockstep": "--lockstep --plan",
    CARTPOLE + "--gather 1": "--gather --plan",
    CARTPOLE + "--on-actor-error restart": "--on-actor-error --plan",
    IMPALA + "--actor-devices 0,0": "--actor-devices 0",
    IMPALA + "--actor-devices 2-4,3": "--actor-devices 2-4,3 twice",
    IMPALA + "--actor-devices 3-1": "0 1 2-7 '3-1'",
    IMPALA + "--actor-devices gpu": "0 1 2-7 'gpu'",
    IMPALA + "--actor-devices ''": "0 1 2-7 ''",
    IMPALA + "--actor-devices 0-99": "--actor-devices 99 8 0",
    IMPALA + "--learner-devices 2-8": "--learner-devices 8",
    IMPALA + "--learner-devices 2-7 --num-devices 8": "--num-devices 8",
    IMPALA + "--learner-devices 2-7": "--num-envs 16 6 12 18",
    IMPALA + "--num-actors 3": "16 3 --num-actors 24",
    IMPALA + "--num-actors 0": "--num-actors 1",
    IMPALA + "--gather 3": "--gather 3 --num-actors 2",
    IMPALA + "--gather 1 --lockstep": "--gather --lockstep",
    IMPALA + "--max-lag 1 --lockstep": "--max-lag",
    IMPALA + "--max-lag 0 --lockstep": "--max-lag",
    IMPALA + "--lag 2": "--lag --lockstep",
    IMPALA + "--gather-deadline 2": "--gather-deadline --gather",
    IMPALA + "--max-restarts 2": "--max-restarts --on-actor-error",
    IMPALA + "--on-actor-error restart": "--on-actor-error",
    "train apex --env CartPole-v1 --gather 1": "--gather dqn",
    "train apex --env CartPole-v1 --max-lag 1": "--max-lag dqn",
    A3C + "--lockstep": "--lockstep --plan",
    A3C + "--normalize-observations": "--normalize-observations --plan",
    A3C + "--ema-steps 9": "--ema-steps --plan",
    A3C + "--scale-rewards": "--scale-rewards --plan",
    A3C + "--gather 1": "--gather --plan",
    CARTPOLE + "--plan gradients": "--normalize-observations --plan",
    CARTPOLE
    + "--plan gradients --no-normalize-observations --no-scale-rewards": "--num-epochs 16 1",
    A3C + "--actor-devices 0-7": "--actor-devices 0-7 --num-actors 4",
    IMPALA + "--actor-devices 0-": "0 1 2-7 '0-'",
    DQN + "--importance-exponent 0.5": "--importance-exponent --priority-exponent",
    DQN + "--ez-greedy --epsilon-start 0 --epsilon-end 0": "--ez-greedy --epsilon-start",
    "train rainbow --env CartPole-v1 --epsilon-steps 9": "--epsilon-steps --epsilon-start",
    "train pqn --env CartPole-v1 --epsilon-start 0.05 --epsilon-steps 9": "--epsilon-end",
    DQN + "--value-max 5": "--value-max --num-atoms 1",
    "train apex --env CartPole-v1 --epsilon-end 0.1": "--epsilon-end --no-epsilon-ladder",
    "train async-dqn --env CartPole-v1 --priority-exponent 0.5": "--plan",
    "train async-dqn --env CartPole-v1 --n-step 9": "--rollout-length 8 9",
    # files and directories
    CARTPOLE + "--checkpoint-interval -1": "--checkpoint-interval 0",
    CARTPOLE + "--keep-checkpoints 0": "--keep-checkpoints 1",
    CARTPOLE + "--no-checkpoint-replay": "--no-checkpoint-replay",
    CARTPOLE + "--checkpoint-replay --no-checkpoint-replay": "--checkpoint-replay",
    CARTPOLE + "--run-dir {runs}/done": "--run-dir {runs}/done resume",
    CARTPOLE + "--run-dir {runs}/done/config.json": "--run-dir {runs}/done/config.json",
    CARTPOLE + "--run-dir {runs}/done/config.json/x": "--run-dir {runs}/done/config.json/x",
    CARTPOLE + "--run-dir ''": "--run-dir",
    CARTPOLE + "--config": "--config",
    "train --config {runs}/nowhere": "{runs}/nowhere",
    "train --config {runs}/list": "{runs}/list object list",
    "train --config {runs}/truncated/config.json": "{runs}/truncated/config.json JSON",
    "train --config {runs}/newer": "{runs}/newer 2",
    "train --config {runs}/unknown-field": "'sed'",
    "train --config {runs}/wrong-type": "--seed 'zero'",
    "train --config {runs}/pipe": "{runs}/pipe/config.json",
    "train --config {runs}/link": "{runs}/link/config.json",
    "train --config {runs}/nested": "{runs}/nested/config.json",
    "train --config /dev/zero": "/dev/zero",
    "resume {runs}/pipe": "{runs}/pipe plain file",
    "evaluate {runs}/pipe": "{runs}/pipe plain file",
    "train a2c --config {runs}/done": "{runs}/done a2c",
    "train --config {runs}/done --config {runs}/done": "--config",
    "train --config {runs}/done --num-devices 3": "--num-envs 8 3",
    CARTPOLE + "--init-from {runs}/nowhere": "{runs}/nowhere",
    CARTPOLE + "--init-from {runs}": "no checkpoint",
    CARTPOLE + "--init-from {runs}/done": "{runs}/done params/policy/params/kernel",
    CARTPOLE + "--init-from {runs}/damaged --hidden-sizes 8": "{runs}/damaged damaged",
    # resume
    "resume": "jaxrl-dist runs/NAME",
    "resume --total-env-steps 5": "jaxrl-dist runs/NAME",
    "resume {runs}/nowhere": "{runs}/nowhere",
    "resume {runs}": "{runs}",
    "resume {runs}/truncated": "{runs}/truncated JSON",
    "resume {runs}/done": "--total-env-steps 384",
    "resume {runs}/done --total-env-steps 100": "--total-env-steps 100",
    "resume {runs}/done --total-env-steps many": "--total-env-steps 'many'",
    "resume {runs}/done --sed 1": "'--seed'",
    "resume {runs}/done --seed 1": "--seed",
    "resume {runs}/done --resume-or-start": "--resume-or-start",
    "resume {runs}/done --plan-memory here": "--plan-memory",
    "resume {runs}/done --no-normalize-advantages": "--normalize-advantages",
    "resume {runs}/done --env Acrobot-v1": "--env",
    "resume {runs}/done --num-devices 3": "3 --num-devices 1 2 4",
    "resume {runs}/done --num-devices 99": "--num-devices 99 8",
    "resume {runs}/done {runs}/done": "{runs}/done flag",
    "resume {runs}/done --algorithm": "--algorithm",
    "resume {runs}/done --algorithm {runs}/other.csv": "{runs}/other.csv .py",
    "plot {runs}/done {runs}/other.csv": "{runs}/other.csv step return reward",
    "plot {runs}/done {runs}/nowhere.csv": "{runs}/nowhere.csv",
    # sweep and profile
    "sweep ppo --env CartPole-v1 --seeds 2 --jobs": "--jobs",
    "sweep ppo --env CartPole-v1 --jobs --seeds 2": "--jobs",
    "profile ppo --env CartPole-v1 --json": "--json",
    "profile ppo --env CartPole-v1 --json= --seconds 1": "--json",
    "profile ppo --env CartPole-v1 --plan-memory here": "--plan-memory",
    # evaluate
    "evaluate": "jaxrl-dist runs/NAME",
    "evaluate {runs}": "{runs} {runs}/",
    "evaluate {runs}/nowhere": "{runs}/nowhere",
    "evaluate {runs}/done@7": "{runs}/done --checkpoint 7",
    "evaluate {runs}/unfinished": "{runs}/unfinished no checkpoint",
    "evaluate {runs}/damaged": "--config",
    "evaluate {runs}/done {runs}/done": "{runs}/done flag",
    "evaluate {runs}/done --episodes 0": "--episodes 1",
    f"evaluate {{runs}}/done --episodes 1{'0' * 400}": "--episodes 1 1000000 1000",
    "evaluate {runs}/done --episodes many": "--episodes 'many'",
    "evaluate {runs}/done --episods 3": "'--episodes'",
    "evaluate {runs}/done --seed -1": "--seed 0",
    # clients
    "train ppo --env remote:8800": "remote:8800 remote:127.0.0.1:8800",
    "train ppo --env remote:127.0.0.1:8800 --seeds 2": "remote:127.0.0.1:8800 --seeds --vary",
    "train ppo --env remote:127.0.0.1:8800 --evaluation-episodes 3": "--evaluation-episodes evaluate",
    "train ppo --env remote:127.0.0.1:8800 --action-repeat 2": "--action-repeat",
    "train ppo --env remote:127.0.0.1:8800 --env-options wait=2": "remote wait_seconds",
    "train ppo --env remote:127.0.0.1:8800 --env-options allow_origin=x": "allow_origin https://",
    "train dqn --env remote:127.0.0.1:8800 --env-options log_action=true --record x": "--record log_action=true",
    "check-env remote:127.0.0.1:8800": "remote:127.0.0.1:8800",
    # serve
    "serve": "jaxrl-dist runs/NAME",
    "serve {runs}/nowhere": "{runs}/nowhere",
    "serve {runs}/done --port 65536": "--port 65535",
    "serve {runs}/done --max-batch 48": "--max-batch 48 32 64",
    "serve {runs}/done --allow-origin example.org": "--allow-origin https://",
    "serve {runs}/done --token-file {runs}": "--token-file {runs} file",
    "serve {runs}/done --policy prey": "prey",
}


def test_without_a_terminal_a_run_says_when_reports_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *runs.CARTPOLE.split(), "--run-dir", str(tmp_path / "x")]) == 0
    every = runs.read_json(tmp_path / "x/config.json")["run"]["report_interval"]
    assert f"\ncompiling; a report comes every {every:,} env steps\n" in capsys.readouterr().out


def test_an_evaluation_for_programs_is_json(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", str(finished / "done"), "--episodes", "2"]
    assert cli.main([*command, "--json"]) == cli.main([*command, "--quiet"]) == 0
    out = capsys.readouterr().out.splitlines()
    numbers = json.loads("\n".join(out[:-1]))
    assert numbers == {"finished": True, **load_policy(finished / "done").evaluate(2).summary()}
    assert out[-1].startswith(
        f"return {numbers['return_mean']:.4g} +- {numbers['return_std']:.4g} ("
    )


def test_an_evaluation_of_an_unfinished_run_says_so(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(finished / "done", tmp_path / "run")
    evaluate = ["evaluate", str(run_dir), "--episodes", "2", "--json"]
    assert cli.main(evaluate) == 0 and capsys.readouterr().err == ""
    shutil.rmtree(run_dir / "checkpoints/final")
    assert cli.main(evaluate) == 0
    said, total = (
        capsys.readouterr(),
        runs.read_json(run_dir / "config.json")["run"]["total_env_steps"],
    )
    text = f"{run_dir} has not finished its {total:,} env steps; this is the policy of its newest checkpoint"
    assert (
        said.err == f"jaxrl-dist: warning: {text}\n" and json.loads(said.out)["finished"] is False
    )


def test_damaged_final_variables_are_those_of_the_newest_checkpoint(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(finished / "done", tmp_path / "run")
    evaluate = ["evaluate", str(run_dir), "--episodes", "2"]
    assert cli.main(evaluate) == 0
    intact, final = capsys.readouterr(), run_dir / "checkpoints/final"
    shutil.rmtree(final)
    shutil.copytree(finished / "damaged/checkpoints/final", final)
    assert cli.main(evaluate) == 0
    out, (warning,) = (text := capsys.readouterr()).out, text.err.splitlines()
    assert intact.out == out and warning.startswith(f"jaxrl-dist: warning: {final}/arrays/")
    assert warning.endswith(
        f" is damaged: it is not what was written; {checkpoint.saved(run_dir)[0]} is used instead"
    )


def assert_refused(code: int, out: str, err: str, *words: str) -> None:
    assert code == 2, err
    assert out == ""
    assert err.startswith("jaxrl-dist: error: ")
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert [word for word in words if word not in err] == [], err
    assert len(err) < 500 and "--help" not in re.sub(
        r"; --help lists the flags|jaxrl-dist (resume )?--help", "", err
    )


@pytest.fixture(scope="module")
def messages(request: pytest.FixtureRequest) -> Iterator[Messages]:
    rewrite = request.config.getoption("rewrite_messages")
    reviewed = Messages(rewrite)
    yield reviewed
    if rewrite:
        reviewed.write(list(BAD))


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_refused_in_one_line(
    command: str,
    messages: Messages,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def accepted(*args: object) -> None:
        raise AssertionError("it trains")

    monkeypatch.setattr(training_run.Run, "_reports", accepted)
    monkeypatch.chdir(tmp_path)
    before = sorted(finished.rglob("*"))
    capsys.readouterr()
    code = cli.main(shlex.split(command.format(runs=finished)))
    captured = capsys.readouterr()
    words = BAD[command].format(runs=finished).split()
    assert_refused(code, captured.out, captured.err, *words)
    message = captured.err.removeprefix("jaxrl-dist: error: ").strip()
    messages.compare(command, message.replace(str(finished), "{runs}"))
    assert list(tmp_path.iterdir()) == [], "something was left behind"
    assert sorted(finished.rglob("*")) == before


def test_reviewed_messages_are_in_the_order_of_commands(messages: Messages) -> None:
    if not messages.rewrite:
        assert list(messages.lines) == list(map(shortened, BAD))


def test_training_makes_an_environment_once_to_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again for each copy that it steps, of which a run that does not begin has none."""
    (tmp_path / "counted.py").write_text(
        "import gymnasium\nmade = []\n\ndef make():\n    made.append(1)\n    return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(training_run.Run, "reports", _enough)
    command = "train a2c --env counted:make --num-envs 2 --num-devices 1 --evaluation-episodes 0"
    assert cli.main(command.split()) == 2
    made = sys.modules.pop("counted").made
    assert made == [1]


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07\x9b2J\u202ex", "x" * 10**6])
def test_names_from_files_do_not_move_the_cursor(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.read_json(runs.finished(runs.CARTPOLE) / "config.json")
    config["run"]["env"] = name
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["evaluate", str(tmp_path)]) == 2
    with one_line_warnings():
        warnings.warn(name, FileWarning, stacklevel=1)
    console.Display(1).print(name)
    written = capsys.readouterr()
    shown = r"\x1b]0;owned\x07\x9b2J\u202ex" if len(name) < 20 else "x" * 1900
    assert shown in written.out
    assert written.err.count(shown) == 2 and len(written.err) < 4200
    assert (written.out + written.err).replace("\n", "").isprintable()


def test_quiet_leaves_out_advice_and_not_what_has_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with one_line_warnings(quiet=True):
        for category in (ConfigWarning, EnvWarning, FileWarning):
            warnings.warn(category.__name__, category, stacklevel=1)
    shown = [
        line.removeprefix("jaxrl-dist: warning: ") for line in capsys.readouterr().err.splitlines()
    ]
    assert shown == ["EnvWarning", "FileWarning"]


def _enough(*args: object) -> None:
    raise ConfigError("enough")


def run(*args: str, cwd: Path, script: str | None = None) -> subprocess.CompletedProcess[str]:
    start = [str(runs.ROOT / "scripts" / script)] if script else ["-m", "jaxrl_dist.cli"]
    env = {**os.environ, "PYTHONPATH": str(runs.ROOT)}
    return subprocess.run(
        [sys.executable, *start, *args],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "command, script, seconds",
    [
        ("train ppo --env CartPole-v1 --sed 3", None, 2),
        ("ppo --env CartPole-v1 --num-envs 0", "train.py", 2),
        ("evaluate nowhere", None, 2),
        pytest.param("ppo --env CartPol-v1", "train.py", 5, marks=pytest.mark.case),
        pytest.param(
            "train ppo --env CartPole-v1 --num-minibatches 7", None, 5, marks=pytest.mark.case
        ),
    ],
    ids=["flag", "script", "directory", "environment", "sizes"],
)
def test_the_real_command_refuses_fast(
    command: str, script: str | None, seconds: float, tmp_path: Path
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(*command.split(), cwd=tmp_path, script=script)
    # the processor's time, as other work may keep it waiting
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds * SLACK
    assert_refused(done.returncode, done.stdout, done.stderr, "")
    assert list(tmp_path.iterdir()) == []


COMMAND_BY_COMMAND = """
import contextlib, io, sys
from jaxrl_dist import cli
for command in sys.argv[2:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = cli.main(command.split())
    print(command, code, *sorted({name for name in sys.argv[1].split() if name in sys.modules}), sep=": ")
"""


def imported_by(modules: str, commands: Sequence[str], cwd: Path) -> list[str]:
    """A line for each command: itself, its exit code,
    and which of these modules are imported by then.
    """
    return subprocess.run(
        [sys.executable, "-c", COMMAND_BY_COMMAND, modules, *commands],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(runs.ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    ).stdout.splitlines()


def test_what_needs_no_environment_imports_nothing_heavy(tmp_path: Path) -> None:
    codes = {
        "--help": 0,
        "--version": 0,
        **{f"{command} --help": 0 for command in ("train ppo", *COMMANDS)},
        "list algorithms": 0,
        "list plans": 0,
        "train ppo --sed 3": 2,
        "train pppo --env CartPole-v1": 2,
        "train ppo --env CartPole-v1 --num-envs 0": 2,
        "train ppo": 2,
        "evaluate nowhere": 2,
        "resume nowhere": 2,
        "train --config nowhere": 2,
    }
    heavy = "jax flax optax gymnax envpool gymnasium orbax numpy matplotlib"
    assert imported_by(heavy, list(codes), tmp_path) == [
        f"{command}: {code}" for command, code in codes.items()
    ]


@pytest.mark.parametrize("chosen, level", [(None, "3"), ("0", "0")])
def test_commands_hide_the_log_of_xla(chosen: str | None, level: str, tmp_path: Path) -> None:
    """XLA's alarms of slow compilations would stand between the rows of a table."""
    code = "import os; from jaxrl_dist import cli; cli.main(['list', 'plans']); print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    env = {**os.environ, "PYTHONPATH": str(runs.ROOT)}
    env.pop("TF_CPP_MIN_LOG_LEVEL", None)
    if chosen:
        env["TF_CPP_MIN_LOG_LEVEL"] = chosen
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines()[-1] == level


def test_a_run_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    command = "train ppo --env CartPole-v1 --total-env-steps 256 --evaluation-episodes 0"
    assert (
        imported_by("scipy.sparse seaborn pandas aiohttp", [command], tmp_path)[-1]
        == f"{command}: 0"
    )


def test_wrong_env_is_refused_before_heavy_imports(tmp_path: Path) -> None:
    codes = {"list envs": 0, "train ppo --env CartPol-v1": 2}
    heavy = "jaxrl_dist.training.setup jaxrl_dist.plans orbax"
    assert imported_by(heavy, list(codes), tmp_path) == [
        f"{command}: {code}" for command, code in codes.items()
    ]


def test_help_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in {
        (): (
            "train ALGO",
            "evaluate RUN_DIR",
            "list algorithms|envs|plans|placements",
            "--version",
            "ppo",
        ),
        ("--help",): ("usage: jaxrl-dist",),
        ("train", "--help"): ("usage: jaxrl-dist",),
        ("train", "ppo", "--help"): ("--num-envs", "--config", "--clip-epsilon"),
        ("train", "ppo", "--help-all"): ("--num-envs", "quiet", "actors:"),
        ("resume", "runs/x", "--help-all"): (
            "usage: jaxrl-dist resume RUN_DIR",
            "--total-env-steps",
        ),
        ("evaluate", "--help"): ("--episodes", "--seed", "RUN_DIR"),
        ("video", "--help"): ("--fps", "--max-steps", "RUN_DIR FILE.gif"),
        ("list", "algorithms"): ("ppo", "Schulman", "a3c       a2c, --plan gradients"),
        ("list", "plans"): ("on_device", "synchronous", "asynchronous", "gradients"),
        ("list", "envs"): ("gymnax:CartPole-v1\n", "envpool:Pong-v5\n"),
        ("--version",): ("jaxrl-dist ",),
    }.items():
        assert cli.main(args) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        for word in words:
            assert word.lower() in captured.out.lower(), (args, word)


def test_the_script_is_the_same_command_and_names_what_happens(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = str(runs.ROOT / "scripts" / "train.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", [script, "--config", str(finished / "done"), "--run-dir", "new/run"]
    )
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    run_dir = tmp_path / "new" / "run"
    assert runs.untimed(run_dir) == runs.untimed(finished / "done")
    assert (run_dir / "config.json").read_text() == (finished / "done" / "config.json").read_text()
    lines = out.splitlines()
    assert (
        "ppo on gymnax:CartPole-v1, plan on_device, 1 cpu device, 8 environments x 16 steps"
        in lines[0]
    )
    assert lines[1] == "writing new/run"
    steps = runs.read_metrics(run_dir)[-1]["env_steps"]
    head = next(line.split() for line in lines if line.lstrip().startswith("env steps"))
    assert head[2:7] == ["training", "return", "length", "loss", "policy"] and head[-2:] == [
        "steps/s",
        "left",
    ]
    assert any(
        line.split()[0] == f"{steps:,}" and line.split()[-4:-2] == ["0", "s"]
        for line in lines
        if line.strip()
    )
    assert "evaluating: 2 episodes" in lines
    assert "a second" in lines[-2]
    summary = runs.read_json(run_dir / "summary.json")
    assert f"return {summary['evaluation']['return_mean']:.4g} +- " in lines[-1]
    assert "2 greedy episodes" in lines[-1]


def test_evaluate_plays_as_the_run_did(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for seed in ("0", "1"):
        assert (
            cli.main(["evaluate", str(finished / "done"), "--episodes", "2", "--seed", seed]) == 0
        )
        captured = capsys.readouterr()
        assert captured.err == ""
        lines.append(captured.out.splitlines()[-1])
    played = runs.read_json(finished / "done" / "summary.json")["evaluation"]
    assert lines[0].startswith(f"return {played['return_mean']:.4g} +- {played['return_std']:.4g} ")
    assert lines[1] != lines[0]


def test_ctrl_c_ends_a_run_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"train pg --env envpool:CartPole-v1 {runs.TINY} --run-dir x".replace(
        "steps 384", "steps 1000000000"
    )
    metrics_file, deadline = tmp_path / "x" / "metrics.jsonl", time.monotonic() + 100

    def interrupt() -> None:
        while time.monotonic() < deadline and not (
            metrics_file.exists() and metrics_file.stat().st_size > 2000
        ):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.chdir(tmp_path)
    thread = threading.Thread(target=interrupt)
    thread.start()
    code = cli.main(command.split())
    thread.join()
    out, err = capsys.readouterr()
    assert code == 130
    answer, line = err.splitlines()
    assert answer.startswith(
        "jaxrl-dist: saving and stopping after this iteration; press Ctrl-C again after a second"
    )
    assert line.startswith("jaxrl-dist: error: interrupted; `jaxrl-dist resume x` continues from ")
    assert "Traceback" not in out
    assert len(runs.read_metrics(tmp_path / "x")) > 2
    assert not (tmp_path / "x" / "summary.json").exists()
    newest, *others = checkpoint.saved(tmp_path / "x")
    assert line.endswith(f"continues from {int(newest.name)} env steps")
    assert len(others) <= 1, "a signal between a report and its save saves that report, too"


@pytest.fixture
def stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, list[str]]]:
    """``where -> (exit code, lines on stderr)`` of a run in
    ``x`` that gets SIGTERM in this method of Display.
    """

    def train(where: str) -> tuple[int, list[str]]:
        shown = getattr(console.Display, where)

        def stop(self: console.Display, *args: Any, **more: Any) -> Any:
            patch.setattr(console.Display, where, shown)  # only the first time
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            return shown(self, *args, **more)

        monkeypatch.chdir(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(console.Display, where, stop)
            code = cli.main(["train", *runs.CARTPOLE.split(), "--run-dir", "x"])
        return code, capsys.readouterr().err.splitlines()

    return train


def test_what_is_trained_is_kept_when_its_evaluation_is_stopped(
    stopped: Callable[[str], tuple[int, list[str]]], tmp_path: Path
) -> None:
    code, lines = stopped("evaluating")
    assert code == 143 and len(lines) == 2
    assert lines[1].endswith(
        "interrupted; the run is trained and saved; evaluate it with `jaxrl-dist evaluate x`"
    )
    run_dir = tmp_path / "x"
    assert runs.read_json(run_dir / "summary.json")["evaluation"] is None
    assert cli.main(["evaluate", str(run_dir), "--episodes", "2"]) == 0
    newest = checkpoint.saved(run_dir)[0] / "run.json"
    before = newest.stat().st_mtime_ns, newest.read_bytes()
    assert cli.main(["resume", str(run_dir), "--quiet"]) == 0
    assert runs.read_json(run_dir / "summary.json")["evaluation"]["episodes"] == 2
    assert (newest.stat().st_mtime_ns, newest.read_bytes()) == before, (
        "there was nothing new to save"
    )


def test_a_signal_before_anything_is_begun_leaves_nothing(
    stopped: Callable[[str], tuple[int, list[str]]],
) -> None:
    code, lines = stopped("__init__")
    assert code == 143 and lines[-1].startswith("jaxrl-dist: error: interrupted")


@pytest.mark.case  # full; test_a_reader_that_has_enough_is_no_error
@pytest.mark.parametrize("where", ["full", "closed"])
def test_training_outlives_its_output(where: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "jaxrl_dist.cli",
        "train",
        *runs.CARTPOLE.split(),
        "--run-dir",
        "x",
    ]
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") if where == "full" else os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(runs.ROOT)},
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
        )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0
    assert (
        line.startswith("jaxrl-dist: warning: the output cannot be written (")
        and "continues" in line
    )
    assert runs.read_json(tmp_path / "x" / "summary.json")["evaluation"]["episodes"] == 2


def test_variables_are_saved_if_the_checkpoint_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: saving.Saver) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints")

    monkeypatch.setattr(saving.Saver, "finish", full)
    assert (
        cli.main(["train", *runs.CARTPOLE.split(), "--run-dir", str(tmp_path / "x"), "--quiet"])
        == 1
    )
    assert "No space left on device" in capsys.readouterr().err
    assert cli.main(["evaluate", str(tmp_path / "x"), "--episodes", "2"]) == 0


FAULTY = {
    "cwd": runs.ROOT / "tests",  # where the module faulty is
    "env": {**os.environ, "PYTHONPATH": str(runs.ROOT)},
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
}
THREADS = f"train impala {runs.TINY} --total-env-steps 1000000000".replace(
    "--total-env-steps 384 ", ""
)


@pytest.mark.parametrize(
    "attempt", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))]
)
def test_an_error_in_an_actor_is_one_line_after_its_traceback(
    attempt: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chances = f"p_crash={0.02 / (1 + attempt)} p_crash_reset=0 p_stall=0 p_stall_reset=0"
    command = f"{THREADS} --env faulty:make --run-dir {tmp_path}/x --env-options {chances}"
    assert cli.main(command.split()) == 1
    out, err = capsys.readouterr()
    *before, line = err.splitlines()
    assert line.startswith("jaxrl-dist: error: faulty:make: environment")
    assert line.endswith("in step: RuntimeError: simulated crash")
    if before[-1].startswith("the run is saved: `jaxrl-dist resume "):  # it had learnt something
        before.pop()
    assert before[0].startswith("Traceback") and before[-2] == "RuntimeError: simulated crash"
    assert re.fullmatch(r"\(of the 4 environments of actor [01]\)", before[-1])
    assert err.count("Traceback") == 1 and "Traceback" not in out


@pytest.mark.case  # test_ctrl_c_ends_a_run_cleanly; what hangs is in envs/test_gymnasium.py
def test_ctrl_c_ends_a_run_whose_environments_hang(tmp_path: Path) -> None:
    command = f"{THREADS} --env faulty:hanging --env-options after=40 --run-dir {tmp_path}/x"
    process = subprocess.Popen([sys.executable, "-m", "jaxrl_dist.cli", *command.split()], **FAULTY)
    try:
        metrics_file = tmp_path / "x" / "metrics.jsonl"
        deadline = time.monotonic() + 100
        while not (metrics_file.exists() and metrics_file.stat().st_size > 0):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)  # by then they hang
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 8 * SLACK
    finally:
        process.kill()
    assert process.returncode == 130
    answer, line = err.splitlines()
    assert "stopping" in answer and line.startswith(
        "jaxrl-dist: error: interrupted; `jaxrl-dist resume "
    )


def test_uncorrected_lag_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One line, and no more; the same from Python; none where there is no such lag,
    or nothing is to be printed.
    """

    def enough(*args: object) -> None:
        raise ConfigError("enough")

    monkeypatch.setattr(training_run.Run, "_reports", enough)
    monkeypatch.chdir(tmp_path)
    for command, expected in {
        "ppo --plan asynchronous": "jaxrl-dist: warning: ppo",
        "a2c --plan asynchronous --max-lag 3": "jaxrl-dist: warning: a2c",
        "pg --plan asynchronous --lockstep": "jaxrl-dist: warning: pg",
        "pqn --plan asynchronous": "jaxrl-dist: warning: pqn",
        "impala --no-correction": "jaxrl-dist: warning: impala",
        "impala": None,
        "appo": None,
        "apex": None,
        "a3c": None,
        "ppo": None,
        "ppo --plan asynchronous --quiet": None,
        "ppo --plan asynchronous --lockstep --lag 0": None,
        "ppo --plan asynchronous --max-lag 0": None,
    }.items():
        assert (
            cli.main(["train", *command.split(), "--env", "CartPole-v1", "--num-devices", "1"]) == 2
        )
        *before, last = capsys.readouterr().err.splitlines()
        assert last == "jaxrl-dist: error: enough"
        assert len(before) == (expected is not None), (command, before)
        if expected:
            assert before[0].startswith(expected) and "it may learn poorly" in before[0]
    config: Train[Any] = Train("ppo", "CartPole-v1", plan="asynchronous", num_devices=1)
    with pytest.warns(ConfigWarning, match=r"ppo.*plan asynchronous") as caught:
        setup.prepare(config)
    assert len(caught) == 1


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    for command in ("train ppo --help", "list plans"):
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxrl_dist.cli", *command.split()],
            env={**os.environ, "PYTHONPATH": str(runs.ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(timeout=60) == 1


@pytest.mark.parametrize(
    "error, message",
    [
        (
            OSError(28, "No space left on device", "x/metrics.jsonl"),
            "x/metrics.jsonl: No space left on device",
        ),
        (OSError("the disk\nis gone"), "the disk is gone"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
            "out of memory; fewer --num-envs",
        ),
    ],
)
def test_a_failure_on_the_way_is_one_line(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: list[str]) -> None:
        raise error

    monkeypatch.setattr("jaxrl_dist.commands.list.run", fail)
    assert cli.main(["list", "plans"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"jaxrl-dist: error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Unable to initialize backend 'cuda'")]
)
def test_jax_without_a_device_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is the first to use JAX: gymnax does as it is imported."""

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("jaxrl_dist.commands.list.run", fail)
    monkeypatch.setattr("jax.local_devices", fail)
    monkeypatch.setattr(accelerators, "ROOT", Path("/nowhere"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(accelerators, "version", {"jax": "1.0"}.get)
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    for platforms, count, message in (
        (
            "cuda",
            "",
            f"JAX has no device for JAX_PLATFORMS=cuda: an NVIDIA GPU is not seen here; install its plugin: "
            f"{pip} 'jax[cuda12]==1.0'; unset it to use what is available",
        ),
        (
            "tpu,cpu",
            "",
            f"a TPU is not seen here; install its plugin: {pip} 'jax[tpu]==1.0'; unset it",
        ),
        ("moon", "", f"JAX has no device for JAX_PLATFORMS=moon: {type(error).__name__}"),
        ("", "0", "JAX_NUM_CPU_DEVICES=0 leaves JAX without a device; set it to 1 or more"),
        ("", "two", "JAX_NUM_CPU_DEVICES=two leaves JAX without a device; set it to 1 or more"),
        ("", "", f"JAX has no device: {type(error).__name__}"),
    ):
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", count)
        assert cli.main(["list", "plans"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("jaxrl-dist: error: ") and message in err and err.count("\n") == 1


def test_a_platform_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "moon")
    done = run("train", "ppo", "--env", "CartPole-v1", cwd=tmp_path)
    assert_refused(
        done.returncode, done.stdout, done.stderr, "JAX has no device for JAX_PLATFORMS=moon"
    )
    assert list(tmp_path.iterdir()) == []


def test_names_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that look like rich's markup, and by escapes where the terminal cannot show
    them.
    """
    written = io.BytesIO()

    def show(args: list[str]) -> int:
        display = console.Display(0)
        display.print("writing q/[/x] [red]y :smile: 日本🦄")
        display.console.print("wrote [/x]")
        print("日本")
        return 0

    monkeypatch.setattr("jaxrl_dist.commands.list.run", show)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["list", "plans"]) == 0
    assert written.getvalue().decode("ascii").splitlines() == [
        r"writing q/[/x] [red]y :smile: \u65e5\u672c\U0001f984",
        "wrote [/x]",
        r"\u65e5\u672c",
    ]


@pytest.mark.parametrize("code, exit_code", [(None, 0), (0, 0), (3, 2), ("enough", 2)])
def test_code_of_the_user_s_that_ends_python(
    code: object,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("jaxrl_dist.commands.list.run", lambda args: sys.exit(code))  # type: ignore[arg-type]
    assert cli.main(["list", "plans"]) == exit_code
    line = f"jaxrl-dist: error: your Python code called sys.exit({code!r})\n"
    assert capsys.readouterr().err == (line if exit_code else "")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: list[str]) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("jaxrl_dist.commands.list.run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["list", "plans"])


def test_default_run_directories_differ() -> None:
    names = {request.default_run_dir("gymnax:CartPole-v1", "ppo", 3) for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("runs/gymnax-CartPole-v1__ppo__3__") for name in names)
