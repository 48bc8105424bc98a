"""The formats of data sets besides our own directories, by how the names of data sets begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_dist.data import farama
from jaxrl_dist.run.storage import Json
from jaxrl_dist.spaces import Interface
from jaxrl_dist.types import PyTree


class Format(NamedTuple):
    """How data sets of a format are read and written; a name comes without its prefix."""

    title: str
    read: Callable[[str], dict[str, Any]]
    """``(name) -> arguments`` of ``Dataset.from_episodes``."""
    write: Callable[[str, Sequence[Mapping[str, PyTree]], Interface, Mapping[str, Json]], object]
    """``(name, episodes, interface, about)``; the episodes are as policies see them."""


FORMATS = {"minari:": Format("Minari", farama.read, farama.write)}


def prefix_of(name: str) -> str | None:
    """Returns the prefix of a name that is of one of the ``FORMATS``; None: it is a directory."""
    return next((prefix for prefix in FORMATS if name.startswith(prefix)), None)
