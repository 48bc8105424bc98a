"""The composition root: a ``Train`` config becomes an iterator of reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import algorithms, envs, flags
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.actors.step import blank_rollout
from jaxrl_dist.algorithms import wrappers
from jaxrl_dist.checks import check_divides, check_used, counted, did_you_mean, flag, parse_bounds, parse_devices
from jaxrl_dist.config import RESUMABLE, RUN_DEFAULTS, Train, env_name
from jaxrl_dist.envs import EnvSource, Wrappers
from jaxrl_dist.errors import ConfigError, ConfigWarning, EnvError, EnvWarning
from jaxrl_dist.learners import halves, off_policy, on_policy
from jaxrl_dist.memory import ring
from jaxrl_dist.plans import on_device
from jaxrl_dist.plans.asynchronous import asynchronous
from jaxrl_dist.plans.gradients import gradients
from jaxrl_dist.plans.job import Job, Plan
from jaxrl_dist.plans.report import check_progress
from jaxrl_dist.plans.synchronous import synchronous
from jaxrl_dist.run import checkpoint, trackers
from jaxrl_dist.run import files as run_files
from jaxrl_dist.spaces import Box
from jaxrl_dist.types import Algorithm, Checkpoint, EnvSpec, Learner, Replay, Report, Rollout

THREADED_PLANS = ("asynchronous", "gradients")
"""Plans whose actors run in threads."""
_PLANS: dict[str, Plan] = {
    "on_device": on_device.on_device,
    "synchronous": synchronous,
    "asynchronous": asynchronous,
    "gradients": gradients,
}


def train(config: Train[Any]) -> Iterator[Report]:
    """Trains, yielding a report each interval; the last one carries an evaluation, as do those at its interval.

    Nothing runs that the caller does not ask for by taking the next report, so leaving the loop stops training. With
    a ``run_dir``, config, metrics, summary, checkpoints and trained variables are written there.

    Raises:
      ConfigError: at once, before anything is written, if the config cannot be run.
    """
    return prepare(config).reports()


def resume(
    run_dir: str | pathlib.Path, algorithm: type | None = None, *, env: Any = None, torso: Any = None, **changes: Any
) -> Iterator[Report]:
    """Goes on with a run from the newest of its checkpoints that is whole, and yields reports as ``train`` does.

    Under the plan ``on_device`` it goes on as if it had never stopped, bit for bit. Where environments are on the host
    they start anew, and so do actors in threads; two runs that are resumed from equal checkpoints are equal.

    Args:
      algorithm: the config class that is trained, if it is not one of ours. No file can name code to run.
      env: the run's environment, where no file can hold it: an object, or of the form ``my_module:make``.
      torso: the network of your own that is trained, if there is one.
      changes: fields of ``Train`` among ``RESUMABLE``, such as ``total_env_steps``.

    Raises:
      ConfigError: at once, if the run cannot go on so.
      CheckpointError: at once, if it has no checkpoint that can be read.
    """
    config = stored_config(run_dir, algorithm, env, torso)
    return prepare_resume(config, pathlib.Path(run_dir), changes).reports()


def stored_config(
    run_dir: str | pathlib.Path, algorithm: type | None = None, env: Any = None, torso: Any = None
) -> Train[Any]:
    """The config of a run, with what no file can hold handed over again; arguments as those of ``load_policy``.

    Raises:
      ConfigError: it cannot be read, or something is to be handed over that is not.
    """
    objects = {} if torso is None else {"torso": torso}
    config = flags.read_config(pathlib.Path(run_dir), algorithm, None if env is None else env_name(env), objects)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, **objects))
    return config if env is None else dataclasses.replace(config, env=env)


def preset(algorithm: str | type, env: Any, **changes: Any) -> Train[Any]:
    """The config that ``Train(algorithm, env=env)`` stands for, with some fields changed.

    Args:
      algorithm: its name, or its config class.
      env: as in ``Train``.
      changes: fields of ``Train`` or hyperparameters of the algorithm, such as ``learning_rate=3e-4``.

    Raises:
      ConfigError: no such algorithm, environment or field.
    """
    hyperparameters = [field.name for field in dataclasses.fields(algorithms.config_class(algorithm))]
    for name in changes:
        if name not in RUN_FIELDS and name not in hyperparameters:
            near = did_you_mean(name, [*RUN_FIELDS, *hyperparameters])
            known = algorithm if isinstance(algorithm, str) else algorithm.__name__
            raise ConfigError(f"neither Train nor {known} has a field {name!r}{near}")
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


def prepare_resume(config: Train[Any], run_dir: pathlib.Path, changes: Mapping[str, Any]) -> Run:
    """As ``prepare``, of a run with this config that has begun already; changes and errors as those of ``resume``."""
    for name in changes:
        if name not in RESUMABLE:
            raise ConfigError(f"{flag(name)} cannot change where a run is resumed; {', '.join(RESUMABLE)} can")
    config = dataclasses.replace(config, **changes)
    file = run_files.lock(str(run_dir))  # before the checkpoint is read: another process might go on from it
    try:
        run = prepare(dataclasses.replace(config, run_dir=str(run_dir), init_from=None))
        config = dataclasses.replace(run.config, init_from=config.init_from)
        shapes = _checkpoint_shapes(run.job, run.config.plan)
        resumed = checkpoint.load(run_dir, shapes, lambda about: _check_same(config, about))
        done, total = resumed.env_steps, config.total_env_steps
        if done >= total and ("total_env_steps" in changes or run_files.finished(run_dir, config.evaluation_episodes)):
            raise ConfigError(f"{run_dir} has done {done} env steps of --total-env-steps {total}; name more to go on")
        return Run(config, run.job._replace(resumed=resumed), file)
    except BaseException:
        file.close()
        raise


def _passed(interval: int | None, before: int, now: int) -> bool:
    """Whether a multiple of the interval is above the one number and not above the other; None or 0: there is none."""
    return interval is not None and interval > 0 and now // interval > before // interval


def _evaluated(resumed: Checkpoint) -> int:
    """The env steps of the newest report that was evaluated, or that had no need to be."""
    progress = resumed.progress
    return progress.get("evaluated", progress["reported"]["env_steps"])


def _checkpoint_shapes(job: Job, plan: str) -> Checkpoint:
    """The shapes and dtypes of a checkpoint of this job."""
    key = jax.random.key(0)
    state = jax.eval_shape(job.learner.init, key)
    actor = jax.eval_shape(on_device.start(job), key) if plan == "on_device" else ()
    return Checkpoint(state, actor, {})


def _check_same(config: Train[Any], about: Mapping[str, Any]) -> bool:
    """Checks that a checkpoint is of a run with this config, and says whether it holds a replay memory.

    Raises:
      ConfigError: it is not; the message names the field.
      LookupError, TypeError, ValueError: it is no checkpoint of ours.
    """
    check_progress(about["progress"])
    there, here = about["config"], json.loads(json.dumps(flags.to_json(config)))
    plain = flags.to_json(Train(type(config.algorithm)(), config.env))  # for fields that an older version did not have
    for part in ("algorithm", "hyperparameters", "run"):
        default, old, new = ({part: x[part]} if part == "algorithm" else x[part] for x in (plain, there, here))
        old = {**json.loads(json.dumps(default)), **old}
        for name in sorted(old.keys() | new.keys()):
            if name not in RESUMABLE and old.get(name) != new.get(name):
                raise ConfigError(
                    f"{flag(name)} is {new.get(name)}, and the run to be resumed has {old.get(name)}; it cannot change"
                )
    changed = {name for name, version in run_files.versions().items() if about["versions"].get(name) != version}
    if changed:
        text = f"the run was saved with other versions of {', '.join(sorted(changed))}: its numbers may differ a little"
        warnings.warn(text, ConfigWarning, stacklevel=2)
    return bool(there["run"]["checkpoint_replay"])


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


class Run(NamedTuple):
    """A training run that is ready to start."""

    config: Train[Any]  # resolved: nothing is left open
    job: Job
    file: IO[bytes] | None = None  # the metrics of a run that is resumed, by which it is locked

    def reports(self, evaluating: Callable[[int], None] = lambda done: None) -> Iterator[Report]:
        """As ``train``; ``evaluating`` hears how many episodes of the evaluation at the end are done.

        Raises:
          ConfigError: at once, if the run directory cannot be written or holds a run already.
        """
        if self.file is None and self.config.run_dir:
            run_files.claim(self.config.run_dir)
        return self._reports(evaluating)

    def _reports(self, evaluating: Callable[[int], None]) -> Iterator[Report]:
        config, away = self.config, 0.0
        job = self.job._replace(away=lambda: away)
        evaluator = self._evaluator()
        # The newest report that lacks no evaluation: a run that is resumed evaluates where it would have anyway.
        evaluated = 0 if job.resumed is None else _evaluated(job.resumed)
        with contextlib.ExitStack() as stack:
            files = saver = None
            if config.run_dir:
                file = stack.enter_context(self.file or run_files.lock(config.run_dir))
                resumed = None if job.resumed is None else job.resumed.progress["reported"]["iteration"]
                directory, kept = pathlib.Path(config.run_dir), flags.to_json(config)
                before = None if job.resumed is None else job.resumed.progress["reported"]["env_steps"]
                try:
                    others = trackers.start(config, directory, kept, before)
                except ConfigError:
                    if resumed is None:
                        (directory / run_files.METRICS).unlink()  # else the directory would seem to hold a run
                    raise
                for tracker in others:
                    stack.callback(trackers.close, tracker)
                files = run_files.RunFiles(directory, file, kept, resumed, others)
                stack.enter_context(contextlib.closing(files))
                saver = stack.enter_context(contextlib.closing(checkpoint.Saver(directory, config.keep_checkpoints)))
                about = {"config": kept, "versions": run_files.versions()}
            saved_steps = job.env_steps
            for report in _PLANS[config.plan](job):
                last = report.env_steps >= config.total_env_steps
                before, to_evaluate = evaluated, _passed(config.evaluation_interval, evaluated, report.env_steps)
                if to_evaluate and not last and not job.stop():
                    began = time.perf_counter()
                    report = self._evaluate(evaluator, report, stop=job.stop)
                    away += time.perf_counter() - began
                if last or report.evaluation or not to_evaluate:  # else it is made with the next report
                    evaluated = report.env_steps
                ends = last or job.stop()
                if files and saver:
                    files.write(report)
                    if last:  # before the checkpoint, which is larger, and the evaluation, which may be long
                        checkpoint.save_variables(files.path, report.variables())
                        files.finish(report)
                    due = _passed(config.checkpoint_interval, saved_steps, report.env_steps)
                    known = job.resumed is not None and report.env_steps == job.env_steps
                    # Training does not wait for the disk: while a checkpoint is being written, the next is put off.
                    if not known and (ends or (due and not saver.busy())):
                        whole = self._trimmed(report.checkpoint())
                        again = whole.progress["since"] is not None  # when the interval of this report is over
                        progress = {**whole.progress, "evaluated": before if again else evaluated}
                        whole = whole._replace(progress=progress)
                        saver.save(whole, about, report.metrics["episode/return"])
                        saved_steps = report.env_steps
                    if ends:
                        saver.finish()
                if last and config.evaluation_episodes:
                    report = self._evaluate(evaluator, report, evaluating, stop=job.stop)
                    if files:
                        if to_evaluate:
                            files.write(report)
                        files.finish(report)
                yield report

    def _trimmed(self, whole: Checkpoint) -> Checkpoint:
        """What a checkpoint is to hold of the state."""
        return whole if self.config.checkpoint_replay else whole._replace(state=whole.state._replace(memory=()))

    def _evaluator(self) -> Evaluator:
        config, job = self.config, self.job
        episodes, most = config.evaluation_episodes, config.evaluation_max_steps
        return Evaluator(job.algorithm, job.source, episodes, config.seed, most)

    def _evaluate(
        self,
        evaluator: Evaluator,
        report: Report,
        progress: Callable[[int], None] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Report:
        """The report with an evaluation, or without if it is stopped, or environments fail and that is forgiven."""
        try:
            played = evaluator.play(report.variables(), progress, stop=stop)
        except (EnvError, TimeoutError) as error:
            if self.config.on_actor_error == "raise":
                raise
            warnings.warn(f"the evaluation could not be finished: {error}", EnvWarning, stacklevel=2)
            return report
        return report if played is None else dataclasses.replace(report, evaluation=played.summary())

    def describe(self, name: str | None = None) -> str:
        """One line on what runs where, for people; ``name`` is what they call the algorithm."""
        config, learning = self.config, self.job.mesh.devices.size
        devices = counted(learning, f"{self.job.mesh.devices.flat[0].platform} device")
        if config.plan in THREADED_PLANS:
            acting = f" on {len(self.job.pool.meshes)}" if config.actor_devices else ""
            learner = "learner on " if config.actor_devices else ""
            devices = f"{counted(self.job.pool.num_actors, 'actor')}{acting}, {learner}{devices}"
        return (
            f"{name or algorithms.name_of(config.algorithm)} on {env_name(config.env)}, plan {config.plan}, {devices}, "
            f"{counted(config.num_envs, 'environment')} x {counted(config.rollout_length, 'step')} an iteration"
        )


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
    return envs.find(config.env, config.env_options, *how, wrappers)


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
    if config.plan not in _PLANS:
        raise ConfigError(f"unknown --plan {config.plan}; these work: {', '.join(_PLANS)}")
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


def local_devices(count: int | None) -> list[jax.Device]:
    """The first ``count`` local devices, or all of them.

    Raises:
      ConfigError: there are fewer.
    """
    devices = jax.local_devices()
    if count is not None and count > len(devices):
        hint = f"; JAX_NUM_CPU_DEVICES={count} forces as many" if devices[0].platform == "cpu" else ""
        raise ConfigError(
            f"--num-devices {count}, but there are {counted(len(devices), devices[0].platform + ' device')}{hint}"
        )
    return devices[:count]


def learner_devices(config: Train[Any]) -> list[jax.Device]:
    """The devices that learn.

    Raises:
      ConfigError: there are fewer than the config asks for.
    """
    numbers = parse_devices("learner_devices", config.learner_devices)
    if numbers is None:
        return local_devices(config.num_devices)
    if config.num_devices not in (None, len(numbers)):
        raise ConfigError(f"--learner-devices {config.learner_devices} contradicts --num-devices {config.num_devices}")
    return numbered("learner_devices", numbers)


def numbered(name: str, numbers: Sequence[int]) -> list[jax.Device]:
    """The local devices of these numbers, which the flag of ``name`` asks for.

    Raises:
      ConfigError: there are fewer.
    """
    devices = jax.local_devices()
    if max(numbers) >= len(devices):
        there = counted(len(devices), f"{devices[0].platform} device")
        raise ConfigError(f"{flag(name)} names device {max(numbers)}, but there are {there}, counted from 0")
    return [devices[number] for number in numbers]


def reserve_memory(fraction: float | None) -> None:
    """Asks for a fraction of the GPU's memory; has an effect only before JAX first uses the GPU."""
    if fraction is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(fraction)
