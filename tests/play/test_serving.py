"""A trained policy behind HTTP: what it answers is what the policy does."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist.play.served import Row, ServedPolicy

TOKEN = "a-token-of-some-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
RUNS = {"discrete": runs.CARTPOLE, "continuous": runs.ENVPOOL, "recurrent": runs.RECURRENT}


@pytest.fixture(params=runs.cases(RUNS, "discrete", "recurrent"), scope="module")
def policy(request: pytest.FixtureRequest) -> jaxrl_dist.Policy:
    return jaxrl_dist.load_policy(runs.finished(RUNS[request.param]))


@pytest.fixture(scope="module")
def served(policy: jaxrl_dist.Policy) -> ServedPolicy:
    return ServedPolicy(policy, 8)


def observations(policy: jaxrl_dist.Policy, count: int) -> np.ndarray:
    shape = (count, *policy.source.spec.observation.shape)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=1e-5, atol=1e-6))


def test_a_batch_chooses_as_each_row_alone(policy: jaxrl_dist.Policy, served: ServedPolicy) -> None:
    """With as many rows as a program has, and with fewer."""
    rows = [Row(obs) for obs in observations(policy, 8)]
    alone = [served([row])[0] for row in rows]
    cores = [Row(row.obs, chosen.core) for row, chosen in zip(rows, alone, strict=True)]
    for size in (1, 2, 3, 5, 8):
        for batch, others in ((rows, alone), (cores, [served([row])[0] for row in cores])):
            for chosen, other in zip(served(batch[:size]), others, strict=False):
                assert close(chosen.action, other.action)
                assert jax.tree.all(jax.tree.map(close, chosen.core, other.core))


def test_it_acts_as_the_policy_does(policy: jaxrl_dist.Policy, served: ServedPolicy) -> None:
    core = None
    memory = None
    for obs in observations(policy, 6):
        action, core = policy(obs[None], core)
        [chosen] = served([Row(obs, memory)])
        memory = chosen.core
        assert close(chosen.action, action[0]) and chosen.action.dtype == action.dtype


def test_samples_depend_on_seed_episode_and_step_alone(policy: jaxrl_dist.Policy) -> None:
    obs = observations(policy, 4)
    one, other = (ServedPolicy(policy, 4, sampled=True, seed=seed) for seed in (0, 1))
    rows = [Row(obs[0], draw=(episode, 7)) for episode in range(4)]
    together = [chosen.extras["log_prob"] for chosen in one(rows)]
    alone = [one([row])[0].extras["log_prob"] for row in rows]
    assert np.allclose(together, alone, rtol=1e-4, atol=1e-5)
    many = [one([Row(obs[0], draw=(0, step))])[0].action for step in range(40)]
    elsewhere = [other([Row(obs[0], draw=(0, step))])[0].action for step in range(40)]
    assert len(np.unique(many)) > 1 and not np.array_equal(many, elsewhere)
