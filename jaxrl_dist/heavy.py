"""Libraries that are slow to import, each imported on first use: ``--help`` and a rejected flag need none of them."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any


class Module(types.ModuleType):
    """Stands for a module of its name, which is imported on first use."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # used already while it waits
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Delays imports: the modules ``names`` that a library imports while the block runs are loaded on first use."""
    waiting = {name: Module(name) for name in names if name not in sys.modules}
    sys.modules.update(waiting)
    try:
        yield
    finally:
        for name, module in waiting.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


if TYPE_CHECKING:
    import jax as jax
    import jax.numpy as jnp
    import numpy as np
    import optax as optax
    from scipy import sparse as sparse
    from scipy import special as special
    from scipy.sparse import linalg as linalg
else:
    jax, jnp, np, optax = map(Module, ("jax", "jax.numpy", "numpy", "optax"))
    sparse, special, linalg = map(Module, ("scipy.sparse", "scipy.special", "scipy.sparse.linalg"))

__all__ = ["Module", "jax", "jnp", "linalg", "np", "optax", "postponed", "sparse", "special"]
