"""Measures memory growth during a run: ``python benchmarks/soak.py dqn --env CartPole-v1 --minutes 30``.

Trains with a checkpoint every few seconds and an evaluation with every report, in a directory that is deleted at the
end. Prints the resident memory of each minute and, from ``--warm-up`` minutes on, the slope of the least-squares line:
more than 1 MB a minute is a leak. ``--checkpoint-seconds 0`` turns checkpoints off, ``--evaluation-episodes 0``
evaluations. Flags of ``train`` may follow, such as ``--plan synchronous --num-envs 16``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import psutil

from jaxrl_dist.commands import flags
from jaxrl_dist.config.train import Train
from jaxrl_dist.run import checkpoint
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import run, setup


def main() -> None:
    """Trains for some minutes, printing a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm")
    parser.add_argument("--env", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=2.0, help="minutes that do not count")
    parser.add_argument("--checkpoint-seconds", type=float, default=5.0)
    parser.add_argument("--evaluation-episodes", type=int, default=5)
    args, more = parser.parse_known_args()

    more += ["--env", args.env, "--total-env-steps", str(10**9), "--checkpoint-interval", "0"]
    more += ["--checkpoint-minutes", str(args.checkpoint_seconds / 60)]
    more += ["--evaluation-episodes", str(args.evaluation_episodes)]
    more += ["--evaluation-interval", "1"] if args.evaluation_episodes else []
    with tempfile.TemporaryDirectory() as folder:
        fields = flags.parse_train(args.algorithm, [*more, "--run-dir", f"{folder}/run"])
        prepared = setup.prepare(*resolved(Train(args.algorithm), fields))
        print(prepared.describe(args.algorithm), flush=True)
        soak(prepared, args.minutes, args.warm_up)


def soak(prepared: run.Run, minutes: float, warm_up: float) -> None:
    """Trains for some minutes, and prints the memory and its slope."""
    process, began, checkpoints = psutil.Process(), time.monotonic(), set[int]()
    samples: list[tuple[float, float]] = []  # minutes, MB
    printed = 0
    for report in prepared.reports():
        passed = (time.monotonic() - began) / 60
        samples.append((passed, process.memory_info().rss / 1e6))
        checkpoints |= {int(path.name) for path in checkpoint.saved(str(prepared.config.run_dir))}
        if passed >= printed + 1 or passed >= minutes:
            printed = int(passed)
            print(
                f"{passed:5.1f} min  {samples[-1][1]:8.1f} MB  {report.env_steps:,} env steps, "
                f"{len(checkpoints)} checkpoints",
                flush=True,
            )
        if passed >= minutes:
            break
    print(f"{slope([sample for sample in samples if sample[0] >= warm_up]):+.2f} MB a minute")


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Returns the slope of the least-squares line, in MB a minute."""
    if len(samples) < 2:
        return float("nan")
    return float(np.polyfit(*np.transpose(samples), 1)[0])


if __name__ == "__main__":
    main()
