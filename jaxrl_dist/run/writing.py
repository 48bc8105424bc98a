"""Writes a run's files as its reports come in: metrics (one line a report) and summary."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from jaxrl_dist.config.train import CONFIG_FILE
from jaxrl_dist.errors import ConfigError, FileWarning
from jaxrl_dist.run import machine
from jaxrl_dist.run.files import METRICS, SUMMARY
from jaxrl_dist.run.storage import complete_lines, finite, naming, write_json
from jaxrl_dist.run.trackers import Tracker
from jaxrl_dist.types import Report


class RunFiles(contextlib.AbstractContextManager["RunFiles"]):
    """Writes a run's files as its reports come in."""

    def __init__(
        self,
        run_dir: pathlib.Path,
        metrics: IO[bytes],
        config: dict[str, Any],
        resumed: int | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Takes over from an earlier session, if there was one.

        Args:
          metrics: the file that ``lock`` returned.
          resumed: iteration of the last report before the checkpoint; later lines are removed,
            and recreated.
          trackers: other destinations of each report.

        Raises:
          OSError: a file cannot be written; the error names it.
        """
        self.path = run_dir
        self._metrics = metrics
        self._trackers = trackers
        self._unwritten = b""
        self._in_place = True
        self._full = False
        self._before = 0
        """Bytes of all lines before the last one written."""
        self._iteration = -1
        """Of the last line written, as are the next two."""
        self._line = dict[str, Any]()
        self._logged = set[str]()
        """Names of the caller's numbers in it, since the report was last written."""
        self._replaceable = set[str]()
        """Names of those from before, which the caller may give again."""
        self._step = 0
        if resumed is not None:
            self._rewind(resumed)
        write_json(run_dir / CONFIG_FILE, {**config, "versions": machine.versions()})

    def _rewind(self, iteration: int) -> None:
        """Removes what an earlier session has written after this iteration."""
        path = self.path / METRICS
        self._iteration = iteration
        with naming(path):
            self._before, size, last = _end_of(self._metrics, iteration)
            if last != iteration:
                self._before = size
                warnings.warn(
                    f"{path} has lost the lines after iteration {last}, up to {iteration}",
                    FileWarning,
                    stacklevel=3,
                )
            self._metrics.truncate(size)
        (self.path / SUMMARY).unlink(missing_ok=True)

    def write(self, report: Report) -> None:
        """Adds a line to ``metrics.jsonl``; on a full disk it warns once,
        and tries again with each line.

        A report that is written again, now with its evaluation, overwrites its line.
        """
        if not self.in_place():
            return
        again = report.iteration == self._iteration
        self._replaceable = self._logged if again else set()
        self._logged = set()
        if again and report.evaluation is None:
            return  # a resumed run had nothing left to do, or the caller ends the run
        evaluation = _evaluation(report)
        line: dict[str, float | None] = {"env_steps": report.env_steps}
        if report.agent_steps is not None:
            line["agent_steps"] = report.agent_steps
        line |= {
            "updates": report.updates,
            "iteration": report.iteration,
            "wall_time_s": report.wall_time_s,
            **report.metrics,
            **evaluation,
        }
        self._step = report.step
        self._add(report.iteration, line, evaluation if again else line)

    def log(self, iteration: int, values: Mapping[str, float | None]) -> None:
        """Adds the caller's numbers to the line of a report, as ``Report.log``.

        Raises:
          ConfigError: the line has a number of this name already, or a value is not a number.
          RuntimeError: the report is past, or an earlier session has written its line.
        """
        if not self._metrics.closed and not self.in_place():
            return
        if self._metrics.closed or iteration != self._iteration or not self._line:
            raise RuntimeError("this report is past: call report.log() before taking the next one")
        for name in values:
            if name in self._line and name not in self._replaceable:
                raise ConfigError(
                    f"report.log: the line already has {name}; use another name, such as own/{name}"
                )
        numbers = {str(name): _number(name, value) for name, value in values.items()}
        self._logged |= numbers.keys()
        self._replaceable -= numbers.keys()
        self._add(iteration, {**self._line, **numbers}, numbers)

    def _add(self, iteration: int, line: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Writes a line, over the last one if that has the same iteration;
        trackers get what is ``new``.
        """
        if iteration == self._iteration:
            self._remove_last_line()
        self._iteration = iteration
        self._line = {name: finite(value) for name, value in line.items()}
        self._before = self._size() + len(self._unwritten)
        self._unwritten += json.dumps(self._line, allow_nan=False).encode() + b"\n"
        self._try_to_write()
        values = {
            name: self._line[name]
            for name in new
            if name != "env_steps" and self._line[name] is not None
        }
        self._send(
            f"the report at step {self._step}", lambda tracker: tracker.write(self._step, values)
        )

    def _remove_last_line(self) -> None:
        """Removes the last line, written or not."""
        self._unwritten = self._unwritten[: max(0, self._before - self._size())]
        if self._size() > self._before:
            self._metrics.truncate(self._before)

    def _try_to_write(self) -> None:
        """Writes what is unwritten; warns when the disk gets full, and when it has room again."""
        was_full = self._full
        try:
            self._write()
        except OSError as error:
            self._full = True
            if not was_full:
                warnings.warn(
                    f"{self.path / METRICS} cannot be written: {error.strerror}; each report tries "
                    "again, with all lines since then",
                    FileWarning,
                    stacklevel=4,
                )
            return
        self._full = False
        if was_full:
            warnings.warn(
                f"{self.path / METRICS} can be written again, and has all lines",
                FileWarning,
                stacklevel=4,
            )

    def track(self, report: Report) -> None:
        """Sends the last evaluation to the trackers alone: ``summary.json`` holds it."""
        values = {
            name: value for name, value in _evaluation(report).items() if finite(value) is not None
        }
        self._send(
            f"the evaluation at step {report.step}",
            lambda tracker: tracker.write(report.step, values),
        )

    def film(self, step: int, gif: bytes, size: tuple[int, int]) -> None:
        """Sends a film to the trackers, as ``Tracker.film``."""
        self._send(f"the film at step {step}", lambda tracker: tracker.film(step, gif, size))

    def _send(self, what: str, send: Callable[[Tracker], None]) -> None:
        """Sends something to each tracker; a failure is a warning."""
        for tracker in self._trackers:
            try:
                send(tracker)
            except Exception as error:  # other libraries may raise anything
                warnings.warn(
                    f"{type(tracker).__name__} does not get {what}: {error}",
                    FileWarning,
                    stacklevel=4,
                )

    def in_place(self) -> bool:
        """Returns True if the directory is still this run's;
        warns once if it was removed or renamed.
        """
        if self._in_place:
            try:
                self._in_place = os.path.samestat(
                    os.stat(self.path / METRICS), os.fstat(self._metrics.fileno())
                )
            except FileNotFoundError:
                self._in_place = False
            if not self._in_place:
                warnings.warn(
                    f"{self.path}, or its {METRICS}, was removed or renamed; the run continues, "
                    "but nothing is saved",
                    FileWarning,
                    stacklevel=2,
                )
        return self._in_place

    def check_place(self) -> None:
        """Checks that the directory is still this run's.

        Raises:
          OSError: it was removed or renamed.
        """
        if not self.in_place():
            raise OSError(
                f"{self.path}, or its {METRICS}, was removed or renamed; what the run learnt since "
                "then is not saved"
            )

    def _size(self) -> int:
        """Returns the file's current size in bytes: another process may have truncated it."""
        return os.fstat(self._metrics.fileno()).st_size

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._metrics.write(self._unwritten) :]

    def finish(self, last: Report) -> None:
        """Writes ``summary.json``; its rates exclude compilation and evaluation.

        Raises:
          OSError: the file cannot be written.
        """
        compile_seconds = last.metrics["time/compile_s"] or 0.0
        seconds = max(last.wall_time_s - compile_seconds, 1e-9)
        restarts = last.metrics.get("async/restarts")
        summary: dict[str, Any] = {
            "ended_by": last.ended_by,
            "env_steps": last.env_steps,
            "updates": last.updates,
            "wall_time_s": last.wall_time_s,
            "compile_time_s": compile_seconds,
            "env_steps_per_second": last.env_steps / seconds,
        }
        if last.agent_steps is not None:
            summary["agent_steps"] = last.agent_steps
        if restarts is not None:
            summary["restarts"] = int(restarts)
        summary["evaluation"] = last.evaluation
        if last.best_evaluation is not None:
            summary["best_evaluation"] = last.best_evaluation
        write_json(self.path / SUMMARY, summary)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Closes the files; an error that ends the run hides an error of writing them."""
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self.close()

    def close(self) -> None:
        """Writes the remaining lines, and unlocks the run.

        Raises:
          OSError: the remaining lines cannot be written.
        """
        with contextlib.closing(self._metrics), naming(self.path / METRICS):
            self._write()


def _evaluation(report: Report) -> dict[str, float | int]:
    """Returns the numbers of a report's evaluation by their names in files; {}: it has none."""
    return {f"evaluation/{name}": value for name, value in (report.evaluation or {}).items()}


def _number(name: str, value: Any) -> float | None:
    """Returns one of the caller's numbers: a Python number, or a scalar of numpy or JAX;
    None stays None.

    Raises:
      ConfigError: it is something else.
    """
    try:
        if value is None:
            return None
        if isinstance(value, str | bytes) or getattr(value, "ndim", None):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"report.log: {name} must be a number, not {value!r:.80}") from None


def _end_of(metrics: IO[bytes], iteration: int) -> tuple[int, int, int]:
    """Returns where the last complete line of ``metrics.jsonl`` of ``iteration`` or before begins
    and ends, in bytes, and the line's iteration.
    """
    before = size = last = 0
    for line in complete_lines(metrics):
        # damaged lines are kept
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            number = json.loads(line)["iteration"]
            if number > iteration:
                break
            before = size
            last = number
        size += len(line)
    return before, size, last
