"""Draws docs/overview.png and the pictures of docs/learning that compare algorithms,
from the measurements in docs/.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_dist.commands.plot import drawing
from jaxrl_dist.commands.plot.reading import Curve

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PANELS = {
    "ppo-cartpole": "PPO, CartPole",
    "sac-pendulum": "SAC, Pendulum",
    "ppo-breakout-cnn": "PPO, MinAtar Breakout",
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
        found[f"{peer}: {title}"] = statistics.median(ratios)
    return found


def draw(out: pathlib.Path) -> None:
    """Draws the picture."""
    results = json.loads((DOCS / "learning" / "results.json").read_text(encoding="utf-8"))
    fig, axes = drawing.figure("two", len(PANELS) + 1, columns=4, height=1.7)
    for ax, (name, title) in zip(axes, PANELS.items(), strict=False):
        drawing.band(ax, curves(results[name]), drawing.COLORS[0])
        ax.set_title(f"{title}\n{len(results[name]['curves'])} seeds", fontsize=7)
        ax.set_xlabel("environment steps")
    axes[0].set_ylabel("episode return")
    speeds = rates(
        json.loads((DOCS / "speed" / "results.json").read_text(encoding="utf-8"))["rows"]
    )
    bars = axes[-1].barh(
        range(len(speeds)), list(speeds.values()), color=drawing.COLORS[0], height=0.4
    )
    axes[-1].bar_label(bars, [f" {ratio:.2f} x" for ratio in speeds.values()], fontsize=7)
    axes[-1].set_yticks([])
    for y, name in enumerate(speeds):
        axes[-1].text(0, y + 0.28, name, fontsize=5)
    axes[-1].axvline(1, color="0.4", linewidth=0.8, linestyle="--")
    axes[-1].set_xlim(0, 1.4 * max(speeds.values()))
    axes[-1].set_ylim(-0.4, len(speeds) - 0.4)
    axes[-1].set_title("env steps per second,\nours / theirs", fontsize=7)
    drawing.save(fig, out)


def draw_ppo_es(out: pathlib.Path) -> None:
    """Draws the results of scripts/ppo_es.py: the returns of PPO-ES and of PPO,
    by env steps of all members.
    """
    found = json.loads((DOCS / "learning" / "ppo-es.json").read_text(encoding="utf-8"))
    fig, (ax,) = drawing.figure("one", 1)
    for color, (name, seeds) in zip(drawing.COLORS, found.items(), strict=False):
        lines = [
            np.array([point for point in seed if point[1] is not None], float).T for seed in seeds
        ]
        drawing.band(ax, [Curve(x, y) for x, y in lines], color)
        ax.plot([], color=color, label=name)
    ax.legend(loc="lower right", fontsize=7)
    ax.set_title(f"Acrobot, {len(seeds)} seeds", fontsize=7)
    ax.set_xlabel("environment steps of all members")
    ax.set_ylabel("episode return")
    drawing.save(fig, out)


def draw_connect_four(out: pathlib.Path) -> None:
    """Draws the judgements of benchmarks/planning.py:
    games won by the steps of the simulator in training.
    """
    found = json.loads((DOCS / "learning" / "connect-four.json").read_text(encoding="utf-8"))
    fig, (ax,) = drawing.figure("one", 1)
    for color, (name, points) in zip(drawing.COLORS, found.items(), strict=False):
        ax.plot(*zip(*points, strict=True), color=color, marker=".", label=name)
    ax.legend(loc="upper left", fontsize=6)
    ax.set_ylim(top=240)
    ax.set_title("Connect Four against a search of two moves", fontsize=7)
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
    fig, (ax,) = drawing.figure("one", 1)
    labels = {"muzero-breakout": "MuZero", "dqn-breakout": "DQN"}
    for color, (name, label) in zip(drawing.COLORS, labels.items(), strict=False):
        (curve,) = curves(results[name])
        ax.plot(curve.x[curve.x <= steps], curve.y[curve.x <= steps], color=color, label=label)
    ax.legend(loc="lower right", fontsize=6)
    ax.set_title("Breakout of MinAtar, exploring", fontsize=7)
    ax.set_xlabel("environment steps")
    ax.set_ylabel("episode return")
    drawing.save(fig, out)


if __name__ == "__main__":
    draw(DOCS / "overview.png")
    draw_ppo_es(DOCS / "learning" / "ppo-es.png")
    draw_connect_four(DOCS / "learning" / "connect-four.png")
    draw_muzero_dqn(DOCS / "learning" / "muzero-dqn.png")
