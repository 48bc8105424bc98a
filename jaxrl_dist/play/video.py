"""Films a trained policy."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_dist.actors.evaluate import Evaluation
from jaxrl_dist.actors.step import env_of
from jaxrl_dist.envs.base import DrawnEnv
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.run.storage import check_place, replacing


def record(
    policy: Policy,
    out: str | pathlib.Path,
    episodes: int = 1,
    seed: int = 0,
    fps: int = 30,
    max_steps: int | None = 1000,
    *,
    sampled: bool | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[Evaluation, int]:
    """Plays episodes and writes them, one after the other, to an animated GIF.

    An evaluation with the same seed plays these episodes first.

    Args:
      out: the file to write; it must end in ``.gif``.
      episodes: number of episodes, at most 128; with several agents, one episode of each agent counts as one.
      fps: frames per second, rounded to the nearest rate that GIF's hundredths of a second allow.
      max_steps: as for ``Evaluator``.
      sampled: as for ``Policy.evaluate``.
      progress: called with the number of finished episodes.

    Returns:
      The evaluation, and the number of frames.

    Raises:
      ConfigError: the environment cannot be drawn, the file's directory is missing, or the file does not end in
        ``.gif``.
      OSError: the file cannot be written; an older file stays unchanged.
    """
    from PIL import Image

    spec, out = policy.source.spec, pathlib.Path(out)
    evaluator = policy.evaluator(episodes * spec.num_agents, seed, max_steps, sampled)
    if out.suffix.lower() != ".gif":
        raise ConfigError(f"{out} must end in .gif: a GIF is what is written")
    check_place(out)
    pictures: list[list[Any]] = [[] for _ in range(episodes)]

    def watch(env: DrawnEnv, indices: np.ndarray) -> None:
        # An environment is filmed until the last agent's episode is over.
        for index in sorted({env_of(spec, int(row), episodes * spec.num_agents) for row in indices}):
            image = Image.fromarray(env.render(index * spec.num_agents))
            # A palette per picture cuts it to a third of the memory.
            pictures[index].append(image.convert("P", palette=Image.Palette.ADAPTIVE))

    evaluation = evaluator.play(spec.keyed(policy.variables), progress, watch=watch)
    assert evaluation is not None, "nothing stops it"
    first, *others = (image for episode in pictures for image in episode)
    with replacing(out) as partial:
        first.save(partial, "GIF", save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
    return evaluation, 1 + len(others)
