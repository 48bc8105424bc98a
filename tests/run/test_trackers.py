"""TensorBoard's event files and Weights & Biases: they get what ``run_files.jsonl`` gets."""

from __future__ import annotations

import errno
import io
import json
import resource
import shutil
import signal
import struct
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from PIL import Image
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.errors import ConfigError, EnvWarning, FileWarning
from jaxrl_dist.run import files as run_files
from jaxrl_dist.run import trackers, writing
from jaxrl_dist.run.writing import RunFiles
from jaxrl_dist.training import setup
from jaxrl_dist.types import Report

COMMAND = (
    "pg --env envpool:CartPole-v1 --num-envs 4 --rollout-length 4 --hidden-sizes 4 --num-devices 1 "
    "--report-interval 48 --total-env-steps 110 --evaluation-episodes 2 --evaluation-interval 60 "
    "--evaluation-max-steps 20"
)
"""Its last report is at no interval's end, and is made again where the run is resumed."""


def read_events(path: Path) -> list[Event]:
    """The records of an event file, whose sums have to be right."""
    content, events = path.read_bytes(), []
    while content:
        header, (length,) = content[:8], struct.unpack("<Q", content[:8])
        data, sums = content[12 : 12 + length], content[8:12] + content[12 + length : 16 + length]
        assert struct.unpack("<II", sums) == (masked_crc32c(header), masked_crc32c(data))
        events.append(Event.FromString(data))
        content = content[16 + length :]
    assert events[0].file_version == "brain.Event:2"
    return events


def shown(run_dir: Path) -> dict[int, dict[str, float]]:
    """What TensorBoard shows of a run: what a later session says it will make again does not
    count.
    """
    found: dict[int, dict[str, float]] = {}
    for path in sorted(run_dir.glob("events.out.tfevents.*")):
        for event in read_events(path):
            if event.session_log.status == SessionLog.START:
                found = {step: values for step, values in found.items() if step < event.step}
            for value in event.summary.value:
                assert value.tag not in found.setdefault(event.step, {})
                found[event.step][value.tag] = value.simple_value
    return found


def kept(run_dir: Path) -> dict[int, dict[str, float]]:
    """The same of ``run_files.jsonl``."""
    return {
        line.pop("env_steps"): {name: value for name, value in line.items() if value is not None}
        for line in runs.read_metrics(run_dir)
    }


def sent(run_dir: Path) -> dict[int, dict[str, float]]:
    """The same, with the evaluation at the end, which trackers get, too."""
    lines, numbers = kept(run_dir), runs.read_json(run_dir / "summary.json")["evaluation"]
    lines[max(lines)] |= {f"evaluation/{name}": value for name, value in numbers.items()}
    return lines


def assert_same(one: dict[int, dict[str, float]], other: dict[int, dict[str, float]]) -> None:
    assert one.keys() == other.keys()
    for step, values in one.items():
        assert values == {
            name: pytest.approx(np.float32(value)) for name, value in other[step].items()
        }


def test_the_event_files_say_what_the_metrics_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = runs.train(f"{COMMAND} --tensorboard", tmp_path / "run")
    assert_same(shown(run_dir), sent(run_dir))
    first = shown(run_dir)
    assert any("evaluation/return_mean" in values for values in first.values())
    assert cli.main(["resume", str(run_dir), "--total-env-steps", "220", "--quiet"]) == 0
    again = shown(run_dir)
    assert kept(run_dir) != sent(run_dir), "no evaluation was due at the last step"
    assert_same(again, sent(run_dir))
    assert len(list(run_dir.glob("events.*"))) == 2
    assert max(first) not in again and len(again) > len(first)


def test_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    board = trackers.TensorBoard(tmp_path, None)
    board.write(1, {"a": 1.0})
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            board.write(2, {"x" * 5000: 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    board.write(3, {"a": 3.0})
    board.close()
    assert shown(tmp_path) == {1: {"a": 1.0}, 3: {"a": 3.0}}


def test_a_tracker_that_fails_costs_its_metrics_alone(tmp_path: Path) -> None:
    class Failing:
        def write(self, env_steps: int, values: Any) -> None:
            raise ValueError("broken")

    nothing: Any = None
    files = RunFiles(tmp_path, run_files.lock(str(tmp_path)), {}, None, [Failing()])
    with pytest.warns(FileWarning, match="Failing.*7:"):
        files.write(Report(7, 2, 3, 0.5, {"a": 1.0}, nothing, nothing))
    files.close()
    assert kept(tmp_path)[7]["a"] == 1.0


def test_a_tracker_that_does_not_close_is_a_warning() -> None:
    class Failing:
        def write(self, env_steps: int, values: Any) -> None: ...

        def close(self) -> None:
            raise RuntimeError("broken")

    with pytest.warns(FileWarning, match="Failing did not finish cleanly: broken"):
        trackers.close(Failing())


class FakeRun:
    """Remembers what it is told."""

    def __init__(self, **told: Any) -> None:
        self.told, self.logged, self.finished = told, [], False

    def log(self, values: dict[str, float], step: int) -> None:
        assert not self.finished
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """A package of that name, and the runs that it has begun."""
    begun: list[FakeRun] = []
    fake: Any = types.ModuleType("wandb")
    fake.Error = type("Error", (Exception,), {})

    def init(**told: Any) -> FakeRun:
        if begun and begun[-1].told["name"] == "refused":
            raise fake.Error("No API key configured.\nUse `wandb login`")
        begun.append(FakeRun(**told))
        return begun[-1]

    fake.init = init
    fake.Video = lambda data, format: (data.getvalue(), format)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return begun


FILMED = COMMAND.replace("--evaluation-interval 60", "--video-interval 60")


def films(run_dir: Path) -> dict[int, bytes]:
    """The animated GIFs that TensorBoard shows, by env steps."""
    events = [
        event
        for path in sorted(run_dir.glob("events.out.tfevents.*"))
        for event in read_events(path)
    ]
    images = [
        (event.step, value)
        for event in events
        for value in event.summary.value
        if value.HasField("image")
    ]
    assert all(
        value.tag == "film" and (value.image.width, value.image.height) == (600, 400)
        for _, value in images
    )
    return {step: value.image.encoded_image_string for step, value in images}


@pytest.mark.case  # test_wandb_gets_films
def test_tensorboard_gets_films_and_the_numbers_of_a_run_without(tmp_path: Path) -> None:
    run_dir = runs.train(f"{FILMED} --tensorboard", tmp_path / "run")
    assert runs.untimed(run_dir) == runs.untimed(
        runs.finished(COMMAND.replace("--evaluation-interval 60 ", ""))
    )
    steps = [line["env_steps"] for line in runs.read_metrics(run_dir)]
    shown_at = [
        now for before, now in zip([0, *steps], steps, strict=False) if now // 60 > before // 60
    ]
    assert [*films(run_dir)] == shown_at and shown_at
    for gif in films(run_dir).values():
        with Image.open(io.BytesIO(gif)) as film:
            assert film.format == "GIF" and film.n_frames > 5
    assert (
        cli.main(
            [
                "resume",
                str(run_dir),
                "--total-env-steps",
                "250",
                "--video-interval",
                "90",
                "--quiet",
            ]
        )
        == 0
    )
    assert len(films(run_dir)) > len(shown_at)


def test_what_cannot_be_filmed_is_told_once_and_trains(tmp_path: Path) -> None:
    sizes = {
        "num_envs": 4,
        "rollout_length": 4,
        "hidden_sizes": (4,),
        "num_devices": 1,
        "evaluation_episodes": 0,
    }
    steps = {"report_interval": 16, "total_env_steps": 64, "video_interval": 16}
    config = jaxrl_dist.preset(
        "pg", "envpool:Taxi-v3", **sizes, **steps, tensorboard=True, run_dir=str(tmp_path / "run")
    )
    with pytest.warns(
        EnvWarning, match="there will be no films: envpool:Taxi-v3 cannot be drawn"
    ) as told:
        assert len(list(jaxrl_dist.train(config))) >= 4
    assert len(told) == 1 and not films(tmp_path / "run")


def test_wandb_gets_films(wandb: list[FakeRun], tmp_path: Path) -> None:
    tracker = trackers.WeightsAndBiases(tmp_path, {})
    tracker.film(7, b"GIF89a", (5, 4))
    assert wandb[0].logged == [(7, {"film": (b"GIF89a", "gif")})]


def test_wandb_gets_the_config_and_what_the_metrics_say(
    wandb: list[FakeRun], tmp_path: Path
) -> None:
    run_dir = runs.train(f"{COMMAND} --wandb", tmp_path / "run")
    (run,) = wandb
    config = runs.read_json(run_dir / "config.json")
    del config["versions"]
    assert json.loads(json.dumps(run.told["config"])) == config
    assert (run.told["name"], run.told["dir"]) == ("run", str(run_dir))
    logged: dict[int, dict[str, float]] = {}
    for step, values in run.logged:
        logged.setdefault(step, {}).update(values)
    assert logged == kept(run_dir) and run.finished
    steps = [step for step, _ in run.logged]
    assert steps == sorted(steps)
    assert cli.main(["resume", str(run_dir), "--total-env-steps", "250", "--quiet", "--wandb"]) == 0
    assert wandb[1].told["id"] == run.told["id"] and wandb[1].told["resume"] == "allow"
    assert {step for step, _ in wandb[1].logged} <= kept(run_dir).keys()
    assert runs.read_json(run_dir / "wandb.json") == {"id": run.told["id"]}
    (run_dir / "wandb.json").write_text('{"id": "another"}')  # not by us
    list(jaxrl_dist.resume(run_dir, total_env_steps=400, wandb=True))
    assert wandb[2].told["id"] not in ("another", run.told["id"])


def test_no_file_chooses_to_send_metrics_away(
    wandb: list[FakeRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(runs.finished(COMMAND), tmp_path / "run")
    config = runs.read_json(run_dir / "config.json")
    config["run"]["wandb"] = True
    (run_dir / "config.json").write_text(json.dumps(config))
    (run_dir / "wandb").symlink_to(tmp_path)
    more = ["resume", str(run_dir), "--total-env-steps", "250", "--quiet"]
    for command in (more, ["train", "--config", str(run_dir), "--run-dir", str(tmp_path / "new")]):
        assert cli.main(command) == 2
        assert "choose --wandb or --no-wandb\n" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match="which no file may choose for you; choose wandb or wandb=False"
    ):
        jaxrl_dist.resume(run_dir, total_env_steps=250)
    assert cli.main([*more, "--wandb"]) == 2
    assert "run/wandb is a link" in capsys.readouterr().err
    assert cli.main([*more, "--no-wandb"]) == 0 and not wandb
    asking = setup.prepare(jaxrl_dist.preset("pg", "envpool:CartPole-v1", wandb=True, run_dir="x"))
    assert asking.resume_command() == "jaxrl-dist resume x --wandb"


def test_what_wandb_refuses_is_one_line(
    wandb: list[FakeRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb.append(FakeRun(name="refused"))
    assert (
        cli.main(
            ["train", *COMMAND.split(), "--wandb", "--quiet", "--run-dir", str(tmp_path / "run")]
        )
        == 2
    )
    assert capsys.readouterr().err == (
        "jaxrl-dist: error: --wandb: No API key configured. Use `wandb login`; set WANDB_MODE=offline to write into the run directory only, or use --no-wandb\n"
    )
    wandb.clear()
    runs.train(COMMAND, tmp_path / "run")  # as the directory holds no run


def test_failed_start_leaves_no_lock_and_no_open_file(
    wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed, close = list[None](), trackers.TensorBoard.close
    monkeypatch.setattr(
        trackers.TensorBoard, "close", lambda tracker: closed.append(close(tracker))
    )
    wandb.append(FakeRun(name="refused"))
    both = [
        "train",
        *COMMAND.split(),
        "--tensorboard",
        "--wandb",
        "--quiet",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert cli.main(both) == 2 and len(closed) == 1
    with monkeypatch.context() as full:
        full.setattr(writing, "write_json", no_space)
        alone = ["train", *COMMAND.split(), "--quiet", "--run-dir", str(tmp_path / "run")]
        assert cli.main([*alone, "--seeds", "2"]) == cli.main(alone) == 1
    runs.train(COMMAND, tmp_path / "run")


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_without_the_package_nothing_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert (
        cli.main(
            ["train", *COMMAND.split(), "--wandb", "--quiet", "--run-dir", str(tmp_path / "run")]
        )
        == 2
    )
    assert capsys.readouterr().err == (
        "jaxrl-dist: error: --wandb needs a package that is not installed: pip install wandb\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_without_a_run_directory_there_is_nothing_to_track(name: str) -> None:
    config = jaxrl_dist.preset("pg", "envpool:CartPole-v1", **{name: True})
    with pytest.raises(ConfigError, match=f"{name} does nothing without run_dir"):
        jaxrl_dist.train(config)
