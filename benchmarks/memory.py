"""Is anything held twice? ``python benchmarks/memory.py``
measures what runs hold beside what they must keep.

Each run is made small and large, in a process each. A CPU's device memory is the process's, so the
difference between the peaks of the two is what the further steps take: imports and programs are the
same. Beside it stands the sum of what must be kept of those steps, and of what a learner takes of
them at a time.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jaxrl_dist

MINATAR, PIXELS = 10 * 10 * 4 * 4, 84 * 84
"""Bytes of an observation: float32, and the newest frame of a stack, uint8."""


class Row(NamedTuple):
    """A run, and what it keeps of a step."""

    algorithm: str
    env: str
    field: str
    sizes: tuple[int, int]
    """Small and large values of the field."""
    steps: int
    """Steps that are kept for each unit of the field."""
    kept: int
    """Bytes of a step."""
    taken: float
    """Bytes that the learner needs at a time for each step that is kept: a minibatch,
    and what its networks give."""
    fields: Mapping[str, Any]


ROWS = {
    # A rollout of 128 steps, of which a quarter is a minibatch: observations, outputs of two
    # networks' two layers of 64 before and after the activation, and half as much again on the way
    # back.
    "ppo": Row(
        "ppo",
        "gymnax:Breakout-MinAtar",
        "num_envs",
        (256, 2048),
        128,
        MINATAR + 6 * 4,  # action, reward, log-probability, value, advantage, target
        (MINATAR + 6 * 4 + 1.5 * 2 * 2 * 64 * 2 * 4) / 4,
        {
            "rollout_length": 128,
            "num_minibatches": 4,
            "hidden_sizes": (64, 64),
            "total_env_steps": 600_000,
        },
    ),
    "dqn on pixels": Row(
        "dqn",
        "envpool:Pong-v5",
        "replay_capacity",
        (10_000, 110_000),
        1,
        PIXELS + 3 * 4,
        0,
        {"total_env_steps": 3_000, "learning_starts": 1_000, "replay_ratio": 1 / 32},
    ),
    "dqn, 64 seeds": Row(
        "dqn",
        "gymnax:Breakout-MinAtar",
        "replay_capacity",
        (2_000, 10_000),
        64,
        MINATAR + 3 * 4,
        0,
        {"seeds": 64, "total_env_steps": 2_000, "learning_starts": 1_000, "replay_ratio": 1 / 32},
    ),
    # MuZero's memory also has the policy of the search for three actions, its value,
    # and a priority.
    "muzero": Row(
        "muzero",
        "gymnax:Breakout-MinAtar",
        "replay_capacity",
        (12_800, 256_000),
        1,
        MINATAR + (3 + 3 + 2) * 4,
        0,
        {
            "total_env_steps": 2_000,
            "learning_starts": 1_000,
            "num_simulations": 4,
            "hidden_sizes": (64,),
        },
    ),
}


def trained(row: Row, size: int) -> int:
    """Trains, and returns the process's peak of memory in bytes."""
    own = {**row.fields, row.field: size, "evaluation_episodes": 0, "num_devices": 1}
    *_, last = jaxrl_dist.train(jaxrl_dist.preset(row.algorithm, row.env, **own))
    assert last.updates, "the run ended before it learnt"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size is not None:
        print(trained(ROWS[options.only[0]], options.size))
        return
    print(
        "| run | the large one's peak, MB | further steps | must be kept, MB | held, MB | held / kept |"
    )
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for name in options.only:
        row = ROWS[name]
        commands = (
            [sys.executable, __file__, "--only", name, "--size", str(size)] for size in row.sizes
        )
        small, large = (
            int(subprocess.run(x, check=True, capture_output=True, text=True).stdout.split()[-1])
            for x in commands
        )
        steps = row.steps * (row.sizes[1] - row.sizes[0])
        kept, held = steps * (row.kept + row.taken), large - small
        numbers = f"{large / 1e6:,.0f} | {steps:,} | {kept / 1e6:,.0f} | {held / 1e6:,.0f} | {held / kept:.2f}"
        print(f"| {name} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
