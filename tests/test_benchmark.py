"""The benchmark's rows, rounds and tables; what it times is timed by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import runs

from jaxrl_dist.commands import request

spec = importlib.util.spec_from_file_location("benchmark", runs.ROOT / "scripts" / "benchmark.py")
assert spec is not None and spec.loader is not None
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


@pytest.mark.parametrize("row", benchmark.ROWS, ids=lambda row: row.name)
def test_each_row_is_a_run_with_the_sizes_of_its_peers(row: Any) -> None:
    asked = request.parse(row.flags.split())
    assert asked is not None
    config, _ = asked.resolved()
    assert row.suites.split() and set(row.suites.split()) <= {"cpu", "gpu", "tpu"}
    for peer, told in row.peers.items():
        fields = next((x for x in told if isinstance(x, dict)), {})
        assert fields.get("num_envs", config.num_envs) == config.num_envs, peer
        for name in ("batch_size", "num_minibatches", "learning_rate"):
            of_ours = getattr(config.algorithm, name, None)
            assert fields.get(name, of_ours) == of_ours, peer
    if "RLlib" in row.peers:
        _, env, num_envs, _, training, model = row.peers["RLlib"]
        assert env == config.env.removeprefix("gymnax:") and num_envs == config.num_envs
        assert model["fcnet_hiddens"] == list(config.algorithm.hidden_sizes)
        assert model["fcnet_activation"] == config.algorithm.activation
        batch = training["train_batch_size_per_learner"]
        if "num_epochs" in training:
            assert batch == config.num_envs * config.rollout_length
            assert batch == config.algorithm.num_minibatches * training["minibatch_size"]
            assert training["num_epochs"] == config.algorithm.num_epochs
        else:
            assert batch == config.algorithm.batch_size
            assert training["training_intensity"] == config.algorithm.replay_ratio * batch


def test_rounds_are_added_and_a_side_that_fails_costs_one_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = iter([100.0, 7.0, 300.0, 9.0, 200.0, 11.0])

    def ours(row: Any, seconds: float) -> dict[str, Any]:
        rate = next(rates)
        return {"rate": rate, "of_bound": 0.9, "binds": "gradient", "share": 0.5, "matmul": 0.4}

    sides = iter(
        [
            {"ceilings": {"memory": (1.5, "GB/s")}},
            {"rate": 50.0},
            {"error": "no such card"},
            {"rate": 100.0},
        ]
    )
    monkeypatch.setattr(benchmark, "_ours", ours)
    monkeypatch.setattr(benchmark, "_run", lambda command: next(sides))
    monkeypatch.setattr(benchmark, "command", lambda peer, told: [peer, *told])
    rows = [
        benchmark.Row("first", "cpu", "ppo", {"peer": ()}),
        benchmark.Row("second", "cpu", "dqn"),
    ]
    for rounds in (1, 3, 3):  # the last call finds all of them made
        benchmark.measure(rows, tmp_path, 60.0, rounds, 1.0, with_peers=True)
    found = json.loads((tmp_path / "results.json").read_text())
    assert [x["jaxrl_dist"]["rate"] for x in found["rows"]["first"]] == [100, 300, 200]
    assert [x["jaxrl_dist"]["rate"] for x in found["rows"]["second"]] == [7, 9, 11]
    cpus = {
        values["cpu"]
        for rounds in found["rows"].values()
        for sides in rounds
        for values in sides.values()
    }
    assert cpus == {benchmark._cpu()}
    assert benchmark.draw(tmp_path) and (tmp_path / "speed.png").stat().st_size > 10_000
    text = (tmp_path / "results.md").read_text()
    assert "| first | 200 (100 to 300) | 0.90 (0.90 to 0.90) | gradient, 50% | 40% |" in text
    assert "| first | peer | 75 (50 to 100) | 2.00 (2.00 to 2.00) |" in text, (
        "the round without the peer's rate counts"
    )
    assert "- memory: 1.5 GB/s" in text
    assert "second: jaxrl_dist 11" in capsys.readouterr().out


def test_rounds_of_another_cpu_are_refused(tmp_path: Path) -> None:
    stored = {"machine": {"cpu": "2 cores of another"}, "rows": {}}
    (tmp_path / "results.json").write_text(json.dumps(stored))
    with pytest.raises(SystemExit, match="2 cores of another"):
        benchmark.measure(benchmark.ROWS, tmp_path, 60.0, 1, 1.0, with_peers=False)
    assert json.loads((tmp_path / "results.json").read_text()) == stored


def test_no_time_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_run", lambda command: {"ceilings": {}})
    benchmark.measure(benchmark.ROWS, tmp_path, -1.0, 5, 1.0, with_peers=False)
    assert not benchmark.draw(tmp_path)
