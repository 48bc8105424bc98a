"""RLlib's side of ``scripts/benchmark.py``: ``ALGORITHM ENV NUM_ENVS SECONDS TRAINING MODEL``.

Runs in RLlib's own virtual environment, with environments and learner in one process, because our
side has no more. Prints JSON: env steps per second of whole iterations, after the first updates.
"""

import json
import sys
import time

import ray
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import get_trainable_cls

name, env, num_envs, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
training, model = map(json.loads, sys.argv[5:7])
# never a cluster that happens to run
ray.init("local", include_dashboard=False, log_to_driver=False)
config = get_trainable_cls(name).get_default_config()
config.environment(env).framework("torch").training(**training).rl_module(
    model_config=DefaultModelConfig(**model)
)
config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs).learners(num_learners=0)
algorithm = config.build_algo()


def advance(longest: float) -> tuple[float, int]:
    """Trains for at least some seconds; returns the time
    and the env steps since the start of the run.
    """
    end = time.perf_counter() + longest
    while True:
        found = algorithm.train()
        if time.perf_counter() >= end:
            return time.perf_counter(), int(found["env_runners"]["num_env_steps_sampled_lifetime"])


began, ended = advance(seconds), advance(seconds)
algorithm.stop()
ray.shutdown()
print(json.dumps({"rate": (ended[1] - began[1]) / (ended[0] - began[0])}))
