"""Exact measures of a run's policies at its reports, for ``--exact``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from jaxrl_dist.config.values import varied
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.exact.games import Game
from jaxrl_dist.exact.listing import discrete, of_source
from jaxrl_dist.exact.measuring import Measure, Truth, exploited
from jaxrl_dist.hosts import peers
from jaxrl_dist.plans.job import Job
from jaxrl_dist.protocols import Traits
from jaxrl_dist.types import Join, Report, Variables

JOINS = {"time/exact_s": Join.SECONDS}
"""How members' times are joined, as ``Join`` says."""


class Exact:
    """The table of an environment, with its optimum for each discount;
    the members of a program share it.

    In a run over several processes, only the first one measures.
    """

    def __init__(self, job: Job) -> None:
        """Lists the states.

        Raises:
          ConfigError: the environment has no table, or the algorithm no discount or a memory.
        """
        discrete(job.source.spec)
        self._table = of_source(job.source) if peers.first() else None
        self._game: Game | None = None
        if self._table is not None and job.source.spec.both_sides:
            self._game = Game(self._table)
        self._measure: Measure | None = None
        self._truths: dict[float, Truth] = {}
        self.of(job)

    def of(
        self, job: Job, hyper: Mapping[str, float] = {}
    ) -> Callable[[Variables], dict[str, float]]:
        """Returns ``(variables) -> numbers`` for the policy of a job with these hyperparameters."""
        table = self._table
        discount = Traits.of(varied(job.config.algorithm, hyper)).discount
        if discount is None:
            raise ConfigError("--exact needs an algorithm with a discount")
        if table is None:
            return lambda variables: {}
        if (measure := self._measure) is None:
            ((name, algorithm),) = job.algorithm.items()
            measure = self._measure = Measure(
                algorithm, table, lambda hyper: job.variant(hyper)[0][name]
            )
        if (game := self._game) is not None:
            return lambda variables: exploited(game, measure.learnt(variables, hyper))
        if discount not in self._truths:
            self._truths[discount] = Truth.of(table, discount, job.source.spec.max_episode_steps)
        truth = self._truths[discount]
        return lambda variables: measure(variables, truth, hyper)


class Shared(Protocol):
    """What the members of a program share."""

    exact: Exact | None
    excluded_seconds: float


def measuring(
    reports: Iterator[Report], shared: Shared, job: Job, hyper: Callable[[], Mapping[str, float]]
) -> Iterator[Report]:
    """Adds exact measures to each report, if they are wanted,
    and their seconds as ``time/exact_s``.

    Args:
      hyper: returns the member's hyperparameters, which selections change.
    """
    for report in reports:
        if shared.exact is not None:
            began = time.perf_counter()
            measure = shared.exact.of(job, hyper())
            numbers = {f"exact/{name}": x for name, x in measure(report.variables()).items()}
            seconds = time.perf_counter() - began
            shared.excluded_seconds += seconds
            report = dataclasses.replace(
                report, metrics={**report.metrics, **numbers, "time/exact_s": seconds}
            )
        yield report
