"""The flags that say which processes make a run together.

Imports nothing heavy, so that a rejected flag is fast.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_dist.checks import flag
from jaxrl_dist.config.values import check_declared, marked, setting
from jaxrl_dist.errors import ConfigError

MAX_PROCESSES = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """Processes that make one run together. These fields say how a run is started, and change none of its numbers."""

    coordinator: str | None = setting(None, resumable=True, stored=False)
    """Address HOST:PORT of process 0, for a run over several processes; give each process the same command, except for
    --process. Sizes then count over all processes."""
    processes: int | None = setting(None, low=1, high=MAX_PROCESSES, resumable=True, stored=False)
    """Number of processes of the run; 1: only this one, even if SLURM, Open MPI or a TPU pod has started several."""
    process: int | None = setting(None, low=0, high=MAX_PROCESSES - 1, resumable=True, stored=False)
    """Number of this process, from 0; process 0 writes the files."""
    lost_process_timeout: float = setting(30.0, low=2, high=86400, resumable=True, stored=False)
    """Seconds without an answer after which a process counts as lost, and the others end."""

    def check_launch(self) -> None:
        """Checks that the fields fit together.

        Raises:
          ConfigError: they do not; the message names the first such flag.
        """
        check_declared(self)
        if (self.coordinator, self.process) == (None, None) and self.processes in (None, 1):
            return
        flags = {flag(name): getattr(self, name) for name in ("coordinator", "processes", "process")}
        if missing := [name for name, value in flags.items() if value is None]:
            first = next(name for name in flags if name not in missing)
            raise ConfigError(
                f"{first} needs {' and '.join(missing)}, as in --coordinator 10.0.0.1:9876 --processes 2 --process 0"
            )
        address = re.fullmatch(".+:([0-9]{1,5})", str(self.coordinator))
        if address is None or not 0 < int(address[1]) < 2**16:
            raise ConfigError(f"--coordinator must be HOST:PORT such as 10.0.0.1:9876, not {self.coordinator}")
        assert self.process is not None and self.processes is not None
        if self.process >= self.processes:
            raise ConfigError(f"--process {self.process} is not one of --processes {self.processes}, counted from 0")


def launch_of(fields: Mapping[str, Any]) -> Processes:
    """Returns the launch among the fields of a run.

    Raises:
      ConfigError: its fields do not fit together.
    """
    launch = Processes(**{name: fields[name] for name in marked(Processes) if fields.get(name) is not None})
    launch.check_launch()
    return launch
