"""rejax's side of ``scripts/benchmark.py``: ``ALGORITHM ENV STEPS FIELDS``;
runs in rejax's own virtual environment.

Prints JSON: env steps per second, and per second of CPU time, without compiling,
and the seconds of compiling.
"""

import json
import sys
import time

import jax
from rejax import get_algo

name, env, steps, fields = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
seeds = fields.pop("seeds", 1)
if "agent_kwargs" in fields:
    sizes = fields["agent_kwargs"].get("hidden_layer_sizes", ())
    fields["agent_kwargs"]["hidden_layer_sizes"] = tuple(sizes)
algorithm = get_algo(name).create(
    env=env, total_timesteps=steps, eval_freq=steps, skip_initial_evaluation=True, **fields
)
# evaluation is no part of the rate
algorithm = algorithm.replace(eval_callback=lambda algorithm, state, key: ())
train, keys = algorithm.train, jax.random.key(0)
if seeds > 1:
    train, keys = jax.vmap(algorithm.train), jax.random.split(keys, seeds)
began = time.perf_counter()
program = jax.jit(train).lower(keys).compile()
compiling, began, cpu_began = time.perf_counter() - began, time.perf_counter(), time.process_time()
jax.block_until_ready(program(keys))
seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
rates = {"rate": steps * seeds / seconds, "cpu_rate": steps * seeds / cpu_seconds}
print(json.dumps({**rates, "compile_seconds": compiling}))
