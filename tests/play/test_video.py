"""Films of trained policies, and the pictures that gymnax does not draw."""

from __future__ import annotations

import errno
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import jax
import numpy as np
import own
import pytest
import runs
from PIL import Image

import jaxrl_dist
from jaxrl_dist import cli
from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.envs.base import Wrappers
from jaxrl_dist.envs.drawing import draw
from jaxrl_dist.envs.source import find
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.play import video
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.play.video import record
from jaxrl_dist.settings.resolve import find_env
from jaxrl_dist.spaces import Discrete
from jaxrl_dist.types import EnvSpec


class Painted(gymnasium.Env):
    """Counts to a number and shows it as a colour,
    if it is told to draw by this name of its argument.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, height: int = 7) -> None:
        self.render_mode, self.height, self.count = render_mode, height, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, self.count == 6, False, {}

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        return np.full((self.height, 5, 3), 40 * self.count, np.uint8)


def blind() -> Painted:
    """One that cannot be told to draw."""
    return Painted()


def untrained(env: str, **values: Any) -> Policy:
    config = jaxrl_dist.preset("pg", env, hidden_sizes=(4,), **values)
    source = find_env(config)
    return Policy(config, source, config.algorithm.make(source.spec).init(jax.random.key(0)))


def pictures(path: Path) -> tuple[list[np.ndarray], list[int]]:
    """Those of a GIF, and how long each is shown, in milliseconds."""
    with Image.open(path) as film:
        assert film.format == "GIF" and film.info["loop"] == 0
        found = []
        for number in range(film.n_frames):
            film.seek(number)
            found.append((np.array(film.convert("RGB")), film.info["duration"]))
    images, times = zip(*found, strict=True)
    return list(images), list(times)


class Drawn(own.Walk):
    """Draws its place as a colour, from its state and its parameters."""

    def render(self, state: own.WalkState, params: int) -> np.ndarray:
        return np.full((params, 4, 3), 100 + 30 * int(state.place), np.uint8)


class Misdrawn(own.Walk):
    """Draws in grey."""

    def render(self, state: own.WalkState, params: int) -> np.ndarray:
        return np.zeros((5, 4), np.uint8)


CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "gymnax:CartPole-v1": ({"frame_stack": 2}, (200, 300)),
    "gymnax:Breakout-MinAtar": ({}, (240, 240)),
    "envpool:CartPole-v1": ({"action_repeat": 2}, (400, 600)),
    "envpool:Pong-v5": ({}, (210, 160)),
    "test_video:Painted": ({"env_options": {"height": "9"}, "frame_stack": 2}, (9, 5)),
    "test_video:Painted ": ({"env_workers": "processes"}, (7, 5)),
}
SLOW = ("gymnax:Breakout-MinAtar", "envpool:Pong-v5", "test_video:Painted ")


@pytest.mark.parametrize(
    "env", [pytest.param(env, marks=[pytest.mark.slow] if env in SLOW else []) for env in CASES]
)
def test_what_is_filmed_is_what_is_evaluated(env: str, tmp_path: Path) -> None:
    values, size = CASES[env]
    policy = untrained(env.strip(), **values)
    played, count = record(policy, tmp_path / "film.gif", 2, seed=3, fps=50, max_steps=12)
    other = Evaluator({"": policy.algorithm}, policy.source, 2, 3, max_steps=12).play(
        {"": policy.variables}
    )
    np.testing.assert_array_equal(played.returns, other.returns)
    np.testing.assert_array_equal(played.lengths, other.lengths)
    assert count == sum(played.lengths) + 2
    images, times = pictures(tmp_path / "film.gif")
    assert {image.shape for image in images} == {(*size, 3)}
    assert sum(times) == 20 * count and len(images) > 4  # equal ones are shown as one, for longer


def test_actions_are_sampled_if_the_run_or_the_caller_says_so(tmp_path: Path) -> None:
    policy = untrained("gymnax:CartPole-v1", evaluation_policy="sampled")
    for asked, sampled in ((None, True), (False, False)):
        played, _ = record(policy, tmp_path / "film.gif", 2, seed=3, max_steps=20, sampled=asked)
        other = policy.evaluate(2, 3, max_steps=20, sampled=sampled)
        np.testing.assert_array_equal(played.lengths, other.lengths)
        assert played.sampled == other.sampled == sampled


def test_each_step_has_its_picture(tmp_path: Path) -> None:
    """The last one of an episode is of the state that it ended in."""
    played, count = record(untrained("test_video:Painted"), tmp_path / "film.gif", 2, 0, 10)
    images, times = pictures(tmp_path / "film.gif")
    assert played.lengths.tolist() == [6, 6] and played.cut == 0 and count == 14
    assert [int(image[0, 0, 0]) for image in images] == [0, 40, 80, 120, 160, 200, 240] * 2
    assert times == [100] * 14


@pytest.mark.parametrize(
    "env, values, fps",
    [
        ("test_video:Painted", {}, 20),
        ("test_video:Painted", {"action_repeat": 2}, 10),
        ("gymnax:Pendulum-v1", {}, 20),
        ("gymnax:CartPole-v1", {"env_options": {"tau": "0.001"}}, 1000),
        ("gymnax:Acrobot-v1", {"action_repeat": 2}, 2.5),
        ("gymnax:MountainCar-v0", {}, None),
    ],
)
def test_a_film_has_the_speed_of_its_environment(
    env: str,
    values: dict[str, Any],
    fps: float | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    policy, written = untrained(env, **values), list[float]()
    assert policy.source.spec.fps == (fps and pytest.approx(fps))
    monkeypatch.setattr(
        video, "write_gif", lambda pictures, file, fps: written.append(fps) or file.touch()
    )
    monkeypatch.setattr(video, "film", lambda *args: (None, []))
    for asked in (None, 7):
        record(policy, tmp_path / "film.gif", fps=asked)
    assert written == [pytest.approx(min(fps or 30, 50)), 7]


def test_an_mp4_has_the_pictures_of_the_gif(tmp_path: Path) -> None:
    """Odd sides get a row and a column of black."""
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    policy = untrained("test_video:Painted")
    assert (
        record(policy, tmp_path / "film.gif", 2, 0, 10)[1]
        == record(policy, tmp_path / "film.MP4", 2, 0, 10)[1]
        == 14
    )
    command = [
        ffmpeg.get_ffmpeg_exe(),
        "-i",
        str(tmp_path / "film.MP4"),
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-",
    ]
    read = subprocess.run(command, capture_output=True, check=True)
    assert re.search(rb"Video: h264.* 6x8,.* 10 fps", read.stderr)
    shown = np.frombuffer(read.stdout, np.uint8).reshape(14, 8, 6, 3)
    np.testing.assert_allclose(
        shown[:, 2, 2, 0].astype(int), [0, 40, 80, 120, 160, 200, 240] * 2, atol=9
    )
    assert shown[:, 7].max() < 90  # black, but for the compression


def test_an_mp4_without_its_package_is_refused_before_playing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(
        ConfigError, match=r"pip install imageio-ffmpeg; or name a file that ends in .gif"
    ):
        record(untrained("envpool:Taxi-v3"), tmp_path / "film.mp4")


@pytest.mark.parametrize("frame_stack", [1, 2])
def test_an_environment_of_the_users_draws_itself(frame_stack: int, tmp_path: Path) -> None:
    played, count = record(
        untrained("test_video:Drawn", frame_stack=frame_stack), tmp_path / "film.gif", 1, 0, 10
    )
    images, _ = pictures(tmp_path / "film.gif")
    assert count == played.lengths[0] + 1 and {image.shape for image in images} == {(7, 4, 3)}
    places = [(int(image[0, 0, 0]) - 100) // 30 for image in images]
    assert places[0] == 0 and all(
        abs(one - other) == 1 for one, other in itertools.pairwise(places)
    )


@pytest.mark.case  # test_the_state_of_particles_is_drawn
@pytest.mark.parametrize("frame_stack", [1, 2])
def test_a_team_of_jaxmarl_is_filmed(frame_stack: int, tmp_path: Path) -> None:
    pytest.importorskip("jaxmarl")
    with jax.numpy_rank_promotion("allow"):
        policy = untrained("jaxmarl:MPE_simple_spread_v3", frame_stack=frame_stack)
        assert record(policy, tmp_path / "film.gif", 1, 0, max_steps=4)[1] == 5
    images, _ = pictures(tmp_path / "film.gif")
    assert len(images) == 5 and {image.shape for image in images} == {(320, 320, 3)}


@pytest.mark.parametrize(
    "env, message",
    [
        (
            "test_video:Misdrawn",
            r"cannot be drawn: TypeError: render\(\) returned a ndarray\[5, 4\], not an array",
        ),
        ("own:Walk", r"own:Walk cannot be drawn:.* a method render\(state, params\)"),
        (
            "envpool:Taxi-v3",
            "envpool:Taxi-v3 cannot be drawn: render not implemented for this environment",
        ),
        (
            "gymnax:MemoryChain-bsuite",
            "gymnax:MemoryChain-bsuite cannot be drawn: its observations are not images",
        ),
        (
            "test_video:blind",
            r"test_video:blind cannot be drawn: TypeError: render\(\) returned a NoneType, not an array",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(env: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        record(untrained(env), tmp_path / "film.gif")
    assert list(tmp_path.iterdir()) == []


def test_it_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ConfigError, match="own:Walk cannot be drawn"):
        find("own:Walk").host(1, 0, drawn=True)
    find("test_video:Drawn").host(1, 0, drawn=True).close()


@pytest.mark.parametrize("policies", [{}, {"team": "pole_0,pole_2", "other": "pole_1"}])
def test_what_the_agents_of_a_team_see_is_no_image(policies: dict[str, str]) -> None:
    """Their observations side by side have two axes, and so have their numbers, one-hot."""
    wrappers = Wrappers(policies=policies, joint=("team" if policies else "",))
    source = find("team:CartPoles", {"num_agents": "3"}, wrappers=wrappers)
    with pytest.raises(
        ConfigError, match="team:CartPoles cannot be drawn: its observations are not images"
    ):
        source.host(1, 0, drawn=True)


def test_what_does_not_fit_leaves_the_film_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Image.Image, path: Path, *args: Any, **more: Any) -> None:
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Image.Image, "save", full)
    (tmp_path / "film.gif").write_bytes(b"before")
    with pytest.raises(OSError, match="No space left"):
        record(untrained("CartPole-v1"), tmp_path / "film.gif", max_steps=3)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"film.gif": b"before"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, film = str(runs.finished(runs.CARTPOLE)), str(tmp_path / "film.gif")
    assert cli.main(["video", run_dir, film, "--seed", "5", "--max-steps", "9"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2].startswith("return ") and printed[-1].startswith(f"wrote {film}: ")
    assert (
        cli.main(["evaluate", run_dir, "--seed", "5", "--episodes", "1", "--max-steps", "9"]) == 0
    )
    assert capsys.readouterr().out.splitlines()[-1] == printed[-2]
    assert (
        cli.main(["video", run_dir, film, "--max-steps", "9", "--evaluation-policy", "sampled"])
        == 0
    )
    assert "1 sampled episode, " in " ".join(capsys.readouterr().out.split())
    for args, message in {
        (): "which run, and which file? As in: jaxrl-dist video runs/NAME episode.gif",
        (run_dir,): f"which file? As in: jaxrl-dist video {run_dir} episode.gif",
        (run_dir, "film.png"): "film.png must end in .gif or .mp4",
        (run_dir, str(tmp_path / "no" / "film.gif")): "there is no directory",
        (run_dir, film, "--fps", "0"): "--fps must be >= 1 and <= 50, not 0",
        (run_dir, film, "--episodes", "101"): "--episodes must be >= 1 and <= 100",
        (run_dir, film, "--frames", "3"): "unknown flag --frames",
        (str(tmp_path), film): "is not a run directory: it has no config.json",
    }.items():
        assert cli.main(["video", *args]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1


# --- Pictures of gymnax ---------------------------------------------------------------------------


def spec(family: str = "other") -> EnvSpec:
    return EnvSpec("Env", "gymnax", family, Discrete(2), Discrete(2), None)


def middle(image: np.ndarray, color: str) -> np.ndarray:
    """Where the pixels of a colour lie on average: row and column."""
    red, green, blue = (image[..., axis].astype(int) for axis in range(3))
    found = red - green > 80 if color == "red" else green - np.maximum(red, blue) > 60
    return np.argwhere(found).mean(axis=0)


@pytest.mark.parametrize(
    "states, row, column",
    [
        ([{"x": 0.0, "theta": x} for x in (-0.2, 0.0, 0.2)], 0, 1),
        ([{"x": x, "theta": 0.0} for x in (-1.0, 0.0, 1.0)], 0, 1),
        ([{"theta": x} for x in (1.0, 0.0, -1.0)], 0, 1),
        ([{"theta": x} for x in (0.0, 1.5, 3.1)], 1, 0),
        ([{"joint_angle1": x, "joint_angle2": 0.0} for x in (-1.0, 0.0, 1.0)], 0, 1),
        ([{"position": x} for x in (-1.2, -0.5, 0.6)], 0, 1),
    ],
)
def test_classic_control_is_where_its_state_says(
    states: list[dict[str, float]], row: int, column: int
) -> None:
    """To the right, or down, from one state to the next."""
    images = [
        draw(spec("classic_control"), SimpleNamespace(**state), np.zeros(2)) for state in states
    ]
    assert {(image.shape, image.dtype) for image in images} == {((200, 300, 3), np.dtype(np.uint8))}
    for one, other in itertools.pairwise(middle(image, "red") for image in images):
        assert not row or other[0] > one[0] + 5
        assert not column or other[1] > one[1] + 5


def test_channels_have_colours_and_pixels_are_large() -> None:
    obs = np.zeros((10, 8, 4), bool)
    obs[0, 1, 0] = obs[0, 1, 2] = obs[5, 5, 3] = True
    image = draw(spec(), None, obs)
    assert image.shape == (240, 192, 3) and not image[24:120].any()
    blocks = image[12::24, 12::24]
    assert (np.argwhere(blocks.any(axis=2)) == [[0, 1], [5, 5]]).all()
    assert (image[24 * 5 : 24 * 6, 24 * 5 : 24 * 6] == blocks[5, 5]).all() and (
        blocks[0, 1] != blocks[5, 5]
    ).any()


def test_images_with_colours_are_shown_as_they_are() -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (300, 250, 3), np.uint8)
    np.testing.assert_array_equal(draw(spec(), None, rgb), rgb)
    grey = rgb[..., 0]
    np.testing.assert_array_equal(draw(spec(), None, grey), np.repeat(grey[..., None], 3, 2))
    np.testing.assert_array_equal(draw(spec(), None, np.moveaxis(rgb, 2, 0)), rgb)
    with pytest.raises(ConfigError, match="cannot be drawn"):
        draw(spec(), None, np.zeros(4))
