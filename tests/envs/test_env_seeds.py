"""Which episodes a run meets: a matter of its seed and an environment's number, not of plan,
actors or processes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from probes import make_mesh, make_session, with_job

from jaxrl_dist import preset
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.algorithms.impala import IMPALA
from jaxrl_dist.envs.base import EnvSlice, HostEnv
from jaxrl_dist.envs.source import EnvSource, find
from jaxrl_dist.errors import EnvError, EnvWarning
from jaxrl_dist.plans.asynchronous import asynchronous
from jaxrl_dist.plans.synchronous import synchronous
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.training import setup
from jaxrl_dist.types import EnvSpec

NUM_ENVS = 4


class Recorded(NamedTuple):
    """As ``EnvSource``, but tells which environments are made, by which seed,
    and what they first show.
    """

    source: EnvSource
    tell: Callable[[EnvSlice, int, np.ndarray], None]

    @property
    def spec(self) -> EnvSpec:
        return self.source.spec

    @property
    def is_pure(self) -> bool:
        return self.source.is_pure

    def host(self, share: EnvSlice | int, seed: int) -> HostEnv:
        env = self.source.host(share, seed)
        reset = env.reset

        def told() -> Any:
            obs = reset()
            self.tell(EnvSlice.all(share) if isinstance(share, int) else share, seed, obs)
            return obs

        env.reset = told  # type: ignore[method-assign]
        return env


def first_observations(plan: Any, env: str, pool: PoolOptions) -> np.ndarray:
    """Those of a run of one iteration, by the environments' numbers."""
    parts: dict[int, np.ndarray] = {}
    source = find(env)
    recorded: Any = Recorded(source, lambda share, _, obs: parts.__setitem__(share.first, obs))
    learner = IMPALA(hidden_sizes=(4,)).make(source.spec)
    session = make_session(learner, source, num_envs=NUM_ENVS, rollout_length=2, seed=3, pool=pool)
    list(plan(with_job(session, source=recorded)))
    return np.concatenate([parts[first] for first in sorted(parts)])


@functools.cache
def synchronous_observations(env: str) -> np.ndarray:
    return first_observations(synchronous, env, PoolOptions())


@pytest.mark.parametrize(
    "env, num_actors",
    [
        pytest.param("envpool:CartPole-v1", 2, marks=pytest.mark.case),
        ("gymnasium:CartPole-v1", 1),
        pytest.param("gymnasium:CartPole-v1", 2, marks=pytest.mark.case),
        ("gymnasium:CartPole-v1", 4),
    ],
)
def test_first_episodes_do_not_depend_on_plan_or_actors(env: str, num_actors: int) -> None:
    expected = synchronous_observations(env)
    assert len(np.unique(expected, axis=0)) == NUM_ENVS
    pool = PoolOptions(num_actors, (make_mesh(1),))
    np.testing.assert_array_equal(first_observations(asynchronous, env, pool), expected)


@pytest.mark.parametrize(
    "env", ["envpool:CartPole-v1", "gymnasium:CartPole-v1", "gymnax:CartPole-v1"]
)
def test_a_share_is_a_part_of_the_whole(env: str) -> None:
    """First observations, and those of some steps and resets."""
    source = find(
        env, {"max_steps_in_episode" if env.startswith("gymnax") else "max_episode_steps": "2"}
    )

    def play(share: EnvSlice | int) -> list[np.ndarray]:
        with contextlib.closing(source.host(share, 5)) as host:
            return [
                host.reset(),
                *(host.step(np.zeros(host.num_envs, np.int32))[0].obs for _ in range(4)),
            ]

    whole = np.stack(play(NUM_ENVS))
    for share in (EnvSlice(1, 2, NUM_ENVS), EnvSlice(3, 1, NUM_ENVS)):
        np.testing.assert_array_equal(
            np.stack(play(share)), whole[:, share.first : share.first + share.size]
        )


def test_a_restart_meets_others() -> None:
    made: list[tuple[EnvSlice, int]] = []

    def tell(share: EnvSlice, seed: int, obs: np.ndarray) -> None:
        made.append((share, seed))
        if made.count((share, 3)) == 1 and share.first == 2 and seed == 3:
            raise EnvError("broken")

    source = find("gymnasium:CartPole-v1")
    pool = PoolOptions(2, (make_mesh(1),), max_restarts=1)
    learner = IMPALA(hidden_sizes=(4,)).make(source.spec)
    session = make_session(learner, source, num_envs=NUM_ENVS, rollout_length=2, seed=3, pool=pool)
    recorded: Any = Recorded(source, tell)
    with pytest.warns(EnvWarning, match="actor 1 continues with new environments"):
        list(asynchronous(with_job(session, source=recorded)))
    first, second = EnvSlice(0, 2, NUM_ENVS), EnvSlice(2, 2, NUM_ENVS)
    assert sorted(made)[:2] == [(first, 3), (second, 3)]
    ((again, seed),) = sorted(made)[2:]
    assert again == second and seed != 3


# --- Evaluation -----------------------------------------------------------------------------------


@pytest.mark.case  # test_a_share_is_a_part_of_the_whole
def test_evaluation_makes_no_more_environments_than_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those that live on the host; each plays its part of the episodes."""
    made: list[int] = []
    original = EnvSource.host

    def host(self: EnvSource, num_envs: int, *args: Any, **more: Any) -> Any:
        made.append(num_envs)
        return original(self, num_envs, *args, **more)

    monkeypatch.setattr(EnvSource, "host", host)
    config = preset(
        "pg",
        "gymnasium:CartPole-v1",
        num_envs=2,
        num_devices=1,
        evaluation_episodes=5,
        hidden_sizes=(4,),
    )
    run = setup.prepare(config)
    variables = jax.jit(run.job.algorithm[""].init)(jax.random.key(0))
    played = run.members[0].shared.evaluator.play({"": variables})
    assert played is not None and len(played.returns) == 5
    policy = Policy(run.config, run.job.source, variables)
    np.testing.assert_array_equal(policy.evaluate(5, run.config.seed).returns, played.returns)
    assert made == [2, 2]
    # Pure ones are arrays, of which more are no harm; the policies of both have the same shapes.
    arrays: list[int] = []
    pure = find("gymnax:CartPole-v1")

    def reset(keys: jax.Array) -> Any:
        arrays.append(len(keys))
        return pure.device().reset(keys)

    source = pure._replace(pure=pure.device()._replace(reset=reset))
    Evaluator(run.job.algorithm, source, 5, 0, num_envs=2).play({"": variables})
    assert made == [2, 2] and set(arrays) == {5}
