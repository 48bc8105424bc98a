"""Compares the speed of a peer: same algorithm, network, environments, batch, epochs and machine.

    python benchmarks/peers.py rejax --env CartPole-v1 --steps 1000000 --rounds 5
    python benchmarks/peers.py rejax --env CartPole-v1 --steps 100000 --seeds 64
    python benchmarks/peers.py sample-factory --algorithm impala --env Pong-v5 --seconds 30 --rounds 3

rejax is the fastest peer that installs; it compiles PPO and environments into one program. Sample Factory acts and
learns at the same time, as the plan ``asynchronous`` does: its APPO, with one epoch of one minibatch, is compared
with our IMPALA or APPO on EnvPool's Atari. It runs once with its usual processes, and once in one process, where torch
uses all cores: on two idle cores, this was its fastest setting. Two workers were faster than one, and double buffering
or waiting for each update was slower. All sides use the CPU: all its cores, or those of ``taskset -c 0,1 ...``.

Creates a virtual environment for the peer in .bench, then runs the sides in turn, each in a separate process, so that
machine drift slows all equally. Prints env steps per second, without start, compilation and evaluation. With Sample
Factory, also prints how many cores each side used: fewer than the machine has if other programs use it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys

PEERS = pathlib.Path(__file__).resolve().parent / "peers"
REQUIREMENTS = {
    "rejax": ["rejax==0.1.3", "gymnax<1"],
    # Python 3.11 gets torch's CPU build if pip is configured for it; any other build runs on the CPU too.
    "sample-factory": ["sample-factory==2.1.1", "torch==2.13.0", "envpool==1.2.5", "setuptools<81"],
}
WARM_UP = 10.0
"""Untimed seconds after the first update, when comparing with Sample Factory."""


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = parser.add_subparsers(dest="peer", required=True)
    rejax = peers.add_parser("rejax")
    rejax.add_argument("--env", default="CartPole-v1")
    rejax.add_argument("--steps", type=int, default=1_000_000, help="env steps of each seed")
    rejax.add_argument("--seeds", type=int, default=1, help="that one program trains")
    rejax.add_argument("--rounds", type=int, default=5)
    rejax.add_argument("--python", default=sys.executable, help="interpreter of the peer's virtual environment")
    factory = peers.add_parser("sample-factory")
    factory.add_argument("--algorithm", choices=["impala", "appo"], default="impala", help="ours")
    factory.add_argument("--env", default="Pong-v5")
    factory.add_argument("--num-envs", type=int, default=32)
    factory.add_argument("--rollout-length", type=int, default=20)
    factory.add_argument("--num-actors", type=int, default=2, help="ours")
    factory.add_argument("--seconds", type=float, default=30, help="that are timed, of each side in a round")
    factory.add_argument("--rounds", type=int, default=3)
    factory.add_argument("--python", default="python3.11", help="interpreter of the peer's virtual environment")
    args = parser.parse_args()
    if args.peer == "sample-factory" and args.num_envs % 2:
        parser.error(f"--num-envs {args.num_envs} is not divided by Sample Factory's two workers")

    folder = PEERS.parent.parent / ".bench" / args.peer
    if not (folder / "installed").exists():
        subprocess.run([args.python, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *REQUIREMENTS[args.peer]], check=True)
        (folder / "installed").touch()
    python = folder / "bin" / "python"
    if args.peer == "rejax":
        sides = {
            "jaxrl_dist": [sys.executable, PEERS / "ours_ppo.py", args.env, args.steps, args.seeds],
            "rejax": [python, PEERS / "rejax_ppo.py", args.env, args.steps, args.seeds],
        }
    else:
        task = [args.env, args.num_envs, args.rollout_length, WARM_UP, args.seconds]
        theirs = [python, PEERS / "sample_factory_appo.py", *task]
        sides = {
            "jaxrl_dist": [sys.executable, PEERS / "ours_atari.py", args.algorithm, args.num_actors, *task],
            "sample-factory": [*theirs, "--num_workers=2", f"--env_agents={args.num_envs // 2}"],
            "the same, serial": [*theirs, "--serial_mode=True", "--num_workers=1", f"--env_agents={args.num_envs}"],
        }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, command in sides.items():
            rate, more = run([str(part) for part in command])
            rates[name].append(rate)
            what = f"after {more:.1f} s of compiling" if args.peer == "rejax" else f"on {more:.2f} cores"
            print(f"{name:16} {rate:12,.0f} env steps/s {what}", flush=True)
    for name, values in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(rates["jaxrl_dist"], values, strict=True)]
        ratio = f"ours / this, pair by pair: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:16} median {statistics.median(values):12,.0f} env steps/s", "" if name == "jaxrl_dist" else ratio)


def run(command: list[str]) -> list[float]:
    """Runs a side and returns the numbers of the last line that it prints."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return [float(number) for number in done.stdout.splitlines()[-1].split()]


if __name__ == "__main__":
    main()
