"""Destinations of a run's metrics other than ``metrics.jsonl``: TensorBoard event files,
and Weights & Biases.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import struct
import time
import uuid
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from jaxrl_dist.checks import check_used
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError, FileWarning
from jaxrl_dist.run.storage import check_no_link, read_json, write_json

WANDB_FILE = "wandb.json"
"""File of a run directory that holds the run's id in Weights & Biases."""
FILM = "film"
"""Name under which trackers show films."""


class Tracker(Protocol):
    """Another destination of a run's metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records the new values of the report at ``step``, all finite."""

    def film(self, step: int, gif: bytes, size: tuple[int, int]) -> None:
        """Shows a film of the policy at ``step``, an animated GIF;
        ``size`` is its width and height in pixels.
        """

    def close(self) -> None:
        """Closes the tracker after its last value."""


def check_trackers(config: Train) -> None:
    """Checks that the trackers of a run can be used.

    Raises:
      ConfigError: one cannot.
    """
    check_used(
        config, "tensorboard", "wandb", active=config.run_dir is not None, needed="--run-dir"
    )
    check_used(
        config,
        "video_interval",
        active=config.tensorboard or config.wandb,
        needed="--tensorboard or --wandb",
    )
    if config.wandb:
        _wandb()


def start(
    stack: contextlib.ExitStack,
    config: Train,
    run_dir: pathlib.Path,
    content: dict[str, Any],
    resumed: int | None,
) -> list[Tracker]:
    """Starts the trackers of a run; ``stack`` closes them.

    Args:
      content: the contents of ``config.json``.
      resumed: env steps of the last report before the checkpoint;
        later reports are recreated. None: a new run.

    Raises:
      ConfigError: Weights & Biases refuses.
      OSError: the run directory cannot be written.
    """
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoard(run_dir, resumed))
        stack.callback(close, trackers[-1])
    if config.wandb:
        trackers.append(WeightsAndBiases(run_dir, content))
        stack.callback(close, trackers[-1])
    return trackers


def close(tracker: Tracker) -> None:
    """Closes a tracker. A failure is only a warning, so that the run still saves its results."""
    try:
        tracker.close()
    except Exception as error:  # the library may raise anything
        warnings.warn(
            f"{type(tracker).__name__} did not finish cleanly: {error}", FileWarning, stacklevel=2
        )


_EVENTS = re.compile(r"events\.out\.tfevents\.([0-9]{10})\.([0-9]{6})")


class TensorBoard:
    """Writes one event file for each session of a run.

    Only the file format comes from tensorboardX: its writer runs in a thread, which ends on a full
    disk and then blocks the run.
    """

    def __init__(self, run_dir: pathlib.Path, resumed: int | None) -> None:
        """As ``start``.

        Raises:
          OSError: the file cannot be created.
        """
        from tensorboardX.proto.event_pb2 import SessionLog

        # TensorBoard reads files in the order of their names.
        # The clock may have been set back since the last session.
        before = [_EVENTS.fullmatch(path.name) for path in run_dir.iterdir()]
        stamp = max([int(time.time()), *(int(name[1]) for name in before if name)])
        number = max([-1, *(int(name[2]) for name in before if name)]) + 1
        path = run_dir / f"events.out.tfevents.{stamp:010d}.{number:06d}"
        self._file = path.open("xb", buffering=0)
        self._add(file_version="brain.Event:2")
        if resumed is not None:  # makes TensorBoard discard what other files hold from this step on
            self._add(step=resumed + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._add(step=step, summary=summary)

    def film(self, step: int, gif: bytes, size: tuple[int, int]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        image = Summary.Image(width=size[0], height=size[1], colorspace=3, encoded_image_string=gif)
        summary = Summary(value=[Summary.Value(tag=FILM, image=image)])
        self._add(step=step, summary=summary)

    def _add(self, **fields: Any) -> None:
        """Writes an event completely or not at all."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c

        data = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        length_sum = struct.pack("<I", masked_crc32c(length))
        data_sum = struct.pack("<I", masked_crc32c(data))
        rest = length + length_sum + data + data_sum
        begun = self._file.tell()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(begun)
            self._file.seek(begun)
            raise

    def close(self) -> None:
        self._file.close()


class WeightsAndBiases:
    """Sends metrics with the package wandb, whose environment variables,
    such as ``WANDB_MODE``, choose where.
    """

    def __init__(self, run_dir: pathlib.Path, content: dict[str, Any]) -> None:
        """As ``start``; a resumed run continues under its id.

        Raises:
          ConfigError: wandb refuses, for example without a login.
          OSError: the run directory cannot be written.
        """
        wandb = _wandb()
        for folder in ("wandb", ".wandb"):  # it writes into one of them
            check_no_link(run_dir / folder)
        name = uuid.uuid4().hex[:16]
        with contextlib.suppress(ConfigError, LookupError, TypeError):
            stored = str(read_json(run_dir / WANDB_FILE)["id"])
            if re.fullmatch("[0-9a-f]{16}", stored):  # only ids that we made
                name = stored
        write_json(run_dir / WANDB_FILE, {"id": name})
        # wandb gets only the numbers: no code, no repository, no output.
        settings = {"console": "off", "disable_code": True, "disable_git": True}
        try:
            self._run = wandb.init(
                id=name,
                name=run_dir.name,
                dir=str(run_dir),
                config=content,
                resume="allow",
                settings=settings,
            )
        except wandb.Error as error:
            raise ConfigError(
                f"--wandb: {str(error).rstrip('.')}; set WANDB_MODE=offline to write into the run "
                "directory only, or use --no-wandb"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def film(self, step: int, gif: bytes, size: tuple[int, int]) -> None:
        self._run.log({FILM: _wandb().Video(io.BytesIO(gif), format="gif")}, step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb() -> Any:
    """Imports the package.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            "--wandb needs a package that is not installed: pip install wandb"
        ) from None
    return wandb
