"""Each actor thread computes gradients of its experience, and one learner applies them in order of arrival.

Sources: A3C (Mnih et al. 2016, https://arxiv.org/abs/1602.01783, section 4) and RLlib's AsyncGradients optimizer (Liang
et al. 2018, https://arxiv.org/abs/1712.09381, section 5). An iteration is one actor's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import flow, rng
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.pool import ActorPool, Deliver, ParamStore, Snapshot
from jaxrl_dist.actors.step import Rollouts, Stages
from jaxrl_dist.checks import flag
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.learners.gradients import check_sizes
from jaxrl_dist.learners.policies import joined, state_of
from jaxrl_dist.learners.sharded import compile_apply, compile_gradient
from jaxrl_dist.plans import threaded
from jaxrl_dist.plans.clock import Clock
from jaxrl_dist.plans.job import Job
from jaxrl_dist.plans.threaded import Tally
from jaxrl_dist.types import Algorithm, PyTree, Report


def check(config: Train[Any], algorithm: Algorithm, name: str, num_devices: int) -> None:
    """See ``config.plans.Plan``."""
    del name, num_devices  # each gradient is one actor's, so nothing is sharded
    if peers.count() > 1:
        raise ConfigError("--plan gradients trains in one process; --plan asynchronous --lockstep does in several")
    threaded.check(config)
    if algorithm.replay is not None and algorithm.replay.priority_exponent is not None:
        raise ConfigError("--priority-exponent is for what is replayed, and --plan gradients replays nothing")
    for field in marked(config, needs_rollouts=True):
        if getattr(config, field):
            raise ConfigError(f"{flag(field)} does not work with --plan gradients; --plan asynchronous does")
    check_sizes(algorithm, config.rollout_length)


def gradients(job: Job) -> Iterator[Report]:
    """Runs ``job`` with actors that compute gradients; their policy may lag some versions behind the learner."""
    clock, stages = Clock(job.resumed, job.excluded_seconds), Stages()
    # An actor continues only after its gradient has been applied (Mnih et al. 2016, algorithm S3), and acts with it.
    options = job.pool._replace(in_flight=0)
    steps = job.steps_per_iteration // options.num_actors
    (algorithm,) = job.algorithm.values()
    apply = job.once("apply", lambda job: compile_apply(algorithm, job.mesh, steps))
    state = job.initial_state()
    store = ParamStore(options.meshes, keep=options.lag or 0)
    store.publish(state)
    by_device = [differentiate(job, on) for on in options.meshes]
    send = [by_device[index % len(by_device)] for index in range(options.num_actors)]
    with ActorPool(job.actor_job(), options, store, send) as pool:
        tally = Tally(job, pool, store, job.iterations_per_report * options.num_actors)
        stages.mark("starting")
        pool.streams.wait()
        clock.ready(apply)
        stages.mark("actors_starting")

        def now() -> Report:
            return tally.report(state, clock, stages, [apply])

        job.publish_latest(now)
        samples = () if tally.done() else flow.gather_async(pool.streams)
        for sample in filter(tally.fresh, samples):
            stages.mark("waiting")
            grads, metrics = sample.content
            tally.learn([sample])
            state = joined({"": apply(state_of(state, ""), grads)})
            jax.block_until_ready(state)
            stages.mark("updating")
            store.publish(state)
            tally.learned({"": metrics}, counts={"": True})
            stages.mark("publishing")
            if tally.ends(tally.env_steps):
                break
            if tally.due:
                yield now()
                stages.mark("reporting")
        pool.close()
        stages.mark("closing")
        yield now()


def differentiate(job: Job, on: Mesh) -> Deliver:
    """Returns a function from an actor's rollout to its gradient and metrics, placed on the learner's devices."""
    (algorithm,) = job.algorithm.values()
    gradient = job.once(("gradient", on), lambda _: compile_gradient(algorithm, on))
    key = meshes.put(rng.stream(job.session_seed, rng.Stream.LEARN), on, meshes.REPLICATED)

    def deliver(snapshot: Snapshot, rollouts: Rollouts, number: np.int32) -> PyTree:
        own = state_of(snapshot.state, ""), rollouts[""]
        return meshes.put(gradient(*own, key, number), job.mesh, meshes.REPLICATED)

    return deliver
