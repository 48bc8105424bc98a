"""``jaxrl-dist doctor``: checks whether this machine can train, on which devices, and what is missing.

Imports and computations run in separate processes, side by side: a library that crashes or hangs costs one line of the
report, not the report.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.filesize import decimal

from jaxrl_dist.checks import counted
from jaxrl_dist.commands import accelerators, compile_for, flags
from jaxrl_dist.config.train import BACKENDS
from jaxrl_dist.errors import one_line
from jaxrl_dist.run.machine import container_limit

SECONDS = 120.0
"""Time limit of a probe; an idle machine needs two or three seconds."""
LITTLE_DISK = 10**9
"""Free bytes below which a note is printed: a checkpoint holds a replay memory of up to 2 GB."""
PACKAGE = "jaxrl-dist"
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "gymnax", "envpool", "gymnasium")
"""Always shown; the other libraries come from the package's metadata."""


class Answer(NamedTuple):
    """The report on this machine."""

    facts: list[tuple[str, str]]
    """Names and values, in the order of display."""
    problems: list[str]
    """Reasons why this machine cannot train."""
    notes: list[str]
    """Missing parts that training can do without."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Checks whether this machine can train, on which devices, with which libraries, and what is missing.

    doctor --compile-for TARGET ALGO --env ID [FLAGS] [--json] compiles the run that train would start, for accelerators
    that this machine may lack, such as h200, h200x8 or v5e:2x4. It prints the memory per device, and the kernels that
    each loop starts.
    """


def run(args: Sequence[str]) -> int:
    """Runs ``doctor``; returns 1 if this machine cannot train."""
    if any(arg.split("=", 1)[0] == compile_for.FLAG for arg in args):
        return compile_for.run(args)
    flags.parse(Doctor, args, "jaxrl-dist doctor")
    answer = examine()
    width = max(len(name) for name, _ in answer.facts)
    for name, value in answer.facts:
        print(f"{name:{width}}  {value}")
    for note in answer.notes:
        print(f"note: {note}")
    for problem in answer.problems:
        print(f"problem: {problem}")
    if answer.problems:
        return 1
    print("this machine can train")
    return 0


def examine() -> Answer:
    """Examines this machine; takes seconds and raises nothing."""
    answer = Answer([], [], [])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        probes = {name: pool.submit(probe, name) for name in ("devices", *BACKENDS)}
        _software(answer)
        _host(answer)
        _devices(answer, probes["devices"].result())
        _backends(answer, {name: probes[name].result() for name in BACKENDS})
    return answer


# --- What is installed --------------------------------------------------------------------------------


def requirements() -> dict[str, list[str]]:
    """Returns the packages that each extra requires, and under ``""`` those that are always required."""
    found: dict[str, list[str]] = {"": list(LIBRARIES)}
    try:
        stated = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # run from its source tree
        stated = []
    for requirement in stated:
        if match := re.match(r"([\w.-]+)(?:\[(\w+)\])?.*?(?:extra == ['\"](\w+)['\"])?$", requirement):
            name, part, extra = match.groups()
            found.setdefault(extra or "", []).append(accelerators.PLUGINS.get(part, name))
    return found


def _software(answer: Answer) -> None:
    needed = requirements()
    answer.facts.append(("python", f"{platform.python_version()} ({sys.executable})"))
    answer.facts.append((PACKAGE, accelerators.version(PACKAGE) or "not installed: run from its source tree"))
    missing = []
    for package in dict.fromkeys(needed.pop("")):
        found = accelerators.version(package)
        answer.facts.append((package, found or "missing"))
        missing += [] if found else [package]
    if missing:
        answer.problems.append(
            f"{', '.join(missing)} {'are' if missing[1:] else 'is'} missing: {accelerators.install(*missing)}"
        )
    for extra, packages in needed.items():
        lacking = [package for package in packages if accelerators.version(package) is None]
        answer.facts.append((f"extra {extra}", f"without {', '.join(lacking)}" if lacking else "installed"))


# --- The machine --------------------------------------------------------------------------------------


def _host(answer: Answer) -> None:
    features = re.search(r"^flags\s*:(.*)$", accelerators.read("proc/cpuinfo"), re.MULTILINE)
    known = features[1].split() if features else []
    vectors = [name for name in ("avx", "avx2", "fma", "avx512f") if name in known]
    cores = len(os.sched_getaffinity(0))
    shown = f"{counted(cores, 'core')} of {os.cpu_count()}, {platform.machine()} {' '.join(vectors)}".rstrip()
    answer.facts.append(("CPU", shown))
    if features and "avx" not in known:
        answer.problems.append("this CPU has no AVX instructions, which jaxlib from PyPI is compiled for")
    sizes = {
        name: int(size) * 1024
        for name, size in re.findall(r"^(\w+):\s+(\d+) kB", accelerators.read("proc/meminfo"), re.M)
    }
    limit = container_limit(accelerators.ROOT)
    if "MemTotal" in sizes:
        text = f"{decimal(sizes['MemTotal'])}, {decimal(sizes.get('MemAvailable', 0))} available"
        if limit is not None and limit < sizes["MemTotal"]:
            text += f"; this container's limit is {decimal(limit)}"
        answer.facts.append(("memory", text))
    try:
        free, where = shutil.disk_usage(".").free, os.getcwd()
    except OSError as error:
        answer.problems.append(f"the current directory cannot be read: {error.strerror}")
        return
    answer.facts.append(("disk", f"{decimal(free)} free in {where}"))
    if free < LITTLE_DISK:
        answer.notes.append(f"{where} has {decimal(free)} free, which is little for runs; --run-dir names another")
    if not os.access(".", os.W_OK):
        answer.notes.append(f"{where} cannot be written, and runs go there; --run-dir names another")


# --- JAX and the environments -------------------------------------------------------------------------


def _devices(answer: Answer, found: dict[str, Any]) -> None:
    platforms = set()
    for device in found.get("devices", []):
        memory = f", {decimal(device['memory'])}" if device["memory"] else ""
        broken = device["error"]
        name = f"{device['platform']} {device['number']}"
        answer.facts.append((name, f"{device['kind']}{memory}, {'fails' if broken else 'computes'}"))
        platforms.add(device["platform"])
        if broken:
            answer.problems.append(f"{name} cannot run a jitted computation: {broken}")
    if "error" in found:
        answer.problems.append(f"JAX does not work: {found['error']}")
    chosen, said = os.environ.get("JAX_PLATFORMS"), found.get("said", "")
    for name, is_there, why, same in (
        ("an NVIDIA GPU", accelerators.nvidia, accelerators.without_gpu, {"gpu", "cuda"}),
        ("a TPU", accelerators.tpu, accelerators.without_tpu, {"tpu"}),
    ):
        if not platforms & same and is_there():
            hidden = chosen and not set(chosen.split(",")) & same
            reason = f"JAX_PLATFORMS={chosen} hides it" if hidden else why(said)
            answer.notes.append(f"there is {name}, and JAX does not use it: {reason}")


def _backends(answer: Answer, found: dict[str, dict[str, Any]]) -> None:
    broken = {name: result["error"] for name, result in found.items() if "error" in result}
    for name, result in found.items():
        shown = "cannot be imported" if name in broken else f"imported, {counted(result['ids'], 'environment')}"
        answer.facts.append((f"backend {name}", shown))
    told = " ".join(answer.problems)  # a JAX that does not work breaks backends too: report the error once
    lines = [f"{name} cannot be imported: {error}" for name, error in broken.items() if error not in told]
    (answer.problems if len(broken) == len(found) else answer.notes).extend(lines)


def probe(name: str) -> dict[str, Any]:
    """Runs ``main`` for ``name``, which is ``devices`` or a backend, in a separate process.

    Returns:
      The answer of ``main``, with the last line of stderr as ``said``; without an answer, only a one-line ``error``.
    """
    command = [sys.executable, "-P", "-m", "jaxrl_dist.commands.doctor", name]
    paths = os.pathsep.join(path or "." for path in sys.path)
    # A run may be using the GPU's memory, so the probe must not reserve it.
    env = {**os.environ, "PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {SECONDS:g} s"}
    except OSError as error:
        return {"error": f"{sys.executable} cannot be started: {error.strerror}"}
    said = (done.stderr.strip().splitlines() or [""])[-1][:300]
    if done.returncode < 0:
        return {"error": f"it ends Python: {signal.strsignal(-done.returncode)}"}
    try:
        return {"said": said, **json.loads(done.stdout.splitlines()[-1])}
    except (LookupError, ValueError, TypeError):
        return {"error": said or f"exit code {done.returncode}"}


def look_at_devices() -> dict[str, Any]:
    """Returns JAX's local devices: kind, memory in bytes, and the error of a tiny jitted computation, if any."""
    import jax
    import numpy as np

    found = []
    for device in jax.local_devices():
        error = None
        try:
            memory = (device.memory_stats() or {}).get("bytes_limit")
            x = jax.device_put(np.ones((8, 8), np.float32), device)
            if float(jax.jit(lambda x: (x @ x).sum())(x)) != 512:
                error = "its sums are wrong"
        except Exception as problem:
            memory, error = None, one_line(problem)
        about = {"platform": device.platform, "number": device.id, "kind": device.device_kind}
        found.append({**about, "memory": memory, "error": error})
    return {"devices": found}


def look_at_backend(name: str) -> dict[str, Any]:
    """Imports a backend and counts its environments."""
    return {
        "ids": len(importlib.import_module(f"jaxrl_dist.envs.{'device' if name == 'gymnax' else 'host'}.{name}").ids())
    }


def main() -> None:
    """Runs ``python -m jaxrl_dist.commands.doctor PROBE``: prints the answer as one line of JSON."""
    name = sys.argv[1]
    try:
        found = look_at_devices() if name == "devices" else look_at_backend(name)
    except BaseException as error:
        found = {"error": accelerators.no_devices() or one_line(error)}
    print(f"\n{json.dumps(found)}", flush=True)
    os._exit(0)  # some libraries crash while Python shuts down, which does not affect training


if __name__ == "__main__":
    main()
