"""Hands the experience of a run, with the probability of each action, to what records it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_dist.actors.pool import Deliver, Snapshot
from jaxrl_dist.actors.step import Rollouts, probabilities_known
from jaxrl_dist.plans.job import Job
from jaxrl_dist.types import Acted, Algorithm, Algorithms, Context, EnvSpec, PyTree, Variables


def acting(job: Job) -> Algorithms:
    """Returns the algorithms that act; if rollouts are recorded, these hold log-probabilities until ``recorder``."""
    if job.record is None:
        return job.algorithm
    return {name: _known(x, job.source.spec) for name, x in job.algorithm.items()}


def _known(algorithm: Algorithm, spec: EnvSpec) -> Algorithm:
    """Returns the algorithm with extras of ``(log_prob, extras)``, or of ``((), extras)`` if it is not known."""
    variables = jax.eval_shape(algorithm.init, jax.random.key(0))
    policy = algorithm.policy
    log_prob = algorithm.log_prob if probabilities_known(algorithm, spec, variables) else None

    def acted(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        action, after, extras = policy(variables, obs, core, context)
        known = () if log_prob is None else log_prob(variables, obs, core, action, context)
        return action, after, (known, extras)

    return dataclasses.replace(algorithm, policy=acted)


def recorder(job: Job, first: int) -> Callable[[Rollouts], Rollouts]:
    """Returns a function that hands rollouts of ``acting`` to ``job.record``, and returns them for the learner.

    Args:
      first: index of their first environment.
    """
    if (record := job.record) is None:
        return lambda rollouts: rollouts

    def recording(rollouts: Rollouts) -> Rollouts:
        ((name, rollout),) = rollouts.items()
        known, extras = rollout.extras
        record(first, rollout._replace(extras={} if isinstance(known, tuple) else {"log_prob": known}))
        return {name: rollout._replace(extras=extras)}

    return recording


def recorded(job: Job, send: Sequence[Deliver]) -> Sequence[Deliver]:
    """Returns what the actors do with their rollouts, after recording these."""

    def of_actor(index: int, deliver: Deliver) -> Deliver:
        record = recorder(job, index * (job.num_envs // len(send)))

        def recording(snapshot: Snapshot, rollouts: Rollouts, number: Any) -> PyTree:
            return deliver(snapshot, record(rollouts), number)

        return recording

    return [of_actor(index, deliver) for index, deliver in enumerate(send)]
