"""Run directories that version 0.1.0 wrote: every later one loads and resumes them,
or says in a line what to do.

``tests/stored/expected.json`` has what that version made of them.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import jaxrl_dist

STORED = Path(__file__).parents[1] / "stored"
EXPECTED = json.loads((STORED / "expected.json").read_text())
ENV: dict[str, Any] = {"single": {}, "population": {}, "policies": {"env": "team:Unlike"}}


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The name and the directory of a run."""
    with tarfile.open(STORED / f"{request.param}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return request.param, tmp_path / request.param


@pytest.mark.parametrize("stored", EXPECTED, indirect=True)
def test_a_stored_policy_plays_as_it_did(stored: tuple[str, Path]) -> None:
    name, run_dir = stored
    member = run_dir / "members" / "001" if name == "population" else run_dir
    summary = jaxrl_dist.load_policy(member, **ENV[name]).evaluate(episodes=4, seed=1).summary()
    # rounding grows from step to step
    assert summary == pytest.approx(EXPECTED[name]["evaluation"], rel=0.05)


@pytest.mark.filterwarnings("ignore:the run was saved with other versions of jaxrl-dist")
@pytest.mark.parametrize("stored", EXPECTED, indirect=True)
def test_a_stored_run_resumes_as_it_did(stored: tuple[str, Path]) -> None:
    name, run_dir = stored
    *_, last = jaxrl_dist.resume(run_dir, total_env_steps=500, **ENV[name])
    found = {"env_steps": last.env_steps, "updates": last.updates, **last.metrics}
    expected = EXPECTED[name]["resumed"]
    assert {metric: found[metric] for metric in expected} == pytest.approx(expected, rel=1e-4)
