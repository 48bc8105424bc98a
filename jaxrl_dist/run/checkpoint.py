"""Checkpoints: arrays in orbax's format, JSON, and a checksum of every file.
Reading one executes no code.

A run directory keeps checkpoints of the whole state in ``checkpoints/<env steps>``, and the trained
variables in ``checkpoints/final``. Each checkpoint is a directory::

    arrays/        orbax's files: arrays by name, such as state/variables/params/Dense_0/kernel
    arrays.1/      pieces of arrays that only process 1 has, in a run over several processes
    run.json       counts, times, config, versions and the return that judges it; not in final
    manifest.json  the SHA-256 of each of these files; orbax does not notice a changed bit

A checkpoint is written under a temporary name, synced to disk and then renamed, so a checkpoint
with its final name is complete. The checkpoint that it replaces gets a third name until then, under
which a reader still finds it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jaxrl_dist.errors import CheckpointError, ConfigError, FileWarning, first_line
from jaxrl_dist.run import arrays
from jaxrl_dist.run.directories import DamageError
from jaxrl_dist.run.files import CHECKPOINTS, FINAL, members_of
from jaxrl_dist.run.manifest import read_object, verify
from jaxrl_dist.run.storage import finite, read_json
from jaxrl_dist.types import Checkpoint, PyTree

Content = TypeVar("Content")
ARRAYS = "arrays"
RUN = "run.json"
REPLAY_LIMIT = 2 * 10**9
"""Bytes below which checkpoints hold the replay memory by default."""


def keeps_replay(chosen: bool | None, memory: PyTree) -> bool:
    """Returns True if checkpoints hold the replay memory.

    Args:
      chosen: ``Train.checkpoint_replay``.
      memory: a train state's replay memory, or its shapes and dtypes; no arrays:
        the algorithm replays nothing.

    Raises:
      ConfigError: ``chosen`` is False, and the run has no replay memory.
    """
    leaves = jax.tree.leaves(memory)
    if chosen is None:
        return arrays.nbytes(leaves) < REPLAY_LIMIT
    if not (chosen or leaves):
        raise ConfigError("--no-checkpoint-replay does nothing without a replay memory")
    return chosen


def load_variables(
    run_dir: str | pathlib.Path,
    like: PyTree,
    policy: str | None = None,
    *,
    some: bool = False,
    which: str | int | None = None,
) -> PyTree:
    """Reads a run's trained variables, or else its newest checkpoint's, into the structure of
    ``like``.

    Warns if they are damaged and an older checkpoint is intact.

    Args:
      like: shapes and dtypes suffice. With several policies, a dict keyed by policy.
      policy: one of several policies, whose variables to read; None: all variables.
      some: ``like`` has only some of the variables; the others are ignored.
      which: reads a checkpoint instead: the one at these env steps,
        or with "best" the one with the highest return.

    Raises:
      ConfigError: the run has saved none, they cannot be read, or they belong to another network.
    """
    run_dir = pathlib.Path(run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    if members := members_of(run_dir):
        raise ConfigError(
            f"{run_dir} is a population of {len(members)}; name the run of one member, such as "
            f"{members[0]}"
        )
    prefix = f"{policy}/" if policy else ""
    final = run_dir / CHECKPOINTS / FINAL
    damage = None
    if which is None and os.path.lexists(final):
        alone = not (prefix or some)  # they are all that the directory holds
        damage = _damage(final, like if alone else None)
        if damage is None:
            return arrays.restore(final / ARRAYS, like, None if alone else prefix)

    def read(path: pathlib.Path) -> PyTree:
        verify(path, None)
        return arrays.restore(path / ARRAYS, like, f"state/variables/{prefix}")

    paths = _candidates(run_dir, which)
    try:
        return _newest(run_dir, paths, read, damage)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def load_memory(
    run_dir: str | pathlib.Path, like: PyTree, which: str | int | None = None
) -> PyTree:
    """Reads the replay memory of a run's checkpoint into the structure of ``like``.

    Args:
      which: as for ``load_variables``; None: the newest intact one.

    Raises:
      ConfigError: no checkpoint holds one, or it cannot be read.
    """
    run_dir = pathlib.Path(run_dir)

    def read(path: pathlib.Path) -> PyTree:
        verify(path, None)
        if not read_object(path / RUN)["config"]["run"]["checkpoint_replay"]:
            raise ConfigError(f"{path} holds no replay memory; save it with --checkpoint-replay")
        return arrays.restore(path / ARRAYS, like, "state/memory/")

    return _newest(run_dir, _candidates(run_dir, which), read)


def progress(run_dir: pathlib.Path) -> list[Mapping[str, Any]]:
    """Returns the progress of a run's intact checkpoints, newest first,
    with its counts and its score.
    """

    def read(path: pathlib.Path) -> Mapping[str, Any] | None:
        with contextlib.suppress(DamageError, LookupError, TypeError, ValueError):
            verify(path, None)
            progress = read_object(path / RUN)["progress"]
            float.fromhex(progress.get("score", "0"))
            if isinstance(progress["iteration"], int) and isinstance(progress["env_steps"], int):
                return progress
        return None

    return [progress for progress in map(read, saved(run_dir)) if progress is not None]


def selected_hyper(run_dir: pathlib.Path, which: str | int | None = None) -> dict[str, float]:
    """Returns the hyperparameters of a population's member at its newest checkpoint,
    or at ``which``; {}: it is none.

    Where a selection has changed them, the member's config still has the first ones.
    """
    for path in _candidates(run_dir, which):
        with contextlib.suppress(ConfigError, LookupError, TypeError, AttributeError):  # damage
            hyper = read_object(path / RUN)["progress"].get("hyper", {})
            return {name: x for name, x in hyper.items() if isinstance(x, float)}
    return {}


def load(
    run_dir: pathlib.Path,
    like: Checkpoint,
    check: Callable[[dict[str, Any]], bool],
    iteration: int | None = None,
) -> Checkpoint:
    """Reads a run's newest intact checkpoint, and warns of each newer one that is damaged.

    Args:
      like: shapes and dtypes.
      iteration: of the checkpoint to read; None: the newest.
      check: takes the contents of ``run.json``, and returns True if the checkpoint holds a replay
        memory. Its ``ConfigError`` is passed on; any other error means that the checkpoint is
        damaged.

    Raises:
      CheckpointError: no checkpoint can be read.
    """

    def read(path: pathlib.Path) -> Checkpoint:
        verify(path, like)
        about = read_object(path / RUN)
        try:
            with_memory = check(about)
        except ConfigError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(
                f"{path / RUN} is damaged: {type(error).__name__}: {first_line(error)}"
            ) from None
        shapes = like._replace(progress={})
        if not with_memory:
            shapes = shapes._replace(state=like.state._replace(memory=()))
        stored: Checkpoint = arrays.restore(path / ARRAYS, shapes)
        return stored._replace(progress=about["progress"])

    paths = saved(run_dir)
    if iteration is not None:
        paths = [path for path in paths if _iteration(path) == iteration]
    return _newest(run_dir, paths, read)


def _iteration(path: pathlib.Path) -> object:
    """Returns the iteration of a checkpoint; None: it is damaged."""
    with contextlib.suppress(ConfigError, LookupError, TypeError):
        return read_json(path / RUN)["progress"]["iteration"]
    return None


# --- Choosing -------------------------------------------------------------------------------------


def saved(run_dir: str | pathlib.Path) -> list[pathlib.Path]:
    """Returns the checkpoints in a run directory, intact or damaged, newest first."""
    folder = pathlib.Path(run_dir, CHECKPOINTS)
    if folder.is_symlink():
        return []
    paths = [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]
    for path in folder.glob(".[0-9]*.kept"):  # left by a session killed while replacing one
        name = _committed_name(path)
        if name.isdecimal() and not os.path.lexists(path.with_name(name)):
            paths.append(path)
    return sorted(paths, key=number_of, reverse=True)


def trained(run_dir: str | pathlib.Path) -> bool:
    """Returns whether a run directory holds trained variables,
    which are written before the last checkpoint.
    """
    return pathlib.Path(run_dir, CHECKPOINTS, FINAL).exists()


def episode_return(path: pathlib.Path) -> float | None:
    """Returns the mean return by which a run judges its checkpoint, see ``Train.judge``;
    None: none, or damage.
    """
    with contextlib.suppress(ConfigError, LookupError, TypeError, OverflowError):
        return finite(read_json(path / RUN)["episode_return"])
    return None


def best_of(returns: Mapping[int, float | None]) -> int | None:
    """Returns the env steps with the highest return, the later ones of equals;
    None if no return is known.
    """
    ranked = [(value, env_steps) for env_steps, value in returns.items() if value is not None]
    _, best = max(ranked, default=(None, None))
    return best


def chosen(run_dir: pathlib.Path, which: str | int) -> pathlib.Path:
    """Returns the checkpoint that the user has named by its env steps, or by "best".

    Raises:
      ConfigError: there is none.
    """
    name: str | float = which
    with contextlib.suppress(ValueError, OverflowError):  # "best" is not a number
        name = float(which)
    paths = _named(run_dir)
    if name not in paths:
        has = ", ".join(map(str, paths)) or "none"
        raise ConfigError(f"{run_dir} has no checkpoint {which}; it has {has}")
    return paths[name]


def _candidates(run_dir: pathlib.Path, which: str | int | None) -> list[pathlib.Path]:
    """Returns the checkpoint that the user has named, or all of them, newest first."""
    if which is None:
        return saved(run_dir)
    return [chosen(run_dir, which)]


def _named(run_dir: pathlib.Path) -> dict[str | float, pathlib.Path]:
    """Returns a run's checkpoints by the names that ``chosen`` takes."""
    paths: dict[str | float, pathlib.Path] = {number_of(path): path for path in saved(run_dir)}
    best = best_of({number_of(path): episode_return(path) for path in paths.values()})
    if best is not None:
        paths["best"] = paths[best]
    return paths


def number_of(path: pathlib.Path) -> int:
    """Returns the env steps of a checkpoint."""
    return int(_committed_name(path))


def _committed_name(path: pathlib.Path) -> str:
    """Returns the name of a checkpoint's directory, also while it is ``.NAME.kept``, kept until
    its replacement is written.
    """
    return path.name.removeprefix(".").removesuffix(".kept")


def _damage(path: pathlib.Path, like: PyTree) -> str | None:
    """Returns the first problem that ``verify`` finds; None: the checkpoint is intact."""
    try:
        verify(path, like)
    except DamageError as error:
        return error.with_flags
    return None


def _newest(
    run_dir: pathlib.Path,
    paths: Sequence[pathlib.Path],
    read: Callable[[pathlib.Path], Content],
    damage: str | None = None,
) -> Content:
    """Returns ``read`` of the newest of a run's checkpoints that can be read.

    Args:
      paths: the checkpoints to try, newest first.
      damage: the problem of the trained variables, which are newer than ``paths``.

    Raises:
      CheckpointError: no checkpoint can be read.
    """
    problems = [] if damage is None else [damage]
    for path in paths:
        try:
            content = read(path)
        except DamageError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}; {path} is used instead", FileWarning, stacklevel=3)
        return content
    if not problems:
        raise CheckpointError(
            f"{run_dir} has no checkpoint; wait until it has saved one, or train again in a new "
            f"directory with `jaxrl-dist train --config {run_dir}`"
        )
    newest = problems[0]
    if len(problems) > 1:
        newest += ", and all older checkpoints are damaged"
    others = [str(name) for name, path in _named(run_dir).items() if path not in paths]
    if others:
        raise CheckpointError(f"{newest}; take another checkpoint: {', '.join(others)}")
    raise CheckpointError(
        f"{newest}; restore it from a copy, or train again in a new directory with "
        f"`jaxrl-dist train --config {run_dir}`"
    )
