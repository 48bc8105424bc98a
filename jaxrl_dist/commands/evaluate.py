"""``jaxrl-dist evaluate``: plays episodes with a trained policy."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxrl_dist.algorithms import from_file
from jaxrl_dist.checks import check_range
from jaxrl_dist.commands import find_modules, flags, help
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.run.directories import check_run_dir
from jaxrl_dist.settings.stored import stored_fields

if TYPE_CHECKING:
    from jaxrl_dist.play.policy import Policy


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Plays episodes with the policy of a finished or unfinished run."""

    run_dir: Annotated[str, help.Argument("RUN_DIR")] = ""
    """Directory of the run, such as runs/NAME."""
    episodes: int = 100
    """Number of episodes to play."""
    seed: int = 0
    """Seed of the environments."""
    env: str | None = None
    """Environment to play instead of the run's; required again if it has the form my_module:make."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment instead of the run's."""
    algorithm: str | None = None
    """File of the algorithm, if the run trained your own."""
    checkpoint: str | None = None
    """Play the policy of this checkpoint: "best" (the highest return of training episodes) or its env steps; None: the
    trained policy, or else that of the newest checkpoint."""
    evaluation_policy: Literal["greedy", "sampled"] | None = None
    """Take the best actions or sample them; None: as the run's evaluations did."""
    max_steps: int | None = None
    """Env steps after which an episode is cut; None: 27,000, or the environment's own limit if longer."""

    @property
    def sampled(self) -> bool | None:
        """Returns ``evaluation_policy`` as ``Policy.evaluate`` takes it."""
        return None if self.evaluation_policy is None else self.evaluation_policy == "sampled"


def run(args: Sequence[str]) -> int:
    """Runs ``evaluate RUN_DIR [FLAGS]``."""
    asked = flags.parse(Evaluate, args, "jaxrl-dist evaluate")
    if not asked.run_dir:
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist evaluate runs/NAME")
    check_range(asked, "episodes", low=1, high=10**6)
    policy = asked_policy(asked)

    from jaxrl_dist.run.console import Display, played

    display = Display(asked.episodes)
    with display.live:
        how: dict[str, Any] = {"max_steps": asked.max_steps, "sampled": asked.sampled}
        result = policy.evaluate(asked.episodes, asked.seed, **how, progress=display.evaluating)
    display.console.print(visible(played(result.summary())))
    return 0


def asked_policy(asked: Evaluate, name: str | None = None) -> Policy:
    """Loads the policy of the run that the user named; ``name`` picks one of several policies.

    Raises:
      ConfigError: the directory holds no run, or no policy.
    """
    check_range(asked, "seed", low=0, high=2**31 - 1)
    check_range(asked, "max_steps", low=1, high=10**9)
    own = from_file(asked.algorithm) if asked.algorithm else None
    check_run_dir(pathlib.Path(asked.run_dir))
    stored_fields(pathlib.Path(asked.run_dir), own, asked.env)  # fails before JAX is imported
    find_modules(asked.env)

    from jaxrl_dist.play.policy import load_policy

    how: dict[str, Any] = {"policy": name, "checkpoint": asked.checkpoint}
    return load_policy(asked.run_dir, own, env=asked.env, env_options=asked.env_options or None, **how)
