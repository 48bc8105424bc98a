"""What wrappers have in common: an algorithm gets further statistics,
a longer core, and another simulator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_dist.lazy import jax
from jaxrl_dist.simulator import Simulated
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Array,
    Aux,
    Context,
    PyTree,
    Rollout,
    Timestep,
    Variables,
)

OPTIONAL = ("action_values", "add_extras", "behaviour", "log_prob")
"""Functions that an algorithm may lack; a wrapper then does not give it one."""


def restricted(wrapped: Algorithm, algorithm: Algorithm) -> Algorithm:
    """Returns ``wrapped`` without the ``OPTIONAL`` functions that ``algorithm`` lacks."""
    lacking: dict[str, Any] = {name: None for name in OPTIONAL if getattr(algorithm, name) is None}
    return dataclasses.replace(wrapped, **lacking)


def simulating(context: Context, change: Callable[[Simulated], Simulated]) -> Context:
    """Returns the context of a policy whose simulator, if it has one, steps through ``change``."""
    if context.simulator is None:
        return context
    return context._replace(simulator=context.simulator.mapped(change))


def extended(
    algorithm: Algorithm,
    stats: Callable[[PyTree], PyTree],
    core: Callable[[int], PyTree] | None = None,
) -> Algorithm:
    """Puts ``stats(params)`` in front of ``variables.stats``, and ``core(num_envs)`` in front of
    the policy's core.

    The algorithm sees the rest. Without ``core``, the policy's core stays as it is.
    """
    wrapper = _Extended(algorithm, stats, core)
    wrapped = dataclasses.replace(
        algorithm,
        init=wrapper.init,
        initial_core=wrapper.initial_core,
        policy=wrapper.policy,
        log_prob=wrapper.log_prob,
        action_values=wrapper.action_values,
        feedback=wrapper.feedback,
        behaviour=wrapper.behaviour,
        postprocess=wrapper.postprocess,
        update_stats=wrapper.update_stats,
        loss=wrapper.loss,
    )
    return restricted(wrapped, algorithm)


@dataclasses.dataclass(frozen=True, eq=False)
class _Extended:
    """The functions of an extended algorithm, each with the name of its field."""

    algorithm: Algorithm
    stats: Callable[[PyTree], PyTree]
    core: Callable[[int], PyTree] | None

    def init(self, key: jax.Array) -> Variables:
        variables = self.algorithm.init(key)
        return variables._replace(stats=(self.stats(variables.params), variables.stats))

    def initial_core(self, num_envs: int) -> PyTree:
        rest = self.algorithm.initial_core(num_envs)
        if self.core is None:
            return rest
        return (self.core(num_envs), rest)

    def policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        rest = self._rest(core)
        action, after, extras = self.algorithm.policy(_inner(variables), obs, rest, context)
        return action, self._with_rest(core, after), extras

    def log_prob(
        self, variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
    ) -> jax.Array:
        assert self.algorithm.log_prob is not None
        return self.algorithm.log_prob(_inner(variables), obs, self._rest(core), action, context)

    def action_values(self, variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert self.algorithm.action_values is not None
        return self.algorithm.action_values(_inner(variables), obs)

    def feedback(self, core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        return self._with_rest(core, self.algorithm.feedback(self._rest(core), action, step))

    def behaviour(
        self, variables: Variables, core: PyTree, context: Context
    ) -> tuple[PyTree, PyTree]:
        assert self.algorithm.behaviour is not None
        params, after = self.algorithm.behaviour(_inner(variables), self._rest(core), context)
        return params, self._with_rest(core, after)

    def postprocess(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return self.algorithm.postprocess(_inner(variables), self._inner_rollout(rollout), context)

    def update_stats(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        rollout = self._inner_rollout(rollout)
        return variables.stats[0], self.algorithm.updated_stats(_inner(variables), rollout, context)

    def loss(
        self, variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        return self.algorithm.loss(_inner(variables), batch, context)

    def _rest(self, core: PyTree) -> PyTree:
        return core if self.core is None else core[1]

    def _with_rest(self, core: PyTree, rest: PyTree) -> PyTree:
        return rest if self.core is None else (core[0], rest)

    def _inner_rollout(self, rollout: Rollout) -> Rollout:
        return rollout if self.core is None else rollout.with_inner_core()


def _inner(variables: Variables) -> Variables:
    return variables._replace(stats=variables.stats[1])
