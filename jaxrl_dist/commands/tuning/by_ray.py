"""Lets Ray Tune choose the values of trials, and end the bad ones early."""

from __future__ import annotations

import os
import pathlib
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_dist.checks import counted
from jaxrl_dist.commands import tuning
from jaxrl_dist.commands.request import output_flags, parse
from jaxrl_dist.commands.tuning import Search, Space, Values
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError, DivergedError, EnvError, one_line, say
from jaxrl_dist.run import signals
from jaxrl_dist.run.files import MEMBERS

LOWEST = -1e300
"""Stands for the return of a trial that has none."""
RUN = "run"
PROBLEM = "problem"
"""Results of a trial: the name of its run, and why it has no return."""


def tune(search: Search, args: Sequence[str], config: Train) -> bool:
    """Runs the trials on this machine, each in a process, until all have ended,
    or until ``search.stop``.

    ASHA (Li et al. 2020, https://arxiv.org/abs/1810.05934) compares the trials at rungs of env
    steps, and ends those whose return is not among the best third.

    Args:
      args: the command, which each process reads again.
      config: of one trial.

    Returns:
      Whether any trial has a return.
    """
    import ray

    _start_ray(search.jobs)
    try:
        results = _fit(search, args, config)
    finally:
        ray.shutdown()
    if search.stop():
        return False
    return _show(search, results, config.total_env_steps)


def _start_ray(jobs: int) -> None:
    import ray

    # the user's files are named relative to the current directory
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}
    with warnings.catch_warnings():
        # to start programs, which JAX survives
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
        ray.init(num_cpus=jobs, include_dashboard=False, logging_level="ERROR")
    for number, handler in handlers.items():  # Ray's would end this process immediately
        signal.signal(number, handler)


def _fit(
    search: Search, args: Sequence[str], config: Train
) -> list[tuple[Mapping[str, Any], Values]]:
    """Runs the trials; returns the last result of each, and its values."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.basic_variant import BasicVariantGenerator

    class Stopper(tune.Stopper):
        def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return search.stop()

    total = config.total_env_steps
    run_dir = search.run_dir.absolute()
    tuner = tune.Tuner(
        _trial(args, run_dir / tuning.TRIALS, total),
        param_space={name: _distribution(space) for name, space in search.space.items()},
        tune_config=tune.TuneConfig(
            metric="episode_return",
            mode="max",
            scheduler=ASHAScheduler(
                "env_steps", max_t=total, grace_period=max(1, total // 9), reduction_factor=3
            ),
            num_samples=search.trials,
            search_alg=BasicVariantGenerator(random_state=config.seed),
        ),
        run_config=tune.RunConfig(
            storage_path=str(run_dir), name=tuning.RAY, verbose=0, stop=Stopper()
        ),
    )
    return [(result.metrics or {}, result.config or {}) for result in tuner.fit()]


def _trial(args: Sequence[str], trials: pathlib.Path, total: int) -> Callable[[Values], None]:
    """Returns the function that Ray runs in a process with the values of a trial.

    Args:
      args: the command.
      trials: the directory of the runs.
      total: env steps of a trial.
    """
    interval = max(1, total // 18)
    defaults = {
        "report_interval": interval,
        "checkpoint_interval": interval,
        "evaluation_episodes": 0,
        "num_devices": 1,
    }

    def trial(values: Values) -> None:
        from ray import tune

        name = str(tune.get_context().get_trial_name())
        run = parse(args)
        output_flags(run.fields)
        run = run._replace(fields={**defaults, **run.fields})
        result: dict[str, Any] = {}  # none until the first episode has ended
        try:
            for report in tuning.prepare_trials(run, [values], trials / name).reports():
                # only now, when the run has saved what it says: ASHA may kill this process
                if result:
                    tune.report(result)
                episode_return = report.metrics["episode/recent_return"]
                if episode_return is None:
                    episode_return = result.get("episode_return")
                if episode_return is not None:
                    result = {
                        "episode_return": episode_return,
                        "env_steps": report.env_steps,
                        RUN: name,
                    }
        except (ConfigError, DivergedError, EnvError) as error:
            problem = error.with_flags if isinstance(error, ConfigError) else one_line(error)
            result = {"episode_return": LOWEST, "env_steps": 0, RUN: name, PROBLEM: problem}
        if result:
            tune.report(result)

    return trial


def _distribution(space: Space) -> Any:
    """Returns what Ray draws values from."""
    from ray import tune

    if not isinstance(space, tuning.Range):
        return tune.choice(space)
    if isinstance(space.low, float):
        draw = tune.loguniform if space.log else tune.uniform
        return draw(space.low, space.high)
    draw = tune.lograndint if space.log else tune.randint
    return draw(space.low, space.high + 1)


def _show(search: Search, results: list[tuple[Mapping[str, Any], Values]], total: int) -> bool:
    """Shows the best trials; returns whether any has a return."""
    for result, values in results:
        if PROBLEM in result:
            say(f"the trial with {tuning.as_flags(values)} is left out: {result[PROBLEM]}")
    scored = [
        (result, values)
        for result, values in results
        if result.get("episode_return", LOWEST) > LOWEST
    ]
    # ASHA has ended the others early, as bad ones
    whole = [(result, values) for result, values in scored if result["env_steps"] >= total]
    ranked = [
        tuning.Ranked(
            result["episode_return"], values, f"{tuning.TRIALS}/{result[RUN]}/{MEMBERS}/000"
        )
        for result, values in whole or scored
    ]
    search.show(
        f"{counted(len(results), 'trial')}, of which {len(scored)} with a return, "
        f"{len(ranked)} after all env steps"
    )
    search.show(tuning.ranking(ranked, "training return"))
    return bool(scored)
