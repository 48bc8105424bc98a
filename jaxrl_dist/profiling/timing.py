"""Measures where the time of a run goes: times the run itself, then each of its stages by itself.

A compiled program does not tell how long its stages take, and a tracer that watches every operation
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

from jaxrl_dist.config.envs import env_name
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import varied
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.profiling.stages import Stage, make_stages
from jaxrl_dist.protocols import Traits
from jaxrl_dist.run.storage import replacing
from jaxrl_dist.settings.members import is_population
from jaxrl_dist.settings.policies import by_policy, label
from jaxrl_dist.training import setup
from jaxrl_dist.training.run import Run
from jaxrl_dist.types import Report

REST = "rest"
"""The stage for all time that belongs to no other one."""
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
"""Minimum seconds for which a stage is called in a round."""
MOST_CALLS = 64
"""Maximum number of calls of a stage in a round."""
ROUNDS = 5
"""Minimum number of times that each stage is timed; the median counts."""
RUNNING = 0.9
"""Least share of the time of the stages in which this process has a core: with less,
another stage may seem to take the most."""
STRETCH = 1.0
"""Minimum seconds of the run between two rounds:
shorter intervals would start with caches filled by the stages."""
_TIMER = re.compile("time/(?!compile_s$)(?:(?P<thread>.+)/)?(?P<stage>.+)_s")
"""Names of the metrics that count a host thread's seconds, as ``time/actor/env_s``."""


class Profile(NamedTuple):
    """Where the time of a run goes."""

    run: Mapping[str, Any]
    """Names and sizes of the run, for JSON."""
    env_steps_per_second: float
    iteration_seconds: float
    threads: Mapping[str, Mapping[str, float]]
    """Seconds of an iteration by thread and stage; the stages of a thread sum to
    ``iteration_seconds``."""
    alone: Mapping[str, float]
    """Seconds of each stage that was run alone, as often as in an iteration."""
    running: float = 1.0
    """CPU seconds in each second of the stages alone, at most 1;
    less if other programs use the cores. 1 on GPUs."""

    @property
    def busy(self) -> bool:
        """Whether other programs have disturbed the measurement."""
        return self.running < RUNNING


def profile(
    config: Train,
    source: EnvSource,
    seconds: float,
    trace: pathlib.Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Times a run and its stages.

    Updates begin immediately, without waiting for ``learning_starts``.

    Args:
      config: resolved; the run writes no files.
      source: its environment.
      seconds: for the run, which makes at least two reports.
        The stages take as long again, and compiling adds to it.
      trace: the file for a trace of one pass of each stage, as JSON compressed by gzip.
      progress: receives the current step in words.

    Raises:
      ConfigError: the config describes a population or several processes, or cannot be run.
      OSError: the trace's file cannot be written.
    """
    if trace is not None and PLANS[config.plan].sends_gradients:
        raise ConfigError(
            f"--trace needs a plan that runs on devices, not --plan {config.plan}; remove it"
        )
    run = prepare(config, source)
    progress("compiling the run and its stages")
    stages = make_stages(run.session)
    measured = measure(run, stages, seconds, progress)
    if trace is not None:
        _trace(stages, trace)
    return measured


def prepare(config: Train, source: EnvSource) -> Run:
    """Prepares a long run in which all policies learn from the first env step on.

    Raises:
      ConfigError: as for ``profile``.
    """
    return setup.prepare(_learning_only(config), source)


def measure(
    run: Run, stages: Mapping[str, Stage], seconds: float, progress: Callable[[str], None]
) -> Profile:
    """Times a run for some seconds, and its stages; ends the run.

    Raises:
      ConfigError: the run is too short.
    """
    times = _timed(
        run.reports(), stages, seconds, progress, in_turn=not PLANS[run.config.plan].threaded
    )
    first, last = times.first, times.last
    whole = times.seconds / (last.iteration - first.iteration)
    threads = _of_threads(first, last, whole)
    devices = list(run.job.mesh.devices.flat)
    return Profile(
        run=described(run.config, devices),
        env_steps_per_second=(last.env_steps - first.env_steps) / times.seconds,
        iteration_seconds=whole,
        threads={thread: _divided(spent, times.alone, whole) for thread, spent in threads.items()},
        alone=times.alone,
        running=times.running if devices[0].platform == "cpu" else 1.0,
    )


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
        raise ConfigError("profile measures learning from new experience only; remove --data")
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


class _Times(NamedTuple):
    """What was timed of a run and its stages."""

    first: Report
    last: Report
    seconds: float
    """Seconds between the two reports."""
    alone: Mapping[str, float]
    """Median seconds of each stage."""
    running: float
    """CPU seconds in each second of the stages, at most 1."""


def _timed(
    reports: Iterator[Report],
    stages: Mapping[str, Stage],
    seconds: float,
    progress: Callable[[str], None],
    *,
    in_turn: bool,
) -> _Times:
    """Times a run for some seconds, starting at a report after its first updates,
    and its stages; ends the run.

    Args:
      in_turn: run the stages once after each stretch of the run, so that drift of the machine
        affects all alike. This is for runs that pause meanwhile; other runs are timed before their
        stages.

    Raises:
      ConfigError: the run is too short.
    """
    durations: dict[str, list[float]] = {name: [] for name in stages}
    clocks = np.zeros(2)
    updating = filter(operator.attrgetter("updates"), reports)
    first = last = _next_of(updating, seconds)
    progress(
        f"timing the run for {seconds:g} s, or until its next report, and each stage {ROUNDS} times"
    )
    spent = 0.0
    stretch = min(STRETCH, seconds / ROUNDS)
    while True:
        stages_wait = in_turn and _rounds(durations) < ROUNDS
        if last is not first and spent >= seconds and not stages_wait:
            break
        began = time.perf_counter()
        last = _next_of(updating, seconds)
        spent += time.perf_counter() - began
        if in_turn and spent >= stretch * (1 + _rounds(durations)):
            clocks += _time_each(stages, durations)
    while _rounds(durations) < ROUNDS:
        clocks += _time_each(stages, durations)
    alone = {name: statistics.median(times) for name, times in durations.items()}
    running = 1.0
    if stages:
        computed, elapsed = clocks.tolist()
        running = min(1.0, computed / elapsed)
    return _Times(first, last, spent, alone, running)


def _next_of(reports: Iterator[Report], seconds: float) -> Report:
    report = next(reports, None)
    if report is None:
        raise ConfigError(
            f"the run ended before {seconds:g} s were timed; use a larger --total-env-steps or "
            "fewer --seconds"
        )
    return report


def _rounds(durations: Mapping[str, Sequence[float]]) -> int:
    return min(map(len, durations.values()), default=ROUNDS)


def _clocks() -> np.ndarray:
    """Returns the CPU seconds of this process and the seconds of the clock."""
    return np.array([time.process_time(), time.perf_counter()])


def _time_each(stages: Mapping[str, Stage], durations: dict[str, list[float]]) -> np.ndarray:
    """Times each stage once: calls it several times in a row,
    so that Python prepares one call while another runs.

    Returns by how much ``_clocks`` has advanced.
    """
    started = _clocks()
    for name, stage in stages.items():
        jax.block_until_ready(stage.run())
        calls = 1
        if durations[name]:
            calls = min(MOST_CALLS, math.ceil(LEAST_SECONDS / durations[name][-1]))
        began = time.perf_counter()
        for _ in range(calls):
            out = stage.run()
        jax.block_until_ready(out)
        durations[name].append((time.perf_counter() - began) / calls)
    return _clocks() - started


def _trace(stages: Mapping[str, Stage], out: pathlib.Path) -> None:
    """Writes what JAX's profiler sees of one pass of each stage.

    The profiler makes small programs much slower.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for name, stage in stages.items():
                with jax.profiler.TraceAnnotation(name):
                    jax.block_until_ready(stage.run())
        (written,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        with replacing(out) as partial:
            shutil.copyfile(written, partial)


def _of_threads(first: Report, last: Report, whole: float) -> dict[str, dict[str, float]]:
    """Returns the seconds of an iteration that host threads spent on each stage, by thread.

    If no thread is timed, devices updated all the time: ``whole`` seconds.
    """
    threads: dict[str, dict[str, float]] = {}
    iterations = last.iteration - first.iteration
    for name, value in last.metrics.items():
        timer = _TIMER.fullmatch(name)
        if timer and value is not None:
            stage = timer["stage"]
            spent = value - (first.metrics.get(name) or 0.0)
            stages = threads.setdefault(timer["thread"] or "main", {})
            stages[HOST_STAGES.get(stage, stage)] = spent / iterations
    return threads or {"device": {UPDATE: whole}}


def _divided(
    stages: Mapping[str, float], alone: Mapping[str, float], whole: float
) -> dict[str, float]:
    """Returns a thread's stages, its update divided into the stages that were run alone,
    and the rest, so that they sum to ``whole``.

    An actor times whole rollouts, which do not end with the reports: longer times are scaled down.
    Stages that take longer alone than in the update, where a compiler joins them, are scaled down
    to it.
    """
    divided = {
        stage: seconds
        for stage, seconds in stages.items()
        if seconds and not (alone and stage == UPDATE)
    }
    if UPDATE in stages:
        scale = min(1.0, stages[UPDATE] / max(sum(alone.values()), 1e-12))
        divided |= {stage: scale * seconds for stage, seconds in alone.items()}
    total = sum(divided.values())
    if total > whole * (1 - 1e-9):  # the sum rounds
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
