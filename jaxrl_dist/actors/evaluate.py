"""Plays whole episodes with a trained policy."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng
from jaxrl_dist.actors.step import after_step
from jaxrl_dist.envs.base import DeviceEnv, DrawnEnv, not_finite
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.memory import frames
from jaxrl_dist.types import Algorithm, Array, Context, PyTree, Timestep, Variables

MAX_ENVS = 128
"""Environments that play at once."""
MAX_EPISODE_STEPS = 27_000
"""Limit of an episode in env steps, unless the environment sets a longer one: 108,000 Atari frames, the longest of the
usual time limits (Machado et al. 2018, section 5)."""


class Evaluation(NamedTuple):
    """Raw returns and lengths (in env steps) of the episodes played, whole or cut."""

    returns: np.ndarray  # [episodes] float64
    lengths: np.ndarray  # [episodes] int64
    cut: int = 0  # number of these episodes that were cut at the step limit
    sampled: bool = False  # whether actions were drawn, not the best ones

    def summary(self) -> dict[str, float | int]:
        """Returns the numbers stored in a run's summary."""
        return {
            "episodes": len(self.returns),
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "length_mean": float(self.lengths.mean()),
            "cut": self.cut,
            **({"sampled": True} if self.sampled else {}),
        }


def evaluate(
    algorithm: Algorithm,
    variables: Variables,
    source: EnvSource,
    episodes: int,
    seed: int,
    *,
    max_steps: int | None = None,
    num_envs: int = MAX_ENVS,
    sampled: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Plays ``episodes`` episodes once; for the arguments see ``Evaluator`` and ``Evaluator.play``."""
    evaluator = Evaluator(algorithm, source, episodes, seed, max_steps, num_envs, sampled=sampled)
    played = evaluator.play(variables, progress)
    assert played is not None, "nothing stops it"
    return played


class Evaluator:
    """Plays episodes on one device: the same ones each time, with programs compiled on the first call.

    Each environment plays a number of episodes fixed in advance: counting the first ones to finish would favour short
    episodes. Atari games are played in full, for their unclipped score. Environments that are pure functions are
    played by one program, unless someone watches.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        source: EnvSource,
        episodes: int,
        seed: int,
        max_steps: int | None = None,
        num_envs: int = MAX_ENVS,
        variant: Callable[[Mapping[str, Array]], Algorithm] | None = None,
        sampled: bool = False,
    ) -> None:
        """Prepares the evaluation; the first ``play`` compiles it.

        Args:
          episodes: number of episodes to play.
          seed: seed of the environments; training with the same seed sees other episodes.
          max_steps: env steps after which an episode is cut and counted with its return so far: a greedy policy that
            walks in circles may never end it. None: ``MAX_EPISODE_STEPS``, or the environment's time limit if longer.
          num_envs: number of environments in training. On the host, evaluation makes no more than that, because more
            may not fit into memory. With fewer environments than episodes, each plays several in turn; which episodes
            they play depends on this number.
          variant: returns the algorithm with other hyperparameters, traced scalars, for ``of_member``.
          sampled: draw actions as in training, where schedules of exploration have ended; else take the best ones.
        """
        self._algorithm, self._source, self._episodes = algorithm, source, episodes
        most = MAX_ENVS if source.is_pure else min(num_envs, MAX_ENVS)  # pure environments take little memory
        agents = source.spec.num_agents
        self._num_envs = -(-min(episodes, most * agents) // agents) * agents
        self._max_steps = max_steps or max(MAX_EPISODE_STEPS, source.spec.max_episode_steps or 0)
        self._seed, self._hyper, self._sampled = _seed(seed), dict[str, float](), sampled
        variant = variant or (lambda hyper: algorithm)

        @jax.jit
        def act(
            hyper: Any, variables: Variables, obs: PyTree, core: PyTree, stacks: PyTree, key: jax.Array, step: jax.Array
        ) -> tuple[PyTree, ...]:
            stacks, obs = frames.push(stacks, obs)
            keys = _keys(key, step, self._num_envs) if sampled else None
            context = Context(keys, jnp.float32(_END_OF_SCHEDULES if sampled else 0))
            action, core, _ = variant(hyper).policy(variables, obs, core, context)
            return action, core, stacks

        @jax.jit
        def learn_outcome(
            hyper: Any, core: PyTree, start: PyTree, stacks: PyTree, action: PyTree, step: Timestep
        ) -> PyTree:
            _, obs = frames.push(stacks, step.obs)  # stacks are discarded: ``act`` pushes this frame itself
            return after_step(variant(hyper), core, start, action, step._replace(obs=obs))

        self._act, self._learn_outcome = act, learn_outcome
        if source.pure is not None and episodes:
            self._begin = jax.jit(partial(_begin, source.pure, self._quota))
            self._go_on = jax.jit(partial(_go_on, source.pure, self._quota, self._max_steps, act, learn_outcome))

    def of_member(self, seed: int, hyper: Mapping[str, float]) -> Evaluator:
        """Returns an evaluator with another seed and hyperparameters; they share their programs."""
        other = copy.copy(self)
        other._seed, other._hyper = _seed(seed), dict(hyper)
        return other

    @property
    def _quota(self) -> np.ndarray:
        """Episodes that each environment plays, ``[B]``."""
        return np.full(self._num_envs, self._episodes // self._num_envs) + (
            np.arange(self._num_envs) < self._episodes % self._num_envs
        )

    def play(
        self,
        variables: Variables,
        progress: Callable[[int], None] = lambda done: None,
        *,
        stop: Callable[[], bool] = lambda: False,
        watch: Callable[[DrawnEnv, np.ndarray], None] | None = None,
    ) -> Evaluation | None:
        """Plays the episodes.

        Args:
          progress: called with the number of finished episodes.
          stop: called before each step; True ends the evaluation.
          watch: called at the start and after each step with the environments, which can be drawn, and the indices of
            those in their first episode.

        Returns:
          The evaluation; None if it was stopped.

        Raises:
          ConfigError: ``watch`` is given and the environment cannot be drawn.
          EnvError: an environment's own code failed.
          TimeoutError: an environment has not answered in time.
        """
        if self._source.pure is not None and watch is None:
            return self._play_compiled(variables, progress, stop)
        num_envs, quota = self._num_envs, self._quota
        put = partial(jax.device_put, device=jax.local_devices()[0])
        begin = variables, self._algorithm.initial_core(num_envs), frames.blank(self._source.spec, num_envs)
        variables, start, stacks = put(begin)
        returns: list[list[float]] = [[] for _ in range(num_envs)]
        lengths: list[list[int]] = [[] for _ in range(num_envs)]
        done, cut = np.zeros(num_envs, int), 0
        running = np.zeros((2, num_envs))  # return and length of the episodes under way
        counted = np.zeros((2, num_envs))  # return and length that cut episodes have already been credited with
        steps, key = 0, rng.stream(self._seed, rng.Stream.ACT)
        with contextlib.closing(self._source.host(num_envs, self._seed, training=False, drawn=bool(watch))) as env:
            obs, core = env.reset(), start
            progress(0)
            if watch is not None:
                watch(env, np.arange(num_envs))
            while (done < quota).any():
                if stop():
                    return None
                action, core, stacks = self._act(self._hyper, variables, put(obs), core, stacks, key, np.uint32(steps))
                steps += 1
                step, ended = env.step(jax.tree.map(np.asarray, action))
                if jax.tree.leaves(start):
                    core = self._learn_outcome(self._hyper, core, start, stacks, action, put(step))
                if watch is not None:
                    watch(env, np.flatnonzero(done == 0))
                obs = step.obs
                running += [step.reward, step.valid]
                over = ended.episodes > 0
                endless = ~over & (running[1] >= self._max_steps)
                totals = np.where(over, np.array([ended.return_sum, ended.length_sum]) - counted, running)
                for index in np.flatnonzero((over | endless) & (done < quota)):
                    returns[index].append(float(totals[0, index]))
                    lengths[index].append(int(totals[1, index]))
                    done[index] += 1
                    cut += int(endless[index])
                    progress(int(done.sum()))
                counted = np.where(over, 0, counted + np.where(endless, running, 0))
                running[:, over | endless] = 0
        return Evaluation(np.concatenate(returns), np.concatenate(lengths), cut, self._sampled)

    def _play_compiled(
        self, variables: Variables, progress: Callable[[int], None], stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Plays in one program, some steps per dispatch; as ``play``."""
        put = partial(jax.device_put, device=jax.local_devices()[0])
        variables, start = put((variables, self._algorithm.initial_core(self._num_envs)))
        played: _Played = self._begin(rng.stream(self._seed, rng.Stream.ENV), start)
        steps, done, key = _FIRST_STEPS, 0, rng.stream(self._seed, rng.Stream.ACT)
        progress(0)
        while True:
            if stop():
                return None
            began = time.perf_counter()
            played = self._go_on(self._hyper, variables, start, played, np.int32(steps), key)
            before, done = done, int(played.done.sum())
            self._check_finite(played)
            if done > before:
                progress(done)
            if done == self._episodes:
                break
            if time.perf_counter() - began < _DISPATCH_SECONDS:
                steps *= 2
        whole = np.arange(played.returns.shape[1]) < self._quota[:, None]
        returns, lengths = np.asarray(played.returns)[whole], np.asarray(played.lengths)[whole]
        return Evaluation(returns.astype(np.float64), lengths.astype(np.int64), int(played.cut), self._sampled)

    def _check_finite(self, played: _Played) -> None:
        """Raises ``EnvError`` for the first observation or reward that was not finite."""
        where, step = int(played.fault), max(int(played.steps) - 1, 0)
        if where < NO_FAULT:
            raise not_finite(self._source.spec, where // 2, step, ("observation", "reward")[where % 2])


# --- Environments that are pure functions ---------------------------------------------------------------

_END_OF_SCHEDULES = 1e15
"""Env steps of training after which schedules of exploration have ended."""
_FIRST_STEPS = 64
"""Steps of the first dispatch; later ones take twice as many until they last ``_DISPATCH_SECONDS``."""
_DISPATCH_SECONDS = 0.25


class _Played(NamedTuple):
    """Episodes under way in ``B`` environments, of which each plays at most ``E``."""

    env: PyTree
    obs: PyTree
    core: PyTree
    key: jax.Array
    steps: jax.Array  # int32 scalar
    done: jax.Array  # [B] int32, episodes
    returns: jax.Array  # [B, E] float32
    lengths: jax.Array  # [B, E] int32
    running: jax.Array  # [2, B] float32, return and length of the episodes under way
    counted: jax.Array  # [2, B] float32, return and length that cut episodes have already been credited with
    cut: jax.Array  # int32 scalar
    fault: jax.Array  # int32 scalar, 2 * environment + (0: observation, 1: reward); NO_FAULT: none


def _begin(env: DeviceEnv, quota: np.ndarray, key: jax.Array, start: PyTree) -> _Played:
    state, obs = env.reset(_keys(key, rng.RESET, len(quota)))
    zeros = jnp.zeros((len(quota), max(quota)), jnp.int32)
    none = jnp.zeros((2, len(quota)), jnp.float32)
    zero = jnp.zeros((), jnp.int32)
    returns = zeros.astype(jnp.float32)
    fault = _fault(obs, jnp.zeros(len(quota)))
    return _Played(state, obs, start, key, zero, zeros[:, 0], returns, zeros, none, none, zero, fault)


def _go_on(
    env: DeviceEnv,
    quota: np.ndarray,
    max_steps: int,
    act: Callable[..., Any],
    learn_outcome: Callable[..., Any],
    hyper: Any,
    variables: Variables,
    start: PyTree,
    played: _Played,
    steps: jax.Array,
    key: jax.Array,
) -> _Played:
    """Makes up to ``steps`` steps, until all episodes are over or an environment returns NaN or infinity."""
    rows = jnp.arange(len(quota))
    last = played.steps + steps

    def more(played: _Played) -> jax.Array:
        return (played.steps < last) & jnp.any(played.done < quota) & (played.fault == NO_FAULT)

    def step(played: _Played) -> _Played:
        action, core, _ = act(hyper, variables, played.obs, played.core, (), key, played.steps)
        state, step, ended = env.step(played.env, action, _keys(played.key, played.steps, len(quota)))
        if jax.tree.leaves(start):
            core = learn_outcome(hyper, core, start, (), action, step)
        running = played.running + jnp.stack([step.reward, step.valid.astype(jnp.float32)])
        over = ended.episodes > 0
        endless = ~over & (running[1] >= max_steps)
        totals = jnp.where(over, jnp.stack([ended.return_sum, ended.length_sum]) - played.counted, running)
        new = (over | endless) & (played.done < quota)
        place = jnp.where(new, played.done, played.returns.shape[1])  # outside, and dropped, for no new episode
        return _Played(
            env=state,
            obs=step.obs,
            core=core,
            key=played.key,
            steps=played.steps + 1,
            done=played.done + new,
            returns=played.returns.at[rows, place].set(totals[0], mode="drop"),
            lengths=played.lengths.at[rows, place].set(totals[1].astype(jnp.int32), mode="drop"),
            running=jnp.where(over | endless, 0, running),
            counted=jnp.where(over, 0, played.counted + jnp.where(endless, running, 0)),
            cut=played.cut + jnp.sum(new & endless, dtype=jnp.int32),
            fault=_fault(step.obs, step.reward),
        )

    return jax.lax.while_loop(more, step, played)


def _keys(key: jax.Array, step: jax.Array | int, num_envs: int) -> jax.Array:
    """Returns the keys of a step, ``[B]``: those of the same environments on the host."""
    return rng.per_index(jax.random.fold_in(key, step), jnp.arange(num_envs, dtype=jnp.int32))


def _fault(obs: PyTree, reward: jax.Array) -> jax.Array:
    """Returns the first environment whose observation or reward is not finite, as ``_Played.fault``."""
    rows = jnp.arange(len(reward), dtype=jnp.int32)
    fault = jnp.asarray(NO_FAULT)
    for part in jax.tree.leaves(obs):
        wrong = ~jnp.isfinite(part).all(axis=tuple(range(1, part.ndim)))
        fault = jnp.minimum(fault, jnp.min(jnp.where(wrong, 2 * rows, NO_FAULT)))
    return jnp.minimum(fault, jnp.min(jnp.where(jnp.isfinite(reward), NO_FAULT, 2 * rows + 1)))


NO_FAULT = np.int32(2**31 - 1)


def _seed(seed: int) -> int:
    """Returns the seed of the evaluation's environments, for a run's seed."""
    return int(jax.random.bits(rng.stream(seed, rng.Stream.EVALUATE))) & 0x7FFFFFFF
