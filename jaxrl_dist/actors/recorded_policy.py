"""Policies whose rollouts hold the probability of each action, for a data set of them."""

from __future__ import annotations

import dataclasses

import jax

from jaxrl_dist.actors.step import Rollouts, reads_of_core
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


def probabilities_known(algorithm: Algorithm, spec: EnvSpec, variables: Variables) -> bool:
    """Returns whether ``log_prob`` is that of drawn actions:
    it is not where their noise is correlated in time.
    """
    if algorithm.log_prob is None:
        return False
    drawn, given = reads_of_core(algorithm, spec, variables)
    return drawn <= given


def with_probabilities(algorithms: Algorithms, spec: EnvSpec) -> Algorithms:
    """Returns algorithms whose extras are ``(log_prob, extras)``, for ``to_record`` and
    ``to_learn``.

    ``log_prob`` is () if the probabilities are not known.
    """
    return {name: _with_probabilities(algorithm, spec) for name, algorithm in algorithms.items()}


def _with_probabilities(algorithm: Algorithm, spec: EnvSpec) -> Algorithm:
    variables = jax.eval_shape(algorithm.init, jax.random.key(0))
    known = probabilities_known(algorithm, spec, variables)

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        action, after, extras = algorithm.policy(variables, obs, core, context)
        log_prob: PyTree = ()
        if known and algorithm.log_prob is not None:
            log_prob = algorithm.log_prob(variables, obs, core, action, context)
        return action, after, (log_prob, extras)

    return dataclasses.replace(algorithm, policy=policy)


def to_record(rollouts: Rollouts) -> Rollout:
    """Returns what a data set stores of the only policy's rollout ``with_probabilities``."""
    (rollout,) = rollouts.values()
    log_prob, _ = rollout.extras
    if isinstance(log_prob, tuple):
        extras = {}
    else:
        extras = {"log_prob": log_prob}
    return rollout._replace(extras=extras, core=(), final_core=())


def to_learn(rollouts: Rollouts) -> Rollouts:
    """Returns rollouts ``with_probabilities`` as the algorithms themselves make them."""
    return {name: rollout._replace(extras=rollout.extras[1]) for name, rollout in rollouts.items()}
