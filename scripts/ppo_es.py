"""PPO-ES: evolution in the outer loop, PPO in the inner one:
``python scripts/ppo_es.py > docs/learning/ppo-es.json``.

RLlib's hybrid (Liang et al. 2018, https://arxiv.org/abs/1712.09381). Each generation perturbs the
parameters of one centre for every member, trains the members by PPO, and moves the centre to a mean
of the better half of them, with the weights of Hansen (2016, https://arxiv.org/abs/1604.00772,
equation 49). PPO stays as it is.

The command prints the returns of PPO-ES and of PPO on Acrobot as JSON,
by environment steps of all members.
"""

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_dist import preset, train
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.envs.source import find
from jaxrl_dist.learners.policies import state_of
from jaxrl_dist.plans import initial
from jaxrl_dist.plans.iteration import make_iteration
from jaxrl_dist.rng import Stream
from jaxrl_dist.settings.members import members
from jaxrl_dist.training.job import make_session


def evolve(
    env: str,
    total: int,
    seed: int,
    size: int = 8,
    iterations: int = 4,
    sigma: float = 0.02,
    **options: Any,
) -> Iterator[tuple[int, float]]:
    """Yields the env steps of all members, and their mean return, after each generation."""
    config = preset(PPO, env, num_devices=1, seed=seed * size, seeds=size, **options)
    sessions = [make_session(member.config, find(env), size) for member in members(config)]
    act, learn = make_iteration(sessions[0].job, size)
    state = initial.states(sessions, {})
    actor = initial.actors(sessions, {})
    streams = (Stream.ACT, Stream.ENV, Stream.LEARN)
    keys = tuple(initial.member_keys(sessions, stream) for stream in streams)
    weights = jnp.maximum(jnp.log((size + 1) / 2) - jnp.log(jnp.arange(1, size + 1)), 0)

    def perturbed(mean: jax.Array, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, (size // 2, *mean.shape))
        return mean[None] + sigma * jnp.concatenate([noise, -noise])  # antithetic pairs

    def iteration(carry: Any, _: Any) -> Any:
        state, actor = carry
        actor, experience, (steps, episodes, _) = act(state, actor, keys, {})
        return (learn(state, experience, keys, {}, ())[0], actor), (steps.sum(), episodes)

    @jax.jit
    def generation(centre: Any, state: Any, actor: Any, key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(centre)
        keys_of_noise = jax.random.split(key, len(leaves))
        params = jax.tree.unflatten(structure, map(perturbed, leaves, keys_of_noise))
        state = state._replace(variables={"": state.variables[""]._replace(params=params)})
        carry, (steps, episodes) = jax.lax.scan(iteration, (state, actor), length=iterations)
        ended, total = (x.reshape(iterations, size, -1).sum((0, 2)) for x in episodes[""][:2])
        score = jnp.where(ended > 0, total / jnp.maximum(ended, 1), -jnp.inf)
        weight = jnp.zeros(size).at[jnp.argsort(-score)].set(weights / weights.sum())
        params = carry[0].variables[""].params
        centre = jax.tree.map(lambda x: jnp.tensordot(weight, x, 1), params)
        return centre, *carry, steps.sum(), total.sum() / ended.sum()

    centre = jax.tree.map(lambda x: x[0], state_of(state, "").variables.params)
    done = 0
    key = jax.random.key(seed)
    while done < total:
        key, draw = jax.random.split(key)
        centre, state, actor, steps, value = generation(centre, state, actor, draw)
        done += int(steps)
        yield done, float(value)


if __name__ == "__main__":
    curves: dict[str, list[Any]] = {"PPO-ES": [], "PPO": []}
    for seed in range(5):
        curves["PPO-ES"].append(list(evolve("Acrobot-v1", 400_000, seed)))
        plain = preset(
            PPO,
            "Acrobot-v1",
            num_devices=1,
            seed=seed,
            total_env_steps=400_000,
            evaluation_episodes=0,
        )
        curves["PPO"].append([(x.env_steps, x.metrics["episode/return"]) for x in train(plain)])
    print(json.dumps(curves).replace("NaN", "null"))
