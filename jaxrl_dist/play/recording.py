"""Records what a policy experiences as a data set."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import rng, spaces
from jaxrl_dist.actors import step as steps
from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES, MAX_EPISODE_STEPS
from jaxrl_dist.actors.recorded_policy import probabilities_known
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.data.recorder import unrecordable
from jaxrl_dist.envs.base import EnvSlice
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.nn import observations
from jaxrl_dist.nn.distributions import policy_head
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.run.checkpoint import load_memory
from jaxrl_dist.settings.still import Random
from jaxrl_dist.spaces import Box, Discrete, clipped
from jaxrl_dist.training.job import make_job
from jaxrl_dist.types import Array, Context, EnvSpec, PyTree, Rollout, Timestep


@in_32_bits
def record(
    policy: Policy,
    num_steps: int,
    *,
    num_envs: int = 16,
    seed: int = 0,
    random_share: float = 0.0,
    greedy: bool = False,
    about: Mapping[str, Any] = {},
    progress: Callable[[int], None] = lambda done: None,
) -> Dataset:
    """Plays with a policy, and returns its experience.

    The episodes that are under way at the end are played to theirs. The behaviour's probability of
    each action is recorded, unless the policy is deterministic where it does not act at random.

    Args:
      num_steps: env steps to play, and some more to the ends of episodes.
      num_envs: environments that play.
      random_share: probability with which an action is drawn uniformly from all instead.
      greedy: take the best actions instead of sampling them.
      about: more of ``Dataset.about``.
      progress: called with the number of steps done.

    Raises:
      ConfigError: the policy is one of several, frames are stacked,
        or random actions have no bounds.
      EnvError, TimeoutError: as ``Policy.evaluate``.
    """
    source = policy.source
    algorithm = policy.algorithm
    spec = policy.source.spec
    problem = unrecordable(spec)
    if problem is not None:
        raise ConfigError(problem)
    act, known = _acting(policy, num_envs, random_share, greedy=greedy)
    start = steps.initial_core({"": algorithm}, spec, EnvSlice.all(num_envs))[""]
    after_step = jax.jit(
        lambda core, action, step: steps.after_step(algorithm, core, start, action, step)
    )
    rows: list[tuple[PyTree, PyTree, Timestep, Array]] = []
    done = 0
    number = 0
    key = rng.stream(seed, rng.Stream.ACT)
    with contextlib.closing(source.host(num_envs, seed)) as env:
        obs = env.reset()
        core = start
        over = np.zeros(num_envs, bool)
        left = max(MAX_EPISODE_STEPS, spec.max_episode_steps or 0)
        while not over.all() and left:
            planned = steps.searched({"": algorithm}, env)
            action, core, probability = act(
                policy.variables, obs, core, jax.random.fold_in(key, number), planned
            )
            action = jax.tree.map(np.asarray, action)
            step, _ = env.step(action)
            if jax.tree.leaves(start):
                core = after_step(core, action, step)
            before = jax.tree.map(np.array, obs)
            obs = step.obs
            step = step._replace(valid=step.valid & ~over)
            rows.append(
                (
                    before,
                    action,
                    jax.tree.map(np.array, step._replace(obs=())),
                    np.asarray(probability),
                )
            )
            done = done + int(step.valid.sum())
            number = number + 1
            if done >= num_steps:
                over = over | step.terminated | step.truncated | ~step.valid
                left = left - 1
            progress(done)
        last = jax.tree.map(np.array, obs)
    stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
    obs = jax.tree.map(lambda x, y: np.concatenate([x, y[None]]), stacked[0], last)
    parts = (
        obs,
        stacked[1],
        stacked[2].reward,
        stacked[2].terminated,
        stacked[2].truncated,
        stacked[2].valid,
    )
    rollout = Rollout(
        *parts, extras={"log_prob": stacked[3]} if known else {}, core=(), final_core=()
    )
    behaviour = {
        "random_share": random_share,
        "greedy": greedy,
        "deterministic": greedy and random_share == 0,
    }
    return of_rollout(
        rollout, spec, {**about, "behaviour": {**about.get("behaviour", {}), **behaviour}}
    )


def _acting(
    policy: Policy, num_envs: int, random_share: float, *, greedy: bool
) -> tuple[Callable[..., tuple[PyTree, PyTree, jax.Array]], bool]:
    """Returns ``(variables, obs, core, key, env_state) -> (action, core, log_prob)``,
    and whether that is known.
    """
    algorithm, spec = policy.algorithm, policy.source.spec
    drawn = not greedy and probabilities_known(algorithm, spec, policy.variables)
    log_prob = algorithm.log_prob if drawn else None
    known = log_prob is not None or (
        greedy and random_share > 0 and isinstance(spec.action, Discrete)
    )
    uniform = _uniform(spec) if random_share else None

    def act(
        variables: Any, obs: PyTree, core: PyTree, key: jax.Array, env_state: PyTree
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
                lambda x, y: jnp.where(_like(chance, x), x, y), uniform[0](obs, draw), action
            )
        if not known:
            return action, after, jnp.zeros(num_envs)
        if log_prob is not None:
            probability = log_prob(variables, obs, core, action, context)
        else:  # the best action has all of it
            probability = jnp.where(action == chosen, 0.0, -jnp.inf)
        if uniform is not None:
            own = probability + jnp.log1p(-random_share)
            other = jnp.log(random_share) + uniform[1](obs, action)
            probability = jnp.logaddexp(own, other)
        return action, after, probability

    return jax.jit(act), known


def of_memory(
    policy: Policy,
    run_dir: str | pathlib.Path,
    about: Mapping[str, Any] = {},
    checkpoint: str | None = None,
) -> Dataset:
    """Returns what the replay memory of a run's checkpoint holds.

    Args:
      policy: that of the run, which has its config.
      checkpoint: "best" or env steps; None: the newest one.

    Raises:
      ConfigError: the run has no memory, or its checkpoints hold none.
    """
    config, spec = policy.config, policy.source.spec
    job = make_job(config, policy.source, devices=jax.local_devices()[:1])
    shapes = jax.eval_shape(job.learner.init, jax.random.key(0))
    problem = unrecordable(spec)
    if problem is not None:
        raise ConfigError(f"{run_dir}: {problem}")
    if not jax.tree.leaves(shapes.memory):
        raise ConfigError(f"{run_dir}: --replay needs a run of an algorithm that replays")
    memory = load_memory(run_dir, shapes.memory[""], checkpoint)
    steps = memory.steps
    added = int(memory.added[0])
    count = min(added, steps.reward.shape[1] - 1)
    order = np.arange(added - count, added + 1) % steps.reward.shape[1]
    rollout = jax.tree.map(lambda x: np.swapaxes(np.asarray(x)[:, order], 0, 1), steps)
    before = jax.tree.map(lambda x: x[:-1], rollout._replace(obs=(), extras={}))
    return of_rollout(before._replace(obs=rollout.obs), spec, about)


def of_rollout(rollout: Rollout, spec: EnvSpec, about: Mapping[str, Any]) -> Dataset:
    """Returns the steps of a rollout ``[T, B, ...]`` of numpy arrays,
    one environment after the other.

    Episodes that are under way at its end are cut;
    a rollout that begins within an episode begins with a part of it.
    """

    def row(x: Array) -> np.ndarray:
        if len(x) > len(rollout.reward):
            padded = np.asarray(x)
        else:
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


def _like(flag: jax.Array, x: jax.Array) -> jax.Array:
    return flag.reshape(-1, *(1,) * (x.ndim - 1))


def _uniform(spec: EnvSpec) -> tuple[Callable[..., PyTree], Callable[[PyTree, PyTree], jax.Array]]:
    """Returns ``(obs, keys) -> action`` of uniform legal actions,
    and ``(obs, action) -> log_prob`` of these.

    Raises:
      ConfigError: an action has no bounds.
    """
    parts = list(spaces.leaves(spec.action).values())
    if any(
        isinstance(part, Box) and not np.isfinite([part.low, part.high]).all() for part in parts
    ):
        raise ConfigError("--random-share needs actions between two bounds")
    random = Random().make(spec)
    head = policy_head(spec.action)

    def draw(obs: PyTree, keys: jax.Array) -> PyTree:
        return random.policy(random.init(keys[0]), obs, (), Context(keys, jnp.zeros(())))[0]

    def log_prob(obs: PyTree, action: PyTree) -> jax.Array:
        if (legal := observations.legal(spec, obs)) is not None:  # then all parts are categories
            return head.distribution(jnp.zeros(legal.shape), legal).log_prob(action)
        sizes = [
            np.asarray(part.high, np.float64) - part.low
            if isinstance(part, Box)
            else spaces.num_choices(part)
            for part in parts
        ]
        return jnp.float32(-sum(np.log(size).sum() for size in sizes))

    return draw, log_prob
