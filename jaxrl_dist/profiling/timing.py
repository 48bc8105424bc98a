"""Measures where the time of a run goes: times the run itself, then each of its stages by itself.

A compiled program does not tell how long its parts take, and a tracer that watches every operation
slows small networks tenfold. So each stage is compiled by itself, gets the inputs it has in the
run, and is repeated as often as in an iteration. The rest of the run's time is a stage too:
starting loops and kernels, moving data, Python.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import pathlib
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_dist.checks import flag
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train, env_name
from jaxrl_dist.config.values import marked, varied
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.profiling import peaks
from jaxrl_dist.profiling import stages as parts
from jaxrl_dist.profiling.advice import REST, bound
from jaxrl_dist.protocols import Traits
from jaxrl_dist.run.storage import replacing
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.policies import by_policy, label
from jaxrl_dist.training import setup
from jaxrl_dist.types import Algorithms, Report

UPDATE = "update"
"""The stage of a host thread that updates; it is divided into the learner's stages."""
HOST_STAGES = {
    "env": "environment",
    "acting": "policy",
    "updating": UPDATE,
    "blocked": "waiting for the learner",
    "parameters": "waiting for parameters",
    "waiting": "waiting for actors",
}
"""Stages of host threads by their names in reports; stages that are not here keep their names."""
LONG = 10**8
"""Minimum env steps of the run, so that its seconds end it."""
LEAST_SECONDS = 0.02
MOST_CALLS = 64
"""Minimum seconds for which a part is called in a round, and maximum number of calls."""
ROUNDS = 5
"""Minimum number of times that each stage is timed; the median counts."""
RUNNING = 0.9
"""Least share of the time of the stages in which this process has a core: with less,
another stage may seem to bind."""
STRETCH = 1.0
"""Minimum seconds of the run between two rounds:
shorter intervals would start with caches filled by the stages."""


class Profile(NamedTuple):
    """Where the time of a run goes."""

    run: Mapping[str, Any]
    """Names and sizes of the run, for JSON."""
    env_steps_per_second: float
    iteration_seconds: float
    threads: Mapping[str, Mapping[str, float]]
    """Seconds of an iteration by thread and stage; those of a thread sum to
    ``iteration_seconds``."""
    matmul_rates: Mapping[str, float]
    """Floating-point operations per second of a stage's matrix products."""
    layers: Mapping[str, Mapping[str, float]]
    """Share of a stage's matrix products in each layer, largest first: counted, not timed."""
    matmul_ceiling: float
    """Operations per second of one large matrix product on each device."""
    memory_rates: Mapping[str, float]
    """Bytes per second that a stage reads and writes, as ``costs.of_memory`` counts them."""
    memory_ceiling: float
    """Bytes per second of reading and writing one large array on each device."""
    flags: Sequence[str] = ()
    """The flags that the run has and that can change as advice says."""
    running: float = 1.0
    """CPU seconds in each second of the stages alone, at most 1;
    less if other programs use the cores. 1 on GPUs."""

    @property
    def busy(self) -> bool:
        """Whether other programs have disturbed the measurement."""
        return self.running < RUNNING

    @property
    def bound(self) -> tuple[str, str, float, str]:
        """As ``advice.bound``; if the machine is busy, the advice is to profile again."""
        thread, stage, share, advice = bound(self.threads, self.iteration_seconds, self.flags)
        if self.busy:
            advice = (
                f"the machine is busy, so no stage is named: the stages had a core for {self.running:.0%} of their "
                "time; profile again when other programs are idle"
            )
        return thread, stage, share, advice


def profile(
    config: Train,
    source: EnvSource,
    seconds: float,
    trace: pathlib.Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Times a run and its stages.

    Updates begin at once, without waiting for ``learning_starts``.

    Args:
      config: resolved; the run writes no files.
      source: its environment.
      seconds: for the run, which makes at least two reports.
        The stages take about as long again. Compiling adds to it.
      trace: the file for a trace of one pass of each stage, as JSON compressed by gzip.
      progress: receives what it does now, in words.

    Raises:
      ConfigError: the config describes a population or several processes, or cannot be run.
      OSError: the trace's file cannot be written.
    """
    config = _learning_only(config)
    if trace is not None and PLANS[config.plan].sends_gradients:
        raise ConfigError(
            f"--trace works with plans that run on devices, not with --plan {config.plan}; remove it"
        )
    run = setup.prepare(config, source)
    progress("compiling the run and its stages")
    made = parts.make_parts(run.job)
    in_turn = not PLANS[config.plan].threaded
    first, last, spent, alone, running = _timed(
        run.reports(), made, seconds, progress, in_turn=in_turn
    )
    if trace is not None:
        _trace(made, trace)
    progress("timing the peaks of the device")
    whole = spent / (last.iteration - first.iteration)
    threads = _of_threads(first, last, whole)
    products = {name: part.layers for name, part in made.items() if part.layers}
    return Profile(
        run=described(config, list(run.job.mesh.devices.flat)),
        env_steps_per_second=(last.env_steps - first.env_steps) / spent,
        iteration_seconds=whole,
        threads={thread: _divided(stages, alone, whole) for thread, stages in threads.items()},
        matmul_rates={
            name: sum(layers.values()) / alone[name] for name, layers in products.items()
        },
        layers={name: _shares(layers) for name, layers in products.items()},
        matmul_ceiling=peaks.matmul_ceiling() * run.job.mesh.size,
        memory_rates={name: part.moved / alone[name] for name, part in made.items()},
        memory_ceiling=peaks.memory_ceiling() * run.job.mesh.size,
        flags=_changeable(config, run.job.algorithm),
        running=running if run.job.mesh.devices.flat[0].platform == "cpu" else 1.0,
    )


def _changeable(config: Train, made: Algorithms) -> list[str]:
    """Returns the flags of a run, but those that cannot change as advice says.

    The run follows it already, or its loss would take
    experience of older policies for that of the newest.
    """
    done = {"precision": "bfloat16", "num_epochs": 1, "num_minibatches": 1}
    lags = all(x.corrects_lag or x.replay is not None for x in made.values() if x.trains)
    done |= {"plan": config.plan} if PLANS[config.plan].threaded or not lags else {}
    parts = (config, *(part.algorithm for part in by_policy(config).values()))
    return [
        flag(x)
        for part in parts
        for x in marked(part)
        if x not in done or getattr(part, x) != done[x]
    ]


def _learning_only(config: Train) -> Train:
    """Returns the config of a long run in which all policies learn from the first env step on,
    and that does no more.

    Raises:
      ConfigError: the config describes a population or several processes.
    """
    if is_population(config):
        raise ConfigError("profile measures one run; remove --seeds and --vary")
    if config.coordinator is not None:
        raise ConfigError("profile measures one process; remove --coordinator")
    if config.data is not None:
        raise ConfigError("profile measures learning from new experience alone; remove --data")
    total = max(config.total_env_steps, LONG)
    changes = {}
    for policy, part in by_policy(config).items():
        before = f"{policy}." if policy else ""
        traits = Traits.of(part.algorithm)
        if traits.learning_starts:
            changes[f"{before}learning_starts"] = 0
        if traits.learning_rate_steps is not None:
            changes[f"{before}learning_rate_steps"] = max(traits.learning_rate_steps, total)
    return dataclasses.replace(
        config,
        algorithm=varied(config.algorithm, changes),
        total_env_steps=total,
        run_dir=None,
        tensorboard=False,
        wandb=False,
        record=None,
        video_interval=None,
        evaluation_episodes=0,
        evaluation_interval=None,
        keep_best=None,
        stop_at_return=None,
    )


def _timed(
    reports: Iterator[Report],
    made: Mapping[str, parts.Part],
    seconds: float,
    progress: Callable[[str], None],
    *,
    in_turn: bool,
) -> tuple[Report, Report, float, dict[str, float], float]:
    """Times a run for some seconds, starting at a report after its first updates,
    and its parts; ends the run.

    Returns the first and the last report, the seconds between them, the median seconds of each
    part, and the CPU seconds in each second of the parts, at most 1.

    Args:
      in_turn: run the parts once after each stretch of the run, so that drift of the machine
        affects all alike. This is for runs that pause meanwhile; other runs are timed before their
        parts.

    Raises:
      ConfigError: the run is too short.
    """
    durations: dict[str, list[float]] = {name: [] for name in made}
    clocks = np.zeros(2)
    updating = filter(operator.attrgetter("updates"), reports)
    first = last = _next_of(updating, seconds)
    progress(
        f"timing the run for {seconds:g} s, or until its next report, and each stage {ROUNDS} times"
    )
    spent = 0.0
    stretch = min(STRETCH, seconds / ROUNDS)
    while last is first or spent < seconds or (in_turn and _rounds(durations) < ROUNDS):
        began = time.perf_counter()
        last = _next_of(updating, seconds)
        spent += time.perf_counter() - began
        if in_turn and spent >= stretch * (1 + _rounds(durations)):
            clocks += _time_each(made, durations)
    while _rounds(durations) < ROUNDS:
        clocks += _time_each(made, durations)
    alone = {name: statistics.median(times) for name, times in durations.items()}
    computed, elapsed = clocks.tolist()
    return first, last, spent, alone, min(1.0, computed / elapsed) if made else 1.0


def _next_of(reports: Iterator[Report], seconds: float) -> Report:
    if (report := next(reports, None)) is None:
        text = f"the run ended before {seconds:g} s of it were timed"
        raise ConfigError(f"{text}; a larger --total-env-steps works, or fewer --seconds")
    return report


def _rounds(durations: Mapping[str, Sequence[float]]) -> int:
    return min(map(len, durations.values()), default=ROUNDS)


def _clocks() -> np.ndarray:
    """Returns the CPU seconds of this process and the seconds of the clock."""
    return np.array([time.process_time(), time.perf_counter()])


def _time_each(made: Mapping[str, parts.Part], durations: dict[str, list[float]]) -> np.ndarray:
    """Times each part once: calls it several times in a row,
    so that Python prepares one call while another runs.

    Returns by how much ``_clocks`` has advanced.
    """
    started = _clocks()
    for name, part in made.items():
        jax.block_until_ready(part.run())
        if not durations[name]:
            calls = 1
        else:
            calls = min(MOST_CALLS, math.ceil(LEAST_SECONDS / durations[name][-1]))
        began = time.perf_counter()
        for _ in range(calls):
            out = part.run()
        jax.block_until_ready(out)
        durations[name].append((time.perf_counter() - began) / calls)
    return _clocks() - started


def _shares(layers: Mapping[str, int]) -> dict[str, float]:
    whole = sum(layers.values())
    return {
        name: flops / whole for name, flops in sorted(layers.items(), key=lambda layer: -layer[1])
    }


def _trace(made: Mapping[str, parts.Part], out: pathlib.Path) -> None:
    """Writes what JAX's profiler sees of one pass of each part,
    which slows small programs down by much.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for name, part in made.items():
                with jax.profiler.TraceAnnotation(name):
                    jax.block_until_ready(part.run())
        (written,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        with replacing(out) as partial:
            shutil.copyfile(written, partial)


def _of_threads(first: Report, last: Report, whole: float) -> dict[str, dict[str, float]]:
    """Returns the seconds of an iteration that host threads spent on each stage, by thread.

    If none is timed, devices updated all the time, ``whole``.
    """
    threads: dict[str, dict[str, float]] = {}
    for name, value in last.metrics.items():
        if (
            timer := re.fullmatch("time/(?!compile_s$)(?:(.+)/)?(.+)_s", name)
        ) and value is not None:
            thread, stage = timer.groups()
            spent = value - (first.metrics.get(name) or 0.0)
            iterations = last.iteration - first.iteration
            threads.setdefault(thread or "main", {})[HOST_STAGES.get(stage, stage)] = (
                spent / iterations
            )
    return threads or {"device": {UPDATE: whole}}


def _divided(
    stages: Mapping[str, float], alone: Mapping[str, float], whole: float
) -> dict[str, float]:
    """Returns a thread's stages, its update divided into the parts, and the rest,
    so that they sum to ``whole``.

    An actor's times are those of whole rollouts, which do not end with the reports: where they are
    longer, they are scaled down. Parts that take longer alone than in the update, where a compiler
    joins them, are scaled down to it.
    """
    divided = {
        stage: seconds
        for stage, seconds in stages.items()
        if seconds and not (alone and stage == UPDATE)
    }
    scale = min(1.0, stages.get(UPDATE, 0.0) / max(sum(alone.values()), 1e-12))
    if UPDATE in stages:
        divided |= {stage: scale * seconds for stage, seconds in alone.items()}
    if (total := sum(divided.values())) > whole * (1 - 1e-9):  # the sum rounds
        return {**{stage: seconds * whole / total for stage, seconds in divided.items()}, REST: 0.0}
    return {**divided, REST: whole - total}


def described(config: Train, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the names and sizes of a run, for JSON."""
    return {
        "algorithm": label(config.algorithm),
        "env": env_name(config.env),
        "plan": config.plan,
        "num_envs": config.num_envs,
        "rollout_length": config.rollout_length,
        "devices": len(devices),
        "kind": devices[0].device_kind,
    }


def to_json(profile: Profile) -> dict[str, Any]:
    """Returns a profile for JSON, with the stage that binds the run."""
    return {
        **profile._asdict(),
        "bound": dict(zip(("thread", "stage", "share", "advice"), profile.bound, strict=True)),
    }
