"""Observations of mean 0 and variance 1."""

from __future__ import annotations

import dataclasses

from jaxrl_dist.algorithms.wrappers.extending import extended, restricted, simulating
from jaxrl_dist.algorithms.wrappers.statistics import CLIP, RunningStats
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.lazy import jax, jnp, np, spaces
from jaxrl_dist.types import Acted, Algorithm, Array, Context, EnvSpec, PyTree, Rollout, Variables


def normalize_observations(algorithm: Algorithm, spec: EnvSpec) -> Algorithm:
    """Shifts and scales observations of numbers to mean 0 and variance 1,
    with statistics over all devices.

    In a dict observation, it scales the parts that are neither categories, nor bytes (images), nor
    the mask. Agents that act as one share a network: their parts share statistics, and their ids
    stay as they are.

    Source: OpenAI baselines' ``VecNormalize``; Andrychowicz et al. (2021), section 3.3 (found to
    matter most).

    Raises:
      ConfigError: no observation consists of numbers to scale.
    """
    shapes = _shapes(spec)
    if not shapes:
        raise ConfigError(
            f"--normalize-observations needs observations of numbers, but {spec.id} shows images "
            "or categories, which the networks already scale; remove it"
        )
    bare = not isinstance(spec.observation, dict)

    def initial(params: PyTree) -> PyTree:
        stats = {path: RunningStats.zeros(shape) for path, shape in shapes.items()}
        return stats[""] if bare else stats

    inner = extended(algorithm, initial)
    wrapper = _Normalized(inner, bare)
    wrapped = dataclasses.replace(
        inner,
        policy=wrapper.policy,
        log_prob=wrapper.log_prob,
        action_values=wrapper.action_values,
        postprocess=wrapper.postprocess,
        update_stats=wrapper.update_stats,
    )
    return restricted(wrapped, algorithm)


def _shapes(spec: EnvSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the statistics, by the path of the part of the observation."""
    parts = spaces.leaves(spec.observation)
    # Statistics per element would turn the ids, a constant identity matrix, into zeros.
    ids = f"{spaces.AGENTS}/{spaces.AGENT}"
    shapes = {}
    for path, part in parts.items():
        if not isinstance(part, spaces.Box) or part.dtype in (np.uint8, np.bool_):
            continue
        if path in (spec.mask, ids):
            continue
        joint = ids in parts and path.startswith(f"{spaces.AGENTS}/")
        shapes[path] = part.shape[1:] if joint else part.shape
    return shapes


@dataclasses.dataclass(frozen=True, eq=False)
class _Normalized:
    """The functions of an algorithm with normalised observations."""

    inner: Algorithm
    """With the statistics in front."""
    bare: bool
    """Whether observations are one array, whose statistics have no path."""

    def policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> Acted:
        context = simulating(
            context, lambda then: then._replace(obs=self._scale(variables, then.obs))
        )
        return self.inner.policy(variables, self._scale(variables, obs), core, context)

    def log_prob(
        self, variables: Variables, obs: PyTree, core: PyTree, action: PyTree, context: Context
    ) -> jax.Array:
        assert self.inner.log_prob is not None
        return self.inner.log_prob(variables, self._scale(variables, obs), core, action, context)

    def action_values(self, variables: Variables, obs: PyTree) -> tuple[jax.Array, Array]:
        assert self.inner.action_values is not None
        return self.inner.action_values(variables, self._scale(variables, obs))

    def postprocess(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        rollout = rollout._replace(obs=self._scale(variables, rollout.obs))
        return self.inner.postprocess(variables, rollout, context)

    def update_stats(self, variables: Variables, rollout: Rollout, context: Context) -> PyTree:
        scaled = rollout._replace(obs=self._scale(variables, rollout.obs))
        _, rest = self.inner.updated_stats(variables, scaled, context)
        obs = spaces.leaves(rollout.obs_before)
        merged = {
            path: stats.merge(obs[path], rollout.valid)
            for path, stats in self._by_path(variables).items()
        }
        return merged[""] if self.bare else merged, rest

    def _by_path(self, variables: Variables) -> dict[str, RunningStats]:
        stats = variables.stats[0]
        return {"": stats} if self.bare else stats

    def _scale(self, variables: Variables, obs: PyTree) -> PyTree:
        by_path = self._by_path(variables)

        def scale(path: str, x: jax.Array) -> jax.Array:
            if path not in by_path:
                return x
            mean = jnp.broadcast_to(by_path[path].mean, x.shape)
            std = jnp.broadcast_to(by_path[path].std(), x.shape)
            return jnp.clip((x.astype(jnp.float32) - mean) / std, -CLIP, CLIP)

        return jax.tree.map(scale, spaces.paths(obs), obs)
