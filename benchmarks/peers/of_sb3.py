"""The side of SB3 or SBX in ``scripts/benchmark.py``:
``PACKAGE ALGORITHM ENV NUM_ENVS STEPS FIELDS``.

Runs in the peer's own virtual environment. Prints JSON: env steps per second from the end of a
tenth of the steps on, by which programs are compiled and replay memories have filled enough to be
learnt from.
"""

import importlib
import json
import sys
import time

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

package, name, env, num_envs, steps, fields = (
    *sys.argv[1:4],
    *map(int, sys.argv[4:6]),
    json.loads(sys.argv[6]),
)


class Stopwatch(BaseCallback):
    """Notes when a tenth of the steps is over,
    and at least what must be collected before the first update.
    """

    def _on_step(self) -> bool:
        if (
            self.num_timesteps >= max(steps // 10, fields.get("learning_starts", 0) + 200)
            and began is None
        ):
            globals()["began"] = time.perf_counter(), self.num_timesteps
        return True


began = None
model = getattr(importlib.import_module(package), name)(
    "MlpPolicy", make_vec_env(env, num_envs), device="cpu", **fields
)
model.learn(steps, callback=Stopwatch())
print(json.dumps({"rate": (model.num_timesteps - began[1]) / (time.perf_counter() - began[0])}))
