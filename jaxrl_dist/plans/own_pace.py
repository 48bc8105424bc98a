"""Several policies, each with a trainer at its own pace, on one stream of experience.

Source: RLlib Flow's workflow with two trainers (Liang et al. 2021,
https://arxiv.org/abs/2011.12719): PPO learns from each rollout, while DQN stores it and learns from
its replay memory. The trainers take turns on the devices that learn. While no rollout has arrived,
those that replay go on. A policy acts with its new parameters as soon as its trainer's turn is
over. Schedules and warm-up of a policy follow its own ``env_step``: the nominal env steps of the
rollouts that its trainer has learned from or stored. All trainers get the same rollouts, so it is
that of the others once all have had their turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxrl_dist import flow
from jaxrl_dist.actors.step import keys_of
from jaxrl_dist.checks import flag
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.learners.policies import joined, state_of
from jaxrl_dist.plans import asynchronous
from jaxrl_dist.plans.asynchronous import Trainer
from jaxrl_dist.plans.dataflow import Rounds, Turn, dataflow
from jaxrl_dist.plans.session import Session
from jaxrl_dist.plans.threaded import exchange
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Algorithm, Report, TrainState


def check_plan(config: Train, algorithm: Algorithm, name: str, num_devices: int) -> None:
    """See ``config.plans.Plan``."""
    if peers.count() > 1:
        raise ConfigError(
            "--plan own_pace trains in one process only; use --plan asynchronous --lockstep"
        )
    if not config.policies:
        raise ConfigError(
            "--plan own_pace needs several policies (--policy); train one with --plan asynchronous"
        )
    if config.lockstep:
        raise ConfigError(
            f"{flag('lockstep')} makes policies wait, which --plan own_pace excludes; remove one"
        )
    asynchronous.check_plan(config, algorithm, name, num_devices)


def own_pace(session: Session) -> Iterator[Report]:
    """Runs ``session`` with actors in threads and a trainer for each policy."""
    learners = trainers(session)
    programs = [program for trainer in learners.values() for program in trainer.programs]
    return dataflow(session, partial(turns, learners), programs, exchange(session))


def trainers(session: Session) -> dict[str, Trainer]:
    """Returns the trainer of each policy; those that replay are free-running."""
    job = session.job
    job = job._replace(pool=job.pool._replace(free_running=True))
    learn, relearn = (
        keys_of(job.algorithm, session.key(stream)) for stream in (Stream.LEARN, Stream.LEARN_MORE)
    )
    return {
        name: Trainer(job, learner, {name: job.algorithm[name]}, (learn[name], relearn[name]))
        for name, learner in job.learner.parts
    }


def turns(trainers: Mapping[str, Trainer], state: TrainState, rounds: Rounds) -> Iterator[Turn]:
    """Yields the turns in which a policy has learned: each round goes to every trainer,
    and these take turns.
    """
    states = {name: state_of(state, name) for name in trainers}
    # not shared
    states = {
        name: part._replace(iteration=jnp.copy(part.iteration)) for name, part in states.items()
    }
    copies = itertools.tee(rounds, len(states))
    parts = {name: _of_policy(name, copy) for name, copy in zip(states, copies, strict=True)}
    streams = [trainer.turns(states[name], parts[name]) for name, trainer in trainers.items()]
    more = dict.fromkeys(states, False)
    for name, turn in zip(itertools.cycle(states), flow.concurrently(*streams), strict=False):
        if turn.state is not states[name]:
            states[name] = turn.state
            more[name] = turn.more
            last = name == next(reversed(states))
            yield Turn(
                joined(states), {name: turn.metrics}, {name: turn.counts}, any(more.values()), last
            )


def _of_policy(name: str, rounds: Rounds) -> Iterator[Any]:
    """Yields one policy's part of rollouts and priorities, which are keyed by policy."""
    for content in rounds:
        yield None if content is None else [part[name] for part in content if name in part]
