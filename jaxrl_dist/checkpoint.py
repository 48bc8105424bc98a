"""Saving and loading trained variables: arrays in orbax's format, and nothing that runs when it is read."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np

from jaxrl_dist.config import ConfigError
from jaxrl_dist.types import PyTree, Variables

FINAL = pathlib.Path("checkpoints", "final")
"""Where a run directory keeps its trained variables."""


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
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        arrays = {name: np.asarray(leaf) for name, leaf in _named(variables).items()}
        checkpointer.save(path, args=ocp.args.StandardSave(arrays))


def load_variables(run_dir: str | pathlib.Path, like: Variables) -> Variables:
    """Reads the variables of a run directory into the structure of ``like`` (shapes and dtypes suffice).

    Raises:
      ConfigError: there are none, they cannot be read, or they are of another network.
    """
    import orbax.checkpoint as ocp

    path = pathlib.Path(run_dir, FINAL).resolve()
    if not path.is_dir():
        raise ConfigError(f"{run_dir} holds no trained variables (no {FINAL} in it): the run has not finished")
    wanted = {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in _named(like).items()}
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
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
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{path} is damaged and cannot be read: {reason}") from error
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in _named(like)])


def _describe(entry: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "missing" if entry is None else f"{entry[1]}{list(entry[0])}"
