"""Opens the files of a run, or of a member of one."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Mapping
from functools import partial
from typing import IO, Any, NamedTuple

from jaxrl_dist.algorithms import source_of
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans.session import Session
from jaxrl_dist.run import directories, machine, trackers
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run.saving import Saver
from jaxrl_dist.run.storage import write_text
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.policies import by_policy
from jaxrl_dist.settings.stored import copy_of_file, to_json


class Output(NamedTuple):
    """What writes the files of a member."""

    files: RunFiles | None = None
    """None: without a run directory, or another process writes them."""
    saver: Saver | None = None
    """Saves this process's part of checkpoints; None: without a run directory."""


def open_output(stack: contextlib.ExitStack, session: Session, file: IO[bytes] | None) -> Output:
    """Opens the files of a session in all processes; ``stack`` closes them.

    Args:
      file: open ``metrics.jsonl`` of a resumed session.

    Raises:
      ConfigError: the processes do not share the run directory.
    """
    if session.config.run_dir is None:
        return Output()
    output: Output = peers.run_everywhere(
        partial(_open_here, stack, session, file), "the run's files"
    )
    folder = pathlib.Path(session.config.run_dir)
    peers.run_everywhere(partial(check_shared, folder), "a look at the run directory")
    return output


def _open_here(stack: contextlib.ExitStack, session: Session, file: IO[bytes] | None) -> Output:
    config = session.config
    stored = to_json(config, session.job.source.spec)
    files = None
    if peers.first():
        files = open_files(stack, config, stored, file, session.progress.get("reported", {}))
    about = {"config": stored, "versions": machine.versions(), "judge": config.judge}
    folder = pathlib.Path(str(config.run_dir))
    saver = Saver(folder, config.keep_checkpoints, about, config.clock, session.step)
    return Output(files, stack.enter_context(contextlib.closing(saver)))


def check_shared(folder: pathlib.Path) -> None:
    """Checks that this process sees the files of process 0,
    beside which it writes its pieces of checkpoints.

    Raises:
      ConfigError: it does not.
    """
    path = folder / run_files.METRICS
    if not peers.first() and not directories.appears(path):
        raise ConfigError(
            f"process {peers.index()} does not see {path}, which process 0 made; put --run-dir on "
            "a file system that all hosts share"
        )


def open_files(
    stack: contextlib.ExitStack,
    config: Train,
    stored: dict[str, Any],
    file: IO[bytes] | None,
    reported: Mapping[str, int],
) -> RunFiles:
    """Opens the files of a run, or of a member, in process 0; ``stack`` closes them.

    Args:
      stored: the config, as the files hold it.
      file: open ``metrics.jsonl`` of a resumed run.
      reported: counts of the last report before the checkpoint; {}: a new run.
    """
    assert config.run_dir is not None
    if file is None:
        run_files.claim(config.run_dir)
        file = run_files.lock(config.run_dir)
    stack.enter_context(file)
    directory = pathlib.Path(config.run_dir)
    with run_files.freeing(directory):
        for policy, part in by_policy(config).items():
            if (source := source_of(part.algorithm)) is not None:
                write_text(directory / copy_of_file(policy), source.text)
        others = []
        if not is_population(config):  # its members send their own
            others = trackers.start(stack, config, directory, stored, reported.get(config.clock))
        files = RunFiles(directory, file, stored, reported.get("iteration"), others)
    return stack.enter_context(files)
