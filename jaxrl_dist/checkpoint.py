"""Saving and loading trained variables: arrays in orbax's format, and nothing that runs when it is read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_dist.config import ConfigError
from jaxrl_dist.metrics import write_json
from jaxrl_dist.types import PyTree, Variables

FINAL = pathlib.Path("checkpoints", "final")
"""Where a run directory keeps its trained variables."""
MANIFEST = FINAL.with_suffix(".json")
"""The SHA-256 of each file of them; written last, so it says that they are whole. A changed bit passes orbax unseen."""


def _named(tree: PyTree) -> dict[str, Any]:
    """Each array of a tree by its path, such as ``params/policy/Dense_0/kernel``."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def save_variables(run_dir: str | pathlib.Path, variables: Variables) -> None:
    """Writes the variables into a run directory.

    Raises:
      OSError: the directory cannot be written.
    """
    import orbax.checkpoint as ocp  # here, not above: it takes half a second

    path = pathlib.Path(run_dir, FINAL).resolve()
    arrays = {name: np.asarray(leaf) for name, leaf in _named(variables).items()}
    try:
        with _silence(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(path, args=ocp.args.StandardSave(arrays))
    except Exception as error:  # orbax and tensorstore raise many kinds where a disk is full
        raise OSError(f"{path} cannot be written: {_first_line(error)}") from error
    files = {file.relative_to(path).as_posix(): _sha256(file) for file in sorted(path.rglob("*")) if file.is_file()}
    write_json(pathlib.Path(run_dir, MANIFEST), {"sha256": files})


def load_variables(run_dir: str | pathlib.Path, like: Variables) -> Variables:
    """Reads the variables of a run directory into the structure of ``like`` (shapes and dtypes suffice).

    Raises:
      ConfigError: there are none, they cannot be read, or they are of another network.
    """
    import orbax.checkpoint as ocp

    path = pathlib.Path(run_dir, FINAL).resolve()
    _check_files(run_dir, path)
    wanted = {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in _named(like).items()}
    try:
        with _silence(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(path).item_metadata.tree
            found = {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in tree.items()}
            for name in sorted(wanted.keys() | found.keys()):
                if wanted.get(name) != found.get(name):
                    raise ConfigError(
                        f"{run_dir} holds another network: {name} is {_describe(found.get(name))} there and "
                        f"{_describe(wanted.get(name))} here"
                    )
            blank = {name: np.zeros(shape, dtype) for name, (shape, dtype) in wanted.items()}
            arrays = checkpointer.restore(path, args=ocp.args.StandardRestore(blank))
    except ConfigError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds for a damaged file
        raise ConfigError(f"{path} cannot be read: {_first_line(error)}") from error
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in _named(like)])


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps orbax from logging the traceback of what it raises as well."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _check_files(run_dir: str | pathlib.Path, path: pathlib.Path) -> None:
    """Checks that the files are those that were written.

    Raises:
      ConfigError: there are none, one is missing, or one has changed.
    """
    if not pathlib.Path(run_dir).is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    try:
        manifest = json.loads(pathlib.Path(run_dir, MANIFEST).read_text(encoding="utf-8"))["sha256"]
    except FileNotFoundError:
        raise ConfigError(
            f"{run_dir} holds no trained variables (no {MANIFEST} in it): no run finished there"
        ) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{pathlib.Path(run_dir, MANIFEST)} is damaged: {_first_line(error)}") from None
    for name, digest in manifest.items():
        try:
            intact = _sha256(path / name) == digest
        except OSError as error:
            raise ConfigError(f"{path / name} is damaged: {error.strerror}") from None
        if not intact:
            raise ConfigError(f"{path / name} is damaged: it is not what was written")


def _sha256(file: pathlib.Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _describe(entry: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "missing" if entry is None else f"{entry[1]}{list(entry[0])}"
