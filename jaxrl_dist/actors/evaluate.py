"""Plays whole episodes with a trained policy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng
from jaxrl_dist.actors.step import after_step
from jaxrl_dist.envs.base import DrawnEnv
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.memory import frames
from jaxrl_dist.types import Algorithm, Context, PyTree, Timestep, Variables

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

    def summary(self) -> dict[str, float | int]:
        """Returns the numbers stored in a run's summary."""
        return {
            "episodes": len(self.returns),
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "length_mean": float(self.lengths.mean()),
            "cut": self.cut,
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
    progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Plays ``episodes`` greedy episodes once; for the arguments see ``Evaluator`` and ``Evaluator.play``."""
    played = Evaluator(algorithm, source, episodes, seed, max_steps, num_envs).play(variables, progress)
    assert played is not None, "nothing stops it"
    return played


class Evaluator:
    """Plays greedy episodes on one device: the same ones each time, with programs compiled on the first call.

    Each environment plays a number of episodes fixed in advance: counting the first ones to finish would favour short
    episodes. Atari games are played in full, for their unclipped score.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        source: EnvSource,
        episodes: int,
        seed: int,
        max_steps: int | None = None,
        num_envs: int = MAX_ENVS,
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
        """
        self._algorithm, self._source, self._episodes = algorithm, source, episodes
        most = MAX_ENVS if source.is_pure else min(num_envs, MAX_ENVS)  # pure environments take little memory
        self._num_envs = min(episodes, most)
        self._max_steps = max_steps or max(MAX_EPISODE_STEPS, source.spec.max_episode_steps or 0)
        self._seed = int(jax.random.bits(rng.stream(seed, rng.Stream.EVALUATE))) & 0x7FFFFFFF

        @jax.jit
        def act(variables: Variables, obs: PyTree, core: PyTree, stacks: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            stacks, obs = frames.push(stacks, obs)
            action, core, _ = algorithm.policy(variables, obs, core, Context(env_step=jnp.zeros(())))
            return action, core, stacks

        @jax.jit
        def learn_outcome(core: PyTree, start: PyTree, stacks: PyTree, action: PyTree, step: Timestep) -> PyTree:
            _, obs = frames.push(stacks, step.obs)  # stacks are discarded: ``act`` pushes this frame itself
            return after_step(algorithm, core, start, action, step._replace(obs=obs))

        self._act, self._learn_outcome = act, learn_outcome

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
        episodes, num_envs = self._episodes, self._num_envs
        quota = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
        put = partial(jax.device_put, device=jax.local_devices()[0])
        begin = variables, self._algorithm.initial_core(num_envs), frames.blank(self._source.spec, num_envs)
        variables, start, stacks = put(begin)
        returns: list[list[float]] = [[] for _ in range(num_envs)]
        lengths: list[list[int]] = [[] for _ in range(num_envs)]
        done, cut = np.zeros(num_envs, int), 0
        running = np.zeros((2, num_envs))  # return and length of the episodes under way
        counted = np.zeros((2, num_envs))  # return and length that cut episodes have already been credited with
        with contextlib.closing(self._source.host(num_envs, self._seed, training=False, drawn=bool(watch))) as env:
            obs, core = env.reset(), start
            progress(0)
            if watch is not None:
                watch(env, np.arange(num_envs))
            while (done < quota).any():
                if stop():
                    return None
                action, core, stacks = self._act(variables, put(obs), core, stacks)
                step, ended = env.step(np.asarray(action))
                if jax.tree.leaves(start):
                    core = self._learn_outcome(core, start, stacks, action, put(step))
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
        return Evaluation(np.concatenate(returns), np.concatenate(lengths), cut)
