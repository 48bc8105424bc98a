#!/usr/bin/env python
"""Compiles every algorithm for GPUs and TPUs that need not be here, and stores what their programs start.

    python scripts/accelerators.py                       # all of them, most of an hour on two cores
    python scripts/accelerators.py --only ppo --target h200

Needs the extras ``cuda12`` and ``tpu``. The counts go to docs/accelerators.json. docs/accelerators.md shows them, and
``tests/test_accelerators.py`` compares new counts with them.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
COUNTS = ROOT / "docs" / "accelerators.json"
TARGETS = {
    "h200": "One H200",
    "h200x8": "Eight H200",
    "v5e:2x4": "TPU v5e, 8 chips",
    "v5e:16x16": "TPU v5e, 256 chips",
    "v4:4x4x8": "TPU v4, 128 chips",
}
"""The targets, and their headings."""
WIDE = "--num-envs 2048 --rollout-length 128"
REPLAY = "--num-envs 256 --batch-size 256 --replay-capacity 262144"
RUNS = {
    "ppo": f"ppo --env gymnax:CartPole-v1 {WIDE}",
    "ppo-continuous": f"ppo --env gymnax:Pendulum-v1 {WIDE}",
    "ppo-gru": f"ppo --env gymnax:MemoryChain-bsuite --core gru {WIDE}",
    "ppo-cnn": f"ppo --env gymnax:Breakout-MinAtar {WIDE}",
    "a2c": f"a2c --env gymnax:CartPole-v1 {WIDE}",
    "pg": f"pg --env gymnax:CartPole-v1 {WIDE}",
    "impala": f"impala --env gymnax:CartPole-v1 --plan on_device {WIDE}",
    "appo": f"appo --env gymnax:CartPole-v1 --plan on_device {WIDE}",
    "es": "es --env gymnax:CartPole-v1 --num-envs 2048",
    "ars": "ars --env gymnax:CartPole-v1 --num-envs 2048",
    "pqn": f"pqn --env gymnax:CartPole-v1 {WIDE}",
    "dqn": f"dqn --env gymnax:CartPole-v1 {REPLAY}",
    "rainbow": f"rainbow --env gymnax:CartPole-v1 {REPLAY}",
    "r2d2": f"r2d2 --env gymnax:MemoryChain-bsuite {REPLAY}",
    "ddpg": f"ddpg --env gymnax:Pendulum-v1 {REPLAY}",
    "td3": f"td3 --env gymnax:Pendulum-v1 {REPLAY}",
    "iql": f"iql --env gymnax:Pendulum-v1 {REPLAY}",
    "marwil": f"marwil --env gymnax:CartPole-v1 {REPLAY}",
    "sac": f"sac --env gymnax:Pendulum-v1 {REPLAY}",
    "sac-discrete": f"sac --env gymnax:CartPole-v1 {REPLAY}",
}
"""Flags of ``jaxrl-dist train``; sizes divide over the 256 devices of the largest target."""
COUNTED = ("kernels", "copies", "conditionals")
PLACES = ("env_step", "update", "iteration")
"""Loops that the table shows."""


def compiled(run: str, target: str) -> dict[str, Any]:
    """Returns the report of ``jaxrl-dist doctor --compile-for`` on a run, made in a separate process.

    Raises:
      RuntimeError: the command has failed.
    """
    command = [sys.executable, "-m", "jaxrl_dist.cli", "doctor", "--compile-for", target, *RUNS[run].split(), "--json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} has ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def kept(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a report that does not depend on the machine that compiled."""
    loops = {
        loop["name"]: {name: loop[name] for name in ("times", *COUNTED, "collectives")}
        for loop in report["loops"]
        if loop["name"] in PLACES
    }
    memory = sum(size for name, size in report["memory"].items() if name != "device")
    return {"loops": loops, "started": report["started"]["iteration"], "memory": memory}


def rises(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each count of ``kept`` that is larger than before."""
    for name, loop in now["loops"].items():
        old = before["loops"].get(name, {"collectives": {}})
        for what in COUNTED:
            if loop[what] > old.get(what, 0):
                yield f"{name}: {loop[what]} {what}, {old.get(what, 0)} before"
        for what, count in loop["collectives"].items():
            if count > old["collectives"].get(what, 0):
                yield f"{name}: {count} {what}, {old['collectives'].get(what, 0)} before"


def load() -> dict[str, Any]:
    """Returns the kept counts by run and target, and under ``jax`` the version that compiled them."""
    return json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}


def table(target: str) -> str:
    """Returns a Markdown table of the kept counts for a target."""
    head = (
        "| run | env step | branches | update | branches | all-reduces | iteration | memory of a device |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    rows = []
    for run, found in load().get("runs", {}).items():
        if target in found:
            step, update = (found[target]["loops"].get(name) for name in ("env_step", "update"))
            cells = [f"{loop['kernels'] + loop['copies']} | {loop['conditionals']}" for loop in (step, update)]
            sums = update["collectives"].get("all-reduce", 0)
            rows.append(
                f"| `{RUNS[run]}` | {cells[0]} | {cells[1]} | {sums} | {found[target]['started']:,} | "
                f"{found[target]['memory'] / 1e6:,.0f} MB |"
            )
    return "\n".join([head, *rows])


def main() -> None:
    """Runs the script."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=RUNS, action="append", help="this run; may be given several times")
    parser.add_argument("--target", choices=TARGETS, action="append", help="this target; may be given several times")
    args = parser.parse_args()
    import jax

    for run in args.only or RUNS:
        for target in args.target or TARGETS:
            found = kept(compiled(run, target))
            counts = load()
            before = counts.get("runs", {}).get(run, {}).get(target)
            counts["jax"] = jax.__version__
            counts.setdefault("runs", {}).setdefault(run, {})[target] = found
            counts["runs"] = {name: counts["runs"][name] for name in RUNS if name in counts["runs"]}
            COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
            print(f"{run} for {target}: an iteration starts {found['started']:,}", flush=True)
            for line in rises(before, found) if before else ():
                print(f"  more than before: {line}", flush=True)


if __name__ == "__main__":
    main()
