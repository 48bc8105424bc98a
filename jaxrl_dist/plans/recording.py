"""Hands the experience of a run, with the probability of each action, to what records it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxrl_dist.actors.pool import Deliver, Snapshot
from jaxrl_dist.actors.step import Rollouts, probabilities_known
from jaxrl_dist.plans.job import Job
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Algorithms,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Variables,
)


def acting(job: Job) -> Algorithms:
    """Returns the algorithms that act: if their rollouts are recorded, as
    ``with_probabilities``.
    """
    if job.record is None:
        return job.algorithm
    return with_probabilities(job.algorithm, job.source.spec)


def with_probabilities(algorithms: Algorithms, spec: EnvSpec) -> Algorithms:
    """Returns algorithms whose rollouts hold the log-probability of each action until
    ``divided``.
    """
    return {name: _known(algorithm, spec) for name, algorithm in algorithms.items()}


def _known(algorithm: Algorithm, spec: EnvSpec) -> Algorithm:
    """Returns the algorithm with extras of ``(log_prob, extras)``,
    or of ``((), extras)`` if it is not known.
    """
    variables = jax.eval_shape(algorithm.init, jax.random.key(0))
    policy = algorithm.policy
    if probabilities_known(algorithm, spec, variables):
        log_prob = algorithm.log_prob
    else:
        log_prob = None

    def acted(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        action, after, extras = policy(variables, obs, core, context)
        known: PyTree = ()
        if log_prob is not None:
            known = log_prob(variables, obs, core, action, context)
        return action, after, (known, extras)

    return dataclasses.replace(algorithm, policy=acted)


def divided(rollouts: Rollouts) -> tuple[Rollout, Rollouts]:
    """Returns what is recorded of rollouts of ``with_probabilities``,
    and the rollouts of the algorithms themselves.
    """
    ((name, rollout),) = rollouts.items()
    known, extras = rollout.extras
    kept = rollout._replace(
        extras={} if isinstance(known, tuple) else {"log_prob": known}, core=(), final_core=()
    )
    return kept, {name: rollout._replace(extras=extras)}


def recorder(job: Job, first: int) -> Callable[[Rollouts], Rollouts]:
    """Returns a function that hands rollouts of ``acting`` to ``job.record``,
    and returns them for the learner.

    Args:
      first: index of their first environment.
    """
    if (record := job.record) is None:
        return lambda rollouts: rollouts

    def recording(rollouts: Rollouts) -> Rollouts:
        kept, rollouts = divided(rollouts)
        record(first, [kept])
        return rollouts

    return recording


KEPT_BYTES = 2**26
"""Bytes of experience that a program keeps before the host takes it, unless an iteration has
more."""


def kept_iterations(job: Job, experience: Any) -> int:
    """Returns the iterations whose experience a program keeps before the host takes it.

    Args:
      experience: shapes and dtypes of an iteration's experience.
    """
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(divided(experience)[0]))
    return max(1, min(KEPT_BYTES // nbytes, job.iterations_per_report))


def taken(kept: Rollout, count: int) -> Iterator[Rollout]:
    """Yields the rollouts of the first ``count`` iterations that a program has kept,
    ``[K, ...]``, from the host.
    """
    # else each rollout would hold all of it
    here = jax.tree.map(lambda x: x[:count].copy(), jax.device_get(kept))
    for iteration in range(count):
        yield jax.tree.map(lambda x, at=iteration: x[at], here)


def recorded(job: Job, send: Sequence[Deliver]) -> Sequence[Deliver]:
    """Returns what the actors do with their rollouts, after recording these."""

    def of_actor(index: int, deliver: Deliver) -> Deliver:
        record = recorder(job, index * (job.num_envs // len(send)))

        def recording(snapshot: Snapshot, rollouts: Rollouts, number: Any) -> PyTree:
            return deliver(snapshot, record(rollouts), number)

        return recording

    return [of_actor(index, deliver) for index, deliver in enumerate(send)]
