"""``jaxrl-dist video``: films episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from jaxrl_dist.checks import check_range
from jaxrl_dist.commands import evaluate, flags, help
from jaxrl_dist.errors import ConfigError, visible


@dataclasses.dataclass(frozen=True)
class Video(evaluate.Evaluate):
    """Films episodes as an animated GIF: the first ones that ``evaluate`` plays with the same seed."""

    out: Annotated[str, help.Argument("FILE.gif")] = ""
    """The file to write."""
    episodes: int = 1
    """Number of episodes to play, one after the other."""
    fps: int = 30
    """Frames per second; each step is one frame."""
    max_steps: int | None = 1000
    """Env steps after which an episode is cut; None: as in evaluate."""


def run(args: Sequence[str]) -> int:
    """Runs ``video RUN_DIR FILE.gif [FLAGS]``."""
    asked = flags.parse(Video, args, "jaxrl-dist video")
    if not asked.run_dir or not asked.out:
        missing = "which file?" if asked.run_dir else "which run, and which file?"
        raise ConfigError(f"{missing} As in: jaxrl-dist video {asked.run_dir or 'runs/NAME'} episode.gif")
    check_range(asked, "episodes", low=1, high=100)
    check_range(asked, "fps", low=1, high=50)
    policy = evaluate.asked_policy(asked)

    from jaxrl_dist.play.video import record
    from jaxrl_dist.run.console import Display, played

    display = Display(asked.episodes * policy.source.spec.num_agents)
    with display.live:
        options = asked.episodes, asked.seed, asked.fps, asked.max_steps
        result, pictures = record(policy, asked.out, *options, sampled=asked.sampled, progress=display.evaluating)
    display.console.print(visible(f"{played(result.summary())}\nwrote {asked.out}: {pictures} pictures"))
    return 0
