"""Arrays in orbax's format, named by their path, such as
``state/variables/params/policy/Dense_0/kernel``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import logging
import math
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_dist.errors import ConfigError, first_line
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.arrays import Pieces
from jaxrl_dist.run.directories import DamageError
from jaxrl_dist.run.machine import memory_size
from jaxrl_dist.types import PyTree


def named_arrays(tree: PyTree, *, pieces: bool = False) -> dict[str, np.ndarray]:
    """Returns the arrays of a tree that ``save`` takes: orbax refuses arrays without elements.

    Pieces of an array are named by their bounds, such as ``state/memory/obs@0:4,8:16``.

    Args:
      pieces: whether to return only pieces, which no other process has.
    """
    arrays = {}
    for name, leaf in zip(names(tree), jax.tree.leaves(tree), strict=True):
        if isinstance(leaf, Pieces):
            for bounds, piece in leaf.by_bounds.items():
                arrays[f"{name}@{','.join(f'{start}:{stop}' for start, stop in bounds)}"] = piece
        elif not pieces:
            arrays[name] = np.asarray(leaf)
    return {name: array for name, array in arrays.items() if array.size}


def save(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes named arrays into a new directory; ``path`` is absolute.

    Raises:
      Exception: orbax and tensorstore raise many kinds on a full disk.
    """
    import orbax.checkpoint as ocp  # imported here: it takes half a second

    alone: dict[str, Any] = {}
    if peers.world() is not None:  # this process writes alone, independently of the others
        number = peers.index()
        alone["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
            number, {number}, f"process{number}"
        )
    handler = ocp.StandardCheckpointHandler(**alone)
    with _silence(), ocp.Checkpointer(handler, **alone) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(arrays))


def save_pieces(path: pathlib.Path, pieces: dict[str, np.ndarray]) -> None:
    """Writes named arrays of a process other than 0 into a new directory,
    with the library on which orbax is built.

    Orbax assumes that numpy arrays are equal in all processes, and writes only process 0's.
    """
    import tensorstore

    with tensorstore.Transaction() as transaction:
        for name, piece in pieces.items():
            spec = {"driver": "zarr", "kvstore": _store(path, f"{name}/")}
            new = tensorstore.open(
                spec, create=True, dtype=piece.dtype, shape=piece.shape, transaction=transaction
            )
            new.result().write(piece).result()


def _store(path: pathlib.Path, inside: str = "") -> dict[str, Any]:
    """Returns tensorstore's specification of a directory of ``save`` or ``save_pieces``,
    or of a folder ``inside``.
    """
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, "path": inside}


def restore(path: pathlib.Path, like: PyTree, prefix: str | None = None) -> PyTree:
    """Reads arrays into the structure of ``like`` (shapes and dtypes suffice).

    Args:
      path: a directory that ``save`` has written. Directories of ``save_pieces`` are next to it,
        with names such as ``arrays.1``.
      prefix: name prefix of the arrays to read, ignoring all others; None:
        the directory holds no others.

    Raises:
      DamageError: the arrays cannot be read, or have other names, shapes or dtypes.
      ConfigError: this machine has too little memory for them.
    """
    leaves, tree = jax.tree.flatten(like)
    shapes = {
        (prefix or "") + name: _shape(leaf) for name, leaf in zip(names(like), leaves, strict=True)
    }
    if (size := nbytes(like)) > (room := memory_size()):
        raise ConfigError(
            f"{path} needs {size / 1e9:.1f} GB, and {room / 1e9:.1f} GB are available"
        )
    try:
        arrays = _arrays(path.resolve(), shapes, others=prefix is not None)
    except ConfigError:
        raise
    except Exception as error:  # tensorstore raises many kinds for a damaged file
        raise DamageError(f"{path} cannot be read: {first_line(error)}") from error
    return jax.tree.unflatten(tree, [arrays[name] for name in shapes])


_PIECE = re.compile(r"(.*)@([0-9]+:[0-9]+(?:,[0-9]+:[0-9]+)*)")
_Shape = tuple[tuple[int, ...], np.dtype]
"""Of an array, and its dtype."""


class _Entry(NamedTuple):
    """An array in a directory of ``save`` or ``save_pieces``, or a piece of one."""

    name: str
    """The array's."""
    bounds: tuple[slice, ...]
    """Where it begins and ends in the array."""
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: Mapping[str, Any]
    """Tensorstore's specification, with all that the header says:
    tensorstore reads no header by itself."""


def _arrays(
    path: pathlib.Path, wanted: Mapping[str, _Shape], *, others: bool
) -> dict[str, np.ndarray]:
    """Reads arrays by name, each from one entry or from its pieces;
    those without elements are not stored.

    Args:
      others: whether to ignore all other arrays there.

    Raises:
      DamageError: as ``restore``.
      Exception: tensorstore raises many kinds for a damaged file.
    """
    import tensorstore

    entries = [
        entry for part in (path, *path.parent.glob(f"{path.name}.*")) for entry in _entries(part)
    ]
    stored = _whole(entries)
    arrays = {name: np.zeros(*shape) for name, shape in wanted.items() if 0 in shape[0]}
    for name in sorted((wanted if others else wanted.keys() | stored.keys()) - arrays.keys()):
        if wanted.get(name) != stored.get(name):
            there = _describe(stored.get(name))
            here = _describe(wanted.get(name))
            if name.startswith("stats/"):
                raise DamageError(
                    f"{path.parent} holds other running statistics: {name} is {there} there, but "
                    f"{here} here; normalise observations and scale rewards in both runs or in "
                    "neither"
                )
            raise DamageError(
                f"{path.parent} holds another network: {name} is {there} there, but {here} here"
            )
    for entry in entries:
        if entry.name in wanted:
            value = tensorstore.open(entry.spec, open=True).result().read().result()
            if entry.shape == wanted[entry.name][0]:
                arrays[entry.name] = value
            else:
                arrays.setdefault(entry.name, np.empty(*wanted[entry.name]))[entry.bounds] = value
    return arrays


def _entries(path: pathlib.Path) -> Iterator[_Entry]:
    """Yields the arrays in a directory of ``save`` or ``save_pieces``.

    Raises:
      DamageError: a header asks for memory that its array does not explain:
        tensorstore would end the process.
    """
    import tensorstore

    files = tensorstore.KvStore.open(_store(path)).result()
    for file in files.list().result():
        entry, _, kind = file.decode().rpartition("/")
        if kind != ".zarray":
            continue
        header = json.loads(files[file])
        shape = tuple(header["shape"])
        dtype = header["dtype"]
        chunk = math.prod(header["chunks"])
        if not isinstance(dtype, str) or chunk > max(math.prod(shape), 1):
            raise DamageError(
                f"{path} is damaged: {entry} has chunks of {chunk} elements of type {dtype!r:.40}"
            )
        name = entry
        bounds = tuple(slice(0, size) for size in shape)
        if (piece := _PIECE.fullmatch(entry)) is not None:
            name = piece[1]
            bounds = tuple(slice(*map(int, pair.split(":"))) for pair in piece[2].split(","))
        spec = {
            "driver": "zarr",
            "kvstore": _store(path, f"{entry}/"),
            "metadata": header,
            "assume_metadata": True,
        }
        yield _Entry(name, bounds, shape, np.dtype(dtype), spec)


def _whole(entries: Iterable[_Entry]) -> dict[str, _Shape]:
    """Returns the shape and dtype of each array.

    Raises:
      DamageError: a piece of an array is missing.
    """
    whole: dict[str, _Shape] = {}
    sizes = collections.Counter[str]()
    for entry in entries:
        stops = tuple(bound.stop for bound in entry.bounds)
        before, _ = whole.get(entry.name, (stops, entry.dtype))
        whole[entry.name] = tuple(map(max, before, stops)), entry.dtype
        sizes[entry.name] += math.prod(entry.shape)
    for name, (shape, _) in whole.items():
        if sizes[name] != math.prod(shape):
            raise DamageError(
                f"the pieces of {name} have {sizes[name]} of its {math.prod(shape)} elements"
            )
    return whole


def names(tree: PyTree) -> list[str]:
    """Returns the path of each array of a tree, such as ``params/policy/Dense_0/kernel``;
    empty keys are left out.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    return ["/".join(filter(None, name.split("/"))) for name in names]


def _shape(leaf: PyTree) -> _Shape:
    return tuple(np.shape(leaf)), np.dtype(leaf.dtype if hasattr(leaf, "dtype") else type(leaf))


def nbytes(tree: PyTree) -> int:
    """Returns the bytes of all arrays of a tree (shapes and dtypes suffice)."""
    shapes = map(_shape, jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps orbax from also logging the traceback of an error that it raises."""
    _ignore_late_writes()
    logger = logging.getLogger("absl")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@functools.cache
def _ignore_late_writes() -> None:
    """Keeps the other writes of a save that failed from printing a traceback each.

    The first write that fails ends the save, and orbax closes its event loop. Tensorstore's threads
    then report to the closed loop, at any later time, so both filters stay.
    """
    hook = sys.unraisablehook

    def unraisable(event: sys.UnraisableHookArgs) -> None:
        if event.object is not None or str(event.exc_value) != "Event loop is closed":
            hook(event)

    sys.unraisablehook = unraisable
    logging.getLogger("asyncio").addFilter(
        lambda record: "in OCDBT database" not in record.getMessage()
    )


def _describe(stored: _Shape | None) -> str:
    if stored is None:
        return "missing"
    shape, dtype = stored
    return f"{dtype}{list(shape)}"
