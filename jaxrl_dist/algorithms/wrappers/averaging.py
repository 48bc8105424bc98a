"""Greedy actions from an average of the parameters."""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxrl_dist.algorithms.wrappers.extending import extended, restricted
from jaxrl_dist.lazy import jax, jnp, mesh, optax
from jaxrl_dist.types import Acted, Algorithm, Array, Context, PyTree, Rollout, Variables


def average_parameters(
    algorithm: Algorithm, steps: int, num_agents: int = 1, *, by_update: bool = False
) -> Algorithm:
    """Lets greedy actions come from an exponential moving average of the parameters,
    over about ``steps`` env steps.

    Training, and whoever samples actions, uses the newest parameters. Each rollout moves the
    average towards the parameters that acted; the first ``steps`` env steps count equally, so that
    the initial ones are soon forgotten.

    Args:
      num_agents: rows of a rollout that belong to one environment.
      by_update: average over ``steps`` updates instead: where a data set is learnt from, each
        update follows a blank rollout.

    Source: Polyak and Juditsky (1992); Nikishin et al. (2018), "Improving stability in deep
    reinforcement learning with weight averaging".
    """
    inner = extended(algorithm, partial(jax.tree.map, jnp.copy))

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        if context.keys is None:
            variables = variables._replace(params=variables.stats[0])
        return inner.policy(variables, obs, core, context)

    def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert inner.action_values is not None
        return inner.action_values(variables._replace(params=variables.stats[0]), obs)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        average, rest = inner.updated_stats(variables, rollout, context)
        new = 1
        if not by_update:
            new = rollout.reward.size // num_agents * jax.lax.axis_size(mesh.DATA)
        rate = jnp.minimum(new / jnp.minimum(context.env_step + new, steps), 1.0)
        return optax.incremental_update(variables.params, average, rate), rest

    wrapped = dataclasses.replace(
        inner, policy=policy, action_values=action_values, update_stats=update_stats
    )
    return restricted(wrapped, algorithm)
