"""Records what a policy experiences as a data set."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng, spaces
from jaxrl_dist.actors import step as steps
from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES, MAX_EPISODE_STEPS
from jaxrl_dist.actors.recorded_policy import probabilities_known
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.data.recorder import unrecordable
from jaxrl_dist.envs.base import EnvSlice, HostEnv
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.nn import observations
from jaxrl_dist.nn.distributions import policy_head
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.run.checkpoint import load_memory
from jaxrl_dist.run.storage import Json
from jaxrl_dist.settings.still import Random
from jaxrl_dist.spaces import Box, Discrete, Part, clipped
from jaxrl_dist.training.job import make_job
from jaxrl_dist.types import Array, Context, EnvSpec, PyTree, Rollout, Timestep, Variables


@in_32_bits
def record(
    policy: Policy,
    num_steps: int,
    *,
    num_envs: int = 16,
    seed: int = 0,
    random_share: float = 0.0,
    greedy: bool = False,
    about: Mapping[str, Json] = {},
    progress: Callable[[int], None] = lambda done: None,
) -> Dataset:
    """Plays with a policy, and returns its experience.

    Unfinished episodes are played to their end. The behaviour's probability of each action is
    recorded, unless the policy is deterministic where it does not act at random.

    Args:
      num_steps: env steps to play; the ends of episodes need some more.
      num_envs: environments that play.
      random_share: probability with which an action is drawn uniformly from all instead.
      greedy: take the best actions instead of sampling them.
      about: more of ``Dataset.about``.
      progress: called with the number of steps done.

    Raises:
      ConfigError: the policy is one of several, frames are stacked, or random actions have no
        bounds.
      EnvError, TimeoutError: as ``Policy.evaluate``.
    """
    problem = unrecordable(policy.source.spec)
    if problem is not None:
        raise ConfigError(problem)
    act, known = _acting(policy, num_envs, random_share, greedy=greedy)
    with contextlib.closing(policy.source.host(num_envs, seed)) as env:
        rows, last = _play(policy, env, act, num_steps, num_envs, seed, progress)
    stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
    rollout = Rollout(
        obs=jax.tree.map(lambda x, end: np.concatenate([x, end[None]]), stacked.obs, last),
        action=stacked.action,
        reward=stacked.step.reward,
        terminated=stacked.step.terminated,
        truncated=stacked.step.truncated,
        valid=stacked.step.valid,
        extras={"log_prob": stacked.log_prob} if known else {},
        core=(),
        final_core=(),
    )
    behaviour = {
        **about.get("behaviour", {}),
        "random_share": random_share,
        "greedy": greedy,
        "deterministic": greedy and random_share == 0,
    }
    return of_rollout(rollout, policy.source.spec, {**about, "behaviour": behaviour})


Act: TypeAlias = Callable[
    [Variables, PyTree, PyTree, jax.Array, PyTree], tuple[PyTree, PyTree, jax.Array]
]
"""``(variables, obs, core, key, env_state) -> (action, core, log_prob)``."""


class _Row(NamedTuple):
    """What happened in one step of all environments."""

    obs: PyTree
    action: PyTree
    step: Timestep
    """Its ``obs`` is ()."""
    log_prob: np.ndarray


def _play(
    policy: Policy,
    env: HostEnv,
    act: Act,
    num_steps: int,
    num_envs: int,
    seed: int,
    progress: Callable[[int], None],
) -> tuple[list[_Row], PyTree]:
    """Plays ``num_steps`` env steps and then unfinished episodes to their end; returns all steps,
    and the observation after them.
    """
    algorithm = policy.algorithm
    spec = policy.source.spec
    start = steps.initial_core({"": algorithm}, spec, EnvSlice.all(num_envs))[""]
    after_step = jax.jit(
        lambda core, action, step: steps.after_step(algorithm, core, start, action, step)
    )
    key = rng.stream(seed, rng.Stream.ACT)
    rows: list[_Row] = []
    done = 0
    over = np.zeros(num_envs, bool)
    left = max(MAX_EPISODE_STEPS, spec.max_episode_steps or 0)
    obs = env.reset()
    core = start
    while not over.all() and left:
        env_state = steps.searched({"": algorithm}, env)
        step_key = jax.random.fold_in(key, len(rows))
        action, core, log_prob = act(policy.variables, obs, core, step_key, env_state)
        action = jax.tree.map(np.asarray, action)
        step, _ = env.step(action)
        if jax.tree.leaves(start):
            core = after_step(core, action, step)
        before = jax.tree.map(np.array, obs)
        obs = step.obs
        step = step._replace(obs=(), valid=step.valid & ~over)
        rows.append(_Row(before, action, jax.tree.map(np.array, step), np.asarray(log_prob)))
        done += int(step.valid.sum())
        if done >= num_steps:
            over = over | step.terminated | step.truncated | ~step.valid
            left -= 1
        progress(done)
    return rows, jax.tree.map(np.array, obs)


def _acting(
    policy: Policy, num_envs: int, random_share: float, *, greedy: bool
) -> tuple[Act, bool]:
    """Returns how the behaviour acts, and whether the probabilities of its actions are known."""
    algorithm = policy.algorithm
    spec = policy.source.spec
    uniform = _Uniform(spec) if random_share else None
    log_prob = None
    if not greedy and probabilities_known(algorithm, spec, policy.variables):
        log_prob = algorithm.log_prob
    known = log_prob is not None or (
        greedy and random_share > 0 and isinstance(spec.action, Discrete)
    )

    def act(
        variables: Variables, obs: PyTree, core: PyTree, key: jax.Array, env_state: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        keys, which, draw = (jax.random.split(part, num_envs) for part in jax.random.split(key, 3))
        simulator = steps.simulator({"": algorithm}, policy.source.pure, env_state)
        context = Context(
            None if greedy else keys, jnp.float32(END_OF_SCHEDULES), simulator=simulator
        )
        action, after, _ = algorithm.policy(variables, obs, core, context)
        chosen = action = clipped(spec.action, action)
        if uniform is not None:
            chance = jax.vmap(lambda key: jax.random.uniform(key) < random_share)(which)
            action = jax.tree.map(
                lambda x, y: jnp.where(_like(chance, x), x, y), uniform.draw(obs, draw), chosen
            )
        if not known:
            return action, after, jnp.zeros(num_envs)
        if log_prob is not None:
            probability = log_prob(variables, obs, core, action, context)
        else:  # the best action has all of it
            probability = jnp.where(action == chosen, 0.0, -jnp.inf)
        if uniform is not None:
            own = probability + jnp.log1p(-random_share)
            other = jnp.log(random_share) + uniform.log_prob(obs, action)
            probability = jnp.logaddexp(own, other)
        return action, after, probability

    return jax.jit(act), known


def _like(flag: jax.Array, x: jax.Array) -> jax.Array:
    return flag.reshape(-1, *(1,) * (x.ndim - 1))


class _Uniform:
    """Draws legal actions uniformly."""

    def __init__(self, spec: EnvSpec) -> None:
        """Raises ``ConfigError`` if an action has no bounds."""
        self._spec = spec
        self._parts = list(spaces.leaves(spec.action).values())
        for part in self._parts:
            if isinstance(part, Box) and not np.isfinite([part.low, part.high]).all():
                raise ConfigError("--random-share needs bounded actions")
        self._random = Random().make(spec)
        self._head = policy_head(spec.action)

    def draw(self, obs: PyTree, keys: jax.Array) -> PyTree:
        variables = self._random.init(keys[0])
        action, _, _ = self._random.policy(variables, obs, (), Context(keys, jnp.zeros(())))
        return action

    def log_prob(self, obs: PyTree, action: PyTree) -> jax.Array:
        legal = observations.legal(self._spec, obs)
        if legal is not None:  # then all parts are categories
            return self._head.distribution(jnp.zeros(legal.shape), legal).log_prob(action)
        return jnp.float32(-sum(np.log(_sizes(part)).sum() for part in self._parts))


def _sizes(part: Part) -> np.ndarray:
    """Returns the numbers of categories, or the distances between the bounds."""
    if isinstance(part, Box):
        return np.asarray(part.high, np.float64) - part.low
    return np.asarray(spaces.num_choices(part))


def of_memory(
    policy: Policy,
    run_dir: str | pathlib.Path,
    about: Mapping[str, Json] = {},
    checkpoint: str | None = None,
) -> Dataset:
    """Returns what the replay memory of a run's checkpoint holds.

    Args:
      policy: the run's, which has its config.
      checkpoint: "best" or env steps; None: the newest one.

    Raises:
      ConfigError: the run has no memory, or its checkpoints hold none.
    """
    spec = policy.source.spec
    job = make_job(policy.config, policy.source, devices=jax.local_devices()[:1])
    shapes = jax.eval_shape(job.learner.init, jax.random.key(0))
    problem = unrecordable(spec)
    if problem is not None:
        raise ConfigError(f"{run_dir}: {problem}")
    if not jax.tree.leaves(shapes.memory):
        raise ConfigError(f"--replay needs a run with replay, and {run_dir} has none")
    memory = load_memory(run_dir, shapes.memory[""], checkpoint)
    steps = memory.steps
    added = int(memory.added[0])
    count = min(added, steps.reward.shape[1] - 1)
    order = np.arange(added - count, added + 1) % steps.reward.shape[1]
    rollout = jax.tree.map(lambda x: np.swapaxes(np.asarray(x)[:, order], 0, 1), steps)
    before = jax.tree.map(lambda x: x[:-1], rollout._replace(obs=(), extras={}))
    return of_rollout(before._replace(obs=rollout.obs), spec, about)


def of_rollout(rollout: Rollout, spec: EnvSpec, about: Mapping[str, Json]) -> Dataset:
    """Returns the steps of a rollout ``[T, B, ...]`` of numpy arrays, one environment after the
    other.

    Unfinished episodes are cut; a rollout that begins within an episode begins with a part of it.
    """

    def row(x: Array) -> np.ndarray:
        padded = np.asarray(x)
        if len(x) == len(rollout.reward):  # only observations have an entry more
            padded = np.append(x, np.zeros_like(x[:1]), axis=0)
        return padded.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    log_prob = rollout.extras.get("log_prob")
    return Dataset.of_rows(
        jax.tree.map(row, rollout.obs),
        clipped(spec.action, jax.tree.map(row, rollout.action)),
        row(rollout.reward),
        row(rollout.terminated).astype(bool),
        row(rollout.valid).astype(bool),
        log_prob=None if log_prob is None else row(log_prob),
        interface=spec.interface,
        about=about,
    )
