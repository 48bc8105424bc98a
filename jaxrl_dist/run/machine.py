"""The memory of this machine, and the versions of what is installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform

from jaxrl_dist.run import version

ROOT = pathlib.Path("/")
"""Directory that holds ``proc`` and ``sys``."""


def memory_size() -> int:
    """Returns the bytes of memory that this process may use: the machine's,
    or its container's limit if lower.
    """
    # the page cache hides how much is free
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = container_limit(ROOT)
    if limit is None:
        return physical
    return min(physical, limit)


def container_limit(root: pathlib.Path) -> int | None:
    """Returns the smallest memory limit, in bytes, of the control groups of this process; None:
    no limit.

    A group's limit also applies to the groups inside it. The file's name depends on the version of
    control groups: see ``memory.max`` and ``memory.limit_in_bytes`` in the Linux kernel's
    documentation.
    """
    top = root / "sys/fs/cgroup"
    groups = ""
    with contextlib.suppress(OSError, ValueError):
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8")
    limits = []
    for base, name, controller in (
        (top, "memory.max", ""),
        (top / "memory", "memory.limit_in_bytes", "memory"),
    ):
        folders = {base}  # a container may see its own group here, but not the group's path
        for _, controllers, path in (
            line.split(":", 2) for line in groups.splitlines() if line.count(":") > 1
        ):
            if controller in controllers.split(","):
                group = base / path.lstrip("/")
                folders |= {
                    folder for folder in (group, *group.parents) if folder.is_relative_to(base)
                }
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):  # "max" stands for no limit
                limits.append(int((folder / name).read_text(encoding="ascii")))
    return min(limits, default=None)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run's numbers depend on."""
    packages = ("jax", "jaxlib", "flax", "optax", "gymnax", "envpool", "numpy")
    versions = {"python": platform.python_version(), "jaxrl-dist": version.version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
