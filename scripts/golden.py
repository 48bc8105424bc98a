"""Shows whether a code change changes a number: makes short runs before and after it,
and compares them.

    PYTHONPATH=BEFORE python scripts/golden.py record /tmp/before PYTHONPATH=AFTER python
    scripts/golden.py record /tmp/after python scripts/golden.py compare /tmp/before /tmp/after
    python scripts/golden.py compare /tmp/before /tmp/after --tolerance 1e-5 --first-update --only
    'gymnax|envpool'

``PYTHONPATH`` is the root of a source tree, such as a git worktree of the commit before. ``record``
makes the runs of ``RUNS`` in some ten minutes; those of several agents need the extras jaxmarl and
pgx. It keeps each run's reports without times (``metrics.jsonl``) and its variables after the first
and the last report (``.npz``). A session keeps its last variables and the numbers that its commands
print. ``manifest.json`` has the commands and the errors of failed runs. With the same versions and
machine, all of this is reproducible bit for bit. ``compare`` prints for each run whether it is
equal bit for bit, or where it differs first and by how much. The exit code is 1 if a run has failed
or differs (with ``--tolerance X``, by more than X), and 2 if files or flags are wrong.

A difference is relative to the largest number of its array, or to ``FLOOR``. ``--first-update``
compares only first reports, where rounding differences have not yet led to different actions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import json
import pathlib
import platform
import re
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxrl_dist
import jaxrl_dist.cli

FLOOR = 1e-2
"""Differences of smaller numbers are relative to this,
because sums that cancel have few significant digits."""
TIMED = (
    "time/",
    "async/queue",
    "async/sent",
    "async/dropped",
    "async/learner_idle",
    "async/actor_idle",
)
"""Prefixes of metrics that depend on the clock or on the timing of threads."""

# --- Runs -----------------------------------------------------------------------------------------

COMMON = (
    "--hidden-sizes 16 --num-envs 8 --rollout-length 8 --total-env-steps 300 --report-interval 1 "
    "--evaluation-episodes 0 --seed 7"
)
"""Five or six iterations of 64 steps, with a report after each."""
MINIBATCHES = "--num-epochs 2 --num-minibatches 2"
REPLAY = "--batch-size 16 --replay-capacity 192 --replay-ratio 0.03125 --learning-starts 32"
"""Updates begin in the first iteration, and the memory is full after three."""
OF_ALGORITHM = {
    **dict.fromkeys(("ppo", "appo", "pqn"), MINIBATCHES),
    **dict.fromkeys(
        (
            "dqn",
            "rainbow",
            "qmix",
            "vdn",
            "ddpg",
            "td3",
            "sac",
            "iql",
            "marwil",
            "bc",
            "apex",
            "apex-ddpg",
        ),
        REPLAY,
    ),
    "alphazero": f"{MINIBATCHES} --num-simulations 2",
    "muzero": f"{REPLAY} --num-simulations 2 --state-size 8 --num-atoms 9 --unroll-steps 2 --n-step 2",
    "r2d2": f"{REPLAY} --burn-in 1 --sequence-length 3 --n-step 2",
    "async-dqn": "--batch-size 16",
}
OF_PLAN = {"asynchronous": "--lockstep", "gradients": "--num-actors 1"}


class Run(NamedTuple):
    """A short run; ``flags`` follow the flags of all runs, of its algorithm and of its plan."""

    algorithm: str
    plan: str
    env: str
    devices: str
    flags: str = ""

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.]+", "-", "-".join(self).replace("--", "")).strip("-")

    @property
    def settings(self) -> dict[str, str]:
        """All flags and their values; later layers override earlier ones."""
        layers = (COMMON, OF_ALGORITHM.get(self.algorithm), OF_PLAN.get(self.plan), self.flags)
        text = " ".join(filter(None, (f"--plan {self.plan} --num-devices {self.devices}", *layers)))
        return {
            name: value
            for name, _, value in (part.partition(" ") for part in text[2:].split(" --"))
        }

    @property
    def command(self) -> str:
        flags = " ".join(f"--{name} {value}".rstrip() for name, value in self.settings.items())
        return f"JAX_NUM_CPU_DEVICES=8 jaxrl-dist train {self.algorithm} --env {self.env} {flags}"

    @property
    def reports(self) -> int | None:
        """Number of reports to keep, None for all; under ``gradients``,
        later ones depend on the timing of threads.
        """
        return 1 if self.plan == "gradients" else None


TABLE = """\
ppo on_device gymnax:CartPole-v1 8 --evaluation-episodes 2
ppo on_device gymnax:Pendulum-v1 1 --core gru --normalize-observations --scale-rewards
ppo on_device gymnax:Pendulum-v1 8 --normalize-observations --scale-rewards --time-limit 5
ppo on_device gymnax:Breakout-MinAtar 1 --frame-stack 2 --clip-rewards 1
a2c on_device gymnax:CartPole-v1 8
pg on_device gymnax:CartPole-v1 1
impala on_device gymnax:CartPole-v1 8 --core gru
appo on_device gymnax:CartPole-v1 1
pqn on_device gymnax:CartPole-v1 8
dqn on_device gymnax:CartPole-v1 1
dqn on_device gymnax:Breakout-MinAtar 8 --frame-stack 2 --n-step 3 --priority-exponent 0.6
rainbow on_device gymnax:CartPole-v1 1
r2d2 on_device gymnax:CartPole-v1 8
alphazero on_device gymnax:CartPole-v1 8 --search puct --normalize-observations --epsilon 0.1
muzero on_device gymnax:CartPole-v1 8
qmix on_device gymnax:CartPole-v1 1
vdn on_device gymnax:CartPole-v1 8
ddpg on_device gymnax:Pendulum-v1 1 --noise parameter --normalize-observations
td3 on_device gymnax:Pendulum-v1 8 --normalize-observations --scale-rewards
sac on_device gymnax:CartPole-v1 1 --priority-exponent 0.6
sac on_device gymnax:Pendulum-v1 8
iql on_device gymnax:Pendulum-v1 8
marwil on_device gymnax:CartPole-v1 8 --n-step 4
bc on_device gymnax:Pendulum-v1 1
es on_device gymnax:CartPole-v1 8
ars on_device gymnax:Pendulum-v1 1
ppo synchronous envpool:CartPole-v1 1 --normalize-observations --scale-rewards --evaluation-episodes 2
ppo synchronous gymnasium:CartPole-v1 1 --env-workers processes
a2c synchronous gymnasium:CartPole-v1 8 --evaluation-episodes 2
pg synchronous gymnax:CartPole-v1 1 --core gru
impala synchronous envpool:CartPole-v1 8
appo synchronous gymnasium:Pendulum-v1 1 --action-repeat 2
pqn synchronous envpool:CartPole-v1 8
dqn synchronous envpool:Pong-v5 1 --torso minatar
dqn synchronous gymnasium:CartPole-v1 8 --frame-stack 3 --priority-exponent 0.6
rainbow synchronous gymnax:CartPole-v1 1
r2d2 synchronous envpool:CartPole-v1 8
muzero synchronous gymnasium:CartPole-v1 1 --search puct
qmix synchronous gymnasium:CartPole-v1 8
ddpg synchronous gymnasium:Pendulum-v1 1
td3 synchronous envpool:Pendulum-v1 8
sac synchronous gymnasium:Pendulum-v1 1
iql synchronous envpool:CartPole-v1 1
marwil synchronous envpool:Pendulum-v1 1 --n-step 4 --priority-exponent 0.6
bc synchronous gymnasium:CartPole-v1 8
es synchronous envpool:Pendulum-v1 1
ars synchronous envpool:CartPole-v1 8
ppo asynchronous envpool:CartPole-v1 8 --lag 0
a2c asynchronous gymnasium:CartPole-v1 1 --env-workers processes
pg asynchronous envpool:Pendulum-v1 8
impala asynchronous gymnax:CartPole-v1 1 --core gru --lag 2
impala asynchronous envpool:CartPole-v1 4 --actor-devices 0,1 --learner-devices 4-7 --normalize-observations
appo asynchronous gymnasium:CartPole-v1 8
pqn asynchronous gymnax:CartPole-v1 1
dqn asynchronous envpool:CartPole-v1 8
rainbow asynchronous gymnasium:CartPole-v1 1
r2d2 asynchronous gymnax:CartPole-v1 8
alphazero asynchronous gymnax:CartPole-v1 1 --temperature-moves 4
muzero asynchronous gymnax:CartPole-v1 1 --bootstrap stored
qmix asynchronous envpool:CartPole-v1 1
ddpg asynchronous envpool:Pendulum-v1 1 --noise parameter
td3 asynchronous gymnax:Pendulum-v1 8
sac asynchronous envpool:Pendulum-v1 1
iql asynchronous gymnax:CartPole-v1 8
marwil asynchronous envpool:CartPole-v1 1 --n-step 4 --priority-exponent 0.6
bc asynchronous envpool:CartPole-v1 8
apex asynchronous envpool:CartPole-v1 1 --num-actors 4
apex-ddpg asynchronous gymnax:Pendulum-v1 8
ppo gradients gymnax:CartPole-v1 1 --num-epochs 1 --num-minibatches 1 --no-normalize-observations --no-scale-rewards
a2c gradients envpool:CartPole-v1 8 --no-normalize-observations --no-scale-rewards
pg gradients gymnasium:CartPole-v1 1
dqn gradients gymnax:CartPole-v1 1 --no-normalize-observations
ddpg gradients envpool:Pendulum-v1 1
td3 gradients gymnax:Pendulum-v1 1
sac gradients gymnasium:Pendulum-v1 1
a3c gradients gymnax:CartPole-v1 1
async-dqn gradients envpool:CartPole-v1 8
"""


class Session(NamedTuple):
    """Commands one after the other, for what a single run of one policy does not show."""

    title: str
    steps: str
    """Commands with their arguments, separated by ``"; "``. RUN is a new directory;
    see also ``DATA``."""

    @property
    def name(self) -> str:
        return f"session-{self.title}"

    @property
    def command(self) -> str:
        calls = self.steps.split("; ")
        return "; ".join(f"JAX_NUM_CPU_DEVICES=8 jaxrl-dist {call}" for call in calls)

    def commands(self, folder: pathlib.Path) -> list[list[str]]:
        """Returns the arguments of ``jaxrl-dist`` for each command, with its places in
        ``folder``.
        """

        def placed(word: str) -> str:
            return re.sub("^(RUN|DATA)", lambda place: str(folder / place[1].lower()), word)

        return [list(map(placed, call.split())) for call in self.steps.split("; ")]


WORDS = {
    "PPO": f"ppo {MINIBATCHES}",
    "DQN": f"dqn {REPLAY}",
    "MORE": "then resume --total-env-steps 600",
    "TAG": (
        "--policy prey=ppo:agent_0 --policy hunter=dqn:adversary_* --prey.hidden-sizes 16 --hunter.hidden-sizes 16 "
        "--prey.num-epochs 2 --prey.num-minibatches 2 --hunter.batch-size 16 --hunter.replay-capacity 1920 "
        "--hunter.replay-ratio 0.03125 --hunter.learning-starts 96"
    ),
    "ONLINE": f"{COMMON.replace('--hidden-sizes 16 ', '')} --num-devices 1 --run-dir RUN/played",
    "LEARN": (
        "--hidden-sizes 16 --batch-size 16 --total-updates 60 --report-interval 20 --evaluation-episodes 0 --seed 7 "
        "--num-devices 1 --run-dir RUN/learnt"
    ),
    "WIDE": "--hidden-sizes 16",
    "FURTHER": "resume RUN/played --total-env-steps 400",
    "PACE": (
        "--env jaxmarl:MPE_simple_spread_v3 --a.hidden-sizes 16 --b.hidden-sizes 16 --num-actors 1 --num-envs 8 "
        "--rollout-length 8 --total-env-steps 64 --report-interval 1 --evaluation-episodes 0 --seed 7 --num-devices 1 "
        "--run-dir RUN/played"
    ),
    "PRINT": "--episodes 20 --json",
    "SAMPLE": "--evaluation-policy sampled",
    "FITTED": "--data DATA/discrete --updates 50 --refits 3 --hidden-sizes 8 --json",
    "ON": "resume RUN/learnt --total-updates 80",
    "GAME": "--policy new=ppo:player_0 --new.hidden-sizes 16 --new.num-epochs 2 --new.num-minibatches 2",
}
"""What stands for the words in capitals in ``SESSIONS`` and ``STUDIES``."""
SESSIONS = """\
ppo gymnax:CartPole-v1 8 PPO --normalize-observations MORE
dqn gymnax:CartPole-v1 1 DQN --priority-exponent 0.6 --n-step 3 MORE
r2d2 gymnax:CartPole-v1 1 r2d2 --batch-size 16 --burn-in 1 --sequence-length 3 --n-step 2 --learning-starts 32 MORE
host gymnasium:CartPole-v1 1 a2c --plan synchronous MORE
seeds gymnax:CartPole-v1 8 PPO --seeds 4 --evaluation-interval 128 MORE
vary gymnax:CartPole-v1 1 DQN --vary learning-rate=1e-3,1e-4 n-step=1,2 MORE
vary-host envpool:CartPole-v1 1 PPO --vary learning-rate=1e-3,1e-4
seeds-in-turn gymnax:CartPole-v1 1 impala --plan asynchronous --lockstep --seeds 2
pbt gymnax:CartPole-v1 1 DQN --vary learning-rate=1e-3,1e-4 --seeds 3 --evolve pbt --evolve-interval 64 MORE
halving gymnax:CartPole-v1 8 PPO --seeds 4 --evolve halving --evolve-interval 64 MORE
average gymnax:CartPole-v1 1 PPO --seeds 2 --average-every 2
team jaxmarl:MPE_simple_spread_v3 8 vdn --batch-size 16 --replay-capacity 1920 --learning-starts 32 MORE
policies jaxmarl:MPE_simple_tag_v3 1 TAG MORE
policies-host jaxmarl:MPE_simple_tag_v3 8 TAG --plan synchronous
policies-threads jaxmarl:MPE_simple_tag_v3 1 TAG --plan asynchronous --lockstep
self-play pgx:tic_tac_toe 1 GAME --policy old=copy(new,4,2):player_1 MORE
random pgx:tic_tac_toe 8 GAME --policy old=random:player_1 --seeds 2
"""


STUDIES = """\
offline-dqn train dqn --data DATA/discrete LEARN --cql-weight 1 --n-step 2; ON
offline-iql train iql --data DATA/continuous LEARN --normalize-observations; ON
offline-marwil train marwil --data DATA/discrete LEARN --n-step 4; ON
offline-bc train bc --data DATA/continuous LEARN --seeds 2; ON
offline-td3+bc train td3+bc --data DATA/continuous LEARN; ON
offline-gru train dqn --data DATA/discrete LEARN --core gru --core-size 8 --burn-in 1 --sequence-length 3; ON
offline-host train dqn --data DATA/discrete LEARN --data-memory host; ON
data-share train DQN WIDE --data DATA/discrete --data-share 0.5 --env gymnax:CartPole-v1 ONLINE; FURTHER
recorded train DQN WIDE --env gymnax:Catch-bsuite ONLINE --record DATA/played; train iql --data DATA/played LEARN
own-pace train --policy a=ppo:agent_0 --policy b=a2c:agent_1,agent_2 --plan own_pace PACE
evaluate train PPO WIDE --env gymnax:CartPole-v1 ONLINE; evaluate RUN/played PRINT; evaluate RUN/played SAMPLE PRINT
match train GAME --policy old=random:player_1 --env pgx:tic_tac_toe ONLINE; match RUN/played random --games 40 --json
estimate train PPO WIDE --env gymnax:CartPole-v1 ONLINE; estimate RUN/played SAMPLE FITTED
exact train DQN WIDE --env gymnax:Catch-bsuite ONLINE --exact; exact RUN/played --json
"""
"""Titles and commands: records in ``DATA``, and numbers that commands print."""
DATA_EPISODES = 12
"""Episodes of each data set in ``DATA``; the first has 3 steps, and each further one a step
more."""


def expanded(text: str) -> str:
    """Returns a text with what its words in capitals stand for."""
    return " ".join(
        WORDS.get(word.rstrip(";"), word.rstrip(";")) + ";" * word.endswith(";")
        for word in text.split()
    )


def session(line: str) -> Session:
    """Reads a line of ``SESSIONS``."""
    title, env, devices, text = expanded(line).split(maxsplit=3)
    flags, *resumed = text.split(" then ")
    common = COMMON.replace("--evaluation-episodes 0", "--evaluation-episodes 2")
    if "--policy" in flags:
        common = common.replace("--hidden-sizes 16 ", "")
    train = f"train {flags} --env {env} --num-devices {devices} {common} --run-dir RUN"
    again = [call.replace("resume", "resume RUN", 1) for call in resumed]
    return Session(title, "; ".join([train, *again]))


def study(line: str) -> Session:
    """Reads a line of ``STUDIES``."""
    return Session(*expanded(line).split(maxsplit=1))


RUNS: list[Run | Session] = [
    *(Run(*line.split(maxsplit=4)) for line in TABLE.splitlines()),
    *map(session, SESSIONS.splitlines()),
    *map(study, STUDIES.splitlines()),
]

# --- Recording ------------------------------------------------------------------------------------


def fields(settings: Mapping[str, str]) -> dict[str, Any]:
    """Converts flags of the command line to arguments of ``preset``."""
    values: dict[str, Any] = {}
    for flag, text in settings.items():
        name = flag.replace("-", "_")
        if not text:
            values[name.removeprefix("no_")] = not name.startswith("no_")
        elif re.fullmatch(r"[\d.]+", text):
            number = json.loads(text)
            if name == "hidden_sizes":
                values[name] = (number,)
            else:
                values[name] = number
        else:
            values[name] = text
    return values


def leaves(variables: Any) -> dict[str, Any]:
    """Returns arrays by path."""
    paths = jax.tree_util.tree_leaves_with_path(variables)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in paths
    }


def record_run(run: Run, folder: pathlib.Path) -> int:
    """Makes a run, writes its reports and variables, and returns the number of reports."""
    folder.mkdir()
    config = jaxrl_dist.preset(run.algorithm, run.env, **fields(run.settings))
    lines: list[str] = []
    for report in itertools.islice(jaxrl_dist.train(config), run.reports):
        numbers = {
            "env_steps": report.env_steps,
            "updates": report.updates,
            "iteration": report.iteration,
        }
        metrics = {
            name: value for name, value in report.metrics.items() if not name.startswith(TIMED)
        }
        evaluation = {
            f"evaluation/{name}": value for name, value in (report.evaluation or {}).items()
        }
        lines.append(json.dumps({**numbers, **metrics, **evaluation}) + "\n")
        variables = leaves(report.variables())
        if len(lines) == 1:
            np.savez(folder / "first.npz", **variables)
    np.savez(folder / "final.npz", **variables)
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return len(lines)


def write_data(folder: pathlib.Path) -> None:
    """Writes the data sets of ``DATA``: random episodes of CartPole's spaces,
    with discrete and continuous actions.
    """
    rng = np.random.default_rng(7)
    for name in ("discrete", "continuous"):
        episodes = []
        for number in range(DATA_EPISODES):
            steps = 3 + number
            discrete = name == "discrete"
            if discrete:
                action = rng.integers(0, 2, steps)
            else:
                action = rng.uniform(-1, 1, (steps, 1)).astype(np.float32)
            episode = {
                "obs": rng.normal(size=(steps + 1, 4)).astype(np.float32),
                "action": action,
                "reward": rng.normal(size=steps).astype(np.float32),
                "terminated": number % 2 == 0,
                "log_prob": np.full(steps, np.log(0.5), np.float32),
            }
            episodes.append(episode)
        jaxrl_dist.Dataset.from_episodes(episodes).save(folder / name)


def numbers(printed: Any, name: str = "") -> dict[str, float]:
    """Returns the numbers in JSON by their paths, without times."""
    if isinstance(printed, Mapping | Sequence) and not isinstance(printed, str):
        items: Any = enumerate(printed)
        if isinstance(printed, Mapping):
            items = printed.items()
        found: dict[str, float] = {}
        for key, value in items:
            found |= numbers(value, f"{name}/{key}")
        return found
    if isinstance(printed, int | float) and "time" not in name:
        return {name: printed}
    return {}


def record_session(session: Session, folder: pathlib.Path) -> int:
    """Runs a session's commands, and keeps what they print as JSON,
    and all runs' reports and trained variables.
    """
    folder.mkdir()
    reports: list[str] = []
    variables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        place = pathlib.Path(made)
        where = place / "run"
        write_data(place / "data")
        for number, (name, *flags) in enumerate(session.commands(place), 1):
            if name in ("train", "resume"):
                quiet = ["--quiet"]
            else:
                quiet = []
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                code = jaxrl_dist.cli.main([name, *flags, *quiet])
            if code:
                raise RuntimeError(f"{name} has ended with {code}")
            if "--json" in flags:
                found = numbers(json.loads(printed.getvalue()), f"{number}, {name}")
                reports.append(json.dumps(found) + "\n")
        for file in sorted(where.rglob("metrics.jsonl")):
            run = file.parent.relative_to(where).as_posix()
            for line in file.read_text(encoding="utf-8").splitlines():
                kept = {
                    name: x
                    for name, x in json.loads(line).items()
                    if name != "wall_time_s" and not name.startswith(TIMED)
                }
                reports.append(json.dumps({f"{run}: {name}": x for name, x in kept.items()}) + "\n")
            if (file.parent / "checkpoints" / "final").exists():
                named = leaves(jaxrl_dist.load_policy(file.parent).variables)
                variables |= {f"{run}: {name}": x for name, x in named.items()}
    np.savez(folder / "first.npz")
    np.savez(folder / "final.npz", **variables)
    (folder / "metrics.jsonl").write_text("".join(reports), encoding="utf-8")
    return len(reports)


def record(directory: pathlib.Path, only: str) -> int:
    """Makes the runs, writes ``manifest.json`` after each, and returns 1 if one has failed."""
    directory.mkdir(parents=True)
    jax.config.update("jax_num_cpu_devices", 8)
    jax.devices()  # once JAX has begun, no command chooses another number of devices
    packages = (
        "jaxrl-dist",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "numpy",
        "gymnax",
        "envpool",
        "gymnasium",
    )
    versions = {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
    entries: dict[str, dict[str, str]] = {}
    manifest = {
        "package": jaxrl_dist.__file__,
        "machine": platform.platform(),
        "versions": versions,
        "runs": entries,
    }
    chosen = [run for run in RUNS if re.search(only, run.name)]
    for number, run in enumerate(chosen, 1):
        began = time.perf_counter()
        entry = {"command": run.command}
        try:
            with warnings.catch_warnings(action="ignore"):
                folder = directory / run.name
                if isinstance(run, Session):
                    count = record_session(run, folder)
                else:
                    count = record_run(run, folder)
                outcome = f"{count} reports"
        except Exception as error:
            outcome = entry["error"] = " ".join(f"{type(error).__name__}: {error}".split())
        entries[run.name] = entry
        (directory / "manifest.json").write_text(
            json.dumps(manifest, indent=1) + "\n", encoding="utf-8"
        )
        print(
            f"{number}/{len(chosen)} {run.name}: {outcome}, {time.perf_counter() - began:.1f} s",
            flush=True,
        )
    return int(not chosen or any("error" in entry for entry in entries.values()))


# --- Comparing ------------------------------------------------------------------------------------


def places(folder: pathlib.Path, first_update: bool) -> dict[str, np.ndarray]:
    """Returns all numbers of a run in chronological order,
    by names such as ``report 1, loss/total``.
    """
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    groups = [(f"report {number}", json.loads(line)) for number, line in enumerate(lines, 1)]
    with np.load(folder / "first.npz") as first, np.load(folder / "final.npz") as final:
        groups = [
            *groups[:1],
            ("first variables", dict(first)),
            *groups[1:],
            ("final variables", dict(final)),
        ]
    return {
        f"{group}, {name}": x
        if isinstance(x, np.ndarray)
        else np.array([] if x is None else x, np.float64)
        for group, values in groups[: 2 if first_update else None]
        for name, x in values.items()
    }


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest relative difference of two arrays of equal shape;
    inf if NaNs or infinities differ.
    """
    a = a.astype(np.float64)
    b = b.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    a = a[finite]
    b = b[finite]
    return float(
        np.abs(a - b).max(initial=0.0)
        / max(np.abs(a).max(initial=FLOOR), np.abs(b).max(initial=FLOOR))
    )


def differences(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, float, str]]:
    """Yields each place where two runs are not equal bit for bit, in order: place,
    relative difference, numbers.
    """
    for place in {**a, **b}:
        if place not in a or place not in b:
            yield place, float("inf"), f"only in {'A' if place in a else 'B'}"
        elif (a[place].dtype, a[place].shape) != (b[place].dtype, b[place].shape):
            yield (
                place,
                float("inf"),
                " against ".join(f"{x[place].dtype}{list(x[place].shape)}" for x in (a, b)),
            )
        elif a[place].tobytes() != b[place].tobytes():
            if a[place].size == 1:
                numbers = f"{a[place]} against {b[place]}"
            else:
                numbers = f"array {list(a[place].shape)}"
            yield place, relative(a[place], b[place]), numbers


def compare_run(
    a: pathlib.Path, b: pathlib.Path, tolerance: float, first_update: bool
) -> tuple[bool, str]:
    """Returns True if two recordings of a run agree, and a line that describes the comparison."""
    unequal = list(differences(places(a, first_update), places(b, first_update)))
    if not unequal:
        return True, "equal"
    agree = tolerance > 0 and all(size <= tolerance for _, size, _ in unequal)
    place, _, numbers = unequal[0]
    first, final = (
        max((size for place, size, _ in unequal if place.startswith(starts)), default=0.0)
        for starts in (("report 1,", "first variables,"), "final variables,")
    )
    sizes = f"relative, first report {first:.2g}" + (
        "" if first_update else f", final variables {final:.2g}"
    )
    return agree, f"{'close' if agree else 'DIFFERS'}, first at {place} ({numbers}); {sizes}"


def compare(
    a: pathlib.Path, b: pathlib.Path, only: str, tolerance: float, first_update: bool
) -> int:
    """Compares two recordings, prints a line per run, and returns 1 if they do not agree."""
    before, after = (
        json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        for directory in (a, b)
    )
    for name, version in before["versions"].items():
        if version != (other := after["versions"].get(name)):
            print(f"versions: {name} {version} against {other}")
    names = [name for name in {**before["runs"], **after["runs"]} if re.search(only, name)]
    failed = 0
    for name in names:
        entries = [
            manifest["runs"].get(name, {"error": "not recorded"}) for manifest in (before, after)
        ]
        if any("error" in entry for entry in entries):
            agree = False
            text = "FAILED, " + " against ".join(
                entry.get("error", "recorded") for entry in entries
            )
        elif entries[0]["command"] != entries[1]["command"]:
            agree = False
            text = "DIFFERS in its command"
        else:
            try:
                agree, text = compare_run(a / name, b / name, tolerance, first_update)
            except (OSError, ValueError, zipfile.BadZipFile) as error:
                # a file is missing or damaged
                agree = False
                text = f"FAILED, {error}"
        failed += not agree
        print(f"{name}: {text}")
    print(f"{len(names) - failed} of {len(names)} runs agree")
    return int(failed > 0 or not names)


def main(argv: Sequence[str] | None = None) -> int:
    """Records or compares, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="make the runs and keep their numbers")
    recording.add_argument(
        "directory", type=pathlib.Path, metavar="DIR", help="where; must not exist"
    )
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("a", type=pathlib.Path, metavar="A")
    comparing.add_argument("b", type=pathlib.Path, metavar="B")
    comparing.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="relative; 0: bit for bit"
    )
    comparing.add_argument(
        "--first-update", action="store_true", help="compare first reports alone"
    )
    for command in (recording, comparing):
        command.add_argument(
            "--only",
            default="",
            metavar="PATTERN",
            help="regular expression that a run's name holds",
        )
    args = parser.parse_args(argv)
    try:
        if args.command == "record":
            return record(args.directory, args.only)
        return compare(args.a, args.b, args.only, args.tolerance, args.first_update)
    except (OSError, ValueError, LookupError, re.error) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
