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
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxrl_dist.errors import CheckpointError, ConfigError, FileWarning, first_line
from jaxrl_dist.run import arrays, storage
from jaxrl_dist.run.files import CHECKPOINTS, FINAL, members_of
from jaxrl_dist.run.machine import memory_size
from jaxrl_dist.run.storage import DamageError, finite, read_json
from jaxrl_dist.types import Checkpoint, PyTree

ARRAYS = "arrays"
RUN = "run.json"
MANIFEST = "manifest.json"
FORMAT = 1
"""Format number of a checkpoint; a reader refuses unknown numbers."""
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
    like: Any,
    policy: str | None = None,
    *,
    some: bool = False,
    which: str | int | None = None,
) -> Any:
    """Reads a run's trained variables, or else those of its newest checkpoint,
    into the structure of ``like``.

    Warns of those that are damaged, if an older checkpoint is intact.

    Args:
      like: shapes and dtypes suffice. With several policies, a dict keyed by policy.
      policy: one of several policies, whose variables to read; None: all variables.
      some: ``like`` has only some of the variables; the others are ignored.
      which: reads a checkpoint instead: that of these env steps,
        or with "best" the one with the highest return.

    Raises:
      ConfigError: the run has saved none, they cannot be read, or they belong to another network.
    """
    run_dir = pathlib.Path(run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    if members := members_of(run_dir):
        raise ConfigError(
            f"{run_dir} is a population of {len(members)}; name the run of one member, such as {members[0]}"
        )
    part = f"{policy}/" if policy else ""
    final = run_dir / CHECKPOINTS / FINAL
    damage = []
    if which is None and os.path.lexists(final):
        all_of_them = not (part or some)
        if not (damage := _damage(final, like if all_of_them else None)):
            return arrays.restore(final / ARRAYS, like, None if all_of_them else part)

    def read(path: pathlib.Path) -> Any:
        verify(path, None)
        return arrays.restore(path / ARRAYS, like, f"state/variables/{part}")

    if which is None:
        paths = saved(run_dir)
    else:
        paths = [chosen(run_dir, which)]
    try:
        return _newest(run_dir, paths, read, damage)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def load_memory(run_dir: str | pathlib.Path, like: Any, which: str | int | None = None) -> Any:
    """Reads the replay memory of a run's checkpoint into the structure of ``like``.

    Args:
      which: as for ``load_variables``; None: the newest intact one.

    Raises:
      ConfigError: no checkpoint holds one, or it cannot be read.
    """
    run_dir = pathlib.Path(run_dir)

    def read(path: pathlib.Path) -> Any:
        verify(path, None)
        if not _read_object(path / RUN)["config"]["run"]["checkpoint_replay"]:
            raise ConfigError(f"{path} holds no replay memory; --checkpoint-replay saves it")
        return arrays.restore(path / ARRAYS, like, "state/memory/")

    return _newest(run_dir, saved(run_dir) if which is None else [chosen(run_dir, which)], read)


def progress(run_dir: pathlib.Path) -> list[Mapping[str, Any]]:
    """Returns the progress of a run's intact checkpoints, newest first,
    with its counts and its score.
    """

    def read(path: pathlib.Path) -> Mapping[str, Any] | None:
        with contextlib.suppress(DamageError, LookupError, TypeError, ValueError):
            verify(path, None)
            progress = _read_object(path / RUN)["progress"]
            float.fromhex(progress.get("score", "0"))
            if isinstance(progress["iteration"], int) and isinstance(progress["env_steps"], int):
                return progress
        return None

    return [progress for progress in map(read, saved(run_dir)) if progress is not None]


def selected_hyper(run_dir: pathlib.Path, which: str | int | None = None) -> dict[str, float]:
    """Returns the hyperparameters of a population's member at its newest checkpoint,
    or at ``which``; {}: it is none.

    Where a selection has changed them, the member's config has those of the start.
    """
    for path in saved(run_dir) if which is None else [chosen(run_dir, which)]:
        # a damaged one
        with contextlib.suppress(ConfigError, LookupError, TypeError, AttributeError):
            hyper = _read_object(path / RUN)["progress"].get("hyper", {})
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
        about = _read_object(path / RUN)
        try:
            with_memory = check(about)
        except ConfigError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(
                f"{path / RUN} is damaged: {type(error).__name__}: {first_line(error)}"
            ) from None
        if with_memory:
            wanted = like
        else:
            wanted = like._replace(state=like.state._replace(memory=()))
        return arrays.restore(path / ARRAYS, wanted._replace(progress={}))._replace(
            progress=about["progress"]
        )

    def iteration_of(path: pathlib.Path) -> Any:
        with contextlib.suppress(ConfigError, LookupError, TypeError):
            return read_json(path / RUN)["progress"]["iteration"]

    paths = [
        path for path in saved(run_dir) if iteration is None or iteration_of(path) == iteration
    ]
    return _newest(run_dir, paths, read)


def saved(run_dir: str | pathlib.Path) -> list[pathlib.Path]:
    """Returns the checkpoints in a run directory, intact or damaged, newest first."""
    folder = pathlib.Path(run_dir, CHECKPOINTS)
    if folder.is_symlink():
        return []
    paths = [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]
    for path in folder.glob(".[0-9]*.kept"):  # left by a session killed while replacing one
        if path.name[1:-5].isdecimal() and not os.path.lexists(path.with_name(path.name[1:-5])):
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
    known = [(value, env_steps) for env_steps, value in returns.items() if value is not None]
    if known:
        return max(known)[1]
    return None


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
        if paths:
            known = f"it has {', '.join(map(str, paths))}"
        else:
            known = "it has none"
        raise ConfigError(f"{run_dir} has no checkpoint {which}; {known}")
    return paths[name]


def _named(run_dir: pathlib.Path) -> dict[str | float, pathlib.Path]:
    """Returns a run's checkpoints by the names that ``chosen`` takes."""
    paths: dict[str | float, pathlib.Path] = {number_of(path): path for path in saved(run_dir)}
    if (
        best := best_of({number_of(path): episode_return(path) for path in paths.values()})
    ) is not None:
        paths["best"] = paths[best]
    return paths


def _others(run_dir: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
    """Says which checkpoints a run has beside damaged ones."""
    names = [str(name) for name, path in _named(run_dir).items() if path not in paths]
    if names:
        return f"; {run_dir} has {', '.join(names)}"
    return ""


def number_of(path: pathlib.Path) -> int:
    """Returns the env steps of a checkpoint."""
    return int(path.name.removeprefix(".").removesuffix(".kept"))


def _newest(
    run_dir: pathlib.Path,
    paths: Sequence[pathlib.Path],
    read: Callable[[pathlib.Path], Any],
    damage: Sequence[str] = (),
) -> Any:
    """Returns ``read`` of the first of a run's checkpoints that can be read;
    they come newest first.

    Args:
      damage: what is wrong with what comes before them.

    Raises:
      CheckpointError: no checkpoint can be read.
    """
    problems = [*damage]
    for path in paths:
        try:
            content = read(path)
        except DamageError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}; {path} is used instead", FileWarning, stacklevel=3)
        return content
    again = f"`jaxrl-dist train --config {run_dir}` starts it again in a new directory"
    if problems:
        more = "; older ones are damaged, too" if len(problems) > 1 else ""
        way_on = _others(run_dir, paths) or f"; put back a copy, or {again}"
        raise CheckpointError(f"{problems[0]}{more}{way_on}")
    here = "its own command with --resume-or-start does in this one"
    ways = f"wait for one if it still runs, or else {again}, and {here}"
    raise CheckpointError(
        f"{run_dir} holds no trained variables: its run has saved no checkpoint; {ways}"
    )


# --- The manifest ---------------------------------------------------------------------------------


def write_manifest(path: pathlib.Path, known: Mapping[str, str] = {}) -> None:
    """Writes the SHA-256 of each file below ``path``.

    Args:
      known: those of files that other processes have written.

    Raises:
      OSError: the file cannot be written.
    """
    manifest = {"format": FORMAT, "sha256": {**storage.digests(path, known), **known}}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def verify(path: pathlib.Path, like: PyTree) -> None:
    """Checks that a checkpoint holds exactly the files that were written, unchanged.

    Args:
      like: shapes and dtypes of its arrays, which bound its size; None:
        only this machine's memory bounds each file.

    Raises:
      ConfigError: a file is missing, changed or added, is not a plain file, or is too large.
    """
    with storage.reading(path):
        sizes = {file: file.stat().st_size for file in storage.plain_files(path)}
    size = sum(sizes.values())
    memory = memory_size()
    if like is not None and size > (room := 2 * arrays.nbytes(like) + 2**26):
        raise DamageError(
            f"{path} is damaged: it has {size} bytes, of which its arrays explain at most {room}"
        )
    for file, size in sizes.items():
        if size > memory:  # an array may claim all of it
            raise DamageError(
                f"{file} cannot be read: it has {size} bytes, which is more than the memory here"
            )
    manifest = _read_object(path / MANIFEST)
    written = manifest.get("sha256")
    if manifest.get("format") != FORMAT or not isinstance(written, dict):
        raise DamageError(f"{path / MANIFEST} is damaged: it is not a list of format {FORMAT}")
    digests = storage.digests(path, without={MANIFEST})
    problems = dict.fromkeys(written.keys() & digests.keys(), "it is not what was written")
    problems |= dict.fromkeys(written.keys() - digests.keys(), "No such file or directory")
    problems |= dict.fromkeys(digests.keys() - written.keys(), "it does not belong there")
    for name, problem in sorted(problems.items()):
        if name not in digests or written.get(name) != digests[name]:
            raise DamageError(f"{path / name} is damaged: {problem}")


def _damage(path: pathlib.Path, like: PyTree) -> list[str]:
    """Returns what ``verify`` finds."""
    try:
        verify(path, like)
    except DamageError as error:
        return [error.with_flags]
    return []


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object from a file of a checkpoint."""
    try:
        content = read_json(path)
    except ConfigError as error:
        raise DamageError(error.with_flags) from None
    if not isinstance(content, dict):
        raise DamageError(f"{path} is damaged: it is not an object")
    return content
