"""Shows a run's progress in a notebook, or in any other Python code."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run import console
from jaxrl_dist.types import Report

PLOT_SECONDS = 2.0
"""Minimum seconds between two drawings of the plot."""


def display(
    reports: Iterable[Report], total_env_steps: int, *, plot: bool = False, verbose: bool = False
) -> Iterator[Report]:
    """Shows the bar and the table of the command line, and passes each report on.

        for report in jaxrl_dist.display(jaxrl_dist.train(config), config.total_env_steps):
            ...

    Args:
      total_env_steps: that of the run; for a population, the sum over its members.
      plot: also draws the returns of training and evaluations against env steps, every few seconds. Needs a
        notebook.
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
    return console.Display(0, verbose=verbose).watch(reports, total_env_steps)


def _plotted(reports: Iterable[Report], output: Any) -> Iterator[Report]:
    """Draws the reports so far into one output, which each drawing replaces."""
    from matplotlib.figure import Figure  # not pyplot: its backend belongs to the notebook

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="environment steps", ylabel="episode return")
    (trained,), (evaluated,) = axes.plot([], [], label="training"), axes.plot([], [], "o", label="evaluation")
    handle, drawn = None, -PLOT_SECONDS
    points: dict[Any, tuple[list[int], list[float]]] = {trained: ([], []), evaluated: ([], [])}
    for report in reports:
        returns = report.metrics.get("episode/return"), (report.evaluation or {}).get("return_mean")
        for line, value in zip(points, returns, strict=True):
            if value is not None:
                points[line][0].append(report.env_steps)
                points[line][1].append(value)
                line.set_data(*points[line])
        if report.ended_by is not None or time.monotonic() - drawn > PLOT_SECONDS:
            drawn = time.monotonic()
            shown = [trained, evaluated] if any(points[evaluated]) else [trained]
            axes.legend(handles=shown, loc="best", fontsize="small")
            axes.relim()
            axes.autoscale_view()
            if handle is None:
                handle = output(figure, display_id=True)
            else:
                handle.update(figure)
        yield report
