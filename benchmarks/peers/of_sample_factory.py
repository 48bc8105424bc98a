"""Sample Factory's side of ``scripts/benchmark.py``:
``ENV NUM_ENVS ROLLOUT_LENGTH WARM_UP SECONDS [FLAGS]``.

Runs in Sample Factory's own virtual environment. Its APPO, with one epoch of one minibatch, stands
beside our IMPALA on EnvPool's Atari. Prints JSON: env steps per second, and how many CPU cores it
had meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import envpool
import gymnasium
import psutil
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from sf_examples.envpool.atari.envpool_atari_params import (
    add_atari_env_args,
    atari_override_defaults,
)
from sf_examples.envpool.envpool_wrappers import EnvPoolResetFixWrapper

# of --atari-preset baselines; frames of 84 x 84 in grey, four skipped and four stacked,
# are EnvPool's own
PROTOCOL = {
    "repeat_action_probability": 0.0,
    "noop_max": 30,
    "use_fire_reset": True,
    "episodic_life": True,
    "reward_clip": True,
    "max_episode_steps": 27_000,
}


def make_env(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> gymnasium.Env:
    """``cfg.env_agents`` environments in one, as sf_examples
    makes them but through EnvPool's Gymnasium interface.
    """
    seed = 0 if env_config is None else env_config.env_id
    threads = min(cfg.env_agents, len(os.sched_getaffinity(0)))
    env = envpool.make_gymnasium(
        name, num_envs=cfg.env_agents, seed=seed, num_threads=threads, **PROTOCOL
    )
    env.closed, env.viewer = False, None  # which Gymnasium before 1.0 looks for when it closes
    env = EnvPoolResetFixWrapper(env)
    env.num_agents = cfg.env_agents
    return env


class Stopwatch(AlgoObserver):
    """Times the training steps from ``warm_up`` seconds after
    the first until ``seconds`` later, then ends the run.
    """

    def __init__(self, warm_up: float, seconds: float) -> None:
        self.warm_up, self.seconds = warm_up, seconds
        self.first: float | None = None
        self.began: tuple[float, float, int] | None = None
        self.result: tuple[float, float] | None = None

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        now, count = time.perf_counter(), training_iteration_since_resume
        self.first = self.first or now
        if self.began is None and now - self.first >= self.warm_up:
            self.began = now, cpu_seconds(), count
        if self.began is None or self.result or now - self.began[0] < self.seconds:
            return
        passed = now - self.began[0]
        steps = (count - self.began[2]) * runner.cfg.batch_size
        self.result = steps / passed, (cpu_seconds() - self.began[1]) / passed
        runner.cfg.train_for_env_steps = 0  # the runner stops itself once it has made more


def cpu_seconds() -> float:
    """Of this process and those that it started."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [me, *me.children(recursive=True)])


def main() -> None:
    """Trains, and prints what the stopwatch says."""
    name, num_envs, rollout_length, warm_up, seconds, *more = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "env": name,
            "train_dir": folder,
            "device": "cpu",
            "train_for_env_steps": 10**12,
            "rollout": rollout_length,
            "with_vtrace": False,  # with it, release 2.1.1 fails when it writes its first summary
            "batch_size": int(num_envs) * int(rollout_length),
            "num_batches_per_epoch": 1,
            "num_epochs": 1,
            "lr_schedule": "constant",
        }
        argv = [f"--{flag}={value}" for flag, value in flags.items()] + more
        parser, _ = parse_sf_args(argv)
        add_atari_env_args(name, parser)
        atari_override_defaults(name, parser)
        register_env(name, make_env)
        _, runner = make_runner(parse_full_cfg(parser, argv))
        stopwatch = Stopwatch(float(warm_up), float(seconds))
        runner.register_observer(stopwatch)
        runner.init()
        runner.run()
    assert stopwatch.result is not None, "the run ended before the measurement did"
    print(json.dumps(dict(zip(("rate", "cores"), stopwatch.result, strict=True))))


if __name__ == "__main__":  # its workers import this file
    main()
