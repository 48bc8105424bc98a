#!/usr/bin/env python
"""Measures how fast runs are, compared with what their parts allow,
with the machine and with other libraries.

    python scripts/benchmark.py --minutes 20 --out speed                  # the rows for this kind
    of device python scripts/benchmark.py --minutes 60 --out speed --with-peers     # other
    libraries too python scripts/benchmark.py --out speed --only cartpole --rounds 5    # some rows
    python scripts/benchmark.py --out speed --draw                        # only write the tables
    and the picture again

Each side of a row runs in a separate process. A round runs all sides one after the other, so a
drift of the machine's speed affects them alike: compare only ratios within a round. Our side is
``scripts/what_binds.py``, which also times each stage of the run alone. Each peer gets a virtual
environment in ``.bench`` when it is first needed. Further calls add rounds. ``OUT/results.json``
holds every measurement, ``OUT/results.md`` the tables, ``OUT/speed.png`` the picture. Nothing else
should use the machine meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
RESULTS = "results.json"
OURS = "jaxrl_dist"
WAITS = "waiting for"
REST = "rest"
REQUIREMENTS = {
    "rejax": ("rejax==0.1.3", "gymnax<1", "jax=={jax}"),
    "SBX": ("sbx-rl==0.28.0", "gymnasium[classic-control]"),
    "SB3": ("stable-baselines3==2.9.2", "gymnasium[classic-control]"),
    # Python 3.11 gets torch's CPU build if pip is configured for it;
    # any other build runs on the CPU too.
    "RLlib": ("ray[rllib]==2.60.0", "torch==2.13.0", "gymnasium[classic-control]", "pillow"),
    "Sample Factory": (
        "sample-factory==2.1.1",
        "torch==2.13.0",
        "envpool==1.2.5",
        "setuptools<81",
        "psutil",
    ),
}
"""Packages of each peer's virtual environment; ``{jax}`` is the version of JAX that our side runs
with. PufferLib is missing because installing version 3.0.0 downloads raylib from outside the
package registry."""


class Row(NamedTuple):
    """A workload."""

    name: str
    suites: str
    """Suites that measure it: some of cpu, gpu and tpu."""
    flags: str
    """Flags of ``jaxrl-dist profile``; peers use the same networks and sizes."""
    peers: Mapping[str, tuple[Any, ...]] = {}
    """Arguments of each peer's script; see ``command``."""


_PPO = (
    "--num-epochs 4 --num-minibatches 4 --hidden-sizes 64 64 --activation tanh --learning-rate 1e-3"
)
_PPO_PLAIN = f"{_PPO} --rollout-length 128 --no-normalize-observations --no-scale-rewards"
_PPO_PEER = {
    "num_steps": 128,
    "num_epochs": 4,
    "num_minibatches": 4,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,
    "agent_kwargs": {"activation": "tanh", "hidden_layer_sizes": [64, 64]},
}
_SEEDS = (
    f"ppo --env gymnax:CartPole-v1 --num-envs 4 {_PPO_PLAIN} --seeds 64 --report-interval 10000"
)
_DQN = "--batch-size 128 --replay-ratio 0.1 --replay-capacity 10000 --hidden-sizes 64 64 --activation relu"
_DQN_REJAX = {
    "num_envs": 10,
    "batch_size": 128,
    "buffer_size": 10_000,
    "fill_buffer": 1000,
    "num_epochs": 1,
}
_SAC = "--num-envs 1 --rollout-length 1 --batch-size 256 --replay-ratio 1 --hidden-sizes 256 256 --activation relu"
_SAC_REJAX = {
    "num_envs": 1,
    "batch_size": 256,
    "buffer_size": 100_000,
    "fill_buffer": 256,
    "num_epochs": 1,
    "hidden_layer_sizes": [256, 256],
    "agent_kwargs": {"activation": "relu"},
}
_SAC_SB3 = {"batch_size": 256, "learning_starts": 1000, "policy_kwargs": {"net_arch": [256, 256]}}


_DQN_RLLIB = {
    "train_batch_size_per_learner": 128,
    "training_intensity": 12.8,
    "dueling": False,
    "num_steps_sampled_before_learning_starts": 1000,
    "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 10_000},
}
_SAC_RLLIB = {
    "train_batch_size_per_learner": 256,
    "training_intensity": 256,
    "num_steps_sampled_before_learning_starts": 1000,
}


def _rllib(sizes: Sequence[int], activation: str) -> dict[str, Any]:
    return {"fcnet_hiddens": sizes, "fcnet_activation": activation}


def _ppo(
    env: str, num_envs: int, steps: int, suites: str = "cpu gpu tpu", *, with_rllib: bool = False
) -> Row:
    """Returns PPO with the usual sizes of PureJaxRL and rejax."""
    peers: dict[str, tuple[Any, ...]] = {
        "rejax": ("ppo", env, steps, {**_PPO_PEER, "num_envs": num_envs})
    }
    if with_rllib:
        batch = {"train_batch_size_per_learner": 128 * num_envs, "minibatch_size": 32 * num_envs}
        training = {**batch, "num_epochs": 4, "lr": 1e-3}
        peers["RLlib"] = "PPO", env, num_envs, 10, training, _rllib([64, 64], "tanh")
    name = f"ppo {env} {num_envs}"
    return Row(
        name,
        suites,
        f"ppo --env gymnax:{env} --num-envs {num_envs} --torso mlp {_PPO_PLAIN}",
        peers,
    )


ROWS = (
    _ppo("CartPole-v1", 4, 1_000_000, with_rllib=True),
    _ppo("CartPole-v1", 64, 2_000_000, with_rllib=True),
    _ppo("CartPole-v1", 2048, 4_000_000),
    _ppo("CartPole-v1", 65_536, 100_000_000, "gpu tpu"),
    Row(
        "ppo CartPole-v1 4, 64 seeds",
        "cpu gpu tpu",
        _SEEDS,
        {"rejax": ("ppo", "CartPole-v1", 50_000, {**_PPO_PEER, "num_envs": 4, "seeds": 64})},
    ),
    _ppo("Breakout-MinAtar", 64, 1_000_000),
    _ppo("Breakout-MinAtar", 2048, 4_000_000),
    Row(
        "ppo Breakout-MinAtar CNN", "cpu gpu tpu", "ppo --env gymnax:Breakout-MinAtar --num-envs 64"
    ),
    Row("pqn Breakout-MinAtar CNN", "cpu gpu tpu", "pqn --env gymnax:Breakout-MinAtar"),
    Row(
        "dqn CartPole-v1 10",
        "cpu gpu tpu",
        f"dqn --env gymnax:CartPole-v1 --num-envs 10 --rollout-length 1 {_DQN}",
        {
            "rejax": ("dqn", "CartPole-v1", 200_000, _DQN_REJAX),
            "SBX": ("sbx", "DQN", "CartPole-v1", 10, 20_000, {"batch_size": 128, "train_freq": 1}),
            "SB3": (
                "stable_baselines3",
                "DQN",
                "CartPole-v1",
                10,
                20_000,
                {"batch_size": 128, "train_freq": 1},
            ),
            "RLlib": ("DQN", "CartPole-v1", 10, 10, _DQN_RLLIB, _rllib([64, 64], "relu")),
        },
    ),
    Row(
        "sac Pendulum-v1",
        "cpu gpu tpu",
        f"sac --env gymnax:Pendulum-v1 {_SAC}",
        {
            "rejax": ("sac", "Pendulum-v1", 5_000, _SAC_REJAX),
            "SBX": ("sbx", "SAC", "Pendulum-v1", 1, 3_000, _SAC_SB3),
            "SB3": ("stable_baselines3", "SAC", "Pendulum-v1", 1, 2_000, _SAC_SB3),
            "RLlib": ("SAC", "Pendulum-v1", 1, 20, _SAC_RLLIB, _rllib([256, 256], "relu")),
        },
    ),
    Row(
        "impala Pong-v5",
        "cpu gpu",
        "impala --env envpool:Pong-v5 --plan asynchronous --num-envs 32 --rollout-length 20",
        {
            "Sample Factory": (
                "Pong-v5",
                32,
                20,
                10,
                20,
                "--serial_mode=True",
                "--num_workers=1",
                "--env_agents=32",
            )
        },
    ),
    Row("ppo Pong-v5", "cpu gpu", "ppo --env envpool:Pong-v5"),
)


# --- Measuring ------------------------------------------------------------------------------------


def main() -> None:
    """Measures in rounds until the minutes are over, and writes the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("speed"))
    parser.add_argument(
        "--suite", choices=("cpu", "gpu", "tpu"), help="default: the one of JAX's default device"
    )
    parser.add_argument(
        "--with-peers", action="store_true", help="measure other libraries, too; installs them"
    )
    parser.add_argument("--only", default="", help="measure the rows whose names contain this text")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--rounds", type=int, default=5, help="largest number, with those of earlier calls"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="that our side of a row is timed, in a round"
    )
    parser.add_argument("--draw", action="store_true", help="only write the tables and the picture")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        suite = args.suite or _backend()
        rows = [
            row
            for row in ROWS
            if suite in row.suites.split() and args.only.lower() in row.name.lower()
        ]
        if not rows:
            sys.exit(
                f"no row of {suite} has {args.only!r} in its name: {', '.join(row.name for row in ROWS)}"
            )
        measure(
            rows, args.out, 60 * args.minutes, args.rounds, args.seconds, with_peers=args.with_peers
        )
    print(
        (args.out / "results.md").read_text(encoding="utf-8")
        if draw(args.out)
        else "nothing has been measured"
    )


def measure(
    rows: Sequence[Row],
    out: pathlib.Path,
    seconds: float,
    rounds: int,
    timed: float,
    *,
    with_peers: bool,
) -> None:
    """Adds rounds to the results until there are ``rounds`` of each row,
    or a row would not end in time.
    """
    results = load(out)
    if "machine" not in results:
        results["machine"] = {
            **_described(),
            **_run([sys.executable, ROOT / "benchmarks" / "ceilings.py"]),
        }
    cpu = _cpu()
    if results["machine"].get("cpu", cpu) != cpu:
        sys.exit(
            f"{out} has rounds of {results['machine']['cpu']}, not of {cpu}; name another --out"
        )
    end = time.monotonic() + seconds
    lasted = dict[str, float]()
    for number in range(rounds):
        for row in rows:
            found = results.setdefault("rows", {}).setdefault(row.name, [])
            if len(found) > number or time.monotonic() + lasted.get(row.name, 0.0) > end:
                continue
            began = time.monotonic()
            sides = {OURS: _ours(row, timed)}
            for peer, arguments in row.peers.items() if with_peers else ():
                sides[peer] = _run(command(peer, arguments))
            lasted[row.name] = time.monotonic() - began
            found.append({side: {"cpu": cpu, **values} for side, values in sides.items()})
            (out / RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            said = ", ".join(
                f"{side} {values.get('rate', float('nan')):,.0f}" for side, values in sides.items()
            )
            print(f"{row.name}: {said}", flush=True)


def _ours(row: Row, seconds: float) -> dict[str, Any]:
    """Profiles a run and returns its rate and its bottleneck; for a population, only the rate."""
    if "--seeds" in row.flags:
        return _run(
            [
                sys.executable,
                ROOT / "benchmarks" / "ours.py",
                *row.flags.split(),
                "--seconds",
                seconds,
            ]
        )
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "profile.json")
        profile = [sys.executable, ROOT / "scripts" / "what_binds.py", *row.flags.split()]
        said = _run([*profile, "--seconds", seconds, "--json", file], text=True)
        if "error" in said:
            return said
        found = json.loads(file.read_text(encoding="utf-8"))
    stages = found["threads"][found["bound"]["thread"]]
    bound = found["bound"]
    idle = sum(spent for stage, spent in stages.items() if stage == REST or stage.startswith(WAITS))
    return {
        "rate": found["env_steps_per_second"],
        "of_bound": 1 - max(idle, 0.0) / found["iteration_seconds"],
        "binds": bound["stage"],
        "share": bound["share"],
        "matmul": found["matmul_rates"].get(bound["stage"], 0.0) / found["matmul_ceiling"],
    }


def command(peer: str, arguments: Sequence[Any]) -> list[Any]:
    """Returns the command of a peer's side,
    and makes the peer's virtual environment if it is missing.
    """
    folder = ROOT / ".bench" / peer.lower().replace(" ", "-")
    if not (folder / "installed").exists():
        print(f"installing {peer} in {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        packages = [
            package.format(jax=importlib.metadata.version("jax")) for package in REQUIREMENTS[peer]
        ]
        subprocess.run([folder / "bin" / "pip", "install", "-q", *packages], check=True)
        (folder / "installed").touch()
    scripts = {
        "rejax": "of_rejax.py",
        "RLlib": "of_rllib.py",
        "Sample Factory": "of_sample_factory.py",
    }
    script = scripts.get(peer, "of_sb3.py")  # SBX has SB3's interface
    told = [json.dumps(value) if isinstance(value, dict) else value for value in arguments]
    return [folder / "bin" / "python", PEERS / script, *told]


def _run(command: Sequence[Any], *, text: bool = False) -> dict[str, Any]:
    """Runs a side and returns the JSON of the last line that it prints, or ``error``; ``text``:
    it prints no JSON.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = dict(os.environ)
    if command[0] == sys.executable:
        env["PYTHONPATH"] = path
    done = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{command[1]} has ended with {done.returncode}: {last}", file=sys.stderr, flush=True)
        return {"error": last}
    if text:
        found: dict[str, Any] = {}
    else:
        found = json.loads(done.stdout.splitlines()[-1])
    return found


def _backend() -> str:
    import jax

    return jax.default_backend()


def _cpu() -> str:
    if sys.platform == "linux":
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    else:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


def _described() -> dict[str, Any]:
    import jax

    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "cpu": _cpu(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


# --- Tables and the picture -----------------------------------------------------------------------


def load(out: pathlib.Path) -> dict[str, Any]:
    """Returns the results so far."""
    path = out / RESULTS
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def spread(values: Sequence[float], form: str) -> str:
    """Returns median and range of some values, such as ``1.2 (1.1 to 1.3)``;
    a dash if there are none.
    """
    if not values:
        return "-"
    median, least, most = (
        f"{x:{form}}" for x in (statistics.median(values), min(values), max(values))
    )
    if len(values) > 1:
        return f"{median} ({least} to {most})"
    return median


def draw(out: pathlib.Path) -> bool:
    """Writes the tables and the picture; returns whether there is anything to show."""
    results = load(out)
    rows = {
        name: [x for x in rounds if "rate" in x[OURS]]
        for name, rounds in results.get("rows", {}).items()
    }
    rows = {name: rounds for name, rounds in rows.items() if rounds}
    if not rows:
        return False
    machine = results["machine"]
    text = [
        f"{machine['device']}, {machine['cpu']}, Python {machine['python']}, jax {machine['jax']}.",
        "",
    ]
    text += [
        f"- {name}: {value:,.1f} {unit}" for name, (value, unit) in machine["ceilings"].items()
    ]
    text += [
        "",
        "| run | env steps/s | share of what its parts allow | what binds | matmul peak reached |",
    ]
    text += ["|---|---:|---:|---|---:|"]
    for name, rounds in rows.items():
        ours = [sides[OURS] for sides in rounds]
        if "binds" in ours[-1]:
            binds = f"{ours[-1]['binds']}, {ours[-1]['share']:.0%}"
        else:
            binds = "-"
        if ours[-1].get("matmul"):
            peak = f"{ours[-1]['matmul']:.0%}"
        else:
            peak = "-"
        of_bound = spread([x["of_bound"] for x in ours if "of_bound" in x], ".2f")
        text.append(
            f"| {name} | {spread([x['rate'] for x in ours], ',.0f')} | {of_bound} | {binds} | {peak} |"
        )
    versus = list(against(rows))
    if versus:
        text += [
            "",
            "| run | peer | its env steps/s | ours / this, round by round |",
            "|---|---|---:|---:|",
        ]
        text += [
            f"| {name} | {peer} | {spread(r, ',.0f')} | {spread(x, '.2f')} |"
            for name, peer, r, x in versus
        ]
    (out / "results.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    _picture(rows, versus, out / "speed.png")
    return True


def against(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Yields ``(row, peer, its rates, ours / its, round by round)``."""
    for name, rounds in rows.items():
        for peer in dict.fromkeys(side for sides in rounds for side in sides if side != OURS):
            pairs = [
                (x[OURS]["rate"], x[peer]["rate"]) for x in rounds if "rate" in x.get(peer, {})
            ]
            if pairs:
                yield (
                    name,
                    peer,
                    [theirs for _, theirs in pairs],
                    [ours / theirs for ours, theirs in pairs],
                )


def _picture(
    rows: Mapping[str, Any], versus: Sequence[tuple[str, str, Any, Any]], file: pathlib.Path
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.32 * max(len(rows), len(versus))), layout="constrained")
    if versus:
        left, right = figure.subplots(1, 2)
    else:
        left = figure.subplots()
        right = None
    shares = {
        name: [x[OURS]["of_bound"] for x in rounds if "of_bound" in x[OURS]]
        for name, rounds in rows.items()
    }
    shares = {name: values for name, values in shares.items() if values}
    left.barh(list(shares), [statistics.median(values) for values in shares.values()])
    left.set(xlabel="share of what the parts allow", xlim=(0, 1.05))
    left.invert_yaxis()
    if right is not None:
        right.barh(
            [f"{name}: {peer}" for name, peer, *_ in versus],
            [statistics.median(x) for *_, x in versus],
        )
        right.axvline(1, color="black", linewidth=1)
        right.set(xlabel="ours / peer", xscale="log")
        right.invert_yaxis()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
