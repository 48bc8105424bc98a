"""Predicts how a run scales over devices, and measures it:
``python benchmarks/scale.py --out scale.json``.

The run is PPO on CartPole under ``on_device`` with a fixed number of environments in total. A
profile on one device gives the seconds of an iteration that devices divide among them
(environments, policy, postprocess, gradient) and those that each device spends as a whole
(optimizer, rest). A program that does nothing else gives the seconds of an all-reduce. The model
adds them up: see docs/scale.md. Devices are forced ones of this CPU, which share its cores, so more
of them cannot be faster; they show the cost of dividing. Nothing else should use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIVIDED = ("environment", "policy", "postprocess", "shuffle", "gradient")
"""Stages of a profile whose work the devices share."""
NUM_ENVS, ROLLOUT, EPOCHS, MINIBATCHES = 2048, 128, 4, 4
FLAGS = [
    *(
        "ppo",
        "--env",
        "gymnax:CartPole-v1",
        "--num-envs",
        str(NUM_ENVS),
        "--rollout-length",
        str(ROLLOUT),
    ),
    *(
        "--num-epochs",
        str(EPOCHS),
        "--num-minibatches",
        str(MINIBATCHES),
        "--hidden-sizes",
        "64",
        "64",
    ),
]
LENGTH = [
    "--report-interval",
    str(NUM_ENVS * ROLLOUT),
    "--total-env-steps",
    str(12 * NUM_ENVS * ROLLOUT),
]
PARAMETERS = 2 * (64 * 64 + 64) + 2 * (4 * 64 + 64) + 64 * 2 + 2 + 64 + 1
"""Parameters of both networks, which an all-reduce sums in float32."""


def main() -> None:
    """Measures one device, then several, then two processes, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("scale.json"))
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="that the run on one device is profiled"
    )
    parser.add_argument("--all-reduce", metavar="FILE", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("join", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.all_reduce:
        args.all_reduce.write_text(json.dumps(all_reduce(args.join)), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        one = profiled(pathlib.Path(folder), args.seconds)
        rows = [
            measured(pathlib.Path(folder), *split)
            for split in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4))
        ]
    steps, updates = NUM_ENVS * ROLLOUT, EPOCHS * MINIBATCHES
    for row in rows:
        row["predicted"] = steps / (sum(one.values()) + updates * row["all_reduce"])
    found = {"stages": one, "rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """Returns the measurements as Markdown."""
    one = found["stages"]
    whole = sum(one.values())
    divided = sum(one.get(stage, 0.0) for stage in DIVIDED)
    text = [
        f"On one device an iteration took {1e3 * whole:.0f} ms. Devices divide {divided / whole:.0%} of it.",
        "",
        "| processes x devices | all-reduce | predicted env steps/s | measured | measured / predicted |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        exchange, rates = (
            f"{1e6 * row['all_reduce']:,.0f} us",
            f"{row['predicted']:,.0f} | {row['rate']:,.0f}",
        )
        ratio = row["rate"] / row["predicted"]
        text.append(
            f"| {row['processes']} x {row['devices']} | {exchange} | {rates} | {ratio:.2f} |"
        )
    return "\n".join(text)


def profiled(folder: pathlib.Path, seconds: float) -> dict[str, float]:
    """Returns the seconds of an iteration on one device, by stage."""
    file = folder / "profile.json"
    say("-m", "jaxrl_dist.cli", "profile", *FLAGS, "--seconds", seconds, "--json", file)
    stages: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))["threads"]["device"]
    return stages


def measured(folder: pathlib.Path, processes: int, devices: int) -> dict[str, Any]:
    """Returns the rate of a run, and the seconds of an all-reduce,
    over processes with ``devices`` devices each.
    """
    found: dict[str, Any] = {"processes": processes, "devices": devices}
    jobs = {
        "rate": [ROOT / "benchmarks" / "ours.py", *FLAGS, *LENGTH],
        "all_reduce": [__file__, "--all-reduce", folder / "all-reduce.json"],
    }
    for name, command in jobs.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        joins = (
            [(f"127.0.0.1:{port}", processes, number) for number in range(processes)]
            if processes > 1
            else [()]
        )
        words = ("--coordinator", "--processes", "--process") if name == "rate" else ("", "", "")
        running = [
            start(
                devices,
                *command,
                *[
                    x
                    for word, value in zip(words, join, strict=False)
                    for x in (word, value)
                    if x != ""
                ],
            )
            for join in joins
        ]
        said = [process.communicate()[0] for process in running]
        if any(process.returncode for process in running):
            sys.exit(f"{name} over {processes} x {devices} has failed")
        found[name] = (
            json.loads(said[0].splitlines()[-1])["rate"]
            if name == "rate"
            else json.loads((folder / "all-reduce.json").read_text(encoding="utf-8"))
        )
    return found


def all_reduce(join: list[str], rounds: int = 20, times: int = 100) -> float:
    """Returns the least seconds of a sum of the parameters over all devices of all processes."""
    import jax
    import jax.numpy as jnp

    if join:
        jax.distributed.initialize(join[0], int(join[1]), int(join[2]))
    if jax.device_count() == 1:
        return 0.0
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    spec = jax.sharding.PartitionSpec("data")

    def sums(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.psum(x, "data") * 0.5, None

        return jax.lax.scan(step, x, None, length=times)[0]

    program = jax.jit(
        jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    x = jax.device_put(
        jnp.ones((jax.device_count(), PARAMETERS)), jax.sharding.NamedSharding(mesh, spec)
    )
    program(x).block_until_ready()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        program(x).block_until_ready()
        taken.append((time.perf_counter() - began) / times)
    return min(taken)


def start(devices: int, *command: Any) -> subprocess.Popen[str]:
    """Starts Python with this many CPU devices."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
    }
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=env, stdout=subprocess.PIPE, text=True
    )


def say(*command: Any) -> None:
    """Runs Python with one device; ends this program if it fails."""
    process = start(1, *command)
    process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} has failed")


if __name__ == "__main__":
    main()
