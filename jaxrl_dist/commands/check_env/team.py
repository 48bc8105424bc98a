"""Plays an environment of several agents in a compiled loop, as training does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.actors.step import count_steps
from jaxrl_dist.commands.check_env.findings import STEPS, Check
from jaxrl_dist.commands.check_env.gymnax import an_action
from jaxrl_dist.envs.base import DeviceEnv
from jaxrl_dist.nn.observations import legal, masked
from jaxrl_dist.spaces import Box, Discrete, leaves
from jaxrl_dist.types import PyTree

ENVS = 4


def check_team(check: Check, make: Callable[[], DeviceEnv]) -> None:
    """``make`` adapts the environment, and traces a first step of it."""
    pure = check.call("a first step under jax.jit", make)
    if pure.spec.unread_mask:
        check.notes.append(pure.spec.unread_mask)
    steps, episodes = check.call("a compiled loop of steps", lambda: jax.device_get(jax.jit(_play(pure))()))
    check.steps = int(count_steps(pure.spec, steps.valid).sum(axis=0)[0])
    for path, part in leaves(pure.spec.observation).items():
        seen = leaves(steps.obs)[path][steps.valid]  # nothing is learnt from an agent that is gone
        where = f"the observation of step_env{path and f' at {path}'}"
        if seen.dtype.kind == "f" and not np.isfinite(seen).all():
            check.fault("finite", f"{where} is not finite: {seen[~np.isfinite(seen)][0]}")
        elif isinstance(part, Box) and ((seen < part.low) | (seen > part.high)).any():
            wrong = seen[(seen < part.low) | (seen > part.high)][0]
            check.fault("range", f"{where} lies outside its space: {wrong}")
    if not np.isfinite(steps.reward).all():
        check.number("the reward", float(steps.reward[~np.isfinite(steps.reward)][0]))
    ended = episodes.episodes > 0
    check.ends([int(length) for length in episodes.length_sum[ended]], 0)


def _play(env: DeviceEnv) -> Any:
    """Returns a function that plays random legal actions: ``() -> (timesteps, episodes)``, both ``[T, rows]``."""
    rows = ENVS * env.spec.num_agents

    def step(state: PyTree, key: jax.Array) -> Any:
        keys = jax.random.split(key, rows)
        action = jax.vmap(lambda key: an_action(env.spec.action, key))(keys)
        allowed = legal(env.spec, state.obs)
        if allowed is not None and isinstance(env.spec.action, Discrete):
            action = jax.vmap(jax.random.categorical)(keys, masked(jnp.zeros(allowed.shape), allowed))
        state, *seen = env.step(state, action, keys)
        return state, tuple(seen)

    def play() -> Any:
        state, _ = env.reset(jax.random.split(jax.random.key(0), rows))
        return jax.lax.scan(step, state, jax.random.split(jax.random.key(1), STEPS // ENVS))[1]

    return play
