"""Scaling and clipping of observations and rewards, and averages of parameters.

Each function maps an ``Algorithm`` to an ``Algorithm``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_dist import spaces
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.mesh import DATA, global_sum
from jaxrl_dist.types import Algorithm, Context, EnvSpec, PyTree, Rollout, Timestep, Variables

CLIP = 10.0
"""Normalised observations and scaled rewards are clipped to +- 10, as in OpenAI baselines' ``VecNormalize``."""
EPSILON = 1e-8
HORIZON = 2**20
"""Batches that running statistics remember; older ones decay geometrically. Without this limit, a float32 count would
stop growing after 2^24 batches, and the variance would grow instead."""
_IDS = "agents/agent"
"""The ids of agents that act as one, a constant identity matrix: see ``envs.groups``. Statistics per element would turn
it into zeros."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningStats:
    """Count, mean and summed squared deviation of all values so far; float32."""

    count: jax.Array  # []
    mean: jax.Array  # [...]
    deviation: jax.Array  # [...]

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

        Parallel algorithm of Chan, Golub and LeVeque (1979), equations 2.1: the batch is centred on its own mean
        before squaring, so a large offset costs no precision.
        """
        axes = tuple(range(x.ndim - self.mean.ndim))
        rows = math.prod(x.shape[mask.ndim : len(axes)])  # for each entry of the mask
        weight = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        x = x.astype(jnp.float32)
        # A first centring on the running mean keeps the sums small.
        centred = jnp.where(weight, x - jnp.broadcast_to(self.mean, x.shape), 0.0)
        count, total = global_sum((rows * jnp.sum(mask, dtype=jnp.float32), jnp.sum(centred, axes)))
        shift = total / jnp.maximum(count, 1.0)
        residual = jnp.where(weight, centred - jnp.broadcast_to(shift, x.shape), 0.0)
        deviation = global_sum(jnp.sum(jnp.square(residual), axes))
        before = jnp.where(count > 0, jnp.minimum(self.count, HORIZON * count), self.count)
        kept = self.deviation * (before / jnp.maximum(self.count, 1.0))
        new_count = jnp.maximum(before + count, 1.0)
        return RunningStats(
            count=before + count,
            mean=self.mean + shift * count / new_count,
            deviation=kept + deviation + jnp.square(shift) * before * count / new_count,
        )


def _with_stats(algorithm: Algorithm, initial: Callable[[PyTree], PyTree]) -> Algorithm:
    """Prepends ``initial(params)`` to ``variables.stats``; the algorithm sees the rest."""

    def inner(variables: Variables) -> Variables:
        return variables._replace(stats=variables.stats[1])

    def init(key: jax.Array) -> Variables:
        variables = algorithm.init(key)
        return variables._replace(stats=(initial(variables.params), variables.stats))

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Any:
        return algorithm.policy(inner(variables), obs, core, context)

    def behaviour(variables: Variables, core: PyTree, context: Context) -> tuple[PyTree, PyTree]:
        assert algorithm.behaviour is not None
        return algorithm.behaviour(inner(variables), core, context)

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return algorithm.postprocess(inner(variables), rollout, context)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return variables.stats[0], algorithm.updated_stats(inner(variables), rollout, context)

    def loss(variables: Variables, batch: PyTree, context: Context) -> Any:
        return algorithm.loss(inner(variables), batch, context)

    changes: dict[str, Any] = {"init": init, "policy": policy, "postprocess": postprocess, "loss": loss}
    if algorithm.behaviour is not None:
        changes["behaviour"] = behaviour
    return dataclasses.replace(algorithm, update_stats=update_stats, **changes)


def _zeros(shapes: PyTree) -> PyTree:
    """Returns running statistics of values of these shapes, before the first value."""
    return jax.tree.map(RunningStats.zeros, shapes, is_leaf=lambda shape: isinstance(shape, tuple))


def normalize_observations(algorithm: Algorithm, spec: EnvSpec) -> Algorithm:
    """Shifts and scales observations of numbers to mean 0 and variance 1 by statistics over all devices.

    In a dict observation, it scales the parts that are neither categories, nor bytes (images), nor the mask. Agents
    that act as one share a network: their parts share statistics, and their ids stay as they are.

    Source: OpenAI baselines' ``VecNormalize``; Andrychowicz et al. (2021), section 3.3 (found to matter most).

    Raises:
      ConfigError: no observation consists of numbers to scale.
    """
    parts = spaces.leaves(spec.observation)
    scaled_parts = {
        path: part
        for path, part in parts.items()
        if isinstance(part, spaces.Box) and part.dtype not in (np.uint8, np.bool_) and path not in (spec.mask, _IDS)
    }
    if not scaled_parts:
        raise ConfigError(
            f"--normalize-observations needs observations of numbers; those of {spec.id} are images or categories, "
            "which the networks scale by themselves"
        )
    if not isinstance(spec.observation, dict):
        shapes: PyTree = spec.observation.shape
    else:
        team = [path for path in scaled_parts if _IDS in parts and path.startswith("agents/")]
        shapes = {path: part.shape[1:] if path in team else part.shape for path, part in scaled_parts.items()}
    inner = _with_stats(algorithm, lambda params: _zeros(shapes))

    def scaled(stats: RunningStats, obs: jax.Array) -> jax.Array:
        mean, std = (jnp.broadcast_to(x, obs.shape) for x in (stats.mean, stats.std()))
        return jnp.clip((obs.astype(jnp.float32) - mean) / std, -CLIP, CLIP)

    def scale(variables: Variables, obs: PyTree) -> PyTree:
        stats = variables.stats[0]
        if isinstance(stats, RunningStats):
            return scaled(stats, obs)
        return jax.tree.map(lambda path, x: scaled(stats[path], x) if path in stats else x, spaces.paths(obs), obs)

    def merged(stats: PyTree, rollout: Rollout) -> PyTree:
        if isinstance(stats, RunningStats):
            return stats.merge(rollout.obs_before, rollout.valid)
        parts = spaces.leaves(rollout.obs_before)
        return {path: own.merge(parts[path], rollout.valid) for path, own in stats.items()}

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Any:
        return inner.policy(variables, scale(variables, obs), core, context)

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return inner.postprocess(variables, rollout._replace(obs=scale(variables, rollout.obs)), context)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        stats, others = inner.updated_stats(variables, rollout._replace(obs=scale(variables, rollout.obs)), context)
        return merged(stats, rollout), others

    return dataclasses.replace(inner, policy=policy, postprocess=postprocess, update_stats=update_stats)


def scale_rewards(algorithm: Algorithm, discount: float | jax.Array) -> Algorithm:
    """Divides rewards by the running standard deviation of the discounted return, which keeps value losses near 1.

    Each environment's policy state holds the return ``R_t = discount R_{t-1} + r_t``, which restarts at 0 with each
    episode, as in OpenAI baselines' ``VecNormalize``. Reported returns stay in the environment's units.
    """
    inner = _with_stats(algorithm, lambda params: _zeros(()))

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Any:
        action, inner_core, extras = inner.policy(variables, obs, core[1], context)
        return action, (core[0], inner_core), extras

    def behaviour(variables: Variables, core: PyTree, context: Context) -> tuple[PyTree, PyTree]:
        assert inner.behaviour is not None
        params, inner_core = inner.behaviour(variables, core[1], context)
        return params, (core[0], inner_core)

    def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        return discount * core[0] + step.reward, algorithm.feedback(core[1], action, step)

    def initial_core(num_envs: int) -> PyTree:
        return jnp.zeros((num_envs,), jnp.float32), algorithm.initial_core(num_envs)

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        reward = jnp.clip(rollout.reward / variables.stats[0].std(), -CLIP, CLIP)
        return inner.postprocess(variables, rollout.with_inner_core()._replace(reward=reward), context)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        def step(total: jax.Array, outcome: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            reward, valid = outcome
            total = jnp.where(valid, discount * total + reward, 0.0)
            return total, total

        _, returns = jax.lax.scan(step, rollout.core[0], (rollout.reward, rollout.valid))
        stats, others = inner.updated_stats(variables, rollout.with_inner_core(), context)
        return stats.merge(returns, rollout.valid), others

    return dataclasses.replace(
        inner,
        policy=policy,
        postprocess=postprocess,
        update_stats=update_stats,
        initial_core=initial_core,
        feedback=feedback,
        behaviour=behaviour if inner.behaviour is not None else None,
    )


def clip_rewards(algorithm: Algorithm, low: float, high: float) -> Algorithm:
    """Clips only the rewards used for learning; memory and reported returns keep the environment's rewards.

    Source: Mnih et al. (2015), Methods, to -1 .. 1.
    """

    def clipped(rollout: Rollout) -> Rollout:
        # Bounds that exclude 0 would give invalid steps a reward.
        return rollout._replace(reward=jnp.where(rollout.valid, jnp.clip(rollout.reward, low, high), 0.0))

    def postprocess(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return algorithm.postprocess(variables, clipped(rollout), context)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        return algorithm.updated_stats(variables, clipped(rollout), context)

    def feedback(core: PyTree, action: PyTree, step: Timestep) -> PyTree:
        reward = jnp.where(step.valid, jnp.clip(step.reward, low, high), 0.0)
        return algorithm.feedback(core, action, step._replace(reward=reward))

    kept = None if algorithm.update_stats is None else update_stats
    return dataclasses.replace(algorithm, postprocess=postprocess, feedback=feedback, update_stats=kept)


def average_parameters(algorithm: Algorithm, steps: int, num_agents: int = 1) -> Algorithm:
    """Lets greedy actions come from an exponential moving average of the parameters, over about ``steps`` env steps.

    Training, and whoever samples actions, uses the newest parameters. Each rollout moves the average towards the
    parameters that acted; the first ``steps`` env steps count equally, so that the initial ones are soon forgotten.
    Of the rows of a rollout, ``num_agents`` belong to one environment.

    Source: Polyak and Juditsky (1992); Nikishin et al. (2018), "Improving stability in deep reinforcement learning with
    weight averaging".
    """
    inner = _with_stats(algorithm, partial(jax.tree.map, jnp.copy))

    def policy(variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Any:
        if context.keys is None:
            variables = variables._replace(params=variables.stats[0])
        return inner.policy(variables, obs, core, context)

    def update_stats(variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        average, others = inner.updated_stats(variables, rollout, context)
        new = rollout.reward.size // num_agents * jax.lax.axis_size(DATA)
        rate = jnp.minimum(new / jnp.minimum(context.env_step + new, steps), 1.0)
        return optax.incremental_update(variables.params, average, rate), others

    return dataclasses.replace(inner, policy=policy, update_stats=update_stats)
