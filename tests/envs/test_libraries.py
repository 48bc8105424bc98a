"""Environments of other JAX libraries: what the adapters share,
and each library against a plain loop.
"""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from gymnasium import spaces
from test_envs import check_contract, random_actions, run_gymnax, unstack

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.config.envs import LIBRARIES
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.device import gymnax, libraries
from jaxrl_dist.envs.device.libraries import Adapted, Step
from jaxrl_dist.envs.env_options import parse_options
from jaxrl_dist.envs.source import find, locate
from jaxrl_dist.errors import ConfigError

# --- Without the libraries: a small one in place of brax ------------------------------------------


class Walk:
    """A library with one environment: the position rises by the action, and 3 ends the task."""

    @staticmethod
    def ids() -> list[str]:
        return ["walk"]

    @staticmethod
    def make(env_id: str, options: Mapping[str, str]) -> Adapted:
        limit = parse_options(f"brax:{env_id}", options, {"limit": 5})

        def seen(position: jax.Array) -> jax.Array:
            return jnp.float32(position)[None]

        def reset(key: jax.Array) -> tuple[Any, Any]:
            assert key.dtype == jnp.uint32, "libraries keep keys in states, and states are saved"
            position = jax.random.randint(key, (), 0, 2)
            return seen(position), {"position": position, "key": key}

        def step(key: jax.Array, state: Any, action: jax.Array) -> Step:
            assert key.dtype == jnp.uint32
            position = state["position"] + action
            over, cut = position == 3, position == 4
            return Step(
                seen(position), {**state, "position": position}, jnp.float32(action), over, cut
            )

        box = spaces.Box(-10, 10, (1,), np.float32)
        return Adapted(reset, step, box, spaces.Discrete(3), "walks", limit.get("limit", 5))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], bool]], None]:
    """Takes the libraries of which a function says so for installed, and no others."""
    return lambda among: monkeypatch.setattr(libraries, "installed", among)


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "load", lambda library: Walk)


@pytest.mark.usefixtures("walk")
def test_library_episodes_terminate_and_truncate() -> None:
    env = find("brax:walk", wrappers=Wrappers(time_limit=4)).device()
    assert (env.spec.backend, env.spec.id, env.spec.family, env.spec.max_episode_steps) == (
        "brax",
        "walk",
        "walks",
        4,
    )
    assert find("brax:walk").spec.max_episode_steps == 5
    assert find("brax:walk", {"limit": "2"}).spec.max_episode_steps == 2
    actions = random_actions(env.spec.action, np.random.default_rng(0), 60, 3)
    _, _, steps = run_gymnax(
        env, actions, jax.random.split(jax.random.key(1), (60, 3)), jax.random.split(KEY, 3)
    )
    rows = unstack(steps)
    check_contract(rows, env.spec, 3)
    terminated, truncated = (
        np.stack([getattr(step, name) for step, _ in rows]) for name in ("terminated", "truncated")
    )
    obs = np.stack([step.obs[:, 0] for step, _ in rows])
    assert (obs[terminated] == 3).all() and terminated.any()
    assert (obs[truncated] == 4).any(), "its own clock"
    assert (obs[truncated] < 3).any(), "the limit, with the last observation"


KEY = jax.random.key(2)


@pytest.mark.case  # test_check_env_plays_a_library
@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("plan", ["on_device", "asynchronous"])
def test_a_run_trains_on_a_library_and_its_policy_finds_it_again(plan: str, tmp_path: Any) -> None:
    fields = {
        "num_envs": 8,
        "rollout_length": 16,
        "total_env_steps": 256,
        "report_interval": 128,
        "num_devices": 1,
    }
    run_dir = str(tmp_path / "run")
    config = jaxrl_dist.preset(
        "impala",
        "brax:walk",
        plan=plan,
        hidden_sizes=(8,),
        evaluation_episodes=2,
        run_dir=run_dir,
        **fields,
    )
    *_, last = jaxrl_dist.train(config)
    assert (
        last.env_steps >= 256 and last.evaluation is not None and last.evaluation["episodes"] == 2
    )
    assert jaxrl_dist.load_policy(run_dir).evaluate(episodes=2).summary()["length_mean"] <= 5


@pytest.mark.usefixtures("walk")
def test_check_env_plays_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-env", "brax:walk"]) == 0
    assert "brax:walk: no fault found in" in capsys.readouterr().out


def test_what_libraries_print_is_hidden_and_what_we_print_is_not(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also where a library prints to the first stdout and leaves the first stderr,
    as JaxMARL's import does.
    """
    own = sys.stderr
    with libraries.theirs():
        print("theirs")
        sys.stdout = sys.__stdout__
        sys.stderr = sys.__stderr__
        print("theirs")
    print("ours")
    assert capfd.readouterr().out == "ours\n" and sys.stderr is own


@pytest.mark.usefixtures("walk")
def test_what_a_library_has_not_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=re.escape("brax has no such environment (did you mean 'walk'?)")
    ):
        find("brax:wlak")
    with pytest.raises(ConfigError, match="brax:walk has no option 'limits'"):
        find("brax:walk", {"limits": "3"})
    with pytest.raises(ConfigError, match="did you mean 'brax'"):
        find("brx:walk")


def test_a_missing_library_is_one_line_with_the_command(
    installed: Callable[[Callable[[str], bool]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed(lambda library: library == "pgx")
    for args in (
        ["train", "ppo", "--env", "brax:ant"],
        ["list", "envs", "brax"],
        ["check-env", "brax:ant"],
    ):
        assert cli.main(args) == 2
        assert capsys.readouterr().err == (
            "jaxrl-dist: error: brax: needs a package that is not installed: pip install 'jaxrl-dist[brax]'\n"
        )
    lines = libraries.summary()
    assert len(lines) == len(LIBRARIES)
    assert "brax:NAME       pip install 'jaxrl-dist[brax]'" in lines
    assert "pgx:NAME        installed; see: jaxrl-dist list envs pgx" in lines


@pytest.mark.parametrize(
    "env, message",
    [
        ("envpool:Ant-v5", "EnvPool is not installed: pip install 'jaxrl-dist[envpool]'"),
        (
            "Ant-v5",
            "which is tried next, is not installed: pip install 'jaxrl-dist[envpool]', or name gymnasium:Ant-v5",
        ),
        (
            "Pong-v5",
            "gymnax has no such environment, and EnvPool, which is tried next, is not installed: pip install",
        ),
        ("CartPol-v1", "gymnax has no such environment (did you mean 'CartPole-v1'?), and EnvPool"),
    ],
)
def test_without_envpool_no_other_library_takes_its_names(
    env: str,
    message: str,
    installed: Callable[[Callable[[str], bool]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed(lambda library: library != "envpool")
    assert cli.main(["train", "ppo", "--env", env]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and line.startswith(f"jaxrl-dist: error: --env {env}: ")
    assert locate("CartPole-v1") == ("gymnax", "CartPole-v1", None)
    assert locate("gymnasium:Ant-v5") == ("gymnasium", "Ant-v5", None)


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("name", ["walk", "walk_on"])
def test_a_name_without_its_library_is_answered_with_it(
    name: str, installed: Callable[[Callable[[str], bool]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another library has a name that is near: none there has an underscore."""
    monkeypatch.setattr(Walk, "ids", lambda: [name])
    monkeypatch.setattr(gymnax, "ids", lambda: ["WalkOn-v1"] if "_" in name else [])
    for present in ({"brax"}, {"brax", "envpool"}):
        installed(present.__contains__)
        with pytest.raises(ConfigError, match=re.escape(f"(did you mean 'brax:{name}'?)")):
            find(name)


def test_the_list_says_how_to_install_envpool(
    installed: Callable[[Callable[[str], bool]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed(lambda library: False)
    assert cli.main(["list", "envs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("envpool:")] == [
        "envpool:ID      pip install 'jaxrl-dist[envpool]'"
    ]


def test_a_library_that_cannot_be_imported_says_why(
    installed: Callable[[Callable[[str], bool]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> Any:
        raise AttributeError("jax has no attribute 'core_old'")

    installed(lambda library: True)
    monkeypatch.setattr(libraries.importlib, "import_module", fail)
    with pytest.raises(
        ConfigError,
        match=r"AttributeError:.*'core_old'",
    ):
        find("brax:ant")


def test_grids_of_categories_become_images() -> None:
    grid = jnp.array([[[0, 2], [1, 0]]], jnp.uint8)
    image = libraries.one_hot(grid, (2, 3))
    assert (image.shape, image.dtype) == ((1, 2, 5), bool)
    np.testing.assert_array_equal(image[0], [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]])


# --- Each library against a plain loop ------------------------------------------------------------


class Loop(NamedTuple):
    """An environment as its own library steps it."""

    reset: Callable[[jax.Array], tuple[Any, Any]]
    """``(key) -> (obs, state)``."""
    step: Callable[[jax.Array, Any, Any, Any], tuple[Any, Any, Any, Any, Any]]
    """``(key, state, action, number of the step) -> (obs, state, reward, terminated,
    truncated)``."""


def brax_loop(env_id: str, limit: int) -> Loop:
    from brax import envs

    env = envs.create(env_id, episode_length=limit, auto_reset=False)

    def reset(key: jax.Array) -> Any:
        state = env.reset(key)
        return state.obs, state

    def step(key: jax.Array, state: Any, action: Any, number: Any) -> Any:
        state = env.step(state, action)
        truncated = state.info["truncation"] > 0
        return state.obs, state, state.reward, (state.done > 0) & ~truncated, truncated

    return Loop(reset, step)


def craftax_loop(env_id: str, limit: int) -> Loop:
    from craftax.craftax_env import make_craftax_env_from_name

    env = make_craftax_env_from_name(env_id, auto_reset=False)
    params = env.default_params.replace(max_timesteps=limit)

    def step(key: jax.Array, state: Any, action: Any, number: Any) -> Any:
        obs, state, reward, done, _ = env.step_env(key, state, action, params)
        return (
            obs,
            state,
            reward,
            done & (state.player_health <= 0),
            done & (state.player_health > 0),
        )

    return Loop(lambda key: env.reset_env(key, params), step)


def jumanji_loop(env_id: str, limit: int) -> Loop:
    import jumanji

    env, endless = jumanji.make(env_id, time_limit=limit), jumanji.make(env_id, time_limit=10**6)

    def seen(timestep: Any) -> Any:
        obs = timestep.observation
        if env_id.startswith("Rubiks"):
            return obs.cube
        return {"grid": obs.grid, "tetromino": obs.tetromino, "mask": obs.action_mask.reshape(-1)}

    def reset(key: jax.Array) -> Any:
        state, timestep = env.reset(key)
        return seen(timestep), state

    def step(key: jax.Array, state: Any, action: Any, number: Any) -> Any:
        if env_id.startswith("Tetris"):  # its mask is over rotations and columns together
            action = jnp.stack([action // 10, action % 10])
        terminated = endless.step(state, action)[1].last()
        state, timestep = env.step(state, action)
        return seen(timestep), state, timestep.reward, terminated, timestep.last() & ~terminated

    return Loop(reset, step)


def pgx_loop(env_id: str, limit: int) -> Loop:
    import pgx

    env: Any = pgx.make(env_id)

    def seen(state: Any) -> Any:
        return {"observation": state.observation, "mask": state.legal_action_mask}

    def reset(key: jax.Array) -> Any:
        state = env.init(jax.random.split(key)[0])
        return seen(state), state

    def step(key: jax.Array, state: Any, action: Any, number: Any) -> Any:
        state = env.step(state, action, jax.random.split(key)[0])
        return seen(state), state, state.rewards[0], state.terminated, state.truncated

    return Loop(reset, step)


def navix_loop(env_id: str, limit: int) -> Loop:
    import navix

    env = navix.make(env_id, max_steps=limit)
    categories = jnp.eye(11, dtype=bool)

    def seen(timestep: Any) -> Any:
        return jnp.concatenate([categories[timestep.observation[..., i]] for i in range(3)], -1)

    def reset(key: jax.Array) -> Any:
        timestep = env.reset(key)
        return seen(timestep), timestep

    def step(key: jax.Array, timestep: Any, action: Any, number: Any) -> Any:
        timestep = env.step(timestep, action)
        return (
            seen(timestep),
            timestep,
            timestep.reward,
            timestep.is_termination(),
            timestep.is_truncation(),
        )

    return Loop(reset, step)


def playground_loop(env_id: str, limit: int) -> Loop:
    from mujoco_playground import registry

    env = registry.load(env_id, config_overrides={"impl": "jax"})

    def reset(key: jax.Array) -> Any:
        state = env.reset(key)
        return state.obs, state

    def step(key: jax.Array, state: Any, action: Any, number: Any) -> Any:
        state = env.step(state, action)
        over = state.done > 0
        return state.obs, state, state.reward, over, ~over & (number >= limit)

    return Loop(reset, step)


def xminigrid_loop(env_id: str, limit: int) -> Loop:
    import xminigrid

    env, params = xminigrid.make(env_id, max_steps=limit)

    def seen(timestep: Any) -> Any:
        obs = timestep.observation
        return jnp.concatenate(
            [jnp.eye(13, dtype=bool)[obs[..., 0]], jnp.eye(12, dtype=bool)[obs[..., 1]]], -1
        )

    def reset(key: jax.Array) -> Any:
        timestep = env.reset(params, key)
        return seen(timestep), timestep

    def step(key: jax.Array, timestep: Any, action: Any, number: Any) -> Any:
        timestep = env.step(params, timestep, action)
        over, lost = timestep.last(), timestep.discount == 0
        return seen(timestep), timestep, timestep.reward, over & lost, over & ~lost

    return Loop(reset, step)


LOOPS: dict[str, tuple[Callable[[str, int], Loop], dict[str, str], set[str]]] = {
    # name: (loop, options with the limit, ends that random actions meet)
    "brax:inverted_pendulum": (brax_loop, {"episode_length": "6"}, {"terminated", "truncated"}),
    "craftax:Craftax-Classic-Symbolic-v1": (craftax_loop, {"max_timesteps": "7"}, {"truncated"}),
    "jumanji:RubiksCube-partly-scrambled-v0": (jumanji_loop, {"time_limit": "6"}, {"truncated"}),
    "jumanji:Tetris-v0": (jumanji_loop, {"time_limit": "6"}, {"terminated", "truncated"}),
    "navix:Navix-Empty-Random-5x5-v0": (
        navix_loop,
        {"max_steps": "30"},
        {"terminated", "truncated"},
    ),
    "pgx:2048": (pgx_loop, {}, {"terminated"}),
    "playground:CartpoleBalance": (playground_loop, {"episode_length": "6"}, {"truncated"}),
    "xminigrid:MiniGrid-EmptyRandom-5x5": (
        xminigrid_loop,
        {"max_steps": "30"},
        {"terminated", "truncated"},
    ),
}
NUM_STEPS, NUM_ENVS = 40, 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", runs.cases(LOOPS, "jumanji:Tetris-v0"))
def test_a_library_is_stepped_as_its_own_loop_steps_it(name: str) -> None:
    needs(name.split(":")[0])
    make, options, ends = LOOPS[name]
    limit = int(next(iter(options.values()), 0))
    env = find(name, options).device()
    assert env.spec.max_episode_steps == (limit or None)
    actions = random_actions(env.spec.action, np.random.default_rng(0), NUM_STEPS, NUM_ENVS)
    keys = jax.random.split(jax.random.key(1), (NUM_STEPS, NUM_ENVS))
    first = jax.random.split(KEY, NUM_ENVS)
    first_obs, _, steps = run_gymnax(env, actions, keys, first)
    rows = unstack(steps)
    check_contract(rows, env.spec, NUM_ENVS)
    assert {name for name in ("terminated", "truncated") if np.any(getattr(steps[0], name))} == ends

    with libraries.theirs():
        loop = make(name.split(":")[1], limit)
        compare(
            loop, actions, jax.random.key_data(keys), jax.random.key_data(first), first_obs, rows
        )


def compare(
    loop: Loop, actions: np.ndarray, keys: jax.Array, first: jax.Array, first_obs: Any, rows: Any
) -> None:
    split = jax.vmap(jax.vmap(lambda key: jax.random.split(key)))(keys)
    loop = Loop(jax.jit(loop.reset), jax.jit(loop.step))
    for index in range(NUM_ENVS):
        obs, state = loop.reset(first[index])
        assert_close(jax.tree.map(lambda x: x[index], first_obs), obs)
        ended, number = False, 0
        for t, (step, _) in enumerate(rows):
            if ended:
                obs, state = loop.reset(split[t, index, 1])
                number, expected = 0, (0.0, False, False, False)
            else:
                number += 1
                obs, state, *flags = loop.step(split[t, index, 0], state, actions[t, index], number)
                expected = (float(flags[0]), bool(flags[1]), bool(flags[2]), True)
            ended = expected[1] or expected[2]
            now = jax.tree.map(lambda x: x[index], step)
            assert_close(now.obs, obs)
            np.testing.assert_allclose(now.reward, expected[0], rtol=1e-5, atol=1e-6)
            assert (now.terminated, now.truncated, now.valid) == expected[1:]


def assert_close(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), ours, theirs)


@pytest.mark.filterwarnings("ignore")
def test_other_players_answer_with_legal_actions_at_random() -> None:
    """Tic-tac-toe: each step adds a stone of ours and, unless the game is over, one of theirs."""
    needs("pgx")
    env = find("pgx:tic_tac_toe", {"opponents": "random"}).device()

    def play(key: jax.Array) -> Any:
        def step(carry: Any, key: jax.Array) -> Any:
            state, obs = carry
            action = jax.vmap(
                lambda key, mask: jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf))
            )(jax.random.split(key, 32), obs["mask"])
            state, now, _ = env.step(state, action, jax.random.split(key, 32))
            return (state, now.obs), (obs, now)

        return jax.lax.scan(step, env.reset(jax.random.split(key, 32)), jax.random.split(key, 60))[
            1
        ]

    before, now = jax.device_get(jax.jit(play)(KEY))
    over = now.terminated
    ours, theirs = (
        after["observation"][..., i].sum((2, 3)) for after in (now.obs,) for i in (0, 1)
    )
    ours_before, theirs_before = (before["observation"][..., i].sum((2, 3)) for i in (0, 1))
    going = now.valid & ~over
    assert (ours[going] == ours_before[going] + 1).all() and (
        theirs[going] == theirs_before[going] + 1
    ).all()
    fresh = ~now.valid
    assert set(np.unique(ours[fresh])) == {0} and set(np.unique(theirs[fresh])) == {0, 1}, (
        "either player begins"
    )
    empty = 1 - now.obs["observation"].sum(-1).reshape(*over.shape, 9)
    np.testing.assert_array_equal(now.obs["mask"][going], empty[going] > 0)
    assert set(np.unique(now.reward[over])) == {-1, 0, 1} and not now.reward[~over].any()


def needs(library: str) -> None:
    if not libraries.installed(library):
        pytest.skip(f"{library} is not installed: pip install {library}")


def test_a_mask_that_can_be_read_in_two_ways_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("jumanji")
    from jumanji import registration
    from jumanji.environments.logic.minesweeper.generator import UniformSamplingGenerator

    boards = {
        f"Board-v{n}": UniformSamplingGenerator(num_rows=2, num_cols=n, num_mines=1) for n in (2, 3)
    }
    for name, generator in boards.items():
        board = registration.EnvSpec(
            name, "jumanji.environments:Minesweeper", {"generator": generator}
        )
        monkeypatch.setitem(registration._REGISTRY, name, board)
    assert find("jumanji:Board-v3").spec.action.n == 6
    with pytest.raises(
        ConfigError,
        match=r"Board-v2.*2.*2.*4.*2",
    ):
        find("jumanji:Board-v2")


def test_xland_has_no_task_without_a_ruleset() -> None:
    needs("xminigrid")
    with pytest.raises(
        ConfigError, match=r"XLand-MiniGrid-R1-9x9 has no task without a ruleset, .* have tasks$"
    ):
        find("xminigrid:XLand-MiniGrid-R1-9x9")


@pytest.mark.case  # test_the_time_limit_of_a_game_in_rounds_is_a_truncation
def test_smax_maps_and_options() -> None:
    pytest.importorskip("jaxmarl")
    with jax.numpy_rank_promotion("allow"):
        spec = find(
            "jaxmarl:HeuristicEnemySMAX", {"scenario": "3m", "walls_cause_death": "false"}
        ).spec
        assert spec.num_agents == 3 and find("jaxmarl:HeuristicEnemySMAX").spec.num_agents == 5
    with pytest.raises(ConfigError, match=r"HeuristicEnemySMAX.*'4m'.*3m.*2s3z"):
        find("jaxmarl:HeuristicEnemySMAX", {"scenario": "4m"})
    with pytest.raises(ConfigError, match="MPE_simple_spread_v3 has no option 'scenario'"):
        find("jaxmarl:MPE_simple_spread_v3", {"scenario": "3m"})


@pytest.mark.case  # test_the_time_limit_of_a_game_in_rounds_is_a_truncation
def test_the_time_limit_of_brax_s_teams_is_a_truncation() -> None:
    pytest.importorskip("brax")
    pytest.importorskip("jaxmarl")
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")  # both libraries' own
        env = find("jaxmarl:ant_4x2", {"episode_length": "3"}).device()
        keys, ended = jax.random.split(jax.random.key(0), 4), []
        state, _ = jax.jit(env.reset)(keys)
        for _ in range(3):
            state, step, _ = jax.jit(env.step)(state, np.zeros((4, 2), np.float32), keys)
            ended.append((step.terminated.any(), step.truncated.all()))
    assert ended == [(False, False), (False, False), (False, True)]


@pytest.mark.filterwarnings("ignore")  # of jaxmarl
@pytest.mark.parametrize("inner", [False, True])
def test_a_battle_is_won_by_allies_who_live_when_no_enemy_does(inner: bool) -> None:
    pytest.importorskip("jaxmarl")
    from jaxrl_dist.envs.device.libraries.jaxmarl import Battle

    def step_env(key: Any, alive: Any, actions: Any) -> Any:
        state = SimpleNamespace(unit_alive=alive)
        return {}, SimpleNamespace(state=state) if inner else state, {}, {}, {"other": 7}

    battle = Battle(SimpleNamespace(num_allies=2, step_env=step_env))
    for alive in itertools.product([False, True], repeat=5):
        info = battle.step_env(None, np.array(alive), {})[-1]
        assert info == {"other": 7, "won": any(alive[:2]) and not any(alive[2:])}


def test_the_time_limit_of_a_game_in_rounds_is_a_truncation() -> None:
    pytest.importorskip("jaxmarl")
    assert find("jaxmarl:coin_game").spec.max_episode_steps == 100
    source, ended = find("jaxmarl:coin_game", {"num_inner_steps": "2", "num_outer_steps": "3"}), []
    with jax.numpy_rank_promotion("allow"):
        env, keys = source.device(), jax.random.split(jax.random.key(0), 2)
        state, _ = env.reset(keys)
        for _ in range(7):
            state, step, _ = jax.jit(env.step)(state, np.zeros(2, int), keys)
            ended.append((step.terminated.any(), step.truncated.all(), step.valid.all()))
    assert ended == [(False, False, True)] * 5 + [(False, True, True), (False, False, False)]


@pytest.mark.case  # test_the_state_of_particles_is_drawn
@pytest.mark.filterwarnings("ignore")  # of jaxmarl
@pytest.mark.parametrize(
    "name", ["MPE_simple_reference_v3", "MPE_simple_push_v3", "SMAX", "HeuristicEnemySMAX"]
)
def test_all_of_mpe_and_smax_is_drawn(name: str) -> None:
    draw_two_states_of(name)


@pytest.mark.filterwarnings("ignore")  # of jaxmarl
def test_the_state_of_particles_is_drawn() -> None:
    draw_two_states_of("MPE_simple_spread_v3")


def draw_two_states_of(name: str) -> None:
    pytest.importorskip("jaxmarl")
    with jax.numpy_rank_promotion("allow"):
        team = libraries.make("jaxmarl", name, {})
        states = [team.env.reset(jax.random.PRNGKey(seed))[1] for seed in range(2)]
        one, other = (team.render(jax.tree.map(np.asarray, state)) for state in states)
    assert one.shape == other.shape == (320, 320, 3) and one.dtype == np.uint8
    assert (one != other).any() and (one == 255).all(axis=2).mean() > 0.7


def test_what_nothing_draws_is_refused() -> None:
    pytest.importorskip("jaxmarl")
    with (
        pytest.raises(ConfigError, match="jaxmarl:coin_game cannot be drawn"),
        jax.numpy_rank_promotion("allow"),
    ):
        find("jaxmarl:coin_game").host(2, 0, drawn=True)
