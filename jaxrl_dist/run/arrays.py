"""Arrays in orbax's format, named by their path, such as ``state/variables/params/policy/Dense_0/kernel``."""

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

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.arrays import Pieces
from jaxrl_dist.run.directories import DamageError
from jaxrl_dist.run.machine import memory_size
from jaxrl_dist.types import PyTree


def named_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns the arrays of a tree that ``save`` takes: orbax refuses arrays without elements.

    Pieces of an array are named by their bounds, such as ``state/memory/obs@0:4,8:16``.
    """
    found = {}
    for name, leaf in _named(tree).items():
        if isinstance(leaf, Pieces):
            for bounds, piece in leaf.kept.items():
                found[f"{name}@{','.join(f'{start}:{stop}' for start, stop in bounds)}"] = piece
        else:
            found[name] = np.asarray(leaf)
    return found


def named_pieces(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns those arrays of ``named_arrays`` that no other process has."""
    return {name: piece for name, piece in named_arrays(tree).items() if _PIECE.fullmatch(name)}


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


def save_pieces(path: pathlib.Path, pieces: dict[str, np.ndarray]) -> None:
    """Writes named arrays of a process other than 0 into a new directory, with the library on which orbax is built.

    Orbax itself takes numpy arrays for equal in all processes, and writes those of process 0 only.
    """
    import tensorstore

    with tensorstore.Transaction() as transaction:
        for name, piece in pieces.items():
            spec = _store(path, name)
            new = tensorstore.open(spec, create=True, dtype=piece.dtype, shape=piece.shape, transaction=transaction)
            new.result().write(piece).result()


def _store(path: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns tensorstore's specification of an array in a directory of ``save_pieces``."""
    return {"driver": "zarr", "kvstore": {**_store_of(path), "path": f"{name}/"}}


def _store_of(path: pathlib.Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}


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
      path: a directory that ``save`` has written. Those of ``save_pieces`` are beside it, with names such as
        ``arrays.1``.
      prefix: name prefix of the arrays to read, ignoring all others; None: the directory holds no others.

    Raises:
      DamageError: the arrays cannot be read, or have other names, shapes or dtypes.
      ConfigError: this machine has too little memory for them.
    """
    wanted = {(prefix or "") + name: _shape(leaf) for name, leaf in _named(like).items()}
    needed = nbytes(like)
    if needed > (there := memory_size()):
        raise ConfigError(f"{path} needs {needed / 1e9:.1f} GB, and {there / 1e9:.1f} GB are there")
    try:
        arrays = _arrays(path.resolve(), wanted, others=prefix is not None)
    except ConfigError:
        raise
    except Exception as error:  # tensorstore raises many kinds for a damaged file
        raise DamageError(f"{path} cannot be read: {first_line(error)}") from error
    empty = {name: np.zeros(*_shape(leaf)) for name, leaf in _named(like, empty=True).items()}
    named = {**empty, **{name: arrays[(prefix or "") + name] for name in _named(like)}}
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in names(like)])


_PIECE = re.compile(r"(.*)@([0-9]+:[0-9]+(?:,[0-9]+:[0-9]+)*)")
_Shape = tuple[tuple[int, ...], np.dtype]


class _Entry(NamedTuple):
    """An array in a directory of ``save`` or ``save_pieces``, or a piece of one."""

    name: str
    """The array's."""
    bounds: tuple[slice, ...] | None
    """Those of the piece in the array; None: this is all of it."""
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: Mapping[str, Any]
    """Tensorstore's specification, with all that the header says: tensorstore reads no header by itself."""


def _arrays(path: pathlib.Path, wanted: Mapping[str, _Shape], *, others: bool) -> dict[str, np.ndarray]:
    """Reads arrays by name, each from one entry or from its pieces; ``others``: ignores all others.

    Raises:
      DamageError: as ``restore``.
      Exception: tensorstore raises many kinds for a damaged file.
    """
    import tensorstore

    entries = [entry for part in (path, *path.parent.glob(f"{path.name}.*")) for entry in _entries(part)]
    stored = _whole(entries)
    for name in sorted(wanted if others else wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise DamageError(
                f"{path.parent} holds another network: {name} is {_describe(stored.get(name))} there and "
                f"{_describe(wanted.get(name))} here"
            )
    arrays: dict[str, np.ndarray] = {}
    for entry in entries:
        if entry.name in wanted:
            value = tensorstore.open(entry.spec, open=True).result().read().result()
            if entry.bounds is None:
                arrays[entry.name] = value
            else:
                arrays.setdefault(entry.name, np.empty(*wanted[entry.name]))[entry.bounds] = value
    return arrays


def _entries(path: pathlib.Path) -> Iterator[_Entry]:
    """Yields the arrays in a directory of ``save`` or ``save_pieces``.

    Raises:
      DamageError: a header asks for memory that its array does not explain: tensorstore would end the process.
    """
    import tensorstore

    files = tensorstore.KvStore.open(_store_of(path)).result()
    for file in files.list().result():
        entry, _, kind = file.decode().rpartition("/")
        if kind != ".zarray":
            continue
        header = json.loads(files[file])
        shape, dtype, chunk = tuple(header["shape"]), header["dtype"], math.prod(header["chunks"])
        if not isinstance(dtype, str) or chunk > max(math.prod(shape), 1):
            raise DamageError(f"{path} is damaged: {entry} has chunks of {chunk} elements of type {dtype!r:.40}")
        spec = {**_store(path, entry), "metadata": header, "assume_metadata": True}
        yield _Entry(*_split(entry), shape, np.dtype(dtype), spec)


def _split(entry: str) -> tuple[str, tuple[slice, ...] | None]:
    """Returns the name of an array, and the bounds of the piece that the entry holds; None: it holds all of it."""
    if (piece := _PIECE.fullmatch(entry)) is None:
        return entry, None
    return piece[1], tuple(slice(*map(int, pair.split(":"))) for pair in piece[2].split(","))


def _whole(entries: Iterable[_Entry]) -> dict[str, _Shape]:
    """Returns the shape and dtype of each array, of which no piece may be missing.

    Raises:
      DamageError: one is.
    """
    whole: dict[str, _Shape] = {}
    sizes = collections.Counter[str]()
    for entry in entries:
        stops = entry.shape if entry.bounds is None else tuple(bound.stop for bound in entry.bounds)
        before = whole[entry.name][0] if entry.name in whole else stops
        whole[entry.name] = tuple(map(max, before, stops)), entry.dtype
        sizes[entry.name] += math.prod(entry.shape)
    for name, (shape, _) in whole.items():
        if sizes[name] != math.prod(shape):
            raise DamageError(f"the pieces of {name} have {sizes[name]} of its {math.prod(shape)} elements")
    return whole


def names(tree: PyTree) -> list[str]:
    """Returns the path of each array of a tree, such as ``params/policy/Dense_0/kernel``; empty keys are left out."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    return ["/".join(filter(None, name.split("/"))) for name in names]


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
    """Returns the first line of an error's message, as far as 300 characters, or the error's type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def _describe(entry: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "missing" if entry is None else f"{entry[1]}{list(entry[0])}"
