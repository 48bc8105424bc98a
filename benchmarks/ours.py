"""Times a run that no profile takes apart: ``FLAGS of train --seconds S``; a part of ``scripts/benchmark.py``.

Prints JSON: env steps per second from the first report on, which comes after compiling.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import jaxrl_dist
from jaxrl_dist.commands import flags, train


def main() -> None:
    """Trains until the seconds are over, and prints the rate."""
    seconds, args = flags.taken(sys.argv[1:], "--seconds")
    asked = train.asked(args)
    assert asked is not None and seconds is not None, "an algorithm, and --seconds"
    config, _ = asked.resolved()
    config = dataclasses.replace(config, total_env_steps=10**9, evaluation_episodes=0)
    first = None
    for report in jaxrl_dist.train(config):
        now = time.perf_counter(), report.env_steps
        first = first or now
        if now[0] - first[0] >= float(seconds):
            print(json.dumps({"rate": (now[1] - first[1]) / (now[0] - first[0])}))
            return


if __name__ == "__main__":
    main()
