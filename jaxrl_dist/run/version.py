"""The version of this package.

The build reads this file before anything is installed: it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import pathlib
import subprocess

RELEASE = "0.1.0"
"""The newest release, or the one that is being made."""


@functools.cache
def version() -> str:
    """Returns the version with the commit, such as ``0.1.0+g5155a6c9``; a release has no commit.

    A checkout knows its commit, with ``.dirty`` if files have changed since. An installation has
    the version of its build, and a source tree without git the release's.
    """
    root = pathlib.Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        git = ["git", "--no-optional-locks", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
        described = [
            "describe",
            "--tags",
            f"--match=v{RELEASE}",
            "--always",
            "--dirty",
            "--abbrev=8",
        ]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [*git, *described], capture_output=True, check=True, text=True, timeout=10
            )
            commit = done.stdout.strip().rpartition("-g")[2].replace("-", ".")
            if commit == f"v{RELEASE}":
                return RELEASE
            return f"{RELEASE}+g{commit}"
    try:
        return importlib.metadata.version("jaxrl-dist")
    except importlib.metadata.PackageNotFoundError:
        return RELEASE
