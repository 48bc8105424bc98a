"""Measures runs whose actors are processes of a Ray cluster against runs with actors in threads.

    python benchmarks/ray_actors.py

Two kinds of environments: one of Gymnasium that sleeps for 5 ms in each step, and Pong by EnvPool.
Both ways train in turn, ``--rounds`` times. Without ``RAY_ADDRESS`` each run starts Ray on this
machine, which is not a part of the time: rates are of the second half of a run's reports.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SLEEP_SECONDS = 0.005
RUNS = {
    "sleeping": "--env gymnasium:ray_actors:Sleeping --num-envs 8 --hidden-sizes 64 "
    "--total-env-steps 24000 --report-interval 1600",
    "pong": "--env envpool:Pong-v5 --num-envs 32 --total-env-steps 25600 --report-interval 1280",
}
COMMON = "--rollout-length 20 --num-actors 2 --num-devices 1 --evaluation-episodes 0 --quiet"
WAYS = {"threads": "", "ray": "--actors-on ray --actor-cpus 0.5"}


class Sleeping(gymnasium.Env[np.ndarray, int]):
    """An environment whose step takes 5 ms, without a core; an episode has 100 steps."""

    observation_space = spaces.Box(-1, 1, (8,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self.observation_space.sample(), {}

    def step(self, action: int) -> Any:
        time.sleep(SLEEP_SECONDS)
        self._step += 1
        return self.observation_space.sample(), float(action), False, self._step == 100, {}


def rate(flags: str, run_dir: pathlib.Path) -> float:
    """Trains, and returns the env steps a second of the second half."""
    words = f"train impala {flags} {COMMON} --plan asynchronous --run-dir {run_dir}".split()
    here = pathlib.Path(__file__).resolve().parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run([sys.executable, "-m", "jaxrl_dist.cli", *words], check=True, env=environment)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first = lines[len(lines) // 2]
    last = lines[-1]
    return (last["env_steps"] - first["env_steps"]) / (last["wall_time_s"] - first["wall_time_s"])


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    args = parser.parse_args()
    for name in args.runs:
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        with tempfile.TemporaryDirectory() as folder:
            for number in range(args.rounds):
                for way, flags in WAYS.items():
                    run_dir = pathlib.Path(folder) / f"{way}{number}"
                    rates[way].append(rate(f"{RUNS[name]} {flags}", run_dir))
        median = {way: statistics.median(values) for way, values in rates.items()}
        each = zip(rates["threads"], rates["ray"], strict=True)
        ratios = sorted(remote / local for local, remote in each)
        print(
            f"{name:10} threads {median['threads']:8,.0f}, ray {median['ray']:8,.0f} env steps/s; "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
