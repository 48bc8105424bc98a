"""``jaxrl-dist train``: trains and shows progress."""

from __future__ import annotations

import contextlib
import errno
import pathlib
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxrl_dist.checks import unit
from jaxrl_dist.commands import request
from jaxrl_dist.config.train import Train, launch_of
from jaxrl_dist.errors import ConfigError, FinishedError, visible
from jaxrl_dist.hosts import failing, peers, start, stdout
from jaxrl_dist.hosts.warn import one_line_warnings
from jaxrl_dist.run import signals, subprocesses, watchdog

if TYPE_CHECKING:
    from jaxrl_dist.training.run import Run
    from jaxrl_dist.types import Report


HELD_SECONDS = 60.0
"""Seconds for which code in C may hold Python's lock beyond the time limit of environments: a
compiler also holds it."""


def run(args: Sequence[str]) -> int:
    """Runs ``train ALGO --env ID [FLAGS]``."""
    subprocesses.end_with_parent()
    run = request.parse(args)
    target = run.fields.pop("plan_memory", None)
    again = run.fields.pop("resume_or_start", False)
    output = request.output_flags(run.fields)
    if target is not None:
        from jaxrl_dist.commands import compile_for

        print(visible("\n".join(compile_for.memory(compile_for.report(target, run)))))
        return 0
    if again and run.fields.get("run_dir") is None:
        raise ConfigError(
            "--resume-or-start needs --run-dir: the directory of the run to resume or start"
        )
    command = "train --resume-or-start" if again else "train"
    with signals.stopping() as stop, joined(command, run.fields, stop):
        _train(run, stop, again=again, **output)
    return 0


@contextlib.contextmanager
def joined(command: str, fields: Mapping[str, Any], stop: signals.Stop) -> Iterator[None]:
    """Joins the processes of a run while the context lasts, and passes signals and errors of this
    process on to the others.

    Raises:
      ConfigError: another process has another command.
      Interrupted: a signal has arrived before all processes have joined.
    """

    def check() -> None:
        if stop():
            raise stop.interrupted("interrupted while waiting for the other processes of the run")

    start.start(launch_of(fields), detect=True, waiting=check)
    if (watch := failing.watch()) is not None:
        watch.stop_signal = lambda: stop.number or 0
    output = contextlib.nullcontext() if peers.first() else stdout.discarded()
    with failing.failing(), output:
        for process, other in enumerate(peers.all_gather(command, "the command")):
            if other != command:
                raise ConfigError(
                    f"all processes of a run need the same command, but it is `{command}` in "
                    f"process {peers.index()} and `{other}` in process {process}"
                )
        yield


def _train(
    run: request.Request, stop: signals.Stop, *, again: bool, quiet: bool, verbose: bool
) -> None:
    """Trains as the command line asks; ``again``: resumes the run if it has saved a checkpoint."""
    run.check_asked()
    config, source = run.resolved()

    from jaxrl_dist.training import setup

    config = run.in_run_dir(config)
    with one_line_warnings(quiet):
        try:
            prepared = _resumed_or_started(config) if again else None
        except FinishedError as error:
            if not quiet and peers.first():
                print(visible(error.with_flags))
            return
        if prepared is None:
            prepared = setup.prepare(config, source)
        show(run.name, prepared, stop, quiet=quiet, verbose=verbose)


def _resumed_or_started(config: Train) -> Run | None:
    """Prepares to resume the run in a config's directory; without a checkpoint,
    deletes its files and returns None.

    Raises:
      ConfigError: the run there has other flags, or another process uses it.
      FinishedError: it is finished, or trained without a checkpoint to continue from: a full disk
        or a kill may end a run between its trained variables and its last checkpoint.
    """
    from jaxrl_dist.run import checkpoint, files
    from jaxrl_dist.training import resuming

    path = pathlib.Path(str(config.run_dir))
    folders = [path, *files.members_of(path)]
    if peers.broadcast(any(map(checkpoint.saved, folders)), "whether a checkpoint is there"):
        return resuming.prepare_resume(config, path, {})
    if peers.broadcast(any(map(checkpoint.trained, folders)), "whether the run is trained"):
        raise FinishedError(
            f"{path} is trained, but has no checkpoint to continue from; evaluate it with "
            f"jaxrl-dist evaluate {path}"
        )
    if peers.first():
        files.abandon(path)
    return None


def show(name: str, run: Run, stop: signals.Stop, *, quiet: bool, verbose: bool) -> None:
    """Executes a run, and shows its progress; ``name`` is the algorithm's display name.

    Raises:
      Interrupted: a signal ended the run.
    """
    from jaxrl_dist.run.console import Display

    if stop():  # the signal arrived before the run began
        raise stop.interrupted()
    quiet = quiet or not peers.first()
    stop.last_words = partial(_continues_from, run)
    if (watch := failing.watch()) is not None:
        watch.advice = stop.last_words
    if not quiet:
        stop.notice = (
            "saving and stopping after this iteration; press Ctrl-C again after a second to quit "
            "immediately"
        )
    config = run.config
    display = Display(config.evaluation_episodes, quiet=quiet, verbose=verbose)
    reports = run.reports(display.evaluating, stop, display.saving)
    start_of_run = f", from {run.steps:,} {unit(config.clock)} on" if run.steps else ""
    display.print(f"{run.describe(name)}\nwriting {config.run_dir}{start_of_run}")
    rate = f"; a report comes every {run.members[0].config.report_interval:,} {unit(config.clock)}"
    with _watched(run, stop):
        last = _last(display.watch(reports, run.total_steps, rate), stop)
    stop.number = max(peers.all_gather(stop.number or 0, "signals")) or None
    undone = _undone(run, last)
    if stop() and undone:
        raise stop.interrupted(f"interrupted; {undone}")
    display.print("\n".join(_summary(run, last)))


def _watched(run: Run, stop: signals.Stop) -> contextlib.AbstractContextManager[None]:
    """Limits the time for which environments in this process may hold Python's lock,
    which stops all other limits.
    """
    source = run.job.source
    if source.is_pure or source.workers == "processes" or stop.unread < 0:
        return contextlib.nullcontext()
    advice = f"`{run.resume_command()}` continues from the last checkpoint"
    return watchdog.watching(source.timeout + HELD_SECONDS, stop.unread, stop, advice)


def _last(reports: Iterator[Report], stop: signals.Stop) -> Report:
    """Lets a run report until its end, and returns the last report."""
    try:
        for report in reports:
            last = report
    except OSError as error:
        if not stop() or error.errno != errno.EIO or error.filename:
            raise
        raise stop.interrupted() from None  # SIGHUP: the terminal has closed, and the run is saved
    return last


def _undone(run: Run, last: Report) -> str:
    """Says how to do what a stopped run has left undone; "": it has left nothing."""
    if last.ended_by is None:
        return f"`{run.resume_command()}` continues from {last.step} {unit(last.clock)}"
    evaluate = f"jaxrl-dist evaluate {shlex.quote(str(run.config.run_dir))}"
    if run.config.evaluation_episodes and not last.evaluation:
        return f"the run is trained and saved; evaluate it with `{evaluate}`"
    if run.config.judge == "evaluation" and not last.best_evaluation:
        return f"the run is trained and saved; evaluate it with `{evaluate} --checkpoint best`"
    return ""


def _summary(run: Run, last: Report) -> Iterator[str]:
    """Yields the lines that are shown at the end of a run."""
    from jaxrl_dist.run.console import evaluation_lines
    from jaxrl_dist.settings.members import is_population
    from jaxrl_dist.training.tables import table

    seconds = last.wall_time_s
    compiling = last.metrics["time/compile_s"] or 0.0
    rate = last.step / max(seconds - compiling, 1e-9)
    agents = "" if last.agent_steps is None else f" ({last.agent_steps:,} agent steps)"
    yield (
        f"{last.step:,} {unit(last.clock)}{agents} in {seconds - compiling:.1f} s "
        f"({rate:,.0f} a second), after {compiling:.1f} s of setting up and compiling"
    )
    if last.ended_by == "stop_at_return":
        yield f"ended early, by --stop-at-return {run.config.stop_at_return:g}"
    if last.evaluation:
        yield evaluation_lines(last.evaluation, "last policy" if last.best_evaluation else "")
    if last.best_evaluation:
        step = last.best_evaluation.get("checkpoint")
        name = "best checkpoints"
        if step is not None:
            name = f"best checkpoint ({step:,} {unit(last.clock)})"
        yield evaluation_lines(last.best_evaluation, f"{name} by evaluation, in fresh episodes")
    recorder = run.members[0].recorder
    if recorder is not None and recorder.place.path.exists():
        yield f"wrote {recorder.place.path}"
    if is_population(run.config):
        yield table(run.rows, run.config.evaluation_policy)


def _continues_from(run: Run) -> str:
    """Says where a run continues if its process ends immediately."""
    from jaxrl_dist.run import checkpoint, files

    path = pathlib.Path(str(run.config.run_dir))
    steps = list[int]()

    def read() -> None:
        for folder in (path, *files.members_of(path)):
            steps.extend(map(checkpoint.number_of, checkpoint.saved(folder)[:1]))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(1.0)  # its disk may hang, and must not keep the process
    if steps:
        newest = f"{max(steps)} {unit(run.config.clock)}"
        return f"nothing is saved after {newest}; `{run.resume_command()}` continues from there"
    if thread.is_alive():
        return ""
    return "the run has saved no checkpoint"
