"""Shows a run's progress: on a terminal, in a notebook, or in any other Python code."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from jaxrl_dist.checks import counted, unit
from jaxrl_dist.errors import ConfigError, FileWarning, visible
from jaxrl_dist.run import table
from jaxrl_dist.types import Report

ROW_SECONDS = 2.0
"""Minimum seconds between two rows of the table."""
PLOT_SECONDS = 2.0
"""Minimum seconds between two drawings of the plot."""
HEAD_ROWS = 30
"""Rows of the table after which its head is shown again."""
COMPILE_SECONDS = 10.0
"""Seconds after which the compilation of a program gets a line of its own."""
_COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's event at the end of a compilation."""


def discard_output() -> None:
    """Redirects stdout to the null device after it could not be written:
    Python flushes it again on exit.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def of_each_policy(evaluation: Mapping[str, float | int]) -> dict[str, dict[str, float | int]]:
    """Divides an evaluation by policy; the numbers of all episodes have the name ``""``."""
    cut = [name.removesuffix("/cut") for name in evaluation if name.endswith("/cut")]
    policies = [name for name in cut if "/" not in name and f"{name}/episodes" in evaluation]
    by_policy: dict[str, dict[str, float | int]] = {policy: {} for policy in ("", *policies)}
    for name, value in evaluation.items():
        policy, _, own_name = name.partition("/")
        if policy in policies:
            by_policy[policy][own_name] = value
        else:
            by_policy[""][name] = value
    return by_policy


def evaluation_lines(evaluation: Mapping[str, float | int], name: str = "") -> str:
    """Formats an evaluation as one line, or as one line for each of several policies; ``name``
    comes before it.
    """
    whole, *policies = of_each_policy(evaluation).items()
    lines = []
    for policy, numbers in policies or [whole]:
        head = ", ".join(filter(None, (name, policy)))
        line = _evaluation_line(numbers)
        lines.append(f"{head}: {line}" if head else line)
    return "\n".join(lines)


def _evaluation_line(numbers: Mapping[str, float | int]) -> str:
    """Formats the evaluation of one policy."""
    count = numbers["episodes"]
    cut = numbers["cut"]
    if not count:
        return "no episode has started"
    kind = "sampled" if numbers.get("sampled") else "greedy"
    value = f"{numbers['return_mean']:.4g}"
    if count == 1:
        about = f"1 {kind} episode"
        if cut:
            about += ", cut before its end"
    else:
        value += f" +- {numbers['return_std']:.4g}"
        about = f"mean and standard deviation of {count} {kind} episodes"
        if cut:
            about += f", {cut} of them cut before their end"
    if "members" in numbers:
        about += (
            f"; {numbers['members_return_std']:.4g} between the means of the "
            f"{numbers['members']} members"
        )
    line = f"return {value} ({about})"
    for name, x in numbers.items():
        if name.startswith("info/"):
            line += f", {name} {x:.4g}"
    if "normalized_score" in numbers:
        line += (
            f", normalised {numbers['normalized_score']:.4g}, where random "
            f"{numbers['random_return']:.4g} is 0 and expert {numbers['expert_return']:.4g} is 100"
        )
    return line


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise  # the command line handles it; rich would exit here


class Display:
    """Shows the progress of training and evaluation: bars on a terminal,
    plain lines elsewhere, nothing if quiet.
    """

    def __init__(self, episodes: int, *, quiet: bool = False, verbose: bool = False) -> None:
        """Args:
        episodes: number of episodes of an evaluation.
        verbose: whether every report is shown, with all its metrics.
        """
        self.console = _Console(
            quiet=quiet, markup=False, emoji=False, highlight=False, soft_wrap=True
        )
        self._episodes = episodes
        self._verbose = verbose
        self._rows = 0
        self._row_shown = 0.0
        """When the last row was shown."""
        self._progress: dict[str, float | None] = {}
        self._evaluated = ""
        self.live = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
            expand=True,
        )

    def print(self, text: str) -> None:
        """Prints lines. If the output can no longer be written,
        warns once and discards all later lines.
        """
        try:
            self.console.print(visible(text))
        except OSError as error:
            discard_output()
            warnings.warn(
                f"the output cannot be written ({error.strerror}); the command continues without "
                "output",
                FileWarning,
                stacklevel=2,
            )

    def watch(
        self, reports: Iterable[Report], total_steps: int, rate: str = ""
    ) -> Iterator[Report]:
        """Shows each report of a training run and passes it on; without bars,
        begins with their ``rate`` in words.

        Closes ``reports`` however it ends.
        """
        # Without a total the bar pulses: XLA does not tell how long it will compile.
        training = self.live.add_task("compiling", total=None, status="")
        try:
            with self.live, self._compiling():
                if not self.console.is_terminal:
                    self.print(f"compiling{rate}")
                self._row_shown = -ROW_SECONDS
                for report in reports:
                    self._show(training, report, total_steps)
                    yield report
        except KeyboardInterrupt:  # as in a notebook; the command line has handlers of its own
            _close(reports)
            self.print(
                "interrupted; if the run has a run_dir, it is saved, and "
                "jaxrl_dist.resume(run_dir) continues it"
            )
            raise
        finally:
            _close(reports)

    def _show(self, training: TaskID, report: Report, total_steps: int) -> None:
        """Updates the bar, and adds a row to the table if it is time for one."""
        last = report.ended_by is not None
        self.live.update(
            training,
            description="trained" if last else "training",
            total=total_steps,
            completed=min(report.step, total_steps),
            status=self._status(report),
        )
        due = time.monotonic() - self._row_shown > ROW_SECONDS
        if last or self._verbose or report.evaluation or due:
            self._row_shown = time.monotonic()
            self._row(report, total_steps)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Says without bars when a program that took long has been compiled;
        JAX tells the seconds of each.
        """

        def say(event: str, duration_secs: float, **_: object) -> None:
            if event == _COMPILED and duration_secs >= COMPILE_SECONDS:
                self.print(f"compiled a program in {table.duration(duration_secs)}")

        if self.console.quiet or self.console.is_terminal:
            yield
            return
        import jax  # is slow, and trains already

        jax.monitoring.register_event_duration_secs_listener(say)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # other code has cleared JAX's listeners
                jax.monitoring.unregister_event_duration_listener(say)

    def _row(self, report: Report, total_steps: int) -> None:
        """Adds a row to the table of reports."""
        cells = table.cells(report, total_steps)
        widths = [_width(title, total_steps) for title in cells]
        if self._rows % HEAD_ROWS == 0:
            self.print(table.line(cells, widths))
        self._rows += 1
        evaluated = self._evaluated
        if evaluated and not report.evaluation:
            evaluated = "  evaluation -"
        self.print(f"{table.line(cells.values(), widths)}{evaluated}{_restarts(report)}")
        if self._verbose:
            metrics = (f"  {name} {table.number(x)}" for name, x in report.metrics.items())
            self.print("".join(metrics))

    def evaluating(self, done: int) -> None:
        """Shows how many evaluation episodes are done."""
        if done == 0:
            for task in self.live.tasks[:1]:  # the last report arrives only after its evaluation
                self.live.update(
                    task.id, description="trained", total=task.total or 1, completed=task.total or 1
                )
            self._evaluation = self.live.add_task("evaluating", total=self._episodes, status="")
            if not self.console.is_terminal:
                self.print(f"evaluating: {counted(self._episodes, 'episode')}")
        self.live.update(self._evaluation, completed=done, status=f"{done:,} episodes")

    def saving(self, members: int) -> None:
        """Says that so many members are trained, and now saved and evaluated one after the
        other.
        """
        doing = "saving and evaluating" if self._episodes else "saving"
        self.print(f"{doing}: {counted(members, 'member')}")

    def _status(self, report: Report) -> str:
        """Returns the numbers beside the bar."""
        self._take(report)
        rate = report.metrics.get(f"time/{report.clock}_per_second") or 0.0
        done = f"{report.step:,} {unit(report.clock)}"
        if report.members:
            done += f" of {len(report.members)} members"
        progress = ", ".join(f"{title} {table.number(x)}" for title, x in self._progress.items())
        rest = f"{_members(report)}{self._evaluated}{_restarts(report)}"
        return visible(f"{done}  {rate:,.0f}/s  {progress}{rest}")

    def _take(self, report: Report) -> None:
        """Takes the newest returns: each is shown until there is another one."""
        for name, title in table.progress(report.metrics).items():
            value = report.metrics.get(name)
            if value is not None or title not in self._progress:
                self._progress[title] = value
        if report.evaluation:
            whole, *policies = of_each_policy(report.evaluation).items()
            means = {policy: numbers.get("return_mean") for policy, numbers in policies or [whole]}
            values = (f"{policy} {x:.4g}".lstrip() for policy, x in means.items() if x is not None)
            self._evaluated = f"  evaluation {', '.join(values) or 'without an episode'}"


def _width(title: str, total_steps: int) -> int:
    """Returns the width of a column of the table."""
    numbers = len(f"{total_steps:,}") if title.endswith((" steps", "updates")) else 9
    return max(len(title), numbers)


def _restarts(report: Report) -> str:
    restarts = int(report.metrics.get("async/restarts") or 0)
    if restarts:
        return f"  {counted(restarts, 'restart')}"
    return ""


def _members(report: Report) -> str:
    """Formats a population's best return, interquartile mean and number of members that are
    done.
    """
    best = report.metrics.get("population/return_best")
    middle = report.metrics.get("population/return_iqm")
    if not report.members or best is None or middle is None:
        return ""
    middle_name = "iqm"
    if len(report.members) < table.TRIMMED:
        middle_name = "mean"
    done = report.metrics["population/done"]
    return f"  best {best:.4g}  {middle_name} {middle:.4g}  {done:.0f} done"


def _close(reports: Iterable[Report]) -> None:
    """Closes reports, so that their run saves its state: a notebook keeps an error,
    whose frames would hold them.
    """
    if (close := getattr(reports, "close", None)) is not None:
        close()


def display(
    reports: Iterable[Report], total_steps: int, *, plot: bool = False, verbose: bool = False
) -> Iterator[Report]:
    """Shows the bar and the table of the command line, and passes each report on.

        for report in jaxrl_dist.display(jaxrl_dist.train(config), config.total):
            ...

    However the loop ends, also by an interrupt while it draws, ``reports`` is closed, and a run
    with a ``run_dir`` saves its state.

    Args:
      total_steps: ``config.total`` of the run; for a population, the sum over its members.
      plot: also draws the returns of training and evaluations against env steps,
        every few seconds. Needs a notebook.
      verbose: shows every report, with all its metrics.

    Raises:
      ConfigError: ``plot`` is True, and there is no IPython.
    """
    if plot:
        try:
            from IPython.display import display as output
        except ImportError:
            raise ConfigError(
                "plot=True draws in a notebook, but IPython is not installed: pip install ipython"
            ) from None
        reports = _plotted(reports, output)
    return Display(0, verbose=verbose).watch(reports, total_steps)


def _plotted(reports: Iterable[Report], output: Any) -> Iterator[Report]:
    """Draws the reports so far into one output, which each drawing replaces."""
    plot = _Plot(output)
    drawn = -PLOT_SECONDS
    try:
        for report in reports:
            plot.add(report)
            if report.ended_by is not None or time.monotonic() - drawn > PLOT_SECONDS:
                drawn = time.monotonic()
                plot.draw()
            yield report
    finally:
        _close(reports)


class _Plot:
    """The returns of training and of evaluations, drawn into one output of a notebook."""

    def __init__(self, output: Any) -> None:
        """``output`` is ``IPython.display.display``."""
        from matplotlib.figure import Figure  # not pyplot: its backend belongs to the notebook

        self._output = output
        self._handle: Any = None
        self._figure = Figure(figsize=(6, 3), layout="constrained")
        self._axes = self._figure.add_subplot(ylabel="episode return")
        (self._trained,) = self._axes.plot([], [], label="episode/recent_return")
        (self._evaluated,) = self._axes.plot([], [], "o", label="evaluation")
        self._points: dict[Any, tuple[list[int], list[float]]] = {
            self._trained: ([], []),
            self._evaluated: ([], []),
        }

    def add(self, report: Report) -> None:
        """Adds the returns of a report."""
        self._axes.set_xlabel(unit(report.clock).replace("env", "environment"))
        evaluation = report.evaluation or {}
        values = report.metrics.get("episode/recent_return"), evaluation.get("return_mean")
        for line, value in zip(self._points, values, strict=True):
            if value is not None:
                steps, returns = self._points[line]
                steps.append(report.step)
                returns.append(value)
                line.set_data(steps, returns)

    def draw(self) -> None:
        """Draws the returns so far."""
        lines = [self._trained]
        if any(self._points[self._evaluated]):
            lines.append(self._evaluated)
        self._axes.legend(handles=lines, loc="best", fontsize="small")
        self._axes.relim()
        self._axes.autoscale_view()
        drawing = io.BytesIO()
        # IPython draws a figure itself only once pyplot is in use
        self._figure.savefig(drawing, format="png")
        picture = {"image/png": base64.b64encode(drawing.getvalue()).decode()}
        if self._handle is None:
            self._handle = self._output(picture, raw=True, display_id=True)
        else:
            self._handle.update(picture, raw=True)
