"""Draws JAX environments with their own renderer,
from their states or from observations that are images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_dist.envs.agents.groups import team_size
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.contract import of_library
from jaxrl_dist.envs.native import picture
from jaxrl_dist.errors import ConfigError, one_line
from jaxrl_dist.spaces import channels_first, leaves
from jaxrl_dist.types import EnvSpec, PyTree

WIDTH = 300
HEIGHT = 200
"""Size in pixels of line drawings."""
SIDE = 240
"""Small images are enlarged until their longer side is close to this many pixels."""
_BLACK = (40, 40, 40)
_RED = (200, 70, 60)
_GREEN = (60, 150, 80)
_GREY = (160, 160, 160)


def own_render(env: Any, *params: PyTree) -> Callable[[PyTree], object] | None:
    """Returns the ``render(state, *params)`` of a user's environment;
    libraries' functions draw other things.
    """
    render = getattr(type(env), "render", None)
    if render is None or of_library(render):
        return None
    return lambda state: env.render(state, *params)


def check_drawable(spec: EnvSpec, render: Callable[[PyTree], object] | None) -> None:
    """Checks that ``draw`` can draw an environment, before a program is compiled for it.

    Raises:
      ConfigError: it has no ``render``, is not of classic control,
        and its observations are not images.
    """
    drawn = render is not None or spec.family == "classic_control"
    if not drawn and not _images(spec, spec.observation):
        raise _without_pictures(spec)


def _images(spec: EnvSpec, obs: PyTree) -> list[Any]:
    """Returns the parts of an observation, or of its space, that are images;
    those of a team are all its agents'.
    """
    alone = {
        name: part for name, part in spec.keyed(obs).items() if not team_size(spec.by_policy[name])
    }
    return [part for part in leaves(alone).values() if len(part.shape) in (2, 3)]


def _without_pictures(spec: EnvSpec) -> ConfigError:
    return ConfigError(
        f"{label_of(spec)} cannot be drawn: its observations are not images; give your own "
        "environment a method render(state, params) that returns an array [H, W, 3] of uint8"
    )


def draw(
    spec: EnvSpec, state: PyTree, obs: PyTree, render: Callable[[PyTree], object] | None = None
) -> np.ndarray:
    """Draws one environment, ``[H, W, 3]`` uint8; if the observation has several parts,
    its first image.

    Args:
      state: gymnax's state of the environment.
      obs: the observation; a single frame if policies see stacks.
      render: the environment's own function ``(state) -> picture``.

    Raises:
      ConfigError: ``render`` fails or returns something else; or it is None, the environment is not
        of classic control, and its observations are not images.
    """
    if render is not None:
        try:
            return picture(render(state))
        except Exception as error:
            raise ConfigError(f"{label_of(spec)} cannot be drawn: {one_line(error)}") from error
    if spec.family == "classic_control":
        for fields, line_drawing in _PICTURES.items():
            if {*fields} <= {*dir(state)}:
                return line_drawing(*(float(getattr(state, field)) for field in fields))
    images = _images(spec, obs)
    if not images:
        raise _without_pictures(spec)
    return _image(images[0])


def _image(obs: np.ndarray) -> np.ndarray:
    """Enlarges an image ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``;
    gives a colour to each channel that is not one.
    """
    from matplotlib import colormaps

    if obs.ndim == 2:
        obs = obs[..., None]
    elif channels_first(obs.shape):
        obs = np.moveaxis(obs, 0, 2)
    if obs.dtype == np.uint8:
        shown = obs / 255
    else:
        shown = np.clip(np.asarray(obs, np.float64), 0, 1)
    if shown.shape[2] == 1:
        shown = np.repeat(shown, 3, axis=2)
    elif not (shown.shape[2] == 3 and obs.dtype == np.uint8):
        # The colours of tab20 are in pairs that look alike, such as those of a board's two players.
        table = colormaps["tab10" if shown.shape[2] <= 10 else "tab20"]
        colors = table(np.arange(shown.shape[2]) % 20)[:, :3]
        shown = (shown[..., None] * colors).max(axis=2)
    times = max(1, SIDE // max(shown.shape[:2]))
    return (255 * shown).astype(np.uint8).repeat(times, axis=0).repeat(times, axis=1)


def _lines(
    *lines: tuple[list[tuple[float, float]], tuple[int, int, int], int], dots: Any = ()
) -> np.ndarray:
    """Draws lines (points, colour, width in pixels) and dots (point, colour, radius in pixels)."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    for points, color, width in lines:
        pen.line(points, color, width, joint="curve")
    for (x, y), color, radius in dots:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), color)
    return np.array(image)


def _cart_pole(x: float, angle: float) -> np.ndarray:
    """Draws ``x`` in metres, with 4.8 m visible, and the angle in radians from upright,
    positive to the right.
    """
    x = WIDTH / 2 + x * WIDTH / 4.8
    ground = 0.75 * HEIGHT
    pole = 80
    tip = x + pole * math.sin(angle), ground - pole * math.cos(angle)
    return _lines(
        ([(0, ground), (WIDTH, ground)], _GREY, 1),
        ([(x - 20, ground), (x + 20, ground)], _BLACK, 16),
        ([(x, ground), tip], _RED, 6),
        dots=[((x, ground), _GREY, 3)],
    )


def _pendulum(angle: float) -> np.ndarray:
    """Draws the angle in radians from upright, positive to the left, as Gymnasium does."""
    x = WIDTH / 2
    y = HEIGHT / 2
    length = 80
    tip = x - length * math.sin(angle), y - length * math.cos(angle)
    return _lines(([(x, y), tip], _RED, 12), dots=[(tip, _RED, 6), ((x, y), _BLACK, 4)])


def _acrobot(first: float, second: float) -> np.ndarray:
    """Draws angles in radians, ``first`` from hanging down and ``second`` from the first link.
    The line is the goal.
    """
    x = WIDTH / 2
    y = HEIGHT / 2
    length = 45
    middle = x + length * math.sin(first), y + length * math.cos(first)
    tip = (
        middle[0] + length * math.sin(first + second),
        middle[1] + length * math.cos(first + second),
    )
    return _lines(
        ([(0, y - length), (WIDTH, y - length)], _GREY, 1),
        ([(x, y), middle], _RED, 6),
        ([middle, tip], _GREEN, 6),
        dots=[((x, y), _BLACK, 4), (middle, _BLACK, 4)],
    )


def _mountain_car(position: float) -> np.ndarray:
    """Draws a car at a position between -1.2 and 0.6; the goal is near 0.5."""

    def place(x: float) -> tuple[float, float]:
        return (x + 1.2) / 1.8 * WIDTH, HEIGHT * (0.55 - 0.35 * math.sin(3 * x))

    car = place(position)
    goal = place(0.5)
    hill = [place(x) for x in np.linspace(-1.2, 0.6, 100)]
    return _lines(
        (hill, _BLACK, 2),
        ([goal, (goal[0], goal[1] - 25)], _GREEN, 3),
        dots=[((car[0], car[1] - 7), _RED, 7)],
    )


_PICTURES: dict[tuple[str, ...], Any] = {
    ("x", "theta"): _cart_pole,
    ("theta",): _pendulum,
    ("joint_angle1", "joint_angle2"): _acrobot,
    ("position",): _mountain_car,
}
"""The drawing function of each classic control environment, by the state fields that it shows."""
