"""Draws learning curves, performance profiles and probabilities of improvement."""

from __future__ import annotations

import itertools
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase

# not pyplot: its backend belongs to the caller, such as a notebook
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from jaxrl_dist.checks import counted
from jaxrl_dist.commands.plot import statistics
from jaxrl_dist.commands.plot.reading import Curve, Group, middle
from jaxrl_dist.commands.plot.tables import env_names
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.run.storage import check_place, replacing

COLORS = ("#0072B2", "#E69F00", "#000000", "#56B4E9", "#D55E00", "#009E73", "#CC79A7")
"""The palette of Okabe and Ito (2008), which colour-blind readers can tell apart,
without its yellow, pale on paper.

The first four are the furthest apart under any colour blindness."""
DASHES = ("-", "--", ":", "-.")
"""Line styles; the next one is used once all colours are."""
INCHES = {"one": 3.3, "two": 6.9}
"""Widths for one and two columns of a page with two columns."""
TAUS = 101
"""Scores at which a performance profile is computed."""
STYLE: dict[Any, Any] = {
    "pdf.fonttype": 42,  # TrueType: publishers refuse matplotlib's Type 3 fonts
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jaxrl_dist",  # the same file each time
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
}
Scores: TypeAlias = Mapping[str, Mapping[str, np.ndarray]]
"""By label and environment, the final scores ``[N]`` of N runs."""
BAND_SEEDS = 5
"""Fewest seeds with an interval; a bootstrap of fewer spans their lowest and highest."""
_LETTERS_PER_INCH = 12  # of a legend
_LABEL_WIDTH = 400  # characters: a config.json from elsewhere may hold any text


def styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the colour and dashes of each label, the same in all panels."""
    looks = (
        {"color": color, "linestyle": dashes}
        for dashes in itertools.cycle(DASHES)
        for color in COLORS
    )
    return dict(zip(dict.fromkeys(labels), looks, strict=False))


def curves(
    groups: Sequence[Group], lines: Mapping[str, Curve], label: str, axis: str, width: str
) -> Figure:
    """Draws a panel for each environment, with the curves of its groups.

    Args:
      lines: the curves of all runs.
      label: label of the vertical axis.
      axis: label of the horizontal axis.
    """
    style = styles([group.label for group in groups])
    names = env_names(groups)
    fig, axes = figure(width, len(names))
    panels = dict(zip(names, axes, strict=True))
    seeds = dict.fromkeys(style, 0)
    for group in groups:
        band(panels[group.env], [lines[run] for run in group.runs], **style[group.label])
        seeds[group.label] = max(seeds[group.label], len(group.runs))
    for env, ax in panels.items():
        ax.set_xlabel(axis)
        ax.set_title(names[env], fontsize=9, parse_math=False)
    axes[0].set_ylabel(label.replace("/", " "), parse_math=False)
    counts = {label: f" ({counted(count, 'seed')})" for label, count in seeds.items()}
    _legend(fig, style, width, counts)
    return fig


def band(ax: Axes, lines: Sequence[Curve], color: str, linestyle: str = "-") -> None:
    """Draws the curves of seeds, and if there are several, their interquartile mean, with its
    interval from ``BAND_SEEDS`` seeds on. The mean is dotted where only some of the curves have
    values.
    """
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if len(lines) == 1:
        ax.plot(lines[0].x, lines[0].y, color=color, linestyle=linestyle, linewidth=1.4)
        return
    for curve in lines:
        ax.plot(curve.x, curve.y, color=color, linewidth=0.5, alpha=0.4)
    line = middle(lines)
    whole = line.curves == len(lines)
    of_all = np.where(whole, line.y, np.nan)
    of_some = np.where(whole, np.nan, line.y)
    ax.plot(line.x, of_all, color=color, linestyle=linestyle, linewidth=1.8)
    ax.plot(line.x, of_some, color=color, linestyle=(0, (1, 1)), linewidth=1.8)
    if len(lines) >= BAND_SEEDS:
        ax.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)


def profiles(scores: Scores, score: str, width: str) -> Figure:
    """Draws the performance profile of each label, with its interval; ``score``:
    what the scores are.
    """
    style = styles(list(scores))
    values = np.concatenate([runs for by_env in scores.values() for runs in by_env.values()])
    taus = np.linspace(values.min(), values.max(), TAUS)
    fig, (ax,) = figure(width, 1)
    for label, by_env in scores.items():
        strata = list(by_env.values())
        statistic = statistics.profile(taus)
        low, high = statistics.interval(strata, statistic)
        ax.plot(taus, statistic(strata), linewidth=1.8, **style[label])
        ax.fill_between(taus, low, high, color=style[label]["color"], alpha=0.2, linewidth=0)
    ax.set_xlabel(_axis_of(scores, score), parse_math=False)
    ax.set_ylabel("fraction of runs above")
    ax.set_ylim(-0.03, 1.03)
    _legend(fig, style, width)
    return fig


def improvements(scores: Scores, score: str, width: str) -> Figure:
    """Draws the probability of improvement of each pair of labels that share an environment,
    with its interval.

    Raises:
      ConfigError: no two groups of runs share an environment.
    """
    pairs = {}
    for first, second in itertools.combinations(scores, 2):
        envs = [env for env in scores[first] if env in scores[second]]
        if envs:
            strata = [scores[label][env] for label in (first, second) for env in envs]
            pairs[f"{first} > {second}"] = strata
    if not pairs:
        raise ConfigError(
            "--kind improvement compares groups of runs on the same environment, "
            "but there is only one; name runs of another group"
        )
    wrapped = 36 if width == "two" else 18
    fig, (ax,) = figure(width, 1, height=0.9 + 0.45 * len(pairs))
    for y, (pair, strata) in enumerate(pairs.items()):
        bounds = statistics.interval(strata, statistics.improvement, statistics.NUMBER)
        value = statistics.improvement(strata)
        ax.plot(bounds, [y, y], color=COLORS[0], linewidth=6, alpha=0.3, solid_capstyle="butt")
        ax.plot([value], [y], color=COLORS[0], marker="|", markersize=12, markeredgewidth=2)
        ax.text(
            -0.02,
            y,
            textwrap.fill(pair[:_LABEL_WIDTH], wrapped),
            transform=ax.get_yaxis_transform(),
            ha="right",
            va="center",
            parse_math=False,
        )
    ax.axvline(0.5, color="0.4", linewidth=0.8, linestyle="--")
    ax.set_yticks([])
    ax.set_ylim(len(pairs) - 0.5, -0.5)
    ax.set_xlim(-0.02, 1.02)
    ax.set_xlabel(f"probability of a higher {_axis_of(scores, score)}", parse_math=False)
    return fig


def histogram(values: np.ndarray, axis: str, counts: str) -> Figure:
    """Draws how often values fall into each of some ranges."""
    fig, (ax,) = figure("one", 1)
    ax.hist(values, bins="auto", color=COLORS[0])
    ax.set_xlabel(axis)
    ax.set_ylabel(counts)
    return fig


def names_picture(out: str | pathlib.Path) -> bool:
    """Returns whether the extension names a format of pictures."""
    return pathlib.Path(out).suffix[1:].lower() in FigureCanvasBase.get_supported_filetypes()


def check_picture(out: pathlib.Path) -> None:
    """Checks that a picture can be written there.

    Raises:
      ConfigError: the format is unknown, or the file's directory is missing or read-only.
    """
    if not names_picture(out) or out.suffix.lower() == ".pgf":  # which needs TeX
        raise ConfigError(
            f"{out} cannot be written: its extension names no format of pictures; "
            ".png, .svg and .pdf do"
        )
    check_place(out)


def save(fig: Figure, out: pathlib.Path) -> None:
    """Writes the picture; the extension sets its format.

    Raises:
      ConfigError: as ``check_picture``.
      OSError: the file cannot be written; an older file stays unchanged.
    """
    check_picture(out)
    kind = out.suffix[1:].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with matplotlib.rc_context(STYLE), replacing(out) as partial:
        fig.savefig(partial, format=kind, dpi=200, metadata=undated)


def _axis_of(scores: Scores, score: str) -> str:
    envs = {env for by_env in scores.values() for env in by_env}
    return f"{score}, scaled" if len(envs) > 1 else score


def figure(
    width: str, panels: int, *, columns: int | None = None, height: float | None = None
) -> tuple[Figure, list[Axes]]:
    """Returns a figure with axes for so many panels; ``height``: inches of a single panel."""
    inches = INCHES[width]
    columns = columns or min(panels, 3 if width == "two" else 1)
    rows = -(-panels // columns)
    height = height or {1: 0.6, 2: 0.38, 3: 0.3}[columns] * inches
    font_size = 8 if width == "one" or columns > 1 else 10
    with matplotlib.rc_context({**STYLE, "font.size": font_size}):
        fig = Figure(figsize=(inches, rows * height), layout="constrained")
        axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[panels:]:
        ax.remove()
    return fig, axes[:panels]


def _legend(
    fig: Figure, style: Mapping[str, Mapping[str, Any]], width: str, more: Mapping[str, str] = {}
) -> None:
    """Adds a legend below the panels: the labels, with ``more`` behind them.

    The figure grows by its lines, so the panels keep their size.
    """
    letters = int(INCHES[width] * _LETTERS_PER_INCH)
    labels = [textwrap.fill(label[:_LABEL_WIDTH] + more.get(label, ""), letters) for label in style]
    columns = max(1, letters // (max(map(len, labels)) + 8))
    lines = sum(label.count("\n") + 1 for label in labels) / columns + 1
    fig.set_figheight(fig.get_figheight() + 0.17 * lines)
    handles = [Line2D([], [], linewidth=1.8, **style[label]) for label in style]
    legend = fig.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
