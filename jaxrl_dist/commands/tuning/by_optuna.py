"""Lets Optuna choose the values of trials, which train in populations."""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_dist.commands import tuning
from jaxrl_dist.commands.request import Request
from jaxrl_dist.commands.tuning import Search, Space, Values
from jaxrl_dist.errors import ConfigError, DivergedError, EnvError, first_line, one_line, say
from jaxrl_dist.run.files import MEMBERS

if TYPE_CHECKING:
    import optuna

RUN = "run"
"""Attribute of a trial: the run that trained with its values, within the search's directory."""


class Outcome(NamedTuple):
    """What has become of a trial."""

    score: float | None
    """None: it has diverged, or cannot run."""
    run_dir: pathlib.Path


def tune(search: Search, ranked_by: str, seed: int) -> bool:
    """Runs Optuna's study in the search's directory until it has finished all trials,
    or until ``search.stop``.

    Optuna proposes the values of ``jobs`` trials, which train as one population, and receives their
    returns. Trials that were not finished when a sweep ended are repeated. A trial that diverges or
    cannot run counts as pruned, as do the trials of a batch whose environment fails.

    Args:
      ranked_by: what the returns are in words, such as ``greedy return``.
      seed: of what Optuna draws; a study that continues draws anew.

    Returns:
      Whether any trial has a return.

    Raises:
      EnvError: the environment has failed in two batches, one after the other.
    """
    study = _Study(search, seed)
    environment_failed = False
    while (finished := study.num_finished()) < search.trials and not search.stop():
        batch = study.ask(min(search.jobs, search.trials - finished))
        outcomes = study.outcomes()
        fresh = [values for _, values in batch if str(values) not in outcomes]
        path = search.run_dir / tuning.TRIALS / f"{batch[0][0].number:04d}"
        try:
            trained = _train(search.run, fresh, path, search.stop) if fresh else []
            environment_failed = False
        except (ConfigError, EnvError) as error:
            # a ConfigError has nothing to do with the values
            if environment_failed or isinstance(error, ConfigError):
                study.abandon(batch)
                raise
            environment_failed = True
            trained = [Outcome(None, path)] * len(fresh)
            say(f"the trials in {path} are left out: {one_line(error)}")
        if search.stop():
            return False
        outcomes |= zip(map(str, fresh), trained, strict=True)
        for trial, values in batch:
            study.tell(trial, outcomes[str(values)])
        search.show(f"{finished + len(batch)} trials, {study.best(ranked_by)}")
    ranked = study.ranked()
    search.show(tuning.ranking(ranked, ranked_by))
    return bool(ranked)


class _Study:
    """Optuna's study of a search, in the search's directory."""

    def __init__(self, search: Search, seed: int) -> None:
        import optuna
        from optuna.trial import TrialState

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = search.space
        self._run_dir = search.run_dir
        self._states = TrialState
        file = search.run_dir / tuning.STUDY
        # Not in the URL: there ? and % have a meaning, and to Optuna { and } as well.
        engine = {"creator": partial(sqlite3.connect, file)}
        try:
            self._study = optuna.create_study(
                storage=optuna.storages.RDBStorage("sqlite://", engine),
                study_name=search.run.name,
                direction="maximize",
                load_if_exists=True,
            )
        except Exception as error:  # whatever its libraries raise
            raise ConfigError(
                f"{file} cannot be used as Optuna's study: {first_line(error)}"
            ) from None
        seed += len(self._study.get_trials())
        # keeps the trials of a batch apart
        self._study.sampler = optuna.samplers.TPESampler(constant_liar=True, seed=seed)
        self._repeat_unfinished()

    def _repeat_unfinished(self) -> None:
        for trial in self._study.get_trials(states=[self._states.RUNNING]):
            self._study.tell(trial.number, state=self._states.FAIL)
            self._study.enqueue_trial(trial.params)

    def num_finished(self) -> int:
        finished = (self._states.COMPLETE, self._states.PRUNED)
        return len(self._study.get_trials(states=finished))

    def ask(self, count: int) -> list[tuple[optuna.Trial, Values]]:
        """Returns new trials and their values."""
        trials = [self._study.ask() for _ in range(count)]
        return [
            (trial, {name: _suggest(trial, name, space) for name, space in self._space.items()})
            for trial in trials
        ]

    def outcomes(self) -> dict[str, Outcome]:
        """Returns the outcomes of trials with a return, by the text of their values: equal values
        train once.
        """
        outcomes = {}
        for trial in self._study.get_trials(states=[self._states.COMPLETE]):
            # a stored trial may have them in another order
            values = {name: trial.params[name] for name in self._space}
            run_dir = self._run_dir / trial.user_attrs.get(RUN, "-")
            outcomes[str(values)] = Outcome(trial.value, run_dir)
        return outcomes

    def tell(self, trial: optuna.Trial, outcome: Outcome) -> None:
        """Ends a trial."""
        state = self._states.PRUNED if outcome.score is None else self._states.COMPLETE
        trial.set_user_attr(RUN, str(outcome.run_dir.relative_to(self._run_dir)))
        self._study.tell(trial, outcome.score, state=state)

    def abandon(self, batch: Sequence[tuple[optuna.Trial, Values]]) -> None:
        """Ends trials that another sweep does not repeat."""
        for trial, _ in batch:
            self._study.tell(trial.number, state=self._states.FAIL)

    def best(self, ranked_by: str) -> str:
        """Says which values are the best so far."""
        try:
            score = self._study.best_value
        except ValueError:
            return f"and none has a {ranked_by}"
        return f"best {ranked_by} {score:.4g} with {tuning.as_flags(self._study.best_params)}"

    def ranked(self) -> list[tuning.Ranked]:
        """Returns the trials with a return; trials with equal values count once."""
        ranked = {}
        for trial in self._study.get_trials(states=[self._states.COMPLETE]):
            if trial.value is not None:
                run = trial.user_attrs.get(RUN, "-")
                ranked[run] = tuning.Ranked(trial.value, trial.params, run)
        return list(ranked.values())


def _suggest(trial: optuna.Trial, name: str, space: Space) -> Any:
    if not isinstance(space, tuning.Range):
        return trial.suggest_categorical(name, space)
    if isinstance(space.low, float):
        return trial.suggest_float(name, space.low, space.high, log=space.log)
    return trial.suggest_int(name, space.low, int(space.high), log=space.log)


def _train(
    run: Request, trials: Sequence[Values], run_dir: pathlib.Path, stop: Callable[[], bool]
) -> list[Outcome]:
    """Trains a batch of trials, equal ones once.

    Raises:
      ConfigError: none can run, for a reason that has nothing to do with their values.
    """
    from jaxrl_dist.training.rows import scored

    different = {str(values): values for values in trials}
    if _problem(lambda: tuning.prepare_trials(run, list(different.values()), run_dir)) is not None:
        different = _runnable(run, different, run_dir)
    if not different:
        return [Outcome(None, run_dir)] * len(trials)
    population = tuning.prepare_trials(run, list(different.values()), run_dir)
    with contextlib.suppress(DivergedError):  # all of them
        for _ in population.reports(stop=stop):
            pass
    _, scores = scored(population.rows)
    folders = [run_dir / MEMBERS / row.member for row in population.rows]
    outcomes = [Outcome(*pair) for pair in zip(scores, folders, strict=True)]
    by_values = dict(zip(different, outcomes, strict=True))
    return [by_values.get(str(values), Outcome(None, run_dir)) for values in trials]


def _runnable(run: Request, trials: dict[str, Values], run_dir: pathlib.Path) -> dict[str, Values]:
    """Returns the trials that can run by themselves, and says which cannot, such as one whose
    number of minibatches does not divide.

    Raises:
      ConfigError: as ``_train``.
    """
    from jaxrl_dist.training.setup import prepare

    runnable = {}
    for text, values in trials.items():
        problem = _problem(partial(tuning.prepare_trials, run, [values], run_dir))
        if problem is None:
            runnable[text] = values
        elif problem == _problem(lambda: prepare(*run.resolved())):
            raise ConfigError(problem)
        else:
            say(f"the trial with {tuning.as_flags(values)} is left out: {problem}")
    return runnable


def _problem(prepare: Callable[[], object]) -> str | None:
    """Returns why a run cannot be prepared; None: it can."""
    try:
        prepare()
    except ConfigError as error:
        return error.with_flags
    return None
