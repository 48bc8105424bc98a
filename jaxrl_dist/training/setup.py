"""The composition root: turns a ``Train`` config into a run that is ready to start."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl_dist import plans
from jaxrl_dist.actors import cluster
from jaxrl_dist.actors.evaluate import check_samples
from jaxrl_dist.checks import flag
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError, ConfigWarning, EnvWarning
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans import compiled
from jaxrl_dist.plans.devices import learner_devices, undivided
from jaxrl_dist.plans.session import Session
from jaxrl_dist.protocols import Traits
from jaxrl_dist.run import checkpoint, trackers
from jaxrl_dist.settings import members as populations
from jaxrl_dist.settings.policies import by_policy
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.settings.stored import differences, to_json
from jaxrl_dist.training import actor_process, recording
from jaxrl_dist.training.compile_cache import keep_programs
from jaxrl_dist.training.describing import resume_command
from jaxrl_dist.training.job import make_job, make_session
from jaxrl_dist.training.member import Member
from jaxrl_dist.training.rows import Row
from jaxrl_dist.training.run import Run
from jaxrl_dist.training.shared import ProgramShared


@in_32_bits
def prepare(config: Train, source: EnvSource | None = None) -> Run:
    """Checks that a config can be run, and prepares the run.

    Args:
      source: the environment that ``resolved`` returned with ``config``; None:
        ``config`` is resolved here.

    Raises:
      ConfigError: the config cannot be run.
    """
    if source is None:
        config, source = resolved(config)
    config = _same(config)
    trackers.check_trackers(config)
    if config.compile_cache:
        keep_programs()
    prepared = _prepared(config, source)
    if config.actors_on:
        cluster.connect(prepared.members[0].config)
    spec = source.spec
    if spec.unread_mask and peers.first():
        warnings.warn(f"{label_of(spec)}: {spec.unread_mask}", EnvWarning, stacklevel=3)
    if spec.inside and peers.first():
        warnings.warn(f"{label_of(spec)}: {spec.inside}", ConfigWarning, stacklevel=3)
    _check_schedules(config)
    notice = undivided(config, max(map(len, prepared.groups)))
    if notice:
        _warn_once(notice)
    return prepared


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, ConfigWarning, stacklevel=5)  # names the caller of ``train``


def _check_schedules(config: Train) -> None:
    """Warns if the run continues after the step sizes of a policy have become zero."""
    for part in by_policy(config).values():
        steps = Traits.of(part.algorithm).learning_rate_steps
        if steps is not None and steps < config.total:
            total = f"{flag(f'total_{config.clock}')} {config.total}"
            warnings.warn(
                f"--learning-rate-steps {steps} is less than {total}, so the learning rate is 0 "
                "from there to the end",
                ConfigWarning,
                stacklevel=4,
            )


def _same(config: Train) -> Train:
    """Checks that all processes of the run have this config,
    and returns it with the run directory of process 0.

    Raises:
      ConfigError: a field differs.
    """
    if peers.world() is None:
        return config
    mine = json.loads(json.dumps(to_json(config)))
    # It is not stored with the run, but must be the same.
    mine["run"]["processes"] = config.processes
    for process, theirs in enumerate(peers.all_gather(mine, "the config")):
        for name, old, new in differences(mine, theirs):
            raise ConfigError(
                f"all processes of a run need the same flags, but {flag(name)} is {old} in process "
                f"{peers.index()} and {new} in process {process}"
            )
    return dataclasses.replace(config, run_dir=peers.broadcast(config.run_dir, "the run directory"))


def _prepared(config: Train, source: EnvSource) -> Run:
    """Prepares the members of a run; a single run has one.
    They share programs where the plan lets them.
    """
    recording.check_recording(config, source.spec)
    several = populations.is_population(config)
    if several:
        population = populations.members(config)
    else:
        population = [populations.MemberConfig(config, {})]
    together = several and plans.population_plan(config.plan) is not None
    hyper = _traced(population, source) if together else []
    if together:
        groups = populations.programs(population, hyper)
    else:
        groups = [[number] for number in range(len(population))]
    _check_one_program(config, groups, population[0].values, hyper)
    command = resume_command(config)
    members = dict[int, Member]()
    for group in groups:
        first = population[group[0]].config
        session = _session(first, source, len(group) if several else None, hyper)
        shared = ProgramShared(session, command)
        for number in group:
            members[number] = _member(number, population[number], session, shared)
    return Run(
        config if several else members[0].config,
        [members[number] for number in sorted(members)],
        groups,
    )


def _session(
    config: Train, source: EnvSource, num_members: int | None, hyper: Sequence[str]
) -> Session:
    """Returns the session of the first member of a program, whose job has ``hyper`` as inputs.

    Checks that the algorithm can play as the config says,
    and says in the config whether checkpoints hold the memory.
    """
    session = make_session(config, source, num_members)
    job = session.job._replace(hyper=tuple(hyper))
    if config.evaluation_policy == "sampled":
        check_samples(job.algorithm)
    memory = jax.eval_shape(job.learner.init, jax.random.key(0)).memory
    replay = checkpoint.keeps_replay(config.checkpoint_replay, memory)
    config = dataclasses.replace(config, checkpoint_replay=replay)
    launch = actor_process.launch if config.actors_on else None
    return session._replace(config=config, job=job, launch=launch)


def _member(
    number: int, member: populations.MemberConfig, first: Session, shared: ProgramShared
) -> Member:
    """Returns a member of the program of the ``first`` member's session."""
    config = dataclasses.replace(member.config, checkpoint_replay=first.config.checkpoint_replay)
    hyper = {name: member.values[name] for name in first.job.hyper}
    row = Row(f"{number:03d}", config.seed, member.values)
    return Member(first._replace(config=config, hyper=hyper), shared, row)


def _check_one_program(
    config: Train,
    groups: Sequence[Sequence[int]],
    values: Mapping[str, Any],
    hyper: Sequence[str],
) -> None:
    """Checks that one program trains all members where they select or average,
    and the ``values`` vary in ``hyper``.
    """
    for name in ("evolve", "average_every"):
        if getattr(config, name) is None:
            continue
        if plans.population_plan(config.plan) is None:
            acting = (plan for plan, info in PLANS.items() if info.clock == "env_steps")
            needed = " or ".join(filter(plans.population_plan, acting))
            raise ConfigError(
                f"{flag(name)} needs --plan {needed}; under --plan {config.plan} members train in "
                "turn"
            )
        if len(groups) > 1:
            fixed = ", ".join(name for name in values if name not in hyper)
            raise ConfigError(
                f"{flag(name)} needs all members in one program, but each value of {fixed} needs "
                f"its own; --vary other fields, or remove {flag(name)}"
            )


def _traced(population: Sequence[populations.MemberConfig], source: EnvSource) -> list[str]:
    """Returns the varied hyperparameters that may differ between members of one program."""
    first = population[0]
    tunable = populations.tunable(first.config)
    numbers = [
        name
        for name in first.values
        if name in tunable and all(isinstance(member.values[name], float) for member in population)
    ]
    job = make_job(first.config, source, devices=learner_devices(first.config)[:1])

    def traces(*names: str) -> bool:
        return compiled.traces(job, {name: first.values[name] for name in names})

    if not numbers or traces(*numbers):
        return numbers
    return [name for name in numbers if traces(name)]
