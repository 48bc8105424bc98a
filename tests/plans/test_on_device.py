"""Acting and learning in one program: environments with ordinary control flow, and members under ``vmap``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import environment, spaces
from probes import learner_of, make_job, make_mesh

from jaxrl_dist.actors.pool import PoolOptions
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.envs.source import find
from jaxrl_dist.plans import asynchronous, on_device
from jaxrl_dist.plans.job import Job
from jaxrl_dist.rng import Stream
from jaxrl_dist.types import Report


class Branches(environment.Environment):
    """Steps with a branch that returns a constant, and with a loop that starts from one."""

    @property
    def default_params(self) -> environment.EnvParams:
        return environment.EnvParams(max_steps_in_episode=7)

    def reset_env(self, key: jax.Array, params: Any) -> tuple[jax.Array, environment.EnvState]:
        return jnp.zeros(2), environment.EnvState(time=0)

    def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: Any) -> Any:
        obs = jax.lax.cond(action == 1, lambda: jnp.zeros(2), lambda: jnp.full(2, state.time, jnp.float32))
        reward = jax.lax.while_loop(lambda x: x < state.time, lambda x: x + 1, 0)
        return obs, environment.EnvState(time=state.time + 1), reward.astype(jnp.float32), jnp.bool_(False), {}

    def observation_space(self, params: Any) -> spaces.Box:
        return spaces.Box(0, 10, (2,), jnp.float32)

    def action_space(self, params: Any) -> spaces.Discrete:
        return spaces.Discrete(2)


def job(**options: Any) -> Job:
    source = find(Branches())
    algorithm = PPO(hidden_sizes=(4,), num_minibatches=2, num_epochs=1).make(source.spec)
    return make_job(algorithm, source, num_envs=4, rollout_length=8, **options)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_environments_may_branch_and_loop_as_they_like(num_devices: int) -> None:
    reports: list[Report] = list(on_device.on_device(job(num_devices=num_devices, total_env_steps=56)))
    last = reports[-1]
    assert last.env_steps == 2 * 4 * 7  # each environment spends every eighth step on a reset
    assert last.metrics["episode/length"] == 7 and last.metrics["episode/return"] == sum(range(7))


def test_actor_threads_step_them_too() -> None:
    pool = PoolOptions(num_actors=2, meshes=(make_mesh(1),))
    *_, last = asynchronous.asynchronous(job(total_env_steps=56, pool=pool))
    assert last.env_steps >= 56


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_population_traces_and_its_members_are_their_lone_runs(name: str, num_devices: int) -> None:
    """Two members under ``vmap`` make the iterations that each would make alone."""
    source = find("CartPole-v1")
    config = {
        "ppo": PPO(hidden_sizes=(4,), num_minibatches=2, num_epochs=1),
        "dqn": DQN(hidden_sizes=(4,), batch_size=8, learning_starts=32, replay_capacity=64, replay_ratio=0.125),
    }[name]
    algorithm = config.make(source.spec)
    whole = make_job(algorithm, source, num_envs=4, rollout_length=8, num_devices=num_devices)
    learner = learner_of(algorithm, source.spec, 4, 8, num_devices)
    act, learn = on_device._iterate(whole)

    def begin(seed: jax.Array) -> tuple[Any, Any, Any]:
        keys = [jax.random.fold_in(jax.random.key(seed), stream) for stream in (Stream.ACT, Stream.ENV, Stream.LEARN)]
        return learner.init(jax.random.key(seed)), on_device.start(whole)(keys[1]), tuple(keys)

    def run(seed: jax.Array) -> Any:
        state, actor, keys = begin(seed)

        def iterate(carry: Any, _: None) -> tuple[Any, None]:
            state, actor = carry
            actor, experience, _ = act(state, actor, keys)
            return (learn(state, experience, keys)[0], actor), None

        return jax.lax.scan(iterate, (state, actor), length=2)[0][0].variables

    seeds = jnp.arange(2)
    together = jax.jit(jax.vmap(run))(seeds)
    alone = jax.tree.map(lambda *x: jnp.stack(x), *map(jax.jit(run), seeds))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), together, alone)
