"""Arrays in orbax's format, named by their path, such as ``state/variables/params/policy/Dense_0/kernel``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    path = path.resolve()
    wanted = {(prefix or "") + name: _shape(leaf) for name, leaf in _named(like).items()}
    needed = nbytes(like)
    if needed > (there := memory_size()):
        raise ConfigError(f"{path} needs {needed / 1e9:.1f} GB, and {there / 1e9:.1f} GB are there")
    try:
        others = {other: _pieces(other) for other in path.parent.glob(f"{path.name}.*")}
        entries = _entries(path)
        found = _whole([entries, *others.values()])
        for name in sorted(wanted if prefix is not None else wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise DamageError(
                    f"{path.parent} holds another network: {name} is {_describe(found.get(name))} there and "
                    f"{_describe(wanted.get(name))} here"
                )
        arrays: dict[str, np.ndarray] = {}
        for part, held in ((path, entries), *others.items()):
            asked = {entry: shape for entry, shape in held.items() if _split(entry)[0] in wanted}
            read = _read if part == path else _read_pieces
            for entry, value in read(part, asked):
                name, bounds = _split(entry)
                if bounds is None:
                    arrays[name] = value
                else:
                    arrays.setdefault(name, np.empty(*found[name]))[tuple(slice(*pair) for pair in bounds)] = value
    except ConfigError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds for a damaged file
        raise DamageError(f"{path} cannot be read: {first_line(error)}") from error
    empty = {name: np.zeros(*_shape(leaf)) for name, leaf in _named(like, empty=True).items()}
    named = {**empty, **{name: arrays[(prefix or "") + name] for name in _named(like)}}
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in names(like)])


_PIECE = re.compile(r"(.*)@([0-9]+:[0-9]+(?:,[0-9]+:[0-9]+)*)")
_Shape = tuple[tuple[int, ...], np.dtype]


def _split(entry: str) -> tuple[str, list[tuple[int, int]] | None]:
    """Returns the name of an array, and the bounds of the piece that the entry holds; None: it holds all of it."""
    if (found := _PIECE.fullmatch(entry)) is None:
        return entry, None
    pairs = (pair.split(":") for pair in found[2].split(","))
    return found[1], [(int(start), int(stop)) for start, stop in pairs]


def _whole(parts: Sequence[Mapping[str, _Shape]]) -> dict[str, _Shape]:
    """Returns the shape and dtype of each array, given its pieces in all directories, of which none may be missing.

    Raises:
      DamageError: one is.
    """
    found: dict[str, _Shape] = {}
    sizes: dict[str, int] = {}
    for entry, (shape, dtype) in itertools.chain.from_iterable(part.items() for part in parts):
        name, bounds = _split(entry)
        before = found[name][0] if name in found else (0,) * len(shape)
        stops = shape if bounds is None else tuple(stop for _, stop in bounds)
        found[name] = tuple(map(max, before, stops)), dtype
        sizes[name] = sizes.get(name, 0) + math.prod(shape)
    for name, (shape, _) in found.items():
        if sizes[name] != math.prod(shape):
            raise DamageError(f"the pieces of {name} have {sizes[name]} of its {math.prod(shape)} elements")
    return found


def _entries(path: pathlib.Path) -> dict[str, _Shape]:
    """Returns the shape and dtype of each array in a directory of ``save``."""
    with _reader() as reader:
        tree = reader.metadata(path).item_metadata.tree
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in tree.items()}


def _read(path: pathlib.Path, entries: Mapping[str, _Shape]) -> Iterator[tuple[str, np.ndarray]]:
    """Reads arrays of a directory of ``save``, and ignores all others in it."""
    import orbax.checkpoint as ocp

    blank = {name: np.zeros(shape, dtype) for name, (shape, dtype) in entries.items()}
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in entries}
    with _reader() as reader:
        args = ocp.args.PyTreeRestore(blank, restore_args=how, partial_restore=True)
        for name, value in reader.restore(path, args=args).items():
            yield name, np.asarray(value)


def _pieces(path: pathlib.Path) -> dict[str, _Shape]:
    """Returns the shape and dtype of each array in a directory of ``save_pieces``."""
    import tensorstore

    files = tensorstore.KvStore.open(_store_of(path)).result().list().result()
    found = {}
    for name in {file.decode().rpartition("/")[0] for file in files}:
        store = tensorstore.open(_store(path, name), open=True).result()
        found[name] = tuple(store.shape), store.dtype.numpy_dtype
    return found


def _read_pieces(path: pathlib.Path, entries: Mapping[str, _Shape]) -> Iterator[tuple[str, np.ndarray]]:
    """Reads arrays of a directory of ``save_pieces``."""
    import tensorstore

    for name in entries:
        yield name, tensorstore.open(_store(path, name), open=True).result().read().result()


@contextlib.contextmanager
def _reader() -> Iterator[Any]:
    import orbax.checkpoint as ocp

    alone = _alone()
    with _silence(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**alone), **alone) as checkpointer:
        yield checkpointer


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
