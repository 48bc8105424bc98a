"""PPO side by side with rejax, the fastest peer that installs: same network, environments, batch, epochs, machine.

    python benchmarks/peers.py --env CartPole-v1 --steps 1000000 --rounds 5

Makes a virtual environment for rejax in .bench (it needs gymnax < 1), then runs the two in turn, each in a process of
its own, so that a drifting machine slows both alike. Prints env steps per second, without compilation and evaluation.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys
import venv

HERE = pathlib.Path(__file__).resolve().parent
VENV = HERE.parent / ".bench" / "rejax"


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
        subprocess.run([VENV / "bin" / "pip", "install", "-q", "rejax==0.1.3", "gymnax<1"], check=True)
    sides = {
        "jaxrl_dist": [sys.executable, HERE / "peers" / "ours_ppo.py"],
        "rejax": [VENV / "bin" / "python", HERE / "peers" / "rejax_ppo.py"],
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, command in sides.items():
            command = [*map(str, command), args.env, str(args.steps)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rates[name].append(float(done.stdout.split()[-1]))
            print(f"{name:12} {rates[name][-1]:12,.0f} env steps/s", flush=True)
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    for name, values in rates.items():
        print(f"{name:12} median {statistics.median(values):12,.0f} env steps/s")
    print(f"ratio, pair by pair: median {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
