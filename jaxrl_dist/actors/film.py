"""Films episodes: a picture of each step, and the animated GIF of these pictures."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np

from jaxrl_dist.actors.evaluate import Evaluation, Evaluator
from jaxrl_dist.actors.step import env_of
from jaxrl_dist.envs.base import DrawnEnv
from jaxrl_dist.types import EnvSpec, Variables


def film(
    evaluator: Evaluator,
    spec: EnvSpec,
    variables: Variables,
    num_envs: int,
    progress: Callable[[int], None] = lambda done: None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Evaluation, list[Any]] | None:
    """Plays the episodes of an evaluator of ``num_envs`` environments.

    The other arguments and the errors are as for ``Evaluator.play``.

    Returns:
      The evaluation, and the pictures (of Pillow) of all environments, one environment after the
      other; None if the evaluation was stopped.
    """
    pictures: list[list[Any]] = [[] for _ in range(num_envs)]

    def watch(env: DrawnEnv, indices: np.ndarray) -> None:
        # An environment is filmed until the last agent's episode is over.
        for index in sorted(
            {env_of(spec, int(row), num_envs * spec.num_agents) for row in indices}
        ):
            pictures[index].append(picture(env, index * spec.num_agents))

    evaluation = evaluator.play(variables, progress, stop=stop, watch=watch)
    if evaluation is None:
        return None
    return (evaluation, [image for episode in pictures for image in episode])


def picture(env: DrawnEnv, index: int) -> Any:
    """Returns the picture (of Pillow) of an environment; raises what ``env.render`` raises."""
    from PIL import Image

    # A palette per picture cuts it to a third of the memory.
    return Image.fromarray(env.render(index)).convert("P", palette=Image.Palette.ADAPTIVE)


def speed(spec: EnvSpec, otherwise: float = 30) -> float:
    """Returns the frames per second of a film: the environment's, but at most ``MAX_FPS``.

    Args:
      otherwise: for environments that do not name any.
    """
    return min(spec.fps or otherwise, MAX_FPS)


MAX_FPS = 50
"""Frames per second at most: many players show a picture of a GIF for 20 ms or longer."""


def write_gif(pictures: Sequence[Any], file: pathlib.Path | IO[bytes], fps: float) -> None:
    """Writes pictures as an animated GIF, which rounds the time of a picture to 0.01 s.

    Raises:
      OSError: the file cannot be written.
    """
    first, *others = pictures
    first.save(file, "GIF", save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
