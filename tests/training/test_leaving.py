"""Runs whose caller leaves them: by an error, by Ctrl-C at any line, or by the program's end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxrl_dist
from jaxrl_dist.errors import ConfigWarning
from jaxrl_dist.training import pipeline
from jaxrl_dist.training.reports import StopState


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_between_two_reports_lets_the_run_save(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, saved = StopState(lambda: False), []

    def stages() -> Iterator[Any]:
        for step in range(4):
            if ending.error is not None:
                saved.append(step)
                return
            yield step

    calls = iter(range(10))

    def taken(reports: Iterator[Any], ending: StopState) -> Any:
        number = next(calls)
        if when == "before" and number == 2:
            raise KeyboardInterrupt
        report = next(reports, None)
        if when == "after" and number == 2:
            raise KeyboardInterrupt
        return report

    monkeypatch.setattr(pipeline, "_next", taken)
    with pytest.raises(KeyboardInterrupt):
        list(pipeline.until_error(stages(), ending))
    assert saved == [2 if when == "before" else 3]


def test_reports_that_no_loop_takes_are_said() -> None:
    config = jaxrl_dist.preset("ppo", "CartPole-v1", hidden_sizes=(4,), num_devices=1)
    with pytest.warns(
        ConfigWarning,
        match="nothing was trained: a run advances only while a loop takes its reports",
    ):
        jaxrl_dist.train(config)
    reports = jaxrl_dist.train(config)
    reports.close()  # type: ignore[attr-defined]
    with pytest.warns(ConfigWarning, match="nothing was trained"):
        del reports


@pytest.mark.case  # an own process, which compiles
@pytest.mark.parametrize("error", ["", "raise RuntimeError('mine')"])
def test_a_program_that_ends_within_its_reports_saves_the_run(error: str, tmp_path: Path) -> None:
    program = f"""
        import jaxrl_dist

        sizes = dict(hidden_sizes=(8,), num_envs=8, rollout_length=16, report_interval=128, num_devices=1)
        reports = jaxrl_dist.train(jaxrl_dist.preset("ppo", "CartPole-v1", **sizes, run_dir="run"))
        for report in reports:
            if report.step >= 256:
                {error or "break"}
    """
    script = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert bool(done.returncode) == bool(error) and "FileWarning" not in done.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir())
