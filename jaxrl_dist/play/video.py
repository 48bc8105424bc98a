"""Films of a trained policy at play."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_dist.actors.evaluate import Evaluation, Evaluator
from jaxrl_dist.envs.base import DrawnEnv
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.play.policy import Policy


def record(
    policy: Policy,
    out: str | pathlib.Path,
    episodes: int = 1,
    seed: int = 0,
    fps: int = 30,
    max_steps: int | None = 1000,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[Evaluation, int]:
    """Plays greedy episodes and writes them, one after the other, as an animated GIF.

    They are the first that an evaluation with this seed plays.

    Args:
      out: the file to write, which must end in ``.gif``.
      episodes: how many, at most 128.
      fps: pictures a second; GIF counts in hundredths of a second, and shows the nearest that they make.
      max_steps: as of ``Evaluator``.
      progress: hears how many episodes are played.

    Returns:
      What was played, and the number of pictures.

    Raises:
      ConfigError: the environment cannot be drawn, or the file has no place or is no GIF.
      OSError: the file cannot be written; what was there before is still there.
    """
    from PIL import Image

    out = pathlib.Path(out)
    if out.suffix.lower() != ".gif":
        raise ConfigError(f"{out} must end in .gif: a GIF is what is written")
    if not out.parent.is_dir():
        raise ConfigError(f"{out} cannot be written: there is no directory {out.parent}")
    pictures: list[list[Any]] = [[] for _ in range(episodes)]

    def watch(env: DrawnEnv, indices: np.ndarray) -> None:
        for index in indices:  # with a palette of their own, and a third as large
            image = Image.fromarray(env.render(int(index)))
            pictures[index].append(image.convert("P", palette=Image.Palette.ADAPTIVE))

    evaluator = Evaluator(policy.algorithm, policy.source, episodes, seed, max_steps)
    played = evaluator.play(policy.variables, progress, watch=watch)
    assert played is not None, "nothing stops it"
    first, *others = (image for episode in pictures for image in episode)
    partial = out.with_name(f".{out.name}.new")  # so that what stands there is replaced by a whole film or not at all
    try:
        first.save(partial, "GIF", save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return played, 1 + len(others)
