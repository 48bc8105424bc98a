"""Files of a run directory: config, metrics (one line a report) and summary."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from jaxrl_dist.config.train import CONFIG_FILE
from jaxrl_dist.errors import ConfigError, FileWarning
from jaxrl_dist.run import locks, machine, storage
from jaxrl_dist.run.storage import complete_lines, finite, naming, read_json, write_json
from jaxrl_dist.run.trackers import Tracker
from jaxrl_dist.types import Report

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"
FINAL = "final"
POPULATION = "population.json"
RESULTS = "results.csv"
"""Files of a population's run directory: its members and their scores, as JSON and as a table."""
MEMBERS = "members"
"""Folder of a population's run directory that holds the run directories of its members."""


def claim(run_dir: str) -> None:
    """Creates the directory of a new run.

    Raises:
      ConfigError: the directory cannot be created or written, is a file, or holds a run already.
    """
    path = pathlib.Path(run_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG_FILE, CHECKPOINTS):  # a new run would overwrite them
            if os.path.lexists(path / name):
                raise FileExistsError
        (path / METRICS).touch(exist_ok=False)  # fails for all but one of several processes
    except FileExistsError:
        anew = "`jaxrl-dist train --resume-or-start` starts one without a checkpoint anew"
        again = f"holds a run already; `jaxrl-dist resume {run_dir}` continues it, {anew}, or"
        holds = again if path.is_dir() else "is a file;"
        if (path / CHECKPOINTS).is_symlink():
            holds = f"has a link in the place of {CHECKPOINTS};"
        raise ConfigError(f"--run-dir {run_dir} {holds} name another directory") from None
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def freeing(path: pathlib.Path) -> Iterator[None]:
    """Frees a directory that a run has claimed if the run cannot write its config:
    it would seem to hold a run.
    """
    try:
        yield
    except BaseException:
        if not (path / CONFIG_FILE).exists():
            (path / METRICS).unlink(missing_ok=True)
        raise


def abandon(path: pathlib.Path) -> None:
    """Deletes the files that a run without a checkpoint has left in its directory,
    so that it can start again.

    Other files stay. If there are trained variables, nothing is deleted.

    Raises:
      ConfigError: another process uses the run.
    """
    if not (path / METRICS).is_file() or (path / CHECKPOINTS / FINAL).exists():
        return
    with lock(str(path)):
        for name in (CONFIG_FILE, SUMMARY, POPULATION, RESULTS):
            (path / name).unlink(missing_ok=True)
        for name in (CHECKPOINTS, MEMBERS):
            if not (path / name).is_symlink():
                storage.remove(path / name)
        (path / METRICS).unlink()


def members_of(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the run directories of a population's members, in their order; none for a single run.

    Raises:
      ConfigError: a link is in the place of one, or of the folder of all.
    """
    storage.check_no_links(run_dir / MEMBERS)
    return sorted(path.parent for path in (run_dir / MEMBERS).glob(f"*/{CONFIG_FILE}"))


def check_free(run_dir: str) -> None:
    """Checks that a new run can claim a directory when it starts.

    Raises:
      ConfigError: as ``claim``.
    """
    claim(run_dir)
    (pathlib.Path(run_dir) / METRICS).unlink()


def lock(run_dir: str) -> IO[bytes]:
    """Opens a run's ``metrics.jsonl``, and locks the run
    against other processes until the file is closed.

    Raises:
      ConfigError: the file cannot be written or is not a plain file,
        or another process holds the lock.
    """
    path = pathlib.Path(run_dir, METRICS)
    try:  # follows no link: the file may be truncated
        number = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    file = os.fdopen(number, "r+b", buffering=0)
    if not stat.S_ISREG(os.fstat(number).st_mode):  # reading a pipe would block forever
        file.close()
        raise ConfigError(f"{path} is not a plain file")
    try:
        locks.lock(number)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another process is at the run in {run_dir}") from None
    except OSError as error:  # some cluster file systems have no locks
        text = f"{path} cannot be locked ({error.strerror}): keep other processes off this run yourself"
        warnings.warn(text, FileWarning, stacklevel=2)
    return file


def finished(run_dir: pathlib.Path, evaluation_episodes: int) -> bool:
    """Returns True if a run is complete, including its evaluation."""
    with contextlib.suppress(ConfigError, LookupError, TypeError):
        summary = read_json(run_dir / SUMMARY)
        return summary["evaluation"] is not None or not evaluation_episodes
    return False


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
        self._before = 0  # bytes of all lines before the last one written
        # of the last line written
        self._iteration = -1
        self._line = dict[str, Any]()
        self._step = 0
        if resumed is not None:
            self._iteration = resumed
            with naming(run_dir / METRICS):
                self._before, size, last = _end_of(metrics, resumed)
                if last != resumed:
                    self._before = size
                    text = f"{run_dir / METRICS} has lost the lines after iteration {last}, up to {resumed}"
                    warnings.warn(text, FileWarning, stacklevel=2)
                metrics.truncate(size)
            (run_dir / SUMMARY).unlink(missing_ok=True)
        write_json(run_dir / CONFIG_FILE, {**config, "versions": machine.versions()})

    def write(self, report: Report) -> None:
        """Adds a line to ``metrics.jsonl``; on a full disk it warns once,
        and tries again with each line.

        A report that is written again, now with its evaluation, overwrites its line.
        """
        if not self.in_place():
            return
        again = report.iteration == self._iteration
        if again and report.evaluation is None:
            return  # a resumed run had nothing left to do
        evaluation = _evaluation(report)
        counts = {
            name: getattr(report, name)
            for name in ("env_steps", "agent_steps", "updates", "iteration")
        }
        line = {name: count for name, count in counts.items() if count is not None}
        line |= {"wall_time_s": report.wall_time_s, **report.metrics, **evaluation}
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
            if name in self._line:
                raise ConfigError(
                    f"report.log: the line has {name} already; another name works, such as own/{name}"
                )
        numbers = {str(name): _number(name, value) for name, value in values.items()}
        self._add(iteration, {**self._line, **numbers}, numbers)

    def _add(self, iteration: int, line: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Writes a line, over the last one if that has the same iteration;
        trackers get what is ``new``.
        """
        if iteration == self._iteration:  # removes it, written or not
            self._unwritten = self._unwritten[: max(0, self._before - self._size())]
            if self._size() > self._before:
                self._metrics.truncate(self._before)
        self._iteration = iteration
        self._line = {name: finite(value) for name, value in line.items()}
        self._before = self._size() + len(self._unwritten)
        self._unwritten += json.dumps(self._line, allow_nan=False).encode() + b"\n"
        full = ""
        before = self._full
        try:
            self._write()
        except OSError as error:
            full = f"cannot be written now: {error.strerror}; each report tries again, with all lines since"
        self._full = bool(full)
        if self._full != before:
            text = f"{self.path / METRICS} {full or 'is written again, with all lines since'}"
            warnings.warn(text, FileWarning, stacklevel=3)
        values = {
            name: self._line[name]
            for name in new
            if name != "env_steps" and self._line[name] is not None
        }
        self._tell(
            f"the report at step {self._step}", lambda tracker: tracker.write(self._step, values)
        )

    def track(self, report: Report) -> None:
        """Sends an evaluation to the trackers alone: ``summary.json`` holds that of the end."""
        known = {
            name: value for name, value in _evaluation(report).items() if finite(value) is not None
        }
        self._tell(
            f"the evaluation at step {report.step}",
            lambda tracker: tracker.write(report.step, known),
        )

    def film(self, step: int, gif: bytes, size: tuple[int, int]) -> None:
        """Sends a film to the trackers, as ``Tracker.film``."""
        self._tell(f"the film at step {step}", lambda tracker: tracker.film(step, gif, size))

    def _tell(self, what: str, send: Callable[[Tracker], None]) -> None:
        """Sends something to each tracker."""
        for tracker in self._trackers:
            try:
                send(tracker)
            except Exception as error:
                # other libraries may raise anything; metrics.jsonl is complete
                text = f"{type(tracker).__name__} does not get {what}: {error}"
                warnings.warn(text, FileWarning, stacklevel=4)

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
                text = f"{self._gone()}; the run continues, and nothing of it is saved"
                warnings.warn(text, FileWarning, stacklevel=2)
        return self._in_place

    def check_place(self) -> None:
        """Checks that the directory is still this run's.

        Raises:
          OSError: it was removed or renamed.
        """
        if not self.in_place():
            raise OSError(f"{self._gone()}; what the run has learnt since then is not saved")

    def _gone(self) -> str:
        return f"{self.path}, or its {METRICS}, has been removed or renamed"

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
        more = {"agent_steps": last.agent_steps, "restarts": last.metrics.get("async/restarts")}
        write_json(
            self.path / SUMMARY,
            {
                "ended_by": last.ended_by,
                "env_steps": last.env_steps,
                "updates": last.updates,
                "wall_time_s": last.wall_time_s,
                "compile_time_s": compile_seconds,
                "env_steps_per_second": last.env_steps
                / max(last.wall_time_s - compile_seconds, 1e-9),
                **{name: int(count) for name, count in more.items() if count is not None},
                "evaluation": last.evaluation,
                **(
                    {}
                    if last.best_evaluation is None
                    else {"best_evaluation": last.best_evaluation}
                ),
            },
        )

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Closes the files; that they cannot be written hides no error that ends the run."""
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
    """Returns the bytes of ``metrics.jsonl`` before its last complete line of ``iteration`` or
    before, those up to the line's end, and the line's iteration."""
    before = size = last = 0
    for line in complete_lines(metrics):
        # damaged lines are kept
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            if (number := json.loads(line)["iteration"]) > iteration:
                break
            before, last = size, number
        size += len(line)
    return before, size, last
