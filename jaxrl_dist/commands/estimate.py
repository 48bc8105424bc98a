"""``jaxrl-dist estimate``: estimates the return of a run's policy from a data set."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from jaxrl_dist.checks import MAX_SIZE, counted
from jaxrl_dist.commands import evaluate, flags
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.hosts import stdout

if TYPE_CHECKING:
    from jaxrl_dist.play.estimate import Estimates


@dataclasses.dataclass(frozen=True)
class Estimate(evaluate.Trained):
    """Estimates the mean discounted return of a run's policy from the episodes of a data set,
    without playing.
    """

    data: str = ""
    """Directory of the data set."""
    discount: float | None = setting(None, low=0, high=1)
    """Discount of the returns; None: the run's."""
    evaluation_policy: Literal["greedy", "sampled"] | None = None
    """Take the best actions or sample them; None: as the run's evaluations did.
    Ratios need a policy that samples."""
    num_simulations: int | None = setting(None, low=0, high=10**4)
    """0: the network of an algorithm that plans acts without a search, as estimates require."""
    refits: int = setting(20, low=2, high=1000)
    """Networks fitted to resampled episodes, for the intervals of fqe and dr."""
    updates: int = setting(5000, low=1, high=10**9)
    """Updates of each network."""
    hidden_sizes: tuple[int, ...] = setting((64, 64), low=1, high=MAX_SIZE)
    """Widths of their hidden layers."""
    seed: int = setting(0, low=0, high=2**31 - 1)
    """Seed of the networks, the batches and the resampled episodes."""
    json: bool = False
    """Print JSON."""


def run(args: Sequence[str]) -> int:
    """Runs ``estimate RUN_DIR --data DIR [FLAGS]``."""
    options = flags.parse(Estimate, args, "jaxrl-dist estimate")
    if not options.run_dir:
        raise ConfigError(
            "which run, and from which data set? "
            "As in: jaxrl-dist estimate runs/NAME --data data/NAME"
        )
    if not options.data:
        raise ConfigError(
            f"from which data set? As in: jaxrl-dist estimate {options.run_dir} --data data/NAME"
        )
    with stdout.kept_for(options.json):
        estimates = _estimate(options)
    if options.json:
        print(json.dumps(estimates.summary(), indent=2))
    else:
        print(visible(text(estimates)))
    return 0


def _estimate(options: Estimate) -> Estimates:
    policy = options.load(num_simulations=options.num_simulations)

    from jaxrl_dist.data.dataset import Dataset
    from jaxrl_dist.play.estimate import estimate
    from jaxrl_dist.run.console import Display

    data = Dataset.load(options.data)
    sampled = None
    if options.evaluation_policy is not None:
        sampled = options.evaluation_policy == "sampled"
    display = Display(0, quiet=options.json)
    with display.live:
        task = display.live.add_task("fitting", total=options.updates, status="")
        return estimate(
            policy,
            data,
            discount=options.discount,
            sampled=sampled,
            refits=options.refits,
            updates=options.updates,
            hidden_sizes=options.hidden_sizes,
            seed=options.seed,
            progress=lambda done: display.live.update(task, completed=done),
        )


def text(estimates: Estimates) -> str:
    """Formats estimates for reading."""
    from jaxrl_dist.play.estimate import NAMES
    from jaxrl_dist.training.tables import aligned

    rows = [["", "estimator", "value", "95 %", "effective episodes"]]
    for name, (value, (low, high), effective) in estimates.estimates.items():
        count = "" if effective is None else f"{effective:.1f}"
        rows.append([name, NAMES[name], f"{value:.5g}", f"{low:.5g} to {high:.5g}", count])
    episodes = counted(estimates.episodes, "episode")
    return (
        f"mean return with discount {estimates.discount:g}, from the starts of {episodes}\n"
        f"{aligned(rows)}\n"
        f"assumptions: {'; '.join(estimates.assumptions)}"
    )
