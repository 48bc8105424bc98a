"""``jaxrl-dist doctor``: whether this machine can train, on what, and what is missing.

All that is imported or computed runs in processes of its own, side by side: a library that crashes or hangs is a line
of the answer, not the end of it.
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

from jaxrl_dist import flags
from jaxrl_dist.checks import counted
from jaxrl_dist.commands import machine
from jaxrl_dist.config import BACKENDS
from jaxrl_dist.machine import container_limit

SECONDS = 120.0
"""In which a probe must answer; on an idle machine they take two or three."""
LITTLE_DISK = 10**9
"""Bytes free under which there is a note: a checkpoint holds a replay memory of up to 2 GB."""
PACKAGE = "jaxrl-dist"
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "gymnax", "envpool", "gymnasium")
"""Shown in any case; the rest is read from what the package says it requires."""


class Answer(NamedTuple):
    """What there is, and what follows from it."""

    facts: list[tuple[str, str]]
    """Names and values, in the order in which they are to be shown."""
    problems: list[str]
    """Each is a reason why nothing can be trained."""
    notes: list[str]
    """What is missing and need not be there."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Says whether this machine can train, on which devices, with which libraries, and what is missing."""


def run(args: Sequence[str]) -> int:
    """``doctor``; the exit code is 1 if nothing can be trained here."""
    flags.check_flags(args, ())
    flags.run_tyro(Doctor, args, prog="jaxrl-dist doctor")
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
    """Looks at this machine; takes seconds and raises nothing."""
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
    """The packages that each extra asks for, those that are always needed under ``""``."""
    found: dict[str, list[str]] = {"": list(LIBRARIES)}
    try:
        stated = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # run from its source tree
        stated = []
    for requirement in stated:
        if match := re.match(r"([\w.-]+)(?:\[(\w+)\])?.*?(?:extra == ['\"](\w+)['\"])?$", requirement):
            name, part, extra = match.groups()
            found.setdefault(extra or "", []).append(machine.PLUGINS.get(part, name))
    return found


def _software(answer: Answer) -> None:
    needed = requirements()
    answer.facts.append(("python", f"{platform.python_version()} ({sys.executable})"))
    answer.facts.append((PACKAGE, machine.version(PACKAGE) or "not installed: run from its source tree"))
    missing = []
    for package in dict.fromkeys(needed.pop("")):
        found = machine.version(package)
        answer.facts.append((package, found or "missing"))
        missing += [] if found else [package]
    if missing:
        answer.problems.append(
            f"{', '.join(missing)} {'are' if missing[1:] else 'is'} missing: {machine.install(*missing)}"
        )
    for extra, packages in needed.items():
        lacking = [package for package in packages if machine.version(package) is None]
        answer.facts.append((f"extra {extra}", f"without {', '.join(lacking)}" if lacking else "installed"))


# --- The machine --------------------------------------------------------------------------------------


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def _host(answer: Answer) -> None:
    features = re.search(r"^flags\s*:(.*)$", machine.read("proc/cpuinfo"), re.MULTILINE)
    known = features[1].split() if features else []
    vectors = [name for name in ("avx", "avx2", "fma", "avx512f") if name in known]
    cores = len(os.sched_getaffinity(0))
    shown = f"{counted(cores, 'core')} of {os.cpu_count()}, {platform.machine()} {' '.join(vectors)}".rstrip()
    answer.facts.append(("CPU", shown))
    if features and "avx" not in known:
        answer.problems.append("this CPU has no AVX instructions, which jaxlib from PyPI is compiled for")
    sizes = {
        name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", machine.read("proc/meminfo"), re.M)
    }
    limit = container_limit(machine.ROOT)
    if "MemTotal" in sizes:
        text = f"{_gigabytes(sizes['MemTotal'])}, {_gigabytes(sizes.get('MemAvailable', 0))} available"
        if limit is not None and limit < sizes["MemTotal"]:
            text += f"; this container's limit is {_gigabytes(limit)}"
        answer.facts.append(("memory", text))
    try:
        free, where = shutil.disk_usage(".").free, os.getcwd()
    except OSError as error:
        answer.problems.append(f"the current directory cannot be read: {error.strerror}")
        return
    answer.facts.append(("disk", f"{_gigabytes(free)} free in {where}"))
    if free < LITTLE_DISK:
        answer.notes.append(f"{where} has {_gigabytes(free)} free, which is little for runs; --run-dir names another")
    if not os.access(".", os.W_OK):
        answer.notes.append(f"{where} cannot be written, and runs go there; --run-dir names another")


# --- JAX and the environments -------------------------------------------------------------------------


def _devices(answer: Answer, found: dict[str, Any]) -> None:
    platforms = set()
    for device in found.get("devices", []):
        memory = f", {_gigabytes(device['memory'])}" if device["memory"] else ""
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
        ("an NVIDIA GPU", machine.nvidia, machine.without_gpu, {"gpu", "cuda"}),
        ("a TPU", machine.tpu, machine.without_tpu, {"tpu"}),
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
    told = " ".join(answer.problems)  # where JAX does not work, no backend that needs it does
    lines = [f"{name} cannot be imported: {error}" for name, error in broken.items() if error not in told]
    (answer.problems if len(broken) == len(found) else answer.notes).extend(lines)


def probe(name: str) -> dict[str, Any]:
    """What ``PROBES[name]`` says in a process of its own.

    Returns:
      Its answer, with the last line on its stderr as ``said``; only an ``error`` of one line where there is none.
    """
    command = [sys.executable, "-P", "-m", "jaxrl_dist.commands.doctor", name]
    paths = os.pathsep.join(path or "." for path in sys.path)
    # A GPU's memory may be in use by a run, and is not to be reserved for a look at it.
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
    """Each local device of JAX: what it is, its memory in bytes, and the error of a tiny jitted computation."""
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
            memory, error = None, machine.line_of(problem)
        about = {"platform": device.platform, "number": device.id, "kind": device.device_kind}
        found.append({**about, "memory": memory, "error": error})
    return {"devices": found}


def look_at_backend(name: str) -> dict[str, Any]:
    """Imports what the environments of a backend need, and counts those."""
    return {"ids": len(importlib.import_module(f"jaxrl_dist.envs.{name}").ids())}


def main() -> None:
    """``python -m jaxrl_dist.commands.doctor PROBE``: prints the answer as a line of JSON."""
    name = sys.argv[1]
    try:
        found = look_at_devices() if name == "devices" else look_at_backend(name)
    except BaseException as error:
        found = {"error": machine.no_devices() or machine.line_of(error)}
    print(f"\n{json.dumps(found)}", flush=True)
    os._exit(0)  # some libraries crash while Python shuts down, which says nothing about training


if __name__ == "__main__":
    main()
