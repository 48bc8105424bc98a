"""Playing whole episodes with a trained policy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import frames, rng
from jaxrl_dist.actors.common import after_step
from jaxrl_dist.envs import EnvSource
from jaxrl_dist.types import Algorithm, PyTree, Timestep, Variables

MAX_ENVS = 128
MAX_EPISODE_STEPS = 27_000
"""108,000 Atari frames, the longest that the usual time limits allow (Machado et al. 2018, section 5)."""


class Evaluation(NamedTuple):
    """Raw returns and lengths (in env steps) of whole episodes."""

    returns: np.ndarray  # [episodes] float64
    lengths: np.ndarray  # [episodes] int64

    def summary(self) -> dict[str, float | int]:
        """The numbers that a run's summary keeps."""
        return {
            "episodes": len(self.returns),
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "length_mean": float(self.lengths.mean()),
        }


def evaluate(
    algorithm: Algorithm,
    variables: Variables,
    source: EnvSource,
    episodes: int,
    seed: int,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Plays ``episodes`` greedy episodes on one device; ``progress`` hears how many are done.

    The number of episodes of each environment is fixed beforehand: taking the first to finish would favour short
    ones. Atari games are played in full for their own score. An episode of more than ``MAX_EPISODE_STEPS`` steps, which
    a greedy policy that walks in circles may never end, counts as it stands there.
    """
    num_envs = min(episodes, MAX_ENVS)
    quota = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
    device = jax.local_devices()[0]
    begin = variables, algorithm.initial_core(num_envs), frames.blank(source.spec, num_envs)
    variables, start, stacks = jax.device_put(begin, device)

    @jax.jit
    def act(variables: Variables, obs: PyTree, core: PyTree, stacks: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        stacks, obs = frames.push(stacks, obs)
        action, core, _ = algorithm.policy(variables, obs, core, None, jnp.zeros(()))
        return action, core, stacks

    @jax.jit
    def learn_outcome(core: PyTree, start: PyTree, stacks: PyTree, action: PyTree, step: Timestep) -> PyTree:
        _, obs = frames.push(stacks, step.obs)  # not kept: ``act`` will push it
        return after_step(algorithm, core, start, action, step._replace(obs=obs))

    returns: list[list[float]] = [[] for _ in range(num_envs)]
    lengths: list[list[int]] = [[] for _ in range(num_envs)]
    done = np.zeros(num_envs, int)
    running = np.zeros(num_envs)  # returns of the episodes under way
    began = np.zeros(num_envs, int)  # the steps at which they began
    steps = 0
    put = partial(jax.device_put, device=device)
    # The stream's own seed, so that evaluation meets other episodes than training.
    env_seed = int(jax.random.bits(rng.stream(seed, rng.Stream.EVALUATE))) & 0x7FFFFFFF
    with contextlib.closing(source.host(num_envs, env_seed, training=False)) as env:
        obs, core = env.reset(), start
        progress(0)
        while (done < quota).any():
            action, core, stacks = act(variables, put(obs), core, stacks)
            step, ended = env.step(np.asarray(action))
            if jax.tree.leaves(start):
                core = learn_outcome(core, start, stacks, action, put(step))
            obs = step.obs
            steps += 1
            running += step.reward
            over = ended.episodes > 0
            endless = ~over & (steps - began >= MAX_EPISODE_STEPS)
            for index in np.flatnonzero((over | endless) & (done < quota)):
                returns[index].append(float(ended.return_sum[index] if over[index] else running[index]))
                lengths[index].append(int(ended.length_sum[index] if over[index] else MAX_EPISODE_STEPS))
                done[index] += 1
                progress(int(done.sum()))
            running[over | endless] = 0
            began[over | endless] = steps
    return Evaluation(np.concatenate(returns), np.concatenate(lengths))
