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
from jaxrl_dist.types import Array, EnvSpec, EpisodeStats, PyTree, Timestep, Variables

ALL_FINITE = np.int32(2**31 - 1)


class Tally(NamedTuple):
    """Episodes that ``B`` rows have finished, at most ``E`` each, and those under way.

    With several agents, rows are agents; with several policies, their rows follow each other as in ``row_slices``.
    Where environments are played on the host, numbers are float64 and int64.
    """

    done: Array  # [B] int32, episodes
    returns: Array  # [B, E] float32
    lengths: Array  # [B, E] int32; 0: no episode
    info: dict[str, Array]  # [B, E] float32, by metric of the info; NaN if the episode reported none
    running: Array  # [3, B] float32, return, length and steps of waiting of the episodes under way
    counted: Array  # [2, B] float32, return and length that cut episodes have already been credited with
    cut: Array  # [B] int32


def empty_tally(spec: EnvSpec, quota: np.ndarray, floats: Any = np.float32, ints: Any = np.int32) -> Tally:
    """Returns a tally of no episodes; row ``b`` plays ``quota[b]``."""
    zeros, none = np.zeros((len(quota), max(quota)), floats), np.zeros(len(quota), ints)
    info = {metric: np.full_like(zeros, np.nan) for metric in spec.info_metrics}
    running = np.zeros((3, len(quota)), floats)
    return Tally(none, zeros, zeros.astype(ints), info, running, running[:2], none)


def tallied(tally: Tally, step: Timestep, ended: EpisodeStats, quota: np.ndarray, max_steps: int) -> Tally:
    """Returns the tally after a step, of arrays of numpy or of JAX; both arguments have the rows of ``in_rows``."""
    xp = tally.done.__array_namespace__()
    valid = step.valid.astype(xp.float32)
    running = tally.running + xp.stack([step.reward, valid, 1 - valid])
    over = ended.episodes > 0
    endless = ~over & ((running[1] >= max_steps) | (running[2] > max_steps))
    totals = xp.where(over, xp.stack([ended.return_sum, ended.length_sum]) - tally.counted, running[:2])
    new = (over | endless) & (tally.done < quota)
    place = new[:, None] & (tally.done[:, None] == xp.arange(tally.returns.shape[1])[None])  # [B, E]
    return Tally(
        done=tally.done + new,
        returns=xp.where(place, totals[0][:, None], tally.returns),
        lengths=xp.where(place, totals[1].astype(tally.lengths.dtype)[:, None], tally.lengths),
        info={
            metric: xp.where(place, xp.where(count > 0, value, xp.nan)[:, None], tally.info[metric])
            for metric, (value, count) in ended.info.items()
        },
        running=xp.where(over | endless, 0, running),
        counted=xp.where(over, 0, tally.counted + xp.where(endless, running[:2], 0)),
        cut=tally.cut + (new & endless & (totals[1] > 0)),
    )


class Played(NamedTuple):
    """Environments that are being played."""

    env: PyTree
    obs: PyTree
    core: PyTree
    key: jax.Array
    steps: jax.Array  # int32 scalar
    tally: Tally
    fault: jax.Array  # int32 scalar, 2 * environment + (0: observation, 1: reward); ALL_FINITE: none


def begin(env: DeviceEnv, quota: np.ndarray, key: jax.Array, start: PyTree) -> Played:
    state, obs = env.reset(step_keys(key, rng.RESET, len(quota)))
    tally = jax.tree.map(jnp.asarray, empty_tally(env.spec, quota))
    return Played(state, obs, start, key, jnp.zeros((), jnp.int32), tally, _fault(env, obs, jnp.zeros(len(quota))))


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
    last = played.steps + steps

    def more(played: Played) -> jax.Array:
        return (played.steps < last) & jnp.any(played.tally.done < quota) & (played.fault == ALL_FINITE)

    def step(played: Played) -> Played:
        action, core, _ = act(hyper, variables, played.obs, played.core, (), key, played.steps)
        state, step, ended = env.step(played.env, action, step_keys(played.key, played.steps, len(quota)))
        if jax.tree.leaves(start):
            core = learn_outcome(hyper, core, start, (), action, step)
        obs, step, ended = in_rows(env.spec, step, ended)
        tally = tallied(played.tally, step, ended, quota, max_steps)
        return Played(state, obs, core, played.key, played.steps + 1, tally, _fault(env, obs, step.reward))

    return jax.lax.while_loop(more, step, played)


def step_keys(key: jax.Array, step: jax.Array | int, num_envs: int) -> jax.Array:
    """Returns the keys of a step, ``[B]``: the same as on the host."""
    return rng.per_index(jax.random.fold_in(key, step), jnp.arange(num_envs, dtype=jnp.int32))


def _fault(env: DeviceEnv, obs: PyTree, reward: jax.Array) -> jax.Array:
    """Returns the first environment whose observation or reward is not finite, as ``Played.fault``."""
    rows = jnp.arange(len(reward), dtype=jnp.int32)
    fault = jnp.asarray(ALL_FINITE)
    slices = row_slices(env.spec, len(reward))
    for places, own in [(slices[name], obs[name]) for name in slices] or [(slice(None), obs)]:
        for part in jax.tree.leaves(own):
            wrong = ~jnp.isfinite(part).all(axis=tuple(range(1, part.ndim)))
            fault = jnp.minimum(fault, jnp.min(jnp.where(wrong, 2 * rows[places], ALL_FINITE)))
    return jnp.minimum(fault, jnp.min(jnp.where(jnp.isfinite(reward), ALL_FINITE, 2 * rows + 1)))
