"""Plays whole episodes with a trained policy."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng
from jaxrl_dist.actors import played
from jaxrl_dist.actors import step as steps
from jaxrl_dist.actors.device import Fault, check_fault
from jaxrl_dist.actors.played import Episodes, Played
from jaxrl_dist.envs.base import DrawnEnv, EnvSlice
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.memory import frames
from jaxrl_dist.mesh import over_policies
from jaxrl_dist.types import Algorithm, Algorithms, Array, Context, PyTree, Timestep, Variables

END_OF_SCHEDULES = 1e15
"""Env steps of training after which schedules of exploration have ended."""
_FIRST_STEPS = 64
"""Steps of the first dispatch; later ones take twice as many until they last
``_DISPATCH_SECONDS``."""
_DISPATCH_SECONDS = 0.25
MAX_ENVS = 128
"""Environments that play at once."""
MAX_EPISODE_STEPS = 27_000
"""Limit of an episode in env steps, unless the environment sets a longer one: 108,000 Atari frames,
the longest of the usual time limits (Machado et al. 2018, section 5)."""


class Evaluation(NamedTuple):
    """Raw returns and lengths (in env steps) of the episodes played, whole or cut."""

    returns: np.ndarray
    """[episodes] float64."""
    lengths: np.ndarray
    """[episodes] int64."""
    cut: int = 0
    """Number of these episodes that were cut at the step limit."""
    sampled: bool = False
    """Whether all its policies sampled actions; those that do not train always do."""
    policies: Mapping[str, Evaluation] = {}
    """The evaluation of each of several policies."""
    info: Mapping[str, np.ndarray] = {}
    """[episodes] by metric of the info; NaN where an episode reported none."""

    def summary(self) -> dict[str, float | int]:
        """Returns the numbers stored in a run's summary, without means if there are no episodes."""
        summary: dict[str, float | int] = {"episodes": len(self.returns)}
        if len(self.returns):
            summary["return_mean"] = float(self.returns.mean())
            summary["return_std"] = float(self.returns.std())
            summary["length_mean"] = float(self.lengths.mean())
        summary["cut"] = self.cut
        if self.sampled:
            summary["sampled"] = True
        for metric, values in self.info.items():
            reported = values[~np.isnan(values)]
            if len(reported):
                summary[f"info/{metric}"] = float(reported.mean())
        for policy, evaluation in self.policies.items():
            for name, value in evaluation.summary().items():
                summary[f"{policy}/{name}"] = value
        return summary


def check_samples(algorithm: Algorithms) -> None:
    """Checks that an evaluation can sample actions.

    Raises:
      ConfigError: all policies explore by perturbed parameters.
    """
    if all(policy.behaviour is not None for policy in algorithm.values()):
        raise ConfigError(
            "--evaluation-policy sampled does nothing here, because this run explores by perturbed "
            "parameters and draws no actions; use --evaluation-policy greedy"
        )


class Evaluator:
    """Plays the same episodes each time, on one device, with programs compiled on the first call.

    Each environment plays a number of episodes fixed in advance: counting the first ones to finish
    would favour short episodes. Atari games are played in full, for their unclipped score. One
    program plays environments that are pure functions, unless ``watch`` is given.
    """

    def __init__(
        self,
        algorithm: Algorithms,
        source: EnvSource,
        episodes: int,
        seed: int,
        max_steps: int | None = None,
        num_envs: int = MAX_ENVS,
        variant: Callable[[Mapping[str, Array]], Algorithms] | None = None,
        sampled: bool = False,
    ) -> None:
        """Prepares the evaluation; the first ``play`` compiles it.

        Args:
          episodes: number of episodes to play.
          seed: seed of the environments; training with the same seed sees other episodes.
          max_steps: env steps after which an episode is cut and counted with its return so far: a
            greedy policy that walks in circles may never end it. An agent that waits longer for an
            episode, such as one that never joins, plays one fewer. None: ``MAX_EPISODE_STEPS``, or
            the environment's time limit if longer.
          num_envs: number of environments in training. On the host, evaluation makes at most as
            many, because more may not fit into memory. With fewer environments than episodes, each
            plays several in turn; which episodes they play depends on this number.
          variant: returns the algorithm with other hyperparameters (traced scalars),
            for ``of_member``.
          sampled: sample actions as in training after schedules of exploration have ended;
            else take the best ones.

        Raises:
          ConfigError: as ``check_samples``.
        """
        if sampled:
            check_samples(algorithm)
        self._algorithm = algorithm
        self._source = source
        self._episodes = episodes
        # pure environments take little memory
        most = MAX_ENVS if source.is_pure else min(num_envs, MAX_ENVS)
        agents = source.spec.num_agents
        self._num_envs = -(-min(episodes, most * agents) // agents) * agents
        self._max_steps = max_steps or max(MAX_EPISODE_STEPS, source.spec.max_episode_steps or 0)
        self._run_seed = seed
        self._fresh = False
        self._hyper = dict[str, float]()
        self._sampled = sampled
        variant = variant or (lambda hyper: algorithm)
        self._act = _compile_acting(variant, source, self._num_envs, sampled=sampled)
        self._update_core = _compile_core(variant)
        if source.pure is not None and episodes:
            self._begin, self._play_on = played.programs(
                source.pure, self._quota, self._max_steps, self._act, self._update_core
            )

    def of_member(
        self, seed: int, hyper: Mapping[str, float] = {}, *, fresh: bool = False
    ) -> Evaluator:
        """Returns an evaluator with another seed and hyperparameters; they share their programs.

        Args:
          fresh: play other episodes than evaluations with any seed during training, which may have
            chosen the policy: the highest of several means is too high.
        """
        other = copy.copy(self)
        other._run_seed = seed
        other._fresh = fresh
        other._hyper = dict(hyper)
        return other

    @property
    def _seed(self) -> int:
        """Computed only when it is needed: a run need not wait for its program."""
        return evaluation_seed(self._run_seed, fresh=self._fresh)

    @property
    def _quota(self) -> np.ndarray:
        """Episodes that each row plays, ``[B]``, as in ``Episodes``.

        With several policies, all agents of an environment play the same number, so that each
        policy plays whole games. They also do with metrics of the info, because some of these are
        about the whole episode of the environment.
        """
        spec = self._source.spec
        common, extra = divmod(self._episodes, self._num_envs)
        if not (spec.policies or spec.info_metrics):
            return common + (np.arange(self._num_envs) < extra)
        # of environments
        one_more = np.arange(self._num_envs // spec.num_agents) < -(-extra // spec.num_agents)
        counts = [
            spec.by_policy[policy].num_agents for policy in steps.row_slices(spec, self._num_envs)
        ]
        return common + np.concatenate([one_more.repeat(count) for count in counts])

    @in_32_bits
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
          watch: called at the start and after each step with the environments, which can be drawn,
            and the indices of those in their first episode.

        Returns:
          The evaluation; None if it was stopped.

        Raises:
          ConfigError: ``watch`` is given and the environment cannot be drawn.
          EnvError: an environment's own code failed.
          TimeoutError: an environment has not answered in time.
        """
        everything = EnvSlice.all(self._num_envs)
        start = steps.initial_core(self._algorithm, self._source.spec, everything)
        variables, start = _put((variables, start))
        if self._source.pure is not None and watch is None:
            return self._play_compiled(variables, start, progress, stop)
        return self._play_on_host(variables, start, progress, stop, watch)

    def _play_on_host(
        self,
        variables: Variables,
        start: PyTree,
        progress: Callable[[int], None],
        stop: Callable[[], bool],
        watch: Callable[[DrawnEnv, np.ndarray], None] | None,
    ) -> Evaluation | None:
        """Plays step by step; as ``play``."""
        spec = self._source.spec
        num_envs = self._num_envs
        quota = self._quota
        stacks = _put(steps.blank_stacks(spec, num_envs))
        episodes = Episodes.none(np, quota, spec.info_metrics)
        number = 0
        key = rng.stream(self._seed, rng.Stream.ACT)
        with contextlib.closing(
            self._source.host(num_envs, self._seed, training=False, drawn=bool(watch))
        ) as env:
            obs = spec.keyed(env.reset())
            core = start
            progress(0)
            if watch is not None:
                watch(env, np.arange(num_envs))
            while (episodes.done < quota).any():
                if stop():
                    return None
                action, core, stacks = self._act(
                    self._hyper,
                    variables,
                    _put(obs),
                    core,
                    stacks,
                    key,
                    np.uint32(number),
                    steps.searched(self._algorithm, env),
                )
                number += 1
                step, ended = map(spec.keyed, env.step(spec.bare(jax.tree.map(np.asarray, action))))
                if jax.tree.leaves(start):
                    core = self._update_core(self._hyper, core, start, stacks, action, _put(step))
                if watch is not None:
                    watch(env, np.flatnonzero(episodes.done == 0))
                obs, step, ended = steps.in_rows(spec, step, ended)
                done = episodes.done
                episodes = episodes.after(step, ended, quota, self._max_steps)
                if (episodes.done > done).any():
                    progress(int(episodes.done.sum()))
        return self._evaluation(episodes)

    def _evaluation(self, episodes: Episodes) -> Evaluation:
        """Returns the evaluation of all rows, and of each of several policies."""
        returns, lengths, cut, info = jax.device_get(
            (episodes.returns, episodes.lengths, episodes.cut, episodes.info)
        )

        def of_rows(rows: slice, sampled: bool) -> Evaluation:
            whole = lengths[rows] > 0
            ended_returns = returns[rows][whole].astype(np.float64)
            ended_lengths = lengths[rows][whole].astype(np.int64)
            reported = {metric: values[rows][whole] for metric, values in info.items()}
            return Evaluation(
                ended_returns, ended_lengths, int(cut[rows].sum()), sampled, info=reported
            )

        sampled = {
            policy: self._sampled or not algorithm.trains
            for policy, algorithm in self._algorithm.items()
        }
        slices = steps.row_slices(self._source.spec, self._num_envs)
        parts = {
            policy: of_rows(rows, sampled[policy]) for policy, rows in slices.items() if policy
        }
        return of_rows(slice(None), all(sampled.values()))._replace(policies=parts)

    def _play_compiled(
        self,
        variables: Variables,
        start: PyTree,
        progress: Callable[[int], None],
        stop: Callable[[], bool],
    ) -> Evaluation | None:
        """Plays some steps per dispatch of one program; as ``play``."""
        state: Played = self._begin(rng.stream(self._seed, rng.Stream.ENV), start)
        num_steps = _FIRST_STEPS
        done = 0
        key = rng.stream(self._seed, rng.Stream.ACT)
        progress(0)
        while True:
            if stop():
                return None
            began = time.perf_counter()
            state = self._play_on(self._hyper, variables, start, state, np.int32(num_steps), key)
            before = done
            done = int(state.episodes.done.sum())
            fault = Fault(*(np.asarray(x)[None] for x in (state.steps, state.fault)))
            check_fault(self._source.spec, fault, self._num_envs, rollout_length=1)
            if done > before:
                progress(done)
            if done == self._quota.sum():
                break
            if time.perf_counter() - began < _DISPATCH_SECONDS:
                num_steps *= 2
        return self._evaluation(state.episodes)


def _put(tree: PyTree) -> PyTree:
    return jax.device_put(tree, jax.local_devices()[0])


def _compile_acting(
    variant: Callable[[Mapping[str, Array]], Algorithms],
    source: EnvSource,
    num_envs: int,
    *,
    sampled: bool,
) -> Callable[..., tuple[PyTree, PyTree, PyTree]]:
    """``(hyper, variables, obs, core, stacks, key, step, env_state) -> (action, core, stacks)``."""

    @jax.jit
    def act(
        hyper: Mapping[str, Array],
        variables: Variables,
        obs: PyTree,
        core: PyTree,
        stacks: PyTree,
        key: jax.Array,
        step: jax.Array,
        env_state: PyTree,
    ) -> tuple[PyTree, PyTree, PyTree]:
        env_step = jnp.float32(END_OF_SCHEDULES if sampled else 0)

        def of_policy(algorithm: Algorithm, *arguments: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            variables, obs, core, stacks, key, index = arguments
            stacks, obs = frames.push(stacks, obs)
            keys = None
            # A policy that does not train may have no best action.
            if sampled or not algorithm.trains:
                keys = rng.per_index(jax.random.fold_in(key, step), index)
            context = Context(keys, env_step, simulator=simulator)
            action, core, _ = algorithm.policy(variables, obs, core, context)
            return action, core, stacks

        algorithm = variant(hyper)
        rows = jnp.arange(num_envs, dtype=jnp.int32)
        simulator = steps.simulator(algorithm, source.pure, env_state)
        keys = steps.keys_of(algorithm, key)
        index = steps.indices(algorithm, source.spec, rows)
        return over_policies(of_policy, 3)(algorithm, variables, obs, core, stacks, keys, index)

    return act


def _compile_core(
    variant: Callable[[Mapping[str, Array]], Algorithms],
) -> Callable[..., PyTree]:
    """``(hyper, core, start, stacks, action, step) -> core`` for the next observation."""

    def with_stacks(stacks: PyTree, step: Timestep) -> Timestep:
        # The stacks are discarded: acting pushes this frame itself.
        _, obs = frames.push(stacks, step.obs)
        return step._replace(obs=obs)

    @jax.jit
    def update_core(
        hyper: Mapping[str, Array],
        core: PyTree,
        start: PyTree,
        stacks: PyTree,
        action: PyTree,
        step: PyTree,
    ) -> PyTree:
        step = over_policies(with_stacks)(stacks, step)
        return over_policies(steps.after_step)(variant(hyper), core, start, action, step)

    return update_core


def evaluation_seed(seed: int, *, fresh: bool = False) -> int:
    """Returns the seed of an evaluation's environments for a run's seed.

    Args:
      fresh: as for ``Evaluator.of_member``.
    """
    stream = rng.Stream.CONFIRM if fresh else rng.Stream.EVALUATE
    return int(jax.random.bits(rng.stream(seed, stream))) & 0x7FFFFFFF
