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
        means = {}
        if len(self.returns):
            means = {
                "return_mean": float(self.returns.mean()),
                "return_std": float(self.returns.std()),
                "length_mean": float(self.lengths.mean()),
            }
        return {
            "episodes": len(self.returns),
            **means,
            "cut": self.cut,
            **({"sampled": True} if self.sampled else {}),
            **{
                f"info/{x}": float(y[known].mean())
                for x, y in self.info.items()
                if (known := ~np.isnan(y)).any()
            },
            **{
                f"{policy}/{x}": y
                for policy in self.policies
                for x, y in self.policies[policy].summary().items()
            },
        }


def check_samples(algorithm: Algorithms) -> None:
    """Checks that an evaluation can sample actions.

    Raises:
      ConfigError: training perturbs the parameters, not the actions; with several policies,
        in all of them.
    """
    if all(policy.behaviour is not None for policy in algorithm.values()):
        raise ConfigError(
            "--evaluation-policy sampled does nothing here: this run explores by perturbed parameters, and draws no "
            "actions; --evaluation-policy greedy works"
        )


class Evaluator:
    """Plays episodes on one device: the same ones each time,
    with programs compiled on the first call.

    Each environment plays a number of episodes fixed in advance: counting the first ones to finish
    would favour short episodes. Atari games are played in full, for their unclipped score.
    Environments that are pure functions are played by one program, unless ``watch`` is given.
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
          num_envs: number of environments in training. On the host, evaluation makes no more than
            that, because more may not fit into memory. With fewer environments than episodes, each
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
        if source.is_pure:
            most = MAX_ENVS
        else:
            most = min(num_envs, MAX_ENVS)
        agents = source.spec.num_agents
        self._num_envs = -(-min(episodes, most * agents) // agents) * agents
        self._max_steps = max_steps or max(MAX_EPISODE_STEPS, source.spec.max_episode_steps or 0)
        self._run_seed = seed
        self._fresh = False
        self._hyper = dict[str, float]()
        self._sampled = sampled
        variant = variant or (lambda hyper: algorithm)

        @jax.jit
        def act(
            hyper: Any,
            variables: Variables,
            obs: PyTree,
            core: PyTree,
            stacks: PyTree,
            key: jax.Array,
            *now: PyTree,
        ) -> tuple[PyTree, ...]:
            step, env_state = now
            env_step = jnp.float32(END_OF_SCHEDULES if sampled else 0)

            def act_one(algorithm: Algorithm, *arguments: PyTree) -> tuple[PyTree, ...]:
                variables, obs, core, stacks, key, index = arguments
                stacks, obs = frames.push(stacks, obs)
                # A policy that does not train may have no best action.
                drawn = sampled or not algorithm.trains
                if drawn:
                    keys = rng.per_index(jax.random.fold_in(key, step), index)
                else:
                    keys = None
                action, core, _ = algorithm.policy(
                    variables, obs, core, Context(keys, env_step, simulator=simulator)
                )
                return action, core, stacks

            algorithm = variant(hyper)
            rows = jnp.arange(self._num_envs, dtype=jnp.int32)
            simulator = steps.simulator(algorithm, source.pure, env_state)
            keys = steps.keys_of(algorithm, key)
            index = steps.indices(algorithm, source.spec, rows)
            return over_policies(act_one, 3)(algorithm, variables, obs, core, stacks, keys, index)

        @jax.jit
        def update_core(
            hyper: Any, core: PyTree, start: PyTree, stacks: PyTree, action: PyTree, step: PyTree
        ) -> PyTree:
            def with_stacks(stacks: PyTree, step: Timestep) -> Timestep:
                # stacks are discarded: ``act`` pushes this frame itself
                _, obs = frames.push(stacks, step.obs)
                return step._replace(obs=obs)

            step = over_policies(with_stacks)(stacks, step)
            return over_policies(steps.after_step)(variant(hyper), core, start, action, step)

        self._act, self._update_core = act, update_core
        if source.pure is not None and episodes:
            self._begin, self._play_on = played.programs(
                source.pure, self._quota, self._max_steps, act, update_core
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
        policy plays whole games; also with metrics of the info: some are those of the environment's
        whole episode.
        """
        spec = self._source.spec
        (common, extra) = divmod(self._episodes, self._num_envs)
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
        spec, num_envs, quota = self._source.spec, self._num_envs, self._quota
        put = partial(jax.device_put, device=jax.local_devices()[0])
        variables, start = put(
            (variables, steps.initial_core(self._algorithm, spec, EnvSlice.all(num_envs)))
        )
        if self._source.pure is not None and watch is None:
            return self._play_compiled(variables, start, progress, stop)
        stacks = put(steps.blank_stacks(spec, num_envs))
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
                now = (
                    put(obs),
                    core,
                    stacks,
                    key,
                    np.uint32(number),
                    steps.searched(self._algorithm, env),
                )
                action, core, stacks = self._act(self._hyper, variables, *now)
                number += 1
                step, ended = map(spec.keyed, env.step(spec.bare(jax.tree.map(np.asarray, action))))
                if jax.tree.leaves(start):
                    core = self._update_core(self._hyper, core, start, stacks, action, put(step))
                if watch is not None:
                    watch(env, np.flatnonzero(episodes.done == 0))
                obs, step, ended = steps.in_rows(spec, step, ended)
                done = episodes.done
                episodes = episodes.after(step, ended, quota, self._max_steps)
                if (episodes.done > done).any():
                    progress(int(episodes.done.sum()))
        return self._evaluation(episodes)

    def _evaluation(self, episodes: Episodes) -> Evaluation:
        """Returns the evaluation of all rows, with that of each of several policies."""
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
            policy: self._sampled or not made.trains for policy, made in self._algorithm.items()
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
        """Plays in one program, some steps per dispatch; as ``play``."""
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


def evaluation_seed(seed: int, *, fresh: bool = False) -> int:
    """Returns the seed of the evaluation's environments, for a run's seed;
    ``fresh`` as for ``of_member``.
    """
    stream = rng.Stream.CONFIRM if fresh else rng.Stream.EVALUATE
    return int(jax.random.bits(rng.stream(seed, stream))) & 0x7FFFFFFF
