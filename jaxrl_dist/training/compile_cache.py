"""Compiled programs that later runs find on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import platform
import time
from typing import Any

import jax

MAX_AGE_DAYS = 30
"""A program that no run has read for so long is deleted."""
MIN_COMPILE_SECONDS = 0.1
"""Programs that compile faster are not kept: reading them takes about as long."""
_SMALLEST = "jax_persistent_cache_min_compile_time_secs"


def keep_programs() -> None:
    """Makes JAX keep compiled programs in the user's directory or else in ``cache_dir()``,
    unless the user disabled it.

    A directory that cannot be written is not an error: programs are then compiled each time.
    """
    config: Any = jax.config  # the types of jax.config lack these options
    if not config.jax_enable_compilation_cache:
        return
    # JAX's default, not the user's choice
    if _SMALLEST.upper() not in os.environ and getattr(config, _SMALLEST) == 1:
        jax.config.update(_SMALLEST, MIN_COMPILE_SECONDS)
    if config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return
    if not os.access(folder, os.W_OK):
        return
    _delete_old(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # XLA's own caches would make the directory's name a part of each key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def cache_dir() -> pathlib.Path:
    """Returns the directory of compiled programs:
    ``$XDG_CACHE_HOME/jaxrl_dist/`` and a name for this JAX and CPU.

    A home directory may be shared by machines. XLA compiles for the features of the CPU that it
    runs on, which JAX's own key lacks, so each kind of CPU has a directory.

    Raises:
      RuntimeError: there is no home directory.
    """
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    features = hashlib.sha256(_cpu().encode()).hexdigest()[:12]
    return home / "jaxrl_dist" / f"jax-{jax.__version__}-{platform.machine()}-{features}"


def _cpu() -> str:
    """Returns model and features of the CPU, as Linux reports them."""
    with contextlib.suppress(OSError):
        first = (
            pathlib.Path("/proc/cpuinfo")
            .read_text(encoding="utf-8", errors="replace")
            .split("\n\n")[0]
        )
        names = (
            "vendor_id",
            "model",
            "model name",
            "flags",
            "Features",
            "CPU implementer",
            "CPU part",
        )
        return "\n".join(line for line in first.splitlines() if line.split(":")[0].strip() in names)
    return platform.processor()


def _delete_old(folder: pathlib.Path) -> None:
    limit = time.time() - MAX_AGE_DAYS * 86400
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another run deletes it, too
            state = path.stat()
            if max(state.st_atime, state.st_mtime) < limit:
                path.unlink(missing_ok=True)
