"""Evaluations while a run trains, and what cuts an episode that would never end."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own
import pytest
import runs
import team

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.actors.evaluate import Evaluator, evaluation_seed
from jaxrl_dist.actors.played import Episodes
from jaxrl_dist.checks import flag
from jaxrl_dist.commands.plot import read_curve
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError, EnvError, EnvWarning
from jaxrl_dist.run import checkpoint
from jaxrl_dist.run.console import evaluation_lines
from jaxrl_dist.settings.resolve import resolved
from jaxrl_dist.training import setup
from jaxrl_dist.training.algorithm import make_algorithm
from jaxrl_dist.types import Algorithm, Context, EpisodeStats, Timestep, Variables

SIZES: dict[str, Any] = {
    **{
        "num_envs": 4,
        "rollout_length": 4,
        "num_devices": 1,
        "report_interval": 48,
        "hidden_sizes": (4,),
    },
    **{
        "total_env_steps": 400,
        "evaluation_episodes": 3,
        "evaluation_max_steps": 20,
        "evaluation_interval": 100,
    },
}
PLANS: dict[str, dict[str, Any]] = {
    "on_device": {},
    "synchronous": {"env": "envpool:CartPole-v1"},
    "asynchronous": {"lockstep": True, "num_actors": 2},
}
UNTIMED = ("async/queue", "async/sent", "async/dropped", "async/learner_idle", "async/actor_idle")
"""What depends on the threads' timing, which an evaluation changes."""


def config(plan: str = "on_device", env: str = "CartPole-v1", **values: Any) -> Any:
    return jaxrl_dist.preset("impala", env, plan=plan, **{**SIZES, **values})


def split(run_dir: Path) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """The lines of ``metrics.jsonl`` without times and evaluations; and the latter by env steps."""
    lines = runs.untimed(run_dir)
    found = {
        line["env_steps"]: {
            name: value for name, value in line.items() if name.startswith("evaluation/")
        }
        for line in lines
        if "evaluation/return_mean" in line
    }
    others = (*UNTIMED, *next(iter(found.values()), {}))
    return [
        {name: value for name, value in line.items() if name not in others} for line in lines
    ], found


@pytest.mark.parametrize(
    "plan",
    [
        "on_device",
        pytest.param("asynchronous", marks=pytest.mark.case),
        pytest.param("synchronous", marks=pytest.mark.case),
    ],
)
def test_evaluations_change_nothing(plan: str, tmp_path: Path) -> None:
    """Not one bit of the learning curve; and they come
    with the first report at or after each multiple.
    """
    here = config(plan, **PLANS[plan])
    with_, without = tmp_path / "with", tmp_path / "without"
    reports = list(jaxrl_dist.train(dataclasses.replace(here, run_dir=str(with_))))
    silent = dataclasses.replace(here, evaluation_interval=None, run_dir=str(without))
    list(jaxrl_dist.train(silent))
    (lines, evaluations), (plain, none) = split(with_), split(without)
    assert lines == plain and not none
    steps = [line["env_steps"] for line in lines]
    due = [
        now for before, now in zip([0, *steps], steps, strict=False) if now // 100 > before // 100
    ]
    assert list(evaluations) == due and len(due) >= 3
    for report in reports[:-1]:
        assert (report.evaluation is not None) == (report.env_steps in due)
    assert reports[-1].evaluation == runs.read_json(with_ / "summary.json")["evaluation"]
    assert reports[-1].evaluation == runs.read_json(without / "summary.json")["evaluation"]
    for values in evaluations.values():
        assert values["evaluation/episodes"] == 3 and 0 <= values["evaluation/cut"] <= 3
    assert read_curve(with_, "evaluation/return_mean").x.tolist() == due


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is evaluated with some of its reports."""
    run_dir = tmp_path_factory.mktemp("evaluate") / "whole"
    list(jaxrl_dist.train(config(run_dir=str(run_dir))))
    return run_dir


FIRST_PARTS: dict[str, Callable[[list[int], list[int]], int]] = {
    "before one that is due": lambda steps, due: due[0] - 10,
    "with one that is due": lambda steps, due: due[1],
    "with the first that is due": lambda steps, due: due[0],
    "with one that is not": lambda steps, due: next(step for step in steps if step not in due),
}
"""With which report the first part of a run ends,
from the env steps of all reports and of the evaluated ones."""


@pytest.mark.case  # test_evaluations_change_nothing
@pytest.mark.parametrize("ends", FIRST_PARTS)
def test_a_resumed_run_evaluates_where_it_would_have(
    ends: str, whole: Path, tmp_path: Path
) -> None:
    first = FIRST_PARTS[ends](
        [line["env_steps"] for line in runs.untimed(whole)], list(split(whole)[1])
    )
    list(jaxrl_dist.train(config(total_env_steps=first, run_dir=str(tmp_path))))
    list(jaxrl_dist.resume(tmp_path, total_env_steps=SIZES["total_env_steps"]))
    assert runs.untimed(tmp_path) == runs.untimed(whole)


def judged(run_dir: Path) -> dict[int, float | None]:
    """The returns that judge a run's checkpoints, which it has kept."""
    return {
        checkpoint.number_of(path): checkpoint.episode_return(path)
        for path in checkpoint.saved(run_dir)
    }


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jaxrl_dist.Report]:
    """A run whose evaluations judge its checkpoints, and its last report."""
    run_dir = tmp_path_factory.mktemp("evaluate") / "chosen"
    *_, last = jaxrl_dist.train(config(keep_best="evaluation", run_dir=str(run_dir)))
    return run_dir, last


def test_evaluations_choose_the_best_checkpoint(
    chosen: tuple[Path, jaxrl_dist.Report], whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, last = chosen
    returns = {step: values["evaluation/return_mean"] for step, values in split(run_dir)[1].items()}
    assert runs.untimed(run_dir) == runs.untimed(whole) and last.evaluation is not None
    returns[last.env_steps] = last.evaluation["return_mean"]
    best = max(returns, key=lambda step: (returns[step], step))
    assert judged(run_dir) == {step: returns[step] for step in {*sorted(returns)[-2:], best}}
    assert last.best_evaluation == runs.read_json(run_dir / "summary.json")["best_evaluation"]
    policy = jaxrl_dist.load_policy(run_dir, checkpoint="best")
    again = policy.evaluate(3, max_steps=20)
    assert last.best_evaluation == {"checkpoint": best, **again.summary()}
    assert (
        pickle.loads(pickle.dumps(policy)).evaluate(3, max_steps=20).returns.tolist()
        == again.returns.tolist()
    )
    assert (
        cli.main(
            [
                "evaluate",
                str(run_dir),
                "--checkpoint",
                "best",
                "--episodes",
                "3",
                "--max-steps",
                "20",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines()[-1] == evaluation_lines(
        again.summary(), f"checkpoint {best:,}"
    )


def test_fresh_episodes_are_none_of_any_seed_of_training() -> None:
    assert not {evaluation_seed(seed) for seed in range(20)} & {
        evaluation_seed(seed, fresh=True) for seed in range(20)
    }


@pytest.mark.case  # test_a_resumed_run_evaluates_where_it_would_have
def test_a_resumed_run_keeps_the_same_best(
    chosen: tuple[Path, jaxrl_dist.Report], tmp_path: Path
) -> None:
    reports = jaxrl_dist.train(config(keep_best="evaluation", run_dir=str(tmp_path)))
    while next(reports).env_steps < 250:
        pass
    reports.close()  # type: ignore[attr-defined]
    *_, last = jaxrl_dist.resume(tmp_path)
    assert (
        judged(tmp_path) == judged(chosen[0]) and last.best_evaluation == chosen[1].best_evaluation
    )
    with pytest.raises(ConfigError, match="resume keeps keep_best"):
        jaxrl_dist.resume(tmp_path, keep_best="training")


@pytest.mark.case  # test_evaluations_choose_the_best_checkpoint
def test_members_have_each_their_own_best_of_the_same_iterations(tmp_path: Path) -> None:
    *_, last = jaxrl_dist.train(
        config(keep_best="evaluation", seeds=2, keep_checkpoints=9, run_dir=str(tmp_path))
    )
    folders = sorted(tmp_path.glob("members/*"))
    iterations = [
        [line["iteration"] for line in split(x)[0] if line["env_steps"] in judged(x)]
        for x in folders
    ]
    assert iterations[0][:-1] == iterations[1][:-1] and len(iterations[0]) >= 4
    for folder, report in zip(folders, last.members, strict=True):
        returns = judged(folder)
        best = max(returns, key=lambda step: (returns[step], step))
        assert report.best_evaluation is not None and report.best_evaluation["checkpoint"] == best
    assert last.best_evaluation is not None and last.best_evaluation["episodes"] == 6


def test_an_evaluation_that_a_signal_ends_is_made_up_for(tmp_path: Path) -> None:
    """The run saves at once, and evaluates with the first report after it is resumed."""
    run = setup.prepare(config(run_dir=str(tmp_path / "run")))
    played: list[int] = []
    original = Evaluator.play

    def play(self: Evaluator, *args: Any, stop: Any, **more: Any) -> Any:
        played.append(1)
        return original(self, *args, stop=lambda: True, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "play", play)
        *_, last = run.reports(stop=lambda: bool(played))
    assert played == [1] and last.evaluation is None and 100 <= last.env_steps < 300
    list(jaxrl_dist.resume(tmp_path / "run"))
    lines, evaluations = split(tmp_path / "run")
    after = next(line["env_steps"] for line in lines if line["env_steps"] > last.env_steps)
    assert min(evaluations) == after and max(evaluations) > 300


@pytest.mark.slow
def test_an_evaluation_whose_environments_fail_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Evaluator.play, iter(range(100))

    def play(self: Evaluator, *args: Any, **more: Any) -> Any:
        if next(calls) == 0:
            raise EnvError("broken")
        return original(self, *args, **more)

    monkeypatch.setattr(Evaluator, "play", play)
    how = {
        "env": "envpool:CartPole-v1",
        "num_actors": 2,
        "on_actor_error": "restart",
        "run_dir": str(tmp_path / "run"),
    }
    with pytest.warns(EnvWarning, match="could not be finished: broken"):
        reports = list(jaxrl_dist.train(config("asynchronous", **how)))
    first, second = [report for report in reports if report.env_steps >= 100][:2]
    assert first.evaluation is None and second.evaluation is not None


@pytest.mark.case  # test_evaluations_change_nothing
def test_the_time_of_evaluations_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    original = Evaluator.play

    def play(*args: Any, **more: Any) -> Any:
        now[0] += 1000
        return original(*args, **more)

    monkeypatch.setattr(Evaluator, "play", play)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    here = config("synchronous", evaluation_interval=1, run_dir=str(tmp_path / "run"))
    *_, last = jaxrl_dist.train(here)
    assert now[0] >= 5000 and last.wall_time_s == 0
    assert runs.read_json(tmp_path / "run" / "summary.json")["wall_time_s"] == 0


def test_evaluations_compile_once() -> None:
    """The policy is traced once, and so is the environment, for all evaluations of a run."""
    source = find(own.Walk())
    traced: list[str] = []
    environment = source.device()

    def step(*args: Any) -> Any:
        traced.append("step")
        return environment.step(*args)

    def policy(*args: Any) -> Any:
        traced.append("policy")
        return greedy(*args)

    source = source._replace(pure=environment._replace(step=step))
    evaluator = Evaluator({"": algorithm(policy)}, source, 2, 0)
    one, *others = [
        (evaluator.play({"": Variables({"action": jnp.int32(action)}, ())}), list(traced))
        for action in (0, 1, 0)
    ]
    assert {"policy", "step"} == set(traced) and all(so_far == one[1] for _, so_far in others)
    np.testing.assert_array_equal(one[0].returns, others[1][0].returns)


# actors/test_actors.py::test_the_compiled_evaluation_plays_the_episodes_of_the_host
@pytest.mark.case
def test_sampled_evaluation_uses_the_keys_of_the_policy() -> None:
    """On CartPole, where a coin's episodes last about 22 steps and always the same action about
    9.
    """

    def coin(variables: Variables, obs: Any, core: Any, context: Context) -> Any:
        if context.keys is None:
            return jnp.zeros(len(obs), jnp.int32), core, {}
        assert context.keys.shape == (len(obs),)
        exploring = context.env_step < 1e9  # schedules have ended
        side = jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(context.keys)
        return jnp.where(exploring, 0, side), core, {}

    source = find("gymnax:CartPole-v1")
    played = {
        sampled: Evaluator({"": algorithm(coin)}, source, 40, 0, sampled=sampled)
        for sampled in (False, True)
    }
    greedy, drawn = (played[sampled].play({"": VARIABLES}) for sampled in (False, True))
    assert greedy is not None and drawn is not None
    assert greedy.lengths.max() < 13 and 15 < drawn.lengths.mean() < 35
    assert "sampled" not in greedy.summary() and drawn.summary()["sampled"] is True
    again, watched = (
        played[True].play({"": VARIABLES}),
        played[True].play({"": VARIABLES}, watch=lambda env, indices: None),
    )
    assert again is not None and watched is not None
    np.testing.assert_array_equal(again.lengths, drawn.lengths)
    np.testing.assert_array_equal(watched.lengths, drawn.lengths)


@pytest.mark.case  # test_evaluations_change_nothing
def test_a_run_and_the_command_evaluate_as_they_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = runs.train(f"{runs.CARTPOLE} --evaluation-policy sampled", tmp_path / "run")
    assert runs.read_json(run_dir / "summary.json")["evaluation"]["sampled"] is True
    for flags, kind in (("", "sampled"), (" --evaluation-policy greedy", "greedy")):
        assert cli.main(f"evaluate {run_dir} --episodes 3{flags}".split()) == 0
        assert f"of 3 {kind} episodes)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", ["es --env CartPole-v1", "td3 --env Pendulum-v1 --noise parameter"]
)
def test_sampled_evaluation_needs_a_stochastic_policy(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{flags} --evaluation-policy sampled --total-env-steps 64 --num-envs 8 --hidden-sizes 4 --num-devices 1"
    assert cli.main(["train", *words.split(), "--run-dir", str(tmp_path / "run")]) == 2
    assert (
        "explores by perturbed parameters" in capsys.readouterr().err
        and not (tmp_path / "run").exists()
    )


def test_a_policy_whose_actions_are_not_drawn_refuses_to_sample() -> None:
    config, source = resolved(
        jaxrl_dist.preset("dqn", "CartPole-v1", hidden_sizes=(4,), parameter_noise=True)
    )
    variables = make_algorithm(config, source.spec)[""].init(jax.random.key(0))
    policy = jaxrl_dist.Policy(config, source, variables)
    assert not policy.evaluate(1, max_steps=5).sampled
    with pytest.raises(ConfigError, match="use evaluation_policy greedy"):
        policy.evaluate(1, max_steps=5, sampled=True)


# --- Episodes that never end ----------------------------------------------------------------------


def greedy(variables: Variables, obs: Any, core: Any, context: Context) -> Any:
    return jnp.broadcast_to(variables.params["action"], (len(obs),)), core, {}


def algorithm(policy: Any = greedy) -> Any:
    nothing: Any = None
    return Algorithm(nothing, policy, nothing, nothing, nothing)


class Endless(own.Walk):
    """Costs 1 a step; the parameter is a time limit, or None."""

    default_params = None

    def step_env(
        self, key: jax.Array, state: own.WalkState, action: jax.Array, params: int | None
    ) -> Any:
        obs, state, *_ = super().step_env(key, state, action, 0)
        return 0 * obs, state, -1.0, False, {}

    def is_truncated(self, state: own.WalkState, params: int | None) -> Any:
        return params is not None and state.time >= params


VARIABLES = Variables({"action": jnp.int32(0)}, ())


def test_episodes_are_cut_and_count_as_far_as_they_came() -> None:
    """130 episodes of 128 environments, so that two play another one,
    after the rest of the first, which is not one.
    """
    source = find((Endless(), 50))
    played = Evaluator({"": algorithm()}, source, 130, 0, max_steps=30).play({"": VARIABLES})
    assert played.lengths.tolist() == [30] * 130
    np.testing.assert_array_equal(played.returns, -played.lengths)
    assert played.cut == 130 and played.summary()["cut"] == 130
    longer = Evaluator({"": algorithm()}, source, 258, 0, max_steps=20).play({"": VARIABLES})
    # 20 of the rest of 30 count as an episode
    assert set(longer.lengths.tolist()) == {20} and longer.cut == 258


@pytest.mark.parametrize(
    "watch", [None, lambda env, indices: None], ids=["in one program", "step by step"]
)
def test_agent_that_waits_past_the_limit_plays_fewer_episodes(watch: Any) -> None:
    """Its environment never resets, because the other agent's episode never ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl_dist.actors.evaluate.MAX_ENVS", 2)
        evaluator = Evaluator({"": algorithm()}, find(team.Outlived("long_1", "long_2")), 8, 0, 10)
    played = evaluator.play({"": VARIABLES}, watch=watch, stop=iter([False] * 40 + [True]).__next__)
    assert played is not None and played.lengths.tolist() == [2, 10, 10] * 2 and played.cut == 4
    np.testing.assert_array_equal(played.returns, -3.0 * played.lengths)


@pytest.mark.parametrize("xp", [np, jnp])
def test_episodes_of_one_step_or_without_end_or_begin(xp: Any) -> None:
    quota, first = np.array([2, 3, 1]), xp.array([1.0, 0.0, 0.0])
    never, episodes = xp.zeros(3, bool), Episodes.none(xp, quota, ["score"])
    step = Timestep((), xp.array([1.0, 2.0, 0.0]), first > 0, never, xp.array([True, True, False]))
    for _ in range(12):
        episodes = episodes.after(
            step,
            EpisodeStats(first, first, first, first, first, {"score": (5 * first, first)}),
            quota,
            3,
        )
    assert episodes.done.tolist() == [2, 3, 1] and episodes.cut.tolist() == [0, 3, 0]
    assert episodes.lengths.tolist() == [[1, 1, 0], [3, 3, 3], [0, 0, 0]]
    assert episodes.returns.tolist() == [[1, 1, 0], [6, 6, 6], [0, 0, 0]]
    np.testing.assert_array_equal(
        episodes.info["score"], [[5, 5, np.nan], [np.nan] * 3, [np.nan] * 3]
    )


def test_without_a_limit_of_its_own_an_episode_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl_dist.actors.evaluate.MAX_EPISODE_STEPS", 40)
    source = find(Endless())
    played = Evaluator({"": algorithm()}, source, 3, 0).play({"": VARIABLES})
    assert played.cut == 3 and played.lengths.tolist() == [40] * 3
    limited = source._replace(spec=dataclasses.replace(source.spec, max_episode_steps=50))
    played = Evaluator({"": algorithm()}, limited, 3, 0).play({"": VARIABLES})
    assert played.cut == 3 and played.lengths.tolist() == [50] * 3


def test_what_was_cut_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {**SIZES, "hidden_sizes": 4, "evaluation_max_steps": 5}
    flags = [part for name, value in sizes.items() for part in (flag(name), str(value))]
    command = ["train", "impala", "--env", "CartPole-v1", "--plan", "on_device", *flags]
    assert cli.main([*command, "--run-dir", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "of 3 greedy episodes, 3 of them cut before their end)" in printed
    assert "  evaluation 5" in printed
    assert cli.main(["evaluate", str(tmp_path / "run"), "--episodes", "3", "--max-steps", "4"]) == 0
    assert "return 4 +- 0" in capsys.readouterr().out
