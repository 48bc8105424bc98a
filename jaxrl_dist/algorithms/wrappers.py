"""Scaling and clipping of observations and rewards, and averages of parameters.

Each function maps an ``Algorithm`` to an ``Algorithm``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jax, jnp, mesh, np, optax, packing, spaces
from jaxrl_dist.simulator import Simulated
from jaxrl_dist.types import (
    Acted,
    Algorithm,
    Array,
    Aux,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Timestep,
    Variables,
)

CLIP = 10.0
"""Normalised observations and scaled rewards are clipped to +- 10,
as in OpenAI baselines' ``VecNormalize``."""
EPSILON = 1e-8
HORIZON = 2**20
"""Batches that running statistics remember; older ones decay geometrically. Without this limit, a
float32 count would stop growing after 2^24 batches, and the variance would grow instead."""
_IDS = "agents/agent"
"""The ids of agents that act as one, a constant identity matrix: see ``envs.groups``. Statistics
per element would turn it into zeros."""


class RunningStats(NamedTuple):
    """Count, mean and summed squared deviation of all values so far; float32."""

    count: jax.Array  # type: ignore[assignment]  # []; hides ``tuple.count``
    mean: jax.Array
    """[...]."""
    deviation: jax.Array
    """[...]."""

    @staticmethod
    def zeros(shape: tuple[int, ...]) -> RunningStats:
        return RunningStats(jnp.zeros(()), jnp.zeros(shape), jnp.zeros(shape))

    def std(self) -> jax.Array:
        """Returns the standard deviation; 1 before the first value."""
        variance = self.deviation / jnp.maximum(self.count, 1.0)
        return jnp.where(self.count > 0, jnp.sqrt(variance + EPSILON), 1.0)

    def merge(self, x: jax.Array, mask: jax.Array) -> RunningStats:
        """Adds the rows of ``x [..., *shape]`` where ``mask`` holds, over all devices.

        The mask may lack the last axes of rows: an entry then holds for several rows.

        Parallel algorithm of Chan, Golub and LeVeque (1979), equations 2.1: the batch is centred on
        its own mean before squaring, so a large offset costs no precision.
        """
        axes = tuple(range(x.ndim - self.mean.ndim))
        rows = math.prod(x.shape[mask.ndim : len(axes)])  # for each entry of the mask
        weight = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        x = x.astype(jnp.float32)
        # A first centring on the running mean keeps the sums small.
        centred = jnp.where(weight, x - jnp.broadcast_to(self.mean, x.shape), 0.0)
        count, total = mesh.global_sum(
            (rows * jnp.sum(mask, dtype=jnp.float32), jnp.sum(centred, axes))
        )
        shift = total / jnp.maximum(count, 1.0)
        residual = jnp.where(weight, centred - jnp.broadcast_to(shift, x.shape), 0.0)
        deviation = mesh.global_sum(jnp.sum(jnp.square(residual), axes))
        before = jnp.where(count > 0, jnp.minimum(self.count, HORIZON * count), self.count)
        remembered = self.deviation * (before / jnp.maximum(self.count, 1.0))
        new_count = jnp.maximum(before + count, 1.0)
        return RunningStats(
            count=before + count,
            mean=self.mean + shift * count / new_count,
            deviation=remembered + deviation + jnp.square(shift) * before * count / new_count,
        )


def extended(
    algorithm: Algorithm,
    stats: Callable[[PyTree], PyTree],
    state: Callable[[int], PyTree] | None = None,
) -> Algorithm:
    """Puts ``stats(params)`` in front of ``variables.stats``,
    and ``state(num_envs)`` in front of the policy's state.

    The algorithm sees the rest. Without ``state``, the policy's state stays as it is.
    """

    def inner(variables: Variables) -> Variables:
        return variables._replace(stats=variables.stats[1])

    def rest(core: PyTree) -> PyTree:
        if state is None:
            return core
        return core[1]

    def with_rest(core: PyTree, rest: PyTree) -> PyTree:
        if state is None:
            return rest
        return (core[0], rest)

    def init(key: jax.Array) -> Variables:
        variables = algorithm.init(key)
        return variables._replace(stats=(stats(variables.params), variables.stats))

    def initial_core(num_envs: int) -> PyTree:
        initial = algorithm.initial_core(num_envs)
        if state is None:
            return initial
        return (state(num_envs), initial)

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        action, after, extras = algorithm.policy(inner(variables), obs, rest(core), context)
        return action, with_rest(core, after), extras

    def log_prob(
        variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
    ) -> jax.Array:
        assert algorithm.log_prob is not None
        return algorithm.log_prob(inner(variables), obs, rest(core), action, context)

    def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert algorithm.action_values is not None
        return algorithm.action_values(inner(variables), obs)

    def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        return with_rest(core, algorithm.feedback(rest(core), action, step))

    def behaviour(variables: Variables, core: PyTree, context: Context) -> tuple[PyTree, PyTree]:
        assert algorithm.behaviour is not None
        params, after = algorithm.behaviour(inner(variables), rest(core), context)
        return params, with_rest(core, after)

    def inner_rollout(rollout: Rollout) -> Rollout:
        if state is None:
            return rollout
        return rollout.with_inner_core()

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return algorithm.postprocess(inner(variables), inner_rollout(rollout), context)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return variables.stats[0], algorithm.updated_stats(
            inner(variables), inner_rollout(rollout), context
        )

    def loss(
        variables: Variables, batch: PyTree, context: Context
    ) -> tuple[jax.Array, jax.Array, Aux]:
        return algorithm.loss(inner(variables), batch, context)

    return dataclasses.replace(
        algorithm,
        init=init,
        initial_core=initial_core,
        policy=policy,
        feedback=feedback,
        log_prob=None if algorithm.log_prob is None else log_prob,
        action_values=None if algorithm.action_values is None else action_values,
        behaviour=behaviour if algorithm.behaviour is not None else None,
        postprocess=postprocess,
        update_stats=update_stats,
        loss=loss,
    )


def _planning(context: Context, change: Callable[[Simulated], Simulated]) -> Context:
    """Returns the context of a policy whose simulator, if there is one, steps through
    ``change``.
    """
    simulator = context.simulator
    if simulator is None:
        return context
    return context._replace(simulator=simulator.mapped(change))


def normalize_observations(algorithm: Algorithm, spec: EnvSpec) -> Algorithm:
    """Shifts and scales observations of numbers to mean 0
    and variance 1 by statistics over all devices.

    In a dict observation, it scales the parts that are neither categories, nor bytes (images), nor
    the mask. Agents that act as one share a network: their parts share statistics, and their ids
    stay as they are.

    Source: OpenAI baselines' ``VecNormalize``; Andrychowicz et al. (2021),
    section 3.3 (found to matter most).

    Raises:
      ConfigError: no observation consists of numbers to scale.
    """
    parts = spaces.leaves(spec.observation)
    scaled_parts = {
        path: part
        for path, part in parts.items()
        if isinstance(part, spaces.Box)
        and part.dtype not in (np.uint8, np.bool_)
        and path not in (spec.mask, _IDS)
    }
    if not scaled_parts:
        raise ConfigError(
            f"--normalize-observations needs observations of numbers; those of {spec.id} are images or categories, "
            "which the networks scale by themselves"
        )
    team = [path for path in scaled_parts if _IDS in parts and path.startswith("agents/")]

    def bare(stats: dict[str, RunningStats]) -> Any:
        if isinstance(spec.observation, dict):
            return stats
        return stats[""]

    def initial(params: PyTree) -> Any:
        shapes = {
            path: part.shape[1:] if path in team else part.shape
            for path, part in scaled_parts.items()
        }
        return bare({path: RunningStats.zeros(shape) for path, shape in shapes.items()})

    def by_path(variables: Variables) -> dict[str, RunningStats]:
        stats = variables.stats[0]
        if isinstance(spec.observation, dict):
            return stats
        return {"": stats}

    inner = extended(algorithm, initial)

    def scaled(stats: RunningStats, obs: jax.Array) -> jax.Array:
        mean, std = (jnp.broadcast_to(x, obs.shape) for x in (stats.mean, stats.std()))
        return jnp.clip((obs.astype(jnp.float32) - mean) / std, -CLIP, CLIP)

    def scale(variables: Variables, obs: PyTree) -> PyTree:
        stats = by_path(variables)
        return jax.tree.map(
            lambda path, x: scaled(stats[path], x) if path in stats else x, spaces.paths(obs), obs
        )

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        context = _planning(context, lambda then: then._replace(obs=scale(variables, then.obs)))
        return inner.policy(variables, scale(variables, obs), core, context)

    def log_prob(
        variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
    ) -> jax.Array:
        assert inner.log_prob is not None
        return inner.log_prob(variables, scale(variables, obs), core, action, context)

    def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert inner.action_values is not None
        return inner.action_values(variables, scale(variables, obs))

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return inner.postprocess(
            variables, rollout._replace(obs=scale(variables, rollout.obs)), context
        )

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        _, others = inner.updated_stats(
            variables, rollout._replace(obs=scale(variables, rollout.obs)), context
        )
        obs = spaces.leaves(rollout.obs_before)
        merged = {
            path: stats.merge(obs[path], rollout.valid)
            for path, stats in by_path(variables).items()
        }
        return bare(merged), others

    return dataclasses.replace(
        inner,
        policy=policy,
        log_prob=None if inner.log_prob is None else log_prob,
        action_values=None if inner.action_values is None else action_values,
        postprocess=postprocess,
        update_stats=update_stats,
    )


def scale_rewards(algorithm: Algorithm, discount: float | jax.Array) -> Algorithm:
    """Divides rewards by the running standard deviation of the discounted return,
    which keeps value losses near 1.

    Each environment's policy state holds the return ``R_t = discount R_{t-1} + r_t``, which
    restarts at 0 with each episode, as in OpenAI baselines' ``VecNormalize``. Reported returns stay
    in the environment's units.
    """
    inner = extended(
        algorithm, lambda params: RunningStats.zeros(()), lambda num_envs: jnp.zeros((num_envs,))
    )

    def scaled(variables: Variables, reward: jax.Array) -> jax.Array:
        return jnp.clip(reward / variables.stats[0].std(), -CLIP, CLIP)

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        context = _planning(
            context, lambda then: then._replace(reward=scaled(variables, then.reward))
        )
        return inner.policy(variables, obs, core, context)

    def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        total, rest = inner.feedback(core, action, step)
        return discount * total + step.reward, rest

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return inner.postprocess(
            variables, rollout._replace(reward=scaled(variables, rollout.reward)), context
        )

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        def step(
            total: jax.Array, outcome: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            reward, valid = outcome
            total = jnp.where(valid, discount * total + reward, 0.0)
            return total, total

        _, returns = packing.recursion(step, rollout.core[0], (rollout.reward, rollout.valid))
        stats, others = inner.updated_stats(variables, rollout, context)
        return stats.merge(returns, rollout.valid), others

    def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert inner.action_values is not None
        q, temperature = inner.action_values(variables, obs)
        return variables.stats[0].std() * q, variables.stats[0].std() * temperature

    return dataclasses.replace(
        inner,
        policy=policy,
        action_values=None if inner.action_values is None else action_values,
        postprocess=postprocess,
        update_stats=update_stats,
        feedback=feedback,
    )


def scaled_records(algorithm: Algorithm, factor: float) -> Algorithm:
    """Divides action values by the factor of the rewards in a data set,
    so that they are of raw rewards.

    The statistics hold the factor: the data may be gone when the policy is loaded.
    """
    inner = extended(algorithm, lambda params: jnp.asarray(factor, jnp.float32))

    def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert inner.action_values is not None
        q, temperature = inner.action_values(variables, obs)
        return q / variables.stats[0], temperature / variables.stats[0]

    return dataclasses.replace(
        inner,
        action_values=None if inner.action_values is None else action_values,
        update_stats=None if algorithm.update_stats is None else inner.update_stats,
    )


def clip_rewards(algorithm: Algorithm, low: float, high: float) -> Algorithm:
    """Clips only the rewards used for learning;
    memory and reported returns keep the environment's rewards.

    Source: Mnih et al. (2015), Methods, to -1 .. 1.
    """

    def clipped(rollout: Rollout) -> Rollout:
        # Bounds that exclude 0 would give invalid steps a reward.
        return rollout._replace(
            reward=jnp.where(rollout.valid, jnp.clip(rollout.reward, low, high), 0.0)
        )

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        context = _planning(
            context, lambda then: then._replace(reward=jnp.clip(then.reward, low, high))
        )
        return algorithm.policy(variables, obs, core, context)

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return algorithm.postprocess(variables, clipped(rollout), context)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return algorithm.updated_stats(variables, clipped(rollout), context)

    def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        reward = jnp.where(step.valid, jnp.clip(step.reward, low, high), 0.0)
        return algorithm.feedback(core, action, step._replace(reward=reward))

    def recorded(windows: Rollout) -> Rollout:
        assert algorithm.recorded is not None
        return windows._replace(extras=algorithm.recorded(clipped(windows)).extras)

    with_stats = None if algorithm.update_stats is None else update_stats
    return dataclasses.replace(
        algorithm,
        policy=policy,
        action_values=None,  # they are of clipped rewards
        recorded=None if algorithm.recorded is None else recorded,
        postprocess=postprocess,
        feedback=feedback,
        update_stats=with_stats,
    )


def average_parameters(
    algorithm: Algorithm, steps: int, num_agents: int = 1, *, by_update: bool = False
) -> Algorithm:
    """Lets greedy actions come from an exponential moving average of the parameters,
    over about ``steps`` env steps.

    If ``by_update``, it is over as many updates: each follows a blank rollout,
    where a data set is learnt from.

    Training, and whoever samples actions, uses the newest parameters. Each rollout moves the
    average towards the parameters that acted; the first ``steps`` env steps count equally, so that
    the initial ones are soon forgotten. Of the rows of a rollout, ``num_agents`` belong to one
    environment.

    Source: Polyak and Juditsky (1992); Nikishin et al. (2018), "Improving stability in deep
    reinforcement learning with weight averaging".
    """
    inner = extended(algorithm, partial(jax.tree.map, jnp.copy))

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        if context.keys is None:
            variables = variables._replace(params=variables.stats[0])
        return inner.policy(variables, obs, core, context)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        average, others = inner.updated_stats(variables, rollout, context)
        if by_update:
            new = 1
        else:
            new = rollout.reward.size // num_agents * jax.lax.axis_size(mesh.DATA)
        rate = jnp.minimum(new / jnp.minimum(context.env_step + new, steps), 1.0)
        return optax.incremental_update(variables.params, average, rate), others

    def action_values(variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert inner.action_values is not None
        return inner.action_values(variables._replace(params=variables.stats[0]), obs)

    values = None if inner.action_values is None else action_values
    return dataclasses.replace(
        inner, policy=policy, action_values=values, update_stats=update_stats
    )
