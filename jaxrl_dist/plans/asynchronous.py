"""Acting and learning at the same time: actor threads send rollouts, and the learner takes them as they arrive.

Sources: RLlib's AsyncSamples and AsyncReplay optimizers (Liang et al. 2018, https://arxiv.org/abs/1712.09381,
section 5) and the Sebulba architecture (Hessel et al. 2021, https://arxiv.org/abs/2104.06272). An iteration learns from
``num_envs x rollout_length`` steps, as in every plan: from as many rollouts as there are actors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax

from jaxrl_dist import flow
from jaxrl_dist.actors.pool import ActorPool, ParamStore, Sample
from jaxrl_dist.actors.step import Stages
from jaxrl_dist.checks import check_divides, flag
from jaxrl_dist.config import Train
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.hosts import arrays, peers
from jaxrl_dist.learners.sharded import compile_relearn, compile_update
from jaxrl_dist.plans import threaded
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.report import Clock
from jaxrl_dist.plans.threaded import CONTENT, Tally, homes, joiner, prioritize, sender
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Algorithm, Report


def check(config: Train[Any], algorithm: Algorithm, name: str, num_devices: int) -> None:
    """See ``PlanInfo.check``; warns if experience may lag and the algorithm does not correct for it."""
    if peers.count() > 1 and not config.lockstep:
        raise ConfigError(
            f"--plan asynchronous over {peers.count()} processes needs --lockstep: an update takes a rollout of each "
            "actor of each process"
        )
    threaded.check(config, (num_devices, "devices"))
    check_divides("num_actors", config.num_actors or 1, (peers.count(), "processes"))
    for field in ("gather", "max_lag"):
        if getattr(config, field) is not None and algorithm.replay is not None:
            raise ConfigError(f"{flag(field)} leaves experience out, and what {name} replays must be without gaps")
    lags = 0 not in (config.lag if config.lockstep else None, config.max_lag)
    if lags and algorithm.replay is None and not algorithm.corrects_lag:
        text = (
            f"{name} takes all experience for that of the newest policy, and under --plan asynchronous some is older: "
            "it may learn worse, or not at all; impala and appo correct for that"
        )
        warnings.warn(text, ConfigWarning, stacklevel=2)


def asynchronous(job: Job) -> Iterator[Report]:
    """Runs ``job`` with actors in threads; the acting policy may lag some versions behind the learner."""
    clock, stages, options = Clock(job.resumed, job.away), Stages(), job.pool
    prioritized = job.algorithm.replay is not None and job.algorithm.replay.priority_exponent is not None
    here = arrays.own_part(job.mesh)
    update = job.once("update", lambda job: compile_update(job.learner, job.mesh, prioritized=prioritized))
    join = joiner(here, options.num_actors)
    state, learn_key = job.initial_state(), job.key(Stream.LEARN)
    store = ParamStore(options.meshes, keep=options.lag or 0)
    store.publish(arrays.as_local(state, job.mesh))
    relearn = compile_relearn(job.learner, job.mesh) if options.free_running else None
    programs = [update] if relearn is None else [update, relearn]
    priorities = [prioritize(job, on) if prioritized else None for on in options.meshes]
    send = [
        sender(home, priorities[index % len(priorities)]) for index, home in enumerate(homes(here, options.num_actors))
    ]
    with ActorPool(job.actor_job(), options, store, send) as pool:
        tally = Tally(job, pool, store, job.iterations_per_report)
        stages.mark("starting")
        pool.streams.wait()
        clock.ready(*programs)
        stages.mark("actors_starting")

        def now() -> Report:
            return tally.report(state, clock, stages, programs)

        job.offer(now)
        taken = iter(() if tally.done() else rounds(job, pool, tally))
        while (samples := peers.attempt(partial(next, taken, ()), "the actors")) != ():
            stages.mark("waiting")
            updates = int(state.updates)
            if samples is None:
                assert relearn is not None
                state, metrics = relearn(state, job.key(Stream.LEARN_MORE))
            else:
                tally.learn(samples)
                rollout, *priority = arrays.as_global(join(samples), job.mesh, CONTENT[: 1 + prioritized])
                state, metrics = update(state, rollout, learn_key, *priority)
            jax.block_until_ready(state)
            stages.mark("updating")
            store.publish(arrays.as_local(state, job.mesh))
            tally.learned(metrics, counts=int(state.updates) > updates)
            stages.mark("publishing")
            if tally.ends(tally.env_steps):
                break
            if tally.due:
                yield now()
                stages.mark("reporting")
        tally.drop(pool.close())
        stages.mark("closing")
        yield now()


def rounds(job: Job, pool: ActorPool, tally: Tally) -> Iterator[Sequence[Sample | None] | None]:
    """Yields the samples of each iteration: one of each actor, or the same number in order of arrival.

    Replayed experience must keep each environment's order, and so takes one of each actor. Yields None if a
    free-running learner should update from its memory without new experience.
    """
    options = job.pool
    if options.lag is None and options.gather is None and job.algorithm.replay is None:
        yield from flow.batch(filter(tally.fresh, flow.gather_async(pool.streams)), options.num_actors)
        return
    complete = flow.gather_sync(pool.streams, options.gather, options.gather_deadline)
    while True:
        while options.free_running and tally.learning and not pool.streams.complete():
            yield None
        samples = next(complete, [])
        if not samples:
            return
        fresh = [sample if sample is not None and tally.fresh(sample) else None for sample in samples]
        if any(fresh):
            yield fresh
