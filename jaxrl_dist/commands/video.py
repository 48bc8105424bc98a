"""``jaxrl-dist video``: films episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from jaxrl_dist.commands import evaluate, flags, help
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible


@dataclasses.dataclass(frozen=True)
class Video(evaluate.Evaluate):
    """Films episodes as an animated GIF or as MP4:
    the first ones that ``evaluate`` plays with the same seed.
    """

    out: Annotated[str, help.Argument("FILE.gif")] = ""
    """The file to write: its name ends in .gif or .mp4."""
    episodes: int = setting(1, low=1, high=100)
    """Number of episodes to play, one after the other."""
    fps: int | None = setting(None, low=1, high=50)
    """Frames per second; each step is one frame. None: as the environment says, or else 30."""
    max_steps: int | None = setting(1000, low=1, high=10**9)
    """Env steps after which an episode is cut; None: as in evaluate."""


def run(args: Sequence[str]) -> int:
    """Runs ``video RUN_DIR FILE.gif [FLAGS]``."""
    options = flags.parse(Video, args, "jaxrl-dist video")
    if not options.run_dir or not options.out:
        missing = "which file?" if options.run_dir else "which run, and which file?"
        raise ConfigError(
            f"{missing} As in: jaxrl-dist video {options.run_dir or 'runs/NAME'} episode.gif"
        )
    policy = options.load(env_options=options.env_options, num_simulations=options.num_simulations)

    from jaxrl_dist.play.video import record
    from jaxrl_dist.run.console import Display, evaluation_lines

    display = Display(options.episodes * policy.source.spec.num_agents)
    sizes = {
        name: getattr(options, name) for name in ("episodes", "seed", "fps", "max_steps", "sampled")
    }
    with display.live:
        result, pictures = record(policy, options.out, **sizes, progress=display.evaluating)
    display.console.print(
        visible(f"{evaluation_lines(result.summary())}\nwrote {options.out}: {pictures} pictures")
    )
    return 0
