"""Our side of ``benchmarks/peers.py sample-factory``.

Prints env steps per second, and how many CPU cores it had meanwhile.
"""

import sys
import time

import jaxrl_dist

algorithm, num_actors, env, num_envs, rollout_length, warm_up, seconds = sys.argv[1:]
once = {"num_epochs": 1, "num_minibatches": 1} if algorithm == "appo" else {}  # IMPALA knows nothing else
config = jaxrl_dist.preset(
    algorithm,
    f"envpool:{env}",
    plan="asynchronous",
    num_actors=int(num_actors),
    num_envs=int(num_envs),
    rollout_length=int(rollout_length),
    report_interval=int(num_envs) * int(rollout_length),
    total_env_steps=10**9,
    evaluation_episodes=0,
    **once,
)
first = began = None
for report in jaxrl_dist.train(config):
    first = first or report
    cpu = time.process_time()
    if began is None and report.wall_time_s - first.wall_time_s >= float(warm_up):
        began, cpu_began = report, cpu
    elif began is not None and report.wall_time_s - began.wall_time_s >= float(seconds):
        passed = report.wall_time_s - began.wall_time_s
        print((report.env_steps - began.env_steps) / passed, (cpu - cpu_began) / passed)
        break
