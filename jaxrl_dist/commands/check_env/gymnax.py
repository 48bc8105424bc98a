"""Calls a gymnax-style environment in Python and compiled, and plays it in a compiled loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.commands.check_env.findings import STEPS, Check, Stop, shown
from jaxrl_dist.envs import gymnax, masks
from jaxrl_dist.envs.native import named_spaces, plain, unnamed
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.nn.observations import legal, masked
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Space, leaves
from jaxrl_dist.types import PyTree


def check_gymnax(check: Check, made: Any, name: str) -> None:
    env, params = made if isinstance(made, tuple) else (made, None)
    for method in ("reset_env", "step_env", "is_truncated", "observation_space", "action_space"):
        if not callable(getattr(env, method, None)):
            check.fault(method, f"it has no method {method}")
    if params is None and not hasattr(type(env), "default_params") and not hasattr(env, "default_params"):
        check.fault("params", "it has no default_params, and comes without parameters")
    if check.faults:
        raise Stop
    params = check.call("default_params", lambda: env.default_params) if params is None else params
    spaces: dict[str, Space] = {}
    natives: dict[str, Any] = {}
    for what in ("observation", "action"):
        natives[what] = check.call(f"{what}_space", getattr(env, f"{what}_space"), params)
        try:
            spaces[what] = gymnax.space(natives[what], name, f"{what}s")
        except ConfigError as error:
            check.fault(what, error.with_flags)
    if check.faults:
        raise Stop
    key = jax.random.key(0)
    first = _twice(check, env, "reset_env", lambda key: env.reset_env(key, params), key)
    if not (isinstance(first, tuple) and len(first) == 2):
        raise check.stop("reset", f"reset_env returns a {type(first).__name__}, not (observation, state)")
    obs, state = first
    check.observation("reset_env", obs, natives["observation"])
    for path, leaf in jax.tree.leaves_with_path(state):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            where = jax.tree_util.keystr(path)
            check.fault("leaf", f"its state holds a {type(leaf).__name__} at {where}, which is no array")
    if check.faults:
        raise Stop
    action = unnamed(natives["action"], an_action(spaces["action"], key))
    out = _twice(check, env, "step_env", lambda *args: env.step_env(*args, params), key, state, action)
    if not isinstance(out, tuple) or len(out) != 5:
        count = f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"
        raise check.stop("step", f"step_env returns {count}, not (observation, state, reward, terminated, info)")
    next_obs, next_state, reward, terminated, info = out
    truncated = _twice(check, env, "is_truncated", lambda state: env.is_truncated(state, params), next_state)
    check.observation("step_env", next_obs, natives["observation"])
    check.number("the reward", reward)
    for what, flag in (("terminated", terminated), ("what is_truncated returns", truncated)):
        if np.shape(flag) != () or np.asarray(flag).dtype != bool:
            shape, dtype = np.shape(flag), np.asarray(flag).dtype
            check.fault(what, f"{what} has shape {shape} and dtype {dtype}, and is no single bool")
    check.info("step_env", info)
    _compare(check, "the observation", obs, next_obs)
    _compare(check, "the state", state, next_state)
    if not check.faults:
        found = masks.of_gymnax(env, state, plain(natives["observation"]), plain(natives["action"]))
        check.masked(found if found.where else masks.of_info(env, params, action))
        _roll(check, env, params, name, natives["observation"])


def _twice(check: Check, env: Any, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of a method in Python, after checking that a second and a compiled call give the same."""
    result = check.call(what, function, *args)
    again = check.call(what, function, *args)
    compiled = check.call(f"{what} under jax.jit", jax.jit(lambda *args: _arrays(function(*args))), *args)
    for holder in vars(env).values() if hasattr(env, "__dict__") else ():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(holder)):
            text = f"{what} keeps a traced value in the environment itself; all that changes belongs into the state"
            raise check.stop("tracer", text)
    for other, when in ((again, "the second time"), (compiled, "under jax.jit")):
        ours, theirs = jax.tree.leaves(_arrays(result)), jax.tree.leaves(_arrays(other))
        if len(ours) != len(theirs) or not all(map(_close, ours, theirs)):
            text = f"{what} gives something else {when} for the same arguments; randomness comes from the key alone"
            raise check.stop("pure", text)
    return result


def _arrays(tree: PyTree) -> PyTree:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float)]


def _close(x: Any, y: Any) -> bool:
    x, y = (np.asarray(jax.random.key_data(z) if _is_key(z) else z) for z in (x, y))
    if x.shape != y.shape:
        return False
    return np.allclose(x, y, rtol=1e-3, atol=1e-4, equal_nan=True) if x.dtype.kind in "fc" else np.array_equal(x, y)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _compare(check: Check, what: str, first: PyTree, later: PyTree) -> None:
    """Checks that a step keeps structure, shapes and dtypes, as a compiled loop requires."""
    before: Any = jax.tree.structure(first)
    after: Any = jax.tree.structure(later)
    if before != after:  # their texts may differ where they are equal, as those of MuJoCo's states
        check.fault("structure", f"{what} of step_env is {shown(str(after))}, that of reset_env {shown(str(before))}")
        return
    for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(later), strict=True):
        where = jax.tree_util.keystr(path)
        at = f" at {where}" if where else ""
        for kind, x, y in (("shape", np.shape(a), np.shape(b)), ("dtype", jnp.result_type(a), jnp.result_type(b))):
            if x != y:
                check.fault(f"{what} {kind}", f"{what}{at} has {kind} {y} after step_env and {x} after reset_env")


def an_action(space: Space, key: jax.Array) -> PyTree:
    """Returns a random action; components without bounds are within 1000 of 0."""
    if isinstance(space, dict):
        return {name: an_action(part, jax.random.fold_in(key, i)) for i, (name, part) in enumerate(space.items())}
    if isinstance(space, MultiDiscrete):
        return jax.random.randint(key, space.shape, 0, np.asarray(space.nvec))
    if isinstance(space, Box):
        low, high = (np.clip(bound, -1e3, 1e3) for bound in (space.low, space.high))
        return jax.random.uniform(key, space.shape, jnp.float32, low, high).astype(space.dtype)
    most = np.asarray(space.n if isinstance(space, Discrete) else space.nvec)
    return jax.random.randint(key, space.shape, 0, most)


def _without_mask(obs: PyTree, space: PyTree) -> PyTree:
    """Returns the observation as the environment made it, before the mask of its state became a part."""
    return {name: obs[name] for name in space} if isinstance(space, dict) else obs["observation"]


def _roll(check: Check, env: Any, params: Any, name: str, native: Any, num_envs: int = 4) -> None:
    """Plays a few environments in a compiled loop, as training does."""

    backend, _, env_id = name.partition(":")
    pure = check.call("reset_env under jax.vmap", gymnax.from_gymnax, env, params, env_id, "other", backend=backend)

    def run(key: jax.Array) -> Any:
        def step(state: PyTree, key: jax.Array) -> tuple[PyTree, Any]:
            keys = jax.random.split(key, num_envs)
            action = jax.vmap(lambda key: an_action(pure.spec.action, key))(keys)
            if (allowed := legal(pure.spec, state.obs)) is not None and isinstance(pure.spec.action, Discrete):
                action = jax.vmap(jax.random.categorical)(keys, masked(jnp.zeros(allowed.shape), allowed))
            state, timestep, _ = pure.step(state, action, keys)
            over = jax.vmap(lambda each: env.is_truncated(each, params))(state.env)
            return state, (timestep, timestep.terminated & over, state.episode_length)

        state, _ = pure.reset(jax.random.split(key, num_envs))
        return jax.lax.scan(step, state, jax.random.split(key, STEPS // num_envs))[1]

    steps, both, lengths = check.call(
        "a compiled loop of steps", lambda: jax.device_get(jax.jit(run)(jax.random.key(1)))
    )
    check.steps = int(steps.valid.sum())
    space = named_spaces(native)
    obs = steps.obs if pure.spec.mask is None or pure.spec.mask in leaves(space) else _without_mask(steps.obs, space)
    for t, index in itertools.product(range(len(steps.reward)), range(num_envs)):
        for path, part in leaves(jax.tree.map(lambda x, t=t, index=index: x[t, index], obs)).items():
            check.observation(f"step_env{path and f' at {path}'}", part, leaves(space)[path])
    if not np.isfinite(steps.reward).all():
        check.number("the reward", float(steps.reward[~np.isfinite(steps.reward)][0]))
    ended = steps.terminated | steps.truncated
    check.ends([int(length) for length in lengths[ended]], int(both.sum()))
