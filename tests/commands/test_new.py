"""``new`` writes an algorithm as one file, and says what to type next."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxrl_dist import cli, templates
from jaxrl_dist.algorithms import from_file

BAD = {
    "": "which algorithm? Such as: jaxrl-dist new ppo my_ppo.py",
    "pqn mine.py": "new cannot write 'pqn'; name one of ppo, dqn, sac",
    "--env CartPole-v1": "which algorithm?",
    "ppo": "which file? Such as: jaxrl-dist new ppo my_ppo.py",
    "ppo mine": "mine must end in .py; name it mine.py",
    "ppo there.py": "there.py exists; name another file",
    "ppo folder.py": "folder.py cannot be written: it is a directory",
    "ppo nowhere/mine.py": "nowhere/mine.py cannot be written: there is no directory nowhere",
    "ppo mine.py --env CartPol-v1": "did you mean 'CartPole-v1'?",
    "ppo mine.py --env Catch-bsuite": "this file reads a vector or an image",
    "ppo mine.py more": "more",
}


@pytest.mark.parametrize("args", BAD)
def test_what_cannot_be_written_is_refused_in_one_line(
    args: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("mine")
    (tmp_path / "folder.py").mkdir()
    assert cli.main(["new", *args.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxrl-dist: error: ") and BAD[args] in line
    assert (tmp_path / "there.py").read_text() == "mine"
    assert not (tmp_path / "mine.py").exists()


def test_it_writes_the_file_and_says_what_to_type_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "ppo", "my_ppo.py"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote my_ppo.py, with the values for CartPole-v1",
        "train:              jaxrl-dist train my_ppo.py --env CartPole-v1",
        "check your changes: jaxrl-dist check-algorithm my_ppo.py --env CartPole-v1",
    ]
    template = (Path(templates.__file__).parent / "ppo.py").read_text(encoding="utf-8")
    expected = template.replace("class PPO:", "class MyPPO:").replace(": PPO", ": MyPPO")
    assert (tmp_path / "my_ppo.py").read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    "stem, name",
    [("spo", "Spo"), ("ppo", "PPO"), ("lag-ppo.2", "LagPPO2"), ("agent", "PPO"), ("2ppo", "PPO")],
)
def test_the_class_is_named_after_the_file(stem: str, name: str, tmp_path: Path) -> None:
    assert cli.main(["new", "ppo", str(tmp_path / f"{stem}.py")]) == 0
    assert from_file(str(tmp_path / f"{stem}.py")).__name__ == name


def test_defaults_are_those_of_the_environment_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    assert cli.main(["new", "ppo", str(file), "--env", "Pendulum-v1"]) == 0
    text = file.read_text()
    assert "    discount: float = setting(0.95, low=0, high=1)\n" in text
    assert '{"num_envs": 16, "rollout_length": 128, "scale_rewards": True}' in text
