"""Times a run as a whole: ``FLAGS of train [--seconds S]``; a part of ``scripts/benchmark.py``.

Without ``--seconds`` the run goes to its end, as it must over several processes, whose clocks
differ. Prints JSON: env steps per second, and per second of CPU time, counted from the first report
of an update, after compiling.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import jaxrl_dist
from jaxrl_dist.commands import flags, request
from jaxrl_dist.config.train import launch_of
from jaxrl_dist.hosts import start


@dataclasses.dataclass(frozen=True)
class Ours:
    """Times a run as a whole."""

    seconds: float | None = None
    """Seconds after which it ends; None: as train would."""


def main() -> None:
    """Trains, and prints the rate."""
    options, args = flags.split(Ours, sys.argv[1:], "python benchmarks/ours.py ALGO --env ID")
    seconds, run = options.seconds, request.parse(args)
    start.start(launch_of(run.fields))
    config, _ = run.resolved()
    config = dataclasses.replace(config, evaluation_episodes=0)
    if seconds is not None:
        config = dataclasses.replace(config, total_env_steps=10**9)
    first, now = None, (0.0, 0, 0.0)
    for report in jaxrl_dist.train(config):
        now = time.perf_counter(), report.env_steps, time.process_time()
        first = first or (now if report.updates else None)
        if seconds is not None and first is not None and now[0] - first[0] >= seconds:
            break
    assert first is not None, "a run has updates"
    steps = now[1] - first[1]
    print(
        json.dumps({"rate": steps / (now[0] - first[0]), "cpu_rate": steps / (now[2] - first[2])})
    )


if __name__ == "__main__":
    main()
