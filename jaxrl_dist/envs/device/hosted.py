"""JAX environments stepped from the host."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng
from jaxrl_dist.envs import checking
from jaxrl_dist.envs.base import DeviceEnv
from jaxrl_dist.envs.drawing import draw
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.types import EpisodeStats, PyTree, Timestep


class HostGymnax:
    """gymnax environments stepped from the host, with one jitted call per step: a ``HostEnv``.

    It uses the keys of the compiled rollout, so both give the same experience for the same actions.
    """

    def __init__(self, env: DeviceEnv, num_envs: int, key: jax.Array, first: int = 0) -> None:
        """Compiles the programs; the states stay on JAX's default device.

        Args:
          key: the key of the environment stream; for several runs side by side, an array of keys.
          first: the index of the first environment within the run.
        """
        self.spec = env.spec
        self.num_envs = num_envs
        self._draw = env.render
        self._steps = self._resets = 0
        self._key = key
        self._first = np.int32(first)
        self._reset, self._step = _programs(env.reset, env.step, num_envs)

    def reset(self) -> PyTree:
        self._state, obs = self._reset(self._key, self._first, rng.rollout_step(self._resets))
        self._resets += 1
        obs = jax.tree.map(np.array, obs)
        checking.check_finite(self.spec, self._steps, "observation", obs)
        return obs

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        action = checking.checked_action(self.spec, action, self._steps)
        self._state, *outputs = self._step(
            self._state, action, self._key, self._first, np.uint32(self._steps)
        )
        step, ended = jax.tree.map(np.array, outputs)
        values = over_policies(lambda step: (step.obs, step.reward), 2)(self.spec.keyed(step))
        for field, value in zip(("observation", "reward"), values, strict=True):
            checking.check_finite(self.spec, self._steps, field, self.spec.bare(value))
        self._steps += 1
        return step, ended

    @property
    def state(self) -> PyTree:
        """The environments' state, until the next step: that of ``DeviceEnv``."""
        return self._state

    def render(self, index: int) -> np.ndarray:
        # With frame stacks, the state is a pair: theirs is second.
        state = self._state if self.spec.frame_stack == 1 else self._state[0]
        place = index // self.spec.num_agents
        env_state = jax.tree.map(lambda x: np.asarray(x[place]), state.env)
        rows = {name: place * spec.num_agents for name, spec in self.spec.by_policy.items()}
        row_of = over_policies(lambda row, obs: jax.tree.map(lambda x: np.asarray(x[row]), obs))
        obs = self.spec.bare(row_of(rows, self.spec.keyed(state.obs)))
        return draw(self.spec, env_state, obs, self._draw)

    def close(self) -> None:
        self._state = None


@functools.lru_cache(maxsize=8)  # environments recreated for each evaluation compile once
def _programs(
    env_reset: Callable[..., PyTree], env_step: Callable[..., PyTree], num_envs: int
) -> tuple[Callable[..., PyTree], Callable[..., PyTree]]:
    """Compiles reset ``(key, first, steps) -> (state, obs)`` and step
    ``(state, action, key, first, steps) -> ...``.
    """

    def env_keys(key: jax.Array, first: jax.Array, steps: jax.Array) -> jax.Array:
        index = first + jnp.arange(num_envs // key.size, dtype=jnp.int32)

        def of_run(key: jax.Array) -> jax.Array:
            return rng.per_index(jax.random.fold_in(key, steps), index)

        return jax.vmap(of_run)(key.reshape(-1)).reshape(-1)

    def reset(*index: jax.Array) -> PyTree:
        return env_reset(env_keys(*index))

    def step(state: PyTree, action: PyTree, *index: jax.Array) -> PyTree:
        return env_step(state, action, env_keys(*index))

    return jax.jit(reset), jax.jit(step, donate_argnums=0)
