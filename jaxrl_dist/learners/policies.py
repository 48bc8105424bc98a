"""Joins the learners of the policies in an environment;
also the learner of a policy that does not train.

The fields of the joint state are dicts keyed by policy, except the iteration, which all policies
share. Experience and metrics are also dicts keyed by policy. A single policy has the name ``""``,
so a plan runs one as it runs several.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_dist import rng
from jaxrl_dist.learners import league, sgd
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.types import Algorithm, PyTree, Rollout, TrainState


def combined_learner(
    learners: Mapping[str, sgd.Learner], copies: Mapping[str, league.Copies] = {}
) -> sgd.Learner:
    """Returns the learner that updates each policy with its learner,
    from the experience of its agents.

    The keys of a policy fold in its number; the first policy
    gets the same keys as in a run without the others.

    Args:
      copies: for each policy that copies another: which one, and when.
    """

    def init(key: jax.Array) -> TrainState:
        states = {
            name: learners[name].init(rng.of_policy(key, number))
            for number, name in enumerate(learners)
        }
        for name, (source, _, size, _) in copies.items():
            variables = jax.tree.map(jnp.copy, states[source].variables)
            if size > 1:
                variables = league.init_pool(variables, size)
            states[name] = states[name]._replace(variables=variables)
        return joined(states)

    def update(
        state: TrainState,
        rollouts: Mapping[str, Rollout],
        key: jax.Array,
        priority: Mapping[str, jax.Array] = {},
        data: PyTree = (),
    ) -> tuple[TrainState, Mapping[str, Any]]:
        states = {}
        metrics = {}
        for number, (name, learner) in enumerate(learners.items()):
            policy_key = rng.of_policy(key, number)
            more: dict[str, Any] = {}
            if name in priority:
                more["priority"] = priority[name]
            if data:
                more["data"] = data
            states[name], metrics[name] = learner.update(
                state_of(state, name), rollouts[name], policy_key, **more
            )
        for name, (source, every, size, agents) in copies.items():
            due = states[source].updates // every > state.updates[source] // every
            variables = states[name].variables
            if size == 1:
                variables = jax.tree.map(
                    partial(jnp.where, due), states[source].variables, variables
                )
            else:
                pool = league.update_ratings(
                    variables.stats, rollouts[source], rollouts[name], agents
                )
                variables = league.replace_oldest(
                    variables._replace(stats=pool), states[source].variables, due
                )
                metrics[source] = {**metrics[source], "elo": pool.rating}
            states[name] = states[name]._replace(variables=variables)
        return joined(states), metrics

    def relearn(
        state: TrainState, key: jax.Array, data: PyTree = ()
    ) -> tuple[TrainState, Mapping[str, Any]]:
        states = {}
        metrics = {}
        for number, (name, learner) in enumerate(learners.items()):
            assert learner.relearn is not None, "every policy replays"
            states[name], metrics[name] = learner.relearn(
                state_of(state, name), rng.of_policy(key, number), data
            )
        return joined(states), metrics

    def observe(state: TrainState, data: PyTree) -> TrainState:
        states = {
            name: learner.observe(state_of(state, name), data) for name, learner in learners.items()
        }
        return joined(states)

    replay = all(learner.relearn is not None for learner in learners.values())
    cut = partial(over_policies(lambda learner, memory: learner.cut(memory)), learners)
    start_mid_episode = partial(
        over_policies(lambda learner, memory: learner.start_mid_episode(memory)), learners
    )
    parts = tuple(learners.items())
    learns_more = relearn if replay else None
    return sgd.Learner(init, update, learns_more, cut, start_mid_episode, observe, parts=parts)


def joined(states: Mapping[str, TrainState]) -> TrainState:
    """Joins the states of the policies into one; its fields, except ``iteration``, are dicts keyed
    by policy.
    """
    whole: Any = TrainState._make(
        {name: state[i] for name, state in states.items()} for i in range(len(TrainState._fields))
    )
    return whole._replace(iteration=next(iter(states.values())).iteration)


def state_of(state: TrainState, name: str) -> TrainState:
    """Returns the state of one policy of ``joined``; fields may have been replaced by ()."""
    return TrainState._make(part[name] if isinstance(part, dict) else part for part in state)


def still(algorithm: Algorithm) -> sgd.Learner:
    """Returns the learner of a policy that does not train: it only counts rollouts."""

    def update(
        state: TrainState, rollout: Rollout, key: jax.Array
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        del rollout, key
        return state._replace(iteration=state.iteration + 1), {}

    return sgd.Learner(partial(sgd.init, algorithm), update)
