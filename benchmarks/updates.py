"""Compares the updates of several algorithms, or of one with other flags:

    python benchmarks/updates.py sac tqc "sac --num-critics 10 --target-critics 2"

Each command makes its updates on one batch repeatedly, without environments and without a memory to
sample. The commands take turns, so that machine drift slows them equally. A row has the median of
the rounds, and its ratio to the first row.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
from replay import make_bare

from jaxrl_dist.commands import flags
from jaxrl_dist.config.train import Train
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import setup


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="+", help="as after jaxrl-dist train")
    parser.add_argument("--env", default="envpool:HalfCheetah-v4")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--updates", type=int, default=200, help="of each command in a round")
    args = parser.parse_args()

    bare = {}
    for command in args.commands:
        algorithm, *more = command.split()
        more += ["--env", args.env, "--num-devices", "1", "--replay-capacity", "16384"]
        config, source = resolved(Train(algorithm), flags.parse_train(algorithm, more))
        bare[command] = make_bare(setup.prepare(config, source).session)
        bare[command](10)  # compiles
    seconds: dict[str, list[float]] = {command: [] for command in bare}
    for _ in range(args.rounds):
        for command, make_updates in bare.items():
            began = time.perf_counter()
            make_updates(args.updates)
            seconds[command].append((time.perf_counter() - began) / args.updates)
    print(f"{args.env}, {jax.devices()[0].device_kind}, {args.rounds} rounds of {args.updates}")
    print("| `jaxrl-dist train ...` | ms an update | of the first |")
    print("|---|---:|---:|")
    first = statistics.median(seconds[args.commands[0]])
    for command, times in seconds.items():
        median = statistics.median(times)
        print(f"| `{command}` | {1000 * median:.2f} | {median / first:.2f} |")


if __name__ == "__main__":
    main()
