"""What the members of one program share: how they are evaluated, and when they are saved."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from jaxrl_dist.actors.evaluate import Evaluator
from jaxrl_dist.plans.session import Session
from jaxrl_dist.training.truth import Exact
from jaxrl_dist.types import Report

FILM_STEPS = 1000
"""Env steps after which a film ends, as of ``jaxrl-dist video``."""


class ProgramShared:
    """What the members of one program share."""

    def __init__(self, session: Session, command: str) -> None:
        """``session`` is any member's; ``command`` resumes the whole run."""
        config = session.config
        job = session.job
        self.command = command
        self.films = True
        """Whether films work: not once one has failed."""
        self.excluded_seconds = 0.0
        """Seconds of this session that evaluations, films and the like took from training."""
        self.saving: Callable[[Report], None] = lambda report: None
        """Gets each member's last report before it is saved."""
        self._job = job
        self._sampled = config.evaluation_policy == "sampled"
        self._answers = dict[str, tuple[int, bool]]()
        sizes = config.evaluation_episodes, config.evaluation_max_steps, config.num_envs
        self.evaluator = self._evaluator("evaluator", *sizes)
        self.exact: Exact | None = None
        """None: no exact measures are wanted."""
        if config.exact:
            self.exact = job.once("exact", lambda: Exact(job))

    def filmed(self) -> Evaluator:
        """Returns the evaluator of one environment whose episode is filmed."""
        agents = self._job.source.spec.num_agents
        return self._evaluator("filmed", agents, FILM_STEPS, agents)

    def _evaluator(
        self, name: str, episodes: int, max_steps: int | None, num_envs: int
    ) -> Evaluator:
        """Returns an evaluator, of which ``of_member`` chooses the seed."""
        job = self._job
        sampled = self._sampled

        def make() -> Evaluator:
            return Evaluator(
                job.algorithm,
                job.source,
                episodes,
                seed=0,
                max_steps=max_steps,
                num_envs=num_envs,
                variant=lambda hyper: job.variant(hyper)[0],
                sampled=sampled,
            )

        return job.once((name, episodes, max_steps, num_envs, sampled), make)

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Adds the seconds of a ``with`` block that ends without an error."""
        began = time.perf_counter()
        yield
        self.excluded_seconds += time.perf_counter() - began

    def agree(self, question: str, iteration: int, wants: Callable[[], bool]) -> bool:
        """Returns the answer of the member that asks first after an iteration,
        so that all save after the same one.
        """
        asked, answer = self._answers.get(question, (-1, False))
        if asked != iteration:
            answer = wants()
            self._answers[question] = iteration, answer
        return answer
