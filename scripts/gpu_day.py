#!/usr/bin/env python
"""Measures a GPU in calls of a few minutes: speed, memory, reproducibility, and Pong to the end.

    python scripts/gpu_day.py --minutes 9 --out gpu     # repeat it: each call does tasks that are
    not done yet python scripts/gpu_day.py --out gpu --draw          # only write the tables and the
    picture again python scripts/gpu_day.py --minutes 9 --out day --rehearse   # small sizes, on any
    machine

The most useful tasks come first. Each runs in a separate process, so a task that fails or hangs
costs one line. A task that does not fit into the minutes left waits for the next call. The last
task trains Pong and continues the same run in each call. ``OUT/results.json`` holds everything,
``OUT/results.md`` the tables and ``OUT/speed.png`` the picture. Without a package index, the
packages must be on ``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = "results.json"
SPARE = 20.0
"""Seconds of a call that are reserved for starting and ending processes."""


class Sizes(NamedTuple):
    """Sizes of the tasks."""

    seconds: float
    """Seconds for which a speed is timed, after compiling."""
    limit: float
    """Seconds after which a task is stopped."""
    widths: tuple[int, ...]
    """Numbers of environments in the compiled program."""
    rollout: int
    seeds: tuple[int, ...]
    """Numbers of runs in one program."""
    atari: str
    """Environment on the host."""
    atari_envs: int
    golden: str
    """Pattern of the golden runs that must be equal."""
    resumed_steps: int
    target: float
    """Return at which the last task ends."""
    extra: tuple[str, ...] = ()
    """Flags of every run."""


FULL = Sizes(
    8.0,
    240.0,
    (2048, 8192, 65536),
    128,
    (1, 64, 1024),
    "envpool:Pong-v5",
    128,
    "on_device",
    2**20,
    18.0,
)
SMALL = Sizes(
    0.2,
    240.0,
    (16,),
    8,
    (2,),
    "envpool:CartPole-v1",
    8,
    "pg-on_device-gymnax-CartPole",
    256,
    9.0,
    ("--hidden-sizes", "8"),
)


class Task(NamedTuple):
    """A measurement."""

    name: str
    run: Callable[[Sizes, pathlib.Path], Any]
    """``(sizes, folder for its files) -> result``, which JSON can hold."""
    goes_on: bool = False
    """Whether it uses all time that is left,
    and continues in the next call until its result says ``done``."""
    xla_flags: str = ""
    """Value of ``XLA_FLAGS`` in the task's process; empty: as here."""


# --- Speed ----------------------------------------------------------------------------------------


def speed(flags: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Trains for some seconds, and returns what a user would see:
    env steps a second after compiling, and memory.

    Args:
      flags: the flags of ``jaxrl-dist train``.
    """
    import dataclasses

    import jax

    import jaxrl_dist
    from jaxrl_dist.commands import request

    asked = request.parse([*flags, *sizes.extra])
    assert asked is not None, "the flags name an algorithm"
    config, _ = asked.resolved()
    interval = max(config.report_interval, 4 * config.num_envs * config.rollout_length)
    config = dataclasses.replace(
        config,
        total_env_steps=10**9,
        report_interval=interval,
        evaluation_episodes=0,
        checkpoint_minutes=0.0,
    )
    began = first = time.perf_counter()
    counted = 0
    last = None
    with Watch() as watch:
        for report in jaxrl_dist.train(config):
            now = time.perf_counter()
            if last is None:
                first, counted = now, report.env_steps
                watch.used.clear()
            last = report
            if now - first >= sizes.seconds and report.env_steps > counted:
                break
    assert last is not None
    stats = jax.local_devices()[0].memory_stats() or {}
    stages = {
        name: last.metrics[name]
        for name in last.metrics
        if name.startswith(("time/learner", "time/actor"))
    }
    return {
        "flags": " ".join(flags)
        + (" (captured)" if os.environ.get("XLA_FLAGS") == CAPTURED else ""),
        "env_steps_per_second": (last.env_steps - counted) / (now - first),
        "first_report_seconds": first - began,
        "memory": stats.get("peak_bytes_in_use"),
        "utilisation": sum(watch.used) / len(watch.used) if watch.used else None,
        **({"stages": stages} if stages else {}),
    }


class Watch:
    """Records the GPU's utilisation in percent twice a second, if ``nvidia-smi`` is installed."""

    def __init__(self) -> None:
        self.used: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def _look(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self._stop.wait(0.5):
            with contextlib.suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
                said = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
                self.used.append(float(said.splitlines()[0]))


def of_widths(*flags: str) -> Callable[[Sizes, pathlib.Path], Any]:
    """Returns the task that measures a run with each number of environments."""

    def task(sizes: Sizes, _: pathlib.Path) -> Any:
        if "--replay-capacity" in flags:
            rollout = []
        else:
            rollout = ["--rollout-length", str(sizes.rollout)]
        return [
            speed([*flags, "--num-envs", str(width), *rollout], sizes) for width in sizes.widths
        ]

    return task


def seeds(sizes: Sizes, _: pathlib.Path) -> Any:
    """Measures populations of PPO with its default sizes; env steps count all members."""
    return [
        speed(["ppo", "--env", "gymnax:CartPole-v1", "--seeds", str(count)], sizes)
        for count in sizes.seeds
    ]


def of_atari(*flags: str) -> Callable[[Sizes, pathlib.Path], Any]:
    """Returns the task that measures a run with environments on the host."""

    def task(sizes: Sizes, _: pathlib.Path) -> Any:
        return [speed([*flags, "--env", sizes.atari, "--num-envs", str(sizes.atari_envs)], sizes)]

    return task


def precisions(sizes: Sizes, _: pathlib.Path) -> Any:
    """Measures PPO with each precision of matrix products, which JAX's own option chooses."""
    import jax

    rows = []
    for precision in ("float32", "tensorfloat32", "bfloat16"):
        with jax.default_matmul_precision(precision):
            flags = ["ppo", "--env", "gymnax:Breakout-MinAtar", "--num-envs", str(sizes.widths[0])]
            rows.append(
                {
                    "precision": precision,
                    **speed([*flags, "--rollout-length", str(sizes.rollout)], sizes),
                }
            )
    return rows


# --- Reproducibility ------------------------------------------------------------------------------


def golden(sizes: Sizes, folder: pathlib.Path, tolerance: float, **second: str) -> dict[str, Any]:
    """Makes golden runs twice and compares them;
    ``second`` sets environment variables of the second time.
    """
    script = [sys.executable, str(ROOT / "scripts" / "golden.py")]
    names = ("a", "b")
    for name, env in zip(names, ({}, second), strict=True):
        shutil.rmtree(folder / name, ignore_errors=True)
        say([*script, "record", str(folder / name), "--only", sizes.golden], **env)
    flags = ["--tolerance", str(tolerance), *(["--first-update"] if tolerance else [])]
    done = subprocess.run(
        [*script, "compare", *(str(folder / name) for name in names), *flags],
        capture_output=True,
        text=True,
    )
    return {"equal": done.returncode == 0, "said": done.stdout.strip().splitlines()}


def as_on_cpu(sizes: Sizes, folder: pathlib.Path) -> Any:
    """Compares the first updates with those of the CPU."""
    return golden(sizes, folder, 1e-3, JAX_PLATFORMS="cpu")


def repeats(sizes: Sizes, folder: pathlib.Path) -> Any:
    """Runs twice and compares every bit."""
    return golden(sizes, folder, 0.0)


def resumes(sizes: Sizes, folder: pathlib.Path) -> Any:
    """Compares N steps, a resume and N steps more with 2 N steps at once, bit for bit."""
    steps = sizes.resumed_steps
    common = [
        "--env",
        "gymnax:CartPole-v1",
        "--num-envs",
        str(sizes.widths[0]),
        "--rollout-length",
        str(sizes.rollout),
    ]
    common += [
        "--evaluation-episodes",
        "0",
        "--report-interval",
        str(steps // 4),
        "--quiet",
        *sizes.extra,
    ]
    shutil.rmtree(folder, ignore_errors=True)
    whole, halves = (str(folder / name) for name in ("whole", "halves"))
    say([*CLI, "train", "ppo", *common, "--total-env-steps", str(2 * steps), "--run-dir", whole])
    say([*CLI, "train", "ppo", *common, "--total-env-steps", str(steps), "--run-dir", halves])
    say([*CLI, "resume", halves, "--total-env-steps", str(2 * steps), "--quiet"])
    lines = [list(learned(pathlib.Path(run) / "metrics.jsonl")) for run in (whole, halves)]
    return {"equal": lines[0] == lines[1], "reports": [len(x) for x in lines]}


def learned(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of ``metrics.jsonl`` without times."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield {name: value for name, value in json.loads(line).items() if "time" not in name}


CLI = [sys.executable, "-m", "jaxrl_dist.cli"]


def say(command: Sequence[str], **env: str) -> str:
    """Runs a command and returns what it prints.

    Raises:
      RuntimeError: the command has failed; the message ends with its stderr.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} has ended with {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    return done.stdout


def doctor(sizes: Sizes, _: pathlib.Path) -> Any:
    """Returns the output of ``jaxrl-dist doctor``."""
    del sizes
    return say([*CLI, "doctor"]).splitlines()


# --- Pong -----------------------------------------------------------------------------------------


def to_the_end(sizes: Sizes, folder: pathlib.Path) -> Any:
    """Trains until ten greedy episodes have a mean return of the target;
    continues the run of an earlier call.
    """
    run_dir = folder / "run"
    command = [
        "train",
        "impala",
        "--env",
        sizes.atari,
        "--num-envs",
        str(sizes.atari_envs),
        "--resume-or-start",
    ]
    command += [
        "--evaluation-episodes",
        "10",
        "--evaluation-interval",
        str(10**6 if sizes is FULL else 2000),
    ]
    command += [
        "--total-env-steps",
        str(10**8),
        "--checkpoint-minutes",
        "1",
        "--run-dir",
        str(run_dir),
        *sizes.extra,
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [*CLI, *command, "--quiet"],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    # the run saves, then ends
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while process.poll() is None:
            time.sleep(0.5)
            if (reached := best(run_dir)) is not None and reached >= sizes.target:
                process.terminate()
                break
        said = process.communicate()[1]
    finally:
        signal.signal(signal.SIGTERM, before)
    if process.returncode not in (0, 143):
        raise RuntimeError(said.strip()[-500:])
    reached = best(run_dir)
    rows = list(learned(run_dir / "metrics.jsonl"))
    done = reached is not None and reached >= sizes.target
    return {"done": done, "return": reached, "env_steps": rows[-1]["env_steps"] if rows else 0}


def best(run_dir: pathlib.Path) -> float | None:
    """Returns the largest mean return of the evaluations so far."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return None
    returns = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the last line may be half written
            returns.append(json.loads(line).get("evaluation/return_mean"))
    return max((value for value in returns if value is not None), default=None)


REPLAY = ("--replay-capacity", str(2**20), "--batch-size", "256")
CAPTURED = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
"""Puts loops and branches into command buffers too: docs/accelerators.md."""
TASKS = (
    Task("doctor", doctor),
    Task("ppo CartPole", of_widths("ppo", "--env", "gymnax:CartPole-v1")),
    Task(
        "ppo CartPole captured", of_widths("ppo", "--env", "gymnax:CartPole-v1"), xla_flags=CAPTURED
    ),
    Task("ppo Breakout", of_widths("ppo", "--env", "gymnax:Breakout-MinAtar")),
    Task("seeds", seeds),
    Task("impala Pong", of_atari("impala")),
    Task("ppo Pong", of_atari("ppo")),
    Task("appo Pong", of_atari("appo")),
    Task("dqn CartPole", of_widths("dqn", "--env", "gymnax:CartPole-v1", *REPLAY)),
    Task(
        "dqn CartPole captured",
        of_widths("dqn", "--env", "gymnax:CartPole-v1", *REPLAY),
        xla_flags=CAPTURED,
    ),
    Task("sac Pendulum", of_widths("sac", "--env", "gymnax:Pendulum-v1", *REPLAY)),
    Task("pqn CartPole", of_widths("pqn", "--env", "gymnax:CartPole-v1")),
    Task("as on the CPU", as_on_cpu),
    Task("repeats", repeats),
    Task("resumes", resumes),
    Task("precision", precisions),
    Task("Pong to the end", to_the_end, goes_on=True),
)


# --- The day --------------------------------------------------------------------------------------


def in_process(task: Task, sizes: Sizes, out: pathlib.Path, seconds: float) -> Any:
    """Runs a task in a separate process for at most ``seconds``.

    Raises:
      RuntimeError: the task has failed, or was stopped.
    """
    answer = out / "answer.json"
    answer.unlink(missing_ok=True)
    rehearse = ["--rehearse"] if sizes is SMALL else []
    command = [sys.executable, __file__, "--out", str(out), "--task", task.name, *rehearse]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ,
        "PYTHONPATH": path,
        **({"XLA_FLAGS": task.xla_flags} if task.xla_flags else {}),
    }
    with (out / "log.txt").open("a") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # the last task's run saves its state
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=SPARE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if not answer.exists():
        raise RuntimeError(
            f"stopped after {seconds:.0f} s" if process.returncode in (-15, None) else "see log.txt"
        )
    return json.loads(answer.read_text(encoding="utf-8"))


def day(
    out: pathlib.Path,
    minutes: float,
    sizes: Sizes,
    start: Callable[[Task, Sizes, pathlib.Path, float], Any] = in_process,
    tasks: Sequence[Task] = TASKS,
) -> dict[str, Any]:
    """Runs the tasks that are not done, in order, until the minutes are over;
    returns all results so far.

    The next call retries a failed task once.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes - SPARE
    for task in tasks:
        results = load(out)
        found = results.get(task.name, {})
        if found.get("done") or found.get("failures", 0) > 1:
            continue
        left = end - time.monotonic()
        if left < (SPARE if task.goes_on else min(sizes.limit, found.get("seconds", SPARE))):
            continue
        began = time.monotonic()
        try:
            result = start(task, sizes, out, left if task.goes_on else min(left, sizes.limit))
            done = result["done"] if task.goes_on else True
            found = {**found, "done": done, "result": result}
        except Exception as error:
            found = {
                **found,
                "failures": found.get("failures", 0) + 1,
                "error": f"{type(error).__name__}: {error}",
            }
        found["seconds"] = time.monotonic() - began
        results = {**load(out), task.name: found}
        partial = out / f"{RESULTS}.partial"
        partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        partial.replace(out / RESULTS)  # a kill leaves the old or the new
        print(
            f"{task.name}: {found.get('error', 'done') if not found.get('done') else 'done'}",
            flush=True,
        )
    draw(out)
    return load(out)


def load(out: pathlib.Path) -> dict[str, Any]:
    """Returns the results so far."""
    path = out / RESULTS
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def draw(out: pathlib.Path) -> None:
    """Writes the tables and the picture from the results."""
    results = load(out)
    text = ["# A day with a GPU", ""]
    rows: list[dict[str, Any]] = []
    for name, found in results.items():
        result = found.get("result")
        if isinstance(result, list) and result and isinstance(result[0], dict):
            rows += [{"task": name, **row} for row in result]
    if rows:
        text += [
            "| run | env steps/s | first report | memory | GPU busy |",
            "|---|---:|---:|---:|---:|",
        ]
        for row in rows:
            if row["memory"] is None:
                memory = ""
            else:
                memory = f"{row['memory'] / 1e9:.2f} GB"
            if row["utilisation"] is None:
                busy = ""
            else:
                busy = f"{row['utilisation']:.0f} %"
            label = f"`{row['flags']}`" + (f", {row['precision']}" if "precision" in row else "")
            rate = row["env_steps_per_second"]
            first = row["first_report_seconds"]
            text.append(f"| {label} | {rate:,.0f} | {first:.1f} s | {memory} | {busy} |")
        picture(out / "speed.png", rows)
    for name, found in results.items():
        result = found.get("result")
        if isinstance(result, Mapping):
            text += [
                "",
                f"{name}: "
                + ", ".join(f"{key} {value}" for key, value in result.items() if key != "said"),
            ]
        elif isinstance(result, list) and result and isinstance(result[0], str):
            text += ["", "```text", *result, "```"]
        if "error" in found and not found.get("done"):
            text += ["", f"{name} has failed: {found['error']}"]
    (out / "results.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def picture(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws a bar of env steps a second for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.3 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    axes.barh([row["flags"] for row in rows], [row["env_steps_per_second"] for row in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="env steps a second")
    axes.tick_params(axis="y", labelsize=6)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the script."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="folder of the results; calls share it"
    )
    parser.add_argument("--rehearse", action="store_true", help="small sizes")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--task", choices=[task.name for task in TASKS], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sizes = SMALL if args.rehearse else FULL
    if args.task is not None:
        (task,) = (task for task in TASKS if task.name == args.task)
        folder = args.out / task.name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        answer = json.dumps(task.run(sizes, folder))
        (args.out / "answer.json").write_text(answer, encoding="utf-8")
    elif args.draw:
        draw(args.out)
    else:
        # so that the task is ended, too
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        day(args.out, args.minutes, sizes)


if __name__ == "__main__":
    main()
