"""A sweep by Ray Tune on a local Ray, which ends bad trials early: ``python scripts/ray_sweep.py``.

ASHA (Li et al. 2020, https://arxiv.org/abs/1810.05934) compares the trials at rungs of env steps, and ends those whose
return is not among the best third. Each trial is a run of ``jaxrl_dist.train`` in a Ray process. Ray divides the cores
of this machine, or of a cluster, among them. Needs ``pip install 'jaxrl-dist[ray]'``.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import jaxrl_dist


def trial(settings: dict[str, Any]) -> None:
    """Trains PPO and sends each report to Ray, until Ray ends the trial."""
    config = jaxrl_dist.preset("ppo", **settings, num_devices=1, evaluation_episodes=0)
    episode_return = 0.0
    for report in jaxrl_dist.train(config):
        if (value := report.metrics["episode/return"]) is not None:
            episode_return = value
        tune.report({"episode_return": episode_return, "env_steps": report.env_steps})


def sweep(trials: int, at_once: int, env: str, total_env_steps: int, storage: str | None = None) -> tune.ResultGrid:
    """Runs ``trials`` trials, ``at_once`` at a time, and returns their results.

    Args:
      storage: directory of Ray's files; None: Ray's default.
    """
    ray.init(num_cpus=at_once, include_dashboard=False)
    rungs = ASHAScheduler("env_steps", max_t=total_env_steps, grace_period=total_env_steps // 9, reduction_factor=3)
    space = {"env": env, "total_env_steps": total_env_steps, "report_interval": total_env_steps // 18}
    tuner = tune.Tuner(
        trial,
        param_space={**space, "learning_rate": tune.loguniform(1e-5, 1e-1)},
        tune_config=tune.TuneConfig(metric="episode_return", mode="max", scheduler=rungs, num_samples=trials),
        run_config=tune.RunConfig(storage_path=storage, verbose=0),
    )
    try:
        return tuner.fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--total-env-steps", type=int, default=100_000, help="of a trial that is not ended early")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=2)
    best = sweep(**vars(parser.parse_args())).get_best_result()
    print(f"best return {best.metrics['episode_return']:.4g} with --learning-rate {best.config['learning_rate']:.3g}")
