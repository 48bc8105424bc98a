"""One run over the processes of a Ray cluster, one actor a process,
each on another node if there are enough:

    python scripts/launch/ray_run.py --processes 2 --gpus 1
    -- ppo --env CartPole-v1 --run-dir /mnt/shared/runs/1

Ray chooses the nodes and counts their CPUs and GPUs; JAX's distributed runtime joins the processes.
If one is lost, all end, and so does this command; the same command again goes on from the newest
checkpoint. The directory of the run must be one that all nodes see. Needs ``pip install ray``
beside this package, on each node. Without a cluster, Ray starts on this machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Process:
    """A process of the run. It starts another: a lost run ends its process at once,
    and Ray's is to tell of it.
    """

    def address(self) -> str:
        """Returns this node's address."""
        return str(ray.util.get_node_ip_address())

    def node(self) -> str:
        """Returns the node's number in the cluster."""
        return str(ray.get_runtime_context().get_node_id())

    def train(self, words: Sequence[str]) -> int:
        """Runs ``jaxrl-dist train``, and returns its exit code."""
        return subprocess.run([sys.executable, "-m", "jaxrl_dist.cli", "train", *words]).returncode


def run(
    words: Sequence[str],
    processes: int,
    cpus: float,
    gpus: float,
    port: int = 9876,
    strategy: str = "SPREAD",
) -> list[int]:
    """Trains, and returns the exit code of each process.

    Args:
      words: ``ALGO --env ID [FLAGS]``.
      cpus, gpus: of each process.
      port: one that is free on the node of process 0.
      strategy: Ray's for placing the processes; ``STRICT_SPREAD`` refuses two on one node.
    """
    group = placement_group([{"CPU": cpus, "GPU": gpus}] * processes, strategy=strategy)
    ray.get(group.ready(), timeout=60)
    process = ray.remote(Process)
    actors = [
        process.options(
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        ).remote()
        for number in range(processes)
    ]
    address = f"{ray.get(actors[0].address.remote())}:{port}"
    joined = ["--coordinator", address, "--processes", str(processes), "--resume-or-start"]
    print(
        f"{processes} processes on {len(set(ray.get([actor.node.remote() for actor in actors])))} nodes"
    )
    trained = [
        actor.train.remote([*words, *joined, "--process", str(n)]) for n, actor in enumerate(actors)
    ]
    return list(ray.get(trained))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="of each process")
    parser.add_argument("--gpus", type=float, default=0, help="of each process")
    parser.add_argument(
        "--port", type=int, default=9876, help="one that is free on the node of process 0"
    )
    parser.add_argument(
        "words", nargs="+", metavar="ALGO --env ID --run-dir DIR", help="as for jaxrl-dist train"
    )
    asked = parser.parse_args()
    ray.init(log_to_driver=True)
    sys.exit(max(run(asked.words, asked.processes, asked.cpus, asked.gpus, asked.port)))
