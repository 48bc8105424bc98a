"""Draws docs/overview.png and the pictures of docs/learning that compare algorithms,
from the measurements in docs/.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxrl_dist.commands.plot import drawing
from jaxrl_dist.commands.plot.reading import Curve

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PANELS = {
    "ppo-cartpole": "PPO on CartPole",
    "sac-pendulum": "SAC on Pendulum",
    "ppo-breakout-cnn": "PPO on Breakout",
}
"""Entries of docs/learning/results.json whose curves are drawn, and their titles."""
PEERS = {
    ("ppo CartPole-v1 4", "rejax"): "PPO, 4 CartPoles",
    ("ppo CartPole-v1 2048", "rejax"): "PPO, 2,048 CartPoles",
    ("dqn CartPole-v1 10", "rejax"): "DQN, CartPole",
    ("sac Pendulum-v1", "rejax"): "SAC, Pendulum",
    ("impala Pong-v5", "Sample Factory"): "IMPALA, Pong",
}
"""Rows of docs/speed/results.json, by the run and the peer, and what they train."""


def curves(entry: dict[str, Any]) -> list[Curve]:
    """Returns the curves of an entry of results.json: 50 returns at even steps of a run."""
    found = []
    for values in entry["curves"]:
        there = np.array([value is not None for value in values])
        x = np.linspace(0, entry["steps"], len(values) + 1)[1:]
        found.append(
            Curve(x[there], np.array([value for value in values if value is not None], float))
        )
    return found


def rates(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Returns the median over rounds of our env steps per second divided by a peer's,
    for each of ``PEERS``.
    """
    found = {}
    for (run, peer), title in PEERS.items():
        ratios = [sides["jaxrl_dist"]["rate"] / sides[peer]["rate"] for sides in rows[run]]
        found[f"{title} ({peer})"] = statistics.median(ratios)
    return found


def draw(out: pathlib.Path) -> None:
    """Draws the picture."""
    results = json.loads((DOCS / "learning" / "results.json").read_text(encoding="utf-8"))
    with matplotlib.rc_context({**drawing.STYLE, "font.size": 7}):
        fig = Figure(figsize=(4.2, 3.2), layout="constrained")
        above, below = fig.subfigures(2, 1, squeeze=False, height_ratios=(1.25, 1)).flat
        axes = above.subplots(1, len(PANELS))
        speed = below.subplots()
    for ax, (name, title) in zip(axes, PANELS.items(), strict=True):
        lines = curves(results[name])
        drawing.band(ax, lines, drawing.COLORS[0])
        ax.set_title(f"{title}\n{len(lines)} seeds", fontsize=7)
        ax.locator_params(axis="x", nbins=3)
    axes[0].set_ylabel("episode return")
    above.supxlabel("environment steps", fontsize=7)
    speeds = rates(
        json.loads((DOCS / "speed" / "results.json").read_text(encoding="utf-8"))["rows"]
    )
    speed.barh(list(speeds), list(speeds.values()), color=drawing.COLORS[0], height=0.6)
    for row, ratio in enumerate(speeds.values()):  # at the left, where no line crosses it
        speed.text(0.04, row, f"{ratio:.2f}", color="white", va="center", fontsize=7)
    speed.axvline(1, color="0.4", linewidth=0.8, linestyle="--")
    speed.invert_yaxis()
    below.suptitle("Env steps per second, as a multiple of the library in parentheses", fontsize=7)
    drawing.save(fig, out)


def draw_ppo_es(out: pathlib.Path) -> None:
    """Draws the results of scripts/ppo_es.py: the returns of PPO-ES and of PPO,
    by env steps of all members.
    """
    found = json.loads((DOCS / "learning" / "ppo-es.json").read_text(encoding="utf-8"))
    fig, (ax,) = drawing.figure("one", 1, height=2.3)
    for color, (name, seeds) in zip(drawing.COLORS, found.items(), strict=False):
        lines = [
            np.array([point for point in seed if point[1] is not None], float).T for seed in seeds
        ]
        drawing.band(ax, [Curve(x, y) for x, y in lines], color)
        ax.plot([], color=color, label=name)
    _legend(fig, ax)
    ax.set_title(f"Acrobot, {len(seeds)} seeds", fontsize=8)
    ax.set_xlabel("environment steps of all members")
    ax.set_ylabel("episode return")
    drawing.save(fig, out)


def draw_connect_four(out: pathlib.Path) -> None:
    """Draws the judgements of benchmarks/planning.py:
    games won by the steps of the simulator in training.
    """
    found = json.loads((DOCS / "learning" / "connect-four.json").read_text(encoding="utf-8"))
    fig, (ax,) = drawing.figure("one", 1, height=2.3)
    for color, (name, points) in zip(drawing.COLORS, found.items(), strict=False):
        ax.plot(*zip(*points, strict=True), color=color, marker=".", label=name)
    _legend(fig, ax)
    ax.set_title("Connect Four against a search of two moves", fontsize=8)
    ax.set_xscale("log")
    ax.set_xlabel("simulator steps in training, with those of searches")
    ax.set_ylabel("games won of 200")
    drawing.save(fig, out)


def draw_muzero_dqn(out: pathlib.Path) -> None:
    """Draws the training returns of MuZero beside those of DQN,
    for as many env steps as MuZero has.
    """
    results = json.loads((DOCS / "learning" / "results.json").read_text(encoding="utf-8"))
    steps = results["muzero-breakout"]["steps"]
    fig, (ax,) = drawing.figure("one", 1, height=2.3)
    labels = {"muzero-breakout": "MuZero", "dqn-breakout": "DQN"}
    for color, (name, label) in zip(drawing.COLORS, labels.items(), strict=False):
        (curve,) = curves(results[name])
        ax.plot(curve.x[curve.x <= steps], curve.y[curve.x <= steps], color=color, label=label)
    _legend(fig, ax)
    ax.set_title("Breakout of MinAtar, training episodes of one seed each", fontsize=8)
    ax.set_xlabel("environment steps")
    ax.set_ylabel("episode return")
    drawing.save(fig, out)


def _legend(fig: Figure, ax: Axes) -> None:
    """Puts the legend under the panel, where no line crosses it."""
    handles, labels = ax.get_legend_handles_labels()
    columns = 1 if max(map(len, labels)) > 24 else 2
    fig.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=7, frameon=False
    )


if __name__ == "__main__":
    draw(DOCS / "overview.png")
    draw_ppo_es(DOCS / "learning" / "ppo-es.png")
    draw_connect_four(DOCS / "learning" / "connect-four.png")
    draw_muzero_dqn(DOCS / "learning" / "muzero-dqn.png")
