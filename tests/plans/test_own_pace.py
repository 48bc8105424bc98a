"""Several policies, each with a trainer at its own pace."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import team

import jaxrl_dist
from jaxrl_dist import Train
from jaxrl_dist import mesh as meshes
from jaxrl_dist.actors.step import blank_rollout, keys_of
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.learners.policies import state_of
from jaxrl_dist.learners.sharded import compile_relearn, compile_update
from jaxrl_dist.plans.own_pace import trainers, turns
from jaxrl_dist.rng import Stream
from jaxrl_dist.spaces import zeros
from jaxrl_dist.training.setup import prepare

POLICIES = {"b": "long_1", "a": "short", "c": "long_2"}
ALGORITHMS = {
    "b": DQN(
        hidden_sizes=(8,),
        replay_capacity=1024,
        batch_size=8,
        learning_starts=128,
        replay_ratio=1 / 32,
    ),
    "a": PPO(hidden_sizes=(8,), num_minibatches=2, num_epochs=2),
    "c": "random",
}
SIZES: dict[str, Any] = {
    "num_envs": 8, "rollout_length": 8, "total_env_steps": 400, "report_interval": 64, "evaluation_episodes": 0,
    "num_devices": 1, "plan": "own_pace",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*assumes on-policy data")


def config(**fields: Any) -> Train[Any]:
    return Train(ALGORITHMS, env=team.Unlike(), policies=POLICIES, **{**SIZES, **fields})


def test_no_policy_waits_for_another() -> None:
    """DQN learns from its memory while there is no rollout, once two have filled it;
    PPO learns from rollouts only.
    """
    session = prepare(config()).session
    job = session.job
    state, begun = (
        session.initial_state(),
        {name: state_of(session.initial_state(), name) for name in POLICIES},
    )
    blank = {
        name: blank_rollout(
            job.algorithm[name], begun[name].variables, zeros(spec.observation, 8), (), 8
        )
        for name, spec in job.source.spec.policies.items()
    }
    rollouts = [
        {
            name: x._replace(valid=~x.valid, reward=x.reward + float(k), obs=x.obs + 0.1 * k)
            for name, x in blank.items()
        }
        for k in range(3)
    ]
    placed = [meshes.put(rollout, job.mesh, meshes.REPLICATED) for rollout in rollouts]
    rounds = [None, [placed[0]], None, [placed[1]], None, None, [placed[2]], None]
    made, more = [], []
    for turn in turns(trainers(session), state, iter(rounds)):
        made.append((*turn.metrics, turn.counts[next(iter(turn.counts))], turn.last))
        more.append(turn.more)
        last = turn.state
    taken = [("a", True, False), ("c", False, True)]
    warming, learning, alone = ("b", False, False), ("b", True, False), ("b", True, False)
    assert made == [warming, *taken, learning, *taken, alone, alone, learning, *taken, alone]
    assert more == [False] * 3 + [True] * 9
    assert int(last.iteration) == 3 and int(last.updates["c"]) == 0
    assert last.env_step == {"b": 3 * 64, "a": 3 * 64, "c": 0}  # of rollouts learned from

    learn, again = (
        keys_of(job.algorithm, session.key(stream)) for stream in (Stream.LEARN, Stream.LEARN_MORE)
    )
    for name, steps in {"a": [0, 1, 2], "b": [0, 1, None, None, 2, None]}.items():
        learner, own = dict(job.learner.parts)[name], begun[name]
        update = compile_update(learner, job.mesh)
        relearn = compile_relearn(learner, job.mesh) if name == "b" else None
        for k in steps:
            if k is None:
                assert relearn is not None
                own, _ = relearn(own, again[name])
            else:
                own, _ = update(own, placed[k][name], learn[name])
        jax.tree.map(np.testing.assert_array_equal, state_of(last, name), own)


@pytest.mark.case  # test_no_policy_waits_for_another
def test_a_run_trains_and_is_resumed(tmp_path: Path) -> None:
    run = config(run_dir=str(tmp_path / "run"))
    first = list(itertools.islice(jaxrl_dist.train(run), 2))
    *_, last = jaxrl_dist.resume(tmp_path / "run", env=team.Unlike())
    assert last.env_steps >= 400 > first[-1].env_steps
    assert (
        last.metrics["a/updates"] == 4 * last.iteration
        and last.metrics["b/updates"] >= 2 * last.iteration - 4
    )
    assert (
        last.updates == last.metrics["a/updates"] + last.metrics["b/updates"]
        and last.metrics["c/updates"] == 0
    )
    assert last.metrics["a/loss/policy"] is not None and last.metrics["b/loss/q"] is not None
