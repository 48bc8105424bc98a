"""The trials of ``jaxrl-dist sweep --tuner``, whose values Optuna or Ray Tune chooses."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import signal
import sqlite3
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_dist.checks import counted, flag, install_extra
from jaxrl_dist.commands.request import Request, output_flags, parse
from jaxrl_dist.config.train import ALONE, Train
from jaxrl_dist.errors import ConfigError, DivergedError, EnvError, first_line, one_line, say
from jaxrl_dist.run import signals
from jaxrl_dist.run.files import MEMBERS, members_of
from jaxrl_dist.settings.members import members

if TYPE_CHECKING:
    import optuna

    from jaxrl_dist.training.run import Run

STUDY = "optuna.db"
"""File of the run directory that holds Optuna's study."""
TRIALS = "trials"
"""Folder of the run directory with a folder for each run of trials."""
RAY = "ray"
"""Folder of the run directory in which Ray Tune writes."""
RUN = "run"
PROBLEM = "problem"
"""Of a trial: the run that trained with its values, and why it has no return."""


class Range(NamedTuple):
    """The values that a hyperparameter may take, bounds included."""

    low: int | float
    high: int | float
    log: bool


LOWEST = -1e300  # stands for the return of a trial that has none
Space = Range | tuple[str, ...]
Values = Mapping[str, Any]
"""The values of one trial, by the names in ``--vary``."""


def check(tuner: str, run: Request) -> None:
    """Checks that a tuner is installed, and that a command leaves the members of its trials to it.

    Raises:
      ConfigError: it is not, or the command asks for members.
    """
    if importlib.util.find_spec(tuner) is None:
        raise ConfigError(
            f"--tuner {tuner} needs a package that is not installed: {install_extra(tuner)}"
        )
    if not run.fields.get("vary"):
        text = "needs hyperparameters to choose, such as --vary learning-rate=1e-5:1e-1:log activation=tanh,relu"
        raise ConfigError(f"--tuner {tuner} {text}")
    for name in ALONE.keys() & run.fields.keys() - {"vary"}:
        raise ConfigError(
            f"{flag(name)} does not work with --tuner {tuner}, which chooses the values of each run"
        )


def spaces(config: Train, vary: Mapping[str, str]) -> dict[str, Space]:
    """Returns what each hyperparameter of ``--vary`` may be.

    Args:
      config: of one trial.
      vary: for each hyperparameter ``LOW:HIGH``, ``LOW:HIGH:log`` or ``A,B,C``.

    Raises:
      ConfigError: there is no such hyperparameter, or it cannot have these values.
    """
    return {name: _space(config, name, text) for name, text in vary.items()}


def _space(config: Train, name: str, text: str) -> Space:
    bounds = text.removesuffix(":log")
    log = text.endswith(":log")
    if bounds.count(":") == 1:
        listed = bounds.replace(":", ",")
    else:
        listed = text
    values = [
        value
        for run in members(dataclasses.replace(config, vary={name: listed}))
        for value in run.values.values()
    ]
    if ":" not in text:
        return tuple(text.split(","))
    low = values[0]
    high = values[-1]
    if (
        len(values) != 2
        or {type(low), type(high)} - {int, float}
        or low >= high
        or (log and low <= 0)
    ):
        works = "LOW:HIGH works, and above 0 also LOW:HIGH:log"
        raise ConfigError(
            f"--vary {name}={text} is not a range of numbers; {works}, or values such as A,B,C"
        )
    return Range(low, high, log)


def _prepared(run: Request, trials: Sequence[Values], run_dir: pathlib.Path) -> Run:
    """Prepares the run of trials with different values."""
    from jaxrl_dist.training.setup import prepare

    vary = {name: ",".join(str(values[name]) for values in trials) for name in trials[0]}
    fields = {**run.fields, "vary": vary, "zip": True, "run_dir": str(run_dir)}
    return prepare(*run._replace(fields=fields).resolved())


# --- Optuna ---------------------------------------------------------------------------------------


def by_optuna(
    run: Request,
    space: Mapping[str, Space],
    run_dir: pathlib.Path,
    trials: int,
    jobs: int,
    stop: Callable[[], bool],
    show: Callable[[str], None],
    ranked_by: str,
    seed: int,
) -> bool:
    """Runs Optuna's study in ``run_dir`` until it has finished ``trials`` trials,
    or until ``stop``.

    Optuna proposes the values of ``jobs`` trials, which train as one population, and receives their
    returns. Trials that were not finished when a sweep ended are repeated. One that diverges or
    cannot run counts as pruned, as do those of a batch whose environment fails.

    Args:
      ranked_by: what the returns are in words, such as ``greedy return``.
      seed: of what Optuna draws; a study that goes on draws anew.

    Returns:
      Whether any trial has a return.

    Raises:
      EnvError: the environment has failed in two batches, one after the other.
    """
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = run_dir / STUDY
    # Not in the URL: there ? and % have a meaning, and to Optuna { and } as well.
    engine = {"creator": partial(sqlite3.connect, file)}
    try:
        study = optuna.create_study(
            storage=optuna.storages.RDBStorage("sqlite://", engine),
            study_name=run.name,
            direction="maximize",
            load_if_exists=True,
        )
    except Exception as error:  # whatever its libraries raise
        raise ConfigError(f"{file} cannot be used as Optuna's study: {first_line(error)}") from None
    seed += len(study.get_trials())
    # keeps the trials of a batch apart
    study.sampler = optuna.samplers.TPESampler(constant_liar=True, seed=seed)
    for unfinished in study.get_trials(states=[TrialState.RUNNING]):
        study.tell(unfinished.number, state=TrialState.FAIL)
        study.enqueue_trial(unfinished.params)
    finished = (TrialState.COMPLETE, TrialState.PRUNED)
    failed = False
    while (done := len(study.get_trials(states=finished))) < trials and not stop():
        ended = study.get_trials(states=[TrialState.COMPLETE])
        # Equal values train once; a stored trial may have them in another order.
        known = {
            str({name: x.params[name] for name in space}): (x.value, x.user_attrs.get(RUN, "-"))
            for x in ended
        }
        batch = [study.ask() for _ in range(min(jobs, trials - done))]
        proposed = [
            {name: _suggested(trial, name, x) for name, x in space.items()} for trial in batch
        ]
        fresh = [x for x in proposed if str(x) not in known]
        path = run_dir / TRIALS / f"{batch[0].number:04d}"
        try:
            scores = _scores(run, fresh, path, stop) if fresh else []
            failed = False
        except (ConfigError, EnvError) as error:
            if failed or isinstance(error, ConfigError):  # which has nothing to do with the values
                for trial in batch:
                    study.tell(trial.number, state=TrialState.FAIL)
                raise
            failed = True
            scores = [(None, path)] * len(fresh)
            say(f"the trials in {path} are left out: {one_line(error)}")
        if stop():
            return False
        for values, (score, member) in zip(fresh, scores, strict=True):
            known[str(values)] = score, str(member.relative_to(run_dir))
        for trial, values in zip(batch, proposed, strict=True):
            score, member = known[str(values)]
            trial.set_user_attr(RUN, member)
            study.tell(
                trial, score, state=TrialState.PRUNED if score is None else TrialState.COMPLETE
            )
        show(f"{done + len(batch)} trials, {_best(study, ranked_by)}")
    ended = study.get_trials(states=[TrialState.COMPLETE])
    rows = {x.user_attrs.get(RUN, "-"): (x.value, x.params) for x in ended if x.value is not None}
    show(_ranking([(score, values, path) for path, (score, values) in rows.items()], ranked_by))
    return bool(rows)


def _suggested(trial: optuna.Trial, name: str, space: Space) -> Any:
    if not isinstance(space, Range):
        return trial.suggest_categorical(name, space)
    if isinstance(space.low, float):
        suggest = trial.suggest_float
    else:
        suggest = trial.suggest_int
    return suggest(name, space.low, space.high, log=space.log)


def _scores(
    run: Request, trials: Sequence[Values], run_dir: pathlib.Path, stop: Callable[[], bool]
) -> list[tuple[float | None, pathlib.Path]]:
    """Trains a batch of trials, equal ones once, and returns for each its score and its run.

    The score is None if it has diverged or cannot run.

    Raises:
      ConfigError: none can run, for a reason that has nothing to do with their values.
    """
    from jaxrl_dist.training.rows import scored
    from jaxrl_dist.training.setup import prepare

    different = {str(values): values for values in trials}
    if _problem(lambda: _prepared(run, list(different.values()), run_dir)) is not None:
        for text, values in list(different.items()):
            if (problem := _problem(partial(_prepared, run, [values], run_dir))) is None:
                continue
            if problem == _problem(lambda: prepare(*run.resolved())):
                raise ConfigError(problem)
            # such as a number of minibatches within the range that does not divide
            del different[text]
            say(f"the trial with {_flags(values)} is left out: {problem}")
    if not different:
        return [(None, run_dir)] * len(trials)
    population = _prepared(run, list(different.values()), run_dir)
    with contextlib.suppress(DivergedError):  # all of them
        for _ in population.reports(stop=stop):
            pass
    scores = zip(scored(population.rows)[1], members_of(run_dir), strict=True)
    of_values = dict(zip(different, scores, strict=True))
    return [of_values.get(str(values), (None, run_dir)) for values in trials]


def _problem(prepared: Callable[[], Any]) -> str | None:
    """Returns why a run cannot be prepared; None: it can."""
    try:
        prepared()
    except ConfigError as error:
        return error.with_flags
    return None


def _best(study: optuna.Study, ranked_by: str) -> str:
    try:
        return f"best {ranked_by} {study.best_value:.4g} with {_flags(study.best_params)}"
    except ValueError:
        return f"and none has a {ranked_by}"


def _ranking(trials: Sequence[tuple[float, Values, str]], ranked_by: str) -> str:
    """Returns a table of the ten best trials: score, values, and the run to go on with."""
    from jaxrl_dist.training.tables import aligned

    if not trials:
        return f"no trial has a {ranked_by}"
    best = sorted(trials, key=lambda trial: -trial[0])[:10]
    rows = [(f"{score:.4g}", *map(_short, values.values()), path) for score, values, path in best]
    return aligned([(ranked_by, *best[0][1], "run"), *rows])


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _flags(values: Values) -> str:
    return " ".join(f"{flag(name)} {_short(value)}" for name, value in values.items())


# --- Ray Tune -------------------------------------------------------------------------------------


def by_ray(
    args: Sequence[str],
    config: Train,
    space: Mapping[str, Space],
    run_dir: pathlib.Path,
    trials: int,
    jobs: int,
    stop: Callable[[], bool],
    show: Callable[[str], None],
) -> bool:
    """Runs ``trials`` trials by Ray Tune on this machine, each in a process, ``jobs`` at a time,
    or until ``stop``.

    ASHA (Li et al. 2020, https://arxiv.org/abs/1810.05934) compares the trials at rungs of env
    steps, and ends those whose return is not among the best third.

    Args:
      args: the command, which each process reads again.
      config: of one trial.

    Returns:
      Whether any trial has a return.
    """
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.basic_variant import BasicVariantGenerator

    total = config.total_env_steps
    run_dir = run_dir.absolute()
    often = max(1, total // 18)
    few = {
        "report_interval": often,
        "checkpoint_interval": often,
        "evaluation_episodes": 0,
        "num_devices": 1,
    }

    def trial(values: dict[str, Any]) -> None:
        run = parse(args)
        name = str(tune.get_context().get_trial_name())
        output_flags(run.fields)
        run = run._replace(fields={**few, **run.fields})
        episode_return = told = None  # a trial is compared from its first episode's end on
        try:
            for report in _prepared(run, [values], run_dir / TRIALS / name).reports():
                # only now, when the run has saved what it says: ASHA may kill this process
                if told is not None:
                    tune.report(told)
                if (value := report.metrics["episode/recent_return"]) is not None:
                    episode_return = value
                if episode_return is not None:
                    told = {
                        "episode_return": episode_return,
                        "env_steps": report.env_steps,
                        RUN: name,
                    }
        except (ConfigError, DivergedError, EnvError) as error:
            if isinstance(error, ConfigError):
                text = error.with_flags
            else:
                text = one_line(error)
            told = {"episode_return": LOWEST, "env_steps": 0, RUN: name, PROBLEM: text}
        if told is not None:
            tune.report(told)

    def chosen(space: Space) -> Any:
        if not isinstance(space, Range):
            return tune.choice(space)
        if isinstance(space.low, float):
            return (tune.loguniform if space.log else tune.uniform)(space.low, space.high)
        return (tune.lograndint if space.log else tune.randint)(space.low, space.high + 1)

    class Stopped(tune.Stopper):
        def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return stop()

    rungs = ASHAScheduler(
        "env_steps", max_t=total, grace_period=max(1, total // 9), reduction_factor=3
    )
    compared = {
        "metric": "episode_return",
        "mode": "max",
        "scheduler": rungs,
        "num_samples": trials,
    }
    # files of the user's are found from the current directory
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}
    with warnings.catch_warnings():
        # to start programs, which JAX survives
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
        ray.init(num_cpus=jobs, include_dashboard=False, logging_level="ERROR")
    for number, handler in handlers.items():  # Ray's would end this process at once
        signal.signal(number, handler)
    try:
        results = tune.Tuner(
            trial,
            param_space={name: chosen(x) for name, x in space.items()},
            tune_config=tune.TuneConfig(
                **compared, search_alg=BasicVariantGenerator(random_state=config.seed)
            ),
            run_config=tune.RunConfig(
                storage_path=str(run_dir), name=RAY, verbose=0, stop=Stopped()
            ),
        ).fit()
    finally:
        ray.shutdown()
    if stop():
        return False
    ended = [(result.metrics or {}, result.config or {}) for result in results]
    for metrics, values in ended:
        if PROBLEM in metrics:
            say(f"the trial with {_flags(values)} is left out: {metrics[PROBLEM]}")
    known = [(x, values) for x, values in ended if x.get("episode_return", LOWEST) > LOWEST]
    # others ended early, as bad
    whole = [(x, values) for x, values in known if x["env_steps"] >= total] or known
    ranked = [
        (x["episode_return"], values, f"{TRIALS}/{x[RUN]}/{MEMBERS}/000") for x, values in whole
    ]
    show(
        f"{counted(len(ended), 'trial')}, of which {len(known)} with a return, {len(whole)} after all env steps"
    )
    show(_ranking(ranked, "training return"))
    return bool(known)
