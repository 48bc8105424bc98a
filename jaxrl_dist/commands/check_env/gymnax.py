"""Traces a JAX environment, calls it in Python and compiled, and plays it in a compiled loop,
as training does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxrl_dist import rng
from jaxrl_dist.actors.step import count_steps
from jaxrl_dist.commands.check_env.findings import STEPS, Check
from jaxrl_dist.envs import masks
from jaxrl_dist.envs.agents.groups import Team
from jaxrl_dist.envs.base import DeviceEnv
from jaxrl_dist.envs.contract import zero_action
from jaxrl_dist.envs.device import gymnax
from jaxrl_dist.envs.native import is_team, plain
from jaxrl_dist.settings.still import Random
from jaxrl_dist.spaces import leaves
from jaxrl_dist.types import Context, EnvSpec, PyTree, Timestep, Variables

ENVS = 4


def check_gymnax(check: Check, made: Any, env_id: str, backend: str) -> None:
    """Checks an environment of one agent or several; arguments as for ``gymnax.adapt``."""
    pure = gymnax.adapt(made, env_id, backend, contract=check)
    if pure.spec.unread_mask:
        check.notes.append(pure.spec.unread_mask)
    if isinstance(pure.spec.observation, dict):
        check.goals(pure.spec.observation, known=pure.spec.goals is not None)
    if isinstance(made, Team) or is_team(made):
        _play(check, pure, "reset", lambda state: jnp.bool_(False))
        return
    env, params = made if isinstance(made, tuple) else (made, None)
    if params is None:
        params = env.default_params
    native = env.action_space(params)
    key = jax.random.key(0)
    _, state = _twice(check, "reset_env", lambda key: env.reset_env(key, params), key)
    action = zero_action(native, pure.spec.action)
    _, after, *_ = _twice(
        check, "step_env", lambda *args: env.step_env(*args, params), key, state, action
    )
    _twice(check, "is_truncated", lambda state: env.is_truncated(state, params), after)
    if not pure.spec.unread_mask:
        check.masked(
            masks.of_gymnax(env, state, {}, plain(env.observation_space(params)), plain(native))
        )
    _play(check, pure, "reset_env", jax.vmap(lambda env_state: env.is_truncated(env_state, params)))


def _twice(check: Check, method: str, function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of a method in Python,
    after checking that a second and a compiled call give the same.
    """
    result = check.call(method, function, *args)
    again = check.call(method, function, *args)
    compiled = check.call(
        f"{method} under jax.jit", jax.jit(lambda *args: _arrays(function(*args))), *args
    )
    for other, when in ((again, "the second time"), (compiled, "under jax.jit")):
        ours = jax.tree.leaves(_arrays(result))
        theirs = jax.tree.leaves(_arrays(other))
        if len(ours) != len(theirs) or not all(map(_close, ours, theirs)):
            raise check.stop(
                "pure",
                f"{method} gives something else {when} for the same arguments; "
                "randomness comes from the key alone",
            )
    return result


def _arrays(tree: PyTree) -> PyTree:
    return [
        x
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float)
    ]


def _close(x: ArrayLike, y: ArrayLike) -> bool:
    ours, theirs = (np.asarray(_raw(z)) for z in (x, y))
    if ours.shape != theirs.shape:
        return False
    if ours.dtype.kind in "fc":
        return np.allclose(ours, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)
    return np.array_equal(ours, theirs)


def _raw(x: ArrayLike) -> ArrayLike:
    return rng.raw(x) if isinstance(x, jax.Array) else x


def _play(check: Check, env: DeviceEnv, reset: str, timed: Callable[[PyTree], jax.Array]) -> None:
    """Plays a few environments with random legal actions, and checks the values that they give.

    Args:
      reset: the environment's method.
      timed: ``(states [B]) -> [B]`` bool, whether its time limit ends the episode here.
    """
    spec = env.spec
    rows = ENVS * env.spec.num_agents
    policy = Random().make(spec).policy

    def step(state: PyTree, key: jax.Array) -> Any:
        act_keys, env_keys = jax.random.split(key, (2, rows))
        action, *_ = policy(Variables({}, ()), state.obs, (), Context(act_keys))
        state, timestep, episodes = env.step(state, action, env_keys)
        return state, (timestep, episodes, timestep.terminated & timed(state.env))

    def play() -> Any:
        state, obs = env.reset(jax.random.split(jax.random.key(0), rows))
        return obs, jax.lax.scan(step, state, jax.random.split(jax.random.key(1), STEPS // ENVS))[1]

    first, (steps, episodes, both) = check.call(
        "a compiled loop of steps", lambda: jax.device_get(jax.jit(play)())
    )
    check.steps = int(count_steps(spec, spec.keyed(steps.valid)).sum(axis=0)[0])
    _check_observations(check, spec, reset, first, steps)
    _check_masks(check, spec, steps)
    if not np.isfinite(steps.reward).all():
        check.number("the reward", float(steps.reward[~np.isfinite(steps.reward)][0]))
    lengths = episodes.length_sum[episodes.episodes > 0]
    limit = "from is_truncated instead"
    if spec.num_agents > 1:
        limit = "as truncated"
    truncated = int((steps.truncated & steps.valid).sum())
    check.ends([int(length) for length in lengths], int(both.sum()), truncated, limit)


def _check_observations(
    check: Check, spec: EnvSpec, reset: str, first: PyTree, steps: Timestep
) -> None:
    present = steps.valid | (spec.num_agents == 1)  # nothing is learnt from an agent that is gone
    for path, part in leaves(spec.observation).items():
        for call, observations in (
            (reset, leaves(first)[path]),
            ("step_env", leaves(steps.obs)[path][present]),
        ):
            subject = f"the observation of {call}{path and f' at {path}'}"
            all(check.part(subject, x, part) for x in observations)  # until the first fault


def _check_masks(check: Check, spec: EnvSpec, steps: Timestep) -> None:
    if not spec.mask:
        return
    none = ~np.asarray(leaves(steps.obs)[spec.mask], bool).any(-1) & steps.valid
    for step, row in np.argwhere(none & ~(steps.terminated | steps.truncated))[:1]:
        env, agent = divmod(row, spec.num_agents)
        whose = f" for agent {agent}" if spec.num_agents > 1 else ""
        check.legal(f"step_env in environment {env} at step {step + 1}{whose}", False)
