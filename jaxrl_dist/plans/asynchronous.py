"""Acting and learning at the same time: actor threads send rollouts,
and the learner takes them as they arrive.

Sources: RLlib's AsyncSamples and AsyncReplay optimizers (Liang et al. 2018,
https://arxiv.org/abs/1712.09381, section 5) and the Sebulba architecture (Hessel et al. 2021,
https://arxiv.org/abs/2104.06272). An iteration learns from ``num_envs x rollout_length`` steps, as
in every plan; these are as many rollouts as there are actors.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator

import jax

from jaxrl_dist.checks import check_divides, flag
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.hosts import peers
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.learners.sharded import compile_relearn, compile_update
from jaxrl_dist.plans import threaded
from jaxrl_dist.plans.dataflow import Rounds, Turn, dataflow
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import updates_of
from jaxrl_dist.plans.session import Session
from jaxrl_dist.plans.threaded import exchange, prioritizes
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Algorithm, Algorithms, Report, TrainState


def check_plan(config: Train, algorithm: Algorithm, name: str, num_devices: int) -> None:
    """See ``config.plans.Plan``; warns if experience may
    lag and the algorithm does not correct for it.
    """
    if peers.count() > 1 and not config.lockstep:
        raise ConfigError(
            f"--plan asynchronous over {peers.count()} processes needs --lockstep, because each "
            "update uses a rollout of every actor of every process; add it"
        )
    threaded.check_actors(config, (num_devices, "devices"))
    check_divides("num_actors", config.num_actors or 1, (peers.count(), "processes"))
    if algorithm.replay is not None:
        for field in marked(config, skips=True):
            if getattr(config, field) is not None:
                raise ConfigError(
                    f"{flag(field)} drops experience, but {name}'s replay needs every step; remove "
                    "it"
                )
    elif (
        0 not in (config.lag if config.lockstep else None, config.max_lag)
        and not algorithm.corrects_lag
    ):
        text = (
            f"{name} assumes on-policy data, but rollouts lag behind under --plan asynchronous, so "
            "it may learn poorly; impala and appo correct for the lag"
        )
        warnings.warn(text, ConfigWarning, stacklevel=2)


def asynchronous(session: Session) -> Iterator[Report]:
    """Runs ``session`` with actors in threads;
    the acting policy may lag some versions behind the learner.
    """
    job = session.job
    keys = session.key(Stream.LEARN), session.key(Stream.LEARN_MORE)
    trainer = Trainer(job, job.learner, job.algorithm, keys)
    return dataflow(session, trainer.turns, trainer.programs, exchange(session))


class Trainer:
    """A learner that learns from each round and, if it is free-running,
    from its memory while none has arrived.
    """

    def __init__(
        self, job: Job, learner: Learner, algorithm: Algorithms, keys: tuple[jax.Array, jax.Array]
    ) -> None:
        """``algorithm`` has the policies that it trains;
        the ``keys`` are those of ``update`` and ``relearn``.
        """
        prioritized = prioritizes(algorithm)
        with_data = job.data is not None
        self._data = [job.put_data()] if with_data else []
        self._keys = keys
        self._update = job.once(
            ("update", *algorithm),
            lambda: compile_update(learner, job.mesh, prioritized=prioritized, with_data=with_data),
        )
        self.programs = [self._update]
        self._relearn = None
        if job.pool.free_running and learner.relearn is not None:
            self._relearn = job.once(
                ("relearn", *algorithm),
                lambda: compile_relearn(learner, job.mesh, with_data=with_data),
            )
            self.programs.append(self._relearn)

    def turns(self, state: TrainState, rounds: Rounds) -> Iterator[Turn]:
        """As ``dataflow.Training``."""
        more = False
        for content in rounds:
            updates = updates_of(state)
            metrics = {}
            if content is not None:
                rollout, *priority = content
                state, metrics = self._update(state, rollout, self._keys[0], *priority, *self._data)
            elif more and self._relearn is not None:
                state, metrics = self._relearn(state, self._keys[1], *self._data)
            counts = jax.tree.map(operator.gt, updates_of(state), updates)
            # its memory has filled
            more = self._relearn is not None and any(jax.tree.leaves(counts))
            yield Turn(state, metrics, counts, more)
