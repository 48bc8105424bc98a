#!/usr/bin/env python
"""Compiles every algorithm for GPUs and TPUs that need not be here,
and stores what their programs start.

    python scripts/accelerators.py                       # all of them, an hour on two cores
    python scripts/accelerators.py --only ppo --target h200

Needs the packages ``jax-cuda12-plugin``, ``jax-cuda12-pjrt``, ``nvidia-cuda-nvcc-cu12`` and
``libtpu``. The counts are those of XLA's sequence of thunks, which its runtime for GPUs executes
one by one: each is a kernel, a copy, a loop, a branch, or a command buffer, which holds others and
is one launch (a CUDA graph). docs/accelerators.json has the counts, docs/accelerators.md shows
them, and ``tests/test_accelerators.py`` compares new ones with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
COUNTS = ROOT / "docs" / "accelerators.json"
GPUS = {"h200": "One H200", "h200x8": "Eight H200"}
TPUS = {"v5e:2x4": "v5e, 8 chips", "v5e:16x16": "v5e, 256 chips", "v4:4x4x8": "v4, 128 chips"}
"""The targets, and their headings; XLA has no sequence of thunks for TPUs,
so of those only the memory is kept."""
FLAGS = {"default": "", "captured": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"}
"""``XLA_FLAGS``: by default, no loop or branch lies in a command buffer."""
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
SCOPES = "iteration|env_step|epoch|update"
"""Names of ``jax.named_scope`` around the loops of a run."""
COLLECTIVES = ("kAllReduce", "kAllGather", "kAllToAll", "kReduceScatter", "kCollectivePermute")


@dataclasses.dataclass
class Thunk:
    """What XLA's runtime executes as one."""

    indent: int
    kind: str
    number: int
    parts: dict[str, list[Thunk]] = dataclasses.field(default_factory=dict)
    """The thunks inside: those of ``condition`` and ``body`` of a loop, of each branch,
    or of the only part, ``""``."""


def parse(text: str) -> Thunk:
    """Returns the whole program as a thunk, from the text of its sequence of thunks."""
    path = [Thunk(-1, "kSequential", 0)]
    for line in text.splitlines():
        label = re.fullmatch(r"( *)(\w+):\s*", line)
        thunk = re.match(r"( *)(\d+): (k\w+)", line)
        if not (match := label or thunk):
            continue
        # which XLA does not indent
        while path[-1].indent >= len(match[1]) and match[2] != "condition":
            path.pop()
        parts = path[-1].parts
        if thunk:
            path.append(Thunk(len(thunk[1]), thunk[3], int(thunk[2])))
            parts.setdefault(next(reversed(parts), ""), []).append(path[-1])
        else:
            parts[match[2]] = []
    return path[0]


def loops(metadata: str, hlo: str) -> dict[int, tuple[str, int | None]]:
    """Returns the scope of each loop and its number of passes, None if only the run knows it,
    by the loop's thunk.
    """
    lines = dict(re.findall(r"%([\w.-]+) = .* while\((.*)", hlo))
    thunks = re.findall(
        r'annotation: "([^"]+)"\s+thunk_id: (\d+)\s+}\s+thunk_kind: "kWhile"', metadata
    )
    scopes = {
        name: re.search(rf'op_name="[^"]*/({SCOPES})/while"', line) for name, line in lines.items()
    }
    times = {
        name: re.search(r'"known_trip_count":{"n":"(\d+)"', line) for name, line in lines.items()
    }
    return {
        int(thunk): (
            scope[1] if (scope := scopes[name]) else "",
            int(n[1]) if (n := times[name]) else None,
        )
        for name, thunk in thunks
    }


def count(
    thunk: Thunk,
    found: Mapping[int, tuple[str, int | None]],
    by_scope: dict[str, Any],
    captured: bool = False,
) -> Any:
    """Counts what a thunk does: its operations, and of the host
    its launches and its waits for a value of the device.

    Operations are kernels, copies and collectives. Of several branches, the larger counts, and a
    loop whose passes only the run knows, such as that of the iterations, counts once.

    Args:
      found: of ``loops``.
      by_scope: is given the counts of one pass of each loop with a scope.
      captured: whether the thunk lies in a command buffer.
    """
    within = functools.partial(
        count, found=found, by_scope=by_scope, captured=captured or thunk.kind == "kCommandBuffer"
    )
    parts = {
        label: sum(map(within, thunks), Counter[str]()) for label, thunks in thunk.parts.items()
    }
    waits = Counter(waits=int(not captured))
    if thunk.kind == "kWhile":
        scope, times = found[thunk.number]
        # The host counts the passes whose number it knows; a command buffer computes the condition.
        once = parts["body"] + (parts["condition"] if captured or times is None else Counter())
        once += waits if times is None else Counter()
        by_scope.setdefault(scope, once)
        return Counter({name: (times or 1) * number for name, number in once.items()})
    if thunk.kind == "kConditional":
        return max(parts.values(), key=lambda branch: branch["operations"]) + waits
    if thunk.kind == "kCommandBuffer":
        return parts[""] + Counter(launches=1)
    if parts or thunk.kind.endswith("Done"):
        return sum(parts.values(), Counter[str]())
    return Counter(
        operations=1, launches=int(not captured), collectives=int(thunk.kind in COLLECTIVES)
    )


def compiled(run: str, target: str, flags: str = "") -> tuple[int, dict[str, dict[str, int]]]:
    """Compiles a run for a target in a separate process, by ``jaxrl-dist doctor --compile-for``.

    Returns:
      The bytes of memory of a device, and for a GPU what an iteration,
      an env step and an update do, if XLA has kept
      their loops, and what a whole dispatch of one iteration does.

    Raises:
      RuntimeError: the command has failed.
    """
    command = [
        sys.executable,
        "-m",
        "jaxrl_dist.cli",
        "doctor",
        "--compile-for",
        target,
        *RUNS[run].split(),
        "--json",
    ]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        if target in GPUS:
            env["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_run {flags}"
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=1800
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} has ended with {done.returncode}: {done.stderr.strip()[-500:]}"
            )
        memory = sum(
            size for name, size in json.loads(done.stdout)["memory"].items() if name != "device"
        )
        if target not in GPUS:
            return memory, {}
        dumped = "thunk_sequence_after_thunk_passes", "thunk_metadata", "gpu_after_optimizations"
        (sequence, metadata, hlo) = (
            next(pathlib.Path(folder).glob(f"*{name}.txt")).read_text() for name in dumped
        )
    found: dict[str, Any] = {}
    found["dispatch"] = count(parse(sequence), loops(metadata, hlo), found)
    return memory, {
        name: dict(found[name])
        for name in ("dispatch", "iteration", "env_step", "update")
        if name in found
    }


def kept(run: str, target: str) -> dict[str, Any]:
    """Returns what is stored of a run for a target."""
    if target in TPUS:
        return {"memory": compiled(run, target)[0]}
    found = {name: compiled(run, target, flags) for name, flags in FLAGS.items()}
    return {"memory": found["default"][0], **{name: counts for name, (_, counts) in found.items()}}


def load() -> dict[str, Any]:
    """Returns the kept counts by run and target,
    and under ``versions`` those of the packages that compiled them.
    """
    if COUNTS.exists():
        return json.loads(COUNTS.read_text(encoding="utf-8"))
    return {}


def tables() -> str:
    """Returns Markdown tables of what is kept: one for each kind of GPU, one for all TPUs."""
    runs = load().get("runs", {})
    shown = []
    for target, title in GPUS.items():
        shown += [
            f"## {title}",
            "",
            "| run | env step | update | its all-reduces | iteration | waits | iteration, captured | waits | memory |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for run, targets in runs.items():
            if target in targets:
                counts = targets[target]["default"]
                captured = targets[target]["captured"]["iteration"]
                step, update, iteration = (
                    f"{counts[name]['operations']:,} in {counts[name].get('launches', 0):,}"
                    if name in counts
                    else "-"
                    for name in ("env_step", "update", "iteration")
                )
                if "update" in counts:
                    sums = counts["update"].get("collectives", 0)
                else:
                    sums = "-"
                whole = f"{captured['operations']:,} in {captured.get('launches', 0):,}"
                waits = [x.get("waits", 0) for x in (counts["iteration"], captured)]
                shown.append(
                    f"| `{RUNS[run]}` | {step} | {update} | {sums} | {iteration} | {waits[0]:,} | {whole} "
                    f"| {waits[1]:,} | {targets[target]['memory'] / 1e6:,.0f} MB |"
                )
        shown.append("")
    shown += [
        "## TPUs: memory of a device",
        "",
        f"| run | {' | '.join(TPUS.values())} |",
        "|---|---:|---:|---:|",
    ]
    for run, targets in runs.items():
        sizes = [f"{targets[x]['memory'] / 1e6:,.0f} MB" if x in targets else "-" for x in TPUS]
        shown.append(f"| `{RUNS[run]}` | {' | '.join(sizes)} |")
    return "\n".join(shown)


def main() -> None:
    """Runs the script."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", choices=RUNS, action="append", help="this run; may be given several times"
    )
    parser.add_argument(
        "--target", choices=[*GPUS, *TPUS], action="append", help="this target; likewise"
    )
    args = parser.parse_args()
    packages = "jax", "jax-cuda12-plugin", "libtpu"
    for target in args.target or [*GPUS, *TPUS]:
        for run in args.only or RUNS:
            found = kept(run, target)
            stored = load()
            installed = {x.metadata["Name"]: x.version for x in importlib.metadata.distributions()}
            stored["versions"] = stored.get("versions", {}) | {
                x: installed[x] for x in packages if x in installed
            }
            stored.setdefault("runs", {}).setdefault(run, {})[target] = found
            stored["runs"] = {name: stored["runs"][name] for name in RUNS if name in stored["runs"]}
            COUNTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
            print(run, target, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
