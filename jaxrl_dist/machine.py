"""What this machine has."""

from __future__ import annotations

import contextlib
import os
import pathlib

ROOT = pathlib.Path("/")
"""Where ``proc`` and ``sys`` are looked for."""


def memory_size() -> int:
    """Bytes of memory that this process may use at most: the machine's, or its container's where that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # what is free now, the page cache hides
    limit = container_limit(ROOT)
    return physical if limit is None else min(physical, limit)


def container_limit(root: pathlib.Path) -> int | None:
    """The smallest memory limit, in bytes, of the control groups that this process is in; None: there is none.

    A group's limit holds for the groups inside it. The file's name depends on the version of control groups: see
    ``memory.max`` and ``memory.limit_in_bytes`` in the Linux kernel's documentation.
    """
    top = root / "sys/fs/cgroup"
    groups = ""
    with contextlib.suppress(OSError, ValueError):
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8")
    limits = []
    for base, name, controller in ((top, "memory.max", ""), (top / "memory", "memory.limit_in_bytes", "memory")):
        folders = {base}  # a container may see its own group there, and its path not at all
        for _, controllers, path in (line.split(":", 2) for line in groups.splitlines() if line.count(":") > 1):
            if controller in controllers.split(","):
                group = base / path.lstrip("/")
                folders |= {folder for folder in (group, *group.parents) if folder.is_relative_to(base)}
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):  # "max" stands for no limit
                limits.append(int((folder / name).read_text(encoding="ascii")))
    return min(limits, default=None)
