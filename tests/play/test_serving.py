"""A trained policy behind HTTP: what it answers is what the policy does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import parts
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import spaces
from jaxrl_dist.commands import flags, serve
from jaxrl_dist.envs.wire import encoding
from jaxrl_dist.envs.wire.encoding import Format
from jaxrl_dist.envs.wire.spaces import space_from_json
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.play.served import Row, ServedPolicy
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training.algorithm import make_algorithm

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


def untrained(name: str, env: Any, **options: Any) -> jaxrl_dist.Policy:
    config, source = resolved(jaxrl_dist.preset(name, env, hidden_sizes=(8,), **options))
    algorithm = source.spec.bare(make_algorithm(config, source.spec))
    return jaxrl_dist.Policy(config, source, jax.jit(algorithm.init)(jax.random.key(0)))


SPACES = {
    "image": lambda: untrained("ppo", "Breakout-MinAtar"),
    "parts": lambda: untrained("ppo", parts.Grid()),
    "tuple": lambda: untrained("ppo", parts.Both()),
    "actions": lambda: untrained("ppo", parts.Secret()),
    "mask": lambda: untrained("dqn", parts.HostGrid),
    "reward": lambda: untrained("ppo", "CartPole-v1", core="gru", core_inputs="action,reward"),
    "exploration": lambda: untrained("es", "Pendulum-v1"),
}


@pytest.mark.parametrize("name", runs.cases(SPACES, "mask"))
def test_messages_of_every_space_are_answered(name: str) -> None:
    """As the policy answers a batch of one."""
    policy = SPACES[name]()
    served = ServedPolicy(policy, 2)
    about = served.describe()
    space = space_from_json(about["observation"])
    core = policy.initial_core(1)
    memory = None
    for seed in range(3):
        obs = jax.tree.map(lambda part: drawn(part, seed), space)
        for format in Format:
            sent = encoding.pack(spaces.tupled(obs, served.tuples, "observation"), format)
            message = encoding.unpack(sent, format)
            read = encoding.read(served.observation, message, served.tuples, "observation")
            [chosen] = served([Row(read, memory, float(seed))])
            assert encoding.pack(chosen.action, format)
        batch = jax.tree.map(lambda x: x[None], obs)
        action, core = policy(batch, core, reward=np.float32([seed]))
        memory = chosen.core
        assert jax.tree.all(jax.tree.map(lambda x, y: close(x[0], y), action, chosen.action))
    assert served.has_core is about["remembers"] is (name == "reward")
    assert served.reads_reward is (name == "reward")


def drawn(part: spaces.Part, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if isinstance(part, spaces.Box):
        return rng.integers(0, 2, part.shape).astype(part.dtype)
    return spaces.native(part, rng.integers(0, 2, (1, *part.shape), part.dtype))[0]


def test_a_policy_that_plans_with_its_environment_is_refused(
    policy: jaxrl_dist.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "unable", lambda: "it plans with its environment's simulator")
    with pytest.raises(ConfigError, match="simulator; serve the policy of another algorithm"):
        ServedPolicy(policy, 1)


@pytest.mark.case  # test_desk.py::test_a_policy_is_named_where_there_are_several
def test_all_policies_of_a_run_are_served(tmp_path: Path) -> None:
    sizes = runs.TINY.replace("--hidden-sizes 8", "--a.hidden-sizes 8 --b.hidden-sizes 8")
    run_dir = runs.train(
        f"--policy a=ppo:pole_0 --policy b=dqn:pole_1 --env team:CartPoles {sizes} "
        "--a.num-minibatches 2 --a.num-epochs 2",
        tmp_path / "run",
    )
    served = [str(run_dir), "--env", "team:CartPoles", "--max-batch", "1"]
    for more, names in (([], ["a", "b"]), (["--policy", "b"], ["b"])):
        options = flags.parse(serve.Serve, [*served, *more], "")
        policies = serve._policies(options)
        assert list(policies) == names
        about = json.loads(json.dumps(serve._about(options, policies)))
        assert about["policies"]["b"]["algorithm"] == "dqn"
