"""``jaxrl-dist exact``: compares a trained policy with the exact truth of a small environment."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from jaxrl_dist.checks import MAX_SIZE, check_used, counted
from jaxrl_dist.commands import evaluate, flags, help
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible
from jaxrl_dist.hosts import stdout

if TYPE_CHECKING:
    from jaxrl_dist.exact.measuring import Measured, Played
    from jaxrl_dist.play.policy import Policy


@dataclasses.dataclass(frozen=True)
class Exact(evaluate.Trained):
    """Solves a small environment exactly, and says how far
    a run's policy and values are from the truth.
    """

    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment instead of the run's."""
    discount: float | None = setting(None, low=0, high=1)
    """Discount of values; None: the run's."""
    max_states: int = setting(100_000, low=1, high=10**8)
    """States after which listing ends with an error."""
    tries: int = setting(1000, low=1, high=10**6)
    """Tries of each action in each state, if steps are random and the environment does not list
    their outcomes."""
    starts: int = setting(10_000, low=1, high=10**8)
    """Resets to find the first states, if these are random and not listed by the environment."""
    seed: int = setting(0, low=0, high=2**31 - 1)
    """Seed of tries and starts."""
    out: Annotated[str | None, help.Alias("-o")] = None
    """Image file, such as heat.png, for maps of values and visits, if states lie on a grid."""
    grid: tuple[int, ...] = setting((), low=1, high=MAX_SIZE)
    """Rows and columns of a grid whose cells are categories, such as 4 12; none: a square."""
    mixture: bool = False
    """In a game of two sides, also measure the mixture of the policies of all checkpoints, which
    draws one for each game."""
    json: bool = False
    """Print JSON."""


def run(args: Sequence[str]) -> int:
    """Runs ``exact RUN_DIR [FLAGS]``."""
    options = flags.parse(Exact, args, "jaxrl-dist exact")
    if not options.run_dir:
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist exact runs/NAME")
    if len(options.grid) not in (0, 2):
        raise ConfigError("--grid takes two numbers, rows and columns, as in --grid 4 12")
    with stdout.kept_for(options.json):
        policy = options.load(env_options=options.env_options)
        if policy.source.spec.both_sides:
            output = _measure_game(options, policy)
        else:
            output = _measure(options, policy)
    print(output if options.json else visible(output))
    return 0


def _measure_game(options: Exact, policy: Policy) -> str:
    """Measures the policy of a game of two sides; returns lines or JSON."""
    from jaxrl_dist.exact.measuring import of_game

    check_used(
        options, "out", "grid", "discount", active=False, needed="an environment of one side"
    )
    played = of_game([*_past(options), policy], **_limits(options))
    if options.json:
        return json.dumps(played._asdict(), indent=2)
    return "\n".join(of_sides(played))


def _measure(options: Exact, policy: Policy) -> str:
    """Measures a policy that acts alone, and draws maps; returns lines or JSON."""
    from jaxrl_dist.exact.measuring import of_policy

    if options.mixture:
        raise ConfigError("--mixture needs a game of two sides; add --env-options opponents=self")
    check_used(options, "grid", active=options.out is not None, needed="a map, as in -o heat.png")
    if options.out is not None:
        from jaxrl_dist.commands.plot import drawing

        drawing.check_picture(pathlib.Path(options.out))
    measured = of_policy(policy, discount=options.discount, **_limits(options))
    if options.out is not None:
        drawing.save(measured.figure(options.grid or None), pathlib.Path(options.out))
    if options.json:
        return json.dumps(measured.summary(), indent=2)
    return "\n".join(lines(measured))


def _limits(options: Exact) -> dict[str, int]:
    return {name: getattr(options, name) for name in ("max_states", "tries", "starts", "seed")}


def _past(options: Exact) -> list[Policy]:
    """Returns the policies of all checkpoints but the measured one, if their mixture is wanted,
    the oldest first.
    """
    if not options.mixture:
        return []

    from jaxrl_dist.run import checkpoint

    run_dir = pathlib.Path(options.run_dir)
    paths = checkpoint.saved(run_dir)
    measured = paths[:1]
    if options.checkpoint is not None:
        measured = [checkpoint.chosen(run_dir, options.checkpoint)]
    past = [str(checkpoint.number_of(path)) for path in reversed(paths) if path not in measured]
    return [
        dataclasses.replace(options, checkpoint=env_steps).load(env_options=options.env_options)
        for env_steps in past
    ]


def of_sides(played: Played) -> Iterator[str]:
    """Formats the exploitability of a game for reading."""
    how = f"sampled: {played.sampled}" if played.sampled else "exact"
    yield f"{played.env}: {played.histories:,} histories; {how}"
    yield "exploitability: mean win of the best responses over both seats (half of NashConv)"
    exploitabilities = {
        "greedy": played.greedy,
        "sampled": played.drawn,
        f"the mixture of {played.policies} policies": played.mixture,
    }
    for name, value in exploitabilities.items():
        if value is not None:
            yield f"  {name:28} {value:.4f}"


def _with_error(numbers: Mapping[str, float], name: str) -> str:
    if name not in numbers:
        return "-"
    error = numbers.get(f"{name}_error")
    if error is None:
        return f"{numbers[name]:.5g}"
    return f"{numbers[name]:.3g} +- {2 * error:.2g}"


def lines(measured: Measured) -> Iterator[str]:
    """Formats the numbers for reading."""
    from jaxrl_dist.training.tables import aligned

    truth = measured.truth
    table = truth.table
    numbers = measured.numbers
    states, actions = table.shape
    yield f"{measured.env}: {counted(states, 'state')}, {counted(actions, 'action')}; {measured.known}"
    alike = table.mixed()
    if alike:
        yield (
            f"{counted(alike, 'state')} look like another state, so a policy without memory may "
            "not reach the optimum"
        )
    episode = f"return of an episode of at most {truth.steps:,} steps"
    discounted = f"return with discount {truth.discount:g}"
    rows = {
        episode: ("optimum", "return", "return_sampled"),
        discounted: ("value_optimal", "value", "value_sampled"),
    }
    cells = [[title, *(_with_error(numbers, name) for name in rows[title])] for title in rows]
    yield aligned([["", "optimum", "greedy", "sampled"], *cells])
    if table.parts:
        yield "after +-: two standard errors over the tries; four times as many --tries halve them"
    visited = ""
    if "regret" in numbers:
        yield f"regret of the greedy policy, discounted: {numbers['regret']:.3g}"
        visited = f", and in {numbers['agreement_visited']:.1%} of its visits"
    yield f"its action is optimal in {numbers['agreement']:.1%} of states{visited}"
    if "q_error" in numbers:
        soft = ""
        if "temperature" in numbers:
            soft = f" (with the entropy at temperature {numbers['temperature']:.3g})"
        yield (
            f"error of its action values{soft}: {numbers['q_error']:.3g} in the mean over its "
            f"visits, at most {numbers['q_error_max']:.3g}; the largest value is "
            f"{numbers['q_largest']:.3g}"
        )
