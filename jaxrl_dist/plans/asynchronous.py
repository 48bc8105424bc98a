"""Acting and learning at the same time: actor threads send rollouts, and the learner takes them as they arrive.

Sources: RLlib's AsyncSamples and AsyncReplay optimizers (Liang et al. 2018, https://arxiv.org/abs/1712.09381,
section 5) and the Sebulba architecture (Hessel et al. 2021, https://arxiv.org/abs/2104.06272). An iteration learns from
``num_envs x rollout_length`` steps, as in every plan; these are as many rollouts as there are actors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax

from jaxrl_dist import flow
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.pool import ActorPool, ParamStore, Sample
from jaxrl_dist.actors.step import Stages
from jaxrl_dist.checks import check_divides, flag
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners.sharded import compile_relearn, compile_update
from jaxrl_dist.plans import threaded
from jaxrl_dist.plans.clock import Clock
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import updated, updates_of
from jaxrl_dist.plans.threaded import (
    Tally,
    content_specs,
    homes,
    joiner,
    prioritize,
    prioritizes,
    replays,
    sender,
)
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Algorithm, PyTree, Report, TrainState


def check(config: Train[Any], algorithm: Algorithm, name: str, num_devices: int) -> None:
    """See ``config.plans.Plan``; warns if experience may lag and the algorithm does not correct for it."""
    if peers.count() > 1 and not config.lockstep:
        raise ConfigError(
            f"--plan asynchronous over {peers.count()} processes needs --lockstep: an update takes a rollout of each "
            "actor of each process"
        )
    threaded.check(config, (num_devices, "devices"))
    check_divides("num_actors", config.num_actors or 1, (peers.count(), "processes"))
    for field in marked(config, skips=True):
        if getattr(config, field) is not None and algorithm.replay is not None:
            raise ConfigError(f"{flag(field)} leaves experience out, and what {name} replays must be without gaps")
    if threaded.may_lag(config) and algorithm.replay is None and not algorithm.corrects_lag:
        text = (
            f"{name} takes all experience for that of the newest policy, and under --plan asynchronous some is older: "
            "it may learn worse, or not at all; impala and appo correct for that"
        )
        warnings.warn(text, ConfigWarning, stacklevel=2)


def asynchronous(job: Job) -> Iterator[Report]:
    """Runs ``job`` with actors in threads; the acting policy may lag some versions behind the learner."""
    prioritized = prioritizes(job.algorithm)
    update = job.once("update", lambda job: compile_update(job.learner, job.mesh, prioritized=prioritized))
    relearn = None
    if job.pool.free_running:
        relearn = job.once("relearn", lambda job: compile_relearn(job.learner, job.mesh))
    return overlapped(job, Trainer(update, relearn, (job.key(Stream.LEARN), job.key(Stream.LEARN_MORE))))


class Turn(NamedTuple):
    """The result of a trainer's turn, with or without a round of new experience."""

    state: TrainState
    metrics: Mapping[str, Any]
    counts: Any
    """As for ``HostInterval.learned``."""
    last: bool = True
    """Whether all policies have had their turn."""


class Training(Protocol):
    """One or several trainers that learn from the actors' experience."""

    @property
    def programs(self) -> Sequence[meshes.Program]:
        """Its compiled programs."""

    @property
    def more(self) -> bool:
        """Whether it can learn now without new experience."""

    def turns(self, state: TrainState, rounds: Iterator[Sequence[PyTree] | None]) -> Iterator[Turn]:
        """Learns from each round's rollout and, if present, its priorities; None: there is no new experience."""


class Trainer:
    """One learner, which learns from each round, and from its memory only if it is free-running."""

    def __init__(
        self, update: meshes.Program, relearn: meshes.Program | None, keys: tuple[jax.Array, jax.Array]
    ) -> None:
        """``relearn`` is None if it learns from new experience only; the ``keys`` are those of both programs."""
        self._update, self._relearn, self._keys = update, relearn, keys
        self._more = False

    @property
    def programs(self) -> Sequence[meshes.Program]:
        """As ``Training.programs``."""
        return [self._update] if self._relearn is None else [self._update, self._relearn]

    @property
    def more(self) -> bool:
        """As ``Training.more``: the last iteration made an update, so its memory has filled."""
        return self._more

    def turns(self, state: TrainState, rounds: Iterator[Sequence[PyTree] | None]) -> Iterator[Turn]:
        """As ``Training.turns``."""
        for content in rounds:
            updates, metrics = updates_of(state), {}
            if content is not None:
                rollout, *priority = content
                state, metrics = self._update(state, rollout, self._keys[0], *priority)
            elif self._more and self._relearn is not None:
                state, metrics = self._relearn(state, self._keys[1])
            counts = updated(state, updates)
            self._more = self._relearn is not None and any(jax.tree.leaves(counts))
            yield Turn(state, metrics, counts)


def overlapped(job: Job, training: Training) -> Iterator[Report]:
    """Runs ``job`` with actors in threads, while ``training`` learns from what they send."""
    clock, stages, options = Clock(job.resumed, job.excluded_seconds), Stages(), job.pool
    specs, here = content_specs(job.algorithm), arrays.own_part(job.mesh)
    join = job.once("join", lambda _: joiner(here, options.num_actors, specs))
    state = job.initial_state()
    store = ParamStore(options.meshes, keep=options.lag or 0)
    store.publish(arrays.as_local(state, job.mesh))
    priorities = [prioritize(job, on) if len(specs) > 1 else None for on in options.meshes]
    send = [
        sender(home, specs, priorities[index % len(priorities)])
        for index, home in enumerate(homes(here, options.num_actors))
    ]
    with ActorPool(job.actor_job(), options, store, send) as pool:
        tally = Tally(job, pool, store, job.iterations_per_report)
        stages.mark("starting")
        pool.streams.wait()
        clock.ready(*training.programs)
        stages.mark("actors_starting")

        def now() -> Report:
            return tally.report(state, clock, stages, training.programs)

        def received() -> Iterator[Sequence[PyTree] | None]:
            taken = iter(() if tally.done() else rounds(job, pool, tally, lambda: training.more))
            while (samples := peers.run_everywhere(partial(next, taken, ()), "the actors")) != ():
                stages.mark("waiting")
                if samples is not None:
                    tally.learn(samples)
                yield None if samples is None else arrays.as_global(join(samples), job.mesh, specs)

        job.publish_latest(now)
        turns = training.turns(state, received())
        for turn in turns:
            state = turn.state
            jax.block_until_ready(state)
            stages.mark("updating")
            store.publish(arrays.as_local(state, job.mesh))
            tally.learned(turn.metrics, counts=turn.counts)
            stages.mark("publishing")
            if not turn.last:
                continue
            if tally.ends(tally.env_steps):
                break
            if tally.due:
                yield now()
                stages.mark("reporting")
        pool.close()
        stages.mark("closing")
        yield now()


def rounds(
    job: Job, pool: ActorPool, tally: Tally, more: Callable[[], bool]
) -> Iterator[Sequence[Sample | None] | None]:
    """Yields the samples of each iteration: one from each actor, or the same number in order of arrival.

    Replayed experience must keep each environment's order, so it takes one from each actor. Yields None while no new
    samples have arrived and there is ``more`` to learn without them.
    """
    options = job.pool
    if options.lag is None and options.gather is None and not replays(job.algorithm):
        yield from flow.batch(filter(tally.fresh, flow.gather_async(pool.streams)), options.num_actors)
        return
    complete = flow.gather_sync(pool.streams, options.gather, options.gather_deadline)
    while True:
        while more() and not pool.streams.complete():
            yield None
        samples = next(complete, [])
        if not samples:
            return
        fresh = [sample if sample is not None and tally.fresh(sample) else None for sample in samples]
        if any(fresh):
            yield fresh
