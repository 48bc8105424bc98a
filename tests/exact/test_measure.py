"""Policies beside the truth, and the command that prints it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
import runs

import jaxrl_dist
from jaxrl_dist import cli, exact, load_policy
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact import heat, solve
from jaxrl_dist.exact.heat import cells
from jaxrl_dist.exact.measuring import Learnt, Measure, Measured, Truth, numbers
from jaxrl_dist.exact.table import Table
from jaxrl_dist.run import checkpoint
from jaxrl_dist.types import Algorithm, Variables

SMALL: dict[str, Any] = {
    "num_devices": 1,
    "num_envs": 4,
    "rollout_length": 8,
    "hidden_sizes": (4,),
    "total_env_steps": 640,
    "report_interval": 64,
    "learning_starts": 64,
    "batch_size": 8,
    "evaluation_episodes": 0,
}
LAKE = f"dqn --env gymnasium:FrozenLake-v1 --plan synchronous {runs.TINY}"


def tabular(q: np.ndarray, temperature: float = 0.0) -> tuple[Algorithm, Variables]:
    """An algorithm that believes in the values ``q [S, A]``, and draws actions by their softmax."""

    def values(variables: Variables, obs: Any) -> Any:
        return variables.params[jnp.argmax(obs, axis=-1)], temperature

    def policy(variables: Variables, obs: Any, core: Any, context: Any) -> Any:
        return jnp.argmax(values(variables, obs)[0], axis=-1), core, {}

    def log_prob(variables: Variables, obs: Any, core: Any, action: Any, context: Any) -> Any:
        q = values(variables, obs)[0]
        return jnp.take_along_axis(
            q - jnp.log(jnp.exp(q).sum(axis=-1, keepdims=True)), action[:, None], axis=-1
        )[:, 0]

    none: Any = None
    variables = Variables(jnp.asarray(q, jnp.float32), ())
    kept = Algorithm(
        lambda key: variables, policy, none, none, none, log_prob=log_prob, action_values=values
    )
    return kept, variables


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth.of(exact.Table.random(np.random.default_rng(0), 6, 3, 0.1), 0.9, 20)


def test_who_believes_in_the_truth_has_no_error(truth: Truth) -> None:
    numbers = Measure(tabular(truth.q)[0], truth.table)(tabular(truth.q)[1], truth)
    assert numbers["regret"] == pytest.approx(0, abs=1e-12) and numbers["agreement"] == 1
    assert numbers["q_error_max"] < 1e-6 and numbers["return"] <= numbers["optimum"]
    assert numbers["value_optimal"] == numbers["value"] > numbers["value_sampled"]


def test_errors_are_those_that_were_made(truth: Truth) -> None:
    wrong = truth.q.copy()
    wrong[2] += [0.5, 0.25, 0.0]
    wrong[3] = -wrong[3]  # the worst action
    numbers = Measure(tabular(wrong)[0], truth.table)(tabular(wrong)[1], truth)
    policy = solve.greedy(truth.table, wrong)
    value = solve.start_value(truth.table, solve.values(truth.table, policy, 0.9))
    assert numbers["value"] == pytest.approx(value) and numbers["regret"] > 0.01
    assert numbers["q_error_max"] == pytest.approx(2 * np.abs(truth.q[3]).max(), rel=1e-5)
    visits = solve.visits(truth.table, policy, 0.9)
    mean = (np.abs(wrong - truth.q) * visits).sum() / visits.sum()
    assert numbers["q_error"] == pytest.approx(mean, rel=1e-4)
    weight = np.exp(wrong) / np.exp(wrong).sum(axis=1, keepdims=True)
    assert numbers["return_sampled"] == pytest.approx(
        solve.episode_return(truth.table, weight, 20), rel=1e-5
    )


def test_what_a_policy_that_never_ends_has_without_a_discount() -> None:
    """It walks on the spot: its value does not exist, the return of its episodes does."""
    table = Table.of_gymnasium(gymnasium.make("FrozenLake-v1", is_slippery=False))
    truth = Truth.of(table, 1.0, 100)
    left = np.eye(4)[np.zeros(11, int)]
    made = numbers(truth, Learnt(left, left, None, 0.0))
    assert (
        made["return"] == 0
        and made["optimum"] == made["value_optimal"] == 1
        and 0 <= made["agreement"] < 1
    )
    assert not made.keys() & {"value", "regret", "agreement_visited", "value_sampled"}


def test_values_with_entropy_are_held_to_soft_ones(truth: Truth) -> None:
    soft = solve.optimal(truth.table, 0.9, temperature=0.3)
    algorithm, variables = tabular(soft, 0.3)
    assert Measure(algorithm, truth.table)(variables, truth)["q_error_max"] < 1e-5
    hard, _ = tabular(soft)
    assert Measure(hard, truth.table)(variables, truth)["q_error_max"] > 0.1


def test_the_map_of_errors_is_that_of_the_printed_number(
    truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, variables = tabular(solve.optimal(truth.table, 0.9, temperature=0.3), 0.3)
    learnt, drawn = Measure(algorithm, truth.table).learnt(variables), dict[str, Any]()
    monkeypatch.setattr(heat, "cells", lambda obs, grid: None)
    monkeypatch.setattr(heat, "figure", lambda maps, cells: drawn.update(maps))
    Measured("x", truth, learnt, numbers(truth, learnt)).figure()
    assert drawn["largest error of Q"][0].max() == numbers(truth, learnt)["q_error_max"] < 1e-5


def test_one_program_measures_members_of_other_hyperparameters(truth: Truth) -> None:
    traces = list[Any]()

    def vary(hyper: Any) -> Algorithm:
        def values(variables: Variables, obs: Any) -> Any:
            traces.append(hyper)
            return variables.params[jnp.argmax(obs, axis=-1)] * hyper["scale"], 0.0

        return dataclasses.replace(algorithm, action_values=values)

    algorithm, variables = tabular(truth.q)
    measure = Measure(algorithm, truth.table, vary)
    for scale in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(
            measure.learnt(variables, {"scale": scale}).q, truth.q * scale, rtol=1e-5
        )
    assert len(traces) == 1
    # without any: as it was made
    np.testing.assert_allclose(measure.learnt(variables).q, truth.q, rtol=1e-5)


def test_policies_that_remember_are_refused(truth: Truth) -> None:
    algorithm, _ = tabular(truth.q)
    memory = dataclasses.replace(
        algorithm,
        initial_core=lambda size: jnp.zeros(size, jnp.int32),
        policy=lambda variables, obs, core, context: (
            jnp.argmax(obs, axis=-1) % 3 + core,
            core,
            {},
        ),
    )
    with pytest.raises(ConfigError, match="has a memory"):
        Measure(memory, truth.table)
    keeps = dataclasses.replace(algorithm, initial_core=memory.initial_core)  # and does not read it
    assert Measure(keeps, truth.table)(tabular(truth.q)[1], truth)["agreement"] == 1


def test_the_command_prints_the_truth_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, picture = str(runs.finished(LAKE)), tmp_path / "heat.png"
    assert cli.main(["exact", run, "-o", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert (
        "11 states, 4 actions; exact" in printed
        and "0.74419" in printed
        and "error of its action values" in printed
    )
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert cli.main(["exact", run, "--json", "--discount", "0.5"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["states"] == 11 and numbers["discount"] == 0.5 and numbers["sampled"] == ""
    assert "q_error" not in numbers  # the network's values are of another discount
    policy = load_policy(run)
    measured = exact.measure(policy)
    assert measured.numbers["return"] == pytest.approx(numbers["return"])
    actions = np.argmax(measured.learnt.greedy, axis=1)
    np.testing.assert_array_equal(policy(measured.truth.table.obs)[0], actions)


def test_the_command_refuses_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake, cart = str(runs.finished(LAKE)), str(runs.finished(runs.CARTPOLE))
    for args, says in {
        "": "which run? Name its directory",
        f"{lake} --grid 4": "--grid takes two numbers",
        f"{cart} --max-states 50": "gymnax:CartPole-v1 has more than 50 states",
        f"{lake} --discount 2": "--discount must be >= 0 and <= 1, not 2",
        f"{lake} --grid 4 4": "--grid does nothing without a map, as in -o heat.png",
        f"{lake} -o {tmp_path}/heat.png --grid 2 2": "--grid 2 2 has 4 cells, but the states reach cell 14",
        f"{lake} -o heat.xyz": "its extension names no format",
        f"{lake} -o heat.pgf": "its extension names no format",
        f"{lake} -o {tmp_path}/none/heat.png": "there is no directory",
    }.items():
        assert cli.main(["exact", *args.split()]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_the_old_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "heat.png"
    out.write_text("old")

    def full(figure: Any, file: Path, **options: Any) -> None:
        Path(file).write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert cli.main(["exact", str(runs.finished(LAKE)), "-o", str(out)]) == 1
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_cells_of_grids() -> None:
    np.testing.assert_array_equal(cells(np.array([0, 5, 15])), [[0, 0], [1, 1], [3, 3]])
    np.testing.assert_array_equal(cells(np.array([0, 13]), (4, 12)), [[0, 0], [1, 1]])
    np.testing.assert_array_equal(
        cells({"observation": np.array([[3, 1, 9]]), "mask": 0}), [[3, 1]]
    )
    np.testing.assert_array_equal(cells(np.eye(6).reshape(6, 2, 3)[4:]), [[1, 1], [1, 2]])
    with pytest.raises(ConfigError, match="grid needs observations that are categories"):
        cells(np.array([[3, 1, 9]]), (4, 12))
    with pytest.raises(ConfigError, match="no map"):
        cells(np.zeros((3, 2), np.float32))


LAKES = [
    "--env gymnasium:FrozenLake-v1 --plan synchronous",
    "--env gymnax:FrozenLake-misc --plan on_device --vary discount=0.9,0.5",
    "--env gymnasium:FrozenLake-v1 --plan asynchronous --num-actors 2",
    "--env gymnasium:FrozenLake-v1 --plan synchronous --seeds 2",
]


@pytest.mark.parametrize("flags", runs.cases(LAKES, LAKES[0]))
def test_runs_report_the_truth(flags: str, tmp_path: Path) -> None:
    run = runs.train(f"dqn {flags} {runs.TINY} --exact --learning-starts 100", tmp_path / "run")
    lines = runs.read_metrics(run)
    assert all(0 <= line["exact/return"] <= line["exact/optimum"] < 0.9 for line in lines)
    members = sorted((run / "members").iterdir()) if (run / "members").is_dir() else [run]
    for member in members:
        last = runs.read_metrics(member)[-1]
        measured = exact.measure(load_policy(member)).numbers
        measured = {name: x for name, x in measured.items() if not name.endswith("_error")}
        assert {name: last[f"exact/{name}"] for name in measured} == pytest.approx(measured)
    assert lines[0]["exact/q_error"] != lines[-1]["exact/q_error"]


def test_a_run_whose_measure_fails_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, measured = iter(range(9)), Measure.__call__

    def failing(self: Measure, *arguments: Any) -> dict[str, float]:
        if next(calls) == 2:
            raise MemoryError("no memory for the linear solve")
        return measured(self, *arguments)

    monkeypatch.setattr(Measure, "__call__", failing)
    config = jaxrl_dist.preset(
        "dqn", "gymnasium:FrozenLake-v1", **SMALL, exact=True, run_dir=str(tmp_path / "run")
    )
    steps = list[int]()
    with pytest.raises(MemoryError) as caught:
        steps.extend(report.env_steps for report in jaxrl_dist.train(config))
    assert len(steps) == 2 and any("continues from" in note for note in caught.value.__notes__)
    (saved,) = checkpoint.saved(tmp_path / "run")
    assert checkpoint.number_of(saved) > steps[-1]


def test_environments_without_a_table_are_refused_at_the_start(tmp_path: Path) -> None:
    command = f"train {runs.CARTPOLE} --exact --run-dir {tmp_path / 'run'}".replace(
        "CartPole-v1", "Pendulum-v1"
    )
    assert cli.main(command.split()) == 2 and not (tmp_path / "run").exists()
