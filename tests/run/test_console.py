"""What a run prints: a table of its reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_dist import cli
from jaxrl_dist.run import console, table
from jaxrl_dist.types import Report

METRICS = {
    "episode/recent_return": 171.5,
    "episode/recent_length": 171.0,
    "loss/total": 11.1659,
    "policy/approx_kl": 0.0081,
    "gradient/norm": 12.9,
    "time/env_steps_per_second": 200.0,
}


def report(env_steps: int, evaluation: Any = None, **metrics: float | None) -> Report:
    values: dict[str, Any] = dict.fromkeys(Report.__dataclass_fields__)
    values |= {
        "env_steps": env_steps,
        "metrics": {**METRICS, **metrics},
        "evaluation": evaluation,
        "members": None,
        "clock": "env_steps",
    }
    return Report(**values)


def shown(reports: list[Report], capsys: pytest.CaptureFixture[str], **options: bool) -> list[str]:
    display = console.Display(2, **options)
    assert list(display.watch(reports, 10_000)) == reports
    return capsys.readouterr().out.splitlines()


def test_reports_are_rows_of_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "ROW_SECONDS", -1.0)
    first, second = (
        report(4_000),
        report(10_000, {"return_mean": 480.25}, **{"episode/recent_return": None}),
    )
    lines = shown([first, second], capsys)
    assert lines[0] == "compiling" and len(lines) == 4
    assert lines[1].split() == [
        "env",
        "steps",
        "training",
        "return",
        "length",
        "loss",
        "KL",
        "steps/s",
        "left",
    ]
    assert lines[2].split() == ["4,000", "171.5", "171", "11.17", "0.0081", "200", "30", "s"]
    assert lines[3].split() == [
        "10,000",
        "-",
        "171",
        "11.17",
        "0.0081",
        "200",
        "0",
        "s",
        "evaluation",
        "480.2",
    ]
    ends = [
        [len(line[: line.index(cell) + len(cell)]) for cell in cells]
        for line, cells in (
            (lines[1], ("env steps", "training return", "KL")),
            (lines[2], ("4,000", "171.5", "0.0081")),
        )
    ]
    assert ends[0] == ends[1], "titles end where their numbers do"


def test_an_interrupt_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def reports() -> Iterator[Report]:
        try:
            yield report(4_000)
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        list(console.Display(2).watch(reports(), 10_000))
    assert (
        closed
        and "jaxrl_dist.resume(run_dir) continues it" in capsys.readouterr().out.splitlines()[-1]
    )


def test_each_of_several_policies_has_its_return(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "ROW_SECONDS", -1.0)
    returns = {"prey/episode/recent_return": -3.25, "hunter/episode/recent_return": 7.0}
    own = {"episodes": 2, "return_mean": 4.5, "return_std": 1.0, "cut": 0}
    evaluation = {
        **own,
        **{f"{policy}/{name}": x for policy in ("prey", "hunter") for name, x in own.items()},
    }
    evaluation["hunter/return_mean"] = 6.5
    lines = shown(
        [dataclasses.replace(report(10_000, evaluation, **returns), agent_steps=29_000)], capsys
    )
    head = "env steps agent steps prey return hunter return length loss KL steps/s left"
    assert " ".join(lines[1].split()) == head, "without the mean over all agents"
    assert lines[2].split()[:5] == ["10,000", "29,000", "-3.25", "7", "171"]
    assert lines[2].endswith("evaluation prey 4.5, hunter 6.5")
    about = "(mean and standard deviation of 2 greedy episodes)"
    assert console.evaluation_lines(evaluation).splitlines() == [
        f"prey: return 4.5 +- 1 {about}",
        f"hunter: return 6.5 +- 1 {about}",
    ]
    assert console.evaluation_lines(own) == f"return 4.5 +- 1 {about}"
    several = {**own, "episodes": 100, "members": 5, "members_return_std": 3.25, "cut": 2}
    assert console.evaluation_lines(several) == (
        "return 4.5 +- 1 (mean and standard deviation of 100 greedy episodes, 2 of them cut before their end; 3.25 between the means of the 5 members)"
    )
    single = {**own, "episodes": 1, "return_std": 0.0, "sampled": True, "info/episodes": 2.0}
    assert console.evaluation_lines(single) == "return 4.5 (1 sampled episode), info/episodes 2"
    assert console.evaluation_lines({**single, "cut": 1}).startswith(
        "return 4.5 (1 sampled episode, cut before its end)"
    )
    none = {"episodes": 0, "cut": 0}
    assert shown([report(10_000, none)], capsys)[-1].endswith("evaluation without an episode")
    assert console.evaluation_lines(none) == "no episode has started"


def test_a_policy_against_a_pool_shows_its_rating(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    returns = {"new/episode/recent_return": 0.5, "old/episode/recent_return": -0.5}
    rated, unrated = (
        report(4_000, **returns, **{"new/elo": 1512.25}),
        report(8_000, **dict.fromkeys(returns)),
    )
    lines = shown([rated], capsys)
    assert " ".join(lines[1].split()).startswith("env steps new return old return new elo length")
    assert lines[2].split()[1:4] == ["0.5", "-0.5", "1512"]
    display = console.Display(2)
    assert "  new return 0.5, old return -0.5, new elo 1512" in display._status(rated)
    assert "  new return 0.5, old return -0.5, new elo 1512" in display._status(unrated), (
        "until an episode ends"
    )
    assert "training return" not in display._status(unrated)


def test_a_metric_of_the_info_has_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"info/won": 0.75, "info/task/score:sum": None, "info/length": 3.0}
    lines = shown([report(4_000, **asked)], capsys)
    head = "env steps training return won task/score:sum info/length length loss KL steps/s left"
    assert " ".join(lines[1].split()) == head
    assert lines[2].split()[1:6] == ["171.5", "0.75", "-", "3", "171"]
    returns = {"prey/episode/recent_return": -3.25, "hunter/episode/recent_return": 7.0}
    each = {"prey/info/won": 0.25, "hunter/info/won": 0.5}
    lines = shown([report(4_000, **returns, **each, **{"info/won": 0.375})], capsys)
    head = "env steps prey return hunter return prey won hunter won length loss KL steps/s left"
    assert " ".join(lines[1].split()) == head and lines[2].split()[1:5] == [
        "-3.25",
        "7",
        "0.25",
        "0.5",
    ]


def test_a_long_compilation_has_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without bars; a compilation of this display's threads or of others."""

    def reports(seconds: float) -> Iterator[Report]:
        jax.monitoring.record_event_duration_secs(console._COMPILED, seconds)
        yield report(10_000)

    list(console.Display(2).watch(reports(95.0), 10_000))
    jax.monitoring.record_event_duration_secs(console._COMPILED, 95.0)  # after the run
    assert capsys.readouterr().out.splitlines()[:2] == [
        "compiling",
        "compiled a program in 1.6 min",
    ]
    for seconds, quiet in ((0.5, False), (95.0, True)):
        list(console.Display(2, quiet=quiet).watch(reports(seconds), 10_000))
    assert "compiled a program" not in capsys.readouterr().out
    monkeypatch.setattr(console, "COMPILE_SECONDS", 0.0)

    def compiles() -> Iterator[Report]:
        jax.jit(lambda x: x * 3.0 + 1.0).lower(np.float32(2.0)).compile()
        yield report(10_000)

    list(console.Display(2).watch(compiles(), 10_000))
    assert "compiled a program in 0 s" in capsys.readouterr().out.splitlines(), (
        "the event of this version of JAX"
    )


def test_a_table_of_members_says_that_it_counts_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown([dataclasses.replace(report(10_000), members=(report(5_000),) * 2)], capsys)
    assert (
        lines[1].startswith("2 members' env steps  training return")
        and lines[2].split()[0] == "10,000"
    )


def test_the_save_of_members_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for episodes in (0, 5):
        console.Display(episodes).saving(16)
    assert capsys.readouterr().out == "saving: 16 members\nsaving and evaluating: 16 members\n"


def test_the_head_comes_again_and_rows_do_not_come_too_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [report(steps) for steps in range(1, 41)]
    assert len(shown(reports, capsys)) == 3, "the first report and nothing within two seconds"
    monkeypatch.setattr(console, "ROW_SECONDS", -1.0)
    lines = shown(reports, capsys)
    assert len(lines) == 43 and lines[-1].split()[0] == "40"
    assert [number for number, line in enumerate(lines) if "steps/s" in line] == [
        1,
        console.HEAD_ROWS + 2,
    ]


def test_every_evaluation_has_a_row_and_no_row_repeats_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "ROW_SECONDS", 1e9)
    played = {"return_mean": 480.25}
    assert len(shown([report(1), report(2), report(3, played), report(4)], capsys)) == 4, (
        "rows of 1 and 3"
    )
    monkeypatch.setattr(console, "ROW_SECONDS", -1.0)
    lines = shown([report(1), report(2, played), report(3), report(10_000)], capsys)
    ends = [line.partition("s  evaluation ")[2] for line in lines[2:]]
    assert ends == ["", "480.2", "-", "-"], "a run has evaluations once it has had one"


def test_verbose_shows_every_metric_and_quiet_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [report(1), report(2)]
    lines = shown(reports, capsys, verbose=True)
    assert len(lines) == 6 and all(f"{name} " in lines[3] for name in METRICS)
    assert shown(reports, capsys, quiet=True) == []
    assert cli.main(["train", "ppo", "--env", "CartPole-v1", "--quiet", "--verbose"]) == 2
    assert "--verbose contradicts --quiet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "seconds, text", [(None, "-"), (0.4, "0 s"), (59, "59 s"), (90, "1.5 min"), (9000, "2.5 h")]
)
def test_times_have_their_largest_unit(seconds: float | None, text: str) -> None:
    assert table.duration(seconds) == text
