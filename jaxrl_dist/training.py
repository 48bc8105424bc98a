"""The composition root: a ``Train`` config becomes an iterator of reports."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import algorithms, checkpoint, envs, flags, metrics, replay
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.common import blank_rollout
from jaxrl_dist.config import RUN_DEFAULTS, ConfigError, Train, did_you_mean
from jaxrl_dist.envs import EnvSource
from jaxrl_dist.evaluate import evaluate
from jaxrl_dist.learners import normalize, off_policy, on_policy
from jaxrl_dist.plans.common import Job, Plan
from jaxrl_dist.plans.on_device import on_device
from jaxrl_dist.plans.synchronous import synchronous
from jaxrl_dist.types import Algorithm, Box, EnvSpec, Learner, Replay, Report, Rollout

_PLANS: dict[str, Plan] = {"on_device": on_device, "synchronous": synchronous}


def train(config: Train[Any]) -> Iterator[Report]:
    """Trains, yielding a report each interval; the last one carries the evaluation.

    Nothing runs that the caller does not ask for by taking the next report, so leaving the loop stops training. With
    a ``run_dir``, config, metrics, summary and trained variables are written there.

    Raises:
      ConfigError: at once, before anything is written, if the config cannot be run.
    """
    return prepare(config).reports()


def preset(algorithm: str, env: str, **changes: Any) -> Train[Any]:
    """The config that ``Train(algorithm, env=env)`` stands for, with some fields changed.

    Args:
      changes: fields of ``Train`` or hyperparameters of the algorithm, such as ``learning_rate=3e-4``.

    Raises:
      ConfigError: no such algorithm, environment or field.
    """
    hyperparameters = [field.name for field in dataclasses.fields(algorithms.config_class(algorithm))]
    for name in changes:
        if name not in RUN_FIELDS and name not in hyperparameters:
            near = did_you_mean(name, [*RUN_FIELDS, *hyperparameters])
            raise ConfigError(f"neither Train nor {algorithm} has a field {name!r}{near}")
    run = {name: value for name, value in changes.items() if name in RUN_FIELDS}
    own = {name: value for name, value in changes.items() if name not in RUN_FIELDS}
    config: Train[Any] = Train(algorithm, env=env, **run)
    config = resolve(config, find_env(config).spec)
    return dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, **own))


def prepare(config: Train[Any]) -> Run:
    """Checks a config and fills in what it leaves open.

    Raises:
      ConfigError: the config cannot be run.
    """
    if not isinstance(config, Train):
        raise ConfigError(f"train takes a config such as Train('ppo', env='CartPole-v1'), not {config!r}")
    config.validate()
    reserve_memory(config.mem_fraction)
    source = find_env(config)
    config = resolve(config, source.spec)
    config.validate()
    return Run(config, make_job(config, source))


class Run(NamedTuple):
    """A training run that is ready to start."""

    config: Train[Any]  # resolved: nothing is left open
    job: Job

    def reports(self, evaluating: Callable[[int], None] = lambda done: None) -> Iterator[Report]:
        """As ``train``; ``evaluating`` hears how many evaluation episodes are done.

        Raises:
          ConfigError: at once, if the run directory cannot be written or holds a run already.
        """
        return self._reports(metrics.claim(self.config.run_dir) if self.config.run_dir else None, evaluating)

    def _reports(self, directory: pathlib.Path | None, evaluating: Callable[[int], None]) -> Iterator[Report]:
        config, job = self
        files = metrics.RunFiles(directory, flags.to_json(config)) if directory else None
        try:
            for report in _PLANS[config.plan](job):
                last = report.env_steps >= config.total_env_steps
                if files:
                    files.write(report)
                if files and last:  # before the evaluation, which may be long
                    checkpoint.save_variables(files.path, report.variables())
                if last and config.evaluation_episodes:
                    variables, episodes = report.variables(), config.evaluation_episodes
                    played = evaluate(job.algorithm, variables, job.source, episodes, config.seed, progress=evaluating)
                    report = dataclasses.replace(report, evaluation=played.summary())
                if files and last:
                    files.finish(report)
                yield report
        finally:
            if files:
                files.close()

    def describe(self) -> str:
        """One line on what runs where, for people."""
        config, devices = self.config, self.job.mesh.devices.flat
        return (
            f"{algorithms.name_of(config.algorithm)} on {config.env}, plan {config.plan}, "
            f"{len(devices)} {devices[0].platform} device{'s' if len(devices) > 1 else ''}, "
            f"{config.num_envs} environments x {config.rollout_length} steps an iteration"
        )


# --- From config to job -------------------------------------------------------------------------------


def find_env(config: Train[Any]) -> EnvSource:
    """The environment of a config.

    Raises:
      ConfigError: there is none of that name, or it does not have the options.
    """
    return envs.find(config.env, config.env_options, config.atari_preset)


def resolve(config: Train[Any], spec: EnvSpec) -> Train[Any]:
    """Fills in what the config leaves open: from the algorithm's preset for ``spec``, else from ``RUN_DEFAULTS``.

    An algorithm given by name gets its preset's hyperparameters; one given as a config is taken as it is.
    """
    by_name = isinstance(config.algorithm, str)
    kind = algorithms.config_class(config.algorithm) if by_name else type(config.algorithm)
    plan = "on_device" if spec.backend == "gymnax" else "synchronous"
    preset = {**RUN_DEFAULTS, "plan": plan, **kind.preset(spec)}
    if spec.family == "atari":
        preset.setdefault("atari_preset", "baselines")
    run = {name: value for name, value in preset.items() if name in RUN_FIELDS and getattr(config, name) is None}
    algorithm = config.algorithm
    if by_name:
        algorithm = kind(**{name: value for name, value in preset.items() if name not in RUN_FIELDS})
    return dataclasses.replace(config, algorithm=algorithm, env=f"{spec.backend}:{spec.id}", **run)


RUN_FIELDS = {field.name for field in dataclasses.fields(Train)}


def make_algorithm(config: Train[Any], spec: EnvSpec) -> Algorithm:
    """The algorithm of a resolved config, with its running statistics.

    Raises:
      ConfigError: it cannot handle the environment's spaces.
    """
    algorithm = config.algorithm.make(spec)
    if config.normalize_observations:
        if not isinstance(spec.observation, Box) or spec.observation.dtype == np.uint8:
            raise ConfigError(
                f"--normalize-observations needs observations of numbers; those of {spec.id} are images or categories, "
                "which the networks scale by themselves"
            )
        algorithm = normalize.normalize_observations(algorithm, spec)
    if config.scale_rewards:
        algorithm = normalize.scale_rewards(algorithm, config.algorithm.discount)
    return algorithm


def make_job(config: Train[Any], source: EnvSource) -> Job:
    """What a plan executes for a resolved config.

    Raises:
      ConfigError: sizes that do not divide, a plan that does not fit, or variables that cannot be taken over.
    """
    if config.plan not in _PLANS:
        raise ConfigError(f"unknown --plan {config.plan}; these work: {', '.join(_PLANS)}")
    if config.plan == "on_device":
        source.device()
    algorithm = make_algorithm(config, source.spec)
    devices = local_devices(config.num_devices)
    learner = make_learner(config, algorithm, source.spec, len(devices))
    init_variables = None
    if config.init_from is not None:
        shapes = jax.eval_shape(algorithm.init, jax.random.key(0))
        init_variables = checkpoint.load_variables(config.init_from, shapes)
    return Job(
        algorithm=algorithm,
        learner=learner,
        source=source,
        mesh=meshes.make_mesh(devices),
        num_envs=config.num_envs,
        rollout_length=config.rollout_length,
        total_env_steps=config.total_env_steps,
        report_interval=config.report_interval,
        seed=config.seed,
        init_variables=init_variables,
    )


def make_learner(config: Train[Any], algorithm: Algorithm, spec: EnvSpec, num_devices: int) -> Learner:
    """The learner that an algorithm asks for, by whether it replays experience.

    Raises:
      ConfigError: sizes that do not divide.
    """
    num_envs, length = config.num_envs, config.rollout_length
    if algorithm.replay is None:
        on_policy.check_sizes(algorithm, num_envs, length, num_devices)
        return on_policy.on_policy(algorithm)
    off_policy.check_sizes(algorithm, num_envs, length, num_devices)

    def shapes(key: jax.Array) -> Rollout:
        obs = jnp.zeros((num_envs, *spec.observation.shape), spec.observation.dtype)
        return blank_rollout(algorithm, algorithm.init(key), obs, algorithm.initial_core(num_envs), length)

    like = jax.eval_shape(shapes, jax.random.key(0))
    check_memory(algorithm.replay, like, num_devices)
    return off_policy.off_policy(algorithm, like)


def check_memory(plan: Replay, like: Rollout, num_devices: int) -> None:
    """Checks that the replay memory fits the devices, before anything is allocated.

    Raises:
      ConfigError: it does not; the message names the capacity that does.
    """
    num_envs, device = like.reward.shape[1], jax.local_devices()[0]
    needed = replay.nbytes(like, plan.capacity // num_envs, prioritized=plan.priority_exponent is not None)
    if device.platform == "cpu":
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # what is free now, the page cache hides
    else:
        there = (device.memory_stats() or {}).get("bytes_limit", 2**63) * num_devices
    if needed > there:
        fits = int(plan.capacity * 0.8 * there / needed) // num_envs * num_envs
        raise ConfigError(
            f"--replay-capacity {plan.capacity} needs {needed / 1e9:.1f} GB, and {there / 1e9:.1f} GB are there; "
            f"{fits} fits"
        )


def local_devices(count: int | None) -> list[jax.Device]:
    """The first ``count`` local devices, or all of them.

    Raises:
      ConfigError: there are fewer.
    """
    devices = jax.local_devices()
    if count is not None and count > len(devices):
        hint = f"; JAX_NUM_CPU_DEVICES={count} forces as many" if devices[0].platform == "cpu" else ""
        raise ConfigError(f"--num-devices {count}, but there are {len(devices)} {devices[0].platform} devices{hint}")
    return devices[:count]


def reserve_memory(fraction: float | None) -> None:
    """Asks for a fraction of the GPU's memory; has an effect only before JAX first uses the GPU."""
    if fraction is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(fraction)
