"""Hands the experience of a run, with the probability of each action, to what records it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax

from jaxrl_dist.actors.recorded_policy import to_learn, to_record, with_probabilities
from jaxrl_dist.actors.step import Rollouts
from jaxrl_dist.plans.session import Session
from jaxrl_dist.types import Algorithms, Rollout


def acting(session: Session) -> Algorithms:
    """Returns the algorithms that act, ``with_probabilities`` if their rollouts are recorded."""
    job = session.job
    if session.record is None:
        return job.algorithm
    return with_probabilities(job.algorithm, job.source.spec)


def recorder(session: Session, first: int) -> Callable[[Rollouts], Rollouts]:
    """Returns a function that hands rollouts of ``acting`` to ``session.record``,
    and returns them for the learner.

    Args:
      first: index of their first environment.
    """
    if (record := session.record) is None:
        return lambda rollouts: rollouts

    def record_and_return(rollouts: Rollouts) -> Rollouts:
        record(first, [to_record(rollouts)])
        return to_learn(rollouts)

    return record_and_return


def recorders(session: Session, num_actors: int) -> list[Callable[[Rollouts], Rollouts]]:
    """Returns the ``recorder`` of each actor."""
    num_envs = session.job.num_envs // num_actors
    return [recorder(session, index * num_envs) for index in range(num_actors)]


# --- What a program keeps for the host ------------------------------------------------------------

KEPT_BYTES = 2**26
"""Bytes of experience that a program keeps before the host takes it, unless an iteration has
more."""


def kept_iterations(session: Session, experience: Rollouts) -> int:
    """Returns the iterations whose experience a program keeps before the host takes it.

    Args:
      experience: shapes and dtypes of an iteration's experience.
    """
    arrays = jax.tree.leaves(to_record(experience))
    nbytes = sum(x.size * x.dtype.itemsize for x in arrays)
    return max(1, min(KEPT_BYTES // nbytes, session.iterations_per_report))


def fetched(kept: Rollout, count: int) -> Iterator[Rollout]:
    """Yields the rollouts of the first ``count`` iterations that a program has kept,
    ``[K, ...]``, from the host.
    """
    # else each rollout would hold all of it
    here = jax.tree.map(lambda x: x[:count].copy(), jax.device_get(kept))
    for iteration in range(count):
        yield jax.tree.map(lambda x, at=iteration: x[at], here)
