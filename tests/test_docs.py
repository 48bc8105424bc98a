"""What the documents show runs as it stands there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

import jaxrl_dist
from jaxrl_dist.evaluate import evaluate

ROOT = Path(__file__).resolve().parents[1]


def blocks(name: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    module = types.ModuleType("documented_algorithm")
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    exec(compile(blocks("docs/adding-an-algorithm.md")[0], "docs/adding-an-algorithm.md", "exec"), module.__dict__)
    return module


def test_the_documented_algorithm_is_short() -> None:
    assert len(blocks("docs/adding-an-algorithm.md")[0].splitlines()) <= 60


def test_the_documented_algorithm_learns_and_loads(example: types.ModuleType, tmp_path: Path) -> None:
    sizes = {"total_env_steps": 60_000, "evaluation_episodes": 20, "num_devices": 1, "run_dir": str(tmp_path / "run")}
    config = jaxrl_dist.Train(example.RWR(), env="CartPole-v1", **sizes)
    *_, last = jaxrl_dist.train(config)
    assert last.evaluation is not None
    assert last.evaluation["return_mean"] > 150  # a random policy gets 20
    policy = jaxrl_dist.load_policy(tmp_path / "run", example.RWR)
    played = evaluate(policy.algorithm, policy.variables, policy.source, 20, seed=0)
    assert played.summary() == last.evaluation
    with pytest.raises(jaxrl_dist.ConfigError, match="unknown algorithm 'RWR'"):
        jaxrl_dist.load_policy(tmp_path / "run")


def test_the_documented_algorithm_runs_everywhere(example: types.ModuleType) -> None:
    kinds = [
        {"env": "envpool:CartPole-v1"},
        {"env": "Pendulum-v1", "scale_rewards": True, "normalize_observations": True, "plan": "synchronous"},
    ]
    for kind in kinds:
        sizes = {"num_envs": 32, "total_env_steps": 1024, "evaluation_episodes": 0}
        config = jaxrl_dist.Train(example.RWR(core="gru"), **sizes, **kind)
        *_, last = jaxrl_dist.train(config)
        assert last.env_steps >= 1024


def test_the_readme_s_python_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, use, *_ = blocks("README.md")
    run_dir = tmp_path / "run"
    train = train.replace("total_env_steps=150_000", f"total_env_steps=2_000, run_dir={str(run_dir)!r}")
    use = use.replace('"runs/..."', repr(str(run_dir)))
    import numpy as np

    names = {"num_envs": 3, "obs": np.zeros((3, 4), np.float32)}
    exec(train, names)
    exec(use, names)
    assert "return_mean" in capsys.readouterr().out
    assert names["action"].shape == (3,)


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for link in re.findall(r"\]\(\s*([^)#\s]+)", document.read_text(encoding="utf-8")):
            assert link.startswith("http") or (document.parent / link).exists(), f"{document.name}: {link}"
