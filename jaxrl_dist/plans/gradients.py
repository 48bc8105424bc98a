"""Each actor thread computes gradients of its experience,
and one learner applies them in order of arrival.

Sources: A3C (Mnih et al. 2016, https://arxiv.org/abs/1602.01783, section 4) and RLlib's
AsyncGradients optimizer (Liang et al. 2018, https://arxiv.org/abs/1712.09381, section 5). An
iteration is one actor's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from jaxrl_dist import mesh as meshes
from jaxrl_dist import rng
from jaxrl_dist.actors.pool import Deliver, Snapshot
from jaxrl_dist.actors.step import ActorJob, Rollouts
from jaxrl_dist.checks import flag
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.learners.gradients import check_sizes
from jaxrl_dist.learners.policies import joined, state_of
from jaxrl_dist.learners.sharded import compile_apply, compile_gradient
from jaxrl_dist.plans import threaded
from jaxrl_dist.plans.dataflow import Exchange, Rounds, Turn, dataflow
from jaxrl_dist.plans.session import Session
from jaxrl_dist.types import Algorithm, PyTree, Report, TrainState


def check_plan(config: Train, algorithm: Algorithm, name: str, num_devices: int) -> None:
    """See ``config.plans.Plan``."""
    del name, num_devices  # each gradient is one actor's, so nothing is sharded
    if peers.count() > 1:
        raise ConfigError(
            "--plan gradients trains in one process only; use --plan asynchronous --lockstep"
        )
    threaded.check_actors(config)
    if algorithm.replay is not None and algorithm.replay.priority_exponent is not None:
        raise ConfigError(
            "--priority-exponent needs replay, which --plan gradients does not have; remove one"
        )
    for field in marked(config, needs_rollouts=True):
        if getattr(config, field):
            raise ConfigError(
                f"{flag(field)} does not work with --plan gradients; "
                "turn it off, or use --plan asynchronous"
            )
    check_sizes(algorithm, config.rollout_length)


def gradients(session: Session) -> Iterator[Report]:
    """Runs ``session`` with actors that compute gradients;
    their policy may lag some versions behind the learner.
    """
    # An actor continues only after its gradient has been applied
    # (Mnih et al. 2016, algorithm S3), and acts with it.
    job = session.job
    job = job._replace(pool=job.pool._replace(in_flight=0))
    session = session._replace(job=job)
    (algorithm,) = job.algorithm.values()
    steps = job.steps_per_iteration // job.pool.num_actors
    apply = job.once("apply", lambda: compile_apply(algorithm, job.mesh, steps))

    def turns(state: TrainState, rounds: Rounds) -> Iterator[Turn]:
        for grads, metrics in rounds:
            state = joined({"": apply(state_of(state, ""), grads)})
            yield Turn(state, {"": metrics}, {"": True})

    def send(rollouts: Rollouts, gradient: PyTree) -> PyTree:
        del rollouts
        return meshes.put(gradient, job.mesh, meshes.REPLICATED)

    sends = [send] * job.pool.num_actors
    exchange = Exchange(digest, sends, lambda samples: samples[0].content, 1)
    return dataflow(session, turns, [apply], exchange)


def digest(job: ActorJob, on: Mesh) -> Deliver:
    """Returns a function from an actor's rollout to its gradient and metrics."""
    (algorithm,) = job.algorithm.values()
    gradient = job.once(("gradient", on), lambda: compile_gradient(algorithm, on))
    key = meshes.put(rng.stream(job.seed, rng.Stream.LEARN), on, meshes.REPLICATED)

    def differentiate(snapshot: Snapshot, rollouts: Rollouts, number: np.int32) -> PyTree:
        return gradient(state_of(snapshot.state, ""), rollouts[""], key, number)

    return differentiate
