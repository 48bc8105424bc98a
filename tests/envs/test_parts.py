"""Observations and actions with parts, and action masks, on every kind of environment."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parts
import pytest

from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError, EnvError
from jaxrl_dist.memory.frames import Frame
from jaxrl_dist.nn.observations import legal
from jaxrl_dist.spaces import Box, Discrete, describe, leaves

HOST = {"part": "action_mask", "info": "mask", "method": "mask"}


def test_paths_name_the_parts_in_jax_s_order() -> None:
    tree = {"b": {"y": 1, "x": 2}, "a": 3}
    assert leaves(tree) == {"a": 3, "b/x": 2, "b/y": 1} and list(
        leaves(tree).values()
    ) == jax.tree.leaves(tree)
    assert leaves(5) == {"": 5}


@pytest.mark.parametrize(
    "where, workers",
    [
        pytest.param("part", "processes", marks=pytest.mark.case),
        ("info", "threads"),
        ("method", "threads"),
    ],
)
def test_gymnasium_shows_its_parts_and_its_mask(where: str, workers: Any) -> None:
    """As the environment itself does, step by step,
    with a tuple as a dict and categories counted from 0.
    """
    source = find("parts:HostGrid", {"where": where}, workers=workers)
    assert source.spec.mask == HOST[where] and not source.spec.unread_mask
    own = parts.HostGrid(where)
    shown, _ = own.reset()
    with closing(source.host(2, 0)) as host:
        obs = host.reset()
        ended = False
        for action in (0, 0, 0, 1, 1, 1, 1, 0, 1):
            if where == "part":
                np.testing.assert_array_equal(obs["inner"]["0"][0], shown["inner"][0] - 2)
                np.testing.assert_array_equal(obs["inner"]["1"][0], shown["inner"][1])
                assert obs["inner"]["1"].dtype == np.uint8
            numbers = shown["numbers"] if where == "part" else shown
            name = "numbers" if where == "part" else "observation"
            np.testing.assert_array_equal(obs[name], np.float32([numbers, numbers]))
            np.testing.assert_array_equal(obs[source.spec.mask], [own.mask(), own.mask()])
            np.testing.assert_array_equal(legal(source.spec, obs), [own.mask().astype(bool)] * 2)
            step, _ = host.step(np.array([action, action]))
            if ended:
                (shown, _), ended = own.reset(), False
            else:
                shown, reward, terminated, truncated, _ = own.step(action)
                ended = terminated or truncated
                assert step.reward[0] == np.float32(reward) and step.terminated[0] == terminated
            obs = step.obs


def test_a_method_with_arguments_hides_no_mask_of_the_info() -> None:
    """gymnasium's Taxi has ``action_mask(state)``, and the mask of now in its info."""
    source = find("gymnasium:Taxi-v4")
    assert source.spec.mask == "mask" and source.mask == ("info", "action_mask", "")
    with closing(source.host(2, 0)) as host:
        obs = host.reset()
        assert obs["mask"].shape == (2, 6) and 0 < obs["mask"].sum() < 12


def test_a_mask_that_goes_missing_is_an_error() -> None:
    with closing(find("parts:Forgetful").host(1, 0)) as host:
        host.reset()
        with pytest.raises(
            EnvError,
            match=r"0.*0.*info\['action_mask'\].*None.*4",
        ):
            host.step(np.array([0]))


def test_actions_with_several_components_have_a_mask_for_each() -> None:
    spec = find("parts:HostGrid", {"wide": "true"}).spec
    obs = {"action_mask": np.array([[1, 0, 0, 0], [0, 1, 1, 1]], bool)}
    # nothing legal: everything is
    np.testing.assert_array_equal(legal(spec, obs), [[1, 0, 1, 1], [0, 1, 1, 1]])


@pytest.fixture
def grids() -> Any:
    return {where: find(parts.Grid(where)) for where in ("part", "state")}


def test_gymnax_shows_its_parts_and_its_mask(grids: Any) -> None:
    spec = grids["part"].spec
    assert (
        describe(spec.observation)
        == "{inner: {picture: uint8[6, 6, 1], row: Discrete(4)}, mask: bool[4], numbers: float32[2]}"
    )
    assert describe(grids["state"].spec.observation) == "{observation: float32[2], mask: bool[4]}"
    for source in grids.values():
        assert source.spec.mask == "mask" and not source.spec.unread_mask
        env = source.device()
        keys = jax.random.split(jax.random.key(0), 3)
        state, obs = env.reset(keys)
        np.testing.assert_array_equal(obs["mask"], [[True, True, False, False]] * 3)
        state, step, _ = env.step(state, jnp.array([0, 1, 2]), keys)
        np.testing.assert_array_equal(step.obs["mask"], [[1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 0, 0]])
        assert step.reward.tolist() == pytest.approx(
            [-0.1, -0.1, -10]
        ) and step.terminated.tolist() == [0, 0, 1]
        with closing(source.host(3, 0)) as host:
            np.testing.assert_array_equal(host.reset()["mask"], obs["mask"])
            np.testing.assert_array_equal(
                host.step(np.array([0, 1, 2]))[0].obs["mask"], step.obs["mask"]
            )


def test_actions_with_parts_reach_the_environment() -> None:
    source = find(parts.Secret())
    assert source.spec.action == {"guess": source.spec.action["guess"], "sign": Discrete(2)}
    assert isinstance(source.spec.action["guess"], Box)
    with closing(source.host(2, 0)) as host:
        secret = host.reset()["state"][:, 0]
        guess = np.stack([secret, [99, 99]], axis=1)[[0, 1], [0, 1]][:, None].astype(np.float32)
        step, _ = host.step({"guess": guess, "sign": (secret > 0).astype(np.int32)})
        # 99 is clipped to 2
        np.testing.assert_allclose(step.reward, [0, -(2 - secret[1])], rtol=1e-6)
        with pytest.raises(ValueError, match=r"2.*1.*1.*Discrete\(n=2\)"):
            host.step({"guess": guess, "sign": np.array([0, 2])})


def test_names_of_actions_may_have_slashes() -> None:
    with closing(find("parts:Arms").host(2, 0)) as host:
        host.reset()
        step, _ = host.step(
            {"arm/left": np.array([0, 2]), "arm": {"right": {"0": np.array([5, 6])}}}
        )
        assert step.reward.tolist() == [15, 36]


def test_envpool_shows_its_parts() -> None:
    source = find("envpool:CartpoleBalance-v1")
    assert isinstance(source.spec.observation, dict)
    with closing(source.host(2, 0)) as host:
        obs = host.reset()
        assert {path: part.shape[1:] for path, part in leaves(obs).items()} == {
            path: part.shape for path, part in leaves(source.spec.observation).items()
        }
        action = np.zeros((2, *source.spec.action.shape), np.float32)
        assert leaves(host.step(action)[0].obs).keys() == leaves(obs).keys()


def test_envpool_bools_and_masks() -> None:
    maze, cleaner = (find(f"envpool:Jumanji/{name}-v0") for name in ("Maze", "Cleaner"))
    assert describe(maze.spec.observation["walls"]) == "bool[10, 10]"
    assert describe(cleaner.spec.action) == "MultiDiscrete(4, 4, 4)"
    for source, num_choices in (maze, 4), (cleaner, 12):
        assert source.spec.mask == "action_mask" and not source.spec.unread_mask
        with closing(source.host(2, 0)) as host:
            obs = host.reset()
            assert {path: x.shape[1:] for path, x in leaves(obs).items()} == {
                path: part.shape for path, part in leaves(source.spec.observation).items()
            }
            assert obs["action_mask"].shape == (2, num_choices) and obs["action_mask"].dtype == bool
            for _ in range(5):  # an illegal move would end the cleaners' episode
                action = obs["action_mask"].reshape(2, -1, 4).argmax(-1).astype(np.int32)
                step, _ = host.step(action[:, 0] if source is maze else action)
                obs = step.obs
                assert not step.terminated.any()
    combinations = find("envpool:Jumanji/Minesweeper-v0").spec
    assert (
        combinations.mask is None
        and "has 100 numbers instead of 20 zeros and ones" in combinations.unread_mask
    )


@pytest.mark.case  # test_gymnax_shows_its_parts_and_its_mask
def test_frames_of_parts_are_stacked_each() -> None:
    """The mask of the newest frame is the one that counts."""
    with pytest.raises(
        ConfigError,
        match=r"needs observations that are arrays of numbers, but .* has Discrete\(4\)",
    ):
        find(parts.Grid(), wrappers=Wrappers(frame_stack=3))
    source = find(parts.Grid("state"), wrappers=Wrappers(frame_stack=3))
    assert source.spec.observation["observation"].shape == (6,)
    env, keys = source.device(), jax.random.split(jax.random.key(0), 2)
    state, _ = env.reset(keys)
    for _ in range(2):
        state, step, _ = env.step(state, jnp.array([0, 1]), keys)
    np.testing.assert_allclose(step.obs["observation"][0], [0, 0, 0, 0.25, 0, 0.5])
    np.testing.assert_array_equal(legal(source.spec, step.obs), [[1, 1, 1, 0], [1, 1, 0, 1]])
    with closing(
        find("parts:HostGrid", {"where": "info"}, wrappers=Wrappers(frame_stack=3)).host(2, 0)
    ) as host:
        frame = host.reset()
        assert (
            isinstance(frame, Frame)
            and frame.pixels["observation"].shape == (2, 2)
            and frame.fresh.all()
        )


def test_what_has_no_policy_is_named_with_its_part() -> None:
    with pytest.raises(ConfigError, match=r"'x'.*Text.*Discrete.*MultiDisc"):
        find("faulty:spaced", {"observation": "Words"})
