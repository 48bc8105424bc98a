"""Data sets of what a policy experiences."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.actors.step import reads_of_core
from jaxrl_dist.data.dataset import Dataset
from jaxrl_dist.types import Context


@pytest.fixture(scope="module")
def policy() -> jaxrl_dist.Policy:
    return jaxrl_dist.load_policy(runs.finished(f"ppo --env CartPole-v1 {runs.TINY}"))


def test_the_probabilities_are_those_of_the_mixture(policy: jaxrl_dist.Policy) -> None:
    data = jaxrl_dist.record(policy, 200, num_envs=4, random_share=0.25)
    assert data.steps >= 200 and not (data.truncated & (data.reward == 0)).any()
    obs = data.obs[data.valid]
    core = policy.initial_core(len(obs))
    context = Context(jnp.arange(1))
    logits = [
        jax.jit(policy.algorithm.log_prob)(
            policy.variables, jnp.asarray(obs), core, jnp.full(len(obs), a), context
        )
        for a in range(2)
    ]
    own = np.exp(np.stack(logits, axis=1).astype(np.float64))
    np.testing.assert_allclose(own.sum(axis=1), 1, rtol=1e-5)
    action, rows = data.action[data.valid], np.arange(len(obs))
    expected = 0.75 * own[rows, action] + 0.25 * 0.5
    assert data.log_prob is not None
    np.testing.assert_allclose(np.exp(data.log_prob[data.valid]), expected, rtol=1e-5)


@pytest.mark.parametrize("greedy", [False, True])
def test_random_actions_are_legal_and_equally_probable(
    greedy: bool,
) -> None:
    own = jaxrl_dist.load_policy(
        runs.finished(f"ppo --env gymnasium:Taxi-v4 --plan synchronous {runs.TINY}")
    )
    data = jaxrl_dist.record(own, 100, num_envs=4, random_share=0.5, greedy=greedy)
    obs = jax.tree.map(lambda x: x[data.valid], data.obs)
    legal, action, rows = obs["mask"].astype(bool), data.action[data.valid], np.arange(data.steps)
    assert legal[rows, action].all() and not legal.all()
    none = own.initial_core(data.steps)
    if greedy:
        given = (
            jax.jit(own.algorithm.policy)(own.variables, obs, none, Context(None, jnp.zeros(())))[0]
            == action
        )
    else:
        given = np.exp(
            jax.jit(own.algorithm.log_prob)(
                own.variables, obs, none, action, Context(None, jnp.zeros(()))
            )
        )
    assert data.log_prob is not None
    np.testing.assert_allclose(
        np.exp(data.log_prob[data.valid]),
        0.5 * np.asarray(given) + 0.5 / legal.sum(axis=1),
        rtol=1e-4,
    )


LASTING = {
    f"ppo --env Pendulum-v1 {runs.TINY} --noise-correlation 0.5": False,
    f"ppo --env CartPole-v1 {runs.TINY} --scale-rewards": True,
}


@pytest.mark.parametrize("flags", LASTING)
def test_probabilities_are_known_if_inputs_are_the_same(flags: str) -> None:
    """Correlated noise is part of the policy's state, as is the return that scales rewards;
    only the first one acts.
    """
    own, known = jaxrl_dist.load_policy(runs.finished(flags)), LASTING[flags]
    assert jax.tree.leaves(own.initial_core(1))
    drawn, given = reads_of_core(own.algorithm, own.source.spec, own.variables)
    assert bool(drawn) != known and not given
    data = jaxrl_dist.record(own, 20, num_envs=2)
    assert (data.log_prob is not None) == known
    if known:
        jaxrl_dist.estimate(own, data, sampled=True, updates=1, refits=2, hidden_sizes=(4,))


def test_whole_episodes_are_recorded_as_they_are_played(
    policy: jaxrl_dist.Policy,
) -> None:
    data = jaxrl_dist.record(policy, 100, num_envs=4, greedy=True)
    assert data.log_prob is None and data.about["behaviour"]["deterministic"]
    assert data.lengths.tolist() == data.returns.tolist()  # each step of CartPole pays 1
    actions, _ = policy(data.obs[data.valid])
    np.testing.assert_array_equal(actions, data.action[data.valid])
    again = jaxrl_dist.record(policy, 100, num_envs=4, greedy=True)
    for x, y in zip(
        jax.tree.leaves((data.obs, data.action)),
        jax.tree.leaves((again.obs, again.action)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


def test_the_commands_record_join_and_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs.finished(f"ppo --env CartPole-v1 {runs.TINY}"))
    out = str(tmp_path / "new" / "data")
    assert cli.main(["record", run, "-o", out, "--steps", "100", "--num-envs", "4"]) == 0
    data = Dataset.load(out)
    assert f"{data.steps:,} steps in {len(data.returns)} episodes" in capsys.readouterr().out
    best = str(tmp_path / "best")
    assert cli.main(["data", out, out, "--best", "0.5", "-o", best]) == 0
    order = np.sort(np.tile(data.returns, 2))[::-1]
    assert sorted(Dataset.load(best).returns, reverse=True) == list(order[: len(order) // 2])
    assert (
        cli.main(["data", out, "-o", str(tmp_path / "h.png")]) == 0
        and (tmp_path / "h.png").stat().st_size > 1000
    )
    capsys.readouterr()
    refused = {
        ("record", run): "where to? As in",
        ("record", run, "-o", out): f"{out} exists",
        ("record", run, "-o", "x", "--replay"): "--replay needs a run with replay",
        ("record", run, "-o", "x", "--replay", "--greedy"): "--greedy does nothing without playing",
        ("data", str(tmp_path)): "is not a data set",
        ("data",): "which data set?",
    }
    for words, message in refused.items():
        assert cli.main(list(words)) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_core_reads_the_actions_that_were_taken() -> None:
    """Half of them are random; the core's next input is then not what the policy has chosen."""
    own = jaxrl_dist.load_policy(
        runs.finished(
            f"pg --env CartPole-v1 {runs.TINY} --core gru --core-size 4 --core-inputs action"
        )
    )
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    policy = own.algorithm.policy

    def watched(variables: Any, obs: Any, core: Any, context: Context) -> Any:
        (read,) = (
            x
            for path, x in jax.tree.leaves_with_path(core)
            if "action" in jax.tree_util.keystr(path)
        )
        jax.debug.callback(
            lambda obs, read: seen.append((np.array(obs), np.array(read))), obs, read
        )
        return policy(variables, obs, core, context)

    watching = copy.copy(own)
    watching.algorithm = dataclasses.replace(own.algorithm, policy=watched)
    data = jaxrl_dist.record(watching, 200, num_envs=1, random_share=0.5)
    jax.effects_barrier()
    read = {obs.tobytes(): action[0] for obs, action in seen}
    begins = np.append(True, ~data.valid[:-1])
    for at in np.flatnonzero(data.valid):
        wanted = np.zeros(2) if begins[at] else np.eye(2)[data.action[at - 1]]
        np.testing.assert_array_equal(read[data.obs[at : at + 1].tobytes()], wanted)


def test_a_memory_is_stored_with_the_actions_that_were_executed(tmp_path: Path) -> None:
    unbounded = f"marwil --env Pendulum-v1 {runs.TINY} --initial-std 3 --run-dir {tmp_path / 'run'}"
    assert cli.main(["train", *unbounded.split(), "--checkpoint-replay"]) == 0
    assert (
        cli.main(["record", str(tmp_path / "run"), "--replay", "-o", str(tmp_path / "data")]) == 0
    )
    action = Dataset.load(tmp_path / "data").action
    assert np.abs(action).max() == 2
