"""``jaxrl-dist record``: stores what a run's policy experiences, or what the run has experienced,
as a data set.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from jaxrl_dist.checks import check_used
from jaxrl_dist.commands import evaluate, flags, help
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible

if TYPE_CHECKING:
    from jaxrl_dist.data.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class Record(evaluate.Trained):
    """Plays with the policy of a run, and stores its experience as a data set,
    of which `train ALGO --data` learns.
    """

    out: Annotated[str, help.Alias("-o")] = ""
    """Directory to make for the data set."""
    steps: int = setting(100_000, low=1, high=10**9)
    """Env steps to play."""
    num_envs: int = setting(16, low=1, high=4096)
    """Environments that play."""
    seed: int = setting(0, low=0, high=2**31 - 1)
    """Seed of the environments and of the actions."""
    random_share: float = setting(0.0, low=0, high=1)
    """Probability of a uniformly random action instead of the policy's."""
    greedy: bool = False
    """Take the best actions instead of sampling them."""
    replay: bool = False
    """Store the steps in the checkpoint's replay memory instead of playing."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment instead of the run's."""


def run(args: Sequence[str]) -> int:
    """Runs ``record RUN_DIR -o DIR [FLAGS]``."""
    options = flags.parse(Record, args, "jaxrl-dist record")
    if not options.run_dir:
        raise ConfigError(
            "which run, and where to? As in: jaxrl-dist record runs/NAME -o data/NAME"
        )
    if not options.out:
        raise ConfigError(f"where to? As in: jaxrl-dist record {options.run_dir} -o data/NAME")
    playing = "steps", "num_envs", "seed", "random_share", "greedy"
    check_used(
        options, *playing, active=not options.replay, needed="playing, and --replay stores a memory"
    )

    from jaxrl_dist.data.writing import Place

    with contextlib.closing(Place(options.out)) as place:  # before hours of playing
        data = _experience(options)
        path = data.save(place)
    print(visible(f"{data.summary()}\nwrote {path}"))
    return 0


def _experience(options: Record) -> Dataset:
    policy = options.load(env_options=options.env_options)

    from jaxrl_dist.config.train import settings_of
    from jaxrl_dist.play import recording
    from jaxrl_dist.run.console import Display

    behaviour = {"run": options.run_dir, "checkpoint": options.checkpoint}
    settings = settings_of(policy.config)
    about = {"env": policy.source.spec.id, "settings": settings, "behaviour": behaviour}
    if options.replay:
        return recording.of_memory(policy, options.run_dir, about, options.checkpoint)
    display = Display(0)
    with display.live:
        task = display.live.add_task("recording", total=options.steps, status="")
        return recording.record(
            policy,
            options.steps,
            num_envs=options.num_envs,
            seed=options.seed,
            random_share=options.random_share,
            greedy=options.greedy,
            about=about,
            progress=lambda done: display.live.update(task, completed=min(done, options.steps)),
        )
