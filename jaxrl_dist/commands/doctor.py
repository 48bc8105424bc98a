"""``jaxrl-dist doctor``: checks whether this machine can train, on which devices,
and what is missing.

Imports and computations run in separate processes, side by side: a library that crashes or hangs
costs one line of the report, not the report.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from jaxrl_dist.actors import cluster
from jaxrl_dist.checks import counted
from jaxrl_dist.commands import accelerators, compile_for, flags
from jaxrl_dist.config.envs import BACKENDS
from jaxrl_dist.errors import one_line, visible
from jaxrl_dist.heavy import jax, np
from jaxrl_dist.run import version
from jaxrl_dist.run.machine import container_limit

SECONDS = 120.0
"""Time limit of a probe; an idle machine needs two or three seconds."""
LITTLE_DISK = 10**9
"""Free bytes below which a note is printed: a checkpoint holds a replay memory of up to 2 GB."""
PACKAGE = "jaxrl-dist"
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "gymnax", "gymnasium")
"""Always shown; the other libraries come from the package's metadata."""
Answer = dict[str, Any]
"""What a probe says: ``devices`` or ``ids``, ``said`` on stderr, or an ``error``."""
Line = tuple[str, str]
"""A line of the report: a name, and what is known of it."""
RAY = "ray"
"""The probe of the Ray cluster."""
NOTE = "note"
"""Names a missing part that training can do without."""
PROBLEM = "problem"
"""Names a reason why this machine cannot train."""
_LAST = {NOTE: 1, PROBLEM: 2}


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Checks whether this machine can train, on which devices, with which libraries,
    and what is missing.

    doctor --compile-for TARGET ALGO --env ID [FLAGS] [--json] compiles the run that train would
    start, for accelerators that this machine may lack, such as h200, h200x8 or v5e:2x4. It prints
    the memory per device.
    """


def run(args: Sequence[str]) -> int:
    """Runs ``doctor``; returns 1 if this machine cannot train."""
    if any(arg.split("=", 1)[0] == compile_for.FLAG for arg in args):
        return compile_for.run(args)
    flags.parse(Doctor, args, "jaxrl-dist doctor")
    lines = sorted(examine(), key=lambda line: _LAST.get(line[0], 0))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(visible(f"{name}: {text}" if name in _LAST else f"{name:{width}}  {text}"))
    if PROBLEM in dict(lines):
        return 1
    print("this machine can train")
    return 0


def examine() -> list[Line]:
    """Examines this machine, and returns names and values; takes seconds and raises nothing."""
    backends = [name for name in BACKENDS if name != "envpool" or accelerators.version(name)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        probes = {name: pool.submit(probe, name) for name in ("devices", *backends)}
        asked = _asks_ray() and pool.submit(probe, RAY)
        lines = [*_software(), *_host(), *_disk(), *_devices(probes.pop("devices").result())]
        if asked:
            lines.append(_cluster(asked.result()))
        return [
            *lines,
            *_backends({name: answer.result() for name, answer in probes.items()}, lines),
        ]


# --- What is installed ----------------------------------------------------------------------------


def requirements() -> dict[str, list[str]]:
    """Returns the packages that each extra requires,
    and under ``""`` those that are always required.
    """
    packages: dict[str, list[str]] = {"": list(LIBRARIES)}
    try:
        stated = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # run from its source tree
        stated = []
    for requirement in stated:
        if match := re.match(
            r"([\w.-]+)(?:\[(\w+)\])?.*?(?:extra == ['\"](\w+)['\"])?$", requirement
        ):
            name, part, extra = match.groups()
            packages.setdefault(extra or "", []).append(accelerators.PLUGINS.get(part, name))
    return packages


def _software() -> Iterator[Line]:
    extras = requirements()
    missing = {extra: _missing(packages) for extra, packages in extras.items()}
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield PACKAGE, version.version()
    for package in dict.fromkeys(extras[""]):
        yield package, accelerators.version(package) or "missing"
    if packages := missing.pop(""):
        yield PROBLEM, f"{', '.join(packages)} must be installed: {accelerators.install(*packages)}"
    for extra, packages in missing.items():
        yield f"extra {extra}", f"without {', '.join(packages)}" if packages else "installed"
    if any(missing.values()):
        yield "extras", f"install one with pip install '{PACKAGE}[NAME]'"


def _missing(packages: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(packages) if accelerators.version(name) is None]


# --- The machine ----------------------------------------------------------------------------------


def _host() -> Iterator[Line]:
    features = re.search(r"^flags\s*:(.*)$", accelerators.read("proc/cpuinfo"), re.MULTILINE)
    supported = features[1].split() if features else []
    vectors = [name for name in ("avx", "avx2", "fma", "avx512f") if name in supported]
    cores = counted(len(os.sched_getaffinity(0)), "core")
    yield "CPU", f"{cores} of {os.cpu_count()}, {platform.machine()} {' '.join(vectors)}".rstrip()
    if features and "avx" not in supported:
        yield PROBLEM, "this CPU has no AVX instructions, which jaxlib from PyPI needs"
    lines = re.findall(r"^(\w+):\s+(\d+) kB", accelerators.read("proc/meminfo"), re.M)
    sizes = {name: int(size) * 1024 for name, size in lines}
    if total := sizes.get("MemTotal"):
        memory = f"{decimal(total)}, {decimal(sizes.get('MemAvailable', 0))} available"
        limit = container_limit(accelerators.ROOT)
        if limit is not None and limit < total:
            memory += f"; this container's limit is {decimal(limit)}"
        yield "memory", memory


def _disk() -> Iterator[Line]:
    try:
        free = shutil.disk_usage(".").free
        folder = os.getcwd()
    except OSError as error:
        yield PROBLEM, f"the current directory cannot be read: {error.strerror}"
        return
    yield "disk", f"{decimal(free)} free in {folder}"
    if free < LITTLE_DISK:
        yield (
            NOTE,
            f"{folder} has only {decimal(free)} free; name another directory with --run-dir",
        )
    if not os.access(".", os.W_OK):
        yield (
            NOTE,
            f"{folder}, where runs go, cannot be written; name another directory with --run-dir",
        )


# --- JAX and the environments ---------------------------------------------------------------------


def _devices(answer: Answer) -> Iterator[Line]:
    devices = answer.get("devices", [])
    for device in devices:
        name = f"{device['platform']} {device['number']}"
        about = device["kind"]
        if device["memory"]:
            about += f", {decimal(device['memory'])}"
        if device["error"]:
            yield name, f"{about}, fails"
            yield PROBLEM, f"{name} cannot run a jitted computation: {device['error']}"
        else:
            yield name, f"{about}, computes"
    if "error" in answer:
        yield PROBLEM, f"JAX does not work: {answer['error']}"
    yield from _unused({device["platform"] for device in devices}, answer.get("said", ""))


def _unused(used: set[str], said: str) -> Iterator[Line]:
    """Yields the accelerators that JAX does not use, and why."""
    chosen = os.environ.get("JAX_PLATFORMS")
    for name, exists, unused, platforms in accelerators.ACCELERATORS:
        if used & platforms or not exists():
            continue
        if chosen and not set(chosen.split(",")) & platforms:
            why = f"JAX_PLATFORMS={chosen} hides it"
        else:
            why = unused(said)
        yield NOTE, f"this machine has {name}, but JAX does not use it: {why}"


def _asks_ray() -> bool:
    """Returns whether there should be a Ray cluster."""
    return cluster.ADDRESS in os.environ and accelerators.version("ray") is not None


def _cluster(answer: Answer) -> Line:
    address = os.environ[cluster.ADDRESS]
    if "error" in answer:
        return NOTE, f"--actors-on ray does not work: {answer['error']}"
    return "Ray cluster", f"{address} answers, {answer['nodes']}"


def _backends(answers: Mapping[str, Answer], before: Sequence[Line]) -> Iterator[Line]:
    problems = " ".join(text for name, text in before if name == PROBLEM)
    broken = {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    for name, answer in answers.items():
        if name in broken:
            yield f"backend {name}", "cannot be imported"
        else:
            yield f"backend {name}", f"imported, {counted(answer['ids'], 'environment')}"
    kind = PROBLEM if len(broken) == len(answers) else NOTE
    for name, error in broken.items():
        # a JAX that does not work breaks backends too: report the error once
        if error not in problems:
            yield kind, f"{name} cannot be imported: {error}"


def probe(name: str) -> Answer:
    """Runs ``main`` for ``name``, which is ``devices``, a backend or ``RAY``, as a process.

    Returns:
      The answer of ``main``, with the last line of stderr as ``said``; without an answer,
      only a one-line ``error``.
    """
    command = [sys.executable, "-P", "-m", "jaxrl_dist.commands.doctor", name]
    paths = os.pathsep.join(path or "." for path in sys.path)
    # A run may be using the GPU's memory, so the probe must not reserve it.
    env = {**os.environ, "PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {SECONDS:g} s"}
    except OSError as error:
        return {"error": f"{sys.executable} cannot be started: {error.strerror}"}
    said = (done.stderr.strip().splitlines() or [""])[-1][:300]
    if done.returncode < 0:
        return {"error": f"it ended Python: {signal.strsignal(-done.returncode)}"}
    try:
        return {"said": said, **json.loads(done.stdout.splitlines()[-1])}
    except (LookupError, ValueError, TypeError):
        return {"error": said or f"exit code {done.returncode}"}


def look_at_devices() -> Answer:
    """Returns JAX's local devices: kind, memory in bytes,
    and the error of a tiny jitted computation, if any.
    """
    devices = []
    for device in jax.local_devices():
        memory: int | None = None
        error: str | None = None
        try:
            memory = (device.memory_stats() or {}).get("bytes_limit")
            x = jax.device_put(np.ones((8, 8), np.float32), device)
            if float(jax.jit(lambda x: (x @ x).sum())(x)) != 512:
                error = "its sums are wrong"
        except Exception as problem:
            error = one_line(problem)
        about = {"platform": device.platform, "number": device.id, "kind": device.device_kind}
        devices.append({**about, "memory": memory, "error": error})
    return {"devices": devices}


def look_at_backend(name: str) -> Answer:
    """Imports a backend and counts its environments."""
    folder = "device" if name == "gymnax" else "host"
    return {"ids": len(importlib.import_module(f"jaxrl_dist.envs.{folder}.{name}").ids())}


def look_at_ray() -> Answer:
    """Connects to the Ray cluster and counts its nodes."""
    cluster.start()
    return {"nodes": str(cluster.find_nodes())}


def main() -> None:
    """Runs ``python -m jaxrl_dist.commands.doctor PROBE``: prints the answer as one line of
    JSON.
    """
    name = sys.argv[1]
    try:
        if name == "devices":
            answer = look_at_devices()
        elif name == RAY:
            answer = look_at_ray()
        else:
            answer = look_at_backend(name)
    except BaseException as error:
        answer = {"error": accelerators.no_devices() or one_line(error)}
    print(f"\n{json.dumps(answer)}", flush=True)
    os._exit(0)  # some libraries crash while Python shuts down, which does not affect training


if __name__ == "__main__":
    main()
