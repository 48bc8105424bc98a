"""Measures how much faster seeds train together than one after another:
``python benchmarks/populations.py``.

Both ways train PPO (4 environments x 128 steps) without evaluations and files, in one process, in
turns. Rates are env steps of all seeds per second. "training" counts from the first report, after
compiling. "CPU" is the same per second of CPU time, which other work on the machine hardly changes.
"whole" includes set-up and compilation, from a warm cache on the disk.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jaxrl_dist


def config(env: str, total: int, seed: int = 0, seeds: int = 1) -> jaxrl_dist.Train:
    """Returns the run of one seed, or of several."""
    return jaxrl_dist.preset(
        "ppo",
        env,
        num_envs=4,
        rollout_length=128,
        num_epochs=4,
        num_minibatches=4,
        hidden_sizes=(64, 64),
        activation="tanh",
        total_env_steps=total,
        report_interval=total // 4,
        evaluation_episodes=0,
        num_devices=1,
        seed=seed,
        seeds=seeds,
    )


def timed(*configs: jaxrl_dist.Train) -> tuple[float, float, float]:
    """Trains one config after the other, and returns the rates "training", "CPU" and "whole"."""
    began, whole = time.perf_counter(), 0
    steps, seconds, cpu_seconds = 0, 0.0, 0.0
    for each in configs:
        reports = jaxrl_dist.train(each)
        first = next(reports)
        then = time.perf_counter(), time.process_time()
        *_, last = reports
        seconds, cpu_seconds = (
            seconds + time.perf_counter() - then[0],
            cpu_seconds + time.process_time() - then[1],
        )
        steps, whole = steps + last.env_steps - first.env_steps, whole + last.env_steps
    return steps / seconds, steps / cpu_seconds, whole / (time.perf_counter() - began)


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1", help="envpool:CartPole-v1 runs on the host")
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--in-turn", type=int, default=4, help="seeds that train one after another")
    parser.add_argument("--steps", type=int, default=200_000, help="env steps of each seed")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    # fills the cache on the disk
    timed(config(args.env, args.steps), config(args.env, args.steps, seeds=args.seeds))
    pairs = []
    for _ in range(args.pairs):
        turn = timed(*(config(args.env, args.steps, seed) for seed in range(args.in_turn)))
        together = timed(config(args.env, args.steps, seeds=args.seeds))
        pairs.append((turn, together))
    print(
        f"| rate | {args.in_turn} in turn | {args.seeds} together | ratio, median (range) |\n|---|---:|---:|---:|"
    )
    for name, at in (("training", 0), ("CPU", 1), ("whole", 2)):
        turns, alls = ([pair[way][at] for pair in pairs] for way in (0, 1))
        ratios = sorted(b / a for a, b in zip(turns, alls, strict=True))
        middle, (low, *_, high) = statistics.median(ratios), ratios
        rates = " | ".join(f"{statistics.median(x):,.0f}" for x in (turns, alls))
        print(f"| {name} | {rates} | {middle:.2f} ({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    main()
