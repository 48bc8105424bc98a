"""Our side of ``benchmarks/peers.py``. Prints env steps per second, compilation excluded."""

import sys

import jaxrl_dist
from jaxrl_dist.algorithms.ppo import PPO

env, steps, seeds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ppo = PPO(learning_rate=1e-3, num_epochs=4, num_minibatches=4, hidden_sizes=(64, 64), activation="tanh")
sizes = {"num_envs": 4, "rollout_length": 128, "total_env_steps": steps, "evaluation_episodes": 0}
sizes |= {"num_devices": 1, "compile_cache": False}
*_, last = jaxrl_dist.train(jaxrl_dist.Train(ppo, env=env, report_interval=100_000, seeds=seeds, **sizes))
compiling = max(report.metrics["time/compile_s"] for report in last.members or (last,))
print(last.env_steps / (last.wall_time_s - compiling), compiling)
