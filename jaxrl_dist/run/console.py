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
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

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
    """Divides an evaluation: what is of all episodes goes under "",
    and of each of several policies under its name.
    """
    names = [
        name.removesuffix("/cut")
        for name in evaluation
        if name.endswith("/cut") and name.count("/") == 1
    ]
    policies = [name for name in names if f"{name}/episodes" in evaluation]
    parts: dict[str, dict[str, float | int]] = {policy: {} for policy in ("", *policies)}
    for name, value in evaluation.items():
        policy, _, metric = name.partition("/")
        parts[policy if policy in policies else ""][metric if policy in policies else name] = value
    return parts


def played(evaluation: Mapping[str, float | int], name: str = "") -> str:
    """Formats an evaluation as one line, or with several policies as one line each;
    ``name`` says of what it is.
    """
    whole, *policies = of_each_policy(evaluation).items()
    lines = [
        (", ".join(filter(None, (name, policy))), numbers)
        for policy, numbers in policies or [("", whole[1])]
    ]
    return "\n".join(f"{head}: {_played(x)}" if head else _played(x) for head, x in lines)


def _played(numbers: Mapping[str, float | int]) -> str:
    """Formats the evaluation of one policy."""
    count = numbers["episodes"]
    cut = numbers["cut"]
    if not count:
        return "no episode has begun"
    kind = "sampled" if numbers.get("sampled") else "greedy"
    if count == 1:
        value = ""
        about = f"1 {kind} episode{', cut before it had ended' if cut else ''}"
    else:
        value = f" +- {numbers['return_std']:.4g}"
        about = f"mean and standard deviation of {count} {kind} episodes"
        about += f", {cut} of them cut before they had ended" if cut else ""
    if "members" in numbers:
        about += f"; {numbers['members_return_std']:.4g} between the means of the {numbers['members']} members"
    info = "".join(
        f", {name} {value:.4g}" for name, value in numbers.items() if name.startswith("info/")
    )
    if "normalized_score" in numbers:
        ends = f"random {numbers['random_return']:.4g} is 0 and expert {numbers['expert_return']:.4g} is 100"
        info += f", normalised {numbers['normalized_score']:.4g}, where {ends}"
    return f"return {numbers['return_mean']:.4g}{value} ({about}){info}"


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
            text = f"the output cannot be written ({error.strerror}); this continues without showing more"
            warnings.warn(text, FileWarning, stacklevel=2)

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
                shown = -ROW_SECONDS
                for report in reports:
                    status = self._status(report)
                    last = report.ended_by is not None
                    description = "trained" if last else "training"
                    completed = min(report.step, total_steps)
                    self.live.update(
                        training,
                        description=description,
                        total=total_steps,
                        completed=completed,
                        status=status,
                    )
                    if (
                        last
                        or self._verbose
                        or report.evaluation
                        or time.monotonic() - shown > ROW_SECONDS
                    ):
                        shown = time.monotonic()
                        self._row(report, total_steps)
                    yield report
        except KeyboardInterrupt:  # as in a notebook; the command line has handlers of its own
            _close(reports)
            self.print(
                "interrupted: a run with a run_dir is saved, and jaxrl_dist.resume(run_dir) continues it"
            )
            raise
        finally:
            _close(reports)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Says without bars when a program that took long has been compiled;
        JAX tells the seconds of each.
        """

        def say(event: str, duration_secs: float, **_: Any) -> None:
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
        widths = [
            max(len(title), len(f"{total_steps:,}") if title.endswith((" steps", "updates")) else 9)
            for title in cells
        ]
        if self._rows % HEAD_ROWS == 0:
            self.print(table.line(cells, widths))
        self._rows += 1
        if report.evaluation or not self._evaluated:
            evaluated = self._evaluated
        else:
            evaluated = "  evaluation -"
        self.print(f"{table.line(cells.values(), widths)}{evaluated}{_restarts(report)}")
        if self._verbose:
            self.print(
                "  "
                + "  ".join(
                    f"{name} {table.number(value)}" for name, value in report.metrics.items()
                )
            )

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
        self.print(
            f"saving{' and evaluating' if self._episodes else ''}: {counted(members, 'member')}"
        )

    def _status(self, report: Report) -> str:
        rate = report.metrics.get(f"time/{report.clock}_per_second") or 0.0
        # the last value is shown until another episode ends
        for name, title in table.progress(report.metrics).items():
            value = report.metrics.get(name)
            if value is None:
                self._progress[title] = self._progress.get(title)
            else:
                self._progress[title] = value
        if report.evaluation:
            whole, *policies = of_each_policy(report.evaluation).items()
            means = {policy: numbers.get("return_mean") for policy, numbers in policies or [whole]}
            values = (f"{policy} {x:.4g}".lstrip() for policy, x in means.items() if x is not None)
            self._evaluated = f"  evaluation {', '.join(values) or 'without an episode'}"
        # the newest evaluation, like the return
        rest = f"{_members(report)}{self._evaluated}{_restarts(report)}"
        done = f"{report.step:,} {unit(report.clock)}"
        done += f" of {len(report.members)} members" if report.members else ""
        progress = ", ".join(f"{title} {table.number(x)}" for title, x in self._progress.items())
        return visible(f"{done}  {rate:,.0f}/s  {progress}{rest}")


def _restarts(report: Report) -> str:
    restarts = int(report.metrics.get("async/restarts") or 0)
    if restarts:
        return f"  {counted(restarts, 'restart')}"
    return ""


def _members(report: Report) -> str:
    """Formats a population's best return, interquartile mean and number of members that are
    done.
    """
    best, middle = (report.metrics.get(f"population/return_{name}") for name in ("best", "iqm"))
    if not report.members or best is None or middle is None:
        return ""
    return f"  best {best:.4g}  iqm {middle:.4g}  {report.metrics['population/done']:.0f} done"


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
                "plot=True draws in a notebook, and IPython is not installed: pip install ipython"
            ) from None
        reports = _plotted(reports, output)
    return Display(0, verbose=verbose).watch(reports, total_steps)


def _plotted(reports: Iterable[Report], output: Any) -> Iterator[Report]:
    """Draws the reports so far into one output, which each drawing replaces."""
    from matplotlib.figure import Figure  # not pyplot: its backend belongs to the notebook

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(ylabel="episode return")
    (trained,) = axes.plot([], [], label="episode/recent_return")
    (evaluated,) = axes.plot([], [], "o", label="evaluation")
    handle = None
    drawn = -PLOT_SECONDS
    points: dict[Any, tuple[list[int], list[float]]] = {trained: ([], []), evaluated: ([], [])}
    try:
        for report in reports:
            axes.set_xlabel(unit(report.clock).replace("env", "environment"))
            returns = (
                report.metrics.get("episode/recent_return"),
                (report.evaluation or {}).get("return_mean"),
            )
            for line, value in zip(points, returns, strict=True):
                if value is not None:
                    points[line][0].append(report.step)
                    points[line][1].append(value)
                    line.set_data(*points[line])
            if report.ended_by is not None or time.monotonic() - drawn > PLOT_SECONDS:
                drawn = time.monotonic()
                if any(points[evaluated]):
                    shown = [trained, evaluated]
                else:
                    shown = [trained]
                axes.legend(handles=shown, loc="best", fontsize="small")
                axes.relim()
                axes.autoscale_view()
                drawing = io.BytesIO()
                # IPython draws a figure itself only once pyplot is in use
                figure.savefig(drawing, format="png")
                picture = {"image/png": base64.b64encode(drawing.getvalue()).decode()}
                if handle is None:
                    handle = output(picture, raw=True, display_id=True)
                else:
                    handle.update(picture, raw=True)
            yield report
    finally:
        _close(reports)
