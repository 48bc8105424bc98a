"""Compiles a learner for a mesh: one program for any number of devices."""

from __future__ import annotations

from functools import partial
from typing import Any

from jax.sharding import Mesh

from jaxrl_dist.learners import gradients, off_policy
from jaxrl_dist.learners.sgd import Learner
from jaxrl_dist.mesh import BATCH, REPLICATED, ROLLOUT, STATE, TIME_BATCH, Program, acting
from jaxrl_dist.types import Algorithm, Array, TrainState


def compile_update(
    learner: Learner, mesh: Mesh, *, prioritized: bool = False, with_data: bool = False
) -> Program:
    """``(state, rollout, key) -> (state, metrics)``: experience is sharded over the mesh,
    all else replicated.

    With ``prioritized``, a fourth argument holds the initial priorities ``[T, B]`` of the windows;
    with ``with_data``, it holds a data set. The state is donated. The program sums gradients over
    devices; ``check_vma`` proves that the replicas stay equal. With several policies, rollout and
    priorities are dicts keyed by policy.
    """
    rollout: Any = {name: ROLLOUT for name, _ in learner.parts} or ROLLOUT
    if prioritized:
        more = {"priority": TIME_BATCH}
    else:
        more = {"data": BATCH} if with_data else {}

    def update(state: TrainState, rollout: Any, key: Array, *others: Any) -> Any:
        return learner.update(state, rollout, key, **dict(zip(more, others, strict=True)))

    return Program(
        update, mesh, (STATE, rollout, REPLICATED, *more.values()), (STATE, REPLICATED), donate=(0,)
    )


def compile_relearn(learner: Learner, mesh: Mesh, *, with_data: bool = False) -> Program:
    """``(state, key) -> (state, metrics)``: updates from the memory only; the state is donated.

    With ``with_data``, a third argument holds a data set.
    """
    assert learner.relearn is not None, (
        "learning without new experience needs a learner with a memory"
    )
    inputs: tuple[Any, ...] = (STATE, REPLICATED)
    if with_data:
        inputs = (*inputs, BATCH)
    return Program(learner.relearn, mesh, inputs, (STATE, REPLICATED), donate=(0,))


def compile_priority(algorithm: Algorithm, mesh: Mesh) -> Program:
    """``(state, rollout, key, number) -> priority``: see ``off_policy.initial_priority``."""
    specs = (REPLICATED, ROLLOUT, REPLICATED, REPLICATED)
    return Program(
        partial(off_policy.initial_priority, algorithm), mesh, specs, TIME_BATCH, mapped=acting
    )


def compile_gradient(algorithm: Algorithm, mesh: Mesh) -> Program:
    """``(state, rollout, key, number) -> (gradient, metrics)``: see ``gradients.gradient``."""
    specs = (REPLICATED, ROLLOUT, REPLICATED, REPLICATED)
    return Program(partial(gradients.gradient, algorithm), mesh, specs, (REPLICATED, REPLICATED))


def compile_apply(algorithm: Algorithm, mesh: Mesh, steps: int) -> Program:
    """``(state, gradient) -> state`` for gradients of rollouts of ``steps`` env steps;
    the state is donated.
    """
    apply = partial(gradients.apply, algorithm, steps=steps)
    return Program(apply, mesh, (STATE, REPLICATED), STATE, donate=(0,))
