"""Arrays in orbax's format, named by their path, such as ``state/variables/params/policy/Dense_0/kernel``."""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.run.directories import DamageError
from jaxrl_dist.run.machine import memory_size
from jaxrl_dist.types import PyTree


def named_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns the arrays of a tree that ``save`` takes: orbax refuses arrays without elements."""
    return {name: np.asarray(leaf) for name, leaf in _named(tree).items()}


def save(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes named arrays into a new directory; ``path`` is absolute.

    Raises:
      Exception: orbax and tensorstore raise many kinds on a full disk.
    """
    import orbax.checkpoint as ocp  # imported here: it takes half a second

    alone = _alone()
    handler = ocp.StandardCheckpointHandler(**alone)
    with _silence(), ocp.Checkpointer(handler, **alone) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(arrays))


def _alone() -> dict[str, Any]:
    """Returns orbax's options for a process that writes or reads by itself, beside the others of its run."""
    import orbax.checkpoint as ocp

    if peers.world() is None:
        return {}
    here = peers.index()
    options = ocp.options.MultiprocessingOptions(here, {here}, f"process{here}")
    return {"multiprocessing_options": options}


def restore(path: pathlib.Path, like: PyTree, prefix: str | None = None) -> Any:
    """Reads arrays into the structure of ``like`` (shapes and dtypes suffice).

    Args:
      prefix: name prefix of the arrays to read, ignoring all others; None: the directory holds no others.

    Raises:
      DamageError: the arrays cannot be read, or have other names, shapes or dtypes.
      ConfigError: this machine has too little memory for them.
    """
    import orbax.checkpoint as ocp

    path = path.resolve()
    wanted = {(prefix or "") + name: _shape(leaf) for name, leaf in _named(like).items()}
    needed = nbytes(like)
    if needed > (there := memory_size()):
        raise ConfigError(f"{path} needs {needed / 1e9:.1f} GB, and {there / 1e9:.1f} GB are there")
    try:
        alone = _alone()
        handler = ocp.PyTreeCheckpointHandler(**alone)
        with _silence(), ocp.Checkpointer(handler, **alone) as checkpointer:
            tree = checkpointer.metadata(path).item_metadata.tree
            found = {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in tree.items()}
            for name in sorted(wanted if prefix is not None else wanted.keys() | found.keys()):
                if wanted.get(name) != found.get(name):
                    raise DamageError(
                        f"{path.parent} holds another network: {name} is {_describe(found.get(name))} there and "
                        f"{_describe(wanted.get(name))} here"
                    )
            blank = {name: np.zeros(shape, dtype) for name, (shape, dtype) in wanted.items()}
            how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
            args = ocp.args.PyTreeRestore(blank, restore_args=how, partial_restore=prefix is not None)
            arrays = checkpointer.restore(path, args=args)
    except ConfigError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds for a damaged file
        raise DamageError(f"{path} cannot be read: {first_line(error)}") from error
    empty = {name: np.zeros(*_shape(leaf)) for name, leaf in _named(like, empty=True).items()}
    named = {**empty, **{name: np.asarray(arrays[(prefix or "") + name]) for name in _named(like)}}
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in names(like)])


def names(tree: PyTree) -> list[str]:
    """Returns the path of each array of a tree, such as ``params/policy/Dense_0/kernel``."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def _named(tree: PyTree, *, empty: bool = False) -> dict[str, Any]:
    """Returns a tree's arrays by path: those with elements or, if ``empty``, those without, which orbax refuses."""
    leaves = zip(names(tree), jax.tree.leaves(tree), strict=True)
    return {name: leaf for name, leaf in leaves if (0 in _shape(leaf)[0]) == empty}


def _shape(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    return tuple(np.shape(leaf)), np.dtype(leaf.dtype if hasattr(leaf, "dtype") else type(leaf))


def nbytes(tree: PyTree) -> int:
    """Returns the bytes of all arrays of a tree (shapes and dtypes suffice)."""
    shapes = map(_shape, jax.tree.leaves(tree))
    return sum(int(np.prod(shape, dtype=object)) * dtype.itemsize for shape, dtype in shapes)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps orbax from also logging the traceback of an error that it raises."""
    _ignore_late_writes()
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@functools.cache
def _ignore_late_writes() -> None:
    """Keeps the other writes of a save that failed from printing a traceback each.

    The first write that fails ends the save, and orbax closes its event loop. Tensorstore's threads then report to the
    closed loop, at any later time, so both filters stay.
    """
    hook = sys.unraisablehook

    def unraisable(event: sys.UnraisableHookArgs) -> None:
        if event.object is not None or str(event.exc_value) != "Event loop is closed":
            hook(event)

    sys.unraisablehook = unraisable
    logging.getLogger("asyncio").addFilter(lambda record: "in OCDBT database" not in record.getMessage())


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _describe(entry: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "missing" if entry is None else f"{entry[1]}{list(entry[0])}"
