"""This machine: its files, its packages, its accelerators, and why JAX does not use them."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import sys

PLUGINS = {"cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin", "tpu": "libtpu"}
"""What the extras of JAX's own name bring."""
ROOT = pathlib.Path("/")
"""Where ``dev``, ``proc`` and ``sys`` are looked for."""
GOOGLE, TPUS = "0x1ae0", {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c"}
"""PCI vendor and devices of TPUs, as in ``jax/_src/hardware_utils.py``."""
CUDA12_DRIVER, CUDA13_DRIVER = 525, 580
"""The oldest drivers that they run with (https://docs.jax.dev/en/latest/installation.html)."""


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install(*packages: str) -> str:
    """The command that installs packages into this Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def read(path: str) -> str:
    """A text file below ``ROOT``; empty where it cannot be read."""
    try:
        return (ROOT / path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def nvidia() -> bool:
    """Whether the machine has an NVIDIA GPU."""
    return any((ROOT / "dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def tpu() -> bool:
    """Whether the machine has a TPU."""
    devices = (ROOT / "sys/bus/pci/devices").glob("*")
    places = [f"sys/bus/pci/devices/{device.name}" for device in devices]
    return any(
        read(f"{place}/vendor").strip() == GOOGLE and read(f"{place}/device").strip() in TPUS for place in places
    )


def driver() -> int | None:
    """The major version of the NVIDIA driver, where it says."""
    match = re.search(r"^NVRM version:.*?\s(\d+)\.\d+", read("proc/driver/nvidia/version"), re.MULTILINE)
    return int(match[1]) if match else None


def without_gpu(said: str = "") -> str:
    """Why JAX does not use the NVIDIA GPU, and what helps; ``said`` is what it has printed."""
    number = driver()
    if number is not None and number < CUDA12_DRIVER:
        return f"its driver {number} is older than {CUDA12_DRIVER}, which CUDA 12 needs"
    if version(PLUGINS["cuda12"]) or version(PLUGINS["cuda13"]):
        return f"JAX's CUDA plugin is installed, and does not start{said and f': {said}'}"
    return install_plugin("cuda13" if number is not None and number >= CUDA13_DRIVER else "cuda12")


def without_tpu(said: str = "") -> str:
    """The same of the TPU."""
    if version(PLUGINS["tpu"]):
        return f"libtpu is installed, so another process may hold it{said and f': {said}'}"
    return install_plugin("tpu")


def install_plugin(extra: str) -> str:
    """How to install what an extra of JAX's brings, for the JAX that is there."""
    installed = version("jax")
    return f"install its plugin by: {install(f'jax[{extra}]' + (f'=={installed}' if installed else ''))}"


def no_devices() -> str | None:
    """Why JAX has no device at all, not even the CPU, and what helps, in one line; None where it has one."""
    try:
        import jax

        jax.local_devices()
    except Exception as error:
        chosen, count = (os.environ.get(name, "") for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"))
        platforms = set(chosen.split(","))
        if platforms & {"cuda", "gpu"}:
            why = f"{'' if nvidia() else 'no NVIDIA GPU is seen here; '}{without_gpu(line_of(error))}"
        elif "tpu" in platforms:
            why = f"{'' if tpu() else 'no TPU is seen here; '}{without_tpu(line_of(error))}"
        elif count and not (count.isdecimal() and int(count) > 0):
            return f"JAX_NUM_CPU_DEVICES={count} leaves JAX without a device; 1 or more works"
        else:
            why = line_of(error)
        if chosen:
            return f"JAX_PLATFORMS={chosen}, and JAX has no such device: {why}; unset it to use what there is"
        return f"JAX has no device: {why}"
    return None


def line_of(error: BaseException) -> str:
    """An exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
