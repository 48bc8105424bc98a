"""``train --resume-or-start``: a supervisor repeats one command until it ends with 0."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import runs

from jaxrl_dist import cli
from jaxrl_dist.run import checkpoint, files

AGAIN = [*["train"], *runs.CARTPOLE.split(), "--resume-or-start"]


def train(run_dir: Path, *words: str) -> int:
    return cli.main([*AGAIN, "--run-dir", str(run_dir), *words])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs.finished(runs.CARTPOLE), tmp_path / "run"))


@pytest.mark.case  # test_what_a_run_without_a_checkpoint_has_left_makes_room
def test_it_starts_where_there_is_no_run(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--quiet") == 0
    assert runs.untimed(tmp_path / "run") == runs.untimed(runs.finished(runs.CARTPOLE))


def test_a_finished_run_is_left_as_it_is(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert train(run_dir) == 0
    out, err = capsys.readouterr()
    assert (
        out.count("\n") == 1 and "has done" in out and "--total-env-steps 384" in out and err == ""
    )
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_it_resumes_where_there_is_a_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    """One that ends at the summary, as a run that was stopped there:
    to the bit what an uninterrupted run gives.
    """
    longer = [word.replace("384", "640") for word in AGAIN]
    assert cli.main([*longer, "--run-dir", str(run_dir), "--quiet"]) == 0
    assert cli.main([*longer, "--run-dir", str(tmp_path / "whole"), "--quiet"]) == 0
    assert runs.untimed(run_dir)[-1] == runs.untimed(tmp_path / "whole")[-1]
    assert int(checkpoint.saved(run_dir)[0].name) >= 640


def test_other_flags_are_refused_by_name(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(run_dir, "--learning-rate", "0.5") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--learning-rate is 0.5, but the run to resume has 0.001" in err


@pytest.mark.parametrize(
    "began, flags, message",
    [
        ("", "--seeds 2", "--seeds is 2, but the run to resume has 1"),
        ("--seeds 2", "", "--seeds is 1, but the run to resume has 2"),
        (
            "--seeds 2",
            "--seeds 4",
            "--seeds is 4, but the run to resume has 2",
        ),
        (
            "--seeds 2",
            "--seeds 2 --seed 1",
            "--seed is 1, but the run to resume has 0",
        ),
        (
            "--seeds 2",
            "--seeds 2 --average-every 2",
            "--average-every is 2, but the run to resume has None;",
        ),
        (
            "--seeds 2",
            "--seeds 2 --evolve halving",
            "--evolve is halving, but the run to resume has None;",
        ),
        (
            "--seeds 2",
            "--seeds 2 --vary learning-rate=1,2",
            "--vary is {'learning-rate': '1,2'}, but the run to",
        ),
    ],
)
def test_members_do_not_change_and_nothing_is_deleted(
    began: str, flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(
        shutil.copytree(runs.finished(f"{runs.CARTPOLE} {began}".strip()), tmp_path / "run")
    )
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert train(run_dir, *flags.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_what_a_run_without_a_checkpoint_has_left_makes_room(run_dir: Path) -> None:
    """Other files stay; a run that another process is at is not touched."""
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "notes.txt").write_text("mine")
    with files.lock(str(run_dir)):
        assert train(run_dir, "--quiet") == 2
    assert runs.read_metrics(run_dir)
    assert train(run_dir, "--quiet", "--seed", "5") == 0
    assert runs.read_json(run_dir / "config.json")["run"]["seed"] == 5
    assert (run_dir / "notes.txt").read_text() == "mine"


def test_a_run_whose_last_checkpoint_is_lost_is_trained(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk or a kill may end a run before it; the supervisor stops, and nothing is
    deleted.
    """
    for path in checkpoint.saved(run_dir):
        shutil.rmtree(path)
    assert train(run_dir) == 0
    out, err = capsys.readouterr()
    assert (
        out.count("\n") == 1
        and f"is trained, but has no checkpoint to continue from; evaluate it with jaxrl-dist evaluate {run_dir}"
        in out
    )
    assert err == "" and cli.main(["evaluate", str(run_dir), "--episodes", "1"]) == 0


def test_trained_members_are_not_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(runs.finished(f"{runs.CARTPOLE} --seeds 2"), tmp_path / "run"))
    members = files.members_of(run_dir)
    for path in [path for member in members for path in checkpoint.saved(member)]:
        shutil.rmtree(path)
    assert train(run_dir, "--seeds", "2") == 0 and all(map(checkpoint.trained, members))
    assert "is trained, but has no checkpoint to continue from" in capsys.readouterr().out


def test_it_needs_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(AGAIN) == 2
    assert "--resume-or-start needs --run-dir" in capsys.readouterr().err
