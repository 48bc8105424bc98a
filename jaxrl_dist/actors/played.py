"""Plays whole episodes in one program, in environments that are pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng
from jaxrl_dist.actors.step import in_rows, row_slices
from jaxrl_dist.envs.base import DeviceEnv
from jaxrl_dist.types import PyTree, Variables

ALL_FINITE = np.int32(2**31 - 1)


class Played(NamedTuple):
    """Episodes under way in ``B`` environments, each of which plays at most ``E``.

    Rows are agents, and those of the policies follow each other as in ``find_fault``.
    """

    env: PyTree
    obs: PyTree
    core: PyTree
    key: jax.Array
    steps: jax.Array  # int32 scalar
    done: jax.Array  # [B] int32, episodes
    returns: jax.Array  # [B, E] float32
    lengths: jax.Array  # [B, E] int32; 0: no episode
    info: dict[str, jax.Array]  # [B, E] float32, by metric of the info; NaN if the episode reported none
    running: jax.Array  # [3, B] float32, return, length and steps of waiting of the episodes under way
    counted: jax.Array  # [2, B] float32, return and length that cut episodes have already been credited with
    cut: jax.Array  # [B] int32
    fault: jax.Array  # int32 scalar, 2 * environment + (0: observation, 1: reward); ALL_FINITE: none


def begin(env: DeviceEnv, quota: np.ndarray, key: jax.Array, start: PyTree) -> Played:
    state, obs = env.reset(step_keys(key, rng.RESET, len(quota)))
    obs = env.spec.keyed(obs)
    zeros = jnp.zeros((len(quota), max(quota)), jnp.int32)
    none = jnp.zeros((3, len(quota)), jnp.float32)
    zero = jnp.zeros((), jnp.int32)
    returns = zeros.astype(jnp.float32)
    fault = _fault(env, obs, jnp.zeros(len(quota)))
    info = {metric: jnp.full_like(returns, jnp.nan) for metric in env.spec.info_metrics}
    return Played(state, obs, start, key, zero, zeros[:, 0], returns, zeros, info, none, none[:2], zeros[:, 0], fault)


def go_on(
    env: DeviceEnv,
    quota: np.ndarray,
    max_steps: int,
    act: Callable[..., Any],
    learn_outcome: Callable[..., Any],
    hyper: Any,
    variables: Variables,
    start: PyTree,
    played: Played,
    steps: jax.Array,
    key: jax.Array,
) -> Played:
    """Takes up to ``steps`` steps, until all episodes are over or an environment returns NaN or infinity."""
    rows, spec = jnp.arange(len(quota)), env.spec
    unstacked = dict.fromkeys(spec.by_policy, ())
    last = played.steps + steps

    def more(played: Played) -> jax.Array:
        return (played.steps < last) & jnp.any(played.done < quota) & (played.fault == ALL_FINITE)

    def step(played: Played) -> Played:
        action, core, _ = act(hyper, variables, played.obs, played.core, unstacked, key, played.steps)
        keys = step_keys(played.key, played.steps, len(quota))
        state, *stepped = env.step(played.env, spec.bare(action), keys)
        step, ended = map(spec.keyed, stepped)
        if jax.tree.leaves(start):
            core = learn_outcome(hyper, core, start, unstacked, action, step)
        obs, step, ended = in_rows(spec, step, ended)
        valid = step.valid.astype(jnp.float32)
        running = played.running + jnp.stack([step.reward, valid, 1 - valid])
        over = ended.episodes > 0
        endless = ~over & ((running[1] >= max_steps) | (running[2] > max_steps))
        totals = jnp.where(over, jnp.stack([ended.return_sum, ended.length_sum]) - played.counted, running[:2])
        new = (over | endless) & (played.done < quota)
        place = jnp.where(new, played.done, played.returns.shape[1])  # out of range, and dropped, if no episode is new
        return Played(
            env=state,
            obs=obs,
            core=core,
            key=played.key,
            steps=played.steps + 1,
            done=played.done + new,
            returns=played.returns.at[rows, place].set(totals[0], mode="drop"),
            lengths=played.lengths.at[rows, place].set(totals[1].astype(jnp.int32), mode="drop"),
            info={
                metric: played.info[metric].at[rows, place].set(jnp.where(count > 0, value, jnp.nan), mode="drop")
                for metric, (value, count) in ended.info.items()
            },
            running=jnp.where(over | endless, 0, running),
            counted=jnp.where(over, 0, played.counted + jnp.where(endless, running[:2], 0)),
            cut=played.cut + (new & endless & (totals[1] > 0)),
            fault=_fault(env, obs, step.reward),
        )

    return jax.lax.while_loop(more, step, played)


def step_keys(key: jax.Array, step: jax.Array | int, num_envs: int) -> jax.Array:
    """Returns the keys of a step, ``[B]``: the same as on the host."""
    return rng.per_index(jax.random.fold_in(key, step), jnp.arange(num_envs, dtype=jnp.int32))


def _fault(env: DeviceEnv, obs: PyTree, reward: jax.Array) -> jax.Array:
    """Returns the first environment whose observation or reward is not finite, as ``Played.fault``."""
    rows = jnp.arange(len(reward), dtype=jnp.int32)
    fault = jnp.asarray(ALL_FINITE)
    for policy, places in row_slices(env.spec, len(reward)).items():
        for part in jax.tree.leaves(obs[policy]):
            wrong = ~jnp.isfinite(part).all(axis=tuple(range(1, part.ndim)))
            fault = jnp.minimum(fault, jnp.min(jnp.where(wrong, 2 * rows[places], ALL_FINITE)))
    return jnp.minimum(fault, jnp.min(jnp.where(jnp.isfinite(reward), ALL_FINITE, 2 * rows + 1)))
