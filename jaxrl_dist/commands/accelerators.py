"""Examines this machine: its packages, its accelerators, and why JAX does not use them."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_dist.errors import one_line

PLUGINS = {"cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin", "tpu": "libtpu"}
"""JAX's extras, and the package that each one adds."""
ROOT = pathlib.Path("/")
"""Directory that holds ``dev``, ``proc`` and ``sys``."""
GOOGLE = "0x1ae0"
TPUS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c"}
"""PCI vendor and device ids of TPUs, as in ``jax/_src/hardware_utils.py``."""
CUDA12_DRIVER = 525
CUDA13_DRIVER = 580
"""The oldest NVIDIA drivers that support CUDA 12 and 13
(https://docs.jax.dev/en/latest/installation.html)."""


def version(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install(*packages: str) -> str:
    """Returns the command that installs packages into this Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def read(path: str) -> str:
    """Reads a text file below ``ROOT``; empty if it cannot be read."""
    try:
        return (ROOT / path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def nvidia() -> bool:
    """Returns True if the machine has an NVIDIA GPU."""
    return any((ROOT / "dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def tpu() -> bool:
    """Returns True if the machine has a TPU."""
    devices = (ROOT / "sys/bus/pci/devices").glob("*")
    ids = (
        (read(f"{device}/vendor").strip(), read(f"{device}/device").strip()) for device in devices
    )
    return any(vendor == GOOGLE and device in TPUS for vendor, device in ids)


def driver() -> int | None:
    """Returns the major version of the NVIDIA driver, or None if it is unknown."""
    match = re.search(
        r"^NVRM version:.*?\s(\d+)\.\d+", read("proc/driver/nvidia/version"), re.MULTILINE
    )
    return int(match[1]) if match else None


def without_gpu(said: str = "") -> str:
    """Explains why JAX does not use the NVIDIA GPU, and how to fix it;
    ``said`` is JAX's own message.
    """
    number = driver()
    if number is not None and number < CUDA12_DRIVER:
        return f"its driver {number} is older than {CUDA12_DRIVER}, which CUDA 12 needs"
    if version(PLUGINS["cuda12"]) or version(PLUGINS["cuda13"]):
        return "JAX's CUDA plugin is installed, but does not start" + _because(said)
    if number is not None and number >= CUDA13_DRIVER:
        return install_plugin("cuda13")
    return install_plugin("cuda12")


def without_tpu(said: str = "") -> str:
    """Explains why JAX does not use the TPU, and how to fix it; ``said`` is JAX's own message."""
    if version(PLUGINS["tpu"]):
        return "libtpu is installed, so another process may hold it" + _because(said)
    return install_plugin("tpu")


def _because(said: str) -> str:
    return f": {said}" if said else ""


def install_plugin(extra: str) -> str:
    """Explains how to install the plugin of a JAX extra for the installed JAX version."""
    package = f"jax[{extra}]"
    if installed := version("jax"):
        package += f"=={installed}"
    return f"install its plugin: {install(package)}"


class Accelerator(NamedTuple):
    """A kind of device besides CPUs."""

    name: str
    exists: Callable[[], bool]
    """Whether the machine has one."""
    unused: Callable[[str], str]
    """Explains why JAX does not use it, given JAX's own message."""
    platforms: set[str]
    """JAX's names for it."""


ACCELERATORS = (
    Accelerator("an NVIDIA GPU", nvidia, without_gpu, {"cuda", "gpu"}),
    Accelerator("a TPU", tpu, without_tpu, {"tpu"}),
)


def no_devices() -> str | None:
    """Explains in one line why JAX has no device, not even a CPU, and how to fix it;
    None if it has one.
    """
    try:
        import jax

        jax.local_devices()
        return None
    except Exception as error:
        why = one_line(error)
    chosen = os.environ.get("JAX_PLATFORMS", "")
    count = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    for accelerator in ACCELERATORS:
        if accelerator.platforms & set(chosen.split(",")):
            why = accelerator.unused(why)
            if not accelerator.exists():
                why = f"{accelerator.name} is not seen here; {why}"
            break
    else:
        if count and not re.fullmatch("0*[1-9][0-9]*", count):
            return f"JAX_NUM_CPU_DEVICES={count} leaves JAX without a device; set it to 1 or more"
    if chosen:
        return (
            f"JAX has no device for JAX_PLATFORMS={chosen}: {why}; unset it to use what is "
            "available"
        )
    return f"JAX has no device: {why}"
