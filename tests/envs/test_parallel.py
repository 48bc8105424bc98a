"""PettingZoo's environments: agents on the host as rows of the batch."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import flock
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from PIL import Image

from jaxrl_dist import Train, cli, load_policy, train
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.actors.host import HostActor
from jaxrl_dist.algorithms.a2c import A2C
from jaxrl_dist.commands.plot import plot
from jaxrl_dist.config.envs import module_of_user, split_env
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.native import advice_on
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError, EnvError, EnvWarning
from jaxrl_dist.run import console
from jaxrl_dist.spaces import Box, describe
from jaxrl_dist.types import Algorithm, Context, Variables

ENVS, STEPS, AGENTS = 3, 40, flock.Flock.possible_agents


def loop(seed: int, actions: np.ndarray, limit: int) -> Any:
    """Steps one flock by itself; yields rows of
    ``(seen, mask, reward, terminated, truncated, valid)`` by agent.
    """
    env = flock.Flock()
    obs, infos = env.reset(seed)
    yield {
        agent: (obs[agent], infos[agent]["action_mask"], 0, False, False, False) for agent in obs
    }
    time, over = 0, False
    for row in actions:
        if over:
            obs, infos = env.reset()
            time, over = 0, False
            yield {
                agent: (obs[agent], infos[agent]["action_mask"], 0, False, False, False)
                for agent in obs
            }
            continue
        there, time = list(env.agents), time + 1
        chosen = {agent: int(row[AGENTS.index(agent)]) - 1 for agent in there}
        obs, rewards, home, late, infos = env.step(chosen)
        cut = {agent: not home[agent] and (late[agent] or time == limit) for agent in there}
        over = not env.agents or time == limit
        now = {agent: (rewards[agent], home[agent], cut[agent], True) for agent in there}
        yield {
            a: (obs[a], infos[a]["action_mask"], *now.get(a, (0, False, False, False))) for a in obs
        }


@pytest.mark.parametrize(
    "workers, limit",
    [("threads", 4), pytest.param("threads", 99, marks=pytest.mark.slow), ("processes", 99)],
)
def test_rows_are_the_agents_of_a_loop_over_the_environment(workers: Any, limit: int) -> None:
    source = find("flock:Flock", workers=workers, wrappers=Wrappers(time_limit=limit))
    assert describe(source.spec.observation) == "{observation: float32[2], mask: bool[3]}"
    assert (source.spec.num_agents, source.spec.mask, source.spec.max_episode_steps) == (
        3,
        "mask",
        limit,
    )
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 3, (STEPS, ENVS, len(AGENTS)))
    with closing(source.host(ENVS * len(AGENTS), 7)) as env:
        assert env.num_envs == ENVS * len(AGENTS)
        seen = [(env.reset(), None, None)]
        for action in actions:
            step, episodes = env.step(action.reshape(-1))
            seen.append((step.obs, step, episodes))
    seeds = np.random.SeedSequence(7).generate_state(ENVS) & 0x7FFFFFFF
    expected = [list(loop(int(seed), actions[:, index], limit)) for index, seed in enumerate(seeds)]
    counts = {"terminated": 0, "truncated": 0, "joined": 0}
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, int)
    for t, (obs, step, episodes) in enumerate(seen):
        for row in range(env.num_envs):
            there = expected[row // 3][t].get(AGENTS[row % 3])
            if there is not None:
                np.testing.assert_array_equal(obs["observation"][row], there[0])
                np.testing.assert_array_equal(obs["mask"][row], there[1])
            else:
                assert not obs["observation"][row].any() and not obs["mask"][row].any()
            if step is None or episodes is None:
                continue
            reward, *flags = (0.0, False, False, False) if there is None else there[2:]
            assert step.reward[row] == np.float32(reward)
            assert [bool(x[row]) for x in (step.terminated, step.truncated, step.valid)] == flags
            returns[row], lengths[row] = returns[row] + reward, lengths[row] + flags[2]
            assert episodes.episodes[row] == (flags[0] or flags[1])
            if flags[0] or flags[1]:
                assert episodes.return_sum[row] == pytest.approx(returns[row], abs=1e-5)
                assert episodes.length_sum[row] == lengths[row]
                returns[row], lengths[row] = 0.0, 0
            counts["terminated"] += flags[0]
            counts["truncated"] += flags[1]
            counts["joined"] += row % 3 == 2 and flags[2]
    assert min(counts.values()) > 3, counts


@pytest.mark.parametrize("name", ["Lingering", "Silent"])
def test_agent_that_leaves_without_a_flag_is_truncated(name: str) -> None:
    """Against the rows of the flock that keeps the contract."""
    rng, ended = np.random.default_rng(4), 0
    with (
        closing(find("flock:Flock").host(9, 3)) as one,
        closing(find(f"flock:{name}").host(9, 3)) as other,
    ):
        np.testing.assert_array_equal(one.reset()["observation"], other.reset()["observation"])
        for _ in range(STEPS):
            action = rng.integers(0, 3, 9)
            (step, episodes), (same, counted) = one.step(action), other.step(action)
            if name == "Silent":
                step = step._replace(
                    terminated=step.terminated & False, truncated=step.terminated | step.truncated
                )
            for x, y in ((step, same), (episodes, counted)):
                jax.tree.map(np.testing.assert_array_equal, x, y)
            ended += int(counted.episodes.sum())
    assert ended > 20


def test_rows_of_a_policy_are_its_agents() -> None:
    """Also where agents have other actions, and with the agents' numbers."""
    policies = {"a": "bird_1", "b": "late,bird_0"}
    whole, parts = (
        find("flock:Flock"),
        find("flock:Flock", wrappers=Wrappers(policies=policies, agent_ids=True)),
    )
    assert {name: spec.num_agents for name, spec in parts.spec.policies.items()} == {"a": 1, "b": 2}
    places = {"a": np.array([1, 4, 7]), "b": np.array([0, 2, 3, 5, 6, 8])}
    rng = np.random.default_rng(1)
    with closing(whole.host(9, 3)) as one, closing(parts.host(9, 3)) as other:
        obs, seen = one.reset(), other.reset()
        for _ in range(20):
            for name, rows in places.items():
                for part in ("observation", "mask"):
                    np.testing.assert_array_equal(seen[name][part], obs[part][rows])
            assert seen["b"]["agent"].tolist() == [[1, 0], [0, 1]] * 3
            action = rng.integers(0, 3, 9)
            step, ended = one.step(action)
            steps, episodes = other.step({name: action[rows] for name, rows in places.items()})
            for name, rows in places.items():
                for ours, theirs in (
                    (steps[name]._replace(obs=()), step._replace(obs=())),
                    (episodes[name], ended),
                ):
                    for x, y in zip(ours, theirs, strict=True):
                        np.testing.assert_array_equal(x, y[rows] if len(y) else y)
            obs, seen = step.obs, {name: each.obs for name, each in steps.items()}
    unequal = find(
        "flock:Unequal",
        workers="processes",
        wrappers=Wrappers(policies={"a": "bird_*", "b": "late"}),
    )
    assert [spec.action.n for spec in unequal.spec.policies.values()] == [3, 4]


def test_a_team_is_a_row_that_is_paid_the_mean() -> None:
    """Against the rows of its agents; its episode ends with that of the last of them."""
    whole, joint = find("flock:Flock"), find("flock:Flock", wrappers=Wrappers(joint=("",)))
    assert joint.spec.num_agents == 1 and describe(joint.spec.action) == "MultiDiscrete(3, 3, 3)"
    rng, ended = np.random.default_rng(2), 0
    with closing(whole.host(9, 3)) as one, closing(joint.host(3, 3)) as other:
        obs, seen, total = one.reset(), other.reset(), np.zeros(9)
        for _ in range(40):
            np.testing.assert_array_equal(
                seen["agents"]["observation"], obs["observation"].reshape(3, 3, 2)
            )
            np.testing.assert_array_equal(seen["state"], obs["observation"].reshape(3, 6))
            np.testing.assert_array_equal(seen["mask"], obs["mask"].reshape(3, 9))
            action = rng.integers(0, 3, 9)
            step, _ = one.step(action)
            team, episodes = other.step(action.reshape(3, 3))
            total += step.reward
            np.testing.assert_allclose(
                team.reward, step.reward.reshape(3, 3).mean(axis=1), rtol=1e-6
            )
            assert team.valid.tolist() == step.valid.reshape(3, 3).any(axis=1).tolist()
            for index in np.flatnonzero(episodes.episodes):
                mean = total.reshape(3, 3)[index].mean()
                assert episodes.return_sum[index] == pytest.approx(mean, abs=1e-5)
                assert team.terminated[index] != team.truncated[index]
                total.reshape(3, 3)[index] = 0.0
                ended += 1
            obs, seen = step.obs, team.obs
    assert ended > 10


def test_team_reward_includes_agents_that_left() -> None:
    rng, total, ended = np.random.default_rng(2), np.zeros(3), 0
    whole, joint = find("flock:Lingering"), find("flock:Lingering", wrappers=Wrappers(joint=("",)))
    with closing(whole.host(9, 3)) as one, closing(joint.host(3, 3)) as other:
        one.reset(), other.reset()
        gone = np.zeros((3, 3))  # who have left, and are paid 1 a step
        for _ in range(40):
            action = rng.integers(0, 3, 9)
            step, _ = one.step(action)
            team, episodes = other.step(action.reshape(3, 3))
            paid = np.where(team.valid, (step.reward.reshape(3, 3) + gone).mean(axis=1), 0.0)
            np.testing.assert_allclose(team.reward, paid, rtol=1e-6)
            total, over = total + paid, episodes.episodes > 0
            np.testing.assert_allclose(episodes.return_sum[over], total[over], atol=1e-5)
            gone += (step.terminated | step.truncated).reshape(3, 3)
            total[over], gone[over], ended = 0.0, 0.0, ended + over.sum()
    assert ended > 10


@pytest.mark.parametrize("name", ["Late", "Never"])
def test_the_episode_of_a_team_ends_with_its_last_present_member(name: str) -> None:
    """Whether or not another joins later, for an episode of the rest;
    so no return is left when environments reset.
    """
    how = Wrappers(policies={"team": "bird_0,late", "other": "bird_1"}, joint=("team",))
    rng, total, ended = np.random.default_rng(5), np.zeros(3), 0
    with closing(find(f"flock:{name}", wrappers=how).host(6, 3)) as env:
        env.reset()
        for _ in range(60):
            steps, episodes = env.step(
                {"team": rng.integers(0, 3, (3, 2)), "other": rng.integers(0, 3, 3)}
            )
            step, over = steps["team"], episodes["team"].episodes > 0
            total += step.reward
            np.testing.assert_array_equal(over, step.terminated | step.truncated)
            np.testing.assert_allclose(episodes["team"].return_sum[over], total[over], atol=1e-5)
            total[over] = 0.0
            ended += over.sum()
            resetting = ~step.valid & ~steps["other"].valid
            assert not total[resetting].any()
    assert ended > 15


def still(variables: Variables, obs: Any, core: Any, context: Context) -> Any:
    return jnp.ones(len(obs["mask"]), int), core, {}


def test_evaluation_ends_without_an_agent_that_never_joins() -> None:
    source = find("flock:Never", wrappers=Wrappers(policies={"a": "bird_*", "b": "late"}))
    nothing: Any = None
    algorithms = dict.fromkeys("ab", Algorithm(nothing, still, nothing, nothing, nothing))
    played = Evaluator(algorithms, source, 12, 0, max_steps=20, num_envs=2).play(
        dict.fromkeys("ab", Variables((), ()))
    )
    summary = played.summary()
    assert played.lengths.tolist() == [6] * 8 and played.cut == 0
    assert (
        summary["a/episodes"] == 8 and summary["b/episodes"] == 0 and "b/return_mean" not in summary
    )
    assert console.evaluation_lines(summary).splitlines()[1] == "b: no episode has started"


def test_several_policies_play_as_many_games_as_asked_for() -> None:
    """Four games of three birds in three environments, of which the first plays two."""
    source = find("flock:Flock", wrappers=Wrappers(policies={"b": "bird_*", "a": "late"}))
    nothing: Any = None
    algorithms = dict.fromkeys("ab", Algorithm(nothing, still, nothing, nothing, nothing))
    for episodes in (10, 12):
        evaluator = Evaluator(algorithms, source, episodes, 0, num_envs=3)
        summary = evaluator.play(dict.fromkeys("ab", Variables((), ()))).summary()
        assert (summary["episodes"], summary["a/episodes"], summary["b/episodes"]) == (12, 4, 8)


def test_masks_and_observations_of_several_kinds() -> None:
    part = find("flock:Flock", {"masks": "part"}).spec
    assert (
        describe(part.observation) == "{action_mask: int8[3], observation: float32[2]}"
        and part.mask == "action_mask"
    )
    indices = find("flock:Flock", {"masks": "indices"}).spec
    assert (
        indices.mask is None
        and "info['legal_actions'] looks like an action mask" in indices.unread_mask
    )
    none = find("flock:Flock", {"masks": "none"})
    assert isinstance(none.spec.observation, Box) and none.spec.mask is None
    with closing(none.host(6, 0)) as env:
        assert env.reset().shape == (6, 2)
    with closing(find("flock:Flock", {"masks": "part"}).host(3, 0, drawn=True)) as env:
        assert env.reset()["action_mask"].shape == (3, 3)
        assert env.render(2).shape == (3, 5, 3)


def test_what_does_not_work_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r".*bird_1:.*Discrete.*late:.*Discrete.*several",
    ):
        find("flock:Unequal")
    with pytest.raises(ConfigError, match=r"action_repeat.*3"):
        find("flock:Flock", wrappers=Wrappers(action_repeat=2))
    with pytest.raises(
        ConfigError,
        match="observations of bird_0 and late have different bounds; one policy needs equal",
    ):
        find("flock:Bounded")
    with pytest.raises(ConfigError, match=r"flock:Flock.*bird_"):
        find("flock:Flock", wrappers=Wrappers(policies={"a": "bird_*"}))
    with pytest.raises(ConfigError, match="frame_stack works for environments with one policy"):
        find("flock:Flock", wrappers=Wrappers(policies={"a": "*"}, frame_stack=2))


def test_a_game_without_a_render_mode_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pettingzoo")
    monkeypatch.delattr(flock.Knockout, "render_mode")  # a warning is an error
    assert find("flock:Knockout").spec.num_agents == 3


@pytest.mark.parametrize("masks", ["part", "info", "none"])
def test_a_game_in_turns_is_played_as_by_pettingzoos_own_loop(masks: str) -> None:
    """Who is not on the move may only pass; a player may be out in another one's turn."""
    pytest.importorskip("pettingzoo")
    source, chance, out_of_turn, episodes = (
        find("flock:Knockout", {"masks": masks}),
        np.random.default_rng(0),
        0,
        0,
    )
    name, game = source.spec.mask or "", flock.Knockout(masks)
    with closing(source.host(3, 7)) as env:
        obs = env.reset()
        game.reset()
        for _ in range(60):
            mover, present = game.agent_selection, list(game.agents)
            for row, agent in enumerate(game.possible_agents):
                if agent in present:
                    legal = game.legal() if masks != "none" else np.ones(2)
                    np.testing.assert_array_equal(
                        obs[name][row], legal if agent == mover else [1, 0]
                    )
                    np.testing.assert_array_equal(obs["observation"][row], [game.pile, row])
            action = np.array(
                [chance.choice(np.flatnonzero(mask)) if mask.any() else 0 for mask in obs[name]]
            )
            step, _ = env.step(action)
            game.step(action[game.possible_agents.index(mover)])
            told = dict(game.rewards), dict(game.terminations)
            while game.agents and game.terminations[game.agent_selection]:
                game.step(None)
            for row, agent in enumerate(game.possible_agents):
                expected = (
                    (told[0][agent], told[1][agent], True)
                    if agent in present
                    else (0.0, False, False)
                )
                assert (step.reward[row], step.terminated[row], step.valid[row]) == expected
                out_of_turn += expected[1] and agent != mover and told[0][agent] < 0
            obs = step.obs
            if not game.agents:
                obs, episodes = env.step(action)[0].obs, episodes + 1
                game.reset()
    assert out_of_turn > 2 and episodes > 4


@pytest.mark.case  # test_a_game_in_turns_is_played_as_by_pettingzoos_own_loop
@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
@pytest.mark.parametrize("env", ["tictactoe_v3", "connect_four_v3"])
def test_pettingzoos_classic_games_are_played_in_turns(env: str) -> None:
    """Legal moves alternate, and the last one pays both players: the sum is 0,
    and the winner moved.
    """
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    source, chance, ends = find(f"pettingzoo:classic/{env}"), np.random.default_rng(0), 0
    assert source.spec.num_agents == 2 and source.spec.mask == "action_mask"
    with closing(source.host(2, 0)) as played:
        obs, mover = played.reset(), 0
        for _ in range(200):
            masks = obs["action_mask"]
            assert masks[mover].any() and masks[1 - mover].tolist() == [
                1,
                *np.zeros(masks.shape[1] - 1),
            ]
            stones = obs["observation"][mover].sum(axis=(0, 1))
            assert stones[0] == stones[1] - mover, "each player sees its own stones first"
            action = np.array([chance.choice(np.flatnonzero(mask)) for mask in masks])
            step, _ = played.step(action)
            assert step.valid.all() and step.reward.sum() == 0
            obs, over = step.obs, bool(step.terminated.all())
            assert over == step.terminated.any() and (over or not step.reward.any())
            assert step.reward[mover] >= 0, "who moves may win, and cannot lose"
            ends, mover = ends + over, 1 - mover
            if over:
                obs, mover = played.step(action)[0].obs, 0
    assert ends > 4


def test_a_mask_may_be_missing_but_not_something_else() -> None:
    with closing(find("flock:Flock", {"masks": "once"}).host(3, 0)) as env:
        assert env.reset()["mask"].any()
        assert env.step(np.ones(3, int))[0].obs["mask"].all()  # without a mask all are legal
    with closing(find("flock:Flock", {"masks": "spoilt"}).host(3, 0)) as env:
        env.reset()
        env.step(np.ones(3, int))
        with pytest.raises(
            EnvError,
            match=r"ValueError:.*bird_0.*'action_mask'.*3",
        ):
            env.step(np.ones(3, int))


@pytest.mark.parametrize(
    "how, line",
    {
        "nobody": "cannot be made: ValueError: reset leaves env.agents empty, so no agent can act",
        "old reset": "cannot be made: TypeError: reset returned a dict, not (observations, infos)",
        "blind reset": "cannot be made: ValueError: reset returned no observation for agent bird_1",
        "part 0": "environment 0 at step 1, in step: ValueError: step returned no observation for agent bird_1",
        "part 1": "environment 0 at step 1, in step: ValueError: step returned no reward for agent bird_1",
        "part 2": "environment 0 at step 1, in step: ValueError: step returned no termination for agent bird_1",
        "part 3": "environment 0 at step 1, in step: ValueError: step returned no truncation for agent bird_1",
        "blind late": "environment 0 at step 0, in step: ValueError: step returned no observation for agent late",
        "unpaid end": "environment 0 at step 5, in step: ValueError: step returned no reward for agent bird_1",
        "blind end": "environment 0 at step 5, in step: ValueError: step returned no observation for agent bird_1",
        "nan pay": "environment 0 at step 0, in step: ValueError: the reward of bird_1 is nan, which is not finite",
        "text pay": "environment 0 at step 0, in step: TypeError: the reward of bird_1 is '1', not a number",
        "old step": "in step: TypeError: step returned 4 values, as in Gym before 0.26, not (observations, rewards, ",
    }.items(),
)
def test_what_an_agent_lacks_is_named(how: str, line: str) -> None:
    def play() -> None:
        with closing(find("flock:Faulty", {"how": how}).host(3, 0)) as env:
            env.reset()
            for _ in range(6):
                env.step(np.ones(3, int))

    with pytest.raises(EnvError) as error:
        play()
    assert line in str(error.value) and "\n" not in str(error.value)


def test_pettingzoo_is_a_library_whose_modules_files_may_name() -> None:
    assert split_env("pettingzoo:butterfly/pistonball_v6")[1:] == (
        "pettingzoo.butterfly.pistonball_v6",
        "parallel_env",
    )
    assert module_of_user("pettingzoo:butterfly/pistonball_v6") is None
    assert module_of_user("gymnasium:pettingzoo.butterfly.pistonball_v6:parallel_env") is None
    assert module_of_user("pettingzoo.utils:wrappers") == "pettingzoo.utils"
    assert module_of_user("flock:parallel_env") == "flock"
    assert (
        advice_on("pettingzoo.classic.go_v5:parallel_env") == "; pip install 'pettingzoo[classic]'"
    )
    moved = advice_on("pettingzoo.mpe.simple_spread_v3:parallel_env")
    assert moved == "; with it, --env mpe2.simple_spread_v3:parallel_env works"
    assert not advice_on("flock:Flock")


def test_an_environment_that_pettingzoo_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pettingzoo", "pettingzoo.classic"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match="not installed, or has no such environment: pip install pettingzoo"
    ):
        find("pettingzoo:classic/chess_v5")
    for name in ("pettingzoo", "pettingzoo.classic"):
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "pettingzoo" / "classic").mkdir(parents=True)
    for file in ("__init__.py", "classic/__init__.py", "classic/chess.py", "classic/chess_v6.py"):
        (tmp_path / "pettingzoo" / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"PettingZoo.*'chess_v6'"):
        find("pettingzoo:classic/chess_v5")
    for name in ("pettingzoo", "pettingzoo.classic"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("policies", [{}, {"a": "bird_*", "b": "late"}])
def test_env_and_agent_steps_match_the_environments(policies: dict[str, str]) -> None:
    """Birds leave at different times, and one joins late;
    the environments count the agents of each of their steps.
    """
    algorithm = A2C(hidden_sizes=(8,))
    config = Train(
        {name: algorithm for name in policies} or algorithm, env="flock:Counting", policies=policies, num_envs=4,
        rollout_length=16, total_env_steps=150, report_interval=64, evaluation_episodes=0, num_devices=1,
    )  # fmt: skip
    reports, acted = train(config), flock.Counting.acted
    acted.clear()
    for report in reports:
        assert (report.env_steps, report.agent_steps) == (len(acted), sum(acted))
    assert 150 <= report.env_steps < 214 and report.iteration == 3


TINY = "--num-envs 4 --rollout-length 16 --total-env-steps 300 --report-interval 100 --hidden-sizes 8 --num-devices 1"


@pytest.mark.parametrize("on_path", [False, True])
@pytest.mark.parametrize("env", ["pettingzoo:x/y", "gymnasium:pettingzoo.x.y:parallel_env"])
def test_no_file_chooses_a_library_of_the_current_directory(
    env: str, on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = runs.read_json(runs.finished(runs.CARTPOLE) / "config.json")
    config["run"]["env"] = env
    for folder in ("run", "pettingzoo", "brax"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("open('ran', 'w')")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    for name in [name for name in sys.modules if name.partition(".")[0] == "pettingzoo"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*([str(tmp_path)] if on_path else []), *sys.path])
    assert cli.main(["train", "--config", "run"]) == cli.main(["evaluate", "run"]) == 2
    assert not (tmp_path / "ran").exists()
    assert module_of_user("brax:ant") == ("brax" if on_path else None)


TEAM = "qmix --learning-starts 32 --batch-size 8 --replay-capacity 1024 --replay-ratio 0.0625"


@pytest.mark.parametrize(
    "how",
    [
        "ppo --plan synchronous",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("impala", TEAM)),
    ],
)
def test_a_run_trains_is_evaluated_and_resumed(how: str, tmp_path: Path) -> None:
    run = runs.train(f"{how} --env flock:Flock {TINY} --evaluation-episodes 6", tmp_path / "run")
    assert runs.read_json(run / "summary.json")["evaluation"]["episodes"] == 6
    steps = runs.read_metrics(run)[-1]["env_steps"]
    assert (
        cli.main(
            ["resume", str(run), "--env", "flock:Flock", "--total-env-steps", "450", "--quiet"]
        )
        == 0
    )
    assert runs.read_metrics(run)[-1]["env_steps"] >= 450 > steps
    film = tmp_path / "film.gif"
    assert cli.main(["video", str(run), str(film), "--env", "flock:Flock", "--episodes", "2"]) == 0
    with Image.open(film) as pictures:
        assert pictures.size == (5, 3) and 4 <= getattr(pictures, "n_frames", 1) <= 14


@pytest.mark.case  # settings/test_policies.py::test_the_command_line_trains_resumes_and_evaluates
def test_several_policies_train_are_evaluated_and_resumed(tmp_path: Path) -> None:
    own = "--a.num-minibatches 2 --a.num-epochs 2 --a.hidden-sizes 8 --b.hidden-sizes 8 --b.learning-starts 64 "
    own += "--b.batch-size 8 --b.replay-capacity 1024 --b.replay-ratio 0.0625 --b.epsilon-steps 200"
    sizes = "--num-envs 4 --rollout-length 16 --total-env-steps 300 --report-interval 100 --num-devices 1"
    command = f"--policy a=ppo:bird_* --policy b=dqn:late --env flock:Unequal {sizes} {own} --evaluation-episodes 6"
    run = runs.train(command, tmp_path / "run")
    evaluation = runs.read_json(run / "summary.json")["evaluation"]
    assert (
        evaluation["episodes"] == 6
        and evaluation["a/episodes"] == 4
        and evaluation["b/episodes"] == 2
    )
    last = runs.read_metrics(run)[-1]
    assert (
        last["a/loss/policy"] is not None
        and last["b/loss/q"] is not None
        and last["env_steps"] >= 300
    )
    assert runs.read_json(run / "config.json")["run"]["plan"] == "synchronous"
    assert (
        cli.main(
            ["resume", str(run), "--env", "flock:Unequal", "--total-env-steps", "450", "--quiet"]
        )
        == 0
    )
    assert runs.read_metrics(run)[-1]["env_steps"] >= 450
    film = tmp_path / "film.gif"
    assert (
        cli.main(["video", str(run), str(film), "--env", "flock:Unequal", "--episodes", "2"]) == 0
    )
    with Image.open(film) as pictures:
        assert pictures.size == (5, 3) and 4 <= getattr(pictures, "n_frames", 1) <= 14
    table = plot([run], kind="table", metric="*/episode/return")
    assert "a (ppo)" in table and "b (dqn)" in table
    policy = load_policy(run, env="flock:Unequal", policy="b")
    obs = {"observation": np.zeros((5, 2), np.float32), "mask": np.ones((5, 4), bool)}
    assert policy(obs if policy.source.spec.mask else obs["observation"])[0].shape == (5,)
    with pytest.raises(ConfigError, match="plays with the other policies of its run"):
        policy.evaluate(2)


def test_a_mask_that_allows_nothing_is_told_while_training() -> None:
    """Once, by the actor; not of an agent that gives no mask, as where it is another one's turn."""
    for masks, told in (("no info", True), ("no part", True), ("once", False), ("info", False)):
        with (
            closing(find("flock:Flock", {"masks": masks}).host(6, 0)) as env,
            warnings.catch_warnings(record=True) as all_,
        ):
            warnings.simplefilter("always")
            actor = HostActor.__new__(HostActor)
            actor._env, actor._first, actor._steps, actor._warned = env, np.int32(4), 1, False
            env.reset()
            for _ in range(2):
                actor._warn_of_masks(env.spec.keyed(env.step(np.ones(6, int))[0]))
        lines = [str(x.message) for x in all_ if x.category is EnvWarning]
        line = "flock:Flock: environment 4 at step 1, agent 0: the action mask allows no action, though the episode continues"
        assert len(lines) == told and all(x.startswith(line) for x in lines)


def test_check_env_plays_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-env", "flock:Flock"]) == 0, capsys.readouterr().out
    assert "flock:Flock: no fault found in" in capsys.readouterr().out
    for masks in ("part", "info"):
        assert cli.main(["check-env", "flock:Strict", "--env-options", f"masks={masks}"]) == 0, (
            capsys.readouterr().out
        )
        # its episodes all have one length, which the second note tells
        note, lengths, _ = capsys.readouterr().out.splitlines()
        assert "after exactly 6 steps" in lengths
        assert (
            "part 'action_mask'" if masks == "part" else "info['action_mask']"
        ) in note and "are legal" in note
    assert cli.main(["check-env", "flock:Faulty", "--env-options", "how=nobody"]) == 1
    assert (
        "its constructor raises ValueError: reset leaves env.agents empty"
        in capsys.readouterr().out
    )


@pytest.mark.case  # test_a_mask_that_allows_nothing_is_told_while_training
@pytest.mark.parametrize("masks", ["no part", "no info"])
def test_check_env_names_a_mask_that_allows_nothing(
    masks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check-env", "flock:Flock", "--env-options", f"masks={masks}"]) == 1
    out = capsys.readouterr().out
    assert (
        "the action mask of reset for bird_0 allows no action, though the episode continues" in out
    )
