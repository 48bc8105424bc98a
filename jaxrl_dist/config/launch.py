"""The flags that say which processes make a run together.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_dist.checks import check_range, flag
from jaxrl_dist.errors import ConfigError

MAX_PROCESSES = 10_000
NAMES = ("coordinator", "processes", "process", "lost_process_timeout")
"""The fields of ``Launch``: no run directory stores them, and a resumed run takes new ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Processes that make one run together. These fields say how a run is started, and change none of its numbers."""

    coordinator: str | None = None
    """Address HOST:PORT of process 0, for a run over several processes; give each process the same command, except for
    --process. Sizes then count over all processes."""
    processes: int | None = None
    """Number of processes of the run; 1: only this one, even if SLURM, Open MPI or a TPU pod has started several."""
    process: int | None = None
    """Number of this process, from 0; process 0 writes the files."""
    lost_process_timeout: float = 30.0
    """Seconds without an answer after which a process counts as lost, and the others end."""

    def check_launch(self) -> None:
        """Checks that the fields fit together.

        Raises:
          ConfigError: they do not; the message names the first such flag.
        """
        check_range(self, "processes", low=1, high=MAX_PROCESSES)
        check_range(self, "process", low=0, high=MAX_PROCESSES - 1)
        check_range(self, "lost_process_timeout", low=2, high=86400)
        given = [name for name in NAMES[:3] if getattr(self, name) is not None]
        if given in ([], ["processes"]) and self.processes in (None, 1):
            return
        if missing := [flag(name) for name in NAMES[:3] if name not in given]:
            raise ConfigError(
                f"{flag(given[0])} needs {' and '.join(missing)}, as in --coordinator 10.0.0.1:9876 --processes 2 "
                "--process 0"
            )
        host, _, port = str(self.coordinator).rpartition(":")
        if not (host and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16):
            raise ConfigError(f"--coordinator must be HOST:PORT such as 10.0.0.1:9876, not {self.coordinator}")
        assert self.process is not None and self.processes is not None
        if self.process >= self.processes:
            raise ConfigError(f"--process {self.process} is none of --processes {self.processes}, counted from 0")


def launch_of(fields: Mapping[str, Any]) -> Launch:
    """Returns the launch among the fields of a run.

    Raises:
      ConfigError: its fields do not fit together.
    """
    launch = Launch(**{name: fields[name] for name in NAMES if fields.get(name) is not None})
    launch.check_launch()
    return launch
