"""Checks that the default flags learn, and writes ``docs/learning.md`` and its data:
``python scripts/learning.py``.

``--only NAME`` runs that bar, or all whose names contain it, and keeps the results of the others;
``--seeds N`` overrides the bars' numbers of seeds; ``--draw`` runs nothing and only rewrites page
and curves. Each seed is stored as soon as it has ended, and ``--missing`` runs only the seeds that
are not stored, which continues an interrupted command. All bars take about three hours on two CPU
cores. The exit code is 1 if a bar fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import platform
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import jaxrl_dist
from jaxrl_dist.commands.flags import written
from jaxrl_dist.commands.plot import drawing, statistics
from jaxrl_dist.commands.plot.reading import Curve

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # for the tasks of ``tasks.py``
DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
RESULTS = "results.json"
POINTS = 50
"""Points of a curve: each is the mean return of the episodes that ended in a fiftieth of the
run."""


class Bar(NamedTuple):
    """A goal for an algorithm with its default flags:
    ``needed`` of ``seeds`` runs at ``threshold`` or better.

    Without a threshold the row has none to meet: nobody has published a number for this task.
    """

    name: str
    algorithm: str
    env: str
    steps: int
    threshold: float | None
    """Mean return of the greedy episodes at the end."""
    needed: int
    seeds: int
    flags: Mapping[str, Any] = {}
    """Fields of the algorithm's config or of Train that differ from their defaults."""
    devices: int = 1
    at_most: bool = False
    """A control, which must not do better than the threshold."""
    mean: float | None = None
    """Additional threshold for the mean of all seeds."""
    published: tuple[float, str] | None = None
    """A return on this task, and its source with the env steps it took."""
    held_out: bool = False
    """No preset was chosen by a run on this task."""
    together: bool = False
    """All seeds are members of one run, which a small machine steps faster."""

    def command(self) -> str:
        """Returns the command line of one run."""
        flags = "".join(
            f" {word}" for name, value in self.flags.items() for word in written(name, value)
        )
        flags += f" --seeds {self.seeds}" if self.together else ""
        if self.devices > 1:
            devices = f"JAX_NUM_CPU_DEVICES={self.devices} "
        else:
            devices = ""
        return f"{devices}jaxrl-dist train {self.algorithm} --env {self.env} --total-env-steps {self.steps}{flags}"

    def counts(self) -> list[str]:
        """Returns the names of ``--info-metrics``,
        whose means of the greedy episodes are stored for each seed.
        """
        return [name for name in str(self.flags.get("info_metrics", "")).split(",") if name]

    def met(self, result: float) -> bool:
        """Returns True if one run's return is good enough."""
        if self.threshold is None:
            return True
        if self.at_most:
            return result <= self.threshold
        return result >= self.threshold

    def passed(self, returns: Sequence[float]) -> bool:
        """Returns True if enough seeds met the bar;
        another number of seeds needs the same share, rounded up.
        """
        enough = sum(map(self.met, returns)) * self.seeds >= self.needed * len(returns)
        return enough and (self.mean is None or sum(returns) / len(returns) >= self.mean)


def both(
    name: str, algorithm: str, env: str, steps: int, threshold: float, **more: Any
) -> list[Bar]:
    """Returns a bar for five of five seeds on gymnax, and the same on EnvPool."""
    kind = env.split("-")[0].lower()
    return [
        Bar(f"{name}{infix}-{kind}", algorithm, f"{backend}:{env}", steps, threshold, 5, 5, **more)
        for backend, infix in (("gymnax", ""), ("envpool", "-envpool"))
    ]


MEMORY = {"core": "gru"}
SYNCHRONOUS = {"plan": "synchronous"}
HIDDEN = {"hide": "velocities"}
ATTENTION = {"core": "attention", "core_window": 48}
CHAIN = {"env_options": {"memory_length": "40"}, "rollout_length": 64}
LAG: dict[str, Any] = {"lockstep": True, "lag": 8, "num_envs": 32, "rollout_length": 32}
SPREAD = "jaxmarl:MPE_simple_spread_v3"
SMAX = "jaxmarl:HeuristicEnemySMAX"
STATE = {"state": "true"}
SEES = {"critic_sees": "state"}
WON = {"info_metrics": "won"}
HALF = {"replay_ratio": 0.25}
TOGETHER: dict[str, Any] = {"held_out": True, "together": True}
LANDER = "envpool:LunarLanderContinuous-v2"


def zoo(value: float, steps: str) -> tuple[float, str]:
    """Returns a published return of RL Zoo's ``benchmark.md``: one run,
    evaluated with the deterministic policy.
    """
    return value, f"RL Zoo, {steps}"


BLINES = (15.4, "gymnax-blines, 1.9M")
BARS = (
    Bar(
        "ppo-cartpole",
        "ppo",
        "gymnax:CartPole-v1",
        150_000,
        475,
        10,
        10,
        published=zoo(500, "100k"),
    ),
    Bar(
        "ppo-envpool-cartpole",
        "ppo",
        "envpool:CartPole-v1",
        150_000,
        475,
        5,
        5,
        published=zoo(500, "100k"),
    ),
    Bar("ppo-8-devices-cartpole", "ppo", "gymnax:CartPole-v1", 150_000, 475, 5, 5, devices=8),
    Bar(
        "a2c-cartpole", "a2c", "gymnax:CartPole-v1", 500_000, 475, 5, 5, published=zoo(500, "500k")
    ),
    Bar("pg-cartpole", "pg", "gymnax:CartPole-v1", 100_000, 150, 5, 5),
    Bar("pg-long-cartpole", "pg", "gymnax:CartPole-v1", 500_000, 475, 4, 5),
    Bar(
        "ppo-pendulum",
        "ppo",
        "gymnax:Pendulum-v1",
        500_000,
        -300,
        4,
        5,
        published=zoo(-172, "100k"),
    ),
    Bar(
        "ppo-envpool-pendulum",
        "ppo",
        "envpool:Pendulum-v1",
        500_000,
        -300,
        4,
        5,
        published=zoo(-172, "100k"),
    ),
    Bar(
        "ppo-breakout-cnn",
        "ppo",
        "gymnax:Breakout-MinAtar",
        1_000_000,
        15,
        3,
        3,
        published=BLINES,
    ),
    Bar(
        "ppo-breakout-mlp", "ppo", "gymnax:Breakout-MinAtar", 1_000_000, 15, 3, 3, {"torso": "mlp"}
    ),
    Bar("ppo-memory", "ppo", "gymnax:MemoryChain-bsuite", 500_000, 0.9, 3, 3, MEMORY),
    *(
        Bar(
            f"ppo-memory-{core}",
            "ppo",
            "gymnax:MemoryChain-bsuite",
            500_000,
            0.9,
            5,
            5,
            {"core": core},
        )
        for core in ("lstm", "attention", "linear")
    ),
    *(
        Bar(
            f"ppo-chain-40-{core}",
            "ppo",
            "gymnax:MemoryChain-bsuite",
            200_000,
            0.9,
            5,
            5,
            {"core": core, **CHAIN},
        )
        for core in ("gru", "lstm", "linear")
    ),
    Bar(
        "ppo-chain-40-attention",
        "ppo",
        "gymnax:MemoryChain-bsuite",
        200_000,
        0.9,
        5,
        5,
        ATTENTION | CHAIN,
    ),
    *(
        Bar(f"ppo-repeat-{core}", "ppo", "tasks:RepeatAfterMe", 300_000, 90, 5, 5, {"core": core})
        for core in ("gru", "lstm", "attention", "linear")
    ),
    Bar(
        "ppo-synchronous-memory",
        "ppo",
        "gymnax:MemoryChain-bsuite",
        500_000,
        0.9,
        3,
        3,
        MEMORY | SYNCHRONOUS,
    ),
    Bar("ppo-memoryless", "ppo", "gymnax:MemoryChain-bsuite", 500_000, 0.5, 3, 3, at_most=True),
    Bar("ppo-acrobot", "ppo", "gymnax:Acrobot-v1", 200_000, -100, 3, 3),
    Bar("alphazero-cartpole", "alphazero", "gymnax:CartPole-v1", 20_000, 475, 5, 5),
    Bar("muzero-cartpole", "muzero", "gymnax:CartPole-v1", 100_000, 475, 5, 5),
    Bar("muzero-catch", "muzero", "gymnax:Catch-bsuite", 40_000, 0.95, 3, 3),
    Bar("muzero-fourrooms", "muzero", "gymnax:FourRooms-misc", 60_000, 0.9, 3, 3),
    # DQN's, after 2 million
    Bar("muzero-breakout", "muzero", "gymnax:Breakout-MinAtar", 420_000, 33, 1, 1),
    Bar(
        "ppo-catch",
        "ppo",
        "gymnax:Catch-bsuite",
        100_000,
        0.95,
        3,
        3,
        published=(1, "gymnax-blines, 64k"),
    ),
    Bar("ppo-frozenlake", "ppo", "gymnax:FrozenLake-misc", 200_000, 0.65, 3, 3),
    *both("dqn-short", "dqn", "CartPole-v1", 50_000, 150, published=zoo(500, "50k")),
    *both("dqn", "dqn", "CartPole-v1", 500_000, 475, published=(498, "CleanRL, 500k")),
    *both("rainbow", "rainbow", "CartPole-v1", 150_000, 475),
    *both("pqn", "pqn", "CartPole-v1", 500_000, 475, published=(495, "CleanRL, 500k")),
    *both("ddpg", "ddpg", "Pendulum-v1", 30_000, -320, published=zoo(-152, "20k")),
    *both("td3", "td3", "Pendulum-v1", 50_000, -200, published=zoo(-152, "20k")),
    *both("sac", "sac", "Pendulum-v1", 30_000, -170, mean=-150, published=zoo(-157, "20k")),
    *both("sac-discrete", "sac", "CartPole-v1", 100_000, 150),
    *both("impala", "impala", "CartPole-v1", 500_000, 475),
    Bar("impala-lag-cartpole", "impala", "gymnax:CartPole-v1", 300_000, 475, 3, 3, LAG),
    Bar(
        "impala-lag-uncorrected-cartpole",
        "impala",
        "gymnax:CartPole-v1",
        300_000,
        100,
        2,
        3,
        LAG | {"correction": False},
        at_most=True,
    ),
    *both("appo", "appo", "CartPole-v1", 300_000, 475),
    Bar("apex-envpool-cartpole", "apex", "envpool:CartPole-v1", 250_000, 450, 5, 5),
    Bar("a3c-envpool-cartpole", "a3c", "envpool:CartPole-v1", 200_000, 150, 5, 5),
    Bar("async-dqn-envpool-cartpole", "async-dqn", "envpool:CartPole-v1", 500_000, 150, 5, 5),
    Bar("apex-ddpg-envpool-pendulum", "apex-ddpg", "envpool:Pendulum-v1", 200_000, -200, 5, 5),
    Bar(
        "sac-halfcheetah",
        "sac",
        "envpool:HalfCheetah-v4",
        200_000,
        3000,
        1,
        1,
        published=(7679, "CrossQ's authors, 200k"),
    ),
    Bar("ppo-hidden-cartpole", "ppo", "gymnax:CartPole-v1", 2_000_000, 350, 5, 5, MEMORY | HIDDEN),
    Bar(
        "impala-hidden-cartpole",
        "impala",
        "gymnax:CartPole-v1",
        2_000_000,
        350,
        5,
        5,
        MEMORY | HIDDEN,
    ),
    Bar("r2d2-hidden-cartpole", "r2d2", "gymnax:CartPole-v1", 1_000_000, 350, 5, 5, HIDDEN),
    Bar("dqn-hidden-cartpole", "dqn", "gymnax:CartPole-v1", 1_000_000, 350, 5, 5, MEMORY | HIDDEN),
    *(
        Bar(
            f"{name}-hidden-pendulum",
            name,
            "gymnax:Pendulum-v1",
            100_000,
            -300,
            5,
            5,
            MEMORY | HIDDEN,
        )
        for name in ("sac", "td3")
    ),
    *(
        Bar(
            f"{name}-memoryless-pendulum",
            name,
            "gymnax:Pendulum-v1",
            100_000,
            -700,
            3,
            3,
            HIDDEN,
            at_most=True,
        )
        for name in ("sac", "td3")
    ),
    Bar("r2d2-memory", "r2d2", "gymnax:MemoryChain-bsuite", 50_000, 0.9, 3, 3),
    Bar(
        "r2d2-synchronous-memory",
        "r2d2",
        "gymnax:MemoryChain-bsuite",
        50_000,
        0.9,
        3,
        3,
        SYNCHRONOUS,
    ),
    Bar(
        "ppo-halfcheetah",
        "ppo",
        "envpool:HalfCheetah-v4",
        1_000_000,
        4000,
        3,
        3,
        published=zoo(5819, "1M"),
    ),
    Bar("es-cartpole", "es", "gymnax:CartPole-v1", 10_000_000, 475, 5, 5),
    *both("ars", "ars", "CartPole-v1", 1_000_000, 475),
    Bar("ars-acrobot", "ars", "gymnax:Acrobot-v1", 1_000_000, -100, 5, 5),
    Bar("ars-pendulum", "ars", "gymnax:Pendulum-v1", 3_000_000, -300, 5, 5),
    Bar(
        "dqn-parameter-noise-cartpole",
        "dqn",
        "gymnax:CartPole-v1",
        300_000,
        475,
        4,
        5,
        {"parameter_noise": True},
    ),
    Bar(
        "ddpg-parameter-noise-pendulum",
        "ddpg",
        "gymnax:Pendulum-v1",
        30_000,
        -320,
        5,
        5,
        {"noise": "parameter"},
    ),
    Bar("ppo-taxi", "ppo", "envpool:Taxi-v3", 500_000, 0, 3, 3),
    Bar(
        "ppo-long-acrobot", "ppo", "gymnax:Acrobot-v1", 500_000, -85, 4, 5, published=zoo(-74, "1M")
    ),
    Bar(
        "ppo-lunarlander",
        "ppo",
        "envpool:LunarLander-v2",
        1_000_000,
        220,
        4,
        5,
        published=zoo(242, "1M"),
    ),
    Bar(
        "ppo-lunarlander-continuous", "ppo", LANDER, 1_000_000, 240, 4, 5, published=zoo(271, "1M")
    ),
    Bar("dqn-acrobot", "dqn", "gymnax:Acrobot-v1", 100_000, -90, 4, 5, published=zoo(-77, "100k")),
    Bar(
        "dqn-mountaincar",
        "dqn",
        "gymnax:MountainCar-v0",
        200_000,
        -120,
        4,
        5,
        published=zoo(-101, "120k"),
    ),
    Bar(
        "dqn-lunarlander",
        "dqn",
        "envpool:LunarLander-v2",
        200_000,
        180,
        4,
        5,
        published=zoo(154, "100k"),
    ),
    Bar(
        "a2c-lunarlander",
        "a2c",
        "envpool:LunarLander-v2",
        1_000_000,
        150,
        3,
        3,
        published=zoo(156, "200k"),
    ),
    Bar("impala-lunarlander", "impala", "envpool:LunarLander-v2", 2_000_000, 200, 3, 3),
    Bar("appo-lunarlander", "appo", "envpool:LunarLander-v2", 2_000_000, 200, 3, 3),
    Bar(
        "sac-lunarlander-continuous", "sac", LANDER, 200_000, 220, 3, 3, published=zoo(260, "500k")
    ),
    Bar(
        "ppo-bipedal",
        "ppo",
        "envpool:BipedalWalker-v3",
        3_000_000,
        220,
        3,
        3,
        published=zoo(213, "5M"),
    ),
    Bar("ppo-hopper", "ppo", "envpool:Hopper-v4", 1_000_000, 2200, 3, 3, published=zoo(2410, "1M")),
    Bar(
        "ppo-walker", "ppo", "envpool:Walker2d-v4", 1_000_000, 2500, 3, 3, published=zoo(3479, "1M")
    ),
    Bar("sac-hopper", "sac", "envpool:Hopper-v4", 200_000, 2000, 2, 2, published=zoo(2326, "1M")),
    *(
        Bar(
            f"{name}-mountaincar-continuous",
            name,
            "gymnax:MountainCarContinuous-v0",
            steps,
            bar,
            4,
            5,
            published=there,
        )
        for name, steps, bar, there in (
            ("ppo", 300_000, 90, zoo(88, "20k")),
            ("sac", 100_000, 92, zoo(95, "50k")),
        )
    ),
    Bar(
        "a2c-pendulum", "a2c", "gymnax:Pendulum-v1", 500_000, -250, 4, 5, published=zoo(-163, "1M")
    ),
    Bar("pg-pendulum", "pg", "gymnax:Pendulum-v1", 500_000, -600, 4, 5),
    Bar("impala-pendulum", "impala", "gymnax:Pendulum-v1", 500_000, -300, 4, 5),
    Bar("appo-pendulum", "appo", "gymnax:Pendulum-v1", 500_000, -250, 4, 5),
    *(
        Bar(
            f"{algorithm}-{game.lower()}-5m",
            algorithm,
            f"gymnax:{game}-MinAtar",
            5_000_000,
            score,
            seeds,
            seeds,
            published=None if score is None else (score, source),
            held_out=game not in tuned,
        )
        for algorithm, seeds, tuned in (
            ("ppo", 3, ("Breakout",)),
            ("pqn", 3, ("Breakout",)),
            ("a2c", 1, ("Breakout", "Asterix")),
            ("impala", 1, ("Breakout", "Asterix")),
        )
        for game, score, source in (
            ("Breakout", 22, "gymnax-blines, 5.1M"),
            ("Asterix", 15, "gymnax"),
            ("Freeway", 58, "gymnax"),
            ("SpaceInvaders", 131, "gymnax"),
            ("Seaquest", None, ""),
        )
    ),
    # Young and Tian (2019) print a picture of their curves.
    *(
        Bar(
            f"{algorithm}-{game.lower()}",
            algorithm,
            f"gymnax:{game}-MinAtar",
            steps,
            None,
            1,
            1,
            held_out=game == "SpaceInvaders",
        )
        for algorithm, steps in (("dqn", 2_000_000), ("rainbow", 1_000_000), ("sac", 1_000_000))
        for game in ("Breakout", "Asterix", "SpaceInvaders")
    ),
    # PPO on tasks that no preset has seen: within a tenth of what is published.
    # MountainCar chose `SMALLEST_STD`.
    *(
        Bar(
            f"ppo-{name}",
            "ppo",
            env,
            1_000_000,
            bar,
            3,
            3,
            published=there,
            held_out=name != "mountaincar",
        )
        for name, env, bar, there in (
            ("swimmer", "envpool:Swimmer-v4", 254, zoo(282, "1M")),
            ("ant", "envpool:Ant-v4", 1194, zoo(1327, "1M")),
            ("mountaincar", "gymnax:MountainCar-v0", -121, zoo(-110, "1M")),
            ("inverted-pendulum", "envpool:InvertedPendulum-v4", 900, (1000, "RLlib, 1M")),
            ("fourrooms", "gymnax:FourRooms-misc", 0.9, (1, "gymnax")),
            ("pointrobot", "gymnax:PointRobot-misc", 9, (10, "gymnax")),
        )
    ),
    # 10M frames; CleanRL's PPO needs 40M for its score.
    Bar(
        "ppo-pong",
        "ppo",
        "envpool:Pong-v5",
        2_500_000,
        18,
        1,
        1,
        published=(20.4, "CleanRL, 10M"),
        held_out=True,
    ),
    Bar("ppo-brax-pendulum", "ppo", "brax:inverted_pendulum", 300_000, 950, 5, 5, held_out=True),
    # Uniform random actions get -26.4 in spread.
    # The mixing network of QMIX was chosen there; nothing was for VDN.
    *(Bar(f"{name}-spread", name, SPREAD, 300_000, -18, 4, 5) for name in ("qmix", "vdn")),
    # PPO with shared parameters is IPPO; with a critic that sees the state, it is MAPPO. JaxMARL's
    # picture has the sum over three agents, -60, of training episodes.
    Bar(
        "ippo-spread",
        "ppo",
        SPREAD,
        1_000_000,
        -22,
        5,
        5,
        published=(-20, "JaxMARL, 10M"),
        held_out=True,
    ),
    Bar(
        "mappo-spread",
        "ppo",
        SPREAD,
        1_000_000,
        None,
        5,
        5,
        {"env_options": STATE, **SEES},
        held_out=True,
    ),
    # The best return in SMAX is 2: all damage, and the victory. VDN's is the team's, which includes
    # the dead. Each evaluation is of 100 battles. Half the updates of QMIX's and VDN's defaults let
    # five seeds fit into minutes.
    *(
        Bar(
            f"{name}-{scenario}",
            algorithm,
            SMAX,
            100_000,
            None,
            5,
            5,
            {"env_options": options, **WON, **flags},
            **TOGETHER,
        )
        for scenario, agents in (("3m", 3), ("2s3z", 5))
        for name, algorithm, options, flags in (
            ("ippo", "ppo", {"scenario": scenario}, {"evaluation_episodes": 100 * agents}),
            (
                "mappo",
                "ppo",
                {"scenario": scenario, **STATE},
                {**SEES, "evaluation_episodes": 100 * agents},
            ),
            ("vdn", "vdn", {"scenario": scenario}, HALF),
            ("qmix", "qmix", {"scenario": scenario}, HALF),
        )
    ),
    # Random legal actions get 1.7.
    Bar(
        "ppo-jumanji-snake",
        "ppo",
        "jumanji:Snake-v1",
        500_000,
        5.1,
        2,
        2,
        {"time_limit": 500},
        held_out=True,
    ),
)


# --- Running --------------------------------------------------------------------------------------


def config_of(bar: Bar, seed: int, seeds: int = 1) -> jaxrl_dist.Train:
    """Returns the default config of one run, with the bar's flags."""
    return jaxrl_dist.preset(
        bar.algorithm,
        bar.env,
        total_env_steps=bar.steps,
        seed=seed,
        seeds=seeds,
        num_devices=bar.devices,
        report_interval=max(1, bar.steps // POINTS),  # for the curve; it changes no result
        **bar.flags,
    )


def run_seeds(
    bar: Bar, seed: int, seeds: int = 1, say: Callable[[str], None] = lambda text: None
) -> list[tuple[float, list[float | None], dict[str, float]]]:
    """Trains once, with ``seeds`` members.

    Args:
      say: receives a line after the first report, which says that the program is compiled,
        and after each tenth.

    Returns:
      Of each member, the mean return of the greedy episodes at the end;
      the curve of training: ``POINTS`` means,
      None where no episode ended; and the other numbers of the evaluation that the bar counts,
      by name.
    """
    count, total = np.zeros((2, seeds, POINTS))
    began = time.perf_counter()
    for reports, joined in enumerate(jaxrl_dist.train(config_of(bar, seed, seeds))):
        if reports % 10 == 0:
            say(
                f"{bar.name}: {joined.env_steps:,} env steps after {time.perf_counter() - began:.0f} s"
            )
        for number, report in enumerate(members := joined.members or (joined,)):
            mean = report.metrics["episode/return"]
            episodes = report.metrics["episode/count"]
            if mean is not None and episodes is not None:
                point = number, min((report.env_steps - 1) * POINTS // bar.steps, POINTS - 1)
                count[point] += episodes
                total[point] += mean * episodes
    curves = [
        [round(float(t / n), 3) if n else None for t, n in zip(*rows, strict=True)]
        for rows in zip(total, count, strict=True)
    ]
    evaluations = [report.evaluation for report in members]
    return [
        (
            float(evaluation["return_mean"]),
            curve,
            {name: float(evaluation[f"info/{name}"]) for name in bar.counts()},
        )
        for evaluation, curve in zip(evaluations, curves, strict=True)
        if evaluation is not None
    ]


def run_bar(
    bar: Bar,
    seeds: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    keep: Callable[[dict[str, Any]], None] = lambda entry: None,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs the seeds of a bar, and returns its entry in ``results.json``.

    Args:
      keep: receives the entry after each seed.
      before: the entry of an interrupted call, whose seeds are not run again; None: run all seeds.
    """
    entry: dict[str, Any] = {
        "command": bar.command(),
        "steps": bar.steps,
        **{
            name: list((before or {}).get(name, ()))
            for name in ("returns", *bar.counts(), "curves", "seconds")
        },
        "versions": versions(),
    }
    seeds = seeds or bar.seeds
    for first in range(len(entry["returns"]), seeds, seeds if bar.together else 1):
        began = time.perf_counter()
        runs = run_seeds(
            bar,
            first,
            seeds - first if bar.together else 1,
            say if bar.together else lambda text: None,
        )
        seconds = time.perf_counter() - began
        for seed, (result, curve, counted) in enumerate(runs, first):
            numbers = {
                "returns": round(result, 3),
                **{name: round(counted[name], 3) for name in bar.counts()},
            }
            for name, value in {**numbers, "curves": curve, "seconds": round(seconds)}.items():
                entry[name].append(value)
            verdict = "ok" if bar.met(result) else "MISSED"
            say(f"{bar.name}: seed {seed + 1}/{seeds} {result:.4g} {verdict}, {seconds:.0f} s")
        keep(entry)
    return entry


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that the numbers depend on."""
    packages = ("jax", "flax", "optax", "gymnax", "envpool", "jaxmarl")
    known = {"python": platform.python_version(), "jaxrl-dist": jaxrl_dist.__version__}
    for package in packages:
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


# --- Writing --------------------------------------------------------------------------------------


def load(file: pathlib.Path) -> dict[str, Any]:
    """Returns the stored results, by name of the bar, in the order of ``BARS``."""
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
    else:
        kept = {}
    return {bar.name: kept[bar.name] for bar in BARS if bar.name in kept}


def save(file: pathlib.Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the results in the order of ``BARS``, for short diffs."""
    write(file, {bar.name: results[bar.name] for bar in BARS if bar.name in results})


def write(file: pathlib.Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes entries by name, with each list of numbers on one line."""
    text = json.dumps(results, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    file.write_text(text + "\n", encoding="utf-8")


def draw(bar: Bar, result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws return against environment steps as ``jaxrl-dist plot`` does, and the bar."""
    lines = curves(result)
    fig, (ax,) = drawing.figure("one", 1, height=2.4)
    drawing.band(ax, lines, drawing.COLORS[0])
    handles: list[Artist] = [
        Line2D([], [], color=drawing.COLORS[0], linewidth=1.8, label=middle_name(len(lines)))
    ]
    if len(lines) > 1:
        handles.append(
            Line2D([], [], color=drawing.COLORS[0], linewidth=0.5, alpha=0.6, label="each seed")
        )
    if len(lines) >= drawing.BAND_SEEDS:
        handles.append(Patch(color=drawing.COLORS[0], alpha=0.2, label="95 % interval"))
    if bar.threshold is not None:
        handles.append(
            ax.axhline(
                bar.threshold,
                color="0.4",
                linestyle="--",
                linewidth=1,
                label=f"{'at most' if bar.at_most else 'goal'}: {bar.threshold:g}",
            )
        )
    ax.set_title(textwrap.fill(title(bar), 46), fontsize=8, parse_math=False)
    ax.set(
        xlabel="environment steps",
        ylabel="return of training episodes",
        xlim=(0, result["steps"]),
    )
    fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    drawing.save(fig, path)


def middle_name(seeds: int) -> str:
    """Returns what the thick line of ``drawing.band`` is, for a legend."""
    if seeds == 1:
        return "one seed"
    if seeds < 4:  # of which an interquartile mean trims nothing
        return f"mean of {seeds} seeds"
    return f"interquartile mean of {seeds} seeds"


def title(bar: Bar) -> str:
    """Returns the algorithm, the environment and the flags of a bar, for a picture."""
    flags = " ".join(word for name, value in bar.flags.items() for word in written(name, value))
    name = f"{bar.algorithm} on {bar.env}"
    return f"{name}, {flags}" if flags else name


def curves(result: Mapping[str, Any]) -> list[Curve]:
    """Returns the stored curves of an entry of results.json, one for each seed."""
    steps = (np.arange(POINTS) + 0.5) / POINTS * result["steps"]
    lines = []
    for curve in np.array(result["curves"], dtype=float):  # None becomes NaN
        there = ~np.isnan(curve)
        lines.append(Curve(steps[there], curve[there]))
    return lines


INTRODUCTION = """# What the defaults learn

Each row is a command with its default flags, run once for each seed (`--seed 0`, `1`, ...). `tasks` is
`scripts/tasks.py`.

| column | meaning |
|---|---|
| return of each seed | mean of the 100 greedy episodes that end a run (10 on MuJoCo and Atari) |
| bar, met | the goal, and how many seeds reach it; a row without a bar has no published number |
| IQM | mean of the middle half of the seeds (of five, without the lowest and the highest) |
| 95 % | interval of the IQM (percentile bootstrap over seeds); for three seeds it is the lowest and the highest |
| published | a return of one of the source's runs, or the mean of several, after the env steps in parentheses. *Behind*: our IQM is lower by more than a tenth |
| minutes | median over the seeds, which share a compiled program; with `--seeds`, the minutes of the whole run. Other work shared the two CPU cores, so minutes do not rank algorithms |

`python scripts/learning.py` runs all of it again and writes this page; after an interruption, `--missing`
continues. [Curves](#curves) are at the end.

## Tasks that presets were tuned on

The values in `jaxrl_dist/algorithms/presets.py` were chosen by looking at runs on these tasks. So their returns
say that the values work here, not that they work elsewhere.
"""
"""The page of results before its first table."""
HELD_OUT = """## Tasks that no preset was tuned on

No value was chosen by runs on these tasks. A task ran again if its preset was changed for other tasks.
"""
"""The page of results before its second table."""
BELOW = """## Below their bars

| row | what was found |
|---|---|
| A2C and IMPALA on LunarLander | The policies land while they sample their actions, but the greedy policy hovers until the time is up: [more](#a2c-and-impala-on-lunarlander) |
| DQN on EnvPool's CartPole | One of five seeds ends at 177. Its training episodes, with 5 % random actions, return as much as the other seeds' |
| IMPALA on MinAtar's Breakout | Training episodes, which sample their actions, return 34. The greedy policy loses the ball earlier |
| PPO on Hopper | One of three seeds ends below, and its training episodes return 970: [more](#ppo-on-hopper) |
| PPO on MinAtar's SpaceInvaders | One of three seeds ends below, with 137 in training |
| SAC on HalfCheetah | The source has step sizes of 1e-3 for actor, critics and temperature. After 50,000 env steps, three seeds with the preset's 3e-4 returned 4738, 4064 and 3552, and the source's ten 4212 in the mean |
| SAC on LunarLanderContinuous | One of three seeds ends just below. RL Zoo's 260 took 500,000 env steps |
| PPO on Swimmer | RL Zoo has flags for this task alone, with a discount of 0.9999. That discount alone did not help here (26, one seed) |
| PPO on PointRobot | The goal is hidden and changes with each episode. Policies have to remember the last reward and action, which they observe: with `--core gru` it returned 9.1 (one seed) |
| PPO on Pong | CleanRL's score is after 40M frames, four times as many |
| PPO on a MemoryChain of 40 steps | `--core linear` and `attention` remember that long; `gru` and `lstm` learn to do so in some seeds or in no seed |

[Hard exploration](exploration.md) names what else the defaults do not learn, and what helps.

### A2C and IMPALA on LunarLander

These did not reach the bars (one to three seeds of each): other step sizes, entropies, discounts, batches and
optimisers, larger networks, scaled rewards, falling step sizes, a gradient norm for each network, and values that
learn 3 to 30 times as fast as the policy. With more updates, training episodes rise to 100 or 200 and fall
again. SB3 2.9.2's A2C with RL Zoo's flags had greedy returns of 43 and -40 on Gymnasium's LunarLander-v3 here,
after 200,000 steps; RL Zoo publishes 156. `ppo` and `dqn` learn to land. So does `appo`, but one of its three
seeds ends at 192.

### PPO on Hopper

Training returns swing until the end, as the step size does not fall. So greedy actions use an average of the
parameters (`--ema-steps`); of three lengths, the one that did best on these seeds was taken. Differences between
seeds are larger than its effect:

| PPO | returns of three seeds |
|---|---|
| the newest parameters of the same runs | 2090, 836, 3069 |
| an earlier version without averages | 3264, 1656, 3391 |
| a step size of 2e-4 | 2326, 3236, 1410 |
| `--target-kl 0.03`; HalfCheetah returned 4430 and 3842 | 3155, 3348, 1003 |
"""
"""The page of results after its tables."""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns ``docs/learning.md``: the measured numbers as tables."""
    measured = [bar for bar in BARS if bar.name in results]
    lines = [INTRODUCTION, *rows([bar for bar in measured if not bar.held_out], results), ""]
    if held_out := [bar for bar in measured if bar.held_out]:
        lines += [HELD_OUT, *rows(held_out, results), ""]
    lines.append(BELOW)
    if missing := [f"`{bar.name}`" for bar in BARS if bar.name not in results]:
        lines += [f"Not measured with the presets as they are: {', '.join(missing)}.", ""]
    lines += [
        "## Curves",
        "",
        "These are returns of training episodes, which sample their actions.",
        "",
        gallery(measured, "learning"),
        "",
    ]
    used = {
        package: version
        for result in results.values()
        for package, version in result["versions"].items()
    }
    lines += [
        "Versions: " + ", ".join(f"{package} {version}" for package, version in used.items()) + ".",
        "",
    ]
    return "\n".join(lines)


def rows(bars: Sequence[Bar], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the table of bars that have results."""
    lines = [
        "| `jaxrl-dist train ...` | env steps | bar | return of each seed | met | IQM | 95 % | published | minutes |",
        "|---|---:|---:|---|---:|---:|---:|---|---:|",
    ]
    for bar in bars:
        result = results[bar.name]
        returns = result["returns"]
        command = result["command"].replace("jaxrl-dist train ", "")
        command = command.replace(f" --total-env-steps {result['steps']}", "")
        cells = (
            f"`{command}`",
            f"{result['steps']:,}",
            goal(bar),
            " ".join(f"{x:.4g}" for x in returns),
            "" if bar.threshold is None else f"{sum(map(bar.met, returns))} of {len(returns)}",
            f"{interquartile_mean(returns):.4g}",
            interval(returns),
            published(bar, returns),
            f"{np.median(seconds) / 60:.1f}" if (seconds := result.get("seconds")) else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def goal(bar: Bar) -> str:
    """Returns the cell of a bar."""
    if bar.threshold is None:
        return ""
    mean = "" if bar.mean is None else f", mean ≥ {bar.mean:g}"
    return f"{'≤' if bar.at_most else '≥'} {bar.threshold:g}{mean}"


def gallery(bars: Sequence[Bar], folder: str) -> str:
    """Returns the pictures of the bars' curves, which ``folder`` contains."""
    return " ".join(f"![{bar.name}]({folder}/{bar.name}.png)" for bar in bars)


def published(bar: Bar, returns: Sequence[float]) -> str:
    """Returns the cell of a published return,
    which marks ours as behind if it is lower by more than a tenth.
    """
    if bar.published is None:
        return ""
    value, source = bar.published
    behind = interquartile_mean(returns) < value - 0.1 * abs(value)
    return f"{value:g} ({source}){', **behind**' if behind else ''}"


def interquartile_mean(returns: Sequence[float] | np.ndarray) -> float:
    """Returns the mean without the lowest and the highest quarter,
    each rounded down (Agarwal et al. 2021).
    """
    return float(statistics.iqm([np.asarray(returns)]))


def interval(returns: Sequence[float]) -> str:
    """Returns the cell of the interquartile mean's 95 % interval, as ``jaxrl-dist plot``;
    empty below three seeds.
    """
    if len(returns) < 3:
        return ""
    low, high = statistics.interval([np.array(returns)], statistics.iqm, statistics.NUMBER)
    return f"{low:.4g} to {high:.4g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the selected bars; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="NAME", help="run this bar, or all whose names contain it"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds to run of each bar")
    parser.add_argument(
        "--missing", action="store_true", help="run only the seeds that results.json lacks"
    )
    parser.add_argument(
        "--draw", action="store_true", help="run nothing; write page and curves from results.json"
    )
    args = parser.parse_args(argv)
    chosen = [bar for bar in BARS if args.only == bar.name] or [
        bar for bar in BARS if args.only in bar.name
    ]
    chosen = [] if args.draw else chosen
    if not chosen and not args.draw:
        parser.error(
            f"no bar's name contains {args.only!r}; these are: {', '.join(bar.name for bar in BARS)}"
        )
    if args.seeds is not None and args.seeds < 1:
        parser.error(f"--seeds must be >= 1, not {args.seeds}")
    if any(bar.devices > 1 for bar in chosen):
        jax.config.update("jax_num_cpu_devices", max(bar.devices for bar in chosen))

    folder = DOCS / "learning"
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as cache:
        # All seeds of a bar share one program, which the cache compiles once.
        jax.config.update("jax_compilation_cache_dir", cache)
        for bar in chosen:

            def keep(entry: dict[str, Any], name: str = bar.name) -> None:
                save(folder / RESULTS, {**load(folder / RESULTS), name: entry})

            before = load(folder / RESULTS).get(bar.name, {})
            if not args.missing and before.get("command") == bar.command():
                before = None
            result = run_bar(bar, args.seeds, lambda text: print(text, flush=True), keep, before)
            if not bar.passed(result["returns"]):
                failed.append(bar.name)
            draw(bar, result, folder / f"{bar.name}.png")
    results = load(folder / RESULTS)
    if args.draw:
        for bar in BARS:
            if bar.name in results:
                draw(bar, results[bar.name], folder / f"{bar.name}.png")
    (DOCS / "learning.md").write_text(page(results), encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
