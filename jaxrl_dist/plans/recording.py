"""Hands the experience of a run, with the probability of each action, to what records it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxrl_dist.actors.pool import Deliver, Snapshot
from jaxrl_dist.actors.recorded_policy import to_learn, to_record, with_probabilities
from jaxrl_dist.actors.step import Rollouts
from jaxrl_dist.plans.session import Session
from jaxrl_dist.types import Algorithms, PyTree, Rollout


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


def recording_actors(session: Session, deliver: Sequence[Deliver]) -> Sequence[Deliver]:
    """Returns the actors' ``deliver`` functions, which record each rollout first."""
    num_envs = session.job.num_envs // len(deliver)

    def of_actor(index: int, deliver: Deliver) -> Deliver:
        record = recorder(session, index * num_envs)

        def record_and_deliver(snapshot: Snapshot, rollouts: Rollouts, number: np.int32) -> PyTree:
            return deliver(snapshot, record(rollouts), number)

        return record_and_deliver

    return [of_actor(index, one) for index, one in enumerate(deliver)]


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
