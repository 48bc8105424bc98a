"""The composition root: a ``Train`` config becomes a run that is ready to start."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import algorithms
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.actors.step import blank_rollout
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.checks import check_divides, check_used, flag, parse_bounds, parse_devices
from jaxrl_dist.config import RUN_DEFAULTS, Train
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.source import EnvSource, find
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.learners import halves, off_policy, on_policy
from jaxrl_dist.memory import ring
from jaxrl_dist.plans import PLANS, THREADED_PLANS
from jaxrl_dist.plans.devices import learner_devices, numbered, reserve_memory
from jaxrl_dist.plans.job import Job
from jaxrl_dist.run import checkpoint, trackers
from jaxrl_dist.spaces import Box
from jaxrl_dist.training.run import Run
from jaxrl_dist.types import Algorithm, EnvSpec, Learner, Replay, Rollout


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
    trackers.check(config)
    if config.atari_preset != source.atari_preset:  # the algorithm's preset asks for another than the usual
        source = find_env(config)
    job = make_job(config, source)
    config = dataclasses.replace(config, checkpoint_replay=keeps_replay(config, job))
    if config.plan not in THREADED_PLANS and config.num_actors is not None:
        text = (
            f"--num-actors {config.num_actors} changes nothing under --plan {config.plan}, which has no actor threads"
        )
        warnings.warn(text, ConfigWarning, stacklevel=2)
    if config.plan == "asynchronous" and lags(job):
        text = (
            f"{algorithms.name_of(config.algorithm)} takes all experience for that of the newest policy, and under "
            "--plan asynchronous some is older: it may learn worse, or not at all; impala and appo correct for that"
        )
        warnings.warn(text, ConfigWarning, stacklevel=2)
    return Run(config, job)


# --- From config to job -------------------------------------------------------------------------------


def find_env(config: Train[Any]) -> EnvSource:
    """The environment of a config.

    Raises:
      ConfigError: there is none of that name, or it does not have the options.
      EnvError: its own code failed.
      TimeoutError: it has not answered in time.
    """
    wrappers = Wrappers(config.frame_stack, config.action_repeat, config.time_limit)
    how = config.atari_preset, config.env_workers, config.env_timeout
    return find(config.env, config.env_options, *how, wrappers)


def resolve(config: Train[Any], spec: EnvSpec) -> Train[Any]:
    """Fills in what the config leaves open: from the algorithm's preset for ``spec``, else from ``RUN_DEFAULTS``.

    An algorithm given by name or class gets its preset's hyperparameters; one given as a config is taken as it is.
    """
    by_name = isinstance(config.algorithm, str | type)
    kind = algorithms.config_class(config.algorithm) if by_name else type(config.algorithm)
    plan = "on_device" if spec.backend == "gymnax" else "synchronous"
    preset = {**RUN_DEFAULTS, "plan": plan, **kind.preset(spec)}
    if by_name:
        preset |= algorithms.PRESETS.get(config.algorithm, (None, {}))[1]
    if spec.backend == "envpool" and spec.family == "atari":
        preset.setdefault("atari_preset", "baselines")
    else:
        preset.pop("atari_preset", None)
    run = {name: value for name, value in preset.items() if name in RUN_FIELDS and getattr(config, name) is None}
    if run.get("plan", config.plan) not in THREADED_PLANS:
        run.pop("num_actors", None)
    algorithm = config.algorithm
    if by_name:
        algorithm = kind(**{name: value for name, value in preset.items() if name not in RUN_FIELDS})
    env = f"{spec.backend}:{spec.id}" if isinstance(config.env, str) else config.env
    return dataclasses.replace(config, algorithm=algorithm, env=env, **run)


RUN_FIELDS = {field.name for field in dataclasses.fields(Train)}


def make_algorithm(config: Train[Any], spec: EnvSpec) -> Algorithm:
    """The algorithm of a resolved config, with what scales and clips its inputs.

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
        algorithm = wrappers.normalize_observations(algorithm, spec)
    if config.scale_rewards:
        algorithm = wrappers.scale_rewards(algorithm, config.algorithm.discount)
    if (bounds := parse_bounds("clip_rewards", config.clip_rewards)) is not None:
        algorithm = wrappers.clip_rewards(algorithm, *bounds)  # around the others, which see clipped ones
    return algorithm


def make_job(config: Train[Any], source: EnvSource) -> Job:
    """What a plan executes for a resolved config.

    Raises:
      ConfigError: sizes that do not divide, a plan that does not fit, or variables that cannot be taken over.
    """
    if config.plan not in PLANS:
        raise ConfigError(f"unknown --plan {config.plan}; these work: {', '.join(PLANS)}")
    if config.plan == "on_device":
        source.device()
    algorithm = make_algorithm(config, source.spec)
    devices = learner_devices(config)
    pool = pool_options(config, algorithm, devices, on_device=source.spec.backend == "gymnax")
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
        pool=pool,
    )


def make_learner(config: Train[Any], algorithm: Algorithm, spec: EnvSpec, num_devices: int) -> Learner:
    """The learner that an algorithm asks for, by whether it replays experience.

    Raises:
      ConfigError: sizes that do not divide.
    """
    num_envs, length = config.num_envs, config.rollout_length
    if config.plan == "gradients":
        return on_policy.on_policy(algorithm)  # the plan takes its halves apart; there is nothing to divide or replay
    if algorithm.replay is None:
        on_policy.check_sizes(algorithm, num_envs, length, num_devices)
        return on_policy.on_policy(algorithm)
    off_policy.check_sizes(algorithm, num_envs, length, num_devices, spec.frame_stack)

    def shapes(key: jax.Array) -> Rollout:
        obs = jnp.zeros((num_envs, *spec.observation.shape), spec.observation.dtype)
        return blank_rollout(algorithm, algorithm.init(key), obs, algorithm.initial_core(num_envs), length)

    like = jax.eval_shape(shapes, jax.random.key(0))
    check_memory(algorithm.replay, like, num_devices, spec.frame_stack)
    return off_policy.off_policy(algorithm, like, spec.frame_stack)


def check_memory(plan: Replay, like: Rollout, num_devices: int, frame_stack: int) -> None:
    """Checks that the replay memory fits the devices, before anything is allocated.

    Raises:
      ConfigError: it does not; the message names the capacity that does.
    """
    num_envs, device = like.reward.shape[1], jax.local_devices()[0]
    slots, prioritized = plan.capacity // num_envs, plan.priority_exponent is not None
    needed = ring.nbytes(like, slots, prioritized=prioritized, frame_stack=frame_stack)
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


REPLAY_LIMIT = 2 * 10**9
"""Bytes of a replay memory that checkpoints hold without being told to."""


def keeps_replay(config: Train[Any], job: Job) -> bool:
    """Whether checkpoints hold the replay memory.

    Raises:
      ConfigError: they are not to, and there is none.
    """
    memory = jax.eval_shape(job.learner.init, jax.random.key(0)).memory
    if config.checkpoint_replay is not None:
        if not (config.checkpoint_replay or jax.tree.leaves(memory)):
            raise ConfigError("--no-checkpoint-replay does nothing without a replay memory")
        return config.checkpoint_replay
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(memory)) < REPLAY_LIMIT


def lags(job: Job) -> bool:
    """Whether actors in threads may hand the algorithm experience that is older than it allows for."""
    algorithm, pool = job.algorithm, job.pool
    return algorithm.replay is None and not algorithm.corrects_lag and 0 not in (pool.lag, pool.max_lag)


def pool_options(
    config: Train[Any], algorithm: Algorithm, learners: Sequence[jax.Device], *, on_device: bool
) -> PoolOptions:
    """How the actors of a resolved config run beside the learner, for plans that have any.

    Raises:
      ConfigError: flags that do not fit the plan, the algorithm or each other.
    """
    threaded = config.plan in THREADED_PLANS
    names = ("actor_devices", "max_lag", "lockstep", "gather", "on_actor_error")
    check_used(config, *names, there=threaded, needed=f"--plan {' or '.join(THREADED_PLANS)}")
    check_used(config, "lag", there=config.lockstep, needed="--lockstep")
    check_used(config, "gather_deadline", there=config.gather is not None, needed="--gather")
    check_used(config, "max_restarts", there=config.on_actor_error == "restart", needed="--on-actor-error restart")
    check_used(config, "on_actor_error", there=not on_device, needed="environments on the host")
    if config.free_running and (config.plan != "asynchronous" or algorithm.replay is None):
        raise ConfigError("--free-running is for algorithms that replay experience, under --plan asynchronous")
    if not threaded:
        return PoolOptions()
    assert config.num_actors is not None, "the preset has it"
    learning = [] if config.plan == "gradients" else [(len(learners), "devices")]
    check_divides("num_envs", config.num_envs, *learning, (config.num_actors, "actors (--num-actors)"))
    if config.gather is not None and config.gather > config.num_actors:
        raise ConfigError(f"--gather {config.gather} is more than --num-actors {config.num_actors}")
    for name in ("gather", "max_lag"):
        if getattr(config, name) is not None and algorithm.replay is not None and config.plan == "asynchronous":
            raise ConfigError(
                f"{flag(name)} leaves experience out, and what {algorithms.name_of(config.algorithm)} replays must be "
                "without gaps"
            )
        if getattr(config, name) is not None and config.lockstep:
            raise ConfigError(f"{flag(name)} depends on the threads' timing, and --lockstep is to rule that out")
    if config.plan == "gradients":
        if algorithm.replay is not None and algorithm.replay.priority_exponent is not None:
            raise ConfigError("--priority-exponent is for what is replayed, and --plan gradients replays nothing")
        for name in ("normalize_observations", "scale_rewards", "lockstep"):
            if getattr(config, name):
                raise ConfigError(f"{flag(name)} does not work with --plan gradients; --plan asynchronous does")
        if config.gather is not None:
            raise ConfigError("--gather does not work with --plan gradients, which takes each gradient as it comes")
        halves.check_sizes(algorithm, config.rollout_length)
    if config.free_running and config.lockstep:
        raise ConfigError("--free-running depends on the threads' timing, and --lockstep is to rule that out")
    acting = learners
    if (numbers := parse_devices("actor_devices", config.actor_devices)) is not None:
        acting = numbered("actor_devices", numbers)
        if len(acting) > config.num_actors:
            raise ConfigError(
                f"--actor-devices {config.actor_devices} are more than --num-actors {config.num_actors} can use"
            )
    return PoolOptions(
        num_actors=config.num_actors,
        meshes=tuple(meshes.make_mesh([device]) for device in acting[: config.num_actors]),
        lag=config.lag if config.lockstep else None,
        max_lag=config.max_lag,
        gather=config.gather,
        gather_deadline=config.gather_deadline,
        free_running=config.free_running,
        max_restarts=config.max_restarts if config.on_actor_error == "restart" else 0,
    )
