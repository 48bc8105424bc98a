"""The memory through which a worker's environments get actions and return their outcomes.

This module never imports JAX, because worker processes import it.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_dist.spaces import Space, leaves

Records = Mapping[str, np.ndarray]
"""The memory shared by caller and worker, one row per environment of the vector.

The caller writes ``action`` and ``reset``. The worker writes the outcome of the step and ``since``
(when it started on this environment, by ``time.monotonic``, a clock that all processes share). Each
part of an observation or action has a column named after it, such as ``obs/camera``.
"""

Field = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a column; JSON makes lists of it."""


def record_fields(
    observation: Space, action: Space, metrics: Sequence[str] = (), agents: Sequence[str] = ()
) -> list[Field]:
    """Returns the fields of an environment's record, whose spaces are as policies see them.

    Each of several ``agents`` has metrics.
    """
    parts = leaves({"obs": observation, "action": action}).items()
    per_agent = (len(agents),) if agents else ()
    return [
        *((path, part.dtype.str, tuple(part.shape)) for path, part in parts),
        ("since", "f8", ()),
        ("reward", "f4", ()),
        *((flag, "?", ()) for flag in ("reset", "terminated", "truncated")),
        *((f"info/{metric}", "f4", per_agent) for metric in metrics),
    ]


def record_dtype(fields: Sequence[Field]) -> np.dtype:
    """Returns the numpy dtype of ``record_fields``."""
    return np.dtype([(name, dtype, tuple(shape)) for name, dtype, shape in fields], align=True)


def open_records(descriptor: int, fields: Sequence[Field]) -> Records:
    """Maps the records in a memory file; they keep it open."""
    records = np.frombuffer(mmap.mmap(descriptor, 0), record_dtype(fields))
    return {name: records[name] for name, *_ in fields}
