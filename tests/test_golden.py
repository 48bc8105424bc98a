"""``scripts/golden.py``: it must see what differs between two recordings, however little."""

from __future__ import annotations

import json
import pathlib
import runpy
import shutil

import numpy as np
import pytest

from jaxrl_dist.algorithms import ALGORITHMS, PRESETS

GOLDEN = runpy.run_path(str(pathlib.Path(__file__).parent.parent / "scripts" / "golden.py"))
REPORTS = [
    {"env_steps": 64 * (i + 1), "loss/total": 0.1 + i, "episode/return": None} for i in range(2)
]
VARIABLES = {
    "params/kernel": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "stats/count": np.int32(3),
}


def write_run(folder, reports=REPORTS, first=VARIABLES, final=VARIABLES):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))
    np.savez(folder / "first.npz", **first)
    np.savez(folder / "final.npz", **final)


def write_manifest(directory, **entries):
    runs = {
        name: {"command": "jaxrl-dist train pg", **entries.get(name, {})} for name in ("one", "two")
    }
    (directory / "manifest.json").write_text(json.dumps({"versions": {"jax": "1"}, "runs": runs}))


@pytest.fixture
def recordings(tmp_path):
    """Two that are equal."""
    a, b = tmp_path / "a", tmp_path / "b"
    for name in ("one", "two"):
        write_run(a / name)
    write_manifest(a)
    shutil.copytree(a, b)
    return a, b


def compare(recordings, *flags):
    return GOLDEN["main"](["compare", *map(str, recordings), *flags])


def flipped(array):
    """With the last bit of its last number flipped."""
    array = array.copy()
    array.view(np.uint32)[-1, -1] ^= 1
    return array


def test_equal_recordings_agree(recordings, capsys):
    assert compare(recordings) == 0
    assert capsys.readouterr().out == "one: equal\ntwo: equal\n2 of 2 runs agree\n"


def test_a_flipped_bit_is_seen(recordings, capsys):
    write_run(
        recordings[1] / "two",
        final={**VARIABLES, "params/kernel": flipped(VARIABLES["params/kernel"])},
    )
    assert compare(recordings) == 1
    out = capsys.readouterr().out
    assert (
        "one: equal\n" in out
        and "two: DIFFERS, first at final variables, params/kernel (array [2, 3])" in out
    )
    assert "first report 0, final variables 1.2e-07\n" in out
    assert compare(recordings, "--tolerance", "1e-6") == compare(recordings, "--only", "^one") == 0
    assert compare(recordings, "--first-update") == 0
    assert compare(recordings, "--tolerance", "1e-8") == 1


@pytest.mark.parametrize(
    "number, change, first_update, text",
    [
        (
            1,
            {"loss/total": 1.1000000000000003},
            0,
            "report 2, loss/total (1.1 against 1.1000000000000003)",
        ),
        (0, {"episode/return": 0.0}, 1, "report 1, episode/return (float64[0] against float64[])"),
        (0, {"loss/new": 1.0}, 1, "report 1, loss/new (only in B)"),
    ],
)
def test_another_metric_is_seen(recordings, capsys, number, change, first_update, text):
    reports = [{**report, **(change if i == number else {})} for i, report in enumerate(REPORTS)]
    write_run(recordings[1] / "one", reports)
    assert compare(recordings) == 1
    assert f"one: DIFFERS, first at {text}; relative, " in capsys.readouterr().out
    assert compare(recordings, "--first-update") == first_update


@pytest.mark.parametrize("report", [REPORTS[:1], [*REPORTS, REPORTS[1]]], ids=["fewer", "more"])
def test_another_number_of_reports_is_seen(recordings, report):
    write_run(recordings[1] / "one", report)
    assert compare(recordings, "--tolerance", "1") == 1


def test_signs_types_and_nans_are_seen(recordings):
    kernel = VARIABLES["params/kernel"]
    for before, after in [
        (0 * kernel, -0.0 * abs(kernel)),
        (kernel, kernel.astype(float)),
        (kernel, kernel * np.nan),
    ]:
        write_run(recordings[0] / "one", first={"params/kernel": before})
        write_run(recordings[1] / "one", first={"params/kernel": after})
        assert compare(recordings, "--first-update") == 1
        write_run(recordings[0] / "one", first={"params/kernel": after})
        assert compare(recordings) == 0


def test_a_missing_run_is_seen(recordings, capsys):
    shutil.rmtree(recordings[1] / "two")
    assert compare(recordings) == 1
    assert "two: FAILED, " in capsys.readouterr().out
    write_manifest(recordings[1], two={"error": "ConfigError: no"})
    assert compare(recordings) == 1
    assert "two: FAILED, recorded against ConfigError: no\n" in capsys.readouterr().out
    manifest = json.loads((recordings[1] / "manifest.json").read_text())
    del manifest["runs"]["two"]
    (recordings[1] / "manifest.json").write_text(json.dumps(manifest))
    assert (
        compare(recordings)
        == compare(recordings[::-1])
        == compare(recordings, "--only", "neither")
        == 1
    )
    assert "two: FAILED, recorded against not recorded\n" in capsys.readouterr().out


def test_another_command_is_seen(recordings):
    write_manifest(recordings[1], one={"command": "jaxrl-dist train ppo"})
    assert compare(recordings) == 1


def test_the_runs_cover_every_algorithm_under_every_plan():
    runs = GOLDEN["RUNS"]
    assert len({run.name for run in runs}) == len(runs)
    covered = {(run.algorithm, run.plan) for run in runs if isinstance(run, GOLDEN["Run"])}
    episodic = {"es", "ars"}  # which actor threads do not serve
    plans = "on_device", "synchronous", "asynchronous"
    wanted = {(name, plan) for name in ALGORITHMS for plan in plans[: 2 if name in episodic else 3]}
    assert covered >= wanted - {("alphazero", "synchronous")}  # which has no simulator
    assert covered >= {
        (name, more["plan"])
        for name, (_, more) in PRESETS.items()
        if more.get("plan") not in (None, "offline")
    }


def test_studies_keep_what_records_and_commands_say():
    commands = [run.command for run in GOLDEN["RUNS"] if isinstance(run, GOLDEN["Session"])]
    offline = " ".join(x for x in commands if "--data DATA" in x)
    assert all(
        f"train {name} --data" in offline for name in ("dqn", "iql", "marwil", "bc", "td3+bc")
    )
    printed = " ".join(commands)
    assert all(
        f"jaxrl-dist {name} RUN/played" in printed
        for name in ("evaluate", "match", "estimate", "exact")
    )
    assert "--plan own_pace" in printed and "--data-share" in printed


def test_numbers_are_named_by_their_place_in_json():
    printed = {"a": [1, {"b": 2.5, "time_s": 9}], "text": "x", "nothing": None}
    assert GOLDEN["numbers"](printed, "exact") == {"exact/a/0": 1, "exact/a/1/b": 2.5}


def test_a_run_has_each_flag_once_as_a_command_and_as_fields():
    run = GOLDEN["Run"](
        "dqn",
        "gradients",
        "E",
        "8",
        "--core gru --no-noisy --batch-size 32 --replay-ratio 0.5 --dueling",
    )
    flags = run.command.split()
    assert flags[:5] == ["JAX_NUM_CPU_DEVICES=8", "jaxrl-dist", "train", "dqn", "--env"]
    assert flags.count("--batch-size") == 1 and flags[flags.index("--batch-size") + 1] == "32"
    assert (
        GOLDEN["fields"](run.settings).items()
        >= {
            **{
                "plan": "gradients",
                "num_devices": 8,
                "hidden_sizes": (16,),
                "num_actors": 1,
                "batch_size": 32,
            },
            **{"core": "gru", "noisy": False, "replay_ratio": 0.5, "dueling": True},
        }.items()
    )


def test_a_run_is_recorded_and_one_that_fails_too(tmp_path, monkeypatch, capsys):
    run = GOLDEN["Run"]
    runs = [
        run("pg", "on_device", "gymnax:Missing-v0", "1"),
        run("pg", "on_device", "gymnax:CartPole-v1", "1"),
    ]
    monkeypatch.setitem(GOLDEN["record"].__globals__, "RUNS", runs)
    there = tmp_path / "there"
    assert GOLDEN["main"](["record", str(there)]) == 1
    manifest = json.loads((there / "manifest.json").read_text())
    failed, made = (manifest["runs"][run.name] for run in runs)
    assert failed["error"].startswith("ConfigError: ") and "error" not in made
    lines = [
        json.loads(line)
        for line in (there / runs[1].name / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1)) and len(
        lines
    ) >= 5
    assert not any("time" in name for line in lines for name in line)
    places = GOLDEN["places"](there / runs[1].name, False)
    names = {
        place.split(", ")[1] for place in places if place.startswith("first variables, params/")
    }
    assert names
    assert any(
        (places[f"first variables, {name}"] != places[f"final variables, {name}"]).any()
        for name in names
    )
    assert compare((there, there), "--only", "CartPole") == 0 and compare((there, there)) == 1
    with pytest.raises(SystemExit, match="2"):
        GOLDEN["main"](["record", str(there)])
    assert "File exists" in capsys.readouterr().err


@pytest.mark.case  # test_a_run_is_recorded_and_one_that_fails_too
def test_session_keeps_reports_and_variables_of_each_run(tmp_path, monkeypatch):
    line = "seeds gymnax:CartPole-v1 1 pg --seeds 2 then resume --total-env-steps 400"
    monkeypatch.setitem(GOLDEN["record"].__globals__, "RUNS", [GOLDEN["session"](line)])
    assert GOLDEN["main"](["record", str(tmp_path / "recorded")]) == 0
    places = GOLDEN["places"](tmp_path / "recorded" / "session-seeds", False)
    steps = [float(x) for place, x in places.items() if place.endswith(" members/001: env_steps")]
    assert steps == sorted(steps) and steps[-2] >= 300 and 400 <= steps[-1] < 464
    variables = {place.split(": ")[0] for place in places if ": params/" in place}
    assert variables == {"final variables, members/000", "final variables, members/001"}
