"""A sweep by Optuna, whose batches of trials are populations: ``python scripts/optuna_sweep.py STUDY.db``.

Optuna proposes the hyperparameters of one trial for each member, one program trains them, and Optuna receives their
returns (``study.ask`` and ``study.tell``). The study is stored in an SQLite file: after a kill, the same command
continues it and repeats the unfinished trials. Needs ``pip install 'jaxrl-dist[optuna]'``.
"""

from __future__ import annotations

import argparse
from typing import Any

import optuna
from optuna.trial import TrialState

import jaxrl_dist
from jaxrl_dist.training.results import scored
from jaxrl_dist.training.setup import prepare

LEARNING_RATES, ENTROPIES = (1e-5, 1e-1), (1e-4, 1e-1)
"""Ranges of the step size and of the weight of the entropy, both searched on a logarithmic scale."""


def sweep(storage: str, trials: int, members: int, **fields: Any) -> optuna.Study:
    """Runs the study in the file ``storage`` until it has finished ``trials`` trials, and returns it.

    Args:
      members: number of trials in a batch.
      fields: arguments of ``jaxrl_dist.preset`` for PPO.
    """
    study = optuna.create_study(
        storage=f"sqlite:///{storage}",
        study_name="ppo",
        direction="maximize",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(constant_liar=True),  # keeps the trials of a batch apart
    )
    for unfinished in study.get_trials(states=[TrialState.RUNNING]):
        study.tell(unfinished.number, state=TrialState.FAIL)
        study.enqueue_trial(unfinished.params)
    while (done := len(study.get_trials(states=[TrialState.COMPLETE]))) < trials:
        batch = [study.ask() for _ in range(min(members, trials - done))]
        vary = {
            "learning_rate": [trial.suggest_float("learning_rate", *LEARNING_RATES, log=True) for trial in batch],
            "entropy_coefficient": [
                trial.suggest_float("entropy_coefficient", *ENTROPIES, log=True) for trial in batch
            ],
        }
        population = prepare(jaxrl_dist.preset("ppo", vary=vary, zip=True, **fields))
        for _ in population.reports():
            pass
        for trial, value in zip(batch, scored(population.rows)[1], strict=True):  # None: the member has diverged
            study.tell(trial, value, state=TrialState.FAIL if value is None else TrialState.COMPLETE)
        print(f"{done + len(batch)} trials, best return {study.best_value:.4g} with {study.best_params}", flush=True)
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("storage", metavar="STUDY.db")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--total-env-steps", type=int, default=50_000, help="of each trial")
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--members", type=int, default=8, help="trials of a batch")
    sweep(**vars(parser.parse_args()))
