"""Modules that are imported on first use, so that ``--help``, which reads algorithm files, needs no JAX.

An algorithm file imports them from here by their usual names, so that all its imports are at the top.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # used already while it waits
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Delays imports: the modules ``names`` that a library imports while the block runs are loaded on first use."""
    waiting = {name: _Module(name) for name in names if name not in sys.modules}
    sys.modules.update(waiting)
    try:
        yield
    finally:
        for name, module in waiting.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxrl_dist import mesh, packing, returns, rng, spaces
    from jaxrl_dist.nn import cores, distributions, networks, observations, perturbation, torsos
else:
    jax, jnp, np, optax = map(_Module, ("jax", "jax.numpy", "numpy", "optax"))
    mesh, packing, returns, rng, spaces = (
        _Module(f"jaxrl_dist.{name}") for name in ("mesh", "packing", "returns", "rng", "spaces")
    )
    cores, distributions, networks, observations, perturbation, torsos = (
        _Module(f"jaxrl_dist.nn.{name}")
        for name in ("cores", "distributions", "networks", "observations", "perturbation", "torsos")
    )

__all__ = ["jax", "jnp", "np", "optax", "postponed"]
__all__ += ["mesh", "packing", "returns", "rng", "spaces"]
__all__ += ["cores", "distributions", "networks", "observations", "perturbation", "torsos"]
