"""Plays whole episodes in one program, in environments that are pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng
from jaxrl_dist.actors.step import NO_FAULT, find_fault, in_rows
from jaxrl_dist.envs.base import DeviceEnv
from jaxrl_dist.types import Array, EpisodeStats, PyTree, Timestep, Variables


class Episodes(NamedTuple):
    """Episodes that ``B`` rows have played, at most ``E`` for each row, and those under way.

    Arrays of numpy have 64 bits, and arrays of JAX 32. Rows are agents, in the order of
    ``find_fault``.
    """

    done: Array
    """[B] int, episodes."""
    returns: Array
    """[B, E] float."""
    lengths: Array
    """[B, E] int; 0: no episode."""
    info: Mapping[str, Array]
    """[B, E] float, by metric of the info; NaN if the episode reported none."""
    running: Array
    """[3, B] float, return, length and steps of waiting of the episodes under way."""
    rest: Array
    """[B] bool, whether the episode under way is the rest of a cut one, which does not count."""
    cut: Array
    """[B] int, number of cut episodes."""

    @classmethod
    def none(cls, xp: Any, quota: np.ndarray, metrics: Sequence[str]) -> Episodes:
        """Returns the state before the first step, in arrays of ``xp``: numpy, or ``jax.numpy``.

        Args:
          quota: episodes that each row plays, ``[B]``.
        """
        shape = (len(quota), max(quota))
        none = xp.zeros((3, len(quota)), float)
        info = {metric: xp.full(shape, xp.nan) for metric in metrics}
        done, cut = xp.zeros((2, len(quota)), int)
        return cls(done, xp.zeros(shape, float), xp.zeros(shape, int), info, none, done > 0, cut)

    def after(
        self, step: Timestep, ended: EpisodeStats, quota: np.ndarray, max_steps: int
    ) -> Episodes:
        """Returns the state after a step of all rows; writes into arrays of numpy.

        An episode is cut after ``max_steps``, and the environment plays it to its end. If the rest
        is as long again, it counts as another episode: a policy may never end one.
        """
        xp = step.reward.__array_namespace__()
        rows = np.arange(len(quota))
        valid = step.valid.astype(self.running.dtype)
        running = self.running + xp.stack([step.reward, valid, 1 - valid])
        over = ended.episodes > 0
        endless = ~over & ((running[1] >= max_steps) | (running[2] > max_steps))
        totals = xp.where(over, xp.stack([ended.return_sum, ended.length_sum]), running[:2])
        new = ((over & ~self.rest) | endless) & (self.done < quota)

        done = self.done + new

        def put(stored: Any, values: Any, known: Any = new) -> Any:
            """Writes the values of the newest episodes where they are ``known``."""
            if xp is np:
                stored[rows[known], done[known] - 1] = values[known]
                return stored
            # Where they are not known, the place is out of range, and JAX drops the value.
            place = xp.where(known, done - 1, stored.shape[1])
            return stored.at[rows, place].set(values.astype(stored.dtype), mode="drop")

        def put_info(stored: Any, total: Any, count: Any) -> Any:
            """Writes what an environment reports at its end, also if the agent's episode ended
            earlier.
            """
            late = ~over & (done > 0) & xp.isnan(stored[rows, done - 1])
            return put(stored, total / xp.maximum(count, 1), (count > 0) & (new | late))

        return Episodes(
            done=done,
            returns=put(self.returns, totals[0]),
            lengths=put(self.lengths, totals[1]),
            info={
                metric: put_info(self.info[metric], *pair) for metric, pair in ended.info.items()
            },
            running=xp.where(over | endless, 0, running),
            rest=~over & (self.rest | (endless & (running[1] > 0))),
            cut=self.cut + (new & endless & (totals[1] > 0)),
        )


class Played(NamedTuple):
    """Episodes under way in ``B`` environments."""

    env: PyTree
    obs: PyTree
    core: PyTree
    key: jax.Array
    steps: jax.Array
    """Int32 scalar."""
    episodes: Episodes
    fault: jax.Array
    """Uint32 scalar, of the last step; see ``find_fault``."""


def programs(
    env: DeviceEnv,
    quota: np.ndarray,
    max_steps: int,
    act: Callable[..., Any],
    update_core: Callable[..., Any],
) -> tuple[Callable[..., Played], Callable[..., Played]]:
    """Compiles two functions.

    - ``(key, start) -> played``: resets the environments;
      ``start`` are the cores at the start of an episode.
    - ``(hyper, variables, start, played, steps, key) -> played``: takes up to ``steps`` steps,
      until all episodes are over or an environment returns NaN or infinity.

    Args:
      quota: as for ``Episodes.none``.
      act, update_core: as for ``Evaluator``.
    """
    spec = env.spec
    unstacked = dict.fromkeys(spec.by_policy, ())

    def fault_of(obs: PyTree, reward: PyTree) -> jax.Array:
        obs, reward = jax.tree.map(lambda x: x[None], (obs, reward))
        return find_fault(obs, reward, before=0)

    def begin(key: jax.Array, start: PyTree) -> Played:
        state, obs = env.reset(step_keys(key, rng.RESET, len(quota)))
        episodes = Episodes.none(jnp, quota, spec.info_metrics)
        obs = spec.keyed(obs)
        none = {policy: jnp.zeros(len(jax.tree.leaves(part)[0])) for policy, part in obs.items()}
        return Played(
            state, obs, start, key, jnp.zeros((), jnp.int32), episodes, fault_of(obs, none)
        )

    def play_on(
        hyper: Any,
        variables: Variables,
        start: PyTree,
        played: Played,
        steps: jax.Array,
        key: jax.Array,
    ) -> Played:
        last = played.steps + steps

        def more(played: Played) -> jax.Array:
            return (
                (played.steps < last)
                & jnp.any(played.episodes.done < quota)
                & (played.fault == NO_FAULT)
            )

        def one_step(played: Played) -> Played:
            action, core, _ = act(
                hyper, variables, played.obs, played.core, unstacked, key, played.steps, played.env
            )
            state, *stepped = env.step(
                played.env, spec.bare(action), step_keys(played.key, played.steps, len(quota))
            )
            step, ended = map(spec.keyed, stepped)
            if jax.tree.leaves(start):
                core = update_core(hyper, core, start, unstacked, action, step)
            reward = {policy: part.reward for policy, part in step.items()}
            obs, step, ended = in_rows(spec, step, ended)
            episodes = played.episodes.after(step, ended, quota, max_steps)
            return Played(
                state, obs, core, played.key, played.steps + 1, episodes, fault_of(obs, reward)
            )

        return jax.lax.while_loop(more, one_step, played)

    return jax.jit(begin), jax.jit(play_on)


def step_keys(key: jax.Array, step: jax.Array | int, num_envs: int) -> jax.Array:
    """Returns the keys of a step, ``[B]``: the same as on the host."""
    return rng.per_index(jax.random.fold_in(key, step), jnp.arange(num_envs, dtype=jnp.int32))
