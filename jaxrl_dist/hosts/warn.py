"""Warnings of this package in one line each."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from jaxrl_dist.errors import ConfigWarning, EnvWarning, FileWarning, visible
from jaxrl_dist.hosts import peers


@contextlib.contextmanager
def one_line_warnings(quiet: bool = False) -> Iterator[None]:
    """Shows this package's warnings in one line each, as it shows errors;
    other warnings stay as they are.

    Each process warns of its environments, process 0 also of other things. ``quiet``:
    only of what has failed.
    """
    process = "" if peers.first() else f"process {peers.index()}: "
    with warnings.catch_warnings():
        show = warnings.showwarning

        def one_line(
            message: Warning | str, category: type[Warning], *where: Any, **options: Any
        ) -> None:
            if not issubclass(category, ConfigWarning | EnvWarning | FileWarning):
                show(message, category, *where, **options)
                return
            hidden = quiet and issubclass(category, ConfigWarning)
            if not issubclass(category, EnvWarning) and (hidden or not peers.first()):
                return
            text = message.with_flags if isinstance(message, ConfigWarning) else message
            print(visible(f"jaxrl-dist: warning: {process}{text}", 2_000), file=sys.stderr)

        for kind in (ConfigWarning, EnvWarning, FileWarning):
            warnings.simplefilter("always", kind)
        warnings.showwarning = one_line
        yield
