"""The command line, above all what it says to input that cannot be run."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

from jaxrl_dist import cli, metrics, training

ROOT = Path(__file__).resolve().parents[1]
SLACK = 4
"""A loaded machine takes so many times as long as an idle one."""


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
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(content)
    damaged = shutil.copytree(done, folder / "damaged")
    large = max((damaged / "checkpoints/final").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    content = bytearray(large.read_bytes())
    content[len(content) // 2] ^= 1
    large.write_bytes(content)
    return folder


CARTPOLE = "train ppo --env CartPole-v1 "
PONG = "train ppo --env envpool:Pong-v5 "
BAD = {
    # commands
    "bogus": "unknown command 'bogus'; see: jaxrl-dist --help",
    "trian ppo": "did you mean 'train'?",
    "--verson": "did you mean '--version'?",
    "list": "is none of algorithms, envs, plans",
    "list env": "did you mean 'envs'?",
    "list envs plans": "is none of algorithms, envs, plans",
    "train": "which algorithm?",
    "train --env CartPole-v1": "which algorithm?",
    "train pppo --env CartPole-v1": "unknown algorithm 'pppo' (did you mean 'ppo'?)",
    "train ppo a2c --env CartPole-v1": "Unrecognized options: a2c",
    # environments
    "train ppo": "--env is missing",
    "train ppo --env": "Missing value for argument '--env'",
    "train ppo --env ''": "--env is missing",
    "train ppo --env CartPol-v1": "did you mean 'CartPole-v1'?",
    "train ppo --env gymnax:": "gymnax has no such environment",
    "train ppo --env envpool:Pog-v5": "did you mean 'Pong-v5'?",
    "train ppo --env gym:CartPole-v1": "unknown backend 'gym' (did you mean 'gymnax'?)",
    "train ppo --env envpool:CheetahRun-v1": "has Dict observations; Discrete, MultiDiscrete and Box work",
    "train ppo --env MNISTBandit-bsuite": "cannot be made here",
    # flags
    CARTPOLE + "--sed 3": "unknown flag --sed (did you mean '--seed'?)",
    CARTPOLE + "-s 3": "Unrecognized options: -s",
    CARTPOLE + "extra": "Unrecognized options: extra",
    CARTPOLE + "--no-seed": "unknown flag --no-seed",
    CARTPOLE + "--seed": "Missing value for argument '--seed'",
    CARTPOLE + "--seed 1 --seed 2": "--seed is given twice",
    CARTPOLE + "--num-envs 8 --num_envs=16": "--num_envs is given twice",
    CARTPOLE + "--normalize-advantages --no-normalize-advantages": "contradicts --normalize-advantages",
    CARTPOLE + "--normalize-advantages 1": "Unrecognized options: 1",
    # sizes and numbers
    CARTPOLE + "--num-envs 0": "--num-envs must be >= 1 and <= 1048576, not 0",
    CARTPOLE + "--num-envs -8": "--num-envs must be >= 1",
    CARTPOLE + "--num-envs 1000000000000": "--num-envs must be >= 1 and <= 1048576",
    CARTPOLE + "--num-envs 1048576 --rollout-length 1048576": "must be <= 1073741824, not 1099511627776",
    CARTPOLE + "--num-envs 1e3": "--num-envs: '1e3' is no whole number",
    CARTPOLE + "--num-envs nan": "--num-envs: 'nan' is no whole number",
    CARTPOLE + "--num-envs 8 16": "Unrecognized options: 16",
    CARTPOLE + "--num-envs 12": "--num-envs 12 does not divide over 8 devices; nearest that work: 8 or 16",
    CARTPOLE + "--num-minibatches 7": "--num-minibatches 7 does not divide",
    CARTPOLE + "--rollout-length 1.5": "--rollout-length: '1.5' is no whole number",
    CARTPOLE + "--total-env-steps inf": "--total-env-steps: 'inf' is no whole number",
    CARTPOLE + "--total-env-steps 0": "--total-env-steps must be >= 1",
    CARTPOLE + "--seed -1": "--seed must be >= 0",
    CARTPOLE + "--seed 99999999999": "--seed must be >= 0 and <= 2147483647",
    CARTPOLE + "--evaluation-episodes -1": "--evaluation-episodes must be >= 0",
    CARTPOLE + "--num-devices 99": "--num-devices 99, but there are 8 cpu devices",
    CARTPOLE + "--num-devices 0": "--num-devices must be >= 1",
    CARTPOLE + "--num-devices all": "--num-devices: 'all' is neither a whole number nor None",
    CARTPOLE + "--mem-fraction 2": "--mem-fraction must be > 0 and <= 1",
    CARTPOLE + "--learning-rate nan": "--learning-rate must be > 0, not nan",
    CARTPOLE + "--learning-rate inf": "--learning-rate must be > 0, not inf",
    CARTPOLE + "--learning-rate fast": "--learning-rate: 'fast' is no number",
    CARTPOLE + "--discount 1.5": "--discount must be >= 0 and <= 1",
    CARTPOLE + "--hidden-sizes 64 x": "--hidden-sizes: 'x' is no whole number",
    CARTPOLE + "--hidden-sizes 64 0": "--hidden-sizes must be >= 1",
    # choices
    CARTPOLE + "--plan bogus": "invalid choice 'bogus' for argument '--plan'",
    CARTPOLE + "--precision float64": "invalid choice 'float64'",
    CARTPOLE + "--torso nature": "--torso auto or mlp can read them",
    CARTPOLE + "--atari-preset bogus": "invalid choice 'bogus'",
    CARTPOLE + "--atari-preset machado": "needs an Atari environment",
    "train ppo --env envpool:CartPole-v1 --atari-preset machado": "needs an Atari environment",
    "train ppo --env envpool:CartPole-v1 --plan on_device": "use --plan synchronous",
    PONG + "--normalize-observations": "--normalize-observations needs observations of numbers",
    # options of the environment
    CARTPOLE + "--env-options gravty=1": "did you mean 'gravity'?",
    CARTPOLE + "--env-options gravity=high": "must be a float such as 9.8, not 'high'",
    CARTPOLE + "--env-options gravity=nan": "must be a float such as 9.8, not 'nan'",
    CARTPOLE + "--env-options gravity": "'gravity' is no key=value pair",
    CARTPOLE + "--env-options gravity=1 gravity=2": "gravity is given twice",
    PONG + "--env-options stack_nm=2": "did you mean 'stack_num'?",
    PONG + "--env-options num_envs=2": "has no option 'num_envs'",
    # files and directories
    CARTPOLE + "--run-dir {runs}/done": "holds a run already",
    CARTPOLE + "--run-dir {runs}/done/config.json": "is a file",
    CARTPOLE + "--run-dir {runs}/done/config.json/x": "cannot be written: Not a directory",
    CARTPOLE + "--run-dir ''": "--run-dir is empty",
    CARTPOLE + "--config": "Missing value for argument '--config'",
    "train --config {runs}/nowhere": "there is no {runs}/nowhere",
    "train --config {runs}/list": "is an object, not a list",
    "train --config {runs}/truncated/config.json": "is not JSON",
    "train --config {runs}/newer": "format 2 is unknown",
    "train --config {runs}/unknown-field": "unknown field 'sed'",
    "train --config {runs}/wrong-type": "--seed: 'zero' is no whole number",
    "train a2c --config {runs}/done": "is of ppo, not of a2c",
    "train --config {runs}/done --config {runs}/done": "--config is given twice",
    "train --config {runs}/done --num-devices 3": "--num-envs 8 does not divide over 3 devices",
    CARTPOLE + "--init-from {runs}/nowhere": "there is no run directory {runs}/nowhere",
    CARTPOLE + "--init-from {runs}": "holds no trained variables",
    CARTPOLE + "--init-from {runs}/done": "holds another network: params/policy/params/kernel is",
    CARTPOLE + "--init-from {runs}/damaged --hidden-sizes 8": "is damaged",
    # evaluate
    "evaluate": "which run?",
    "evaluate {runs}": "there is no {runs}/config.json",
    "evaluate {runs}/nowhere": "there is no {runs}/nowhere",
    "evaluate {runs}/unfinished": "holds no trained variables",
    "evaluate {runs}/damaged": "is damaged",
    "evaluate {runs}/done {runs}/done": "Unrecognized options",
    "evaluate {runs}/done --episodes 0": "--episodes must be >= 1",
    "evaluate {runs}/done --episodes many": "--episodes: 'many' is no whole number",
    "evaluate {runs}/done --episods 3": "did you mean '--episodes'?",
    "evaluate {runs}/done --seed -1": "--seed must be >= 0",
}


def assert_refused(code: int, out: str, err: str, message: str) -> None:
    assert code == 2, err
    assert out == ""
    assert err.startswith("jaxrl-dist: error: ")
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert message in err
    assert len(err) < 500 and "--help" not in err.replace("; --help lists all", "").replace("jaxrl-dist --help", "")


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_refused_in_one_line(
    command: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def accepted(*args: object) -> None:
        raise AssertionError("it trains")

    monkeypatch.setattr(training.Run, "_reports", accepted)
    monkeypatch.chdir(tmp_path)
    before = sorted(finished.rglob("*"))
    capsys.readouterr()
    code = cli.main(shlex.split(command.format(runs=finished)))
    captured = capsys.readouterr()
    assert_refused(code, captured.out, captured.err, BAD[command].format(runs=finished))
    assert list(tmp_path.iterdir()) == [], "something was left behind"
    assert sorted(finished.rglob("*")) == before


def run(*args: str, cwd: Path, script: str | None = None) -> subprocess.CompletedProcess[str]:
    start = [str(ROOT / "scripts" / script)] if script else ["-m", "jaxrl_dist.cli"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *start, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "command, script, seconds",
    [
        ("train ppo --env CartPole-v1 --sed 3", None, 2),
        ("ppo --env CartPole-v1 --num-envs 0", "train.py", 2),
        ("evaluate nowhere", None, 2),
        ("ppo --env CartPol-v1", "train.py", 5),
        ("train ppo --env CartPole-v1 --num-minibatches 7", None, 5),
    ],
)
def test_the_real_command_refuses_fast(command: str, script: str | None, seconds: float, tmp_path: Path) -> None:
    began = time.monotonic()
    done = run(*command.split(), cwd=tmp_path, script=script)
    assert time.monotonic() - began < seconds * SLACK
    assert_refused(done.returncode, done.stdout, done.stderr, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "--version",
        "train ppo --help",
        "evaluate --help",
        "list algorithms",
        "list plans",
        "train ppo --sed 3",
        "train pppo --env CartPole-v1",
        "train ppo --env CartPole-v1 --num-envs 0",
        "train ppo",
        "evaluate nowhere",
        "train --config nowhere",
    ],
)
def test_what_needs_no_environment_imports_nothing_heavy(command: str, tmp_path: Path) -> None:
    code = (
        "import sys; from jaxrl_dist import cli; code = cli.main(sys.argv[1:]);"
        "heavy = {'jax', 'flax', 'optax', 'gymnax', 'envpool', 'orbax', 'numpy', 'matplotlib'} & set(sys.modules);"
        "print('HEAVY', *heavy); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, 2), done.stderr
    assert done.stdout.splitlines()[-1].split() == ["HEAVY"]


def test_help_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in {
        (): ("train ALGO", "evaluate RUN_DIR", "list algorithms|envs|plans", "--version", "ppo"),
        ("--help",): ("usage: jaxrl-dist",),
        ("train", "--help"): ("usage: jaxrl-dist",),
        ("train", "ppo", "--help"): ("--num-envs", "--config", "--quiet", "--clip-epsilon"),
        ("evaluate", "--help"): ("--episodes", "--seed", "RUN_DIR"),
        ("list", "algorithms"): ("ppo", "Schulman"),
        ("list", "plans"): ("on_device", "synchronous"),
        ("list", "envs"): ("gymnax:CartPole-v1\n", "envpool:Pong-v5\n"),
        ("--version",): ("jaxrl-dist ",),
    }.items():
        assert cli.main(args) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        for word in words:
            assert word.lower() in captured.out.lower(), (args, word)


def test_the_script_is_the_same_command_and_names_what_happens(finished: Path, tmp_path: Path) -> None:
    done = run("--config", str(finished / "done"), "--run-dir", "new/run", cwd=tmp_path, script="train.py")
    assert (done.returncode, done.stderr) == (0, "")
    run_dir = tmp_path / "new" / "run"
    assert runs.untimed(run_dir) == runs.untimed(finished / "done")
    assert (run_dir / "config.json").read_text() == (finished / "done" / "config.json").read_text()
    lines = done.stdout.splitlines()
    assert "ppo on gymnax:CartPole-v1, plan on_device, 1 cpu device, 8 environments x 16 steps" in lines[0]
    assert lines[1] == "writing new/run"
    steps = runs.read_metrics(run_dir)[-1]["env_steps"]
    assert any(line.startswith(f"{steps:,} env steps") and "return" in line for line in lines)
    assert "evaluating: 2 greedy episodes" in lines
    assert "a second" in lines[-2]
    summary = runs.read_json(run_dir / "summary.json")
    assert f"return {summary['evaluation']['return_mean']:.4g} +- " in lines[-1]
    assert "2 greedy episodes" in lines[-1]


def test_evaluate_plays_as_the_run_did(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for seed in ("0", "1"):
        assert cli.main(["evaluate", str(finished / "done"), "--episodes", "2", "--seed", seed]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        lines.append(captured.out.splitlines()[-1])
    played = runs.read_json(finished / "done" / "summary.json")["evaluation"]
    assert lines[0].startswith(f"return {played['return_mean']:.4g} +- {played['return_std']:.4g} ")
    assert lines[1] != lines[0]


def test_ctrl_c_ends_a_run_cleanly(tmp_path: Path) -> None:
    command = f"train pg --env envpool:CartPole-v1 {runs.TINY} --run-dir x".replace("steps 384", "steps 1000000000")
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_dist.cli", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        metrics_file = tmp_path / "x" / "metrics.jsonl"
        deadline = time.monotonic() + 100
        while not (metrics_file.exists() and metrics_file.stat().st_size > 2000):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == "jaxrl-dist: error: interrupted\n"
    assert "Traceback" not in out
    assert len(runs.read_metrics(tmp_path / "x")) > 2
    assert not (tmp_path / "x" / "summary.json").exists()


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    for command in ("train ppo --help", "list plans"):
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxrl_dist.cli", *command.split()],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
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
        (OSError(28, "No space left on device", "x/metrics.jsonl"), "x/metrics.jsonl: No space left on device"),
        (OSError("the disk\nis gone"), "the disk is gone"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), "out of memory; fewer --num-envs"),
    ],
)
def test_a_failure_on_the_way_is_one_line(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "list_command", fail)
    assert cli.main(["list", "plans"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"jaxrl-dist: error: {message}") and err.count("\n") == 1


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: list[str]) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "list_command", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["list", "plans"])


def test_default_run_directories_differ() -> None:
    names = {metrics.default_run_dir("gymnax:CartPole-v1", "ppo", 3) for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("runs/gymnax-CartPole-v1__ppo__3__") for name in names)
