"""The day with a GPU, rehearsed on the CPU: what is measured, and what a later call does."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import runs

DAY = runpy.run_path(str(runs.ROOT / "scripts" / "gpu_day.py"))
SMALL, Task = DAY["SMALL"], DAY["Task"]


def here(task: Any, sizes: Any, out: Path, seconds: float) -> Any:
    """Runs a task in this process, which has imported JAX already."""
    folder = out / task.name
    folder.mkdir(exist_ok=True)
    return json.loads(json.dumps(task.run(sizes, folder)))


def test_later_calls_do_what_earlier_ones_have_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[str] = []

    def task(name: str, **fields: Any) -> Any:
        def run(sizes: Any, folder: Path) -> Any:
            called.append(name)
            if name == "broken":
                raise OSError("no such card")
            return {"done": called.count("long") > 2, "return": 3.5}

        return Task(name, run, **fields)

    tasks = [task("first"), task("broken"), task("long", goes_on=True)]
    for minutes in (0.1, 5, 5, 5, 5):  # the first call is too short for anything
        results = DAY["day"](tmp_path, minutes, SMALL, here, tasks)
    assert called == ["first", "broken", "long", "broken", "long", "long"]
    assert (
        results["first"]["done"] and results["long"]["done"] and results["broken"]["failures"] == 2
    )
    assert DAY["load"](tmp_path) == results
    text = (tmp_path / "results.md").read_text()
    assert (
        "broken has failed: OSError: no such card" in text
        and "first: done False, return 3.5" in text
    )
    assert "broken: OSError" in capsys.readouterr().out


@pytest.mark.case  # the other tests of the file
@pytest.mark.parametrize("name", ["ppo CartPole", "Pong to the end"])
def test_a_task_measures(tmp_path: Path, name: str) -> None:
    tasks = [task for task in DAY["TASKS"] if task.name == name]
    assert len(tasks) == 1
    found = DAY["day"](tmp_path, 9, SMALL, here, tasks)[name]
    assert found["done"], found
    if name == "Pong to the end":
        assert found["result"]["return"] >= SMALL.target and found["result"]["env_steps"] > 0
        return
    (row,) = found["result"]
    assert row["env_steps_per_second"] > 0 and 0 < row["first_report_seconds"] < 300
    assert (
        "| `ppo --env gymnax:CartPole-v1 --num-envs 16 --rollout-length 8` |"
        in (tmp_path / "results.md").read_text()
    )
    assert (tmp_path / "speed.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_whole_day_in_processes(tmp_path: Path) -> None:
    DAY["main"](["--minutes", "60", "--rehearse", "--out", str(tmp_path)])
    results = DAY["load"](tmp_path)
    assert list(results) == [task.name for task in DAY["TASKS"]]
    assert all(found["done"] for found in results.values()), results
    for name in ("as on the CPU", "repeats", "resumes"):
        assert results[name]["result"]["equal"], results[name]
