"""Libraries that are slow to import, each imported on first use:
``--help`` and a rejected flag need none of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Module(types.ModuleType):
    """Stands for a module of its name, which is imported on first use."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # used already while it waits
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)

    def __reduce__(self) -> tuple[type[Module], tuple[str]]:
        """Travels by its name, with a user's file that is sent to actors in other processes."""
        return Module, (self.__name__,)


@contextlib.contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Delays imports: the modules ``names`` that a library
    imports while the block runs are loaded on first use.
    """
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


def in_32_bits(function: Callable[P, T]) -> Callable[P, T]:
    """Makes JAX compute in 32 bits within a function,
    even if the program has enabled its 64-bit mode.

    A thread does not inherit the mode of the thread that starts it. A generator has the mode while
    it runs, and its caller does not.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    @functools.wraps(function)
    def generate(*args: P.args, **kwargs: P.kwargs) -> Any:
        items: Any = function(*args, **kwargs)
        following = in_32_bits(next)
        try:
            while (item := following(items, None)) is not None:
                yield item
        finally:
            in_32_bits(items.close)()

    if inspect.isgeneratorfunction(function):
        return generate
    return call


__all__ = [
    "Module",
    "in_32_bits",
    "jax",
    "jnp",
    "linalg",
    "np",
    "optax",
    "postponed",
    "sparse",
    "special",
]
