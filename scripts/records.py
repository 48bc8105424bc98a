"""Measures what learning from records reaches:
``python scripts/records.py`` writes ``docs/records``.

It trains behaviours, records them under ``--data`` (a scratch directory), and trains each row of
``ROWS`` as a population of seeds in one program. ``--only NAME`` runs the rows whose names contain
it, ``--missing`` runs the rows that ``docs/records/results.json`` lacks, and ``--draw`` only
rewrites the table of ``docs/evidence/records.md``. Rows are stored as they end, and an interrupted
one continues from its checkpoint, so ``--missing`` continues an interrupted command. The exit code
is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import jaxrl_dist
from jaxrl_dist.commands.flags import written

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
learning: Any = importlib.import_module("learning")
DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
RESULTS = DOCS / "records" / "results.json"
MARKS = "<!-- rows of scripts/records.py -->", "<!-- end of the rows -->"
"""Lines of ``docs/evidence/records.md`` between which the table stands."""


class Task(NamedTuple):
    """An environment, the behaviour that is recorded in it, and what all rows on it have in
    common.
    """

    env: str
    behaviour: str
    """What follows ``jaxrl-dist train``; its evaluations say which checkpoint is the expert,
    and which is medium."""
    steps: int
    """Env steps of the sets ``medium`` and ``expert``."""
    replayed: str | None
    """The run whose memory is the set ``replay``; None: the behaviour's until it is medium,
    as in D4RL."""
    updates: int
    seeds: int
    flags: Mapping[str, Any] = {}


def behaviour(words: str, steps: int, interval: int) -> str:
    """Returns the words of a run that evaluates and saves itself every ``interval`` env steps."""
    every = f"--evaluation-interval {interval} --checkpoint-interval {interval} --report-interval {interval}"
    return f"{words} --total-env-steps {steps} --keep-checkpoints 1000 {every}"


SMALL = {"hidden_sizes": (64, 64)}
PENDULUM = behaviour("sac --evaluation-episodes 20 --replay-capacity 20000", 20_000, 1_000)
TASKS = {
    "cartpole": Task(
        "gymnax:CartPole-v1",
        behaviour("ppo --evaluation-episodes 20", 100_000, 4_096),
        20_000,
        behaviour("dqn --replay-capacity 40000", 40_000, 10_000),
        10_000,
        8,
        SMALL,
    ),
    "pendulum": Task("gymnax:Pendulum-v1", PENDULUM, 20_000, PENDULUM, 20_000, 8, SMALL),
    "hopper": Task(
        "envpool:Hopper-v4",
        behaviour("sac --replay-capacity 200000", 200_000, 10_000),
        100_000,
        None,
        30_000,
        4,
    ),
}
SCALED = {"scale_rewards": True}
FAST = {"discount": 0.95, "target_rate": 0.02, "learning_rate": 1e-3, "actor_learning_rate": 1e-3}
"""Values spread within these few updates: with the papers' rates of 0.005 and 0.99,
they would need some 20,000."""
LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bc": ("bc", {}),
    "marwil": ("marwil", {}),
    "iql": ("iql", SCALED),
    "cql": ("sac", {"cql_weight": 5.0}),  # Kumar et al. (2020), and 10 in the authors' later code
    "td3+bc": ("td3+bc", {}),
    "rebrac": ("rebrac", {"batch_size": 256}),  # the paper's 1,024 is for accelerators
}
OF_TASK: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("cartpole", "cql"): (
        "dqn",
        {
            "cql_weight": 0.5,
            "n_step": 1,
            "target_period": 100,
            "layer_norm": True,
            "ema_steps": 5000,
        },
    ),
    ("pendulum", "iql"): ("iql", {**SCALED, **FAST}),
    ("pendulum", "td3+bc"): ("td3+bc", FAST),
    ("pendulum", "cql"): ("sac", {"cql_weight": 1.0, **FAST}),
    ("cartpole", "iql"): ("iql", {}),  # all episodes of its expert return the same
}
"""Learners that differ from ``LEARNERS`` on a task."""
UPDATES = {("cartpole", "cql"): 40_000}
"""Numbers of updates that differ from the task's."""


class Row(NamedTuple):
    """A learner on a data set."""

    task: str
    kind: str
    learner: str

    @property
    def name(self) -> str:
        return "-".join(self)

    @property
    def flags(self) -> dict[str, Any]:
        """The fields that differ from the preset's."""
        task = TASKS[self.task]
        (_, flags) = self.algorithm
        return {**task.flags, **flags}

    @property
    def updates(self) -> int:
        return UPDATES.get((self.task, self.learner), TASKS[self.task].updates)

    @property
    def algorithm(self) -> tuple[str, dict[str, Any]]:
        return OF_TASK.get((self.task, self.learner), LEARNERS[self.learner])

    def command(self) -> str:
        """Returns the command line of the row, with a short name for the data."""
        task = TASKS[self.task]
        flags = "".join(
            f" {word}" for name, value in self.flags.items() for word in written(name, value)
        )
        head = (
            f"jaxrl-dist train {self.algorithm[0]} --data {self.task}/{self.kind} --env {task.env}"
        )
        return f"{head} --total-updates {self.updates} --seeds {task.seeds}{flags}"


KINDS = "replay", "medium", "expert"
ROWS = [
    *(
        Row("cartpole", kind, learner)
        for kind in KINDS
        for learner in ("bc", "marwil", "iql", "cql")
    ),
    *(
        Row("pendulum", kind, learner)
        for kind in KINDS
        for learner in ("bc", "iql", "td3+bc", "cql")
    ),
    *(
        Row("hopper", kind, learner)
        for kind in ("replay", "medium")
        for learner in ("bc", "iql", "td3+bc")
    ),
    Row("hopper", "medium", "rebrac"),
]

# --- Data sets ------------------------------------------------------------------------------------


def run(*words: str) -> None:
    """Runs a command of this package, and prints it.

    Raises:
      subprocess.CalledProcessError: it fails.
    """
    print("jaxrl-dist", shlex.join(words), flush=True)
    program = [sys.executable, "-m", "jaxrl_dist.cli", *words]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)


def chosen(run_dir: pathlib.Path, random: float) -> tuple[int, int]:
    """Returns the env steps of the checkpoints of the medium policy and of the expert.

    The expert is the first of those with the best evaluation. Of the checkpoints before it, the
    medium one is nearest to a third of the way from the ``random`` return to the expert's.
    """
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    means = {
        x["env_steps"]: x["evaluation/return_mean"] for x in lines if "evaluation/return_mean" in x
    }
    saved = {int(path.name) for path in (run_dir / "checkpoints").glob("[0-9]*")}
    means = {steps: mean for steps, mean in means.items() if steps in saved}
    expert = max(means, key=lambda steps: (means[steps], -steps))
    third = random + (means[expert] - random) / 3
    return min(
        (steps for steps in means if steps < expert), key=lambda steps: abs(means[steps] - third)
    ), expert


def record(name: str, folder: pathlib.Path) -> None:
    """Makes the data sets of a task that are not there yet,
    with the ends of their normalised scores.
    """
    task = TASKS[name]
    trained = folder / "run"
    if task.replayed in (None, task.behaviour):
        replayed = trained
    else:
        replayed = folder / "replayed"
    for run_dir, words in {
        replayed: task.replayed or task.behaviour,
        trained: task.behaviour,
    }.items():
        if not (run_dir / "summary.json").exists():
            run("train", *words.split(), "--env", task.env, "--run-dir", str(run_dir))
    sets = {"random": ["--random-share", "1", "--steps", "10000"]}
    _record(sets, trained, folder)
    random = mean_of(folder / "random")
    medium, expert = (str(steps) for steps in chosen(trained, random))
    _record(
        {"replay": ["--replay", *([] if task.replayed else ["--checkpoint", medium])]},
        replayed,
        folder,
    )
    checkpoints = {"medium": medium, "expert": expert}
    sets = {
        kind: ["--checkpoint", at, "--steps", str(task.steps)] for kind, at in checkpoints.items()
    }
    _record(sets, trained, folder)
    for kind in KINDS:
        if "expert" in jaxrl_dist.Dataset.load(folder / kind).about:
            continue
        run(
            "data",
            str(folder / kind),
            "--random",
            str(random),
            "--expert",
            str(mean_of(folder / "expert")),
        )


def _record(sets: Mapping[str, Sequence[str]], trained: pathlib.Path, folder: pathlib.Path) -> None:
    for kind, words in sets.items():
        if not (folder / kind).exists():
            run("record", str(trained), "-o", str(folder / kind), *words)


def mean_of(path: pathlib.Path) -> float:
    """Returns the mean return of a data set, as far as it is whole: 6 digits."""
    return float(f"{jaxrl_dist.Dataset.load(path).returns.mean():.6g}")


# --- Rows -----------------------------------------------------------------------------------------


def measure(row: Row, folder: pathlib.Path) -> dict[str, Any]:
    """Trains the row's population, or goes on with it, and returns its entry in the results."""
    task = TASKS[row.task]
    path = folder / row.task / row.kind
    run_dir = folder / "rows" / row.name
    data = jaxrl_dist.Dataset.load(path)
    config = jaxrl_dist.preset(
        row.algorithm[0],
        task.env,
        data=str(path),
        total_updates=row.updates,
        report_interval=max(1, row.updates // 20),
        seeds=task.seeds,
        num_devices=1,
        run_dir=str(run_dir),
        **row.flags,
    )
    if (run_dir / "population.json").exists():
        *_, last = jaxrl_dist.resume(run_dir)
    else:
        *_, last = jaxrl_dist.train(config)
    shutil.rmtree(run_dir)
    evaluations = [member.evaluation for member in last.members or (last,)]
    return {
        "command": row.command(),
        "updates": row.updates,
        "data": {"steps": data.steps, "mean": round(float(data.returns.mean()), 3), **ends(data)},
        "returns": [round(float(x["return_mean"]), 3) for x in evaluations if x is not None],
        "seconds": round(last.wall_time_s),
        "versions": learning.versions(),
    }


def ends(data: jaxrl_dist.Dataset) -> dict[str, float]:
    return {end: data.about[end] for end in ("random", "expert")}


def score(entry: Mapping[str, Any], value: float) -> float:
    """Returns a normalised score."""
    data = entry["data"]
    return 100 * (value - data["random"]) / (data["expert"] - data["random"])


# --- Goals and the page ---------------------------------------------------------------------------


def goals(results: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Returns whether each goal is met whose rows have been measured."""
    means = {name: float(np.mean(entry["returns"])) for name, entry in results.items()}
    scores = {name: score(entry, means[name]) for name, entry in results.items()}
    met: dict[str, bool] = {}
    for row in ROWS:
        if row.learner == "bc" and row.kind != "replay" and row.name in results:
            mean = score(results[row.name], results[row.name]["data"]["mean"])
            met[f"{row.name}: at most 10 points below the mean of its data"] = (
                scores[row.name] >= mean - 10
            )
    for learner in ("iql", "td3+bc"):
        if {name := f"hopper-replay-{learner}", base := "hopper-replay-bc"} <= results.keys():
            met[f"{name}: 1.3 times the score of bc"] = scores[name] >= 1.3 * scores[base]
    if {"hopper-medium-rebrac", "hopper-medium-td3+bc"} <= results.keys():
        met["hopper-medium-rebrac: above td3+bc"] = (
            scores["hopper-medium-rebrac"] > scores["hopper-medium-td3+bc"]
        )
    for name, bar in (("pendulum-replay-iql", -200), ("cartpole-replay-cql", 450)):
        if name in results:
            met[f"{name}: mean of {bar} or more"] = means[name] >= bar
    return met


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the lines of the page."""
    lines = [
        "| data | its mean | `jaxrl-dist ...` | return of each seed | mean | normalised | minutes |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for row in ROWS:
        if (entry := results.get(row.name)) is None:
            continue
        data = entry["data"]
        mean = float(np.mean(entry["returns"]))
        words = entry["command"].removeprefix("jaxrl-dist ")
        cells = (
            f"{row.task} {row.kind}, {data['steps']:,} steps",
            f"{data['mean']:.4g} ({score(entry, data['mean']):.3g})",
            f"`{words}`",
            " ".join(f"{x:.4g}" for x in entry["returns"]),
            f"{mean:.4g}",
            f"{score(entry, mean):.3g}",
            f"{entry['seconds'] / 60:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    known = {row.task: results[row.name]["data"] for row in ROWS if row.name in results}
    for task, data in known.items():
        lines += [
            "",
            f"{task}: a normalised 0 is {data['random']:.4g}, and 100 is {data['expert']:.4g}.",
        ]
    lines += [
        "",
        *(f"- {goal}: {'met' if met else '**missed**'}" for goal, met in goals(results).items()),
    ]
    if missing := [f"`{row.name}`" for row in ROWS if row.name not in results]:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    return lines


def load() -> dict[str, Any]:
    """Returns the stored results, by name of the row, in the order of ``ROWS``."""
    if RESULTS.exists():
        kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    else:
        kept = {}
    return {row.name: kept[row.name] for row in ROWS if row.name in kept}


def write(results: Mapping[str, Any]) -> None:
    """Writes the results and the page."""
    RESULTS.parent.mkdir(exist_ok=True)
    learning.write(RESULTS, {row.name: results[row.name] for row in ROWS if row.name in results})
    page = DOCS / "evidence" / "records.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    page.write_text(
        "\n".join([f"{before}{MARKS[0]}", "", *table(results), "", f"{MARKS[1]}{after}"]),
        encoding="utf-8",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the selected rows; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="NAME", help="run this row, or all whose names contain it"
    )
    parser.add_argument(
        "--data", type=pathlib.Path, default=pathlib.Path("data"), metavar="DIR", help="data sets"
    )
    parser.add_argument(
        "--missing", action="store_true", help="run only the rows that results.json lacks"
    )
    parser.add_argument(
        "--draw", action="store_true", help="run nothing; write the page from results.json"
    )
    args = parser.parse_args(argv)
    rows = [
        row for row in ROWS if args.only in row.name and not (args.missing and row.name in load())
    ]
    for row in [] if args.draw else rows:
        record(row.task, args.data / row.task)
        entry = measure(row, args.data)
        write(load() | {row.name: entry})
        print(
            f"{row.name}: {' '.join(map(str, entry['returns']))}, {entry['seconds']} s", flush=True
        )
    write(load())
    missed = [goal for goal, met in goals(load()).items() if not met]
    for goal in missed:
        print(f"missed: {goal}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
