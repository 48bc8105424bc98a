"""What a training run shows in the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from jaxrl_dist.types import Report

PLAIN_SECONDS = 2.0
"""Where the output is no terminal, lines come at most this often."""


class Display:
    """Shows reports as they pass: a live bar on a terminal, plain lines elsewhere, nothing if quiet."""

    def __init__(self, total_env_steps: int, *, quiet: bool) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._total = total_env_steps
        self._evaluation: tuple[Progress, Any] | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )

    def watch(self, reports: Iterable[Report]) -> Iterator[Report]:
        """Passes the reports on, showing each."""
        with self._progress as progress:
            training = progress.add_task("compiling", total=self._total, status="")
            shown = 0.0
            for report in reports:
                status = self._status(report)
                completed = min(report.env_steps, self._total)
                progress.update(training, description="training", completed=completed, status=status)
                last = report.env_steps >= self._total
                if not self.console.is_terminal and (last or time.monotonic() - shown > PLAIN_SECONDS):
                    shown = time.monotonic()
                    self.console.print(f"{report.env_steps:>12,} env steps  {status}")
                yield report

    def evaluating(self, done: int) -> None:
        """Shows how many evaluation episodes are done."""
        if self._progress.tasks:
            task = self._progress.tasks[0].id
            self._progress.update(task, description="evaluating", status=f"{done} greedy episodes")

    @staticmethod
    def _status(report: Report) -> str:
        rate = report.metrics.get("time/env_steps_per_second") or 0.0
        episode_return = report.metrics.get("episode/return")
        shown = "-" if episode_return is None else f"{episode_return:.4g}"
        return f"{rate:,.0f} steps/s  return {shown}"
