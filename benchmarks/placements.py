"""Trains CartPole under each placement by its one word:
``python benchmarks/placements.py --out placements``.

Each run is a command, one after the other, on forced devices of this CPU. The rate is of the
training alone, without compiling; devices that share cores cannot be faster than one, so rates
compare with those of this table only. ``OUT/placements.json`` holds what is done, and a further
call goes on; the table is printed. Exit code 1: a run has not reached 475.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOLVED = 475.0


class Row(NamedTuple):
    """A run."""

    placement: str
    algorithm: str
    env: str
    steps: int
    devices: int

    def command(self) -> list[str]:
        """Returns the words after ``jaxrl-dist``."""
        run = ["train", self.algorithm, "--env", self.env, "--placement", self.placement]
        return [*run, "--total-env-steps", str(self.steps)]


ROWS = (
    Row("anakin", "ppo", "gymnax:CartPole-v1", 150_000, 2),
    Row("seed", "ppo", "envpool:CartPole-v1", 150_000, 2),
    Row("averaged:4", "ppo", "gymnax:CartPole-v1", 150_000, 2),
    Row("sebulba:1+1", "impala", "envpool:CartPole-v1", 500_000, 2),
    Row("replicas:2", "impala", "envpool:CartPole-v1", 500_000, 2),
    Row("server:2", "a2c", "envpool:CartPole-v1", 500_000, 1),
    Row("apex:2", "dqn", "envpool:CartPole-v1", 500_000, 1),
)


def main() -> None:
    """Runs what is not done, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("placements"))
    parser.add_argument(
        "--only", default="", help="run the placements whose words contain this text"
    )
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "placements.json"
    results: dict[str, list[Any]] = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    )
    for row in ROWS:
        for seed in range(
            len(results.get(row.placement, ())), args.seeds if args.only in row.placement else 0
        ):
            results.setdefault(row.placement, []).append(run(row, seed))
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{row.placement}: {results[row.placement][-1]}", flush=True)
    print("\n".join(table(results)))
    sys.exit(any(each["return"] < SOLVED for runs in results.values() for each in runs))


def run(row: Row, seed: int) -> dict[str, float]:
    """Trains, and returns env steps a second and the mean
    return of the greedy episodes at the end; of all members.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [*row.command(), "--seed", str(seed), "--run-dir", f"{folder}/run", "--quiet"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(row.devices)}
        subprocess.run([sys.executable, "-m", "jaxrl_dist.cli", *words], env=env, check=True)
        members = sorted(pathlib.Path(folder, "run").glob("members/*/")) or [
            pathlib.Path(folder, "run")
        ]
        summaries = [
            json.loads((member / "summary.json").read_text(encoding="utf-8")) for member in members
        ]
        last = json.loads(
            (members[0] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        )
    steps = sum(summary["env_steps"] for summary in summaries)
    returns = [summary["evaluation"]["return_mean"] for summary in summaries]
    return {
        "rate": steps / (last["wall_time_s"] - last["time/compile_s"]),
        "return": sum(returns) / len(returns),
    }


def table(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """Returns the runs as Markdown."""
    lines = ["| `jaxrl-dist ...` | devices | env steps/s | return |", "|---|---:|---:|---:|"]
    for row in ROWS:
        for each in results.get(row.placement, ()):
            words = " ".join(row.command())
            lines.append(
                f"| `{words}` | {row.devices} | {each['rate']:,.0f} | {each['return']:.0f} |"
            )
    return lines


if __name__ == "__main__":
    main()
