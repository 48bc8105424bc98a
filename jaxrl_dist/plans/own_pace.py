"""Several policies, each with a trainer at its own pace, on one stream of experience.

Source: RLlib Flow's workflow with two trainers (Liang et al. 2021, https://arxiv.org/abs/2011.12719): PPO learns from
each rollout, while DQN stores it and learns from its replay memory. The trainers take turns on the devices that learn.
While no rollout has arrived, those that replay go on. A policy acts with its new parameters as soon as its trainer's
turn is over. Schedules and warm-up of a policy follow its own ``env_step``: the nominal env steps of the rollouts that
its trainer has learned from or stored. All trainers get the same rollouts, so it is that of the others once all have
had their turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jaxrl_dist import flow
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.step import keys_of
from jaxrl_dist.checks import flag
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.learners.policies import joined, state_of
from jaxrl_dist.learners.sharded import compile_relearn, compile_update
from jaxrl_dist.plans import asynchronous
from jaxrl_dist.plans.asynchronous import Trainer, Turn, overlapped
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.threaded import prioritizes
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Algorithm, PyTree, Report, TrainState


def check(config: Train[Any], algorithm: Algorithm, name: str, num_devices: int) -> None:
    """See ``config.plans.Plan``."""
    if peers.count() > 1:
        raise ConfigError("--plan own_pace trains in one process; --plan asynchronous --lockstep does in several")
    if not config.policies:
        raise ConfigError("--plan own_pace is for several policies (--policy); --plan asynchronous trains one")
    if config.lockstep:
        raise ConfigError(f"{flag('lockstep')} makes policies wait, and under --plan own_pace none does")
    asynchronous.check(config, algorithm, name, num_devices)


def own_pace(job: Job) -> Iterator[Report]:
    """Runs ``job`` with actors in threads and a trainer for each policy."""
    return overlapped(job, Trainers(job))


class Trainers:
    """A trainer for each policy: ``asynchronous.Training``."""

    def __init__(self, job: Job) -> None:
        keys = [keys_of(job.algorithm, job.key(stream)) for stream in (Stream.LEARN, Stream.LEARN_MORE)]
        self._trainers = {}
        for name, learner in job.learner.parts:
            update = compile_update(learner, job.mesh, prioritized=prioritizes({name: job.algorithm[name]}))
            relearn = None if learner.relearn is None else compile_relearn(learner, job.mesh)
            self._trainers[name] = Trainer(update, relearn, (keys[0][name], keys[1][name]))

    @property
    def programs(self) -> Sequence[meshes.Program]:
        """As ``asynchronous.Training.programs``."""
        return [program for trainer in self._trainers.values() for program in trainer.programs]

    @property
    def more(self) -> bool:
        """As ``asynchronous.Training.more``."""
        return any(trainer.more for trainer in self._trainers.values())

    def turns(self, state: TrainState, rounds: Iterator[Sequence[PyTree] | None]) -> Iterator[Turn]:
        """As ``asynchronous.Training.turns``."""
        states = {name: state_of(state, name) for name in self._trainers}
        states = {name: own._replace(iteration=jnp.copy(own.iteration)) for name, own in states.items()}  # not shared
        copies = dict(zip(states, flow.duplicate(rounds, len(states), bound=1), strict=True))
        each = [trainer.turns(states[name], _of(name, copies[name])) for name, trainer in self._trainers.items()]
        for name, turn in zip(itertools.cycle(states), flow.concurrently(*each), strict=False):
            if turn.state is not states[name]:
                states[name] = turn.state
                last = name == next(reversed(states))
                yield Turn(joined(states), {name: turn.metrics}, {name: turn.counts}, last)


def _of(name: str, rounds: Iterator[Sequence[PyTree] | None]) -> Iterator[Sequence[PyTree] | None]:
    """Yields one policy's part of rollouts and priorities, which are keyed by policy."""
    for content in rounds:
        yield None if content is None else [part[name] for part in content if name in part]
