"""The wall time of a run, and its share of set-up and compilation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_dist import mesh as meshes
from jaxrl_dist.types import Join

JOINS = {
    "time/env_steps_per_second": Join.RATE,
    "time/updates_per_second": Join.RATE,
    "time/compile_s": Join.SECONDS,
}
"""How members' times and rates are joined, as ``Join`` says."""


class Clock:
    """Measures the run's wall time in seconds, and its share of set-up and compilation.

    Excludes the time between sessions and the time of evaluations.
    ``actors.step.Stages`` divides a thread's time.
    """

    def __init__(self, progress: Mapping[str, Any], excluded_seconds: Callable[[], float]) -> None:
        """The arguments are as for ``Session``."""
        self._excluded_seconds = excluded_seconds
        self._began = time.perf_counter() - progress.get("wall_time_s", 0.0)
        self._compiled_before = progress.get("compile_s", 0.0)
        self._programs: tuple[meshes.Program, ...] = ()
        self._setup_began: float | None = self.wall_time()
        counts = ("iteration", "env_steps", "agent_steps", "updates")
        self._reported = progress.get("reported", {**dict.fromkeys(counts, 0), "seconds": 0.0})

    def ready(self, *programs: meshes.Program) -> None:
        """Ends the set-up; ``programs`` compile later, at their first call.
        A later call replaces the programs.
        """
        self._compiled_before = self._compile_seconds()
        if self._setup_began is not None:
            self._compiled_before += self.wall_time() - self._setup_began
            self._setup_began = None
        self._programs = programs

    def wall_time(self) -> float:
        """Returns the seconds since the run began."""
        return time.perf_counter() - self._began - self._excluded_seconds()

    def _compile_seconds(self) -> float:
        return self._compiled_before + sum(program.compile_seconds for program in self._programs)

    def rates(
        self, env_steps: int, agent_steps: int, updates: int, clock: str = "env_steps"
    ) -> dict[str, float | None]:
        """Returns a report's times and rates; rates cover the
        interval since the last report, without compilation.
        """
        compile_seconds = self._compile_seconds()
        last = self._reported
        seconds = self.wall_time() - compile_seconds - last["seconds"]
        rows = agent_steps - last["agent_steps"]
        made = updates - last["updates"]
        of_clock = {"env_steps": env_steps, "updates": updates}[clock]
        return {
            "time/env_steps_per_second": (env_steps - last["env_steps"]) / max(seconds, 1e-9),
            f"time/{clock}_per_second": (of_clock - last[clock]) / max(seconds, 1e-9),
            "time/compile_s": compile_seconds,
            "replay/ratio": made / rows if rows else None,
        }

    def reported(self, iteration: int, env_steps: int, agent_steps: int, updates: int) -> None:
        """Begins the next interval."""
        counts = {
            "iteration": iteration,
            "env_steps": env_steps,
            "agent_steps": agent_steps,
            "updates": updates,
        }
        self._reported = {**counts, "seconds": self.wall_time() - self._compile_seconds()}

    def to_json(self) -> dict[str, Any]:
        """Returns the checkpoint's JSON."""
        return {
            "wall_time_s": self.wall_time(),
            "compile_s": self._compile_seconds(),
            "reported": self._reported,
        }
